"""The terapipe planner's search: candidates, where it starts, and the C core's judge, which simulates the program that the engine
would run, and descends from the starts (csrc/plan/judge.h).

Nothing here reads a clock: effort is counted, so that the same request gives the same plan.
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _core, planners, schedules
from ._core import InfeasibleError
from .config import KINDS, GPTConfig
from .cost import PHASES, CostModel, block_counts, equal_lengths, even_partition, filled
from .engine import dimensions, rank_memory, recompute_bytes
from .schedules import Program

Micro = tuple[int, tuple[int, ...]]
Cut = tuple[tuple[int, int], ...]
ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")  # whose builders place every W themselves
ZIGZAG = ("zb-v", "dualpipe-v", "hanayo")  # whose stages go down the ranks and up again
SLICED = "sliced-1f1b"  # AutoPipe's: whole sequences, the first forwards in halves along the batch
# The C core's numbers for schedules (csrc/plan/judge.h).
ORDERS = {"gpipe": 0, "1f1b": 1, "seq1f1b": 2, "interleaved": 3, "zb-h1": 4, "zb-h2": 5, "zb-v": 7, "dualpipe-v": 8, "hanayo": 9,
          SLICED: 10}
SLIGHT = 1 - 1e-9     # less than this much better is rounding, not an improvement
_STARTS = 3           # of a search that descend
_SMALL = 8_000_000     # ticks of a search up to which there are plans for all limits of memory
_WORK = 36_000_000     # of what a descent may cost, in units of about 13 ns: a fraction of a second


# ---- judging one candidate -----------------------------------------------------------------------------------------------

class Savings(NamedTuple):
    """What a plan does besides to fit its memory. Empty: nothing."""

    recompute: tuple[bool, ...] = ()      #: per block (attention, ffn): its activations but its input are made again (R)
    swap: tuple[int, ...] = ()            #: per block: bytes of a micro-batch's activations that go to the host and back
    stall_s: tuple[float, ...] = ()       #: per stage: seconds a micro-batch waits for its swaps (what is not hidden)


NOTHING = Savings()


def runs_here(savings: Savings) -> bool:
    """Whether the engine does it: it recomputes, and does not swap."""
    return not any(savings.swap)


@dataclass(frozen=True)
class Candidate:
    seconds: float
    schedule: str
    partition: Cut
    slicing: tuple[Micro, ...]
    pending: int
    savings: Savings = NOTHING


@dataclass(frozen=True)
class Replicas:
    """Data parallelism: how many pipelines, and the link on which they sum their gradients.

    A ring all-reduce of n bytes among d replicas takes ``2 (d - 1) (latency + n / (d bandwidth))`` seconds: reduce-scatter
    and all-gather, d - 1 steps each (Patarasu & Yuan 2009). It is counted once a step on every stage, before its update,
    not overlapped with the backward.
    """

    count: int = 1
    latency_s: float = 0.0
    bandwidth_Bps: float = 1.0

    def seconds(self, size: Any) -> Any:
        """Of summing ``size`` bytes."""
        return 2 * (self.count - 1) * (self.latency_s + size / (self.count * self.bandwidth_Bps)) if self.count > 1 else 0.0


class Judge:
    """Seconds of a step, by simulating the lowered program; the same for everything that is compared."""

    def __init__(self, model: GPTConfig, costs: CostModel, ranks: int, chunks: int, limit: int | None,
                 replicas: Replicas = Replicas(),                           # noqa: B008 (frozen)
                 kinds: dict[tuple[Any, ...], dict[str, float]] | None = None, savings: Savings = NOTHING) -> None:
        self.model, self.costs, self.ranks, self.chunks, self.limit = model, costs, ranks, chunks, limit
        self.replicas = replicas
        self.savings = savings                                 # of a plan that does not say others
        self.work = 0                                          # a clock that is the same everywhere: about 13 ns a tick
        self.shortest: tuple[int, int, int] | None = None      # bytes short, rank, bytes needed: of the nearest miss
        self.kinds = {} if kinds is None else kinds            # what kind_seconds said
        self.rooms: dict[tuple[Any, ...], tuple[NDArray[np.float64], int]] = {}   # what planners of stages may fill
        self._seen: dict[tuple[Any, ...], Candidate] = {}
        self._peaks: dict[tuple[Any, ...], list[int]] = {}
        self._latest: tuple[tuple[Any, ...], Program] | None = None
        self._stage_work = cache(self._stage_work_of)
        self._slice_work = cache(costs.slice_work)
        self._core: Any = None                                 # made when it is needed first
        self._counted = 0                                      # of its work, what is in ours

    def _stage_work_of(self, cut: Cut) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        counts, update_s = self.costs.stage_work(self.model, block_counts(self.model, cut))
        if self.replicas.count > 1:
            params = counts @ np.array([self.model.block_params(kind) for kind in KINDS], np.float64)
            update_s = update_s + self.replicas.seconds(4.0 * params)
        return counts, update_s

    def durations(self, partition: Cut, slicing: tuple[Micro, ...], savings: Savings = NOTHING) -> dict[str, Any]:
        out = self.costs.timed(self._stage_work(partition), self._slice_work(slicing), self.model)
        if any(savings.recompute):
            kinds = np.array([KINDS.index(block.kind) for block in self.model.blocks])
            chosen = np.array(savings.recompute)
            counts = np.array([np.bincount(kinds[a:e][chosen[a:e]], minlength=len(KINDS)) for a, e in partition], np.int32)
            out["R"] = self.costs.recompute_s(counts, self._slice_work(slicing))
        if any(savings.stall_s):
            slices = np.repeat([len(lengths) for _, lengths in slicing], [len(lengths) for _, lengths in slicing])
            out["SO"] = out["SI"] = np.array(savings.stall_s)[:, None] / (2.0 * slices)
        return out

    def timing(self, c: Candidate) -> dict[str, Any]:
        """Seconds of its operations."""
        return with_halves(lambda slicing: self.durations(c.partition, slicing, c.savings), c.slicing, c.schedule)

    def full_durations(self, c: Candidate) -> dict[str, NDArray[np.float64]]:
        """The same, every one of them float64 [stages, units]."""
        return filled(self.timing(c))

    def lowered(self, c: Candidate) -> Program:
        """The program that the engine would run. The latest one is kept: what is judged is often asked for its memory next."""
        key = (c.schedule, c.partition, c.slicing, c.pending, c.savings)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._made(c)[0]
        return self._latest[1]

    def _made(self, c: Candidate) -> tuple[Program, float]:
        """Its program and seconds."""
        if c.savings == self.savings:
            program, seconds, work = _core.judge_run(self._judge, self._given(c))
            self.work += work - self._counted
            self._counted = work
            return program, seconds
        timing = self.timing(c)
        compute = saving(_core.judge_compute(self._judge, self._given(c)), self.model, c.partition, c.savings)
        if c.schedule not in ZERO_BUBBLE:
            compute = compute.split(timing, pending=c.pending)
        program = compute.lower(tied=self.model.tie_weights and self.ranks * self.chunks > 1)
        self.work += 80 * len(program) + 30_000                # what splitting and lowering cost beside timing
        return program, float(program.makespan(timing))

    @property
    def _judge(self) -> Any:
        if self._core is None:
            where = self.costs.where.arguments
            memory = dimensions(self.model), where.get("provider"), where.get("dtype")
            ring = self.replicas.seconds(0.0), self.replicas.seconds(4.0) - self.replicas.seconds(0.0)
            self._core = self.costs.judge(self.model, self.ranks, self.chunks, ring, memory,
                                          recompute_bytes(self.savings.recompute))
        return self._core

    def _given(self, c: Candidate) -> tuple[int, int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """A candidate as the C core takes it."""
        bounds = np.array([0, *(end for _, end in c.partition)], np.int32)
        return ORDERS[c.schedule], c.pending, bounds, *self._slice_work(c.slicing)[:3]

    def descend(self, c: Candidate, limit: int | None, *, unit: int, fixed_partition: bool, fixed_slicing: bool, budget: int,
                beside: int = 0) -> Candidate | None:
        """Down by single moves from a candidate, within ``limit`` bytes a rank, until none helps or ``budget`` ticks of ``work``
        are spent (a count, not a time: the same request gives the same plan); ``beside``: ticks of each descent from the neighbours
        of the end. One that does not fit is mended first; None where that fails."""
        if c.savings != self.savings:
            return c if self.fits(c, limit) else None
        bounds, slicing, seconds, over, work, miss = _core.judge_descend(
            self._judge, self._given(c), c.seconds, -1 if limit is None else min(limit, 1 << 62), unit, fixed_partition,
            fixed_slicing, max(0, budget), beside)
        self.work += work - self._counted
        self._counted = work
        if miss is not None and limit == self.limit and (self.shortest is None or miss[0] < self.shortest[0]):
            self.shortest = miss
        if over:
            return None
        found = Candidate(seconds, c.schedule, tuple(itertools.pairwise(bounds)), tuple(slicing), c.pending, c.savings)
        return self._seen.setdefault((found.schedule, found.partition, found.slicing, found.pending, found.savings), found)

    def judge(self, schedule: str, partition: Cut, slicing: tuple[Micro, ...], pending: int = 1,
              savings: Savings | None = None) -> Candidate:
        key = (schedule, partition, slicing, pending, self.savings if savings is None else savings)
        found = self._seen.get(key)
        if found is None:
            program, seconds = self._made(Candidate(0.0, *key))
            self._latest = key, program
            found = self._seen[key] = Candidate(seconds, *key)
        return found

    def peak(self, c: Candidate, program: Program) -> list[int]:
        """Peak bytes of every rank, exact: the sizes that the engine would take (one thread a rank), without taking them. Less
        what is swapped, which this engine does not do, of all micro-batches but the one that is being worked on."""
        peak = rank_memory(self.model, c.partition, c.slicing, program, backend=self.costs.where, recompute=c.savings.recompute)
        if runs_here(c.savings):
            return peak
        slots = activation_slots(program)
        saved = saved_bytes(self.model, c.slicing, c.savings._replace(recompute=()))
        for k, (first, end) in enumerate(c.partition):
            peak[program.rank_of[k]] -= max(0, slots[k] - 1) * sum(saved[first:end])
        return peak

    def peak_bytes(self, c: Candidate) -> list[int]:
        """``peak`` of its program; remembered."""
        key = (c.schedule, c.partition, c.slicing, c.pending, c.savings)
        if key not in self._peaks:
            program = self.lowered(c)
            self._peaks[key] = self.peak(c, program)
            self.work += 20 * len(program)
        return self._peaks[key]

    def fits(self, c: Candidate, limit: int | None) -> bool:
        """Whether every rank stays within ``limit``; remembers the nearest miss of its own limit."""
        if limit is None:
            return True
        peak = self.peak_bytes(c)
        needed = max(peak)
        if needed > limit == self.limit and (self.shortest is None or needed - limit < self.shortest[0]):
            self.shortest = needed - limit, peak.index(needed), needed
        return needed <= limit

    def refuse(self) -> InfeasibleError:
        assert self.shortest is not None and self.limit is not None
        short, rank, needed = self.shortest
        return InfeasibleError(f"rank {rank} needs {needed} bytes and may use {self.limit}: {short} bytes short in the plan "
                               f"nearest to fitting; memory_bytes = {needed}, more stages"
                               f"{'' if any(self.savings.recompute) else ', recomputation'} or smaller micro-batches would be "
                               "right")


def activation_slots(program: Program) -> list[int]:
    """Buffers for activations of each stage: micro-batches that it holds at once."""
    slots = np.zeros(program.num_stages, np.int64)
    for rank in range(program.num_ranks):
        code = program.instructions(rank)
        code = code[np.isin(code["op"], [schedules.OPS.index(op) for op in ("F", "B", "I", "W")])]
        np.maximum.at(slots, code["stage"], (code["slot"] & 0xFFFF).astype(np.int64) + 1)
    return [int(n) for n in slots]


def saving(program: Program, model: GPTConfig, partition: Cut, savings: Savings) -> Program:
    """With what saves memory: R of a slice before its backward, but where an attention is made again all of a micro-batch."""
    again = [{block.kind for block, flag in zip(model.blocks[a:e], savings.recompute[a:e], strict=False) if flag}
             for a, e in partition]
    return program.save_memory(bytes(1 if "attention" in kinds else 2 if kinds else 0 for kinds in again),
                               bytes(any(savings.swap[a:e]) for a, e in partition))


def saved_bytes(model: GPTConfig, slicing: tuple[Micro, ...], savings: Savings) -> list[int]:
    """Per block: bytes of a micro-batch that ``savings`` takes out of memory between forward and backward."""
    sizes = block_bytes(model, slicing)
    out = []
    for i, block in enumerate(model.blocks):
        size = sizes[block.kind]
        again = size.activation - size.input if savings.recompute and savings.recompute[i] else 0
        out.append(min(size.activation, again + (savings.swap[i] if savings.swap else 0)))
    return out


class BlockBytes(NamedTuple):
    """Bytes of a block in the engine: of all it keeps (parameters, gradients, moments), of each activation and gradient slot, and
    of an activation slot where it is recomputed."""

    static: int
    activation: int
    gradient: int
    input: int


def block_bytes(model: GPTConfig, slicing: tuple[Micro, ...]) -> dict[str, BlockBytes]:
    """By kind, and of a stage itself ("stage"): differences of the engine's own sizes of stages, which are sums of these."""
    return _block_bytes(model, max(b for b, _ in slicing), sum(slicing[0][1]))


