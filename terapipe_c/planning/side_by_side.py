"""Questions that do not depend on each other, asked side by side on the cores that this process may use.

The answers do not depend on how many threads there are: each question says all that it is to know, and answers are taken in the
order of the questions. The C planners hold no lock of Python's while they work.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from .. import _core
from .._threads import refused
from .deadline import limited

__all__ = ["SideBySide"]

_WINDOW = 4    # questions on their way: what is asked may depend on the answers to all but so many before, whatever the machine

T = TypeVar("T")


class SideBySide:
    """Who asks: ``with SideBySide() as beside: answers = [beside.ask(question) for ...]; [answer() for answer in answers]``.

    Under a limit of time, which is the asking thread's, and where there is one core or no more threads can be had, a question is
    answered when its answer is wanted. Ctrl-C, or any other end of the ``with``, stops those on their way."""

    def __init__(self) -> None:
        self._stop = bytearray(1)
        cores = 1 if limited() else len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(min(_WINDOW, cores), "terapipe plan") if cores > 1 else None
        self.window = 1 if limited() else _WINDOW

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._stop[0] = 1
            self._pool.shutdown(cancel_futures=True)

    def ask(self, question: Callable[[], T]) -> Callable[[], T]:
        """What gives the question's answer, or raises its error, once or more. A question is to make itself what it changes: where
        no thread is left for it, it may be answered twice."""
        if self._pool is not None:
            try:
                return self._pool.submit(self._answer, question).result
            except RuntimeError as error:
                if not refused(error):
                    raise
        return cache(question)

    def _answer(self, question: Callable[[], T]) -> T:
        _core.deadline_stop_by(self._stop)
        try:
            return question()
        finally:
            _core.deadline_stop_by(None)
