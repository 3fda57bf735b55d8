"""tp.plan: what it promises (never worse than uniform, deterministic, within the limits), and what it refuses."""
import itertools
import json
import shlex
from dataclasses import replace

import numpy as np
import pytest

from terapipe_c import InfeasibleError, planners
from terapipe_c.config import Cluster, GPTConfig
from terapipe_c.cost import CostModel, Curve
from terapipe_c.explain import format_slicing
from terapipe_c.partition import check_partition, check_slicing, even_partition
from terapipe_c.plan import Plan
from terapipe_c.planning.entrance import plan
from terapipe_c.planning.judge import Judge
from terapipe_c.planning.request import PLANNERS, choose_granularity
from terapipe_c.schedules import Program

pytestmark = pytest.mark.usefixtures("brief")

MODEL = GPTConfig(n_layer=3, n_head=4, n_embd=64, vocab_size=256, block_size=96)
GPT2 = GPTConfig.preset("gpt2-124m", block_size=2048)
CLUSTER = Cluster(num_devices=8, memory_bytes=16e9, link_latency_s=3e-6, link_bandwidth_Bps=1e10)
COSTS = CostModel.analytic(MODEL, CLUSTER)
GOOD = dict(model=MODEL, cluster=CLUSTER, batch=2, seq_len=96, costs=COSTS, planner="uniform", schedule="gpipe", stages=2)


def kernel_costs(model, overhead=2e-4, latency_s=2e-6, byte_s=2e-10):
    """Costs with a price on short slices (a ramp of the kernels), as measured ones have."""
    base = CostModel.analytic(model, CLUSTER)
    curves = {k: Curve(c.rows, tuple(y + overhead for y in c.seconds), c.pair_s, c.a0, c.a1, c.a2, c.a3)
              for k, c in base.curves.items() if c.rows}
    return CostModel(curves, source="analytic", overhead_s=2e-6, latency_s=latency_s, byte_s=byte_s, model=model,
                     optimizer_param_s=1e-10)


def layer_only(fwd, bwd, granularity):
    return CostModel.from_table(fwd, bwd, granularity=granularity)


# ---- uniform and fixed ----

def test_uniform_is_megatrons_default():
    p = plan(**GOOD)
    assert p.stages == even_partition(MODEL, 2) == [(0, 5), (5, 8)]
    assert p.slicing == [(1, [96])] * 2 and p.schedule == "gpipe" and p.ranks == 2 and p.planner == "uniform"
    assert p.program.num_ranks == 2 and p.program.check() is None
    assert p.step_time_s == pytest.approx(p.timeline().makespan_s) and p.planning_time_s > 0
    assert len(p.peak_memory_bytes) == 2 and all(isinstance(b, int) and b > 0 for b in p.peak_memory_bytes)
    assert p.recompute == [False] * 8 and p.swap == [0] * 8


def test_what_is_given_is_kept():
    partition, slicing = [(0, 2), (2, 7), (7, 8)], [(1, [1, 1, 62, 32]), (1, [96])]
    for planner in ("uniform", "terapipe"):
        p = plan(**{**GOOD, "planner": planner, "partition": partition, "slicing": slicing, "stages": None})
        assert p.stages == partition and p.slicing == slicing and p.ranks == 3


def test_a_number_of_slices_means_slices_as_equal_as_can_be():
    assert plan(**{**GOOD, "slicing": 5}).slicing == [(1, [20, 19, 19, 19, 19])] * 2
    assert plan(**{**GOOD, "slicing": 1}).slicing == [(1, [96])] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "seq1f1b"])
@pytest.mark.parametrize("stages,slicing", [(1, 1), (2, 3), (3, [(1, [1, 1, 62, 32]), (1, [96])]), (4, 4),
                                            (8, [(2, [50, 46])])])
def test_every_plan_carries_a_proven_program_of_all_its_work(schedule, stages, slicing):
    p = plan(**{**GOOD, "schedule": schedule, "stages": stages, "slicing": slicing})
    assert p.program.check() is None and p.schedule == schedule
    units = [(q, s) for q, (_, lengths) in enumerate(p.slicing) for s in range(len(lengths))]
    code = np.concatenate([p.program.instructions(r) for r in range(p.ranks)])
    names = [w.split("@")[0] for line in str(p.program).splitlines() for w in line.split()]
    for op in "FIW":
        want = {f"{k}{op}{q}.{s}" for k in range(stages) for q, s in units}
        assert sorted(n for n in names if n in want) == sorted(want)
    assert len(code) == len(p.program) == len(names)
    assert sum("OPT" in n for n in names) == stages and any("AR" in n for n in names) == (stages > 1)
    assert p.lower_bound_s <= p.step_time_s * (1 + 1e-12) and p.gap >= -1e-12


