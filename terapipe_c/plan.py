"""From a model, a cluster and costs to a :class:`Plan`: stages, slices, schedule, program and what to expect of them.

Planning runs no kernels and reads no clock except to report its own time: the same request gives the same plan. Every
candidate is judged by the simulator on the very program that the engine would execute.
"""
from __future__ import annotations

import hashlib
import html
import itertools
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import planners
from ._core import InvalidTypeError, InvalidValueError
from ._files import read_json, write_json
from .config import Cluster, GPTConfig, html_table, human_bytes, human_count, human_seconds, real, whole
from .cost import PHASES, CostModel, equal_lengths, even_partition
from .schedules import Program
from .search import SLICED, Candidate, Cut, Judge, Micro, StageCost, balanced, peak_memory, search, with_halves

__all__ = ["Plan", "plan"]

_FORMAT, _VERSION = "terapipe_c.plan", 1
_PLANNERS = ("auto", "terapipe", "uniform")
# In the order that ties are decided: of two equally fast programs the one that holds fewer activations.
_AUTO = ("seq1f1b", "1f1b", "gpipe")
_SCHEDULES = ("auto", *_AUTO, "interleaved", SLICED)


# ---- the plan ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A value: what runs where, in which order, and what it should take. Made by :func:`plan` or :meth:`load`.

    Two plans are equal if they make the ranks do the same: model, batch, partition, slicing, schedule and program;
    predictions and planning time do not count.
    """

    model: GPTConfig
    cluster: Cluster
    batch: int
    seq_len: int
    planner: str
    schedule: str                                  #: "gpipe", "1f1b", "seq1f1b", "interleaved" or "sliced-1f1b"
    ranks: int
    chunks: int                                    #: virtual stages per rank
    stages: list[tuple[int, int]]                  #: (first block, last block + 1) of each virtual stage
    slicing: list[tuple[int, list[int]]]           #: (sequences in the micro-batch, slice lengths in tokens)
    program: Program                               #: lowered, backward split into I and W
    durations: dict[str, NDArray[np.float64]]      #: seconds of its instructions, [virtual stages, units]
    step_time_s: float                             #: predicted
    lower_bound_s: float                           #: no order of these operations on these ranks is faster
    peak_memory_bytes: list[int]                   #: one per rank
    memory_limit_bytes: int | None
    bubbles: dict[str, float]                      #: idle seconds by cause, all ranks together
    busy_s: list[float]                            #: one per rank
    planning_time_s: float
    granularity: int = 1
    recompute: list[bool] = field(default_factory=list)   #: per block; none yet
    swap: list[int] = field(default_factory=list)         #: bytes per block; none yet
    compared: list[tuple[str, float]] = field(default_factory=list)   #: (what, predicted seconds) of alternatives

    @property
    def gap(self) -> float:
        """How far the predicted step may be from the best order: (step - bound) / bound.

        The bound holds for every order of THIS plan's operations on these ranks (partition and slicing as they are);
        other slicings may have a lower one.
        """
        return (self.step_time_s - self.lower_bound_s) / self.lower_bound_s if self.lower_bound_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Predicted."""
        return self.batch * self.seq_len / self.step_time_s if self.step_time_s > 0 else float("inf")

    def timeline(self) -> Any:
        """The simulated step, a ``Timeline``."""
        return self.program.simulate(self.durations)

    # ---- as a value ----

    def _identity(self) -> dict[str, Any]:
        return {"model": self.model.to_dict(), "batch": self.batch, "seq_len": self.seq_len, "schedule": self.schedule,
                "ranks": self.ranks, "chunks": self.chunks, "stages": [list(s) for s in self.stages],
                "slicing": [[b, list(lengths)] for b, lengths in self.slicing], "recompute": list(self.recompute),
                "swap": list(self.swap), "program": str(self.program)}

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that name the plan: equal for equal plans, on every machine."""
        text = json.dumps(self._identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return int(self.digest, 16) >> 4

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {"format": _FORMAT, "version": _VERSION, "digest": self.digest, **self._identity(),
                "cluster": self.cluster.to_dict(), "planner": self.planner,
                "durations": {k: _thin(v) for k, v in self.durations.items()}, "step_time_s": self.step_time_s,
                "lower_bound_s": self.lower_bound_s, "peak_memory_bytes": list(self.peak_memory_bytes),
                "memory_limit_bytes": self.memory_limit_bytes, "bubbles": dict(self.bubbles), "busy_s": list(self.busy_s),
                "planning_time_s": self.planning_time_s, "granularity": self.granularity,
                "compared": [list(row) for row in self.compared]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_dict`. The program is proved again; a ValueError says what does not fit."""
        try:
            model = GPTConfig.from_dict(data["model"])
            batch, seq_len = whole("batch", data["batch"]), whole("seq_len", data["seq_len"])
            ranks, chunks = whole("ranks", data["ranks"]), whole("chunks", data["chunks"])
            stages = check_partition(data["stages"], model)
            slicing = check_slicing([(b, lengths) for b, lengths in data["slicing"]], batch, seq_len)
            program = Program.parse(data["program"])
            program.check()
            shape = (len(stages), sum(len(lengths) for _, lengths in slicing))
            durations = {k: np.ascontiguousarray(np.broadcast_to(np.array(v, np.float64), shape))
                         for k, v in data["durations"].items()}
            if len(stages) != ranks * chunks or program.num_ranks != ranks:
                raise InvalidValueError(f"{len(stages)} stages and a program of {program.num_ranks} ranks for {ranks} ranks "
                                        f"of {chunks} chunks")
            loaded = cls(
                model=model, cluster=Cluster.from_dict(data["cluster"]), batch=batch, seq_len=seq_len,
                planner=str(data["planner"]), schedule=str(data["schedule"]), ranks=ranks, chunks=chunks,
                stages=list(stages), slicing=[(b, list(lengths)) for b, lengths in slicing], program=program,
                durations=durations, bubbles={str(k): float(v) for k, v in data["bubbles"].items()},
                peak_memory_bytes=[int(x) for x in data["peak_memory_bytes"]], busy_s=[float(x) for x in data["busy_s"]],
                compared=[(str(k), float(v)) for k, v in data["compared"]], recompute=list(data["recompute"]),
                swap=list(data["swap"]), **{k: data[k] for k in ("step_time_s", "lower_bound_s", "memory_limit_bytes",
                                                                 "planning_time_s", "granularity")})
        except KeyError as error:
            raise InvalidValueError(f"the plan lacks {error.args[0]!r}") from None
        except (TypeError, AttributeError, IndexError) as error:
            raise InvalidValueError(f"the plan is malformed: {error}") from None
        if loaded.digest != data.get("digest"):
            raise InvalidValueError(f"the plan's digest is {data.get('digest')!r}, but its content's is {loaded.digest!r}")
        return loaded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what :meth:`save` wrote; a ValueError names the file if it is broken, foreign or altered."""
        data = read_json(path, _FORMAT, _VERSION, "a plan of terapipe_c")
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise InvalidValueError(f"{os.fspath(path)!s} is damaged: {error}") from None

    # ---- for people ----

    def explain(self) -> str:
        """A page: what runs where, what it should take, where the time goes, what else was looked at."""
        lines = [f"Plan {self.digest} for {self.model!r}: {human_count(self.model.num_params)} parameters",
                 f"  a step: {self.batch} sequences of {self.seq_len} tokens, {self.ranks} ranks"
                 + (f" of {self.chunks} chunks" if self.chunks > 1 else "") + f", schedule {self.schedule}, planner "
                 f"{self.planner}",
                 f"  slices: {format_slicing(self.slicing)}" + self._halves(), "  stages:"]
        for k, (first, end) in enumerate(self.stages):
            work = {p: self.durations[p][k].sum() for p in PHASES}
            lines.append(f"    {k} on rank {k % self.ranks}: {_describe_blocks(self.model, first, end)}: "
                         f"{human_seconds(work['F'])} forward, {human_seconds(work['I'] + work['W'])} backward")
        lines.append(f"  predicted step: {human_seconds(self.step_time_s)} ({human_count(self.tokens_per_s)} tokens/s); no "
                     f"order of these operations is faster than {human_seconds(self.lower_bound_s)} (gap "
                     f"{100 * self.gap:.2g} %)")
        idle = sum(self.bubbles.values())
        share = idle / (self.ranks * self.step_time_s) if self.step_time_s > 0 else 0.0
        causes = ", ".join(f"{k.replace('_', ' ')} {human_seconds(v)}" for k, v in self.bubbles.items() if v > 0)
        lines.append(f"  idle: {100 * share:.3g} % of the ranks' time" + (f" ({causes})" if causes else ""))
        limit = "" if self.memory_limit_bytes is None else f" of {human_bytes(self.memory_limit_bytes)}"
        lines.append("  peak memory: " + ", ".join(f"rank {r} {human_bytes(b)}"
                                                   for r, b in enumerate(self.peak_memory_bytes)) + limit)
        if self.compared:
            lines.append("  compared with: " + ", ".join(f"{what} {human_seconds(s)}" for what, s in self.compared))
        lines.append(f"  planned in {human_seconds(self.planning_time_s)}")
        return "\n".join(lines)

    def _halves(self) -> str:
        code = self.program.instructions(0)
        count = int((code["flags"] & 1).sum()) if self.schedule == SLICED else 0
        return f", the forwards of the first {count} micro-batches in halves along the batch" if count else ""

    def __repr__(self) -> str:
        return (f"<Plan {self.digest}: {self.ranks} ranks, {self.schedule}, {format_slicing(self.slicing)}, step "
                f"{human_seconds(self.step_time_s)}, gap {100 * self.gap:.2g} %>")

    def _repr_html_(self) -> str:
        line = self.timeline()
        draw = getattr(line, "_repr_svg_", None) or getattr(line, "_repr_html_", None)
        picture = draw() if draw is not None else ""
        idle = sum(self.bubbles.values()) / (self.ranks * self.step_time_s) if self.step_time_s > 0 else 0.0
        table = html_table(f"Plan {self.digest}", [
            ("ranks", f"{self.ranks}" + (f" of {self.chunks} chunks" if self.chunks > 1 else "")),
            ("schedule", self.schedule), ("slices", format_slicing(self.slicing)),
            ("step", f"{human_seconds(self.step_time_s)} (bound {human_seconds(self.lower_bound_s)}, gap "
                     f"{100 * self.gap:.2g} %)"),
            ("idle", f"{100 * idle:.3g} %"), ("peak memory", ", ".join(human_bytes(b) for b in self.peak_memory_bytes))])
        return f"{table}{picture}<details><summary>explain</summary><pre>{html.escape(self.explain())}</pre></details>"

    def to_torch_csv(self) -> str:
        """The schedule in torch.distributed.pipelining's CSV; a ValueError where it has token slices."""
        if any(len(lengths) > 1 for _, lengths in self.slicing):
            raise InvalidValueError("torch.distributed.pipelining has no token slices: a plan with one slice a micro-batch "
                                    "would be right")
        return str(self.program.to_csv())

    def to_megatron(self) -> str:
        """Megatron-LM's flags for this plan; a ValueError names what Megatron has no word for."""
        if any(len(lengths) > 1 for _, lengths in self.slicing):
            raise InvalidValueError("Megatron has no token slices: a plan with one slice a micro-batch would be right")
        sizes = {b for b, _ in self.slicing}
        if len(sizes) > 1:
            raise InvalidValueError(f"Megatron has micro-batches of one size, not of {sorted(sizes)}")
        if self.schedule not in ("1f1b", "interleaved") and self.ranks > 1:
            raise InvalidValueError(f"Megatron has no schedule {self.schedule}: 1f1b or interleaved would be right")
        m = self.model
        words = []
        for first, end in self.stages:
            blocks = m.blocks[first:end]
            if blocks[0].kind == "ffn" or blocks[-1].kind == "attention":
                raise InvalidValueError(f"Megatron has no stage boundary inside a layer: the stage {blocks[0].name} to "
                                        f"{blocks[-1].name} has one")
            layers = sum(b.kind == "ffn" for b in blocks)
            words.append(("E" if first == 0 else "") + "t" * layers + ("L" if end == m.num_blocks else ""))
        flags = {"pipeline-model-parallel-size": self.ranks, "pipeline-model-parallel-layout": "|".join(words),
                 "micro-batch-size": sizes.pop(), "global-batch-size": self.batch, "num-layers": m.n_layer,
                 "hidden-size": m.n_embd, "num-attention-heads": m.n_head, "seq-length": self.seq_len,
                 "max-position-embeddings": m.block_size}
        text = [f"--{name} {value}" for name, value in flags.items()]
        return " ".join(text + ([] if m.tie_weights else ["--untie-embeddings-and-output-weights"])
                        + ([] if m.bias else ["--disable-bias-linear"]))


