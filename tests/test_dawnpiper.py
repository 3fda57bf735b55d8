"""DawnPiper: the exact planner against enumeration written here, the published search, nodes as a value and a file."""

import itertools
import json
import math

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import planners
from terapipe_c.planners import Nodes, compute_balanced, dawnpiper, dawnpiper_binary, memory_balanced, memory_weights

FLIGHTS = ("1f1b", "gpipe", "pipedream")
KEYS = ("fwd_s", "bwd_s", "recompute_s", "activation_bytes", "param_bytes", "optimizer_bytes")


def random_nodes(rng, n, kind="wild"):
    if kind == "real":
        nodes = {key: rng.uniform(0, 9, n) for key in KEYS}
    elif kind == "repeated":  # few kinds of node, as in a transformer
        parts = {key: rng.integers(0, 9, 3).astype(float) for key in KEYS}
        pick = rng.integers(0, 3, n)
        nodes = {key: value[pick] for key, value in parts.items()}
    elif kind == "proportional":  # recompute seconds per byte all equal: the knapsack is a subset sum
        nodes = {key: rng.integers(1, 20, n).astype(float) for key in KEYS}
        nodes["recompute_s"] = 0.5 * nodes["activation_bytes"]
    else:
        nodes = {key: rng.integers(0 if kind == "zeros" else 1, 20, n).astype(float) for key in KEYS}
    return nodes


KINDS = ("wild", "zeros", "repeated", "real", "proportional")


def copies_of(x, stages, micro, schedule):
    return {"1f1b": min(micro, stages - x), "gpipe": micro, "pipedream": stages - x}[schedule]


def stage_costs(nodes, x, a, e, stages, memory, micro, schedule="1f1b", swap=0.0, mode="physical", whole=True):
    """Least time of one stage: every recompute set, swap in any part (whole False: the linear relaxation, by its own walk)."""
    part = {key: nodes[key][a:e] for key in KEYS}
    copies = copies_of(x, stages, micro, schedule)
    weights, state = part["param_bytes"].sum(), part["optimizer_bytes"].sum()
    static = copies * (weights + state) if mode == "paper" else \
        (copies + 1 if schedule == "pipedream" else 2) * weights + state
    static += nodes["working_bytes"][a:e].max() if "working_bytes" in nodes else 0.0
    time = part["fwd_s"].sum() + part["bwd_s"].sum()
    sizes, seconds, tiny = part["activation_bytes"], part["recompute_s"], 1e-11 * (1 + memory)
    if static > memory + tiny:
        return math.inf
    if whole:
        sets = (np.arange(1 << (e - a))[:, None] >> np.arange(e - a)) & 1
        rest = static + copies * (sizes.sum() - sets @ sizes) - memory  # bytes too many, of all copies
        times = time + sets @ seconds
        if swap == 0.0:
            return times[rest <= tiny].min()
        return np.maximum(times, np.maximum(rest, 0.0) / copies / swap).min()
    need, saved, spent = sizes.sum() + (static - memory) / copies, 0.0, 0.0
    rate = np.where(sizes > 0, seconds / np.where(sizes > 0, sizes, 1), np.inf)
    for k in np.argsort(rate, kind="stable"):
        missing = need - saved - swap * (time + spent)
        if missing <= tiny or sizes[k] == 0:
            break
        share = min(1.0, missing / (sizes[k] + swap * seconds[k]))
        saved, spent = saved + share * sizes[k], spent + share * seconds[k]
    return time + spent


def best_period(nodes, stages, memory, micro, link=None, **more):
    """D_x(j) = min over i of max(D_{x-1}(i), W_x(i, j)) (PLANNERS.md 3.3): no monotonicity is assumed."""
    n = len(nodes["fwd_s"])
    best = [0.0] + [math.inf] * n
    for x in range(stages):
        now = [math.inf] * (n + 1)
        for j in range(x + 1, n + 1):
            for i in range(x, j):
                cut = nodes["cut_bytes"][i - 1] / link if link and i else 0.0
                bound = max(best[i], cut)
                if bound < now[j]:
                    now[j] = min(now[j], max(bound, stage_costs(nodes, x, i, j, stages, memory, micro, **more)))
        best = now
    return best[n]


