"""DawnPiper (arXiv 2505.05856): a chain of nodes cut into stages, which recompute and swap what their memory cannot hold.

The model of time and memory, and what "exact" means, are in csrc/plan/dawnpiper.h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import InfeasibleError, InvalidValueError
from ..config import gap_above, html_table, human_bytes, human_seconds, one_of
from .answer import Answer
from .arguments import FloatArray, flag, integer, integers, number
from .nodes import NEEDED, OPTIONAL, Nodes

__all__ = ["DawnPiperPlan", "compute_balanced", "dawnpiper", "dawnpiper_binary", "memory_balanced", "memory_weights"]

_FLIGHTS = ("1f1b", "gpipe", "pipedream")
_APART = 2.0**20   # so many times as long as all else together: for ever
_MOST = 1e290      # sums of more bytes may be more than the core takes
_MANY = 2.0**10    # so many times as much as cannot be kept: BiPar's cuts and choices are by bytes, which they differ by, too
_MODES = ("physical", "paper")


@dataclass(frozen=True, eq=False)
class DawnPiperPlan(Answer):
    """Stages of a chain of nodes, and what each recomputes and swaps."""

    boundaries: list[int]
    """stages + 1 of them, 0 first, n last: stage k holds nodes boundaries[k] to boundaries[k + 1] - 1."""
    recompute: npt.NDArray[np.bool_]
    """bool [n]: nodes whose activations are dropped and recomputed in the backward."""
    swap_bytes: FloatArray
    """[n] bytes of the node's activations that go to the host and come back, each micro-batch."""
    stage_time_s: FloatArray
    """[stages] seconds of a micro-batch: forward, backward, and what recomputation and swaps add."""
    peak_memory_bytes: FloatArray
    """[stages] bytes."""
    link_time_s: FloatArray
    """[stages] seconds of the message from each stage to the next (0 without link_bandwidth_Bps)."""
    period_s: float
    """The largest of stage_time_s and link_time_s: seconds a micro-batch in the steady state. This is minimised."""
    step_time_s: float
    """A whole step of micro_batches, simulated in the order of the schedule; pipedream, which never flushes: period_s."""
    lower_bound_s: float
    """No plan has a shorter period_s."""
    relaxed_s: float
    """The same bound from the fractional form alone (a last tensor recomputed in part)."""
    optimal: bool
    """Is period_s proven to be the least (to about 1e-12 of it)? For dawnpiper False only if work_limit ended a proof."""
    probes: int
    """Periods tried."""
    evaluations: int
    """Stages examined."""
    knapsacks: int
    """Stages of them whose set of recomputed tensors was searched for."""
    states: int
    """Partial sets met in that."""
    planning_time_s: float
    micro_batches: int
    schedule: str
    step_lower_bound_s: float
    """No plan's step is shorter: the slowest stage works through every micro-batch. (Messages overlap: of a link only two
    are sure to follow one another.)"""

    @property
    def gap(self) -> float:
        """(period - bound) / bound."""
        return gap_above(self.period_s, self.lower_bound_s, self.optimal)

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(first node, last node + 1) of each stage."""
        return list(zip(self.boundaries, self.boundaries[1:], strict=False))

    def _facts(self) -> list[tuple[str, str]]:
        proof = "optimal" if self.optimal else f"gap {self.gap * 100:.2g} %"
        return [("stages", f"{len(self.stage_time_s)} of {len(self.recompute)} nodes"),
                ("period", f"{human_seconds(self.period_s)}, {proof}"),
                ("step", f"{human_seconds(self.step_time_s)} ({self.schedule}, {self.micro_batches} micro-batches)"),
                ("recomputed", f"{int(self.recompute.sum())} nodes"),
                ("swapped", f"{human_bytes(float(self.swap_bytes.sum()))} a micro-batch"),
                ("peak", human_bytes(float(self.peak_memory_bytes.max()))),
                ("planned in", human_seconds(self.planning_time_s))]  # fmt: skip

    def __repr__(self) -> str:
        return f"DawnPiperPlan({', '.join(f'{key}: {value}' for key, value in self._facts())})"

    def _repr_html_(self) -> str:
        times, cuts = ", ".join(human_seconds(float(t)) for t in self.stage_time_s), ", ".join(map(str, self.boundaries))
        return html_table("DawnPiper", [*self._facts(), ("stage times", times), ("boundaries", cuts)])


def _one_of(what: str, value: str, known: Sequence[str]) -> int:
    return known.index(one_of(what, value, known))


def _arrays(nodes: Nodes | Mapping[str, Any]) -> tuple[Any, ...]:
    checked = nodes if isinstance(nodes, Nodes) else Nodes.of(nodes)
    return tuple(getattr(checked, key) for key in NEEDED + OPTIONAL)


def _cut(arrays: tuple[Any, ...], limit: float, swap_Bps: float, times: float) -> tuple[Any, ...]:
    """The arrays with no more activation bytes of a node than say that it cannot be kept, nor what is too much of it be swapped in
    the time of recomputing all: beside any more sums would lose the other nodes' bytes. times: of these bytes."""
    with np.errstate(over="ignore"):                           # the core refuses such sums, in the numbers that were given
        enough = 2.0 * limit + (min(limit, 1.0) or 1.0) + 2.0 * swap_Bps * float(sum(seconds.sum() for seconds in arrays[:3]))
        enough *= times
    return (*arrays[:3], np.minimum(arrays[3], enough), *arrays[4:]) if limit >= 0.0 <= swap_Bps and enough < _MOST else arrays


