"""What do one device's bits cost, and what does a sharded optimizer? Two replicas (reproducible=False) beside a pipeline of two
ranks, on two cores.

step time of 2 ranks with one device's bits (the plan of tp.plan) / step time of 2 replicas of 1 rank each, which add their
gradients; and of these where each has AdamW's moments of a half (shard_optimizer) / where both have all; GPT-2's 124M shape.
Interleaved rounds; each turn launches afresh and leaves out its first step.

    python benchmarks/replicas.py [--rounds 3] [--steps 2] [--batch 4] [--length 1024] [--layers 12] [--out FILE]
"""

import shutil
from collections.abc import Callable
from typing import Any

from common import FOLDER, GPT2_VOCAB, arguments, corpus, header, interleave, summary, write

import terapipe_c as tp


def turn_of(plan: Any, steps: int, data: str) -> Callable[[], dict[str, Any]]:
    def turn() -> dict[str, Any]:
        out = FOLDER / "runs" / f"replicas-{plan.data_parallel}{'-sharded' * plan.shard_optimizer}"
        shutil.rmtree(out, ignore_errors=True)
        run = tp.launch(plan, data=data, steps=steps + 1, out=str(out), seed=0, lr_schedule="constant", checkpoint_every=0,
                        reproducible=plan.data_parallel == 1, progress=False)  # fmt: skip
        records = list(run)[1:]
        update = [end - start for _, op, *_, start, end in run.trace if op == "OPT"]
        return {"seconds": [r.step_time_s for r in records], "losses": [r.loss for r in records], "update_s": update,
                "peak_memory_bytes": run.report().peak_memory_bytes}  # fmt: skip

    return turn


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=12, help="12 is GPT-2 124M")
    args = parser.parse_args()
    result = header((__doc__ or "").partition("?")[0] + "?")
    model = tp.GPTConfig(n_layer=args.layers, n_head=12, n_embd=768, vocab_size=GPT2_VOCAB, block_size=args.length)
    costs = tp.profile(model, micro_batch=1, seq_len=args.length, backend="cpu", threads=1)
    shapes = {"one pipeline of 2 ranks": (2, 1, False), "2 replicas of 1 rank": (1, 2, False), "2 that shard": (1, 2, True)}
    plans = {name: tp.plan(model, tp.Cluster.local(2), batch=args.batch, seq_len=args.length, costs=costs, stages=stages,
                           data_parallel=replicas, shard_optimizer=shards)
             for name, (stages, replicas, shards) in shapes.items()}  # fmt: skip
    for name, plan in plans.items():
        print(f"{name:24} schedule {plan.schedule}, slicing {plan.slicing}, predicted {plan.step_time_s:.2f} s")
    data = str(corpus())
    answers = interleave({name: turn_of(plan, args.steps, data) for name, plan in plans.items()}, args.rounds)
    times = {name: summary([s for turn in said for s in turn["seconds"]]) for name, said in answers.items()}
    pipeline, replicas, sharded = (times[name]["median"] for name in shapes)
    memory = {name: max(max(turn["peak_memory_bytes"]) for turn in said) for name, said in answers.items()}
    result |= {
        "batch": args.batch, "length": args.length, "layers": args.layers, "step_time_s": times,
        "cost_of_bits": pipeline / replicas, "sharded_over_whole": sharded / replicas, "peak_memory_bytes": memory,
        "predicted_step_time_s": {name: plan.step_time_s for name, plan in plans.items()},
        "update_s": {name: [turn["update_s"] for turn in said] for name, said in answers.items()},
        "losses": {name: [turn["losses"] for turn in said] for name, said in answers.items()},
    }  # fmt: skip
    for name, of in times.items():
        low, high = of["quartiles"]
        print(f"{name:24} {of['median']:8.3f} s a step   (quartiles {low:.3f} to {high:.3f}), "
              f"{memory[name] / 2**20:.0f} MiB a rank")  # fmt: skip
    print(f"one device's bits take {pipeline / replicas:.3f} times as long; a sharded optimizer {sharded / replicas:.3f} times")
    write("replicas", result, args.out)


if __name__ == "__main__":
    main()
