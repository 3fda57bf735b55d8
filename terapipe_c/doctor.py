"""What this machine offers and what would stop a run: each finding says what is wrong and what to do."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Finding", "examine"]

OK, NOTE, WRONG = "ok", "note", "wrong"
KEPT = "checkpoints take 12 bytes a parameter, the newest two are kept"
#: Where version 2 of control groups, which names no controllers, and the CPU's of version 1 may be.
CPU_GROUPS = {"": ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "cpu": ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")}
CUDA_ALONE = 'not here; needed only for backend="cuda"'
CUDNN_ALONE = "not here; needed only for TERAPIPE_ATTENTION=cudnn"
#: All that the package, its C and its build ask the environment for by such a name.
VARIABLES = tuple(f"TERAPIPE_{name}" for name in """
    ATTENTION COMM CUBLASLT CUDA CUDA_ARCHS CUDA_GRAPHS CUDA_MODULE CUDNN ISA MPI MPI_MODULE NCCL NCCL_ONE_GPU SANITIZE SWAP_DIR
    SYS_PATH TOKEN WERROR
""".split())


@dataclass(frozen=True)
class Finding:
    """One line of the report; `wrong` means that training here will fail, `note` that something could be better."""

    name: str
    value: str
    status: str = OK
    advice: str = ""


def examine(folder: str | os.PathLike[str] = ".") -> list[Finding]:
    """Look at everything; `folder` is where runs would be written. Nothing stays changed."""
    def disk() -> Iterator[Finding]:
        return _disk(Path(folder))

    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _core,
        _variables,
        _cores,
        _memory,
        _shared_memory,
        _processes,
        _limits,
        _mpi,
        _gpus,
        disk,
    ]
    out: list[Finding] = []
    for check in checks:
        try:
            out.extend(check())
        except Exception as error:  # a strange machine must not stop the report
            out.append(Finding(check.__name__.strip("_"), f"could not be examined: {error}", NOTE))
    return out


def _python() -> Iterator[Finding]:
    right = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        f"{platform.python_version()} at {sys.executable}",
        OK if right else WRONG,
        "" if right else "Python 3.11 or newer is needed",
    )
    major = int(np.__version__.split(".")[0])
    right = (1, 26) <= tuple(map(int, np.__version__.split(".")[:2])) and major < 3
    yield Finding("numpy", np.__version__, OK if right else WRONG, "" if right else "pip install 'numpy>=1.26,<3'")
    found = importlib.util.find_spec("tqdm") is not None
    yield Finding(
        "tqdm",
        "installed" if found else "not installed",
        OK if found else NOTE,
        "" if found else "pip install tqdm: a progress bar in terminals and notebooks",
    )


def _core() -> Iterator[Finding]:
    try:
        core = importlib.import_module("terapipe_c._core")
    except ImportError as error:
        yield Finding("_core", str(error), WRONG, "the C module does not load: pip install . again with gcc here")
        return
    yield Finding("_core", str(core.__file__))
    if asked := os.environ.get("TERAPIPE_ISA"):
        known = core.kernel_isas()
        yield Finding("TERAPIPE_ISA", asked, NOTE if asked in known else WRONG,
                      f"the kernels are {asked}'s, whatever is the best here" if asked in known else
                      f"this processor has {', '.join(known)}: one of them, or none, would be right")


def _variables() -> Iterator[Finding]:
    """Names that nobody asks for: a misspelt setting has no effect, and nothing else says so. What it is may be a secret."""
    import difflib  # which nothing else wants

    for name in sorted(os.environ):
        if name.upper().startswith("TERAPIPE_") and name not in VARIABLES:
            near = difflib.get_close_matches(name.upper()[9:], [known[9:] for known in VARIABLES], 1)
            right = f"TERAPIPE_{near[0]}" if near else f"one of {', '.join(VARIABLES)}"
            yield Finding(name.encode("ascii", "backslashreplace").decode(), "set, and read by nobody", NOTE,
                          f"{right} would be right")


def _cores() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    text = f"{cores} usable of {os.cpu_count()}" + (f", limited to {quota:g} by the container" if quota else "")
    few = quota is not None and quota < cores
    yield Finding(
        "cores",
        text,
        NOTE if few else OK,
        f"use at most {max(1, int(quota or 1))} ranks x threads_per_rank" if few else "",
    )
    busy = os.getloadavg()[0]
    crowded = busy > 0.5 * cores
    yield Finding(
        "load",
        f"{busy:.1f} over the last minute",
        NOTE if crowded else OK,
        "other programs use these cores: profiles and step times will be off" if crowded else "",
    )
    info = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    lines = [line.partition(":") for line in info.split("\n\n")[0].splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = set(fields.get("flags", "").split())
    best = _kernels()
    if best is None:        # _core says why
        return
    refused = best == "AVX-512" and "amx_bf16" in flags
    yield Finding(
        "instruction set",
        f"{best} ({fields.get('model name', platform.machine())})",
        NOTE if best == "portable" or refused else OK,
        "no AVX2: the portable kernels run, several times slower" if best == "portable" else
        "the system refuses AMX's registers to this process (arch_prctl): AVX-512 runs, about half as fast" if refused else "",
    )


def _kernels() -> str | None:
    """The best instruction set of the kernels here; None where they do not load."""
    try:
        sets = importlib.import_module("terapipe_c._core").kernel_isas()
    except ImportError:
        return None
    names = {"amx": "AMX with AVX-512", "avx512": "AVX-512", "avx2": "AVX2"}
    return next((name for isa, name in names.items() if isa in sets), "portable")


def cpu_quota(root: str | os.PathLike[str] = "/") -> float | None:
    """Cores that this process's control groups, and those that they are in, let it keep busy; None: all. Of a container the
    mounted folder may be its own group, whatever path it has outside: the folder itself is always looked at."""
    found: list[float] = []
    with suppress(OSError):
        for line in os.fsdecode(Path(root, "proc/self/cgroup").read_bytes()).splitlines():
            # number:controllers:path, none of version 2
            names, _, group = line.partition(":")[2].partition(":")
            for name, mounts in CPU_GROUPS.items():
                for mount in mounts if name in names.split(",") else ():
                    top = Path(root, mount)
                    folder = Path(top, group.lstrip("/"))
                    groups = [one for one in (folder, *folder.parents) if one.is_relative_to(top) and ".." not in one.parts]
                    found += [quota for one in groups if (quota := _quota(one)) is not None]
    return min(found, default=None)


def usable_cores() -> int:
    """Whole cores that this process may keep busy, at least 1: those that it may run on, or as many as its control groups allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota(group: Path) -> float | None:
    """What one group says; None: nothing."""
    with suppress(OSError, ValueError):         # a group without this controller has no such file; "max" is no number
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None      # -1: none
    return None


