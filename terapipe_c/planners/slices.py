"""TeraPipe's token slices: how are the batch and the tokens of each sequence cut for equal stages? Times are seconds.

A slice cost is one of

* a float64 array ``t[n + 1, n + 1]``: ``t[s, c]`` is the time of a slice of ``s`` units after ``c`` units of context;
  only the triangle ``s >= 1, s + c <= n`` is read, and it may hold any finite times of 0 or more;
* an object with ``slice_cost(seq_len, granularity, phase)``, as ``CostModel`` has, which returns ``{"table": t}`` or
  ``{"G0": ..., "G1": ..., "a2": ..., "a3": ...}``: ``G0[s]`` if ``c == 0`` else ``G1[s] + a2 c + a3 s c``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .. import _core
from ..config import counted, gap_above, html_table, human_seconds
from .answer import Answer
from .arguments import FloatArray, array, integer, listed, number, time_limit
from .uneven import SliceMemory, flow_shop_time, held_in_units, machine_plan, runs

__all__ = [
    "SliceCosts",
    "SlicePlan",
    "BatchSlicePlan",
    "slice_tokens",
    "slice_tokens_for",
    "slice_batch_and_tokens",
    "slice_bound",
]

_SHOP_WORK, _SHOP_RATE = 6_000_000_000, 3e7  # extensions of a label by a machine: with no limit, and in a second
_SHOP_STAGES = 2048  # 4096 machines, links among them (csrc/plan/shop.h)
# Units up to which planning takes under a second at any granularity, by (do the costs make tables, do forward and backward count
# apart). Tables have units^2 cells: 16384 units are 2 GiB each.
_UNITS_IN_A_SECOND = {(False, False): 16384, (False, True): 4096, (True, False): 4096, (True, True): 2048}


@runtime_checkable
class SliceCosts(Protocol):
    """The method of a cost model that the slice planners call."""

    def slice_cost(self, seq_len: int, granularity: int, phase: str) -> dict[str, Any]:
        """Costs in units of ``granularity`` tokens for ``seq_len // granularity`` units; phase fwd, bwd or both."""
        ...


@dataclass(frozen=True, eq=False)
class _Search(Answer):
    total_s: float
    """Sum of all slice times."""
    max_s: float
    """The largest slice time (with ``bwd``: the largest forward plus the largest backward time)."""
    latency_s: float
    """``total_s + (stages - 1) * max_s``: the makespan of the pipeline (where a message takes longer than its slice: evaluated)."""
    lower_bound_s: float
    """No plan is faster. With ``optimal`` it is ``latency_s`` less the rounding of double sums (about 1e-12 of it)."""
    optimal: bool
    """False only if the gap or the time limit ended the search, or where rounding is more than 1e-9 of the latency (times near
    5e-324 s)."""
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
        return gap_above(self.latency_s, self.lower_bound_s, self.optimal)

    @property
    def _proof(self) -> str:
        return "optimal" if self.optimal else f"gap {self.gap * 100:.2f} %"

    def _facts(self) -> list[tuple[str, str]]:
        return [("stages", f"{self.stages}"), ("latency", f"{human_seconds(self.latency_s)}, {self._proof}"),
                ("sum of the slices", human_seconds(self.total_s)), ("longest slice", human_seconds(self.max_s)),
                ("planned in", human_seconds(self.planning_time_s))]  # fmt: skip


@dataclass(frozen=True, eq=False)
class SlicePlan(_Search):
    """How one sequence is cut."""

    lengths: list[int]
    """Slice lengths in order: units of the table, or tokens for a cost model."""

    def __repr__(self) -> str:
        return (
            f"SlicePlan({counted(len(self.lengths), 'slice')} {runs(self.lengths)}, {human_seconds(self.latency_s)} on "
            f"{self.stages} stages, {self._proof}, planned in {human_seconds(self.planning_time_s)})"
        )

    def _repr_html_(self) -> str:
        return html_table("Slices of a sequence", [(counted(len(self.lengths), "slice"), runs(self.lengths)), *self._facts()])


