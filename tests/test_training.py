"""The whole loop: plan, launch, train, evaluate, stop, resume and fail, with the real engine, in threads and in processes."""
import dataclasses
import os
import signal
import subprocess
import sys
import time
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import reference as ref

import terapipe_c as tp
from terapipe_c import engine

SEQ, BATCH, STEPS = 24, 4, 50
MODEL = dict(n_layer=3, n_head=2, n_embd=16, vocab_size=61, block_size=SEQ)
CLUSTER = tp.Cluster(num_devices=8, devices_per_node=8, memory_bytes=1 << 34, link_latency_s=1e-6, link_bandwidth_Bps=1e10,
                     peak_flops=1e11)
DATA = (np.cumsum(np.random.default_rng(5).integers(0, 4, 6000)) % 61).astype(np.int32)  # the next token can be learnt
HYPER = dict(lr=1e-2, warmup_steps=4, weight_decay=0.1, seed=3)
HERE = Path(__file__).resolve().parent
BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def make_plan(ranks=2, schedule="1f1b", slicing=1, chunks=None, partition=None, tie=True, batch=BATCH, planner="auto",
              **change):
    model = tp.GPTConfig(**{**MODEL, "tie_weights": tie, **change})
    return tp.plan(model, CLUSTER, batch=batch, seq_len=SEQ, planner=planner, schedule=schedule, slicing=slicing, chunks=chunks,
                   partition=partition, stages=None if partition else ranks, costs=tp.CostModel.analytic(model, CLUSTER))


def start(plan, steps=STEPS, data=DATA, **options):
    return tp.launch(plan, data, steps, progress=False, **{**HYPER, **options})


def trained(folder, plan, steps=STEPS, **options):
    """Losses, gradient norms and every tensor of a finished run, whose predicted memory must have been its memory."""
    run = start(plan, steps, out=folder, checkpoint_every=steps, **options)
    records = list(run)
    assert [record.step for record in records] == list(range(steps))
    report = run.report()
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes and len(report.peak_memory_bytes) == plan.ranks
    saved = tp.load_checkpoint(folder)
    assert saved.step == steps
    return [(record.loss, record.grad_norm) for record in records], {"params": saved.params, **saved.optimizer}


