"""Lower bounds on the seconds of a step, by number of ranks, chunks and replicas: ``planner="auto"`` skips a configuration whose
bound is no better than the plan in hand."""
from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core, planners
from ..config import KINDS
from ..cost import PHASES, CostModel
from ..links import Links, rank_of
from ..partition import updated_of_kind
from ..schedules import LOOPED, SLICED, ZIGZAG
from .deadline import late
from .judge import ORDERS
from .request import ROUND, Request
from .starts import kind_seconds, whole_sequences

__all__ = ["AT_ONCE", "Least", "again_bound_s", "bound_s", "least_of_kinds", "least_work_s", "order_bound_s", "stages_bound_s",
           "whole_bound_s"]

AT_ONCE = "gpipe", "1f1b", "seq1f1b", *ROUND   #: schedules in which every W follows its I at once if none may wait

_GROUPS = 256           # sizes of micro-batch that are looked at; where there are more the bound on the work is 0
_HALVINGS = 40          # bisection steps for a bound
_AGAIN = (("attention", np.array([0, 1, -1 / 8, 0])), ("ffn", np.array([0, 0, 1 / 2, 0])))   # R of a block, in F of each kind
_KEPT = np.array([0, 0, -1 / 8, 0])      # and of an attention for each column of queries, keys and values that it keeps
_LARGEST = 1e15         # overhead or message over a block's seconds, above which order_bound_s gives 0


@dataclass(frozen=True)
class _Weighted:
    """A mix of (kind, phase) as the slice planner reads it."""

    costs: CostModel
    weights: NDArray[np.float64]
    batch: int

    def slice_cost(self, seq_len: int, granularity: int = 1, phase: str = "both") -> dict[str, Any]:
        return self.costs.weighted_slice_cost(self.weights, seq_len, granularity, self.batch)


def least_work_s(request: Request, share: int, again: Sequence[str] = ()) -> float:
    """Seconds that one of ``share`` sequences takes at least, on all ranks together, however it is sliced and batched.

    F and I of all blocks but the head: the least sum over slicings, for the best micro-batch (exact: slice_tokens with one
    stage). The head and all W: the same apart, because a micro-batch of several sequences and several slices does its head
    and its W as if it were one slice, which is one of those slicings. Forwards in halves (sliced-1f1b) are of whole sequences.
    0 where there was no time to look at all of them.
    again: kinds of blocks that are recomputed, each slice with its F (R: tp_cost_recompute); not with forwards in halves, nor a
    given slicing, whose R is not counted.
    """
    costs, blocks = request.costs, np.array([1.0, request.model.n_layer, request.model.n_layer, 1.0])
    if request.slicing is not None:
        d = costs.even.durations(partition=[(0, request.model.num_blocks)], slicing=request.slicing, model=request.model)
        fixed = len(PHASES) * costs.overhead_s * d["F"].shape[1]               # bound_s adds it for every stage
        less = sum(n * _less_in_halves_s(request, kind) for n, kind in zip(blocks, KINDS, strict=True))
        return max(0.0, float(sum(d[p].sum() for p in PHASES) - fixed - less)) / share * (1 - 1e-12)
    most = min(share, costs.known_batch)
    if most > _GROUPS:
        return 0.0
    sliced, whole = np.zeros((4, 3)), np.zeros((4, 3))
    whole[:, 2], whole[3] = blocks, blocks[3]
    sliced[:3, :2] = blocks[:3, None]
    again = () if SLICED in request.schedules else again
    for kind, more in _AGAIN:
        less = _KEPT * costs.where.keeps_keys if kind == "attention" else 0.0
        if kind in costs.remade_shares:
            more, less = costs.remade_shares[kind] * np.array([each == kind for each in KINDS]), 0.0
        sliced[:, 0] += blocks * (more + less) * (kind in again)
    sizes, least = np.arange(1.0, most + 1), 0.0
    for weights in (sliced, whole):
        halves = sum((weights[i, p] * (_in_halves_s(costs, kind, sizes, request.seq_len) if phase == "F" else
                                       costs.block_seconds(kind, phase, request.seq_len, 0, sizes))
                      for (i, kind), (p, phase) in itertools.product(enumerate(KINDS), enumerate(PHASES)) if weights[i, p]),
                     np.zeros(most)) / sizes
        paths = [_least_path_s(request, weights, b) for b in range(1, most + 1) if not late()]
        if len(paths) < most:
            return 0.0
        least += min(np.inf if again else float(halves[1:].min(initial=np.inf)), *paths)
    return float(least * (1 - 1e-12))


def _least_path_s(request: Request, weights: NDArray[np.float64], batch: int) -> float:
    """Least seconds per sequence over all slicings, for micro-batches of ``batch`` sequences."""
    costs = _Weighted(request.costs, weights, batch)
    return planners.slice_tokens(costs, 1, seq_len=request.seq_len, granularity=request.unit).lower_bound_s / batch


