"""The baselines: each against an independent statement of what its algorithm minimises, on random small tables."""

import itertools
import math

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import planners, schedules

CHAIN = (planners.uniform, planners.merak, planners.vpipe, planners.adapipe)
ALL = (*CHAIN, planners.pipedream, planners.dapple)


def table(rng, most=7):
    n = int(rng.integers(1, most))
    kind = rng.random()
    fwd = rng.integers(0, 9, n).astype(float) if kind < 0.5 else rng.uniform(0.1, 2, n)
    bwd = 2 * fwd if rng.random() < 0.4 else rng.integers(0, 15, n).astype(float)
    return fwd, bwd


def memory_of(rng, n, recompute=True):
    keys = {"static_bytes": rng.integers(0, 9, n), "activation_bytes": rng.integers(0, 9, n)}
    if rng.random() < 0.3:
        keys["transient_bytes"] = rng.integers(0, 9, n)
    if recompute and rng.random() < 0.8:
        keys["recompute_s"] = rng.integers(0, 9, n)
    return {"limit_bytes": float(rng.integers(5, 70))} | {k: v.astype(float) for k, v in keys.items()}


def cuts_of(n, stages):
    for cuts in itertools.combinations(range(1, n), stages - 1):
        yield (0, *cuts, n)


def replicas_of(devices, stages):
    for cuts in itertools.combinations(range(1, devices), stages - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, devices), strict=True)]


def bytes_of(memory, a, e, copies, kept=None):
    kept = range(a, e) if kept is None else kept
    transient = memory.get("transient_bytes")
    return (sum(memory["static_bytes"][a:e]) + copies * sum(memory["activation_bytes"][i] for i in kept)
            + (max(transient[a:e]) if transient is not None else 0.0))  # fmt: skip


def one_f_one_b(f, b, micros, comm, blocking):
    """1F1B makespan by the recurrences of PLANNERS.md 2.2, written without the package."""
    stages, done = len(f), {}
    orders = []
    for k in range(stages):
        w = min(micros, stages - 1 - k)
        order = [("F", q) for q in range(w)]
        for q in range(micros - w):
            order += [("F", w + q), ("B", q)]
        orders.append(order + [("B", q) for q in range(micros - w, micros)])
    clock, at = [0.0] * stages, [0] * stages
    while any(at[k] < len(orders[k]) for k in range(stages)):
        for k in range(stages):
            while at[k] < len(orders[k]):
                kind, q = orders[k][at[k]]
                remote = (k > 0) if kind == "F" else (k < stages - 1)
                need = (kind, k - 1 if kind == "F" else k + 1, q) if remote else None
                if need is not None and need not in done:
                    break
                ready = done[need] + (0.0 if blocking else comm) if need is not None else 0.0
                start = max(clock[k], ready) + (comm if blocking and need is not None else 0.0)
                clock[k] = done[kind, k, q] = start + (f[k] if kind == "F" else b[k])
                at[k] += 1
    return max(clock)


def check_plan(plan, fwd, bwd, micros, comm, blocking, memory):
    """What holds of every plan: a partition, its step time, its bytes."""
    n, stages = len(fwd), len(plan.replicas)
    assert plan.boundaries[0] == 0 and plan.boundaries[-1] == n and len(plan.boundaries) == stages + 1
    assert all(a < b for a, b in itertools.pairwise(plan.boundaries))
    assert not (plan.recompute & plan.swap).any()
    spans = list(itertools.pairwise(plan.boundaries))
    again = memory["recompute_s"] if memory and "recompute_s" in memory else np.zeros(n)
    f = [sum(fwd[a:e]) / r for (a, e), r in zip(spans, plan.replicas, strict=True)]
    b = [sum(bwd[a:e] + again[a:e] * plan.recompute[a:e]) / r for (a, e), r in zip(spans, plan.replicas, strict=True)]
    np.testing.assert_allclose(plan.stage_time_s, np.add(f, b), rtol=1e-12, atol=1e-12)
    assert plan.lower_bound_s <= plan.step_time_s
    if max(plan.replicas) == 1:
        assert plan.step_time_s == pytest.approx(one_f_one_b(f, b, micros, comm, blocking), rel=1e-12, abs=1e-12)
        for k, (a, e) in enumerate(spans):
            if memory:
                kept = [i for i in range(a, e) if not plan.recompute[i] and not plan.swap[i]]
                assert plan.peak_memory_bytes[k] == bytes_of(memory, a, e, min(micros, stages - k), kept)
    if memory:
        assert max(plan.peak_memory_bytes) <= memory["limit_bytes"]


