"""Chimera through ``tp.plan``: two copies in the memory, their sum in the time, and what is refused."""

import itertools
import json

import numpy as np
import pytest
from test_cli import SMALL, run

import terapipe_c as tp
from terapipe_c.engine import rank_memory
from terapipe_c.links import Links
from terapipe_c.planning import bidirectional
from terapipe_c.planning.judge import Candidate, Judge, Savings, rounded
from terapipe_c.planning.replicas import Replicas

MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=97, block_size=32)
DEEPER = tp.GPTConfig(n_layer=8, n_head=2, n_embd=32, vocab_size=64, block_size=32)
CLUSTER = tp.Cluster(num_devices=4, peak_flops=1e9)


def planned(schedule="chimera", batch=8, cluster=CLUSTER, model=MODEL, **options):
    return tp.plan(model, cluster, batch=batch, seq_len=32, schedule=schedule, **options)


@pytest.mark.parametrize("planner", ["auto", "terapipe", "uniform"])
def test_a_plan_is_a_value_and_says_what_it_is(planner, tmp_path):
    plan = planned(planner=planner)
    assert plan.schedule == "chimera" and plan.copies == 2 and plan.ranks == len(plan.stages) == 4 and plan.planner == planner
    assert plan.program.num_stages == 8 and plan.durations["F"].shape == (8, sum(len(lengths) for _, lengths in plan.slicing))
    plan.program.check(canonical=True)
    assert plan.lower_bound_s <= plan.step_time_s == plan.timeline().makespan_s
    assert sum(plan.bubbles.values()) == pytest.approx(4 * plan.step_time_s - sum(plan.busy_s))
    plan.save(tmp_path / "plan.json")
    loaded = tp.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.copies == 2 and loaded.to_dict() == plan.to_dict()
    assert planned(planner=planner).digest == plan.digest
    text = plan.explain()
    assert "two copies of the model, half of the micro-batches down the ranks and half up" in text
    assert "0 on ranks 0 and 3: embedding" in text and "2 on ranks 2 and 1: " in text and "reproducible=False" in text
    assert "<svg" in plan._repr_html_() and "chimera" in repr(plan)


def test_memory_is_of_two_copies():
    for options in ({}, {"recompute": "full"}, {"data_parallel": 2, "stages": 2}, {"slicing": [(1, [16, 16])] * 4, "stages": 2,
                                                                                  "data_parallel": 2}):
        plan = planned(**options)
        replicas = plan.data_parallel
        assert plan.peak_memory_bytes == rank_memory(MODEL, plan.stages, plan.slicing, plan.program, recompute=plan.recompute,
                                                     replicas=replicas)
        ranks = plan.ranks
        weights = [16 * sum(MODEL.block_params(block.kind) for block in MODEL.blocks[a:e]) for a, e in plan.stages]
        for rank, held in enumerate(plan.peak_memory_bytes):
            assert held > weights[rank] + weights[ranks - 1 - rank]
    one, two = planned("1f1b", planner="uniform", stages=4), planned(planner="uniform", stages=4)
    assert min(two.peak_memory_bytes) > max(one.peak_memory_bytes)


def test_the_copies_sum_is_in_the_prediction():
    """By the formula of `judge.Replicas` for two members, on each stage's update."""
    plan = planned(planner="uniform", stages=4)
    ring = Replicas(1, CLUSTER.link_latency_s, CLUSTER.link_bandwidth_Bps, copies=2)
    alone = planned("1f1b", planner="uniform", stages=4)
    params = [sum(MODEL.block_params(block.kind) for block in MODEL.blocks[a:e]) for a, e in plan.stages]
    params[0] -= MODEL.vocab_size * MODEL.n_embd                      # the head's stage has the tied embedding's gradient
    params[-1] += MODEL.vocab_size * MODEL.n_embd
    added = plan.durations["OPT"][:4, 0] - alone.durations["OPT"][:, 0]
    assert added == pytest.approx([ring.seconds(4.0 * n) for n in params], rel=1e-6)
    assert (plan.durations["OPT"][4:] == plan.durations["OPT"][:4]).all()
    assert ring.seconds(80.0) == Replicas(2, CLUSTER.link_latency_s, CLUSTER.link_bandwidth_Bps).seconds(80.0)


def test_a_search_is_never_slower_than_layers_divided_evenly():
    even, free = planned(planner="uniform", stages=4), planned(stages=4)
    assert free.step_time_s <= even.step_time_s
    given = planned(partition=[(0, 3), (3, 5), (5, 7), (7, 10)])
    assert given.stages == [(0, 3), (3, 5), (5, 7), (7, 10)] and planned(stages=4).step_time_s <= given.step_time_s
    fixed = planned(slicing=[(2, [16, 16])] * 4, stages=4)
    assert fixed.slicing == [(2, [16, 16])] * 4


