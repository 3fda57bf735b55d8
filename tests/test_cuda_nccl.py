"""The communicators of device memory, over the emulated device: "nccl" against a libnccl of threads (tests/cuda/fake_nccl.c),
"inproc", and green contexts against a driver that is a table."""
import contextlib
import ctypes
import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import cuda_emu
import pytest
from cuda_ranks import ROOT, compile_fake, emulated, launched, python, trained

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.cuda import QUEUES_VARIABLE as QUEUES
from terapipe_c.device_comm import message_bytes
from terapipe_c.slots import needed

MODES = ("host", "nccl", "inproc")


def answers(fake, *cases):
    return emulated(fake, *({"pending": None, **case} for case in cases))


def test_bits_do_not_depend_on_the_communicator(fake_nccl):
    """Pairs, an odd ring, tied and untied, interleaved stages that go round; slow and quick libraries."""
    shapes = [{"ranks": 2}, {"ranks": 3, "tied": False}, {"ranks": 2, "chunks": 2, "schedule": "interleaved", "steps": 1}]
    cases = [{"mode": mode, **shape} for shape in shapes for mode in MODES]
    cases += [{"mode": "nccl", "ranks": 2, "fault": {"looks": looks}} for looks in (0, 2, 7)]
    cases += [{"mode": "inproc", "ranks": 2, "ways": ways} for ways in (1, 2, 5, 7)]
    results = answers(fake_nccl, *cases)
    for i in range(len(shapes)):
        host, nccl, inproc = results[3 * i:3 * i + 3]
        assert trained(nccl) == trained(inproc) == trained(host)
        assert nccl["calls"] > 20 and inproc["calls"] == host["calls"] == 0
    assert all(trained(one) == trained(results[0]) for one in results[-7:])


def test_hand_over_that_waits_otherwise_ends_with_the_first_failure(fake_nccl):
    """One whose host looks for what the other never says, does, or has read."""
    cases = [{"mode": "inproc", "ways": 5, **end} for end in ({"dead": 0}, {"late": 0, "timeout_s": 0.3})]
    cases += [{"mode": "inproc", "ways": ways, "lag": 1, "timeout_s": 2.0, "steps": 1} for ways in (2, 0)]
    *ends, goes, lags, unknown = answers(fake_nccl, *cases, {"mode": "inproc", "ways": 8})
    for case, result in zip(cases, ends, strict=False):
        assert any(("killed" if "dead" in case else "waited 0.3 s") in text for text in result["told"]), result["told"]
    first = "waited 2 s (for a message from rank 0|to send a message to rank 1) .receive of the activation"
    assert trained(goes) and any(re.search(first, text) for text in lags["told"]), lags["told"]  # it comes, and is never there
    assert all("ways is 8: 0 to 7 would be right" in text for text in unknown["told"] if "Aborted" not in text)


NO_ROOM = """
import threading, terapipe_c as tp
from cuda_ranks import Case, World
from terapipe_c.engine import RankEngine
emulator, room = tp.cuda.load(), 1 << 30
def both():
    world, engines = World(Case(mode="inproc")), {}
    comms = [world.comm(rank) for rank in range(2)]
    def opened(rank):
        engines[rank] = RankEngine(world.model, world.partition, world.cuts, world.program, rank, comms[rank], **world.options)
    threads = [threading.Thread(target=opened, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return comms, engines
emulator.emu_machine(total_bytes=room)
comms, engines = both()
taken = room - tp.cuda.devices()[0].free_bytes
del comms, engines
emulator.emu_machine(total_bytes=taken)
comms, engines = both()
for _ in range(2):
    try:
        comms[0].send(1, 0, bytes(8))
    except tp.OutOfMemoryError as error:
        print(error)
del engines[1]      # there is room now
comms[0].send(1, 0, bytes(8))
print("sent")
"""


def test_a_message_finds_room_later_where_there_was_none(fake_nccl):
    """Slots that had not been got were taken for slots when the next message was sent."""
    *refused, sent = launched("inproc", fake_nccl, NO_ROOM).splitlines()
    assert len(refused) == 2 and all(text.startswith("a buffer for messages needs ") for text in refused) and sent == "sent"


