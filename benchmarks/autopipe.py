"""How good and how fast are AutoPipe's planners: the paper's, the pivot bound, the exact search, the slicer?

The table of PLANNERS.md 2.5 on costs of our own in its shape: GPT-2 345M in half layers (attention, FFN), embedding and
head, everything recomputed in backward (3 x forward), blocking messages, 2 micro-batches a stage. Then the case of the issue,
and random blocks, which are much harder than a GPT: there the search may end at its limit with a gap. Every time is the median
of --repeats calls through Python on one thread, with the least and the greatest beside it.

    python benchmarks/autopipe.py [--repeats 9] [--out FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common import header, repeat_arguments, timed, write

from terapipe_c import planners

PLANNERS = {
    "Algorithm 1": planners.autopipe_balanced,
    "AutoPipe": planners.autopipe_heuristic,
    "pivot": planners.autopipe_pivot,
    "exact": planners.autopipe,
}


def gpt(layers: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Forward seconds of embedding, attention and FFN of each layer, head."""
    return np.array([0.4e-3] + [3.4e-3, 3.8e-3] * layers + [14.4e-3])


def measure(call: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    result, times = timed(call, repeats, warm=True)
    return result, {"median_s": statistics.median(times), "least_s": times[0], "greatest_s": times[-1]}


def row(
    name: str, fwd: Any, bwd: Any, stages: int, micro: int, comm_s: float, blocking: bool, repeats: int
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": name,
        "stages": stages,
        "micro_batches": micro,
        "comm_s": comm_s,
        "blocking": blocking,
    }
    line = f"{name:34s}"
    for planner, function in PLANNERS.items():
        plan, times = measure(partial(function, fwd, bwd, stages, micro, comm_s, blocking), repeats)
        record[planner] = {
            "step_time_s": plan.step_time_s,
            "lower_bound_s": plan.lower_bound_s,
            "gap": plan.gap,
            "optimal": plan.optimal,
            "simulations": plan.simulations,
            "nodes": plan.nodes,
            "boundaries": plan.boundaries,
            **times,
        }
        line += f"  {planner} {plan.step_time_s * 1e3:10.3f} ms ({times['median_s'] * 1e3:.2f} ms)"
    exact = record["exact"]
    proof = "optimal" if exact["optimal"] else f"gap {exact['gap']:.2e}"
    print(f"{line}  {proof}, {exact['simulations']} simulations, {exact['nodes']} nodes", flush=True)
    return record


def slicer(stages: int, repeats: int) -> dict[str, Any]:
    plan, times = measure(
        partial(planners.autopipe_slicer, np.full(stages, 1e-3), np.full(stages, 2e-3), 2 * stages, 1e-5), repeats
    )
    print(
        f"slicer, {stages} stages: split {plan.split} saves {plan.gain * 100:.2f} %, Algorithm 2 says "
        f"{plan.algorithm2_split} ({times['median_s'] * 1e3:.2f} ms)"
    )
    return {
        "name": f"slicer, {stages} stages",
        "split": plan.split,
        "algorithm2_split": plan.algorithm2_split,
        "gain": plan.gain,
        **times,
    }


def main() -> None:
    options = repeat_arguments(__doc__, "autopipe").parse_args()
    print(__doc__)
    about = header("how good and how fast AutoPipe's planners are")
    rows = []
    for stages, layers in ((4, 24), (8, 24), (16, 24), (32, 48), (48, 96)):
        f = gpt(layers)
        name = f"GPT, {stages} stages of {layers} layers"
        rows.append(row(name, f, 3 * f, stages, 2 * stages, 0.2e-3, True, options.repeats))
    f = 1e-3 * np.array([0.3] + [1.0, 2.0] * 96 + [4.0])
    rows.append(row("the issue's: 194 blocks, 48 stages", f, 2 * f, 48, 96, 0.1e-3, True, options.repeats))
    rng = np.random.default_rng(0)
    for blocks, stages in ((50, 16), (100, 32), (200, 48)):
        for micro in (stages // 2, stages, 2 * stages, 4 * stages):
            f = rng.uniform(0.5e-3, 1.5e-3, blocks)
            b = f * rng.uniform(1.5, 2.5, blocks)
            rows.append(row(f"random {blocks} blocks, m = {micro}", f, b, stages, micro, 1e-4, False, 1))
    slicers = [slicer(stages, options.repeats) for stages in (4, 8, 16, 48)]
    write("autopipe", {**about, "repeats": options.repeats, "rows": rows, "slicer": slicers}, options.out)


if __name__ == "__main__":
    main()
