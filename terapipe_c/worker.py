"""One rank of a run: the training loop, the same for threads and processes, and the main function of a rank's process.

`run_rank` knows nothing of processes: it gets a job (plain JSON), its rank, the region all ranks share, a way to tell the
launcher things (`emit`) and a way to be told to stop. What it trains with comes through one seam, `job["engine"]`: the
"module:function" of a factory (job, rank, comm) -> Engine.
"""
from __future__ import annotations

import importlib
import json
import math
import mmap
import os
import queue
import resource
import select
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import _core, _steps
from ._threads import Worker, no_thread, start_all

if TYPE_CHECKING:
    from .checkpoint import CheckpointLayout, CheckpointWriter

HYPER = ("lr", "min_lr", "lr_schedule", "warmup_steps", "weight_decay", "betas", "eps", "grad_clip")  # what a checkpoint keeps
GRACE_S = 1.0  # how long a rank may take to notice that the run is over before it is ended by force
MEET_S = 0.5  # between two meetings of ranks that wait for a disk
UNHEARD = 1 << 18  # events of a rank that its launcher may still have to hear: some 100 MB
CHECKPOINTS = _steps.CHECKPOINTS
MOMENTS = ("exp_avg", "exp_avg_sq")

Arrays = Mapping[str, NDArray[Any]]
Job = Mapping[str, Any]
Emit = Callable[[dict[str, Any]], None]


class Engine(Protocol):
    """What the loop asks of an engine. Names are global parameter names; arrays are float32 in their global shapes."""

    names: list[str]  # parameters that this rank saves (of a tied one that two ranks hold, one of them)
    peak_memory_bytes: int

    def step(self, step: int, tokens: NDArray[np.int32], lr: float) -> Mapping[str, float]:
        """Train on tokens [batch, seq_len + 1] as step 0, 1, ...: {"loss": mean, "grad_norm": over all ranks, before
        clipping}, the same on every rank."""

    def evaluate(self, tokens: NDArray[np.int32]) -> float:
        """The mean loss of a batch, the same on every rank; nothing is changed."""

    def export(self, kind: str) -> dict[str, NDArray[np.float32]]:
        """Copies by name; kind is "params", "exp_avg" or "exp_avg_sq". Where it has export_each(kind), which gives them as pairs,
        one by one, that is asked instead."""

    def load(self, params: Arrays, moments: Mapping[str, Arrays] | None) -> None:
        """Take what this rank needs out of params (all it holds must be there) and moments {"exp_avg": .., ..}."""

    def trace(self) -> list[tuple[str, int, int, int, float, float]]:
        """(op, stage, micro, slice, start_s, end_s) of the last step, on the clock of time.monotonic()."""


# ---- the loop --------------------------------------------------------------------------------------------------------


