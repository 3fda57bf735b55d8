"""BMPipe's planner of several chunks: the same plan whatever the unit of time."""

import pytest

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
