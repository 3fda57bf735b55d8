"""``Program.reorder``: forwards and backwards by list scheduling, against its rule written once more; and plans that have it."""

import re

import numpy as np
import pytest
from sched_oracle import read

import terapipe_c as tp
from terapipe_c import schedules
from terapipe_c.planning.judge import Judge, as_built

UNIT = {"F": 1.0, "I": 1.0, "W": 1.0}


def listed(program, seconds):
    """The lists of all ranks: of all ops that can start first one of the first rank's; of those backward before forward, of
    backwards the last stage, of forwards the first; a rank that would wait does W."""
    home, slices, stages = program.rank_of, program.slices, program.num_stages
    total = sum(seconds[op].sum() for op in "FIW")
    ticks = {op: np.rint(table * (2.0**40 / total)) for op, table in seconds.items()}  # csrc/sched/reorder.c: what ties ties
    offset, ready, out = np.cumsum([0, *slices]), {}, [[] for _ in range(program.num_ranks)]
    clock, done = [0.0] * program.num_ranks, {(op, v): 0 for op in "FBW" for v in range(stages)}
    order = {"F": [(q, s) for q, count in enumerate(slices) for s in range(count)]}
    order["B"] = order["W"] = [(q, s) for q, count in enumerate(slices) for s in reversed(range(count))]

    def start(op, v):
        if done[op, v] == sum(slices):
            return None
        q, s = order[op][done[op, v]]
        if op == "W":
            return clock[home[v]] if done["W", v] < done["B", v] else None
        if op == "B" and done["F", v] < offset[q + 1]:
            return None
        first = v == (0 if op == "F" else stages - 1)
        come = 0.0 if first else ready.get((op, v - 1 if op == "F" else v + 1, q, s))
        return None if come is None else max(come, clock[home[v]])

    def choose(rank):
        mine = [v for v in range(stages) if home[v] == rank]
        ways = [(at, i, op, v) for i, (op, v) in enumerate([*(("B", v) for v in mine[::-1]), *(("F", v) for v in mine)])
                if (at := start(op, v)) is not None]
        if ways and min(ways)[0] <= clock[rank]:
            return min(ways)
        return next(((clock[rank], 0, "W", v) for v in mine[::-1] if start("W", v) is not None), min(ways, default=None))

    while any(done[op, v] < sum(slices) for op in "FB" for v in range(stages)):
        at, rank, op, v = min((way[0], rank, *way[2:]) for rank in range(program.num_ranks) if (way := choose(rank)))
        q, s = order[op][done[op, v]]
        done[op, v] += 1
        unit = offset[q] + s
        clock[rank] = at + ticks["I" if op == "B" else op][v, unit]
        to = v + {"F": 1, "B": -1, "W": 0}[op]
        lag = ticks["comm"][v, unit] if 0 <= to < stages and home[to] != rank else 0.0
        ready[op, v, q, s] = clock[rank] + lag
        if op != "W":
            out[rank].append(f"{v}{op}{q}.{s}")
    return "\n".join(map(" ".join, out)) + "\n"


PROGRAMS = [schedules.looped_bfs(3, 2, 2, 2), schedules.looped_bfs(2, 3, 3, [2, 1, 3]), schedules.looped_bfs(4, 1, 2, 5),
            schedules.one_f_one_b(4, 6, 2), schedules.interleaved(2, 4, 2), schedules.hanayo(2, 3, 2, [1, 3, 2]),
            schedules.gpipe(1, 2, 3)]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_every_rank_does_what_can_start_first(program):
    rng = np.random.default_rng(5)
    shape = program.num_stages, sum(program.slices)
    for longest in (1, 3, 9):
        cost = {op: rng.integers(1, longest + 1, shape).astype(float) for op in ("F", "I", "W", "comm")}
        order = program.reorder(cost)
        assert str(order) == listed(program, cost)
        assert program.reorder({op: 0.3 * seconds for op, seconds in cost.items()}) == order
        order.check(canonical=True)
        assert order.rank_of == program.rank_of
        for same in (program.split(cost), program.split(cost).lower(), order):  # whatever the order was
            assert same.reorder(cost) == order
        order.split(cost, pending=9).lower().check(canonical=True)


def test_two_sequences_in_looped_stages_go_back_early():
    """Rank 1 has all of 3F0.* while 1F1.* are to come; f = i = w."""
    looped = schedules.looped_bfs(2, 2, 2)
    assert str(looped.reorder()).splitlines() == ["0F0.0 0F1.0 2F0.0 2F1.0 2B0.0 2B1.0 0B0.0 0B1.0",
                                                  "1F0.0 1F1.0 3F0.0 3B0.0 3F1.0 3B1.0 1B0.0 1B1.0"]  # fmt: skip
    for ranks, chunks, slices in ((4, 2, 3), (4, 3, 3), (8, 2, 4)):
        before = schedules.looped_bfs(ranks, 4, chunks, slices)
        times = [order.split(UNIT, pending=9).lower().makespan(UNIT) for order in (before.reorder(), before)]
        assert 12 * chunks * slices <= times[0] <= times[1], (ranks, chunks, slices, times)


