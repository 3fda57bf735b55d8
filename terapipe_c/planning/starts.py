"""Which plans does a search start from? Slicings, and partitions that are balanced for them."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import planners
from .._core import BMPIPE_LAYERS, DeadlineError
from ..config import KINDS, GPTConfig
from ..cost import PHASES, CostModel
from ..partition import equal_lengths, even_partition, updated_of_kind
from ..schedules import SLICED, ZERO_BUBBLE
from .deadline import late
from .judge import Candidate, Cut, Judge, Micro, pace, possible, rounded, updates_of

if TYPE_CHECKING:
    from .request import Request

_SMALL = 256             # stages x sequences x slices of a small request
_LONG = 10_000_000       # of slicings whose programs take the judge more ticks than this few starts are tried
NEAR = 1.1               # a start is worth a descent if it is at most this many times as slow as the end of an earlier one
TICKS = 2.0 ** 36        # all work together, where planners get it in whole numbers (not the judge's ticks, which are effort)
_APART = 16384           # most units a sequence for the exact search with forward and backward apart: for more it takes minutes
_OVER_RANKS = 2_000_000  # candidates that BMPipe may look at in search of stages that give all ranks equal work


class StageCost:
    """The costs of one average stage in the form that ``tp.planners`` reads (``slice_cost``): its share of the layers, the
    embedding and the head, and the fixed cost of a slice's instructions and messages."""

    def __init__(self, costs: CostModel, model: GPTConfig, stages: int, latency_s: float | None = None) -> None:
        counts = np.array([1, model.n_layer, model.n_layer, 1], np.float64)
        self._weights = np.repeat(counts[:, None] / stages, len(PHASES), axis=1)
        self._costs = costs
        self._fixed_s = 3 * costs.overhead_s + (2 * (costs.latency_s if latency_s is None else latency_s) if stages > 1 else 0.0)

    def slice_cost(self, seq_len: int, granularity: int = 1, phase: str = "both", batch: int = 1) -> dict[str, Any]:
        weights = self._weights.copy()
        if phase != "both":
            weights[:, [phase == "bwd", phase != "bwd", phase != "bwd"]] = 0.0
        return self._costs.weighted_slice_cost(weights, seq_len, granularity, batch, self._fixed_s)

    def slice_cost_batched(self, batch: int, seq_len: int, granularity: int = 1, phase: str = "both") -> list[Any]:
        return [None, *(self.slice_cost(seq_len, granularity, phase, b) for b in range(1, batch + 1))]


def balanced(judge: Judge, slicing: tuple[Micro, ...], stages: int, phases: Sequence[str] = PHASES, schedule: str = "1f1b") -> Cut:
    """The partition whose longest stage is shortest, by work in these phases with these slices and the schedule's updates."""
    if stages == 1:
        return ((0, judge.model.num_blocks),)
    key = stages, slicing, tuple(phases), updates_of(schedule, len(slicing))
    if key not in judge.levels:
        bounds = [int(x) for x in planners.balance(block_ticks(judge, slicing, phases, schedule), stages)]
        judge.levels[key] = tuple(itertools.pairwise(bounds))
    return judge.levels[key]


def block_ticks(judge: Judge, slicing: tuple[Micro, ...], phases: Sequence[str], schedule: str) -> NDArray[np.float64]:
    """[blocks] of work in these phases with these slices, updates included; at least 1. Whole numbers, so that equal work compares
    equal however the costs are scaled."""
    seconds = kind_seconds(judge, slicing, phases)
    each = updates_of(schedule, len(slicing)) * (judge.costs.optimizer_param_s - judge.replicas.spares_s)
    update = {kind: each * params for kind, params in updated_of_kind(judge.model).items()}
    times = np.array([seconds[b.kind] + update[b.kind] for b in judge.model.blocks])
    if times.any():
        times = np.rint(times * (TICKS / max(times.sum(), 1e-280)))
    return np.asarray(np.maximum(times, 1.0))


def whole_sequences(request: Request) -> tuple[Micro, ...]:
    """The slicing of planners that know no slices: one whole sequence a micro-batch, or the given slicing."""
    return request.slicing or ((1, (request.seq_len,)),) * request.share


def uniform(judge: Judge, request: Request) -> Candidate:
    """Megatron's default, whatever the costs: layers divided evenly, whole sequences, every W right after its I."""
    cut = request.partition or tuple(even_partition(request.model, judge.ranks * judge.chunks))
    name = "1f1b" if "1f1b" in request.schedules else request.schedules[0]
    return judge.judge(name, cut, whole_sequences(request), 0)


