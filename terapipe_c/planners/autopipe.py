"""AutoPipe (Liu et al., CLUSTER 2022): contiguous blocks on stages under synchronous 1F1B, exactly and as published; and its slicer
of warm-up micro-batches. Times are seconds, sizes bytes.

All functions that place blocks take the same arguments:

* fwd, bwd: seconds of each block, forward and backward (recomputation included where there is any), [n], finite, 0 or more.
* stages: 1 .. n stages of at least one block each; micro_batches: 1 or more.
* comm_s: seconds of a message between stages; blocking: the stage that receives pays them (Megatron's point-to-point calls),
  else the link does and the stages go on computing.
* memory: the stages' limits and the blocks' bytes, a ``StageMemory`` or a dict of its fields; None: everything fits. Only
  partitions that fit are considered.

``InvalidValueError`` names the argument, its index and value; ``InfeasibleError`` the stage that is short of bytes, in the
partition that is short of fewest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .. import _core
from ..config import gap_above, html_table, human_bytes, human_seconds
from .answer import Answer
from .arguments import FloatArray, array, explained, flag, integer, integers, number, time_limit

__all__ = [
    "SlicerPlan",
    "StageMemory",
    "StagePlan",
    "autopipe",
    "autopipe_balanced",
    "autopipe_heuristic",
    "autopipe_pivot",
    "autopipe_slicer",
    "sliced_step_time",
]

_EXACT, _HEURISTIC, _PIVOT, _BALANCED = range(4)
_EFFORT = 500_000_000  # steps: one or two seconds of one core

Times = FloatArray | Sequence[float]

_ARGUMENTS = """
    Args:
        fwd, bwd: [n] seconds of each block, forward and backward of one micro-batch (recomputation included where there is any),
            finite, 0 or more.
        stages: 1 .. n stages of at least one block each; micro_batches: of a step, 1 or more, in 1F1B's order.
        comm_s: seconds of a message between stages; blocking: the stage that receives pays them (Megatron's point-to-point
            calls), else the link does and the stages go on computing.
        memory: a StageMemory or a dict of its fields: limit_bytes (number or [stages]), and [n] static_bytes, activation_bytes (of
            each micro-batch in flight), transient_bytes, and [stages] in_flight. None: everything fits.

    Only autopipe's plan is never slower with more memory, or with blocks divided further: the others look at some partitions.
    InvalidValueError or InvalidTypeError name the argument, its index and value; InfeasibleError the stage that is short of bytes,
    in the partition that is short of fewest. Source: AutoPipe (Liu et al., CLUSTER 2022).
