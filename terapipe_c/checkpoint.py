"""Checkpoints: tensors by global parameter name, never by stage; all ranks write one together; it appears whole or not at all.

    runs/a/step-00000050/model.safetensors       parameters, by the names of Hugging Face's GPT2LMHeadModel
                         optimizer.safetensors   AdamW's moments: exp_avg.<name> and exp_avg_sq.<name>
                         state.json              step, model, seed, data position, hyper-parameters, a CRC-32 per tensor
    runs/a/latest -> step-00000050

Where each tensor goes follows from the model alone (`CheckpointWriter.plan`), so ranks write without talking:

    coordinator: writer = CheckpointWriter(run_folder, model); folder = writer.begin(step)    # a hidden folder, space reserved
    every rank:  sums = write_tensors(folder, CheckpointWriter.plan(model), {name: array})    # its own tensors
    coordinator: writer.finish(all_sums, ...)                                                 # fsync, rename, `latest`, prune

A reader never sees a half-written checkpoint, and the one before stays until the new one is complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _steps
from ._core import InvalidTypeError, InvalidValueError
from ._files import again, check_writable, free_bytes, loads, make_folders, naming, path_of, read_bytes, remove_folders
from ._steps import STEP_FOLDER, fsync, point_latest, put_aside, put_in_place, step_folders, step_name, written_ns
from .config import GPTConfig, brief, counted, flag, html_table, unmasked, whole
from .tensorfile import (
    FileLayout,
    OnDemand,
    TensorSpec,
    checksum,
    lay_out,
    no_checkpoint,
    read_layout,
    read_tensor,
    same_values,
)

__all__ = ["Checkpoint", "CheckpointLayout", "CheckpointWriter", "check_finite", "check_names", "check_params", "find_checkpoint",
           "load_checkpoint", "model_dict", "open_checkpoint", "param_shapes", "save_checkpoint", "verify_checkpoint",
           "write_tensors"]

FORMAT = "terapipe_c checkpoint"
VERSION = 1
MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
MODEL_FIELDS = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "bias", "tie_weights")

Params = dict[str, NDArray[np.float32]]


def _check_model(model: Any) -> None:
    if any(not hasattr(model, name) for name in MODEL_FIELDS):
        raise InvalidTypeError(f"model is {brief(model)}: a GPTConfig would be right")


def model_dict(model: Any) -> dict[str, Any]:
    """The seven fields that make a GPTConfig, as JSON."""
    _check_model(model)
    return {name: (bool if name in ("bias", "tie_weights") else int)(getattr(model, name)) for name in MODEL_FIELDS}


def param_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes in canonical order: those of csrc/model/model.h tp_model_param and of `init_params`."""
    _check_model(model)
    width, ffn = model.n_embd, 4 * model.n_embd
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (model.vocab_size, width),
        "transformer.wpe.weight": (model.block_size, width),
    }

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"] = shape
        if model.bias:
            shapes[f"{name}.bias"] = shape[-1:]

    for layer in range(model.n_layer):
        head = f"transformer.h.{layer}."
        add(head + "ln_1", width)
        add(head + "attn.c_attn", width, 3 * width)
        add(head + "attn.c_proj", width, width)
        add(head + "ln_2", width)
        add(head + "mlp.c_fc", width, ffn)
        add(head + "mlp.c_proj", ffn, width)
    add("transformer.ln_f", width)
    if not model.tie_weights:
        shapes["lm_head.weight"] = (model.vocab_size, width)
    return shapes


def check_params(what: str, params: Any, model: Any) -> Params:
    """The model's parameters from `params`, in canonical order; a TypeError or ValueError that begins with `what` where one is no
    float32 array, is missing, has another shape, or is another model's."""
    if not isinstance(params, Mapping):
        raise InvalidTypeError(f"{what} is {brief(params)}: {{name: float32 array}}, as of tp.init_params, would be right")
    for name, value in params.items():
        if not isinstance(value, np.ndarray) or value.dtype != np.float32:
            raise InvalidValueError(f"{what}: {brief(name)} is {getattr(value, 'dtype', type(value).__name__)}: a float32 array "
                                    "would be right")
        unmasked(f"{what}: {name}", value)
    shapes = param_shapes(model)
    for name, shape in shapes.items():
        if name not in params or params[name].shape != shape:
            found = "missing" if name not in params else f"of shape {params[name].shape}"
            raise InvalidValueError(f"{what}: {name} is {found}: {shape}, as in tp.init_params(model), would be right")
    check_names(what, params, model)
    return {name: params[name] for name in shapes}


