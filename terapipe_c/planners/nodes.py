"""A model as a chain of nodes, which the DawnPiper planners cut: made from arrays, from a graph with edges, or from JSON."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import _core
from .._core import InvalidTypeError, InvalidValueError
from .._files import loads, path_of, read_bytes, write_json
from ..config import brief
from .arguments import FloatArray, array, integer, listed, number

__all__ = ["Nodes", "load_nodes"]

NEEDED = ("fwd_s", "bwd_s", "recompute_s", "activation_bytes", "param_bytes", "optimizer_bytes")
OPTIONAL = ("cut_bytes", "cut_tensors", "working_bytes")
_FORMAT, _VERSION = "terapipe_c.nodes", 1
_PER_SAMPLE = ("fwd_s", "bwd_s", "recompute_s", "activation_bytes", "cut_bytes", "working_bytes")

Edge = tuple[int, int, float]


def _cut_of(nodes: int, edges: Sequence[Edge]) -> tuple[FloatArray, FloatArray]:
    """(cut_bytes, cut_tensors) of each boundary. An edge without bytes, beside others of its source that have some, only orders its
    ends: it keeps no tensor alive."""
    sending = {source for source, _, size in edges if size > 0}
    source, target, size = _edge_arrays([edge for edge in edges if edge[2] > 0 or edge[0] not in sending])
    return _core.graph_cuts(nodes, source, target, size)


def _edge_arrays(edges: Sequence[Edge]) -> tuple[Any, Any, FloatArray]:
    return (np.array([e[0] for e in edges], np.int32), np.array([e[1] for e in edges], np.int32),
            np.array([e[2] for e in edges], np.float64))  # fmt: skip


def remake_seconds(forward: FloatArray, kept: FloatArray, edges: Sequence[Edge]) -> FloatArray:
    """Seconds to recompute what each node keeps: its forward, and the forwards of its sources that keep nothing, back to those that
    keep something."""
    sources: list[list[int]] = [[] for _ in forward]
    for source, target, _ in edges:
        sources[target].append(source)
    made = np.array(forward, dtype=np.float64)
    for node in range(len(made)):
        seen, open_ = {node}, [node]
        while kept[node] > 0 and open_:
            for source in sources[open_.pop()]:
                if source not in seen and not kept[source] > 0:
                    seen.add(source)
                    open_.append(source)
                    made[node] += forward[source]
    return made


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes in the order in which they run; float64 [n] arrays, times and sizes of ONE micro-batch.

    ``nodes["fwd_s"]`` and ``dict(nodes)`` work, so that it stands wherever a dict of arrays does.
    """

    fwd_s: FloatArray
    """Seconds of the forward."""
    bwd_s: FloatArray
    """Seconds of the backward (both gradients)."""
    recompute_s: FloatArray
    """Seconds to recompute what the node keeps."""
    activation_bytes: FloatArray
    """Bytes that the node keeps from its forward to its backward."""
    param_bytes: FloatArray
    """Bytes of its parameters (their gradients take as many)."""
    optimizer_bytes: FloatArray
    """Bytes of optimiser state, besides parameters and gradients."""
    cut_bytes: FloatArray | None = None
    """Bytes that would cross a stage boundary after the node, one way (the gradient takes as many the other way)."""
    cut_tensors: FloatArray | None = None
    """Tensors that would cross there."""
    working_bytes: FloatArray | None = None
    """Bytes that the node needs only while it runs or is recomputed; a stage needs the largest of its nodes', once."""
    names: tuple[str, ...] = ()
    """Names, one a node, or none."""
    blocks: tuple[int, ...] = ()
    """The block of the model (``GPTConfig.blocks``) that each node belongs to (-1: none), or none of all."""
    edges: tuple[Edge, ...] = ()
    """(source, target, bytes) of the graph that the chain was made from, nodes numbered as in the chain; or none."""

    def __post_init__(self) -> None:
        for key in NEEDED + OPTIONAL:
            value = getattr(self, key)
            if value is None and key in OPTIONAL:
                continue
            made = np.array(array(value, key), dtype=np.float64)
            if made.ndim != 1:
                raise InvalidValueError(f"{key} has shape {list(made.shape)}: one number a node, [n], would be right")
            made.flags.writeable = False
            object.__setattr__(self, key, made)
        # Python's own, however they were given: as such they are compared with those of a file.
        names, blocks = (() if value is None else listed(value, key, f"{what} a node")
                         for key, value, what in (("names", self.names, "one name"), ("blocks", self.blocks, "one number")))
        object.__setattr__(self, "names", tuple(map(str, names)))
        object.__setattr__(self, "blocks", tuple(integer(block, f"blocks[{k}]") for k, block in enumerate(blocks)))
        for k, block in enumerate(self.blocks):
            if block < -1:
                raise InvalidValueError(f"blocks[{k}] is {block}: the number of a block would be right, or -1 for none")
        n = len(self.fwd_s)
        if n < 1:
            raise InvalidValueError("nodes is empty: at least 1 node is needed")
        for key in (*NEEDED, *OPTIONAL, "names", "blocks"):
            value = getattr(self, key)
            if value is not None and len(value) not in ((0, n) if key in ("names", "blocks") else (n,)):
                raise InvalidValueError(f"{key} has {len(value)} values and fwd_s {n}: one a node would be right")
        for key in NEEDED + OPTIONAL:
            value = getattr(self, key)
            if value is not None and not (value.min() >= 0.0 and value.max() < np.inf):      # false of NaN
                at = int(np.argmin(np.isfinite(value) & (value >= 0)))
                raise InvalidValueError(f"{key} of node {self.label(at)} is {value[at]}: a finite number of 0 or more is needed")

    def label(self, node: int) -> str:
        """The node's number, and its name where it has one."""
        return f"{node} ({self.names[node]})" if self.names else str(node)

    def __getitem__(self, key: str) -> FloatArray:
        value = getattr(self, key) if key in NEEDED + OPTIONAL else None
        if value is None:
            raise KeyError(key)
        found: FloatArray = value
        return found

    def keys(self) -> Iterator[str]:
        """Names of the arrays that are there."""
        return iter([key for key in NEEDED + OPTIONAL if getattr(self, key) is not None])

    def __len__(self) -> int:
        return len(self.fwd_s)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Nodes) else NotImplemented

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    @classmethod
    def of(cls, nodes: Any) -> Nodes:
        """Nodes as they are, or made from a dict of arrays; a ValueError names what is missing or unknown."""
        if isinstance(nodes, Nodes):
            return nodes
        if not isinstance(nodes, Mapping):
            raise InvalidTypeError(f"nodes is {type(nodes).__name__}: a dict of float64 [n] arrays would be right")
        for key in NEEDED:
            if key not in nodes:
                raise InvalidValueError(f"nodes lacks {key!r}: {', '.join(NEEDED)} are needed")
        known = {*NEEDED, *OPTIONAL, "names", "blocks"}
        for key in nodes:
            if key not in known:
                raise InvalidValueError(f"nodes has {key!r}: one of {', '.join(sorted(known))} would be right")
        made: dict[str, Any] = {key: nodes.get(key) for key in NEEDED + OPTIONAL}
        made |= {key: nodes[key] for key in ("names", "blocks") if nodes.get(key) is not None}
        return cls(**made)

    @classmethod
    def from_graph(cls, nodes: Mapping[str, Any], edges: Sequence[Sequence[Any]]) -> Nodes:
        """A chain from a graph: ``nodes`` as for :meth:`of` in any order, ``edges`` (source, target[, bytes]) by number or
        by name; without bytes an edge carries the source's activation_bytes.

        The order is DawnPiper's: by depth, then by the start of the forward if everything runs as early as it can, then as given
        (also where only rounding tells starts apart).
        cut_bytes and cut_tensors are what crosses each boundary; a tensor with several readers counts once, and if any of its
        edges have bytes only those readers need it. A cycle is a ValueError that names its nodes.
        """
        if not isinstance(nodes, Mapping):
            raise InvalidTypeError(f"nodes is {type(nodes).__name__}: a dict of float64 [n] arrays would be right")
        given = cls.of({key: value for key, value in nodes.items() if key not in ("cut_bytes", "cut_tensors")})
        place_of_name = {name: k for k, name in enumerate(given.names)}
        if len(place_of_name) < len(given.names):
            twice = next(name for k, name in enumerate(given.names) if place_of_name[name] != k)
            raise InvalidValueError(f"two nodes are named {twice!r}")
        links: list[Edge] = []
        for at, edge in enumerate(listed(edges, "edges", "(source, target) or (source, target, bytes) each")):
            if isinstance(edge, str) or not isinstance(edge, Sequence) or len(edge) not in (2, 3):
                raise InvalidValueError(f"edge {at} is {brief(edge)}: (source, target) or (source, target, bytes) would be right")
            ends = []
            for end in edge[:2]:
                place = place_of_name.get(end) if isinstance(end, str) else end
                if isinstance(place, bool) or not isinstance(place, int | np.integer) or not 0 <= place < len(given):
                    raise InvalidValueError(f"edge {at} names node {end!r}: there is none")
                ends.append(int(place))
            size = given.activation_bytes[ends[0]] if len(edge) == 2 else edge[2]
            if isinstance(size, np.integer | np.floating):
                size = size.item()
            if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= sys.float_info.max:
                raise InvalidValueError(f"edge {at} (node {given.label(ends[0])} to node {given.label(ends[1])}) has {size!r} "
                                        "bytes: a finite number of 0 or more is needed")
            links.append((ends[0], ends[1], float(size)))
        order, is_cycle = _core.graph_order(*_edge_arrays(links), given.fwd_s)
        if is_cycle:
            raise InvalidValueError(f"the graph has a cycle: {' -> '.join(given.label(int(k)) for k in (*order, order[0]))}")
        place_of = {int(k): p for p, k in enumerate(order)}
        links = sorted((place_of[s], place_of[t], size) for s, t, size in links)
        cuts, tensors = _cut_of(len(given), links)
        arrays = {key: given[key][order] for key in given.keys()}
        return cls(**arrays, cut_bytes=cuts, cut_tensors=tensors, edges=tuple(links),
                   names=tuple(given.names[k] for k in order) if given.names else (),
                   blocks=tuple(given.blocks[k] for k in order) if given.blocks else ())  # fmt: skip

    def scaled(self, factor: float) -> Nodes:
        """The nodes with micro-batches ``factor`` times as large: times, activations, cuts and working room grow in proportion."""
        factor = number(factor, "factor")
        grown: dict[str, Any] = {key: self[key] * factor for key in _PER_SAMPLE if getattr(self, key) is not None}
        return replace(self, **grown, edges=tuple((s, t, size * factor) for s, t, size in self.edges))

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes."""
        rows = []
        for k in range(len(self)):
            row: dict[str, Any] = {"name": self.names[k]} if self.names else {}
            row |= {"block": self.blocks[k]} if self.blocks else {}
            rows.append(row | {key: float(self[key][k]) for key in self.keys()})
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "nodes": rows}
        if self.edges:
            data["edges"] = [list(edge) for edge in self.edges]
        return data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically; :func:`load_nodes` reads it."""
        write_json(path, self.to_dict())

    def __repr__(self) -> str:
        return (f"<Nodes: {len(self)}, forward {self.fwd_s.sum():.4g} s, backward {self.bwd_s.sum():.4g} s, activations "
                f"{self.activation_bytes.sum():.4g} B, parameters {self.param_bytes.sum():.4g} B>")  # fmt: skip

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{key}</th>" for key in ("node", *self.keys()))
        shown = [k for k in range(len(self)) if k < 20 or k >= len(self) - 5]
        rows = "".join(f"<tr><td>{html.escape(self.label(k))}</td>" + "".join(f"<td>{self[key][k]:.4g}</td>" for key in self.keys())
                       + "</tr>" for k in shown)  # fmt: skip
        return f"<table><tr>{head}</tr>{rows}</table>"


