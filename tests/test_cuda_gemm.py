"""The products of cuda/gemm.c, over the emulated cublasLt of cuda/emu/dl_cublaslt.c: what is asked of the library (which
matrix is which, strides, epilogues) is the code that a GPU runs; the loops that answer are the test's stand-in."""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import terapipe_c as tp

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
    pytest.skip("no CUDA sources beside the tests, or no gcc", allow_module_level=True)

import cuda_emu  # noqa: E402

LINEAR, LINEAR_T, LINEAR_W = range(3)
NONE, BIAS, GELU_AUX, RESIDUAL, DGELU = range(5)
F32, BF16 = 0, 1
NO_GELU_AUX, NO_DGELU, NO_PRODUCT, NO_FIRST_ALGORITHM, INVALID, SPLITS, LATE_PIN, WRONG_GELU = 1, 2, 4, 8, 16, 128, 256, 512
NO_BIAS = 2048
TOLERANCE = {F32: 1e-5, BF16: 6e-3}


@pytest.fixture(scope="module")
def cuda():
    module = cuda_emu.emulated()
    module.emu_machine(major=8)  # an Ampere's workspace: less to allocate
    yield module
    module.emu_machine()


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def each(request):
    """The emulated module, then a GPU's where there is one."""
    return tp.cuda.load() if request.param == "gpu" else request.getfixturevalue("cuda")


@pytest.fixture
def refuse():
    yield cuda_emu.library().tp_emu_set_cublaslt
    cuda_emu.library().tp_emu_set_cublaslt(0)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def of(dtype: int, x: np.ndarray) -> np.ndarray:
    return to_bf16(x) if dtype == BF16 else np.ascontiguousarray(x, np.float32)


def numbers(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if x.dtype == np.uint16 else x.astype(np.float64)


def gelu(h: np.ndarray) -> np.ndarray:
    return 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))


def dgelu(h: np.ndarray) -> np.ndarray:
    t = np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))
    return 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * h**2)


class Case:
    """One product: random operands in matrices with gaps, and what float64 makes of them."""

    def __init__(self, kind, dtype, epilogue, rows, n_in, n_out, gap=0, accumulate=0, seed=0):
        random = np.random.default_rng(seed)
        self.kind, self.dtype, self.epilogue, self.accumulate = kind, dtype, epilogue, accumulate
        self.rows, self.n_in, self.n_out, self.gap = rows, n_in, n_out, gap
        self.height, self.width = (n_in if kind == LINEAR_W else rows), (n_in if kind == LINEAR_T else n_out)

        def matrix(height, width, dtype=dtype, gap=gap):
            return of(dtype, random.standard_normal((height, width + gap)))

        self.x = matrix(rows, n_out if kind == LINEAR_T else n_in)
        self.w = matrix(rows if kind == LINEAR_W else n_in, n_out)
        self.y = matrix(self.height, self.width, F32 if kind == LINEAR_W else dtype)
        self.bias = of(dtype, random.standard_normal(n_out)) if epilogue in (BIAS, GELU_AUX, RESIDUAL) else None
        self.aux = matrix(rows, self.width) if epilogue >= GELU_AUX else None
        self.before, self.aux_before = self.y.copy(), None if self.aux is None else self.aux.copy()

    def expected(self):
        """(y, aux) in float64."""
        cut = lambda m, width: numbers(m)[:, :width]  # noqa: E731
        x = cut(self.x, self.n_out if self.kind == LINEAR_T else self.n_in)
        w = cut(self.w, self.n_out)
        aux = None if self.aux_before is None else cut(self.aux_before, self.width)
        if self.kind == LINEAR_W:
            return x.T @ w + (cut(self.before, self.width) if self.accumulate else 0), None
        y = x @ w if self.kind == LINEAR else x @ w.T
        if self.bias is not None:
            y = y + numbers(self.bias)
        if self.epilogue == GELU_AUX:
            return gelu(y), y
        if self.epilogue == RESIDUAL:
            return y + aux, aux
        return (y * dgelu(aux), aux) if self.epilogue == DGELU else (y, None)

    def run(self, module, **options):
        aux_stride = 0 if self.aux is None else self.aux.shape[1]
        return module.gemm(self.kind, self.dtype, self.epilogue, self.accumulate, self.rows, self.n_in, self.n_out,
                           self.x, self.x.shape[1], self.w, self.w.shape[1], self.y, self.y.shape[1], bias=self.bias,
                           aux=self.aux, aux_stride=aux_stride, **options)  # fmt: skip

    def check(self):
        y, aux = self.expected()
        tolerance = TOLERANCE[F32 if self.kind == LINEAR_W else self.dtype]
        found = numbers(self.y)
        scale = np.abs(y).max()
        assert np.abs(found[:, : self.width] - y).max() <= tolerance * scale
        if self.epilogue == GELU_AUX:
            assert np.abs(numbers(self.aux)[:, : self.width] - aux).max() <= tolerance * np.abs(aux).max()
        elif self.aux is not None:
            np.testing.assert_array_equal(self.aux, self.aux_before)
        np.testing.assert_array_equal(self.y[:, self.width :], self.before[:, self.width :])  # gaps are left alone


