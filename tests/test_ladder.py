"""More memory never gives a slower plan through ``tp.plan``, whichever planner: not a matter of course for a paper's planner, whose
objective is not the engine's time."""
import itertools
import math
import re

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c.partition import even_partition
from terapipe_c.planning import ladder, search
from terapipe_c.planning.judge import Judge
from terapipe_c.planning.ladder import _question
from terapipe_c.planning.partitioners import plan_one
from terapipe_c.planning.request import PLANNERS, SAVERS, check_request
from terapipe_c.planning.starts import kind_seconds, whole_sequences
from terapipe_c.planning.wishes import ask

PAPERS = [name for name in PLANNERS if name not in ("auto", "terapipe", "uniform")]


def requests(seed, count):
    """Small requests, whose ladders have many rungs."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        seq = int(rng.choice([64, 128, 256]))
        model = tp.GPTConfig(n_layer=int(rng.choice([2, 4, 6, 9])), n_head=2, n_embd=int(rng.choice([16, 32])),
                             vocab_size=int(rng.choice([50, 500])), block_size=seq)
        cluster = tp.Cluster(num_devices=8, memory_bytes=1e12, link_latency_s=1e-6, link_bandwidth_Bps=1e10,
                             peak_flops=float(rng.choice([1e9, 1e12])), host_bandwidth_Bps=float(rng.choice([1e8, 1e10])))
        schedule = str(rng.choice(["1f1b", "gpipe", "zb-h1", "seq1f1b"]))
        yield model, cluster, {"batch": int(rng.choice([2, 4, 6])), "seq_len": seq, "stages": int(rng.choice([2, 3, 4])),
                               "schedule": schedule, **({"slicing": 2} if schedule == "seq1f1b" else {})}


def seconds(model, cluster, planner, request, limits):
    """[limits] of its plans, inf where there is none."""
    found = []
    for limit in limits:
        try:
            plan = tp.plan(model, cluster, planner=planner, memory_bytes=int(limit), **request)
            assert max(plan.peak_memory_bytes) <= limit
            found.append(plan.step_time_s)
        except tp.InfeasibleError:
            found.append(float("inf"))
    return np.array(found)


@pytest.mark.parametrize("planner", PAPERS)
def test_more_memory_never_hurts(planner):
    differ = 0
    for model, cluster, request in requests(3, 4):
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, cluster, planner=planner, memory_bytes=1, **request)
        least = int(re.search(r"memory_bytes = (\d+)", str(refused.value))[1])
        even = max(tp.plan(model, cluster, planner="uniform", **request).peak_memory_bytes)
        step_s = seconds(model, cluster, planner, request, [least - 1, *np.linspace(least, 1.1 * max(even, least), 5), 1e12])
        assert np.isinf(step_s[0]) and np.isfinite(step_s[1:]).all()      # what the refusal names is enough, and less is not
        assert (step_s[1:] <= step_s[:-1]).all(), (planner, model, request, step_s)
        differ += len(np.unique(step_s[1:])) - 1
    assert differ >= (3 if planner in SAVERS else 0), "these requests tell nothing"


@pytest.mark.parametrize("planner, schedule, layers, stages, parts", [
    ("piper", "1f1b", 24, 8, (0.6, 0.64, 0.7, 1.03)), ("adapipe", "gpipe", 48, 8, (0.65, 0.69, 0.72, 1.0)),
    ("bmpipe", "interleaved", 24, 4, (0.7, 0.85, 1.0)), ("terapipe", "1f1b", 24, 8, (0.75, 0.8, 0.9, 1.0)),
    ("terapipe", "interleaved", 24, 8, (0.7, 0.95, 1.0))])
def test_more_memory_never_hurts_a_large_request(planner, schedule, layers, stages, parts):
    """Where a ladder was thought to be too much work there was a plan for the limit alone: up to 3 % slower with more memory, and
    terapipe's of two chunks 7.6 %."""
    model = tp.GPTConfig(n_layer=layers, n_head=16, n_embd=1024, vocab_size=50257, block_size=1024)
    cluster = tp.Cluster(num_devices=stages, memory_bytes=1e13, link_latency_s=1e-5)
    request = {"batch": 16, "seq_len": 1024, "stages": stages, "schedule": schedule,
               **({"chunks": 2} if schedule == "interleaved" else {})}
    free = tp.plan(model, cluster, planner=planner, **request)
    step_s = seconds(model, cluster, planner, request, max(free.peak_memory_bytes) * np.array(parts))
    step_s = np.append(step_s, free.step_time_s)
    assert (step_s[1:] <= step_s[:-1]).all() and len(np.unique(step_s)) > 1, step_s