def test_every_plan_is_a_partition_judged_by_the_simulator() -> None:
    rng = np.random.default_rng(1)
    feasible = 0
    for _ in range(500):
        fwd, bwd = table(rng)
        n = len(fwd)
        stages, micros = int(rng.integers(1, n + 1)), int(rng.integers(1, 8))
        comm, blocking = float(rng.integers(0, 4)), bool(rng.integers(0, 2))
        memory = memory_of(rng, n) if rng.random() < 0.6 else None
        for planner in ALL:
            try:
                plan = planner(fwd, bwd, stages, micros, comm, blocking, memory)
            except tp.InfeasibleError:
                assert memory
                continue
            feasible += 1
            assert plan.planner == planner.__name__ and plan.micro_batches == micros
            assert sum(plan.replicas) == stages
            check_plan(plan, fwd, bwd, micros, comm, blocking, memory)
    print(f"{feasible} feasible plans of 500 x {len(ALL)}")
    assert feasible > 1500


def test_no_partition_is_faster_than_the_bound() -> None:
    rng = np.random.default_rng(2)
    for _ in range(400):
        fwd, bwd = table(rng)
        n = len(fwd)
        stages, micros = int(rng.integers(1, n + 1)), int(rng.integers(1, 9))
        comm, blocking = float(rng.integers(0, 4)), bool(rng.integers(0, 2))
        best = min(
            one_f_one_b([sum(fwd[a:e]) for a, e in itertools.pairwise(cut)], [sum(bwd[a:e]) for a, e in itertools.pairwise(cut)],
                        micros, comm, blocking)
            for cut in cuts_of(n, stages)
        )  # fmt: skip
        plan = planners.uniform(fwd, bwd, stages, micros, comm, blocking)
        assert plan.lower_bound_s <= best


def test_no_plan_with_replicas_is_faster_than_the_bound_of_a_planner_that_may_replicate() -> None:
    """Whether its own plan has replicas or not."""
    rng, straight = np.random.default_rng(22), 0
    for _ in range(200):
        fwd, bwd = table(rng)
        devices, micros, comm = int(rng.integers(1, 5)), int(rng.integers(1, 9)), float(rng.integers(0, 4))
        sizes = rng.integers(0, 30, len(fwd)).astype(float)
        best = min(
            one_f_one_b([sum(fwd[a:e]) / r for a, e, r in parts], [sum(bwd[a:e]) / r for a, e, r in parts], micros, comm, False)
            for stages in range(1, min(devices, len(fwd)) + 1) for cut in cuts_of(len(fwd), stages)
            for ends in itertools.combinations(range(1, devices), stages - 1)
            for parts in [[(a, e, last - first) for (a, e), (first, last) in
                           zip(itertools.pairwise(cut), itertools.pairwise((0, *ends, devices)), strict=True)]]
        )  # fmt: skip
        for planner in (planners.pipedream, planners.dapple):
            plan = planner(fwd, bwd, devices, micros, comm, param_bytes=sizes, bandwidth_Bps=1.0)
            straight += devices > 1 and max(plan.replicas) == 1
            assert plan.lower_bound_s <= best * (1 + 1e-12), (planner, plan, best)
    assert straight > 50


def test_no_baseline_beats_autopipes_exact_search() -> None:
    rng = np.random.default_rng(9)
    for _ in range(100):
        fwd, bwd = table(rng, 12)
        stages, micros = int(rng.integers(1, len(fwd) + 1)), int(rng.integers(1, 12))
        comm, blocking = float(rng.integers(0, 3)), bool(rng.integers(0, 2))
        best = planners.autopipe(fwd, bwd, stages, micros, comm, blocking)
        assert best.optimal
        for planner in CHAIN:
            plan = planner(fwd, bwd, stages, micros, comm, blocking)
            assert plan.step_time_s >= best.step_time_s * (1 - 1e-12)
            assert plan.lower_bound_s <= best.step_time_s
    memory = planners.StageMemory(30.0, [1.0] * 4, [2.0] * 4)
    assert max(planners.uniform(np.ones(4), np.ones(4), 2, 4, memory=memory).peak_memory_bytes) <= 30.0


