"""What becomes of a rank that a launcher started while it computes or waits in C: its last words, and Ctrl-C."""
from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import TracebackType

from . import _core
from ._threads import start_all
from .environment import Place
from .worker import interruption

__all__ = ["Watch"]

KILLERS = ("mpirun", "mpiexec", "srun")  # end all ranks as soon as one dies, by force, whatever these have still to say
TICK_S = 0.05


class Watch:
    """While it is open, the first failure of any rank is said on standard error the moment it is known, where the launcher may give
    this rank no time for an exception; and Ctrl-C ends the run though this rank waits for one that does not answer, unless the
    program has a handler of its own for it."""

    def __init__(self, region: _core.Region, place: Place) -> None:
        self._region, self._place, self._over = region, place, threading.Event()
        self._thread = threading.Thread(target=self._listen, name="terapipe watch", daemon=True)
        self._pipe: tuple[int, int] | None = None
        self._before, self._deaf, self._ends = -1, False, False

    def __enter__(self) -> Watch:
        if self._place.launcher in KILLERS:
            with suppress(OSError, ValueError, AttributeError):     # no standard error
                self._region.tell(sys.__stderr__.fileno())  # type: ignore[union-attr]
        if threading.current_thread() is threading.main_thread():
            self._deaf = self._place.launcher == "mpiexec" and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            if self._deaf:      # by which Hydra tells of a death where it has been told to kill nobody; and kills who expects none
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            self._ends = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            start_all([self._thread], lambda why: self._give_back(failed=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pipe is not None:
            self._over.set()
            self._thread.join()
            self._give_back(failed=error is not None)

    def _give_back(self, failed: bool) -> None:
        assert self._pipe is not None
        signal.set_wakeup_fd(self._before)
        if self._deaf and not failed:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        for fd in self._pipe:
            os.close(fd)

    def _listen(self) -> None:
        assert self._pipe is not None
        while not self._over.wait(TICK_S):
            with suppress(BlockingIOError):
                if signal.SIGINT in os.read(self._pipe[0], 64) and self._ends:
                    self._region.abort("EABORTED", self._place.rank, interruption(self._place.rank, self._region))