def check_plan(nodes, got, stages, memory, micro, schedule, swap, mode="physical"):
    """The plan is what it says: its stages' times and peaks follow from its choices."""
    assert len(got.boundaries) == stages + 1 and got.boundaries[0] == 0 and got.boundaries[-1] == len(nodes["fwd_s"])
    assert (got.swap_bytes[got.recompute] == 0).all() and (got.swap_bytes <= nodes["activation_bytes"] * (1 + 1e-12)).all()
    for x, (a, e) in enumerate(got.stages):
        assert e > a
        copies = copies_of(x, stages, micro, schedule)
        weights, state = nodes["param_bytes"][a:e].sum(), nodes["optimizer_bytes"][a:e].sum()
        static = copies * (weights + state) if mode == "paper" else \
            (copies + 1 if schedule == "pipedream" else 2) * weights + state
        static += nodes["working_bytes"][a:e].max() if "working_bytes" in nodes else 0.0
        kept = (nodes["activation_bytes"] * ~got.recompute - got.swap_bytes)[a:e].sum()
        assert math.isclose(got.peak_memory_bytes[x], static + copies * kept, rel_tol=1e-9, abs_tol=1e-9)
        time = (nodes["fwd_s"] + nodes["bwd_s"] + nodes["recompute_s"] * got.recompute)[a:e].sum()
        assert got.stage_time_s[x] >= time - 1e-9
        if swap:
            assert got.stage_time_s[x] >= got.swap_bytes[a:e].sum() / swap * (1 - 1e-9) - 1e-9
    assert (got.peak_memory_bytes <= memory).all()
    assert math.isclose(got.period_s, max(got.stage_time_s.max(), got.link_time_s.max()), rel_tol=1e-12)


def draw(rng, i, most_nodes):
    n, stages = int(rng.integers(1, most_nodes + 1)), int(rng.integers(1, 5))
    stages, micro = min(stages, n), int(rng.integers(1, 7))
    nodes = random_nodes(rng, n, KINDS[i % len(KINDS)])
    static, kept = 2 * nodes["param_bytes"].sum() + nodes["optimizer_bytes"].sum(), nodes["activation_bytes"].sum()
    memory = float(round(rng.uniform(1, 2.5) * static / stages + rng.uniform(0, 1.5) * kept * min(micro, stages) / stages)) + 1
    swap = float(rng.choice([0.0, 0.0, 0.1, 1.0, 3.0]))
    return nodes, stages, memory, micro, FLIGHTS[i % 3], swap


def test_the_exact_planner_equals_enumeration():
    rng, feasible, active = np.random.default_rng(1), 0, 0
    for i in range(2400):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 7)
        mode = "paper" if i % 7 == 0 else "physical"
        if i % 4 == 0:
            nodes["working_bytes"] = rng.integers(0, 30, len(nodes["fwd_s"])).astype(float)
        want = best_period(nodes, stages, memory, micro, schedule=schedule, swap=swap, mode=mode)
        try:
            got = dawnpiper(nodes, stages, memory, micro, schedule, swap, mode=mode)
        except tp.InfeasibleError:
            assert math.isinf(want), (i, want)
            continue
        assert got.optimal and math.isclose(got.period_s, want, rel_tol=1e-9, abs_tol=1e-12), (i, got, want)
        assert got.relaxed_s <= got.lower_bound_s <= want * (1 + 1e-12) <= got.period_s * (1 + 1e-9)
        check_plan(nodes, got, stages, memory, micro, schedule, swap, mode)
        feasible += 1
        active += bool(got.recompute.any() or got.swap_bytes.any())
    print(f"2400 of 2400 equal enumeration, {feasible} feasible, memory active in {active}")
    assert feasible > 1000 and active > 400


def test_the_relaxation_equals_its_own_dynamic_programme():
    """Probe = DP for the fractional form, and it is never above the exact optimum."""
    rng, compared = np.random.default_rng(2), 0
    for i in range(1500):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 9)
        want = best_period(nodes, stages, memory, micro, schedule=schedule, swap=swap, whole=False)
        if math.isinf(want):
            continue
        got = dawnpiper(nodes, stages, memory, micro, schedule, swap)
        assert math.isclose(got.relaxed_s, want, rel_tol=1e-9, abs_tol=1e-12), (i, got.relaxed_s, want)
        assert got.relaxed_s <= got.period_s
        compared += 1
    assert compared > 500


def test_cuts_that_cost_time_equal_enumeration():
    rng, feasible = np.random.default_rng(3), 0
    for i in range(800):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 7)
        nodes["cut_bytes"] = rng.integers(0, 60, len(nodes["fwd_s"])).astype(float)
        link = float(rng.choice([0.5, 1.0, 4.0]))
        want = best_period(nodes, stages, memory, micro, schedule=schedule, swap=swap, link=link)
        try:
            got = dawnpiper(nodes, stages, memory, micro, schedule, swap, link_bandwidth_Bps=link)
        except tp.InfeasibleError:
            assert math.isinf(want)
            continue
        assert got.optimal and math.isclose(got.period_s, want, rel_tol=1e-9, abs_tol=1e-12), (i, got, want)
        cuts = [nodes["cut_bytes"][b - 1] / link for b in got.boundaries[1:-1]]
        assert np.allclose(got.link_time_s, [*cuts, 0.0])
        feasible += 1
    assert feasible > 300


