"""Which GPUs does this machine have, and if none can be used, why?

    tp.cuda.device_count()   # 0 where there is no driver: nothing raises
    tp.cuda.why_not()        # None, or a sentence
    tp.cuda.devices()        # what each is; asking makes no context on any
    tp.cuda.versions()       # driver, runtime and the libraries found

The backend is the C module `_cuda`, built where nvcc is (see the README). TERAPIPE_CUDA_MODULE names another file to take
its place: the emulated one of the tests, `python tests/cuda_emu.py`. TERAPIPE_ATTENTION chooses what computes attention in bf16:
"own", or nothing, is the package's fastest kernel for the GPU, wgmma on compute capability 9.0 (Hopper) and mma.sync elsewhere;
"mma" and "wgmma" ask for one (their bits differ: a reproducible run has one on all ranks); "cudnn" has cuDNN compute the forward
where reproducible=False (cuda/cudnn.h). A report's caveats say what came of it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ._core import Comm, ExecutionError, Region

__all__ = ["Device", "Library", "Versions", "attention_kernel", "device_count", "devices", "pipeline_on_one_gpu", "versions",
           "why_not"]

QUEUES_VARIABLE, QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32  # hardware queues; the driver reads it once


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Device:
    """One GPU, as the driver describes it."""

    index: int
    name: str
    capability: tuple[int, int]
    """Compute capability, (major, minor): (9, 0) is Hopper."""
    multiprocessors: int
    total_bytes: int
    free_bytes: int
    """Of its memory, when it was asked: by NVML, so that no context is made; all of it where NVML cannot tell."""
    shared_bytes: int
    """Shared memory that one block may take."""
    l2_bytes: int
    clock_hz: int
    """The highest clock of its multiprocessors."""
    memory_bytes_per_s: float
    """Bandwidth by clock and width of its bus: the data sheet's, not a measured one."""
    bus_id: str
    uuid: str


@dataclass(frozen=True)
class Library:
    """A library that is loaded at run time; `version` is empty and `why_not` says why where it was not. `lacks`: what this
    one cannot do, and what comes of it."""

    name: str
    path: str
    version: str
    why_not: str
    lacks: str = ""


@dataclass(frozen=True)
class Versions:
    """CUDA versions, "13.0", and the libraries; `driver` is what the driver supports, empty where there is none."""

    driver: str
    runtime: str
    libraries: tuple[Library, ...]


def device_count() -> int:
    """GPUs that this process may use; 0 where there is no driver, no GPU or no CUDA backend."""
    return 0 if _missing() else int(_module().device_count())


def why_not() -> str | None:
    """Why no GPU can be used here, or None where one can."""
    return _missing() or _module().why_not() or None


def devices() -> tuple[Device, ...]:
    """Every GPU that this process may use."""
    return tuple(_device(index) for index in range(device_count()))


def versions() -> Versions:
    """What is installed. ExecutionError where the package was built without the CUDA backend."""
    module = load()
    driver, runtime = module.versions()
    libraries = tuple(Library(name, *found) for name, found in module.libraries().items())
    return Versions(_version(driver), _version(runtime), libraries)


def attention_kernel(device: int = 0, dtype: str = "bf16") -> str:
    """Which of the package's kernels computes attention on that GPU: "wgmma" or "mma"; see TERAPIPE_ATTENTION above."""
    from .backend import choose

    number, bf16 = _number_of(device), choose("cuda", dtype).dtype == "bf16"
    return str(load().attention_kernel(number, int(bf16)))


def pipeline_on_one_gpu(region: Region, device: int = 0, timeout_s: float = 0.0,
                        largest: int = 16 << 20) -> tuple[list[Any], list[Comm]]:
    """Equal parts of one GPU (green contexts; `part` of an engine) and a communicator for each rank of the region. device: the
    GPU's number; timeout_s: a rank that waits longer for another fails, 0: it waits for ever; largest: bytes of a message at most,
    for four of which a rank has memory for each rank that it sends to."""
    from .device_comm import pipeline_on_one_gpu

    return pipeline_on_one_gpu(region, _number_of(device), timeout_s, largest)


def _number_of(device: Any) -> int:
    """A GPU's number as the C module takes it; InvalidValueError where it is none."""
    from .config import whole

    return whole("device", device, 0, 2**31 - 1)


def load() -> ModuleType:
    """The C module; ExecutionError where it is missing or does not load."""
    if missing := _missing():
        raise ExecutionError(missing)
    return _module()


def _device(index: int) -> Device:
    found = _module().describe(index)
    # two transfers a clock: the driver's clock is the bus's, memory is of double data rate
    rate = 2.0 * found["memory_clock_khz"] * 1000.0 * found["memory_bus_bits"] / 8.0
    return Device(
        index=index,
        name=found["name"],
        capability=(found["major"], found["minor"]),
        multiprocessors=found["multiprocessors"],
        total_bytes=found["total_bytes"],
        free_bytes=found["free_bytes"],
        shared_bytes=found["shared_bytes"],
        l2_bytes=found["l2_bytes"],
        clock_hz=found["clock_khz"] * 1000,
        memory_bytes_per_s=rate,
        bus_id=found["bus_id"],
        uuid=found["uuid"],
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _missing() -> str:
    """Why there is no module, or an empty string."""
    try:
        _module()
    except ImportError as error:
        return str(error)
    return ""


@functools.cache
def _module_at(path: str) -> ModuleType:
    os.environ.setdefault(QUEUES_VARIABLE, str(QUEUES))  # streams do not wait for each other
    if not path:
        name = f"{__package__}._cuda"
        if importlib.util.find_spec(name) is None:
            raise ImportError(
                "this terapipe_c was built without its CUDA backend: nvcc was missing or failed, or TERAPIPE_CUDA was 0; "
                "TERAPIPE_CUDA=1 pip install . says what is wrong"
            )
        module = importlib.import_module(name)
    else:
        if not os.path.isfile(path):  # pathlib's raises where a folder is not ours to look into
            raise ImportError(f"TERAPIPE_CUDA_MODULE is {path!r}, which is no file")
        name = Path(path).name.partition(".")[0]
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_loader(name, loader)
        if spec is None:
            raise ImportError(f"TERAPIPE_CUDA_MODULE is {path!r}, which is no Python module")
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise ImportError(f"TERAPIPE_CUDA_MODULE is {path!r}, which does not load: {error}") from error
        if not hasattr(module, "device_count"):
            raise ImportError(f"TERAPIPE_CUDA_MODULE is {path!r}, a module without device_count(): not our CUDA backend")
    module.set_folders(os.pathsep.join(_folders()))
    return module


def _module() -> ModuleType:
    return _module_at(os.environ.get("TERAPIPE_CUDA_MODULE", ""))


def _folders() -> list[str]:
    """Where the nvidia wheels of this Python put their libraries."""
    # import passes over what is no text, too, and over folders that are not ours to look into, where pathlib's is_dir raises
    below = [os.path.join(folder, "nvidia") for folder in sys.path if isinstance(folder, str) and folder]
    found = [os.path.join(top, part, "lib") for top in below for part in ("cu13", "nccl", "cudnn")]
    return [folder for folder in found if os.path.isdir(folder)]