def learning_rate(job: Job, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then constant or a half cosine down to min_lr (Loshchilov & Hutter
    2017)."""
    lr, warmup, steps = job["lr"], job["warmup_steps"], job["steps"]
    if step < warmup:
        return float(lr * (step + 1) / warmup)
    if job["lr_schedule"] == "constant":
        return float(lr)
    done = (step - warmup) / max(1, steps - warmup)
    return float(job["min_lr"] + 0.5 * (1.0 + math.cos(math.pi * done)) * (lr - job["min_lr"]))


def run_rank(job: Job, rank: int, region: _core.Region, emit: Emit, stop: Callable[[], bool],
             arrays: dict[str, NDArray[Any]] | None = None, comm: _core.Comm | None = None) -> None:
    """Train as `rank` until the last step or until any rank's stop() is true. Emits {"kind": "step", ...} and
    {"kind": "checkpoint", "path"} from rank 0 and {"kind": "end", ...} from every rank. Raises what goes wrong; the
    caller sets the abort that ends the others. arrays: without those of init when they are loaded. comm: None where the region has
    rings."""
    _Training(job, rank, region, emit, stop, arrays or {}, comm or _core.Comm(region, rank, job["timeout_s"])).run()


class _Training:
    def __init__(self, job: Job, rank: int, region: _core.Region, emit: Emit, stop: Callable[[], bool],
                 arrays: dict[str, NDArray[Any]], comm: _core.Comm) -> None:
        self.job, self.rank, self.region, self.emit, self.stop, self.comm = job, rank, region, emit, stop, comm
        self.data = dataset(job, arrays, "train")
        self.held_out = dataset(job, arrays, "val") if job["eval_every"] else None
        module, _, name = job["engine"].partition(":")
        self.engine: Engine = getattr(importlib.import_module(module), name)(job, rank, self.comm)
        self._load(arrays)
        self.model = SimpleNamespace(**job["model"])

    def _load(self, arrays: dict[str, NDArray[Any]]) -> None:
        if self.job["resume_from"] or self.job["init_from"]:
            if self.job["backend"] == "cpu":
                meanwhile(self.comm, self.job["timeout_s"], self._read)
            else:       # a GPU's graphs are captured here, too, which the thread that trains does
                while_others_meet(self.comm, self.job["timeout_s"], self._read)
        else:
            given = {name.removeprefix("init/"): arrays.pop(name) for name in list(arrays) if name.startswith("init/")}
            if given:
                self.engine.load(given, None)

    def _read(self, in_vain: threading.Event) -> None:
        """This rank's own tensors, some of which may be many times those of another rank."""
        if self.job["resume_from"]:
            from .checkpoint import open_checkpoint

            saved = open_checkpoint(Path(self.job["resume_from"]))
            self.data.check_state(saved.data_state)
            moments = {kind: _in_time(tensors, in_vain) for kind, tensors in (saved.optimizer or {}).items()}
            self.engine.load(_in_time(saved.params, in_vain), moments)
        else:
            from .job import initial

            self.engine.load(_in_time(initial(self.job), in_vain), None)

    def run(self) -> None:
        job, step = self.job, self.job["first_step"]
        self.comm.barrier()
        stopped = False
        if step == job["steps"] and job["checkpoint_every"] and not job["resume_from"]:
            self._save(step)        # what it would have begun with: of no steps at all the last one is over
        while step < job["steps"] and not stopped:
            record, stopped = self._step(step)
            step += 1
            last = stopped or step == job["steps"]
            if self.held_out is not None and (step % job["eval_every"] == 0 or last):
                record["eval_loss"] = self._evaluate()
            if self.rank == 0 and ((step - 1) % job["log_every"] == 0 or record["eval_loss"] is not None or last):
                self.emit(record)
            if job["checkpoint_every"] and (step % job["checkpoint_every"] == 0 or last):
                self._save(step)
        self.region.set_progress(self.rank, step)
        self.emit({"kind": "end", "steps_done": step, "peak_memory_bytes": int(self.engine.peak_memory_bytes),
                   "resident_memory_bytes": _resident_bytes(), "trace": [list(row) for row in self.engine.trace()],
                   "caveats": list(getattr(self.engine, "caveats", ())), "gpu": getattr(self.engine, "gpu", "")})
        self.comm.barrier()  # nobody ends before all have: an end means that the whole run is good

    def _step(self, step: int) -> tuple[dict[str, Any], bool]:
        """All ranks leave together, so the time is that of the slowest, and all learn whether any was told to stop."""
        job = self.job
        self.region.set_progress(self.rank, step)
        start = time.perf_counter()
        lr = learning_rate(job, step)
        result = self.engine.step(step, self.data.batch(step), lr)
        stopped = any(self.comm.allgather(bytes([bool(self.stop())])))
        seconds = time.perf_counter() - start
        record = {"kind": "step", "step": step, "loss": result["loss"], "grad_norm": result["grad_norm"], "lr": lr,
                  "tokens_per_s": job["batch"] * job["seq_len"] / seconds, "step_time_s": seconds, "eval_loss": None}
        return record, stopped

    def _evaluate(self) -> float:
        assert self.held_out is not None
        return float(np.mean([self.engine.evaluate(self.held_out.batch(i)) for i in range(self.job["eval_batches"])]))

    def _save(self, step: int) -> None:
        """Rank 0 reserves the space, every rank writes its own tensors, rank 0 completes: whole, or not there at all."""
        from .checkpoint import CheckpointWriter

        self.region.set_progress(self.rank, step, WRITING)
        writer = CheckpointWriter(Path(self.job["out"]) / CHECKPOINTS, self.model) if self.rank == 0 else None
        patience_s = self.job["timeout_s"]
        try:
            folder = share(self.comm, meanwhile(self.comm, patience_s, lambda _: str(writer.begin(step)) if writer else None))[0]
            layout = CheckpointWriter.plan(self.model)
            sums = dict[str, str]()
            for kinds in self._gathered():
                sums |= meanwhile(self.comm, patience_s, partial(self._write, folder, layout, kinds))
            everyone: dict[str, str] = {}
            for theirs in share(self.comm, sums):
                everyone |= theirs
            meanwhile(self.comm, patience_s, lambda _: self._complete(writer, step, everyone) if writer else None)
        except BaseException as error:
            if writer:
                accuse(error, self.rank, self.region)   # before the folder goes, which the others may be about to write in
                with at_the_disk():
                    writer.abort()
            elif isinstance(error, FileNotFoundError):
                self._raise_first()
            raise

    def _complete(self, writer: CheckpointWriter, step: int, sums: dict[str, str]) -> None:
        """And tell at once: it is there, whatever becomes of the other ranks."""
        hyper = {key: self.job[key] for key in HYPER}
        path = writer.finish(sums, seed=self.job["seed"], data_state=self.data.state(step), hyper=hyper)
        self.emit({"kind": "checkpoint", "step": step, "path": str(path)})

    def _write(self, folder: str, layout: CheckpointLayout, kinds: tuple[str, ...], in_vain: threading.Event) -> dict[str, str]:
        from .checkpoint import write_tensors

        return write_tensors(folder, layout, self._tensors(in_vain, kinds))

    def _gathered(self) -> Iterator[tuple[str, ...]]:
        """Kinds of tensors that are there together: all, or each of those that the ranks must gather first when that is done."""
        apart = getattr(self.engine, "gathers", ())
        yield tuple(kind for kind in ("params", *MOMENTS) if kind not in apart)
        for kind in apart:
            self.engine.gather(kind)  # type: ignore[attr-defined]
            yield (kind,)

    def _tensors(self, in_vain: threading.Event,
                 kinds: tuple[str, ...] = ("params", *MOMENTS)) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """All that this rank saves of some kinds, by the names of a checkpoint; no more once that is in vain."""
        each = getattr(self.engine, "export_each", lambda kind: self.engine.export(kind).items())
        for kind in kinds:
            with _by_the_engine():
                pairs = iter(each(kind))
                name, array = next(pairs, ("", None))
            while array is not None:
                if in_vain.is_set():
                    return
                yield name if kind == "params" else f"{kind}.{name}", array
                del array       # before the next one is made
                with _by_the_engine():
                    name, array = next(pairs, ("", None))

    def _raise_first(self) -> None:
        """Raise the error of a rank that failed just before, if there is one; from other machines that news may take a while."""
        limit = time.monotonic() + GRACE_S
        while self.region.aborted() is None and time.monotonic() < limit:
            time.sleep(0.01)
        if self.region.aborted() is not None:
            self.comm.barrier()


_waits = [0]  # of this process's ranks for a disk
_exports = [0]  # by their engines, of which a disk's thread waits for one


@contextmanager
def at_the_disk() -> Iterator[None]:
    """Within it the rank waits for a disk, however long that takes: no GPU keeps it (watch.py)."""
    _waits[0] += 1
    try:
        yield
    finally:
        _waits[0] -= 1


@contextmanager
def _by_the_engine() -> Iterator[None]:
    """Within it a disk's thread waits for the engine, and who waits for that thread does so for a GPU."""
    _exports[0] += 1
    try:
        yield
    finally:
        _exports[0] -= 1


def is_at_the_disk() -> bool:
    return _waits[0] > 0 and _exports[0] == 0


def meanwhile(comm: _core.Comm, patience_s: float, work: Callable[[threading.Event], Any], leave: bool = False) -> Any:
    """What `work` gives, for which a disk may take longer than a rank may wait for another (patience_s, the same for all; 0: for
    ever): a thread does it, and meanwhile the ranks meet again and again: who is lost or stopped is noticed, who is at work is not
    taken for it. All ranks call it, and leave together. work's Event is set where the run, or this rank, ends before it does.
    leave: nobody waits for it then, since it only reads, and may not look at its Event for long."""
    in_vain = threading.Event()
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(in_vain))
        except BaseException as error:
            errors.append(error)

    thread = Worker(run, name=f"the disk of {threading.current_thread().name}")
    thread.daemon |= leave      # that of a rank which is one, a launcher's thread, is one too, or Python's end would wait for it
    start_all([thread], lambda why: None)
    try:
        while True:
            thread.join(min(patience_s / 4, MEET_S) if patience_s > 0 else MEET_S)
            if errors:
                raise errors.pop()      # the list and its error would keep each other, and the engine
            if thread.is_lost():
                raise no_thread(MemoryError("it found no memory to begin with"), thread.name)
            if all(comm.allgather(bytes([bool(results)]))):
                return results[0]
    finally:
        in_vain.set()
        if not leave:
            with at_the_disk():
                thread.join()   # it reads the engine's memory, and writes in a folder that may have to go


