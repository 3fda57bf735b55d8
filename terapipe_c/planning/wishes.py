"""Translates between a request and the papers' planners: :class:`Task` is the request in the terms of the papers (seconds and bytes
of each block, a number of stages and of micro-batches), :func:`ask` makes a planner's answer a candidate."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import planners
from .._core import InfeasibleError
from ..config import KINDS
from ..guests import BPIPE
from ..partition import updated_of_kind
from .block_bytes import block_bytes, saved_bytes
from .deadline import check_time
from .judge import Candidate, Judge, Micro, updates_of
from .savings import NOTHING, Savings
from .starts import TICKS, kind_seconds

__all__ = ["Task", "ask"]

Float = NDArray[np.float64]
_EFFORT = 300_000_000  # steps of AutoPipe's exact search: well under a second
_LEAST_S = 1e-280       # least seconds of a tick: quotients by it stay finite
_LONGEST = 1e30         # most ticks of a message: beside it all work is nothing
_EXACT = 10_000_000     # nodes of BMPipe's exact search
_CHUNKED = 6_000_000  # candidates of BMPipe's search of two chunks: 0.1 s; of more chunks in proportion


# ---- what a paper's planner sees --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Task:
    """The model's blocks in order, for stages in order. Times are those of the mean micro-batch, bytes those of the largest one.

    Times are whole numbers of ticks (``tick_s``, a 2^-36th of all work): their sums are exact, so equal work compares equal however
    the costs are scaled, and a planner decides ties by its own rule, not by rounding."""

    judge: Judge
    schedule: str
    slicing: tuple[Micro, ...]
    limit_bytes: Float                    #: [stages] bytes that the blocks of a stage may take
    extra_bytes: Float                    #: [blocks] bytes added because earlier answers were over the limit by so much
    host_Bps: float                       #: bytes a second to the host and back; 0: nothing is swapped
    held: tuple[int, ...]                 #: [stages] micro-batches that a stage has in flight in the schedule's order
    inputs_stay: bool = False             #: count the inputs of all blocks that can be recomputed as static bytes, as many as the
                                          #: fullest stage holds; else as part of a block's activations
    ahead: int | None = None              #: how far ahead overlapped swaps begin (Savings); None: swaps do not overlap

    def within(self, limit_bytes: Float, extra_bytes: Float | None = None, inputs_stay: bool = False) -> Task:
        """This task with another memory; what does not depend on the memory is carried over."""
        extra = self.extra_bytes if extra_bytes is None else extra_bytes
        other = Task(self.judge, self.schedule, self.slicing, limit_bytes, extra, self.host_Bps, self.held, inputs_stay, self.ahead)
        for name in _COUNTED_ONCE:
            other.__dict__[name] = getattr(self, name)
        return other

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return self.judge.ranks * self.judge.chunks

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return len(self.slicing)

    @property
    def asked(self) -> int:
        """Micro-batches to name to a planner that minimises the makespan, at least 2: one alone takes as long on any stages, and
        even stages are better, because their updates run at the same time."""
        return max(2, self.micro_batches)

    @property
    def in_order(self) -> bool:
        """Whether every stage holds as many micro-batches as under 1F1B."""
        return all(n == min(self.micro_batches, self.stages - k) for k, n in enumerate(self.held))

    def _per_block(self, of_kind: dict[str, float]) -> Float:
        return np.array([of_kind[block.kind] for block in self.judge.model.blocks], np.float64)

    @cached_property
    def tick_s(self) -> float:
        """Seconds of a tick."""
        work = float(self._per_block(kind_seconds(self.judge, self.slicing)).sum()) / self.micro_batches
        return max(work / TICKS, _LEAST_S) if work > 0 else 1.0

    def _ticks(self, of_kind: dict[str, float]) -> Float:
        """[blocks] of ticks of the mean micro-batch, from each kind's seconds of a step."""
        return np.rint(self._per_block(of_kind) / self.micro_batches / self.tick_s)

    @cached_property
    def fwd(self) -> Float:
        """[blocks] of ticks of a forward."""
        return self._ticks(kind_seconds(self.judge, self.slicing, "F"))

    @cached_property
    def recompute(self) -> Float:
        """[blocks] of ticks of recomputing what a forward keeps (tp_cost_recompute); for blocks that the engine cannot recompute,
        more than any plan would spend."""
        costs, judge = self.judge.costs, self.judge
        never = 10.0 * float(self._per_block(kind_seconds(judge, self.slicing, "F")).sum())
        sliced = self.schedule != BPIPE and not judge.savings.at_once and any(len(lengths) > 1 for _, lengths in self.slicing)
        one_of_each = np.eye(len(KINDS), dtype=np.int32)[[KINDS.index("attention"), KINDS.index("ffn")]]
        kept = bytes(2 * [costs.where.keeps_keys * sliced])               # where R comes slice by slice
        seconds = costs.recompute_s(one_of_each, costs.slice_work(self.slicing), kept) - costs.overhead_s
        attention, ffn = seconds.sum(1).tolist()
        return self._ticks({"embedding": never, "head": never, "ffn": ffn, "attention": attention})

    @cached_property
    def bwd(self) -> Float:
        """[blocks] of ticks of both gradients, of a micro-batch's share of the update, and of recomputation that the request asks
        for."""
        costs, model = self.judge.costs, self.judge.model
        updates, updated = updates_of(self.schedule, self.micro_batches), updated_of_kind(model)
        each = updates * (costs.optimizer_param_s - self.judge.replicas.spares_s)
        work = self._ticks({kind: seconds + each * updated[kind]
                            for kind, seconds in kind_seconds(self.judge, self.slicing, "IW").items()})
        return np.asarray(work + np.where(self.given, self.recompute, 0.0))

    @cached_property
    def given(self) -> NDArray[np.bool_]:
        """[blocks] whether the request says that the block is recomputed."""
        count = len(self.judge.model.blocks)
        return np.array(self.judge.savings.recompute or (False,) * count)

    @cached_property
    def message(self) -> float:
        """Ticks of a message between stages: of a mean slice's, because the next stage waits only for the first slice."""
        units = sum(len(lengths) for _, lengths in self.slicing)
        return min(float(np.rint(self.judge.mean_message_s(self.tokens / units) / self.tick_s)), _LONGEST)

    @property
    def host_bytes(self) -> float:
        """``host_Bps`` in bytes a tick."""
        return self.host_Bps * self.tick_s

    @cached_property
    def tokens(self) -> int:
        """Tokens of a step."""
        return sum(b * sum(lengths) for b, lengths in self.slicing)

    @cached_property
    def output_bytes(self) -> float:
        """Bytes that a mean micro-batch sends from one stage to the next."""
        return 4.0 * self.judge.model.n_embd * self.tokens / self.micro_batches

    @cached_property
    def static_bytes(self) -> Float:
        """[blocks] of bytes of parameters, gradients, moments and one slot of activation gradients, with ``extra_bytes``."""
        return np.asarray(self._fixed + max(self.held) * self._staying + self.extra_bytes)

    @cached_property
    def _fixed(self) -> Float:
        sizes = block_bytes(self.judge.model, self.slicing)
        updated, spared = updated_of_kind(self.judge.model), 16.0 - self.judge.replicas.param_bytes
        fixed = {kind: float(size.static + size.gradient) - spared * updated.get(kind, 0) for kind, size in sizes.items()}
        room = {kind: float(size.activation - size.input) for kind, size in sizes.items()}     # to recompute one micro-batch's
        return np.asarray(self._per_block(fixed) + np.where(self.given, self._per_block(room), 0.0))

    @cached_property
    def param_bytes(self) -> Float:
        """[blocks] of bytes of the parameters alone."""
        model = self.judge.model
        return self._per_block({block.kind: 4.0 * model.block_params(block.kind) for block in model.blocks})

    @cached_property
    def updated_bytes(self) -> Float:
        """[blocks] of bytes of the parameters that the block has gradients of (a tied weight's are the head's)."""
        return self._per_block({kind: 4.0 * n for kind, n in updated_of_kind(self.judge.model).items()})

    @cached_property
    def activation_bytes(self) -> Float:
        """[blocks] of bytes kept from a micro-batch's forward to its backward, less those that count as static
        (``inputs_stay``)."""
        return self._kept - self._staying

    @cached_property
    def _kept(self) -> Float:
        sizes = block_bytes(self.judge.model, self.slicing)
        kept, again = (self._per_block({kind: float(getattr(size, name)) for kind, size in sizes.items()})
                       for name in ("activation", "input"))
        return np.where(self.given, again, kept)

    @cached_property
    def _staying(self) -> Float:
        """[blocks] of bytes of the inputs that count as static (``inputs_stay``), of a micro-batch."""
        return np.where((self.saved_bytes > 0) & self.inputs_stay, self._kept - self.saved_bytes, 0.0)

    @cached_property
    def saved_bytes(self) -> Float:
        """[blocks] of bytes of a micro-batch's activations that recomputing the block saves: all but its input."""
        saved = np.array(saved_bytes(self.judge.model, self.slicing, self.judge.costs.where), np.float64)
        return np.where(self.given, 0.0, saved)

    @cached_property
    def least_kept_bytes(self) -> Float:
        """[blocks] of the fewest bytes that can be kept of a micro-batch, by recomputing what can be recomputed."""
        return self._kept - self.saved_bytes

    @property
    def memory_bytes(self) -> float:
        """One limit for all stages, for planners that know only one: the largest of the stages'."""
        return float(self.limit_bytes.max())

    @property
    def rank_bytes(self) -> float:
        """One limit for all ranks: the largest sum over a rank's chunks."""
        return float(self.limit_bytes.reshape(self.judge.chunks, self.judge.ranks).sum(0).max())


