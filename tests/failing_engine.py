"""The real engine of a rank, except that the last rank fails at step 3. Workers import this: nothing heavy here."""
from terapipe_c.engine import make_engine


def fails(job, rank, comm):
    engine = make_engine(job, rank, comm)
    step = engine.step

    def failing(number, tokens, lr):
        if number == 3 and rank == job["ranks"] - 1:
            raise ArithmeticError("the third step is one too many")
        return step(number, tokens, lr)

    engine.step = failing
    return engine
