"""The real engine, whose last rank fails at a given step. Workers import this module: it imports nothing heavy."""
import os
import signal

from terapipe_c.engine import make_engine


def but(job, rank, comm, at, act):
    """A rank's engine; the last rank's acts before that step."""
    engine = make_engine(job, rank, comm)
    step = engine.step

    def then(number, tokens, lr):
        if number == at and rank == job["ranks"] - 1:
            act()
        return step(number, tokens, lr)

    engine.step = then
    return engine


def fails(job, rank, comm):
    def act():
        raise ArithmeticError("the third step is one too many")

    return but(job, rank, comm, 3, act)


def is_killed(job, rank, comm):
    return but(job, rank, comm, 23, lambda: os.kill(os.getpid(), signal.SIGKILL))
