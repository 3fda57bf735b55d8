"""Tables of many units, and of costs that tie: what only long sequences and odd costs ask of the slice planner."""
import importlib
import itertools
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_planners import Model, close, refused, thresholds

import terapipe_c as tp
from terapipe_c import planners
from terapipe_c.planning import starts
from terapipe_c.planning.judge import Judge


def few_valued(rng, n, first, rise, values):
    """A dense table of few distinct costs that rise, on the whole, with length and context."""
    s, c = np.meshgrid(np.arange(n + 1.0), np.arange(n + 1.0), indexing="ij")
    t = first + rise * (s / n + 0.5 * s * c / n**2) * rng.uniform(0.9, 1.1, s.shape)
    edges = np.quantile(t, np.linspace(0, 1, values + 1)[1:] ** 3)
    return np.ascontiguousarray(edges[np.minimum(np.searchsorted(edges, t), values - 1)] * 1e-3)


def apart_by_all_thresholds(f, b, stages, cap):
    """Least sum (f + b) + (stages - 1) (max f + max b), by a plain search for every pair of distinct costs."""
    n = f.shape[0] - 1
    end, start = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    length = end - start
    possible = (length > 0) & (length <= (cap or n))
    x, y = (np.where(possible, t[np.maximum(length, 0), start], np.inf) for t in (f, b))
    best = np.inf
    for most_f, most_b in itertools.product(np.unique(x[possible]), np.unique(y[possible])):
        if (stages - 1) * (most_f + most_b) >= best:
            continue
        cost = np.where((x <= most_f) & (y <= most_b), x + y, np.inf)
        dist = np.zeros(n + 1)
        for e in range(1, n + 1):
            dist[e] = np.min(dist[:e] + cost[e, :e])
        best = min(best, dist[n] + (stages - 1) * (most_f + most_b))
    return best


def test_long_dense_tables_equal_all_thresholds():
    """Beyond 256 units a plan of coarser units says which slices cost too much to be looked at."""
    rng = np.random.default_rng(21)
    for n, stages, cap in ((264, 2, None), (259, 9, None), (320, 70, None), (304, 25, 30), (272, 140, None)):
        f, b = few_valued(rng, n, 0.2, 40.0, 12), few_valued(rng, n, 0.5, 30.0, 9)
        got = planners.slice_tokens(f, stages, max_slice=cap)
        assert got.optimal and close(got.latency_s, thresholds(f, stages, cap)), (n, stages, got)
        got, want = planners.slice_tokens(f, stages, bwd=b, max_slice=cap), apart_by_all_thresholds(f, b, stages, cap)
        assert got.optimal and len(got.lengths) > 1 and close(got.latency_s, want), (n, stages, got, want)


def test_a_hint_far_from_the_best_does_not_lead_the_walk():
    """Coarse units hide the short slices that are best here; and all slicings into as many slices have the same sum, so that a
    walk that starts far off finds its way plan by plan."""
    for n in (6144, 8192):
        i, a3 = np.arange(n + 1.0), 1.8e-7
        g = 1.07e-2 + 2.4e-5 * np.maximum(i, 25) + a3 * i * i / 2
        got = planners.slice_tokens(Model(g, g, 0.0, a3), 48, seq_len=n, granularity=1)
        assert got.optimal and got.searches < 300, got


def test_forward_and_backward_that_rise_together_are_walked_as_one():
    s = np.arange(601.0)
    for noise in (0.0, 0.1):
        rng = np.random.default_rng(4)
        parts = [(a + d * s) * rng.uniform(1, 1 + noise, 601) for a, d in ((2e-4, 4e-6), (3e-4, 8e-6))]
        f, b = (Model(g, g, 0.0, e) for g, e in zip(parts, (6e-9, 1.2e-8), strict=True))
        curves = planners.slice_tokens(Model(parts[0], parts[0], 0.0, 6e-9, bwd=b), 96, seq_len=600, granularity=1, bwd=True)
        tables = planners.slice_tokens(f.table(), 96, bwd=b.table())
        assert close(tables.latency_s, curves.latency_s) and tables.optimal and curves.optimal
        assert tables.boxes < (50 if noise == 0.0 else 200), tables


def test_a_bad_cell_is_named_wherever_it_is():
    """Lengths are checked as vectors: the first bad cell of the first bad length is the one named."""
    good = np.ones((42, 42))
    for s, c, value in ((1, 0, np.nan), (3, 17, -1.0), (9, 31, np.inf), (41, 0, np.nan), (2, 39, 2e300), (20, 8, -np.inf)):
        bad = good.copy()
        bad[s, c] = bad[s, min(c + 1, 41 - s)] = bad[min(s + 1, 41), 0] = value
        refused(ValueError, f"t[{s}, {c}] is", planners.slice_tokens, bad, 4)
        refused(ValueError, f"bwd[{s}, {c}] is", planners.slice_tokens, good, 4, bwd=bad)


