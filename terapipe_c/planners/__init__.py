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
from .slices import (
    BatchSlicePlan,
    SliceCosts,
    SlicePlan,
    slice_batch_and_tokens,
    slice_bound,
    slice_tokens,
    slice_tokens_for,
)
from .uneven import SliceMemory, UnevenSlicePlan, flow_shop_time, slice_uneven

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
    "SliceMemory",
    "SlicePlan",
    "SlicerPlan",
    "StageMemory",
    "StagePlan",
    "UnevenSlicePlan",
    "adapipe",
    "autopipe",
    "autopipe_balanced",
    "autopipe_heuristic",
    "autopipe_pivot",
    "autopipe_slicer",
    "balance",
    "dapple",
    "flow_shop_time",
    "layer_graph",
    "load_piper",
    "merak",
    "parallel_layers",
    "pipedream",
    "piper",
    "slice_batch_and_tokens",
    "slice_bound",
    "slice_tokens",
    "slice_tokens_for",
    "slice_uneven",
    "sliced_step_time",
    "uniform",
    "vpipe",
]