def test_bubbles_sum_to_the_idle_time():
    p = plan(**{**GOOD, "slicing": 3, "stages": 3})
    assert sum(p.bubbles.values()) == pytest.approx(p.ranks * p.step_time_s - sum(p.busy_s), rel=1e-9)
    one = plan(**{**GOOD, "stages": 1})
    assert sum(one.bubbles.values()) == pytest.approx(0, abs=1e-9 * one.step_time_s) and one.gap == pytest.approx(0, abs=1e-9)


def test_interleaved_has_chunks():
    p = plan(**{**GOOD, "schedule": "interleaved", "chunks": 2, "stages": 2})
    assert p.chunks == 2 and len(p.stages) == 4 and p.program.check() is None


# ---- terapipe ----

@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_uniform_on_the_same_costs(seed):
    rng = np.random.default_rng(seed)
    s, c = np.meshgrid(np.arange(13), np.arange(13), indexing="ij")
    table = [rng.integers(1, 60, s.shape) * 1e-3, (3 + s + 0.02 * s * c) * 1e-3, (3 + 4 * np.ceil(s / 4)) * 1e-3][seed % 3]
    costs = layer_only(table, 2 * table, 8)
    for batch, stages, schedule in ((1, 2, "auto"), (3, 3, "1f1b"), (2, 4, "gpipe")):
        request = {**GOOD, "batch": batch, "stages": stages, "costs": costs, "schedule": schedule}
        best = plan(**{**request, "planner": "terapipe"})
        even = plan(**{**request, "planner": "uniform"})
        assert best.step_time_s <= even.step_time_s * (1 + 1e-12)
        assert sum(b for b, _ in best.slicing) == batch and all(sum(n) == 96 for _, n in best.slicing)


def test_one_sequence_on_two_ranks_is_sliced_and_nearly_halved():
    costs = kernel_costs(GPT2)
    request = dict(model=GPT2, cluster=CLUSTER, batch=1, seq_len=2048, costs=costs)
    one, two = plan(**request, stages=1), plan(**request, stages=2)
    assert len(two.slicing[0][1]) >= 4 and len(one.slicing[0][1]) == 1
    assert one.step_time_s / two.step_time_s > 1.7
    blocks = [0, 0]
    for (first, end), rank in zip(two.stages, two.program.rank_of, strict=True):
        blocks[rank] += end - first
    assert blocks[two.program.rank_of[-1]] < sum(blocks) / 2           # the head is work too


def test_cheap_short_slices_are_used_and_dear_ones_are_not():
    request = dict(model=GPT2, cluster=CLUSTER, batch=1, seq_len=1024, stages=4)
    cheap = plan(**request, costs=kernel_costs(GPT2, overhead=1e-6))
    dear = plan(**request, costs=kernel_costs(GPT2, overhead=5e-2))
    assert len(cheap.slicing[0][1]) > 2 * len(dear.slicing[0][1])


def test_many_cheap_sequences_are_not_sliced_for_nothing():
    """With 32 micro-batches on 2 ranks the bubble is small: slices only pay their overhead."""
    p = plan(GPT2, CLUSTER, batch=32, seq_len=512, costs=kernel_costs(GPT2, overhead=1e-2), stages=2)
    assert sum(len(lengths) for _, lengths in p.slicing) <= 40


def test_the_plan_beats_every_equal_slicing_it_could_have_chosen():
    costs = kernel_costs(GPT2)
    request = dict(model=GPT2, cluster=CLUSTER, batch=1, seq_len=1024, costs=costs, stages=3, schedule="gpipe")
    best = plan(**request, planner="terapipe")
    for parts in (1, 2, 4, 8, 16):
        for partition in (None, best.stages):
            other = plan(**request, planner="uniform", slicing=parts, partition=partition)
            assert best.step_time_s <= other.step_time_s * (1 + 1e-9), (parts, partition)


def test_small_instances_come_near_the_best_of_all_slicings_and_partitions():
    """Brute force over 2^5 slicings x all partitions x three schedules, each simulated."""
    model = GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=48)
    rng = np.random.default_rng(3)
    for _ in range(3):
        s, c = np.indices((7, 7))
        table = (1 + rng.random() * 2 + 0.7 * s + 0.05 * s * c) * 1e-3
        costs = layer_only(table, 1.7 * table, 8)
        judge = Judge(model, costs, 2, 1, None)
        least = np.inf
        for bits in range(32):
            ends = [i + 1 for i in range(5) if bits >> i & 1] + [6]
            lengths = tuple(8 * (b - a) for a, b in itertools.pairwise([0, *ends]))
            for cut in range(1, 6):
                for name in ("gpipe", "1f1b", "seq1f1b"):
                    for pending in (0, 1):
                        found = judge.judge(name, ((0, cut), (cut, 6)), ((1, lengths),) * 2, pending)
                        least = min(least, found.seconds)
        p = plan(model, CLUSTER, batch=2, seq_len=48, costs=costs, stages=2, granularity=8)
        assert p.step_time_s <= least * 1.01


