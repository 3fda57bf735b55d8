"""Plans whose backwards stay whole: B, and not I and W (tp_stage_config.by_block of csrc/stage/stage_ops.h).

Their stages go back block by block, whose gradients share room. But what B sends leaves behind its W, so that none is faster with
a message to send: such plans are for limits of memory that others do not fit, and for replicas that add up gradients beside the
work, which can begin sooner: a candidate that names neither form then has the faster one (csrc/plan/judge.h). What they recompute
may be made within B, block by block, too (TP_WITHIN of csrc/sched/sched.h), for limits that they do not fit otherwise: it fills no
wait then.
"""
from __future__ import annotations

from ..schedules import CHIMERA, ZERO_BUBBLE

__all__ = ["WITHIN", "WHOLE", "is_whole", "may_be_whole"]

WHOLE = -2**31    #: a candidate's ``pending`` (TP_JUDGE_WHOLE of csrc/plan/judge.h)
WITHIN = WHOLE + 1    #: the same, with R within B (TP_JUDGE_WITHIN)


def is_whole(pending: int) -> bool:
    return pending <= WITHIN


def may_be_whole(schedule: str, slicing: tuple[tuple[int, tuple[int, ...]], ...]) -> bool:
    """Whether plans have whole B, and need less memory so: the schedule places no W itself, and nothing is cut into slices."""
    return schedule not in (*ZERO_BUBBLE, CHIMERA) and all(len(lengths) == 1 for _, lengths in slicing)
