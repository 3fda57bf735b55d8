"""Bytes that the fullest rank takes at least, whatever plan is found: ``planner="auto"`` asks nobody for plans that need more than
there is."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .. import _core
from ..engine import boundaries, cut, dimensions, saves_bytes
from ..links import rank_of
from ..schedules import CHIMERA, SLICED, ZIGZAG
from .deadline import late
from .judge import Micro
from .request import BOTH_WAYS, SAVERS, Request
from .starts import whole_sequences
from .whole import may_be_whole

__all__ = ["LeastBytes", "least_slots"]

_LINE = 64      # sequences of a multiple of so many tokens have arrays that end with a line, and so no room between slots
_SIZES = 32     # of others so many sizes of micro-batches are tried at most


def least_slots(name: str, ranks: int, chunks: int, micros: int, whole: bool = False) -> tuple[int, ...]:
    """[stages] of micro-batches that a stage holds at least, however these are sliced (``whole``: not at all) and whichever W wait:
    as the schedule's builder (csrc/sched) has them where it does not depend on seconds, else one."""
    stages = ranks * chunks
    name = "1f1b" if whole and name == "seq1f1b" else name
    if name == "gpipe":
        return (micros,) * stages
    if name in ("1f1b", SLICED):
        return tuple(min(micros, stages - k) for k in range(stages))
    if name in ("zb-h1", "zb-h2"):
        return (min(micros, ranks if name == "zb-h1" else 2 * ranks - 1),) * stages
    if name == "seq1f1b":
        return tuple(min(micros, 2, stages - k) for k in range(stages))
    if name in ("interleaved", "zb-v", "dualpipe-v") or (name == "hanayo" and chunks == 2):
        return tuple(min(micros, ranks, stages - k) for k in range(stages))
    return (1,) * stages


class LeastBytes:
    """The bounds of one request's questions: :meth:`of`, remembered."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, asked: Request, ranks: int) -> int:
        """No plan that the planner of ``asked`` has on so many ranks takes less on its fullest one; 0 where that is not known."""
        return min(self._each(asked, ranks), default=0)

    def lacks(self, asked: Request, ranks: int, named: float) -> bool:
        """Whether nothing can fit on so many ranks, and no refusal would name less than ``named`` bytes."""
        return all(asked.limit < least >= named for least in self._each(asked, ranks))

    def _each(self, asked: Request, ranks: int) -> Iterator[int]:
        """Of each schedule, and size of micro-batches."""
        for name in asked.schedules:
            yield from self._of_order(asked, name, ranks)

    def _of_order(self, asked: Request, name: str, ranks: int) -> Iterator[int]:
        copies = 2 if name == CHIMERA else 1
        given = asked.slicing
        if given is None and asked.planner not in BOTH_WAYS:
            given = whole_sequences(asked)
        if given is not None:
            each = given[:len(given) // copies]
            yield self._sized(asked, name, ranks, each, 0, sum(b for b, _ in each), len(each), copies)
            return
        share = asked.share // copies
        sizes = range(1, 2 if asked.seq_len % _LINE == 0 else share + 1)
        if share < 1 or len(sizes) > _SIZES:
            yield 0
            return
        for b in sizes:
            one = ((b, (asked.seq_len,)),)
            yield 0 if late() else self._sized(asked, name, ranks, one, asked.unit, share, -(-share // b), copies)

    def _sized(self, asked: Request, name: str, ranks: int, slicing: Sequence[Micro], unit: int, batch: int, micros: int,
               copies: int) -> int:
        """Bytes with these micro-batches, or, with a unit, with ``micros`` as large as the one in ``slicing``."""
        free = asked.planner in SAVERS
        slots = least_slots(name, ranks, asked.chunks, micros, not unit and all(len(lengths) == 1 for _, lengths in slicing))
        apart = not may_be_whole(name, ())
        key = (ranks, asked.chunks, asked.replicas, copies, name in ZIGZAG, slots, slicing if unit else len(slicing), unit, free,
               asked.recompute, asked.partition, apart, asked.shards)
        if key not in self._known:
            kinds = [block.kind in ("attention", "ffn") for block in asked.model.blocks]
            self._known[key] = _core.least_memory(
                dimensions(asked.model), cut(slicing), unit, batch, ranks, rank_of(ranks, len(slots), name in ZIGZAG), slots,
                asked.replicas, copies, saves=None if free else saves_bytes(asked.recompute),
                all_saved=saves_bytes(kinds) if free else None,
                partition=None if asked.partition is None else boundaries(asked.partition), apart=apart,
                shards=asked.shards, **asked.costs.where.arguments)
        return self._known[key]
