"""Ranks as threads on one emulated device, or on the CPU. Their messages go through a libnccl of threads (tests/cuda/fake_nccl.c),
through the host, or by hand-over. The emulator checks the order of streams (tests/test_cuda_order.py): a missing wait fails the
call that needs it.

    from cuda_ranks import emulated, trained
    losses, gradients, weights = trained(emulated(fake_nccl, {"ranks": 4, "schedule": "bpipe"})[0])   # see Case
    launched("nccl", fake_nccl, "print(...)")     # what a script prints whose runs send so
"""
from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuda_emu
import numpy as np
import pytest

import terapipe_c as tp

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

NEAR = {"float32": 1e-5, "bf16": 2.5e-2}     # as tests/test_cuda_stage.py has them, and why
ON = {"backend": "cuda", "dtype": "float32"}
WIDTH, WORDS, CONTEXT = 16, 67, 12           # of every model


@dataclass
class Case:
    """A micro-batch has one sequence, where nothing else is said."""
    mode: str = "nccl"              # or "host", "inproc", "cpu"
    schedule: str = "one_f_one_b"
    ranks: int = 2                  # of a replica
    chunks: int = 1
    layers: int = 0                 # 0: as many as ranks
    micros: int = 2                 # of a replica
    lengths: Sequence[int] = (5, 4, 3)
    sequences: int = 1              # of a micro-batch
    pending: int | None = 0         # None: B is whole
    replicas: int = 1
    shards: bool = False            # each has AdamW's moments of a part
    steps: int = 3                  # launched call by call, captured, and launched as graphs
    tied: bool = True
    dtype: str = "float32"
    again: bool = False             # FFNs are computed again
    text: str = ""                  # a lowered program of one's own
    timeout_s: float = 20.0
    fault: Mapping[str, int] = field(default_factory=dict)     # fake_nccl_set's
    refuse: Sequence[int] = (0, 0)  # fake_nccl_refuse's
    dead: int | None = None         # this rank ends in its second step
    late: int | None = None         # this one does not come to it
    lag: int = 0                    # 1: the device comes no further; 2: it cannot be asked; 3: messages come no further
    reproducible: bool = True
    deaf: bool = False              # the communicator does not know who keeps guests
    ways: int = 0                   # in which hand-over waits


