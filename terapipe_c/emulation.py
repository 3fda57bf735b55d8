"""Runs a plan of any cluster on one machine: the real engine and communicator, with kernels replaced by timed waits."""
from __future__ import annotations

import html
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import _core
from .config import counted, human_gap, human_seconds, timeout
from .cost import CostModel
from .engine import in_threads
from .links import Links
from .partition import block_counts
from .plan import Plan
from .planning.judge import Candidate, Judge
from .planning.own_program import OWN
from .planning.replicas import Replicas, sums_of, update_more
from .planning.savings import Savings
from .schedule import Program, Timeline, tables

__all__ = ["Emulation", "emulate"]

LONGEST = 2.0**53 * 1e-9    # seconds: of more, doubles do not tell one nanosecond from the next


@dataclass(frozen=True, repr=False)
class Emulation:
    """What a program did when every rank ran it as a thread. Times in seconds."""

    step_time_s: float              #: on the clock: from the start, together, until the last rank is done
    predicted_step_time_s: float    #: what the simulator says of the same program and durations
    num_ranks: int
    trace: list[tuple[int, str, int, int, int, float, float]] = field(repr=False)
    #: (rank, op, stage, micro, slice, start_s, end_s)
    program: Program | None = field(default=None, repr=False, compare=False)    #: what they ran, with its messages

    @property
    def error(self) -> float:
        """Relative error of the prediction: (emulated - predicted) / predicted."""
        return self.step_time_s / self.predicted_step_time_s - 1

    def timeline(self) -> Timeline:
        """The measured timeline, drawn like a simulated one."""
        return Timeline.from_intervals(self.trace, self.num_ranks, program=self.program)

    def __repr__(self) -> str:
        error = f", error {human_gap(self.error, '+')}" if self.predicted_step_time_s > 0 else ""
        return (f"Emulation({counted(self.num_ranks, 'rank')}, step {human_seconds(self.step_time_s)}, predicted "
                f"{human_seconds(self.predicted_step_time_s)}{error})")

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.timeline()._repr_svg_()}"


def emulate(plan: Plan | Program, costs: Any = None, *, timeout_s: float = 600.0) -> Emulation:
    """Run a plan's program once, in as many threads as it has ranks: order, messages and waits are real, work is sleep.

    Args:
        plan: a Plan, or a Program (lowered here if it has no messages yet).
        costs: a CostModel, or a dict of seconds as for Program.simulate; None: the plan's own durations.
        timeout_s: a rank that waits longer than this for another fails.
    """
    if isinstance(plan, Plan):
        program = plan.program
        if costs is None:
            costs = plan.durations
        elif isinstance(costs, CostModel):
            costs = _durations(plan, costs)
    elif isinstance(plan, Program):
        program = plan if "OPT" in plan.counts else plan.lower(False)
    else:
        raise _core.InvalidTypeError(f"plan is {type(plan).__name__}: a Plan or a Program would be right")
    if costs is None:
        raise _core.InvalidTypeError("a Program needs costs: a CostModel or a dict of seconds would be right")
    timeout_s = timeout("timeout_s", timeout_s)
    program.check()
    predicted = program.simulate(costs).makespan_s
    if predicted > LONGEST:
        raise _core.InvalidValueError(f"the step would take {predicted:g} s: at most {LONGEST:g} s, whose nanoseconds are counted, "
                                      "would be right")
    durations = tables(program, costs)
    ranks = program.num_ranks
    pairs = bytearray(ranks * ranks)
    for rank in range(ranks):
        for peer in set(program.instructions(rank)["peer"].tolist()) - {-1}:
            pairs[rank * ranks + peer] = pairs[peer * ranks + rank] = 1
    region = _core.Region.create(ranks, pairs, 1 << 14, 64, False)

    def run(rank: int) -> tuple[int, int, Any]:
        engine = _core.Engine.emulated(program, rank, durations, _core.Comm(region, rank, timeout_s))
        _, _, _, begin, end = engine.step(None)
        return begin, end, engine.events().tolist()

    return _collect(program, in_threads(region, run), predicted)


def _durations(plan: Plan, costs: CostModel) -> dict[str, Any]:
    """Seconds of the plan's instructions under other costs; swaps keep the plan's, which are the cluster's."""
    links = Links.of(plan.cluster, plan.ranks, plan.data_parallel)
    replicas = Replicas.of(plan.cluster, plan.ranks, plan.data_parallel, costs, plan.shard_optimizer)
    if plan.schedule == OWN:                # stages may be on any ranks; what is made again takes what it took
        out = costs.durations(plan.program, partition=plan.stages, slicing=plan.slicing, model=plan.model, links=links)
        counts, ring = block_counts(plan.model, plan.stages), replace(replicas, copies=plan.copies)
        sums = {**sums_of(plan.model, tuple(plan.stages), counts, ring), "OPT": update_more(plan.model, counts, ring)}
        tables = {name: np.broadcast_to(np.tile(each, plan.copies)[:, None], out["OPT"].shape) for name, each in sums.items()}
        return {**out, **tables, "OPT": out["OPT"] + tables["OPT"],
                **{op: plan.durations[op] for op in ("R", "SO", "SI") if op in plan.durations}}
    judge = Judge(plan.model, costs, plan.ranks, plan.chunks, None, replicas, links=links)
    savings = Savings(tuple(plan.recompute), tuple(plan.swap))
    slicing = tuple((b, tuple(lengths)) for b, lengths in plan.slicing)
    out = judge.full_durations(Candidate(0.0, plan.schedule, tuple(plan.stages), slicing, 0, savings), plan.program)
    return {**out, **{op: plan.durations[op] for op in ("SO", "SI") if op in plan.durations}}


def _collect(program: Program, results: list[Any], predicted: float) -> Emulation:
    origin = results[0][0]      # the same on every rank
    trace = []
    for rank, (_, _, events) in enumerate(results):
        for instr, (_, _, start, end, wait) in zip(program.instructions(rank), events, strict=True):
            op = _core.OPS[instr["op"]]
            start += wait if op == "OPT" else 0
            trace.append((rank, op, int(instr["stage"]), int(instr["micro"]), int(instr["slice"]), (start - origin) * 1e-9,
                          (end - origin) * 1e-9))
    return Emulation((max(end for _, end, _ in results) - origin) * 1e-9, predicted, program.num_ranks, trace, program)