def test_step_time_is_the_schedules_own() -> None:
    fwd = np.array([0.3] + [1.0, 2.0] * 6 + [4.0])
    plan = planners.adapipe(fwd, 2 * fwd, 4, 9, comm_s=0.1)
    f = np.array([[fwd[a:b].sum()] for a, b in itertools.pairwise(plan.boundaries)]).repeat(9, axis=1)
    timeline = schedules.one_f_one_b(4, 9).simulate({"F": f[:, :1], "B": 2 * f[:, :1]}, comm_s=0.1)
    assert plan.step_time_s == pytest.approx(timeline.makespan_s, rel=1e-12)


# ---- the rules that count ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "stages"), [(8, 4), (10, 4), (11, 4), (5, 5), (7, 1)])
def test_uniform_gives_the_first_stages_what_is_left(blocks: int, stages: int) -> None:
    sizes = np.diff(planners.uniform(np.ones(blocks), np.ones(blocks), stages, 4).boundaries)
    assert list(sizes) == [blocks // stages + (k < blocks % stages) for k in range(stages)]


def test_merak_gives_the_stages_behind_the_first_what_is_left() -> None:
    def reference(items: int, parts: int) -> list[int]:  # Merak's partition_uniform, floor form
        each, more = items // parts, items % parts
        return [p * each + sum(p > 1 + i for i in range(more)) for p in range(parts)] + [items]

    for blocks in range(1, 20):
        for stages in range(1, blocks + 1):
            got = planners.merak(np.ones(blocks), np.ones(blocks), stages, 2).boundaries
            assert got == reference(blocks, stages), (blocks, stages)


def test_merak_closes_a_shard_when_its_runtime_is_full() -> None:
    fwd = np.array([1.0, 1, 1, 5, 1, 1, 1, 1])  # 12 / 4 = 3 a shard: 0-2, 3, 4-6, 7
    assert planners.merak(fwd, np.zeros(8), 2, 2, shards=4).boundaries == [0, 4, 8]
    assert planners.merak(fwd, np.zeros(8), 3, 2, shards=4).boundaries == [0, 3, 7, 8]
    with pytest.raises(ValueError, match="make only 2 shards"):
        planners.merak([9.0, 1, 1, 1], np.zeros(4), 3, 2, shards=3)


# ---- PipeDream --------------------------------------------------------------------------------------------------------------


def pipedream_best(fwd, bwd, devices, micros, comm, memory, weights, bandwidth, straight):
    n, best = len(fwd), math.inf
    for stages in range(1, min(n, devices) + 1):
        for cut in cuts_of(n, stages):
            for replicas in [[1] * stages] * (devices == stages) if straight else replicas_of(devices, stages):
                worst, behind = 2 * comm * (stages > 1), devices
                for (a, e), r in zip(itertools.pairwise(cut), replicas, strict=True):
                    copies = min(micros, -(-behind // r))
                    behind -= r
                    if memory and bytes_of(memory, a, e, copies) > memory["limit_bytes"]:
                        worst = math.inf
                    exchange = 2 * (r - 1) * sum(weights[a:e]) / bandwidth
                    worst = max(worst, max(sum(fwd[a:e]) + sum(bwd[a:e]), exchange) / r)
                best = min(best, worst)
    return best


def test_pipedream_equals_brute_force() -> None:
    rng = np.random.default_rng(3)
    feasible = replicated = 0
    for i in range(2000):
        fwd, bwd = table(rng, 6)
        n = len(fwd)
        straight = rng.random() < 0.2
        devices, micros = int(rng.integers(1, n + 1 if straight else 6)), int(rng.integers(1, 7))
        comm, weights = float(rng.integers(0, 5)), rng.integers(0, 9, n).astype(float)
        memory = memory_of(rng, n) if rng.random() < 0.5 else None
        want = pipedream_best(fwd, bwd, devices, micros, comm, memory, weights, 3.0, straight)
        options = {"param_bytes": weights, "bandwidth_Bps": 3.0, "straight": straight}
        try:
            plan = planners.pipedream(fwd, bwd, devices, micros, comm, memory=memory, **options)
        except tp.InfeasibleError:
            assert math.isinf(want), i
            continue
        feasible += 1
        replicated += max(plan.replicas) > 1
        assert plan.objective_s == pytest.approx(want, rel=1e-12, abs=1e-12), i
        if memory:
            assert max(plan.peak_memory_bytes) <= memory["limit_bytes"]
            looser = memory | {"limit_bytes": memory["limit_bytes"] + 7}
            assert planners.pipedream(fwd, bwd, devices, micros, comm, memory=looser, **options).objective_s <= plan.objective_s
    print(f"2000 instances, {feasible} feasible, {replicated} with replicas")
    assert feasible > 1200 and replicated > 300


# ---- DAPPLE -----------------------------------------------------------------------------------------------------------------


def dapple_latency(f, b, exchange, micros, comm):
    """Section 4.2 with messages as stages of their own; the pivot by its definition."""
    fs, bs, xs = [f[0]], [b[0]], [exchange[0]]
    for k in range(1, len(f)):
        fs, bs, xs = fs + [comm, f[k]], bs + [comm, b[k]], xs + [0.0, exchange[k]]
    q = len(fs) - 1
    for s in range(len(fs) - 2, -1, -1):
        steady = (micros - 1) * (fs[q] + bs[q]) + sum(fs[a] + bs[a] for a in range(s + 1, q))
        if (micros - 1) * (fs[s] + bs[s]) > steady:
            q = s
    ending = max(xs[s] + (sum(bs[s : q + 1]) if s <= q else -sum(bs[q + 1 : s])) for s in range(len(fs)))
    return sum(fs[: q + 1]) + (micros - 1) * (fs[q] + bs[q]) + ending, q / 2


def dapple_model(cut, replicas, fwd, bwd, weights, memory, micros, comm):
    """(latency, pivot) of a plan; infinite where it does not fit."""
    spans = list(itertools.pairwise(cut))
    for k, ((a, e), r) in enumerate(zip(spans, replicas, strict=True)):
        if memory and bytes_of(memory, a, e, min(micros, len(spans) - k) / r) > memory["limit_bytes"]:
            return math.inf, 0.0
    f, b, w = ([sum(values[a:e]) for a, e in spans] for values in (fwd, bwd, weights))
    exchange = [2 * (r - 1) / r * size / 2.0 for r, size in zip(replicas, w, strict=True)]
    return dapple_latency(np.divide(f, replicas), np.divide(b, replicas), exchange, micros, comm)


def test_dapple_never_beats_brute_force_and_mostly_equals_it() -> None:
    rng = np.random.default_rng(4)
    equal = feasible = missed = 0
    for i in range(1000):
        fwd, bwd = table(rng, 6)
        n, devices, micros = len(fwd), int(rng.integers(1, 6)), int(rng.integers(1, 7))
        comm, weights = float(rng.integers(0, 4)), rng.integers(0, 9, n).astype(float)
        memory = memory_of(rng, n) if rng.random() < 0.4 else None

        given = (fwd, bwd, weights, memory, micros, comm)
        want = min(dapple_model(cut, replicas, *given)[0] for stages in range(1, min(n, devices) + 1)
                   for cut in cuts_of(n, stages) for replicas in replicas_of(devices, stages))  # fmt: skip
        try:
            plan = planners.dapple(fwd, bwd, devices, micros, comm, memory=memory, param_bytes=weights, bandwidth_Bps=2.0)
        except tp.InfeasibleError:
            missed += not math.isinf(want)
            continue
        feasible += 1
        latency, pivot = dapple_model(plan.boundaries, plan.replicas, *given)
        assert plan.objective_s == pytest.approx(latency, rel=1e-9, abs=1e-12), i
        assert plan.pivot_stage == pivot, i
        assert plan.objective_s >= want * (1 - 1e-12)
        equal += plan.objective_s <= want * (1 + 1e-12)
    print(f"1000 instances, {feasible} feasible, {equal} optimal in DAPPLE's own model, {missed} feasible ones missed")
    assert equal > 0.9 * feasible and feasible > 700 and missed < 30


def test_dapple_without_replicas_is_rarely_far_from_the_best() -> None:
    """DAPPLE's programme keeps one prefix for each number of blocks and stages, judged with the rest as one stage on all remaining
    devices: so it may miss the best plan, but rarely by much."""
    rng = np.random.default_rng(11)
    equal = feasible = missed = 0
    for _ in range(600):
        fwd, bwd = table(rng, 9)
        n, micros, comm = len(fwd), int(rng.integers(1, 7)), float(rng.integers(0, 4))
        stages = int(rng.integers(1, n + 1))
        memory = memory_of(rng, n) if rng.random() < 0.4 else None
        given = (fwd, bwd, np.zeros(n), memory, micros, comm)
        want = min(dapple_model(cut, [1] * stages, *given)[0] for cut in cuts_of(n, stages))
        try:
            plan = planners.dapple(fwd, bwd, stages, micros, comm, memory=memory, straight=True)
        except tp.InfeasibleError:
            missed += not math.isinf(want)
            continue
        feasible += 1
        assert len(plan.replicas) == stages and set(plan.replicas) == {1}
        latency, pivot = dapple_model(plan.boundaries, plan.replicas, *given)
        assert plan.objective_s == pytest.approx(latency, rel=1e-9, abs=1e-12) and plan.pivot_stage == pivot
        assert plan.objective_s >= want * (1 - 1e-12)
        equal += plan.objective_s <= want * (1 + 1e-12)
    print(f"600 instances, {feasible} feasible, {equal} optimal in DAPPLE's own model, {missed} feasible ones missed")
    assert equal > 0.9 * feasible and feasible > 400 and missed < 10


# ---- AdaPipe ----------------------------------------------------------------------------------------------------------------


def least_recompute(memory, a, e, copies):
    if memory is None or bytes_of(memory, a, e, copies) <= memory["limit_bytes"]:
        return 0.0
    if "recompute_s" not in memory:
        return math.inf
    best = math.inf
    for chosen in itertools.product((0, 1), repeat=e - a):
        kept = [i for i in range(a, e) if not chosen[i - a]]
        if bytes_of(memory, a, e, copies, kept) <= memory["limit_bytes"]:
            best = min(best, sum(memory["recompute_s"][i] for i in range(a, e) if chosen[i - a]))
    return best


def adapipe_cost(f, b, micros, comm):
    w, e, m = f[-1], b[-1], f[-1] + b[-1]
    for k in range(len(f) - 2, -1, -1):
        behind = len(f) - 1 - k
        w = f[k] + max(w + b[k + 1] + 2 * comm, behind * f[k])
        e = b[k] + max(e + f[k + 1] + 2 * comm, behind * b[k])
        m = max(m, f[k] + b[k])
    return w + e + (micros - len(f)) * m


def adapipe_model(cut, fwd, bwd, stages, memory, micros, comm):
    """(modelled latency, recomputation of each stage) of a partition; infinite where it does not fit."""
    spans = list(itertools.pairwise(cut))
    extra = [least_recompute(memory, a, e, min(micros, stages - k)) for k, (a, e) in enumerate(spans)]
    if math.inf in extra:
        return math.inf, extra
    f, b = ([sum(values[a:e]) for a, e in spans] for values in (fwd, bwd))
    return adapipe_cost(f, list(np.add(b, extra)), micros, comm), extra


def test_adapipe_recomputes_least_and_mostly_finds_the_best_partition_of_its_model() -> None:
    rng = np.random.default_rng(5)
    equal = feasible = recomputed = 0
    for i in range(1000):
        fwd, bwd = table(rng)
        n = len(fwd)
        stages, micros, comm = int(rng.integers(1, n + 1)), int(rng.integers(1, 9)), float(rng.integers(0, 4))
        memory = memory_of(rng, n) if rng.random() < 0.8 else None

        given = (fwd, bwd, stages, memory, micros, comm)
        want = min(adapipe_model(cut, *given)[0] for cut in cuts_of(n, stages))
        try:
            plan = planners.adapipe(fwd, bwd, stages, micros, comm, memory=memory)
        except tp.InfeasibleError:
            assert math.isinf(want), i
            continue
        feasible += 1
        cost, extra = adapipe_model(plan.boundaries, *given)
        assert plan.objective_s == pytest.approx(cost, rel=1e-9, abs=1e-9), i
        for k, (a, e) in enumerate(itertools.pairwise(plan.boundaries)):
            spent = sum(memory["recompute_s"][a:e] * plan.recompute[a:e]) if memory and "recompute_s" in memory else 0.0
            assert spent == pytest.approx(extra[k]), i
        recomputed += plan.recompute.any()
        assert plan.objective_s >= want - 1e-9 * abs(want)
        equal += plan.objective_s <= want + 1e-9 * abs(want)
    print(f"1000 instances, {feasible} feasible, {recomputed} recompute, {equal} optimal in AdaPipe's own model")
    assert equal > 0.9 * feasible and recomputed > 100


def test_adapipe_recomputes_least_where_blocks_are_alike() -> None:
    """One table serves all starts from which on the blocks are the same: runs of like layers, ends that differ, and none alike."""
    rng, recomputed = np.random.default_rng(6), 0
    for i in range(400):
        n, period = int(rng.integers(4, 11)), int(rng.integers(1, 4))
        own = rng.integers(1, 9, (5, n)).astype(float)
        own[:, 1:n - 1] = own[:, 1 + np.arange(n - 2) % period]
        fwd, bwd, static, kept, again = own
        stages, micros = int(rng.integers(1, n + 1)), int(rng.integers(1, 9))
        memory = {"static_bytes": static, "activation_bytes": kept, "recompute_s": again,
                  "limit_bytes": float(rng.uniform(0.7, 1.3) * (static.sum() + min(micros, stages) * kept.sum()) / stages)}
        try:
            plan = planners.adapipe(fwd, bwd, stages, micros, memory=memory)
        except tp.InfeasibleError:
            assert all(math.isinf(adapipe_model(cut, fwd, bwd, stages, memory, micros, 0.0)[0]) for cut in cuts_of(n, stages)), i
            continue
        cost, extra = adapipe_model(plan.boundaries, fwd, bwd, stages, memory, micros, 0.0)
        assert plan.objective_s == pytest.approx(cost), i
        for k, (a, e) in enumerate(itertools.pairwise(plan.boundaries)):
            assert sum(again[a:e] * plan.recompute[a:e]) == pytest.approx(extra[k]), i
        recomputed += plan.recompute.any()
    assert recomputed > 100


def test_adapipe_is_safe_where_sizes_have_no_common_unit() -> None:
    rng = np.random.default_rng(6)
    for _ in range(50):
        n = 12
        memory = {"limit_bytes": 5e9, "static_bytes": rng.uniform(0, 1e8, n), "activation_bytes": rng.uniform(1e8, 1e9, n),
                  "recompute_s": rng.uniform(1, 2, n)}  # fmt: skip
        plan = planners.adapipe(np.ones(n), np.ones(n), 3, 6, memory=memory)
        assert max(plan.peak_memory_bytes) <= 5e9


# ---- vPipe ------------------------------------------------------------------------------------------------------------------


def test_vpipe_starts_from_the_balanced_partition_and_only_improves() -> None:
    rng = np.random.default_rng(7)
    better = 0
    for _ in range(300):
        fwd, bwd = table(rng, 10)
        stages = int(rng.integers(1, len(fwd) + 1))
        plan = planners.vpipe(fwd, bwd, stages, 4)
        balanced = planners.balance(fwd + bwd, stages)
        slowest = max(sum(fwd[a:b] + bwd[a:b]) for a, b in itertools.pairwise(balanced))
        assert plan.objective_s == pytest.approx(slowest)  # without memory the balanced partition is optimal in this objective
        better += plan.boundaries != balanced
    assert better


def test_vpipe_swaps_what_the_link_hides_and_recomputes_the_rest() -> None:
    n = 8
    memory = {"limit_bytes": 60.0, "static_bytes": np.zeros(n), "activation_bytes": np.full(n, 10.0), "recompute_s": np.ones(n)}
    plain = planners.vpipe(np.ones(n), np.ones(n), 2, 4, memory=memory)
    assert not plain.swap.any() and plain.recompute.sum() >= 1  # stage 0 of 4 blocks holds 2 x 40 bytes
    swapping = planners.vpipe(np.ones(n), np.ones(n), 2, 4, memory=memory, swap_bandwidth_Bps=2.0)
    assert swapping.swap.any() and swapping.step_time_s <= plain.step_time_s
    for a, b in itertools.pairwise(swapping.boundaries):
        assert sum(memory["activation_bytes"][a:b] * swapping.swap[a:b]) <= 2.0 * 2 * (b - a)


# ---- what holds of all ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
def test_scaling_the_costs_scales_the_times(planner) -> None:
    rng = np.random.default_rng(8)
    for _ in range(50):
        fwd, bwd = table(rng)
        stages = int(rng.integers(1, len(fwd) + 1))
        one, four = (planner(s * fwd, s * bwd, stages, 5, comm_s=s * 0.25) for s in (1.0, 4.0))
        assert four.boundaries == one.boundaries and four.replicas == one.replicas
        assert four.step_time_s == 4 * one.step_time_s and four.lower_bound_s == pytest.approx(4 * one.lower_bound_s)


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
def test_edges(planner) -> None:
    one = planner([2.0], [3.0], 1, 4)
    assert one.boundaries == [0, 1] and one.step_time_s == 20.0
    each = planner(np.ones(5), np.ones(5), 5, 1, comm_s=0.5)
    assert sum(each.replicas) == 5
    nothing = planner(np.zeros(4), np.zeros(4), 2, 3)
    assert nothing.step_time_s == nothing.lower_bound_s == nothing.gap == 0.0
    free = planner(np.ones(4), np.ones(4), 2, 3, memory={"limit_bytes": math.inf})
    assert free.boundaries == planner(np.ones(4), np.ones(4), 2, 3).boundaries
    assert planner.__name__ in repr(free) and not free.recompute.any() and free.recompute.dtype == bool


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"fwd": [1.0, -1.0]}, ValueError, r"fwd\[1\] is -1"),
        ({"bwd": [math.nan, 1.0]}, ValueError, r"bwd\[0\] is nan"),
        ({"bwd": [1.0, math.inf]}, ValueError, r"bwd\[1\] is inf"),
        ({"bwd": [1.0]}, ValueError, "bwd has 1 values"),
        ({"fwd": [], "bwd": []}, ValueError, "no blocks"),
        ({"fwd": "abc"}, TypeError, "fwd is str"),
        ({"stages": 0}, ValueError, "is 0"),
        ({"stages": 1.5}, TypeError, "1.5"),
        ({"micro_batches": 0}, ValueError, "micro_batches is 0"),
        ({"comm_s": -1.0}, ValueError, "comm_s is -1"),
        ({"comm_s": math.nan}, ValueError, "comm_s is"),
        ({"fwd": [1e300, 0.0]}, ValueError, r"2 micro-batches take 2e\+300 seconds"),
        ({"memory": {"limit_bytes": 0.0}}, ValueError, "limit_bytes is 0"),
        ({"memory": {}}, TypeError, "limit_bytes is None"),
        ({"memory": {"limit_bytes": 9.0, "static": [1.0, 1.0]}}, ValueError, "static"),
        ({"memory": {"limit_bytes": 9.0, "x": 1.0, 3: 1.0}}, ValueError, r"memory has \[3, 'x'\]"),
        ({"memory": {"limit_bytes": 9.0, "static_bytes": [1.0, -2.0]}}, ValueError, r"static_bytes\[1\] is -2"),
        ({"memory": {"limit_bytes": 9.0, "recompute_s": [1.0]}}, ValueError, "recompute_s has 1 values"),
    ],
)
def test_bad_input_is_refused_by_name(planner, change, error, words) -> None:
    given = {"fwd": [1.0, 1.0], "bwd": [1.0, 1.0], "stages": 2, "micro_batches": 2, "comm_s": 0.0, "memory": None} | change
    with pytest.raises(error, match=words):
        planner(given["fwd"], given["bwd"], given["stages"], given["micro_batches"], given["comm_s"], memory=given["memory"])


