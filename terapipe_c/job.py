"""The job: what a training is to do, checked before any rank starts; the same for `launch` and for `train`."""
from __future__ import annotations

import errno
import fcntl
import inspect
import math
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from ._files import (
    again,
    check_writable,
    dumps,
    free_bytes,
    loads,
    make_folders,
    naming,
    no_pipe,
    path_of,
    read_bytes,
    remove_folders,
    to_disk,
    write_text,
    writing,
)
from ._steps import check_room
from .backend import choose, heads_refused, place, place_own
from .checkpoint import MODEL_FIELDS, CheckpointWriter, check_place, find_checkpoint
from .config import brief, counted, flag, human_bytes, one_of, real, timeout, whole
from .engine import MOST_THREADS, STORE_VARIABLE, gather_bytes, machine_memory, rank_memory, store_of, swap_bytes
from .guests import hosts
from .schedule import CODE, WORK
from .worker import CHECKPOINTS, GATHER_BYTES, HYPER, learning_rate

__all__ = ["ENGINE", "Folder", "check_executable", "check_plan", "check_run", "copies_of", "hosts_of", "largest_gather",
           "initial", "look_at", "make_folder", "make_job", "neighbours", "other_cosine", "replicas_of"]

ENGINE = "terapipe_c.engine:make_engine"
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def make_job(plan: Any, data: Any, steps: int, *, out: Any, init: Any, resume: bool, val_fraction: float, tokenizer: Any,
             rank: int = 0, local_rank: int | None = None, local_ranks: int = 1,
             reading: Callable[[Callable[[], Any]], Any] = lambda read: read(),
             **options: Any) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The job of `launch`'s arguments (plain JSON) and the arrays that go with it; nothing is written. rank: who asks; 0
    will make the run folder. local_rank: this process is that one of its machine, which has started it and at least
    `local_ranks` in all; None: all ranks will be of this machine. reading: calls, once, what reads all of the data and may take
    long, and gives what that gives."""
    first = rank == 0
    options = {**options, "steps": steps}
    check_plan(plan)
    _check(options)
    if out is None:
        options["checkpoint_every"] = 0
    check_executable(plan, options["reproducible"])
    folder = None if out is None else path_of("out", out).absolute()
    resume = flag("resume", resume)
    if first and not resume:
        _check_new(folder)
    if resume and folder is None:
        raise _core.InvalidValueError("resume is True but out is None: the run folder to resume would be right")
    arrays: dict[str, NDArray[Any]] = {}
    job: dict[str, Any] = {**options, **_describe(plan), "out": None if folder is None else str(folder), "first_step": 0,
                           "resume_from": None, "init_from": None, "drawn": not resume and init is None,     # from the seed
                           "predicted_peak_memory_bytes": _memory(plan, options)}
    _check_devices(job, rank, local_rank)
    _check_room(job, rank, local_rank, local_ranks)
    _check_store(plan, job, local_rank)
    _check_messages(job, first)
    if first:
        _warn_of_waits(plan, job)
    before: dict[str, Any] = {}
    if resume:
        if first and job["checkpoint_every"] and folder is not None:
            check_place(folder / CHECKPOINTS)
        if first and folder is not None and folder.is_dir():
            Folder(folder).close()      # before its checkpoints are read, which a run that is under way removes
        found, before = _resume_from(folder, job, first, verify=local_rank is None)
        job.update(found)
    elif isinstance(init, (str, os.PathLike)):
        job |= _find_initial(init, job, verify=local_rank is None)
    elif init is not None:
        arrays |= {f"init/{name}": value for name, value in _initial(init, plan.model).items()}
    if first and job["checkpoint_every"] and (job["steps"] > job["first_step"] or not job["steps"]):
        check_room(Path(job["out"]) / CHECKPOINTS, CheckpointWriter.plan(plan.model).nbytes, job)
    job["data"] = reading(lambda: _open_data(data, job, val_fraction, tokenizer, arrays, before))
    return job, arrays


def check_run(data: Any, steps: int, out: Any, *, seq_len: int, batch: int, **options: Any) -> None:
    """What of `launch`'s arguments is wrong whatever the plan: told before anybody measures and plans, which takes longer. What
    all of the data would have to be read for is not."""
    from .data import ReadBefore

    options = {**options, "steps": steps}
    _check(options)
    folder = path_of("out", out).absolute()
    _check_new(folder)
    check_writable("out", next(path for path in (folder, *folder.parents) if os.path.lexists(path)))
    backend, devices = choose(options["backend"], options["dtype"]), options["devices"]
    if backend.name == "cpu" or devices is not None:
        place(backend, len(devices or ()), devices, [0] * len(devices or ()))
    opened = ReadBefore(data, seq_len, batch, val_fraction=options["val_fraction"])
    if options["eval_every"]:
        opened.check_split("val")


def _check_new(folder: Path | None) -> None:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise FileExistsError(17, "a file is there: the name of a new folder would be right", str(folder))
    if folder is not None and folder.exists() and any(folder.iterdir()):
        try:
            find_checkpoint(folder)
            right = "another one, or resume=True (terapipe resume), would be right"
        except (OSError, ValueError):
            right = "another one would be right (it has no checkpoint to resume from)"
        raise FileExistsError(17, f"this run folder exists already: {right}", str(folder))


def check_plan(plan: Any) -> None:
    """InvalidTypeError if it is none."""
    if not hasattr(plan, "to_dict") or not hasattr(plan, "ranks"):
        raise _core.InvalidTypeError(f"plan is {type(plan).__name__}: a Plan (tp.plan, tp.Plan.load) would be right")


def neighbours(ranks: int, replicas: int = 1, twins: int = 1, copies: int = 1, near: int = 1,
               hosts: Iterable[tuple[int, int]] = ()) -> bytearray:
    """[ranks * ranks] bytes that say which pairs of ranks exchange messages. `near`: neighbours in a replica, its first and last
    rank included (interleaved stages and a tied embedding go round). `twins`: ranks that sum their gradients, the same rank of two
    replicas and, with two copies of the model, opposite ones. 1: `hosts`, pairs in a replica of which one keeps the other's
    activations. 0: none. ranks: of all replicas together."""
    pairs, each = bytearray(ranks * ranks), ranks // replicas
    for rank in range(ranks):
        first, own = rank - rank % each, rank % each
        for start in (own, each - 1 - own)[:copies]:
            for other in range(start, ranks, each):
                pairs[rank * ranks + other] = twins
        for other in (first + (own + 1) % each, first + (own - 1) % each):
            pairs[rank * ranks + other] = near
        pairs[rank * ranks + rank] = 0
    for first in range(0, ranks, each):
        for one, other in hosts:
            pairs[(first + one) * ranks + first + other] = pairs[(first + other) * ranks + first + one] = 1
    return pairs


def hosts_of(plan: Any) -> dict[tuple[int, int], int]:
    """The pairs (rank, the rank that keeps its activations) of a replica; see `guests.hosts`."""
    program = getattr(plan, "program", None)
    return hosts(program) if isinstance(program, _core.Program) else {}


def replicas_of(plan: Any) -> int:
    """Replicas of the plan's pipeline that train together."""
    return int(getattr(plan, "data_parallel", 1))


