"""The CUDA backend without CUDA: the kernels' sources, and stand-ins for cublasLt and the device, compiled by gcc into one Python
module, `_cuda_emu`, in .build/cuda-emu. Rebuilt when it is stale, by one process at a time.

    from cuda_emu import emulated, library
    module = emulated()      # the module, as terapipe_c.cuda would load it
    library().tp_cuda_gelu   # the same file through ctypes: every tp_ function is visible
    library(races=True)      # another, slower, that fails a launch whose threads race (cuda/emu/race.c)

Run as a script it builds and prints the path, for TERAPIPE_CUDA_MODULE.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.machinery
import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".build" / "cuda-emu"
# Visible symbols, for ctypes; a small tile of the head and small messages of gradients, so that small models cross their borders,
# a cache of few heads, blocks that soon are many, and gradients compared some rows at a time.
DEFINES = ["-DTP_CUDA_EMULATED", "-DTP_CUDA_HEAD_TILE=64", "-DTP_CUDA_CACHED_BYTES=40000", "-DTP_CUDA_SUM_FLOATS=512",
           "-DTP_CUDA_MANY_BLOCKS=16", "-DTP_CUDA_COMPARED_BYTES=2048"]  # fmt: skip


# Of the build that looks for races, which shares all but the emulator and the kernels with the other one; of the kernels alone:
# gcc's hooks at each access, and no libtsan behind them.
RACES, HOOKS = ["-DTP_CUDA_RACES"], ["-fsanitize=thread"]


@functools.cache
def build(races: bool = False) -> Path:
    """The module's path; whatever is stale is compiled first."""
    folder = FOLDER / "races" if races else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"_cuda_emu{sysconfig.get_config_var('EXT_SUFFIX')}"
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file
        before = os.getcwd()
        os.chdir(ROOT)
        try:
            _build(module, races)
        finally:
            os.chdir(before)
    return module


def _build(module: Path, races: bool) -> None:
    setup = runpy.run_path("setup.py", run_name="setup_py")
    # -O2: kernels are interpreted by fibers anyway; -O3 for the emulator, whose products were a quarter of all time. No
    # -Wmissing-prototypes: kernels are static behind a macro. -mfma: the same numbers, without a call for each.
    flags = [f for f in setup["FLAGS"] if f not in ("-fvisibility=hidden", "-O3")]
    if " fma " in Path("/proc/cpuinfo").read_text():
        flags.append("-mfma")
    flags += shlex.split(os.environ.get("CFLAGS", ""))  # -g for a debugger

    def compile_one(source: str) -> str:
        kernels, emulator = source.endswith(".cu"), source.startswith("cuda/emu/")
        apart = races and (kernels or emulator)
        output = (module.parent if apart else FOLDER) / Path(source).with_suffix(".o")
        more = [*RACES, *(HOOKS if kernels else [])] if apart else []
        command = ["gcc", "-c", "-O3" if emulator else "-O2", "-fPIC", "-I.", *flags, *DEFINES, *more, "-x", "c", source, "-o",
                   str(output)]  # fmt: skip
        setup["compile_if_stale"](output, shlex.join(command), lambda: run(command))
        return str(output)

    with ThreadPoolExecutor(setup["JOBS"]) as pool:
        objects = list(pool.map(compile_one, setup["cuda_sources"](emulated=True)))
    newest = max(os.stat(o).st_mtime_ns for o in objects)
    record = module.with_suffix(".objects")
    if not module.exists() or module.stat().st_mtime_ns < newest or record.read_text() != "\n".join(objects):
        fresh = module.with_suffix(".new")  # a process that has the old one loaded keeps it
        run(["gcc", "-shared", "-Wl,-Bsymbolic", "-o", str(fresh), *objects, "-lm", "-lpthread", "-ldl"])
        fresh.rename(module)
        record.write_text("\n".join(objects))


def run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{ran.stdout}{ran.stderr}")


@functools.cache
def emulated() -> ModuleType:
    """The module `_cuda_emu`, built if need be. One device of 4 GiB with compute capability 9.0, unless emu_machine says."""
    loader = importlib.machinery.ExtensionFileLoader("_cuda_emu", str(build()))
    spec = importlib.util.spec_from_loader("_cuda_emu", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def library(races: bool = False) -> ctypes.CDLL:
    """The same file, loaded once, through ctypes: the C functions, their signatures the caller's business."""
    return ctypes.CDLL(str(build(races=True)) if races else emulated().__file__)


# What tests/simt_cases.cu stands on.
OBJECTS = ["cuda/emu/simt", "cuda/emu/chance", "cuda/emu/ranges", "cuda/emu/mma", "cuda/emu/wgmma", "cuda/emu/device",
           "cuda/emu/graph", "cuda/emu/order", "cuda/emu/pipeline", "cuda/emu/apart", "cuda/device_common", "cuda/faults",
           "csrc/base/status", "csrc/base/clock"]  # fmt: skip


def simt_cases(folder: Path, races: bool = False) -> ctypes.CDLL:
    """tests/simt_cases.cu with an emulator of its own."""
    path, built = folder / "simt_cases.so", build(races).parent
    names = [*OBJECTS, *(["cuda/emu/race", "cuda/emu/race_phases"] if races else [])]
    objects = [str((built if name.startswith("cuda/emu/") else FOLDER) / f"{name}.o") for name in names]
    hooks = [*RACES, *HOOKS] if races else ["-Wall", "-Wextra", "-Werror"]
    run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-ffp-contract=off", *hooks, f"-I{ROOT}",
         f"-fmacro-prefix-map={ROOT}/=", "-x", "c", "-c", str(ROOT / "tests/simt_cases.cu"), "-o", f"{path}.o"])  # fmt: skip
    run(["gcc", "-shared", f"{path}.o", *objects, "-o", str(path), "-lm", "-lpthread", "-ldl", "-Wl,-Bsymbolic,-z,defs"])
    emulator = ctypes.CDLL(str(path))
    emulator.tp_error_message.restype = ctypes.c_char_p
    return emulator


def fake_cudnn(*flags: str, folder: Path = FOLDER) -> Path:
    """A libcudnn for TERAPIPE_CUDNN that computes the graphs it is given, on this emulated device (tests/cuda/fake_cudnn.c)."""
    folder.mkdir(parents=True, exist_ok=True)
    path, fresh = folder / "libcudnn.so.9", folder / f"libcudnn.{os.getpid()}"
    run(["gcc", "-shared", "-fPIC", "-std=c11", "-D_GNU_SOURCE", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror",
         f"-I{ROOT}", *flags, *(str(ROOT / "tests/cuda" / name) for name in ("fake_cudnn.c", "fake_cudnn_run.c")), "-o", str(fresh),
         "-lm", "-ldl"])  # fmt: skip
    fresh.rename(path)
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