def _in_halves_s(costs: CostModel, kind: str, batches: NDArray[np.float64], tokens: Any) -> NDArray[np.float64]:
    """Seconds of forwards of whole sequences that are run in two halves along the batch (sliced-1f1b), by micro-batch size."""
    halves = (batches + 1) // 2, np.maximum(1.0, batches // 2)
    return sum((np.asarray(costs.block_seconds(kind, "F", tokens, 0, b)) for b in halves), np.zeros(len(batches)))


def _less_in_halves_s(request: Request, kind: str) -> float:
    """Seconds of the given micro-batches' forwards of a block that halves may spare: only whole sequences have halves."""
    assert request.slicing is not None
    batches = np.array([b for b, lengths in request.slicing if b > 1 and len(lengths) == 1], np.float64)
    if len(batches) == 0:
        return 0.0
    whole = request.costs.block_seconds(kind, "F", request.seq_len, 0, batches)
    return float(np.maximum(0.0, whole - _in_halves_s(request.costs, kind, batches, request.seq_len)).sum())


@dataclass(frozen=True)
class Least:
    """Lower bounds for a block of each kind, in seconds: ``work`` on its work in a step, whatever the slicing; ``first`` on the
    forward of the first slice of any micro-batch."""

    work: dict[str, float]
    first: dict[str, float]


