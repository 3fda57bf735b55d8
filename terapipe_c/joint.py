"""``planner="auto"``: everything at once, best first, bounded by certificates.

A configuration is (ranks, replicas, chunks). No plan of a configuration is faster than its bound (:func:`bound_s`), so one
whose bound is no better than the plan in hand is left out; the others are looked at in the order of a formula's guess, and
the most promising searched in earnest. Work is counted, not timed, unless the request limits the time: the same request
gives the same plan.

Every single planner's plan for the same request is a candidate: the result is never slower than any of them.
"""
from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import planners
from ._core import Error, InfeasibleError
from .config import human_seconds
from .cost import PHASES, CostModel
from .partitioners import Found, plan_one, plan_stages, uniform
from .request import AUTO, CHUNKED, PLANNERS, SEARCHING, Request
from .search import (
    NOTHING,
    SLICED,
    SLIGHT,
    ZIGZAG,
    Candidate,
    Cut,
    Judge,
    Micro,
    StageCost,
    balanced,
    kind_seconds,
    possible,
    refine,
    search,
)

__all__ = ["bound_s", "plan_jointly", "plan_singles", "single"]

_CHUNKS = (1, 2, 4)
_WORK = 60_000_000      # ticks of the judge (about 13 ns each) for quick plans of configurations
_LOOK = 6_000_000       # of one configuration
_CLOSE = 1.10           # a configuration whose quick plan is this much slower than the best is not searched in earnest
_SEARCHES = 2           # configurations that are searched in earnest, besides the terapipe planner's own
_POLISH = 9_000_000     # ticks of the last descent
_GROUPS = 256           # micro-batch sizes that the bound looks at; where there are more it says nothing of the work


# ---- bounds -------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Weighted:
    """A mix of (kind, phase) as the slice planner reads it."""

    costs: CostModel
    weights: NDArray[np.float64]
    batch: int

    def slice_cost(self, seq_len: int, granularity: int = 1, phase: str = "both") -> dict[str, Any]:
        return self.costs.weighted_slice_cost(self.weights, seq_len, granularity, self.batch)


def least_work_s(request: Request, share: int) -> float:
    """Seconds that one of ``share`` sequences takes at least, on all ranks together, however it is sliced and batched.

    F and I of all blocks but the head: the least sum over slicings, for the best micro-batch (exact: slice_tokens with one
    stage). The head and all W: the same apart, because a micro-batch of several sequences and several slices does its head
    and its W as if it were one slice, which is one of those slicings.
    """
    if request.slicing is not None:
        d = request.costs.durations(partition=[(0, request.model.num_blocks)], slicing=request.slicing, model=request.model)
        return float(sum(d[p].sum() for p in PHASES)) / share
    most = min(share, request.costs.known_batch)
    if most > _GROUPS:
        return 0.0
    sliced, whole = np.zeros((4, 3)), np.zeros((4, 3))
    blocks = np.array([1.0, request.model.n_layer, request.model.n_layer, 1.0])
    whole[:, 2], whole[3] = blocks, blocks[3]
    sliced[:3, :2] = blocks[:3, None]
    least = 0.0
    for weights in (sliced, whole):
        least += min(planners.slice_tokens(_Weighted(request.costs, weights, b), 1, seq_len=request.seq_len,
                                           granularity=request.unit).lower_bound_s / b for b in range(1, most + 1))
    return float(least * (1 - 1e-12))


