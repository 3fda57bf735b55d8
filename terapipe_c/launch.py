"""`launch`: a plan, data and a number of steps become a running training, watched until its last rank has ended."""
from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import _core
from ._steps import remove_stale
from ._threads import LOOK_S, begin, no_thread, refused
from .backend import choose
from .config import counted, flag, timeout
from .engine import lent_bytes
from .guests import guest_bytes
from .job import ENGINE, Folder, copies_of, hosts_of, largest_gather, make_folder, make_job, neighbours, replicas_of
from .outcome import Metrics, Outcome, Record
from .progress import Beside, Progress
from .ranks import ProcessRanks, Ranks, ThreadRanks
from .report import Report
from .worker import CHECKPOINTS, CLASSES, GRACE_S

if TYPE_CHECKING:
    from .data import Data, Tokenizer
    from .plan import Plan
    from .schedule import Timeline

__all__ = ["Record", "Run", "launch", "runs"]

RING_BYTES = 256 << 10, 16 << 20  # smallest and largest ring between two ranks
TIED_RING_BYTES = 1 << 20  # largest ring for the ends of a tied embedding alone: both copies stay in a cache
TWIN_BYTES = 64 << 10, 2 << 20  # smallest ring between the same ranks of two of several replicas; of a rank's together


def launch(plan: Plan, data: Data, steps: int, *, seed: int = 0, out: str | os.PathLike[str] | None = None, lr: float = 6e-4,
           min_lr: float | None = None, lr_schedule: str = "cosine", warmup_steps: int = 0, weight_decay: float = 0.1,
           betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, grad_clip: float = 1.0, init: Any = None,
           backend: str = "cpu", processes: bool = True, threads_per_rank: int = 1, reproducible: bool = True,
           resume: bool = False, checkpoint_every: int = 50, log_every: int = 1, eval_every: int = 0, eval_batches: int = 4,
           progress: bool | None = None, val_fraction: float = 0.1, tokenizer: Tokenizer | None = None, timeout_s: float = 600.0,
           engine: str = ENGINE, dtype: str | None = None, devices: Sequence[int] | None = None) -> Run:
    """Start training `plan` on `data` until `steps` steps have been done; returns at once. Iterate over the run, or wait().

    Args:
        plan: what `tp.plan` gave.
        data: a file or a 1-D integer array; see `Dataset`. Ranks that are processes map a file, and a np.memmap of mode "r", too;
            any other array, and those of `init`, are copied for them once. So they are for threads, which borrow what is mapped in
            any mode and what nobody can write to, as after `data.setflags(write=False)`.
        steps: total number of steps, those before a resume included.
        seed: of the initial parameters and of the order of the data.
        out: run folder, which must be new (or empty), or with `resume` hold a checkpoint; one run at a time. None: nothing is
            written.
        lr, min_lr, lr_schedule, warmup_steps: "cosine" from lr to min_lr (None: lr / 10), or "constant", after rising to
            lr in warmup_steps. The cosine ends at `steps`: resumed with more, it is another one, and lr leaps up.
        weight_decay, betas, eps: AdamW's; matrices and embeddings alone decay. grad_clip: largest norm of all gradients together;
            0: any. In schedule pipedream of each micro-batch's on each stage; a record's grad_norm is the root of the mean square
            of its micro-batches' norms then.
        init: None (drawn from `seed`), {name: float32 array}, a checkpoint, what `tp.import_hf` gave, or the path of a checkpoint
            or of a transformers folder, from which each rank takes its own as it begins: it must stay as it is until the first
            record. A resume reads the run's checkpoint instead.
        resume: go on from the newest checkpoint in `out`, with these options: a UserWarning names those of the optimizer that are
            not the checkpoint's, a cosine that ends elsewhere than the run's did, and steps that it is beyond.
        processes: one process per rank; False: one thread per rank in this process.
        checkpoint_every: steps between checkpoints, one after the last step too (where ``steps`` is 0, of the initial parameters);
            0: none. The newest two stay, older ones are removed; copy one elsewhere to keep it.
        log_every: steps between records, all of which stay in ``history``: a million take some 300 MB of this process. eval_every:
            steps between evaluations on the last `val_fraction`, and one after the last step; 0: none. A step that is evaluated has
            a record.
        eval_batches: batches of an evaluation. val_fraction: share of the tokens, the last ones, that are for evaluations.
        tokenizer: for a text: called once with all of it, gives token numbers; None: its bytes are the tokens.
        progress: None: a bar on a terminal or in a notebook, lines elsewhere; False: silence.
        backend: "cpu" or "cuda". threads_per_rank: threads that share a rank's kernels; the results are the same bits for any
            number.
        dtype: of activations, and of what products read: "float32", on "cuda" also "bf16" (None: that).
        devices: on "cuda", the GPU of each rank, which ranks may share; None: rank r has GPU r.
        reproducible: the results are those of one device, the same bits for any stages, slices and schedule. On the CPU False
            differs for plans alone that need it: schedule pipedream's, and those with replicas (``data_parallel``, or chimera's two
            copies of the model), which add their gradients in ascending order, the same bits for as many replicas of any stages,
            slices and schedule. On
            "cuda" both are for any slices of the same micro-batches, beyond 1024 tokens among plans that recompute or swap FFNs
            alone and among all others; without replicas False promises nothing, and is faster.
        timeout_s: a rank that waits longer than this for another one fails; 0: it waits for ever (for NCCL to connect ranks, 60 s).
            A checkpoint may take longer.
        engine: "module:function" that makes the engine of a rank (see `terapipe_c.worker`).

    Raises before any rank is started: FileExistsError, OSError (the run folder), FileNotFoundError, ValueError (also for a plan
    that is not ``plan.executable``, and for fewer or different GPUs), ExecutionError (no driver), OutOfMemoryError (of a GPU, or
    of this machine, where its ranks together need more than it has), StorageError (a disk with no room for its checkpoints).
    """
    arguments = {name: value for name, value in locals().items() if name not in ("processes", "progress")}
    processes, progress = flag("processes", processes), None if progress is None else flag("progress", progress)
    job, arrays = make_job(**arguments)
    run = None
    try:
        with _undisturbed():
            run = _start(plan, job, arrays, processes, progress)
    except BaseException:
        if run is not None:      # a signal came meanwhile
            run._interrupt("the launcher was interrupted")
            run._watcher.join()
        raise
    return run


