"""Does more memory ever make a plan slower, and what does less of it cost?

GPTs of ordinary sizes, by first principles; every planner with every schedule that it can be asked for, within parts of the memory
that its plan without a limit needs. For each the longest that a step takes beside one with less memory (1: more never hurts), what
the step takes within each part beside the step without a limit, and the seconds that a plan takes.

    python benchmarks/limits.py [--planners terapipe,piper] [--schedules 1f1b] [--sizes 24x8] [--out FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

from common import header, write

import terapipe_c as tp
from terapipe_c.planning.request import CHUNKED, PLANNERS

# layers x stages: width, batch, tokens
SIZES = {"24x8": (1024, 16, 1024), "32x4": (4096, 8, 2048), "36x6": (1280, 12, 1024), "48x8": (1600, 8, 1024),
         "48x16": (1600, 32, 1024)}  # fmt: skip
SCHEDULES = ("1f1b", "gpipe", "seq1f1b", "zb-h1", "bpipe", "interleaved")
PARTS = (0.5, 0.6, 0.66, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1e3)


def row_of(size: str, planner: str, schedule: str) -> dict[str, Any]:
    layers, stages = map(int, size.split("x"))
    width, batch, tokens = SIZES[size]
    model = tp.GPTConfig(n_layer=layers, n_head=width // 64, n_embd=width, vocab_size=50257, block_size=tokens)
    cluster = tp.Cluster(num_devices=stages, memory_bytes=1e13, link_latency_s=1e-5)
    request = {"batch": batch, "seq_len": tokens, "planner": planner, "schedule": schedule, "stages": stages,
               "costs": tp.CostModel.analytic(model, cluster), **({"chunks": 2} if schedule == "interleaved" else {})}
    free = tp.plan(model, cluster, **request)
    most, seconds, step_s = max(free.peak_memory_bytes), [], {}
    for part in PARTS:
        limited, start = dataclasses.replace(cluster, memory_bytes=int(part * most)), time.perf_counter()
        try:
            step_s[part] = tp.plan(model, limited, **request).step_time_s
        except tp.InfeasibleError:
            pass
        seconds.append(time.perf_counter() - start)
    steps = list(step_s.values())
    worst = max([after / min(steps[:i + 1]) for i, after in enumerate(steps[1:])], default=1.0)
    return {"size": size, "planner": planner, "schedule": schedule, "free_step_s": free.step_time_s, "free_peak_bytes": most,
            "step_s": step_s, "more_beside_less": worst, "planning_s": {"median": statistics.median(seconds), "most": max(seconds)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [name for name in PLANNERS if name not in ("auto", "uniform")]
    parser.add_argument("--planners", default=",".join(names))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--out")
    given = parser.parse_args()
    about, rows = header("Does more memory ever make a plan slower, and what does less of it cost?"), []
    for size in given.sizes.split(","):
        for schedule in given.schedules.split(","):
            for planner in given.planners.split(","):
                if schedule == "interleaved" and planner not in CHUNKED:
                    continue
                rows.append(row_of(size, planner, schedule))
                last = rows[-1]
                print(f"{size:6s} {schedule:11s} {planner:18s} {len(last['step_s']):2d} of {len(PARTS)} limits have a plan; "
                      f"more beside less {last['more_beside_less']:.4f}; {last['planning_s']['median']:.2f} s a plan, at most "
                      f"{last['planning_s']['most']:.2f} s", flush=True)
    worst = {name: max(row["more_beside_less"] for row in rows if row["planner"] == name) for name in given.planners.split(",")}
    print(", ".join(f"{name} {value:.4f}" for name, value in worst.items()))
    write("limits", about | {"rows": rows, "more_beside_less": worst}, given.out)


if __name__ == "__main__":
    main()