def copies_of(plan: Any) -> int:
    """Copies of the model in each replica."""
    return int(getattr(plan, "copies", 1))


def largest_gather(model: Any) -> int:
    """Bytes of a rank's largest contribution to an all-gather."""
    return max(GATHER_BYTES, gather_bytes(model))


def _check(options: dict[str, Any]) -> None:
    least_of = {"steps": 0, "warmup_steps": 0, "threads_per_rank": 1, "checkpoint_every": 0, "log_every": 1, "eval_every": 0,
             "eval_batches": 1, "seed": 0}
    most_of = {"threads_per_rank": MOST_THREADS, "seed": 2**64 - 1}
    for name, least in least_of.items():
        options[name] = whole(name, options[name], least, most_of.get(name, 2**62))
    for name in ("lr", "min_lr", "weight_decay", "eps", "grad_clip"):
        value = options[name]
        options[name] = options["lr"] / 10 if name == "min_lr" and value is None else real(name, value, zero=True)
    options["timeout_s"] = timeout("timeout_s", options["timeout_s"])
    if options["eps"] < TINY:      # 0 / 0 where a gradient is 0: a token that a batch does not have
        raise _core.InvalidValueError(f"eps is {options['eps']:g}: at least {TINY:g}, float32's smallest, would be right")
    for name in ("lr", "weight_decay"):
        if options[name] > LARGEST:     # infinite where the update multiplies by it
            raise _core.InvalidValueError(f"{name} is {options[name]:g}: at most {LARGEST:g}, float32's largest, would be right")
    if not isinstance(options["engine"], str) or not all(options["engine"].partition(":")):
        raise _core.InvalidValueError(f"engine is {brief(options['engine'])}: 'module:function' would be right")
    options["reproducible"] = flag("reproducible", options["reproducible"])
    options["dtype"] = choose(options["backend"], options["dtype"]).dtype
    options["devices"] = _devices(options["devices"])
    options["lr_schedule"] = one_of("lr_schedule", options["lr_schedule"], ("cosine", "constant"))
    if options["lr_schedule"] == "cosine" and options["min_lr"] > options["lr"]:
        raise _core.InvalidValueError(f"min_lr is {options['min_lr']:g}: the cosine falls to it, so at most lr, {options['lr']:g}, "
                                      "would be right")
    try:
        betas = [real("betas", beta, zero=True) for beta in options["betas"]]
    except TypeError:
        betas = []
    if len(betas) != 2 or max(betas) >= 1:
        raise _core.InvalidValueError(f"betas is {brief(options['betas'])}: two numbers in [0, 1) would be right")
    options["betas"] = betas


