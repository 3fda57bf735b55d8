"""A convolutional network of cells with branches, like AmoebaNet (Real et al. 2019): a graph, not a chain, for the planners.

The paper's wiring is not copied: a cell adds five pairs of operations over the two cells before it and the sums made so far, and
joins what no sum reads. Stem, then three groups of normal cells with a reduction (half the side, twice the channels) before
the second and the third, as there. DawnPiper prints 28 M parameters and no shape: cells and channels here are chosen to that.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from .config import whole
from .devices import Device
from .devices import get as device_of
from .planners.nodes import Nodes, remake_seconds

__all__ = ["amoebanet"]

# (what it reads: 0 and 1 the cells before, 2.. sums of this cell; operation), two to a sum
_PAIRS = (((1, "conv1x1"), (1, "pool")), ((0, "sep7"), (1, "none")), ((0, "sep7"), (2, "conv1x1")), ((1, "pool"), (3, "none")),
          ((0, "pool"), (4, "conv1x1")))
_BYTES = 2.0
_MOST_CELLS = 10_000     # of a second's work


class _Graph:
    """Nodes and edges as they are added, for one sample."""

    def __init__(self, device: Device, batch: int, roofline: dict[str, Any]) -> None:
        self.device, self.batch, self.roofline = device, batch, roofline
        self.rows: list[tuple[float, ...]] = []
        self.names: list[str] = []
        self.edges: list[tuple[int, int, float]] = []
        self.made: list[float] = []

    def add(self, name: str, sources: list[int], side: int, channels: int, macs: float = 0.0, params: float = 0.0) -> int:
        """macs, params: multiply-adds of a sample, weights. Its output is kept."""
        out = _BYTES * side * side * channels * self.batch
        read = sum(self.made[k] for k in sources)
        flops, move = 2.0 * macs * self.batch, read + out + _BYTES * params
        fwd = self.device.seconds(flops, move, **self.roofline)
        self.rows.append((fwd, self.device.seconds(2 * flops, 2 * move, **self.roofline), out, _BYTES * params, 12.0 * params,
                          2 * (read + out)))
        self.names.append(name)
        self.made.append(out)
        self.edges += [(k, len(self.rows) - 1, self.made[k]) for k in sources]
        return len(self.rows) - 1

    def conv(self, name: str, source: int, side: int, into: int, out: int, taps: int = 1) -> int:
        """A convolution and its norm (two vectors)."""
        made = self.add(name, [source], side, out, float(taps) * into * out * side * side, float(taps) * into * out)
        return self.add(f"{name}.norm", [made], side, out, params=2.0 * out)

    def nodes(self) -> Nodes:
        columns = np.array(self.rows).T
        keys = ("fwd_s", "bwd_s", "activation_bytes", "param_bytes", "optimizer_bytes", "working_bytes")
        return Nodes.from_graph(dict(zip(keys, columns, strict=True)) | {
            "recompute_s": remake_seconds(columns[0], columns[2], self.edges), "names": self.names}, self.edges)


def _operation(graph: _Graph, name: str, kind: str, source: int, side: int, c: int) -> int:
    if kind == "none":
        return source
    if kind == "pool":
        return graph.add(f"{name}.pool", [source], side, c)
    if kind == "conv1x1":
        return graph.conv(f"{name}.conv", source, side, c, c)
    inner = max(1, c // 4)   # a narrow 1 x 7 and 7 x 1 between two 1 x 1
    at = graph.conv(f"{name}.in", source, side, c, inner)
    at = graph.conv(f"{name}.row", at, side, inner, inner, 7)
    at = graph.conv(f"{name}.column", at, side, inner, inner, 7)
    return graph.conv(f"{name}.out", at, side, inner, c)


def _cell(graph: _Graph, name: str, before: tuple[int, int], widths: tuple[int, int], side: int, c: int) -> tuple[int, int]:
    """(node of what it makes, its channels)."""
    states = [graph.conv(f"{name}.left", before[0], side, widths[0], c), graph.conv(f"{name}.right", before[1], side, widths[1], c)]
    used: set[int] = set()
    for k, pair in enumerate(_PAIRS):
        ends = [_operation(graph, f"{name}.{k}{'ab'[j]}", kind, states[source], side, c) for j, (source, kind) in enumerate(pair)]
        used |= {source for source, _ in pair}
        states.append(graph.add(f"{name}.{k}.sum", ends, side, c))
    loose = [states[k] for k in range(2, len(states)) if k not in used]
    return graph.add(f"{name}.join", loose, side, c * len(loose)), c * len(loose)


def amoebanet(device: Device | str, *, cells: int = 18, channels: int = 152, image: int = 224, classes: int = 1000,
              micro_batch: int = 1, **roofline: Any) -> Nodes:
    """``cells`` normal cells in three groups, ``channels`` in the first (twice, four times that later), as Nodes with edges.

    ``micro_batch`` square images of ``image`` pixels a side, in ``classes`` classes, on one ``device``. Half precision and 16
    bytes a parameter, as the rest of the zoo; ``roofline``: what ``Device.seconds`` takes."""
    machine, cells, classes = device_of(device), whole("cells", cells, 3, _MOST_CELLS), whole("classes", classes)
    graph = _Graph(machine, whole("micro_batch", micro_batch), roofline)
    side, c = whole("image", image, 32) // 8, whole("channels", channels, 4)
    stem = graph.conv("stem", graph.add("image", [], image, 3), image // 4, 3, c // 4, 9)
    first = graph.conv("stem.2", stem, side, c // 4, c, 9)
    before, widths = (first, first), (c, c)
    for group in range(3):
        if group:   # reduction: both sources at half the side
            side, c = side // 2, 2 * c
            small = [graph.add(f"reduce.{group}.{j}", [node], side, width)
                     for j, (node, width) in enumerate(zip(before, widths, strict=True))]
            before = (small[0], small[1])
        for k in range((cells + 2 - group) // 3):
            made, width = _cell(graph, f"cell.{group}.{k}", before, widths, side, c)
            before, widths = (before[1], made), (widths[1], width)
    last = graph.add("mean", [before[1]], 1, widths[1])
    graph.add("classes", [last], 1, classes, float(widths[1]) * classes, float(widths[1] + 1) * classes)
    return graph.nodes()
