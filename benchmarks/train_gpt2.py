"""How many tokens a second does GPT-2 124M train at, in fp32, on two cores: ours beside PyTorch's ways?

tokens/s = batch x sequence length / step time, where a step is forward, backward, clipping and AdamW on one batch of real
text. Contenders, in interleaved rounds, each alone on the same two cores in its turn:

    ours b1, b4        2 ranks of 1 thread; profiled, planned and launched as a user would (tp.profile, tp.plan, tp.launch)
    eager b1, b4       PyTorch, one process, 2 threads
    compile b1, b4     the same under torch.compile
    pipelining b4      torch.distributed.pipelining: 2 ranks of 1 thread, gloo, Schedule1F1B, 4 micro-batches

PyTorch comes into .bench/torch, never into the project's environment.

    python benchmarks/train_gpt2.py [--rounds 3] [--steps 2] [--length 1024] [--without ours,compile] [--out FILE]
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    FOLDER,
    GPT2_VOCAB,
    ROOT,
    Peer,
    arguments,
    corpus,
    header,
    interleave,
    peer_python,
    stopped,
    summary,
    write,
)

PEERS = ROOT / "benchmarks" / "peers"
Turn = Callable[[], dict[str, Any]]


def our_turn(batch: int, length: int, layers: int, steps: int, data: Path) -> tuple[Turn, dict[str, Any]]:
    """A turn of ours: profile and plan once, then every turn launches afresh and leaves out its first step."""
    import terapipe_c as tp

    model = tp.GPTConfig(n_layer=layers, n_head=12, n_embd=768, vocab_size=GPT2_VOCAB, block_size=length)
    costs = tp.profile(model, micro_batch=1, seq_len=length, backend="cpu", threads=1)
    plan = tp.plan(model, tp.Cluster.local(), batch=batch, seq_len=length, costs=costs, stages=2)

    def turn() -> dict[str, Any]:
        out = FOLDER / "runs" / f"train_gpt2-b{batch}"
        shutil.rmtree(out, ignore_errors=True)
        run = tp.launch(plan, data=str(data), steps=steps + 1, out=str(out), seed=0, lr=6e-4, lr_schedule="constant",
                        checkpoint_every=0, progress=False)  # fmt: skip
        records = list(run)[1:]
        return {"seconds": [r.step_time_s for r in records], "losses": [r.loss for r in records]}

    about = {"parameters": model.num_params, "stages": [list(s) for s in plan.stages], "slicing": plan.slicing,
             "schedule": plan.schedule, "predicted_step_time_s": plan.step_time_s}  # fmt: skip
    return turn, about


def torch_turns(args: Any, data: Path, wanted: list[str]) -> tuple[dict[str, Turn], dict[str, Any], list[Peer]]:
    if not wanted:
        return {}, {}, []
    python = peer_python("torch", "torch==2.13.0", "numpy")
    size = ["--data", data, "--length", args.length, "--layers", args.layers]
    peers: dict[str, Peer] = {}
    if any(not name.startswith("pipelining") for name in wanted):
        peers["one"] = Peer([python, PEERS / "torch_gpt2.py", *size, "--threads", 2])
    if any(name.startswith("pipelining") for name in wanted):
        cut = round((args.layers + 5.45) / 2)  # the head is 5.45 layers' worth of matrix products at this width
        peers["two"] = Peer([python, PEERS / "torch_pipeline.py", *size, "--threads", 1, "--micro", 4, "--cut", cut])

    def turn(name: str) -> Turn:
        mine = peers["two" if name.startswith("pipelining") else "one"]
        mode = name.replace(" ", "-")
        return lambda: alone(mine, mode)

    def alone(mine: Peer, mode: str) -> dict[str, Any]:
        with stopped(*(peer for peer in peers.values() if peer is not mine)):
            return mine.ask(mode=mode, steps=args.steps)

    return {name: turn(name) for name in wanted}, {key: peer.about for key, peer in peers.items()}, list(peers.values())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=12, help="12 is GPT-2 124M")
    parser.add_argument("--without", default="",
                        help="left out: ours, eager, compile, pipelining; b1, b4; or one of a batch, 'compile b4'")  # fmt: skip
    args = parser.parse_args()
    out = {word.strip() for word in args.without.split(",")}

    def takes_part(name: str) -> bool:
        return not out & {name, *name.split()}

    data = corpus()
    result = header((__doc__ or "").splitlines()[0])
    wanted = [n for n in ("eager b1", "eager b4", "compile b1", "compile b4", "pipelining b4") if takes_part(n)]
    theirs, about, peers = torch_turns(args, data, wanted)
    ours: dict[str, Turn] = {}
    result["ours"] = {}
    try:
        batches = [batch for batch in (1, 4) if takes_part(f"ours b{batch}")]
        if batches:
            with stopped(*peers):  # profiling wants the machine to itself
                for batch in batches:
                    turn, result["ours"][f"b{batch}"] = our_turn(batch, args.length, args.layers, args.steps, data)
                    ours[f"ours b{batch}"] = with_peers_stopped(turn, peers)
        print(f"tokens/s = batch x {args.length} / step time; {args.rounds} rounds of {args.steps} steps")
        answers = interleave({**ours, **theirs}, args.rounds)
    finally:
        for peer in peers:
            peer.close()
    report(args, result, answers, about)


def with_peers_stopped(turn: Turn, peers: list[Peer]) -> Turn:
    def alone() -> dict[str, Any]:
        with stopped(*peers):
            return turn()

    return alone


def report(args: Any, result: dict[str, Any], answers: dict[str, list[dict[str, Any]]], about: dict[str, Any]) -> None:
    table = {}
    for name, turns in answers.items():
        tokens = int(name[-1]) * args.length
        speed = summary([tokens / s for turn in turns for s in turn["seconds"]])
        table[name] = {"tokens_per_s": speed, "losses": [loss for turn in turns for loss in turn["losses"]]}
    result |= {"length": args.length, "layers": args.layers, "rounds": args.rounds, "steps": args.steps,
               "torch": about, "contenders": table, "ratios": {}}  # fmt: skip
    print(f"\n{'':16}{'tokens/s':>10}{'quartiles':>18}{'last loss':>12}")
    for name, row in table.items():
        speed = row["tokens_per_s"]
        low, high = speed["quartiles"]
        print(f"{name:16}{speed['median']:10.1f}{low:10.1f}{high:8.1f}{row['losses'][-1]:12.3f}")
    for batch in ("b1", "b4"):
        ours, others = table.get(f"ours {batch}"), {n: r for n, r in table.items() if n.endswith(batch) and n[:4] != "ours"}
        one_process = {n: r for n, r in others.items() if not n.startswith("pipelining")}
        for against in (max(one_process, key=lambda n: one_process[n]["tokens_per_s"]["median"], default=None),
                        f"pipelining {batch}" if f"pipelining {batch}" in others else None):  # fmt: skip
            if ours and against:
                ratio = ours["tokens_per_s"]["median"] / table[against]["tokens_per_s"]["median"]
                result["ratios"][f"ours {batch} / {against}"] = ratio
                print(f"ours {batch} / {against}: {ratio:.2f}")
    write("train_gpt2", result, args.out)


if __name__ == "__main__":
    main()
