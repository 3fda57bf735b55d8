"""Published transformers as planners see them: parameters, FLOPs, bytes of each kind of layer. Planning only.

What the engine runs is :class:`GPTConfig`; here are the models that it cannot run as well. Half precision: 2 bytes an
activation; 16 bytes a parameter (2 weight, 2 gradient, 12 Adam and master copy). Activation bytes follow Korthikanti et al.
2022 (arXiv 2205.05198), section 4.1, term by term; where a model has no dropout without its masks, and without what attention's
dropout makes: the softmax's own output, kept already, multiplies the values. FLOPs are two a multiply-add; a backward is two
forwards; norms and activation functions count as nothing. The matrix of a tied head counts once, in the embedding: a pipeline
whose last stage keeps a copy, as Megatron's does, has that much more there.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._core import InvalidValueError
from .config import brief, flag, html_table, human_count, whole
from .devices import Device
from .devices import get as device_of
from .planners.nodes import Nodes, remake_seconds
from .zoo_cells import amoebanet

__all__ = ["ArchitectureSpec", "LayerType", "Tensor", "amoebanet", "get", "names"]

_HALF, _PARAM, _OPTIMIZER = 2, 4, 12   # bytes: an activation; weight and gradient; Adam's moments and the master weight


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Tensor:
    """One operation of a block and what it makes. Over the tensors of a block the sums are the block's own figures."""

    name: str
    params: int = 0
    active_params: int = 0
    pair_flops: int = 0
    token_bytes: int = 0
    pair_bytes: int = 0
    """Kept for the backward, of each token and of each pair."""
    width: int = 0
    """Values a token that the next operation reads (0: as many bytes as it keeps of pairs)."""


@dataclass(frozen=True)
class LayerType:
    """One kind of block. Sums over tokens are linear, those over (query, key) pairs quadratic in the length."""

    name: str
    params: int
    """Parameters that this block stores."""
    active_params: int
    """Parameters that multiply each token: two FLOPs each (less than ``params`` for experts and look-ups)."""
    pair_flops: int = 0
    """Forward FLOPs of one (query, key) pair: scores and their product with the values."""
    token_bytes: int = 0
    """Kept for the backward, of each token."""
    pair_bytes: int = 0
    """The same, of each (query, key) pair; what selective recomputation drops."""
    causal: bool = True
    tensors: tuple[Tensor, ...] = ()
    """Its operations in order; none: the block is one."""

    def pairs(self, length: int, context: int = 0) -> int:
        """(query, key) pairs of ``length`` tokens after ``context`` others."""
        length, context = whole("length", length, 0), whole("context", context, 0)    # a NumPy int would overflow its own type
        own = length * (length + 1) // 2 if self.causal else length * length
        return own + length * context

    def flops(self, length: int, context: int = 0, micro_batch: int = 1) -> float:
        """Forward FLOPs of ``micro_batch`` slices; the backward has twice that."""
        length, micro_batch = whole("length", length, 0), whole("micro_batch", micro_batch)
        return float(micro_batch * (2 * self.active_params * length + self.pair_flops * self.pairs(length, context)))

    def activation_bytes(self, length: int, context: int = 0, micro_batch: int = 1, selective: bool = False) -> float:
        """Kept from forward to backward. Scores are kept whole, masked half included, unless ``selective``."""
        length, context, micro_batch = whole("length", length, 0), whole("context", context, 0), whole("micro_batch", micro_batch)
        quadratic = 0 if flag("selective", selective) else self.pair_bytes * length * (length + context)
        return float(micro_batch * (self.token_bytes * length + quadratic))


