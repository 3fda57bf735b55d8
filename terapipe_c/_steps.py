"""The step folders of a run: put in place as a whole, and cleaned up after writers that were killed."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ._core import StorageError
from ._files import free_bytes, naming

STEP_FOLDER = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.(?:step-\d{8,}|latest)\.tmp-(\d+)(?:\.\d+)?")
ASIDE = re.compile(r"\.(step-\d{8,})\.old-(\d+)")

STATE = "state.json"    # without which it is no checkpoint
CHECKPOINTS = "checkpoints"     # folder of them inside a run folder
KEEP = 2                        # complete ones that a run leaves

under_way: set[str] = set()     # this process's temporary step folders, by their real paths
one_at_a_time = threading.RLock()   # names in run folders are given and taken by one thread of this process at a time


def _begin_alone() -> None:
    """A child that is forked meanwhile has none of the threads that would let go of it, and writes none of their folders."""
    global one_at_a_time  # noqa: PLW0603
    one_at_a_time = threading.RLock()
    under_way.clear()


os.register_at_fork(after_in_child=_begin_alone)


def step_folders(run_folder: Path) -> list[Path]:
    if not run_folder.is_dir():
        return []
    return [p for p in run_folder.iterdir() if STEP_FOLDER.fullmatch(p.name) and p.is_dir()]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(run_folder: Path) -> list[Path]:
    return [path for path in step_folders(run_folder) if (path / STATE).is_file()]


def written_ns(folder: Path) -> int:
    return (folder / STATE).stat().st_mtime_ns     # not by number: a resumed run may go back in steps


def date_after_others(fd: int, run_folder: Path) -> None:
    """Date the state that is being written after those that are there, by whose times the newest is told: where the clock was set
    back, or is another machine's, each new checkpoint was an old one, which went before its elders."""
    last = 0
    for run in (run_folder, run_folder / CHECKPOINTS, *([run_folder.parent] if run_folder.name == CHECKPOINTS else [])):
        with suppress(OSError):     # a parent that nobody may list
            for folder in step_folders(run):
                with suppress(OSError):     # no checkpoint, or one that another process removes
                    last = max(last, written_ns(folder))
    for later in (1, 2 * 10**9):    # the second where a file system knows no nanoseconds
        with suppress(OSError):
            if os.fstat(fd).st_mtime_ns <= last:
                os.utime(fd, ns=(last + later, last + later))


def put_aside(run_folder: Path) -> list[tuple[Path, Path, int]]:
    """(folder, the step folder that it was, pid of the process that put it aside) of each folder that a killed `put_in_place` left.
    Where the step folder does not exist it is the only checkpoint of its step."""
    if not run_folder.is_dir():
        return []
    found = ((p, ASIDE.fullmatch(p.name)) for p in run_folder.iterdir())
    return [(p, run_folder / match[1], int(match[2])) for p, match in found if match and p.is_dir()]


def new_folder(run_folder: Path, step: int) -> Path:
    """A temporary folder that no other writer has, of the same step either; what killed writers left is gone. Its real path is in
    ``under_way`` from now on."""
    plain = f".{step_name(step)}.tmp-{os.getpid()}"
    with one_at_a_time:
        remove_stale(run_folder)
        names = itertools.chain([plain], (f"{plain}.{k}" for k in itertools.count(1)))
        folder = next(path for path in map(run_folder.joinpath, names) if os.path.realpath(path) not in under_way)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        under_way.add(os.path.realpath(folder))
    return folder


def check_room(run_folder: Path, nbytes: int, job: Mapping[str, Any]) -> None:
    """StorageError where the job's checkpoints would not fit, which their writer would say after hours of training."""
    if _more_at_once(run_folder, job) * nbytes > free_bytes(run_folder) and run_folder.is_dir():
        remove_stale(run_folder)        # as its writer will
    free, more = free_bytes(run_folder), _more_at_once(run_folder, job)
    if more * nbytes > free:
        what = (f"a checkpoint has {nbytes} bytes" if more == 1 else
                f"{more} more checkpoints of {nbytes} bytes will be there at once (the newest {KEEP} stay until the next is whole)")
        right = "or checkpoint_every=0," if more == 1 else "a larger checkpoint_every, or 0,"
        refusal = StorageError(f"{what}, and {run_folder} has {free} free: {more * nbytes - free} bytes short; a folder on another "
                               f"disk, {right} would be right")
        refusal.errno = errno.ENOSPC
        raise refusal


