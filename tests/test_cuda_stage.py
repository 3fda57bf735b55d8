"""The CUDA stage on the emulated device: the oracle's loss and gradients, equal bits, memory to the byte, training as on the
CPU, and what a GPU does wrong told by name. The kernels' own sources run, compiled by gcc (cuda/simt.h)."""
import ctypes
import json
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import reference as ref
from cuda_emu import build, library
from ports import free_port

import terapipe_c as tp
from terapipe_c import _core, profiling
from terapipe_c.backend import Backend, choose, place, place_own
from terapipe_c.engine import RankEngine, gather_bytes, in_threads, lent_bytes, rank_memory
from terapipe_c.planning.judge import Judge

RAGGED = [1, 1, 62, 5]
# Relative to each tensor, in its norm. bf16 rounds every activation to 8 bits (2^-9 = 0.2 %), some ten times on the way
# through two layers and back: what remains in a gradient is 1 % of it (0.6 % of all together); float32 shows that nothing
# else is in it.
NORM = {"float32": 1e-5, "bf16": 2.5e-2}
LOSS = {"float32": 1e-5, "bf16": 3e-3}
HYPER = dict(lr=1e-2, weight_decay=0.1, grad_clip=0.5)
CUDA = {dtype: Backend("cuda", dtype) for dtype in ("float32", "bf16")}


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    """The emulated module, one healthy device."""
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(build()))
    module = tp.cuda.load()
    module.emu_machine()
    module.emu_break(0)
    yield module
    module.emu_break(0)
    module.emu_machine()


def problem(batch, seq_len, seed=0, std=0.2, **change):
    model = tp.GPTConfig(**{**dict(n_layer=2, n_head=2, n_embd=16, vocab_size=61, block_size=seq_len), **change})
    params = {name: value.astype(np.float32) for name, value in ref.random_params(model, seed, std).items()}
    return model, params, np.random.default_rng(seed).integers(0, model.vocab_size, (batch, seq_len + 1)).astype(np.int32)


def partition_of(model, cuts):
    edges = [0, *cuts, model.num_blocks]
    return list(zip(edges[:-1], edges[1:], strict=True))


def ranks_do(model, partition, slicing, program, work, params, dtype="float32", **device):
    """[work(engine) of each rank], on engines that run `program` together as threads, all on one emulated GPU."""
    ranks = program.num_ranks
    everyone = bytearray(int(a != b) for a in range(ranks) for b in range(ranks))
    region = _core.Region.create(ranks, everyone, 1 << 13, gather_bytes(model), False)

    def one(rank):
        comm = _core.Comm(region, rank, 60.0)
        engine = RankEngine(model, partition, slicing, program, rank, comm, backend=CUDA[dtype], **device)
        engine.load(params)
        return work(engine)

    return in_threads(region, one)


# ---- the oracle ------------------------------------------------------------------------------------------------------

CASES = {
    "tied, bias": (1, RAGGED, {}),
    "untied, no bias": (1, RAGGED, dict(tie_weights=False, bias=False)),
    "three sequences at once": (3, [(3, RAGGED)], {}),
    "three sequences, untied": (3, [(1, [69]), (2, [30, 39])], dict(tie_weights=False)),
    "no bias, one layer": (2, [8, 8, 8], dict(bias=False, n_layer=1)),
}


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_and_every_gradient_agree_with_the_oracle(case, dtype):
    batch, slicing, change = case
    model, params, tokens = problem(batch, sum(slicing[0][1] if isinstance(slicing[0], tuple) else slicing), **change)
    loss, grads = tp.loss_and_grads(model, params, tokens, slicing=slicing, stages=1 + batch % 2, backend="cuda", dtype=dtype)
    expected_loss, expected = ref.loss_and_grads(model, params, tokens)
    assert abs(loss / expected_loss - 1) <= LOSS[dtype]
    assert {name: grad.shape for name, grad in grads.items()} == ref.shapes(model)
    for name, right in expected.items():
        assert np.linalg.norm(grads[name] - right) <= NORM[dtype] * np.linalg.norm(right), name


# ---- the same bits ---------------------------------------------------------------------------------------------------


