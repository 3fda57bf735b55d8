"""BMPipe's planner of several chunks: the same plan whatever the unit of time, layers cut in two, bytes in flight."""

import itertools
import math
import sys

import numpy as np
import pytest
from test_bmpipe import most_held, orders

import terapipe_c as tp


def model(layers, scale=1.0):
    """A light first layer, equal ones, a heavy last one, each with three strategies."""
    def strategies(forward):
        ways = (("none", 0.0, 3.4e8), ("some", 0.08 * forward, 0.65 * 3.4e8), ("all", forward, 0.07 * 3.4e8))
        return [{"name": name, "extra_bwd_s": extra * scale, "activation_bytes": kept} for name, extra, kept in ways]

    times = (("first", 1, 0.4 * 0.01), ("block", layers, 0.01), ("last", 1, 1.7 * 0.01))
    return [{"name": name, "count": count, "fwd_s": f * scale, "bwd_s": 2 * f * scale, "static_bytes": 1.8e9,
             "strategies": strategies(f)} for name, count, f in times]


SCALED = ((4, 2, 4, 20, 3.74e10), (3, 4, 8, 30, 1.66e10), (3, 2, 4, 30, 3.23e10), (4, 4, 8, 30, 2.82e10), (3, 4, 8, 30, 2.02e10))
"""Chunks, stages, micro-batches, layers, bytes."""


def plan(layers, stages, micro, memory, chunks, scale=1.0, **limits):
    return tp.planners.bmpipe(model(layers, scale), stages, micro, memory, chunks, 0.002 * scale, None, **limits)


@pytest.mark.parametrize("scale", [1000.0, 1e-6 / 3, 2.0**-40])
def test_the_unit_of_time_does_not_matter(scale):
    for chunks, stages, micro, layers, memory in SCALED:
        one, other = (plan(layers, stages, micro, memory, chunks, s, effort=40000) for s in (1.0, scale))
        assert (one.assignment == other.assignment).all() and one.evaluations == other.evaluations
        assert other.step_time_s == pytest.approx(one.step_time_s * scale, rel=1e-12)
        assert other.lower_bound_s == pytest.approx(one.lower_bound_s * scale, rel=1e-12)


def test_no_times_at_all():
    found = plan(6, 2, 4, 2e10, 2, 0.0)
    assert found.step_time_s == 0.0 == found.lower_bound_s and found.optimal


def test_layers_cut_in_two_are_no_slower_where_many_have_to_move_at_once():
    """29 layers took 256 s, and their 58 halves 279 s however long the search: layers moved one at a time."""
    table = [(4, 1.86, 3.89, 16.8, [(0.0, 5.94)]), (8, 0.0, 0.0, 18.4, [(0.0, 7.94)]),
             (1, 0.0, 0.0, 6.6, [(0.0, 9.48), (0.0, 6.03)]),
             (8, 1.486, 2.156, 15.6, [(0.0, 5.31), (0.56, 2.86), (1.486, 0.53)]),
             (8, 2.0, 4.585, 6.64, [(0.0, 6.84), (0.54, 2.63), (2.0, 0.68)])]  # fmt: skip

    def step_s(parts):
        layers = [{"count": count * parts, "fwd_s": f / parts, "bwd_s": b / parts, "static_bytes": static / parts, "strategies": [
            {"extra_bwd_s": extra / parts, "activation_bytes": kept / parts} for extra, kept in ways]}
            for count, f, b, static, ways in table]  # fmt: skip
        return tp.planners.bmpipe(layers, 4, 8, 587.0, chunks=2, time_limit_s=None, prove=False).step_time_s

    whole, halves = step_s(1), step_s(2)
    assert halves <= whole


CUT_FINER = (
    ([(16, 0.0, 0.0, 0.2633, [(0.0, 0.7109), (0.0, 0.1422), (0.0, 0.4265)]),
      (4, 1.301, 2.603, 0.1304, [(0.0, 0.9051), (0.3904, 0.543)]),
      (11, 1.34, 2.68, 0.1033, [(0.0, 1.914), (0.402, 1.148)])], 4, 12, 19.79),
    ([(16, 2.0, 4.0, 0.373, [(0.0, 1.85), (2.0, 0.37)]), (1, 0.751, 1.5, 0.13, [(0.0, 0.864), (0.751, 0.173), (0.225, 0.518)])],
     4, 4, 16.1),
)  # fmt: skip
"""Layers (count, forward, backward, static bytes, ways to keep them), stages, micro-batches, bytes: the search among the halves
alone finds plans 0.27 and 1.5 % slower."""