def bound_s(request: Request, ranks: int, chunks: int, replicas: int, least_s: float) -> float:
    """No plan of this configuration is faster: what the mean rank must do, and the message it must wait for first.

    A step takes at least the mean over the ranks of what each does: its part of the work of its replica's sequences
    (``least_s`` each), its updates, and its share of the ring's all-reduce; rank r cannot begin before r messages.
    """
    costs, params = request.costs, float(request.model.num_params)
    link = replace(request, replicas=replicas).link
    update = costs.optimizer_stage_s * chunks + costs.optimizer_param_s * params / ranks
    ring = float(link.seconds(4.0 * params / (ranks * chunks))) * chunks
    return least_s * (request.batch // replicas) / ranks + update + ring + costs.latency_s * (ranks - 1) / 2


# ---- the single planners ----------------------------------------------------------------------------------------------

def single(request: Request, name: str) -> Request | None:
    """The same request to one planner; None where it cannot be asked (several chunks)."""
    if name not in CHUNKED and (request.chunks > 1 or "interleaved" in request.schedules):
        return None
    if name == "bmpipe" and request.schedules[0] in ZIGZAG:
        return None
    names = ("1f1b",) if request.schedules == AUTO and name not in SEARCHING else request.schedules
    return replace(request, planner=name, schedules=names, savings="free")


def plan_singles(request: Request) -> dict[str, Found | Error]:
    """Every single planner's plan for this request, or why there is none."""
    results: dict[str, Found | Error] = {}
    for name in PLANNERS[1:]:
        asked = single(request, name)
        if asked is None:
            continue
        try:
            results[name] = plan_one(asked)
        except InfeasibleError as error:
            results[name] = error
    return results


# ---- the search -------------------------------------------------------------------------------------------------------

@dataclass(order=True)
class _Configuration:
    guess: float
    order: int
    bound: float = field(compare=False)
    ranks: int = field(compare=False)
    chunks: int = field(compare=False)
    replicas: int = field(compare=False)

    def of(self, request: Request) -> Request:
        names = request.schedules if self.chunks == request.chunks else ("interleaved",)
        return replace(request, ranks=(self.ranks,), chunks=self.chunks, replicas=self.replicas, schedules=names)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.ranks, self.chunks, self.replicas

    def __str__(self) -> str:
        return (f"{self.ranks} ranks" + (f" of {self.chunks} chunks" if self.chunks > 1 else "")
                + (f" x {self.replicas} replicas" if self.replicas > 1 else ""))


def _numbers_of_ranks(request: Request, chunks: int, replicas: int) -> list[int]:
    if not request.free_ranks:
        return list(request.ranks)
    devices = request.cluster.num_devices
    most = max(1, min(devices // replicas, request.model.num_blocks // chunks))
    halves = {most >> i for i in range(most.bit_length())}
    return sorted(halves | {n for n in range(1, most + 1) if devices % n == 0}, reverse=True)


def _configurations(request: Request) -> list[_Configuration]:
    """All that the request leaves open, the most promising first."""
    replicas = [request.replicas]
    if request.free_replicas:
        replicas = [d for d in range(1, min(request.cluster.num_devices, request.batch) + 1) if request.batch % d == 0]
    rows, order, blocks = [], itertools.count(), _Blocks(request)
    for d in replicas:
        share = request.batch // d
        least = least_work_s(request, share)
        micros = share if request.slicing is None else len(request.slicing)
        for chunks in _CHUNKS if request.free_chunks else (request.chunks,):
            name = request.schedules[0] if chunks == request.chunks else "interleaved"
            for ranks in _numbers_of_ranks(request, chunks, d):
                several = ranks > 1 and not possible(name, ranks, micros)
                if ranks * chunks <= request.model.num_blocks and (chunks == 1 or several):
                    guess = blocks.guess_s(share, ranks, chunks) + bound_s(request, ranks, chunks, d, 0.0)
                    rows.append(_Configuration(guess, next(order), bound_s(request, ranks, chunks, d, least), ranks, chunks, d))
    return sorted(rows)


class _Blocks:
    """Seconds of blocks for guesses: (m + K - 1) times the fullest stage, of micro-batches whole and sliced."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._sized: dict[tuple[Micro, ...], tuple[float, float]] = {}

    def of(self, slicing: tuple[Micro, ...]) -> tuple[float, float]:
        """(all blocks, the largest block) of these micro-batches."""
        if slicing not in self._sized:
            request = self.request
            seconds = kind_seconds(request.judge(1), slicing)
            self._sized[slicing] = sum(seconds[b.kind] for b in request.model.blocks), max(seconds.values())
        return self._sized[slicing]

    def guess_s(self, share: int, ranks: int, chunks: int) -> float:
        request, stages = self.request, ranks * chunks
        if request.slicing is not None:
            total, largest = self.of(request.slicing)
            units = sum(len(lengths) for _, lengths in request.slicing)
            return max(total / stages, largest) / units * (units * chunks + ranks - 1)
        sizes = [b for b in _powers(min(share, request.costs.known_batch)) if share % b == 0]
        each = []
        for b in sizes:
            total, largest = self.of(((b, (request.seq_len,)),))
            each.append(max(total / stages, largest) * (share // b * chunks + ranks - 1))
        total, largest = self.of(((1, (request.seq_len,)),))
        one = planners.slice_tokens(StageCost(request.costs, request.model, stages), stages, seq_len=request.seq_len,
                                    granularity=request.unit)
        sliced = share * chunks * one.total_s + (ranks - 1) * one.max_s
        return min(*each, sliced * max(1.0, largest * stages / total)) if total > 0 else sliced


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _quick_slicings(request: Request, stages: int) -> Iterator[tuple[Micro, ...]]:
    """Whole sequences in micro-batches of 1, 2, 4, ..., and TeraPipe's optimum for equal stages."""
    if request.slicing is not None:
        yield request.slicing
        return
    for size in _powers(min(request.share, request.costs.known_batch)):
        if request.share % size == 0:
            yield ((size, (request.seq_len,)),) * (request.share // size)
    if request.seq_len > request.unit and request.schedules[0] != SLICED:
        one = planners.slice_tokens(StageCost(request.costs, request.model, stages), stages, seq_len=request.seq_len,
                                    granularity=request.unit)
        yield ((1, tuple(int(n) for n in one.lengths)),) * request.share


def _look(judge: Judge, request: Request) -> Candidate | None:
    """The best of some quick plans of one configuration."""
    stages = judge.ranks * judge.chunks
    best: Candidate | None = None

    def consider(found: Candidate) -> None:
        nonlocal best
        if (best is None or found.seconds < best.seconds * SLIGHT) and judge.fits(found):
            best = found

    stop = judge.work + _LOOK
    consider(uniform(judge, request))
    for slicing in _quick_slicings(request, stages):
        if judge.work >= stop:
            break
        if judge.chunks > 1 and possible(request.schedules[0], judge.ranks, len(slicing)):
            continue
        halves = (SLICED,) if request.schedules == AUTO and min(b for b, _ in slicing) > 1 and stages > 1 else ()
        for name in (*request.schedules, *(halves if max(len(s) for _, s in slicing) == 1 else ())):
            cuts: list[Cut] = [request.partition or balanced(judge, slicing, stages)]
            free = request.partition is None and judge.chunks == 1 and stages > 1
            if judge.work < stop and free and (name == "1f1b" or not judge.fits(judge.judge(name, cuts[0], slicing))):
                try:
                    cuts.append(plan_stages(judge, "autopipe", name, slicing).partition)
                except InfeasibleError:
                    pass
            for cut, pending in itertools.product(dict.fromkeys(cuts), (1, 0)):
                if judge.work < stop:
                    consider(judge.judge(name, cut, slicing, pending))
    return best


class _Search:
    """The plan in hand, and the words about how it came to be."""

    def __init__(self, request: Request, start: float) -> None:
        self.request, self.start = request, start
        self.best: Found | None = None
        self.fallback: Found | None = None     # the fastest of those that the engine does not run
        self.by = ""
        self.error: Error | None = None        # why the first planner that has no plan has none
        self.log: list[str] = []
        self.work = 0
        self.judges: dict[tuple[int, int, int], Judge] = {}
        self.searched: set[tuple[int, int, int]] = set()

    @property
    def seconds(self) -> float:
        return float("inf") if self.best is None else self.best.candidate.seconds

    def late(self) -> bool:
        limit = self.request.time_limit_s
        return limit is not None and time.perf_counter() - self.start > limit

    def offer(self, found: Found, by: str) -> bool:
        """Take it if it is allowed and better."""
        if found.candidate.savings != NOTHING and self.request.savings != "free":
            if self.request.savings == "last" and (self.fallback is None
                                                   or found.candidate.seconds < self.fallback.candidate.seconds):
                self.fallback = found
            return False
        if found.candidate.seconds < self.seconds * SLIGHT:
            self.best, self.by = found, by
            return True
        return False

    def singles(self) -> list[tuple[str, float]]:
        """Every planner alone; gives (planner, seconds)."""
        seconds, refused = [], []
        for name, result in plan_singles(self.request).items():
            if isinstance(result, Error):
                refused.append(name)
                self.error = self.error or result
                continue
            seconds.append((name, result.candidate.seconds))
            self.offer(result, name)
            judge = result.judge
            key = judge.ranks, judge.chunks, judge.replicas.count
            self.judges.setdefault(key, judge)
            if name == "terapipe":
                self.searched.add(key)
        self.log.append(f"asked {len(seconds) + len(refused)} planners" + (f"; no plan: {', '.join(refused)}" if refused else ""))
        return seconds

    def judge(self, c: _Configuration) -> Judge:
        if c.key not in self.judges:
            self.judges[c.key] = c.of(self.request).judge(c.ranks)
        return self.judges[c.key]

    def configurations(self) -> list[tuple[float, _Configuration]]:
        """Quick plans of what could be better than the plan in hand; gives (seconds, configuration)."""
        rows = _configurations(self.request)
        looked: list[tuple[float, _Configuration]] = []
        left: list[_Configuration] = []
        for c in rows:
            if c.bound >= self.seconds * SLIGHT:
                continue
            if self.work > _WORK or self.late():
                left.append(c)
                continue
            judge = self.judge(c)
            before = judge.work
            found = _look(judge, c.of(self.request))
            self.work += judge.work - before
            looked.append((float("inf") if found is None else found.seconds, c))
            if found is not None:
                self.offer(Found(judge, found), f"a quick plan of {c}")
        left = [c for c in left if c.bound < self.seconds * SLIGHT]
        text = f"{len(rows)} configurations of ranks, replicas and chunks: {len(looked)} looked at"
        pruned = len(rows) - len(looked) - len(left)
        if pruned:
            text += f", {pruned} left out because their bounds are no better than the best"
        if left:
            text += (f", {len(left)} left at the {'time' if self.late() else 'work'} limit (bounds from "
                     f"{human_seconds(min(c.bound for c in left))} on)")
        self.log.append(text)
        return looked

    def deepen(self, looked: list[tuple[float, _Configuration]]) -> None:
        """Search the most promising configurations in earnest."""
        promising = sorted((seconds, c.order, c) for seconds, c in looked if c.key not in self.searched)
        for seconds, _, c in promising[:_SEARCHES]:
            if seconds > _CLOSE * self.seconds or c.bound >= self.seconds * SLIGHT or self.late():
                break
            request, judge = c.of(self.request), self.judge(c)
            found = search(judge, request.schedules, request.share, request.seq_len, request.unit, request.partition,
                           request.slicing)
            better = found is not None and self.offer(Found(judge, found), f"a search of {c}")
            self.log.append(f"searched {c}: " + (f"{human_seconds(found.seconds)}" if found else "nothing fits")
                            + (", better" if better else ""))

    def polish(self) -> None:
        """Descend from the best by single moves."""
        if self.best is None or self.best.candidate.savings != NOTHING or self.late():
            return
        judge, c, r = self.best.judge, self.best.candidate, self.request
        better = c
        for pending in (0, 1, 2, 4):
            other = judge.judge(c.schedule, c.partition, c.slicing, pending)
            if other.seconds < better.seconds * SLIGHT and judge.fits(other):
                better = other
        better = refine(judge, better, unit=r.unit, fixed_partition=r.partition is not None,
                        fixed_slicing=r.slicing is not None or c.schedule == SLICED, budget=_POLISH)
        self.offer(Found(judge, better), f"single moves from that of {self.by}")


def plan_jointly(request: Request, start: float) -> tuple[Found, list[str]]:
    """The best plan that the search finds, and what it tried; ``start`` is when the request's time began."""
    s = _Search(request, start)
    compared = s.singles()
    s.deepen(s.configurations())
    s.polish()
    if s.best is None:
        if s.fallback is None:
            near = [judge for judge in s.judges.values() if judge.shortest is not None]
            if near:
                raise min(near, key=lambda judge: judge.shortest or (0, 0, 0)).refuse()
            raise s.error or InfeasibleError("no plan of any planner fits: more memory_bytes would be right")
        s.best, s.by = s.fallback, "the fastest that fits; nothing fits without recomputation or swap"
    s.log.append(f"best: {human_seconds(s.seconds)} by {s.by}")
    return Found(s.best.judge, s.best.candidate, tuple(compared)), s.log
