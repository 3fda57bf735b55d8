"""The baselines against plans that their authors published, and DAPPLE's programme against a second statement of it."""

import functools
import itertools
import math

import numpy as np
import pytest
from test_baselines import bytes_of, dapple_latency, memory_of

import terapipe_c as tp
from terapipe_c import planners

# ---- DAPPLE -----------------------------------------------------------------------------------------------------------------
#
# Times in ms of one micro-batch on one V100, message and weight sizes in bytes: profiling_results of github.com/AlibabaPAI/DAPPLE
# (BSD-3-Clause). The plans on two machines of eight: examples/vs_pipedream.rs of github.com/LER0ever/HPGO, whose blocks are the
# profile's nodes without the input, nodes that nothing separates as one. A machine is one device here: eight times as fast,
# messages at the 1 GB/s and exchange at the 3 GB/s of HPGO's ethernet.rs.

MICROS, MESSAGE_BPS, EXCHANGE_BPS = 128, 1e9, 3e9


def two_machines(profile, message):
    fwd, bwd, weights = np.array(profile).T
    return planners.dapple(fwd / 8e3, bwd / 8e3, 2, MICROS, message / MESSAGE_BPS, param_bytes=weights, bandwidth_Bps=EXCHANGE_BPS)


def test_dapple_cuts_xlnet_36_as_published() -> None:
    """18 layers each; what crosses: a layer's 2 MB, and 7 MB of masks and segments that every layer reads."""
    inputs = [(0.007, 0.0, 131e6), (0.040, 0.0, 0.0), (0.0, 0.0, 0.0), (0.023, 0.0, 0.0)]
    plan = two_machines([*inputs, *[(3.4, 4.9, 52e6)] * 36, (0.46, 1.38, 0.0)], 9e6)
    assert plan.boundaries == [0, 22, 41] and plan.replicas == [1, 1]


def test_dapple_cuts_bert_large_as_published() -> None:
    """12 layers each, the embedding with the first; profiled with 6 sequences, planned with 1."""
    layers = [(8.07 / 6, 13.4 / 6, 50384896.0)] * 24
    plan = two_machines([(0.077 / 6, 0.0, 127131648.0), *layers, (0.0, 0.0, 4198400.0)], (12976128 + 3538944) / 6)
    assert plan.boundaries == [0, 13, 26] and plan.replicas == [1, 1]


def amoebanet_36():
    """(forward, backward, bytes of one of the two tensors out) of stem to loss."""
    first = [(1.11, 3.04, 6422528), (1.04, 2.28, 6422528), (1.08, 2.61, 6422528), (1.04, 2.33, 6422528)]
    second = [(0.97, 3.44, 3211264), (0.99, 2.50, 3211264), (0.97, 2.84, 3211264), (1.00, 2.91, 3211264)]
    third = [(1.66, 3.18, 1605632), (1.73, 4.13, 1605632), (1.60, 3.62, 1605632), (2.01, 4.14, 1605632)]
    return [
        (0.08, 0.07, 3154176), (0.61, 1.57, 4816896), (0.57, 1.73, 2408448), (0.97, 2.38, 6422528), (1.04, 2.35, 6422528),
        *first, *first, *first[:2], (1.16, 2.51, 2408448), (0.97, 2.70, 3211264), (0.95, 2.66, 3211264), *second, *second,
        *second[:2], (1.27, 3.42, 1204224), (1.24, 3.63, 1605632), (1.74, 3.65, 1605632), *third, *third,
        (1.66, 3.18, 802816), (1.73, 4.13, 802816), (0.13, 0.10, 2002), (0.04, 0.0, 0),
    ]  # fmt: skip


def test_dapples_formula_prefers_the_published_cut_of_amoebanet_36() -> None:
    """Behind cell 24, where messages have shrunk, far from the middle of the work. The planner's messages are all alike, so this
    holds the formula alone. A node reads the two nodes in front of it: the tensors of both cross."""
    f, b, out = np.array(amoebanet_36()).T
    assert len(f) == 43
    latency = {}
    for cut in range(2, 43):
        fwd, bwd = ([part.sum() / 8e3 for part in (times[:cut], times[cut:])] for times in (f, b))
        latency[cut] = dapple_latency(fwd, bwd, [0.0, 0.0], MICROS, 2 * (out[cut - 1] + out[cut - 2]) / MESSAGE_BPS)[0]
    assert sorted(latency, key=latency.__getitem__)[0] == 30
    assert f[:30].sum() + b[:30].sum() > 0.6 * (f.sum() + b.sum())


