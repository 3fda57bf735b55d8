"""The entrance of planning: from a model, a cluster and costs to a :class:`Plan`: stages, slices, schedule, program and what to
expect of them.

Planning runs no kernels and reads no clock except to report its own time: the same request gives the same plan. Every
candidate is judged by the simulator on the very program that the engine would execute.
"""
from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .. import _core, cuda
from .._core import DeadlineError, InfeasibleError, InvalidValueError
from ..config import Cluster, GPTConfig, brief, flag, human_rate, human_seconds
from ..cost import CostModel
from ..plan import Plan
from ..planners.slicing_bound import plan_slicing_bound
from ..progress import planning
from ..roofline import CORE_FLOPS
from ..schedules import CHIMERA
from .deadline import late, limited, within, without
from .enough import is_least, least_named
from .joint import plan_jointly
from .judge import Candidate, Judge, pace
from .partitioners import Found, plan_one
from .replicas import ALONE
from .request import BOTH_WAYS, Request, check_request
from .singles import at_once

__all__ = ["costs_on", "made", "plan", "tell_of_costs"]


def _log_both_ways(found: Found) -> list[str]:
    """What auto tried for schedule chimera, where there is no joint search."""
    return [f"schedule {CHIMERA}: asked terapipe alone, which searches two copies of the model",
            *(f"searched {what}: {human_seconds(seconds)}" for what, seconds in found.compared),
            f"best: {human_seconds(found.candidate.seconds)} by terapipe"]


def _plan_one_within(request: Request) -> Found:
    """``plan_one``; within a limit of time not without a plan that is quickly built, where the planner has one such."""
    if not limited() or request.planner not in BOTH_WAYS:
        return plan_one(request)
    with without():
        if request.planner == "uniform":
            return plan_one(request)
        _, reserve = at_once(request)
    if reserve is not None and late():
        return reserve
    try:
        found = plan_one(request)
    except DeadlineError:
        if reserve is None:
            raise
        return reserve
    return found if reserve is None or found.candidate.seconds <= reserve.candidate.seconds else reserve


def _planned(request: Request, progress: bool | None) -> tuple[Found, list[str]]:
    """The plan that was asked for and the search's log, within the limit of time."""
    try:
        with within(request.time_limit_s), planning(progress if request.planner == "auto" else False) as line:
            if request.planner == "auto" and request.schedules != (CHIMERA,):
                return plan_jointly(request, line.say)
            try:
                found = _plan_one_within(request)
            except InfeasibleError as error:
                sure = limited() or request.planner != "terapipe" or request.schedules == (CHIMERA,) or is_least(request)
                raise error if sure else least_named(error, [request], request.limit) from None
            return found, _log_both_ways(found) if request.planner == "auto" else []
    except DeadlineError as error:
        raise DeadlineError(f"{error}; time_limit_s is {request.time_limit_s:g}, and planner {request.planner} had no plan by "
                            "then that fits") from None


