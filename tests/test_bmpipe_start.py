"""BMPipe's planner from a plan on: never slower than it, nor than without it, so that a sweep over limits of memory is monotone."""

import dataclasses
import math

import numpy as np
import pytest

import terapipe_c as tp


def request(rng):
    """(layers, stages, micro-batches, chunks, seconds of a message) with times that are no round numbers."""
    chunks = int(rng.integers(1, 4))
    stages = int(rng.integers(2, 4))
    left, layers = int(rng.integers(stages * chunks + 1, 16)), []
    while left:
        count = int(rng.integers(1, left + 1))
        left -= count
        f, kept = float(rng.uniform(1, 20)), float(rng.integers(4, 40))
        ways = ((0.0, kept), (0.3 * f, 0.6 * kept), (f, 1.0))
        layers.append({"count": count, "fwd_s": f, "bwd_s": 1.9 * f, "static_bytes": float(rng.integers(0, 30)),
                       "strategies": [{"extra_bwd_s": e, "activation_bytes": a} for e, a in ways]})  # fmt: skip
    return layers, stages, stages * int(rng.integers(1, 5)), chunks, float(rng.choice([0.0, 1.5]))


def ask(asked, memory, effort=300, start=None, **options):
    layers, stages, micro, chunks, comm = asked
    return tp.planners.bmpipe(layers, stages, micro, memory, chunks, comm, None, effort, False, start=start, **options)


def least_and_most(asked):
    """Bytes of the least limit that the planner knows of, and those that no limit needs."""
    with pytest.raises(tp.InfeasibleError, match="would fit") as caught:
        ask(asked, 0.5)
    return float(str(caught.value).split("; ")[-1].split()[0]), max(ask(asked, math.inf).peak_memory_bytes)


def test_more_memory_never_hurts_from_the_plan_for_less_on():
    rng, pairs, alone_slower, better, total = np.random.default_rng(0), 0, 0, 0, 120
    for i in range(total):
        asked = request(rng)
        low, high = least_and_most(asked)
        middle = low + float(rng.uniform(0.0, 1.0)) * max(high - low, 0.0)
        limits = sorted([low, middle, middle * 1.0001, middle * 1.003, max(low, high)])
        before, least = None, math.inf
        for memory in limits:
            alone, plan = ask(asked, memory), ask(asked, memory, start=before)
            assert plan.step_time_s <= alone.step_time_s, (i, memory)
            assert max(plan.peak_memory_bytes) <= memory * (1 + 1e-11) and plan.lower_bound_s <= plan.step_time_s
            if before is not None:
                assert plan.step_time_s <= before.step_time_s, (i, memory)
                pairs += 1
                alone_slower += alone.step_time_s > least * (1 + 1e-11)
                better += plan.step_time_s < min(alone.step_time_s, before.step_time_s) * (1 - 1e-11)
            before, least = plan, min(least, alone.step_time_s)
    print(f"{pairs} pairs of limits of {total} requests: none slower; alone {alone_slower}; {better} better than both")
    assert alone_slower > 0 and better > 0 and pairs == 4 * total


def lucky():
    """(request, memory, a plan that fits and is faster than the planner's own)."""
    rng = np.random.default_rng(1)
    while True:
        asked = request(rng)
        low, high = least_and_most(asked)
        memory = low + 0.5 * max(high - low, 0.0)
        good, own = ask(asked, memory, 100_000), ask(asked, memory)
        if good.step_time_s < own.step_time_s * 0.999:
            return asked, memory, good


def test_a_start_holds_whatever_ends_the_search():
    asked, memory, good = lucky()
    layers, stages, micro, chunks, comm = asked
    for prove, limit_s in ((True, 1e-9), (False, 1e-9), (True, None)):
        plan = tp.planners.bmpipe(layers, stages, micro, memory, chunks, comm, limit_s, 300, prove, start=good)
        assert plan.lower_bound_s <= plan.step_time_s <= good.step_time_s
    one = (layers, stages, micro, 1, comm)
    best = ask(one, 2 * memory, 0)
    assert best.optimal and ask(one, 2 * memory, 1, best).step_time_s == best.step_time_s


def test_a_plan_that_meets_its_bound_is_optimal_whoever_found_it():
    """The search ends at once, before its own proof; its bound is what the start takes."""
    layer = {"name": "a", "count": 5, "fwd_s": 4.0, "bwd_s": 8.0, "static_bytes": 0.0,
             "strategies": [{"name": "n", "extra_bwd_s": 0.0, "activation_bytes": 6.0},
                            {"name": "r", "extra_bwd_s": 4.0, "activation_bytes": 1.0}]}  # fmt: skip
    best = tp.planners.bmpipe([layer], 3, 3, 14.0)
    for start in (None, best):
        plan = tp.planners.bmpipe([layer], 3, 3, 14.0, effort=1, start=start)
        assert plan.step_time_s == best.step_time_s == 116.0 and plan.optimal


def test_a_start_is_the_same_in_any_unit_of_time_and_every_time():
    asked, memory, good = lucky()
    layers, *rest, comm = asked
    plan, again = (ask(asked, memory, start=good) for _ in range(2))
    assert (plan.assignment == again.assignment).all() and plan.step_time_s == again.step_time_s

    def halved(times, keys):
        return {**times, **{key: times[key] / 2 for key in keys}}

    half = [{**halved(layer, ("fwd_s", "bwd_s")), "strategies": [halved(s, ("extra_bwd_s",)) for s in layer["strategies"]]}
            for layer in layers]  # fmt: skip
    quick = ask((half, *rest, comm / 2), memory, start=good)
    assert (quick.assignment == plan.assignment).all() and quick.step_time_s == plan.step_time_s / 2


def test_a_start_that_does_not_fit_is_only_where_to_begin():
    asked, memory, good = lucky()
    least = 0.75 * max(good.peak_memory_bytes) + 0.25 * least_and_most(asked)[0]
    plan, alone = ask(asked, least, start=good), ask(asked, least)
    assert max(plan.peak_memory_bytes) <= least < max(good.peak_memory_bytes) and plan.step_time_s <= alone.step_time_s


def test_a_start_that_is_no_plan_is_refused():
    asked, memory, good = lucky()
    layers, stages, micro, chunks, comm = asked
    with pytest.raises(tp.InvalidTypeError, match="start is 3: a BMPipePlan of the same layers would be right"):
        ask(asked, memory, start=3)
    with pytest.raises(tp.InvalidValueError, match=rf"start has shape .*, {chunks}, {stages}\]: .* would be right"):
        ask((layers, stages + 1, (stages + 1) * 2, chunks, comm), memory, start=good)
    more = [{**layers[0], "count": layers[0]["count"] + 1}, *layers[1:]]
    with pytest.raises(tp.InvalidValueError, match="start (leaves|has layer type)"):
        ask((more, stages, micro, chunks, comm), memory, start=good)
    negative = dataclasses.replace(good, assignment=-good.assignment)
    with pytest.raises(tp.InvalidValueError, match=r"start\[.*\] is -\d+: 0 or more would be right"):
        ask(asked, memory, start=negative)
