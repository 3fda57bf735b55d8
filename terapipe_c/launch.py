"""`launch`: a plan, data and a number of steps become a running training, watched until its last rank has ended."""
from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from .engine import gather_bytes, rank_memory
from .progress import Progress
from .ranks import ProcessRanks, Ranks, ThreadRanks
from .report import Report
from .worker import CLASSES, GATHER_BYTES, GRACE_S

__all__ = ["Record", "Run", "launch"]

ENGINE = "terapipe_c.engine:make_engine"
RING_BYTES = 256 << 10, 16 << 20  # smallest and largest ring between two ranks
MODEL_FIELDS = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "bias", "tie_weights")


@dataclass(frozen=True)
class Record:
    """One step. Steps count from 0; step s trains on `Dataset.batch(s)`. Times in seconds; losses are means per token."""

    step: int
    loss: float
    grad_norm: float  # over all ranks, before clipping
    lr: float
    tokens_per_s: float
    step_time_s: float  # from all ranks' start to the slowest one's end, without evaluation and checkpoints
    predicted_step_time_s: float
    eval_loss: float | None = None  # None where this step did not evaluate


def launch(plan: Any, data: Any, steps: int, *, seed: int = 0, out: str | os.PathLike[str] | None = None, lr: float = 6e-4,
           min_lr: float | None = None, lr_schedule: str = "cosine", warmup_steps: int = 0, weight_decay: float = 0.1,
           betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, grad_clip: float = 1.0, init: Any = None,
           backend: str = "cpu", processes: bool = True, threads_per_rank: int = 1, reproducible: bool = True,
           resume: bool = False, checkpoint_every: int = 50, log_every: int = 1, eval_every: int = 0, eval_batches: int = 4,
           progress: bool | None = None, val_fraction: float = 0.1, tokenizer: Any = None, timeout_s: float = 600.0,
           engine: str = ENGINE) -> Run:
    """Start training `plan` on `data` until `steps` steps have been done; returns at once. Iterate over the run, or wait().

    Args:
        plan: what `tp.plan` gave.
        data: a file or a 1-D integer array; see `Dataset`.
        steps: total number of steps, those before a resume included.
        out: run folder, which must be new (or empty), or with `resume` hold a checkpoint. None: nothing is written.
        lr, min_lr, lr_schedule, warmup_steps: "cosine" from lr to min_lr (None: lr / 10), or "constant".
        init: None (drawn from `seed`), {name: float32 array}, a checkpoint or the path of one.
        processes: one process per rank; False: one thread per rank in this process.
        checkpoint_every: steps between checkpoints, one after the last step too; 0: none.
        log_every: steps between records. eval_every: steps between evaluations on the last `val_fraction`; 0: none.
        progress: None: a bar on a terminal or in a notebook, lines elsewhere; False: silence.
        backend: "cpu". threads_per_rank: threads that share a rank's kernels; the results are the same bits for any number.
        reproducible: the results are the same bits for any stages, slices and schedule. On the CPU they are so whatever this
            says: there is no faster mode that gives it up.
        timeout_s: a rank that waits longer than this for another one fails; 0: it waits for ever.
        engine: "module:function" that makes the engine of a rank (see `terapipe_c.worker`).

    Raises before any rank is started: FileExistsError, OSError (the run folder), FileNotFoundError, ValueError (also for a plan
    that is not ``plan.executable``).
    """
    if not hasattr(plan, "to_dict") or not hasattr(plan, "ranks"):
        raise _core.InvalidTypeError(f"plan is {type(plan).__name__}: a Plan (tp.plan, tp.Plan.load) would be right")
    options = {"seed": seed, "lr": lr, "min_lr": min_lr, "lr_schedule": lr_schedule,
               "warmup_steps": warmup_steps, "weight_decay": weight_decay, "betas": list(betas), "eps": eps,
               "grad_clip": grad_clip, "backend": backend, "threads_per_rank": threads_per_rank, "reproducible": reproducible,
               "checkpoint_every": checkpoint_every if out is not None else 0, "log_every": log_every,
               "eval_every": eval_every, "eval_batches": eval_batches, "timeout_s": timeout_s, "steps": steps, "engine": engine}
    _check(options)
    check_executable(plan)
    folder = None if out is None else Path(out).absolute()
    if folder is not None and not resume and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(17, "this run folder exists already: another one, or resume=True, would be right", str(folder))
    if resume and folder is None:
        raise _core.InvalidValueError("resume is True but out is None: the run folder to resume would be right")
    arrays: dict[str, NDArray[Any]] = {}
    job: dict[str, Any] = {**options, **_describe(plan), "out": None if folder is None else str(folder), "first_step": 0,
                           "resume_from": None, "predicted_peak_memory_bytes": _memory(plan, options)}
    if resume:
        job.update(_resume_from(folder, job))
    elif init is not None:
        arrays |= {f"init/{name}": value for name, value in _initial(init, plan.model).items()}
    job["data"] = _open_data(data, job, val_fraction, tokenizer, arrays)
    if folder is not None:
        _make_folder(folder, job, plan)
    region = _region(plan, job, processes)
    try:
        ranks: Ranks = (ProcessRanks if processes else ThreadRanks)(job, arrays, region)
    except BaseException:
        region.close()
        raise
    return Run(plan, job, region, ranks, Progress(progress, job["first_step"], steps))


