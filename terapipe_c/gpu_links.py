"""What does a message between two GPUs of this machine take? The engine's own messages, timed by the engine's own events."""
from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import _core, cuda, schedules
from .backend import Backend
from .config import GPTConfig
from .device_comm import flows, kind_of, message_bytes, nccl
from .engine import RankEngine, gather_bytes, in_threads, some_params
from .partition import even_partition
from .slots import needed

__all__ = ["message_line", "sent_by_nccl"]

SMALL = 8            # tokens of the message that shows the latency
STEPS, FIRST = 24, 4  # the first steps choose algorithms, capture graphs and connect
VOCABULARY = 64
PATIENCE_S = 5.0, 20.0  # least and most for a call of NCCL or a message; between, half of the time there is


def sent_by_nccl(backend: Backend) -> bool:
    """Would ranks on this machine's first two GPUs send by NCCL? As `launch` decides it. Not where ranks take themselves for
    machines (TERAPIPE_NCCL_ONE_GPU): these are processes, which send by sockets of one machine; here, by threads of this process,
    it would be tried with one name of a machine for both, and what NCCL is told of it by variables would stay the caller's."""
    return (backend.name == "cuda" and cuda.device_count() > 1 and os.environ.get("TERAPIPE_NCCL_ONE_GPU") != "1"
            and kind_of({"backend": "cuda", "ranks": 2, "devices": [0, 1]}) == "nccl")


def message_line(model: GPTConfig, seq_len: int, backend: Backend, *, until: float = math.inf,
                 **device: Any) -> tuple[float, float]:
    """(seconds of an empty message, and for each byte) between GPUs 0 and 1 by NCCL: a line through two lengths of a sequence's
    activations, with the copies at both ends. until: by time.monotonic, when there should be nothing left to do for the caller
    either; NCCL that hangs takes half of what is left, or PATIENCE_S[0]. device: how products are chosen. Error: NCCL or a GPU
    cannot be used."""
    size = message_bytes(model.n_embd, [(1, [1])], backend.dtype)
    short, long = min(SMALL, seq_len), seq_len
    # Attention on one GPU, the FFN on the other: parameters take seconds to make, and more of a GPU than messages do.
    tiny = replace(model, n_layer=1, vocab_size=VOCABULARY, block_size=seq_len, tie_weights=False)
    params = some_params(tiny)
    least = _message(tiny, short, params, backend, device, _patience(until))
    byte_s = 0.0
    if long > short:
        byte_s = max(0.0, (_message(tiny, long, params, backend, device, _patience(until)) - least) / (size * (long - short)))
    return max(0.0, least - byte_s * size * short), byte_s


def _patience(until: float) -> float:
    return min(max(0.5 * (until - time.monotonic()), PATIENCE_S[0]), PATIENCE_S[1])


def _message(tiny: GPTConfig, tokens: int, params: dict[str, Any], backend: Backend, device: dict[str, Any],
             patience_s: float) -> float:
    """Seconds of a message of so many tokens, there or back. What passes on one GPU between the end of a forward and the beginning
    of its backward, without what the other GPU works meanwhile, is one message there and one back; each is a time of one clock."""
    program = schedules.gpipe(2, 1).split(pending=0).lower(False)
    stages, slicing = even_partition(tiny, 2), [(1, [tokens])]
    text = np.random.Generator(np.random.Philox(7)).integers(0, VOCABULARY, (1, tokens + 1), np.int32)
    region = _core.Region.create(2, bytearray([0, 1, 1, 0]), 1 << 16, max(4096, gather_bytes(tiny)), False)

    def work(rank: int) -> list[float]:
        control = _core.Comm(region, rank, patience_s)
        comm = nccl(control, message_bytes(tiny.n_embd, slicing, backend.dtype), slots=needed(program), more=flows(program))
        engine = RankEngine(tiny, stages, slicing, program, rank, comm, backend=backend, device=rank, **device)
        engine.load(params)
        between = []
        for _ in range(STEPS):
            comm.barrier()  # or a message may wait for a rank whose thread still reads the last step's trace
            engine.run(text, lr=0.0)
            between.append(_between(engine.trace(), rank))
        return between

    outside, inside = in_threads(region, work)
    return max(0.0, statistics.median(a - b for a, b in list(zip(outside, inside, strict=True))[FIRST:]) / 2)


def _between(trace: Sequence[tuple[str, int, int, int, float, float]], rank: int) -> float:
    """Rank 0: from the end of F to the beginning of I. Rank 1: from the beginning of F to the end of I."""
    at = {op: (begin, end) for op, _, _, _, begin, end in trace}
    return at["I"][0] - at["F"][1] if rank == 0 else at["I"][1] - at["F"][0]