def test_it_keeps_within_the_memory_or_says_how_much_is_missing():
    roomy = planned(stages=4)
    needed = max(roomy.peak_memory_bytes)
    tight = planned(stages=4, memory_bytes=needed - 1)
    assert max(tight.peak_memory_bytes) < needed and tight.step_time_s >= roomy.step_time_s
    with pytest.raises(tp.InfeasibleError, match=r"rank \d needs \d+ bytes and may use 1000"):
        planned(memory_bytes=1000)


@pytest.mark.parametrize("again", ["ffn", "full"])
def test_two_ranks_are_refused_no_limit_that_any_boundary_fits(again):
    """By every boundary: single steps of it, none of which helped, ended up to 0.3 % above the least."""
    kinds = ("ffn",) if again == "ffn" else ("attention", "ffn")
    for layers, width, batch in itertools.product((4, 5), (16, 24), (2, 6)):
        model = tp.GPTConfig(n_layer=layers, n_head=2, n_embd=width, vocab_size=500, block_size=16)
        savings = Savings(tuple(block.kind in kinds for block in model.blocks))
        judge, slicing = Judge(model, tp.CostModel.analytic(model, CLUSTER), 2, 1, None, savings=savings), ((1, (16,)),) * batch
        least = min(max(judge.peak_bytes(judge.judge("chimera", ((0, at), (at, model.num_blocks)), slicing, 0)))
                    for at in range(1, model.num_blocks))
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, CLUSTER, batch, 16, schedule="chimera", stages=2, slicing=slicing, recompute=again, memory_bytes=1)
        assert refused.value.memory_bytes == least


LONG = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=96)
LINKED = tp.Cluster(num_devices=4, link_latency_s=1e-5, link_bandwidth_Bps=1e9, peak_flops=1e9)


def test_boundaries_that_are_given_are_kept():
    """Others are faster: each of the search's moves of boundaries would have taken some."""
    request = dict(batch=8, seq_len=96, schedule="chimera", stages=4, granularity=24)
    free = tp.plan(LONG, LINKED, **request)
    for given in ([(0, 1), (1, 2), (2, 7), (7, 10)], [(0, 3), (3, 5), (5, 8), (8, 10)]):
        kept = tp.plan(LONG, LINKED, partition=given, **request)
        assert kept.stages == given != free.stages and free.step_time_s < kept.step_time_s


def test_micro_batches_are_no_larger_than_measured():
    costs = tp.CostModel.from_dict({**tp.CostModel.analytic(MODEL, CLUSTER).to_dict(), "overhead_s": 1e-2})
    measured = tp.CostModel.from_dict({**costs.to_dict(), "source": "measured", "micro_batch": 2})
    most = [max(b for b, _ in planned(batch=16, stages=2, costs=of).slicing) for of in (costs, measured)]
    assert most[0] > 2 and most[1] <= 2


def test_of_equally_fast_plans_the_one_that_needs_least_memory_is_taken():
    request = dict(batch=8, seq_len=96, schedule="chimera", stages=4, granularity=24)
    plan = tp.plan(LONG, LINKED, **request)
    leaner = tp.plan(LONG, LINKED, memory_bytes=max(plan.peak_memory_bytes) - 1, **request)
    assert leaner.step_time_s > plan.step_time_s * (1 + 1e-11)


def test_a_refusal_names_what_the_number_of_ranks_needs_that_needs_least():
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=8, vocab_size=500, block_size=96)
    cluster, needed = tp.Cluster(num_devices=8), {}
    for stages in (8, 4, 2, None):
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, cluster, 8, 96, schedule="chimera", stages=stages, granularity=96, memory_bytes=1000)
        needed[stages] = refused.value.memory_bytes
    assert needed.pop(None) == min(needed.values()) < needed[8]


def test_more_memory_never_hurts():
    wide = tp.GPTConfig(n_layer=5, n_head=2, n_embd=24, vocab_size=301, block_size=32)
    roomy = planned(stages=4, model=wide)
    before, plans = np.inf, 0
    for share in np.linspace(0.3, 1.0, 36):
        try:
            plan = planned(stages=4, model=wide, memory_bytes=int(share * max(roomy.peak_memory_bytes)))
        except tp.InfeasibleError:
            assert not plans
            continue
        assert plan.step_time_s <= before
        before, plans = plan.step_time_s, plans + 1
    assert plans > 3 and before == roomy.step_time_s


