"""What a slice costs: :class:`CostModel`, seconds of every block and phase as a function of (slice, context, batch).

Phases are what the engine executes: ``F`` forward, ``I`` gradient of the input, ``W`` gradient of the weights. One curve
for each (kind of block, phase):

    t(S, C, b) = P(b S) + b a3 S^2 / 2 + [C > 0] (a0 + b (a1 S + a2 C + a3 S C))

TeraPipe's eq. 9 with ``t_ctx(S, 0) = 0`` (the paper's intercept at C = 0 contradicts its own t(S, 0)). ``P`` is piecewise
linear through the measured rows; the pairs inside a slice are kept apart from it, so that it interpolates something
nearly straight and so that b sequences of S tokens are not charged for the pairs of one sequence of b S.
"""
from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _core, fit, gpu_weights
from ._core import InvalidTypeError, InvalidValueError
from ._files import read_json, write_json
from .backend import Backend, choose
from .config import KINDS, Cluster, GPTConfig, brief, flag, html_table, human_gap, human_seconds, one_of, real, whole
from .fit import Curve, at_least, check_rates, fit_and_judge, given_line, is_a, layer_table, merged, numbers, read_curve
from .links import Links, of_copies, timed_apart
from .partition import block_counts, block_params, check_partition, equal_lengths, even_partition, updated_params
from .roofline import bandwidth_of, curves_of

__all__ = ["CostModel", "Curve"]

PHASES = ("F", "I", "W")
REMADE = ("attention.R", "attention.R.apart", "ffn.R", "ffn.R.apart")     # tp_cost_remade of csrc/cost/cost.h
_PHASES_OF = {"fwd": ("F",), "bwd": ("I", "W"), "both": PHASES, "F": ("F",), "I": ("I",), "W": ("W",)}
_FORMAT, _VERSION = "terapipe_c.costs", 1
Slicing = Sequence[tuple[int, Sequence[int]]]
Float = NDArray[np.float64]
_Line = tuple[float, float]
_Gather = tuple[float, float, float]


# ---- slicing and partition as arrays -----------------------------------------------------------------------------------

def slicing_arrays(slicing: Slicing) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """``[(micro_batch, [lengths]), ...]`` as int32 arrays: batches [micros], slices [micros], lengths [units]."""
    batches = np.array([b for b, _ in slicing], np.int32)
    slices = np.array([len(lengths) for _, lengths in slicing], np.int32)
    return batches, slices, np.fromiter(itertools.chain.from_iterable(s for _, s in slicing), np.int32)


def filled(thin: Mapping[str, Any]) -> dict[str, Float]:
    """What :meth:`CostModel.timed` gives, every entry as float64 [stages, units]."""
    shape = thin["F"].shape
    full = {k: np.atleast_2d(v).T if np.ndim(v) == 1 and k != "comm" else v for k, v in thin.items()}
    return {k: np.ascontiguousarray(np.broadcast_to(v, shape), np.float64) for k, v in full.items()}


