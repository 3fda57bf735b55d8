"""A small engine for tests of the launcher: real messages over the communicator, a real (tiny) model that learns.

Each rank holds some of the parameters; the "network" adds up their means along the pipeline, and the loss is the squared
distance to the mean token. No kernels, so that a run of it takes milliseconds.
"""
import atexit
import errno
import os
import signal
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from terapipe_c import checkpoint, worker
from terapipe_c.checkpoint import param_shapes

F, B, OPT = 0, 1, 12
SLICES = 3


def tag(op, stage, micro=0, piece=0):
    return op << 48 | stage << 32 | micro << 16 | piece


class Engine:
    def __init__(self, job, rank, comm):
        self.comm, self.rank, self.ranks = comm, rank, job["ranks"]
        shapes = param_shapes(SimpleNamespace(**job["model"]))
        self.names = [name for i, name in enumerate(shapes) if i % self.ranks == rank]
        rng = np.random.default_rng(job["seed"])
        drawn = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        self.state = {"params": {name: drawn[name] for name in self.names}}
        for kind in ("exp_avg", "exp_avg_sq"):
            self.state[kind] = {name: np.zeros_like(drawn[name]) for name in self.names}
        self.peak_memory_bytes = 1000 + rank
        self.rows = []

    def at(self, step, op, piece=0):
        self.comm.region.set_progress(self.rank, step, tag(op, self.rank, 0, piece))

    def pass_on(self, op, piece, value, came_from, goes_to):
        word = bytearray(8)
        if came_from is not None:
            self.comm.recv(came_from, tag(op, self.rank, 0, piece), word)
            value += struct.unpack("d", word)[0]
        if goes_to is not None:
            self.comm.send(goes_to, tag(op, goes_to, 0, piece), struct.pack("d", value))
        return value

    def step(self, step, tokens, lr):
        first, last = self.rank == 0, self.rank == self.ranks - 1
        before, after = None if first else self.rank - 1, None if last else self.rank + 1
        self.rows = []
        mine = float(np.mean([p.mean() for p in self.state["params"].values()]))
        error = 0.0
        for piece in range(SLICES):
            self.at(step, F, piece)
            self.work(step, piece)
            start = time.monotonic()
            output = self.pass_on(F, piece, mine, before, after)
            self.rows.append(("F", self.rank, 0, piece, start, time.monotonic()))
            error = output - 2.0 - float(tokens.mean()) / 25600 if last else 0.0
        for piece in reversed(range(SLICES)):
            self.at(step, B, piece)
            start = time.monotonic()
            heard = self.pass_on(B, piece, error if last else 0.0, after, before)
            self.rows.append(("B", self.rank, 0, piece, start, time.monotonic()))
        error = heard
        self.at(step, OPT)
        gathered = self.comm.allgather(struct.pack("d", error * error))
        norm = sum(struct.unpack(f"{self.ranks}d", gathered)) ** 0.5
        for name, p in self.state["params"].items():
            self.state["exp_avg"][name] *= 0.5
            self.state["exp_avg"][name] += np.float32(error)
            p -= np.float32(lr) * self.state["exp_avg"][name]
        return {"loss": error * error, "grad_norm": norm}

    def work(self, step, piece):
        pass

    def evaluate(self, tokens):
        return float(tokens.mean())

    def export(self, kind):
        return {name: value.copy() for name, value in self.state[kind].items()}

    def load(self, params, moments):
        for kind, source in (("params", params), *(moments or {}).items()):
            self.state[kind] = {name: np.array(source[name]) for name in self.names}

    def trace(self):
        return self.rows


class Slow(Engine):
    """A step takes a few milliseconds: there is time to be interrupted."""

    def work(self, step, piece):
        time.sleep(0.002)


class Full(Engine):
    def step(self, step, tokens, lr):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Raises(Engine):
    def work(self, step, piece):
        if (self.rank, step, piece) == (1, 3, 2):
            raise ValueError("the weights caught fire")


class Dies(Engine):
    """Rank 1 is killed at a known place."""

    def work(self, step, piece):
        if (self.rank, step, piece) == (1, 5, 2):
            os.kill(os.getpid(), signal.SIGKILL)


class Exits(Engine):
    def work(self, step, piece):
        if (self.rank, step) == (1, 2):
            os._exit(0)


class Deaf(Engine):
    """Rank 0 fails while rank 1 computes and hears nothing for a long time."""

    def work(self, step, piece):
        if step == 1 and self.rank == 1:
            time.sleep(600)
        if step == 1 and self.rank == 0:
            raise MemoryError("no room")


def be_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)     # another thread may be told of it, and this one go on for a while


class Lingers(Engine):
    """Rank 1 has done and said all, and is stopped while its process leaves."""

    def __init__(self, job, rank, comm):
        super().__init__(job, rank, comm)
        if rank == 1:
            atexit.register(be_stopped)


class Mute(Engine):
    """Rank 1 has done all, and is stopped before it says so."""

    def __init__(self, job, rank, comm):
        super().__init__(job, rank, comm)
        send = worker._Telling._send

        def stop_instead(voice, text):
            if rank == 1 and b'"end"' in text:
                time.sleep(0.5)     # meanwhile the rank meets the others for the last time
                be_stopped()
            send(voice, text)

        worker._Telling._send = stop_instead


class SlowDisk(Engine):
    """On rank 0 a checkpoint's space and completion, on rank 1 its tensors, take twice as long as a rank may wait."""

    def __init__(self, job, rank, comm):
        super().__init__(job, rank, comm)
        for owner, name in ((checkpoint.CheckpointWriter, "begin"), (checkpoint.CheckpointWriter, "finish")) if rank == 0 else (
                (checkpoint, "write_tensors"),):
            setattr(owner, name, self.slowed(getattr(owner, name), 2 * job["timeout_s"]))
        (Path(job["out"]) / f"begun-{rank}").touch()
        while not (Path(job["out"]) / f"begun-{1 - rank}").exists():    # processes may begin further apart than a rank may wait
            time.sleep(0.01)

    def slowed(self, call, seconds):
        def slow(*given, **named):
            time.sleep(seconds)
            return call(*given, **named)

        return slow


class Unbuildable(Engine):
    def __init__(self, job, rank, comm):
        if rank == 1:
            raise OSError(28, "no space", "/somewhere")
        super().__init__(job, rank, comm)
