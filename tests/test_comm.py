"""Region and Comm: one conformance suite on threads, on exec'ed processes and over MPI, and what is refused. The C tests
(tests/c/test_comm.c) go deeper: sizes around every boundary, deadlines, sanitizers."""
import functools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import comm_rank
import mpi_module
import numpy as np
import pytest
from ports import free_port
from test_engine import partition_of, problem, region_for

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import RankEngine
from terapipe_c.job import neighbours

HERE = Path(__file__).resolve().parent


def region_of(ranks, shared=False, ring=16384, gather=64):
    return _core.Region.create(ranks, bytes(source != target for source in range(ranks) for target in range(ranks)), ring, gather,
                               shared, [50_000] * ranks)


def on_threads(case, ranks):
    region, results = region_of(ranks), [None] * ranks

    def run(rank):
        try:
            results[rank] = getattr(comm_rank, case)(_core.Comm(region, rank, 20.0), ranks, region)
        except BaseException as error:
            results[rank] = repr(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def on_processes(case, ranks):
    region = region_of(ranks, shared=True)
    paths = os.pathsep.join(path for path in sys.path if path)
    options = dict(pass_fds=[region.fd], stdout=subprocess.PIPE, text=True, encoding="utf-8",
                   env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"})
    command = [sys.executable, str(HERE / "comm_rank.py"), case, str(region.fd)]
    children = [subprocess.Popen([*command, str(rank)], **options) for rank in range(ranks)]
    return [child.communicate(timeout=60)[0].strip() for child in children]


def on_mpi(case, ranks):
    """The first MPI there is; tests/test_mpi.py runs the C cases on all."""
    if not mpi_module.mpis():
        pytest.skip(mpi_module.NONE)
    ended = mpi_module.mpis()[0].run([sys.executable, HERE / "comm_rank.py", case, "mpi"], ranks)
    words = [line.split(" ", 1) for line in ended.stdout.splitlines() if line[:2] in [f"{rank} " for rank in range(ranks)]]
    assert len(words) == ranks, ended
    return [said for _, said in sorted(words)]


KINDS = pytest.mark.parametrize("run", [on_threads, on_processes, on_mpi], ids=["threads", "processes", "mpi"])


@KINDS
@pytest.mark.parametrize("case", ["pipeline", "lend", "gather", "exchange"])
def test_conformance(run, case):
    assert run(case, 3) == ["ok"] * 3


@KINDS
def test_an_abort_ends_every_kind_of_wait_with_the_first_words(run):
    assert run("abort", 3) == [f"rank {rank} was ended because rank 0 failed first: no memory for café" for rank in range(3)]


def test_many_more_ranks_than_cores():
    """A spinning rank must give its core to the one it waits for, or this takes minutes."""
    assert on_threads("pipeline", 96) == ["ok"] * 96
    assert on_threads("gather", 32) == ["ok"] * 32


def test_messages_are_checked():
    region = region_of(2)
    one, two = _core.Comm(region, 0, 0.05), _core.Comm(region, 1, 0.05)
    one.send(1, 5 << 48 | 1 << 32 | 2 << 16 | 3, b"1234")
    words = ("sent send of the activation of micro-batch 2 slice 3 on stage 1 .4 bytes. where rank 1 expected send of the "
             "gradient of micro-batch 0 slice 0 on stage 0 .4 bytes")
    with pytest.raises(_core.PeerError, match=words):
        two.recv(0, 7 << 48, bytearray(4))
    two.recv(0, 5 << 48 | 1 << 32 | 2 << 16 | 3, bytearray(4))
    region.set_progress(0, 7, 0)
    words = "rank 1 waited 0.05 s .* rank 0 is at step 7 while running forward of micro-batch 0"
    with pytest.raises(_core.DeadlineError, match=words):
        two.recv(0, 9, bytearray(4))
    with pytest.raises(_core.DeadlineError, match="to send a message to rank 1"):
        one.send(1, 9, bytes(20_000))


def test_who_waits_in_vain_for_all_names_the_one_that_is_not_there():
    """Also before the first instruction, where all are doing the same: one that reads its data for ever, or was stopped."""
    region, said = region_of(3), []

    def wait(rank):
        with pytest.raises(_core.DeadlineError) as caught:
            _core.Comm(region, rank, 0.1).barrier()
        said.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [f"rank {rank} waited 0.1 s for the other ranks to gather; rank 1 is before its first instruction"
                            for rank in (0, 2)]


@pytest.mark.parametrize("gathers", [False, True], ids=["messages", "a gather"])
@pytest.mark.parametrize("over", ["rings", "tcp"])
def test_who_waits_in_vain_names_who_holds_all_up(over, gathers):
    """Rank 0 waits for 1, that for 2, and that for 3 or for all: 3 is at work, or was stopped. The longest wait ended first, and
    told of rank 1 alone."""
    ranks, port, said = 4, free_port(), []
    shared = region_of(ranks) if over == "rings" else None
    begun, over_now = threading.Barrier(ranks), threading.Event()

    def open_comm(region, rank, seconds):
        return _core.Comm(region, rank, seconds) if shared else _core.tcp_comm(
            region, rank, "127.0.0.1", port, bytes(a != b for a in range(ranks) for b in range(ranks)), 64, timeout_s=seconds)

    def run(rank):
        region = shared or _core.Region.create(ranks, bytes(ranks ** 2), 0, 64, False)
        comm = open_comm(region, rank, 1.5 if rank == 0 else 20.0)
        region.set_progress(rank, 5, rank)
        begun.wait()
        if rank == 3:
            over_now.wait()
        else:
            time.sleep(0.3 if rank == 0 else 0.0)
            try:
                comm.barrier() if gathers and rank == 2 else comm.recv(rank + 1, 0, bytearray(4))
            except _core.Error as error:
                said.append(str(error))
                region.abort("ETIMEOUT", rank, str(error))
                over_now.set()
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    doing = "at step 5 while running forward of micro-batch 0 slice {} on stage 0".format
    assert said[0] == ("rank 0 waited 1.5 s for a message from rank 1 (forward of micro-batch 0 slice 0 on stage 0, 0 of 4 bytes "
                       f"moved); rank 1 is {doing(1)}, and in the end waits for rank 3, which is {doing(3)}")
    assert all(f"because rank 0 failed first: {said[0]}" in other for other in said[1:]) and len(said) == 3


STOPS = """
import os, signal, sys
from terapipe_c import _core
region = _core.Region.create(3, bytes(9), 0, 64, False)
comm = _core.tcp_comm(region, 2, "127.0.0.1", int(sys.argv[1]), bytes([0, 1, 1, 1, 0, 1, 1, 1, 0]), 64, timeout_s=20.0)
region.set_progress(2, 5, 2)
comm.barrier() if sys.argv[2] == "a gather" else comm.recv(0, 0, bytearray(4))
os.kill(os.getpid(), signal.SIGSTOP)
"""


def one_of_three(rank, port, timeout_s):
    """(region, communicator) over TCP of a rank that is at its own slice in step 5."""
    region = _core.Region.create(3, bytes(9), 0, 64, False)
    comm = _core.tcp_comm(region, rank, "127.0.0.1", port, bytes([0, 1, 1, 1, 0, 1, 1, 1, 0]), 64, timeout_s=timeout_s)
    region.set_progress(rank, 5, rank)
    return region, comm


@pytest.mark.parametrize("last", ["a message", "a gather"])
def test_one_that_is_stopped_is_named_though_its_last_word_is_of_a_wait(last):
    """Of a gather that all have come to, or for a rank that is a step ahead since."""
    port, said = free_port(), {}
    child = subprocess.Popen([sys.executable, "-c", STOPS, str(port), last])

    def run(rank):
        region, comm = one_of_three(rank, port, 1.5 if rank == 0 else 20.0)
        time.sleep(0.5)     # meanwhile the others are told that rank 2 waits
        if last == "a gather":
            comm.barrier()
        elif rank == 0:
            comm.send(2, 0, bytes(4))
        region.set_progress(rank, 6 if last == "a message" else 5, 1 << 48 | 10 + rank)
        with pytest.raises(_core.Error) as caught:
            comm.recv(rank + 1, 0, bytearray(4))
        said[rank] = str(caught.value)
        region.abort("ETIMEOUT", rank, said[rank])
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child.kill()
    child.wait()
    assert said[0].endswith("on stage 0, and in the end waits for rank 2, which is at step 5 while running forward of micro-batch "
                            "0 slice 2 on stage 0"), said


FIRST = """
import os, signal, sys, time
from terapipe_c import _core
region = _core.Region.create(3, bytes(9), 0, 64, False)
comm = _core.tcp_comm(region, 0, "127.0.0.1", int(sys.argv[1]), bytes([0, 1, 1, 1, 0, 1, 1, 1, 0]), 64, timeout_s=20.0)
region.set_progress(0, 5, 0)
comm.barrier()
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[2] == "stopped" else comm.recv(1, 0, bytearray(4))
"""


@pytest.mark.parametrize("state", ["stopped", "waiting"])
def test_rank_0_is_named_where_it_tells_nothing_of_the_others_any_more(state):
    """Over TCP they hear of each other by it: what they know is of then, and led on to one without fault. While it is there it
    says so, though nothing changes."""
    port, said = free_port(), {}
    child = subprocess.Popen([sys.executable, "-c", FIRST, str(port), state])

    def run(rank):
        _, comm = one_of_three(rank, port, 2.0 if rank == 2 else 20.0)
        comm.barrier()
        with pytest.raises(_core.Error) as caught:
            comm.recv(rank - 1, 0, bytearray(4))
        said[rank] = str(caught.value)
        if rank == 2:
            child.kill()
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child.wait()
    doing = "at step 5 while running forward of micro-batch 0 slice {} on stage 0".format
    words = f"rank 1 is {doing(1)}" if state == "waiting" else \
        f"rank 0, by which the ranks hear of each other, has said nothing for [12]\\.?[0-9]* s, and was last heard {doing(0)}"
    assert re.search(f"moved.; {words}$", said[2]), said


def test_ranks_that_wait_for_each_other_blame_nobody_else():
    region, said = region_of(3), []

    def wait(rank):
        with pytest.raises(_core.Error) as caught:
            _core.Comm(region, rank, 0.3 + rank).recv((rank + 1) % 3, 0, bytearray(4))
        said.append(str(caught.value))
        region.abort("ETIMEOUT", rank, said[-1])

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0].endswith("moved); rank 1 is before its first instruction")


def test_a_communicator_serves_one_thread_at_a_time():
    region = region_of(2)
    comm, other = _core.Comm(region, 0, 20.0), _core.Comm(region, 1, 20.0)
    thread = threading.Thread(target=comm.barrier)
    thread.start()
    refused = None
    while thread.is_alive() and refused is None:
        time.sleep(0.01)
        try:
            comm.send(1, 0, b"")
        except RuntimeError as error:
            refused = str(error)
    other.barrier()
    thread.join()
    assert "another thread" in refused


def together(works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def met(ranks, over, timeout_s):
    region, port, comms = region_of(ranks), free_port(), [None] * ranks

    def meet(rank):
        comms[rank] = _core.Comm(region, rank, timeout_s(rank)) if over == "rings" else _core.tcp_comm(
            region_of(ranks), rank, "127.0.0.1", port, neighbours(ranks), 64, timeout_s=timeout_s(rank))

    together([functools.partial(meet, rank) for rank in range(ranks)])
    return comms


def close(comms):
    together([comm.close for comm in comms])


@pytest.mark.parametrize("over", ["rings", "tcp"])
@pytest.mark.parametrize("way", ["recv", "exchange"])
def test_a_message_that_comes_too_late_is_the_next_receives(over, way):
    """It was written into the memory of the receive that had given up, and the next one returned at once, with nothing."""
    comms, given_up, into = met(2, over, lambda rank: 0.5), bytearray(8), bytearray(8)
    with pytest.raises(_core.DeadlineError):
        comms[0].recv(1, 7, given_up) if way == "recv" else comms[0].exchange(1, 7, b"", given_up)
    comms[1].send(0, 7, b"the word")
    comms[0].recv(1, 7, into)
    assert (given_up, into) == (bytes(8), b"the word")
    close(comms)


@pytest.mark.parametrize("over", ["rings", "tcp"])
def test_nothing_follows_a_message_that_was_given_up_in_its_middle(over):
    """It was taken for the rest, and the message came well, with another's head in it."""
    comms, data, into = met(2, over, lambda rank: (1.0, 20.0)[rank]), bytes(50_000_000), bytearray(50_000_000)
    with pytest.raises(_core.DeadlineError, match="of 50000000 bytes moved"):
        comms[0].send(1, 7, data)
    words = "none can follow it" if over == "rings" else "rank 0 was ended because rank 1 failed first"
    with pytest.raises(_core.PeerError if over == "rings" else _core.AbortedError, match=words):
        comms[0].send(1, 7, data)
    with pytest.raises((_core.PeerError, _core.AbortedError)):
        comms[1].recv(0, 7, into)
    close(comms)


@pytest.mark.parametrize("over", ["rings", "tcp"])
def test_who_gathered_in_vain_does_not_gather_again(over):
    """It was counted twice, in the place of a rank that had not come, of which the others then had what was there before."""
    comms = met(3, over, lambda rank: 0.5 if rank == 1 else 10.0)
    with pytest.raises(_core.DeadlineError):
        comms[1].allgather(b"1")
    with pytest.raises(_core.InvalidValueError, match="rank 1 gathers again though its last all-gather has failed: a new region"):
        comms[1].allgather(b"2")
    all, told = [], lambda rank: all.append(comms[rank].allgather(b"012"[rank:rank + 1]))
    waiting = threading.Thread(target=told, args=(0,))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()           # rank 2 has not come
    told(2)
    waiting.join()
    assert all == [b"012"] * 2
    close(comms)


def refused_beside(thread, comm):
    """In which words a call is refused once the thread uses the communicator; None: it ended before."""
    refused = None
    while thread.is_alive() and refused is None:
        time.sleep(0.01)
        try:
            comm.allgather(bytes(1 << 20))      # refused for its size, were it for nothing else
        except RuntimeError as error:
            refused = str(error)
        except _core.InvalidValueError:
            pass
    return refused


@pytest.mark.parametrize("attempt", ["run", "evaluate"])
def test_who_closes_the_communicator_of_a_step_in_another_thread_is_refused(attempt):
    """It was freed, and the step went on in its memory."""
    model, params, tokens = problem(1, 8)
    partition, slicing = partition_of(model, [3]), [(1, [8])]
    program = tp.schedules.gpipe(2, 1, [1]).split().lower(True)
    comm = _core.Comm(region_for(model, partition, slicing, program), 0, 2.0)
    engine = RankEngine(model, partition, slicing, program, 0, comm)
    engine.load(params)
    errors = []
    thread = threading.Thread(target=lambda: errors.append(pytest.raises(_core.DeadlineError, getattr(engine, attempt), tokens)))
    thread.start()
    refused = refused_beside(thread, comm)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        comm.close()
    thread.join()
    assert "another thread" in refused and errors
    comm.close()
    comm.close()


def test_a_later_communicator_goes_on_where_the_earlier_ended():
    region = region_of(2)
    for turn in range(3):
        one, two = _core.Comm(region, 0), _core.Comm(region, 1)
        thread = threading.Thread(target=one.barrier)
        thread.start()
        two.barrier()
        thread.join()
        one.send(1, turn, bytes([turn]))
        into = bytearray(1)
        two.recv(0, turn, into)
        assert into[0] == turn


def test_progress_and_abort_are_seen_through_another_mapping():
    region = region_of(3, shared=True)
    other = _core.Region.attach(region.fd)
    assert other.ranks == 3 and other.doing(2) == "before its first instruction" and other.progress(2)[1] is None
    region.set_progress(2, 41, 1 << 48 | 5 << 32 | 6 << 16 | 7)
    assert other.progress(2) == (41, "B", 5, 6, 7)
    assert other.doing(2) == "at step 41 while running backward of micro-batch 6 slice 7 on stage 5"
    region.set_progress(2, 42)
    assert other.doing(2) == "at step 42, between instructions"
    region.set_progress(2, 42, 2**64 - 2)
    assert other.doing(2) == "at step 42, writing the checkpoint"
    assert other.aborted() is None
    region.abort("EIO", 1, "é" * 400)
    region.abort("ERUNTIME", 0, "later")
    code, rank, text = other.aborted()
    assert (code, rank) == ("EIO", 1) and text.startswith("é" * 255) and len(text) <= 256


def test_the_first_failure_is_told_at_once():
    region, (reader, writer) = region_of(2), os.pipe()
    region.tell(writer)
    region.abort("EIO", 1, "é is full")
    region.abort("EIO", 0, "later")
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        assert lines.read() == "terapipe_c: é is full\n"
    with pytest.raises(ValueError, match="of several processes"):
        region_of(2, shared=True).tell(2)


def test_every_instruction_has_its_word():
    region = region_of(1)
    names = []
    for op in range(17):
        region.set_progress(0, 0, op << 48)
        names.append(region.progress(0)[1])
    assert names == ["F", "B", "I", "W", "R", "SF", "RF", "SB", "RB", "SO", "SI", "AR", "OPT", "SE", "RE", "SL",
                     "RL"]
    region.set_progress(0, 1, names.index("AR") << 48 | 3 << 32)
    assert region.doing(0) == "at step 1 while running exchange of the tied weight on stage 3"


def test_descriptors_are_given_back():
    before = sorted(os.listdir("/proc/self/fd"))
    region = region_of(2, shared=True)
    attached = _core.Region.attach(region.fd)
    region.close()
    region.close()
    assert region.fd is None and sorted(os.listdir("/proc/self/fd")) == before
    attached.set_progress(0, 3, 0)
    assert region.progress(0)[0] == 3  # the memory is still there
    assert region_of(2).fd is None


def test_bad_requests_are_refused():
    region = region_of(2)
    comm = _core.Comm(region, 0)
    for kind, word, attempt in (
            (ValueError, "3 elements", lambda: _core.Region.create(2, bytes(3), 4096, 64, False)),
            (ValueError, "ranks is 0", lambda: _core.Region.create(0, b"", 4096, 64, False)),
            (ValueError, "ring_bytes is -1", lambda: _core.Region.create(2, bytes(4), -1, 64, False)),
            (ValueError, "2\\^48", lambda: _core.Region.create(2, bytes(4), 1 << 60, 64, False)),
            (ValueError, "2\\^48", lambda: _core.Region.create(2, bytes(4), 4096, 64, False, [0, 1 << 60])),
            (ValueError, "rank 1 is -1", lambda: _core.Region.create(2, bytes(4), 4096, 64, False, [0, -1])),
            (ValueError, "3 elements", lambda: _core.Region.create(2, bytes(4), 4096, 64, False, [0, 1, 2])),
            (TypeError, "whole numbers", lambda: _core.Region.create(2, bytes(4), 4096, 64, False, 5)),
            (TypeError, "integer", lambda: _core.Region.create(2, bytes(4), 4096, 64, False, [0, "1"])),
            (OverflowError, ".", lambda: _core.Region.create(2, bytes(4), 4096, 64, False, [0, 1 << 70])),
            (BufferError, "no arena", lambda: memoryview(_core.Comm(_core.Region.create(2, bytes(4), 1, 1, False), 0))),
            (TypeError, "uint8", lambda: _core.Region.create(2, [0, 1, 1, 0], 4096, 64, False)),
            (OSError, "bytes available", lambda: _core.Region.create(2, bytes([0, 1, 1, 0]), 1 << 45, 64, True)),
            (OSError, "not shared memory", lambda: _core.Region.attach(0)),
            (OverflowError, "32 bits", lambda: _core.Region.attach(1 << 40)),
            (ValueError, "rank is 2", lambda: _core.Comm(region, 2)), (ValueError, "rank is -1", lambda: region.progress(-1)),
            (ValueError, "timeout_s is nan", lambda: _core.Comm(region, 0, float("nan"))),
            (TypeError, ".", lambda: _core.Comm("region", 0)), (TypeError, ".", lambda: _core.Region()),
            (ValueError, "EWRONG", lambda: region.abort("EWRONG", 0, "")), (ValueError, "peer is 0", lambda: comm.send(0, 0, b"")),
            (ValueError, "peer is 9", lambda: comm.recv(9, 0, bytearray(1))),
            (ValueError, "no ring to rank 1", lambda: _core.Comm(_core.Region.create(2, bytes(4), 1, 1, False), 0).send(1, 0, b"")),
            (ValueError, "at most 64", lambda: comm.allgather(bytes(65))),
            (TypeError, ".", lambda: comm.recv(1, 0, b"immutable")),
            (ValueError, "contiguous", lambda: comm.send(1, 0, np.zeros((4, 4))[:, ::2]))):
        with pytest.raises(kind, match=word):
            attempt()
    sizes = []

    class Clears:
        def __index__(self):
            sizes.clear()
            return 1

    sizes += [Clears(), 1]
    assert _core.Region.create(2, bytes(4), 4096, 64, False, sizes).ranks == 2 and not sizes
    arena = memoryview(comm)
    assert len(arena) >= 50_000 and not arena.readonly
    comm.close()
    arena[:3] = b"abc"  # the memory is the region's
    with pytest.raises(ValueError, match="closed"):
        memoryview(comm)
    with pytest.raises(OSError, match="sealed"):
        fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
        try:
            os.truncate(fd, 4096)
            _core.Region.attach(fd)
        finally:
            os.close(fd)


def test_messages_are_timed_between_threads():
    small, ring, lent = _core.message_time(1 << 16, 1 << 20, 1 << 15)
    assert 0 < small < 1 and 0 < ring < 1 and 0 < lent < 1
    for sizes in ((0, 1 << 20, 1 << 15), (1 << 16, 1 << 15, 1 << 15), (1 << 16, 1 << 20, 0), (1 << 16, 1 << 20, 6)):
        with pytest.raises(ValueError, match="would be right"):
            _core.message_time(*sizes)


def test_a_loan_that_nobody_takes_is_named_by_its_message():
    """It was called the forward of stage 0's first slice, of 0 bytes, whatever it was."""
    region = region_of(2)
    comm = _core.Comm(region, 0, 0.05)
    tag = 5 << 48 | 3 << 32 | 2 << 16 | 1
    mine = np.frombuffer(comm, np.uint8)[:3000]
    with pytest.raises(_core.DeadlineError, match=r"send of the activation .*stage 3.*, 0 of 3000 bytes moved\)"):
        comm.reclaim(1, comm.lend(1, tag, mine), tag, 3000)
    with pytest.raises(_core.InvalidValueError, match="bytes is -1"):
        comm.reclaim(1, 1, tag, -1)


# ---- how much memory there is ------------------------------------------------------------------------------------------------

MEMINFO = "MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   4000 kB\n"
STAT_1 = "cache 9\ninactive_file 7\nactive_file 7\ntotal_inactive_file 100000\ntotal_active_file 20000\n"
STAT_2 = "anon 5\nfile 9\ninactive_file 100000\nactive_file 20000\nworkingset_refault_file 3\n"


def v2(folder, limit, used, stat=STAT_2):
    return {f"sys/fs/cgroup{folder}/{name}": f"{text}\n"
            for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat))}


