"""One rank of a conformance case of test_comm.py in a process of its own: comm_rank.py CASE FD RANK."""
import sys

import numpy as np

from terapipe_c import _core


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


def main(case, fd, rank):
    region = _core.Region.attach(int(fd))
    print(globals()[case](_core.Comm(region, int(rank), 20.0), region.ranks, region))


if __name__ == "__main__":
    main(*sys.argv[1:])