def _sparing(arrays: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], float]]:
    """Where some nodes take over a million times as long to recompute as all else together (they are not to be): the arrays with
    less for these, which bounds are sharper beside, and a period up to which plans recompute none of them, in either; else none."""
    order = np.sort(arrays[2])
    with np.errstate(over="ignore"):                           # the core refuses such sums
        most = arrays[0].sum() + arrays[1].sum() + np.concatenate([[0.0], np.cumsum(order)[:-1]])
        apart = np.flatnonzero((order > _APART * most) & (most > 0.0))
    if len(apart) == 0:
        return []
    enough_s = float(most[apart[0]])
    return [((*arrays[:2], np.minimum(arrays[2], 4.0 * enough_s), *arrays[3:]), enough_s)]


def _micros(micro_batches: int | None, stages: int) -> int:
    return stages if micro_batches is None else integer(micro_batches, "micro_batches")


def _plan(nodes: Any, stages: int, memory_bytes: float, micro_batches: int | None, schedule: str, swap_bandwidth_Bps: float,
          link_bandwidth_Bps: float | None, mode: str, work_limit: int | None, in_flight: Sequence[int] | None,
          **more: Any) -> DawnPiperPlan:  # fmt: skip
    arrays = _arrays(nodes)
    count = integer(stages, "stages")
    micros = _micros(micro_batches, count)
    work = 0 if work_limit is None else integer(work_limit, "work_limit", 62)
    link = 0.0 if link_bandwidth_Bps is None else number(link_bandwidth_Bps, "link_bandwidth_Bps")
    if work_limit is not None and work < 1:
        raise InvalidValueError(f"work_limit is {work}: at least 1 is needed")
    if link_bandwidth_Bps is not None and not link > 0.0:
        raise InvalidValueError(f"link_bandwidth_Bps is {link}: more than 0 bytes a second are needed")
    flight, paper = _one_of("schedule", schedule, _FLIGHTS), _one_of("mode", mode, _MODES)
    try:
        limit, swap_Bps = min(number(memory_bytes, "memory_bytes"), 1e300), number(swap_bandwidth_Bps, "swap_bandwidth_Bps")
        exact = more.get("optimise") and not more.get("binary")
        held = integers(in_flight, "in_flight", "one count a stage")
        for asked, enough_s in (*(_sparing(arrays) if exact else ()), (arrays, np.inf)):
            given = _cut(asked, limit, swap_Bps, _MANY if more.get("binary") else 1.0) if more.get("optimise") else asked
            found = _core.plan_dawnpiper(given, count, limit, micros, flight, paper=bool(paper), swap_Bps=swap_Bps, link_Bps=link,
                                         work_limit=work, in_flight=held, **more)  # fmt: skip
            if found[6] <= enough_s:
                break
    except InfeasibleError as error:
        names = getattr(nodes, "names", ())
        raise InfeasibleError(f"{error}{_named(str(error), names)}") from None
    recompute, rest = found[1].astype(bool), found[2:]
    lower_bound_s = found[8]
    bound = _step_bound(arrays, count, micros, schedule, link > 0.0, lower_bound_s)
    return DawnPiperPlan(found[0], recompute, *rest, micros, schedule, bound)


def _step_bound(arrays: Sequence[Any], stages: int, micros: int, schedule: str, linked: bool, period_s: float) -> float:
    """period_s: a bound on the period. A plan with a faster stage than that has a slower link: a message there and back."""
    if schedule == "pipedream":
        return period_s
    mean = micros * float(arrays[0].sum() + arrays[1].sum()) / stages * (1.0 - 1e-12)
    return max(min(micros, 2) * period_s, mean) if linked and stages > 1 else micros * period_s


def _named(message: str, names: Sequence[str]) -> str:
    """The names of the nodes that the core knows by number only."""
    if not names or "(nodes " not in message:
        return ""
    first, last = (int(word) for word in message.split("(nodes ")[1].split(")")[0].split(" to "))
    return f" (node {first} is {names[first]}, node {last} is {names[last]})"


