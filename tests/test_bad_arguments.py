"""What every public function does with arguments that make no sense: an error of this package that names the argument."""

import itertools
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import devices, zoo
from terapipe_c._files import write_text
from terapipe_c.schedule import INSTRUCTION, OPS
from terapipe_c.sweep import Sweep

WILD = [None, True, -1, 0, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf"), 1e308, "", "abc", b"x", [], [None],
        [[1, 2], [3]], {}, {"a": 1}, object(), 1j, np.array([]), np.array([1, 2, 3]), np.array([1.0, np.nan]), np.array(["a"]),
        np.array([None]), np.ones((2, 2), complex), np.datetime64("2020-01-01"), [10**400], "\0", "\ud800", "x" * 5000]  # fmt: skip
MODEL = tp.GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=11, block_size=8)
CLUSTER = tp.Cluster(num_devices=4)
COSTS = tp.CostModel.analytic(MODEL, CLUSTER)
TABLE = np.triu(np.ones((4, 4)))[::-1].copy()
TOKENS = np.zeros((1, 9), np.int32)
PROGRAM = tp.schedules.gpipe(2, 2)
DATA = np.zeros(100, np.int32)
PLAN = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8, costs=COSTS, planner="uniform", schedule="gpipe", stages=2)
LAYERS = [{"name": "a", "count": 2, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 1.0,
           "strategies": [{"name": "none", "extra_bwd_s": 0.0, "activation_bytes": 1.0}]}]  # fmt: skip
PARAMS = tp.init_params(MODEL)
RUN = tp.launch(PLAN, DATA, 1, processes=False, progress=False).wait()


def _load_saved(**arguments):
    tp.save_checkpoint("saved", MODEL, PARAMS)
    return tp.load_checkpoint("saved", **arguments)


