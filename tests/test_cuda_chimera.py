"""Chimera on the emulated device: two copies of the model in opposite directions, by NCCL (a libnccl of threads) and through the
host."""
import json
import os
import signal

import numpy as np
import pytest
from cuda_ranks import NEAR, ON, assert_first_words, emulated, nccl_faults, trained
from cuda_ranks import launched as launched_by
from test_chimera_engine import DATA, MODEL, OPTIONS, UNTIED, chimera, replicated

import terapipe_c as tp
from terapipe_c.device_comm import flows, lines

# (ranks, slicing of one copy of 3 sequences): micro-batches of one, for the GPU sums a whole one's tokens at a time
WAYS = [(2, [(1, [24])] * 3), (4, [(1, [24])] * 3), (2, [(1, [20, 4]), (1, [1, 9, 14]), (1, [24])])]
EACH = [{}, {"mode": "host"}, {"pending": 2}, {"mode": "host", "pending": 2}, {"fault": {"looks": 7}}, {"again": True}]
TOGETHER = [{}, {"mode": "host"}, {"fault": {"looks": 7}, "pending": 2, "again": True}]
SHAPES = [({"ranks": 2, "micros": 4}, EACH), ({"ranks": 4, "micros": 4, "tied": False}, TOGETHER),
          ({"ranks": 4, "micros": 8, "lengths": (7, 5)}, TOGETHER), ({"ranks": 6, "micros": 6, "lengths": (12,)}, TOGETHER)]


def answers(fake, *cases):
    return emulated(fake, *({"schedule": "chimera", "ranks": 4, "micros": 4, **case} for case in cases))


@pytest.mark.parametrize(("shape", "ways"), SHAPES, ids=[f"{s['ranks']} ranks, {s['micros']} micro-batches" for s, _ in SHAPES])
def test_the_bits_do_not_depend_on_the_way_of_messages(fake_nccl, shape, ways):
    """Nor on the library's pace, or when W is done; steps that are captured and launched as graphs too."""
    *device, cpu = map(trained, answers(fake_nccl, *({**case, **shape} for case in ways), {"mode": "cpu", **shape}))
    assert all(one == device[0] for one in device[1:])
    for one, other in zip(device[0][0], cpu[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR["float32"])


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 4), ("bf16", 2)])
def test_the_bits_of_as_many_replicas(fake_nccl, dtype, ranks):
    """Of the same sequences, each with its half of them: members of a sum are added in one order, however the ranks meet."""
    shape = {"lengths": (12,), "steps": 2, "dtype": dtype, "ranks": ranks}
    pair, four, one, two = map(trained, answers(
        fake_nccl, {"schedule": "one_f_one_b", "micros": 2, "replicas": 2, **shape},
        {"schedule": "one_f_one_b", "micros": 2, "replicas": 4, **shape}, shape, {"replicas": 2, **shape}))
    assert one == pair and two == four and one != two


def test_who_is_connected():
    assert list(np.frombuffer(lines(6, 2, 2), np.uint8).reshape(6, 6).nonzero()[1]) == [1, 0, 2, 1, 4, 3, 5, 4]
    assert np.frombuffer(lines(4, hosts=[(0, 3), (2, 3)]), np.uint8).tolist() == [0, 1, 0, 2, 0, 0, 1, 0, 0, 0, 0, 3, 1, 0, 0, 0]
    assert flows(tp.schedules.zb_v(3, 2).lower(False)) == {(0, 1), (1, 2), (2, 1), (1, 0)}
    one = np.frombuffer(lines(3, more=[(2, 1), (1, 0)]), np.uint8).reshape(3, 3)
    assert one.tolist() == [[0, 1, 0], [1, 0, 1], [1, 1, 0]]
    assert (np.frombuffer(lines(6, 2, more=[(2, 1), (1, 0)]), np.uint8).reshape(6, 6) == np.kron(np.eye(2), one)).all()
    assert not any(lines(3, 3)) and list(lines(2)) == [0, 1, 1, 0] == list(lines(2, copies=2))


def test_faults_end_every_rank_with_the_first_words(fake_nccl):
    faults = nccl_faults(at=150, dead=3)
    assert_first_words(faults, answers(fake_nccl, *({"micros": 8, **case} for case, _ in faults.values())))


# ---- by launch and train --------------------------------------------------------------------------------------------------

def launched(plan, steps=3, **options):
    run = tp.launch(plan, DATA, steps, **{**OPTIONS, **ON, "devices": [0] * plan.num_devices, **options}).wait()
    report = run.report()
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == list(plan.peak_memory_bytes) * plan.data_parallel
    return run


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied"])
def test_runs_have_the_bits_of_two_replicas(emulation, model, tmp_path):
    """Threads and processes; losses, norms, evaluations and weights; near what the CPU trains."""
    right = launched(replicated(2, model, slicing=WAYS[0][1], **ON), processes=False, out=tmp_path / "right", eval_every=3,
                     checkpoint_every=3)
    wanted = [(r.loss, r.grad_norm, r.eval_loss) for r in right.history]
    weights = tp.load_checkpoint(tmp_path / "right").params
    for i, way in enumerate(WAYS):
        plan = chimera(way, model, **ON)
        assert not plan.executable and plan.why_not_at_all == ""
        run = launched(plan, processes=i == 2 and model is MODEL, out=tmp_path / str(i), eval_every=3, checkpoint_every=3)
        assert [(r.loss, r.grad_norm, r.eval_loss) for r in run.history] == wanted, way
        found = tp.load_checkpoint(tmp_path / str(i)).params
        assert found.keys() == weights.keys() and all((found[name] == weights[name]).all() for name in weights), way
    cpu = tp.launch(chimera(WAYS[0], model), DATA, 3, processes=False, **OPTIONS).wait()
    for one, other in zip(wanted, cpu.history, strict=True):
        np.testing.assert_allclose(one[:2], (other.loss, other.grad_norm), rtol=NEAR["float32"])


def test_launch_says_what_it_does_not_do(emulation):
    plan = chimera(**ON)
    with pytest.raises(tp.Error, match=r"two copies of the model, .*launch\(\.\.\., reproducible=False\)"):
        tp.launch(plan, DATA, 1, progress=False, **ON)
    with pytest.raises(tp.Error, match=r"the plan has 2 ranks and this machine shows 1 GPU"):
        tp.launch(plan, DATA, 1, **OPTIONS, **ON)


def test_a_rank_dies(emulation):
    run = tp.launch(chimera(WAYS[1], **ON), DATA, 10_000, devices=[0] * 4, **OPTIONS, **ON)
    next(iter(run))
    os.kill(run.pids[2], signal.SIGKILL)
    with pytest.raises(tp.Error, match=r"rank 2 was killed by signal 9 \(SIGKILL\)"):
        run.wait()
    assert not run.running


BY_NCCL = """
from test_cuda_chimera import ON, WAYS, chimera, launched
print([[[r.loss, r.grad_norm] for r in launched(chimera(way, **ON), processes=False).history] for way in WAYS[:2]])
"""


def test_launch_by_nccl_gives_the_bits_of_the_host(emulation, fake_nccl):
    host = launched(chimera(WAYS[0], **ON), processes=False)
    two, four = json.loads(launched_by("nccl", fake_nccl, BY_NCCL))
    assert two == four == [[r.loss, r.grad_norm] for r in host.history] and len(two) == 3
