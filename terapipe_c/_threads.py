"""Starting threads, which the system may refuse to create, and joining them, also after Ctrl-C."""
from __future__ import annotations

import os
import resource
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence

from ._core import ExecutionError

__all__ = ["Worker", "begin", "let_go", "no_thread", "refused", "start_all"]

LOOK_S = 0.25  # between two looks whether a thread is there still
TASKS = "/proc/self/task"  # those of this process, by their numbers


def _tasks() -> set[str]:
    try:
        return set(os.listdir(TASKS))
    except OSError:
        return {"unseen"}


class _Begun(threading.Event):
    """For which start() waits. Python's own is set by the thread that has begun, and never by one that finds no memory to do so
    (cpython issue 140746), as where `ulimit -v` leaves room for its stack and little more: it never returned."""

    def __init__(self) -> None:
        super().__init__()
        self._before = _tasks() - {"unseen"}

    def wait(self, timeout: float | None = None) -> bool:
        looks = 0       # in a row that found no new one: one alone may miss it, as a list ends early where a thread ends meanwhile
        while not super().wait(LOOK_S if timeout is None else timeout) and timeout is None:
            looks = 0 if _tasks() - self._before else looks + 1
            if looks > 1 and not self.is_set():
                raise RuntimeError("can't start new thread: it found no memory to begin with")
        return self.is_set()


class Worker(threading.Thread):
    """A thread whose join() waits for its end even after Ctrl-C interrupted an earlier join(): Python 3.11's takes the thread for
    ended from then on (a result of bpo-45274)."""

    def __init__(self, work: Callable[..., None], *args: object, name: str) -> None:
        super().__init__(target=work, args=args, name=name)
        self._did = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._did.set()

    def join(self, timeout: float | None = None) -> None:
        while self.ident is not None and not self._did.wait(LOOK_S if timeout is None else timeout):
            if timeout is not None or self.is_lost():
                return
        super().join(timeout)   # never started: Python says so

    def is_lost(self) -> bool:
        """Whether it has ended before it came to its work, for want of memory. Each thread is asked for by its number: a list of
        them ends early where another one ends meanwhile. /proc may be that of other processes than this one sees (unshare --pid),
        where all have other numbers: nobody can know there."""
        mine, its = (os.path.exists(f"{TASKS}/{number}") for number in (threading.get_native_id(), self.native_id))
        return self.native_id is not None and mine and not its and not self._did.is_set()


def no_thread(error: BaseException, what: str) -> ExecutionError:
    """The error to raise where Python could not start the thread for ``what``."""
    memory, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
    limits = [f"{name} (ulimit {letter} is {limit // unit} now)" for name, letter, limit, unit in (
        ("address space", "-v", memory, 1024), ("processes and threads of this user", "-u", processes, 1))
        if limit != resource.RLIM_INFINITY]  # fmt: skip
    more = " or ".join(["memory", *limits])
    return ExecutionError(f"no thread for {what} ({error}): fewer threads, or more {more}, would be right")


def refused(error: BaseException) -> bool:
    """Whether the error is Python's for a thread that cannot be started, and not, for example, a signal handler's RuntimeError."""
    return isinstance(error, RuntimeError) and any(
        f"{verb} new thread" in str(error) for verb in ("start", "create"))    # "create ... at interpreter shutdown": Python 3.12


def begin(thread: threading.Thread) -> None:
    """thread.start(), which ends in any case."""
    if hasattr(thread, "_started"):     # of threading's own, in any Python until now
        vars(thread)["_started"] = _Begun()
    try:
        thread.start()
    except RuntimeError:
        getattr(threading, "_limbo", {}).pop(thread, None)      # where it would be kept, with all that its work holds
        raise


def start_all(threads: Sequence[threading.Thread], give_up: Callable[[str], None]) -> None:
    """Start all threads. Where one cannot be started, tell the others by give_up(why), wait for their end, and raise
    ExecutionError. The same where a signal handler raises, as Ctrl-C does; its exception is raised as it is."""
    for started, thread in enumerate(threads):
        try:
            begin(thread)
        except BaseException as error:
            refusal = no_thread(error, f"{thread.name}, one of {len(threads)}") if refused(error) else error
            give_up(str(refusal) or type(error).__name__)
            for earlier in threads[:started + (not refused(error) and thread.ident is not None)]:
                earlier.join()
            if refusal is error:
                raise
            raise refusal from error


def let_go(errors: Iterable[BaseException]) -> None:
    """Give back what the frames hold in which threads failed that have ended, such as a GPU's memory. Errors refer to each other in
    rings, by the list that holds them: all would be kept until Python looks for such, or as long as somebody keeps an error."""
    for error in errors:
        traceback.clear_frames(error.__traceback__)
