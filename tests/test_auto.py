"""planner="auto": never slower than any single planner, bounds that hold, what it may choose, and what it says of its search."""
import dataclasses
import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c.planning import joint
from terapipe_c.planning import request as requests
from terapipe_c.planning.bounds import bound_s, least_work_s, whole_bound_s
from terapipe_c.planning.judge import Judge, possible
from terapipe_c.planning.request import BY_NAME, CHUNKED, JOINT, PLANNERS, SEVERAL, check_request, has_chunks
from terapipe_c.planning.side_by_side import SideBySide
from terapipe_c.planning.singles import Hurried, by_name, plan_singles, why_left_out
from terapipe_c.planning.starts import balanced

MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=32)
CLUSTER = tp.Cluster(num_devices=6, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=2e9)
NONE = dict.fromkeys(("stages", "data_parallel", "tensor_parallel", "chunks", "memory_bytes", "granularity", "partition", "slicing",
                      "executable", "time_limit_s"))


def request_of(model, cluster, batch, costs=None, planner="auto", schedule="auto", **change):
    return check_request(model, cluster, batch, model.block_size, costs, planner=planner, schedule=schedule, **{**NONE, **change})


def instance(rng, kind):
    """A small model, cluster and costs: first principles, a smooth table, a wild one."""
    length = int(rng.choice([16, 24, 32]))
    model = tp.GPTConfig(n_layer=int(rng.integers(2, 6)), n_head=2, n_embd=8 * int(rng.integers(1, 4)),
                         vocab_size=int(rng.integers(8, 300)), block_size=length, tie_weights=bool(rng.integers(2)))
    cluster = tp.Cluster(num_devices=int(rng.integers(2, 7)), memory_bytes=1e9, peak_flops=float(10 ** rng.uniform(8, 11)),
                         link_latency_s=float(10 ** rng.uniform(-7, -4)), link_bandwidth_Bps=float(10 ** rng.uniform(7, 10)))
    if kind == 0:
        return model, cluster, tp.CostModel.analytic(model, cluster)
    s, c = np.indices((length // 8 + 1, length // 8 + 1))
    table = (3 * rng.random() + s + 0.1 * s * c) * 1e-4 if kind == 1 else rng.integers(1, 60, s.shape) * 1e-5
    return model, cluster, tp.CostModel.from_table(table, table * rng.uniform(1, 2.5), granularity=8,
                                                   latency_s=float(10 ** rng.uniform(-7, -4)))


def test_a_large_request_is_cut_finer_than_its_coarse_grids_too():
    """Coarse grids used up all the work, and the plan was 16 % slower than with the best slices for equal stages."""
    model, cluster = tp.GPTConfig.preset("gpt3-175b"), tp.Cluster(
        96, devices_per_node=8, memory_bytes=80e9, link_latency_s=5e-6, link_bandwidth_Bps=25e9, peak_flops=140e12)
    request = dict(batch=32, seq_len=2048, planner="terapipe", recompute="attention")
    plan = tp.plan(model, cluster, **request)
    assert any(n % 256 for n in plan.slicing[0][1]) and plan.gap < 0.12      # with the coarse grids' plan 0.13 and more


def test_a_large_step_is_cut_coarser_where_it_asks_for_many_slices():
    """Planning stays around a second: the grid is coarser than 8 tokens only where many slices would be best."""
    model = tp.GPTConfig(n_layer=30, n_head=4, n_embd=256, vocab_size=256, block_size=2048)
    cluster = tp.Cluster(32, memory_bytes=1e12, link_latency_s=3e-6, link_bandwidth_Bps=1e10)
    free = tp.CostModel.analytic(model, cluster)
    fixed = tp.CostModel.from_table(*2 * [np.ones((257, 257))], granularity=8)                 # a slice costs what another does
    assert [request_of(model, cluster, 64, costs, "terapipe").unit for costs in (free, fixed)] == [64, 8]


@pytest.mark.parametrize("seed", range(6))
def test_never_slower_than_any_single_planner(seed, brief):
    rng = np.random.default_rng(seed)
    model, cluster, costs = instance(rng, seed % 3)
    request = dict(batch=int(rng.integers(1, 8)), seq_len=model.block_size, costs=costs)
    if seed % 2:
        request["stages"] = int(rng.integers(1, cluster.num_devices + 1))
    if seed > 3:
        even = tp.plan(model, cluster, planner="uniform", **request)
        request |= {"memory_bytes": 0.9 * max(even.peak_memory_bytes), "executable": False}
    comparison = tp.compare(model, cluster, **request)
    auto = comparison["auto"].plan
    for row in comparison:
        if row.plan is not None and (row.plan.executable or seed > 3):
            assert auto.step_time_s <= row.plan.step_time_s * (1 + 1e-9), row.planner
    assert auto is not None or all(row.plan is None for row in comparison)


def named_plans(model, cluster, request, names=(*JOINT, *BY_NAME)):
    """Every planner with every schedule and number of chunks that it takes: (who, plan)."""
    most = model.num_blocks // request.get("stages", 1)
    for planner, name, chunks in itertools.product(PLANNERS[1:], names, range(1, most + 1)):
        if chunks == 1 or (planner in CHUNKED and name in JOINT):
            try:
                yield (planner, name, chunks), tp.plan(model, cluster, planner=planner, schedule=name, chunks=chunks, **request)
            except ValueError:
                pass


def test_never_slower_than_a_schedule_and_chunks_by_name(monkeypatch):
    """Whatever the work limits, nothing at all included; thousands more in benchmarks/auto.py."""
    rng, compared, chunked = np.random.default_rng(11), 0, 0
    cases = []
    for kind, stages, tight in ((0, 3, False), (2, 2, True)):
        model, cluster, costs = instance(rng, kind)
        request = dict(batch=int(rng.integers(2, 5)), seq_len=model.block_size, costs=costs)
        if stages is not None:
            request["stages"] = stages
        if tight:
            even = tp.plan(model, cluster, planner="uniform", **request)
            request |= {"memory_bytes": 1.05 * max(even.peak_memory_bytes), "executable": False}
        named = list(named_plans(model, cluster, request))
        cases.append((model, cluster, request, min(plan.step_time_s for _, plan in named)))
        compared += len(named)
        chunked += sum(plan.chunks > 2 for _, plan in named)
    for limit in (None, 0):
        for name in ("_WORK", "_LOOK", "_GLIMPSES") if limit is not None else ():
            monkeypatch.setattr(joint, name, limit)
        for model, cluster, request, least in cases:
            auto = tp.plan(model, cluster, **request)
            assert auto.step_time_s <= least * (1 + 1e-9), (limit, request)
            assert any(line.startswith("planners by the names of schedules and chunks") for line in auto.search_log)
    print(f"{compared} plans by name, {chunked} of them of more than two chunks")
    assert compared > 120 and chunked > 5


def test_never_slower_than_guests_or_copies_by_name():
    """Limits that bind, links of nodes, partitions and slicings that are given."""
    rng, compared, chosen = np.random.default_rng(4), 0, []
    for kind, more in ((0, {}), (1, {"slicing": 1}), (2, {"partition": [(0, 1), (1, 3), (3, 5), (5, 6)]}), (0, {"slicing": 2}),
                       (2, {"slicing": 1, "executable": True})):
        model, cluster, costs = instance(rng, kind)
        model = dataclasses.replace(model, n_layer=2)
        cluster = dataclasses.replace(cluster, num_devices=8, devices_per_node=2, node_link_latency_s=1e-7,
                                      node_link_bandwidth_Bps=1e11)
        request = dict(batch=2 * int(rng.integers(2, 5)), seq_len=model.block_size, costs=costs, stages=4, **more)
        even = [tp.plan(model, cluster, planner="uniform", schedule=name, **request) for name in ("1f1b", "bpipe")]
        for limit in ({}, {"memory_bytes": min(max(plan.peak_memory_bytes) for plan in even)}):
            named = list(named_plans(model, cluster, {**request, **limit}, BY_NAME))
            compared += len(named)
            try:
                auto = tp.plan(model, cluster, **request, **limit)
            except tp.InfeasibleError:
                assert not named
                continue
            chosen.append(auto.schedule)
            assert all(auto.step_time_s <= plan.step_time_s * (1 + 1e-9) for _, plan in named), (request, limit)
    print(f"{compared} plans by name; {chosen}")
    assert compared > 60 and "chimera" in chosen


def test_copies_of_the_model_are_weighed_where_replicas_are():
    """Four micro-batches on four ranks: in no order but chimera's does every rank begin as early."""
    table = np.full((3, 3), 4e-4)
    costs = tp.CostModel.from_table(table, 2 * table, granularity=8, latency_s=1e-6)
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=16, block_size=16)
    request = dict(batch=4, seq_len=16, costs=costs, stages=4, slicing=1)
    plan = tp.plan(model, CLUSTER, **request)
    assert plan.schedule == "chimera" and plan.copies == 2 and not plan.executable and not plan.why_not_at_all
    assert plan.step_time_s <= tp.plan(model, CLUSTER, schedule="chimera", **request).step_time_s
    assert any("searched chimera on 4 ranks" in line and "better" in line for line in plan.search_log)
    for change in ({"executable": True}, {"chunks": 2}, {"schedule": "1f1b"}, {"batch": 3}, {"stages": 3},
                   {"slicing": [(1, [16])] * 3 + [(1, [8, 8])]}):
        other = tp.plan(model, CLUSTER, **(request | change))
        said = [line for line in other.search_log if "chimera" in line and " left out: " not in line]
        assert other.schedule != "chimera" and not said, change
    assert tp.plan(model, dataclasses.replace(CLUSTER, is_local=True), **request).executable
    free = check_request(model, CLUSTER, 4, 16, costs, planner="auto", schedule="auto", **NONE)
    assert requests.by_name_alone(free) == BY_NAME
    assert {asked.ranks for asked in by_name(free) if asked.schedules == ("chimera",)} == {(6,)}


def test_a_peer_s_memory_is_used_where_1f1b_does_not_fit():
    model = tp.GPTConfig(n_layer=6, n_head=4, n_embd=64, vocab_size=256, block_size=128)
    request = dict(batch=12, seq_len=128, stages=4, slicing=1, executable=True)
    plain, even = (tp.plan(model, CLUSTER, planner="uniform", schedule=name, **request) for name in ("1f1b", "bpipe"))
    limit = (max(plain.peak_memory_bytes) + max(even.peak_memory_bytes)) // 2
    request |= {"partition": plain.stages, "memory_bytes": limit}
    plan = tp.plan(model, CLUSTER, **request)
    assert plan.schedule == "bpipe" and plan.executable and max(plan.peak_memory_bytes) <= limit
    assert any(line.startswith("told to recompute") and line.endswith("better") for line in plan.search_log)
    assert any(line.startswith("searched bpipe on 4 ranks") for line in plan.search_log)


def test_a_schedule_of_several_chunks_is_given_as_many_as_are_best():
    """interleaved, chunks left open: auto weighs them all; given, it keeps them."""
    for seed, name in ((0, "interleaved"), (1, "hanayo"), (2, "interleaved"), (1, "looped-bfs")):
        model, cluster, costs = instance(np.random.default_rng(seed), seed % 3)
        request = dict(batch=4, seq_len=model.block_size, costs=costs, stages=2, schedule=name)
        auto, seconds = tp.plan(model, cluster, **request), {}
        for chunks in range(2, model.num_blocks // 2 + 1):
            for planner in ("uniform", "terapipe", "bmpipe"):
                try:
                    seconds[planner, chunks] = tp.plan(model, cluster, planner=planner, chunks=chunks, **request).step_time_s
                except ValueError:
                    continue
        assert auto.schedule == name and auto.step_time_s <= min(seconds.values()) * (1 + 1e-9), seconds
        assert {chunks for _, chunks in seconds} >= {2} and tp.plan(model, cluster, chunks=2, **request).chunks == 2


def test_interleaved_of_one_chunk_is_weighed_too():
    """Its warm-up is longer than 1F1B's: faster where messages take long, and looped stages hold more than fits."""
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=64, block_size=16)
    table = np.full((3, 3), 4e-4)
    costs = tp.CostModel.from_table(table, 2 * table, granularity=8, latency_s=3e-4)
    request = dict(batch=4, seq_len=16, costs=costs, stages=2, partition=[(0, 2), (2, 4)], slicing=1)
    one = tp.plan(model, CLUSTER, planner="terapipe", schedule="interleaved", chunks=1, **request)
    others = [tp.plan(model, CLUSTER, planner="terapipe", schedule=name, **request) for name in JOINT if name not in SEVERAL]
    assert one.step_time_s < min(plan.step_time_s for plan in others)
    auto = tp.plan(model, CLUSTER, memory_bytes=max(one.peak_memory_bytes), **request)
    assert (auto.schedule, auto.chunks) == ("interleaved", 1) and auto.step_time_s <= one.step_time_s


PLANS: dict[str, tp.Plan] = {}


def searched(**request):
    """MODEL's plan on CLUSTER by a brief search, which several tests ask for: a plan is not written to, and has one order."""
    plan = PLANS[repr(request)] = PLANS.get(repr(request)) or tp.plan(MODEL, CLUSTER, **request)
    return plan


@pytest.mark.parametrize("change, name, why", [
    ({"executable": True}, "chimera", "the plan is to be executable, with the bits of one device"),
    ({"stages": 3}, "chimera", "schedule chimera has 3 ranks: an even number"),
    ({"batch": 3}, "chimera", "schedule chimera has 3 micro-batches: an even number"),
    ({"slicing": [(1, [32]), (1, [32]), (1, [16, 16]), (1, [32])]}, "chimera", "slicing[0] is (1, [32]) and slicing[2]"),
    ({"slicing": 2}, "sliced-1f1b", "whole sequences alone, where the slicing that is given cuts them"),
    ({"chunks": 2}, "1f1b", "one stage a rank, where a rank has 2 here"),
    ({"chunks": 2}, "chimera", "one stage a rank, where a rank has 2 here"),
    ({"chunks": 1, "batch": 1}, "looped-bfs", "with one stage a rank and one micro-batch it is gpipe"),
    ({"chunks": 1}, "zb-v", "several stages a rank, where a rank has 1 here"),
    ({"stages": None, "partition": [(0, 4), (4, 10)]}, "hanayo",
     "several stages a rank, where the partition that is given has one for each rank"),
])
def test_it_says_why_it_did_not_ask_for_a_schedule(change, name, why, brief):
    log = searched(**{"batch": 4, "seq_len": 32, "stages": 2, **change}).search_log
    said = dict(line.split(" left out: ") for line in log if " left out: " in line)
    assert [reason for names, reason in said.items() if name in names.split(", ") and reason.startswith(why)], said


def test_a_gpu_is_asked_for_what_a_cpu_is():
    costs = tp.CostModel.analytic(MODEL, CLUSTER).on("cuda", None)
    asked, there = (request_of(MODEL, CLUSTER, 4, given, stages=2) for given in (costs, None))
    assert [r.schedules for r in by_name(asked)] == [r.schedules for r in by_name(there)] and not why_left_out(asked, {*JOINT})


def test_what_is_asked_for_is_not_said_to_be_left_out(brief):
    asked = {request.schedules[0] for request in by_name(request_of(MODEL, CLUSTER, 4, stages=2))}
    log = searched(batch=4, seq_len=32, stages=2).search_log
    assert {*BY_NAME, "zb-v", "gpipe"} < asked and not any("left out: " in line for line in log)


def test_a_model_too_deep_for_one_planner_is_planned_by_the_others():
    """bmpipe takes no model with so many layers: its refusal was raised as if the request were wrong."""
    deep = tp.GPTConfig(n_layer=1023, n_head=1, n_embd=8, vocab_size=61, block_size=24)
    with pytest.raises(ValueError, match="there are 1025 layers: at most 1024"):
        tp.plan(deep, CLUSTER, batch=2, seq_len=24, stages=2, planner="bmpipe")
    assert tp.plan(deep, CLUSTER, batch=2, seq_len=24, stages=2, time_limit_s=4.0).stages[-1][1] == deep.num_blocks


def test_a_time_limit_says_what_named_plans_it_left():
    cut = tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, stages=2, time_limit_s=1e-9)
    line = next(line for line in cut.search_log if line.startswith("planners by the names"))
    assert "0 plans made" in line and "left at the time limit: some of them may be faster" in line
    said, who = cut.search_log[0].split("; without a plan at the time limit, or not asked: ")   # not "perhaps with a plan"
    assert said == "1 of 13 planners had an answer" and set(who.split(", ")) == set(PLANNERS[1:]) - {"uniform"}