def test_the_larger_a_request_the_further_apart_are_its_rungs():
    """All limits of a small one would be too much work."""
    apart = []
    for layers, stages in ((4, 2), (96, 32), (96, 48)):
        model = tp.GPTConfig(n_layer=layers, n_head=8, n_embd=1024, vocab_size=1000, block_size=512)
        cluster = tp.Cluster(num_devices=stages, memory_bytes=2e11, link_latency_s=1e-6, link_bandwidth_Bps=1e11, peak_flops=1e14)
        judge = Judge(model, tp.CostModel.analytic(model, cluster), stages, 1, int(2e11))
        apart.append(_question(judge, "adapipe", "1f1b", ((1, (512,)),) * stages, 0.0, None).step)
    assert 1 / 32 == apart[0] < apart[1] < apart[2] <= 1 / 4


def test_the_judges_of_a_search_share_what_they_simulated(monkeypatch):
    """Each grid's judge began afresh, and made the programs of coarser grids again: a third of a large request's time."""
    made: list[object] = []
    run = Judge._made

    def counting(self, c):
        made.append((c.schedule, c.partition, c.slicing, c.pending))
        return run(self, c)

    monkeypatch.setattr(Judge, "_made", counting)
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=97, block_size=64)
    tp.plan(model, tp.Cluster(num_devices=4, peak_flops=1e9), 4, 64, planner="terapipe", schedule="1f1b", stages=4, granularity=8)
    assert len(made) > 20
    assert len(made) < 1.5 * len(set(made))      # those that are asked for their memory later are made for it


