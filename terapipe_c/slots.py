"""How many messages must be able to be on their way at a time, so that no rank of a program waits for ever for one of NCCL's?

A channel is one direction of one pair of ranks, and has slots at both ends (cuda/nccl.h): a message is copied into one, sent,
received into one, and copied out right before it is read. So a message also waits until the one as many before as there are slots
has been read, which the checker's proof does not know. Programs are run by these rules alone (csrc/sched/stuck.c). Guests have
no slots.
"""
from __future__ import annotations

from ._core import OPS, InvalidValueError, Program

__all__ = ["LEAST", "MOST", "needed", "stuck"]

LEAST, MOST = 2, 64      # TP_NCCL_SLOTS, TP_NCCL_MOST_SLOTS


def stuck(program: Program, slots: int = LEAST, direct: bool = True) -> str:
    """Where ranks of a lowered program wait for ever; "": nowhere. direct: guests need no slots."""
    waiting = []
    for rank, at in enumerate(program._stuck(slots, not direct).tolist()):
        begin, end = program._bounds(rank)
        if at < end - begin:
            instr = program.instructions(rank)[at]
            waiting.append(f"rank {rank} at {OPS[instr['op']]} of micro-batch {instr['micro']}")
    return "; ".join(waiting)


def needed(program: Program) -> int:
    """Slots with which no rank of the lowered program waits for ever: LEAST, or the least of 3, 4, 6, 8, 12, ... InvalidValueError:
    more than MOST."""
    for slots in (LEAST, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST):
        where = stuck(program, slots)
        if not where:
            return slots
    raise InvalidValueError(f"with room for {MOST} messages between two ranks, the most there is by NCCL, these would wait for "
                            f"each other for ever: {where}; fewer slices or micro-batches, or TERAPIPE_COMM=host, would be right")