def _thin(array: NDArray[np.float64]) -> list[list[float]]:
    """[stages, units] without rows or columns that repeat the first."""
    if (array == array[:, :1]).all():
        array = array[:, :1]
    if (array == array[:1]).all():
        array = array[:1]
    return [[float(x) for x in row] for row in array]


def format_slicing(slicing: Iterable[tuple[int, Sequence[int]]]) -> str:
    """TeraPipe's notation: ``[(1, [120]*4+[64])] * 8``."""
    def runs(lengths: Sequence[int]) -> str:
        parts = [(n, sum(1 for _ in group)) for n, group in itertools.groupby(lengths)]
        joined: list[str] = []
        plain: list[str] = []
        for n, count in parts:
            if count > 2:
                if plain:
                    joined.append(f"[{', '.join(plain)}]")
                    plain = []
                joined.append(f"[{n}]*{count}")
            else:
                plain += [str(n)] * count
        if plain:
            joined.append(f"[{', '.join(plain)}]")
        return "+".join(joined)

    groups = [((b, tuple(lengths)), sum(1 for _ in g)) for (b, lengths), g in
              itertools.groupby(((b, tuple(lengths)) for b, lengths in slicing))]
    return " + ".join(f"[({b}, {runs(lengths)})]" + (f" * {count}" if count > 1 else "") for (b, lengths), count in groups)