def test_it_says_which_schedules_it_left_out_and_why():
    log = "\n".join(tp.plan(MODEL, CLUSTER, batch=3, seq_len=32, stages=2).search_log)
    assert "dualpipe-v left out: schedule dualpipe-v has 3 micro-batches for 2 ranks: at least 4 would be right" in log
    assert "interleaved left out: schedule interleaved has 3 micro-batches for 2 ranks" in log
    assert all(f"searched {name}" in log for name in ("zb-h1", "zb-h2", "zb-v", "hanayo"))
    # Three micro-batches suit neither interleaved nor dualpipe-v, but zb-v and hanayo.
    assert tp.plan(MODEL, CLUSTER, batch=3, seq_len=32, stages=2, chunks=2).schedule in ("zb-v", "hanayo")
    for chunks in (1, 2):
        with pytest.raises(tp.InvalidValueError, match="a multiple of the ranks"):
            tp.plan(MODEL, CLUSTER, batch=3, seq_len=32, stages=2, chunks=chunks, schedule="interleaved")
    given = tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, stages=2, schedule="gpipe")
    assert given.schedule == "gpipe" and not any("zb-v" in line for line in given.search_log)


@pytest.mark.parametrize("kind", range(2))
def test_the_bound_of_whole_sequences_holds(kind):
    """In any order on any partition, one stage a rank."""
    rng, tight = np.random.default_rng(kind), 0
    for _ in range(10):
        model, cluster, costs = instance(rng, kind)
        request = request_of(model, cluster, int(rng.integers(1, 6)), costs)
        for ranks in (1, 2, 3):
            judge, bound = request.judge(ranks), whole_bound_s(request, ranks)
            for _ in range(5):
                cuts = [0, *sorted(rng.choice(np.arange(1, model.num_blocks), ranks - 1, replace=False).tolist()), model.num_blocks]
                name = str(rng.choice(["gpipe", "1f1b", "seq1f1b", "zb-h1", "zb-h2"]))
                found = judge.judge(name, tuple(itertools.pairwise(cuts)), ((1, (request.seq_len,)),) * request.batch)
                assert bound <= found.seconds * (1 + 1e-12)
                tight += bound >= 0.9 * found.seconds
    assert tight > 12


