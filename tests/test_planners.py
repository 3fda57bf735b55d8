"""The planner room: every optimum against enumeration written here, bounds, invariances, and refusals."""

import itertools
import threading

import numpy as np
import pytest
from slice_tables import KINDS, dense_table
from test_limits import counted  # noqa: F401

from terapipe_c import _core, planners


class Model:
    """The form of eq. 9: what a CostModel hands to the planners."""

    def __init__(self, g0, g1, a2, a3, bwd=None):
        self.parts = dict(G0=g0, G1=g1, a2=a2, a3=a3)
        self.bwd = bwd

    def slice_cost(self, seq_len, granularity, phase):
        assert phase in ("fwd", "bwd", "both")
        return self.bwd.parts if phase == "bwd" else self.parts

    def slice_cost_batched(self, batch, seq_len, granularity):
        return [{k: v * (0.4 + 0.6 * b) for k, v in self.parts.items()} for b in range(1, batch + 1)]

    def table(self):
        n = len(self.parts["G0"]) - 1
        t = np.zeros((n + 1, n + 1))
        for s in range(1, n + 1):
            c = np.arange(0, n - s + 1)
            t[s, c] = self.parts["G1"][s] + self.parts["a2"] * c + self.parts["a3"] * s * c
            t[s, 0] = self.parts["G0"][s]
        return t


def model_of(rng, n, kind):
    i = np.arange(n + 1.0)
    if kind == "smooth":
        g = rng.uniform(0.5, 6) + rng.uniform(0.2, 2) * i + rng.uniform(0, 0.1) * i * i
    elif kind == "stairs":
        g = 2.0 + 3.0 * np.ceil(i / rng.integers(2, 6))
    elif kind == "noisy":
        g = (3.0 + i) * rng.uniform(1, 1.4, n + 1)
    elif kind == "wild":
        g = rng.uniform(0, 20, n + 1)
    else:
        g = np.full(n + 1, float(rng.integers(0, 3)))
    extra = rng.uniform(0, 2) + rng.uniform(0, 0.2) * i
    a2, a3 = rng.choice([0.0, rng.uniform(0, 0.3)]), rng.choice([0.0, rng.uniform(0, 0.2)])
    if rng.random() < 0.15:  # a fit may come out falling with the context
        extra, a2, a3 = extra + 5.0, -0.1 * rng.random(), -0.01 * rng.random()
    return Model(g * 1e-3, (g + extra) * 1e-3, a2 * 1e-3, a3 * 1e-3)


_CUTS = {}


def slicings(n):
    """(lengths, starts, valid) of all 2^(n-1) slicings, padded to n slices."""
    if n not in _CUTS:
        bits = (np.arange(1 << (n - 1))[:, None] >> np.arange(n - 1)) & 1
        starts_at = np.concatenate([np.ones((1 << (n - 1), 1), int), bits], axis=1)  # [m, n]: a slice starts here
        start = np.broadcast_to(np.arange(n), starts_at.shape)
        after = np.full((1 << (n - 1), n + 1), n)
        for e in range(n - 1, -1, -1):  # the next start after e
            after[:, e] = np.where(starts_at[:, e] == 1, e, after[:, e + 1])
        _CUTS[n] = np.where(starts_at == 1, after[:, 1:] - start, 0), start, starts_at == 1
    return _CUTS[n]


def sums_and_maxima(t, cap=None):
    n = t.shape[0] - 1
    lengths, starts, valid = slicings(n)
    costs = np.where(valid, t[lengths, starts], 0.0)
    keep = np.ones(len(costs), bool) if cap is None else lengths.max(axis=1) <= cap
    return costs.sum(axis=1)[keep], costs.max(axis=1)[keep]


def latency_of(t, lengths, stages):
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    costs = [t[s, c] for s, c in zip(lengths, starts, strict=True)]
    return sum(costs) + (stages - 1) * max(costs)


def close(a, b):
    return abs(a - b) <= 1e-9 * max(abs(b), 1e-12)


