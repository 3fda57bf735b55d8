"""The terapipe planner's search for stages and slices: descents from the starts of :mod:`starts`.

It is built so that neither more memory nor a finer grid gives a slower plan: :class:`_Hunt` searches one grid of tokens, along a
ladder of memory limits that is the same whatever limit is asked for; :class:`_Search` goes from the coarsest grid to the finest.
Nothing here reads a clock, except under ``time_limit_s``: effort is counted in the judge's ticks, about 13 ns each, so the same
request gives the same plan.
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from ..cost import PHASES
from ..guests import BPIPE
from ..partition import even_partition
from ..schedules import LOOPED, SLICED, ZERO_BUBBLE, ZIGZAG
from .deadline import late, limited, share
from .front import Front, Given
from .judge import SLIGHT, Candidate, Cut, Judge, Micro, as_built, pace, possible
from .starts import NEAR, block_ticks, by_pairs, ends_apart, estimate, over_ranks, sizes_apart, slicing_seeds, starts_on
from .whole import WHOLE, WITHIN, is_whole, may_be_whole

_STARTS = 3           # so many starts of a search descend
_MORE_STARTS = 12     # or so many, while the descents took less than 1 / _QUICK of the search's work
_QUICK = 8
_SHORT = 300_000      # with programs of fewer ticks the plan that needs least memory is looked for at once; with longer ones that
                      # takes as long as all the rest, and in 900 searches that plan was never the fastest
_SHORTEST = 50_000    # with programs of fewer ticks also the fastest plan that needs so little
_GLANCES = 16         # work is too little for even a few moves where a program takes more than so many times as many ticks
_NEARLY = 32          # where memory is not cut exactly, something may still fit if the leanest plan found is over by 1 / 32 at most
_LOOSE = 16           # for several chunks stages are also cut for a limit that is 1 / 16 larger, and then moved until they fit
_AGAIN = 4            # stages are cut for the least memory so often, each time for the program of the stages before
_RUNG = 0.01          # the next rung of a ladder needs less memory by at least this part
_WIDEST = 0.25        # and by at most this part
_SURE = 1.03, 1.1     # (one chunk a rank, several): a ladder ends when its last two plans are so many times as slow as the answer
_RUNGS = 72_000_000    # each time a ladder took so many ticks (or those of its first plan, if more) its steps double
_SLICES = 4            # a grid of fewer slices a sequence gets proportionally less work
_FINE, _GAINS = 8, 1.03  # a search that may give up goes on while it has no grid of so many slices a sequence, or might get within
                         # this part of the plan in hand if the next grid gained as much as the latest
_LONG = 10_000_000     # and while it has taken fewer ticks
_BESIDE = 2_000_000    # ticks for what is beside the plans that were seen, where an eighth of the search's is less
_HOPES = 1.1          # plans beside those that were seen are not faster by more
_ALMOST = 1.02         # slicings with their ends cut otherwise are worth a descent if at most so many times as slow as without
_WORK = 36_000_000     # ticks that a descent may take: a fraction of a second


def _are_cut_exactly(judge: Judge, names: Sequence[str]) -> bool:
    """Whether ``Judge.cuts_within`` finds a partition within a limit wherever there is one."""
    return judge.chunks == 1 and BPIPE not in names and not any(judge.savings.recompute)


def _ways(order: Candidate) -> list[Candidate]:
    """The order, and of looped stages also the one that they are built in, which may need less memory."""
    built = order.schedule == LOOPED and order.pending == 0 and len(order.slicing) > 1
    return [order, order._replace(pending=as_built(0))] if built else [order]


class _Hunt:
    """The search for the fastest plan on one grid, within any limit of memory, by a ladder of plans: each needs less memory than
    the one before. The ladder is the same whatever limit is asked for, which only decides how far down it is built: so more memory
    never gives a slower plan."""

    def __init__(self, judge: Judge, names: Sequence[str], starts: Sequence[Candidate], work: int, unit: int, partition: Cut | None,
                 fixed_slicing: bool, coarser: Sequence[_Hunt], slicings: Sequence[tuple[Micro, ...]], brief: bool) -> None:
        """coarser: the hunts on the grids that this one refines, whose fastest plans are starts, too. brief: build no ladder of its
        own, only the fastest plan and the one that needs least; their ladders serve instead."""
        self.brief = brief
        self.exact = _are_cut_exactly(judge, names)
        self.judge, self.names, self.starts, self.work, self.coarser = judge, names, list(starts), work, coarser
        self.first = 0                                         # ticks that the search for the fastest plan took
        self.plain: Candidate | None = None                    # that plan, without what is beside others (_explored)
        self.partition, self.slicings = partition, slicings
        self.given: dict[str, Any] = {"unit": unit, "fixed_partition": partition is not None, "fixed_slicing": fixed_slicing}
        self._best: dict[tuple[int | None, float], Candidate | None] = {}
        self._ends: dict[Candidate, Candidate] = {}            # by start: the end of the latest descent from it
        self._alike: set[tuple[Micro, ...]] = set()            # slicings of which _apart made others,
        self._unlike: tuple[list[Candidate], list[Candidate]] = ([], [])    # and plans with these: of other sizes, and other ends
        self._carried: frozenset[Candidate] = frozenset()      # coarser grids' plans within the limit in question
        self._rungs: list[Candidate] = []
        self._seen: list[Candidate] = []                       # what the search for the fastest plan saw besides
        self._heights: list[float] = []                        # seconds of the fastest plan of each rung
        self._latest: Candidate | None = None
        self._floor: list[Candidate] | None = None             # plans that need least memory; known before the rungs above them
        self._is_floor_whole = False                           # is the fastest plan that needs so little among them?
        self._least_s = 0.0                                    # a plan found later and faster than this is left out (_add)
        self._peak, self._spent, self._ended = 0, 0, False     # bytes of the latest plan; ticks of all plans but the first

    def _choose(self, limit: int | None, most: int) -> tuple[list[Candidate], list[Candidate]]:
        """(the fastest starts that fit, faster ones that do not), at most one for each slicing: different numbers of slices lead to
        different local optima. Of the coarser grids' plans only the fastest is among those that fit."""
        fit: list[Candidate] = []
        over: list[Candidate] = []
        queue = [(pace(c), i, 0, c) for i, c in enumerate((*self._known(limit), *self.starts))]     # ties keep the order of names
        heapq.heapify(queue)
        while queue and len(fit) < most and not (late() and (fit or over)):
            _, i, _, c = heapq.heappop(queue)
            if c.slicing in [d.slicing for d in fit] or (c in self._carried and any(d in self._carried for d in fit)):
                continue
            if self.judge.fits(c, limit):
                fit.append(c)
            elif leaner := self.judge.leaner(c, whole=False):  # those come where nothing else fits (_lean_within)
                for other in leaner:
                    heapq.heappush(queue, (pace(other), i, other.pending, other))
            elif len(over) < most and c.slicing not in [d.slicing for d in over]:
                over.append(c)
        return fit, over

    def _mend(self, c: Candidate, limit: int | None, share: int) -> list[Candidate]:
        if not self._affords(c, self.work // share) and self.judge.fits(c, limit):
            return [c]
        end = self.judge.descend(c, limit, budget=self.work // share, **self.given)
        return [] if end is None else [end]

    def _affords(self, c: Candidate, work: int) -> bool:
        """Whether ``work`` ticks are enough to look at a few moves."""
        return _GLANCES * work >= self.judge.ticks(c)

    def within(self, limit: int | None) -> Candidate | None:
        """The best end of descents within the limit: from the fastest starts that fit, and from faster ones that are first changed
        until they fit. Where coarser grids have plans, only from starts that are about as fast (NEAR)."""
        judge, work, begun = self.judge, self.work, self.judge.work
        stop, quick = begun + work, begun + work // _QUICK
        fit, over = self._choose(limit, _MORE_STARTS)
        near = NEAR if self._carried else float("inf")
        ends = fit[:1]
        for i, c in enumerate(fit):
            if c.seconds <= near * fit[0].seconds and judge.work < (stop if i < _STARTS else quick) and not late():
                ends += self._mend(c, limit, 2 * min(len(fit), _STARTS))
        over = over[:_STARTS]
        for c in over:
            if (judge.work < stop and (not fit or c.seconds < near * fit[0].seconds)) or not ends:
                ends += self._mend(c, limit, 4 * len(over))
        found: list[Candidate] = []
        quick = judge.work + work // _QUICK
        for end in sorted(dict.fromkeys(ends), key=pace)[:_STARTS]:
            if not found or (judge.work < quick and not late()):
                found.append(self._refined(end, limit, stop + work))
        if not found:
            return None
        best = min(found, key=pace)
        once = self._apart(best, limit, 2 * _QUICK)            # what is apart from the ends then may have ends of its own
        return once if once is best else self._apart(once, limit, 2 * _QUICK)

    def _refined(self, c: Candidate, limit: int | None, stop: int) -> Candidate:
        """From the end of a descent: plans that no single move leads to, but two moves or other numbers of waiting W do."""
        judge, work, best, quick = self.judge, self.work, c, self.judge.work + self.work // _QUICK
        free = not (self.given["fixed_partition"] or self.given["fixed_slicing"])
        if free and judge.work < stop and self._affords(best, work // 8) and not late():
            # a boundary of stages moves only if the slices do, too
            best = judge.descend(best, limit, budget=0, beside=work // 8, **self.given) or best
        found = self._waiting(best, limit, stop)
        for pending in (2, 4):                                 # with more waiting W other stages are best
            if c.schedule not in ZERO_BUBBLE and judge.work < quick and not late():
                more = judge.judge(c.schedule, best.partition, best.slicing, pending)
                ends = self._mend(more, limit, _QUICK) if judge.fits(more, limit) else []
                found = min([found, *(self._waiting(end, limit, stop) for end in ends)], key=pace)
        return min(best, found, key=pace)

    @property
    def _sizes_open(self) -> bool:
        """Whole sequences in micro-batches of any sizes?"""
        return self.names[0] == SLICED and len(self.slicings) > 1

    def _apart(self, best: Candidate, limit: int | None, share: int) -> Candidate:
        """``best``, or the end of a descent with its first and last micro-batches of another size than those between, or cut
        otherwise: in a descent sizes stay, and micro-batches that are alike."""
        judge, stop = self.judge, self.judge.work + self.work // share
        whole = self._sizes_open
        if (self.given["fixed_slicing"] and not whole) or late():
            return best
        ways = (sizes_apart(best.slicing, judge.costs.known_batch) if limit is None else [],
                [] if whole else ends_apart(best.slicing, judge.ranks, self.given["unit"], limit is None))
        for s, unlike in ((s, u) for each, u in zip(ways, self._unlike, strict=True) for s in each):
            if best.slicing in self._alike or judge.work >= stop or late():
                break
            if not possible(best.schedule, judge.ranks, len(s)):
                unlike.append(judge.judge(best.schedule, best.partition, s, best.pending))
        self._alike.add(best.slicing)
        ends = [best]
        for most, unlike in enumerate(self._unlike, 1):
            near = sorted((c for c in unlike if c.seconds < _ALMOST * best.seconds and judge.fits(c, limit)), key=pace)[:most]
            for c in near:
                if c not in self._ends or not judge.fits(self._ends[c], limit):
                    self._ends[c] = (self._mend(c, limit, share) or [c])[0]
            ends += [self._ends[c] for c in near]
        return min(ends, key=pace)

    def _waiting(self, best: Candidate, limit: int | None, stop: int) -> Candidate:
        """The best schedule and number of W that may wait, for these stages and slices."""
        ways = [(best.schedule, 2), *itertools.product(self.names, (1, 4, 2, 0))]     # the first helps most often: always tried
        for i, (name, pending) in enumerate(ways):
            if (i > 0 and self.judge.work > stop) or late():
                break
            if name in ZERO_BUBBLE and pending != 1:           # these schedules place every W themselves
                continue
            other = self.judge.judge(name, best.partition, best.slicing, pending)
            if name == LOOPED and other.seconds < best.seconds * SLIGHT and not self.judge.fits(other, limit):
                other = self.judge.judge(name, best.partition, best.slicing, as_built(pending))     # slower, but it may fit
            if other.seconds < best.seconds * SLIGHT and self.judge.fits(other, limit):
                best = other
        return best

    def _below(self, limit: int) -> Candidate | None:
        """The end of a descent from the fastest start within the limit."""
        ends: list[Candidate] = []
        for c in self._choose(limit, 1)[0]:
            if c not in self._ends or not self.judge.fits(self._ends[c], limit):
                self._ends[c] = (self._mend(c, limit, 32) or [c])[0]
            ends.append(self._ends[c])
        return self._waiting(min(ends, key=pace), limit, self.judge.work + self.work) if ends else None

    def best(self, limit: int | None, rival_s: float = float("inf")) -> Candidate | None:
        """The fastest plan within the limit; None: none fits. rival_s: seconds of a plan in hand; no slower one is looked for."""
        if (limit, rival_s) not in self._best:
            self._best[limit, rival_s] = self._looked_for(limit, rival_s)
        return self._best[limit, rival_s]

    def _looked_for(self, limit: int | None, rival_s: float) -> Candidate | None:
        """The ladder's first plan where it fits; else a later one, which needs less memory and is not faster."""
        if not self._rungs and not self._ended:
            begun = self.judge.work
            found = self.within(None)
            self.first, self._ended, self.plain = self.judge.work - begun, self.brief or found is None, found
            if found is not None and not late() and self.judge.ticks(found) < _SHORT:
                self._floor = self._least()                    # now and then it is the fastest, too
                if short := self.judge.ticks(found) < _SHORTEST:
                    self._floor, self._is_floor_whole = self._lowest(), True
                self.plain = found = min((found, *self.judge.unnamed(self._floor)), key=pace)
                found = self._explored(found) if short else found
            self._add(found)
            self._seen = [] if found is None or late() else self.judge.front()
        if not self._rungs:
            return None
        return self._rungs[0] if self.judge.fits(self._rungs[0], limit) else self._lower(limit, rival_s)

    def _explored(self, found: Candidate) -> Candidate:
        """``found``, the fastest plan seen, or a faster one beside what was seen, for which at most half as much work is spent;
        but not where ``found`` is far behind the plan in hand, or, one question of many, even the leanest far over the limit. Where
        nothing better is left beside any of them no ladder is needed. Finer grids start from ``found``: from the other alone some
        descend to slower plans."""
        judge, limit = self.judge, self.judge.limit
        given = Given(self.given["unit"], self.given["fixed_partition"], self.given["fixed_slicing"],
                      self.given["fixed_slicing"] and not self._sizes_open)
        far = limit is not None and min(max(judge.peak_bytes(c)) for c in self._floor or [found]) > limit + limit // _NEARLY
        if not (far and judge.in_passing) and pace(found) < _HOPES * judge.rival_s and not self.brief and not late():
            for c in [c for hunt in self.coarser if (c := hunt.best(None)) not in (None, hunt.plain)]:
                self._mend(judge.judge(*c[1:]), None, 8)       # its end is among what was seen, then
            self._ended = Front(judge, self.names, given).explore(min(judge.work // 2, judge.work // 8 + _BESIDE))
        return min(found, judge.fastest_seen(None) or found, key=pace)

    def _lower(self, limit: int | None, rival_s: float) -> Candidate | None:
        nearest = self.judge.shortest
        if not (self._is_floor_whole or late()):
            self._floor, self._is_floor_whole = self._lowest(), True
        while not (self._ended or self._is_vain(limit, rival_s)):
            found = self._fastest(limit)
            if found is not None and self._is_sure(found):
                break
            self._step_down(limit)
        self.judge.shortest = nearest                          # misses of rungs must not count: another limit has other rungs
        return self._fastest(limit)

    def _is_vain(self, limit: int | None, rival_s: float) -> bool:
        """Whether no rung between the first plan and the floor can fit, or none can be faster than the plan in hand."""
        floor = self._floor or []
        if floor and not self._nearly_fits(floor, limit) and all(hunt.best(limit) is None for hunt in self.coarser):
            return True
        return min(c.seconds for c in (self._rungs[0], *floor)) >= rival_s

    def _nearly_fits(self, floor: list[Candidate], limit: int | None) -> bool:
        """Whether one of ``floor`` fits, or, where it is not certain that these need least, is over the limit by only a little."""
        fits = [self.judge.fits(c, limit) for c in floor]
        near = limit is None or self.exact or min(max(self.judge.peak_bytes(c)) for c in floor) > limit + limit // _NEARLY
        return any(fits) or not near

    def can_fit(self, limit: int, enough: int | None = None) -> bool:
        """Whether anything may fit within this limit; asked before the search. enough: bytes, more than the limit, with which
        something is known to fit."""
        if self.judge.in_passing:
            near = limit if self.exact else limit + limit // _NEARLY
            return any(self._tight(order, near, mends=False) is not None for order in self._barest())
        orders = self._barest()
        if self.exact and self.partition is None and enough is not None:
            orders = [order for order in orders if late() or self._fits_less(order, enough)]
        return late() or self._nearly_fits([self._least_of(order) for order in orders], limit)

    def _fits_less(self, order: Candidate, enough: int) -> bool:
        """Whether this schedule and slicing need less than ``enough`` bytes on some partition."""
        ticks = block_ticks(self.judge, order.slicing, PHASES, order.schedule)
        return bool(self.judge.cuts_within(order, enough - 1, ticks))

    def _fastest(self, limit: int | None) -> Candidate | None:
        plans = [*self._rungs, *(self._floor or ()), *self._seen, *(self._known(limit) if self.brief else ())]
        return min((c for c in plans if self.judge.fits(c, limit)), key=self._after_the_first, default=None)

    def _after_the_first(self, c: Candidate) -> tuple[bool, float]:
        """Key: a plan that is faster than the first, which more memory gets, is taken only where nothing else fits."""
        return pace(c) < pace(self._rungs[0]), pace(c)

    def _is_sure(self, c: Candidate) -> bool:
        """Whether the two latest rungs, for less memory, are so much slower than ``c`` that the ladder need not go on."""
        sure = c.seconds * _SURE[self.judge.chunks > 1]
        return len(self._heights) > 2 and min(self._heights[-2:]) > sure

    def _step_down(self, limit: int | None) -> None:
        """Add the next plan to the ladder. The longer plans take, the wider the steps."""
        judge, begun = self.judge, self.judge.work
        if late():
            self._ended = True
            found = self.within(limit) if self._fastest(limit) is None else None
            self._rungs += [] if found is None else [found]
            return
        step = min(_WIDEST, _RUNG * 2.0 ** (self._spent // max(_RUNGS, self.first)))
        below = self._peak - max(1, int(step * self._peak))
        self._take_over(below)
        found = self._below(below)
        if found is None:
            follow = self._mend(self._latest, below, 32) if self._latest is not None else []
            ends = [c for c in (self._lean_within(below), *follow) if c is not None]
            found = min(ends, key=pace, default=None)
        self._ended = found is None
        self._add(found, None if found is None else self._apart(found, below, 32))
        self._spent += judge.work - begun

    def _add(self, c: Candidate | None, other: Candidate | None = None) -> None:
        """Add a rung, and another plan that needs as little. Not one that is faster than a plan that is the answer for a larger
        limit, where the ladder ends before this rung."""
        if c is None:
            return
        self._latest = c
        self._peak = max(self.judge.peak_bytes(c))
        kept = [d for d in dict.fromkeys((other or c, c)) if pace(d) >= self._least_s]
        if kept:
            self._rungs += kept
            self._heights.append(min(d.seconds for d in kept))
            sure = (pace(d) for d in (*self._rungs, *(self._floor or ()), *self._seen) if self._is_sure(d))
            self._least_s = max([pace(self._rungs[0]), self._least_s, *sure])

    def _known(self, limit: int | None) -> list[Candidate]:
        """The fastest plans of the coarser grids within the limit."""
        known = []
        for hunt in self.coarser:
            c = hunt.plain if limit is None else hunt.best(limit)
            if c is not None:
                self.judge.knows(c, hunt.judge)
                known.append(c)
        self._carried = frozenset(known)
        return known

    def _take_over(self, limit: int | None) -> None:
        """Add starts: this grid's slicings on the stages of the coarser grids' fastest plan that fits. The other starts have stages
        of plans that do not fit, or even ones, and those of them that fit may all be whole sequences."""
        known = min(self._known(limit), key=pace, default=None)
        if known is None:
            return
        for s in sorted(self.slicings, key=partial(estimate, self.judge))[:_STARTS]:
            if not possible(known.schedule, self.judge.ranks, len(s)):
                self.starts.append(self.judge.judge(known.schedule, known.partition, s, known.pending))

    # ---- where moves lead to no plan that fits: stages cut by the bytes that the engine counts ----

    def _orders(self) -> list[Candidate]:
        """Every schedule with every slicing, on even stages, with no W waiting, for ``_cut``; those that hold fewest activations
        first."""
        stages = self.judge.ranks * self.judge.chunks
        cut = self.partition or tuple(even_partition(self.judge.model, stages))
        pairs = [(name, s) for s in self.slicings for name in self.names if not possible(name, self.judge.ranks, len(s))
                 and (name != SLICED or all(len(lengths) == 1 for _, lengths in s))]

        def held(pair: tuple[str, tuple[Micro, ...]]) -> tuple[int, int]:       # sequences at most at a time on one rank
            slices, micros = min(len(lengths) for _, lengths in pair[1]), len(pair[1])
            known = {"gpipe": micros, "seq1f1b": -(-(stages - 2) // slices) + 2, "zb-h2": 2 * stages - 1}
            most = known.get(pair[0], stages)
            return min(micros, most) * max(b for b, _ in pair[1]), -slices

        return [Candidate(0.0, name, cut, s, int(name in ZERO_BUBBLE), self.judge.savings) for name, s in sorted(pairs, key=held)]

    def _leanest(self, orders: list[Candidate]) -> list[Candidate]:
        """The two of each schedule that hold fewest activations: searched together, one schedule's two must not hide another's."""
        return [order for name in self.names for order in [order for order in orders if order.schedule == name][:2]]

    def _whole(self, orders: list[Candidate], within: bool = False) -> list[Candidate]:
        """Those of ``_leanest`` that may have whole B, with these, or, if ``within`` and anything is recomputed, and R."""
        pending, none = WITHIN if within else WHOLE, within and not any(self.judge.savings.recompute)
        return [c._replace(pending=pending) for c in self._leanest(orders) if not none and may_be_whole(c.schedule, c.slicing)]

    def _barest(self) -> list[Candidate]:
        """``_leanest``, with whole B, and R within them, wherever they may be so, as that needs less."""
        orders = self._orders()
        whole = self._whole(orders, any(self.judge.savings.recompute))
        return whole + [order for order in self._leanest(orders) if not may_be_whole(order.schedule, order.slicing)]

    def _cut(self, order: Candidate, like: Candidate, limit: int) -> Candidate | None:
        """The schedule and slices of ``order`` on a partition that fits the limit if its program is that of ``like``: the most even
        one, or one by pairs where that is faster; on the given partition where there is one."""
        ticks = block_ticks(self.judge, order.slicing, PHASES, order.schedule)
        cuts = self.judge.cuts_within(like, limit, ticks) if self.partition is None else [order.partition]
        found = [self.judge.judge(order.schedule, cut, order.slicing, order.pending) for cut in cuts]
        return min(found, key=lambda c: (not self.judge.fits(c, limit), pace(c)), default=None)

    def _tight(self, order: Candidate, limit: int, mends: bool = True) -> Candidate | None:
        """The schedule and slices of ``order`` on the most even partition that fits. None: no partition fits; or only that none was
        found, where recomputation stands elsewhere in the program of other stages, or where there are too many chunks to decide."""
        found = self._cut(order, order, limit)
        if found is None:
            return None
        ends = [found] if self.judge.fits(found, limit) else []
        if not ends and self.partition is None:                # R stands elsewhere in the program of these stages
            ends = [c for c in (self._cut(order, found, limit),) if c is not None and self.judge.fits(c, limit)]
        if mends and not ends:
            ends = self._mend(found, limit, 32)
        if mends and ends and (self.judge.chunks > 1 or order.schedule == BPIPE) and self.partition is None:
            loose = self._cut(order, order, limit + limit // _LOOSE)
            ends += [] if loose is None else self._mend(loose, limit, 32)
        return min(ends, key=pace, default=None)

    def _lean_within(self, limit: int, most: int = _STARTS) -> Candidate | None:
        """The best end of descents from partitions that ``_tight`` finds; None where even the orders that hold least have none."""
        orders = self._orders()
        lean = self._leanest(orders)
        first = [c for order in lean for c in (self._tight(way, limit) for way in _ways(order)) if c is not None]
        for within in (False, True):
            first = first or [c for c in (self._tight(order, limit) for order in self._whole(orders, within)) if c is not None]
        if not first:
            return None
        stop = self.judge.work + self.work // 2
        others = [order for order in orders if order not in lean]
        for order in sorted(others, key=lambda order: estimate(self.judge, order.slicing))[:2 * most]:
            if len(first) > most or self.judge.work > stop or late():
                break
            found = self._tight(order, limit)
            first += [found] if found is not None else []
        ends = [end for c in first for end in self._mend(c, limit, 4 * len(first))]
        return self._waiting(min(ends, key=pace), limit, self.judge.work + self.work)

    def _least_of(self, order: Candidate) -> Candidate:
        """``order`` on the most even of the partitions that need least memory of any rank."""
        judge, least, peak = self.judge, order, max(self.judge.peak_bytes(order))
        for _ in range(0 if self.partition is not None else _AGAIN if any(judge.savings.recompute) else 1):
            low = min(judge.kept_bytes // judge.ranks, peak)
            cut = judge.cut_least(least, low, peak)            # for the program (its R) of the stages before
            found = least if cut is None else judge.judge(order.schedule, cut, order.slicing, order.pending)
            if max(judge.peak_bytes(found)) >= peak:
                break
            least, peak = found, max(judge.peak_bytes(found))
        return (self._tight(order, peak, mends=False)
                or judge.judge(order.schedule, least.partition, order.slicing, order.pending))

    def _least(self) -> list[Candidate]:
        """``_least_of`` for the two orders of each schedule that hold fewest activations, however looped stages do them; at last of
        those with whole B, and with R within them."""
        orders = self._orders()
        leanest = self._leanest(orders) + self._whole(orders) + self._whole(orders, within=True)
        return [self._least_of(way) for order in leanest for way in _ways(order)]

    def _lowest(self) -> list[Candidate]:
        """``_least``, and the ends of descents that need no more: of each (stages even only as far as the longest goes), or,
        where stages are not cut exactly, of all. But none that is faster than the ladder's first plan, which more memory gets."""
        least = self._least() if self._floor is None else self._floor
        apart = [c for c in least if not is_whole(c.pending)]
        enough = min((max(self.judge.peak_bytes(c)) for c in apart), default=0)
        if self.brief:
            return least
        leans = [self._lean_within(enough)] if not self.exact else [
            end for c in least for end in self._mend(c, max(self.judge.peak_bytes(c)), 32 * len(apart))]
        fastest_s = pace(self._rungs[0]) if self._rungs else 0.0
        return [*least, *(lean for lean in leans if lean is not None and pace(lean) >= fastest_s and lean not in least)]


def grids(seq_len: int, unit: int) -> list[int]:
    """``unit`` and all that it refines: numbers of tokens that divide the sequence and that ``unit`` divides, coarsest first."""
    return [g for g in range(seq_len, unit - 1, -unit) if seq_len % g == 0]


class _Search:
    """The search over all grids that ``unit`` refines, coarsest first."""

    def __init__(self, judge: Judge, names: Sequence[str], batch: int, seq_len: int, unit: int, partition: Cut | None,
                 slicing: tuple[Micro, ...] | None) -> None:
        """slicing: the one to keep; None: search for it."""
        self.judge, self.names, self.batch, self.seq_len, self.unit = judge, names, batch, seq_len, unit
        self.partition, self.slicing = partition, slicing
        self.work = _WORK if judge.chunks == 1 else 8 * _WORK // judge.chunks ** 2
        self.fixed_slicing = slicing is not None or names[0] == SLICED
        self.todo = [unit] if self.fixed_slicing else grids(seq_len, unit)
        self.hunts: dict[int, _Hunt] = {}
        self.stopped = False                                   # time was up for one of them
        self._spent: dict[int, int] = {}                       # by grid: ticks that its fastest plan took
        self._seeds: dict[int, list[tuple[Micro, ...]]] = {}

    @cached_property
    def _spread(self) -> list[Cut]:
        """Partitions to start from with several chunks a rank, besides those with stages of equal work."""
        if self.judge.chunks == 1 or self.partition is not None:
            return []
        whole = self.slicing or ((1, (self.seq_len,)),) * self.batch
        if not any(name in ZIGZAG for name in self.names):
            return over_ranks(self.judge, whole, self.names[0])
        return by_pairs(self.judge, whole, self.names[0]) if self.judge.chunks == 2 else []

    def _seeds_of(self, grid: int) -> list[tuple[Micro, ...]]:
        if grid not in self._seeds:
            coarser = min((h for h in self.todo if h > grid and h % grid == 0), default=self.seq_len + 1)
            self._seeds[grid] = ([self.slicing] if self.slicing is not None else
                                 slicing_seeds(self.judge, self.batch, self.seq_len, grid, coarser))
        return self._seeds[grid]

    def _can_fit(self, grid: int, limit: int) -> bool:
        hunt = _Hunt(self.judge.afresh(), self.names, [], self.work, grid, self.partition, self.fixed_slicing, [],
                     self._seeds_of(grid), True)
        fits = hunt.can_fit(limit, None if self.judge.shortest is None else self.judge.shortest[2])
        self.judge.joins(hunt.judge)
        return fits

    def _nothing_fits(self) -> bool:
        """Whether nothing can fit, asked before the first search: only where plans of other schedules that this judge has seen did
        not fit. Elsewhere it is asked after the first grid."""
        limit, before = self.judge.limit, self.judge.shortest
        if limit is None or before is None or self.judge.in_passing or not _are_cut_exactly(self.judge, self.names):
            return False
        return not any([late() or self._can_fit(grid, limit) for grid in self.todo])   # a list: a refusal names the least of all

    def _work_of(self, grid: int) -> int:
        """Ticks for a grid: less for grids of few slices, where little is to be found, so that large requests have some left for
        finer grids."""
        return self.work if self.fixed_slicing else self.work * min(_SLICES, self.seq_len // grid) // _SLICES

    def _look_at(self, grid: int) -> Candidate | None:
        refined = [g for g in self.hunts if g % grid == 0]     # what other grids found, remembered or cost must not matter here
        before, work = sum(self._spent[g] for g in refined), self._work_of(grid)
        little = work // (32 if before > max(3 * work, _WORK) else 16)
        budget, own, seeds = max(little, min(work, (4 * work - before) // 4)), self.judge.afresh(), self._seeds_of(grid)
        carried = [c for c in (self.hunts[g].plain for g in refined) if c is not None]
        starts = starts_on(own, self.names, seeds, self.partition, budget, min(carried, key=pace, default=None), self._spread)
        hunt = self.hunts[grid] = _Hunt(own, self.names, starts, budget, grid, self.partition, self.fixed_slicing,
                                        [self.hunts[g] for g in refined], seeds, bool(refined) and budget == little)
        self._spent[grid] = own.work
        # A finer grid that starts from this one's plans asks for them itself, even if they do not beat the rival.
        found = hunt.best(self.judge.limit, self.judge.rival_s)
        self._spent[grid] += hunt.first
        return found

    def _gives_up(self, grid: int, before_s: float, now_s: float) -> bool:
        """Whether finer grids need not be searched: the plan in hand is faster by more than they are likely to gain. It would have
        ended 125 of 149 searches of six requests, whose plans were 2.6 % slower in the end, at least, than auto's."""
        long = sum(hunt.judge.work for hunt in self.hunts.values()) > _LONG
        return (self.judge.may_give_up and long and grid * _FINE <= self.seq_len and now_s < float("inf")
                and now_s * min(1.0, now_s / before_s) > _GAINS * self.judge.rival_s)

    def look(self) -> None:
        limit, fastest_s = self.judge.limit, float("inf")
        for i, grid in enumerate([] if self._nothing_fits() else self.todo):
            if self.hunts and late():                          # the coarser grids' plans must do
                break
            with share(2 / (len(self.todo) - i + 1)):
                found = self._look_at(grid)
                self.stopped |= late()
            before_s, fastest_s = fastest_s, min(fastest_s, float("inf") if found is None else found.seconds)
            if grid != self.todo[-1] and self._gives_up(grid, before_s, fastest_s):
                self.judge.gave_up = True
                break
            if i == 0 and found is None and limit is not None and self.hunts[grid].best(limit) is None and not late():
                if not any([late() or self._can_fit(g, limit) for g in self.todo[1:]]):
                    break                                      # a list, as in _nothing_fits

    def best(self) -> Candidate | None:
        asked = [self.hunts[g] for g in self.hunts if self.unit in self.hunts or g % self.unit == 0]
        found = [(c, hunt) for hunt in asked if (c := hunt.best(self.judge.limit, self.judge.rival_s)) is not None]
        for hunt in self.hunts.values():
            self.judge.joins(hunt.judge)
        if self.stopped or late():                             # a ladder that ends early may leave out the best one made
            found += [(c, hunt) for hunt in asked if (c := hunt.judge.fastest_seen(self.judge.limit)) is not None]
        if not found:
            return None
        best, hunt = min(found, key=lambda pair: pace(pair[0]))
        if limited():
            self.judge.knows(best, hunt.judge)                 # there may be no time to make its program once more
        return best


def search(judge: Judge, names: Sequence[str], batch: int, seq_len: int, unit: int, partition: Cut | None,
           slicing: tuple[Micro, ...] | None) -> Candidate | None:
    """The fastest plan that fits the judge's limit of memory; None: none fits.

    More memory never gives a slower plan: the plan found without a limit is the answer where it fits, else the fastest that fits of
    what was seen on the way to it and of a ladder, which are the same for all limits (except where time is up); below the leanest
    plan nothing is looked for. A finer grid
    never gives a slower plan: each grid that it refines is searched before it, exactly as if it had been asked for, and its search
    starts from what was found there. Where coarse grids took all the work of a large request a finer one still gets a little, for
    its own best slices, but no ladder of its own.

    Two chunks a rank are searched twice as hard as one, which finds plans up to 4 % faster. With more chunks programs are longer
    and there are many numbers of chunks to try, so each gets less work: all of them together take about five times as much as one.
    Where time is up the search ends with what it has."""
    made = _Search(judge, names, batch, seq_len, unit, partition, slicing)
    made.look()
    return made.best()
