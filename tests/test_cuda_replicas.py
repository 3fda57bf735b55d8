"""Replicas on the emulated device: what they train on the CPU, the same bits whatever their stages and whatever their messages go
through, memory to the byte, and twins that die, hang or fail in the sums."""
import ctypes
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cuda_emu
import numpy as np
import pytest
from ports import free_port
from test_cuda_nccl import compile_fake, emulated
from test_replicas import DATA, MODEL, OPTIONS, planned
from test_replicas import trained as launched
from test_train import begin, torchrun
from test_train import told as heard

import terapipe_c as tp
from terapipe_c.judge import Replicas

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

MODES = ("host", "nccl", "inproc")
# of a replica of 2 sequences: (stages, chunks, schedule, slices of each)
SHAPES = {"one": (1, 1, "gpipe", [12]), "two": (2, 1, "one_f_one_b", [5, 4, 3]), "three": (3, 1, "gpipe", [1, 11]),
          "round": (2, 2, "interleaved", [7, 5]), "late": (2, 1, "zb_h1", [12])}
NEAR = {"float32": 1e-5, "bf16": 2.5e-2}     # as tests/test_cuda_stage.py has them, and why


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return compile_fake(tmp_path_factory.mktemp("fake"))


def answers(fake, *cases):
    return emulated(fake, *cases, script=__file__)