@dataclass(frozen=True)
class ArchitectureSpec:
    """A model as a list of (layer type, how many in a row)."""

    name: str
    hidden: int
    parts: tuple[tuple[tuple[LayerType, ...], int], ...]
    """Groups in model order: the blocks of a layer, and how many such layers follow one another."""
    published_params: float
    tolerance: float
    """|num_params / published_params - 1| is at most this."""
    source: str
    """Of the shape and of the count; says what is assumed where the paper does not give it."""
    seq_len: int

    @property
    def blocks(self) -> list[LayerType]:
        """Every block in model order: a stage boundary may fall between any two."""
        return [block for group, count in self.parts for _ in range(count) for block in group]

    @property
    def num_params(self) -> int:
        return sum(block.params for block in self.blocks)

    def cut_bytes(self, length: int, micro_batch: int = 1) -> float:
        """Of the message between two stages: the residual stream."""
        length, micro_batch = whole("length", length, 0), whole("micro_batch", micro_batch)
        return float(_HALF * self.hidden * length * micro_batch)

    def block_costs(self, device: Device | str, *, seq_len: int | None = None, micro_batch: int = 1, tensor_parallel: int = 1,
                    **roofline: Any) -> tuple[np.ndarray, np.ndarray]:
        """(fwd_s, bwd_s), float64 [blocks] each, of a whole sequence. ``roofline``: what ``Device.seconds`` takes.

        tensor_parallel: devices that share a block evenly, its norms and residuals too (sequence parallelism); their messages take
        no time.
        """
        parts = whole("tensor_parallel", tensor_parallel)
        costs = [self._seconds(b, device, seq_len, micro_batch, parts, roofline) for b in self.blocks]
        return np.array([f for f, _ in costs]), np.array([b for _, b in costs])

    def _seconds(self, block: LayerType, device: Device | str, seq_len: int | None, micro_batch: int, parts: int,
                 roofline: dict[str, Any]) -> tuple[float, float]:
        machine = device_of(device)
        length = self.seq_len if seq_len is None else whole("seq_len", seq_len)
        flops = block.flops(length, 0, micro_batch) / parts
        move = (_HALF * block.params + block.activation_bytes(length, 0, micro_batch)) / parts
        return machine.seconds(flops, move, **roofline), machine.seconds(2 * flops, 2 * move, **roofline)

    def layers(self, device: Device | str, *, seq_len: int | None = None, micro_batch: int = 1, tensor_parallel: int = 1,
               **roofline: Any) -> list[dict[str, Any]]:
        """What ``tp.planners.bmpipe`` takes: layer types in model order, each with none, selective and full recomputation (which
        keeps a layer's whole input on each device, as Korthikanti et al. count it); ``tensor_parallel`` as in :meth:`block_costs`.
        """
        parts, micro_batch, made = whole("tensor_parallel", tensor_parallel), whole("micro_batch", micro_batch), []
        length = self.seq_len if seq_len is None else whole("seq_len", seq_len)
        for group, count in self.parts:
            both = [self._seconds(b, device, length, micro_batch, parts, roofline) for b in group]
            fwd = sum(f for f, _ in both)
            kept = sum(b.activation_bytes(length, 0, micro_batch) for b in group) / parts
            lean = sum(b.activation_bytes(length, 0, micro_batch, True) for b in group) / parts
            machine = device_of(device)
            scores = sum(b.pair_flops * b.pairs(length) for b in group) * micro_batch / parts
            again = machine.seconds(scores, 0, **roofline) if scores else 0.0
            strategies = [{"name": "none", "extra_bwd_s": 0.0, "activation_bytes": kept},
                          {"name": "selective", "extra_bwd_s": again, "activation_bytes": lean},
                          {"name": "full", "extra_bwd_s": fwd, "activation_bytes": self.cut_bytes(length, micro_batch)}]
            made.append({"name": "+".join(b.name for b in group), "count": count, "fwd_s": fwd,
                         "bwd_s": sum(b for _, b in both), "strategies": strategies,
                         "static_bytes": (_PARAM + _OPTIMIZER) * sum(b.params for b in group) / parts})
        return made

    def nodes(self, device: Device | str, *, seq_len: int | None = None, micro_batch: int = 1, **roofline: Any) \
            -> dict[str, np.ndarray]:
        """What ``tp.planners.dawnpiper`` takes, a node a block; what is kept of a node can be made again by its forward.

        param_bytes are the weights (2 a parameter; the planner adds a gradient as large), optimizer_bytes the rest (12).
        """
        length = self.seq_len if seq_len is None else whole("seq_len", seq_len)
        fwd, bwd = self.block_costs(device, seq_len=length, micro_batch=micro_batch, **roofline)
        params = np.array([float(b.params) for b in self.blocks])
        return {"fwd_s": fwd, "bwd_s": bwd, "recompute_s": fwd.copy(),
                "activation_bytes": np.array([b.activation_bytes(length, 0, micro_batch) for b in self.blocks]),
                "param_bytes": _HALF * params, "optimizer_bytes": float(_OPTIMIZER) * params,
                "cut_bytes": self.cut_bytes(length, micro_batch) * (1 + self._memory_crosses())}

    def _memory_crosses(self) -> np.ndarray:
        """Of each block, 1 where the encoder's output crosses behind it beside the residual stream: until the last reader."""
        names = [block.name for block in self.blocks]
        crosses = np.zeros(len(names))
        if "cross" in names:
            crosses[names.index("decoder"):len(names) - 1 - names[::-1].index("cross")] = 1
        return crosses

    def tensor_nodes(self, device: Device | str, *, seq_len: int | None = None, micro_batch: int = 1, **roofline: Any) -> Nodes:
        """:meth:`nodes` with a node an operation, and the graph's edges: the residual stream past every block, and an
        encoder's output to every layer that reads it. A node that keeps nothing is made again with its reader.

        working_bytes: what the operation reads and makes, and their gradients.
        """
        machine = device_of(device)
        length = self.seq_len if seq_len is None else whole("seq_len", seq_len)
        micro_batch = whole("micro_batch", micro_batch)
        rows = float(length * micro_batch)
        table: list[tuple[float, ...]] = []
        names: list[str] = []
        blocks: list[int] = []
        edges: list[tuple[int, int, float]] = []
        memory, stream, made = -1, -1, 0.0   # the encoder's output, the residual stream: nodes; what the last node made: bytes
        for number, block in enumerate(self.blocks):
            if block.name == "decoder" and memory < 0:
                memory = stream
            for part in block.tensors or (Tensor(block.name, block.params, block.active_params, block.pair_flops,
                                                 block.token_bytes, block.pair_bytes, self.hidden),):
                at, pairs = len(table), micro_batch * block.pairs(length)
                out = _HALF * part.width * rows + (part.pair_bytes * length * rows if not part.width else 0.0)
                kept = part.token_bytes * rows + part.pair_bytes * length * rows
                flops, move = 2.0 * part.active_params * rows + part.pair_flops * pairs, _HALF * part.params + made + out
                table.append((machine.seconds(flops, move, **roofline), machine.seconds(2 * flops, 2 * move, **roofline), kept,
                              _HALF * part.params, float(_OPTIMIZER) * part.params, 2 * (made + out)))
                edges += [(at - 1, at, made)] if at else []
                edges += [(stream, at, _HALF * self.hidden * rows)] if part.name == "residual" and stream >= 0 else []
                edges += [(at - 2, at, edges[-2][2])] if part.name == "values" else []   # v; the same tensor that scores read
                edges += [(memory, at, _HALF * self.hidden * rows)] if block.name == "cross" and part.name == "qkv" else []
                names.append(f"{number}.{block.name}.{part.name}" if block.tensors else block.name)
                blocks.append(number)
                made = out
            stream = len(table) - 1
        columns = np.array(table).T
        keys = ("fwd_s", "bwd_s", "activation_bytes", "param_bytes", "optimizer_bytes", "working_bytes")
        return Nodes.from_graph(dict(zip(keys, columns, strict=True)) | {
            "recompute_s": remake_seconds(columns[0], columns[2], edges), "names": names, "blocks": blocks}, edges)

    def __repr__(self) -> str:
        return f"<{self.name}: {human_count(self.num_params)} parameters, {len(self.blocks)} blocks>"

    def _repr_html_(self) -> str:
        sizes = [human_count(sum(block.params for block in group)) for group, _ in self.parts]
        rows = [(" + ".join(block.name for block in group), f"{count} x {size} parameters")
                for (group, count), size in zip(self.parts, sizes, strict=True)]
        return html_table(self.name, [
            ("parameters", f"{human_count(self.num_params)} (published {human_count(self.published_params)})"),
            ("width", f"{self.hidden}"), ("sequence", f"{self.seq_len} tokens"), *rows, ("source", self.source)])


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool, norm: int, causal: bool = True,
              dropout: bool = False, name: str = "attention", out_bias: bool | None = None) -> LayerType:
    """Norm, q, k, v, scores, output. norm: vectors that its norm stores (2 LayerNorm, 1 RMSNorm). bias: of q, k, v, and of the
    output unless ``out_bias`` says otherwise."""
    out_bias = bias if out_bias is None else out_bias
    q, kv = heads * head_dim, kv_heads * head_dim
    matrix = hidden * (2 * q + 2 * kv)
    kept = 2 * _HALF * hidden + _HALF * (2 * q + 2 * kv) + (hidden if dropout else 0)   # norm's and qkv's input; q, k, v, out
    pair = heads * (2 * _HALF + 1 if dropout else _HALF)   # what the softmax and its dropout make, and the mask
    into, out = hidden * (q + 2 * kv), q * hidden
    biases = (q + 2 * kv if bias else 0) + (hidden if out_bias else 0)
    return LayerType(name, matrix + biases + norm * hidden, matrix, 4 * q, kept, pair, causal, (
        Tensor("norm", norm * hidden, token_bytes=_HALF * hidden, width=hidden),
        Tensor("qkv", into + (q + 2 * kv if bias else 0), into, token_bytes=_HALF * (q + 2 * kv), width=q + 2 * kv),
        Tensor("scores", pair_flops=2 * q, pair_bytes=pair),
        Tensor("values", pair_flops=2 * q, token_bytes=_HALF * q, width=q),
        Tensor("proj", out + (hidden if out_bias else 0), out, token_bytes=hidden if dropout else 0, width=hidden),
        Tensor("residual", token_bytes=_HALF * hidden, width=hidden)))


