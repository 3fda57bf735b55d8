"""`train`: what `launch` does, inside a rank that torchrun, mpirun or srun has started, on one machine or many."""
from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from . import _core, cuda, mpi
from .backend import own_gpu
from .checkpoint import STATE_FILE, verify_checkpoint
from .config import one_of, real, timeout
from .device_comm import KINDS, kind_of, message_bytes
from .environment import Place, find_place
from .job import (
    Folder,
    check_plan,
    copies_of,
    hosts_of,
    initial,
    largest_gather,
    look_at,
    make_folder,
    make_job,
    neighbours,
    replicas_of,
)
from .launch import launch
from .outcome import Metrics, Outcome, Record
from .progress import Beside, Progress
from .watch import Watch
from .worker import dataset, failures, meanwhile, run_rank, share

if TYPE_CHECKING:
    from .data import Data
    from .plan import Plan

__all__ = ["RankRun", "train"]

BOOT = Path("/proc/sys/kernel/random/boot_id")
MEETING_S = 60.0
SEEN_S = 5.0  # how long a shared file system may take to show a new file to another machine


def train(plan: Plan, data: Data, steps: int, *, backend: str = "cpu", launcher: str | None = None, comm: str | None = None,
          meeting_s: float | None = None, progress: bool | None = None, **options: Any) -> RankRun:
    """Train `plan` as the rank that the environment says this process is; returns when the last step is done, on every rank.

    Args:
        plan, data, steps, backend: as in `launch`, and the same on every rank; every rank reads `data`, in a thread, which calls
            the tokenizer.
        launcher: "torchrun", "mpirun" (Open MPI), "mpiexec" (MPICH, Intel MPI) or "srun"; None: the first whose variables are
            set. The address of rank 0 is MASTER_ADDR, with srun the first node; the port MASTER_PORT, or one made of the job's
            number. TERAPIPE_TOKEN, if set, must be the same on all: who has another one is not heard.
        comm: what messages between CPU ranks go over: "tcp", or "mpi" where terapipe_c was built with mpicc and the launcher is
            that MPI's. None: what TERAPIPE_COMM says, else "tcp". The results are the same bits; ranks meet, and are ended when one
            fails, over TCP with either. MPI is initialised if nobody has done so and then finalised when Python ends; no other
            thread may use it meanwhile, unless it was initialised with MPI_THREAD_MULTIPLE.
        meeting_s: how long the ranks wait for each other at the beginning, and for the name of rank 0's host to be known. None: a
            minute, or `timeout_s` where that is less and not 0.
        progress: as in `launch`, shown by rank 0.
        options: all others of `launch` but `processes`. `out` and the checkpoints in it must be seen by every rank: on several
            machines, a shared file system.

    Raises InvalidValueError (environment, world size that is not the plan's number of ranks, arguments, data or (reproducible)
    instruction sets that differ between ranks, a run folder that a rank does not see, an MPI that is not the launcher's),
    DeadlineError (names the ranks that did not come), StorageError (port in use), ExecutionError (comm "mpi" where it was not
    built), and what `launch` raises. When any rank fails or dies every other one raises AbortedError, which names it, within 2
    seconds; under mpirun, mpiexec and srun, which may kill it before, it says so on standard error at once (MPICH's mpiexec is
    quicker still now and then: with -disable-auto-cleanup seldom). A rank that a GPU, or NCCL, still holds 60 seconds after a
    failure ends its process, if `train` was called in the main thread, and says so on standard error.
    """
    arguments = _arguments(plan, data, steps, backend, options)
    check_plan(plan)
    transport = _transport(comm, backend)
    timeout_s = timeout("timeout_s", arguments["timeout_s"])
    meeting_s = min(MEETING_S, timeout_s or MEETING_S) if meeting_s is None else real("meeting_s", meeting_s)
    place = find_place(os.environ, launcher)
    replicas = replicas_of(plan)
    ranks, copies = plan.ranks * replicas, copies_of(plan)
    if place.ranks != ranks:
        raise _core.InvalidValueError(f"{place.launcher} started {place.ranks} ranks and the plan has {ranks}: "
                                      f"{ranks} ranks, or a plan for {place.ranks} devices, would be right")
    region = _core.Region.create(place.ranks, bytes(place.ranks ** 2), 0, largest_gather(plan.model), False)
    with Watch(region, place, gpu=backend == "cuda"):
        control = meet(place, region, plan.model, plan.digest, meeting_s, timeout_s, replicas, copies, hosts_of(plan))
        return _Rank(plan, place, region, control, progress, transport).run(arguments)


