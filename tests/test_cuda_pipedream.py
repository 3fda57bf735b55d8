"""PipeDream on the emulated device: versions of the weights there, updates that the host does not wait for, and steps launched as
graphs between them; against the paper's rule (tests/test_pipedream.py) and the CPU."""
import dataclasses
import json

import numpy as np
import pytest
from cuda_emu import library
from cuda_ranks import NEAR, ON, assert_first_words, emulated, nccl_faults
from cuda_ranks import launched as launched_by
from cuda_ranks import trained as trained_by
from test_pipedream import BEYOND, MODEL, TOKENS, beyond_bounds, orders_train, planned, trained

import terapipe_c as tp
from terapipe_c import schedules
from terapipe_c.backend import Backend
from terapipe_c.engine import RankEngine, rank_memory

CUDA = {dtype: Backend("cuda", dtype) for dtype in ("float32", "bf16")}
LONG = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=69, tie_weights=False)
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "grad_clip": 0.5}


@pytest.fixture
def untimed(monkeypatch):
    """The first algorithm of each product, in this process: an order that is not reproducible has the fastest of a few, whose bits
    differ, and which that is changes with what else the machine does."""
    monkeypatch.setattr("terapipe_c.engine.TIMED", 0)


def answers(fake, *cases):
    usual = {"schedule": "pipedream", "ranks": 3, "micros": 4, "tied": False, "steps": 4}
    return emulated(fake, *({**usual, **case} for case in cases))


# of 3 ranks the first has 3 versions for 4 micro-batches: a ring alone would begin each step elsewhere
EACH = [{"mode": "host"}, {"lengths": (12,)}, {"lengths": (1, 11)}, {"fault": {"looks": 7}}, {"pending": 1}, {"again": True}]
TOGETHER = [{"mode": "host", "lengths": (12,), "pending": None}, {"fault": {"looks": 7}, "again": True}]
SHAPES = [({}, EACH), ({"ranks": 2, "micros": 5}, TOGETHER), ({"ranks": 4, "micros": 3}, TOGETHER),
          ({"dtype": "bf16"}, EACH), ({"ranks": 1, "micros": 3, "tied": True}, [{"lengths": (12,)}, {"lengths": (1, 11)}])]


@pytest.mark.parametrize(("shape", "ways"), SHAPES, ids=[str(shape) for shape, _ in SHAPES])
def test_the_bits_do_not_depend_on_slices_or_the_way_of_messages(fake_nccl, shape, ways):
    """Call by call, captured, and launched as graphs; with the memory predicted; near what the CPU trains."""
    *device, cpu = map(trained_by, answers(fake_nccl, *({**case, **shape} for case in ({}, *ways)),
                                           {**shape, "mode": "cpu", "dtype": "float32"}))
    assert all(one == device[0] for one in device[1:])
    for one, other in zip(device[0][0], cpu[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR[shape.get("dtype", "float32")])


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_any_order_trains_by_the_versions_that_it_reads(emulation, dtype):
    near, atol = ((5e-6, 3e-4), 1e-4) if dtype == "float32" else ((3e-3, 1e-1), 3e-2)
    orders_train(12 if dtype == "float32" else 8, (13, 61), 3, near, lambda rng: {"backend": CUDA[dtype]}, atol)


# two stages on one rank, whose first micro-batches go forward ahead: the first has two versions
AHEAD = """0F0.0 0F1.0 1F0.0 1B0.0 1U0.0 0B0.0 0U0.0 0F2.0 1F1.0 1B1.0 1U1.0 0B1.0 0U1.0 0F3.0
1F2.0 1B2.0 1U2.0 0B2.0 0U2.0 0F4.0 1F3.0 1B3.0 1U3.0 0B3.0 0U3.0 1F4.0 1B4.0 1U4.0 0B4.0 0U4.0""".replace("\n", " ")


def alone(dtype="float32", slicing=((1, [69]),) * 3, backend="cuda", **device):
    program = schedules.pipedream(1, len(slicing), [len(lengths) for _, lengths in slicing]).lower()
    backend = {"backend": CUDA[dtype]} if backend == "cuda" else {}
    engine = RankEngine(LONG, [(0, LONG.num_blocks)], list(slicing), program, 0, None, **backend, **device)
    engine.load(tp.init_params(LONG, 1))
    return engine


def two_stages(dtype="float32"):
    program = tp.Program.parse(AHEAD).lower()
    engine = RankEngine(LONG, [(0, 2), (2, LONG.num_blocks)], [(1, [69])] * 5, program, 0, None, backend=CUDA[dtype])
    engine.load(tp.init_params(LONG, 1))
    return engine


def tokens_of(model, batch, seq_len):
    return np.random.default_rng(2).integers(0, model.vocab_size, (batch, seq_len + 1)).astype(np.int32)


def steps_of(engine, tokens, count=3):
    losses = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(count)]
    return losses, engine.evaluate(tokens), {name: value.tobytes() for name, value in engine.export("params").items()}


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_micro_batch_crosses_tiles_of_the_head(emulation, dtype):
    """Of 64 rows: each micro-batch's begin with it."""
    tokens = tokens_of(LONG, 4, 69)
    for cuts in ([[69]] * 3, [[3, 60, 6]] * 3, [[64, 5], [69], [1, 63, 5]]):
        found = steps_of(alone(dtype, tuple(zip((1, 2, 1), cuts, strict=True))), tokens)
        if cuts == [[69]] * 3:
            right = found
        assert found == right, cuts
    cpu = steps_of(alone(slicing=[(1, [69]), (2, [69]), (1, [69])], backend="cpu"), tokens)
    np.testing.assert_allclose(np.array(right[0]), np.array(cpu[0]), rtol=NEAR[dtype])
    assert right[1] == pytest.approx(cpu[1], rel=NEAR[dtype])


