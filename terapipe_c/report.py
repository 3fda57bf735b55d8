"""The report of a run: predictions beside measurements."""
from __future__ import annotations

import html
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import OPS
from ._files import path_of, write_text
from .config import counted, human_bytes, human_seconds
from .doctor import cpu_quota
from .schedule import BESIDE, GATHER, LAST, NORM, SUM, Timeline

__all__ = ["Report"]

def _percent(measured: float | None, predicted: float | None) -> str:
    return "" if not measured or not predicted else f"{100 * (predicted / measured - 1):+.1f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else human_seconds(value)


def _bytes(value: float | None) -> str:
    return "-" if value is None else human_bytes(value)


def loss_curve(steps: Sequence[int], losses: Sequence[float], width: int = 640, height: int = 160) -> str:
    """An SVG; empty of fewer than two losses that are finite: others are left out. steps: from 0 on, as of records."""
    points = [(step + 1, loss) for step, loss in zip(steps, losses, strict=True) if np.isfinite(loss)]
    if len(points) < 2:
        return ""
    (left, right), low, high = (points[0][0], points[-1][0]), min(p[1] for p in points), max(p[1] for p in points)
    tall = (high - low) or 1.0
    line = " ".join(f"{60 + (step - left) / (right - left) * (width - 70):.1f},{10 + (high - loss) / tall * (height - 35):.1f}"
                    for step, loss in points)
    words = ((56, 14, "end", f"{high:.2f}"), (56, height - 25, "end", f"{low:.2f}"), (2, height / 2 - 8, "start", "loss"),
             (60, height - 6, "start", f"after {counted(left, 'step')}"), (width - 10, height - 6, "end", f"after {right} steps"))
    labels = "".join(f'<text x="{x}" y="{y:g}" text-anchor="{anchor}" font-size="11" fill="currentColor">{text}</text>'
                     for x, y, anchor, text in words)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" style="max-width:100%;height:auto"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="loss by steps done"><polyline points="{line}" '
            f'fill="none" stroke="#3b82f6" stroke-width="1.5"/>{labels}</svg>')


def resimulated(program: Any, intervals: NDArray[Any], sums: NDArray[np.float64] | None = None, *, update: bool = True,
                beside: Mapping[str, NDArray[np.float64]] | None = None,
                handover_s: float = 0.0, between_s: float = 0.0) -> float:
    """Seconds of the step by the simulator, if every operation takes what it was measured to take; of several replicas
    the slowest's. sums: [stages] seconds of the replicas' sums, which no interval holds; beside: a plan's of those beside the
    work, and of the values that they gather, which none holds either.

    Laid beside the measured step it judges the schedule and the engine alone: the cost model and the machine's drift since
    the profile are out of it. intervals: rank, op, stage, micro, slice, start_s, end_s of one step (Timeline.intervals).
    update: False where OPT measured the gradients and updated nothing, which each rank does before it waits for the others.
    handover_s: from when a message has been sent until what waits for it may begin, which no interval holds. between_s: what lies
    between two instructions of a rank.
    """
    replica = intervals["rank"] // program.num_ranks
    each = [_measured(program, intervals[replica == r]) for r in np.unique(replica)]
    for seconds in each if sums is not None else ():
        seconds["OPT"] += np.asarray(sums)[:, None]
        seconds[SUM] = np.broadcast_to(np.asarray(sums)[:, None], seconds["OPT"].shape)
    for seconds in each:
        seconds |= {name: np.broadcast_to(table[:, :1], table.shape) for name, table in (beside or {}).items()}
        if GATHER in seconds:
            seconds["OPT"] = seconds["OPT"] + seconds[GATHER]
        seconds |= {op: np.where(seconds[op] > 0, seconds[op] + between_s, 0) for op in _ISSUED if op in seconds}
        if not update and "OPT" in seconds:
            seconds[NORM] = seconds["OPT"]
        if handover_s:
            seconds["comm"] = np.full(program.num_stages, handover_s)
    return max(float(program.makespan(seconds)) for seconds in each)


