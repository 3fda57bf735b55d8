"""Replicas on the emulated device: what they train on the CPU, the same bits whatever their stages and whatever their messages go
through, memory to the byte, and twins that die, hang or fail in the sums."""
import json
import os
import re
import signal

import cuda_emu
import numpy as np
import pytest
from cuda_ranks import NEAR, ON, emulated, trained
from cuda_ranks import launched as launched_by
from ports import free_port
from test_replicas import DATA, MODEL, OPTIONS, planned
from test_replicas import trained as launched
from test_shards import WIDE, left, same
from test_train import begin, torchrun
from test_train import told as heard

import terapipe_c as tp
from terapipe_c.planning.replicas import Replicas

# of a replica of 2 sequences
ONE, TWO = {"schedule": "gpipe", "ranks": 1, "lengths": (12,)}, {"ranks": 2, "lengths": (5, 4, 3)}
SHAPES = [ONE, TWO, {"schedule": "gpipe", "ranks": 3, "lengths": (1, 11)},
          {"schedule": "interleaved", "ranks": 2, "chunks": 2, "lengths": (7, 5)},
          {"schedule": "zb_h1", "pending": None, "ranks": 2, "lengths": (12,)}]


def answers(fake, *cases):
    return emulated(fake, *({"layers": 2, "replicas": 2, **TWO, **case} for case in cases))


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("bf16", False)], ids=["float32, tied", "bf16, untied"])
def test_the_same_bits_whatever_the_stages_and_the_communicator(fake_nccl, tied, dtype):
    """Steps that are captured and launched as graphs too, and near what they train on the CPU."""
    cases = [*SHAPES, {"mode": "host"}, {"mode": "inproc"}, {"mode": "host", **ONE}, {"fault": {"looks": 6}}, {"mode": "cpu"}]
    *device, cpu = answers(fake_nccl, *({"tied": tied, "dtype": dtype, **case} for case in cases))
    wanted = trained(device[0])
    assert all(trained(one)[:2] == wanted[:2] for one in device[1:])
    assert all((one["calls"] > 0) == ("mode" not in case) for one, case in zip(device, cases, strict=False))
    for one, other in zip(wanted[0], trained(cpu)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR[dtype])
    grads, found = ({name: grad for rank in one["told"] for name, grad in rank["first"].items()} for one in (cpu, device[0]))
    for name, grad in grads.items():
        assert np.linalg.norm(np.subtract(found[name], grad)) <= NEAR[dtype] * np.linalg.norm(grad), name


def test_a_tied_weight_of_bf16_and_an_untied_one_of_float32(fake_nccl):
    cases = [{**shape, **options} for options in ({"dtype": "bf16"}, {"tied": False}) for shape in (ONE, TWO)]
    one, two, three, four = (trained(result)[:2] for result in answers(fake_nccl, *cases))
    assert one == two != three == four