@pytest.mark.parametrize("planner", CHAIN, ids=lambda p: p.__name__)
def test_more_stages_than_blocks_are_refused(planner) -> None:
    with pytest.raises(ValueError, match="stages is 3 for 2 blocks"):
        planner([1.0, 1.0], [1.0, 1.0], 3, 2)


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
def test_what_cannot_fit_says_how_many_bytes_short(planner) -> None:
    memory = {"limit_bytes": 10.0, "static_bytes": np.full(4, 8.0), "activation_bytes": np.full(4, 1.0)}
    with pytest.raises(tp.InfeasibleError, match=r"\d+ (bytes|more)"):
        planner(np.ones(4), np.ones(4), 2, 4, memory=memory)


def test_the_limit_that_an_error_names_is_enough() -> None:
    memory = {"limit_bytes": 10.0, "static_bytes": np.full(6, 8.0), "activation_bytes": np.full(6, 3.0)}
    with pytest.raises(tp.InfeasibleError, match=r"has 33 bytes on stage 2 \(blocks 3 to 5\), 23 more"):
        planners.adapipe(np.ones(6), np.ones(6), 3, 4, memory=memory)  # blocks 1, 2, 3: 17, 28, 33 bytes
    assert planners.adapipe(np.ones(6), np.ones(6), 3, 4, memory=memory | {"limit_bytes": 33.0}).boundaries == [0, 1, 3, 6]
    with pytest.raises(tp.InfeasibleError):
        planners.adapipe(np.ones(6), np.ones(6), 3, 4, memory=memory | {"limit_bytes": 32.0})


