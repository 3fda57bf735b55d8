"""Every planner's plan for one request, side by side: :func:`compare` and the :class:`Comparison` that it gives."""

from __future__ import annotations

import html
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._core import DeadlineError, InfeasibleError, InvalidTypeError, InvalidValueError, ScheduleError
from ._files import dumps, write_new
from .config import Cluster, GPTConfig, brief, counted, flag, human_bytes, human_gap, human_seconds, one_of
from .cost import CostModel
from .explain import restriction
from .plan import Plan
from .planning.entrance import costs_on, made, tell_of_costs
from .planning.request import PLANNERS, check_request
from .progress import planning
from .view import comparison_svg

__all__ = ["Comparison", "Row", "compare"]

_OPTIONS = ("stages", "data_parallel", "tensor_parallel", "chunks", "memory_bytes", "granularity", "partition", "slicing",
            "executable", "time_limit_s", "recompute", "backend", "dtype", "shard_optimizer")  # fmt: skip
# Infeasible, not a question for this planner, or too late; a ValueError of a signal's handler is none of them.
_REFUSALS = (InfeasibleError, InvalidValueError, ScheduleError, DeadlineError)
_HEAD = ("planner", "step", "over best", "bound", "gap", "ranks", "schedule", "memory", "idle", "planned in", "runs here")


