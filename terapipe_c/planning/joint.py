"""``planner="auto"``: the fastest plan over all planners, schedules and configurations that a request leaves open.

A configuration is (ranks, replicas, chunks); each is weighed with every schedule that the engine runs with so many chunks. Its
lower bounds (:func:`bounds.bound_s`: the work of the mean rank; :func:`bounds.stages_bound_s`: blocks cannot be divided) leave it
out where they are no better than the plan in hand. The others get quick plans, in the order of a formula's guess. Then every plan
that a user could ask for by name is made, and each (configuration, schedule) is searched in earnest, the fastest quick plan first.
Without a time limit a quick plan decides only this order and is no candidate itself: it would break the promise, which a search
keeps, that neither more memory nor a finer grid gives a slower plan.

By name: every planner, for this request as it is, and with every schedule and number of chunks that the request leaves open
(:func:`by_name`; where a rank can have more than eight chunks only up to four, and numbers that divide the layers evenly); bpipe
and chimera, which are weighed in no other way, come last (:func:`by_name_alone`). Each of these is made unless its bounds say that
it cannot win, or fit (least.py), whatever work it takes, so the result is never slower than any. Where ``stages`` or
``data_parallel`` are open terapipe also searches every configuration (numbers of ranks that divide the devices', their halves, and
all up to 16; up to four chunks) with every schedule: only its bounds leave one out. What is looked at besides does not depend on
the limit of memory, so more memory never gives a slower plan. But a search that has taken long ends before its finest slices where
it is not likely to beat the plan in hand (:meth:`search._Search._gives_up`): for large requests both promises are as good as that
rule.

Not promised: to beat a plan for which only the other planner was given ``granularity``, ``partition`` or ``slicing``, or only a
paper's planner ``data_parallel``. Given values are kept, and a finer grid or a cut made by hand is another request; a given
partition without chunks has one stage for each rank, whatever a schedule with several stages a rank could make of it. Nor to beat a
plan for which ``recompute`` was given; weighed are what the papers' planners choose to recompute, and the terapipe planner with
each named choice: before the searches where memory binds, because that may spare them, else after; and, where nothing fits that is
not told to recompute, with every schedule by name, too, so that nothing is refused that one of these can do.

Questions that do not depend on each other are asked side by side (side_by_side.py): without a limit of time a question is to beat
what was found before the last few questions, however many threads there are.

Work is counted, not timed: the same request gives the same plan. Only ``time_limit_s`` reads a clock. First comes one plan that is
quickly built, whatever the time; then the single planners, quick ones first, have half of the time, the quick plans of
configurations half of what is left, and the searches the rest. Planners that were stopped are asked again among these. Past the
limit nothing begins and what runs is stopped (the C planners ask, too): what it has by then counts, the log says what was cut short
or left out, and the plan in hand is finished, which takes about as long as building and judging it.
"""
from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from .._core import DeadlineError, Error, InfeasibleError
from ..config import counted, human_seconds
from ..guests import BPIPE
from ..schedules import CHIMERA, SLICED, ZERO_BUBBLE, ZIGZAG
from .bounds import AT_ONCE, Least, bound_s, least_of_kinds, least_work_s, order_bound_s, stages_bound_s, whole_bound_s
from .deadline import check_time, late, limited, share
from .enough import least_named
from .judge import SLIGHT, Candidate, Cut, Judge, lightest, pace, possible, rounded
from .ladder import unlimited
from .least import LeastBytes
from .partitioners import Found, plan_one
from .request import AUTO, BOTH_WAYS, JOINT, Request, by_name_alone, schedules_of
from .side_by_side import SideBySide
from .singles import (
    CHUNKS,
    by_name,
    chunks_left_out,
    last_resorts,
    plan_singles,
    plan_singles_within,
    ranks_left_out,
    recomputing,
    single,
    told,
    why_left_out,
)
from .starts import Guesses, balanced, quick_slicings, uniform

__all__ = ["plan_jointly"]

