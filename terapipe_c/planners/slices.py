"""Token slices (TeraPipe): how the batch and the tokens of each sequence are cut. Times are seconds.

A slice cost is one of

* a float64 array ``t[n + 1, n + 1]``: ``t[s, c]`` is the time of a slice of ``s`` units after ``c`` units of context;
  only the triangle ``s >= 1, s + c <= n`` is read, and it may hold any finite times of 0 or more;
* an object with ``slice_cost(seq_len, granularity, phase)``, as ``CostModel`` has, which returns ``{"table": t}`` or
  ``{"G0": ..., "G1": ..., "a2": ..., "a3": ...}``: ``G0[s]`` if ``c == 0`` else ``G1[s] + a2 c + a3 s c``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .. import _core
from .arguments import FloatArray, array, integer, time_limit

__all__ = [
    "SliceCosts",
    "SlicePlan",
    "BatchSlicePlan",
    "slice_tokens",
    "slice_batch_and_tokens",
    "slice_bound",
]

_UNITS_IN_A_SECOND = 16384  # up to here the exact search takes well under a second at any granularity


@runtime_checkable
class SliceCosts(Protocol):
    """What the slice planners ask of a cost model."""

    def slice_cost(self, seq_len: int, granularity: int, phase: str) -> dict[str, Any]:
        """Costs in units of ``granularity`` tokens for ``seq_len // granularity`` units; phase fwd, bwd or both."""
        ...


@dataclass(frozen=True)
class _Search:
    total_s: float
    """Sum of all slice times."""
    max_s: float
    """The largest slice time (with ``bwd``: the largest forward plus the largest backward time)."""
    latency_s: float
    """``total_s + (stages - 1) * max_s``: the makespan of the pipeline."""
    lower_bound_s: float
    """No plan is faster. With ``optimal`` it is ``latency_s`` less the rounding of double sums (about 1e-12 of it)."""
    optimal: bool
    """False only if the time limit ended the search."""
    stages: int
    searches: int
    """Dynamic programmes over all slices."""
    small_searches: int
    """Dynamic programmes over the few slices that a better plan could still use."""
    edges: int
    """The largest number of such slices."""
    boxes: int
    """Boxes examined (separate forward and backward only)."""
    planning_time_s: float

    @property
    def gap(self) -> float:
        """(latency - bound) / bound."""
        return 0.0 if self.lower_bound_s <= 0.0 else self.latency_s / self.lower_bound_s - 1.0


@dataclass(frozen=True)
class SlicePlan(_Search):
    """How one sequence is cut."""

    lengths: list[int]
    """Slice lengths in order: units of the table, or tokens for a cost model."""

    def __repr__(self) -> str:
        proof = "optimal" if self.optimal else f"gap {self.gap * 100:.2f} %"
        return (
            f"SlicePlan({len(self.lengths)} slices {_runs(self.lengths)}, {self.latency_s * 1e3:.6g} ms on "
            f"{self.stages} stages, {proof}, planned in {self.planning_time_s * 1e3:.3g} ms)"
        )


@dataclass(frozen=True)
class BatchSlicePlan(_Search):
    """How a batch is grouped, and each group's sequences cut: ``[(sequences, [slice lengths]), ...]``."""

    slicing: list[tuple[int, list[int]]]

    def __repr__(self) -> str:
        proof = "optimal" if self.optimal else f"gap {self.gap * 100:.2f} %"
        groups = ", ".join(f"({batch}, {_runs(lengths)})" for batch, lengths in self.slicing)
        return (
            f"BatchSlicePlan([{groups}], {self.latency_s * 1e3:.6g} ms on {self.stages} stages, {proof}, planned in "
            f"{self.planning_time_s * 1e3:.3g} ms)"
        )


