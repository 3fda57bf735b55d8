"""Profiling, whatever the clock says: what is measured and planned on, what is refused, what ends it, what samples become."""
import math
import os
import signal
import threading
import time

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import CostModel, _core, profiling
from terapipe_c.fit import _share_of_context, fit_and_judge, fit_line, fit_passes, refuse_negative
from terapipe_c.profiling import (
    _head_slicing,
    _lengths,
    _medians,
    _quartile,
    _slicings,
    head_work,
    spread,
    steadied,
    weight_groups,
)

MODEL = tp.GPTConfig(n_layer=3, n_head=2, n_embd=64, vocab_size=97, block_size=256)


def test_a_plan_on_it_runs():
    measured = tp.profile(MODEL, micro_batch=2, seq_len=256, budget_s=1)
    plan = tp.plan(MODEL, tp.Cluster.local(), batch=2, seq_len=256, costs=measured, stages=2)
    assert plan.step_time_s > 0 and plan.lower_bound_s <= plan.step_time_s * (1 + 1e-9)
    data = (np.arange(5000) % 97).astype(np.int32)
    report = tp.launch(plan, data, 3, processes=False, progress=False).wait().report()
    assert report.predicted_step_time_s == plan.step_time_s and report.step_time_s > 0
    other = tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=97, block_size=256)
    with pytest.raises(ValueError, match="n_embd = 64"):
        tp.plan(other, tp.Cluster.local(), batch=2, seq_len=256, costs=measured)


def test_what_noise_would_make_negative_is_not() -> None:
    """A gradient of the head's weight, a byte of a message, a slice of several sequences or after much context."""
    assert fit_passes(np.array([(10, 0, 10), (10, 5, 9), (20, 0, 20), (20, 10, 18.0)]))[2] == 0
    assert fit_line([(1.0, 2.0), (2.0, 1.0)], "x") == pytest.approx((1.2, 0.0))
    a = np.eye(4) * -0.5                                       # a1: with b sequences of S tokens, as slow as 1 + b S / 100
    assert _share_of_context((0.0, 100.0), (1.0, 2.0), 0.0, a[1], 3, 4) == pytest.approx(0.9 * 1.08 / 4)
    assert _share_of_context((0.0, 100.0), (1.0, 2.0), 0.0, a[2], 11, 1) == pytest.approx(0.9 * 1.01 / 5)
    bent = (0.0, 30.0, 60.0), (4.0, 4.0, 40.0)                 # least for its context at 30 sequences of a token after 3 others
    assert _share_of_context(*bent, 0.0, a[2], 4, 1000) == pytest.approx(0.9 * 4 / (30 * 0.5 * 3))
    assert _share_of_context((0.0, 10.0), (1.0, 2.0), 0.0, a[2], 4, 1000) == pytest.approx(0.9 * 101 / (1000 * 0.5 * 3))


def test_what_is_left_of_a_fit_without_its_negative_part_is_fitted_again() -> None:
    """By least relative squares: 10 rows in 10 s and in 9; one unit in 1 s, two in 4."""
    passes = np.array([(10, 0, 10), (10, 5, 9), (20, 0, 20), (20, 10, 18.0)])
    assert fit_passes(passes) == pytest.approx((38 / 9 / (362 / 81), 0, 0))
    assert fit_line([(1.0, 1.0), (2.0, 4.0)], "x") == pytest.approx((0.0, 1.2))
    context = np.array([(S, S, C, 1e-3 * S + 1e-4 * C - 2e-8 * (S * C + S * S / 2))
                        for S in (8, 32, 128) for C in (0, 64, 256, 512)])
    curve, _ = fit_and_judge(context, "x", smooth=True)
    assert curve.a3 == curve.pair_s == 0 and curve.a2 == pytest.approx(1e-4, rel=0.05)


def test_a_step_where_the_context_begins_is_no_error_of_what_has_none() -> None:
    samples = np.array([(S, S, C, 1e-3 * S + (C > 0) * (5e-3 + 1e-5 * C)) for S in (8, 16, 32, 64, 128, 256) for C in (0, 64, 128)])
    curve, errors = fit_and_judge(samples, "x")
    assert curve.a0 == pytest.approx(5e-3) and len(errors) >= 4 and errors.max() < 1e-9


def test_a_slice_is_looked_at_behind_the_longest_context_too() -> None:
    seconds = np.array([0.0, 1.0, 2.0, 3.0])
    refuse_negative("", seconds, -0.4, 0.0, 2, 8)
    with pytest.raises(ValueError, match=r"costs: a slice of 8 tokens of 2 sequences after 16 takes -0\.2 s"):
        refuse_negative("", seconds, -0.6, 0.0, 2, 8)