def least_of_kinds(request: Request, share: int) -> Least:
    """``Least`` for ``share`` sequences. The minimum is taken for each kind and phase alone, over slicings and micro-batch sizes:
    so sums of these bound any stage, and forwards in halves, which are forwards of smaller micro-batches. A given slicing is
    counted as it is. 0 where there was no time for all of them."""
    costs = request.costs
    if request.slicing is not None:
        work = kind_seconds(request.judge(1), request.slicing)
        starts = np.array([(size, lengths[0]) for b, lengths in request.slicing for size in (b, (b + 1) // 2, max(1, b // 2))],
                          np.float64)
        first = {kind: float(np.min(costs.block_seconds(kind, "F", starts[:, 1], 0, starts[:, 0]))) for kind in KINDS}
        return Least({kind: max(0.0, work[kind] - _less_in_halves_s(request, kind)) for kind in KINDS}, first)
    most = min(share, costs.known_batch)
    sizes = [_least_of_size(request, b) for b in range(1, most + 1) if not late()] if most <= _GROUPS else []
    if len(sizes) < most:
        return Least(dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0))
    least = {name: min(size[name] for size in sizes) for name in sizes[0]}
    return Least({kind: share * sum(least[f"{kind}.{phase}"] for phase in PHASES) for kind in KINDS},
                 {kind: least[f"{kind}.first"] for kind in KINDS})


def _least_of_size(request: Request, batch: int) -> dict[str, float]:
    """Least seconds with micro-batches of ``batch`` sequences: of one sequence in a block of a kind ("ffn.F"), and of a forward of
    a micro-batch's first slice ("ffn.first"). Kept with the request."""
    key = "least", request.seq_len, request.unit, batch
    if key not in request.kinds:
        found, lengths = {}, np.arange(request.unit, request.seq_len + 1, request.unit)
        for (i, kind), (p, phase) in itertools.product(enumerate(KINDS), enumerate(PHASES)):
            weights = np.zeros((len(KINDS), len(PHASES)))
            weights[i, p] = 1.0
            found[f"{kind}.{phase}"] = _least_path_s(request, weights, batch)
            found[f"{kind}.first"] = float(np.min(request.costs.block_seconds(kind, "F", lengths, 0, float(batch))))
        request.kinds[key] = found
    return request.kinds[key]


def bound_s(request: Request, ranks: int, chunks: int, replicas: int, least_s: float, copies: int = 1) -> float:
    """No plan of this configuration is faster, by what the mean rank must do.

    A step takes at least the mean over the ranks of: the rank's part of the work of its replica's sequences (``least_s`` each),
    the fixed overhead of every instruction of its chunks, its updates, its share of the ring's all-reduce (or, where that is made
    beside the work, the longer of the two), and the wait before it can begin, which is r messages for rank r. With two copies of
    the model in opposite directions (``copies``) a rank has a stage of each: it updates both and sums both gradients, but each
    sequence passes only one of them; and it can begin when a message from the nearer end has arrived.
    """
    costs, params, share = request.costs, float(request.model.num_params), request.batch // replicas
    link = replace(replace(request, replicas=replicas).link(ranks), copies=copies)
    units = -(-share // costs.known_batch) if request.slicing is None else sum(len(lengths) for _, lengths in request.slicing)
    fixed = chunks * len(PHASES) * costs.overhead_s * units * (1 - 1e-12)
    each, stages = params / (ranks * chunks), chunks * copies
    own_s = (costs.optimizer_param_s - link.spares_s) * each + float(link.gather_s(each))
    update, ring = (costs.optimizer_stage_s + own_s) * stages, float(link.sums_s(each)) * stages
    before = sum(rank if copies == 1 else min(rank, ranks - 1 - rank) for rank in range(ranks)) / ranks
    work = least_s * share / ranks + fixed
    return (max(work, ring) if link.overlaps else work + ring) + update + least_latency_s(request) * before


def again_bound_s(request: Request, again: Sequence[str]) -> dict[int, float]:
    """By number of ranks: no plan with one copy of the model that recomputes all blocks of the kinds ``again`` is faster."""
    least, kinds = least_work_s(request, request.share, again), least_of_kinds(request, request.share)
    ways = {name in ZIGZAG for name in request.schedules}
    given = request.chunks, request.replicas
    return {ranks: max(bound_s(request, ranks, *given, least),
                       min(stages_bound_s(request, ranks, *given, kinds, way) for way in ways)) for ranks in request.ranks}


def least_latency_s(request: Request) -> float:
    """Seconds that every message takes at least."""
    near, cluster = request.costs.latency_s, request.cluster
    return min(near, cluster.link_latency_s) if cluster.tells_nodes_apart else near


def stages_bound_s(request: Request, ranks: int, chunks: int, replicas: int, least: Least, zigzag: bool = False) -> float:
    """No plan of this configuration, with one copy of the model a replica, is faster: because blocks cannot be divided, and because
    a link carries one message at a time. least: for ``request.batch // replicas`` sequences; zigzag: the stages go down the ranks
    and up again.

    Rank r begins when a first slice has passed the blocks before its own, then does all work of its blocks and updates them;
    copying its messages is work, too. One stage a rank: to test a limit it is best that each rank in turn takes as many blocks as
    the limit allows, because one block more delays the next rank by its first forward and takes at least as much from the work that
    is left; each later rank needs a block, too. Several stages a rank: stage k begins with one of the blocks from k on that leave a
    block for each later stage and has at least that one; the last stage has the head. A given partition is counted as it is.

    The link: from one rank to another it carries all activations and gradients that go that way, one by one, and an update follows
    the last of them.
    """
    costs, blocks, stages = request.costs, request.model.blocks, ranks * chunks
    link = replace(request, replicas=replicas).link(ranks)
    share = request.batch // replicas
    units = -(-share // costs.known_batch) if request.slicing is None else sum(len(lengths) for _, lengths in request.slicing)
    sums = [0.0 if link.overlaps else float(link.sums_s(n)) for n in (0.0, 1.0)]     # beside the work they may be hidden
    more = [behind + float(link.gather_s(n)) for behind, n in zip(sums, (0.0, 1.0), strict=True)]
    ring, each = more[0], costs.optimizer_param_s - link.spares_s + more[1] - more[0]
    fixed = chunks * (len(PHASES) * costs.overhead_s * units + costs.optimizer_stage_s + ring)
    update = updated_of_kind(request.model)
    work = [max(least.work[b.kind], least.first[b.kind]) + each * update[b.kind] + costs.optimizer_head_s * (b.kind == "head")
            for b in blocks]
    home = rank_of(ranks, stages, zigzag)
    besides, busy = _messages_s(request, ranks, replicas, home)
    busy += least_latency_s(request) * (ranks > 1) + costs.optimizer_stage_s + ring
    if chunks == 1 and request.partition is None:
        heads = [0.0, *itertools.accumulate(least.first[b.kind] for b in blocks)]
        works = [0.0, *itertools.accumulate(work)]
        return max(busy, _least_limit([(heads, works, besides)]) + fixed) * (1 - 1e-12)
    done = besides
    least_of = np.lib.stride_tricks.sliding_window_view(np.array(work), len(blocks) - stages + 1).min(axis=1).tolist()
    for k, rank in enumerate(home):
        if request.partition is not None:
            done[rank] += sum(work[slice(*request.partition[k])])
        else:
            done[rank] += work[-1] if k == stages - 1 else least_of[k]
    return max(busy, max(done) + fixed) * (1 - 1e-12)


def _messages_s(request: Request, ranks: int, replicas: int, home: Sequence[int]) -> tuple[list[float], float]:
    """([ranks] seconds until a rank's first message has arrived, and of its own copying of messages; seconds of the bytes on the
    busiest link). home: the rank of each stage."""
    costs, links = request.costs, Links.of(request.cluster, ranks, replicas)
    size = costs.element_bytes * request.model.n_embd * float(request.batch // replicas * request.seq_len)
    besides, busy = [rank * least_latency_s(request) for rank in range(ranks)], {(0, 0): 0.0}
    for (here, there), far in zip(itertools.pairwise(home), links.leaving(home)[:-1], strict=True):
        if here != there:
            for ends in ((here, there), (there, here)):        # activations, and their gradients
                busy[ends] = busy.get(ends, 0.0) + size * (links.byte_s if far else costs.byte_s)
                besides[ends[0]] += size * sum(costs.ends_byte_s)
    return besides, max(busy.values())


def _least_limit(ways: Sequence[tuple[Sequence[float], Sequence[float], Sequence[float]]]) -> float:
    """The least limit of seconds (found from below, so never more) within which the ranks cover all blocks if each in turn takes as
    many as the limit allows. ways: conditions that must all hold, each (prefix sums [blocks + 1] of what later ranks wait for,
    prefix sums of work, [ranks] other seconds)."""
    blocks, ranks = len(ways[0][0]) - 1, len(ways[0][2])

    def enough(limit: float) -> bool:
        at = 0
        for rank in range(ranks):
            to = min(bisect.bisect_right(work, limit - ends[at] - more[rank] + work[at]) - 1 for ends, work, more in ways)
            at = min(to, blocks - (ranks - 1 - rank))
            if to < 0 or at == blocks:
                break
        return at == blocks

    low, high, *others = 0.0, *(ends[-1] + work[-1] + max(more) for ends, work, more in ways)
    if others and not enough(high):                            # the other conditions want more than the first one ever does
        low, high = high, max(others)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def whole_bound_s(request: Request, ranks: int, chunks: int = 1, at_once: bool = False) -> float:
    """No plan of whole sequences, one a micro-batch, is faster, in any order, on any partition; 0 where micro-batches differ, or
    have slices or several sequences. at_once: only for orders of one chunk in which every W follows its I at once (bpipe).

    Rank r begins after one forward of the blocks before its own and then does all its work. One stage a rank: to test a limit it is
    best that each rank in turn takes as many blocks as the limit allows: one block more delays the next rank by f and takes
    m (f + i + w) from the work that is left (f, i, w: its seconds a micro-batch; m micro-batches). Where W follow at once, all but
    the last W of a rank come before its last I, and after that I come the I of the blocks before its own: one block more adds f + i
    and takes m (f + i + w) - w, which is no less.
    Several chunks: the mean over the ranks; before rank r's first stage are r others, of at least a block each.
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

    ways = [(heads, works, [rank * latency for rank in range(ranks)])]
    if at_once:                                                # there and back
        home, last = (kind_seconds(judge, slicing, phase) for phase in "IW")
        ways.append(([0.0, *itertools.accumulate((forward[b.kind] + home[b.kind]) / micros for b in blocks)],
                     [0.0, *itertools.accumulate(whole[b.kind] - last[b.kind] / micros for b in blocks)],
                     [2 * rank * latency for rank in range(ranks)]))
    return _least_limit(ways) * (1 - 1e-12)


def order_bound_s(request: Request, name: str, ranks: int, chunks: int) -> float:
    """No plan of whole sequences, one a micro-batch, is faster in this order (one of :data:`AT_ONCE`, with no W waiting), on any
    partition, even one that cuts layers (csrc/plan/partition_bound.h); 0 where micro-batches differ, or have slices or several
    sequences, and of several in looped stages, whose order depends on their times."""
    slicing, costs = whole_sequences(request), request.costs
    if len(set(slicing)) > 1 or len(slicing[0][1]) > 1 or slicing[0][0] > 1 or (name == LOOPED and len(slicing) > 1):
        return 0.0
    judge, cluster, micros = request.judge(ranks), request.cluster, len(slicing)
    each = [kind_seconds(judge, slicing, phase) for phase in PHASES]
    seconds = np.array([[of_kind[kind] / micros for of_kind in each] for kind in KINDS])
    if costs.head_pass is not None:                            # rows' weight gradients may wait for a later slice's pass
        head = seconds[KINDS.index("head")]
        head[:2] = np.maximum(0.0, head[:2] - costs.head_pass[2] * request.seq_len)
    byte_s = min(costs.byte_s, 1 / cluster.link_bandwidth_Bps) if cluster.tells_nodes_apart else costs.byte_s
    message = least_latency_s(request) + byte_s * costs.element_bytes * request.model.n_embd * request.seq_len
    unit = float(seconds.max())
    least = np.array([costs.overhead_s, message if ranks > 1 else 0.0]) / (unit or 1.0)
    if not (0.0 < unit < np.inf and least.max() < _LARGEST):
        return 0.0
    found = unit * _core.partition_bound(ORDERS[name], ranks, chunks, micros, request.model.n_layer, seconds / unit,
                                         *least.tolist())
    link = request.link(ranks)
    ring = float((0.0 if link.overlaps else link.sums_s(0.0)) + link.gather_s(0.0))
    return found * (1 - 1e-12) + chunks * (costs.optimizer_stage_s + ring)
