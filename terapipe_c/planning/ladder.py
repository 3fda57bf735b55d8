"""Which plan of a paper's planner is the fastest within a limit of memory, so that more memory never gives a slower one?

Such a planner knows neither the engine's buffers nor what a stage needs besides its blocks: where a stage of its plan is over the
limit by the engine's count, it is asked again with the stage's blocks enlarged by the missing bytes. Nor is its model of time the
engine's: given more memory it may choose a plan that the engine runs slower. So it is asked along a ladder of limits that depends
only on the request, and of all its plans the fastest that fits is taken. Where a planner takes long the rungs are further apart.
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
from .whole import WHOLE, WITHIN, may_be_whole
from .wishes import Task, ask

__all__ = ["plan_stages", "unlimited"]

Float = NDArray[np.float64]
_ROUNDS = 20           # a planner is asked so often for one limit while its plans are over it by the engine's count
_CLOSE = 0.01          # relative precision of the search for the least memory that a planner can plan for
_STEP = 1 / 64         # the next rung's limit is less by at least this part
_SAVES = 1 / 32        # the same for planners that recompute or swap, which have plans for most limits
_FAILED = 2            # after so many rungs in a row without a plan only the least limit is still looked for
_WIDEST = 1 / 4        # the next rung's limit is less by at most this part, for the largest requests
_LADDER = 120_000_000  # ticks of the judge (13 ns each) that a ladder may take: a second and a half
# (ticks of asking a planner once about 100 blocks on 8 stages, the powers of blocks and of stages with which they grow), measured
# on 50 to 194 blocks and 8 to 32 stages.
_ASKED = {"piper": (150_000, 2.1, 0), "adapipe": (50_000, 1.6, 0.4), "dapple": (20_000, 1.5, 1.2), "bmpipe": (60_000, 1.1, 1.6),
          "vpipe": (25_000, 1.6, 0.7), "dawnpiper_binary": (50_000, 1.8, 0.2), "autopipe": (15_000, 1, 1),
          "pipedream": (25_000, 1.3, 0.8)}
_QUICK = 20_000, 1, 1  # the same of any planner that is not listed
_CHUNKED = 12_000_000  # ticks of BMPipe's search with two or more chunks, whatever the request
_AROUND = 30_000       # ticks besides, of asking any planner
_JUDGED = 150          # ticks of judging an answer, for each slice and stage
_ASKS = 60, 20         # a ladder asks a planner that recomputes or swaps about this often: (fixed, for each stage)
_FEW = 15, 5           # the same for the others, which have few different plans
_NEW = 0.55            # the part of answers that no earlier question gave


@dataclass(frozen=True)
class _Question:
    """One planner, and the part of a request that does not depend on the limit of memory."""

    name: str
    free: Task                            #: the request with no limit of memory
    besides: Float                        #: [stages] bytes of the stage's rank that its blocks cannot have

    def limits(self, limit: int) -> Float:
        """[stages] of bytes that the stage's blocks may take where a rank may take ``limit``."""
        chunks = self.free.judge.chunks
        return np.asarray((limit - self.besides) / chunks)

    def ticks(self, asks: float, answers: float) -> float:
        """Estimated ticks of asking the planner ``asks`` times and judging ``answers`` different plans."""
        blocks, stages = len(self.free.fwd), self.free.stages
        ticks, by_blocks, by_stages = _ASKED.get(self.name, _QUICK)
        grown = ticks * (blocks / 100) ** by_blocks * (stages / 8) ** by_stages
        if self.free.judge.chunks > 1:
            grown = _CHUNKED
        slices = sum(len(lengths) for _, lengths in self.free.slicing)
        return float(asks * (_AROUND + grown) + answers * _JUDGED * slices * stages)

    @property
    def step(self) -> float:
        """The part of a limit by which the next rung is lower: wide enough for the whole ladder to take about _LADDER ticks."""
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
    """([stages] of bytes that the engine holds besides the blocks: workspace, tables, what crosses stage boundaries; [stages] of
    micro-batches held at once), both as of even stages."""
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
    """The fastest plan of the planner for these micro-batches that fits, over ``links`` to the host (bytes a second; 0: no swaps).
    InfeasibleError if none fits, DeadlineError if it has none when time is up. thorough: ask along the whole ladder of limits;
    otherwise for this limit alone."""
    assert judge.limit is not None
    found: list[Candidate] = []
    others: list[Candidate] = []
    if schedule == BPIPE and evicts(judge.ranks, len(slicing)):
        links = (0.0,)      # activations that another rank keeps are not swapped, and the engine cannot choose by micro-batch
    # A swap that begins further ahead overlaps with more work and takes more memory. One step ahead (TP_SWAP_BEHIND of sched.h) it
    # overlaps with the forward between two backwards, which GPipe does not have.
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
        wanted = [each for c in others for way in (c, *_whole(judge, c)) for each in (way, *judge.swapped_ahead(way, math.inf))]
        raise judge.refuse(min(wanted, key=lambda c: max(judge.peak_bytes(c)), default=None))
    return min(found, key=pace)


def unlimited(judge: Judge, name: str, schedule: str, slicing: tuple[Micro, ...]) -> Candidate:
    """The planner's plan without a limit of memory; DeadlineError where time is up."""
    return ask(_question(judge, name, schedule, slicing, 0.0, None).free, name)


