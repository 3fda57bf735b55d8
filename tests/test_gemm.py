"""The matrix products of the CPU backend: bit for bit the sums of backend.h, on every instruction set."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core

ISAS = _core.kernel_isas()
# M, K, N: single elements, tails of tiles (14, 6, AMX 32), panels (32) and chunks of k (192, AMX 384), several blocks and groups
SHAPES = [(1, 1, 1), (1, 7, 33), (13, 1, 31), (15, 40, 32), (29, 193, 65), (3, 400, 100), (71, 70, 129), (2, 401, 385)]
SHAPES += [(230, 20, 40), (4, 30, 800), (290, 1600, 40), (2, 6200, 800), (390, 1600, 3)]


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 fma(a, b, c), rounded once.

    The product of two float32 is exact in float64. The sum is rounded to odd (Boldo & Melquiond, "Emulation of FMA and
    correctly rounded sums: proved algorithms using rounding to odd", IEEE TC 57(4), 2008), so that rounding again to
    float32 gives what one rounding gives.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    away = np.where((error > 0) == (total > 0), 1, -1)
    odd = (total.view(np.int64) + np.where(even & (error != 0), away, 0)).view(np.float64)
    return odd.astype(np.float32)


def chain(x: np.ndarray, w: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """x @ w as the contract says of linear_w: k ascending, one fma each, from +0 or from start."""
    acc = np.zeros((x.shape[0], w.shape[1]), np.float32) if start is None else start.copy()
    for k in range(x.shape[1]):
        acc = fma(x[:, k, None], w[None, k, :], acc)
    return acc


def pieces(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w as the contract says of linear and linear_t: pieces of at most 192 k, each one chain, added in order."""
    depth = x.shape[1]
    count = -(-depth // 192)
    cuts = [depth * i // count for i in range(count + 1)]
    sums = [chain(x[:, a:b], w[a:b]) for a, b in itertools.pairwise(cuts)]
    return functools.reduce(np.add, sums)


def thirds(x: np.ndarray) -> list[np.ndarray]:
    """x as the exact sum of three bf16, each the nearest to what is left (ties away from zero), as float32."""
    parts, rest = [], np.ascontiguousarray(x, np.float32)
    for _ in range(3):
        parts.append(((rest.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32))
        rest = rest - parts[-1]
    assert not rest.any()
    return parts


def tiles(x: np.ndarray, w: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """x @ w as AMX computes it: groups of 32 k, each six instructions, of which each adds the sum of two chains, of even and of
    odd k's (a product of two bf16 is exact in float32)."""
    acc = np.zeros((x.shape[0], w.shape[1]), np.float32) if start is None else start.copy()
    a, b = thirds(x), thirds(w)
    for first in range(0, x.shape[1], 32):
        for i, j in ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)):
            sums = [np.zeros_like(acc), np.zeros_like(acc)]
            for k in range(first, min(first + 32, x.shape[1])):
                sums[k % 2] += a[i][:, k, None] * b[j][None, k, :]
            acc += sums[0] + sums[1]
    return acc


def amx_pieces(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Pieces of at most 12 groups, added in order."""
    groups = -(-x.shape[1] // 32)
    count = -(-groups // 12)
    cuts = [32 * (groups * i // count) for i in range(count + 1)]
    return functools.reduce(np.add, [tiles(x[:, a:b], w[a:b]) for a, b in itertools.pairwise(cuts)])


def product(isa: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the contract says of linear and linear_t."""
    return amx_pieces(x, w) if isa == "amx" else pieces(x, w)


def gradient(isa: str, x: np.ndarray, dy: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """What it says of linear_w."""
    return (tiles if isa == "amx" else chain)(np.ascontiguousarray(x.T), dy, start)


def bits(array: np.ndarray) -> np.ndarray:
    """For comparisons that tell -0 from +0."""
    return np.ascontiguousarray(array).view(np.uint32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((bits(a) == bits(b)).all())


def operands(m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([m, k, n])
    scale = rng.choice(np.float32([1e-3, 1.0, 1e3]), size=(k, 1))  # cancellation and absorption, so that order shows
    x = rng.standard_normal((m, k), dtype=np.float32)
    w = (rng.standard_normal((k, n), dtype=np.float32) * scale).astype(np.float32)
    return x, w, rng.standard_normal((m, n), dtype=np.float32)


def empty_like_rows(m: int, n: int, extra: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """A [m, n] view with longer rows, and the guard columns behind it."""
    whole = np.full((m, n + extra), np.float32(-77.0))
    return whole[:, :n], whole[:, n:]


def test_emulated_fma_rounds_once() -> None:
    one, tiny = np.float32(1.0), np.float32(2.0**-24)
    above, below = np.nextafter(one, np.float32(2)), np.nextafter(one, np.float32(0))
    # 1 + 2^-24 is a tie; a product a hair above it must round up, below it down
    assert fma(np.array([tiny]), np.array([above]), np.array([one]))[0] == above
    assert fma(np.array([tiny]), np.array([below]), np.array([one]))[0] == one
    # (1 + u)(1 - u) - 1 = -u^2 is lost when the product is rounded first
    u = np.float32(2.0**-12)
    assert fma(np.array([one + u]), np.array([one - u]), np.array([-one]))[0] == -(u * u)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_pieces_added_in_order(isa: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, w, _ = operands(m, k, n)
    bias = np.random.default_rng(1).standard_normal(n, dtype=np.float32)
    kernels = _core.Kernels(isa)
    weight = kernels.weight(w)
    y, guard = empty_like_rows(m, n)
    expected = product(isa, x, w)
    assert same(kernels.linear(x, weight, y), expected)
    assert (guard == -77.0).all()
    assert same(kernels.linear(x, weight, y, bias=bias), expected + bias)
    assert (guard == -77.0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_input_gradient_is_pieces_added_in_order(isa: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    _, w, dy = operands(m, k, n)
    kernels = _core.Kernels(isa)
    dx, guard = empty_like_rows(m, k)
    kernels.linear_t(dy, kernels.weight(w), dx)
    assert same(dx, product(isa, dy, np.ascontiguousarray(w.T)))
    assert (guard == -77.0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [*SHAPES, (390, 33, 17)])
def test_weight_gradient_goes_on_row_after_row(isa: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, w, dy = operands(m, k, n)
    kernels = _core.Kernels(isa)
    weight = kernels.weight(w)
    kernels.linear_w(x, dy, weight)
    first = gradient(isa, x, dy)
    assert same(kernels.weight_grad(weight), first)
    kernels.linear_w(x[::-1], dy[::-1], weight, accumulate=True)  # rows downwards: strides are negative
    second = gradient(isa, x[::-1], dy[::-1], first)
    assert same(kernels.weight_grad(weight), second)
    if m > (32 if isa == "amx" else 3):
        assert not same(gradient(isa, x, dy, first), second), "the order of rows does not show here"


@pytest.mark.parametrize("isa", ISAS)
def test_cutting_the_rows_of_a_weight_gradient_changes_nothing(isa: str) -> None:
    x, w, dy = operands(300, 45, 70)
    kernels = _core.Kernels(isa)
    whole, parts = kernels.weight(w), kernels.weight(w)
    kernels.linear_w(x, dy, whole)
    cuts = (0, 32, 64, 256, 300) if isa == "amx" else (0, 1, 2, 202, 300)
    for first, last in itertools.pairwise(cuts):
        kernels.linear_w(x[first:last], dy[first:last], parts, accumulate=first > 0)
    assert same(kernels.weight_grad(parts), kernels.weight_grad(whole))


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no AMX")
def test_three_bf16_are_no_worse_than_a_float() -> None:
    """Errors against float64, of the same products by AMX and by chains of FMAs: sums that cancel, and ones that do not."""
    rng = np.random.default_rng(0)
    for m, k, n in ((64, 768, 256), (40, 3072, 100), (33, 50257, 40)):
        x, w = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32)
        x *= np.exp2(rng.integers(-20, 20, (m, 1))).astype(np.float32)
        for change in (np.positive, np.abs):
            a, b = change(x), change(w)
            exact = a.astype(np.float64) @ b.astype(np.float64)
            size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
            errors = {}
            for isa in ("amx", "avx512"):
                kernels = _core.Kernels(isa)
                y = kernels.linear(a, kernels.weight(b), np.empty((m, n), np.float32))
                errors[isa] = np.abs(y - exact) / size
            assert errors["amx"].mean() < errors["avx512"].mean() and errors["amx"].max() < 1.2 * errors["avx512"].max()


@pytest.mark.parametrize("isa", ISAS)
def test_a_sum_over_a_vocabulary_keeps_its_digits(isa: str) -> None:
    """One chain over so many products is 1e-5 off, ten times what NumPy's float32 is: the head's d(input), and all below it."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((7, 50257), dtype=np.float32), rng.standard_normal((50257, 40), dtype=np.float32)
    kernels = _core.Kernels(isa)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    for y in (kernels.linear(x, kernels.weight(w), np.empty((7, 40), np.float32)),
              kernels.linear_t(x, kernels.weight(np.ascontiguousarray(w.T)), np.empty((7, 40), np.float32))):
        assert np.linalg.norm(y - exact) < 2e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_do_not_depend_on_how_many_there_are(isa: str) -> None:
    x, w, _ = operands(45, 500, 70)
    kernels = _core.Kernels(isa)
    weight = kernels.weight(w)
    y = kernels.linear(x, weight, np.empty((45, 70), np.float32))
    for first in range(0, 45, 4):
        for count in (1, 2, 7, 14, 16):
            rows = np.ascontiguousarray(x[first : first + count])
            assert same(kernels.linear(rows, weight, np.empty((len(rows), 70), np.float32)), y[first : first + count])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_change_nothing(isa: str, threads: int) -> None:
    for m, k, n in ((1, 5, 1), (50, 260, 100), (9, 33, 300), (400, 64, 40)):
        x, w, dy = operands(m, k, n)
        results = []
        for kernels in (_core.Kernels(isa), _core.Kernels(isa, threads)):
            weight = kernels.weight(w)
            kernels.linear_w(x, dy, weight)
            grad = np.ones(n, np.float32)
            kernels.bias_w(dy, grad, accumulate=True)
            y = kernels.linear(x, weight, np.empty((m, n), np.float32))
            dx = kernels.linear_t(dy, weight, np.empty((m, k), np.float32))
            results.append([kernels.weight_array(weight), y, dx, kernels.weight_grad(weight), grad])
        for one, many in zip(*results, strict=True):
            assert same(one, many)


@pytest.mark.parametrize("isa", ISAS)
def test_epilogues(isa: str) -> None:
    m, k, n = 17, 200, 45
    x, w, dy = operands(m, k, n)
    x *= np.float32(0.01)
    bias = np.random.default_rng(2).standard_normal(n, dtype=np.float32)
    kernels = _core.Kernels(isa)
    weight = kernels.weight(w)
    plain = kernels.linear(x, weight, np.empty((m, n), np.float32), bias=bias)

    y, guard = empty_like_rows(m, n)
    assert same(kernels.linear(x, weight, y, bias=bias, epilogue="residual", aux=dy), dy + plain)
    in_place = dy.copy()
    kernels.linear(x, weight, in_place, bias=bias, epilogue="residual", aux=in_place)
    assert same(in_place, dy + plain)

    aux, aux_guard = empty_like_rows(m, n)
    kernels.linear(x, weight, y, bias=bias, epilogue="gelu", aux=aux)
    assert same(aux, plain)
    assert (guard == -77.0).all() and (aux_guard == -77.0).all()
    z = plain.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)
    np.testing.assert_allclose(y, 0.5 * z * (1 + np.tanh(inner)), rtol=1e-5, atol=2e-6)

    narrow = np.random.default_rng(3).standard_normal((m, k), dtype=np.float32) * np.float32(2.0)
    dx = kernels.linear_t(dy, weight, np.empty((m, k), np.float32))
    z = narrow.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)
    slope = 0.5 * (1 + np.tanh(inner)) + 0.5 * z / np.cosh(inner) ** 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)
    fused = kernels.linear_t(dy, weight, np.empty((m, k), np.float32), epilogue="dgelu", aux=narrow)
    np.testing.assert_allclose(fused, dx * slope, rtol=1e-5, atol=1e-5 * np.abs(dx).max())
    kernels.linear_t(dy, weight, narrow, epilogue="dgelu", aux=narrow)  # y may be aux
    assert same(narrow, fused)


@pytest.mark.parametrize("isa", ISAS)
def test_the_slope_of_gelu_is_zero_or_one_far_from_zero(isa: str) -> None:
    """It was 1.0025 at 1e12, 2.5e6 at 1e15 and infinite from 1e20 on."""
    far = np.array([20.0, 1e4, 1e5, 1e8, 1e12, 1e15, 1.8e19, 1e20, 3e38, np.inf], np.float32)
    kernels = _core.Kernels(isa)

    def slope(x: np.ndarray) -> np.ndarray:
        weight = kernels.weight(np.ones((len(x), 1), np.float32))
        dy, dx = np.ones((1, 1), np.float32), np.empty((1, len(x)), np.float32)
        return kernels.linear_t(dy, weight, dx, epilogue="dgelu", aux=x[None])[0]

    assert (slope(far) == 1.0).all() and (np.abs(slope(-far)) < 1e-20).all()
    assert np.isnan(slope(np.array([np.nan], np.float32))).all()


@pytest.mark.skipif(not {"avx2", "avx512"} <= set(ISAS), reason="this processor has one vector set")
def test_vector_sets_agree_in_every_epilogue() -> None:
    x, w, dy = operands(33, 210, 77)
    results = []
    for isa in ("avx2", "avx512"):
        kernels = _core.Kernels(isa)
        weight = kernels.weight(w)
        aux = np.empty((33, 77), np.float32)
        y = kernels.linear(x, weight, np.empty((33, 77), np.float32), epilogue="gelu", aux=aux)
        results.append([y, aux, kernels.linear_t(dy, weight, np.empty((33, 210), np.float32), epilogue="dgelu", aux=x)])
    for one, other in zip(*results, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("isa", ISAS)
def test_signed_zero_and_infinity(isa: str) -> None:
    kernels = _core.Kernels(isa)
    weight = kernels.weight(np.zeros((2, 33), np.float32))
    y = kernels.linear(-np.ones((3, 2), np.float32), weight, np.empty((3, 33), np.float32))
    assert same(y, np.zeros((3, 33), np.float32))  # +0 + -0 = +0
    x = np.array([[np.inf, 1.0], [1.0, np.nan], [2.0, 3.0]], np.float32)
    y = kernels.linear(x, kernels.weight(np.ones((2, 33), np.float32)), y)
    assert (np.isnan(y[0]) if isa == "amx" else np.isinf(y[0])).all() and np.isnan(y[1]).all() and (y[2] == 5.0).all()
    for strange in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):  # NaNs that rounding to bf16 could carry over into a number
        x = np.full((3, 2), np.array(strange, np.uint32).view(np.float32))
        assert np.isnan(kernels.linear(x, kernels.weight(np.ones((2, 33), np.float32)), y)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_sums_of_nothing_are_zero(isa: str) -> None:
    kernels = _core.Kernels(isa)
    weight, bias = kernels.weight(np.empty((0, 33), np.float32)), np.arange(33, dtype=np.float32)
    y = kernels.linear(np.empty((2, 0), np.float32), weight, np.full((2, 33), 7, np.float32), bias=bias)
    assert same(y, np.stack([bias, bias]))
    weight = kernels.weight(np.empty((33, 0), np.float32))
    assert same(kernels.linear_t(np.empty((2, 0), np.float32), weight, y), np.zeros((2, 33), np.float32))
    weight = kernels.weight(np.ones((3, 33), np.float32))
    kernels.linear_w(np.ones((2, 3), np.float32), y + 1, weight)
    kernels.linear_w(np.empty((0, 3), np.float32), y[:0], weight, accumulate=True)
    assert (kernels.weight_grad(weight) == 2).all()
    kernels.linear_w(np.empty((0, 3), np.float32), y[:0], weight)
    assert same(kernels.weight_grad(weight), np.zeros((3, 33), np.float32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (64, 96), (100, 7), (5, 64), (65, 100)])
def test_weight_round_trip(isa: str, shape: tuple[int, int]) -> None:
    w = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    kernels = _core.Kernels(isa)
    weight = kernels.weight(w)
    assert same(kernels.weight_array(weight), w)
    # the transposed layout, read through an identity
    assert same(kernels.linear_t(np.eye(shape[1], dtype=np.float32), weight, np.empty(shape[::-1], np.float32)), w.T)


@pytest.mark.parametrize("isa", ISAS)
def test_bias_gradient(isa: str) -> None:
    dy = np.random.default_rng(4).standard_normal((150, 2500), dtype=np.float32)
    kernels = _core.Kernels(isa)
    expected = np.zeros(2500, np.float32)
    for row in dy:
        expected += row
    grad = np.full(2500, 9.0, np.float32)
    kernels.bias_w(dy, grad)
    assert same(grad, expected)
    for row in dy[::-1]:
        expected += row
    kernels.bias_w(dy[::-1], grad, accumulate=True)
    assert same(grad, expected)


def test_no_rows() -> None:
    kernels = _core.Kernels()
    weight = kernels.weight(np.ones((3, 40), np.float32))
    kernels.linear_w(np.ones((2, 3), np.float32), np.ones((2, 40), np.float32), weight)
    none = np.empty((0, 40), np.float32)
    assert kernels.linear(np.empty((0, 3), np.float32), weight, none).shape == (0, 40)
    kernels.linear_w(np.empty((0, 3), np.float32), none, weight, accumulate=True)
    assert (kernels.weight_grad(weight) == 2.0).all()
    kernels.linear_w(np.empty((0, 3), np.float32), none, weight)
    assert (kernels.weight_grad(weight) == 0.0).all()


def test_workspace_is_a_few_megabytes_a_thread() -> None:
    for isa in ISAS:
        assert 0 < _core.Kernels(isa, 3).workspace_bytes <= 3 * 4 * 2**20


def test_bad_arguments() -> None:
    kernels = _core.Kernels()
    weight = kernels.weight(np.ones((3, 4), np.float32))
    x, y = np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r'isa is "sse9".*portable'):
        _core.Kernels("sse9")
    with pytest.raises(tp.Error):
        _core.Kernels(threads=0)
    with pytest.raises(ValueError, match=r"x is \[2, 4\]: \[2, 3\]"):
        kernels.linear(y, weight, y)
    with pytest.raises(ValueError, match="float32"):
        kernels.linear(x.astype(np.float64), weight, y)
    with pytest.raises(ValueError, match="strides"):
        kernels.linear(np.ones((2, 6), np.float32)[:, ::2], weight, y)
    with pytest.raises(ValueError, match="aux is missing"):
        kernels.linear(x, weight, y, epilogue="gelu")
    with pytest.raises(ValueError, match='epilogue is "dgelu"'):
        kernels.linear(x, weight, y, epilogue="dgelu", aux=y)
    with pytest.raises(ValueError, match="bias has length 3"):
        kernels.linear(x, weight, y, bias=np.ones(3, np.float32))
    with pytest.raises(TypeError, match="what Kernels.weight returned"):
        kernels.linear(x, y, y)
    frozen = y.copy()
    frozen.flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        kernels.linear(x, weight, frozen)
    if len(ISAS) > 1:
        with pytest.raises(ValueError, match="packed for"):
            _core.Kernels(ISAS[-1]).linear(x, weight, y)


SMALL_STACK = """
import ctypes
libc, memory = ctypes.CDLL(None), ctypes.create_string_buffer(4096)
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
def signals_go_to(*stack):
    assert libc.sigaltstack(ctypes.byref(Stack(*stack)), None) == 0
signals_go_to(ctypes.addressof(memory), 0, 4096)
from terapipe_c import _core
refused = _core.kernel_isas()
signals_go_to(None, 2, 0)
print(*refused, "then", *_core.kernel_isas())
"""


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no AMX")
def test_amx_refused_stays_refused() -> None:
    """A thread's stack for signals is too small for tiles, and later gone: what memory was predicted for is what runs."""
    run = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True)
    without = " ".join(isa for isa in ISAS if isa != "amx")
    assert run.stdout.strip() == f"{without} then {without}", run.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_environment_chooses(isa: str) -> None:
    command = [sys.executable, "-c", "from terapipe_c import _core; print(_core.Kernels().isa)"]
    run = subprocess.run(command, env={**os.environ, "TERAPIPE_ISA": isa}, capture_output=True, text=True)
    assert run.stdout.strip() == isa
    run = subprocess.run(command, env={**os.environ, "TERAPIPE_ISA": "x87"}, capture_output=True, text=True)
    assert run.returncode != 0 and 'TERAPIPE_ISA is "x87"' in run.stderr
    model = "import terapipe_c as tp; m = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=8, block_size=8); "
    command[-1] = model + "print(tp.loss_and_grads(m, tp.init_params(m), [[0, 1, 2]])[0])"
    run = subprocess.run(command, env={**os.environ, "TERAPIPE_ISA": "x87"}, capture_output=True, text=True)
    assert run.returncode != 0 and 'InvalidValueError: TERAPIPE_ISA is "x87"' in run.stderr
