"""The host never touches a device's memory: on the emulated device it could, unless that lies apart (cuda/emu/apart.h)."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
    pytest.skip("no CUDA sources beside the tests, or no gcc", allow_module_level=True)

import cuda_emu  # noqa: E402

TRAINS = """
import numpy as np
import terapipe_c as tp

model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=11, block_size=6)
data = np.arange(400, dtype=np.int32) % 11
plan = tp.plan(model, tp.Cluster(num_devices=2, peak_flops=1e12), batch=2, seq_len=6, planner="uniform", stages=2,
               slicing=[(1, [4, 2])] * 2, executable=True, backend="cuda")
run = tp.launch(plan, data, 3, backend="cuda", devices=[0, 0], processes=False, progress=False, eval_every=2, eval_batches=1)
assert len(list(run)) == 3
both = tp.plan(model, tp.Cluster(num_devices=2, peak_flops=1e12), batch=2, seq_len=6, planner="uniform", stages=1, data_parallel=2,
               backend="cuda")
assert len(list(tp.launch(both, data, 2, backend="cuda", devices=[0, 0], processes=False, progress=False, reproducible=False))) == 2
untied = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=11, block_size=6, tie_weights=False)
each = tp.plan(untied, tp.Cluster(num_devices=2, peak_flops=1e12), batch=3, seq_len=6, planner="uniform", stages=2,
               schedule="pipedream", slicing=[(1, [4, 2])] * 3, backend="cuda")
assert len(list(tp.launch(each, data, 3, backend="cuda", devices=[0, 0], processes=False, progress=False, reproducible=False))) == 3
loss, grads = tp.loss_and_grads(model, tp.init_params(model), data[:14].reshape(2, 7), [4, 2], 2, backend="cuda")
assert loss > 0 and len(grads) == 16, len(grads)
"""
READS = """
import ctypes
import cuda_emu

lib, device, memory = cuda_emu.library(), ctypes.c_void_p(), ctypes.c_void_p()
assert lib.tp_cuda_open(0, None, ctypes.byref(device)) == 0
assert lib.tp_cuda_alloc(device, ctypes.c_size_t(64), b"a test", ctypes.byref(memory)) == 0
print(ctypes.string_at(memory, 1))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TERAPIPE_EMU_APART": "1", "TERAPIPE_CUDA_MODULE": str(cuda_emu.build()), "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_training_touches_no_device_memory_on_the_host() -> None:
    ran = run(TRAINS)
    assert ran.returncode == 0, ran.stderr


def test_a_host_that_does_ends_there() -> None:
    assert run(READS).returncode == -signal.SIGSEGV