_COUNTED_ONCE = ("tick_s", "fwd", "recompute", "bwd", "message", "tokens", "output_bytes", "param_bytes", "updated_bytes",
                 "saved_bytes", "given", "_fixed", "_kept")


@dataclass(frozen=True)
class Wish:
    """A planner's answer."""

    boundaries: list[int]                 #: [stages + 1] first blocks of the stages, and the end
    savings: Savings = NOTHING


def _blocks(result: Any) -> list[int]:
    return [int(x) for x in result.boundaries]


def _savings(task: Task, boundaries: list[int], recompute: Any, swap: Any) -> Savings:
    """A planner's recomputation and swaps as the engine does them: it recomputes, swaps or keeps a block as a whole, and keeps
    embedding and head. A planner may assume, as its paper does, that work hides all copies; its plan is judged with the time that
    they take from the rank or that the rank waits for them."""
    if not np.any(recompute) and not np.any(swap):
        return NOTHING
    can = saved_bytes(task.judge.model, task.slicing, task.judge.costs.where)
    again = tuple(bool(x) and bytes_ > 0 for x, bytes_ in zip(recompute, can, strict=True))
    out = tuple(bytes_ if x > 0 and not flag else 0 for x, flag, bytes_ in zip(swap, again, can, strict=True))
    seconds = tuple(sum(out[a:e]) / task.host_Bps if any(out[a:e]) else 0.0
                    for a, e in zip(boundaries[:-1], boundaries[1:], strict=True))
    return Savings(again if any(again) else (), out if any(out) else (), seconds if any(seconds) else (),
                   task.ahead if any(out) else None)


