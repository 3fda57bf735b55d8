"""The engine of the C core, by parameter names: what a rank trains with, and one step of a model in this process."""
from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _core, cuda, schedules
from ._threads import Worker, let_go, start_all
from .backend import Backend, choose, eager, own_gpu
from .config import GPTConfig, brief, whole

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["RankEngine", "init_params", "lent_bytes", "loss_and_grads", "make_engine", "rank_memory", "store_of",
           "swap_bytes"]

Float32 = NDArray[np.float32]
T = TypeVar("T")
MOST_THREADS = 256      # TP_TEAM_MOST of csrc/base/team.h
STORE_VARIABLE = "TERAPIPE_SWAP_DIR"
TIMED = 32      # algorithms of a product that a GPU compares before the first step: of 4 a step was 8 to 15 % longer (H200)
Slicing = Sequence[tuple[int, Sequence[int]]]
CPU = Backend()
STATES: dict[str, Literal["value", "m", "v", "grad"]] = {"params": "value", "exp_avg": "m", "exp_avg_sq": "v", "grads": "grad"}


def dimensions(model: Any) -> tuple[int, ...]:
    """The model as the C core takes it."""
    return (model.n_layer, model.n_head, model.n_embd, model.vocab_size, model.block_size, int(model.bias),
            int(model.tie_weights))


def boundaries(stages: Sequence[tuple[int, int]]) -> list[int]:
    """[(first, end), ...] of contiguous stages -> [0, ..., blocks]."""
    return [0, *(end for _, end in stages)]


def cut(slicing: Slicing) -> tuple[int, int, list[tuple[int, list[int]]]]:
    """(seq_len, batch, micro-batches) of a slicing in the paper's notation."""
    return sum(slicing[0][1]), sum(b for b, _ in slicing), [(int(b), [int(n) for n in lengths]) for b, lengths in slicing]


def of_one_copy(slicing: Slicing, program: _core.Program) -> Slicing:
    """The micro-batches of the first copy of the model; those of the second, where there are two, are the same."""
    each = len(slicing) // program.copies
    for micro, (one, other) in enumerate(zip(slicing, slicing[each:], strict=False) if program.copies > 1 else ()):
        if one[0] != other[0] or list(one[1]) != list(other[1]):
            raise _core.InvalidValueError(f"micro-batch {micro} is ({one[0]}, {list(one[1])}) and micro-batch {micro + each} of "
                                          f"the other copy of the model ({other[0]}, {list(other[1])}): the same would be right")
    return slicing[:each]


def rank_memory(model: Any, stages: Sequence[tuple[int, int]], slicing: Slicing, program: _core.Program,
                threads: int = 1, backend: Backend = CPU, recompute: Sequence[bool] = (),
                swap: Sequence[int] = (), replicas: int = 1, shards: bool = False) -> list[int]:
    """Bytes that each rank's engine will take from its heap, exactly; nothing is allocated. Of a GPU its memory alone. Of
    several replicas, the ranks of one; shards: each of which has AdamW's moments of a part (``Plan.shard_optimizer``)."""
    return _core.rank_memory(program, dimensions(model), boundaries(stages), cut(of_one_copy(slicing, program)), threads=threads,
                             saves=saves_bytes(recompute, swap), replicas=replicas, shards=shards, **backend.arguments)


def lent_bytes(model: Any, stages: Sequence[tuple[int, int]], slicing: Slicing, program: _core.Program, backend: Backend = CPU,
               recompute: Sequence[bool] = (), swap: Sequence[int] = ()) -> list[int]:
    """Of these, the bytes that each rank's messages leave from: the arena that it has use for. 0: of a GPU."""
    return _core.lent_bytes(program, dimensions(model), boundaries(stages), cut(of_one_copy(slicing, program)),
                            saves=saves_bytes(recompute, swap), **backend.arguments)


def swap_bytes(model: Any, stages: Sequence[tuple[int, int]], slicing: Slicing, program: _core.Program, backend: Backend = CPU,
               recompute: Sequence[bool] = (), swap: Sequence[int] = ()) -> list[int]:
    """Bytes that each rank takes outside its device's memory for what it swaps: of a disk, or beside a GPU of the host's memory."""
    return _core.swap_bytes(program, dimensions(model), boundaries(stages), cut(of_one_copy(slicing, program)),
                            saves=saves_bytes(recompute, swap), **backend.arguments)