def same(one, two, what):
    assert one[0] == two[0], what
    for name, grad in one[1].items():
        assert np.array_equal(grad, two[1][name]), (what, name)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_gradients_have_the_same_bits_for_every_slicing_and_number_of_stages(tie, dtype):
    """Also where slices cross the head's tile of 64 rows, and the tile two micro-batches."""
    model, params, tokens = problem(2, 69, tie_weights=tie, n_layer=1)
    right = tp.loss_and_grads(model, params, tokens, slicing=[(1, [69])] * 2, backend="cuda", dtype=dtype)
    for stages, lengths in ((1, RAGGED), (2, [32, 32, 5]), (3, [7, 61, 1])):
        found = tp.loss_and_grads(model, params, tokens, [(1, lengths), (1, [69])], stages, backend="cuda", dtype=dtype)
        same(right, found, (stages, lengths))
    whole = tp.loss_and_grads(model, params, tokens, [(2, [69])], backend="cuda", dtype=dtype)
    same(whole, tp.loss_and_grads(model, params, tokens, [(2, [3, 60, 6])], 2, backend="cuda", dtype=dtype), "two sequences")


def test_a_product_that_cannot_be_pinned_is_done_and_said():
    """cublasLt takes an algorithm of 2048 rows for an odd number of them or refuses it: then there is another, and a caveat."""
    model, params, tokens = problem(1, 9)
    program, found = tp.schedules.gpipe(1, 1, [2]).lower(True), []
    for refuse in (0, 64):
        library().tp_emu_set_cublaslt(refuse)
        try:
            found += ranks_do(model, [(0, model.num_blocks)], [(1, [4, 5])], program,
                              lambda engine: (engine.run(tokens, step=1)[:2], engine.caveats), params, reproducible=True)
        finally:
            library().tp_emu_set_cublaslt(0)
    (right, nothing), (loss, caveats) = found
    assert loss == right and nothing == [] and len(caveats) == 1
    assert re.search("for 5 rows, .* cublasLt refuses the algorithm of other rows", caveats[0])


def test_a_bias_that_no_product_adds_is_added_and_said():
    """In fp32 cublasLt has no product with a bias: ours adds it, whatever the slicing."""
    model, params, tokens = problem(1, 9)
    found = []
    for refuse, lengths in ((0, [4, 5]), (2048, [4, 5]), (2048, [9])):
        program = tp.schedules.gpipe(1, 1, [len(lengths)]).lower(True)
        library().tp_emu_set_cublaslt(refuse)
        try:
            found += ranks_do(model, [(0, model.num_blocks)], [(1, lengths)], program,
                              lambda engine: (engine.run(tokens, step=1)[:2], engine.caveats), params, reproducible=True)
        finally:
            library().tp_emu_set_cublaslt(0)
    (right, nothing), (numbers, caveats), (whole, _) = found
    assert nothing == [] and len(caveats) == 1 and "a bias is added by a kernel of its own (for 2048 rows, n_in 16" in caveats[0]
    assert numbers == whole and np.allclose(numbers, right, rtol=1e-5)


