"""What a planner's answers have in common: they are values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

__all__ = ["Answer"]


def _value(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.shape, tuple(x.ravel().tolist())
    if isinstance(x, Mapping):
        return tuple((key, _value(value)) for key, value in x.items())
    return tuple(map(_value, x)) if isinstance(x, (list, tuple)) else x


class Answer:
    """Equal, with equal hashes, where all fields are but the time that planning took: the same question has equal answers.

    Of a dataclass with ``eq=False``: the ``==`` that dataclasses write fails on arrays, and their hash on lists.
    """

    def _values(self) -> tuple[Any, ...]:
        return tuple(_value(getattr(self, f.name)) for f in fields(self) if f.name != "planning_time_s")  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())
