"""BMPipe's integer programme for other solvers: solved by HiGHS as a second opinion, or written as a file for any solver.

The programme (PLANNERS.md 4.2, 4.3) bounds the makespan by critical paths of the schedule, which are added as they are found:
solve, simulate the solution, add its critical path, until the simulated makespan is no longer than the solver's. """

from __future__ import annotations

import math
import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._files import new_path, write_new
from .arguments import FloatArray, integer, number, time_limit
from .bmpipe import BMPipePlan, CoreLayers, Layers, core_layers, memory, plan_of

_ROUNDS = 400
_ROUNDING = 1e-12  # of a limit: what ``bmpipe`` lets its sums be over it (csrc/plan/bmpipe.h)
_TOLERANCES = 1e-6, 1e-9  # of a limit: HiGHS's own, and where its plan is over by that
_CLOSE = 1e-6  # a simulation this close to the solver's makespan ends the rounds


class _Programme:
    """The programme of one request and the paths found so far."""

    def __init__(
        self, core: CoreLayers, stages: int, micro_batches: int, memory_bytes: float, chunks: int, comm_s: float
    ) -> None:
        for name, many in (("stages", stages), ("chunks", chunks)):  # before arrays of so many are made
            if not 1 <= many <= _core.BMPIPE_LAYERS:
                raise _core.InvalidValueError(f"{name} is {many}: 1 to {_core.BMPIPE_LAYERS} would be right")
        self.core, self.comm_s, self.memory_bytes = core, comm_s, memory_bytes
        self.stages, self.micro_batches, self.chunks = stages, micro_batches, chunks
        self.types, self.strategies = core[5].shape
        self.virtuals = stages * chunks
        self.paths: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float]] = []
        _core.bmpipe_ilp(core, stages, micro_batches, memory_bytes, *self._runs(), chunks=chunks, comm_s=comm_s)
        count, _, forward, backward = core[:4]
        even = [np.full(self.virtuals, float(count @ times) / self.virtuals) for times in (forward, backward)]
        longest = self.add_path(*even)
        # Solvers' tolerances are absolute, and a step may take microseconds: the objective is scaled to about a thousand.
        self.scale = 2.0 ** min(10 - math.frexp(longest)[1], 1023) if longest > 0.0 else 1.0
        for stage in range(stages):  # the paths through each stage
            slow = np.ones(self.virtuals)
            slow[stage::stages] = 2.0
            self.add_path(even[0] * slow, even[1] * slow)

    def _runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], FloatArray]:
        shape = (len(self.paths), self.virtuals)
        forward = np.array([path[0] for path in self.paths], np.int64).reshape(shape)
        backward = np.array([path[1] for path in self.paths], np.int64).reshape(shape)
        return forward, backward, np.array([path[2] for path in self.paths], np.float64)

    def add_path(self, forward_s: FloatArray, backward_s: FloatArray) -> float:
        """Add the critical path of a plan with these seconds to the programme; gives the plan's makespan."""
        makespan, up, down, lag_s = _core.bmpipe_path(
            np.ascontiguousarray(forward_s), np.ascontiguousarray(backward_s), self.stages, self.micro_batches,
            self.chunks, self.comm_s,
        )  # fmt: skip
        self.paths.append((up, down, lag_s))
        return makespan

    def rows(self) -> dict[str, npt.NDArray[Any]]:
        """The programme as the core's arrays, with objective and path inequalities multiplied by ``scale``; T is in seconds."""
        rows = _core.bmpipe_ilp(
            self.core, self.stages, self.micro_batches, self.memory_bytes, *self._runs(), chunks=self.chunks,
            comm_s=self.comm_s,
        )  # fmt: skip
        first = len(rows["row_low"]) - len(self.paths)     # they are the last ones
        # A layer that does not fit by itself is nowhere: beside its numbers HiGHS loses those of the others.
        row_of = np.repeat(np.arange(len(rows["row_low"])), np.diff(rows["begin"]))
        too_large = rows["index"][(rows["row_high"][row_of] == 1.0) & (rows["value"] > 1.0 + 1e-9)]
        rows["high"][too_large] = 0.0
        rows["value"][np.isin(rows["index"], too_large)] = 0.0
        for values, at in ((rows["cost"], 0), (rows["row_low"], first), (rows["value"], rows["begin"][first])):
            values[at:] *= self.scale
        return rows

    def layers_of(self, x: FloatArray) -> FloatArray:
        """[types, strategies, virtual stages] of a solution."""
        return x[: self.types * self.strategies * self.virtuals].reshape(self.types, self.strategies, self.virtuals)

    def seconds_of(self, layers: FloatArray) -> tuple[FloatArray, FloatArray]:
        forward: FloatArray = np.einsum("trv,t->v", layers, self.core[2])
        backward: FloatArray = np.einsum("trv,tr->v", layers, self.core[3][:, None] + self.core[5])
        return forward, backward