def over_ranks(judge: Judge, slicing: tuple[Micro, ...], schedule: str) -> list[Cut]:
    """Partitions for several chunks a rank that give ranks, rather than stages, equal work, as far as whole layers allow (blocks,
    where there are more stages than layers). From BMPipe's search, asked for few micro-batches, which favour even stages, and for
    many, which favour even ranks."""
    ranks, chunks = judge.ranks, judge.chunks
    ticks = block_ticks(judge, slicing, PHASES, schedule)
    parts = [1] * len(ticks)
    if judge.model.n_layer + 2 >= ranks * chunks:
        parts = [1, *[2] * judge.model.n_layer, 1]
    ends = np.cumsum(parts)
    work = np.diff(np.concatenate([[0.0], np.cumsum(ticks)[ends - 1]]))
    if len(parts) > BMPIPE_LAYERS:
        return []
    runs = [list(same) for _, same in itertools.groupby(range(len(parts)), key=lambda k: (parts[k], float(work[k])))]
    types = [{"name": str(run[0]), "count": len(run), "fwd_s": float(work[run[0]]) / 3, "bwd_s": 2 * float(work[run[0]]) / 3,
              "static_bytes": 0.0, "strategies": [{"name": "none", "extra_bwd_s": 0.0, "activation_bytes": 0.0}]} for run in runs]
    cuts: list[Cut] = []
    for micros in (ranks, 2 * ranks, 4 * ranks):
        try:
            found = planners.bmpipe(types, ranks, micros, 1.0, chunks=chunks, time_limit_s=None, effort=_OVER_RANKS // chunks,
                                    prove=False)
        except DeadlineError:
            break
        last = np.cumsum(found.assignment.sum((0, 1)).ravel())
        cuts.append(tuple(itertools.pairwise([0, *(int(ends[n - 1]) for n in last)])))
    return list(dict.fromkeys(cuts))


def by_pairs(judge: Judge, slicing: tuple[Micro, ...], schedule: str) -> list[Cut]:
    """The partition for two stages a rank whose slowest rank is fastest, whatever memory it takes; empty: none differs."""
    even = judge.judge(schedule, tuple(even_partition(judge.model, 2 * judge.ranks)), slicing)
    return judge.cuts_within(even, 1 << 62, block_ticks(judge, slicing, PHASES, schedule))[1:]


def kind_seconds(judge: Judge, slicing: tuple[Micro, ...], phases: Sequence[str] = PHASES) -> dict[str, float]:
    """Seconds of a step's work in one block of each kind, without the fixed overhead of instructions and without the update."""
    key = slicing, tuple(phases)
    if key not in judge.kinds:
        judge.kinds[key] = _kind_seconds(judge.costs, slicing, phases)
    return judge.kinds[key]


def _kind_seconds(costs: CostModel, slicing: tuple[Micro, ...], phases: Sequence[str]) -> dict[str, float]:
    one_of_each = np.eye(len(KINDS), dtype=np.int32)           # stages of one block
    d = costs.even.timed((one_of_each, np.zeros(len(KINDS))), costs.even.slice_work(slicing), None)
    fixed = costs.overhead_s * len(phases) * d["F"].shape[1]
    return {kind: max(0.0, sum(float(d[p][i].sum()) for p in phases) - fixed) for i, kind in enumerate(KINDS)}


