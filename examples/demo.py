"""`make demo`: profile this machine, plan, train a GPT on two ranks, and lay what was measured beside what was predicted.

Everything here is the public face of terapipe_c. The text is Python's own standard library (bytes as tokens), so nothing is
downloaded. The number of steps follows from the predicted step time, so that training takes about --seconds anywhere.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import terapipe_c as tp

RULE = "-" * 100


def main() -> int:
    args = arguments()
    began = time.perf_counter()
    folder = new_folder(Path(args.out))
    model = tp.GPTConfig(n_layer=args.layers, n_head=4, n_embd=args.width, vocab_size=256, block_size=args.seq_len)

    title("1. Profile: what one layer, the embedding and the head cost here, by slice and context")
    costs = tp.profile(model, micro_batch=1, seq_len=args.seq_len, threads=1, backend=args.backend)
    print(costs)

    title(
        f"2. Plan: {model.num_params:,} parameters on {args.ranks} ranks, {args.batch} sequences of {args.seq_len} tokens a step"
    )
    cluster = tp.Cluster.local(None if args.gpus is None else args.ranks, backend=args.backend)
    plan = tp.plan(model, cluster, batch=args.batch, seq_len=args.seq_len, costs=costs, stages=args.ranks)
    print(plan.explain())
    steps = args.steps or max(60, min(400, round(args.seconds / plan.step_time_s)))

    title(f"3. Train: {steps} steps, each rank a process")
    corpus = tp.stdlib_corpus(folder.with_name(f"{folder.name}.txt"), max_bytes=8_000_000)
    run = tp.launch(plan, data=str(corpus), steps=steps, seed=0, out=str(folder), lr=2e-3, warmup_steps=min(20, steps // 5),
                    checkpoint_every=max(25, steps // 4), eval_every=max(25, steps // 4),
                    backend=args.backend, devices=args.gpus, progress=None if sys.stderr.isatty() else False)  # fmt: skip
    follow(run, steps)

    title("4. Report: predicted beside measured")
    print(run.report())

    title("5. Loss (nats a byte)")
    losses = [record.loss for record in run.history]
    print(chart(losses))
    evaluated = [record.eval_loss for record in run.history if record.eval_loss is not None]
    if evaluated:
        print(f"on text it never saw: {evaluated[-1]:.4f}, that is {evaluated[-1] / 0.6931472:.2f} bits a byte")

    title("6. A sample: what the model thinks Python looks like")
    trained = tp.load_checkpoint(run.checkpoint_path)
    prompt = "def "
    print(prompt + tp.generate(trained.params, trained.model, prompt, n=400, temperature=0.7, seed=1))

    title("7. Files")
    for name, path in pictures(run, folder).items():
        print(f"{name:<14}{path}")
    print(f"\ndone in {time.perf_counter() - began:.0f} s")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/demo", help="run folder; a number is added to its name")
    parser.add_argument("--seconds", type=float, default=75.0, help="about how long to train")
    parser.add_argument("--steps", type=int, help="instead of --seconds")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpus", type=int, nargs="+", help="the GPU of each rank, where ranks share: --gpus 0 0")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    return parser.parse_args()


def title(text: str) -> None:
    print(f"\n{RULE}\n{text}\n{RULE}", flush=True)


def new_folder(base: Path) -> Path:
    """base-1, base-2, ...: a run folder is never written over."""
    base.parent.mkdir(parents=True, exist_ok=True)
    paths = (base.with_name(f"{base.name}-{n}") for n in itertools.count(1))
    return next(path for path in paths if not path.exists())


def follow(run: tp.Run, steps: int) -> None:
    """The bar draws itself on a terminal; elsewhere, a line now and then."""
    every = max(1, steps // 10)
    for record in run:
        done = record.step + 1
        if not sys.stderr.isatty() and (done % every == 0 or done == 1 or record.eval_loss is not None):
            seen = "" if record.eval_loss is None else f"  unseen {record.eval_loss:.4f}"
            print(
                f"{done:>4} of {steps} steps done  loss {record.loss:.4f}  {record.tokens_per_s:>8,.0f} tokens/s{seen}",
                flush=True,
            )


def chart(values: list[float], width: int = 80, height: int = 8) -> str:
    """A curve of blocks: each column the mean of its share of the values."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    eighths = [round((value - low) / span * (8 * height - 1)) + 1 for value in means]
    rows = []
    for row in reversed(range(height)):
        label = f"{low if row == 0 else high:8.3f} " if row in (0, height - 1) else " " * 9
        rows.append(label + "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, level - 8 * row))] for level in eighths))
    return "\n".join([*rows, f"{'':9}first {values[0]:.4f}, last {values[-1]:.4f}, {len(values)} steps"])


def pictures(run: tp.Run, folder: Path) -> dict[str, str]:
    """Draw the measured timeline and say where everything is."""
    line = run.timeline()
    paths = {
        "timeline": folder / "timeline.html",
        "as SVG": folder / "timeline.svg",
        "Chrome trace": folder / "chrome-trace.json",
    }
    line.to_html(str(paths["timeline"]))
    line.to_svg(str(paths["as SVG"]))
    line.to_chrome_trace(str(paths["Chrome trace"]))
    shown = {name: str(path) for name, path in paths.items()}
    shown["metrics"] = ", ".join(map(str, sorted(folder.glob("*.jsonl"))))
    shown["checkpoint"] = str(run.checkpoint_path)
    return shown


if __name__ == "__main__":
    sys.exit(main())
