"""Communicators whose messages stay in device memory: NCCL between GPUs, or hand-over between stages on one GPU."""
from __future__ import annotations

import os
import pwd
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import _core, cuda
from .backend import choose
from .config import whole
from .job import copies_of, hosts_of
from .slots import LEAST, needed

__all__ = ["agree_on_attention", "check_settings", "connect", "flows", "inproc", "inproc_ways", "kind_of", "lines", "message_bytes",
           "nccl", "pipeline_on_one_gpu"]

KINDS = ("nccl", "host")
ATTENTION_KERNELS = ("mma", "wgmma")
OVERRIDES = {  # of NCCL (init.cc, envConfigOverride), and what would come of them
    "NCCL_COMM_BLOCKING": "NCCL would wait for other ranks as long as it takes, whatever timeout_s is",
    "NCCL_COMM_SPLIT_SHARE_RESOURCES": "messages between other ranks, and in the other direction, would wait for each other",
}


def message_bytes(n_embd: int, slicing: Sequence[tuple[int, Sequence[int]]], dtype: str = "float32") -> int:
    """The largest message of a plan: activations or their gradients, of the type of the activations."""
    return (2 if dtype == "bf16" else 4) * n_embd * max(batch * max(lengths) for batch, lengths in slicing)


def flows(program: _core.Program) -> set[tuple[int, int]]:
    """From which ranks of a lowered program activations go to which: stages may go down the ranks and up again."""
    send = _core.OPS.index("SF")
    codes = [program.instructions(rank) for rank in range(program.num_ranks)]
    return {(rank, peer) for rank, code in enumerate(codes) for peer in set(code["peer"][code["op"] == send].tolist())}


def lines(ranks: int, replicas: int = 1, copies: int = 1, hosts: Iterable[tuple[int, int]] = (),
          more: Iterable[tuple[int, int]] = ()) -> bytearray:
    """[ranks * ranks] Which ranks are connected, from one to another: 1, activations go there and gradients come back (to the next
    rank of a replica, the last to the first too; with two copies of the model down the ranks and up; and where `more`, ranks of a
    replica, says so); 2, it keeps guests of the first."""
    pairs, each = bytearray(ranks * ranks), ranks // replicas
    for first in range(0, ranks, each):
        ring = [(r, r + 1) for r in range(each - 1)]
        ring += [(b, a) for a, b in ring] if copies > 1 else [(each - 1, 0)] if each > 1 else []
        for a, b in {*ring, *more}:
            pairs[(first + a) * ranks + first + b] |= 1
        for a, b in hosts:
            pairs[(first + a) * ranks + first + b] |= 2
    return pairs


def nccl(control: _core.Comm, largest: int, max_ctas: int = 0, replicas: int = 1, copies: int = 1,
         hosts: Iterable[tuple[int, int]] = (), slots: int = LEAST, more: Iterable[tuple[int, int]] = ()) -> _core.Comm:
    """A communicator by NCCL between the ranks of `control`, which must outlive it; each binds it to its own GPU. replicas: the
    ranks are those of so many, one behind the other; copies: of the model in each; hosts: ranks of a replica of which the second
    keeps activations of the first; slots: messages on their way at each end (slots.py); more: as of :func:`lines`. With
    TERAPIPE_NCCL_ONE_GPU=1, processes on one GPU take themselves for machines: right results, no speed."""
    wish = os.environ.get("TERAPIPE_NCCL_ONE_GPU")
    if wish not in (None, "", "0", "1"):
        raise _core.InvalidValueError(f"TERAPIPE_NCCL_ONE_GPU is {wish!r}: 0 or 1 would be right")
    if wish == "1":
        os.environ |= {"NCCL_HOSTID": f"rank {control.rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
                       "NCCL_IB_DISABLE": "1"}
        # One GPU's memory is in reach of itself: nothing that machines of one NVLink domain, or one machine, would go by.
        os.environ |= {"NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    check_settings()
    pairs = lines(control.region.ranks, replicas, copies, hosts, more)
    capsule = cuda.load().nccl(_core.comm_link(control), pairs, largest, max_ctas, replicas, copies, slots)
    return _core.device_comm(control, capsule)


def check_settings() -> list[str]:
    """Refuse what makes NCCL do other than it is asked: its variables go before what its callers want. Words on what else of the
    environment does not go with messages by NCCL: receives wait on the device, long before their messages are sent."""
    for name, what in OVERRIDES.items():
        value, where = _setting_of_nccl(name)
        if value.strip() == "1":
            raise _core.InvalidValueError(f"{name} is 1{where}: {what}; 0, or not to set it, would be right")
    told = [_few_queues("a message that a rank waits for holds up what shares its hardware queue, and ranks may wait for each "
                        "other without end")]
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "").strip() not in ("", "0"):
        told.append("CUDA_LAUNCH_BLOCKING is set: a rank that asks NCCL for a message does nothing else until it is there, and "
                    "ranks may wait for each other without end; not to set it, or TERAPIPE_COMM=host, would be right")
    return [words for words in told if words]