def _runs(lengths: Sequence[int]) -> str:
    """The papers' notation: [120]*4+[112]*6."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1][1] += 1
        else:
            runs.append([length, 1])
    return "+".join(f"[{length}]" + (f"*{count}" if count > 1 else "") for length, count in runs)


_Core = FloatArray | tuple[FloatArray, FloatArray, float, float]
Costs = FloatArray | Sequence[Sequence[float]] | SliceCosts


def _from_dict(costs: dict[str, Any]) -> _Core:
    if "table" in costs:
        return array(costs["table"], "table")
    return (array(costs["G0"], "G0"), array(costs["G1"], "G1"), float(costs["a2"]), float(costs["a3"]))


def _unit(t: Any, attribute: str, seq_len: int | None, granularity: int | None) -> tuple[int, int] | None:
    """(seq_len, tokens a unit) for a cost model, None for a table."""
    if not hasattr(t, attribute):
        for name, value in (("seq_len", seq_len), ("granularity", granularity)):
            if value is not None:
                raise ValueError(f"{name} is {value}, but t is a table: its lengths are in units of the table")
        return None
    if seq_len is None:
        raise ValueError("seq_len is needed with a cost model")
    tokens = integer(seq_len, "seq_len")
    if tokens < 1:
        raise ValueError(f"seq_len is {tokens}: at least 1 token is needed")
    unit = _default_granularity(tokens) if granularity is None else integer(granularity, "granularity")
    if unit < 1 or tokens % unit:
        raise ValueError(f"granularity is {unit}: a divisor of seq_len, {tokens}, would be right")
    return tokens, unit


def _default_granularity(seq_len: int) -> int:
    unit = 1
    while seq_len // unit > _UNITS_IN_A_SECOND and seq_len % (2 * unit) == 0:
        unit *= 2
    return unit


def _longest(max_slice: int | None, unit: int) -> int:
    if max_slice is None:
        return 0
    longest = integer(max_slice, "max_slice")
    if longest < unit:
        raise ValueError(f"max_slice is {longest}: at least one unit, {unit}, is needed")
    return longest // unit


def slice_tokens(
    t: Costs,
    stages: int,
    *,
    seq_len: int | None = None,
    granularity: int | None = None,
    bwd: Costs | bool | None = None,
    max_slice: int | None = None,
    time_limit_s: float | None = None,
    isa: int = 0,
) -> SlicePlan:
    """The slicing of one sequence that minimises ``sum(t_i) + (stages - 1) * max(t_i)``, exactly.

    t: float64 [n + 1, n + 1] seconds, or a cost model with seq_len (tokens) and granularity (tokens a unit; None:
    chosen so that planning stays under a second). With ``bwd`` (a second table, a cost model, or True for the backward
    costs of the cost model t), forward and backward are apart: ``sum(f_i + b_i) + (stages - 1) (max f_i + max b_i)``.
    max_slice caps the slice length, in the units of the result. isa is for tests (0: the best this machine has).
    """
    count = integer(stages, "stages")
    unit = _unit(t, "slice_cost", seq_len, granularity)
    longest = _longest(max_slice, unit[1] if unit else 1)
    if bwd is False:
        bwd = None
    forward: _Core
    if unit is None:
        forward = array(t, "t")
    else:
        forward = _from_dict(t.slice_cost(*unit, "both" if bwd is None else "fwd"))  # type: ignore[union-attr]
    if bwd is None:
        found = _core.plan_slices([forward], 1, count, longest=longest, time_limit_s=time_limit(time_limit_s), isa=isa)
    else:
        backward = _backward(t if bwd is True else bwd, unit)
        found = _core.plan_slices_apart(
            forward, backward, count, longest=longest, time_limit_s=time_limit(time_limit_s), isa=isa
        )
    ((_, lengths),) = found[0]
    if unit is not None and unit[1] != 1:
        lengths = [length * unit[1] for length in lengths]
    return SlicePlan(*found[1:6], count, *found[6:], lengths)


def _backward(bwd: Any, unit: tuple[int, int] | None) -> _Core:
    if not hasattr(bwd, "slice_cost"):
        return array(bwd, "bwd")
    if unit is None:
        raise ValueError("bwd is a cost model, but t is a table: both must be of one kind")
    return _from_dict(bwd.slice_cost(*unit, "bwd"))


def slice_batch_and_tokens(
    t: Any,
    batch: int,
    stages: int,
    *,
    seq_len: int | None = None,
    granularity: int | None = None,
    max_slice: int | None = None,
    max_group: int | None = None,
    time_limit_s: float | None = None,
    isa: int = 0,
) -> BatchSlicePlan:
    """Group ``batch`` sequences and cut each group so that all slices through ONE pipeline (never flushed in between)
    take the least ``sum + (stages - 1) * max``, exactly (the papers' knapsack pays the maximum once a group).

    t: float64 [batch + 1, n + 1, n + 1]: t[b, s, c] seconds of s units of b sequences at once, t[0] is not read; or a
    cost model with ``slice_cost_batched(batch, seq_len, granularity)``. max_group caps the sequences of a group,
    max_slice the slice length.
    """
    sequences, count = integer(batch, "batch"), integer(stages, "stages")
    if sequences < 1:
        raise ValueError(f"batch is {sequences}: at least 1 sequence is needed")
    widest = 0 if max_group is None else integer(max_group, "max_group")
    if max_group is not None and widest < 1:
        raise ValueError(f"max_group is {widest}: at least 1 sequence is needed")
    sizes = min(widest or sequences, sequences)
    unit = _unit(t, "slice_cost_batched", seq_len, granularity)
    costs: list[_Core]
    if unit is None:
        table = array(t, "t")
        if table.ndim != 3 or table.shape[0] < sizes + 1:
            raise ValueError(
                f"t has shape {list(table.shape)}: [batch + 1, n + 1, n + 1] with batch = {sizes} is needed"
            )
        costs = [table[b] for b in range(1, sizes + 1)]
    else:
        costs = [_from_dict(cost) for cost in t.slice_cost_batched(sizes, *unit)[-sizes:]]  # index 0 is unused
    found = _core.plan_slices(
        costs,
        sequences,
        count,
        longest=_longest(max_slice, unit[1] if unit else 1),
        widest=widest,
        time_limit_s=time_limit(time_limit_s),
        isa=isa,
    )
    slicing = found[0]
    if unit is not None and unit[1] != 1:
        slicing = [(group, [length * unit[1] for length in lengths]) for group, lengths in slicing]
    return BatchSlicePlan(*found[1:6], count, *found[6:], slicing)


def slice_bound(
    t: Costs,
    stages: int,
    lengths: Sequence[int],
    *,
    seq_len: int | None = None,
    granularity: int | None = None,
    max_slice: int | None = None,
    isa: int = 0,
) -> float:
    """A proven lower bound, in seconds, on the latency of every slicing, in one dynamic programme: a certificate for
    instances too large to solve. ``lengths``: any slicing (the better, the tighter), in units of the table or tokens.
    Never above that slicing's own latency.
    """
    unit = _unit(t, "slice_cost", seq_len, granularity)
    cost = array(t, "t") if unit is None else _from_dict(t.slice_cost(*unit, "both"))  # type: ignore[union-attr]
    scale = unit[1] if unit else 1
    cuts = [integer(length, "a slice length") for length in lengths]
    for length in cuts:
        if length % scale or not 0 < length < 2**31:
            raise ValueError(f"a slice has length {length}: a positive multiple of the granularity, {scale}, is needed")
    return float(
        _core.plan_slice_bound(
            cost,
            np.array([length // scale for length in cuts], np.int32),
            integer(stages, "stages"),
            longest=_longest(max_slice, scale),
            isa=isa,
        )
    )


