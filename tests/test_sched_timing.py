"""Timing: the simulator against repeated relaxation, causes of idle time, lower bounds against random legal orders."""

import itertools
import random

import numpy as np
import pytest
import sched_oracle

import terapipe_c as tp
from terapipe_c import schedule, schedules
from terapipe_c.schedule import Timeline
from terapipe_c.schedules import Program

SWAPS = [schedules.OPS.index(op) for op in ("SO", "SI")]


def programs():
    yield schedules.gpipe(3, 2, [2, 3])
    yield schedules.one_f_one_b(4, 5)
    yield schedules.seq1f1b(3, 4, [1, 3, 2, 3])
    yield schedules.interleaved(2, 4, 2, [1, 2, 1, 3])
    yield schedules.seq1f1b(4, 4, 2).split(pending=2)
    yield schedules.interleaved(3, 3, 2).split(pending=1)
    yield schedules.gpipe(1, 2, 3)
    yield schedules.seq1f1b(3, 4, [1, 3, 2, 3]).save_memory(bytes((1, 2, 0)), bytes((0, 1, 2)))
    yield schedules.interleaved(2, 4, 2, [1, 2, 1, 3]).save_memory(bytes(4), bytes((2, 1, 0, 1)))
    for ahead in range(4):
        yield schedules.seq1f1b(3, 4, [1, 3, 2, 3]).save_memory(bytes((1, 2, 0)), bytes((0, 1, 2)), ahead, True)
        yield schedules.interleaved(2, 4, 2, [1, 2, 1, 3]).save_memory(bytes(4), bytes((2, 1, 0, 1)), ahead, True)
        yield schedules.gpipe(2, 3, [2, 1, 2]).save_memory(bytes((0, 2)), bytes((1, 2)), ahead, True).split(pending=1)


def random_cost(rng, program, messages=False):
    shape = (program.num_stages, sum(program.slices))
    return {
        op: rng.uniform(0.1, 3.0, shape)
        for op in ("F", "B", "I", "W", "R", "SO", "SI", *(("SF", "RF", "SB", "RB") if messages else ()))
    }


@pytest.mark.parametrize("part", ["", "comm", "comm.back", "comm.latency", "SF", "RF", "SB", "RB", "I and W"])
def test_seconds_of_stages_alone_are_timed_as_those_of_slices(part):
    """Such programs have a loop of their own (csrc/sched/sim.c), if nothing of them depends on more."""
    rng, count = np.random.default_rng(len(part)), 0
    made = schedules.one_f_one_b(4, 5), schedules.interleaved(2, 4, 2), schedules.seq1f1b(3, 4, 2), schedules.chimera(4, 4)
    for program in made:
        stages, units = program.num_stages, sum(program.slices)
        cost = {op: rng.integers(1, 9, stages) / 4 for op in (("I", "W") if part == "I and W" else ("F", "B"))}
        cost |= {"F": rng.integers(1, 9, stages) / 4, "comm": rng.integers(4, 9, stages) / 4}
        if part.startswith("comm"):
            cost |= {"comm": rng.integers(4, 9, (stages, units)) / 4}
        if part == "comm.latency":
            cost |= {"comm": rng.integers(4, 9, stages) / 4, part: np.full(stages, 0.25)}
        elif part and part not in ("comm", "I and W"):
            cost |= {part: rng.integers(1, 9, (stages, units) if part == "comm.back" else stages) / 4}
        sliced = {key: np.repeat(value[:, None], units, 1) if value.ndim == 1 and key != "comm.latency" else value
                  for key, value in cost.items()}  # fmt: skip
        for lowered in (program, program.lower()):
            seconds = lowered.makespan(cost)
            assert seconds == lowered.simulate(cost).makespan_s == lowered.makespan(sliced)
            count += seconds > 0
    assert count == 8