CALLS = {
    "GPTConfig": (tp.GPTConfig, dict(n_layer=1, n_head=2, n_embd=8, vocab_size=11, block_size=8, bias=True, tie_weights=True)),
    "Cluster": (tp.Cluster, dict(num_devices=2, devices_per_node=2, memory_bytes=1e9, link_latency_s=0.0, peak_flops=1e9)),
    "analytic": (tp.CostModel.analytic, dict(model=MODEL, cluster=CLUSTER)),
    "from_table": (tp.CostModel.from_table, dict(fwd=TABLE, bwd=TABLE, granularity=4)),
    "from_samples": (tp.CostModel.from_samples, dict(samples=[(1, 0, 1.0), (2, 0, 2.0)])),
    "durations": (COSTS.durations, dict(program=PROGRAM, model=MODEL, partition=[(0, 2), (2, 4)], slicing=[(1, [8]), (1, [8])])),
    "peak": (devices.get("v100").peak, dict(dtype="fp16")),
    "zoo": (zoo.get, dict(name="bert-340m")),
    "activation_bytes": (zoo.get("bert-340m").blocks[1].activation_bytes, dict(length=8, context=0, micro_batch=1, selective=True)),
    "time": (COSTS.time, dict(S=4, C=4, phase="fwd")),
    "profile": (tp.profile, dict(model=MODEL, micro_batch=1, seq_len=8, backend="cpu", threads=1, budget_s=1e-3)),
    "flops": (MODEL.flops_per_token, dict(seq_len=8)),
    "plan": (tp.plan, dict(model=MODEL, cluster=CLUSTER, batch=2, seq_len=8, costs=COSTS, planner="uniform", schedule="gpipe",
                           stages=2, data_parallel=None, memory_bytes=1e9, granularity=2, partition=[(0, 2), (2, 4)], slicing=2,
                           executable=None, time_limit_s=None, recompute=None)),
    "plan auto": (tp.plan, dict(model=MODEL, cluster=CLUSTER, batch=2, seq_len=8, costs=COSTS, planner="auto", schedule="auto")),
    "makespan": (PROGRAM.makespan, dict(costs={"F": 1.0, "B": 2.0}, comm_s=0.0)),
    "compare": (tp.compare, dict(model=MODEL, cluster=CLUSTER, batch=2, seq_len=8, planners=["uniform"])),
    "load": (tp.Plan.load, dict(path="nowhere")),
    "load_checkpoint": (tp.load_checkpoint, dict(path="nowhere")),
    "save": (PLAN.save, dict(path="/nowhere/plan.json")),
    "simulate": (PROGRAM.simulate, dict(cost={"F": 1.0, "B": 2.0}, comm_s=0.0, activation_bytes=1.0)),
    "instructions": (PROGRAM.instructions, dict(rank=0)),
    "from_intervals": (tp.Timeline.from_intervals, dict(intervals=[(0, "F", 0, 0, 0, 0.0, 1.0)], ranks=1, makespan_s=2.0)),
    "emulate": (tp.emulate, dict(plan=PLAN, costs={"F": 0.0, "I": 0.0, "W": 0.0})),
    "init_params": (tp.init_params, dict(model=MODEL, seed=0)),
    "Dataset": (tp.Dataset, dict(data=DATA, seq_len=8, batch=1, seed=0, split="train", val_fraction=0.1, vocab_size=11)),
    "batch": (tp.Dataset(DATA, 8, 1).batch, dict(step=0)),
    "loss_and_grads": (tp.loss_and_grads, dict(model=MODEL, params=tp.init_params(MODEL), tokens=TOKENS, slicing=[8], stages=1,
                                               threads=1)),
    "dawnpiper": (tp.planners.dawnpiper, dict(nodes=MODEL.nodes(), stages=2, memory_bytes=1e9, schedule="1f1b")),
    "bmpipe": (tp.planners.bmpipe, dict(layers=LAYERS, stages=2, micro_batches=2, memory_bytes=1e9, chunks=1)),
    "slice_tokens": (tp.planners.slice_tokens, dict(t=COSTS, stages=2, seq_len=8, granularity=2, gap=0.0, isa=0)),
    "slice_uneven": (tp.planners.slice_uneven, dict(tables=[TABLE, TABLE], bwd=[TABLE, TABLE], work=0)),
    "slice_bound": (tp.planners.slice_bound, dict(t=TABLE, stages=2, lengths=[1, 2])),
    "slicing_bound": (tp.planners.slicing_bound, dict(model=MODEL, costs=COSTS, partition=[(0, 2), (2, 4)], micro_batches=[1],
                                                      seq_len=8, granularity=2, ranks=2)),
    "max_batch": (tp.max_batch, dict(model=MODEL, stages=2, memory_bytes=1e9, planner="dawnpiper", most=2, seq_len=8)),
    "max_batch uniform": (tp.max_batch, dict(model=MODEL, stages=2, memory_bytes=1e9, planner="uniform", most=2, seq_len=8)),
    "parse": (tp.Program.parse, dict(text=str(PROGRAM))),
    "from_csv": (tp.Program.from_csv, dict(text=PROGRAM.to_csv())),
    "lower": (PROGRAM.lower, dict(tied=True)),
    "save_memory": (PROGRAM.save_memory, dict(recompute=bytes((1, 0)), swap=bytes(2))),
    "balance": (tp.planners.balance, dict(times=[1.0, 2.0], stages=2)),
    "nodes": (MODEL.nodes, dict(costs=COSTS, micro_batch=1, seq_len=8, cluster=CLUSTER)),
    "load_nodes": (tp.planners.load_nodes, dict(path="nowhere")),
    "sliced_1f1b": (tp.schedules.sliced_1f1b, dict(ranks=2, micro_batches=2, split=1)),
    "split": (PROGRAM.split, dict(pending=1)),
    "from_instructions": (tp.Program.from_instructions, dict(ranks=[PROGRAM.instructions(0), PROGRAM.instructions(1)])),
    "from_measurements": (tp.CostModel.from_measurements, dict(samples={})),
    "generate": (tp.generate, dict(params=PARAMS, model=MODEL, prompt=[1, 2], temperature=0.8, top_k=2, seed=0)),
    "export_hf": (tp.export_hf, dict(folder="hf", model=MODEL, params=PARAMS)),
    "import_hf": (tp.import_hf, dict(folder="nowhere")),
    "save_checkpoint": (tp.save_checkpoint, dict(path="saved", model=MODEL, params=PARAMS, optimizer=None, step=1, seed=0,
                                                 data_state={}, hyper={}, keep=1)),
    "some of a checkpoint": (_load_saved, dict(names=None, optimizer=True)),
    "Dataset.save": (tp.Dataset(DATA, 8, 1).save, dict(path="tokens.npy")),
    "check_state": (tp.Dataset(DATA, 8, 1).check_state, dict(state={})),
    "state": (tp.Dataset(DATA, 8, 1).state, dict(step=0)),
    "check_split": (tp.Dataset(DATA, 8, 1).check_split, dict(split="val")),
    "tokenizer": (lambda tokenizer: tp.Dataset(__file__, 8, 1, tokenizer=tokenizer), dict(tokenizer=None)),
    "stdlib_corpus": (tp.stdlib_corpus, dict(path="text.txt", max_bytes=10)),
    "to_svg": (PROGRAM.simulate({"F": 1.0, "B": 2.0}).to_svg, dict(path="line.svg")),
    "emulate for": (tp.emulate, dict(plan=PROGRAM, costs={"F": 0.0, "B": 0.0}, timeout_s=5.0)),
    "block_params": (MODEL.block_params, dict(kind="ffn")),
    "wait": (RUN.wait, dict(timeout_s=1.0)),
    "train": (tp.train, dict(plan=PLAN, data=DATA, steps=0, launcher="torchrun")),
    "launch": (tp.launch, dict(plan=PLAN, data=DATA, steps=0, seed=0, out=None, lr=1e-3, min_lr=1e-4, lr_schedule="cosine",
                               warmup_steps=0, betas=(0.9, 0.95), init={}, backend="cpu", threads_per_rank=1, devices=(0,),
                               resume=True, timeout_s=1.0, engine="a:b", processes=False, progress=False, tokenizer=None)),
}  # fmt: skip
REFUSED = tp.Error, OSError, IndexError


