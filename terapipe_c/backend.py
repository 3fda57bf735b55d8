"""Where a rank computes: the CPU, or a GPU through the C module of `terapipe_c.cuda`."""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _core, cuda
from .config import brief, human_bytes, one_of

__all__ = ["BACKENDS", "Backend", "choose", "eager", "heads_refused", "own_gpu", "place", "place_own"]

BACKENDS = ("cpu", "cuda")
DTYPES = {"cpu": ("float32",), "cuda": ("bf16", "float32")}   # the first is what None means


@dataclass(frozen=True)
class Backend:
    """A backend and the type of its activations: besides the plan, sizes and results depend on these."""

    name: str = "cpu"
    dtype: str = "float32"

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `_core.Engine` and `_core.rank_memory`. ExecutionError where the package was built without the
        backend."""
        return {} if self.name == "cpu" else {"provider": cuda.load().provider, "dtype": self.dtype}

    @property
    def keeps_keys(self) -> int:
        """Columns of ``n_embd`` that attentions which are recomputed may keep: of keys and values, on a GPU of queries, too
        (tp_stage_ops.keeps_keys of csrc/stage/stage_ops.h)."""
        return 2 if self.name == "cpu" else 3


def choose(name: Any = "cpu", dtype: Any = None) -> Backend:
    """The backend of these arguments; InvalidValueError says what would be right."""
    name = one_of("backend", name, BACKENDS)
    known = DTYPES[name]
    if dtype is not None and (not isinstance(dtype, str) or dtype not in known):
        right = " or ".join(repr(each) for each in known)
        raise _core.InvalidValueError(f"dtype is {brief(dtype)}: {right} would be right for backend {name!r}")
    return Backend(name, known[0] if dtype is None else dtype)


def heads_refused(model: Any, backend: str, dtype: str) -> str:
    """Why the backend's kernels cannot do heads of this width (check of cuda/stage.c), or an empty string."""
    width = model.n_embd // model.n_head
    if backend != "cuda" or (width <= 128 and (width % 8 == 0 or dtype != "bf16")):
        return ""
    right = 'on CUDA with dtype "bf16" a multiple of 8 up to 128' if dtype == "bf16" else "on CUDA at most 128"
    return f"n_embd / n_head is {width}: {right} would be right"


def own_gpu(local_rank: int) -> int:
    """The GPU of one of several processes that a launcher has started on this machine: the one with its local rank as number, or
    the only one that the launcher lets it see."""
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return 0 if len(shown) == 1 else local_rank


def place(backend: Backend, ranks: int, devices: Sequence[int] | None, needed: Sequence[int]) -> list[int]:
    """The GPU of each rank on this machine: rank r's is r, or what `devices` says, where ranks may share one.

    Raises before anything is started: ExecutionError (no driver, driver or GPU too old, no GPU), InvalidValueError (fewer GPUs than
    ranks; different ones, unless `devices` asks for them; a kernel of attention that a GPU lacks), OutOfMemoryError (needed: bytes
    of each rank).
    """
    if backend.name == "cpu":
        _check_none(devices)
        return [0] * ranks
    count, shown = _gpus()
    if devices is None:
        if ranks > count:
            raise _core.InvalidValueError(f"the plan has {ranks} ranks and this machine shows {_many(count)} ({shown}rank {count} "
                                          f"is the first without one): a plan for {count} devices, or devices=[...] with a GPU for "
                                          "each rank, would be right")
        placed = list(range(ranks))
    else:
        placed = list(devices)
        if len(placed) != ranks or any(isinstance(d, bool) or not isinstance(d, int) or not 0 <= d < count for d in placed):
            raise _core.InvalidValueError(f"devices is {placed}: {ranks} numbers from 0 to {count - 1}, one for each rank, would "
                                          "be right")
    found = cuda.devices()
    names = sorted({found[d].name for d in placed})
    if devices is None and len(names) > 1:
        raise _core.InvalidValueError(f"the ranks' GPUs differ ({', '.join(names)}): a plan knows one kind; devices={placed} asks "
                                      "for them all the same")
    for device in sorted(set(placed)):
        cuda.attention_kernel(device, backend.dtype)
        here = [rank for rank in range(ranks) if placed[rank] == device]
        what = f"rank {here[0]} needs" if len(here) == 1 else f"ranks {', '.join(map(str, here))} need"
        _check_room(what, sum(needed[rank] for rank in here), found[device])
    return placed


def _many(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def place_own(backend: Backend, rank: int, local_rank: int, devices: Sequence[int] | None, needed: int) -> None:
    """As `place`, for one of the processes that a launcher has started on this machine: `rank` of all, `local_rank` here. That the
    ranks' GPUs are alike is compared between them."""
    if backend.name == "cpu":
        return _check_none(devices)
    count, shown = _gpus()
    if devices is None:
        device = own_gpu(local_rank)
        if device >= count:
            alone = "" if shown or count > 1 else "; if each rank sees its own GPU alone, CUDA_VISIBLE_DEVICES=0 in each says so"
            raise _core.InvalidValueError(f"rank {rank} has no GPU: as local rank {local_rank} it would have GPU {device}, and its "
                                          f"machine shows {_many(count)} ({shown}the first is 0): no more ranks a machine than it "
                                          f"has GPUs, or devices=[...] with a GPU for each of them, would be right{alone}")
    else:
        if local_rank >= len(devices) or devices[local_rank] >= count:
            raise _core.InvalidValueError(f"devices is {list(devices)}, and rank {rank} is local rank {local_rank} of a machine "
                                          f"that shows {_many(count)}: numbers from 0 to {count - 1}, one for each rank of a "
                                          "machine, would be right")
        device = devices[local_rank]
    cuda.attention_kernel(device, backend.dtype)
    _check_room(f"rank {rank} needs", needed, cuda.devices()[device])


def eager() -> bool:
    """Are a GPU's steps enqueued call by call, as TERAPIPE_CUDA_GRAPHS = 0 asks, and not launched as graphs?"""
    wish = os.environ.get("TERAPIPE_CUDA_GRAPHS")
    if wish not in (None, "", "0", "1"):
        raise _core.InvalidValueError(f"TERAPIPE_CUDA_GRAPHS is {wish!r}: 0 (steps call by call) or 1 (as graphs, which is what "
                                      "none means) would be right")
    return wish == "0"


def _check_none(devices: Sequence[int] | None) -> None:
    if devices is not None:
        raise _core.InvalidValueError(f"devices is {brief(devices)}: None would be right for backend 'cpu'")


def _gpus() -> tuple[int, str]:
    """How many there are, and what an error says of how many are shown; ExecutionError where none can be used. What steps are to be
    launched as is checked, too."""
    eager()
    if why := cuda.why_not():
        raise _core.ExecutionError(f"backend 'cuda' cannot be used: {why}")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return cuda.device_count(), "" if seen is None else f"CUDA_VISIBLE_DEVICES is {seen!r}; "


def _check_room(what: str, wanted: int, device: cuda.Device) -> None:
    free = device.free_bytes
    if wanted > free:
        raise _core.OutOfMemoryError(f"{what} {wanted} bytes on GPU {device.index}, which has {free} free of {device.total_bytes}: "
                                     f"{wanted - free} bytes short ({human_bytes(wanted)} of {human_bytes(free)})")
