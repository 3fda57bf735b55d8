"""Which files `terapipe simulate` and `terapipe view` take for programs, and what they say of others."""
import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import cli
from terapipe_c.schedule import Timeline


def seconds(capsys, path, *words):
    assert cli.main(["simulate", str(path), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["makespan_s"]


def test_a_program_is_read_from_text_and_csv_of_any_system(capsys, tmp_path):
    program = tp.schedules.one_f_one_b(2, 3)
    for name, text in (("p.txt", str(program)), ("p", str(program)), ("p.csv", program.to_csv()), ("P.CSV", program.to_csv())):
        for end in ("\n", "\r\n"):
            (tmp_path / name).write_bytes(text.replace("\n", end).encode())
            assert seconds(capsys, tmp_path / name) == program.simulate({"F": 1.0, "B": 2.0}).makespan_s, (name, end)
    plain = seconds(capsys, tmp_path / "p", "--fwd", "3", "--bwd", "5", "--comm", "0.25")
    assert plain == program.simulate({"F": 3.0, "B": 5.0}, comm_s=0.25).makespan_s


@pytest.mark.parametrize("name, text, words", [
    ("p.txt", b"0F0.0 0F0.0 0B0.0", "p.txt is neither a plan nor a program: "),       # it can be read, but not be run
    ("p.txt", b"0F0,0B0", "p.txt is neither a plan nor a program: "),                  # of CSV, by another name
    ("p.csv", b"what,is\nthis", "p.csv is neither a plan nor a program: "),
    ("p.txt", b"\xff\xfe", "p.txt is neither a plan nor a program: byte 0 is no UTF-8"),
    ("p.txt", b"", "p.txt is neither a plan nor a program: "),
    ("p.json", b'  {"format": "other"}', "p.json is not a plan"),
])
def test_what_is_no_program_is_named_once(capsys, tmp_path, name, text, words):
    (tmp_path / name).write_bytes(text)
    for command in ("simulate", "view"):
        assert cli.main([command, str(tmp_path / name)]) == 2
        told = capsys.readouterr()
        assert words in told.err and told.err.count(name) == 1 and told.out == "", told.err


@pytest.mark.parametrize("seconds", ["1e251", "1e302", "1e307"])
def test_what_lasts_longer_than_numbers_go_is_not_drawn_as_no_json(capsys, tmp_path, seconds):
    """In microseconds it was `inf` in a trace, which no program reads, Perfetto the last."""
    for flag in ("--trace", "--html"):
        assert cli.main(["simulate", "--schedule", "gpipe", "--ranks", "2", "--micro-batches", "2", "--fwd", seconds, "--bwd", "1",
                         flag, str(tmp_path / "t")]) == 2
        told = capsys.readouterr().err
        assert "the timeline lasts " in told and "s: at most 1e+250 s would be right" in told and not list(tmp_path.iterdir())
    for few in ("1e248", "5e-324"):
        assert cli.main(["simulate", "--schedule", "gpipe", "--fwd", few, "--bwd", few, "--trace", str(tmp_path / "t")]) == 0
        json.loads((tmp_path / "t").read_text(), parse_constant=pytest.fail)


def test_no_row_of_a_sweep_or_a_comparison_has_a_number_that_json_has_not(capsys, tmp_path):
    """NaN in a grid came into its row, and a plan of next to no seconds, of infinitely many tokens a second, could not be saved."""
    for values in ("NaN", "1e999", "[1,-Infinity]"):
        assert cli.main(["sweep", "--grid", f"time_limit_s=1,{values}", "--out", str(tmp_path / "rows")]) == 2
        assert "a value of time_limit_s is infinite, or no number: finite ones, or null, would be right" in capsys.readouterr().err
    plan = tp.plan(tp.GPTConfig(2, 1, 8, 16, 8), tp.Cluster(1), 2, 8, planner="uniform", stages=1)
    for field, value, words in (("busy_s", [math.inf], r"busy_s\[0\] is inf"), ("step_time_s", -math.inf, "step_time_s is -inf"),
                                ("bubbles", {"comm": math.nan}, "bubbles.*comm.* is nan")):
        with pytest.raises(ValueError, match=f"{words}: a finite number would be right"):
            dataclasses.replace(plan, **{field: value}).save(tmp_path / "p")
    assert not list(tmp_path.iterdir())
    table = np.full((9, 9), 1e-309)
    model, costs = tp.GPTConfig(2, 1, 8, 16, 8), tp.CostModel.from_table(table, table, granularity=1)
    found = tp.compare(model, tp.Cluster(1, link_latency_s=0.0), 2, 8, costs, planners=["uniform"], stages=1)
    (row,) = json.loads(found.to_json(tmp_path / "c.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert row["step_time_s"] > 0 and row["tokens_per_s"] is None


@pytest.mark.parametrize("words, held", [
    ("1f1b --ranks 4", [4, 3, 2, 1]),
    ("gpipe --ranks 2 --micro-batches 5 --slices 3", [5, 5]),
    ("seq1f1b --ranks 4 --slices 3", [2, 5 / 3, 4 / 3, 1]),        # ranks - 1 slices more than a micro-batch's
    ("interleaved --ranks 4", [11, 9, 7, 5]),                      # 2 stages a rank: Megatron's warm-up and one
    ("zb-h2 --ranks 4", [7, 7, 7, 7]),
    ("sliced-1f1b --ranks 3", [3, 2, 1]),
])  # fmt: skip
def test_of_a_schedule_the_activations_in_flight_are_told(capsys, words, held):
    assert cli.main(["simulate", "--schedule", *words.split(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["peak_memory_bytes"] is None and told["peak_activations"] == pytest.approx(held, abs=1e-9)


def test_activations_of_a_program_in_ragged_slices_are_told_and_of_a_plan_its_bytes(capsys, tmp_path):
    slices = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]      # their least common multiple is 3e14
    (tmp_path / "p").write_text(str(tp.schedules.one_f_one_b(3, len(slices), slices).lower()))
    assert cli.main(["simulate", str(tmp_path / "p"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_activations"] == [3.0, 2.0, 1.0]
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=16, block_size=8)
    tp.plan(model, tp.Cluster(2), batch=2, seq_len=8, planner="uniform", stages=2).save(tmp_path / "plan.json")
    assert cli.main(["simulate", str(tmp_path / "plan.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "peak_activations" not in told and min(told["peak_memory_bytes"]) > 0


@pytest.mark.parametrize("words, by, said", [
    ("simulate --shedule gpipe", "terapipe simulate", "--shedule; for --shedule --schedule would be right"),
    ("plan --layers=3 --x", "terapipe plan", "--layers=3 --x; for --layers --n-layer would be right"),
    ("doctor ~~", "terapipe doctor", "~~"),
    ("plan --hidden-size 8", "terapipe plan", "--hidden-size 8; for --hidden-size --n-embd would be right"),     # Megatron-LM's
    ("plan --micro-batch-size=1", "terapipe plan",
     "--micro-batch-size=1; a plan chooses its micro-batches, --slicing gives them"),
    ("plan --tensor-model-parallel-size 2", "terapipe plan",
     "--tensor-model-parallel-size 2; there is no tensor parallelism: --stages and --data-parallel share the work"),
    ("plan --train-iters 9", "terapipe plan", "--train-iters 9"),       # a plan has no steps
    ("plan --batch_size=8", "terapipe plan", "--batch_size=8; for --batch_size --batch would be right"),     # nanoGPT's
    ("plan --num-layers-per-virtual-pipeline-stage 2", "terapipe plan",
     "--num-layers-per-virtual-pipeline-stage 2; say by --chunks how many stages a rank has"),
    ("plan --no-shard-optimizer", "terapipe plan",      # which were told that the opposite would be right
     "--no-shard-optimizer; for --no-shard-optimizer leaving --shard-optimizer out would be right"),
    ("plan --bias", "terapipe plan", "--bias; for --bias leaving --no-bias out would be right"),
    ("plan --tied", "terapipe plan", "--tied; for --tied leaving --untied out would be right"),
    ("plan --nobias", "terapipe plan", "--nobias; for --nobias --no-bias would be right"),
    ("plan --optimizer adam", "terapipe plan", "--optimizer adam; the optimizer is AdamW"),     # and not --shard-optimizer
    ("plan --zero-stage=1", "terapipe plan", "--zero-stage=1; ZeRO's first stage is --shard-optimizer, and there are no others"),
    ("plan --overlap-grad-reduce", "terapipe plan",
     "--overlap-grad-reduce; for --overlap-grad-reduce --sums-beside would be right"),
    ("plan --pp 2", "terapipe plan", "--pp 2"),     # which was told that --help would be right
    ("--shedule simulate --schedule gpipe", "terapipe", "--shedule"),
    ("--shedule", "terapipe", "--shedule"),     # before what is missing (a command, --out) and a number that is none
    ("--shedule train", "terapipe", "--shedule"),
    ("train --batch-size 8 --bar=1", "terapipe train", "--batch-size --bar=1; for --batch-size --batch would be right"),
    ("resume --foo -1 --lr -0.1", "terapipe resume", "--foo"),
    ("plan --batch x --foo", "terapipe plan", "--foo"),
])  # fmt: skip
def test_a_flag_that_a_command_does_not_have_is_told_by_the_command(capsys, words, by, said):
    """Its --help lists its flags; that of terapipe, to which argparse hands what is left, lists commands alone."""
    assert cli.main(words.split()) == 2
    told = capsys.readouterr().err
    assert told == f"usage: {by} [options]; {by} --help lists them\n{by}: error: unrecognized arguments: {said}\n"


@pytest.mark.parametrize("words, said", [
    ("plan --shard-optimizer=false", "--shard-optimizer is given the value 'false' and takes none: leaving it out would be right"),
    ("plan --shard-optimizer false", "--shard-optimizer is given the value 'false' and takes none: leaving it out would be right"),
    ("plan --shard=No", "--shard-optimizer is given the value 'No' and takes none: leaving it out would be right"),
    ("plan --no-bias=1", "--no-bias is given the value '1' and takes none: --no-bias alone would be right"),
    ("plan --untied=it's", "--untied is given the value \"it's\" and takes none: --untied alone, or leaving it out would be right"),
    ("train p.json --out o --fast off", "--fast is given the value 'off' and takes none: leaving it out would be right"),
    ("plan --n-layer 4 false", "unrecognized arguments: false"),
    ("plan --batch 1e3", "--batch is '1e3': a whole number would be right"),
    ("plan --batch", "--batch has too few values: one would be right"),
    ("plan --peak-flops 1T", "--peak-flops is '1T': a number would be right"),
    ("train p.json --out o --betas 0.9", "--betas has too few values: 2 would be right"),
    ("plan --recompute all", "--recompute is 'all': one of ffn, attention, full would be right"),
    ("train p.json --out o --gpus", "--gpus has too few values: at least one would be right"),
    ("plan --executable maybe", "argument --executable: 'maybe' is neither yes nor no"),
    ("sweep --out o --grid batch=1,2 shard_optimizer=yes,no stages=2", "unrecognized arguments: shard_optimizer=yes,no stages=2; "
     "--grid again before each would be right: --grid shard_optimizer=yes,no"),
])  # fmt: skip
def test_what_is_wrong_of_a_value_is_said_with_what_would_be_right(capsys, words, said):
    """argparse: "ignored explicit argument 'false'", "invalid int value: '1e3'"."""
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err.splitlines()[1].partition("error: ")[2] == said


def test_timelines_are_equal_by_value():
    """A copy, or what a notebook's workers send back, was unequal to what it was made from."""
    program = tp.schedules.one_f_one_b(2, 3).lower()
    simulated = program.simulate({"F": 1.0, "B": 2.0}, 0.5, 4.0)
    measured = Timeline.from_intervals([(0, "F", 0, 0, 0, 0.0, 1.0), (1, "F", 1, 0, 0, 1.5, 2.0)])
    for line in (simulated, measured):
        for same in (copy.copy(line), copy.deepcopy(line), pickle.loads(pickle.dumps(line))):
            assert same == line and not same != line and hash(same) == hash(line)
    assert program.simulate({"F": 1.0, "B": 2.0}, 0.5, 4.0) == simulated != measured != "a timeline"
    for other in (program.simulate({"F": 1.0, "B": 2.0}, 0.5, 5.0), program.simulate({"F": 2.0, "B": 1.0}, 0.5, 4.0),
                  tp.schedules.gpipe(2, 3).lower().simulate({"F": 1.0, "B": 2.0}, 0.5, 4.0)):
        assert other != simulated
    later = Timeline.from_intervals([(0, "F", 0, 0, 0, 0.0, 1.0), (1, "F", 1, 1, 0, 1.5, 2.0)])
    assert later != measured and len({simulated, copy.copy(simulated), measured, later}) == 3
