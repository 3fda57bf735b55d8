"""What the watch over NCCL's messages (cuda/nccl_wait.c) sees by itself, while the ranks' hosts are elsewhere: messages that are
late, on a device that does not go on, and errors that no call returned. Over a libnccl of threads (tests/cuda/fake_nccl.c).
And what hand-over does not read late."""
import re
import subprocess

import pytest
from cuda_ranks import ROOT, python

OPENED = """
import contextlib, ctypes, os, threading, time
from cuda_ranks import Case, World
import terapipe_c as tp
from terapipe_c.engine import RankEngine
library = ctypes.CDLL(os.environ["TERAPIPE_NCCL"])
lag = ctypes.CDLL(os.environ["TERAPIPE_CUDA_MODULE"]).tp_emu_lag
library.fake_nccl_refuse(1, 0)     # slots that the emulated device knows
world, engines = World(Case(**CASE)), {}
comms = [world.comm(rank) for rank in range(world.all_ranks)]
def opened(rank):
    replica, own = divmod(rank, world.case.ranks)
    engines[rank] = RankEngine(world.model, world.partition, world.cuts, world.program, own, comms[rank], replica=replica,
                               **world.options)
def each(what):
    threads = [threading.Thread(target=what, args=(rank,)) for rank in range(world.all_ranks)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
def message(start, end, tag):
    comms[start].send(end, tag, bytes(8))
    comms[end].recv(start, tag, bytearray(8))
def ended():
    limit = time.monotonic() + 20
    while world.region.aborted() is None and time.monotonic() < limit:
        time.sleep(0.01)
    return world.region.aborted()
"""

LATE = """
lag(3)
each(opened)
each(engines.pop)       # what watched over the first ones has ended
each(opened)
message(0, 1, 0)        # its end is never seen
start = now = time.monotonic()
pause = 0.0
while now < start + 0.65 and world.region.aborted() is None:
    with contextlib.suppress(tp.AbortedError):
        message(1, 0, 8 << 48)
        time.sleep(0.01)
    before, now = now, time.monotonic()
    pause = max(pause, now - before)
print(world.region.aborted() is None or pause > 0.4)        # a busy machine's
print(ended())
"""

AGAIN = """
each(opened)
lag(1)
message(0, 1, 0)
time.sleep(0.4)         # seen under way
lag(0)
time.sleep(2.3)         # nothing is, for longer than a message may be
lag(1)
start = time.monotonic()
message(0, 1, 0)
time.sleep(0.4)
print(world.region.aborted() is None or time.monotonic() > start + 1.8)
print(ended())
"""

SPOILT = """
each(opened)
library.fake_nccl_spoil(2, 6)
print(ended())
"""


def told(fake, case, script):
    return python(fake, "-c", f"CASE = {case}\n{OPENED}{script}").splitlines()


def test_no_message_is_late_while_the_device_goes_on(fake_nccl):
    """A step's last messages are given to NCCL when it begins: where it took longer than the deadline they were late."""
    goes, late = told(fake_nccl, {"timeout_s": 0.5}, LATE)
    assert goes == "True" and re.search(r"rank \d waited 0.5 s (to send a message to|for a message from) rank \d; rank", late), late


def test_what_was_under_way_before_a_pause_makes_no_message_late(fake_nccl):
    """As between steps, where a rank writes its part of a checkpoint."""
    goes, late = told(fake_nccl, {"timeout_s": 2.0}, AGAIN)
    assert goes == "True" and re.search(r"rank \d waited 2 s (to send a message to|for a message from) rank \d; rank", late), late


@pytest.mark.parametrize(("case", "other"), [({"ranks": 2}, r"rank \d"),
                                              ({"ranks": 1, "schedule": "gpipe", "replicas": 2, "lengths": (12,)},
                                               "the same ranks of other replicas")])
def test_an_error_that_no_call_returned_ends_the_run(fake_nccl, case, other):
    error, = told(fake_nccl, case, SPOILT)
    assert re.search(rf"ECONNECTION.*rank \d: NCCL between it and {other}: remote process exited", error), error


EXCHANGE = """
slow, module = ctypes.CDLL(None), ctypes.CDLL(os.environ["TERAPIPE_CUDA_MODULE"])
armed, waiting, go = (ctypes.c_int.in_dll(slow, "late_" + name) for name in ("armed", "waiting", "go"))
each(opened)
into, told = [bytearray(8), bytearray(8)], {}
for one in into:        # the emulated device knows them
    module.tp_simt_range_add(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(one))), ctypes.c_size_t(8))
def swap(rank):
    try:
        comms[rank].exchange(1 - rank, 0, bytes([rank + 1]) * 8, into[rank])
    except tp.Error as error:
        told[rank] = type(error).__name__
def after_both_heard():
    limit = time.monotonic() + 20
    while waiting.value < 2 and time.monotonic() < limit:
        time.sleep(0.001)
    if ABORTED:
        world.region.abort("ERUNTIME", 0, "rank 0 failed")
    print(waiting.value)
    go.value = 1
armed.value = 1
other = threading.Thread(target=after_both_heard)
other.start()
each(swap)
other.join()
armed.value = 0
print([list(one) for one in into], sorted(told.items()))
"""


@pytest.mark.parametrize(("aborted", "told"), [
    (False, "[[2, 2, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1]] []"),
    (True, "[[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]] [(0, 'AbortedError'), (1, 'AbortedError')]"),
])
def test_hand_over_reads_nothing_of_a_peer_that_may_have_failed_since_it_told_where_it_lies(fake_nccl, tmp_path, aborted, told):
    """Who fails frees its memory, once nobody reads it under the lock; who comes to the lock later must not."""
    shim = tmp_path / "late_lock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", str(ROOT / "tests" / "late_lock.c"), "-o", str(shim), "-ldl"], check=True)
    script = f"CASE, ABORTED = {{'mode': 'inproc'}}, {aborted}\n" + OPENED + EXCHANGE
    assert python(fake_nccl, "-c", script, LD_PRELOAD=str(shim)).splitlines() == ["2", told]
