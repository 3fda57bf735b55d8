"""Layers, recompute strategies, chunks and stages decided together (BMPipe, Wang et al., CLUSTER 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..config import brief, gap_above, html_table, human_bytes, human_seconds
from .answer import Answer
from .arguments import FloatArray, flag, integer, integers, number, time_limit

IntArray = npt.NDArray[np.int32]
Layers = Sequence[Mapping[str, Any]]
CoreLayers = tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]


@dataclass(frozen=True, eq=False)
class BMPipePlan(Answer):
    """Which layers, with which recompute strategy, are on which chunk of which stage. Times are seconds."""

    assignment: IntArray
    """int32 [types, strategies, chunks, stages]: numbers of layers. Types in model order; zeros for strategies a type lacks."""
    step_time_s: float
    """Makespan of the schedule (1F1B for one chunk, interleaved 1F1B for several)."""
    bubbles: dict[str, float]
    """recompute, imbalance, preparation: they sum to step_time_s less the ideal, micro_batches * mean of the stages' work
    without recomputation."""
    lower_bound_s: float
    """Proven: no plan that fits is faster."""
    peak_memory_bytes: FloatArray
    """[stages] static bytes and the most activation bytes that the schedule keeps in flight."""
    optimal: bool
    """Proven optimal, up to the rounding of double sums, and of times to 40 bits where there are several chunks."""
    evaluations: int
    """Plans judged, by an inequality or a simulation."""
    simulations: int
    """Those of them that were judged by a simulation."""
    nodes: int
    """Nodes of branch and bound."""
    paths: int
    """Critical paths kept as inequalities."""
    planning_time_s: float
    names: tuple[str, ...] = field(default=())
    """Names of the layer types."""
    strategy_names: tuple[tuple[str, ...], ...] = field(default=())
    """Names of each type's strategies."""

    @property
    def gap(self) -> float:
        """(step - bound) / bound."""
        return 0.0 if self.optimal else gap_above(self.step_time_s, self.lower_bound_s)

    @property
    def layers(self) -> npt.NDArray[np.int_]:
        """int [chunks, stages]: layers of every virtual stage."""
        total: npt.NDArray[np.int_] = self.assignment.sum(axis=(0, 1))
        return total

    def _facts(self) -> list[tuple[str, str]]:
        proof = "optimal" if self.optimal else f"gap {self.gap * 100:.2f} %"
        return [("layers", " | ".join(" ".join(map(str, row)) for row in self.layers.tolist())),
                ("step", f"{human_seconds(self.step_time_s)}, {proof}"),
                ("idle", ", ".join(f"{cause} {human_seconds(seconds)}" for cause, seconds in self.bubbles.items())),
                ("peak", human_bytes(max(self.peak_memory_bytes))),
                ("planned in", human_seconds(self.planning_time_s))]  # fmt: skip

    def __repr__(self) -> str:
        return f"BMPipePlan({', '.join(f'{what}: {text}' for what, text in self._facts())})"

    def _repr_html_(self) -> str:
        return html_table("BMPipe", self._facts())


def _number(layer: Mapping[str, Any], key: str, where: str) -> float:
    if type(layer) is dict and type(given := layer.get(key)) is float and 0.0 <= given < math.inf:
        return given                                           # as most are
    try:
        if not isinstance(layer, Mapping):
            raise TypeError
        value = layer[key]
    except KeyError:
        raise _core.InvalidValueError(f"{where} has no {key!r}: name, count, fwd_s, bwd_s, static_bytes and strategies (each with "
                         "extra_bwd_s and activation_bytes) are needed") from None
    except TypeError:
        raise _core.InvalidTypeError(f"{where} is {brief(layer)}: a dict would be right") from None
    found = number(value, f"{key} of {where}")
    if not (np.isfinite(found) and found >= 0.0):
        raise _core.InvalidValueError(f"{key} of {where} is {found}: a finite number of 0 or more would be right")
    return found