def check_names(what: str, params: Mapping[str, Any], model: Any) -> None:
    """ValueError that begins with `what` where a name is no parameter of the model: otherwise part of a deeper model would silently
    train as this one. A tied embedding's head, which PyTorch names too, is allowed if it equals the embedding."""
    shapes = param_shapes(model)
    for name in params:
        if name not in shapes and not (name == "lm_head.weight" and np.array_equal(params[name], params["transformer.wte.weight"])):
            raise InvalidValueError(f"{what}: {brief(name)} is no parameter of {model!r}: the names of tp.init_params(model) "
                                    "would be right")


def check_finite(what: str, params: Mapping[str, NDArray[np.float32]]) -> None:
    """ValueError that begins with `what` and names the first number that is none: every loss would be none either."""
    for name, array in params.items():
        unmasked(f"{what}: {name}", array)
        if not np.isfinite(array).all():
            at = np.argwhere(~np.isfinite(array))[0]
            raise InvalidValueError(f"{what}: {name}[{', '.join(map(str, at))}] is {array[tuple(at)]}: finite parameters would be "
                                    "right")


@dataclass(frozen=True)
class CheckpointLayout:
    """Where every tensor of a checkpoint goes: a function of the model alone."""

    files: tuple[FileLayout, ...]

    @cached_property
    def tensors(self) -> dict[str, tuple[str, TensorSpec]]:
        """{name: (file name, where in it)}; the moments are named exp_avg.<parameter> and exp_avg_sq.<parameter>."""
        return {name: (file.name, spec) for file in self.files for name, spec in file.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all files together (state.json, a few kilobytes, is not counted)."""
        return sum(file.nbytes for file in self.files)


class CheckpointWriter:
    """The coordinator's side of writing checkpoints into `run_folder`, keeping the newest `keep` complete ones."""

    def __init__(self, run_folder: str | os.PathLike[str], model: Any, keep: int = _steps.KEEP, optimizer: bool = True) -> None:
        self.run_folder, self.model, self.keep = path_of("run_folder", run_folder), model, whole("keep", keep)
        self.layout = self.plan(model, optimizer)
        self._step: int | None = None
        self._folder: Path | None = None
        self._new: list[Path] = []        # folders made for it
        self._name = ""

    @staticmethod
    def plan(model: Any, optimizer: bool = True) -> CheckpointLayout:
        """Lay out all offsets; every process that knows the model finds the same ones."""
        shapes = param_shapes(model)
        files = [lay_out(MODEL_FILE, shapes)]
        if optimizer:
            both = {f"{kind}.{name}": shape for kind in MOMENTS for name, shape in shapes.items()}
            files.append(lay_out(OPTIMIZER_FILE, both))
        return CheckpointLayout(tuple(files))

    def begin(self, step: int) -> Path:
        """Make the temporary folder with all space reserved. OSError (ENOSPC) naming path and bytes if it does not fit:
        nothing is left behind and earlier checkpoints stay."""
        if self._folder is not None:
            raise RuntimeError(f"{self._folder} is still being written: finish or abort it first")
        step = whole("step", step, 0)
        check_place(self.run_folder)
        self._step = step
        try:
            self._folder = folder = again(lambda: self._make(step))
            self._name = os.path.realpath(folder)
            self._check_space(folder)
            for file in self.layout.files:
                self._reserve(folder / file.name, file)
        except BaseException:
            self.abort()
            raise
        return folder

    def _make(self, step: int) -> Path:
        self._new = make_folders(self.run_folder) + self._new
        return _steps.new_folder(self.run_folder, step)

    def _check_space(self, folder: Path) -> None:
        """Ask first: finding a full disk by filling it would hurt everyone else on it."""
        free = free_bytes(folder)
        if self.layout.nbytes > free:
            raise OSError(errno.ENOSPC, f"no space for a checkpoint of {self.layout.nbytes} bytes ({free} are free)",
                          str(self.run_folder))

    def _reserve(self, path: Path, file: FileLayout) -> None:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.posix_fallocate(fd, 0, file.nbytes)
            _pwrite_all(fd, file.head, 0)
        except OSError as error:
            raise OSError(error.errno, f"no space for a checkpoint: {os.strerror(error.errno or 0)}, {file.nbytes} bytes wanted",
                          str(path)) from error
        finally:
            os.close(fd)

    def finish(
        self,
        checksums: Mapping[str, str],
        *,
        seed: int = 0,
        data_state: Mapping[str, Any] | None = None,
        hyper: Mapping[str, Any] | None = None,
    ) -> Path:
        """Complete the checkpoint once every rank's `write_tensors` returned; gives its folder. On any failure the
        temporary folder is removed and the error raised; earlier checkpoints stay."""
        folder, step = self._folder, self._step
        if folder is None or step is None:
            raise RuntimeError("no checkpoint was begun")
        try:
            missing = [name for name in self.layout.tensors if name not in checksums]
            if missing:
                raise InvalidValueError(f"{folder}: {len(missing)} tensors were not written by any rank, the first is {missing[0]}")
            for file in self.layout.files:
                fsync(folder / file.name)
            state = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "model": model_dict(self.model),
                "seed": seed,
                "data": dict(data_state or {}),
                "hyper": dict(hyper or {}),
                "files": {file.name: file.nbytes for file in self.layout.files},
                "checksums": {name: checksums[name] for name in self.layout.tensors},
            }
            _write_state(folder / STATE_FILE, state)
            fsync(folder)
            return self._name_it(folder, self.run_folder / step_name(step))
        except BaseException:
            self.abort()
            raise

    def _name_it(self, folder: Path, final: Path) -> Path:
        """The whole checkpoint's own name, `latest`, and room: of several threads, one after the other."""
        with _steps.one_at_a_time:
            put_in_place(folder, final)
            self._folder, self._step, self._new = None, None, []
            _steps.under_way.discard(self._name)
            fsync(self.run_folder)
            point_latest(self.run_folder, final.name)
            self._prune(final)
        return final

    def abort(self) -> None:
        """Remove what was begun, and folders made for it; earlier checkpoints stay."""
        folder, self._folder, self._step = self._folder, None, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            _steps.under_way.discard(self._name)
        remove_folders(self._new)
        self._new = []

    def _prune(self, newest: Path) -> None:
        others = sorted((p for p in _steps.complete(self.run_folder) if p != newest), key=written_ns)
        for path in others[: max(0, len(others) - (self.keep - 1))]:
            _steps.remove_step(path, newest)