@pytest.mark.parametrize(("refuse", "lengths", "said"), [
    (1024, [5, 4], []),  # another algorithm for both: it was refused before anybody had it
    (1024, [4, 5], ["differ in their last bits .*for 5 rows.* refuses the algorithm of other rows"]),
    (512, [5, 4], ["GELU is a kernel of its own .for 5 rows, n_in 16, n_out 64 cublasLt's fused one is off by"]),
    (512, [4, 5], ["GELU is a kernel of its own .for 5 rows", "differ in their last bits .*for 5 rows"]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_what_a_product_turns_out_not_to_do_is_done_otherwise_and_said(dtype, refuse, lengths, said):
    """When it is prepared: cublasLt refuses a product that its heuristics and its check allow; its fused GELU is another."""
    model, params, tokens = problem(1, 9)
    program, found = tp.schedules.gpipe(1, 1, [2]).lower(True), []
    for reproducible, flags in ((True, 0), (True, refuse), (False, refuse)):
        library().tp_emu_set_cublaslt(flags)
        try:
            found += ranks_do(model, [(0, model.num_blocks)], [(1, lengths)], program,
                              lambda engine: (engine.run(tokens, step=1)[:2], engine.caveats), params, dtype,
                              reproducible=reproducible)
        finally:
            library().tp_emu_set_cublaslt(0)
    (right, nothing), (numbers, caveats), (free, also) = found
    assert nothing == [] and len(caveats) == (1 if said else 0) and len(also) == (1 if refuse == 512 else 0)
    for pattern in said:
        assert re.search(pattern, caveats[0]), caveats
    assert ("last bits" in "".join(caveats)) == any("last bits" in text for text in said)
    assert np.allclose(numbers, right, rtol=1e-5 if dtype == "float32" else 1e-2)
    assert np.allclose(free, right, rtol=1e-5 if dtype == "float32" else 1e-2)


PROGRAMS = {
    "gpipe, whole backward": lambda: tp.schedules.gpipe(2, 2, [2, 2]),
    "gpipe, W late": lambda: tp.schedules.gpipe(3, 2, [2, 2]).split(pending=9),
    "1f1b": lambda: tp.schedules.one_f_one_b(3, 2, [2, 2]).split(),
    "seq1f1b": lambda: tp.schedules.seq1f1b(2, 2, 2).split(pending=2),
    "interleaved": lambda: tp.schedules.interleaved(2, 2, 2, 2).split(),
    "every stage on one rank": lambda: tp.schedules.interleaved(1, 2, 4, 2).split(pending=1),
}


def everything(engine, tokens):
    """An update, the gradients of a second step, an evaluation, and what is held."""
    losses = [engine.run(tokens, step=1, **HYPER)[:2], engine.run(tokens, step=2, update=False)[:2]]
    found = {f"{kind} {name}": array for kind in ("params", "exp_avg", "exp_avg_sq", "grads")
             for name, array in engine.export(kind).items()}
    return losses, engine.evaluate(tokens), found


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_updates_have_the_same_bits_under_every_schedule(dtype):
    model, params, tokens = problem(2, 9)
    slicing, right = [(1, [4, 5])] * 2, None
    for i, (name, make) in enumerate({"alone": lambda: tp.schedules.gpipe(1, 2, [2, 2]), **PROGRAMS}.items()):
        program = make().lower(True)
        cuts = np.random.default_rng(i).choice(range(1, 6), program.num_stages - 1, False)
        parts = ranks_do(model, partition_of(model, sorted(cuts.tolist())), slicing, program, lambda e: everything(e, tokens),
                         params, dtype, staged=bool(i % 2))
        assert all(part[:2] == parts[0][:2] for part in parts), name
        found = parts[0][0], parts[0][1], {key: array for part in parts for key, array in part[2].items()}
        if right is None:
            right = found
            assert right[0][1][0] < right[0][0][0] and right[1] == right[0][1][0]
        assert found[:2] == right[:2], name
        for key, array in right[2].items():
            assert np.array_equal(array, found[2][key]), (name, key)


def test_forwards_in_halves_along_the_batch_change_nothing():
    model, params, tokens = problem(4, 8)
    slicing, whole = [(2, [8])] * 2, tp.schedules.one_f_one_b(2, 2).split().lower(True)
    halves = tp.schedules.sliced_1f1b(2, 2, 1).split().lower(True)
    cut = partition_of(model, [3])

    def work(engine):
        return engine.run(tokens, update=False)[0], engine.export("grads")

    one, two = (ranks_do(model, cut, slicing, program, work, params) for program in (whole, halves))
    for (loss, grads), (other, theirs) in zip(one, two, strict=True):
        assert loss == pytest.approx(other, rel=1e-6)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("slicing", "halved"), [([(2, [8])] * 2, 0), ([(3, [8]), (1, [8])], 0), ([(4, [5, 3])], 0),
                                                 ([(2, [8])] * 2, 1), ([(3, [8]), (2, [8])], 1)], ids=str)
def test_no_product_is_looked_for_within_a_step(slicing, halved, emulation):
    """On a GPU a kernel's first use, in a stream beside one that waits for a message, may wait for that message's end."""
    model, params, tokens = problem(sum(batch for batch, _ in slicing), 8)
    slices = [len(lengths) for _, lengths in slicing]
    program = tp.schedules.sliced_1f1b(2, 2, halved) if halved else tp.schedules.seq1f1b(2, len(slicing), slices)
    program = program.lower(True)
    assert ("a" in str(program)) == bool(halved)
    emulator, calls = ctypes.CDLL(emulation.__file__), [ctypes.c_int64() for _ in range(3)]

    def asked():
        emulator.tp_emu_cublaslt_calls(*map(ctypes.byref, calls))
        return calls[0].value

    begun = threading.Barrier(2)

    def work(engine):
        begun.wait()
        before = asked()
        begun.wait()
        engine.run(tokens, step=1, **HYPER)
        engine.evaluate(tokens)
        begun.wait()
        return before, asked()

    for before, after in ranks_do(model, partition_of(model, [3]), slicing, program, work, params):
        assert before == after > 0


# ---- training --------------------------------------------------------------------------------------------------------

CORPUS = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8).astype(np.int32) % 61


def a_plan(backend=None, dtype=None, stages=1, batch=2, seq_len=16, **request):
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=seq_len)
    return tp.plan(model, tp.Cluster.local(), batch, seq_len, stages=stages, planner="terapipe", schedule="gpipe",
                   slicing=[(1, [4, 12])] * batch, backend=backend, dtype=dtype, **request)