def test_planning_is_deterministic():
    request = dict(model=GPT2, cluster=CLUSTER, batch=4, seq_len=128, costs=kernel_costs(GPT2), stages=3)
    first, second = plan(**request), plan(**request)
    assert first == second and hash(first) == hash(second) and first.step_time_s == second.step_time_s


def test_granularity_is_kept():
    costs = kernel_costs(GPT2)
    for unit in (1, 16, 64):
        p = plan(GPT2, CLUSTER, batch=1, seq_len=128, costs=costs, stages=2, granularity=unit)
        assert all(n % unit == 0 for n in p.slicing[0][1]) and p.granularity == unit
    assert choose_granularity(2048, 1) == 8 and choose_granularity(96, 2) == 1 and choose_granularity(1021, 4) == 1
    assert 131072 // choose_granularity(131072, 1) <= 4096


def test_numbers_of_ranks_are_compared_when_none_is_given():
    costs = kernel_costs(half := replace(GPT2, n_layer=6))
    p = plan(half, CLUSTER, batch=1, seq_len=128, costs=costs)
    asked = [plan(half, CLUSTER, batch=1, seq_len=128, costs=costs, stages=n, planner="terapipe") for n in (1, 2, 4, 8)]
    assert p.ranks > 4 and p.step_time_s <= min(other.step_time_s for other in asked)
    slow_links = kernel_costs(half, latency_s=10.0)
    assert plan(half, CLUSTER, batch=1, seq_len=128, costs=slow_links).ranks == 1


def test_costs_default_to_the_roofline():
    p = plan(MODEL, CLUSTER, batch=2, seq_len=96, planner="uniform", schedule="gpipe", stages=2)
    assert p == plan(**GOOD) and p.step_time_s == plan(**GOOD).step_time_s


def test_slices_start_from_the_exact_optimum():
    """Where stages are equal and nothing but layers costs, the plan cannot lose to the exact planner's own slicing."""
    model = GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=32, block_size=96, tie_weights=False)
    s, c = np.indices((13, 13))
    table = (2 + s + 0.1 * s * c) * 1e-3
    costs = layer_only(table, 2 * table, 8)
    exact = planners.slice_tokens(costs, 2, seq_len=96, granularity=8)
    fixed = plan(model, CLUSTER, batch=1, seq_len=96, costs=costs, planner="uniform", schedule="gpipe", stages=2,
                 slicing=[(1, list(exact.lengths))])
    assert plan(model, CLUSTER, batch=1, seq_len=96, costs=costs, stages=2, granularity=8).step_time_s <= fixed.step_time_s


# ---- memory ----

def test_too_little_memory_names_the_rank_and_the_bytes():
    with pytest.raises(InfeasibleError, match=r"rank \d needs \d+ bytes and may use 1000: \d+ bytes short"):
        plan(**{**GOOD, "memory_bytes": 1000})
    assert issubclass(InfeasibleError, ValueError)
    with pytest.raises(InfeasibleError, match="bytes short"):
        plan(**{**GOOD, "planner": "terapipe", "schedule": "auto", "stages": None, "memory_bytes": 1000})
    with pytest.raises(InfeasibleError):
        plan(**{**GOOD, "cluster": Cluster(num_devices=2, memory_bytes=1000)})


def test_the_bytes_that_are_named_are_enough():
    p = plan(**{**GOOD, "batch": 4})
    assert plan(**{**GOOD, "batch": 4, "memory_bytes": max(p.peak_memory_bytes)}) == p
    p = plan(**{**GOOD, "batch": 4, "memory_bytes": max(p.peak_memory_bytes) - 1})    # B are whole
    enough = max(p.peak_memory_bytes)
    with pytest.raises(InfeasibleError, match=f"rank {p.peak_memory_bytes.index(enough)} needs {enough} bytes.*: 1 bytes"):
        plan(**{**GOOD, "batch": 4, "memory_bytes": enough - 1})


def test_a_limit_is_kept_by_choosing_another_plan():
    request = {**GOOD, "batch": 8, "planner": "terapipe", "schedule": "gpipe", "costs": kernel_costs(MODEL)}
    free = plan(**request)
    tight = plan(**{**request, "schedule": "auto", "memory_bytes": max(free.peak_memory_bytes) - 1})
    assert max(tight.peak_memory_bytes) < max(free.peak_memory_bytes)


# ---- refusals ----