@pytest.mark.parametrize("program", list(programs()), ids=repr)
def test_simulate_equals_relaxation(program):
    rng = np.random.default_rng(len(program))
    offset = np.cumsum((0, *program.slices))
    for messages, links in itertools.product((False, True), ("none", "stage", "unit")):
        cost = random_cost(rng, program, messages)
        lag = {
            "none": np.zeros(program.num_stages),
            "stage": rng.uniform(0, 2, program.num_stages),
            "unit": rng.uniform(0, 2, cost["F"].shape),
        }[links]
        line = program.simulate(cost, comm_s=lag)
        expected = sched_oracle.makespan(
            program,
            lambda op, v, q, m, cost=cost: cost[op][v, offset[q] + m] if op in cost else 0.0,
            lambda v, q, m, lag=lag: lag[v] if lag.ndim == 1 else lag[v, offset[q] + m],
        )
        assert line.makespan_s == pytest.approx(expected, rel=1e-13)
        assert program.makespan(cost, comm_s=lag) == line.makespan_s
        assert line.lower_bound_s <= line.makespan_s * (1 + 1e-12)
        assert sum(line.bubbles.values()) == pytest.approx(line.idle_s, abs=1e-9)
        assert min(line.bubbles.values()) >= 0.0 and tuple(line.bubbles) == schedule.CAUSES
        ready = program.lower()
        lowered = ready.simulate(cost, comm_s=lag)
        if "&&" in str(program):                    # two places by slots, which lowering assigns
            right = sched_oracle.makespan(
                ready,
                lambda op, v, q, m, cost=cost: cost[op][v, offset[q] + m] if op in cost else 0.0,
                lambda v, q, m, lag=lag: lag[v] if lag.ndim == 1 else lag[v, offset[q] + m],
            )
            assert lowered.makespan_s == pytest.approx(right, rel=1e-13) and lowered.makespan_s <= line.makespan_s * (1 + 1e-12)
            assert ready.makespan(cost, comm_s=lag) == lowered.makespan_s and lowered.lower_bound_s <= lowered.makespan_s
        else:
            assert lowered.makespan_s == line.makespan_s and lowered.bubbles == pytest.approx(line.bubbles, abs=1e-9)
        check_intervals(program, line, cost, lag)


def check_intervals(program, line, cost, lag):
    rows = line.intervals
    offset = np.cumsum((0, *program.slices))
    assert len(rows) == len(program) and rows["end_s"].max() <= line.makespan_s
    for rank in range(program.num_ranks):
        mine = rows[rows["rank"] == rank]
        beside = np.isin(mine["op"], SWAPS) & (program.instructions(rank)["flags"] & 8 != 0)
        for of_one in (mine[beside], mine[~beside]):                           # its copier, and itself
            assert (of_one["start_s"][1:] >= of_one["end_s"][:-1] - 1e-12).all()
        for name in ("op", "stage", "micro", "slice"):
            assert (mine[name] == program.instructions(rank)[name]).all()
        took = mine["end_s"] - mine["start_s"]
        saving = np.isin(mine["op"], [schedules.OPS.index(op) for op in ("R", "SO", "SI")])
        assert took[~saving].sum() == pytest.approx(line.busy_s[rank])
    for cause, ops in (("recompute", ("R",)), ("swap", ("SO", "SI"))):
        mine = rows[np.isin(rows["op"], [schedules.OPS.index(op) for op in ops])]
        took = (mine["end_s"] - mine["start_s"]).sum()
        if cause == "swap" and len(mine) and "&" in str(program):
            without = program.simulate({**cost, "SO": 0.0, "SI": 0.0}, comm_s=lag).makespan_s
            took = program.num_ranks * (line.makespan_s - without)
        assert took == pytest.approx(line.bubbles[cause], abs=1e-9)
    if "SO" not in program.counts or "&" not in str(program):
        assert line.work_s == pytest.approx(line.busy_s.sum() + line.bubbles["recompute"] + line.bubbles["swap"])
    for row in rows:
        seconds = cost[schedules.OPS[row["op"]]][row["stage"], offset[row["micro"]] + row["slice"]]
        assert row["end_s"] - row["start_s"] == pytest.approx(seconds)


def test_the_end_of_a_step():
    """AR: both ends meet. OPT waits for every rank."""
    program = schedules.one_f_one_b(3, 4).lower(tied=True)
    cost = {"F": 1.0, "B": 2.0, "AR": 0.5, "OPT": np.array([1.0, 4.0, 2.0])}
    line = program.simulate(cost)
    assert line.makespan_s == 3.0 * 6 + 0.5 + 4.0 == program.makespan(cost)
    ends = line.intervals[line.intervals["op"] == schedules.OPS.index("OPT")]
    assert (ends["start_s"] == 18.5).all()
    assert line.lower_bound_s <= line.makespan_s
    assert sum(line.bubbles.values()) == pytest.approx(line.idle_s)
    split = schedules.one_f_one_b(3, 1).split().lower(tied=True)     # and not the rank between, which has work left
    later = split.simulate(late := {"F": 1.0, "I": 1.0, "W": np.array([0.5, 9.0, 0.5]), "AR": 5.0, "OPT": 1.0})
    last, sums = ({rank: (t["start_s"], t["end_s"]) for rank in range(3) for t in later.intervals
                   if t["rank"] == rank and schedules.OPS[t["op"]] == op} for op in "W AR".split())
    assert sums[0][0] == sums[2][0] == max(last[0][1], last[2][1]) < last[1][1]
    assert later.makespan_s == split.makespan(late) == max(last[1][1], sums[0][1]) + 1.0