def test_slices_that_cost_nothing_but_their_message_end():
    """Every slice has the same part of the sum, so that a path may take one beyond the threshold for one within it."""
    rng = np.random.default_rng(5)
    for n in (40, 264):
        comm = rng.uniform(0, 1e-4, n + 1) + 1e-6 * np.arange(n + 1.0)
        got = planners.slice_tokens(np.zeros((n + 1, n + 1)), 16, comm=comm)
        assert sum(got.lengths) == n and got.searches < 300 and got.lower_bound_s <= got.latency_s


def test_a_time_limit_counts_for_messages_longer_than_their_slices_too():
    """The search among stages and links counts work, so that the same limit gives the same plan."""
    n = 96
    s, c = np.meshgrid(np.arange(n + 1.0), np.arange(n + 1.0), indexing="ij")
    t, comm = np.ascontiguousarray((1 + 0.1 * s + 0.0003 * s * c) * 1e-3), 5e-3 + 1e-4 * np.arange(n + 1.0)
    free = planners.slice_tokens(t, 40, bwd=2 * t, comm=comm)
    hasty, again = (planners.slice_tokens(t, 40, bwd=2 * t, comm=comm, time_limit_s=1e-3) for _ in range(2))
    assert hasty.lengths == again.lengths and hasty.lower_bound_s == again.lower_bound_s
    assert hasty.lower_bound_s < free.lower_bound_s <= free.latency_s <= hasty.latency_s * (1 + 1e-12)   # less work, a weaker bound


def test_costs_at_the_low_end_of_a_double_end():
    """At such costs corners of boxes are rounded by more than any share of a latency: boxes did not shrink and the search never
    ended."""
    f, b = np.zeros((4, 4)), np.zeros((4, 4))
    f[1, :3], f[2, :2], f[3, 0] = (4e-309, 1.3e-314, 0.0), (6.1e-319, 3.3e-294), 4e-323
    b[1, :3], b[2, :2], b[3, 0] = (5.4e-309, 1.4e-309, 0.0), (0.0, 3.9e-309), 0.0
    got = planners.slice_tokens(f, 4, bwd=b)
    assert got.lengths == [3] and 0.0 <= got.lower_bound_s <= got.latency_s == 4 * f[3, 0]
    for scale in (1e-300, 1e-306, 1e-310):                     # where no cost is rounded itself, the plan is that of larger costs
        f, b = few_valued(np.random.default_rng(3), 24, 0.2, 40.0, 12), few_valued(np.random.default_rng(4), 24, 0.5, 30.0, 9)
        want, got = planners.slice_tokens(f, 6, bwd=b).latency_s, planners.slice_tokens(f * scale, 6, bwd=b * scale)
        assert abs(got.latency_s - want * scale) <= 1e-9 * want * scale + 1e-318


