"""R by curves of its own: what a profile measures of it, what is fitted, what R costs then, and what is never priced at."""
import dataclasses
import itertools
import json

import numpy as np
import pytest
from test_auto_bounds import cut_of, instance, request_of, slicing_of
from test_cost import MODEL, measured, random_costs

import terapipe_c as tp
from terapipe_c import InvalidValueError, profiling
from terapipe_c.cost import REMADE, CostModel, Curve, slicing_arrays
from terapipe_c.fit import fit_remade, least_share
from terapipe_c.planning.bounds import again_bound_s
from terapipe_c.planning.judge import Judge
from terapipe_c.planning.request import RECOMPUTE
from terapipe_c.planning.savings import Savings
from terapipe_c.profiling import APART, NONE, _Again, _dealt, _program, gpu_groups

ATTENTION, FFN, BOTH = ([0, 1, 0, 0], [0, 0, 1, 0], [0, 2, 3, 0])


def with_remade(costs, shares=(0.8, 0.4, 0.6, 0.55)):
    """R as these shares of F's P, in the order of REMADE, and of the context all."""
    curves = {name: costs.curves[name.split(".")[0], "F"] for name in REMADE}
    remade = {name: dataclasses.replace(curve, seconds=tuple(share * y for y in curve.seconds))
              for (name, curve), share in zip(curves.items(), shares, strict=True)}
    return CostModel(costs.curves, source="samples", overhead_s=costs.overhead_s, model=costs.model, remade=remade)


def alone(costs, counts, slicing, kept=0):
    """R of a stage of these blocks, without what an instruction costs besides."""
    return costs.recompute_s(np.array([counts], np.int32), slicing_arrays(slicing), bytes([kept]))[0] - costs.overhead_s


def test_what_was_measured_is_what_it_takes_at_once_and_apart():
    costs = with_remade(random_costs(5))
    slicing, at = [(2, [40, 24, 16]), (2, [40, 24, 16]), (1, [80])], [(40, 0, 2), (24, 40, 2), (16, 64, 2)] * 2 + [(80, 0, 1)]

    def right(name):
        curve = costs.remade[name]
        bare = CostModel({("ffn", "F"): curve}, source="samples")
        return np.array([float(bare.block_seconds("ffn", "F", *where)) for where in at])

    once, apart, ffn, ffn_apart = map(right, REMADE)
    assert len({float(x[0]) for x in (once, apart, ffn, ffn_apart)}) == 4
    assert alone(costs, ATTENTION, slicing) == pytest.approx(once, rel=1e-12)
    assert alone(costs, ATTENTION, slicing, 2) == pytest.approx(apart, rel=1e-12)
    assert alone(costs, BOTH, slicing) == pytest.approx(2 * once + 3 * ffn, rel=1e-12)
    assert alone(costs, BOTH, slicing, 2) == pytest.approx(2 * apart + 3 * ffn_apart, rel=1e-12)
    # FFNs alone are made again slice by slice, where there are slices
    assert alone(costs, FFN, slicing) == pytest.approx([*ffn_apart[:-1], ffn[-1]], rel=1e-12)
    assert (costs.recompute_s(np.array([[1, 0, 0, 1]], np.int32), slicing_arrays(slicing)) == 0).all()


@pytest.mark.parametrize("share, floors", [(1e-9, (3 / 8, 1 / 8, 1 / 4, 1 / 4)), (9.0, (1, 1, 1, 1))])
def test_it_takes_no_less_than_half_of_its_multiply_adds_and_no_more_than_its_forward(share, floors):
    costs = with_remade(random_costs(6), 4 * [share])
    costs = CostModel(costs.curves, source="samples", overhead_s=1e-6,
                      remade={name: Curve(curve.rows, curve.seconds) for name, curve in costs.remade.items()})
    for counts, kept, lengths, floor in ((ATTENTION, 0, [30, 7], floors[0]), (ATTENTION, 2, [30, 7], floors[1]),
                                         (FFN, 0, [64], floors[2]), (FFN, 0, [30, 7], floors[3])):
        forward = [costs.block_seconds("attention" if counts is ATTENTION else "ffn", "F", n, sum(lengths[:i]))
                   for i, n in enumerate(lengths)]
        found = alone(costs, counts, [(1, lengths)], kept)
        if share < 1:
            assert found == pytest.approx(floor * np.array(forward), rel=1e-9)
        else:
            assert (found <= np.array(forward) * (1 + 1e-9)).all() and found[0] == pytest.approx(forward[0], rel=1e-9)


