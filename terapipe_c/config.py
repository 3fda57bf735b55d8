"""What is trained and where: :class:`GPTConfig` describes the model, :class:`Cluster` the machines."""
from __future__ import annotations

import decimal
import html
import math
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._core import ExecutionError, InvalidValueError, memory_room

if TYPE_CHECKING:
    from .cost import CostModel
    from .planners.nodes import Nodes

__all__ = ["Block", "Cluster", "GPTConfig"]

KINDS = ("embedding", "attention", "ffn", "head")
LONG = 1e250             # most seconds: their sums and products stay finite


class Block(NamedTuple):
    """One entry of ``GPTConfig.blocks``: what a stage boundary may fall between."""

    kind: str   #: "embedding", "attention", "ffn" or "head"
    layer: int  #: index of the layer; -1 for the embedding and the head
    name: str   #: "embedding", "h.0.attention", "h.0.ffn", ..., "head"


# n_layer, n_head, n_embd, vocab_size, block_size. GPT-2: Radford et al. 2019 (checked against the published counts);
# gpt2-1.3b: AutoPipe, Table I; gpt3-*: TeraPipe, Table 1 (heads of 128), GPT-2's vocabulary, 2048 positions.
_PRESETS: dict[str, tuple[int, int, int, int, int]] = {
    "gpt2-124m": (12, 12, 768, 50257, 1024),
    "gpt2-345m": (24, 16, 1024, 50257, 1024),
    "gpt2-762m": (36, 20, 1280, 50257, 1024),
    "gpt2-1.3b": (24, 16, 2048, 50257, 1024),
    "gpt2-1558m": (48, 25, 1600, 50257, 1024),
    "gpt3-1b": (24, 16, 2048, 50257, 2048),
    "gpt3-13b": (40, 40, 5120, 50257, 2048),
    "gpt3-44b": (96, 48, 6144, 50257, 2048),
    "gpt3-175b": (96, 96, 12288, 50257, 2048),
}
_ALIASES = {"gpt2": "gpt2-124m", "gpt2-medium": "gpt2-345m", "gpt2-355m": "gpt2-345m", "gpt2-large": "gpt2-762m",
            "gpt2-774m": "gpt2-762m", "gpt2-770m": "gpt2-762m", "gpt2-xl": "gpt2-1558m", "gpt2-1.5b": "gpt2-1558m",
            "gpt3": "gpt3-175b"}


def whole(name: str, value: Any, least: int = 1, most: int = 2**63 - 1) -> int:
    """``value`` as an int from ``least`` to ``most``, or a ValueError that names it."""
    if isinstance(value, bool):
        raise InvalidValueError(f"{name} is {value!r}: a whole number would be right")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidValueError(f"{name} is {brief(value)}: a whole number would be right") from None
    if number < least:
        raise InvalidValueError(f"{name} is {brief(number)}: at least {least} would be right")
    if number > most:
        raise InvalidValueError(f"{name} is {brief(number)}: at most {most} would be right")
    return number


def brief(value: Any) -> str:
    """A value as a message shows it: its beginning, if it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1} or more"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_of(name: str, value: Any, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """``value``, which is one of these words; else a ValueError that lists them, first the one that is spelt alike but for case
    and hyphens, or that other software calls so (``elsewhere``: by its :func:`letters`)."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        alike = {letters(word): word for word in words} | dict(elsewhere or {})
        meant = alike.get(letters(value)) if isinstance(value, str) else None
        first = "" if meant is None or len(words) < 3 else f"{meant} would be right, or another "
        raise InvalidValueError(f"{name} is {brief(value)}: {first}{'one of ' if len(words) > 2 else ''}"
                                f"{(' or ' if len(words) == 2 else ', ').join(words)}{'' if first else ' would be right'}")
    return str(value)


def letters(word: str) -> str:
    """Of a name, what tells it from others however it is written."""
    return "".join(letter for letter in word.lower() if letter.isalnum())


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool: True, False, 1 or 0."""
    if not isinstance(value, (bool, np.bool_, int, np.integer)) or value not in (0, 1):
        raise InvalidValueError(f"{name} is {brief(value)}: True or False would be right")
    return bool(value)


def real(name: str, value: Any, *, zero: bool = False) -> float:
    """``value`` as a finite float above zero (or from zero on), or a ValueError that names it."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)) or np.iscomplexobj(value):
            raise TypeError
        if isinstance(value, np.ndarray) and (value.ndim or value.dtype.kind in "bSTU"):     # of one element NumPy before 2.4 makes
            raise TypeError                                                                 # a number, of a word any release
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidValueError(f"{name} is {brief(value)}: a number would be right") from None
    except OverflowError:
        raise InvalidValueError(f"{name} is a whole number beyond {sys.float_info.max:.3g}: a smaller one would be right") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise InvalidValueError(f"{name} is {brief(value)}: a finite number {'from' if zero else 'above'} 0 would be right")
    return number