ALL = [(LINEAR, e) for e in (NONE, BIAS, GELU_AUX, RESIDUAL)] + [(LINEAR_T, NONE), (LINEAR_T, DGELU), (LINEAR_W, NONE)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("kind", "epilogue"), ALL)
def test_every_product_against_float64(each, dtype, kind, epilogue):
    for (rows, n_in, n_out), gap in itertools.product([(1, 8, 24), (33, 40, 16), (5, 24, 72)], [0, 8]):
        for accumulate in (0, 1) if kind == LINEAR_W else (0,):
            case = Case(kind, dtype, epilogue, rows, n_in, n_out, gap, accumulate, seed=rows)
            try:
                text = case.run(each)
            except ValueError as refused:  # what is fused is the library's business on a GPU, and what is not has no gaps
                assert each is not cuda_emu.emulated() and gap and epilogue in (GELU_AUX, DGELU), refused
                assert "takes rows without gaps" in str(refused)
                continue
            case.check()
            if each is cuda_emu.emulated():
                assert ("GELU fused" in text) == (epilogue in (GELU_AUX, DGELU))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("kind", "epilogue", "switch"), [(LINEAR, GELU_AUX, NO_GELU_AUX), (LINEAR_T, DGELU, NO_DGELU)])
def test_gelu_apart_where_it_cannot_be_fused(cuda, refuse, dtype, kind, epilogue, switch):
    # the library says no, in either way; the caller does; aux has rows of 20
    for refused, fuse, width in ((switch, 0, 24), (switch | INVALID, 0, 24), (0, 1, 24), (0, 0, 20)):
        refuse(refused)
        case = Case(kind, dtype, epilogue, 9, width if kind == LINEAR_T else 16, width if kind == LINEAR else 16)
        assert "GELU apart" in case.run(cuda, fuse=fuse)
        case.check()


@pytest.mark.parametrize("epilogue", [BIAS, GELU_AUX, RESIDUAL])
@pytest.mark.parametrize("refused", [NO_BIAS, NO_BIAS | NO_GELU_AUX, NO_BIAS | NO_GELU_AUX | INVALID])
def test_a_bias_apart_where_no_product_adds_it(cuda, refuse, epilogue, refused):
    """In fp32; a bf16 product still adds its own."""
    refuse(refused)
    for rows, options in itertools.product((1, 9, 33), ({}, {"candidates": 3}, {"reproducible": 1})):
        case = Case(LINEAR, F32, epilogue, rows, 16, 24)
        assert case.run(cuda, **options).endswith(", bias apart")
        case.check()
    case = Case(LINEAR, BF16, epilogue, 9, 16, 24)
    assert "bias apart" not in case.run(cuda)
    case.check()
    if epilogue == BIAS:
        with pytest.raises(tp.ExecutionError, match=r"epilogue 1\): cublasLt status"):
            Case(LINEAR, F32, BIAS, 3, 16, 24, gap=8).run(cuda)


def test_an_algorithm_that_does_not_run_is_passed_over(cuda, refuse):
    refuse(NO_FIRST_ALGORITHM)
    case = Case(LINEAR, BF16, GELU_AUX, 7, 16, 24)
    assert "algorithm 1," not in case.run(cuda, candidates=3)
    case.check()
    for options in ({}, {"reproducible": 1}):  # untimed too: it is run when it is chosen, and gives way
        for kind, epilogue in ALL:
            case = Case(kind, BF16, epilogue, 7, 16, 24)
            assert "algorithm 1," not in case.run(cuda, **options)
            case.check()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("kind", "epilogue"), [(LINEAR, GELU_AUX), (LINEAR_T, DGELU)])
