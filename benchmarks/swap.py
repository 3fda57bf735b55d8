"""What does it cost to keep activations out of memory: making them again, or swapping them to a file?

One GPT, GPipe, eight micro-batches: all that is kept, what DawnPiper recomputes, and what it swaps within the same limit, by
the ranks themselves and beside their work, for which each wants a core more. Steps are timed in interleaved rounds; beside them
what the plan predicted, and the bytes of the fullest rank, which the engine must meet exactly. Losses are the same bits.

    python benchmarks/swap.py [--ranks 2] [--rounds 3] [--steps 3] [--share 0.62] [--out FILE]
"""
import argparse
import dataclasses
import os
import tempfile

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round, after one that is not")
    parser.add_argument("--share", type=float, default=0.62, help="of the memory of what keeps everything")
    parser.add_argument("--out")
    options = parser.parse_args()
    result = header("What do recomputation and swaps cost?")
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
