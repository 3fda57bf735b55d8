"""Cost models on disk, and printed."""

import itertools
import json
import math

import numpy as np
import pytest
from test_cost import CLUSTER, MODEL, grid, measured, random_costs

import terapipe_c as tp
from terapipe_c import InvalidValueError
from terapipe_c.cost import CostModel, Curve
from terapipe_c.links import Links
from terapipe_c.partition import even_partition, micros_of


@pytest.mark.parametrize("make", [lambda: CostModel.analytic(MODEL, CLUSTER), lambda: random_costs(1),
                                  lambda: CostModel.from_table(np.ones((5, 5)), np.ones((5, 5)), model=MODEL),
                                  lambda: CostModel.from_samples(grid(512, (8, 64, 512), (0, 64))),
                                  lambda: CostModel.from_measurements(measured(), copy_byte_s=1e-10),
                                  lambda: CostModel.from_measurements(measured(), copy_byte_s=1e-10, lent_byte_s=0.0),
                                  lambda: CostModel.from_measurements(measured(), head_pass=(1e-3, 20.0, 5e-4))])
def test_files_give_back_the_same_model(make, tmp_path):
    costs = make()
    path = tmp_path / "costs.json"
    costs.save(path)
    loaded = CostModel.load(path)
    assert loaded == costs and hash(loaded) == hash(costs) and loaded.time(17, 13) == costs.time(17, 13)
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]            # no temporary file stays
    assert "CostModel" in repr(loaded) and "<table" in loaded._repr_html_()
    assert costs != CostModel.from_samples([(8, 0, 1.0)]) and costs != 3


def test_costs_print_what_a_message_costs_and_no_error_that_nobody_measured():
    assert "message: 0 s + 0.1 ns a byte at each end" in repr(CostModel.from_measurements(measured(), copy_byte_s=1e-10))
    lent = CostModel.from_measurements(measured(), comm={"latency_s": 2e-6, "byte_s": 1e-9}, copy_byte_s=1e-10, lent_byte_s=3e-10)
    assert "message: 2 us + 1 ns a byte on the link + 0.3 ns a byte at its reader" in repr(lent) and "held-out" in repr(lent)
    for costs in (CostModel.from_table(np.ones((5, 5)), np.ones((5, 5))), CostModel.from_samples([(8, 0, 1.0)])):
        assert "held-out" not in repr(costs)


def test_foreign_and_broken_files_are_named(tmp_path):
    good = tmp_path / "good.json"
    CostModel.analytic(MODEL, CLUSTER).save(good)
    text = good.read_text()
    for name, content in (("cut.json", text[:200]), ("other.json", '{"format": "x"}'), ("list.json", "[1]"),
                          ("binary.json", b"\xff\xfe\x00"), ("new.json", text.replace('"version": 1', '"version": 99')),
                          ("lost.json", text.replace('"latency_s"', '"latency"')),
                          ("odd.json", text.replace('"attention.F"', '"attention.Z"'))):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=name):
            CostModel.load(path)
    with pytest.raises(FileNotFoundError):
        CostModel.load(tmp_path / "nowhere.json")


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "costs.json"
    costs = CostModel.analytic(MODEL, CLUSTER)
    costs.save(path)
    before = path.read_text()
    broken = CostModel.analytic(MODEL, CLUSTER)
    broken.seq_len = object()                                        # no JSON for that
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("tables", 1, 2, 1), -1.0, r"tables\[1\]\[2, 1\] is -1.0"),
        (("tables", 0, 1, 0), math.nan, r"tables\[0\]\[1, 0\] is nan"),
        (("tables", 0, 3, 0), math.inf, r"tables\[0\]\[3, 0\] is inf"),
        (("tables", 0), [[0.0]], r"tables\[0\] has shape \(1, 1\)"),
        (("curves", "ffn.I", "scale"), -0.25, "curve ffn.I: scale of -0.25"),
        (("curves", "head.F", "seconds"), [0.0, -2.0], "curve head.F: seconds of -2"),
        (("curves", "head.F", "pair_s"), -1.0, "curve head.F: pair_s of -1"),
        (("curves", "head.F", "rows"), [0.0, 10**400], "curve head.F: a curve has a number that is not finite"),
        (("fit_errors", "head.F"), [0.1, -math.inf], "fit_errors of head.F is -inf"),
        (("fit_error",), -0.5, "fit_error is -0.5"),
    ],
)
def test_a_file_is_asked_what_its_makers_were_asked(tmp_path, place, value, words) -> None:
    data = CostModel.from_table(np.ones((4, 4)), np.ones((4, 4))).to_dict()
    data["curves"]["head.F"] |= {"rows": [0.0, 1.0], "seconds": [0.0, 1.0]}
    *way, last = place
    holder = data
    for key in way:
        holder = holder[key]
    holder[last] = value
    (tmp_path / "costs.json").write_text(json.dumps(data))
    with pytest.raises(InvalidValueError, match=f"costs.json is damaged: {words}"):
        CostModel.load(tmp_path / "costs.json")


