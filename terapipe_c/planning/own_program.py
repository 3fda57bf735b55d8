"""A plan with the user's own program (`Plan.with_program`): stages and slices stay, the order of the work is the user's."""
from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .._core import OPS, InfeasibleError, InvalidTypeError, InvalidValueError, Program
from ..backend import choose
from ..config import brief
from ..cost import filled
from ..engine import rank_memory
from ..links import Links, of_copies, timed_apart
from .savings import Savings, saving

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["OWN", "with_program"]

OWN = "own"  # Plan.schedule of such plans

_HALF = 0b111  # flags of csrc/sched/sched.h: TP_HALVES | TP_HALF_JOINED


def with_program(plan: Plan, program: Any) -> Plan:
    """See ``Plan.with_program``."""
    start = time.perf_counter()
    if not isinstance(program, Program):
        raise InvalidTypeError(f"program is {brief(program)}: a Program (tp.Program.parse, tp.schedules) would be right")
    if "U" in plan.program.counts:
        raise InvalidValueError(f"the plan's schedule is {plan.schedule}, whose micro-batches have their own updates: a plan with "
                                "one update a step, such as tp.plan(schedule='1f1b'), would be right")
    compute = _compute(program)
    _check_shape(plan, compute)
    ways = [each for order in _orders(compute) for each in _saved(plan, order)]
    durations = _durations(plan, compute)
    apart = plan.program.remakes_apart()                       # the plan's R are priced by what attentions keep then

    def key(program: Program) -> tuple[bool, float]:
        return max(program.slices) > 1 and program.remakes_apart() != apart, float(program.makespan(durations))

    ways.sort(key=key)
    ways[0].check(canonical=True)                              # the others differ only in where their R, SI and W stand
    _check_neighbours(ways[0])
    limit, where = plan.memory_limit_bytes, choose(plan.backend, plan.dtype)
    peaks = [rank_memory(plan.model, plan.stages, plan.slicing, each, backend=where, recompute=plan.recompute, swap=plan.swap,
                         replicas=plan.data_parallel, shards=plan.shard_optimizer) for each in ways]
    fits = [i for i, peak in enumerate(peaks) if limit is None or max(peak) <= limit]
    at = fits[0] if fits else min(range(len(peaks)), key=lambda i: max(peaks[i]))
    own, peak, needed = ways[at], peaks[at], max(peaks[at])
    line = own.simulate(durations)
    if limit is not None and needed > limit:
        raise InfeasibleError(f"rank {peak.index(needed)} needs {needed} bytes with this program and may use {limit}: "
                              f"{needed - limit} bytes short; a plan with memory_bytes = {needed}, or an order that holds fewer "
                              "activations, would be right")
    return replace(plan, schedule=OWN, program=own, durations=durations, step_time_s=float(line.makespan_s),
                   lower_bound_s=float(line.lower_bound_s), peak_memory_bytes=peak,
                   bubbles={k: float(v) for k, v in line.bubbles.items()}, busy_s=[float(x) for x in line.busy_s],
                   compared=[(plan.schedule, plan.step_time_s)], search_log=[], slicing_bound_s=None,
                   planning_time_s=time.perf_counter() - start)


def _durations(plan: Plan, program: Program) -> dict[str, NDArray[np.float64]]:
    """The plan's seconds; where its stages are on other ranks, and so their messages on other links, of messages those of these."""
    links, each, known = Links.of(plan.cluster, plan.ranks, plan.data_parallel), len(plan.stages), plan.durations
    if not links.far or program.rank_of == plan.program.rank_of or "comm.latency" not in known:
        return known
    rows = np.array([b * n for b, lengths in plan.slicing for n in lengths], np.float64)
    size = rows * plan.model.n_embd * (2.0 if plan.dtype == "bf16" else 4.0)
    latency_s = float(known["comm.latency"][each - 1, 0])      # nothing leaves the last stage: its are those within a node
    byte_s = (float(known["comm"][each - 1, 0]) - latency_s) / float(size[0])
    homes = [program.rank_of[copy * each:][:each] for copy in range(plan.copies)]
    messages = of_copies([timed_apart(links, home, size, latency_s, byte_s) for home in homes])
    return {**known, **filled({"F": known["F"], **messages}), **_tied(plan, links, homes, size, (latency_s, byte_s))}


