"""The cost model: the C evaluation against the formula in NumPy, fits against known truths, files, refusals."""
import itertools
import math

import numpy as np
import pytest

from terapipe_c import _core
from terapipe_c.config import KINDS, Cluster, GPTConfig
from terapipe_c.cost import PHASES, CostModel, Curve, slicing_arrays
from terapipe_c.partition import block_counts, equal_lengths, even_partition
from terapipe_c.planning.entrance import plan
from terapipe_c.profiling import _slicings

MODEL = GPTConfig(n_layer=3, n_head=4, n_embd=64, vocab_size=256, block_size=96)
CLUSTER = Cluster(num_devices=4, memory_bytes=8e9, link_latency_s=3e-6, link_bandwidth_Bps=1e10, peak_flops=1e11)


def random_costs(seed, **extra):
    """A cost model of random curves, kinked and not monotone."""
    rng = np.random.default_rng(seed)
    curves = {}
    for kind, phase in itertools.product(KINDS, PHASES):
        rows = np.concatenate([[0], np.cumsum(rng.integers(1, 60, 5))]).astype(float)
        context = rng.random(4) * (1e-4, 1e-6, 1e-6, 1e-8) if kind == "attention" else np.zeros(4)
        curves[kind, phase] = Curve(tuple(rows), tuple(rng.random(6) * 1e-3 + rows * 1e-5),
                                    float(context[3]), *map(float, context))
    return CostModel(curves, source="samples", overhead_s=1e-6, model=MODEL, **extra)


def formula(curve, S, C, b):
    """The docstring's t(S, C, b), one number at a time."""
    if S == 0:
        return 0.0
    x, y, r = curve.rows, curve.seconds, b * S
    if r > x[-1]:
        P = y[-1] + (y[-1] - y[-2]) / (x[-1] - x[-2]) * (r - x[-1])
    else:
        P = float(np.interp(r, x, y))
    t = P + b * curve.pair_s * S * S / 2
    if C > 0:
        t += curve.a0 + b * (curve.a1 * S + curve.a2 * C + curve.a3 * S * C)
    return max(0.0, t)


def truth(S, C):
    """A layer's seconds: a smooth kernel ramp, pairs inside the slice, pairs with the context."""
    return ((0.9e-3**4 + (2.1e-6 * S)**4)**0.25 + 1e-10 * S * S) + (1e-6 + 2e-10 * S * C if C else 0)


def grid(tokens, slices, contexts):
    return [(s, c, truth(s, c)) for s in slices for c in contexts if s + c <= tokens]


# ---- evaluation ----

def test_seconds_equal_the_formula():
    costs, rng = random_costs(1), np.random.default_rng(2)
    for _ in range(400):
        kind, phase = KINDS[rng.integers(4)], PHASES[rng.integers(3)]
        S, C, b = int(rng.integers(0, 400)), int(rng.integers(0, 2) * rng.integers(0, 400)), int(rng.integers(1, 5))
        got = costs.block_seconds(kind, phase, S, C, b)
        assert got == pytest.approx(formula(costs.curves[kind, phase], S, C, b), rel=1e-12, abs=1e-18)


def test_seconds_broadcast_and_sum_over_phases():
    costs = random_costs(3)
    S, C = np.arange(1, 9)[:, None], np.arange(0, 5)[None]
    got = costs.block_seconds("attention", "both", S, C)
    assert got.shape == (8, 5)
    assert got[2, 3] == pytest.approx(sum(costs.block_seconds("attention", p, 3, 3) for p in PHASES), rel=1e-13)
    layer = costs.time(S, C, "bwd")
    assert layer[4, 1] == pytest.approx(sum(costs.block_seconds(k, p, 5, 1) for k in ("attention", "ffn") for p in "IW"))
    assert costs.time(5, 1, "fwd") + costs.time(5, 1, "bwd") == pytest.approx(costs.time(5, 1))
    assert isinstance(costs.time(5), float)


def test_only_attention_depends_on_context():
    costs = CostModel.analytic(MODEL, CLUSTER)
    for kind in KINDS:
        assert (costs.block_seconds(kind, "fwd", 8, 64) > costs.block_seconds(kind, "fwd", 8, 0)) == (kind == "attention")