@pytest.mark.parametrize("name", CALLS)
def test_wild_arguments_are_taken_or_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a file called "abc" is a good path
    call, good = CALLS[name]
    for argument, value in itertools.product(good, WILD):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                call(**{**good, argument: value})
            except REFUSED as error:
                assert len(str(error)) < 2000 or isinstance(error, OSError), (argument, value)
            except (ValueError, TypeError) as error:  # of the core's argument parsing: it names what it refuses too
                assert argument in str(error), (argument, value, error)


class OldArray(np.ndarray):
    """As NumPy's own before 2.4: of one element it is a number, with a warning."""

    def __float__(self):
        warnings.warn("Conversion of an array with ndim > 0 to a scalar is deprecated", DeprecationWarning, stacklevel=2)
        return float(self.reshape(-1)[0])


def test_an_array_is_no_number_whatever_the_release_of_numpy():
    with pytest.raises(tp.Error, match=r"memory_bytes is .*Array\(\[8.e\+09\]\): a number would be right"):
        tp.Cluster(2, memory_bytes=np.array([8e9]).view(OldArray))
    for word in (np.array("8"), np.array(b"8"), np.array(True)):      # as "8" and True, which are none either
        with pytest.raises(tp.Error, match=r"memory_bytes is array\(.*\): a number would be right"):
            tp.Cluster(2, memory_bytes=word)
    for number in (np.array(8e9), np.float32(8e9), np.array(8 * 10**9)):
        assert tp.Cluster(2, memory_bytes=number).memory_bytes == 8e9


def test_numbers_that_say_too_much():
    with pytest.raises(ValueError, match=r"granularity is 2\^1328 or more: at most 9223372036854775807"):
        tp.CostModel.from_table(TABLE, TABLE, granularity=10**400)
    with pytest.raises(ValueError, match="memory_bytes is True: a number"):
        tp.Cluster(num_devices=1, memory_bytes=True)
    with pytest.raises(ValueError, match="seed is -1: at least 0"):
        tp.init_params(MODEL, seed=-1)
    with pytest.raises(tp.InvalidValueError, match="stages is 40000 and micro_batches 40000: 1 to 32767 stages"):
        tp.planners.memory_weights(40000)
    with pytest.raises(tp.InvalidValueError, match="has at least 5242880000 instructions: at most 2147483647"):
        tp.schedules.dualpipe_v(20000, 65536)                  # not 117 GiB asked for first
    with pytest.raises(ValueError, match="rank 0 would hold"):
        PROGRAM.simulate({"F": 1.0, "B": 1.0}, activation_bytes=1e300)
    with pytest.raises(TypeError, match="cost"):
        PROGRAM.makespan("")            # is a sequence, of no costs
    with pytest.raises(MemoryError, match="the parameters of GPTConfig.* take [0-9]{15} bytes, which .*: a smaller model would be"):
        tp.init_params(tp.GPTConfig(n_layer=1000, n_head=128, n_embd=1 << 17, vocab_size=50_000, block_size=8))


