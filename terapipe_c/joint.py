"""``planner="auto"``: everything at once, best first, bounded by certificates.

A configuration is (ranks, replicas, chunks). No plan of a configuration is faster than its bound (:func:`bound_s`), so one
whose bound is no better than the plan in hand is left out, and the search of configurations ends with a proof once all are;
or it ends when its work is spent. Work is counted, not timed, unless the request limits the time: the same request gives
the same plan.

Every single planner's plan for the same request is a candidate: the result is never slower than any of them.
"""
from __future__ import annotations

import heapq
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
from .search import NOTHING, SLIGHT, Candidate, Cut, Judge, Micro, StageCost, balanced, refine, search

__all__ = ["bound_s", "plan_jointly", "plan_singles", "single"]

_CHUNKS = (1, 2, 4)
_WORK = 60_000_000      # ticks of the judge for quick plans of configurations, of about 13 ns
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
        if request.costs.has_tables or any(curve.rows for curve in request.costs.curves.values()):
            each = (planners.slice_tokens(_Weighted(request.costs, weights, b), 1, seq_len=request.seq_len,
                                          granularity=request.unit).lower_bound_s / b for b in range(1, most + 1))
            least += min(each)
    return least * (1 - 1e-12)


def bound_s(request: Request, ranks: int, chunks: int, replicas: int, least_s: float) -> float:
    """No plan of this configuration is faster: what the mean rank must do, and the message it must wait for first.

    A step takes at least the mean over the ranks of what each does: its part of the work of its replica's sequences
    (``least_s`` each), its updates, and its share of the ring's all-reduce; rank r cannot begin before r messages.
    """
    costs, params = request.costs, float(request.model.num_params)
    link = replace(request, replicas=replicas).link
    update = costs.optimizer_stage_s * chunks + costs.optimizer_param_s * params / ranks
    ring = link.seconds(4.0 * params / (ranks * chunks)) * chunks
    return least_s * (request.batch // replicas) / ranks + update + ring + costs.latency_s * (ranks - 1) / 2


# ---- the single planners ----------------------------------------------------------------------------------------------

def single(request: Request, name: str) -> Request | None:
    """The same request to one planner; None where it cannot be asked (several chunks)."""
    if name not in CHUNKED and (request.chunks > 1 or "interleaved" in request.schedules):
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
    bound: float
    order: int
    ranks: int = field(compare=False)
    chunks: int = field(compare=False)
    replicas: int = field(compare=False)

    def of(self, request: Request) -> Request:
        names = request.schedules if self.chunks == request.chunks else ("interleaved",)
        return replace(request, ranks=(self.ranks,), chunks=self.chunks, replicas=self.replicas, schedules=names)

    def __str__(self) -> str:
        return (f"{self.ranks} ranks" + (f" of {self.chunks} chunks" if self.chunks > 1 else "")
                + (f" x {self.replicas} replicas" if self.replicas > 1 else ""))


def _configurations(request: Request) -> list[_Configuration]:
    """All that the request leaves open, the lowest bound first."""
    devices, blocks = request.cluster.num_devices, request.model.num_blocks
    replicas = [d for d in range(1, min(devices, request.batch) + 1) if request.batch % d == 0] if request.free_replicas \
        else [request.replicas]
    rows, order = [], itertools.count()
    for d in replicas:
        share = request.batch // d
        least = least_work_s(request, share)
        for chunks in _CHUNKS if request.free_chunks else (request.chunks,):
            if request.free_ranks:
                most = max(1, min(devices // d, blocks // chunks))
                numbers = sorted({most, *(most >> i for i in range(most.bit_length())),
                                  *(n for n in range(1, most + 1) if devices % n == 0)} - {0}, reverse=True)
            else:
                numbers = list(request.ranks)
            micros = share if request.slicing is None else len(request.slicing)
            for ranks in numbers:
                if ranks * chunks <= blocks and (chunks == 1 or (ranks > 1 and micros % ranks == 0)):
                    rows.append(_Configuration(bound_s(request, ranks, chunks, d, least), next(order), ranks, chunks, d))
    return sorted(rows)


def _quick_slicings(request: Request, ranks: int, stages: int) -> Iterator[tuple[Micro, ...]]:
    """Whole sequences in micro-batches of 1, 2, 4, ..., and TeraPipe's optimum for equal stages."""
    if request.slicing is not None:
        yield request.slicing
        return
    size = 1
    while size <= min(request.share, request.costs.known_batch):
        if request.share % size == 0:
            yield ((size, (request.seq_len,)),) * (request.share // size)
        size *= 2
    if request.seq_len > request.unit:
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

    consider(uniform(judge, request))
    for slicing in _quick_slicings(request, judge.ranks, stages):
        if judge.chunks > 1 and len(slicing) % judge.ranks:
            continue
        cuts: list[Cut] = [request.partition or balanced(judge, slicing, stages)]
        if request.partition is None and judge.chunks == 1 and stages > 1:
            try:
                cuts.append(plan_stages(judge, "autopipe", "1f1b", slicing).partition)
            except InfeasibleError:
                pass
        for name, cut in itertools.product(request.schedules, dict.fromkeys(cuts)):
            for pending in (0, 1):
                consider(judge.judge(name, cut, slicing, pending))
    return best


class _Search:
    """The plan in hand, and the words about how it came to be."""

    def __init__(self, request: Request, start: float) -> None:
        self.request, self.start = request, start
        self.best: Found | None = None
        self.fallback: Found | None = None     # the fastest of those that the engine does not run
        self.by = ""
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
        seconds, refused, error = [], [], None
        for name, result in plan_singles(self.request).items():
            if isinstance(result, Error):
                refused.append(name)
                error = error if name != "terapipe" and error is not None else result
                continue
            seconds.append((name, result.candidate.seconds))
            self.offer(result, name)
            judge = result.judge
            key = judge.ranks, judge.chunks, judge.replicas.count
            self.judges.setdefault(key, judge)
            if name == "terapipe":
                self.searched.add(key)
        self.log.append("asked " + ", ".join(f"{name} {human_seconds(s)}" for name, s in seconds)
                        + (f"; no plan: {', '.join(refused)}" if refused else ""))
        self.error = error
        return seconds

    def judge(self, c: _Configuration) -> Judge:
        key = c.ranks, c.chunks, c.replicas
        if key not in self.judges:
            self.judges[key] = c.of(self.request).judge(c.ranks)
        return self.judges[key]

    def configurations(self) -> list[tuple[float, _Configuration]]:
        """Quick plans, best bound first, until no bound is better than the plan in hand; gives (seconds, configuration)."""
        rows = _configurations(self.request)
        looked: list[tuple[float, _Configuration]] = []
        stopped = "all have been looked at"
        for i, c in enumerate(rows):
            if c.bound >= self.seconds * SLIGHT:
                stopped = f"the other {len(rows) - i} have bounds from {human_seconds(c.bound)} on: none can be better"
                break
            if self.work > _WORK or self.late():
                stopped = (f"the {'time' if self.late() else 'work'} limit left {len(rows) - i} with bounds from "
                           f"{human_seconds(c.bound)} on")
                break
            judge = self.judge(c)
            before = judge.work
            found = _look(judge, c.of(self.request))
            self.work += judge.work - before
            if found is not None:
                self.offer(Found(judge, found), f"a quick plan of {c}")
                looked.append((found.seconds, c))
        self.log.append(f"{len(rows)} configurations of ranks, replicas and chunks, {len(looked)} looked at: {stopped}")
        return looked

    def deepen(self, looked: list[tuple[float, _Configuration]]) -> None:
        """Search the most promising configurations in earnest."""
        heap = [(seconds, c.order, c) for seconds, c in looked if (c.ranks, c.chunks, c.replicas) not in self.searched]
        heapq.heapify(heap)
        for _ in range(_SEARCHES):
            if not heap or self.late():
                break
            seconds, _, c = heapq.heappop(heap)
            if seconds > _CLOSE * self.seconds or c.bound >= self.seconds * SLIGHT:
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
                        fixed_slicing=r.slicing is not None, budget=_POLISH)
        self.offer(Found(judge, better), f"single moves from that of {self.by}")


def plan_jointly(request: Request, start: float) -> tuple[Found, list[str]]:
    """The best plan that the search finds, and what it tried; ``start`` is when the request's time began."""
    s = _Search(request, start)
    compared = s.singles()
    s.deepen(s.configurations())
    s.polish()
    if s.best is None:
        if s.fallback is None:
            raise s.error or InfeasibleError("no plan of any planner fits: more memory_bytes would be right")
        s.best, s.by = s.fallback, "the fastest that fits; nothing fits without recomputation or swap"
    s.log.append(f"best: {human_seconds(s.seconds)} by {s.by}")
    return Found(s.best.judge, s.best.candidate, tuple(compared)), s.log