def _highs() -> Any:
    try:
        import highspy
    except ImportError:
        raise ImportError(
            "bmpipe_highs needs the package highspy: pip install 'terapipe_c[highs]' (tp.planners.bmpipe needs nothing)"
        ) from None
    return highspy


def _solve(
    highspy: Any, programme: _Programme, whole: bool, seconds: float, start: FloatArray | None, tolerance: float
) -> tuple[FloatArray | None, float]:
    """(solution or None, proven bound in seconds) of the programme or its relaxation; bound +inf: it has no solution."""
    rows = programme.rows()
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(rows["cost"]), len(rows["row_low"])
    model.col_cost_, model.col_lower_, model.col_upper_ = rows["cost"], rows["low"], rows["high"]
    model.row_lower_, model.row_upper_ = rows["row_low"], rows["row_high"]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = rows["begin"], rows["index"], rows["value"]
    if whole:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[int(kind)] for kind in rows["integer"]]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", max(seconds, 0.01))
    solver.setOptionValue("mip_rel_gap", 0.0)
    if tolerance != _TOLERANCES[0]:
        solver.setOptionValue("primal_feasibility_tolerance", tolerance)
        solver.setOptionValue("mip_feasibility_tolerance", tolerance)
    solver.passModel(model)
    if whole and start is not None:
        known = highspy.HighsSolution()
        known.col_value = list(start)
        solver.setSolution(known)
    if solver.run() == highspy.HighsStatus.kError:  # the process has run HiGHS with another number of threads, which stays
        solver.setOptionValue("threads", 0)
        if solver.run() == highspy.HighsStatus.kError:
            if tolerance != _TOLERANCES[0]:
                return _solve(highspy, programme, whole, seconds, start, min(10.0 * tolerance, _TOLERANCES[0]))
            raise _core.Error(f"HiGHS failed: {solver.modelStatusToString(solver.getModelStatus())}")
    status, info = solver.getModelStatus(), solver.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return None, float("inf")
    if not whole:
        if status != highspy.HighsModelStatus.kOptimal:
            return None, 0.0
        return np.array(solver.getSolution().col_value), float(info.objective_function_value) / programme.scale
    bound = max(0.0, float(info.mip_dual_bound)) / programme.scale
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        return None, bound
    return np.array(solver.getSolution().col_value), bound


def _refuse(p: _Programme, memory_bytes: float) -> None:
    """HiGHS says that no plan fits. Its tolerances are absolute: where numbers lie far apart it says so of what fits, too."""
    error = _core.InfeasibleError(f"no plan fits into memory_bytes {memory_bytes:.0f} (HiGHS)")
    try:
        _core.plan_bmpipe(p.core, p.stages, p.micro_batches, memory_bytes, chunks=p.chunks, comm_s=p.comm_s, time_limit_s=1.0,
                          effort=1, prove=False)  # fmt: skip
    except _core.InfeasibleError:
        raise error from None
    raise _core.Error(f"HiGHS finds no plan that fits into memory_bytes {memory_bytes:.0f}, though there is one, which bmpipe "
                      "finds: seconds or bytes lie too far apart for its tolerances")


def bmpipe_highs(
    layers: Layers,
    stages: int,
    micro_batches: int,
    memory_bytes: float,
    chunks: int = 1,
    comm_s: float = 0.0,
    time_limit_s: float | None = 60.0,
) -> BMPipePlan:
    """The plan of ``bmpipe``'s programme, solved by HiGHS (extra ``terapipe_c[highs]``): arguments and result as of ``bmpipe``.

    Path inequalities are generated on the linear relaxation, then on the integer programme. lower_bound_s is HiGHS's dual bound.
    HiGHS keeps limits up to a tolerance: where its plan is some bytes over it is asked for a smaller one, and where that is over,
    too, by less than 1e-9, a plan for a little less memory is taken. Of the counters, evaluations are solver calls and paths the
    inequalities. time_limit_s None: no limit; TimeoutError if the time ends without any plan.
    """
    highspy = _highs()
    began = time.perf_counter()
    core, names, labels = core_layers(layers)
    limit = time_limit(time_limit_s) or float("inf")
    programme = _Programme(
        core, integer(stages, "stages"), integer(micro_batches, "micro_batches"), memory(memory_bytes),
        integer(chunks, "chunks"), number(comm_s, "comm_s", "seconds"),
    )  # fmt: skip
    best: tuple[Any, ...] | None = None
    bound, calls, whole, start, given, less, tolerance = 0.0, 0, False, None, programme.memory_bytes, 0.0, _TOLERANCES[0]
    for _ in range(_ROUNDS):
        left = limit - (time.perf_counter() - began)
        if left <= 0.0:
            break
        x, proven = _solve(highspy, programme, whole, min(left, 1e7), start, tolerance)
        calls += 1
        if proven == float("inf") and best is None:
            _refuse(programme, given)
        if tolerance == _TOLERANCES[0] and proven < float("inf"):     # a smaller one may lose a plan by rounding; +inf has lost it
            bound = max(bound, proven)
        if x is None:
            break
        found = np.rint(programme.layers_of(x)) if whole else np.maximum(programme.layers_of(x), 0.0)     # within a tolerance
        makespan = programme.add_path(*programme.seconds_of(found))
        done = makespan <= float(x[-1]) * (1.0 + _CLOSE)
        if whole:
            shape = (programme.types, programme.strategies, programme.chunks, programme.stages)
            judged = _core.bmpipe_judge(
                core, programme.stages, programme.micro_batches, found.astype(np.int32).reshape(shape),
                programme.chunks, programme.comm_s,
            )  # fmt: skip
            over = float(max(judged[1])) - given
            if over > _ROUNDING * given:                       # by a tolerance. Less memory may lose a plan of just as much
                less, start = 2.0 * max(over, less) if tolerance == _TOLERANCES[1] else 0.0, None
                programme.memory_bytes, tolerance = given - less, _TOLERANCES[1]
                continue
            if best is None or judged[2] < best[2]:
                best, start = judged, x.copy()
                start[-1] = judged[2]
            if best[2] <= bound * (1.0 + _CLOSE) or done:
                break
        whole = whole or done
    if best is None:
        raise TimeoutError(f"HiGHS found no plan in time_limit_s {limit:g}")
    assignment, peak, step, _, recompute, imbalance, preparation = best[:7]
    bound = min(bound, step)
    optimal = step <= bound * (1.0 + _CLOSE)
    seconds = time.perf_counter() - began
    counters = (calls, len(programme.paths), 0, len(programme.paths), seconds)
    return plan_of(
        (assignment, peak, step, bound, recompute, imbalance, preparation, optimal, *counters), names, labels
    )


