"""Pruning changes no plan: planners find the same ones with it and with everything looked at."""

from dataclasses import replace

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import planners
from terapipe_c.planners import LayerEdge, LayerGraph, LayerNode, LayerVariant, parallel_layers, piper


def scaled(layers, by):
    return [{**layer, "fwd_s": layer["fwd_s"] * by, "bwd_s": layer["bwd_s"] * by,
             "strategies": [{**way, "extra_bwd_s": way["extra_bwd_s"] * by} for way in layer["strategies"]]}
            for layer in layers]  # fmt: skip


def test_a_proof_ends_the_search_with_the_same_plan() -> None:
    """Of whole seconds it may (csrc/plan/bmpipe_proof.c); in units of 1024 s, in which sums are as exact, the search goes on to its
    end."""
    rng, long, ended = np.random.default_rng(5), 0, 0
    for i in range(3000):
        stages, micro, memory = int(rng.integers(8, 15)), int(rng.integers(2, 7)), float(rng.integers(60, 300))
        layers = []
        for t in range(5):
            forward, backward, again = (float(rng.integers(1, most)) for most in (60, 120, 40))
            layers.append({"name": f"t{t}", "count": int(rng.integers(4, 9)), "fwd_s": forward, "bwd_s": backward,
                           "static_bytes": float(rng.integers(0, 9)), "strategies": [
                               {"name": "keep", "extra_bwd_s": 0.0, "activation_bytes": float(rng.integers(8, 20))},
                               {"name": "again", "extra_bwd_s": again, "activation_bytes": float(rng.integers(0, 6))}]})
        try:
            plan = tp.planners.bmpipe(layers, stages, micro, memory, comm_s=3.0, time_limit_s=None, effort=3000000)
        except tp.InfeasibleError:
            continue
        whole = tp.planners.bmpipe(scaled(layers, 1 / 1024), stages, micro, memory, comm_s=3 / 1024, time_limit_s=None,
                                   effort=3000000)  # fmt: skip
        assert (plan.assignment == whole.assignment).all(), i
        assert plan.step_time_s == 1024 * whole.step_time_s and plan.optimal >= whole.optimal, i
        assert plan.nodes <= whole.nodes
        long += whole.nodes > 4096
        ended += plan.nodes < whole.nodes
    print(f"{long} long searches, {ended} of them ended by a proof")
    assert long > 50 and ended > 30


def test_dapple_sifted_finds_what_it_does_unsifted() -> None:
    """Weights to exchange, however light, are not sifted (csrc/plan/baseline_dapple.c)."""
    rng, feasible, total = np.random.default_rng(9), 0, 400
    for i in range(total):
        n, most, unit = int(rng.integers(1, 40)), int(rng.choice([1, 2, 9, 1000])), float(rng.choice([1.0, 1 / 3, 1e8]))
        fwd, bwd = (rng.integers(0, m + 1, n) * unit for m in (most, 2 * most))
        if i % 3 == 0:
            fwd, bwd = np.full(n, fwd[0]), np.full(n, bwd[0])
        static, kept = (rng.integers(0, 9, n).astype(float) for _ in range(2))
        devices, micros, comm = int(rng.integers(1, min(n, 24) + 1)), int(rng.integers(1, 30)), float(rng.integers(0, 2)) * unit
        limit = float(rng.integers(1, 2 + int((static.sum() + kept.sum() * min(micros, devices)) * 3 / devices)))
        memory = None if i % 4 == 0 else {"static_bytes": static, "activation_bytes": kept, "limit_bytes": limit}
        found = []
        for weights in (None, np.full(n, 1e-300)):
            try:
                plan = planners.dapple(fwd, bwd, devices, micros, comm_s=comm, memory=memory, straight=True, param_bytes=weights)
                found.append((list(plan.boundaries), plan.objective_s))
            except tp.InfeasibleError as error:
                found.append((str(error),))
        assert found[0] == found[1], i
        feasible += len(found[0]) > 1
    print(f"{feasible} of {total} feasible")
    assert total // 3 < feasible < total


def test_a_chain_listed_in_another_order_has_the_same_plan() -> None:
    """Of a chain in order stages of like nodes are solved once (csrc/plan/layer_alike.c), of any other graph each by itself.
    Which of like nodes it is that recomputes depends on the order."""
    rng, feasible, total = np.random.default_rng(7), 0, 300
    for i in range(total):
        n, devices, micros = int(rng.integers(2, 25)), int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 6, 8]))
        kinds = [[LayerVariant(f"v{k}", float(rng.integers(1, 1000)), float(rng.integers(0, 50)), float(rng.integers(0, 1000)),
                               float(rng.integers(0, 1000))) for k in range(2)] for _ in range(3)]  # fmt: skip
        nodes = [LayerNode(k, {1: kinds[(k % 2) if 0 < k < n - 1 else 2]}) for k in range(n)]
        nodes[n // 2] = LayerNode(n // 2, {1: [replace(way, memory_b=way.memory_b + 77.0) for way in kinds[0]]})
        edges = [LayerEdge(k, k + 1, 10.0) for k in range(n - 1)]
        memory = float(rng.integers(500, 1500 * n))
        found = []
        for listed in (nodes, [nodes[k] for k in rng.permutation(n)]):
            try:
                plan = piper(LayerGraph(listed, edges, devices, memory, 1.0, micros))
                found.append([(sorted(stage.nodes), sorted(stage.variants), stage.data) for stage in plan.stages])
            except tp.InfeasibleError as error:
                found.append(str(error))
        assert found[0] == found[1], i
        feasible += not isinstance(found[0], str)
    print(f"{feasible} of {total} feasible")
    assert total // 3 < feasible < total


@pytest.mark.parametrize("field", range(5), ids=["time_s", "param_bytes", "memory_a", "memory_b", "degree"])
def test_layers_that_differ_in_one_thing_are_not_taken_for_each_other(field) -> None:
    """What both planners remember of a stage they use for stages like it; neither all pairs nor a graph that is no chain does."""
    rng = np.random.default_rng(field)
    for _ in range(20):
        low = rng.integers(1, 9, 4).astype(float)
        keeps = [low, low + (np.arange(4) == field) * float(rng.integers(4, 20))]
        nodes = [LayerNode(i, {t: [LayerVariant("keep", *(keep / min(t, 2))), LayerVariant("again", *(keep * again / min(t, 2)))]
                               for t in (1, 2 + (field == 4) * int(rng.integers(2)))})
                 for i, keep in enumerate(keeps[k] for k in rng.integers(0, 2, 8))
                 for again in [(1.3, 1.0, 0.2, 1.0)]]  # fmt: skip
        graph = LayerGraph(nodes, [LayerEdge(i, i + 1, 1.0) for i in range(7)], 8, float(rng.integers(20, 90)), 10.0, 8)
        assert piper(graph).stages == piper(graph, exhaustive=True).stages
        backwards = parallel_layers(replace(graph, nodes=nodes[::-1]))
        assert parallel_layers(graph).time_per_sample_s == pytest.approx(backwards.time_per_sample_s, rel=1e-12)
