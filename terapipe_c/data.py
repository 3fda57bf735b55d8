"""Tokens in, batches out: the same batch for the same (seed, split, step), whatever the plan, the rank or the resume.

Which kind of file is read is told by its name and its first bytes, in this order:

1. `X.idx`, or `X` / `X.bin` beside an `X.idx` that starts with `MMIDIDX`: a Megatron pair; all documents in file order. Beside one
   that is empty, zeros or cut off within that word: an error.
2. `X.bin` whose first int32 is 20240520 (version 1) or 20240801 (version 7): llm.c; a header of 256 int32, then uint16 or
   uint32 tokens.
3. any other `X.bin`: nanoGPT; raw little-endian uint16.
4. `X.npy`: a NumPy file holding a 1-D integer array.
5. anything else: text, one token a byte (memory-mapped), or what `tokenizer` makes of it; what its first bytes tell to be an
   archive, compressed, a table, a model's tensors or text in UTF-16 is refused.

A name may end in capitals, `X.BIN` or `X.Bin`.

Sampling: row r of step s starts at a token drawn by NumPy's Philox4x64-10 (Salmon et al., SC 2011) with key (seed, split
number) and counter (r + 1, s, 0, 0); its first 64-bit word w gives start = first + floor(w * n / 2^64) for n possible
starts (bias below n / 2^64). Nothing else enters, so no state is carried from step to step.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import math
import os
import struct
import sysconfig
import tokenize
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidTypeError, InvalidValueError
from ._files import naming, no_folder, path_of, writing
from .config import brief, counted, html_table, one_of, real, whole
from .mapped import Reader

__all__ = ["Dataset", "megatron_pair", "stdlib_corpus"]

SPLITS = {"train": 0, "val": 1}
MOST = 2**31 - 1
FINGERPRINT_TOKENS = 1024  # a page each, at worst, of a file that is far away
BLOCK_TOKENS = 1 << 20  # tokens looked at together by the check: bounds its memory, and they stay in a cache
LLM_C_KINDS: dict[tuple[int, int], np.dtype[Any]] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
LLM_C_HEADER = 256 * 4
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"     # of fairseq's IndexedDataset, which Megatron's older "lazy" and "cached" data are
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

PACKED = {b"PK\x03\x04": "a zip archive (.npz and .pt files are some)", b"\x1f\x8b": "compressed by gzip",
          b"\x28\xb5\x2f\xfd": "compressed by zstd", b"\xfd7zXZ\0": "compressed by xz", b"BZh91AY&SY": "compressed by bzip2",
          b"\x04\x22\x4d\x18": "compressed by lz4", b"PAR1\x15": "a Parquet table", b"ARROW1\0\0": "an Arrow table",
          b"\x89HDF\r\n\x1a\n": "an HDF5 file", b"SQLite format 3\0": "an SQLite database", b"%PDF-": "a PDF",
          b"GGUF\2\0\0\0": "a model's tensors (GGUF)", b"GGUF\3\0\0\0": "a model's tensors (GGUF)",
          b"\x80\x04\x95": "a pickle of Python's", b"\x80\x05\x95": "a pickle of Python's",     # of protocol 3 or older: no mark
          b"\x93NUMPY": "a NumPy array whose name does not end in .npy",
          **{struct.pack("<2i", *kind): "an llm.c file whose name does not end in .bin" for kind in LLM_C_KINDS}}

HEAD = 4096         # bytes of a file by which it is told what it is
LEAST_WIDE = 64     # bytes by which text of two bytes or four a character is told without its mark

Tokenizer = Callable[[str], Sequence[int]]
#: A file, or tokens.
Data = str | os.PathLike[str] | bytes | bytearray | NDArray[Any] | Sequence[int]


class Dataset:
    """Batches of `batch` sequences of `seq_len` + 1 tokens, drawn at random offsets.

    Args:
        data: a file, or a 1-D array or list of integers of any width. A Megatron pair X.bin and X.idx, a .bin of llm.c (told by
            its header) or of nanoGPT (uint16), a .npy; anything else is text, whose bytes are the tokens if there is no
            ``tokenizer``. Files are memory-mapped and arrays are borrowed, never copied; a file that is cut off
            meanwhile is an error.
        seq_len: tokens of a sequence; a row of a batch has one more, the last target.
        batch: sequences in a batch.
        seed: 0 .. 2**64 - 1.
        split: "train" or "val". The last `val_fraction` of the tokens is the validation split; no sequence crosses.
        val_fraction: 0 <= val_fraction < 1.
        vocab_size: when given, every token must be in [0, vocab_size); the whole file is read once to prove it.
        tokenizer: for text: called once with the whole text, gives its tokens.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty or malformed file, a split shorter than one sequence, or a token outside the vocabulary (the
            message names the file and the position of the first such token).
    """

    def __init__(
        self,
        data: Data,
        seq_len: int,
        batch: int,
        seed: int = 0,
        split: str = "train",
        val_fraction: float = 0.1,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.seq_len, self.batch_size = whole("seq_len", seq_len, most=MOST), whole("batch", batch, most=MOST)
        self.seed, self.split = whole("seed", seed, 0, (1 << 64) - 1), one_of("split", split, SPLITS)
        self.val_fraction = real("val_fraction", val_fraction, zero=True)
        if self.val_fraction >= 1.0:
            raise InvalidValueError(f"val_fraction is {val_fraction}: less than 1 would be right")
        self.vocab_size = None if vocab_size is None else whole("vocab_size", vocab_size)
        self.tokens, self.source, self.kind = open_tokens(data, tokenizer)
        self._reader = Reader(self.tokens, data)
        self._first, self._end = self.check_split(split)
        self._check()

    def _check(self) -> None:
        check_tokens(self.tokens, self.vocab_size, self.source, self._reader)

    def check_split(self, split: str) -> tuple[int, int]:
        """First token and end of "train" or "val"; a ValueError if that is shorter than one sequence."""
        split = one_of("split", split, SPLITS)
        train_tokens = len(self.tokens) - int(len(self.tokens) * self.val_fraction)
        first, end = (0, train_tokens) if split == "train" else (train_tokens, len(self.tokens))
        need, have = self.seq_len + 1, end - first
        if len(self.tokens) == 0:
            raise InvalidValueError(f"{self.source} is empty: it has no tokens")
        if have < need:
            all_of_it = have == len(self.tokens)
            told = counted(have, "token") if all_of_it else f"{have} of its {counted(len(self.tokens), 'token')}"
            raise InvalidValueError(
                f"{self.source}: the {split} split has {told}, but one sequence of seq_len "
                f"{self.seq_len} needs {need} (val_fraction is {self.val_fraction:g})"
            )
        return first, end

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole source, both splits."""
        return len(self.tokens)

    @property
    def split_tokens(self) -> int:
        """Tokens in this split."""
        return self._end - self._first

    def starts(self, step: int) -> list[int]:
        """The position in the source of the first token of each row of `batch(step)`."""
        step = whole("step", step, 0, (1 << 64) - 1)
        philox = np.random.Philox(
            key=np.array([self.seed, SPLITS[self.split]], np.uint64), counter=np.array([0, step, 0, 0], np.uint64)
        )
        words = philox.random_raw(4 * self.batch_size)[::4]  # NumPy counts up before each block of four words
        count = self.split_tokens - self.seq_len
        return [self._first + (int(word) * count >> 64) for word in words]

    def batch(self, step: int) -> NDArray[np.int32]:
        """int32 [batch, seq_len + 1]: inputs are [:, :-1], targets [:, 1:]."""
        self._reader.check()
        out = np.empty((self.batch_size, self.seq_len + 1), np.int32)
        for row, start in enumerate(self.starts(step)):
            tokens = self._reader.read(start, start + self.seq_len + 1)
            check_block(tokens, start, self.vocab_size, self.source)    # again: who writes to a file during a run learns where
            out[row] = tokens
        return out

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of some tokens spread over the whole source, by value: sources that differ in it are not the same."""
        self._reader.check()
        few = np.linspace(0, len(self.tokens) - 1, min(len(self.tokens), FINGERPRINT_TOKENS)).astype(np.int64)
        tokens = np.concatenate([self._reader.read(at, at + 1) for at in few.tolist()])
        return hashlib.sha256(np.asarray(tokens, "<i8").tobytes()).hexdigest()[:16]

    def state(self, step: int) -> dict[str, Any]:
        """The data position after `step` steps as plain JSON; with `check_state`, what a checkpoint keeps."""
        return {
            "step": whole("step", step, 0),
            "seed": self.seed,
            "split": self.split,
            "val_fraction": self.val_fraction,
            "seq_len": self.seq_len,
            "batch": self.batch_size,
            "num_tokens": self.num_tokens,
            "fingerprint": self.fingerprint,
            "source": self.source,
            "kind": self.kind,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """ValueError naming the first difference if batches from here on would not be those `state` was saved with."""
        if not isinstance(state, Mapping):
            raise InvalidTypeError(f"state is {brief(state)}: a dict, as of Dataset.state, would be right")
        mine = self.state(0)
        for key in ("seed", "split", "val_fraction", "seq_len", "batch", "num_tokens", "fingerprint"):
            if key in state and state[key] != mine[key]:
                raise InvalidValueError(
                    f"the data does not continue the checkpoint's: {key} was {state[key]!r} and is now "
                    f"{mine[key]!r} ({self.source})"
                )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all tokens to a .npy file (int32, or what the source has if narrower), block by block, whole or not at all: into a
        file beside it, which takes its place. For worker processes."""
        path = no_folder(path_of("path", path))
        if path.suffix != ".npy":
            raise InvalidValueError(f"path is {brief(str(path))}: a name that ends in .npy would be right")
        narrow = self.tokens.dtype if self.tokens.dtype.itemsize < 4 else np.dtype("<i4")
        file = self._reader.file
        if file is not None and path.exists() and os.path.samestat(path.stat(), file[1]):
            raise InvalidValueError(f"path is {path}, which is where the tokens are: another file would be right")
        with writing(path) as out:      # no mapping: a full disk would end this process by SIGBUS
            about = {"descr": narrow.str, "fortran_order": False, "shape": (len(self.tokens),)}
            np.lib.format.write_array_header_1_0(out, about)
            for start in range(0, len(self.tokens), BLOCK_TOKENS):
                self._reader.check()
                block = self._reader.read(start, min(start + BLOCK_TOKENS, len(self.tokens)))
                out.write(np.ascontiguousarray(block, narrow).data)
        return path

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Dataset({self.source}, {self.kind}, {self.num_tokens:,} tokens, split={self.split!r} of {self.split_tokens:,}, "
            f"seq_len={self.seq_len}, batch={self.batch_size}, seed={self.seed})"
        )

    def _repr_html_(self) -> str:
        return html_table("Data", [
            ("source", f"{self.source}, {self.kind}"), ("tokens", f"{self.num_tokens:,}"),
            (self.split, f"{self.split_tokens:,} tokens, {self.split_tokens / self.num_tokens:.3g} of them"),
            ("a step", f"{counted(self.batch_size, 'sequence')} of {self.seq_len} tokens, drawn by seed {self.seed}")])


