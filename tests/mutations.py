"""Programs with one random mistake each, and what the checker says of them."""
import numpy as np

from terapipe_c import Program, ScheduleError, schedule, schedules


def mutate(rng, lists):
    """The lists with one random mistake; None if it changed nothing."""
    lists = [list(rank) for rank in lists]
    full = [r for r, rank in enumerate(lists) if rank]
    rank = rng.choice(full)
    i, j = rng.randrange(len(lists[rank])), rng.randrange(len(lists[rank]))
    kind = rng.choice(("swap", "swap", "near", "delete", "duplicate", "foreign", "rewrite", "move"))
    if kind in ("swap", "near"):
        j = min(i + 1, len(lists[rank]) - 1) if kind == "near" else j
        if lists[rank][i] == lists[rank][j]:
            return None
        lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]
    elif kind == "delete":
        del lists[rank][i]
    elif kind == "duplicate":
        lists[rank].insert(j, lists[rank][i])
    elif kind == "foreign":
        other = rng.choice(full)
        if other == rank:
            return None
        lists[other].insert(rng.randrange(len(lists[other]) + 1), lists[rank][i])
    elif kind == "move":
        lists[rank].insert(j, lists[rank].pop(i))
    else:
        field = rng.choice(("op", "stage", "micro", "slice", "peer"))
        old = lists[rank][i]
        value = rng.choice((0, 1, 2, int(old[field]) + 1)) if field != "op" else rng.randrange(len(schedules.OPS))
        if int(old[field]) == value or (field == "peer" and old["peer"] < 0):
            return None
        new = old.copy()
        new[field] = value
        messages = {schedules.OPS.index(name) for name in ("SF", "RF", "SB", "RB", "AR")}
        if (int(new["op"]) in messages) != (int(new["peer"]) >= 0):
            return None  # no text says that
        lists[rank][i] = new
    return lists


def checked(rng, bases, rounds, mutate, keep_slots=lambda: False):
    """Yields (program, the checker's error or None). mutate(rng, lists of instructions of each rank) gives such lists, or None.
    An error names a rank, a place on it, and shows it."""
    for _ in range(rounds):
        base = rng.choice(bases)
        lists = mutate(rng, [[x.copy() for x in base.instructions(rank)] for rank in range(base.num_ranks)])
        if lists is None or not all(lists):
            continue
        arrays = [np.array([x.item() for x in rank], schedule.INSTRUCTION) for rank in lists]
        program = Program.from_instructions(arrays, keep_slots=keep_slots())
        try:
            program.check()
        except ScheduleError as error:
            assert 0 <= error.rank < program.num_ranks
            assert 0 <= error.position <= len(program.instructions(error.rank))
            assert "<-- here" in str(error) and f"rank {error.rank}, position {error.position}" in str(error)
            yield program, error
        else:
            yield program, None