def test_boundaries_and_slices_move_together(monkeypatch):
    """Where few blocks are many stages, moves of boundaries alone ended a twentieth above."""
    cluster = tp.Cluster(num_devices=6, link_latency_s=1e-5)
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=96, vocab_size=2000, block_size=64, tie_weights=False)
    request = dict(batch=12, seq_len=64, schedule="chimera", stages=6, planner="terapipe")
    needed = max(tp.plan(model, cluster, **request).peak_memory_bytes)

    def steps():
        for limit in (None, needed, int(0.995 * needed)):
            yield tp.plan(model, cluster, memory_bytes=limit, **request).step_time_s

    with monkeypatch.context() as patch:
        patch.setattr(bidirectional, "_moved", lambda judge, request, plans, budget: [])
        before = list(steps())
    gains = [b / a for b, a in zip(before, steps(), strict=True)]
    assert min(gains) >= 1 and gains[0] > 1.03


@pytest.mark.parametrize("planner", ["auto", "terapipe"])
def test_a_finer_grid_never_hurts(planner):
    """It had few starts of its own, and none of those of the grids that it refines: up to 10 % were lost."""
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=16, vocab_size=97, block_size=24)
    s, c, plans = np.arange(25)[:, None], np.arange(25)[None], 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        table = 1e-4 * (1 + 0.05 * s * rng.uniform(0.2, 3) + 0.003 * rng.random() * s * c) * rng.uniform(0.6, 1.4, (25, 25))
        costs = tp.CostModel.from_table(table, table * rng.uniform(1, 2.5), granularity=1, latency_s=10 ** rng.uniform(-6, -4))
        batch, before = 2 * int(rng.integers(1, 4)), dict[int, float]()
        for unit in (24, 12, 8, 6, 4, 3, 2, 1):
            plan = tp.plan(model, CLUSTER, batch, 24, costs=costs, planner=planner, schedule="chimera", granularity=unit)
            assert all(rounded(plan.step_time_s) <= seconds for g, seconds in before.items() if g % unit == 0), (seed, unit)
            before[unit], plans = rounded(plan.step_time_s), plans + 1
    assert plans == 32


@pytest.mark.parametrize("options, word", [
    ({"stages": 3}, "chimera has 3 ranks: an even number"),
    ({"batch": 7}, "chimera has 7 micro-batches: an even number"),
    ({"slicing": [(3, [32]), (3, [32]), (2, [32])]}, "chimera has 3 micro-batches"),
    ({"slicing": [(1, [32]), (3, [32]), (3, [32]), (1, [32])]}, r"slicing\[0\] is \(1, \[32\]\) and slicing\[2\] \(3, \[32\]\)"),
    ({"slicing": [(4, [16, 16]), (4, [32])]}, r"slicing\[0\] is \(4, \[16, 16\]\) and slicing\[1\]"),
    ({"planner": "autopipe"}, "planner autopipe plans one pipeline"),
    ({"chunks": 2}, "chimera has one stage a rank"),
    ({"executable": True}, "executable=True plans one copy of the model"),
    ({"cluster": tp.Cluster(num_devices=1, peak_flops=1e9)}, "chimera has 1 rank: an even number"),
])
def test_what_does_not_fit_is_refused(options, word):
    with pytest.raises(ValueError, match=word):
        planned(**options)


def test_an_odd_cluster_gets_an_even_number_of_ranks():
    assert planned(cluster=tp.Cluster(num_devices=5, peak_flops=1e9)).ranks in (2, 4)
    plan = planned(cluster=tp.Cluster(num_devices=7, peak_flops=1e9), planner="uniform", model=DEEPER)
    assert plan.ranks == 6 or any(what.startswith("6 ranks") for what, _ in plan.compared), plan.compared


def test_what_other_programs_have_no_word_for():
    plan = planned(stages=4, slicing=[(1, [32])] * 8)
    with pytest.raises(tp.ScheduleError, match="no word for two copies"):
        plan.to_torch_csv()
    with pytest.raises(ValueError, match="Megatron has no schedule chimera"):
        plan.to_megatron()


def test_a_plan_of_another_number_of_copies_is_damaged():
    data = planned(stages=4).to_dict()
    data["program"] = str(tp.schedules.zb_v(4, 8).lower(True))
    with pytest.raises(ValueError):
        tp.Plan.from_dict(data)


def test_a_limit_of_time_ends_the_search():
    """At the first plan, where it fits."""
    free = planned(stages=4)
    assert planned(stages=4, time_limit_s=1e-9).step_time_s >= free.step_time_s
    assert planned(stages=4, time_limit_s=600).digest == free.digest
    with pytest.raises(tp.DeadlineError, match="time_limit_s is 1e-09, and planner auto had no plan"):
        planned(stages=4, time_limit_s=1e-9, memory_bytes=1000)