class ReadBefore(Dataset):
    """Of tokens that somebody else has read once or will: looked at when they are drawn. A file may take minutes to read."""

    def _check(self) -> None:
        pass

    def read_all(self) -> None:
        """What :class:`Dataset` does at once: ValueError where a token is outside the vocabulary."""
        super()._check()


def open_tokens(data: Any, tokenizer: Tokenizer | None = None) -> tuple[NDArray[Any], str, str]:
    """(1-D integer array, memory-mapped where it is a file; what to call it in messages; its kind)."""
    if tokenizer is not None and not callable(tokenizer):
        raise InvalidTypeError(f"tokenizer is {brief(tokenizer)}: a function from text to tokens, or None, would be right")
    if isinstance(data, (str, os.PathLike)):
        try:
            path = path_of("data", data)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG or not isinstance(data, str):
                raise
            raise InvalidValueError(f"data is {brief(data)}: no file's name is as long; of a text itself, its bytes, "
                                    "text.encode(), would be right") from None   # the system's own error would be all of the text
        with nullcontext() if tokenizer is not None else naming(path):     # an error of a tokenizer's network is not the file's
            return _open_file(path, tokenizer)
    if tokenizer is not None:
        raise InvalidValueError("tokenizer is for text files; data is an array of tokens already")
    return _as_tokens(data, "array", f"data is {type(data).__name__}"), "array", "array"


