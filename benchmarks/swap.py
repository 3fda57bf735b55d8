"""What does it cost to keep activations out of memory: making them again, or swapping them to a file?

One GPT, GPipe, eight micro-batches: all that is kept, what DawnPiper recomputes, and what it swaps within the same limit, by
the ranks themselves and beside their work, for which each wants a core more. Steps are timed in interleaved rounds; beside them
what the plan predicted, and the bytes of the fullest rank, which the engine must meet exactly. Losses are the same bits.

--emulate asks the same of eight ranks with 60 % of the memory that 1F1B and GPipe need: the real engine, with timed waits for
kernels and copies at 2 GB/s, so that nobody shares a core.

    python benchmarks/swap.py [--ranks 2] [--rounds 3] [--steps 3] [--share 0.62] [--emulate] [--out FILE]
"""
import argparse
import dataclasses
import os
import tempfile
from typing import Any

from common import header, summary, write

import terapipe_c as tp

MODEL = tp.GPTConfig(n_layer=6, n_head=8, n_embd=512, vocab_size=256, block_size=512)
FOLDER = "/var/tmp"  # a disk, where /tmp may be memory


def plans_of(ranks: int, share: float) -> dict[str, tp.Plan]:
    costs = tp.profile(MODEL, micro_batch=1, seq_len=512, backend="cpu", threads=1)
    swapping = dataclasses.replace(tp.Cluster.local(ranks, swap_folder=FOLDER), memory_bytes=1e12, swaps_beside=False)
    wide = dataclasses.replace(swapping, host_bandwidth_Bps=None)
    request = {"batch": 8, "seq_len": 512, "costs": costs, "stages": ranks, "schedule": "gpipe"}
    keep = tp.plan(MODEL, wide, planner="uniform", **request)
    tight = dataclasses.replace(wide, memory_bytes=share * max(keep.peak_memory_bytes))
    limited = dataclasses.replace(swapping, memory_bytes=tight.memory_bytes)
    return {"kept": keep, "made again": tp.plan(MODEL, tight, planner="dawnpiper", **request),
            "swapped": tp.plan(MODEL, limited, planner="dawnpiper", **request),
            "beside": tp.plan(MODEL, dataclasses.replace(limited, swaps_beside=True), planner="dawnpiper", **request)}


def emulated(rounds: int) -> list[dict[str, Any]]:
    model, wide = tp.GPTConfig(n_layer=16, n_head=4, n_embd=128, vocab_size=256, block_size=256), tp.Cluster(num_devices=8)
    rows, costs = [], tp.CostModel.analytic(model, wide)
    for schedule in ("1f1b", "gpipe"):
        request = {"batch": 32, "seq_len": 256, "costs": costs, "stages": 8, "schedule": schedule}
        keep = tp.plan(model, wide, planner="uniform", **request)
        tight = dataclasses.replace(wide, memory_bytes=0.6 * max(keep.peak_memory_bytes))
        host = dataclasses.replace(tight, host_bandwidth_Bps=2e9)
        plans = {"kept": keep, "made again": tp.plan(model, tight, planner="dawnpiper", **request),
                 "with swaps": tp.plan(model, host, planner="dawnpiper", **request),
                 "beside": tp.plan(model, dataclasses.replace(host, swaps_beside=True), planner="dawnpiper", **request)}
        times: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(rounds):
            for name, plan in plans.items():
                times[name].append(tp.emulate(plan, costs).step_time_s)
        for name, plan in plans.items():
            seen = summary(times[name])
            rows.append({"name": f"{schedule}, {name}", "recomputed": sum(map(bool, plan.recompute)),
                         "swapped": sum(map(bool, plan.swap)), "peak_memory_bytes": plan.peak_memory_bytes,
                         "predicted_s": plan.step_time_s, "median_s": seen["median"], "quartiles_s": list(seen["quartiles"])})
            print(f"{rows[-1]['name']:18s} {rows[-1]['recomputed']:2d} made again, {rows[-1]['swapped']:2d} swapped: "
                  f"{seen['median']:.4f} s a step, predicted {plan.step_time_s:.4f} s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round, after one that is not")
    parser.add_argument("--share", type=float, default=0.62, help="of the memory of what keeps everything")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    result = header("What do recomputation and swaps cost?")
    if options.emulate:
        result["rows"] = emulated(options.rounds)
        write("swap_emulated", result, options.out)
        return
    plans = plans_of(options.ranks, options.share)
    result["ranks"], result["cores"] = options.ranks, len(os.sched_getaffinity(0))
    times: dict[str, list[float]] = {name: [] for name in plans}
    losses: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, plan in plans.items():
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                run = tp.launch(plan, data=os.__file__, steps=options.steps + 1, out=f"{folder}/run", progress=False)
                records = list(run)
                report = run.report()
            assert report.peak_memory_bytes == plan.peak_memory_bytes
            times[name] += [record.step_time_s for record in records[1:]]
            assert losses.setdefault("of all", [r.loss for r in records]) == [r.loss for r in records]
    result["rows"] = []
    for name, plan in plans.items():
        seen = summary(times[name])
        median, (low, high) = seen["median"], seen["quartiles"]
        result["rows"].append({
            "name": name, "recomputed": sum(map(bool, plan.recompute)), "swapped": sum(map(bool, plan.swap)),
            "peak_memory_bytes": plan.peak_memory_bytes, "predicted_s": plan.step_time_s, "median_s": median,
            "quartiles_s": [low, high], "steps": len(times[name])})
        print(f"{name:10s} {result['rows'][-1]['recomputed']:2d} made again, {result['rows'][-1]['swapped']:2d} swapped: "
              f"{max(plan.peak_memory_bytes) / 1e6:6.1f} MB, {median:.3f} s a step [{low:.3f} .. {high:.3f}], "
              f"predicted {plan.step_time_s:.3f} s")
    write("swap", result, options.out)


if __name__ == "__main__":
    main()
