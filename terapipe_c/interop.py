"""To and from Hugging Face transformers: a folder that `GPT2LMHeadModel.from_pretrained` loads, and the way back."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidTypeError, InvalidValueError
from ._files import loads, make_folders, no_folder, path_of, read_bytes, remove_folders, write_text
from .checkpoint import STATE_FILE, Checkpoint, check_names, find_checkpoint, model_dict, open_checkpoint, param_shapes
from .config import GPTConfig, brief, flag, real, unmasked, whole
from .tensorfile import OnDemand, TensorSpec, read_layout, read_tensor, same_values, write_file

__all__ = ["Imported", "export_hf", "import_hf"]

LAYER_NORM_EPS = 1e-5
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Buffers that old transformers versions stored; "attn.bias" is the causal mask there, not a parameter.
MASKS = re.compile(r"(?:transformer\.)?h\.\d+\.(?:attn|crossattention)\.(?:bias|masked_bias)")
SIZES = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "vocab_size": "vocab_size", "block_size": "n_positions"}
# What would change the function and has no counterpart here; each must be absent or have this value.
REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


class Imported(NamedTuple):
    """What `import_hf` read: a GPTConfig and {name: float32 array}. `launch(..., init=it)` trains it on."""

    model: GPTConfig
    params: dict[str, NDArray[np.float32]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Imported) and self.model == other.model and same_values(self.params, other.params)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"Imported({self.model!r}, {sum(array.size for array in self.params.values()):,} parameters)"


def own_model(model: Any, own: Any) -> Any:
    """The model that parameters came with; a ValueError where another one is given besides, even if all shapes are the same: with
    another number of heads it is another model."""
    given = own if model is None else model
    for name, value in model_dict(own).items():
        if model_dict(given)[name] != value:
            raise InvalidValueError(f"model has {name} {getattr(given, name)}, and the parameters are of one with {value}: that "
                                    "one, or none, would be right")
    return given


def export_hf(
    folder: str | os.PathLike[str],
    checkpoint: Checkpoint | Imported | str | os.PathLike[str] | None = None,
    *,
    model: Any = None,
    params: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write config.json and model.safetensors into `folder` (made if need be); gives the folder.

    Give a checkpoint (or its path), or model and params. transformers' GPT-2 always has biases: a model without gets
    zeros, which is the same function. A tied head is not stored, as transformers expects.

    Raises TypeError or ValueError (arguments; params that are not those of the model), FileExistsError (a run's folder, or a
    checkpoint's), OSError, which leaves what was there, and what `load_checkpoint` raises.
    """
    folder = path_of("folder", folder)
    opened = None
    if checkpoint is not None and not isinstance(checkpoint, (Checkpoint, Imported)):
        opened = checkpoint = open_checkpoint(find_checkpoint(checkpoint), optimizer=False)   # a tensor is read when written
    if checkpoint is not None:
        if params is not None:
            raise InvalidValueError("params is given besides a checkpoint, which has its own: one of the two would be right")
        model, params = own_model(model, checkpoint.model), checkpoint.params
    if model is None or params is None:
        raise InvalidValueError("export_hf needs a checkpoint, or both model and params")
    if not isinstance(params, Mapping):
        raise InvalidTypeError(f"params is {brief(params)}: {{name: float32 array}}, as of tp.init_params, would be right")
    param_shapes(model)
    shapes = param_shapes(_WithBias(model))
    if opened is None or model != opened.model:
        for _ in _with_biases(model, params, shapes):
            pass        # all of it is right before anything is written
    check_names("params", params, model)
    _check_place(folder)        # before the tensors in it are replaced
    new = make_folders(folder)
    try:
        _check_place(folder)    # once more: "nothing/../there" is a folder only now
        config = json.dumps(hf_config(model), indent=2) + "\n"
        write_file(folder / "model.safetensors", _with_biases(model, params, shapes), shapes=shapes,
                   beside=lambda: write_text(folder / "config.json", config, follow=False))
    except BaseException:
        if folder in new:
            shutil.rmtree(folder, ignore_errors=True)
        remove_folders(new)
        raise
    return folder


