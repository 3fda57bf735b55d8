"""Every planner by its name in ``tp.plan``: which blocks a stage gets, and what it does besides to fit its memory.

The planners of the papers see what their papers see: seconds and bytes of each block, a number of stages and of
micro-batches. What they return is judged like everything else, by simulating the program that the engine would run, its
memory to the byte. They know neither the engine's buffers nor what a stage costs besides its blocks: where a plan of theirs is
over the limit by the engine's count, they are asked again with what was missing taken off the stages' limits.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import planners
from ._core import InfeasibleError
from .cost import even_partition
from .request import Request
from .search import (
    NOTHING,
    SLIGHT,
    Candidate,
    Cut,
    Judge,
    Micro,
    Savings,
    StageCost,
    balanced,
    block_bytes,
    kind_seconds,
    search,
)

__all__ = ["Found", "Task", "plan_one"]

Float = NDArray[np.float64]
_EFFORT = 300_000_000  # steps of AutoPipe's exact search: well under a second
_ROUNDS = 8            # how often a planner is asked again because its plan was over the limit by the engine's count


@dataclass(frozen=True)
class Found:
    """A plan, who judged it, and (what, predicted seconds) of others that were looked at."""

    judge: Judge
    candidate: Candidate
    compared: tuple[tuple[str, float], ...] = ()


# ---- what a paper's planner sees --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Task:
    """Blocks of the model in order, on stages in order. Times are of the mean micro-batch, bytes of the largest one."""

    judge: Judge
    schedule: str
    slicing: tuple[Micro, ...]
    limit_bytes: Float                    #: [stages] what the blocks of a stage may take

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return self.judge.ranks * self.judge.chunks

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return len(self.slicing)

    def _per_block(self, of_kind: dict[str, float]) -> Float:
        return np.array([of_kind[block.kind] for block in self.judge.model.blocks], np.float64)

    @cached_property
    def fwd_s(self) -> Float:
        """[blocks]"""
        return self._per_block(kind_seconds(self.judge, self.slicing, "F")) / self.micro_batches

    @cached_property
    def bwd_s(self) -> Float:
        """[blocks] of both gradients."""
        return self._per_block(kind_seconds(self.judge, self.slicing, "IW")) / self.micro_batches

    @cached_property
    def message_s(self) -> float:
        """Seconds of a micro-batch's message between stages (of its mean slice, which is all that is waited for)."""
        costs, units = self.judge.costs, sum(len(lengths) for _, lengths in self.slicing)
        return float(costs.message_s(self.tokens / units, self.judge.model.n_embd))

    @cached_property
    def tokens(self) -> int:
        """Rows of a step."""
        return sum(b * sum(lengths) for b, lengths in self.slicing)

    @cached_property
    def output_bytes(self) -> float:
        """What a micro-batch sends from one stage to the next."""
        return 4.0 * self.judge.model.n_embd * self.tokens / self.micro_batches

    @cached_property
    def static_bytes(self) -> Float:
        """[blocks] parameters, gradients, moments and one slot of activation gradients."""
        sizes = block_bytes(self.judge.model, self.slicing)
        return self._per_block({kind: float(size.static + size.gradient) for kind, size in sizes.items()})

    @cached_property
    def param_bytes(self) -> Float:
        """[blocks] the parameters alone."""
        model = self.judge.model
        return self._per_block({block.kind: 4.0 * model.block_params(block.kind) for block in model.blocks})

    @cached_property
    def activation_bytes(self) -> Float:
        """[blocks] kept from a micro-batch's forward to its backward."""
        sizes = block_bytes(self.judge.model, self.slicing)
        return self._per_block({kind: float(size.activation) for kind, size in sizes.items()})

    @property
    def memory_bytes(self) -> float:
        """One limit for all stages, where a planner knows no other."""
        return float(self.limit_bytes.min())


@dataclass(frozen=True)
class Wish:
    """What a planner wants."""

    boundaries: list[int]                 #: stages + 1 of them
    savings: Savings = NOTHING


def _blocks(result: Any) -> list[int]:
    return [int(x) for x in result.boundaries]


