"""Builders of schedules: in which order does each rank do its work? Each function gives a compute-only :class:`Program` (F and B).

``slices`` is the number of token slices: one int for all micro-batches, or one per micro-batch. Forward slices run in
ascending order, backward slices in descending order, backward micro-batches in ascending order, so that every schedule
sums weight gradients in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ._core import OPS, InvalidTypeError, InvalidValueError, Program
from .config import brief

__all__ = ["OPS", "Program", "bpipe", "chimera", "dualpipe_v", "gpipe", "hanayo", "interleaved", "looped_bfs", "one_f_one_b",
           "pipedream", "seq1f1b", "sliced_1f1b", "zb_h1", "zb_h2", "zb_v"]  # fmt: skip

# What planners call the builders, and what kinds of them there are.
ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")  # whose builders place every W themselves
ZIGZAG = ("zb-v", "dualpipe-v", "hanayo")  # whose stages go down the ranks and up again
CHIMERA = "chimera"  # two copies of the model, one pipeline down the ranks and one up
LOOPED = "looped-bfs"  # as interleaved, breadth first: every stage of a rank does all micro-batches before the next does
PIPEDREAM = "pipedream"  # each micro-batch has its update, by gradients of weights that others have updated since
SLICED = "sliced-1f1b"  # AutoPipe's: whole sequences, the first forwards in halves along the batch

_GPIPE, _1F1B, _SEQ1F1B, _INTERLEAVED, _LOOPED_BFS, _ZB_H1, _ZB_H2 = range(7)  # tp_schedule of csrc/sched/sched.h


def __dir__() -> list[str]:
    return __all__


def _whole(name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidTypeError(f"{name} is {brief(value)}: an int would be right")
    if not 1 <= value <= most:
        raise InvalidValueError(f"{name} is {value}: 1 to {most} would be right")
    return int(value)


def _build(schedule: int, ranks: int, micro_batches: int, chunks: int, slices: int | Sequence[int]) -> Program:
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    chunks = _whole("chunks", chunks, 65536)
    return Program._build(schedule, ranks, chunks, _counts(micro_batches, slices))


def _counts(micro_batches: int, slices: int | Sequence[int]) -> NDArray[np.int32]:
    if isinstance(slices, int | np.integer):
        counts = [_whole("slices", slices, 65536)] * micro_batches
    else:
        try:
            counts = [_whole("slices of a micro-batch", count, 65536) for count in slices]
        except TypeError as error:
            if isinstance(error, InvalidTypeError):
                raise
            raise InvalidTypeError(f"slices is {brief(slices)}: an int, or one per micro-batch, would be right") from None
    if len(counts) != micro_batches:
        raise InvalidValueError(
            f"slices has {len(counts)} entries: one per micro-batch, {micro_batches}, would be right"
        )
    return np.array(counts, np.int32)


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


def looped_bfs(ranks: int, micro_batches: int, chunks: int, slices: int | Sequence[int] = 1) -> Program:
    """Breadth-first pipeline (Lamy-Poirier 2023; LoopedBFS in torch.distributed.pipelining): rank r holds stages r, r + ranks, ...;
    all forwards of a stage, then all of the rank's next one, then all backwards in the same way from the last stage back. Of one
    chunk it is :func:`gpipe`. Micro-batches go backward in ascending order, as in all schedules here (torch's in descending order).

    Uniform slices, n of them in all, times of a chunk: makespan ((chunks - 1) max(n, ranks) + n + ranks - 1)(f + b): one long
    sequence fills and drains in a chunk's time, which ``interleaved`` does only for a multiple of ranks micro-batches; every
    activation is held. ``split``, which plans do, fills waits with weight gradients: f = i = w, one sequence, n >= ranks:
    (3 n chunks + 2 (ranks - 1)) f. Of several micro-batches ``reorder`` lets each go back as soon as it can, which plans take where
    it is faster.
    """
    return _build(_LOOPED_BFS, ranks, micro_batches, chunks, slices)


def sliced_1f1b(ranks: int, micro_batches: int, split: int) -> Program:
    """AutoPipe's sliced 1F1B (Liu et al. 2022): the forwards of the first ``split`` micro-batches in two halves along the
    batch, ``2F0.0a`` and ``2F0.0b``, so that the next stage begins half a forward earlier; backward is of the whole. The
    message of each stage's last warm-up forward is joined (``2F0.0a+``, ``2F0.0b+``): its reader's next op is the first of
    its steady state. split: 0 to micro_batches; from ranks on, more of them change nothing before the last stage starts.

    Equal stages, no message time, 2 ranks or more: of 1F1B's makespan it saves min((ranks - 2) f / 2, min(split, ranks - 2) b)
    where some micro-batch stays whole, so that f <= 2 b and split = ceil((ranks - 2) f / (2 b)) save all that can be; and
    min((ranks - 2) f / 2, (micro_batches - 1) (f / 2 + b)) where split = micro_batches. Memory is 1F1B's.
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    if isinstance(split, bool) or not isinstance(split, int | np.integer):
        raise InvalidTypeError(f"split is {brief(split)}: an int would be right")
    if not 0 <= split <= micro_batches:
        raise InvalidValueError(f"split is {brief(int(split))}: 0 to the {micro_batches} micro-batches would be right")
    return Program._build_sliced(ranks, micro_batches, int(split))


def seq1f1b(ranks: int, micro_batches: int, slices: int | Sequence[int]) -> Program:
    """1F1B with the slice as its unit (Seq1F1B, Sun et al. 2024).

    Uniform slices: makespan (m s + ranks - 1)(f + b); rank r holds min(m s, ranks - r - 1 + s) slices.
    """
    return _build(_SEQ1F1B, ranks, micro_batches, 1, slices)


def zb_h1(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """ZB-H1 (Qi et al. 2024): backward apart into I and W, W late enough to let I's through, activations as in 1F1B.

    One slice, f = i = w: (ranks - 1)(f + i - w) idle seconds a rank where micro_batches >= ranks; every rank holds
    min(ranks, micro_batches).
    """
    return _build(_ZB_H1, ranks, micro_batches, 1, slices)


def zb_h2(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """ZB-H2 (Qi et al. 2024): as ZB-H1 with twice the warm-up: no rank waits once it has begun.

    One slice, f = i = w, micro_batches >= 2 ranks - 1: makespan (3 micro_batches + ranks - 1) f, which no order beats;
    every rank holds 2 ranks - 1.
    """
    return _build(_ZB_H2, ranks, micro_batches, 1, slices)


def zb_v(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1, seconds: Sequence[float] = (1.0, 1.0, 1.0)) -> Program:
    """ZB-V (Qi et al. 2024): rank r holds stages r and 2 ranks - 1 - r, so that a micro-batch ends where it began; W fills
    waits; a rank holds at most 2 ranks activations of a stage, 1F1B's bytes.

    The faster, at nominal ``seconds`` of F, I and W of a stage, of the paper's pattern (micro_batches >= 2 ranks - 1) and list
    scheduling. Equal seconds and that many micro-batches: (6 micro_batches + ranks - 1) f, which no order on this placement
    beats.
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    forward, inputs, weights = _nominal(seconds)
    return Program._build_zb_v(ranks, _counts(micro_batches, slices), 2 * ranks, forward, inputs, weights)


def _nominal(seconds: Sequence[float]) -> tuple[float, float, float]:
    try:
        if np.iscomplexobj(seconds):
            raise TypeError
        forward, inputs, weights = (float(x) for x in seconds)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(f"seconds is {brief(seconds)}: three numbers (of F, I and W) would be right") from None
    return forward, inputs, weights


def hanayo(
    ranks: int, micro_batches: int, waves: int, slices: int | Sequence[int] = 1, seconds: Sequence[float] = (1.0, 1.0, 1.0)
) -> Program:
    """Hanayo's placement (Liu et al. 2023): a micro-batch goes down the ranks and up again ``waves`` times; rank r holds stages
    2 k ranks + r and 2 (k + 1) ranks - 1 - r of every wave k, and of neighbours on one rank no message is sent.

    The order is ours (the paper's own was not found): list scheduling at the nominal ``seconds`` of F, I and W of a stage (a
    backward takes I + W), backward first, or, for one wave and at least 2 ranks - 1 micro-batches, ZB-V's pattern with whole
    backwards, whichever is faster; at most ranks * 2 * waves activations of a stage on a rank, 1F1B's bytes. Several waves pay
    where micro-batches are few: 4 ranks with as many, b = 2 f: 21 by 1F1B, 18, 16, 15 by 1, 2, 4 waves; with 32: 105, 102, 121.
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    waves = _whole("waves", waves, max(1, 65536 // (2 * ranks)))
    most = 2 * waves * ranks
    return Program._build_hanayo(ranks, _counts(micro_batches, slices), most, *_nominal(seconds), waves)


def chimera(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """Chimera (Li & Hoefler, SC 2021): two copies of the model, one pipeline down the ranks and one up. Rank r holds stage r of
    the first copy and, as stage 2 ranks - 1 - r, stage ranks - 1 - r of the second; the first half of the micro-batches goes
    through the first copy, the second half through the second; the copies add their gradients before the update. ranks and
    micro_batches are even. More micro-batches than ranks: units of as many as there are ranks, one behind the other (the paper's
    direct concatenation; its forward doubling and backward halving are not built). Slices of a micro-batch stay together.

    One slice, f = b, micro_batches a multiple of ranks: makespan (2 micro_batches + ranks - 2) f, ranks - 2 idle slots a rank,
    which is half of 1F1B's 2 ranks - 2; with micro_batches = ranks and b >= f: ranks f + (2 ranks - 2) b. Activations of a stage
    that rank r holds: between ranks / 2 + 1 (the first and the last rank) and ranks. Every rank holds two stages' weights. With
    b = 2 f each unit but the last leaves waits, and from four units on 1F1B is faster; ``split``, which plans do, fills them:
    f = i = w and pending = ranks / 2: (3 micro_batches + ranks / 2 - 1) f, which no order on this placement beats.
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    return Program._build_chimera(ranks, _counts(micro_batches, slices))


def bpipe(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """BPipe (Kim et al. 2023): 1F1B whose rank r < ranks / 2 sends what it keeps of some micro-batches to rank ranks - 1 - r
    (``0SE4.0@3``, received by ``0RE4.0@0``) and has it back (``0SL4.0@0``, ``0RL4.0@3``) for their backward: no rank holds more
    than ceil((ranks + 2) / 2) micro-batches, guests included, where rank 0 of 1F1B holds ``ranks`` (lowered, where
    micro-batches differ in slices, a message may land in one buffer more). Its unit is the whole micro-batch.

    From 4 ranks on; of fewer ranks, or few micro-batches, it is 1F1B. Evicted are those that went forward last, where the next
    forward or load has no room otherwise; a load has the time of a forward or more: messages of up to f cost nothing (b = 2 f).
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    return Program._build_bpipe(ranks, _counts(micro_batches, slices))


def dualpipe_v(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """DualPipeV (DeepSeek-AI 2024's DualPipe cut in half): rank r holds stages r and 2 ranks - 1 - r; in the main part the
    forward of one overlaps with the backward of the other (``0F3.0& 3B1.0``; here they run one behind the other).
    micro_batches: at least 2 ranks.

    One slice, f = i = w: makespan (6 micro_batches + ranks - 1) f; every rank holds 2 ranks + 1 activations of a stage.
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    return Program._build_dualpipe_v(ranks, _counts(micro_batches, slices))


def pipedream(ranks: int, micro_batches: int, slices: int | Sequence[int] = 1) -> Program:
    """PipeDream (Narayanan et al. 2019): 1F1B's order, and an update (U) of each stage behind every micro-batch's backward.

    A micro-batch goes forward by the newest weights of each stage, and back by the same ones: rank r keeps min(micro_batches,
    ranks - r) versions of its weights. A step is a stretch of its endless stream, filled and drained; seconds a micro-batch in
    between are the difference of two stretches' makespans over that of their micro-batches: the busiest rank's f + b + u.
    """
    ranks, micro_batches = _whole("ranks", ranks, 32767), _whole("micro_batches", micro_batches, 65536)
    return Program._build_pipedream(ranks, _counts(micro_batches, slices))