@dataclass(frozen=True, eq=False)
class BatchSlicePlan(_Search):
    """How a batch is grouped, and each group's sequences cut: ``[(sequences, [slice lengths]), ...]``."""

    slicing: list[tuple[int, list[int]]]
    flushes: list[int]
    """Sequences in the pipeline together, one number for each time that it is filled and drained; they take the groups of
    ``slicing`` in order."""

    def __repr__(self) -> str:
        groups = ", ".join(f"({batch}, {runs(lengths)})" for batch, lengths in self.slicing)
        return (
            f"BatchSlicePlan([{groups}], {human_seconds(self.latency_s)} on {self.stages} stages, {self._proof}, planned in "
            f"{human_seconds(self.planning_time_s)})"
        )

    def _repr_html_(self) -> str:
        groups = [(f"{counted(batch, 'sequence')} in {counted(len(cut), 'slice')}", runs(cut)) for batch, cut in self.slicing]
        return html_table("Slices of a batch", [*groups, *self._facts()])


_Core = FloatArray | tuple[FloatArray, FloatArray, float, float]
Costs = FloatArray | Sequence[Sequence[float]] | SliceCosts


def _from_dict(costs: dict[str, Any]) -> _Core:
    if "table" in costs:
        return array(costs["table"], "table")
    return (array(costs["G0"], "G0"), array(costs["G1"], "G1"), float(costs["a2"]), float(costs["a3"]))


def _unit(t: Any, attribute: str, seq_len: int | None, granularity: int | None, apart: bool = False,
          *others: Any) -> tuple[int, int] | None:
    """(seq_len, tokens a unit) for a cost model, None for a table. apart: forward and backward count separately. others: costs that
    are asked for in the same units."""
    if not hasattr(t, attribute):
        for name, value in (("seq_len", seq_len), ("granularity", granularity)):
            if value is not None:
                raise _core.InvalidValueError(f"{name} is {value}, but t is a table: its lengths are in units of the table")
        return None
    if seq_len is None:
        raise _core.InvalidValueError("seq_len is needed with a cost model")
    tokens = integer(seq_len, "seq_len")
    if tokens < 1:
        raise _core.InvalidValueError(f"seq_len is {tokens}: at least 1 token is needed")
    most = _UNITS_IN_A_SECOND[any(getattr(cost, "has_tables", False) for cost in (t, *others)), apart]
    unit = _default_granularity(tokens, most) if granularity is None else integer(granularity, "granularity")
    if unit < 1 or tokens % unit:
        raise _core.InvalidValueError(f"granularity is {unit}: a divisor of seq_len, {tokens}, would be right")
    return tokens, unit


def _default_granularity(seq_len: int, most: int) -> int:
    unit = 1
    while seq_len // unit > most and seq_len % (2 * unit) == 0:
        unit *= 2
    return unit


def _is_linear(cost: Any) -> bool:
    """Is it (G0, G1, a2, a3)? A table of three units may be a tuple of four rows, seconds by length one of four numbers."""
    if not isinstance(cost, tuple) or len(cost) != 4:
        return False
    many = [isinstance(part, Sequence) or getattr(part, "ndim", 0) > 0 for part in cost]
    return many == [True, True, False, False]


def core_cost(cost: Any, unit: tuple[int, int] | None, phase: str, what: str) -> _Core:
    """A slice cost as the core takes it, from a table or from a cost model."""
    if not hasattr(cost, "slice_cost"):
        if _is_linear(cost):
            return (array(cost[0], what), array(cost[1], what), float(cost[2]), float(cost[3]))
        table = array(cost, what)
        if table.ndim != 2:
            raise _core.InvalidValueError(f"{what} has {table.ndim} dimensions: 2, slice and context, would be right")
        return table
    if unit is None:
        raise _core.InvalidValueError(f"{what} is a cost model, but t is a table: both must be of one kind")
    return _from_dict(cost.slice_cost(*unit, phase))


def _message(comm: Any, t: Any, unit: tuple[int, int] | None, units: int, name: str = "t") -> _Core:
    """Seconds of a slice's message, as a cost: of True (the cost model's own links), [n + 1] by length, or any cost."""
    if comm is True:
        model = getattr(t, "model", None)
        if unit is None or model is None or not hasattr(t, "message_s"):
            raise _core.InvalidValueError(f"comm is True, but {name} knows no model and links: a table or seconds by slice length "
                                          "would be right")
        seconds = np.ascontiguousarray(t.message_s(np.arange(units + 1.0) * unit[1], model.n_embd), np.float64)
        return (seconds, seconds, 0.0, 0.0)
    if not hasattr(comm, "slice_cost") and not _is_linear(comm):
        seconds = array(comm, "comm")
        if seconds.ndim == 1:
            wrong = ~((seconds >= 0.0) & (seconds <= 1e300))
            if wrong[1:].any():
                at = 1 + int(np.argmax(wrong[1:]))
                raise _core.InvalidValueError(f"comm[{at}] is {seconds[at]:g}: seconds from 0 to 1e300 would be right")
            return (seconds, seconds, 0.0, 0.0)
    return core_cost(comm, unit, "fwd", "comm")


