"""The limit that a refusal names: the least that has a plan.

Where nothing fits most questions end before they know what they need at least: numbers of ranks without room for the parameters
are left out, a ladder is not climbed down that ends far above the limit, and what needs less than the leanest partition (stages of
several chunks, looped stages, what recomputes: no partition is cut exactly then) is only come by on a ladder. So what the refusal
names is asked about: does less fit? Each question that may do with less is put with a limit of one byte less, until it is refused.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from .._core import InfeasibleError
from ..guests import BPIPE
from ..schedules import LOOPED
from .judge import Judge
from .least import LeastBytes
from .partitioners import Found, plan_one
from .request import Request
from .side_by_side import SideBySide

__all__ = ["is_least", "least_named"]


class _Plan(NamedTuple):
    needed: int           #: bytes of its fullest rank
    found: Found


def is_least(request: Request) -> bool:
    """Whether terapipe's refusal names the least as it is: partitions are cut exactly, for programs that do not depend on them."""
    return request.chunks == 1 and not any(request.recompute) and not {BPIPE, LOOPED} & set(request.schedules)


def least_named(error: InfeasibleError, questions: Iterable[Request], limit: int) -> InfeasibleError:
    """``error``, which refuses ``limit`` bytes, or the one that names the least limit with which one of the questions has a plan.
    Those that need least by their bounds come first, which may spare the rest."""
    if error.memory_bytes is None:
        return error
    named, best, bounds = error.memory_bytes, None, LeastBytes()
    on_way: deque[Callable[[], _Plan | None]] = deque()
    todo = deque(sorted(questions, key=lambda asked: min((bounds.of(asked, n) for n in asked.ranks), default=0)))
    with SideBySide() as beside:
        while todo or on_way:
            while todo and len(on_way) < beside.window:
                lower = replace(todo.popleft(), limit=named - 1)
                lower = replace(lower, ranks=tuple(n for n in lower.ranks if not bounds.lacks(lower, n, named)))
                if lower.ranks:
                    on_way.append(beside.ask(partial(_leanest, lower)))
            plan = on_way.popleft()() if on_way else None
            if plan is not None and plan.needed < named:
                named, best = plan.needed, plan.found
    return error if best is None else _refusal(best.judge, best, limit)


def _refusal(judge: Judge, found: Found, limit: int) -> InfeasibleError:
    judge.limit = limit
    return judge.refuse(found.candidate)


def _leanest(asked: Request) -> _Plan | None:
    """The plan within the least limit that has one, of those up to the question's; None: none has."""
    best: _Plan | None = None
    while (found := _within(asked, asked.limit if best is None else best.needed - 1)) is not None:
        if best is None:                                       # what a far limit is refused for is near the least
            best = found
            named = _named(asked)
            found = None if named is None or named >= best.needed else _within(asked, named)
        best = found or best
    return best


def _within(asked: Request, limit: int) -> _Plan | None:
    try:
        found = plan_one(replace(asked, limit=limit))
    except InfeasibleError:
        return None
    return _Plan(max(found.judge.peak_bytes(found.candidate)), found)


def _named(asked: Request) -> int | None:
    try:
        plan_one(replace(asked, limit=1))
    except InfeasibleError as error:
        return error.memory_bytes
    return None
