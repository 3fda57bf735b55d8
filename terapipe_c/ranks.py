"""The ranks of a run as threads of this process or as processes of this machine. Nothing here knows of training.

Both kinds give the launcher the same three things: `events()`, what ranks say and how they end, in order; `stop()`, a
request; `kill()`, the end of those that did not hear the abort. A rank that dies without a word sets the abort itself
here, in the words of the operating system and of what the rank was doing.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import queue
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from . import _core, _rank
from ._threads import start_all
from .mapped import snapshot
from .worker import Arrays, Job, failures, pack, run_rank

__all__ = ["ProcessRanks", "Ranks", "ThreadRanks"]

THREADS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
                     "VECLIB_MAXIMUM_THREADS")
# A script and not -m, which would import the whole package first. -P: modules of the package must not shadow others of their name.
# utf8: as here, whatever the environment has of it, or the bytes of a file's name are others there.
COMMAND = ["-P", "-X", f"utf8={sys.flags.utf8_mode}", _rank.__file__]
Event = tuple[int, dict[str, Any]]


class Ranks(Protocol):
    pids: list[int]

    def events(self, timeout_s: float) -> Iterator[Event]:
        """What has happened by now, waiting at most timeout_s for the first: (rank, {"kind": ...}); {"kind": "exit"} is a
        rank's last."""

    def stop(self) -> None:
        """Ask every rank to end after its step. Any thread may call it."""

    def kill(self) -> None:
        """End by force what can be ended by force."""

    def halted(self) -> list[int]:
        """Those whose processes are stopped, as by SIGSTOP or a debugger: they hear nothing, and say nothing of it."""

    def close(self) -> None:
        """Give everything back, once every rank has ended."""

    def end(self) -> None:
        """For when nobody will watch them, and there is an abort: end them all, and give everything back."""


class ThreadRanks:
    """Threads of this process. Python ends no thread by force: they end at their next look at the abort word."""

    def __init__(self, job: Job, arrays: Arrays, region: _core.Region) -> None:
        self.pids: list[int] = []
        arrays = {name: snapshot(array) for name, array in arrays.items()}     # as those of processes: ours may be written to
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping = threading.Event()
        # Daemons, or Python would wait for them at exit before anybody could end them; launch.py's exit hook joins them.
        self._threads = [threading.Thread(target=self._run, args=(rank, job, dict(arrays), region), name=f"terapipe rank {rank}",
                                          daemon=True) for rank in range(region.ranks)]
        start_all(self._threads, lambda why: region.abort("ERUNTIME", -1, why))

    def _run(self, rank: int, job: Job, arrays: dict[str, np.ndarray], region: _core.Region) -> None:
        def emit(event: dict[str, Any]) -> None:
            self._events.put((rank, event))

        with failures(rank, region, emit):
            run_rank(job, rank, region, emit, self._stopping.is_set, arrays)
        emit({"kind": "exit"})

    def events(self, timeout_s: float) -> Iterator[Event]:
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=timeout_s)
            while True:
                yield self._events.get_nowait()

    def stop(self) -> None:
        self._stopping.set()

    def kill(self) -> None:
        pass

    def halted(self) -> list[int]:
        return []

    def close(self) -> None:
        for thread in self._threads:
            thread.join()

    end = close


