"""Programs and their timelines: the NumPy side of ``_core.Program``, and :class:`Timeline`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._core import OPS, InvalidTypeError, InvalidValueError, Program
from .config import brief, real, unmasked, whole

__all__ = ["CAUSES", "INSTRUCTION", "INTERVAL", "OPS", "Program", "Timeline"]

Float = NDArray[np.float64]
#: What tp_py_costs_open reads: {op: seconds} and their strides, message seconds a stage and a stage and unit, bytes held and
#: their strides, message seconds of first and second halves a stage and unit, of gradients where they take others, of these
#: seconds those in which the link is free for the next message, forward and back, and of guests a stage and unit.
Tables = tuple[
    dict[str, Float], int, int, Float | None, Float | None, Float | None, int, int, Float | None, Float | None, Float | None,
    Float | None, Float | None,
]

#: One instruction (tp_instr of csrc/sched/sched.h). ``op`` is an index into OPS; slot holds two 16-bit buffer numbers.
INSTRUCTION = np.dtype(
    [
        ("op", "<u2"),
        ("stage", "<u2"),
        ("micro", "<u2"),
        ("slice", "<u2"),
        ("peer", "<i2"),
        ("flags", "<u2"),
        ("slot", "<u4"),
    ]
)
#: One interval of a timeline; start_s and end_s in seconds from the start of the step.
INTERVAL = np.dtype(
    [
        ("rank", "<u2"),
        ("op", "<u2"),
        ("stage", "<u2"),
        ("micro", "<u2"),
        ("slice", "<u2"),
        ("start_s", "<f8"),
        ("end_s", "<f8"),
    ],
    align=True,
)
#: Why ranks idle; see tp_bubble in csrc/sched/sched.h for what each one counts.
CAUSES = ("warmup", "cooldown", "imbalance", "slice_skew", "recompute", "swap", "comm")

#: Seconds of the first (a) and the second (b) half of a forward, where they are not half the whole's each.
HALVES = ("F.a", "F.b", "SF.a", "SF.b", "RF.a", "RF.b")
SUM = "OPT.sum"     # of OPT's seconds, those in which replicas add up their gradients
BESIDE = "OPT.beside"  # not of OPT's seconds: those in which they do so beside the work, as blocks go back last
LAST = "OPT.last"   # and of these, those of the block that goes back last of all
NORM = "OPT.norm"   # and those in which each rank measures the sums: the norm of all is global. Both come before the ranks meet
GATHER = "OPT.gather"   # and those, behind the meeting, in which a replica takes the values that others have updated
_SUMS = (SUM, BESIDE, LAST, NORM, GATHER)
#: What the message seconds of `Tables` are called.
_MESSAGES = ("comm_s", "comm_s", "comm.a", "comm.b", "comm.back", "comm.latency", "comm.guest")
CODE = {name: code for code, name in enumerate(OPS)}
_TALKING = [CODE[name] for name in ("SF", "RF", "SB", "RB", "SE", "RE", "SL", "RL", "AR")]
SWAPS = ("SO", "SI")
WORK = ("F", "B", "I", "W", "R", "SO", "SI", "U", "AR", "OPT")  # what takes a rank's time; the rest are messages
_USEFUL = np.array([name in WORK and name not in ("R", "SO", "SI", "AR") for name in OPS])


# ---- costs into tables that strides index ---------------------------------------------------------------------------------


def _array(name: str, value: ArrayLike) -> Float:
    unmasked(name, value)
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "fiu":
            raise TypeError
        return array.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{name} is {brief(value)}: a number, or an array of them, would be right") from None


def _not_negative(name: str, array: Float) -> None:
    if array.size == 0 or (array.min() >= 0.0 and array.max() < np.inf):     # not of nan; two passes and no array between them
        return
    wrong = np.argwhere(~(np.isfinite(array) & (array >= 0.0)))
    if len(wrong):
        cell = tuple(int(i) for i in wrong[0])
        raise InvalidValueError(f"{name}{list(cell) or ''} is {array[cell]:g}: finite and at least 0 would be right")


def _spread(name: str, array: Float, program: Program) -> Float:
    """[stages, units] of a scalar, [stages], [stages, slices] or [stages, units]."""
    stages, slices = program.num_stages, program.slices
    units, longest = sum(slices), max(slices)
    if array.ndim == 0 or array.shape == (stages,):
        return np.ascontiguousarray(np.broadcast_to(array if array.ndim == 0 else array[:, None], (stages, units)))
    if array.shape == (stages, units):
        return np.ascontiguousarray(array)
    if array.shape == (stages, longest):
        unit = np.arange(units) - np.repeat(np.cumsum(slices) - slices, slices)
        return np.ascontiguousarray(array[:, unit])
    raise InvalidValueError(
        f"{name} has shape {array.shape}: a scalar, [{stages}] (stages), [{stages}, {longest}] (stages, "
        f"slices) or [{stages}, {units}] (stages, all slices of the step) would be right"
    )


def _even(array: Float, program: Program) -> bool:
    return array.ndim == 0 or array.shape == (program.num_stages,)


def _strided(arrays: Mapping[str, Float], program: Program) -> tuple[dict[str, Float], int, int]:
    """All arrays under one pair of strides, and no larger than they must be."""
    if all(array.ndim == 0 for array in arrays.values()):
        return {name: np.atleast_1d(array) for name, array in arrays.items()}, 0, 0
    if all(_even(array, program) for array in arrays.values()):
        return (
            {
                name: np.ascontiguousarray(np.broadcast_to(array, (program.num_stages,)))
                for name, array in arrays.items()
            },
            1,
            0,
        )
    return {name: _spread(name, array, program) for name, array in arrays.items()}, sum(program.slices), 1


def tables(program: Program, cost: Any, comm_s: Any = 0.0, activation_bytes: Any = None) -> Tables:
    """What the C side reads (tp_py_costs_open): cost, messages and bytes, checked and in C order."""
    if not isinstance(cost, Mapping):
        if not callable(getattr(cost, "durations", None)):      # a Plan's are a dict: they are what to give
            raise InvalidTypeError(
                f"cost is {type(cost).__name__}: a dict such as {{'F': 1.0, 'B': 2.0}}, or an object with "
                "durations(program), would be right"
            )
        cost = cost.durations(program)
    given = {name: _array(f"cost[{name!r}]", value) for name, value in cost.items()}
    link = given.pop("comm", np.zeros(()))
    links = {name: given.pop(name, None) for name in ("comm.a", "comm.b", "comm.back", "comm.guest")}
    latencies = [given.pop(name, None) for name in ("comm.latency", "comm.latency.back")]
    if latencies[0] is None and latencies[1] is not None:
        raise InvalidValueError("cost has 'comm.latency.back' and no 'comm.latency', that of messages there: both would be right")
    unknown = [name for name in given if name not in CODE and name not in HALVES and name not in _SUMS]
    if unknown:
        raise InvalidValueError(
            f"cost has {unknown[0]!r}: the operations are {' '.join(OPS)}, and comm; of halves {' '.join(HALVES)}, "
            f"comm.a and comm.b; {SUM}, {BESIDE}, {LAST} and {GATHER} of replicas, {NORM}; comm.back of gradients where they take "
            "other seconds, comm.latency of a link that carries one message at a time; of guests comm.guest"
        )
    comm = _array("comm_s", comm_s)
    if comm.ndim or comm != 0.0:
        link, links["comm.back"], latencies = comm, None, [None, None]
    half_a, half_b, back, guest = (None if some is None else _spread(name, some, program) for name, some in links.items())
    more = half_a, half_b, back, None if latencies[0] is None else _latency(latencies, program), guest
    seconds, stage_stride, unit_stride = _strided(given, program)
    per_stage = per_unit = None
    if link.ndim == 0 and link == 0.0:
        pass
    elif _even(link, program):
        per_stage = np.ascontiguousarray(np.broadcast_to(link, (program.num_stages,)))
    else:
        per_unit = _spread("comm_s", link, program)
    if activation_bytes is None:
        return seconds, stage_stride, unit_stride, per_stage, per_unit, None, 0, 0, *more
    size = _array("activation_bytes", activation_bytes)
    _not_negative("activation_bytes", size)
    bytes_, bytes_stage, bytes_unit = _strided({"activation_bytes": size}, program)
    return (
        seconds,
        stage_stride,
        unit_stride,
        per_stage,
        per_unit,
        bytes_["activation_bytes"],
        bytes_stage,
        bytes_unit,
        *more,
    )


def _latency(given: Sequence[Float | None], program: Program) -> Float:
    """[2, stages]: forward and back, the same where one is given."""
    there, back = given[0], given[0] if given[1] is None else given[1]
    named = (("comm.latency", there), ("comm.latency.back", back))
    rows = np.array([_spread(name, array, program) for name, array in named if array is not None])
    least: Float = rows.min(axis=2)  # nan where one is, which is refused as such
    if (rows.max(axis=2) > least).any():
        raise InvalidValueError("comm.latency differs between slices: it is a link's, one for each stage would be right")
    return least


def _need(program: Program, cost: Tables) -> None:
    """An op of the program without seconds is a slip, not a free op."""
    used = program.counts
    for name in ("F", "B", "I", "W", "R"):
        if name in used and name not in cost[0] and not (name == "B" and {"I", "W"} <= set(cost[0])):
            raise InvalidValueError(f"cost has no {name!r}, and the program has {used[name]} of them")


# ---- methods of Program -----------------------------------------------------------------------------------------------------


def _simulate(program: Program, cost: Any, comm_s: Any = 0.0, activation_bytes: Any = None) -> Timeline:
    given = tables(program, cost, comm_s, activation_bytes)
    _need(program, given)
    makespan, bound, bubbles, busy, peak = program._time(given, False)
    if not (peak < 2.0**63).all():
        raise InvalidValueError(f"activation_bytes: rank {int(np.argmax(peak))} would hold {peak.max():.3g} bytes: less than 2^63 "
                                "would be right")

    def intervals() -> NDArray[np.void]:
        rows: NDArray[np.void] = program._time(given, True).view(INTERVAL)
        return rows

    return Timeline(
        program.num_ranks, makespan, busy, bubbles, np.ceil(peak).astype(np.int64), bound, intervals, program
    )


def _makespan(program: Program, costs: Any, comm_s: Any = 0.0) -> Any:
    many = isinstance(costs, Sequence) and not isinstance(costs, (str, bytes))
    given = [tables(program, cost, comm_s) for cost in (costs if many else [costs])]
    for cost in given:
        _need(program, cost)
        for name, array in cost[0].items():
            _not_negative(f"seconds of {name}", array)
        for name, lags in zip(_MESSAGES, (*cost[3:5], *cost[8:]), strict=True):
            if lags is not None:
                _not_negative(name, lags)
    seconds = program._makespans(given)
    if not np.isfinite(seconds).all():
        raise InvalidValueError("the seconds of this program add up beyond what a double holds: shorter operations and messages "
                                "would be right")
    return seconds if many else float(seconds[0])


def _split(program: Program, cost: Any = None, pending: int = 1, comm_s: Any = 0.0) -> Program:
    pending = whole("pending", pending, 0, 2**31 - 1)
    given = tables(program, {"F": 1.0, "I": 1.0, "W": 1.0} if cost is None else cost, comm_s)
    return program._split_with(given, pending)


def _reorder(program: Program, cost: Any = None, comm_s: Any = 0.0) -> Program:
    given = tables(program, {"F": 1.0, "I": 1.0, "W": 1.0} if cost is None else cost, comm_s)
    return program._reorder_by(given)


def _instructions(program: Program, rank: int) -> NDArray[np.void]:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise InvalidTypeError(f"rank is {brief(rank)}: an int would be right")
    if not 0 <= rank < program.num_ranks:
        raise IndexError(f"rank is {brief(int(rank))}: 0 to {program.num_ranks - 1} would be right")
    begin, end = program._bounds(int(rank))
    if begin == end:
        return np.empty(0, INSTRUCTION)
    buffer: Any = program  # a view of the program's own memory
    code: NDArray[np.void] = np.frombuffer(buffer, INSTRUCTION, end - begin, begin * INSTRUCTION.itemsize)
    return code


def _from_instructions(kind: type[Program], ranks: Iterable[ArrayLike], keep_slots: bool = False) -> Program:
    try:
        lists = [np.asarray(rank) for rank in ranks]
    except (TypeError, ValueError):
        raise InvalidTypeError(f"ranks is {brief(ranks)}: a list with the instructions of each rank would be right") from None
    for r, rank in enumerate(lists):
        if rank.dtype != INSTRUCTION or rank.ndim != 1:
            raise InvalidValueError(
                f"the instructions of rank {r} are {rank.dtype}{list(rank.shape)}: one dimension of "
                f"schedule.INSTRUCTION would be right"
            )
    counts = np.array([len(rank) for rank in lists], np.int64)
    code = np.concatenate(lists) if lists else np.empty(0, INSTRUCTION)
    code["peer"][(code["peer"] == 0) & ~np.isin(code["op"], _TALKING)] = -1    # as np.zeros leaves it
    return kind._from_code(counts, code.view(np.uint8), keep_slots)


def idle_causes(bubbles: Mapping[str, float], whole_s: float) -> dict[str, float]:
    """What is worth telling of ``bubbles``, in the ranks' ``whole_s`` seconds: below a billionth of them, rounding left it."""
    return {cause: seconds for cause, seconds in bubbles.items() if seconds > 1e-9 * whole_s}