def _as_tokens(given: Any, name: str, what: str) -> NDArray[Any]:
    """1-D and of integers, or a ValueError. name: of where they are from; what: the beginning of its message."""
    try:
        array = np.asarray(memoryview(given) if isinstance(given, (bytes, bytearray)) else given)
        if np.ma.is_masked(given):
            raise ValueError(f"token {int(np.argmax(np.ma.getmaskarray(given)))} is masked")
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValueError(f"{what} ({error}): a file or a 1-D array of integers would be right") from None
    if array.size == 0:
        raise InvalidValueError(f"{name} is empty: it has no tokens")
    if array.ndim == 0 and array.dtype == object:       # None, a dict: what an array of it is tells nobody anything
        raise InvalidValueError(f"{what}: tokens, 1-D and of integers, would be right")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValueError(f"{what} of shape {list(array.shape)} and dtype {array.dtype}: tokens, 1-D and of integers, would "
                                "be right")
    return array


def check_tokens(tokens: NDArray[Any], vocab_size: int | None, source: str, reader: Reader | None = None) -> None:
    """One pass in blocks: ValueError naming `source` and the position of the first token outside [0, vocab_size)."""
    limit = (1 << 31) if vocab_size is None else min(vocab_size, 1 << 31)
    info = np.iinfo(tokens.dtype)
    if info.min == 0 and info.max < limit:
        return  # no value of this type can be out of range: nothing to read
    reader = reader or Reader(tokens)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        reader.check()
        block = reader.read(start, min(start + BLOCK_TOKENS, len(tokens)))
        check_block(block, start, vocab_size, source)


