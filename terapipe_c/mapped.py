"""Tokens that lie in a mapped file: where, and how they are read while others may cut the file off.

To touch what a mapping has lost ends a process by SIGBUS, and a look at the file's size before it only narrows the gap. So tokens
are read by pread(), which then says that there is less, where they are the file's bytes still.
"""
from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidValueError
from ._files import naming

__all__ = ["Reader", "place_of", "snapshot", "tokens_at"]

SHARED = "r--s", "rw-s"     # modes of mappings that are the bytes of the file, by proc(5)


class Reader:
    """Pieces of tokens, copied from their file where they are mapped; else views. given: what they are a view of, if that has
    a name."""

    def __init__(self, tokens: NDArray[Any], given: Any = None) -> None:
        self.tokens, self._fd, self._offset = tokens, -1, 0
        if (place := place_of(tokens, SHARED)) is not None:
            self._fd, self._offset = place[0], place[1]["offset"]
            self._closed = weakref.finalize(self, os.close, self._fd)
        self.file = _file_of(given if isinstance(given, np.memmap) else tokens)
        if place is not None and (self.file is None or not os.path.samestat(os.fstat(self._fd), self.file[1])):
            self.file = place[1]["path"], os.fstat(self._fd)

    def __reduce__(self) -> Any:
        """A copy has a descriptor of its own, and elsewhere none."""
        return Reader, (self.tokens,)

    def check(self) -> None:
        """ValueError if the file was cut off. One that was replaced or removed stays mapped as it was. Our descriptor may be
        closed, and another's by now: who becomes a daemon closes all. Then views of the mapping must do."""
        if self.file is None:
            return
        path, before = self.file
        now = None
        with suppress(OSError):
            now = os.stat(path) if self._fd < 0 else os.fstat(self._fd)
        same = now is not None and os.path.samestat(now, before)
        if self._fd >= 0 and not same:
            self._closed.detach()
            self._fd = -1
        if now is not None and same and now.st_size < before.st_size:
            raise self._cut_off(now.st_size)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """tokens[start:stop], 0 <= start <= stop <= their number; ValueError where the file has been cut off, OSError where
        the disk fails."""
        if self._fd < 0:
            return self.tokens[start:stop]
        assert self.file is not None
        piece = np.empty(stop - start, self.tokens.dtype)
        rest, at = piece.view(np.uint8).data, self._offset + start * piece.itemsize
        while len(rest):
            with naming(self.file[0]):
                got = os.preadv(self._fd, [rest], at)
            if got == 0:
                raise self._cut_off(os.fstat(self._fd).st_size)
            rest, at = rest[got:], at + got
        return piece

    def _cut_off(self, size: int) -> InvalidValueError:
        assert self.file is not None
        path, before = self.file
        return InvalidValueError(f"{path} was cut off from {before.st_size} to {size} bytes while it was in use: a file that "
                                 "nobody writes to would be right")


def snapshot(array: NDArray[Any]) -> NDArray[Any]:
    """A copy of an array that its owner may write to; what nobody can, and what is mapped and may be larger than the memory, as it
    is."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and not owner.flags.writeable:
        owner = owner.base
    while isinstance(owner, memoryview) and owner.readonly:
        owner = owner.obj
    if owner is None or isinstance(owner, bytes) or _is_mapped(array):
        return array
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _is_mapped(array: Any) -> bool:
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, mmap.mmap)


def _file_of(tokens: NDArray[Any]) -> tuple[str, os.stat_result] | None:
    """The file that is mapped, and what it was; None where there is none."""
    path = getattr(tokens, "filename", None)
    try:
        return None if path is None else (os.fspath(path), os.stat(path))
    except FileNotFoundError:                        # removed since the caller mapped it: nobody can cut it off any more
        return None


def place_of(tokens: NDArray[Any], modes: tuple[str, ...] = SHARED[:1]) -> tuple[int, dict[str, Any]] | None:
    """A descriptor of the file where these tokens are, and the place there, for `tokens_at` of a process that inherits it, if they
    are a read-only shared mapping (that of np.memmap or np.load with mode "r", or a piece of it), or one of these modes, of a file
    that can still be found by its name; else None."""
    address = tokens.__array_interface__["data"][0]
    vma = _mapping(address)
    if vma is None or not tokens.flags.c_contiguous or vma["mode"] not in modes or address + tokens.nbytes > vma["end"]:
        return None
    try:
        if not stat.S_ISREG(os.stat(vma["path"]).st_mode):      # a GPU's managed memory is a device's
            return None
        fd = os.open(vma["path"], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)   # a FIFO may have that name by now
    except OSError:
        return None
    again = None
    with suppress(OSError, ValueError), mmap.mmap(fd, 1, access=mmap.ACCESS_READ) as memory:
        again = _mapping(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])    # stat may number devices otherwise
    if again is None or again["file"] != vma["file"]:       # another file has that name by now
        os.close(fd)
        return None
    return fd, {"path": vma["path"], "offset": vma["offset"] + address - vma["start"], "dtype": tokens.dtype.str,
                "count": tokens.size}


def tokens_at(fd: int, place: Mapping[str, Any]) -> NDArray[Any]:
    """What `place_of` told of, mapped, whatever its name has become; ValueError where the file was cut off since."""
    path, dtype, now = place["path"], np.dtype(place["dtype"]), os.fstat(fd)
    if now.st_size < place["offset"] + place["count"] * dtype.itemsize:
        raise InvalidValueError(f"{path} was cut off to {now.st_size} bytes while the run began: a file that nobody writes to "
                                "would be right")
    with open(fd, "rb", closefd=False) as file:
        tokens = np.memmap(file, dtype, "r", place["offset"], (place["count"],))
    with suppress(OSError):
        if os.path.samestat(os.stat(path), now):
            tokens.filename = path      # type: ignore[misc, unused-ignore]  # by which `_file_of` knows it; final since NumPy 2.5
    return tokens


def _mapping(address: int) -> dict[str, Any] | None:
    """What this process has mapped at the address, by proc(5): start, end, mode, offset, file (device and inode), path."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                span, mode, offset, device, inode, *path = line.rstrip(b"\n").split(None, 5)
                start, end = (int(word, 16) for word in span.split(b"-"))
                if start <= address < end:
                    return {"start": start, "end": end, "mode": mode.decode(), "offset": int(offset, 16), "file": (device, inode),
                            "path": os.fsdecode(path[0]) if path else ""}
    except OSError:
        pass
    return None