def _at(cost: _Core, s: Any, c: Any) -> FloatArray:
    """Seconds of slices of s units after c."""
    if not isinstance(cost, tuple):
        return np.asarray(cost[s, c])
    g0, g1, a2, a3 = cost
    return np.asarray(np.where(c == 0, g0[s], g1[s] + a2 * c + a3 * (s * c)))


def _units(cost: _Core) -> int:
    return len(cost[0] if isinstance(cost, tuple) else cost) - 1


def _within(message: _Core, cost: _Core) -> bool:
    """Whether no message takes longer than its slice (both linear in the context unless a table says else)."""
    n = _units(cost)
    if isinstance(message, tuple) and isinstance(cost, tuple):
        s = np.arange(1, n + 1)
        ends = [(s, 0 * s), (s[:-1], 1 + 0 * s[:-1]), (s[:-1], n - s[:-1])]
        return all(bool((_at(message, *e) <= _at(cost, *e)).all()) for e in ends)
    s, c = np.nonzero(np.add.outer(np.arange(n + 1), np.arange(n + 1)) <= n)
    keep = s > 0
    return bool((_at(message, s[keep], c[keep]) <= _at(cost, s[keep], c[keep])).all())


def _overlapped(
    forward: _Core, backward: _Core | None, message: _Core, stages: int, found: tuple[Any, ...], longest: int, memory: Any,
    limit_s: float
) -> tuple[Any, ...]:
    """The plan where some message takes longer than its slice, so that ``found``, the optimum of sum + (K - 1) max, is only a lower
    bound: a flow shop of 2 K - 1 machines, stages and links. Its search is limited by counted work; limit_s (0: none) is as much as
    that takes on a slow processor."""
    if stages > _SHOP_STAGES:
        raise _core.InvalidValueError(f"stages is {stages}: where a message takes longer than its slice at most {_SHOP_STAGES} are "
                                      "possible")
    near = 1 + 4e-12

    def judge(lengths: list[int]) -> tuple[float, float, float]:
        s = np.array(lengths)
        c = np.cumsum(s) - s
        x, latency, total, largest = _at(message, s, c), 0.0, 0.0, 0.0
        for cost in (forward, backward):
            if cost is not None:
                p = _at(cost, s, c)
                times = np.empty((len(s), 2 * stages - 1))
                times[:, ::2], times[:, 1::2] = p[:, None], x[:, None]
                latency += flow_shop_time(times)
                total, largest = total + float(p.sum()), largest + float((p + x).max())
        return latency, total, largest

    lengths, bound, seconds = found[0][0][1], found[4], found[10]
    least = found[3] if found[5] else bound  # a proven plan's own latency: its bound is less by the rounding of sums
    if judge(lengths)[0] > least * near:
        work = limit_s * _SHOP_RATE
        shop = machine_plan([forward] * stages, None if backward is None else [backward] * stages, message, longest=longest,
                            memory=memory, work=max(1, int(work)) if 0 < work < _SHOP_WORK else 0)
        lengths = min((lengths, shop[0]), key=lambda one: judge(one)[0])
        bound, seconds = max(bound, shop[2]), seconds + shop[7]
    latency, total, largest = judge(lengths)
    bound = min(bound, latency)
    return ([(1, lengths)], total, largest, latency, bound, latency <= max(bound, least) * near, *found[6:10], seconds)


def _longest(max_slice: int | None, unit: int) -> int:
    if max_slice is None:
        return 0
    longest = integer(max_slice, "max_slice")
    if longest < unit:
        raise _core.InvalidValueError(f"max_slice is {longest}: at least one unit, {unit}, is needed")
    return longest // unit