@pytest.mark.parametrize("field", ["pair_s", "a0", "a2", "scale", "table"])
def test_a_curve_of_a_whole_number_beyond_all_floats_is_refused(field):
    with pytest.raises(InvalidValueError, match="a curve has a number that is not finite"):
        Curve((0.0, 1.0), (0.0, 1.0), **{field: 10**400})


def test_a_curve_of_numpys_numbers_is_saved(tmp_path):
    half = np.float32(0.5)
    curve = Curve((np.float32(1), 2), (half, 1), half, half, half, half, half, np.int64(-1), half)
    costs = CostModel({("attention", "F"): curve, ("ffn", "F"): curve}, source="own")
    costs.save(tmp_path / "c.json")
    assert CostModel.load(tmp_path / "c.json") == costs and hash(costs) == hash(CostModel.load(tmp_path / "c.json"))
    assert type(Curve(table=0.0).table) is int                 # as a program that knows no whole numbers writes it
    with pytest.raises(InvalidValueError, match="a curve's table is 0.5: a whole number"):
        Curve(table=0.5)


@pytest.mark.parametrize("given,words", [
    ({"optimizer": [(-5.0, 1.0)]}, r"optimizer: sample 0 is \(-5\.0, 1\.0\): an amount from 0 on and seconds above 0"),
    ({"comm": [(5.0, 1.0), (6.0, 0.0)]}, r"comm: sample 1 is \(6\.0, 0\.0\): an amount from 0 on and seconds above 0"),
    ({"comm": [(5.0, 1e-200)]}, r"comm: sample 0 took 1e-200 s: at least 1e-100 would be right"),   # whose weight has no square
    ({"comm": [(5.0, math.nan)]}, r"comm: sample 0 is \(5\.0, nan\): finite numbers"),
    ({"samples": [(8, 16, 0, 1.0)]}, r"ffn\.F: sample 0 is of 8 rows, slices of 16 tokens: as many rows as some sequences")])
def test_a_sample_that_is_refused_is_told_with_what_would_be_right(given, words):
    layer = {"attention": {"F": [(8, 8, 0, 1.0)]}, "ffn": {"F": given.pop("samples", [(16, 8, 0, 1.0)])}}
    with pytest.raises(ValueError, match=words):
        CostModel.from_measurements(layer, **given)