def test_what_was_measured_is_a_model():
    """Taken as it was, it failed in whoever asked the costs for its n_embd."""
    for model in ("gpt2", 0, {}, tp.GPTConfig, CLUSTER):
        for make in (lambda model: tp.CostModel.from_table(TABLE, TABLE, model=model),
                     lambda model: tp.CostModel.from_samples([(1, 0, 1.0), (2, 0, 2.0)], model=model)):
            with pytest.raises(tp.InvalidTypeError, match="model is .*: a GPTConfig, or None, would be right"):
                make(model)


def test_a_plan_is_no_cost_of_a_program():
    with pytest.raises(tp.InvalidTypeError, match=r"cost is Plan: a dict such as .* would be right"):
        PLAN.program.simulate(PLAN)
    assert PLAN.program.simulate(PLAN.durations).makespan_s > 0


def test_what_no_training_could_begin_with():
    name = "transformer.h.0.mlp.c_fc.bias"
    spoilt = {**PARAMS, name: PARAMS[name].copy()}
    spoilt[name][3] = np.inf
    with pytest.raises(ValueError, match=rf"init: {name}\[3\] is inf: finite parameters would be right"):
        tp.launch(PLAN, DATA, 1, init=spoilt, progress=False)
    for stages in (1, 2):  # it was the loss that was no number, and a smaller lr that would help
        with pytest.raises(ValueError, match=rf"params: {name}\[3\] is inf: finite parameters would be right"):
            tp.loss_and_grads(MODEL, spoilt, TOKENS, stages=stages)
    with pytest.raises(ValueError, match=r"tokens are masked_array\(.*: integers \[batch, T \+ 1\]"):
        tp.loss_and_grads(MODEL, PARAMS, np.ma.masked_equal(TOKENS, TOKENS[0, 0]))


def test_what_is_masked_is_no_number(tmp_path):
    """NumPy reads on below the mask, where anything may lie."""
    name = "transformer.h.0.mlp.c_fc.bias"
    masked = {**PARAMS, name: np.ma.masked_greater(np.arange(len(PARAMS[name]), dtype=np.float32), 2)}
    for what, call in (("init:", lambda: tp.launch(PLAN, DATA, 1, init=masked, progress=False)),
                       ("params:", lambda: tp.loss_and_grads(MODEL, masked, TOKENS)),
                       ("params:", lambda: tp.generate(masked, MODEL, [1])),
                       ("params:", lambda: tp.save_checkpoint(tmp_path / "a", MODEL, masked)),
                       ("parameter", lambda: tp.export_hf(tmp_path / "b", model=MODEL, params=masked))):
        with pytest.raises(tp.InvalidValueError, match=rf"{what} {name}\[3\] is masked: a number, as .filled\(\) puts there"):
            call()
    table = np.ma.array(TABLE, copy=True)
    table[1, 0] = np.ma.masked
    for tables in ((table, TABLE), (TABLE, table)):
        with pytest.raises(tp.InvalidValueError, match=r"(fwd|bwd)\[1, 0\] is masked: finite seconds"):
            tp.CostModel.from_table(*tables)
    with pytest.raises(tp.InvalidValueError, match=r"cost\['F'\]\[0\] is masked"):
        PROGRAM.simulate({"F": np.ma.array([1.0, 2.0], mask=[1, 0]), "B": 1.0})
    unread = np.ma.array(TABLE, mask=np.add.outer(np.arange(len(TABLE)), np.arange(len(TABLE))) >= len(TABLE))
    tables = [tp.CostModel.from_table(fwd, TABLE).slice_cost(24, 8)["table"] for fwd in (unread, TABLE)]
    assert np.array_equal(*tables) and tables[0].any()
    for wrong, why in ((TABLE.astype(str), "numbers"), (TABLE + 5j, "real numbers"), (TABLE > 0, "numbers")):
        with pytest.raises(tp.InvalidTypeError, match=f"fwd is .*: {why} would be right"):
            tp.CostModel.from_table(np.ma.array(wrong, mask=unread.mask), TABLE)


