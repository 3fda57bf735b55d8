"""Planners told how many micro-batches each stage holds: orders other than 1F1B, where memory binds."""
import itertools
import math

import numpy as np
import pytest
from test_planner_plans import CLUSTER

import terapipe_c as tp
from terapipe_c import planners

SAVERS = ("dawnpiper", "dawnpiper_binary", "bmpipe", "piper", "vpipe", "adapipe")


def problem(rng, blocks=7):
    """Small integers: sums are exact."""
    return {key: rng.integers(1, 12, blocks).astype(float) for key in ("fwd", "bwd", "static", "kept", "again")}


def memory_of(p, limit, held, *, saves=False):
    memory = {"static_bytes": p["static"], "activation_bytes": p["kept"], "limit_bytes": float(limit), "in_flight": held}
    return memory | ({"recompute_s": p["again"]} if saves else {})


def nodes_of(p):
    none = np.zeros(len(p["fwd"]))
    return {"fwd_s": p["fwd"], "bwd_s": p["bwd"], "recompute_s": p["again"], "activation_bytes": p["kept"], "param_bytes": none,
            "optimizer_bytes": p["static"]}


def layers_of(p):
    return [{"name": str(i), "count": 1, "fwd_s": p["fwd"][i], "bwd_s": p["bwd"][i], "static_bytes": p["static"][i],
             "strategies": [{"name": "keep", "extra_bwd_s": 0.0, "activation_bytes": p["kept"][i]},
                            {"name": "again", "extra_bwd_s": p["again"][i], "activation_bytes": 0.0}]}
            for i in range(len(p["fwd"]))]


def ask(name, p, stages, micro, limit, held):
    """(boundaries, objective, peaks), or None where no plan is found."""
    try:
        if name in ("dawnpiper", "dawnpiper_binary"):
            plan = getattr(planners, name)(nodes_of(p), stages, float(limit), micro, in_flight=held)
            return plan.boundaries, plan.period_s, plan.peak_memory_bytes
        if name == "bmpipe":
            plan = planners.bmpipe(layers_of(p), stages, micro, float(limit), in_flight=held)
            return np.concatenate([[0], np.cumsum(plan.assignment.sum((0, 1, 2)))]).tolist(), plan.step_time_s, \
                plan.peak_memory_bytes
        more = {"straight": True} if name in ("pipedream", "dapple") else {}
        memory = memory_of(p, limit, held, saves=name in ("vpipe", "adapipe"))
        plan = getattr(planners, name)(p["fwd"], p["bwd"], stages, micro, memory=memory, **more)
        return plan.boundaries, plan.step_time_s, plan.peak_memory_bytes
    except tp.InfeasibleError:
        return None


def cuts(blocks, stages):
    for inner in itertools.combinations(range(1, blocks), stages - 1):
        yield (0, *inner, blocks)


def makespan(p, edges, micro, extra):
    times = [[float(sum(values[a:e])) for a, e in itertools.pairwise(edges)] for values in (p["fwd"], p["bwd"] + extra)]
    table = [np.repeat(np.array(t)[:, None], micro, 1) for t in times]
    return tp.schedules.one_f_one_b(len(edges) - 1, micro).simulate({"F": table[0], "B": table[1]}).makespan_s


def best(p, stages, micro, limit, held, goal, *, saves):
    """The least goal(edges, seconds recomputed of each block) over all partitions and sets of blocks made again that fit."""
    blocks, least = len(p["fwd"]), math.inf
    for edges in cuts(blocks, stages):
        for flags in itertools.product((0, 1), repeat=blocks if saves else 0):
            again = np.array(flags if saves else (0,) * blocks)
            fits = all(p["static"][a:e].sum() + held[k] * (p["kept"] * (1 - again))[a:e].sum() <= limit
                       for k, (a, e) in enumerate(itertools.pairwise(edges)))
            if fits:
                least = min(least, goal(edges, p["again"] * again))
    return least


def slowest(p):
    return lambda edges, extra: max(float((p["fwd"] + p["bwd"] + extra)[a:e].sum()) for a, e in itertools.pairwise(edges))


NAMES = ("autopipe", "autopipe_heuristic", "dawnpiper", "dawnpiper_binary", "bmpipe", "pipedream", "dapple", "vpipe", "adapipe",
         "merak", "uniform")


@pytest.mark.parametrize("name", NAMES)
def test_what_1f1b_holds_is_the_default(name):
    rng, found = np.random.default_rng(5), 0
    for _ in range(60):
        p, stages, micro = problem(rng), int(rng.integers(1, 5)), int(rng.integers(1, 6))
        limit = int(rng.integers(20, 120))
        held = [min(micro, stages - k) for k in range(stages)]
        plain, told = (ask(name, p, stages, micro, limit, h) for h in (None, held))
        assert (plain is None) == (told is None)
        if plain is not None and told is not None:
            found += 1
            assert plain[:2] == told[:2] and (plain[2] == told[2]).all()
    assert found > 20