def feed_forward(hidden: int, inner: int, *, gated: bool, bias: bool, norm: int, dropout: bool = False, experts: int = 1,
                 top: int = 1) -> LayerType:
    """Norm, two matrices (three where ``gated``: SwiGLU); a router and ``experts`` of them, ``top`` used by a token."""
    matrices, router = (3 if gated else 2) * hidden * inner, hidden * experts if experts > 1 else 0
    kept = 2 * _HALF * hidden + _HALF * (3 if gated else 2) * inner * top + (hidden if dropout else 0)
    down, up = hidden * inner, matrices - hidden * inner
    made = _HALF * inner * top
    return LayerType("moe" if experts > 1 else "ffn", experts * (matrices + (inner + hidden if bias else 0)) + router
                     + norm * hidden, top * matrices + router, 0, kept, tensors=(
        Tensor("norm", norm * hidden, token_bytes=_HALF * hidden, width=hidden),
        Tensor("up", experts * (up + (inner if bias else 0)) + router, top * up + router, token_bytes=made * up // down,
               width=inner * top * up // down),
        Tensor("act", token_bytes=made, width=inner * top),
        Tensor("down", experts * (down + (hidden if bias else 0)), top * down, token_bytes=hidden if dropout else 0,
               width=hidden),
        Tensor("residual", token_bytes=_HALF * hidden, width=hidden)))


def _ends(hidden: int, vocab: int, positions: int, norm: int, tied: bool, embedding_norm: int = 0) -> tuple[LayerType, LayerType]:
    """Embedding and head; a tied head multiplies with what the embedding stores. embedding_norm: vectors of a norm behind it."""
    return (LayerType("embedding", (vocab + positions + embedding_norm) * hidden, 0, 0, 0),
            LayerType("head", norm * hidden + (0 if tied else vocab * hidden), vocab * hidden, 0, 2 * _HALF * hidden))


def _decoder(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, published: float,
             tolerance: float, source: str, *, gated: bool = True, bias: bool = False, qkv_bias: bool = False, positions: int = 0,
             tied: bool = False, seq_len: int = 4096, experts: int = 1, top: int = 1, embedding_norm: int = 0) -> ArchitectureSpec:
    norm, head = 1 if gated else 2, hidden // heads
    mix = attention(hidden, heads, kv_heads, head, bias=bias or qkv_bias, norm=norm, out_bias=bias)
    layer = (mix, feed_forward(hidden, inner, gated=gated, bias=bias, norm=norm, experts=experts, top=top))
    first, last = _ends(hidden, vocab, positions, norm, tied, embedding_norm)
    return ArchitectureSpec(name, hidden, (((first,), 1), (layer, layers), ((last,), 1)), published, tolerance, source, seq_len)


def _bert() -> ArchitectureSpec:
    layer = (attention(1024, 16, 16, 64, bias=True, norm=2, causal=False, dropout=True),
             feed_forward(1024, 4096, gated=False, bias=True, norm=2, dropout=True))
    first, last = _ends(1024, 30522, 512 + 2, 2, True)
    return ArchitectureSpec("bert-340m", 1024, (((first,), 1), (layer, 24), ((last,), 1)), 340e6, 0.02,
                            "Devlin et al. 2019, BERT-large: 24 layers, 1024, 16 heads, 340M; vocabulary of the uncased model", 512)


def _t5() -> ArchitectureSpec:
    own = dict(bias=False, norm=1, dropout=True)
    inner = feed_forward(1024, 4096, gated=False, **own)  # type: ignore[arg-type]
    encoder = attention(1024, 16, 16, 64, causal=False, name="encoder", **own)  # type: ignore[arg-type]
    decoder = attention(1024, 16, 16, 64, name="decoder", **own)  # type: ignore[arg-type]
    cross = attention(1024, 16, 16, 64, causal=False, name="cross", **own)  # type: ignore[arg-type]
    first, last = _ends(1024, 32128, 0, 1, True)
    table = 32 * 16   # a bias for each bucket of distances and each head: one in front of the encoder, one of the decoder
    first = replace(first, params=first.params + table)
    between = LayerType("norm", 1024 + table, 0, 0, 2 * _HALF * 1024 + 1024)   # the encoder's last; keeps what the decoder reads
    parts = (((first,), 1), ((encoder, inner), 24), ((between,), 1), ((decoder, cross, inner), 24), ((last,), 1))
    return ArchitectureSpec("t5-780m", 1024, parts, 770e6, 0.05, "Raffel et al. 2020, T5-Large: 24 + 24 layers, d_model 1024, "
                            "d_ff 4096, 16 heads, 770M (DawnPiper prints 780M); the weights released hold 737,668,096", 512)


_MADE: dict[str, Callable[[], ArchitectureSpec]] = {
    "bert-340m": _bert,
    "t5-780m": _t5,
    "llama-70b": lambda: _decoder("llama-70b", 80, 8192, 64, 8, 28672, 32000, 70e9, 0.02,
                                  "Touvron et al. 2023 (Llama 2), model card: 80 layers, 8192, 64 heads, 8 kv, 28672, 32000; "
                                  "checked against the tensors listed at datascience.stackexchange.com/questions/126942"),
    "llama-175b": lambda: _decoder("llama-175b", 96, 12288, 96, 96, 32768, 32000, 175e9, 0.01,
                                   "BMPipe prints the name only; assumed: GPT-3 175B's depth and width, SwiGLU of 8/3 width, as in "
                                   "Kuaishou's Megatron (ATC 2024, examples/atc24/llama-175b: 96, 12288, 96 heads, 32768)"),
    "bloom-176b": lambda: _decoder("bloom-176b", 70, 14336, 112, 112, 57344, 250880, 176247271424, 0.0,
                                   "BigScience 2022, model card: 70 layers, 14336, 112 heads, 250880, 176,247,271,424 parameters; "
                                   "shape checked: huggingface.co/joaoalvarenga/bloom-8bit config.json",
                                   gated=False, bias=True, tied=True, seq_len=2048, embedding_norm=2),
    "qwen2-72b": lambda: _decoder("qwen2-72b", 80, 8192, 64, 8, 29568, 152064, 72.71e9, 1e-4,
                                  "Qwen2 technical report, table 1, and model card: 80 layers, 8192, 64 heads, 8 kv, 29568; "
                                  "checked: huggingface.co/Qwen/Qwen2-72B config.json",
                                  qkv_bias=True),
    "pangu-230b": lambda: _decoder("pangu-230b", 71, 16384, 128, 128, 65536, 40000, 230e9, 0.01,
                                   "BMPipe prints the name only; assumed: the width of PanGu-alpha 200B (64 layers of 16384, 128 "
                                   "heads: set_parse_200B in MindSpore's pangu_alpha_config.py), 71 layers in place of "
                                   "64", gated=False, bias=True, positions=1024, tied=True, seq_len=1024),
    "moe-1t": lambda: _decoder("moe-1t", 64, 8192, 64, 8, 20480, 32000, 1.04e12, 0.01,
                               "BMPipe prints 1.04T only; assumed: 64 layers, 8192, 32 experts of 20480, top 2", experts=32, top=2),
}


def names() -> list[str]:
    """Models that :func:`get` knows; the GPT-shaped ones are ``GPTConfig.presets()``."""
    return list(_MADE)


def get(name: str) -> ArchitectureSpec:
    """A model by name."""
    if str(name).lower() not in _MADE:
        raise InvalidValueError(f"there is no model {brief(name)}: one of {', '.join(_MADE)} would be right")
    return _MADE[str(name).lower()]()
