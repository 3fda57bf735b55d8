"""Kernel launchers through ctypes: their argument types are read from the headers, so that a call cannot differ from them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ("cuda/kernels.h", "cuda/groups.h")
TYPES = {"tp_stream": ctypes.c_void_p, "tp_dtype": ctypes.c_int, "int64_t": ctypes.c_int64, "int": ctypes.c_int,
         "float": ctypes.c_float}  # fmt: skip


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