def test_the_limit_that_vpipe_names_is_one_that_it_keeps_to() -> None:
    """vPipe's refusal once named no limit. The need of its search's best partition is not always enough: with another limit the
    search goes elsewhere."""
    rng = np.random.default_rng(8)
    named = 0
    for i in range(1500):
        n, micros = int(rng.integers(2, 20)), int(rng.integers(1, 9))
        stages, swap = int(rng.integers(2, min(n, 8) + 1)), float(rng.choice([0.0, 2.0]))
        times, static, kept = (rng.integers(low, 9, n).astype(float) for low in (1, 0, 0))
        memory = {"limit_bytes": float(rng.integers(1, 60)), "static_bytes": static, "activation_bytes": kept}
        memory |= {"recompute_s": times} if i % 2 else {}
        try:
            planners.vpipe(times, 2 * times, stages, micros, memory=memory, swap_bandwidth_Bps=swap)
            continue
        except tp.InfeasibleError as refusal:
            memory["limit_bytes"] = float(str(refusal).split("limit_bytes = ")[1].split(" would do")[0])
        named += 1
        planners.vpipe(times, 2 * times, stages, micros, memory=memory, swap_bandwidth_Bps=swap)
    print(f"{named} limits named")
    assert named > 300


def test_options_are_refused_by_name() -> None:
    two = np.ones(2)
    with pytest.raises(ValueError, match="swap_bandwidth_Bps is -1"):
        planners.vpipe(two, two, 2, 2, swap_bandwidth_Bps=-1.0)
    with pytest.raises(ValueError, match="bandwidth_Bps is 0"):
        planners.dapple(two, two, 2, 2, bandwidth_Bps=0.0)
    with pytest.raises(ValueError, match=r"param_bytes\[0\] is -1"):
        planners.pipedream(two, two, 2, 2, param_bytes=[-1.0, 0.0])
    with pytest.raises(ValueError, match="shards is 3 for 2 stages"):
        planners.merak(two, two, 2, 2, shards=3)
    with pytest.raises(ValueError, match="shards is 0: at least 1"):       # to the core 0 is each block
        planners.merak(two, two, 2, 2, shards=0)