SECOND = """
import threading
from cuda_ranks import *
from terapipe_c.engine import RankEngine
for mode in ("nccl", "inproc"):
    world, told, both = World(Case(mode=mode)), {}, threading.Barrier(2, timeout=20)
    comms = [world.comm(rank) for rank in range(2)]
    def one(rank):
        try:
            opened = lambda: RankEngine(world.model, world.partition, world.cuts, world.program, rank, comms[rank], **world.options)
            engine = opened()
            engine.load(world.params)
            try:
                opened()
            except tp.InvalidValueError as error:
                told[rank] = str(error)
            both.wait()     # nobody opens while another captures
            for step in (1, 2):
                engine.run(world.tokens, step=step, lr=1e-2)
            both.wait()
            del engine
            opened()
        except Exception as error:
            world.region.abort("ERUNTIME", rank, str(error))
            told[rank] = f"{type(error).__name__}: {error}"
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(mode, told[0] == told[1], told[0])
"""


def test_a_second_engine_on_a_communicator_is_refused_and_the_first_goes_on(fake_nccl):
    """Who was refused ended the run, and took the device of the first engine away from under its messages."""
    for mode, line in zip(("nccl", "inproc"), python(fake_nccl, "-c", SECOND).splitlines(), strict=True):
        assert line.startswith(f"{mode} True this communicator has the device of an engine that is open still: "), line


EVENTS = """
import ctypes, os, sys, threading
from cuda_ranks import Case, World
from terapipe_c.engine import RankEngine
events = ctypes.CDLL(os.environ["TERAPIPE_CUDA_MODULE"]).tp_emu_events
for failed in (False, True):
    world, before = World(Case(mode="inproc")), events()
    comms = [world.comm(rank) for rank in range(2)]
    opened = lambda rank: RankEngine(world.model, world.partition, world.cuts, world.program, rank, comms[rank], **world.options)
    engines = {}
    threads = [threading.Thread(target=lambda rank=rank: engines.update({rank: opened(rank)})) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    if failed:
        world.region.abort("ERUNTIME", 0, "rank 0 failed")
    engines.clear()
    print(events() - before)
"""


def test_after_a_failure_a_peer_may_still_wait_for_the_events_that_a_rank_told_it(fake_nccl):
    """In an exchange a rank waits for an event of the other, which may have failed, and closed, since it told of it.
    What a slot holds is left for the same reason; without a failure all is given back."""
    assert python(fake_nccl, "-c", EVENTS).split() == ["0", "4"]     # two of each rank's