def test_a_stage_never_gets_cheaper_by_a_node():
    """What the probe rests on (dawnpiper.h, 1): the exact W, not only the relaxed one, is monotone under inclusion."""
    rng = np.random.default_rng(4)
    for i in range(1500):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 8)
        n, x = len(nodes["fwd_s"]), int(rng.integers(stages))
        a = int(rng.integers(n))
        e = int(rng.integers(a, n)) + 1
        more = dict(schedule=schedule, swap=swap)
        inner = stage_costs(nodes, x, a, e, stages, memory, micro, **more)
        for b, f in ((max(a - 1, 0), e), (a, min(e + 1, n))):
            assert inner <= stage_costs(nodes, x, b, f, stages, memory, micro, **more) + 1e-9


def test_a_given_partition_gets_its_best_choice():
    rng, feasible = np.random.default_rng(5), 0
    for i in range(600):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 10)
        n = len(nodes["fwd_s"])
        cuts = [0, *sorted(int(c) for c in rng.choice(np.arange(1, n), stages - 1, replace=False)), n]
        for optimise in (True, False):
            want = [stage_costs(nodes, x, a, e, stages, memory, micro, schedule, swap)
                    for x, (a, e) in enumerate(itertools.pairwise(cuts))]  # fmt: skip
            if not optimise:
                plain = [nodes["fwd_s"][a:e].sum() + nodes["bwd_s"][a:e].sum() for a, e in itertools.pairwise(cuts)]
                kept = [stage_costs({**nodes, "recompute_s": np.full(n, 1e6)}, x, a, e, stages, memory, micro, schedule)
                        for x, (a, e) in enumerate(itertools.pairwise(cuts))]  # fmt: skip
                needs = any(k > p + 1e5 for k, p in zip(kept, plain, strict=True))
                want = [math.inf] if needs else plain
            try:
                got = dawnpiper(nodes, stages, memory, micro, schedule, swap, boundaries=cuts, optimise_memory=optimise)
            except tp.InfeasibleError:
                assert math.isinf(max(want)), i
                continue
            assert got.boundaries == cuts and np.allclose(got.stage_time_s, want, rtol=1e-9, atol=1e-12), i
            feasible += 1
    assert feasible > 300


def test_larger_instances_are_proven_and_the_bounds_hold():
    rng = np.random.default_rng(6)
    for n, stages, memory in ((200, 4, 2.2e9), (500, 8, 2.6e9), (1000, 8, 5e9), (1000, 16, 3e9)):
        nodes = {"fwd_s": rng.uniform(1e-4, 5e-4, n), "activation_bytes": rng.uniform(1e6, 4e7, n),
                 "param_bytes": rng.uniform(0, 8e6, n)}  # fmt: skip
        nodes |= {"bwd_s": 2 * nodes["fwd_s"], "recompute_s": nodes["fwd_s"].copy(), "optimizer_bytes": 2 * nodes["param_bytes"]}
        for swap in (0.0, 12e9):
            try:
                got = dawnpiper(nodes, stages, memory, 2 * stages, swap_bandwidth_Bps=swap)
            except tp.InfeasibleError:
                continue
            assert got.optimal and got.recompute.any() and (got.swap_bytes.any() or not swap)
            check_plan(nodes, got, stages, memory, 2 * stages, "1f1b", swap)
            binary = dawnpiper_binary(nodes, stages, memory, 2 * stages, swap_bandwidth_Bps=swap, work_limit=3000)
            assert binary.period_s >= got.period_s * (1 - 1e-9)


def test_a_work_limit_leaves_a_bound_that_holds():
    rng, stopped = np.random.default_rng(7), 0
    for _ in range(150):
        n = 12
        nodes = random_nodes(rng, n, "proportional")
        nodes["activation_bytes"] = rng.uniform(1, 20, n)
        nodes["recompute_s"] = 0.5 * nodes["activation_bytes"]
        memory = float(rng.uniform(150, 300))
        try:
            got = dawnpiper(nodes, 2, memory, 4, work_limit=8)
        except tp.InfeasibleError:
            continue
        full = dawnpiper(nodes, 2, memory, 4)
        assert full.optimal and got.lower_bound_s <= full.period_s * (1 + 1e-12) <= got.period_s * (1 + 1e-9)
        check_plan(nodes, got, 2, memory, 4, "1f1b", 0.0)
        stopped += not got.optimal
    assert stopped > 10


