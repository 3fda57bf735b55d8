"""Threads that the system may refuse."""
from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Sequence

from ._core import ExecutionError

__all__ = ["no_thread", "start_all"]


def no_thread(error: RuntimeError, what: str) -> ExecutionError:
    """What to raise where Python said so of the thread for ``what``."""
    memory, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
    limits = [f"{name} (ulimit {letter} is {limit // unit} now)" for name, letter, limit, unit in (
        ("address space", "-v", memory, 1024), ("processes and threads of this user", "-u", processes, 1))
        if limit != resource.RLIM_INFINITY]  # fmt: skip
    more = " or ".join(["memory", *limits])
    return ExecutionError(f"no thread for {what} ({error}): fewer threads, or more {more}, would be right")


def start_all(threads: Sequence[threading.Thread], give_up: Callable[[str], None]) -> None:
    """Start each; where one cannot be, tell those before it by give_up(why), wait for their end, and raise ExecutionError."""
    for started, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            refusal = no_thread(error, f"{thread.name}, one of {len(threads)}")
            give_up(str(refusal))
            for earlier in threads[:started]:
                earlier.join()
            raise refusal from error
