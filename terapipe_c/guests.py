"""Guests: activations that a rank keeps in a peer's memory (``schedules.bpipe``): which ranks, how many bytes, how many seconds."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from .backend import Backend
from .config import GPTConfig
from .engine import dimensions, saves_bytes
from .links import Links

__all__ = ["BPIPE", "evicts", "guest_bytes", "guest_seconds", "hosts"]

BPIPE = "bpipe"  # the schedule that has them


def hosts(program: _core.Program) -> dict[tuple[int, int], int]:
    """{(rank, the rank that keeps its activations): micro-batches of a step}"""
    found: dict[tuple[int, int], int] = {}
    evicts = _core.OPS.index("SE")
    for rank in range(program.num_ranks if "SE" in program.counts else 0):
        code = program.instructions(rank)
        for peer in code["peer"][code["op"] == evicts].tolist():
            found[rank, peer] = found.get((rank, peer), 0) + 1
    return found


def evicts(ranks: int, micro_batches: int) -> bool:
    """Whether bpipe evicts anything, so that it differs from 1f1b."""
    return min(ranks, micro_batches) > (ranks + 3) // 2        # tp_bpipe_most of csrc/sched/sched.h


def guest_bytes(model: GPTConfig, partition: Sequence[tuple[int, int]], slicing: Sequence[tuple[int, Sequence[int]]],
                recompute: Sequence[bool] = (), where: Backend = Backend()) -> list[int]:       # noqa: B008 (frozen)
    """[stages] of bytes of a micro-batch's activations that the engine sends to a peer and back: a whole slot but its output, which
    was sent to the next stage already."""
    batch, seq_len = max(b for b, _ in slicing), sum(slicing[0][1])
    more = where.arguments.get("provider"), where.arguments.get("dtype"), saves_bytes(recompute)
    return [_core.guest_bytes(dimensions(model), first, end, batch, seq_len, *more) for first, end in partition]


def guest_seconds(sizes: Sequence[int], slices: Sequence[int], ranks: int, costs: Any, links: Links) \
        -> dict[str, NDArray[np.float64]]:
    """SE, RE, SL, RL of the ranks' own time, and "comm.guest" on the link, [stages, units]: of a micro-batch, at its slice 0."""
    first = np.cumsum(slices) - np.asarray(slices)
    size = np.zeros((len(sizes), int(sum(slices))))
    size[:, first] = np.asarray(sizes, np.float64)[:, None]
    there = size > 0
    link = np.where(there, costs.latency_s + costs.byte_s * size, 0.0)
    for rank in range(ranks // 2):
        if any(links.far[rank:ranks - 1 - rank]):              # some hop on the way leaves the node
            link[rank] = np.where(there[rank], links.latency_s + links.byte_s * size[rank], 0.0)
    out = {"comm.guest": link}
    if costs.copy_byte_s and costs.backend == "cpu":           # a GPU sends from where they lie
        out |= dict.fromkeys(("SE", "RE", "SL", "RL"), costs.copy_byte_s * size)
    return out