def large(width, layers, stages, batch, **request):
    model = tp.GPTConfig(n_layer=layers, n_head=width // 64, n_embd=width, vocab_size=50257, block_size=1024)
    cluster = tp.Cluster(num_devices=stages, memory_bytes=1e13, link_latency_s=1e-5)
    return model, cluster, {"batch": batch, "seq_len": 1024, "stages": stages, "planner": "terapipe", **request}


def test_a_search_within_a_limit_slices_what_fits_it():
    """What fitted at last was whole sequences and halves: its stages had never been tried with more slices, which take no memory.
    Steps were up to 9 % longer than those of the same stages with sixteen."""
    model, cluster, request = large(1600, 48, 16, 32, schedule="1f1b")
    most = max(tp.plan(model, cluster, **request).peak_memory_bytes)
    plan = tp.plan(model, cluster, memory_bytes=int(0.75 * most), **request)
    with_sixteen = tp.plan(model, cluster, memory_bytes=int(0.75 * most), partition=plan.stages, slicing=16, **request)
    assert plan.step_time_s <= 1.003 * with_sixteen.step_time_s


def test_stages_of_two_chunks_are_looked_for_by_their_ranks():
    """On stages that are even by themselves ranks are not: a head of some layers beside others. BMPipe's stages with slices were
    faster by 12 %."""
    model, cluster, request = large(1024, 48, 16, 32, schedule="interleaved", chunks=2)
    plan = tp.plan(model, cluster, **request)
    theirs = tp.plan(model, cluster, **request | {"planner": "bmpipe"})
    sliced = tp.plan(model, cluster, partition=theirs.stages, slicing=8, **request)
    assert plan.step_time_s < sliced.step_time_s < theirs.step_time_s


def named(model, cluster, request):
    """Bytes that a refusal says are enough."""
    with pytest.raises(tp.InfeasibleError) as refused:
        tp.plan(model, cluster, planner="terapipe", memory_bytes=1, **request)
    return refused.value.memory_bytes


def test_what_needs_least_is_known_to_every_limit():
    """Few micro-batches were all that fitted, on even stages; what was three times as fast on others, with less memory, came too
    late: it was left out, for not having been given for more, and then found for the least limit alone."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=128, vocab_size=50, block_size=64, tie_weights=False)
    cluster = tp.Cluster(num_devices=5, link_bandwidth_Bps=1e8, peak_flops=1e14, memory_bandwidth_Bps=1e11)
    request = {"batch": 6, "seq_len": 64, "stages": 5, "schedule": "pipedream", "granularity": 64}
    least = named(model, cluster, request)
    step_s = seconds(model, cluster, "terapipe", request, least * np.array([1.0, 1.0011, 1.05, 1.1, 1.2, 1.3, 1.5]))
    assert np.isfinite(step_s).all() and (step_s[1:] <= step_s[:-1]).all(), step_s


def test_of_what_holds_least_no_slices_are_left_out():
    """More slices are smaller, but there are more of them: three needed less than four, which was known to that limit alone."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=8, vocab_size=50, block_size=60)
    cluster = tp.Cluster(num_devices=1, peak_flops=1e9)
    request = {"batch": 6, "seq_len": 60, "stages": 1, "schedule": "zb-h1", "granularity": 12, "recompute": "ffn"}
    least = named(model, cluster, request)
    step_s = seconds(model, cluster, "terapipe", request, least * np.array([1.0, 1.0011, 1.0025, 1.004, 1.006]))
    assert np.isfinite(step_s).all() and (step_s[1:] <= step_s[:-1]).all(), step_s


def test_a_finer_grid_has_what_a_coarser_one_has_for_least():
    """Two slices need less than whole sequences, and less than four: where nothing else fitted a finer grid refused what a coarser
    one had a plan for."""
    model = tp.GPTConfig(n_layer=17, n_head=1, n_embd=32, vocab_size=5000, block_size=256)
    cluster = tp.Cluster(num_devices=5, link_latency_s=1e-3, link_bandwidth_Bps=1e12, peak_flops=1e12)
    request = {"batch": 6, "seq_len": 256, "stages": 5}
    limit = named(model, cluster, request | {"granularity": 128})
    coarse, fine = (seconds(model, cluster, "terapipe", request | {"granularity": unit}, [limit])[0] for unit in (128, 64))
    assert fine <= coarse < float("inf")


@pytest.mark.parametrize("change", [
    {"schedule": "interleaved", "chunks": 2, "recompute": "ffn"}, {"schedule": "interleaved", "chunks": 3}, {"schedule": "hanayo"},
    {"schedule": "dualpipe-v", "recompute": "attention"}, {"schedule": "zb-v"}, {"schedule": "bpipe"},
    {"schedule": "1f1b", "recompute": "full"}, {"schedule": "chimera"}])
def test_more_memory_never_hurts_about_the_least(change):
    """Where stages are not cut exactly a plan for less than what was known to need least was looked for, for that limit alone: up
    to three times as fast as what more memory had."""
    assert sum(plans_about_the_least(change, *size) for size in ((3, 16, 2), (6, 8, 2), (7, 32, 3))) > 3


def plans_about_the_least(change, n_layer, n_embd, stages):
    """How many there are."""
    stages += stages % 2 if change["schedule"] == "chimera" else 0
    model = tp.GPTConfig(n_layer=n_layer, n_head=2, n_embd=n_embd, vocab_size=50, block_size=48)
    cluster = tp.Cluster(num_devices=stages, link_latency_s=1e-5, link_bandwidth_Bps=1e10, peak_flops=1e12)
    request = {"batch": 2 * stages, "seq_len": 48, "stages": stages, "granularity": 12, **change}
    least = named(model, cluster, request)
    parts = np.array([0.98, 0.99, 0.998, 1.0, 1.001, 1.004, 1.01, 1.02, 1.1])
    step_s = seconds(model, cluster, "terapipe", request, least * parts)
    assert np.isinf(step_s[:3]).all() and np.isfinite(step_s[3:]).all() and (step_s[4:] <= step_s[3:-1]).all(), step_s
    return len(np.unique(step_s[3:]))


@pytest.mark.parametrize("change", [{"schedule": "interleaved", "chunks": 2}, {"schedule": "zb-v"}])
def test_nor_where_programs_are_so_long_that_the_least_is_looked_for_late(change, monkeypatch):
    """What is no faster than the first plan but for rounding was left out for that, and all that was left took twice as long."""
    kept, leans, lowest, lean_within = [], {}, search._Hunt._lowest, search._Hunt._lean_within

    def floor(hunt):
        found = lowest(hunt)
        lean = leans.get(hunt)
        if lean is not None and search.pace(lean) >= search.pace(hunt._rungs[0]):
            kept.append(lean in found)      # it may be one of those that need least
        return found

    def lean(hunt, limit):
        found = lean_within(hunt, limit)
        leans.setdefault(hunt, found)
        return found

    monkeypatch.setattr(search, "_SHORT", 0)
    monkeypatch.setattr(search._Hunt, "_lowest", floor)
    monkeypatch.setattr(search._Hunt, "_lean_within", lean)
    assert sum(plans_about_the_least(change, *size) for size in ((3, 16, 2), (6, 8, 2))) > 2
    rng = np.random.default_rng(55)                            # of which four such were left out
    forward_s, batch = rng.uniform(1e-4, 1e-3, (9, 9)), int(rng.integers(3, 7))
    costs = tp.CostModel.from_table(forward_s, forward_s * rng.uniform(1, 2.5), granularity=4)
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=50, block_size=32)
    request = {"batch": batch, "seq_len": 32, "costs": costs, **change}
    cluster = tp.Cluster(num_devices=2, peak_flops=1e12)
    step_s = seconds(model, cluster, "terapipe", request, named(model, cluster, request) * np.array([1.0, 1.005, 1.02, 1.1]))
    assert np.isfinite(step_s).all() and (step_s[1:] <= step_s[:-1] * (1 + 1e-9)).all(), step_s
    assert len(kept) > 2 and all(kept)


