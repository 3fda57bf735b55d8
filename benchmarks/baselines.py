"""How do the baselines compare on one table, and how much faster than Piper's own programme is the exact planner?

Chain: an embedding, L layers of two blocks (1 and 2 units forward, twice that backward) and a head, 1F1B with twice as many
micro-batches as stages, messages that cost 0.1 units of the receiving stage: PLANNERS.md 2.5's table. Times are medians of
--repeats calls through Python, with the least and the greatest.

Layer graph: embedding, 32 or 64 transformer layers, pooler, as a chain, with the times, sizes and messages of
inputs/bert32a100.json of msr-fiddle/piper (MIT; profiled on A100): tensor degrees 1, 2, 4, 8, plain or recomputed, 1920
micro-batches, 25 GB/s; 512 devices of 80 and of 16 GB. And graphs drawn at random, 512 devices: chains of 24 to 98 layers, all
different ("apart": tensor degrees on their own, too) or all but the ends alike, plain or recomputed, 12 GB/s, of 512 micro-batches
and 16 GB or of 1920 and 80 GB; and such chains with edges past a layer. Both planners minimise the same time per sample over the
same plans; Piper's programme is run --piper-repeats times, ours --repeats times; the ratio is that of the medians of CPU time
(one thread each), which other work on the machine disturbs less than the clock on the wall.

    python benchmarks/baselines.py [--repeats 9] [--piper-repeats 2] [--out FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common import header, repeat_arguments, write

from terapipe_c import InfeasibleError, planners
from terapipe_c.planners import LayerEdge, LayerGraph, LayerNode, LayerVariant

# (time per sample s, parameters, memory a, memory b) by tensor degree: plain, recomputed
TRANSFORMER = {
    1: [(0.030492, 176997120.0, 606478336.0, 353994240.0), (0.040685, 176997120.0, 48234496.0, 912500224.0)],
    2: [(0.018696, 88510080.0, 341581824.0, 177020160.0), (0.024891, 88510080.0, 48234496.0, 470367488.0)],
    4: [(0.011928, 44266560.0, 208543744.0, 88533120.0), (0.015604, 44266560.0, 48234496.0, 248711296.0)],
    8: [(0.009396, 22144800.0, 142811136.0, 44289600.0), (0.012056, 22144800.0, 48234496.0, 138604096.0)],
}
EMBEDDING = {
    1: [(0.001116, 200824320.0, 1982464.0, 401648640.0), (0.001413, 200824320.0, 16384.0, 403614720.0)],
    2: [(0.003278, 104348160.0, 1987072.0, 208696320.0), (0.004851, 104348160.0, 16384.0, 210667008.0)],
    4: [(0.003786, 56110080.0, 2052608.0, 112220160.0), (0.004745, 56110080.0, 16384.0, 114190848.0)],
    8: [(0.004097, 31991040.0, 1987072.0, 63982080.0), (0.00512, 31991040.0, 16384.0, 65952768.0)],
}
POOLER = {degree: [(0.0, 14749440.0, 31457280.0, 29498880.0)] * 2 for degree in (1, 2, 4, 8)}
MESSAGE = 31457280.0


def bert(layers: int, devices: int, memory_bytes: float, micro_batches: int = 1920) -> LayerGraph:
    rows = [EMBEDDING, *[TRANSFORMER] * layers, POOLER]
    nodes = []
    for i, row in enumerate(rows):
        neighbours = [j for j in (i - 1, i + 1) if 0 <= j < len(rows)]
        ways = {
            degree: [
                LayerVariant(name, *values, {j: 0.0 if degree == 1 else MESSAGE for j in neighbours})
                for name, values in zip(("vanilla", "activation recomp"), pair, strict=True)
            ]
            for degree, pair in row.items()
        }
        nodes.append(LayerNode(i, ways))
    edges = [LayerEdge(i, i + 1, MESSAGE) for i in range(len(rows) - 1)]
    return LayerGraph(nodes, edges, devices, memory_bytes, 25e9, micro_batches)


def measure(call: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    """Wall clock and, because the machine may be shared, this process's CPU time (both planners use one thread)."""
    result, walls, times = None, [], []
    for _ in range(repeats):
        wall, start = time.perf_counter(), time.process_time()
        result = call()
        times.append(time.process_time() - start)
        walls.append(time.perf_counter() - wall)
    return result, {"median_s": statistics.median(walls), "least_s": min(walls), "greatest_s": max(walls),
                    "cpu_median_s": statistics.median(times), "cpu_least_s": min(times)}  # fmt: skip


