"""A request for host memory that is refused ends in a MemoryError, or changes nothing: never in another answer."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import terapipe_c as tp
from terapipe_c import ranks


@pytest.fixture(scope="session")
def refuses(tmp_path_factory) -> Path:
    """tests/refuses.c, to be preloaded."""
    shim = tmp_path_factory.mktemp("shim") / "refuses.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", str(ROOT / "tests" / "refuses.c"), "-o", str(shim), "-ldl"], check=True)
    return shim


def ran(refuses: Path, *command: str) -> str:
    """What Python says to it, all whose requests may be refused."""
    paths = os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100,
                          env={**os.environ, "LD_PRELOAD": str(refuses), "PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_counted_is_counted_whole_or_not_at_all(refuses):
    """A stage whose tables could not be had counted as nothing: memory predictions were too small, cuts too large. And where one of
    several arrays failed, the next told it as a SystemError."""
    told = ran(refuses, str(ROOT / "tests" / "refused_memory.py")).splitlines()
    assert len(told) == 10 and all(int(line.split()[1]) > 0 for line in told), told


PRODUCT = """
import cuda_emu, refused_memory, test_cuda_gemm as test
module = cuda_emu.emulated()
module.emu_machine(major=8)
def product():
    test.Case(test.LINEAR, test.BF16, test.BIAS, 24, 16, 24, 0).run(module, reproducible=True)
    return "no error"
product()
print("\\n".join(refused_memory.outcomes(product, b"_cuda_emu", 256, True)))  # others are the stand-in's for cublasLt
"""


def test_a_product_that_lacks_host_memory_says_so(refuses):
    """And takes no other algorithm, whose sums may be of another order, for one that it had no memory to ask about."""
    told = ran(refuses, "-c", PRODUCT).splitlines()
    assert len(told) > 3 and all("no host memory" in words for words in told), told


ATTACHES = """
import sys
from terapipe_c import _core, worker
class Region:
    def attach(fd):
        raise _core.StorageError("shared memory of 1 bytes could not be mapped: Cannot allocate memory")
if sys.argv[1] == "1":
    _core.Region = Region
sys.exit(worker.main(sys.argv[1:]))
"""


def test_a_rank_that_cannot_have_the_shared_memory_says_so(monkeypatch):
    """It ended "with exit code 1 and no word", for a PeerError: what it tells all by was what it did not get."""
    monkeypatch.setattr(ranks, "COMMAND", ["-P", "-c", ATTACHES])
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=16)
    plan = tp.plan(model, tp.Cluster(2), batch=2, seq_len=16, planner="uniform", stages=2, executable=True)
    with pytest.raises(tp.StorageError, match="^rank 1 failed before its first instruction: shared memory of 1 bytes could not"):
        tp.launch(plan, np.arange(100) % 32, 1, progress=False).wait(60)