_WORK = 100_000_000     # ticks of the judge (about 13 ns each) for quick plans of all configurations
_LOOK = 6_000_000       # ticks for those of one configuration, for each of its schedules
_EVERY = 16             # up to so many ranks every number of them is a configuration
_GLIMPSE = 5_000_000    # ticks of a descent from the quick plan of a schedule, which says better what to search first
_GLIMPSES = 50_000_000  # ticks of all those descents
_LITTLE = 10_000_000    # where all quick plans took more than so many ticks there are no such descents
_SINGLES = 1 / 2        # the single planners' part of a time limit
_LOOKS = 1 / 2          # of what they leave of it, the quick plans' part; and of what these leave, recomputation's


# ---- the search -------------------------------------------------------------------------------------------------------

@dataclass(order=True)
class _Configuration:
    guess: float
    order: int
    bound: float = field(compare=False)
    ranks: int = field(compare=False)
    chunks: int = field(compare=False)
    replicas: int = field(compare=False)

    names: tuple[str, ...] = field(compare=False)     # schedules that can have these micro-batches (judge.possible)

    def of(self, request: Request, names: tuple[str, ...] = ()) -> Request:
        return replace(request, ranks=(self.ranks,), chunks=self.chunks, replicas=self.replicas, schedules=names or self.names)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.ranks, self.chunks, self.replicas

    def __str__(self) -> str:
        return (counted(self.ranks, "rank") + (f" of {self.chunks} chunks" if self.chunks > 1 else "")
                + (f" x {self.replicas} replicas" if self.replicas > 1 else ""))