def test_two_copies_of_the_model_keep_their_micro_batches():
    program = schedules.chimera(4, 8)
    order = program.reorder()
    assert (order.copies, order.rank_of, order.counts) == (2, program.rank_of, program.counts)
    order.check(canonical=True)


def test_what_it_cannot_order_is_refused():
    looped = schedules.looped_bfs(2, 2, 2)
    for program, why in ((looped.save_memory(b"\1" * 4, bytes(4)), "reorder knows whole F, B, I and W alone"),
                         (schedules.sliced_1f1b(3, 3, 2), "reorder knows whole F, B, I and W alone"),
                         (schedules.pipedream(2, 2), "reorder knows whole F, B, I and W alone"),
                         (tp.Program.parse("0B0.0 0F0.0\n"), "0B0.0")):  # fmt: skip
        with pytest.raises(tp.ScheduleError, match=re.escape(why)):
            program.reorder()
    for cost in ({"F": 1.0, "B": 2.0}, {"F": 1.0, "I": 1.0}, {"F": 1.0, "I": -1.0, "W": 1.0}):
        with pytest.raises(ValueError, match="seconds of|would be right"):
            looped.reorder(cost)


def test_plans_of_looped_stages_take_the_faster_order():
    """Two sequences: a backward stands before the last forward; one sequence: breadth first is all there is."""
    for batch in (1, 2):
        model = tp.GPTConfig(14, 8, 512, 1000, 256, tie_weights=False)
        cluster = tp.Cluster(num_devices=4, devices_per_node=4, memory_bytes=1e13, link_latency_s=1e-6, link_bandwidth_Bps=1e11)
        plan = tp.plan(model, cluster, schedule="looped-bfs", chunks=2, batch=batch, seq_len=256, stages=4, planner="terapipe",
                       costs=tp.CostModel.analytic(model, cluster))
        looped = schedules.looped_bfs(4, batch, 2, [len(lengths) for _, lengths in plan.slicing])
        ways = [order.split(plan.durations, pending=n).lower().makespan(plan.durations)
                for order in (looped, looped.reorder(plan.durations)) for n in (0, 1, 2, 4)]
        assert plan.step_time_s == pytest.approx(plan.program.makespan(plan.durations))
        assert plan.step_time_s <= min(ways) * (1 + 1e-9)
        early = [re.search(r"[IB]\d.*F\d", " ".join(f"{op}{v}" for v, op, *_ in line)) for line in read(str(plan.program.strip()))]
        assert any(early) == (batch > 1)
        if batch > 1:
            assert min(ways[4:]) < min(ways[:4])


@pytest.mark.parametrize("planner", ["terapipe", "uniform"])
def test_a_plan_that_fits_as_it_is_built_is_not_refused(planner):
    """List scheduling needs more memory on these stages, and is faster."""
    model = tp.GPTConfig(8, 2, 64, 500, 128)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e13, link_latency_s=8e-5, link_bandwidth_Bps=5e10, peak_flops=3.4e9)
    partition = [(0, 2), (2, 5), (5, 8), (8, 10), (10, 12), (12, 13), (13, 16), (16, 18)]

    def ask(limit):
        return tp.plan(model, cluster, schedule="looped-bfs", chunks=2, batch=3, seq_len=128, stages=4, planner=planner,
                       partition=partition, slicing=[(1, [64, 64])] * 3, memory_bytes=limit)

    with pytest.raises(tp.InfeasibleError) as refused:
        ask(1000)
    limit = refused.value.memory_bytes                         # which depends on the processor: kernels have room for their own
    fast, slow = ask(None), ask(limit)
    built = [schedules.looped_bfs(4, 3, 2, 2).split(slow.durations, pending=pending).lower(tied=True) for pending in (0, 1, 2, 4)]
    # of those as many W wait as the memory allows: only terapipe looks for that
    assert slow.program in (built[:1] if planner == "uniform" else built[1:]) and slow.step_time_s > fast.step_time_s
    assert max(slow.peak_memory_bytes) <= limit < max(fast.peak_memory_bytes)


def test_other_schedules_take_the_numbers_of_the_plan_as_it_is_built():
    """For plan.compared, where the plan in hand is one of those."""
    model = tp.GPTConfig(3, 2, 32, 64, 64)
    cluster = tp.Cluster(num_devices=2, memory_bytes=1e13, link_latency_s=1e-5, link_bandwidth_Bps=1e10, peak_flops=1e10)
    judge = Judge(model, tp.CostModel.analytic(model, cluster), 2, 2, None)
    cut, slicing = ((0, 2), (2, 4), (4, 6), (6, 8)), ((1, (64,)),) * 2
    for pending in (0, 2):
        built = judge.judge("looped-bfs", cut, slicing, as_built(pending))
        assert judge.lowered(built) == schedules.looped_bfs(2, 2, 2).split(judge.timing(built), pending=pending).lower(tied=True)
        assert judge.judge("interleaved", cut, slicing, built.pending) is judge.judge("interleaved", cut, slicing, pending)
