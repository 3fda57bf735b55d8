"""Tables of many units, and of costs that tie: what only long sequences and odd costs ask of the slice planner."""
import itertools

import numpy as np
from test_planners import Model, close, refused, thresholds

from terapipe_c import planners


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
    """There corners of boxes are rounded by more than any share of a latency: boxes did not get smaller, and nothing ended."""
    f, b = np.zeros((4, 4)), np.zeros((4, 4))
    f[1, :3], f[2, :2], f[3, 0] = (4e-309, 1.3e-314, 0.0), (6.1e-319, 3.3e-294), 4e-323
    b[1, :3], b[2, :2], b[3, 0] = (5.4e-309, 1.4e-309, 0.0), (0.0, 3.9e-309), 0.0
    got = planners.slice_tokens(f, 4, bwd=b)
    assert got.lengths == [3] and 0.0 <= got.lower_bound_s <= got.latency_s == 4 * f[3, 0]
    for scale in (1e-300, 1e-306, 1e-310):                     # where no cost is rounded itself, the plan is that of larger costs
        f, b = few_valued(np.random.default_rng(3), 24, 0.2, 40.0, 12), few_valued(np.random.default_rng(4), 24, 0.5, 30.0, 9)
        want, got = planners.slice_tokens(f, 6, bwd=b).latency_s, planners.slice_tokens(f * scale, 6, bwd=b * scale)
        assert abs(got.latency_s - want * scale) <= 1e-9 * want * scale + 1e-318