def test_the_step_is_the_simulated_one():
    rng = np.random.default_rng(8)
    for i in range(60):
        nodes, stages, _, micro, schedule, swap = draw(rng, i, 12)
        nodes["cut_bytes"] = rng.integers(0, 9, len(nodes["fwd_s"])).astype(float)
        got = dawnpiper(nodes, stages, 1e9, micro, schedule, swap, link_bandwidth_Bps=2.0)
        if schedule == "pipedream":
            assert got.step_time_s == got.period_s == got.step_lower_bound_s / (1 - 1e-12) or got.step_time_s == got.period_s
            continue
        forward = np.array([nodes["fwd_s"][a:e].sum() for a, e in got.stages])
        build = tp.schedules.gpipe if schedule == "gpipe" else tp.schedules.one_f_one_b
        times = {"F": np.repeat(forward[:, None], micro, 1), "B": np.repeat((got.stage_time_s - forward)[:, None], micro, 1)}
        line = build(stages, micro).simulate(times, comm_s=got.link_time_s)
        assert math.isclose(line.makespan_s, got.step_time_s, rel_tol=1e-12)
        assert got.step_lower_bound_s <= got.step_time_s * (1 + 1e-12)


def test_more_memory_more_bandwidth_and_scaled_costs():
    rng = np.random.default_rng(9)
    for i in range(120):
        nodes, stages, _, micro, schedule, swap = draw(rng, i, 12)
        periods = []
        for memory in (60.0, 90.0, 140.0, 300.0, 3000.0):
            try:
                periods.append(dawnpiper(nodes, stages, memory, micro, schedule, swap).period_s)
            except tp.InfeasibleError:
                periods.append(math.inf)
        assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(periods)), periods
        if math.isinf(periods[2]):
            continue
        faster = dawnpiper(nodes, stages, 140.0, micro, schedule, swap + 1.0).period_s
        assert faster <= periods[2] * (1 + 1e-12)
        times = {key: nodes[key] * (4.0 if key.endswith("_s") else 1.0) for key in KEYS}
        scaled = dawnpiper(times, stages, 140.0, micro, schedule, swap / 4.0)
        assert math.isclose(scaled.period_s, 4.0 * periods[2], rel_tol=1e-9)
        bytes_ = {key: nodes[key] * (8.0 if key.endswith("_bytes") else 1.0) for key in KEYS}
        assert math.isclose(dawnpiper(bytes_, stages, 8 * 140.0, micro, schedule, 8 * swap).period_s, periods[2], rel_tol=1e-9)
        fine = {key: np.repeat(nodes[key] / 2, 2) for key in KEYS}  # every node in two halves
        assert dawnpiper(fine, stages, 140.0, micro, schedule, swap).period_s <= periods[2] * (1 + 1e-9)


def test_the_same_question_has_the_same_answer():
    nodes = random_nodes(np.random.default_rng(10), 60, "real")
    first, again = (dawnpiper(nodes, 4, 300.0, 4, swap_bandwidth_Bps=0.2) for _ in range(2))
    assert first == again and first.states == again.states


# ---- the published search ------------------------------------------------------------------------------------------------


def test_the_weights_of_the_paper():
    assert np.allclose(memory_weights(4), [1, 4 / 3, 2, 4]) and math.isclose(memory_weights(4).sum(), 25 / 3)
    assert np.allclose(memory_weights(4, 2, "1f1b"), [1, 1, 1, 2]) and np.allclose(memory_weights(3, 5, "gpipe"), 1)
    nodes = {key: np.ones(25) for key in KEYS}
    assert memory_balanced(nodes, 4) == [0, 3, 7, 13, 25]  # shares 3, 4, 6, 12 of 25 equal nodes
    assert compute_balanced(nodes, 5) == [0, 5, 10, 15, 20, 25]
    heavy = {**nodes, "activation_bytes": np.array([100.0] + [1.0] * 24)}
    assert memory_balanced(heavy, 4)[1] == 1


def test_the_published_search_is_never_better_and_says_when_it_fails():
    rng, feasible, missed, worse, largest = np.random.default_rng(11), 0, 0, 0, 0.0
    for i in range(1200):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 12)
        try:
            best = dawnpiper(nodes, stages, memory, micro, schedule, swap)
        except tp.InfeasibleError:
            with pytest.raises(tp.InfeasibleError):
                dawnpiper_binary(nodes, stages, memory, micro, schedule, swap)
            continue
        feasible += 1
        try:
            got = dawnpiper_binary(nodes, stages, memory, micro, schedule, swap)
        except tp.InfeasibleError as error:
            assert "BiPar found no partition" in str(error)
            missed += 1
            continue
        check_plan(nodes, got, stages, memory, micro, schedule, swap)
        assert got.period_s >= best.period_s * (1 - 1e-9) and got.lower_bound_s <= best.period_s * (1 + 1e-12), i
        if swap:  # Capuchin moves whole tensors
            assert ((got.swap_bytes == 0) | (got.swap_bytes == nodes["activation_bytes"])).all()
        worse += got.period_s > best.period_s * (1 + 1e-9)
        largest = max(largest, got.period_s / best.period_s - 1 if best.period_s else 0.0)
    print(f"{feasible} feasible: the published search finds none in {missed}, a longer period in {worse}, at most {largest:.0%}")
    assert missed > 0 and worse > 0