# ---- what is checked and written before anybody starts ---------------------------------------------------------------


def _check(options: dict[str, Any]) -> None:
    whole = {"steps": 0, "warmup_steps": 0, "threads_per_rank": 1, "checkpoint_every": 0, "log_every": 1, "eval_every": 0,
             "eval_batches": 1, "seed": 0}
    for name, least in whole.items():
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise _core.InvalidValueError(f"{name} is {value!r}: an integer of at least {least} would be right")
    for name in ("lr", "min_lr", "weight_decay", "eps", "grad_clip", "timeout_s"):
        value = options[name]
        if name == "min_lr" and value is None:
            options[name] = value = options["lr"] / 10
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise _core.InvalidValueError(f"{name} is {value!r}: a finite number of at least 0 would be right")
    if options["backend"] != "cpu":
        raise _core.InvalidValueError(f"backend is {options['backend']!r}: 'cpu' would be right (this version has no other)")
    if options["lr_schedule"] not in ("cosine", "constant"):
        raise _core.InvalidValueError(f"lr_schedule is {options['lr_schedule']!r}: 'cosine' or 'constant' would be right")
    if len(options["betas"]) != 2 or not all(0 <= beta < 1 for beta in options["betas"]):
        raise _core.InvalidValueError(f"betas is {options['betas']!r}: two numbers in [0, 1) would be right")


def check_executable(plan: Any) -> None:
    """InvalidValueError if this engine cannot run the plan, saying what of it."""
    why = getattr(plan, "why_not_executable", "")
    if why:
        raise _core.InvalidValueError(f"this plan cannot be run: {why}; tp.plan(..., executable=True) plans what it does")


def _describe(plan: Any) -> dict[str, Any]:
    """All that a job keeps of a plan; the one place that knows a plan's attributes."""
    model = {name: getattr(plan.model, name) for name in MODEL_FIELDS}
    return {"plan": plan.to_dict(), "model": model, "seq_len": int(plan.seq_len), "batch": int(plan.batch),
            "ranks": int(plan.ranks)}


def _memory(plan: Any, options: Mapping[str, Any]) -> list[int]:
    """What each rank will hold with so many threads, on this processor: a plan knows one thread, and where it was made."""
    if options["engine"] != ENGINE:
        return [int(size) for size in plan.peak_memory_bytes]
    sizes = rank_memory(plan.model, plan.stages, plan.slicing, plan.program, options["threads_per_rank"])
    limit = plan.memory_limit_bytes
    for rank, size in enumerate(sizes):
        if limit is not None and size > limit:
            raise _core.InfeasibleError(f"rank {rank} needs {size} bytes with threads_per_rank = {options['threads_per_rank']} and "
                                        f"may use {limit}: {size - limit} bytes short; a plan with memory_bytes = {size} would "
                                        f"be right")
    return sizes


