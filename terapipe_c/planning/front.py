"""From the plans that a search saw to better ones, for every limit of memory at once: single moves from those that are faster than
any that needs as little, until such moves find none (a Pareto local search)."""
from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..schedules import SLICED, ZERO_BUBBLE
from .deadline import late
from .judge import SLIGHT, Candidate, Cut, Judge, Micro, possible

__all__ = ["Front", "Given"]

_PENDING = 0, 1, 2


def _seconds(c: Candidate) -> float:
    return c.seconds


class Given(NamedTuple):
    """What a search may not change."""

    unit: int             #: slice lengths are multiples of so many tokens
    partition: bool
    slices: bool
    sizes: bool           #: of micro-batches


def _cuts(cut: Cut) -> Iterator[Cut]:
    """One block from any stage to any other."""
    sizes = [end - first for first, end in cut]
    for a, b in itertools.permutations(range(len(sizes)), 2):
        if sizes[a] > 1:
            moved = [n - (i == a) + (i == b) for i, n in enumerate(sizes)]
            yield tuple(itertools.pairwise(itertools.accumulate(moved, initial=0)))


def _lengths(lengths: tuple[int, ...], unit: int) -> Iterator[tuple[int, ...]]:
    """Two slices joined, or cut elsewhere, or one slice cut in two."""
    for i, n in enumerate(lengths):
        if i + 1 < len(lengths):
            both = n + lengths[i + 1]
            yield (*lengths[:i], both, *lengths[i + 2:])
            for first in (n - unit, n + unit):
                if unit <= first <= both - unit:
                    yield (*lengths[:i], first, both - first, *lengths[i + 2:])
        for first in dict.fromkeys((unit, n // 2 // unit * unit, (n - 1) // unit * unit)):
            if 0 < first < n:
                yield (*lengths[:i], first, n - first, *lengths[i + 1:])


def _cut_otherwise(slicing: tuple[Micro, ...], unit: int) -> Iterator[tuple[Micro, ...]]:
    """One micro-batch cut otherwise, or like the one beside it."""
    for q, (b, lengths) in enumerate(slicing):
        beside = [slicing[i][1] for i in (q - 1, q + 1) if 0 <= i < len(slicing)]
        for other in (*_lengths(lengths, unit), *beside):
            yield (*slicing[:q], (b, other), *slicing[q + 1:])


def _sized_otherwise(slicing: tuple[Micro, ...], most: int) -> Iterator[tuple[Micro, ...]]:
    """Two micro-batches as one, one as two, or one's sequence in the next."""
    for q, (b, lengths) in enumerate(slicing):
        before, after = slicing[:q], slicing[q + 1:]
        if b > 1:
            yield (*before, (1, lengths), (b - 1, lengths), *after)
            yield (*before, (b - 1, lengths), (1, lengths), *after)
        if after:
            (c, others), rest = after[0], after[1:]
            if b + c <= most:
                yield (*before, (b + c, lengths), *rest)
            if b > 1 and c < most:
                yield (*before, (b - 1, lengths), (c + 1, others), *rest)
            if c > 1 and b < most:
                yield (*before, (b + 1, lengths), (c - 1, others), *rest)


def _ways(judge: Judge, c: Candidate, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(schedule, pending) that these micro-batches allow."""
    for name in names:
        whole = name != SLICED or all(len(lengths) == 1 for _, lengths in c.slicing)
        if whole and not possible(name, judge.ranks, len(c.slicing)):
            yield from itertools.product((name,), _PENDING if name not in ZERO_BUBBLE else (1,))


class Front:
    """Of the plans that a judge has seen those that need less memory than any as fast, and what is beside them. Not of those with
    whole B, which are for where nothing else fits: they would hide what they are made of."""

    def __init__(self, judge: Judge, names: Sequence[str], given: Given) -> None:
        self.judge, self.names, self.given = judge, names, given
        self._known = judge.front(whole=False)                 # the fastest first
        self._needed = [max(judge.peak_bytes(c)) for c in self._known]
        self._done = set[int]()                                # by id: the judge keeps all, one of each

    def _beside(self, c: Candidate) -> Iterator[Candidate]:
        """All plans that one move makes of ``c``."""
        judge, given = self.judge, self.given
        for name, pending in _ways(judge, c, self.names):
            yield judge.judge(name, c.partition, c.slicing, pending)
        for cut in () if given.partition else _cuts(c.partition):
            yield judge.judge(c.schedule, cut, c.slicing, c.pending)
        slicings = itertools.chain(() if given.sizes else _sized_otherwise(c.slicing, judge.costs.known_batch),
                                   () if given.slices else _cut_otherwise(c.slicing, given.unit))
        for s in dict.fromkeys(slicings):
            if not possible(c.schedule, judge.ranks, len(s)):
                yield judge.judge(c.schedule, c.partition, s, c.pending)

    def _add(self, c: Candidate) -> None:
        known, needed = self._known, max(self.judge.peak_bytes(c))
        at = bisect.bisect_right(known, c.seconds / SLIGHT, key=_seconds)
        if c.seconds == math.inf or (at > 0 and self._needed[at - 1] <= needed):
            return
        at = bisect.bisect_left(known, c.seconds, key=_seconds)
        end = at
        while end < len(known) and self._needed[end] >= needed:
            end += 1
        known[at:end], self._needed[at:end] = [c], [needed]

    def explore(self, budget: int) -> bool:
        """Judge what is beside these plans, in turn beside the fastest and the leanest that are left, until nothing adds another
        (True) or ``budget`` ticks are spent."""
        stop = self.judge.work + budget
        for last in itertools.cycle((0, -1)):
            left = [c for c in self._known if id(c) not in self._done]
            if not left:
                break
            self._done.add(id(left[last]))
            for c in self._beside(left[last]):
                self._add(c)
                if self.judge.work >= stop or late():
                    return False
        return True
