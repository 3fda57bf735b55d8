"""Token slices for stages of unequal times, which are jobs of a permutation flow shop. Times are seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from ..config import brief, counted, gap_above, html_table, human_seconds
from .answer import Answer
from .arguments import FloatArray, array, integer, listed, number

__all__ = ["SliceMemory", "UnevenSlicePlan", "flow_shop_time", "slice_uneven"]

_NEVER = 1e300    # the largest number of bytes that the core knows, for a limit that is infinite


@dataclass(frozen=True)
class SliceMemory:
    """Bytes that a slice of ``s`` tokens (units, for a table) after ``c`` of context holds while it runs on a stage, for each
    sequence: ``row_bytes s + pair_bytes s (s + c) + context_bytes (s + c)``; and their limit."""

    limit_bytes: float
    row_bytes: float = 0.0
    pair_bytes: float = 0.0
    context_bytes: float = 0.0

    def in_units(self, tokens: int) -> tuple[float, float, float, float]:
        """(limit, row, pair, context) for lengths in units of ``tokens`` tokens."""
        limit, row, pair, context = (number(getattr(self, f"{part}_bytes"), f"{part}_bytes", "a number of bytes")
                                     for part in ("limit", "row", "pair", "context"))  # fmt: skip
        if not limit > 0.0:
            raise _core.InvalidValueError(f"limit_bytes is {limit}: more than 0 bytes is needed; None is no limit")
        return (min(limit, _NEVER), row * tokens, pair * tokens**2, context * tokens)


def held_in_units(memory: SliceMemory | Mapping[str, float] | None, tokens: int) -> tuple[float, float, float, float] | None:
    """The argument ``memory`` (a SliceMemory, or a dict of its fields) as the core takes it."""
    known = ("limit_bytes", "row_bytes", "pair_bytes", "context_bytes")
    if isinstance(memory, Mapping):
        if memory.keys() - set(known) or "limit_bytes" not in memory:
            raise _core.InvalidValueError(f"memory has {brief(sorted(memory, key=str))}: limit_bytes, and of "
                                          f"{', '.join(known[1:])} what is held, would be right")  # fmt: skip
        memory = SliceMemory(**memory)
    if memory is not None and not isinstance(memory, SliceMemory):
        raise _core.InvalidTypeError(f"memory is {brief(memory)}: a SliceMemory or a dict of its fields would be right")
    return None if memory is None else memory.in_units(tokens)


@dataclass(frozen=True, eq=False)
class UnevenSlicePlan(Answer):
    """How one sequence is cut for stages of unequal times."""

    lengths: list[int]
    """Slice lengths in order: units of the tables, or tokens for cost models."""
    latency_s: float
    """The makespan of the forward pass, evaluated exactly; with ``bwd``, of forward and then backward."""
    lower_bound_s: float
    """No slicing is faster."""
    optimal: bool
    """Proven optimal. False above 256 units, or where the work ended before the proof, unless the bound closes the gap."""
    stages: int
    labels: int
    """Labels that the exact search made."""
    moves: int
    """Slicings that the local search tried."""
    bounds: int
    """Dynamic programmes for the bound."""
    planning_time_s: float

    @property
    def gap(self) -> float:
        """(latency - bound) / bound."""
        return gap_above(self.latency_s, self.lower_bound_s, self.optimal)

    @property
    def _proof(self) -> str:
        return "optimal" if self.optimal else f"gap {self.gap * 100:.2g} %"

    def __repr__(self) -> str:
        return (
            f"UnevenSlicePlan({counted(len(self.lengths), 'slice')} {runs(self.lengths)}, {human_seconds(self.latency_s)} on "
            f"{self.stages} unequal stages, {self._proof}, planned in {human_seconds(self.planning_time_s)})"
        )

    def _repr_html_(self) -> str:
        return html_table("Slices for unequal stages", [
            (counted(len(self.lengths), "slice"), runs(self.lengths)), ("stages", f"{self.stages}"),
            ("latency", f"{human_seconds(self.latency_s)}, {self._proof}"),
            ("planned in", human_seconds(self.planning_time_s))])  # fmt: skip


def runs(lengths: Sequence[int]) -> str:
    """The papers' notation: [120]*4+[112]*6."""
    found: list[list[int]] = []
    for length in lengths:
        if found and found[-1][0] == length:
            found[-1][1] += 1
        else:
            found.append([length, 1])
    return "+".join(f"[{length}]" + (f"*{count}" if count > 1 else "") for length, count in found)


Core = FloatArray | tuple[FloatArray, FloatArray, float, float]


