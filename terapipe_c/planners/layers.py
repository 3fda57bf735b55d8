"""Layer graphs with data- and tensor-parallel variants (Piper's input): read, checked, planned. Seconds and bytes.

``piper`` is the published dynamic programme; ``parallel_layers`` solves the same problem exactly, and fast. Both minimise the
time per sample: the largest stage time per micro-batch (csrc/plan/layer_graph.h has the formulas).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from .._files import loads, path_of, read_bytes
from ..config import brief, counted, html_table, human_seconds
from .answer import Answer
from .arguments import FloatArray, array, flag, integer, number

__all__ = ["LayerEdge", "LayerGraph", "LayerNode", "LayerPlan", "LayerStage", "LayerVariant", "layer_graph", "load_piper",
           "parallel_layers", "piper"]  # fmt: skip


@dataclass(frozen=True)
class LayerVariant:
    """One way to run a node on the devices of one replica ("TMPC" in the paper)."""

    name: str
    time_s: float
    """Forward and backward of one micro-batch."""
    param_bytes: float = 0.0
    """What replicas exchange once a batch, per device."""
    memory_a: float = 0.0
    """Bytes per micro-batch in flight, per device."""
    memory_b: float = 0.0
    """Bytes that do not depend on micro-batches, per device."""
    sync_bytes: Mapping[int, float] = field(default_factory=dict)
    """By neighbour's id: bytes added to the edge from or to it where that neighbour is in another stage."""


@dataclass(frozen=True)
class LayerNode:
    """A layer and its variants."""

    id: int
    variants: Mapping[int, Sequence[LayerVariant]]
    """By tensor degree: devices a replica."""
    name: str = ""


@dataclass(frozen=True)
class LayerEdge:
    """Bytes a micro-batch that one node sends to another, by their ids."""

    source: int
    target: int
    bytes: float = 0.0


@dataclass(frozen=True)
class LayerGraph:
    """Piper's input: nodes, edges, devices, memory of a device, bandwidth between devices, micro-batches a batch."""

    nodes: Sequence[LayerNode]
    edges: Sequence[LayerEdge]
    devices: int
    memory_bytes: float
    bandwidth_Bps: float
    micro_batches: int

    def __repr__(self) -> str:
        return (
            f"LayerGraph({len(self.nodes)} nodes, {len(self.edges)} edges, {self.devices} devices of "
            f"{self.memory_bytes / 1e9:.3g} GB, {self.micro_batches} micro-batches)"
        )

    @cached_property
    def _packed(self) -> _Packed:
        return _pack(self)


@dataclass(frozen=True, eq=False)
class LayerStage(Answer):
    """The nodes of one stage, their variants, and the devices that they run on."""

    nodes: list[int]
    """Ids, in the graph's order."""
    data: int
    """Replicas."""
    tensor: int
    """Devices a replica."""
    variants: list[str]
    """The chosen variant of each node."""
    time_s: float
    """Seconds per micro-batch, messages and the exchange of weights included."""
    memory_bytes: float
    """Bytes needed on each device."""

    @property
    def devices(self) -> int:
        return self.data * self.tensor