def test_a_memory_limit_on_curves_with_the_backward_apart_makes_no_tables():
    """Of 32768 units these would take 13 GB: the process may have 3. And the least of all that it allows is found: by tables."""
    code = """if True:
        import resource, numpy as np, terapipe_c as tp
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
        costs, given = tp.CostModel.analytic(model, tp.Cluster(num_devices=2)), dict(bwd=True, seq_len=32768, granularity=1)
        held = tp.planners.slice_tokens(costs, 2, memory={"limit_bytes": 64.0, "row_bytes": 1.0}, **given)
        longest = tp.planners.slice_tokens(costs, 2, max_slice=64, **given)
        assert held.optimal and max(held.lengths) == 64 and held.latency_s == longest.latency_s
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    rng, binding = np.random.default_rng(8), 0
    for _ in range(20):
        n, i = 300, np.arange(301.0)
        f, b = (Model(0.1 + i * x, 0.15 + i * x * rng.uniform(1, 1.2, n + 1), 1e-4, 1e-3 * x) for x in rng.uniform(0.01, 0.1, 2))
        both, stages = Model(*f.parts.values(), bwd=b), int(rng.integers(2, 40))
        memory = dict(limit_bytes=float(rng.integers(400, 900)), row_bytes=float(rng.integers(0, 40)), pair_bytes=0.1,
                      context_bytes=1.0)
        got = planners.slice_tokens(both, stages, seq_len=n, granularity=1, bwd=True, memory=memory)
        want = planners.slice_tokens(f.table(), stages, bwd=b.table(), memory=memory)
        assert close(got.latency_s, want.latency_s) and got.optimal and want.optimal, (got, want)
        binding += got.latency_s > planners.slice_tokens(both, stages, seq_len=n, granularity=1, bwd=True).latency_s
    assert binding > 5


def test_a_memory_limit_that_never_binds_is_no_work():
    i = np.arange(2001.0)
    both = Model(2e-4 + 4e-6 * i, 2e-4 + 4e-6 * i, 0.0, 6e-9, bwd=Model(3e-4 + 8e-6 * i, 3e-4 + 8e-6 * i, 0.0, 1.2e-8))
    given = dict(seq_len=2000, granularity=1, bwd=True)
    free = planners.slice_tokens(both, 16, **given)
    held = planners.slice_tokens(both, 16, memory={"limit_bytes": 2000.0, "row_bytes": 1.0}, **given)
    assert (held.lengths, held.searches, held.small_searches) == (free.lengths, free.searches, free.small_searches)


def test_forward_and_backward_end_with_the_time_wherever_they_are():
    i = np.arange(4001.0)
    both = Model(2e-4 + 4e-6 * i, 2e-4 + 4e-6 * i, 0.0, 6e-9, bwd=Model(3e-4 + 8e-6 * i, 3e-4 + 8e-6 * i, 0.0, 1.2e-8))
    got = planners.slice_tokens(both, 16, seq_len=4000, granularity=1, bwd=True, time_limit_s=1e-9)
    assert not got.optimal and sum(got.lengths) == 4000 and 0 <= got.lower_bound_s <= got.latency_s
    # Of each of three grids a first plan and a bound, and some around the coarsest one: what was looked for around hints was more.
    assert got.searches < 24


def test_what_coarse_units_found_is_kept_where_they_took_all_the_time():
    """Both directions apart began again from the slicing of least sum, one slice where tokens cost what attention costs: a sequence
    of 8192 on 96 stages took 8.3 s a step with a limit of 5 ms, 0.53 without."""
    for n in (2048, 2047):
        i = np.arange(n + 1.0)
        costs = [(k * 1e-3 + k * 1e-6 * i + 5e-10 * i * i,) * 2 + (0.0, 1e-9) for k in (1.0, 1.7)]
        for stages in (2, 16, 96):
            best, got = (apart(*costs, stages, time_limit_s) for time_limit_s in (0.0, 1e-9))
            assert best[5] and best[3] <= got[3] < 1.15 * best[3], (n, stages, best[3], got[3])
            assert got[4] <= best[3] * (1 + 1e-12) and sum(got[0][0][1]) == n


def test_a_time_limit_leaves_time_to_look_around_the_first_plan_of_the_coarsest_units():
    """One search of the coarsest units, two at every finer ones: 8192 tokens on 96 stages took 6.2 times the best with a limit of
    nothing. Now a dozen searches of few units, which take microseconds, and one of finer ones: 1.004 times."""
    for n in (2048, 8192):
        i = np.arange(n + 1.0)
        cost = (1e-3 + 1e-6 * i + 5e-10 * i * i,) * 2 + (0.0, 1e-9)
        for stages in (16, 96):
            best, got = (tp._core.plan_slices([cost], 1, stages, time_limit_s=limit) for limit in (0.0, 1e-9))
            assert best[5] and best[3] <= got[3] < 1.05 * best[3], (n, stages, best[3], got[3])
            assert got[4] <= best[3] * (1 + 1e-12) and sum(got[0][0][1]) == n


def apart(forward, backward, stages, time_limit_s):
    return tp._core.plan_slices_apart(forward, backward, stages, time_limit_s=time_limit_s)


def test_messages_on_links_of_their_own_are_proven_in_long_sequences_too():
    """Where a plan attains the bound of a lower bound's optimum it is optimal, though rounding grows with the units."""
    costs = tp.CostModel.analytic(tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16),
                                  tp.Cluster(num_devices=2))
    for apart in (None, True):
        got = planners.slice_tokens(costs, 2, comm=True, seq_len=8192, granularity=1, bwd=apart)
        assert got.optimal and got.gap < 1e-11, got


def test_times_that_a_double_hardly_holds_are_not_called_optimal():
    f, b = (np.array(t) * 5e-324 for t in ([[2, 4, 1], [2, 1, 1], [5, 4, 0]], [[5, 5, 1], [2, 3, 3], [2, 0, 5]]))
    got = planners.slice_tokens(f, 3, bwd=b)
    assert got.latency_s == 18 * 5e-324 or not got.optimal and got.lower_bound_s <= 18 * 5e-324, got
    assert planners.slice_tokens(f * 2.0**60, 3, bwd=b * 2.0**60).latency_s == 18 * 5e-324 * 2.0**60