def test_a_fused_gelu_that_is_another_is_left(cuda, refuse, dtype, kind, epilogue):
    """Wrong for an odd number of rows alone: it is told where it is prepared, from our kernel's beside it."""
    refuse(WRONG_GELU)
    for rows, options in itertools.product((1, 7, 33), ({}, {"candidates": 3}, {"reproducible": 1})):
        case = Case(kind, dtype, epilogue, rows, 16, 24)
        assert "GELU apart" in case.run(cuda, **options)
        case.check()
    case = Case(kind, dtype, epilogue, 8, 16, 24)
    assert "GELU fused" in case.run(cuda)
    case.check()


@pytest.mark.parametrize("small", [0.0, 1e-3, np.nan])
def test_what_tells_no_gelu_from_another_changes_nothing(cuda, small):
    """Fresh memory may be zeros, or no numbers; small products lie where GELU is nearly a line, and are made larger to tell."""
    for kind, epilogue in ((LINEAR, GELU_AUX), (LINEAR_T, DGELU)):
        case = Case(kind, F32, epilogue, 9, 16, 24)
        case.x = of(F32, small * numbers(case.x))
        if case.bias is not None:
            case.bias = of(F32, small * numbers(case.bias))
        assert "GELU fused" in case.run(cuda)
        if small > 0:
            case.check()
            cuda_emu.library().tp_emu_set_cublaslt(WRONG_GELU)
            again = Case(kind, F32, epilogue, 9, 16, 24)
            again.x, again.bias = case.x, case.bias
            assert "GELU apart" in again.run(cuda)
            cuda_emu.library().tp_emu_set_cublaslt(0)


@pytest.mark.parametrize("options", [{}, {"candidates": 1}, {"candidates": 3}, {"reproducible": 1}])
@pytest.mark.parametrize(("kind", "rows", "n_in", "n_out"), [(LINEAR, 3, 129, 8), (LINEAR_T, 3, 8, 129), (LINEAR_W, 129, 8, 16)])
def test_split_sums_lose_no_end(cuda, refuse, options, kind, rows, n_in, n_out):
    """Of 129 products in two parts cublasLt leaves out the last (facebookexperimental/triton, pull request 2767)."""
    refuse(SPLITS)
    case = Case(kind, F32, NONE, rows, n_in, n_out)
    assert "split-K 1" in case.run(cuda, **options)
    case.check()


@pytest.mark.parametrize(("kind", "rows", "n_in", "n_out"),
                         [(LINEAR, 8, 4097, 16), (LINEAR_W, 4097, 16, 24), (LINEAR_W, 8195, 8, 16)])  # fmt: skip
def test_a_deep_ragged_product_is_whole(each, kind, rows, n_in, n_out):
    """Few numbers of long sums: where a library would split them. One product of 4097 is 1.6 % of their sum's deviation."""
    for options in ({}, {"candidates": 8}, {"reproducible": 1}):
        case = Case(kind, F32, NONE, rows, n_in, n_out)
        case.run(each, **options)
        case.check()


def test_split_sums_are_taken_where_they_are_whole(cuda, refuse):
    refuse(SPLITS)
    case = Case(LINEAR_W, BF16, NONE, 128, 8, 16)
    assert "split-K 2" in case.run(cuda)
    case.check()


def test_a_row_is_one_sum_whatever_is_offered_first(cuda, refuse):
    """Parts that follow from the number of rows, which no mask of reductions rules out: a row's bits would too."""
    refuse(SPLITS)
    runs = {}
    for reproducible in (0, 1):
        for rows in (12, 5):
            case = Case(LINEAR, F32, NONE, 12, 64, 24)
            case.rows, case.x, case.y = rows, case.x[:rows].copy(), case.y[:rows].copy()
            assert f"split-K {1 if reproducible else 2}" in case.run(cuda, reproducible=reproducible)
            runs[reproducible, rows] = case.y
    np.testing.assert_array_equal(runs[1, 12][:5], runs[1, 5])