@pytest.mark.parametrize(("table", "stages", "micro", "memory"), CUT_FINER)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_plans_of_groups_are_among_those_of_their_layers(table, stages, micro, memory, parts):
    def step_s(n):
        layers = [{"count": count * n, "fwd_s": f / n, "bwd_s": b / n, "static_bytes": static / n, "strategies": [
            {"extra_bwd_s": extra / n, "activation_bytes": kept / n} for extra, kept in ways]}
            for count, f, b, static, ways in table]  # fmt: skip
        found = tp.planners.bmpipe(layers, stages, micro, memory, chunks=2, time_limit_s=None, prove=False)
        assert max(found.peak_memory_bytes) <= memory * (1 + 1e-12)
        return found.step_time_s

    assert step_s(parts) <= step_s(1) * (1 + 1e-11)


def test_groups_whose_times_are_beyond_what_is_taken_are_left_out():
    layers = [{"count": count, "fwd_s": f, "bwd_s": f, "static_bytes": 1.0,
               "strategies": [{"extra_bwd_s": 0.0, "activation_bytes": 1.0}]}
              for count, f in ((12, 6.3e99), (6, 2e99))]  # fmt: skip
    found = tp.planners.bmpipe(layers, 4, 8, 1e9, chunks=2, time_limit_s=None, prove=False)
    assert 0.0 < found.step_time_s < 1e103


def test_the_bound_of_highs_is_none_of_a_plan_that_may_not_be_the_best(monkeypatch):
    """It stops here at the first plan that is within nine tenths: what it has proved is the bound, not that plan's seconds."""
    highspy = pytest.importorskip("highspy")

    class Hasty(highspy.Highs):
        def setOptionValue(self, name, value):
            return super().setOptionValue(name, 0.9 if name == "mip_rel_gap" else value)

    def strategies(forward):
        return [{"extra_bwd_s": extra * forward, "activation_bytes": kept} for extra, kept in ((0.0, 7.0), (0.1, 2.5), (0.4, 1.0))]

    layers = [{"count": n, "fwd_s": f, "bwd_s": 1.9 * f, "static_bytes": 3.0, "strategies": strategies(f)}
              for n, f in ((5, 7.3), (4, 11.9), (7, 3.1), (3, 17.7))]
    best = tp.planners.bmpipe(layers, 3, 6, 100.0, 1, 0.5, None)
    monkeypatch.setattr(highspy, "Highs", Hasty)
    found = tp.planners.bmpipe_highs(layers, 3, 6, 100.0, 1, 0.5)
    assert best.optimal and found.step_time_s > 1.01 * best.step_time_s
    assert found.lower_bound_s <= best.step_time_s and not found.optimal


def test_highs_keeps_limits_to_the_byte() -> None:
    """Its tolerance is relative: of 800 MB a byte too many was none, and the plan was called optimal."""
    pytest.importorskip("highspy")
    ways = [{"extra_bwd_s": 0.0, "activation_bytes": 1e8}, {"extra_bwd_s": 1.0, "activation_bytes": 1e7}]
    layers = [{"name": "a", "count": 4, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 2e8, "strategies": ways}]
    for short, step_s in ((0.0, 30.0), (1.0, 33.0), (7.0, 33.0), (1000.0, 33.0)):
        found = tp.planners.bmpipe_highs(layers, 2, 4, 8e8 - short)
        assert found.step_time_s == tp.planners.bmpipe(layers, 2, 4, 8e8 - short).step_time_s == step_s
        assert max(found.peak_memory_bytes) <= 8e8 - short and found.lower_bound_s <= step_s
    with pytest.raises(tp.InfeasibleError, match="memory_bytes 299999999"):
        tp.planners.bmpipe_highs([layers[0] | {"strategies": ways[:1], "count": 3}], 3, 1, 3e8 - 1.0)


