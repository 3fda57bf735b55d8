"""A :class:`Plan`: what each rank does, what it should take, and how it is kept in a file. `plan`, which makes one, is in
planning/entrance.py: whoever runs a plan needs no planner.
"""
from __future__ import annotations

import hashlib
import html
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidValueError
from ._files import read_json, write_json
from .backend import choose, heads_refused
from .config import (
    LONG,
    Cluster,
    GPTConfig,
    brief,
    counted,
    flag,
    gap_above,
    html_table,
    human_gap,
    human_seconds,
    no_divisor,
    real,
    whole,
)
from .cost import PHASES
from .explain import explain, format_slicing, memory_by_rank, restriction
from .exports import megatron_flags, torch_csv
from .links import rank_of
from .partition import check_partition, check_slicing
from .schedule import Timeline, idle_causes
from .schedules import CHIMERA, PIPEDREAM, SLICED, ZIGZAG, Program

__all__ = ["Plan"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """`from terapipe_c.plan import plan`, of scripts, and pickles of before it moved: a rank asks for no such thing."""
        if name != "plan":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .planning.entrance import plan

        return plan


_FORMAT, _VERSION = "terapipe_c.plan", 3      # 1: before replicas, recomputation and swap; 2: before the checksum


# ---- the plan ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A value: what runs where, in which order, and what it should take. Made by :func:`plan` or :meth:`load`.

    Two plans are equal if they make the ranks do the same: model, batch, partition, slicing, schedule and program;
    predictions and planning time do not count. With ``data_parallel`` replicas the ranks, slices, program, memory and
    bubbles are those of one replica; ``batch``, ``step_time_s`` and ``tokens_per_s`` are of all.

    Attributes:
        schedule: a name of ``plan(schedule=...)``; "own": of :meth:`with_program`.
        ranks, chunks, data_parallel: of a replica, virtual stages of each rank, replicas of the whole pipeline.
        stages: (first block, last block + 1) of each virtual stage.
        slicing: (sequences in the micro-batch, slice lengths in tokens) of each micro-batch of one replica: batch / data_parallel
            sequences in all.
        recompute, swap: per block, whether its activations are made again before its backward, and bytes of a micro-batch that
            leave the device and come back.
        program: lowered, backward split into I and W. durations: seconds of its instructions, [virtual stages, units].
        step_time_s: predicted. busy_s: one per rank. bubbles: idle seconds by cause, all ranks together.
        lower_bound_s: no order of these operations on these ranks is faster.
        slicing_bound_s: no slicing of its micro-batches on its stages, in any order, is faster; None where that is not known.
        peak_memory_bytes, memory_limit_bytes: exact, one per rank of one thread; of each rank, None: none. On the CPU each thread
            more (``launch(threads_per_rank=...)``) has room of its own for its kernels, which launch holds against the limit and a
            report predicts.
        granularity: slice lengths that were planned are multiples of it.
        compared: (what, predicted seconds) of alternatives. search_log: what the joint search tried, and why it stopped.
        backend, dtype: what its costs and memory are of (one for "cuda" runs there alone), and of activations.
        device, reproducible: of the costs that its seconds are from: a measured GPU's name, "" where none was, and its products.
        cost_source: what these were, their ``source`` ("measured" by ``tp.profile``, "analytic": by first principles, nothing
            measured; "table", "samples"), of analytic ones of the plan's own cluster with its devices' rate: "analytic, 60 GFLOP/s
            a device"; "": an older plan's.
        shard_optimizer: each of the replicas has AdamW's moments of a part of its stages' parameters, and updates that part alone.
    """

    model: GPTConfig
    cluster: Cluster
    batch: int
    seq_len: int
    planner: str
    schedule: str
    ranks: int
    chunks: int
    stages: list[tuple[int, int]]
    slicing: list[tuple[int, list[int]]]
    program: Program
    durations: dict[str, NDArray[np.float64]]
    step_time_s: float
    lower_bound_s: float
    peak_memory_bytes: list[int]
    memory_limit_bytes: int | None
    bubbles: dict[str, float]
    busy_s: list[float]
    planning_time_s: float
    granularity: int = 1
    recompute: list[bool] = field(default_factory=list)
    swap: list[int] = field(default_factory=list)
    compared: list[tuple[str, float]] = field(default_factory=list)
    data_parallel: int = 1
    search_log: list[str] = field(default_factory=list)
    slicing_bound_s: float | None = None
    backend: str = "cpu"
    dtype: str = "float32"
    device: str = ""
    reproducible: bool | None = None
    cost_source: str = ""
    shard_optimizer: bool = False

    @property
    def gap(self) -> float:
        """How far the predicted step may be from the best order: (step - bound) / bound.

        The bound holds for every order of THIS plan's operations on these ranks (partition and slicing as they are);
        other slicings may have a lower one. Infinite where a step takes time and the bound is 0: where the work is free and sums of
        gradients are not.
        """
        return gap_above(self.step_time_s, self.lower_bound_s)

    @property
    def slicing_gap(self) -> float | None:
        """The same for every slicing in multiples of the granularity (``slicing_bound_s``); None where that is not known.

        Stages and sizes of micro-batches are as they are; exact shortest paths over the cuts, see
        ``planners.slicing_bound``. None for sliced-1f1b, chimera and pipedream, and where there are too many cuts to look at.
        """
        bound = self.slicing_bound_s
        return None if bound is None or bound <= 0 else (self.step_time_s - bound) / bound

    @property
    def tokens_per_s(self) -> float:
        """Predicted."""
        return self.batch * self.seq_len / self.step_time_s if self.step_time_s > 0 else float("inf")

    @property
    def copies(self) -> int:
        """Of the model in each replica: 2 in schedule chimera. ``stages`` and ``recompute`` are of one of them."""
        return self.program.copies

    @property
    def num_devices(self) -> int:
        """Of all replicas."""
        return self.ranks * self.data_parallel

    @property
    def why_not_executable(self) -> str:
        """What of it `launch` does not run as it is, with the bits of one device; empty if it runs."""
        if self.copies > 1 and not self.why_not_at_all:
            return (f"schedule {self.schedule} has two copies of the model, which add their gradients in another order than one "
                    "device does, which launch(..., reproducible=False), or terapipe train --fast, allows")
        if "U" in self.program.counts and not self.why_not_at_all:     # whatever it is called
            return (f"schedule {self.schedule} updates after every micro-batch, by gradients of weights that others have updated "
                    "since, which one device does not, and which launch(..., reproducible=False), or terapipe train --fast, allows")
        if self.data_parallel > 1 and not self.why_not_at_all:
            return (f"data_parallel = {self.data_parallel}: replicas add their gradients in another order than one device does, "
                    "which launch(..., reproducible=False), or terapipe train --fast, allows")
        return self.why_not_at_all

    @property
    def why_not_at_all(self) -> str:
        """What this package's engine cannot do of it, not even with ``reproducible=False``; empty if there is no such thing."""
        if why := heads_refused(self.model, self.backend, self.dtype):
            return why
        reasons = []
        whole: list[int] = []
        if any(self.swap):
            from .planning.block_bytes import saved_bytes

            slicing = tuple((b, tuple(lengths)) for b, lengths in self.slicing)
            whole = saved_bytes(self.model, slicing, choose(self.backend, self.dtype))
        for block, bytes_, can in zip(self.model.blocks, self.swap, whole, strict=False):
            if bytes_ not in (0, can):                         # of another version
                reasons.append(f"a swap of {bytes_} bytes of {block.name}: all {can} or none would be right")
                break
        return f"the engine does not execute {', '.join(reasons)}" if reasons else ""

    @property
    def executable(self) -> bool:
        """Whether `launch` runs it as it is, to the bits of one device; ``why_not_executable`` says why not."""
        return not self.why_not_executable

    def timeline(self) -> Timeline:
        """The simulated step, with the plan's exact peaks of memory."""
        line = self.program.simulate(self.durations)
        line.peak_memory_bytes = np.array(self.peak_memory_bytes, np.int64)
        return line

    def with_program(self, program: Program) -> Plan:
        """This plan in an order of your own, proved, simulated and sized anew: `launch` runs it.

        program: of F and B (or I and W) of as many ranks, stages, micro-batches and slices; messages that it has are made anew.
        What the plan recomputes or swaps it still does. ``schedule`` is then "own". ScheduleError where it is no order that the
        engine runs, InfeasibleError where it needs more memory than the plan's limit.
        """
        from .planning.own_program import with_program

        return with_program(self, program)

    # ---- as a value ----

    def _identity(self) -> dict[str, Any]:
        replicas = {"data_parallel": self.data_parallel} if self.data_parallel > 1 else {}   # digests of version 1 hold
        where = {"backend": self.backend, "dtype": self.dtype} if self.backend != "cpu" else {}
        shards = {"shard_optimizer": True} if self.shard_optimizer else {}
        return {**replicas, **where, **shards, "model": self.model.to_dict(), "batch": self.batch, "seq_len": self.seq_len,
                "schedule": self.schedule, "ranks": self.ranks, "chunks": self.chunks, "stages": [list(s) for s in self.stages],
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
        measured: dict[str, Any] = {} if self.reproducible is None else {"reproducible": self.reproducible}
        measured |= {"device": self.device} if self.device else {}
        data = {"format": _FORMAT, "version": _VERSION, "digest": self.digest, **self._identity(), **measured,
                "cluster": self.cluster.to_dict(), "planner": self.planner,
                "durations": {k: _thin(v) for k, v in self.durations.items()}, "step_time_s": self.step_time_s,
                "lower_bound_s": self.lower_bound_s, "peak_memory_bytes": list(self.peak_memory_bytes),
                "memory_limit_bytes": self.memory_limit_bytes, "bubbles": dict(self.bubbles), "busy_s": list(self.busy_s),
                "planning_time_s": self.planning_time_s, "granularity": self.granularity,
                "compared": [list(row) for row in self.compared], "data_parallel": self.data_parallel,
                "search_log": list(self.search_log), "slicing_bound_s": self.slicing_bound_s}
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        told = {"cost_source": self.cost_source} if self.cost_source else {}    # not in the sum: older versions read the rest
        return {**data, **told, "checksum": hashlib.sha256(text.encode()).hexdigest()[:16]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_dict`. The program is proved again; a ValueError says what does not fit."""
        try:
            model = GPTConfig.from_dict(data["model"])
            batch, seq_len = whole("batch", data["batch"]), whole("seq_len", data["seq_len"])
            ranks, chunks = whole("ranks", data["ranks"]), whole("chunks", data["chunks"])
            stages = check_partition(data["stages"], model)
            replicas = whole("data_parallel", data.get("data_parallel", 1))
            where = choose(data.get("backend", "cpu"), data.get("dtype"))
            exact = data.get("reproducible")
            if batch % replicas:
                raise no_divisor("data_parallel", replicas, "batch", batch)
            slicing = check_slicing([(b, lengths) for b, lengths in data["slicing"]], batch // replicas, seq_len)
            program = Program.parse(data["program"])
            program.check()
            _check_program(data["schedule"], program, tuple(len(lengths) for _, lengths in slicing))
            shape = (program.num_stages, sum(len(lengths) for _, lengths in slicing))
            durations = {k: _spread(f"durations[{k!r}]", v, shape) for k, v in data["durations"].items()}
            for name in ("recompute", "swap"):
                if len(data[name]) not in (0, model.num_blocks):
                    raise InvalidValueError(f"{name} has {len(data[name])} entries: one for each of the {model.num_blocks} "
                                            "blocks would be right")
            if len(stages) != ranks * chunks or program.num_ranks != ranks or program.num_stages != len(stages) * program.copies:
                raise InvalidValueError(f"{len(stages)} stages and a program of {program.num_ranks} ranks for {ranks} ranks "
                                        f"of {chunks} chunks")
            _check_predictions(data, ranks, durations)
            loaded = cls(
                model=model, cluster=Cluster.from_dict(data["cluster"]), batch=batch, seq_len=seq_len,
                planner=str(data["planner"]), schedule=str(data["schedule"]), ranks=ranks, chunks=chunks,
                stages=list(stages), slicing=[(b, list(lengths)) for b, lengths in slicing], program=program,
                durations=durations, bubbles={str(k): float(v) for k, v in data["bubbles"].items()},
                peak_memory_bytes=[int(x) for x in data["peak_memory_bytes"]], busy_s=[float(x) for x in data["busy_s"]],
                compared=[(str(k), float(v)) for k, v in data["compared"]], recompute=[bool(x) for x in data["recompute"]],
                swap=[whole(f"swap[{i}]", x, 0) for i, x in enumerate(data["swap"])], data_parallel=replicas,
                search_log=[str(line) for line in data.get("search_log", [])],
                slicing_bound_s=data.get("slicing_bound_s"), backend=where.name, dtype=where.dtype,
                device=str(data.get("device", "")), reproducible=None if exact is None else flag("reproducible", exact),
                cost_source=data.get("cost_source", ""),
                shard_optimizer=flag("shard_optimizer", data.get("shard_optimizer", False)),
                memory_limit_bytes=data["memory_limit_bytes"], granularity=data["granularity"],
                **{k: float(data[k]) for k in ("step_time_s", "lower_bound_s", "planning_time_s")})
        except KeyError as error:
            raise InvalidValueError(f"the plan lacks {error.args[0]!r}") from None
        except (TypeError, AttributeError, IndexError) as error:
            raise InvalidValueError(f"the plan is malformed: {error}") from None
        if loaded.digest != data.get("digest"):
            raise InvalidValueError(f"the plan's digest is {data.get('digest')!r}, but its content's is {loaded.digest!r}")
        if "checksum" in data or data.get("version") not in (1, 2):
            found = loaded.to_dict()["checksum"]               # the digest is of what the ranks do alone
            if found != data.get("checksum"):
                raise InvalidValueError(f"the plan's checksum is {data.get('checksum')!r}, but its content's is {found!r}: some of "
                                        "its predictions is another one than was saved")
        return loaded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what :meth:`save` wrote; a ValueError names the file if it is broken, foreign or altered."""
        return cls._of_bytes(path, None)

    @classmethod
    def _of_bytes(cls, path: str | os.PathLike[str], raw: bytes | None) -> Plan:
        data = read_json(path, _FORMAT, _VERSION, "a plan of terapipe_c", 1, raw)
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise InvalidValueError(f"{os.fspath(path)!s} is damaged: {error}") from None

    # ---- for people ----

    def explain(self) -> str:
        """A page: what runs where, what it should take, where the time goes, what else was looked at, what the search tried."""
        return explain(self)

    def __repr__(self) -> str:
        replicas = f" x {self.data_parallel} replicas" if self.data_parallel > 1 else ""
        by = f" by {self.cost_source.partition(',')[0]} costs" if self.cost_source else ""
        return (f"<Plan {self.digest}: {counted(self.ranks, 'rank')}{replicas}, {self.schedule}, "
                f"{format_slicing(self.slicing)}, step {human_seconds(self.step_time_s)}{by}, gap {human_gap(self.gap)}"
                f"{'' if self.executable else f', {restriction(self)}'}>")

    def _repr_html_(self) -> str:
        picture = self.timeline()._repr_html_()
        told = idle_causes(self.bubbles, self.ranks * self.step_time_s)
        idle = sum(told.values()) / (self.ranks * self.step_time_s) if self.step_time_s > 0 else 0.0
        table = html_table(f"Plan {self.digest}", [
            ("ranks", f"{self.ranks}" + (f" of {self.chunks} chunks" if self.chunks > 1 else "")
             + (f", {self.data_parallel} replicas" if self.data_parallel > 1 else "")
             + (", the optimizer sharded" if self.shard_optimizer else "")),
            ("schedule", self.schedule), ("slices", format_slicing(self.slicing)),
            ("step", f"{human_seconds(self.step_time_s)} (bound {human_seconds(self.lower_bound_s)}, gap "
                     f"{human_gap(self.gap)})"),
            *([("costs", self.cost_source)] if self.cost_source else []), ("idle", f"{100 * idle:.3g} %"),
            ("peak memory", memory_by_rank(self.peak_memory_bytes))])
        return f"{table}{picture}<details><summary>explain</summary><pre>{html.escape(self.explain())}</pre></details>"

    def to_torch_csv(self) -> str:
        """The schedule in torch.distributed.pipelining's CSV, of replicas that of each; a ValueError where it has token slices,
        recomputation or swap."""
        return torch_csv(self)

    def to_megatron(self) -> str:
        """Megatron-LM's flags for this plan, for a shell; a ValueError names what Megatron has no word for. Tokenizer and optimizer
        are yours to add; without biases its LayerNorms still have theirs, and its GELU is the exact one."""
        return megatron_flags(self)


def _check_program(schedule: Any, program: Program, slices: tuple[int, ...]) -> None:
    """The program is of these slices, and updates, or has copies of the model, guests, halves and its stages, as the schedule says:
    ``emulate`` asks it what takes how long, and whoever reads the plan what runs."""
    own = program.slices
    if own != slices:
        micro = next((m for m, (one, other) in enumerate(zip(own, slices, strict=False)) if one != other), None)
        what = f"{len(own)} micro-batches, the slicing {len(slices)}" if micro is None else \
            f"{counted(own[micro], 'slice')} of micro-batch {micro}, the slicing {slices[micro]}"
        raise InvalidValueError(f"the program has {what}: as many would be right")
    if (schedule == PIPEDREAM) != ("U" in program.counts):
        which = "no update by a micro-batch (U)" if schedule == PIPEDREAM else f"updates by micro-batches (U), as {PIPEDREAM}'s has"
        raise InvalidValueError(f"schedule is {brief(schedule)} and the program has {which}: that of its program would be right")
    if (schedule == CHIMERA and program.copies == 1) or (schedule not in (CHIMERA, "own") and program.copies > 1):
        copies = "one copy" if program.copies == 1 else f"{program.copies} copies"
        raise InvalidValueError(f"schedule is {brief(schedule)} and the program has {copies} of the model: that of its program "
                                "would be right")
    halves = program.counts["F"] > program.num_stages * sum(slices)
    for what, has, name in (("guests", "SE" in program.counts, "bpipe"), ("forwards in halves", halves, SLICED)):
        if has and schedule not in (name, "own"):
            raise InvalidValueError(f"schedule is {brief(schedule)} and the program has {what}, as {name}'s has: that of its "
                                    "program would be right")
    home = list(program.rank_of)
    if schedule not in (CHIMERA, "own") and home != rank_of(program.num_ranks, program.num_stages, schedule in ZIGZAG):
        raise InvalidValueError(f"schedule is {brief(schedule)} and the program's stages are on ranks {brief(home)}: that of its "
                                "program would be right")


def _check_predictions(data: dict[str, Any], ranks: int, durations: dict[str, NDArray[np.float64]]) -> None:
    """What a plan says of itself beside what it makes the ranks do."""
    def check(name: str, value: Any) -> None:
        if isinstance(value, (bool, str)):
            raise InvalidValueError(f"{name} is {brief(value)}: a number would be right")
        real(name, value, zero=True)

    for name in ("step_time_s", "lower_bound_s", "planning_time_s"):
        check(name, data[name])
    for name in ("memory_limit_bytes", "slicing_bound_s"):
        if data.get(name) is not None:
            check(name, data[name])
    if not isinstance(data["planner"], str):
        raise InvalidValueError(f"planner is {data['planner']!r}: a name would be right")
    if not isinstance(data.get("cost_source", ""), str):
        raise InvalidValueError(f"cost_source is {brief(data['cost_source'])}: words would be right")
    whole("granularity", data["granularity"])
    for r, value in enumerate(data["peak_memory_bytes"]):
        whole(f"peak_memory_bytes[{r}]", value, 0)
    for name in ("peak_memory_bytes", "busy_s"):
        if len(data[name]) != ranks:
            raise InvalidValueError(f"{name} has {len(data[name])} entries: one for each of the {ranks} ranks would be right")
        for r, value in enumerate(data[name]):
            check(f"{name}[{r}]", value)
    for i, (_, value) in enumerate(data["compared"]):
        check(f"compared[{i}]", value)
    for cause, value in data["bubbles"].items():
        check(f"bubbles[{cause!r}]", abs(value))              # one that is 0 may have been rounded below
    missing = [phase for phase in PHASES if phase not in durations]
    if missing:
        raise InvalidValueError(f"durations has no {missing[0]}: seconds of {', '.join(PHASES)} would be right")
    for name, seconds in durations.items():
        if not ((seconds >= 0).all() and (seconds <= LONG).all()):
            raise InvalidValueError(f"durations[{name!r}] is negative or above {LONG:g} somewhere: seconds from 0 on would be "
                                    "right")


def _spread(name: str, value: Any, shape: tuple[int, int]) -> NDArray[np.float64]:
    """[stages, units] of what `_thin` left."""
    try:
        return np.ascontiguousarray(np.broadcast_to(np.array(value, np.float64), shape))
    except (TypeError, ValueError, OverflowError):         # an int may be beyond all floats
        raise InvalidValueError(f"{name} is {brief(value)}: seconds, [{shape[0]} stages, {shape[1]} slices], would be "
                                "right") from None


def _thin(array: NDArray[np.float64]) -> list[list[float]]:
    """[stages, units] without rows or columns that repeat the first."""
    if (array == array[:, :1]).all():
        array = array[:, :1]
    if (array == array[:1]).all():
        array = array[:1]
    return [[float(x) for x in row] for row in array]