@pytest.mark.parametrize("change,word", [
    ({"slicing": [(2, [40, 40])]}, r"sum to 80: seq_len = 96"), ({"slicing": [(1, [96])]}, r"covers 1.*batch = 2"),
    ({"slicing": [(2, [96]), (1, [96])]}, r"covers 3.*batch = 2"), ({"slicing": 97}, "97 slices"), ({"slicing": 0}, "slicing is 0"),
    ({"slicing": [96]}, r"slicing\[0\]"), ({"slicing": [(2, [96, 0])]}, "slice 1 is 0"), ({"slicing": [(0, [96])]}, "is 0"),
    ({"slicing": []}, "covers 0"), ({"slicing": "96"}, "slicing"), ({"stages": 99}, "99.*8 blocks"), ({"stages": 0}, "stages"),
    ({"seq_len": 100_000}, "seq_len is 100000.*96"), ({"seq_len": 0}, "seq_len"), ({"batch": 0}, "batch"),
    ({"planner": "best"}, "best.*autopipe.*merak"), ({"planner": "autopipe", "chunks": 2, "schedule": "auto"}, "one stage a rank"),
    ({"schedule": "pipedream", "stages": 2}, "tie_weights=False"), ({"schedule": "fast"}, "fast.*gpipe"),
    ({"granularity": 7}, "granularity is 7"),
    ({"chunks": 2}, "chunks is 2"), ({"data_parallel": 3}, "data_parallel is 3, which does not divide"),
    ({"data_parallel": 2, "executable": True}, "one replica"), ({"data_parallel": 9, "batch": 9}, "8 devices"),
    ({"data_parallel": 2, "stages": 5}, "stages is 5 and data_parallel 2.*8 devices"), ({"tensor_parallel": 4}, "tensor_parallel"),
    ({"executable": "yes"}, "executable is 'yes'"), ({"time_limit_s": -1.0}, "time_limit_s"),
    ({"planner": "dapple", "schedule": "zb-v"}, "schedule is zb-v, with chunks: planner dapple plans one stage a rank"),
    ({"partition": [(0, 4), (5, 8)]}, r"partition\[1\]"), ({"partition": [(0, 4), (4, 7)]}, "ends at block 7"),
    ({"partition": [(0, 8)]}, "partition has 1"), ({"partition": [(0, 0), (0, 8)]}, r"partition\[0\]"),
    ({"memory_bytes": -5}, "memory_bytes"), ({"memory_bytes": float("nan")}, "memory_bytes"),
    ({"costs": CostModel.analytic(GPT2, CLUSTER)}, "n_embd = 768"), ({"stages": 9, "cluster": Cluster(2)}, "stages is 9"),
    ({"stages": 3, "cluster": Cluster(2)}, "2 devices"),
])
def test_bad_requests_are_refused_before_any_work(change, word, monkeypatch):
    monkeypatch.setattr(Judge, "judge", lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=word) as error:
        plan(**{**GOOD, **change})
    assert "would be right" in str(error.value) or "profile this model" in str(error.value)


@pytest.mark.parametrize(("change", "argument", "suggested"), [
    ({"granularity": 7}, "granularity", 6), ({"data_parallel": 3, "batch": 8}, "data_parallel", 2),
    ({"stages": 9}, "stages", 8), ({"data_parallel": 2, "stages": 5}, "stages", 4),
    ({"partition": [(0, 4), (4, 8)], "stages": 3}, "stages", 2)])
def test_what_a_message_says_would_be_right_is(change, argument, suggested):
    with pytest.raises(ValueError, match=rf"^{argument} is {change[argument]}.* {suggested} would be right$"):
        plan(**{**GOOD, **change})
    assert plan(**{**GOOD, **change, argument: suggested}).batch == {**GOOD, **change}["batch"]


def test_a_partition_may_be_an_array():
    rows = [(0, 3), (3, 8)]
    assert plan(**{**GOOD, "partition": np.array(rows)}) == plan(**{**GOOD, "partition": rows})


def test_wrong_types_are_refused():
    for change in ({"model": "gpt2"}, {"cluster": 4}, {"costs": 3.0}):
        with pytest.raises(TypeError, match=next(iter(change))):
            plan(**{**GOOD, **change})


def test_local_machines_may_run_more_ranks_than_cores():
    assert plan(**{**GOOD, "cluster": Cluster.local(1), "stages": 3}).ranks == 3


# ---- as a value ----

def test_a_saved_plan_is_the_plan(tmp_path):
    for change in ({}, {"slicing": [(1, [1, 1, 62, 32]), (1, [96])], "stages": 3}, {"planner": "terapipe", "batch": 3},
                   {"schedule": "interleaved", "chunks": 2}):
        p = plan(**{**GOOD, **change})
        path = tmp_path / "plan.json"
        p.save(path)
        q = Plan.load(path)
        assert q == p and hash(q) == hash(p) and q.digest == p.digest and q.program == p.program
        assert q.timeline().makespan_s == p.step_time_s == q.step_time_s and q.to_dict() == p.to_dict()
        assert q.explain() == p.explain() and repr(q) == repr(p)
        assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]