@pytest.mark.parametrize("over", [100.0, 500.0, 700.0, 790.0])
def test_highs_does_not_lose_a_plan_of_just_the_limit(over) -> None:
    """Where a faster plan was over by a part of the tolerance, the limit that it did not keep was too low for this one, and
    nothing was said to fit."""
    pytest.importorskip("highspy")
    ways = [{"extra_bwd_s": extra, "activation_bytes": 1e8 + more} for extra, more in ((0.0, over / 4), (1.0, 0.0))]
    layers = [{"name": "a", "count": 4, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 2e8, "strategies": ways}]
    found = tp.planners.bmpipe_highs(layers, 2, 4, 8e8)
    assert found.step_time_s == tp.planners.bmpipe(layers, 2, 4, 8e8).step_time_s == 36.0 and max(found.peak_memory_bytes) == 8e8
    with pytest.raises(tp.InfeasibleError, match="memory_bytes 799999700"):
        tp.planners.bmpipe_highs(layers, 2, 4, 8e8 - 300)


def test_time_that_is_up_ends_what_comes_before_the_branches() -> None:
    """Only branches looked at the clock: 1000 layers on 64 stages took 0.7 s of a processor for a limit of 0.1, ten types with 16
    ways each 3.4 s. Each stage's path that is made for the branches counts in `paths`."""
    ways = [{"extra_bwd_s": 0.0, "activation_bytes": 3.0}, {"extra_bwd_s": 0.3, "activation_bytes": 2.0}]
    layers = [{"name": "a", "count": 60, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 1.0, "strategies": ways}]
    whole = tp.planners.bmpipe(layers, 8, 16, 180.0, time_limit_s=None, effort=100_000)
    for limit_s in (1e-9, 1e-6):
        found = tp.planners.bmpipe(layers, 8, 16, 180.0, time_limit_s=limit_s)
        assert found.paths == 0 and whole.paths >= 8
        assert 0.95 * whole.step_time_s < found.lower_bound_s <= whole.step_time_s <= found.step_time_s
        assert max(found.peak_memory_bytes) <= 180.0


def test_time_that_is_up_leaves_only_few_points_of_fronts() -> None:
    """A first plan was made of whole fronts, whatever the limit: 300 unlike layers with 32 ways each took 7.5 s of a processor for
    a limit of a microsecond, a thousand with 64 over a minute. Now they take 0.6 and 2 s; these half of that."""
    rng = np.random.default_rng(0)
    layers = [{"name": str(k), "count": 1, "fwd_s": rng.random(), "bwd_s": rng.random(), "static_bytes": rng.random(),
               "strategies": [{"extra_bwd_s": r * rng.random(), "activation_bytes": (64 - r) * rng.random()} for r in range(64)]}
              for k in range(512)]  # fmt: skip
    least = math.ceil(512 + sum(min(way["activation_bytes"] for way in layer["strategies"]) for layer in layers))
    for stages in (2, 8):
        found = tp.planners.bmpipe(layers, stages, 8, 8.0 * least, time_limit_s=1e-6)
        assert not found.optimal and 0.0 < found.lower_bound_s < found.step_time_s
        assert found.layers.sum() == 512 and max(found.peak_memory_bytes) <= 8.0 * least * (1 + 1e-12)


def test_boundaries_that_fit_are_found_without_trying_every_interval() -> None:
    """Both first programmes tried all intervals: 1024 layers on 512 stages took 1.4 s of a processor, whatever the limit; now
    0.1."""
    for count, stages in ((7, 3), (1024, 512)):
        layers = [{"name": str(k), "count": 1, "fwd_s": 1.0 + k % 5, "bwd_s": 2.0 + k % 3, "static_bytes": 1.0 + k % 4,
                   "strategies": [{"extra_bwd_s": 0.0, "activation_bytes": 1.0 + k % 2}]} for k in range(count)]  # fmt: skip
        with pytest.raises(tp.InfeasibleError) as caught:
            tp.planners.bmpipe(layers, stages, 4, 1.0, time_limit_s=None)
        fits = float(str(caught.value).split("; ")[-1].split()[0])
        assert max(tp.planners.bmpipe(layers, stages, 4, fits, time_limit_s=1e-6).peak_memory_bytes) <= fits
        with pytest.raises(tp.InfeasibleError, match=f"{fits:.0f} would fit"):
            tp.planners.bmpipe(layers, stages, 4, fits - 1.0, time_limit_s=1e-6)


