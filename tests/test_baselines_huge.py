"""The baselines beside numbers of very different sizes."""

import math

import numpy as np
import pytest

from terapipe_c import planners


@pytest.mark.parametrize("micro_batches", [1, 5, 1000])
def test_seconds_that_are_huge_in_turn_leave_the_others_theirs(micro_batches: int) -> None:
    """AdaPipe lowered each to 2^20 times all that is less: of three in turn the least was lost in sums, as the others were, and 1e8
    seconds were spent where 4 were enough."""
    fwd, act = [1.0, 2, 3, 4, 5, 1, 2], [8.0, 4, 8, 7, 3, 1, 2]
    for never in ([1e24, 1e16, 1e8], [1e60, 1e32, 1e9], [1e16, 1e16, 1e8]):
        recompute = [5.0, 3.0, never[0], never[1], 1.0, 4.0, never[2]]
        memory = {"limit_bytes": 27, "static_bytes": np.zeros(7), "activation_bytes": act, "recompute_s": recompute}
        plan = planners.adapipe(fwd, fwd, 1, micro_batches, memory=memory)
        assert np.flatnonzero(plan.recompute).tolist() == [1, 4] and plan.step_time_s == micro_batches * 40.0
        most = planners.adapipe(fwd, fwd, 1, micro_batches, memory=memory | {"limit_bytes": 15})
        assert np.flatnonzero(most.recompute).tolist() == [0, 1, 4, 5, 6]     # one of them has to be: the least


@pytest.mark.parametrize("planner", [planners.pipedream, planners.dapple])
def test_a_bound_of_nothing_proves_nothing(planner) -> None:
    """Of work that is free and an exchange of weights that is not, a step of 40 ms was said to be 0.00 % above the bound."""
    free = planner(np.zeros(3), np.zeros(3), 3, 4, 1.0, param_bytes=np.ones(3), bandwidth_Bps=100.0)
    assert free.step_time_s > 0 and free.lower_bound_s == 0 and free.gap == math.inf and "no bound is known" in repr(free)
    nothing = planner(np.zeros(3), np.zeros(3), 3, 4)
    assert nothing.step_time_s == 0 and nothing.gap == 0