def plan(model: GPTConfig, cluster: Cluster, batch: int, seq_len: int, costs: CostModel | None = None, *,
         planner: str = "auto", schedule: str = "auto", stages: int | None = None, data_parallel: int | None = None,
         tensor_parallel: int | None = None, chunks: int | None = None, memory_bytes: float | None = None,
         granularity: int | None = None, partition: Sequence[tuple[int, int]] | None = None,
         slicing: int | Sequence[tuple[int, Sequence[int]]] | None = None, executable: bool | None = None,
         time_limit_s: float | None = None, backend: str | None = None, dtype: str | None = None,
         recompute: str | Sequence[bool] | None = None, progress: bool | None = None, shard_optimizer: bool | None = None) -> Plan:
    """Plan one training step of ``batch`` sequences of ``seq_len`` tokens.

    Args:
        model, cluster: what is trained, and on what; batch: sequences of a step, of all replicas; seq_len: tokens of each.
        costs: a CostModel; None: ``CostModel.analytic(model, cluster)``.
        planner: "auto": all of the others, then a search over stages, replicas, micro-batches, slices, stage boundaries,
            chunks and schedules, best first, bounded by certificates; never slower than any of the others on the same
            request (but for plans that ``executable`` rules out), nor than any of them with a schedule and chunks by name, nor
            than terapipe on fewer ranks or with replicas where these are left open (numbers that divide the devices', and all
            up to 16; up to 4 chunks; ``time_limit_s`` may leave some out, which the log says). Where a rank can have more than
            8 chunks, of those above 4 only numbers are weighed that divide the layers evenly; and a search that took long and is
            not likely to beat the best plan so far ends before its finest slices: the log says both. What is given
            only to the other planner besides (data_parallel to a paper's, a finer granularity, a partition, a slicing) may make
            it faster; and chunks, beside a partition: without them auto has a stage of it on every rank. Up to four cores are
            used where there is no time limit. ``plan.search_log`` says what was tried and why it stopped.
            "terapipe": exact token (and batch) slicing for equal stages, stages balanced by the costs of the blocks, then a
            descent on slice and stage boundaries judged by simulating the real program (embedding, head, optimizer and
            messages included). "uniform": layers divided evenly, as Megatron does, on all devices where ``stages`` does not name
            fewer, be these faster or not. The others choose stages (and recompute and swap) as their papers do, for whole
            sequences: "autopipe", "autopipe_heuristic", "dawnpiper", "dawnpiper_binary", "bmpipe", "pipedream", "dapple",
            "piper", "vpipe", "adapipe", "merak".
        schedule: "gpipe", "1f1b", "seq1f1b", "interleaved" (with ``chunks`` stages a rank; of a batch that is no multiple of the
            ranks only with ``slicing``), "looped-bfs" (the same breadth first, for any number of micro-batches: a long sequence
            in slices), "sliced-1f1b" (AutoPipe's: whole
            sequences, the first forwards in halves along the batch), "bpipe" (1f1b whose first ranks keep activations in the
            last ones' memory), "zb-h1", "zb-h2", and those whose stages go down the
            ranks and up again: "zb-v", "dualpipe-v" (two chunks a rank), "hanayo" (two chunks a wave; its authors' placement,
            in an order of ours), for the planners auto, terapipe and uniform; "chimera": two copies of the model, one pipeline
            down the ranks and one up, for the same planners (auto does what terapipe does; ranks and micro-batches are even; the
            copies add their gradients as replicas do);
            "pipedream": 1f1b with an update behind every micro-batch's backward, for gradients of the weights that it went
            forward with, of which the first ranks keep several versions (an untied head; no planner takes it by itself;
            ``launch(..., reproducible=False)`` runs it; a step has as many updates as micro-batches: ``slicing`` says how many);
            "auto": terapipe takes the fastest of the first three, the other planners 1f1b, auto of all (of bpipe and
            chimera no more than what a planner gives by their names, and of chimera only where its plan need not be
            ``executable``: ``launch(..., reproducible=False)`` runs it).
        stages: ranks of a replica; None: the fastest of num_devices, a half of them, a quarter, ... (where the model has fewer
            blocks, of as many as these, a half, ..., too); of planner uniform the first of these that its schedule allows.
        data_parallel: replicas, each with an equal share of the batch; they add their gradients once a step (``judge.Replicas``
            has the formula). None: 1; but the auto planner considers others where neither ``stages``
            nor ``slicing`` is given and the cluster is not this machine. ``launch(..., reproducible=False)`` runs them, on the
            CPU and on CUDA.
        tensor_parallel: 1 or None; there as a place for more.
        chunks: stages of a rank; None: 1, 2 where the schedule has several; the auto planner considers all numbers, unless a
            partition is given.
        memory_bytes: limit of each rank; None: the cluster's devices'. A larger limit never gives a slower plan, unless
            ``time_limit_s`` cuts the search short. A paper's planner has its own model of time, so it is asked for many limits up
            to this one, a 32nd apart (a 64th, where it neither recomputes nor swaps; up to a quarter, where that would take more
            than a second or two, from some 96 layers on 16 devices on), and of its plans that fit the one that simulates fastest
            is taken (``tp.planners`` gives its own answer). terapipe, where its fastest plan does not fit, looks for plans for ever
            less memory, in steps of a hundredth (in large requests up to a quarter) that do not depend on the limit, down to the
            plan that needs least. auto takes the fastest of all these, and of plans that do not depend on the limit.
        granularity: slice lengths that are planned are multiples of this many tokens; None: chosen so that planning by terapipe
            stays around a second (up to two in the largest requests, four where memory binds there); auto asks all planners and
            searches every configuration, which takes seconds to tens: ``time_limit_s`` is for those who cannot wait. The choice is
            among powers of two that divide seq_len: an odd one is planned token by token, which takes seconds from 8,000 tokens
            on and minutes from 60,000. A number that divides another never gives terapipe a slower plan than the other.
        partition: [(first_block, last_block + 1), ...] of every virtual stage, instead of a planned one.
        slicing: [(micro_batch, [slice lengths]), ...], or M: one sequence a micro-batch, M slices, instead of a planned one.
            Of one replica.
        executable: True: only plans that ``launch`` runs as they are (one replica). False: any. None: True for the auto planner
            on this machine (``Cluster.local()``), False on others (``plan.executable`` says whether it runs here).
        time_limit_s: seconds after which planning stops with the best plan so far, plus about the time to build and judge one plan;
            what is being built then is given up. auto, terapipe and uniform make one plan at once, whatever the limit, in large
            requests the first two of no more ranks than is quickly done. auto shares the time between what it tries, and says in
            the log what was stopped or left out (it may then be slower than a planner by name); DeadlineError where nothing that
            fits was found by then: by a paper's planner, or where that first plan does not fit. None, or a limit that stops
            nothing: work is counted instead of time, so that the same request gives the same plan everywhere.
        backend, dtype: whose memory the plan's is: "cpu", or "cuda" with "bf16" (dtype None) or "float32"; backend None: the
            costs'. A plan for "cuda" is launched there alone.
        recompute: "ffn", "attention" or "full" (both): these blocks keep their input alone and compute the rest again before
            their backward; or a bool for each block. Both are made again slice by slice, for which attention keeps its keys and
            values (on CUDA its queries, too); but attention all slices of a micro-batch at once where a rank holds so many of these
            that it takes less, and where it is faster and fits. Of micro-batches of one slice blocks are made again one by one
            within the backward where nothing else fits, or that is as fast. What ``memory_bytes`` leaves is spent on speed
            nevertheless: a weight gradient may wait and keep what was computed again, so that without a limit the plan may need
            more memory than one that recomputes nothing. None: what the planner chooses: dawnpiper, bmpipe, piper, vpipe and
            adapipe do so within the memory; auto weighs theirs and, where memory binds, slices with each of the three names (in
            every schedule, where nothing else fits); the others recompute nothing. Where
            ``cluster.host_bandwidth_Bps`` is given dawnpiper and vpipe, and with them auto, swap too: what a block computed leaves
            the memory between its forward and its backward. On the CPU it goes to a file,
            in the run's folder or the one that TERAPIPE_SWAP_DIR names: that disk's bandwidth is meant, which
            ``Cluster.local(swap_folder=...)`` measures. With ``cluster.swaps_beside``, and on CUDA, copies are made beside the
            work, and what is brought back comes as far ahead as is fastest in the memory.
        shard_optimizer: True: each of several replicas (or copies of the model, chimera's) has AdamW's moments of a part of its
            stages' parameters, updates these alone, and gathers the others' new values, in place of their gradients (ZeRO's first
            stage, Megatron-LM's distributed optimizer): the same bits, 8 (1 - 1 / replicas) bytes a parameter less, and no more
            bytes sent. ``sums_beside`` then hides half as much: values are gathered behind the update. None: False. With one
            replica there is nothing to share: the plan's search log says so, and its ``shard_optimizer`` is False.
        progress: None: where the auto planner takes more than two seconds, a line on a terminal or in a notebook says what it is
            at, and is gone when it ends; False: silence.

    Raises:
        ValueError: the request contradicts itself or the model; names the argument, its value and what would be right.
        InfeasibleError: no plan that was found fits the memory; names the rank and the bytes it is short, and the least limit in
            which this planner finds a plan (``error.memory_bytes``). auto asks for it once more, and terapipe where stages are
            looped or recompute, or a rank has several: where that takes long not to the end, and under ``time_limit_s`` not at
            all, so that there the limit is enough, but less may be, too. From terapipe with one stage a rank, not looped, it is
            the least possible one, without recomputation, on the numbers of ranks that it compares: over all contiguous stages,
            with the slices (the given ones, or those that hold least).
        DeadlineError: within time_limit_s no plan that fits was found.
    """
    start = time.perf_counter()
    progress = None if progress is None else flag("progress", progress)
    costs = costs_on(model, cluster, costs, backend, dtype)
    request = check_request(
        model, cluster, batch, seq_len, costs, planner=planner, schedule=schedule, stages=stages, data_parallel=data_parallel,
        tensor_parallel=tensor_parallel, chunks=chunks, memory_bytes=memory_bytes, granularity=granularity,
        partition=partition, slicing=slicing, executable=executable, time_limit_s=time_limit_s,
        recompute=recompute, shard_optimizer=shard_optimizer)
    tell_of_costs(cluster, seq_len, costs)
    return made(request, progress, start)


