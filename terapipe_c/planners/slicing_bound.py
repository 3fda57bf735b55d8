"""A lower bound on a step over all slicings and all orders, for given stages, ranks and sizes of micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _core, gpu_weights
from ..config import KINDS, GPTConfig, brief, whole
from ..cost import PHASES, CostModel
from ..links import Links
from ..partition import block_counts, check_partition
from .arguments import FloatArray, array, integers, listed, number

__all__ = ["slicing_bound"]


def slicing_bound(
    model: GPTConfig,
    costs: CostModel,
    partition: Sequence[tuple[int, int]],
    micro_batches: Sequence[int],
    *,
    seq_len: int,
    granularity: int = 1,
    ranks: int | None = None,
    update_s: Any = None,
    sum_s: Any = 0.0,
    rank_of: Sequence[int] | None = None,
    links: Links = Links(),     # noqa: B008 (frozen)
) -> float:
    """Seconds, a proven lower bound on a step over every cutting of every micro-batch into slices of multiples of
    ``granularity`` tokens and every order of the operations; stage k is on rank ``rank_of[k]`` (None: ``k % ranks``, and
    ranks None: one stage a rank); the first ``ranks`` stages are on as many ranks in order.

    partition: (first block, last block + 1) of each stage; micro_batches: sequences of each; update_s: seconds of each stage's
    update (None: the costs'); sum_s: the part of it that a stage's rank does before it meets all others, in which replicas add up
    gradients; links: of messages that leave a node. Two bounds for each rank, each a shortest path over the cuts: a first slice
    must reach the rank, which then does all its work; or the rank does all its forwards and input gradients, and the last of
    these must travel back to the first stage. Not counted: weight gradients that could wait, waits between slices and between
    micro-batches, the exchange of a tied embedding, halves of sliced-1f1b.
    """
    if not isinstance(model, GPTConfig):
        raise _core.InvalidTypeError(f"model is {brief(model)}: a GPTConfig would be right")
    if not isinstance(costs, CostModel):
        raise _core.InvalidTypeError(f"costs is {brief(costs)}: a CostModel would be right")
    partition = check_partition(partition, model)
    micro_batches = listed(micro_batches, "micro_batches", "the sequences of each")
    tokens, unit = whole("seq_len", seq_len, most=model.block_size), whole("granularity", granularity)
    count = len(partition) if ranks is None else whole("ranks", ranks)
    if tokens % unit or len(partition) % count or not micro_batches:
        raise _core.InvalidValueError(
            f"{tokens} tokens in units of {unit}, {len(partition)} stages on {count} ranks, {len(micro_batches)} micro-batches: "
            "multiples, and at least one micro-batch, would be right"
        )
    ranks_of = integers(rank_of, "rank_of", "a rank for each stage")
    home = [k % count for k in range(len(partition))] if ranks_of is None else [int(r) for r in ranks_of]
    if len(home) != len(partition) or home[:count] != list(range(count)) or not set(home) <= set(range(count)):
        raise _core.InvalidValueError(
            f"rank_of is {rank_of!r}: a rank for each of {len(partition)} stages, the first {count} in order, would be right"
        )
    blocks, update = costs.stage_work(model, block_counts(model, partition))
    update = update if update_s is None else _of_stages(update_s, "update_s", len(partition))
    sizes = Counter(whole("a micro-batch", size) for size in micro_batches)
    before = np.minimum(_of_stages(sum_s, "sum_s", len(partition)), update)
    sums, updates = (np.bincount(home, np.broadcast_to(seconds, len(home)), count) for seconds in (before, update - before))
    # Behind all its work a rank adds up its own gradients; the last gradient comes home to the first, which then adds up its own.
    more = np.stack([sums, np.full(count, sums[0])], axis=1) / len(micro_batches)
    if costs.head_pass is not None:     # a weight's gradient that waits for the update is in the head's curves, and adds to its own
        head = home[int(np.argmax(blocks[:, KINDS.index("head")]))]
        more[head] -= (updates.max() - updates[head]) / len(micro_batches)
    arrays = [(times, *_size(model, costs, blocks, size, tokens, unit, count, home, links, more))
              for size, times in sorted(sizes.items())]
    return _core.slicing_bound(arrays, count, tokens // unit, float(updates.max()))


def _of_stages(seconds: Any, name: str, stages: int) -> FloatArray:
    """[stages] or [1]"""
    alone = isinstance(seconds, (int, float, np.integer, np.floating))
    each = np.array([number(seconds, name, "seconds")]) if alone else array(seconds, name).reshape(-1)
    if len(each) not in (1, stages):
        raise _core.InvalidValueError(f"{name} has {len(each)} entries: one for each of the {stages} stages would be right")
    wrong = np.flatnonzero(~(np.isfinite(each) & (each >= 0)))
    if len(wrong):
        raise _core.InvalidValueError(f"{name}[{wrong[0]}] is {each[wrong[0]]}: finite seconds from 0 on would be right")
    return each


def _size(
    model: GPTConfig, costs: CostModel, blocks: Any, batch: int, tokens: int, unit: int, ranks: int, rank_of: Sequence[int],
    links: Links, more: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray | None]:
    """(all, core, head, tail, fixed, slope) of micro-batches of ``batch`` sequences, as ``_core.slicing_bound`` reads them. more:
    [ranks, 2] seconds of each micro-batch to add to ``all`` and to ``core``."""
    stages, n, over = len(blocks), tokens // unit, costs.overhead_s
    S = unit * np.arange(n + 1.0)
    first = _seconds(costs, S, 0.0, batch)
    whole_s = _seconds(costs, float(tokens), 0.0, batch)[:, :, 0]
    # Several sequences at once do all weight gradients, and the head, once a micro-batch (csrc/cost/cost.h).
    once = np.zeros((len(KINDS), len(PHASES)), bool)
    made = first_made = whole_s[:, 2]
    if batch > 1:
        once[:, PHASES.index("W")] = once[KINDS.index("head")] = True
    elif costs.backend == "cuda":       # whatever the sequences
        once[:, PHASES.index("W")] = True
        made, first_made = _on_gpu(costs, tokens, made)
    size = costs.element_bytes * model.n_embd * batch * S
    near, away = costs.latency_s + costs.byte_s * size, links.latency_s + links.byte_s * size
    sent, read = (byte_s * size for byte_s in costs.ends_byte_s)
    head, tail = np.zeros((ranks, n + 1)), np.zeros((ranks, n + 1))
    back = np.where(once[:, 2, None], first_made[:, None], first[:, 2])
    whole_s = np.concatenate([whole_s[:, :2], made[:, None]], axis=1)
    tail[0] = blocks[0] @ back + over
    for r in range(1, ranks):
        message = over + (away if links.far and links.far[r - 1] else near)
        head[r] = head[r - 1] + blocks[r - 1] @ first[:, 0] + message + sent + read * (r > 1)    # r - 1's: to r, from r - 2
        tail[r] = tail[r - 1] + blocks[r - 1] @ first[:, 1] + message + read + sent * (r > 1)    # from r, to r - 2
    fixed = more.copy()
    weights = np.zeros((ranks, 2, len(KINDS), len(PHASES)))
    for k in range(stages):
        r = rank_of[k]
        fixed[r] += (sent[-1] + read[-1]) * ((k > 0 and rank_of[k - 1] != r) + (k < stages - 1 and rank_of[k + 1] != r))
        for i, phases in enumerate((3, 2)):
            used = np.arange(3) < phases
            fixed[r, i] += (blocks[k][:, None] * whole_s * (once & used)).sum()
            weights[r, i] += blocks[k][:, None] * (~once & used)
    fixed_slice = over * np.bincount(rank_of, minlength=ranks)[:, None] * np.array([3.0, 2.0])
    if _by_table(costs):
        shape = (ranks, 2, n + 1, n + 1)
        table = np.zeros(shape)
        for r, i in np.ndindex(ranks, 2):
            table[r, i] = _core.cost_table(costs._pack, weights[r, i], float(batch), float(unit), n) + fixed_slice[r, i]
        return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1]), head, tail, fixed, None
    lines, slope = _below(costs, weights, first, S, tokens, batch, unit)
    lines += fixed_slice[:, :, None, None]
    return np.ascontiguousarray(lines[:, 0]), np.ascontiguousarray(lines[:, 1]), head, tail, fixed, slope


def _seconds(costs: CostModel, S: Any, C: Any, batch: int) -> FloatArray:
    """float64 [kinds, phases, len(S)]."""
    rows = [[np.atleast_1d(costs.block_seconds(kind, phase, S, C, batch)) for phase in PHASES] for kind in KINDS]
    return np.array(rows, np.float64)


def _on_gpu(costs: CostModel, tokens: int, at_once: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[kinds] seconds at least of all W of one sequence, ``at_once`` or, where blocks are made again, in groups of rows but for the
    head's; and of that with slice 0, which has what makes no group (``gpu_weights.seconds``)."""
    groups, left = divmod(tokens, gpu_weights.GROUP)
    if groups == 0:
        return at_once, at_once
    of_rows = _seconds(costs, gpu_weights.GROUP * np.arange(groups + 1.0), 0.0, 1)[:, 2]
    with_left = _seconds(costs, left + gpu_weights.GROUP * np.arange(groups + 1.0), 0.0, 1)[:, 2]
    least = np.zeros((len(KINDS), groups + 1))      # of so many whole groups
    for n in range(1, groups + 1):
        least[:, n] = (least[:, :n] + of_rows[:, n:0:-1]).min(axis=1)
    from_left = slice(0 if left else 1, None)
    all_s = (with_left + least[:, ::-1])[:, from_left].min(axis=1)
    last_s = with_left[:, from_left].min(axis=1)
    head = np.arange(len(KINDS)) == KINDS.index("head")
    return np.where(head, at_once, all_s), np.where(head, at_once, last_s)


def _by_table(costs: CostModel) -> bool:
    """Whether costs need tables: :func:`_below` finds no line below a curve that falls with the context."""
    return costs.has_tables or any(c.a2 < 0 or c.a3 < 0 for c in costs.curves.values())


def _below(
    costs: CostModel, weights: FloatArray, first: FloatArray, S: FloatArray, tokens: int, batch: int, unit: int
) -> tuple[FloatArray, FloatArray]:
    """G0, G1 [ranks, 2, 2, n + 1] and both a2, a3 [ranks, 4] that are nowhere above the seconds: curves are clipped at 0, so they
    are convex in the context, and touch these lines where the context is largest."""
    context = np.array([[(costs.curves[k, p].a2 * batch * unit, costs.curves[k, p].a3 * batch * unit**2) for p in PHASES]
                        for k in KINDS])  # fmt: skip
    slope = np.einsum("rikp,kpa->ria", weights, context)
    far = np.maximum(tokens - S, 0.0)
    last = _seconds(costs, S, far, batch)
    last[:, :, 0] = 0.0
    i = S / unit
    line = (slope[:, :, :1] + slope[:, :, 1:] * i) * (far / unit)
    G0 = np.einsum("rikp,kps->ris", weights, first)
    G1 = np.einsum("rikp,kps->ris", weights, last) - line
    return np.stack([G0, G1], axis=2), np.ascontiguousarray(slope.reshape(len(weights), 4))


def plan_slicing_bound(judge: Any, candidate: Any, unit: int) -> float | None:
    """The bound for a plan's stages and micro-batches; None where it does not apply, or where there are too many cuts to look at in
    a moment."""
    cuts = math.gcd(unit, *(n for _, lengths in candidate.slicing for n in lengths))
    tokens = sum(candidate.slicing[0][1])
    work = (tokens // cuts) ** 2 * judge.ranks * len({b for b, _ in candidate.slicing})
    if candidate.schedule in ("sliced-1f1b", "chimera", "pipedream") or work > (2e7 if _by_table(judge.costs) else 2e8):
        return None
    update_s, sum_s = judge.updates(candidate.partition)
    return slicing_bound(judge.model, judge.costs, candidate.partition, [b for b, _ in candidate.slicing], seq_len=tokens,
                         granularity=cuts, ranks=judge.ranks, update_s=update_s, sum_s=sum_s,
                         rank_of=judge.lowered(candidate).rank_of, links=judge.links)  # fmt: skip
