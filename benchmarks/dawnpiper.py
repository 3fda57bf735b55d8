"""How long do the DawnPiper planners take, what is proven, and how far from the optimum is the published search?

    period = max over stages of max(T + recompute, swapped / bus)        (PLANNERS.md 3.3)

Every figure is the median of --repeats calls through Python on one thread, with the least and the greatest beside it.
Nodes are synthetic: forward 0.1 to 0.5 ms, backward twice that, recomputation the forward, 1 to 40 MB of activations, up to
8 MB of parameters with twice as much optimiser state, all uniform. "proportional": recompute seconds per byte are all
equal, so that a stage's choice is a subset sum over real numbers; "nearly": equal to 1 %; "repeated": 12 nodes again and
again, as the layers of a transformer. Micro-batches: two a stage, 1F1B. BiPar, the published search, is timed once.

    python benchmarks/dawnpiper.py [--repeats 9] [--out FILE]
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import numpy as np
from common import header, repeat_arguments, write

import terapipe_c as tp
from terapipe_c.planners import dawnpiper, dawnpiper_binary


def nodes_of(kind: str, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(15)
    forward, kept, params = rng.uniform(1e-4, 5e-4, n), rng.uniform(1e6, 4e7, n), rng.uniform(0, 8e6, n)
    again = {"uniform": forward, "repeated": forward, "proportional": 1e-11 * kept,
             "nearly": 1e-11 * kept * rng.uniform(1, 1.01, n)}[kind]  # fmt: skip
    nodes = {"fwd_s": forward, "bwd_s": 2 * forward, "recompute_s": again, "activation_bytes": kept, "param_bytes": params,
             "optimizer_bytes": 2 * params}  # fmt: skip
    return {key: np.resize(value[:12], n) if kind == "repeated" else value.copy() for key, value in nodes.items()}


def row(name: str, planner: Any, repeats: int) -> dict[str, Any]:
    times, got = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        try:
            got = planner()
        except tp.InfeasibleError as error:
            got = error
        times.append(time.perf_counter() - start)
    times.sort()
    record: dict[str, Any] = {"name": name, "median_s": statistics.median(times), "least_s": times[0], "greatest_s": times[-1]}
    shown = f"{name:54s} {record['median_s'] * 1e3:9.2f} ms [{times[0] * 1e3:.2f} .. {times[-1] * 1e3:.2f}]  "
    if isinstance(got, tp.InfeasibleError):
        record["finds_none"] = True
        print(shown + "finds no plan")
        return record
    assert got is not None
    record |= {"period_s": got.period_s, "step_s": got.step_time_s, "optimal": got.optimal, "gap": got.gap,
               "relaxed_gap": got.period_s / got.relaxed_s - 1, "recomputed": int(got.recompute.sum()),
               "swapped": int((got.swap_bytes > 0).sum()), "probes": got.probes, "evaluations": got.evaluations,
               "knapsacks": got.knapsacks, "states": got.states}  # fmt: skip
    print(shown + f"period {got.period_s * 1e3:9.4f} ms  {'optimal' if got.optimal else f'gap {got.gap:.1e}'}")
    return record


def main() -> None:
    options = repeat_arguments(__doc__, "dawnpiper").parse_args()
    print(__doc__)
    about = header("how long the DawnPiper planners take, and how far from the optimum the published search is")
    rows = []
    for kind in ("uniform", "repeated", "nearly", "proportional"):
        for n, stages, memory in ((1000, 8, 10e9), (1000, 8, 5e9), (1000, 16, 3e9), (10000, 32, 20e9)):
            for bus in (12e9, 0.0):
                hard = kind == "proportional" or (kind == "nearly" and n > 1000)
                case = f"{kind} {n} nodes, {stages} stages, {memory / 1e9:g} GB, bus {bus / 1e9:g} GB/s"
                nodes = nodes_of(kind, n)
                plan = partial(dawnpiper, nodes, stages, memory, 2 * stages, swap_bandwidth_Bps=bus)
                rows.append(row("exact: " + case, plan, min(options.repeats, 3) if hard else options.repeats))
                if n <= 1000 and kind in ("uniform", "repeated"):
                    plan = partial(dawnpiper_binary, nodes, stages, memory, 2 * stages, swap_bandwidth_Bps=bus)
                    rows.append(row("BiPar: " + case, plan, 1))
                    if "period_s" in rows[-1]:
                        rows[-1]["over_exact"] = rows[-1]["period_s"] / rows[-2]["period_s"] - 1
    write("dawnpiper", {**about, "repeats": options.repeats, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