def while_others_meet(comm: _core.Comm, patience_s: float, work: Callable[[threading.Event], Any]) -> Any:
    """As :func:`meanwhile`, where the calling thread must do the work: the other one meets the ranks."""
    in_vain, over, gone = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def meet() -> None:
        try:
            while not gone.is_set():
                over.wait(min(patience_s / 4, MEET_S) if patience_s > 0 else MEET_S)
                if all(comm.allgather(bytes([over.is_set()]))):
                    return
        except BaseException as error:
            errors.append(error)
            in_vain.set()

    thread = Worker(meet, name=f"what meets the ranks for {threading.current_thread().name}")
    start_all([thread], lambda why: gone.set())     # a signal handler may raise there
    try:
        result = work(in_vain)
        over.set()
        thread.join()
        if thread.is_lost():
            raise no_thread(MemoryError("it found no memory to begin with"), thread.name)
    except BaseException as error:
        first = errors.copy()
        accuse(error, comm.rank, comm.region)       # or the thread, and the other ranks, would wait for this one
        thread.join()
        if not first or isinstance(error, KeyboardInterrupt):
            errors.clear()      # they and these frames, with the engine, would keep each other
            raise
    if errors:
        raise errors.pop()
    return result


def _in_time(tensors: Arrays, in_vain: threading.Event) -> Arrays:
    """Tensors of a file, of which no more are read once that is in vain."""
    from .tensorfile import OnDemand

    def read(name: str) -> NDArray[np.float32]:
        if in_vain.is_set():
            raise _core.AbortedError("the run, or this rank, has ended")
        with at_the_disk():
            return tensors[name]

    return OnDemand(tensors, read)