def test_what_was_not_measured_goes_by_the_forward():
    costs = random_costs(7)
    some = CostModel(costs.curves, source="samples", overhead_s=1e-6, remade={"ffn.R": with_remade(costs).remade["ffn.R"]})
    slicing = [(1, [40, 24]), (1, [64])]
    assert (alone(some, ATTENTION, slicing, 2) == alone(costs, ATTENTION, slicing, 2)).all()
    assert (alone(some, FFN, slicing)[:2] == alone(costs, FFN, slicing)[:2]).all()
    assert alone(some, FFN, slicing)[2] == pytest.approx(1.2 * alone(costs, FFN, slicing)[2])


def test_files_know_it_and_those_that_do_not_are_priced_as_ever(tmp_path):
    costs, path = with_remade(random_costs(8)), tmp_path / "costs.json"
    costs.save(path)
    again = CostModel.load(path)
    assert again == costs and hash(again) == hash(costs) and again.remade == costs.remade
    data = json.loads(path.read_text())
    assert data["version"] == 1 and set(data["remade"]) == set(REMADE) and data["curves"] == random_costs(8).to_dict()["curves"]
    del data["remade"]
    assert CostModel.from_dict(data) == random_costs(8) and "remade" not in random_costs(8).to_dict()
    for name, curve, words in (("attention.K", {}, "remade is 'attention.K'"), ("ffn.R", {"rows": [0.0, -1.0]}, "remade ffn.R"),
                               ("ffn.R", {"table": 0}, "remade ffn.R is of table 0: a curve with rows and seconds, or no remade"),
                               ("ffn.R", {"rows": [], "seconds": []}, "remade ffn.R is without rows: a curve with rows")):
        wrong = costs.to_dict()
        wrong["remade"][name] = {**wrong["remade"]["ffn.R"], **curve}
        with pytest.raises(InvalidValueError, match=words):
            CostModel.from_dict(wrong)
    with pytest.raises(InvalidValueError, match="malformed"):
        CostModel.from_dict({**costs.to_dict(), "remade": [1]})
    assert costs.even.remade == costs.halved.remade == costs.remade
    assert set(costs.on("cuda").remade) == set(REMADE) - {"attention.R.apart"}     # which keeps queries, too
    assert costs.on("cpu").remade == costs.remade


def test_what_it_was_measured_at_is_met_and_judged():
    samples = measured()
    for kind, share in (("attention", 0.7), ("ffn", 0.6)):
        samples[kind] |= {"R": [(r, s, c, share * t) for r, s, c, t in samples[kind]["F"] if c == 0],
                          "R.apart": [(r, s, c, 0.5 * t) for r, s, c, t in samples[kind]["F"] if c == 0]}
    costs = CostModel.from_measurements(samples, model=MODEL, smooth=True)
    assert set(costs.remade) == set(REMADE) and set(REMADE) < set(costs.fit_errors)
    for S, b in ((8, 1), (64, 2), (256, 1)):
        assert alone(costs, FFN, [(b, [S])])[0] == pytest.approx(0.6 * costs.block_seconds("ffn", "F", S, 0, b), rel=1e-3)
    for wrong in ({"head": {"R": samples["ffn"]["R"]}}, {"ffn": {"R.kept": samples["ffn"]["R"]}}):
        with pytest.raises(InvalidValueError, match="one of F, I, W, or attention.R"):
            CostModel.from_measurements({**samples, **wrong})


def test_few_and_noisy_samples_tell_a_share_something_a_row_and_something_an_instruction():
    forward = Curve((0.0, 16.0, 64.0, 512.0), (1e-5, 8e-5, 2.4e-4, 1.7e-3), 2e-9, 0.0, 0.0, 1e-8, 2e-9)
    whole = CostModel({("attention", "F"): forward}, source="samples")

    def seconds(S, C):
        base = whole.block_seconds("attention", "F", S, C)
        return base - 0.5 * float(np.interp(S, forward.rows, forward.seconds)) + 1e-7 * S + 2e-6

    for seed in range(5):
        rng, cut = np.random.default_rng(seed), [256, 128, 64, 32, 16, 8, 8]
        samples = np.array([(S, S, C, seconds(S, C) * np.exp(0.03 * rng.standard_normal()))
                            for S, C in zip(cut, [0, *itertools.accumulate(cut[:-1])], strict=True)])
        curve, errors = fit_remade(samples, forward)
        told = CostModel({("attention", "F"): curve}, source="samples")
        for S, C in ((8, 0), (16, 100), (64, 64), (256, 256), (512, 0)):
            assert told.block_seconds("attention", "F", S, C) == pytest.approx(seconds(S, C), rel=0.08)
        assert (errors < 0.1).all() and curve.rows == forward.rows
    # one sample tells a share, noise below the context's part nothing that is below 0
    one, _ = fit_remade(np.array([(64.0, 64, 0, 1e-4)]), dataclasses.replace(forward, pair_s=0.0, a2=0.0, a3=0.0))
    assert min(one.seconds) >= 0 and float(np.interp(64, one.rows, one.seconds)) == pytest.approx(1e-4)
    low, _ = fit_remade(np.array([(64.0, 64, 448, 1e-9), (32.0, 32, 448, 1e-9)]), forward)
    assert low.seconds == (0.0,) * 4


