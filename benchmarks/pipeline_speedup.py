"""How much faster is one sequence on two ranks than on one: does token slicing fill a pipeline at batch 1?

speed-up = step time of 1 rank on 1 core / step time of 2 ranks on 2 cores; batch 1, one sequence of 2048 tokens, GPT-2's
124M shape. Without token slices, two stages and one sequence cannot beat 1. Two ranks have what auto plans, and by the terapipe
planner one stage each. Interleaved rounds; each turn launches afresh on exactly its cores and leaves out its first step.

    python benchmarks/pipeline_speedup.py [--rounds 3] [--steps 2] [--length 2048] [--layers 12] [--out FILE]
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from common import FOLDER, GPT2_VOCAB, arguments, corpus, header, interleave, summary, write

import terapipe_c as tp

ONE_EACH = "2 rank(s), 2 core(s), one stage each"
PRODUCTS = """
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
import numpy as np
a, b = (np.ones(shape, np.float32) for shape in ((512, 768), (768, 3072)))
a @ b, print("ready", flush=True), sys.stdin.readline()
count, begin = 0, time.perf_counter()
while (spent := time.perf_counter() - begin) < 2.0:
    a @ b
    count += 1
print(count / spent)
"""


def products_per_s(cores: list[int]) -> float:
    """Matrix products a second of one single-threaded NumPy process a core, all at once."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    each = [subprocess.Popen([sys.executable, "-c", PRODUCTS, str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=env) for core in cores]  # fmt: skip
    for process in each:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in each:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in each)


def two_cores_over_one() -> list[float]:
    """What this machine's second core is worth right now to work that shares nothing: the ceiling of any speed-up."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    return [products_per_s([first, second]) / max(products_per_s([first]), products_per_s([second])) for _ in range(3)]


def turn_on(name: str, plan: Any, steps: int, data: str) -> Callable[[], dict[str, Any]]:
    ranks: int = plan.ranks
    cores = sorted(os.sched_getaffinity(0))

    def turn() -> dict[str, Any]:
        out = FOLDER / "runs" / f"pipeline_speedup-{name.replace(' ', '_')}"
        shutil.rmtree(out, ignore_errors=True)
        os.sched_setaffinity(0, cores[:ranks])  # workers inherit it
        try:
            run = tp.launch(plan, data=data, steps=steps + 1, out=str(out), seed=0, lr_schedule="constant", checkpoint_every=0,
                            progress=False)  # fmt: skip
            records = list(run)[1:]
        finally:
            os.sched_setaffinity(0, cores)
        return {"seconds": [r.step_time_s for r in records], "losses": [r.loss for r in records]}

    return turn


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--layers", type=int, default=12, help="12 is GPT-2 124M")
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("two ranks on two cores need two cores; this process may use one")
    result = header((__doc__ or "").splitlines()[0])
    model = tp.GPTConfig(n_layer=args.layers, n_head=12, n_embd=768, vocab_size=GPT2_VOCAB, block_size=args.length)
    costs = tp.profile(model, micro_batch=1, seq_len=args.length, backend="cpu", threads=1)
    asked = {"1 rank(s), 1 core(s)": (1, "auto"), "2 rank(s), 2 core(s)": (2, "auto"), ONE_EACH: (2, "terapipe")}
    plans = {name: tp.plan(model, tp.Cluster.local(), batch=1, seq_len=args.length, costs=costs, stages=n, planner=planner)
             for name, (n, planner) in asked.items()}  # fmt: skip
    for name, plan in plans.items():
        print(f"{name}: {plan.schedule}, stages {plan.stages}, slicing {plan.slicing}, predicted {plan.step_time_s:.2f} s")
    data = str(corpus())
    ceiling = two_cores_over_one()
    turns = {name: turn_on(name, plan, args.steps, data) for name, plan in plans.items()}
    answers = interleave(turns, args.rounds)
    ceiling += two_cores_over_one()
    times = {name: summary([s for turn in said for s in turn["seconds"]]) for name, said in answers.items()}
    one, two, each = (times[name]["median"] for name in turns)
    losses = {name: [turn["losses"] for turn in said] for name, said in answers.items()}
    result |= {
        "length": args.length, "layers": args.layers, "step_time_s": times, "speed_up": one / two,
        "speed_up_one_stage_each": one / each, "two_cores_over_one": ceiling,
        "predicted_step_time_s": {name: plan.step_time_s for name, plan in plans.items()},
        "slicing": {name: plan.slicing for name, plan in plans.items()},
        "schedule": {name: [plan.schedule, plan.stages] for name, plan in plans.items()},
        "losses": losses, "losses_bit_equal": len({str(said) for said in losses.values()}) == 1,
    }  # fmt: skip
    for name, times_of in times.items():
        low, high = times_of["quartiles"]
        print(f"{name:38} {times_of['median']:8.3f} s a step   (quartiles {low:.3f} to {high:.3f})")
    print(f"speed-up {one / two:.2f} ({one / each:.2f} of one stage each); losses bit-equal: {result['losses_bit_equal']}")
    print(f"two cores do {min(ceiling):.2f} to {max(ceiling):.2f} times the products of one that share nothing, before and after")
    write("pipeline_speedup", result, args.out)


if __name__ == "__main__":
    main()