def _start(plan: Any, job: dict[str, Any], arrays: dict[str, Any], processes: bool, progress: bool | None) -> Run:
    region, folder = _region(plan, job, processes), None
    try:
        folder = make_folder(job, plan) if job["out"] is not None else None
        bar = Progress(progress, job["first_step"], job["steps"])  # before the ranks: should it fail, nobody would end them
        ranks: Ranks = (ProcessRanks if processes else ThreadRanks)(job, arrays, region)
        return Run(plan, job, region, ranks, bar, folder)
    except BaseException:
        region.close()
        if folder is not None:
            folder.undo()
        raise


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that come meanwhile reach their handlers afterwards. Ctrl-C's raises wherever it is, also between the start of a
    process and the line that knows of it."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: handler for number in signal.valid_signals() if main and callable(handler := signal.getsignal(number))}
    missed: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda late, frame: missed.append(late))
        yield
    finally:
        raised = None
        while handlers:
            number = next(iter(handlers))
            try:
                signal.signal(number, handlers[number])
                del handlers[number]
            except BaseException as error:  # of a handler that is back already
                raised = error
        for late in dict.fromkeys(missed):
            signal.raise_signal(late)
        if raised is not None:
            raise raised


def _region(plan: Any, job: Mapping[str, Any], shared: bool) -> _core.Region:
    """Rings between neighbours, smaller ones between more than two replicas, each of which has one to every other, and such that
    a micro-batch's activations are on their way at once, within the largest, between ranks that keep them for each other. What
    leaves a stage lies in its rank's arena, where that is known before the engine is: then a ring is for a tied embedding."""
    message = 4 * job["model"]["n_embd"] * max(batch * max(lengths) for batch, lengths in plan.slicing)
    copies, halvings, arenas = copies_of(plan), 0, _arenas(plan, job)
    members = copies * replicas_of(plan)
    ring = min(max(4 * message, RING_BYTES[0]), RING_BYTES[1] if members > 1 or not any(arenas) else TIED_RING_BYTES)
    while members > 2 and ring >> halvings + 1 >= max(TWIN_BYTES[0], TWIN_BYTES[1] // (members - 1)):
        halvings += 1
    kept, wider = hosts_of(plan), 0
    where = choose(job["backend"], job["dtype"])
    guest = max(guest_bytes(plan.model, plan.stages, plan.slicing, plan.recompute, where)[rank] for rank, _ in kept) if kept else 0
    while ring << wider < min(guest + RING_BYTES[0] // 4, RING_BYTES[1]):
        wider += 1
    pairs = neighbours(job["ranks"], replicas_of(plan), 1 + halvings + wider, copies, 1 + wider, kept)
    return _core.Region.create(job["ranks"], pairs, ring << wider, largest_gather(plan.model), shared, arenas)


def _arenas(plan: Any, job: Mapping[str, Any]) -> list[int]:
    """Bytes of each rank's arena."""
    if job["engine"] != ENGINE:
        return [0] * int(job["ranks"])
    return replicas_of(plan) * lent_bytes(plan.model, plan.stages, plan.slicing, plan.program, choose(job["backend"], job["dtype"]),
                                          plan.recompute, plan.swap)


# ---- a running training ----------------------------------------------------------------------------------------------


class Run(Outcome):
    """A training under way. A thread of this process watches it whether or not anybody iterates.

    Iterating gives every `Record` from the first on, waits for new ones, and raises what ended the run if that was not its
    last step. To end it early, call ``stop()``: leaving the loop by ``break`` stops nothing. An exception inside
    ``with launch(...) as run:`` and Ctrl-C end it; a block that ends as usual waits for the last step.
    """

    def __init__(self, plan: Any, job: Mapping[str, Any], region: _core.Region, ranks: Ranks, progress: Progress,
                 folder: Folder | None) -> None:
        super().__init__(plan, job)
        self.pids: list[int] = ranks.pids
        self._region, self._ranks, self._progress, self._folder = region, ranks, progress, folder
        self._errors: dict[int, dict[str, Any]] = {}
        self._halted: list[int] | None = None     # ranks that were stopped when the run failed
        self._error: BaseException | None = None
        self._over = self._interrupted = False
        self._alive = set(range(job["ranks"]))
        self._owner, self._begun = os.getpid(), time.monotonic()
        self._changed = threading.Condition()
        self._locking = self._keyboard = False  # in _wait_for; Ctrl-C came meanwhile
        self._watcher = threading.Thread(target=self._watch, name="terapipe run", daemon=True)
        try:
            begin(self._watcher)
        except BaseException as error:      # no thread can be had, or Ctrl-C: nobody may be left running
            region.abort("EABORTED", -1, f"the launcher failed: {error}")
            if self._watcher.ident is None:
                ranks.end()
            else:
                self._watcher.join()
            if refused(error):
                raise no_thread(error, "the launcher") from error
            raise
        _living.add(self)

    # -- what a user asks --

    def __iter__(self) -> Iterator[Record]:
        seen = 0
        with self._interruptible() as shown:
            while fresh := self._wait_for(seen, None, shown):
                seen += len(fresh)
                yield from fresh
            if self._error is not None:
                raise self._error

    def wait(self, timeout_s: float | None = None) -> Run:
        """Return when the run is over, or after timeout_s; raise what ended it if that was not its last step or stop()."""
        deadline = None if timeout_s is None else time.monotonic() + timeout("timeout_s", timeout_s)
        seen = 0
        with self._interruptible() as shown:
            while fresh := self._wait_for(seen, deadline, shown):
                seen += len(fresh)
        if self._over and self._error is not None:
            raise self._error
        return self

    def stop(self) -> Run:
        """End after the step under way, with a checkpoint if the run writes any; returns when that is done. A run that is
        over, or was interrupted, stays what it is."""
        self._check_process()
        self._ranks.stop()
        try:
            return self if self._over else self.wait()
        except _core.AbortedError:
            if self._interrupted:
                return self
            raise

    @property
    def running(self) -> bool:
        """Whether any rank is alive."""
        return not self._over

    def report(self) -> Report:
        """Predicted beside measured, once the run is over: until then this waits, and shows the progress, as :meth:`wait` does.
        Ctrl-C while it waits ends the training; in a notebook, interrupting the cell does. Printing it or showing it in a notebook
        draws it.
        """
        self.wait()
        return super().report()

    def timeline(self) -> Timeline:
        """The measured timeline of the last step, drawn like the predicted one (`plan.timeline()`), once the run is over: until
        then this waits, as :meth:`report` does."""
        self.wait()
        return super().timeline()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        try:
            if kind is None:
                self.wait()
        except BaseException:   # of a signal's handler (an alarm's, pytest-timeout's), too: nobody has the run any more
            kind = BaseException
            raise
        finally:
            if kind is not None:
                self._interrupt("the launcher left its with block by an exception")
                self._watcher.join()

    def __repr__(self) -> str:
        ended = "interrupted" if self._interrupted and isinstance(self._error, _core.AbortedError) else "failed"
        state = "running" if not self._over else ended if self._error else "done"
        return f"Run({state}, {counted(self._job['ranks'], 'rank')}, {self._so_far()}, out={self._job['out']})"

    def __reduce__(self) -> NoReturn:
        kept = "its report (run.report())" + ("" if self._job["out"] is None else f" or its folder ({self._job['out']})")
        raise TypeError(f"a run belongs to process {self._owner}, which watches it, and is neither pickled nor copied: keep {kept}")

    # -- waiting, and being interrupted --

    def _wait_for(self, seen: int, deadline: float | None, shown: Beside) -> list[Record]:
        """The records after the first `seen`; none when the run is over, or after the deadline."""
        self._check_process()
        main = threading.current_thread() is threading.main_thread()
        try:
            if main:
                self._locking = True    # a KeyboardInterrupt raised in here could leave the lock held for ever
            self._changed.acquire()         # no with block: where a signal's handler raises as it ends, the lock stays held
            while len(self._history) == seen and not self._over:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                # not for ever: a signal that comes right before, as may be the last that happens, is heard when this returns
                self._changed.wait(LOOK_S if left is None else min(left, LOOK_S))
            fresh, last, over = self._history[seen:], self._history[-1:], self._over
            self._changed.release()
        except BaseException:
            with suppress(RuntimeError):    # it is not ours, or not any more
                while True:
                    self._changed.release()
            raise
        finally:
            if main:
                self._locking = False
        if main and self._keyboard:
            self._keyboard = False      # once: whoever asks this run for something afterwards has pressed nothing
            raise KeyboardInterrupt
        shown.show(last, over)
        return fresh

    def _check_process(self) -> None:
        """A fork has no watcher: it would wait for ever."""
        if self._owner != os.getpid() and not self._over:
            raise _core.ExecutionError(f"this run is of process {self._owner}, and this is a fork of it: the run is watched and "
                                       "stopped there")

    def _interrupt(self, why: str) -> None:
        """Safe in a signal handler: it takes no lock."""
        if not self._over and self._owner == os.getpid():   # a fork that leaves our with block ends nothing
            self._interrupted = True
            self._region.abort("EABORTED", -1, why)

    @contextmanager
    def _interruptible(self) -> Iterator[Beside]:
        """Ctrl-C ends the run, also when it comes between two records, in the caller's loop, which would not tell us: a
        generator that is not running sees no exception. Only where nobody else handles SIGINT."""
        if main := threading.current_thread() is threading.main_thread():
            _followed.append(self)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, _ctrl_c)
        try:
            with Beside(self._progress) as shown:
                yield shown
        except KeyboardInterrupt:
            self._interrupt("interrupted (Ctrl-C)")
            self._watcher.join()
            raise
        finally:
            if main:
                _followed.remove(self)
                if not _followed and signal.getsignal(signal.SIGINT) is _ctrl_c:
                    if threading.current_thread() is threading.main_thread():     # who collects garbage may be another
                        signal.signal(signal.SIGINT, signal.default_int_handler)

    # -- the watcher's thread --

    def _watch(self) -> None:
        metrics = None
        try:
            if self.out is not None:
                metrics = Metrics(self.out / "metrics.jsonl")
            self._follow(metrics)
            if len(self._ends) == self._job["ranks"]:
                self._write_trace()
        except BaseException as error:  # ours, not a rank's: nobody may be left running
            self._error = self._error or error
            self._region.abort("EABORTED", -1, f"the launcher failed: {error}")
            self._follow(None, deaf=True)  # what they say is what went wrong, perhaps
        finally:
            try:
                if self._error is None and len(self._ends) < self._job["ranks"]:
                    self._error = self._failure()
                self._give_back(metrics)
                if self._interrupted:
                    self._progress.interrupted(self._history[-1:])
            except BaseException as error:
                self._error = self._error or error
            with self._changed:     # whatever happened: who waits for it would wait for ever
                self._over = True
                self._changed.notify_all()

    def _give_back(self, metrics: Any) -> None:
        if self._error is not None and self.out is not None:
            with suppress(OSError):     # of a rank that was killed while it wrote: nobody else would, and a model is large
                remove_stale(self.out / CHECKPOINTS)
        with ExitStack() as stack:
            for thing in (self._folder, self._region, self._ranks, metrics):    # the last one first, and all of them
                if thing is not None:
                    stack.callback(thing.close)

    def _follow(self, metrics: Any, deaf: bool = False) -> None:
        """Hear every rank to its end. Those that outlive an abort by GRACE_S are killed, and so are those that outlive another's
        good end by timeout_s: all was done by then, and one that is stopped, or hangs, as it leaves was waited for for ever."""
        limit, alive, patience_s = math.inf, self._alive, max(self._job["timeout_s"] or math.inf, GRACE_S)
        while alive:
            for rank, event in self._ranks.events(0.1):
                if event["kind"] == "exit":
                    alive.discard(rank)
                    if rank not in self._ends and self._region.aborted() is None:
                        self._region.abort("ECONNECTION", rank, f"rank {rank} ended early {self._region.doing(rank)}")
                    limit = min(limit, time.monotonic() + patience_s)
                elif not deaf:
                    self._hear(rank, event, metrics)
            if self._region.aborted() is not None:
                limit = min(limit, time.monotonic() + GRACE_S)
            if self._halted is None and (self._region.aborted() is not None or time.monotonic() > limit):
                self._halted = self._ranks.halted()
            if time.monotonic() > limit:
                for rank in alive - self._ends.keys():
                    why = f"rank {rank} did not end within {patience_s:g} s of another rank's good end"
                    self._region.abort("ETIMEOUT", rank, why)
                self._ranks.kill()

    def _hear(self, rank: int, event: dict[str, Any], metrics: Any) -> None:
        kind = event.pop("kind")
        if kind == "step":
            record = self._take_record(event, metrics)
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
        message = told["message"] if told else text
        if status == "ETIMEOUT" and self._halted:       # not who waited: whom all waited for in the end
            who = ", ".join(f"rank {other} (process {self._ranks.pids[other]})" for other in self._halted)
            message += f"; stopped, as by SIGSTOP or a debugger: {who}"
        if told and status == "ECONNECTION":    # of our own: without the region it told nobody else
            status = told["status"]
        error = CLASSES[status](message)
        if told:
            if isinstance(error, OSError):
                error.errno = told["errno"]     # a full disk is ENOSPC, whichever rank met it
            error.add_note(f"In rank {rank}:\n{told['traceback']}")
        return error


@contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM ends runs as Ctrl-C does, those too whose ranks are being started, and then this process, which would
    otherwise leave its ranks to notice, and half a checkpoint; a second one does not wait. For the command alone: what SIGTERM
    does to a program is the program's."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    came = []

    def terminate(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        came.append(number)
        running = [run for run in list(_living) if run.running and run._owner == os.getpid()]
        for run in running:
            run._interrupt("the launcher was ended by SIGTERM")
        if not running:
            os.kill(os.getpid(), number)

    if mine:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if came:
            for run in list(_living):
                run._watcher.join()
            os.kill(os.getpid(), signal.SIGTERM)
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_living: weakref.WeakSet[Run] = weakref.WeakSet()
_followed: list[Run] = []   # over which the main thread iterates, or for which it waits: zip(one, another) is of two at a time


def _ctrl_c(number: int, frame: Any) -> None:
    """Ends all of them: the exception reaches only the one that is being waited for."""
    for run in _followed:
        run._interrupt("interrupted (Ctrl-C)")
    waiting = [run for run in _followed if run._locking]
    for run in waiting:     # the abort wakes _wait_for, which raises
        run._keyboard = True
    if not waiting:
        signal.default_int_handler(number, frame)


def runs() -> list[Run]:
    """The runs that this process launched and that are under way, the oldest first, those too that no variable holds any more:
    a notebook that lost one stops it by `tp.runs()[0].stop()`."""
    mine = [run for run in list(_living) if run.running and run._owner == os.getpid()]
    return sorted(mine, key=lambda run: run._begun)


@atexit.register
def _end_all() -> None:
    """Nothing outlives this Python; a fork of it ends nothing that is not its own."""
    for run in list(_living):
        if run._owner == os.getpid() and not run._over:
            if not run._interrupted and sys.stderr is not None:
                with suppress(OSError, ValueError):
                    print(f"terapipe_c: Python ends, and with it {run!r}: run.wait() first would be right", file=sys.stderr)
            run._interrupt("the launcher ended")
            run._watcher.join(2 * GRACE_S + 1)
