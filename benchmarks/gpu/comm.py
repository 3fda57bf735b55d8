"""Messages of device memory on one GPU: several ranks by NCCL, each a process that takes itself for a machine of its own
(NCCL_HOSTID, sockets over the loopback: the real multi-node path, no timings), and stages in green contexts."""

import os

import numpy as np
from gpu_check import Question


def small_plan(tp, ranks):
    model = tp.GPTConfig(n_layer=ranks, n_head=2, n_embd=128, vocab_size=256, block_size=128)
    return tp.plan(model, tp.Cluster(num_devices=ranks, peak_flops=1e14), batch=2, seq_len=128, planner="uniform", stages=ranks,
                   slicing=[(1, [64, 64])] * 2, executable=True)


def nccl():
    """Losses of 3 steps of 2 and 4 ranks, all on GPU 0: by NCCL the same bits as through the host's memory."""
    import terapipe_c as tp

    data = np.arange(40_000, dtype=np.int32) * 7 % 256
    found = {}
    for ranks in (2, 4):
        losses = {}
        for kind in ("host", "nccl"):
            os.environ |= {"TERAPIPE_COMM": kind, "TERAPIPE_NCCL_ONE_GPU": "1"}
            try:
                run = tp.launch(small_plan(tp, ranks), data, 3, backend="cuda", devices=[0] * ranks, progress=False, timeout_s=60.0)
                losses[kind] = [record.loss for record in run.wait()]
            finally:
                del os.environ["TERAPIPE_COMM"], os.environ["TERAPIPE_NCCL_ONE_GPU"]
        assert losses["nccl"] == losses["host"] and len(losses["nccl"]) == 3, losses
        found[f"{ranks} ranks"] = losses["nccl"]
    return found


def green():
    """How many multiprocessors each of K equal parts has: at least 8 each, all the same."""
    from terapipe_c import cuda

    found = {}
    for parts in (2, 4, 8):
        sizes = [count for _, count in cuda.load().partitions(0, parts)]
        assert len(set(sizes)) == 1 and sizes[0] >= 8, (parts, sizes)
        found[f"{parts} parts"] = sizes[0]
    return found


QUESTIONS = [Question("green contexts", 15, green, order=12), Question("NCCL on one GPU", 60, nccl, order=30)]
