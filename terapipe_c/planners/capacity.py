"""Which is the largest micro-batch that a planner can fit into memory? DawnPiper's Tables 1 and 2 compare planners by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .._core import InfeasibleError, InvalidTypeError, InvalidValueError
from ..config import Cluster, GPTConfig, brief, html_table, one_of, whole
from .answer import Answer
from .arguments import flag, integer
from .dawnpiper import DawnPiperPlan, compute_balanced, dawnpiper, dawnpiper_binary, memory_balanced
from .nodes import Nodes

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["MaxBatch", "max_batch"]

Planner = Callable[..., DawnPiperPlan]


@dataclass(frozen=True, eq=False)
class MaxBatch(Answer):
    """The largest micro-batch, and its plan; ``int(result)`` is the batch."""

    batch: int
    """Samples of a micro-batch; batch + 1 does not fit (or is above ``most``)."""
    plan: DawnPiperPlan | Plan
    planner: str
    tried: int
    """Micro-batches planned."""

    @property
    def samples_per_s(self) -> float:
        """Throughput: samples of a step over its time (pipedream: of a period)."""
        if isinstance(self.plan, DawnPiperPlan):
            micros = 1 if self.plan.schedule == "pipedream" else self.plan.micro_batches
        else:
            micros = len(self.plan.slicing) * self.plan.data_parallel
        return self.batch * micros / self.plan.step_time_s if self.plan.step_time_s > 0.0 else float("inf")

    def __int__(self) -> int:
        return self.batch

    __index__ = __int__

    def __repr__(self) -> str:
        return f"MaxBatch({self.batch}, {self.planner}, {self.samples_per_s:.4g} samples/s, {self.plan!r})"

    def _repr_html_(self) -> str:
        return html_table(f"The largest micro-batch: {self.batch}", [
            ("planner", self.planner), ("throughput", f"{self.samples_per_s:.4g} samples/s"), ("tried", f"{self.tried}"),
        ]) + self.plan._repr_html_()  # fmt: skip


def _uniform(nodes: Nodes, stages: int) -> list[int]:
    """Boundaries of an even division; nodes of one block stay together where there are at least as many blocks as stages
    (Megatron)."""
    if not 1 <= stages <= len(nodes):
        raise InvalidValueError(f"stages is {stages}: 1 to {len(nodes)}, one a node, would be right")
    edges = [0, *(k for k in range(1, len(nodes)) if not nodes.blocks or nodes.blocks[k] != nodes.blocks[k - 1]), len(nodes)]
    if len(edges) - 1 < stages:
        edges = list(range(len(nodes) + 1))
    parts = len(edges) - 1
    return [edges[k * parts // stages] for k in range(stages + 1)]


_FIXED: dict[str, Callable[[Nodes, int, int | None, str], list[int]]] = {
    "uniform": lambda nodes, stages, micros, schedule: _uniform(nodes, stages),
    "compute": lambda nodes, stages, micros, schedule: compute_balanced(nodes, stages),
    "memory": memory_balanced,
}
_NAMES = ("dawnpiper", "dawnpiper_binary", *_FIXED)


def _planner(planner: str | Planner, optimise: bool | None) -> tuple[str, Callable[..., DawnPiperPlan]]:
    if callable(planner):
        given = {} if optimise is None else {"optimise_memory": optimise}
        return getattr(planner, "__name__", "planner"), partial(planner, **given)
    planner = one_of("planner", planner, _NAMES)
    if planner == "dawnpiper":
        return planner, lambda *a, **k: dawnpiper(*a, **k, optimise_memory=optimise is not False)
    if planner == "dawnpiper_binary":
        return planner, lambda *a, **k: dawnpiper_binary(*a, **k, optimise_memory=optimise is not False)

    def fixed(nodes: Nodes, stages: int, memory: float, micros: int | None, schedule: str, *a: Any, **k: Any) -> DawnPiperPlan:
        cuts = _FIXED[planner](nodes, stages, micros, schedule)
        return dawnpiper(nodes, stages, memory, micros, schedule, *a, **k, boundaries=cuts, optimise_memory=bool(optimise))

    return planner, fixed


def _at_batch(model: Any, **arguments: Any) -> Callable[[int], Nodes]:
    """A function from a micro-batch's size to its nodes: a model's times are the cost model's at that size, those of given nodes
    are scaled."""
    if isinstance(model, GPTConfig):
        return lambda batch: model.nodes(micro_batch=batch, **arguments)
    if not isinstance(model, Nodes | Mapping):
        raise InvalidTypeError(f"model is {type(model).__name__}: a GPTConfig, Nodes, or a dict of arrays would be right")
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise InvalidValueError(f"{given[0]} is for a GPTConfig: nodes have their costs already, so that none would be right")
    nodes = Nodes.of(model)
    if nodes.working_bytes is None:  # recomputed or swapped-in activations are whole in memory for a while
        nodes = replace(nodes, working_bytes=nodes.activation_bytes)
    return lambda batch: nodes.scaled(float(batch))


def _plans_at(model: Any, stages: int, memory_bytes: float, micro_batches: int | None, schedule: str, planner: Any, costs: Any,
              seq_len: int | None, cluster: Any, data_parallel: Any, shard_optimizer: Any,
              others: Mapping[str, Any]) -> tuple[Callable[[int], Plan], int]:
    """(A function from a micro-batch's size to ``tp.plan``'s plan for the engine, the largest size that tp.plan takes.)"""
    from ..planning.entrance import made
    from ..planning.request import check_request, most_batch

    if not isinstance(model, GPTConfig) or not isinstance(cluster, Cluster):
        raise InvalidTypeError("executable is True: a GPTConfig as model and its cluster, for tp.plan, would be right")
    for name, value in others.items():
        if value is not None:
            raise InvalidValueError(f"{name} is {value!r} and executable True: tp.plan's planners choose what to recompute "
                                    "and take links and swaps from the cluster; without it would be right")
    stages = whole("stages", stages)
    micros = stages if micro_batches is None else whole("micro_batches", integer(micro_batches, "micro_batches"), 1, 65536)
    replicas = 1 if data_parallel is None else whole("data_parallel", data_parallel)
    length = model.block_size if seq_len is None else seq_len

    def plan_at(batch: int) -> Plan:
        start = time.perf_counter()
        request = check_request(model, cluster, batch * micros * replicas, length, costs, planner=planner, schedule=schedule,
                                stages=stages, memory_bytes=memory_bytes, slicing=[(batch, [length])] * micros,
                                executable=replicas == 1, data_parallel=data_parallel, tensor_parallel=None, chunks=None,
                                granularity=None, partition=None, time_limit_s=None, shard_optimizer=shard_optimizer)  # fmt: skip
        plan = made(request, False, start)
        if plan.why_not_at_all:             # of replicas tp.plan takes no executable=True: theirs are not the bits of one device
            raise InvalidValueError(plan.why_not_at_all)
        return plan

    return plan_at, max(1, most_batch(cluster) // (micros * replicas))


def _largest(fit: Callable[[int], Any], most: int) -> tuple[int, Any, int]:
    """(largest size that fits, its plan, number of sizes tried), by doubling and then bisection; InfeasibleError where 1 does not
    fit."""
    low, found, high, tried = 1, fit(1), 2, 1  # low fits; high is untried, then known not to

    def tried_at(batch: int) -> Any:
        try:
            return fit(batch)
        except InfeasibleError:
            return None

    while high <= most:
        plan, tried = tried_at(high), tried + 1
        if plan is None:
            break
        low, high, found = high, 2 * high, plan
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        plan, tried = tried_at(middle), tried + 1
        if plan is None:
            high = middle
        else:
            low, found = middle, plan
    return low, found, tried


def max_batch(model: GPTConfig | Nodes | Mapping[str, Any], stages: int, memory_bytes: float, micro_batches: int | None = None,
              schedule: str = "1f1b", swap_bandwidth_Bps: float = 0.0, *, planner: str | Planner = "dawnpiper",
              optimise_memory: bool | None = None, mode: str = "physical", link_bandwidth_Bps: float | None = None,
              most: int = 1 << 20, costs: Any = None, seq_len: int | None = None, cluster: Any = None,
              executable: bool = False, data_parallel: int | None = None,
              shard_optimizer: bool | None = None) -> MaxBatch:  # fmt: skip
    """The largest micro-batch that a planner fits into ``memory_bytes`` a stage, by doubling and then bisection.

    Bytes are those of the nodes, each of which may be recomputed or swapped alone: DawnPiper's account, which its tables compare.
    This engine recomputes a layer's attention and FFN as wholes and has buffers besides, so far fewer samples may fit in it (124M
    on 4 stages of 4 GiB, 8 micro-batches: 11 instead of 75); ``executable=True`` counts by the engine.

    Args:
        model: a GPTConfig (with costs, seq_len, cluster as in its ``nodes``), or nodes of a micro-batch of ONE sample, whose
            times, activations, cuts and working room grow in proportion. Where everything may be recomputed the working room
            limits the size; nodes without working_bytes get their activation_bytes as working room.
        stages, memory_bytes, micro_batches, schedule, swap_bandwidth_Bps, mode, link_bandwidth_Bps: as of ``dawnpiper``.
        planner: "dawnpiper" (exact), "dawnpiper_binary", or a fixed partition: "uniform" (equal numbers of blocks),
            "compute" (equal times), "memory" (DawnPiper's Alg. 2); or a function with dawnpiper's arguments, of which the
            nodes come first.
        optimise_memory: may it recompute and swap? None: the first two do, the fixed ones do not, a function is not told.
        most: stop there.
        executable: True: what ``tp.plan`` fits for this engine, to the byte. ``planner`` is then one of its names and
            ``schedule`` of its schedules; a GPTConfig with its cluster (links and swaps are the cluster's); whole sequences;
            ``result.plan`` is a tp.Plan, ready for ``launch``. Measured costs end it where they end, and so does
            tp.plan's limit of 65536 sequences a step for each device (2^31 - 1 in all).
        data_parallel, shard_optimizer: with executable=True, as of ``tp.plan``: replicas, each of ``micro_batches`` such, and
            whether they share AdamW's moments, which leaves room for larger ones; ``launch(..., reproducible=False)`` runs
            several. None: one replica, False.

    tp.InfeasibleError if not even one sample fits. A planner that is not exact may fit b + 1 where it fails at b: the
    answer is then some b that fits with b + 1 that does not.
    """
    optimise = None if optimise_memory is None else flag(optimise_memory, "optimise_memory")
    limit, stages = whole("most", most), integer(stages, "stages")
    if flag(executable, "executable"):
        from ..planning.entrance import tell_of_costs

        others = {"optimise_memory": optimise, "swap_bandwidth_Bps": swap_bandwidth_Bps or None,
                  "mode": None if mode == "physical" else mode, "link_bandwidth_Bps": link_bandwidth_Bps}  # fmt: skip
        plan_at, large = _plans_at(model, stages, memory_bytes, micro_batches, schedule, planner, costs, seq_len, cluster,
                                   data_parallel, shard_optimizer, others)
        batch, plan, tried = _largest(plan_at, min(limit, large, getattr(costs, "known_batch", limit)))
        tell_of_costs(plan.cluster, plan.seq_len, costs)    # once, not of each batch
        return MaxBatch(batch, plan, plan.planner, tried)
    for given, value in (("data_parallel", data_parallel), ("shard_optimizer", shard_optimizer)):
        if value is not None:
            raise InvalidValueError(f"{given} is {brief(value)} and executable False: nodes' bytes are of one replica, so "
                                    "executable=True, with a GPTConfig and its cluster, would be right, or no such argument")
    name, plan_of = _planner(planner, optimise)
    nodes_at = _at_batch(model, costs=costs, seq_len=seq_len, cluster=cluster)

    def fit(batch: int) -> DawnPiperPlan:
        return plan_of(nodes_at(batch), stages, memory_bytes, micro_batches, schedule, swap_bandwidth_Bps, mode=mode,
                       link_bandwidth_Bps=link_bandwidth_Bps)  # fmt: skip

    batch, found, tried = _largest(fit, limit)
    return MaxBatch(batch, found, name, tried)
