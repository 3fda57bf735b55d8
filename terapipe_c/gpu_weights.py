"""Which instruction makes which weight gradients on a GPU (cuda/stage.h), in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from .config import KINDS

Int = NDArray[np.int32]
GROUP = 1024     # TP_CUDA_WEIGHT_ROWS of csrc/model/waits.h
_HEAD = KINDS.index("head")


def seconds(pack: Any, blocks: Int, batches: Int, slices: Int, lengths: Int, saved: Int | None,
            overhead_s: float) -> NDArray[np.float64]:
    """W [stages, units]: of whole micro-batches, with slice 0; where blocks are made again, or FFNs swapped (saved: like blocks,
    how many; None where attentions are swapped), of one sequence in groups of rows, with the slices they begin in, but for the
    head's. Like csrc/plan/judge_times.c."""
    first = np.cumsum(slices) - slices
    totals = np.add.reduceat(lengths, first).astype(np.int32)
    W = np.zeros((len(blocks), len(lengths)))
    W[:, first] = _core.cost_durations(pack, blocks, batches, np.ones_like(slices), totals, None, 1)[2] + (slices - 1) * overhead_s
    apart = (batches == 1) & (slices > 1)
    if saved is None or not saved.any() or not apart.any():
        return W
    rows, units, starts = made(slices, lengths, totals), np.repeat(apart, slices), np.zeros(len(lengths), bool)
    starts[first[apart]] = True
    heads = np.zeros_like(blocks)
    heads[:, _HEAD] = blocks[:, _HEAD]
    W[:, units] = overhead_s
    for some, where, count in ((blocks - heads, units & (rows > 0), rows), (heads, starts, np.repeat(totals, slices))):
        ones = np.ones(int(where.sum()), np.int32)
        W[:, where] += _core.cost_durations(pack, some, ones, ones, count[where], None, 1)[2] - overhead_s
    return W


def made(slices: Int, lengths: Int, totals: Int) -> Int:
    """Rows that W of each slice makes, of a sequence: whole groups, counted from its end; and slice 0's what is left."""
    first, end = np.cumsum(slices) - slices, np.cumsum(lengths)
    begin, total = end - lengths - np.repeat(end[first] - lengths[first], slices), np.repeat(totals, slices)
    start = begin + (total - begin) % GROUP
    start[first] = 0
    stop = np.append(start[1:], 0)
    stop[first + slices - 1] = totals
    rows: Int = (stop - start).astype(np.int32)
    return rows
