"""The plan of one planner by its name in ``tp.plan``: which blocks each stage gets, and what it recomputes or swaps.

Whichever planner it is, its plan is judged by simulating the program that the engine would run, and its memory to the byte.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from .. import planners
from .._core import DeadlineError, InfeasibleError
from ..config import counted
from ..schedules import CHIMERA, SLICED, ZIGZAG
from .bidirectional import plan_both_ways
from .bounds import bound_s, least_of_kinds, least_work_s, stages_bound_s
from .deadline import check_time, late, share
from .judge import SLIGHT, Candidate, Judge, lightest, pace
from .ladder import plan_stages
from .request import SWAPPERS, Request
from .search import search
from .starts import StageCost, balanced, uniform, whole_sequences

__all__ = ["Found", "plan_one"]

_LOOKS = 1 / 4      # of a time limit: for a look at each number of ranks
_TINY = 20_000      # if uniform's plan takes the judge fewer ticks than this, schedules are searched together, too

JudgeOf = Callable[[int], Judge]


@dataclass(frozen=True)
class Found:
    """A plan, its judge, and (label, predicted seconds) of others that were looked at."""

    judge: Judge
    candidate: Candidate
    compared: tuple[tuple[str, float], ...] = ()


def _plan_uniform(request: Request, judge_of: JudgeOf) -> Found:
    judge = judge_of(request.ranks[0])
    found = _lean(judge, uniform(judge, request))
    if not judge.fits(found, judge.limit):
        raise judge.refuse()
    return Found(judge, found)


def _lean(judge: Judge, c: Candidate) -> Candidate:
    """Where the plan does not fit, the fastest of its leaner orders that do; ``c`` itself where none does."""
    if judge.fits(c, judge.limit):
        return c
    ends = [_lean(judge, other) for other in judge.leaner(c) if other.seconds < math.inf]
    return min((end for end in ends if judge.fits(end, judge.limit)), key=pace, default=c)


def _with_and_without_host(judge: Judge, request: Request) -> Candidate:
    """The faster of the planner's plans with and without the link to the host: the planner assumes that work hides its swaps and
    that they need no buffers, so its plan with swaps may be the slower one in the engine."""
    links = (0.0, request.cluster.host_bandwidth_Bps or 0.0) if request.planner in SWAPPERS else (0.0,)
    return plan_stages(judge, request.planner, request.schedules[0], whole_sequences(request), links)


def _judges(request: Request, judge_of: JudgeOf) -> list[Judge]:
    """Judges for the numbers of ranks with room for the parameters; for the first in any case, whose refusal names what is
    short."""
    judges = [judge_of(ranks) for ranks in request.ranks]
    return judges[:1] + [judge for judge in judges[1:] if not judge.too_small()]


def _left_out(request: Request, judge_of: JudgeOf, refusals: list[InfeasibleError]) -> Iterator[Judge]:
    """Where everything else was refused: those judges that :func:`_judges` leaves out whose plans might still need less memory than
    the refusals name, so that the error names the least."""
    for judge in [judge_of(ranks) for ranks in request.ranks[1:]]:
        named = lightest(refusals).memory_bytes
        if judge.too_small() and (named is None or judge.kept_bytes < named * judge.ranks) and not late():
            yield judge


def _plan_stages(request: Request, judge_of: JudgeOf) -> Found:
    """The fastest plan of a paper's planner over the numbers of ranks."""
    best: Found | None = None
    compared: list[tuple[str, float]] = []
    refusals: list[InfeasibleError] = []

    def left_out() -> Iterator[Judge]:
        if best is None:
            yield from _left_out(request, judge_of, refusals)

    for judge in itertools.chain(_judges(request, judge_of), left_out()):
        try:
            if request.partition is not None:
                found = _lean(judge, judge.judge(request.schedules[0], request.partition, whole_sequences(request), 0))
                if not judge.fits(found, judge.limit):
                    raise judge.refuse()
            else:
                found = _with_and_without_host(judge, request)
        except InfeasibleError as error:
            refusals.append(error)
            continue
        except DeadlineError:
            if best is None:
                raise
            break
        compared.append((f"{request.planner} on {counted(judge.ranks, 'rank')}", found.seconds))
        if best is None or found.seconds < best.candidate.seconds * SLIGHT:
            best = Found(judge, found)
    if best is None:
        raise lightest(refusals)
    return Found(best.judge, best.candidate, tuple(compared) if len(compared) > 1 else ())


# ---- terapipe ----------------------------------------------------------------------------------------------------------

def first_look(judge: Judge, request: Request) -> float:
    """Seconds of a quick plan, by which the numbers of ranks are ordered for the search."""
    stages = judge.ranks * judge.chunks
    slicing = request.slicing
    if slicing is None and request.schedules[0] == SLICED:
        slicing = whole_sequences(request)
    if slicing is None:
        one = planners.slice_tokens(StageCost(judge.costs, judge.model, stages), stages, seq_len=request.seq_len,
                                    granularity=request.unit)
        slicing = ((1, tuple(int(n) for n in one.lengths)),) * request.share
    quick = judge.judge(request.schedules[0], balanced(judge, slicing, stages, schedule=request.schedules[0]), slicing)
    return min(quick.seconds, uniform(judge, request).seconds)