class CostModel:
    """Seconds of every block in every phase. Made by :meth:`analytic`, :meth:`from_table`, :meth:`from_samples`,
    :meth:`from_measurements` (what ``tp.profile`` calls) or :meth:`load`. A value: comparable and hashable.

    Attributes:
        source: "analytic", "table", "samples" or "measured".
        fit_error: mean relative error on samples that the fit did not see; 0 for a table, nan where nothing was held out.
        fit_errors: {"attention.F": (mean, worst), ...} of the same.
        model, seq_len, micro_batch: what was measured, if known.
        overhead_s: fixed seconds of an instruction.  optimizer_param_s, optimizer_stage_s: seconds of an update.
        optimizer_head_s: seconds that the head adds to its stage's update (it completes its weight's gradient there).
        head_pass: where rows wait for others, as on the CPU (csrc/stage/stage.h), what the head does then: seconds of a row's pass
            over its weights, rows that a pass costs at least, seconds of a row's weight gradient; None: none waits. The
            curves have a slice's own rows, ``durations`` what each instruction does.
        remade: {"attention.R": curve, ...} of what it takes to make a block's activations again (R) all slices at once, and
            "attention.R.apart" slice by slice, where keys are kept; what is missing is priced by what F takes.
        latency_s, byte_s: seconds of a message on the link, and of each byte in it (the ranks go on computing).
        copy_byte_s: seconds of a byte that each end of a message spends itself, out of a ring and into it.
        lent_byte_s: seconds of a byte between stages where its reader copies it out of the sender's memory, who spends none; None:
            such messages go through rings too.
        backend, dtype: "cuda" where they are of GPUs: plans' memory is a GPU's then. device: the measured one's name.
        reproducible: with which products it was measured, `launch`'s argument; None: that makes no difference, or is not known.
    """

    def __init__(self, curves: Mapping[tuple[str, str], Curve], *, source: str, tables: Float | None = None,
                 granularity: int = 1, overhead_s: float = 0.0, optimizer_param_s: float = 0.0,
                 optimizer_stage_s: float = 0.0, optimizer_head_s: float = 0.0, latency_s: float = 0.0, byte_s: float = 0.0,
                 copy_byte_s: float = 0.0, lent_byte_s: float | None = None, head_pass: Sequence[float] | None = None,
                 remade: Mapping[str, Curve] | None = None,
                 model: GPTConfig | None = None, seq_len: int | None = None, micro_batch: int = 1,
                 fit_error: float = math.nan, fit_errors: Mapping[str, tuple[float, float]] | None = None,
                 backend: str = "cpu", dtype: str | None = None, device: str = "", reproducible: bool | None = None) -> None:
        is_a("model", model, GPTConfig, none=True)
        for kind, phase in curves:
            if kind not in KINDS or phase not in PHASES:
                raise InvalidValueError(f"there is no curve {kind}.{phase}: kinds are {', '.join(KINDS)}; phases F, I, W")
        for name, curve in (remade or {}).items():
            fit.check_remade(one_of("remade", name, REMADE), curve)
        self.curves = {(k, p): curves.get((k, p), Curve()) for k in KINDS for p in PHASES}
        self.remade = {name: remade[name] for name in REMADE if name in remade} if remade else {}
        self.source = str(source)
        self.tables = np.zeros((0, 1, 1)) if tables is None else np.ascontiguousarray(tables, np.float64)
        self.granularity = whole("granularity", granularity)
        self.overhead_s = real("overhead_s", overhead_s, zero=True)
        self.optimizer_param_s = real("optimizer_param_s", optimizer_param_s, zero=True)
        self.optimizer_stage_s = real("optimizer_stage_s", optimizer_stage_s, zero=True)
        self.optimizer_head_s = real("optimizer_head_s", optimizer_head_s, zero=True)
        self.latency_s = real("latency_s", latency_s, zero=True)
        self.byte_s = real("byte_s", byte_s, zero=True)
        self.copy_byte_s = real("copy_byte_s", copy_byte_s, zero=True)
        self.lent_byte_s = None if lent_byte_s is None else real("lent_byte_s", lent_byte_s, zero=True)
        self.head_pass = None if head_pass is None else fit.head_pass_of(head_pass)
        self.model, self.seq_len = model, None if seq_len is None else whole("seq_len", seq_len)
        self.micro_batch = whole("micro_batch", micro_batch)
        self.fit_error = math.nan if fit_error != fit_error else real("fit_error", fit_error, zero=True)
        self.fit_errors = {k: (real(f"fit_errors of {k}", m, zero=True), real(f"fit_errors of {k}", w, zero=True))
                           for k, (m, w) in (fit_errors or {}).items()}
        where = choose(backend, dtype)
        self.backend, self.dtype, self.device = where.name, where.dtype, str(device)
        self.reproducible = None if reproducible is None else flag("reproducible", reproducible)
        self.tables.flags.writeable = False
        self._pack, self.file = self._packed(), ""    # file: which they were read from

    def _packed(self) -> tuple[Any, ...]:
        curves = [*self.curves.values(), *(self.remade.get(name, Curve()) for name in REMADE)]
        coefficients = np.array([(c.table, c.scale, c.pair_s, c.a0, c.a1, c.a2, c.a3) for c in curves])
        starts = np.cumsum([0] + [len(c.rows) for c in curves], dtype=np.int64)
        rows = np.array(list(itertools.chain.from_iterable(c.rows for c in curves)), np.float64)
        seconds = np.array(list(itertools.chain.from_iterable(c.seconds for c in curves)), np.float64)
        pack = (coefficients, starts, rows, seconds, self.tables, float(self.granularity), self.overhead_s,
                self.head_pass or (0.0, 0.0, 0.0))
        _core.cost_seconds(pack, 0, *np.zeros((3, 1)))        # refuses what does not fit together
        return pack

    # ---- constructors ----

    @classmethod
    def analytic(cls, model: GPTConfig, cluster: Cluster) -> CostModel:
        """Roofline, nothing measured: the larger of FLOPs over ``cluster.peak_flops`` and bytes over its memory bandwidth.

        Where the cluster names no peak: 60 GFLOP/s and 10 GB/s, one core's share; no bandwidth: a byte for every 150 FLOPs of
        the peak, at least 10 GB/s. float32. Linear layers: 2 FLOPs a
        multiply-add, weights read once an instruction. Attention pairs: 4 E FLOPs forward, 10 E backward (the scores are
        computed again). Head: a third of its work in F (logits), two thirds in I (both gradients). AdamW: 28 bytes a
        parameter. 5 us an instruction. Good for comparing plans, not for predicting a clock; ``tp.profile`` measures.
        """
        is_a("model", model, GPTConfig)
        check_rates(cluster)
        bandwidth = bandwidth_of(cluster)
        return cls(curves_of(model, cluster), source="analytic", overhead_s=5e-6, optimizer_param_s=28 / bandwidth,
                   optimizer_stage_s=20e-6, latency_s=cluster.near_link[0], byte_s=1 / cluster.near_link[1],
                   model=model, seq_len=model.block_size)

    @classmethod
    def from_table(cls, fwd: ArrayLike, bwd: ArrayLike, granularity: int = 8, *, model: GPTConfig | None = None,
                   latency_s: float = 0.0, byte_s: float = 0.0) -> CostModel:
        """A layer's times as tables: ``fwd[s, c]``, ``bwd`` seconds for ``s * granularity`` slice tokens after ``c * granularity``.

        float64 [n+1, n+1]; entries with s = 0 or s + c > n are not read. Attention and FFN take half of a layer each, I
        and W half of a backward each; embedding and head cost nothing. b sequences cost b times one. Between the points
        of the table: linear on triangles. model: what was measured, if known. latency_s, byte_s: as of a CostModel.
        """
        tables = [layer_table(name, table) for name, table in (("fwd", fwd), ("bwd", bwd))]
        if tables[0].shape != tables[1].shape:
            raise InvalidValueError(f"fwd has shape {tables[0].shape}, bwd {tables[1].shape}: one shape would be right")
        share = {"F": (0, 0.5), "I": (1, 0.25), "W": (1, 0.25)}
        curves = {(k, p): Curve(table=t, scale=scale) for k in ("attention", "ffn") for p, (t, scale) in share.items()}
        granularity = whole("granularity", granularity)
        return cls(curves, source="table", tables=np.stack(tables), granularity=granularity, latency_s=latency_s,
                   byte_s=byte_s, model=model, seq_len=granularity * (len(tables[0]) - 1), fit_error=0.0)

    @classmethod
    def from_samples(cls, samples: Iterable[Sequence[float]], *, model: GPTConfig | None = None,
                     latency_s: float = 0.0, byte_s: float = 0.0, ctx0: str = "zero") -> CostModel:
        """Fit TeraPipe's eq. 9 to ``(S, C, seconds)`` of one layer, forward and backward together.

        t(S, 0) goes through the samples with C = 0; the others give a0..a3 by least relative squares, a2 and a3 from 0 on.
        ctx0="linear" adds a0 + a1 S at C = 0 too, as the paper's programme does, and so misses those samples by as much.
        A sum does not say how it divides: F, I and W get a third each, attention all that depends on the context and half of the
        rest (more where a context saves more). model: what was measured, if known. latency_s, byte_s: as of a CostModel.
        """
        array = merged(samples, 3, "samples")[:, [0, 0, 1, 2]]     # rows = S: one sequence
        linear = one_of("ctx0", ctx0, ("zero", "linear")) == "linear"
        curve, errors = fit_and_judge(array, "samples", from_the_start=linear)
        longest = int((array[:, 1] + array[:, 2]).max())
        attention, ffn = fit.of_blocks(curve, longest)
        return cls({(k, p): c for k, c in (("attention", attention), ("ffn", ffn)) for p in PHASES}, source="samples",
                   latency_s=latency_s, byte_s=byte_s, model=model, seq_len=longest,
                   fit_error=float(errors.mean()) if len(errors) else math.nan,
                   fit_errors={"layer": (float(errors.mean()), float(errors.max()))} if len(errors) else None)

    @classmethod
    def from_measurements(cls, samples: Mapping[str, Mapping[str, Iterable[Sequence[float]]]], *,
                          optimizer: Mapping[str, float] | Iterable[Sequence[float]] | None = None, head_update_s: float = 0.0,
                          smooth: bool = False, head_pass: Sequence[float] | None = None,
                          comm: Mapping[str, float] | Iterable[Sequence[float]] | None = None, overhead_s: float = 0.0,
                          copy_byte_s: float = 0.0, lent_byte_s: float | None = None, model: GPTConfig | None = None,
                          seq_len: int | None = None, micro_batch: int = 1, backend: str = "cpu", dtype: str | None = None,
                          device: str = "", reproducible: bool | None = None) -> CostModel:
        """Fit every block and phase.

        Args:
            samples: ``{"attention": {"F": [(rows, S, C, seconds), ...], "I": ..., "W": ...}, "ffn": ..., ...}``: rows =
                S tokens x b sequences. Kinds embedding, attention, ffn, head; a missing one costs nothing, but attention
                and ffn need F, and may have R and "R.apart" (``remade``). Only attention may have samples with C > 0.
            optimizer: ``{"param_s": ..., "stage_s": ...}`` or [(parameters, seconds), ...].
            smooth: time never falls with the rows nor with the context, and time a row never rises; what the samples say else is
                taken for noise.
            head_update_s: what the head adds to its stage's update.
            comm: ``{"latency_s": ..., "byte_s": ...}`` or [(bytes, seconds), ...], time on the link.
            copy_byte_s, lent_byte_s, head_pass, model, seq_len, micro_batch, backend, dtype, device, reproducible: as of a
                CostModel.
            overhead_s: fixed seconds of an instruction that the samples do not hold.
        """
        if not isinstance(samples, Mapping) or not all(isinstance(phases, Mapping) for phases in samples.values()):
            raise InvalidTypeError(f"samples is {brief(samples)}: {{'attention': {{'F': [...], ...}}, 'ffn': ...}} would be right")
        curves: dict[tuple[str, str], Curve] = {}
        judged: dict[str, Float] = {}
        again: dict[str, Float] = {}
        for kind, phases in samples.items():
            if kind not in KINDS:
                raise InvalidValueError(f"samples have {kind!r}: one of {', '.join(KINDS)} would be right")
            for phase, rows in sorted(phases.items(), key=lambda item: str(item[0])):
                name = f"{kind}.{phase}"
                if phase not in PHASES and name not in REMADE:
                    raise InvalidValueError(f"samples have {name!r}: one of F, I, W, or {', '.join(REMADE)} would be right (B=I+W)")
                array = merged(rows, 4, name)
                if kind != "attention" and (array[:, 2] > 0).any():
                    raise InvalidValueError(f"{name} has a sample with context: only attention depends on it")
                if phase in PHASES:
                    curves[kind, phase], judged[name] = fit_and_judge(array, name, phase == "I", smooth)
                else:
                    again[name] = array
        for kind in ("attention", "ffn"):
            if (kind, "F") not in curves:
                raise InvalidValueError(f"samples lack {kind}.F")
        remade: dict[str, Curve] = {}
        for name, array in again.items():
            remade[name], judged[name] = fit.fit_remade(array, curves[name.split(".")[0], "F"])
        errors = np.concatenate([e for e in judged.values()])
        stage_s, param_s = given_line(optimizer, "optimizer", "stage_s", "param_s")
        latency_s, byte_s = given_line(comm, "comm", "latency_s", "byte_s")
        return cls(curves, source="measured", remade=remade, overhead_s=overhead_s, optimizer_param_s=param_s,
                   optimizer_stage_s=stage_s, optimizer_head_s=head_update_s, latency_s=latency_s, byte_s=byte_s,
                   copy_byte_s=copy_byte_s, lent_byte_s=lent_byte_s, head_pass=head_pass, model=model, seq_len=seq_len,
                   micro_batch=micro_batch, backend=backend, dtype=dtype, device=device, reproducible=reproducible,
                   fit_error=float(errors.mean()) if len(errors) else math.nan,
                   fit_errors={k: (float(e.mean()), float(e.max())) for k, e in judged.items() if len(e)})

    # ---- seconds ----

    def block_seconds(self, kind: str, phase: str, S: ArrayLike, C: ArrayLike = 0, b: ArrayLike = 1) -> Any:
        """Seconds of one block: ``kind`` embedding, attention, ffn or head; ``phase`` F, I, W, or fwd, bwd, both.

        S slice tokens after C context tokens of b sequences; scalars (a float comes back) or arrays that broadcast.
        """
        kind, phase = one_of("kind", kind, KINDS), one_of("phase", phase, _PHASES_OF)
        try:
            arrays = np.broadcast_arrays(*(numbers(name, x) for name, x in (("S", S), ("C", C), ("b", b))))
        except ValueError as error:
            raise InvalidValueError(f"S, C and b: {error}: one shape, or numbers, would be right") from None
        shape = arrays[0].shape
        slices, contexts, batches = (np.ascontiguousarray(x).reshape(-1) for x in arrays)
        for name, x, least in (("S", slices, 0), ("C", contexts, 0), ("b", batches, 1)):
            at_least(name, x, least)
        if self.curves[kind, _PHASES_OF[phase][0]].table >= 0:
            self._within_table(float((slices + contexts).max(initial=0)))
        total = np.zeros(slices.shape)
        for p in _PHASES_OF[phase]:
            total += _core.cost_seconds(self._pack, 3 * KINDS.index(kind) + PHASES.index(p), slices, contexts, batches)
        return float(total[0]) if shape == () else total.reshape(shape)

    def time(self, S: ArrayLike, C: ArrayLike = 0, phase: str = "both", batch: ArrayLike = 1) -> Any:
        """Seconds of ONE LAYER (attention + FFN) for S tokens after C of batch sequences; phase fwd, bwd (both gradients), both."""
        return self.block_seconds("attention", phase, S, C, batch) + self.block_seconds("ffn", phase, S, C, batch)

    def _within_table(self, tokens: float) -> None:
        longest = self.granularity * (self.tables.shape[1] - 1)
        if tokens > longest:
            raise InvalidValueError(f"the table ends at {longest} tokens, {tokens:g} were asked for")

    @property
    def has_tables(self) -> bool:
        """Whether some curve is a table (then planners get tables too)."""
        return any(c.table >= 0 for c in self.curves.values())

    def weighted_slice_cost(self, weights: ArrayLike, seq_len: int, granularity: int = 1, batch: int = 1,
                            fixed_s: float = 0.0) -> dict[str, Any]:
        """The planner's table of any mix of blocks: ``weights`` [4, 3] of (kind, phase), ``fixed_s`` more for each slice."""
        seq_len, granularity = whole("seq_len", seq_len), whole("granularity", granularity)
        batch = whole("batch", batch)
        if seq_len % granularity:
            raise InvalidValueError(f"seq_len is {seq_len}, no multiple of granularity = {granularity}")
        units = seq_len // granularity
        weights = np.ascontiguousarray(weights, np.float64)
        if self.has_tables:
            self._within_table(seq_len)
            table = _core.cost_table(self._pack, weights, float(batch), float(granularity), units)
            if fixed_s:
                s, c = np.arange(units + 1)[:, None], np.arange(units + 1)
                table += fixed_s * ((s > 0) & (s + c <= units))
            return {"table": table}
        G0, G1, a2, a3 = _core.cost_slices(self._pack, weights, float(batch), float(granularity), units)
        G0[1:] += fixed_s
        G1[1:] += fixed_s
        fit.refuse_negative(self.file, G1, a2, a3, batch, granularity)
        return {"G0": G0, "G1": G1, "a2": a2, "a3": a3}

    def slice_cost(self, seq_len: int, granularity: int = 1, phase: str = "both", batch: int = 1) -> dict[str, Any]:
        """One layer for ``tp.planners.slice_tokens``: slices of ``batch`` sequences of seq_len tokens, in units of ``granularity``
        tokens; phase as of :meth:`time`.

        ``{"G0": float64 [L + 1], "G1": float64 [L + 1], "a2", "a3"}`` with cost of i units after j: G0[i] if j = 0, else
        G1[i] + a2 j + a3 i j; or ``{"table": float64 [L + 1, L + 1]}``, t[s, c]. Seconds.
        """
        if not isinstance(phase, str) or phase not in _PHASES_OF:
            raise InvalidValueError(f"phase is {brief(phase)}: one of {', '.join(_PHASES_OF)} would be right")
        weights = np.zeros((4, 3))
        for p in _PHASES_OF[phase]:
            weights[1:3, PHASES.index(p)] = 1.0
        return self.weighted_slice_cost(weights, seq_len, granularity, batch)

    def slice_cost_batched(self, batch: int, seq_len: int, granularity: int = 1, phase: str = "both") -> list[Any]:
        """:meth:`slice_cost` for 1 to ``batch`` sequences at once, 65536 at most; index 0 is None."""
        return [None, *(self.slice_cost(seq_len, granularity, phase, b) for b in range(1, whole("batch", batch, most=65536) + 1))]

    @property
    def element_bytes(self) -> float:
        """Bytes of a number in a message."""
        return 2.0 if self.dtype == "bf16" else 4.0

    @property
    def where(self) -> Backend:
        """The backend that plans from these costs are for."""
        return Backend(self.backend, self.dtype)

    def on(self, backend: str, dtype: str | None = None) -> CostModel:
        """The same seconds, for plans of another backend's memory: of no device of that is it known."""
        where = choose(backend, dtype)
        waits = self.head_pass if where.name == "cpu" else None
        own: dict[str, Any] = {} if where.name == self.backend else {"device": "", "reproducible": None}
        if where.keeps_keys != self.where.keeps_keys:      # and makes something else again where they are kept
            own["remade"] = {name: curve for name, curve in fit.written(self.remade).items() if name != "attention.R.apart"}
        return self._but(**own, backend=where.name, dtype=where.dtype, head_pass=waits)

    def _but(self, **own: Any) -> CostModel:
        other = CostModel.from_dict({**self.to_dict(), **own})
        other.file = self.file
        return other

    @cached_property
    def even(self) -> CostModel:
        """The same where each instruction takes what its own rows take: for sums, and for what must not ask what waits."""
        return self if self.head_pass is None else self._but(head_pass=None)

    @cached_property
    def halved(self) -> CostModel:
        """The same for halves of forwards: which of their rows wait for the head's weight gradient goes by how many forwards are
        halved, so each half pays for its own."""
        return self if self.head_pass is None else self._but(head_pass=(*self.head_pass[:2], 0.0))

    @property
    def known_batch(self) -> int:
        """The most sequences a micro-batch that these costs can answer for: measured costs know what was measured."""
        return self.micro_batch if self.source == "measured" else 1 << 30

    @property
    def ends_byte_s(self) -> tuple[float, float]:
        """Seconds of a byte between stages that its sender spends, and its reader."""
        return (self.copy_byte_s, self.copy_byte_s) if self.lent_byte_s is None else (0.0, self.lent_byte_s)

    def message_s(self, rows: ArrayLike, n_embd: int) -> Any:
        """Seconds of a message of [rows, n_embd] numbers."""
        return self.latency_s + self.byte_s * self.element_bytes * n_embd * np.asarray(rows, np.float64)

    def tied_s(self, model: GPTConfig, links: Links = Links(),     # noqa: B008 (frozen)
               home: Sequence[int] = ()) -> tuple[float, float, float]:
        """Between the two ranks of a tied embedding, the first and the last: seconds of the gradients of some rows, which go to
        the head (what they take anyway, and more for each row), and of the new values, which come back. home: [stages] ranks."""
        latency_s, byte_s = (links.latency_s, links.byte_s) if links.closes(home) else (self.latency_s, self.byte_s)
        row_s = (byte_s + self.copy_byte_s) * self.element_bytes * model.n_embd
        return latency_s, row_s, latency_s + row_s * model.vocab_size

    def optimizer_s(self, params: ArrayLike) -> Any:
        """Seconds of one update of a stage with this many parameters."""
        return self.optimizer_stage_s + self.optimizer_param_s * np.asarray(params, np.float64)

    # ---- durations of a program ----

    def durations(self, program: Any = None, *, partition: Sequence[tuple[int, int]] | None = None,
                  slicing: Slicing | None = None, model: GPTConfig | None = None, links: Links | None = None) -> dict[str, Float]:
        """Seconds of every instruction: ``{"F", "I", "W", "OPT" (or "U"), "AR", "comm"}`` (and SF, SB, RF, RB where that end of
        a message spends time), each float64 [stages, units]. links: with a program, what its messages between nodes take (and
        "comm.back").

        units: the slices of all micro-batches in order. Without ``partition`` or ``slicing`` (``program.simulate(costs)``)
        the model's blocks are divided evenly by layers over the program's stages and every micro-batch is one sequence of
        ``seq_len`` tokens in slices as equal as can be; a model without a name is one layer a stage. A partition is of one copy
        of the model, and rows of a second one follow.
        """
        is_a("program", program, _core.Program, none=True)
        is_a("model", model, GPTConfig, none=True)
        model, copies = model or self.model, 1 if program is None else program.copies
        if slicing is None:
            if program is None:
                raise InvalidTypeError("durations() needs a slicing, or a program to take its counts from")
            length = self.seq_len or (model.block_size if model else 1024)
            slicing = [(1, equal_lengths(length, int(n))) for n in program.slices]
        else:
            from .partition import micros_of
            slicing = micros_of(slicing, 2**31 - 1)
        if partition is not None:
            if model is None:
                raise InvalidValueError("a partition needs a model, and these costs know none")
            counts = block_counts(model, check_partition(partition, model))
        elif program is None:
            raise InvalidTypeError("durations() needs a partition, or a program to take its stages from")
        elif model is None:
            counts = np.tile(np.array([0, 1, 1, 0], np.int32), (int(program.num_stages) // copies, 1))
        else:
            counts = block_counts(model, even_partition(model, int(program.num_stages) // copies))
        work, slices, each = self.stage_work(model, counts), self.slice_work(slicing), len(counts)
        updates = program is not None and "U" in program.counts
        homes = [None if links is None or program is None else (links, program.rank_of[c * each:][:each]) for c in range(copies)]
        return filled(of_copies([self.timed(work, slices, model, placed, copies, updates=updates) for placed in homes]))

    # The three parts of durations(), apart because a search changes one of them at a time.

    def stage_work(self, model: GPTConfig | None, counts: NDArray[np.int32]) -> tuple[NDArray[np.int32], Float]:
        """What depends on the partition: blocks [stages, 4], seconds of an update [stages]."""
        if model is None:
            return counts, np.zeros(len(counts))
        update_s = self.optimizer_s(updated_params(model, counts)) + self.optimizer_head_s * (counts[:, 3] > 0)
        return counts, np.asarray(update_s, np.float64)

    def slice_work(self, slicing: Slicing) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Float]:
        """What depends on the slicing: batches, slices [micros], lengths [units], rows [units]."""
        batches, slices, lengths = slicing_arrays(slicing)
        if self.has_tables:
            self._within_table(float(np.add.reduceat(lengths, np.cumsum(slices) - slices).max()))
        return batches, slices, lengths, lengths.astype(np.float64) * np.repeat(batches, slices)

    def timed(self, stages: tuple[NDArray[np.int32], Float],
              slices: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Float],
              model: GPTConfig | None, placed: tuple[Links, Sequence[int]] | None = None, copies: int = 1,
              prompt: NDArray[np.int32] | None = None, updates: bool = False) -> dict[str, Any]:
        """F, I, W, comm [stages, units]; OPT [stages] (or U [stages, units]); AR a number; SF, SB, RF, RB like comm where a
        message costs that end time. placed: the ranks' links and each stage's rank; where links differ, comm.back of the way
        back. copies: of the model, among which the slices are divided. prompt: [stages, 4], blocks whose weight gradients wait for
        no other slice's. updates: each micro-batch has its own (U), and OPT is nothing."""
        F, I, W, left_s = _core.cost_durations(self._pack, stages[0], *slices[:3], prompt, len(slices[1]) if updates else copies)
        if self.backend == "cuda":
            W = gpu_weights.seconds(self._pack, stages[0], *slices[:3], prompt, self.overhead_s)
        size = slices[3] * (self.element_bytes * model.n_embd if model else 0.0)
        head = stages[0][:, 3] > 0
        update = ({"U": stages[1][:, None] + np.outer(head, np.repeat(left_s, slices[1]))} if updates
                  else {"OPT": stages[1] + left_s[0] * head})
        out: dict[str, Any] = {"F": F, "I": I, "W": W, **update, "AR": 0.0,
                               "comm": np.repeat((self.latency_s + self.byte_s * size)[None], len(F), 0)}
        if model is not None and model.tie_weights and len(F) > 1:
            latency_s, row_s, values_s = self.tied_s(model, *placed or ())     # these come back with OPT
            out["AR"] = latency_s + row_s * float(slices[3].sum()) / copies + values_s
        if placed is not None and placed[0].far:
            out |= timed_apart(*placed, size, self.latency_s, self.byte_s)
        elif self.byte_s > 0.0:
            out["comm.latency"] = self.latency_s
        sent, read = self.ends_byte_s
        if read:
            copy = np.repeat((read * size)[None], len(F), 0)
            out |= dict.fromkeys(("SF", "SB", "RF", "RB") if sent else ("RF", "RB"), copy)
        return out

    def recompute_s(self, counts: NDArray[np.int32], slices: tuple[Any, ...], kept: bytes | None = None) -> Float:
        """R [stages, units] of these blocks [stages, 4]: what they do not keep, made again (kept: tp_cost_recompute)."""
        return _core.cost_recompute(self._pack, counts, slices[0], slices[1], slices[2], kept)

    @cached_property
    def remade_shares(self) -> dict[str, float]:
        """Of each kind whose R was measured: as much of F it takes at least (tp_cost_recompute), for bounds."""
        least: dict[str, float] = {}
        for name, rule in zip(REMADE, (3 / 4, max(0, 3 - self.where.keeps_keys) / 4, 1 / 2, 1 / 2), strict=True):
            kind, curve = name.split(".")[0], self.remade.get(name)
            share = rule if curve is None else fit.least_share(curve, self.curves[kind, "F"], rule / 2)
            least[kind] = min(least.get(kind, 1.0), share)
        return {kind: share for kind, share in least.items() if any(name.startswith(kind) for name in self.remade)}

    def judge(self, model: GPTConfig, ranks: int, chunks: int, rings: tuple[_Line, _Line, _Gather, _Gather, bool],
              memory: tuple[Any, ...], recompute: bytes | None = None, links: Links = Links()) -> Any:     # noqa: B008 (frozen)
        """The C core's judge of plans under these costs. rings: ``Replicas.lines``; the rest: what ``_core.judge_open`` says."""
        copied = float(model.vocab_size * model.n_embd) if model.tie_weights else 0.0
        messages = (self.latency_s, self.byte_s, self.copy_byte_s, self.ends_byte_s[1], self.element_bytes * model.n_embd,
                    *(self.tied_s(model, links) if model.tie_weights else (0.0, 0.0, 0.0)), self.backend == "cuda",
                    self.lent_byte_s is not None)
        updates = (self.optimizer_stage_s, self.optimizer_param_s, self.optimizer_head_s, copied)
        embedding, attention, ffn, head = (float(n) for n in block_params(model))
        kinds = np.array([KINDS.index(block.kind) for block in model.blocks], np.int32)
        return _core.judge_open(self._pack, messages, updates, *rings, (embedding, attention, ffn, head), kinds, ranks, chunks,
                                model.tie_weights, memory, recompute,
                                (links.latency_s, links.byte_s, bytes(links.far) if links.far else None))

    # ---- as a value ----

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON types; :meth:`from_dict` reads it back exactly."""
        def number(x: float) -> float | None:
            return None if math.isnan(x) else x

        where: dict[str, Any] = {} if self.reproducible is None else {"reproducible": self.reproducible}
        where |= {"backend": self.backend, "dtype": self.dtype, "device": self.device} if self.backend != "cpu" else {}
        lent: dict[str, Any] = {} if self.lent_byte_s is None else {"lent_byte_s": self.lent_byte_s}
        waits: dict[str, Any] = {} if self.head_pass is None else {"head_pass": list(self.head_pass)}
        waits |= {"remade": fit.written(self.remade)} if self.remade else {}
        return {
            **where, **lent, **waits, "format": _FORMAT, "version": _VERSION, "source": self.source,
            "granularity": self.granularity, "overhead_s": self.overhead_s, "optimizer_param_s": self.optimizer_param_s,
            "optimizer_stage_s": self.optimizer_stage_s, "optimizer_head_s": self.optimizer_head_s,
            "latency_s": self.latency_s, "byte_s": self.byte_s, "copy_byte_s": self.copy_byte_s,
            "model": self.model.to_dict() if self.model else None, "seq_len": self.seq_len,
            "micro_batch": self.micro_batch, "fit_error": number(self.fit_error),
            "fit_errors": {k: list(v) for k, v in self.fit_errors.items()},
            "curves": fit.written({f"{k}.{p}": c for (k, p), c in self.curves.items()}),
            "tables": self.tables.tolist() if len(self.tables) else [],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """The inverse of :meth:`to_dict`; a ValueError names what is missing or wrong."""
        try:
            curves = {}
            for name, curve in data["curves"].items():
                kind, phase = name.split(".")
                curves[kind, phase] = read_curve(f"curve {name}", curve)
            given = [layer_table(f"tables[{t}]", table) for t, table in enumerate(data["tables"])]
            tables = np.stack(given) if given else None
            error = data["fit_error"]
            return cls(curves, source=data["source"], tables=tables,
                       model=GPTConfig.from_dict(data["model"]) if data["model"] else None, seq_len=data["seq_len"],
                       micro_batch=data["micro_batch"], fit_error=math.nan if error is None else error,
                       fit_errors={k: (v[0], v[1]) for k, v in data["fit_errors"].items()},
                       optimizer_head_s=data.get("optimizer_head_s", 0.0), lent_byte_s=data.get("lent_byte_s"),
                       head_pass=data.get("head_pass"),
                       remade={name: read_curve(f"remade {name}", curve) for name, curve in data.get("remade", {}).items()},
                       backend=data.get("backend", "cpu"), dtype=data.get("dtype"), device=data.get("device", ""),
                       reproducible=data.get("reproducible"),
                       **{k: data[k] for k in ("granularity", "overhead_s", "optimizer_param_s", "optimizer_stage_s",
                                               "latency_s", "byte_s", "copy_byte_s")})
        except KeyError as error_:
            raise InvalidValueError(f"costs lack {error_.args[0]!r}") from None
        except (TypeError, AttributeError, IndexError) as error_:
            raise InvalidValueError(f"costs are malformed: {error_}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read what :meth:`save` wrote; a ValueError names the file if it is broken or foreign."""
        data = read_json(path, _FORMAT, _VERSION, "a cost model of terapipe_c")
        try:
            costs = cls.from_dict(data)
        except ValueError as error:
            raise InvalidValueError(f"{os.fspath(path)!s} is damaged: {error}") from None
        costs.file = os.fspath(path)
        return costs

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, CostModel) else NotImplemented

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def _facts(self) -> list[tuple[str, str]]:
        length = self.seq_len or (self.granularity * (self.tables.shape[1] - 1) if self.has_tables else 1024)
        facts = [("source", self.source)]
        if self.backend != "cpu":
            facts.append(("backend", f"{self.backend}, {self.dtype}" + (f", {self.device}" if self.device else "")))
        if self.model is not None:
            facts.append(("model", repr(self.model)))
        forward, backward = self.time(length, 0, "fwd"), self.time(length, 0, "bwd")
        facts.append((f"a layer, {length} tokens", f"{human_seconds(forward)} forward, {human_seconds(backward)} backward"))
        for kind in ("embedding", "head"):
            seconds = self.block_seconds(kind, "both", length)
            if seconds:
                facts.append((f"{kind}, {length} tokens", human_seconds(seconds)))
        copied = "at its reader" if self.lent_byte_s is not None else "at each end"
        parts = ((self.byte_s, "on the link"), (self.ends_byte_s[1], copied))
        each = "".join(f" + {seconds * 1e9:.3g} ns a byte {where}" for seconds, where in parts if seconds)
        facts.append(("message", human_seconds(self.latency_s) + each))
        if not self.has_tables and not math.isnan(self.fit_error):       # of a table nothing was held out
            facts.append(("fit error", f"{human_gap(self.fit_error)} on held-out samples"))
        return facts

    def __repr__(self) -> str:
        return f"<CostModel {'; '.join(f'{k}: {v}' for k, v in self._facts() if k not in ('model',))}>"

    def _repr_html_(self) -> str:
        return html_table("Costs", self._facts())