_ISSUED = ("F", "B", "I", "W", "R", "SF", "SB")


def _measured(program: Any, intervals: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """Seconds of each operation of one replica, as the simulator takes them."""
    first = np.concatenate([[0], np.cumsum(program.slices)])
    shape = program.num_stages, int(first[-1])
    seconds: dict[str, NDArray[np.float64]] = {}
    took: dict[tuple[str, int, int], list[float]] = {}
    for row in np.sort(intervals, order="start_s"):
        name = OPS[row["op"]]
        if name in ("F", "B", "I", "W", "R", "SO", "SI", "U", "SF", "SB", "SE", "SL"):
            cell = int(row["stage"]), int(first[row["micro"]] + row["slice"])
            took.setdefault((name, *cell), []).append(float(row["end_s"] - row["start_s"]))
        elif name in ("AR", "OPT"):      # once a stage at most
            table = seconds.setdefault(name, np.zeros(shape))
            table[row["stage"]] = row["end_s"] - row["start_s"]
    for (name, stage, unit), parts in took.items():
        seconds.setdefault(name, np.zeros(shape))[stage, unit] = sum(parts)
        for half, value in zip("ab", parts if len(parts) > 1 else (), strict=False):     # of a forward, or of its message
            seconds.setdefault(f"{name}.{half}", np.zeros(shape))[stage, unit] = value
    return seconds


def _crowded(job: Mapping[str, Any], copies: bool, sums: bool) -> list[str]:
    """Why the prediction cannot hold, where the ranks of this machine share cores. copies, sums: each has a thread that swaps, or
    one that adds up replicas' gradients, too."""
    cores = min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)
    threads = job["ranks"] * (job["threads_per_rank"] + copies + sums)
    if job["backend"] != "cpu" or "local_rank" in job or threads <= cores:
        return []
    more = " and one that swaps" * copies + " and one that sums" * sums
    return [f"{counted(job['ranks'], 'rank')} of {counted(job['threads_per_rank'], 'thread')}{more} had "
            f"{cores:g} core{'s' * (cores != 1)}: the prediction gives every thread a core of its own"]


