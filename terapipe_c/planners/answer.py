"""Base of the planners' results, which compare by value."""

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
    """Two results are equal, and have equal hashes, if all fields but ``planning_time_s`` are: so the same question gives equal
    results. Subclasses are dataclasses with ``eq=False``: the ``==`` that dataclasses write fails on arrays, their hash on lists.
    """

    def _values(self) -> tuple[Any, ...]:
        return tuple(_value(getattr(self, f.name)) for f in fields(self) if f.name != "planning_time_s")  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())
