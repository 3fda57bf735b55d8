"""Kernel launchers through ctypes, and memory that they may touch: the emulator's (checked to the byte) or a device's. Their
argument types are read from the headers, so that a call cannot differ from them."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
F32, BF16 = 0, 1
HEADERS = ("cuda/kernels.h", "cuda/groups.h")
TYPES = {"tp_stream": ctypes.c_void_p, "tp_dtype": ctypes.c_int, "int64_t": ctypes.c_int64, "int": ctypes.c_int,
         "size_t": ctypes.c_size_t, "tp_attention_kernel": ctypes.c_int, "float": ctypes.c_float,
         "double": ctypes.c_double}  # fmt: skip


TENSOR = np.dtype([("n", np.int64), ("first", np.int64), *((name, np.uint64) for name in ("grad", "value", "m", "v", "copy")),
                   ("decays", np.int32), ("vector", np.int32)])  # fmt: skip  # tp_cuda_tensor
LIST = np.dtype([("count", np.int64), ("leaves", np.int64), ("tensor", np.uint64), ("owner", np.uint64)])  # tp_cuda_tensors


def list_tensors(library: ctypes.CDLL, rows: list[tuple[Any, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Both tables, on the host. A row: n, then addresses of grad, value, m, v and copy, and whether it decays."""
    table = np.zeros(len(rows), TENSOR)
    for at, (n, *arrays, decays) in zip(table, rows, strict=True):
        at["n"], at["decays"] = n, decays
        for name, address in zip(("grad", "value", "m", "v", "copy"), arrays, strict=True):
            at[name] = address
    owner = np.full(sum(library.tp_cuda_leaves(row[0]) for row in rows), -1, np.int32)
    assert library.tp_cuda_list_tensors(len(rows), table.ctypes.data, owner.ctypes.data) == len(owner)
    return table, owner


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """`library` with the signatures of every launcher that it has and a helper `tp_error_message` giving bytes."""
    library.tp_error_message.restype = ctypes.c_char_p
    for header in HEADERS:
        text = (ROOT / header).read_text()
        for result, name, arguments in re.findall(r"\b(tp_status|int64_t)\n(tp_cuda_\w+)\(([^;]*)\);", text):
            function = getattr(library, name, None)
            if function is not None:
                words = [a.split() for a in arguments.split(",")]
                function.argtypes = [ctypes.c_void_p if "*" in " ".join(w) else TYPES[w[0]] for w in words]
                function.restype = ctypes.c_int64 if result == "int64_t" else ctypes.c_int
    return library


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as uint16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def of(dtype: int, x: np.ndarray) -> np.ndarray:
    return to_bf16(x) if dtype == BF16 else np.asarray(x, np.float32)


def numbers(x: np.ndarray) -> np.ndarray:
    """float64 of what an array of either dtype holds."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


class Kernels:
    """The launchers by name, and memory that they may touch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lib = declare(library)
        self.kept: list[np.ndarray] = []

    def put(self, x: np.ndarray, offset: int = 0) -> np.ndarray:
        """A copy in memory of its own, `offset` elements behind a boundary of 64 bytes; the only memory kernels may touch."""
        x = np.ascontiguousarray(x)
        room = np.empty(x.nbytes + 64 + offset * x.itemsize, np.uint8)
        start = -room.ctypes.data % 64 + offset * x.itemsize
        copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        copy[...] = x
        assert self.lib.tp_simt_range_add(ctypes.c_void_p(copy.ctypes.data), ctypes.c_size_t(copy.nbytes)) == 0
        self.kept.append(copy)
        return copy

    def empty(self, dtype: int, *shape: int, offset: int = 0) -> np.ndarray:
        """NaN."""
        return self.put(
            np.full(shape, 0x7FFF, np.uint16) if dtype == BF16 else np.full(shape, np.nan, np.float32), offset
        )

    def address(self, x: np.ndarray | None) -> int:
        """0: None."""
        return 0 if x is None else x.ctypes.data

    def tensors(self, *rows: tuple[Any, ...]) -> np.ndarray:
        """A list of (grad, value, m, v, copy, decays); what comes after grad may be missing."""
        full = [(*row, None, None, None, None, 0)[:6] if len(row) < 6 else row for row in rows]
        table, owner = list_tensors(self.lib, [(row[0].size, *map(self.address, row[:5]), row[5]) for row in full])
        table, owner = self.put(table), self.put(owner)
        return np.array([(len(table), len(owner), self.address(table), self.address(owner))], LIST)

    def clear(self) -> None:
        for x in self.kept:
            self.lib.tp_simt_range_remove(ctypes.c_void_p(x.ctypes.data))
        self.kept.clear()
        self.lib.tp_simt_set_order(0)

    def status(self, name: str, *arguments: Any) -> int:
        values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        return int(getattr(self.lib, "tp_cuda_" + name)(*values))

    def __call__(self, name: str, *arguments: Any) -> None:
        """On no stream."""
        assert self.status(name, None, *arguments) == 0, self.lib.tp_error_message().decode()