def share(comm: _core.Comm, thing: Any) -> list[Any]:
    """The `thing` (JSON) of every rank, in order of ranks; however long, in as many all-gathers as it takes."""
    mine = json.dumps(thing).encode()
    ranks = comm.region.ranks
    sizes = struct.unpack(f"{ranks}Q", comm.allgather(struct.pack("Q", len(mine))))
    parts = [bytearray() for _ in range(ranks)]
    for start in range(0, max(sizes), GATHER_BYTES):
        chunk = mine[start:start + GATHER_BYTES].ljust(GATHER_BYTES, b"\0")
        everyone = comm.allgather(chunk)
        for rank in range(ranks):
            parts[rank] += everyone[rank * GATHER_BYTES:(rank + 1) * GATHER_BYTES]
    return [json.loads(part[:size]) for part, size in zip(parts, sizes, strict=True)]


WRITING = 2**64 - 2  # TP_WRITING of csrc/comm/comm.h
GATHER_BYTES = 4096  # max_gather_bytes of the regions that launch makes


def dataset(job: Job, arrays: Arrays, split: str) -> Any:
    """The data set that a rank draws its batches from."""
    from .data import ReadBefore

    about = job["data"]
    source = about["path"] if about["path"] is not None else arrays["data"]
    data = ReadBefore(source, job["seq_len"], job["batch"], job["seed"], split, about["val_fraction"], job["model"]["vocab_size"])
    if data.num_tokens != about["num_tokens"]:  # ranks would draw different batches, and nobody would see it
        raise _core.InvalidValueError(f"{data.source} has {data.num_tokens} tokens now and had {about['num_tokens']} when the run "
                                      "began: a file that nobody writes to would be right")
    if split == "train" and "fingerprint" in about and data.fingerprint != about["fingerprint"]:     # one of as many, in its place
        raise _core.InvalidValueError(f"{data.source} has other tokens now than when the run began: a file that nobody writes to "
                                      "would be right")
    return data


def _resident_bytes() -> int:
    """The process's largest resident set so far (VmHWM), bytes; all ranks' together where they are threads."""
    with suppress(OSError):  # no descriptor left, or no /proc: the training is good all the same
        for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- failures --------------------------------------------------------------------------------------------------------