def test_plans_of_version_1_are_read(tmp_path):
    """Written before replicas, recomputation and swap: the same plan, the same digest."""
    p = plan(**GOOD)
    old = {**{k: v for k, v in p.to_dict().items() if k not in ("data_parallel", "search_log", "checksum")}, "version": 1}
    (tmp_path / "old.json").write_text(json.dumps(old))
    q = Plan.load(tmp_path / "old.json")
    assert q == p and q.data_parallel == 1 and q.search_log == [] and q.executable
    for change, word in (({"version": 0}, "version 0.*1 or 2"), ({"version": "2"}, "version"),
                         ({"data_parallel": 2, "batch": 3}, "does not divide"), ({"recompute": [True]}, "recompute has 1 entries"),
                         ({"swap": [float("inf")] * 8}, r"swap\[0\] is inf"),
                         ({"compared": [["x", float("nan")]]}, r"compared\[0\]"),
                         ({"cluster": {**p.cluster.to_dict(), "is_local": float("nan")}}, "is_local is nan")):
        (tmp_path / "bad.json").write_text(json.dumps({**p.to_dict(), **change}))
        with pytest.raises(ValueError, match=word):
            Plan.load(tmp_path / "bad.json")


def test_plans_differ_where_the_ranks_would():
    plans = [plan(**{**GOOD, **change}) for change in ({}, {"slicing": 2}, {"schedule": "1f1b", "batch": 4}, {"stages": 3},
                                                       {"batch": 4}, {"seq_len": 48})]
    assert len({p.digest for p in plans}) == len(set(plans)) == len(plans)
    faster = CostModel.analytic(MODEL, Cluster(num_devices=8, peak_flops=1e15))
    assert plan(**{**GOOD, "costs": faster}) == plans[0]        # predictions do not make another plan
    assert plans[0] != "a plan"


def test_plans_of_version_2_are_read_and_saved_anew(tmp_path):
    """Written before the checksum."""
    p = plan(**GOOD)
    old = {**{k: v for k, v in p.to_dict().items() if k != "checksum"}, "version": 2}
    (tmp_path / "old.json").write_text(json.dumps(old))
    q = Plan.load(tmp_path / "old.json")
    assert q == p and q.digest == p.digest == old["digest"] and q.to_dict() == p.to_dict()
    q.save(tmp_path / "new.json")
    assert Plan.load(tmp_path / "new.json").explain() == p.explain()


def test_a_prediction_that_was_altered_is_damage(tmp_path):
    path = tmp_path / "plan.json"
    data = plan(**GOOD, memory_bytes=1e9).to_dict()
    changes = {"step_time_s": data["step_time_s"] / 2, "lower_bound_s": data["step_time_s"] / 2, "planner": "auto",
               "peak_memory_bytes": [1] * data["ranks"], "memory_limit_bytes": 2e9, "bubbles": {},
               "granularity": 5, "planning_time_s": 0.0,
               "busy_s": data["busy_s"][::-1], "compared": [["gpipe", 1.0]], "search_log": ["best: this"],
               "slicing_bound_s": None, "durations": {**data["durations"], "F": [[1e-3]]},
               "cluster": {**data["cluster"], "memory_bytes": 1}}  # fmt: skip
    path.write_text(json.dumps(data, indent=4, sort_keys=True))       # formatted anew it is the same
    assert Plan.load(path).to_dict() == data
    for name, value in changes.items():
        assert value != data[name], name
        path.write_text(json.dumps({**data, name: value}))
        with pytest.raises(ValueError, match="plan.json is damaged: the plan's checksum is '[0-9a-f]{16}', but its content's is"):
            Plan.load(path)
    path.write_text(json.dumps({k: v for k, v in data.items() if k != "checksum"}))
    with pytest.raises(ValueError, match="the plan's checksum is None"):
        Plan.load(path)
    for version in (True, 3.0):
        path.write_text(json.dumps({**data, "version": version}))
        with pytest.raises(ValueError, match=f"has version {version}.*reads version 1 or 2 or 3"):
            Plan.load(path)


