"""How long does BMPipe's planner take, how close is its bound, and what does HiGHS find beside it?

The cases of PLANNERS.md 4.3 and 4.4 (stages, micro-batches, layers) and a larger one, with 1, 2, 4 and 8 chunks; costs of our
own: a head, the layers, a tail; recompute none, selective or all; memory so that some recomputation is needed. One thread.
Seconds are the median of --repeats calls; with --highs, HiGHS (extra terapipe_c[highs]) has that many seconds for each case of
1 or 2 chunks and less than 16 stages.
--before: an earlier file of this benchmark, whose plans and gaps are kept beside the new ones.

    python benchmarks/bmpipe.py [--repeats 5] [--highs 120] [--only 8,64,96] [--before FILE] [--out FILE]
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import header, repeat_arguments, write

from terapipe_c import planners

CASES = [((4, 16, 32), 28e9), ((8, 32, 80), 40e9), ((8, 64, 96), 64e9), ((8, 64, 96), 40e9), ((16, 64, 128), 40e9)]


def layers_of(body: int) -> list[dict[str, Any]]:
    return [
        {"name": name, "count": count, "fwd_s": f, "bwd_s": 2 * f, "static_bytes": 1.8e9, "strategies": [
            {"name": "none", "extra_bwd_s": 0.0, "activation_bytes": 3.4e8},
            {"name": "selective", "extra_bwd_s": 0.08 * f, "activation_bytes": 2.2e8},
            {"name": "full", "extra_bwd_s": f, "activation_bytes": 2.4e7}]}
        for name, count, f in (("head", 1, 0.004), ("body", body, 0.010), ("tail", 1, 0.016))
    ]  # fmt: skip


def record(plan: planners.BMPipePlan, seconds: list[float]) -> dict[str, Any]:
    return {
        "step_s": plan.step_time_s, "bound_s": plan.lower_bound_s, "gap": plan.gap, "optimal": plan.optimal,
        "median_s": statistics.median(seconds), "least_s": min(seconds), "greatest_s": max(seconds),
        "bubbles": plan.bubbles, "peak_bytes": max(plan.peak_memory_bytes), "layers": plan.layers.tolist(),
        "evaluations": plan.evaluations, "simulations": plan.simulations, "nodes": plan.nodes, "paths": plan.paths,
    }  # fmt: skip


def measure(call: Any, repeats: int) -> dict[str, Any]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        plan = call()
        seconds.append(time.perf_counter() - start)
    return record(plan, seconds)


def show(name: str, row: dict[str, Any]) -> None:
    proof = "optimal" if row["optimal"] else f"gap {row['gap'] * 100:.2f} %"
    print(f"{name:48s} step {row['step_s']:9.4f} s  bound {row['bound_s']:9.4f} s  {proof:12s} {row['median_s']:9.4f} s")


def main() -> None:
    parser = repeat_arguments(__doc__, "bmpipe", repeats=5)
    parser.add_argument("--highs", type=float, default=0.0, help="seconds for HiGHS a case; 0: none")
    parser.add_argument("--before", help="an earlier file of this benchmark")
    parser.add_argument("--only", help="stages,micro-batches,layers: this case alone")
    options = parser.parse_args()
    about = header("how long BMPipe's planner takes, how close its bound is, what HiGHS finds beside it")
    before = json.loads(Path(options.before).read_text()) if options.before else {"rows": []}
    rows = []
    for case, memory in CASES:
        if options.only and options.only != ",".join(map(str, case)):
            continue
        stages, micro, body = case
        for chunks in (1, 2, 4, 8):
            request = (layers_of(body), stages, micro, memory, chunks)
            name = f"{stages} stages x {chunks}, {micro} micro-batches, {body} layers, {memory / 1e9:g} GB"
            row: dict[str, Any] = {"case": case, "chunks": chunks, "memory_bytes": memory}
            row["own"] = measure(lambda request=request: planners.bmpipe(*request), options.repeats)
            show(name, row["own"])
            for old in before["rows"]:
                if (tuple(old["case"]), old["chunks"], old["memory_bytes"]) == (case, chunks, memory):
                    row["before"] = {key: old["own"][key] for key in ("step_s", "bound_s", "gap", "median_s")}
                    row["before"]["commit"] = before["commit"]
            if options.highs > 0.0 and chunks < 4 and stages < 16:
                try:
                    row["highs"] = measure(
                        lambda request=request: planners.bmpipe_highs(*request, time_limit_s=options.highs), 1
                    )
                    row["highs_version"] = importlib.metadata.version("highspy")
                    show("    HiGHS", row["highs"])
                except (ImportError, TimeoutError) as error:
                    row["highs"] = str(error)
                    print(f"    HiGHS: {error}")
            rows.append(row)
    write("bmpipe", {**about, "repeats": options.repeats, "highs_limit_s": options.highs, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