@pytest.mark.parametrize("kind", range(2))
def test_the_bounds_of_several_chunks_hold(kind):
    """Of whole sequences and of any slices, in every order of several chunks on any partition."""
    rng, tight, total = np.random.default_rng(20 + kind), 0, 0
    for _ in range(60):
        model, cluster, costs = instance(rng, kind)
        costs = tp.CostModel.from_dict({**costs.to_dict(), "overhead_s": float(rng.choice([0.0, 1e-4]))})
        ranks, chunks, batch = int(rng.integers(1, 4)), int(rng.integers(2, 5)), int(rng.integers(1, 7))
        names = [n for n in SEVERAL if has_chunks(n, chunks) and not possible(n, ranks, batch)]
        if ranks * chunks > model.num_blocks or not names:
            continue
        request = dataclasses.replace(request_of(model, cluster, batch, costs, granularity=8), chunks=chunks)
        whole, judge = whole_bound_s(request, ranks, chunks), request.judge(ranks)
        some = bound_s(request, ranks, chunks, 1, least_work_s(request, batch))
        for name in names:
            inner = rng.choice(np.arange(1, model.num_blocks), ranks * chunks - 1, replace=False)
            cut = tuple(itertools.pairwise([0, *sorted(inner.tolist()), model.num_blocks]))
            found = judge.judge(name, cut, ((1, (request.seq_len,)),) * batch)
            sliced = judge.judge(name, cut, ((1, (8, request.seq_len - 8)),) * batch)
            assert whole <= found.seconds * (1 + 1e-12) and some <= min(found.seconds, sliced.seconds) * (1 + 1e-12)
            tight += whole >= 0.7 * found.seconds
            total += 1
    print(f"{total} plans, {tight} within 30 % of their bound")
    assert total > 40 and tight > 5


