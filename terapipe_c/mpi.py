"""Messages over MPI, for `train(..., comm="mpi")`; and if they are not possible, why.

    tp.mpi.why_not()   # None, or a sentence
    tp.mpi.library()   # which MPI it is

The transport is the C module `_mpi`, built where mpicc is, of one MPI: MPICH's (and its relatives') does not run under the
mpirun of Open MPI, nor the other way round. It is imported when it is asked for. TERAPIPE_MPI_MODULE names another file to take its
place, built with another MPI.
"""
from __future__ import annotations

import atexit
import functools
import importlib
import importlib.machinery
import importlib.util
import os
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from . import _core
from .worker import share

__all__ = ["library", "why_not"]

OUTBOX_BYTES = 256 << 10, 16 << 20  # smallest and largest to one rank
LAUNCHERS = {"mpirun": "Open MPI's mpirun", "mpiexec": "MPICH's or Intel's mpiexec", "srun": "srun", "torchrun": "torchrun"}


def __dir__() -> list[str]:
    return __all__


def why_not() -> str | None:
    """Why messages cannot go over MPI here, or None where they can."""
    try:
        _module()
    except ImportError as error:
        return str(error)
    return None


def library() -> str:
    """The MPI that `_mpi` was built with and has loaded: "MPICH Version: 5.0.2", "Open MPI v5.0.11". ExecutionError where the
    package was built without it."""
    return " ".join(_core.mpi_library(load().transport).split())


def load() -> ModuleType:
    """The C module; ExecutionError where it is missing or does not load."""
    if missing := why_not():
        raise _core.ExecutionError(missing)
    return _module()


def connect(control: _core.Comm, launcher: str, largest: int = 0) -> _core.Comm:
    """The communicator of all ranks of `control`, which outlives it, with messages over MPI; every rank calls this. launcher: who
    started the ranks, as in `LAUNCHERS`. largest: bytes of a message. InvalidValueError: MPI's ranks are not these."""
    transport, ours = load().transport, library()
    who = LAUNCHERS[launcher]
    if launcher == "torchrun" or (launcher == "mpirun" and not ours.startswith("Open MPI")):   # MPI_Init would end the process
        raise _core.InvalidValueError(f"{who} started this rank, and it starts none of {ours}, which terapipe_c was built with: "
                                      f"{_right(ours)} would be right{_other(launcher)}, or comm='tcp'")
    for rank, theirs in enumerate(share(control, ours)):
        if theirs != ours:
            raise _core.InvalidValueError(f"rank {rank} has {theirs} and rank {control.rank} {ours}: one MPI on all ranks would be "
                                          "right")
    before = _shared_memory()
    rank, ranks = _core.mpi_start(transport)
    memory = _shared_memory() - before
    _finish_at_exit(memory)
    if (rank, ranks) != (control.rank, control.region.ranks):
        raise _core.InvalidValueError(f"{ours} says that this is rank {rank} of {ranks}, {who} that it is rank {control.rank} of "
                                      f"{control.region.ranks}: {_right(ours)} would be right{_other(launcher)}, or comm='tcp'")
    comm = _core.mpi_comm(transport, control, min(max(4 * largest, OUTBOX_BYTES[0]), OUTBOX_BYTES[1]))
    for name in memory:     # all have it: MPICH's would stay for ever where its ranks are killed; Open MPI's mpirun removes its own
        if Path(name).name.startswith("mpich_shm"):
            with suppress(OSError):     # another rank was first
                os.unlink(name)
    return comm


def _right(ours: str) -> str:
    launcher = "mpirun of Open MPI" if ours.startswith("Open MPI") else f"mpiexec of {ours.split()[0]}"
    return f"{launcher} (or an srun that speaks its PMI)"


def _other(launcher: str) -> str:
    return "" if launcher == "torchrun" else ", or a build with the mpicc of the MPI that started this"


def _shared_memory() -> frozenset[str]:
    """The files of shared memory that this process has mapped and that have names still."""
    with suppress(OSError):
        rows = (row.split(maxsplit=5) for row in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines())
        names = {row[5] for row in rows if len(row) == 6 and row[5].startswith("/dev/shm/")}
        return frozenset(name for name in names if not name.endswith(" (deleted)"))
    return frozenset()


@functools.cache
def _finish_at_exit(memory: frozenset[str]) -> None:
    """MPI cannot be initialised twice in a process, so it is finalised at the end of that, not of a run. memory: what this start
    has mapped (nothing where MPI was started before), which stays for ever where MPI is not finalised. A fork has no MPI of its
    own: to finalise the one it inherits would be to wait for the other ranks."""
    owner = os.getpid()

    def finish() -> None:
        if os.getpid() == owner and not _core.mpi_finish(_module().transport):
            for name in memory:
                with suppress(OSError):     # another rank was first
                    os.unlink(name)

    atexit.register(finish)


def _module() -> ModuleType:
    return _module_at(os.environ.get("TERAPIPE_MPI_MODULE", ""))


@functools.cache
def _module_at(path: str) -> ModuleType:
    name = f"{__package__}._mpi"
    if not path:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError("this terapipe_c was built without MPI: mpicc was missing or failed, or TERAPIPE_MPI was 0; with "
                              "mpicc in PATH, TERAPIPE_MPI=1 pip install . builds it or says what is wrong")
    elif not Path(path).is_file():
        raise ImportError(f"TERAPIPE_MPI_MODULE is {path!r}, which is no file")
    else:
        spec = importlib.util.spec_from_loader(name, importlib.machinery.ExtensionFileLoader(name, path))
    try:
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"{path or name} does not load: {error}: the MPI that it was built with, in LD_LIBRARY_PATH where that "
                          "is not in the place it was then, would be right, or a build with the mpicc of another") from error
    if not hasattr(module, "transport"):
        raise ImportError(f"TERAPIPE_MPI_MODULE is {path!r}, a module without a transport: not one of ours")
    return module