def test_what_generate_refuses():
    for call in (lambda: tp.generate(PARAMS, [1]), lambda: tp.generate(PARAMS, prompt=[1])):
        with pytest.raises(tp.InvalidTypeError, match="model is missing: the GPTConfig that params are of would be right; a check"):
            call()
    with pytest.raises(tp.InvalidTypeError, match="model is 'a': the GPTConfig .* takes prompt alone .and n by name"):
        tp.generate(PARAMS, "a", 3)
    with pytest.raises(tp.InvalidTypeError, match="prompt is None"):
        tp.generate(PARAMS, MODEL)
    for unordered in ({2, 1}, {2: 1}, frozenset([1]), {2: 1}.keys()):
        with pytest.raises(tp.InvalidTypeError, match=r"prompt is .*: text, bytes or a list of tokens would be right"):
            tp.generate(PARAMS, MODEL, unordered)
    with pytest.raises(ValueError, match=r"temperature is nan: a finite number from 0"):
        tp.generate(PARAMS, MODEL, [1], temperature=float("nan"))
    with pytest.raises(ValueError, match="n is 2.5: a whole number"):
        tp.generate(PARAMS, MODEL, [1], n=2.5)
    with pytest.raises(ValueError, match="the prompt's token 1 is 1.5: a whole number"):
        tp.generate(PARAMS, MODEL, [1, 1.5])
    with pytest.raises(ValueError, match=r"params: transformer.wpe.weight is of shape \(9, 8\): \(8, 8\)"):
        tp.generate({**PARAMS, "transformer.wpe.weight": np.zeros((9, 8), np.float32)}, MODEL, [1])
    diverged = {name: value * np.float32(np.nan) for name, value in PARAMS.items()}
    with pytest.raises(ValueError, match="logits that are not finite"):
        tp.generate(diverged, MODEL, [1], n=1)
    cold = tp.generate(PARAMS, MODEL, [1, 2], n=5, temperature=1e-320)
    assert (cold == tp.generate(PARAMS, MODEL, [1, 2], n=5, temperature=0)).all()


def test_a_view_of_wider_integers_is_not_read_as_bytes():
    tokens = np.arange(100, dtype=np.int32)
    assert (tp.Dataset(memoryview(tokens), 8, 1).tokens == tokens).all()
    with pytest.raises(ValueError, match="data is memoryview of shape .* and dtype float64"):
        tp.Dataset(memoryview(np.zeros(100)), 8, 1)
    with pytest.raises(ValueError, match="token 3 is masked"):
        tp.Dataset(np.ma.array(tokens, mask=tokens == 3), 8, 1)
    with pytest.raises(ValueError, match="the tokenizer gave list"):
        tp.Dataset(__file__, 8, 1, tokenizer=lambda text: [[1, 2], [3]])


def test_a_program_is_parsed_by_keyword():
    assert tp.Program.parse(text=str(PROGRAM)) == PROGRAM
    assert tp.Program.from_csv(text=PROGRAM.to_csv()) == PROGRAM


def test_what_is_unusual_and_right_is_taken():
    """Iterators of boundaries, cells that nobody measured, instructions as np.zeros leaves them, indices as floats."""
    plan = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8, stages=2, partition=itertools.pairwise([0, 3, MODEL.num_blocks]))
    assert plan.stages == [(0, 3), (3, MODEL.num_blocks)]
    table = [[1e-3 if i + j < 4 else None for j in range(4)] for i in range(4)]
    costs = tp.CostModel.from_table(table, table, granularity=8)
    assert costs.time(8, 8) == pytest.approx(2e-3)
    code = np.zeros(2, INSTRUCTION)
    code["op"] = [OPS.index("F"), OPS.index("B")]
    assert tp.Program.from_instructions([code]).check() is None
    rows = np.array([(0, OPS.index("F"), 0, 0, 0, 0.0, 1.0), (0, OPS.index("B"), 0, 0, 0, 1.0, 2.0)], np.float64)
    assert tp.Timeline.from_intervals(rows).makespan_s == 2.0
    with pytest.raises(ValueError, match=r"makespan_s is 1\.5: at least 2, when the last interval ends, would be right"):
        tp.Timeline.from_intervals(rows, makespan_s=1.5)      # it would be busy for more than all of its time
    with pytest.raises(TypeError, match=r"stage of the intervals is 0\.5: a whole number"):
        tp.Timeline.from_intervals([(0, 0, 1, 0, 0, 0.0, 1.0), (0, 1, 0.5, 0, 0, 1.0, 2.0)])