def cut_stages(model: Any, slicing: Slicing, program: _core.Program, limit: int, seconds: NDArray[np.float64],
               backend: Backend = CPU, recompute: Sequence[bool] = (), replicas: int = 1,
               by_pairs: bool = False, shards: bool = False) -> list[tuple[int, int]] | None:
    """The stages within ``limit`` bytes a rank, as :func:`rank_memory` counts them, the longest of which takes least; None: there
    are none. seconds: [blocks], whole numbers. Exact where a rank has one stage and keeps nothing of another's. Of several stages a
    rank, between which blocks are moved, what is least is about the seconds of a step; none within the limit is missed where ranks
    hold of two stages, in pairs, or of as many each, in rows over all of them, but some may be elsewhere, or of very large
    requests. by_pairs: of such pairs those whose slowest rank is fastest, where even stages do not lead to as fast ones. Where
    something is recomputed the program is taken to be theirs."""
    bounds = _core.cut_stages(program, dimensions(model), cut(of_one_copy(slicing, program)), min(limit, 1 << 62), seconds,
                              saves=saves_bytes(recompute), replicas=replicas, by_pairs=by_pairs, shards=shards,
                              **backend.arguments)
    return None if bounds is None else list(itertools.pairwise(bounds))


def cut_least(model: Any, slicing: Slicing, program: _core.Program, low: int, high: int, close: float = 0.0, backend: Backend = CPU,
              recompute: Sequence[bool] = (), replicas: int = 1, shards: bool = False) -> list[tuple[int, int]] | None:
    """The stages that need least of a rank, of limits in (low, high] bytes, looked for by halves until they are within ``close`` of
    the limit or a few bytes; None: there are none within a limit that was tried. Of several stages a rank they may need no
    more than ``low``, and are those that need least as far as :func:`cut_stages` misses none. The rest as there."""
    bounds = _core.cut_least(program, dimensions(model), cut(of_one_copy(slicing, program)), low, min(high, 1 << 62), close,
                             saves=saves_bytes(recompute), replicas=replicas, shards=shards, **backend.arguments)
    return None if bounds is None else list(itertools.pairwise(bounds))


def saves_bytes(recompute: Sequence[bool], swap: Sequence[int] = ()) -> bytes | None:
    """How each block saves memory (``Plan.recompute``, ``Plan.swap``), as the C core takes it."""
    if not any(recompute) and not any(swap):
        return None
    return bytes(2 if size else int(again) for again, size in zip_longest(recompute, swap, fillvalue=0))


def gather_bytes(model: Any) -> int:
    """The largest contribution of a rank to the all-gather that ends a step."""
    return 8 * (len(_core.model_params(dimensions(model))) + 2)