def _plain(name: str, *, memory: bool = False, **more: Any) -> Callable[[Task], Wish]:
    """Of a planner that takes times and gives boundaries."""
    def ask(task: Task) -> Wish:
        options: dict[str, Any] = {"comm_s": task.message_s, **more}
        if memory:
            options["memory"] = {"static_bytes": task.static_bytes, "activation_bytes": task.activation_bytes,
                                 "limit_bytes": task.limit_bytes}
        return Wish(_blocks(getattr(planners, name)(task.fwd_s, task.bwd_s, task.stages, task.micro_batches, **options)))

    return ask


def _nodes(name: str) -> Callable[[Task], Wish]:
    """Of DawnPiper's planners: a block is a node; the stages' own 1F1B (or GPipe) memory; no swap without a host's link."""
    def ask(task: Task) -> Wish:
        rest = np.maximum(task.static_bytes - 2 * task.param_bytes, 0.0)
        nodes = {"fwd_s": task.fwd_s, "bwd_s": task.bwd_s, "recompute_s": task.fwd_s, "activation_bytes": task.activation_bytes,
                 "param_bytes": task.param_bytes, "optimizer_bytes": rest}
        result = getattr(planners, name)(nodes, task.stages, task.memory_bytes, micro_batches=task.micro_batches,
                                         schedule="gpipe" if task.schedule == "gpipe" else "1f1b")
        recompute = tuple(bool(x) for x in result.recompute)
        swap = tuple(int(np.ceil(x)) for x in result.swap_bytes)
        if not any(recompute) and not any(swap):
            return Wish(_blocks(result))
        work = task.fwd_s + task.bwd_s + task.fwd_s * np.array(recompute)
        bounds = _blocks(result)
        stall = tuple(max(0.0, float(s - work[a:e].sum())) if any(swap[a:e]) else 0.0
                      for s, a, e in zip(result.stage_time_s, bounds[:-1], bounds[1:], strict=True))
        return Wish(bounds, Savings(recompute, swap if any(swap) else (), stall if any(stall) else ()))

    return ask


_ASK: dict[str, Callable[[Task], Wish]] = {
    "autopipe": _plain("autopipe", memory=True, effort=_EFFORT), "autopipe_heuristic": _plain("autopipe_heuristic", memory=True),
    "dawnpiper": _nodes("dawnpiper"), "dawnpiper_binary": _nodes("dawnpiper_binary"),
}


# ---- asking one --------------------------------------------------------------------------------------------------------

def _limits(judge: Judge, slicing: tuple[Micro, ...]) -> Float:
    """[stages] of what the blocks may take: the limit less what the engine holds for a stage whatever its blocks are."""
    stages = judge.ranks * judge.chunks
    limit = float(judge.limit or 0)
    own = block_bytes(judge.model, slicing)["stage"]
    return np.full(stages, limit / judge.chunks - own.static - own.activation - own.gradient)


def plan_stages(judge: Judge, name: str, schedule: str, slicing: tuple[Micro, ...]) -> Candidate:
    """The planner's stages for these micro-batches, judged; InfeasibleError if it finds none that fit."""
    if name not in _ASK or not hasattr(planners, name):
        raise InfeasibleError(f"planner {name} is not built yet")
    stages, limits = judge.ranks * judge.chunks, _limits(judge, slicing)
    if stages == 1 and not (limits > 0).all():
        limits[:] = judge.limit or 0
    refused: InfeasibleError | None = None
    for _ in range(_ROUNDS):
        if not (limits > 0).all():
            break
        try:
            wish = _ASK[name](Task(judge, schedule, slicing, limits))
        except InfeasibleError as error:
            refused = refused or error
            break
        cut = tuple(zip(wish.boundaries[:-1], wish.boundaries[1:], strict=True))
        found = judge.judge(schedule, cut, slicing, 0, wish.savings)
        if judge.fits(found):
            return found
        peak = judge.peak(found, judge.program(found, judge.durations(cut, slicing, wish.savings)))
        over = np.array([peak[k % judge.ranks] - (judge.limit or 0) for k in range(stages)], np.float64)
        limits = limits - np.maximum(over, 0.0) / judge.chunks
    if judge.shortest is not None:
        raise judge.refuse()
    raise refused or InfeasibleError(f"a stage needs more than the {judge.limit} bytes that a rank may use before it has a "
                                     "block: a larger memory_bytes would be right")


