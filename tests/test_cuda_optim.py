"""The optimizer's kernels (cuda/optim.cu) as test_cuda_rows.py has the others: run by the host's emulator, or on a device, against
float64, and to the bit where a list of tensors is held against one alone."""

# ruff: noqa: F811 (the fixtures' names)

import functools
import math
from typing import Any

import numpy as np
from cuda_launchers import F32, Kernels, adamw_args, numbers, of, sums_of_squares, update
from test_cuda_rows import DTYPES, close, k, kernels  # noqa: F401

LEAF = 16384  # elements


def pairs(sums: np.ndarray) -> float:
    """Of 256, whose distance halves."""
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return float(sums[0])


def sum_of_squares(x: np.ndarray) -> float:
    """In the order of optim.cu: of a leaf four chains a thread, then of leaves one. A square of a float is exact."""
    padded = np.zeros(-(-x.size // LEAF) * LEAF)
    padded[: x.size] = numbers(x) ** 2
    leaves = []
    for leaf in padded.reshape(-1, 16, 256, 4):
        chain = functools.reduce(np.add, leaf)
        leaves.append(pairs((chain[:, 0] + chain[:, 2]) + (chain[:, 1] + chain[:, 3])))
    turns = np.zeros((-(-max(len(leaves), 1) // 256), 256))
    turns.reshape(-1)[: len(leaves)] = leaves
    return pairs(functools.reduce(np.add, turns))


def test_sumsq(k: Kernels) -> None:
    rng = np.random.default_rng(8)
    for n in (0, 1, 7, 64, 1000, 16384, 16385, 100003):
        x = k.put(rng.normal(size=n).astype(np.float32))
        assert math.isclose(sums_of_squares(k, x)[0], math.fsum(numbers(x) ** 2), rel_tol=1e-14, abs_tol=0)
        k.clear()
    x = k.put(np.array([1, np.nan, 3], np.float32))
    assert np.isnan(sums_of_squares(k, x)[0])
    x[1] = 3e38
    assert sums_of_squares(k, x)[0] > 8e76, "squares of large numbers stay finite"


def test_the_sums_of_a_list_are_each_that_of_its_tensor_alone(k: Kernels) -> None:
    """To the bit as optim.cu says, whatever stands beside it and wherever it begins; one of no elements has no leaf."""
    rng = np.random.default_rng(13)
    sizes = [1, LEAF, 0, LEAF + 1, 0, 2, LEAF - 1, *rng.integers(1, 3 * LEAF, 3).tolist(), 0]
    x = [k.put((rng.normal(size=n) * 10.0 ** rng.integers(-9, 9)).astype(np.float32), i % 3) for i, n in enumerate(sizes)]
    got = sums_of_squares(k, *x)
    assert got.tobytes() == np.array([sum_of_squares(a) for a in x]).tobytes()
    assert got.tobytes() == np.concatenate([sums_of_squares(k, a) for a in x]).tobytes()
    assert sums_of_squares(k).size == 0


def test_a_tensor_of_more_leaves_than_threads(k: Kernels) -> None:
    x = k.put(np.random.default_rng(14).normal(size=258 * LEAF + 5).astype(np.float32))
    assert sums_of_squares(k, x[:7], x[1:])[1] == sum_of_squares(x[1:])


@DTYPES
def test_adamw(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(9)
    for i, n in enumerate((1, 7, 8, 1000, 16 * 1024 + 3)):
        p, g, m = (rng.normal(size=n) for _ in range(3))
        v = rng.random(n)
        state = [k.put(x.astype(np.float32), i % 2) for x in (p, g, m, v)]
        p, g, m, v = map(numbers, state)
        copy = k.empty(dtype, n)
        beta1, beta2, lr, eps, decay, scale = 0.9, 0.99999, 1e-2, 1e-8, 0.1, 0.5  # no float is either beta
        args = adamw_args(beta1, beta2, lr, eps, decay, 1 - beta1**3, 1 - beta2**3, scale)
        twin = [x.copy() for x in state]
        update(k, dtype, args, (state[1], state[0], *state[2:], copy, 1))
        m = beta1 * m + (1 - beta1) * scale * g
        v = beta2 * v + (1 - beta2) * (scale * g) ** 2
        p = p - lr * (m / (1 - beta1**3) / (np.sqrt(v / (1 - beta2**3)) + eps) + decay * p)
        for got, want in zip(state, (p, g, m, v), strict=True):
            close(got, want, 1e-6)
        assert copy.tobytes() == of(dtype, state[0]).tobytes()
        other = [k.put(x) for x in twin]  # arguments from device memory, no copy
        update(k, dtype, k.put(args), (other[1], other[0], *other[2:], None, 1), on_device=True)
        assert [x.tobytes() for x in other] == [x.tobytes() for x in state]
        k.clear()


def test_adamw_lets_moments_vanish_and_shows_nan(k: Kernels) -> None:
    """Moments too small for a normal number become zero (csrc/cpu/optim.c); NaN does not."""
    p, g, m, v, copy = (k.put(np.array(x, np.float32)) for x in
                        ([1, 1, 1], [0, np.nan, 0], [1e-39, 0, 0], [1e-39, 0, np.nan], [9, 9, 9]))  # fmt: skip
    args = adamw_args(0.9, 0.95, 0.1, 1e-8, 0, 0.5, 0.5, 1)
    update(k, F32, args, (g, p, m, v, copy, 1))
    assert p[0] == 1 and m[0] == 0 and v[0] == 0
    assert np.isnan(p[1:]).all() and np.isnan(copy[1:]).all() and np.isnan(m[1]) and np.isnan(v[1:]).all()


def test_moments_fade_by_the_beta_and_not_by_the_nearest_float(k: Kernels) -> None:
    """300 steps without a gradient: 0.9998f would leave 8e-6 more."""
    p, g, m, v = (k.put(x.astype(np.float32)) for x in (np.ones(64), np.zeros(64), np.linspace(1, 2, 64), np.linspace(1, 2, 64)))
    args = adamw_args(0.9998, 0.9998, 0.0, 1e-8, 0.0, 0.5, 0.5, 1.0)
    listed = k.tensors((g, p, m, v, None, 1))
    for _ in range(300):
        k("adamw", F32, listed, int(listed["tensor"][0]), args, None)
    for moment in (m, v):
        assert abs((moment / np.linspace(1, 2, 64) / 0.9998**300 - 1).mean()) <= 2e-6


@DTYPES
def test_adamw_from_another_version_and_without_an_update(k: Kernels, dtype: int) -> None:
    rng = np.random.default_rng(10)
    for i, n in enumerate((7, 1000)):
        p, g, m, v = (k.put(np.abs(rng.normal(size=n)).astype(np.float32), i % 2) for _ in range(4))
        before, args = [x.copy() for x in (p, g, m, v)], adamw_args(0.9, 0.95, 1e-2, 1e-8, 0.1, 0.5, 0.5, 1)
        new, copy, again = k.put(np.full(n, np.nan, np.float32), i % 2), k.empty(dtype, n), k.put(before[0])
        update(k, dtype, args, (g, new, m, v, copy, 1), before=[(g, p, m, v, copy, 1)])
        update(k, dtype, args, (g, again, *(k.put(x) for x in before[2:]), None, 1))
        assert p.tobytes() == before[0].tobytes() and new.tobytes() == again.tobytes() != p.tobytes()
        moments, args = [x.copy() for x in (m, v)], adamw_args(0.9, 0.95, 1e-2, 1e-8, 0.1, 0.5, 0.5, np.nan)
        update(k, dtype, k.put(args), (g, new, m, v, copy, 1), before=[(g, p, m, v, copy, 1)], on_device=True)
        assert new.tobytes() == p.tobytes() and copy.tobytes() == of(dtype, p).tobytes()
        assert [x.tobytes() for x in (m, v)] == [x.tobytes() for x in moments]
        k.clear()


@DTYPES
def test_a_list_is_updated_as_its_tensors_one_by_one(k: Kernels, dtype: int) -> None:
    """The same bits, of parts and leaves that are whole and that are not, on 16 bytes or not; decay where it is meant."""
    rng, args = np.random.default_rng(15), adamw_args(0.9, 0.95, 1e-2, 1e-8, 0.1, 0.5, 0.5, 0.7)
    sizes = [1, 4096, 0, 4104, 8200, LEAF, LEAF + 1, 0, int(rng.integers(LEAF, 3 * LEAF)), 2 * LEAF + 16]
    states = [[np.abs(rng.normal(size=n)).astype(np.float32) for _ in range(4)] for n in sizes]

    def rows(shift: int) -> list[tuple[Any, ...]]:
        copies = [k.empty(dtype, n, offset=shift * i % 3) if i % 3 else None for i, n in enumerate(sizes)]
        return [(*(k.put(x, shift * (i + j) % 4) for j, x in enumerate(state)), copies[i], i % 2) for i, state in enumerate(states)]

    together, apart, aligned = rows(1), rows(1), rows(0)
    update(k, dtype, args, *together)
    update(k, dtype, k.put(args), *aligned, on_device=True)
    for i, (one, other, third) in enumerate(zip(together, apart, aligned, strict=True)):
        if i % 2:
            update(k, dtype, args, other)
        else:  # no decay at all
            update(k, dtype, adamw_args(0.9, 0.95, 1e-2, 1e-8, 0.0, 0.5, 0.5, 0.7), (*other[:5], 1))
        for a, b, c in zip(one[:5], other[:5], third[:5], strict=True):
            assert a is None or a.tobytes() == b.tobytes() == c.tobytes()
        assert one[0].tobytes() == states[i][0].tobytes() and not (sizes[i] and (one[1] == states[i][1]).all())
    k("adamw", dtype, k.tensors(), None, args, None)


GIVEN = np.dtype([("betas", np.float64, 2), ("others", np.float32, 6)])  # adamw_args
CLIPPED = np.dtype([("args", GIVEN), ("norm2", np.float64), ("refused", np.int32), ("_", np.int32)])


def test_clip(k: Kernels) -> None:
    """What an update is told: the scale, squares so far; nothing from the first norm on that is wrong."""
    rng, args, others = np.random.default_rng(12), adamw_args(*range(1, 9)), range(3, 9)
    for n in (1, 7, 256, 1000):
        squares, out = k.put(np.full(n, np.nan)), k.put(np.full(1, 255, np.uint8).repeat(CLIPPED.itemsize).view(CLIPPED))
        total = np.zeros(n)
        for micro, (grad_clip, spoilt) in enumerate(((0.5, 0), (0.0, 0), (1e9, 0), (0.5, np.inf), (0.5, 0))):
            sums = rng.random(n)
            sums[n // 2] += spoilt
            total += sums
            k("clip", n, micro, k.put(sums), squares, grad_clip, args, out)
            told, norm = out[0], math.sqrt(math.fsum(sums))
            scale = np.nan if micro >= 3 else np.float32(0.5 / (norm + 1e-6)) if grad_clip == 0.5 < norm else 1.0
            assert np.allclose(told["args"]["others"], [*others[:5], scale], rtol=1e-6, equal_nan=True)
            assert told["args"]["betas"].tolist() == [1, 2]
            assert told["refused"] == (4 if micro >= 3 else 0) and np.allclose(squares, total, rtol=1e-14)
            assert np.isinf(told["norm2"]) if micro >= 3 else math.isclose(told["norm2"], norm**2, rel_tol=1e-14)
        k("clip", n, 0, k.put(np.ones(n)), squares, 0.0, args, out)     # the next step
        assert out[0]["refused"] == 0 and out[0]["args"]["others"][5] == 1 and (squares == 1).all()
        k("clip", n, 0, k.put(np.full(n, 1e-16 / n)), squares, 1e-8, args, out)     # to the norm that it has, and 1e-6
        assert math.isclose(out[0]["args"]["others"][5], 1e-8 / (1e-8 + 1e-6), rel_tol=1e-6)
        k.clear()