def train(mode="nccl", replicas=2, shape="two", steps=3, tied=True, dtype="float32", fault=None, timeout_s=20.0, dead=None,
          late=None, lag=False):
    """What each rank was told, and what it has then; ranks are threads on one emulated device, or on the CPU."""
    from terapipe_c import _core, device_comm, schedules
    from terapipe_c.backend import Backend
    from terapipe_c.cost import even_partition
    from terapipe_c.engine import CPU, RankEngine, gather_bytes, rank_memory
    from terapipe_c.job import neighbours

    library = ctypes.CDLL(os.environ["TERAPIPE_NCCL"])
    library.fake_nccl_set(*{"fail_at": 0, "code": 0, "stuck_at": 0, "looks": 1, "version": 22809, **(fault or {})}.values())
    ctypes.CDLL(os.environ["TERAPIPE_CUDA_MODULE"]).tp_emu_lag(int(lag))
    stages, chunks, schedule, lengths = SHAPES[shape]
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=16, vocab_size=67, block_size=12, tie_weights=tied)
    cuts, more = [(1, lengths)] * 2, {"chunks": chunks} if chunks > 1 else {}
    compute = getattr(schedules, schedule)(stages, *more.values(), 2, len(lengths))
    program = (compute if schedule == "zb_h1" else compute.split()).lower(tied and stages > 1)
    partition = even_partition(model, stages * chunks)
    ranks, backend = stages * replicas, CPU if mode == "cpu" else Backend("cuda", dtype)
    region = _core.Region.create(ranks, neighbours(ranks, replicas), 1 << 16, max(4096, gather_bytes(model)), False)
    tokens = np.random.default_rng(1).integers(0, 67, (2 * replicas, 13)).astype(np.int32)
    params, told = tp.init_params(model, 3), [None] * ranks
    controls = [_core.Comm(region, rank, timeout_s) for rank in range(ranks)]
    memory = rank_memory(model, partition, cuts, program, backend=backend, replicas=replicas)
    device = {} if mode == "cpu" else {"device": 0, "staged": mode == "host", "reproducible": True}

    def one(rank):
        try:
            comm, largest = controls[rank], device_comm.message_bytes(16, cuts)
            if mode == "nccl":
                comm = device_comm.nccl(comm, largest, replicas=replicas)
            elif mode == "inproc":
                comm = device_comm.inproc(comm, largest)
            replica, own = divmod(rank, stages)
            engine = RankEngine(model, partition, cuts, program, own, comm, backend=backend, replicas=replicas, replica=replica,
                                **device)
            engine.load(params)
            mine, before = tokens[2 * replica:2 * replica + 2], engine.allocations
            steps_told, grads = [], []
            for step in range(steps):
                if dead == rank and step == 1:
                    region.abort("ECONNECTION", rank, f"rank {rank} was killed")
                    raise RuntimeError("killed")
                if late == rank and step == 1:
                    while region.aborted() is None:
                        threading.Event().wait(0.01)
                steps_told.append(engine.run(mine, step=step + 1, lr=1e-2, grad_clip=0.5)[:2])
                grads.append({name: grad.ravel().tolist() for name, grad in engine.export("grads").items()})
            steps_told.append(engine.evaluate(mine))
            weights = [engine._core.read(stage, i, "value") for stage, i, _ in engine._held]
            told[rank] = {"losses": steps_told, "caveats": engine.caveats, "allocated": engine.allocations - before,
                          "weights": hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest(),
                          "memory": [engine.peak_memory_bytes, memory[own]],
                          "grads": grads}
        except Exception as error:
            region.abort("ERUNTIME", rank, str(error))
            told[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {name: library.fake_nccl_count(i) for i, name in enumerate(("calls", "aborts", "misuses", "held"))}
    return {"told": told, "stages": stages, "first": region.aborted(), **counts}


def trained(result):
    """Losses and norms, and every step's gradients; that all ranks agree on the first, and twins on their weights."""
    told, stages = result["told"], result["stages"]
    assert all(isinstance(one, dict) for one in told), told
    for rank, one in enumerate(told):
        assert one["losses"] == told[0]["losses"] and one["weights"] == told[rank % stages]["weights"]
        assert one["memory"][0] == one["memory"][1] and one["allocated"] == 0 and one["caveats"] == []
        assert rank < stages or not any(one["grads"])
    assert result["misuses"] == result["held"] == 0
    steps = range(len(told[0]["grads"]))
    return told[0]["losses"], [{name: grad for one in told for name, grad in one["grads"][step].items()} for step in steps]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_same_bits_whatever_the_stages_and_the_communicator(fake, tied, dtype):
    """Steps that are captured and launched as graphs too, and near what they train on the CPU."""
    cases = [{"shape": shape, "mode": "nccl"} for shape in SHAPES] + [{"shape": "two", "mode": mode} for mode in MODES[::2]]
    cases += [{"shape": "one", "mode": "host"}, {"shape": "two", "mode": "nccl", "fault": {"looks": 6}}, {"mode": "cpu"}]
    *device, cpu = answers(fake, *({"tied": tied, "dtype": dtype, **case} for case in cases))
    wanted = trained(device[0])
    assert all(trained(one) == wanted for one in device[1:])
    assert all((one["calls"] > 0) == (case["mode"] == "nccl") for one, case in zip(device, cases, strict=False))
    losses, grads = trained(cpu)
    for one, other in zip(wanted[0], losses, strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR[dtype])
    for name, grad in grads[0].items():
        assert np.linalg.norm(np.subtract(wanted[1][0][name], grad)) <= NEAR[dtype] * np.linalg.norm(grad), name


def test_more_replicas(fake):
    """Of three and five, whose pairs meet in odd rounds, and where there are more messages than a device is behind its host."""
    cases = [{"replicas": replicas, "shape": shape, "mode": mode, "steps": 2}
             for replicas, shape in ((3, "two"), (5, "one")) for mode in ("nccl", "host", "cpu")]
    results = answers(fake, *cases)
    for nccl, host, cpu in (results[:3], results[3:]):
        assert trained(nccl) == trained(host)
        for one, other in zip(trained(nccl)[0], trained(cpu)[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5)


HELLOS = 2 * 2 * 2 * 2 * 2 + 2 * 2 * 2    # two rings of two: edges, directions, ends, a send and a receive; two pairs of twins
MESSAGES = 2 * 3 * 2 * 2 * 2 + 2 * 2 * 2  # of a step of two replicas: micro-batches, slices, directions, both ends; the tied weight
SUMS = HELLOS + MESSAGES
DOING = r"; rank \d is at step 0 while running optimizer update on stage \d"
FAULTS = {   # what happens to whom, and the words of the first who sees it
    "fails": ({"fault": {"fail_at": SUMS + 3, "code": 6}}, r"rank (\d): NCCL's ncclGroupEnd with rank \d: remote .*" + DOING),
    "hangs in the library": ({"fault": {"stuck_at": SUMS + 3}, "timeout_s": 2.0}, r"rank (\d) waited 2 s for NCCL's .*" + DOING),
    "hangs on the device": ({"shape": "one", "lag": True, "timeout_s": 2.0},
                            r"rank (\d) waited 2 s to exchange gradients with rank \d" + DOING),
    "does not come": ({"shape": "one", "late": 1, "timeout_s": 2.0},
                      r"rank (0) waited 2 s for the other ranks to gather; rank 1 is at step 0 while"),
    "dies": ({"dead": 3}, r"rank (3) was killed"),
    "dies while its twins wait for it": ({"dead": 0, "shape": "one", "replicas": 3}, r"rank (0) was killed"),
}


def test_faults_end_every_rank_with_the_first_words(fake):
    results = answers(fake, *(case for case, _ in FAULTS.values()))
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
        assert result["aborts"] > 0 and result["misuses"] == 0, (name, result)


# ---- by launch and train ------------------------------------------------------------------------------------------------

# (stages, chunks, schedule, slicing of a replica of 3 sequences, one in a micro-batch)
WAYS = [(1, 1, "gpipe", [(1, [24])] * 3), (2, 1, "1f1b", [(1, [20, 4])] * 3), (1, 2, "interleaved", [(1, [11, 13])] * 3),
        (2, 1, "zb-h1", [(1, [24])] * 3), (3, 1, "gpipe", [(1, [12, 12])] * 3)]
ON = {"backend": "cuda", "dtype": "float32"}


@pytest.fixture
def emulation(monkeypatch):
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(cuda_emu.build()))


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
    with pytest.raises(tp.Error, match=r"the plan has 4 ranks and this machine shows 1 GPUs .*a plan for 1 devices"):
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
import sys
sys.path.insert(0, "tests")
from test_cuda_replicas import MODEL, ON, WAYS, launched, planned
run = launched(planned(MODEL, 2, WAYS[1], **ON), processes=False, devices=[0] * 4, **ON)
print([(r.loss, r.grad_norm) for r in run.history])
"""


def test_launch_by_nccl_gives_the_bits_of_the_host(emulation, fake):
    told = {}
    for comm in ("host", "nccl"):
        environment = {**os.environ, "TERAPIPE_NCCL": str(fake), "TERAPIPE_COMM": comm}
        ran = subprocess.run([sys.executable, "-c", BY_NCCL], cwd=ROOT, env=environment, capture_output=True, text=True,
                             timeout=100)
        assert ran.returncode == 0, ran.stderr
        told[comm] = ran.stdout
    assert told["nccl"] == told["host"] and told["host"].count(",") == 5


if __name__ == "__main__":
    print(json.dumps([train(**case) for case in json.loads(sys.argv[1])]))