def test_foreign_broken_and_altered_files_are_named(tmp_path):
    good = tmp_path / "good.json"
    plan(**GOOD).save(good)
    text = good.read_text()
    data = json.loads(text)
    program = data["program"].replace("0F0.0", "0F1.0", 1)
    cases = {"half.json": b'{"format": "something else"', "foreign.json": b'{"format": "something else"}',
             "cut.json": text[: len(text) // 2].encode(), "array.json": b"[]", "noise.json": bytes(range(256)),
             "newer.json": text.replace('"version": 3', '"version": 4').encode(),
             "program.json": json.dumps({**data, "program": program}).encode(),
             "empty.json": json.dumps({**data, "program": ""}).encode(),
             "batch.json": json.dumps({**data, "batch": 3}).encode(),
             "stages.json": json.dumps({**data, "stages": [[0, 8]]}).encode(),
             "moved.json": json.dumps({**data, "stages": [[0, 4], [4, 8]]}).encode(),
             "lost.json": json.dumps({k: v for k, v in data.items() if k != "slicing"}).encode(),
             "durations.json": json.dumps({**data, "durations": {"F": [[1.0, 2.0, 3.0]]}}).encode()}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            Plan.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nowhere.json")


def test_explain_says_what_runs_where():
    p = plan(**{**GOOD, "planner": "terapipe"})
    text = p.explain()
    for word in (p.digest, "rank 0", "rank 1", "head", "embedding", "predicted step", "peak memory", "uniform on 2 ranks"):
        assert word in text, word
    assert p.digest in repr(p) and "<table" in p._repr_html_() and "<svg" in p._repr_html_()
    assert list(p.timeline().peak_memory_bytes) == p.peak_memory_bytes and "peak" in str(p.timeline())


def test_a_plan_of_many_ranks_fits_a_screen_and_the_odd_one_stands_out():
    model = GPTConfig(n_layer=95, n_head=2, n_embd=16, vocab_size=64, block_size=16)
    ends = [0, *range(3, 192, 2), 192]                         # the last stage is the head alone
    p = plan(model, Cluster(num_devices=96), 2, 16, planner="uniform", schedule="gpipe", stages=96,
                partition=list(itertools.pairwise(ends)))
    text = p.explain().splitlines()
    assert len(text) < 20 and any(line.startswith("    1 to 94 on ranks 1 to 94: 2 blocks each, ") for line in text)
    assert any(line.startswith("    95 on rank 95: head: ") for line in text)
    memory = next(line for line in text if "peak memory" in line)
    assert memory.count("rank") <= 8 and "ranks 1-94 " in memory and "ranks 1-94 " in p._repr_html_()
    shared = replace(p, peak_memory_bytes=[2**30 * (rank + 1) for rank in range(96)]).explain()
    assert "peak memory: 96.00 GiB on rank 95, the most, to 1.00 GiB on rank 0 (plan.peak_memory_bytes has all)" in shared
    times = {k: v * np.linspace(1.0, 2.0, 96)[:, None] for k, v in p.durations.items() if np.ndim(v) == 2}
    times["F"][50] *= 9
    text = replace(p, durations={**p.durations, **times}, search_log=["tried", "stopped"]).explain().splitlines()
    assert len(text) < 35 and any(line.startswith("    50 on rank 50: ") for line in text)
    assert text[-2:] == ["    tried", "    stopped"]


def test_what_rounding_leaves_is_no_cause_and_no_gap():
    p = plan(**GOOD)
    noisy = replace(p, bubbles={**dict.fromkeys(p.bubbles, 0.0), "warmup": p.step_time_s / 10, "cooldown": 1.04e-17})
    assert "(warmup " in noisy.explain() and "cooldown" not in noisy.explain()
    assert "idle: 0 % of" in replace(noisy, bubbles={"cooldown": 1.04e-17}).explain()
    assert "max-width:100%" in p._repr_html_()
    for factor, words in ((1 - 1e-15, "gap 0 %"), (1 + 1e-12, "gap 0 %"), (0.5, "gap 100 %"), (0.98, "gap 2 %")):
        other = replace(p, lower_bound_s=p.step_time_s * factor)
        assert words in repr(other) and words in other.explain(), factor


def test_slicings_print_in_the_papers_notation():
    assert format_slicing([(1, [120] * 4 + [64])] * 8) == "[(1, [120]*4+[64])] * 8"
    assert format_slicing([(2, [96])]) == "[(2, [96])]"
    assert format_slicing([(1, [50, 46]), (1, [96])]) == "[(1, [50, 46])] + [(1, [96])]"


def test_slicings_and_partitions_are_frozen_as_given():
    assert check_slicing([(np.int64(2), (50, 46))], 2, 96) == ((2, (50, 46)),)
    assert check_slicing(np.int64(2), 1, 9) == ((1, (5, 4)),)
    assert check_partition([[0, 3], [3, 8]], MODEL) == ((0, 3), (3, 8))


# ---- export ----

def words_of(flags):
    """{flag: value} as a shell would take them."""
    words = shlex.split(flags)
    return {word[2:]: next((w for w in words[i + 1:i + 2] if not w.startswith("--")), "") for i, word in enumerate(words)
            if word.startswith("--")}


def test_megatron_flags():
    p = plan(**{**GOOD, "schedule": "1f1b", "batch": 4})
    flags = words_of(p.to_megatron())
    assert flags["pipeline-model-parallel-layout"] == "Ett|tL" and flags["pipeline-model-parallel-size"] == "2"
    assert flags["global-batch-size"] == "4" and flags["micro-batch-size"] == "1" and flags["num-layers"] == "3"
    assert "recompute-granularity" not in flags and "no-bias-gelu-fusion" not in flags
    # Megatron's own: 0.1, 0.1, and 128, which makes the tokenizer's vocabulary ceil(tokens / 128) * 128
    assert flags["attention-dropout"] == flags["hidden-dropout"] == "0"
    assert flags["make-vocab-size-divisible-by"] == str(p.model.vocab_size)
    for change, word in (({"slicing": 2, "schedule": "1f1b"}, "token slices"), ({}, "gpipe"),
                         ({"schedule": "1f1b", "partition": [(0, 2), (2, 8)]}, "inside a layer"),
                         ({"schedule": "1f1b", "batch": 3, "slicing": [(1, [96]), (2, [96])]}, "one size")):
        with pytest.raises(ValueError, match=word):
            plan(**{**GOOD, **change}).to_megatron()


def test_megatron_runs_whole_sequences_of_seq1f1b_and_no_weight_gradients_that_wait():
    model = GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=32, block_size=96)
    request = {**GOOD, "model": model, "costs": None, "batch": 4, "slicing": 1, "partition": [(0, 5), (5, 10)]}
    flags = [plan(**{**request, "planner": "uniform", "schedule": name}).to_megatron() for name in ("1f1b", "seq1f1b")]
    assert flags[0] == flags[1]
    waits = plan(**{**request, "planner": "terapipe", "schedule": "1f1b"})
    assert "0I0,0W0" not in waits.program.to_csv()
    with pytest.raises(ValueError, match="Megatron has no gradients of weights that wait, as those of stage 0, micro-batch 0 do"):
        waits.to_megatron()
    request |= {"planner": "uniform", "partition": None}
    with pytest.raises(ValueError, match="interleaves on two ranks or more"):
        plan(**{**request, "stages": 1, "schedule": "interleaved", "chunks": 2}).to_megatron()
    with pytest.raises(ValueError, match="no schedule interleaved of one chunk: 1f1b or interleaved of two or more would"):
        plan(**{**request, "schedule": "interleaved", "chunks": 1}).to_megatron()


