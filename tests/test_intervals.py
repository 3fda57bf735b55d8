"""What Timeline.from_intervals takes for intervals, and refuses; bounds of builders and of costs. More in test_sched_timing.py."""
import re

import numpy as np
import pytest

from terapipe_c import schedules
from terapipe_c.schedule import INTERVAL, OPS, Program, Timeline


def test_intervals_at_the_edge_of_what_is_right():
    assert Timeline.from_intervals([], makespan_s=0).num_ranks == 1
    assert Timeline.from_intervals([(0, "F", 0, 0, 0, 1.0, 1.0), (0, "B", 0, 0, 0, 1.0, 3.0)]).makespan_s == 2.0     # of no time
    line = schedules.one_f_one_b(2, 2).simulate({"F": 1.0, "B": 2.0})
    wide = np.zeros(len(line.intervals), [*((name, INTERVAL.fields[name][0]) for name in INTERVAL.names), ("note", "U9")])
    for name in INTERVAL.names:
        wide[name] = line.intervals[name]
    assert np.array_equal(Timeline.from_intervals(wide).intervals, line.intervals)       # more columns than are asked for
    floats = np.array(line.intervals.tolist(), np.float64)
    assert np.array_equal(Timeline.from_intervals(floats).intervals, line.intervals)
    for rows, words in ((wide[["rank", "op", "stage", "slice", "start_s", "end_s"]], "no field 'micro'"),
                        ([(70_000, "F", 0, 0, 0, 0.0, 1.0)], "rank of the intervals is 70000 to 70000: 0 to 65535"),
                        ([(-1, "F", 0, 0, 0, 0.0, 1.0)], "rank of the intervals is -1 to -1"),
                        ([(np.inf, 0, 0, 0, 0, 0.0, 1.0)], "rank of the intervals is inf: a whole number"),
                        ([(0, 0, 1.5, 0, 0, 0.0, 1.0)], "stage of the intervals is 1.5: a whole number"),
                        ([(0, len(OPS), 0, 0, 0, 0.0, 1.0)], f"an interval has operation {len(OPS)}: below {len(OPS)}")):
        with pytest.raises((ValueError, TypeError), match=words):
            Timeline.from_intervals(rows)
    with pytest.raises(TypeError, match="program is 'F': a Program, or None"):
        Timeline.from_intervals([], program="F")
    assert Timeline.from_intervals(line.intervals, program=line.program).program is line.program


def test_names_of_operations_may_be_of_any_kind():
    """Objects in a table of pandas', bytes in one of HDF5: each was refused, with the names that would be right."""
    line = schedules.one_f_one_b(3, 4).simulate({"F": 1.0, "B": 2.0})
    kinds = [(name, INTERVAL.fields[name][0]) for name in INTERVAL.names]
    names = [OPS[op] for op in line.intervals["op"]]
    for kind, given in ((object, names), ("S3", names), ("U3", names), (object, line.intervals["op"].tolist())):
        table = line.intervals.astype([(name, kind if name == "op" else own) for name, own in kinds])
        table["op"] = given
        assert np.array_equal(Timeline.from_intervals(table).intervals, line.intervals)
    listed = [(row["rank"], OPS[row["op"]].encode(), *row.tolist()[2:]) for row in line.intervals]
    assert np.array_equal(Timeline.from_intervals(listed).intervals, line.intervals)
    table = line.intervals.astype([(name, object) for name, _ in kinds])
    for name, cells, words in (("rank", [[1, 2]], "rank of the intervals is [1, 2]: a whole number"), ("op", [["F"]], "operation"),
                               ("start_s", [[1.0], [1.0, 2.0]], "start_s of the intervals is [1.0]: a number would be right")):
        wrong = table.copy()
        for row in range(len(wrong)):
            wrong[name][row] = cells[row % len(cells)]
        with pytest.raises((ValueError, TypeError), match=f"{re.escape(words)}|op of the intervals is"):
            Timeline.from_intervals(wrong)
    for kind in ("S3", "U3", object):
        hidden = np.ma.array(line.intervals.astype([(name, kind if name == "op" else own) for name, own in kinds]))
        hidden["op"] = names
        hidden["op"][2] = np.ma.masked
        with pytest.raises(ValueError, match=r"op of the intervals\[2\] is masked"):      # what lies below was taken for bytes
            Timeline.from_intervals(hidden)
    for wrong in (b"Q", b"\xff", "Q", None):
        with pytest.raises((ValueError, TypeError), match=r"operation 'Q'|operation '\ufffd'|op of the intervals is None"):
            Timeline.from_intervals([(0, wrong, 0, 0, 0, 0.0, 1.0)])