def test_costs_and_comparisons_know_it():
    costs = tp.CostModel.analytic(MODEL, CLUSTER)
    program = tp.schedules.chimera(2, 4)
    rows = costs.durations(program)
    assert rows["F"].shape == (4, 4) and np.array_equal(rows["F"][:2], rows["F"][2:])
    assert program.simulate(costs).makespan_s > 0
    table = tp.compare(MODEL, CLUSTER, batch=8, seq_len=32, schedule="chimera", planners=["terapipe", "uniform", "autopipe"])
    assert [row[-1] for row in table.table()][:2] == ["not reproducibly"] * 2


def test_messages_take_the_links_of_both_directions():
    """Two nodes of two: between ranks 1 and 2, which are stages 1 and 2 of one copy and 5 and 6 of the other."""
    nodes = tp.Cluster(num_devices=4, devices_per_node=2, peak_flops=1e9, node_link_bandwidth_Bps=1e12, node_link_latency_s=1e-7,
                       link_bandwidth_Bps=1e7, link_latency_s=1e-3)
    plan = planned(cluster=nodes, planner="uniform", stages=4)
    forward, back = plan.durations["comm"][:, 0], plan.durations["comm.back"][:, 0]
    assert (forward >= 1e-3).tolist() == [False, True, False, False] * 2
    assert (back >= 1e-3).tolist() == [False, False, True, False] * 2
    rows = tp.CostModel.analytic(MODEL, nodes).durations(plan.program, partition=plan.stages, slicing=plan.slicing, model=MODEL,
                                                         links=Links.of(nodes, 4, 1))
    for name in ("F", "I", "W", "comm", "comm.back", "AR"):
        assert np.array_equal(rows[name], plan.durations[name]), name
    plan.program.check()
    assert plan.lower_bound_s <= plan.step_time_s and planned(cluster=nodes, stages=4).step_time_s <= plan.step_time_s


def test_from_a_shell(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    code, out, err = run(capsys, "plan", *SMALL, "--schedule", "chimera", "--stages", 2, "--costs", "analytic", "--out", plan)
    assert code == 0, err
    assert json.loads(plan.read_text())["schedule"] == "chimera"
    code, out, err = run(capsys, "simulate", plan, "--json")
    assert code == 0 and json.loads(out)["makespan_s"] == pytest.approx(tp.Plan.load(plan).step_time_s), err
    code, out, err = run(capsys, "simulate", "--schedule", "chimera", "--ranks", 4, "--micro-batches", 8, "--json")
    assert code == 0 and json.loads(out)["makespan_s"] == 30.0, err


def test_a_large_search_knows_the_even_plan_too(monkeypatch):
    """Where quick plans took all the work, that of layers divided evenly was none of them: auto was slower, or refused."""
    monkeypatch.setattr(bidirectional, "_WORK", 1)
    monkeypatch.setattr(bidirectional, "_estimates", lambda judge, slicing: (-slicing[0][0],) * 2)     # the worst first
    even = planned(planner="uniform", stages=4, batch=16)
    for memory in (None, max(even.peak_memory_bytes)):
        assert planned(stages=4, batch=16, memory_bytes=memory).step_time_s <= even.step_time_s


def test_time_that_is_up_on_fewer_ranks_leaves_the_plan_on_more(monkeypatch):
    """It was lost where what was looked at by then did not fit."""
    best = bidirectional._best

    def slow(judge, request):
        if judge.ranks < 4:
            raise tp.DeadlineError("no time was left")
        return best(judge, request)

    monkeypatch.setattr(bidirectional, "_best", slow)
    assert planned(time_limit_s=100.0).ranks == 4


def test_a_plan_does_not_depend_on_hashes(monkeypatch):
    """Of starts that take equally long the first was any: another process named other bytes."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=50, block_size=48)
    cluster = tp.Cluster(num_devices=4, link_latency_s=1e-3, link_bandwidth_Bps=1e8, devices_per_node=1, node_link_latency_s=1e-6,
                         node_link_bandwidth_Bps=1e10)
    told, least = tp.CostModel.analytic(model, cluster).to_dict(), set()
    none = dict.fromkeys(("pair_s", "a0", "a1", "a2", "a3"), 0.0)
    for curve, ms in zip(told["curves"].values(), "22 02 01 01 02 02 12 00 24 13 13 13".split(), strict=True):
        curve |= {"rows": [0.0, 1.0], "seconds": [int(n) / 1000 for n in ms], **none}
    for seed in range(8):
        monkeypatch.setattr(Candidate, "__hash__", lambda c, seed=seed: hash((seed, c.partition, c.slicing, c.pending)))
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, cluster, 4, 48, planner="terapipe", schedule="chimera", stages=4, granularity=4, memory_bytes=1,
                    costs=tp.CostModel.from_dict(told))
        least.add(refused.value.memory_bytes)
    assert len(least) == 1
