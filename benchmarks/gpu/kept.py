"""What wgmma's backward keeps of a slice's own pairs (cuda/attention_wgmma.h): is dS read again sooner there than made again?

dS takes 2 bytes of each pair, written once and read once, where two products of D are saved. A rank has room for it in the
workspace of its products, of as many heads as fit: that, none, and more, as a plan could give. Random numbers; the device's clock;
the median of the runs.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from gpu_check import Question, in_time, small, so_far

MIB = 1 << 20
ROOMS = (0, 32, 80, 160, 320)  # MiB; 32: a rank's
MOST = 4 << 30  # bytes: room for all heads is asked for up to here
TOKENS = 128 if small() else 16384
# D, heads, tokens of a sequence: GPT-2 124M's, then those of "attention speed", and longer ones.
SHAPES = [(64, 1, 128)] if small() else [(64, 12, 1024), (64, 32, 8192), (128, 16, 8192), (64, 32, 2048), (128, 16, 2048),
                                         (64, 32, 16384), (128, 16, 16384)]  # fmt: skip


def sizes_of(T):
    """Slices of a sequence, the largest first: whole ones keep most of their pairs."""
    return [size for size in ((128, 64) if small() else (2048, 1024, 512, 256)) if size <= T]


def bytes_of(heads, size):
    """For dS of all heads of a slice that begins at a multiple of 64."""
    n = size // 64
    return heads * n * (n + 1) // 2 * 64 * 64 * 2


def rooms_of(every):
    """{name: bytes} to try, the last with room for all heads where that is not too much."""
    rooms = {f"{room} MiB": room * MIB for room in ROOMS if room * MIB < every}
    return rooms | ({"all": every} if every <= MOST else {})


def by_rooms(sequence, slices):
    """({room: seconds of the backward}, whether the bits of the last room are those of none)."""
    from gpu.attention import clock, same

    told, size = {}, slices[0]
    rooms = rooms_of(bytes_of(sequence.shape[0] * sequence.shape[1], size))
    for name, room in rooms.items():
        sequence.kept = sequence.kept.new_empty(room)
        told[name] = clock(lambda: sequence.backward(slices), 5)
        if room == 0:
            want = sequence.dqkv.clone()
    equal = same([sequence.dqkv], [want])
    sequence.kept = sequence.kept.new_empty(0)
    told["0 MiB again"] = clock(lambda: sequence.backward(slices), 5)  # how far the clock has gone meanwhile
    return told, equal


def kept():
    """Seconds of wgmma's backward with none of dS kept, with a rank's room, 80 to 320 MiB, and all; by slices of 256 to 2048."""
    from gpu.attention import BF16, Sequence, no_wgmma

    if why := no_wgmma():
        return {"headline": f"not measured: {why}"}
    found = []
    for D, H, T in SHAPES:
        shape = (TOKENS // T, H, D, T)
        sequence = Sequence(BF16, *shape, wgmma=True, room=0)
        sequence.forward([T])
        for size in sizes_of(T):
            if in_time() < 3.0:
                return summed(found) | {"told": "no time was left for the rest"}
            seconds, equal = by_rooms(sequence, [size] * (T // size))
            found.append(dict(zip(("batch", "heads", "head_dim", "tokens"), shape, strict=True)) |
                         {"slices_of": size, "all_bytes": bytes_of(shape[0] * H, size), "seconds": seconds, "same_bits": equal})
            so_far(summed(found))
        del sequence
    wrong = [row for row in found if not row["same_bits"]]
    assert not wrong, f"what is kept shows in the bits of {wrong}"
    return summed(found)


def summed(found):
    """Of each room, the seconds beside those of nothing kept."""
    shares = {}
    for row in found:
        for room, seconds in row["seconds"].items():
            shares.setdefault(room, []).append(seconds / row["seconds"]["0 MiB"])
    told = ", ".join(f"{room} {min(of):.3f} to {max(of):.3f}" for room, of in sorted(shares.items()) if room != "0 MiB")
    return {"headline": f"of the seconds with nothing kept: {told}; {len(found)} shapes", "shapes": found}


# ---- fetched ahead -----------------------------------------------------------------------------------------------------------

# Tiles that are fetched ahead where warpgroups are apart, and where one does all, and whether behind a tile's products
# (attention_wgmma.h); the first are the package's. By ptxas (13.0, sm_90a) none of these spills, nor takes more registers: of one
# warpgroup 156 (D = 64), 210 to 222 (D = 128).
AHEAD = [(3, 0, 0), (5, 1, 0), (3, 1, 1), (5, 3, 1)]
# D, heads, tokens, slices of
FETCHED = [(64, 1, 128, 128)] if small() else [
    (64, 12, 1024, 1024), (64, 12, 1024, 256), (64, 32, 2048, 1024), (64, 32, 8192, 1024),
    (128, 16, 2048, 1024), (128, 16, 8192, 1024), (128, 16, 8192, 256)]  # fmt: skip


def built():
    """A library for each of AHEAD; without a GPU the emulator's, by which all are the package's."""
    if small():
        import cuda_emu

        return [cuda_emu.library() for _ in AHEAD]
    import gpu_library

    def build(ahead):
        defines = [f"-DTP_CUDA_KEPT_{of}={n}" for of, n in zip(("AHEAD", "AHEAD_ALONE", "BEHIND"), ahead, strict=True)]
        return gpu_library.build("90a", "ahead-{}-{}-{}".format(*ahead), gpu_library.ATTENTION, defines)

    gpu_library.toolkit("90a")  # once, for all threads
    with ThreadPoolExecutor(len(AHEAD)) as pool:
        return [ctypes.CDLL(str(path)) for path in pool.map(build, AHEAD)]


def backward_by(library, sequence, slices, groups):
    """The backward of benchmarks/gpu/attention.py's sequence, by a library's kernels."""
    import torch

    B, H, D, T = sequence.shape
    step, stream = H * D * 2, torch.cuda.current_stream().cuda_stream if sequence.device == "cuda" else 0
    qkv, dqkv = ([array.data_ptr() + i * step for i in range(3)] for array in (sequence.qkv, sequence.dqkv))
    others = (x.data_ptr() for x in (sequence.o, sequence.d_o, sequence.lse, sequence.delta))
    arrays = (*qkv, *others, *dqkv, sequence.kept.data_ptr(), sequence.kept.numel())
    library.tp_cuda_attention_force(groups)
    at = T
    for rows in reversed(slices):
        at -= rows
        shape = np.array([B, H, D, rows, at, T, 3 * H * D, H * D], np.int64)  # tp_attention
        status = library.tp_cuda_attention_backward(stream, 1, 1, 132, shape.ctypes.data, *arrays)
        if status != 0:
            raise RuntimeError(library.tp_error_message().decode())


def ahead():
    """Seconds of wgmma's backward, dS of all heads kept, by how many tiles of it are fetched ahead; every kernel, 7 shapes."""
    from cuda_launchers import declare
    from gpu.attention import BF16, Sequence, clock, no_wgmma, same

    if why := no_wgmma():
        return {"headline": f"not measured: {why}"}
    libraries, found = [declare(library) for library in built()], []
    for D, H, T, size in FETCHED:
        shape, slices = (TOKENS // T, H, D, T), [size] * (T // size)
        sequence = Sequence(BF16, *shape, wgmma=True, room=bytes_of(TOKENS // T * H, size))
        for groups in (1, 2, 3) if D <= 64 else (1, 2):
            if in_time() < 3.0:
                return fetched(found) | {"told": "no time was left for the rest"}
            sequence.run(slices, groups)
            want, seconds, equal = sequence.dqkv.clone(), {}, True
            for library, (apart, alone, behind) in zip(libraries, AHEAD, strict=True):
                name = f"{alone if groups == 1 else apart} ahead{', behind' if behind else ''}"
                sequence.dqkv.fill_(float("nan"))
                seconds[name] = clock(partial(backward_by, library, sequence, slices, groups), 9)
                equal = equal and same([sequence.dqkv], [want])
            found.append(dict(zip(("batch", "heads", "head_dim", "tokens"), shape, strict=True)) |
                         {"slices_of": size, "groups": groups, "seconds": seconds, "same_bits": equal})
            so_far(fetched(found))
    assert all(row["same_bits"] for row in found), [row for row in found if not row["same_bits"]]
    return fetched(found)


def fetched(found):
    """Of each kernel, the seconds beside those of the package's way."""
    shares = {}
    for row in found:
        first, *others = row["seconds"].items()
        for name, seconds in others:
            shares.setdefault((row["head_dim"], row["groups"], name), []).append(seconds / first[1])
    told = "; ".join(f"D {D} by {groups}: {name} {min(of):.3f} to {max(of):.3f}" for (D, groups, name), of in shares.items())
    return {"headline": f"of the package's seconds: {told}", "shapes": found}


QUESTIONS = [Question("attention kept", 20, kept, order=45),
             Question("attention kept, ahead", 60, ahead, order=70, warm=built, named=True)]