@dataclass(frozen=True)
class Row:
    """One planner's answer."""

    planner: str
    plan: Plan | None
    """None where there is none; then ``error`` says why."""
    error: str
    """Why there is no plan: what is infeasible, or what this planner cannot be asked. Empty with a plan."""
    planning_time_s: float

    @property
    def executable(self) -> bool:
        """Whether there is a plan and this package's engine runs it."""
        return self.plan is not None and self.plan.executable

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, what is infinite None; without a plan: planner, error and planning_time_s."""
        head = {"planner": self.planner, "error": self.error or None, "planning_time_s": self.planning_time_s}
        if self.plan is None:
            return {**head, "executable": False}
        names = ("digest", "step_time_s", "lower_bound_s", "gap", "tokens_per_s", "ranks", "data_parallel", "chunks", "schedule",
                 "peak_memory_bytes", "bubbles", "busy_s", "executable", "why_not_executable", "stages", "slicing", "recompute",
                 "swap", "search_log")  # fmt: skip
        values = {name: getattr(self.plan, name) for name in names}
        infinite = {name: None for name in ("gap", "tokens_per_s") if not math.isfinite(values[name])}
        return {**head, **values, **infinite}


@dataclass(frozen=True, repr=False)
class Comparison:
    """Plans of several planners for one request. Prints as a table; ``comparison["autopipe"]`` is a row."""

    model: GPTConfig
    cluster: Cluster
    batch: int
    seq_len: int
    rows: list[Row]
    """In the order that was asked for."""

    @property
    def ranked(self) -> list[Row]:
        """Rows with a plan, the fastest first; of equals, in the order asked for."""
        found = [row for row in self.rows if row.plan is not None]
        return sorted(found, key=lambda row: row.plan.step_time_s if row.plan is not None else 0.0)

    @property
    def best(self) -> Plan | None:
        """The fastest plan; None if there is none."""
        rows = self.ranked
        return rows[0].plan if rows else None

    def __getitem__(self, planner: str) -> Row:
        for row in self.rows:
            if row.planner == planner:
                return row
        raise KeyError(planner)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    # ---- as text ----

    def table(self) -> list[tuple[str, ...]]:
        """Cells of the plans, the fastest first."""
        cells: list[tuple[str, ...]] = []
        for row in self.ranked:
            p, best = row.plan, self.best
            assert p is not None and best is not None
            over = p.step_time_s / best.step_time_s - 1 if best.step_time_s > 0 else 0.0
            devices = f"{p.ranks}" + (f" x {p.data_parallel}" if p.data_parallel > 1 else "")
            name = p.schedule + (f", {p.chunks} chunks" if p.chunks > 1 else "")
            slices = max(len(lengths) for _, lengths in p.slicing)
            cells.append((
                row.planner, human_seconds(p.step_time_s), f"+{100 * over:.2f} %", human_seconds(p.lower_bound_s),
                human_gap(p.gap), devices, name + (f", {slices} slices" if slices > 1 else ""),
                human_bytes(max(p.peak_memory_bytes)), _idle(p), human_seconds(row.planning_time_s),
                "yes" if p.executable else "no" if p.why_not_at_all else "not reproducibly",
            ))  # fmt: skip
        return cells

    def notes(self) -> list[str]:
        """Why there is no plan, or none that runs here; what is not as its authors had it; what the joint search did."""
        lines = [f"{row.planner}: no plan: {row.error}" for row in self.rows if row.plan is None]
        lines += [f"{row.planner}: hanayo's placement is its authors', its order is ours: theirs was not found"
                  for row in self.rows if row.plan is not None and row.plan.schedule == "hanayo"]
        restricted: dict[str, list[str]] = {}      # one line for those that say the same: all of them do where there are replicas
        for row in self.rows:
            if row.plan is not None and not row.plan.executable:
                restricted.setdefault(f"{restriction(row.plan)}: {row.plan.why_not_executable}", []).append(row.planner)
        lines += [f"{', '.join(planners)}: {why}" for why, planners in restricted.items()]
        searched: dict[str, list[str]] = {}
        for row in self.rows:
            for line in row.plan.search_log if row.plan is not None else ():
                searched.setdefault(line, []).append(row.planner)
        lines += [f"{', '.join(dict.fromkeys(planners))}: {line}" for line, planners in searched.items()]
        return lines

    def __repr__(self) -> str:
        rows = [_HEAD, *self.table()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        text = [f"{self.model!r}, {counted(self.batch, 'sequence')} of {self.seq_len} tokens, "
                f"{counted(self.cluster.num_devices, 'device')}"]
        for row in rows:
            text.append("  ".join(cell.ljust(w) if i in (0, 6) else cell.rjust(w)
                                  for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip())  # fmt: skip
        return "\n".join([*text, *self.notes()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{word}</th>" for word in _HEAD)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.table())
        notes = "".join(f"<li>{html.escape(line)}</li>" for line in self.notes())
        return f"<table><tr>{head}</tr>{body}</table><ul>{notes}</ul>{self.svg()}"

    # ---- files ----

    def to_dict(self) -> dict[str, Any]:
        """Everything in the table, as JSON types."""
        return {"format": "terapipe_c.comparison", "version": 1, "model": self.model.to_dict(), "cluster": self.cluster.to_dict(),
                "batch": self.batch, "seq_len": self.seq_len, "rows": [row.to_dict() for row in self.rows]}  # fmt: skip

    def to_json(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write :meth:`to_dict`; FileExistsError if the file is there, unless ``overwrite``."""
        return write_new(path, dumps(self.to_dict(), 1) + "\n", overwrite=overwrite)

    def svg(self) -> str:
        """Each plan's step: what the mean rank works, and why it idles; beneath, the timeline of every rank."""
        plans = [(row.planner, row.plan) for row in self.ranked if row.plan is not None]
        failed = [row.planner for row in self.rows if row.plan is None]
        return comparison_svg([(name, _note(p), p.timeline()) for name, p in plans], failed)

    def to_svg(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write :meth:`svg`; FileExistsError if the file is there, unless ``overwrite``."""
        return write_new(path, self.svg(), overwrite=overwrite)


def _note(p: Plan) -> str:
    """What the picture says of a plan beneath its name."""
    return "" if p.executable else "does not run here" if p.why_not_at_all else "runs, not reproducibly"


def _idle(p: Plan) -> str:
    """Idle share of the ranks' time, and its largest causes."""
    whole = p.ranks * p.step_time_s
    if whole <= 0:
        return "0 %"
    causes = sorted(((seconds, cause) for cause, seconds in p.bubbles.items() if seconds > 0.005 * whole), reverse=True)
    text = ", ".join(f"{cause.replace('_', ' ')} {100 * seconds / whole:.1f}" for seconds, cause in causes[:3])
    return f"{100 * sum(p.bubbles.values()) / whole:.1f} %" + (f" ({text})" if text else "")


def check_planners(planners: Sequence[str] | None) -> list[str]:
    """Each once, in this order; None: all."""
    if isinstance(planners, str):
        planners = [planners]
    try:
        given = list(PLANNERS if planners is None else planners)
    except TypeError:
        raise InvalidTypeError(f"planners is {brief(planners)}: a list of names would be right") from None
    names = list(dict.fromkeys(one_of(f"planners[{i}]", name, PLANNERS) for i, name in enumerate(given)))
    if not names:
        raise InvalidValueError("planners is empty: at least one name would be right")
    return names


def compare(model: GPTConfig, cluster: Cluster, batch: int, seq_len: int, costs: CostModel | None = None,
            planners: Sequence[str] | None = None, progress: bool | None = None, **request: Any) -> Comparison:  # fmt: skip
    """Plan one request by every planner, on the same costs, judged by the same simulator.

    Args:
        model, cluster, batch, seq_len, costs: as in :func:`tp.plan`.
        planners: names of ``tp.plan(planner=...)``; None: all of them.
        progress: as in :func:`tp.plan`, of all of them.
        request: any other argument of :func:`tp.plan`: schedule, stages, memory_bytes, slicing, ...

    A planner that finds no plan, or that cannot be asked this, has a row with its error. A request that is wrong whatever the
    planner raises ValueError (or TypeError) before any planning, as ``tp.plan`` does.
    """
    names = check_planners(planners)
    if "planner" in request:
        raise InvalidValueError("planner is one name: planners, a list of them, would be right")
    known = {"schedule": "auto", **dict.fromkeys(_OPTIONS)}
    unknown = [name for name in request if name not in known]
    if unknown:
        raise InvalidValueError(f"{unknown[0]!r} is no argument of tp.plan: {', '.join(known)} would be right")
    asked = {**known, **request}
    costs = costs_on(model, cluster, costs, asked.pop("backend"), asked.pop("dtype"))
    check_request(model, cluster, batch, seq_len, costs, planner="auto", **asked)
    if costs is None:
        costs = CostModel.analytic(model, cluster)
    tell_of_costs(cluster, seq_len, costs)
    progress, rows = None if progress is None else flag("progress", progress), []
    with planning(progress) as line:
        for i, name in enumerate(names):
            line.say(f"{name}, {i + 1} of {len(names)}")
            start = time.perf_counter()
            try:
                one = check_request(model, cluster, batch, seq_len, costs, planner=name, **asked)
                found, error = made(one, progress, start), ""
            except _REFUSALS as refusal:
                found, error = None, str(refusal)
            rows.append(Row(name, found, error, time.perf_counter() - start))
    return Comparison(model, cluster, int(batch), int(seq_len), rows)
