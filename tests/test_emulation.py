"""Emulation: the real engine and communicator carry out what the simulator foretells, with sleep for work."""
import threading

import numpy as np
import pytest

import terapipe_c as tp

MS = 1e-3
V_SHAPE = """0F0.0 0F0.1 3F0.0 3F0.1 3B0.1 3B0.0 0B0.1 0B0.0
1F0.0 1F0.1 2F0.0 2F0.1 2B0.1 2B0.0 1B0.1 1B0.0"""


def uneven(program, seed=0, scale=MS):
    """Seconds of every operation of its own, and of every message."""
    rng = np.random.default_rng(seed)
    shape = program.num_stages, sum(program.slices)
    return {**{op: rng.uniform(0.3, 2.0, shape) * scale for op in "FBIW"}, "comm": rng.uniform(0, 0.5, program.num_stages) * scale,
            "OPT": rng.uniform(0.2, 1.0, program.num_stages) * scale,
            "OPT.norm": rng.uniform(0.1, 0.8, program.num_stages) * scale}  # fmt: skip


CASES = {
    "gpipe": lambda: tp.schedules.gpipe(4, 3, 4),
    "gpipe, split": lambda: tp.schedules.gpipe(3, 2, [3, 5]).split(),
    "1f1b": lambda: tp.schedules.one_f_one_b(4, 6, 2),
    "seq1f1b, split late": lambda: tp.schedules.seq1f1b(3, 4, 3).split(pending=3),
    "interleaved": lambda: tp.schedules.interleaved(2, 4, 3, 2).split(),
    "both ends on one rank": lambda: tp.Program.parse(V_SHAPE),
    "one rank": lambda: tp.schedules.gpipe(1, 3, 2).split(),
}


@pytest.mark.parametrize("name", CASES)
def test_every_operation_runs_when_the_simulator_says(name):
    """Operations are due exactly when simulated; the clock, on a machine that others use, ends within 5 % in one of a few, each of
    which takes twice as long as the one before."""
    program = CASES[name]().lower(False)
    for scale in (1, 2, 4, 8, 16, 32):
        costs = uneven(program, scale=scale * MS)
        found = tp.emulate(program, costs)
        line = program.simulate(costs)
        assert found.predicted_step_time_s == line.makespan_s and found.num_ranks == program.num_ranks
        due = {(rank, op, *unit): (start, end) for rank, op, *unit, start, end in found.trace if op in "FBIW"}
        rows = [row for row in line.intervals.tolist() if tp.schedules.OPS[row[1]] in "FBIW"]
        assert len(rows) == len(due)
        for rank, op, *unit, start, end in rows:
            assert due[rank, tp.schedules.OPS[op], *unit] == pytest.approx((start, end), abs=1e-6)
        assert found.step_time_s >= line.makespan_s - 1e-6  # nobody can be early
        if found.error <= 0.05:
            return
    pytest.fail(f"late each time, the last by {found.error:.0%}")


@pytest.mark.parametrize("order", [tp.schedules.gpipe(3, 2, 2), tp.schedules.chimera(2, 4)], ids=["one copy", "two"])
def test_both_ends_of_a_tied_weight_meet(order):
    """The last rank, done early, once began that sum alone, and then those of replicas: the step was said to end sooner."""
    program = order.lower(True)
    costs = {**uneven(program), "AR": 3 * MS, "OPT": np.linspace(6, 8, program.num_stages) * MS,
             "OPT.sum": np.linspace(1, 7, program.num_stages) * MS}  # fmt: skip
    found, line = tp.emulate(program, costs), program.simulate(costs)
    due = {(rank, op, stage): end for rank, op, stage, _, _, _, end in found.trace if op in ("AR", "OPT")}
    rows = [row for row in line.intervals.tolist() if tp.schedules.OPS[row[1]] in ("AR", "OPT")]
    assert len(rows) == len(due) and found.step_time_s >= line.makespan_s - 1e-6
    for rank, op, stage, _, _, _, end in rows:
        assert due[rank, tp.schedules.OPS[op], stage] == pytest.approx(end, abs=1e-6)


def test_96_stages_and_two_sequences_finish():
    """TeraPipe's setting: more ranks than this machine has cores by far."""
    program = tp.schedules.gpipe(96, 2, [8, 6])
    for scale in (1, 2, 4, 8):
        fwd = np.random.default_rng(0).uniform(0.4, 0.6, (96, 14)) * scale * MS
        found = tp.emulate(program, {"F": fwd, "B": 2 * fwd})
        assert found.num_ranks == 96 and sum(row[1] in "FB" for row in found.trace) == 2 * 96 * 14
        assert found.error >= -1e-6
        if found.error < 0.5:  # 2 % is for a quiet machine, in benchmarks/
            return
    pytest.fail(f"late each time, the last by {found.error:.0%}")


def test_a_wait_that_never_ends_is_a_deadline_and_nothing_is_left_running():
    program = tp.schedules.gpipe(2, 1)
    before = threading.active_count()
    with pytest.raises(tp.DeadlineError, match=r"rank 1 waited 0.5 s"):
        tp.emulate(program, {"F": 100.0, "B": 1e-4}, timeout_s=0.5)  # rank 0 is woken
    assert threading.active_count() == before


def test_a_step_of_more_seconds_than_are_counted_in_nanoseconds_is_refused():
    """It slept for no time at all."""
    for cost in ({"F": 1e300, "B": 1.0}, {"F": 0.0, "B": 0.0, "comm": 1e10}):
        with pytest.raises(ValueError, match=r"the step would take [\d.e+]+ s: at most 9.0072e\+06 s, .* would be right"):
            tp.emulate(tp.schedules.gpipe(2, 1), cost, timeout_s=1.0)
