"""Attention by wgmma and the emulator of a warpgroup's products, which reads descriptors by what the PTX ISA says of them: tiles
are written here by the canonical layouts (NVIDIA/cutlass, cute/atom/mma_traits_sm90_gmma.hpp), not as the kernels write theirs.
benchmarks/gpu_check.py asks a GPU."""

import ctypes
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import cuda_emu
import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import device_comm, doctor

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

from test_cuda_attention import (  # noqa: E402
    BF16,
    CHANCE,
    MMA,
    SHAPES,
    SIZE_0,
    WGMMA,
    Attention,
    Shape,
    address,
    aligned,
    from_bf16,
    run_case,
    run_in_its_arrays,
    to_bf16,
)

IMAGE = 24 * 1024  # bf16 of shared memory (tests/simt_cases.cu)


@pytest.fixture
def emu():
    library = cuda_emu.library()
    library.tp_error_message.restype = ctypes.c_char_p
    yield library
    library.tp_simt_set_order(0)
    library.tp_cuda_attention_force(0)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return cuda_emu.simt_cases(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def racing(tmp_path_factory):
    return cuda_emu.simt_cases(tmp_path_factory.mktemp("races"), races=True)


# ---- products ------------------------------------------------------------------------------------------------------------


def place(image: np.ndarray, begin: int, matrix: np.ndarray) -> None:
    """Rows of `matrix` in panels of 64 columns from byte `begin` on: CUTLASS's Swizzle<3, 4, 3> of rows of 128 bytes."""
    for (r, c), value in np.ndenumerate(matrix):
        byte = begin + c // 64 * len(matrix) * 128 + r * 128 + c % 64 * 2
        bits = byte >> 7 & 7
        image[(byte ^ bits << 4) // 2] = value


def word(begin: int, leading: int = 16, stride: int = 1024, mode: int = 1) -> int:
    return begin >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


class Product:
    """64 x n = A (64 x 16 count) times B, in the image from byte `base` on (the dynamic memory begins at byte 1024)."""

    BASE = 1024

    def __init__(self, n, count, registers, seed=0):
        rng = np.random.default_rng(seed)
        k = 16 * count
        a, b = to_bf16(rng.normal(size=(64, k))), to_bf16(rng.normal(size=(n, k)))
        self.wanted = 1 + from_bf16(a).astype(np.float64) @ from_bf16(b).T
        self.image, self.y = aligned(IMAGE, np.uint16), aligned(64 * n, np.float32)
        self.image[:] = 0x7FC0  # NaN
        wide = -(-k // 64) * 64
        pad = lambda m: np.pad(m, ((0, 0), (0, wide - k)), constant_values=0x7FC0)  # noqa: E731
        at = 64 * wide * 2
        self.x = aligned(64 * k, np.uint16)
        self.x[:] = a.reshape(64, count, 16).transpose(1, 0, 2).ravel()
        if registers:  # B as [k][n]: n runs along the rows
            place(self.image, 0, b.T)
            pairs = [(0, word(self.BASE + 2048 * j, leading=k * 128)) for j in range(count)]
        else:
            place(self.image, 0, pad(a))
            place(self.image, at, pad(b))
            pairs = [(word(self.BASE + j // 4 * 64 * 128 + j % 4 * 32), word(self.BASE + at + j // 4 * n * 128 + j % 4 * 32))
                     for j in range(count)]  # fmt: skip
        self.words = aligned(3 + 2 * count, np.uint64)
        self.words[:] = [n, count, registers, *(w for pair in pairs for w in pair)]

    def run(self, cases, fault=0, threads=128):
        return run_case(cases, "wgmma", fault, threads, self.x.view(np.float32), self.y, self.image, self.words)

    def right(self):
        n = self.wanted.shape[1]
        return np.allclose(self.y.reshape(64, n), self.wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("registers", [0, 1])
@pytest.mark.parametrize("n, count", [(64, 1), (64, 4), (128, 3), (128, 4)])
def test_products_by_descriptors(cases, racing, registers, n, count):
    for emulator in (cases, racing):
        for order in (0, 2, 4, 7, *CHANCE):
            emulator.tp_simt_set_order(order)
            product = Product(n, count, registers)
            assert product.run(emulator) == (0, "") and product.right()
        emulator.tp_simt_set_order(0)


@pytest.mark.parametrize("count", [5, 8])
def test_what_is_wider_than_64_columns_is_in_another_panel(cases, count):
    product = Product(64, count, 0)
    assert product.run(cases) == (0, "") and product.right()


PINS = "lane 37's registers were not pinned, as they are, before the fence"
FAULTS = {
    1: "a product with no fence of the registers since the last wait",
    2: "nobody waits for this product",
    5: "lanes 0 and 37 of a warpgroup multiply other tiles",
    6: "divergent operation of a warpgroup: it waits at .*, thread 37 has ended",
    10: PINS,
    11: PINS,
}
RACES = {
    4: "writes what a product under way may be reading",
    7: "multiplies what a thread wrote and told by no fence",
    8: "multiplies, with no barrier between, what a thread wrote",
    9: "multiplies what a thread wrote and told by no fence",
    3: "reads registers of a product that is not over, or were not pinned since",
    12: "reads registers of a product that is not over, or were not pinned since",
}


@pytest.mark.parametrize("fault", [*FAULTS, *RACES])
def test_a_wrong_product_is_found(cases, racing, fault):
    emulator = racing if fault in RACES else cases
    for order in (0, 4):
        emulator.tp_simt_set_order(order)
        status, message = Product(64, 2, 0).run(emulator, fault)
        assert status != 0 and re.search((FAULTS | RACES)[fault], message), message
    emulator.tp_simt_set_order(0)
    assert Product(64, 2, 0).run(emulator) == (0, "")


def test_a_word_of_a_that_changes_behind_the_fence_is_found(cases):
    status, message = Product(64, 2, 1).run(cases, 11)
    assert status != 0 and PINS in message


@pytest.mark.parametrize("fault", [3, 4])
def test_who_reads_or_writes_too_early_shows_in_one_order(cases, fault):
    right = []
    for order in (0, 4):
        cases.tp_simt_set_order(order)
        product = Product(64, 2, 0)
        assert product.run(cases, fault) == (0, "")
        right.append(product.right())
    cases.tp_simt_set_order(0)
    assert right == [False, True]


@pytest.mark.parametrize("change, text", [
    (lambda w: w & ~(3 << 62), "the emulator knows the 128-byte swizzle"),
    (lambda w: w | 1 << 49, "the emulator knows the 128-byte swizzle from a multiple of 1024 bytes on"),
    (lambda w: w | 1 << 15, "has bits that mean nothing"),
    (lambda w: w - (1024 >> 4), "leads to byte .* of shared memory, outside the block's dynamic memory"),
])  # fmt: skip
def test_a_wrong_descriptor_is_named(cases, change, text):
    product = Product(64, 1, 0)
    product.words[3] = change(int(product.words[3])) % (1 << 64)
    status, message = product.run(cases)
    assert status != 0 and re.search(text, message), message


def test_other_strides_or_begins_give_other_numbers(cases):
    """What only the descriptor tells: a stride of another size, a begin 16 bytes on."""
    for i, change in ((4, 512 >> 4 << 32), (3, 1)):
        product = Product(64, 1, 0)
        product.words[i] = int(product.words[i]) - change if i == 4 else int(product.words[i]) + change
        status, _ = product.run(cases)
        assert status != 0 or not product.right()


def test_half_a_warpgroup_is_none(cases):
    status, message = Product(64, 1, 0).run(cases, threads=96)
    assert status != 0 and "an operation of a warpgroup in a block of 96 threads" in message


# ---- attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("B, H, D, slices, gap", SHAPES)
def test_attention_agrees_with_float64(emu, groups, B, H, D, slices, gap):
    emu.tp_cuda_attention_force(groups)
    run = Attention(emu, BF16, B, H, D, sum(slices), gap, kernel=WGMMA).run(slices)
    wanted = run.wanted()
    for name, got in run.outputs().items():
        error = np.linalg.norm(got - wanted[name]) / np.linalg.norm(wanted[name])
        assert error <= (1e-5 if name == "lse" else 3e-3), f"{name}: {error:.2e}"
    for array in (run.o[..., H * D :], run.dqkv[..., 3 * H * D :]):
        assert np.isnan(run.decode(np.ascontiguousarray(array))).all(), "written between rows"


class Forced(Attention):
    """Forward and backward by kernels of so many warpgroups that multiply."""

    def __init__(self, emu, D, T, forward, backward, H=1):
        super().__init__(emu, BF16, 1, H, D, T, kernel=WGMMA)
        self.groups = {"forward": forward, "backward": backward}

    def call(self, name, *rest):
        self.emu.tp_cuda_attention_force(self.groups[name])
        super().call(name, *rest)


@pytest.mark.parametrize("D", [64, 72])
def test_no_slicing_kernel_or_order_shows_in_the_bits(emu, D):
    """Of the forward's two families, tiles of 64 keys (one warpgroup, D up to 64) and of 128, each has bits of its own; gradients
    have, by every kernel, those of the forward before."""
    make = lambda groups, H=1: Forced(emu, D, 200, *groups, H=H)  # noqa: E731
    want = {one: make((one, 1)).run([200]).bits() for one in (1, 2)}
    assert (want[1] == want[2]) == (D > 64)
    for groups, slicings in (
        ((1, 2), ([200], [64, 64, 64, 8], [100, 60, 40])),
        ((2, 1), ([128, 72], [1, 62, 2, 95, 40])),
        ((3, 2), ([200], [1, 62, 2, 95, 40])),
        ((2, 3), ([64, 64, 64, 8], [100, 60, 40])),
    ):
        for slices in slicings:
            assert make(groups).run(slices).bits() == want[min(groups[0], 2)], (groups, slices)
    for groups in ((1, 1), (2, 2), (3, 3)):
        for order in (1, 2, 4, 7, CHANCE[0]):
            emu.tp_simt_set_order(order)
            assert make(groups).run([130, 70]).bits() == want[min(groups[0], 2)], (groups, order)
        emu.tp_simt_set_order(0)


def test_more_tiles_than_a_block_has_at_once(emu):
    """Stages in their second and third phase, queries' tiles of 192 rows that end within the slice, two heads."""
    make = lambda *groups: Forced(emu, 64, 650, *groups, H=2)  # noqa: E731
    want = make(2, 1).run([650]).bits()
    for groups, slices, order in (((3, 3), [650], 5), ((2, 2), [7, 640, 3], 2), ((3, 2), [1, 62, 587], 8), ((2, 3), [300, 350], 8)):
        emu.tp_simt_set_order(order)
        assert make(*groups).run(slices).bits() == want, (groups, slices, order)


# Which kernel the shape asks for: forward and backward of D 64 and of D 128, by rows, total, tiles of 128 rows.
CHOICES = {
    (40, 40, 1): (1, 1, 1, 1), (256, 2048, 512): (1, 1, 2, 2), (1024, 2048, 2048): (1, 1, 2, 2), (2048, 2048, 4096): (1, 3, 2, 2),
    (256, 2049, 512): (1, 2, 2, 2), (1023, 4096, 999): (1, 2, 2, 2), (1024, 4096, 1024): (1, 3, 2, 2),
    (4096, 4096, 4096): (1, 3, 2, 2), (1, 4097, 999): (2, 2, 2, 2), (1024, 8192, 512): (2, 3, 2, 2),
    (2047, 8192, 999): (2, 3, 2, 2), (2048, 8192, 2048): (3, 3, 2, 2),
    (256, 8192, 67): (2, 2, 2, 2), (256, 8192, 66): (2, 2, 1, 1)}  # fmt: skip


def test_which_kernel_a_shape_gets(emu):
    choose = lambda forward, D, *shape, sms=132: emu.tp_attention_warpgroups(forward, D, *map(ctypes.c_int64, shape), sms)  # noqa: E731
    for shape, want in CHOICES.items():
        assert tuple(choose(f, D, *shape) for D in (64, 128) for f in (1, 0)) == want, shape
    assert [choose(0, 128, 512, 2048, 64, sms=sms) for sms in (132, 128, 127, 32)] == [1, 1, 2, 2]  # of a quarter of the GPU, two
    rng = np.random.default_rng(1)
    for _ in range(300):  # two families of bits: D and total alone choose
        D, total = int(rng.choice([8, 64])), int(rng.choice([1, 2048, 4096, 4097, 8192, 30000]))
        rows, tiles = int(rng.integers(1, total + 1)), int(rng.integers(1, 5000))
        assert (choose(1, D, rows, total, tiles) > 1) == (total > 4096) and 1 <= choose(0, D, rows, total, tiles) <= 3
        assert {choose(f, 72, rows, total, tiles) for f in (0, 1)} <= {1, 2}


@pytest.mark.parametrize("D, T, family", [(8, 4096, 1), (8, 4097, 2)])
def test_a_slice_has_the_bits_of_its_family(emu, D, T, family):
    """Nothing forced, on both sides of the border: the first 130 rows of a long sequence, in slices, and its last ones."""
    got = {}
    for groups in (0, family):
        emu.tp_cuda_attention_force(groups)
        one = Attention(emu, BF16, 1, 1, D, T, kernel=WGMMA)
        one.qkv[..., : 3 * D] = one.given[0]
        arrays = *(address(one.qkv, i * D) for i in range(3)), address(one.o), address(one.lse)
        for rows, context in ((100, 0), (30, 100), (T - 4090, 4090)) if groups == 0 else ((130, 0), (T - 4060, 4060)):
            one.call("forward", rows, context, *arrays)
        got[groups] = one.o[:130].tobytes() + one.o[4090:].tobytes()
    assert got[0] == got[family]


@pytest.mark.parametrize("groups", [0, 2, 3])
def test_large_scores_overflow_nowhere(emu, groups):
    emu.tp_cuda_attention_force(groups)
    run = Attention(emu, BF16, 1, 1, 64, 150, kernel=WGMMA)
    run.given = run.encode(1e2 * run.decode(run.given[0])), run.given[1]
    for name, got in run.run([90, 60]).outputs().items():
        assert np.isfinite(got).all(), name


@pytest.mark.parametrize("name, D, H, groups, first, T", [
    ("forward_wgmma_64", 64, 1, 0, 0, 8), ("forward_ring_64_2", 64, 1, 0, 2100, 4100), ("forward_ring_64_3", 64, 1, 0, 0, 4100),
    ("forward_ring_128_1", 72, 66, 0, 0, 8), ("forward_ring_128_2", 72, 67, 0, 0, 8),
    ("dq_wgmma_64", 64, 1, 0, 0, 8), ("dq_ring_64_2", 8, 1, 0, 2047, 2049), ("dq_ring_64_3", 8, 1, 0, 1, 2049),
    ("dq_wgmma_128", 128, 66, 0, 0, 8), ("dq_ring_128_2", 128, 67, 0, 0, 8), ("dq_wgmma_128", 72, 66, 0, 128, 256),
    ("dq_wgmma_128", 72, 33, 0, 0, 200), ("dq_ring_128_2", 72, 34, 0, 120, 140)])  # fmt: skip
def test_an_error_names_the_kernel(emu, name, D, H, groups, first, T):
    """So these run, and not those by mma.sync; of one warpgroup where blocks of two would leave half of 132 SMs without work."""
    emu.tp_cuda_attention_force(groups)
    shape, memory = Shape(1, H, D, T - first, first, T, 3 * H * D, H * D), aligned(T * 3 * H * D, np.uint16)
    forward, other = name.startswith("forward"), aligned(T * 3 * H * D, np.uint16)
    call, arrays = (emu.tp_cuda_attention_forward, 5) if forward else (emu.tp_cuda_attention_backward, 10)
    pointers = [address(memory)] * arrays
    assert emu.tp_simt_range_add(address(memory), ctypes.c_size_t(memory.nbytes if not forward else 16)) == 0
    try:
        if not forward:  # the kernel before has all it wants
            pointers[7] = address(other)
        assert call(None, BF16, WGMMA, 132, ctypes.byref(shape), *pointers, *([] if forward else [None, SIZE_0])) != 0
    finally:
        emu.tp_simt_range_remove(address(memory))
    assert f"CUDA kernel attention_{name}, block" in emu.tp_error_message().decode()


def test_other_kernels_run_elsewhere(emu):
    """Compute capability 9.0 alone has wgmma: 10.0 has not."""
    for kernel, major, minor, told in ((WGMMA, 9, 0, None), (MMA, 8, 0, None), (WGMMA, 8, 9, "8.9"), (WGMMA, 10, 0, "10.0")):
        properties = (ctypes.c_int * 256)(3, major, minor)
        status = emu.tp_cuda_attention_check(kernel, properties)
        assert (status == 0) == (told is None)
        if told:
            assert f"compute capability {told}; attention by wgmma runs on 9.0 (Hopper) alone" in emu.tp_error_message().decode()


@pytest.mark.parametrize("D, groups", [(56, 1), (56, 2), (56, 3), (72, 1), (72, 2)])
def test_the_kernels_stay_in_their_arrays(emu, D, groups):
    emu.tp_cuda_attention_force(groups)
    run = Attention(emu, BF16, 1, 2, D, 137, kernel=WGMMA)
    run_in_its_arrays(emu, run, [70, 67])


@pytest.mark.parametrize("D, slices, groups", [
    *((64, [130, 75], groups) for groups in (1, 2, 3)), *((128, [140], groups) for groups in (1, 2)),
    (128, [450], 2), (64, [430], 3), (64, [257], 2)])  # fmt: skip
def test_attention_has_no_races(D, slices, groups):
    """The last three have more tiles than a block has at once: some come where others were, which all must have read."""
    library = cuda_emu.library(races=True)
    library.tp_error_message.restype = ctypes.c_char_p
    library.tp_cuda_attention_force(groups)
    try:
        for order in (3, CHANCE[0]):
            library.tp_simt_set_order(order)
            Attention(library, BF16, 1, 1, D, sum(slices), kernel=WGMMA).run(slices)
    finally:
        library.tp_simt_set_order(0)
        library.tp_cuda_attention_force(0)


# ---- in training -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """Losses, gradients and caveats of a small model by TERAPIPE_ATTENTION."""
    stage = pytest.importorskip("test_cuda_stage")
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(cuda_emu.build()))
    module = tp.cuda.load()
    module.emu_machine()

    def run(attention, slicing, dtype="bf16", reproducible=True, begun=lambda: None, steps=(1, 2, 3)):
        monkeypatch.setenv("TERAPIPE_ATTENTION", attention)
        model, params, tokens = stage.problem(2, 40, n_embd=32)
        program = tp.schedules.gpipe(1, len(slicing), [len(slices) for _, slices in slicing]).lower(True)

        def work(engine):
            begun()
            told = [engine.run(tokens, step=1, update=False)[0]]
            grads = {name: np.asarray(grad).tobytes() for name, grad in engine.export("grads").items()}
            return told + [engine.run(tokens, step=i, lr=1e-2)[0] for i in steps], grads, engine.caveats

        return stage.ranks_do(model, [(0, model.num_blocks)], slicing, program, work, params, dtype, reproducible=reproducible)[0]

    yield run
    module.emu_machine()


def test_training_by_wgmma(trained, monkeypatch):
    """The same bits in every slicing, reproducible as mma.sync's, and the default where a device has it."""
    asked = [("wgmma", [(2, [40])]), ("wgmma", [(2, [7, 1, 32])]), ("own", [(2, [40])]), ("mma", [(2, [40])])]
    whole, sliced, default, mma = (trained(*how) for how in asked)
    assert whole == sliced == default and tp.cuda.attention_kernel() == "mma" and tp.cuda.attention_kernel(0, "float32") == "mma"
    monkeypatch.setenv("TERAPIPE_ATTENTION", "own")
    with pytest.raises(tp.InvalidValueError, match="dtype is 'fp16'"):
        tp.cuda.attention_kernel(0, "fp16")
    assert tp.cuda.attention_kernel() == "wgmma" and tp.cuda.attention_kernel(0, "float32") == "mma"
    np.testing.assert_allclose(whole[0], mma[0], rtol=3e-3)
    assert whole[2] == [] and len(mma[2]) == 1 and "by mma.sync, as TERAPIPE_ATTENTION asks" in mma[2][0]


@pytest.fixture
def skew():
    """Of a warpgroup's products: A and B have, or do not have, the bits of B and A."""
    library = cuda_emu.library()
    yield library.tp_emu_skew
    library.tp_emu_skew(0)


def test_where_operands_do_not_commute_nothing_is_kept(trained, skew):
    """Else the bits would show the slices: of 40 tokens whole all pairs are kept, of these slices those of the first alone."""
    skew(1)
    whole, sliced = (trained("wgmma", [(2, slices)], steps=()) for slices in ([40], [7, 1, 32]))
    assert whole == sliced
    assert len(whole[2]) == 1 and "makes the scores of a slice's own pairs twice" in whole[2][0]


def test_training_keeps_what_the_check_allows(trained, skew):
    """It shows where operands stop to commute behind the check."""
    runs = {}
    for slices in ([40], [7, 1, 32]):
        runs[len(slices)] = trained("wgmma", [(2, slices)], begun=lambda: skew(1), steps=())
        skew(0)
    assert runs[1][0][0] == runs[3][0][0] and runs[1][1] != runs[3][1] and runs[1][2] == runs[3][2] == []


def test_a_rank_asks_once_whether_both_ways_agree(trained, monkeypatch):
    """Not each of its stages; and has 17 of 80 rows of d(q) on the host at a time (TP_CUDA_COMPARED_BYTES)."""
    stage, module = pytest.importorskip("test_cuda_stage"), tp.cuda.load()
    monkeypatch.setenv("TERAPIPE_ATTENTION", "wgmma")
    model, params, _ = stage.problem(2, 40, n_embd=32)
    program = tp.Program.parse("0F0.0 1F0.0 1B0.0 0B0.0").lower(True)
    module.emu_trace(True)
    stage.ranks_do(model, [(0, 3), (3, model.num_blocks)], [(2, [40])], program, lambda engine: None, params, "bf16")
    done = [name for name, _ in module.emu_trace(False)]
    assert [sum(name.startswith(kernel) for name in done) for kernel in ("attention_dkdv_", "attention_dq_")] == [2, 2]
    behind = done[max(i for i, name in enumerate(done) if name.startswith("attention_dq_")) + 1 :]
    assert len(list(itertools.takewhile(lambda name: name == "copy", behind))) == 2 * 5


def test_where_wgmma_is_asked_for_in_vain(trained):
    losses, grads, (caveat,) = trained("wgmma", [(2, [40])], "float32")
    assert "TERAPIPE_ATTENTION=wgmma is without effect" in caveat and "this is float32" in caveat
    for other in ("own", "mma"):
        assert (losses, grads, []) == trained(other, [(2, [40])], "float32")


@pytest.mark.parametrize("major, minor", [(8, 0), (10, 0)])
def test_another_device_is_refused_before_there_is_work(trained, major, minor):
    mma = trained("mma", [(2, [40])])[:2]
    tp.cuda.load().emu_machine(major=major, minor=minor)
    told = f"device 0 .* has compute capability {major}.{minor}; attention by wgmma runs on 9.0 .Hopper. alone"
    with pytest.raises(tp.ExecutionError, match=told):
        trained("wgmma", [(2, [40])])
    assert trained("own", [(2, [40])]) == (*mma, []) == trained("mma", [(2, [40])])


def test_ranks_of_a_reproducible_run_agree(trained, monkeypatch):
    """Machines have environments, and GPUs, of their own."""
    monkeypatch.setenv("TERAPIPE_ATTENTION", "")
    told = []
    control = lambda answer: SimpleNamespace(allgather=lambda mine: told.append(mine) or answer)  # noqa: E731
    device_comm.agree_on_attention({"reproducible": True}, control(b"\1\1\1"), 0, "bf16")
    device_comm.agree_on_attention({"reproducible": False}, control(b"\0\1"), 0, "bf16")
    device_comm.agree_on_attention({"reproducible": True}, control(b"\0\0"), 0, "float32")
    with pytest.raises(tp.InvalidValueError, match="by mma on rank 0, wgmma on rank 1, 2: .*=mma on all ranks would be right"):
        device_comm.agree_on_attention({"reproducible": True}, control(b"\0\1\1"), 0, "bf16")
    tp.cuda.load().emu_machine(major=8)
    device_comm.agree_on_attention({"reproducible": True}, control(b"\0\0"), 0, "bf16")
    assert told == [b"\1", b"\0", b"\1", b"\0"]


def test_doctor_says_by_what_the_device_attends(trained, tmp_path, monkeypatch):
    for asked, major, words, status in (("", 9, "by wgmma", "ok"), ("", 8, "by mma.sync", "ok"),
                                        ("mma", 9, "by mma.sync, as", "ok"),
                                        ("wgmma", 8, "attention by wgmma runs on 9.0 (Hopper) alone", "note"),
                                        ("fast", 9, '"own" (or nothing), "mma", "wgmma" or "cudnn"', "note")):  # fmt: skip
        monkeypatch.setenv("TERAPIPE_ATTENTION", asked)
        tp.cuda.load().emu_machine(major=major)
        row = {row.name: row for row in doctor.examine(tmp_path)}["attention of GPU 0"]
        assert words in row.value + row.advice and row.status == status