"""


@dataclass(frozen=True, eq=False)
class StageMemory(Answer):
    """Bytes of blocks and limits of stages. Under 1F1B stage k of p keeps the activations of min(micro_batches, p - k)
    micro-batches, so a stage fits where ``sum(static) + min(micro_batches, p - k) * sum(activation) + max(transient) <=
    limit[k]``."""

    limit_bytes: float | Times
    """One limit for every stage, or [stages]; infinite is allowed."""
    static_bytes: Times | None = None
    """[n] parameters, gradients, optimizer state of each block. None: none."""
    activation_bytes: Times | None = None
    """[n] that each block keeps for each micro-batch in flight. None: none."""
    transient_bytes: float | Times | None = None
    """[n], or one number for all blocks: needed only while a block runs, so a stage needs the largest of its blocks'. None:
    none."""
    in_flight: Sequence[int] | None = None
    """[stages] micro-batches whose activations each stage keeps, where another order than 1F1B will run."""

    def _arrays(
        self, blocks: int, stages: int
    ) -> tuple[FloatArray | None, FloatArray | None, FloatArray | None, FloatArray, Any]:
        def spread(value: Any, what: str, count: int) -> FloatArray | None:
            if value is None:
                return None
            if isinstance(value, (int, float, np.integer, np.floating)):
                return np.full(max(count, 0), number(value, what))
            return array(value, what)

        limit = spread(self.limit_bytes, "limit_bytes", stages)
        if limit is None:
            raise _core.InvalidTypeError("limit_bytes is None: bytes of every stage, or one number for each, would be right")
        return (
            spread(self.static_bytes, "static_bytes", blocks), spread(self.activation_bytes, "activation_bytes", blocks),
            spread(self.transient_bytes, "transient_bytes", blocks), limit,
            integers(self.in_flight, "in_flight", "one count a stage"),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class StagePlan(Answer):
    """The blocks of each stage, and the step that 1F1B makes of them."""

    boundaries: list[int]
    """Stage k holds blocks boundaries[k] .. boundaries[k + 1] - 1; 0 first, the number of blocks last."""
    stage_fwd_s: FloatArray
    """[stages] seconds of one micro-batch, forward."""
    stage_bwd_s: FloatArray
    """[stages] the same, backward."""
    peak_memory_bytes: FloatArray | None
    """[stages] bytes that each stage needs; None without ``memory``."""
    critical_path: list[tuple[str, int, int]]
    """("F" or "B", stage, micro-batch) from the first operation to the last of one path that is as long as the step. Where an
    operation waited equally long for two others the path goes through the one that keeps it closest to the last stage."""
    step_time_s: float
    """Makespan of one step, to the bit what ``Program.simulate`` says of these stage times."""
    lower_bound_s: float
    """No partition that fits is faster (proven)."""
    optimal: bool
    """Proven: no partition that fits is faster by more than the rounding of sums (1e-12 of the step)."""
    master_stage: int
    """The stage with most time on the critical path; the last of equal ones."""
    simulations: int
    """Makespans evaluated."""
    nodes: int
    """Partial partitions that branch and bound looked at."""
    planning_time_s: float
    micro_batches: int
    planner: str

    @property
    def gap(self) -> float:
        """(step - bound) / bound."""
        return gap_above(self.step_time_s, self.lower_bound_s, self.optimal)

    @property
    def stages(self) -> list[tuple[int, int]]:
        """[(first block, last block + 1), ...], as ``Plan.stages``."""
        return list(zip(self.boundaries, self.boundaries[1:], strict=False))

    def __repr__(self) -> str:
        proof = "optimal" if self.optimal else f"gap {self.gap * 100:.2f} %"
        sizes = "/".join(str(end - start) for start, end in self.stages)
        return (
            f"StagePlan({self.planner}: {len(self.stages)} stages of {sizes} blocks, {human_seconds(self.step_time_s)} for "
            f"{self.micro_batches} micro-batches, {proof}, master stage {self.master_stage}, planned in "
            f"{human_seconds(self.planning_time_s)})"
        )

    def _repr_html_(self) -> str:
        head = "<tr><th>stage</th><th>blocks</th><th>forward</th><th>backward</th><th>memory</th></tr>"
        rows = "".join(
            f"<tr><td>{k}{' *' if k == self.master_stage else ''}</td><td>{start} - {end - 1}</td>"
            f"<td>{human_seconds(float(self.stage_fwd_s[k]))}</td><td>{human_seconds(float(self.stage_bwd_s[k]))}</td>"
            f"<td>{'' if self.peak_memory_bytes is None else human_bytes(float(self.peak_memory_bytes[k]))}</td></tr>"
            for k, (start, end) in enumerate(self.stages)
        )
        proof = "optimal" if self.optimal else f"at most {self.gap * 100:.2f} % above the least"
        return (
            f"<p>{self.planner}: {human_seconds(self.step_time_s)} a step, {proof}; * the master stage</p>"
            f"<table>{head}{rows}</table>"
        )


@dataclass(frozen=True, eq=False)
class SlicerPlan(Answer):
    """How many micro-batches of the warm-up run forward in two halves."""

    split: int
    """Micro-batches 0 .. split - 1 are split. The least number with the least makespan, of 0 .. min(micro_batches, stages - 1)."""
    step_time_s: float
    """Makespan with ``split``."""
    whole_step_time_s: float
    """Makespan without slicing."""
    algorithm2_split: int
    """The number by the paper's Algorithm 2, with its misprints corrected, at most micro_batches."""
    algorithm2_step_time_s: float
    planning_time_s: float

    @property
    def gain(self) -> float:
        """Part of the step that slicing saves."""
        return 0.0 if self.whole_step_time_s <= 0.0 else 1.0 - self.step_time_s / self.whole_step_time_s

    def __repr__(self) -> str:
        return (
            f"SlicerPlan(split {self.split}, {human_seconds(self.step_time_s)}, {self.gain * 100:.2f} % saved; Algorithm 2: "
            f"split {self.algorithm2_split}, {human_seconds(self.algorithm2_step_time_s)})"
        )

    def _repr_html_(self) -> str:
        return html_table("Sliced 1F1B", [
            ("micro-batches split", f"{self.split}"), ("step", f"{human_seconds(self.step_time_s)}, {self.gain * 100:.2f} % saved"),
            ("whole", human_seconds(self.whole_step_time_s)),
            ("Algorithm 2", f"{human_seconds(self.algorithm2_step_time_s)}, split {self.algorithm2_split}")])  # fmt: skip


