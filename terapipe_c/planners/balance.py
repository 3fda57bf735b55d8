"""Min-max partition: contiguous parts, the largest as small as possible."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core
from .arguments import FloatArray, array, integer


def balance(times: FloatArray | Sequence[float], stages: int) -> list[int]:
    """Boundaries (stages + 1 of them, 0 first, len(times) last) of the contiguous partition of ``times`` (seconds)
    whose largest part is least; no part is empty. Exact, with sums of doubles. InvalidValueError names a time that is negative or
    not finite, or more stages than times."""
    return list(_core.plan_balance(array(times, "times"), integer(stages, "stages")))
