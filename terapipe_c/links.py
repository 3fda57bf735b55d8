"""Which link does each message of a pipeline take? One within a node or one between nodes, where the cluster tells them apart."""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import Cluster

__all__ = ["Links", "rank_of"]


@dataclass(frozen=True)
class Links:
    """The links between a pipeline's ranks. Seconds of a message within a node are the costs', between nodes the cluster's.

    Rank r of replica q is device q * ranks + r, as ``launch`` and ``train`` place them, and devices fill one node after the
    other. Replicas wait for each other, so a hop leaves the node where it does in any of them.
    """

    far: tuple[bool, ...] = ()    #: [ranks] is the next rank (after the last one rank 0) on another node? Empty: links are alike
    latency_s: float = 0.0        #: seconds of an empty message between nodes
    byte_s: float = 0.0           #: and for each byte in it

    @classmethod
    def of(cls, cluster: Cluster, ranks: int, replicas: int) -> Links:
        """The links among the first ``ranks * replicas`` devices."""
        size = cluster.devices_per_node or cluster.num_devices
        if not cluster.tells_nodes_apart or ranks * replicas <= size:
            return cls()
        node = np.arange(ranks * replicas).reshape(replicas, ranks) // size
        far = (node != np.roll(node, -1, axis=1)).any(axis=0)
        return cls(tuple(far.tolist()), cluster.link_latency_s, 1 / cluster.link_bandwidth_Bps) if far.any() else cls()

    def leaving(self, home: Sequence[int]) -> NDArray[np.bool_]:
        """[stages] do messages between this stage and the next leave the node? home: [stages] ranks, neighbours or the same."""
        far = np.zeros(len(home), np.bool_)
        for k, (here, there) in enumerate(itertools.pairwise(home)):
            if self.far and here != there:
                far[k] = self.far[-1 if abs(here - there) > 1 else min(here, there)]
        return far

    def closes(self, home: Sequence[int]) -> bool:
        """Does a message between the last stage and the first leave the node? home: [stages] ranks; none, or both ends on one rank
        (they send nothing): between the last rank and the first."""
        ends = [home[0], home[-1]] if home and home[0] != home[-1] else [len(self.far) - 1, 0]
        return bool(self.far) and bool(self.leaving(ends)[0] if len(self.far) > 1 else self.far[0])

    def share(self, chunks: int) -> float:
        """The share of messages between stages that leave their node, where stages go round the ranks ``chunks`` times."""
        hops = [*(self.far * chunks)][:-1]
        return sum(hops) / len(hops) if hops else 0.0


def rank_of(ranks: int, stages: int, zigzag: bool) -> list[int]:
    """[stages] ranks: round and round, or down and up again."""
    turn = [*range(ranks), *(reversed(range(ranks)) if zigzag else ())]
    return [turn[k % len(turn)] for k in range(stages)]


def timed_apart(links: Links, home: Sequence[int], size: NDArray[np.float64], latency_s: float, byte_s: float) -> dict[str, Any]:
    """Seconds of messages of ``size`` bytes [units]: "comm" and "comm.back" [stages, units], "comm.latency" and
    "comm.latency.back" [stages]."""
    far = links.leaving(home)
    latency = np.where(far, links.latency_s, latency_s)
    forward = latency[:, None] + np.where(far, links.byte_s, byte_s)[:, None] * size
    return {"comm": forward, "comm.back": np.vstack([np.zeros_like(forward[:1]), forward[:-1]]), "comm.latency": latency,
            "comm.latency.back": np.concatenate([[0.0], latency[:-1]])}


def of_copies(thin: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``CostModel.timed``'s results for each copy of a model, joined along the stages."""
    return {k: np.concatenate([one[k] for one in thin]) if len(thin) > 1 and np.ndim(v) > 0 else v for k, v in thin[0].items()}