def losses(run):
    return np.array([record.loss for record in run])


def test_twenty_steps_train_as_on_the_cpu():
    steps = dict(steps=20, lr=1e-2, betas=(0.9, 0.99999), processes=False, progress=False)   # no float is either beta
    right = losses(tp.launch(a_plan(), CORPUS, **steps))
    assert right[-1] < right[0]
    single = losses(tp.launch(a_plan("cuda", "float32"), CORPUS, backend="cuda", dtype="float32", **steps))
    assert np.abs(single / right - 1).max() <= 1e-5
    half = losses(tp.launch(a_plan("cuda"), CORPUS, backend="cuda", **steps))
    assert np.abs(half / right - 1).max() <= 5e-3 and not np.array_equal(half, single)


def test_a_checkpoint_of_cuda_is_resumed_on_the_cpu_and_the_other_way_round(tmp_path):
    options = dict(lr=1e-2, lr_schedule="constant", processes=False, progress=False)
    dtype = {"cpu": None, "cuda": "float32"}
    straight = losses(tp.launch(a_plan(), CORPUS, 6, **options))
    for first, then in (("cuda", "cpu"), ("cpu", "cuda")):
        out = tmp_path / first
        tp.launch(a_plan(first, dtype[first]), CORPUS, 4, backend=first, dtype=dtype[first], out=out, **options).wait()
        run = tp.launch(a_plan(then, dtype[then]), CORPUS, 6, backend=then, dtype=dtype[then], out=out, resume=True, **options)
        assert losses(run) == pytest.approx(straight[4:], rel=1e-5)
    begun = [losses(tp.launch(a_plan(on, dtype[on]), CORPUS, 2, backend=on, dtype=dtype[on], init=tmp_path / "cuda", **options))
             for on in ("cpu", "cuda")]
    assert begun[1] == pytest.approx(begun[0], rel=1e-5) and begun[0][0] < straight[0]


def test_processes_train_on_cuda_and_report(tmp_path):
    run = tp.launch(a_plan("cuda", stages=2), CORPUS, 3, backend="cuda", devices=[0, 0], eval_every=3, eval_batches=1,
                    progress=False, out=tmp_path / "run")
    records = list(run)
    assert len(records) == 3 and records[-1].eval_loss is not None and len(run.pids) == 2
    report = run.report()
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == list(run.plan.peak_memory_bytes)
    trace = run.trace
    assert {row[1] for row in trace} >= {"F", "I", "W", "SF", "RF", "OPT", "AR"}
    assert all(start <= end for *_, start, end in trace)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_predicted_memory_is_what_the_device_gives_and_a_step_takes_none(dtype):
    model, params, tokens = problem(2, 12)
    slicing, program = [(1, [5, 7]), (1, [12])], tp.schedules.gpipe(2, 2, [2, 1]).split().lower(True)
    partition = partition_of(model, [2])
    predicted = rank_memory(model, partition, slicing, program, backend=CUDA[dtype])
    assert lent_bytes(model, partition, slicing, program, backend=CUDA[dtype]) == [0, 0]   # no memory of the host that ranks share

    def work(engine):
        opened = engine._core.memory()
        engine.run(tokens, **HYPER)
        engine.evaluate(tokens)
        assert engine._core.memory() == opened
        return opened[1]

    assert ranks_do(model, partition, slicing, program, work, params, dtype) == predicted
    plans = [a_plan(backend, kind) for backend, kind in (("cpu", None), ("cuda", "bf16"), ("cuda", "float32"))]
    assert len({plan.peak_memory_bytes[0] for plan in plans}) == 3
    assert tp.Plan.from_dict(plans[1].to_dict()) == plans[1] and plans[1] != plans[2]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("slicing, schedule", [([(1, [5, 7]), (1, [12])], "gpipe"), ([(2, [12]), (1, [12])], "1f1b"),
                                               ([(2, [1, 4, 7])], "seq1f1b")])
