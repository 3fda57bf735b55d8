"""Plans and runs token-pipelined GPT training: exact planners, one instruction IR, a C engine.

    import terapipe_c as tp
    model = tp.GPTConfig(n_layer=4, n_head=4, n_embd=256, vocab_size=256, block_size=256)
    plan = tp.plan(model, tp.Cluster.local(), batch=4, seq_len=256, costs=tp.profile(model))
    run = tp.launch(plan, data="corpus.txt", steps=200, out="runs/a")
"""
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

try:
    from ._core import (
        AbortedError,
        DeadlineError,
        Error,
        ExecutionError,
        InfeasibleError,
        InternalError,
        InvalidTypeError,
        InvalidValueError,
        OutOfMemoryError,
        PeerError,
        ScheduleError,
        StorageError,
    )
except ModuleNotFoundError as _missing:
    if _missing.name != f"{__name__}._core":
        raise
    raise ImportError(f"{__path__[0]} is the source of terapipe_c, where its C core is not built: Python started in another "
                      "folder finds the installed package; `python setup.py build_ext --inplace` builds it here",
                      name=_missing.name, path=__file__) from None

if TYPE_CHECKING:
    from . import cuda, devices, mpi, planners, schedules, zoo
    from .capture import capture
    from .checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from .compare import Comparison, compare
    from .config import Cluster, GPTConfig
    from .cost import CostModel
    from .data import Dataset, stdlib_corpus
    from .emulation import Emulation, emulate
    from .engine import init_params, loss_and_grads
    from .generate import generate
    from .interop import export_hf, import_hf
    from .launch import Record, Run, launch, runs
    from .plan import Plan
    from .planners import max_batch
    from .planning.entrance import plan
    from .profiling import profile
    from .report import Report
    from .schedule import Program, Timeline
    from .train import RankRun, train

import numpy  # noqa: F401 -- whole, before threads that ask for names at once come to it from several sides

# What the rooms, and NumPy as it goes, import of the standard library: now, since a folder that a program puts into sys.path later,
# or goes to, may have a queue.py of its own.
for _name in ("array atexit base64 binascii bisect colorsys concurrent.futures copy dataclasses decimal errno fcntl fnmatch "
              "fractions hashlib heapq hmac html inspect ipaddress json locale logging mmap ntpath pathlib platform pwd queue "
              "random resource secrets select selectors shlex shutil signal socket statistics string subprocess sysconfig "
              "tempfile threading tokenize traceback urllib.parse weakref zlib").split():
    importlib.import_module(_name)

# Where each public name is. A name is imported where it is first asked for: a run's ranks, each a Python of its own, ask for few.
_ROOMS = {
    "": ("cuda", "devices", "mpi", "planners", "schedules", "zoo"),
    "capture": ("capture",),
    "checkpoint": ("Checkpoint", "load_checkpoint", "save_checkpoint"),
    "compare": ("Comparison", "compare"),
    "config": ("Cluster", "GPTConfig"),
    "cost": ("CostModel",),
    "data": ("Dataset", "stdlib_corpus"),
    "emulation": ("Emulation", "emulate"),
    "engine": ("init_params", "loss_and_grads"),
    "generate": ("generate",),
    "interop": ("export_hf", "import_hf"),
    "launch": ("Record", "Run", "launch", "runs"),
    "plan": ("Plan",),
    "planners": ("max_batch",),
    "planning.entrance": ("plan",),
    "profiling": ("profile",),
    "report": ("Report",),
    "schedule": ("Program", "Timeline"),
    "train": ("RankRun", "train"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "AbortedError", "Checkpoint", "Cluster", "Comparison", "CostModel", "Dataset", "DeadlineError", "Emulation", "Error",
    "ExecutionError", "GPTConfig", "InfeasibleError", "InternalError", "InvalidTypeError", "InvalidValueError",
    "OutOfMemoryError", "PeerError", "Plan", "Program", "RankRun", "Record", "Report", "Run", "ScheduleError", "StorageError",
    "Timeline", "__version__", "capture", "compare", "cuda", "devices", "emulate", "export_hf", "generate", "import_hf",
    "init_params", "launch",
    "load_checkpoint", "loss_and_grads", "max_batch", "mpi", "plan", "planners", "profile", "runs", "save_checkpoint",
    "schedules", "stdlib_corpus", "train", "zoo",
]


class _Package(ModuleType):
    """`tp.plan` is the function: not the module of its name, which the import system sets when something imports that."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and _ROOM_OF.get(name)):
            super().__setattr__(name, value)


if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        room = _ROOM_OF.get(name, "")
        known = name in _ROOM_OF or (name.isidentifier() and not name.startswith("_")
                                     and importlib.util.find_spec(f"{__name__}.{name}") is not None)
        if not known:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{room or name}")
        return globals().setdefault(name, getattr(module, name) if room else module)


def __dir__() -> list[str]:
    """What completion offers: the public names, without the modules that they come from."""
    return __all__


sys.modules[__name__].__class__ = _Package