def _autopipe(name: str, **options: Any) -> Callable[[Task], Wish]:
    def ask(task: Task) -> Wish:
        memory = {"static_bytes": task.static_bytes, "activation_bytes": task.activation_bytes, "limit_bytes": task.limit_bytes,
                  "in_flight": task.held}
        return Wish(_blocks(getattr(planners, name)(task.fwd, task.bwd, task.stages, task.asked,
                                                    comm_s=task.message, memory=memory, **options)))

    return ask


def _baseline(name: str, *, saves: bool = False, **options: Any) -> Callable[[Task], Wish]:
    """saves: the planner may recompute and swap."""
    def ask(task: Task) -> Wish:
        memory: dict[str, Any] = {"static_bytes": task.static_bytes, "activation_bytes": task.activation_bytes,
                                  "limit_bytes": task.memory_bytes, "in_flight": task.held}
        more = dict(options)
        if saves:
            memory["recompute_s"] = task.recompute
        if name == "vpipe":
            more["swap_bandwidth_Bps"] = task.host_bytes
        result = getattr(planners, name)(task.fwd, task.bwd, task.stages, task.asked, comm_s=task.message,
                                         memory=memory, **more)
        bounds = _blocks(result)
        swap = np.where(result.swap, task.activation_bytes, 0.0)
        return Wish(bounds, _savings(task, bounds, result.recompute, swap))

    return ask