def test_without_pressure_the_published_search_balances_compute():
    nodes = {key: np.ones(16) for key in KEYS}
    got = dawnpiper_binary(nodes, 4, 1e6, 4)
    assert got.boundaries == [0, 4, 8, 12, 16] and not got.recompute.any() and got.optimal


def test_capuchin_swaps_what_the_bus_hides_first():
    """One stage, two copies short of room: the earliest tensors have the most free time and leave first, for nothing."""
    n = 8
    nodes = {key: np.ones(n) for key in KEYS} | {"param_bytes": np.zeros(n), "optimizer_bytes": np.zeros(n)}
    got = dawnpiper_binary(nodes, 1, 6.0, 1, "1f1b", 1.0)
    assert got.swap_bytes.tolist() == [1, 1, 0, 0, 0, 0, 0, 0] and got.stage_time_s[0] == 16.0
    slow = dawnpiper_binary(nodes, 1, 6.0, 1, "1f1b", 0.01)  # 100 s a tensor: recompute instead
    assert slow.recompute.sum() == 2 and slow.stage_time_s[0] == 18.0
    assert dawnpiper(nodes, 1, 6.0, 1, "1f1b", 0.01).stage_time_s[0] == 18.0


def test_cuts_move_to_where_one_tensor_crosses():
    n = 12
    nodes = {key: np.ones(n) for key in KEYS} | {"cut_bytes": np.ones(n), "cut_tensors": np.full(n, 2.0)}
    nodes["activation_bytes"] = np.linspace(1, 60, n)  # memory balance is far from compute balance
    nodes["cut_tensors"][6] = 1.0
    got = dawnpiper_binary(nodes, 2, 700.0, 2, link_bandwidth_Bps=1.0)
    assert got.boundaries in ([0, 7, 12], [0, 6, 12])
    nodes["cut_bytes"][5] = 1e6  # slower than any stage: dropped
    assert dawnpiper_binary(nodes, 2, 700.0, 2, link_bandwidth_Bps=1.0).boundaries != [0, 6, 12]


# ---- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_bad_cost_is_named(key, value):
    nodes = random_nodes(np.random.default_rng(0), 5)
    nodes[key][3] = value
    with pytest.raises(ValueError, match=f"{key} of node 3"):
        dawnpiper(nodes, 2, 1e3)


def test_bad_requests_are_refused():
    nodes = random_nodes(np.random.default_rng(0), 5)
    for message, change in {
        "stages is 6": dict(stages=6), "stages is 0": dict(stages=0), "stages is 'a'": dict(stages="a"),
        "micro_batches is 0": dict(micro_batches=0), "memory_bytes is -1": dict(memory_bytes=-1.0),
        "memory_bytes is nan": dict(memory_bytes=math.nan), "schedule is 'x'": dict(schedule="x"), "mode is 'x'": dict(mode="x"),
        "swap_bandwidth_Bps is -1": dict(swap_bandwidth_Bps=-1.0), "swap_bandwidth_Bps is inf": dict(swap_bandwidth_Bps=math.inf),
        "no cut_bytes": dict(link_bandwidth_Bps=1.0), "link_bandwidth_Bps is 0": dict(link_bandwidth_Bps=0.0),
        "boundaries has 2": dict(boundaries=[0, 5]), "boundaries go from 1": dict(boundaries=[1, 2, 5]),
        "holds at least one node": dict(boundaries=[0, 0, 5]), "work_limit is 0": dict(work_limit=0),
    }.items():  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            dawnpiper(nodes, **{"stages": 2, "memory_bytes": 1e4, **change})
    with pytest.raises(ValueError, match="lacks 'bwd_s'"):
        dawnpiper({key: value for key, value in nodes.items() if key != "bwd_s"}, 2, 1e3)
    with pytest.raises(ValueError, match="nodes has 'typo'"):
        dawnpiper({**nodes, "typo": nodes["fwd_s"]}, 2, 1e3)
    with pytest.raises(ValueError, match="bwd_s has 4 values"):
        dawnpiper({**nodes, "bwd_s": nodes["bwd_s"][:4]}, 2, 1e3)
    with pytest.raises(ValueError, match="nodes is empty"):
        dawnpiper({key: np.zeros(0) for key in KEYS}, 1, 1e3)
    with pytest.raises(TypeError, match="nodes is list"):
        dawnpiper([], 1, 1e3)