def _tied(plan: Plan, links: Links, homes: Sequence[Sequence[int]], size: NDArray[np.float64],
          near: tuple[float, float]) -> dict[str, NDArray[np.float64]]:
    """"AR" of a weight that the first and the last stage share: the plan's takes the link from the last rank to the first. size:
    bytes of messages [units]; near: seconds of a message within a node and of each byte in it."""
    if not plan.model.tie_weights or len(plan.stages) == 1:
        return {}
    was, now = (links.closes(home) for home in (plan.program.rank_of[:len(plan.stages)], homes[0]))
    to, back = float(size.sum()) / plan.copies, plan.model.vocab_size * plan.model.n_embd * (2.0 if plan.dtype == "bf16" else 4.0)
    more_s = 2 * (links.latency_s - near[0]) + (links.byte_s - near[1]) * (to + back)     # CostModel.tied_s
    return {"AR": plan.durations["AR"] + (int(now) - int(was)) * more_s}


def _compute(program: Program) -> Program:
    """The program's F, B, I and W alone: instructions marked to overlap run one after the other."""
    stripped = program.strip()
    other = sorted(set(stripped.counts) - set("FBIW"))
    if other:
        raise InvalidValueError(f"program has {other[0]}: F, B, I and W would be right (what recomputes or swaps is the plan, "
                                "tp.plan(recompute=...))")
    if any((stripped.instructions(rank)["flags"] & _HALF).any() for rank in range(stripped.num_ranks)):
        raise InvalidValueError("program has forwards in halves: whole ones would be right, or tp.plan(schedule='sliced-1f1b')")
    return Program.parse(str(stripped).replace("&", ""))


def _orders(compute: Program) -> list[Program]:
    """Each B as I and then W, so that what I sends need not wait for W; and, where nothing is cut into slices, as it is, too, which
    takes less memory (``whole``)."""
    if "B" not in compute.counts:
        return [compute]
    apart = Program.parse(re.sub(r"\b(\d+)B(\d+\.\d+)\b", r"\1I\2 \1W\2", str(compute)))
    return [apart, compute] if max(compute.slices) == 1 else [apart]


def _saved(plan: Plan, order: Program) -> list[Program]:
    """What the engine would run of it, in each way to recompute and swap what the plan does."""
    where, tied = choose(plan.backend, plan.dtype), plan.model.tie_weights and len(plan.stages) > 1
    aheads = (0, 1, 2, 3) if plan.program.swaps_beside else (None,)
    keys = plan.slicing if where.keeps_keys and max(order.slices) > 1 and any(plan.recompute) else ()
    saves = [Savings(tuple(plan.recompute), tuple(plan.swap), ahead=ahead, at_once=at_once)
             for at_once in ((False, True) if keys else (False,)) for ahead in aheads]
    withins = (False, True) if "B" in order.counts and any(plan.recompute) else (False,)
    return [saving(order, plan.model, tuple(plan.stages), each, keys, columns=where.keeps_keys, within=within).lower(tied)
            for each in saves for within in withins]


def _check_shape(plan: Plan, program: Program) -> None:
    slices = tuple(len(lengths) for _, lengths in plan.slicing)
    if program.copies != plan.copies:
        raise InvalidValueError(f"program has {program.copies} cop{'ies' if program.copies > 1 else 'y'} of the model: "
                                f"{plan.copies}, as the plan, would be right")
    stages = len(plan.stages) * plan.copies
    for what, own, planned in (("ranks", program.num_ranks, plan.ranks), ("stages", program.num_stages, stages),
                               ("micro-batches", program.num_micro_batches, len(slices))):
        if own != planned:
            raise InvalidValueError(f"program has {own} {what}: {planned}, as the plan, would be right")
    if program.slices != slices:
        micro = next(m for m, (own, planned) in enumerate(zip(program.slices, slices, strict=True)) if own != planned)
        raise InvalidValueError(f"program cuts micro-batch {micro} into {program.slices[micro]} slices: {slices[micro]}, as the "
                                "plan, would be right")


def _check_neighbours(program: Program) -> None:
    """A run has rings only between neighbouring ranks (``job.neighbours``)."""
    ranks = program.num_ranks
    for rank in range(ranks):
        code = program.instructions(rank)
        for peer in set(code["peer"].tolist()) - {-1, (rank + 1) % ranks, (rank - 1) % ranks}:
            if (code["op"][code["peer"] == peer] == OPS.index("AR")).all():       # lower's, where the user sees no message
                raise InvalidValueError(f"program has the first stage and the last, which share a weight, on ranks {rank} and "
                                        f"{peer}: neighbouring ranks (the last one and rank 0 are), or one, would be right")
            raise InvalidValueError(f"program sends from rank {rank} to rank {peer}: stages that follow each other on neighbouring "
                                    "ranks (the last one and rank 0 are), or on one, would be right")
