"""Token slices for stages that are not equal: the makespan of a permutation flow shop (PLANNERS.md 1.8). Times are seconds.

Tables are float64 [stages, n + 1, n + 1]: ``t[k, s, c]`` is the time of a slice of ``s`` units after ``c`` units of context on
stage ``k``; only ``s >= 1, s + c <= n`` is read. With ``bwd`` the backward passes follow, the last slice first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from .arguments import array, integer
from .slices import _runs

__all__ = ["UnevenSlicePlan", "slice_uneven", "flow_shop"]


@dataclass(frozen=True)
class UnevenSlicePlan:
    """How one sequence is cut for stages that differ."""

    lengths: list[int]
    """Slice lengths in order, in units of the tables."""
    latency_s: float
    """Exact makespan: of the forward passes, plus that of the backward passes."""
    lower_bound_s: float
    """No slicing is faster. With ``optimal`` it is ``latency_s`` less the rounding of double sums."""
    optimal: bool
    """False if ``work`` ended the search or there are more than 256 units."""
    stages: int
    labels: int
    """Partial slicings that were kept."""
    work: int
    """Partial slicings extended or compared."""
    evaluations: int
    """Whole slicings timed."""
    planning_time_s: float

    @property
    def gap(self) -> float:
        """(latency - bound) / bound."""
        return 0.0 if self.lower_bound_s <= 0.0 else self.latency_s / self.lower_bound_s - 1.0

    def __repr__(self) -> str:
        proof = "optimal" if self.optimal else f"gap {self.gap * 100:.2f} %"
        return (
            f"UnevenSlicePlan({len(self.lengths)} slices {_runs(self.lengths)}, {self.latency_s * 1e3:.6g} ms on "
            f"{self.stages} uneven stages, {proof}, planned in {self.planning_time_s * 1e3:.3g} ms)"
        )


def slice_uneven(tables: Any, bwd: Any = None, *, max_slice: int | None = None, work: int | None = None) -> UnevenSlicePlan:
    """The slicing of least makespan on stages that are not equal: exact up to 256 units unless ``work`` (partial slicings
    extended or compared; None: 50 million) ends the search, which is then said. Beyond 256 units: exact on a grid of cuts,
    then improved cut by cut; the bound holds over all slicings. max_slice caps the slice length, in units.
    """
    longest = 0 if max_slice is None else integer(max_slice, "max_slice")
    steps = 0 if work is None else integer(work, "work")
    for name, given, value in (("max_slice", max_slice, longest), ("work", work, steps)):
        if given is not None and value < 1:
            raise ValueError(f"{name} is {value}: at least 1 is needed")
    forward = array(tables, "t")
    found = _core.plan_uneven(forward, None if bwd is None else array(bwd, "bwd"), min(longest, 2**31 - 1), min(steps, 2**62))
    return UnevenSlicePlan(*found[:4], len(forward), *found[4:])


def flow_shop(tables: Any, lengths: Sequence[int], bwd: Any = None) -> float:
    """Seconds of this slicing: each slice passes the stages in order, each stage takes the slices in order; with ``bwd``, then
    back through the stages in reverse, the last slice first."""
    cuts = [integer(length, "a slice length") for length in lengths]
    for length in cuts:
        if not 0 < length < 2**31:
            raise ValueError(f"a slice has length {length}: at least one unit is needed")
    return _core.flow_shop(array(tables, "t"), np.array(cuts, np.int32), None if bwd is None else array(bwd, "bwd"))
