"""Nodes: links within them and between them, in plans, in programs' timing, and in the bounds."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from sched_oracle import makespan, read
from test_auto import request_of

import terapipe_c as tp
from terapipe_c import _core, schedules
from terapipe_c.cost import CostModel
from terapipe_c.links import Links, rank_of
from terapipe_c.planning.bounds import bound_s, least_work_s, whole_bound_s
from terapipe_c.planning.judge import Judge, possible
from terapipe_c.planning.request import JOINT, has_chunks
from terapipe_c.schedules import SLICED, ZIGZAG

MODEL = tp.GPTConfig(n_layer=5, n_head=2, n_embd=16, vocab_size=64, block_size=32)
NEAR = {"node_link_latency_s": 1e-6, "node_link_bandwidth_Bps": 1e9}
CLUSTER = tp.Cluster(num_devices=8, devices_per_node=4, memory_bytes=1e9, link_latency_s=3e-4, link_bandwidth_Bps=1e7,
                     peak_flops=2e9, **NEAR)
ALIKE = dataclasses.replace(CLUSTER, node_link_latency_s=None, node_link_bandwidth_Bps=None)


def test_a_hop_is_far_where_it_leaves_a_node_in_any_replica():
    rng, seen = np.random.default_rng(0), 0
    for _ in range(300):
        per_node = int(rng.integers(1, 7))
        cluster = dataclasses.replace(CLUSTER, num_devices=per_node * int(rng.integers(1, 7)), devices_per_node=per_node)
        ranks = int(rng.integers(1, cluster.num_devices + 1))
        replicas = int(rng.integers(1, cluster.num_devices // ranks + 1))
        far = [any((q * ranks + r) // per_node != (q * ranks + (r + 1) % ranks) // per_node for q in range(replicas))
               for r in range(ranks)]
        links = Links.of(cluster, ranks, replicas)
        assert list(links.far) == (far if any(far) else [])
        seen += any(far) and not all(far)
        if any(far):
            assert (links.latency_s, links.byte_s) == (3e-4, 1e-7)
    assert seen > 50 and Links.of(ALIKE, 8, 1) == Links() == Links.of(CLUSTER, 4, 1) == Links.of(CLUSTER, 2, 2)


def test_the_share_of_far_hops_is_of_those_between_stages():
    """Behind the last stage nothing is sent."""
    links = Links((False, True, False, True), 1e-5, 1e-9)
    assert [links.share(chunks) for chunks in (1, 2)] == [1 / 3, 3 / 7] and Links().share(2) == Links((False,)).share(1) == 0.0


def test_gradients_may_take_another_link_than_activations():
    rng = np.random.default_rng(1)
    for _ in range(60):
        ranks, micros, slices = int(rng.integers(2, 6)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
        for program in (schedules.gpipe(ranks, micros, slices), schedules.seq1f1b(ranks, micros, slices),
                        schedules.interleaved(ranks, ranks * 2, 2, slices)):
            there, back = rng.uniform(0, 5, (2, program.num_stages))
            cost = {"F": 1.0, "B": 2.0, "comm": there, "comm.back": back}
            expected = makespan(program, lambda op, *_: {"F": 1.0, "B": 2.0}.get(op, 0.0), lambda v, *_, t=there: t[v],
                                lambda v, *_, t=back: t[v])
            line = program.simulate(cost)
            assert line.makespan_s == pytest.approx(expected, rel=1e-12)
            assert program.makespan(cost) == program.lower().makespan(cost) == line.makespan_s
            assert line.lower_bound_s <= line.makespan_s * (1 + 1e-12) and line.bubbles["comm"] >= 0
            same = {"F": 1.0, "B": 2.0, "comm": there, "comm.back": there}
            assert program.makespan(same) == program.makespan({"F": 1.0, "B": 2.0, "comm": there})
    program = schedules.one_f_one_b(3, 2)
    slow = {"F": 1e-4, "B": 1e-4, "comm": [0.0, 0.0, 0.0], "comm.back": [0.0, 0.0, 0.03]}
    ran = tp.emulate(program, slow)
    assert 0.03 < ran.predicted_step_time_s <= ran.step_time_s      # the engine waits for what comes late, too
    with pytest.raises(tp.InvalidValueError, match=r"comm.back.*-1"):
        program.simulate({"F": 1.0, "B": 2.0, "comm.back": -1.0})


def in_turn(program, forward_s, backward_s, there, back, latency):
    """The makespan, instruction by instruction, where what is behind the latency keeps a link from the next message."""
    lists = [[w for w in rank if w[1] in "FBIW"] for rank in read(str(program))]
    home, last, ends, free = program.rank_of, program.num_stages - 1, {}, {}
    at, clock = [0] * len(lists), [0.0] * len(lists)
    seconds = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    while any(n < len(line) for n, line in zip(at, lists, strict=True)):
        for rank, line in enumerate(lists):
            while at[rank] < len(line):
                v, op, q, m, _ = line[at[rank]]
                source, target = (v - 1, v + 1) if op == "F" else (v + 1, v - 1)
                ready = 0.0
                if op != "W" and 0 <= source <= last:
                    if (op == "F", source, q, m) not in ends:
                        break
                    ready = ends[op == "F", source, q, m]
                clock[rank] = max(ready, clock[rank]) + seconds[op]
                if op != "W":
                    leaves, lag = clock[rank], 0.0
                    if 0 <= target <= last and home[target] != rank:
                        lag = (there if op == "F" else back)[v]
                        leaves = max(leaves, free.get((rank, home[target]), 0.0))
                        free[rank, home[target]] = leaves + max(0.0, lag - latency)
                    ends[op == "F", v, q, m] = leaves + lag
                at[rank] += 1
    return max(clock)


def test_a_link_carries_one_message_at_a_time():
    rng, slower = np.random.default_rng(2), 0
    for _ in range(80):
        ranks, micros, slices = int(rng.integers(2, 6)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
        for program in (schedules.gpipe(ranks, micros, slices), schedules.seq1f1b(ranks, micros, slices),
                        schedules.interleaved(ranks, ranks * 2, 2, slices), schedules.zb_v(ranks, micros, slices),
                        schedules.zb_h1(ranks, micros, slices)):
            there, back = rng.uniform(0, 4, (2, program.num_stages))
            latency = float(rng.uniform(0, 2))
            split = "W" in program.counts
            cost = ({"F": 1.0, "I": 1.0, "W": 1.0} if split else {"F": 1.0, "B": 2.0}) | {"comm": there, "comm.back": back}
            alone, line = program.makespan(cost), program.simulate(cost | {"comm.latency": latency})
            cost["comm.latency"] = latency
            assert line.makespan_s == pytest.approx(in_turn(program, 1.0, 2.0, there, back, latency), rel=1e-12)
            assert program.makespan(cost) == program.lower().makespan(cost) == program.lower().simulate(cost).makespan_s
            assert alone <= program.makespan(cost) * (1 + 1e-12) and line.lower_bound_s <= line.makespan_s * (1 + 1e-12)
            assert sum(line.bubbles.values()) == pytest.approx(line.makespan_s * ranks - line.busy_s.sum())
            slower += alone < line.makespan_s * (1 - 1e-9)
            if not split:
                halves = program.split(cost | {"I": 1.0, "W": 1.0}).makespan({**cost, "I": 1.0, "W": 1.0, "B": 2.0})
                assert halves <= line.makespan_s * (1 + 1e-12)
            same = {**cost, "comm.latency": 5.0}
            assert program.makespan(same) == alone
    assert slower > 100
    program = schedules.sliced_1f1b(4, 6, 3)
    cost = {"F": 1.0, "B": 2.0, "comm": 3.0, "comm.latency": 0.5}
    assert program.makespan({**cost, "comm.latency": 3.0}) < program.makespan(cost) == program.lower().simulate(cost).makespan_s
    many = [cost, {**cost, "comm": 6.0}, cost]              # each finds its links free
    assert program.makespan(many).tolist() == [program.makespan(one) for one in many]
    for wrong in (-1.0, np.inf, np.nan):
        for name in ("comm.latency", "comm.latency.back"):
            with pytest.raises(tp.InvalidValueError, match=rf"comm.latency\[1\] is {wrong:g}: "):
                program.simulate(cost | {name: [0.0, wrong, 0.0, 0.0]})
    with pytest.raises(tp.InvalidValueError, match=r"'comm.latency.back' and no 'comm.latency'"):   # it was taken, and did nothing
        program.simulate({"F": 1.0, "B": 2.0, "comm": 3.0, "comm.latency.back": 0.5})
    with pytest.raises(tp.InvalidValueError, match=r"comm.latency differs between slices"):
        schedules.gpipe(2, 1, 2).simulate({"F": 1.0, "B": 2.0, "comm": 1.0, "comm.latency": [[0.0, 1.0], [0.0, 0.0]]})
    with pytest.raises(tp.InvalidValueError, match=r"comm.latency\[0\] is nan"):
        schedules.gpipe(2, 1, 2).simulate({"F": 1.0, "B": 2.0, "comm": 1.0, "comm.latency": [[0.0, np.nan], [0.0, 0.0]]})


def test_the_emulated_engine_waits_for_its_links():
    program = schedules.gpipe(2, 4)
    cost = {"F": 1e-4, "B": 1e-4, "comm": 0.02, "comm.latency": 0.0}
    ran = tp.emulate(program, cost)
    assert 0.1 < ran.predicted_step_time_s <= ran.step_time_s
    assert tp.emulate(program, {**cost, "comm.latency": 0.02}).predicted_step_time_s < 0.05


@pytest.mark.parametrize("name", JOINT)
def test_the_judge_takes_the_link_of_each_hop(name):
    rng, seen = np.random.default_rng(JOINT.index(name)), 0
    while seen < 25:
        chunks = next((c for c in rng.permutation([1, 2]).tolist() if has_chunks(name, c)), 2)
        ranks, micros = int(rng.integers(2, 6)), int(rng.integers(1, 12))
        if ranks * chunks > MODEL.num_blocks or possible(name, ranks, micros):
            continue
        far = tuple(rng.integers(0, 2, ranks).astype(bool).tolist())
        links = Links(far if any(far) else (True,) * ranks, float(rng.uniform(0, 1e-2)), float(rng.uniform(0, 1e-5)))
        costs = CostModel.analytic(MODEL, ALIKE)
        judge = Judge(MODEL, costs, ranks, chunks, None, links=links)
        inner = rng.choice(np.arange(1, MODEL.num_blocks), ranks * chunks - 1, replace=False)
        cut = tuple(itertools.pairwise([0, *sorted(inner.tolist()), MODEL.num_blocks]))
        slicing = ((2, (32,)),) * micros if name == SLICED else ((1, (8, 24)),) * micros
        found = judge.judge(name, cut, slicing)
        program, d = judge.lowered(found), judge.full_durations(found)
        assert program.rank_of == tuple(rank_of(ranks, ranks * chunks, name in ZIGZAG))
        assert found.seconds == pytest.approx(program.simulate(d).makespan_s, rel=1e-12)
        rows = np.array([b * n for b, lengths in slicing for n in lengths]) * 4.0 * MODEL.n_embd
        for k, (here, there) in enumerate(itertools.pairwise(program.rank_of)):
            away = here != there and links.far[-1 if {here, there} == {0, ranks - 1} and ranks > 2 else min(here, there)]
            seconds = links.latency_s + links.byte_s * rows if away else costs.latency_s + costs.byte_s * rows
            assert np.allclose(d["comm"][k], seconds, rtol=1e-12) and np.array_equal(d["comm"][k], d["comm.back"][k + 1])
        looked = judge.descend(found, None, unit=8, fixed_partition=False, fixed_slicing=name == SLICED, budget=100_000)
        assert looked.seconds <= found.seconds
        assert looked.seconds == pytest.approx(judge.lowered(looked).simulate(judge.full_durations(looked)).makespan_s, rel=1e-12)
        seen += 1


def test_plans_pay_for_leaving_a_node_and_say_so(tmp_path):
    request = {"batch": 4, "seq_len": 32, "stages": 8, "planner": "uniform", "executable": False}
    apart, slow = tp.plan(MODEL, CLUSTER, **request), tp.plan(MODEL, ALIKE, **request)
    fast = tp.plan(MODEL, dataclasses.replace(ALIKE, link_latency_s=1e-6, link_bandwidth_Bps=1e9), **request)
    assert fast.step_time_s < apart.step_time_s < slow.step_time_s
    far = [k for k in range(7) if apart.durations["comm"][k, 0] > 3e-4]
    assert far == [3] and (apart.durations["comm.back"][4] > 3e-4).all()
    assert apart.durations["AR"][0, 0] == slow.durations["AR"][0, 0] > fast.durations["AR"][0, 0]   # rank 7 to rank 0
    apart.save(tmp_path / "plan.json")
    again = tp.Plan.load(tmp_path / "plan.json")
    assert again.cluster == CLUSTER and again.digest == apart.digest
    assert again.program.simulate(again.durations).makespan_s == apart.step_time_s
    assert "1 us" in repr(CLUSTER) and "between nodes" in repr(CLUSTER) and "between nodes" not in repr(ALIKE)
    assert not any(key.startswith("node_link") for key in ALIKE.to_dict()) and tp.Cluster.from_dict(CLUSTER.to_dict()) == CLUSTER
    costs = CostModel.from_table(np.ones((5, 5)) * 1e-4, np.ones((5, 5)) * 2e-4, granularity=8, latency_s=7e-5)
    told = tp.plan(MODEL, CLUSTER, costs=costs, **request).durations["comm"]      # of the near link costs know more
    assert told[0, 0] == 7e-5 and told[3, 0] == pytest.approx(3e-4 + 1e-7 * 4 * 16 * 32)


def test_replicas_add_their_gradients_on_the_link_that_joins_them():
    request = {"batch": 8, "seq_len": 32, "planner": "uniform", "executable": False}
    for ranks, replicas, near in ((2, 2, True), (4, 2, False), (1, 4, True), (1, 8, False), (3, 2, False)):
        plan = tp.plan(MODEL, CLUSTER, stages=ranks, data_parallel=replicas, **request)
        alone = tp.plan(MODEL, CLUSTER, stages=ranks, **request | {"batch": 8 // replicas})
        most = max(plan.durations["OPT"][:, 0] - alone.durations["OPT"][:, 0])
        latency = CLUSTER.near_link[0] if near else CLUSTER.link_latency_s
        assert (most > 2 * (replicas - 1) * 3e-4) is not near and most > 2 * (replicas - 1) * latency


def test_no_plan_is_below_the_bounds():
    rng, counted = np.random.default_rng(3), 0
    for _ in range(40):
        ranks, unit = int(rng.integers(2, 5)), 8
        cluster = dataclasses.replace(CLUSTER, num_devices=ranks, devices_per_node=1 if ranks % 2 else int(rng.integers(1, 3)),
                                      link_latency_s=float(10 ** rng.uniform(-7, -2)),
                                      link_bandwidth_Bps=float(10 ** rng.uniform(5, 9)))
        if ranks % cluster.devices_per_node:
            continue
        costs = CostModel.analytic(MODEL, cluster)
        links = Links.of(cluster, ranks, 1)
        judge = Judge(MODEL, costs, ranks, 1, None, links=links)
        inner = rng.choice(np.arange(1, MODEL.num_blocks), ranks - 1, replace=False)
        cut = tuple(itertools.pairwise([0, *sorted(inner.tolist()), MODEL.num_blocks]))
        bound = tp.planners.slicing_bound(MODEL, costs, cut, (1, 1), seq_len=32, granularity=unit, links=links)
        asked = request_of(MODEL, cluster, 2, costs)
        joint = bound_s(asked, ranks, 1, 1, least_work_s(asked, 2))
        whole = whole_bound_s(dataclasses.replace(asked, ranks=(ranks,)), ranks)
        for lengths in ((32,), (16, 16), (8, 24), (24, 8), (8, 8, 8, 8)):
            for name in ("gpipe", "1f1b", "seq1f1b", "zb-h1"):
                seconds = judge.judge(name, cut, ((1, lengths),) * 2).seconds
                assert bound <= seconds and joint <= seconds and (len(lengths) > 1 or whole <= seconds)
                counted += 1
    assert counted > 300


@pytest.mark.skipif(not any(Path(_core.__file__).parent.glob("_cuda.*.so")), reason="_cuda is not built (no nvcc here)")
def test_messages_of_two_bytes_a_number_are_bound_as_such():
    """With a GPU's bf16 the bound counted four bytes a number."""
    costs = CostModel.analytic(MODEL, dataclasses.replace(ALIKE, link_bandwidth_Bps=1e4)).on("cuda", "bf16")
    cut = ((0, 6), (6, 12))
    judge = Judge(MODEL, costs, 2, 1, None)
    bound = tp.planners.slicing_bound(MODEL, costs, cut, (1,), seq_len=32, granularity=8)
    least = min(judge.judge("gpipe", cut, ((1, lengths),)).seconds for lengths in ((32,), (16, 16), (8, 24), (8, 8, 8, 8)))
    assert 0 < bound <= least