def _piper(task: Task) -> Wish:
    """Piper asked about the blocks as a chain of layers, without replicas or tensor parallelism. Where it leaves devices idle the
    stage with most work is halved until none is."""
    memory = {"static_bytes": task.static_bytes, "activation_bytes": task.activation_bytes, "limit_bytes": task.memory_bytes,
              "recompute_s": task.recompute, "in_flight": None if task.in_order else max(task.held)}
    graph = planners.layer_graph(task.fwd, task.bwd, task.stages, task.micro_batches, comm_s=task.message, memory=memory,
                                 param_bytes=np.full(len(task.fwd), 1e18), bandwidth_Bps=1.0)
    stages = planners.piper(graph).stages
    if any(stage.data != 1 for stage in stages):
        raise InfeasibleError("planner piper replicates single stages, which no plan here can hold")
    again = {node: way == "recompute" for stage in stages for node, way in zip(stage.nodes, stage.variants, strict=True)}
    recompute = np.array([again[i] for i in range(len(again))])
    work = task.fwd + task.bwd
    bounds = sorted({0, *(max(stage.nodes) + 1 for stage in stages)})
    while len(bounds) <= task.stages:
        heavy = max((k for k in range(len(bounds) - 1) if bounds[k + 1] - bounds[k] > 1),
                    key=lambda k: float(work[bounds[k]:bounds[k + 1]].sum()))
        first, end = bounds[heavy], bounds[heavy + 1]
        half = min(range(first + 1, end), key=lambda at: float(max(work[first:at].sum(), work[at:end].sum())))
        bounds.insert(heavy + 1, half)
    return Wish(bounds, _savings(task, bounds, recompute, np.zeros(len(work))))


def _dawnpiper(name: str) -> Callable[[Task], Wish]:
    """DawnPiper's planners, asked with a node for each block."""
    def ask(task: Task) -> Wish:
        params = np.minimum(task.param_bytes, task.updated_bytes)
        rest = np.maximum(task.static_bytes - 2 * params, 0.0)     # has a tied embedding's values, too, which have no gradient
        nodes = {"fwd_s": task.fwd, "bwd_s": task.bwd, "recompute_s": task.recompute,
                 "activation_bytes": task.activation_bytes, "param_bytes": params, "optimizer_bytes": rest}
        held = np.maximum.accumulate(task.held[::-1])[::-1]     # the planner needs numbers that never rise from stage to stage
        result = getattr(planners, name)(nodes, task.stages, task.memory_bytes, micro_batches=task.micro_batches,
                                         schedule="gpipe" if task.schedule == "gpipe" else "1f1b",
                                         swap_bandwidth_Bps=task.host_bytes, in_flight=held)
        bounds = _blocks(result)
        return Wish(bounds, _savings(task, bounds, result.recompute, result.swap_bytes))

    return ask


_STRATEGIES = {"none": (), "attention": ("attention",), "ffn": ("ffn",), "full": ("attention", "ffn")}