class World:
    """What all ranks of a case have."""

    def __init__(self, case: Case) -> None:
        from terapipe_c import _core
        from terapipe_c.backend import Backend
        from terapipe_c.engine import CPU, gather_bytes, rank_memory
        from terapipe_c.guests import hosts
        from terapipe_c.job import neighbours
        from terapipe_c.partition import even_partition

        self.case, self.all_ranks = case, case.ranks * case.replicas
        self.model = tp.GPTConfig(n_layer=case.layers or case.ranks, n_head=1, n_embd=WIDTH, vocab_size=WORDS, block_size=CONTEXT,
                                  tie_weights=case.tied)
        self.cuts = [(case.sequences, list(case.lengths))] * case.micros
        self.partition = even_partition(self.model, case.ranks * case.chunks)
        kinds = [block.kind for block in self.model.blocks]
        saved = [int("ffn" in kinds[first:end]) for first, end in self.partition] if case.again else []
        self.program = tp.Program.parse(case.text) if case.text else program_of(case, saved)
        self.pairs, self.copies = hosts(self.program), self.program.copies
        self.options = {"backend": CPU if case.mode == "cpu" else Backend("cuda", case.dtype), "replicas": case.replicas,
                        "shards": case.shards, "recompute": tuple(case.again and kind == "ffn" for kind in kinds)}
        self.memory = rank_memory(self.model, self.partition, self.cuts, self.program, **self.options)
        if case.mode != "cpu":
            self.options |= {"device": 0, "staged": case.mode == "host", "reproducible": case.reproducible}
        rings = neighbours(self.all_ranks, case.replicas, copies=self.copies, hosts=self.pairs)
        self.region = _core.Region.create(self.all_ranks, rings, 1 << 16, max(4096, gather_bytes(self.model)), False)
        self.controls = [_core.Comm(self.region, rank, case.timeout_s) for rank in range(self.all_ranks)]
        self.params = tp.init_params(self.model, 3)
        tokens = (case.micros * case.sequences * case.replicas, CONTEXT + 1)
        self.tokens = np.random.default_rng(1).integers(0, WORDS, tokens).astype(np.int32)

    def comm(self, rank: int) -> Any:
        from terapipe_c import device_comm, slots

        case, largest = self.case, device_comm.message_bytes(WIDTH, self.cuts, self.case.dtype)
        if case.mode == "nccl":
            return device_comm.nccl(self.controls[rank], largest, replicas=case.replicas, copies=self.copies,
                                    hosts=() if case.deaf else self.pairs, slots=slots.needed(self.program),
                                    more=device_comm.flows(self.program))
        if case.mode != "inproc":
            return self.controls[rank]
        comm = device_comm.inproc(self.controls[rank], largest)
        device_comm.inproc_ways(comm, case.ways)
        return comm

    def happens(self, rank: int, step: int) -> None:
        if (self.case.dead, 1) == (rank, step):
            self.region.abort("ECONNECTION", rank, f"rank {rank} was killed")
            raise RuntimeError("killed")
        if (self.case.late, 1) == (rank, step):
            while self.region.aborted() is None:
                threading.Event().wait(0.01)

    def train(self, rank: int) -> dict[str, Any]:
        """What this rank was told, and what it has then."""
        from terapipe_c.engine import RankEngine

        case, (replica, own) = self.case, divmod(rank, self.case.ranks)
        engine = RankEngine(self.model, self.partition, self.cuts, self.program, own, self.comm(rank), replica=replica,
                            **self.options)
        engine.load(self.params)
        share, before = case.micros * case.sequences, engine.allocations
        mine = self.tokens[replica * share:(replica + 1) * share]
        losses, first, gradients, weights = [], {}, [], {}
        for step in range(case.steps):
            self.happens(rank, step)
            losses.append(engine.run(mine, step=step + 1, lr=1e-2, grad_clip=0.5)[:2])
            grads = {} if case.shards else engine.export("grads")     # those of an update are a part's alone
            first = first or {name: grad.ravel().tolist() for name, grad in grads.items()}
            gradients.append({name: hashlib.sha256(grad.tobytes()).hexdigest() for name, grad in grads.items()})
        losses.append(engine.evaluate(mine))
        for stage, i, _ in engine._held:
            weights.setdefault(stage, hashlib.sha256()).update(engine._core.read(stage, i, "value").tobytes())
        return {"losses": losses, "caveats": engine.caveats, "allocated": engine.allocations - before, "first": first,
                "gradients": gradients, "weights": {stage: weight.hexdigest() for stage, weight in weights.items()},
                "memory": [engine.peak_memory_bytes, self.memory[own]]}


def program_of(case: Case, saved: Sequence[int]) -> Any:
    """Lowered, with R where a rank recomputes."""
    from terapipe_c import schedules

    chunks = (case.chunks,) if case.chunks > 1 else ()
    program = getattr(schedules, case.schedule)(case.ranks, *chunks, case.micros, len(case.lengths))
    program = program if case.pending is None else program.split(pending=case.pending)
    if any(saved):
        program = program.save_memory(bytes(saved) * program.copies, bytes(len(saved) * program.copies))
    return program.lower(case.tied and case.ranks > 1)