def _setting_of_nccl(name: str) -> tuple[str, str]:
    """What NCCL takes for this variable, and words on the file it has it from. Its files set what the environment does not, the
    first one first (its user guide, Environment Variables; ~/.nccl.conf is of those before 2.23)."""
    if name in os.environ:
        return os.environ[name], ""
    home = Path()
    with suppress(KeyError):  # a user without an entry
        home = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"      # whatever HOME is (src/misc/param.cc)
    for file in (os.environ.get("NCCL_CONF_FILE") or home, "/etc/nccl.conf"):
        with suppress(OSError):
            for line in Path(file).read_text(errors="replace").splitlines():
                key, found, value = line.partition("=")
                if found and key == name:
                    return value, f" in {file}"
    return "", ""


def inproc(control: _core.Comm, largest: int) -> _core.Comm:
    """A communicator between stages that are threads of this process; `control` must outlive it."""
    return _core.device_comm(control, cuda.load().inproc(_core.comm_link(control), largest))


def inproc_ways(comm: _core.Comm, ways: int) -> None:
    """How a communicator of :func:`inproc` waits from now on, for measurements: of 1 (the host never sleeps), 2 (it gives the
    device all it can, whose stream waits for the message) and 4 (nothing before all that it has been given is done) the sum."""
    cuda.load().inproc_ways(_core.comm_link(comm), ways)


def kind_of(job: Mapping[str, Any]) -> str:
    """What the messages of a job's ranks on GPUs go by: "nccl" where every rank has a GPU of its own, else "host". TERAPIPE_COMM
    chooses."""
    wanted = os.environ.get("TERAPIPE_COMM") or None
    if wanted is not None and wanted not in KINDS:
        raise _core.InvalidValueError(f"TERAPIPE_COMM is {wanted!r}: {' or '.join(KINDS)} would be right")
    if job.get("backend") != "cuda" or job["ranks"] == 1:
        return "host"
    if wanted is None:
        devices = job.get("devices") or ()  # of the ranks of one machine
        alone = len(set(devices)) == len(devices)
        wanted = "nccl" if alone and cuda.load().__name__ != "_cuda_emu" else "host"
    return wanted


def connect(job: Mapping[str, Any], control: _core.Comm, plan: Any) -> _core.Comm:
    """What a rank's engine sends its messages through."""
    if kind_of(job) != "nccl":
        return control
    largest = message_bytes(plan.model.n_embd, plan.slicing, choose("cuda", job.get("dtype")).dtype)
    return nccl(control, largest, replicas=plan.data_parallel, copies=copies_of(plan), hosts=hosts_of(plan),
                slots=needed(plan.program), more=flows(plan.program))


def agree_on_attention(job: Mapping[str, Any], control: _core.Comm, device: int, dtype: str) -> None:
    """On every rank, where the bits are promised: those of other machines may have other GPUs, or have been told of other kernels.
    cuDNN's are none of a reproducible run anyway. device, dtype: of this rank."""
    if not job["reproducible"]:
        return
    mine = ATTENTION_KERNELS.index(cuda.attention_kernel(device, dtype))
    kernels = [ATTENTION_KERNELS[its] for its in control.allgather(bytes([mine]))]
    if len(set(kernels)) > 1:
        by = ", ".join(f"{name} on rank {', '.join(str(rank) for rank, its in enumerate(kernels) if its == name)}"
                       for name in sorted(set(kernels)))
        raise _core.InvalidValueError(f"attention would be computed by {by}: the results would be those of neither; "
                                      "TERAPIPE_ATTENTION=mma on all ranks would be right, or reproducible=False")


def pipeline_on_one_gpu(region: _core.Region, device: int, timeout_s: float, largest: int) -> tuple[list[Any], list[_core.Comm]]:
    """Equal parts of one GPU (green contexts) and a communicator for each rank of the region, which has rings for the pairs
    that talk. largest: bytes of a message. Warns where CUDA_DEVICE_MAX_CONNECTIONS leaves them few hardware queues."""
    whole("largest", largest, 1)
    module = cuda.load()
    if told := _few_queues("parts of a GPU wait for each other's work where they share hardware queues (of 8 a step of four took "
                           "1.4 times as long)"):
        warnings.warn(told, stacklevel=3)
    parts = module.partitions(device, region.ranks)
    comms = [inproc(_Kept.of(_core.Comm(region, rank, timeout_s)), largest) for rank in range(region.ranks)]
    return [part for part, _ in parts], comms


def _few_queues(what: str) -> str:
    """What comes of it where CUDA_DEVICE_MAX_CONNECTIONS leaves streams fewer hardware queues than the package asks for, or ""."""
    queues = os.environ.get(cuda.QUEUES_VARIABLE, "")
    if not queues.isdecimal() or int(queues) >= cuda.QUEUES:
        return ""
    return f"{cuda.QUEUES_VARIABLE} is {queues}: {what}; {cuda.QUEUES} would be right, or not to set it"


class _Kept:
    """Control communicators of pipelines on one GPU live as long as the process: they are small, and must outlive all."""

    all: list[_core.Comm] = []

    @classmethod
    def of(cls, comm: _core.Comm) -> _core.Comm:
        cls.all.append(comm)
        return comm
