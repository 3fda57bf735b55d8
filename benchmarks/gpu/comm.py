"""Messages of device memory on one GPU: several ranks by NCCL, each a process that takes itself for a machine of its own
(NCCL_HOSTID, sockets over the loopback: the real multi-node path, no timings), and stages in green contexts. Without a GPU ranks
that send by NCCL are threads of the question's process, by the tests' library (tests/cuda/fake_nccl.c)."""

import os
import tempfile
from pathlib import Path

import numpy as np
from gpu_check import Question, in_time, small, so_far

FOLDER = tempfile.TemporaryDirectory()
TOKENS, PEAK = (32, 1e12) if small() else (128, 1e14)  # of a sequence; FLOP/s that plans are made for


def small_plan(tp, stages, replicas, chunks, schedule, shards=False):
    """With several stages a rank: in so many slices that channels need more than two slots (terapipe_c/slots.py)."""
    from terapipe_c.slots import LEAST, needed

    halves = schedule == "sliced-1f1b"  # of large micro-batches: of small ones they would save nothing, and a plan has none
    micros, sequences = (3, 8) if halves else (2, 1)
    order = {"schedule": schedule} if schedule else {"schedule": "looped-bfs", "chunks": chunks} if chunks > 1 else {}
    model = tp.GPTConfig(n_layer=stages * chunks, n_head=2, n_embd=128, vocab_size=256, block_size=TOKENS)
    slices = 1 if halves else 16 if chunks > 1 and not schedule else 2
    plan = tp.plan(model, tp.Cluster(num_devices=stages * replicas, peak_flops=PEAK), batch=micros * sequences * replicas,
                   seq_len=TOKENS, planner="uniform", stages=stages, slicing=[(sequences, [TOKENS // slices] * slices)] * micros,
                   data_parallel=replicas, shard_optimizer=shards, backend="cuda", **order)  # fmt: skip
    assert (needed(plan.program) > LEAST) == (chunks > 1 and not schedule), needed(plan.program)
    assert plan.program.num_stages == stages * chunks and ("F0.0a" in str(plan.program)) == halves, str(plan.program)
    return plan


def by_threads():
    """How what sends by the tests' NCCL is launched, which without a GPU is the one there is."""
    if not small():
        return {}
    if "TERAPIPE_NCCL" not in os.environ:
        from cuda_ranks import compile_fake

        os.environ["TERAPIPE_NCCL"] = str(compile_fake(Path(FOLDER.name)))
    return {"processes": False}


def nccl(stages, replicas=1, chunks=1, schedule=None):
    def answer():
        import terapipe_c as tp

        data = np.arange(40_000, dtype=np.int32) * 7 % 256
        losses, caveats, ranks = {}, {}, stages * replicas
        for kind, way in (("host", {}), ("nccl", by_threads())):
            os.environ |= {"TERAPIPE_COMM": kind, "TERAPIPE_NCCL_ONE_GPU": "1", "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
            plan = small_plan(tp, stages, replicas, chunks, schedule, shards=kind == "nccl" and replicas > 1)
            run = tp.launch(plan, data, 3, backend="cuda", devices=[0] * ranks, progress=False,
                            timeout_s=max(5.0, min(25.0, in_time() / 3)), reproducible=replicas == 1, **way)  # fmt: skip
            losses[kind] = [(record.loss, record.grad_norm) for record in run.wait()]
            report = run.report()
            caveats[kind] = report.caveats
            so_far({"losses": losses, "caveats": caveats})
            assert report.peak_memory_bytes == report.predicted_peak_memory_bytes, report.peak_memory_bytes
        assert len(losses["host"]) == 3 and losses["nccl"] == losses["host"], losses
        return {"headline": "the same losses as through the host's memory", "losses": losses, "caveats": caveats}

    who = f"{stages} ranks" + (f" of {chunks} stages" if chunks > 1 else "")
    who += f" in schedule {schedule}" if schedule else ", in 16 slices" if chunks > 1 else ""
    who += ", forwards in halves" if schedule == "sliced-1f1b" else ""
    if replicas > 1:
        who = f"{replicas} replicas of {who}, which add their gradients, and by NCCL shard the optimizer"
    answer.__doc__ = f"Losses of 3 steps of {who}, all on GPU 0: by NCCL the same bits as through the host's memory."
    return answer


def alone():
    """Losses of 3 steps of one rank that NCCL starts for, and of one without a communicator: a world of 1, on GPU 0."""
    from terapipe_c import _core, device_comm, schedules
    from terapipe_c.backend import choose
    from terapipe_c.engine import RankEngine, gather_bytes, init_params

    by_threads()
    import terapipe_c as tp

    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=128, vocab_size=256, block_size=TOKENS)
    program, slicing = schedules.gpipe(1, 1).lower(), [(1, [TOKENS])]
    tokens, losses = np.arange(TOKENS + 1, dtype=np.int32)[None] * 7 % 256, {}
    for kind in ("none", "nccl"):
        region = _core.Region.create(1, bytes(1), 0, max(64, gather_bytes(model)), False)
        control = _core.Comm(region, 0, 25.0)
        comm = device_comm.nccl(control, 4096) if kind == "nccl" else None
        engine = RankEngine(model, [(0, model.num_blocks)], slicing, program, 0, comm, backend=choose("cuda", "bf16"),
                            reproducible=True)  # fmt: skip
        engine.load(init_params(model))
        losses[kind] = [engine.run(tokens, step=step + 1, lr=1e-3)[:2] for step in range(3)]
        so_far({"losses": losses})
    assert losses["nccl"] == losses["none"] and len(set(losses["none"])) == 3, losses
    return {"headline": "the same losses as without it", "losses": losses}


def green():
    """How many multiprocessors each of K equal parts has, and that streams, events and graphs work in each of four."""
    from terapipe_c import cuda

    module, found = cuda.load(), {}
    if small():
        return found
    for parts in (2, 4, 8):
        cut = module.partitions(0, parts)
        sizes = [count for _, count in cut]
        assert len(set(sizes)) == 1 and sizes[0] >= 8, (parts, sizes)
        found[f"{parts} parts"] = sizes[0]
        so_far(found)
        if parts == 4:
            found["trials"] = [module.exercise(0, part) for part, _ in cut]
    return found | {"headline": ", ".join(f"{name} of {count}" for name, count in found.items() if name != "trials")}


# Four ranks, who split NCCL's world 4 times, took 33 s on an H200; three that go down and up again split it 10 times. Apart in the
# order: three questions run at a time, and those by NCCL hold each other up, since their receives wait on the GPU.
QUESTIONS = [Question("green contexts", 25, green, order=25), Question("NCCL 1 rank", 30, alone, order=19),
             Question("NCCL 2 ranks", 60, nccl(2, chunks=2), order=19), Question("NCCL 4 ranks", 75, nccl(4), order=20),
             Question("NCCL down and up again", 90, nccl(3, chunks=2, schedule="zb-v"), order=22),
             Question("NCCL replicas", 75, nccl(2, 2), order=24),
             Question("NCCL halves", 60, nccl(3, schedule="sliced-1f1b"), order=26)]
