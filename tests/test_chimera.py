"""Chimera: two copies of the model in opposite directions. The paper's figures, proofs of the program, bounds, drawings."""

import copy
import itertools
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from mutations import checked, mutate
from sched_oracle import Stuck, Wrong, execute, makespan
from test_sched_timing import random_cost

import terapipe_c as tp
from terapipe_c import schedule, schedules
from terapipe_c.schedules import Program

GOLDEN = Path(__file__).parent / "golden"
EQUAL, USUAL = {"F": 1.0, "B": 1.0}, {"F": 1.0, "B": 2.0}
SHAPES = [(2, 2, 1), (2, 6, 2), (4, 4, 1), (4, 2, [3, 1]), (4, 6, [1, 2, 1, 3, 1, 2]), (6, 12, 1), (8, 10, 1)]


@pytest.mark.parametrize("ranks", range(2, 17, 2))
def test_the_papers_step_bubbles_and_memory(ranks):
    """Table 2 of the paper: bubble ratio (D - 2) / (2 N + D - 2), activations D/2 + 1 to D. Section 3.3's critical path: of D
    micro-batches, D forwards and 2 D - 2 backwards."""
    for units in (1, 2, 3):
        micros = units * ranks
        program = schedules.chimera(ranks, micros)
        line = program.simulate(EQUAL, activation_bytes=1)
        assert line.makespan_s == line.lower_bound_s == 2 * micros + ranks - 2
        assert line.idle_s / (ranks * line.makespan_s) == pytest.approx((ranks - 2) / (2 * micros + ranks - 2))
        assert line.bubbles["warmup"] == line.bubbles["cooldown"] == ranks * (ranks // 2 - 1)
        held = [ranks // 2 + 1 + min(r, ranks - 1 - r) for r in range(ranks)]
        assert line.peak_memory_bytes.tolist() == held and min(held) == ranks // 2 + 1 and max(held) == ranks
    for b in (1.0, 1.5, 2.0, 3.0):
        assert schedules.chimera(ranks, ranks).simulate({"F": 1.0, "B": b}).makespan_s == ranks + (2 * ranks - 2) * b
    for rank in range(ranks):       # half of the waits before the first backward, half behind it
        rows = line.intervals[line.intervals["rank"] == rank]
        back = rows["start_s"][rows["op"] == schedules.OPS.index("B")].min()
        gaps = rows["start_s"][1:] - rows["end_s"][:-1]
        assert rows["start_s"][0] + gaps[rows["start_s"][1:] <= back].sum() == ranks // 2 - 1


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_other_numbers_of_micro_batches(ranks):
    """The last unit may be smaller; it takes 2 D slots all the same, less what its missing micro-batches leave at the end."""
    for micros in range(2, 4 * ranks + 1, 2):
        program = schedules.chimera(ranks, micros)
        rest = micros % ranks or ranks
        line = program.simulate(EQUAL, activation_bytes=1)
        assert line.makespan_s == 2 * micros + 2 * ranks - rest - 2
        assert line.peak_memory_bytes.max() <= ranks
        usual = program.simulate(USUAL)
        assert usual.lower_bound_s <= usual.makespan_s
        if micros <= ranks:
            assert usual.makespan_s < schedules.one_f_one_b(ranks, micros).simulate(USUAL).makespan_s


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
def test_weight_gradients_fill_all_waits_but_the_first(ranks):
    """No order on this placement is faster: the ranks in the middle are reached after ranks / 2 - 1 forwards."""
    cost = {"F": 1.0, "I": 1.0, "W": 1.0}
    for micros in (ranks, 2 * ranks, 4 * ranks):
        program = schedules.chimera(ranks, micros).split(cost, pending=ranks // 2)
        program.check(canonical=True)
        line = program.simulate(cost)
        assert line.makespan_s == line.lower_bound_s == 3 * micros + ranks // 2 - 1
        assert line.makespan_s <= schedules.zb_v(ranks, micros).simulate({op: 0.5 for op in cost}).makespan_s


def test_it_beats_1f1b_where_micro_batches_are_as_many_as_ranks():
    for ranks, figures in ((4, (21.0, 18.0, 16.0)), (8, (45.0, 38.0, 36.0))):
        made = (schedules.one_f_one_b(ranks, ranks), schedules.hanayo(ranks, ranks, 1), schedules.chimera(ranks, ranks))
        took = [p.simulate({k: v / (2 if p is made[1] else 1) for k, v in USUAL.items()}).makespan_s for p in made]
        assert tuple(took) == figures, ranks


@pytest.mark.parametrize("ranks, micros, slices", SHAPES)
def test_every_program_is_proved_and_executes(ranks, micros, slices):
    program = schedules.chimera(ranks, micros, slices)
    assert program.copies == 2 and program.num_stages == 2 * ranks
    assert program.rank_of == (*range(ranks), *reversed(range(ranks)))
    assert program.counts == {op: ranks * sum(program.slices) for op in "FB"}
    for one in (program, program.lower(), program.lower(tied=True), program.split(pending=0), program.split(pending=2).lower(True)):
        one.check(canonical=True)
        assert execute(one)
        assert Program.parse(str(one)) == one and one.copies == 2
        assert Program.from_instructions([one.instructions(r) for r in range(ranks)], keep_slots=True) == one
        assert pickle.loads(pickle.dumps(one)) == one == copy.copy(one)
    lowered = program.lower(tied=True)
    assert lowered.strip() == program and lowered.counts["AR"] == 4 and lowered.counts["OPT"] == 2 * ranks
    saved = program.save_memory(bytes(v % 3 for v in range(2 * ranks)), bytes((v + 1) % 2 for v in range(2 * ranks)))
    for one in (saved, saved.lower(True)):
        one.check(canonical=True)
        assert one.copies == 2 and Program.parse(str(one)) == one


def test_golden_programs():
    for name, program in (("chimera_4x4", schedules.chimera(4, 4)), ("chimera_2x4_lowered", schedules.chimera(2, 4).lower(True))):
        assert str(program) == (GOLDEN / f"{name}.txt").read_text(), name
        assert Program.parse((GOLDEN / f"{name}.txt").read_text()) == program


@pytest.mark.parametrize("ranks, micros, slices", SHAPES)
def test_simulate_equals_relaxation(ranks, micros, slices):
    program = schedules.chimera(ranks, micros, slices)
    rng = np.random.default_rng(ranks * micros)
    offset = np.cumsum((0, *program.slices))
    for messages in (False, True):
        cost = random_cost(rng, program, messages)
        lag = rng.uniform(0, 2, cost["F"].shape)
        line = program.simulate(cost, comm_s=lag)
        right = makespan(program, lambda op, v, q, m, c=cost: c[op][v, offset[q] + m] if op in c else 0.0,
                         lambda v, q, m, lag=lag: lag[v, offset[q] + m])
        assert line.makespan_s == pytest.approx(right, rel=1e-13) and program.makespan(cost, comm_s=lag) == line.makespan_s
        assert line.lower_bound_s <= line.makespan_s
        assert sum(line.bubbles.values()) == pytest.approx(line.idle_s) and min(line.bubbles.values()) >= 0.0
        again = program.lower().simulate(cost, comm_s=lag)
        assert again.makespan_s == line.makespan_s and again.bubbles == pytest.approx(line.bubbles)
        general = program.simulate(cost | {op: 0.0 for op in ("SF", "RF", "SB", "RB") if not messages}, comm_s=lag)
        assert general.makespan_s == line.makespan_s and general.intervals.tobytes() == line.intervals.tobytes()


def test_what_goes_through_the_other_copy_is_no_slice_s_skew():
    """Durations of a stage for micro-batches that go through the other copy are not used."""
    program = schedules.chimera(2, 4)
    cost = np.ones((4, 4))
    cost[:2, 2:] = cost[2:, :2] = 1e3
    line = program.simulate({"F": cost, "B": cost})
    plain = program.simulate({"F": 1.0, "B": 1.0})
    assert line.makespan_s == plain.makespan_s and line.bubbles == plain.bubbles and line.lower_bound_s == plain.lower_bound_s


def test_no_order_beats_the_bound():
    """All orders of two ranks and micro-batches; random ones of more."""
    rng = random.Random(7)
    words = [[f"{v}{op}{q}.0" for v, q in ((r, 0), (3 - r, 1)) for op in "FB"] for r in range(2)]
    for _ in range(6):
        cost = {op: np.array([[float(rng.randrange(1, 9))] * 2 for _ in range(4)]) for op in "FB"}
        bounds, best = set(), np.inf
        for lists in itertools.product(*(itertools.permutations(rank) for rank in words)):
            program = Program.parse("\n".join(" ".join(rank) for rank in lists) + "\n")
            assert program.copies == 2
            try:
                program.check()
            except tp.ScheduleError:
                continue
            line = program.simulate(cost)
            bounds.add(line.lower_bound_s)
            best = min(best, line.makespan_s)
        assert len(bounds) == 1 and bounds.pop() <= best
    for _ in range(40):
        ranks, micros = rng.choice((2, 4)), rng.choice((2, 4))
        base = schedules.chimera(ranks, micros, [rng.choice((1, 2)) for _ in range(micros)])
        cost = {op: np.array([[float(rng.randrange(1, 9)) for _ in range(sum(base.slices))] for _ in range(2 * ranks)])
                for op in ("F", "B", "SF", "RB")}
        bounds, best = {base.simulate(cost).lower_bound_s}, base.makespan(cost)
        for _ in range(60):
            lists = [[x.copy() for x in base.instructions(r)] for r in range(ranks)]
            for _ in range(rng.randrange(1, 8)):
                lists = mutate(rng, lists) or lists
            try:
                other = Program.from_instructions([np.array([x.item() for x in rank], schedule.INSTRUCTION) for rank in lists])
                other.check()
            except tp.ScheduleError:
                continue
            line = other.simulate(cost)
            if other.slices == base.slices:
                bounds.add(line.lower_bound_s)
                best = min(best, line.makespan_s)
        assert len(bounds) == 1 and bounds.pop() <= best


@pytest.mark.parametrize("seed", range(3))
def test_what_check_accepts_executes(seed):
    rng = random.Random(seed)
    bases = [schedules.chimera(2, 4), schedules.chimera(4, 4, [1, 2, 2, 1]), schedules.chimera(2, 2, 2).split(pending=1)]
    bases += [base.lower(tied=bool(i % 2)) for i, base in enumerate(bases)]
    refused = accepted = 0
    for program, error in checked(rng, bases, 700, mutate, keep_slots=lambda: rng.random() < 0.5):
        if error is not None:
            refused += 1
        else:
            accepted += 1
            try:
                assert execute(program) in (True, False)
            except (Stuck, Wrong) as error:
                pytest.fail(f"check accepts what does not run ({error!r}):\n{program}")
    assert refused > 250 and accepted > 5, (refused, accepted)


def test_a_slip_is_named():
    text = str(schedules.chimera(4, 4))
    for wrong, right in (
        (text.replace("7F3.0", "7F1.0"), "stage 7 is of the second copy of the model, which has micro-batches 2 to 3"),
        (text.replace("1F1.0", "1F3.0"), "stage 1 is of the first copy of the model, which has micro-batches 0 to 1"),
        (text.replace("5F3.0 ", ""), "its forward must come before it"),
        (text.replace(" 7B3.0", ""), "stage 7 has 1 of its 2 backwards"),
        (text.replace("4F2.0 ", "").replace("4B2.0 ", ""), "4F2.0 is missing"),
        (text.replace("7F2.0 7B2.0", "7B2.0 7F2.0"), "its forward must come before it"),
        (text.replace("3F0.0 3B0.0 3F1.0", "3F1.0 3F0.0 3B0.0").replace("2F0.0 5F3.0 2F1.0", "2F0.0 5F3.0 2B0.0 2F1.0")
         .replace("2F1.0 2B0.0 5B2.0", "2F1.0 5B2.0"), "deadlock"),
    ):
        assert wrong != text
        with pytest.raises(tp.ScheduleError, match=right):
            Program.parse(wrong).check()
    lowered = str(schedules.chimera(2, 2).lower(True))
    with pytest.raises(tp.ScheduleError, match=r"no AR|deadlock|the other end|every backward"):
        Program.parse(lowered.replace(" 3AR0.0@1", "")).check()
    with pytest.raises(tp.ScheduleError, match="go through one copy"):
        Program.parse(text.replace("0F0.0", "0F0.0a 0F0.0b")).check()


def test_one_copy_stays_one():
    """Programs of one copy placed as V, of as many micro-batches: half of their forwards keep to the halves."""
    for build in (schedules.zb_v, schedules.dualpipe_v):
        assert build(2, 4).copies == build(4, 8).copies == 1
    assert schedules.hanayo(2, 2, 1).copies == schedules.gpipe(4, 2).copies == 1
    assert schedules.hanayo(2, 2, 1) != schedules.chimera(2, 2)


def test_bad_sizes_are_refused():
    for ranks, micros, word in ((3, 4, "ranks is 3: Chimera has an even number"), (1, 4, "ranks is 1"),
                                (4, 5, "micro-batches is 5"), (4, 1, "micro-batches is 1"), (4, 0, "micro_batches is 0")):
        with pytest.raises(ValueError, match=word):
            schedules.chimera(ranks, micros)
    with pytest.raises(ValueError, match="slices has 3 entries"):
        schedules.chimera(4, 4, [1, 2, 3])
    with pytest.raises(tp.ScheduleError, match="no word for two copies"):
        schedules.chimera(2, 2).to_csv()


def test_it_is_drawn(tmp_path):
    line = schedules.chimera(4, 4).lower(True).simulate({**USUAL, "OPT": 0.5, "AR": 0.25})
    for name in ("svg", "html", "chrome_trace"):
        getattr(line, f"to_{name}")(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    again = schedule.Timeline.from_intervals(line.intervals)
    assert again.program is not None and again.program.copies == 2 and again.makespan_s == line.makespan_s


def test_links_that_carry_one_message_at_a_time():
    """Both directions share them: what the first copy sends forward and the second one back goes from the same rank to the same."""
    rng = np.random.default_rng(1)
    for ranks, micros, slices in SHAPES:
        program = schedules.chimera(ranks, micros, slices)
        cost = {op: rng.uniform(0.1, 2.0, (2 * ranks, sum(program.slices))) for op in ("F", "B", "I", "W")}
        latency = rng.uniform(0.0, 1.0, 2 * ranks)
        cost |= {"comm": latency[:, None] + rng.uniform(0.0, 3.0, cost["F"].shape), "comm.latency": latency}
        for one in (program, program.lower(True), program.split(cost, pending=1)):
            line = one.simulate(cost)
            general = one.simulate(cost | {op: 0.0 for op in ("SF", "RF", "SB", "RB")})
            assert line.makespan_s == one.makespan(cost) == general.makespan_s >= line.lower_bound_s
            assert sum(line.bubbles.values()) == pytest.approx(line.idle_s)
        alone = program.simulate({name: value for name, value in cost.items() if name != "comm.latency"})
        assert program.simulate(cost).makespan_s == program.lower().simulate(cost).makespan_s >= alone.makespan_s