@pytest.mark.parametrize("seed", range(5))
def test_slice_tables_equal_time_everywhere(seed):
    costs = random_costs(seed)
    for g, phase, batch in ((1, "both", 1), (4, "fwd", 1), (8, "bwd", 3)):
        units = 96 // g
        t = costs.slice_cost(96, g, phase, batch)
        assert t["G0"].shape == t["G1"].shape == (units + 1,) and t["G0"][0] == t["G1"][0] == 0
        for i in range(1, units + 1):
            assert t["G0"][i] == pytest.approx(costs.time(i * g, 0, phase, batch), rel=1e-12)
            for j in (1, (units - i) // 2, units - i):
                if 1 <= j <= units - i:
                    assert t["G1"][i] + t["a2"] * j + t["a3"] * i * j == pytest.approx(
                        costs.time(i * g, j * g, phase, batch), rel=1e-10)


def test_what_a_slice_takes_besides_is_added_to_each():
    table = np.arange(1.0, 26.0).reshape(5, 5)
    for costs in (random_costs(5), CostModel.from_table(table, table)):
        without, with_ = (costs.weighted_slice_cost(np.ones((4, 3)), 32, 8, fixed_s=fixed_s) for fixed_s in (0.0, 7.0))
        for name in without:                                   # a slice of nothing costs nothing, whatever the context
            rows, later = np.indices(np.shape(without[name])) if name == "table" else (np.arange(5), 0)
            more = 7.0 * ((rows > 0) & (rows + later < 5)) if name[0] in "Gt" else 0.0
            np.testing.assert_allclose(with_[name], without[name] + more, rtol=1e-12)


def test_slice_cost_batched_is_one_table_for_each_micro_batch():
    costs = random_costs(4)
    tables = costs.slice_cost_batched(3, 96, 8)
    assert tables[0] is None and len(tables) == 4
    for b in (1, 2, 3):
        np.testing.assert_array_equal(tables[b]["G0"], costs.slice_cost(96, 8, batch=b)["G0"])


def test_a_batch_is_not_charged_for_pairs_between_sequences():
    """b sequences of S tokens have b S^2 / 2 pairs, not (b S)^2 / 2."""
    pair = 1e-9
    curve = Curve((0.0, 1000.0), (0.0, 0.0), pair, 0, 0, 0, pair)
    costs = CostModel({("attention", "F"): curve}, source="samples")
    assert costs.block_seconds("attention", "F", 100, 0, 4) == pytest.approx(4 * pair * 100**2 / 2)
    assert costs.block_seconds("attention", "F", 100, 50, 4) == pytest.approx(4 * pair * (100**2 / 2 + 100 * 50))


# ---- fits ----

def test_samples_are_met_and_the_context_law_is_found():
    samples = grid(2048, (8, 64, 256, 512, 1024, 2048), (0, 256, 1024))
    costs = CostModel.from_samples(samples)
    for S, C, seconds in samples:
        assert costs.time(S, C) == pytest.approx(seconds, rel=1e-7)
    table = costs.slice_cost(2048, 1)
    assert table["a3"] == pytest.approx(2e-10, rel=1e-6) and table["a2"] == pytest.approx(0, abs=1e-15)
    assert table["G1"][100] - table["G0"][100] == pytest.approx(1e-6, rel=1e-3)
    assert costs.time(8, 0) == pytest.approx(truth(8, 0)) and costs.time(8, 0) < costs.time(8, 1)   # t_ctx(., 0) = 0


def test_the_papers_intercept_without_a_context_on_request(tmp_path):
    """Its programme adds a0 + a1 S at C = 0 too (PLANNERS.md 1.1)."""
    samples = grid(2048, (8, 64, 256, 512, 1024, 2048), (0, 256, 1024))
    ours, papers = CostModel.from_samples(samples), CostModel.from_samples(samples, ctx0="linear")
    zero, linear = ours.slice_cost(2048, 8), papers.slice_cost(2048, 8)
    for key in ("G1", "a2", "a3"):
        assert linear[key][1:] == pytest.approx(zero[key][1:], rel=1e-9) if key == "G1" else linear[key] == zero[key]
    assert linear["G0"][1:] == pytest.approx(zero["G1"][1:], rel=1e-9) and (linear["G0"][1:] > zero["G0"][1:]).all()
    assert papers.time(100, 300, "fwd") == pytest.approx(ours.time(100, 300, "fwd"))
    single = [(64, 0, 2e-3), (64, 64, 3e-3)]
    assert CostModel.from_samples(single, ctx0="linear").time(64, 64) == pytest.approx(CostModel.from_samples(single).time(64, 64))
    falls = [(8, 0, 1e-5), (64, 0, 1e-4), (8, 64, 1e-4), (64, 64, 2e-4), (8, 128, 4e-4), (64, 128, 5e-4)]
    zero, linear = CostModel.from_samples(falls), CostModel.from_samples(falls, ctx0="linear")
    linear.save(tmp_path / "costs.json")                       # an intercept below 0 is no damage
    assert linear.curves["attention", "F"].seconds[0] < 0
    for costs in (linear, CostModel.load(tmp_path / "costs.json")):
        assert costs.time(5, 64) == pytest.approx(zero.time(5, 64)) and costs.time(8, 0) < zero.time(8, 0)
    with pytest.raises(ValueError, match="ctx0 is 'none'"):
        CostModel.from_samples(samples, ctx0="none")


def test_pairs_inside_the_slice_make_the_interpolation_exact_where_work_is_quadratic():
    """1e-4 + 1e-6 S + a3 (S^2 / 2 + S C) is met between samples too; a line through them would miss by a3 h^2 / 8."""

    def law(S, C):
        return 1e-4 + 1e-6 * S + 4e-9 * (S * S / 2 + S * C)

    costs = CostModel.from_samples([(s, c, law(s, c)) for s in (16, 256, 1024) for c in (0, 256, 512, 768)])
    for S, C in ((100, 0), (640, 0), (700, 300), (2000, 0), (1, 0)):
        assert costs.time(S, C) == pytest.approx(law(S, C), rel=1e-6)


def test_fit_error_is_measured_on_samples_the_fit_does_not_see():
    rng = np.random.default_rng(0)
    clean = grid(1024, (8, 32, 64, 128, 256, 512, 768, 1024), (0, 64, 256, 512))
    noisy = [(s, c, t * (1 + 0.2 * rng.standard_normal())) for s, c, t in clean]
    good, bad = CostModel.from_samples(clean), CostModel.from_samples(noisy)
    assert good.fit_error < 0.03 < 0.08 < bad.fit_error < 0.5
    # The held-out figure is not the fit's own residual: without context every point is met, yet the error is not 0.
    assert bad.time(64, 0) == pytest.approx(next(t for s, c, t in noisy if (s, c) == (64, 0)), rel=1e-6)
    assert CostModel.from_samples(noisy).fit_error == bad.fit_error
    assert math.isnan(CostModel.from_samples([(8, 0, 1e-3), (64, 0, 2e-3)]).fit_error)


def test_negative_context_slopes_are_clamped_with_a_warning():
    samples = [(s, c, 1e-3 + 1e-6 * s - 2e-9 * s * c * 0.5) for s in (8, 64, 256) for c in (0, 64, 256, 512)]
    with pytest.warns(UserWarning, match="negative slope"):
        costs = CostModel.from_samples(samples)
    table = costs.slice_cost(256)
    assert table["a2"] >= 0 and table["a3"] == 0


def test_repeated_samples_count_as_their_median():
    base = [(8, 0, 1e-3), (64, 0, 2e-3), (64, 64, 3e-3)]
    spoiled = base + [(64, 0, 2e-3), (64, 0, 9.0)]
    assert CostModel.from_samples(spoiled) == CostModel.from_samples(base)


def test_few_samples_still_make_a_model():
    one = CostModel.from_samples([(64, 0, 2e-3)])
    assert one.time(32) == pytest.approx(1e-3) and one.time(128) == pytest.approx(4e-3)
    falling = CostModel.from_samples([(64, 0, 2e-3), (128, 0, 1.9e-3)])
    assert falling.time(4096) > falling.time(128) > 0


@pytest.mark.parametrize("bad,word", [([], "tuple"), ([(8, 0)], "tuple"), ([(8, 8, 1e-3)], "C = 0"),
                                      ([(8, 0, -1e-3)], "sample 0"), ([(8, 0, 1e-3), (0, 0, 1e-3)], "sample 1"),
                                      ([(8, 0, float("nan"))], "finite"), ([(8, -1, 1e-3)], "sample 0")])
def test_bad_samples_are_refused(bad, word):
    with pytest.raises(ValueError, match=word):
        CostModel.from_samples(bad)


def measured(extra=None):
    samples = {}
    for kind, unit in (("embedding", 1e-8), ("attention", 1e-6), ("ffn", 2e-6), ("head", 5e-6)):
        samples[kind] = {}
        for phase, share in (("F", 1.0), ("I", 1.1), ("W", 0.9)):
            contexts = (0, 64, 128, 256) if kind == "attention" and phase != "W" else (0,)
            samples[kind][phase] = [(s * b, s, c, share * (1e-5 + unit * s * b + 1e-9 * b * (s * s / 2 + s * c) *
                                                           (kind == "attention" and phase != "W")))
                                    for s in (8, 32, 64, 128, 256) for c in contexts for b in (1, 2)]
    return samples


def test_measurements_of_every_block_and_phase_are_met():
    samples = measured()
    costs = CostModel.from_measurements(samples, model=MODEL, seq_len=256, micro_batch=2, overhead_s=2e-6,
                                        optimizer=[(1000, 1.1e-5), (101_000, 1.1e-4)], comm=[(0, 1e-6), (1e6, 1.01e-4)])
    for kind, phase in itertools.product(KINDS, PHASES):
        for rows, S, C, seconds in samples[kind][phase]:
            assert costs.block_seconds(kind, phase, S, C, rows // S) == pytest.approx(seconds, rel=1e-6)
    assert costs.fit_error < 1e-6 and set(costs.fit_errors) == {f"{k}.{p}" for k in KINDS for p in PHASES}
    assert costs.optimizer_s(11_000) == pytest.approx(2.09e-5 - 1e-8, rel=2e-3)
    assert costs.message_s(100, 64) == pytest.approx(1e-6 + 1e-10 * 25_600)


def test_bad_measurements_are_refused():
    for change, word in (({"conv": {}}, "conv"), ({"ffn": {"B": [(8, 8, 0, 1e-3)]}}, r"ffn.B.*\(B=I\+W\)"),
                         ({"ffn": {"F": [(8, 8, 0, 1e-3), (8, 8, 8, 1e-3)]}}, "only attention"), ({"ffn": {}}, "ffn.F")):
        with pytest.raises(ValueError, match=word):
            CostModel.from_measurements({**measured(), **change})
    with pytest.raises(ValueError, match="bandwidth"):
        CostModel.from_measurements(measured(), comm={"bandwidth": 1e9})
    for rows in (0, -8):
        with pytest.raises(ValueError, match=f"ffn.F: sample 1 is .{rows}.0, 8.0"):
            CostModel.from_measurements({**measured(), "ffn": {"F": [(8, 8, 0, 1e-3), (rows, 8, 0, 1e-3)]}})


# ---- tables ----

def test_a_table_is_returned_entry_by_entry():
    rng = np.random.default_rng(0)
    fwd, bwd = rng.random((2, 9, 9))
    fwd[0] = np.nan                                                # not read
    fwd[5, 4:] = np.inf                                            # beyond the triangle: not read
    costs = CostModel.from_table(fwd, bwd, granularity=4)
    for s, c in itertools.product(range(1, 9), range(9)):
        if s + c <= 8:
            assert costs.time(4 * s, 4 * c, "fwd") == pytest.approx(fwd[s, c])
            assert costs.time(4 * s, 4 * c, "bwd") == pytest.approx(bwd[s, c])
            assert costs.time(4 * s, 4 * c, batch=3) == pytest.approx(3 * (fwd[s, c] + bwd[s, c]))
    table = costs.slice_cost(32, 4)["table"]
    assert table[3, 2] == pytest.approx(fwd[3, 2] + bwd[3, 2]) and table[5, 4] == 0 and table.shape == (9, 9)
    assert costs.block_seconds("head", "fwd", 8) == 0 and costs.fit_error == 0


def test_a_table_is_linear_between_its_points_and_never_read_outside():
    s, c = np.indices((9, 9))
    plane = np.where((s > 0) & (s + c <= 8), 1.0 + 0.5 * s + 0.25 * c, 1e9)
    costs = CostModel.from_table(plane, plane, granularity=8)
    for S, C in ((12, 0), (13, 9), (15, 9), (14, 23), (9, 55), (20, 44), (31, 33), (64, 0)):
        assert costs.time(S, C, "fwd") == pytest.approx(1 + 0.5 * S / 8 + 0.25 * C / 8)
    with pytest.raises(ValueError, match="64 tokens"):
        costs.time(60, 5)
    with pytest.raises(ValueError, match="64 tokens"):
        costs.slice_cost(72, 8)


@pytest.mark.parametrize("change,word", [(lambda t: t[:, :-1], "square"), (lambda t: t[:1, :1], "square"),
                                         (lambda t: np.where(t == t[3, 2], np.nan, t), r"\[3, 2\]"), (lambda t: -t, "finite")])
def test_bad_tables_are_refused(change, word):
    good = np.random.default_rng(0).random((9, 9)) + 1
    with pytest.raises(ValueError, match=word):
        CostModel.from_table(change(good), good)
    with pytest.raises(ValueError, match="one shape"):
        CostModel.from_table(good, good[:5, :5])


# ---- analytic ----

def test_analytic_costs_are_a_roofline():
    costs = CostModel.analytic(MODEL, CLUSTER)
    S, E = 96, 64
    flops = (8 * E * E * S + 16 * E * E * S) + 4 * E * S * S / 2          # a layer's forward
    assert costs.time(S, 0, "fwd") >= flops / CLUSTER.peak_flops
    faster = CostModel.analytic(MODEL, Cluster(num_devices=4, peak_flops=1e12, memory_bandwidth_Bps=1e13))
    assert faster.time(S, 0) < costs.time(S, 0)
    wide = GPTConfig(n_layer=1, n_head=16, n_embd=4096, vocab_size=50257, block_size=2048)
    bound = CostModel.analytic(wide, Cluster(num_devices=1, peak_flops=1e12, memory_bandwidth_Bps=1e12))
    total = sum(bound.block_seconds(b.kind, "both", 2048) for b in wide.blocks)
    assert total == pytest.approx(wide.flops_per_token(2048) * 2048 / 1e12, rel=0.05)       # compute-bound: FLOPs over peak
    assert costs.latency_s == 3e-6 and costs.byte_s == pytest.approx(1e-10)


def test_analytic_costs_of_a_device_that_only_computes_are_its_flops():
    batch, lengths = 3, [1, 20, 43]
    cluster = Cluster(num_devices=1, peak_flops=1e9, memory_bandwidth_Bps=1e30)
    model = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=50, block_size=64)
    costs = CostModel.analytic(model, cluster)
    times = costs.durations(partition=[(0, model.num_blocks)], slicing=[(batch, lengths)], model=model)
    flops = {phase: (float(times[phase].sum()) - len(lengths) * costs.overhead_s) * 1e9 for phase in PHASES}
    pairs = sum(1 for query in range(sum(lengths)) for _key in range(query + 1))
    forward = 2 * 64 * (2 * 12 * 32 * 32 + 50 * 32) * batch                      # two layers' matrices, the head
    attention = 4 * 32 * pairs * 2 * batch
    assert flops["F"] == pytest.approx(forward + attention, rel=1e-9)
    assert flops["I"] + flops["W"] == pytest.approx(2 * forward + 2.5 * attention, rel=1e-9)   # the scores again, too


def test_the_head_does_a_third_of_its_work_in_forward():
    wide = GPTConfig(n_layer=1, n_head=16, n_embd=1024, vocab_size=50257, block_size=2048)
    costs = CostModel.analytic(wide, CLUSTER)
    f, i, w = (costs.block_seconds("head", p, 1024) for p in PHASES)
    assert f == pytest.approx((f + i + w) / 3, rel=0.02) and w < 0.02 * f


# ---- durations ----

def test_durations_are_the_sum_over_blocks():
    costs = random_costs(7, latency_s=1e-5, byte_s=1e-9, optimizer_param_s=1e-9, optimizer_stage_s=1e-4)
    partition = [(0, 2), (2, 5), (5, 8)]                              # embedding+attention, ffn+layer 1, layer 2+head
    slicing = [(1, [40, 56]), (1, [96]), (1, [1, 94, 1])]
    d = costs.durations(partition=partition, slicing=slicing)
    units = [(s, sum(lengths[:i])) for _, lengths in slicing for i, s in enumerate(lengths)]
    for k, (first, end) in enumerate(partition):
        for u, (S, C) in enumerate(units):
            for phase in PHASES:
                want = costs.overhead_s + sum(costs.block_seconds(b.kind, phase, S, C) for b in MODEL.blocks[first:end])
                assert d[phase][k, u] == pytest.approx(want, rel=1e-12)
            assert d["comm"][k, u] == pytest.approx(1e-5 + 1e-9 * S * 64 * 4)
    params = [sum(MODEL.block_params(b.kind) for b in MODEL.blocks[a:z]) for a, z in partition]
    params[0] -= 256 * 64                                             # the head's stage updates the tied embedding
    params[-1] += 256 * 64
    np.testing.assert_allclose(d["OPT"][:, 0], 1e-4 + 1e-9 * np.array(params))
    np.testing.assert_allclose(d["AR"], 2e-5 + 1e-9 * (3 * 96 + 256) * 64 * 4)     # rows there, values back
    assert all(a.shape == (3, 6) and a.flags.c_contiguous and a.dtype == np.float64 for a in d.values())

def test_micro_batches_of_other_sizes_in_the_same_slices_take_their_own_time():
    costs, partition, sizes = random_costs(3), even_partition(MODEL, 2), (1, 3, 3, 2, 1)
    together = costs.durations(partition=partition, slicing=[(b, [40, 56]) for b in sizes])
    alone = [costs.durations(partition=partition, slicing=[(b, [40, 56])]) for b in sizes]
    for phase in PHASES:
        assert (together[phase] == np.concatenate([d[phase] for d in alone], axis=1)).all()


def test_nothing_that_is_made_again_takes_less_than_nothing():
    """What an FFN keeps of its input is an eighth of its work; an attention that costs less than that has none to make again."""
    curves = random_costs(3).curves | {("attention", "F"): Curve((0.0, 1.0), (0.0, 0.0))}
    cheap = CostModel(curves, source="samples", overhead_s=1e-6, model=MODEL)
    counts, slices = block_counts(MODEL, even_partition(MODEL, 2)), slicing_arrays([(1, [40, 56])])
    ffns = counts.copy()
    ffns[:, KINDS.index("attention")] = 0
    assert (cheap.recompute_s(counts, slices) == cheap.recompute_s(ffns, slices)).all()


def test_sliced_micro_batches_of_several_sequences_do_weights_and_head_once():
    costs = random_costs(8)
    partition = [(0, 4), (4, 8)]
    d = costs.durations(partition=partition, slicing=[(3, [32, 64]), (1, [96])])
    overhead = costs.overhead_s
    for k, (first, end) in enumerate(partition):
        kinds = [b.kind for b in MODEL.blocks[first:end]]
        whole = sum(costs.block_seconds(kind, "W", 96, 0, 3) for kind in kinds)
        assert d["W"][k, 0] == pytest.approx(overhead + whole) and d["W"][k, 1] == pytest.approx(overhead)
        for phase in "FI":
            for u, (S, C) in enumerate(((32, 0), (64, 32))):
                want = overhead + sum(costs.block_seconds(kind, phase, S, C, 3) for kind in kinds if kind != "head")
                if u == 1 and "head" in kinds:
                    want += costs.block_seconds("head", phase, 96, 0, 3)
                assert d[phase][k, u] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_what_waits_is_done_by_another_instruction_and_all_of_it_is_done(seed):
    """Sums stay, but for passes of few rows; blocks that must not wait do not; what is left is the update's."""
    rng = np.random.default_rng(seed)
    waits = (1e-4, float(rng.integers(0, 30)), 3e-5)
    even = random_costs(seed, optimizer_param_s=1e-9)
    costs = CostModel.from_dict({**even.to_dict(), "head_pass": list(waits)})
    assert costs.even == even and costs != even and even.even is even and costs.on("cuda").head_pass is None
    known = CostModel.from_dict({**even.on("cuda").to_dict(), "device": "H200", "reproducible": True})
    assert (known.on("cuda").device, known.on("cuda").reproducible) == ("H200", True)
    assert (known.on("cpu").device, known.on("cpu").reproducible) == ("", None)
    slicing = []
    for _ in range(int(rng.integers(1, 5))):
        ends = sorted({*rng.integers(1, 900, int(rng.integers(1, 12))).tolist(), 900})
        slicing.append((int(rng.choice([1, 1, 3])), np.diff([0, *ends]).tolist()))
    partition = [(0, 3), (3, 8)]
    one, other = (c.durations(partition=partition, slicing=slicing) for c in (even, costs))
    for k in range(2):
        assert other["W"][k].sum() == pytest.approx(one["W"][k].sum())
    assert (other["F"][0] == one["F"][0]).all() and (other["I"][0] == one["I"][0]).all() and other["OPT"][0, 0] == one["OPT"][0, 0]
    rows, left = _core.head_rows(*slicing_arrays(slicing))
    u = 0
    for b, lengths in slicing:
        made = _core.weight_rows(np.array(lengths, np.int32))
        for s in range(len(lengths)):
            for phase, (own, passed, flushed) in zip("FI", rows[:, u].tolist(), strict=True):
                least = waits[1] if phase == "I" and own else 0.0
                more = waits[0] * ((max(passed, waits[1]) if passed else 0.0) - max(own, least)) + waits[2] * (flushed - own)
                assert other[phase][1, u] == pytest.approx(max(costs.overhead_s, one[phase][1, u] + more), rel=1e-9)
            if b == 1 and len(lengths) > 1:
                assert (other["W"][1, u] > 1.01 * costs.overhead_s) == (made[s] > 0)
            u += 1
    ends = sum(rows[i, :, 1].sum() for i in range(2)), sum(rows[i, :, 2].sum() for i in range(2)) + sum(left)
    assert ends == (900 * sum(b for b, _ in slicing),) * 2
    want = waits[2] * sum(max(n, waits[1]) for n in left if n)
    assert other["OPT"][1, 0] - one["OPT"][1, 0] == pytest.approx(want)
    blocks = block_counts(MODEL, partition)
    work = costs.stage_work(MODEL, blocks), costs.slice_work(slicing), MODEL
    assert costs.timed(*work, prompt=blocks)["W"] == pytest.approx(one["W"])


def test_rows_of_the_head_beyond_32_bits_are_counted():
    """They wrapped round: I of 2^22 sequences of 900 tokens had -1778384896 rows of its own, and none whose d(weight) it makes."""
    costs = CostModel.from_dict({**random_costs(3).to_dict(), "head_pass": [1e-4, 20.0, 3e-5]})
    few, many = (costs.durations(partition=[(0, MODEL.num_blocks)], slicing=[(b, [300, 600])], model=MODEL) for b in (2**12, 2**22))
    assert all(many[phase][0] == pytest.approx(2**10 * few[phase][0], rel=1e-3) for phase in "FI")


def test_when_the_head_makes_its_weight_gradients_of_rows_that_wait():
    """By hand, after csrc/stage/head.c: 100 rows a slice in F, 200 in I; 128 are worth a pass, but in haste a full tile alone."""
    rows, left = _core.head_rows(*slicing_arrays([(1, [300] * 6)]))
    assert rows[0, :, 2].tolist() == [0, 192, 0, 0, 256, 0] and rows[1, :, 2].tolist() == [192, 192, 224 + 128, 192, 192, 192]
    assert list(left) == [24, 16]


def test_each_update_is_of_the_rows_that_its_own_micro_batch_left():
    costs = CostModel.from_dict({**random_costs(3, optimizer_param_s=1e-9).to_dict(), "head_pass": [1e-4, 20.0, 3e-5]})
    slicing = [(1, [216, 84]), (1, [150, 100, 50]), (1, [90, 210])]
    work = costs.stage_work(MODEL, block_counts(MODEL, [(0, 3), (3, 8)]))
    alone = [costs.timed(work, costs.slice_work([cut]), MODEL)["OPT"] for cut in slicing]
    assert alone[0][1] != alone[2][1]
    together = costs.timed(work, costs.slice_work(slicing), MODEL, updates=True)["U"]
    assert together == pytest.approx(np.repeat(alone, [2, 3, 2], 0).T)


def test_each_copy_of_the_model_has_a_head_whose_rows_wait():
    costs = CostModel.from_dict({**random_costs(3).to_dict(), "head_pass": [1e-4, 20.0, 3e-5]})
    slicing = [(1, [216, 84])] * 2
    blocks = block_counts(MODEL, [(0, 3), (3, 8)])
    work = costs.stage_work(MODEL, blocks)
    alone, both = (costs.timed(work, costs.slice_work(slicing * n), MODEL, copies=n) for n in (1, 2))
    for phase in "FI":
        assert (both[phase] == np.tile(alone[phase], 2)).all()
    assert (both["OPT"] == alone["OPT"]).all()
    joint = costs.timed(work, costs.slice_work(slicing * 2), MODEL)
    assert (joint["F"] != both["F"]).any()
    with pytest.raises(ValueError, match="2 copies"):
        costs.timed(work, costs.slice_work(slicing[:1]), MODEL, copies=2)


def test_a_pass_of_the_head_is_three_numbers():
    for wrong, word in (((1.0, 2.0), "least rows"), (3.0, "least rows"), ((0.0, 1.0, 1.0), r"head_pass\[0\]"),
                        ((1.0, -1.0, 1.0), r"head_pass\[1\]"), ((1.0, 1.0, float("nan")), r"head_pass\[2\]")):
        with pytest.raises((ValueError, TypeError), match=word):
            CostModel.from_measurements(measured(), head_pass=wrong)
    for bad in (np.array([], np.int32), np.array([0], np.int32)):
        with pytest.raises(ValueError, match="fit together"):
            _core.head_rows(np.array([1], np.int32), np.array([1], np.int32), bad)


def test_bad_duration_requests_are_refused():
    pack, i32 = random_costs(1)._pack, lambda *x: np.array(x, np.int32)
    blocks = np.ones((2, 4), np.int32)
    for args, word in (((blocks, i32(1), i32(2), i32(5, 0)), "slice 0.1"), ((blocks, i32(0), i32(1), i32(5)), "micro-batch 0"),
                       ((blocks, i32(1), i32(3), i32(5, 5)), "fit together"), ((-blocks, i32(1), i32(1), i32(5)), "stage 0"),
                       ((blocks[:, :3].copy(), i32(1), i32(1), i32(5)), "fit together"),
                       ((blocks, i32(1), i32(1), i32(5), blocks[:1].copy()), "fit together"),
                       ((blocks, i32(1), i32(-1), i32()), "fit together|sequences")):
        with pytest.raises(ValueError, match=word):
            _core.cost_durations(pack, *args)
    with pytest.raises(ValueError, match="ascend|after"):
        CostModel({("ffn", "F"): Curve((0.0, 5.0, 5.0), (0.0, 1.0, 2.0))}, source="samples")
    with pytest.raises(ValueError, match="int32|format"):
        _core.cost_durations(pack, blocks.astype(np.int64), i32(1), i32(1), i32(5))
    with pytest.raises(TypeError):
        random_costs(1).durations()
    for partition, word in (([(0, 3), (4, 8)], "from block 3"), ([(0, 9)], "ends at block 9"), ([(0, 3)], "ends at block 3"),
                            ([(0, 2.5), (2.5, 8)], "2.5"), ([(0, 3, 8)], "last block")):
        with pytest.raises(_core.InvalidValueError, match=word):
            random_costs(1).durations(partition=partition, slicing=[(1, [96])])


def test_partitions_and_counts():
    assert even_partition(MODEL, 3) == [(0, 3), (3, 5), (5, 8)]
    assert even_partition(MODEL, 1) == [(0, 8)] and even_partition(MODEL, 8) == [(i, i + 1) for i in range(8)]
    assert equal_lengths(11, 3) == [4, 4, 3]
    rng = np.random.default_rng(0)
    for _ in range(50):
        cuts = [0, *sorted(rng.choice(np.arange(1, 8), int(rng.integers(0, 7)), replace=False).tolist()), 8]
        partition = list(itertools.pairwise(cuts))
        want = [[sum(b.kind == k for b in MODEL.blocks[a:z]) for k in KINDS] for a, z in partition]
        assert block_counts(MODEL, partition).tolist() == want
    with pytest.raises(ValueError, match="99.*8"):
        even_partition(MODEL, 99)


def test_the_ends_of_a_message_pay_for_the_copies_that_they_make():
    shape, senders, readers = {"partition": [(0, 3), (3, 8)], "slicing": [(2, [3, 5])]}, ("SF", "SB"), ("RF", "RB")
    size = np.array([[6.0, 10.0]]).repeat(2, 0) * 4 * MODEL.n_embd
    through_rings = CostModel.from_measurements(measured(), copy_byte_s=1e-10, model=MODEL, micro_batch=2).durations(**shape)
    assert all(np.array_equal(through_rings[op], 1e-10 * size) for op in (*senders, *readers))
    lent = CostModel.from_measurements(measured(), copy_byte_s=1e-10, lent_byte_s=3e-10, model=MODEL, micro_batch=2)
    assert all(np.array_equal(lent.durations(**shape)[op], 3e-10 * size) for op in readers)
    assert not any(op in lent.durations(**shape) for op in senders)
    assert np.array_equal(lent.durations(**shape)["AR"], through_rings["AR"])
    assert through_rings["AR"] == pytest.approx(1e-10 * 4 * MODEL.n_embd * (16 + MODEL.vocab_size))
    with pytest.raises(ValueError, match="lent_byte_s"):
        CostModel.from_measurements(measured(), lent_byte_s=-1.0)


# ---- as a value ----

@pytest.mark.filterwarnings("ignore:.*negative slope")
def test_noise_in_the_context_never_makes_a_slice_cost_less_than_nothing():
    rng = np.random.default_rng(1)
    for _ in range(100):
        samples = {phase: [] for phase in "FIW"}
        for cut in _slicings(48):
            context = 0
            for length in cut:
                for phase, rows in samples.items():
                    noise = math.exp(min(6.0, 0.5 * abs(rng.standard_cauchy()))) if rng.random() < 0.3 else 1.0
                    rows.append((length, length, context if phase != "W" else 0, 3e-6 * (1 + length / 8) * noise))
                context += length
        ffn = {phase: [row for row in rows if row[2] == 0] for phase, rows in samples.items()}
        costs = CostModel.from_measurements({"attention": samples, "ffn": ffn}, smooth=True)
        for phase in ("fwd", "bwd", "both"):
            cost = costs.slice_cost(48, 1, phase)
            S = np.arange(1, 48)
            for C in (np.ones_like(S), 48 - S):
                assert (cost["G1"][1:48] + cost["a2"] * C + cost["a3"] * S * C > 0).all()


def test_a_context_that_saves_more_than_the_slice_costs_leaves_nothing():
    """A fit of noisy samples may say so."""
    curves = random_costs(3).curves | {("attention", "F"): Curve((0.0, 1.0), (0.0, 1e-6), 0.0, -1.0)}
    costs = CostModel(curves, source="samples", overhead_s=0.0, model=MODEL)
    assert (costs.slice_cost(96, 8, "fwd")["G1"] == 0.0).all()


def test_a_profile_sees_through_noise_to_what_the_context_costs() -> None:
    """The kernels' own form, the five cuts that a short profile has time for, 5 % of noise on every sample."""
    tokens = 2048

    def forward(S: float, C: float) -> float:
        return 1e-3 + 1e-4 * S + 1e-7 * (S * C + S * S / 2)

    def backward(S: float, C: float) -> float:
        return 1e-3 + 9e-5 * S + 2.6e-7 * (S * C + S * S / 2) + 2e-6 * C

    true = {"F": forward, "I": backward}
    errors = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        samples: dict[str, list[tuple[float, ...]]] = {"F": [], "I": []}
        for cut in _slicings(tokens)[:5]:
            context = 0
            for S in cut:
                for phase, seconds in true.items():
                    samples[phase].append((S, S, context, seconds(S, context) * math.exp(0.05 * rng.standard_normal())))
                context += S
        ffn = {"F": [(S, S, 0, 1e-4 * S) for S in (8, 64, 2048)]}
        costs = CostModel.from_measurements({"attention": samples, "ffn": ffn}, smooth=True)
        errors += [abs(costs.block_seconds("attention", phase, S, C) / true[phase](S, C) - 1) for phase in true
                   for S, C in ((64, 0), (64, 1000), (64, 1900), (200, 100), (200, 1800), (500, 500), (128, 512))]
    assert np.mean(errors) < 0.03 and max(errors) < 0.15, (np.mean(errors), max(errors))


def test_samples_beyond_any_clock_are_refused():
    with pytest.raises(ValueError, match=r"samples: sample 1 took 1e\+305 s: at most 1e\+09 would be right"):
        CostModel.from_samples([(8, 0, 1e-3), (16, 0, 1e305), (8, 8, 1e-3)])


@pytest.mark.parametrize(("args", "words"), [((-1, 0), "S is -1: .* from 0 on"), ((8, [0, float("nan")]), "C is nan"),
                                             ((8, 0, "both", 0), "b is 0: .* from 1 on")])
def test_a_slice_that_has_no_time_is_named(args, words):
    costs = CostModel.from_samples([(8, 0, 1e-3), (16, 0, 2e-3)])
    with pytest.raises(ValueError, match=f"^{words}"):
        costs.time(*args)


def test_a_slice_of_two_billion_tokens_costs_what_the_half_of_it_does_twice():
    """Of 2^31 the message took negative seconds and AR was refused, of 2^32 both took none; and memory was said to be 4 % less."""
    model = GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=1 << 16)
    costs, asked = CostModel.analytic(model, CLUSTER), dict(seq_len=1 << 16, planner="uniform", stages=2, executable=False)
    half, *more = (plan(model, CLUSTER, costs=costs, memory_bytes=1e15, batch=batch, slicing=[(batch, [1 << 16])], **asked)
                   for batch in (1 << 14, 1 << 15, 1 << 16))
    for factor, found in zip((2, 4), more, strict=True):
        assert found.step_time_s == pytest.approx(factor * half.step_time_s, rel=1e-3)
        assert found.peak_memory_bytes == pytest.approx([factor * size for size in half.peak_memory_bytes], rel=1e-3)