class RankEngine:
    """One rank's stages, its instructions and its memory. Arrays go in and out by global parameter name."""

    def __init__(self, model: Any, stages: Sequence[tuple[int, int]], slicing: Slicing, program: _core.Program, rank: int,
                 comm: _core.Comm | None, *, threads: int = 1, memory_bytes: int = 0, backend: Backend = CPU,
                 recompute: Sequence[bool] = (), swap: Sequence[int] = (), store: str | None = None, replicas: int = 1,
                 replica: int = 0, shards: bool = False, **device: Any) -> None:
        """stages: of one copy of the model. recompute, swap: per block, as in `Plan`. store: the folder where what is swapped
        goes, on the CPU. replicas: copies of the program that add their gradients, on one communicator; `rank` is of this
        replica. shards: each has AdamW's moments of a part, and updates that alone. device: more arguments of `_core.Engine`, on a
        GPU those that say which and how."""
        self._core = _core.Engine(program, rank, dimensions(model), boundaries(stages), cut(of_one_copy(slicing, program)), comm,
                                  threads=threads, memory_bytes=memory_bytes, saves=saves_bytes(recompute, swap), store=store,
                                  replicas=replicas, replica=replica, shards=shards, **backend.arguments, **device)
        self._sharded = shards and replicas * program.copies > 1
        self._gathered = ""                                     # the moments that lie where gradients do
        self._parted = ""                                       # what is there in place of all replicas' gradients
        self._code = program.instructions(rank)
        table = _core.model_params(dimensions(model))
        self._held = [(stage, i, table[index][0]) for stage, i, index in self._core.params()]
        shapes = {name: (rows, cols) if matrix else (cols,) for name, rows, cols, matrix, _ in table}
        self._shapes = {name: shapes[name] for _, _, name in self._held}
        tied = table[0][0] if model.tie_weights and len(stages) > 1 else None      # the head's stage answers for it
        self._borrowed = {(stage, name) for stage, _, name in self._held if name == tied and stage % len(stages) == 0}
        self._own = [row for row in self._held if row[0] < len(stages)     # of the first copy: the second has the same
                     and (row[0], row[2]) not in self._borrowed]
        self.names = [name for _, _, name in self._own] if replica == 0 else []    # likewise

    @property
    def peak_memory_bytes(self) -> int:
        """High-water mark of this rank's heap."""
        return self._core.memory()[1]

    @property
    def allocations(self) -> int:
        """Allocations so far: a step adds none."""
        return self._core.memory()[2]

    @property
    def caveats(self) -> list[str]:
        """What works otherwise than it was meant to on this rank, and why: slower messages, steps without graphs."""
        return self._core.caveats()

    def load(self, params: Mapping[str, NDArray[Any]], moments: Mapping[str, Mapping[str, NDArray[Any]]] | None = None) -> None:
        """Take this rank's tensors out of params, and of moments {"exp_avg": .., "exp_avg_sq": ..} where given."""
        if moments:
            self._gathered = ""     # sharded ones come by way of the gradients' place (tp_stage_ops.import)
            self._parted = "moments, since these were loaded" if self._sharded else ""
        for kind, arrays in {"params": params, **(moments or {})}.items():
            for stage, i, name in self._held:
                if kind != "params" and (stage, name) in self._borrowed:
                    continue
                if name not in arrays:
                    raise _core.InvalidValueError(f"{name} is missing from {kind}: every parameter of the model would be right")
                array = arrays[name]
                if not isinstance(array, np.ndarray):
                    raise _core.InvalidTypeError(f"{name} is {type(array).__name__}: a float32 array would be right")
                if array.shape != self._shapes[name] or array.dtype != np.float32:
                    raise _core.InvalidValueError(f"{name} is {array.dtype} {array.shape}: "
                                                  f"float32 {self._shapes[name]} would be right")
                if not array.flags.c_contiguous:
                    raise _core.InvalidValueError(f"{name} is strided: a C-contiguous array would be right")
                self._core.load(stage, i, STATES[kind], array)
                del array       # before the next one is read
        self._core.pack()

    @property
    def gathers(self) -> tuple[str, ...]:
        """What of :meth:`export` all ranks must gather first: moments of which each replica has a part."""
        return ("exp_avg", "exp_avg_sq") if self._sharded else ()

    def gather(self, kind: str) -> None:
        """Bring all moments of a kind of `gathers` to where gradients are, which are gone then, for the exports until the next one,
        or the next step. All ranks call it."""
        self._gathered, self._parted = "", "moments, since these were gathered"
        self._core.gather("m" if kind == "exp_avg" else "v")
        self._gathered = kind

    def export(self, kind: str) -> dict[str, Float32]:
        """Copies by name of "params", "exp_avg", "exp_avg_sq" or "grads"; of `gathers` what was gathered. Where these are
        sharded grads are those of a step with ``update=False``: of another one a replica sums those of its part alone."""
        return dict(self.export_each(kind))

    def export_each(self, kind: str) -> Iterator[tuple[str, Float32]]:
        """The same as pairs, of which each is copied when it is asked for: a rank that saves them needs memory for one."""
        if kind in self.gathers and kind != self._gathered:
            raise RuntimeError(f"{kind} is not gathered: gather({kind!r}) of all ranks would be right")
        if kind == "grads" and self._parted:
            raise RuntimeError(f"grads are {self._parted}: run(..., update=False), which sums all of them, would be right before")
        state = "grad" if kind == self._gathered else STATES[kind]
        return ((name, self._core.read(stage, i, state)) for stage, i, name in self._own if name in self.names)

    def run(self, tokens: NDArray[np.int32], *, step: int = 1, **options: Any) -> tuple[float, float, bool, int, int]:
        """(mean loss, gradient norm before clipping, whether some rank asked to stop, begin_ns, end_ns); see _core.Engine."""
        self._gathered = ""
        summed = not self._sharded or not options.get("update", True)
        self._parted = "" if summed else "sums of this replica's part alone, since the step updated"
        return self._core.step(tokens, step, **options)

    def evaluate(self, tokens: NDArray[np.int32]) -> float:
        """The mean loss, the same on every rank; nothing is changed."""
        return self._core.evaluate(tokens)

    def trace(self) -> list[tuple[str, int, int, int, float, float]]:
        """(op, stage, micro, slice, start_s, end_s) of the last step, in order, on the clock of time.monotonic(). Waits for
        messages and, in OPT, for the other ranks are not in the intervals."""
        rows = []
        for instr, (_, _, start, end, wait) in zip(self._code, self._core.events().tolist(), strict=True):
            op = _core.OPS[instr["op"]]
            start += wait if op == "OPT" else 0
            rows.append((op, int(instr["stage"]), int(instr["micro"]), int(instr["slice"]), start * 1e-9, end * 1e-9))
        return rows

    def given(self) -> list[tuple[float, float, float]]:
        """For each row of :meth:`trace`, by the same clock, when the host came to it, and began and ended to give it to the device:
        work that begins late was given late, or begun late. Kept from the first call on."""
        return [((wait or start) * 1e-9, start * 1e-9, end * 1e-9) for _, _, start, end, wait in self._core.given().tolist()]


