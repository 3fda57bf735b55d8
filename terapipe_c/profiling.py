"""Measures what the blocks of a model cost on this machine, by running the real stage and engine on them.

A profile runs one rank whose every block is a virtual stage of its own, so that the engine's own events are the
measurement: seconds of F, I, W and R of each block for slices of many lengths after many contexts. As many ranks run at
once as the real run will keep busy, because they share cache and memory bandwidth.
"""
from __future__ import annotations

import os
import statistics
import threading
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _core, cuda, gpu_weights
from ._threads import Worker, let_go, no_thread, refused, start_all
from .backend import Backend, choose, place
from .config import KINDS, GPTConfig, flag, real, whole
from .cost import CostModel
from .doctor import usable_cores
from .engine import CPU, MOST_THREADS, RankEngine, gather_bytes, products, some_params
from .fit import fit_passes
from .gpu_links import message_line, sent_by_nccl
from .launch import TIED_RING_BYTES
from .schedules import Program

__all__ = ["profile"]

Key = tuple[str, str, int, int, Any]        # kind, phase, sequences, S, C; of the head HeadWork in C's place
TINY_VOCAB = 64                             # layers cost the same whatever the vocabulary
FAR = 4                                     # how many times the longest slice measured the head's curves know besides
NOTHING_S = 5e-6                            # a phase of the ends that never takes longer has no work (the head's W)
WINDOW_S = 0.2                              # a machine keeps its speed for so long
SLOW_MEMORY_S = 2.0                         # a virtual machine's first memory comes from its host, and slowly; not twice
APART = "R.apart"                           # R slice by slice, where attentions keep keys (tp_stage_ops.keeps_keys)
CACHED_BYTES = 64 << 20                     # a layer smaller than this is profiled as two: one would stay in cache


class _Again(NamedTuple):
    """Blocks that a run makes again: all slices before the first gradient ("R"), or each before its own (APART)."""

    blocks: tuple[int, ...] = ()
    way: str = "R"


NONE = _Again()


def _program(blocks: int, counts: Sequence[int], again: _Again) -> Program:
    """One rank that holds every block as a stage: each micro-batch forward, then R, I and W slice by slice. Beside blocks that are
    made again others, too, have room for one slice alone, and no W that waits for others' (tp_engine_slices_gradients): not so
    where an I comes before another slice's W, once."""
    words, waiting = [], next((q for q, count in enumerate(counts) if count > 1 and again.blocks), -1)
    for q, count in enumerate(counts):
        words += [f"{v}F{q}.{s}" for s in range(count) for v in range(blocks)]
        made = [[f"{v}R{q}.{s}" for v in again.blocks] for s in range(count)]
        words += sum(made, []) if again.way == "R" else []
        late: list[str] = []
        for s in reversed(range(count)):
            words += made[s] if again.way == APART else []
            words += [f"{v}I{q}.{s}" for v in reversed(range(blocks))] + late
            weights = {v: f"{v}W{q}.{s}" for v in reversed(range(blocks))}
            late = [word for v, word in weights.items() if q == waiting and s == count - 1 and v not in again.blocks]
            words += [word for word in weights.values() if word not in late]
    return Program.parse(" ".join(words)).lower(False)


def _lengths(seq_len: int) -> list[int]:
    """Slice lengths to sample: powers of two from 8 and the halves between, up to the whole sequence."""
    found = {seq_len}
    for power in range(3, 30):
        found |= {n for n in (1 << power, 3 << (power - 1)) if n < seq_len}
    return sorted(found)