@pytest.mark.parametrize("isa", [0, 1, 2, 3])
def test_slices_equal_enumeration(isa):
    rng = np.random.default_rng(100 + isa)
    done = 0
    for i in range(2000):
        n, stages = int(rng.integers(1, 12)), int(rng.integers(1, 101))
        cap = int(rng.integers(1, n + 1)) if i % 3 == 0 else None
        kind = KINDS[i % 5]
        if i % 2:
            model = model_of(rng, n, kind)
            t, arguments = model.table(), dict(seq_len=n, granularity=1)
        else:
            model = t = dense_table(rng, n, kind)
            arguments = {}
        try:
            got = planners.slice_tokens(model, stages, max_slice=cap, isa=isa, **arguments)
        except ValueError as error:
            assert "instruction set" in str(error)
            pytest.skip("not on this machine")
        total, largest = sums_and_maxima(t, cap)
        want = (total + (stages - 1) * largest).min()
        assert sum(got.lengths) == n and min(got.lengths) >= 1 and (cap is None or max(got.lengths) <= cap)
        assert got.optimal and close(got.latency_s, want), (i, kind, n, stages, cap, got, want)
        assert close(latency_of(t, got.lengths, stages), got.latency_s)
        assert close(got.total_s + (stages - 1) * got.max_s, got.latency_s)
        assert want * (1 - 1e-9) <= got.lower_bound_s <= want * (1 + 1e-15)
        done += 1
    print(f"{done} of 2000 equal enumeration (isa {isa})")


def thresholds(t, stages, cap=None):
    """The paper's algorithm 1: every distinct slice cost as threshold (own, slow, exact)."""
    n = t.shape[0] - 1
    values = np.unique([t[s, c] for s in range(1, n + 1) for c in range(n + 1 - s)])
    best = np.inf
    for value in values:
        if (stages - 1) * value >= best:
            break
        dist = np.full(n + 1, np.inf)
        dist[0] = 0.0
        for e in range(1, n + 1):
            j = np.arange(max(0, e - (cap or n)), e)
            c = t[e - j, j]
            dist[e] = np.min(np.where(c <= value, dist[j] + c, np.inf), initial=np.inf)
        best = min(best, dist[n] + (stages - 1) * value)
    return best


def test_slices_equal_all_thresholds_on_longer_sequences():
    rng = np.random.default_rng(7)
    for i in range(60):
        n, stages = int(rng.integers(12, 36)), int(rng.integers(2, 60))
        model = model_of(rng, n, KINDS[i % 4])
        cap = int(rng.integers(4, n)) if i % 4 == 0 else None
        t = model.table()
        want = thresholds(t, stages, cap)
        for costs, arguments in ((model, dict(seq_len=n, granularity=1)), (t, {})):
            for isa in (0, 1):
                got = planners.slice_tokens(costs, stages, max_slice=cap, isa=isa, **arguments)
                assert got.optimal and close(got.latency_s, want), (i, n, stages, cap, isa, got, want)


def smooth(n, unit=1.0, seed=None):
    x = np.arange(n + 1) * unit
    g = (0.9e-3**4 + (2.1e-6 * x) ** 4) ** 0.25 + 1e-10 * x * x
    if seed is not None:
        g = g * np.random.default_rng(seed).uniform(1, 1.02, n + 1)
    return Model(g, g + 1e-6, 1e-10 * unit, 2e-10 * unit * unit)


@pytest.mark.parametrize("seed", [None, 3])
def test_large_instances_agree_however_they_are_solved(seed):
    """Coarse hints, reduced graphs and whole vectors are only used here: instruction sets and forms must agree."""
    model = smooth(700, unit=4.0, seed=seed)
    for stages, cap in ((1, None), (2, None), (48, None), (300, None), (48, 90)):
        plans = [
            planners.slice_tokens(model, stages, seq_len=700, granularity=1, max_slice=cap, isa=isa) for isa in (0, 1)
        ]
        plans.append(planners.slice_tokens(model.table(), stages, max_slice=cap))
        assert plans[0].lengths == plans[1].lengths and plans[0].latency_s == plans[1].latency_s
        assert all(plan.optimal and close(plan.latency_s, plans[0].latency_s) for plan in plans)
        bound = planners.slice_bound(model, stages, plans[0].lengths, seq_len=700, granularity=1)
        assert 0.9 * plans[0].latency_s < bound <= plans[0].latency_s