def write_tensors(
    folder: str | os.PathLike[str],
    layout: CheckpointLayout,
    arrays: Mapping[str, NDArray[np.float32]] | Iterable[tuple[str, NDArray[np.float32]]],
    sync: bool = True,
) -> dict[str, str]:
    """Write one rank's tensors (float32, C-contiguous, row-major) to their places; gives {name: checksum} for `finish`.

    arrays: or pairs (name, array), of which each is made when it is asked for, and let go before the next. Call it as often as is
    handy; `sync` makes the bytes durable before it returns.
    """
    fds: dict[str, int] = {}
    sums = {}
    try:
        for name, array in arrays.items() if isinstance(arrays, Mapping) else arrays:
            if name not in layout.tensors:
                raise InvalidValueError(f"{name} is no tensor of this checkpoint")
            file, spec = layout.tensors[name]
            if array.dtype != np.float32 or array.shape != spec.shape or not array.flags.c_contiguous:
                raise InvalidValueError(
                    f"{name} has shape {list(array.shape)} of {array.dtype}{'' if array.flags.c_contiguous else ', strided'}; "
                    f"it must be {list(spec.shape)} of float32, C-contiguous"
                )
            if file not in fds:
                fds[file] = os.open(Path(folder) / file, os.O_WRONLY)
            data = array.reshape(-1).view(np.uint8).data
            with naming(Path(folder) / file):
                _pwrite_all(fds[file], data, spec.offset)
            sums[name] = checksum(data)
            del array, data
        for file, fd in fds.items() if sync else ():
            with naming(Path(folder) / file):
                os.fdatasync(fd)
    finally:
        for fd in fds.values():
            os.close(fd)
    return sums


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Any,
    params: Mapping[str, NDArray[np.float32]],
    optimizer: Mapping[str, Mapping[str, NDArray[np.float32]]] | None = None,
    step: int = 0,
    *,
    seed: int = 0,
    data_state: Mapping[str, Any] | None = None,
    hyper: Mapping[str, Any] | None = None,
    keep: int = _steps.KEEP,
) -> Path:
    """Write a checkpoint into run folder `path` from one process; gives its step folder.

    model: a GPTConfig. params: {name: float32 array}, all of the model's, as of `init_params`. optimizer: {"exp_avg": {name:
    array}, "exp_avg_sq": {name: array}}, or None. step: steps done. seed, data_state, hyper: what a run that resumes goes on
    with, as in a `Checkpoint`; the last two are plain JSON. keep: complete checkpoints that stay in `path`, this one among them;
    older ones are removed.
    """
    path, seed = path_of("path", path), whole("seed", seed, 0, 2**64 - 1)
    if (path / STATE_FILE).is_file():
        raise InvalidValueError(f"path is {path}, a checkpoint, in which nobody would find this one: the folder that it is in, "
                                f"{path.resolve().parent}, would be right")
    for what, value in (("data_state", data_state), ("hyper", hyper), ("optimizer", optimizer)):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidTypeError(f"{what} is {brief(value)}: a dict, or None, would be right")
    arrays = check_params("params", params, model)
    for kind in MOMENTS if optimizer is not None else ():
        moments = check_params(f"optimizer[{kind!r}]", (optimizer or {}).get(kind), model)
        arrays.update({f"{kind}.{name}": array for name, array in moments.items()})
    writer = CheckpointWriter(path, model, keep, optimizer is not None)
    folder = writer.begin(step)
    try:
        sums = write_tensors(folder, writer.layout, arrays)
    except BaseException:
        writer.abort()
        raise
    return writer.finish(sums, seed=seed, data_state=data_state, hyper=hyper)