def check_block(block: NDArray[Any], start: int, vocab_size: int | None, source: str) -> None:
    """ValueError naming `source` and the first token outside [0, vocab_size) of these, which begin at offset `start`."""
    limit = (1 << 31) if vocab_size is None else min(vocab_size, 1 << 31)
    if int(block.max()) < limit and int(block.min()) >= 0:
        return
    at = int(np.argmax((block < 0) | (block >= limit)))
    room = "fit in int32" if vocab_size is None else f"be in 0 .. {limit - 1} (the vocabulary has {vocab_size} tokens)"
    raise InvalidValueError(f"{source}: the token at offset {start + at} is {int(block[at])}; it must {room}")


def stdlib_corpus(path: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> Path | bytes:
    """Real text that is on every machine: the source files of this Python's standard library, in sorted order.

    Tests and third-party packages are left out. Given `path`, writes it there (whole or not at all) and returns the path;
    else returns the bytes. `max_bytes` cuts the end off.
    """
    max_bytes = None if max_bytes is None else whole("max_bytes", max_bytes)
    path = None if path is None else path_of("path", path)
    if path is not None:
        no_folder(path)
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in left_out]     # not walked: site-packages may hold very much
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted(found, key=lambda p: p.relative_to(root).as_posix())
    pieces: list[bytes] = []
    size = 0
    for file in files:
        if max_bytes is not None and size >= max_bytes:
            break
        pieces.append(file.read_bytes())
        size += len(pieces[-1])
    text = b"".join(pieces)[:max_bytes]
    if not text:
        raise FileNotFoundError(f"no .py file of the standard library in {root}")
    if path is None:
        return text
    with writing(path) as out:
        out.write(text)
    return path