def _memory(memory: StageMemory | Mapping[str, Any] | None) -> StageMemory | None:
    if memory is None or isinstance(memory, StageMemory):
        return memory
    known = [field.name for field in fields(StageMemory)]
    if not isinstance(memory, Mapping):
        raise _core.InvalidTypeError(
            f"memory is {type(memory).__name__}: StageMemory or a dict of {', '.join(known)} would be right"
        )
    if unknown := [name for name in memory if name not in known]:
        raise _core.InvalidValueError(f"memory has {unknown[0]!r}: {', '.join(known)} would be right")
    if "limit_bytes" not in memory:
        raise _core.InvalidValueError("memory has no limit_bytes: what a stage may use is needed")
    return StageMemory(**memory)


def _plan(
    planner: str, method: int, fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float, blocking: bool,
    memory: StageMemory | Mapping[str, Any] | None, time_limit_s: float | None, effort: int,
) -> StagePlan:  # fmt: skip
    forward, backward = array(fwd, "fwd"), array(bwd, "bwd")
    parts, micros, fits = integer(stages, "stages"), integer(micro_batches, "micro_batches"), _memory(memory)
    blocks = len(forward) if forward.ndim else 0
    if parts < 1:                                              # before arrays of so many stages are made
        raise _core.InvalidValueError(f"stages is {parts}: at least 1 is needed")
    if 0 < blocks < parts:
        raise _core.InvalidValueError(f"stages is {parts} for {blocks} blocks: at most one stage a block, {blocks}, is possible")
    limits = None if fits is None or not blocks else fits._arrays(blocks, parts)       # that there are no blocks the core says
    found = _core.plan_autopipe(
        forward, backward, parts, micros, number(comm_s, "comm_s", "seconds"), flag(blocking, "blocking"), limits, method,
        time_limit_s=time_limit(time_limit_s), effort=effort,
    )  # fmt: skip
    boundaries, stage_f, stage_b, peak = found[:4]
    return StagePlan(boundaries, stage_f, stage_b, None if fits is None else peak, *found[4:], micros, planner)


@explained(_ARGUMENTS)
def autopipe(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False,
    memory: StageMemory | Mapping[str, Any] | None = None, *, time_limit_s: float | None = None, effort: int | None = None,
) -> StagePlan:  # fmt: skip
    """The partition of least makespan over all that fit, proven by branch and bound, or by elimination where that takes too long.

    The search ends at ``effort`` steps (None: one or two seconds of one core, and a few more on thousands of stages; the same plan
    on every machine) or at time_limit_s with ``optimal`` False and ``lower_bound_s`` what is proven. 194 blocks on 48 stages (one
    thread of a shared AMD EPYC): 0.3 ms with 1.5 micro-batches a stage or more. With fewer, all of 160 noisy models (12 to 60
    micro-batches) are proven, in 3 ms in the median, 20 at the 90th percentile, 71 at most; blocks that are all alike took up to
    460 ms. More than 512 stages and micro-batches together, or elimination's tables too large: branch and bound alone, which with
    fewer micro-batches than stages often reaches ``effort``.
    """
    steps = _EFFORT if effort is None else integer(effort, "effort", 62)
    if steps < 1:
        raise _core.InvalidValueError(f"effort is {steps}: at least 1 step is needed")
    return _plan(
        "autopipe", _EXACT, fwd, bwd, stages, micro_batches, comm_s, blocking, memory, time_limit_s, steps
    )