@dataclass
class Checkpoint:
    """What `load_checkpoint` read. `params` and the moments are float32 arrays by Hugging Face name. Two are equal that hold the
    same, wherever they are."""

    path: Path = field(compare=False)
    step: int
    seed: int
    params: Params
    optimizer: dict[str, Params] | None  # {"exp_avg": {name: array}, "exp_avg_sq": {name: array}}
    model_dict: dict[str, Any]
    data_state: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> GPTConfig:
        """The GPTConfig."""
        return GPTConfig(**self.model_dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return all(same_values(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.compare)

    def __repr__(self) -> str:
        kept = "with" if self.optimizer else "without"
        return (f"Checkpoint({str(self.path)!r}, after {counted(self.step, 'step')}, {self._count:,} parameters, {kept} optimizer "
                "state)")

    @property
    def _count(self) -> int:
        return sum(array.size for array in self.params.values())

    def _repr_html_(self) -> str:
        return html_table(f"Checkpoint after {counted(self.step, 'step')}", [
            ("path", str(self.path)), ("model", repr(self.model)), ("parameters here", f"{self._count:,}"),
            ("optimizer state", "yes" if self.optimizer else "no"), ("seed", f"{self.seed}"),
            ("data", str(self.data_state.get("source", "not said"))), *((k, f"{v}") for k, v in self.hyper.items())])


def check_place(run_folder: Path) -> None:
    """IsADirectoryError or StorageError where no checkpoint could be put, before one is written."""
    latest = run_folder / "latest"
    if latest.is_dir() and not latest.is_symlink():
        why = ("a folder is where the link to the newest checkpoint goes (cp -rL makes one of it): the newest is found without, so "
               "renaming it to its step-..., or removing it, would be right")
        raise IsADirectoryError(errno.EISDIR, why, str(latest))
    if run_folder.exists():
        check_writable("the folder of checkpoints", run_folder)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The step folder that `path` means: itself, or the newest of a run folder. FileNotFoundError if there is none."""
    path = path_of("path", path)
    if (path / STATE_FILE).is_file():
        return path.resolve()
    if not path.exists():
        aside = [p for p, step, _ in put_aside(path.parent) if step.name == path.name and (p / STATE_FILE).is_file()]
        if aside:
            return aside[0].resolve()
        if path.name == "latest" and path.is_symlink():     # to one that is aside
            return find_checkpoint(path.parent)
        raise FileNotFoundError(errno.ENOENT, "no checkpoint here: no such file or folder", str(path))
    if path.is_file() and path.name == "latest":
        path = path.parent
    if path.is_dir():
        each = [newest for run in (path, path / "checkpoints") if (newest := _newest(run)) is not None]
        if each:        # both have one where a run went on from what save_checkpoint had put there
            return max(each, key=written_ns).resolve()
    if path.is_dir() and STEP_FOLDER.fullmatch(path.name):
        raise InvalidValueError(f"{path / STATE_FILE}: missing, so this is no complete checkpoint")
    raise no_checkpoint(path)


def _newest(run: Path) -> Path | None:
    latest = run / "latest"
    if latest.is_file():  # a pointer file, where the file system has no symbolic links
        target = run / os.fsdecode(latest.read_bytes()[:200].strip())  # whatever is there: else the newest is
        if (target / STATE_FILE).is_file():
            return target
    if (latest / STATE_FILE).is_file():
        return latest
    complete = _steps.complete(run)
    complete += [p for p, step, _ in put_aside(run) if not step.exists() and (p / STATE_FILE).is_file()]
    return max(complete, key=written_ns, default=None)


def load_checkpoint(path: str | os.PathLike[str], names: Iterable[str] | None = None, optimizer: bool = True) -> Checkpoint:
    """Read the checkpoint at path: a run folder (its newest), a step folder, or `latest`.

    names: only these parameters (a rank reads only its own); every tensor that is read is checked against its checksum.
    optimizer: False leaves AdamW's moments out.

    Raises:
        FileNotFoundError: no checkpoint there.
        ValueError: a foreign, truncated or damaged file; the message names the file and the tensor.
    """
    optimizer = flag("optimizer", optimizer)
    single = isinstance(names, (str, bytes)) or (isinstance(names, np.ndarray) and names.ndim == 0)
    if names is not None and (single or not isinstance(names, Iterable)):
        raise InvalidTypeError(f"names is {brief(names)}: a list of parameter names, or None, would be right")
    return _load(find_checkpoint(path), names, optimizer)


def open_checkpoint(folder: Path, optimizer: bool = True) -> Checkpoint:
    """All of a step folder, or all but its optimizer, of which each tensor is read and checked when it is asked for, and not kept:
    the ranks of a large model take their own, one after another, and no machine holds a checkpoint for each of its ranks."""
    return _load(folder, None, optimizer, lambda tensors: tensors)


def _tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, str], sums: Mapping[str, str]) -> OnDemand:
    """Those of a checkpoint's file by name, each held against its checksum when it is read. keys: those in the file, by name;
    shapes, sums: of those in the file."""
    layout = _layout_of(path, shapes)

    def read(name: str) -> NDArray[np.float32]:
        key = keys[name]
        array = read_tensor(path, layout.tensors[key])
        found, written = checksum(array.reshape(-1).view(np.uint8)), sums.get(key)
        if found != written:
            raise InvalidValueError(f"{path}: tensor {key} is damaged: its checksum is {found}, but {written} was written")
        return array

    return OnDemand(keys, read)


def _check(tensors: OnDemand, in_vain: threading.Event | None) -> Params:
    for name in tensors:
        if in_vain is None or not in_vain.is_set():
            tensors[name]
    return {}


def _load(folder: Path, names: Iterable[str] | None, optimizer: bool, take: Callable[[OnDemand], Any] = dict) -> Checkpoint:
    """take: what the checkpoint has for params and each kind of moments, from the tensors of its files."""
    state = read_state(folder / STATE_FILE)
    shapes = param_shapes(_Model(**state["model"]))
    wanted = list(shapes) if names is None else list(names)
    unknown = [name for name in wanted if not isinstance(name, str) or name not in shapes]
    if unknown:
        raise InvalidValueError(f"{folder}: has no parameter {unknown[0] if isinstance(unknown[0], str) else brief(unknown[0])}")
    params = take(_tensors(folder / MODEL_FILE, shapes, {name: name for name in wanted}, state["checksums"]))
    moments = None
    if optimizer and OPTIMIZER_FILE in state["files"]:
        keys = {f"{kind}.{name}": shape for kind in MOMENTS for name, shape in shapes.items()}
        moments = {
            kind: take(_tensors(folder / OPTIMIZER_FILE, keys, {name: f"{kind}.{name}" for name in wanted}, state["checksums"]))
            for kind in MOMENTS
        }
    return Checkpoint(folder, state["step"], state["seed"], params, moments, state["model"], state["data"], state["hyper"])


def verify_checkpoint(folder: Path, in_vain: threading.Event | None = None, names: Iterable[str] | None = None,
                      optimizer: bool = True) -> Checkpoint:  # fmt: skip
    """Read every tensor of a step folder, one after another; raises what `load_checkpoint` would, and names an older one. in_vain:
    nobody asks any more where it is set. Gives what there is besides tensors."""
    try:
        return _load(folder, names, optimizer, lambda tensors: _check(tensors, in_vain))
    except ValueError as error:
        found = [*step_folders(folder.parent), *(p for p, step, _ in put_aside(folder.parent) if not step.exists())]
        others = [p for p in found if p.name != folder.name and (p / STATE_FILE).is_file()]
        if not others:
            raise
        newest = max(others, key=written_ns)
        raise InvalidValueError(f"{error}; where {newest} is whole, moving {folder} away would be right") from error


@dataclass(frozen=True)
class _Model:
    """The fields alone: what a checkpoint says of itself is checked before a GPTConfig is made of it."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int
    bias: bool
    tie_weights: bool


def _layout_of(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> FileLayout:
    try:
        layout = read_layout(path)
    except FileNotFoundError as error:
        raise InvalidValueError(f"{path}: missing, though state.json lists it") from error
    for name, shape in shapes.items():
        spec = layout.tensors.get(name)
        if spec is None:
            raise InvalidValueError(f"{path}: tensor {name} is missing")
        if spec.shape != shape or spec.dtype != "F32":
            raise InvalidValueError(f"{path}: tensor {name} is {spec.dtype} {list(spec.shape)}, but the model needs F32 "
                                    f"{list(shape)}")
    foreign = [name for name in layout.tensors if name not in shapes]
    if foreign:
        raise InvalidValueError(f"{path}: tensor {foreign[0]} does not belong to the model")
    return layout


def _state_sum(state: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


def _write_state(path: Path, state: dict[str, Any]) -> None:
    try:
        text = json.dumps({**state, "checksum": _state_sum(state)}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"{path}: the hyper-parameters and data position must be plain JSON: {error}") from error
    with naming(path), path.open("x") as file:
        file.write(text + "\n")
        file.flush()
        _steps.date_after_others(file.fileno(), path.parents[1])
        os.fsync(file.fileno())


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = loads(read_bytes(path))
    except ValueError as error:
        raise InvalidValueError(f"{path}: damaged, no JSON: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InvalidValueError(f"{path}: no state of a terapipe_c checkpoint")
    if state.get("version") != VERSION:
        raise InvalidValueError(f"{path}: format version {state.get('version')!r}; this terapipe_c reads {VERSION}")
    kept = state.pop("checksum", None)
    if kept != _state_sum(state):
        raise InvalidValueError(f"{path}: damaged: its own checksum is {_state_sum(state)}, but {kept} was written")
    return state


def _pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view[: 1 << 30], offset)  # Linux moves at most 2 GB a call
        view, offset = view[count:], offset + count