def _describe_blocks(model: GPTConfig, first: int, end: int) -> str:
    blocks = model.blocks[first:end]
    names = [b.name for b in blocks]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


# ---- requests ------------------------------------------------------------------------------------------------------------

def check_slicing(slicing: Any, batch: int, seq_len: int) -> tuple[Micro, ...]:
    """A slicing in the paper's notation, or an int M (one sequence a micro-batch, M slices), proved and frozen."""
    if not isinstance(slicing, (list, tuple)):
        parts = whole("slicing", slicing)
        if parts > seq_len:
            raise InvalidValueError(f"slicing is {parts} slices of seq_len = {seq_len} tokens: at most {seq_len} would be right")
        return ((1, tuple(equal_lengths(seq_len, parts))),) * batch
    result = []
    for q, entry in enumerate(slicing):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or isinstance(entry[1], (int, str)):
            raise InvalidValueError(f"slicing[{q}] is {entry!r}: (sequences, [slice lengths]) would be right")
        size = whole(f"slicing[{q}]'s micro-batch", entry[0])
        lengths = tuple(whole(f"slicing[{q}]'s slice {i}", n) for i, n in enumerate(entry[1]))
        if sum(lengths) != seq_len:
            raise InvalidValueError(f"slicing[{q}]'s lengths sum to {sum(lengths)}: seq_len = {seq_len} would be right")
        result.append((size, lengths))
    covered = sum(b for b, _ in result)
    if covered != batch:
        raise InvalidValueError(f"slicing covers {covered} sequences: batch = {batch} would be right")
    return tuple(result)