def _check_place(folder: Path) -> None:
    """FileExistsError where what would be replaced is a checkpoint's or a run's: without its config.json nobody knows how a run
    goes on, and of a checkpoint's tensors its state.json keeps names and checksums."""
    config = no_folder(folder / "config.json")
    if (folder / STATE_FILE).is_file():
        raise FileExistsError(errno.EEXIST, "a checkpoint is in this folder, whose tensors would be replaced: another folder "
                              "would be right", str(folder))
    if config.is_file() and (found := read_bytes(config)).strip() and b'"model_type"' not in found:
        raise FileExistsError(errno.EEXIST, "this is no config of transformers, but a run's or somebody else's, and would be "
                              "replaced: another folder would be right", str(config))


def _with_biases(model: Any, params: Mapping[str, Any],
                 shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, shape in shapes.items():
        if name in params:
            value = params[name]
            if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
                raise InvalidTypeError(f"parameter {name} is {getattr(value, 'dtype', type(value).__name__)}: a float32 array "
                                       "would be right")
            unmasked(f"parameter {name}", value)
            if value.shape != shape:
                raise InvalidValueError(f"parameter {name} has shape {list(value.shape)}; the model needs {list(shape)}")
            yield name, value
            del value       # before the next one is read
        elif name.endswith(".bias") and not model.bias:
            yield name, np.zeros(shape, np.float32)
        else:
            raise InvalidValueError(f"params lack {name}")


def hf_config(model: Any) -> dict[str, Any]:
    """transformers' GPT2Config of a GPTConfig; all dropout is 0, as in training here."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": model.vocab_size,
        "n_positions": model.block_size,
        "n_ctx": model.block_size,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_inner": None,
        "layer_norm_epsilon": LAYER_NORM_EPS,
        "tie_word_embeddings": bool(model.tie_weights),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def import_hf(folder: str | os.PathLike[str]) -> Imported:
    """Read a transformers GPT-2 folder (config.json and safetensors, sharded or not, any float type).

    Names with or without "transformer." are taken, mask buffers are ignored. ValueError naming the file and the setting or
    tensor if it is no GPT-2 that this package can train.
    """
    config, tensors = _open_hf(path_of("folder", folder))
    return Imported(config, dict(tensors))


def _open_hf(folder: Path) -> tuple[GPTConfig, OnDemand]:
    """What `import_hf` says, of which no tensor has been read."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{'this is a file' if folder.exists() else 'nothing is here'}: a folder with a "
                                "config.json and safetensors, as save_pretrained writes it, would be right", str(folder))
    try:
        os.lstat(folder / "config.json")
    except FileNotFoundError:       # and not where the folder may not be looked into
        raise FileNotFoundError(errno.ENOENT, "no config.json is here: a folder with that and safetensors, as save_pretrained "
                                "writes it, would be right", str(folder)) from None
    model = _model_of(folder / "config.json")
    found: dict[str, tuple[Path, TensorSpec]] = {}
    for path in _tensor_files(folder):
        for name, spec in read_layout(path).tensors.items():
            if not MASKS.fullmatch(name):
                full = name if name == "lm_head.weight" or name.startswith("transformer.") else f"transformer.{name}"
                if full in found and not _same((path, spec), found[full]):
                    raise InvalidValueError(f"{path}: tensor {name} is there twice, and not the same ({found[full][1].name} in "
                                            f"{found[full][0]}): one of them would be right")
                found[full] = (path, spec)
    if model["tie_weights"] and "lm_head.weight" in found:     # some writers store the tied weight twice
        _check_tied(found.pop("lm_head.weight"), found.get("transformer.wte.weight"))
    model["bias"] = any(name.endswith(".bias") for name in found)
    try:
        config = GPTConfig(**model)
    except InvalidValueError as error:      # of sizes that do not go together
        raise InvalidValueError(f"{folder / 'config.json'}: {error}") from None
    taken = {}
    for name, shape in param_shapes(config).items():
        if name not in found:
            raise InvalidValueError(f"{folder}: tensor {name} is missing")
        path, spec = found.pop(name)
        if spec.shape != shape:
            raise InvalidValueError(
                f"{path}: tensor {name} has shape {list(spec.shape)}; config.json asks for {list(shape)}"
            )
        if spec.dtype not in ("F32", "F16", "BF16", "F64"):
            raise InvalidValueError(f"{path}: tensor {name} is {spec.dtype}; it must be a float type")
        taken[name] = path, spec
    if found:
        name, (path, _) = next(iter(found.items()))
        raise InvalidValueError(f"{path}: tensor {name} belongs to no GPT-2 of this config")
    return config, OnDemand(taken, lambda name: read_tensor(*taken[name]).astype(np.float32, copy=False))