@pytest.mark.parametrize("n_layer, n_embd, stages, schedule", [(8, 768, 6, "gpipe"), (4, 256, 3, None), (4, 256, 2, "1f1b")])
def test_more_memory_never_hurts_auto(n_layer, n_embd, stages, schedule):
    """It moved from the fastest of what the others had found for one limit alone, and asked for recomputing where memory bound,
    which was 0.1 % faster within less memory."""
    model = tp.GPTConfig(n_layer=n_layer, n_head=n_embd // 64, n_embd=n_embd, vocab_size=50257 if n_embd == 768 else 256,
                         block_size=512 if n_embd == 768 else 128, tie_weights=False)
    cluster = tp.Cluster(num_devices=stages, memory_bytes=1e13, link_latency_s=1e-4)
    request = dict(batch=4, seq_len=model.block_size, planner="auto", costs=tp.CostModel.analytic(model, cluster), stages=stages)
    request |= {} if schedule is None else {"schedule": schedule}
    free = tp.plan(model, cluster, **request)
    step_s = [free.step_time_s]
    for part in (1.0, 0.95, 0.85, 0.7):
        try:
            step_s.append(tp.plan(model, cluster, memory_bytes=part * max(free.peak_memory_bytes), **request).step_time_s)
        except tp.InfeasibleError:
            step_s.append(np.inf)
    assert (np.array(step_s[1:]) >= np.array(step_s[:-1]) * (1 - 2e-9)).all(), step_s
    assert len(set(step_s)) > 1


