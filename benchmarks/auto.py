"""Is planner="auto" ever slower than a planner and schedule that a user names, and how long does it take?

Random small models, clusters, costs, limits and batches; for each, auto against every planner of tp.plan with every schedule and
every number of chunks by name. Seconds are of the process, one thread; README's example by first principles, five times.

    python benchmarks/auto.py [--instances 100] [--seed 0] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import header, write

import terapipe_c as tp
from terapipe_c.planning.request import BY_NAME, CHUNKED, JOINT, PLANNERS


def named(planner: str, model: tp.GPTConfig, stages: int) -> Iterator[tuple[str, int]]:
    """Schedules and numbers of chunks that a user could name."""
    most = model.num_blocks // stages if planner in CHUNKED else 1
    return itertools.chain(itertools.product(JOINT, range(1, most + 1)), itertools.product(BY_NAME, (1,)))


def readme_seconds() -> float:
    """Median of five plans of README's example, with costs by first principles."""
    model = tp.GPTConfig(n_layer=4, n_head=4, n_embd=128, vocab_size=256, block_size=256)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        tp.plan(model, tp.Cluster.local(), batch=4, seq_len=256, stages=2)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def instance(rng: np.random.Generator) -> tuple[tp.GPTConfig, tp.Cluster, dict[str, Any]]:
    length = int(rng.choice([16, 24, 32]))
    model = tp.GPTConfig(n_layer=int(rng.integers(1, 5)), n_head=2, n_embd=8 * int(rng.integers(1, 4)),
                         vocab_size=int(rng.integers(8, 300)), block_size=length, tie_weights=bool(rng.integers(2)))  # fmt: skip
    link = {"link_latency_s": float(10 ** rng.uniform(-7, -4)), "link_bandwidth_Bps": float(10 ** rng.uniform(7, 10))}
    flops = float(10 ** rng.uniform(8, 11))
    cluster = tp.Cluster(num_devices=int(rng.integers(2, 7)), memory_bytes=1e9, peak_flops=flops, **link)
    kind = int(rng.integers(3))
    if kind == 0:
        costs = tp.CostModel.analytic(model, cluster)
    else:
        s, c = np.indices((length // 8 + 1, length // 8 + 1))
        table = (3 * rng.random() + s + 0.1 * s * c) * 1e-4 if kind == 1 else rng.integers(1, 60, s.shape) * 1e-5
        costs = tp.CostModel.from_table(table, table * rng.uniform(1, 2.5), granularity=8,
                                        latency_s=float(10 ** rng.uniform(-7, -4)))  # fmt: skip
    request: dict[str, Any] = {"batch": int(rng.integers(1, 9)), "seq_len": length, "costs": costs}
    if rng.integers(4):
        request["stages"] = int(rng.integers(1, min(cluster.num_devices, model.num_blocks) + 1))
    if rng.integers(2):
        even = tp.plan(model, cluster, planner="uniform", **request)
        request |= {"memory_bytes": float(rng.uniform(0.7, 1.3)) * max(even.peak_memory_bytes), "executable": bool(rng.integers(2))}
    return model, cluster, request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    rng, about = np.random.default_rng(args.seed), header("Is auto ever slower than a named planner and schedule?")
    counts = dict.fromkeys(("instances", "compared", "of_several_chunks", "auto_slower", "auto_finds_none", "not_executable",
                            "refused"), 0)  # fmt: skip
    chosen: dict[str, int] = {}
    seconds: list[float] = []
    gains: list[float] = []
    worse: list[Any] = []
    for i in range(args.instances):
        model, cluster, request = instance(rng)
        start = time.process_time()
        try:
            auto = tp.plan(model, cluster, **request)
        except tp.InfeasibleError:
            auto = None
        seconds.append(time.process_time() - start)
        counts["instances"] += 1
        least = float("inf")
        for planner in PLANNERS[1:]:
            for schedule, chunks in named(planner, model, request.get("stages", 1)):
                try:
                    plan = tp.plan(model, cluster, planner=planner, schedule=schedule, chunks=chunks, **request)
                except ValueError:
                    counts["refused"] += 1
                    continue
                counts["not_executable"] += not plan.executable
                counts["compared"] += 1
                counts["of_several_chunks"] += chunks > 1
                least = min(least, plan.step_time_s)
                if auto is None:
                    counts["auto_finds_none"] += 1
                elif auto.step_time_s > plan.step_time_s * (1 + 1e-9):
                    counts["auto_slower"] += 1
                    worse.append([i, planner, schedule, chunks, auto.step_time_s / plan.step_time_s - 1])
                    print("slower:", worse[-1], request, auto.search_log, flush=True)
        if auto is not None:
            chosen[auto.schedule] = chosen.get(auto.schedule, 0) + 1
            if least < float("inf"):
                gains.append(least / auto.step_time_s - 1)
        if i % 10 == 9:
            print(counts, f"median {statistics.median(seconds):.2f} s", flush=True)
    result = {"counts": counts, "chosen": chosen, "worse": worse, "median_s": statistics.median(seconds),
              "greatest_s": max(seconds), "readme_s": readme_seconds(),
              "faster_than_the_best_named": {"median": statistics.median(gains), "greatest": max(gains)}}  # fmt: skip
    print(result)
    write("auto", {**about, **result}, args.out)


if __name__ == "__main__":
    main()