def made(request: Request, progress: bool | None, start: float) -> Plan:
    """The plan of what is asked. start: of its planning, by time.perf_counter()."""
    around, abandons = _core.deadline_get(), _core.deadline_abandon(False)
    try:
        _core.deadline_set(0)                                  # a signal's handler may plan amid a plan whose limit is not its own
        found, log = _planned(request, progress)
        _core.deadline_set(0)
        _core.deadline_abandon(False)
        return _finished(request, found, log, start)
    finally:                                                   # Ctrl-C may fall between setting the limit and restoring what was
        _core.deadline_set(around)
        _core.deadline_abandon(abandons)


def costs_on(model: Any, cluster: Any, costs: Any, backend: Any, dtype: Any) -> Any:
    """The costs of ``plan``'s arguments, for its backend and dtype; what is no cost model is left for ``check_request``."""
    if (backend is None and dtype is None) or not isinstance(model, GPTConfig) or not isinstance(cluster, Cluster):
        return costs
    if costs is None:
        costs = CostModel.analytic(model, cluster)
    if not isinstance(costs, CostModel):
        return costs
    found = costs.on(costs.backend if backend is None else backend, dtype)
    if costs.source == "measured" and (costs.backend, costs.dtype) != (found.backend, found.dtype):
        warnings.warn(f"the costs were measured on {costs.backend!r} in {costs.dtype} and the plan is for {found.backend!r} in "
                      f"{found.dtype}: its memory is right, its seconds are the other's; costs of tp.profile(..., "
                      f"backend={found.backend!r}, dtype={found.dtype!r}) would be right", stacklevel=3)
    return found