def _more_at_once(run_folder: Path, job: Mapping[str, Any]) -> int:
    """How many checkpoints more than now will be there at once."""
    there = [path.name for path in sorted(complete(run_folder), key=written_ns)]
    now = most = len(there)
    for step in _saved(job):
        most = max(most, len(there) + 1)
        there = [*(name for name in there if name != step_name(step)), step_name(step)][-KEEP:]
        if most > KEEP:
            break       # from here on it is no more
    return most - now


def _saved(job: Mapping[str, Any]) -> Iterator[int]:
    """The steps done when a checkpoint is written; of a job without steps, none."""
    every, first, last = job["checkpoint_every"], job["first_step"], job["steps"]
    yield from range(first - first % every + every, last, every)
    yield last


def remove_stale(run_folder: Path) -> None:
    """Remove what killed writers left, one that had our number too, as each container's first processes have the same; a step's
    only checkpoint gets its name back."""
    with one_at_a_time:
        for path in run_folder.iterdir():
            match = TEMPORARY.fullmatch(path.name)
            if match is None:
                continue
            real_folder, pid = path.is_dir() and not path.is_symlink(), int(match[1])
            if not _alive(pid) or (pid == os.getpid() and real_folder and os.path.realpath(path) not in under_way):
                shutil.rmtree(path, ignore_errors=True) if real_folder else path.unlink(missing_ok=True)
        for path, step, pid in put_aside(run_folder):
            if pid != os.getpid() and _alive(pid):  # one that had our number is dead: we put nothing aside now
                continue
            if step.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(step)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def put_in_place(folder: Path, final: Path) -> None:
    """Rename; where a checkpoint of this step is already there, swap the two atomically, so that there is always one."""
    if not final.exists():
        folder.rename(final)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, exchange = -100, 2
    if not hasattr(libc, "renameat2") or libc.renameat2(
        at_fdcwd, os.fsencode(folder), at_fdcwd, os.fsencode(final), exchange
    ):
        aside = final.with_name(f".{final.name}.old-{os.getpid()}")  # an old file system: two renames; `put_aside` finds it
        try:
            final.rename(aside)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _put_files_in_place(folder, final)
            return
        try:
            folder.rename(final)
        except BaseException:
            aside.rename(final)
            raise
        shutil.rmtree(aside, ignore_errors=True)
        return
    shutil.rmtree(folder, ignore_errors=True)


def _put_files_in_place(folder: Path, final: Path) -> None:
    """Where not even a folder can be renamed, as one of a container's image (overlayfs): the state goes first and comes last."""
    (final / STATE).unlink(missing_ok=True)
    names = sorted(os.listdir(folder), key=lambda name: name == STATE)
    for name in set(os.listdir(final)) - set(names):
        with suppress(OSError):
            (final / name).unlink()
    for name in names:
        os.replace(folder / name, final / name)
    fsync(final)
    shutil.rmtree(folder, ignore_errors=True)


def remove_step(folder: Path, newest: Path) -> None:
    """Renamed first, so that nobody reads a half-deleted one; a folder of a container's image cannot be, and loses its state.
    Another process may take ``newest``, which it makes room for, for an old one: then this gets its name back, or both would go."""
    doomed = folder.with_name(f".{folder.name}.tmp-{os.getpid()}.0")
    with suppress(OSError):
        try:
            folder.rename(doomed)
            if not (newest / STATE).is_file():
                doomed.rename(folder)
                return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            (folder / STATE).unlink()
            doomed = folder
        shutil.rmtree(doomed)


def point_latest(run_folder: Path, name: str) -> None:
    temporary = run_folder / f".latest.tmp-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(name)
    except OSError:
        temporary.write_text(name + "\n")
    temporary.replace(run_folder / "latest")
    fsync(run_folder)