def slice_tokens(
    t: Costs,
    stages: int,
    *,
    seq_len: int | None = None,
    granularity: int | None = None,
    bwd: Costs | bool | None = None,
    comm: Any = None,
    max_slice: int | None = None,
    memory: SliceMemory | Mapping[str, float] | None = None,
    gap: float = 0.0,
    time_limit_s: float | None = None,
    isa: int = 0,
) -> SlicePlan:
    """The slicing of one sequence that minimises ``sum(t_i) + (stages - 1) * max(t_i)``, exactly.

    t: float64 [n + 1, n + 1] seconds, or a cost model with seq_len (tokens) and granularity (tokens a unit; None: the least power
    of two with which planning stays under a second, or the largest that divides seq_len: an odd one is planned token by token,
    however long that takes). With ``bwd`` (a second table, a cost model, or True for the backward costs of the cost model t)
    forward and backward count separately: ``sum(f_i + b_i) + (stages - 1) (max f_i + max b_i)``.
    max_slice limits the slice length, in the units of the result; memory limits the bytes that a slice holds while it runs (a
    SliceMemory or a dict of its fields).

    comm: seconds that a slice's message spends on its link while the stages work: float64 [n + 1] by slice length, a table or
    cost model as t, or True for the cost model's own links (messages that stages wait for belong into t instead). Where no
    message takes longer than its slice the latency is ``sum(t_i) + (stages - 1) max(t_i + x_i)``, x_i the message's seconds, and
    the optimum is exact; elsewhere the latency is evaluated exactly, and ``optimal`` says whether the bound proves the plan.
    ``max_s`` is the largest t_i + x_i.

    gap: end the search when the plan is proven within this fraction of the optimum (without ``bwd`` one more dynamic programme
    for each better plan); for sequences too long to solve. time_limit_s: the best plan by then, with its bound (None: no limit).
    isa is for tests (0: the best this machine has).

    InvalidValueError or InvalidTypeError name the argument, the cell and its value; InfeasibleError the slice that max_slice or
    memory rules out. Source: TeraPipe (Li et al., ICML 2021), its objective; the search is ours (csrc/plan/slice.c).
    """
    count = integer(stages, "stages")
    if not 0.0 <= number(gap, "gap", "a fraction") < np.inf:
        raise _core.InvalidValueError(f"gap is {gap}: a fraction of 0 or more is needed")
    if bwd is False:
        bwd = None
    unit = _unit(t, "slice_cost", seq_len, granularity, bwd is not None, bwd, comm)
    longest = _longest(max_slice, unit[1] if unit else 1)
    forward: _Core
    if unit is None:
        forward = array(t, "t")
    else:
        forward = _from_dict(t.slice_cost(*unit, "both" if bwd is None else "fwd"))  # type: ignore[union-attr]
    held = held_in_units(memory, unit[1] if unit else 1)
    message = None if comm is None or comm is False else _message(comm, t, unit, _units(forward))
    limits: dict[str, Any] = {
        "longest": longest, "time_limit_s": time_limit(time_limit_s), "isa": integer(isa, "isa"), "comm": message, "memory": held
    }  # fmt: skip
    backward = None
    if bwd is None:
        found = _core.plan_slices([forward], 1, count, gap=gap, **limits)
    else:
        backward = core_cost(t if bwd is True else bwd, unit, "bwd", "bwd")
        found = _core.plan_slices_apart(forward, backward, count, gap=gap, **limits)
    if message is not None and count > 1 and not all(_within(message, p) for p in (forward, backward) if p is not None):
        found = _overlapped(forward, backward, message, count, found, longest, held, limits["time_limit_s"])
    ((_, lengths),) = found[0]
    if unit is not None and unit[1] != 1:
        lengths = [length * unit[1] for length in lengths]
    return SlicePlan(*(*found[1:6], count, *found[6:], lengths))