def test_operations_that_overlap_make_a_rank_busy_once():
    """As two streams of one device, or rows that were given twice: it was 200 % busy, and idle for less than no time."""
    rows = [(0, "F", 0, 0, 0, 0.0, 2.0), (0, "F", 0, 1, 0, 1.0, 3.0), (0, "B", 0, 0, 0, 2.0, 4.0), (0, "B", 0, 1, 0, 2.5, 3.5)]
    late = (1, "F", 1, 0, 0, 1.0, 3.0)
    again = [(1, "R", 1, 0, 0, 1.0, 3.0), (1, "R", 1, 1, 0, 1.0, 2.0)]       # of no program, and beside the forward
    for more, idle in (([], 0.0), ([late], 2.0), ([late, *again], 2.0), ([late, late], 2.0)):
        line = Timeline.from_intervals([*rows, *more])
        assert line.makespan_s == 4.0 and line.busy_s.tolist() == [4.0, 2.0][:line.num_ranks] and line.idle_s == idle
        assert sum(line.bubbles.values()) == pytest.approx(idle) and min(line.bubbles.values()) >= 0 and line.efficiency <= 1
    apart = [(0, "F", 0, 0, 0, 0.0, 5.0), (0, "F", 0, 1, 0, 1.0, 2.0), (0, "B", 0, 0, 0, 3.0, 4.0), (0, "B", 0, 1, 0, 6.0, 8.0)]
    assert Timeline.from_intervals(apart).busy_s.tolist() == [7.0]


def test_intervals_that_are_no_program_have_no_bound():
    line = Timeline.from_intervals([(0, "F", 0, 0, 0, 0.0, 1.0)], makespan_s=1.0)
    assert line.program is None and line.lower_bound_s == 0 and set(line.bubbles.values()) == {0.0}
    late = Timeline.from_intervals([(1, "F", 1, 0, 0, 1.0, 2.0), (0, "F", 0, 0, 0, 0.0, 1.0)], ranks=3, makespan_s=4.0)
    assert {cause: s for cause, s in late.bubbles.items() if s} == {"warmup": 1.0 + 4.0, "cooldown": 3.0 + 2.0}


def test_a_measured_bound_is_of_the_backwards_that_were_done():
    """Of slices in one and slices in two the bound takes the less, and what was not done had taken no time at all."""
    program, rng = schedules.dualpipe_v(2, 6), np.random.default_rng(1)
    cost = {op: rng.uniform(1.0, 2.0, (program.num_stages, 6)) for op in "FIW"}
    line = program.simulate({**cost, "B": cost["I"] + cost["W"]})
    for known in (program, None):
        measured = Timeline.from_intervals(line.intervals, program=known)
        assert measured.lower_bound_s == pytest.approx(line.lower_bound_s) and measured.bubbles == pytest.approx(line.bubbles)
    assert line.lower_bound_s > 0.95 * line.makespan_s


@pytest.mark.parametrize("unit", [1.0, 1e-4])
def test_causes_add_up_where_clocks_are_off(unit):
    """A rank whose clock is behind seems to have waited for less than its program explains."""
    ran = schedules.one_f_one_b(3, 4).simulate({"F": 1.0 * unit, "B": 2.0 * unit})
    rows = ran.intervals.copy()
    for name in ("start_s", "end_s"):
        rows[name][rows["rank"] == 0] += 0.25 * unit        # so that all is over earlier, but for rank 0
        rows[name][(rows["rank"] == 0) & (rows["op"] == OPS.index("B"))] -= 0.5 * unit
    line = Timeline.from_intervals(rows, program=ran.program)
    assert line.makespan_s < ran.makespan_s and line.program == ran.program
    assert sum(line.bubbles.values()) == pytest.approx(line.idle_s) and min(line.bubbles.values()) >= 0
    assert line.bubbles["warmup"] == pytest.approx(ran.bubbles["warmup"] * line.idle_s / ran.idle_s)
    assert line.lower_bound_s <= line.makespan_s