def test_graphs_are_launched_between_updates_and_read_the_same_versions(emulation, untimed, monkeypatch, tmp_path):
    """Of one rank and of three; an evaluation between steps changes nothing of what they read."""
    tokens, found = tokens_of(LONG, 3, 69), []
    for wish in ("0", "1"):
        monkeypatch.setenv("TERAPIPE_CUDA_GRAPHS", wish)
        engine = alone(eager=wish == "0")
        done = [engine.run(tokens, step=i + 1, **HYPER)[:2] if i % 2 == 0 else engine.evaluate(tokens) for i in range(9)]
        found.append((done, engine.caveats))
        plan = planned(3, 5, slicing=[(1, [24])] * 5, **ON)
        _, records = trained(plan, tmp_path / wish, steps=5, eval_every=1, val_fraction=0.2, devices=[0] * 3, **ON)
        found[-1] += ([(r.loss, r.grad_norm, r.eval_loss) for r in records],)
    assert found[0] == found[1] and found[0][1] == []


def test_every_step_does_the_same_with_the_same_arguments(emulation):
    """But for what an update is told, which is in no graph: so each version is where it was in the step before."""
    engine, module, tokens, steps = two_stages("bf16"), tp.cuda.load(), tokens_of(LONG, 5, 69), []
    assert tp.Program.parse(AHEAD).versions(0) == 2
    module.emu_graphs(0)
    for step in range(1, 6):
        module.emu_trace(True)
        engine.run(tokens, step=step, **HYPER)
        steps.append(module.emu_trace(False))
        if step == 3:
            engine.evaluate(tokens)
    captured, launched = module.emu_graphs()
    assert launched == 3 * captured > 0
    names = [name for name, _ in steps[0]]
    for later in steps[1:]:
        assert [name for name, _ in later] == names
        differ = {one[0] for one, two in zip(steps[0], later, strict=True) if one != two}
        assert differ - {"mark"} == {"clip"} and names.count("clip") == 10


def test_predicted_memory_is_what_the_device_gives_and_a_step_takes_none(emulation):
    for dtype in CUDA:
        engine = alone(dtype)
        opened = engine._core.memory()
        steps_of(engine, tokens_of(LONG, 3, 69))
        program = schedules.pipedream(1, 3).lower()
        predicted = rank_memory(LONG, [(0, LONG.num_blocks)], [(1, [69])] * 3, program, backend=CUDA[dtype])
        assert engine._core.memory() == opened and opened[1] == predicted[0]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_versions_weigh_on_the_first_ranks(emulation, dtype):
    """Values in float32, and in bf16 what products read of them."""
    on = {"backend": "cuda", "dtype": dtype, "slicing": [(1, [24])] * 6}
    many, sync = planned(**on), planned(schedule="1f1b", **on)
    params = [sum(MODEL.block_params(block.kind) for block in MODEL.blocks[a:e]) for a, e in many.stages]
    for rank, (held, before) in enumerate(zip(many.peak_memory_bytes, sync.peak_memory_bytes, strict=True)):
        most = 4 * params[rank] * 1.1 + (2.2 * params[rank] if dtype == "bf16" else 0) + 16384
        assert 4 * params[rank] * (2 - rank) <= held - before <= most * (2 - rank) + 8192


