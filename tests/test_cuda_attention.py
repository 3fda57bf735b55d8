"""The CUDA attention kernels and the emulator that runs them: the kernel sources that nvcc compiles, compiled by gcc.

Attention is held against float64 NumPy, with everything poisoned that a call may not read, and for equal bits over slicings,
orders of blocks and threads, and both times at which an asynchronous copy may land.
"""

import ctypes
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_emu
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

F32, BF16 = 0, 1
MMA, WGMMA = 0, 1  # tp_attention_kernel of cuda/kernels.h
SIZE_0 = ctypes.c_size_t(0)
CHANCE = [8, 24, 40]  # orders of threads, blocks and copies by chance
POISON = 0xFF  # four bytes of it: NaN, in fp32 and in bf16


class Shape(ctypes.Structure):
    """tp_attention of csrc/backend/backend.h."""

    _fields_ = [(name, ctypes.c_int64) for name in
                ("batch", "heads", "head_dim", "slice", "context", "total", "qkv_stride", "o_stride")]  # fmt: skip


@pytest.fixture(scope="module")
def module() -> ctypes.CDLL:
    """The emulated CUDA backend."""
    library = cuda_emu.library()
    library.tp_error_message.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def cases(module: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """simt_cases.cu with an emulator of its own."""
    return cuda_emu.simt_cases(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def emu(request: pytest.FixtureRequest, module: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The library that a test is about, its threads in the usual order."""
    library = request.getfixturevalue("cases") if "floats" in request.fixturenames else module
    yield library
    library.tp_simt_set_order(0)
    module.tp_cuda_attention_force(0)


def address(array: np.ndarray, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + offset * array.itemsize)


def aligned(count: int, dtype: type) -> np.ndarray:
    """Poisoned memory on 64 bytes."""
    size = count * np.dtype(dtype).itemsize
    raw = np.full(size + 64, POISON, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size].view(dtype)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---- the emulator ------------------------------------------------------------------------------------------------------


def run_case(emu, name, fault=0, threads=128, x=None, y=None, a=None, b=None):
    """(status, message) of a kernel of simt_cases.cu."""
    pointers = [None if array is None else address(array) for array in (x, y, a, b)]
    status = emu.simt_case(name.encode(), fault, threads, *pointers)
    return status, emu.tp_error_message().decode() if status else ""


@pytest.fixture
def floats() -> tuple[np.ndarray, np.ndarray]:
    x, y = aligned(160, np.float32), aligned(160, np.float32)
    x[:] = np.arange(160)
    return x, y


@pytest.mark.parametrize("order", [*range(8), *CHANCE])
def test_a_block_meets_and_shares(emu, floats, order):
    x, y = floats
    emu.tp_simt_set_order(order)
    assert run_case(emu, "sum", x=x, y=y) == (0, "")
    assert (y[:128] == 2 * x[:128].sum()).all()


FAULTS = {
    1: "divergent barrier: it waits at tests/simt_cases.cu:.*, thread 37 has ended",
    2: "divergent barrier: it waits at tests/simt_cases.cu:.*, thread 37 waits at tests/simt_cases.cu:",
    3: "thread 32: divergent operation of a warp: it waits at .*, thread 37 waits at",
    4: "thread 63: divergent operation of a warp: it is at .*, thread 37 at",
    5: r"thread 37: wrote behind shared array \(dynamic\) \(of 512 bytes\)",
    6: r"thread 37: wrote before shared array part \(of 128 bytes\)",
    9: "thread 37: tests/simt_cases.cu:.*: address 0x.* of 16 bytes is not a multiple of 16",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found(emu, floats, fault):
    status, message = run_case(emu, "sum", fault, x=floats[0], y=floats[1])
    assert status != 0
    assert re.match(r"CUDA kernel case_sum, block \(0, 0, 0\), ", message), message
    assert re.search(FAULTS[fault], message), message
    assert run_case(emu, "sum", x=floats[0], y=floats[1]) == (0, "")  # the emulator is none the worse


def test_never_written_shared_memory_is_nan(emu, floats):
    assert run_case(emu, "sum", 7, x=floats[0], y=floats[1])[0] == 0
    assert np.isnan(floats[1][:128]).all()


def test_a_missing_barrier_shows(emu, floats):
    for order in (0, 2):
        emu.tp_simt_set_order(order)
        assert run_case(emu, "sum", 8, x=floats[0], y=floats[1])[0] == 0
        assert np.isnan(floats[1][:128]).any()


def test_what_shows_in_no_order_but_by_chance(emu, floats):
    y, found = floats[1], {}
    for order in (*range(8), *range(8, 8 + 16 * 30, 16), 8):
        emu.tp_simt_set_order(order)
        assert run_case(emu, "middle", x=floats[0], y=y) == (0, "")
        assert found.setdefault(order, y[0]) == y[0], "the same each time"
    assert all(found[order] == 1 for order in range(8)) and {0, 1} == {found[order] for order in found if order >= 8}


def test_blocks_by_chance(emu, floats):
    last = set()
    for order in (0, 1, *range(8, 8 + 16 * 30, 16)):
        emu.tp_simt_set_order(order)
        assert run_case(emu, "bounded", threads=64, x=floats[0], y=floats[1]) == (0, "")
        last.add(int(floats[1][0]))
    assert last == {0, 1, 2, 3, 4}


def test_what_a_kernel_is_compiled_for_is_held(emu, floats):
    told = "case_bounded, block (0, 0, 0), thread "
    status, message = run_case(emu, "bounded", threads=96, x=floats[0], y=floats[1])
    assert status != 0 and told in message and "in blocks of 96 threads, and is compiled for 64 at most" in message
    status, message = run_case(emu, "bounded", 1, threads=64, x=floats[0], y=floats[1])
    assert status != 0 and told in message
    assert "8192 bytes of static and 225280 of dynamic shared memory: at most 232448 in all" in message


def test_addresses_outside_every_allocation_are_found(emu, floats):
    x, y = floats
    for array in floats:
        assert emu.tp_simt_range_add(address(array), ctypes.c_size_t(128 * 4)) == 0
    try:
        assert run_case(emu, "sum", x=x, y=y) == (0, "")
        status, message = run_case(emu, "sum", 10, x=x, y=y)
        assert status != 0 and "thread 37: tests/simt_cases.cu:" in message
        assert "4 bytes at 0x" in message and "outside every allocation of the device" in message
    finally:
        for array in floats:
            emu.tp_simt_range_remove(address(array))
    assert run_case(emu, "sum", 10, x=x, y=y) == (0, "")


def test_shuffles_take_what_the_other_lane_gives(emu, floats):
    x, y = floats
    x[:] = np.random.default_rng(1).normal(size=160)
    assert run_case(emu, "shuffle", threads=64, x=x, y=y) == (0, "")
    lane = np.arange(32)
    for warp, got in ((x[:32], y[:32]), (x[32:64], y[32:64])):
        d = 1.0 / 3.0 * warp.astype(np.float64)[lane ^ 5] + warp[3]
        want = d.astype(np.float32) + warp[lane ^ 1] + warp[(lane + 1) % 32] + ((lane ^ 16) + 31).astype(np.float32)
        assert (got == want).all()


@pytest.mark.parametrize("threads", [0, 31, 48, 1056])
def test_a_launch_that_no_gpu_takes_is_refused(emu, floats, threads):
    status, message = run_case(emu, "sum", threads=threads, x=floats[0], y=floats[1])
    assert status != 0 and f"CUDA kernel case_sum: a grid of 2 x 1 x 1 blocks of {threads} threads" in message


@pytest.mark.parametrize("order", [0, 2, 4, 6, *CHANCE])
@pytest.mark.parametrize("transposed", [0, 1])
def test_matrix_fragments_give_the_plain_product(emu, floats, order, transposed):
    rng = np.random.default_rng(2)
    a, b, y = aligned(256, np.uint16), aligned(128, np.uint16), aligned(128, np.float32)
    a[:], b[:] = to_bf16(rng.normal(size=256)), to_bf16(rng.normal(size=128))
    emu.tp_simt_set_order(order)
    assert run_case(emu, "mma", transposed, 32, y=y, a=a, b=b) == (0, "")
    left, right = from_bf16(a).reshape(16, 16), from_bf16(b)
    right = right.reshape(8, 16).T if transposed else right.reshape(16, 8)
    np.testing.assert_allclose(y.reshape(16, 8), left.astype(np.float64) @ right, rtol=1e-5, atol=1e-6)


def test_a_missing_wait_shows(emu, floats):
    a, b, y = aligned(256, np.uint16), aligned(128, np.uint16), aligned(128, np.float32)
    a[:] = b[:] = to_bf16(np.ones(1))[0]
    assert run_case(emu, "mma", 2, 32, y=y, a=a, b=b) == (0, "") and np.isnan(y).all()
    status, message = run_case(emu, "mma", 3, 32, y=y, a=a, b=b)
    assert status != 0 and "thread 0: the block ends, and nobody has waited for an asynchronous copy of its" in message
    emu.tp_simt_set_order(4)
    assert run_case(emu, "mma", 2, 32, y=y, a=a, b=b) == (0, "") and (y == 16).all()


# ---- attention ---------------------------------------------------------------------------------------------------------


def oracle(qkv, d_o):
    """float64: qkv [T, B, 3, H, D], d_o [T, B, H, D] -> o, lse [B, H, T], delta [B, H, T], dqkv.
    By einsum, which calls no BLAS: its threads would spin longer than these products take."""
    T, D = qkv.shape[0], qkv.shape[-1]
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = np.where(np.tril(np.ones((T, T), bool)), np.einsum("qbhd,kbhd->bhqk", q, k) / np.sqrt(D), -np.inf)
    top = scores.max(-1, keepdims=True)
    prob = np.exp(scores - top)
    total = prob.sum(-1, keepdims=True)
    prob /= total
    o = np.einsum("bhqk,kbhd->qbhd", prob, v)
    delta = (d_o * o).sum(-1).transpose(1, 2, 0)
    ds = prob * (np.einsum("qbhd,kbhd->bhqk", d_o, v) - delta[..., None]) / np.sqrt(D)
    grads = [np.einsum("bhqk,kbhd->qbhd", ds, k), np.einsum("bhqk,qbhd->kbhd", ds, q), np.einsum("bhqk,qbhd->kbhd", prob, d_o)]
    return o, (top + np.log(total))[..., 0], delta, np.stack(grads, axis=2)


class Attention:
    """One sequence batch in device memory: rows of qkv [3][H][D] and o [H][D] with gaps behind, all poisoned at first."""

    def __init__(self, emu, dtype, B, H, D, T, gap=0, seed=0, kernel=MMA):
        self.emu, self.dtype, self.kernel, self.shape, self.gap = emu, dtype, kernel, (B, H, D, T), gap
        rng = np.random.default_rng(seed)
        np_type, self.encode, self.decode = (np.uint16, to_bf16, from_bf16) if dtype == BF16 else (
            np.float32, lambda x: np.asarray(x, np.float32), lambda x: x)  # fmt: skip
        self.width = 3 * H * D + gap, H * D + gap
        make = lambda width: aligned(T * B * width, np_type).reshape(T, B, width)  # noqa: E731
        self.qkv, self.dqkv, self.o, self.d_o = (make(self.width[i]) for i in (0, 0, 1, 1))
        self.lse, self.delta = (aligned(B * H * T, np.float32).reshape(B, H, T) for _ in range(2))
        self.given = self.encode(rng.normal(size=(T, B, 3 * H * D))), self.encode(rng.normal(size=(T, B, H * D)))
        self.kept = aligned(0, np.uint8)  # what the backward may overwrite

    def outputs(self):
        B, H, D, T = self.shape
        o = self.decode(np.ascontiguousarray(self.o[..., : H * D])).reshape(T, B, H, D)
        grads = self.decode(np.ascontiguousarray(self.dqkv[..., : 3 * H * D])).reshape(T, B, 3, H, D)
        return {"o": o, "lse": self.lse, "delta": self.delta, "dq": grads[:, :, 0], "dk": grads[:, :, 1],
                "dv": grads[:, :, 2]}  # fmt: skip

    def wanted(self):
        B, H, D, T = self.shape
        qkv, d_o = (self.decode(x).astype(np.float64) for x in self.given)
        o, lse, delta, grads = oracle(qkv.reshape(T, B, 3, H, D), d_o.reshape(T, B, H, D))
        return {"o": o, "lse": lse, "delta": delta, "dq": grads[:, :, 0], "dk": grads[:, :, 1], "dv": grads[:, :, 2]}

    def bits(self):
        return {name: array.tobytes() for name, array in vars(self).items() if name in ("o", "lse", "delta", "dqkv")}

    def call(self, name, rows, context, *arrays):
        B, H, D, T = self.shape
        shape = Shape(B, H, D, rows, context, T, *self.width)
        call = getattr(self.emu, f"tp_cuda_attention_{name}")
        status = call(None, self.dtype, self.kernel, 132, ctypes.byref(shape), *arrays)
        assert status == 0, self.emu.tp_error_message()

    def run(self, slices):
        """Forward and backward; at each call only what the contract lets it read is there."""
        B, H, D, T = self.shape
        E, at, poison = H * D, 0, self.encode(np.nan)
        q, k, v = (address(self.qkv, i * E) for i in range(3))
        for rows in slices:
            self.qkv[at : at + rows, :, : 3 * E] = self.given[0][at : at + rows]
            self.qkv[:at, :, :E] = poison  # queries of earlier rows
            self.call("forward", rows, at, q, k, v, address(self.o), address(self.lse))
            self.qkv[:at, :, :E] = self.given[0][:at, :, :E]
            at += rows
            assert np.isnan(self.lse[..., at:]).all() and np.isnan(self.decode(self.o[at:].ravel())).all()
        o, lse = self.o.copy(), self.lse.copy()
        self.lse[:], self.o[:], self.qkv[:, :, :E] = np.nan, poison, poison
        grads = [address(self.dqkv, i * E) for i in range(3)]
        for rows in reversed(slices):
            last, at = at, at - rows
            self.qkv[last:, :, E : 3 * E] = poison  # keys and values of later rows
            self.qkv[at:last, :, :E] = self.given[0][at:last, :, :E]
            self.d_o[at:last, :, :E] = self.given[1][at:last]
            self.o[at:last], self.lse[..., at:last] = o[at:last], lse[..., at:last]
            self.call("backward", rows, at, q, k, v, address(self.o), address(self.d_o), address(self.lse),
                      address(self.delta), *grads, address(self.kept), ctypes.c_size_t(self.kept.nbytes))  # fmt: skip
            self.o[at:last] = poison  # of later rows, o is not read
            assert np.isnan(self.delta[..., :at]).all() and np.isnan(self.decode(self.dqkv[:at].ravel())).all()
        self.o = o
        return self


SHAPES = [  # B, H, D, slices, elements between rows
    (1, 1, 64, [1, 1, 62, 1], 0),
    (2, 2, 40, [70, 5, 125], 8),
    (1, 2, 128, [33, 64, 53], 0),
    (2, 1, 80, [150], 24),
    (1, 3, 8, [100, 30], 0),
    (3, 1, 16, [7, 80], 8),
    (1, 5, 16, [100, 60], 0),  # heads in two groups of three
]


@pytest.mark.parametrize("groups, dtype, bound", [(1, BF16, 3e-3), (2, BF16, 3e-3), (0, F32, 1e-5)])
@pytest.mark.parametrize("B, H, D, slices, gap", SHAPES)
def test_attention_agrees_with_float64(emu, groups, dtype, bound, B, H, D, slices, gap):
    emu.tp_cuda_attention_force(groups)
    run = Attention(emu, dtype, B, H, D, sum(slices), gap).run(slices)
    wanted = run.wanted()
    for name, got in run.outputs().items():
        error = np.linalg.norm(got - wanted[name]) / np.linalg.norm(wanted[name])
        assert error <= (1e-5 if name == "lse" else bound), f"{name}: {error:.2e}"
    for array in (run.o[..., H * D :], run.dqkv[..., 3 * H * D :]):
        assert np.isnan(run.decode(np.ascontiguousarray(array))).all(), "written between rows"


@pytest.mark.parametrize("T, D", [(2, 64), (3, 40), (16, 16), (17, 128)])
def test_rows_that_see_few_keys_agree_with_float64(emu, T, D):
    """The terms of their dS nearly cancel: of a delta from o as bf16 has it, dQ would be 4e-3 off, and 1e-2 in a fifth of heads."""
    run = Attention(emu, BF16, 96 // T, 2, D, T).run([1, T - 1])
    wanted, got = run.wanted(), run.outputs()
    for name in ("dq", "dk", "dv"):
        off = np.linalg.norm(got[name] - wanted[name], axis=(0, 3)), np.linalg.norm(wanted[name], axis=(0, 3))
        assert np.linalg.norm(off[0]) <= 3e-3 * np.linalg.norm(off[1]), name
        # of one head what two roundings to bf16 can cost, of dS and of the sum
        assert (off[0] <= 2 * 2**-8 * off[1]).all(), name
    few = (slice(None), slice(None), slice(0, 16))
    assert np.linalg.norm((got["delta"] - wanted["delta"])[few]) <= 1e-6 * np.linalg.norm(wanted["delta"][few])


@pytest.mark.parametrize("D", [24, 33, 101, 127])
def test_fp32_takes_any_head_dimension(emu, D):
    run = Attention(emu, F32, 1, 2, D, 70, gap=3).run([21, 49])
    wanted = run.wanted()
    for name, got in run.outputs().items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, D", [(BF16, 64), (BF16, 72), (F32, 20)])
def test_no_slicing_tile_or_order_shows_in_the_bits(emu, dtype, D):
    want = Attention(emu, dtype, 1, 1, D, 160).run([160]).bits()
    for groups in (1, 2) if dtype == BF16 else (0,):
        emu.tp_cuda_attention_force(groups)
        for slices in ([160], [64, 64, 32], [64, 96], [100, 60], [1, 62, 2, 95]):
            assert Attention(emu, dtype, 1, 1, D, 160).run(slices).bits() == want, (groups, slices)
        for order in (1, 2, 4, 7, CHANCE[0]):
            emu.tp_simt_set_order(order)
            assert Attention(emu, dtype, 1, 1, D, 160).run([130, 30]).bits() == want, (groups, order)
        emu.tp_simt_set_order(0)


@pytest.mark.parametrize("D", [64, 72])
def test_queries_are_taken_in_tiles_of_absolute_multiples(emu, D):
    """Large products that cancel, of neighbouring queries: what was summed before keeps its last bits where both lie in the same
    sixteen, and loses them where they do not, so that dV shows where the sixteens begin."""

    def run(slices):
        one = Attention(emu, BF16, 1, 1, D, 160)
        qkv, d_o = (from_bf16(x).copy() for x in one.given)
        qkv[:, :, :D] = 0.0  # all keys weigh the same
        weight = from_bf16(to_bf16(1.0 / np.arange(1.0, 161.0)))
        for t in (*range(15, 159, 16), *range(23, 159, 16)):
            d_o[t], d_o[t + 1] = 2.0**20 * weight[t + 1], -(2.0**20) * weight[t]
        one.given = to_bf16(qkv), to_bf16(d_o)
        return one.run(slices).bits()

    want = run([160])
    for groups, slices in itertools.product((1, 2), ([100, 60], [1, 62, 2, 95], [130, 30])):
        emu.tp_cuda_attention_force(groups)
        assert run(slices) == want, (groups, slices)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_a_later_token_changes_no_earlier_row(emu, dtype):
    first = Attention(emu, dtype, 1, 1, 64, 130)
    other = Attention(emu, dtype, 1, 1, 64, 130)
    other.given[0][100:] = other.encode(np.random.default_rng(5).normal(size=other.given[0][100:].shape))
    a, b = first.run([130]).outputs(), other.run([130]).outputs()
    assert (a["o"][:100] == b["o"][:100]).all() and (a["o"][100:] != b["o"][100:]).any()


def test_large_scores_overflow_nowhere(emu):
    """Scores of +-1e4: the softmax is one-hot; nothing becomes inf or NaN."""
    for dtype in (BF16, F32):
        run = Attention(emu, dtype, 1, 1, 64, 80)
        run.given = run.encode(1e2 * run.decode(run.given[0])), run.given[1]
        for name, got in run.run([50, 30]).outputs().items():
            assert np.isfinite(got).all(), name


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_scores_from_which_p_is_not_to_be_had_back_are_nan(emu, dtype):
    """In single queries, forward and backward; just below, where P is off by a quarter at most, they are numbers."""
    run = Attention(emu, dtype, 1, 1, 64, 80)
    numbers = run.decode(run.given[0]).copy()
    numbers[..., :128] = 0.0
    numbers[..., 64] = 1.0
    for query, score in ((30, 2.0**22), (40, -(2.0**30)), (50, 2.0**21), (60, -4e37)):
        numbers[query, 0, 0] = 8 * score
    run.given = run.encode(numbers), run.given[1]
    got = run.run([45, 35]).outputs()
    rows = [30, 40, 60]
    assert np.isnan(got["o"][rows]).all() and np.isnan(got["lse"][0, 0, rows]).all() and np.isnan(got["dq"][rows]).all()
    assert np.isnan(got["dk"][:61]).all() and np.isnan(got["dv"][:61]).all()
    rows = [at for at in range(80) if at not in rows]
    assert all(np.isfinite(got[name][rows]).all() for name in ("o", "dq")) and np.isfinite(got["lse"][0, 0, rows]).all()
    assert np.isfinite(got["dk"][61:]).all() and np.isfinite(got["dv"][61:]).all()


def run_in_its_arrays(emu, run, slices):
    """Every address checked against the arrays' exact ranges."""
    arrays = [run.qkv, run.dqkv, run.o, run.d_o, run.lse, run.delta, *([run.kept] if run.kept.nbytes else [])]
    try:
        for array in arrays:
            assert emu.tp_simt_range_add(address(array), ctypes.c_size_t(array.nbytes)) == 0
        run.run(slices)
    finally:
        for array in arrays:
            emu.tp_simt_range_remove(address(array))


def test_the_kernels_stay_in_their_arrays(emu):
    for groups, dtype in ((1, BF16), (2, BF16), (0, F32)):
        emu.tp_cuda_attention_force(groups)
        run = Attention(emu, dtype, 1, 2, 72 if groups == 1 else 56, 137)
        run_in_its_arrays(emu, run, [70, 67])


@pytest.mark.parametrize("groups, dim, name", [(1, 64, "attention_forward_64_1"), (2, 40, "attention_forward_64_2"),
                                               (0, 128, "attention_forward_128_1")])  # fmt: skip
def test_an_error_names_the_kernel(emu, groups, dim, name):
    """Which of those that one body makes."""
    emu.tp_cuda_attention_force(groups)
    shape, memory = Shape(1, 1, dim, 8, 0, 8, 3 * dim, dim), aligned(8 * 3 * dim, np.uint16)
    assert emu.tp_simt_range_add(address(memory), ctypes.c_size_t(16)) == 0
    try:
        assert emu.tp_cuda_attention_forward(None, BF16, MMA, 132, ctypes.byref(shape), *[address(memory)] * 5) != 0
    finally:
        emu.tp_simt_range_remove(address(memory))
        emu.tp_cuda_attention_force(0)
    assert f"CUDA kernel {name}, block" in emu.tp_error_message().decode()


BAD = [
    (BF16, {"head_dim": 36}, "head_dim is 36; bf16 needs a multiple of 8 up to 128"),
    (F32, {"head_dim": 129}, "head_dim is 129"),
    (BF16, {"qkv_stride": 388}, "rows are 388 and 128 elements apart"),
    (BF16, {"o_stride": 120}, "at least heads x head_dim = 128 is needed"),
    (F32, {"slice": 0}, "counts are at least 1"),
    (F32, {"context": 9}, "slice 8 after 9 of 16 tokens"),
    (F32, {"batch": 0}, "attention of 0 sequences"),
    (F32, {"total": 2_097_121}, "and 2097120 tokens"),
    (BF16, {"total": 4_194_241}, "and 4194240 tokens"),
]


@pytest.mark.parametrize("dtype, change, text", BAD)
def test_bad_shapes_are_refused(emu, dtype, change, text):
    shape = Shape(1, 2, 64, 8, 8, 16, 384, 128)
    for name, value in change.items():
        setattr(shape, name, value)
    memory = address(aligned(64, np.float32))
    assert emu.tp_cuda_attention_forward(None, dtype, MMA, 132, ctypes.byref(shape), *[memory] * 5) != 0
    assert text in emu.tp_error_message().decode()
    assert emu.tp_cuda_attention_backward(None, dtype, MMA, 132, ctypes.byref(shape), *[memory] * 10, None, SIZE_0) != 0


def test_bad_pointers_are_refused(emu):
    shape, memory = Shape(1, 2, 64, 8, 8, 16, 384, 128), aligned(64, np.float32)
    good, odd = address(memory), address(memory, 1)
    assert emu.tp_cuda_attention_forward(None, BF16, MMA, 132, ctypes.byref(shape), good, odd, good, good, good) != 0
    assert "attention on CUDA: k is at 0x" in emu.tp_error_message().decode()
    assert emu.tp_cuda_attention_backward(None, F32, MMA, 132, ctypes.byref(shape), *[good] * 9, None, None, SIZE_0) != 0
    assert "dv is at" in emu.tp_error_message().decode()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
