"""The row kernels of cuda/{norm,pointwise,vocab}.cu, run by the host's emulator (cuda_emu.py), against float64.

Every array lies in memory of its own that the emulator checks accesses against, and outputs begin as NaN. "Bits" are equal
bytes: for every cut of rows into calls, every order of blocks and threads, and every alignment.
"""

import ctypes
import itertools
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
    pytest.skip("no CUDA sources beside the tests, or no gcc", allow_module_level=True)

import cuda_emu  # noqa: E402
from cuda_launchers import BF16, F32, Kernels, OnDevice, adamw_args, numbers, of, sums_of_squares, update  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
WIDTHS, HEIGHTS = (1, 7, 8, 64, 768, 1000), (1, 3, 65, 257)
STRIDES = (0, 3, 8)  # more than the width


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """On the emulator; or on the device of the library that TERAPIPE_CUDA_ROWS names (benchmarks/gpu_rows.py builds one)."""
    path = os.environ.get("TERAPIPE_CUDA_ROWS")
    return OnDevice(ctypes.CDLL(path)) if path else Kernels(cuda_emu.library())


@pytest.fixture
def k(kernels: Kernels) -> Iterator[Kernels]:
    yield kernels
    kernels.clear()


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 2e-6, what: object = "", size: float = 0.0) -> None:
    """Errors relative to the largest number (or to `size`, of what cancelled) beyond the one rounding of a bf16 result."""
    error, rounding = np.abs(numbers(got) - want), 2.0**-8 if got.dtype == np.uint16 else 0.0
    size = max(size, np.max(np.abs(want), initial=0.0), 1e-30)
    assert np.max(error - rounding * np.abs(want), initial=0.0) <= tolerance * size, (what, error.max() / size)
    if got.size >= 64 and np.any(want):
        assert np.sqrt((error**2).mean()) <= 3e-3 * max(np.sqrt((want**2).mean()), tolerance * size), what


def shapes() -> Iterator[tuple[int, int, int]]:
    """(rows, n, stride): each width and height, and every stride in turn."""
    for i, (n, rows) in enumerate(itertools.product(WIDTHS, HEIGHTS)):
        yield rows, n, n + STRIDES[i % 3]
    yield from ((2, 1600, 1600), (3, 5000, 5008), (2, 8200, 8200), (2, 9003, 9003))  # 2 and 8 warps; read again


def rows_of(
    k: Kernels, dtype: int, rng: np.random.Generator, rows: int, n: int, stride: int, mean: float = 0.0
) -> np.ndarray:
    """[rows, stride] of dtype, NaN beyond n."""
    x = rng.normal(mean, 1.0, (rows, stride))
    x[:, n:] = np.nan
    return k.put(of(dtype, x))


def layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mean = x.mean(axis=1)
    rstd = 1 / np.sqrt(((x - mean[:, None]) ** 2).mean(axis=1) + 1e-5)
    return (x - mean[:, None]) * rstd[:, None] * gamma + beta, mean, rstd