def core_layers(layers: Layers) -> tuple[CoreLayers, tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """(the layer types as arrays for the core, their names, their strategies' names)."""
    if isinstance(layers, Mapping) or not isinstance(layers, Sequence) or not len(layers):
        raise _core.InvalidValueError(f"layers is {brief(layers)}: a list of one dict a layer type, in model order, would be right")
    rows, names, labels = [], [], []
    for t, layer in enumerate(layers):
        where = f"layers[{t}]"
        fixed = [_number(layer, key, where) for key in ("fwd_s", "bwd_s", "static_bytes")]
        if "count" not in layer:
            raise _core.InvalidValueError(f"{where} has no 'count': its number of layers is needed")
        count = integer(layer["count"], f"count of {where}")
        if not 0 < count < 2**31:
            raise _core.InvalidValueError(f"count of {where} is {count}: at least 1 would be right")
        strategies = layer.get("strategies")
        if not isinstance(strategies, Sequence) or not len(strategies):
            raise _core.InvalidValueError(f"strategies of {where} is {brief(strategies)}: a list of at least one dict would be "
                                          "right")
        pairs = [
            [_number(s, key, f"{where} strategies[{r}]") for key in ("extra_bwd_s", "activation_bytes")]
            for r, s in enumerate(strategies)
        ]
        rows.append((count, fixed, pairs))
        names.append(str(layer.get("name", t)))
        labels.append(tuple(str(s.get("name", r)) for r, s in enumerate(strategies)))
    table = np.zeros((2, len(rows), max(len(pairs) for _, _, pairs in rows)))
    for t, (_, _, pairs) in enumerate(rows):
        table[:, t, : len(pairs)] = np.array(pairs).T
    fixed_s = np.array([fixed for _, fixed, _ in rows]).T.copy()
    counts = np.array([count for count, _, _ in rows], np.int32)
    choices = np.array([len(pairs) for _, _, pairs in rows], np.int32)
    core = (counts, choices, fixed_s[0], fixed_s[1], fixed_s[2], table[0], table[1])
    return core, tuple(names), tuple(labels)


def memory(memory_bytes: float) -> float:
    return number(memory_bytes, "memory_bytes", "one number, the bytes of every stage,")


def plan_of(found: tuple[Any, ...], names: tuple[str, ...], labels: tuple[tuple[str, ...], ...]) -> BMPipePlan:
    assignment, peak, step, bound, recompute, imbalance, preparation = found[:7]
    optimal, evaluations, simulations, nodes, paths, seconds = found[7:]
    bubbles = {"recompute": recompute, "imbalance": imbalance, "preparation": preparation}
    return BMPipePlan(
        assignment, step, bubbles, bound, peak, optimal, evaluations, simulations, nodes, paths, seconds, names, labels
    )


def _assignment(start: BMPipePlan | None) -> IntArray | None:
    if start is None:
        return None
    if not isinstance(start, BMPipePlan):
        raise _core.InvalidTypeError(f"start is {brief(start)}: a BMPipePlan of the same layers would be right")
    return np.ascontiguousarray(start.assignment, np.int32)


def bmpipe(
    layers: Layers,
    stages: int,
    micro_batches: int,
    memory_bytes: float,
    chunks: int = 1,
    comm_s: float = 0.0,
    time_limit_s: float | None = 1.0,
    effort: int = 0,
    prove: bool = True,
    in_flight: Sequence[int] | None = None,
    start: BMPipePlan | None = None,
) -> BMPipePlan:
    """The assignment of least step time that fits: how many layers, with which recompute strategy, on which stage.

    layers: one dict a layer type in model order: name, count, fwd_s, bwd_s, static_bytes (of one layer) and strategies,
    each {"name", "extra_bwd_s", "activation_bytes"} (of one layer and one micro-batch). Consecutive layers go to chunk 0
    of stages 0, 1, ..., then to chunk 1, ...; none of them is empty. memory_bytes: of every stage; comm_s: seconds of a
    message on its link. One chunk (1F1B): proven optimal, if the limits allow (effort: nodes of its branch and bound, a
    simulation counts as 25 micro_batches of them; 0: any number). Several (interleaved 1F1B, micro_batches a multiple of stages): a
    search, then branch and bound, of bounded effort (candidates; 0: a default): optimal where branch and bound ends, else with a
    proven lower bound. prove=False leaves out branch and bound, which takes longer than the search and finds some better plans
    (lower_bound_s is 0 then).
    time_limit_s (None: none) is hard; where it is not reached, equal input gives an equal plan. in_flight: [chunks * stages]
    micro-batches that each virtual stage (chunk * stages + stage) has buffers of its own for, or that another order holds; None:
    the most that the schedule has in flight on a stage at any one time.

    start: a plan of the same layers, such as the one for less memory. Where it fits the answer is no slower, nor is it slower than
    without start (unless time_limit_s ends the search): asked in order of rising limits, each from the plan before, more memory
    never hurts. Step times keep to both to the last bit.

    Proven plans are no slower with more memory. Unproven plans of several chunks that are asked each alone may be: the search looks
    at one limit, and one that promised both this and plans as fast would have to look at all limits below, too. Of random requests
    whose limits were half a percent to 3 % apart 2 of 107 were, by up to 0.03 %, and without ``prove`` 13 of 210, by up to 1.2 %;
    of 72 such steps of three bad instances with four chunks 5 were, by up to 0.3 %, and without ``prove`` 10, by up to 5 % (all
    before the search moved many layers at once; since then 0 of 69 and, without ``prove``, 0 of 174 of other requests were).
    Layers cut finer, each into as many equal ones, make no plan slower by more than 1e-7 of it, unless a limit ends the search:
    where one of several chunks is further above its bound, those that keep equal layers in groups are looked for, too, as if such
    layers had been asked for, with as much effort for each number that divides all counts (twice 480 layers: 10 s without limit).
    ``tp.plan`` asks for less memory, too, and keeps the fastest.

    Multiplying all times by a factor multiplies step and bound by it: with several chunks times are planned in units of the
    longest, rounded to 40 bits.

    InvalidValueError or InvalidTypeError name the layer type, the field and its value; InfeasibleError the stage and the bytes it
    lacks with everything recomputed. Source: BMPipe (Wang et al., CLUSTER 2025, a poster), its programme reconstructed; the search
    is ours (csrc/plan/bmpipe.h).
    """
    core, names, labels = core_layers(layers)
    found = _core.plan_bmpipe(
        core, integer(stages, "stages"), integer(micro_batches, "micro_batches"), memory(memory_bytes),
        chunks=integer(chunks, "chunks"), comm_s=number(comm_s, "comm_s", "seconds"), time_limit_s=time_limit(time_limit_s),
        effort=integer(effort, "effort", 62), prove=flag(prove, "prove"),
        in_flight=integers(in_flight, "in_flight", "one count a stage"), start=_assignment(start),
    )  # fmt: skip
    return plan_of(found, names, labels)
