"""DawnPiper's exact search: how much it looks at, in states, a count and no clock; and numbers of very different sizes."""

import numpy as np
import pytest
from test_dawnpiper import check_plan

from terapipe_c import InfeasibleError, InvalidValueError
from terapipe_c.planners import dawnpiper, dawnpiper_binary


def test_sums_that_never_meet_end_early():
    """All tensors cost the same per byte, in real numbers: no bound and no dominance tells sets apart, and the core search went on
    to its limit, 20 ms of a plan, for nothing."""
    for seed in (0, 2, 3):
        rng = np.random.default_rng(seed)
        kept, forward = rng.uniform(1e6, 4e7, 60), rng.uniform(1e-4, 5e-4, 60)
        nodes = {"fwd_s": forward, "bwd_s": 2 * forward, "recompute_s": 1e-11 * kept, "activation_bytes": kept,
                 "param_bytes": np.zeros(60), "optimizer_bytes": np.zeros(60)}  # fmt: skip
        got = dawnpiper(nodes, 1, 0.04 * kept.sum(), 1)
        assert got.gap < 1e-7 and got.states < 100_000, (seed, got)
        check_plan(nodes, got, 1, 0.04 * kept.sum(), 1, "1f1b", 0.0)


@pytest.mark.parametrize("never_s", [1e4, 1e12, 1e18, 1e24])
def test_nodes_that_huge_seconds_forbid_to_recompute_leave_the_others_theirs(never_s):
    """In sums with 1e18 seconds the others' were lost: the period was 6, 20 % more, and not proven to be the least."""
    for forward, kept, cheap, stages, limit, period, cuts in (
        ([0.0, 2.0, 1.0], [5.0, 1.0, 5.0], 1, 2, 6.0, 5.0, [0, 2, 3]),
        ([1.0, 1.0, 2.0, 0.0], [3.0, 4.0, 1.0, 3.0], 1, 2, 4.0, 5.0, [0, 2, 4]),
    ):
        again, none = np.full(len(forward), never_s), np.zeros(len(forward))
        again[cheap] = 3.0
        nodes = {"fwd_s": np.array(forward), "bwd_s": none, "recompute_s": again, "activation_bytes": np.array(kept),
                 "param_bytes": none, "optimizer_bytes": none}  # fmt: skip
        got = dawnpiper(nodes, stages, limit, 2, "gpipe", 0.5)
        assert got.optimal and got.period_s == pytest.approx(period) and got.boundaries == cuts
        assert got.recompute.tolist() == [k == cheap for k in range(len(forward))]
        check_plan(nodes, got, stages, limit, 2, "gpipe", 0.5)


@pytest.mark.parametrize("never_bytes", [1e15, 1e18, 1e30])
@pytest.mark.parametrize("swap_Bps", [0.0, 3.0])
def test_nodes_that_keep_too_much_leave_the_others_their_bytes(never_bytes, swap_Bps):
    """Sums lost the others' bytes: a plan that was 34 bytes over its limit of 133 was called optimal."""
    nodes = {"fwd_s": [13.0, 1.0, 6.0, 10.0], "bwd_s": [17.0, 2.0, 13.0, 11.0], "recompute_s": [3.0, 17.0, 17.0, 10.0],
             "activation_bytes": [never_bytes, 12.0, 18.0, 19.0], "param_bytes": [11.0, 6.0, 3.0, 11.0],
             "optimizer_bytes": [4.0, 15.0, 18.0, 5.0]}
    few = dict(nodes, activation_bytes=[1e4, 12.0, 18.0, 19.0])
    for limit in range(105, 180):
        found, same = (dawnpiper(each, 1, limit, 2, swap_bandwidth_Bps=swap_Bps) for each in (nodes, few))
        assert found.optimal and found.period_s == same.period_s and max(found.peak_memory_bytes) <= limit
    assert dawnpiper(nodes, 1, 133, 2).period_s == 103.0