def test_what_the_head_adds_to_an_update_is_not_the_rows_that_wait_for_it(monkeypatch) -> None:
    """Those are charged by head_pass: 40 rows of a tile that costs at least 64, and 100 of another."""
    def measured(sampler):
        sampler.head_pass = 1e-5, 64.0, 2e-6
        return {kind: {phase: [(8, 8, 0, 1e-3)] for phase in "FIW"} for kind in ("attention", "ffn")}

    def head(sampler, *_):
        sampler.overheads.append(1e-6)
        sampler.updates[True] += [(2000, 2000 * 1e-9 + (64 + 100) * 2e-6 + extra, [40, 0, 100]) for extra in (3e-3, 3e-3, 9e-3)]

    monkeypatch.setattr(profiling, "_measure_head", head)
    monkeypatch.setattr(profiling, "_measure_layers", lambda sampler, *_: sampler.updates[False].append((1000, 1000 * 1e-9, [])))
    monkeypatch.setattr(profiling._Sampler, "measured", measured)
    looks = [(24e-6, 3e-9, 2e-10), (2e-7, 1e-9, 4e-10), (3e-7, 2e-9, 3e-10)]
    monkeypatch.setattr(_core, "message_time", lambda *_: looks.pop(0))
    costs = tp.profile(MODEL)
    assert costs.optimizer_param_s == pytest.approx(1e-9) and costs.optimizer_head_s == pytest.approx(3e-3)
    # two threads on one core, at the first look, are no message's latency
    assert (costs.latency_s, costs.copy_byte_s, costs.lent_byte_s) == (3e-7, 2e-9, 3e-10) and costs.byte_s == 0 and not looks


def test_a_rank_swaps_at_the_bytes_of_a_round_there_and_back(monkeypatch) -> None:
    rounds = np.array([[9.0, 9.0], [3.0, 1.0], [2.0, 2.0], [1.0, 1.0]])                     # the first finds no pages yet
    monkeypatch.setattr(_core, "store_time", lambda folder, size, count: rounds)
    assert profiling.swap_bandwidth("x", 2, 1000) == 2 * 1000 / 4.0


@pytest.mark.filterwarnings("ignore:.*the fit of t_ctx")
def test_only_a_gradient_that_is_pulled_may_fall_with_the_context() -> None:
    samples = np.array([(S, S, C, 1.0 + 0.01 * S - 0.001 * C) for S in (8, 16, 32, 64) for C in (0, 8, 16, 64, 128)])
    assert fit_and_judge(samples, "x", signed=True)[0].a2 == pytest.approx(-0.001)
    assert fit_and_judge(samples, "x", signed=False)[0].a2 == 0.0


def test_a_weight_gradient_of_several_slices_is_shared_out_by_their_rows() -> None:
    sampler = profiling._Sampler(1, 1)                         # W of slice 1 makes 32 of the 56 rows of slices 1 and 2
    sampler._keep(MODEL, [(1, [200, 40, 16])], [("F", 2, 0, 0, 0.0, 1.0), ("W", 2, 0, 1, 1.0, 5.0)], {"ffn"})
    assert [(key[3], seconds) for key, _, seconds in sampler.samples] == [(16, 4.0 * 16 / 32), (40, 4.0 * 40 / 32)]


@pytest.mark.filterwarnings("ignore:.*the fit of t_ctx")  # a few noisy samples
@pytest.mark.parametrize("options", [dict(seq_len=1), dict(seq_len=2), dict(seq_len=7), dict(seq_len=17, micro_batch=3),
                                     dict(seq_len=48, threads=2, ranks=1), dict(seq_len=64, ranks=3)], ids=str)
def test_the_smallest_models_and_shortest_sequences_are_measured(options):
    model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=5, block_size=64, bias=False, tie_weights=False)
    costs = tp.profile(model, budget_s=0.1, **options)
    times = costs.time(np.arange(1, options["seq_len"] + 1))
    assert np.isfinite(times).all() and (np.asarray(times) > 0).all()
    assert tp.plan(model, tp.Cluster.local(), batch=3, seq_len=options["seq_len"], costs=costs, stages=2).step_time_s > 0