def test_bound_is_never_above_the_optimum():
    rng = np.random.default_rng(8)
    tight = []
    for i in range(400):
        n, stages = int(rng.integers(1, 10)), int(rng.integers(1, 60))
        model = model_of(rng, n, KINDS[i % 5])
        table = model.table() if i % 2 or i % 4 == 0 else rng.random((n + 1, n + 1)) ** 4
        costs, arguments = (model, dict(seq_len=n, granularity=1)) if i % 2 else (table, {})
        total, largest = sums_and_maxima(table)
        want = (latencies := total + (stages - 1) * largest).min()
        lengths, _, valid = slicings(n)
        pick = latencies.argmin() if i % 3 == 0 else rng.integers(len(lengths))  # of the best dear slices are left out
        bound = planners.slice_bound(costs, stages, [int(x) for x in lengths[pick] if x], **arguments)
        assert bound <= want * (1 + 1e-12), (i, bound, want)
        tight.append(bound / want if want else 1.0)
    assert np.mean(tight) > 0.5
    assert planners.slice_bound([[9, 9, 9], [0.9, 0, 9], [1, 9, 9]], 2, [2]) <= 1.8  # [1, 1]: what ends last is free


def test_forward_and_backward_apart_equal_enumeration():
    rng = np.random.default_rng(9)
    for i in range(2400):
        n, stages = int(rng.integers(1, 11)), int(rng.integers(1, 101))
        cap = int(rng.integers(1, n + 1)) if i % 5 == 0 else None
        if i % 2:
            f, b = model_of(rng, n, KINDS[i % 5]), model_of(rng, n, KINDS[(i // 5) % 5])
            model, arguments = (
                Model(**{k.lower(): v for k, v in f.parts.items()}, bwd=b),
                dict(seq_len=n, granularity=1),
            )
            tf, tb, second = f.table(), b.table(), True if i % 4 == 1 else model
        else:
            model, second, arguments = dense_table(rng, n, KINDS[i % 5]), dense_table(rng, n, KINDS[(i // 5) % 5]), {}
            tf, tb = model, second
        (sf, mf), (sb, mb) = sums_and_maxima(tf, cap), sums_and_maxima(tb, cap)
        want = (sf + sb + (stages - 1) * (mf + mb)).min()
        got = planners.slice_tokens(model, stages, bwd=second, max_slice=cap, isa=i % 2, **arguments)
        assert sum(got.lengths) == n and (cap is None or max(got.lengths) <= cap)
        assert got.optimal and close(got.latency_s, want), (i, n, stages, cap, got, want)
        assert want * (1 - 1e-9) <= got.lower_bound_s <= want * (1 + 1e-15)


def test_slices_of_equal_sums_are_told_apart_by_what_they_are_allowed(counted):  # noqa: F811
    """Small whole numbers: many slicings have the same sum, and not all of them are within a box of max f and max b."""
    rng = np.random.default_rng(6)
    for i in range(400):
        n, stages = int(rng.integers(2, 9)), int(rng.integers(1, 20))
        f, b = rng.integers(0, 4, (2, n + 1, n + 1)).astype(float)
        (sf, mf), (sb, mb) = sums_and_maxima(f), sums_and_maxima(b)
        got = planners.slice_tokens(f, stages, bwd=b, time_limit_s=1e5)
        assert got.optimal and close(got.latency_s, (sf + sb + (stages - 1) * (mf + mb)).min()), (i, got)


def test_a_limit_that_is_just_enough_is_enough():
    """Kernels compare sums of what a slice holds: their rounding forbids nothing."""
    rng, n = np.random.default_rng(5), 60
    for _ in range(300):
        row, pair, context = rng.uniform(0.1, 1.0, 3)
        lengths = np.arange(n + 1.0)
        model = Model(g0=10.0 + lengths, g1=10.0 + lengths, a2=0.0, a3=0.0)
        memory = {"row_bytes": row, "pair_bytes": pair, "context_bytes": context}
        memory["limit_bytes"] = row * n + pair * n * n + context * n
        assert planners.slice_tokens(model, 1, seq_len=n, granularity=1, memory=memory).lengths == [n]


def test_a_rest_that_costs_more_than_all_coarse_units_is_planned():
    """Units that are no multiple of eight: the last one is no part of the coarse plan, whose thresholds may be nothing for it."""
    n = 257
    end = np.add.outer(np.arange(n + 1), np.arange(n + 1))
    for rest in (0.0, 1e-300):
        f = np.where(end == n, 1e-3, rest)
        for b in (f, np.full_like(f, 1e-3)):
            got = planners.slice_tokens(f, 4, bwd=b)
            assert got.optimal and close(got.latency_s, 8e-3) and got.searches < 300
        got = planners.slice_tokens(f, 4)
        assert got.optimal and close(got.latency_s, 4e-3) and got.searches < 300


def as_backward(model):
    """A cost model whose backward costs are those of `model`."""
    return Model(**{k.lower(): v for k, v in model.parts.items()}, bwd=model)


def test_apart_is_bounded_by_together_on_large_instances():
    """Proportional tables are one problem; otherwise max f + max b >= max (f + b)."""
    f, n = smooth(512, unit=4.0), 512
    twice = Model(2 * f.parts["G0"], 2 * f.parts["G1"], 2 * f.parts["a2"], 2 * f.parts["a3"])
    both = Model(3 * f.parts["G0"], 3 * f.parts["G1"], 3 * f.parts["a2"], 3 * f.parts["a3"])
    x = 4.0 * np.arange(n + 1)
    other = Model(2e-3 + 1e-6 * x, 2e-3 + 1e-6 * x, 1e-8, 1e-9)
    arguments = dict(seq_len=n, granularity=1)
    apart = planners.slice_tokens(f, 48, bwd=as_backward(twice), **arguments)
    assert close(apart.latency_s, planners.slice_tokens(both, 48, **arguments).latency_s)
    got = planners.slice_tokens(f, 48, bwd=as_backward(other), **arguments)
    dense = planners.slice_tokens(f.table(), 48, bwd=other.table())
    sum_table = f.table() + other.table()
    together = planners.slice_tokens(sum_table, 48)
    assert got.optimal and dense.optimal and close(got.latency_s, dense.latency_s)
    starts = np.concatenate([[0], np.cumsum(together.lengths)[:-1]])
    costs = np.array([[f.table()[s, c], other.table()[s, c]] for s, c in zip(together.lengths, starts, strict=True)])
    assert (
        together.latency_s <= got.latency_s * (1 + 1e-12) <= (costs.sum() + 47 * costs.max(axis=0).sum()) * (1 + 2e-12)
    )


def partitions(total, most):
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def pareto(total, largest):
    order = np.lexsort((total, largest))
    kept, least = [], np.inf
    for k in order:
        if total[k] < least:
            kept.append((total[k], largest[k]))
            least = total[k]
    return kept


def best_joint(tables, batch, stages, widest):
    fronts = {b: pareto(*sums_and_maxima(tables[b])) for b in range(1, widest + 1)}
    best = np.inf
    for parts in partitions(batch, widest):
        for pick in itertools.product(*(fronts[b] for b in set(parts))):
            chosen = dict(zip(set(parts), pick, strict=True))
            best = min(best, sum(chosen[b][0] for b in parts) + (stages - 1) * max(chosen[b][1] for b in parts))
    return best


def test_batch_and_tokens_equal_enumeration():
    rng = np.random.default_rng(10)
    for i in range(1200):
        n, batch, stages = int(rng.integers(1, 7)), int(rng.integers(1, 6)), int(rng.integers(1, 60))
        widest = int(rng.integers(1, batch + 1)) if i % 4 == 0 else None
        if i % 2:
            model = model_of(rng, n, KINDS[i % 5])
            costs, arguments = model, dict(seq_len=n, granularity=1)
            base = model.table()
            t = np.stack([base * 0] + [base * (0.4 + 0.6 * b) for b in range(1, batch + 1)])
        else:
            t = np.stack(
                [np.full((n + 1, n + 1), np.nan)]
                + [dense_table(rng, n, KINDS[i % 5]) * (0.5 + 0.5 * b) for b in range(1, batch + 1)]
            )
            costs, arguments = t, {}
        got = planners.slice_batch_and_tokens(costs, batch, stages, max_group=widest, **arguments)
        want = best_joint(t, batch, stages, widest or batch)
        assert sum(b for b, _ in got.slicing) == batch and all(sum(lengths) == n for _, lengths in got.slicing)
        assert widest is None or max(b for b, _ in got.slicing) <= widest
        assert got.optimal and close(got.latency_s, want), (i, n, batch, stages, widest, got, want)
        costs_of = [
            [t[b][s, c] for s, c in zip(lengths, np.concatenate([[0], np.cumsum(lengths)[:-1]]), strict=True)]
            for b, lengths in got.slicing
        ]
        again = sum(map(sum, costs_of)) + (stages - 1) * max(map(max, costs_of))
        assert close(again, got.latency_s) and got.lower_bound_s <= want * (1 + 1e-15)


def test_one_sequence_is_plain_slicing_and_a_batch_is_not_a_sum_of_flushes():
    model = smooth(300, unit=8.0)
    one = planners.slice_tokens(model, 40, seq_len=2400, granularity=8)
    joint = planners.slice_batch_and_tokens(model, 1, 40, seq_len=2400, granularity=8)
    assert joint.slicing == [(1, one.lengths)] and joint.latency_s == one.latency_s and sum(one.lengths) == 2400
    four = planners.slice_batch_and_tokens(model, 4, 40, seq_len=2400, granularity=8)
    assert four.optimal and four.latency_s < 2 * one.latency_s  # flushing four times would take four latencies


def test_invariances():
    rng = np.random.default_rng(11)
    for i in range(60):
        n, stages = int(rng.integers(2, 30)), int(rng.integers(1, 50))
        t = dense_table(rng, n, KINDS[i % 4])
        base = planners.slice_tokens(t, stages).latency_s
        assert close(planners.slice_tokens(t * 1024.0, stages).latency_s, 1024.0 * base)
        assert close(planners.slice_tokens(t * 1e-5, stages).latency_s, 1e-5 * base)
        assert planners.slice_tokens(t, stages + 1).latency_s >= base * (1 - 1e-12)  # one more stage
        assert planners.slice_tokens(t, stages, max_slice=max(1, n // 2)).latency_s >= base * (1 - 1e-12)  # less memory
        coarse = np.ascontiguousarray(t[: n - n % 2 + 1 : 2, : n - n % 2 + 1 : 2])
        if n % 2 == 0:
            assert planners.slice_tokens(coarse, stages).latency_s >= base * (1 - 1e-12)  # a coarser granularity
    big = smooth(512, unit=4.0)
    for stages in (2, 30):
        coarse = Model(
            big.parts["G0"][::8].copy(), big.parts["G1"][::8].copy(), 8 * big.parts["a2"], 64 * big.parts["a3"]
        )
        fine = planners.slice_tokens(big, stages, seq_len=512, granularity=1).latency_s
        assert fine <= planners.slice_tokens(coarse, stages, seq_len=64, granularity=1).latency_s * (1 + 1e-12)


def test_the_published_setting_9():
    """PLANNERS.md 1.9: the model calibrated to TeraPipe's table 3; published 1.481 s, best uniform 1.547 s."""
    lengths = np.array([16, 32, 64, 128, 256, 512, 2048])
    per_slice = np.array([9.27, 9.99, 10.02, 12.18, 17.05, 28.18, 102.99]) * 1e-3
    a3, tokens, batch, stages = 5.95e-9, 2048, 2, 96
    g = []
    for length, mean in zip(lengths, per_slice, strict=True):  # T_row = B sum_k (g + a3 i k i) + (K - 1) (g + a3 i (L - i))
        slices = tokens // length
        row = mean * (batch * slices + stages - 1)
        work = batch * a3 * length * length * slices * (slices - 1) / 2 + (stages - 1) * a3 * length * (tokens - length)
        g.append((row - work) / (batch * slices + stages - 1))
    units = np.arange(257) * 8.0
    curve = np.interp(units, lengths, g)
    model = Model(curve, curve, 0.0, a3 * 64)
    table = model.table()
    plan = planners.slice_batch_and_tokens(np.stack([table * 0, table]), 2, stages, max_group=1)
    slow = min(
        2 * sum(c) + (stages - 1) * max(c)
        for m in (1, 2, 4, 8, 16, 32, 64, 128)
        for c in [[table[256 // m, k * 256 // m] for k in range(m)]]
    )
    assert plan.optimal and plan.latency_s <= slow and abs(plan.latency_s / 1.481 - 1) < 0.05
    one, two = (lengths for _, lengths in plan.slicing)
    assert one == two and 15 <= len(one) <= 24


def test_a_time_limit_gives_a_plan_and_a_true_bound():
    model = smooth(2048)
    exact = planners.slice_tokens(model, 96, seq_len=2048, granularity=1)
    hasty = planners.slice_tokens(model, 96, seq_len=2048, granularity=1, time_limit_s=1e-9)
    assert exact.optimal and not hasty.optimal and hasty.gap > 0
    assert hasty.lower_bound_s <= exact.latency_s <= hasty.latency_s and sum(hasty.lengths) == 2048
    apart = planners.slice_tokens(
        model.table()[:300, :300].copy(), 96, bwd=model.table()[:300, :300].copy(), time_limit_s=1e-9
    )
    assert not apart.optimal and apart.lower_bound_s <= apart.latency_s


def test_balance_equals_enumeration():
    rng = np.random.default_rng(12)
    for i in range(1500):
        n = int(rng.integers(1, 11))
        stages = int(rng.integers(1, n + 1))
        times = (rng.uniform(0, 5, n), rng.integers(0, 4, n).astype(float), np.zeros(n))[i % 3]
        edges = planners.balance(times, stages)
        assert (
            edges[0] == 0
            and edges[-1] == n
            and len(edges) == stages + 1
            and all(a < e for a, e in zip(edges, edges[1:], strict=False))
        )
        want = min(
            max(times[a:e].sum() for a, e in zip((0, *cuts), (*cuts, n), strict=True))
            for cuts in itertools.combinations(range(1, n), stages - 1)
        )
        assert max(times[a:e].sum() for a, e in zip(edges, edges[1:], strict=False)) <= want * (1 + 1e-12)
    assert planners.balance([1, 2, 3], 2) == [0, 2, 3]
    large = rng.uniform(1, 2, 20000)
    edges = planners.balance(large, 300)
    assert max(large[a:e].sum() for a, e in zip(edges, edges[1:], strict=False)) < large.sum() / 300 + 2


@pytest.mark.parametrize("stages", [1, 60])
def test_no_time_limit_is_needed_for_extreme_costs(stages):
    """Zeros, twelve orders of magnitude, and ties everywhere end, and end right."""
    rng = np.random.default_rng(13)
    for i in range(200):
        n = int(rng.integers(1, 10))
        t = (
            np.zeros((n + 1, n + 1)),
            10.0 ** rng.integers(-12, 1, (n + 1, n + 1)),
            rng.integers(0, 2, (n + 1, n + 1)) * 1.0,
            rng.uniform(1, 2, (n + 1, n + 1)) * 1e-290,
            np.full((n + 1, n + 1), 1e290),
        )[i % 5]
        total, largest = sums_and_maxima(t)
        want = (total + (stages - 1) * largest).min()
        for got in (planners.slice_tokens(t, stages), planners.slice_batch_and_tokens(np.stack([t, t]), 1, stages)):
            assert got.optimal and abs(got.latency_s - want) <= 1e-9 * want, (i, got, want)
        both = planners.slice_tokens(t, stages, bwd=t)
        assert both.optimal and abs(both.latency_s - 2 * want) <= 2e-9 * want


def refused(kind, word, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert word in str(caught.value), str(caught.value)


def test_bad_requests_are_refused_by_name():
    good = dense_table(np.random.default_rng(0), 5, "smooth")
    refused(ValueError, "nan", planners.slice_tokens, np.full((5, 5), np.nan), 4)
    refused(ValueError, "[5, 4]", planners.slice_tokens, np.zeros((5, 4)), 4)
    for value, word in ((-1.0, "-1"), (np.inf, "inf"), (np.nan, "nan")):
        bad = good.copy()
        bad[2, 3] = value
        refused(ValueError, "t[2, 3] is " + word, planners.slice_tokens, bad, 4)
        refused(ValueError, "bwd[2, 3] is " + word, planners.slice_tokens, good, 4, bwd=bad)
        bad[2, 3], bad[2, 4] = good[2, 3], value  # beyond the triangle: never read
        assert planners.slice_tokens(bad, 4).lengths == planners.slice_tokens(good, 4).lengths
    for stages in (0, -3):
        refused(ValueError, "stages is", planners.slice_tokens, good, stages)
    refused(TypeError, "stages", planners.slice_tokens, good, 2.5)
    refused(ValueError, "float64", planners.slice_tokens, good.astype(complex), 4)
    refused(ValueError, "t[2, 3] is masked", planners.slice_tokens, np.ma.masked_array(good, good == good[2, 3]), 4)
    refused(ValueError, "dimensions", planners.slice_tokens, good[0], 4)
    refused(ValueError, "max_slice", planners.slice_tokens, good, 4, max_slice=0)
    refused(ValueError, "time_limit_s", planners.slice_tokens, good, 4, time_limit_s=-1.0)
    refused(ValueError, "seq_len", planners.slice_tokens, good, 4, seq_len=5)
    refused(TypeError, "float64 array", planners.slice_tokens, object(), 4)
    refused(ValueError, "5 units", planners.slice_tokens, good, 4, bwd=np.zeros((4, 4)))
    model = smooth(10)
    refused(ValueError, "seq_len", planners.slice_tokens, model, 4)
    refused(ValueError, "granularity", planners.slice_tokens, model, 4, seq_len=10, granularity=3)
    refused(ValueError, "isa", planners.slice_tokens, good, 4, isa=9)
    for part, value in (("G0", np.nan), ("G1", -1.0)):
        broken = Model(model.parts["G0"].copy(), model.parts["G1"].copy(), 0.0, 0.0)
        broken.parts[part][4] = value
        refused(ValueError, "4", planners.slice_tokens, broken, 4, seq_len=10, granularity=1)
    refused(
        ValueError,
        "a3",
        planners.slice_tokens,
        Model(model.parts["G0"], model.parts["G1"], 0.0, np.nan),
        4,
        seq_len=10,
        granularity=1,
    )
    refused(
        ValueError,
        "negative",
        planners.slice_tokens,
        Model(model.parts["G0"], model.parts["G1"], -1.0, 0.0),
        4,
        seq_len=10,
        granularity=1,
    )
    refused(ValueError, "batch", planners.slice_batch_and_tokens, np.zeros((2, 5, 5)), 0, 4)
    refused(ValueError, "shape", planners.slice_batch_and_tokens, np.zeros((2, 5, 5)), 2, 4)
    stack = np.stack([good, good, good])
    stack[2, 1, 1] = -1.0
    refused(ValueError, "t[2][1, 1]", planners.slice_batch_and_tokens, stack, 2, 4)
    refused(ValueError, "max_group", planners.slice_batch_and_tokens, stack, 2, 4, max_group=0)
    refused(ValueError, "lengths sum to 4", planners.slice_bound, good, 4, [2, 2])
    refused(ValueError, "lengths[1] is 0", planners.slice_bound, good, 4, [2, 0])
    refused(ValueError, "stages is 4 for 3 blocks", planners.balance, [1.0, 2.0, 3.0], 4)
    refused(ValueError, "stages", planners.balance, [1.0], 0)
    refused(ValueError, "times[1] is nan", planners.balance, [1.0, np.nan], 1)
    refused(ValueError, "times[0] is -1", planners.balance, [-1.0, 2.0], 1)


def test_threads_plan_at_once_and_inputs_are_untouched():
    model = smooth(512, unit=4.0, seed=1)
    before = {k: np.copy(v) for k, v in model.parts.items()}
    plans = [None] * 4

    def work(k):
        plans[k] = planners.slice_tokens(model, 48, seq_len=512, granularity=1)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(plan.lengths == plans[0].lengths for plan in plans)
    assert all(np.array_equal(before[k], model.parts[k]) for k in before)


def test_results_print_in_the_papers_notation():
    plan = planners.slice_tokens(np.ones((3, 3)), 4)
    assert repr(plan).startswith("SlicePlan(1 slice [2]") and "optimal" in repr(plan) and plan.gap < 1e-9
    both = planners.slice_batch_and_tokens(np.ones((3, 3, 3)), 2, 4)
    assert "(2, [2])" in repr(both) and "<table" in both._repr_html_() and "2 sequences in 1 slice" in both._repr_html_()
    long = planners.slice_tokens(8 * np.ones((3, 3)), 4)
    assert " 32 s on 4 stages" in repr(long) and "<td style='text-align:left'>32 s, optimal" in long._repr_html_()
    assert planners.slices.runs([120, 120, 64]) == "[120]*2+[64]"
    assert _core.plan_slices.__doc__


def test_costs_whose_slicings_all_overflow_are_refused():
    huge, stages = np.full((6, 6), 1e300), 2**31 - 1
    for call in (lambda t: planners.slice_tokens(t, stages), lambda t: planners.slice_tokens(t, stages, bwd=t),
                 lambda t: planners.slice_tokens(t, stages, comm=0 * t), lambda t: planners.slice_tokens_for(t, [1, stages]),
                 lambda t: planners.slice_batch_and_tokens(np.stack([t] * 3), 2, stages),
                 lambda t: planners.slice_batch_and_tokens(np.stack([t] * 3), 2, stages, max_in_flight=1),
                 lambda t: planners.slice_bound(t, stages, [5])):  # fmt: skip
        refused(ValueError, "more than 1.79769e+308 s on 2147483647 stages", call, huge)
    wide = np.full((1025, 1025), 1e300)  # only slices of one unit do, which the coarser grid of the hint has none of
    wide[1] = 1.0
    assert planners.slice_tokens(wide, stages).lengths == planners.slice_tokens(wide, stages, bwd=wide).lengths == [1] * 1024


def test_a_cost_that_falls_with_the_context_or_is_zero_is_searched_like_any_other():
    """Above 256 units a bound on the sums once scaled what counts as rounding; here it is 0."""
    rng = np.random.default_rng(5)
    for i in range(24):
        n, stages, unit = int(rng.integers(257, 420)), int(rng.choice([2, 8, 96])), 10.0 ** rng.uniform(-7, 1)
        i0 = np.arange(n + 1.0)
        g0 = unit * (rng.uniform(1, 30) + i0 * (1 + 0.002 * i0))
        if i % 2:
            g0[rng.integers(1, n + 1, 3)] = 0.0
        model = Model(g0, g0 + unit, -1e-4 * unit if i % 2 == 0 else 0.0, unit * rng.uniform(0.001, 0.1))
        found, dense = planners.slice_tokens(model, stages, seq_len=n, granularity=1), planners.slice_tokens(model.table(), stages)
        assert np.isclose(found.latency_s, dense.latency_s, rtol=1e-11, atol=0) and found.optimal and dense.optimal, i
        assert found.latency_s * (1 - 1e-5) <= found.lower_bound_s <= found.latency_s


@pytest.mark.parametrize("stages", [2, 100])
def test_a_plan_that_takes_no_time_is_optimal_whatever_others_cost(stages):
    """What is rounding beside other slicings' seconds is no doubt about 0."""
    none = np.zeros(129)
    model = Model(none, none + 900.0, 1000.0, 100.0)
    for found in (planners.slice_tokens(model, stages, seq_len=128, granularity=1), planners.slice_tokens(model.table(), stages)):
        assert found.optimal and found.latency_s == found.lower_bound_s == 0.0 and found.lengths == [128]