@cache
def reference(tie, folder):
    """One rank, one thread, whole sequences."""
    return trained(folder / f"reference-{tie}", make_plan(1, "gpipe", tie=tie), processes=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def same(one, two):
    assert one[0] == two[0]
    for kind, tensors in one[1].items():
        assert tensors.keys() == two[1][kind].keys()
        for name, array in tensors.items():
            assert np.array_equal(array, two[1][kind][name]), (kind, name)


@BOTH
def test_as_many_receives_ahead_as_a_program_posts(processes):
    """Tokens one by one through interleaved stages: rank 0 is two sequences ahead, and 64 receives were all that fitted."""
    one = start(make_plan(1, "gpipe", 1, batch=6), 2, processes=False).wait()
    fine = start(make_plan(2, "interleaved", SEQ, chunks=4, batch=6), 2, processes=processes).wait()
    assert [record.loss for record in fine.history] == [record.loss for record in one.history]


@BOTH
def test_a_slice_too_short_to_be_lent_hides_no_other_that_is(processes, tmp_path):
    """Its gradient of 32 bytes is sent, the other slice's lent: the next micro-batch's was written over both while the rank below
    was at work and had yet to read."""
    shape = dict(batch=16, n_embd=8, tie=False, planner="uniform")
    late = make_plan(schedule="gpipe", slicing=[(1, [1, SEQ - 1])] * 16, partition=[(0, 7), (7, 8)], **shape)
    same(trained(tmp_path / "alone", make_plan(1, "gpipe", **shape), 10, processes=False),
         trained(tmp_path / "late", late, 10, processes=processes))


THREADS, PROCESSES = False, True
PIECES = [(0, 1), (1, 4), (4, 8)]  # the embedding alone; a cut between an attention and its ffn
# (plan, threads or processes, threads per rank): each pair of values of two columns comes up somewhere
RUNS = {
    "1 rank, sliced, 3 threads each, process": (dict(ranks=1, schedule="seq1f1b", slicing=4), PROCESSES, 3),
    "2 ranks, gpipe, ragged": (dict(schedule="gpipe", slicing=[(1, [1, 1, 17, 5])] * 4), PROCESSES, 1),
    "2 ranks, 1f1b, grouped, 2 threads each": (dict(slicing=[(2, [24]), (2, [7, 17])]), PROCESSES, 2),
    "2 ranks of 2 chunks": (dict(schedule="interleaved", chunks=2, slicing=[(1, [12, 12])] * 4), PROCESSES, 1),
    "3 ranks, seq1f1b, 2 threads each": (dict(schedule="seq1f1b", slicing=5, partition=PIECES), THREADS, 2),
    "3 ranks, 1f1b, ragged and grouped": (dict(partition=PIECES, slicing=[(1, [23, 1]), (3, [24])]), PROCESSES, 1),
    "4 ranks, gpipe, grouped and sliced": (dict(ranks=4, schedule="gpipe", slicing=[(4, [5, 19])]), THREADS, 1),
    "4 ranks, seq1f1b": (dict(ranks=4, schedule="seq1f1b", slicing=3), PROCESSES, 1),
    "4 ranks of 2 chunks, 3 threads each": (dict(ranks=4, schedule="interleaved", chunks=2, slicing=2), THREADS, 3),
}
UNTIED = ("1 rank, sliced, 3 threads each, process", "2 ranks, 1f1b, grouped, 2 threads each", "2 ranks of 2 chunks",
          "3 ranks, seq1f1b, 2 threads each", "4 ranks, gpipe, grouped and sliced")


@pytest.mark.parametrize(("name", "tie"), [(name, True) for name in RUNS] + [(name, False) for name in UNTIED])
def test_50_steps_have_the_same_bits_however_they_are_run(shared, tmp_path, name, tie):
    options, processes, threads = RUNS[name]
    right = reference(tie, shared)
    assert right[0][-1][0] < 0.75 * right[0][0][0]  # it learns
    same(right, trained(tmp_path / "run", make_plan(tie=tie, **options), processes=processes, threads_per_rank=threads))


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_20_steps_agree_with_the_oracles_adamw(tmp_path, tie, bias):
    plan = make_plan(3, "seq1f1b", 3, tie=tie, bias=bias)
    options = dict(lr=3e-2, min_lr=1e-3, warmup_steps=5, weight_decay=0.3, betas=(0.8, 0.99), eps=1e-7, grad_clip=0.7)
    losses, saved = trained(tmp_path / "a", plan, 20, processes=False, **options)
    init = tp.init_params(plan.model, seed=HYPER["seed"])
    batches = [tp.Dataset(DATA, SEQ, BATCH, seed=HYPER["seed"]).batch(step) for step in range(20)]
    expected, weights = ref.train(plan.model, init, batches, **options)
    assert max(abs(loss / right - 1) for (loss, _), right in zip(losses, expected, strict=True)) <= 1e-4
    assert expected[-1] < expected[0] and max(norm for _, norm in losses) > 0.7 > 0  # clipping did something
    for name, right in weights.items():
        moved = np.linalg.norm(right - init[name])
        assert moved > 0 and np.linalg.norm(saved["params"][name] - right) <= 1e-2 * moved, name


@pytest.mark.parametrize("betas", [(0.9, 0.99999), (0.9999999, 0.999999999999)])
def test_betas_that_no_float_is_are_the_oracles(betas):
    """1 - 0.99999f is a 700th more than 1 - 0.99999; and the nearest float to the last of these is 1."""
    plan, options = make_plan(1, "gpipe"), dict(lr=1e-2, lr_schedule="constant", betas=betas)
    losses = [record.loss for record in start(plan, 20, processes=False, **options, warmup_steps=0)]
    batches = [tp.Dataset(DATA, SEQ, BATCH, seed=HYPER["seed"]).batch(step) for step in range(20)]
    expected, _ = ref.train(plan.model, tp.init_params(plan.model, seed=HYPER["seed"]), batches, **options)
    assert expected[-1] < expected[0] - 0.1
    assert max(abs(loss / right - 1) for loss, right in zip(losses, expected, strict=True)) <= 1e-5


def test_20_steps_agree_with_torch(tmp_path):
    pytest.importorskip("torch")
    import torch_reference

    plan = make_plan(2, "gpipe", 3)
    losses, _ = trained(tmp_path / "a", plan, 20, processes=True)
    batches = [tp.Dataset(DATA, SEQ, BATCH, seed=HYPER["seed"]).batch(step) for step in range(20)]
    hyper = {name: value for name, value in HYPER.items() if name != "seed"}
    expected, _ = torch_reference.train(plan.model, tp.init_params(plan.model, seed=HYPER["seed"]), batches, **hyper)
    assert max(abs(loss / right - 1) for (loss, _), right in zip(losses, expected, strict=True)) <= 1e-4


def test_the_seed_is_in_the_parameters_and_in_the_data(monkeypatch):
    plan = make_plan(1, "gpipe")
    one, again, other = ([r.loss for r in start(plan, 3, seed=seed, processes=False)] for seed in (3, 3, 4))
    assert one == again and not set(one) & set(other)
    init = tp.init_params(plan.model, seed=3)
    monkeypatch.setattr(engine, "_initial", None)       # nobody draws what others replace: a GPT-2 took seconds of it
    given = [r.loss for r in start(plan, 3, seed=4, processes=False, init=init)]
    assert given[0] not in (one[0], other[0])  # the weights of one on the data of the other


def test_parameters_of_another_model_are_refused(tmp_path):
    """All that this one needs may be among them, and in the right shapes."""
    plan = make_plan(2, "gpipe")
    own = tp.init_params(plan.model, seed=3)
    tied = {**own, "lm_head.weight": own["transformer.wte.weight"].copy()}      # as PyTorch's state_dict has it
    losses = [[record.loss for record in start(plan, 1, init=init, processes=False)] for init in (own, tied)]
    assert losses[0] == losses[1]
    deeper = tp.init_params(tp.GPTConfig(**{**MODEL, "n_layer": 4}), seed=3)
    tokens = DATA[:2 * (SEQ + 1)].reshape(2, SEQ + 1)
    for params, name in ((deeper, "h.3.ln_1.weight"), ({**tied, "lm_head.weight": tied["lm_head.weight"] + 1}, "lm_head.weight")):
        with pytest.raises(ValueError, match=f"init: '.*{name}' is no parameter of GPTConfig"):
            start(plan, 1, init=params, processes=False)
        with pytest.raises(ValueError, match=f"params: '.*{name}' is no parameter of GPTConfig"):
            tp.loss_and_grads(plan.model, params, tokens)
    list(start(make_plan(1, "gpipe", n_head=4), 1, out=tmp_path / "heads", processes=False))
    for init in (tmp_path / "heads", tp.load_checkpoint(tmp_path / "heads")):
        with pytest.raises(ValueError, match="the checkpoint's model has n_head 4, the plan's has 2"):
            start(plan, 1, init=init, processes=False)


def test_more_threads_than_the_memory_of_the_plan_allows_are_refused():
    plan = make_plan(2, planner="uniform")
    plan = dataclasses.replace(plan, memory_limit_bytes=max(plan.peak_memory_bytes))
    with pytest.raises(tp.InfeasibleError, match=r"rank \d needs \d+ bytes with threads_per_rank = 2 and may use \d+: \d+ bytes"):
        start(plan, 1, threads_per_rank=2, processes=False)
    start(plan, 1, processes=False).wait()


# ---- evaluation, stopping, what it measured --------------------------------------------------------------------------

EVALUATED = {
    "1 rank": dict(ranks=1, schedule="gpipe"), "2 ranks, 1f1b": dict(slicing=2),
    "3 ranks, seq1f1b": dict(ranks=3, schedule="seq1f1b", slicing=4),
    "2 ranks of 2 chunks": dict(schedule="interleaved", chunks=2, slicing=2),
    "grouped": dict(ranks=4, schedule="gpipe", slicing=[(4, [20, 4])]),
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_is_the_mean_loss_of_the_held_out_batches(tmp_path, name):
    plan = make_plan(**EVALUATED[name])
    run = start(plan, 5, out=tmp_path / "a", eval_every=2, eval_batches=3, checkpoint_every=5, processes=name == "2 ranks, 1f1b")
    records = list(run)
    assert [record.step for record in records if record.eval_loss is not None] == [1, 3, 4]
    held_out = tp.Dataset(DATA, SEQ, BATCH, seed=HYPER["seed"], split="val")
    params = tp.load_checkpoint(tmp_path / "a").params
    losses = [tp.loss_and_grads(plan.model, params, held_out.batch(i))[0] for i in range(3)]
    assert records[-1].eval_loss == run.loss_eval == np.mean(losses)
    plain = [record.loss for record in start(plan, 5, processes=False)]
    assert [record.loss for record in records] == plain  # evaluating changes nothing


@BOTH
def test_stop_ends_after_a_step_with_a_checkpoint(tmp_path, processes):
    run = start(make_plan(2, slicing=2), 100_000, out=tmp_path / "a", checkpoint_every=100_000, processes=processes,
                eval_every=50_000)
    for record in run:
        if record.step == 3:
            break
    run.stop()
    done = len(run.history)
    assert not run.running and 4 <= done < 100_000
    assert tp.load_checkpoint(tmp_path / "a").step == done and run.checkpoint_path.name == f"step-{done:08d}"
    assert run.loss_eval is not None and run.report().steps[-1] == done - 1


@pytest.mark.parametrize("options", [
    dict(ranks=1, schedule="gpipe", slicing=2), dict(ranks=3, schedule="seq1f1b", slicing=[(1, [5, 6, 13]), (3, [20, 4])]),
    dict(ranks=2, schedule="interleaved", chunks=3, slicing=2)], ids=["1 rank", "3 ranks", "2 ranks of 3 chunks"])  # fmt: skip
@BOTH
def test_the_measured_timeline_has_every_operation_once_and_no_two_at_a_time(processes, options):
    plan = make_plan(**options)
    run = start(plan, 3, processes=processes).wait()
    line = run.timeline()
    units = sum(len(lengths) for _, lengths in plan.slicing)
    rows = [row for row in line.intervals.tolist()]
    names = line.intervals.dtype.names
    assert names == ("rank", "op", "stage", "micro", "slice", "start_s", "end_s")
    ops = [row[1] if isinstance(row[1], str) else tp.schedules.OPS[row[1]] for row in rows]
    for op in "FIW":
        seen = [row[2:5] for row, kind in zip(rows, ops, strict=True) if kind == op]
        assert len(seen) == len(set(seen)) == units * len(plan.stages)
    for rank in range(plan.ranks):
        mine = sorted((row[5], row[6]) for row in rows if row[0] == rank)
        assert all(end <= start for (_, end), (start, _) in zip(mine, mine[1:], strict=False))
        assert all(0 <= start <= end for start, end in mine)
    ends = {(op, *row[2:5]): row[6] for row, op in zip(rows, ops, strict=True)}
    for row, op in zip(rows, ops, strict=True):  # one clock for all ranks: no operation before what it needs
        if op == "F" and row[2] > 0:
            assert row[5] >= ends["F", row[2] - 1, row[3], row[4]]
        if op == "I" and row[2] + 1 < len(plan.stages):
            assert row[5] >= ends["I", row[2] + 1, row[3], row[4]]
    idle = plan.ranks * line.makespan_s - sum(line.busy_s)
    assert sum(line.bubbles.values()) == pytest.approx(idle, rel=1e-6) and idle >= 0


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_a_run_resumed_under_other_plans_continues_bit_for_bit(tmp_path):
    right = trained(tmp_path / "whole", make_plan(1, "gpipe"), 16, processes=False, lr_schedule="constant")
    chain = [(4, dict(ranks=2, schedule="seq1f1b", slicing=3), PROCESSES), (8, dict(ranks=3, schedule="gpipe"), THREADS),
             (9, dict(ranks=1, schedule="1f1b", slicing=[(4, [1, 23])]), THREADS),
             (16, dict(ranks=2, schedule="interleaved", chunks=4, slicing=2), PROCESSES)]
    losses = []
    for until, options, processes in chain:
        run = start(make_plan(**options), until, out=tmp_path / "a", lr_schedule="constant", processes=processes,
                    resume=bool(losses)).wait()
        assert [record.step for record in run.history] == list(range(len(losses), until))
        losses += [(record.loss, record.grad_norm) for record in run.history]
    saved = tp.load_checkpoint(tmp_path / "a")
    same(right, (losses, {"params": saved.params, **saved.optimizer}))


def test_a_killed_run_continues_from_its_last_checkpoint_bit_for_bit(shared, tmp_path):
    right = reference(True, shared)
    run = start(make_plan(2, "1f1b"), out=tmp_path / "a", checkpoint_every=10, engine="failing_engine:is_killed")
    with pytest.raises(tp.PeerError, match="rank 1 was killed"):
        run.wait()
    rest = start(make_plan(3, "seq1f1b", 2), out=tmp_path / "a", checkpoint_every=10, resume=True, processes=False).wait().history
    assert rest[0].step == 20
    assert [(record.loss, record.grad_norm) for record in rest] == right[0][20:]


def test_a_resume_says_which_options_are_not_the_checkpoints(tmp_path):
    """launch's defaults would change the learning rate unseen."""
    start(make_plan(1), 2, out=tmp_path / "a", processes=False, lr_schedule="constant").wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(make_plan(2), 3, out=tmp_path / "a", processes=False, resume=True, lr_schedule="constant").wait()
    words = r"resumed with lr = 0\.0006 \(the checkpoint's is 0\.01\), min_lr = .*, warmup_steps = 0"
    with pytest.warns(UserWarning, match=words) as told:
        tp.launch(make_plan(1), DATA, 4, seed=3, out=tmp_path / "a", processes=False, progress=False, resume=True).wait()
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"lr = 0\.0006000000284984708 \(the checkpoint's is 0\.0006\)"):     # %g of both: 0.0006
        start(make_plan(1), 5, out=tmp_path / "a", processes=False, resume=True, lr=np.float32(0.0006)).wait()


def test_training_starts_from_what_hugging_face_wrote(tmp_path):
    plan = make_plan(2)
    params = tp.init_params(plan.model, seed=9)
    folder = tp.export_hf(tmp_path / "hf", model=plan.model, params=params)
    losses = [[record.loss for record in start(plan, 2, init=init, processes=False)]
              for init in (params, tp.import_hf(folder), str(folder), tp.export_hf(tmp_path / "again", tp.import_hf(folder)))]
    assert losses[0] == losses[1] == losses[2] == losses[3]
    for change, words in ((dict(n_head=4), "n_head 2, the plan's has 4"), (dict(tie=False), "tie_weights True, the plan's")):
        with pytest.raises(ValueError, match=f"^init: the checkpoint's model has {words}"):
            start(make_plan(2, **change), 2, init=tp.import_hf(folder), processes=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint in this folder"):
        start(plan, 2, init=tmp_path / "empty", processes=False)
    assert len(repr(tp.import_hf(folder))) < 200


# ---- runs that go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@BOTH
def test_an_exception_in_a_rank_ends_all_and_names_rank_and_step(processes, ranks):
    run = start(make_plan(ranks, slicing=2), 100_000, processes=processes, engine="failing_engine:fails")
    seen = []
    with pytest.raises(tp.Error, match=f"^rank {ranks - 1} failed at step 3.*ArithmeticError: the third step is one too many"):
        seen.extend(run)
    steps = [record.step for record in seen]  # the third step's record is lost if the abort overtakes it
    assert steps in ([0, 1], [0, 1, 2]) and not run.running
    assert len(start(make_plan(ranks), 2, processes=processes).wait().history) == 2  # and again


@BOTH
def test_a_loss_that_is_not_a_number_ends_the_run_by_name_and_step(tmp_path, processes):
    run = start(make_plan(2), 100, lr=1e30, lr_schedule="constant", warmup_steps=0, out=tmp_path / "a", checkpoint_every=1,
                processes=processes)
    with pytest.raises(tp.ExecutionError, match=r"^rank [01] failed at step (\d+) while running optimizer update on stage [01]: "
                                                r"step \1: the loss is") as caught:
        run.wait()
    assert f"at step {len(run.history)} " in str(caught.value)
    saved = tp.load_checkpoint(tmp_path / "a")
    assert saved.step == len(run.history)


def test_data_that_was_mapped_may_be_removed_when_launch_has_returned(tmp_path):
    DATA.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    run = start(make_plan(2), 1, np.memmap(tmp_path / "tokens.bin", np.uint16, "r"))
    (tmp_path / "tokens.bin").unlink()
    assert [record.loss for record in run] == [record.loss for record in start(make_plan(2), 1, processes=False)]


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_killed_rank_is_named_with_what_it_was_doing(ranks, victim):
    run = start(make_plan(ranks, slicing=3), 1_000_000)
    with pytest.raises(tp.PeerError, match=rf"^rank {victim} was killed by signal 9 \(SIGKILL\) at step \d+"):
        for record in run:
            if record.step == 2:
                os.kill(run.pids[victim], signal.SIGKILL)
    assert not run.running


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from test_training import long_steps
run = long_steps({ranks}, {processes})
while any("while running" not in run._region.doing(rank) for rank in range({ranks})):
    time.sleep(0.01)
print(*run.pids, "ready", flush=True)
run.wait()
"""


def long_steps(ranks, processes, **options):
    """A step takes many times longer than anything here waits; its instructions take milliseconds."""
    plan = make_plan(ranks, "1f1b", batch=4000, planner="uniform", n_layer=6, n_head=4, n_embd=128)
    return start(plan, 100, processes=processes, **options)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("processes", "number"), [(False, signal.SIGINT), (True, signal.SIGINT), (True, signal.SIGKILL)],
                         ids=["threads, Ctrl-C", "processes, Ctrl-C", "processes, SIGKILL of the launcher"])  # fmt: skip
def test_a_signal_ends_everything_in_the_middle_of_a_step(tmp_path, processes, number, ranks):
    (tmp_path / "user.py").write_text(SCRIPT.format(here=str(HERE), ranks=ranks, processes=processes))
    paths = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.Popen([sys.executable, str(tmp_path / "user.py")], cwd=tmp_path, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    words = child.stdout.readline().split()
    assert words and words[-1] == "ready", child.communicate()
    pids = [int(word) for word in words[:-1]]
    assert len(pids) == (ranks if processes else 0) and all(map(alive, pids))
    child.send_signal(number)
    _, errors = child.communicate(timeout=15)
    assert child.returncode == -number, errors
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))


@pytest.mark.parametrize("ranks", [1, 2])
@BOTH
def test_leaving_the_with_block_by_an_exception_ends_the_run_in_the_middle_of_a_step(processes, ranks):
    with pytest.raises(ZeroDivisionError), long_steps(ranks, processes) as run:
        while "while running" not in run._region.doing(ranks - 1):
            time.sleep(0.01)
        assert 1 / 0
    assert not run.running and not run.history
    with pytest.raises(tp.AbortedError, match="with block"):
        run.wait()