def test_the_budget_bounds_it():
    """Twelve layers of a larger model in the time for a tiny one: no more than a generous multiple of what was allowed."""
    model = tp.GPTConfig(n_layer=12, n_head=4, n_embd=256, vocab_size=1000, block_size=512)
    begin = time.process_time()
    tp.profile(model, budget_s=0.5, ranks=1)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(("word", "options"), [
    ("backend is 'gpu'", dict(backend="gpu")), ("seq_len is 257.*block_size = 256", dict(seq_len=257)),
    ("seq_len", dict(seq_len=0)), ("micro_batch", dict(micro_batch=0)), ("threads", dict(threads=0)),
    ("threads", dict(threads=1.5)), ("ranks", dict(ranks=0)),
    ("budget_s is 0", dict(budget_s=0)), ("budget_s is nan", dict(budget_s=float("nan"))), ("budget_s", dict(budget_s=-1.0)),
    ("budget_s", dict(budget_s="long"))], ids=str)  # fmt: skip
def test_bad_requests_are_refused(word, options):
    with pytest.raises((ValueError, TypeError), match=word) as caught:
        tp.profile(MODEL, **options)
    assert isinstance(caught.value, tp.Error)


def test_ctrl_c_ends_what_measures(monkeypatch):
    """Not only the call: its ranks would measure on for the rest of the budget, and the end of Python would wait for them."""
    runs, running = [], []

    def run(self, tokens, **options):
        runs.append(None)
        running.append(self)
        try:
            if len(runs) == 8:                          # of a rank that has a hundred more to do
                os.kill(os.getpid(), signal.SIGINT)
            return real(self, tokens, **options)
        finally:
            running.remove(self)

    real = profiling.RankEngine.run
    monkeypatch.setattr(profiling.RankEngine, "run", run)
    monkeypatch.setattr(profiling, "MOST_REPEATS", 100000)
    with pytest.raises(KeyboardInterrupt):
        tp.profile(MODEL, budget_s=120, ranks=2)
    assert len(runs) >= 8 and not running
    assert tp.profile(MODEL, seq_len=16, budget_s=0.1).time(16) > 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_that_fails_while_measuring_is_told_and_ends_the_others(monkeypatch, ranks):
    def run(self, tokens, **options):
        with lock:
            runs.append(None)
            if len(runs) == 3 * ranks:
                raise MemoryError("no more of it")
        return real(self, tokens, **options)

    lock, runs, real = threading.Lock(), [], profiling.RankEngine.run
    monkeypatch.setattr(profiling.RankEngine, "run", run)
    with pytest.raises(MemoryError, match="no more of it"):
        tp.profile(MODEL, budget_s=20, ranks=ranks)


def test_what_is_no_model_is_refused():
    with pytest.raises(tp.Error, match="model"):
        tp.profile("gpt2-124m")


def test_a_machine_that_slows_down_does_not_make_what_ran_then_dear() -> None:
    rng = np.random.default_rng(0)
    true = {key: float(rng.uniform(1e-3, 1e-1)) for key in range(40)}
    speed = [1.0] * 12 + [1.7] * 8
    samples = [(key, window, true[key] * speed[window] * float(rng.uniform(1.0, 1.05)))
               for window in range(20) for key in rng.choice(40, 6, replace=False).tolist()]  # fmt: skip
    found = steadied(samples)
    assert set(found) == {key for key, _, _ in samples}
    level = 1.025 * 1.7 ** 0.3      # the middle half of the windows: 7 parts of 10 at full speed, 3 at the slow one
    assert max(abs(found[key] / true[key] / level - 1.0) for key in found) < 0.1
    raw = {key: float(np.median([s for k, _, s in samples if k == key])) for key in found}
    assert max(abs(raw[key] / true[key] - 1.025) for key in found) > 0.5     # what it is there for


def test_noise_does_not_make_a_longer_slice_cheaper_or_less_efficient() -> None:
    samples = [(float(n), float(n), 0.0, 1e-3 + 1e-4 * n * (1.4 if n == 32 else 0.8 if n == 48 else 1.0))
               for n in (8, 16, 32, 48, 64, 96)]
    costs = tp.CostModel.from_measurements({kind: {"F": samples} for kind in ("attention", "ffn")}, smooth=True)
    curve = costs.curves["ffn", "F"]
    rates = [s / n for n, s in zip(curve.rows, curve.seconds, strict=True) if n]
    assert all(a >= b - 1e-12 for a, b in zip(rates, rates[1:], strict=False)), rates
    assert all(a <= b for a, b in zip(curve.seconds, curve.seconds[1:], strict=False)), curve.seconds


@pytest.mark.parametrize("cuts", [[[7]], [[300, 200, 100]], [[64] * 16], [[512, 256, 128, 64, 32, 16, 8, 8], [1024]],
                                  [[1] * 50, [50]]])
