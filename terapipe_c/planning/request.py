"""Checks ``tp.plan``'s arguments before any work (:func:`check_request`), and holds them for the planners (:class:`Request`)."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import planners
from .._core import MODEL_LAYERS, InvalidTypeError, InvalidValueError
from ..backend import heads_refused
from ..config import LONG, Cluster, GPTConfig, brief, counted, flag, no_divisor, one_of, real, whole
from ..cost import PHASES, CostModel
from ..guests import BPIPE
from ..links import Links
from ..partition import check_partition, check_slicing
from ..schedules import CHIMERA, LOOPED, PIPEDREAM, SLICED, ZERO_BUBBLE, ZIGZAG
from .judge import Cut, Judge, Micro, possible
from .replicas import Replicas
from .savings import NOTHING, Savings
from .starts import StageCost

__all__ = ["PLANNERS", "Request", "check_request"]

# The planners that tp.plan knows: ours, those of the papers, and the baselines.
PLANNERS = ("auto", "terapipe", "uniform", "autopipe", "autopipe_heuristic", "dawnpiper", "dawnpiper_binary", "bmpipe",
            "pipedream", "dapple", "piper", "vpipe", "adapipe", "merak")
SAVERS = ("dawnpiper", "dawnpiper_binary", "bmpipe", "piper", "vpipe", "adapipe")   # planners that choose what to recompute
SWAPPERS = ("dawnpiper", "dawnpiper_binary", "vpipe")                                 # planners that choose what to swap
RECOMPUTE = {"ffn": ("ffn",), "attention": ("attention",), "full": ("attention", "ffn")}   # kinds of blocks that a name recomputes
SEARCHING = ("auto", "terapipe")          # planners that choose among schedules; the others plan for the given one, or 1f1b
CHUNKED = ("auto", "terapipe", "uniform", "bmpipe")   # planners that can give a rank several stages
BOTH_WAYS = ("auto", "terapipe", "uniform")   # planners that can plan two copies of the model (Chimera)
# The order decides ties: of equally fast programs the one that holds fewer activations comes first.
AUTO = ("seq1f1b", "1f1b", "gpipe")
ROUND = ("interleaved", LOOPED)            # whose stages go round the ranks, as often as there are chunks
SCHEDULES = ("auto", *AUTO, *ROUND, SLICED, *dict.fromkeys((*ZERO_BUBBLE, *ZIGZAG)), CHIMERA, BPIPE, PIPEDREAM)
ELSEWHERE = {                             # a schedule's name in torch.distributed.pipelining, and in tp.schedules
    "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v", "schedulegpipe": "gpipe", "schedule1f1b": "1f1b",
    "scheduleinterleaved1f1b": "interleaved", "scheduleloopedbfs": LOOPED, "schedulezbvzerobubble": "zb-v",
    "scheduledualpipev": "dualpipe-v", "onefoneb": "1f1b",
}
MOST_MICROS = 65536                       # most micro-batches of a program
MOST_BATCH = 2**31 - 1                    # C counts sequences in an int32
_LARGE = 65536                            # up to so many (slices x stages) of a program the search is quick
_FEW_SLICES = 8                           # a sequence may have so many slices however large the program gets
SEVERAL = (*ROUND, *ZIGZAG)        # schedules with several stages a rank
_MANY = (*ROUND, "hanayo")                # those that can have more than two
JOINT = (*AUTO, "zb-h1", "zb-h2", SLICED, *SEVERAL)   # schedules that the joint search weighs
BY_NAME = (BPIPE, CHIMERA)                # schedules for which it only asks planners by name


def _check_work(costs: CostModel, model: GPTConfig, cluster: Cluster, batch: int, seq_len: int) -> None:
    """Refuse costs by which a step takes more than LONG seconds: sums and products of them would overflow."""
    size = costs.element_bytes * model.n_embd * seq_len
    far_s = cluster.link_latency_s + size / cluster.link_bandwidth_Bps if cluster.tells_nodes_apart else 0.0
    messages = 2.0 * batch * model.num_blocks * max(float(costs.message_s(seq_len, model.n_embd)), far_s)
    if not messages <= LONG:
        raise InvalidValueError(f"costs and links say that a step's messages, one by one, take {messages:g} seconds: at most "
                                f"{LONG:g} would be right")
    one = costs.durations(partition=[(0, model.num_blocks)], slicing=[(1, [seq_len])], model=model)
    work = batch * sum(float(one[phase].sum()) for phase in PHASES)
    if not work <= LONG:
        raise InvalidValueError(f"costs say that a step is {work:g} seconds of work: at most {LONG:g} would be right")


def choose_granularity(seq_len: int, batch: int, most: int | None = None) -> int:
    """The finest power of two that keeps the slice planner's tables (a DP of L^2 edges for each micro-batch size) small; at most
    ``most`` units a sequence where that is given. At least 8 tokens, the paper's choice, where the sequence is so long (128) that
    finer cuts make no difference."""
    finest = 8 if seq_len >= 128 else 1
    allowed = max(64, 4096 // min(batch, 16)) if most is None else most
    unit = 1
    while seq_len % (2 * unit) == 0 and (unit < finest or seq_len // unit > allowed):
        unit *= 2
    return unit


def _chosen_granularity(model: GPTConfig, costs: CostModel, seq_len: int, batch: int, stages: int) -> int:
    """``choose_granularity``, and coarser where the best slicing for equal stages has so many slices that a search would be
    slow."""
    unit, most = choose_granularity(seq_len, batch), max(_FEW_SLICES, _LARGE // (batch * stages))
    coarser = choose_granularity(seq_len, batch, most) if seq_len // unit > most else unit
    if coarser > unit:
        best = planners.slice_tokens(StageCost(costs, model, stages), stages, seq_len=seq_len, granularity=unit)
        unit = coarser if len(best.lengths) > most else unit
    return unit


@dataclass(frozen=True)
class Request:
    """A checked request. What a planner may still choose has several values (schedules, ranks), None, or a ``free_`` flag."""

    model: GPTConfig
    cluster: Cluster
    costs: CostModel
    batch: int                          # of all replicas together
    seq_len: int
    planner: str
    schedules: tuple[str, ...]
    chunks: int
    ranks: tuple[int, ...]              # numbers of ranks of one replica to consider
    replicas: int
    limit: int                          # bytes that a rank may use
    unit: int                           # tokens: the granularity of slices
    partition: Cut | None
    slicing: tuple[Micro, ...] | None   # of one replica
    free_ranks: bool = False            # free_*: not given, so that the joint search may choose
    free_replicas: bool = False
    free_chunks: bool = False
    free_schedule: bool = False
    free_copies: bool = False           # gradients may be summed in another order than on one device: replicas, Chimera
    time_limit_s: float | None = None
    recompute: tuple[bool, ...] = ()    # per block; empty: not given, so that planners choose
    shards: bool = False                # replicas shard the optimizer
    each_alone: bool = True             # terapipe searches each schedule alone, rather than all together
    kinds: dict[tuple[Any, ...], dict[str, float]] = field(default_factory=dict, compare=False)   # seconds of blocks, once made

    @property
    def share(self) -> int:
        """Sequences of a step that one replica has."""
        return self.batch // self.replicas

    def link(self, ranks: int) -> Replicas:
        """The replicas, and the link on which they sum their gradients, where each has ``ranks`` ranks."""
        return Replicas.of(self.cluster, ranks, self.replicas, self.costs, self.shards)

    def judge(self, ranks: int) -> Judge:
        """A new judge of plans for so many ranks."""
        return Judge(self.model, self.costs, ranks, self.chunks, self.limit, self.link(ranks), self.kinds,
                     Savings(self.recompute) if any(self.recompute) else NOTHING, Links.of(self.cluster, ranks, self.replicas),
                     self.cluster.swaps_beside or self.costs.backend == "cuda")


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


def halves(devices: int, blocks: int) -> tuple[int, ...]:
    """Numbers of ranks, largest first, each with at least a block: devices, half of them, ..., 1; and, where there are fewer blocks
    than devices, as many as blocks, half of that, ..."""
    counts = {n >> i for n in (devices, min(devices, blocks)) for i in range(n.bit_length())}
    return tuple(sorted((n for n in counts if n <= blocks), reverse=True))


def _check_stages(model: GPTConfig, cluster: Cluster, stages: Any, chunks: int, replicas: int,
                  partition: Cut | None) -> tuple[int, ...]:
    """Numbers of ranks to consider."""
    if partition is not None:
        if len(partition) % chunks:
            raise InvalidValueError(f"chunks is {chunks}: partition has {counted(len(partition), 'stage')}, and a multiple of "
                                    "chunks would be right")
        ranks = len(partition) // chunks
        if stages is not None and whole("stages", stages) != ranks:
            raise InvalidValueError(f"stages is {stages}: partition has {counted(len(partition), 'stage')} for "
                                    f"{counted(chunks, 'chunk')} a rank, so {ranks} would be right")
        stages = ranks
    if chunks > model.num_blocks:
        most = max(1, model.num_blocks // (1 if stages is None else whole("stages", stages)))
        raise InvalidValueError(f"chunks is {chunks}: the model has {model.num_blocks} blocks, so at most {most} would be right")
    if stages is not None:
        ranks = whole("stages", stages)
        if ranks * chunks > model.num_blocks:
            raise InvalidValueError(f"stages is {ranks}" + (f" of {chunks} chunks" if chunks > 1 else "") + f": the model has "
                                    f"{model.num_blocks} blocks, so at most {model.num_blocks // chunks} would be right")
        if ranks * replicas > cluster.num_devices and (replicas > 1 or not cluster.is_local):
            raise InvalidValueError(f"stages is {ranks}" + (f" and data_parallel {replicas}" if replicas > 1 else "") + ": the "
                                    f"cluster has {cluster.num_devices} devices, so at most {cluster.num_devices // replicas} "
                                    "would be right")
        return (ranks,)
    return halves(cluster.num_devices // replicas, model.num_blocks // chunks)


def _check_parallel(cluster: Cluster, batch: int, data_parallel: Any, tensor_parallel: Any, executable: bool) -> int:
    """The number of replicas."""
    if tensor_parallel is not None and whole("tensor_parallel", tensor_parallel) != 1:
        raise InvalidValueError(f"tensor_parallel is {tensor_parallel}: this version plans pipelines and data parallelism, 1 "
                                "would be right")
    replicas = 1 if data_parallel is None else whole("data_parallel", data_parallel)
    if replicas > 1 and executable:
        raise InvalidValueError(f"data_parallel is {replicas}: executable=True plans one replica, which launch runs with the bits "
                                "of one device; executable=None, and launch(..., reproducible=False), would be right")
    if replicas > cluster.num_devices:
        raise InvalidValueError(f"data_parallel is {replicas}: the cluster has {cluster.num_devices} devices, so at most "
                                f"{cluster.num_devices} would be right")
    if batch % replicas:
        raise no_divisor("data_parallel", replicas, "batch", batch)
    return replicas


def check_bidirectional(ranks: tuple[int, ...], free: bool, share: int, cut: tuple[Micro, ...] | None,
                        executable: bool) -> tuple[int, ...]:
    """Numbers of ranks to consider for Chimera; InvalidValueError where its micro-batches or ``executable`` rule it out."""
    if executable:
        raise InvalidValueError(f"schedule is {CHIMERA}: executable=True plans one copy of the model, which launch runs with the "
                                "bits of one device; executable=None, and launch(..., reproducible=False), would be right")
    ranks = (even_halves(ranks) or ranks[-1:]) if free else ranks
    why = possible(CHIMERA, ranks[0], share if cut is None else len(cut)) or unlike(cut or ())
    if why:
        raise InvalidValueError(why)
    return ranks


def _check_updates(model: GPTConfig, ranks: tuple[int, ...], replicas: int, executable: bool | None) -> None:
    """Refuse what cannot be joined with an update for every micro-batch (schedule pipedream)."""
    if executable:
        raise InvalidValueError(f"schedule is {PIPEDREAM}: executable=True plans what launch runs with the bits of one device, and "
                                "this one's gradients are of weights that others have updated since; executable=None, and "
                                "launch(..., reproducible=False), would be right")
    if model.tie_weights and max(ranks) > 1:
        raise InvalidValueError(f"schedule is {PIPEDREAM} and the model's tie_weights True: the two stages of a tied weight would "
                                "have different versions of it, tie_weights=False, or stages=1, would be right")
    if replicas > 1:
        raise InvalidValueError(f"schedule is {PIPEDREAM} and data_parallel {replicas}: replicas add their gradients once a step, "
                                "which has an update for every micro-batch here, 1 would be right")


def even_halves(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The even ones of ``ranks``, and of the largest even number up to the first of them, half of that, ...; maybe none."""
    most = ranks[0] - ranks[0] % 2
    return tuple(sorted({r for r in (*ranks, *halves(most, most)) if r % 2 == 0}, reverse=True))


