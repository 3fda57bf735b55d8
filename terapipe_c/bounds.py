"""Seconds that no plan of a number of ranks, chunks and replicas is faster than: what ``planner="auto"`` need not look at."""
from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import planners
from .cost import PHASES, CostModel
from .request import Request
from .search import kind_seconds, whole_sequences

__all__ = ["bound_s", "least_work_s", "whole_bound_s"]

_GROUPS = 256           # micro-batch sizes that are looked at; where there are more nothing is said of the work


@dataclass(frozen=True)
class _Weighted:
    """A mix of (kind, phase) as the slice planner reads it."""

    costs: CostModel
    weights: NDArray[np.float64]
    batch: int

    def slice_cost(self, seq_len: int, granularity: int = 1, phase: str = "both") -> dict[str, Any]:
        return self.costs.weighted_slice_cost(self.weights, seq_len, granularity, self.batch)


def least_work_s(request: Request, share: int) -> float:
    """Seconds that one of ``share`` sequences takes at least, on all ranks together, however it is sliced and batched.

    F and I of all blocks but the head: the least sum over slicings, for the best micro-batch (exact: slice_tokens with one
    stage). The head and all W: the same apart, because a micro-batch of several sequences and several slices does its head
    and its W as if it were one slice, which is one of those slicings.
    """
    if request.slicing is not None:
        d = request.costs.even.durations(partition=[(0, request.model.num_blocks)], slicing=request.slicing, model=request.model)
        fixed = len(PHASES) * request.costs.overhead_s * d["F"].shape[1]       # bound_s adds it for every stage
        return max(0.0, float(sum(d[p].sum() for p in PHASES) - fixed)) / share * (1 - 1e-12)
    most = min(share, request.costs.known_batch)
    if most > _GROUPS:
        return 0.0
    sliced, whole = np.zeros((4, 3)), np.zeros((4, 3))
    blocks = np.array([1.0, request.model.n_layer, request.model.n_layer, 1.0])
    whole[:, 2], whole[3] = blocks, blocks[3]
    sliced[:3, :2] = blocks[:3, None]
    least = 0.0
    for weights in (sliced, whole):
        least += min(planners.slice_tokens(_Weighted(request.costs, weights, b), 1, seq_len=request.seq_len,
                                           granularity=request.unit).lower_bound_s / b for b in range(1, most + 1))
    return float(least * (1 - 1e-12))


def bound_s(request: Request, ranks: int, chunks: int, replicas: int, least_s: float, copies: int = 1) -> float:
    """No plan of this configuration is faster: what the mean rank must do, and the message it must wait for first.

    A step takes at least the mean over the ranks of what each does: its part of the work of its replica's sequences
    (``least_s`` each), what every instruction of its chunks costs besides, its updates, and its share of the ring's all-reduce;
    rank r cannot begin before r messages. Of two copies of the model in opposite directions a rank has a stage each: it updates
    and adds both, a sequence's work it does for one of them, and it begins when the nearer end has reached it.
    """
    costs, params, share = request.costs, float(request.model.num_params), request.batch // replicas
    link = replace(replace(request, replicas=replicas).link(ranks), copies=copies)
    units = -(-share // costs.known_batch) if request.slicing is None else sum(len(lengths) for _, lengths in request.slicing)
    fixed = chunks * len(PHASES) * costs.overhead_s * units * (1 - 1e-12)
    update: float = (costs.optimizer_stage_s * chunks + costs.optimizer_param_s * params / ranks) * copies
    ring = float(link.seconds(4.0 * params / (ranks * chunks))) * chunks * copies
    before = sum(rank if copies == 1 else min(rank, ranks - 1 - rank) for rank in range(ranks)) / ranks
    return least_s * share / ranks + fixed + update + ring + least_latency_s(request) * before


def least_latency_s(request: Request) -> float:
    """No message takes less."""
    near, cluster = request.costs.latency_s, request.cluster
    return min(near, cluster.link_latency_s) if cluster.tells_nodes_apart else near


def whole_bound_s(request: Request, ranks: int, chunks: int = 1, at_once: bool = False) -> float:
    """No plan with the micro-batches of planners that know no slices is faster, in any order, on any partition; 0 where
    micro-batches differ or have slices. at_once: of orders of one chunk in which a W follows its I at once (bpipe).

    Rank r begins after a forward of the blocks before its own and then does all its work. One stage a rank: the longest prefix
    within a limit is best for every rank in turn: one block more adds f to the head and takes m (f + i + w) from what is left.
    Where W follow at once, all but the last one come before the last I of the rank, and behind that the I of the blocks before
    its own: one block more adds f + i and takes m (f + i + w) - w, no less.
    Several chunks: the mean over the ranks; before the first stage of rank r come r others of a block at least.
    """
    slicing = whole_sequences(request)
    if len(set(slicing)) > 1 or len(slicing[0][1]) > 1 or slicing[0][0] > 1:
        return 0.0
    judge, blocks, micros = request.judge(ranks), request.model.blocks, len(slicing)
    latency = least_latency_s(request)
    forward, whole = kind_seconds(judge, slicing, "F"), kind_seconds(judge, slicing)
    heads = [0.0, *itertools.accumulate(forward[b.kind] / micros for b in blocks)]
    works = [0.0, *itertools.accumulate(whole[b.kind] for b in blocks)]
    if chunks > 1:
        begins = sum(heads[rank] + rank * latency for rank in range(ranks))
        fixed = chunks * len(PHASES) * request.costs.overhead_s * micros
        return float(((works[-1] + begins) / ranks + fixed) * (1 - 1e-12))

    ways = [(heads, works, latency)]
    if at_once:                                                # there and back
        home, last = (kind_seconds(judge, slicing, phase) for phase in "IW")
        ways.append(([0.0, *itertools.accumulate((forward[b.kind] + home[b.kind]) / micros for b in blocks)],
                     [0.0, *itertools.accumulate(whole[b.kind] - last[b.kind] / micros for b in blocks)], 2 * latency))

    def enough(limit: float) -> bool:
        at = 0
        for rank in range(ranks):
            at = min(bisect.bisect_right(work, limit - ends[at] - rank * message + work[at]) - 1 for ends, work, message in ways)
            if at < 0 or at == len(blocks):
                break
        return at == len(blocks)

    low, high = 0.0, heads[-1] + works[-1] + ranks * latency
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low * (1 - 1e-12)