def test_blocks_that_recompute_have_the_same_bits_in_the_memory_predicted(slicing, schedule, dtype):
    model, params, tokens = problem(sum(b for b, _ in slicing), 12)
    build_one = {"gpipe": tp.schedules.gpipe, "1f1b": tp.schedules.one_f_one_b, "seq1f1b": tp.schedules.seq1f1b}[schedule]
    program = build_one(2, len(slicing), [len(lengths) for _, lengths in slicing]).split()
    partition, found = partition_of(model, [3]), []
    for again, way in (((), 0), ((0, 1, 1, 1, 1, 0), 1), ((0, 0, 1, 1, 0, 0), 2)):     # all slices at once, slice by slice
        lowered = program.save_memory(bytes([way, way]), bytes(2)).lower(True)
        predicted = rank_memory(model, partition, slicing, lowered, backend=CUDA[dtype], recompute=again)

        def work(engine):
            done = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(2)]
            return done, engine.evaluate(tokens), engine.export("params"), engine.peak_memory_bytes

        parts = ranks_do(model, partition, slicing, lowered, work, params, dtype, recompute=again)
        assert [part[3] for part in parts] == predicted
        found.append(parts)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert mine[:2] == theirs[:2]
            assert all(np.array_equal(array, theirs[2][name]) for name, array in mine[2].items())


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("slicing, schedule, ahead", [
    ([(1, [5, 7]), (1, [12])], "gpipe", None), ([(2, [1, 4, 7])], "seq1f1b", None), ([(1, [5, 7]), (1, [12])], "gpipe", 0),
    ([(1, [12])] * 4, "1f1b", 1), ([(1, [5, 7]), (1, [12])], "gpipe", 3), ([(1, [12])] * 4, "gpipe", 2),
    ([(1, [1, 4, 7])] * 3, "seq1f1b", 1)])
def test_blocks_that_swap_have_the_same_bits_in_the_memory_predicted(slicing, schedule, ahead, dtype):
    """By the rank itself, or beside its work: on a stream of its own, and the emulator looks for waits that are missing."""
    model, params, tokens = problem(sum(b for b, _ in slicing), 12)
    build_one = {"gpipe": tp.schedules.gpipe, "1f1b": tp.schedules.one_f_one_b, "seq1f1b": tp.schedules.seq1f1b}[schedule]
    program = build_one(2, len(slicing), [len(lengths) for _, lengths in slicing]).split()
    partition, found = partition_of(model, [3]), []
    for again, swap in (((), ()), ((0, 0, 1, 0, 0, 0), (0, 1, 0, 1, 1, 0)), ((), (0, 0, 1, 1, 0, 0))):
        lowered = program.save_memory(bytes([2 * any(again), 0]), bytes([1, 1]), ahead or 0, ahead is not None) if swap else program
        lowered = lowered.lower(True)
        predicted = rank_memory(model, partition, slicing, lowered, backend=CUDA[dtype], recompute=again, swap=swap)

        def work(engine):
            done = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(4)]      # eager, captured, and by graphs
            copies = [row for row in engine.trace() if row[0] in ("SO", "SI")]
            assert all(0 < start <= end for *_, start, end in copies)
            return done, engine.evaluate(tokens), engine.export("params"), engine.peak_memory_bytes, len(copies)

        parts = ranks_do(model, partition, slicing, lowered, work, params, dtype, recompute=again, swap=swap)
        assert [part[3] for part in parts] == predicted
        assert [part[4] for part in parts] == [2 * sum(program.slices) * bool(swap)] * 2
        found.append(parts)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert mine[:2] == theirs[:2]
            assert all(np.array_equal(array, theirs[2][name]) for name, array in mine[2].items())