# ---- the timeline -------------------------------------------------------------------------------------------------------------


class Timeline:
    """When every rank did what, simulated (``Program.simulate``) or measured (``Timeline.from_intervals``).

    makespan_s, busy_s (float64 [ranks]) and lower_bound_s are seconds; bubbles maps a cause to seconds idle summed over
    ranks (they sum to ``num_ranks * makespan_s - sum(busy_s)``); peak_memory_bytes is int64 [ranks].
    """

    __slots__ = (
        "_intervals",
        "bubbles",
        "busy_s",
        "lower_bound_s",
        "makespan_s",
        "num_ranks",
        "peak_memory_bytes",
        "program",
    )

    def __init__(
        self,
        num_ranks: int,
        makespan_s: float,
        busy_s: Float,
        bubbles: dict[str, float],
        peak_memory_bytes: NDArray[np.int64],
        lower_bound_s: float,
        intervals: NDArray[np.void] | Callable[[], NDArray[np.void]],
        program: Program | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.makespan_s = makespan_s
        self.busy_s = busy_s
        self.bubbles = bubbles
        self.peak_memory_bytes = peak_memory_bytes
        self.lower_bound_s = lower_bound_s
        self.program = program
        self._intervals = intervals

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or a pickle, holds the intervals themselves."""
        return type(self), (self.num_ranks, self.makespan_s, self.busy_s, self.bubbles, self.peak_memory_bytes,
                            self.lower_bound_s, self.intervals, self.program)

    def __eq__(self, other: object) -> bool:
        """Of the same ranks, intervals, bytes and program: a copy, or a pickle's, too."""
        if not isinstance(other, Timeline):
            return NotImplemented
        alike = all(getattr(self, name) == getattr(other, name) for name in ("num_ranks", "makespan_s", "lower_bound_s", "bubbles",
                                                                             "program"))
        return alike and all(np.array_equal(getattr(self, name), getattr(other, name))
                             for name in ("busy_s", "peak_memory_bytes", "intervals"))

    def __hash__(self) -> int:
        return hash((self.num_ranks, self.makespan_s))

    @property
    def intervals(self) -> NDArray[np.void]:
        """Structured array (schedule.INTERVAL), grouped by rank, in order of time: rank op stage micro slice start_s end_s.

        A simulated timeline computes them when they are first asked for.
        """
        if callable(self._intervals):
            self._intervals = self._intervals()
        return self._intervals

    @property
    def idle_s(self) -> float:
        """Seconds that ranks idle (or recompute, swap, or add up gradients), summed."""
        return self.num_ranks * self.makespan_s - float(self.busy_s.sum())

    @property
    def work_s(self) -> float:
        """Seconds that operations took of the ranks' time, summed: useful ones, recomputation and swaps, but those beside the
        work; no messages. A simulated OPT has its replicas' sums in it."""
        rows = self.intervals
        not_own = ("AR", *(SWAPS if self.program is not None and self.program.swaps_beside else ()))
        own = [CODE[name] for name in WORK if name not in not_own]
        return float((rows["end_s"] - rows["start_s"])[np.isin(rows["op"], own)].sum())

    @property
    def efficiency(self) -> float:
        """Share of the ranks' time that is useful work, 0 to 1: no messages, no sums of gradients, nothing done a second time."""
        total = self.num_ranks * self.makespan_s
        return float(self.busy_s.sum()) / total if total > 0 else 1.0

    @classmethod
    def from_intervals(cls, intervals: Any, ranks: int | None = None, makespan_s: float | None = None,
                       program: Program | None = None) -> Timeline:
        """The timeline of measured intervals.

        intervals: a structured array with the fields of schedule.INTERVAL (op as a code or a name), or rows ``(rank, op, stage,
        micro, slice, start_s, end_s)``; messages (SF, RF, ...) may be among them. Times are shifted so that the first interval
        starts at 0. Where operations of a rank overlap it is busy once. ranks, makespan_s: None: as the intervals say. The causes
        of idle time are those of the same instructions simulated with the measured durations; what the ranks idled beyond that is
        ``comm``. program: what they ran, or each replica of so many ranks did; None, or where the intervals are not all of it: as
        the times say, which do not tell of swaps beside the work when they were begun and from how many places.
        """
        from .replay import causes

        rows = _rows(intervals)
        if program is not None and not isinstance(program, Program):
            raise InvalidTypeError(f"program is {brief(program)}: a Program, or None, would be right")
        ranks = None if ranks is None else whole("ranks", ranks, most=32767)
        makespan_s = None if makespan_s is None else real("makespan_s", makespan_s, zero=True)
        if ranks is None:
            ranks = int(rows["rank"].max()) + 1 if len(rows) else 1
        if len(rows) and rows["rank"].max() >= ranks:
            raise InvalidValueError(f"an interval names rank {rows['rank'].max()}: below {ranks} would be right")
        if len(rows):
            first = rows["start_s"].min()
            rows["start_s"] -= first
            rows["end_s"] -= first
        last_s = float(rows["end_s"].max()) if len(rows) else 0.0
        if makespan_s is None:
            makespan_s = last_s
        if makespan_s < last_s * (1 - 1e-9):
            raise InvalidValueError(f"makespan_s is {makespan_s:g}: at least {last_s:g}, when the last interval ends, would be "
                                    "right")
        rows = rows[np.lexsort((rows["start_s"], rows["rank"]))]
        busy = _busy(rows[_USEFUL[rows["op"]]], ranks)
        bubbles, bound, program = causes(rows, ranks, makespan_s, busy, program)
        return cls(ranks, float(makespan_s), busy, bubbles, np.zeros(ranks, np.int64), bound, rows, program)

    def to_svg(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: one row per rank, coloured by operation and micro-batch."""
        from . import view

        view.write(path, view.svg(self))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page with zoom, pan and tooltips; it works offline."""
        from . import view

        view.write(path, view.html_page(self))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome's trace event JSON: opens in ui.perfetto.dev and chrome://tracing."""
        from . import view

        view.write(path, view.chrome_trace(self))

    def __repr__(self) -> str:
        from . import view

        return view.summary(self)

    def _repr_svg_(self) -> str:
        from . import view

        return view.svg(self)

    def _repr_html_(self) -> str:
        from . import view

        return view.notebook(self)


def _busy(useful: NDArray[np.void], ranks: int) -> Float:
    """Seconds in which each rank was at work, of rows by rank and start: no second counts twice where two of a rank overlap."""
    seconds, last = useful["end_s"] - useful["start_s"], np.empty(len(useful))
    edges = np.flatnonzero(np.diff(useful["rank"], prepend=-1, append=-1))
    for begin, end in itertools.pairwise(edges.tolist()):
        last[begin], last[begin + 1:end] = 0.0, np.maximum.accumulate(useful["end_s"][begin:end - 1])
    twice = np.minimum(np.maximum(last - useful["start_s"], 0.0), seconds)
    return np.bincount(useful["rank"], seconds - twice, ranks).astype(np.float64)


def _rows(intervals: Any) -> NDArray[np.void]:
    """A fresh INTERVAL array of whatever from_intervals accepts."""
    array = intervals if isinstance(intervals, np.ndarray) else None
    if array is not None and array.dtype.names is not None:
        missing = [name for name in INTERVAL.names or () if name not in array.dtype.names]
        if missing:
            raise InvalidValueError(
                f"the intervals have no field {missing[0]!r}: {', '.join(INTERVAL.names or ())} would be right"
            )
        for name in INTERVAL.names or ():
            unmasked(f"{name} of the intervals", array[name])
        columns = {name: _typed(array[name]) for name in INTERVAL.names or ()}
    else:
        try:
            listed = [tuple(row) for row in intervals]
        except TypeError:
            raise InvalidTypeError(
                f"intervals is {brief(intervals)}: rows (rank, op, stage, micro, slice, start_s, end_s) would be right"
            ) from None
        if any(len(row) != 7 for row in listed):
            raise InvalidValueError("an interval is not (rank, op, stage, micro, slice, start_s, end_s)")
        try:
            columns = {name: _typed(np.array([row[i] for row in listed])) for i, name in enumerate(INTERVAL.names or ())}
        except ValueError:
            columns = {"rank": np.empty((1, 0))}
        if any(column.ndim != 1 for column in columns.values()):
            raise InvalidTypeError("an interval has a list where (rank, op, stage, micro, slice, start_s, end_s), words and "
                                   "numbers, would be right")
    rows = np.zeros(len(columns["rank"]), INTERVAL)
    if columns["op"].dtype.kind == "U":
        try:
            columns["op"] = np.array([CODE[str(name)] for name in columns["op"]], np.uint16)
        except KeyError as error:
            raise InvalidValueError(f"an interval has operation {error}: {' '.join(OPS)} would be right") from None
    for name, column in columns.items():
        integral = name[-2:] != "_s"
        if integral and column.dtype.kind == "f" and np.isfinite(column).all() and (column == np.rint(column)).all():
            column = column.astype(np.int64)                   # of a table of floats
        if column.dtype.kind not in ("iu" if integral else "fiu") and column.size:
            right = "a whole number" if integral else "a number"
            raise InvalidTypeError(f"{name} of the intervals is {brief(_strange(column, integral))}: {right} would be right")
        if rows[name].dtype.kind in "iu" and column.size and not (0 <= column.min() and column.max() < 65536):
            raise InvalidValueError(f"{name} of the intervals is {column.min()} to {column.max()}: 0 to 65535 would be right")
        rows[name] = column
    sound = np.isfinite(rows["start_s"]) & np.isfinite(rows["end_s"]) & (rows["end_s"] >= rows["start_s"])
    if not sound.all():
        row = int(np.argmin(sound))
        raise InvalidValueError(f"interval {row} is from start_s = {rows['start_s'][row]:g} to end_s = "
                                f"{rows['end_s'][row]:g}: finite times, the end not before the start, would be right")
    if len(rows) and rows["op"].max() >= len(OPS):
        raise InvalidValueError(f"an interval has operation {rows['op'].max()}: below {len(OPS)} would be right")
    return rows


def _typed(column: NDArray[Any]) -> NDArray[Any]:
    """The column by what is in it: names are objects in a table of pandas', and bytes in one of HDF5."""
    if column.dtype.kind == "O":
        with suppress(ValueError):      # of lists, which are no column
            plain = np.array(column.tolist())
            column = plain if plain.ndim == column.ndim else column
    return np.char.decode(column, "ascii", "replace") if column.dtype.kind == "S" else column


def _strange(column: NDArray[Any], integral: bool) -> Any:
    """The first cell that is no number."""
    for cell in column.tolist():
        try:
            number = float(cell)
        except (TypeError, ValueError, OverflowError):
            return cell
        if integral and not number.is_integer():
            return cell
    return column.flat[0]