def test_megatron_layouts_are_uneven_and_interleaved():
    uneven = plan(**{**GOOD, "schedule": "1f1b", "partition": [(0, 1), (1, 3), (3, 7), (7, 8)], "stages": None})
    assert words_of(uneven.to_megatron())["pipeline-model-parallel-layout"] == "E|t|tt|L"
    model = GPTConfig(n_layer=6, n_head=2, n_embd=16, vocab_size=32, block_size=96, bias=False, tie_weights=False)
    chunks = plan(**{**GOOD, "model": model, "costs": None, "schedule": "interleaved", "chunks": 2, "batch": 4})
    flags = words_of(chunks.to_megatron())
    assert flags["pipeline-model-parallel-layout"] == "Ett|tt|t|tL" and flags["pipeline-model-parallel-size"] == "2"
    assert "untie-embeddings-and-output-weights" in flags and "disable-bias-linear" in flags
    assert "no-bias-gelu-fusion" in flags    # which Megatron refuses without biases
    twice = plan(**{**GOOD, "schedule": "1f1b", "batch": 4, "data_parallel": 2})         # replicas: the world size says it
    assert replace(twice, backend="cuda", dtype="bf16").to_megatron() == twice.to_megatron() + " --bf16"
    flags = words_of(twice.to_megatron())
    assert flags["global-batch-size"] == "4" and flags["pipeline-model-parallel-size"] == "2" and twice.num_devices == 4


def test_megatron_recomputes_whole_layers():
    p = plan(**{**GOOD, "schedule": "1f1b", "batch": 4})                                 # stages Ett and tL

    def flags(*blocks, **change):
        return words_of(replace(p, recompute=[i in blocks for i in range(8)], **change).to_megatron())

    full = flags(1, 2, 3, 4, 5, 6)
    assert (full["recompute-granularity"], full["recompute-method"], full["recompute-num-layers"]) == ("full", "uniform", "1")
    first = flags(3, 4, 5, 6)                                                            # one layer of each stage
    assert (first["recompute-method"], first["recompute-num-layers"]) == ("block", "1")
    for blocks, word in (((1, 2), r"\[1, 0\] of \[2, 1\]"), ((1, 5, 6), "layer 0"), ((7,), "head")):
        with pytest.raises(ValueError, match=word):
            flags(*blocks)
    with pytest.raises(ValueError, match="swap"):
        flags(swap=[0, 5, 0, 0, 0, 0, 0, 0])


def test_torch_csv():
    p = plan(**{**GOOD, "batch": 4, "schedule": "1f1b"})
    csv = p.to_torch_csv()
    assert csv.count("F") == csv.count("B") == 8 and not set("IW") & set(csv)
    again = Program.from_csv(csv)
    assert again.check() is None and again.split(p.durations, pending=0).lower(tied=p.model.tie_weights) == p.program
    waits = plan(**{**GOOD, "batch": 4, "planner": "terapipe", "schedule": "zb-h1", "slicing": 1}).to_torch_csv()
    assert waits.count("I") == waits.count("W") > 0 and waits.count("B") + waits.count("W") == 8
    assert Program.from_csv(waits).check() is None
    with pytest.raises(ValueError, match="slices"):
        plan(**{**GOOD, "slicing": 2}).to_torch_csv()
    with pytest.raises(ValueError, match=r"one size, not of \[1, 2\]"):
        plan(**{**GOOD, "batch": 3, "schedule": "1f1b", "slicing": [(1, [96]), (2, [96])]}).to_torch_csv()
    with pytest.raises(ValueError, match="no recomputation in a schedule.*h.0.attention"):
        plan(**{**GOOD, "schedule": "1f1b", "slicing": 1, "recompute": "full"}).to_torch_csv()


