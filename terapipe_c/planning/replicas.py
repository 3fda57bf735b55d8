"""Data parallelism: what adding up gradients costs, and what replicas spare each other that shard the optimizer.

The seconds are parts of OPT's, or go beside the backward; csrc/plan/judge_times.c has the same for its candidates.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import KINDS, Cluster, GPTConfig
from ..cost import CostModel
from ..partition import block_params, updated_params
from ..schedule import BESIDE, GATHER, LAST, SUM

ALONE = "shard_optimizer: one replica with one copy of the model has nobody to share moments with, so each rank has all of its own"
Cut = tuple[tuple[int, int], ...]
_Line = tuple[float, float]
_Gather = tuple[float, float, float]
# Of the seconds of an update by parameter those that each replica needs for all of them where each updates a part: to lay out
# anew what products read. CPU: 0.222 of 0.857 ns (sums of squares 0.17, AdamW 0.465; one core of an AMD Zen 5, n_embd 256 to
# 1024, arrays of 64 MiB). CUDA: 6 of the 34 bytes that an update reads and writes, for copies in bf16; in fp32 there are none.
_LAYS_OUT = {("cpu", "float32"): 0.26, ("cuda", "bf16"): 6 / 34, ("cuda", "float32"): 0.0}


@dataclass(frozen=True)
class Replicas:
    """Data parallelism: how many pipelines, and the link on which they sum their gradients.

    An all-reduce of n bytes among d replicas takes ``2 (d - 1) (latency + n / (d bandwidth))`` seconds: reduce-scatter and
    all-gather, d - 1 messages each (Patarasu & Yuan 2009); and the seconds of copies that ranks make at both ends. It is counted
    once a step on every stage, before its update; ``beside``, of attentions and FFNs as each has gone back last, beside other work.
    ``shards``: each updates a part, so the all-gather is of values, and comes behind it.
    """

    count: int = 1
    latency_s: float = 0.0
    bandwidth_Bps: float = 1.0
    copy_byte_s: float = 0.0      #: seconds a byte of each copy that a rank makes itself
    copies: int = 1               #: copies of the model in each replica (Chimera: 2); all of them sum their gradients
    beside: bool = False          #: a rank adds up beside its work; of one copy, and but for the embedding and the head
    shards: bool = False          #: each has AdamW's moments of a part, where there are several
    spared_param_s: float = 0.0   #: seconds of an update that nobody spends on another's part, by parameter

    @classmethod
    def of(cls, cluster: Cluster, ranks: int, count: int, costs: CostModel, shards: bool = False) -> Replicas:
        """``count`` pipelines of ``ranks`` ranks on a cluster. CPUs copy messages into and out of rings; GPUs need not."""
        near = ranks * count <= (cluster.devices_per_node or cluster.num_devices)
        link = cluster.near_link if near else (cluster.link_latency_s, cluster.link_bandwidth_Bps)
        copy_byte_s, beside = (costs.copy_byte_s, cluster.sums_beside) if costs.backend == "cpu" else (0.0, False)
        return cls(count, *link, copy_byte_s, beside=beside, shards=shards,
                   spared_param_s=costs.optimizer_param_s * (1 - _LAYS_OUT[costs.backend, costs.dtype]))

    @property
    def members(self) -> int:
        """Members of an all-reduce."""
        return self.count * self.copies

    @property
    def overlaps(self) -> bool:
        """Are most sums made beside the work?"""
        return self.beside and self.count > 1 and self.copies == 1

    def seconds(self, size: Any) -> Any:
        """Seconds of an all-reduce of ``size`` bytes."""
        byte_s = 1 / self.bandwidth_Bps + 2 * self.copy_byte_s
        return 2 * (self.members - 1) * (self.latency_s + size / self.members * byte_s) if self.members > 1 else 0.0

    def sums_s(self, params: Any) -> Any:
        """Seconds in which gradients of so many parameters are summed: where each has what it needs of them."""
        return self.seconds(4.0 * params) / (2 if self.shards else 1)

    def gather_s(self, params: Any) -> Any:
        """Seconds in which the values of so many parameters come from who has updated them."""
        return self.seconds(4.0 * params) / 2 if self.shards else 0.0 * params

    @property
    def spares_s(self) -> float:
        """Seconds of an update by parameter, of which others do most."""
        return self.spared_param_s * (1 - 1 / self.members) if self.shards else 0.0

    @property
    def param_bytes(self) -> float:
        """Bytes that a rank keeps of a parameter of its stage, in fp32: value, gradient and two moments, or a part of these."""
        return 8.0 + 8.0 / (self.members if self.shards else 1)

    @property
    def lines(self) -> tuple[_Line, _Line, _Gather, _Gather, bool]:
        """For ``CostModel.judge``: of one copy of the model in each and of two the seconds of the sums (fixed, by parameter of a
        stage); the same of values that are gathered, and what an update is spared by parameter; whether sums go beside the work."""
        one, two = (replace(self, copies=copies) for copies in (1, 2))

        def line(seconds: Callable[[float], float]) -> _Line:
            return float(seconds(0.0)), float(seconds(1.0) - seconds(0.0))

        return (line(one.sums_s), line(two.sums_s), (*line(one.gather_s), one.spares_s), (*line(two.gather_s), two.spares_s),
                self.beside)


def _inner(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """[stages, kinds] without embeddings and heads."""
    return counts * np.array([kind in ("attention", "ffn") for kind in KINDS], np.int32)


def _sums_s(ring: Replicas, params: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(params > 0, ring.sums_s(params), 0.0)


def sums_behind(model: GPTConfig, counts: NDArray[np.int32], ring: Replicas) -> NDArray[np.float64]:
    """[stages] seconds in which replicas add up what they do not beside their work. counts: blocks of each kind."""
    params = updated_params(model, counts)
    return _sums_s(ring, params - _inner(counts) @ block_params(model) if ring.overlaps else params)


def gathers(model: GPTConfig, counts: NDArray[np.int32], ring: Replicas) -> NDArray[np.float64]:
    """[stages] seconds in which replicas that shard the optimizer gather values."""
    params = updated_params(model, counts)
    return np.where(params > 0, ring.gather_s(params), 0.0)


def update_more(model: GPTConfig, counts: NDArray[np.int32], ring: Replicas) -> NDArray[np.float64]:
    """[stages] seconds that replicas add to an update: sums behind the work and values that are gathered, less what others do."""
    return sums_behind(model, counts, ring) + gathers(model, counts, ring) - ring.spares_s * updated_params(model, counts)


def sums_of(model: GPTConfig, partition: Cut, counts: NDArray[np.int32], ring: Replicas) -> dict[str, NDArray[np.float64]]:
    """Seconds of the replicas' sums on each stage, as ``Program.makespan`` takes them."""
    out = {SUM: sums_behind(model, counts, ring)} | ({GATHER: gathers(model, counts, ring)} if ring.shards else {})
    if ring.overlaps:
        each = block_params(model)
        kinds = [[KINDS.index(block.kind) for block in model.blocks[a:e]] for a, e in partition]
        last = [next((each[k] for k in of if KINDS[k] in ("attention", "ffn")), 0.0) for of in kinds]
        out |= {BESIDE: _sums_s(ring, _inner(counts) @ each), LAST: _sums_s(ring, np.array(last, np.float64))}
    return out
