"""How many seconds would a step of a candidate plan take, and how many bytes would each rank need?

The C core builds and simulates the program that the engine would run (csrc/plan/judge.h); the engine itself counts the bytes.
Nothing here reads a clock: effort is counted in ticks, so the same request gives the same plan.
"""
from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _core, schedules
from .._core import DeadlineError, InfeasibleError
from ..config import KINDS, GPTConfig, counted
from ..cost import CostModel, filled
from ..engine import cut_least, cut_stages, dimensions, rank_memory, saves_bytes
from ..guests import BPIPE, guest_bytes, guest_seconds
from ..links import Links, of_copies, rank_of
from ..partition import block_counts
from ..schedules import CHIMERA, LOOPED, PIPEDREAM, SLICED, ZERO_BUBBLE, ZIGZAG, Program
from .deadline import abandoning, check_time
from .replicas import Replicas, sums_behind, sums_of, update_more
from .savings import NOTHING, Savings, attends, saving
from .whole import WHOLE, WITHIN, is_whole, may_be_whole

Micro = tuple[int, tuple[int, ...]]
Cut = tuple[tuple[int, int], ...]
# The C core's numbers for schedules (csrc/plan/judge.h).
ORDERS = {"gpipe": 0, "1f1b": 1, "seq1f1b": 2, "interleaved": 3, LOOPED: 4, "zb-h1": 5, "zb-h2": 6, "zb-v": 8, "dualpipe-v": 9,
          "hanayo": 10, SLICED: 11, BPIPE: 12, CHIMERA: 13, PIPEDREAM: 14}
_KEPT = 2             # a judge keeps the programs of this many latest candidates
_UNMADE = 1 << 62     # bytes and ticks of a candidate whose program the time limit left unmade: it fits nowhere
SLIGHT = 1 - 1e-9     # less than this much better is rounding, not an improvement


class Candidate(NamedTuple):
    """A plan with its seconds: a tuple, as a search makes tens of thousands. Infinite seconds: its program was not made before the
    time limit, so that it is no plan."""

    seconds: float
    schedule: str
    partition: Cut
    slicing: tuple[Micro, ...]
    pending: int
    savings: Savings = NOTHING


def copies_of(schedule: str) -> int:
    """Copies of the model in each replica."""
    return 2 if schedule == CHIMERA else 1


def updates_of(schedule: str, micro_batches: int) -> int:
    """Updates of each stage in a step."""
    return micro_batches if schedule == PIPEDREAM else 1


def as_built(pending: int) -> int:
    """Of a candidate's ``pending``: as many W that wait, and looped stages breadth first even where list scheduling, which may hold
    more, is faster; of such a ``pending``: the number of W that wait (TP_JUDGE_AS_BUILT of csrc/plan/judge.h)."""
    return -1 - pending


@lru_cache(maxsize=1 << 12)
def rounded(seconds: float) -> float:
    """To 12 digits, so that rounding errors decide no choice between equal plans, however the costs are scaled."""
    return float(f"{seconds:.11e}")


def pace(c: Candidate) -> float:
    """The key by which the fastest plan is chosen; of equal ones callers take the first."""
    return rounded(c.seconds)


class _Results(NamedTuple):
    """Results that a judge shares with those that :meth:`Judge.afresh` made from it, with the ticks that each took. A judge adds
    these ticks to its own work even where another judge did it: so what it does next depends only on what it is asked."""

    runs: dict[tuple[Any, ...], tuple[float, list[int], int]]  #: seconds, bytes of each rank, and ticks of making the program
    uncopied: dict[tuple[Any, ...], float]                     #: seconds of what swaps beside the work, if copies took none