@pytest.mark.parametrize("seed", range(2))
def test_stages_and_replicas_that_are_left_open_are_searched(seed):
    """Two of three configurations with replicas were left out, which were up to 0.7 % faster, and what was tried depended on the
    limit of memory."""
    rng = np.random.default_rng(seed)
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=int(rng.choice([64, 500])), block_size=32)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e12, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=1e10)
    request = dict(batch=4, seq_len=32, granularity=8, schedule=("auto", "1f1b")[seed])
    auto = tp.plan(model, cluster, **request)
    for ranks, replicas in itertools.product((1, 2, 3, 4), (1, 2, 4)):
        if ranks * replicas <= 4:
            named = tp.plan(model, cluster, planner="terapipe", stages=ranks, data_parallel=replicas, **request)
            assert auto.step_time_s <= named.step_time_s * (1 + 1e-9), (ranks, replicas)
    assert any(line.startswith("searches of other numbers of ranks, replicas and chunks: ") for line in auto.search_log)
    step_s = [auto.step_time_s]
    for part in (1.0, 0.9, 0.8):
        try:
            step_s.append(tp.plan(model, cluster, memory_bytes=part * max(auto.peak_memory_bytes), **request).step_time_s)
        except tp.InfeasibleError:
            step_s.append(math.inf)
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(step_s)) and step_s[-1] > step_s[0], step_s


def test_what_a_refusal_names_of_several_chunks_is_enough():
    """It was what had come nearest for the limit that was refused alone, which nobody finds again for another one."""
    model = tp.GPTConfig(n_layer=7, n_head=1, n_embd=8, vocab_size=50, block_size=45, bias=False, tie_weights=False)
    cluster = tp.Cluster(num_devices=4, link_latency_s=1e-3, link_bandwidth_Bps=1e12, peak_flops=1e14)
    request = {"batch": 8, "seq_len": 45, "stages": 4, "schedule": "dualpipe-v", "granularity": 3}
    least, enough = named(model, cluster, request), set()
    for limit in (least, 0.99 * least, 0.95 * least, 0.8 * least, 0.5 * least):
        try:
            tp.plan(model, cluster, planner="terapipe", memory_bytes=int(limit), **request)
        except tp.InfeasibleError as refused:
            assert limit < least
            enough.add(refused.memory_bytes)
    assert enough
    for limit in enough:                                       # many refusals name the same
        tp.plan(model, cluster, planner="terapipe", memory_bytes=limit, **request)


def test_what_a_refusal_names_is_enough_where_the_limit_is_one_of_the_ladder(monkeypatch):
    """What had come near that rung in a descent was named: no other limit's ladder comes by it."""
    model = tp.GPTConfig(n_layer=7, n_head=1, n_embd=32, vocab_size=50, block_size=24)
    cluster = tp.Cluster(num_devices=3, link_latency_s=1e-3, link_bandwidth_Bps=1e8, peak_flops=1e14)
    request = {"batch": 6, "seq_len": 24, "stages": 3, "schedule": "hanayo", "granularity": 12}
    rungs, below = [], search._Hunt._below
    least = named(model, cluster, request)
    with monkeypatch.context() as patch, pytest.raises(tp.InfeasibleError):
        patch.setattr(search._Hunt, "_below", lambda hunt, limit: rungs.append(limit) or below(hunt, limit))
        tp.plan(model, cluster, planner="terapipe", memory_bytes=least - 1, **request)
    limits = {limit for limit in rungs if limit < least}
    for limit in limits:
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, cluster, planner="terapipe", memory_bytes=limit, **request)
        assert refused.value.memory_bytes == least
    assert limits and np.isfinite(seconds(model, cluster, "terapipe", request, [least])).all()