def _open_file(path: Path, tokenizer: Tokenizer | None) -> tuple[NDArray[Any], str, str]:
    if path.is_dir():
        raise InvalidValueError(f"{path} is not a file: a folder is there, the name of a file of text or tokens would be right")
    index = _megatron_index(path)
    if index is None and not path.exists():
        raise FileNotFoundError(f"{path}: no such file (and no {path.name}.idx with {path.name}.bin)")
    suffix = path.suffix.lower()
    binary = index is not None or suffix in (".bin", ".npy")
    if binary and tokenizer is not None:
        raise InvalidValueError(f"{path}: tokenizer is for text; this file holds tokens already")
    if index is not None:
        return _open_megatron(index)
    if not path.is_file():
        raise InvalidValueError(f"{path} is not a file: one of text or tokens would be right")
    if path.stat().st_size == 0:
        raise InvalidValueError(f"{path} is empty: it has no tokens")
    if suffix == ".bin":
        return _open_bin(path)
    if suffix == ".npy":
        return _open_npy(path)
    packed = _packed(path)
    if packed is not None:      # its bytes would train as well as any others, and nobody would see why they teach nothing
        raise InvalidValueError(f"{path} is {packed}, no text: what is in it, as a text in UTF-8, a .npy or a .bin, would be right")
    if tokenizer is None:
        with naming(path):
            return np.memmap(path, np.uint8, "r"), str(path), "text"
    return _tokenize(path, tokenizer), str(path), "tokenized text"


def _packed(path: Path) -> str | None:
    """What a file is that is no text, by its first bytes. Zeros alone tell nothing: tokens of one byte each may have them."""
    with path.open("rb") as file, naming(path):
        first = file.read(HEAD)
        size = os.fstat(file.fileno()).st_size
    if first[8:10] == b'{"' and 2 <= int.from_bytes(first[:8], "little") <= size - 8:
        return "a model's tensors (safetensors)"
    if first[257:263] in (b"ustar\0", b"ustar "):     # POSIX, GNU; as in "mustard" it is text
        return "an archive of tar's"
    if (first.startswith((b"\xff\xfe", b"\xfe\xff")) and _is_written(first, "utf-16")) or _is_wide(first):
        return "text in UTF-16 or UTF-32, whose characters are no bytes"
    return next((name for magic, name in PACKED.items() if first.startswith(magic)), None)


def _is_wide(first: bytes) -> bool:
    """Are these first bytes of UTF-16 or UTF-32 without its mark, mostly ASCII? Nearly every other byte is a zero then, and the
    rest are words and spaces: of tokens of a byte each every other one would say nothing."""
    zeros = [first[place::4].count(0) / max(1, len(first) // 4) for place in range(4)]
    mostly = [zero > 0.9 for zero in zeros]
    wide = {"0101": "utf-16-le", "1010": "utf-16-be", "0111": "utf-32-le", "1110": "utf-32-be"}.get(
        "".join(str(int(most)) for most in mostly))
    narrow = [zero for zero, most in zip(zeros, mostly, strict=True) if not most]
    return len(first) >= LEAST_WIDE and wide is not None and max(narrow) < 0.05 and b" " in first and _is_written(first, wide)


def _is_written(first: bytes, encoding: str) -> bool:
    """Are these first bytes words, lines and signs of it (of UTF-32, behind its mark, every other one is a zero)?"""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(first[:512])
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char in "\0\t\n\r\f\v" for char in text)


def _tokenize(path: Path, tokenizer: Tokenizer) -> NDArray[Any]:
    try:
        with naming(path):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{path}: not UTF-8 text at byte {error.start}, and a tokenizer needs text") from error
    tokens = tokenizer(text)
    return _as_tokens(tokens, str(path), f"{path}: the tokenizer gave {type(tokens).__name__}")


def _cut_npy(path: Path) -> str | None:
    """How many bytes are missing, which NumPy does not tell; None where that is not what is wrong with the file."""
    with suppress(ValueError, EOFError, TypeError, ArithmeticError, SyntaxError, tokenize.TokenError), path.open("rb") as file:
        old = np.lib.format.read_magic(file) == (1, 0)
        shape, _, dtype = (np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0)(file)
        wanted, size = file.tell() + math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size
        if size < wanted and not dtype.hasobject:     # objects are pickled: of any size
            return f"its header says shape {list(shape)} of {dtype}, so {wanted} bytes, but it has {size}: truncated"
    return None


def _open_npy(path: Path) -> tuple[NDArray[Any], str, str]:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, TypeError, ArithmeticError, SyntaxError, tokenize.TokenError) as error:  # its header is Python
        raise InvalidValueError(f"{path}: {_cut_npy(path) or f'not a NumPy file: {error}'}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidValueError(
            f"{path} holds shape {list(tokens.shape)} of {tokens.dtype}; it must be 1-D and of integers"
        )
    if tokens.size == 0:
        raise InvalidValueError(f"{path} is empty: it has no tokens")
    return tokens, str(path), "npy"