def v1(folder, limit, used, stat=STAT_1):
    names = ("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", used), ("memory.stat", stat)
    return {f"sys/fs/cgroup/memory{folder}/{name}": f"{text}\n" for name, text in names}


@pytest.mark.parametrize("groups, files, room", [
    (None, {}, (8192000, 4096000, False)),
    ("0::/\n", v2("", "max", 5), (8192000, 4096000, False)),
    ("0::/\n", v2("", 2000000, 1500000), (2000000, 620000, True)),                  # a container's own: the root of a namespace
    ("0::/a/b\n", v2("/a/b", 2000000, 1500000), (2000000, 620000, True)),
    ("0::/a/b\n", v2("/a", 2000000, 1500000) | v2("/a/b", 3000000, 200000), (2000000, 620000, True)),     # one above is tighter
    ("0::/a/b\n", v2("/a", 9000000, 1) | v2("/a/b", "max", 3), (8192000, 4096000, False)),
    ("0::/docker/0123\n", v2("", 2000000, 1500000), (2000000, 620000, True)),            # the host's path, the container's tree
    ("0::/a\n", v2("/a", 7000000, 1000), (7000000, 4096000, False)),
    ("0::/a\n", v2("/a", 1000, 5000000), (1000, 0, True)),
    ("12:cpu,cpuacct:/x\n4:memory:/x\n0::/\n", v1("/x", 2000000, 1500000), (2000000, 620000, True)),
    ("4:hugetlb,memory:/x/y\n", v1("/x", 2000000, 1500000) | v1("/x/y", 2**63 - 4096, 9), (2000000, 620000, True)),
    ("4:memory:/docker/0123\n", v1("", 2000000, 1500000), (2000000, 620000, True)),
    ("4:memory_other:/x\n5:nomemory:/x\n6:cpu:/memory\n", v1("/x", 2000000, 1500000), (8192000, 4096000, False)),
    ("0::/" + 5000 * "x" + "\nnoise\n::\n:\n\n4:memory:/x", v1("/x", 2000000, 1500000, ""), (2000000, 500000, True)),
])  # fmt: skip
def test_memory_is_what_the_groups_of_this_process_leave_of_it(tmp_path, groups, files, room):
    for name, text in ({"proc/meminfo": MEMINFO} | ({} if groups is None else {"proc/self/cgroup": groups}) | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _core.memory_room(tmp_path) == room


def test_a_system_that_does_not_say_has_as_much_as_one_asks_for(tmp_path):
    assert _core.memory_room(tmp_path) == (None, None, False)
    total, available, _ = _core.memory_room()
    assert 0 < available <= total


def test_shared_memory_beyond_the_limit_of_a_container_is_refused(tmp_path):
    """The kernel would end the process while it fills it."""
    for name, text in (v1("", 64 << 20, 1 << 20) | v2("", 64 << 20, 1 << 20)).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    inside = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /sys/fs/cgroup && exec "$@"', tmp_path / "sys/fs/cgroup"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounts of one's own are not allowed here")
    code = ("import terapipe_c as tp\nfrom terapipe_c import _core\n"
            "_core.Region.create(2, bytes([0, 1, 1, 0]), 1 << 20, 64, True)\n"
            "print(tp.Cluster.local(1).memory_bytes)\n"
            "_core.Region.create(2, bytes([0, 1, 1, 0]), 50 << 20, 64, True)")
    done = subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
    assert done.stdout == f"{64 << 20}\n" and "StorageError: shared memory of" in done.stderr, done.stderr
    assert "this process's control group (its container's limit of memory) has 66" in done.stderr