def _resume_from(folder: Path | None, job: Mapping[str, Any]) -> dict[str, Any]:
    from .checkpoint import find_checkpoint

    path = find_checkpoint(Path(str(folder)))
    state = json.loads((path / "state.json").read_text())
    different = [name for name in MODEL_FIELDS if state["model"][name] != job["model"][name]]
    if different:
        name = different[0]
        raise _core.InvalidValueError(f"{path}: the checkpoint's model has {name} {state['model'][name]}, the plan's has "
                                      f"{job['model'][name]}")
    return {"resume_from": str(path), "first_step": int(state["step"])}


def _initial(init: Any, model: Any) -> Mapping[str, NDArray[np.float32]]:
    from .checkpoint import Checkpoint, load_checkpoint, param_shapes

    if isinstance(init, (str, os.PathLike)):
        init = load_checkpoint(init, optimizer=False)
    if not isinstance(init, (Mapping, Checkpoint)):
        raise _core.InvalidTypeError(f"init is {type(init).__name__}: a dict of arrays, a checkpoint or its path would be right")
    params: Mapping[str, NDArray[np.float32]] = init if isinstance(init, Mapping) else init.params or {}
    for name, value in params.items():
        if not isinstance(value, np.ndarray) or value.dtype != np.float32:
            raise _core.InvalidValueError(f"init: {name} is {getattr(value, 'dtype', type(value).__name__)}: a float32 array "
                                          f"would be right")
    for name, shape in param_shapes(model).items():
        if name not in params or params[name].shape != shape:
            found = "missing" if name not in params else f"of shape {params[name].shape}"
            raise _core.InvalidValueError(f"init: {name} is {found}: {shape}, as in tp.init_params(plan.model), would be right")
    return params