STATUSES = {  # Python's own exceptions; ours carry their status in their class
    MemoryError: "EMEMORY", TimeoutError: "ETIMEOUT", ConnectionError: "ECONNECTION", OSError: "EIO", ValueError: "EVALUE",
    TypeError: "ETYPE",
}
CLASSES: dict[str, type[_core.Error]] = {
    "EVALUE": _core.InvalidValueError, "ETYPE": _core.InvalidTypeError, "EMEMORY": _core.OutOfMemoryError,
    "EINFEASIBLE": _core.InfeasibleError, "ESCHEDULE": _core.ScheduleError, "EIO": _core.StorageError,
    "ETIMEOUT": _core.DeadlineError, "ECONNECTION": _core.PeerError, "EABORTED": _core.AbortedError,
    "ERUNTIME": _core.ExecutionError, "EINTERNAL": _core.InternalError,
}


def status_of(error: BaseException) -> str:
    """The status whose exception `error` is, or is most like."""
    for status, kind in CLASSES.items():
        if isinstance(error, kind):
            return status
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), "ERUNTIME")


def interruption(rank: int, region: _core.Region) -> str:
    """What Ctrl-C at `rank` is called, wherever it found the rank."""
    return f"rank {rank} was interrupted {region.doing(rank)}"


def _unsaid(error: BaseException) -> str:
    """What Python's MemoryError does not say."""
    if not isinstance(error, MemoryError):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "more memory" + ("" if limit == resource.RLIM_INFINITY else f", or address space (ulimit -v is {limit // 1024} now),") \
        + " would be right"


def accuse(error: BaseException, rank: int, region: _core.Region) -> tuple[str, str]:
    """(status, message) of what ended `rank`, which ends all others too, if none failed before it."""
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C while this rank was in Python: no fault of the run's
        status, message = "EABORTED", interruption(rank, region)
    else:
        words = [] if isinstance(error, _core.Error) else [type(error).__name__]
        words += [said] if (said := str(error) or _unsaid(error)) else []
        status, message = status_of(error), ": ".join([f"rank {rank} failed {region.doing(rank)}", *words])
    region.abort(status, rank, message)
    return status, message


def _told(error: BaseException, status: str, message: str) -> dict[str, Any]:
    """The event by which the launcher learns of it."""
    lines = [] if isinstance(error, KeyboardInterrupt) else traceback.format_exception(error)
    return {"kind": "error", "status": status, "message": message, "traceback": "".join(lines),
            "errno": error.errno if isinstance(error, OSError) else None}


@contextmanager
def failures(rank: int, region: _core.Region, emit: Emit) -> Iterator[None]:
    """What goes wrong inside ends every rank and is told to the launcher. The first to fail is the one whose words stay."""
    try:
        yield
    except BaseException as error:  # a thread or a process ends here, whatever it was
        status, message = accuse(error, rank, region)
        emit(_told(error, status, message))
        error.__traceback__ = None      # Python 3.13's contextlib keeps itself and these frames, with the data's files, alive by it


# ---- a job and its arrays, from the launcher to a process, in one memfd ----------------------------------------------