def _transport(comm: str | None, backend: str) -> str:
    """What messages go over. Of a GPU's ranks TERAPIPE_COMM says something else (device_comm.py)."""
    name, wanted = ("TERAPIPE_COMM", os.environ.get("TERAPIPE_COMM") or None) if comm is None else ("comm", comm)
    if comm is None and (wanted is None or backend != "cpu" or wanted in KINDS):
        return "tcp"
    wanted = one_of(name, wanted, ("tcp", "mpi"))
    if wanted == "mpi" and backend != "cpu":
        raise _core.InvalidValueError(f"comm is 'mpi' and backend {backend!r}: messages of a GPU's memory go by NCCL, so 'tcp', "
                                      "which is what ranks meet over, would be right")
    if wanted == "mpi":
        mpi.load()
    return wanted


def _arguments(plan: Any, data: Any, steps: int, backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(launch)
    known = [name for name in signature.parameters if name not in ("plan", "data", "steps", "processes", "progress", "backend")]
    wrong = [name for name in options if name not in known]
    if wrong:
        raise _core.InvalidTypeError(f"train has no argument {wrong[0]!r}: plan, data, steps, backend, launcher, comm, meeting_s, "
                                     f"progress, {', '.join(known)} would be right")
    bound = signature.bind(plan, data, steps, backend=backend, **options)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("processes", "progress")}


def meet(place: Place, region: _core.Region, model: Any, plan: str, meeting_s: float, timeout_s: float,
         replicas: int = 1, copies: int = 1, hosts: Iterable[tuple[int, int]] = ()) -> _core.Comm:
    """The communicator of all ranks, once they have met and are of the same version and plan."""
    from . import __version__

    pairs = neighbours(place.ranks, replicas, copies=copies, hosts=hosts)
    return _core.tcp_comm(region, place.rank, place.host, place.port, pairs,
                          largest_gather(model), ports=place.ports, token=place.token, version=__version__, plan=plan[:63],
                          meeting_s=meeting_s, timeout_s=timeout_s)


class RankRun(Outcome):
    """A training that is over, as every rank has it: iterating gives its records, `report()` predicted beside measured."""

    def __init__(self, plan: Any, job: Mapping[str, Any], rank: int) -> None:
        super().__init__(plan, job)
        self.rank = rank
        self.pids = [os.getpid()]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._history)

    @property
    def running(self) -> bool:
        """False: train returns when the last step is done."""
        return False

    def wait(self, timeout_s: float | None = None) -> RankRun:
        """Nothing to wait for; there for scripts that do so with `launch`."""
        return self

    def __repr__(self) -> str:
        return f"RankRun(rank {self.rank} of {self._job['ranks']}, {self._so_far()}, out={self._job['out']})"


ALIKE = {"avx2": "avx2 or avx512", "avx512": "avx2 or avx512"}    # the same bits: csrc/backend/backend.h