class _TrainingEngine(RankEngine):
    """The seam to the worker's loop: hyper-parameters come from the job."""

    def __init__(self, job: Mapping[str, Any], plan: Plan, rank: int, comm: _core.Comm | None) -> None:
        replica, of_replica = divmod(rank, plan.ranks)
        device = _device_of(job, rank, plan.data_parallel * plan.copies)
        self.gpu = cuda.devices()[device["device"]].name if device else ""
        super().__init__(plan.model, plan.stages, plan.slicing, plan.program, of_replica, comm, threads=job["threads_per_rank"],
                         recompute=plan.recompute, swap=plan.swap, store=store_of(job), replicas=plan.data_parallel,
                         replica=replica, sums_beside=plan.cluster.sums_beside, shards=plan.shard_optimizer, **device)
        share = plan.batch // plan.data_parallel
        self._sequences = slice(replica * share, (replica + 1) * share)
        self._options = {"beta1": job["betas"][0], "beta2": job["betas"][1], "eps": job["eps"],
                         "weight_decay": job["weight_decay"], "grad_clip": job["grad_clip"]}

    def step(self, step: int, tokens: NDArray[np.int32], lr: float) -> dict[str, float]:
        """Train as step 0, 1, ..."""
        loss, norm, *_ = self.run(tokens[self._sequences], step=step + 1, lr=lr, **self._options)
        return {"loss": loss, "grad_norm": norm}

    def evaluate(self, tokens: NDArray[np.int32]) -> float:
        """The mean loss of all replicas' sequences."""
        return super().evaluate(tokens[self._sequences])


def store_of(job: Mapping[str, Any]) -> str:
    """The folder for swapped activations: what the user says, or where the run writes already."""
    return os.environ.get(STORE_VARIABLE) or job["out"] or tempfile.gettempdir()


def products(reproducible: bool) -> dict[str, Any]:
    """How a GPU chooses products: reproducible ones are not timed against each other."""
    return {"reproducible": reproducible, "candidates": 0 if reproducible else TIMED}


def _device_of(job: Mapping[str, Any], rank: int, members: int) -> dict[str, Any]:
    """Of a GPU: which (of this machine), and how products are chosen: of several copies of the model in one way, or other stages
    would give other bits and the one order of their sums would be worth nothing."""
    backend = choose(job["backend"], job.get("dtype"))
    if backend.name == "cpu":
        return {}
    here, devices = job.get("local_rank", rank), job.get("devices")
    own = devices[here] if devices is not None else own_gpu(here) if "local_rank" in job else here
    return {"backend": backend, "device": own, "eager": eager(),
            **products(bool(job["reproducible"]) or members > 1)}