def test_analytic_costs_of_a_device_that_only_moves_are_its_bytes():
    """A step of one slice: weights once, and again where their gradients are added to; of its context, keys and values."""
    E, V, rows = 32, 50, 3 * 64
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=E, vocab_size=V, block_size=64)
    costs = CostModel.analytic(model, tp.Cluster(num_devices=1, peak_flops=1e30, memory_bandwidth_Bps=1e9))
    times = costs.durations(partition=[(0, model.num_blocks)], slicing=[(3, [64])], model=model)
    layer = 4 * 12 * E * E                                     # bytes of its matrices
    moved = {"F": 2 * layer + 4 * V * E + rows * E * (12 + 2 * (48 + 64) + 12),
             "I": 2 * layer + 12 * V * E + rows * E * (2 * (64 + 64) + 12),
             "W": 2 * 2 * layer + rows * E * (16 + 2 * (24 + 48) + 8)}
    for phase, size in moved.items():
        assert (float(times[phase].sum()) - costs.overhead_s) * 1e9 == pytest.approx(size, rel=1e-9), phase
    for phase in ("F", "I"):
        assert (costs.time(1, 1000, phase) - costs.time(1, 0, phase)) * 1e9 == pytest.approx(2 * 4 * E * 1000, rel=1e-6)
    for peak, bandwidth in ((6e10, 1e10), (3e12, 2e10)):       # a byte for 150 FLOPs, or one core's share
        named = CostModel.analytic(model, tp.Cluster(num_devices=1, peak_flops=peak, memory_bandwidth_Bps=bandwidth))
        assert CostModel.analytic(model, tp.Cluster(num_devices=1, peak_flops=peak)) == named


def test_costs_of_a_table_alone_are_shown_by_its_longest_slice():
    table = CostModel.from_table(np.ones((5, 5)), np.ones((5, 5)), granularity=2)
    assert [table.block_seconds(kind, phase, 2) for kind in ("attention", "ffn") for phase in "FIW"] == [0.5, 0.25, 0.25] * 2
    assert "a layer, 8 tokens: 1 s forward" in repr(CostModel(table.curves, source="own", tables=table.tables, granularity=2))


@pytest.mark.parametrize("slicing,words", [
    ([(1, [4.5, 3.5])], r"slicing\[0\]'s slice 0 is 4\.5: a whole number"), ([], "slicing is empty: at least one micro-batch"),
    ([(1, [8]), (2, [3 * 10**9])], r"slicing\[1\]'s slice 0 is 3000000000: at most 2147483647"),
    (4, r"^slicing is 4: a list \[\(sequences, \[slice lengths\]\), \.\.\.\] would be right")])
def test_what_durations_are_asked_of_is_named(slicing, words):
    with pytest.raises((InvalidValueError, TypeError), match=words):
        CostModel.analytic(MODEL, CLUSTER).durations(partition=[(0, MODEL.num_blocks)], slicing=slicing)


def test_a_micro_batch_that_is_there_many_times_is_looked_at_once():
    """Planners ask for the seconds of 65536 of them again and again: it took them a tenth of their time."""
    walks = []

    class Lengths(list):
        def __iter__(self):
            walks.append(len(self))
            return super().__iter__()

    assert micros_of([(1, Lengths([8]))] * 100 + [(2, Lengths([3, 5])), (1, [8])]) == ((1, (8,)),) * 100 + ((2, (3, 5)), (1, (8,)))
    assert walks == [1, 2]


def test_a_slice_that_takes_less_than_nothing_is_refused_by_the_name_of_its_file(tmp_path):
    """A fit of each curve may fall with the context; what a planner asks for is their sum, which a plan alone knows."""
    data = CostModel.analytic(MODEL, CLUSTER).to_dict()
    data["curves"]["attention.I"]["a2"] = -1e-9
    path = tmp_path / "few.json"
    path.write_text(json.dumps(data))
    costs = CostModel.load(path)
    tp.plan(MODEL, CLUSTER, batch=2, seq_len=64, costs=costs)       # little enough
    data["curves"]["attention.I"]["a2"] = -1e-3
    path.write_text(json.dumps(data))
    costs = CostModel.load(path)
    for planner in ("auto", "terapipe"):
        with pytest.raises(InvalidValueError, match=r"few\.json: a slice of \d+ tokens of \d sequences after \d+ takes -0\.\d+ s,"):
            tp.plan(MODEL, CLUSTER, batch=2, seq_len=64, costs=costs, planner=planner)
    with pytest.raises(InvalidValueError, match=r"^costs: a slice"):
        tp.planners.slice_tokens(CostModel.from_dict(data), 2, seq_len=64)


