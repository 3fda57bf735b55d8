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
from .baselines import BaselinePlan, adapipe, dapple, merak, pipedream, uniform, vpipe
from .layers import (
    LayerEdge,
    LayerGraph,
    LayerNode,
    LayerPlan,
    LayerStage,
    LayerVariant,
    layer_graph,
    load_piper,
    parallel_layers,
    piper,
)
from .slices import BatchSlicePlan, SliceCosts, SlicePlan, slice_batch_and_tokens, slice_bound, slice_tokens

__all__ = [
    "BaselinePlan",
    "BatchSlicePlan",
    "LayerEdge",
    "LayerGraph",
    "LayerNode",
    "LayerPlan",
    "LayerStage",
    "LayerVariant",
    "SliceCosts",
    "SlicePlan",
    "SlicerPlan",
    "StageMemory",
    "StagePlan",
    "adapipe",
    "autopipe",
    "autopipe_balanced",
    "autopipe_heuristic",
    "autopipe_pivot",
    "autopipe_slicer",
    "balance",
    "dapple",
    "layer_graph",
    "load_piper",
    "merak",
    "parallel_layers",
    "pipedream",
    "piper",
    "slice_batch_and_tokens",
    "slice_bound",
    "slice_tokens",
    "sliced_step_time",
    "uniform",
    "vpipe",
]