def slice_tokens_for(t: Any, stages: Sequence[int], **options: Any) -> list[SlicePlan]:
    """:func:`slice_tokens` for several numbers of equal stages with the same slice costs, one plan each, in that order.

    The least latency is concave in the number of stages: where two numbers get the same slicing, no number in between needs a
    search of its own. With ``comm`` each number has its own search, because latencies are then no sum and maximum of the same times
    (one stage sends nothing, a message may take longer than its slice). Arguments and errors as of :func:`slice_tokens`. """
    counts = sorted({integer(k, "a number of stages") for k in listed(stages, "stages", "numbers of stages")})
    if not counts:
        return []
    plans = {k: slice_tokens(t, k, **options) for k in {counts[0], counts[-1]}}
    comm = options.get("comm")
    alike = comm is None or comm is False

    def between(low: int, high: int) -> None:
        inner = [k for k in counts if low < k < high]
        if not inner:
            return
        first, last = plans[low], plans[high]
        middle = inner[len(inner) // 2]
        if alike and first.optimal and last.optimal and first.lengths == last.lengths:
            plans[middle] = replace(
                first,
                stages=middle,
                latency_s=first.total_s + (middle - 1) * first.max_s,
                lower_bound_s=first.lower_bound_s
                + (last.lower_bound_s - first.lower_bound_s) * ((middle - low) / (high - low)) * (1 - 1e-15),
                planning_time_s=0.0,
            )
        else:
            plans[middle] = slice_tokens(t, middle, **options)
        between(low, middle)
        between(middle, high)

    between(counts[0], counts[-1])
    return [plans[integer(k, "a number of stages")] for k in stages]


def slice_batch_and_tokens(
    t: Any,
    batch: int,
    stages: int,
    *,
    seq_len: int | None = None,
    granularity: int | None = None,
    max_slice: int | None = None,
    max_group: int | None = None,
    max_in_flight: int | None = None,
    memory: SliceMemory | Mapping[str, float] | None = None,
    time_limit_s: float | None = None,
    isa: int = 0,
) -> BatchSlicePlan:
    """Group ``batch`` sequences and cut each group so that all slices through ONE pipeline (never flushed in between)
    take the least ``sum + (stages - 1) * max``, exactly (the papers' knapsack pays the maximum once a group).

    t: float64 [batch + 1, n + 1, n + 1]: t[b, s, c] seconds of s units of b sequences at once, t[0] is not read; or a
    cost model with ``slice_cost_batched(batch, seq_len, granularity)``. max_group limits the sequences of a group, max_slice the
    slice length, memory the bytes that a slice holds while it runs (given for one sequence: a group's take so many times as much).

    max_in_flight: most sequences in the pipeline at once (their activations are kept until the backward pass): it is then filled
    and drained several times, ``flushes``, whose latencies add up; the best split is exact, too.

    time_limit_s, isa and errors as of :func:`slice_tokens`. Source: TeraPipe (Li et al., ICML 2021), its objective corrected.
    """
    sequences, count = integer(batch, "batch"), integer(stages, "stages")
    if sequences < 1:
        raise _core.InvalidValueError(f"batch is {sequences}: at least 1 sequence is needed")
    widest = 0 if max_group is None else integer(max_group, "max_group")
    if max_group is not None and widest < 1:
        raise _core.InvalidValueError(f"max_group is {widest}: at least 1 sequence is needed")
    flush = 0 if max_in_flight is None else integer(max_in_flight, "max_in_flight")
    if max_in_flight is not None and flush < 1:
        raise _core.InvalidValueError(f"max_in_flight is {max_in_flight}: at least 1 sequence is needed")
    sizes = min(widest or sequences, flush or sequences, sequences)
    unit = _unit(t, "slice_cost_batched", seq_len, granularity)
    costs: list[_Core]
    if unit is None:
        table = array(t, "t")
        if table.ndim != 3 or table.shape[0] < sizes + 1:
            raise _core.InvalidValueError(
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
        isa=integer(isa, "isa"),
        memory=held_in_units(memory, unit[1] if unit else 1),
        flush=flush,
    )
    found, flushes = found if flush else (found, [sequences])
    slicing = found[0]
    if unit is not None and unit[1] != 1:
        slicing = [(group, [length * unit[1] for length in lengths]) for group, lengths in slicing]
    return BatchSlicePlan(*(*found[1:6], count, *found[6:], slicing, flushes))


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
    Never above that slicing's own latency. t, stages, seq_len, granularity, max_slice, isa and errors as of
    :func:`slice_tokens`.
    """
    unit = _unit(t, "slice_cost", seq_len, granularity)
    cuts = [integer(length, f"lengths[{k}]") for k, length in enumerate(listed(lengths, "lengths", "those of the slices"))]
    if unit is not None and granularity is None:
        finer = math.gcd(unit[1], *cuts)     # this slicing is one of those that are bounded
        if not getattr(t, "has_tables", False) or unit[0] // finer <= _UNITS_IN_A_SECOND[False, False]:     # 2 GiB a table
            unit = unit[0], finer
    cost = array(t, "t") if unit is None else _from_dict(t.slice_cost(*unit, "both"))  # type: ignore[union-attr]
    scale = unit[1] if unit else 1
    for k, length in enumerate(cuts):
        if length % scale or not 0 < length < 2**31:
            raise _core.InvalidValueError(f"lengths[{k}] is {length}: a positive multiple of the granularity, {scale}, is needed")
    return float(
        _core.plan_slice_bound(
            cost,
            np.array([length // scale for length in cuts], np.int32),
            integer(stages, "stages"),
            longest=_longest(max_slice, scale),
            isa=integer(isa, "isa"),
        )
    )