def test_a_text_file_keeps_its_mode_and_a_pipe_is_written_into(tmp_path):
    path = tmp_path / "a.svg"
    path.write_text("old")
    path.chmod(0o600)
    write_text(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["a.svg"]
    reader, writer = os.pipe()
    write_text(f"/dev/fd/{writer}", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    os.close(writer)


def _phases(**changed):
    rows = [(s, s, 0, 1e-3 * s) for s in (1, 2, 4)]
    return {"attention": {phase: rows for phase in "FIW"}, "ffn": {"F": rows, **changed}}


@pytest.mark.parametrize("call, message", [
    (lambda: tp.plan(MODEL, CLUSTER, batch=1, seq_len=8, costs=COSTS, slicing=[(1, 8.0)]), r"slicing\[0\] is \(1, 8.0\)"),
    (lambda: tp.CostModel.from_samples([(1, 0, 1.0), (2**40, 0, 2.0)]), "sample 1 is of 1.09951e.12 tokens: at most 16777216"),
    (lambda: tp.CostModel.from_measurements(_phases(F=[(2**40, 1, 0, 1.0)])), "ffn.F: sample 0 is of"),
    (lambda: tp.CostModel.from_samples([(1, 0, 1.0), (2, 0, 5e-324)]), "sample 1 took .* s: at least 1e-100 would be right"),
    (lambda: tp.CostModel.from_measurements({"attention": {"F": [], 1.5: []}}), "'attention.1.5': one of F, I, W, or attention.R,"),
    (lambda: tp.Timeline.from_intervals([(0, [], 0, 0, 0, 0.0, 1.0), (0, "F", 0, 0, 0, 1.0, 2.0)]), "an interval has a list"),
    (lambda: tp.Timeline.from_intervals([(0, "F", 0, 0, 0, 0.0, 1.0), (0, "F", 0, 1, 0, 2.0, 1.5)]),
     "interval 1 is from start_s = 2 to end_s = 1.5: finite times, the end not before the start, would be right"),
    (lambda: tp.Timeline.from_intervals([(0, "F", 0, 0, 0, 0.0, float("nan"))]), "interval 0 is from start_s = 0 to end_s = nan"),
    (lambda: tp.Timeline.from_intervals([(0, "F", 0, 0, 0, 0.0, float("inf"))]), "interval 0 is from start_s = 0 to end_s = inf"),
    (lambda: tp.plan(MODEL, CLUSTER, batch=1, seq_len=8, costs=COSTS, slicing=3.5),
     r"slicing is 3.5: a whole number, of slices of each sequence, or a list \[\(sequences, \[slice lengths\]\), ...\] would be"),
    (lambda: tp.Timeline.from_intervals([(0, [1, 2], 0, 0, 0, 0.0, 1.0)]), "an interval has a list"),
    (lambda: tp.load_checkpoint("nowhere", names=np.array(3)), "names is array"),
    (lambda: tp.plan(MODEL, CLUSTER, 1, 8, COSTS, partition=[np.array(3), (3, 4)]), r"partition\[0\] is array\(3\): \(first block"),
    (lambda: tp.plan(MODEL, CLUSTER, 1, 8, COSTS, partition=[np.ma.array(3), (3, 4)]), r"partition\[0\] is masked_array"),
    (lambda: tp.plan(MODEL, CLUSTER, 1, 8, COSTS, slicing=[(1, np.array(8))]), r"slicing\[0\] is \(1, array\(8\)\): \(seq"),
    (lambda: tp.planners.slicing_bound(MODEL, COSTS, [np.array(3), (3, 4)], [1], seq_len=8), r"partition\[0\] is array\(3\)"),
    (lambda: tp.planners.balance([1.0, 1e301], 1), r"times\[1\] is 1e\+301: a finite time from 0 to 1e300"),
    (lambda: tp.planners.dapple([1.0, 1e301], [1.0, 1.0], 1, 1), r"fwd\[1\] is 1e\+301: a value of 0 to 1e300 is needed"),
    (lambda: tp.planners.autopipe([1.0], [1.0], 1, 1, comm_s=1e301), r"comm_s is 1e\+301: seconds from 0 to 1e300"),
    (lambda: tp.Program.parse("0F0\ud800"), "text has a lone surrogate at 3"),
    (lambda: PROGRAM.save_memory(recompute=[1, 0], swap=bytes(2)), "recompute is list: a uint8"),
    (lambda: PROGRAM.save_memory(recompute=bytes(2), swap=np.zeros(2)), "swap has format 'd': uint8"),
    (lambda: PROGRAM.lower(tied=np.zeros(2)), "tied is numpy.ndarray: True or False"),
])  # fmt: skip
def test_what_is_wrong_inside_an_argument_is_named(call, message):
    with pytest.raises(tp.Error, match=message):
        call()


def test_the_corpus_does_not_walk_what_it_leaves_out(monkeypatch):
    """Beside the standard library may lie some hundred thousand files of other packages."""
    walked = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda root: (walked.append(folder) or (folder, *rest) for folder, *rest in walk(root)))
    assert tp.stdlib_corpus(max_bytes=100) == tp.stdlib_corpus()[:100]
    assert walked and not any("site-packages" in str(folder) for folder in walked)


@pytest.mark.parametrize("call, name", [
    (lambda: tp.launch(PLAN, DATA, 1, out="", progress=False), "out"),
    (lambda: tp.launch(PLAN, "", 1, progress=False), "data"),
    (lambda: tp.Cluster.local(swap_folder=""), "swap_folder"),
    (lambda: tp.load_checkpoint(""), "path"),
    (lambda: tp.Plan.load(""), "path"),
    (lambda: PLAN.save(""), "path"),
    (lambda: COSTS.save(""), "path"),
])  # fmt: skip
def test_an_empty_path_is_no_name_of_the_working_directory(monkeypatch, tmp_path, call, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tp.InvalidValueError, match=f"^{name} is empty: the name of a file or folder would be right"):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [
    lambda path: tp.launch(PLAN, DATA, 1, out=path, processes=False, progress=False),
    lambda path: tp.save_checkpoint(path, MODEL, PARAMS),
    lambda path: tp.export_hf(path, tp.save_checkpoint("saved", MODEL, PARAMS)),
    lambda path: Sweep(Path(path) / "sweep.jsonl", {"lr": [1]}, {}, dict).run(),
])  # fmt: skip
def test_folders_in_each_other_beyond_reason_are_named(monkeypatch, tmp_path, call):
    """The path is no longer than the system allows, but nested deeper than pathlib can make; a message has its beginning alone."""
    monkeypatch.chdir(tmp_path)
    words = r"^'(y/y|/).* is a folder within \d+ others: some hundreds fewer would be right"
    with pytest.raises(tp.InvalidValueError, match=words):
        call("y/" * 1500)
    assert not Path("y").exists()