def check_partition(partition: Any, model: GPTConfig) -> Cut:
    """[(first block, last block + 1), ...], proved to cover the model in order."""
    at, result = 0, []
    for k, entry in enumerate(partition):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise InvalidValueError(f"partition[{k}] is {entry!r}: (first block, last block + 1) would be right")
        first, end = (whole(f"partition[{k}]", x, 0) for x in entry)
        if first != at or end <= first:
            raise InvalidValueError(f"partition[{k}] is ({first}, {end}): a stage from block {at} to a later one would be right")
        result.append((first, end))
        at = end
    if at != model.num_blocks:
        raise InvalidValueError(f"partition ends at block {at}: the model has {model.num_blocks}")
    return tuple(result)


def _choose_granularity(seq_len: int, batch: int) -> int:
    """The finest power of two that keeps the slice planner's tables (a DP of L^2 edges for each micro-batch size) small;
    8 tokens, the paper's choice, where the sequence is long enough for finer cuts to make no difference."""
    finest = 8 if seq_len >= 128 else 1
    allowed = max(64, 4096 // min(batch, 16))
    unit = 1
    while seq_len % (2 * unit) == 0 and (unit < finest or seq_len // unit > allowed):
        unit *= 2
    return unit


# ---- the entrance --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Request:
    model: GPTConfig
    cluster: Cluster
    costs: CostModel
    batch: int
    seq_len: int
    planner: str
    schedules: tuple[str, ...]
    chunks: int
    ranks: tuple[int, ...]
    limit: int
    unit: int
    partition: Cut | None
    slicing: tuple[Micro, ...] | None


def _one_of(name: str, value: Any, known: Sequence[str], later: Sequence[str] = ()) -> str:
    if value not in known:
        note = f" ({value} is planned, not built yet)" if value in later else ""
        raise InvalidValueError(f"{name} is {value!r}{note}: one of {', '.join(known)} would be right")
    return str(value)


def _check_costs(costs: Any, model: GPTConfig, cluster: Cluster) -> CostModel:
    if costs is None:
        return CostModel.analytic(model, cluster)
    if not isinstance(costs, CostModel):
        raise InvalidTypeError(f"costs is {type(costs).__name__}: a CostModel would be right")
    for name in ("n_embd", "n_head", "vocab_size"):
        if costs.model is not None and getattr(costs.model, name) != getattr(model, name):
            raise InvalidValueError(f"costs are of a model with {name} = {getattr(costs.model, name)}, the model to plan has "
                                    f"{getattr(model, name)}: profile this model")
    return costs


def _check_stages(model: GPTConfig, cluster: Cluster, stages: Any, chunks: int, partition: Cut | None) -> tuple[int, ...]:
    """Numbers of ranks to consider."""
    if partition is not None:
        if len(partition) % chunks:
            raise InvalidValueError(f"partition has {len(partition)} stages, no multiple of chunks = {chunks}")
        ranks = len(partition) // chunks
        if stages is not None and whole("stages", stages) != ranks:
            raise InvalidValueError(f"stages is {stages}, but partition has {len(partition)} stages for {chunks} chunks a rank")
        stages = ranks
    if stages is not None:
        ranks = whole("stages", stages)
        if ranks * chunks > model.num_blocks:
            raise InvalidValueError(f"stages is {ranks}" + (f" of {chunks} chunks" if chunks > 1 else "") + f": the model has "
                                    f"{model.num_blocks} blocks, so at most {model.num_blocks // chunks} would be right")
        if ranks > cluster.num_devices and not cluster.is_local:
            raise InvalidValueError(f"stages is {ranks}: the cluster has {cluster.num_devices} devices")
        return (ranks,)
    ranks = max(1, min(cluster.num_devices, model.num_blocks // chunks))
    halves = [ranks]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return tuple(halves)


def _check(model: Any, cluster: Any, batch: Any, seq_len: Any, costs: Any, planner: Any, schedule: Any, stages: Any,
           chunks: Any, memory_bytes: Any, granularity: Any, partition: Any, slicing: Any, parallel: dict[str, Any]) -> _Request:
    """The request, with everything that is wrong with it found before any work."""
    if not isinstance(model, GPTConfig):
        raise InvalidTypeError(f"model is {type(model).__name__}: a GPTConfig would be right")
    if not isinstance(cluster, Cluster):
        raise InvalidTypeError(f"cluster is {type(cluster).__name__}: a Cluster would be right")
    batch, seq_len = whole("batch", batch), whole("seq_len", seq_len)
    if seq_len > model.block_size:
        raise InvalidValueError(f"seq_len is {seq_len}: at most the model's block_size = {model.block_size} would be right")
    for name, value in parallel.items():
        if value is not None and whole(name, value) != 1:
            raise InvalidValueError(f"{name} is {value}: this version plans pipelines alone, 1 would be right")
    planner = _one_of("planner", planner, _PLANNERS, ("autopipe", "dawnpiper", "bmpipe"))
    schedule = _one_of("schedule", schedule, _SCHEDULES, ("zb-h1", "zb-h2", "zb-v", "chimera", "hanayo", "pipedream"))
    if chunks is None:
        chunks = 2 if schedule == "interleaved" else 1
    chunks = whole("chunks", chunks)
    if chunks > 1 and schedule not in ("interleaved", "auto"):
        raise InvalidValueError(f"chunks is {chunks}, but schedule {schedule} has one stage a rank: interleaved would be right")
    names = ("interleaved",) if chunks > 1 else _AUTO if schedule == "auto" else (schedule,)
    if schedule == "auto" and planner == "uniform" and chunks == 1:
        names = ("1f1b",)
    checked = None if partition is None else check_partition(partition, model)
    ranks = _check_stages(model, cluster, stages, chunks, checked)
    cut = None if slicing is None else check_slicing(slicing, batch, seq_len)
    for q, (_, lengths) in enumerate(cut or ()):
        if schedule == SLICED and len(lengths) > 1:
            raise InvalidValueError(f"slicing[{q}] has {len(lengths)} slices, but schedule {SLICED} has whole sequences")
    if chunks > 1:
        micros = batch if cut is None else len(cut)
        ranks = tuple(r for r in ranks if micros % r == 0) if stages is None and checked is None else ranks
        if any(micros % r for r in ranks):
            raise InvalidValueError(f"schedule interleaved has {micros} micro-batches for {ranks[0]} ranks: a multiple of the "
                                    "ranks would be right")
    limit = int(real("memory_bytes", cluster.memory_bytes if memory_bytes is None else memory_bytes))
    if granularity is None:
        unit = _choose_granularity(seq_len, batch)
    else:
        unit = whole("granularity", granularity)
        if seq_len % unit:
            raise InvalidValueError(f"granularity is {unit}, which does not divide seq_len = {seq_len}")
    return _Request(model, cluster, _check_costs(costs, model, cluster), batch, seq_len,
                    "terapipe" if planner == "auto" else planner, names, chunks, ranks, limit, unit, checked, cut)


def _uniform(judge: Judge, request: _Request) -> Candidate:
    """Megatron's default: layers divided evenly, whole sequences, weight gradients at once; asks no cost anything."""
    cut = request.partition or tuple(even_partition(request.model, judge.ranks * judge.chunks))
    slicing = request.slicing or ((1, (request.seq_len,)),) * request.batch
    name = "1f1b" if "1f1b" in request.schedules else request.schedules[0]
    return judge.judge(name, cut, slicing, pending=0)


def _first_look(judge: Judge, request: _Request) -> float:
    """Seconds of a quick plan: which number of ranks deserves the search."""
    stages = judge.ranks * judge.chunks
    slicing = request.slicing
    if slicing is None and request.schedules[0] == SLICED:
        slicing = ((1, (request.seq_len,)),) * request.batch
    if slicing is None:
        one = planners.slice_tokens(StageCost(judge.costs, judge.model, stages), stages, seq_len=request.seq_len,
                                    granularity=request.unit)
        slicing = ((1, tuple(int(n) for n in one.lengths)),) * request.batch
    quick = judge.judge(request.schedules[0], balanced(judge, slicing, stages), slicing)
    return min(quick.seconds, _uniform(judge, request).seconds)


def _choose(request: _Request) -> tuple[Judge, Candidate, list[tuple[str, float]]]:
    """The judge of the chosen number of ranks, the candidate, and what it was compared with."""
    judges = [Judge(request.model, request.costs, ranks, request.chunks, request.limit) for ranks in request.ranks]
    if request.planner == "uniform":
        judge = judges[0]
        found = _uniform(judge, request)
        if not judge.fits(found):
            raise judge.refuse()
        return judge, found, []
    compared: list[tuple[str, float]] = []
    looks = [_first_look(judge, request) for judge in judges] if len(judges) > 1 else [0.0]
    best: tuple[Judge, Candidate] | None = None
    for _, judge in sorted(zip(looks, judges, strict=True), key=lambda pair: pair[0]):
        even = _uniform(judge, request)
        choice = search(judge, request.schedules, request.batch, request.seq_len, request.unit, request.partition,
                        request.slicing)
        if judge.fits(even) and (choice is None or even.seconds < choice.seconds):
            choice = even
        compared.append((f"uniform on {judge.ranks} ranks", even.seconds))
        if choice is not None:                                 # other numbers of ranks: only if this one does not fit
            best = (judge, choice)
            break
    if best is None:
        raise min((j for j in judges if j.shortest is not None), key=lambda j: j.shortest or (0, 0, 0)).refuse()
    judge, found = best
    for name in request.schedules:
        if name != found.schedule:
            other = judge.judge(name, found.partition, found.slicing, found.pending)
            compared.append((f"{name} with these slices", other.seconds))
    return judge, found, compared


def plan(model: GPTConfig, cluster: Cluster, batch: int, seq_len: int, costs: CostModel | None = None, *,
         planner: str = "auto", schedule: str = "auto", stages: int | None = None, data_parallel: int | None = None,
         tensor_parallel: int | None = None, chunks: int | None = None, memory_bytes: float | None = None,
         granularity: int | None = None, partition: Sequence[tuple[int, int]] | None = None,
         slicing: int | Sequence[tuple[int, Sequence[int]]] | None = None) -> Plan:
    """Plan one training step of ``batch`` sequences of ``seq_len`` tokens.

    Args:
        costs: a CostModel; None: ``CostModel.analytic(model, cluster)``.
        planner: "terapipe": exact token (and batch) slicing for equal stages, stages balanced on the costs of the blocks,
            then a descent on slice and stage boundaries judged by simulating the real program (embedding, head, optimizer
            and messages included). "uniform": layers divided evenly, whole sequences. "auto": terapipe.
        schedule: "gpipe", "1f1b", "seq1f1b", "interleaved" (with ``chunks`` stages a rank), "sliced-1f1b" (AutoPipe's:
            whole sequences, the first forwards in halves along the batch), "auto": the fastest of the first
            three. The uniform planner's "auto" is 1f1b.
        stages: ranks; None: the fastest of num_devices, a half of them, a quarter, ...
        memory_bytes: limit of each rank; None: the cluster's devices'.
        granularity: slice lengths that are planned are multiples of this many tokens; None: chosen so that planning stays
            under a second.
        partition: [(first_block, last_block + 1), ...] of every virtual stage, instead of a planned one.
        slicing: [(micro_batch, [slice lengths]), ...], or M: one sequence a micro-batch, M slices, instead of a planned one.

    Raises:
        ValueError: the request contradicts itself or the model; names the argument, its value and what would be right.
        InfeasibleError: no plan that was found fits the memory; names the rank and the bytes it is short.
    """
    start = time.perf_counter()
    request = _check(model, cluster, batch, seq_len, costs, planner, schedule, stages, chunks, memory_bytes, granularity,
                     partition, slicing, {"data_parallel": data_parallel, "tensor_parallel": tensor_parallel})
    judge, found, compared = _choose(request)
    durations = with_halves(lambda cut: request.costs.durations(partition=found.partition, slicing=cut, model=model),
                            found.slicing, found.schedule)
    program = judge.program(found, durations)
    program.check()
    line = program.simulate(durations)
    return Plan(
        model=model, cluster=cluster, batch=request.batch, seq_len=request.seq_len, planner=request.planner,
        schedule=found.schedule, ranks=judge.ranks, chunks=judge.chunks, stages=list(found.partition),
        slicing=[(b, list(lengths)) for b, lengths in found.slicing], program=program, durations=durations,
        step_time_s=float(line.makespan_s), lower_bound_s=float(line.lower_bound_s), compared=compared,
        peak_memory_bytes=peak_memory(model, found.partition, found.slicing, program), memory_limit_bytes=request.limit,
        bubbles={k: float(v) for k, v in line.bubbles.items()}, busy_s=[float(x) for x in line.busy_s],
        granularity=request.unit, recompute=[False] * model.num_blocks, swap=[0] * model.num_blocks,
        planning_time_s=time.perf_counter() - start)