@pytest.mark.parametrize("times", [10**11, 10**12, 2 * 10**12])
def test_a_byte_too_many_is_too_many_however_many_there_are(times):
    """With a limit of more than 1e13 bytes some thousandths of a billionth more counted as within it."""
    nodes = {"fwd_s": [1.0, 2.0, 3.0], "bwd_s": [1.0, 1.0, 1.0], "recompute_s": [1.0, 2.0, 4.0],
             "activation_bytes": [3.0 * times + 1, 5.0 * times + 3, 7.0 * times], "param_bytes": [1.0 * times] * 3,
             "optimizer_bytes": [1.0 * times] * 3}
    fixed, enough = 9 * times, 2 * (15 * times + 4)
    assert dawnpiper(nodes, 1, fixed + enough, 2, "gpipe").period_s == 9.0
    for less in (1, 2, 3):
        found = dawnpiper(nodes, 1, fixed + enough - less, 2, "gpipe")
        assert found.period_s == 10.0 and found.peak_memory_bytes[0] <= fixed + enough - less
    with pytest.raises(InfeasibleError):
        dawnpiper(nodes, 1, fixed - 1, 2, "gpipe")


def test_nodes_that_are_never_to_be_recomputed_leave_the_proof_of_the_others():
    """The best plan was found and not called so: bounds were as coarse as a part of such a node's seconds."""
    nodes = {"recompute_s": [1043.0, 1e200, 1398.0, 1e70, 1956.0, 1e200, 3e15, 1314.0, 885.0, 1842.0, 1e70, 316.0, 1e22],
             "activation_bytes": [float(n) for n in (1444, 1852, 2488, 1761, 1430, 1224, 2570, 901, 1572, 958, 452, 937, 1494)],
             "param_bytes": [0.0] * 13, "optimizer_bytes": [0.0] * 13, "fwd_s": [20.0] * 13, "bwd_s": [20.0] * 13}
    found = dawnpiper(nodes, 1, 9504, 1)
    assert found.optimal and found.gap < 1e-9 and found.period_s == 520 + 8754
    must = dawnpiper(nodes, 1, 8000, 1)                        # one of them has to be: the least of these
    assert must.period_s == pytest.approx(3e15, rel=1e-9) and must.recompute[6] and not must.recompute[1]


@pytest.mark.parametrize("never_s", [1e3, 1e20, 1e38])
def test_seconds_and_bytes_that_are_both_huge_leave_each_other_theirs(never_s):
    """What could be swapped in the seconds of a node that is never recomputed was said to be enough bytes for another: beside 1e35
    of these 1e17 counted as none, and a plan that kept them in 24 was called optimal."""
    nodes = {"fwd_s": [1.0] * 4, "bwd_s": [2.0] * 4, "recompute_s": [1.0, 1.0, 1.0, never_s],
             "activation_bytes": [1e17, 5.0, 1e35, 8.0], "param_bytes": [0.0] * 4, "optimizer_bytes": [0.0] * 4}
    found = dawnpiper(nodes, 2, 24, 2, swap_bandwidth_Bps=3.0)
    assert found.optimal and found.recompute.tolist() == [True, False, True, False]
    assert found.boundaries == [0, 2, 4] and list(found.peak_memory_bytes) == [10, 8] and found.period_s == 7


@pytest.mark.parametrize("swap_Bps", [0.0, 3.0, 1e300])
@pytest.mark.parametrize("name", ["fwd_s", "activation_bytes"])
def test_sums_that_are_too_large_are_refused_as_they_were_given(name, swap_Bps):
    """Not by a warning of NumPy's, nor in bytes that nobody gave."""
    nodes = {"fwd_s": [1.0] * 4, "bwd_s": [2.0] * 4, "recompute_s": [1.0] * 4, "activation_bytes": [5.0] * 4,
             "param_bytes": [0.0] * 4, "optimizer_bytes": [0.0] * 4}
    if name == "activation_bytes" and swap_Bps < 1e300:
        assert dawnpiper(dict(nodes, **{name: [1e308] * 4}), 2, 24, 2, swap_bandwidth_Bps=swap_Bps).recompute.all()
        return
    with pytest.raises(InvalidValueError, match=f"{name} sums to inf: at most 1e300"):
        dawnpiper(dict(nodes, **{name: [1e308] * 4}), 2, 24, 2, swap_bandwidth_Bps=swap_Bps)