@lru_cache(maxsize=64)
def _block_bytes(model: GPTConfig, batch: int, seq_len: int) -> dict[str, BlockBytes]:
    shape, slicing = dimensions(GPTConfig(**{**model.to_dict(), "n_layer": 2})), (seq_len, batch, [(batch, [seq_len])])

    again = bytes((0, 1, 1, 1, 1, 0))

    def stage(first: int, end: int) -> NDArray[np.int64]:
        one, two, three = (_core.stage_memory(shape, slicing, first, end, a, g) for a, g in ((1, 1), (2, 1), (1, 2)))
        few, more = (_core.stage_memory(shape, slicing, first, end, a, 1, None, None, again) for a in (1, 2))
        return np.array([one - (two - one) - (three - one), two - one, three - one, more - few])

    attention, ffn = stage(1, 4) - stage(1, 3), stage(1, 3) - stage(1, 2)
    base = stage(1, 2) - attention
    sizes = {"embedding": stage(0, 2) - stage(1, 2), "attention": attention, "ffn": ffn, "head": stage(4, 6) - ffn, "stage": base}
    return {kind: BlockBytes(*(int(n) for n in row)) for kind, row in sizes.items()}


def _counts(slicing: tuple[Micro, ...]) -> tuple[int, ...]:
    return tuple(len(lengths) for _, lengths in slicing)