def make_engine(job: Mapping[str, Any], rank: int, comm: _core.Comm) -> _TrainingEngine:
    """A rank's engine, with the parameters that the job's seed gives, unless others are loaded."""
    from .plan import Plan

    plan = Plan.from_dict(job["plan"])
    if job["backend"] == "cuda":
        from .device_comm import agree_on_attention, connect

        where = _device_of(job, rank, plan.data_parallel * plan.copies)
        agree_on_attention(job, comm, where["device"], where["backend"].dtype)
        comm = connect(job, comm, plan)
    engine = _TrainingEngine(job, plan, rank, comm)
    if job["drawn"]:
        engine.load(_initial(plan.model, job["seed"], engine._shapes, comm))
    return engine


def _initial(model: Any, seed: int, names: Any, comm: _core.Comm | None = None) -> dict[str, Float32]:
    """comm: of a rank, which its region's abort ends in the midst of it."""
    shape = dimensions(model)
    return {row[0]: _core.model_init_param(shape, index, seed, comm) for index, row in enumerate(_core.model_params(shape))
            if row[0] in names}


def machine_memory() -> tuple[int | None, int]:
    """Bytes of this machine's memory, None where the system does not say, and of what it swaps to."""
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file]
        said = {row[0]: 1024 * int(row[1]) for row in rows if row[:1] in (["MemTotal:"], ["SwapTotal:"])}
    except (OSError, ValueError, IndexError):
        said = {}
    return said.get("MemTotal:"), said.get("SwapTotal:", 0)


def init_params(model: GPTConfig, seed: int = 0) -> dict[str, Float32]:
    """{name: float32 array}: what `launch(..., seed=seed)` of this model starts from. Names and shapes of Hugging Face's
    GPT2LMHeadModel.

    Normal 0.02, residual projections 0.02 / sqrt(2 n_layer), biases 0, LayerNorm weights 1; Philox keyed by (seed, name,
    index), so a value does not depend on the partition (Radford et al. 2019; Salmon et al. 2011).
    """
    if not isinstance(model, GPTConfig):
        raise _core.InvalidTypeError(f"model is {brief(model)}: a GPTConfig would be right")
    seed, needed, total = whole("seed", seed, 0, 2**64 - 1), 4 * model.num_params, _core.memory_room()[0]
    try:
        if total is not None and needed > total + machine_memory()[1]:   # the system would promise it, and end this process later
            raise MemoryError
        return _initial(model, seed, {row[0] for row in _core.model_params(dimensions(model))})
    except MemoryError:
        room = "" if total is None else f" of {total} bytes"
        raise _core.OutOfMemoryError(f"the parameters of {model!r} take {needed} bytes, which this process's memory{room} does not "
                                     "hold: a smaller model would be right") from None


def some_params(model: GPTConfig) -> dict[str, Float32]:
    """Small numbers of both signs, made quickly: kernels take the same time for any that are not subnormal."""
    from .checkpoint import param_shapes

    some = np.random.Generator(np.random.Philox(3)).standard_normal(1 << 16, np.float32) * np.float32(0.02)
    return {name: np.resize(some, shape) for name, shape in param_shapes(model).items()}


def _check_tokens(model: GPTConfig, tokens: Any) -> NDArray[np.int32]:
    try:
        array = np.asarray(tokens)
        if np.ma.is_masked(tokens):
            raise ValueError
    except ValueError:
        raise _core.InvalidValueError(f"tokens are {brief(tokens)}: integers [batch, T + 1] would be right") from None
    if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] < 2 or not np.issubdtype(array.dtype, np.integer):
        raise _core.InvalidValueError(f"tokens are {array.dtype} {array.shape}: integers [batch, T + 1] would be right")
    if array.shape[1] - 1 > model.block_size:
        raise _core.InvalidValueError(f"tokens have T = {array.shape[1] - 1}: at most block_size = {model.block_size} would "
                                      "be right")
    bad = np.argwhere((array < 0) | (array >= model.vocab_size))
    if len(bad):
        row, column = bad[0]
        raise _core.InvalidValueError(f"tokens[{row}, {column}] is {array[row, column]}: 0 to {model.vocab_size - 1} would be "
                                      "right")
    return np.ascontiguousarray(array, np.int32)