def test_what_would_fit_does_fit():
    rng = np.random.default_rng(12)
    for i in range(150):
        nodes, stages, _, micro, schedule, swap = draw(rng, i, 9)
        for optimise in (True, False):
            with pytest.raises(tp.InfeasibleError, match="would do") as refusal:
                dawnpiper({**nodes, "param_bytes": nodes["param_bytes"] + 1}, stages, 0.5, micro, schedule, swap,
                          optimise_memory=optimise)  # fmt: skip
            enough = float(str(refusal.value).split("memory_bytes = ")[1].split(" would do")[0])
            short = float(str(refusal.value).split("bytes, ")[1].split(" short")[0])
            assert enough == math.ceil(round(short + 0.5, 9))
            more = {**nodes, "param_bytes": nodes["param_bytes"] + 1}
            dawnpiper(more, stages, enough, micro, schedule, swap, optimise_memory=optimise)
            with pytest.raises(tp.InfeasibleError):
                dawnpiper(more, stages, (short + 0.5) * (1 - 1e-6), micro, schedule, swap, optimise_memory=optimise)
    named = Nodes.of({**nodes, "names": [f"layer{k}" for k in range(len(nodes["fwd_s"]))]})
    with pytest.raises(tp.InfeasibleError, match="layer0"):
        dawnpiper(named, 1, 0.5)


# ---- nodes ---------------------------------------------------------------------------------------------------------------


def diamond(rng=None):
    nodes = random_nodes(rng or np.random.default_rng(1), 5) | {"names": ["join", "right", "left", "split", "end"]}
    nodes["fwd_s"] = np.array([1.0, 5.0, 2.0, 1.0, 1.0])
    edges = [("split", "left", 3.0), ("split", "right", 3.0), ("left", "join", 1.0), ("right", "join", 2.0), ("join", "end", 4.0),
             ("split", "end", 3.0)]  # fmt: skip
    return nodes, edges


def test_a_graph_is_ordered_and_its_cuts_counted():
    nodes, edges = diamond()
    made = Nodes.from_graph(nodes, edges)
    assert made.names == ("split", "right", "left", "join", "end")  # equal depth and start: as given
    assert made.cut_bytes.tolist() == [3, 5, 6, 7, 0] and made.cut_tensors.tolist() == [1, 2, 3, 2, 0]
    assert made["fwd_s"].tolist() == [1, 5, 2, 1, 1]
    late = Nodes.from_graph({**nodes, "fwd_s": np.array([1.0, 5.0, 2.0, 1.0, 1.0])},
                            [*edges, ("right", "end")])  # fmt: skip
    assert late.edges[-1] == (3, 4, 4.0) or (1, 4, float(nodes["activation_bytes"][1])) in late.edges


def test_random_graphs_are_ordered_and_cycles_named():
    rng = np.random.default_rng(13)
    for _ in range(300):
        n = int(rng.integers(2, 15))
        place = rng.permutation(n)
        nodes = random_nodes(rng, n)
        pairs = {(int(a), int(b)) for a, b in rng.integers(0, n, (2 * n, 2)) if place[a] < place[b]}
        sizes = {a: float(rng.integers(1, 9)) for a in range(n)}
        nodes["names"] = [str(k) for k in range(n)]
        made = Nodes.from_graph(nodes, [(a, b, sizes[a]) for a, b in sorted(pairs)])
        at = {int(name): k for k, name in enumerate(made.names)}
        depth = {}
        for k in sorted(range(n), key=lambda k: place[k]):
            depth[k] = max([depth[a] + 1 for a, b in pairs if b == k], default=0)
        assert all(at[a] < at[b] for a, b in pairs)
        assert [depth[int(name)] for name in made.names] == sorted(depth.values())
        for p in range(n):
            crossing = {a for a, b in pairs if at[a] <= p < at[b]}
            assert made.cut_bytes[p] == sum(sizes[a] for a in crossing) and made.cut_tensors[p] == len(crossing)
        if pairs:
            a, b = sorted(pairs)[0]
            with pytest.raises(ValueError, match="cycle") as refusal:
                Nodes.from_graph(nodes, [*pairs, (b, a)])
            cycle = [int(word.split(" ")[0]) for word in str(refusal.value).split(": ")[1].split(" -> ")]
            assert cycle[0] == cycle[-1] and all(step in {*pairs, (b, a)} for step in itertools.pairwise(cycle))