def _numbers_of_ranks(request: Request, chunks: int, replicas: int) -> list[int]:
    if not request.free_ranks:
        return list(request.ranks)
    devices = request.cluster.num_devices
    most = max(1, min(devices // replicas, request.model.num_blocks // chunks))
    halves = {most >> i for i in range(most.bit_length())}
    return sorted(halves | {n for n in range(1, most + 1) if devices % n == 0 or n <= _EVERY}, reverse=True)


def _bound_s(request: Request, key: tuple[int, int, int], names: Sequence[str], least: tuple[float, Least]) -> float:
    """No plan of this configuration by schedules of these names is faster. least: of as many sequences as its replica has."""
    return max(bound_s(request, *key, least[0]),
               min(stages_bound_s(request, *key, least[1], zigzag) for zigzag in {name in ZIGZAG for name in names}))


def _configurations(request: Request, refused: dict[str, str]) -> list[_Configuration]:
    """Every configuration that the request leaves open, the most promising first; last, with no bound (0), those for which the time
    did not suffice. refused: filled with why a schedule is not possible in some of them."""
    replicas = [request.replicas]
    if request.free_replicas:
        replicas = [d for d in range(1, min(request.cluster.num_devices, request.batch) + 1) if request.batch % d == 0]
    rows, order, blocks = [], itertools.count(), Guesses(request)
    for d in replicas:
        share = request.batch // d
        least = None if late() else (least_work_s(request, share), least_of_kinds(request, share))
        micros = share if request.slicing is None else len(request.slicing)
        for chunks in CHUNKS if request.free_chunks else (request.chunks,):
            known = schedules_of(request, chunks)
            for ranks in _numbers_of_ranks(request, chunks, d):
                if ranks * chunks > request.model.num_blocks:
                    refused.update((n, f"{ranks} ranks of {chunks} chunks need as many blocks; the model has "
                                    f"{request.model.num_blocks}") for n in known if n not in refused)
                    continue
                reasons = {name: possible(name, ranks, micros) for name in known}
                refused.update((name, why) for name, why in reasons.items() if why and name not in refused)
                names = tuple(name for name in known if not reasons[name])
                if names and (ranks > 1 or chunks in (1, request.chunks)):
                    guess, bound = math.inf, 0.0
                    if least is not None and not late():
                        guess = rounded(blocks.guess_s(share, ranks, chunks) + bound_s(request, ranks, chunks, d, 0.0))
                        bound = _bound_s(request, (ranks, chunks, d), names, least)
                    rows.append(_Configuration(guess, next(order), bound, ranks, chunks, d, names))
    return sorted(rows)


@dataclass(order=True)
class _Task:
    """A plan to be asked for."""

    turn: int            # 0: uniform; 1: searches, whose plans often spare the rest; 2: the papers' planners (whole sequences);
                         # 3, 4: those and uniform, then searches, for schedules weighed in no other way (bpipe, chimera)
    quick: float         # seconds of a quick plan; infinite: none fits
    order: int
    bounds: dict[int, float] = field(compare=False)   # by number of ranks
    asked: Request = field(compare=False)
    named: bool = field(compare=False)   # a user could ask a single planner for it

    @property
    def bound(self) -> float:
        return min(self.bounds.values())

    def within(self, seconds: float) -> Request:
        """The request without those numbers of ranks whose bounds say that they cannot beat ``seconds``."""
        return replace(self.asked, ranks=tuple(n for n in self.asked.ranks if self.bounds[n] < seconds * SLIGHT))

    def __str__(self) -> str:
        r = self.asked
        return (" or ".join(r.schedules) + (f" of {r.chunks} chunks" if r.chunks > 1 else "")
                + (f" on {counted(r.ranks[0], 'rank')}" if len(r.ranks) == 1 else "")
                + (f" x {r.replicas} replicas" if r.replicas > 1 else ""))


_Answer = tuple[Found | InfeasibleError | DeadlineError, list[Judge]]   # and the judges that it took


def _look(judge: Judge, request: Request) -> dict[str, Candidate]:
    """By schedule: the best of some quick plans of one configuration."""
    stages = judge.ranks * judge.chunks
    best: dict[str, Candidate] = {}

    def consider(found: Candidate) -> None:
        known = best.get(found.schedule)
        if (known is None or found.seconds < known.seconds * SLIGHT) and judge.fits(found, judge.limit):
            best[found.schedule] = found

    stop = judge.work + _LOOK * (1 + len(request.schedules))
    consider(uniform(judge, request))
    for slicing in quick_slicings(request, stages):
        halved = max(len(s) for _, s in slicing) == 1 and min(b for b, _ in slicing) > 1 and stages > 1
        for name in request.schedules:
            if judge.work >= stop or late():
                break
            if (name == SLICED and len(request.schedules) > 1 and not halved) or possible(name, judge.ranks, len(slicing)):
                continue
            cuts: list[Cut] = [request.partition or balanced(judge, slicing, stages, schedule=name)]
            if name == "1f1b" and judge.work < stop and request.partition is None and judge.chunks == 1 and stages > 1:
                try:
                    cuts.append(unlimited(judge, "autopipe", name, slicing).partition)
                except DeadlineError:
                    pass
            for cut, pending in itertools.product(dict.fromkeys(cuts), (1,) if name in ZERO_BUBBLE else (1, 0)):
                if judge.work < stop:
                    consider(judge.judge(name, cut, slicing, pending))
    return best


class _Search:
    """The plan in hand (``best``), how it was found (``by``), and the log of what was tried."""

    def __init__(self, request: Request, say: Callable[[str], None], beside: SideBySide) -> None:
        self.request, self._say, self.beside = request, say, beside
        self.best: Found | None = None
        self.by = ""
        self.refusals: list[InfeasibleError] = []   # only of what is asked under every limit of memory
        self.cut: list[str] = []               # single planners that the time limit stopped
        self.stopped: set[str] = set()         # choices of ``recompute`` that had no plan when their share of the time was up
        self.untold = False                    # did a plan fit that was not told what to recompute?
        self.reserve: Found | None = None      # what was built at once, where there is a time limit
        self.log: list[str] = []
        self.work = 0
        self.rows: list[_Configuration] = []
        self.judges: dict[tuple[int, int, int], Judge] = {}
        self.quick: dict[tuple[str, int, int, int], Candidate] = {}   # the quick plan of a schedule and configuration
        self.bound: dict[tuple[int, int, int], float] = {}            # by configuration
        self.unasked = {"bound": 0, "time": 0}                        # searches that no task was made of: time was up
        self.least: dict[int, tuple[float, Least]] = {}               # by sequences of a replica
        self.order: dict[tuple[str, int, int], float] = {}            # of whole sequences, by schedule, ranks and chunks
        self.bytes = LeastBytes()

    @property
    def seconds(self) -> float:
        return float("inf") if self.best is None else self.best.candidate.seconds

    def offer(self, found: Found, by: str) -> bool:
        """Take ``found`` as the plan in hand if it is faster; was it?"""
        self.untold |= not any(found.judge.savings.recompute)
        if found.candidate.seconds < self.seconds * SLIGHT:
            self.best, self.by = found, by
            return True
        return False

    def say(self, what: str) -> None:
        self._say(what if self.best is None else f"{what}; best so far {human_seconds(self.seconds)}")

    def singles(self) -> list[tuple[str, float]]:
        """Ask every planner alone; gives (planner, seconds) of those that had a plan."""
        seconds, refused, asked = [], [], plan_singles(self.request, self.beside)
        if limited():
            hurried = plan_singles_within(self.request, _SINGLES)
            asked, self.cut, self.reserve = iter(hurried.answers), hurried.cut, hurried.reserve
        for name, result in asked:
            self.say(f"asked {name}")
            if isinstance(result, Error):
                if not isinstance(result, DeadlineError):
                    refused.append(name)
                    self._refused(result)
                continue
            seconds.append((name, result.candidate.seconds))
            self.offer(result, name)
            judge = result.judge
            self.judges.setdefault((judge.ranks, judge.chunks, judge.replicas.count), judge)
        planned = [name for name, _ in seconds]
        early, without = ([n for n in self.cut if (n in planned) is had and n not in refused] for had in (True, False))
        count = len(planned) + len(refused)
        self.log.append(f"asked {count} planners" if not without else f"{count} of {count + len(without)} planners had an answer")
        for what, who in (("no plan", refused), ("stopped by the time limit with the best plan by then", early),
                          ("without a plan at the time limit, or not asked", without)):
            self.log[-1] += f"; {what}: {', '.join(who)}" if who else ""
        return seconds

    def _refused(self, error: Error) -> None:
        if isinstance(error, InfeasibleError):
            self.refusals.append(error)

    def with_room(self, asked: Request) -> Request:
        """The request without those numbers of ranks on which nothing can fit; where nothing is in hand only without those whose
        refusal would name no less than others do."""
        told = lightest(self.refusals).memory_bytes if self.refusals else None
        named = 0.0 if self.best is not None else math.inf if told is None else told
        return replace(asked, ranks=tuple(n for n in asked.ranks if not self.bytes.lacks(asked, n, named)))

    def judge_of(self, asked: Request) -> Judge:
        """The judge for the first number of ranks of this request."""
        key = asked.ranks[0], asked.chunks, asked.replicas
        if key not in self.judges:
            self.judges[key] = asked.judge(key[0])
        return self.judges[key]

    def configurations(self) -> None:
        """Make quick plans of every configuration whose bound is better than the plan in hand."""
        refused: dict[str, str] = {}
        rows = self.rows = _configurations(self.request, refused)
        looked: list[_Configuration] = []
        left: list[_Configuration] = []
        for c in rows:
            if c.bound > 0:
                self.bound[c.key] = c.bound
            if c.bound >= self.seconds * SLIGHT:
                continue
            if self.work > _WORK or late():
                left.append(c)
                continue
            self.say(f"quick plans of {c}")
            judge = self.judge_of(c.of(self.request))
            before = judge.work
            for name, found in _look(judge, c.of(self.request)).items():
                self.quick[name, *c.key] = found
                if limited():                                  # else only searches count: quick plans depend on the grid
                    self.offer(Found(judge, found), f"a quick plan of {c}, {name}")
            self.work += judge.work - before
            looked.append(c)
        left = [c for c in left if c.bound < self.seconds * SLIGHT]
        known = dict.fromkeys((*JOINT, *self.request.schedules))   # bpipe and pipedream are weighed where they are asked for
        names = [name for name in known if any(name in c.names for c in rows)]
        text = (f"{counted(len(rows), 'configuration')} of ranks, replicas and chunks, by {', '.join(names)}: {len(looked)} "
                "looked at")
        pruned = len(rows) - len(looked) - len(left)
        if pruned:
            text += f", {pruned} left out because their bounds are no better than the best"
        if left:
            least = min(c.bound for c in left)                 # 0: there was no time to bound all
            text += f", {len(left)} left at the {'time' if late() else 'work'} limit"
            text += f" (bounds from {human_seconds(least)} on)" if least > 0 else ""
        self.log.append(text)
        self.log += [more for more in (chunks_left_out(self.request), ranks_left_out(self.request)) if more]
        left_out = {name: why for name, why in refused.items() if name not in names}
        if self.request.free_schedule:
            left_out = {name: refused.get(name, why) for name, why in why_left_out(self.request, names).items()}
        self.log += [f"{', '.join(n for n in left_out if left_out[n] == why)} left out: {why}"
                     for why in dict.fromkeys(left_out.values())]

    def glimpses(self) -> None:
        """Short descents from the quick plans, the fastest first: their ends say better in which order to search. They are no
        candidates themselves, because they depend on the limit of memory."""
        work = 0 if self.work > _LITTLE else _GLIMPSES + 1
        for key, found in sorted(self.quick.items(), key=lambda item: pace(item[1])):
            if work > _GLIMPSES or late():
                break
            if self.bound.get(key[1:], 0.0) < self.seconds * SLIGHT:
                judge = self.judges[key[1:]]
                before = judge.work
                self.quick[key] = self._descended(judge, found, _GLIMPSE)
                work += judge.work - before

    def _quick_s(self, name: str, key: tuple[int, int, int]) -> float:
        found = self.quick.get((name, *key))
        return float("inf") if found is None else pace(found)

    def tasks(self) -> list[_Task]:
        """Every plan to ask for, in order: what a user could ask for by name, and searches of configurations that no single planner
        would look at (other ranks and replicas); the fastest quick plans first."""
        r, rows = self.request, list[_Task]()
        whole = cache(lambda ranks, chunks, at_once: whole_bound_s(r, ranks, chunks, at_once))
        least, kinds = cache(lambda: least_work_s(r, r.share)), cache(lambda: least_of_kinds(r, r.share))
        stages = cache(lambda ranks, chunks, zigzag: stages_bound_s(r, ranks, chunks, r.replicas, kinds(), zigzag))
        again = (asked for asked in (single(r, name) for name in self.cut) if asked is not None)
        last = by_name_alone(r)
        for named in itertools.chain(again, by_name(r)):
            asked = replace(named, ranks=tuple(n for n in named.ranks if not named.judge(n).too_small()))
            if not asked.ranks:
                continue
            name, search = asked.schedules[0], asked.planner == "terapipe"
            keys = [(ranks, asked.chunks, asked.replicas) for ranks in asked.ranks]
            if late():
                bounds = {key[0]: self.bound.get(key, 0.0) for key in keys}
            elif name == CHIMERA:
                bounds = {key[0]: bound_s(r, *key, least(), 2) for key in keys}
            else:
                bounds = {key[0]: max(self.bound[key] if key in self.bound else bound_s(r, *key, least()),
                                      stages(key[0], asked.chunks, name in ZIGZAG)) for key in keys}
                if not search:
                    bounds = {n: max(bound, whole(n, asked.chunks, name == BPIPE)) for n, bound in bounds.items()}
            quick = min(self._quick_s(name, key) for key in keys)
            turn = 0 if asked.planner == "uniform" else 1 if search else 2
            rows.append(_Task(3 + search if name in last else turn, quick, len(rows), bounds, asked, True))
        known = {(t.asked.schedules[0], t.asked.chunks, *t.asked.ranks[:1], t.asked.replicas) for t in rows if t.turn == 1}
        others: list[_Task] = []
        for c in self.rows:
            for names in dict.fromkeys(AUTO if name in AUTO and r.schedules == AUTO else (name,) for name in c.names):
                usual = names == r.schedules and c.ranks in r.ranks[:1] and c.key[1:] == (r.chunks, r.replicas)
                if not usual and (names[0], c.chunks, c.ranks, c.replicas) not in known:
                    if late():
                        self.unasked["bound" if c.bound >= self.seconds * SLIGHT else "time"] += 1
                        continue
                    asked = replace(c.of(r, names), planner="terapipe")
                    quick = min(self._quick_s(name, c.key) for name in names)
                    others.append(_Task(1, quick, len(rows) + len(others), {c.ranks: c.bound}, asked, False))
        return sorted(rows + others)

    def deepen(self) -> None:
        """Make every task's plan, except where its bound says that it cannot win."""
        counts = {named: dict.fromkeys(("made", "bound", "room", "time", "cut"), 0) for named in (True, False)}
        tasks = self.tasks()
        counts[False] |= self.unasked
        asked: deque[tuple[_Task, Callable[[], _Answer]]] = deque()

        def take() -> None:
            task, answer = asked.popleft()
            self._take(task, answer())
            counts[task.named]["cut"] += late()

        for i, task in enumerate(tasks):
            while len(asked) >= self.beside.window:
                take()
            self.say(f"{task.asked.planner} for {task}, {i + 1} of {len(tasks)}")
            reason = "bound" if self._cannot_win(task) else "time" if late() else "made"
            fits = self.with_room(task.within(self.seconds)) if reason == "made" else task.asked
            if not fits.ranks or (reason == "made" and not task.named and self.judge_of(task.asked).too_small()):
                reason = "room"
            counts[task.named][reason] += 1
            if reason == "made":
                asked.append((task, self.beside.ask(self._question(task, fits))))
        while asked:
            take()
        self._say_of("planners by the names of schedules and chunks", "plans made", counts[True])
        self._say_of("searches of other numbers of ranks, replicas and chunks", "made", counts[False])

    def _cannot_win(self, task: _Task) -> bool:
        """Whether the task's bound is no better than the plan in hand. Plans of whole sequences have a sharper bound, which takes
        longer (:func:`bounds.order_bound_s`): it is added here, when the task's turn has come."""
        r = task.asked
        if task.bound == 0 and not task.named and not late():      # for which there was no time among the configurations
            if r.share not in self.least:
                self.least[r.share] = least_work_s(r, r.share), least_of_kinds(r, r.share)
            task.bounds = {n: _bound_s(r, (n, r.chunks, r.replicas), r.schedules, self.least[r.share]) for n in r.ranks}
        if r.planner != "terapipe" and r.schedules[0] in AT_ONCE:
            for ranks in task.within(self.seconds).ranks:
                key = r.schedules[0], ranks, r.chunks
                if late():
                    break
                if key not in self.order:
                    self.order[key] = order_bound_s(r, *key)
                task.bounds[ranks] = max(task.bounds[ranks], self.order[key])
        return task.bound >= self.seconds * SLIGHT

    def _say_of(self, what: str, made: str, counts: dict[str, int]) -> None:
        """One line of the log, if there were any."""
        whys = {"bound": "left out because their bounds are no better than the best",
                "room": "left out because their ranks have no room for what any plan takes",
                "time": "left at the time limit: some of them may be faster than this plan",
                "cut": "of them stopped by the time limit"}
        if sum(counts.values()):
            self.log.append(", ".join([f"{what}: {counts['made']} {made}", *(f"{counts[k]} {whys[k]}" for k in whys if counts[k])]))

    def _question(self, task: _Task, fits: Request | None = None) -> Callable[[], _Answer]:
        """Makes the plan of one task, or of what of it ``fits``, to beat the plan that is in hand now."""
        r, rival_s = fits or task.within(self.seconds), self.seconds
        known = {} if r.planner == "terapipe" else {ranks: self.judges.get((ranks, r.chunks, r.replicas)) for ranks in r.ranks}

        def answer() -> _Answer:
            judges: list[Judge] = []

            def own(ranks: int) -> Judge:                      # a search counts the work of its judges
                before = known.get(ranks)
                judge = r.judge(ranks) if before is None else before.afresh()
                judge.rival_s, judge.in_passing, judge.may_give_up = rival_s, True, True
                judges.append(judge)
                return judge

            try:
                return plan_one(r, own), judges
            except (InfeasibleError, DeadlineError) as error:
                return error, judges

        return answer

    def _take(self, task: _Task, answer: _Answer) -> None:
        """Offer the plan of one task."""
        found, judges = answer
        search = task.asked.planner == "terapipe"
        for judge in judges if not search else ():
            known = self.judges.setdefault((judge.ranks, judge.chunks, judge.replicas.count), judge)
            if known is not judge:
                known.joins(judge)
        if isinstance(found, Error):
            if task.named and isinstance(found, InfeasibleError):
                self.refusals.append(found)
            if search and not late():
                among = " of what could be faster" if self.seconds < float("inf") else ""
                self.log.append(f"searched {task}: nothing fits{among}")
            return
        better = self.offer(found, f"a search of {task}" if search else f"{task.asked.planner} for {task}")
        if search:
            gave_up = any(judge.gave_up for judge in judges)
            self.log.append(f"searched {task}: {human_seconds(found.candidate.seconds)}" + (", better" if better else "")
                            + (", given up before the finest slices" if gave_up else "")
                            + (", stopped by the time limit" if late() else ""))

    def recompute(self, at_last: bool = False) -> bool:
        """Ask the terapipe planner with each choice of ``recompute``, where some plan did not fit or ``at_last``. True if it was
        asked and every choice had the time."""
        binds = self.best is None or any(judge.shortest is not None for judge in self.judges.values())
        if self.request.recompute or late() or not (binds or at_last):
            return False
        self.stopped.clear()
        left: list[str] = []
        for again, found in recomputing(self.request, lambda: self.seconds, self.beside):
            if found is None:
                left.append(again)
                continue
            if isinstance(found, DeadlineError):
                self.stopped.add(again)
            if isinstance(found, Error):
                self._refused(found)
                continue
            better = self.offer(found, f"terapipe with recompute = {again!r}")
            self.log.append(f"told to recompute {again}: {human_seconds(found.candidate.seconds)}" + (", better" if better else ""))
        if left:
            self.log.append(f"not told to recompute {' or '.join(left)}: the bounds of such plans are no better than the best")
        return not self.stopped

    def resort(self) -> None:
        """Where nothing fits but what is told to recompute: tell those schedules, too, that :meth:`recompute` does not ask. Some
        need less memory, or are faster in as much."""
        if self.request.recompute or self.untold or late():
            return
        for how, found in last_resorts(self.request, lambda: self.seconds, self.with_room, self.beside):
            if isinstance(found, Error):
                self._refused(found)
            elif self.offer(found, f"terapipe told to recompute {how}"):
                self.log.append(f"told to recompute {how}, as else too little fits: {human_seconds(self.seconds)}, better")

    def might_do_with_less(self, error: InfeasibleError) -> list[Request]:
        """What to ask again where all was refused, because it may have a plan for less than the refusal names. Not the papers'
        planners, whose ladders say what they need at least wherever they are climbed."""
        self.say("what would fit")
        lower = _Search(replace(self.request, limit=(error.memory_bytes or 1) - 1), self._say, self.beside)
        lower.rows, lower.bound = self.rows, self.bound
        return [*(task.asked for task in lower.tasks() if task.asked.planner in BOTH_WAYS), *told(lower.request)]

    def _descended(self, judge: Judge, start: Candidate, ticks: int) -> Candidate:
        r = self.request
        fixed_slicing = r.slicing is not None or start.schedule == SLICED
        return judge.descend(start, judge.limit, unit=r.unit, fixed_partition=r.partition is not None, fixed_slicing=fixed_slicing,
                             budget=ticks) or start


def plan_jointly(request: Request, say: Callable[[str], None] = lambda text: None) -> tuple[Found, list[str]]:
    """(the best plan that the search finds, the log of what it tried). say: called now and then with what is looked at.
    InfeasibleError where nothing fits, DeadlineError where the limit that it is called within (deadline.py) left no time for
    any."""
    with SideBySide() as beside:
        s = _Search(request, say, beside)
        compared = s.singles()
        with share(_LOOKS):
            s.configurations()
            s.glimpses()
        with share(_LOOKS):                                    # a few searches, which may spare many of the next
            done = s.recompute()
        s.deepen()
        if not done:
            s.recompute(at_last=True)
        s.resort()
    if s.reserve is not None and (s.best is None or late()):   # what was stopped has not found as good a one, maybe
        s.offer(s.reserve, "what could be built at once")
    if s.best is None:
        check_time(bool(s.stopped))
        near = [judge.refuse() for judge in s.judges.values() if judge.shortest is not None]
        error = lightest(s.refusals or near or [InfeasibleError("no plan of any planner fits: more memory_bytes would be right")])
        raise error if limited() else least_named(error, s.might_do_with_less(error), request.limit)
    if late():
        s.log.append(f"ended by time_limit_s = {request.time_limit_s:g}")
    s.log.append(f"best: {human_seconds(s.seconds)} by {s.by}")
    return Found(s.best.judge, s.best.candidate, tuple(compared)), s.log