@pytest.mark.parametrize(("kind", "epilogue"), [op for op in ALL if op[0] != LINEAR_W])
def test_an_algorithm_for_any_number_of_rows_is_looked_for_long(cuda, refuse, kind, epilogue):
    """The library's first suggestions for 2048 rows may do no other number."""
    refuse(LATE_PIN)
    for rows in (1, 12):
        case = Case(kind, BF16, epilogue, rows, 16, 24)
        assert "algorithm 10," in case.run(cuda, reproducible=1)
        case.check()


def test_a_gelu_apart_needs_rows_without_gaps(cuda, refuse):
    refuse(NO_GELU_AUX)
    with pytest.raises(ValueError, match="rows without gaps.* 32 and 32, the width 24"):
        Case(LINEAR, BF16, GELU_AUX, 3, 16, 24, gap=8).run(cuda)


def test_candidates_are_timed_and_change_nothing(each):
    """A timed candidate overwrites y and aux: the run after it is checked, on data that no product reads twice."""
    for kind, epilogue in ALL:
        case = Case(kind, BF16, epilogue, 7, 16, 24)
        case.run(each, candidates=8)
        case.check()


def test_of_ragged_products_as_many_are_timed_as_are_asked_for(cuda, refuse):
    """64 deep or 40; the emulator offers twelve algorithms."""
    refuse(LATE_PIN)
    calls = [ctypes.c_int64() for _ in range(3)]

    def products():
        cuda_emu.library().tp_emu_cublaslt_calls(*map(ctypes.byref, calls))
        return calls[1].value

    ran = []
    for n_in, candidates in ((64, 12), (40, 12), (40, 3)):
        before = products()
        Case(LINEAR, BF16, NONE, 7, n_in, 24).run(cuda, candidates=candidates)
        ran.append(products() - before)
    assert ran[0] == ran[1] > ran[2], ran


@pytest.mark.parametrize(("kind", "epilogue"), [op for op in ALL if op[0] != LINEAR_W])
def test_a_row_does_not_depend_on_how_many_there_are(each, kind, epilogue):
    """The stand-in's property, and what `reproducible` asks of the real one: the plan comes from 2048 rows."""
    whole = Case(kind, BF16, epilogue, 12, 16, 24)
    whole.run(each, reproducible=1)
    for at, rows in ((0, 5), (5, 1), (6, 6)):
        part = Case(kind, BF16, epilogue, 12, 16, 24)
        part.rows = rows
        part.x, part.y = part.x[at : at + rows].copy(), part.y[at : at + rows].copy()
        if part.aux is not None:
            part.aux = part.aux[at : at + rows].copy()
        part.run(each, reproducible=1)
        np.testing.assert_array_equal(part.y, whole.y[at : at + rows])


def test_no_rows(cuda):
    empty = Case(LINEAR_W, BF16, NONE, 0, 8, 16)
    empty.run(cuda)
    assert not empty.y.any()  # accumulate 0 writes zeros
    added = Case(LINEAR_W, BF16, NONE, 0, 8, 16, accumulate=1)
    added.run(cuda)
    np.testing.assert_array_equal(added.y, added.before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": -1}, "rows is -1; it must be 0 to 2147483647"),
        ({"n_in": 0}, "n_in is 0; it must be 1"),
        ({"x_stride": 7}, "stride of x is 7, less than its width 8"),
        ({"w_stride": 15}, "stride of w is 15, less than its width 16"),
        ({"y_stride": 3}, "stride of y is 3"),
        ({"epilogue": DGELU}, "epilogue 4 does not belong to linear"),
        ({"epilogue": 77}, "epilogue 77 does not belong to linear"),
        ({"accumulate": 1}, "only linear_w accumulates, not linear"),
        ({"kind": 5}, "there is no kind 5"),
        ({"dtype": 9}, "there is no dtype 9"),
        ({"epilogue": RESIDUAL}, "aux is NULL"),
        ({"candidates": 33}, "candidates is 33; it must be 0 to 32"),
        ({"device": 3}, "device 3: this process sees 1 CUDA device"),
    ],
)
def test_bad_products_are_refused(cuda, change, message):
    words = dict(kind=LINEAR, dtype=F32, epilogue=NONE, accumulate=0, rows=2, n_in=8, n_out=16, x_stride=8, w_stride=16,
                 y_stride=16, aux_stride=16) | change  # fmt: skip
    x, w, y = (np.zeros(4096, np.float32) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        cuda.gemm(x=x, w=w, y=y, **words)


def test_too_short_buffers_are_refused(cuda):
    x, w, y = np.zeros(15, np.float32), np.zeros(128, np.float32), np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="x has 60 bytes; 64 are needed"):
        cuda.gemm(LINEAR, F32, NONE, 0, 2, 8, 16, x, 8, w, 16, y, 16)


