"""Bytes of a block in the engine, by differences between the sizes that it gives for stages: what the papers' planners ask for."""
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..backend import Backend
from ..config import GPTConfig
from ..engine import dimensions

__all__ = ["BlockBytes", "block_bytes", "saved_bytes"]

Micro = tuple[int, tuple[int, ...]]


def saved_bytes(model: GPTConfig, slicing: tuple[Micro, ...], where: Backend) -> list[int]:
    """[blocks] of bytes of the largest micro-batch's activations that recomputing or swapping the block frees between forward and
    backward; 0: it can be neither recomputed nor swapped."""
    if where.name == "cuda":                  # it keeps the normalised input too (tp_inner of csrc/stage/describe.h)
        row = max(b for b, _ in slicing) * sum(slicing[0][1]) * model.n_embd * (2 if where.dtype == "bf16" else 4)
        widths = {"attention": 1 + 3 + 1, "ffn": 1 + 4 + 4}
        return [widths.get(block.kind, 0) * row for block in model.blocks]
    sizes = {kind: size.activation - size.input for kind, size in block_bytes(model, slicing).items()}
    return [sizes[block.kind] if block.kind in ("attention", "ffn") else 0 for block in model.blocks]


class BlockBytes(NamedTuple):
    """Bytes of a block in the engine."""

    static: int        #: parameters, gradients and moments
    activation: int    #: each activation slot
    gradient: int      #: each slot of activation gradients
    input: int         #: each activation slot of a block that is recomputed


def block_bytes(model: GPTConfig, slicing: tuple[Micro, ...]) -> dict[str, BlockBytes]:
    """Bytes by kind of block, and of a stage itself ("stage"), from differences between the sizes that the engine gives for stages:
    each such size is a sum of these."""
    return _block_bytes(model, max(b for b, _ in slicing), sum(slicing[0][1]))


@lru_cache(maxsize=64)
def _block_bytes(model: GPTConfig, batch: int, seq_len: int) -> dict[str, BlockBytes]:
    shape, slicing = dimensions(GPTConfig(**{**model.to_dict(), "n_layer": 2})), (seq_len, batch, [(batch, [seq_len])])

    again = bytes((0, 1, 1, 1, 1, 0))

    def stage(first: int, end: int) -> NDArray[np.int64]:
        one, two, three = (_core.stage_memory(shape, slicing, first, end, a, g) for a, g in ((1, 1), (2, 1), (1, 2)))
        few, more = (_core.stage_memory(shape, slicing, first, end, a, 1, None, None, again) for a in (1, 2))
        return np.array([one - (two - one) - (three - one), two - one, three - one, more - few])

    attention, ffn = stage(1, 4) - stage(1, 3), stage(1, 3) - stage(1, 2)
    base = stage(1, 2) - attention
    sizes = {"embedding": stage(0, 2) - stage(1, 2), "attention": attention, "ffn": ffn, "head": stage(4, 6) - ffn, "stage": base}
    return {kind: BlockBytes(*(int(n) for n in row)) for kind, row in sizes.items()}
