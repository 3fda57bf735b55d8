"""The questions that ``planner="auto"`` puts to the single planners: the request as it is, and with its open choices fixed."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce

from .._core import BMPIPE_LAYERS, DeadlineError, Error, InfeasibleError
from ..guests import evicts
from ..links import rank_of
from ..partition import even_partition, updated_of_kind
from ..schedules import CHIMERA, LOOPED, SLICED, ZIGZAG
from .bounds import again_bound_s
from .deadline import late, limited, share, without
from .judge import SLIGHT, Judge, lightest, possible, rounded
from .ladder import plan_stages
from .partitioners import Found, plan_one
from .request import (
    AUTO,
    BOTH_WAYS,
    BY_NAME,
    CHUNKED,
    JOINT,
    PLANNERS,
    RECOMPUTE,
    ROUND,
    SAVERS,
    SEARCHING,
    Request,
    by_name_alone,
    even_halves,
    grouped,
    halves,
    has_chunks,
    plans_order,
    schedules_of,
    unlike,
)
from .side_by_side import SideBySide
from .starts import kind_seconds, whole_sequences

__all__ = ["CHUNKS", "Hurried", "at_once", "by_name", "chunk_counts", "chunks_left_out", "last_resorts", "plan_singles",
           "plan_singles_within", "ranks_left_out", "recomputing", "single", "told", "why_left_out"]

CHUNKS = (1, 2, 3, 4)    # numbers of chunks that are searched
_SOON = 20_000           # cells of a program that takes about 20 ms
_ALL = 8                 # so many numbers of chunks are all asked for by name

# The order under a time limit: quick planners first, terapipe (mostly the best plan) among them; those that take long last.
_QUICK_FIRST = ("uniform", "merak", "vpipe", "terapipe", "autopipe_heuristic", "autopipe", "pipedream", "dawnpiper",
                "dawnpiper_binary", "bmpipe", "dapple", "adapipe", "piper")


def single(request: Request, name: str) -> Request | None:
    """The same request to one planner; None where that cannot plan it (several chunks, too many layers, a given recompute)."""
    if name not in CHUNKED and (request.chunks > 1 or request.schedules[0] in ROUND):
        return None
    if not plans_order(name, request.schedules[0]):
        return None
    return _asked(request, name, _usual(request, name), request.chunks, request.ranks)


def _usual(request: Request, planner: str) -> tuple[str, ...]:
    """Schedules that a single planner considers for this request."""
    return ("1f1b",) if request.schedules == AUTO and planner not in SEARCHING else request.schedules


def _asked(request: Request, planner: str, names: tuple[str, ...], chunks: int, ranks: tuple[int, ...]) -> Request | None:
    if planner == "bmpipe" and request.model.n_layer + 2 > BMPIPE_LAYERS:
        return None                                            # it takes no deeper model; the others do
    if request.recompute and planner in SAVERS:                # these choose what to recompute themselves
        return None
    micros = len(whole_sequences(request))
    ranks = tuple(r for r in ranks if r * chunks <= request.model.num_blocks and not possible(names[0], r, micros))
    return replace(request, planner=planner, schedules=names, chunks=chunks, ranks=ranks) if ranks else None


def _all_chunk_counts(request: Request) -> range:
    return range(1, request.model.num_blocks // (1 if request.free_ranks else min(request.ranks)) + 1)


def chunk_counts(request: Request) -> tuple[int, ...]:
    """Numbers of chunks that single planners are asked for where they are open: all of them, or, where there are more than _ALL,
    the first four and those of which stages of equally many layers' blocks can be made."""
    if not request.free_chunks:
        return (request.chunks,)
    numbers = _all_chunk_counts(request)
    if len(numbers) <= _ALL:
        return tuple(numbers)
    return tuple(n for n in numbers if n <= CHUNKS[-1] or any(2 * request.model.n_layer % (n * r) == 0 for r in request.ranks))


