"""dS of a slice's own pairs, which wgmma's kernels of d(k) and d(v) keep for that of d(q): the same bits, in its own room."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

if not (Path(__file__).resolve().parents[1] / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

import cuda_emu  # noqa: E402
from test_cuda_attention import (  # noqa: E402
    BF16,
    CHANCE,
    POISON,
    SHAPES,
    WGMMA,
    Attention,
    Shape,
    aligned,
    from_bf16,
    run_in_its_arrays,
)

TILE = 64 * 64 * 2
KERNELS = [(64, 1), (64, 2), (64, 3), (72, 1), (72, 2)]


@pytest.fixture
def emu():
    library = cuda_emu.library()
    library.tp_error_message.restype = ctypes.c_char_p
    library.tp_cuda_attention_kept_bytes.restype = ctypes.c_int64
    yield library
    library.tp_simt_set_order(0)
    library.tp_cuda_attention_force(0)


def room(emu, B, H, D, slices):
    """Bytes for all heads of the slice that needs most."""
    at = np.cumsum([0, *slices]).tolist()
    shapes = [Shape(B, H, D, rows, first, at[-1], 3 * H * D, H * D) for rows, first in zip(slices, at, strict=False)]
    return max(emu.tp_cuda_attention_kept_bytes(ctypes.byref(shape)) for shape in shapes)


class Keeping(Attention):
    """In so many bytes, that a call finds full of NaN; says how many tiles were written. The forward is another's."""

    def __init__(self, like, kept_bytes, emu=None):
        super().__init__(emu or like.emu, BF16, *like.shape, like.gap, kernel=WGMMA)
        self.like, self.kept, self.tiles = like, aligned(kept_bytes, np.uint8), []

    def call(self, name, rows, context, *arrays):
        if name == "forward":
            now = slice(context, context + rows)
            self.o[now], self.lse[..., now] = self.like.o[now], self.like.lse[..., now]
            return
        self.kept[:] = POISON
        super().call(name, rows, context, *arrays)
        full = self.kept[: self.kept.nbytes // TILE * TILE].reshape(-1, TILE)
        written = (full != POISON).any(1)
        assert not np.isnan(from_bf16(np.ascontiguousarray(full[written]).view(np.uint16))).any()
        self.tiles.append(int(written.sum()))


def test_the_room_that_all_heads_need(emu):
    """Tiles of 64 by 64 from the first that begins in the slice, and those that hide all left out."""
    for (rows, first), tiles in {(64, 0): 1, (65, 0): 3, (256, 256): 10, (1, 63): 0, (1, 64): 1, (200, 30): 6, (34, 30): 0,
                                 (35, 30): 1}.items():  # fmt: skip
        shape = Shape(2, 3, 64, rows, first, 512, 576, 192)
        assert emu.tp_cuda_attention_kept_bytes(ctypes.byref(shape)) == 6 * TILE * tiles, (rows, first)


@pytest.mark.parametrize("B, H, D, slices, gap, groups", [
    (*shape, groups) for shape in SHAPES for groups in (1, 2, 3) if groups < 3 or shape[2] <= 64])  # fmt: skip
def test_the_bits_are_those_of_nothing_kept(emu, groups, B, H, D, slices, gap):
    emu.tp_cuda_attention_force(groups)
    want = Attention(emu, BF16, B, H, D, sum(slices), gap, kernel=WGMMA).run(slices)
    assert Keeping(want, room(emu, B, H, D, slices)).run(slices).bits() == want.bits()


@pytest.mark.parametrize("D, groups", KERNELS)
def test_no_slicing_or_order_shows(emu, D, groups):
    """Slices of whole tiles, of parts of tiles, within one tile; more tiles than a block has at once, or fetches ahead."""
    emu.tp_cuda_attention_force(groups)
    want = Attention(emu, BF16, 1, 1, D, 340, kernel=WGMMA).run([340])
    tiles = {(340,): [21], (64, 128, 148): [6, 3, 1], (30, 300, 10): [0, 15, 1], (256, 10, 74): [1, 1, 10]}
    for (slices, wanted), order in zip(tiles.items(), (0, 5, 2, CHANCE[0]), strict=True):
        emu.tp_simt_set_order(order)
        run = Keeping(want, room(emu, 1, 1, D, slices)).run(slices)
        assert run.tiles == wanted and run.bits() == want.bits(), slices


@pytest.mark.parametrize("D, groups", KERNELS)
def test_heads_that_do_not_fit_are_computed_twice(emu, D, groups):
    emu.tp_cuda_attention_force(groups)
    want = Attention(emu, BF16, 3, 1, D, 100, kernel=WGMMA).run([100])
    for room_for, kept in ((3 * TILE - 1, 0), (3 * TILE, 1), (8 * TILE, 2)):
        run = Keeping(want, room_for).run([100])
        assert run.bits() == want.bits() and run.tiles == [3 * kept], room_for


@pytest.mark.parametrize("D, groups", KERNELS)
def test_what_is_kept_stays_in_its_room(emu, D, groups):
    emu.tp_cuda_attention_force(groups)
    slices = [100, 160]
    run = Keeping(Attention(emu, BF16, 2, 1, D, 260, kernel=WGMMA).run(slices), room(emu, 2, 1, D, slices))
    run_in_its_arrays(emu, run, slices)
    assert run.tiles == [2 * 6, 2 * 3]


def test_room_that_is_not_on_16_bytes_is_refused(emu):
    run = Keeping(Attention(emu, BF16, 1, 1, 64, 64, kernel=WGMMA), TILE + 16)
    run.kept = run.kept[8:]
    with pytest.raises(AssertionError, match="what is kept is at 0x[0-9a-f]*8; it must be on 16 bytes"):
        run.run([64])


@pytest.mark.parametrize("D, slices, groups", [
    (64, [70, 186], 1), (64, [64, 256], 2), (64, [64, 286], 3), (128, [70, 186], 1), (128, [64, 286], 2)])  # fmt: skip
def test_it_has_no_races(emu, D, slices, groups):
    """Waits are seen in any one order. The second slice's d(q) has tiles of keys that are computed before those that are kept, and
    by a ring more of both than a block has at once."""
    library = cuda_emu.library(races=True)
    library.tp_error_message.restype = ctypes.c_char_p
    like = Attention(emu, BF16, 1, 1, D, sum(slices), kernel=WGMMA).run(slices)
    library.tp_cuda_attention_force(groups)
    library.tp_simt_set_order(3)
    try:
        run = Keeping(like, room(emu, 1, 1, D, slices), library).run(slices)
        assert min(run.tiles) > 0
    finally:
        library.tp_simt_set_order(0)
        library.tp_cuda_attention_force(0)