def test_a_program_that_was_not_run_is_not_taken_for_it():
    """They differ in one of stage, micro-batch, slice and operation alone, or in the number of ranks."""
    text = "0F0.0 0F1.0 0B0.0 0B1.0"
    pairs = [(schedules.gpipe(2, 2, [1, 2]), schedules.gpipe(2, 2, [2, 1])),
             (schedules.interleaved(2, 2, 2), schedules.hanayo(2, 2, 1)),
             (Program.parse(text), Program.parse("0F0.0 0B0.0 0F1.0 0I1.0 0W1.0")),
             (Program.parse("0F0.0 0R0.0 0B0.0"), Program.parse("0F0.0 0I0.0 0W0.0")),
             (Program.parse("0F0.0 0F0.1 0B0.1 0B0.0"), Program.parse(text)),
             (Program.parse(text), Program.parse("0F0.0 1F0.0 1B0.0 0B0.0")),
             (schedules.gpipe(3, 2), schedules.gpipe(2, 2)), (schedules.gpipe(2, 2), schedules.gpipe(3, 2)),
             (schedules.gpipe(2, 3), schedules.gpipe(2, 2))]
    for given, ran in pairs + [pair[::-1] for pair in pairs]:
        line = ran.simulate({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "R": 1.0})
        measured = Timeline.from_intervals(line.intervals, program=given)
        assert measured.program != given and measured.program == ran, (given, ran)
        assert Timeline.from_intervals(line.intervals, program=ran).program is ran
    twice = np.concatenate([line.intervals, line.intervals])
    twice["rank"][len(line.intervals):] += ran.num_ranks        # replicas: each has run all of it, or nobody has
    assert Timeline.from_intervals(twice, program=ran).program is ran
    assert Timeline.from_intervals(twice[:-1], program=ran).program is None


def test_builders_have_the_bounds_and_defaults_of_their_text():
    one = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "chimera", "bpipe", "dualpipe_v", "pipedream")
    for name in one:
        build = getattr(schedules, name)
        assert build(2, 4) == build(2, 4, 1) == build(2, 4, [1] * 4) == build(np.int8(2), np.uint16(4), np.ones(4, np.uint8)), name
        assert build(2, 4) != build(2, 4, 2)
    for name in ("interleaved", "looped_bfs", "hanayo"):
        build = getattr(schedules, name)
        assert build(2, 4, 2) == build(2, 4, 2, slices=1) != build(2, 4, 2, slices=2)
    for name in (*one, "sliced_1f1b", "seq1f1b", "interleaved", "looped_bfs", "hanayo"):
        more = (1,) if name not in one else ()
        for given, words in (((32768, 4), "ranks is 32768: 1 to 32767"), ((0, 4), "ranks is 0: 1 to 32767"),
                             ((2, 65537), "micro_batches is 65537: 1 to 65536"), ((2, 0), "micro_batches is 0: 1 to 65536")):
            with pytest.raises(ValueError, match=words):
                getattr(schedules, name)(*given, *more)
        if name not in ("sliced_1f1b", "interleaved", "looped_bfs", "hanayo"):
            for slices in (65537, [1, 65537, 1, 1]):
                with pytest.raises(ValueError, match="slices.* is 65537: 1 to 65536"):
                    getattr(schedules, name)(2, 4, slices)
    assert schedules.sliced_1f1b(2, 4, 0) == schedules.one_f_one_b(2, 4) and schedules.sliced_1f1b(2, 4, np.int8(4)).num_ranks == 2
    for split, kind in ((5, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(kind, match=f"split is {split}"):
            schedules.sliced_1f1b(2, 4, split)
    with pytest.raises(ValueError, match="waves is 3: 1 to 2 would be right"):
        schedules.hanayo(16384, 1, 3)


def test_costs_that_nothing_would_read_are_refused():
    program, good = schedules.one_f_one_b(2, 3), {"F": 1.0, "B": 2.0}
    for more, words in (({"comm.latency.back": 1.0}, "cost has 'comm.latency.back' and no 'comm.latency'"),
                        ({"Q": 1.0}, "cost has 'Q': the operations are F B I W"), ({3: 1.0}, "cost has 3: the operations are")):
        with pytest.raises(ValueError, match=words):
            program.simulate({**good, **more})
        with pytest.raises(ValueError, match=words):
            program.makespan({**good, **more})
    assert program.simulate({**good, "comm.latency": 0.5, "comm.latency.back": 0.25, "comm": 0.5}).makespan_s > 0
    assert program.simulate(good, activation_bytes=2.0**61).peak_memory_bytes.tolist() == [2**62, 2**61]
    with pytest.raises(ValueError, match="activation_bytes: rank 0 would hold 9.22e.18 bytes: less than 2.63 would be right"):
        program.simulate(good, activation_bytes=2.0**62)