class ProcessRanks:
    """Processes that were exec'ed, never forked from a Python that used threads: each with a socket and a pidfd here."""

    def __init__(self, job: Job, arrays: Arrays, region: _core.Region) -> None:
        self._region = region
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        shared: list[int] = []      # for every rank: the region, the job, the launcher's pidfd
        try:
            if region.fd is None:
                raise ValueError("processes need a region made with shared=True, still open")
            if not sys.executable:      # of a Python that another program embeds, or whose path nobody could find
                raise _core.ExecutionError(f"sys.executable is {sys.executable!r}: the path of the Python that ranks are to run, "
                                           "or processes=False, would be right")
            shared.append(_beyond_standard(os.dup(region.fd)))
            for fd in pack(job, arrays):
                shared.append(_beyond_standard(fd))
            shared.append(_beyond_standard(os.pidfd_open(os.getpid())))
            environment = _environment(job["threads_per_rank"])
            for rank in range(region.ranks):
                worker = _Worker(rank, shared, environment)
                self._workers.append(worker)
                self._selector.register(worker.channel, selectors.EVENT_READ, worker)
                self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError) and error.errno in _SHORTAGES:
                raise _short(error, region.ranks, len(self._workers)) from error
            raise
        finally:
            for fd in shared:
                os.close(fd)
        self.pids = [worker.process.pid for worker in self._workers]

    def end(self) -> None:
        """By force, and give everything back: for when nobody will watch them."""
        self.kill()
        for worker in self._workers:
            worker.process.wait()
        self.close()

    def events(self, timeout_s: float) -> Iterator[Event]:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:  # words before deaths: a rank's last words are read before its end is judged
            if key.fileobj is key.data.channel:
                yield from self._hear(key.data)
        for key, _ in ready:
            if key.fileobj is not key.data.channel and not key.data.ended:
                yield from self._bury(key.data)

    def _hear(self, worker: _Worker) -> Iterator[Event]:
        for line in worker.read():
            yield worker.rank, json.loads(line)
        if worker.silent:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.channel)

    def _bury(self, worker: _Worker) -> Iterator[Event]:
        self._selector.unregister(worker.pidfd)
        worker.ended = True
        code = worker.process.wait()
        if code != 0:  # the first words win: one who failed with words has set the abort before it ended
            self._region.abort("ECONNECTION", worker.rank,
                               f"rank {worker.rank} {_end(code)} {self._region.doing(worker.rank)}")
        yield from self._hear(worker)
        yield worker.rank, {"kind": "exit"}

    def stop(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.send(b"stop", socket.MSG_DONTWAIT)

    def kill(self) -> None:
        for worker in self._workers:
            if not worker.ended:
                worker.process.kill()

    def halted(self) -> list[int]:
        return [worker.rank for worker in self._workers if not worker.ended and _state(worker.process.pid) in ("T", "t")]

    def close(self) -> None:
        self._selector.close()
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process, from exec to burial."""

    def __init__(self, rank: int, descriptors: list[int], environment: dict[str, str]) -> None:
        self.rank, self.ended, self.silent, self._rest = rank, False, False, b""
        self.channel, socket_of_rank = socket.socketpair()
        region, *job, launcher = descriptors
        theirs = -1
        try:
            theirs = _beyond_standard(socket_of_rank.detach())
            words = [str(word) for word in (rank, region, theirs, *job, launcher)]
            out, err = (subprocess.DEVNULL if stream is None else None for stream in (sys.__stdout__, sys.__stderr__))
            self.process = subprocess.Popen([sys.executable, *COMMAND, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                            env=environment, pass_fds=[*descriptors, theirs], start_new_session=True)
        except BaseException:
            self.channel.close()
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except BaseException:
            self.process.kill()
            self.process.wait()
            self.channel.close()
            raise
        self.channel.setblocking(False)

    def read(self) -> list[bytes]:
        """The whole lines that have come; `silent` once there will be no more."""
        try:
            while not self.silent:
                data = self.channel.recv(1 << 16)
                self._rest += data
                self.silent = not data
        except BlockingIOError:
            pass
        except OSError:
            self.silent = True
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)


def _state(pid: int) -> str:
    """The letter of proc(5); an empty string where there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


_SHORTAGES = {errno.EMFILE: resource.RLIMIT_NOFILE, errno.EAGAIN: resource.RLIMIT_NPROC}


def _short(error: OSError, ranks: int, started: int) -> OSError:
    """What the system has too few of, for so many ranks."""
    limit = resource.getrlimit(_SHORTAGES[error.errno or 0])[0]
    what = (f"a limit of {limit} open files (ulimit -n): {2 * ranks + 16} more than this process has open"
            if error.errno == errno.EMFILE else
            f"a limit of {limit} processes and threads of this user (ulimit -u), or of its control group: more")
    return type(error)(error.errno, f"{os.strerror(error.errno or 0)}: {started} of {ranks} ranks were started under {what} "
                                    "would be right, or processes=False")


def _beyond_standard(fd: int) -> int:
    """The same descriptor, above those of standard input, output and error, which a rank has anew: where ours are closed, a
    new descriptor gets one of their numbers. Closes fd if it gives another."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _environment(threads: int) -> dict[str, str]:
    """Ours, with our sys.path (the working folder and notebooks' changes to it included) and one rank's share of cores.

    A relative entry ("" of `python -c`, of a prompt or a notebook) is another folder after each chdir: a numpy.py there is not what
    we imported. So such come last until a rank has imported the package (_rank.py), but for one that it or NumPy is from."""
    ours = {os.path.dirname(os.path.dirname(os.path.abspath(module.__file__ or ""))) for module in (np, _rank)}
    paths: list[str] = []
    late: list[str] = []
    for path in sys.path:
        with contextlib.suppress(FileNotFoundError):    # relative to a working directory that has been deleted
            if isinstance(path, str):
                paths.append(os.path.abspath(path))
                late += paths[-1:] if not os.path.isabs(path) and paths[-1] not in ours else []
    first = [path for path in paths if path not in late]
    return {**os.environ, **dict.fromkeys(THREADS_VARIABLES, str(threads)), _rank.PATHS: json.dumps(paths),
            "PYTHONPATH": _rank.joined([*first, *dict.fromkeys(late)])}


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and no word,"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"was killed by signal {-code}"