def train(case: Case) -> dict[str, Any]:
    """What every rank was told (its end, in words, where that was none), and what the library counted."""
    library, backend = ctypes.CDLL(os.environ["TERAPIPE_NCCL"]), ctypes.CDLL(os.environ["TERAPIPE_CUDA_MODULE"])
    library.fake_nccl_set(*{"fail_at": 0, "code": 0, "stuck_at": 0, "looks": 1, "version": 22809, **case.fault}.values())
    library.fake_nccl_refuse(*case.refuse)
    backend.tp_emu_lag(case.lag)
    world, told = World(case), {}

    def one(rank: int) -> None:
        try:
            told[rank] = world.train(rank)
        except Exception as error:
            world.region.abort("ERUNTIME", rank, str(error))
            told[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world.all_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    products = [ctypes.c_int64() for _ in range(3)]
    backend.tp_emu_cublaslt_calls(*map(ctypes.byref, products))
    names = ("calls", "aborts", "misuses", "held", "buffers", "living")
    counts = {name: library.fake_nccl_count(i) for i, name in enumerate(names)}
    return {"told": [told[rank] for rank in range(world.all_ranks)], "first": world.region.aborted(), "ranks": case.ranks,
            "stages": len(world.partition), "guests": world.program.counts.get("SE", 0),
            "aim": products[2].value, "lacks": tp.cuda.load().libraries()["NCCL"][3], **counts}


def trained(result: Mapping[str, Any]) -> tuple[list[Any], list[dict[str, str]], dict[int, str]]:
    """Losses and norms, every step's gradients, and each part's weights; that all ranks agree, and keep to their memory."""
    told, weights = result["told"], {}
    assert all(isinstance(one, dict) for one in told), told
    for rank, one in enumerate(told):
        assert one["losses"] == told[0]["losses"]
        assert one["memory"][0] == one["memory"][1] and one["allocated"] == 0 and one["caveats"] == []
        assert rank < result["ranks"] or not one["first"]
        for stage, weight in one["weights"].items():
            assert weights.setdefault(int(stage) % result["stages"], weight) == weight    # of both copies, and of every replica
    assert result["misuses"] == result["held"] == result["living"] == 0
    steps = zip(*(one["gradients"] for one in told), strict=True)
    return told[0]["losses"], [{name: bits for part in step for name, bits in part.items()} for step in steps], weights


# ---- processes of their own: NCCL and the backend are chosen once a process --------------------------------------------------

OWN = os.environ.get("TERAPIPE_TEST_NCCL")      # NCCL's own host code instead of a false libnccl (tests/nccl_host.py)
OWN_SETTINGS = {"NCCL_P2P_LL_THRESHOLD": "0", "NCCL_BUFFSIZE": "131072", "NCCL_CUMEM_ENABLE": "0",
                "LD_LIBRARY_PATH": os.path.dirname(OWN)} if OWN else {}
OF_THREADS = {"NCCL_HOST_THREADS": "1", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
              "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"} if OWN else {}


def compile_fake(folder: Path, *flags: str, source: str = "fake_nccl") -> Path:
    path = folder / f"lib{source}{len(flags)}.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-I.", *flags,
                    f"tests/cuda/{source}.c", "-o", str(path), "-lpthread", "-ldl"], cwd=ROOT, check=True)
    return path


def python(fake: Path, *words: str, **environment: str) -> str:
    """What it prints."""
    paths = os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300 if OWN else 100, env={
        **os.environ, **OWN_SETTINGS, **OF_THREADS,
        "TERAPIPE_CUDA_MODULE": str(cuda_emu.build()), "TERAPIPE_NCCL": str(fake), "PYTHONPATH": paths,
        "OPENBLAS_NUM_THREADS": "1", **environment})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def emulated(fake: Path, *cases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """train(Case(**case)) of each case, in one process."""
    if OWN and any({*case.get("fault", ())} - {"looks"} or any(case.get("refuse", ())) for case in cases):
        pytest.skip("the false library's faults are among these cases")
    return json.loads(python(fake, __file__, json.dumps(cases)).splitlines()[-1])


def launched(comm: str, fake: Path, script: str) -> str:
    if OWN and "fake_nccl_" in script:
        pytest.skip("the false library's faults are in this script")
    return python(fake, "-c", script, TERAPIPE_COMM=comm)


def nccl_faults(at: int, dead: int) -> dict:
    """What happens to whom, NCCL's call `at` or a rank, and the words of the first who sees it."""
    return {
        "fails": ({"fault": {"fail_at": at, "code": 6}}, r"rank \d: NCCL's nccl\w+ with rank \d: remote .*; rank \d is at step 0"),
        "hangs": ({"fault": {"stuck_at": at}, "timeout_s": 2.0}, r"rank \d waited 2 s for NCCL's .* with rank \d"),
        "dies": ({"dead": dead}, rf"rank {dead} was killed"),
    }


def assert_first_words(faults: dict, results: list) -> None:
    """Every rank ended, the first with these words, and nothing of NCCL was misused on the way."""
    for (name, (_, words)), result in zip(faults.items(), results, strict=True):
        told, (_, first, text) = result["told"], result["first"]
        assert all(isinstance(one, str) for one in told) and re.search(words, text), (name, told)
        assert all(one.startswith("AbortedError") or rank == first or re.search(words, one) for rank, one in enumerate(told)), told
        assert result["aborts"] > 0 and result["misuses"] == 0, (name, result)


if __name__ == "__main__":
    print(json.dumps([train(Case(**case)) for case in json.loads(sys.argv[1])]))