def test_bytes_in_flight_are_those_of_the_whole_order() -> None:
    """Only the first 3 * stages * chunks forwards of a stage are looked at: after them the same counts come round again."""
    rng = np.random.default_rng(7)
    for stages, chunks, groups in itertools.product((1, 2, 3, 5), (1, 2, 3, 4), (1, 2, 3, 4, 6)):
        virtuals, micro = stages * chunks, stages * groups
        kept = rng.random(virtuals)
        layers = [{"name": str(v), "count": 1, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 0.0,
                   "strategies": [{"extra_bwd_s": 0.0, "activation_bytes": float(kept[v])}]} for v in range(virtuals)]  # fmt: skip
        plan = tp.planners.bmpipe(layers, stages, micro, math.inf, chunks, time_limit_s=None, prove=False)
        order = orders(stages, micro, chunks)
        most = [most_held(order, kept, x, stages) for x in range(stages)]
        np.testing.assert_allclose(plan.peak_memory_bytes, most, rtol=1e-12)


@pytest.mark.parametrize("small", [1e-215, 1e-223, 1e-230])
def test_times_far_below_those_of_a_way_that_no_plan_takes_are_told_apart(small) -> None:
    """In units of 1e98 s, which only a way to recompute takes that nobody needs, the others were 0: any plan was called optimal."""
    layers = [{"name": "first", "count": 1, "fwd_s": 3.0 * small, "bwd_s": 5.0 * small, "static_bytes": 1.0},
              {"name": "block", "count": 5, "fwd_s": small, "bwd_s": 2.0 * small, "static_bytes": 1.0}]  # fmt: skip
    for layer in layers:
        layer["strategies"] = [{"extra_bwd_s": 1e98, "activation_bytes": 0.0}, {"extra_bwd_s": small, "activation_bytes": 1.0}]
    far = tp.planners.bmpipe(layers, 2, 4, 1e9, chunks=2, time_limit_s=None)
    for layer in layers:
        del layer["strategies"][0]
    near = tp.planners.bmpipe(layers, 2, 4, 1e9, chunks=2, time_limit_s=None)
    assert far.optimal and near.optimal and abs(far.step_time_s - near.step_time_s) <= 1e-11 * near.step_time_s
    assert abs(far.lower_bound_s - near.step_time_s) <= 1e-11 * near.step_time_s


def rows_of(*types):
    """(count, forward, backward, static bytes, ((extra, bytes kept), ...)) of each type."""
    return [{"name": str(t), "count": count, "fwd_s": f, "bwd_s": b, "static_bytes": still,
             "strategies": [{"extra_bwd_s": extra, "activation_bytes": kept} for extra, kept in ways]}
            for t, (count, f, b, still, ways) in enumerate(types)]  # fmt: skip


def test_highs_does_not_refuse_what_fits_nor_bound_it_above_the_best_plan_where_numbers_lie_far_apart() -> None:
    """Its tolerances are absolute. It called the first infeasible, and gave the second a bound 1.5 % above the best plan, beside a
    way that keeps more than the memory. What it may say now is that it finds none."""
    pytest.importorskip("highspy")
    first = rows_of((2, 2.8e-9, 1.5e-3, 5.5e7, ((0.0, 2.2e4), (8.4e3, 2.3e4))),
                    (2, 3.3e11, 1.2e-4, 3.1e-8, ((0.0, 1.1e4), (1.1e-8, 2.6e11))))  # fmt: skip
    second = rows_of((5, 492367332.19020253, 0.0058, 3.6e-9, ((0.0, 1.8e-12),)),
                     (1, 3.6e-07, 88221296889.3179, 4.8e-8, ((0.0, 3.9e-5), (416064258262.7912, 2.995786690393182))),
                     (4, 5682038.497721756, 7.2e-10, 1.5e-7,
                      ((0.0, 0.00196), (1389792671.724238, 0.0001), (0.13, 0.345))))  # fmt: skip
    for layers, *asked, chunks in ((first, 2, 2, 409563598391.0, 1), (second, 3, 6, 2.7461585888504665, 2)):
        best = tp.planners.bmpipe(layers, *asked, chunks=chunks, time_limit_s=None)
        try:
            found = tp.planners.bmpipe_highs(layers, *asked, chunks=chunks)
        except tp.Error as error:
            assert not isinstance(error, tp.InfeasibleError) and "though there is one, which bmpipe finds" in str(error)
        else:
            assert found.lower_bound_s <= best.step_time_s * (1 + 1e-6) and best.step_time_s <= found.step_time_s * (1 + 1e-6)
    with pytest.raises(tp.InfeasibleError, match="no plan fits into memory_bytes 1 .HiGHS"):
        tp.planners.bmpipe_highs(first, 2, 2, 1.0)