def test_auto_climbs_no_ladder_where_nothing_is_near_fitting(monkeypatch):
    """It took minutes to say so: every planner's plans for less and less memory were looked for, by every number of chunks."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=64, vocab_size=300, block_size=64)
    request = dict(batch=8, seq_len=64, stages=4)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e9, peak_flops=1e12)
    climbed, down, climb = [], search._Hunt._step_down, ladder._climb_down
    monkeypatch.setattr(search._Hunt, "_step_down", lambda hunt, limit: climbed.append(hunt.judge.in_passing) or down(hunt, limit))
    monkeypatch.setattr(ladder, "_climb_down", lambda q, seen: climbed.append(q.free.judge.in_passing) or climb(q, seen))
    with pytest.raises(tp.InfeasibleError) as refused:
        tp.plan(model, cluster, memory_bytes=16 * model.num_params // 4, **request)
    assert climbed and not any(climbed)                        # by the planners alone, of one chunk
    needed = refused.value.memory_bytes
    assert max(tp.plan(model, cluster, memory_bytes=needed, **request).peak_memory_bytes) <= needed


@pytest.mark.parametrize("planner", PAPERS)
def test_where_blocks_alone_are_too_much_no_plan_of_a_ladder_fits(planner):
    """With recomputing, swaps and several chunks, too; and they are of a quarter of what the least of them takes, now and then."""
    rng, plans, said, asked = np.random.default_rng(8), 0, 0, 0
    for model, cluster, given in requests(9, 8):
        chunks = 2 if planner == "bmpipe" and rng.integers(2) else 1
        given = {**given, "stages": 2, "batch": 4, "schedule": "interleaved" if chunks > 1 else given["schedule"]}
        left = dict.fromkeys(("data_parallel", "tensor_parallel", "time_limit_s", "partition", "slicing", "executable",
                              "granularity"))
        request = check_request(model, cluster, costs=None, planner=planner,
                                **{**left, "memory_bytes": 10**12, "chunks": chunks, "recompute": None, **given})
        judge = request.judge(2)
        for host_Bps in (0.0, cluster.host_bandwidth_Bps) if planner in SAVERS and chunks == 1 else (0.0,):
            q = _question(judge, planner, given["schedule"], whole_sequences(request), host_Bps, None)
            peaks = [max(judge.peak_bytes(c)) for c in ladder._ladder(q)]
            assert not any(ladder._cannot_fit(q, peak) for peak in peaks), (planner, given)
            plans, said, asked = plans + len(peaks), said + ladder._cannot_fit(q, min(peaks) // 4), asked + 1
    print(f"{plans} plans, a quarter of the least memory is too little in {said} of {asked} requests")
    assert plans >= asked and said >= 3


def test_a_tied_weight_s_gradient_and_moments_are_not_at_both_ends():
    """They were counted at the embedding, which has none of them: nothing was said to fit where long positions beside it do."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=128, vocab_size=20000, block_size=60000)
    left = dict.fromkeys(("data_parallel", "tensor_parallel", "chunks", "memory_bytes", "time_limit_s", "partition", "slicing"))
    request = check_request(model, tp.Cluster(num_devices=2, memory_bytes=1e9, peak_flops=1e9), 2, 8, None, planner="dapple",
                            schedule="1f1b", granularity=8, executable=False, **left, stages=2)
    judge, slicing = request.judge(2), whole_sequences(request)
    cuts = [((0, k), (k, model.num_blocks)) for k in range(1, model.num_blocks)]
    least = min(max(judge.peak_bytes(judge.judge("1f1b", cut, slicing, 0))) for cut in cuts)
    q = _question(judge, "dapple", "1f1b", slicing, 0.0, None)
    assert ladder._cannot_fit(q, least * 9 // 10) and not ladder._cannot_fit(q, least)


def test_ranks_of_several_chunks_have_their_limits_together():
    model = tp.GPTConfig(n_layer=7, n_head=2, n_embd=256, vocab_size=64, block_size=8)      # parameters are most of its memory
    judge, slicing = Judge(model, tp.CostModel.analytic(model, tp.Cluster(num_devices=2)), 2, 2, 10**12), ((1, (8,)),) * 2
    even = judge.judge("interleaved", tuple(even_partition(model, 4)), slicing, 0)
    q, peak = _question(judge, "bmpipe", "interleaved", slicing, 0.0, None), max(judge.peak_bytes(even))
    assert not ladder._cannot_fit(q, peak) and ladder._cannot_fit(q, peak // 2)


def told(monkeypatch, called, planner, stages, schedule, micros, extra_bytes=None, **sizes):
    """(The task, and the arguments that ``called`` of tp.planners has from it.)"""
    model = tp.GPTConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 2000, "block_size": 8, **sizes})
    judge = Judge(model, tp.CostModel.analytic(model, tp.Cluster(num_devices=stages, peak_flops=1e9)), stages, 1, 10**9)
    task = _question(judge, planner, schedule, ((1, (8,)),) * micros, 0.0, None).free
    heard: list[tuple] = []
    run = getattr(tp.planners, called)
    monkeypatch.setattr(tp.planners, called, lambda *a, **k: [heard.append((a, k)), run(*a, **k)][1])
    task = task if extra_bytes is None else task.within(task.limit_bytes, extra_bytes)
    ask(task, planner)
    return task, *heard[0]