def _fastest(q: _Question, limit: int, others: list[Candidate]) -> Candidate | None:
    """The fastest plan within the limit, None where the planner has none. All its plans that were judged are added to ``others``,
    the one that needs least memory among them."""
    if q.free.judge.in_passing and _cannot_fit(q, limit):
        others.append(ask(q.free, q.name))
        _squeeze(q, limit, others)
        return None
    plans = _ladder(q)
    others += plans
    return _best_of(q.free.judge, plans, limit)


def _cannot_fit(q: _Question, limit: int) -> bool:
    """Whether no partition fits, even if the engine held nothing but blocks, each with the fewest bytes it can have: so no ladder
    has a plan that fits. One stage a rank: stages in turn take as many blocks as fit. Several: all ranks together have too
    little."""
    free, judge = q.free, q.free.judge
    if judge.costs.where.name != "cpu":
        return False
    # Values, gradients and two moments; but of a weight that the two ends share the embedding's stage has the values alone.
    each = judge.replicas.param_bytes / 4
    static = (each * free.param_bytes if free.stages == 1
              else (each - 1) * free.updated_bytes + np.maximum(free.param_bytes, free.updated_bytes))
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
    """A plan within this limit, without a ladder. The plan without a limit is asked for first: where that fits by the engine's
    count it is taken, whatever the estimate of what the engine holds besides blocks."""
    seen = [ask(q.free, q.name)]
    if q.free.judge.fits(seen[0], limit):
        return seen[0]
    try:
        return _within(q, limit, seen, {}) or _best_of(q.free.judge, seen, limit)      # with whole B
    except DeadlineError:
        best = _best_of(q.free.judge, seen, limit)
        if best is None:
            raise
        return best


def _whole(judge: Judge, c: Candidate) -> list[Candidate]:
    """The same plan with whole B, and with R within these, which is no faster and needs less; empty: it may not have these."""
    ways = (WHOLE, WITHIN)[:1 + any(c.savings.recompute)] if may_be_whole(c.schedule, c.slicing) else ()
    return [judge.judge(c.schedule, c.partition, c.slicing, way, c.savings) for way in ways]


def _best_of(judge: Judge, plans: list[Candidate], limit: int) -> Candidate | None:
    """The fastest of the plans that fit; of those that do not, with whole B where these are faster still: so more memory never
    gives a slower one."""
    best = min((c for c in plans if judge.fits(c, limit)), key=pace, default=None)
    for plan in plans:
        best = _ahead(judge, plan, limit, best)
    for plan in sorted(plans, key=pace):
        if best is not None and pace(plan) >= pace(best):
            break
        for c in _whole(judge, plan):
            if judge.fits(c, limit) and (best is None or pace(c) < pace(best)):
                best = c
            best = _ahead(judge, c, limit, best)
    return best


def _ahead(judge: Judge, plan: Candidate, limit: int, best: Candidate | None) -> Candidate | None:
    """``best``, or a faster one that fits of the plan's with swaps that begin elsewhere."""
    for c in judge.swapped_ahead(plan, math.inf if best is None else pace(best)):
        if judge.fits(c, limit) and (best is None or pace(c) < pace(best)):
            best = c
    return best


def _ladder(q: _Question) -> list[Candidate]:
    """The planner's plans along all limits, or along those that there was time for."""
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
    # By estimated ticks, not by the judge's work, which depends on what it has seen: so the rungs are the same in auto.
    while failed < _FAILED and q.ticks(len(seen), len(set(map(id, seen)))) < 2 * _LADDER:
        limit -= max(1, int(step * limit))
        found = _within(q, limit, seen, missing) or (_within(q, limit, seen, {}) if missing else None)
        failed = failed + 1 if found is None else 0
        if found is not None:
            limit = min(limit, max(judge.peak_bytes(found)))
    _squeeze(q, 0, seen)
    return list(dict.fromkeys(seen))


def _within(q: _Question, limit: int, seen: list[Candidate], missing: dict[str, Float]) -> Candidate | None:
    """The fastest of the planner's plans within ``limit``, asked for in up to three ways; all its answers are added to ``seen``.
    missing: by way, the [blocks] of bytes to start from that were missing for the limit before."""
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
    """(a plan that fits by the engine's count or None, how often the planner was asked, [blocks] of bytes that had to be added)."""
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
        boost = 2 * boost if found == before else 1.02         # the same plan again: too few bytes were added to change it
        before, extra = found, task.extra_bytes.copy()
        for k, (first, end) in enumerate(found.partition):
            over = peak[program.rank_of[k]] - limit
            extra[first:end] += max(0.0, boost * over) / ((end - first) * judge.chunks)
        task = task.within(task.limit_bytes, extra, task.inputs_stay)
    return None, _ROUNDS, task.extra_bytes


def _squeeze(q: _Question, limit: int, seen: list[Candidate]) -> bool:
    """Bisect the memory that the planner is given, down to the least that it can plan for, or to the first plan within ``limit``:
    True, and that plan is the last of ``seen``. The limit decides only where the bisection ends, not what it asks: so a limit as
    large as the bytes of any plan that was found here finds that plan."""
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
