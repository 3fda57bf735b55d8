"""Plans and runs token-pipelined GPT training.

Describe a model (:class:`GPTConfig`) and a cluster (:class:`Cluster`), measure what slices cost (:func:`profile`), plan
(:func:`plan`), and train (:func:`launch`). Times are seconds, sizes bytes, lengths tokens.
"""

from . import planners, schedules
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
    Program,
    ScheduleError,
    StorageError,
)
from .checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from .config import Block, Cluster, GPTConfig
from .cost import CostModel
from .data import Dataset, stdlib_corpus
from .generate import generate
from .interop import export_hf, import_hf
from .launch import Record, Run, launch
from .plan import Plan, plan
from .profiling import profile
from .report import Report
from .run import emulate, init_params, loss_and_grads, train
from .schedule import Timeline

__version__ = "0.1.0"

__all__ = [
    # describe, measure, plan
    "GPTConfig", "Block", "Cluster", "CostModel", "profile", "Plan", "plan", "planners",
    # schedules
    "Program", "Timeline", "schedules",
    # run
    "launch", "Run", "Record", "Report", "train", "emulate", "init_params", "loss_and_grads", "generate",
    # data and checkpoints
    "Dataset", "stdlib_corpus", "Checkpoint", "load_checkpoint", "save_checkpoint", "export_hf", "import_hf",
    # errors: each is also the builtin that fits
    "Error", "InvalidValueError", "InvalidTypeError", "OutOfMemoryError", "InfeasibleError", "ScheduleError", "StorageError",
    "DeadlineError", "PeerError", "AbortedError", "ExecutionError", "InternalError",
    "__version__",
]  # fmt: skip