def _open_bin(path: Path) -> tuple[NDArray[Any], str, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, count = struct.unpack("<iii", head) if len(head) == 12 else (0, 0, 0)
    if magic in {m for m, _ in LLM_C_KINDS}:
        dtype = LLM_C_KINDS.get((magic, version))
        if dtype is None:
            known = ", ".join(f"{m} version {v}" for m, v in LLM_C_KINDS)
            raise InvalidValueError(f"{path}: llm.c file of magic {magic} version {version}; known are {known}")
        if count < 0:
            raise InvalidValueError(f"{path}: its llm.c header says {count} tokens: damaged")
        if size != LLM_C_HEADER + count * dtype.itemsize:
            raise InvalidValueError(
                f"{path}: its llm.c header says {count} tokens of {dtype.itemsize} bytes, so "
                f"{LLM_C_HEADER + count * dtype.itemsize} bytes, but it has {size}: truncated or damaged"
            )
        if count == 0:
            raise InvalidValueError(f"{path} is empty: its header says 0 tokens")
        return np.memmap(path, dtype, "r", offset=LLM_C_HEADER, shape=(count,)), str(path), "llm.c"
    if size % 2:
        raise InvalidValueError(
            f"{path}: {size} bytes is no whole number of uint16 tokens (a nanoGPT .bin; truncated?)"
        )
    return np.memmap(path, np.dtype("<u2"), "r"), str(path), "nanoGPT"


def _megatron_index(path: Path) -> Path | None:
    """The .idx that belongs to `path` (a prefix, the .bin or the .idx itself), or None where it is no Megatron pair."""
    suffix = path.suffix.lower()
    if suffix == ".idx":
        return path if path.is_file() else None
    candidate = _beside(path if suffix == ".bin" else path.with_name(path.name + ".bin"), ".idx")
    if not candidate.is_file() or (suffix != ".bin" and path.exists()):
        return None
    with candidate.open("rb") as file:
        magic = file.read(len(MEGATRON_MAGIC))
    # Of a prefix alone it is the index that says what is wrong; and the .bin of an older one, of int32 as a rule, would be read as
    # nanoGPT's uint16: tokens, but not these. So would that of one which was cut off at once, or is zeros as after a crash.
    known = magic.startswith((MEGATRON_MAGIC, LEGACY_MAGIC))
    cut = MEGATRON_MAGIC.startswith(magic) or not magic.strip(b"\0")
    return candidate if known or cut or not path.exists() else None


def megatron_pair(path: Path) -> list[Path]:
    """The .idx and the .bin that `path` means, or nothing where it is no Megatron pair."""
    index = _megatron_index(path)
    return [] if index is None else [index, _beside(index, ".bin")]


def _beside(path: Path, suffix: str) -> Path:
    """The file beside `path` that ends so, in capitals or small letters as `path` does, or else in another way."""
    ways = [path.with_suffix(way) for way in (suffix, suffix.upper(), suffix.title())]      # ".bin", ".BIN", ".Bin"
    ways.sort(key=lambda way: (path.suffix.isupper(), path.suffix.istitle()) != (way.suffix.isupper(), way.suffix.istitle()))
    return next((way for way in ways if way.is_file()), ways[0])


def _open_megatron(index: Path) -> tuple[NDArray[Any], str, str]:
    with index.open("rb") as file:
        head = file.read(MEGATRON_HEADER.size)
    if head.startswith(LEGACY_MAGIC):
        raise InvalidValueError(f"{index}: a Megatron index of an older kind (TNTIDX): one that starts with MMIDIDX would be right")
    if not head.strip(b"\0"):
        raise InvalidValueError(f"{index} is {'zeros' if head else 'empty'}: damaged; a Megatron index, which starts with MMIDIDX, "
                                "would be right, or none beside a .bin of nanoGPT")
    if not head.startswith(MEGATRON_MAGIC):
        raise InvalidValueError(f"{index}: not a Megatron index: it must start with MMIDIDX")
    if len(head) < MEGATRON_HEADER.size:
        raise InvalidValueError(f"{index}: {len(head)} bytes of a Megatron index, whose header alone has "
                                f"{MEGATRON_HEADER.size}: truncated")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in MEGATRON_DTYPES:
        raise InvalidValueError(
            f"{index}: Megatron index version {version}, dtype code {code}; known are version 1 and integer "
            f"codes {sorted(MEGATRON_DTYPES)}"
        )
    needed = MEGATRON_HEADER.size + 12 * sequences + 8 * documents
    if index.stat().st_size < needed:  # multimodal files append one byte a sequence
        raise InvalidValueError(
            f"{index}: {sequences} sequences and {documents} documents need {needed} bytes, but it has "
            f"{index.stat().st_size}: truncated"
        )
    tokens_path = _beside(index, ".bin")
    if not tokens_path.is_file():
        raise FileNotFoundError(f"{tokens_path}: no such file, though its index {index.name} is there")
    dtype = np.dtype(MEGATRON_DTYPES[code])
    size, total = tokens_path.stat().st_size, 0
    if sequences:
        lengths = np.memmap(index, "<i4", "r", MEGATRON_HEADER.size, (sequences,))
        total = int(lengths.sum(dtype=np.int64))
        if int(lengths.min()) < 0:
            at = int(lengths.argmin())
            raise InvalidValueError(f"{index}: sequence {at} has {lengths[at]} tokens: damaged")
    if total == 0 or size == 0:
        raise InvalidValueError(f"{tokens_path} is empty: it has no tokens")
    if size != total * dtype.itemsize:
        raise InvalidValueError(
            f"{tokens_path}: its index says {total} tokens of {dtype.itemsize} bytes, but it has {size} bytes"
        )
    _check_megatron(index, lengths, documents, dtype.itemsize)
    return np.memmap(tokens_path, dtype, "r"), str(tokens_path), "Megatron"


def _check_megatron(index: Path, lengths: NDArray[np.int32], documents: int, item_bytes: int) -> None:
    """Sequences lie one behind another, as all tokens are read; and as Megatron asserts, the last document ends with the last of
    them. What is otherwise was damaged, and its lengths may be too."""
    pointers = np.memmap(index, "<i8", "r", MEGATRON_HEADER.size + 4 * len(lengths), (len(lengths),))
    begin = 0
    for first in range(0, len(lengths), BLOCK_TOKENS):
        block = lengths[first : first + BLOCK_TOKENS].astype(np.int64) * item_bytes
        right = begin + np.cumsum(block) - block
        wrong = np.flatnonzero(pointers[first : first + BLOCK_TOKENS] != right)
        if len(wrong):
            at = int(wrong[0])
            raise InvalidValueError(f"{index}: sequence {first + at} begins at byte {pointers[first + at]}, but those before it "
                                    f"take {right[at]}: damaged")
        begin = int(right[-1] + block[-1])
    if documents:
        last = np.memmap(index, "<i8", "r", MEGATRON_HEADER.size + 12 * len(lengths) + 8 * (documents - 1), (1,))[0]
        if last != len(lengths):
            raise InvalidValueError(f"{index}: its last document ends with sequence {last}, but there are {len(lengths)}: damaged")