@pytest.mark.parametrize("call", [
    lambda path: tp.launch(PLAN, DATA, 1, out=f"{path}/run", processes=False, progress=False),
    lambda path: tp.export_hf(path, model=MODEL, params=PARAMS),
    lambda path: Sweep(Path(path) / "sweep.jsonl", {"lr": [1]}, {}, dict).run(),
])  # fmt: skip
def test_a_file_where_a_folder_would_have_to_be_is_named(monkeypatch, tmp_path, call):
    """The error says that a file is in the way, not, as mkdir's does, that it exists already: nobody had asked for a new file."""
    monkeypatch.chdir(tmp_path)
    Path("note").write_text("mine")
    with pytest.raises(NotADirectoryError, match="a file is where a folder would have to be: another path would be right.*note"):
        call("note")
    assert Path("note").read_text() == "mine"
    Path("run").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="this run folder is a link to nothing: another one would be right"):
        tp.launch(PLAN, DATA, 1, out="run", processes=False, progress=False)


@pytest.mark.parametrize("name, ours", [
    ("1F1B", "1f1b"), ("ScheduleInterleaved1F1B", "interleaved"), ("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipe-v"),
    ("LoopedBFS", "looped-bfs"), ("one_f_one_b", "1f1b"),
])  # fmt: skip
def test_a_schedule_by_its_name_elsewhere_is_told_its_name_here(name, ours):
    """Of torch.distributed.pipelining and of tp.schedules: a list of 15 names does not say which one is meant."""
    with pytest.raises(tp.InvalidValueError, match=f"schedule is '{name}': {ours} would be right, or another one of auto, "):
        tp.plan(MODEL, CLUSTER, batch=2, seq_len=8, costs=COSTS, schedule=name)
    with pytest.raises(tp.InvalidValueError, match="planner is 'AutoPipe': autopipe would be right, or another one of auto, "):
        tp.plan(MODEL, CLUSTER, batch=2, seq_len=8, costs=COSTS, planner="AutoPipe")