@DTYPES
def test_layernorm(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(1)
    for i, (rows, n, stride) in enumerate(shapes()):
        x = rows_of(k, dtype, rng, rows, n, stride, mean=10.0 * (i % 2))
        gamma, beta = (k.put(rng.normal(size=n).astype(np.float32)) for _ in range(2))
        y, mean, rstd = k.empty(dtype, rows, stride), k.empty(F32, rows), k.empty(F32, rows)
        with_beta = i % 3 != 1
        k("layernorm", dtype, rows, n, x, stride, gamma, beta if with_beta else None, y, stride, mean, rstd)
        want, want_mean, want_rstd = layer_norm(numbers(x[:, :n]), numbers(gamma), numbers(beta) if with_beta else 0.0)
        close(y[:, :n], want, 1e-5, (rows, n, stride))
        close(mean, want_mean, 1e-5)
        close(rstd, want_rstd, 1e-5)
        assert np.isnan(numbers(y[:, n:])).all(), "wrote beyond the row"
        again = k.put(x)  # statistics alone, then in place
        stats = k.empty(F32, rows), k.empty(F32, rows)
        k("layernorm", dtype, rows, n, x, stride, gamma, None, None, 0, *stats)
        k("layernorm", dtype, rows, n, again, stride, gamma, beta if with_beta else None, again, stride, None, None)
        assert stats[0].tobytes() == mean.tobytes() and stats[1].tobytes() == rstd.tobytes()
        assert again[:, :n].tobytes() == y[:, :n].tobytes()
        k.clear()


@DTYPES
def test_layernorm_variance_keeps_its_digits(k: Kernels, dtype: int) -> None:
    """A mean a thousand times the deviation: E[x^2] - E[x]^2 would have none left."""
    x = k.put(of(dtype, np.where(np.arange(512) % 2, 1024.0, 1032.0)[None]))
    y, gamma = k.empty(dtype, 1, 512), k.put(np.ones(512, np.float32))
    k("layernorm", dtype, 1, 512, x, 512, gamma, None, y, 512, None, None)
    close(y, np.where(np.arange(512) % 2, -1.0, 1.0)[None])


@pytest.mark.parametrize("n", [5, 64, 777, 1600, 9003])
def test_layernorm_of_rows_far_from_zero(k: Kernels, n: int) -> None:
    """A mean that fp32 rounds to 1.5e-5 of the deviation put that much on all results; beside an outlier, wherever it lies, the
    other channels keep their digits."""
    rng = np.random.default_rng(5)
    x = rng.normal([[0.0], [300.0], [-300.0], [3000.0], [0.0], [0.0], [0.0]], 1.0, (7, n)).astype(np.float32)
    for row, at in enumerate((0, n // 2, n - 1), 4):
        x[row, at] = 1e5
    y, mean, gamma = k.empty(F32, 7, n), k.empty(F32, 7), k.put(np.ones(n, np.float32))
    k("layernorm", F32, 7, n, k.put(x), n, gamma, None, y, n, mean, None)
    want, want_mean, want_rstd = layer_norm(numbers(x), numbers(gamma), 0.0)
    for row in range(7):
        close(y[row], want[row], 8e-7, row)
        close(mean[row], want_mean[row], 2e-7, row, 1 / want_rstd[row])


@DTYPES
@pytest.mark.parametrize("n", [64, 777])
def test_layernorm_of_huge_deviations(k: Kernels, dtype: int, n: int) -> None:
    """Their squares overflow, which made zeros of the row: now from 5e29 on, and then NaN."""
    sizes = np.array([1e12, 1e18, 1e20, 1e29, 1e34])
    x = k.put(of(dtype, np.random.default_rng(6).normal(0.0, sizes[:, None], (5, n))))
    y, rstd, gamma = k.empty(dtype, 5, n), k.empty(F32, 5), k.put(np.ones(n, np.float32))
    k("layernorm", dtype, 5, n, x, n, gamma, None, y, n, None, rstd)
    want, _, want_rstd = layer_norm(numbers(x), numbers(gamma), 0.0)
    close(y[:4], want[:4])
    assert np.allclose(rstd[:4], want_rstd[:4], rtol=1e-6, atol=0)
    assert np.isnan(numbers(y[4])).all() and np.isnan(rstd[4])


@DTYPES
def test_layernorm_backward(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(2)
    for i, (rows, n, stride) in enumerate(shapes()):
        x, dy, residual = (rows_of(k, dtype, rng, rows, n, stride) for _ in range(3))
        gamma = k.put(rng.normal(size=n).astype(np.float32))
        mean, rstd = k.empty(F32, rows), k.empty(F32, rows)
        k("layernorm", dtype, rows, n, x, stride, gamma, None, None, 0, mean, rstd)
        x64, g = numbers(x[:, :n]), numbers(dy[:, :n]) * numbers(gamma)
        unit, _, rstd64 = layer_norm(x64, np.ones(n), 0.0)
        along = g - g.mean(axis=1, keepdims=True) - unit * (g * unit).mean(axis=1, keepdims=True)
        want = rstd64[:, None] * along + (numbers(residual[:, :n]) if i % 2 else 0.0)
        # a sum that cancels is held against what it was made of
        size = np.max(np.abs(rstd64[:, None] * g)) + np.max(np.abs(want))
        dx = k.empty(dtype, rows, stride)
        back = ("layernorm_backward", dtype, rows, n)
        given = (stride, mean, rstd, gamma, residual if i % 2 else None, stride)
        k(*back, dy, stride, x, *given, dx, stride)
        close(dx[:, :n], want, 2e-6, (rows, n, stride), size)
        assert np.isnan(numbers(dx[:, n:])).all()
        over = (k.put(dy), k.put(x), k.put(residual))  # dx over each of its inputs
        k(*back, over[0], stride, x, *given, over[0], stride)
        k(*back, dy, stride, over[1], *given, over[1], stride)
        if i % 2:
            k(*back, dy, stride, x, stride, mean, rstd, gamma, over[2], stride, over[2], stride)
            assert over[2][:, :n].tobytes() == dx[:, :n].tobytes()
        assert over[0][:, :n].tobytes() == over[1][:, :n].tobytes() == dx[:, :n].tobytes()
        k.clear()


@pytest.mark.parametrize("n", [5, 64, 777, 1600, 9003])
def test_layernorm_backward_of_rows_far_from_zero(k: Kernels, n: int) -> None:
    """By the mean as it was saved, rounded, dx was 1.2e-5 off about 300, and 1.5e-4 about 3000."""
    rng = np.random.default_rng(5)
    x = k.put(rng.normal([[0.0], [300.0], [-300.0], [3000.0]], 1.0, (4, n)).astype(np.float32))
    dy, gamma = k.put(rng.normal(size=(4, n)).astype(np.float32)), k.put(rng.normal(1.0, 0.2, n).astype(np.float32))
    mean, rstd, dx = k.empty(F32, 4), k.empty(F32, 4), k.empty(F32, 4, n)
    k("layernorm", F32, 4, n, x, n, gamma, None, None, 0, mean, rstd)
    k("layernorm_backward", F32, 4, n, dy, n, x, n, mean, rstd, gamma, None, 0, dx, n)
    g, (unit, _, rstd64) = numbers(dy) * numbers(gamma), layer_norm(numbers(x), np.ones(n), 0.0)
    along = g - g.mean(axis=1, keepdims=True) - unit * (g * unit).mean(axis=1, keepdims=True)
    for row in range(4):
        close(dx[row], rstd64[row] * along[row], 3e-7, row, rstd64[row] * np.abs(g[row]).max())


@DTYPES
def test_sums_over_rows(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(3)
    for i, (rows, n, stride) in enumerate([*shapes(), (9000, 5, 5)]):
        x, dy = rows_of(k, dtype, rng, rows, n, stride), rows_of(k, dtype, rng, rows, n, stride)
        mean, rstd = (k.put(rng.uniform(0.5, 1, rows).astype(np.float32)) for _ in range(2))
        old = [k.put(rng.normal(size=n).astype(np.float32)) for _ in range(3)]
        partial = k.empty(F32, k.status("partial_floats", rows, n))
        unit = (numbers(x[:, :n]) - numbers(mean)[:, None]) * numbers(rstd)[:, None]
        d = numbers(dy[:, :n])
        want = [(d * unit).sum(axis=0), d.sum(axis=0)]
        size = np.max(np.abs(d * unit).sum(axis=0)) + 4
        for accumulate in (0, 1):
            got = [k.put(o) if accumulate else k.empty(F32, n) for o in old]
            partial[:] = np.nan
            k("layernorm_param_gradient", dtype, rows, n, dy, stride, x, stride, mean, rstd, got[0],
              got[1] if i % 3 else None, accumulate, partial)  # fmt: skip
            partial[:] = np.nan
            k("bias_gradient", dtype, rows, n, dy, stride, got[2], accumulate, partial)
            for one, w, o in zip(got, (want[0], want[1], want[1]), old, strict=True):
                if one is not got[1] or i % 3:
                    close(one, w + accumulate * numbers(o), 1e-6, (rows, n), size)
            assert accumulate or not i % 3 or got[1].tobytes() == got[2].tobytes()
        k.clear()


def gelu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x: np.ndarray) -> np.ndarray:
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


@DTYPES
def test_pointwise(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(4)
    for i, (rows, n, _) in enumerate(shapes()):
        x, y = (rows_of(k, dtype, rng, rows, n, n) for _ in range(2))
        bias = k.put(rng.normal(size=n).astype(np.float32))
        g, dh, summed, cast = (k.empty(dtype, rows, n) for _ in range(4))
        x64, y64 = numbers(x), numbers(y)
        k("gelu", dtype, rows, n, x, g)
        close(g, gelu(x64))
        k("dgelu", dtype, rows, n, x, y, dh)
        close(dh, y64 * gelu_slope(x64))
        over = k.put(y)
        k("dgelu", dtype, rows, n, x, over, over)
        assert over.tobytes() == dh.tobytes()
        summed[:] = y
        k("add", dtype, rows * n, x, summed)
        close(summed, x64 + y64)
        summed[:] = y
        k("add_bias", dtype, rows, n, summed, bias if i % 3 else None, x if i % 2 else None)
        close(summed, y64 + (numbers(bias) if i % 3 else 0.0) + (x64 if i % 2 else 0.0))
        plain = k.put(rng.normal(size=(rows, n)).astype(np.float32))
        k("cast", dtype, rows * n, plain, cast)
        assert cast.tobytes() == of(dtype, plain).tobytes()
        k.clear()


def test_gelu_far_out(k: Kernels) -> None:
    """Each element for itself: the tail keeps its digits, nothing overflows into NaN, NaN stays."""
    x = k.put(np.array([-9, -6, -3, -1, -1e-4, 0, 1e-4, 1, 6, 30, 1e20, 3e38, -1e20, -3e38, np.nan], np.float32))
    g, d, one = k.empty(F32, 15), k.empty(F32, 15), k.put(np.ones(15, np.float32))
    k("gelu", F32, 1, 15, x, g)
    k("dgelu", F32, 1, 15, x, one, d)
    want = gelu(numbers(x[:10]))
    assert (np.abs(g[:10] - want) <= 1e-5 * np.abs(want)).all()
    assert np.abs(d[:10] - gelu_slope(numbers(x[:10]))).max() < 1e-6
    assert g[10:12].tolist() == x[10:12].tolist() and g[12:14].tolist() == [0, 0]
    assert d[10:14].tolist() == [1, 1, 0, 0] and np.isnan(g[14]) and np.isnan(d[14])


@DTYPES
def test_embedding(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(5)
    for rows, n, stride in shapes():
        wte, wpe = rows_of(k, dtype, rng, 50, n, n), rows_of(k, dtype, rng, 20, n, n)
        tokens, places = (k.put(rng.integers(0, high, rows).astype(np.int32)) for high in (50, 20))
        y = k.empty(dtype, rows, stride)
        k("embedding", dtype, rows, n, tokens, places, wte, wpe, y, stride)
        close(y[:, :n], numbers(wte)[tokens] + numbers(wpe)[places])
        assert np.isnan(numbers(y[:, n:])).all()
        k.clear()


def group(k: Kernels, index: np.ndarray, height: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """(groups, group_index, group_start, rows_of) as device arrays."""
    most = min(len(index), height)
    arrays = [np.full(size, -1, np.int32) for size in (height, most, most + 1, len(index))]
    count = np.full(1, -1, np.int64)
    index = np.ascontiguousarray(index, np.int32)
    assert k.status("group_rows", len(index), index, height, *arrays, count) == 0, k.lib.tp_error_message()
    return int(count[0]), *map(k.put, arrays[1:])


@DTYPES
def test_embedding_gradient(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(6)
    for i, (rows, n, stride) in enumerate(shapes()):
        height = (1, 7, 300)[i % 3]
        index = (height * rng.random(rows) ** 3).astype(np.int32)  # few indices have most rows
        groups, group_index, group_start, rows_of_group = group(k, index, height)
        dy, grad = (
            rows_of(k, dtype, rng, rows, n, stride),
            k.put(rng.normal(size=(height, n + i % 2)).astype(np.float32)),
        )
        want = numbers(grad)
        np.add.at(want[:, :n], index, numbers(dy[:, :n]))
        untouched = np.setdiff1d(np.arange(height), index)
        before = grad.copy()
        k("embedding_gradient", dtype, n, groups, group_index, group_start, rows_of_group, dy, stride, grad, n + i % 2)
        close(grad, want, 3e-6)
        assert grad[untouched].tobytes() == before[untouched].tobytes() and (grad[:, n:] == before[:, n:]).all()
        k.clear()


@DTYPES
def test_bits_of_the_embedding_gradient_do_not_depend_on_how_many_groups_a_block_takes(k: Kernels, dtype: int) -> None:
    """Eight where there are many groups, of few rows by a warp each; one where a call has few. On and off 16 bytes."""
    rng, strip = np.random.default_rng(16), 256 if dtype == BF16 else 128
    counts = np.where(rng.random(256) < 0.9, rng.integers(1, 3, 256), rng.integers(3, 9, 256))
    counts[[0, 7, 8, 40, 100]] = 9, 8, 40, 20, 70  # 8 and 40 in one block, the others' of 32
    index = rng.permutation(np.repeat(np.arange(256), counts))
    for n, stride in ((32 * strip, 32 * strip), (31 * strip + 3, 31 * strip + 5)):
        groups, group_index, group_start, rows_of_group = group(k, index, 256)
        dy, before = rows_of(k, dtype, rng, len(index), n, n), rng.normal(size=(256, stride)).astype(np.float32)
        whole, parts = k.put(before), k.put(before)
        k("embedding_gradient", dtype, n, groups, group_index, group_start, rows_of_group, dy, n, whole, stride)
        for g in range(0, groups, 7):
            some = min(7, groups - g), group_index[g:], group_start[g:], rows_of_group
            k("embedding_gradient", dtype, n, *some, dy, n, parts, stride)
        want = before.copy()
        np.add.at(want[:, :n], index, numbers(dy))
        close(whole, want, 3e-6)
        assert whole.tobytes() == parts.tobytes() and (whole[:, n:] == before[:, n:]).all()
        k.clear()


def test_groups(k: Kernels) -> None:
    rng = np.random.default_rng(7)
    for rows, height in [(0, 5), (1, 1), (10, 1), (1000, 3), (50, 50000), (2000, 300), *rng.integers(1, 60, (200, 2))]:
        index = rng.integers(0, height, rows).astype(np.int32)
        groups, group_index, group_start, rows_of_group = group(k, index, int(height))
        assert group_index[:groups].tolist() == np.unique(index).tolist()
        assert rows_of_group.tolist() == np.argsort(index, kind="stable").tolist()
        assert group_start[: groups + 1].tolist() == [0, *np.cumsum(np.unique(index, return_counts=True)[1])]
        k.clear()


@pytest.mark.parametrize(("index", "height", "text"), [([0, 5], 5, "row 1 has index 5; it must be 0..4"),
                                                       ([-1], 5, "row 0 has index -1"), ([0], 0, "row 0")])  # fmt: skip
def test_groups_refuse_an_index_outside(k: Kernels, index: list[int], height: int, text: str) -> None:
    arrays = [np.zeros(8, np.int32) for _ in range(4)]
    given = np.array(index, np.int32)
    assert k.status("group_rows", len(index), given, height, *arrays, np.zeros(1, np.int64)) == 1
    assert text in k.lib.tp_error_message().decode()


def cross_entropy(x: np.ndarray, targets: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    shifted = x - x.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    at = np.arange(len(x)), targets
    gradient = np.exp(shifted - log_sum[:, None])
    gradient[at] -= 1
    return log_sum - shifted[at], gradient * scale


@DTYPES
@pytest.mark.parametrize(
    ("rows", "vocab", "stride"),
    [(1, 1, 1), (3, 1, 8), (65, 7, 7), (257, 8, 8), (65, 64, 64), (3, 1000, 1003), (3, 1000, 1024), (2, 50257, 50304),
     (1, 50257, 50257), (5, 8191, 8193)],
)  # fmt: skip
def test_softmax_loss(k: Kernels, dtype: int, rows: int, vocab: int, stride: int) -> None:
    rng = np.random.default_rng(vocab)
    for size in (1.0, 30.0, 1e4):
        x = rows_of(k, dtype, rng, rows, vocab, stride)
        x[:, :vocab] = of(dtype, size * numbers(x[:, :vocab]))
        targets = k.put(rng.integers(0, vocab, rows).astype(np.int32))
        targets[0] = 0
        targets[-1] = vocab - 1
        want, gradient = cross_entropy(numbers(x[:, :vocab]), targets, 0.25)
        logits, loss = k.put(x), k.empty(F32, rows)
        k("softmax_loss", dtype, rows, vocab, logits, stride, targets, 0.25, 0, loss)
        assert logits.tobytes() == x.tobytes(), "a loss alone leaves the logits alone"
        close(loss, want, 5e-7, size, 1.0)
        first, loss[:] = loss.copy(), np.nan
        k("softmax_loss", dtype, rows, vocab, logits, stride, targets, 0.25, 1, loss)
        assert loss.tobytes() == first.tobytes()
        close(logits[:, :vocab], gradient, 2e-6, size, 0.25)
        assert not logits[:, vocab:].any(), "padding becomes zero"
        k.clear()


@DTYPES
def test_softmax_loss_at_its_ends(k: Kernels, dtype: int) -> None:
    x = np.zeros((5, 16))
    x[0, 3] = 1e4  # one-hot and right; one-hot and wrong; a logit of minus infinity; NaN; plus infinity
    x[1, 3], x[2, 5], x[3, 7], x[4, 7] = 1e4, -np.inf, np.nan, np.inf
    logits, targets, loss = k.put(of(dtype, x)), k.put(np.array([3, 4, 0, 0, 0], np.int32)), k.empty(F32, 5)
    k("softmax_loss", dtype, 5, 16, logits, 16, targets, 1.0, 1, loss)
    got = numbers(logits)
    assert loss[0] == 0 and not got[0].any()
    assert loss[1] == numbers(of(dtype, np.array(1e4))) and got[1, 3] == 1 and got[1, 4] == -1
    assert abs(loss[2] - math.log(15)) < 1e-6 and got[2, 5] == 0
    assert np.isnan(loss[3:]).all() and np.isnan(got[3]).all() and np.isnan(got[4]).all()


@DTYPES
def test_nan_goes_through(k: Kernels, dtype: int) -> None:
    x = of(dtype, np.ones((2, 64)))
    x[1, 5] = of(dtype, np.array(np.nan))
    x = k.put(x)
    gamma, y, mean, rstd = k.put(np.ones(64, np.float32)), k.empty(dtype, 2, 64), k.empty(F32, 2), k.empty(F32, 2)
    k("layernorm", dtype, 2, 64, x, 64, gamma, None, y, 64, mean, rstd)
    assert np.isnan(numbers(y[1])).all() and not np.isnan(numbers(y[0])).any() and np.isnan(rstd[1])
    k("layernorm_backward", dtype, 2, 64, x, 64, x, 64, mean, rstd, gamma, None, 0, y, 64)
    assert np.isnan(numbers(y[1])).all() and not np.isnan(numbers(y[0])).any()
    partial, db = k.empty(F32, k.status("partial_floats", 2, 64)), k.empty(F32, 64)
    k("bias_gradient", dtype, 2, 64, x, 64, db, 0, partial)
    assert np.isnan(db).tolist() == [i == 5 for i in range(64)]


def row_calls(k: Kernels, dtype: int, cuts: list[int], offset: int = 0, n: int = 200) -> list[bytes]:
    """Every kernel that works on rows, called for rows [cuts[i], cuts[i + 1]); what it wrote."""
    rng, rows, vocab = np.random.default_rng(11), cuts[-1], 300
    stride = n + 8
    x, dy, residual, wide = (k.put(of(dtype, rng.normal(size=(rows, stride))), offset) for _ in range(4))
    wte, wpe, packed = (k.put(of(dtype, rng.normal(size=(rows, n))), offset) for _ in range(3))
    gamma, beta = (k.put(rng.normal(size=n).astype(np.float32), offset) for _ in range(2))
    tokens, places, targets = (k.put(rng.integers(0, high, rows).astype(np.int32)) for high in (rows, rows, vocab))
    logits = k.put(of(dtype, 4 * rng.normal(size=(rows, 304))), offset)
    y, dx, e = (k.put(of(dtype, np.zeros((rows, stride))), offset) for _ in range(3))
    g, dh, b = k.put(packed, offset), k.put(packed, offset), k.put(packed, offset)
    mean, rstd, loss = (k.empty(F32, rows) for _ in range(3))
    for i, j in itertools.pairwise(cuts):
        c = j - i
        k("layernorm", dtype, c, n, x[i:], stride, gamma, beta, y[i:], stride, mean[i:], rstd[i:])
        k("layernorm_backward", dtype, c, n, dy[i:], stride, x[i:], stride, mean[i:], rstd[i:], gamma, residual[i:],
          stride, dx[i:], stride)  # fmt: skip
        k("gelu", dtype, c, n, packed[i:], g[i:])
        k("dgelu", dtype, c, n, packed[i:], wte[i:], dh[i:])
        k("add_bias", dtype, c, n, b[i:], beta, wpe[i:])
        k("embedding", dtype, c, n, tokens[i:], places[i:], wte, wpe, e[i:], stride)
        k("softmax_loss", dtype, c, vocab, logits[i:], 304, targets[i:], 0.5, 1, loss[i:])
    written = [x.tobytes() for x in (y, dx, g, dh, b, e, logits, mean, rstd, loss)]
    k.clear()
    return written


def sum_calls(k: Kernels, dtype: int) -> list[bytes]:
    """Every kernel that sums over rows or elements."""
    rng, rows, n = np.random.default_rng(12), 300, 200
    x, dy = (k.put(of(dtype, rng.normal(size=(rows, n)))) for _ in range(2))
    mean, rstd = (k.put(rng.normal(size=rows).astype(np.float32)) for _ in range(2))
    partial, dgamma, dbeta = k.empty(F32, k.status("partial_floats", rows, n)), k.empty(F32, n), k.empty(F32, n)
    k("layernorm_param_gradient", dtype, rows, n, dy, n, x, n, mean, rstd, dgamma, dbeta, 0, partial)
    grad = k.put(rng.normal(size=(9, n)).astype(np.float32))
    groups = group(k, rng.integers(0, 9, rows), 9)
    k("embedding_gradient", dtype, n, *groups, dy, n, grad, n)
    out = sums_of_squares(k, k.put(rng.normal(size=50000).astype(np.float32)))
    written = [x.tobytes() for x in (dgamma, dbeta, grad, out)]
    k.clear()
    return written


def test_partial_sums_of_fewer_rows_fit(k: Kernels) -> None:
    """A stage takes the room for its largest micro-batch: 8193 rows make fewer tiles than 8192."""
    sizes = [k.status("partial_floats", rows, 64) for rows in (*range(1, 100), 8000, 8191, 8192, 8193, 8300, 100_000)]
    assert sizes == sorted(sizes) and sizes[0] == 2 * 64 and sizes[-1] == 2 * 256 * 64
    for rows in (100, 8192, 8193):
        tiles = -(-rows // (32 if rows <= 8192 else 40))
        assert k.status("partial_floats", rows, 64) >= 2 * tiles * 64


@DTYPES
def test_bits_do_not_depend_on_cuts(k: Kernels, dtype: int) -> None:
    whole = row_calls(k, dtype, [0, 41])
    for cuts in ([0, 1, 41], [0, 8, 16, 41], [0, 40, 41], [0, 13, 14, 15, 41]):
        assert row_calls(k, dtype, cuts) == whole


@DTYPES
@pytest.mark.parametrize("order", [1, 2, 3, 8])  # 8: by chance
def test_bits_do_not_depend_on_the_order_of_blocks_and_threads(k: Kernels, dtype: int, order: int) -> None:
    if isinstance(k, OnDevice):
        pytest.skip("a device has an order of its own")
    rows, sums = row_calls(k, dtype, [0, 41]), sum_calls(k, dtype)
    k.lib.tp_simt_set_order(order)
    assert row_calls(k, dtype, [0, 41]) == rows
    k.lib.tp_simt_set_order(order)
    assert sum_calls(k, dtype) == sums


@DTYPES
def test_bits_do_not_depend_on_alignment(k: Kernels, dtype: int) -> None:
    for n in (200, 2100, 9000):  # a warp, several, and chunks that are read again
        assert row_calls(k, dtype, [0, 5], offset=1, n=n) == row_calls(k, dtype, [0, 5], n=n)


@DTYPES
def test_no_rows_is_no_work(k: Kernels, dtype: int) -> None:
    none = k.put(np.zeros(8, np.float32))
    k("layernorm", dtype, 0, 8, none, 8, none, none, none, 8, none, none)
    k("gelu", dtype, 0, 8, none, none)
    k("softmax_loss", dtype, 0, 8, none, 8, none, 1.0, 1, none)
    empty = none[:0]
    update(k, dtype, adamw_args(*range(1, 9)), (empty, empty, empty, empty, empty, 1))
    k("embedding_gradient", dtype, 8, 0, none, none, none, none, 8, none, 8)
    db = k.put(np.ones(8, np.float32))
    k("bias_gradient", dtype, 0, 8, none, 8, db, 1, none)
    assert (db == 1).all()
    k("bias_gradient", dtype, 0, 8, none, 8, db, 0, none)
    assert (db == 0).all()


@pytest.mark.parametrize(("call", "text"), [
    (("gelu", F32, -1, 8, None, None), None), (("add_bias", F32, -1, 8, None, None, None), "-1 rows of 8"),
    (("bias_gradient", F32, 1, 0, None, 0, None, 0, None), "1 rows of 0"),
    (("softmax_loss", F32, 1, 9, None, 8, None, 1.0, 1, None), "9 logits in rows of 8"),
    (("softmax_loss", F32, 1, 0, None, 8, None, 1.0, 1, None), "0 logits"),
    (("embedding_gradient", F32, 1 << 31, 1, None, None, None, None, 8, None, 8), "1 rows of 2147483648"),
])  # fmt: skip
def test_bad_shapes_are_refused(k: Kernels, call: tuple[Any, ...], text: str | None) -> None:
    status = k.status(call[0], None, *call[1:])
    assert status == (1 if text else 0) and (not text or text in k.lib.tp_error_message().decode())
