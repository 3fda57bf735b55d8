"""Schedules: who does what in which order. Each function gives a compute-only :class:`Program` (F and B).

``slices`` is the number of token slices: one int for all micro-batches, or one per micro-batch. Forward slices run in
ascending order, backward slices in descending order, backward micro-batches in ascending order, so that every schedule
sums weight gradients in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._core import OPS, InvalidTypeError, InvalidValueError, Program

__all__ = ["OPS", "Program", "gpipe", "interleaved", "one_f_one_b", "seq1f1b", "sliced_1f1b"]

_GPIPE, _1F1B, _SEQ1F1B, _INTERLEAVED = range(4)  # tp_schedule of csrc/sched/sched.h


def _whole(name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidTypeError(f"{name} is {value!r}: an int would be right")
    if not 1 <= value <= most:
        raise InvalidValueError(f"{name} is {value}: 1 to {most} would be right")
    return int(value)


def _build(schedule: int, ranks: int, micro_batches: int, chunks: int, slices: int | Sequence[int]) -> Program:
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    chunks = _whole("chunks", chunks, 65536)
    if isinstance(slices, int | np.integer):
        counts = [_whole("slices", slices, 65536)] * micro_batches
    else:
        try:
            counts = [_whole("slices of a micro-batch", count, 65536) for count in slices]
        except TypeError as error:
            if isinstance(error, InvalidTypeError):
                raise
            raise InvalidTypeError(f"slices is {slices!r}: an int, or one per micro-batch, would be right") from None
    if len(counts) != micro_batches:
        raise InvalidValueError(
            f"slices has {len(counts)} entries: one per micro-batch, {micro_batches}, would be right"
        )
    return Program._build(schedule, ranks, chunks, np.array(counts, np.int32))


def gpipe(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """All forwards, then all backwards (Huang et al. 2019; with slices: TeraPipe, Li et al. 2021).

    Uniform slices: makespan (m s + ranks - 1)(f + b); every activation is held.
    """
    return _build(_GPIPE, ranks, micro_batches, 1, slices)


def one_f_one_b(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """One forward, one backward (PipeDream-Flush, Narayanan et al. 2021), the unit being the whole micro-batch.

    One slice: makespan (m + ranks - 1)(f + b); rank r holds min(m, ranks - r) micro-batches.
    """
    return _build(_1F1B, ranks, micro_batches, 1, slices)


def interleaved(ranks: int, micro_batches: int, chunks: int, slices: int | Sequence[int] = 1) -> Program:
    """Interleaved 1F1B (Narayanan et al. 2021): rank r holds stages r, r + ranks, ...; micro_batches is a multiple of ranks.

    One slice, times of a chunk: makespan (m chunks + ranks - 1)(f + b).
    """
    return _build(_INTERLEAVED, ranks, micro_batches, chunks, slices)


def sliced_1f1b(ranks: int, micro_batches: int, split: int) -> Program:
    """AutoPipe's sliced 1F1B (Liu et al. 2022): the forwards of the first ``split`` micro-batches in two halves along the
    batch, ``2F0.0a`` and ``2F0.0b``, so that the next stage begins half a forward earlier; backward is of the whole. The
    message of each stage's last warm-up forward is joined (``2F0.0a+``, ``2F0.0b+``): its reader's next op is the first of
    its steady state. split: 0 to micro_batches; from ranks on, more of them change nothing before the last stage starts.

    Equal stages, no message time: a large enough ``split``, ceil(ranks f / (2 b)), saves (ranks - 2) f / 2 of 1F1B's
    makespan; memory is 1F1B's.
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    if isinstance(split, bool) or not isinstance(split, int | np.integer):
        raise InvalidTypeError(f"split is {split!r}: an int would be right")
    return Program._build_sliced(ranks, micro_batches, int(split))


def seq1f1b(ranks: int, micro_batches: int, slices: int | Sequence[int]) -> Program:
    """1F1B with the slice as its unit (Seq1F1B, Sun et al. 2024).

    Uniform slices: makespan (m s + ranks - 1)(f + b); rank r holds min(m s, ranks - r - 1 + s) slices.
    """
    return _build(_SEQ1F1B, ranks, micro_batches, 1, slices)