@explained(_ARGUMENTS)
def autopipe_heuristic(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False,
    memory: StageMemory | Mapping[str, Any] | None = None, *, time_limit_s: float | None = None,
) -> StagePlan:  # fmt: skip
    """The paper's search: Algorithm 1, then blocks moved from the master stage of the critical path towards both ends. Its plan
    need not be the best; ``lower_bound_s`` is the pivot bound. time_limit_s: gives the best plan known by then (None: about two
    seconds' work)."""
    return _plan(
        "autopipe_heuristic",
        _HEURISTIC,
        fwd,
        bwd,
        stages,
        micro_batches,
        comm_s,
        blocking,
        memory,
        time_limit_s,
        _EFFORT,
    )


@explained(_ARGUMENTS)
def autopipe_pivot(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False,
    memory: StageMemory | Mapping[str, Any] | None = None,
) -> StagePlan:  # fmt: skip
    """The partition whose largest path through one pivot stage is least: a plan and a proven bound in microseconds."""
    return _plan("autopipe_pivot", _PIVOT, fwd, bwd, stages, micro_batches, comm_s, blocking, memory, None, 0)


@explained(_ARGUMENTS)
def autopipe_balanced(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False,
    memory: StageMemory | Mapping[str, Any] | None = None,
) -> StagePlan:  # fmt: skip
    """The paper's Algorithm 1 alone: the partition whose largest fwd + bwd of a stage is least; of equal places for a boundary the
    first. Both once times are rounded to 2^-36 of their sum, so that the plan does not depend on their unit."""
    return _plan("autopipe_balanced", _BALANCED, fwd, bwd, stages, micro_batches, comm_s, blocking, memory, None, 0)


def autopipe_slicer(fwd: Times, bwd: Times, micro_batches: int, comm_s: float = 0.0) -> SlicerPlan:
    """How many micro-batches to run forward in halves in the warm-up of 1F1B, by simulation of every number from 0 to
    ``min(micro_batches, stages - 1)``: after the warm-up none is split.

    fwd, bwd: [stages] seconds of a whole micro-batch, finite, 0 or more; comm_s: seconds of a message on its link (a half's takes
    half of them). InvalidValueError or InvalidTypeError name argument, index and value. Source: AutoPipe (CLUSTER 2022), Algorithm
    2, with its misprints corrected (csrc/plan/autopipe_slicer.c)."""
    found = _core.plan_slicer(
        array(fwd, "fwd"), array(bwd, "bwd"), integer(micro_batches, "micro_batches"), number(comm_s, "comm_s", "seconds")
    )
    return SlicerPlan(*found)


def sliced_step_time(fwd: Times, bwd: Times, micro_batches: int, split: int, comm_s: float = 0.0) -> float:
    """Makespan of 1F1B whose first ``split`` micro-batches run forward in halves (order and messages: csrc/plan/autopipe.h,
    ``tp_sliced_f1b``), in seconds. fwd, bwd: [stages] seconds of a whole micro-batch; split: 0 .. micro_batches; comm_s: of a
    whole message on its link. InvalidValueError or InvalidTypeError name argument, index and value."""
    return _core.sliced_f1b(
        array(fwd, "fwd"), array(bwd, "bwd"), integer(micro_batches, "micro_batches"), integer(split, "split"),
        number(comm_s, "comm_s", "seconds"),
    )  # fmt: skip