class OnDevice(Kernels):
    """The same on a device whose memory the host cannot access: arrays are copied there before a call and back after it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self.lib.tp_cuda_compute.restype = ctypes.c_void_p
        self.device, self.memory, self.offsets = ctypes.c_void_p(), list[ctypes.c_void_p](), dict[int, int]()
        self.do("tp_cuda_open", 0, None, ctypes.byref(self.device))
        self.stream = ctypes.c_void_p(self.lib.tp_cuda_compute(self.device))

    def do(self, name: str, *arguments: Any) -> None:
        assert getattr(self.lib, name)(*arguments) == 0, self.lib.tp_error_message().decode()

    def put(self, x: np.ndarray, offset: int = 0) -> np.ndarray:
        copy, memory = np.array(x, order="C"), ctypes.c_void_p()
        room = ctypes.c_size_t(copy.nbytes + 64 + offset * copy.itemsize)
        self.do("tp_cuda_alloc", self.device, room, b"a test", ctypes.byref(memory))
        self.memory.append(memory)
        self.kept.append(copy)
        self.offsets[copy.ctypes.data] = offset * copy.itemsize
        return copy

    def on_device(self, i: int) -> int:
        return (self.memory[i].value or 0) + self.offsets[self.kept[i].ctypes.data]

    def move(self, back: bool) -> None:
        for i, x in enumerate(self.kept):
            here, there, size = (
                ctypes.c_void_p(x.ctypes.data),
                ctypes.c_void_p(self.on_device(i)),
                ctypes.c_size_t(x.nbytes),
            )
            if x.nbytes:
                self.do(
                    "tp_cuda_copy",
                    self.device,
                    self.stream,
                    *((here, there) if back else (there, here)),
                    size,
                    int(back),
                )
        self.do("tp_cuda_synchronize", self.device, self.stream)

    def address(self, x: np.ndarray | None) -> int:
        if x is None:
            return 0
        for i, kept in enumerate(self.kept):
            if kept.ctypes.data <= x.ctypes.data < kept.ctypes.data + max(kept.nbytes, 1):
                return self.on_device(i) + x.ctypes.data - kept.ctypes.data
        return x.ctypes.data

    def status(self, name: str, *arguments: Any) -> int:
        def place(a: Any) -> Any:
            return self.address(a) if isinstance(a, np.ndarray) else a

        if arguments[0] is not None:  # not a launcher
            return super().status(name, *arguments)
        self.move(back=False)
        status = int(getattr(self.lib, "tp_cuda_" + name)(self.stream, *map(place, arguments[1:])))
        self.move(back=True)
        return status

    def clear(self) -> None:
        for memory in self.memory:
            self.lib.tp_cuda_free(self.device, memory)
        self.memory.clear()
        self.kept.clear()
        self.offsets.clear()


def sums_of_squares(k: Kernels, *gradients: np.ndarray) -> np.ndarray:
    listed, out = k.tensors(*((x,) for x in gradients)), k.put(np.full(len(gradients), np.nan))
    k("sumsq", listed, out, k.put(np.full(int(listed["leaves"][0]), np.nan)))
    return out


def adamw_args(beta1: float, beta2: float, *others: float) -> Any:
    """tp_adamw_args (cuda/kernels.h); others: lr, eps, weight_decay, bias1, bias2, grad_scale."""
    return np.frombuffer(struct.pack("dd6f", beta1, beta2, *others), np.uint8).copy()


def update(k: Kernels, dtype: int, args: Any, *rows: tuple[Any, ...], before: Any = None, on_device: bool = False) -> None:
    """AdamW of (grad, value, m, v, copy, decays), from the values of rows `before`."""
    listed = k.tensors(*rows)
    start = int((listed if before is None else k.tensors(*before))["tensor"][0])
    k("adamw", dtype, listed, start, *((None, args) if on_device else (args, None)))
