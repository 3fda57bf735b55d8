"""What a user meets on a machine with GPUs, the emulated one here: commands plan for the GPU that they are told of, and what cannot
run there, or is told otherwise on another rank, is said before a rank begins."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emu import ROOT, build
from ports import free_port

import terapipe_c as tp
from terapipe_c import cli

if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)


def run(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_heads_that_a_gpu_cannot_compute_are_refused_before_a_rank_starts(emulation):
    """A plan says so; until now a rank did, where it began."""
    wide = tp.GPTConfig(n_layer=2, n_head=1, n_embd=136, vocab_size=61, block_size=16)
    why = 'n_embd / n_head is 136: on CUDA with dtype "bf16" a multiple of 8 up to 128'
    request = {"batch": 1, "seq_len": 16, "planner": "uniform", "stages": 1}
    plan = tp.plan(wide, tp.Cluster(1), backend="cuda", **request)
    assert not plan.executable and why in plan.why_not_at_all and why in plan.explain()
    with pytest.raises(tp.Error, match=why):
        tp.plan(wide, tp.Cluster(1), backend="cuda", executable=True, **request)
    with pytest.raises(tp.Error, match=f"^{why}"):
        tp.launch(tp.plan(wide, tp.Cluster(1), **request), list(range(60)) * 9, 1, backend="cuda", progress=False)
    assert tp.plan(wide, tp.Cluster(1), **request).executable


def test_ranks_that_would_send_otherwise_are_told_so(tmp_path):
    """mpirun hands TERAPIPE_COMM to other machines only by -x; they gathered other things then, and said how many bytes."""
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=16, block_size=8)
    tp.plan(model, tp.Cluster(num_devices=2, peak_flops=1e12), batch=1, seq_len=8, planner="uniform", stages=2,
            backend="cuda").save(tmp_path / "plan.json")  # fmt: skip
    port, script = free_port(), ("import sys, terapipe_c as tp; "
                                 "tp.train(tp.Plan.load(sys.argv[1]), [1, 2, 3] * 99, 1, backend='cuda', "
                                 "devices=[0, 0], progress=False)")
    ranks = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "plan.json")], stderr=subprocess.PIPE, text=True,
                              env=os.environ | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
                                                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                                                "MASTER_PORT": str(port), "TERAPIPE_CUDA_MODULE": str(build()),
                                                "TERAPIPE_COMM": ("host", "nccl")[rank]}) for rank in range(2)]
    for wish, one in zip(("host", "nccl"), ranks, strict=True):
        assert re.search(rf"messages .TERAPIPE_COMM chooses it. of rank 1 is not that of rank 0 .here it is '{wish}'",
                         one.communicate(timeout=120)[1])
