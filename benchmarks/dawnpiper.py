"""How long do the DawnPiper planners take, what is proven, and how far from the optimum is the published search?

    period = max over stages of max(T + recompute, swapped / bus)        (PLANNERS.md 3.3)

Every figure is the median of --repeats calls through Python on one thread, with the least and the greatest beside it.
Nodes are synthetic: forward 0.1 to 0.5 ms, backward twice that, recomputation the forward, 1 to 40 MB of activations, up to
8 MB of parameters with twice as much optimiser state, all uniform. "proportional": recompute seconds per byte are all
equal, so that a stage's choice is a subset sum over real numbers; "nearly": equal to 1 %; "repeated": 12 nodes again and
again, as the layers of a transformer. "narrow": times and bytes
within 2 to 5 %; "heavy": heavy tails; "huge": six nodes of 40 times the size.
Micro-batches: two a stage, 1F1B. BiPar, the published search, is timed once.

    python benchmarks/dawnpiper.py [--repeats 9] [--out FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from common import header, repeat_arguments, write

import terapipe_c as tp
from terapipe_c.planners import dawnpiper, dawnpiper_binary


def nodes_of(kind: str, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(15)
    forward, kept, params = rng.uniform(1e-4, 5e-4, n), rng.uniform(1e6, 4e7, n), rng.uniform(0, 8e6, n)
    if kind == "narrow":
        forward, kept, params = rng.uniform(0.98e-3, 1.02e-3, n), rng.uniform(1.9e7, 2.1e7, n), rng.uniform(3.9e6, 4.1e6, n)
    elif kind == "heavy":
        forward, kept, params = (least * (1 + rng.pareto(1.5, n)) for least in (1e-4, 2e6, 4e5))
    elif kind == "huge":
        for values in (forward, kept, params):
            values[rng.choice(n, 6, replace=False)] *= 40
    again = {"uniform": forward, "repeated": forward, "proportional": 1e-11 * kept,
             "nearly": 1e-11 * kept * rng.uniform(1, 1.01, n)}.get(kind, forward)  # fmt: skip
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


def least_memory(nodes: dict[str, Any], schedule: str, optimise: bool) -> float:
    try:
        dawnpiper(nodes, 8, 1.0, 16, schedule, optimise_memory=optimise)
    except tp.InfeasibleError as error:
        return float(str(error).split("memory_bytes = ")[1].split(" would do")[0])
    raise AssertionError("1 byte fits")


def families(repeats: int) -> Iterator[dict[str, Any]]:
    """1000 nodes on 8 stages, 16 micro-batches; memory a part of the way from what everything recomputed needs to what nothing
    recomputed needs."""
    for kind in ("uniform", "narrow", "proportional", "nearly", "heavy", "huge", "repeated"):
        nodes = nodes_of(kind, 1000)
        nodes["cut_bytes"] = nodes["activation_bytes"] / 2
        for schedule in ("1f1b", "gpipe", "pipedream"):
            low, high = (least_memory(nodes, schedule, optimise) for optimise in (True, False))
            for name, part in (("tight", 0.05), ("middle", 0.4), ("loose", 0.9)):
                for bus, link in ((12e9, None), (1e9, 1e9), (0.0, None)):
                    case = f"family: {kind} {schedule} {name}, bus {bus / 1e9:g} GB/s{', links' if link else ''}"
                    yield row(case, partial(dawnpiper, nodes, 8, low + part * (high - low), 16, schedule, bus,
                                            link_bandwidth_Bps=link), repeats)  # fmt: skip


def main() -> None:
    options = repeat_arguments(__doc__, "dawnpiper").parse_args()
    print(__doc__)
    about = header("how long the DawnPiper planners take, and how far from the optimum the published search is")
    rows = list(families(options.repeats))
    for kind in ("uniform", "narrow", "proportional", "nearly", "heavy", "huge", "repeated"):
        medians = [record["median_s"] * 1e3 for record in rows if f": {kind} " in record["name"]]
        print(f"{kind:14s} {len(medians)} plans: medians of {statistics.median(medians):.2f} ms, at most {max(medians):.2f}")
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
