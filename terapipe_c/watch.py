"""Watches over a rank that a launcher started, while it computes or waits in C: reports the first failure, and reacts to Ctrl-C,
SIGTERM and the launcher's end."""
from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from . import _core
from ._threads import start_all
from .environment import LAUNCHERS, Place
from .worker import GRACE_S, interruption, is_at_the_disk

__all__ = ["Watch"]

KILLERS = ("mpirun", "mpiexec", "srun")  # end all ranks as soon as one dies, by force, whatever these have still to say
TICK_S = 0.05
OTHERS_S = 0.3  # for the failure of another rank to be heard, over which a launcher may have sent SIGTERM
STUCK_S = 60.0  # until a rank of a GPU that has not come back after a failure will not: NCCL's abort can hang (NCCL issue 992)


class _Terminated(BaseException):
    """SIGTERM came, and has been told to all."""


class Watch:
    """While it is open: the first failure of any rank is printed on standard error as soon as it is known, where the launcher may
    leave this rank no time for an exception; Ctrl-C ends the run even if this rank waits for one that does not answer; SIGTERM
    tells the other ranks before it ends this process (both unless the program has a handler of its own); and the rank ends if its
    launcher is gone, or (gpu) if its GPU or NCCL keeps it STUCK_S after a failure: launchers wait for every rank, and a job that
    nobody ends holds all of its GPUs."""

    def __init__(self, region: _core.Region, place: Place, gpu: bool = False) -> None:
        self._region, self._place, self._over = region, place, threading.Event()
        self._thread = threading.Thread(target=self._listen, name="terapipe watch", daemon=True)
        self._pipe: tuple[int, int] | None = None
        self._before, self._deaf, self._ends, self._tells = -1, False, False, False
        self._launcher, self._launcher_fd = 0, -1
        self._gpu, self._failed_s = gpu, 0.0

    def __enter__(self) -> Watch:
        if self._place.launcher in KILLERS:
            with suppress(OSError, ValueError, AttributeError):     # no standard error
                self._region.tell(sys.__stderr__.fileno())  # type: ignore[union-attr]
        if threading.current_thread() is threading.main_thread():
            self._deaf = self._place.launcher == "mpiexec" and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            if self._deaf:      # by which Hydra tells of a death where it has been told to kill nobody; and kills who expects none
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            self._ends = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            self._tells = self._place.launcher in KILLERS and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            self._launcher = launcher_of(self._place)
            with suppress(OSError):
                self._launcher_fd = os.pidfd_open(self._launcher) if self._launcher else -1
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            _open.append(self)
            if self._tells:
                signal.signal(signal.SIGTERM, self._terminate)
            start_all([self._thread], lambda why: self._give_back(failed=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pipe is not None:
            self._over.set()
            self._thread.join()
            self._give_back(failed=error is not None)
        if kind is _Terminated:
            os.kill(os.getpid(), signal.SIGTERM)

    def _give_back(self, failed: bool) -> None:
        assert self._pipe is not None
        _open.remove(self)
        signal.set_wakeup_fd(self._before)
        if self._tells:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._deaf and not failed:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        for fd in (*self._pipe, self._launcher_fd):
            if fd >= 0:
                os.close(fd)

    def _in_a_fork(self) -> None:
        """Of this process, as a tokenizer's workers are, which their pool ends by SIGTERM: that would be written into our pipe."""
        with suppress(ValueError):      # a subinterpreter's
            signal.set_wakeup_fd(self._before)
            if self._tells:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _listen(self) -> None:
        assert self._pipe is not None
        poll = select.poll()
        if self._launcher_fd >= 0:
            poll.register(self._launcher_fd, select.POLLIN)
        while not self._over.wait(TICK_S):
            came = b""
            with suppress(BlockingIOError):
                came = os.read(self._pipe[0], 64)
            if signal.SIGINT in came and self._ends:
                self._region.abort("EABORTED", self._place.rank, interruption(self._place.rank, self._region))
            if signal.SIGTERM in came and self._tells:
                self._tell_of_sigterm()
                self._force()
            if poll.poll(0):
                who = f"{LAUNCHERS[self._place.launcher].names} (process {self._launcher}, which started rank {self._place.rank})"
                self._region.abort("EABORTED", -1, f"{who} is gone")
                self._force()
            if self._gpu and (why := self._region.aborted()) is not None:
                self._failed_s = time.monotonic() if is_at_the_disk() else self._failed_s or time.monotonic()
                if time.monotonic() - self._failed_s > STUCK_S:
                    self._give_up(why[2])

    def _give_up(self, why: str) -> None:
        text = (f"rank {self._place.rank} is ended: {STUCK_S:g} s ago the run failed ({why}), and still its GPU, or NCCL, does not "
                "let go of it\n")
        with suppress(OSError, ValueError, AttributeError):     # no standard error
            os.write(sys.__stderr__.fileno(), text.encode(errors="backslashreplace"))  # type: ignore[union-attr]
        os._exit(1)

    def _force(self) -> None:
        """This process is to end, whatever its program does about the abort."""
        if not self._over.wait(GRACE_S):
            os._exit(1)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Where another rank failed first its words come out, by the AbortedError that is on its way."""
        if self._tell_of_sigterm():
            raise _Terminated

    def _tell_of_sigterm(self) -> bool:
        """Tell all ranks that SIGTERM came; whether that is what ended the run."""
        rank, limit = self._place.rank, time.monotonic() + OTHERS_S
        while self._region.aborted() is None and time.monotonic() < limit:
            time.sleep(TICK_S / 10)
        self._region.abort("EABORTED", rank, f"rank {rank} was ended by SIGTERM {self._region.doing(rank)}")
        return (self._region.aborted() or ("", -1, ""))[1] == rank


_open: list[Watch] = []


def _in_a_fork() -> None:
    for watch in reversed(_open):       # each gives back what the one around it has
        watch._in_a_fork()


os.register_at_fork(after_in_child=_in_a_fork)


def launcher_of(place: Place) -> int:
    """The process that started the ranks of this machine, the nearest one above that is of no rank itself, as a shell between them
    would be. 0: it is not seen, or a user set a launcher's variables by hand, whose shell may end before its ranks."""
    one = LAUNCHERS[place.launcher]
    if not any(name in os.environ for name in one.jobs):
        return 0
    mark, pid = one.rank.encode() + b"=", os.getppid()
    with suppress(OSError):
        while pid > 1 and any(entry.startswith(mark) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        return pid if pid > 1 else 0
    return 0