def _search_ways(judge: Judge, request: Request) -> Candidate | None:
    """``_search_schedules``; where attention is made again, slice by slice, which spares what it keeps, and of all slices at once,
    which fills the wait for a rank's first gradient: so not where nothing waits, or nothing is cut into slices."""
    other = judge.at_once() if judge.ranks > 1 and not _is_whole(request) else None
    if other is None:
        return _search_schedules(judge, request)
    with share(0.5):
        best = _search_schedules(judge, request)
    other.rival_s = min(judge.rival_s, math.inf if best is None else best.seconds)
    other.in_passing, other.may_give_up = judge.in_passing or best is not None, judge.may_give_up
    found = _search_schedules(other, request)
    judge.joins(other)
    judge.gave_up |= other.gave_up
    return min((c for c in (best, found) if c is not None), key=pace, default=None)


def _is_whole(request: Request) -> bool:
    """Whether the request leaves no plan but those of whole sequences."""
    given = None if request.slicing is None else all(len(lengths) == 1 for _, lengths in request.slicing)
    return request.schedules == (SLICED,) if given is None else given


def _search_schedules(judge: Judge, request: Request) -> Candidate | None:
    """The fastest plan that fits, over searches of each schedule alone: searched together, one schedule's starts hide another's.
    Where it costs next to nothing they are also searched together, whatever the limit and the grid: that made one small request in
    fifty up to a few percent faster, and none of 15 with published models."""
    best: Candidate | None = None
    given = judge.rival_s, judge.in_passing
    ways: list[tuple[str, ...]] = [(name,) for name in request.schedules] if request.each_alone else []
    if len(ways) != 1 and (not ways or judge.ticks(uniform(judge, request)) < _TINY):
        ways.insert(0, request.schedules)
    for i, names in enumerate(ways):
        if i > 0 and late():
            break
        if best is not None:                                   # then a refusal of the others need not say what would fit
            judge.rival_s, judge.in_passing = min(given[0], best.seconds), True
        with share(2 / (len(ways) - i + 1)):
            found = search(judge, names, request.share, request.seq_len, request.unit, request.partition, request.slicing)
        for c in (found, _lean(judge, uniform(judge, replace(request, schedules=names)))):
            if c is not None and judge.fits(c, judge.limit) and (best is None or pace(c) < pace(best)):
                best = c
    judge.rival_s, judge.in_passing = given
    return best


def _plan_terapipe(request: Request, judge_of: JudgeOf) -> Found:
    judges = _judges(request, judge_of)
    compared: list[tuple[str, float]] = []
    with share(_LOOKS):
        looks = [first_look(judge, request) if len(judges) > 1 and not late() else math.inf for judge in judges]
    best: Found | None = None
    least, kinds = cache(lambda: least_work_s(request, request.share)), cache(lambda: least_of_kinds(request, request.share))

    def bound(ranks: int) -> float:
        given = ranks, request.chunks, request.replicas
        return max(bound_s(request, *given, least()),
                   min(stages_bound_s(request, *given, kinds(), way) for way in {n in ZIGZAG for n in request.schedules}))

    looked = False
    for _, judge in sorted(zip(looks, judges, strict=True), key=lambda pair: pair[0]):
        if looked and late():
            break
        looked = True
        # Only a bound may leave a number of ranks out: asked for that number alone (stages=) the planner must not be faster.
        if best is not None and bound(judge.ranks) >= best.candidate.seconds * SLIGHT:
            continue
        even_s = uniform(judge, request).seconds
        compared += [(f"uniform on {counted(judge.ranks, 'rank')}", even_s)] if even_s < math.inf else []
        choice = _search_ways(judge, request)
        if choice is not None and (best is None or choice.seconds < best.candidate.seconds * SLIGHT):
            best = Found(judge, choice)
    if best is None:
        check_time(any(judge.cut_short for judge in judges))
        refusals = [judge.refuse() for judge in judges if judge.shortest is not None]
        for judge in _left_out(request, judge_of, refusals):
            _search_ways(judge, request)
            refusals += [judge.refuse()] if judge.shortest is not None else []
        raise lightest(refusals)
    judge, found = best.judge, best.candidate
    for name in () if late() else request.schedules:
        if name != found.schedule:
            other = judge.judge(name, found.partition, found.slicing, found.pending, found.savings)
            compared += [(f"{name} with these slices", other.seconds)] if other.seconds < math.inf else []
    return Found(judge, found, tuple(compared))


def plan_one(request: Request, judge_of: JudgeOf | None = None) -> Found:
    """The plan of the planner that ``request.planner`` names ("auto" only with schedule chimera). judge_of: gives the judge for a
    number of ranks, a new one (``request.judge``) or one that has seen other plans for this request (not for terapipe, whose search
    counts its judge's work). InfeasibleError, DeadlineError."""
    judge_of = judge_of or request.judge
    if request.schedules == (CHIMERA,) and request.planner in ("auto", "terapipe"):
        judge, found, compared = plan_both_ways(request, judge_of)
        return Found(judge, found, compared)
    if request.planner == "terapipe":
        return _plan_terapipe(request, judge_of)
    if request.planner == "uniform":
        return _plan_uniform(request, judge_of)
    return _plan_stages(request, judge_of)