def _checksum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _contents(job: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """What ranks must have in common besides the arguments' names: a batch drawn from other tokens on every rank, or a tied
    embedding that began otherwise on two, would train and mean nothing."""
    data = dataset(job, arrays, "train")
    batch = _checksum(data.batch(job["first_step"]).tobytes())
    told = {"content of data": f"{data.num_tokens} tokens of fingerprint {data.fingerprint}, first batch {batch}"}
    given = {name.removeprefix("init/"): array for name, array in arrays.items() if name.startswith("init/")}
    told["init"] = "a path" if job["init_from"] else "arrays" if given else "none"
    if given:
        told["content of init"] = _content(look_at(given))
    if job["resume_from"]:
        state = (Path(job["resume_from"]) / STATE_FILE).read_bytes()
        told["content of the checkpoint"] = f"checksum {_checksum(state)}"
    if job["backend"] == "cuda" and job["devices"] is None:
        told["GPU (a plan knows one kind; devices=[...] lets it differ)"] = cuda.devices()[own_gpu(job["local_rank"])].name
    if job["backend"] == "cuda":    # mpirun hands a variable to other machines only where it is told to (-x)
        told["way of messages (TERAPIPE_COMM chooses it)"] = kind_of(job)
    if job["reproducible"] and job["backend"] == "cpu":
        isa = _core.Kernels().isa
        told["instruction set (TERAPIPE_ISA chooses it, reproducible=False lets it differ)"] = ALIKE.get(isa, isa)
    return told


def _in_order(job: Mapping[str, Any], contents: Mapping[str, str]) -> dict[str, Any]:
    """What ranks must have in common, causes first: with another seed, split or checkpoint the first batch is another one, too."""
    given = {name: value for name, value in job.items() if name not in ("data", "drawn")}
    return {"resume_from": job["resume_from"], **given, "val_fraction": job["data"]["val_fraction"], **contents, **job}


def _boot() -> str:
    """What tells clocks of this machine from another's: which of its starts this is, or its name, as in a chroot without /proc."""
    try:
        return BOOT.read_text()
    except OSError:
        return os.uname().nodename


def _content(sums: Mapping[str, int]) -> str:
    """Of parameters, in whatever order."""
    return f"checksum {_checksum(repr(sorted(sums.items())).encode())}"


class _Rank:
    def __init__(self, plan: Any, place: Place, region: _core.Region, comm: _core.Comm, progress: bool | None,
                 transport: str) -> None:
        self.plan, self.place, self.region, self.comm, self.wanted = plan, place, region, comm, progress
        self.transport, self.messages = transport, comm
        self.error: BaseException | None = None
        self.metrics: Metrics | None = None
        self.folder: Folder | None = None
        self.begun = False

    def run(self, arguments: Mapping[str, Any]) -> RankRun:
        """What goes wrong here is told to all by the abort, which goes out when the communicator is closed: under the Watch too,
        since it may wait for others."""
        outcome: RankRun | None = None
        try:
            with failures(self.place.rank, self.region, lambda event: None):
                try:
                    outcome = self._train(arguments)
                except BaseException as error:
                    self.error = error
                    raise
        finally:
            try:
                if self.metrics is not None:
                    self.metrics.close()
            except OSError as error:    # what a full disk did not take is told again here
                self.error = self.error or error
            if self.folder is not None:
                (self.folder.close if self.begun else self.folder.undo)()
            self.messages.close()
            self.comm.close()
        if self.error is not None:
            raise self.error
        assert outcome is not None
        return outcome

    def _train(self, arguments: Mapping[str, Any]) -> RankRun:
        first = self.place.rank == 0

        def reading(read: Callable[[], Any]) -> Any:   # a disk, or a tokenizer, which Ctrl-C need not wait for
            return meanwhile(self.comm, float(arguments["timeout_s"]), lambda in_vain: read(), leave=True)

        job, arrays = make_job(**arguments, rank=self.place.rank, local_rank=self.place.local_rank,
                               local_ranks=self.place.local_ranks, reading=reading)
        job |= {"local_rank": self.place.local_rank, "comm": self.transport}
        self._compare(_in_order(job, _contents(job, arrays)))
        if job["init_from"]:
            given = initial(job)
            # what is loaded must be what is compared here
            job["init_sums"] = meanwhile(self.comm, job["timeout_s"], lambda in_vain: look_at(given, in_vain))
            self._compare({"content of init": _content(job["init_sums"])})
        if job["resume_from"]:
            path = Path(job["resume_from"])
            meanwhile(self.comm, job["timeout_s"], lambda in_vain: verify_checkpoint(path, in_vain) if first else None)
        memory = share(self.comm, job["predicted_peak_memory_bytes"])     # an instruction set has a workspace of its own
        job["predicted_peak_memory_bytes"] = [theirs[rank] for rank, theirs in enumerate(memory)]
        if self.transport == "mpi":
            largest = message_bytes(self.plan.model.n_embd, self.plan.slicing)
            self.messages = mpi.connect(self.comm, self.place.launcher, largest)
        if first and job["out"] is not None:
            self.folder = make_folder(job, self.plan)
        if job["checkpoint_every"]:
            self._see_folder(Path(job["out"]))
        if first and job["out"] is not None:
            self.metrics = Metrics(Path(job["out"]) / "metrics.jsonl")
        outcome = RankRun(self.plan, job, self.place.rank)
        ends: list[dict[str, Any]] = []

        def emit(event: dict[str, Any]) -> None:
            kind = event.pop("kind")
            if kind == "step":
                outcome._history.append(outcome._take_record(event, self.metrics))
                shown.show(outcome._history)
            elif kind == "checkpoint":
                outcome._checkpoint = Path(event["path"])
            elif kind == "end":
                ends.append(event)

        # other ranks wait for this one, which waits for no terminal
        with Beside(Progress(self.wanted, job["first_step"], job["steps"]) if first else None) as shown:
            try:
                self.comm.barrier()
                self.begun = True
                begun = time.monotonic()  # the same moment everywhere, on clocks that began with their machines
                run_rank(job, self.place.rank, self.region, emit, lambda: False, arrays, self.messages)
                self._gather(outcome, ends[0], begun)
            finally:
                shown.show(outcome._history, over=True)
        if first:
            outcome._write_trace()
        return outcome

    def _compare(self, job: Mapping[str, Any]) -> None:
        """Every rank must have been given the same arguments."""
        own = ("plan", "local_rank", "init_from", "predicted_peak_memory_bytes")    # the content of init is compared, not its place
        mine = {name: value for name, value in job.items() if name not in own}
        everyone = share(self.comm, {name: _checksum(json.dumps(value, sort_keys=True).encode())
                                     for name, value in mine.items()})
        for rank, theirs in enumerate(everyone):
            different = [name for name in mine if theirs.get(name) != everyone[0].get(name)]
            if different:
                shown = f" (here it is {mine[different[0]]!r})" if self.place.rank in (0, rank) else ""
                raise _core.InvalidValueError(f"{different[0]} of rank {rank} is not that of rank 0{shown}: the same on all ranks "
                                              "would be right")

    def _see_folder(self, folder: Path) -> None:
        """Every rank writes its part of a checkpoint into rank 0's folder: not seeing it is found out now, not then."""
        first = self.place.rank == 0
        name = share(self.comm, f".terapipe-{os.urandom(8).hex()}" if first else None)[0]
        try:
            if first:
                (folder / name).touch()
            self.comm.barrier()
            limit = time.monotonic() + SEEN_S
            while not (seen := (folder / name).exists()) and time.monotonic() < limit:
                time.sleep(0.1)
            blind = [rank for rank, sees in enumerate(share(self.comm, seen)) if not sees]
        finally:
            if first:
                (folder / name).unlink(missing_ok=True)
        if blind:
            raise _core.InvalidValueError(f"rank {blind[0]} does not see the run folder of rank 0, {folder}: a folder that all "
                                          "ranks share would be right, or checkpoint_every=0")

    def _gather(self, outcome: RankRun, end: dict[str, Any], begun: float) -> None:
        """Every rank learns all that rank 0 knows; clocks of other machines are put on rank 0's by the moment of the start."""
        told = share(self.comm, {"end": end, "begun": begun, "boot": _boot()})
        for rank, one in enumerate(told):
            late = one["begun"] - told[0]["begun"] if one["boot"] != told[0]["boot"] else 0.0
            trace = [[*row[:-2], row[-2] - late, row[-1] - late] for row in one["end"]["trace"]]
            outcome._ends[rank] = {**one["end"], "trace": trace}
        rest = share(self.comm, {"history": [vars(record) for record in outcome._history],
                                 "checkpoint": None if outcome._checkpoint is None else str(outcome._checkpoint)})[0]
        outcome._history = [Record(**record) for record in rest["history"]]
        outcome._checkpoint = None if rest["checkpoint"] is None else Path(rest["checkpoint"])
