"""A limit of time on what a thread plans: the C planners' loops read it too (csrc/base/deadline.h).

Without one nothing here reads a clock, and planning counts work alone: the same request gives the same plan.
"""
from __future__ import annotations

from .. import _core
from .._core import DeadlineError

__all__ = ["check_time", "late", "left_s", "limited", "share", "within", "without"]

_LONG_S = 1e9          # as good as none


class within:
    """What is planned here ends in so many seconds, or with what is around it, if that is sooner; None: nothing new.

    No generator: one that Ctrl-C ended early would restore what was before whenever it is collected, under another plan.
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
    """What is planned here has no limit: what must be there in any case, and takes little."""

    def __enter__(self) -> None:
        self._before = _core.deadline_get()
        _core.deadline_set(0)

    def __exit__(self, *exception: object) -> None:
        _core.deadline_set(self._before)


def share(part: float) -> within:
    """What is planned here has this part of the time that is left."""
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
    """DeadlineError where there is no time left, or its share of it stopped what could have been a plan."""
    if stopped or late():
        raise DeadlineError("no time was left for a plan: a longer time_limit_s would be right")