class Judge:
    """Gives seconds and bytes of candidates for one (ranks, chunks, replicas) of a request: all that are compared are judged alike,
    by simulating the lowered program."""

    def __init__(self, model: GPTConfig, costs: CostModel, ranks: int, chunks: int, limit: int | None,
                 replicas: Replicas = Replicas(),                           # noqa: B008 (frozen)
                 kinds: dict[tuple[Any, ...], dict[str, float]] | None = None, savings: Savings = NOTHING,
                 links: Links = Links(), beside: bool = False,              # noqa: B008 (frozen)
                 results: _Results | None = None) -> None:
        self.model, self.costs, self.ranks, self.chunks, self.limit = model, costs, ranks, chunks, limit
        self.replicas, self.links = replicas, links
        self.beside = beside                                   # a rank's swaps overlap with its work
        self.savings = savings                                 # of a candidate that names no others
        self.work = 0                                          # ticks: a clock that is the same on every machine, about 13 ns each
        self.rival_s = float("inf")                            # seconds of the plan in hand: slower ones need not be looked for
        self.in_passing = False                                # one question of many: where nothing fits it need not say what would
        self.cut_short = False                                 # the time limit left a program unmade
        self.may_give_up = self.gave_up = False                # a search may end, or ended, once it is not likely to beat that plan
        self.shortest: tuple[int, int, int] | None = None      # bytes short, rank, bytes needed: of the nearest miss
        self.kinds = {} if kinds is None else kinds            # the memory of starts.kind_seconds
        self.levels: dict[tuple[Any, ...], Cut] = {}           # the memory of starts.balanced
        self.paces: dict[tuple[Micro, ...], float] = {}        # the memory of starts.estimate
        self.rooms: dict[tuple[Any, ...], tuple[NDArray[np.float64], list[int]]] = {}   # the memory of ladder._besides
        self.ladders: dict[tuple[Any, ...], list[Candidate]] = {}   # a paper's planner's plans for all limits (ladder.py)
        self._seen: dict[tuple[Any, ...], Candidate] = {}
        self._peaks: dict[tuple[Any, ...], list[int]] = {}
        self._results = _Results({}, {}) if results is None else results
        self._latest: dict[tuple[Any, ...], Program | None] = {}    # by key; None: another judge made the program and has it
        self._stage_work = cache(self._stage_work_of)
        self._slice_work = cache(costs.slice_work)
        self._core: Any = None                                 # the C judge, made when it is needed first
        self._counted = 0                                      # the part of the C judge's work that ``work`` has already

    def afresh(self) -> Judge:
        """A judge that has seen nothing yet, so that the work that it counts depends only on what it is asked."""
        judge = Judge(self.model, self.costs, self.ranks, self.chunks, self.limit, self.replicas, self.kinds, self.savings,
                      self.links, self.beside, self._results)
        judge.rival_s, judge.in_passing = self.rival_s, self.in_passing
        judge.levels, judge.paces = self.levels, self.paces    # no work is counted for these
        return judge

    def at_once(self) -> Judge | None:
        """A judge whose attentions are made again all slices at once: faster plans in more memory. None: they always are."""
        if not self.costs.where.keeps_keys or not attends(self.model, self.savings.recompute):
            return None
        other = self.afresh()
        other.savings = self.savings._replace(at_once=True)
        return other

    def knows(self, c: Candidate, other: Judge) -> None:
        """Take over seconds and bytes of a candidate from a judge that ``afresh`` made."""
        key = (c.schedule, c.partition, c.slicing, c.pending, c.savings)
        self._seen.setdefault(key, c)
        self._peaks[key] = other.peak_bytes(c)

    def joins(self, other: Judge) -> None:
        """Take over the work, and a nearer miss, of a judge that ``afresh`` made."""
        self.work += other.work
        self.cut_short |= other.cut_short
        if other.shortest is not None and (self.shortest is None or other.shortest[0] < self.shortest[0]):
            self.shortest = other.shortest

    def _stage_work_of(self, cut: Cut, copies: int = 1) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        counts, update_s = self.costs.stage_work(self.model, block_counts(self.model, cut))
        ring = replace(self.replicas, copies=copies)
        return counts, update_s + update_more(self.model, counts, ring)

    def updates(self, cut: Cut) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of each stage's update, and of these those of its sum over the replicas."""
        counts, update_s = self._stage_work(cut)
        return update_s, sums_behind(self.model, counts, self.replicas)

    def mean_message_s(self, rows: float) -> float:
        """Mean seconds of a message of ``rows`` tokens between two stages, over all links: for planners that know only one link."""
        near = float(self.costs.message_s(rows, self.model.n_embd))
        if not self.links.far:
            return near
        size = self.costs.element_bytes * self.model.n_embd * rows
        return near + self.links.share(self.chunks) * (self.links.latency_s + self.links.byte_s * size - near)

    def durations(self, partition: Cut, slicing: tuple[Micro, ...], savings: Savings = NOTHING, schedule: str = "1f1b",
                  up: bool = False, costs: CostModel | None = None, kept: bytes | None = None) -> dict[str, Any]:
        home = rank_of(self.ranks, len(partition), schedule in ZIGZAG)
        placed = (self.links, home[::-1] if up else home) if self.links.far else None
        work = self._stage_work(partition, copies_of(schedule))
        def of(chosen: NDArray[np.bool_]) -> NDArray[np.int32]:
            kinds = np.array([KINDS.index(block.kind) for block in self.model.blocks])
            return np.array([np.bincount(kinds[a:e][chosen[a:e]], minlength=len(KINDS)) for a, e in partition], np.int32)

        again, away = np.array(savings.recompute or 0, bool), np.array(savings.swap or 0) > 0
        saved = of(again | away) if again.any() or away.any() else None
        if self.costs.backend == "cuda" and attends(self.model, savings.swap):
            saved = None                                       # sums of whole micro-batches (cuda/stage.h)
        out = (costs or self.costs).timed(work, self._slice_work(slicing), self.model, placed, copies_of(schedule), saved,
                                          schedule == PIPEDREAM)
        ring = replace(self.replicas, copies=copies_of(schedule))
        if ring.members > 1:
            out |= sums_of(self.model, partition, work[0], ring)
        if again.any():
            out["R"] = self.costs.recompute_s(of(again), self._slice_work(slicing), kept)
        if any(savings.swap_s):
            rows = np.array([b * n for b, lengths in slicing for n in lengths], np.float64)
            largest = max(b for b, _ in slicing) * sum(slicing[0][1])
            out["SO"] = out["SI"] = np.array(savings.swap_s)[:, None] * (rows / largest)
        return out

    def _keys(self, c: Candidate, program: Program | None) -> bytes | None:
        """[stages] columns of queries, keys and values that recomputed attentions keep, as R stand in the program."""
        if attends(self.model, c.savings.recompute):
            return bytes(flag * self.costs.where.keeps_keys for flag in (program or self.lowered(c)).remakes_apart())
        return None

    def timing(self, c: Candidate, program: Program | None = None) -> dict[str, Any]:
        """Seconds of the candidate's operations, as ``Program.makespan`` takes them. program: the candidate's, if it is there."""
        keys = self._keys(c, program)

        def of(up: bool) -> dict[str, Any]:
            kept = None if keys is None else keys[up * len(c.partition):][:len(c.partition)]
            return with_halves(lambda slicing, costs: self.durations(c.partition, slicing, c.savings, c.schedule, up, costs, kept),
                               c.slicing, c.schedule, self.costs)

        if c.schedule == CHIMERA:
            return of_copies([of(False), of(True)])
        out = of(False)
        if c.schedule == BPIPE:
            sizes = guest_bytes(self.model, c.partition, c.slicing, c.savings.recompute, self.costs.where)
            out |= guest_seconds(sizes, [len(lengths) for _, lengths in c.slicing], self.ranks, self.costs, self.links)
        return out

    def full_durations(self, c: Candidate, program: Program | None = None) -> dict[str, NDArray[np.float64]]:
        """``timing``, with every entry filled to float64 [stages, units]."""
        return filled(self.timing(c, program))

    def lowered(self, c: Candidate) -> Program:
        """The program that the engine would run. The latest are kept, because memory is often asked for after seconds."""
        key = (c.schedule, c.partition, c.slicing, c.pending, c.savings)
        program = self._latest.get(key)
        if program is None:
            before, counted = self.work, key in self._latest
            program, seconds, peak = self._made(c)
            self._results.runs[key] = seconds, peak, self.work - before
            if counted:
                self.work = before
        self._keep(key, program)
        return program

    def _lowered_in_time(self, c: Candidate) -> Program | None:
        """``lowered``; None where there is no time for it."""
        try:
            return self.lowered(c)
        except DeadlineError:
            self.cut_short = True
            return None

    def _keep(self, key: tuple[Any, ...], program: Program | None) -> None:
        self._latest.pop(key, None)
        self._latest[key] = program
        if len(self._latest) > _KEPT:
            del self._latest[next(iter(self._latest))]

    def _run(self, key: tuple[Any, ...]) -> float:
        """Seconds of the program with this key; remembers its bytes and keeps it among the latest. Infinite, and nothing is
        remembered: it was not made before the time limit."""
        if (known := self._results.runs.get(key)) is not None:
            seconds, self._peaks[key], ticks = known
            self.work += ticks
            self._keep(key, self._latest.get(key))
            return seconds
        before = self.work
        try:
            program, seconds, peak = self._made(Candidate(0.0, *key))
        except DeadlineError:
            self.cut_short = True
            return math.inf
        self._results.runs[key] = seconds, peak, self.work - before
        self._peaks[key] = peak
        self._keep(key, program)
        return seconds

    def _made(self, c: Candidate) -> tuple[Program, float, list[int]]:
        """The candidate's program, its seconds, and the bytes of each rank. DeadlineError where there is no time for it."""
        with abandoning():
            return self._made_whole(c)

    def _made_whole(self, c: Candidate) -> tuple[Program, float, list[int]]:
        if not c.savings.swap:                                 # the C judge knows no swaps
            own = None if c.savings == self.savings else saves_bytes(c.savings.recompute) or bytes(self.model.num_blocks)
            program, seconds, peak, work = _core.judge_run(self._judge, self._given(c), own, c.savings.at_once)
            self.work += work - self._counted + (0 if own is None else 28_000)
            self._counted = work
            return program, seconds, peak
        order = _core.judge_compute(self._judge, self._given(c))
        ways = [self._completed(order, c)]                     # as csrc/plan/judge.c does
        if c.schedule == LOOPED and len(c.slicing) > 1 and c.pending >= 0:
            ways.append(self._completed(order.reorder(ways[0][1]), c))
        if self.replicas.overlaps and c.pending >= 0 and may_be_whole(c.schedule, c.slicing):
            ways.append(self._completed(order, c._replace(pending=WHOLE)))
        times = [float(program.makespan(timing)) for program, timing in ways]
        best = 0
        for i, seconds in enumerate(times):
            best = i if seconds < times[best] * SLIGHT else best
        program, timing = ways[best]
        if c.savings.ahead is not None:
            none = dict.fromkeys(("SO", "SI"), 0.0)
            key = c.schedule, c.partition, c.slicing, c.pending, c.savings[:2]
            others = ways if self.replicas.overlaps else ()    # whole B may be faster with shorter copies
            self._results.uncopied[key] = rounded(min(float(p.makespan(given | none)) for p, given in (ways[best], *others)))
        return program, times[best], self.peak(c, program)

    def _completed(self, order: Program, c: Candidate) -> tuple[Program, dict[str, Any]]:
        """What the engine would run, from the schedule alone, and its ``timing``."""
        waits = c.schedule in ZERO_BUBBLE or c.pending not in (0, as_built(0), WHOLE, WITHIN)
        columns = 0 if c.schedule == BPIPE else self.costs.where.keeps_keys                 # its guests are the larger with them
        compute = saving(order, self.model, c.partition, c.savings, c.slicing if columns else (), waits, columns,
                         c.pending == WITHIN)
        timing = self.timing(c, compute)
        if c.schedule not in ZERO_BUBBLE and not is_whole(c.pending):
            compute = compute.split(timing, pending=c.pending if c.pending >= 0 else as_built(c.pending))
        program = compute.lower(tied=self.model.tie_weights and self.ranks * self.chunks > 1)
        self.work += 100 * len(program) + 30_000               # about what splitting and lowering take
        return program, timing

    @property
    def _judge(self) -> Any:
        if self._core is None:
            where = self.costs.where.arguments
            memory = (dimensions(self.model), where.get("provider"), where.get("dtype"), self.replicas.count, self.replicas.shards,
                      self.savings.at_once)
            self._core = self.costs.judge(self.model, self.ranks, self.chunks, self.replicas.lines, memory,
                                          saves_bytes(self.savings.recompute), self.links)
        return self._core

    def _given(self, c: Candidate) -> tuple[Any, ...]:
        """A candidate as the C core takes it: most are made only once, and arrays of ``array`` soonest."""
        batches, lengths = zip(*c.slicing, strict=True)
        if self.costs.has_tables:
            self._slice_work(c.slicing)                        # refuses what is beyond them
        return (ORDERS[c.schedule], c.pending, array("i", (0, *(end for _, end in c.partition))), array("i", batches),
                array("i", map(len, lengths)), array("i", itertools.chain.from_iterable(lengths)))

    def descend(self, c: Candidate, limit: int | None, *, unit: int, fixed_partition: bool, fixed_slicing: bool, budget: int,
                beside: int = 0) -> Candidate | None:
        """Descend by single moves from a candidate, within ``limit`` bytes a rank, until none helps or ``budget`` ticks of ``work``
        are spent (a count, not a time: the same request gives the same plan). beside: ticks of each descent from the neighbours of
        the end. A candidate that does not fit is first changed until it does; None where that fails."""
        if c.savings != self.savings or c.seconds == math.inf:
            return c if self.fits(c, limit) else None
        try:
            with abandoning():
                bounds, slicing, seconds, peak, over, work, miss = _core.judge_descend(
                    self._judge, self._given(c), c.seconds, -1 if limit is None else min(limit, 1 << 62), unit, fixed_partition,
                    fixed_slicing, max(0, budget), beside)
        except DeadlineError:
            self.cut_short = True
            return c if self.fits(c, limit) else None
        self.work += work - self._counted
        self._counted = work
        if miss is not None and limit == self.limit and (self.shortest is None or miss[0] < self.shortest[0]):
            self.shortest = miss
        if over:
            return None
        key = c.schedule, tuple(itertools.pairwise(bounds)), tuple(slicing), c.pending, c.savings
        self._peaks[key] = peak
        return self._seen.setdefault(key, Candidate(seconds, *key))

    def leaner(self, c: Candidate, whole: bool = True) -> list[Candidate]:
        """The same plan with no W waiting, which hold memory; looped stages as they are built: list scheduling may need more; at
        last, if ``whole``, with whole B, and then with R within these. Empty: nothing is left to try."""
        if c.schedule in ZERO_BUBBLE or c.pending == WITHIN or (c.pending == WHOLE and not any(c.savings.recompute)):
            return []
        if c.pending == WHOLE:
            return [self.judge(c.schedule, c.partition, c.slicing, WITHIN, c.savings)]
        ways = [0] if c.pending > 0 else [as_built(0)] if c.pending < as_built(0) else []
        if c.schedule == LOOPED and c.pending >= 0 and len(c.slicing) > 1:
            ways.append(as_built(c.pending))
        if whole and (not ways or self.replicas.overlaps) and may_be_whole(c.schedule, c.slicing):
            ways.append(WHOLE)                                 # beside as built, which may then be slower and need more
        return [self.judge(c.schedule, c.partition, c.slicing, pending, c.savings) for pending in ways]

    def judge(self, schedule: str, partition: Cut, slicing: tuple[Micro, ...], pending: int = 1,
              savings: Savings | None = None) -> Candidate:
        if is_whole(pending) and not may_be_whole(schedule, slicing):
            pending = as_built(0)
        if pending == WITHIN and not any((self.savings if savings is None else savings).recompute):
            pending = WHOLE
        if schedule in (BPIPE, PIPEDREAM) and not is_whole(pending):
            pending = 0                                        # a W that waits would hold activations, or an update
        elif WITHIN < pending < 0 and schedule != LOOPED:
            pending = as_built(pending)
        key = (schedule, partition, slicing, pending, self.savings if savings is None else savings)
        found = self._seen.get(key)
        if found is None:
            found = Candidate(self._run(key), *key)
            if found.seconds < math.inf:                       # else it may be made once there is more time
                self._seen[key] = found
        return found

    def swapped_ahead(self, c: Candidate, best_s: float) -> list[Candidate]:
        """Where the candidate's swaps overlap with work: the same plan with other distances ahead at which swapped bytes are
        brought back, which take less or more memory. None of them where even copies in no time would not beat ``best_s``
        seconds."""
        key = c.schedule, c.partition, c.slicing, c.pending, c.savings[:2]
        if c.savings.ahead is None or self._results.uncopied.get(key, math.inf) >= best_s:
            return []
        return [self.judge(c.schedule, c.partition, c.slicing, c.pending, c.savings._replace(ahead=ahead))
                for ahead in (0, 1, 2, 3) if ahead != c.savings.ahead]

    def peak(self, c: Candidate, program: Program) -> list[int]:
        """Peak bytes of every rank, exact: what the engine would allocate (with one thread a rank), without allocating it."""
        return rank_memory(self.model, c.partition, c.slicing, program, backend=self.costs.where, replicas=self.replicas.count,
                           shards=self.replicas.shards, recompute=c.savings.recompute, swap=c.savings.swap)

    def cuts_within(self, c: Candidate, limit: int, ticks: NDArray[np.float64]) -> list[Cut]:
        """Partitions within the limit for the candidate's program: the one whose longest stage is shortest, and, for two chunks a
        rank and for bpipe, the one by pairs of stages (see ``cut_stages``). Empty: none is within it. ticks: [blocks] of work,
        whole numbers."""
        pairs = self.chunks == 2 or c.schedule == BPIPE
        program = self._lowered_in_time(c)
        if program is None:
            return []
        found = [cut_stages(self.model, c.slicing, program, limit, ticks, self.costs.where, c.savings.recompute,
                            self.replicas.count, by_pairs, self.replicas.shards) for by_pairs in (False, True)[:1 + pairs]]
        return [tuple(cut) for cut in found if cut is not None]

    def cut_least(self, c: Candidate, low: int, high: int) -> Cut | None:
        """The partition that needs least memory of any rank for the candidate's program, by bisection of the limits in (low, high];
        None: none of the limits that were tried has one."""
        program = self._lowered_in_time(c)
        if program is None:
            return None
        found = cut_least(self.model, c.slicing, program, low, high, 0.0, self.costs.where, c.savings.recompute,
                          self.replicas.count, self.replicas.shards)
        return None if found is None else tuple(found)

    def peak_bytes(self, c: Candidate) -> list[int]:
        """``peak`` of the candidate's own program; remembered. Of one that was not made in time more than any limit."""
        key = (c.schedule, c.partition, c.slicing, c.pending, c.savings)
        if key not in self._peaks:
            self._run(key)
        return self._peaks.get(key) or [_UNMADE] * self.ranks

    def ticks(self, c: Candidate) -> int:
        """Ticks that making and simulating the candidate's program takes."""
        key = (c.schedule, c.partition, c.slicing, c.pending, c.savings)
        if key not in self._results.runs and self._run(key) == math.inf:
            return _UNMADE
        return self._results.runs[key][2]

    @property
    def kept_bytes(self) -> int:
        """Bytes that training keeps of all parameters, on all ranks together, whatever the plan: value, gradient and two moments of
        each, or of these a replica's share, in fp32."""
        return int(self.replicas.param_bytes * self.model.num_params)

    def too_small(self) -> bool:
        """Is there no room on all ranks together for what training keeps?"""
        return self.limit is not None and self.kept_bytes > self.limit * self.ranks

    def fits(self, c: Candidate, limit: int | None) -> bool:
        """Whether every rank stays within ``limit``; remembers the nearest miss of its own limit."""
        if limit is None or c.seconds == math.inf:
            return c.seconds < math.inf
        peak = self.peak_bytes(c)
        needed = max(peak)
        if needed >= _UNMADE:
            return False
        if needed > limit == self.limit and (self.shortest is None or needed - limit < self.shortest[0]):
            self.shortest = needed - limit, peak.index(needed), needed
        return needed <= limit

    def fastest_seen(self, limit: int | None) -> Candidate | None:
        """The fastest of all candidates that were judged here and stay within ``limit``, of equal ones the first."""
        fit = (c for key, c in self._seen.items() if limit is None or max(self._peaks.get(key, [_UNMADE])) <= limit)
        return min(fit, key=pace, default=None)

    def front(self, whole: bool = True) -> list[Candidate]:
        """Of all candidates that were judged here those that need less memory than any as fast, the fastest first; those of whole B
        only if ``whole``."""
        found, least = list[Candidate](), _UNMADE
        for c in sorted((c for c in self._seen.values() if whole or not is_whole(c.pending)), key=pace):
            if (needed := max(self.peak_bytes(c))) < least:
                found.append(c)
                least = needed
        return found

    def unnamed(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """Of these plans those that do not name whole B; where others than those that name it may have it, too, these without the
        name: they are as fast at least."""
        plans = list(plans)
        again = [c for c in plans if is_whole(c.pending)] if self.replicas.overlaps else []
        return [*(c for c in plans if not is_whole(c.pending)),
                *(self.judge(c.schedule, c.partition, c.slicing, 0, c.savings) for c in again)]

    def refuse(self, nearest: Candidate | None = None) -> InfeasibleError:
        """The error that says that nothing fits, by the figures of ``nearest``, or else of the nearest miss of all that was
        judged. DeadlineError where the time limit left unmade what might fit."""
        assert self.limit is not None
        if self.cut_short:
            check_time(True)
        if nearest is not None:
            peak = self.peak_bytes(nearest)
            short, rank, needed = max(peak) - self.limit, peak.index(max(peak)), max(peak)
        else:
            assert self.shortest is not None
            short, rank, needed = self.shortest
        error = InfeasibleError(f"rank {rank} needs {needed} bytes and may use {self.limit}: {short} bytes short in the plan "
                                f"nearest to fitting; memory_bytes = {needed}, more stages"
                                f"{'' if any(self.savings.recompute) else ', recomputation'}"
                                f"{', shard_optimizer=True' * (self.replicas.count > 1 and not self.replicas.shards)} or smaller "
                                "micro-batches would be right")
        error.memory_bytes = needed
        return error


def lightest(refusals: Iterable[InfeasibleError]) -> InfeasibleError:
    """The refusal that asks for least, of equal ones the first; those that name no bytes come last."""
    return min(refusals, key=lambda error: math.inf if error.memory_bytes is None else error.memory_bytes)


def activation_slots(program: Program) -> list[int]:
    """[stages] of activation buffers: the micro-batches that a stage holds at once."""
    slots = np.zeros(program.num_stages, np.int64)
    for rank in range(program.num_ranks):
        code = program.instructions(rank)
        code = code[np.isin(code["op"], [schedules.OPS.index(op) for op in ("F", "B", "I", "W")])]
        np.maximum.at(slots, code["stage"], (code["slot"] & 0xFFFF).astype(np.int64) + 1)
    return [int(n) for n in slots]


def with_halves(durations: Callable[[tuple[Micro, ...], CostModel], dict[str, Any]], slicing: tuple[Micro, ...], schedule: str,
                costs: CostModel) -> dict[str, Any]:
    """``durations(slicing, costs)``; in schedule sliced-1f1b also those of both halves of every forward: "F.a", "F.b", ..."""
    whole = durations(slicing, costs)
    if schedule == SLICED:
        for name, extra in (("a", 1), ("b", 0)):
            half = durations(tuple((max(1, (b + extra) // 2), lengths) for b, lengths in slicing), costs.halved)
            whole |= {f"{k}.{name}": half[k] for k in ("F", "SF", "RF", "comm") if k in half}
    return whole


def possible(schedule: str, ranks: int, micro_batches: int) -> str:
    """Why no program of this schedule has so many micro-batches on so many ranks, and what would be right; "": one has."""
    micros, on = f"{micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}", counted(ranks, "rank")
    if schedule == "interleaved" and micro_batches % ranks:
        return f"schedule interleaved has {micros} for {on}: a multiple of the ranks would be right"
    if schedule == CHIMERA and ranks % 2:
        return f"schedule chimera has {on}: an even number, for both directions, would be right"
    if schedule == CHIMERA and micro_batches % 2:
        return f"schedule chimera has {micros}: an even number, half of them in each direction, would be right"
    if schedule == "dualpipe-v" and micro_batches < 2 * ranks:
        return f"schedule dualpipe-v has {micros} for {on}: at least {2 * ranks} would be right"
    return ""