def dawnpiper(
    nodes: Nodes | Mapping[str, Any],
    stages: int,
    memory_bytes: float,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    swap_bandwidth_Bps: float = 0.0,
    *,
    link_bandwidth_Bps: float | None = None,
    mode: str = "physical",
    boundaries: Sequence[int] | None = None,
    optimise_memory: bool = True,
    work_limit: int | None = None,
    in_flight: Sequence[int] | None = None,
) -> DawnPiperPlan:
    """The least steady-state period over all partitions and all choices of recomputation and swap, exactly.

    nodes: :class:`Nodes`, or a dict of float64 [n] arrays fwd_s, bwd_s, recompute_s, activation_bytes, param_bytes,
    optimizer_bytes and, if wanted, cut_bytes, cut_tensors, working_bytes. memory_bytes: of one stage (infinite: all fits).
    schedule: "1f1b", "gpipe" or "pipedream". Stage x (from 0) holds min(micro_batches, stages - x) copies of its activations
    under 1f1b, micro_batches under gpipe, stages - x (and as many versions of its weights) under pipedream; micro_batches None:
    as many as stages. in_flight: [stages] copies that another order holds, never more than the stage before.

    A stage recomputes whole tensors and swaps any number of bytes of others; up to swap_bandwidth_Bps times the stage's time swaps
    are free, in each direction. With link_bandwidth_Bps a cut has a time of its own, cut_bytes / link_bandwidth_Bps, which the
    period is no shorter than. mode "paper" counts memory as the paper does: copies of activations, parameters and optimiser state.
    boundaries: judge this partition instead of searching. optimise_memory False: nothing is recomputed or swapped. work_limit:
    partial sets that the proof may look at (4 million); past it ``optimal`` is False and the bound still holds.

    InvalidValueError or InvalidTypeError name the array, the node and its value; InfeasibleError the stage, the bytes it is short,
    and the memory_bytes that would do. Source: DawnPiper (Peng et al., arXiv 2505.05856), its model; the search is ours.
    """
    return _plan(nodes, stages, memory_bytes, micro_batches, schedule, swap_bandwidth_Bps, link_bandwidth_Bps, mode, work_limit,
                 in_flight, optimise=flag(optimise_memory, "optimise_memory"),
                 boundaries=integers(boundaries, "boundaries", "stages + 1 of them"))  # fmt: skip


def dawnpiper_binary(
    nodes: Nodes | Mapping[str, Any],
    stages: int,
    memory_bytes: float,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    swap_bandwidth_Bps: float = 0.0,
    *,
    link_bandwidth_Bps: float | None = None,
    mode: str = "physical",
    optimise_memory: bool = True,
    work_limit: int | None = None,
    in_flight: Sequence[int] | None = None,
) -> DawnPiperPlan:
    """DawnPiper's own search (BiPar): binary cuts between the compute- and the memory-balanced position, Capuchin's choice
    of what to swap (FreeTime, one queue a direction) and to recompute (bytes saved a second).

    Arguments and result as of :func:`dawnpiper`; swaps take whole tensors and cost the time that work does not hide. work_limit:
    stages examined before it takes the best plan known (200 000). It may find no plan where one exists: InfeasibleError says so;
    and more memory may give a slower plan. ``tp.plan`` asks it along a ladder of limits, so that this does not show there.
    Source: DawnPiper (arXiv 2505.05856); Capuchin (Peng et al., ASPLOS 2020); what they leave open: csrc/plan/bipar.c.
    """
    return _plan(nodes, stages, memory_bytes, micro_batches, schedule, swap_bandwidth_Bps, link_bandwidth_Bps, mode, work_limit,
                 in_flight, optimise=flag(optimise_memory, "optimise_memory"), binary=True)  # fmt: skip


def memory_weights(stages: int, micro_batches: int | None = None, schedule: str = "pipedream") -> FloatArray:
    """DawnPiper's Alg. 2: float64 [stages], the share of one micro-batch's memory that each stage should have, in shares of
    stage 0's. pipedream, 4 stages: 1, 4/3, 2, 4. micro_batches None: as many as stages."""
    count = integer(stages, "stages")
    return _core.dawnpiper_weights(count, _micros(micro_batches, count), _one_of("schedule", schedule, _FLIGHTS))


def memory_balanced(nodes: Nodes | Mapping[str, Any], stages: int, micro_batches: int | None = None,
                    schedule: str = "pipedream") -> list[int]:  # fmt: skip
    """Boundaries (stages + 1 of them, 0 first) of Alg. 2: a stage ends with the node at which its activation, parameter and
    optimiser bytes reach its share (:func:`memory_weights`) of all bytes; no stage is empty. nodes: as of :func:`dawnpiper`;
    InvalidValueError names the array and node."""
    count = integer(stages, "stages")
    flight = _one_of("schedule", schedule, _FLIGHTS)
    return list(_core.dawnpiper_balance(_arrays(nodes), count, _micros(micro_batches, count), flight, True))


def compute_balanced(nodes: Nodes | Mapping[str, Any], stages: int) -> list[int]:
    """Boundaries (stages + 1 of them, 0 first): a stage ends with the node at which its forward and backward seconds reach an equal
    share of all; no stage is empty. nodes: as of :func:`dawnpiper`; InvalidValueError names the array and node."""
    count = integer(stages, "stages")
    return list(_core.dawnpiper_balance(_arrays(nodes), count, 1, 0, False))