def _line_of(text: str, node: int) -> str:
    """Where node number `node` of the list begins in the file: the objects within "nodes" are counted."""
    start = re.search(r'"nodes"\s*:\s*\[', text)
    if start is None:
        return ""
    decoder, at = json.JSONDecoder(), start.end()
    for _ in range(node):
        at = _skip(text, at)
        _, at = decoder.raw_decode(text, at)
    return f", line {text.count(chr(10), 0, _skip(text, at)) + 1}"


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _column(rows: list[Any], key: str, where: Any) -> list[float] | None:
    values = []
    for k, row in enumerate(rows):
        if key not in row:
            if key in NEEDED or any(key in other for other in rows):
                raise InvalidValueError(f"{where(k)} lacks {key!r}")
            return None
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise InvalidValueError(f"{key} of {where(k)} is {brief(value)}: a finite number of 0 or more is needed")
        values.append(float(value))
    return values


def _block(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 31:
        raise InvalidValueError(f"{where} has block {value!r}: a number of a block would be right")
    return value


def load_nodes(path: str | os.PathLike[str]) -> Nodes:
    """Nodes from a JSON file::

        {"format": "terapipe_c.nodes", "version": 1,
         "nodes": [{"name": "embedding", "fwd_s": 1e-4, "bwd_s": 2e-4, "recompute_s": 1e-4, "activation_bytes": 4e6,
                    "param_bytes": 1e8, "optimizer_bytes": 2e8}, ...],
         "edges": [["embedding", "ln_1", 4e6], ...]}

    A node may also have name, block (a number), working_bytes, and without edges cut_bytes and cut_tensors; if one node
    has a key, all must. Without edges nodes stand in the order in which they run; with edges (by name or number, bytes
    optional) they are ordered as :meth:`Nodes.from_graph` says. A ValueError names the file, and the node and its line or
    the edge, that is wrong: broken JSON, a missing key, a size that is negative or no number, an unknown node, a cycle.
    """
    shown, raw = os.fspath(path_of("path", path)), read_bytes(path_of("path", path))
    try:
        data = loads(raw)
    except ValueError as error:
        raise InvalidValueError(f"{shown} is no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
        raise InvalidValueError(f'{shown} does not say "format": "{_FORMAT}", "version": {_VERSION}')
    text = raw.decode("utf-8")
    rows: Any = data.get("nodes")
    edges: Any = data.get("edges", [])
    for key, given, right in (("nodes", rows, "a list of one node or more"), ("edges", edges, "a list")):
        if not isinstance(given, list) or (key == "nodes" and not given):
            raise InvalidValueError(f"{shown}: {key} is {str(given):.20}: {right} would be right")

    def where(k: int) -> str:
        name = rows[k].get("name") if isinstance(rows[k], dict) else None
        return f"node {k}" + (f" ({name})" if name is not None else "") + _line_of(text, k)

    try:
        for k, row in enumerate(rows):
            if not isinstance(row, dict):
                raise InvalidValueError(f"{where(k)} is {brief(row)}: an object would be right")
            extra = set(row) - {*NEEDED, *OPTIONAL, "name", "block"}
            if extra:
                raise InvalidValueError(f"{where(k)} has {sorted(extra)[0]!r}, which means nothing here")
        made: dict[str, Any] = {key: _column(rows, key, where) for key in NEEDED + OPTIONAL}
        if any("name" in row for row in rows):
            made["names"] = tuple(str(row.get("name", k)) for k, row in enumerate(rows))
        if any("block" in row for row in rows):
            made["blocks"] = tuple(_block(row.get("block", -1), where(k)) for k, row in enumerate(rows))
        return Nodes.from_graph(made, edges) if edges else Nodes.of(made)
    except InvalidValueError as error:
        raise InvalidValueError(f"{shown}: {error}") from None
