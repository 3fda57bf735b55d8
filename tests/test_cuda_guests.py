"""BPipe on the emulated device: activations that go to another rank's memory and come home by NCCL (a libnccl of threads) without a
copy, or through the host. Under tests/test_cuda_order.py's eyes: a wait that is missing fails the call that would have needed
it."""
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import cuda_emu
import numpy as np
import pytest
from test_cuda_nccl import compile_fake, emulated

import terapipe_c as tp

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

NEAR = {"float32": 1e-5, "bf16": 2.5e-2}     # as tests/test_cuda_stage.py has them, and why
ON = {"backend": "cuda", "dtype": "float32"}


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return compile_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def emulation(monkeypatch):
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(cuda_emu.build()))


def answers(fake, *cases):
    return emulated(fake, *cases, script=__file__)


def program_of(schedule, ranks, micros, lengths, pending, tied, saved=()):
    """Lowered, with R where a rank recomputes."""
    from terapipe_c import schedules

    program = getattr(schedules, schedule)(ranks, micros, len(lengths))
    program = program if pending is None else program.split(pending=pending)
    if any(saved):
        program = program.save_memory(bytes(saved) * program.copies, bytes(len(saved) * program.copies))
    return program.lower(tied)


def train(mode="nccl", schedule="bpipe", ranks=4, micros=6, lengths=(5, 4, 3), pending=0, replicas=1, steps=4, tied=True,
          dtype="float32", again=False, text="", fault=None, timeout_s=20.0, dead=None,
          deaf=False):
    """What each rank was told, and what it has then; ranks are threads on one emulated device, or on the CPU. micros: of a replica.
    text: a lowered program of one's own. deaf: the communicator does not know who keeps guests."""
    from terapipe_c import _core, device_comm
    from terapipe_c.backend import Backend
    from terapipe_c.cost import even_partition
    from terapipe_c.engine import CPU, RankEngine, gather_bytes, rank_memory
    from terapipe_c.guests import hosts
    from terapipe_c.job import neighbours

    library = ctypes.CDLL(os.environ["TERAPIPE_NCCL"])
    library.fake_nccl_set(*{"fail_at": 0, "code": 0, "stuck_at": 0, "looks": 1, "version": 22809, **(fault or {})}.values())
    model = tp.GPTConfig(n_layer=ranks, n_head=1, n_embd=16, vocab_size=67, block_size=12, tie_weights=tied)
    partition, cuts = even_partition(model, ranks), [(1, list(lengths))] * micros
    kinds = [block.kind for block in model.blocks]
    saved = [int("ffn" in kinds[first:end]) for first, end in partition] if again else []
    program = tp.Program.parse(text) if text else program_of(schedule, ranks, micros, lengths, pending, tied, saved)
    recompute = tuple(again and kind == "ffn" for kind in kinds)
    copies, pairs, all_ranks = program.copies, hosts(program), ranks * replicas
    backend = CPU if mode == "cpu" else Backend("cuda", dtype)
    region = _core.Region.create(all_ranks, neighbours(all_ranks, replicas, copies=copies, hosts=pairs), 1 << 16,
                                 max(4096, gather_bytes(model)), False)
    tokens = np.random.default_rng(1).integers(0, 67, (micros * replicas, 13)).astype(np.int32)
    params, told = tp.init_params(model, 3), [None] * all_ranks
    controls = [_core.Comm(region, rank, timeout_s) for rank in range(all_ranks)]
    memory = rank_memory(model, partition, cuts, program, backend=backend, recompute=recompute, replicas=replicas)
    device = {} if mode == "cpu" else {"device": 0, "staged": mode == "host", "reproducible": True}

    def one(rank):
        try:
            comm, largest = controls[rank], device_comm.message_bytes(16, cuts)
            if mode == "nccl":
                comm = device_comm.nccl(comm, largest, replicas=replicas, copies=copies, hosts=() if deaf else pairs)
            elif mode == "inproc":
                comm = device_comm.inproc(comm, largest)
            replica, own = divmod(rank, ranks)
            engine = RankEngine(model, partition, cuts, program, own, comm, backend=backend, recompute=recompute, replicas=replicas,
                                replica=replica, **device)
            engine.load(params)
            mine, before, steps_told = tokens[replica * micros:(replica + 1) * micros], engine.allocations, []
            for step in range(steps):
                if dead == rank and step == 1:
                    region.abort("ECONNECTION", rank, f"rank {rank} was killed")
                    raise RuntimeError("killed")
                steps_told.append(engine.run(mine, step=step + 1, lr=1e-2, grad_clip=0.5)[:2])
            grads = {name: grad.ravel().tolist() for name, grad in engine.export("grads").items()}
            steps_told.append(engine.evaluate(mine))
            weights = {stage: hashlib.sha256() for stage, _, _ in engine._held}
            for stage, i, _ in engine._held:
                weights[stage].update(engine._core.read(stage, i, "value").tobytes())
            told[rank] = {"losses": steps_told, "caveats": engine.caveats, "allocated": engine.allocations - before, "grads": grads,
                          "weights": {stage: weight.hexdigest() for stage, weight in weights.items()},
                          "memory": [engine.peak_memory_bytes, memory[own]]}
        except Exception as error:
            region.abort("ERUNTIME", rank, str(error))
            told[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(all_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {name: library.fake_nccl_count(i) for i, name in enumerate(("calls", "aborts", "misuses", "held"))}
    return {"told": told, "first": region.aborted(), "guests": program.counts.get("SE", 0), "stages": len(partition), **counts}


def trained(result):
    """Losses and norms, all parts' gradients, and the weights of each; that all agree, and keep to their memory."""
    told, stages, weights, grads = result["told"], result["stages"], {}, {}
    assert all(isinstance(one, dict) for one in told), told
    for one in told:
        assert one["losses"] == told[0]["losses"]
        assert one["memory"][0] == one["memory"][1] and one["allocated"] == 0 and one["caveats"] == []
        grads.update(one["grads"])
        for stage, weight in one["weights"].items():
            assert weights.setdefault(int(stage) % stages, weight) == weight    # of both copies, and of every replica
    assert result["misuses"] == result["held"] == 0
    return told[0]["losses"], grads, weights


SHAPES = [{"ranks": 4, "micros": 6}, {"ranks": 5, "micros": 9, "lengths": (12,)}, {"ranks": 6, "micros": 11, "lengths": (7, 5)},
          {"ranks": 8, "micros": 16, "lengths": (12,), "steps": 3}]


@pytest.mark.parametrize("shape", SHAPES, ids=[f"{s['ranks']} ranks" for s in SHAPES])
def test_the_bits_of_1f1b_in_the_memory_predicted(fake, shape):
    """Whatever the library's pace; captured steps and launched ones, too."""
    cases = [{"mode": mode, "schedule": schedule, **shape} for mode in ("nccl", "host") for schedule in ("one_f_one_b", "bpipe")]
    cases += [{"fault": {"looks": 7}, **shape}, {"pending": 1, **shape}, {"pending": None, **shape}, {"again": True, **shape}]
    results = answers(fake, *cases, {"mode": "cpu", **shape})
    wanted = trained(results[0])
    assert all(trained(one) == wanted for one in results[1:-1])
    assert all((one["guests"] > 0) == (case.get("schedule") != "one_f_one_b") for one, case in zip(results, cases, strict=False))
    for one, other in zip(wanted[0], trained(results[-1])[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR["float32"])


def test_bf16_and_replicas(fake):
    cases = [{"mode": mode, "schedule": schedule, "dtype": dtype, "replicas": replicas, "tied": tied, "lengths": (12,), "steps": 3}
             for dtype, replicas, tied in (("bf16", 1, True), ("float32", 2, False))
             for mode, schedule in (("nccl", "bpipe"), ("host", "bpipe"), ("nccl", "one_f_one_b"))]
    results = list(map(trained, answers(fake, *cases)))
    assert results[0] == results[1] == results[2] != results[3] == results[4] == results[5]


# ranks 0 and 1 keep their first micro-batch on the next rank, with which they talk besides
OWN = """\
0F0.0 0SE0.0@1 0F1.0 0F2.0 0RL0.0@1 0B0.0 0B1.0 0B2.0
0RE0.0@0 1F0.0 1SE0.0@2 1F1.0 1F2.0 1RL0.0@2 1B0.0 0SL0.0@0 1B1.0 1B2.0
1RE0.0@1 2F0.0 2F1.0 2F2.0 2B0.0 1SL0.0@1 2B1.0 2B2.0
"""


def test_guests_of_neighbours_in_an_order_of_ones_own(fake):
    """Several messages of a pair of ranks: activations and guests, which have channels of their own."""
    text = str(tp.Program.parse(OWN).lower(True))
    shape = {"ranks": 3, "micros": 3, "lengths": (12,)}
    *found, plain = answers(fake, *({"mode": mode, "text": text, **shape} for mode in ("nccl", "host")),
                            {"mode": "nccl", "schedule": "gpipe", **shape})
    assert all(trained(one) == trained(plain) and one["guests"] == 2 for one in found)


# Of a ring of 4: lines, directions, ends, a send and a receive; and the same of one whose other end keeps guests.
SPLITS = 4 * 2 * 2 * 2 + 2 * 2 * 2
FAULTS = {   # what happens to whom, and the words of the first who sees it
    "a guest's connection fails": ({"fault": {"fail_at": SPLITS, "code": 2}},
                                    r"rank [03]: NCCL's first ncclGroupEnd with rank [03]: "),
    "fails": ({"fault": {"fail_at": SPLITS + 25, "code": 6}},
              r"rank \d: NCCL's nccl\w+ with rank \d: remote .*; rank \d is at step 0"),
    "hangs in the library": ({"fault": {"stuck_at": SPLITS + 25}, "timeout_s": 2.0},
                             r"rank \d waited 2 s for NCCL's .* with rank \d"),
    "dies": ({"dead": 3}, r"rank 3 was killed"),
    "has no way": ({"mode": "inproc"},
                   r"activations in another rank's memory, which inproc does not send: nccl, or .* would be right"),
}


def test_faults_end_every_rank_with_the_first_words(fake):
    results = answers(fake, *({"lengths": (12,), **case} for case, _ in FAULTS.values()))
    for (name, (_, words)), result in zip(FAULTS.items(), results, strict=True):
        told, (_, first, text) = result["told"], result["first"]
        assert all(isinstance(one, str) for one in told), (name, told)
        assert re.search(words, text) and result["misuses"] == 0, (name, text)
        assert all(one.startswith("AbortedError") or rank == first or re.search(words, one) for rank, one in enumerate(told)), told
        assert (result["aborts"] > 0) == (name != "has no way"), (name, result)


def test_a_pair_that_was_not_connected_is_named(fake):
    told = answers(fake, {"deaf": True, "lengths": (12,)})[0]["told"]
    assert any(re.search(r"rank \d and rank \d do not talk this way \(receive of the evicted activations of micro-batch \d slice 0 "
                         r"on stage 0\): the communicator was made without this pair", one) for one in told), told


# ---- by plan, launch and train --------------------------------------------------------------------------------------------

MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=61, block_size=24)
DATA = (np.random.default_rng(3).integers(0, 61, 4000)).astype(np.uint16)
OPTIONS = {"lr": 1e-2, "lr_schedule": "constant", "progress": False, "seed": 5}


def planned(schedule="bpipe", **request):
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e10)
    return tp.plan(MODEL, cluster, **{"batch": 8, "seq_len": 24, "planner": "uniform", "stages": 4, **request}, schedule=schedule)


def launched(plan, steps=3, **options):
    run = tp.launch(plan, DATA, steps, **{**OPTIONS, "devices": [0] * 4, "backend": plan.backend, "dtype": plan.dtype, **options})
    losses = [(record.loss, record.grad_norm) for record in run]
    report = run.report()
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == list(plan.peak_memory_bytes)
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_plan_fits_where_1f1b_does_not_and_trains_the_same(emulation, dtype):
    on = {"backend": "cuda", "dtype": dtype, "slicing": 2}
    plain, even = planned("1f1b", **on), planned(**on)
    limit = (max(plain.peak_memory_bytes) + max(even.peak_memory_bytes)) // 2
    with pytest.raises(tp.InfeasibleError, match="rank 0 needs"):
        planned("1f1b", memory_bytes=limit, **on)
    plan = planned(memory_bytes=limit, **on)
    assert plan.schedule == "bpipe" and plan.executable and plan.peak_memory_bytes == even.peak_memory_bytes
    assert "rank 3 keeps activations of rank 0" in plan.explain() and plan.step_time_s == plan.timeline().makespan_s
    wanted = launched(plain, processes=False)
    assert launched(plan, processes=dtype == "bf16") == wanted


def test_what_a_gpu_sends_is_timed_on_the_link_alone(emulation):
    """A CPU copies into and out of rings; a GPU sends from where they lie."""
    found = {}
    for backend, copied in (("cuda", 0.0), ("cuda", 1e-9), ("cpu", 1e-9)):
        given = tp.CostModel.analytic(MODEL, tp.Cluster(num_devices=4, peak_flops=1e12)).to_dict()
        costs = tp.CostModel.from_dict({**given, "backend": backend, "dtype": "float32", "copy_byte_s": copied})
        found[backend, copied] = planned(costs=costs).durations
    for durations in found.values():
        assert np.count_nonzero(durations["comm.guest"][0]) == 8
    assert "SE" not in found["cuda", 1e-9] and "SE" in found["cpu", 1e-9]


BY_NCCL = """
import sys
sys.path.insert(0, "tests")
from test_cuda_guests import ON, launched, planned
print(launched(planned(**ON), processes=False), launched(planned("1f1b", **ON), processes=False))
"""


def test_launch_by_nccl_gives_the_bits_of_the_host(emulation, fake):
    told = {}
    for comm in ("host", "nccl"):
        environment = {**os.environ, "TERAPIPE_NCCL": str(fake), "TERAPIPE_COMM": comm}
        ran = subprocess.run([sys.executable, "-c", BY_NCCL], cwd=ROOT, env=environment, capture_output=True, text=True,
                             timeout=100)
        assert ran.returncode == 0, ran.stderr
        told[comm] = ran.stdout
    even, plain = json.loads(f"[{told['host'].replace('(', '[').replace(')', ']').replace('] [', '], [')}]")
    assert told["nccl"] == told["host"] and even == plain and len(even) == 3


if __name__ == "__main__":
    print(json.dumps([train(**case) for case in json.loads(sys.argv[1])]))