def _devices(devices: Any) -> list[int] | None:
    if devices is None:
        return None
    if not isinstance(devices, (list, tuple, range)) and (not isinstance(devices, np.ndarray) or devices.ndim != 1):
        raise _core.InvalidTypeError(f"devices is {brief(devices)}: a list with the GPU of each rank, or None, would be right")
    return [whole(f"devices[{rank}]", device, 0) for rank, device in enumerate(devices)]


def check_executable(plan: Any, reproducible: bool = True) -> None:
    """InvalidValueError that says why this engine cannot run the plan: with one device's bits, or, if not `reproducible`, at
    all."""
    why = getattr(plan, "why_not_executable" if reproducible else "why_not_at_all", "")
    if why:
        raise _core.InvalidValueError(f"this plan cannot be run as it is: {why}; tp.plan(..., executable=True), or terapipe "
                                      "plan --executable yes, plans only what can")


def _describe(plan: Any) -> dict[str, Any]:
    """All that a job keeps of a plan; the one place that knows a plan's attributes."""
    model = {name: getattr(plan.model, name) for name in MODEL_FIELDS}
    return {"plan": plan.to_dict(), "model": model, "seq_len": int(plan.seq_len), "batch": int(plan.batch),
            "ranks": int(plan.ranks) * replicas_of(plan)}


def _memory(plan: Any, options: Mapping[str, Any]) -> list[int]:
    """Bytes that each rank, of every replica, will hold with the job's threads on this processor: a plan counts one thread, on the
    machine where it was made."""
    if options["engine"] != ENGINE:
        return [int(size) for size in plan.peak_memory_bytes] * replicas_of(plan)
    if why := heads_refused(plan.model, options["backend"], options["dtype"]):
        raise _core.InvalidValueError(why)
    sizes = rank_memory(plan.model, plan.stages, plan.slicing, plan.program, options["threads_per_rank"],
                        choose(options["backend"], options["dtype"]), plan.recompute, plan.swap, plan.data_parallel,
                        getattr(plan, "shard_optimizer", False))
    planned = getattr(plan, "backend", "cpu"), getattr(plan, "dtype", "float32")
    if planned[0] == "cuda" and planned != (options["backend"], options["dtype"]):
        raise _core.InvalidValueError(f"the plan is for backend {planned[0]!r} with {planned[1]}, this run has "
                                      f"{options['backend']!r} with {options['dtype']}: launch(..., backend={planned[0]!r}, "
                                      f"dtype={planned[1]!r}) would be right")
    limit = plan.memory_limit_bytes
    for rank, size in enumerate(sizes):
        if limit is not None and size > limit:
            raise _core.InfeasibleError(f"rank {rank} needs {size} bytes with threads_per_rank = {options['threads_per_rank']} and "
                                        f"may use {limit}: {size - limit} bytes short; a plan with memory_bytes = {size} would "
                                        f"be right")
    return sizes * replicas_of(plan)