def test_what_plans_ask_of_costs_besides_slices():
    """Messages of a device's numbers, exchanges on the link that they take, and updates of the head's stage alone."""
    own = dict(model=MODEL, seq_len=64, micro_batch=2, comm={"latency_s": 1e-5, "byte_s": 1e-9}, head_update_s=0.5,
               overhead_s=0.125)
    costs = CostModel.from_measurements(measured(), head_pass=(1e-3, 20.0, 5e-4), **own)
    assert costs.known_batch == 2 and CostModel.analytic(MODEL, CLUSTER).known_batch >= 1 << 16      # what was measured alone
    assert costs.halved.head_pass == (1e-3, 20.0, 0.0) and costs.even.head_pass is None
    assert costs.message_s(10, 32) == pytest.approx(1e-5 + 1e-9 * 4 * 320)
    assert costs.on("cuda", "bf16").message_s(10, 32) == pytest.approx(1e-5 + 1e-9 * 2 * 320)
    row_s = 1e-9 * 4 * MODEL.n_embd
    assert costs.tied_s(MODEL) == pytest.approx((1e-5, row_s, 1e-5 + row_s * MODEL.vocab_size))
    far = Links((True, True), 1e-3, 1e-6)
    assert costs.tied_s(MODEL, far, (0, 1)) == pytest.approx((1e-3, 1e3 * row_s, 1e-3 + 1e3 * row_s * MODEL.vocab_size))
    cut = even_partition(MODEL, 2)
    update = CostModel.from_measurements(measured(), **own).durations(partition=cut, slicing=[(2, [64])])["OPT"]
    assert update[:, 0] == pytest.approx([0.0, 0.5])
    one, two = (costs.on("cuda", "float32").durations(partition=cut, slicing=[(2, cuts)])["W"] for cuts in ([64], [24, 40]))
    assert two[:, 0] - one[:, 0] == pytest.approx(0.125) and not two[:, 1].any()       # all slices' with the first


def test_a_copy_of_the_model_exchanges_its_own_rows():
    costs = CostModel.analytic(MODEL, CLUSTER)
    both = costs.durations(tp.schedules.chimera(2, 2), slicing=[(1, [96])] * 2)["AR"]
    latency_s, row_s, values_s = costs.tied_s(MODEL)
    assert both == pytest.approx(latency_s + row_s * 96 + values_s)
    one = costs.durations(partition=even_partition(MODEL, 2), slicing=[(1, [96])] * 2)
    assert one["AR"] == pytest.approx(latency_s + row_s * 192 + values_s)
    assert (one["comm.latency"] == costs.latency_s).all()       # a link carries one message at a time


def test_samples_of_which_pairs_leave_nothing_are_read_back(tmp_path):
    """Rounding left less than nothing of them, which a file may not say: the model that was saved could not be loaded."""
    for length, seconds in itertools.product((3, 6, 7, 8, 12, 100), (7e-4, 1e-3, 1.1e-3, 2e-3)):
        costs = CostModel.from_samples([(length, c * length, max(1, 10 * c) * seconds) for c in (0, 1, 4)])
        costs.save(tmp_path / "costs.json")
        assert CostModel.load(tmp_path / "costs.json") == costs
        assert costs.time(length) == pytest.approx(seconds, rel=1e-9)


def test_a_context_that_saves_most_of_a_slice_saves_it_for_planners_and_plans_alike():
    """Attention alone paid for what the context saves, and no more than its own half could go: a slice took 2.5 times its sample,
    which the planners' tables had right and fit_error called met."""
    costs = CostModel.from_samples([(s, c, (1e-3 if c == 0 else 2e-4) * s) for s in (16, 32, 64, 128) for c in (0, 16, 64, 128)])
    table = costs.slice_cost(256)
    for s, c in itertools.product((1, 16, 64, 128), (1, 16, 128)):
        assert costs.time(s, c) == pytest.approx(2e-4 * s, rel=1e-6)
        assert costs.time(s, c) == pytest.approx(table["G1"][s] + table["a2"] * c + table["a3"] * s * c, rel=1e-9)
    assert costs.fit_error < 1e-9 and costs.time(64, 0, "fwd") == pytest.approx(64e-3 / 3)