def _bmpipe(task: Task) -> Wish:
    """BMPipe asked with the model's layers; with its blocks, where there are more stages than layers."""
    kinds = [block.kind for block in task.judge.model.blocks]
    whole = task.stages <= task.judge.model.n_layer + 2
    groups = [[0], *([i, i + 1] for i in range(1, len(kinds) - 1, 2)), [len(kinds) - 1]] if whole \
        else [[i] for i in range(len(kinds))]

    def strategies(blocks: list[int]) -> list[tuple[str, list[int]]]:
        mine = {kinds[i]: i for i in blocks}
        return [(name, [mine[kind] for kind in again]) for name, again in _STRATEGIES.items() if all(k in mine for k in again)]

    fwd, bwd, again_s, static, kept, saved = (values.tolist() for values in (
        task.fwd, task.bwd, task.recompute, task.static_bytes, task.activation_bytes, task.saved_bytes))
    extra = task.extra_bytes.tolist()

    def total(values: list[float], blocks: list[int]) -> float:
        return float(sum(values[i] for i in blocks))

    types: list[list[list[int]]] = []                          # equal neighbours are one type
    for group in groups:
        if types and all(kinds[i] == kinds[j] and extra[i] == extra[j]
                         for i, j in zip(types[-1][0], group, strict=False)):
            types[-1].append(group)
        else:
            types.append([group])
    ways, sizes = [strategies(group[0]) for group in types], np.array([len(group[0]) for group in types])
    layers = [{"name": "+".join(kinds[i] for i in group[0]), "count": len(group), "fwd_s": total(fwd, group[0]),
               "bwd_s": total(bwd, group[0]), "static_bytes": total(static, group[0]),
               "strategies": [{"name": name, "extra_bwd_s": total(again_s, again),
                               "activation_bytes": total(kept, group[0]) - total(saved, again)}
                              for name, again in way]} for group, way in zip(types, ways, strict=True)]
    chunks = task.judge.chunks                                  # effort, no clock; with several chunks nobody reads the bound
    effort = _EXACT if chunks == 1 else _CHUNKED // chunks
    micros = task.asked if chunks == 1 else task.micro_batches
    result = planners.bmpipe(layers, task.judge.ranks, micros, task.rank_bytes, chunks=chunks,
                             comm_s=task.message, time_limit_s=None, effort=effort, prove=chunks == 1,
                             in_flight=task.held)
    taken, recompute, bounds = [0] * len(types), np.zeros(len(kinds), bool), [0]
    counts = np.ascontiguousarray(result.assignment.transpose(2, 3, 0, 1))      # [chunks, stages, types, strategies]
    for at in itertools.product(range(chunks), range(task.judge.ranks)):
        for t, r in zip(*np.nonzero(counts[at]), strict=True):
            for _ in range(int(counts[at][t, r])):
                shift = types[t][taken[t]][0] - types[t][0][0]
                recompute[[i + shift for i in ways[t][r][1]]] = True
                taken[t] += 1
        bounds.append(bounds[-1] + int(counts[at].sum(1) @ sizes))
    return Wish(bounds, _savings(task, bounds, recompute, np.zeros(len(kinds))))


_ASK: dict[str, Callable[[Task], Wish]] = {
    "autopipe": _autopipe("autopipe", effort=_EFFORT), "autopipe_heuristic": _autopipe("autopipe_heuristic"),
    "dawnpiper": _dawnpiper("dawnpiper"), "dawnpiper_binary": _dawnpiper("dawnpiper_binary"), "bmpipe": _bmpipe,
    "pipedream": _baseline("pipedream", straight=True), "dapple": _baseline("dapple", straight=True), "piper": _piper,
    "vpipe": _baseline("vpipe", saves=True), "adapipe": _baseline("adapipe", saves=True), "merak": _baseline("merak"),
}


def ask(task: Task, name: str) -> Candidate:
    """The planner's plan, judged; InfeasibleError where it has none, DeadlineError where time was up before it was judged: what is
    remembered of a planner's plans is to have all of them."""
    wish = _ASK[name](task)
    cut = tuple(zip(wish.boundaries[:-1], wish.boundaries[1:], strict=True))
    found = task.judge.judge(task.schedule, cut, task.slicing, 0, None if wish.savings == NOTHING else wish.savings)
    if found.seconds == math.inf:
        check_time(True)
    return found