@pytest.mark.parametrize("name", NAMES)
def test_no_plan_holds_more_than_its_memory(name):
    rng, found = np.random.default_rng(6), 0
    for _ in range(150):
        p, stages, micro = problem(rng), int(rng.integers(1, 5)), int(rng.integers(1, 6))
        held = sorted((int(n) for n in rng.integers(1, micro + 1, stages)), reverse=True)
        limit = int(rng.integers(20, 200))
        got = ask(name, p, stages, micro, limit, held)
        if got is None:
            continue
        found += 1
        assert (got[2] <= limit).all()
        if name in ("autopipe", "autopipe_heuristic", "pipedream", "dapple", "merak", "uniform"):     # these save nothing
            want = [p["static"][a:e].sum() + held[k] * p["kept"][a:e].sum() for k, (a, e) in enumerate(itertools.pairwise(got[0]))]
            assert got[2].tolist() == want
    assert found > 50


@pytest.mark.parametrize("name, saves", [("autopipe", False), ("pipedream", False), ("dawnpiper", True), ("bmpipe", True)])
def test_exact_planners_are_exact_for_any_order(name, saves):
    rng, counts = np.random.default_rng(7), [0, 0]
    for _ in range(60 if saves else 120):
        p, stages, micro = problem(rng, 5 if saves else 7), int(rng.integers(1, 4)), int(rng.integers(1, 5))
        held = [int(n) for n in rng.integers(1, micro + 1, stages)]
        if name == "dawnpiper":
            held.sort(reverse=True)
        limit = int(rng.integers(8, 40 if saves else 120))
        period = slowest(p)

        def step(edges, extra, p=p, micro=micro):
            return makespan(p, edges, micro, extra)

        want = best(p, stages, micro, limit, held, step if name in ("autopipe", "bmpipe") else period, saves=saves)
        got = ask(name, p, stages, micro, limit, held)
        counts[got is None] += 1
        if got is None:
            assert want == math.inf
        else:
            assert (period(got[0], np.zeros(len(p["fwd"]))) if name == "pipedream" else got[1]) == want
    assert min(counts) > 2