def test_a_long_sequence_of_a_prime_number_of_tokens_does_not_begin_with_a_search_of_minutes(monkeypatch):
    """Its slices can be multiples of one token alone: of 65521, forward and backward apart took 45 s, four times a plan."""
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=9, block_size=65521)
    judge = Judge(model, tp.CostModel.analytic(model, tp.Cluster(num_devices=2, memory_bytes=1e12)), 2, 1, None)
    asked = []

    def slice_tokens(costs, stages, *, seq_len, granularity, bwd):
        asked.append((seq_len // granularity, bwd))
        return SimpleNamespace(lengths=[seq_len // 2, seq_len - seq_len // 2])

    monkeypatch.setattr(planners, "slice_tokens", slice_tokens)
    seeds = starts.slicing_seeds(judge, 1, 65521, 1, 65522)
    assert ((1, (32760, 32761)),) in seeds and asked == [(65521, None)]
    asked.clear()
    starts.slicing_seeds(judge, 1, 32768, 2, 65522)
    assert asked == [(16384, None), (16384, True)]


def test_more_slices_than_the_reduced_graph_has_room_for():
    """One first slice costs most, whatever follows, and later ones their length: thousands of slices are part of a near plan."""
    rng = np.random.default_rng(1)
    for i, stages in enumerate((100, 400, 1000, 400, 1000, 400, 1000, 100, 400, 1000, 100, 400, 1000)):
        n = int(rng.integers(180, 257))
        s = np.arange(n + 1.0)
        f, b = s[:, None] * (1 + 1e-6 * rng.random((2, n + 1, n + 1)))
        for t in (f, b):
            t[:, 0] = np.where(s >= n // 2, n * (1 + 1e-6 * rng.normal(size=n + 1)) + s / stages, 30.0 * n)
        t, rest = f + b * (i > 6), np.zeros(n + 1)
        for j in range(n - 1, 0, -1):
            rest[j] = (t[1 : n - j + 1, j] + rest[j + 1 :]).min()
        want, got = (stages * t[1:, 0] + rest[1:]).min(), planners.slice_tokens(f, stages, bwd=b if i > 6 else None)
        assert got.optimal and abs(got.latency_s - want) < 1e-11 * want and got.edges > 1000


def test_tables_of_cost_models_and_both_directions_are_planned_in_units_that_take_no_long_time():
    """In units of one token a table of 16384 has 2 GiB, and forward and backward apart took five seconds."""
    n = 32
    s, c = np.meshgrid(np.arange(n + 1.0), np.arange(n + 1.0), indexing="ij")
    table = tp.CostModel.from_table(1e-3 + s + 0.01 * s * c, 2 * s, granularity=512)
    samples = tp.CostModel.from_samples([(64, 0, 1e-3), (128, 0, 2e-3), (16384, 0, 0.3)])
    for costs, bwd, unit in ((table, None, 4), (table, True, 8), (samples, True, 4), (samples, None, 1)):
        plan = planners.slice_tokens(costs, 8, seq_len=16384, bwd=bwd)
        assert plan == planners.slice_tokens(costs, 8, seq_len=16384, bwd=bwd, granularity=unit)
    for other, unit in (("bwd", 8), ("comm", 4)):       # a table that is asked for in the same units
        assert set(planners.slice_tokens(samples, 8, seq_len=16384, max_slice=unit, **{other: table}).lengths) == {unit}


def test_a_slicing_of_other_lengths_than_the_chosen_units_make_has_a_bound(monkeypatch):
    """Of 8192 tokens and a table, units are of two: [2731, 2731, 2730] was refused for it."""
    monkeypatch.setitem(importlib.import_module("terapipe_c.planners.slices")._UNITS_IN_A_SECOND, (False, False), 16)
    costs = tp.CostModel.from_samples([(1, 0, 1e-3), (64, 0, 2e-2)])
    found = planners.slice_bound(costs, 8, [33, 31], seq_len=64)
    assert found == planners.slice_bound(costs, 8, [33, 31], seq_len=64, granularity=1) > 0.0
    with pytest.raises(ValueError, match="lengths.0. is 33: a positive multiple of the granularity, 4,"):
        planners.slice_bound(costs, 8, [33, 31], seq_len=64, granularity=4)
    asked = []

    class Huge:
        has_tables = True

        def slice_cost(self, seq_len, granularity, phase):
            asked.append(granularity)
            return {"G0": np.ones(4097), "G1": np.ones(4097), "a2": 0.0, "a3": 0.0}

    with pytest.raises(ValueError, match="lengths.0. is 21845: a positive multiple of the granularity, 16,"):
        planners.slice_bound(Huge(), 8, [21845, 21845, 21846], seq_len=65536)
    assert asked == [16]     # not one of 65536 units, of 34 GB
