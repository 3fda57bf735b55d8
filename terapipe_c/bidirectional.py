"""Plans for Chimera: two copies of the model in opposite directions (``schedules.chimera``).

A rank has stage r of one copy and stage ranks - 1 - r of the other, so stages need not be equal: only the work of the two
together must be. What is looked at: micro-batches of all sizes that leave an even number of them, in slices as equal as can be or
TeraPipe's own, on balanced stages; then single moves of stage boundaries from the fastest, and from the one that needs least
memory; judged by simulating the real program. The fastest of all of them that fits is the plan. The paper leaves stages and
micro-batches to the user.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from . import planners
from ._core import DeadlineError, InfeasibleError
from .config import counted
from .deadline import check_time, late
from .judge import CHIMERA, SLIGHT, Candidate, Cut, Judge, Micro, lightest, pace, rounded
from .partition import equal_lengths, even_partition
from .search import StageCost, balanced, uniform

if TYPE_CHECKING:
    from .request import Request

__all__ = ["plan_both_ways"]

_WORK = 60_000_000      # ticks of the judge (about 13 ns each) for quick plans of a number of ranks, and for the moves from them
_STARTS = 3             # quick plans from which boundaries move
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)   # slices of a sequence


def _slicings(judge: Judge, request: Request) -> list[tuple[Micro, ...]]:
    """What may be run, both copies alike; the most promising first."""
    if request.slicing is not None:
        return [request.slicing]
    units, share = request.seq_len // request.unit, request.share
    lengths = {tuple(n * request.unit for n in equal_lengths(units, parts)) for parts in _PARTS if parts <= units}
    costs = StageCost(judge.costs, judge.model, judge.ranks, judge.mean_message_s(0.0))
    own = planners.slice_tokens(costs, judge.ranks, seq_len=request.seq_len, granularity=request.unit)
    lengths.add(tuple(int(n) for n in own.lengths))
    sizes = [b for b in range(1, min(share // 2, judge.costs.known_batch) + 1) if share % (2 * b) == 0]
    every = [((b, cut),) * (share // b) for b in sizes for cut in sorted(lengths)]
    return sorted(every, key=lambda s: (_estimate(judge, s), s))


def _estimate(judge: Judge, slicing: tuple[Micro, ...]) -> float:
    """Of equal stages: all work of a rank, and Chimera's (ranks - 2) / 2 idle slots in each direction, of a slice each."""
    d = judge.durations(((0, judge.model.num_blocks),), slicing)
    unit = (d["F"] + d["I"] + d["W"])[0]
    return rounded(float(unit.sum() + (judge.ranks - 2) / 2 * unit.max()))


def _starts(judge: Judge, request: Request, stop: int) -> list[Candidate]:
    """Uniform's plan, and quick ones, each of them without weight gradients that wait, too, which take memory."""
    found = [uniform(judge, request)]
    for slicing in _slicings(judge, request):
        if judge.work > stop or late():
            break
        cuts: Iterable[Cut] = (request.partition,) if request.partition is not None else dict.fromkeys(
            (balanced(judge, slicing, judge.ranks), tuple(even_partition(judge.model, judge.ranks))))
        found += [judge.judge(CHIMERA, cut, slicing, pending) for cut in cuts for pending in (1, 0)]
    return sorted(dict.fromkeys(found), key=pace)


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """A boundary, or it and its mirror image, by one block."""
    bounds = [0, *(end for _, end in cut)]
    last = len(bounds) - 1
    for at, by in itertools.product(range(1, last), (-1, 1)):
        for mirrored in (0, -1, 1):
            moved = list(bounds)
            moved[at] += by
            if mirrored and at < last - at:
                moved[last - at] += mirrored
            if (not mirrored or at < last - at) and all(a < b for a, b in itertools.pairwise(moved)):
                yield tuple(itertools.pairwise(moved))


