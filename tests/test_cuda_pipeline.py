"""The emulator of warps that work at different times (cuda/pipeline.h): barriers of phases, named barriers and copies that arrive
at a phase; what is wrong with a kernel is told in every order, and two that race are found."""

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

import cuda_emu  # noqa: E402
from test_cuda_attention import CHANCE, aligned, run_case  # noqa: E402


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "races"])
def cases(request, tmp_path_factory):
    emulator = cuda_emu.simt_cases(tmp_path_factory.mktemp("cuda"), races=request.param)
    emulator.races = request.param
    yield emulator
    emulator.tp_simt_set_order(0)


def run(cases, fault=0):
    x, y = aligned(128, np.float32), aligned(128, np.float32)
    x[:] = np.arange(128)
    return *run_case(cases, "pipeline", fault, 64, x, y), (y.reshape(4, 32) == x.reshape(4, 32)[:, ::-1]).all()


@pytest.mark.parametrize("order", [*range(8), *CHANCE])
def test_one_warp_loads_and_another_reads(cases, order):
    cases.tp_simt_set_order(order)
    assert run(cases) == (0, "", True)


FAULTS = {
    3: "divergent phase: it waits at tests/simt_cases.cu:",
    4: "comes to named barrier 1 twice, before all others have come",
    5: "the block ends, and not all have come to this named barrier",
    6: "of (64|32) threads, others, at tests/simt_cases.cu:.*, as of (64|32)",
    7: "the barrier at byte .* of shared memory was not initialised",
    9: "named barrier 16 of 64 threads, in a block of 64",
    10: "named barrier 2 is of other warps than before",
}
READ = "reads shared memory that nobody has written|touches what an asynchronous copy may be writing|no barrier between"
RACES = {
    1: READ,
    2: READ + "|divergent named barrier",
    8: "writes, with no barrier between, what another thread read|touches what an asynchronous copy may be writing",
}


@pytest.mark.parametrize("order", [0, 2, 4, 6, *CHANCE])
@pytest.mark.parametrize("fault", [*FAULTS, *RACES])
def test_a_wrong_kernel_is_found(cases, fault, order):
    cases.tp_simt_set_order(order)
    status, message, right = run(cases, fault)
    if fault in FAULTS or cases.races:
        assert status != 0 and re.search((FAULTS | RACES)[fault], message), message
    cases.tp_simt_set_order(0)
    assert run(cases) == (0, "", True)  # the emulator is none the worse


@pytest.mark.parametrize("fault", [1, 2])
def test_who_reads_or_writes_too_early_shows_in_some_order(cases, fault):
    if cases.races:
        pytest.skip("found at once")
    right = []
    for order in range(8):
        cases.tp_simt_set_order(order)
        right.append(bool(run(cases, fault)[2]))
    assert not all(right)
