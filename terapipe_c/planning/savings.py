"""What a plan does to fit its memory, and the program that does so."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import _core
from ..config import KINDS, GPTConfig
from ..cost import Slicing, slicing_arrays
from ..schedules import Program

__all__ = ["NOTHING", "Savings", "saving"]


class Savings(NamedTuple):
    """What a plan recomputes and swaps to fit its memory. Empty: nothing."""

    recompute: tuple[bool, ...] = ()      #: per block: only its input is kept, its other activations are recomputed (R)
    swap: tuple[int, ...] = ()            #: per block: bytes of a micro-batch's activations that go to the host and back
    swap_s: tuple[float, ...] = ()        #: per stage: seconds to swap those of its blocks out, and as many to swap them in
    ahead: int | None = None              #: how far ahead overlapped swaps begin (Program.save_memory); None: they do not overlap
    at_once: bool = False                 #: attentions are recomputed all slices at once, even where slice by slice takes less


NOTHING = Savings()
_WITHIN = 255        # TP_AGAIN_WITHIN of csrc/sched/sched.h


def attends(model: GPTConfig, flags: Sequence[int]) -> bool:
    """Whether one of these blocks is an attention."""
    return any(flag and block.kind == "attention" for block, flag in zip(model.blocks, flags, strict=False))


def saving(program: Program, model: GPTConfig, partition: Sequence[tuple[int, int]], savings: Savings,
           keys: Slicing = (), waits: bool = False, columns: int = 2, within: bool = False) -> Program:
    """The program with R, SO and SI: R (or SI) of a slice comes before the slice's backward; but where an attention is recomputed
    (or swapped) those of all slices come before the micro-batch's first backward. Not so R of one that may keep its keys and values
    (keys: the slicing, where it may; columns: Backend.keeps_keys) where this takes less memory (csrc/plan/again.h); waits: W will
    wait. within: R are within whole B. SI as far ahead as ``savings`` say."""
    def before(flags: Sequence[int]) -> bytes:
        kinds = [{block.kind for block, flag in zip(model.blocks[a:e], flags[a:e], strict=False) if flag} for a, e in partition]
        return bytes(1 if "attention" in of_stage else 2 if of_stage else 0 for of_stage in kinds)

    again = before(savings.recompute)
    if within:
        again = bytes(_WITHIN if way else 0 for way in again)
    elif savings.recompute and keys and not savings.at_once:
        boundaries = np.array([0, *(e for _, e in partition)], np.int32)
        kinds = np.array([KINDS.index(block.kind) for block in model.blocks], np.int32)
        waits = waits or (columns > 2 and attends(model, savings.swap))     # gradients of all slices at once (cuda/stage.h)
        again = _core.again_ways(boundaries, kinds, bytes(savings.recompute), *slicing_arrays(keys), columns, waits)
    return program.save_memory(again * program.copies, before(savings.swap) * program.copies, savings.ahead or 0,
                               savings.ahead is not None)