def test_the_least_share_is_one():
    rng, near = np.random.default_rng(4), []
    for _ in range(60):
        context = [float(x) for x in rng.integers(0, 2, 4) * rng.random(4) * 1e-3]
        rows = [np.cumsum(rng.integers(1, 9, 4)) for _ in range(2)]
        whole, part = (Curve((0.0, *map(float, x)), tuple(np.cumsum(rng.random(5)).tolist()), 0.0, *context) for x in rows)
        part = dataclasses.replace(part, seconds=tuple(0.7 * y for y in part.seconds))
        share = least_share(part, whole, 0.1)
        model = CostModel({("ffn", "F"): part, ("ffn", "I"): whole}, source="samples")
        S, C, b = rng.integers(1, 200, 400), rng.integers(0, 50, 400), rng.integers(1, 4, 400)
        less, more = (model.block_seconds("ffn", phase, S, C, b) for phase in "FI")
        near.append(float((np.clip(less, 0.1 * more, more) / more).min()) / share)
        assert 0.1 <= share <= 1 and near[-1] >= 1 - 1e-9
        assert least_share(dataclasses.replace(part, a2=-1.0), dataclasses.replace(whole, a2=-1.0), 0.1) == 0.1
        assert least_share(dataclasses.replace(part, a3=1.0), whole, 0.1) == least_share(part, Curve(), 0.1) == 0.1
    assert min(near) < 1.01                                    # and none much greater would be


@pytest.mark.parametrize("schedule", ["gpipe", "seq1f1b", "zb-h1", "chimera"])
def test_the_judge_in_c_prices_it_as_a_plan_s_timing(schedule):
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=16, vocab_size=32, block_size=64)
    costs = with_remade(CostModel.analytic(model, tp.Cluster(num_devices=2, memory_bytes=1e9)), (0.9, 0.3, 0.7, 0.66))
    for what in ("attention", "ffn", "full"):
        flags = tuple(block.kind in RECOMPUTE[what] for block in model.blocks)
        for at_once in (False, True):
            judge = Judge(model, costs, 2, 1, None, savings=Savings(flags, at_once=at_once))
            for slicing in (((1, (64,)),) * 4, ((1, (16,) * 4),) * 4):
                c = judge.judge(schedule, ((0, 6), (6, 14)), slicing)
                assert c.seconds == pytest.approx(judge.lowered(c).makespan(judge.timing(c)), rel=1e-12)


def test_no_plan_is_faster_than_a_bound_that_counts_it():
    rng, nearest = np.random.default_rng(23), 0.0
    for _ in range(20):
        model, cluster, costs, unit = instance(rng)
        if costs.has_tables:
            continue
        remade = with_remade(costs, rng.uniform(0.1, 1.1, 4)).to_dict()["remade"]
        costs = CostModel.from_dict({**costs.to_dict(), "remade": dict(list(remade.items())[int(rng.integers(3)):])})
        what = str(rng.choice(list(RECOMPUTE)))
        asked = request_of(model, cluster, 2, costs, unit, ranks=(1, 2), chunks=1, replicas=1)
        bounds = again_bound_s(asked, RECOMPUTE[what])
        for ranks, name in itertools.product(asked.ranks, ("1f1b", "gpipe")):
            again = Savings(tuple(block.kind in RECOMPUTE[what] for block in model.blocks), at_once=bool(rng.integers(2)))
            cut = tuple(itertools.pairwise(cut_of(rng, model.num_blocks, ranks)))
            slicing = slicing_of(rng, 2, model.block_size, unit)
            seconds = asked.judge(ranks).judge(name, cut, slicing, 1, again).seconds
            assert bounds[ranks] <= seconds * (1 + 1e-9), (what, name, cut, slicing)
            nearest = max(nearest, bounds[ranks] / seconds)
    assert nearest > 0.8


