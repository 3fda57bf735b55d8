"""No two threads of a kernel meet in shared or device memory with no barrier between them: cuda/emu/race.c looks on, and says
so of kernels that are wrong on purpose. What compute-sanitizer's racecheck would say on a GPU, in every `make test`."""

import ctypes
import re
import struct
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

import cuda_emu  # noqa: E402
from cuda_launchers import BF16, F32, Kernels, of  # noqa: E402
from test_cuda_attention import CHANCE, Attention, address, aligned  # noqa: E402


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """simt_cases.cu with an emulator of its own, that looks for races."""
    return cuda_emu.simt_cases(tmp_path_factory.mktemp("cuda"), races=True)


@pytest.fixture
def k():
    kernels = Kernels(cuda_emu.library(races=True))
    yield kernels
    kernels.clear()
    kernels.lib.tp_cuda_attention_force(0)


DARK = "(no barrier between, what another thread (read|wrote)|reads shared memory that nobody has written), in shared memory"
FAULTS = {
    0: None,
    1: DARK,
    2: DARK,
    3: DARK,  # a warp's barrier is the warp's
    4: DARK,
    5: "writes what another block writes, in global memory",
    6: "(reads what another block writes|writes what another block reads), in global memory",
    7: "touches what an asynchronous copy may be writing, in shared memory",
    8: DARK,  # the copy was waited for, but by its own thread alone
    9: "reads shared memory that nobody has written, in shared memory",
}


@pytest.mark.parametrize("order", [0, 1, 2, 3, *CHANCE])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_race_is_found_in_every_order(cases, fault, order):
    x, y = aligned(64, np.float32), aligned(128, np.float32)
    x[:] = np.arange(64)
    cases.tp_simt_set_order(order)
    status = cases.simt_case(b"race", fault, 64, address(x), address(y), None, None)
    message = cases.tp_error_message().decode() if status else None
    if FAULTS[fault] is None:
        assert status == 0, message
        assert (y.reshape(2, 64) == x[::-1] + x[::-1][np.arange(64) ^ 1] * 1 + x[np.arange(64) ^ 1]).all()
    else:
        assert status != 0 and "case_race" in message and re.search(FAULTS[fault], message), message


def test_a_plain_access_outside_every_allocation_is_found(cases):
    """Of no TP_LD, which asks in every build."""
    x, y = aligned(80, np.float32), aligned(128, np.float32)
    x[:] = 1.0
    for array, count in ((x, 64), (y, 128)):
        assert cases.tp_simt_range_add(address(array), ctypes.c_size_t(4 * count)) == 0
    try:
        assert cases.simt_case(b"race", 0, 64, address(x), address(y), None, None) == 0, cases.tp_error_message()
        assert cases.simt_case(b"race", 10, 64, address(x), address(y), None, None) != 0
    finally:
        for array in (x, y):
            cases.tp_simt_range_remove(address(array))
    told = cases.tp_error_message().decode()
    assert "thread 37" in told and "touches what lies in no allocation of the device, in global memory (4 bytes" in told


@pytest.mark.parametrize("dtype, groups", [(BF16, 1), (BF16, 2), (F32, 0)])
def test_attention_has_no_races(k, dtype, groups):
    k.lib.tp_cuda_attention_force(groups)
    for D, slices in ((64, [130, 5]), (128, [70])) if dtype == BF16 else ((20, [33, 20]),):
        for order in (0, 3, CHANCE[0]):
            k.lib.tp_simt_set_order(order)
            Attention(k.lib, dtype, 1, 1, D, sum(slices)).run(slices)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("rows, n", [(19, 64), (5, 1600), (70, 37)])
def test_row_kernels_have_no_races(k, dtype, rows, n):
    rng = np.random.default_rng(1)
    x, y, z = (k.put(of(dtype, rng.normal(size=(rows, n)))) for _ in range(3))
    gamma, beta, dgamma, dbeta = (k.put(rng.normal(size=n).astype(np.float32)) for _ in range(4))
    mean, rstd, loss = (k.empty(F32, rows) for _ in range(3))
    partial = k.empty(F32, k.lib.tp_cuda_partial_floats(rows, n))
    k("layernorm", dtype, rows, n, x, n, gamma, beta, y, n, mean, rstd)
    k("layernorm", dtype, rows, n, z, n, gamma, beta, z, n, None, None)  # in place
    k("layernorm_backward", dtype, rows, n, y, n, x, n, mean, rstd, gamma, z, n, y, n)
    k("layernorm_param_gradient", dtype, rows, n, y, n, x, n, mean, rstd, dgamma, dbeta, 1, partial)
    k("bias_gradient", dtype, rows, n, y, n, dbeta, 0, partial)
    k("gelu", dtype, rows, n, x, y)
    k("dgelu", dtype, rows, n, x, y, z)
    k("add_bias", dtype, rows, n, y, gamma, x)
    k("add", dtype, rows * n, x, y)
    tokens, places = (k.put(rng.integers(0, rows, 40).astype(np.int32)) for _ in range(2))
    k("embedding", dtype, 40, n, tokens, places, x, z, k.empty(dtype, 40, n), n)
    index, start, order = (k.put(np.array(v, np.int32)) for v in ([0, 3], [0, min(rows, 17), rows], np.arange(rows)))
    k("embedding_gradient", dtype, n, 2, index, start, order, x, n, k.put(np.zeros((4, n), np.float32)), n)
    wide, start = k.put(of(dtype, rng.normal(size=(1, 2048)))), [0, *np.cumsum([9 if g % 2 else 1 for g in range(16)])]
    index, start, order = (k.put(np.array(v, np.int32)) for v in (np.arange(16), start, np.zeros(start[-1])))
    k("embedding_gradient", dtype, 2048, 16, index, start, order, wide, 2048, k.put(np.zeros((16, 2048), np.float32)), 2048)
    targets = k.put(rng.integers(0, n, rows).astype(np.int32))
    k("softmax_loss", dtype, rows, n, z, n, targets, 0.5, 1, loss)
    p, g, m, v = (k.put(rng.normal(size=20_000).astype(np.float32) ** 2) for _ in range(4))
    total = k.put(np.zeros(1))
    whole = k.tensors((g, p, m, v, k.empty(dtype, p.size), 1))
    k("sumsq", whole, total, k.put(np.zeros(int(whole["leaves"][0]))))
    assert np.isfinite(loss).all() and total[0] > 0
    many = k.put(np.ones(600))
    args = ctypes.create_string_buffer(struct.pack("dd6f", 0.9, 0.95, 1e-3, 1e-8, 0.1, 0.1, 0.05, 1.0))
    k("adamw", dtype, whole, int(whole["tensor"][0]), ctypes.addressof(args), None)
    k("clip", 600, 1, many, k.put(np.ones(600)), 0.5, ctypes.addressof(args), k.put(np.zeros(12)))
    k("cast", dtype, p.size, p, k.empty(dtype, p.size))
