"""Other systems' planners, as published, on the same tables: a chain of blocks, cut into stages that run 1F1B.

All results are judged alike: ``step_time_s`` by our simulator, memory by one model (csrc/plan/baselines.h). The file of each
algorithm (csrc/plan/baseline_*.c) names paper and section, and what was chosen where the paper leaves a choice. Piper, whose input
is another, is in ``layers``.

``memory``: a mapping (or an object with these attributes) of ``limit_bytes`` (of each device), ``static_bytes`` [n],
``activation_bytes`` [n] (kept for each micro-batch in flight), and, optionally, ``transient_bytes`` (one number or [n]) and
``recompute_s`` [n]: a block that is recomputed keeps nothing and adds that many seconds to its backward. ``in_flight`` [stages]:
micro-batches that each stage holds at once, where another order than 1F1B will run (only for planners that replicate no stage).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..config import brief, gap_above, html_table, human_bytes, human_seconds
from .answer import Answer
from .arguments import FloatArray, array, explained, flag, integer, integers, number

__all__ = ["BaselinePlan", "adapipe", "dapple", "merak", "pipedream", "uniform", "vpipe"]

Times = FloatArray | Sequence[float]
BoolArray = npt.NDArray[np.bool_]

_ARGUMENTS = """
    Args:
        fwd, bwd: [n] seconds of each block, forward and backward of one micro-batch, finite, 0 or more.
        {count} micro_batches: of a step, 1 or more, in 1F1B's order.
        comm_s: seconds of a message between stages; blocking: the stage that receives pays them, else the link does.
        memory: a mapping, or an object with these attributes: limit_bytes (of each device), and [n] static_bytes, activation_bytes
            (of each micro-batch in flight), transient_bytes (or one number), recompute_s (for planners that recompute), and
            [stages] in_flight where another order than 1F1B will run. None: everything fits.{more}

    InvalidValueError or InvalidTypeError name the argument, its index and value; InfeasibleError the stage that is short, by how
    many bytes. What the result holds: :class:`BaselinePlan`.
"""
_STAGES = _ARGUMENTS.format(count="stages: 1 .. n stages of at least one block each;", more="")
_DEVICES = _ARGUMENTS.format(
    count="devices: all are used, by at most n stages (straight: by as many as they are);",
    more="""
        param_bytes: [n] of weights (None: none); bandwidth_Bps: bytes a second between replicas.""")


@dataclass(frozen=True, eq=False)
class BaselinePlan(Answer):
    """The blocks of each stage, what else the algorithm decided, and the step and memory that this gives."""

    planner: str
    boundaries: list[int]
    """Stage k holds blocks boundaries[k] .. boundaries[k + 1] - 1; 0 first, the number of blocks last."""
    replicas: list[int]
    """Devices of each stage: more than 1 only for PipeDream and DAPPLE."""
    recompute: BoolArray
    """bool [n]: blocks that run their forward again in backward."""
    swap: BoolArray
    """bool [n]: blocks whose activations wait in host memory (vPipe)."""
    stage_time_s: FloatArray
    """[stages] forward + backward of one micro-batch, recomputation included, of all replicas together."""
    peak_memory_bytes: FloatArray
    """[stages] of each device; 0 without ``memory``, or where its limit is infinite."""
    pivot_stage: float | None
    """DAPPLE's pivot: k, or k + 0.5 for the messages between stages k and k + 1."""
    objective_s: float
    """What the algorithm itself minimised: PipeDream the slowest stage or link, DAPPLE and AdaPipe their modelled latency,
    vPipe the slowest stage; 0 for rules that only count blocks."""
    step_time_s: float
    """One step by our simulator: 1F1B, and where stages have replicas the exchange of weights after their last backward."""
    lower_bound_s: float
    """No plan of these blocks without recomputation is faster, whatever its memory (proven): on as many stages without replicas;
    for PipeDream and DAPPLE, unless ``straight``, on as many devices, with or without replicas."""
    steps: int
    """Candidates that the algorithm evaluated."""
    planning_time_s: float
    """Seconds of the algorithm alone, without the judging."""
    micro_batches: int

    @property
    def gap(self) -> float:
        """(step - bound) / bound; infinite where a step takes time and the bound is 0."""
        return gap_above(self.step_time_s, self.lower_bound_s)

    @property
    def _blocks(self) -> str:
        """Text: each stage's blocks, times its replicas, and how many of them recompute or swap."""
        sizes = [b - a for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)]
        shape = "/".join(f"{size}" if r == 1 else f"{size}x{r}" for size, r in zip(sizes, self.replicas, strict=True))
        extras = [f", {int(what.sum())} {name}" for name, what in (("recomputed", self.recompute), ("swapped", self.swap))
                  if what.any()]  # fmt: skip
        return f"{shape} blocks{''.join(extras)}"

    @property
    def _step(self) -> str:
        above = f"{self.gap * 100:.2f} % above the bound" if math.isfinite(self.gap) else "of which no bound is known"
        return f"{human_seconds(self.step_time_s)} a step, {above}"

    def __repr__(self) -> str:
        return f"BaselinePlan({self.planner}: {self._blocks}, {self._step}, planned in {human_seconds(self.planning_time_s)})"

    def _repr_html_(self) -> str:
        times, peaks = (", ".join(map(show, map(float, values))) for show, values in
                        ((human_seconds, self.stage_time_s), (human_bytes, self.peak_memory_bytes)))  # fmt: skip
        return html_table(self.planner, [
            ("stages", self._blocks), ("a micro-batch on each", times), ("time", self._step),
            *([("memory of each", peaks)] if self.peak_memory_bytes.any() else []),
            ("planned in", human_seconds(self.planning_time_s))])  # fmt: skip