@pytest.mark.parametrize("planner", ["dawnpiper", "dawnpiper_binary"])
def test_dawnpiper_counts_the_static_bytes_of_tied_ends_as_they_are(planner, monkeypatch):
    """It has parameters twice, for values and gradients; the embedding of a tied weight has no gradient of it."""
    task, (nodes, *_), _ = told(monkeypatch, planner, planner, 2, "1f1b", 2)
    assert (2 * nodes["param_bytes"] + nodes["optimizer_bytes"] == task.static_bytes).all()
    assert task.param_bytes[0] > task.updated_bytes[0] > 0     # the embedding: its positions alone have gradients


def test_piper_is_told_what_another_order_than_1f1b_holds(monkeypatch):
    for schedule, held in (("1f1b", None), ("gpipe", 5)):
        assert told(monkeypatch, "layer_graph", "piper", 2, schedule, 5)[2]["memory"]["in_flight"] == held


def test_planners_are_told_of_updates_a_part_with_each_micro_batch(monkeypatch):
    task, (_, backward, *_), _ = told(monkeypatch, "dapple", "dapple", 2, "1f1b", 4)
    seconds, costs = kind_seconds(task.judge, task.slicing, "IW"), task.judge.costs
    step_s = [seconds[b.kind] + costs.optimizer_param_s * bytes_ / 4
              for b, bytes_ in zip(task.judge.model.blocks, task.updated_bytes, strict=True)]
    assert np.allclose(backward * task.tick_s * 4, step_s, rtol=1e-6) and costs.optimizer_param_s > 0


def test_bmpipe_is_told_of_layers_while_there_are_enough_and_of_the_bytes_of_each(monkeypatch):
    for stages, whole in ((4, True), (5, False)):
        _, (layers, *_), _ = told(monkeypatch, "bmpipe", "bmpipe", stages, "1f1b", 2)
        assert any(layer["name"] == "attention+ffn" for layer in layers) == whole
    extra = np.array([0, 1, 0, 1, 0, 5, 0, 1, 0, 0.0])         # the third layer has other bytes: it is no neighbour's like
    task, (layers, *_), _ = told(monkeypatch, "bmpipe", "bmpipe", 2, "1f1b", 2, extra, n_layer=4)
    assert [layer["count"] for layer in layers] == [1, 2, 1, 1, 1]
    assert sum(layer["count"] * layer["static_bytes"] for layer in layers) == task.static_bytes.sum()