@pytest.mark.parametrize("kind", range(3))
def test_bounds_hold_for_every_plan(kind):
    """Random partitions, slicings, schedules and replicas: none is below its configuration's bound."""
    rng = np.random.default_rng(kind)
    for _ in range(6):
        model, cluster, costs = instance(rng, kind)
        batch = int(rng.choice([2, 4, 6]))
        for replicas, ranks in itertools.product((1, 2), (1, 2, 3)):
            unit = 8 if kind else 4
            request = dataclasses.replace(request_of(model, cluster, batch, costs, granularity=unit), replicas=replicas)
            share = batch // replicas
            bound = bound_s(request, ranks, 1, replicas, least_work_s(request, share))
            judge = request.judge(ranks)
            for _ in range(12):
                cuts = [0, *sorted(rng.choice(np.arange(1, model.num_blocks), ranks - 1, replace=False).tolist()), model.num_blocks]
                size = int(rng.choice([b for b in range(1, share + 1) if share % b == 0]))
                ends = sorted({*rng.integers(1, model.block_size // unit + 1, 3).tolist(), model.block_size // unit})
                lengths = tuple(int(n) * unit for n in np.diff([0, *ends]))
                found = judge.judge(str(rng.choice(["gpipe", "1f1b", "seq1f1b"])), tuple(itertools.pairwise(cuts)),
                                    ((size, lengths),) * (share // size), int(rng.integers(0, 3)))
                assert bound <= found.seconds * (1 + 1e-12)


@pytest.mark.parametrize("kind", range(3))
def test_the_bounds_of_guests_and_copies_hold(kind):
    """Of bpipe and chimera: random partitions, slicings, links and replicas; and bpipe's of whole sequences."""
    rng, close, total = np.random.default_rng(40 + kind), 0, 0
    while total < 150:
        model, cluster, costs = instance(rng, kind)
        if kind == 0 and rng.integers(2):
            cluster = dataclasses.replace(cluster, num_devices=8, devices_per_node=int(rng.choice([1, 2, 4])),
                                          node_link_latency_s=1e-7, node_link_bandwidth_Bps=1e11)
            costs = tp.CostModel.analytic(model, cluster)
        costs = tp.CostModel.from_dict({**costs.to_dict(), "overhead_s": float(rng.choice([0.0, 1e-4])),
                                        "optimizer_param_s": float(rng.choice([0.0, 1e-7]))})
        batch, replicas = int(rng.choice([2, 4, 6, 8])), int(rng.integers(1, 3))
        share, unit = batch // replicas, 8 if kind else 4
        name, ranks = str(rng.choice(BY_NAME)), int(rng.integers(1, 7))
        size = int(rng.choice([b for b in range(1, share + 1) if share % b == 0]))
        if ranks > model.num_blocks or possible(name, ranks, share // size):
            continue
        request = dataclasses.replace(request_of(model, cluster, batch, costs, granularity=unit), replicas=replicas)
        judge, copies = request.judge(ranks), 1 + (name == "chimera")
        bound = bound_s(request, ranks, 1, replicas, least_work_s(request, share), copies)
        ends = sorted({*rng.integers(1, model.block_size // unit + 1, 3).tolist(), model.block_size // unit})
        lengths = tuple(int(n) * unit for n in np.diff([0, *ends]))
        cuts = [0, *sorted(rng.choice(np.arange(1, model.num_blocks), ranks - 1, replace=False).tolist()), model.num_blocks]
        cut = tuple(itertools.pairwise(cuts))
        found = judge.judge(name, cut, ((size, lengths),) * (share // size), int(rng.integers(0, 4)))
        assert bound <= found.seconds * (1 + 1e-12)
        total += 1
        if name == "bpipe":
            slicing = ((1, (request.seq_len,)),) * share
            seconds = min(judge.judge(name, way, slicing).seconds for way in (cut, balanced(judge, slicing, ranks)))
            at_once = whole_bound_s(request, ranks, 1, True)
            assert whole_bound_s(request, ranks) <= at_once <= seconds * (1 + 1e-12)
            close += ranks > 1 and at_once >= 0.8 * seconds
    print(f"{total} plans, {close} of whole sequences within 20 % of their bound")
    assert close > 5


def test_a_rank_with_a_stage_of_each_copy_updates_both_in_the_bound():
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=32)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e9, peak_flops=1e9)
    costs = tp.CostModel.analytic(model, cluster).to_dict()
    for copies in (1, 2):
        free, paid = (bound_s(request_of(model, cluster, 4, tp.CostModel.from_dict({**costs, "optimizer_param_s": each})), 4, 1, 1,
                              0.0, copies) for each in (0.0, 1e-6))
        assert paid - free == pytest.approx(copies * 1e-6 * model.num_params / 4)


def test_weights_made_at_once_are_in_the_bound():
    """Orders in which every W follows its I: after a rank's work still come the I of the blocks before its own."""
    model = tp.GPTConfig(n_layer=8, n_head=2, n_embd=16, vocab_size=64, block_size=32)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e9, link_latency_s=1e-3, peak_flops=1e9)
    request = request_of(model, cluster, 4)
    assert whole_bound_s(request, 4, 1, True) > 1.05 * whole_bound_s(request, 4)


def test_the_least_work_is_the_least_over_slicings():
    """Whole sequences alone in a micro-batch: every composition of three units, by brute force."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        table = rng.integers(1, 60, (4, 4)) * 1e-3
        model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=24)
        costs = tp.CostModel.from_table(table, 2 * table, granularity=8)
        request = request_of(model, CLUSTER, 1, costs, granularity=8)
        least = min(sum(3 * 2 * table[s, c] for s, c in zip(cut, itertools.accumulate((0, *cut[:-1])), strict=True))
                    for cut in ((3,), (1, 2), (2, 1), (1, 1, 1)))
        assert least_work_s(request, 1) <= least * (1 + 1e-12)
        assert least_work_s(request, 1) >= 0.4 * least     # F and I apart from W: looser than one sum, not by much


def test_it_is_deterministic_and_its_words_are_kept(tmp_path, brief):
    first, second = searched(batch=4, seq_len=32), tp.plan(MODEL, CLUSTER, batch=4, seq_len=32)
    assert first == second and first.search_log == second.search_log and first.step_time_s == second.step_time_s
    assert any("configurations" in line for line in first.search_log) and first.search_log[-1].startswith("best:")
    first.save(tmp_path / "plan.json")
    loaded = tp.Plan.load(tmp_path / "plan.json")
    assert loaded == first and loaded.search_log == first.search_log and loaded.data_parallel == first.data_parallel
    assert loaded.explain() == first.explain() and first.search_log[-1] in first.explain()
    assert {name for name, _ in first.compared} <= set(PLANNERS[1:])


def test_a_time_limit_ends_the_search_with_the_best_single_plan(brief, monkeypatch):
    free = searched(batch=4, seq_len=32)
    cut = tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, time_limit_s=1e-9)
    with SideBySide() as beside:
        singles = dict(plan_singles(request_of(MODEL, CLUSTER, 4), beside))
    assert cut.step_time_s == singles["uniform"].candidate.seconds            # the one that there is time for in any case
    assert cut.step_time_s >= free.step_time_s and any("time limit" in line for line in cut.search_log)
    with monkeypatch.context() as patch:                                      # they took all of the time
        patch.setattr(joint, "plan_singles_within", lambda request, part: Hurried(list(singles.items()), ["piper"], None))
        cut = tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, time_limit_s=1e-9)
    assert cut.step_time_s == pytest.approx(min(f.candidate.seconds for f in singles.values() if not isinstance(f, tp.Error)))
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)                    # without one, no clock is asked
    assert tp.plan(MODEL, CLUSTER, batch=4, seq_len=32) == free


def test_it_weighs_replicas_where_nothing_forbids_them(brief):
    head = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=2048, block_size=32)     # the head alone is most of it
    fast = dataclasses.replace(CLUSTER, num_devices=3, link_bandwidth_Bps=1e13, link_latency_s=1e-9)
    plan = tp.plan(head, fast, batch=2, seq_len=32)
    assert plan.data_parallel > 1 and plan.num_devices <= 3 and not plan.executable
    assert any("replicas" in line for line in plan.search_log)
    slow = dataclasses.replace(fast, link_bandwidth_Bps=1e3)
    assert tp.plan(head, slow, batch=2, seq_len=32).data_parallel == 1        # the ring would take seconds
    for change in ({"stages": 3}, {"executable": True}, {"slicing": 1}):
        assert tp.plan(head, fast, batch=2, seq_len=32, **change).executable, change
    local = dataclasses.replace(fast, is_local=True)
    assert tp.plan(head, local, batch=2, seq_len=32).executable
    given = tp.plan(head, fast, batch=2, seq_len=32, data_parallel=2)
    assert given.data_parallel == 2 and sum(b for b, _ in given.slicing) == 1


def test_it_weighs_chunks_and_micro_batches(brief):
    """Twelve equal blocks' worth of layers, costs that do not care how rows are batched: chunks make the bubble smaller."""
    model = tp.GPTConfig(n_layer=8, n_head=2, n_embd=8, vocab_size=8, block_size=8)
    table = np.array([[0.0, 0.0], [1.0, 0.0]])
    costs = tp.CostModel.from_table(table, 2 * table, granularity=8)
    request = dict(batch=4, seq_len=8, costs=costs, stages=4, granularity=8, schedule="auto")
    plan = tp.plan(model, CLUSTER, **request)
    assert plan.schedule in SEVERAL and plan.chunks > 1
    assert plan.step_time_s < tp.plan(model, CLUSTER, **{**request, "schedule": "1f1b"}).step_time_s
    request["chunks"] = 2
    two = tp.plan(model, CLUSTER, **request)
    assert two.chunks == 2 and plan.step_time_s <= two.step_time_s * (1 + 1e-9)
    assert two.step_time_s <= tp.plan(model, CLUSTER, **{**request, "schedule": "interleaved"}).step_time_s * (1 + 1e-9)
    request["chunks"] = None
    assert tp.plan(model, CLUSTER, **{**request, "schedule": "1f1b"}).chunks == 1
    # Where an instruction costs as much for one sequence as for many: larger micro-batches.
    reading = dataclasses.replace(CLUSTER, peak_flops=1e15, memory_bandwidth_Bps=1e7)
    assert max(b for b, _ in tp.plan(MODEL, reading, batch=4, seq_len=32, stages=1).slicing) == 4


def test_memory_is_saved_where_it_binds(brief):
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=32, block_size=256)
    even = tp.plan(model, CLUSTER, batch=4, seq_len=256, planner="uniform", stages=3)
    request = dict(batch=4, seq_len=256, stages=3, schedule="1f1b", slicing=1)

    def least_limit(limit):
        """The last of a falling row at which there is a plan."""
        while True:
            try:
                tp.plan(model, CLUSTER, memory_bytes=int(0.97 * limit), **request)
            except tp.InfeasibleError as error:
                assert "bytes short" in str(error)
                return limit
            limit = int(0.97 * limit)

    limit, again = int(0.86 * max(even.peak_memory_bytes)), even
    while not any(again.recompute):
        limit = int(0.97 * limit)
        again = tp.plan(model, CLUSTER, memory_bytes=limit, executable=True, **request)
    assert again.executable and not any(again.swap)
    assert again == tp.plan(model, dataclasses.replace(CLUSTER, is_local=True), memory_bytes=limit, **request)
    least = least_limit(limit)                                  # where there is a plan that moves nothing, one may be moved, too
    assert tp.plan(model, dataclasses.replace(CLUSTER, host_bandwidth_Bps=1e12), memory_bytes=least, **request).step_time_s > 0
    request |= {"batch": 8, "schedule": "gpipe"}                # more waits
    limit = int(0.75 * max(tp.plan(model, CLUSTER, planner="uniform", **request).peak_memory_bytes))
    again, host = tp.plan(model, CLUSTER, memory_bytes=limit, **request), dataclasses.replace(CLUSTER, host_bandwidth_Bps=1e12)
    fast, slow = (tp.plan(model, dataclasses.replace(host, host_bandwidth_Bps=b), memory_bytes=limit, **request)
                  for b in (1e12, 1e3))
    assert any(fast.swap) and fast.executable and fast.step_time_s < again.step_time_s * (1 - 1e-6)
    assert not any(slow.swap) and slow.step_time_s == again.step_time_s
    assert fast == tp.plan(model, dataclasses.replace(host, is_local=True), memory_bytes=limit, **request)
    with pytest.raises(tp.InfeasibleError):
        tp.plan(model, dataclasses.replace(host, is_local=True), memory_bytes=limit // 4, **request)


def test_one_long_sequence_is_recomputed_slice_by_slice_where_nothing_else_fits(brief):
    """Planners of whole sequences hold one micro-batch, and gain nothing."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=32, block_size=512)
    request = dict(batch=1, seq_len=512, stages=2, schedule="seq1f1b")
    limit, plan = 1 << 40, None
    while plan is None or not any(plan.recompute):
        plan = tp.plan(model, CLUSTER, memory_bytes=limit, executable=True, **request)
        limit = int(0.98 * max(plan.peak_memory_bytes))
    assert plan.executable and "terapipe with recompute = 'ffn'" in plan.search_log[-1] and len(plan.slicing[0][1]) > 1
    assert not plan.recompute[1] and plan.recompute[2] and max(plan.peak_memory_bytes) <= plan.memory_limit_bytes


@pytest.mark.parametrize("seed", range(4))
def test_more_memory_and_a_finer_grid_never_hurt(seed, brief):
    """Of random requests from the least memory that any planner can plan for to all that is wanted; every grid within one limit."""
    rng = np.random.default_rng(40 + seed)
    model, cluster, costs = instance(rng, seed % 3)
    request = dict(batch=2 * int(rng.integers(1, 3)), seq_len=model.block_size, costs=costs, granularity=8)
    request |= {"data_parallel": 2} if seed == 1 else {"recompute": "ffn"} if seed == 2 else {}

    def seconds(limit, **more):
        try:
            return tp.plan(model, cluster, memory_bytes=limit, **{**request, **more}).step_time_s
        except tp.InfeasibleError:
            return math.inf

    with pytest.raises(tp.InfeasibleError) as refused:
        tp.plan(model, cluster, memory_bytes=1, **request)
    free = tp.plan(model, cluster, **request)                   # within the cluster's memory, which is more than any plan takes
    least, most = refused.value.memory_bytes, max(free.peak_memory_bytes)
    assert 10 * most < cluster.memory_bytes
    row = [*(seconds(int(limit)) for limit in np.linspace(least, max(most, least + 1), 4)), free.step_time_s]
    assert row[0] < math.inf and all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(row)), row
    grids = [seconds(int(0.7 * least + 0.3 * most), granularity=g) for g in (model.block_size, 8, 4)]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(grids)), grids


@pytest.mark.parametrize("seed", range(3))
def test_a_refusal_names_no_more_than_any_single_planner_does(seed, brief):
    """The refusal once named what the nearest quick plan lacked, even where a planner had named less."""
    rng = np.random.default_rng(seed)
    model, cluster, costs = instance(rng, seed % 3)
    request = dict(batch=2 * int(rng.integers(1, 3)), seq_len=model.block_size, costs=costs, memory_bytes=1)
    named = {}
    for planner in PLANNERS:
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, cluster, planner=planner, **request)
        named[planner] = refused.value.memory_bytes
    assert named.pop("auto") <= min(named.values()), named


def test_costs_that_are_scaled_scale_the_step(brief):
    rng = np.random.default_rng(3)
    table = rng.integers(1, 60, (5, 5)) * 2.0 ** -10
    for batch in (1, 4):
        plans = [tp.plan(MODEL, CLUSTER, batch=batch, seq_len=32, stages=3, granularity=8,
                         costs=tp.CostModel.from_table(scale * table, scale * 2 * table, granularity=8)) for scale in (1.0, 4.0)]
        assert plans[1].step_time_s == pytest.approx(4 * plans[0].step_time_s, rel=1e-9) and plans[0] == plans[1]


def test_bad_requests_start_no_search(monkeypatch):
    monkeypatch.setattr(Judge, "judge", lambda *_: pytest.fail("work was done"))
    for change, word in (({"stages": 0}, "stages"), ({"time_limit_s": 0}, "time_limit_s"), ({"executable": 1.5}, "executable"),
                         ({"data_parallel": 2, "executable": True}, "one replica")):
        with pytest.raises(ValueError, match=word):
            tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, **change)


@pytest.mark.parametrize("how", [{"chunks": 6}, {"chunks": 6, "schedule": "hanayo"}, {"chunks": 5, "schedule": "interleaved"}])
def test_more_chunks_than_blocks_are_named_not_taken_for_a_lack_of_memory(how):
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=64)
    with pytest.raises(ValueError, match=f"chunks is {how['chunks']}: the model has 4 blocks"):
        tp.plan(model, tp.Cluster.local(), batch=4, seq_len=64, costs=tp.CostModel.analytic(model, tp.Cluster.local()), **how)


@pytest.mark.parametrize("seconds,words", [(math.inf, "searched 1f1b: nothing fits"),
                                           (1.5, "searched 1f1b: nothing fits of what could be faster")])
def test_a_search_of_some_ranks_alone_does_not_speak_for_the_others(seconds, words, monkeypatch):
    asked = []

    def refuse(request, judge_of):
        asked.append(request.ranks)
        raise tp.InfeasibleError("too little")

    monkeypatch.setattr(joint, "plan_one", refuse)
    request = dataclasses.replace(request_of(MODEL, CLUSTER, 4), planner="terapipe", ranks=(4, 2), schedules=("1f1b",), chunks=1)
    task, search = joint._Task(2, 1.0, 0, {4: 1.0, 2: 2.0}, request, True), SimpleNamespace(
        seconds=seconds, judges={}, log=[], refusals=[])
    joint._Search._take(search, task, joint._Search._question(search, task)())
    assert search.log == [words] and asked == [(4, 2) if seconds > 2 else (4,)]