def tell_of_costs(cluster: Cluster, seq_len: int, costs: CostModel | None) -> None:
    """Warn who called our caller of costs that are of a GPU and of other sequences (a slice's backward pulls: its keys have their
    gradients from every later token, so that its seconds depend on how many there are; the CPU's pushes, and its costs go on), or
    of another machine's, where the plan is for this one."""
    if costs is None or costs.backend != "cuda":
        return
    if costs.source == "measured" and costs.seq_len not in (None, seq_len):
        warnings.warn(f"the costs were measured on sequences of {costs.seq_len} tokens and the plan's have {brief(seq_len)}: on "
                      "'cuda' a slice's backward takes longer the more tokens follow it, so that the plan's seconds are off; costs "
                      f"of tp.profile(..., seq_len={brief(seq_len)}, backend='cuda') would be right", stacklevel=3)
    if not costs.device or not cluster.is_local or cuda.why_not():
        return
    here = list(dict.fromkeys(gpu.name for gpu in cuda.devices()))
    if costs.device not in here:
        warnings.warn(f"the costs were measured on {costs.device!r} and this machine's GPUs are {' and '.join(map(repr, here))}: "
                      "the plan's seconds are the other's; costs of tp.profile(..., backend='cuda') here would be right",
                      stacklevel=3)