def unlike(cut: tuple[Micro, ...]) -> str:
    """Where the micro-batches of Chimera's two copies (first and second half of ``cut``) differ, in the user's words; "":
    nowhere."""
    each = len(cut) // 2
    for q, (one, other) in enumerate(zip(cut[:each], cut[each:], strict=True)):
        if one != other:
            return (f"slicing[{q}] is ({one[0]}, {list(one[1])}) and slicing[{q + each}] ({other[0]}, {list(other[1])}): in "
                    f"schedule {CHIMERA} both copies of the model, which have half of the micro-batches each, have the same")
    return ""


def has_chunks(schedule: str, chunks: int) -> bool:
    """Whether the schedule can have so many stages a rank."""
    if schedule in ZIGZAG:
        return chunks == 2 or (chunks % 2 == 0 and schedule == "hanayo")
    return schedule in ROUND or chunks == 1    # interleaved with one chunk is 1F1B with a longer warm-up, looped-bfs is gpipe


def plans_order(planner: str, schedule: str) -> bool:
    """Whether the planner's model of time knows this order of several stages a rank."""
    return planner != "bmpipe" or schedule not in (*ZIGZAG, LOOPED)


def grouped(share: int, ranks: int, seq_len: int, costs: CostModel) -> str:
    """Of ``share`` sequences that make no multiple of the ranks in micro-batches of one each: what makes one, the smallest
    micro-batches that do, in the user's words; "": they are too few, or the costs know no such micro-batches."""
    micros = share // ranks * ranks
    if micros == 0 or -(-share // micros) > costs.known_batch:
        return ""
    size, larger = divmod(share, micros)
    parts = [(larger, size + 1), (micros - larger, size)]
    cut = " + ".join(f"[({b}, [{seq_len}])]" + (f" * {count}" if count > 1 else "") for count, b in parts if count)
    return f"slicing={cut} makes {micros} of the {share} sequences"


def by_name_alone(request: Request) -> tuple[str, ...]:
    """Those schedules of ``BY_NAME`` that the request leaves open, with one chunk; chimera only where gradients may be summed in
    another order than on one device (``free_copies``) and both copies can have the same micro-batches."""
    if not request.free_schedule or request.chunks > 1:
        return ()
    odd = len(request.slicing or ()) % 2
    return BY_NAME if request.free_copies and not odd and not unlike(request.slicing or ()) else (BPIPE,)


def schedules_of(request: Request, chunks: int) -> tuple[str, ...]:
    """Schedules with ``chunks`` stages a rank that the joint search may weigh."""
    if not request.free_schedule:
        return tuple(name for name in request.schedules if chunks == request.chunks or has_chunks(name, chunks))
    sliced = request.slicing is not None and max(len(lengths) for _, lengths in request.slicing) > 1
    alone = (request.share if request.slicing is None else len(request.slicing)) == 1
    left_out = (SLICED,) * sliced + (LOOPED,) * (chunks == 1 and alone)   # else order may differ
    return tuple(name for name in JOINT if has_chunks(name, chunks) and name not in left_out)


def _check_schedule(planner: str, schedule: Any, chunks: Any) -> tuple[tuple[str, ...], int]:
    """(schedules to consider, chunks)."""
    if chunks is None:
        chunks = 2 if schedule in SEVERAL else 1
    chunks = whole("chunks", chunks)
    if chunks > 1 and schedule not in (*SEVERAL, "auto"):
        raise InvalidValueError(f"chunks is {chunks}, but schedule {schedule} has one stage a rank: {', '.join(SEVERAL)} would "
                                "be right")
    if schedule in ZIGZAG and not has_chunks(schedule, chunks):
        raise InvalidValueError(f"chunks is {chunks}, but schedule {schedule} goes down the ranks and up again: "
                                + ("two a wave, 2, 4, ..., would be right" if schedule == "hanayo" else "2 would be right"))
    if schedule == CHIMERA and planner not in BOTH_WAYS:
        raise InvalidValueError(f"schedule is {schedule}: planner {planner} plans one pipeline, and this one has two in opposite "
                                "directions; planner auto, terapipe or uniform would be right")
    several = tuple(name for name in CHUNKED if name != "bmpipe" or plans_order(name, schedule))
    if planner == "bmpipe" and planner not in several:
        raise InvalidValueError(f"schedule is {schedule}: planner bmpipe plans chunks that go round the ranks, one forward, one "
                                "backward; interleaved would be right")
    if planner not in several and (chunks > 1 or schedule in ROUND):
        asked = f"schedule is {schedule}, with chunks" if schedule in SEVERAL else f"chunks is {chunks}"
        raise InvalidValueError(f"{asked}: planner {planner} plans one stage a rank; planner {', '.join(several)} would be right")
    if schedule == "auto" and chunks == 1:
        return (AUTO if planner in SEARCHING else ("1f1b",)), 1
    return ((schedule,) if schedule != "auto" or chunks == 1 else ("interleaved",)), chunks


def _check_recompute(recompute: Any, model: GPTConfig, planner: str) -> tuple[bool, ...]:
    """A bool for each block; empty: none was given."""
    if recompute is None:
        return ()
    if planner in SAVERS:
        raise InvalidValueError(f"recompute is {brief(recompute)}: planner {planner} chooses that itself, None would be right")
    kinds, right = [block.kind for block in model.blocks], "'ffn', 'attention', 'full' or a bool for each block would be right"
    if isinstance(recompute, str):
        again = RECOMPUTE.get(recompute)
        if again is None:
            raise InvalidValueError(f"recompute is {brief(recompute)}: {right}")
        return tuple(kind in again for kind in kinds)
    try:
        flags = list(recompute)
    except TypeError:
        raise InvalidTypeError(f"recompute is {type(recompute).__name__}: {right}") from None
    if len(flags) != len(kinds):
        raise InvalidValueError(f"recompute has {len(flags)} entries: one for each of the {len(kinds)} blocks would be right")
    for i, again in enumerate(flags):
        if not isinstance(again, (bool, np.bool_)):
            raise InvalidTypeError(f"recompute[{i}] is {brief(again)}: True or False would be right")
        if again and kinds[i] not in ("attention", "ffn"):
            raise InvalidValueError(f"recompute[{i}] is True, but that block is {model.blocks[i].name}: attention and FFN blocks "
                                    "can be recomputed")
    return tuple(bool(flag) for flag in flags)


def most_batch(cluster: Cluster) -> int:
    """The largest number of sequences a step that ``tp.plan`` takes on a cluster."""
    return min(MOST_MICROS * cluster.num_devices, MOST_BATCH)


def check_request(model: Any, cluster: Any, batch: Any, seq_len: Any, costs: Any, *, planner: Any, schedule: Any, stages: Any,
                  data_parallel: Any, tensor_parallel: Any, chunks: Any, memory_bytes: Any, granularity: Any, partition: Any,
                  slicing: Any, executable: Any, time_limit_s: Any, recompute: Any = None, shard_optimizer: Any = None) -> Request:
    """The request of ``tp.plan``'s arguments; a ValueError or TypeError names the argument, its value and what would be
    right."""
    if not isinstance(model, GPTConfig):
        raise InvalidTypeError(f"model is {type(model).__name__}: a GPTConfig would be right")
    if model.n_layer > MODEL_LAYERS:                           # before lists of its blocks fill the memory
        raise InvalidValueError(f"n_layer is {model.n_layer}: at most {MODEL_LAYERS} would be right")
    if not isinstance(cluster, Cluster):
        raise InvalidTypeError(f"cluster is {type(cluster).__name__}: a Cluster would be right")
    batch, seq_len = whole("batch", batch), whole("seq_len", seq_len)
    if batch > most_batch(cluster):
        raise InvalidValueError(f"batch is {batch}: at most {MOST_MICROS} sequences for each device would be right, and "
                                f"{MOST_BATCH} in all")
    if seq_len > model.block_size:
        raise InvalidValueError(f"seq_len is {seq_len}: at most the model's block_size = {model.block_size} would be right")
    planner, schedule = one_of("planner", planner, PLANNERS), one_of("schedule", schedule, SCHEDULES, ELSEWHERE)
    executable = None if executable is None else flag("executable", executable)
    replicas = _check_parallel(cluster, batch, data_parallel, tensor_parallel, executable is True)
    free_chunks = planner == "auto" and chunks is None and schedule in ("auto", *_MANY) and partition is None
    names, chunks = _check_schedule(planner, schedule, chunks)
    if not isinstance(slicing, (list, tuple)) and batch // replicas > MOST_MICROS:     # else lists of them are made
        enough = [more for more in range(-(-batch // MOST_MICROS), cluster.num_devices + 1) if batch % more == 0 and not executable]
        raise InvalidValueError(f"batch is {batch}" + f" and data_parallel {replicas}" * (replicas > 1) + f": at most "
                                f"{MOST_MICROS} sequences for each replica would be right"
                                + "".join(f" (data_parallel={more})" for more in enough[:1])
                                + ", or a list of no more micro-batches as slicing")
    checked = None if partition is None else check_partition(partition, model)
    ranks = _check_stages(model, cluster, stages, chunks, replicas, checked)
    cut = None if slicing is None else check_slicing(slicing, batch // replicas, seq_len)
    for q, (_, lengths) in enumerate(cut or ()):
        if schedule == SLICED and len(lengths) > 1:
            raise InvalidValueError(f"slicing[{q}] has {len(lengths)} slices, but schedule {SLICED} has whole sequences: 1 "
                                    "would be right")
    if schedule == CHIMERA:
        ranks = check_bidirectional(ranks, stages is None and checked is None, batch // replicas, cut, executable is True)
    checked_costs = _check_costs(costs, model, cluster)
    if schedule == PIPEDREAM:
        _check_updates(model, ranks, replicas, executable)
    if chunks > 1 or schedule == "interleaved":
        micros = batch // replicas if cut is None else len(cut)
        free = stages is None and checked is None
        known = tuple(n for n in JOINT if has_chunks(n, chunks)) if planner == "auto" and schedule == "auto" else names

        def why_not(r: int) -> str:
            reasons = [possible(name, r, micros) for name in known]
            return "" if "" in reasons else reasons[0]

        ranks = tuple(r for r in ranks if not why_not(r)) or ranks[-1:] if free else ranks
        told = known == ("interleaved",) and planner != "bmpipe" and chunks > 1
        for why in map(why_not, ranks):
            if why:
                fewer = cut is None and "interleaved" in known      # dualpipe-v wants more of them, not fewer
                groups = grouped(batch // replicas, ranks[0], seq_len, checked_costs) if fewer else ""
                raise InvalidValueError(why + f"; schedule {LOOPED} has any number" * told + (f"; {groups}" if groups else ""))
    limit = int(real("memory_bytes", cluster.memory_bytes if memory_bytes is None else memory_bytes))
    if granularity is None:
        unit = 0
    else:
        unit = whole("granularity", granularity)
        if seq_len % unit:
            raise no_divisor("granularity", unit, "seq_len", seq_len)
    _check_work(checked_costs, model, cluster, batch, seq_len)
    if unit == 0:
        unit = _chosen_granularity(model, checked_costs, seq_len, batch // replicas, max(ranks) * chunks)
    open_ranks = stages is None and checked is None
    runs_here = planner == "auto" and cluster.is_local if executable is None else executable
    if runs_here and (why := heads_refused(model, checked_costs.backend, checked_costs.dtype)):
        raise InvalidValueError(why)
    open_replicas = open_ranks and data_parallel is None and cut is None and not runs_here and schedule != PIPEDREAM
    return Request(model, cluster, checked_costs, batch, seq_len, planner, names, chunks, ranks, replicas,
                   limit, unit, checked, cut, open_ranks, open_replicas, free_chunks,
                   planner == "auto" and schedule == "auto", not runs_here,
                   time_limit_s=None if time_limit_s is None else real("time_limit_s", time_limit_s),
                   recompute=_check_recompute(recompute, model, planner),
                   shards=shard_optimizer is not None and flag("shard_optimizer", shard_optimizer))