def test_what_comes_back_is_there_until_the_w_of_slice_0_reads_it():
    """Another micro-batch goes forward between the slices of one, for whose W rows of the last one wait."""
    model, params, tokens = problem(2, 24)
    kept = "0F0.0 0F0.1 0B0.1 0F1.0 0F1.1 0B0.0 0B1.1 0B1.0"
    swapped = "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.1 0B0.1 0F1.0 0SO1.0 0F1.1 0SO1.1 0SI0.0 0B0.0 0SI1.1 0B1.1 0SI1.0 0B1.0"

    def gradients(text, swap):
        def work(engine):
            engine.run(tokens, step=1, update=False, **HYPER)
            return engine.export("grads")

        program, slicing = tp.Program.parse(text).lower(), [(1, [12, 12])] * 2
        return ranks_do(model, partition_of(model, []), slicing, program, work, params, swap=swap)[0]

    right, found = gradients(kept, ()), gradients(swapped, (0, 0, 1, 0, 1, 0))
    assert all(np.array_equal(array, found[name]) for name, array in right.items())


def test_a_limit_names_the_bytes_that_are_short():
    model, *_ = problem(1, 12)
    program, slicing, partition = tp.schedules.gpipe(1, 1).split().lower(), [(1, [12])], partition_of(model, [])
    needed = rank_memory(model, partition, slicing, program, backend=CUDA["bf16"])[0]
    with pytest.raises(_core.OutOfMemoryError, match="256 bytes short"):
        RankEngine(model, partition, slicing, program, 0, None, backend=CUDA["bf16"], memory_bytes=needed - 256)


def test_a_gpu_too_small_is_refused_before_anything_starts(emulation):
    emulation.emu_machine(total_bytes=40 << 20)
    with pytest.raises(_core.OutOfMemoryError, match=r"ranks 0, 1 need \d+ bytes on GPU 0, which has \d+ free of 41943040"):
        tp.launch(a_plan("cuda", stages=2), CORPUS, 2, backend="cuda", devices=[0, 0], progress=False)
    model, *_ = problem(1, 12)
    with pytest.raises(_core.OutOfMemoryError, match=r"workspace|stage of blocks"):
        emulation.emu_machine(total_bytes=16 << 20)
        RankEngine(model, partition_of(model, []), [(1, [12])], tp.schedules.gpipe(1, 1).split().lower(), 0, None,
                   backend=CUDA["bf16"])


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_no_driver_too_few_and_mixed_gpus_are_refused_by_name(emulation, monkeypatch):
    plan = a_plan("cuda", stages=2)
    with pytest.raises(_core.InvalidValueError, match="2 ranks and this machine shows 1 GPU.*rank 1 is the first without one"):
        tp.launch(plan, CORPUS, 2, backend="cuda", progress=False)
    with pytest.raises(_core.InvalidValueError, match=r"devices is \[0, 3\]: 2 numbers from 0 to 0"):
        tp.launch(plan, CORPUS, 2, backend="cuda", devices=[0, 3], progress=False)
    emulation.emu_machine(devices=2)
    found = tp.cuda.devices()
    other = type(found[1])(**{**vars(found[1]), "name": "another GPU"})
    monkeypatch.setattr(tp.cuda, "devices", lambda: (found[0], other))
    with pytest.raises(_core.InvalidValueError, match="GPUs differ .*another GPU"):
        tp.launch(plan, CORPUS, 2, backend="cuda", progress=False)
    emulation.emu_machine(driver=0)
    with pytest.raises(_core.ExecutionError, match="backend 'cuda' cannot be used"):
        tp.launch(plan, CORPUS, 2, backend="cuda", devices=[0, 0], progress=False)


MACHINES = """
import dataclasses, json, os, sys
import numpy as np
import terapipe_c as tp

plan, second, options = tp.Plan.load(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
name = second.pop("name", "H100") if int(os.environ["RANK"]) >= 2 else "H100"
tp.cuda.load().emu_machine(**({"devices": 2} | (second if int(os.environ["RANK"]) >= 2 else {})))
found = tp.cuda.devices()
tp.cuda.devices = lambda: tuple(dataclasses.replace(one, name=name) for one in found)
tp.train(plan, np.arange(999, dtype=np.int32) % 16, 1, backend="cuda", progress=False, **options)
"""