def test_costs_in_every_shape_say_the_same():
    program = schedules.seq1f1b(3, 2, [3, 2])
    f = np.array([1.0, 2.0, 3.0])
    by_slice = f[:, None] * np.array([[1.0, 1.0, 1.0]])
    expected = program.simulate({"F": f, "B": 2.0}).makespan_s
    assert program.simulate({"F": by_slice, "B": 2.0}).makespan_s == expected
    assert (
        program.simulate({"F": np.tile(f[:, None], (1, 5)), "I": 1.5, "W": np.full((3, 3), 0.5)}).makespan_s == expected
    )
    assert program.simulate({"F": f.astype(np.float32), "B": 2}).makespan_s == expected

    class Costs:
        def durations(self, asked):
            assert asked is program
            return {"F": f, "B": 2.0, "comm": 0.25}

    assert program.simulate(Costs()).makespan_s == program.simulate({"F": f, "B": 2.0}, comm_s=0.25).makespan_s
    assert program.makespan([{"F": f, "B": 2.0}, {"F": f, "B": 4.0}]).shape == (2,)


def test_a_message_takes_the_seconds_of_the_stage_that_sends_it():
    """Which of its two stages a link's seconds belong to stood nowhere; gradients have a place of their own."""
    free, program = {"F": 0.0, "B": 0.0}, schedules.gpipe(3, 1)
    for sender, starts in ((0, [0, 1, 1, 1, 1, 1]), (1, [0, 2, 0, 1, 1, 1]), (2, [0, 1, 0, 1, 0, 0])):
        line = program.simulate(free, comm_s=np.eye(3)[sender])
        assert line.intervals["start_s"].tolist() == starts, sender      # F and B of rank 0, of rank 1, of rank 2
    for argument in ("comm_s: ", "activation_bytes: "):
        assert argument in (Program.simulate.__doc__ or "")


def test_bad_costs_are_refused():
    program = schedules.gpipe(2, 2, 3)
    for cost, word in (
        ({"F": 1.0}, "no 'B'"),
        ({"F": 1.0, "B": 1.0, "X": 1.0}, "'X'"),
        ({"F": -1.0, "B": 1.0}, "F"),
        ({"F": np.nan, "B": 1.0}, "nan"),
        ({"F": np.ones((2, 4)), "B": 1.0}, "shape"),
        ({"F": "fast", "B": 1.0}, "fast"),
        (3.0, "float"),
    ):
        with pytest.raises((ValueError, TypeError), match=word):
            program.simulate(cost)
    with pytest.raises(ValueError, match="comm_s"):
        program.simulate({"F": 1.0, "B": 1.0}, comm_s=np.ones(3))
    for wrong in (float("nan"), -1.0, float("inf")):
        for time in (program.simulate, program.makespan):
            with pytest.raises(tp.InvalidValueError, match=f"comm_s.* is {wrong:g}"):
                time({"F": 1.0, "B": 1.0}, comm_s=wrong)
            for name in ("comm.a", "comm.b", "comm.back", "comm.guest", "comm.latency", "F.a", "F.b", "OPT.sum", "OPT.norm"):
                with pytest.raises(tp.InvalidValueError, match=f"{name}.* is {wrong:g}"):
                    time({"F": 1.0, "B": 1.0, name: wrong})
    with pytest.raises(ValueError, match="activation_bytes"):
        program.simulate({"F": 1.0, "B": 1.0}, activation_bytes=-1)
    with pytest.raises(ValueError):
        Program.parse("0F0.1 0F0.0 0B0.1 0B0.0").simulate({"F": 1.0, "B": 1.0})
    with pytest.raises(ValueError, match="deadlock"):
        Program.parse("1F0.0 0F0.0 0B0.0 1B0.0").simulate({"F": 1.0, "B": 1.0})
    with pytest.raises(ValueError, match="deadlock"):
        Program.parse("1F0.0 0F0.0 0B0.0 1B0.0").makespan({"F": 1.0, "B": 1.0})


# ---- causes -----------------------------------------------------------------------------------------------------------------