def chunks_left_out(request: Request) -> str:
    """What the log says of the numbers of chunks that nobody is asked for; "": of none."""
    counts = chunk_counts(request)
    if not request.free_chunks or len(counts) == len(_all_chunk_counts(request)):
        return ""
    return (f"numbers of chunks above {CHUNKS[-1]} that do not divide the layers evenly left out (asked for were "
            f"{', '.join(map(str, counts))}): by name each can be asked for")


def ranks_left_out(request: Request) -> str:
    """What the log says of the largest number of ranks on which the named schedule cannot have these micro-batches; "": of none."""
    if not request.free_ranks or request.free_schedule:
        return ""
    name, micros = request.schedules[0], len(whole_sequences(request))
    for ranks in halves(request.cluster.num_devices // request.replicas, request.model.num_blocks // request.chunks):
        if why := possible(name, ranks, micros):
            groups = grouped(request.share, ranks, request.seq_len, request.costs) if request.slicing is None else ""
            return f"{ranks} ranks left out: {why}" + (f"; {groups}" if groups and name == "interleaved" else "")
    return ""


def by_name(request: Request) -> Iterator[Request]:
    """Every request that a user could put to a single planner by naming the schedule and the chunks that this request leaves open,
    except those of :func:`plan_singles`."""
    for chunks in chunk_counts(request):
        ranks = request.ranks
        if request.free_ranks:
            ranks = halves(request.cluster.num_devices // request.replicas, request.model.num_blocks // chunks)
        for name, planner in itertools.product(schedules_of(request, chunks), PLANNERS[1:]):
            usual = chunks == request.chunks and name in _usual(request, planner)
            several = chunks > 1 or name in ROUND
            if usual or (several and planner not in CHUNKED) or not plans_order(planner, name):
                continue
            asked = _asked(request, planner, (name,), chunks, ranks)
            if asked is not None:
                yield asked
    for name, planner in itertools.product(by_name_alone(request), PLANNERS[1:]):
        ranks = request.ranks
        if name == CHIMERA:
            ranks = () if planner not in BOTH_WAYS else even_halves(ranks) if request.free_ranks else ranks
        elif planner != "terapipe":                            # where BPipe evicts nothing it is 1F1B, which they were asked for
            ranks = tuple(r for r in ranks if evicts(r, len(whole_sequences(request))))
        asked = _asked(request, planner, (name,), 1, ranks)
        if asked is not None:
            yield asked


def why_left_out(request: Request, weighed: Container[str]) -> dict[str, str]:
    """Schedules that the joint search does not look at, and why. weighed: those that it looks at besides :func:`by_name`."""
    named = {asked.schedules[0] for asked in by_name(request)}
    return {name: _why(request, name) for name in (*JOINT, *BY_NAME) if name not in weighed and name not in named}


def _why(request: Request, name: str) -> str:
    counts, micros = chunk_counts(request), len(whole_sequences(request))
    if not any(has_chunks(name, chunks) for chunks in counts):
        given = "the partition that is given has one for each rank, without chunks" if request.partition and counts == (1,) \
            else f"a rank has {request.chunks} here"
        return f"{'several stages' if has_chunks(name, 2) else 'one stage'} a rank, where {given}"
    if name == LOOPED and set(counts) == {1}:
        return "with one stage a rank and one micro-batch it is gpipe"
    if name == SLICED and request.slicing is not None:
        return "whole sequences alone, where the slicing that is given cuts them"
    if name == CHIMERA and not request.free_copies:
        return ("the plan is to be executable, with the bits of one device, and two copies of the model add their gradients in "
                "another order; executable=False would be right")
    why = unlike(request.slicing or ()) if name == CHIMERA and micros % 2 == 0 else ""
    return why or next(filter(None, (possible(name, ranks, micros) for ranks in request.ranks)),
                       f"no number of ranks has {name}'s stages; the model has {request.model.num_blocks} blocks")


def plan_singles(request: Request, beside: SideBySide) -> Iterator[tuple[str, Found | Error]]:
    """Every single planner by its name, and its plan for this request, or why there is none."""
    asked = [(name, beside.ask(partial(_answer, one))) for name in PLANNERS[1:] if (one := single(request, name)) is not None]
    for name, answer in asked:
        yield name, answer()


def _answer(asked: Request, judge_of: Callable[[int], Judge] | None = None) -> Found | Error:
    try:
        return plan_one(asked, judge_of)
    except (InfeasibleError, DeadlineError) as error:
        return error


@dataclass(frozen=True)
class Hurried:
    """The single planners' answers within a time limit."""

    answers: list[tuple[str, Found | Error]]   #: in the order of PLANNERS; a DeadlineError: stopped without a plan, or not asked
    cut: list[str]                             #: planners that were stopped, with a plan or without, or not asked
    reserve: Found | None                      #: a plan that is built at once, whatever the time; None: none of these fits


def plan_singles_within(request: Request, part: float) -> Hurried:
    """``plan_singles`` within ``part`` of the time that is left, after one plan that is made whatever the time (``at_once``).
    Quick planners are asked first. With n planners still to
    ask each may take 2 / (n + 1) of the time that is then left; what one does not use is left to the others."""
    answers: dict[str, Found | Error] = {}
    cut: list[str] = []
    with without():
        even, reserve = at_once(request)
    names = [name for name in _QUICK_FIRST if single(request, name) is not None]
    with share(part):
        for i, name in enumerate(names):
            asked = single(request, name)
            assert asked is not None
            if name == "uniform" and reserve is not None and asked == even:
                answers[name] = reserve
                continue
            if late():
                cut.append(name)
                answers[name] = DeadlineError(f"planner {name} was not asked: no time was left")
                continue
            with share(2 / (len(names) - i + 1)):
                answers[name] = _answer(asked)
                if late():
                    cut.append(name)
                    if isinstance(answers[name], InfeasibleError):
                        answers[name] = DeadlineError(f"planner {name} found nothing that fits before it was stopped")
    return Hurried([(name, answers[name]) for name in PLANNERS[1:] if name in answers], cut, reserve)


def at_once(request: Request) -> tuple[Request | None, Found | None]:
    """(what uniform was asked, a plan that is quickly built, to be had whatever the time): uniform's, or, where none of these fits
    and any planner will do, DawnPiper's for this limit of memory alone. Where the program would take long those of other numbers
    of ranks, and of as many replicas as the request leaves open, are tried before it: of those that are built soon the fastest
    first."""
    even = single(request, "uniform")
    other = (_asked(request, "uniform", (name,), request.chunks, request.ranks) for name in schedules_of(request, request.chunks))
    judges: dict[tuple[int, int], Judge] = {}
    for asked in _ways(request, [even] if even is not None else [one for one in other if one is not None]):
        judge = judges[asked.ranks[0], asked.replicas] = asked.judge(asked.ranks[0])
        found = None if judge.too_small() else _answer(asked, partial(_same, judge))
        if isinstance(found, Found):
            return asked, found
    quick = single(request, "dawnpiper") if request.planner == "auto" and request.partition is None else None
    for asked in _ways(request, [] if quick is None else [quick]):
        for ranks in asked.ranks:
            judge = judges.get((ranks, asked.replicas)) or asked.judge(ranks)
            try:
                least = None if judge.too_small() else plan_stages(judge, "dawnpiper", asked.schedules[0], whole_sequences(asked),
                                                                   thorough=False)
            except InfeasibleError:
                continue
            if least is not None:
                return None, Found(judge, least)
    return None, None


def _same(judge: Judge, ranks: int) -> Judge:
    assert judge.ranks == ranks
    return judge


def _ways(request: Request, ways: list[Request]) -> list[Request]:
    """What ``at_once`` asks a planner of whole sequences, in this order: as it is, or, where its program would take long, with
    one number of ranks and the most replicas beside it: first those whose program is built soon, by about how long their step
    takes; then the smallest program first."""
    if not ways or _cells(ways[0]) <= _SOON:
        return ways
    devices, some = request.cluster.num_devices, [request.replicas]
    if request.free_replicas and request.planner == "auto":
        some = [d for d in range(1, min(devices, request.batch) + 1) if request.batch % d == 0]
    smaller = [replace(one, ranks=(n,), replicas=max(d for d in some if n * d <= devices or d == some[0]))
               for one in ways for n in one.ranks]
    smaller = [one for one in smaller if not possible(one.schedules[0], one.ranks[0], len(whole_sequences(one)))]
    return sorted(smaller, key=_hurried) or ways


def _hurried(asked: Request) -> tuple[bool, float, int]:
    """Key of the order of :func:`_ways`."""
    cells = _cells(asked)
    soon = cells <= _SOON
    return not soon, _guess_s(asked) if soon else 0.0, cells


def _guess_s(asked: Request) -> float:
    """About the seconds of a step: micro-batches pass the fullest rank of an even partition one after the other, where each waits
    for its messages there and back; then the sum over the replicas. By the passes alone slow links would have as many ranks as fast
    ones."""
    ranks, slicing, model = asked.ranks[0], whole_sequences(asked), asked.model
    judge, micros, stages = asked.judge(ranks), len(slicing), ranks * asked.chunks
    seconds, params = kind_seconds(judge, slicing), updated_of_kind(model)
    work_s, held = [0.0] * ranks, [0.0] * ranks
    for rank, (first, end) in zip(rank_of(ranks, stages, asked.schedules[0] in ZIGZAG), asked.partition or
                                  even_partition(model, stages), strict=True):
        work_s[rank] += sum(seconds[block.kind] for block in model.blocks[first:end]) / micros
        held[rank] += sum(params[block.kind] for block in model.blocks[first:end])
    rows = sum(size * sum(lengths) for size, lengths in slicing) / micros
    message_s = 2 * asked.chunks * judge.mean_message_s(rows) if ranks > 1 else 0.0
    passes_s = sum(work_s) + (micros - 1) * max(work_s) + (micros + ranks - 1) * message_s
    return rounded(passes_s + float(judge.replicas.seconds(4.0 * max(held))))


def _cells(asked: Request) -> int:
    """Micro-batches of all stages in uniform's program."""
    return asked.ranks[0] * asked.chunks * len(whole_sequences(asked))


def recomputing(request: Request, rival_s: Callable[[], float], beside: SideBySide) \
        -> Iterator[tuple[str, Found | Error | None]]:
    """(choice of ``recompute``, plan or why there is none) of the terapipe planner for each choice, all schedules; None: the bounds
    of plans that recompute so much are no better than ``rival_s()``, the seconds of the plan in hand. The papers' planners need
    not be asked: they choose for themselves what to recompute."""
    told = {what: asked for what, kinds in RECOMPUTE.items() if (asked := _telling(request, kinds))}
    if not limited():
        answers = {what: [beside.ask(partial(_told, one, RECOMPUTE[what], rival_s())) for one in asked]
                   for what, asked in told.items()}
        for what, each in answers.items():
            yield what, reduce(_quicker, [answer() for answer in each], None)
        return
    for i, (what, asked) in enumerate(told.items()):
        found: Found | Error | None = None
        with share(2 / (len(told) - i + 1)):
            for j, one in enumerate(asked):
                rival = min(rival_s(), found.candidate.seconds if isinstance(found, Found) else math.inf)
                with share(2 / (len(asked) - j + 1)):
                    found = _quicker(found, _told(one, RECOMPUTE[what], rival))
        yield what, found


def _telling(request: Request, kinds: tuple[str, ...]) -> list[Request]:
    """The request to the terapipe planner, told to recompute the blocks of these kinds, by what schedules are searched together."""
    orders = [_usual(request, "terapipe")]
    if request.free_schedule and request.chunks > 1:           # else schedules of one stage a rank, which are searched together
        orders = [(name,) for name in schedules_of(request, request.chunks)]
    flags = tuple(block.kind in kinds for block in request.model.blocks)
    told = replace(request, recompute=flags, each_alone=False)
    asked = (_asked(told, "terapipe", names, request.chunks, request.ranks) for names in orders)
    return [one for one in asked if one is not None]


def _resorts(request: Request) -> list[Request]:
    """The request to the terapipe planner with each schedule and number of chunks by name, on numbers of ranks that have room for
    the parameters."""
    usual = single(request, "terapipe")                        # now each schedule alone
    searches = [*([usual] if usual is not None else []), *(asked for asked in by_name(request) if asked.planner == "terapipe")]
    return [replace(asked, ranks=ranks) for asked in searches
            if (ranks := tuple(n for n in asked.ranks if not asked.judge(n).too_small()))]


def told(request: Request) -> list[Request]:
    """All that :func:`recomputing` and :func:`last_resorts` ask."""
    if request.recompute:
        return []
    flags = [tuple(block.kind in kinds for block in request.model.blocks) for kinds in RECOMPUTE.values()]
    return [*itertools.chain.from_iterable(_telling(request, kinds) for kinds in RECOMPUTE.values()),
            *(replace(asked, recompute=each) for each in flags for asked in _resorts(request))]


def last_resorts(request: Request, rival_s: Callable[[], float], with_room: Callable[[Request], Request],
                 beside: SideBySide) -> Iterator[tuple[str, Found | Error]]:
    """(choice of ``recompute`` and schedule, plan or why there is none) of the terapipe planner with each schedule and number of
    chunks by name, for each choice, but where the bounds of such plans are no better than ``rival_s()``. Only numbers of ranks
    that have room for the parameters, and of those what ``with_room`` leaves."""
    every = _resorts(request)
    for what, kinds in RECOMPUTE.items():
        flags, rival = tuple(block.kind in kinds for block in request.model.blocks), rival_s()
        told = [one for asked in every if (one := with_room(replace(asked, recompute=flags))).ranks]
        for one, answer in [(one, beside.ask(partial(_told, one, kinds, rival, True))) for one in told]:
            if late():
                return
            if (found := answer()) is not None:
                yield f"{what} by {' or '.join(one.schedules)}" + f" of {one.chunks} chunks" * (one.chunks > 1), found


def _told(asked: Request, kinds: tuple[str, ...], rival_s: float, in_passing: bool = False) -> Found | Error | None:
    """The plan, on those numbers of ranks whose bounds are better than ``rival_s``; None: there are none. in_passing: a refusal
    need not name the least."""
    if rival_s < math.inf and CHIMERA not in asked.schedules:
        bounds = again_bound_s(asked, kinds)
        asked = replace(asked, ranks=tuple(n for n in asked.ranks if bounds[n] < rival_s * SLIGHT))
    return _answer(asked, partial(_against, asked, rival_s, in_passing)) if asked.ranks else None


def _quicker(one: Found | Error | None, other: Found | Error | None) -> Found | Error | None:
    """The faster plan; of two refusals the one that the time limit made, else the one that needs least memory."""
    if isinstance(one, Found) and isinstance(other, Found):
        return other if other.candidate.seconds < one.candidate.seconds * SLIGHT else one
    if isinstance(one, Found) or other is None:
        return one
    if isinstance(one, InfeasibleError) and isinstance(other, InfeasibleError):
        return lightest([one, other])
    return one if isinstance(one, DeadlineError) and not isinstance(other, Found) else other


def _against(asked: Request, rival_s: float, in_passing: bool, ranks: int) -> Judge:
    """A judge for plans that are to beat a plan in hand, if there is one."""
    judge = asked.judge(ranks)
    judge.rival_s, judge.in_passing, judge.may_give_up = rival_s, in_passing or rival_s < math.inf, True
    return judge