def _normal_slicing(slicing: Any, batch: int, seq_len: int) -> list[tuple[int, list[int]]]:
    from .partition import check_slicing

    if slicing is None:
        slicing = [seq_len]
    if isinstance(slicing, (tuple, list)) and slicing and not isinstance(slicing[0], (tuple, list)):
        slicing = [(1, list(slicing))] * batch
    return [(b, list(lengths)) for b, lengths in check_slicing(slicing, batch, seq_len)]


def loss_and_grads(model: GPTConfig, params: Mapping[str, NDArray[Any]], tokens: Any, slicing: Any = None, stages: int = 1, *,
                   threads: int = 1, backend: str = "cpu", dtype: str | None = None) -> tuple[float, dict[str, Float32]]:
    """(mean loss, {name: gradient}) of tokens [batch, T + 1] by the real stages and engine, one thread per stage.

    model: a GPTConfig; params: {name: float32 array}, as of `init_params`. threads: that share the kernels of each stage.
    slicing: None (each sequence whole), slice lengths of every sequence, an int (so many equal slices), or the paper's
    notation [(sequences, [lengths]), ...]. Loss and gradients are the same bits for every slicing and every `stages`; with
    backend "cuda" (all stages on the first GPU; dtype "bf16", or "float32") for every slicing of the same micro-batches.
    """
    from .checkpoint import check_finite, check_names
    from .partition import even_partition

    if not isinstance(model, GPTConfig):
        raise _core.InvalidTypeError(f"model is {type(model).__name__}: a GPTConfig would be right")
    if not isinstance(params, Mapping):
        raise _core.InvalidTypeError(f"params is {type(params).__name__}: {{name: float32 array}} would be right")
    array = _check_tokens(model, tokens)
    cuts = _normal_slicing(slicing, array.shape[0], array.shape[1] - 1)
    stages, threads, where = whole("stages", stages), whole("threads", threads, most=MOST_THREADS), choose(backend, dtype)
    device: dict[str, Any] = {} if where == CPU else {"backend": where, "reproducible": True}
    if stages > model.num_blocks:
        raise _core.InvalidValueError(f"stages is {stages}: 1 to {model.num_blocks} (the model's blocks) would be right")
    program = schedules.gpipe(stages, len(cuts), [len(lengths) for _, lengths in cuts]).split(pending=0).lower(model.tie_weights)
    partition = even_partition(model, stages)
    region = _core.Region.create(stages, _everyone(stages), 1 << 16, max(64, gather_bytes(model)), False)

    def work(rank: int) -> tuple[float, dict[str, Float32]]:
        engine = RankEngine(model, partition, cuts, program, rank, _core.Comm(region, rank, 600.0), threads=threads,
                            **device)
        engine.load(params)
        check_finite("params", {name: params[name] for name in engine.names})
        if rank == 0:
            check_names("params", params, model)
        loss, *_ = engine.run(array, update=False)
        return loss, engine.export("grads")

    results = in_threads(region, work)
    loss, grads = results[0][0], {name: grad for _, part in results for name, grad in part.items()}
    if not math.isfinite(loss):
        raise _core.ExecutionError(f"the loss is {loss}")
    return loss, {row[0]: grads[row[0]] for row in _core.model_params(dimensions(model))}


def in_threads(region: _core.Region, work: Callable[[int], T]) -> list[T]:
    """[work(rank) of every rank of the region], each in a thread; closes the region. The first failure is raised, and ends
    the others; so does Ctrl-C."""
    results: list[Any] = [None] * region.ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            region.abort("ERUNTIME", rank, str(error))

    ranks = [Worker(run, rank, name=f"rank {rank}") for rank in range(region.ranks)]
    try:
        start_all(ranks, lambda why: region.abort("ERUNTIME", -1, why))
        for thread in ranks:
            thread.join()
    except BaseException:
        region.abort("EABORTED", -1, "interrupted")
        raise
    finally:
        for thread in ranks:
            if thread.ident is not None:
                thread.join()
        region.close()
        let_go(errors)
    for error in sorted(errors, key=lambda e: isinstance(e, _core.AbortedError)):   # the first cause, not its echoes
        raise error
    return results


def _everyone(ranks: int) -> bytearray:
    return bytearray(int(a != b) for a in range(ranks) for b in range(ranks))
