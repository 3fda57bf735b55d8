"""This package's GPT as nodes; each keeps for a micro-batch what the engine's stage keeps (csrc/stage/layout.c)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._core import InvalidTypeError, InvalidValueError
from ..config import Cluster, GPTConfig, brief, real, whole
from ..cost import CostModel
from .arguments import FloatArray
from .nodes import Nodes, remake_seconds

_FLOPS, _BYTES = 60e9, 10e9  # one core, as CostModel.analytic: only their ratio matters here


class _Node(NamedTuple):
    name: str
    flops: float  # of a row, in units of the caller
    moved: float  # values of a row that go through memory
    kept: float  # values of a row that stay for the backward
    output: float  # values of a row that the next node reads
    params: float


def _block_nodes(model: GPTConfig, kind: str, rows_before: float) -> list[_Node]:
    """rows_before: tokens that a token attends to, on average."""
    e, v, bias = float(model.n_embd), float(model.vocab_size), float(model.bias)
    norm = _Node("ln", 8 * e, 2 * e, 2, e, e + bias * e)
    add = _Node("residual", e, 3 * e, e, e, 0.0)
    if kind == "embedding":
        return [_Node("embedding", e, 3 * e, e, e, (v + model.block_size) * e)]
    if kind == "attention":
        return [norm._replace(name="ln_1"), _Node("qkv", 6 * e * e, 4 * e, 3 * e, 3 * e, 3 * e * e + bias * 3 * e),
                _Node("attention", 4 * e * rows_before, 4 * e, e + model.n_head, e, 0.0),
                _Node("proj", 2 * e * e, 2 * e, 0.0, e, e * e + bias * e), add]  # fmt: skip
    if kind == "ffn":
        return [norm._replace(name="ln_2"), _Node("fc", 8 * e * e, 5 * e, 4 * e, 4 * e, 4 * e * e + bias * 4 * e),
                _Node("gelu", 40 * e, 8 * e, 4 * e, 4 * e, 0.0),
                _Node("proj", 8 * e * e, 5 * e, 0.0, e, 4 * e * e + bias * e), add]  # fmt: skip
    # A tied head has a copy of the embedding's matrix on its own stage. It keeps d(input), and its loss in a double.
    return [norm._replace(name="ln_f"), _Node("head", 2 * v * e, e, e + 2, 0.0, v * e)]


def gpt_nodes(model: GPTConfig, costs: CostModel | None, micro_batch: int, seq_len: int | None, cluster: Cluster | None,
              value_bytes: float, optimizer_bytes_per_param: float) -> Nodes:  # fmt: skip
    """See ``GPTConfig.nodes``."""
    batch, tokens = whole("micro_batch", micro_batch), whole("seq_len", model.block_size if seq_len is None else seq_len)
    if tokens > model.block_size:
        raise InvalidValueError(f"seq_len is {tokens}: at most block_size, {model.block_size}, would be right")
    if costs is not None and not isinstance(costs, CostModel):
        raise InvalidTypeError(f"costs is {brief(costs)}: a CostModel would be right")
    if cluster is not None and not isinstance(cluster, Cluster):
        raise InvalidTypeError(f"cluster is {brief(cluster)}: a Cluster would be right")
    size, state = real("value_bytes", value_bytes), real("optimizer_bytes_per_param", optimizer_bytes_per_param, zero=True)
    costs = costs if costs is not None else CostModel.analytic(model, cluster or Cluster(1))
    peak = (cluster.peak_flops if cluster else None) or _FLOPS
    bandwidth = (cluster.memory_bandwidth_Bps if cluster else None) or _BYTES
    rows = float(batch * tokens)
    parts: list[_Node] = []
    names: list[str] = []
    blocks: list[int] = []
    seconds: list[FloatArray] = []
    times = {kind: np.array([costs.block_seconds(kind, phase, tokens, 0, batch) for phase in ("fwd", "bwd")])
             for kind in ("embedding", "attention", "ffn", "head")}  # fmt: skip
    for number, block in enumerate(model.blocks):
        inside = _block_nodes(model, block.kind, (tokens + 1) / 2)
        weights = np.array([node.flops / peak + 4.0 * node.moved / bandwidth for node in inside])
        seconds += list(weights[:, None] / weights.sum() * times[block.kind])
        parts += inside
        names += [f"{block.name}.{node.name}" if len(inside) > 1 else block.name for node in inside]
        blocks += [number] * len(inside)
    forward, backward = np.array(seconds).T
    params = np.array([node.params for node in parts])
    updated = params.copy()
    if model.tie_weights:  # the head's stage has the gradient and the moments
        updated[0] -= model.vocab_size * model.n_embd
    inputs = np.array([0.0] + [node.output for node in parts[:-1]])
    outputs = np.array([node.output for node in parts])
    kept, edges = np.array([node.kept for node in parts]) * rows * size, _edges(parts, rows * size)
    return Nodes.from_graph(
        {
            "fwd_s": forward, "bwd_s": backward, "recompute_s": remake_seconds(forward, kept, edges), "activation_bytes": kept,
            "param_bytes": updated * size,
            "optimizer_bytes": updated * state + (params - updated) * size, "names": names, "blocks": blocks,
            "working_bytes": 2.0 * (inputs + outputs) * rows * size,
        },
        edges,
    )  # fmt: skip


def _edges(parts: list[_Node], scale: float) -> list[tuple[int, int, float]]:
    """A chain, and the residual stream past each block."""
    edges = [(k - 1, k, parts[k - 1].output * scale) for k in range(1, len(parts))]
    stream = 0
    for k, node in enumerate(parts):
        if node.name == "residual":
            edges.append((stream, k, parts[stream].output * scale))
            stream = k
    return edges