def _source(request: Request) -> str:
    """What a plan says of its costs: of those that are computed from its own cluster's devices, of how fast ones."""
    costs, cluster = request.costs, request.cluster
    if costs.source == "analytic":
        with suppress(InvalidValueError):       # of other devices, where these are too slow for any costs
            if costs.curves == CostModel.analytic(request.model, cluster).curves:
                return f"analytic, {human_rate(cluster.peak_flops or CORE_FLOPS, 'FLOP/s')} a device"
    return costs.source


def _spared(judge: Judge, c: Candidate) -> Candidate:
    """A plan that recomputes: the same with no W waiting (they keep what was made again), and attention made again in the other
    way, where that fits and is faster, or as fast in less memory."""
    def key(c: Candidate) -> tuple[float, int]:
        return pace(c), max(judge.peak_bytes(c))

    if not any(c.savings.recompute):
        return c
    kinds = {block.kind for block, flag in zip(judge.model.blocks, c.savings.recompute, strict=True) if flag}
    ways = [c]      # as it is: judged again, slices that a descent gave a plan with whole B would have I and W
    if judge.costs.where.keeps_keys and "attention" in kinds:  # of a planner's own choice, too
        ways.append(judge.judge(*c[1:-1], c.savings._replace(at_once=not c.savings.at_once)))
    for way in ways:                                           # and of what is added
        ways += judge.leaner(way)
    return min((way for way in ways if way == c or judge.fits(way, judge.limit)), key=key)


def _finished(request: Request, found: Found, log: Sequence[str], start: float) -> Plan:
    """The value of what was found."""
    judge, c, model = found.judge, _spared(found.judge, found.candidate), request.model
    program = judge.lowered(c)
    durations = judge.full_durations(c, program)
    program.check()
    line = program.simulate(durations)
    alone = judge.replicas.count * program.copies == 1
    if judge.replicas.shards and alone:     # no error: Megatron takes --use-distributed-optimizer with one replica
        log = [*log, ALONE]
    return Plan(
        model=model, cluster=request.cluster, batch=request.batch, seq_len=request.seq_len, planner=request.planner,
        schedule=c.schedule, ranks=judge.ranks, chunks=judge.chunks, stages=list(c.partition),
        slicing=[(b, list(lengths)) for b, lengths in c.slicing], program=program, durations=durations,
        step_time_s=float(line.makespan_s), lower_bound_s=float(line.lower_bound_s), compared=list(found.compared),
        peak_memory_bytes=judge.peak(c, program), memory_limit_bytes=request.limit,
        bubbles={k: float(v) for k, v in line.bubbles.items()}, busy_s=[float(x) for x in line.busy_s],
        slicing_bound_s=plan_slicing_bound(judge, c, request.unit),
        backend=judge.costs.backend, dtype=judge.costs.dtype, device=judge.costs.device, reproducible=judge.costs.reproducible,
        cost_source=_source(request),
        granularity=request.unit, data_parallel=judge.replicas.count, search_log=list(log),
        shard_optimizer=judge.replicas.shards and not alone,
        recompute=list(c.savings.recompute or [False] * model.num_blocks),
        swap=list(c.savings.swap or [0] * model.num_blocks), planning_time_s=time.perf_counter() - start)