def test_hand_over_ends_where_more_messages_are_ahead_of_their_readers_than_there_are_slots(fake_nccl):
    """All slices pass a rank's first stage before any passes its second: each rank waited for a slot that held its own message. Of
    three ranks one waited for a slot at the next, that for a message of the last, and that for the first."""
    programs = [tp.schedules.looped_bfs(2, 1, 2, 12), tp.schedules.interleaved(2, 2, 2, 12),
                tp.schedules.looped_bfs(3, 4, 2, 3).reorder(), tp.schedules.interleaved(3, 6, 2, 2).reorder()]
    assert [needed(program.lower(True)) for program in programs] == [4, 8, 3, 3]     # by NCCL there are more
    cases = [{"mode": mode, "ways": ways, "ranks": program.num_ranks, "layers": program.num_stages, "chunks": 2,
              "micros": program.num_micro_batches, "lengths": [12 // program.slices[0]] * program.slices[0], "timeout_s": 5.0,
              "text": str(program.lower(True))}
             for program in programs for mode, ways in (("host", 0), ("inproc", 0), ("inproc", 3), ("nccl", 0))]
    results = [trained(one) for one in answers(fake_nccl, *cases)]
    for of_program in zip(*[iter(results)] * 4, strict=True):
        assert all(one == of_program[0] for one in of_program)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_stages_that_go_down_the_ranks_and_up_again(fake_nccl, tied):
    """Of two ranks each is behind the other in the ring; of more, activations also go to the rank before, which NCCL's had no
    communicator for."""
    schedules = tp.schedules
    programs = [schedules.zb_v(3, 2, 2), schedules.dualpipe_v(3, 6), schedules.hanayo(3, 1, 3, 2), schedules.hanayo(3, 2, 2),
                schedules.zb_v(4, 2)]
    cases = [{"mode": mode, "ranks": program.num_ranks, "layers": program.num_stages, "steps": 2, "tied": tied,
              "chunks": program.num_stages // program.num_ranks, "micros": program.num_micro_batches,
              "lengths": [12 // program.slices[0]] * program.slices[0], "text": str(program.lower(tied))}
             for program in programs for mode in MODES]
    results = [trained(one) for one in answers(fake_nccl, *cases)]
    for host, nccl, inproc in zip(*[iter(results)] * 3, strict=True):
        assert host == nccl == inproc


def test_forwards_in_halves_go_through_every_communicator(fake_nccl):
    """AutoPipe's sliced 1F1B: a message of the first half, one of the second, or one of both."""
    programs = [(2, 3, 1), (3, 3, 2), (3, 4, 1)]
    cases = [{"mode": mode, "ranks": ranks, "micros": micros, "sequences": 2, "lengths": [12],
              "text": str(tp.schedules.sliced_1f1b(ranks, micros, split).lower(True))}
             for ranks, micros, split in programs for mode in MODES]
    results = answers(fake_nccl, *cases)
    assert all("F0.0a" in case["text"] and "F0.0b" in case["text"] for case in cases)
    for i in range(0, len(cases), 3):
        host, nccl, inproc = map(trained, results[i:i + 3])
        assert host == nccl == inproc


def test_a_rank_takes_one_buffer_for_all_its_messages(fake_nccl):
    """What ncclMemAlloc gives is 2 MiB at least; of versions before 2.29, on GPUs with a switch, up to 512 MiB."""
    shapes = [{"ranks": 3}, {"ranks": 2, "chunks": 2, "micros": 2, "schedule": "interleaved", "lengths": [1] * 12}]
    cases = [{"dtype": dtype, "mode": mode, **shape}
             for shape in shapes for dtype in ("float32", "bf16") for mode in ("nccl", "host")]
    results = answers(fake_nccl, *cases)
    for case, nccl, host in zip(cases[::2], results[::2], results[1::2], strict=True):
        assert trained(nccl) == trained(host)
        assert nccl["buffers"] == case["ranks"] and host["buffers"] == 0
    assert message_bytes(64, [(2, [5, 7]), (3, [4])], "bf16") == 2 * 64 * 14 == message_bytes(64, [(2, [5, 7])]) / 2


@pytest.mark.parametrize("reproducible", [True, False])
def test_products_leave_receives_that_wait_their_multiprocessors(fake_nccl, reproducible):
    """Four, or fewer that are as many for each receive of a rank: a ring of two has two pairs, on each rank a receive of either,
    and with guests a third. Where messages go otherwise, products are told nothing."""
    cases = [{"mode": mode, "reproducible": reproducible, "steps": 1} for mode in ("nccl", "host", "inproc")]
    cases += [{"mode": "nccl", "ranks": 4, "micros": 4, "schedule": "bpipe", "reproducible": reproducible, "steps": 1}]
    nccl, host, inproc, guests = answers(fake_nccl, *cases)
    assert nccl["aim"] == 132 - 2 * 2 and host["aim"] == inproc["aim"] == 0 and guests["aim"] in (132 - 2, 132 - 3)
    assert trained(nccl) == trained(host)


def test_products_keep_half_of_the_multiprocessors_however_many_receives_wait():
    calls, device = cuda_emu.library(), ctypes.c_void_p()
    assert calls.tp_cuda_open(0, None, ctypes.byref(device)) == 0
    for wanted, held in ((0, 0), (66, 66), (67, 66), (500, 66)):     # of 132
        calls.tp_cuda_hold(device, wanted)
        assert calls.tp_cuda_held(device) == held
    calls.tp_cuda_close(device)


HELLOS = 3 * 2 * 2 * 2  # pairs of a ring of 3, directions, ends, a send and a receive: connections are made before messages


def test_faults_end_every_rank_with_the_first_words(fake_nccl):
    fail, stuck, dead = answers(
        fake_nccl, {"mode": "nccl", "ranks": 3, "fault": {"fail_at": HELLOS + 7, "code": 2}},
        {"mode": "nccl", "ranks": 3, "fault": {"stuck_at": HELLOS + 9}, "timeout_s": 2.0},
        {"mode": "nccl", "ranks": 3, "dead": 1})
    for result, words in ((fail, "unhandled system error: the fake has no more to say"), (stuck, "waited 2 s"), (dead, "killed")):
        first = [text for text in result["told"] if not text.startswith("AbortedError")]
        others = [text for text in result["told"] if text.startswith("AbortedError")]
        assert len(first) >= 1 and any(words in text for text in first), result
        assert all("failed first" in text for text in others)
        assert result["aborts"] > 0


def test_a_device_that_cannot_be_asked_ends_the_run_with_its_own_words(fake_nccl):
    """While a rank waits for another: that one's name, when time was up, or no end without a limit, was all that was told."""
    result, = answers(fake_nccl, {"mode": "nccl", "ranks": 2, "late": 0, "lag": 2, "timeout_s": 4.0})
    status, _, text = result["first"]
    assert status == "ERUNTIME" and "the watch over NCCL's messages: cudaEventQuery: CUDA error 400 (" in text, result["first"]
    assert all("CUDA error 400 (cudaErrorInvalidResourceHandle" in told for told in result["told"]), result["told"]


def test_faults_while_ranks_meet_leave_no_call_on_a_communicator_in_progress(fake_nccl):
    """Of those that are ended, who finalized one with a call under way."""
    cases = [{"ranks": 3, "steps": 1, "fault": {"fail_at": at, "code": 6}} for at in range(1, HELLOS, 2)]
    for result in answers(fake_nccl, *cases):
        assert all(isinstance(text, str) and "first ncclGroupEnd" in text for text in result["told"]), result
        assert result["aborts"] > 0 and result["misuses"] == 0, result


def test_what_cannot_be_loaded_says_why(fake_nccl, tmp_path):
    old, = answers(fake_nccl, {"fault": {"version": 21704}})
    assert "NCCL" in old["told"][0] and "2.17.4" in old["told"][0] and "2.18.1" in old["told"][0]
    missing, = answers(compile_fake(tmp_path, "-DFAKE_WITHOUT_SPLIT"), {})
    assert "ncclCommSplit" in missing["told"][0] and "libfake_nccl1.so" in missing["told"][0]


BUFFERS = {   # what the library answers or is built without, and the words of the reason
    "no memory for registration": ((1, 0), (), "ncclMemAlloc: unhandled cuda error"),
    "no registration": ((0, 4), (), "ncclCommRegister: invalid argument"),
    "registration switched off": ((0, -1), (), "ncclCommRegister: it is switched off (NCCL_LOCAL_REGISTER)"),
    "neither": ((2, 3), (), "ncclMemAlloc: unhandled system error"),
    "a library without memory": ((0, 0), ("-DFAKE_WITHOUT_MEMORY",), "ncclMemAlloc: not in this NCCL"),
    "a library without registration": ((0, 0), ("-DFAKE_WITHOUT_REGISTER",), "ncclCommRegister: not in this NCCL"),
}


def test_buffers_that_cannot_be_registered_are_plain_memory_and_said_so(fake_nccl, tmp_path):
    refusals = [{"refuse": refuse} for refuse, flags, _ in BUFFERS.values() if not flags]
    right, *refused = answers(fake_nccl, {}, *refusals)
    wanted = trained(right)
    assert right["lacks"] == ""
    for i, (_, flags, words) in enumerate(BUFFERS.values()):
        (tmp_path / str(i)).mkdir()
        found = answers(compile_fake(tmp_path / str(i), *flags), {})[0] if flags else refused.pop(0)
        for one in found["told"]:
            caveats, one["caveats"] = one["caveats"], []
            assert len(caveats) == 1 and words in caveats[0] and "buffers that NCCL copies" in caveats[0], caveats
        assert trained(found) == wanted
        assert words.partition(":")[0] + " is not in it" in found["lacks"] if flags else found["lacks"] == ""


TOLD = """
import numpy as np
import terapipe_c as tp
from terapipe_c.doctor import examine
model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=16, vocab_size=64, block_size=12)
plan = tp.plan(model, tp.Cluster.local(), 2, 12, stages=2, planner="terapipe", schedule="gpipe", slicing=[(1, [4, 8])] * 2,
               backend="cuda")
corpus = np.arange(400, dtype=np.int32) % 64
run = tp.launch(plan, corpus, 2, backend="cuda", devices=[0, 0], processes=False, progress=False)
run.wait()
print(run.report(), *examine(), sep="\\n")
"""


def test_the_report_and_the_doctor_tell(tmp_path):
    library = compile_fake(tmp_path, "-DFAKE_WITHOUT_REGISTER")
    printed = launched("nccl", library, TOLD)
    told = [line for line in printed.splitlines() if "ncclCommRegister" in line]
    assert [line[:27] for line in told[:2]] == [f"rank {r}: messages go through" for r in (0, 1)], printed
    assert len(told) == 3 and "name='NCCL'" in told[2] and "status='note'" in told[2] and "(2.19 has it)" in told[2]


def headers(name, *places):
    found = [Path(place) for pattern in places for place in sorted(Path("/").glob(pattern.lstrip("/")))]
    found += [Path(top) / "nvidia" / part / "include" for top in sys.path if top for part in ("nccl", "cu13", "cuda_runtime")]
    found += [Path(os.environ["TERAPIPE_NCCL_INCLUDE"])] if "TERAPIPE_NCCL_INCLUDE" in os.environ else []
    return next((place for place in found if (place / name).is_file()), None)


@pytest.mark.parametrize(("ours", "header"), [("nccl_same.c", "nccl.h"), ("green_same.c", "cuda.h"),
                                                ("properties_same.c", "cuda.h")])
def test_declarations_are_those_of_the_real_header(ours, header):
    cuda = headers("cuda.h", "/usr/local/cuda/include", "/usr/local/cuda-13*/include")
    place = headers(header, "/usr/local/cuda/include", "/usr/include")
    if cuda is None or place is None:
        pytest.skip(f"{header} is not installed")
    command = ["gcc", "-std=c11", "-fsyntax-only", "-I.", "-isystem", str(place), "-isystem", str(cuda)]
    alone = subprocess.run([*command, "-xc", "-"], input=f"#include <{header}>\n", capture_output=True, text=True)
    if alone.returncode:  # headers of CUDA that it needs are elsewhere, or not here
        pytest.skip(f"{header} does not compile by itself: {alone.stderr.strip().splitlines()[0]}")
    ran = subprocess.run([*command, f"tests/{ours}"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# ---- green contexts ------------------------------------------------------------------------------------------------------


class Resource(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("padding", ctypes.c_ubyte * 92), ("count", ctypes.c_uint), ("least", ctypes.c_uint),
                ("alignment", ctypes.c_uint), ("oversize", ctypes.c_ubyte * 36)]


class Driver:
    """132 multiprocessors in clusters: of groups of `size` it makes as many as `makes(size)` says."""

    TYPES = {"device_resource": (ctypes.c_int, ctypes.POINTER(Resource), ctypes.c_int),
             "split": (ctypes.POINTER(Resource), ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(Resource), ctypes.POINTER(Resource),
                       ctypes.c_uint, ctypes.c_uint),
             "describe": (ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(Resource), ctypes.c_uint),
             "create": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_int, ctypes.c_uint),
             "destroy": (ctypes.c_void_p,),
             "stream": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_int),
             "resource_of": (ctypes.c_void_p, ctypes.POINTER(Resource), ctypes.c_int),
             "current_of": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p), "push": (ctypes.c_void_p,),
             "pop": (ctypes.POINTER(ctypes.c_void_p),), "event": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)}

    def __init__(self, makes, total=132, fails=None):
        self.makes, self.total, self.fails = makes, total, fails
        self.asked, self.living, self.sizes, self.current = [], set(), [], []
        self.functions = [ctypes.CFUNCTYPE(ctypes.c_int, *types)(self.guarded(name)) for name, types in self.TYPES.items()]
        self.table = (ctypes.c_void_p * 11)(*(ctypes.cast(function, ctypes.c_void_p).value for function in self.functions))

    def guarded(self, name):
        return lambda *args: 999 if name == self.fails else getattr(self, name)(*args)

    def device_resource(self, device, out, kind):
        out[0].type, out[0].count = kind, self.total
        return 0

    def split(self, groups, count, everything, rest, flags, least):
        self.asked.append(least)
        count[0] = min(count[0], self.makes(least))
        for i in range(count[0]):
            groups[i].type, groups[i].count = 1, least
        return 0

    def describe(self, out, resource, count):
        out[0] = resource[0].count
        return 0

    def create(self, out, description, device, flags):
        if flags != 1:
            return 1
        self.sizes.append(description)
        out[0] = len(self.sizes)
        self.living.add(len(self.sizes))
        return 0

    def destroy(self, context):
        self.living.remove(context)
        return 0

    def stream(self, out, context, flags, priority):
        out[0] = context
        return 0 if flags == 1 and context in self.living else 1

    def resource_of(self, context, out, kind):
        out[0].count = self.sizes[context - 1]
        return 0

    def current_of(self, out, context):
        out[0] = 1000 + context
        return 0

    def push(self, context):
        self.current.append(context)
        return 0

    def pop(self, out):
        out[0] = self.current.pop()
        return 0

    def event(self, out, flags):
        out[0] = self.current[-1] * 10 + flags
        return 0


class Partition(ctypes.Structure):
    _fields_ = [("context", ctypes.c_void_p),
                ("stream", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))),
                ("event", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))),
                ("enter", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
                ("leave", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
                ("multiprocessors", ctypes.c_int)]


@pytest.mark.parametrize(("parts", "size", "asked"), [(1, 128, [128]), (2, 64, [64]), (4, 32, [32]), (6, 16, [16]), (7, 16, [16]),
                                                      (3, 32, [40, 32]), (16, 8, [8])])
def test_a_gpu_is_split_into_equal_parts(parts, size, asked):
    library = cuda_emu.library()
    library.tp_green_part.restype = ctypes.POINTER(Partition)
    driver, green = Driver(lambda least: 2 if least == 40 else 132 // least), ctypes.c_void_p()
    assert library.tp_green_open(0, parts, driver.table, ctypes.byref(green)) == 0
    assert driver.asked == asked and driver.sizes == [size] * parts
    streams = set()
    for i in range(parts):
        part, stream = library.tp_green_part(green, i)[0], ctypes.c_void_p()
        assert part.multiprocessors == size and part.stream(part.context, 0, ctypes.byref(stream)) == 0
        streams.add(stream.value)
        for timed, flags in ((1, 0), (0, 2)):  # made where the part is current, which it is no more
            assert part.event(part.context, timed, ctypes.byref(stream)) == 0 and driver.current == []
            assert stream.value == 10 * (1001 + i) + flags
        assert part.enter(part.context) == 0 and driver.current == [1001 + i]
        assert part.leave(part.context) == 0 and driver.current == []
    assert len(streams) == parts and len(driver.living) == parts
    library.tp_green_close(green)
    assert not driver.living


def test_parts_of_which_one_is_larger_are_not_taken():
    library, driver, green = cuda_emu.library(), Driver(lambda least: 132 // least), ctypes.c_void_p()
    driver.split = lambda groups, *rest: (Driver.split(driver, groups, *rest), setattr(groups[1], "count", min(rest[-1], 56)))[0]
    assert library.tp_green_open(0, 2, driver.table, ctypes.byref(green)) == 0
    library.tp_green_close(green)
    assert driver.asked == [64, 56] and driver.sizes == [56, 56]


@pytest.mark.parametrize("refused", [False, True])
def test_events_are_the_devices_where_a_part_has_none(refused):
    """Which context's events a part's streams take is the driver's to say: it is tried when the part is opened."""
    library, whole, device, event = cuda_emu.library(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert library.tp_cuda_open(0, None, ctypes.byref(whole)) == 0
    made = []

    def stream(_, priority, out):
        return library.tp_cuda_stream_create(whole, int(priority < 0), out)

    def create(_, timed, out):
        made.append(timed)
        return 6 if refused else library.tp_cuda_event_create(whole, timed, out)

    fields = dict(Partition._fields_)
    part = Partition(None, fields["stream"](stream), fields["event"](create), fields["enter"](), fields["leave"](), 32)
    assert library.tp_cuda_open(0, ctypes.byref(part), ctypes.byref(device)) == 0
    assert library.tp_cuda_event_create(device, 1, ctypes.byref(event)) == 0 and made == ([0] if refused else [0, 1])
    library.tp_cuda_compute.restype = ctypes.c_void_p
    assert library.tp_cuda_event_record(device, event, ctypes.c_void_p(library.tp_cuda_compute(device))) == 0
    library.tp_cuda_event_destroy(device, event)
    library.tp_cuda_close(device)
    library.tp_cuda_close(whole)


@contextlib.contextmanager
def products_of_a_part(library, enter, leave, candidates=0):
    """(A handle on a part of 32 multiprocessors, made current and left so; a product.)"""
    from test_cuda_gemm import BF16, LINEAR, NONE, Op

    whole, device, gemm = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert library.tp_cuda_open(0, None, ctypes.byref(whole)) == 0
    fields = dict(Partition._fields_)
    part = Partition(7, fields["stream"](lambda _, priority, out: library.tp_cuda_stream_create(whole, int(priority < 0), out)),
                     fields["event"](), fields["enter"](enter), fields["leave"](leave), 32)  # fmt: skip
    assert library.tp_cuda_open(0, ctypes.byref(part), ctypes.byref(device)) == 0
    library.tp_cuda_compute.restype = ctypes.c_void_p
    memory = ctypes.create_string_buffer(1 << 16)
    base, stream = ctypes.addressof(memory) // 256 * 256 + 256, ctypes.c_void_p(library.tp_cuda_compute(device))
    options = (ctypes.c_int * 3)(candidates)
    try:
        assert library.tp_gemm_open(device, stream, options, ctypes.c_void_p(base), ctypes.byref(gemm)) == 0
        yield gemm, ctypes.byref(Op(LINEAR, BF16, NONE, 0, 16, 32, 64, base, 32, base + 4096, 64, base + 8192, 64, None, None, 0))
    finally:
        library.tp_gemm_close(gemm)
        library.tp_cuda_close(device)
        library.tp_cuda_close(whole)


def test_the_library_of_products_is_asked_within_the_part():
    """cublasLt asks the current context how large the GPU is: its algorithms are for the part; no call but its own is within."""
    library, within, deep, calls = cuda_emu.library(), [], [], [ctypes.c_int64() for _ in range(3)]

    def count():
        library.tp_emu_cublaslt_calls(*map(ctypes.byref, calls))
        return calls[0].value + calls[1].value

    def enter(_):
        deep.append(count())
        return 0

    def leave(_):
        within.append(count() - deep.pop())
        return 0

    with products_of_a_part(library, enter, leave) as (gemm, op):
        assert within == [0]
        before = count()
        assert library.tp_gemm_prepare(gemm, op) == library.tp_gemm_run(gemm, op) == 0
        assert sum(within) == count() - before == len(within) - 1 > 2 and not deep  # each call is within, alone


def test_an_algorithm_that_fails_once_on_a_part_has_no_mean():
    """Of three algorithms, eight rounds of five runs each, the first fails in the second round and the third in the last."""
    library, entered, left, text = cuda_emu.library(), itertools.count(), itertools.count(), ctypes.create_string_buffer(300)
    failing = {2 + 15 + 2, 2 + 7 * 15 - 2 + 10 + 4}  # behind the handle and the heuristics, and two runs not come to

    with products_of_a_part(library, lambda _: int(next(entered) in failing), lambda _: next(left) * 0, 3) as (gemm, op):
        assert library.tp_gemm_prepare(gemm, op) == 0
        library.tp_gemm_describe(gemm, op, text, ctypes.c_size_t(len(text)))
        assert b"algorithm 2," in text.value, text.value
        assert next(entered) - next(left) == len(failing), "entered and not left, or left twice"


def test_a_part_whose_streams_take_no_work_says_why():
    """When it is opened, not in a step; a device as a whole goes on."""
    library, whole, device = cuda_emu.library(), ctypes.c_void_p(), ctypes.c_void_p()
    library.tp_error_message.restype = ctypes.c_char_p
    library.tp_emu_refuse_parts(1)
    try:
        assert library.tp_cuda_open(0, None, ctypes.byref(whole)) == 0
        fields = dict(Partition._fields_)
        stream = fields["stream"](lambda _, priority, out: library.tp_cuda_stream_create(whole, int(priority < 0), out))
        part = Partition(None, stream, fields["event"](), fields["enter"](), fields["leave"](), 32)
        assert library.tp_cuda_open(0, ctypes.byref(part), ctypes.byref(device)) != 0
        told = library.tp_error_message().decode()
        assert "part of GPU 0 (a green context's) takes no work" in told and "cudaErrorInvalidResourceHandle" in told, told
    finally:
        library.tp_emu_refuse_parts(0)
        library.tp_cuda_close(whole)


@pytest.mark.parametrize(("queues", "told"), [("8", "is 8: parts"), ("32", None), ("many", None), (None, None)])
def test_parts_with_few_hardware_queues_are_warned_of(monkeypatch, queues, told):
    """Asked for, or left to the package; the emulated device then has no parts."""
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(cuda_emu.build()))
    tp.cuda.load()
    monkeypatch.setenv(QUEUES, queues) if queues else monkeypatch.delenv(QUEUES, raising=False)
    region = _core.Region.create(2, bytearray([0, 1, 1, 0]), 1 << 16, 64, False)
    with warnings.catch_warnings(record=True) as found, pytest.raises(tp.ExecutionError, match="cuDeviceGetDevResource"):
        warnings.simplefilter("always")
        tp.cuda.pipeline_on_one_gpu(region)
    assert [told in str(one.message) for one in found] == ([True] if told else [])


def test_what_cannot_be_split_says_why():
    library, green = cuda_emu.library(), ctypes.c_void_p()
    library.tp_error_message.restype = ctypes.c_char_p
    for parts, driver, words in ((0, Driver(lambda least: 9), "parts is 0"), (33, Driver(lambda least: 9), "parts is 33"),
                                 (20, Driver(lambda least: 132 // least), "132 multiprocessors has no 20 equal parts of at least "
                                  "8: at most 16 groups"),
                                 (8, Driver(lambda least: 5), "at most 5 groups"),
                                 (2, Driver(lambda least: 9, fails="split"), "cuDevSmResourceSplitByCount: CUDA error 999 ("),
                                 (2, Driver(lambda least: 9, fails="create"), "cuGreenCtxCreate: CUDA error 999 ("),
                                 (2, Driver(lambda least: 9, fails="resource_of"), "cuGreenCtxGetDevResource"),
                                 (2, Driver(lambda least: 9, fails="current_of"), "cuCtxFromGreenCtx")):
        assert library.tp_green_open(0, parts, driver.table, ctypes.byref(green)) != 0
        assert words in library.tp_error_message().decode() and not driver.living
    assert library.tp_green_open(0, 2, None, ctypes.byref(green)) != 0  # the emulated device has no driver
    assert "cuDeviceGetDevResource" in library.tp_error_message().decode()
