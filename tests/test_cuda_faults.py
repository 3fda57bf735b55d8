"""Errors of CUDA that end a process's use of a device, and what is said of memory that the host does not give."""

import ctypes
import re
from pathlib import Path

import cuda_emu
import pytest
from test_cuda_nccl import headers


@pytest.fixture
def library():
    found = cuda_emu.library()
    found.tp_error_message.restype = ctypes.c_char_p
    yield found
    found.tp_emu_break(ctypes.c_int64(0))  # heals the device


def told(library: ctypes.CDLL, error: int) -> str:
    library.tp_emu_break(ctypes.c_int64(0))
    assert library.tp_cuda_check(error, b"a call") != 0
    return str(library.tp_error_message().decode())


def test_a_client_that_mps_has_ended_has_lost_its_device(library):
    """And one whose shared data another device says is not valid: neither can go on."""
    for error in (700, 810, 911):
        assert "the device is lost to this process: a call" in told(library, error), error
    for error in (2, 98, 805, 901):
        assert "is lost" not in told(library, error), error


def test_every_error_that_the_header_says_ends_a_process_is_told_as_one(library):
    folder = headers("driver_types.h", "/usr/local/cuda/include", "/usr/local/cuda-13*/include")
    if folder is None:
        pytest.skip("driver_types.h is not installed")
    text = (Path(folder) / "driver_types.h").read_text()
    enum = re.search(r"enum\s+__device_builtin__\s+cudaError\s*\{(.*?)\n\s*\}", text, re.S)
    entries = re.findall(r"/\*\*(.*?)\*/\s*cudaError\w+\s*=\s*(\d+)", enum.group(1), re.S)
    ends = {int(number) for words, number in entries if "terminated and relaunched" in re.sub(r"[\s*]+", " ", words)}
    assert len(entries) > 90 and {700, 719, 810} <= ends
    assert not [number for number in sorted(ends) if "is lost" not in told(library, number)]


def test_host_memory_that_is_not_given_is_not_put_on_ulimit(library):
    """The driver pins pages itself, and does not ask for RLIMIT_MEMLOCK."""
    library.tp_cuda_refuse_pinned(b"stage 0", ctypes.c_size_t(1 << 40))
    words = library.tp_error_message().decode()
    assert words.startswith(f"stage 0 needs {1 << 40} bytes of page-locked host memory") and "ulimit" not in words