def _part(memory: Any, key: str) -> Any:
    return memory.get(key) if isinstance(memory, Mapping) else getattr(memory, key, None)


def _limits(memory: Any, blocks: int) -> tuple[float, list[FloatArray | None]]:
    """The limit (0: none), and the arrays static, activation, transient, recompute; the first two are zeros where missing."""
    if memory is None:
        return 0.0, [None] * 4
    known = {"limit_bytes", "static_bytes", "activation_bytes", "transient_bytes", "recompute_s", "in_flight"}
    if isinstance(memory, Mapping) and memory.keys() - known:
        raise _core.InvalidValueError(f"memory has {brief(sorted(memory.keys() - known, key=str))}: {sorted(known)} would be right")
    given = _part(memory, "limit_bytes")
    limit = number(given, "memory's limit_bytes", "one number of bytes")
    if not limit > 0.0:
        raise _core.InvalidValueError(f"memory's limit_bytes is {given!r}: more than 0 is needed")
    arrays: list[FloatArray | None] = []
    for key in ("static_bytes", "activation_bytes", "transient_bytes", "recompute_s"):
        value = _part(memory, key)
        if value is None:
            value = None if key in ("transient_bytes", "recompute_s") else np.zeros(blocks)
        elif isinstance(value, (int, float, np.integer, np.floating)):
            value = np.full(blocks, number(value, key))
        arrays.append(None if value is None else array(value, key))
    return (0.0 if math.isinf(limit) else limit), arrays


def _run(
    planner: str,
    fwd: Times,
    bwd: Times,
    stages: int,
    micro_batches: int,
    comm_s: float,
    blocking: bool,
    memory: Any,
    *,
    name: str = "stages",
    param_bytes: Times | None = None,
    bandwidth_Bps: float = math.inf,
    option: int = 0,
    swap_Bps: float = 0.0,
) -> BaselinePlan:
    forward, backward = array(fwd, "fwd"), array(bwd, "bwd")
    limit, limits = _limits(memory, len(forward))
    weights = None if param_bytes is None else array(param_bytes, "param_bytes")
    micros = integer(micro_batches, "micro_batches")
    found = _core.plan_baseline(
        planner, (forward, backward, *limits, weights), integer(stages, name), micros, number(comm_s, "comm_s", "seconds"),
        flag(blocking, "blocking"), limit, number(bandwidth_Bps, "bandwidth_Bps"), option, number(swap_Bps, "swap_bandwidth_Bps"),
        None if memory is None else integers(_part(memory, "in_flight"), "memory's in_flight", "one count a stage"),
    )  # fmt: skip
    boundaries, replicas, actions, time_s, peak, pivot, objective_s, step_s, bound_s, steps, seconds = found
    action = np.frombuffer(actions, np.uint8)
    return BaselinePlan(
        planner, boundaries, replicas, action == 1, action == 2, time_s, peak, None if pivot < 0 else pivot / 2, objective_s,
        step_s, bound_s, steps, seconds, micros,
    )  # fmt: skip