def _memory() -> Iterator[Finding]:
    total, available, grouped = importlib.import_module("terapipe_c._core").memory_room()
    if total is None or available is None:
        yield Finding("memory", "the system does not say how much there is", NOTE,
                      "give plan(memory_bytes=...) what a rank may use")
        return
    low = available < 1 << 30
    yield Finding(
        "memory",
        f"{_size(available)} available of {_size(total)}" + (", limited by the container" if grouped else ""),
        NOTE if low else OK,
        "little memory: give plan(memory_bytes=...) what a rank may use" if low else "",
    )


def _shared_memory() -> Iterator[Finding]:
    try:
        fd = os.memfd_create("terapipe-doctor", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        yield Finding(
            "memfd",
            str(error),
            WRONG,
            "Linux 3.17 or newer is needed for ranks as processes; processes=False still works",
        )
        return
    try:
        os.posix_fallocate(fd, 0, 16 << 20)
        yield Finding("memfd", "16 MiB reserved and freed")
    except OSError as error:
        yield Finding(
            "memfd",
            str(error),
            WRONG,
            "a file may have no more bytes, and ranks share memory by one: ulimit -f unlimited" if error.errno == errno.EFBIG else
            "no memory left: free some or raise the container's limit (docker --memory; --shm-size is of /dev/shm alone)",
        )
    finally:
        os.close(fd)
    if Path("/dev/shm").is_dir():
        stat = os.statvfs("/dev/shm")
        yield Finding(
            "/dev/shm", f"{_size(stat.f_bavail * stat.f_frsize)} free (not used by terapipe_c, which uses memfd; but of comm='mpi' "
            "MPICH's ranks end by SIGBUS where there are not 1.1 MB for each)"
        )


def _processes() -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding("pidfd", f"works (Linux {platform.release()})")
    except (AttributeError, OSError) as error:
        yield Finding(
            "pidfd",
            str(error),
            WRONG,
            "Linux 5.3 or newer is needed for ranks as processes; processes=False still works",
        )


def _limits() -> Iterator[Finding]:
    for name, kind, least in (("open files", resource.RLIMIT_NOFILE, 256), ("processes", resource.RLIMIT_NPROC, 64)):
        soft, hard = resource.getrlimit(kind)
        low = soft != resource.RLIM_INFINITY and soft < least
        flag = "-n" if name == "open files" else "-u"
        yield Finding(
            f"limit: {name}",
            _limit(soft),
            WRONG if low else OK,
            f"ulimit {flag} {least} or more (hard limit {_limit(hard)})" if low else "",
        )
    for name, kind in (("address space", resource.RLIMIT_AS), ("file size", resource.RLIMIT_FSIZE)):
        soft, _ = resource.getrlimit(kind)
        bounded = soft != resource.RLIM_INFINITY
        yield Finding(
            f"limit: {name}",
            _size(soft) if bounded else "unlimited",
            NOTE if bounded else OK,
            "larger models or checkpoints will fail at this limit" if bounded else "",
        )


def _mpi() -> Iterator[Finding]:
    try:
        from . import mpi
    except ImportError:   # said above, of _core
        return
    why = mpi.why_not()
    built = importlib.util.find_spec("terapipe_c._mpi") is not None or bool(os.environ.get("TERAPIPE_MPI_MODULE"))
    yield Finding("_mpi", why or f"{mpi.library()}: train(..., comm='mpi')", NOTE if why and built else OK,
                  "built, but messages cannot go over MPI" if why and built else "")


def _attention(index: int) -> Finding:
    """By which kernel a GPU computes attention in bf16."""
    from . import cuda
    from ._core import ExecutionError, InvalidValueError

    asked = os.environ.get("TERAPIPE_ATTENTION")
    told = f", as TERAPIPE_ATTENTION={asked} asks" if asked in ("mma", "wgmma") else ""
    if asked == "cudnn":
        told = "; where reproducible=False the forward is cuDNN's, as TERAPIPE_ATTENTION=cudnn asks"
    try:
        kernel = cuda.attention_kernel(index)
    except (ExecutionError, InvalidValueError) as error:
        return Finding(f"attention of GPU {index}", "refused", NOTE, str(error))
    return Finding(f"attention of GPU {index}", ("by wgmma" if kernel == "wgmma" else "by mma.sync") + told, OK, "")


def _gpus() -> Iterator[Finding]:
    try:
        from . import cuda
        from ._core import ExecutionError
    except ImportError:   # said above, of _core
        return

    seen = Path("/dev/nvidiactl").exists()
    try:
        module = cuda.load()
    except ExecutionError as error:
        yield Finding("_cuda", str(error), NOTE, "no backend 'cuda', though a GPU is here" if seen else CUDA_ALONE)
        yield Finding("GPU", "an NVIDIA device is here" if seen else "none seen", OK if seen else NOTE, "" if seen else CUDA_ALONE)
        return
    found = cuda.versions()
    yield Finding("_cuda", f"{module.__file__} (CUDA runtime {found.runtime})")
    why = cuda.why_not()
    yield Finding(
        "CUDA driver",
        f"supports CUDA {found.driver}" if found.driver else "none",
        NOTE if why else OK,
        "" if not why else why if seen or found.driver else CUDA_ALONE,
    )
    if why:
        yield Finding("GPU", why, NOTE, "" if seen or found.driver else CUDA_ALONE)
    for device in cuda.devices():
        major, minor = device.capability
        right = major >= 8
        yield Finding(
            f"GPU {device.index}",
            f"{device.name}, compute capability {major}.{minor}, {device.multiprocessors} multiprocessors, "
            f"{_size(device.free_bytes)} free of {_size(device.total_bytes)}",
            OK if right else NOTE,
            "" if right else "backend 'cuda' needs compute capability 8.0 (Ampere) or newer",
        )
    for device in cuda.devices():
        if device.capability[0] >= 8:
            yield _attention(device.index)
    for library in found.libraries:
        usable = library.version != ""
        absent = "not found" if " at " not in library.why_not and "does not load" not in library.why_not else "cannot be used"
        needed = bool(found.driver) and (library.name != "cuDNN" or os.environ.get("TERAPIPE_ATTENTION") == "cudnn")
        yield Finding(
            library.name,
            f"{library.version} at {library.path}" if usable else absent,
            NOTE if library.lacks or not usable else OK,
            library.lacks if usable else library.why_not if needed else CUDNN_ALONE if library.name == "cuDNN" else CUDA_ALONE,
        )


def _is_there(path: Path) -> bool:
    """OSError where the system does not tell: from Python 3.14 on, Path.exists() says no then."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
        return True
    return False


def _disk(folder: Path) -> Iterator[Finding]:
    asked = folder
    try:
        folder.absolute()           # the working directory may have been deleted
        while not _is_there(folder) and folder != folder.parent:
            folder = folder.parent
    except OSError as error:        # it, or one above, may not be looked into, has a name that is too long, or is gone
        yield Finding("folder", f"{asked}: {error.strerror}", WRONG, "give --out a folder you may write to")
        return
    why = ""
    if folder.is_dir():
        try:
            with tempfile.TemporaryFile(dir=folder):  # without a name; os.access says yes to root in /proc, too
                pass
        except OSError as error:
            why = f" ({error.strerror})"
    writable = folder.is_dir() and not why
    yield Finding(
        "folder",
        f"{folder.resolve()} is {'' if writable else 'not ' if folder.is_dir() else 'no folder that is '}writable{why}",
        OK if writable else WRONG,
        "" if writable else "give --out a folder you may write to",
    )
    stat = os.statvfs(folder)
    if not stat.f_blocks:
        yield Finding("disk", "the file system does not say what is free", NOTE, KEPT)
        return
    free = stat.f_bavail * stat.f_frsize
    yield Finding(
        "disk",
        f"{_size(free)} free",
        WRONG if free < 1 << 20 else NOTE if free < 1 << 30 else OK,
        "no room for a run's files: give --out a folder of another disk" if free < 1 << 20 else KEPT if free < 1 << 30 else "",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if float(f"{count:.3g}") < 1000:           # else 1e+03
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