def dapple_programme(fwd, bwd, weights, devices, micros, comm, memory):
    """Section 4.3, with a list of prefixes in place of tables: the least latency of any plan met; infinite: none fits."""
    n, best, found = len(fwd), {(0, 0): (True, 0.0, [])}, math.inf
    for i, m0 in itertools.product(range(n), range(devices)):
        if (i, m0) not in best or (i > 0) != (m0 > 0):
            continue
        for j, m in itertools.product(range(i + 1, n + 1), range(1, devices - m0 + 1)):
            left, front = devices - m0 - m, [*best[i, m0][2], (i, j, m)]
            if (left < 1) if j < n else (left > 0):
                continue
            plan = front + [(j, n, left)] * (j < n)
            fit = [memory is None or bytes_of(memory, a, e, min(micros, len(plan) - k) / r) <= memory["limit_bytes"]
                   for k, (a, e, r) in enumerate(plan)]  # fmt: skip
            f, b, w = ([sum(values[a:e]) / r for a, e, r in plan] for values in (fwd, bwd, weights))
            exchange = [2 * (r - 1) * size / 2.0 for (_, _, r), size in zip(plan, w, strict=True)]
            latency = dapple_latency(f, b, exchange, micros, comm)[0]
            if all(fit[: len(front)]) and latency < best.get((j, m0 + m), (False, math.inf))[1]:
                best[j, m0 + m] = (all(fit), latency, front)
    for at, (whole, latency, _) in best.items():
        found = min(found, latency) if whole and at != (0, 0) else found
    return found


def test_dapple_is_its_programme() -> None:
    """Times and sizes are multiples of 60, so that a fifth of them is exact and ties are ties."""
    rng = np.random.default_rng(12)
    fits = 0
    for i in range(1500):
        n, devices, micros = int(rng.integers(1, 7)), int(rng.integers(1, 6)), int(rng.integers(1, 7))
        fwd, bwd, weights = (60.0 * rng.integers(0, most, n) for most in (9, 15, 9))
        comm, memory = 60.0 * float(rng.integers(0, 4)), None
        if rng.random() < 0.5:
            memory = {key: 60.0 * value for key, value in memory_of(rng, n, False).items()}
            memory["limit_bytes"] += 0.5
        want = dapple_programme(fwd, bwd, weights, devices, micros, comm, memory)
        try:
            plan = planners.dapple(fwd, bwd, devices, micros, comm, memory=memory, param_bytes=weights, bandwidth_Bps=2.0)
        except tp.InfeasibleError:
            assert math.isinf(want), i
            continue
        fits += 1
        assert plan.objective_s == pytest.approx(want, rel=1e-12), i
    assert fits > 1000


# ---- vPipe ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "recomputed"),
    [([12, 13, 13, 11], [0.3, 0, 0, 0]), ([11, 11, 12, 12, 13, 13, 14, 11], [1, 0.85, 0.8, 0.6, 0.5, 0.2, 0, 0])],
)
def test_vpipe_is_no_slower_than_its_published_plans_where_they_fit(sizes, recomputed) -> None:
    """BERT on 4 and 8 GPUs: residual blocks of each stage and the part of them that is recomputed (runtime/bert/vgpus=4 and
    vgpus=8/vpipe.json of github.com/hku-systems/vpipe). Blocks alike, which leaves the head out; the limit is what the published
    plan needs. The front recomputes more and holds less, as there."""
    stages, n = len(sizes), sum(sizes)
    needed = max((stages - k) * (1 - part) * size for k, (size, part) in enumerate(zip(sizes, recomputed, strict=True)))
    slowest = max(size * (3 + part) for size, part in zip(sizes, recomputed, strict=True))
    memory = {"limit_bytes": needed, "activation_bytes": np.ones(n), "recompute_s": np.ones(n)}
    plan = planners.vpipe(np.ones(n), 2 * np.ones(n), stages, 2 * stages, memory=memory)
    again = [int(plan.recompute[a:b].sum()) for a, b in itertools.pairwise(plan.boundaries)]
    assert plan.objective_s <= slowest
    assert again[0] > 0 and again == sorted(again, reverse=True)
    assert np.diff(plan.boundaries)[0] == min(np.diff(plan.boundaries))


def test_what_a_plan_needs_is_a_limit_that_its_stages_keep_to_though_bytes_are_fractions() -> None:
    """Its bytes were added up in another order than those that the limit was held against: an ulp more, or less."""
    rng = np.random.default_rng(2)
    for trial in range(1200):
        n, unit = int(rng.integers(2, 9)), float(rng.choice([1 / 3, 0.1, 1.0, 1e-3, 7 / 11]))
        stages, micros = int(rng.integers(1, min(n, 4) + 1)), int(rng.integers(1, 7))
        static, kept, times, remade = (rng.integers(low, high, n) for low, high in ((0, 50), (0, 50), (1, 9), (1, 5)))
        memory = {"static_bytes": static * unit, "activation_bytes": kept * unit, "recompute_s": 1.0 * remade}
        for name in ("uniform", "merak", "pipedream", "dapple", "vpipe", "adapipe"):
            plan = functools.partial(getattr(tp.planners, name), 1.0 * times, 2.0 * times, stages, micros)
            needed = float(plan(memory={**memory, "limit_bytes": 1e9}).peak_memory_bytes.max())
            if needed > 0.0:
                assert plan(memory={**memory, "limit_bytes": needed}).peak_memory_bytes.max() <= needed, (trial, name)
