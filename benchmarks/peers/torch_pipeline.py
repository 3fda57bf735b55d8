"""The same model under torch.distributed.pipelining: 2 ranks over gloo, Schedule1F1B, one sequence a micro-batch.

The layers are split as evenly as the work allows (the head costs about as much as 5 layers of this width), the tied
embedding's gradients are summed over both ranks and the norm is clipped over all of them, as training this model needs.
Rank 0 speaks the Peer protocol and tells rank 1 what to do.
"""

import json
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch_gpt2 import Part, Text, adamw, options, token_loss


def tied(part: Part) -> torch.nn.Parameter:
    return part.wte.weight if part.opens else part.head.weight


def clip(part: Part, most: float = 1.0) -> None:
    """Global-norm clipping over both ranks; the tied weight, whose gradient both hold, counts once."""
    own = [p.grad for p in part.parameters() if p.grad is not None and (part.opens or p is not tied(part))]
    squares = torch.stack([g.square().sum() for g in own]).sum()
    dist.all_reduce(squares)
    scale = torch.clamp(most / (squares.sqrt() + 1e-6), max=1.0)
    torch._foreach_mul_([p.grad for p in part.parameters() if p.grad is not None], scale.item())


def main() -> None:
    parser = options()
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--cut", type=int, default=9, help="layers on rank 0")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        launch()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    part = Part(*((0, args.cut) if rank == 0 else (args.cut, args.layers)), layers=args.layers, length=args.length)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=args.micro, loss_fn=token_loss)
    optimizer, text = adamw(part), Text(args.data, args.length)

    def step() -> tuple[float, float]:
        x, y = text.batch(args.micro)
        losses: list[torch.Tensor] = []
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        dist.all_reduce(tied(part).grad)
        clip(part)
        optimizer.step()
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(value, src=1)
        return time.perf_counter() - start, value.item()

    step()
    if rank == 0:
        print(json.dumps({"torch": torch.__version__, "cut": args.cut, "micro_batches": args.micro}), flush=True)
    while True:
        order = torch.zeros((), dtype=torch.int64)
        if rank == 0:
            line = sys.stdin.readline()
            order.fill_(json.loads(line)["steps"] if line else 0)
        dist.broadcast(order, src=0)
        if order.item() == 0:
            break
        timed = [step() for _ in range(int(order.item()))]
        if rank == 0:
            print(json.dumps({"seconds": [t for t, _ in timed], "losses": [loss for _, loss in timed]}), flush=True)
    dist.destroy_process_group()


def launch() -> None:
    """Start rank 1 beside us (in our process group, so that it ends with us) and become rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK="0")
    subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"RANK": "1"}, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL)  # fmt: skip


if __name__ == "__main__":
    main()
