"""Slices for uneven stages against all slicings, on an independent recurrence."""

import itertools

import numpy as np
import pytest

import terapipe_c as tp


def makespan(times):
    """times [slices, stages]: the longest monotone path through the matrix."""
    out = np.zeros((times.shape[0] + 1, times.shape[1] + 1))
    for i, k in itertools.product(range(times.shape[0]), range(times.shape[1])):
        out[i + 1, k + 1] = max(out[i, k + 1], out[i + 1, k]) + times[i, k]
    return out[-1, -1]


def seconds(tables, lengths):
    starts = np.cumsum([0, *lengths[:-1]])
    return makespan(np.array([tables[:, s, c] for s, c in zip(lengths, starts, strict=True)]))


def reversed_backward(tables, lengths):
    """The backward as it runs: the last slice first, through the stages in reverse."""
    starts = np.cumsum([0, *lengths[:-1]])
    rows = [tables[::-1, s, c] for s, c in zip(lengths, starts, strict=True)]
    return makespan(np.array(rows[::-1]))


def slicings(n):
    for cuts in range(1 << (n - 1)):
        ends = [i + 1 for i in range(n - 1) if cuts >> i & 1] + [n]
        yield [b - a for a, b in itertools.pairwise([0, *ends])]


def least(forward, backward=None, longest=None):
    """By a frontier of all undominated vectors without any bound: independent of the planner's order and pruning."""
    K, n = forward.shape[0], forward.shape[1] - 1
    width = K if backward is None else 2 * K
    fronts = [set() for _ in range(n + 1)]
    fronts[0].add((0.0,) * width)
    for start in range(n):
        for vector in fronts[start]:
            for s in range(1, min(n - start, longest or n) + 1):
                out, free = [], 0.0
                for k in range(width):
                    free = 0.0 if k == K else free
                    free = max(free, vector[k]) + float((forward if k < K else backward)[k % K, s, start])
                    out.append(free)
                fronts[start + s].add(tuple(out))
    return min(v[K - 1] + (v[-1] if width > K else 0.0) for v in fronts[n])


def tables(rng, K, n, kind):
    shape = (K, n + 1, n + 1)
    if kind == 0:
        return rng.random(shape)
    if kind == 1:
        return rng.integers(0, 4, shape).astype(float)
    s, c = np.arange(n + 1.0)[:, None], np.arange(n + 1.0)
    speed = rng.uniform(0.3, 2.0, (K, 1, 1))
    return speed * (rng.uniform(0, 3) + s + rng.uniform(0, 0.3) * s * c)[None] + rng.uniform(0, 0.5, (K, 1, 1))


