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

_WORK = 2_500_000_000     # ticks of the judges (about 13 ns each) after which no question is put any more


class _Plan(NamedTuple):
    needed: int           #: bytes of its fullest rank
    found: Found


class _Asked:
    """A question, which may be put several times, and the work of its judges."""

    def __init__(self, request: Request, most: int) -> None:
        self.request, self.most = request, most
        self.judges: list[Judge] = []

    @property
    def work(self) -> int:
        return sum(judge.work for judge in self.judges)

    def plan(self, limit: int) -> _Plan | None:
        """The plan within so many bytes; None: none fits."""
        found = self._put(limit)
        return None if isinstance(found, InfeasibleError) else _Plan(max(found.judge.peak_bytes(found.candidate)), found)

    def named(self) -> int | None:
        """The bytes that are named where next to nothing is allowed."""
        found = self._put(1)
        return found.memory_bytes if isinstance(found, InfeasibleError) else None

    def _put(self, limit: int) -> Found | InfeasibleError:
        asked = replace(self.request, limit=limit)

        def judge_of(ranks: int) -> Judge:
            self.judges.append(asked.judge(ranks))
            return self.judges[-1]

        try:
            return plan_one(asked, judge_of)
        except InfeasibleError as error:
            return error

    def leanest(self) -> _Plan | None:
        """The plan within the least limit that has one, of those up to the request's; None: none has."""
        best = self.plan(self.request.limit)
        if best is not None and (named := self.named()) is not None and named < best.needed:    # it is near the least
            best = self.plan(named) or best
        while best is not None and self.work < self.most and (less := self.plan(best.needed - 1)) is not None:
            best = less
        return best


def is_least(request: Request) -> bool:
    """Whether terapipe's refusal names the least as it is: partitions are cut exactly, for programs that do not depend on them."""
    return request.chunks == 1 and not any(request.recompute) and not {BPIPE, LOOPED} & set(request.schedules)


def least_named(error: InfeasibleError, questions: Iterable[Request], limit: int) -> InfeasibleError:
    """``error``, which refuses ``limit`` bytes, or the one that names the least limit with which one of the questions has a plan.
    Those that need least by their bounds come first, which may spare the rest."""
    if error.memory_bytes is None:
        return error
    named, best, bounds, left = error.memory_bytes, None, LeastBytes(), _WORK
    on_way: deque[tuple[_Asked, Callable[[], _Plan | None]]] = deque()
    todo = deque(sorted(questions, key=lambda asked: min((bounds.of(asked, n) for n in asked.ranks), default=0)))
    with SideBySide() as beside:
        while (todo and left > 0) or on_way:
            while todo and left > 0 and len(on_way) < beside.window:
                lower = replace(todo.popleft(), limit=named - 1)
                lower = replace(lower, ranks=tuple(n for n in lower.ranks if not bounds.lacks(lower, n, named)))
                if lower.ranks:
                    asked = _Asked(lower, left)
                    on_way.append((asked, beside.ask(asked.leanest)))
            if on_way:
                asked, answer = on_way.popleft()
                plan = answer()
                left -= asked.work
                if plan is not None and plan.needed < named:
                    named, best = plan.needed, plan.found
    return error if best is None else _refusal(best.judge, best, limit)


def _refusal(judge: Judge, found: Found, limit: int) -> InfeasibleError:
    judge.limit = limit
    return judge.refuse(found.candidate)