def test_nodes_are_saved_and_loaded(tmp_path):
    nodes, edges = diamond()
    made = Nodes.from_graph({**nodes, "blocks": [0, 1, 1, 2, 3], "working_bytes": np.ones(5)}, edges)
    made.save(tmp_path / "nodes.json")
    again = planners.load_nodes(tmp_path / "nodes.json")
    assert again == made and hash(again) == hash(made) and again.blocks == made.blocks
    assert dawnpiper(again, 2, 1e4) == dawnpiper(made, 2, 1e4)
    assert dawnpiper(dict(made), 2, 1e4) == dawnpiper(made, 2, 1e4)
    plain = Nodes.of({key: nodes[key] for key in KEYS})
    plain.save(tmp_path / "plain.json")
    assert planners.load_nodes(tmp_path / "plain.json") == plain
    assert "5, forward" in repr(made) and "<table>" in made._repr_html_()


def test_a_broken_file_is_named(tmp_path):
    nodes, edges = diamond()
    good = Nodes.from_graph(nodes, edges).to_dict()

    def refuse(message, change=None, text=None):
        data = json.loads(json.dumps(good))
        if change:
            change(data)
        path = tmp_path / "bad.json"
        path.write_text(text if text is not None else json.dumps(data, indent=1))
        with pytest.raises(ValueError, match=message) as refusal:
            planners.load_nodes(path)
        assert "bad.json" in str(refusal.value)

    refuse("line 2", text='{"format":\n oops}')
    refuse("format", text="[]")
    refuse("no list of nodes", lambda d: d.update(nodes=[]))
    refuse(r"node 1 \(right\), line \d+ lacks 'bwd_s'", lambda d: d["nodes"][1].pop("bwd_s"))
    refuse(r"activation_bytes of node 2 \(left\), line \d+ is -3", lambda d: d["nodes"][2].update(activation_bytes=-3))
    refuse(r"fwd_s of node 2 \(left\), line \d+ is 'x'", lambda d: d["nodes"][2].update(fwd_s="x"))
    refuse("'flops', which means nothing", lambda d: d["nodes"][0].update(flops=1))
    refuse("node 0 .* lacks 'working_bytes'", lambda d: d["nodes"][3].update(working_bytes=1))
    refuse("names node 'nobody'", lambda d: d["edges"].append(["split", "nobody"]))
    refuse("cycle: .*join", lambda d: d["edges"].append(["end", "join"]))
    refuse("has -1 bytes", lambda d: d["edges"].append(["split", "join", -1]))
    refuse(r"edge \d+ is \['split'\]", lambda d: d["edges"].append(["split"]))
    refuse("two nodes are named 'left'", lambda d: d["nodes"][1].update(name="left"))


# ---- our own model, and the largest micro-batch ---------------------------------------------------------------------------


def test_a_gpt_at_tensor_granularity():
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=8, vocab_size=50, block_size=16)
    cluster = tp.Cluster(1)
    costs = tp.CostModel.analytic(model, cluster)
    nodes = model.nodes(costs, micro_batch=2, seq_len=12)
    assert len(nodes) == 1 + 10 * 3 + 2 and nodes.names[:3] == ("embedding", "h.0.attention.ln_1", "h.0.attention.qkv")
    for number, block in enumerate(model.blocks):
        inside = np.array(nodes.blocks) == number
        for key, phase in (("fwd_s", "fwd"), ("bwd_s", "bwd")):
            assert math.isclose(nodes[key][inside].sum(), costs.block_seconds(block.kind, phase, 12, 0, 2))
        own = model.block_params(block.kind) + (block.kind == "head") * model.vocab_size * model.n_embd  # a tied head's copy
        assert nodes.param_bytes[inside].sum() == 4 * own and nodes.optimizer_bytes[inside].sum() == 8 * own
    rows, width = 2 * 12, 8
    # csrc/stage/layout.c: inputs of 3 x 2 blocks and the head, statistics, qkv, o, lse, h, g, the head's dx and loss
    kept = 4 * rows * (7 * width + 7 * 2 + 3 * (3 * width + width + 2 + 8 * width) + width + 2)
    assert nodes.activation_bytes.sum() == kept
    stream = 4 * rows * width
    assert nodes.cut_bytes[0] == stream and nodes.cut_tensors[0] == 1  # behind the embedding
    assert nodes.cut_bytes[5] == nodes.cut_bytes[10] == stream  # behind a block
    assert nodes.cut_bytes[2] == 4 * stream and nodes.cut_tensors[2] == 2  # qkv, and the stream past it
    assert nodes.recompute_s[5] == nodes.fwd_s[5] + nodes.fwd_s[4]  # a residual needs its projection again, which keeps nothing
    assert model.nodes() == model.nodes(tp.CostModel.analytic(model, cluster))
    assert np.allclose(model.nodes(costs, micro_batch=4).activation_bytes, 4 * model.nodes(costs).activation_bytes)
    for change in (dict(seq_len=17), dict(micro_batch=0), dict(value_bytes=0), dict(optimizer_bytes_per_param=-1)):
        with pytest.raises(ValueError):
            model.nodes(costs, **change)