def unmasked(name: str, value: Any) -> None:
    """An error that names the first masked cell, if there is one: NumPy takes what lies below its mask, which is anything."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        cell = ", ".join(map(str, np.argwhere(np.ma.getmaskarray(value))[0])) if value.ndim else ""
        raise InvalidValueError(f"{name}{cell and f'[{cell}]'} is masked: a number, as .filled() puts there, would be right")


def no_divisor(name: str, value: int, of: str, total: int) -> InvalidValueError:
    """The error of a ``value`` that does not divide ``total``; it names the nearest number that does."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0] if total < 1 << 32 else [1]
    nearest = min((n for d in small for n in (d, total // d)), key=lambda n: (abs(n - value), n))
    return InvalidValueError(f"{name} is {value}, which does not divide {of} = {total}: {nearest} would be right")


def timeout(name: str, value: Any) -> float:
    """``value`` as seconds below 1e9, 0 among them, or a ValueError that names it."""
    number = real(name, value, zero=True)
    if number >= 1e9:
        raise InvalidValueError(f"{name} is {number:g}: less than 1e9 seconds would be right")
    return number


def _no_extra_keys(kind: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidValueError(f"{kind.__name__} cannot be made from {type(data).__name__}: a dict would be right")
    known = {f.name for f in fields(kind)}
    extra = sorted(set(data) - known)
    if extra:
        raise InvalidValueError(f"{kind.__name__} has no field {extra[0]!r}; its fields are {', '.join(sorted(known))}")
    return data


def counted(count: int, noun: str) -> str:
    """1, "rank" -> '1 rank'; 2 -> '2 ranks'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def human_count(value: float) -> str:
    """1234567 -> '1.23M', and 999950 -> '1M', by what three digits leave of it: not 1e+03k."""
    rounded = float(f"{value:.3g}")
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= limit:
            return f"{rounded / limit:.3g}{unit}"
    return f"{value:.0f}"


def human_bytes(value: float) -> str:
    """1536 -> '1.50 KiB', and 1048575 -> '1.00 MiB', not 1024.00 KiB. bytes() of _page.py is the same."""
    if not math.isfinite(value) or abs(round(value)) < 1024:
        return f"{value:.0f} B"
    value, units = float(value) / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(rounded := decimal.Decimal(value).quantize(_HUNDREDTH, context=_LONG)) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{rounded} {units[0]}"


_HUNDREDTH = decimal.Decimal("0.01")
_FOUR, _LONG = (decimal.Context(prec=digits, rounding=decimal.ROUND_HALF_UP) for digits in (4, 400))     # as JavaScript rounds


def human_seconds(value: float) -> str:
    """0.00123 -> '1.23 ms'. Four digits and then the unit, or what rounds to 1 ms would be 1000 us; time() of _page.py is the same.
    Below a picosecond, which no clock resolves, is 0."""
    if not math.isfinite(value):
        return f"{value} s"
    rounded = _FOUR.create_decimal_from_float(float(value))
    power = rounded.adjusted()                                       # of ten, of the first digit
    if not rounded or power < -12:
        return "0 s"
    if power >= 21:
        return f"{float(rounded):g} s"
    digits, unit = next((pair for pair in ((0, "s"), (3, "ms"), (6, "us")) if power >= -pair[0]), (9, "ns"))
    return f"{_FOUR.normalize(_FOUR.scaleb(rounded, digits)):f} {unit}"


def human_rate(value: float, unit: str) -> str:
    """4.5e11, "B/s" -> '450 GB/s'; decimal, as links and peaks are given."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def gap_above(seconds: float, bound_s: float, proven: bool = False) -> float:
    """(seconds - bound) / bound. Of a bound of 0 s, by which nothing is proven, infinite, unless the seconds are 0 or proven."""
    if bound_s <= 0.0:
        return 0.0 if proven or seconds <= 0.0 else math.inf
    return (seconds - bound_s) / bound_s


def human_gap(value: float, sign: str = "") -> str:
    """0.0123 -> '1.2 %', 1.68 -> '168 %'; what only rounding left is 0. sign: "+" where a positive one is to be seen."""
    percent = 100 * value if abs(value) > 1e-9 else 0.0
    return f"{percent:{sign}{'.0f' if abs(percent) >= 99.5 else '.2g'}} %"      # two digits of more would be written 1.7e+02


def html_table(title: str, rows: list[tuple[str, str]]) -> str:
    """A two-column table for notebooks."""
    body = "".join(f"<tr><th style='text-align:left'>{html.escape(k)}</th><td style='text-align:left'>{html.escape(v)}"
                   "</td></tr>" for k, v in rows)
    return f"<table><caption style='text-align:left'><b>{html.escape(title)}</b></caption>{body}</table>"


@dataclass(frozen=True)
class GPTConfig:
    """A GPT-2: learned positions, pre-LayerNorm blocks, causal attention, GELU (tanh), final LayerNorm, linear head.

    Args:
        n_layer: layers, each an attention block and a feed-forward block.
        n_head: attention heads; divides ``n_embd``.
        n_embd: width of the residual stream.
        vocab_size: token values run from 0 to ``vocab_size - 1``.
        block_size: longest sequence, in tokens.
        bias: biases in the linear layers and LayerNorms.
        tie_weights: the head multiplies with the token embedding.

    >>> GPTConfig.preset("gpt2-124m").num_params
    124439808
    """

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int
    bias: bool = True
    tie_weights: bool = True

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size"):
            object.__setattr__(self, name, whole(name, getattr(self, name), most=2**31 - 1))
        for name in ("bias", "tie_weights"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        if self.n_embd % self.n_head:
            raise no_divisor("n_head", self.n_head, "n_embd", self.n_embd)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """A published model by name (``GPTConfig.presets()`` lists them); ``changes`` replace single fields."""
        key = str(name).lower()
        key = _ALIASES.get(key, key)
        if key not in _PRESETS:
            raise InvalidValueError(f"there is no preset {brief(name)}: one of {', '.join(_PRESETS)} would be right")
        shape = dict(zip(("n_layer", "n_head", "n_embd", "vocab_size", "block_size"), _PRESETS[key], strict=True))
        return cls(**_no_extra_keys(cls, {**shape, **changes}))

    @staticmethod
    def presets() -> list[str]:
        """Names that :meth:`preset` knows."""
        return list(_PRESETS)

    @cached_property
    def num_params(self) -> int:
        """Parameters; a tied embedding counts once."""
        e, bias = self.n_embd, int(self.bias)
        layer = 12 * e * e + 2 * e + bias * (9 * e + 2 * e)
        embeddings = (self.vocab_size + self.block_size) * e
        head = e + bias * e + (0 if self.tie_weights else self.vocab_size * e)
        return embeddings + self.n_layer * layer + head

    def block_params(self, kind: str) -> int:
        """Parameters of one block of this kind. A tied head counts its final LayerNorm only."""
        e, bias = self.n_embd, int(self.bias)
        sizes = {"embedding": (self.vocab_size + self.block_size) * e,
                 "attention": 4 * e * e + e + bias * (4 * e + e),
                 "ffn": 8 * e * e + e + bias * (5 * e + e),
                 "head": e + bias * e + (0 if self.tie_weights else self.vocab_size * e)}
        return sizes[one_of("kind", kind, KINDS)]

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs (2 per multiply-add) of one token's forward and backward, averaged over a sequence of ``seq_len``.

        6 per parameter that multiplies (the head does, the embeddings do not) + causal attention,
        ``6 * n_layer * n_embd * (seq_len + 1)``.
        """
        seq_len = whole("seq_len", seq_len)
        multiply = 12 * self.n_layer * self.n_embd**2 + self.vocab_size * self.n_embd
        return 6.0 * multiply + 6.0 * self.n_layer * self.n_embd * (seq_len + 1)

    @property
    def num_blocks(self) -> int:
        """Blocks that a stage boundary may fall between: ``2 * n_layer + 2``."""
        return 2 * self.n_layer + 2

    @cached_property
    def blocks(self) -> list[Block]:
        """Embedding, then attention and feed-forward of every layer, then the head."""
        middle = [Block(kind, i, f"h.{i}.{kind}") for i in range(self.n_layer) for kind in ("attention", "ffn")]
        return [Block("embedding", -1, "embedding"), *middle, Block("head", -1, "head")]

    def nodes(self, costs: CostModel | None = None, *, micro_batch: int = 1, seq_len: int | None = None,
              cluster: Cluster | None = None, value_bytes: float = 4.0, optimizer_bytes_per_param: float = 8.0) -> Nodes:
        """The model at tensor granularity, for ``tp.planners.dawnpiper``: embedding, then ln_1, qkv, attention, proj,
        residual, ln_2, fc, gelu, proj, residual of every layer, then ln_f and head. A tied embedding's gradient and moments are the
        head's: what its first node keeps of it, the values, is among its ``optimizer_bytes``.

        Args:
            costs: seconds of every block (None: ``CostModel.analytic``); a block's are shared out among its nodes by what
                each computes and moves, so that they sum to the block's.
            micro_batch, seq_len: sequences, and tokens of each (None: ``block_size``).
            cluster: whose peak and memory bandwidth weigh computing against moving (None: one core of a CPU).
            value_bytes, optimizer_bytes_per_param: bytes of a value, and of a parameter's optimiser state (AdamW, float32: 8).
        """
        from .planners.gpt import gpt_nodes

        return gpt_nodes(self, costs, micro_batch, seq_len, cluster, value_bytes, optimizer_bytes_per_param)

    def to_dict(self) -> dict[str, Any]:
        """Fields by name; ``GPTConfig.from_dict`` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GPTConfig:
        """The inverse of :meth:`to_dict`; missing and unknown fields are named in a ValueError."""
        data = _no_extra_keys(cls, data)
        missing = [n for n in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size") if n not in data]
        if missing:
            raise InvalidValueError(f"GPTConfig lacks {missing[0]!r}")
        return cls(**data)

    def __repr__(self) -> str:
        extra = ("" if self.bias else ", bias=False") + ("" if self.tie_weights else ", tie_weights=False")
        return (f"GPTConfig(n_layer={self.n_layer}, n_head={self.n_head}, n_embd={self.n_embd}, "
                f"vocab_size={self.vocab_size}, block_size={self.block_size}{extra})")

    def _repr_html_(self) -> str:
        return html_table(f"GPT-2 with {human_count(self.num_params)} parameters", [
            ("layers", f"{self.n_layer}"), ("width", f"{self.n_embd} ({self.n_head} heads of {self.n_embd // self.n_head})"),
            ("vocabulary", f"{self.vocab_size}{' (tied)' if self.tie_weights else ''}"),
            ("longest sequence", f"{self.block_size}"),
            ("FLOPs a token", f"{self.flops_per_token(self.block_size):.3g} at {self.block_size} tokens")])


def _local_memory_bytes() -> int:
    """The machine's, or the limit of this process's control group where that is less. Not what is available: a plan must not
    depend on the moment."""
    total = memory_room()[0]
    return 16 * 10**9 if total is None else total              # as a Cluster's, where the system does not say


@dataclass(frozen=True)
class Cluster:
    """Devices that run one rank each, and the links between them.

    Args:
        num_devices: devices in all.
        devices_per_node: devices that share a node; default: all of them.
        memory_bytes: memory of ONE device.
        link_latency_s: seconds of an empty message between neighbours.
        link_bandwidth_Bps: bytes a second of one link, each way.
        peak_flops: float32 FLOPs a second of one device that kernels reach; None: 60e9, one core with AVX2 or AVX-512.
        memory_bandwidth_Bps: bytes a second one device reads from its memory; None: peak_flops / 150, at
            least 10e9, one core's share.
        host_bandwidth_Bps: bytes a second that one rank swaps at, out or in: to its host's memory, or from the CPU to a file; None:
            nothing is swapped.
        swaps_beside: a rank on a CPU swaps beside its work, by a thread for which its device has a core to spare; False: it makes
            the copies itself. On CUDA a stream of its own makes them, always.
        sums_beside: a rank on a CPU adds up its replicas' gradients beside its backward (attentions' and FFNs', as each has gone
            back for the last time), by a thread for which its device has a core to spare; False: behind it, itself.
        node_link_latency_s, node_link_bandwidth_Bps: of the links within a node, such as NVLink, where they are other ones: link_*
            are then those between nodes. Of messages within a node costs that are given say more. None, both: links are alike.
    """

    num_devices: int
    devices_per_node: int | None = None
    memory_bytes: int = 16 * 10**9
    link_latency_s: float = 5e-6
    link_bandwidth_Bps: float = 12.5e9
    peak_flops: float | None = None
    memory_bandwidth_Bps: float | None = None
    is_local: bool = field(default=False, compare=True)
    host_bandwidth_Bps: float | None = None
    node_link_latency_s: float | None = None
    node_link_bandwidth_Bps: float | None = None
    swaps_beside: bool = False
    sums_beside: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "num_devices", whole("num_devices", self.num_devices))
        per_node = self.num_devices if self.devices_per_node is None else self.devices_per_node
        put(self, "devices_per_node", whole("devices_per_node", per_node))
        if self.num_devices % self.devices_per_node and self.devices_per_node < self.num_devices:  # type: ignore[operator]
            raise no_divisor("devices_per_node", self.devices_per_node, "num_devices", self.num_devices)  # type: ignore[arg-type]
        put(self, "memory_bytes", max(1, int(real("memory_bytes", self.memory_bytes))))
        put(self, "is_local", flag("is_local", self.is_local))
        for name in ("swaps_beside", "sums_beside"):
            put(self, name, flag(name, getattr(self, name)))
        put(self, "link_latency_s", real("link_latency_s", self.link_latency_s, zero=True))
        put(self, "link_bandwidth_Bps", real("link_bandwidth_Bps", self.link_bandwidth_Bps))
        for name in ("peak_flops", "memory_bandwidth_Bps", "host_bandwidth_Bps", "node_link_latency_s", "node_link_bandwidth_Bps"):
            if getattr(self, name) is not None:
                put(self, name, real(name, getattr(self, name), zero=name == "node_link_latency_s"))

    @property
    def tells_nodes_apart(self) -> bool:
        """Are links within a node other ones than those between nodes?"""
        return self.node_link_latency_s is not None or self.node_link_bandwidth_Bps is not None

    @property
    def near_link(self) -> tuple[float, float]:
        """(latency in seconds, bytes a second) of the link between devices of one node."""
        latency, bandwidth = self.node_link_latency_s, self.node_link_bandwidth_Bps
        return (self.link_latency_s if latency is None else latency, self.link_bandwidth_Bps if bandwidth is None else bandwidth)

    @classmethod
    def local(cls, num_devices: int | None = None, *, swap_folder: str | os.PathLike[str] | None = None,
              backend: str = "cpu") -> Cluster:
        """This machine: num_devices devices (None: one per whole core that this process may use, by its control group's limit too),
        each with an equal share of the memory.

        backend: "cuda": of GPUs (None: all that this process may use), each with the memory of the smallest; more devices than GPUs
        share it, as ranks do by ``launch(..., devices=[...])``. ExecutionError where there is none.

        swap_folder: plans may swap; host_bandwidth_Bps is what all devices at once measure for files in this folder, each
        copying 128 MiB out and in, six times. Runs swap to their own folder, or to the one that TERAPIPE_SWAP_DIR names: it
        should be of the same disk. Where there are two cores a device, ranks of one thread swap beside their work
        (swaps_beside), and add up replicas' gradients beside it (sums_beside): of more threads (``launch(threads_per_rank=...)``)
        each would have too few, which a report says.
        """
        from ._files import check_writable, path_of
        from .doctor import usable_cores
        from .profiling import swap_bandwidth

        if one_of("backend", backend, ("cpu", "cuda")) == "cuda":
            if swap_folder is not None:
                raise InvalidValueError("swap_folder is of a CPU's ranks: those on CUDA swap to their host's memory, so "
                                        "Cluster(host_bandwidth_Bps=...) would be right")
            return cls._of_gpus(None if num_devices is None else whole("num_devices", num_devices))
        cores = usable_cores()
        folder = None if swap_folder is None else path_of("swap_folder", swap_folder, look=False)
        if folder is not None:
            check_writable("swap_folder", folder)
        devices = cores if num_devices is None else whole("num_devices", num_devices)
        # Shared memory between two processes: latency and bandwidth of a ring of ours, measured by tp.profile for a run.
        return cls(num_devices=devices, devices_per_node=devices, memory_bytes=max(1, _local_memory_bytes() // devices),
                   link_latency_s=2e-6, link_bandwidth_Bps=5e9, is_local=True,
                   host_bandwidth_Bps=None if folder is None else swap_bandwidth(folder, min(devices, cores)),
                   swaps_beside=folder is not None and cores >= 2 * devices, sums_beside=cores >= 2 * devices)

    @classmethod
    def _of_gpus(cls, num_devices: int | None) -> Cluster:
        from . import cuda

        cuda.load()     # or GPUs elsewhere cannot be planned for either
        if why := cuda.why_not():
            raise ExecutionError(f"this machine has no GPU for a plan: {why}; of GPUs elsewhere Cluster(num_devices=...), or "
                                 "--devices, would be right")
        gpus = cuda.devices()
        devices = len(gpus) if num_devices is None else num_devices
        sharing = -(-devices // len(gpus))
        # All of it, not what is free: a plan must not depend on the moment. Links as elsewhere, until costs say more.
        return cls(num_devices=devices, memory_bytes=max(1, min(gpu.total_bytes for gpu in gpus) // sharing), is_local=True)

    @classmethod
    def preset(cls, device: str, num_devices: int = 1, *, dtype: str = "fp32", efficiency: float = 0.5,
               bandwidth_efficiency: float = 0.8, **changes: Any) -> Cluster:
        """``num_devices`` of a published device (``tp.devices.names()``) in one node; with ``devices_per_node`` in nodes, joined by
        ``link_bandwidth_Bps`` (and ``link_latency_s``), within which is the sheet's link.

        ``dtype``: whose peak FLOPs, "fp32", "fp16" or "bf16". ``efficiency`` and ``bandwidth_efficiency``, the shares of the
        sheet's peaks that kernels reach, are assumptions.
        ``changes`` replace single fields. Plans count a CPU's bytes in float32 unless they are told ``backend="cuda"``.
        """
        from .devices import get, share

        sheet = get(device)
        own = {"memory_bytes": sheet.memory_bytes, "link_bandwidth_Bps": sheet.link_bandwidth_Bps,
               "peak_flops": sheet.peak(dtype) * share("efficiency", efficiency),
               "memory_bandwidth_Bps": sheet.memory_bandwidth_Bps * share("bandwidth_efficiency", bandwidth_efficiency)}
        per_node = changes.get("devices_per_node")      # None: all of them
        several = per_node is not None and whole("devices_per_node", per_node) < whole("num_devices", num_devices)
        if several and "link_bandwidth_Bps" in changes:
            own |= {"node_link_bandwidth_Bps": sheet.link_bandwidth_Bps, "node_link_latency_s": cls.link_latency_s}
        return cls(**_no_extra_keys(cls, {"num_devices": num_devices, **own, **changes}))

    def to_dict(self) -> dict[str, Any]:
        """Fields by name; ``Cluster.from_dict`` reads them back."""
        given = asdict(self)          # without what older files do not know either, so that their digests hold
        return {k: v for k, v in given.items()
                if not (v is None and k.startswith("node_link_")) and not (v is False and k in ("swaps_beside", "sums_beside"))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cluster:
        """The inverse of :meth:`to_dict`."""
        data = _no_extra_keys(cls, data)
        if "num_devices" not in data:
            raise InvalidValueError("Cluster lacks 'num_devices'")
        return cls(**data)

    def __repr__(self) -> str:
        head = "Cluster.local(): " if self.is_local else "Cluster: "
        flops = "" if self.peak_flops is None else f" and {human_rate(self.peak_flops, 'FLOP/s')}"
        return (f"<{head}{counted(self.num_devices, 'device')}, {self.devices_per_node} a node, "
                f"{human_bytes(self.memory_bytes)}{flops} each, links of {self._links()}>")

    def _links(self) -> str:
        near, far = (f"{human_seconds(latency)} and {human_rate(bandwidth, 'B/s')}" for latency, bandwidth in
                     (self.near_link, (self.link_latency_s, self.link_bandwidth_Bps)))
        return f"{near} in a node, {far} between nodes" if self.tells_nodes_apart else far

    def _repr_html_(self) -> str:
        return html_table("This machine" if self.is_local else "Cluster", [
            ("devices", f"{self.num_devices} ({self.devices_per_node} a node)"),
            ("memory", f"{human_bytes(self.memory_bytes)} a device"),
            ("link", self._links()),
            ("peak", "default" if self.peak_flops is None else human_rate(self.peak_flops, "FLOP/s"))])
