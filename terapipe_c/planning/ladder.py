"""A paper's planner within a limit of memory: its plans for all limits, so that more memory never hurts.

A planner of a paper knows neither the engine's buffers nor what a stage costs besides its blocks: where a stage of its plan is over
the limit by the engine's count, it is asked again with that stage's blocks larger by what was missing. And its model of time is not
the engine's: with more memory it may choose what the engine runs slower. So it is asked along a ladder of limits that depends on
the request alone, and the fastest of all its plans that fit is taken. Where one question takes long the rungs are further apart.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._core import DeadlineError, InfeasibleError
from ..guests import BPIPE, evicts
from ..partition import even_partition
from .bounds import AT_ONCE
from .deadline import check_time
from .judge import Candidate, Judge, Micro, activation_slots, pace
from .request import SAVERS, SWAPPERS
from .wishes import Task, ask

__all__ = ["plan_stages", "unlimited"]

Float = NDArray[np.float64]
_ROUNDS = 20           # how often a planner is asked again because its plan was over the limit by the engine's count
_CLOSE = 0.01          # of the least memory that a planner can plan for, how closely it is looked for
_STEP = 1 / 64         # of a limit, from one rung to the next below it, at least
_SAVES = 1 / 32        # the same for planners that recompute or swap: they have plans for most limits
_FAILED = 2            # rungs in a row without a plan, after which only the least is looked for
_WIDEST = 1 / 4        # the same of the largest requests
_LADDER = 120_000_000  # ticks of the judge (13 ns each) that a ladder may take: a second and a half
# Ticks of asking one about 100 blocks on 8 stages, and the powers of blocks and stages with which they grow, as measured on 50 to
# 194 blocks and 8 to 32 stages.
_ASKED = {"piper": (150_000, 2.1, 0), "adapipe": (50_000, 1.6, 0.4), "dapple": (20_000, 1.5, 1.2), "bmpipe": (60_000, 1.1, 1.6),
          "vpipe": (25_000, 1.6, 0.7), "dawnpiper_binary": (50_000, 1.8, 0.2), "autopipe": (15_000, 1, 1),
          "pipedream": (25_000, 1.3, 0.8)}
_QUICK = 20_000, 1, 1  # of any other one
_CHUNKED = 12_000_000  # of BMPipe's search of two chunks, and of more of them, whatever the request
_AROUND = 30_000       # of whatever one, what is around it
_JUDGED = 150          # of judging an answer, for each slice and stage
_ASKS = 60, 20         # of a planner that recomputes or swaps, on its way down a ladder, about, and more for each stage
_FEW = 15, 5           # others know few plans
_NEW = 0.55            # of answers are none that were there before


@dataclass(frozen=True)
class _Question:
    """One planner, and what of a request does not depend on the limit of memory."""

    name: str
    free: Task                            #: without a limit
    besides: Float                        #: [stages] bytes of their ranks that blocks cannot have

    def limits(self, limit: int) -> Float:
        """[stages] of what the blocks may take where a rank may take ``limit``."""
        chunks = self.free.judge.chunks
        return np.asarray((limit - self.besides) / chunks)

    def ticks(self, asks: float, answers: float) -> float:
        """About what it takes to ask so often, and to judge so many answers."""
        blocks, stages = len(self.free.fwd), self.free.stages
        ticks, by_blocks, by_stages = _ASKED.get(self.name, _QUICK)
        grown = ticks * (blocks / 100) ** by_blocks * (stages / 8) ** by_stages
        if self.free.judge.chunks > 1:
            grown = _CHUNKED
        slices = sum(len(lengths) for _, lengths in self.free.slicing)
        return float(asks * (_AROUND + grown) + answers * _JUDGED * slices * stages)

    @property
    def step(self) -> float:
        """Of a limit, from one rung to the next below it: as much as lets the ladder take no longer than it may."""
        least, more = _ASKS if self.name in SAVERS else _FEW
        asks = least + more * self.free.stages
        wide = max(1.0, self.ticks(asks, _NEW * asks) / _LADDER)
        return min((_SAVES if self.name in SAVERS else _STEP) * wide, _WIDEST)


def _question(judge: Judge, name: str, schedule: str, slicing: tuple[Micro, ...], host_Bps: float, ahead: int | None) -> _Question:
    key = schedule, slicing
    if key not in judge.rooms:
        judge.rooms[key] = _besides(judge, schedule, slicing)
    besides, held = judge.rooms[key]
    free = Task(judge, schedule, slicing, np.full_like(besides, np.inf), np.zeros(judge.model.num_blocks), host_Bps, tuple(held),
                ahead=ahead)
    return _Question(name, free, besides)


def _besides(judge: Judge, schedule: str, slicing: tuple[Micro, ...]) -> tuple[Float, list[int]]:
    """[stages] of what the engine holds besides blocks (workspace, tables, what crosses the stages' boundaries), taken from stages
    that are even; and the micro-batches that each of them holds at once."""
    even = judge.judge(schedule, tuple(even_partition(judge.model, judge.ranks * judge.chunks)), slicing, 0)
    program = judge.lowered(even)
    held, besides = activation_slots(program), np.array(judge.peak(even, program), np.float64)
    counted = Task(judge, schedule, slicing, np.zeros(len(held)), np.zeros(judge.model.num_blocks), 0.0, tuple(held))
    for k, (first, end) in enumerate(even.partition):
        blocks = counted.static_bytes[first:end] + held[k] * counted.activation_bytes[first:end]
        besides[program.rank_of[k]] -= blocks.sum()
    return np.tile(besides, judge.chunks), held


def plan_stages(judge: Judge, name: str, schedule: str, slicing: tuple[Micro, ...], links: Iterable[float] = (0.0,), *,
                thorough: bool = True) -> Candidate:
    """The planner's stages for these micro-batches, judged, the fastest with any of these links to the host (bytes a second);
    InfeasibleError if it finds none that fit, DeadlineError if it has none when time is up. thorough: ask for all limits, or for
    this one alone."""
    assert judge.limit is not None
    found: list[Candidate] = []
    others: list[Candidate] = []
    if schedule == BPIPE and evicts(judge.ranks, len(slicing)):
        links = (0.0,)      # what another rank keeps is not swapped, and no engine does one of both by micro-batch
    # What is brought back ahead is copied beside more work, and needs a place of its own. GPipe has nothing between backwards.
    aheads = (0, 3 if schedule == "gpipe" else 1)
    ways = [(host_Bps, ahead) for host_Bps in dict.fromkeys(links)
            for ahead in (aheads if host_Bps > 0 and judge.beside else (None,))]
    for host_Bps, ahead in ways:
        q = _question(judge, name, schedule, slicing, host_Bps, ahead)
        try:
            best = _fastest(q, judge.limit, others) if thorough else _for_one_limit(q, judge.limit)
        except DeadlineError:
            if found:
                break
            raise
        found += [] if best is None else [_best_of(judge, [best], judge.limit) or best]
    if not found:
        check_time()
        wanted = [each for c in others for each in (c, *judge.swapped_ahead(c, math.inf))]
        raise judge.refuse(min(wanted, key=lambda c: max(judge.peak_bytes(c)), default=None))
    return min(found, key=pace)


def unlimited(judge: Judge, name: str, schedule: str, slicing: tuple[Micro, ...]) -> Candidate:
    """What the planner wants where memory is no matter; DeadlineError."""
    return ask(_question(judge, name, schedule, slicing, 0.0, None).free, name)


def _fastest(q: _Question, limit: int, others: list[Candidate]) -> Candidate | None:
    """The fastest plan within the limit; where there is none, what the planner wants at the least joins ``others``."""
    if q.free.judge.in_passing and _cannot_fit(q, limit):
        others.append(ask(q.free, q.name))
        _squeeze(q, limit, others)
        return None
    plans = _ladder(q)
    others += plans
    return _best_of(q.free.judge, plans, limit)


def _cannot_fit(q: _Question, limit: int) -> bool:
    """Are all stages over the limit by their blocks alone? As few bytes as a block can have in the engine, so that no plan of any
    ladder is missed: stages take as many as fit in turn, ranks of several stages their even part."""
    free, judge = q.free, q.free.judge
    if judge.costs.where.name != "cpu":
        return False
    static = 4 * free.param_bytes                              # and gradients, and two moments
    kept = free.least_kept_bytes if q.name in SAVERS else free.activation_bytes
    held = free.held if free.schedule in AT_ONCE and not (q.name in SWAPPERS and free.host_Bps > 0) else (0,) * free.stages
    if judge.chunks > 1:
        return float((static + min(held) * kept).sum()) > limit * judge.ranks
    at, blocks = 0, len(static)
    for n in held:
        sums = np.cumsum(static[at:] + n * kept[at:])
        at += int(np.searchsorted(sums, limit, side="right"))
        if at == blocks:
            return False
    return True


def _for_one_limit(q: _Question, limit: int) -> Candidate | None:
    """What it wants without a limit comes first: where that fits by the engine's count, no estimate of what the engine holds
    besides may refuse it."""
    seen = [ask(q.free, q.name)]
    if q.free.judge.fits(seen[0], limit):
        return seen[0]
    try:
        return _within(q, limit, seen, {})
    except DeadlineError:
        best = _best_of(q.free.judge, seen, limit)
        if best is None:
            raise
        return best


def _best_of(judge: Judge, plans: list[Candidate], limit: int) -> Candidate | None:
    best = min((c for c in plans if judge.fits(c, limit)), key=pace, default=None)
    for plan in plans:
        for c in judge.swapped_ahead(plan, math.inf if best is None else pace(best)):
            if judge.fits(c, limit) and (best is None or pace(c) < pace(best)):
                best = c
    return best


def _ladder(q: _Question) -> list[Candidate]:
    """What the planner wants along all limits, or along those that there was time for."""
    judge = q.free.judge
    key = q.name, q.free.schedule, q.free.slicing, q.free.host_Bps, q.free.ahead
    if key not in judge.ladders:
        seen: list[Candidate] = []
        try:
            judge.ladders[key] = _climb_down(q, seen)
        except DeadlineError:
            return seen
    return judge.ladders[key]


def _climb_down(q: _Question, seen: list[Candidate]) -> list[Candidate]:
    judge, failed, step = q.free.judge, 0, q.step
    missing: dict[str, Float] = {}
    seen.append(ask(q.free, q.name))
    limit = max(judge.peak_bytes(seen[0]))
    # Whatever the judge has seen before it counts the same: so it has the same rungs in auto.
    while failed < _FAILED and q.ticks(len(seen), len(set(map(id, seen)))) < 2 * _LADDER:
        limit -= max(1, int(step * limit))
        found = _within(q, limit, seen, missing) or (_within(q, limit, seen, {}) if missing else None)
        failed = failed + 1 if found is None else 0
        if found is not None:
            limit = min(limit, max(judge.peak_bytes(found)))
    _squeeze(q, 0, seen)
    return list(dict.fromkeys(seen))


def _within(q: _Question, limit: int, seen: list[Candidate], missing: dict[str, Float]) -> Candidate | None:
    """The fastest of what the planner wants within ``limit``, asked in up to three ways; what it wanted on the way is added to
    ``seen``. missing: by way, [blocks] of bytes that were missing so far, where it begins."""
    limits = q.limits(limit)
    if not (limits > 0).all():
        return None

    def in_way(way: str, given: Float) -> tuple[Candidate | None, int]:
        task = q.free.within(given, missing.get(way), way == "inputs stay")
        found, asked, extra = _ask_until_it_fits(task, q.name, limit, seen)
        if found is not None:
            missing[way] = extra
        return found, asked

    first, asked = in_way("each its own", limits)
    found = [first]
    if first is None or asked > 1 or missing["each its own"].any():   # one limit for all was too much, or made stages too small
        found.append(in_way("the least for all", np.full_like(limits, limits.min()))[0])
        if q.name in SAVERS:
            found.append(in_way("inputs stay", limits)[0])
    if not any(found) and q.free.given.any():                  # when R comes, and so what is held, differs from even stages'
        found = [in_way("all for blocks", np.full_like(limits, limit / q.free.judge.chunks))[0]]
    return min((each for each in found if each), key=pace, default=None)


def _ask_until_it_fits(task: Task, name: str, limit: int, seen: list[Candidate]) \
        -> tuple[Candidate | None, int, Float]:
    """A plan that fits by the engine's count, None where it finds none; how often the planner was asked; and what was missing."""
    judge, before, boost = task.judge, None, 1.0
    for asked in range(1, _ROUNDS + 1):
        check_time()
        try:
            found = ask(task, name)
        except InfeasibleError:
            return None, asked, task.extra_bytes
        seen.append(found)
        if judge.fits(found, limit):
            return found, asked, task.extra_bytes
        program = judge.lowered(found)
        peak = judge.peak_bytes(found)
        boost = 2 * boost if found == before else 1.02         # the same again: its steps are larger than what is missing
        before, extra = found, task.extra_bytes.copy()
        for k, (first, end) in enumerate(found.partition):
            over = peak[program.rank_of[k]] - limit
            extra[first:end] += max(0.0, boost * over) / ((end - first) * judge.chunks)
        task = task.within(task.limit_bytes, extra, task.inputs_stay)
    return None, _ROUNDS, task.extra_bytes


def _squeeze(q: _Question, limit: int, seen: list[Candidate]) -> bool:
    """Halve what the planner is given, down to the least that it can plan for or to the first plan within ``limit``, which is the
    last of ``seen`` then. The way there depends on the limit by nothing but where it ends: with as much as the nearest of these
    plans needs, it ends at that one."""
    free, judge = q.free, q.free.judge
    low, high = 0.0, float(free.static_bytes.sum()) + max(free.held) * float(free.activation_bytes.sum())
    while high - low > _CLOSE * high:
        middle = 0.5 * (low + high)
        check_time()
        try:
            seen.append(ask(free.within(np.full_like(free.limit_bytes, middle / judge.chunks)), q.name))
        except InfeasibleError:
            low = middle
            continue
        if judge.fits(seen[-1], limit):
            return True
        high = middle
    return False