@pytest.mark.parametrize(("second", "options", "told"), [
    ({"devices": 1}, {}, "rank 3 has no GPU: as local rank 1 it would have GPU 1, and .* 1 GPU .*CUDA_VISIBLE_DEVICES=0 in"),
    ({"total_bytes": 1 << 20}, {}, r"rank [23] needs \d+ bytes on GPU [01], which has 1048576 free"),
    ({"devices": 1}, {"devices": [0, 1]}, r"devices is \[0, 1\], and rank 3 is local rank 1 of a machine that shows 1 GPU"),
    ({"name": "A100"}, {}, "GPU .a plan knows one kind; devices=.* of rank 2 is not that of rank 0"),
    ({"name": "A100"}, {"devices": [0, 1]}, ""),
])  # fmt: skip
def test_two_machines_are_told_apart(tmp_path, second, options, told):
    """Of two GPUs each, as torchrun has them: what is wrong with the second names the ranks as the plan has them."""
    model = tp.GPTConfig(n_layer=4, n_head=1, n_embd=8, vocab_size=16, block_size=8)
    tp.plan(model, tp.Cluster(num_devices=4, peak_flops=1e12), batch=1, seq_len=8, planner="uniform", stages=4,
            backend="cuda").save(tmp_path / "plan.json")  # fmt: skip
    port, module = free_port(), str(build())
    words = [sys.executable, "-c", MACHINES, str(tmp_path / "plan.json"), json.dumps(second), json.dumps(options)]
    ranks = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {
        "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TERAPIPE_CUDA_MODULE": module, "TERAPIPE_COMM": "host"}) for rank in range(4)]  # fmt: skip
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    if told:
        assert all(rank.returncode for rank in ranks), said
        assert any(re.search(told, text) for text in said), said
    else:
        assert not any(rank.returncode for rank in ranks), said


def test_arguments_that_do_not_fit_say_what_would(monkeypatch):
    plan = a_plan("cuda")
    monkeypatch.setenv("TERAPIPE_CUDA_GRAPHS", "false")
    with pytest.raises(_core.InvalidValueError, match="TERAPIPE_CUDA_GRAPHS is 'false': 0 .* or 1 .* would be right"):
        tp.launch(plan, CORPUS, 2, backend="cuda", progress=False)
    monkeypatch.delenv("TERAPIPE_CUDA_GRAPHS")
    for refused in (lambda: place(choose(), 1, [0], [1]), lambda: place_own(choose(), 1, 1, [0, 1], 1)):
        with pytest.raises(_core.InvalidValueError, match="devices is .*: None would be right for backend 'cpu'"):
            refused()
    with pytest.raises(_core.InvalidValueError, match="plan is for backend 'cuda' with bf16, this run has 'cpu'"):
        tp.launch(plan, CORPUS, 2, progress=False)
    with pytest.raises(_core.InvalidValueError, match="backend is 'tpu'"):
        tp.launch(plan, CORPUS, 2, backend="tpu", progress=False)
    with pytest.raises(_core.InvalidValueError, match="dtype is 'bf16': 'float32' would be right for backend 'cpu'"):
        tp.launch(plan, CORPUS, 2, dtype="bf16", progress=False)
    model, params, tokens = problem(1, 4, n_embd=12)
    with pytest.raises(_core.InvalidValueError, match="n_embd / n_head is 6: .* a multiple of 8"):
        tp.loss_and_grads(model, params, tokens, backend="cuda")


def test_a_lost_device_ends_all_ranks_and_is_named(emulation):
    model, params, tokens = problem(2, 12)
    program, slicing = tp.schedules.gpipe(2, 2, [2, 2]).split().lower(True), [(1, [5, 7])] * 2

    def work(engine):
        engine.run(tokens, **HYPER)
        emulation.emu_break(40)
        for step in range(2, 100):
            engine.run(tokens, step=step, **HYPER)

    with pytest.raises(_core.ExecutionError, match=re.compile("illegal|lost|device", re.I)):
        ranks_do(model, partition_of(model, [3]), slicing, program, work, params)