def with_halves(durations: Callable[[tuple[Micro, ...]], dict[str, Any]], slicing: tuple[Micro, ...], schedule: str) \
        -> dict[str, Any]:
    """durations(slicing), and in the sliced schedule those of the halves of every forward: "F.a", "F.b", ..."""
    whole = durations(slicing)
    if schedule == SLICED:
        for name, extra in (("a", 1), ("b", 0)):
            half = durations(tuple((max(1, (b + extra) // 2), lengths) for b, lengths in slicing))
            whole |= {f"{k}.{name}": half[k] for k in ("F", "SF", "RF", "comm") if k in half}
    return whole


def possible(schedule: str, ranks: int, micro_batches: int) -> str:
    """Why no program of this schedule has so many micro-batches, and what would be right; empty: it has."""
    if schedule == "interleaved" and micro_batches % ranks:
        return f"schedule interleaved has {micro_batches} micro-batches for {ranks} ranks: a multiple of the ranks would be right"
    if schedule == "dualpipe-v" and micro_batches < 2 * ranks:
        return f"schedule dualpipe-v has {micro_batches} micro-batches for {ranks} ranks: at least {2 * ranks} would be right"
    return ""


# ---- searching -----------------------------------------------------------------------------------------------------------

class StageCost:
    """What tp.planners reads of a CostModel, for one average stage: its share of the layers, the embedding and the head,
    and what every slice pays for its instructions and messages."""

    def __init__(self, costs: CostModel, model: GPTConfig, stages: int) -> None:
        counts = np.array([1, model.n_layer, model.n_layer, 1], np.float64)
        self._weights = np.repeat(counts[:, None] / stages, len(PHASES), axis=1)
        self._costs = costs
        self._fixed_s = 3 * costs.overhead_s + (2 * costs.latency_s if stages > 1 else 0.0)

    def slice_cost(self, seq_len: int, granularity: int = 1, phase: str = "both", batch: int = 1) -> dict[str, Any]:
        weights = self._weights.copy()
        if phase != "both":
            weights[:, [phase == "bwd", phase != "bwd", phase != "bwd"]] = 0.0
        return self._costs.weighted_slice_cost(weights, seq_len, granularity, batch, self._fixed_s)

    def slice_cost_batched(self, batch: int, seq_len: int, granularity: int = 1, phase: str = "both") -> list[Any]:
        return [None, *(self.slice_cost(seq_len, granularity, phase, b) for b in range(1, batch + 1))]


def balanced(judge: Judge, slicing: tuple[Micro, ...], stages: int, phases: Sequence[str] = PHASES) -> Cut:
    """Stages of equal work in these phases, with these slices (min-max over contiguous blocks)."""
    if stages == 1:
        return ((0, judge.model.num_blocks),)
    seconds = kind_seconds(judge, slicing, phases)
    update = {kind: judge.costs.optimizer_param_s * judge.model.block_params(kind) for kind in KINDS}
    times = np.array([max(seconds[b.kind] + update[b.kind], 1e-12) for b in judge.model.blocks])
    bounds = [int(x) for x in planners.balance(times, stages)]
    return tuple(itertools.pairwise(bounds))


def kind_seconds(judge: Judge, slicing: tuple[Micro, ...], phases: Sequence[str] = PHASES) -> dict[str, float]:
    """Seconds of a step in one block of each kind; what every instruction costs besides is not in it, nor is the update."""
    key = slicing, tuple(phases)
    if key not in judge.kinds:
        judge.kinds[key] = _kind_seconds(judge.costs, judge.model, slicing, phases)
    return judge.kinds[key]


def _kind_seconds(costs: CostModel, model: GPTConfig, slicing: tuple[Micro, ...], phases: Sequence[str]) -> dict[str, float]:
    # From four stages that are one block each: a model of one layer has them all.
    small = GPTConfig(**{**model.to_dict(), "n_layer": 1})
    d = costs.durations(partition=[(k, k + 1) for k in range(4)], slicing=slicing, model=small)
    fixed = costs.overhead_s * len(phases) * d["F"].shape[1]
    return {kind: max(0.0, sum(float(d[p][i].sum()) for p in phases) - fixed) for i, kind in enumerate(KINDS)}


def _slicing_seeds(judge: Judge, batch: int, seq_len: int, unit: int) -> list[tuple[Micro, ...]]:
    """Where the search starts: the exact optima for equal stages, equal slices, whole sequences, whole batches. Of several chunks
    a pipeline fills as fast as one of fewer stages: sum + (ranks - 1) / chunks max."""
    costs = StageCost(judge.costs, judge.model, judge.ranks * judge.chunks)
    stages = 1 - (1 - judge.ranks) // judge.chunks
    seeds: list[tuple[Micro, ...]] = [((1, (seq_len,)),) * batch]
    if seq_len > unit:
        # The paper's objective (forward + backward as one), and the one with both apart (PLANNERS.md 1.6).
        for apart in (None, True):
            one = planners.slice_tokens(costs, stages, seq_len=seq_len, granularity=unit, bwd=apart)
            seeds.append(((1, tuple(int(n) for n in one.lengths)),) * batch)
    most = min(batch, judge.costs.known_batch)
    if most > 1:
        joint = planners.slice_batch_and_tokens(costs, batch, stages, seq_len=seq_len, granularity=unit,
                                                max_group=min(most, 16))
        seeds.append(tuple((int(b), tuple(int(n) for n in lengths)) for b, lengths in joint.slicing))
        seeds += [((b, (seq_len,)),) * (batch // b) for b in range(2, most + 1) if batch % b == 0]
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32):
        if parts * unit <= seq_len:
            lengths = tuple(n * unit for n in equal_lengths(seq_len // unit, parts))
            seeds.append(((1, lengths),) * batch)
    return list(dict.fromkeys(seeds))


def _estimate(judge: Judge, slicing: tuple[Micro, ...]) -> float:
    """TeraPipe's sum + (K - 1) max for equal stages, of several chunks each: which starts look best."""
    d = judge.durations(((0, judge.model.num_blocks),), slicing)
    unit = (d["F"] + d["I"] + d["W"])[0]
    return float(judge.chunks * unit.sum() + (judge.ranks - 1) * unit.max()) / (judge.ranks * judge.chunks)


class _Hunt:
    """For the fastest plan within a limit of memory, or within each of them."""

    def __init__(self, judge: Judge, names: Sequence[str], starts: Sequence[Candidate], work: int, unit: int, fixed_partition: bool,
                 fixed_slicing: bool) -> None:
        self.judge, self.names, self.starts, self.work = judge, names, starts, work
        self.given: dict[str, Any] = {"unit": unit, "fixed_partition": fixed_partition, "fixed_slicing": fixed_slicing}
        self._ends: dict[Candidate, Candidate] = {}            # of descents from starts that fit, the latest of each

    def _choose(self, limit: int | None, most: int) -> tuple[list[Candidate], list[Candidate]]:
        """The fastest that fits of each of a few slicings: different counts are different valleys; and those that would be faster
        and do not fit."""
        fit: list[Candidate] = []
        over: list[Candidate] = []
        queue = [(c.seconds, i, c) for i, c in enumerate(self.starts)]     # ties keep the order of names
        heapq.heapify(queue)
        while queue and len(fit) < most:
            _, i, c = heapq.heappop(queue)
            if c.slicing in [d.slicing for d in fit]:
                continue
            if self.judge.fits(c, limit):
                fit.append(c)
            elif c.pending and c.schedule not in ZERO_BUBBLE:  # gradients that wait for their W take memory
                least = self.judge.judge(c.schedule, c.partition, c.slicing, 0)
                heapq.heappush(queue, (least.seconds, i, least))
            elif len(over) < most and c.slicing not in [d.slicing for d in over]:
                over.append(c)
        return fit, over

    def _mend(self, c: Candidate, limit: int | None, share: int) -> list[Candidate]:
        end = self.judge.descend(c, limit, budget=self.work // share, **self.given)
        return [] if end is None else [end]

    def within(self, limit: int | None) -> Candidate | None:
        """From the fastest starts that fit, and from faster ones that are mended first."""
        judge, work, stop = self.judge, self.work, self.judge.work + self.work
        fit, over = self._choose(limit, _STARTS)
        ends = fit[:1]
        for c in fit:
            if judge.work < stop:                              # else the starts alone were more than the work
                ends += self._mend(c, limit, 2 * len(fit))
        for c in over:
            if judge.work < stop or not ends:
                ends += self._mend(c, limit, 4 * len(over))
        if not ends:
            return None
        best = min(ends, key=lambda c: c.seconds)
        if not (self.given["fixed_partition"] or self.given["fixed_slicing"]) and judge.work < stop + work:
            # a boundary of stages moves only if the slices do, too
            best = judge.descend(best, limit, budget=0, beside=work // 8, **self.given) or best
        return self._waiting(best, limit, stop + work)

    def _waiting(self, best: Candidate, limit: int | None, stop: int) -> Candidate:
        """The same stages and slices in each schedule, with as many gradients that wait for their W as are best."""
        for name, pending in itertools.product(self.names, (0, 1, 2, 4)):
            if self.judge.work > stop:
                break
            if name in ZERO_BUBBLE and pending != 1:           # its W are where they are
                continue
            other = self.judge.judge(name, best.partition, best.slicing, pending)
            if other.seconds < best.seconds * SLIGHT and self.judge.fits(other, limit):
                best = other
        return best

    def _below(self, above: Candidate, limit: int) -> Candidate | None:
        """From the plan of the next higher limit, mended, and from the fastest start that fits."""
        ends = self._mend(above, limit, 8)
        for c in self._choose(limit, 1)[0]:
            if c not in self._ends or not self.judge.fits(self._ends[c], limit):
                self._ends[c] = self._mend(c, limit, 8)[0]
            ends.append(self._ends[c])
        return self._waiting(min(ends, key=lambda c: c.seconds), limit, self.judge.work + self.work) if ends else None

    def ladder(self) -> tuple[list[Candidate], bool]:
        """Plans for all limits of memory, each with less than the one before; and whether they are all: with less than the last
        one's nothing fits. They do not depend on the limit that is asked for, so that more memory never hurts. One plan alone
        where that one is much work."""
        before, budget = self.judge.work, 2 * self.work
        found, rungs = self.within(None), list[Candidate]()
        if self.judge.work - before > _SMALL:
            budget = 0
        while found is not None:
            rungs.append(found)
            if self.judge.work - before > budget:
                return rungs, False
            limit = max(self.judge.peak_bytes(found)) - 1
            found = self._below(found, limit) or self.within(limit)
        return rungs, True


def search(judge: Judge, names: Sequence[str], batch: int, seq_len: int, unit: int, partition: Cut | None,
           slicing: tuple[Micro, ...] | None) -> tuple[Candidate | None, bool]:
    """The best plan that fits the memory, or None; and whether less memory gives none that is better, nor more memory a worse
    one: of a small request there are plans for all limits. Of many chunks there are many numbers, and programs are long: the
    work is less, so that all numbers together are little more than two."""
    stages, work = judge.ranks * judge.chunks, 4 * _WORK // max(2, judge.chunks) ** 2
    slicings = [slicing] if slicing is not None else _slicing_seeds(judge, batch, seq_len, unit)
    even = tuple(even_partition(judge.model, stages))
    slicings = [s for s in slicings if not possible(names[0], judge.ranks, len(s))]
    if names[0] == SLICED:
        slicings = [s for s in slicings if max(_counts(s)) == 1]
    starts: list[Candidate] = []
    for s in sorted(slicings, key=partial(_estimate, judge)):
        if judge.work > work // 3 and len(starts) > 2 * len(names):  # a large program: the most promising starts only
            break
        starts += [judge.judge(name, partition or balanced(judge, s, stages), s) for name in names]
        if partition is None:      # W fills waits: where there are many of them, F and I alone make the pipeline's pace
            name = min(starts[-len(names):], key=lambda c: c.seconds).schedule
            starts += [judge.judge(name, cut, s) for cut in (even, balanced(judge, s, stages, "FI"))]
    hunt = _Hunt(judge, names, starts, work, unit, partition is not None, slicing is not None or names[0] == SLICED)
    if judge.work > _SMALL:
        return hunt.within(judge.limit), False
    rungs, whole = hunt.ladder()
    best = min((c for c in rungs if judge.fits(c, judge.limit)), key=lambda c: c.seconds, default=None)
    if best is None or not (whole or best is rungs[0]):
        other = hunt.within(judge.limit)
        best = min((c for c in (best, other) if c is not None), key=lambda c: c.seconds, default=None)
    return best, whole
