"""The planners alone: costs in, plan out, all in C with the GIL released. Times are seconds, sizes bytes.

One module a planner; this one only gathers their names.
"""

from .balance import balance
from .bmpipe import BMPipePlan, bmpipe
from .bmpipe_highs import bmpipe_highs, bmpipe_mps
from .slices import BatchSlicePlan, SliceCosts, SlicePlan, slice_batch_and_tokens, slice_bound, slice_tokens

__all__ = [
    "BMPipePlan",
    "BatchSlicePlan",
    "SliceCosts",
    "SlicePlan",
    "balance",
    "bmpipe",
    "bmpipe_highs",
    "bmpipe_mps",
    "slice_batch_and_tokens",
    "slice_bound",
    "slice_tokens",
]