@pytest.mark.parametrize("unit", [1.0, 1e-10, 1e-40, 1e-120])
def test_a_limit_far_below_a_byte_is_kept_beside_tensors_of_one(unit):
    """What cannot be kept was cut to twice the limit and a byte, beside which a limit of 1e-40 bytes is nothing: plans that need a
    thousand times as much were called optimal. Bytes may be given in any unit."""
    nodes = {"fwd_s": [1.0] * 4, "bwd_s": [2.0] * 4, "recompute_s": [1.0] * 4, "param_bytes": [0.0] * 4,
             "optimizer_bytes": [0.0] * 4, "activation_bytes": [4000 * unit, 5 * unit, 1e45 * unit, 30 * unit]}  # fmt: skip
    found = dawnpiper(nodes, 2, 24 * unit, 2)
    assert found.optimal and found.recompute.tolist() == [True, False, True, True] and found.period_s == 8
    assert found.boundaries == [0, 2, 4] and found.peak_memory_bytes.tolist() == pytest.approx([10 * unit, 0.0], rel=1e-12)


@pytest.mark.parametrize("limit", [1e-300, 5e-324])
def test_seconds_for_which_a_byte_has_no_price_are_compared(limit):
    """Cut to three times such a limit, tensors took more seconds a byte than a double holds, as many as nodes that keep nothing:
    one of these was taken for recomputed before them, and by a bound that was too high a period of 17 s more was called optimal."""
    nodes = {"fwd_s": [0.0] * 4, "bwd_s": [16.0] * 4, "recompute_s": [2.0**34, 2.0**34, 1.0, 2.0**34],
             "activation_bytes": [0.0, 4.0, 4.0, 0.0], "param_bytes": [0.0] * 4, "optimizer_bytes": [0.0] * 4}
    found = dawnpiper(nodes, 2, limit, 2)
    assert found.optimal and found.period_s == 2.0**34 + 32 and found.boundaries == [0, 2, 4]
    assert found.recompute.tolist() == [False, True, True, False]


@pytest.mark.parametrize("bandwidth_Bps", [0.05, 1e-12])
def test_what_is_missing_by_rounding_is_not_swapped_over_a_slow_bus(bandwidth_Bps):
    """28 of 5e17 bytes, less than the search can tell apart, were swapped at so many a second: 1094 s for 1008, unproven."""
    big, few = 5.102984325000509e17, 36.0
    nodes = {"fwd_s": [0.0] * 5, "bwd_s": [1008.0, 0.0, 0.0, 0.0, 0.0], "recompute_s": [0.0625, 0.125, 2.0, 1.8e6, 1.5e7],
             "activation_bytes": [big, few, big, few, big], "param_bytes": [1.0] * 5, "optimizer_bytes": [0.0] * 5}  # fmt: skip
    found = dawnpiper(nodes, 1, 1.0205968650001019e18, 2, "pipedream", bandwidth_Bps)
    assert found.optimal and found.period_s == 1008.0625 and max(found.peak_memory_bytes) <= 1.0205968650001019e18


@pytest.mark.parametrize("limit, few", [(0.0, 3.0), (13.0, 14.0), (1e-40, 1.0)])
@pytest.mark.parametrize("planner", [dawnpiper, dawnpiper_binary])
def test_few_bytes_too_many_are_too_many_beside_huge_tensors(planner, limit, few):
    """BiPar kept 3 bytes beside 6e15 within a limit of 0, and was faster for it than any plan is."""
    nodes = {"fwd_s": [1.0] * 4, "bwd_s": [2.0] * 4, "recompute_s": [1.0] * 3 + [50.0], "param_bytes": [0.0] * 4,
             "optimizer_bytes": [0.0] * 4, "activation_bytes": [1e12, 4e13, 6e17, few]}  # fmt: skip
    found = planner(nodes, 1, limit, 1)
    assert found.recompute.all() and found.period_s == 12.0 + 53.0 and found.peak_memory_bytes[0] == 0.0
