"""Plans for Chimera: two copies of the model in opposite directions (``schedules.chimera``).

Rank r has stage r of one copy and stage ranks - 1 - r of the other, so stages need not be equal: only the work of both together
must be. The paper leaves stages and micro-batches to the user; this search chooses them. It starts from balanced stages, with
micro-batches of every size that gives an even number of them, cut into equal slices or into TeraPipe's. Then it moves stage
boundaries, one at a time, from the fastest start and from the one that needs least memory; and boundaries and slices from the
fastest plan within less and less memory. It does so on every grid of tokens that the granularity refines. Each candidate is judged
by simulating the real program; the plan is the fastest that fits.
"""
from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from .. import planners
from .._core import DeadlineError, InfeasibleError
from ..config import counted
from ..partition import equal_lengths, even_partition
from ..schedules import CHIMERA
from .bounds import bound_s, least_work_s
from .deadline import check_time, late, limited, share
from .judge import SLIGHT, Candidate, Cut, Judge, Micro, lightest, pace, rounded
from .search import grids
from .starts import StageCost, balanced, uniform

if TYPE_CHECKING:
    from .request import Request

__all__ = ["plan_both_ways"]

_WORK = 60_000_000      # ticks of the judge (about 13 ns each) for the quick plans of one number of ranks, and for moves from them
_GRIDS = 4              # all grids together may take this many times _WORK, besides a little for each
_NEAR = 1.05            # a start is worth a descent if it is at most this many times as slow as the best plan of a coarser grid
_DEAR = 10_000_000      # mean ticks of a candidate above which a finer grid is tried only where its estimates promise more
_SMALL = 0.01           # the part by which such an estimate must be better than those of the coarser grids' plans
_VALLEYS = 3            # slicings from whose fastest plans boundaries and slices move
_RUNGS = 12             # limits of memory, one below the other, within which they move, too
_LESS = 0.95            # each such limit is this part of the one before
_STARTS = 3             # quick plans from which boundaries move
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)   # slices of a sequence