def _check_tied(head: tuple[Path, TensorSpec], embedding: tuple[Path, TensorSpec] | None) -> None:
    """transformers 5 does not tie two that differ, and 4 took the embedding for both."""
    if embedding is not None and not _same(head, embedding):
        raise InvalidValueError(f"{head[0]}: lm_head.weight is not transformer.wte.weight, and config.json ties them: "
                                "tie_word_embeddings = false there, or no lm_head.weight, would be right")


def _same(one: tuple[Path, TensorSpec], other: tuple[Path, TensorSpec]) -> bool:
    return one[1].shape == other[1].shape and same_values(*(read_tensor(*x).astype(np.float32, copy=False) for x in (one, other)))


def find_params(path: str | os.PathLike[str]) -> Path:
    """The step folder that `path` means, or the transformers folder where that is what lies there: the same one whatever is written
    into a run folder meanwhile."""
    folder = path_of("path", path)
    try:
        return find_checkpoint(folder)
    except FileNotFoundError:
        # A run folder has a config.json too, but its tensors lie deeper.
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise
    return folder.absolute()


def open_params(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any], Mapping[str, NDArray[np.float32]]]:
    """Of a checkpoint, or a transformers folder where that is what lies there: its name in messages, the fields of its model, and
    its parameters, each of which is read when it is asked for, and not kept."""
    folder = find_params(path)
    if (folder / STATE_FILE).is_file():
        saved = open_checkpoint(folder, optimizer=False)
        return str(saved.path), saved.model_dict, saved.params
    config, tensors = _open_hf(folder)
    return "init", config.to_dict(), tensors


def _model_of(path: Path) -> dict[str, Any]:
    try:
        config = loads(read_bytes(path))
    except ValueError as error:
        raise InvalidValueError(f"{path}: no JSON object: {error}") from error
    if not isinstance(config, dict):
        raise InvalidValueError(f"{path}: no JSON object, but {brief(config)}")
    if config.get("model_type") != "gpt2":
        raise InvalidValueError(f"{path}: model_type is {brief(config.get('model_type'))}; only 'gpt2' can be imported")
    model: dict[str, Any] = {}
    for ours, theirs in SIZES.items():
        if theirs not in config:
            raise InvalidValueError(f"{path}: {theirs} is missing")
        model[ours] = whole(f"{path}: {theirs}", config[theirs])
    model["tie_weights"] = flag(f"{path}: tie_word_embeddings", config.get("tie_word_embeddings", True))
    epsilon = real(f"{path}: layer_norm_epsilon", config.get("layer_norm_epsilon", LAYER_NORM_EPS), zero=True)
    for name, value in REQUIRED.items():
        if config.get(name, value) != value:
            raise InvalidValueError(f"{path}: {name} is {config[name]!r}; only {value!r} can be imported")
    if config.get("activation_function", "gelu_new") not in GELU_TANH:
        raise InvalidValueError(
            f"{path}: activation_function is {config['activation_function']!r}; it must be one of {', '.join(GELU_TANH)}"
        )
    if config.get("n_inner") not in (None, 4 * model["n_embd"]):
        raise InvalidValueError(f"{path}: n_inner is {config['n_inner']}; it must be 4 n_embd = {4 * model['n_embd']}")
    if abs(epsilon - LAYER_NORM_EPS) > 1e-12:
        raise InvalidValueError(f"{path}: layer_norm_epsilon is {epsilon}; it must be {LAYER_NORM_EPS}")
    return model


def _tensor_files(folder: Path) -> list[Path]:
    """The single file where there is one, as transformers does: an index beside it is of an earlier save."""
    index, path = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file() and not path.is_file():
        try:
            return [folder / name for name in sorted(set(loads(read_bytes(index))["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidValueError(f"{index}: no index of safetensors files: {error}") from error
    if not path.is_file():
        other = " (pytorch_model.bin is a pickle, which is not read: save it with safe_serialization=True)"
        raise FileNotFoundError(f"{path}: no such file{other if (folder / 'pytorch_model.bin').exists() else ''}")
    return [path]


class _WithBias:
    """A model as transformers sees it: with biases."""

    def __init__(self, model: Any) -> None:
        self.n_layer, self.n_head, self.n_embd = model.n_layer, model.n_head, model.n_embd
        self.vocab_size, self.block_size, self.tie_weights, self.bias = (
            model.vocab_size,
            model.block_size,
            model.tie_weights,
            True,
        )
