"""The planners by themselves: costs in, plan out, computed in C with the GIL released. Times are seconds, sizes bytes.

Each planner, or family of them, has its own module; this one only gathers their names.
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
from .bmpipe import BMPipePlan, bmpipe
from .bmpipe_highs import bmpipe_highs, bmpipe_mps
from .capacity import MaxBatch, max_batch
from .dawnpiper import (
    DawnPiperPlan,
    compute_balanced,
    dawnpiper,
    dawnpiper_binary,
    memory_balanced,
    memory_weights,
)
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
from .nodes import Nodes, load_nodes
from .slices import (
    BatchSlicePlan,
    SliceCosts,
    SlicePlan,
    slice_batch_and_tokens,
    slice_bound,
    slice_tokens,
    slice_tokens_for,
)
from .slicing_bound import slicing_bound
from .uneven import SliceMemory, UnevenSlicePlan, flow_shop_time, slice_uneven

__all__ = [
    "BMPipePlan",
    "BaselinePlan",
    "BatchSlicePlan",
    "DawnPiperPlan",
    "LayerEdge",
    "LayerGraph",
    "LayerNode",
    "LayerPlan",
    "LayerStage",
    "LayerVariant",
    "MaxBatch",
    "Nodes",
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
    "bmpipe",
    "bmpipe_highs",
    "bmpipe_mps",
    "compute_balanced",
    "dapple",
    "dawnpiper",
    "dawnpiper_binary",
    "flow_shop_time",
    "layer_graph",
    "load_nodes",
    "load_piper",
    "max_batch",
    "memory_balanced",
    "memory_weights",
    "merak",
    "parallel_layers",
    "pipedream",
    "piper",
    "slice_batch_and_tokens",
    "slice_bound",
    "slice_tokens",
    "slice_tokens_for",
    "slice_uneven",
    "slicing_bound",
    "sliced_step_time",
    "uniform",
    "vpipe",
]


def __dir__() -> list[str]:
    return __all__