def chains(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for stages, layers in ((4, 24), (8, 24), (16, 24), (32, 48)):
        fwd = np.array([0.3] + [1.0, 2.0] * layers + [4.0])
        n = len(fwd)
        memory = {"static_bytes": np.full(n, 10.0), "activation_bytes": np.full(n, 8.0), "recompute_s": fwd}
        needed = planners.uniform(fwd, 2 * fwd, stages, 2 * stages, memory=memory | {"limit_bytes": 1e9}).peak_memory_bytes.max()
        for share in (1.0, 0.75):
            limited = None if share == 1.0 else memory | {"limit_bytes": float(share * needed)}
            for planner, options in ((planners.uniform, {}), (planners.merak, {}), (planners.pipedream, {"straight": True}),
                                     (planners.vpipe, {}), (planners.adapipe, {})):  # fmt: skip
                record: dict[str, Any] = {"planner": planner.__name__, "stages": stages, "layers": layers, "memory_share": share}
                try:
                    plan, times = measure(
                        partial(planner, fwd, 2 * fwd, stages, 2 * stages, 0.1, True, limited, **options), repeats
                    )
                except InfeasibleError as error:
                    rows.append(record | {"infeasible": str(error)})
                    print(f"{stages:3d} stages, {layers} layers, memory x{share:<4}: {planner.__name__:9s} does not fit")
                    continue
                found = {key: getattr(plan, key) for key in ("step_time_s", "lower_bound_s", "planning_time_s")}
                rows.append(record | times | found | {"recomputed": int(plan.recompute.sum())})
                print(f"{stages:3d} stages, {layers} layers, memory x{share:<4}: {planner.__name__:9s} {plan.step_time_s:9.1f}  "
                      f"gap {plan.gap * 100:6.2f} %  {int(plan.recompute.sum()):3d} recomputed  planned in "
                      f"{plan.planning_time_s * 1e3:8.3f} ms")  # fmt: skip
    return rows


def drawn(layers: int, kind: str, skips: int = 0, micro_batches: int = 512, memory_bytes: float = 16e9) -> LayerGraph:
    rng = np.random.default_rng(layers)

    def draw() -> list[float]:
        return rng.uniform([0.02, 2e8, 1e9], [0.06, 8e8, 2e9]).tolist()

    inner, nodes = draw(), []
    for i in range(layers):
        own = inner if kind == "alike" and 0 < i < layers - 1 else draw()
        ways = {}
        for degree in (1, 2, 4, 8):
            seconds, weights, kept = draw() if kind == "apart" else own
            fast, size = seconds / degree**0.9, weights / degree
            ways[degree] = [LayerVariant("vanilla", fast, size, kept / degree, 4 * size),
                            LayerVariant("activation recomp", 1.33 * fast, size, 1e8 / degree, 4 * size)]  # fmt: skip
        nodes.append(LayerNode(i, ways))
    edges = [LayerEdge(i, i + 1, 4e7) for i in range(layers - 1)]
    edges += [LayerEdge(i, i + 2, 1e7) for i in range(0, layers - 2, 4)][:skips]
    return LayerGraph(nodes, edges, 512, memory_bytes, 12e9, micro_batches)


def compare(name: str, graph: LayerGraph, repeats: int, piper_repeats: int) -> dict[str, Any]:
    planners.parallel_layers(graph)  # packs the graph's arrays once for both
    ours, our_times = measure(partial(planners.parallel_layers, graph), repeats)
    theirs, their_times = measure(partial(planners.piper, graph, exhaustive=True), piper_repeats)
    spared, spared_times = measure(partial(planners.piper, graph), piper_repeats)
    assert spared.time_per_sample_s == theirs.time_per_sample_s
    assert ours.optimal and ours.time_per_sample_s <= theirs.time_per_sample_s * (1 + 1e-12)
    ratio = their_times["cpu_median_s"] / our_times["cpu_median_s"]
    print(f"{name}, {graph.devices} devices of {graph.memory_bytes / 1e9:g} GB: {ours.time_per_sample_s * 1e3:.5f} ms a sample "
          f"(Piper {theirs.time_per_sample_s * 1e3:.5f}), CPU {our_times['cpu_median_s'] * 1e3:.1f} ms against "
          f"{their_times['cpu_median_s']:.2f} s: {ratio:.0f} times faster (wall {our_times['median_s'] * 1e3:.1f} ms, "
          f"{their_times['median_s']:.2f} s); where Piper's spares pairs {spared_times['cpu_median_s']:.2f} s")  # fmt: skip
    return {
        "devices": graph.devices, "memory_bytes": graph.memory_bytes, "micro_batches": graph.micro_batches,
        "time_per_sample_s": ours.time_per_sample_s, "piper_time_per_sample_s": theirs.time_per_sample_s,
        "optimal": ours.optimal, "searches": ours.searches, "knapsacks": ours.knapsacks,
        "piper_knapsacks": theirs.knapsacks, "ours": our_times, "piper": their_times, "ratio_of_cpu_medians": ratio,
        "piper_sparing_pairs": spared_times,
        "ratio_where_it_spares_pairs": spared_times["cpu_median_s"] / our_times["cpu_median_s"],
    }  # fmt: skip


def layer_graphs(repeats: int, piper_repeats: int) -> list[dict[str, Any]]:
    rows = []
    for layers, devices, memory_bytes in ((32, 64, 80e9), (32, 512, 80e9), (32, 512, 16e9), (64, 512, 80e9), (64, 512, 16e9)):
        graph = bert(layers, devices, memory_bytes)
        rows.append({"layers": layers} | compare(f"{layers} layers", graph, repeats, piper_repeats))
    return rows


def drawn_graphs(repeats: int, piper_repeats: int) -> list[dict[str, Any]]:
    rows = []
    cases = [(layers, kind, 0, 512, 16e9) for kind in ("each its own", "apart", "alike") for layers in (24, 34, 50, 98)]
    cases += [(24, "each its own", 0, 1920, 80e9), (50, "each its own", 0, 1920, 80e9)]
    cases += [(24, "each its own", 6, 512, 16e9), (34, "apart", 3, 512, 16e9)]
    for layers, kind, skips, micro_batches, memory_bytes in cases:
        name = f"{layers} layers, {kind}, {skips} skips, {micro_batches} micro-batches"
        graph = drawn(layers, kind, skips, micro_batches, memory_bytes)
        rows.append({"layers": layers, "kind": kind, "skips": skips} | compare(name, graph, repeats, piper_repeats))
    for which in ("ratio_of_cpu_medians", "ratio_where_it_spares_pairs"):
        print(f"{which}: {min(row[which] for row in rows):.0f} to {max(row[which] for row in rows):.0f}")
    return rows


def main() -> None:
    parser = repeat_arguments(__doc__, "baselines")
    parser.add_argument("--piper-repeats", type=int, default=2)
    options = parser.parse_args()
    print(__doc__)
    about = header("how the baselines compare on one table, and how much faster than Piper's programme the exact planner is")
    repeats = options.repeats, options.piper_repeats
    rows = {"chains": chains(options.repeats), "layer_graphs": layer_graphs(*repeats), "drawn_graphs": drawn_graphs(*repeats)}
    write("baselines", {**about, "repeats": options.repeats, "piper_repeats": options.piper_repeats, **rows}, options.out)


if __name__ == "__main__":
    main()