def _check_room(job: Mapping[str, Any], rank: int, local_rank: int | None, local_ranks: int) -> None:
    """Refuse what the machine's memory surely cannot hold, before a rank starts: the system would promise it, and end a rank, or
    this process, later. What others use now may go, and what the system swaps to counts as memory. Of ranks that a launcher
    started each may have a control group of its own, and which are here is known of none but this one."""
    if job["engine"] != ENGINE or job["backend"] != "cpu" or job["steps"] == 0:
        return
    each, total, (machine, swap) = job["predicted_peak_memory_bytes"], _core.memory_room()[0], machine_memory()
    asked = [("rank 0 needs" if len(each) == 1 else f"the {len(each)} ranks of this machine need", sum(each), total)]
    if local_rank is not None:
        least = sorted(size for other, size in enumerate(each) if other != rank)[:local_ranks - 1]
        beside = f"rank {rank} and the {counted(len(least), 'other')} of its machine need at least"
        asked = [(f"rank {rank} needs", each[rank], total), (beside, each[rank] + sum(least), machine)]
    for who, needed, room in asked:
        if room is not None and needed > room + swap:
            more = f" and {human_bytes(swap)} of swap" if swap else ""
            raise _core.OutOfMemoryError(f"{who} {needed} bytes of memory, of which there are {room}{more}: "
                                         f"{needed - room - swap} bytes short ({human_bytes(needed)} of {human_bytes(room)}); "
                                         "smaller micro-batches, recompute or more machines would be right")


def _check_store(plan: Any, job: Mapping[str, Any], local_rank: int | None) -> None:
    """Check, before a rank starts, that the disk (on CUDA the host's memory) has room for what is swapped: by all ranks, or, where
    this process is one of several of the machine, by the rank that swaps least."""
    if job["engine"] != ENGINE or not any(getattr(plan, "swap", ())):
        return
    named, backend = os.environ.get(STORE_VARIABLE), choose(job["backend"], job["dtype"])
    if named:
        check_writable(STORE_VARIABLE, named)
    each = swap_bytes(plan.model, plan.stages, plan.slicing, plan.program, backend, plan.recompute, plan.swap)
    needed = sum(each) * replicas_of(plan) if local_rank is None else min(each)
    if backend.name == "cuda":
        free = _core.memory_room()[1]
        if free is not None and needed > free:
            raise _core.InfeasibleError(f"the ranks of this machine swap {needed} bytes to its memory, of which {free} are free: "
                                        f"{needed - free} bytes short; a plan that swaps less would be right")
        return
    folder = Path(store_of(job)).absolute()
    free = free_bytes(folder)       # a run's is still to be made
    if needed > free:
        refusal = _core.StorageError(f"the ranks of this machine swap {needed} bytes to files in {folder}, where {free} are free: "
                                     f"{needed - free} bytes short; a folder on another disk in {STORE_VARIABLE} would be right")
        refusal.errno = errno.ENOSPC
        raise refusal


def _warn_of_waits(plan: Any, job: Mapping[str, Any]) -> None:
    """A run whose ranks wait for each other beyond the deadline, though all goes as planned, ends in its first step. No refusal:
    times that were computed may be far off."""
    if job["engine"] != ENGINE or not 0 < job["timeout_s"] < plan.step_time_s:
        return
    line, longest = plan.timeline(), 0.0
    rows = line.intervals[np.isin(line.intervals["op"], [CODE[name] for name in WORK if name != "AR"])]
    for rank in range(line.num_ranks):
        own = rows[rows["rank"] == rank]
        own = own[np.argsort(own["start_s"])]
        until, begun = np.append(0.0, np.maximum.accumulate(own["end_s"])), np.append(own["start_s"], line.makespan_s)
        longest = max(longest, float((begun - until).max()))
    if longest > job["timeout_s"]:
        _warn(f"timeout_s is {job['timeout_s']:g}, and by its costs this plan lets a rank wait {longest:.4g} s for the others: "
              "more than that, or 0, would be right")