@pytest.mark.parametrize("planner", [planners.uniform, planners.merak, planners.vpipe], ids=lambda p: p.__name__)
def test_the_stage_that_an_error_names_is_the_one_that_binds(planner) -> None:
    """Where more than one stage is too large, what the first of them needs is not enough."""
    two = np.ones(2)
    memory = {"limit_bytes": 10.0, "static_bytes": np.array([11.5, 20.25])}
    with pytest.raises(tp.InfeasibleError, match=r"stage 1 of 2 \(blocks 1 to 1.* (needs 21 bytes, 11 more|is 11 bytes short)"):
        planner(two, two, 2, 2, memory=memory)
    assert max(planner(two, two, 2, 2, memory=memory | {"limit_bytes": 21.0}).peak_memory_bytes) == 20.25


def test_what_is_huge_leaves_the_others_their_bytes_and_seconds() -> None:
    """In sums with it they had none, so that stages were over the limit, and AdaPipe's units were all too large to keep any."""
    for huge, last, planner in itertools.product((1e6, 1e18, 1e30, 1e300), (100.0, 1e7), (planners.adapipe, planners.vpipe)):
        memory = {"limit_bytes": 350, "static_bytes": np.full(6, 10.0), "activation_bytes": np.array([huge, *[100.0] * 4, last]),
                  "recompute_s": np.full(6, 0.5)}  # fmt: skip
        plan = planner(np.ones(6), np.full(6, 2.0), 3, 4, memory=memory)
        assert list(plan.peak_memory_bytes) == [320, 220, 120 + last % 1e7] and plan.step_time_s == 38.0 + (last == 1e7)
        memory |= {"limit_bytes": 450, "activation_bytes": np.full(6, 100.0), "recompute_s": np.array([huge, 0.5, 1.5, *[0.5] * 3])}
        assert planner(np.ones(6), np.full(6, 2.0), 2, 4, memory=memory).step_time_s == 46.5
