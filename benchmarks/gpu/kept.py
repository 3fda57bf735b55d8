"""What wgmma's backward keeps of a slice's own pairs (cuda/attention_wgmma.h): is dS read again sooner there than made again?

dS takes 2 bytes of each pair, written once and read once, where two products of D are saved. A rank has room for it in the
workspace of its products, of as many heads as fit: that, none, and more, as a plan could give. Random numbers; the device's clock;
the median of the runs.
"""

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


QUESTIONS = [Question("attention kept", 20, kept, order=45)]
