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
from .capacity import MaxBatch, max_batch
from .dawnpiper import (
    DawnPiperPlan,
    compute_balanced,
    dawnpiper,
    dawnpiper_binary,
    memory_balanced,
    memory_weights,
)
from .nodes import Nodes, load_nodes
from .slices import BatchSlicePlan, SliceCosts, SlicePlan, slice_batch_and_tokens, slice_bound, slice_tokens

__all__ = [
    "BatchSlicePlan",
    "DawnPiperPlan",
    "MaxBatch",
    "Nodes",
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
    "compute_balanced",
    "dawnpiper",
    "dawnpiper_binary",
    "load_nodes",
    "max_batch",
    "memory_balanced",
    "memory_weights",
    "slice_batch_and_tokens",
    "slice_bound",
    "slice_tokens",
    "sliced_step_time",
]