@explained(_STAGES)
def uniform(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False, memory: Any = None
) -> BaselinePlan:
    """Megatron's even division (Narayanan et al., SC 2021): the same number of blocks for each stage; the first stages have one
    more each where blocks are left over."""
    return _run("uniform", fwd, bwd, stages, micro_batches, comm_s, blocking, memory)


@explained(_STAGES)
def merak(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False, memory: Any = None,
    *, shards: int | None = None,
) -> BaselinePlan:  # fmt: skip
    """Merak's rule (TPDS 2023): blocks are merged into ``shards`` of about equal runtime (None: each block is one), and each stage
    has the same number of shards; the stages after the first have one more each where shards are left over. Checked against its
    repository's rules."""
    count = 0 if shards is None else integer(shards, "shards")
    if shards is not None and count < 1:
        raise _core.InvalidValueError(f"shards is {count}: at least 1 is needed")
    return _run("merak", fwd, bwd, stages, micro_batches, comm_s, blocking, memory, option=count)


@explained(_DEVICES)
def pipedream(
    fwd: Times, bwd: Times, devices: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False, memory: Any = None,
    *, param_bytes: Times | None = None, bandwidth_Bps: float = math.inf, straight: bool = False,
) -> BaselinePlan:  # fmt: skip
    """PipeDream's dynamic programme (SOSP 2019, section 3.1): partition and replicas of stages on ``devices`` with the least time
    of the slowest stage or link. Replicas exchange param_bytes over bandwidth_Bps and take whole micro-batches in turn. straight:
    no replicas, so ``devices`` stages."""
    return _run(
        "pipedream", fwd, bwd, devices, micro_batches, comm_s, blocking, memory, name="devices", param_bytes=param_bytes,
        bandwidth_Bps=bandwidth_Bps, option=int(flag(straight, "straight")),
    )  # fmt: skip


@explained(_DEVICES)
def dapple(
    fwd: Times, bwd: Times, devices: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False, memory: Any = None,
    *, param_bytes: Times | None = None, bandwidth_Bps: float = math.inf, straight: bool = False,
) -> BaselinePlan:  # fmt: skip
    """DAPPLE's planner (PPoPP 2021, section 4): partition and replicas on ``devices`` with the least latency of its pivot-stage
    model. Replicas split every micro-batch and exchange param_bytes over bandwidth_Bps at the end. Checked against a summary of the
    paper, its author's slides and code, and published plans (csrc/plan/baseline_dapple.c); the printed formula was not seen.
    straight: no replicas, so ``devices`` stages."""
    return _run(
        "dapple", fwd, bwd, devices, micro_batches, comm_s, blocking, memory, name="devices", param_bytes=param_bytes,
        bandwidth_Bps=bandwidth_Bps, option=int(flag(straight, "straight")),
    )  # fmt: skip


@explained(_STAGES)
def vpipe(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False, memory: Any = None,
    *, swap_bandwidth_Bps: float = 0.0,
) -> BaselinePlan:  # fmt: skip
    """vPipe (TPDS 2022): swaps and recomputation are chosen in each stage so that it fits, and blocks are moved between
    neighbouring stages as in Kernighan and Lin's search. swap_bandwidth_Bps: bytes a second to the host (0: no swap). Without
    ``memory`` it neither swaps nor recomputes. Its parts are those that readers of the paper report and its published plans show;
    which move comes first and which block is swapped was chosen here."""
    return _run("vpipe", fwd, bwd, stages, micro_batches, comm_s, blocking, memory, swap_Bps=swap_bandwidth_Bps)


@explained(_STAGES)
def adapipe(
    fwd: Times, bwd: Times, stages: int, micro_batches: int, comm_s: float = 0.0, blocking: bool = False, memory: Any = None
) -> BaselinePlan:
    """AdaPipe (ASPLOS 2024): for each possible stage the least recomputation that fits (a knapsack), then the partition with the
    least modelled 1F1B latency. Without ``recompute_s`` in ``memory`` it recomputes nothing. Only the abstract of the paper was
    found: the equations are ours."""
    return _run("adapipe", fwd, bwd, stages, micro_batches, comm_s, blocking, memory)
