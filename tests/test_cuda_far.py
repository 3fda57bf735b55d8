"""Offsets that no 32 bits hold: kernels on arrays of few rows, 2^30 elements and more apart, in memory of which only those pages
exist that are touched. The bits are those of the same rows side by side."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

if not (Path(__file__).resolve().parents[1] / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("memory without pages is Linux's", allow_module_level=True)

import cuda_emu  # noqa: E402
from cuda_launchers import BF16, F32, Kernels, of  # noqa: E402
from test_cuda_attention import MMA, WGMMA, Shape, address  # noqa: E402

FAR, NO_RESERVE = 1 << 30, getattr(mmap, "MAP_NORESERVE", 0x4000)  # a name since Python 3.13
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


@pytest.fixture
def k() -> Iterator[Kernels]:
    kernels = Kernels(cuda_emu.library())
    yield kernels
    kernels.clear()
    kernels.lib.tp_cuda_attention_force(0)


def spread(like: np.ndarray, stride: int) -> np.ndarray:
    """A copy whose rows are so many elements apart; what lies between is no memory."""
    rows, n = like.shape
    try:
        room = mmap.mmap(-1, (rows * stride) * like.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError:
        pytest.skip("this system gives no memory that it does not have")
    apart = np.frombuffer(room, like.dtype).reshape(rows, stride)[:, :n]
    apart[:] = like
    return apart


@DTYPES
def test_rows_far_apart(k: Kernels, dtype: int) -> None:
    rng, n, found = np.random.default_rng(3), 24, []
    data = [of(dtype, rng.normal(size=(3, n))) for _ in range(2)]
    gamma = rng.normal(size=n).astype(np.float32)
    for stride in (n, FAR):
        x, dy, y, dx = (spread(a, stride) for a in (*data, *data))
        mean, rstd, loss = (np.zeros(3, np.float32) for _ in range(3))
        dgamma, dbeta, db = (np.zeros(n, np.float32) for _ in range(3))
        partial = np.zeros(k.lib.tp_cuda_partial_floats(3, n), np.float32)
        grad, wte = spread(np.zeros((3, n), np.float32), stride), spread(data[0], n)
        index, start, rows, places = (np.array(v, np.int32) for v in ([0, 2], [0, 1, 3], [1, 0, 2], [0, 1, 2]))
        k("layernorm", dtype, 3, n, x, stride, gamma, gamma, y, stride, mean, rstd)
        k("layernorm_backward", dtype, 3, n, dy, stride, x, stride, mean, rstd, gamma, y, stride, dx, stride)
        k("layernorm_param_gradient", dtype, 3, n, dx, stride, x, stride, mean, rstd, dgamma, dbeta, 0, partial)
        k("bias_gradient", dtype, 3, n, dx, stride, db, 0, partial)
        k("embedding_gradient", dtype, n, 2, index, start, rows, dx, stride, grad, stride)
        k("softmax_loss", dtype, 3, n, x, stride, places, 1.0, 0, loss)
        k("embedding", dtype, 3, n, places, places, wte, wte, x, stride)
        found.append([a.tobytes() for a in (x, y, dx, grad, mean, rstd, dgamma, dbeta, db, loss)])
    assert found[0] == found[1]


@DTYPES
def test_the_last_token_of_a_long_table(k: Kernels, dtype: int) -> None:
    n, last = 1 << 17, 1 << 14  # 2^31 elements before it
    x = spread(of(dtype, np.arange(n).reshape(1, n) % 100), n)
    tables = [spread(of(dtype, np.zeros((last + 1, 1))), n) for _ in range(2)]
    for i, table in enumerate(tables):
        np.lib.stride_tricks.as_strided(table[last], (n,), (table.itemsize,))[:] = of(dtype, np.full(n, 1.0 + i))
    token = np.array([last], np.int32)
    k("embedding", dtype, 1, n, token, token, *tables, x, n)
    assert (x == of(dtype, np.full(n, 3.0))).all()


@pytest.mark.parametrize("dtype, kernel, D, groups", [
    (F32, MMA, 8, 0), (BF16, MMA, 8, 1), (BF16, MMA, 8, 2), (BF16, MMA, 72, 1), (BF16, WGMMA, 8, 1), (BF16, WGMMA, 8, 2),
    (BF16, WGMMA, 72, 1), (BF16, WGMMA, 72, 2),
])  # fmt: skip
def test_attention_of_rows_far_apart(k: Kernels, dtype: int, kernel: int, D: int, groups: int) -> None:
    """Of tokens and of sequences."""
    T, B = 3, 2
    rng, found = np.random.default_rng(4), []
    k.lib.tp_cuda_attention_force(groups)
    given, d_given = of(dtype, rng.normal(size=(T * B, 3 * D))), of(dtype, rng.normal(size=(T * B, D)))
    for widths in ((3 * D, D), (2 * FAR, 2 * FAR)):
        (qkv, dqkv), (o, d_o) = (
            [spread(a, w) for _ in range(2)] for a, w in zip((given, d_given), widths, strict=True)
        )
        lse, delta = (np.zeros((B, T), np.float32) for _ in range(2))
        kept = np.zeros(2 * 64 * 64, np.uint16)
        for first, last in ((0, 2), (2, 3)):
            shape = Shape(B, 1, D, last - first, first, T, *widths)
            ins = [address(qkv, i * D) for i in range(3)]
            call = (None, dtype, kernel, 132, ctypes.byref(shape), *ins, address(o))
            assert k.lib.tp_cuda_attention_forward(*call, address(lse)) == 0, k.lib.tp_error_message()
        for first, last in ((2, 3), (0, 2)):
            shape = Shape(B, 1, D, last - first, first, T, *widths)
            call = (
                None,
                dtype,
                kernel,
                132,
                ctypes.byref(shape),
                *ins,
                address(o),
                address(d_o),
                address(lse),
                address(delta),
            )
            grads = (*(address(dqkv, i * D) for i in range(3)), address(kept), kept.nbytes)
            assert k.lib.tp_cuda_attention_backward(*call, *grads) == 0, k.lib.tp_error_message()
        found.append([a.tobytes() for a in (o, lse, delta, dqkv)])
    assert found[0] == found[1] and np.isfinite(lse).all()


def test_the_statistics_of_many_long_sequences(k: Kernels) -> None:
    """Every kernel finds them by the same function; the one of fp32 has the smallest blocks."""
    total = 65535 * 32
    B = (1 << 31) // total + 2
    qkv, o = np.random.default_rng(5).normal(size=(B, 24)).astype(np.float32), np.zeros((B, 8), np.float32)
    lse = spread(np.zeros((B, 1), np.float32), total)
    shape = Shape(B, 1, 8, 1, 0, total, 24, 8)
    ins = [address(qkv, i * 8) for i in range(3)]
    status = k.lib.tp_cuda_attention_forward(None, F32, MMA, 132, ctypes.byref(shape), *ins, address(o), address(lse))
    assert status == 0, k.lib.tp_error_message()
    assert (o == qkv[:, 16:]).all() and (lse[:, 0] != 0).all()