def test_a_loss_that_is_not_a_number_leaves_the_parameters():
    model, params, tokens = problem(1, 12)
    program, slicing = tp.schedules.gpipe(1, 1).split().lower(), [(1, [12])]
    poisoned = {name: value.copy() for name, value in params.items()}
    poisoned["transformer.ln_f.weight"][3] = np.nan

    def work(engine):
        with pytest.raises(_core.ExecutionError, match="parameters are as before"):
            engine.run(tokens, **HYPER)
        after = engine.export("params")
        return all(np.array_equal(after[name], poisoned[name], equal_nan=True) for name in poisoned)

    assert ranks_do(model, partition_of(model, []), slicing, program, work, poisoned) == [True]


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wish", "products"), [({}, (True, 0)), ({"reproducible": False}, (False, 32))])
def test_a_profile_measures_the_products_that_a_run_asks_for(monkeypatch, wish, products):
    seen = []

    def engine(*args, **kwargs):
        seen.append((kwargs["reproducible"], kwargs["candidates"]))
        raise tp.ExecutionError("seen")

    monkeypatch.setattr(profiling, "RankEngine", engine)
    with pytest.raises(tp.ExecutionError, match="seen"):
        tp.profile(tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=16), backend="cuda", **wish)
    assert seen == [products]


def test_a_profile_of_a_gpu_says_so_and_its_plans_are_a_gpus():
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=16)
    costs = tp.profile(model, seq_len=16, backend="cuda", budget_s=1.5)
    assert (costs.source, costs.backend, costs.dtype) == ("measured", "cuda", "bf16") and costs.device in repr(costs)
    assert tp.CostModel.from_dict(costs.to_dict()) == costs
    plan = tp.plan(model, tp.Cluster.local(), 2, 16, costs, stages=1, slicing=[(1, [8, 8])] * 2)
    assert (plan.backend, plan.dtype) == ("cuda", "bf16")
    work = costs.durations(partition=[(0, 4)], slicing=[(1, [4, 12]), (1, [16])])["W"]
    assert work[0, 1] == 0 < work[0, 0] and work[0, 0] == pytest.approx(work[0, 2], rel=0.2)


def test_weight_gradients_of_a_gpu_are_of_whole_micro_batches_whatever_the_slices():
    """Their products are one a micro-batch: what one costs besides its rows is paid once. In C as in Python."""
    line = {phase: [(n, n, 0, 1e-4 + 1e-6 * n) for n in (8, 16, 32)] for phase in "FIW"}
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=64, block_size=32, tie_weights=False)
    costs = tp.CostModel.from_measurements({"attention": line, "ffn": line, "head": line}, overhead_s=1e-6, model=model, seq_len=32,
                                           micro_batch=2, backend="cuda", dtype="bf16")
    slicing = ((1, (16, 16)), (1, (32,)), (1, (1, 1, 30)), (2, (8, 24)))
    W = costs.durations(partition=[(0, 3), (3, 6)], slicing=slicing)["W"]
    each = costs.block_seconds("ffn", "W", 32), costs.block_seconds("ffn", "W", 32, 0, 2)
    for stage, blocks in enumerate((2, 3)):
        right = [blocks * each[0] + 2e-6, 0, blocks * each[0] + 1e-6, blocks * each[0] + 3e-6, 0, 0, blocks * each[1] + 2e-6, 0]
        assert W[stage] == pytest.approx(right)
    judge = Judge(model, costs, 2, 1, None)
    found = judge.judge("1f1b", ((0, 3), (3, 6)), slicing)
    assert found.seconds == pytest.approx(judge.lowered(found).simulate(judge.full_durations(found)).makespan_s, rel=1e-12)


def test_a_profile_of_a_gpu_asks_for_no_more_rows_than_the_head_takes_at_once(monkeypatch):
    """Of more W would take the last ones alone, and some F the others."""
    asked, run = [], profiling._Sampler.run

    def told(self, model, slicing, repeats, kinds, *again):
        asked.append(sum(b * sum(lengths) for b, lengths in slicing) if "head" in kinds else 0)
        return run(self, model, slicing, repeats, kinds, *again)

    monkeypatch.setattr(profiling._Sampler, "run", told)
    monkeypatch.setattr(profiling, "GPU_HEAD_TILE", 64)     # the emulator's
    costs = tp.profile(tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=128), backend="cuda", budget_s=1.5)
    assert max(asked) == 64
    curve = costs.curves["head", "W"]                     # of one product: half of its rows are half of it
    assert len(curve.rows) == 2 and abs(curve.seconds[0]) < 1e-12 < curve.seconds[1]