def _anywhere(cut: Cut) -> Iterator[Cut]:
    """A boundary to wherever between its neighbours, the nearest places first; then whatever ``_neighbours`` has."""
    bounds = [0, *(end for _, end in cut)]
    moves = [(abs(to - bounds[at]), at, to) for at in range(1, len(cut)) for to in range(bounds[at - 1] + 1, bounds[at + 1])]
    for by, at, to in sorted(moves):
        if by:
            yield tuple(itertools.pairwise([*bounds[:at], to, *bounds[at + 1:]]))
    yield from _neighbours(cut)


def _descended(judge: Judge, start: Candidate, stop: int, height: Callable[[Candidate], float],
               moves: Callable[[Cut], Iterator[Cut]] = _neighbours) -> list[Candidate]:
    """All that is looked at on the way down: the first move that helps, again and again."""
    best, seen = start, [start]
    while judge.work < stop and not late():
        for cut in moves(best.partition):
            seen.append(judge.judge(CHIMERA, cut, best.slicing, best.pending))
            if height(seen[-1]) < height(best) * SLIGHT:
                best = seen[-1]
                break
            if judge.work >= stop or late():
                return seen
        else:
            return seen
    return seen


def _lean(judge: Judge, request: Request, quick: list[Candidate]) -> list[Candidate]:
    """All that is looked at on the way to what needs least memory: other stages, then other slices on these, again and again."""
    def height(c: Candidate) -> float:
        return float(max(judge.peak_bytes(c)))

    def least(found: Iterable[Candidate]) -> Candidate:
        return min(found, key=lambda c: (height(c), pace(c)))

    best, seen, stop, slicings = least(quick), list[Candidate](), judge.work + _WORK // 2, _slicings(judge, request)
    while True:
        seen += _descended(judge, best, stop, height, _anywhere)
        end = least(seen)
        for s in slicings:
            if judge.work >= stop or late():
                return seen
            seen.append(judge.judge(CHIMERA, end.partition, s, 0))
        best = least(seen)
        if height(best) >= height(end):
            return seen


def _explored(judge: Judge, request: Request) -> list[Candidate]:
    """Plans of whatever memory: what is looked at does not depend on the limit, so that more of it never hurts."""
    quick = _starts(judge, request, judge.work + _WORK)
    seen = list(quick)
    if request.partition is None:
        fast = [c for c in quick if c.pending][:_STARTS]
        for c in fast:
            seen += _descended(judge, c, judge.work + _WORK // len(fast), lambda c: c.seconds)
        seen += _lean(judge, request, quick)
    for c in () if late() else sorted(seen, key=pace)[:_STARTS]:
        seen += [judge.judge(CHIMERA, c.partition, c.slicing, pending) for pending in (2, 4, judge.ranks // 2)]
    return seen


def _best(judge: Judge, request: Request) -> Candidate:
    """On this judge's ranks, of equally fast ones that with least memory; InfeasibleError."""
    plans = sorted(_explored(judge, request), key=pace)
    first = next((c for c in plans if judge.fits(c, judge.limit)), None)
    if first is None:
        check_time()
        raise judge.refuse()
    return min((c for c in plans if pace(c) == pace(first)), key=lambda c: max(judge.peak_bytes(c)))


def plan_both_ways(request: Request, judge_of: Callable[[int], Judge]) \
        -> tuple[Judge, Candidate, tuple[tuple[str, float], ...]]:
    """The fastest on the numbers of ranks that the request leaves open, who judged it, and the others; InfeasibleError, or
    DeadlineError where none was found in time."""
    found: list[tuple[Judge, Candidate]] = []
    refusals: list[InfeasibleError] = []
    for ranks in request.ranks:
        if found and late():
            break
        judge = judge_of(ranks)
        try:
            found.append((judge, _best(judge, request)))
        except InfeasibleError as error:
            refusals.append(error)
        except DeadlineError:
            if not found:
                raise
            break
    if not found:
        raise lightest(refusals)
    judge, best = min(found, key=lambda pair: pace(pair[1]))
    compared = tuple((f"{CHIMERA} on {counted(j.ranks, 'rank')}", c.seconds) for j, c in found) if len(found) > 1 else ()
    return judge, best, compared