def test_highs_that_loses_its_own_plan_proves_nothing_by_that(monkeypatch) -> None:
    pytest.importorskip("highspy")
    module, rounds = sys.modules["terapipe_c.planners.bmpipe_highs"], []
    solve = module._solve

    def losing(highspy, programme, whole, *more):
        x, proven = solve(highspy, programme, whole, *more)
        if not whole:
            return x, proven
        rounds.append(x)
        x[-1] = 0.0                                            # so that it goes on
        return (x, 0.0) if len(rounds) == 1 else (None, math.inf)

    monkeypatch.setattr(module, "_solve", losing)
    found = tp.planners.bmpipe_highs(model(6), 3, 6, 3e10, 2)
    assert len(rounds) == 2 and found.lower_bound_s < 0.999 * found.step_time_s and not found.optimal


@pytest.mark.parametrize("more", [0, 512, 1000])
def test_ways_whose_bytes_are_nearly_the_same_are_told_apart(more) -> None:
    """A point of a front took the place of one with 1e-13 fewer bytes, which of 1024 layers added up to a part of 1e-10: where that
    did not fit the plan was without layers, took 0 s and was called optimal."""
    ways = [{"extra_bwd_s": 1.0, "activation_bytes": 1.0}, {"extra_bwd_s": 0.5, "activation_bytes": 1.0 + 0.9e-10}]
    layers = [{"name": "a", "count": 1024, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 0.0, "strategies": ways}]
    found = tp.planners.bmpipe(layers, 1, 1, 1024.0 + more * 0.9e-10, time_limit_s=None, effort=1000)
    quick = found.assignment[0, 1].sum()
    assert found.layers.sum() == 1024 and more <= quick <= more + 12        # 1e-12 of the limit more
    assert found.optimal and found.step_time_s == 4096.0 - 0.5 * quick


@pytest.mark.parametrize("seed", [0, 2, 5, 7, 11])
def test_layers_move_to_stages_that_have_room_for_them_whatever_the_time(seed) -> None:
    """Of each move only the stages whose layers change are looked at again; without moves nothing that fits is found here."""
    rng = np.random.default_rng(seed)
    layers = [{"name": str(t), "count": int(rng.integers(4, 9)), "fwd_s": float(rng.integers(1, 9)),
               "bwd_s": float(rng.integers(1, 9)), "static_bytes": float(rng.integers(1, 30)),
               "strategies": [{"extra_bwd_s": 0.0, "activation_bytes": float(rng.integers(1, 9))}]} for t in range(20)]  # fmt: skip
    most = max(tp.planners.bmpipe(layers, 8, 16, math.inf, chunks=4, time_limit_s=1e-6).peak_memory_bytes)
    found = tp.planners.bmpipe(layers, 8, 16, 0.7 * most, chunks=4, time_limit_s=1e-6)
    assert max(found.peak_memory_bytes) <= 0.7 * most


@pytest.mark.parametrize("ways", [5, 17, 64])
def test_many_ways_are_each_looked_at(ways) -> None:
    """Against every three of them, ties and dominated ones included; of 64 a front's points are found in a heap."""
    rng = np.random.default_rng(ways)
    for whole in (True, False, False):
        extra, kept = (rng.integers(1, 40, (2, ways)).astype(float) if whole else rng.uniform(1, 40, (2, ways)) for _ in range(2))
        layers = [{"name": str(t), "count": count, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 0.0, "strategies": [
            {"extra_bwd_s": float(e), "activation_bytes": float(a)} for e, a in zip(extra[t], kept[t], strict=True)]}
            for t, count in enumerate((2, 1))]  # fmt: skip
        seconds = extra[0][:, None, None] + extra[0][:, None] + extra[1]
        total = kept[0][:, None, None] + kept[0][:, None] + kept[1]
        for part in (0.0, 0.1, 0.3, 0.6, 1.0):
            limit = (total.min() + part * (total.max() - total.min())) * (1 + 1e-12)
            found = tp.planners.bmpipe(layers, 1, 1, limit)
            assert found.optimal and found.step_time_s == pytest.approx(9.0 + seconds[total <= limit].min(), rel=1e-12)
