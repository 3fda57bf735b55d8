"""Plans whose backwards stay whole: B, and not I and W (tp_stage_config.by_block of csrc/stage/stage_ops.h).

Their stages go back block by block, whose gradients share room. But what B sends leaves behind its W, so that none is faster with a
message to send: such plans are for limits of memory that others do not fit.
"""
from __future__ import annotations

from ..schedules import CHIMERA, ZERO_BUBBLE

__all__ = ["WHOLE", "may_be_whole"]

WHOLE = -2**31    #: a candidate's ``pending`` (TP_JUDGE_WHOLE of csrc/plan/judge.h)


def may_be_whole(schedule: str, slicing: tuple[tuple[int, tuple[int, ...]], ...]) -> bool:
    """Whether plans have whole B, and need less memory so: the schedule places no W itself, and nothing is cut into slices."""
    return schedule not in (*ZERO_BUBBLE, CHIMERA) and all(len(lengths) == 1 for _, lengths in slicing)