def bmpipe_mps(
    path: str | os.PathLike[str],
    layers: Layers,
    stages: int,
    micro_batches: int,
    memory_bytes: float,
    chunks: int = 1,
    comm_s: float = 0.0,
    time_limit_s: float | None = 1.0,
) -> int:
    """Write the integer programme as a free MPS file for any solver; returns the number of path inequalities in it.

    The inequalities are those of the even plan with each stage slowed in turn, and of ``bmpipe``'s plan: not all that exist, so the
    optimum is a lower bound on the step time, and the solution's own step time is to be simulated. Columns:
    l_type_strategy_chunk_stage (layers; none for strategies that a type does not have), b_type_chunk_stage, T (seconds); bytes are
    in units of memory_bytes. The objective is T times a power of two that makes it about a thousand, because solvers' tolerances
    are absolute. FileExistsError if the file is there.
    """
    from .bmpipe import bmpipe

    new_path(path)                                             # before the work
    core, _, _ = core_layers(layers)
    programme = _Programme(
        core, integer(stages, "stages"), integer(micro_batches, "micro_batches"), memory(memory_bytes),
        integer(chunks, "chunks"), number(comm_s, "comm_s", "seconds"),
    )  # fmt: skip
    plan = bmpipe(layers, stages, micro_batches, memory_bytes, chunks, comm_s, time_limit_s)
    shape = (programme.types, programme.strategies, programme.virtuals)
    programme.add_path(*programme.seconds_of(plan.assignment.reshape(shape).astype(np.float64)))
    text = _mps(programme)
    write_new(path, text)
    return len(programme.paths)


def _mps(programme: _Programme) -> str:
    rows = programme.rows()
    places = [(c, x) for c in range(programme.chunks) for x in range(programme.stages)]
    columns = [f"l_{t}_{r}_{c}_{x}" for t in range(programme.types) for r in range(programme.strategies)
               for c, x in places]  # fmt: skip
    columns += [f"b_{t}_{c}_{x}" for t in range(programme.types - 1) for c, x in places] + ["T"]
    low, high = rows["row_low"], rows["row_high"]
    kinds = np.where(low == high, "E", np.where(np.isinf(low), "L", "G"))
    right = np.where(kinds == "L", high, low)
    row_of = np.repeat(np.arange(len(low)), np.diff(rows["begin"]))
    entries: list[list[str]] = [[] for _ in columns]
    for row, column, value in zip(row_of.tolist(), rows["index"].tolist(), rows["value"].tolist(), strict=True):
        if value:
            entries[column].append(f" {columns[column]} r{row} {value!r}")
    entries[-1].append(f" T cost {float(rows['cost'][-1])!r}")
    lines = ["NAME bmpipe FREE", "ROWS", " N cost", *(f" {kind} r{i}" for i, kind in enumerate(kinds.tolist()))]
    lines += ["COLUMNS", " M1 'MARKER' 'INTORG'", *(line for column in entries[:-1] for line in column)]
    lines += [" M2 'MARKER' 'INTEND'", *entries[-1]]
    lines += ["RHS", *(f" rhs r{i} {value!r}" for i, value in enumerate(right.tolist()) if value)]
    lines += ["BOUNDS", *(f" UP bound {name} {value!r}" for name, value, column in
                          zip(columns[:-1], rows["high"].tolist(), entries, strict=False) if column), "ENDATA", ""]  # fmt: skip
    return "\n".join(lines)