def slicing_seeds(judge: Judge, batch: int, seq_len: int, unit: int, coarser: int) -> list[tuple[Micro, ...]]:
    """Slicings to start from: the exact optima for equal stages, equal slices (of more parts than fit the next coarser grid; in
    small requests also of several sequences at once), whole sequences, whole batches, and fewer slices where the pipeline is full.
    With several chunks a rank the pipeline fills as fast as one of fewer stages, sum + (ranks - 1) / chunks max: the optima are for
    so many stages."""
    costs = StageCost(judge.costs, judge.model, judge.ranks * judge.chunks, judge.mean_message_s(0.0))
    stages = 1 - (1 - judge.ranks) // judge.chunks
    seeds: list[tuple[Micro, ...]] = [((1, (seq_len,)),) * batch]
    if seq_len > unit:
        # The paper's objective (forward + backward as one), and the one with both apart (PLANNERS.md 1.6).
        for apart in (None, True) if seq_len // unit <= _APART else (None,):
            one = planners.slice_tokens(costs, stages, seq_len=seq_len, granularity=unit, bwd=apart)
            seeds.append(((1, tuple(int(n) for n in one.lengths)),) * batch)
    most = min(batch, judge.costs.known_batch)
    alike = [b for b in range(2, min(most, 16) + 1) if batch % b == 0]
    few = _SMALL // (judge.ranks * judge.chunks)               # large requests have too little work for so many starts
    if most > 1:
        joint = planners.slice_batch_and_tokens(costs, batch, stages, seq_len=seq_len, granularity=unit,
                                                max_group=min(most, 16))
        seeds.append(tuple((int(b), tuple(int(n) for n in lengths)) for b, lengths in joint.slicing))
        seeds += [((b, (seq_len,)),) * (batch // b) for b in range(2, most + 1) if batch % b == 0]
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32):
        if parts * unit <= seq_len < parts * coarser:
            lengths = tuple(n * unit for n in equal_lengths(seq_len // unit, parts))
            seeds += [((b, lengths),) * (batch // b) for b in (1, *alike) if b == 1 or parts * batch <= few]
    return list(dict.fromkeys([*seeds, *_fine_at_the_ends(judge, seeds, batch, seq_len, unit)]))


def _fine_at_the_ends(judge: Judge, seeds: Sequence[tuple[Micro, ...]], batch: int, seq_len: int,
                      unit: int) -> list[tuple[Micro, ...]]:
    """Slicings with the optimum's fine slices only while the pipeline fills, or fills and drains, and half sequences in between,
    where no rank waits for a first slice. For one stage a rank."""
    if judge.chunks > 1 or judge.ranks == 1 or 2 * unit > seq_len:
        return []
    halves = tuple(n * unit for n in equal_lengths(seq_len // unit, 2))
    fine = [s[0] for s in seeds if s == (s[0],) * batch and s[0][0] == 1 and len(s[0][1]) > 2][:2]
    some, half = judge.ranks - 1, judge.ranks // 2
    return [(f,) * first + ((1, halves),) * (batch - first - last) + (f,) * last
            for f in fine for first, last in ((some, 0), (half, half)) if first + last < batch]


def ends_apart(slicing: tuple[Micro, ...], ranks: int, unit: int, every: bool = False) -> list[tuple[Micro, ...]]:
    """Slicings whose first or last few micro-batches, both, or all between are cut otherwise: not at all, into half as many slices,
    or into twice as many. A pipeline fills and drains by the first and the last ones, for which fine slices are best; between them
    fewer have less overhead. Without ``every`` only of micro-batches that are all alike."""
    count = len(slicing)
    if count == 1 or not (every or all(micro == slicing[0] for micro in slicing)):
        return []

    def parts(n: int) -> tuple[int, ...]:
        half = n // unit // 2 * unit
        return (n - half, half) if half else (n,)

    whole = [(b, (sum(lengths),)) for b, lengths in slicing]
    joined = [(b, tuple(sum(lengths[i:i + 2]) for i in range(0, len(lengths), 2))) for b, lengths in slicing]
    doubled = [(b, tuple(itertools.chain.from_iterable(map(parts, lengths)))) for b, lengths in slicing]
    few = sorted({n for n in (1, 2, ranks // 2, ranks - 1, ranks, count // 2) if 0 < n < count})
    found = []
    for first, last in [*((n, 0) for n in few), *((0, n) for n in few), *((n, n) for n in few if 2 * n < count)]:
        end = count - last
        for other in (whole, joined, doubled):
            found.append((*other[:first], *slicing[first:end], *other[end:]))
            if first and last:
                found.append((*slicing[:first], *other[first:end], *slicing[end:]))
    return [s for s in dict.fromkeys(found) if s != slicing]


def sizes_apart(slicing: tuple[Micro, ...], most: int) -> list[tuple[Micro, ...]]:
    """Micro-batches of other sizes, of at most ``most`` sequences: smaller ones at the ends, by which a pipeline fills and drains,
    larger ones between; the same in the other order. Each cut as the one that it is made of."""
    count, found = len(slicing), list[tuple[Micro, ...]]()

    def halves(micro: Micro) -> tuple[Micro, ...]:
        b, lengths = micro
        return ((b - b // 2, lengths), (b // 2, lengths)) if b > 1 else (micro,)

    def paired(micros: tuple[Micro, ...]) -> tuple[Micro, ...]:
        pairs = [micros[i:i + 2] for i in range(0, len(micros), 2)]
        return tuple((sum(b for b, _ in pair), pair[0][1]) for pair in pairs)

    for first, end in ((1, count - 1), (1, count), (0, count - 1)):
        if first <= end:
            split = (itertools.chain.from_iterable(map(halves, micros)) for micros in (slicing[:first], slicing[end:]))
            found.append((*next(split), *slicing[first:end], *next(split)))                   # 2 2 2: 1 1 2 1 1
            found.append((*slicing[:first], *paired(slicing[first:end]), *slicing[end:]))     # 1 1 1 1: 1 2 1
    if count > 1 and slicing[0][0] > 1:                        # 2 2: 1 2 1
        found.append((halves(slicing[0])[1], *slicing[1:], halves(slicing[0])[0]))
    found.append(slicing[::-1])
    return [s for s in dict.fromkeys(found) if s != slicing and max(b for b, _ in s) <= most]


def estimate(judge: Judge, slicing: tuple[Micro, ...]) -> float:
    """TeraPipe's objective, sum + (K - 1) max, for equal stages with the judge's number of chunks a rank: it orders the starts."""
    if slicing not in judge.paces:
        d = judge.durations(((0, judge.model.num_blocks),), slicing)
        unit = (d["F"] + d["I"] + d["W"])[0]
        seconds = float(judge.chunks * unit.sum() + (judge.ranks - 1) * unit.max()) / (judge.ranks * judge.chunks)
        judge.paces[slicing] = rounded(seconds)
    return judge.paces[slicing]


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``."""
    return [1 << i for i in range(most.bit_length())]


def quick_slicings(request: Request, stages: int) -> Iterator[tuple[Micro, ...]]:
    """Whole sequences, TeraPipe's optimum for equal stages, a few equal slices, and micro-batches of 2, 4, ... sequences."""
    if request.slicing is not None:
        yield request.slicing
        return
    whole = ((1, (request.seq_len,)),) * request.share
    yield whole
    if request.seq_len > request.unit and request.schedules != (SLICED,):
        one = planners.slice_tokens(StageCost(request.costs, request.model, stages), stages, seq_len=request.seq_len,
                                    granularity=request.unit)
        best = tuple(int(n) for n in one.lengths)
        equal = [tuple(n * request.unit for n in equal_lengths(request.seq_len // request.unit, parts)) for parts in (4, 2)
                 if parts * request.unit <= request.seq_len]
        for lengths in dict.fromkeys((best, *equal)):
            yield ((1, lengths),) * request.share
    for size in powers(min(request.share, request.costs.known_batch))[1:]:
        if request.share % size == 0:
            yield ((size, (request.seq_len,)),) * (request.share // size)


def starts_on(judge: Judge, names: Sequence[str], slicings: list[tuple[Micro, ...]], partition: Cut | None,
            work: int, known: Candidate | None, spread: Sequence[Cut] = ()) -> list[Candidate]:
    """Candidates with these slicings on partitions that are balanced for them, the most promising slicings first, until ``work`` /
    3 ticks are spent. known: the best plan of the coarser grids; slicings that are much slower than it get only a start on its
    stages and one on balanced ones."""
    stages = judge.ranks * judge.chunks
    even = tuple(even_partition(judge.model, stages))
    slicings = [s for s in slicings if not possible(names[0], judge.ranks, len(s))]
    if names[0] == SLICED:
        slicings = [s for s in slicings if all(len(lengths) == 1 for _, lengths in s)]
    starts: list[Candidate] = []
    level = partial(balanced, judge, stages=stages, schedule=names[0])
    stop = judge.work + work // 3
    for s in sorted(slicings, key=partial(estimate, judge)):
        if (judge.work > stop and (known is not None or len(starts) > 2 * len(names))) or (starts and late()):
            break
        if known is not None:
            quick = [judge.judge(known.schedule, cut, s) for cut in (known.partition, partition or level(s))]
            starts += quick
            long = judge.chunks == 1 and judge.work > stop and judge.ticks(quick[0]) > _LONG
            if long or min(c.seconds for c in quick) > known.seconds * NEAR:
                continue
        starts += [judge.judge(name, partition or level(s), s) for name in names]
        if partition is None:      # W fills bubbles: with many W, F and I alone set the pipeline's pace
            name = min(starts[-len(names):], key=pace).schedule
            starts += [judge.judge(name, cut, s) for cut in (even, *spread, level(s, phases="FI"))]
            waiting = (2, 4) if judge.chunks == 1 and name not in ZERO_BUBBLE and judge.work <= stop else ()
            starts += [judge.judge(name, cut, s, pending) for cut in (even, level(s)) for pending in waiting]
    return starts


class Guesses:
    """Guesses of a configuration's seconds: (m + K - 1) times the fullest stage's, for whole micro-batches and for slices."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._sized: dict[tuple[Micro, ...], tuple[float, float]] = {}

    def of(self, slicing: tuple[Micro, ...]) -> tuple[float, float]:
        """Seconds of a step with these micro-batches: (of all blocks, of the largest block)."""
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
        sizes = [b for b in powers(min(share, request.costs.known_batch)) if share % b == 0]
        each = []
        for b in sizes:
            total, largest = self.of(((b, (request.seq_len,)),))
            each.append(max(total / stages, largest) * (share // b * chunks + ranks - 1))
        total, largest = self.of(((1, (request.seq_len,)),))
        one = planners.slice_tokens(StageCost(request.costs, request.model, stages), stages, seq_len=request.seq_len,
                                    granularity=request.unit)
        sliced = share * chunks * one.total_s + (ranks - 1) * one.max_s
        return min(*each, sliced * max(1.0, largest * stages / total)) if total > 0 else sliced