def test_more_memory_has_what_needs_least_where_that_is_faster():
    """Where stages are not cut exactly: it was looked for only where the first plan did not fit, and was faster by 0.8 %."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=8, vocab_size=8, block_size=24, tie_weights=False)
    cluster = tp.Cluster(num_devices=6, memory_bytes=1e12, link_latency_s=4.18e-6, link_bandwidth_Bps=2.05e8, peak_flops=8.85e9)
    request = {"batch": 1, "seq_len": 24, "granularity": 2, "stages": 6, "schedule": "hanayo"}
    least = named(model, cluster, request)
    step_s = seconds(model, cluster, "terapipe", request, least * np.array([1.0, 1.001, 1.01, 1.03, 1.1, 2.0]))
    assert np.isfinite(step_s).all() and (step_s[1:] <= step_s[:-1]).all(), step_s


def beside_a_rival(model, cluster, part, **given):
    """Seconds of a step at so large a part of what the fastest plan needs: asked alone, and beside a plan that is hardly slower."""
    left = dict.fromkeys(("data_parallel", "tensor_parallel", "time_limit_s", "partition", "slicing", "executable", "stages",
                          "chunks", "recompute"))

    def asked(limit):
        return check_request(model, cluster, costs=None, **{**left, "granularity": 2, "memory_bytes": limit, **given})

    free = plan_one(asked(10**12))
    request = asked(int(part * max(free.judge.peak_bytes(free.candidate))))
    alone = plan_one(request).candidate.seconds

    def judge_of(ranks):
        judge = request.judge(ranks)
        judge.rival_s, judge.in_passing = alone * (1 + 1e-7), True
        return judge

    return alone, plan_one(request, judge_of).candidate.seconds


@pytest.mark.parametrize("schedule, chunks, batch, stages, n_layer, n_embd, vocab_size, latency_s, byte_s, peak_flops, part", [
    ("1f1b", 1, 3, 2, 6, 8, 50, 1e-6, 1e-7, 1e11, 0.99), ("hanayo", 2, 1, 3, 5, 16, 300, 1e-6, 1e-7, 1e9, 0.95),
    ("interleaved", 2, 3, 3, 4, 16, 300, 1e-5, 1e-9, 1e9, 0.99), ("zb-v", 2, 1, 2, 6, 16, 50, 1e-5, 1e-7, 1e9, 0.97)])
def test_a_plan_in_hand_hides_none_that_is_faster(schedule, chunks, batch, stages, n_layer, n_embd, vocab_size, latency_s, byte_s,
                                                  peak_flops, part):
    """Coarse grids, on which nothing is faster, were not searched within the limit, and what a finer grid finds from their plans
    was missed: up to 11 %."""
    model = tp.GPTConfig(n_layer=n_layer, n_head=2, n_embd=n_embd, vocab_size=vocab_size, block_size=16)
    cluster = tp.Cluster(num_devices=3, memory_bytes=1e12, link_latency_s=latency_s, link_bandwidth_Bps=1 / byte_s,
                         peak_flops=peak_flops)
    alone, beside = beside_a_rival(model, cluster, part, planner="terapipe", schedule=schedule, batch=batch, seq_len=16,
                                   stages=stages, chunks=chunks)
    assert beside == alone


def test_nor_one_of_a_papers_planner():
    """What PipeDream's wants for this limit alone is slower by two thirds than what it wants for another and also fits."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=24, vocab_size=300, block_size=16, tie_weights=False)
    cluster = tp.Cluster(num_devices=6, memory_bytes=1e12, peak_flops=2.339e10, devices_per_node=2, link_latency_s=2.438e-6,
                         link_bandwidth_Bps=1.06e7, node_link_latency_s=1e-6, node_link_bandwidth_Bps=1e10)
    alone, beside = beside_a_rival(model, cluster, 1 - 1e-6, planner="pipedream", schedule="auto", batch=6, seq_len=16, slicing=1,
                                   data_parallel=2)
    assert beside == alone