def interleaved(p, edges, micro, extra, ranks):
    times = [[float(sum(values[a:e])) for a, e in itertools.pairwise(edges)] for values in (p["fwd"], p["bwd"] + extra)]
    table = [np.repeat(np.array(t)[:, None], micro, 1) for t in times]
    return tp.schedules.interleaved(ranks, micro, (len(edges) - 1) // ranks).simulate({"F": table[0], "B": table[1]}).makespan_s


def test_rooms_of_several_chunks_add_up():
    """Every virtual stage has as many rooms as was said, whatever is in flight at one time: all assignments of small models."""
    rng, counts = np.random.default_rng(17), [0, 0]
    for _ in range(40):
        p, micro, ranks, chunks = problem(rng, 6), 2 * int(rng.integers(1, 3)), 2, int(rng.integers(2, 4))
        held = [int(n) for n in rng.integers(1, micro + 1, ranks * chunks)]
        limit, least = int(rng.integers(12, 70)), math.inf
        for edges in cuts(6, ranks * chunks):
            parts = list(enumerate(itertools.pairwise(edges)))
            for flags in itertools.product((0, 1), repeat=6):
                kept = p["kept"] * (1 - np.array(flags))
                if all(sum(p["static"][a:e].sum() + held[v] * kept[a:e].sum() for v, (a, e) in parts if v % ranks == r) <= limit
                       for r in range(ranks)):
                    least = min(least, interleaved(p, edges, micro, p["again"] * np.array(flags), ranks))
        try:
            plan = planners.bmpipe(layers_of(p), ranks, micro, float(limit), chunks=chunks, in_flight=held, time_limit_s=None)
        except tp.InfeasibleError:
            assert least == math.inf
            counts[0] += 1
            continue
        counts[1] += 1
        assert (plan.peak_memory_bytes <= limit).all() and plan.lower_bound_s <= least <= plan.step_time_s
        assert plan.step_time_s == least or not plan.optimal
    assert min(counts) > 3


def test_a_layer_graph_holds_as_many_everywhere():
    p = problem(np.random.default_rng(8))
    graph = planners.layer_graph(p["fwd"], p["bwd"], 3, 4, memory=memory_of(p, 500, 4, saves=True))
    keep, again = graph.nodes[2].variants[1]
    assert (keep.memory_a, keep.memory_b) == (0.0, p["static"][2] + 4 * p["kept"][2])
    assert (again.memory_a, again.memory_b) == (0.0, p["static"][2])


@pytest.mark.parametrize("held, message", [
    ([2], "in_flight has 1 values: 2 would be right"), ([0, 1], r"in_flight\[0\] is 0"), ([9, 1], r"in_flight\[0\] is 9: 1 to 4"),
    ([1, 2**40], r"in_flight\[1\] is 1099511627776"), ([1.5, 1], r"in_flight\[0\] is 1.5"), (3, "in_flight is 3: a list"),
])
@pytest.mark.parametrize("name", NAMES)
def test_in_flight_that_cannot_be(name, held, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ask(name, problem(np.random.default_rng(9)), 2, 4, 500, held)


def test_in_flight_where_it_has_no_meaning():
    p = problem(np.random.default_rng(9))
    with pytest.raises(tp.InvalidValueError, match=r"in_flight\[1\] is 3: 1 to 2, what the stage before it holds"):
        planners.dawnpiper(nodes_of(p), 2, 500.0, 4, in_flight=[2, 3])
    with pytest.raises(tp.InvalidValueError, match="in_flight has 2 values: 4 would be right"):
        planners.bmpipe(layers_of(p), 2, 4, 500.0, chunks=2, in_flight=[2, 2])
    with pytest.raises(tp.InvalidValueError, match="in_flight is of stages without replicas: straight"):
        planners.pipedream(p["fwd"], p["bwd"], 2, 4, memory=memory_of(p, 500, [2, 1]))
    with pytest.raises(tp.InvalidValueError, match="in_flight is of stages without replicas: straight"):
        planners.dapple(p["fwd"], p["bwd"], 2, 4, memory=memory_of(p, 500, [2, 1]))
    for held in (-1, 0, 5):
        with pytest.raises(tp.InvalidValueError, match=f"in_flight is {held}: 1 to 4, micro_batches"):
            planners.layer_graph(p["fwd"], p["bwd"], 2, 4, memory=memory_of(p, 500, held))


# ---- through tp.plan -----------------------------------------------------------------------------------------------------

LONG = tp.GPTConfig(n_layer=5, n_head=2, n_embd=16, vocab_size=32, block_size=256)     # activations are most of its memory
DATA = np.random.default_rng(3).integers(0, 32, 3000).astype(np.int32)
SLICES = {"gpipe": [(1, [256])] * 4, "seq1f1b": [(1, [96, 88, 72])] * 4}


def trained(plan):
    run = tp.launch(plan, DATA, 2, seed=4, lr=1e-2, processes=False, progress=False)
    return [(record.loss, record.grad_norm) for record in run], run.report()


@pytest.mark.parametrize("schedule", SLICES)
@pytest.mark.parametrize("planner", SAVERS)
def test_savers_save_what_the_schedule_holds(planner, schedule):
    """Where nothing fits unless something is made again, each of them finds a plan, and it trains as planned."""
    options = {"batch": 4, "seq_len": 256, "stages": 2, "schedule": schedule, "slicing": SLICES[schedule]}
    free = tp.plan(LONG, CLUSTER, planner="uniform", **options)
    full = tp.plan(LONG, CLUSTER, planner="uniform", recompute="full", **options)
    limit = max(full.peak_memory_bytes) * 51 // 50
    plan = tp.plan(LONG, CLUSTER, planner=planner, memory_bytes=limit, **options)
    assert any(plan.recompute) and max(plan.peak_memory_bytes) <= limit
    losses, report = trained(plan)
    assert losses == trained(free)[0]
    assert report.peak_memory_bytes == plan.peak_memory_bytes


@pytest.mark.parametrize("schedule, stages, planner", [("1f1b", 4, "dapple"), ("zb-h1", 2, "autopipe"), ("zb-h1", 3, "pipedream")])
def test_what_the_request_makes_again_leaves_the_memory_that_it_leaves(schedule, stages, planner):
    """A planner is told of all of it, and of no more: of all partitions that fit it finds the fastest."""
    options = {"batch": 4, "seq_len": 256, "stages": stages, "schedule": schedule, "slicing": [(1, [256])] * 4, "recompute": "full"}
    limit = max(tp.plan(LONG, CLUSTER, planner=planner, **options).peak_memory_bytes) * 97 // 100
    every = [tp.plan(LONG, CLUSTER, planner="uniform", partition=list(itertools.pairwise(edges)), **options)
             for edges in cuts(LONG.num_blocks, stages)]
    fitting = [plan.step_time_s for plan in every if max(plan.peak_memory_bytes) <= limit]
    assert 0 < len(fitting) < len(every)
    assert tp.plan(LONG, CLUSTER, planner=planner, memory_bytes=limit, **options).step_time_s == min(fitting)