@pytest.mark.parametrize("devices_per_node", [2, 4])
def test_auto_is_never_slower_on_nodes_either(devices_per_node, brief):
    rng = np.random.default_rng(devices_per_node)
    cluster = dataclasses.replace(CLUSTER, link_latency_s=float(10 ** rng.uniform(-5, -3)), devices_per_node=devices_per_node,
                                  num_devices=2 * devices_per_node)
    comparison = tp.compare(MODEL, cluster, batch=4, seq_len=32)
    auto = comparison["auto"].plan
    for row in comparison:
        if row.plan is not None:
            assert auto.step_time_s <= row.plan.step_time_s * (1 + 1e-9), row.planner


def test_a_published_device_in_nodes_has_its_own_link_within_them():
    cluster = tp.Cluster.preset("a100-40", 16, devices_per_node=8, link_bandwidth_Bps=25e9, link_latency_s=1e-5)
    assert cluster.near_link == (5e-6, 300e9) and cluster.link_bandwidth_Bps == 25e9
    assert not tp.Cluster.preset("a100-40", 16, link_bandwidth_Bps=25e9).tells_nodes_apart
    assert not tp.Cluster.preset("a100-40", 16, devices_per_node=8).tells_nodes_apart


def test_a_link_of_a_node_is_checked():
    with pytest.raises(tp.InvalidValueError, match="node_link_bandwidth_Bps is 0"):
        tp.Cluster(8, devices_per_node=4, node_link_bandwidth_Bps=0)
    with pytest.raises(tp.InvalidValueError, match="node_link_latency_s is -1"):
        tp.Cluster(8, devices_per_node=4, node_link_latency_s=-1.0)