def machine_plan(
    forward: Sequence[Core], backward: Sequence[Core] | None, comm: Core | None, *, longest: int, memory: Any, work: int
) -> tuple[Any, ...]:
    """The core's answer for stages with these costs and links with cost ``comm`` between them."""
    distinct: list[Core] = []
    names: list[str] = []
    index: dict[Any, int] = {}
    known: dict[int, int] = {}                                 # equal stages are most often one object

    def place(cost: Core, name: str) -> int:
        if id(cost) not in known:
            known[id(cost)] = numbered(cost, name)
        return known[id(cost)]

    def numbered(cost: Core, name: str) -> int:
        parts = cost if isinstance(cost, tuple) else (cost,)
        key = tuple((p.shape, p.tobytes()) if isinstance(p, np.ndarray) else p for p in parts)
        if key not in index:
            index[key] = len(distinct)
            distinct.append(cost)
            names.append(name)
        return index[key]

    machines: list[int] = []
    for chain, called in ((forward, "tables"), (backward, "bwd")):
        for k, cost in enumerate(chain or ()):
            if k and comm is not None:
                machines.append(place(comm, "comm"))
            machines.append(place(cost, f"{called}[{k}]"))
    of = np.array(machines, np.int32)
    return _core.plan_shop(distinct, names, of, chains=2 if backward else 1, longest=longest, memory=memory, work=work)


def slice_uneven(
    tables: Any,
    *,
    bwd: Any = None,
    comm: Any = None,
    seq_len: int | None = None,
    granularity: int | None = None,
    max_slice: int | None = None,
    memory: SliceMemory | Mapping[str, float] | None = None,
    work: int = 0,
) -> UnevenSlicePlan:
    """The slicing of one sequence with the least makespan through stages of unequal times.

    tables: one slice cost a stage, as ``slice_tokens`` takes them: float64 [K, n + 1, n + 1], or a sequence of tables or
    cost models (with seq_len and granularity as there). bwd: as many for the backward pass, which begins when the last stage ends
    its forwards; the latency is that of both. comm: a slice's seconds on each link between two stages, while these work: float64
    [n + 1] by slice length, one more cost, or True for the first cost model's own links. Up to 256 units the optimum is proven if
    ``work`` (extensions of a label by one machine) suffices, as 0 (6e9: most often a second or two, at most some twenty) does for
    most tables; above, the slicing is a local optimum of boundary moves, evaluated exactly, and no slower than that of any
    granularity that is a multiple of this one. ``lower_bound_s`` is proven either way. Deterministic: no clock is read. Proven
    plans are no slower with more memory; others may be: 3 of 100 were seen to be, by up to 1.1 %.

    max_slice, memory and errors as of ``slice_tokens``.
    """
    from .slices import _longest, _message, _unit, _units, core_cost

    stages = listed(tables, "tables", "a cost for each stage")
    if not stages:
        raise _core.InvalidValueError("tables has no stages: at least 1 cost is needed")
    unit = _unit(stages[0], "slice_cost", seq_len, granularity)
    forward = [core_cost(t, unit, "fwd" if bwd is not None else "both", f"tables[{k}]") for k, t in enumerate(stages)]
    given = None if bwd is None else listed(bwd, "bwd", "a cost for each stage")
    backward = None if given is None else [core_cost(t, unit, "bwd", f"bwd[{k}]") for k, t in enumerate(given)]
    if backward is not None and len(backward) != len(forward):
        raise _core.InvalidValueError(f"bwd has {len(backward)} stages: {len(forward)}, as tables, would be right")
    scale = unit[1] if unit else 1
    if integer(work, "work", 62) < 0:
        raise _core.InvalidValueError(f"work is {work}: 0 or more is needed")
    found = machine_plan(
        forward,
        backward,
        None if comm is None or comm is False else _message(comm, stages[0], unit, _units(forward[0]), "tables[0]"),
        longest=_longest(max_slice, scale),
        memory=held_in_units(memory, scale),
        work=integer(work, "work", 62),
    )
    lengths = [length * scale for length in found[0]]
    return UnevenSlicePlan(lengths, found[1], found[2], found[3], len(stages), *found[4:])


def flow_shop_time(times: Any) -> float:
    """Makespan in seconds of a permutation flow shop: jobs pass all machines, every machine takes the jobs in their order. times:
    float64 [jobs, machines] seconds. Slices through stages are such jobs; so are slices whose messages overlap with work, with
    links as machines between the stages. InvalidValueError names a cell that is negative or not finite, or says that the cells sum
    to more than a double holds."""
    cells = array(times, "times")
    if cells.ndim == 2 and cells.size and not (np.isfinite(cells) & (cells >= 0)).all():
        m, q = np.argwhere(~(np.isfinite(cells) & (cells >= 0)))[0]
        raise _core.InvalidValueError(f"times[{m}, {q}] is {cells[m, q]}: finite seconds from 0 on would be right")
    makespan = float(_core.flow_shop(cells))
    if not np.isfinite(makespan):
        raise _core.InvalidValueError("times add up beyond what a double holds: smaller seconds would be right")
    return makespan