def test_planners_that_choose_what_to_make_again_are_told_its_price():
    """dawnpiper makes again what costs least for its bytes: with FFNs that cost next to their forward, and attentions little,
    others than where it is the other way round."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=64, block_size=64)
    cluster, made = tp.Cluster(2, memory_bytes=1e12, peak_flops=1e10), []
    for shares in ((0.4, 0.15, 1.0, 1.0), (1.0, 1.0, 0.26, 0.26)):
        costs = with_remade(CostModel.analytic(model, cluster), shares)
        asked = {"batch": 4, "seq_len": 64, "costs": costs, "planner": "dawnpiper", "stages": 2, "schedule": "1f1b"}
        keep = max(tp.plan(model, cluster, **asked).peak_memory_bytes)
        plan = tp.plan(model, cluster, **asked, memory_bytes=int(0.94 * keep))
        made.append({model.blocks[i].kind for i, flag in enumerate(plan.recompute) if flag})
    assert made == [{"attention"}, {"ffn"}]


# ---- what a profile runs ----

@pytest.mark.parametrize("layers", [1, 2])
def test_every_way_has_its_turn_and_other_blocks_are_plain(layers):
    cuts = [(1, [n]) for n in range(11)]
    blocks = {b for b in range(1, 1 + 2 * layers)}
    for repeats in (1, 3, 4, 5, 8, 9, 16, 40):
        runs = _dealt(cuts, repeats, layers)
        if repeats < 8 // layers:                       # noise would be more than what R by F is off
            assert runs == [(cuts, repeats, NONE)]
            continue
        ways = {(b, again.way) for _, _, again in runs for b in again.blocks}
        kinds = {("attention" if b % 2 else "ffn", way) for b, way in ways}
        assert kinds == set(itertools.product(("attention", "ffn"), (APART, "R")))
        assert all(set(again.blocks) < blocks for *_, again in runs)
        assert {b % 2 for *_, again in runs for b in blocks - set(again.blocks)} == {0, 1}
        assert sum(times for _, times, _ in runs) == repeats                                  # no more work but R
        assert all(some == cuts and times >= 2 for some, times, _ in runs)


def test_a_run_makes_again_as_a_stage_does():
    once, apart = (_program(6, [3, 1], _Again((2, 3), way)) for way in ("R", APART))
    assert list(once.remakes_apart()) == [0] * 6 and list(apart.remakes_apart()) == [0, 0, 1, 1, 0, 0]
    assert "2R0.0 3R0.0 2R0.1 3R0.1 2R0.2 3R0.2 5I0.2" in str(once) and "2R0.2 3R0.2 5I0.2" in str(apart)
    assert "R" not in _program(6, [3, 1], NONE).counts
    for program in (once, apart):                      # W of the others wait once, that they may wait
        text = str(program)
        assert text.index("1I0.2") < text.index("1I0.1") < text.index("1W0.2") < text.index("1W0.1") < text.index("1I0.0")
        assert text.index("2W0.2") < text.index("2I0.1")


def test_weight_gradients_of_a_gpu_are_of_whole_groups_beside_blocks_that_are_made_again():
    assert gpu_groups([1000, 600, 448]) == {0: (1024, [1024]), 1: (1024, [1024])}
    assert gpu_groups([16, 48]) == {0: (64, [64])} and gpu_groups([3000]) == {0: (3000, [3000])}


def test_of_blocks_that_are_made_again_only_the_forward_and_r_are_kept():
    sampler = profiling._Sampler(1, 1)
    trace = [(op, stage, 0, s, float(i), i + 0.5) for i, (op, stage, s) in enumerate(
        [("F", 1, 0), ("F", 1, 1), ("F", 2, 0), ("F", 2, 1), ("R", 2, 1), ("I", 2, 1), ("I", 1, 1), ("W", 2, 1), ("W", 1, 0)])]
    sampler._keep(MODEL, [(1, [40, 24])], [("OPT", 0, 0, 0, -1.0, 0.0), *trace], {"attention", "ffn"}, _Again((2,), APART))
    found = {key[:2] for key, *_ in sampler.samples}
    assert found == {("attention", "F"), ("attention", "I"), ("attention", "W"), ("ffn", "F"), ("ffn", APART)}


def test_a_profile_measures_it():
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=31, block_size=64, tie_weights=False)
    sampler = profiling._Sampler(1, 1)
    for cuts, repeats, again in _dealt([(1, cut) for cut in profiling._slicings(64)], 4, 2):
        sampler.run(model, cuts, repeats, {"attention", "ffn"}, again)
    costs = CostModel.from_measurements(sampler.measured(), smooth=True)
    assert set(costs.remade) == set(REMADE) and all(sum(c.seconds) > 0 for c in costs.remade.values())
    for kind, counts in (("attention", ATTENTION), ("ffn", FFN)):
        for kept, slicing in ((0, [(1, [64])]), (2, [(1, [16] * 4)])):
            forward = sum(costs.block_seconds(kind, "F", n, sum(slicing[0][1][:i])) for i, n in enumerate(slicing[0][1]))
            assert 0.1 * forward < alone(costs, counts, slicing, kept).sum() <= forward * (1 + 1e-9)