def largest(fits, most=10_000):
    return max((b for b in range(1, most) if fits(b)), default=0)


def test_the_largest_micro_batch_is_the_largest():
    rng = np.random.default_rng(14)
    for i in range(40):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 8)
        planner = ("dawnpiper", "uniform", "compute", "memory", "dawnpiper_binary")[i % 5]
        request = dict(planner=planner, most=60)
        try:
            got = tp.max_batch(nodes, stages, 3 * memory, micro, schedule, swap, **request)
        except tp.InfeasibleError:
            continue
        assert int(got) == got.batch <= 60 and got.samples_per_s > 0 and got.planner == planner
        if planner == "dawnpiper":
            scale = Nodes.of({**nodes, "working_bytes": nodes["activation_bytes"]}).scaled

            def fits(batch, scale=scale, memory=memory, micro=micro, stages=stages, schedule=schedule, swap=swap):
                try:
                    return dawnpiper(scale(batch), stages, 3 * memory, micro, schedule, swap).peak_memory_bytes.max() <= 3 * memory
                except tp.InfeasibleError:
                    return False

            assert got.batch == largest(fits, 61)
            assert got.plan.period_s == dawnpiper(scale(got.batch), stages, 3 * memory, micro, schedule, swap).period_s


def test_more_memory_fits_more_and_optimising_fits_most():
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=64, vocab_size=256, block_size=64)
    need = 16 * model.num_params
    batches = {}
    for planner in ("dawnpiper", "dawnpiper_binary", "compute", "memory", "uniform"):
        sizes = [tp.max_batch(model, 3, need * k, 6, planner=planner).batch for k in (1.0, 1.5, 2.0, 4.0)]
        assert sizes == sorted(sizes) and sizes[-1] > sizes[0], (planner, sizes)
        batches[planner] = sizes[1]
    assert batches["dawnpiper"] == max(batches.values()) > batches["compute"]
    plain = tp.max_batch(model, 3, 1.5 * need, 6, optimise_memory=False).batch
    assert max(batches["compute"], batches["uniform"]) <= plain <= batches["dawnpiper"]
    assert tp.max_batch(model, 3, 1.5 * need, 6, planner="compute", optimise_memory=True).batch > batches["compute"]
    assert "MaxBatch(" in repr(tp.max_batch(model, 3, need, 6))
    own = tp.max_batch(model.nodes(), 3, need, 6, planner=lambda nodes, *a, **k: dawnpiper(nodes, *a, **k))
    assert own.planner == "<lambda>" and own.batch >= 1
    with pytest.raises(tp.InfeasibleError):
        tp.max_batch(model, 3, 10.0)
    for bad in (dict(planner="x"), dict(most=0)):
        with pytest.raises(ValueError):
            tp.max_batch(model, 3, need, **bad)
    with pytest.raises(ValueError, match="costs is for a GPTConfig"):
        tp.max_batch(model.nodes(), 3, need, costs=1)
    with pytest.raises(TypeError, match="model is int"):
        tp.max_batch(3, 3, need)


def test_appendix_a_in_quality():
    """DawnPiper's appendix A, GPT-2 770M under PipeDream on 4 stages: memory-balanced stages take very unequal times (29.1
    and 286.3 ms there); compute-balanced ones that recompute do not (136.9 and 145.9 ms), and their period is far shorter."""
    cluster = tp.Cluster(1, peak_flops=1e13, memory_bandwidth_Bps=1e12)
    nodes = tp.GPTConfig.preset("gpt2-762m").nodes(cluster=cluster, micro_batch=2)
    balanced = memory_balanced(nodes, 4)
    times = [(nodes.fwd_s + nodes.bwd_s)[a:e].sum() for a, e in itertools.pairwise(balanced)]
    assert times == sorted(times) and times[-1] > 4 * times[0]
    need = dawnpiper(nodes, 4, 1e15, schedule="pipedream", boundaries=balanced).peak_memory_bytes.max()
    got = dawnpiper(nodes, 4, float(need), schedule="pipedream")
    assert got.recompute.any() and got.period_s < 0.7 * max(times) and got.stage_time_s[:-1].min() > 0.9 * got.stage_time_s.max()