def test_all_slicings_of_small_instances():
    rng = np.random.default_rng(7)
    done = 0
    for trial in range(4200):
        K, n = int(rng.integers(1, 6)), int(rng.integers(1, 7 if trial % 6 else 10))
        n = min(n, 6) if K > 3 and trial % 12 else n
        t = tables(rng, K, n, trial % 3)
        bwd = tables(rng, K, n, (trial // 3) % 3) if trial % 2 else None
        longest = int(rng.integers(1, n + 1)) if trial % 5 == 0 else None
        plan = tp.planners.slice_uneven(t, bwd, max_slice=longest)
        best = least(t, bwd, longest)
        assert plan.optimal and sum(plan.lengths) == n and max(plan.lengths) <= (longest or n)
        assert plan.latency_s == pytest.approx(best, rel=1e-11, abs=1e-300)
        assert plan.lower_bound_s <= best * (1 + 1e-15)
        assert plan.lower_bound_s >= best * (1 - 1e-11)
        assert tp.planners.flow_shop(t, plan.lengths, bwd) == plan.latency_s
        done += 1
    assert done >= 4000


def test_flow_shop_is_what_the_stages_do():
    rng = np.random.default_rng(3)
    for _ in range(60):
        K, n = int(rng.integers(1, 6)), int(rng.integers(1, 8))
        t, b = tables(rng, K, n, 0), tables(rng, K, n, 2)
        for lengths in itertools.islice(slicings(n), 16):
            assert tp.planners.flow_shop(t, lengths) == pytest.approx(seconds(t, lengths))
            both = seconds(t, lengths) + reversed_backward(b, lengths)
            assert tp.planners.flow_shop(t, lengths, b) == pytest.approx(both)


def test_equal_stages_are_terapipes():
    rng = np.random.default_rng(11)
    for n in (1, 2, 13, 40):
        one, back = tables(rng, 1, n, 2)[0], tables(rng, 1, n, 2)[0]
        for K in (1, 2, 7):
            equal = tp.planners.slice_tokens(one, K)
            assert tp.planners.slice_uneven(np.tile(one, (K, 1, 1))).latency_s == pytest.approx(equal.latency_s, rel=1e-11)
            apart = tp.planners.slice_tokens(one, K, bwd=back)
            found = tp.planners.slice_uneven(np.tile(one, (K, 1, 1)), np.tile(back, (K, 1, 1)))
            assert found.latency_s == pytest.approx(apart.latency_s, rel=1e-11)


def test_what_cannot_change_the_optimum_does_not():
    rng = np.random.default_rng(5)
    for trial in range(40):
        t, b = tables(rng, 4, 12, trial % 3), tables(rng, 4, 12, 0)
        plan = tp.planners.slice_uneven(t, b)
        assert plan == tp.planners.slice_uneven(t, b) or plan.lengths == tp.planners.slice_uneven(t, b).lengths
        assert tp.planners.slice_uneven(8 * t, 8 * b).latency_s == pytest.approx(8 * plan.latency_s, rel=1e-11)
        assert tp.planners.slice_uneven(b, t).latency_s == pytest.approx(plan.latency_s, rel=1e-11)
        idle = np.concatenate([t[:2], 0 * t[:1], t[2:]]), np.concatenate([b[:2], 0 * b[:1], b[2:]])
        assert tp.planners.slice_uneven(*idle).latency_s == pytest.approx(plan.latency_s, rel=1e-11)
        assert tp.planners.slice_uneven(t + 0.1, b).latency_s >= plan.latency_s
        coarse = tp.planners.slice_uneven(t[:, ::2, ::2].copy(), b[:, ::2, ::2].copy())
        assert coarse.latency_s >= plan.lower_bound_s
        unread = t.copy()
        s, c = np.indices(t.shape[1:])
        unread[:, (s == 0) | (s + c > 12)] = np.nan
        assert tp.planners.slice_uneven(unread, b).lengths == plan.lengths


def smooth(K, n, seed=0):
    rng = np.random.default_rng(seed)
    s, c = np.arange(n + 1.0)[:, None], np.arange(n + 1.0)
    layers = rng.integers(2, 5, (K, 1, 1))
    return layers * (np.maximum(n / 32, s) + s * (c + s / 2) / (2 * n)) + n / 100


def test_long_sequences():
    exact = tp.planners.slice_uneven(smooth(12, 64))
    assert exact.optimal
    ended = tp.planners.slice_uneven(smooth(12, 64), work=2000)
    assert not ended.optimal and ended.lower_bound_s <= exact.latency_s <= ended.latency_s
    assert ended.latency_s <= 1.02 * exact.latency_s
    long = tp.planners.slice_uneven(smooth(12, 300), work=200_000)
    assert not long.optimal and sum(long.lengths) == 300 and long.lower_bound_s < long.latency_s < 1.3 * long.lower_bound_s
    assert tp.planners.slice_uneven(smooth(3, 300), max_slice=1, work=100_000).lengths == [1] * 300
    assert "uneven stages" in repr(long)


def test_bad_input():
    t = np.ones((2, 4, 4))
    for value in (np.nan, np.inf, -1.0):
        wrong = t.copy()
        wrong[1, 2, 1] = value
        with pytest.raises(ValueError, match=r"t\[1, 2, 1\]"):
            tp.planners.slice_uneven(wrong)
        with pytest.raises(ValueError, match=r"bwd\[1, 2, 1\]"):
            tp.planners.flow_shop(t, [3], wrong)
    for shape in ((2, 4, 3), (0, 4, 4), (2, 1, 1)):
        with pytest.raises(ValueError, match=r"shape \[\d, \d, \d\]"):
            tp.planners.slice_uneven(np.ones(shape))
    with pytest.raises(ValueError, match="bwd has shape"):
        tp.planners.slice_uneven(t, np.ones((3, 4, 4)))
    with pytest.raises((ValueError, TypeError)):
        tp.planners.slice_uneven(t.astype(np.float32))
    with pytest.raises(ValueError, match="2 units together: 3"):
        tp.planners.flow_shop(t, [1, 1])
    with pytest.raises(ValueError, match="length 0"):
        tp.planners.flow_shop(t, [0, 3])
    with pytest.raises(ValueError, match="max_slice is 0"):
        tp.planners.slice_uneven(t, max_slice=0)
    with pytest.raises(ValueError, match="work is 0"):
        tp.planners.slice_uneven(t, work=0)
    with pytest.raises(TypeError):
        tp.planners.slice_uneven("t")
    with pytest.raises(TypeError):
        tp.planners.slice_uneven(t, max_slice=1.5)
