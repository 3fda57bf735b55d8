"""One rank of a conformance case of test_comm.py in a process of its own: comm_rank.py CASE FD RANK; or, as mpiexec starts it, with
messages over MPI: comm_rank.py CASE mpi."""
import ctypes
import mmap
import os
import sys

import numpy as np

from terapipe_c import _core, mpi
from terapipe_c.environment import find_place


def pattern(key, size):
    return np.random.default_rng(key).integers(0, 256, size, np.uint8)


def pipeline(comm, ranks, region):
    """Float arrays of odd sizes down the line of ranks and back, some larger than a ring."""
    for step, count in enumerate((1, 0, 11, 1000, 40_000)):
        data = np.arange(count, dtype=np.float32) + step
        got = np.zeros(count, np.float32)
        if comm.rank > 0:
            comm.recv(comm.rank - 1, step, got)
            assert np.array_equal(got, data + (comm.rank - 1))
        if comm.rank < ranks - 1:
            comm.send(comm.rank + 1, step, data + comm.rank)
            comm.recv(comm.rank + 1, 100 + step, got)
            assert np.array_equal(got, data * (comm.rank + 1))
        if comm.rank > 0:
            comm.send(comm.rank - 1, 100 + step, data * comm.rank)
    return "ok"


def lend(comm, ranks, region):
    """Messages out of the arena down the line, each written over as soon as it is back; where there is no arena they are sent."""
    try:
        arena, lent = np.frombuffer(comm, np.uint8), 0
    except BufferError:
        arena, lent = np.zeros(50_000, np.uint8), None
    for turn in range(60):
        size = (0, 10, 48, 49, 3000, 20_000)[turn % 6]
        if comm.rank > 0:
            into = np.zeros(size, np.uint8)
            comm.recv(comm.rank - 1, turn, into)
            assert np.array_equal(into, pattern(turn, size))
        if comm.rank < ranks - 1:
            mine = arena[turn:turn + size]
            mine[:] = pattern(turn, size)
            loan = comm.lend(comm.rank + 1, turn, mine)
            assert (loan > 0) == (lent is not None)
            comm.reclaim(comm.rank + 1, loan, turn, size)
            mine[:] = 0
            assert comm.lend(comm.rank + 1, 100 + turn, mine.copy()) == 0      # not in the arena
        if comm.rank > 0:
            comm.recv(comm.rank - 1, 100 + turn, into)
            assert not into.any()
    return "ok"


def gather(comm, ranks, region):
    for turn in range(200):
        everyone = comm.allgather(bytes([comm.rank, turn]))
        assert everyone == b"".join(bytes([rank, turn]) for rank in range(ranks))
        comm.barrier()
    return "ok"


def exchange(comm, ranks, region):
    peer = ranks - 1 - comm.rank
    if peer == comm.rank:
        return "ok"
    for turn, (small, large) in enumerate(((0, 1), (3, 500_000), (200_001, 200_001))):
        mine, theirs = (small, large) if comm.rank < peer else (large, small)
        into = np.zeros(theirs, np.uint8)
        comm.exchange(peer, turn, pattern(comm.rank + turn, mine), into)
        assert np.array_equal(into, pattern(peer + turn, theirs))
    return "ok"


def abort(comm, ranks, region):
    """Rank 0 fails while the others wait in as many ways as there are; each returns what it was told."""
    try:
        if comm.rank == 0:
            region.abort("EMEMORY", 0, "no memory for café")
            comm.barrier()
        elif comm.rank == 1:
            comm.recv(0, 1, bytearray(4))
        else:
            comm.barrier()
    except _core.AbortedError as error:
        return str(error)
    return "not aborted"


def over_and_over(size):
    """An array of so many bytes in 2 MiB of memory, mapped again and again."""
    libc, block = ctypes.CDLL(None, use_errno=True), 2 << 20
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fd = os.memfd_create("block")
    os.ftruncate(fd, block)
    blocks = -(-size // block)
    at = libc.mmap(None, blocks * block, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for i in range(blocks):
        assert libc.mmap(at + i * block, block, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10, fd, 0) == at + i * block
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at))


def large(comm, ranks, region):
    """A message of more bytes than an int can count, the same 2 MiB over and over; and one after it."""
    size, block = (1 << 31) + 12_345, 2 << 20
    data, tail = over_and_over(size), np.zeros(3, np.uint8)
    if comm.rank == 0:
        data[:block] = pattern(1, block)
        comm.send(1, 1, data)
        comm.send(1, 2, pattern(2, 3))
    elif comm.rank == 1:
        comm.recv(0, 1, data)
        comm.recv(0, 2, tail)
        assert np.array_equal(data[12_345:block], pattern(1, block)[12_345:]) and np.array_equal(tail, pattern(2, 3))
    comm.barrier()
    return "ok"


def over_mpi(case):
    place = find_place(os.environ)
    region = _core.Region.create(place.ranks, bytes(place.ranks ** 2), 0, 64, False)
    control = _core.tcp_comm(region, place.rank, place.host, place.port, bytes(place.ranks ** 2), 4096, ports=place.ports,
                             timeout_s=20.0)
    comm = mpi.connect(control, place.launcher)
    comm.barrier()
    sys.stdout.write(f"{place.rank} {globals()[case](comm, place.ranks, region)}\n")     # in one piece, among others' lines
    sys.stdout.flush()
    comm.close()
    control.close()     # and with it a goodbye to all: who ends before others have printed may end them


def main(case, fd, rank=None):
    if fd == "mpi":
        return over_mpi(case)
    region = _core.Region.attach(int(fd))
    print(globals()[case](_core.Comm(region, int(rank), 20.0), region.ranks, region))


if __name__ == "__main__":
    main(*sys.argv[1:])