@dataclass(frozen=True, eq=False)
class LayerPlan(Answer):
    """Stages in order, their time per sample, and what is proven about it."""

    stages: list[LayerStage]
    time_per_sample_s: float
    """The largest stage time: seconds between two micro-batches in the steady state."""
    lower_bound_s: float
    """No plan has a smaller time per sample. 0 where the planner proves nothing (``piper``)."""
    optimal: bool
    """Proven least time per sample."""
    micro_batches: int
    downsets: int
    """Sets of nodes that are closed under successors: where a stage may begin."""
    pairs: int
    """Sets of nodes that may be a stage."""
    searches: int
    """Thresholds that ``parallel_layers`` tried, or tables that ``piper`` filled."""
    knapsacks: int
    """Problems of choosing variants that were solved."""
    planning_time_s: float

    @property
    def devices(self) -> int:
        """Devices used."""
        return sum(stage.devices for stage in self.stages)

    @cached_property
    def step_time_s(self) -> float:
        """One batch through these stages in 1F1B order, to the bit what ``Program.simulate`` says. The input has one time for
        forward and backward: a third of it is taken as forward (a matrix product has two in backward). For 2^20 micro-batches at
        most."""
        times = np.array([stage.time_s for stage in self.stages])
        unit = 2.0**64 if times.max() > 1e280 else 1.0         # a power of two: the same bits
        return unit * _core.sliced_f1b(times / unit / 3, times / unit * 2 / 3, self.micro_batches, 0)

    @property
    def _size(self) -> str:
        return f"{counted(len(self.stages), 'stage')} on {counted(self.devices, 'device')}"

    @property
    def _sample(self) -> str:
        bound = f"bound {human_seconds(self.lower_bound_s)}" if self.lower_bound_s else "heuristic"
        return f"{human_seconds(self.time_per_sample_s)} a sample, {'optimal' if self.optimal else bound}"

    def __repr__(self) -> str:
        shape = ", ".join(f"{counted(len(s.nodes), 'node')} {s.data}x{s.tensor}" for s in self.stages[:6])
        more = f", {len(self.stages) - 6} more" if len(self.stages) > 6 else ""
        return f"LayerPlan({self._size}: {shape}{more}; {self._sample}, planned in {human_seconds(self.planning_time_s)})"

    def _repr_html_(self) -> str:
        rows = [(f"stage {k}", f"{counted(len(s.nodes), 'node')} on {s.data} x {s.tensor} devices, {human_seconds(s.time_s)}")
                for k, s in enumerate(self.stages)]  # fmt: skip
        return html_table(self._size, [("time", self._sample), *rows, ("planned in", human_seconds(self.planning_time_s))])


_Packed = tuple[tuple[Any, ...], list[LayerVariant]]
_MOST = 1e300  # the core's (csrc/plan/layer_space.c): sums of a graph stay finite