def test_what_cublaslt_cannot_do_is_named(cuda, refuse):
    refuse(NO_PRODUCT)
    with pytest.raises(tp.ExecutionError, match=r"linear_t \(3 rows, n_in 8, n_out 16, bf16, epilogue 0\): .*not supported"):
        Case(LINEAR_T, BF16, NONE, 3, 8, 16).run(cuda)


def test_times_are_the_devices(cuda):
    seconds, text = cuda.gemm_seconds(LINEAR, BF16, GELU_AUX, 0, 16, 32, 64, repeats=3, candidates=2)
    assert len(seconds) == 3 and all(s >= 0 for s in seconds) and "algorithm" in text
    with pytest.raises(ValueError, match="repeats is 0"):
        cuda.gemm_seconds(LINEAR, BF16, NONE, 0, 16, 32, 64, repeats=0)


class Op(ctypes.Structure):
    """tp_gemm_op."""

    _fields_ = [(n, ctypes.c_int) for n in ("kind", "dtype", "epilogue", "accumulate")] + [
        (n, t) for n, t in (("rows", ctypes.c_int64), ("n_in", ctypes.c_int64), ("n_out", ctypes.c_int64),
                            ("x", ctypes.c_void_p), ("x_stride", ctypes.c_int64), ("w", ctypes.c_void_p),
                            ("w_stride", ctypes.c_int64), ("y", ctypes.c_void_p), ("y_stride", ctypes.c_int64),
                            ("bias", ctypes.c_void_p), ("aux", ctypes.c_void_p), ("aux_stride", ctypes.c_int64))]  # fmt: skip


def test_plans_are_made_once_and_a_lost_device_is_told(cuda):
    lib = cuda_emu.library()
    lib.tp_gemm_plans.restype, lib.tp_gemm_workspace_bytes.restype = ctypes.c_int64, ctypes.c_size_t
    lib.tp_error_message.restype, lib.tp_cuda_compute.restype = ctypes.c_char_p, ctypes.c_void_p
    lib.tp_gemm_workspace_bytes.argtypes = lib.tp_cuda_compute.argtypes = lib.tp_gemm_plans.argtypes = [ctypes.c_void_p]
    device, gemm, memory, workspace = (ctypes.c_void_p() for _ in range(4))
    assert lib.tp_cuda_open(0, None, ctypes.byref(device)) == 0
    assert lib.tp_cuda_alloc(device, ctypes.c_size_t(1 << 16), b"all", ctypes.byref(memory)) == 0
    size = ctypes.c_size_t(lib.tp_gemm_workspace_bytes(device))
    assert lib.tp_cuda_alloc(device, size, b"workspace", ctypes.byref(workspace)) == 0
    stream = ctypes.c_void_p(lib.tp_cuda_compute(device))
    assert lib.tp_gemm_open(device, stream, None, workspace, ctypes.byref(gemm)) == 0
    try:
        calls = [ctypes.c_int64() for _ in range(3)]

        def asked() -> int:
            lib.tp_emu_cublaslt_calls(*map(ctypes.byref, calls))
            return calls[0].value

        base = memory.value or 0
        op = Op(LINEAR, F32, NONE, 0, 4, 8, 16, base, 8, base + 4096, 16, base + 8192, 16, None, None, 0)
        before = asked()
        assert lib.tp_gemm_prepare(gemm, ctypes.byref(op)) == 0
        for _ in range(5):
            assert lib.tp_gemm_run(gemm, ctypes.byref(op)) == 0
        assert (lib.tp_gemm_plans(gemm), asked() - before) == (1, 1)
        op.rows = 3  # another shape, another plan; another alignment too
        assert lib.tp_gemm_run(gemm, ctypes.byref(op)) == 0
        op.x = base + 4
        assert lib.tp_gemm_run(gemm, ctypes.byref(op)) == 0
        assert (lib.tp_gemm_plans(gemm), asked() - before) == (3, 3)
        lib.tp_emu_break(ctypes.c_int64(2))  # the bind is the first call, the product the second
        assert lib.tp_gemm_run(gemm, ctypes.byref(op)) != 0
        told = lib.tp_error_message().decode()
        # asked of the device itself: the real library has a CUDA runtime of its own, whose last error ours does not have
        assert "device is lost" in told and "cudaStreamQuery" in told and "after kernel cublasLtMatmul" in told
        assert lib.tp_gemm_run(gemm, ctypes.byref(op)) != 0  # and stays lost
        assert lib.tp_error_message().decode() == told
    finally:
        lib.tp_emu_break(ctypes.c_int64(0))
        lib.tp_gemm_close(gemm)
        for block in (memory, workspace):
            lib.tp_cuda_free(device, block)
        lib.tp_cuda_close(device)