def test_every_row_of_the_head_is_passed_once_and_flushed_once_or_left(cuts) -> None:
    work, left = head_work(cuts)
    assert set(work) == {(phase, q, s) for phase in "FI" for q, cut in enumerate(cuts) for s in range(len(cut))}
    total = sum(map(sum, cuts))
    assert sum(did.own for did in work.values()) == sum(did.passed for did in work.values()) == total
    assert sum(did.flushed for did in work.values()) + sum(left) == total and max(left) < _core.HEAD_TILE
    for q, cut in enumerate(cuts):
        assert sum(work["F", q, s].own for s in range(len(cut))) == (sum(cut) + 2) // 3
        assert sum(work["F", q, s].passed for s in range(len(cut))) == (sum(cut) + 2) // 3


@pytest.mark.parametrize("cut", [[7], [300, 200, 100], [64] * 16, [512, 256, 128, 64, 32, 16, 8, 8], [1] * 50,
                                 [255, 1, 255, 1, 256], [1, 1, 62, 5], [20, 300, 7, 260, 31]])
def test_every_weight_gradient_is_made_once_and_a_product_is_long_or_of_the_last_two_slices(cut) -> None:
    groups, begin, left = weight_groups(cut), np.cumsum([0, *cut]).tolist(), 0
    assert [length for s in sorted(groups, reverse=True) for length in groups[s][1]] == cut[::-1]
    for s in sorted(groups, reverse=True):
        rows, lengths = groups[s]
        assert s < 2 or _core.WEIGHT_ROWS <= rows < _core.WEIGHT_ROWS + lengths[-1] + _core.ROW_GROUP
        assert lengths == cut[s:s + len(lengths)][::-1] and begin[s] + sum(lengths) == begin[s + len(lengths)]
        assert rows > 0 and (s == 0 or rows % _core.ROW_GROUP == 0)
        left += sum(lengths) - rows
        assert 0 <= left < (_core.ROW_GROUP if s else 1)        # to the next
    above = sum(cut[1:]) // _core.ROW_GROUP * _core.ROW_GROUP - sum(rows for s, (rows, _) in groups.items() if s > 1)
    assert 0 in groups and groups.get(1, (0, []))[0] == above


@pytest.mark.parametrize("bound", [0.0, 12.0, 24.0, 40.0])
@pytest.mark.parametrize("rows", [96, 192, 384, 1024])
def test_a_short_sample_of_the_head_tells_what_long_slices_take(rows, bound) -> None:
    """Where the weights bind up to as many rows as F waits for, and little time was left to measure."""
    for seed in range(15):
        rng = np.random.default_rng(seed)
        cut = _head_slicing(rows)
        seconds = {(phase, cut[s], did): 1e-3 * (max(did.passed, bound) if did.passed else 0.01) + 5e-4 * did.flushed
                   for (phase, _, s), did in head_work([cut])[0].items()}
        noisy = {key: taken * math.exp(0.03 * rng.standard_normal()) for key, taken in seconds.items()}
        layer = {"F": [(n, n, 0, 1e-4 * n) for n in (8, 64)]}
        samples = {"head": spread(noisy)[0], "attention": layer, "ffn": layer}
        costs = CostModel.from_measurements(samples, smooth=True)
        assert costs.block_seconds("head", "F", 1024) == pytest.approx(1.5e-3 * 1024 / 3, rel=0.35)
        assert costs.block_seconds("head", "I", 1024) == pytest.approx(1.5e-3 * 1024 * 2 / 3, rel=0.35)


def test_the_head_s_lumps_are_spread_over_the_slices_that_made_them() -> None:
    """A pass of few rows takes as long as one of `least`, a flush comes now and then, all with 5 % of noise: each slice is charged
    for its own rows, and the update is told what the waiting ones cost it."""
    row, least, flush = 2e-3, 24.0, 1e-3
    for seed in range(20):
        rng = np.random.default_rng(seed)
        seconds = {}
        for cuts in ([[512, 256, 128, 64, 32, 16, 8, 8], [1024]], [[96] * 10 + [64]]):
            for (phase, q, s), did in head_work(cuts)[0].items():
                taken = (row * max(did.passed, least) if did.passed else 1e-5) + flush * did.flushed
                seconds[phase, cuts[q][s], did] = taken * math.exp(0.05 * rng.standard_normal())
        found, (row_s, least_rows, flush_s) = spread(seconds)
        assert row_s == pytest.approx(row, rel=0.2) and flush_s == pytest.approx(flush, rel=0.2) and 10 <= least_rows <= 40
        samples = {"head": found, "attention": {"F": [(n, n, 0, 1e-4 * n) for n in (8, 64)]}, "ffn": {"F": [(8, 8, 0, 1e-4)]}}
        costs = CostModel.from_measurements(samples, smooth=True)
        for S in (64, 96, 128, 300):
            assert costs.block_seconds("head", "F", S) == pytest.approx((row + flush) * S / 3, rel=0.2)
            assert costs.block_seconds("head", "I", S) == pytest.approx((row + flush) * S * 2 / 3, rel=0.2)
        assert costs.block_seconds("head", "I", 8) > 0.7 * row * least