def test_each_cause_is_named_where_it_is_the_only_one():
    ranks, micros = 4, 8
    line = schedules.one_f_one_b(ranks, micros).simulate({"F": 1.0, "B": 2.0})
    only = {cause: seconds for cause, seconds in line.bubbles.items() if seconds}
    assert only == {"warmup": pytest.approx(18.0), "cooldown": pytest.approx(18.0)}
    heavy = np.array([1.0, 1.0, 3.0, 1.0])
    bubbles = schedules.one_f_one_b(ranks, micros).simulate({"F": heavy, "B": 2 * heavy}).bubbles
    assert (
        bubbles["imbalance"] == pytest.approx(3 * micros * (3 * 3.0 - 3.0))
        and bubbles["slice_skew"] == bubbles["comm"] == 0
    )
    uneven = np.tile([1.0, 1.0, 4.0], (ranks, 1))
    bubbles = schedules.gpipe(ranks, 1, 3).simulate({"F": uneven, "B": uneven}).bubbles
    assert bubbles["slice_skew"] == pytest.approx(ranks * 2 * (ranks - 1) * (4.0 - 2.0)) and bubbles["imbalance"] == 0
    with_links = schedules.gpipe(ranks, 3).simulate({"F": 1.0, "B": 1.0}, comm_s=0.5)
    assert with_links.bubbles["comm"] == pytest.approx(ranks * 6 * 0.5)
    again = Program.parse("0F0.0 0F1.0 0R0.0 0B0.0 0R1.0 0B1.0")
    line = again.simulate({"F": 1.0, "B": 2.0, "R": 0.75})
    assert line.bubbles["recompute"] == line.idle_s == pytest.approx(1.5) and line.busy_s.tolist() == [6.0]


def test_adding_up_gradients_is_no_work():
    """Of a weight that two ranks hold (AR), and of replicas (OPT.sum, a part of OPT): the ranks wait for links."""
    program = schedules.one_f_one_b(3, 4).split().lower(True)
    assert program.counts["AR"] == 2
    cost = {"F": 1.0, "I": 1.0, "W": 1.0, "OPT": 0.5}
    plain = program.simulate(cost)
    tied = program.simulate({**cost, "AR": 0.25})
    np.testing.assert_allclose(tied.busy_s, plain.busy_s)
    assert tied.bubbles["comm"] == pytest.approx(3 * 0.25) and plain.bubbles["comm"] == 0    # the rank between waits as long
    parts = np.array([1.0, 3.0, 2.0])
    summed = program.simulate({**cost, "AR": 0.25, "OPT": 0.5 + parts, "OPT.sum": parts})
    np.testing.assert_allclose(summed.busy_s, plain.busy_s)
    assert summed.bubbles["comm"] == pytest.approx(3 * (summed.makespan_s - plain.makespan_s))
    for line in (tied, summed):        # what the others waited for was imbalance
        assert line.bubbles["imbalance"] == pytest.approx(plain.bubbles["imbalance"])
        assert sum(line.bubbles.values()) - line.bubbles["comm"] == pytest.approx(sum(plain.bubbles.values()))
    # each rank adds up its own before all meet: as if the sums were behind its last W, and then the updates
    ends = plain.intervals[plain.intervals["op"] == schedules.OPS.index("W")]
    bodies = [ends["end_s"][ends["rank"] == rank].max() for rank in range(3)]
    met = max(max(bodies[0], bodies[2]) + 0.25 + parts[0], bodies[1] + parts[1], max(bodies[0], bodies[2]) + 0.25 + parts[2])
    assert summed.makespan_s == program.makespan({**cost, "AR": 0.25, "OPT": 0.5 + parts, "OPT.sum": parts}) == met + 0.5
    assert summed.lower_bound_s <= summed.makespan_s < program.makespan({**cost, "AR": 0.25, "OPT": 0.5 + parts})
    assert summed.idle_s == pytest.approx(sum(summed.bubbles.values())) and summed.efficiency < plain.efficiency
    whole = program.simulate({**cost, "OPT": 0.5, "OPT.sum": 7.0})         # no more than all of it
    np.testing.assert_allclose(whole.busy_s, plain.busy_s - 0.5)
    with pytest.raises(ValueError, match=r"seconds of OPT\.sum on stage 1.* is -1"):
        program.simulate({**cost, "OPT.sum": np.array([0.0, -1.0, 0.0])})


@pytest.mark.parametrize("order", [schedules.dualpipe_v(2, 6), schedules.one_f_one_b(2, 4), schedules.bpipe(4, 6)],
                         ids=["mixed", "plain", "guests"])
def test_the_bound_has_the_sums_of_replicas(order):
    """It once lacked them where a program has guests, or B of some slices and I and W of others."""
    program = order.lower(False)
    sums = np.linspace(100, 200, program.num_stages)
    line = program.simulate({"F": 1.0, "I": 1.0, "W": 1.0, "OPT": sums + 1, "OPT.sum": sums})
    least = max(np.bincount(program.rank_of, sums))
    assert line.makespan_s >= line.lower_bound_s > least + 1
    assert line.lower_bound_s == pytest.approx(line.makespan_s, rel=0.02)