@pytest.mark.parametrize("width", [5, 6, 8])
def test_a_slice_has_the_algorithm_of_all_whichever_row_it_begins_with(cuda, width):
    """Rows of 20 or 24 bytes begin on 16 now and then: as little as any row is aligned to counts for all."""
    lib = cuda_emu.library()
    lib.tp_gemm_workspace_bytes.restype, lib.tp_cuda_compute.restype = ctypes.c_size_t, ctypes.c_void_p
    lib.tp_gemm_workspace_bytes.argtypes = lib.tp_cuda_compute.argtypes = [ctypes.c_void_p]
    device, gemm, memory, workspace = (ctypes.c_void_p() for _ in range(4))
    assert lib.tp_cuda_open(0, None, ctypes.byref(device)) == 0
    size, asked = ctypes.c_size_t(lib.tp_gemm_workspace_bytes(device)), [ctypes.c_int64() for _ in range(3)]
    assert lib.tp_cuda_alloc(device, ctypes.c_size_t(1 << 16), b"all", ctypes.byref(memory)) == 0
    assert lib.tp_cuda_alloc(device, size, b"workspace", ctypes.byref(workspace)) == 0
    options = (ctypes.c_int * 3)(0, 1, 0)  # reproducible
    assert lib.tp_gemm_open(device, ctypes.c_void_p(lib.tp_cuda_compute(device)), options, workspace, ctypes.byref(gemm)) == 0
    try:
        lib.tp_emu_cublaslt_calls(*map(ctypes.byref, asked))
        before, base = asked[0].value, memory.value or 0
        for row in range(4):
            op = Op(LINEAR, F32, NONE, 0, 4, width, width, base + 4 * row * width, width, base + 16384, width,
                    base + 8192 + 4 * row * width, width, None, None, 0)  # fmt: skip
            assert lib.tp_gemm_run(gemm, ctypes.byref(op)) == 0
        lib.tp_emu_cublaslt_calls(*map(ctypes.byref, asked))
        assert asked[0].value - before == 1
    finally:
        lib.tp_gemm_close(gemm)
        for block in (memory, workspace):
            lib.tp_cuda_free(device, block)
        lib.tp_cuda_close(device)


def test_our_declarations_are_cublaslts() -> None:
    """Where its header is installed: every constant, layout and prototype of cuda/dl_cublaslt.h."""
    folders = [Path(p) / "nvidia/cu13/include" for p in sys.path if p]
    folders += [Path(os.environ[n]) / "include" for n in ("CUDA_HOME", "TERAPIPE_CUBLAS_HOME") if os.environ.get(n)]
    folders += [Path("/usr/local/cuda/include"), *Path("/usr/local").glob("cuda-13*/include")]
    headers = next((f for f in folders if (f / "cublasLt.h").is_file()), None)
    if headers is None:
        pytest.skip("cublasLt.h is not installed (pip install nvidia-cublas)")
    places = [f"-isystem{f}" for f in [headers, *folders] if f.is_dir()]
    command = ["gcc", "-std=c11", "-fsyntax-only", "-I.", *places]
    alone = subprocess.run([*command, "-xc", "-"], input="#include <cublasLt.h>\n", capture_output=True, text=True)
    if alone.returncode:  # headers of CUDA that it needs are elsewhere, or not here
        pytest.skip(f"cublasLt.h does not compile by itself: {alone.stderr.strip().splitlines()[0]}")
    ran = subprocess.run([*command, "tests/cublaslt_same.c"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