def _slicings(judge: Judge, request: Request) -> list[tuple[Micro, ...]]:
    """Slicings to try, the same for both copies; the most promising first."""
    if request.slicing is not None:
        return [request.slicing]
    units, sequences = request.seq_len // request.unit, request.share
    lengths = {tuple(n * request.unit for n in equal_lengths(units, parts)) for parts in _PARTS if parts <= units}
    costs = StageCost(judge.costs, judge.model, judge.ranks, judge.mean_message_s(0.0))
    own = planners.slice_tokens(costs, judge.ranks, seq_len=request.seq_len, granularity=request.unit)
    lengths.add(tuple(int(n) for n in own.lengths))
    sizes = [b for b in range(1, min(sequences // 2, judge.costs.known_batch) + 1) if sequences % (2 * b) == 0]
    every = [((b, cut),) * (sequences // b) for b in sizes for cut in sorted(lengths)]
    return _promising(judge, every)


def _estimates(judge: Judge, slicing: tuple[Micro, ...]) -> tuple[float, float]:
    """Two estimates of a step's seconds on equal stages: all work of a rank, and Chimera's (ranks - 2) / 2 idle slots in each
    direction, each as long as a slice. The engine may run all W of a micro-batch with its last slice: the first estimate is for
    the case that no rank waits for them, the second for the case that one does."""
    d = judge.durations(((0, judge.model.num_blocks),), slicing)
    there, stays = (d["F"] + d["I"])[0], d["W"][0]
    work, idle = float(there.sum() + stays.sum()), (judge.ranks - 2) / 2
    return rounded(work + idle * float(there.max() + stays.mean())), rounded(work + idle * float((there + stays).max()))


def _promising(judge: Judge, slicings: list[tuple[Micro, ...]]) -> list[tuple[Micro, ...]]:
    """The most promising first, by each of the estimates in turn."""
    told = {s: _estimates(judge, s) for s in slicings}
    orders = [sorted(slicings, key=lambda s, k=k: (told[s][k], s)) for k in (0, 1)]  # type: ignore[misc]
    return list(dict.fromkeys(itertools.chain.from_iterable(zip(*orders, strict=True))))


def _starts(judge: Judge, request: Request, slicings: list[tuple[Micro, ...]], known: list[Candidate], stop: int) \
        -> list[Candidate]:
    """Quick plans, the fastest first: each slicing on balanced, on even and on the best known stages, with and without W that wait
    (which take memory); and uniform's plan where nothing is known. known: plans of coarser grids, the fastest first. The most
    promising slicings are tried even when the work is spent; beside known plans only if their estimates are better."""
    found = [] if known else [uniform(judge, request)]
    before = [_estimates(judge, s) for s in {c.slicing for c in known}]
    enough = [(1 - _SMALL) * min((told[k] for told in before), default=float("inf")) for k in (0, 1)]
    waiting = known[0].pending or 1 if known and stop - judge.work <= _WORK // 16 else 1
    for pending in (waiting, 0):
        for i, slicing in enumerate(slicings):
            if late() and found:
                break
            if judge.work > stop and (pending == 0 or i > 1 or all(map(operator.ge, _estimates(judge, slicing), enough))):
                break
            cuts: Iterable[Cut] = (request.partition,) if request.partition is not None else dict.fromkeys(
                (balanced(judge, slicing, judge.ranks), tuple(even_partition(judge.model, judge.ranks)),
                 *(c.partition for c in known[:1] if judge.work <= stop)))
            found += [judge.judge(CHIMERA, cut, slicing, pending) for cut in cuts]
    found = sorted(dict.fromkeys(found), key=pace)
    return sorted(dict.fromkeys([*found, *(judge.judge(CHIMERA, c.partition, c.slicing, 0) for c in found[:1])]), key=pace)


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """Partitions with one boundary moved by one block, or with it and its mirror image moved."""
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
    """Partitions with one boundary moved anywhere between its neighbours, the nearest places first; then those of
    ``_neighbours``."""
    bounds = [0, *(end for _, end in cut)]
    moves = [(abs(to - bounds[at]), at, to) for at in range(1, len(cut)) for to in range(bounds[at - 1] + 1, bounds[at + 1])]
    for by, at, to in sorted(moves):
        if by:
            yield tuple(itertools.pairwise([*bounds[:at], to, *bounds[at + 1:]]))
    yield from _neighbours(cut)


def _descended(judge: Judge, start: Candidate, stop: int, height: Callable[[Candidate], float],
               moves: Callable[[Cut], Iterator[Cut]] = _neighbours) -> list[Candidate]:
    """First-improvement descent from ``start``, by lower ``height``; gives every candidate that was looked at on the way."""
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


def _lean(judge: Judge, request: Request, slicings: list[tuple[Micro, ...]], quick: list[Candidate], budget: int) \
        -> list[Candidate]:
    """Search for the plan that needs least memory; gives every candidate that was looked at. By turns: other stages, cut by the
    engine's own count of bytes and then moved, and other slices on these stages, until neither helps."""
    def height(c: Candidate) -> float:
        return float(max(judge.peak_bytes(c)))

    def least(found: Iterable[Candidate]) -> Candidate:
        return min(found, key=lambda c: (height(c), pace(c)))

    best, seen, stop = least(quick), list[Candidate](), judge.work + budget
    while True:
        cut = judge.cut_least(best, 0, max(judge.peak_bytes(best)))
        seen += [] if cut is None else [judge.judge(CHIMERA, cut, best.slicing, best.pending)]
        seen += _descended(judge, least([best, *seen]), stop, height, _anywhere)
        end = least(seen)
        for s in slicings:
            if judge.work >= stop or late():
                return seen
            seen.append(judge.judge(CHIMERA, end.partition, s, 0))
        best = least(seen)
        if height(best) >= height(end):
            return seen


def _explored(judge: Judge, request: Request) -> list[Candidate]:
    """Every plan that is looked at, whatever memory it needs. None of this depends on the limit of memory, so more memory never
    gives a slower plan. Nor does a finer grid: each grid that it refines is searched before it, exactly as if it had been asked
    for."""
    found: dict[int, list[Candidate]] = {}
    ends: dict[int, list[Candidate]] = {}                      # by grid: the plan that needs least memory
    spent: dict[int, int] = {}
    todo = [request.unit] if request.slicing is not None else grids(request.seq_len, request.unit)
    for i, grid in enumerate(todo):
        if found and late():
            break
        refined = [g for g in found if g % grid == 0]          # what other grids found, or cost, must not matter here
        own, before = judge.afresh(), sum(spent[g] for g in refined)
        dear = any(spent[g] > _DEAR * len(found[g]) for g in refined)
        with share(2 / (len(todo) - i + 1)):
            made = _of_grid(own, replace(request, unit=grid), [c for g in refined for c in found[g]],
                            [c for g in refined for c in ends[g]], -1 if dear else max(0, _WORK - before // _GRIDS))
        # What there was no time to make is no plan to start from: finer grids have their own time for its slicing.
        found[grid], ends[grid] = ([c for c in each if c.seconds < math.inf] for each in made)
        for c in found[grid] if limited() else ():             # there may be no time to make its program once more
            judge.knows(c, own)
        spent[grid] = own.work
        judge.joins(own)
    return list(dict.fromkeys(itertools.chain(*found.values())))


def _of_grid(judge: Judge, request: Request, coarser: list[Candidate], leaner: list[Candidate], most: int) \
        -> tuple[list[Candidate], list[Candidate]]:
    """Plans of one grid that ``coarser`` (the plans of the grids that it refines) does not have, and the one of them or of
    ``leaner`` that needs least memory. The fewer slicings are new, the less work. most: ticks; -1: make only what promises to be
    faster."""
    every, done = _slicings(judge, request), {c.slicing for c in coarser}
    slicings = [s for s in every if s not in done]
    if not slicings:
        return [], []
    whole = len({s[0][1] for s in every}) * len(slicings) / (len(_PARTS) * len(every))     # part of a full grid that is new here
    budget = _WORK if request.slicing is not None else max(_WORK // 16, min(most, max(_WORK // 4, int(_WORK * whole))))
    known = sorted(coarser, key=pace)
    quick = _starts(judge, request, slicings, known, judge.work + (budget if most >= 0 else -1))
    if not quick:
        return [], []
    few = _STARTS if budget > _WORK // 16 else 1
    seen, ends = list(quick), list[Candidate]()
    if request.partition is None:
        near = _NEAR * known[0].seconds if known and few < _STARTS else float("inf")
        fast = [c for c in quick if c.pending and c.seconds < near][:few]
        for c in fast:
            seen += _descended(judge, c, judge.work + max(budget, _WORK // 4) // len(fast), lambda c: c.seconds)
        ends = _lean(judge, request, slicings, [*quick, *leaner] if most < 0 else quick, budget // 2)
        seen += ends
        ends = [min([*leaner, *ends], key=lambda c: (max(judge.peak_bytes(c)), pace(c)))]
    for c in () if late() else sorted(seen, key=pace)[:few]:
        if few == _STARTS or not known or c.seconds < known[0].seconds * _NEAR:
            seen += [judge.judge(CHIMERA, c.partition, c.slicing, pending) for pending in (2, 4, judge.ranks // 2)]
    best = min(seen, key=pace)
    if request.partition is None and best.pending > 1:         # other stages may be best where more waits
        seen += _descended(judge, best, judge.work + budget // _STARTS, lambda c: c.seconds)
    return seen + _moved(judge, request, [*seen, *coarser], budget), ends


def _moved(judge: Judge, request: Request, plans: list[Candidate], budget: int) -> list[Candidate]:
    """Ends of descents by single moves of boundaries and slices: from the fastest plan of each of a few slicings, and from the
    fastest within less and less memory. These limits begin below what the fastest plan needs and do not depend on the request's, so
    more memory never hurts."""
    by_slicing: dict[tuple[Micro, ...], Candidate] = {}
    for c in sorted(dict.fromkeys(plans), key=pace):
        by_slicing.setdefault(c.slicing, c)
    firsts = list(by_slicing.values())[:_VALLEYS]
    moved = [_end(judge, request, c, None, budget) for c in firsts if not late()]
    limit = max(judge.peak_bytes(firsts[0]))
    for _ in range(_RUNGS):
        limit = int(_LESS * limit)
        start = min((c for c in (*plans, *moved) if judge.fits(c, limit)), key=pace, default=None)
        if start is None or late():
            break
        moved.append(_end(judge, request, start, limit, budget))
    return moved


def _end(judge: Judge, request: Request, start: Candidate, limit: int | None, budget: int) -> Candidate:
    """The end of a descent from ``start``: by turns the best number of W that may wait, and single moves."""
    best, stop = start, judge.work + budget
    while judge.work < stop and not late():
        others = [judge.judge(CHIMERA, best.partition, best.slicing, pending) for pending in (0, 1, 2, 4)]
        end = min((c for c in (best, *others) if judge.fits(c, limit)), key=pace)
        end = judge.descend(end, limit, unit=request.unit, fixed_partition=request.partition is not None,
                            fixed_slicing=request.slicing is not None, budget=stop - judge.work) or end
        if pace(end) >= pace(best) * SLIGHT:
            break
        best = end
    return best


def _best(judge: Judge, request: Request) -> Candidate:
    """The fastest plan that fits on this judge's ranks, of equally fast ones the one that needs least memory. InfeasibleError where
    none fits, DeadlineError where time was up before one was found."""
    plans = sorted(_explored(judge, request), key=pace)
    first = next((c for c in plans if judge.fits(c, judge.limit)), None)
    if first is None:
        check_time()
        raise judge.refuse()
    return min((c for c in plans if pace(c) == pace(first)), key=lambda c: max(judge.peak_bytes(c)))


def plan_both_ways(request: Request, judge_of: Callable[[int], Judge]) \
        -> tuple[Judge, Candidate, tuple[tuple[str, float], ...]]:
    """(judge, plan, compared): the fastest plan over the numbers of ranks that the request allows, its judge, and (label, seconds)
    of the plan of each number where there are several. InfeasibleError where none fits, DeadlineError where none was found in
    time."""
    found: list[tuple[Judge, Candidate]] = []
    refusals: list[InfeasibleError] = []
    least = cache(lambda: least_work_s(request, request.share))
    for ranks in request.ranks:
        if found and late():
            break
        judge = judge_of(ranks)
        if found and bound_s(request, ranks, 1, request.replicas, least(), 2) > min(c.seconds for _, c in found):
            continue                                           # none on so few is as fast
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