def test_ranks_measure_their_gradients_before_they_meet():
    """OPT.norm, a part of OPT: who is done earlier has measured its gradients earlier, and only then waits for the others."""
    program = schedules.gpipe(2, 1).lower()
    cost = {"F": 1.0, "B": np.array([5.0, 1.0]), "OPT": np.array([1.0, 4.0])}   # rank 0 is done after 8 seconds, rank 1 after 3
    assert program.makespan(cost) == 8 + 4
    assert program.makespan({**cost, "OPT.norm": cost["OPT"]}) == 8 + 1 == program.makespan({**cost, "OPT.norm": 7.0})
    line = program.simulate({**cost, "OPT.norm": np.array([1.0, 3.0])})         # they meet after 9; then rank 1 updates
    assert line.makespan_s == 9 + 1 and line.idle_s == pytest.approx(sum(line.bubbles.values()))
    ends = line.intervals[line.intervals["op"] == schedules.OPS.index("OPT")]
    assert ends["start_s"].tolist() == [8.0, 6.0] and ends["end_s"].tolist() == [9.0, 10.0]
    late = program.simulate({**cost, "OPT": np.array([1.0, 9.0]), "OPT.norm": np.array([0.5, 8.0])})  # rank 1 measures longest
    assert late.makespan_s == 3 + 9 and late.lower_bound_s <= late.makespan_s
    with pytest.raises(ValueError, match=r"seconds of OPT\.norm on stage 1.* is -1"):
        program.simulate({**cost, "OPT.norm": np.array([0.0, -1.0])})


def test_causes_sum_to_the_idle_time_where_some_slices_have_b_and_others_i_and_w():
    """Means over all slices, not of what is done, once left the busiest rank less work than it has, and what never was idle was put
    down to unlike slices."""
    rng, skewed = np.random.default_rng(4), 0
    line = schedules.dualpipe_v(1, 2, [1, 2]).simulate({op: np.array([[1.0, 2.0], [3.0, 4.0]]) for op in "FBIW"})
    assert line.idle_s == 0 and not any(line.bubbles.values())
    for _ in range(60):
        ranks = int(rng.integers(1, 4))
        micros = 2 * ranks + int(rng.integers(0, 3))
        slices = [int(n) for n in rng.integers(1, 4, micros)]
        program = schedules.dualpipe_v(ranks, micros, slices)
        cost = {op: rng.uniform(0.1, 2.0, (2 * ranks, max(slices))) for op in "FBIW"}
        line = program.simulate(cost, comm_s=float(rng.choice([0.0, 0.3])))
        assert sum(line.bubbles.values()) == pytest.approx(line.idle_s, abs=1e-9) and min(line.bubbles.values()) >= 0
        skewed += line.bubbles["slice_skew"] > 0
    assert skewed > 20


def test_measured_intervals_are_explained_like_simulated_ones():
    rng = np.random.default_rng(3)
    program = schedules.seq1f1b(3, 3, [2, 3, 1]).save_memory(bytes((1, 0, 0)), bytes((0, 1, 2)))
    line = program.simulate(random_cost(rng, program), comm_s=0.3)
    measured = Timeline.from_intervals(line.intervals)
    assert measured.makespan_s == line.makespan_s and measured.program == program
    for cause in ("imbalance", "slice_skew", "recompute", "swap", "comm"):
        assert measured.bubbles[cause] == pytest.approx(line.bubbles[cause], abs=1e-9)
    assert sum(measured.bubbles.values()) == pytest.approx(measured.idle_s)
    rows = [
        (
            int(r["rank"]),
            schedules.OPS[r["op"]],
            int(r["stage"]),
            int(r["micro"]),
            int(r["slice"]),
            float(r["start_s"]) + 7.0,
            float(r["end_s"]) + 7.0,
        )
        for r in line.intervals
    ]
    rng.shuffle(rows)
    rows.append((0, "SF", 0, 0, 0, 7.1, 7.2))
    other = Timeline.from_intervals(rows)
    assert other.bubbles == pytest.approx(measured.bubbles) and other.busy_s == pytest.approx(line.busy_s)
    lowered = (
        schedules.one_f_one_b(3, 4).lower(tied=True).simulate({"F": 1.0, "B": 2.0, "AR": 0.5, "OPT": 1.0}, comm_s=0.25)
    )
    measured = Timeline.from_intervals(lowered.intervals)
    assert measured.bubbles["comm"] == pytest.approx(lowered.bubbles["comm"])


def test_a_program_is_not_taken_for_another_that_ran():
    """Of the same micro-batches, with other stages, other operations, or not all of its replicas' rows."""
    looped, up_and_down = schedules.interleaved(2, 2, 2), schedules.hanayo(2, 2, 1)
    again, split = (Program.parse(" ".join(f"0F{q}.0 0{x}{q}.0 0{y}{q}.0" for q in (0, 1))) for x, y in ("RB", "IW"))
    for ran, given in ((looped, up_and_down), (split, again), (again, split)):
        line = ran.simulate({"F": 1.0, "B": 2.0, "R": 1.0, "I": 1.0, "W": 1.0})
        assert Timeline.from_intervals(line.intervals, program=given).program == ran
    rows = np.concatenate([line.intervals, line.intervals])
    rows["rank"][6:] = 1
    assert Timeline.from_intervals(rows, program=again).program == again
    assert Timeline.from_intervals(rows[:-1], program=again).program is None


