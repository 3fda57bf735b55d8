"""The results of a training, finished or so far: records, evaluations, the measured timeline, the report."""
from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._files import naming, write_json
from .config import counted, html_table
from .report import Report, loss_curve

if TYPE_CHECKING:
    from .plan import Plan
    from .schedule import Timeline

__all__ = ["Metrics", "Outcome", "Record"]


@dataclass(frozen=True)
class Record:
    """One step. Steps count from 0, here and in errors ("failed at step 3"); step s trains on `Dataset.batch(s)`, and its record
    comes when s + 1 steps are done, which is what texts and checkpoints count. Times in seconds; losses are means per token.

    grad_norm is over all ranks, before clipping; step_time_s from all ranks' start to the slowest one's end, without evaluation
    and checkpoints; eval_loss None where this step did not evaluate.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_time_s: float
    predicted_step_time_s: float
    eval_loss: float | None = None


def met(rows: list[tuple[Any, ...]], ranks: int) -> list[tuple[Any, ...]]:
    """Rows in which an exchange (AR) begins when both its ends are there, so that the rank that came first counts as idle until
    then. ranks: of one replica. Two copies of a model have two exchanges, one after the other on both ranks. rows: each rank's in
    order."""
    arrived: dict[tuple[int, int], float] = {}
    seen: dict[int, int] = {}                                  # of a rank, so far
    which: dict[int, tuple[int, int]] = {}                     # by row: its replica, and its number among the exchanges there
    for i, row in enumerate(rows):
        if row[1] == "AR":
            key = which[i] = row[0] // ranks, seen.get(row[0], 0)
            seen[row[0]] = key[1] + 1
            arrived[key] = max(row[5], arrived.get(key, row[5]))
    return [(*row[:5], max(row[5], min(arrived[which[i]], row[6])), row[6]) if i in which else row for i, row in enumerate(rows)]


class Metrics:
    """A run folder's metrics.jsonl, a line for each record. If someone removes the file during the run it begins anew, with all
    records of this run; those from before a resume are lost."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a")

    def write(self, record: Record, before: list[Record]) -> None:
        with naming(self._path):
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._file.close()
                self._file = self._path.open("a")
                self._file.writelines(map(_line, before))
            self._file.write(_line(record))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> str:
    row = {name: value if value is None or math.isfinite(value) else None for name, value in asdict(record).items()}
    return json.dumps(row, allow_nan=False) + "\n"


class Outcome:
    """What `Run` (of `launch`) and `RankRun` (of `train`) have in common."""

    plan: Plan
    out: Path | None

    def __init__(self, plan: Plan, job: Mapping[str, Any]) -> None:
        self.plan = plan
        self.out = None if job["out"] is None else Path(job["out"])
        self._job = job
        self._history: list[Record] = []
        self._ends: dict[int, dict[str, Any]] = {}
        self._checkpoint: Path | None = Path(job["resume_from"]) if job["resume_from"] else None

    @property
    def history(self) -> list[Record]:
        """The records so far, one every ``log_every`` steps: a million take some 300 MB, so of long runs fewer would be right."""
        return list(self._history)

    @property
    def loss_eval(self) -> float | None:
        """The newest evaluation's mean loss; None if there was none."""
        return next((record.eval_loss for record in reversed(self._history) if record.eval_loss is not None), None)

    @property
    def checkpoint_path(self) -> Path | None:
        """The newest complete checkpoint; None if there is none."""
        return self._checkpoint

    def _so_far(self) -> str:
        steps = counted(self._job["steps"], "step")
        if not self._history:
            return steps
        return f"{self._history[-1].step + 1} of {steps} done, loss {self._history[-1].loss:.4f}"

    def _left_off(self) -> str:
        """For who sees it end early: what was done, and how to go on from a shell."""
        done = self._history[-1].step + 1 if self._history else self._job["first_step"]
        steps, kept = self._job["steps"], self._checkpoint
        if kept is None:
            return f"{done} of {counted(steps, 'step')}; there is no checkpoint"
        since = "" if int(kept.name.removeprefix("step-")) == done else f" from {int(kept.name.removeprefix('step-'))}"
        return f"{done} of {counted(steps, 'step')}; `terapipe resume {shlex.quote(str(self.out))} --steps {steps}` goes on{since}"

    def _repr_html_(self) -> str:
        name, _, said = repr(self).partition("(")
        last = self._history[-1:]
        rows = [("state", said.partition(",")[0]), ("plan", repr(self.plan)), ("steps", self._so_far()),
                *(("tokens per second", f"{record.tokens_per_s:,.0f}") for record in last),
                *(("on held-out tokens", f"loss {loss:.4f}") for loss in (self.loss_eval,) if loss is not None),
                ("folder", f"{self.out}"), ("checkpoint", f"{self.checkpoint_path}")]
        return html_table(name, rows) + loss_curve([r.step for r in self._history], [r.loss for r in self._history])

    @property
    def trace(self) -> list[tuple[int, str, int, int, int, float, float]]:
        """What ran in the last step, when the run is over: (rank, op, stage, micro, slice, start_s, end_s), from 0 s on."""
        rows = [(rank, *row) for rank in sorted(self._ends) for row in self._ends[rank]["trace"]]
        rows = met(rows, self.plan.ranks)
        start = min((row[5] for row in rows), default=0.0)
        return [(rank, op, stage, micro, piece, begin - start, end - start)
                for rank, op, stage, micro, piece, begin, end in rows]

    def timeline(self) -> Timeline:
        """The measured timeline of the last step, drawn like the predicted one (`plan.timeline()`)."""
        from .schedule import Timeline

        return Timeline.from_intervals(self.trace, self._job["ranks"], program=self.plan.program)

    def report(self) -> Report:
        """Predicted beside measured, once it is over. Printing it or showing it in a notebook draws it."""
        ends = [self._ends[rank] for rank in sorted(self._ends)]
        records = [asdict(record) for record in self._history]
        return Report.of(self.plan, records, ends, self.timeline(), self._job)

    def _take_record(self, event: dict[str, Any], metrics: Metrics | None) -> Record:
        record = Record(**event, predicted_step_time_s=float(self.plan.step_time_s))
        if metrics is not None:
            metrics.write(record, self._history)
        return record

    def _write_trace(self) -> None:
        if self.out is not None and self._history:  # a resume with nothing left to do keeps what was there
            columns = ["rank", "op", "stage", "micro", "slice", "start_s", "end_s"]
            plan = getattr(self.plan, "digest", None)       # None: a plan of another's making
            write_json(self.out / "trace.json", {"columns": columns, "rows": self.trace, "plan": plan,
                                                 "steps": self._history[-1].step + 1})
