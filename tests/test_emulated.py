"""What is emulated, whatever the clock says: what follows what, what a plan takes, what is refused."""
import json

import numpy as np
import pytest
from test_emulation import CASES, MS, uneven

import terapipe_c as tp
from terapipe_c import _core


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


SCHEDULES = {
    "seq1f1b": lambda n: tp.schedules.seq1f1b(n, 4, 3).split(pending=n), "bpipe": lambda n: tp.schedules.bpipe(2 * n, 8, 2),
    "sliced-1f1b": lambda n: tp.schedules.sliced_1f1b(n, 5, n - 1), "chimera": lambda n: tp.schedules.chimera(2 * n - 2, 4),
    "hanayo": lambda n: tp.schedules.hanayo(n, 2 * n, 2), "interleaved": lambda n: tp.schedules.interleaved(n, 2 * n, 2),
    "swaps": lambda n: tp.schedules.one_f_one_b(n, 4, 2).save_memory(bytes(n), b"\1" * n, 1, True)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_work_ends_when_the_simulator_says_whatever_a_message_costs(name):
    """On its way, at both ends, on links that carry one at a time, back over another, as a guest, of halves."""
    rng = np.random.default_rng(len(name))
    for i in range(20):
        program = SCHEDULES[name](2 + i % 2).lower(bool(i % 2))
        shape = program.num_stages, sum(program.slices)
        costs = {op: rng.uniform(0.3, 2.0, shape) for op in "FBIW"} | {"comm": rng.uniform(0, 3, shape), "AR": 2.0}
        costs |= {op: rng.uniform(0, 3, shape) for op in ("SO", "SI") if name == "swaps"}
        more = {op: rng.uniform(0, 1, shape) for op in ("SF", "RF", "SB", "RB")} | {"comm.back": rng.uniform(0, 3, shape)}
        more |= {"comm.latency": 0.5} | {op: rng.uniform(0, 1, shape) for op in ("F.a", "F.b", "comm.a", "comm.b")
                                         if name == "sliced-1f1b"}
        more |= {op: rng.uniform(0, 20 if op == "comm.guest" else 2) for op in ("comm.guest", "SE", "RE", "SL", "RL")
                 if name == "bpipe"}
        costs |= {op: more[op] for op in more if rng.integers(2)}
        costs = {op: 1e-5 * seconds for op, seconds in costs.items()}
        found = sorted((*row[:5], row[6]) for row in tp.emulate(program, costs).trace if row[1] in "FBIW")
        rows = sorted((row[0], tp.schedules.OPS[row[1]], *row[2:5], row[6]) for row in program.simulate(costs).intervals.tolist()
                      if tp.schedules.OPS[row[1]] in "FBIW")
        assert [row[:5] for row in found] == [row[:5] for row in rows]
        assert [row[5] for row in found] == pytest.approx([row[5] for row in rows], abs=4e-7)


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
    {"schedule": "hanayo", "chunks": 2, "data_parallel": 2, "executable": False}, {"schedule": "zb-v"},
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