def test_a_cut_off_trace_still_adds_up():
    line = schedules.one_f_one_b(3, 4).simulate({"F": 1.0, "B": 2.0})
    cut = Timeline.from_intervals(line.intervals[3:], ranks=3, makespan_s=line.makespan_s)
    assert cut.program is None and sum(cut.bubbles.values()) == pytest.approx(cut.idle_s)
    empty = Timeline.from_intervals([], ranks=2, makespan_s=1.0)
    assert empty.idle_s == empty.bubbles["warmup"] == 2.0 and empty.efficiency == 0.0
    for rows in (
        [(0, "Q", 0, 0, 0, 0.0, 1.0)],
        [(0, "F", 0, 0, 0, 1.0, 0.0)],
        [(0, "F")],
        [(5, "F", 0, 0, 0, 0.0, 1.0)],
    ):
        with pytest.raises(ValueError):
            Timeline.from_intervals(rows, ranks=2)


# ---- bounds -----------------------------------------------------------------------------------------------------------------


def random_order(rng, ranks, chunks, slices, split):
    """A random legal program: data dependencies and slice order alone decide what may come next."""
    stages = ranks * chunks
    back = [(q, m) for q, n in enumerate(slices) for m in reversed(range(n))]
    done, lists = set(), [[] for _ in range(ranks)]
    forward = {(v, q): 0 for v in range(stages) for q in range(len(slices))}
    grad, weight = [0] * stages, [0] * stages

    def choices():
        for v in range(stages):
            for q, n in enumerate(slices):
                m = forward[v, q]
                if m < n and (v == 0 or ("F", v - 1, q, m) in done):
                    yield "F", v, q, m
            if grad[v] < len(back):
                q, m = back[grad[v]]
                if ("F", v, q, m) in done and (v == stages - 1 or ("I", v + 1, q, m) in done):
                    yield "I" if split else "B", v, q, m
            if split and weight[v] < grad[v]:
                yield "W", v, *back[weight[v]]

    while True:
        ready = list(choices())
        if not ready:
            break
        op, v, q, m = rng.choice(ready)
        if op == "F":
            forward[v, q] += 1
        elif op == "W":
            weight[v] += 1
        else:
            grad[v] += 1
        done.add(("I" if op == "B" else op, v, q, m))
        lists[v % ranks].append(f"{v}{op}{q}.{m}")
    return Program.parse("\n".join(" ".join(words) for words in lists) + "\n")


@pytest.mark.parametrize("split", [False, True])
def test_no_order_beats_the_bound(split):
    rng = random.Random(11 + split)
    numbers = np.random.default_rng(5)
    nearest = 1.0
    for _ in range(60):
        ranks, chunks = rng.choice((1, 2, 3)), rng.choice((1, 1, 2))
        slices = [rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 3)))]
        shape = (ranks * chunks, sum(slices))
        cost = {op: numbers.integers(1, 9, shape).astype(float) for op in ("F", "I", "W", "SF", "RB")}
        lag = numbers.integers(0, 4, ranks * chunks).astype(float)
        bounds = set()
        best = np.inf
        for _ in range(20):
            program = random_order(rng, ranks, chunks, slices, split)
            program.check()
            line = program.simulate(cost, comm_s=lag)
            bounds.add(line.lower_bound_s)
            best = min(best, line.makespan_s)
        assert len(bounds) == 1, "the bound depends on the order"
        assert bounds.pop() <= best + 1e-9
        nearest = min(nearest, 1 - line.lower_bound_s / best)
    assert nearest < 0.02  # it is not an idle bound: some order comes to it


def test_bound_is_exact_where_a_closed_form_is_known():
    for ranks, micros in ((1, 3), (3, 5), (6, 2)):
        line = schedules.one_f_one_b(ranks, micros).simulate({"F": 1.0, "B": 2.0})
        assert line.lower_bound_s == line.makespan_s
    rng = np.random.default_rng(9)
    f, b = rng.uniform(1, 5, (1, 6)), rng.uniform(1, 5, (1, 6))
    line = schedules.gpipe(5, 1, 6).simulate({"F": np.tile(f, (5, 1)), "B": np.tile(b, (5, 1))})
    assert line.lower_bound_s == pytest.approx(line.makespan_s)


