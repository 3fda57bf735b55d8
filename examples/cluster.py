"""A GPT on several machines: plan once, then start this script once a rank.

    python examples/cluster.py plan --nodes 2 --per-node 8     # measures this machine, writes plan.json
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 \\
        examples/cluster.py train --data corpus.txt             # on each machine
    mpirun -n 16 python examples/cluster.py train --data corpus.txt     # or instead; messages over MPI: --comm mpi
    sbatch examples/cluster.sbatch                              # or instead, by srun

On GPUs, one a rank and with NCCL: ``plan --backend cuda``. The plan must be planned where it runs, or on a machine like it: its
costs are measured. The run folder and the data must be seen by every rank. A run that ended early goes on with ``train --resume``.
"""

from __future__ import annotations

import argparse

import terapipe_c as tp


def main() -> None:
    args = arguments()
    if args.what == "plan":
        model = tp.GPTConfig(n_layer=args.layers, n_head=args.heads, n_embd=args.width, vocab_size=256,    # bytes as tokens
                             block_size=args.seq_len)
        local = tp.Cluster.local(args.per_node, backend=args.backend)
        cluster = tp.Cluster(args.nodes * args.per_node, devices_per_node=args.per_node, memory_bytes=local.memory_bytes,
                             link_latency_s=args.link_latency_s, link_bandwidth_Bps=args.link_bandwidth_Bps,
                             node_link_latency_s=local.link_latency_s, node_link_bandwidth_Bps=local.link_bandwidth_Bps)
        costs = tp.profile(model, seq_len=args.seq_len, threads=1, backend=args.backend, dtype=args.dtype)
        plan = tp.plan(model, cluster, batch=args.batch, seq_len=args.seq_len, costs=costs, stages=cluster.num_devices,
                       executable=True)
        print(plan.explain())
        plan.save(args.plan)
    else:
        plan = tp.Plan.load(args.plan)
        run = tp.train(plan, args.data, steps=args.steps, backend=plan.backend, dtype=plan.dtype, comm=args.comm, out=args.out,
                       resume=args.resume, checkpoint_every=100, eval_every=100, lr=args.lr)
        if run.rank == 0:
            print(run.report())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "train"))
    parser.add_argument("--plan", default="plan.json")
    parser.add_argument("--data", default="corpus.txt", help="a text, as bytes")
    group = parser.add_argument_group("plan")
    group.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    group.add_argument("--dtype", choices=("bf16", "float32"), help="of activations on CUDA (default: bf16)")
    group.add_argument("--layers", type=int, default=24)
    group.add_argument("--heads", type=int, default=16)
    group.add_argument("--width", type=int, default=1024)
    group.add_argument("--nodes", type=int, default=2)
    group.add_argument("--per-node", type=int, default=8, help="ranks a machine: one a core or GPU, or fewer")
    group.add_argument("--link-latency-s", type=float, default=30e-6, help="between machines")
    group.add_argument("--link-bandwidth-Bps", type=float, default=1.25e9, help="between machines: 10 Gb Ethernet")
    group.add_argument("--batch", type=int, default=8)
    group.add_argument("--seq-len", type=int, default=1024)
    group = parser.add_argument_group("train")
    group.add_argument("--steps", type=int, default=1000)
    group.add_argument("--lr", type=float, default=6e-4)
    group.add_argument("--comm", choices=("tcp", "mpi"))
    group.add_argument("--out", default="runs/cluster")
    group.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
