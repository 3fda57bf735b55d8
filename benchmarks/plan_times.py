"""How long does a plan take, everything but the request left to tp.plan, and what does it give?

Published models on A100s, costs by first principles, memory that does not bind, half as much as the fastest plan needs above the
least, and none that is enough. Seconds are of the process, all its threads, once each (auto: the first alone); behind them, and
fewer where auto had several cores, those that passed.

    python benchmarks/plan_times.py [--planners terapipe,auto] [--cases N] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import header, write

import terapipe_c as tp

CASES = (("gpt2-124m", 2, 1, 1024), ("gpt2-124m", 4, 8, 1024), ("gpt2-345m", 4, 16, 1024), ("gpt2-345m", 8, 8, 1024),
         ("gpt2-1558m", 8, 16, 1024), ("gpt3-1b", 8, 8, 2048), ("gpt3-1b", 24, 16, 2048), ("gpt3-13b", 8, 32, 2048),
         ("gpt3-13b", 20, 32, 2048), ("gpt3-13b", 40, 32, 2048), ("gpt3-44b", 48, 8, 2048), ("gpt3-44b", 8, 64, 2048),
         ("gpt3-175b", 48, 2, 2048), ("gpt3-175b", 96, 2, 2048), ("gpt3-175b", 32, 64, 2048))  # fmt: skip


def asked(model: tp.GPTConfig, cluster: tp.Cluster, **request: Any) -> dict[str, Any]:
    """One plan, or what would fit."""
    start, begun = time.process_time(), time.perf_counter()

    def taken() -> dict[str, float]:
        return {"seconds": time.process_time() - start, "passed_s": time.perf_counter() - begun}

    try:
        plan = tp.plan(model, cluster, **request)
    except tp.InfeasibleError as error:
        return {**taken(), "needs_bytes": error.memory_bytes}
    return {**taken(), "step_time_s": plan.step_time_s, "schedule": plan.schedule, "gap": plan.gap,
            "granularity": plan.granularity, "bytes": max(plan.peak_memory_bytes)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planners", default="terapipe,auto")
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--out")
    args = parser.parse_args()
    about, rows = header("How long does a plan take?"), []
    for name, devices, batch, seq_len in CASES[: args.cases]:
        model, cluster = tp.GPTConfig.preset(name), tp.Cluster.preset("A100-80", devices)
        row: dict[str, Any] = {"model": name, "devices": devices, "batch": batch, "seq_len": seq_len}
        for planner in args.planners.split(","):
            request = dict(batch=batch, seq_len=seq_len, costs=tp.CostModel.analytic(model, cluster), planner=planner)
            free = row[planner] = asked(model, cluster, memory_bytes=10**15, **request)
            if planner != "auto":
                none = row[f"{planner}, none fits"] = asked(model, cluster, memory_bytes=1, **request)
                half = (free["bytes"] + none["needs_bytes"]) // 2
                row[f"{planner}, half the memory above the least"] = asked(model, cluster, memory_bytes=half, **request)
        rows.append(row)
        print({name: f"{value['seconds']:.2f}, {value['passed_s']:.2f}" if isinstance(value, dict) else value
               for name, value in row.items()}, flush=True)  # fmt: skip
    write("plan_times", {**about, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