def _open_data(data: Any, job: Mapping[str, Any], val_fraction: float, tokenizer: Any,
               arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Read every token once, here, so that bad data is refused before anybody starts."""
    from .data import Dataset

    sizes = job["seq_len"], job["batch"]
    whole = Dataset(data, *sizes, seed=job["seed"], val_fraction=val_fraction, vocab_size=job["model"]["vocab_size"],
                    tokenizer=tokenizer)
    if job["eval_every"]:
        Dataset(whole.tokens, *sizes, seed=job["seed"], split="val", val_fraction=val_fraction)
    if isinstance(data, (str, os.PathLike)) and tokenizer is None:
        return {"path": os.path.abspath(data), "val_fraction": val_fraction}
    arrays["data"] = whole.tokens
    return {"path": None, "val_fraction": val_fraction}


def _make_folder(folder: Path, job: Mapping[str, Any], plan: Any) -> None:
    """config.json, plan.json and a metrics.jsonl that ends where this run begins."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config = {name: value for name, value in job.items() if name != "plan"}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        plan.save(folder / "plan.json")
        metrics = folder / "metrics.jsonl"
        kept = metrics.read_text().splitlines() if metrics.exists() else []
        kept = [line for line in kept if _step_of(line) < job["first_step"]]
        metrics.write_text("".join(line + "\n" for line in kept))
    except BaseException:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut off when its writer died


def _region(plan: Any, job: Mapping[str, Any], shared: bool) -> _core.Region:
    """Rings between neighbours, first and last included: interleaved stages and a tied embedding go round."""
    ranks = job["ranks"]
    pairs = bytearray(ranks * ranks)
    for rank in range(ranks):
        for other in ((rank + 1) % ranks, (rank - 1) % ranks):
            pairs[rank * ranks + other] = other != rank
    message = 4 * job["model"]["n_embd"] * max(batch * max(lengths) for batch, lengths in plan.slicing)
    ring = min(max(4 * message, RING_BYTES[0]), RING_BYTES[1])
    return _core.Region.create(ranks, pairs, ring, max(GATHER_BYTES, gather_bytes(plan.model)), shared)


# ---- a running training ----------------------------------------------------------------------------------------------


class Run:
    """A training under way. A thread of this process watches it whether or not anybody iterates.

    Iterating gives every `Record` from the first on, waits for new ones, and raises what ended the run if that was not its
    last step. An exception inside `with launch(...) as run:` and Ctrl-C end it.
    """

    def __init__(self, plan: Any, job: Mapping[str, Any], region: _core.Region, ranks: Ranks, progress: Progress) -> None:
        self.plan = plan
        self.out = None if job["out"] is None else Path(job["out"])
        self.pids: list[int] = ranks.pids
        self._job, self._region, self._ranks, self._progress = job, region, ranks, progress
        self._history: list[Record] = []
        self._ends: dict[int, dict[str, Any]] = {}
        self._errors: dict[int, dict[str, Any]] = {}
        self._checkpoint: Path | None = Path(job["resume_from"]) if job["resume_from"] else None
        self._error: BaseException | None = None
        self._over = self._interrupted = False
        self._alive = set(range(job["ranks"]))
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._locking = self._keyboard = False  # in _wait_for; Ctrl-C came meanwhile
        self._watcher = threading.Thread(target=self._watch, name="terapipe run", daemon=True)
        _living.add(self)
        self._watcher.start()

    # -- what a user asks --

    def __iter__(self) -> Iterator[Record]:
        seen = 0
        with self._interruptible():
            while fresh := self._wait_for(seen, None):
                seen += len(fresh)
                yield from fresh
            if self._error is not None:
                raise self._error

    def wait(self, timeout_s: float | None = None) -> Run:
        """Return when the run is over, or after timeout_s; raise what ended it if that was not its last step or stop()."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen = 0
        with self._interruptible():
            while fresh := self._wait_for(seen, deadline):
                seen += len(fresh)
        if self._over and self._error is not None:
            raise self._error
        return self

    def stop(self) -> Run:
        """End after the step under way, with a checkpoint if the run writes any; returns when that is done. A run that is
        over, or was interrupted, stays what it is."""
        self._ranks.stop()
        try:
            return self if self._over else self.wait()
        except _core.AbortedError:
            if self._interrupted:
                return self
            raise

    @property
    def history(self) -> list[Record]:
        """The records so far."""
        return list(self._history)

    @property
    def running(self) -> bool:
        """Whether any rank is alive."""
        return not self._over

    @property
    def loss_eval(self) -> float | None:
        """The newest evaluation's mean loss; None if there was none."""
        return next((record.eval_loss for record in reversed(self._history) if record.eval_loss is not None), None)

    @property
    def checkpoint_path(self) -> Path | None:
        """The newest complete checkpoint; None if there is none."""
        return self._checkpoint

    @property
    def trace(self) -> list[tuple[int, str, int, int, int, float, float]]:
        """What ran in the last step, when the run is over: (rank, op, stage, micro, slice, start_s, end_s), from 0 s on."""
        rows = [(rank, *row) for rank in sorted(self._ends) for row in self._ends[rank]["trace"]]
        start = min((row[5] for row in rows), default=0.0)
        return [(rank, op, stage, micro, piece, begin - start, end - start)
                for rank, op, stage, micro, piece, begin, end in rows]

    def timeline(self) -> Any:
        """The measured timeline of the last step, drawn like the predicted one (`plan.timeline()`)."""
        from .schedule import Timeline

        return Timeline.from_intervals(self.trace, self._job["ranks"])

    def report(self) -> Report:
        """Predicted beside measured, once the run is over. Printing it or showing it in a notebook draws it."""
        self.wait()
        ends = [self._ends[rank] for rank in sorted(self._ends)]
        records = [asdict(record) for record in self._history]
        return Report.of(self.plan, records, ends, self.timeline(), self._job)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        if kind is not None:
            self._interrupt("the launcher left its with block by an exception")
            self._watcher.join()
        else:
            self.wait()

    def __repr__(self) -> str:
        state = "running" if not self._over else "failed" if self._error else "done"
        last = f", step {self._history[-1].step}, loss {self._history[-1].loss:.4f}" if self._history else ""
        return f"Run({state}, {self._job['ranks']} ranks, {self._job['steps']} steps{last}, out={self._job['out']})"

    # -- waiting, and being interrupted --

    def _wait_for(self, seen: int, deadline: float | None) -> list[Record]:
        """The records after the first `seen`; none when the run is over, or after the deadline."""
        main = threading.current_thread() is threading.main_thread()
        self._locking = main    # a KeyboardInterrupt raised in here could leave the lock held for ever
        with self._changed:
            while len(self._history) == seen and not self._over:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            fresh = self._history[seen:]
            self._progress.show(self._history, self._over)
        if main:
            self._locking = False
            if self._keyboard:
                raise KeyboardInterrupt
        return fresh

    def _interrupt(self, why: str) -> None:
        """Safe in a signal handler: it takes no lock."""
        if not self._over:
            self._interrupted = True
            self._region.abort("EABORTED", -1, why)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C ends the run, also when it comes between two records, in the caller's loop, which would not tell us: a
        generator that is not running sees no exception. Only where nobody else handles SIGINT."""
        ours = None
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            def ours(number: int, frame: Any) -> None:
                self._interrupt("interrupted (Ctrl-C)")
                if self._locking and not self._over:   # the abort wakes _wait_for, which raises
                    self._keyboard = True
                else:
                    signal.default_int_handler(number, frame)

            signal.signal(signal.SIGINT, ours)
        try:
            yield
        except KeyboardInterrupt:
            self._interrupt("interrupted (Ctrl-C)")
            self._watcher.join()
            raise
        finally:
            if ours is not None and signal.getsignal(signal.SIGINT) is ours:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.default_int_handler)

    # -- the watcher's thread --

    def _watch(self) -> None:
        metrics = None
        try:
            if self.out is not None:
                metrics = (self.out / "metrics.jsonl").open("a")
            self._follow(metrics)
            if self.out is not None and len(self._ends) == self._job["ranks"]:
                columns = ["rank", "op", "stage", "micro", "slice", "start_s", "end_s"]
                (self.out / "trace.json").write_text(json.dumps({"columns": columns, "rows": self.trace}) + "\n")
        except BaseException as error:  # ours, not a rank's: nobody may be left running
            self._error = self._error or error
            self._region.abort("EABORTED", -1, f"the launcher failed: {error}")
            self._follow(None, deaf=True)  # what they say is what went wrong, perhaps
        finally:
            if metrics is not None:
                metrics.close()
            self._ranks.close()
            self._region.close()
            if self._error is None and len(self._ends) < self._job["ranks"]:
                self._error = self._failure()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _follow(self, metrics: Any, deaf: bool = False) -> None:
        """Hear every rank to its end; once there is an abort, those that outlive it by GRACE_S are killed."""
        limit, alive = math.inf, self._alive
        while alive:
            for rank, event in self._ranks.events(0.1):
                if event["kind"] == "exit":
                    alive.discard(rank)
                    if rank not in self._ends and self._region.aborted() is None:
                        self._region.abort("ECONNECTION", rank, f"rank {rank} ended early {self._region.doing(rank)}")
                elif not deaf:
                    self._hear(rank, event, metrics)
            if limit == math.inf and self._region.aborted() is not None:
                limit = time.monotonic() + GRACE_S
            if time.monotonic() > limit:
                self._ranks.kill()

    def _hear(self, rank: int, event: dict[str, Any], metrics: Any) -> None:
        kind = event.pop("kind")
        if kind == "step":
            record = Record(**event, predicted_step_time_s=float(self.plan.step_time_s))
            if metrics is not None:
                metrics.write(json.dumps(asdict(record)) + "\n")
                metrics.flush()
            with self._changed:
                self._history.append(record)
                self._changed.notify_all()
        elif kind == "checkpoint":
            self._checkpoint = Path(event["path"])
        elif kind == "end":
            self._ends[rank] = event
        elif kind == "error":
            self._errors[rank] = event

    def _failure(self) -> BaseException:
        """The first rank's failure, in its own words where they reached us whole."""
        status, rank, text = self._region.aborted() or ("EINTERNAL", -1, "the run ended and nobody knows why")
        told = self._errors.get(rank)
        error = CLASSES[status](told["message"] if told else text)
        if told:
            error.add_note(f"In rank {rank}:\n{told['traceback']}")
        return error


_living: weakref.WeakSet[Run] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Nothing outlives this Python; a fork of it ends nothing that is not its own."""
    for run in list(_living):
        if run._owner == os.getpid() and not run._over:
            run._interrupt("the launcher ended")
            run._watcher.join(2 * GRACE_S + 1)