def whole_sequences(request: Request) -> tuple[Micro, ...]:
    """What a planner that knows no slices runs."""
    return request.slicing or ((1, (request.seq_len,)),) * request.share


def uniform(judge: Judge, request: Request) -> Candidate:
    """Megatron's default: layers divided evenly, whole sequences, weight gradients at once; asks no cost anything."""
    cut = request.partition or tuple(even_partition(request.model, judge.ranks * judge.chunks))
    name = "1f1b" if "1f1b" in request.schedules else request.schedules[0]
    return judge.judge(name, cut, whole_sequences(request), 0)


def _plan_uniform(request: Request) -> Found:
    judge = request.judge(request.ranks[0])
    found = uniform(judge, request)
    if not judge.fits(found):
        raise judge.refuse()
    return Found(judge, found)


def _plan_stages(request: Request) -> Found:
    """A paper's planner on each number of ranks; the fastest."""
    best: Found | None = None
    compared, refusals = [], []
    for ranks in request.ranks:
        judge = request.judge(ranks)
        try:
            if request.partition is not None:
                found = judge.judge(request.schedules[0], request.partition, whole_sequences(request), 0)
                if not judge.fits(found):
                    raise judge.refuse()
            else:
                found = plan_stages(judge, request.planner, request.schedules[0], whole_sequences(request))
        except InfeasibleError as error:
            refusals.append(error)
            continue
        compared.append((f"{request.planner} on {ranks} ranks", found.seconds))
        if best is None or found.seconds < best.candidate.seconds * SLIGHT:
            best = Found(judge, found)
    if best is None:
        raise refusals[0]
    return Found(best.judge, best.candidate, tuple(compared) if len(compared) > 1 else ())


# ---- terapipe ----------------------------------------------------------------------------------------------------------

def first_look(judge: Judge, request: Request) -> float:
    """Seconds of a quick plan: which number of ranks deserves the search."""
    stages = judge.ranks * judge.chunks
    slicing = request.slicing
    if slicing is None:
        one = planners.slice_tokens(StageCost(judge.costs, judge.model, stages), stages, seq_len=request.seq_len,
                                    granularity=request.unit)
        slicing = ((1, tuple(int(n) for n in one.lengths)),) * request.share
    quick = judge.judge(request.schedules[0], balanced(judge, slicing, stages), slicing)
    return min(quick.seconds, uniform(judge, request).seconds)


def _plan_terapipe(request: Request) -> Found:
    judges = [request.judge(ranks) for ranks in request.ranks]
    compared: list[tuple[str, float]] = []
    looks = [first_look(judge, request) for judge in judges] if len(judges) > 1 else [0.0]
    best: Found | None = None
    for _, judge in sorted(zip(looks, judges, strict=True), key=lambda pair: pair[0]):
        even = uniform(judge, request)
        choice = search(judge, request.schedules, request.share, request.seq_len, request.unit, request.partition,
                        request.slicing)
        if judge.fits(even) and (choice is None or even.seconds < choice.seconds):
            choice = even
        compared.append((f"uniform on {judge.ranks} ranks", even.seconds))
        if choice is not None:                                 # other numbers of ranks: only if this one does not fit
            best = Found(judge, choice)
            break
    if best is None:
        raise min((j for j in judges if j.shortest is not None), key=lambda j: j.shortest or (0, 0, 0)).refuse()
    judge, found = best.judge, best.candidate
    for name in request.schedules:
        if name != found.schedule:
            other = judge.judge(name, found.partition, found.slicing, found.pending)
            compared.append((f"{name} with these slices", other.seconds))
    return Found(judge, found, tuple(compared))


def plan_one(request: Request) -> Found:
    """The plan of the planner that ``request.planner`` names, one of all but "auto"."""
    if request.planner == "terapipe":
        return _plan_terapipe(request)
    if request.planner == "uniform":
        return _plan_uniform(request)
    found = _plan_stages(request)
    if request.savings == "never" and found.candidate.savings != NOTHING:
        raise InfeasibleError(f"planner {request.planner} fits {found.judge.limit} bytes by recomputing or swapping, which this "
                              "engine does not do: executable=False gives its plan, more memory one without")
    return found