def test_the_bound_takes_the_cheaper_backward_where_a_program_has_both():
    """A whole backward may be quicker than its two halves, and some slices have the one, others the others."""
    for text in ("0F0.0 0F0.1 0B0.1 0I0.0 0W0.0", "0F0.0 0F1.0 0B0.0 0I1.0 0W1.0\n1F0.0 1B0.0 1F1.0 1B1.0"):
        program = Program.parse(text)
        for cost in ({"B": 1.0, "I": 2.0, "W": 3.0}, {"B": 9.0, "I": 2.0, "W": 3.0}, {"B": 3.0, "I": 2.0, "W": 3.0}):
            line = program.simulate({"F": 1.0, **cost})
            assert line.lower_bound_s <= line.makespan_s


def test_a_rank_updates_all_of_its_stages_in_the_bound():
    program = schedules.interleaved(2, 4, 2).lower()
    line = program.simulate({"F": 1.0, "B": 2.0, "OPT": [5.0, 5.0, 7.0, 7.0]})
    assert line.makespan_s >= line.lower_bound_s >= 4 * 2 * 3.0 + 12.0


def test_the_last_weight_gradients_are_on_the_longest_path():
    cost = {"F": 1.0, "I": 1.0, "W": 10.0}
    line = schedules.one_f_one_b(2, 1).split(cost, pending=0).simulate(cost)
    assert line.lower_bound_s == line.makespan_s == 14.0