def test_a_dtype_alone_is_of_the_costs_backend():
    with pytest.raises(ValueError, match="dtype is 'banana': 'float32' would be right for backend 'cpu'"):
        plan(**GOOD, dtype="banana")
    with pytest.raises(TypeError, match="costs is int"):
        plan(**{**GOOD, "costs": 3}, backend="cpu")
    assert plan(**GOOD, dtype="float32") == plan(**GOOD)


def test_costs_that_do_not_add_up_and_batches_beyond_reason_are_refused():
    for batch, table, word in ((2, 1e300, "seconds of work"), (10**20, 1.0, "batch is 1000")):
        times = np.full((9, 9), table)
        with pytest.raises(ValueError, match=word):
            plan(**{**GOOD, "batch": batch, "costs": CostModel.from_table(times, times, granularity=12)})
    with pytest.raises(TypeError, match="fwd is complex"):
        CostModel.from_table(np.ones((3, 3), complex), np.ones((3, 3)))
    with pytest.raises(ValueError, match="memory_bytes is a whole number beyond"):
        plan(**GOOD, memory_bytes=10**400)


@pytest.mark.parametrize("key, value, words", [
    ("step_time_s", float("nan"), "step_time_s is nan"), ("step_time_s", None, "step_time_s is None"),
    ("lower_bound_s", -1.0, "lower_bound_s is -1"), ("planning_time_s", True, "planning_time_s is True"),
    ("granularity", 0, "granularity is 0"), ("granularity", "x", "granularity is 'x'"), ("planner", None, "planner is None"),
    ("peak_memory_bytes", [], "peak_memory_bytes has 0 entries"), ("busy_s", [1.0], "busy_s has 1 entries"),
    ("busy_s", [1.0, float("inf")], r"busy_s\[1\] is inf"), ("bubbles", {"warmup": float("nan")}, "bubbles"),
    ("peak_memory_bytes", [1, 2**63], r"peak_memory_bytes\[1\] is 9223372036854775808"),
    ("peak_memory_bytes", [1.5, 2], r"peak_memory_bytes\[0\] is 1.5"),
    ("durations", {}, "durations has no F"), ("durations", {"F": [[10**400]]}, r"durations\['F'\] is .*: seconds"),
    ("memory_limit_bytes", -1, "memory_limit_bytes is -1"),
    ("slicing_bound_s", float("inf"), "slicing_bound_s is inf")])  # fmt: skip
def test_a_plan_whose_predictions_are_no_numbers_is_not_loaded(tmp_path, key, value, words):
    data = plan(**GOOD).to_dict()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data, key: value}))
    with pytest.raises(ValueError, match=rf"plan.json is damaged: .*{words}"):
        Plan.load(path)
    if key == "durations":
        for phase, wrong in (("F", -1.0), ("W", 1e308), ("B", float("nan"))):
            path.write_text(json.dumps({**data, key: {**data[key], phase: [[wrong]]}}))
            with pytest.raises(ValueError, match=rf"durations\['{phase}'\] is negative or above 1e\+250"):
                Plan.load(path)
    for raw in (b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match="plan.json is not a plan"):
            Plan.load(path)


@pytest.mark.parametrize("work_s", [5e-324, 1e-308])
def test_work_that_is_hardly_more_than_nothing_is_planned_by_everybody(work_s):
    """In ticks of so little work messages were infinite, and ticks were of no seconds at all."""
    table = np.full((13, 13), work_s)
    costs = CostModel.from_table(table, table, granularity=8, latency_s=1e-3)
    for planner in PLANNERS[1:]:
        p = plan(**{**GOOD, "costs": costs, "planner": planner, "schedule": "1f1b"})
        assert 1e-3 < p.step_time_s < 1 and p.lower_bound_s <= p.step_time_s * (1 + 1e-12)


def test_messages_that_never_end_are_refused_before_any_work(tmp_path):
    """Otherwise their seconds were infinite, or a saved plan was called damaged."""
    costs = CostModel.from_table(np.ones((13, 13)), np.ones((13, 13)), granularity=8, byte_s=1e248)
    with pytest.raises(ValueError, match="a step's messages, one by one, take .* at most 1e.250"):
        plan(**{**GOOD, "costs": costs})
    far = replace(CLUSTER, devices_per_node=1, node_link_latency_s=1e-6, link_bandwidth_Bps=1e-300)
    pytest.raises(ValueError, plan, **{**GOOD, "cluster": far}).match("a step's messages")
    slow = plan(**{**GOOD, "cluster": replace(far, link_bandwidth_Bps=1e-230)})
    slow.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == slow and slow.step_time_s > 1e200
