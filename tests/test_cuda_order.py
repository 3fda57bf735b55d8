"""The emulator's check for two streams that touch the same memory with no order between them (cuda/emu/order.h). Emulated streams
do everything at once, so nothing else would show a missing wait in a communicator. The tests of communicators run under it."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[1] / "cuda").is_dir():
    pytest.skip("no CUDA sources beside the tests", allow_module_level=True)

import cuda_emu
import numpy as np
from cuda_launchers import Kernels
from cuda_ranks import python
from test_cuda_stage import CUDA, partition_of, problem

import terapipe_c as tp
from terapipe_c.engine import RankEngine

ONE, OTHER, BYTES = 0x10, 0x20, 256  # streams are names here


class Streams:
    """Two streams and memory that another library has given."""

    def __init__(self) -> None:
        self.library = cuda_emu.library()
        self.library.tp_error_message.restype = ctypes.c_char_p
        self.memory = ctypes.create_string_buffer(BYTES)
        self.at = ctypes.addressof(self.memory)
        self.call("foreign", self.at, BYTES, 1)
        for stream in (ONE, OTHER):
            self.call("stream", stream, 1)

    def call(self, name: str, *arguments: int) -> int:
        words = [ctypes.c_int64(a) if i else ctypes.c_void_p(a) for i, a in enumerate(arguments)]
        return int(getattr(self.library, f"tp_emu_order_{name}")(*words))

    def touch(self, stream: int, begin: int, size: int, writes: bool) -> bool:
        """Whether it may."""
        return self.library.tp_emu_order_touch(ctypes.c_void_p(stream), b"an operation", ctypes.c_void_p(self.at + begin),
                                               ctypes.c_size_t(size), int(writes)) == 0  # fmt: skip

    def pass_on(self, source: int, target: int) -> None:
        """By an event."""
        clock = ctypes.create_string_buffer(8 * 96)
        self.library.tp_emu_order_record(ctypes.c_void_p(source), clock)
        self.library.tp_emu_order_wait(ctypes.c_void_p(target), clock)


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    made.call("foreign", made.at, 0, 0)
    for stream in (ONE, OTHER):
        made.call("stream", stream, 0)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_streams_that_meet_are_told_of(streams: Streams, first: bool, second: bool) -> None:
    assert streams.touch(ONE, 0, 64, first)
    assert not streams.touch(OTHER, 63, 1, second)
    assert "neither waits for the other" in streams.library.tp_error_message().decode()
    assert streams.touch(OTHER, 64, 64, second)  # beside it
    streams.pass_on(ONE, OTHER)
    assert streams.touch(OTHER, 0, 64, second)
    assert not streams.touch(ONE, 0, 64, True)  # and the way back


def test_two_may_read(streams: Streams) -> None:
    assert streams.touch(ONE, 0, 64, False) and streams.touch(OTHER, 0, 64, False)


def test_an_event_holds_what_came_before_it_alone(streams: Streams) -> None:
    streams.pass_on(ONE, OTHER)
    assert streams.touch(ONE, 0, 8, True) and not streams.touch(OTHER, 0, 8, False)


def test_what_the_host_waited_for_is_over(streams: Streams) -> None:
    assert streams.touch(ONE, 0, 64, True)
    streams.call("host_stream", ONE)
    assert streams.touch(OTHER, 0, 64, True)


def test_memory_that_was_given_back_is_new(streams: Streams) -> None:
    assert streams.touch(ONE, 0, 64, True)
    streams.call("forget", streams.at, BYTES)
    assert streams.touch(OTHER, 0, 64, True)


def test_memory_that_is_taken_back_too_early_is_told_of(streams: Streams) -> None:
    """By its library, which does not wait for the device."""
    for waits in (False, True):
        assert streams.touch(ONE, 0, 64, False) and streams.touch(OTHER, 64, 64, True)
        streams.call("host_stream", ONE)
        if waits:
            streams.call("host_stream", OTHER)
        assert streams.call("foreign", streams.at, 0, 0) == (not waits)
        streams.call("foreign", streams.at, BYTES, 1)


EARLY = """
import ctypes, os, threading
from cuda_ranks import Case, World
from terapipe_c.engine import RankEngine
world, count = World(Case()), ctypes.CDLL(os.environ["TERAPIPE_NCCL"]).fake_nccl_count
def work(rank):
    engine = RankEngine(world.model, world.partition, world.cuts, world.program, rank, world.comm(rank), **world.options)
    engine.load(world.params)
    engine.evaluate(world.tokens)       # no rank but the head's waits for its device
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(count(4), count(3), count(2), count(5))
"""


def test_buffers_of_nccl_are_given_back_when_the_device_is_done_with_them(fake_nccl: Path) -> None:
    """ncclMemFree does not wait for it, as cudaFree does."""
    assert python(fake_nccl, "-c", EARLY).split() == ["2", "0", "0", "0"]  # given, not freed, misused, communicators left


def test_a_step_waits_for_the_copies_of_one_that_failed(emulation: None) -> None:
    """Swaps beside the work, which nobody waited for any more: what goes forward would be written where they still read."""
    module, (model, params, tokens) = tp.cuda.load(), problem(2, 24)
    program = tp.schedules.gpipe(1, 2, [2, 2]).save_memory(bytes([0]), bytes([1]), 1, True).lower(True)
    request = {"backend": CUDA["float32"], "swap": (0, 1, 1, 1, 1, 0)}

    def engine() -> RankEngine:
        made = RankEngine(model, partition_of(model, []), [(1, [12, 12])] * 2, program, 0, None, **request)
        made.load(params)
        return made

    right = engine().run(tokens, step=1)[:2]
    for calls in range(30, 470, 40):
        one = engine()
        module.emu_break(calls)
        try:
            with pytest.raises(tp.Error):
                one.run(tokens, step=1, update=False)
        finally:
            module.emu_break(0)
        assert one.run(tokens, step=1)[:2] == right


def test_the_hosts_memory_is_not_looked_at(streams: Streams) -> None:
    streams.call("foreign", streams.at, 0, 0)
    assert streams.touch(ONE, 0, 64, True) and streams.touch(OTHER, 0, 64, True)


def test_a_kernel_reaches_what_stands_in_its_table(streams: Streams) -> None:
    k = Kernels(streams.library)
    gradients = [k.put(np.ones(4, np.float32)) for _ in range(2)]
    listed, sums, partial = k.tensors(*((x,) for x in gradients)), k.put(np.zeros(2)), k.put(np.zeros(2))
    streams.call("foreign", gradients[1].ctypes.data, 16, 1)
    assert streams.library.tp_emu_order_touch(ctypes.c_void_p(OTHER), b"a message", gradients[1].ctypes.data_as(ctypes.c_void_p),
                                              ctypes.c_size_t(16), 1) == 0  # fmt: skip
    assert k.status("sumsq", ONE, listed, sums, partial) != 0
    assert '"a message" on one and "sumsq_leaf" on another' in streams.library.tp_error_message().decode()
    streams.pass_on(OTHER, ONE)
    assert k.status("sumsq", ONE, listed, sums, partial) == 0 and (sums == 4).all()
    streams.call("foreign", gradients[1].ctypes.data, 16, 0)
    k.clear()
    again = k.lib.tp_simt_range_add, k.lib.tp_emu_order_touch  # whoever has that memory next; test_cuda_planned failed by it
    at, size = sums.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(sums.nbytes)
    assert again[0](at, size) == 0 and again[1](ctypes.c_void_p(OTHER), b"another operation", at, size, 1) == 0
    k.lib.tp_simt_range_remove(at)
