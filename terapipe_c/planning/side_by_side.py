"""Questions that do not depend on each other, asked side by side on the cores that this process may use.

The answers do not depend on how many threads there are: each question says all that it is to know, and answers are taken in the
order of the questions. The C planners hold no lock of Python's while they work.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

from .. import _core
from .._threads import begin, refused
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
        self._most = min(_WINDOW, cores) if cores > 1 else 0
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()     # None: all is answered
        self._threads: list[threading.Thread] = []
        self.window = 1 if limited() else _WINDOW

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop[0] = 1
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            if thread.ident is not None:                       # else Ctrl-C came while it was started: it ends by itself
                thread.join()

    def ask(self, question: Callable[[], T]) -> Callable[[], T]:
        """What gives the question's answer, or raises its error. A question is to make itself what it changes."""
        if len(self._threads) < self._most:
            self._start()
        if not self._threads:
            return cache(question)
        future: Future[T] = Future()
        self._asked.put((future, question))
        return future.result

    def _start(self) -> None:
        """One thread more, if it can be had. A daemon, and none of ThreadPoolExecutor's: for those the interpreter waits even where
        the asking thread is a daemon, and they take no question once the main thread has ended, though others may still plan."""
        thread = threading.Thread(target=self._answer, name=f"terapipe plan {len(self._threads)}", daemon=True)
        self._threads.append(thread)
        try:
            begin(thread)
        except RuntimeError as error:
            if not refused(error):
                raise
            self._threads.pop()
            self._most = len(self._threads)

    def _answer(self) -> None:
        _core.deadline_stop_by(self._stop)
        try:
            while (asked := self._asked.get()) is not None:
                future, question = asked
                if self._stop[0]:
                    future.cancel()
                    continue
                try:
                    future.set_result(question())
                except BaseException as error:
                    future.set_exception(error)
        finally:
            _core.deadline_stop_by(None)
