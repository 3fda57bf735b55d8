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
    address,
    aligned,
    from_bf16,
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
    """In so many bytes, that a call finds full of NaN; says how many tiles were written."""

    def __init__(self, emu, B, H, D, T, kept_bytes, gap=0):
        super().__init__(emu, BF16, B, H, D, T, gap, kernel=WGMMA)
        self.kept, self.tiles = aligned(kept_bytes, np.uint8), []

    def call(self, name, *rest):
        self.kept[:] = POISON
        super().call(name, *rest)
        if name == "backward":
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


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("B, H, D, slices, gap", SHAPES)
def test_the_bits_are_those_of_nothing_kept(emu, groups, B, H, D, slices, gap):
    emu.tp_cuda_attention_force(groups)
    want = Attention(emu, BF16, B, H, D, sum(slices), gap, kernel=WGMMA).run(slices)
    got = Keeping(emu, B, H, D, sum(slices), room(emu, B, H, D, slices), gap).run(slices)
    assert got.bits() == want.bits()


@pytest.mark.parametrize("D, groups", KERNELS)
def test_no_slicing_or_order_shows(emu, D, groups):
    """Slices of whole tiles, of parts of tiles, within one tile; more tiles than a block has at once, or fetches ahead."""
    emu.tp_cuda_attention_force(groups)
    want = Attention(emu, BF16, 1, 2, D, 470, kernel=WGMMA).run([470]).bits()
    tiles = {(470,): [36], (64, 128, 278): [15, 3, 1], (30, 420, 20): [0, 28, 1], (256, 10, 204): [6, 1, 10]}
    for (slices, wanted), order in zip(tiles.items(), (0, 5, 2, CHANCE[0]), strict=True):
        emu.tp_simt_set_order(order)
        run = Keeping(emu, 1, 2, D, 470, room(emu, 1, 2, D, slices)).run(slices)
        assert run.tiles == [2 * n for n in wanted], slices
        assert run.bits() == want, slices


@pytest.mark.parametrize("D, groups", KERNELS)
def test_heads_that_do_not_fit_are_computed_twice(emu, D, groups):
    emu.tp_cuda_attention_force(groups)
    want = Attention(emu, BF16, 3, 1, D, 200, kernel=WGMMA).run([140, 60]).bits()
    for room_for, kept in ((3 * TILE - 1, 0), (6 * TILE, 1), (13 * TILE, 2)):
        run = Keeping(emu, 3, 1, D, 200, room_for).run([140, 60])
        assert run.bits() == want and run.tiles[1] == 6 * kept, room_for


@pytest.mark.parametrize("D, groups", KERNELS)
def test_what_is_kept_stays_in_its_room(emu, D, groups):
    emu.tp_cuda_attention_force(groups)
    slices = [100, 160]
    run = Keeping(emu, 2, 1, D, 260, room(emu, 2, 1, D, slices))
    arrays = [run.qkv, run.dqkv, run.o, run.d_o, run.lse, run.delta, run.kept]
    try:
        for array in arrays:
            assert emu.tp_simt_range_add(address(array), ctypes.c_size_t(array.nbytes)) == 0
        run.run(slices)
    finally:
        for array in arrays:
            emu.tp_simt_range_remove(address(array))
    assert run.tiles == [2 * 6, 2 * 3]


def test_room_that_is_not_on_16_bytes_is_refused(emu):
    run = Keeping(emu, 1, 1, 64, 64, TILE + 16)
    run.kept = run.kept[8:]
    with pytest.raises(AssertionError, match="what is kept is at 0x[0-9a-f]*8; it must be on 16 bytes"):
        run.run([64])


@pytest.mark.parametrize("D, slices, groups", [
    (64, [130, 125], 1), (64, [320], 2), (64, [450], 3), (128, [130, 125], 1), (128, [450], 2)])  # fmt: skip
def test_it_has_no_races(D, slices, groups):
    library = cuda_emu.library(races=True)
    library.tp_error_message.restype = ctypes.c_char_p
    library.tp_cuda_attention_kept_bytes.restype = ctypes.c_int64
    library.tp_cuda_attention_force(groups)
    try:
        for order in (3, CHANCE[0]):
            library.tp_simt_set_order(order)
            run = Keeping(library, 1, 1, D, sum(slices), room(library, 1, 1, D, slices)).run(slices)
            assert max(run.tiles) > 0
    finally:
        library.tp_simt_set_order(0)
        library.tp_cuda_attention_force(0)
