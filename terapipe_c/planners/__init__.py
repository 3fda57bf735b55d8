"""The planners alone: costs in, plan out, all in C with the GIL released. Times are seconds, sizes bytes.

One module a planner; this one only gathers their names.
"""

from .autopipe import (
    SlicerPlan,
    StageMemory,
    StagePlan,
    autopipe,
    autopipe_balanced,
    autopipe_heuristic,
    autopipe_pivot,
    autopipe_slicer,
    sliced_step_time,
)
from .balance import balance
from .slices import BatchSlicePlan, SliceCosts, SlicePlan, slice_batch_and_tokens, slice_bound, slice_tokens

__all__ = [
    "BatchSlicePlan",
    "SliceCosts",
    "SlicePlan",
    "SlicerPlan",
    "StageMemory",
    "StagePlan",
    "autopipe",
    "autopipe_balanced",
    "autopipe_heuristic",
    "autopipe_pivot",
    "autopipe_slicer",
    "balance",
    "slice_batch_and_tokens",
    "slice_bound",
    "slice_tokens",
    "sliced_step_time",
]