def _check_messages(job: Mapping[str, Any], first: bool) -> None:
    """What of the environment the messages of GPUs do not go with. first: and warn of what only may not."""
    from .device_comm import check_settings, kind_of

    if job["engine"] == ENGINE and job["backend"] == "cuda" and kind_of(job) == "nccl":
        for words in check_settings():
            if first:
                _warn(words)


def _warn(text: str) -> None:
    """At the line that called the package: `train` is more calls away from here than `launch`."""
    level, frame = 2, inspect.currentframe()
    while (frame := frame and frame.f_back) and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        level += 1
    warnings.warn(text, UserWarning, stacklevel=level)


def _check_devices(job: Mapping[str, Any], rank: int, local_rank: int | None) -> None:
    """Every rank of this machine, or this one, has a GPU, and room on it, where the backend wants one."""
    backend, needed, devices = choose(job["backend"], job["dtype"]), job["predicted_peak_memory_bytes"], job["devices"]
    if local_rank is None:
        place(backend, job["ranks"], devices, needed)
    else:
        place_own(backend, rank, local_rank, devices, needed[rank])


def _resume_from(folder: Path | None, job: Mapping[str, Any], first: bool, verify: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of the job a checkpoint says, and the state of its data. first: warn of an optimizer that is not the checkpoint's, or a
    cosine that ends elsewhere; launch's defaults would change it unseen. verify: and read all of it, which who meets other ranks
    does meanwhile."""
    from .checkpoint import OPTIMIZER_FILE, STATE_FILE, read_state, verify_checkpoint

    path = find_checkpoint(Path(str(folder)))
    _check_run_folder(Path(str(folder)).resolve(), path)
    if first and verify:
        verify_checkpoint(path)
    state = read_state(path / STATE_FILE)
    if OPTIMIZER_FILE not in state["files"]:
        raise _core.InvalidValueError(f"{path}: the checkpoint has no state of the optimizer to go on from: another one, or init = "
                                      "this one and an out of its own, which begins anew with its parameters, would be right")
    _same_model(path, state["model"], SimpleNamespace(**job["model"]))
    was = state["hyper"]
    now = {name: list(job[name]) if name == "betas" else job[name] for name in HYPER if name in was}
    changed = [f"{name} = {_beside(value, was[name])} (the checkpoint's is {_beside(was[name], value)})"
               for name, value in now.items() if value != was[name]]
    if changed and first:
        _warn(f"resumed with {', '.join(changed)}")
    if first and job["steps"] < state["step"]:
        _warn(f"steps is {job['steps']} and the checkpoint has done {state['step']}: nothing is left to do; the number of all "
              "steps together would be right")
    if first and (told := other_cosine(int(state["step"]), {**_config(Path(str(folder))), **was}, job)):
        _warn(f"resumed with another number of steps: {told}")
    return {"resume_from": str(path), "first_step": int(state["step"])}, state["data"]


def _config(folder: Path) -> dict[str, Any]:
    """What the run in this folder was given last; empty where nobody knows."""
    with suppress(OSError, ValueError):
        found = loads(read_bytes(folder / "config.json"))
        return found if isinstance(found, dict) else {}
    return {}


def other_cosine(done: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What to say where steps were added, or taken away, since a checkpoint of `done` steps: a cosine that ends at another step is
    another one, and the learning rate leaps. before, now: of config.json or the checkpoint, and what a resume is to have."""
    ends, ended = now["steps"], before.get("steps")
    cosine = before.get("lr_schedule") == now.get("lr_schedule") == "cosine"
    if not cosine or not isinstance(ended, int) or not 0 < done < ends != ended:
        return ""
    try:
        lr, last = learning_rate(now, done), learning_rate(before, done - 1)
    except (KeyError, TypeError):       # not in what wrote it
        return ""
    return f"the cosine of the learning rate ends at step {ends} now, not at {ended}: it goes on with {lr:.3g}, after {last:.3g}"


def _check_run_folder(folder: Path, found: Path) -> None:
    """Refuse a checkpoint, and a run's folder of them, as the run folder: its own checkpoints would lie deeper, where the next
    resume does not look, and would go with that one when it is no longer among the newest."""
    written = ("config.json", "plan.json", "metrics.jsonl")    # by a run alone together: a plan.json may be anybody's
    of_a_run = found.parent == folder and folder.name == CHECKPOINTS and all((folder.parent / n).exists() for n in written)
    if found == folder or of_a_run:
        what = "a checkpoint" if found == folder else "a folder of checkpoints"
        around = found.parent.parent if found.parent.name == CHECKPOINTS else found.parent
        raise _core.InvalidValueError(f"out is {folder}, {what}, in which a resume would not find this run's own: the run's "
                                      f"folder, {around}, would be right")


def _beside(value: Any, other: Any) -> str:
    """A value as a short text, but long enough to differ from that of `other`: a float32's 0.001 is another double."""
    return str(value) if _short(value) == _short(other) else _short(value)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _same_model(path: Path | str, saved: Mapping[str, Any], model: Any) -> None:
    """Refuse a checkpoint of another model, even if all shapes are the same: with another number of heads it is another model."""
    for name in MODEL_FIELDS:
        if saved[name] != getattr(model, name):
            raise _core.InvalidValueError(f"{path}: the checkpoint's model has {name} {saved[name]}, the plan's has "
                                          f"{getattr(model, name)}")


def initial(job: Mapping[str, Any]) -> Mapping[str, NDArray[np.float32]]:
    """The parameters at the job's init_from, of which each is read when it is asked for: each rank of a large model takes its own.
    Their names and shapes are the model's, and they are what was looked at, or ranks would begin with parts of two models."""
    from .interop import open_params
    from .tensorfile import OnDemand

    where, saved, params = open_params(job["init_from"])
    _same_model(where, saved, SimpleNamespace(**job["model"]))
    sums = job.get("init_sums", {})

    def read(name: str) -> NDArray[np.float32]:
        array = params[name]
        if name in sums and zlib.crc32(array.data) != sums[name]:
            raise _core.InvalidValueError(f"{job['init_from']}: {name} was replaced while the run began: a path whose files stay "
                                          "until the first record would be right")
        return array

    return OnDemand(params, read)


def _find_initial(init: str | os.PathLike[str], job: Mapping[str, Any], verify: bool) -> dict[str, Any]:
    """The job's init_from: a run under way there moves on, and a rank would load what nobody has looked at. verify: and read
    all of it, one tensor after another, which ranks that meet others compare too, and do meanwhile; init_sums: theirs."""
    from .interop import find_params

    found = {"init_from": str(find_params(init))}
    params = initial({**job, **found})
    return {**found, "init_sums": look_at(params) if verify else {}}


def look_at(params: Mapping[str, NDArray[np.float32]], in_vain: threading.Event | None = None) -> dict[str, int]:
    """The CRC-32 of each initial parameter, read one after another, which must be finite. in_vain: nobody asks any more where it
    is set."""
    from .checkpoint import check_finite

    sums: dict[str, int] = {}
    for name in params:
        if in_vain is None or not in_vain.is_set():
            array = params[name]
            check_finite("init", {name: array})
            sums[name] = zlib.crc32(array.data)
            del array       # before the next one is read
    return sums


def _initial(init: Any, model: Any) -> Mapping[str, NDArray[np.float32]]:
    from .checkpoint import Checkpoint, check_finite, check_params
    from .interop import Imported

    if not isinstance(init, (Mapping, Checkpoint, Imported)):
        raise _core.InvalidTypeError(f"init is {type(init).__name__}: a dict of arrays, a checkpoint, what tp.import_hf gave, or "
                                     "the path of one of both would be right")
    if isinstance(init, Checkpoint):
        _same_model(init.path, init.model_dict, model)
    elif isinstance(init, Imported):
        _same_model("init", init.model.to_dict(), model)
    params: Mapping[str, NDArray[np.float32]] = init if isinstance(init, Mapping) else init.params or {}
    arrays = {name: np.ascontiguousarray(value) for name, value in check_params("init", params, model).items()}
    check_finite("init", arrays)
    return arrays


def _open_data(data: Any, job: Mapping[str, Any], val_fraction: float, tokenizer: Any,
               arrays: dict[str, NDArray[Any]], before: dict[str, Any]) -> dict[str, Any]:
    """Read every token once, here, so that bad data is refused before anybody starts; what need not be read for it, before that.
    before: what a checkpoint says of its data; empty: there is none."""
    from .data import ReadBefore

    sizes = job["seq_len"], job["batch"]
    opened = ReadBefore(data, *sizes, seed=job["seed"], val_fraction=val_fraction, vocab_size=job["model"]["vocab_size"],
                       tokenizer=tokenizer)
    opened.check_state(before)
    if job["eval_every"]:
        opened.check_split("val")
    opened.read_all()
    if isinstance(data, (str, os.PathLike)) and tokenizer is None:
        return {"path": os.path.abspath(data), "val_fraction": opened.val_fraction, "num_tokens": opened.num_tokens,
                "fingerprint": opened.fingerprint}
    arrays["data"] = opened.tokens
    return {"path": None, "val_fraction": opened.val_fraction, "num_tokens": opened.num_tokens}


class Folder:
    """A run folder in which nobody else may run until close(); the lock ends with this process at the latest."""

    def __init__(self, path: Path) -> None:
        """Make it if there is none. FileExistsError if another run is under way in it; where the file system has no locks,
        nobody can know."""
        self.path, self.made, self.new, self._fd = path, True, list[Path](), -1
        self._around = list[Path]()
        try:
            again(self._make)
        except OSError:                # a name too long, a full disk
            remove_folders(self._around)
            raise
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise FileExistsError(17, "another run is under way in this folder: the end of that one (tp.runs() has those of "
                                      "this process), or another folder, would be right", str(path)) from None
        except OSError:
            pass

    def _make(self) -> None:
        self._around = make_folders(self.path.parent) + self._around
        try:
            self.path.mkdir()
        except FileExistsError:
            self.made = False
            if not self.path.is_dir():      # nor a file, or it would have been refused before
                raise FileExistsError(17, "this run folder is a link to nothing: another one would be right",
                                      str(self.path)) from None
        else:
            self.made = True

    def close(self) -> None:
        """Let others run in it, also where a fork of this process (multiprocessing's) has the descriptor still."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):     # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def undo(self) -> None:
        """Remove what was made, because nothing has begun: the same call must be possible again."""
        if self.made:
            shutil.rmtree(self.path, ignore_errors=True)
            remove_folders(self._around)
        else:
            for file in self.new:
                with suppress(OSError):
                    file.unlink()
        self.close()


def make_folder(job: Mapping[str, Any], plan: Any) -> Folder:
    """config.json, plan.json and a metrics.jsonl that ends where this run begins."""
    folder = Folder(Path(job["out"]))
    try:
        files = [folder.path / name for name in ("config.json", "plan.json", "metrics.jsonl", "trace.json")]
        for file in files:      # the last is written when all is done
            no_pipe(file)
        if not job["resume_from"]:
            _check_new(folder.path)     # again: now nobody else can make it
        folder.new = [file for file in files if not os.path.lexists(file)]
        config = {name: value for name, value in job.items() if name not in ("plan", "init_sums")}
        metrics = folder.path / "metrics.jsonl"
        kept = metrics.read_text("utf-8", "replace").splitlines() if metrics.is_file() else []
        kept = [line for line in kept if _step_of(line) < job["first_step"]]
        with writing(files[0]) as about, writing(files[1]) as planned:
            for each, path, text in ((about, files[0], dumps(config, 1)), (planned, files[1], dumps(plan.to_dict()))):
                with naming(path):
                    each.write((text + "\n").encode("utf-8", "backslashreplace"))
                    to_disk(each)       # all of it, before one of those of a run that is gone on with is replaced
            write_text(metrics, "".join(line + "\n" for line in kept))
    except BaseException:
        folder.undo()
        raise
    return folder


def _step_of(line: str) -> float:
    try:
        return float(loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut off when its writer died