def _number(value: Any, what: str, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _core.InvalidTypeError(f"{what} is {brief(value)}: a number would be right")
    value = value.item() if isinstance(value, np.generic) else value     # float32 does not hold the limit
    if not max(least, -_MOST) <= value <= _MOST:
        raise _core.InvalidValueError(f"{what} is {brief(value)}: a finite number of at least {least:g} and at most {_MOST:g} "
                                      "is needed")
    return float(value)


def _is(value: Any, kind: type, what: str, right: str, node: LayerNode | None = None, *where: Any) -> None:
    """Check the value's kind. what: how its message calls it, a format of ``where`` if it is of a node."""
    if not isinstance(value, kind) or isinstance(value, (str, bytes)):
        called = what if node is None else f"{_called(node)}: {what.format(*where)}"
        raise _core.InvalidTypeError(f"{called} is {brief(value)}: {right} would be right")


def _is_id(value: Any, what: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise _core.InvalidTypeError(f"{what} is {brief(value)}: an integer would be right") from None


def _called(node: LayerNode) -> str:
    return f"node {node.id}" + (f" ({node.name!r})" if node.name else "")


def _of_variant(node: LayerNode, degree: int, variant: LayerVariant) -> str:
    return f"{_called(node)}, {degree} devices, variant {variant.name!r}"


def _numbers(
    values: Sequence[Any], names: Sequence[str], node: LayerNode, degree: int, variant: LayerVariant
) -> Sequence[float]:
    """A variant's numbers: as they are where all are plain numbers, else each checked under its own name."""
    if all(type(value) is float and 0.0 <= value <= _MOST for value in values):
        return values
    return [_number(value, f"{_of_variant(node, degree, variant)}: {name}") for value, name in zip(values, names, strict=True)]


def _check_edges(graph: LayerGraph, index: dict[int, int]) -> list[list[int]]:
    """For each node the other ends of its edges, in edge order."""
    seen: set[tuple[int, int]] = set()
    others: list[list[int]] = [[] for _ in graph.nodes]
    for k, edge in enumerate(graph.edges):
        if type(edge) is not LayerEdge or type(edge.source) is not int or type(edge.target) is not int:
            _is(edge, LayerEdge, f"edges[{k}]", "a LayerEdge")
            _is_id(edge.source, f"edges[{k}].source")
            _is_id(edge.target, f"edges[{k}].target")
        for end in (edge.source, edge.target):
            if end not in index:
                raise _core.InvalidValueError(f"edge {k} ({edge.source} to {edge.target}) ends at {end!r}, which is no node")
        if edge.source == edge.target:
            raise _core.InvalidValueError(f"the graph has a cycle: node {edge.source} has an edge to itself (edge {k})")
        if (edge.source, edge.target) in seen:
            raise _core.InvalidValueError(f"edge {k} ({edge.source} to {edge.target}) is there twice")
        seen.add((edge.source, edge.target))
        if type(edge.bytes) is not float or not 0.0 <= edge.bytes <= _MOST:
            _number(edge.bytes, f"the size of edge {k} ({edge.source} to {edge.target})")
        others[index[edge.source]].append(edge.target)
        others[index[edge.target]].append(edge.source)
    source, target = (np.array([index[getattr(e, end)] for e in graph.edges], np.int32) for end in ("source", "target"))
    order, is_cycle = _core.graph_order(source, target, np.zeros(len(graph.edges)), np.zeros(len(graph.nodes)))
    if is_cycle:
        nodes = [_called(graph.nodes[k]) for k in (*order, order[0])]
        raise _core.InvalidValueError(f"the graph has a cycle: {' -> '.join(nodes)}")
    return others


def _check_ways(node: LayerNode) -> None:
    """Check that a node's variants are lists of variants by tensor degree, before any is read. Most are the very types, which is
    quickly seen; there may be thousands."""
    _is(node.variants, Mapping, "variants", "a dict of lists of LayerVariants, by tensor degree,", node)
    for degree, ways in node.variants.items():
        if type(degree) is not int or not 1 <= degree < 2**31:
            if integer(degree, f"{_called(node)}: a tensor degree") < 1:
                raise _core.InvalidValueError(f"{_called(node)} has tensor degree {degree}: at least 1 is needed")
        _is(ways, Sequence, "variants[{}]", "a list of LayerVariants", node, degree)
        for k, way in enumerate(ways):
            if type(way) is not LayerVariant:
                _is(way, LayerVariant, "variants[{}][{}]", "a LayerVariant", node, degree, k)
            if type(way.sync_bytes) is not dict:
                _is(way.sync_bytes, Mapping, "variants[{}][{}].sync_bytes", "a dict of bytes, by a neighbour's id,", node,
                    degree, k)
    if not any(node.variants.values()):
        raise _core.InvalidValueError(f"{_called(node)} has no variant: at least one is needed")


def _pack(graph: LayerGraph) -> _Packed:
    _is(graph.nodes, Sequence, "nodes", "a list of LayerNodes")
    _is(graph.edges, Sequence, "edges", "a list of LayerEdges")
    if not graph.nodes:
        raise _core.InvalidValueError("the graph has no nodes: at least one is needed")
    index: dict[int, int] = {}
    for k, node in enumerate(graph.nodes):
        if type(node) is not LayerNode or type(node.id) is not int:
            _is(node, LayerNode, f"nodes[{k}]", "a LayerNode")
            _is_id(node.id, f"nodes[{k}].id")
        if node.id in index:
            raise _core.InvalidValueError(f"{_called(node)} is there twice: ids must differ")
        index[node.id] = len(index)
    others = _check_edges(graph, index)
    rows: list[tuple[int, int, float, float, float, float]] = []
    sync: list[float] = []
    variants: list[LayerVariant] = []
    for node in graph.nodes:
        _check_ways(node)
        for degree in sorted(node.variants):
            for variant in node.variants[degree]:
                given = variant.time_s, variant.param_bytes, variant.memory_a, variant.memory_b
                time_s, params, a, b = _numbers(given, ("time_s", "param_bytes", "memory_a", "memory_b"), node, degree, variant)
                rows.append((index[node.id], int(degree), time_s, params, a, b))
                around = others[index[node.id]]
                for other in variant.sync_bytes:
                    if other not in around:
                        raise _core.InvalidValueError(f"{_of_variant(node, degree, variant)}: sync_bytes names {other!r}, which no "
                                                      "edge joins to it")
                if variant.sync_bytes:
                    sync += _numbers([variant.sync_bytes.get(other, 0.0) for other in around],
                                     [f"sync_bytes[{other}]" for other in around], node, degree, variant)  # fmt: skip
                else:
                    sync += [0.0] * len(around)
                variants.append(variant)
    columns = list(zip(*rows, strict=True))
    ends = [np.array([index[getattr(e, end)] for e in graph.edges], np.int32) for end in ("source", "target")]
    arrays = (
        *ends,
        np.array([float(edge.bytes) for edge in graph.edges], np.float64),
        np.array(columns[0], np.int32),
        np.array(columns[1], np.int32),
        *(np.array(column, np.float64) for column in columns[2:]),
        np.array(sync, np.float64),
    )
    return arrays, variants


def _plan(graph: LayerGraph, published: bool, exhaustive: bool = False) -> LayerPlan:
    if not isinstance(graph, LayerGraph):
        raise _core.InvalidTypeError(
            f"graph is {type(graph).__name__}: a LayerGraph (load_piper(path) or layer_graph(...)) would be right"
        )
    arrays, variants = graph._packed
    found = _core.plan_layers(
        len(graph.nodes),
        integer(graph.devices, "devices"),
        integer(graph.micro_batches, "micro_batches"),
        number(graph.memory_bytes, "memory_bytes"),
        number(graph.bandwidth_Bps, "bandwidth_Bps"),
        arrays,
        published,
        exhaustive,
    )
    rows, stage_of, chosen, time_s, bound_s, optimal, downsets, pairs, searches, knapsacks, seconds = found
    members: list[list[int]] = [[] for _ in rows]
    for node, stage in enumerate(stage_of):
        members[stage].append(node)
    stages = [
        LayerStage([graph.nodes[n].id for n in nodes], data, tensor, [variants[chosen[n]].name for n in nodes], seconds_, size)
        for nodes, (data, tensor, seconds_, size) in zip(members, rows, strict=True)
    ]
    return LayerPlan(
        stages, time_s, bound_s, optimal, graph.micro_batches, downsets, pairs, searches, knapsacks, seconds
    )


def piper(graph: LayerGraph, *, exhaustive: bool = False) -> LayerPlan:
    """Piper's dynamic programme as published (NeurIPS 2021, section 4): over downsets, devices and sums of replicas, with the
    authors' knapsack heuristic for the variants. Its memory grows with downsets x devices^2 x 18 bytes at most.

    graph: from :func:`load_piper`, :func:`layer_graph` or made by hand; seconds of a micro-batch, bytes. exhaustive: solve all
    possible stages, as the authors' programme does; otherwise stages that the best plan cannot have, by the time that
    ``parallel_layers`` finds, are skipped, and equal stages solved once: the same plan, sooner on all but the smallest graphs.
    InvalidValueError or InvalidTypeError name the node, variant or edge; InfeasibleError the bytes that are short."""
    return _plan(graph, True, flag(exhaustive, "exhaustive"))


def parallel_layers(graph: LayerGraph) -> LayerPlan:
    """The least time per sample over the same plans as ``piper``, proven, in a fraction of its time: bisection on the time per
    sample over Pareto fronts of (replicas, devices), variants chosen exactly. Argument and errors as there."""
    return _plan(graph, False)


def _chain_memory(memory: Mapping[str, Any] | None) -> dict[str, Any]:
    known = ("limit_bytes", "static_bytes", "activation_bytes", "recompute_s", "in_flight")
    if memory is None:
        return {}
    if not isinstance(memory, Mapping):
        raise _core.InvalidTypeError(f"memory is {type(memory).__name__}: a dict of {', '.join(known)} would be right")
    if unknown := [key for key in memory if key not in known]:
        raise _core.InvalidValueError(f"memory has {unknown[0]!r}: {', '.join(known)} would be right")
    return dict(memory)


def layer_graph(
    fwd: FloatArray | Sequence[float],
    bwd: FloatArray | Sequence[float],
    devices: int,
    micro_batches: int,
    comm_s: float = 0.0,
    memory: Mapping[str, Any] | None = None,
    *,
    param_bytes: FloatArray | Sequence[float] | None = None,
    bandwidth_Bps: float = 25e9,
) -> LayerGraph:
    """The other planners' chain of blocks as a layer graph: one device a replica, variant "keep", and with
    ``memory["recompute_s"]`` variant "recompute", which keeps nothing per micro-batch. A message's comm_s becomes bytes at the
    bandwidth (Piper counts a cut twice each way). memory["in_flight"]: every stage holds so many micro-batches, in an order that is
    not 1F1B's.

    fwd, bwd: [n] seconds of each block and micro-batch; devices: at most so many are used; micro_batches: of a step;
    param_bytes: [n] that replicas exchange, at bandwidth_Bps bytes a second; memory: limit_bytes of a device, and [n]
    static_bytes, activation_bytes (of each micro-batch in flight), recompute_s. InvalidValueError or InvalidTypeError name the
    argument, its index and value."""
    forward, backward = array(fwd, "fwd"), array(bwd, "bwd")
    n = len(forward)
    if len(backward) != n:
        raise _core.InvalidValueError(f"bwd has {len(backward)} values for the {n} of fwd: as many would be right")
    limits = _chain_memory(memory)
    most = number(limits.get("limit_bytes", _MOST), "limit_bytes")
    if not most > 0.0:
        raise _core.InvalidValueError(f"limit_bytes is {most:g}: more than 0 is needed")
    comm, speed = _number(number(comm_s, "comm_s", "seconds"), "comm_s"), number(bandwidth_Bps, "bandwidth_Bps")
    if not 0.0 < speed <= _MOST:  # else the edges, which the caller did not give, would be what is refused
        raise _core.InvalidValueError(f"bandwidth_Bps is {speed:g}: more than 0, and at most {_MOST:g}, is needed")
    zeros, size = np.zeros(n), _number(comm * speed, "comm_s * bandwidth_Bps")
    weights = zeros if param_bytes is None else array(param_bytes, "param_bytes")
    static, kept = (
        zeros if limits.get(key) is None else array(limits[key], key) for key in ("static_bytes", "activation_bytes")
    )
    again = None if limits.get("recompute_s") is None else array(limits["recompute_s"], "recompute_s")
    columns = {"fwd": forward, "bwd": backward, "param_bytes": weights, "static_bytes": static, "activation_bytes": kept,
               "recompute_s": again}  # fmt: skip
    for name, values in columns.items():
        if values is not None and values.shape != (n,):
            raise _core.InvalidValueError(f"{name} has shape {list(values.shape)}: one value for each of {n} blocks, [{n}], "
                                          "would be right")
        if values is not None and not (np.isfinite(values) & (values >= 0)).all():
            at = int(np.argmin(np.isfinite(values) & (values >= 0)))
            raise _core.InvalidValueError(f"{name}[{at}] is {values[at]}: a finite number of 0 or more is needed")
    micros, places = integer(micro_batches, "micro_batches"), integer(devices, "devices")
    for name, count in (("micro_batches", micros), ("devices", places)):
        if count < 1:
            raise _core.InvalidValueError(f"{name} is {count}: at least 1 is needed")
    held = None if limits.get("in_flight") is None else integer(limits["in_flight"], "in_flight")
    if held is not None and not 1 <= held <= micros:
        raise _core.InvalidValueError(f"in_flight is {held}: 1 to {micros}, micro_batches, are possible")
    always = np.zeros(n) if held is None else held * kept
    nodes, each = [], kept.tolist() if held is None else [0.0] * n
    times, weighs, fixed, all_held = ((forward + backward).tolist(), weights.tolist(), static.tolist(), (static + always).tolist())
    more = None if again is None else again.tolist()
    for i in range(n):
        ways = [LayerVariant("keep", times[i], weighs[i], each[i], all_held[i])]
        if more is not None:
            ways.append(LayerVariant("recompute", times[i] + more[i], weighs[i], 0.0, fixed[i]))
        nodes.append(LayerNode(i, {1: ways}))
    edges = [LayerEdge(i, i + 1, size) for i in range(n - 1)]
    return LayerGraph(nodes, edges, places, min(most, _MOST), speed, micros)


# ---- Piper's file -----------------------------------------------------------------------------------------------------------


def _field(record: Any, key: str, what: str) -> Any:
    if not isinstance(record, dict):
        raise _core.InvalidTypeError(f"{what} is {type(record).__name__}: an object would be right")
    if key not in record:
        raise _core.InvalidValueError(f"{what} has no {key!r}: it is needed")
    return record[key]


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _core.InvalidTypeError(f"{what} is {brief(value)}: a list would be right")
    return value


def _whole(value: Any, what: str) -> int:
    number = _number(value, what, -math.inf if what.endswith(("id", "Id")) else 1)
    if number != int(number):
        raise _core.InvalidValueError(f"{what} is {brief(value)}: an integer would be right")
    return value if isinstance(value, int) else int(number)    # a double does not hold every number of 64 bits


def _key(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _core.InvalidValueError(f"{what} {text!r} is no integer") from None


def _read_variant(record: Any, what: str, into: set[int], out: set[int]) -> LayerVariant:
    what = f"{what} ({record['id']!r})" if isinstance(record, dict) and "id" in record else what
    sync: dict[int, float] = {}
    for field_name, ends in (("syncTimeFw", into), ("syncTimeBw", out)):
        given = _field(record, field_name, what)
        if not isinstance(given, dict):
            raise _core.InvalidTypeError(f"{what}: {field_name} is {type(given).__name__}: an object would be right")
        for text, value in given.items():
            other = _key(text, f"{what}: {field_name}'s key")
            if other not in ends:
                raise _core.InvalidValueError(f"{what}: {field_name} names node {other}, which no edge joins to it that way")
            sync[other] = _number(value, f"{what}: {field_name}[{other}]")
        for other in ends - sync.keys():
            raise _core.InvalidValueError(f"{what}: {field_name} lacks node {other}, which an edge joins to it")
    values = [
        _number(_field(record, key, what), f"{what}: {key}")
        for key in ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB")
    ]
    return LayerVariant(str(_field(record, "id", what)), values[0], values[1], values[2], values[3], sync)


def _read_edges(records: Any, ids: set[int], where: str) -> list[LayerEdge]:
    edges = []
    for k, record in enumerate(records):
        what = f"{where}: edges[{k}]"
        ends = [_whole(_field(record, key, what), f"{what}: {key}") for key in ("sourceId", "destId")]
        for end in ends:
            if end not in ids:
                raise _core.InvalidValueError(f"{what} ends at node {end}, which is not in nodes")
        edges.append(LayerEdge(ends[0], ends[1], _number(_field(record, "communicationCost", what), f"{what}: communicationCost")))
    return edges


def load_piper(path: str | Path) -> LayerGraph:
    """A LayerGraph from a JSON file in the format of Piper's repository (msr-fiddle/piper, README): maxDevices,
    maxMemoryPerDevice, bandwidth, maxBatchSize (mbsInBatch in the files themselves), nodes with TMPCs, edges.

    StorageError if it cannot be read; ValueError or TypeError naming the line, node, variant or edge that is wrong."""
    try:
        raw = read_bytes(path_of("path", path))
    except OSError as error:
        refusal = _core.StorageError(f"{path}: {error.strerror or error}")
        refusal.errno = error.errno
        raise refusal from None
    try:
        record = loads(raw)
    except json.JSONDecodeError as error:
        raise _core.InvalidValueError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:
        raise _core.InvalidValueError(f"{path} is no JSON: {error}") from None
    where = str(path)
    devices = integer(_whole(_field(record, "maxDevices", where), f"{where}: maxDevices"), f"{where}: maxDevices")
    batch = "maxBatchSize" if "maxBatchSize" in record else "mbsInBatch"
    micro_batches = integer(_whole(_field(record, batch, where), f"{where}: {batch}"), f"{where}: {batch}")
    limits = [_number(_field(record, key, where), f"{where}: {key}", 1e-9) for key in ("maxMemoryPerDevice", "bandwidth")]
    ids: list[int] = []
    for k, node in enumerate(_list(_field(record, "nodes", where), f"{where}: nodes")):
        ids.append(_whole(_field(node, "id", f"{where}: nodes[{k}]"), f"{where}: nodes[{k}]: id"))
    edges = _read_edges(_list(_field(record, "edges", where), f"{where}: edges"), set(ids), where)
    into: dict[int, set[int]] = {i: set() for i in ids}
    out: dict[int, set[int]] = {i: set() for i in ids}
    for edge in edges:
        into[edge.target].add(edge.source)
        out[edge.source].add(edge.target)
    nodes = []
    for place, node in zip(ids, record["nodes"], strict=True):
        what = f"{where}: node {place}" + (f" ({node['name']!r})" if node.get("name") else "")
        ways = _field(node, "TMPCs", what)
        if not isinstance(ways, dict):
            raise _core.InvalidTypeError(f"{what}: TMPCs is {brief(ways)}: an object, by tensor degree, would be right")
        variants = {
            _key(degree, f"{what}: the tensor degree"): [
                _read_variant(way, f"{what}, TMPCs[{degree!r}][{k}]", into[place], out[place])
                for k, way in enumerate(_list(rows, f"{what}: TMPCs[{degree!r}]"))
            ]
            for degree, rows in ways.items()
        }
        nodes.append(LayerNode(place, variants, str(node.get("name", ""))))
    graph = LayerGraph(nodes, edges, devices, limits[0], limits[1], micro_batches)
    try:
        graph._packed  # noqa: B018  checked here, where the file's name is known
    except _core.InvalidValueError as error:
        raise _core.InvalidValueError(f"{where}: {error}") from None
    return graph
