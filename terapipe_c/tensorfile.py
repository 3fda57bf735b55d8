"""The safetensors file format, written at offsets known beforehand and read with every claim of its header checked.

Format (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length; the header, JSON of name ->
{dtype, shape, data_offsets} and "__metadata__", padded with spaces; then the tensors, row-major, without holes. The header
here is padded so that the data starts at a multiple of 8.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidValueError
from ._files import naming, to_disk, writing

__all__ = ["FileLayout", "OnDemand", "TensorSpec", "checksum", "lay_out", "no_checkpoint", "read_layout", "read_tensor",
           "same_values", "write_file"]

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
    "BF16": "<u2",
}  # NumPy has no bfloat16: its bits are read as uint16 and widened
MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file: `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    dtype: str = "F32"


@dataclass(frozen=True)
class FileLayout:
    """Where every tensor of a file goes. `head` is the length word and the header, as written."""

    name: str
    head: bytes
    tensors: dict[str, TensorSpec]
    nbytes: int
    metadata: dict[str, str]


class OnDemand(Mapping[str, NDArray[np.float32]]):
    """Tensors by name, each read when it is asked for, and not kept."""

    def __init__(self, names: Collection[str], read: Callable[[str], NDArray[np.float32]]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names      # a Mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def same_values(one: Any, other: Any) -> bool:
    """Whether two hold the same, arrays of any number of values too: a NaN is as good as another."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.dtype == other.dtype
                and np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_values(value, other[key]) for key, value in one.items())
    return bool(one == other)


def checksum(data: Any) -> str:
    """What state.json keeps for each tensor: zlib's CRC-32 of its bytes (2 GB/s here, where blake2b does 0.5)."""
    return f"crc32:{zlib.crc32(data):08x}"


def lay_out(name: str, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """A float32 file of these tensors in this order: a pure function, so that every process finds the same offsets."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # transformers insists on "format"
    spans: dict[str, tuple[tuple[int, ...], int, int]] = {}
    end = 0
    for key, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        spans[key] = (tuple(shape), start, end)
        header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    tensors = {key: TensorSpec(key, shape, base + start, stop - start) for key, (shape, start, stop) in spans.items()}
    return FileLayout(name, struct.pack("<Q", len(text)) + text, tensors, base + end, header["__metadata__"])


def read_layout(path: str | os.PathLike[str]) -> FileLayout:
    """Read and check a header; ValueError naming the file (and tensor) if it is not sound."""
    path = Path(path)
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise InvalidValueError(f"{path}: not a safetensors file: no regular file")
    size = about.st_size
    with naming(path), path.open("rb") as file:
        word = file.read(8)
        length = struct.unpack("<Q", word)[0] if len(word) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise InvalidValueError(
                f"{path}: not a safetensors file, or truncated: {size} bytes, header length {length}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise InvalidValueError(f"{path}: not a safetensors file: its header is no JSON object")
        metadata = header.pop("__metadata__", None) or {}
        specs = [_spec(path, name, entry, 8 + length) for name, entry in header.items()]
    except InvalidValueError:
        raise
    except (ValueError, RecursionError) as error:       # of too many digits, too
        raise InvalidValueError(f"{path}: not a safetensors file: its header is no JSON ({error})") from error
    end = 8 + length
    for spec in sorted(specs, key=lambda s: (s.offset, s.nbytes)):
        if spec.offset != end:
            raise InvalidValueError(
                f"{path}: tensor {spec.name} starts at byte {spec.offset}, but the one before ends at {end}"
            )
        end += spec.nbytes
    if end != size:
        raise InvalidValueError(f"{path}: its header describes {end} bytes, but it has {size}: truncated or damaged")
    return FileLayout(path.name, word + text, {s.name: s for s in specs}, size, metadata)


def read_tensor(path: str | os.PathLike[str], spec: TensorSpec) -> NDArray[Any]:
    """The tensor as it is stored (bfloat16 widened to float32), in memory of its own."""
    array = np.empty(spec.shape, DTYPES[spec.dtype])
    view = array.reshape(-1).view(np.uint8).data
    with naming(path), open(path, "rb", buffering=0) as file:
        file.seek(spec.offset)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise InvalidValueError(
                    f"{path}: tensor {spec.name} ends after {done} of {spec.nbytes} bytes: truncated"
                )
            done += count
    if spec.dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32).reshape(spec.shape)
    return array


def write_file(
    path: str | os.PathLike[str],
    arrays: Mapping[str, NDArray[np.float32]] | Iterable[tuple[str, NDArray[np.float32]]],
    metadata: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    beside: Callable[[], None] | None = None,
) -> dict[str, str]:
    """Write one float32 file from one process, whole or not at all; gives the checksum of each tensor. arrays: or pairs of these
    names and shapes in their order, of which each is made when it is asked for, and let go before the next. A link is replaced: in
    a cache of models others lead to the same file. beside: called when all is on the disk and the file that was there not replaced
    yet, to write what belongs to it."""
    path = Path(path)
    pairs = arrays.items() if isinstance(arrays, Mapping) else arrays
    layout = lay_out(path.name, {name: array.shape for name, array in pairs} if shapes is None else shapes, metadata)
    sums = {}
    with writing(path, follow=False) as file:
        file.write(layout.head)
        for name, array in pairs:
            data = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8).data
            sums[name] = checksum(data)
            file.write(data)
            del array, data
        if beside is not None:
            to_disk(file)
            beside()
    return sums


def _spec(path: Path, name: str, entry: Any, base: int) -> TensorSpec:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"{path}: tensor {name} has no sound entry in the header: {entry!r}") from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidValueError(f"{path}: tensor {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
    if not sound or end - start != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise InvalidValueError(f"{path}: tensor {name} of {dtype} {list(shape)} does not fit its bytes {start}..{end}")
    return TensorSpec(name, shape, base + start, end - start, dtype)


def no_checkpoint(path: Path) -> FileNotFoundError:
    """The error of a path where no checkpoint of ours lies; it says what lies there instead."""
    if path.is_file():
        folder = path.absolute().parent
        beside = ("state.json", "step-*/state.json", "checkpoints/step-*/state.json")
        right = folder if any(any(folder.glob(pattern)) for pattern in beside) else "the run's folder, or a step-... of it,"
        what = f"a checkpoint is a folder and this is a file: {right} would be right"
    elif (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        what = "this is a transformers folder: tp.import_hf, or launch(init=...), would be right"
    else:
        what = "no checkpoint in this folder (a step-... with a state.json)"
    return FileNotFoundError(errno.ENOENT, what, str(path))
