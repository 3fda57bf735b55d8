"""What every planner's face does with its arguments: checked here once, with the caller's name for them in the message."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def integer(value: Any, what: str) -> int:
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError(f"{what} is {value!r}: an integer would be right") from None


def array(value: Any, what: str) -> FloatArray:
    """An array as it is (the core refuses another dtype or layout); anything else is converted."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.ascontiguousarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {type(value).__name__}: a float64 array or a cost model would be right") from None


def time_limit(time_limit_s: float | None) -> float:
    if time_limit_s is None:
        return 0.0
    if not time_limit_s > 0.0:
        raise ValueError(f"time_limit_s is {time_limit_s}: more than 0 seconds is needed")
    return float(time_limit_s) if np.isfinite(time_limit_s) else 0.0