def test_more_replicas(fake_nccl):
    """Of three and five, whose pairs meet in odd rounds, and where there are more messages than a device is behind its host."""
    cases = [{"replicas": replicas, "mode": mode, "steps": 2, **shape} for replicas, shape in ((3, TWO), (5, ONE))
             for mode in ("nccl", "host", "cpu")]
    results = answers(fake_nccl, *cases)
    for nccl, host, cpu in (results[:3], results[3:]):
        assert trained(nccl) == trained(host)
        for one, other in zip(trained(nccl)[0], trained(cpu)[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_shards_of_the_optimizer_by_every_communicator(fake_nccl, dtype):
    """Weights and clipped norms are those of replicas that have all moments; of three, and with graphs, too."""
    for replicas, shape in ((2, TWO), (3, ONE)):
        asked = {"replicas": replicas, "dtype": dtype, "tied": replicas == 2, **shape}
        ways = ({}, {"mode": "host"}, {"mode": "inproc"}, {"fault": {"looks": 6}})
        whole, *sharded = answers(fake_nccl, asked, *({**asked, "shards": True, **way} for way in ways))
        losses, _, weights = trained(whole)
        assert all(trained(one)[0] == losses and trained(one)[2] == weights for one in sharded)


HELLOS = 2 * 2 * 2 * 2 * 2 + 2 * 2 * 2    # two rings of two: edges, directions, ends, a send and a receive; two pairs of twins
MESSAGES = 2 * 3 * 2 * 2 * 2 + 2 * 2 * 2  # of a step of two replicas: micro-batches, slices, directions, both ends; the tied weight
SUMS = HELLOS + MESSAGES
DOING = r"; rank \d is at step 0 while running optimizer update on stage \d"
FAULTS = {   # what happens to whom, and the words of the first who sees it
    "fails": ({"fault": {"fail_at": SUMS + 3, "code": 6}}, r"rank (\d): NCCL's ncclGroupEnd with rank \d: remote .*" + DOING),
    "hangs in the library": ({"fault": {"stuck_at": SUMS + 3}, "timeout_s": 2.0}, r"rank (\d) waited 2 s for NCCL's .*" + DOING),
    "hangs on the device": ({**ONE, "lag": True, "timeout_s": 2.0},
                            r"rank (\d) waited 2 s to exchange gradients with rank (?!\1)\d" + DOING),
    "does not come": ({**ONE, "late": 1, "timeout_s": 2.0},
                      r"rank (0) waited 2 s for NCCL's message with rank 1; rank 1 is at step 0 while"),    # its twin's sums
    "dies": ({"dead": 3}, r"rank (3) was killed"),
    "dies while its twins wait for it": ({"dead": 0, **ONE, "replicas": 3}, r"rank (0) was killed"),
}


def test_faults_end_every_rank_with_the_first_words(fake_nccl):
    results = answers(fake_nccl, *(case for case, _ in FAULTS.values()))
    for (name, (_, words)), result in zip(FAULTS.items(), results, strict=True):
        told = result["told"]
        assert all(isinstance(one, str) for one in told), (name, told)
        _, first, text = result["first"]
        echoes = [one for one in told if one.startswith("AbortedError")]
        both = name.startswith("hangs")                        # then both ends' deadlines may pass before either has told
        assert (match := re.search(words, text)) and int(match[1]) == first, (name, text)
        assert all(one in echoes or re.search(words, one) for rank, one in enumerate(told) if rank != first), (name, told)
        assert len(echoes) >= len(told) - 1 - both, (name, told)
        assert all(f"because rank {first} failed first" in one for one in echoes), (name, told)
        each = 2 if result["ranks"] == 1 else 6               # the world, that of the twins, and of two pairs both directions
        assert result["aborts"] == each * len(told) and result["misuses"] == 0, (name, result)


# ---- by launch and train ------------------------------------------------------------------------------------------------

# (stages, chunks, schedule, slicing of a replica of 3 sequences, one in a micro-batch)
WAYS = [(1, 1, "gpipe", [(1, [24])] * 3), (2, 1, "1f1b", [(1, [20, 4])] * 3), (1, 2, "interleaved", [(1, [11, 13])] * 3),
        (2, 1, "zb-h1", [(1, [24])] * 3), (3, 1, "gpipe", [(1, [12, 12])] * 3)]


def test_launch_trains_the_same_bits_whatever_the_stages(emulation, tmp_path):
    wanted = launched(planned(MODEL, 2, WAYS[1]), processes=False, out=tmp_path / "cpu", eval_every=3, checkpoint_every=3)
    told, weights = None, None
    for i, way in enumerate(WAYS):
        plan = planned(MODEL, 2, way, **ON)
        assert not plan.executable and plan.why_not_at_all == ""
        run = launched(plan, processes=i == 1, devices=[0] * plan.num_devices, out=tmp_path / str(i), eval_every=3,
                       checkpoint_every=3, **ON)
        losses = [(r.loss, r.grad_norm, r.eval_loss) for r in run.history]
        params = tp.load_checkpoint(tmp_path / str(i)).params
        told, weights = told or losses, weights or params
        assert losses == told and all((params[name] == weights[name]).all() for name in weights), way
    for one, other in zip(told, wanted.history, strict=True):
        np.testing.assert_allclose(one[:2], (other.loss, other.grad_norm), rtol=NEAR["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_sharded_optimizer_trains_the_bits_of_a_whole_one(emulation, dtype, tmp_path):
    """Parts end within tensors of this width; two copies of the model share theirs, too."""
    on = {**ON, "dtype": dtype}
    for way, replicas in (((1, 1, "gpipe", [(1, [24])]), 3), ((2, 1, "zb-h1", [(1, [20, 4])]), 2),
                          ((2, 1, "chimera", [(1, [24])] * 2), 1)):
        found = []
        for shards in (False, True):
            plan = planned(WIDE, replicas, way, batch=replicas * len(way[3]), shard_optimizer=shards, **on)
            out = tmp_path / f"{way[2]}-{shards}"
            run = launched(plan, steps=2, devices=[0] * plan.num_devices, processes=False, out=out, checkpoint_every=2, **on)
            found.append((left(run, out), max(plan.peak_memory_bytes)))
        assert same(found[0][0], found[1][0]) and found[1][1] < found[0][1], way
    rest = tp.launch(plan, DATA, 3, devices=[0] * plan.num_devices, processes=False, out=out, resume=True, **OPTIONS, **on).wait()
    assert [r.step for r in rest.history] == [2] and np.isfinite(rest.history[0].loss)


def test_every_member_takes_the_memory_that_is_planned(emulation):
    """Of these some have no part of a stage, and others several: `launched` compares all ranks' bytes with those of the plan."""
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=301, block_size=24, tie_weights=False)
    whole, sharded = (planned(model, 7, (2, 1, "1f1b", [(1, [24])]), batch=7, shard_optimizer=shards, **ON)
                      for shards in (False, True))
    launched(sharded, steps=1, devices=[0] * 14, processes=False, **ON)
    assert max(sharded.peak_memory_bytes) < max(whole.peak_memory_bytes)


def test_a_rank_of_another_replica_dies(emulation):
    plan = planned(MODEL, 2, WAYS[1], **ON)
    run = tp.launch(plan, DATA, 10_000, devices=[0] * 4, **OPTIONS, **ON)
    next(iter(run))
    os.kill(run.pids[3], signal.SIGKILL)      # stage 1 of replica 1
    with pytest.raises(tp.Error, match=r"rank 3 was killed by signal 9 \(SIGKILL\)"):
        run.wait()
    assert not run.running


def test_launch_says_what_it_does_not_do(emulation):
    plan = planned(MODEL, 2, WAYS[1], **ON)
    with pytest.raises(tp.Error, match=r"data_parallel = 2: .*launch\(\.\.\., reproducible=False\)"):
        tp.launch(plan, DATA, 1, progress=False, **ON)
    with pytest.raises(tp.Error, match=r"the plan has 4 ranks and this machine shows 1 GPU .*a plan for 1 devices"):
        tp.launch(plan, DATA, 1, **OPTIONS, **ON)
    with pytest.raises(tp.Error, match=r"devices is \[0, 0\]: 4 numbers from 0 to 0"):
        tp.launch(plan, DATA, 1, devices=[0, 0], **OPTIONS, **ON)
    with pytest.raises(tp.Error, match=r"the plan is for backend 'cuda'"):
        tp.launch(plan, DATA, 1, **OPTIONS)


def test_what_the_sums_need_is_in_the_plan(emulation):
    """A room for each other replica's part, until all of them are as large as they may be together."""
    one, *many = (planned(MODEL, replicas, WAYS[0][:3] + ([(1, [24])],), batch=replicas, **ON) for replicas in (1, 2, 6, 9, 17))
    rooms = [plan.peak_memory_bytes[0] - one.peak_memory_bytes[0] for plan in many]
    assert rooms == [4 * 512 * 1, 4 * 512 * 5, 4 * 512 * 8, 4 * 256 * 16]


def test_the_sums_are_predicted_on_the_link(emulation):
    """Also where the costs were measured beside rings that a CPU copies into and out of."""
    found = []
    for copied in (0.0, 1e-9):
        given = tp.CostModel.analytic(MODEL, tp.Cluster(num_devices=2, peak_flops=1e12)).to_dict()
        costs = tp.CostModel.from_dict({**given, "backend": "cuda", "dtype": "float32", "copy_byte_s": copied})
        one, two = (planned(MODEL, replicas, WAYS[0], batch=3 * replicas, costs=costs) for replicas in (1, 2))
        link = Replicas(2, two.cluster.link_latency_s, two.cluster.link_bandwidth_Bps)
        assert two.step_time_s - one.step_time_s == pytest.approx(link.seconds(4.0 * MODEL.num_params), rel=1e-9)
        found.append(two.step_time_s)
    assert found[0] == found[1]


def test_under_another_launcher(emulation, tmp_path):
    """Rank by rank of torchrun's numbers, each a process."""
    plan = planned(MODEL, 2, WAYS[1], **ON)
    plan.save(tmp_path / "plan.json")
    DATA.tofile(tmp_path / "tokens.bin")
    wanted = launched(plan, steps=4, processes=False, seed=0, lr=1e-3, eval_every=2, eval_batches=2, devices=[0] * 4, **ON)
    port = free_port(8)
    children = [begin(tmp_path / "plan.json", tmp_path / "tokens.bin", rank,
                      {"TERAPIPE_CUDA_MODULE": str(cuda_emu.build()), "TERAPIPE_COMM": "host", **torchrun(rank, 4, port)},
                      out=str(tmp_path / "run"), reproducible=False, devices=[0] * 4, **ON) for rank in range(4)]
    for rank, one in enumerate(map(heard, children)):
        assert one["rank"] == rank and one["ranks"] == 4, one
        assert one["losses"] == [r.loss for r in wanted.history] and one["evals"] == [r.eval_loss for r in wanted.history]


BY_NCCL = """
from test_cuda_replicas import MODEL, ON, WAYS, launched, planned
run = launched(planned(MODEL, 2, WAYS[1], **ON), processes=False, devices=[0] * 4, **ON)
print([[r.loss, r.grad_norm] for r in run.history])
"""


def test_launch_by_nccl_gives_the_bits_of_the_host(emulation, fake_nccl):
    host = launched(planned(MODEL, 2, WAYS[1], **ON), processes=False, devices=[0] * 4, **ON)
    told = json.loads(launched_by("nccl", fake_nccl, BY_NCCL))
    assert told == [[r.loss, r.grad_norm] for r in host.history] and len(told) == 3