def test_instructions_take_what_was_measured_where_rows_wait() -> None:
    """What a curve spreads, durations gather again: each F and I of the head takes what it took."""
    row, least, flush = 2e-3, 24.0, 1e-3
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=16, block_size=1024)
    cuts = [[96] * 10 + [64], [512, 256, 128, 64, 32, 32], [72, 72, 80, 48, 64, 72, 64, 72, 80, 104, 104, 104, 88], [1024]]
    work, left = head_work(cuts)
    seconds = {(phase, cuts[q][s], did): (row * max(did.passed, least) if did.passed else 1e-5) + flush * did.flushed
               for (phase, q, s), did in work.items()}
    found, waits = spread(seconds)
    layer = {"F": [(n, n, 0, 1e-4 * n) for n in (8, 64)], "W": [(n, n, 0, 2e-4 * n) for n in (8, 64)]}
    samples = {"head": found, "attention": layer, "ffn": layer}
    costs = CostModel.from_measurements(samples, smooth=True, head_pass=waits, model=model)
    d = costs.durations(partition=[(0, 3), (3, 4)], slicing=[(1, cut) for cut in cuts])
    unit = 0
    for q, cut in enumerate(cuts):
        made = weight_groups(cut)
        for s in range(len(cut)):
            for phase in "FI":
                assert d[phase][1, unit] == pytest.approx(seconds[phase, cut[s], work[phase, q, s]], rel=0.1, abs=4e-3)
            assert d["W"][0, unit] == pytest.approx(4e-4 * made.get(s, (0,))[0]) and d["W"][1, unit] == 0.0
            unit += 1
    assert d["OPT"][0, 0] == 0.0 and d["OPT"][1, 0] == pytest.approx(flush * sum(max(n, least) for n in left if n), rel=0.1)


def test_slices_of_all_lengths_are_measured_early_and_late() -> None:
    assert _lengths(100) == [8, 12, 16, 24, 32, 48, 64, 96, 100] and _lengths(9) == [8, 9] and _lengths(8) == _slicings(8)[0] == [8]
    assert _slicings(40) == [[40], [32, 8], [8, 32], [12, 8, 12, 8], [8, 12, 8, 12], [24, 12, 4], [4, 12, 24], [8] * 5,
                             [12, 12, 12, 4], [4, 12, 12, 12]]
    for seq_len in (1, 7, 8, 9, 33, 100, 1000, 1024, 2048, 5000):
        cuts = _slicings(seq_len)
        assert cuts[0] == [seq_len] and all(sum(cut) == seq_len and min(cut) > 0 for cut in cuts)
        assert all(cut[::-1] in cuts for cut in cuts)
        assert len({tuple(cut) for cut in cuts}) == len(cuts)
        often = {n: sum(cut.count(n) for cut in cuts) for n in _lengths(seq_len)}
        likely = [n for n in often if seq_len <= 32 * n <= 10 * seq_len and n != seq_len]
        assert all(often[n] >= 4 for n in likely), often
    assert {rows: _head_slicing(rows) for rows in (1, 15, 16, 47, 48, 100)} == {
        1: [1], 15: [15], 16: [8, 8], 47: [23, 12, 12], 48: [32, 8, 8], 100: [66, 17, 8, 9]}


def test_medians_and_quartiles_are_those_of_their_groups() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 5, 40):
        group, values = rng.integers(0, 3, size), rng.normal(size=size).round(1)
        group[: min(3, size)] = range(min(3, size))
        assert _medians(group, values).tolist() == [np.median(values[group == g]) for g in range(group.max() + 1)]
    assert [_quartile(range(n, 0, -1)) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    logs = rng.normal(size=21)      # one instruction in windows of its own: the mean of the middle half of these
    found = steadied([("F", window, math.exp(log)) for window, log in enumerate(logs)])
    assert found == {"F": pytest.approx(math.exp(np.sort(logs)[5:16].mean()))}