def pack(job: Job, arrays: Arrays) -> list[int]:
    """A sealed-in-memory copy as a descriptor: a length word, JSON {"job", "tokens", "arrays": {name: [dtype, shape, offset]}},
    data. "tokens": the place of data that needs no copy, and may be larger than the memory, in a file, whose descriptor is the
    second, so that the file may be removed from now on; or null."""
    from .mapped import place_of

    mapped = place_of(arrays["data"]) if "data" in arrays else None
    file, tokens = (None, None) if mapped is None else mapped
    arrays = {name: array for name, array in arrays.items() if name != "data" or mapped is None}
    index: dict[str, list[Any]] = {}
    offset = 0
    for name, array in arrays.items():
        index[name] = [array.dtype.str, list(array.shape), offset]
        offset += -(-array.nbytes // 64) * 64
    text = json.dumps({"job": dict(job), "tokens": tokens, "arrays": index}).encode()
    base = -(-(8 + len(text)) // 64) * 64
    fds = [] if file is None else [file]
    try:
        fds.insert(0, fd := os.memfd_create("terapipe_c job", os.MFD_CLOEXEC))
        os.posix_fallocate(fd, 0, base + offset)  # too large: an error here, not a SIGBUS there
        with mmap.mmap(fd, base + offset) as memory:
            memory[:8 + len(text)] = struct.pack("<Q", len(text)) + text
            for name, array in arrays.items():
                if array.size:
                    view = np.frombuffer(memory, array.dtype, array.size, base + index[name][2])
                    np.copyto(view.reshape(array.shape), array)
                    del view
    except BaseException:
        for one in fds:
            os.close(one)
        raise
    return fds


def unpack(fd: int, file: int = -1) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What `pack` packed; the arrays are read-only views of the memory, or of the file."""
    from .mapped import tokens_at

    memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    size = struct.unpack("<Q", memory[:8])[0]
    both = json.loads(memory[8:8 + size])
    base = -(-(8 + size) // 64) * 64
    arrays = {}
    for name, (dtype, shape, offset) in both["arrays"].items():
        count = math.prod(shape)
        flat = np.frombuffer(memory, dtype, count, base + offset) if count else np.empty(0, dtype)
        arrays[name] = flat.reshape(shape)
    if both["tokens"] is not None:
        arrays["data"] = tokens_at(file, both["tokens"])
    return both["job"], arrays


# ---- the process -----------------------------------------------------------------------------------------------------


def _watch(channel: socket.socket, launcher: int, region: _core.Region, stopping: threading.Event) -> None:
    """Hears the launcher say stop, and sees it end: by its pidfd, and by the end of the socket should that fail."""
    poll = select.poll()
    poll.register(channel, select.POLLIN | select.POLLHUP)
    poll.register(launcher, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        gone = launcher in ready
        if channel.fileno() in ready:
            try:
                gone |= not channel.recv(64)
            except OSError:
                gone = True
            stopping.set()
        if gone:
            region.abort("EABORTED", -1, "the launcher is gone")
            time.sleep(GRACE_S)
            os._exit(1)


class _Telling:
    """Events on their way to the launcher, by a thread: one that is stopped, or whose terminal is, does not hold up the step, for
    which other ranks wait. After UNHEARD of them it does: their memory has an end."""

    def __init__(self, channel: socket.socket, region: _core.Region) -> None:
        self._channel, self._region = channel, region
        self._events: queue.Queue[bytes | None] = queue.Queue(UNHEARD)
        self.thread = threading.Thread(target=self._tell, name="its voice", daemon=True)

    def emit(self, event: dict[str, Any]) -> None:
        text = json.dumps(event).encode() + b"\n"
        if self.thread.is_alive():
            self._events.put(text)
        else:                           # a thread could not be had, and that is what is to be told
            self._send(text)

    def end(self, wait: bool = True) -> None:
        """All is told, at the latest when this returns if it waits."""
        if self.thread.is_alive():
            self._events.put(None)
            if wait:
                self.thread.join()

    def _tell(self) -> None:
        while (text := self._events.get()) is not None:
            self._send(text)

    def _send(self, text: bytes) -> None:
        try:
            self._channel.sendall(text)
        except OSError:  # the launcher is gone: _watch sees that too
            self._region.abort("EABORTED", -1, "the launcher is gone")


def main(words: list[str]) -> int:
    """The process of one rank, behind _rank.py. words: rank, then the descriptors of region, socket, job (one or two, as of
    `pack`) and the launcher's pidfd."""
    rank, region_fd, channel_fd, *job_fds, launcher = map(int, words)
    channel = socket.socket(fileno=channel_fd)
    try:
        region = _core.Region.attach(region_fd)
    except Exception as error:      # by which all would be told
        message = f"rank {rank} failed before its first instruction: {str(error) or _unsaid(error)}"
        with suppress(OSError):
            channel.sendall(json.dumps(_told(error, status_of(error), message)).encode() + b"\n")
        return 1
    os.close(region_fd)
    stopping = threading.Event()

    told = _Telling(channel, region)
    failed = True
    with failures(rank, region, told.emit):
        watch = threading.Thread(target=_watch, args=(channel, launcher, region, stopping), name="its watch", daemon=True)
        start_all([told.thread, watch], lambda why: told.end(wait=False))
        job, arrays = unpack(*job_fds)
        for fd in job_fds:
            os.close(fd)
        run_rank(job, rank, region, told.emit, stopping.is_set, arrays)
        failed = False
    told.end()
    return int(failed)