def _gpus(ends: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the GPUs that the ranks computed on; none: on the CPU."""
    return sorted({str(end["gpu"]) for end in ends if end.get("gpu")})


def _measured_otherwise(plan: Any, job: Mapping[str, Any], ends: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the prediction cannot hold, where its seconds are of another GPU or of other products than the run's."""
    wrong = []
    gpus = _gpus(ends)
    device, exact = str(getattr(plan, "device", "")), getattr(plan, "reproducible", None)
    if device and gpus and gpus != [device]:
        wrong.append(f"the plan's seconds were measured on {device}, it ran on {' and '.join(gpus)}")
    ran_exact = bool(job["reproducible"]) or job["ranks"] > plan.ranks or plan.program.copies > 1  # engine.py: copies agree so
    if exact is not None and gpus and exact != ran_exact:
        wrong.append(f"the plan's seconds were measured with reproducible={exact}, its products were those of {ran_exact}")
    return [f"{text}: a plan from costs of tp.profile of these would be right" for text in wrong]


@dataclass(frozen=True, repr=False)
class Report:
    """Predicted beside measured; prints as a table. Times in seconds, memory in bytes.

    Attributes:
        step_time_s, predicted_step_time_s: the median of the steps after the first (None if there was no second), the plan's.
        tokens_per_s: at that median.
        peak_memory_bytes, predicted_peak_memory_bytes: one per rank, the engine's high-water mark.
        resident_memory_bytes: one per rank, of the whole process (of all ranks together where they are threads).
        bubbles, predicted_bubbles: idle seconds by cause, summed over ranks; measured in the last step.
        last_step_time_s, resimulated_step_time_s: of that step, and what the simulator makes of its operations as measured.
        work_ratio: measured over predicted seconds of all its operations: how much slower they are than when profiled.
        losses, steps: of every record. total_steps: that were asked for.
        paths: what was written where.
        caveats: what was otherwise than it was meant to be, and why.
        about: the plan, the model and the GPUs that it ran on.
        planned, measured: the timelines of the step (one replica's) and of the last step; None where there is none.
    """

    step_time_s: float | None
    predicted_step_time_s: float
    tokens_per_s: float | None
    peak_memory_bytes: list[int]
    predicted_peak_memory_bytes: list[int]
    resident_memory_bytes: list[int]
    bubbles: dict[str, float]
    predicted_bubbles: dict[str, float]
    last_step_time_s: float | None
    resimulated_step_time_s: float | None
    work_ratio: float | None
    losses: list[float]
    steps: list[int]
    paths: dict[str, str]
    caveats: list[str] = field(default_factory=list)
    about: str = ""
    planned: Timeline | None = field(default=None, compare=False)
    measured: Timeline | None = field(default=None, compare=False)
    total_steps: int | None = None

    @classmethod
    def of(cls, plan: Any, records: Sequence[Mapping[str, Any]], ends: Sequence[Mapping[str, Any]],
           timeline: Any, job: Mapping[str, Any]) -> Report:
        """From a run's records, the last words of its ranks and the causes of their idle time."""
        times = [record["step_time_s"] for record in records[1:]]
        step = statistics.median(times) if times else None
        bubbles, intervals = dict(timeline.bubbles), timeline.intervals
        planned = plan.timeline()
        sums = dict(getattr(plan, "durations", {})).get(SUM)
        sums = None if sums is None else sums[:, 0]
        beside = {name: plan.durations[name] for name in (BESIDE, LAST, GATHER) if name in dict(getattr(plan, "durations", {}))}
        told = (0.0 if sums is None else sums.sum()) + (beside[GATHER][:, 0].sum() if GATHER in beside else 0.0)
        replicas, predicted = job["ranks"] // plan.ranks, float(planned.work_s - told)
        timed = bool(times) and (sums is not None or int(getattr(plan, "data_parallel", 1)) * int(getattr(plan, "copies", 1)) == 1)
        caveats = _crowded(job, plan.program.swaps_beside, BESIDE in beside)
        caveats += [f"rank {rank}: {text}" for rank, end in enumerate(ends) for text in end.get("caveats", ())]
        caveats += _measured_otherwise(plan, job, ends)
        if times and not timed:
            caveats.append("the plan is of an older terapipe_c, and does not say what of its updates are sums of gradients: "
                           "planned again, it would be laid beside the last step")
        out = job["out"]
        files = {} if out is None else {name: os.path.join(out, name) for name in ("metrics.jsonl", "trace.json", "checkpoints")}
        return cls(
            step_time_s=step,
            predicted_step_time_s=float(plan.step_time_s),
            tokens_per_s=job["batch"] * job["seq_len"] / step if step else None,
            peak_memory_bytes=[end["peak_memory_bytes"] for end in ends],
            predicted_peak_memory_bytes=[int(size) for size in job["predicted_peak_memory_bytes"]],
            resident_memory_bytes=[end["resident_memory_bytes"] for end in ends],
            bubbles={cause: float(seconds) for cause, seconds in bubbles.items()},
            predicted_bubbles={cause: replicas * float(seconds) for cause, seconds in dict(plan.bubbles).items()},
            last_step_time_s=times[-1] if times else None,
            resimulated_step_time_s=resimulated(plan.program, intervals, sums, beside=beside) if timed else None,
            work_ratio=timeline.work_s / (replicas * predicted) if timed and predicted > 0 else None,
            losses=[record["loss"] for record in records],
            steps=[record["step"] for record in records],
            paths={name: path for name, path in files.items() if os.path.exists(path)},
            about=f"{plan!r} of {plan.model!r}" + (f", measured on {' and '.join(gpus)}" if (gpus := _gpus(ends)) else ""),
            planned=planned,
            measured=timeline if timeline.makespan_s > 0 else None,     # a resume may have had nothing to do
            total_steps=job["steps"],
            caveats=caveats,
        )

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, predicted, measured, error of the prediction), as text."""
        table = [("step time", _seconds(self.predicted_step_time_s), _seconds(self.step_time_s),
                  _percent(self.step_time_s, self.predicted_step_time_s))]
        if self.resimulated_step_time_s is not None:
            table.append(("last step, from measured operations", _seconds(self.resimulated_step_time_s),
                          _seconds(self.last_step_time_s), _percent(self.last_step_time_s, self.resimulated_step_time_s)))
        for rank, peak in enumerate(self.peak_memory_bytes):
            predicted = self.predicted_peak_memory_bytes[rank] if rank < len(self.predicted_peak_memory_bytes) else None
            error = "exact" if peak == predicted else _percent(peak, predicted)
            table.append((f"memory of rank {rank}", _bytes(predicted), _bytes(peak), error))
        for rank, size in enumerate(self.resident_memory_bytes):
            table.append((f"resident, rank {rank}", "", _bytes(size), ""))
        for cause in {**self.predicted_bubbles, **self.bubbles}:
            name, seen = cause.replace("_", " "), self.bubbles.get(cause) if self.measured is not None else None
            table.append((f"idle: {name}", _seconds(self.predicted_bubbles.get(cause)), _seconds(seen), ""))
        return table

    def __repr__(self) -> str:
        rows = [("", "predicted", "measured", "error"), *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip() for row in rows]
        return "\n".join([*lines, *self._sentences()])

    def _sentences(self) -> list[str]:
        """What is said beneath the table."""
        ranks = len(self.peak_memory_bytes)
        lines = [*([self.about] if self.about else []),
                 f"idle: in the last step, {'of its rank' if ranks == 1 else f'summed over {ranks} ranks'}"]
        if self.tokens_per_s:
            lines.append(f"{self.tokens_per_s:,.0f} tokens per second")
        if self.work_ratio:
            lines.append(f"operations of the last step took {self.work_ratio:.2f} times what they were predicted to take")
        if self.losses:
            done = self.steps[-1] + 1
            lines.append(f"{done} of {counted(self.total_steps or done, 'step')} done: loss {self.losses[0]:.4f} after "
                         f"{counted(self.steps[0] + 1, 'step')}, {self.losses[-1]:.4f} after {done}")
        return [*lines, *self.caveats, *(f"{name}: {path}" for name, path in self.paths.items())]

    def loss_svg(self, width: int = 640, height: int = 160) -> str:
        """The loss curve. Losses that are not finite are left out."""
        return loss_curve(self.steps, self.losses, width, height)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{word}</th>" for word in ("", "predicted", "measured", "error"))
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows())
        said = "<br>".join(html.escape(text) for text in self._sentences())
        lines = (("Planned step", self.planned), ("Measured, the last step", self.measured))
        pictures = "".join(f"<h2>{words}</h2>{line._repr_html_()}" for words, line in lines if line is not None)
        return f"<table><tr>{head}</tr>{body}</table><p>{said}</p>{self.loss_svg()}{pictures}"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML file that stands alone; gives its path."""
        path = path_of("path", path)
        style = ("body{font:14px system-ui,sans-serif;margin:2em;background:#fff;color:#1c2430}td,th{padding:.2em 1em;"
                 "text-align:right}td:first-child{text-align:left}h2{font-size:1.15em;margin:1.5em 0 .5em}"
                 "@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6ebf2}}")
        write_text(path, '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>terapipe_c run</title><style>'
                   f"{style}</style></head><body><h1>Predicted and measured</h1>{self._repr_html_()}</body></html>\n")
        return path