# ---- by plan and launch --------------------------------------------------------------------------------------------------------


BY_NCCL = """
from test_cuda_pipedream import ON, planned, trained
plan = planned(3, 5, slicing=[(1, [24])] * 5, **ON)
print([[r.loss, r.grad_norm] for r in trained(plan, FOLDER, devices=[0] * 3, **ON)[1]])
"""


def test_launch_trains_as_on_the_cpu(emulation, untimed, fake_nccl, tmp_path):
    """Threads and processes, by NCCL and through the host, with what is made again and swapped; resumed on the CPU."""
    cpu = trained(planned(3, 5, slicing=[(1, [24])] * 5), tmp_path / "cpu", steps=4)[1]
    seen, bits = [], []
    for i, (cut, more, options) in enumerate((([24], {}, {}), ([23, 1], {"recompute": "full"}, {}),
                                              ([7, 9, 8], {}, {"processes": True}))):
        plan = planned(3, 5, slicing=[(1, cut)] * 5, **ON, **more)
        run, records = trained(plan, tmp_path / str(i), devices=[0] * 3, **ON, **options)
        report = run.report()
        assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == list(plan.peak_memory_bytes)
        assert "U" in {row[1] for row in run.trace}
        seen.append([[r.loss, r.grad_norm] for r in records])
        bits.append({name: value.tobytes() for name, value in tp.load_checkpoint(run.checkpoint_path).params.items()})
    assert seen[0] == seen[1] and bits[0] == bits[1]
    seen.append(json.loads(launched_by("nccl", fake_nccl, BY_NCCL.replace("FOLDER", repr(str(tmp_path / "nccl"))))))
    for one in seen:                                                        # other processes time their products
        np.testing.assert_allclose(one, [(r.loss, r.grad_norm) for r in cpu], rtol=NEAR["float32"])
    more = [trained(planned(3, 5, slicing=[(1, [24])] * 5, **on), tmp_path / run, steps=6, resume=True, **on, **where)[1]
            for on, run, where in (({}, "0", {}), (ON, "cpu", {"devices": [0] * 3}))]
    np.testing.assert_allclose(*([r.loss for r in records[-2:]] for records in more), rtol=NEAR["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_swapped_activations_do_not_show(emulation, untimed, dtype, tmp_path):
    """Out and in beside the work, while versions come and go."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=97, block_size=128, tie_weights=False)
    on = {"backend": "cuda", "dtype": dtype}
    request = {"batch": 6, "seq_len": 128, "schedule": "pipedream", "slicing": [(1, [128])] * 6, "stages": 3, **on}
    wide = tp.Cluster(num_devices=3, peak_flops=1e9)
    roomy = tp.plan(model, wide, planner="dawnpiper", **request)  # most of it is the workspace, which nothing makes less
    tight = dataclasses.replace(wide, memory_bytes=max(roomy.peak_memory_bytes) - 250_000, host_bandwidth_Bps=1e14)
    swapping = tp.plan(model, tight, planner="dawnpiper", **request)
    assert any(swapping.swap) and swapping.program.counts["SO"] == swapping.program.counts["SI"] > 0
    keeping = tp.plan(model, wide, planner="uniform", partition=swapping.stages, **{**request, "stages": None})
    (run, swapped), (_, kept) = (trained(plan, tmp_path / name, steps=3, devices=[0] * 3, **on)     # the last launches graphs
                                 for name, plan in (("swapped", swapping), ("kept", keeping)))
    assert [(r.loss, r.grad_norm) for r in swapped] == [(r.loss, r.grad_norm) for r in kept]
    assert list(run.report().peak_memory_bytes) == swapping.peak_memory_bytes


def test_launch_says_what_it_does_not_do(emulation):
    with pytest.raises(ValueError, match="reproducible=False"):
        tp.launch(planned(**ON), TOKENS, 1, progress=False, **ON)
    with pytest.raises(ValueError, match="tie_weights=False"):
        planned(model=tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=97, block_size=24), **ON)


# ---- what goes wrong -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [0, 3])
def test_numbers_beyond_bounds_end_the_run(emulation, untimed, apart, tmp_path):
    """With GELUs by cublasLt, and by kernels of ours (NO_GELU_AUX, NO_DGELU). Which is faster just then is taken, and of the slope
    at 1e37 the one makes NaN, the other 1: what is beyond bounds here is so either way."""
    library().tp_emu_set_cublaslt(apart)
    try:
        with pytest.raises(tp.Error, match=BEYOND):
            trained(planned(2, 4, slicing=[(1, [24])] * 4, **ON), tmp_path / "run", init=beyond_bounds(), devices=[0, 0], **ON)
    finally:
        library().tp_emu_set_cublaslt(0)


def test_a_micro_batch_whose_norm_is_not_finite_updates_nothing_nor_do_later_ones(emulation):
    """The device finds it, and the host hears of it at the end of the step; then a step begins anew."""
    tokens = tokens_of(LONG, 4, 69)
    for dtype in CUDA:
        first, whole = (alone(dtype, slicing) for slicing in (((1, [69]),), ((1, [69]),) * 4))
        first.run(tokens[:1], step=1, lr=1e37, grad_clip=0.5)
        with pytest.raises(tp.Error, match=r"the gradient norm of micro-batch 1 on the stage of blocks \[0, 4\) is nan"):
            whole.run(tokens, step=1, lr=1e37, grad_clip=0.5)
        for kind in ("params", "exp_avg", "exp_avg_sq"):
            right, found = first.export(kind), whole.export(kind)
            assert all(np.array_equal(found[name], value) for name, value in right.items()), kind
        fresh = alone(dtype, ((1, [69]),) * 4)
        params = tp.init_params(LONG, 1)
        none = {name: np.zeros_like(value) for name, value in params.items()}
        whole.load(params, {"exp_avg": none, "exp_avg_sq": none})
        assert whole.run(tokens, step=1, **HYPER)[0] == fresh.run(tokens, step=1, **HYPER)[0]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_step_that_ended_half_way_leaves_what_its_last_updates_made(emulation, dtype):
    """Wherever it ended, that is saved, and the next step goes on from there: with graphs that know where versions are."""
    module, tokens, ends = tp.cuda.load(), tokens_of(LONG, 5, 69), set()
    other = two_stages(dtype)              # into which all is loaded that a step reads

    for calls in range(24, 1000, 25):  # some end between updates that leave the newest weights where no graph reads them
        engine = two_stages(dtype)
        for step in range(2, 4):
            engine.run(tokens, step=step, **HYPER)
        module.emu_break(calls)
        try:
            engine.run(tokens, step=4, **HYPER)
            break
        except tp.Error:
            pass
        finally:
            module.emu_break(0)
        kept = {kind: engine.export(kind) for kind in ("params", "exp_avg", "exp_avg_sq")}
        ends.add(b"".join(value.tobytes() for value in kept["params"].values()))
        other.load(kept.pop("params"), kept)
        assert [engine.run(tokens, step=5 + i, **HYPER)[:2] for i in range(3)] == [
            other.run(tokens, step=5 + i, **HYPER)[:2] for i in range(3)]
    assert len(ends) > 2


def test_what_is_loaded_behind_a_step_that_ended_half_way_is_what_the_next_one_reads(emulation):
    """bf16's copies are of the newest version, into which it is loaded, not of the older one that a backward read just then."""
    module, tokens, params = tp.cuda.load(), tokens_of(LONG, 5, 69), tp.init_params(LONG, 1)
    none = {name: np.zeros_like(value) for name, value in params.items()}
    wanted = two_stages("bf16").run(tokens, step=1, **HYPER)[:2]
    for calls in range(249, 500, 50):
        engine = two_stages("bf16")
        module.emu_break(calls)
        try:
            with pytest.raises(tp.Error):
                engine.run(tokens, step=1, **HYPER)
        finally:
            module.emu_break(0)
        engine.load(params, {"exp_avg": none, "exp_avg_sq": none})
        assert engine.run(tokens, step=1, **HYPER)[:2] == wanted


def test_faults_end_every_rank_with_the_first_words(fake_nccl):
    faults = nccl_faults(at=60, dead=2)
    assert_first_words(faults, answers(fake_nccl, *({"micros": 8, **case} for case, _ in faults.values())))
