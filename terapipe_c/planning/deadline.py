"""A time limit for planning, one a thread; the loops of the C planners read it, too (csrc/base/deadline.h).

Without one nothing here reads a clock, and planning counts work alone: the same request gives the same plan.
"""
from __future__ import annotations

from .. import _core
from .._core import DeadlineError

__all__ = ["abandoning", "check_time", "late", "left_s", "limited", "share", "within", "without"]

_LONG_S = 1e9          # longer limits are cut to this: as good as none, and their nanoseconds fit 64 bits


class within:
    """Planning inside ends within so many seconds, or at the enclosing limit if that is sooner; None: no new limit.

    A class and not a generator (contextlib): one that Ctrl-C interrupts restores the limit only when it is garbage-collected, which
    may be during another plan.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._before = seconds, 0

    def __enter__(self) -> None:
        self._before = before = _core.deadline_get()
        own = 0
        if self._seconds is not None:
            own = _core.deadline_now() + int(min(max(self._seconds, 0.0), _LONG_S) * 1e9)
        _core.deadline_set(min(own, before) if own and before else own or before)

    def __exit__(self, *exception: object) -> None:
        _core.deadline_set(self._before)


class without:
    """Planning inside has no limit: for the little that must be done in any case."""

    def __enter__(self) -> None:
        self._before = _core.deadline_get()
        _core.deadline_set(0)

    def __exit__(self, *exception: object) -> None:
        _core.deadline_set(self._before)


class abandoning:
    """Within a limit, what is of no use unless it is complete, such as building a program, ends at the limit, too: with
    DeadlineError."""

    def __enter__(self) -> None:
        self._before = _core.deadline_abandon(_core.deadline_get() != 0)

    def __exit__(self, *exception: object) -> None:
        _core.deadline_abandon(self._before)


def share(part: float) -> within:
    """Planning inside may take this part of the time that is left."""
    return within(left_s() * part if limited() else None)


def limited() -> bool:
    """Is there a limit at all?"""
    return _core.deadline_get() != 0


def late() -> bool:
    """Is there no time left?"""
    return _core.deadline_late()


def left_s() -> float:
    """Seconds that are left of a limit."""
    return max(0.0, (_core.deadline_get() - _core.deadline_now()) * 1e-9)


def check_time(stopped: bool = False) -> None:
    """DeadlineError where no time is left, or where (``stopped``) something that could have given a plan used up its share."""
    if stopped or late():
        raise DeadlineError("no time was left for a plan: a longer time_limit_s would be right")