def _slicings(seq_len: int) -> list[list[int]]:
    """The whole sequence; then, two by two, cuts of many lengths from long to short and turned round, so that each comes early
    and late. Lengths that a pipeline is likely to use come up most."""
    lengths = _lengths(seq_len)[:-1]
    likely = [n for n in lengths if seq_len <= 32 * n <= 10 * seq_len]
    found = [[seq_len]]
    for wanted in (lengths[::2], likely, lengths[1::2], likely[::2], likely[1::2]):
        cut, left = [], seq_len
        while wanted and wanted[0] <= left:
            for n in wanted[::-1]:
                if n <= left:
                    cut.append(n)
                    left -= n
        cut += [left] if left and cut else []
        for one in (cut, cut[::-1]):
            if one and one not in found:
                found.append(one)
    return found


def _head_slicing(rows: int) -> list[int]:
    """Ragged slices that sum to `rows`: two thirds, then halves of what is left down to 8. The first passes enough rows to show
    what a row takes, the last few enough to show what the weights take."""
    cut = [2 * rows // 3] if rows >= 48 else []
    rows -= sum(cut)
    while rows >= 16:
        cut.append(rows // 2)
        rows -= rows // 2
    return [*cut, rows]


@dataclass(frozen=True)
class HeadWork:
    """What an instruction does for the head, in rows."""

    own: int        # of its slice, of those that F or I does
    passed: int     # logits and d(input): more than its own, or none, where F waits for rows
    flushed: int    # d(weight), once half a tile of rows waits


def head_work(cuts: Sequence[Sequence[int]]) -> tuple[dict[tuple[str, int, int], HeadWork], list[int]]:
    """{(phase, micro-batch, slice): ...} of micro-batches of one sequence cut into these slices, and the rows whose d(weight)
    waits for the update, in F's tile and in I's: the core counts."""
    slices = np.array([len(lengths) for lengths in cuts], np.int32)
    rows, left = _core.head_rows(np.ones_like(slices), slices, np.concatenate([np.array(c, np.int32) for c in cuts]))
    places = [(q, s) for q, lengths in enumerate(cuts) for s in range(len(lengths))]
    return {(phase, *place): HeadWork(*row) for phase, table in zip("FI", rows.tolist(), strict=True)
            for place, row in zip(places, table, strict=True)}, [*left]


def spread(seconds: Mapping[tuple[str, int, HeadWork], float]) \
        -> tuple[dict[str, list[tuple[float, int, int, float]]], tuple[float, float, float]]:
    """The head's samples as its curves want them: {phase: [(rows, S, C, seconds), ...]}; and a CostModel's head_pass.

    seconds: of each instruction, by (phase, S, what it did). Passes and flushes come in lumps, some rows now, some later; in
    a curve each instruction pays for the rows of its own slice."""
    lumps = [(did.passed, did.flushed, taken) for (_, _, did), taken in seconds.items() if did.passed]
    row, least, flush = fit_passes(np.array(lumps, np.float64))
    # Longer slices than were measured cost a row's worth a row: the last samples may still lie where the weights decide.
    far = FAR * max(S for _, S, _ in seconds)
    found = {phase: [(float(far), far, 0, (row + flush) * far * share / 3)] for phase, share in (("F", 1), ("I", 2))}
    for (phase, S, did), taken in seconds.items():
        if did.own == 0:
            continue
        fair = row * (max(did.own, least) if phase == "I" else did.own) + flush * did.own
        lump = row * max(did.passed, least) + flush * did.flushed if did.passed else 0.0
        found[phase].append((S, S, 0, max(taken - lump + fair, 0.5 * fair)))
    return found, (row, least, flush)


def weight_groups(lengths: Sequence[int]) -> dict[int, tuple[int, list[int]]]:
    """{slice: (rows whose weight gradients its W makes, the lengths of the slices that it is the W of)} of one sequence: of these
    it may leave some rows to the next, and it makes those that it was left."""
    groups: dict[int, tuple[int, list[int]]] = {}
    end = len(lengths)
    for s, rows in reversed(list(enumerate(_core.weight_rows(np.array(lengths, np.int32)).tolist()))):
        if rows:
            groups[s], end = (rows, list(lengths[s:end])[::-1]), s
    return groups


def gpu_groups(lengths: Sequence[int]) -> dict[int, tuple[int, list[int]]]:
    """The same of a GPU where blocks are made again (cuda/stage.h): a W is of whole groups, all others' too."""
    rows = gpu_weights.made(np.array([len(lengths)], np.int32), np.array(lengths, np.int32), np.array([sum(lengths)], np.int32))
    return {s: (count, [count]) for s, count in enumerate(rows.tolist()) if count}


def steadied(samples: Sequence[tuple[Hashable, Hashable, float]]) -> dict[Any, float]:
    """Seconds of each key, out of (key, window of time, seconds) samples of a machine whose speed drifts.

    A shared machine is half as fast again for seconds on end, and what was measured then would look dear beside the rest.
    So log(seconds) = key + window, by median polish (Tukey 1977, chapter 11); the seconds are those of the middle
    half of the windows, each as often as it has samples: a run meets good and bad ones too. The mean of that half, not the
    median: where a machine has two speeds, the median is now the one and now the other.
    """
    keys, key = _numbered([k for k, _, _ in samples])
    _, window = _numbered([w for _, w, _ in samples])
    logs = np.log(np.maximum([s for _, _, s in samples], 1e-9))
    effect, drift = _medians(key, logs), np.zeros(int(window.max()) + 1)
    for _ in range(6):
        drift = _medians(window, logs - effect[key])
        effect = _medians(key, logs - drift[window])
    middle = np.sort(drift[window])[len(logs) // 4:len(logs) - len(logs) // 4]
    effect += middle.mean()
    return dict(zip(keys, np.exp(effect).tolist(), strict=True))


def _numbered(values: Sequence[Hashable]) -> tuple[list[Hashable], NDArray[np.intp]]:
    number: dict[Hashable, int] = {}
    index = np.array([number.setdefault(value, len(number)) for value in values], np.intp)
    return list(number), index


def _medians(group: NDArray[np.intp], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of the values of each group 0, 1, ...; every group has one."""
    order = np.lexsort((values, group))
    count = np.bincount(group)
    first = np.cumsum(count) - count
    ordered = values[order]
    return np.asarray(0.5 * (ordered[first + (count - 1) // 2] + ordered[first + count // 2]), np.float64)


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


class _Sampler:
    """Runs a slicing on every busy rank at once and keeps the seconds of each instruction."""

    def __init__(self, busy: int, threads: int, backend: Backend = CPU, **device: Any) -> None:
        """device: how a GPU's products are chosen, as the run's will be."""
        self.busy, self.threads, self.backend, self.device = busy, threads, backend, device
        self.samples: list[tuple[Key, tuple[int, int], float]] = []     # of a key, in a window of a rank's time
        # With the head: parameters, seconds, rows of the head whose d(weight) an update had to make.
        self.updates: dict[bool, list[tuple[int, float, list[int]]]] = {False: [], True: []}
        self.head_pass: tuple[float, float, float] | None = None     # as of a CostModel
        self.overheads: list[float] = []
        self._lock = threading.Lock()

    def run(self, model: GPTConfig, slicing: list[tuple[int, list[int]]], repeats: int, kinds: set[str],
            again: _Again = NONE) -> float:
        """Seconds of one repeat; every rank begins each one together."""
        program = _program(model.num_blocks, [len(lengths) for _, lengths in slicing], again)
        remade = [block in again.blocks for block in range(model.num_blocks)]
        stages = [(i, i + 1) for i in range(model.num_blocks)]
        shape = sum(b for b, _ in slicing), sum(slicing[0][1]) + 1
        tokens = np.random.Generator(np.random.Philox(7)).integers(0, model.vocab_size, shape, np.int32)
        start, errors, spent = threading.Barrier(self.busy), [], 0.0
        # One each: no rank says a word to another, but a rank looks between its instructions whether its region was given up.
        regions = [_core.Region.create(1, bytes(1), 0, max(64, gather_bytes(model)), False) for _ in range(self.busy)]
        params = some_params(model)
        # Written once before anything is timed: a step after the first does not wait for the kernel to find pages.
        moments = {kind: {name: np.zeros_like(array) for name, array in params.items()} for kind in ("exp_avg", "exp_avg_sq")}

        def end(why: str) -> None:
            start.abort()
            for region in regions:
                region.abort("EABORTED", -1, why)

        def one(rank: int) -> None:
            nonlocal spent
            try:
                comm = _core.Comm(regions[rank], 0, 600.0) if self.backend.name == "cpu" else None
                engine = RankEngine(model, stages, slicing, program, 0, comm, threads=self.threads, backend=self.backend,
                                    recompute=remade, **self.device)
                engine.load(params, moments)
                start.wait()
                begin = time.monotonic()
                for _ in range(repeats):
                    start.wait()
                    engine.run(tokens, lr=0.0)
                    self._keep(model, slicing, engine.trace(), kinds, again)
                spent = (time.monotonic() - begin) / repeats
            except BaseException as error:
                errors.append(error)
                end(str(error))

        ranks = [Worker(one, rank, name=f"rank {rank}") for rank in range(self.busy)]
        try:
            start_all(ranks, end)            # who waits for all of them would wait for ever
            for rank in ranks:
                rank.join()
        except BaseException:                # Ctrl-C: or they would measure on for the rest of the budget, and Python's end wait
            end("interrupted")
            raise
        finally:
            for rank in ranks:
                if rank.ident is not None:
                    rank.join()
            for region in regions:
                region.close()
            let_go(errors)
        for error in sorted(errors, key=lambda e: isinstance(e, (threading.BrokenBarrierError, _core.AbortedError))):
            raise error
        return spent

    def _keep(self, model: GPTConfig, slicing: list[tuple[int, list[int]]], trace: list[Any], kinds: set[str],
              again: _Again = NONE) -> None:
        """Of blocks that are made again I reads what was made just now, and W waits for no other slice: the others tell these."""
        blocks, update = model.blocks, 0.0
        head, left = head_work([lengths for _, lengths in slicing])
        cpu = self.backend.name == "cpu"
        weights = [weight_groups(lengths) if cpu and b == 1 else gpu_groups(lengths) if again.blocks and b == 1
                   else {0: (sum(lengths), [sum(lengths)])} for b, lengths in slicing]
        lumps = "head" in kinds and cpu
        with self._lock:
            for (op, stage, q, s, begin, end), (_, _, _, _, _, last) in zip(trace[1:], trace, strict=False):
                if op == "OPT":
                    update += end - begin
                    continue
                self.overheads.append(begin - last)
                if op in ("FR" if stage in again.blocks else "FIW") and blocks[stage].kind in kinds:
                    b, lengths = slicing[q]
                    kind = blocks[stage].kind
                    context = sum(lengths[:s]) if kind == "attention" else 0
                    window = threading.get_ident(), int(begin / WINDOW_S)
                    if op == "W" and kind == "head" and not cpu:   # of the batch, in W of its last micro-batch (cuda/stage.h)
                        if q == len(slicing) - 1:
                            rows = sum(b * sum(lengths) for b, lengths in slicing)
                            self.samples += [((kind, op, 1, rows, 0), window, end - begin)] * (s == 0)
                    elif op == "W":
                        rows, together = weights[q].get(s, (0, []))
                        self.samples += [((kind, op, b, length, 0), window, (end - begin) * length / rows)
                                         for length in together]      # in a curve each slice pays for its own rows
                    else:
                        where = head[op, q, s] if lumps and kind == "head" else context
                        phase = again.way if op == "R" else op
                        self.samples.append(((kind, phase, b, lengths[s], where), window, end - begin))
            self.updates["head" in kinds].append((model.num_params, update, left if lumps else []))

    def measured(self) -> dict[str, dict[str, list[tuple[float, int, int, float]]]]:
        """{kind: {phase: [(rows, S, C, seconds), ...]}}; without the phases that take no time."""
        found: dict[str, dict[str, list[tuple[float, int, int, float]]]] = {kind: {} for kind in KINDS}
        head: dict[tuple[str, int, HeadWork], float] = {}
        for (kind, phase, b, S, C), seconds in steadied(self.samples).items():
            if isinstance(C, HeadWork):
                head[phase, S, C] = seconds
            else:
                found[kind].setdefault(phase, []).append((b * S, S, C, seconds))
        if head:
            lumpless, self.head_pass = spread(head)
            found["head"].update(lumpless)
        for phases in found.values():
            for rows in phases.values():
                rows.sort()
        if self.backend.name != "cpu" and "W" in found["head"]:
            found["head"]["W"] = found["head"]["W"][-1:]     # one product for a batch: no micro-batch pays for the weight again
        return {kind: {phase: rows for phase, rows in phases.items()
                       if kind in ("attention", "ffn") or any(seconds > NOTHING_S for *_, seconds in rows)}
                for kind, phases in found.items()}


def swap_bandwidth(folder: str | os.PathLike[str], ranks: int, rank_bytes: int = 128 << 20) -> float:
    """Bytes a second that one of ``ranks`` ranks swaps at, out and in alike, when all do so to files in ``folder``: what the
    engine's own file gives, the median of some rounds of ``rank_bytes`` each. The system keeps the file in memory while there
    is room: rank_bytes says how much the measurement asks of it."""
    with ThreadPoolExecutor(ranks) as pool:
        try:
            asked = [pool.submit(_core.store_time, folder, rank_bytes, 6) for _ in range(ranks)]
        except RuntimeError as error:
            if not refused(error):
                raise
            raise no_thread(error, f"one of {ranks} that swap at once") from error
        rounds = [each.result() for each in asked]
    return 2.0 * rank_bytes / float(np.median([row.sum() for each in rounds for row in each[1:]]))   # the first touches pages


def profile(model: GPTConfig, micro_batch: int = 1, seq_len: int | None = None, backend: str = "cpu", threads: int = 1, *,
            ranks: int | None = None, budget_s: float = 20.0, dtype: str | None = None, reproducible: bool = True) -> CostModel:
    """Measure the model's blocks here, in about budget_s seconds at most, and fit the cost model to what was seen.

    Args:
        model: any size: layers are measured once, the head on as many rows as the budget allows.
        micro_batch: sequences in a micro-batch that plans will use; one sequence is always measured.
        seq_len: tokens of a sequence; None: model.block_size. On "cuda" the costs are of such sequences alone: a slice's backward
            takes longer the more tokens follow it.
        backend: "cpu", or "cuda": the first GPU, timed by its own events; dtype as in `launch`. Messages are the host's rings,
            but where this machine has several GPUs: NCCL's between the first two, as `launch` sends them (TERAPIPE_COMM).
        threads: threads of each rank.
        ranks: how many ranks run at once while measuring; None: the cores that this process may use, by its control group's
            limit too, divided by `threads`. They share cache and bandwidth as the run's ranks will.
        reproducible: as in `launch`, whose products on "cuda" are slower so.

    The samples, freed of the machine's drift, are fitted by TeraPipe's eq. 9 with t_ctx(., 0) = 0; `costs.fit_error` is
    the mean relative error on held-out samples.
    """
    if not isinstance(model, GPTConfig):
        raise _core.InvalidTypeError(f"model is {type(model).__name__}: a GPTConfig would be right")
    where = choose(backend, dtype)
    place(where, 1, None, [0])                      # a GPU, or why there is none
    seq_len = model.block_size if seq_len is None else whole("seq_len", seq_len)
    if seq_len > model.block_size:
        raise _core.InvalidValueError(f"seq_len is {seq_len}: at most block_size = {model.block_size} would be right")
    micro_batch, threads = whole("micro_batch", micro_batch, most=MOST_SEQUENCES), whole("threads", threads, most=MOST_THREADS)
    everybody = 1 if where.name == "cuda" else max(1, usable_cores() // threads)   # ranks share no GPU
    busy = everybody if ranks is None else whole("ranks", ranks, most=MOST_THREADS)
    budget_s = real("budget_s", budget_s)
    if budget_s > MOST_SECONDS:
        raise _core.InvalidValueError(f"budget_s is {budget_s:g}: at most {MOST_SECONDS:g} seconds would be right")
    end = time.monotonic() + budget_s
    exact = flag("reproducible", reproducible)
    device = {} if where.name == "cpu" else products(exact)
    sampler = _Sampler(busy, threads, where, **device)
    layer = 4 * (model.block_params("attention") + model.block_params("ffn")) * 3
    layers = replace(model, n_layer=min(model.n_layer, 1 if layer > CACHED_BYTES else 2), vocab_size=TINY_VOCAB,
                     block_size=seq_len, tie_weights=False)
    messages = _Messages(layers, seq_len, where, device, end)
    _measure_head(sampler, model, seq_len, end)
    messages.look()
    _measure_layers(sampler, layers, seq_len, end - messages.look_s, micro_batch)
    messages.look()
    param_s = _quartile([seconds / params for params, seconds, _ in sampler.updates[False]])
    measured = sampler.measured()
    _, least, flush_s = sampler.head_pass or (0.0, 0.0, 0.0)
    head_s = _quartile([seconds - param_s * params - flush_s * sum(max(rows, least) for rows in left if rows)
                        for params, seconds, left in sampler.updates[True]])
    return CostModel.from_measurements(measured, optimizer={"param_s": param_s, "stage_s": 0.0},
                                       head_update_s=max(0.0, head_s), head_pass=sampler.head_pass,
                                       smooth=where.name == "cpu",                  # a GPU does have waves
                                       **messages.costs(),
                                       overhead_s=max(0.0, statistics.median(sampler.overheads)), model=model,
                                       seq_len=seq_len, micro_batch=micro_batch, backend=where.name, dtype=where.dtype,
                                       device="" if where.name == "cpu" else cuda.devices()[0].name,
                                       reproducible=None if where.name == "cpu" else exact)


class _Messages:
    """What messages take. In the host's memory they are looked at before, amid and behind all else, each time by two threads: those
    that share a core for a while, as others keep the rest busy, take a hundred times as long as two on cores of their own."""

    def __init__(self, layers: GPTConfig, seq_len: int, where: Backend, device: dict[str, Any], end: float) -> None:
        """The first look. end: when it all should be done."""
        self.cpu, self.line, self.look_s = where.name == "cpu", None, 0.0
        self.looks: list[tuple[float, float, float]] = []
        if sent_by_nccl(where):
            try:
                self.line = message_line(layers, seq_len, where, until=end, **device)
            except _core.Error as error:
                warnings.warn(f"messages were timed in the host's memory, since NCCL between GPUs 0 and 1 could not be: {error}",
                              stacklevel=3)
        begin = time.monotonic()
        self.look()
        self.look_s = time.monotonic() - begin

    def look(self) -> None:
        if self.line is None:
            self.looks.append(_core.message_time(TIED_RING_BYTES, EXCHANGE_BYTES, LENT_BYTES))

    def costs(self) -> dict[str, Any]:
        """As arguments of ``CostModel.from_measurements``."""
        if self.line is not None:
            return {"comm": {"latency_s": self.line[0], "byte_s": self.line[1]}}
        latency, byte, lent = np.median(self.looks, axis=0).tolist()
        return {"comm": {"latency_s": latency, "byte_s": 0.0}, "copy_byte_s": byte, "lent_byte_s": lent if self.cpu else None}


MOST_REPEATS = 40
GPU_HEAD_TILE = 8192     # TP_CUDA_HEAD_TILE of cuda/stage.h: with more rows W would be timed for the last ones alone, F for others'
EXCHANGE_BYTES, LENT_BYTES = 16 << 20, 256 << 10     # of messages that are timed
MOST_SEQUENCES, MOST_SECONDS = 1 << 16, 1e6     # of a micro-batch, of a profile: beyond, a slip


def _measure_head(sampler: _Sampler, model: GPTConfig, seq_len: int, end: float) -> None:
    """The real vocabulary behind one layer, on ragged slices of as many rows as the time allows: half of what is left
    until `end`."""
    kinds = set(KINDS)                              # the layer's times tell how fast the machine was just then

    def cut(rows: int) -> list[tuple[int, list[int]]]:
        return [(1, _head_slicing(rows))]

    most = seq_len if sampler.backend.name == "cpu" else min(seq_len, GPU_HEAD_TILE)
    rows = min(most, 96)
    runs = 0
    for _ in range(2):
        begin = time.monotonic()
        spent = sampler.run(replace(model, n_layer=1, block_size=rows), cut(rows), 1, kinds)
        around = time.monotonic() - begin - spent   # parameters and memory: once per engine
        runs += sampler.busy
        if around < SLOW_MEMORY_S:
            break
    # Few rows are slow rows (the weights stream past for each slice), so this is more than a row of a long slice takes.
    row = sum(seconds for (kind, *_), _, seconds in sampler.samples if kind in ("embedding", "head")) / (rows * runs)
    fixed = max(0.0, spent - row * rows)            # the layer's work and the update
    left = 0.5 * (end - time.monotonic()) - around
    while rows < most and 1.3 * (fixed + row * min(most, 2 * rows)) < left:
        rows = min(most, 2 * rows)
    slicing = cut(rows)
    spent = fixed + row * rows
    fits = sampler.backend.name == "cpu" or 2 * rows <= GPU_HEAD_TILE
    if rows == seq_len and rows > 96 and 3 * spent < left and fits:
        slicing.append((1, [rows]))                 # the whole sequence as one slice
        spent += row * rows
    sampler.run(replace(model, n_layer=1, block_size=rows), slicing, max(1, min(MOST_REPEATS, int(left / spent))), kinds)


def _measure_layers(sampler: _Sampler, model: GPTConfig, seq_len: int, end: float, micro_batch: int) -> None:
    """All slicings as micro-batches of one step; fewer of them where the time is short, more often where it is not."""
    kinds = {"attention", "ffn"}
    whole, *others = _slicings(seq_len)
    each = sampler.run(model, [(micro_batch, whole)], 1, kinds) / micro_batch
    left = end - time.monotonic()
    room = int(left / (1.25 * each)) - micro_batch  # sequences
    chosen = [(1, cut) for cut in others[:max(1, room)]] + [(micro_batch, whole)]
    if micro_batch > 1 and room > len(others) or not others:
        chosen.append((1, whole))
    total = 1.25 * each * sum(b for b, _ in chosen)
    for cuts, repeats, again in _dealt(chosen, max(1, min(MOST_REPEATS, int(left / total))), model.n_layer):
        sampler.run(model, cuts, repeats, kinds, again)


def _dealt(cuts: list[tuple[int, list[int]]], repeats: int, layers: int) -> list[tuple[list[tuple[int, list[int]]], int, _Again]]:
    """As many runs of the layers, in which half of the blocks are made again by turns, and the others never: beside these it shows
    how fast the machine is. Where there is time for few R goes by F: noise would be more than what that is off, and large models,
    whose GELU is little beside their products, take that time."""
    ways = [_Again(blocks, way) for way in (APART, "R") for blocks in (((2, 3),) if layers > 1 else ((1,), (2,)))]
    if repeats < 2 * len(ways):
        return [(cuts, repeats, NONE)]
    return [(cuts, (repeats + i) // len(ways), again) for i, again in enumerate(ways)]
