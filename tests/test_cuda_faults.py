"""Errors of CUDA that end a process's use of a device, what is said of memory that the host does not give, and how large a message
between parts of a GPU may be."""

import ctypes
import re
from pathlib import Path

import cuda_emu
import numpy as np
import pytest
from test_cuda_nccl import Driver, Partition, headers

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.backend import Backend
from terapipe_c.engine import RankEngine, gather_bytes, in_threads
from terapipe_c.partition import even_partition


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


def test_a_part_of_a_lost_gpu_is_told_as_lost(library):
    """A part's events are made by the driver, within a step too: its number alone was told."""
    library.tp_green_part.restype = ctypes.POINTER(Partition)
    driver, green, event = Driver(lambda least: 132 // least), ctypes.c_void_p(), ctypes.c_void_p()
    assert library.tp_green_open(0, 2, driver.table, ctypes.byref(green)) == 0
    part = library.tp_green_part(green, 0)[0]
    driver.event = lambda out, flags: 700
    assert part.event(part.context, 0, ctypes.byref(event)) != 0 and driver.current == []
    library.tp_green_close(green)
    words = "the device is lost to this process: cuEventCreate: CUDA error 700 (cudaErrorIllegalAddress"
    assert words in library.tp_error_message().decode().replace(" on device 0", "")


def test_host_memory_that_is_not_given_is_not_put_on_ulimit(library):
    """The driver pins pages itself, and does not ask for RLIMIT_MEMLOCK."""
    library.tp_cuda_refuse_pinned(b"stage 0", ctypes.c_size_t(1 << 40))
    words = library.tp_error_message().decode()
    assert words.startswith(f"stage 0 needs {1 << 40} bytes of page-locked host memory") and "ulimit" not in words


@pytest.mark.parametrize(("device", "told"), [("0", "is '0': a whole number"), (1 << 40, "at most 2147483647"), (-1, "least 0")])
def test_a_number_that_no_gpu_has_is_told_in_our_words(emulation, device, told):
    """They were C's: that a str cannot be interpreted, and a signed integer is greater than maximum."""
    region = _core.Region.create(2, bytearray([0, 1, 1, 0]), 1 << 16, 64, False)
    for ask in (lambda: tp.cuda.attention_kernel(device), lambda: tp.cuda.pipeline_on_one_gpu(region, device)):
        with pytest.raises(tp.InvalidValueError, match=told):
            ask()


@pytest.mark.parametrize(("more", "told"), [({"largest": 8}, "made for at most 8"), ({"largest": 8192}, None), ({}, None)])
def test_who_asks_for_parts_says_how_large_a_message_may_be(emulation, monkeypatch, more, told):
    """Beyond what nobody need say, too: a micro-batch of 16 sequences of 1024 tokens and width 2048 is four times as much."""
    monkeypatch.setattr(tp.cuda.load(), "partitions", lambda device, parts: [(None, 132)] * parts)
    model, slicing = tp.GPTConfig(2, 1, 16, 32, 32, tie_weights=False), [(1, [32])]
    region = _core.Region.create(2, bytearray([0, 1, 1, 0]), 1 << 16, gather_bytes(model), False)
    with pytest.raises(tp.InvalidValueError, match="largest is 0"):
        tp.cuda.pipeline_on_one_gpu(region, largest=0)
    parts, comms = tp.cuda.pipeline_on_one_gpu(region, timeout_s=20.0, **more)
    program, tokens = tp.schedules.gpipe(2, 1).lower(), np.arange(33, dtype=np.int32)[None] % 32

    def work(rank):
        engine = RankEngine(model, even_partition(model, 2), slicing, program, rank, comms[rank], backend=Backend("cuda", "bf16"),
                            part=parts[rank])
        engine.load(tp.init_params(model))
        return engine.run(tokens)[0]

    if told is None:
        assert len(set(in_threads(region, work))) == 1
    else:
        with pytest.raises(tp.Error, match=told):
            in_threads(region, work)
