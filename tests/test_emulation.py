"""Emulation: the real engine and communicator carry out what the simulator foretells, with sleep for work."""
import json
import threading

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core

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


@pytest.mark.parametrize("name", CASES)
def test_the_events_respect_every_dependency(name):
    program = CASES[name]().lower(False)
    costs = uneven(program, 1, 0.2 * MS)
    trace = tp.emulate(program, costs).trace
    assert len(trace) == sum(len(program.instructions(rank)) for rank in range(program.num_ranks))
    for rank in range(program.num_ranks):
        mine = [row for row in trace if row[0] == rank]
        order = [(_core.OPS[i["op"]], i["stage"], i["micro"], i["slice"]) for i in program.instructions(rank)]
        assert [row[1:5] for row in mine] == order
        assert all(one[6] <= two[5] + 1e-9 for one, two in zip(mine, mine[1:], strict=False))
    ends = {row[1:5]: row[6] for row in trace}
    last = program.num_stages - 1
    checked = 0
    for _, op, stage, micro, piece, start, _ in trace:
        needs = []
        if op == "F":
            needs = [("F", stage - 1, micro, piece)] * (stage > 0) + [("F", stage, micro, piece - 1)] * (piece > 0)
        elif op in "BI":
            needs = [(op, stage + 1, micro, piece)] * (stage < last) + [("F", stage, micro, piece)]
        elif op == "W":
            needs = [("I", stage, micro, piece)]
        for need in needs:
            lag = costs["comm"][need[1]] if need[1] != stage and program.rank_of[need[1]] != program.rank_of[stage] else 0.0
            assert start >= ends[need] + lag - 1e-6
            checked += 1
    assert checked >= 2 * len([row for row in trace if row[1] == "F"])


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


def test_a_plan_is_emulated_with_its_own_costs_others_and_none():
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=64, block_size=64)
    cluster = tp.Cluster(num_devices=4, devices_per_node=1, memory_bytes=1 << 32, link_latency_s=2e-4, link_bandwidth_Bps=1e9,
                         peak_flops=2e9)
    costs = tp.CostModel.analytic(model, cluster)
    plan = tp.plan(model, cluster, batch=2, seq_len=64, costs=costs, stages=4, schedule="seq1f1b", slicing=4)
    predicted = [tp.emulate(plan).predicted_step_time_s, tp.emulate(plan, costs).predicted_step_time_s]
    assert predicted[0] == predicted[1] == pytest.approx(plan.step_time_s)
    quick = tp.emulate(plan, {"F": 1e-4, "I": 1e-4, "W": 1e-4})
    assert quick.predicted_step_time_s < plan.step_time_s
    assert repr(quick).startswith("Emulation(4 ranks, step ") and "error +" in repr(quick) and "trace" not in repr(quick)
    assert "<svg" in quick._repr_html_()
    line = quick.timeline()
    assert line.num_ranks == 4 and sum(line.bubbles.values()) == pytest.approx(line.idle_s, rel=1e-6)


@pytest.mark.parametrize("asked", [
    {"schedule": "1f1b", "recompute": "ffn"}, {"schedule": "chimera", "executable": False}, {"schedule": "bpipe"},
    {"schedule": "sliced-1f1b"}, {"schedule": "hanayo", "chunks": 2, "recompute": "attention"}, {"planner": "dawnpiper"},
    {"data_parallel": 2, "executable": False}, {"schedule": "zb-v"},
    {"own": True, "chunks": 1, "schedule": "1f1b", "recompute": "ffn"}],
    ids=lambda asked: " ".join(map(str, asked.values())))
def test_a_plan_under_the_costs_it_was_made_with_takes_what_it_says(asked):
    """What it makes again, swaps, keeps elsewhere and sums with replicas among it."""
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=64, block_size=64)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e9, link_latency_s=1e-5, link_bandwidth_Bps=1e8, peak_flops=1e10,
                         host_bandwidth_Bps=1e9)
    costs = tp.CostModel.analytic(model, cluster)
    asked = dict(asked)
    own = asked.pop("own", False)
    if asked.get("planner"):                # with less memory than it would like: it makes something again, or swaps
        free = tp.plan(model, cluster, batch=8, seq_len=64, costs=costs, stages=2, executable=False, **asked)
        asked |= {"memory_bytes": max(free.peak_memory_bytes) * 99 // 100}
    plan = tp.plan(model, cluster, batch=8, seq_len=64, costs=costs, stages=2, **asked)
    if own:
        plan = plan.with_program(tp.schedules.gpipe(2, len(plan.slicing), [len(lengths) for _, lengths in plan.slicing]))
    assert any((*plan.recompute, *plan.swap)) == ("recompute" in asked or "planner" in asked)
    run = tp.emulate(plan, costs)
    assert run.predicted_step_time_s == pytest.approx(plan.step_time_s, rel=1e-9) and run.num_ranks == plan.ranks


def test_what_cannot_be_emulated_is_refused():
    program = tp.schedules.gpipe(2, 2)
    for bad, costs, word in ((3, {"F": 1.0}, "int"), (program, None, "costs"), (program, {"F": float("nan"), "B": 1.0}, "F"),
                             (program, {"F": -1.0, "B": 1.0}, "F"), (program, {"F": 1.0, "B": 1.0, "Q": 1.0}, "'Q'"),
                             (program, 5, "int"), (program, {"F": np.ones((3, 3)), "B": 1.0}, "F")):
        with pytest.raises((ValueError, TypeError), match=word):
            tp.emulate(bad, costs)
    with pytest.raises(tp.ScheduleError):
        tp.emulate(tp.Program.parse("0F0.0 0F0.1 0B0.0 0B0.1"), {"F": 1.0})
    json.dumps(tp.emulate(program, {"F": 1e-4, "B": 1e-4}).trace)  # plain numbers: a trace can be kept


def test_a_wait_that_never_ends_is_a_deadline_and_nothing_is_left_running():
    program = tp.schedules.gpipe(2, 1)
    before = threading.active_count()
    with pytest.raises(tp.DeadlineError, match=r"rank 1 waited 0.5 s"):
        tp.emulate(program, {"F": 100.0, "B": 1e-4}, timeout_s=0.5)  # rank 0 is woken
    assert threading.active_count() == before