def test_rounding_puts_no_bound_above_the_step():
    """The bound adds the same seconds in another order: `Plan.gap` was -4e-13 %."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        seconds = {"F": rng.uniform(0.1, 1.0), "I": rng.uniform(0.1, 1.0), "W": rng.uniform(0.1, 1.0)}
        line = schedules.zb_v(2, 6).simulate(seconds)
        single = schedules.gpipe(1, 7, 3).simulate({"F": rng.uniform(0.1, 1.0, (1, 3)), "B": rng.uniform(0.1, 1.0, (1, 3))})
        assert line.lower_bound_s <= line.makespan_s and single.lower_bound_s <= single.makespan_s


# ---- invariances --------------------------------------------------------------------------------------------------------------


def test_gradients_wait_in_the_same_places_whatever_the_costs_are_multiplied_by():
    """Whole numbers of a unit, so that much comes at the same time: rounding decided what came first, and a step was up to 0.5 %
    slower for costs in other units."""
    rng = np.random.default_rng(0)
    for i in range(60):
        ranks, micros = int(rng.integers(2, 5)), int(rng.integers(2, 8))
        program = (schedules.one_f_one_b if i % 2 else schedules.gpipe)(ranks, micros)
        costs = {op: np.repeat(rng.integers(1, 6, (ranks, 1)) * 1e-5, micros, axis=1) for op in "FIW"}
        costs["comm"] = np.full(ranks, rng.integers(0, 3) * 1e-5)
        for pending in (1, 2, 4):
            split = program.split(costs, pending=pending)
            for scale in (1000.0, 1e-6, 1 / 3):
                assert program.split({op: scale * seconds for op, seconds in costs.items()}, pending=pending) == split


def test_scaling_and_monotony():
    rng = np.random.default_rng(2)
    for program in programs():
        cost = random_cost(rng, program)
        once = program.simulate(cost, comm_s=0.5)
        twice = program.simulate({op: 4 * seconds for op, seconds in cost.items()}, comm_s=2.0)
        assert twice.makespan_s == 4 * once.makespan_s and twice.lower_bound_s == 4 * once.lower_bound_s
        more = {op: seconds.copy() for op, seconds in cost.items()}
        more["F"][0, 0] += 1.0
        assert program.simulate(more, comm_s=0.5).makespan_s >= once.makespan_s


def test_a_large_program_in_little_memory():
    program = schedules.seq1f1b(32, 128, 16)
    line = program.simulate({"F": 1.0, "B": 2.0}, activation_bytes=1)
    assert line.makespan_s == 3.0 * (128 * 16 + 31)
    assert len(line.intervals) == len(program) == 2 * 32 * 128 * 16


def test_the_short_cut_for_plain_programs_is_the_general_simulation():
    """Copies that take 0 seconds send a program the general way (simulate.c): the same bits, whatever the schedule."""
    rng, count = np.random.default_rng(31), 0
    free = {op: 0.0 for op in ("SF", "RF", "SB", "RB")}
    for i in range(280):
        ranks, micros, slices = (int(rng.integers(1, most)) for most in (6, 8, 4))
        build = (schedules.gpipe, schedules.one_f_one_b, schedules.seq1f1b, schedules.zb_h1, schedules.zb_h2, schedules.zb_v,
                 lambda r, m, s, w=1 + i % 3: schedules.hanayo(r, m, w, s))[i % 7]  # fmt: skip
        program = build(ranks, micros, slices)
        if rng.random() < 0.5:
            program = program.lower()
        shape = (program.num_stages, micros * slices) if rng.random() < 0.5 else (program.num_stages, 1)
        cost = {op: np.broadcast_to(rng.uniform(0, 2, shape), (program.num_stages, micros * slices)).copy()
                for op in (("F", "B", "I", "W", "OPT") if i % 2 else ("F", "I", "W"))}  # fmt: skip
        comm = (0.0, 0.3, rng.uniform(0, 1, program.num_stages))[i % 3]
        if i % 4 == 1:
            cost["OPT.norm"] = cost["OPT"] * rng.uniform(0, 1.1)
        plain, general = program.simulate(cost, comm), program.simulate(cost | free, comm)
        assert plain.makespan_s == general.makespan_s == program.makespan(cost, comm)
        assert plain.bubbles == general.bubbles and plain.lower_bound_s == general.lower_bound_s
        assert plain.intervals.tobytes() == general.intervals.tobytes() and list(plain.busy_s) == list(general.busy_s)
        count += 1
    assert count == 280


def test_a_cell_that_is_no_amount_is_named():
    program = schedules.gpipe(2, 2)
    bad = np.ones((2, 2))
    bad[1, 0] = -3.0
    with pytest.raises(ValueError, match=r"activation_bytes\[1, 0\] is -3"):
        program.simulate({"F": 1.0, "B": 2.0}, activation_bytes=bad)
    with pytest.raises(ValueError, match=r"activation_bytes is nan"):
        program.simulate({"F": 1.0, "B": 2.0}, activation_bytes=float("nan"))
    with pytest.raises(ValueError, match=r"seconds of F\[1, 0\] is -3"):
        program.makespan([{"F": 1.0, "B": 2.0}, {"F": bad, "B": 2.0}])


def test_seconds_beyond_a_double_are_refused():
    """They gave a timeline of infinite length without idle time, which could not be drawn."""
    program = schedules.gpipe(3, 4)
    with pytest.raises(ValueError, match="beyond what a double holds"):
        program.simulate({"F": 1e308, "B": 1e308})
    with pytest.raises(ValueError, match="beyond what a double holds"):
        program.makespan([{"F": 1.0, "B": 1.0}, {"F": 1e308, "B": 1e308}])
    assert np.isfinite(program.simulate({"F": 1e306, "B": 1e306}).makespan_s)


def later_sends(program, rng):
    """The program with some of its sends behind what came after them on their rank, as often as check lets them stand there."""
    ranks = [line.split() for line in str(program).splitlines()]
    for line in ranks:
        for _ in range(2 * len(line)):
            k = rng.randrange(len(line) - 1)
            if "SF" not in line[k] and "SB" not in line[k]:
                continue
            line[k], line[k + 1] = line[k + 1], line[k]
            try:
                Program.parse("\n".join(" ".join(words) for words in ranks)).check()
            except tp.ScheduleError:
                line[k], line[k + 1] = line[k + 1], line[k]
    return Program.parse("\n".join(" ".join(words) for words in ranks))


def test_a_send_behind_the_next_operation_leaves_then_in_both_simulators():
    """The one that evaluates again and again took every message to leave with what makes it."""
    text = str(schedules.one_f_one_b(2, 2).lower())
    moved = Program.parse(text.replace("0SF0.0@1 0F1.0 ", "0F1.0 0SF0.0@1 "))
    moved.check()
    assert moved.makespan({"F": 1.0, "B": 1.0}) == moved.simulate({"F": 1.0, "B": 1.0}).makespan_s == 7.0
    given = random.Random(1)
    cases = [program for program in programs() if program.num_ranks > 1]
    cases += [schedules.zb_v(2, 6), schedules.dualpipe_v(2, 6), schedules.chimera(4, 4), schedules.bpipe(4, 6),
              schedules.sliced_1f1b(4, 6, 2)]
    differs = 0
    for program in cases:
        rng = np.random.default_rng(len(program))
        ready = program.lower()
        moved = later_sends(ready, given)
        for messages, latency in itertools.product((False, True), repeat=2):
            cost = random_cost(rng, program, messages)
            if latency:
                cost["comm.latency"] = rng.uniform(0, 1, program.num_stages)
            lag = rng.uniform(0, 2, program.num_stages)
            assert moved.makespan(cost, comm_s=lag) == moved.simulate(cost, comm_s=lag).makespan_s, moved
            assert ready.makespan(cost, comm_s=lag) == ready.simulate(cost, comm_s=lag).makespan_s
            differs += moved.makespan(cost, comm_s=lag) != ready.makespan(cost, comm_s=lag)
    assert differs > len(cases)
