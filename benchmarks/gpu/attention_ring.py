"""Attention by wgmma with warpgroups apart (cuda/attention_ring.cu, attention_ring_backward.cu): which variant is fastest.

Of each the bits are checked first: a sequence whole and in ragged slices, twice, beside the kernels of attention_wgmma.cu, whose
bits most variants have. FLOPs are counted as in attention.py, which see. Variants are asked for by groups=: 3 + 2 n, a block to
each tile, and 4 + 2 n, a block to each SM.
"""

from gpu.attention import BF16, Sequence, clock, no_wgmma, peers, same
from gpu_check import Question, small, so_far

FORWARD = {64: ["3 warpgroups, 128 keys", "2 warpgroups, 128 keys", "3 warpgroups, 64 keys"],
           128: ["2 warpgroups in turns", "2 warpgroups", "1 warpgroup"]}  # fmt: skip
BACKWARD = {64: ["2 warpgroups, ahead", "2 warpgroups, free", "3 warpgroups"], 128: ["2 warpgroups in turns", "2 warpgroups, free"]}


def variants(names):
    """(code, name); the first is what runs now."""
    yield 0, "now"
    yield 1, "now, 1 warpgroup a block"
    for n, name in enumerate(names):
        yield 3 + 2 * n, name
        yield 4 + 2 * n, f"{name}, a block to an SM"


def checked(sequence, forward, code, want):
    """Bits of the arrays that a pass writes: whole and in slices, twice."""
    T = sequence.shape[3]
    cut = [T // 4, T // 2 - 7, T // 4 + 7]
    written = lambda: (sequence.o, sequence.lse) if forward else (sequence.delta, sequence.dqkv)  # noqa: E731
    run = sequence.forward if forward else sequence.backward
    got = []
    for slices in ([T], cut, cut):
        for array in written():
            array.fill_(float("nan"))
        run(slices, code)
        got.append([array.clone() for array in written()])
    error = max(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in zip(got[0], want, strict=True))
    told = {"slices": same(got[0], got[1]), "again": same(got[1], got[2]), "as now": same(got[0], want), "error": error}
    other = forward and sequence.shape[2] <= 64 and code < 7  # tiles of 128 keys in place of 64
    told["right"] = told["slices"] and told["again"] and error < 5e-3 and (other or told["as now"])
    return got[0], told


def measure(forward, D, H, T, tokens, row):
    B = tokens // T
    flops = (4e-12 if forward else 1e-11) * D * B * H * T * (T + 1) / 2
    sequence = Sequence(BF16, B, H, D, T, wgmma=True)
    run = sequence.forward if forward else sequence.backward
    sequence.forward([T])
    want = None
    for code, name in variants((FORWARD if forward else BACKWARD)[D]):
        if want is None:
            run([T])
            want = [x.clone() for x in ((sequence.o, sequence.lse) if forward else (sequence.delta, sequence.dqkv))]
        else:
            row["checks"][name] = checked(sequence, forward, code, want)[1]
        row["tflops"][name] = {
            size: round(flops / clock(lambda s=size, c=code: run([s] * (T // s), c), 7), 1)
            for size in ((T // 2, T) if small() else (256, 512, 1024, T))}  # fmt: skip
        so_far(row)


def speed(forward):
    """16384 tokens in sequences of 2k to 8k, in slices and whole: every variant, the kernels now, and cuDNN's on the whole."""
    if why := no_wgmma():
        return {"headline": f"not measured: {why}"}
    found, tokens, heads = [], 64 if small() else 16384, []
    for D, H in ((128, 1), (64, 1)) if small() else ((128, 16), (64, 32)):
        for T in (64,) if small() else (2048, 4096, 8192):
            row = {"head_dim": D, "tokens": T, "checks": {}, "tflops": {}}
            found.append(row)
            measure(forward, D, H, T, tokens, row)
            name, ahead, back = next(peers(tokens // T, H, D, T))
            if back is not None:
                flops = (4e-12 if forward else 1e-11) * D * (tokens // T) * H * T * (T + 1) / 2
                row["cudnn"] = round(flops / clock(ahead if forward else back, 7), 1)
            best = {s: max((r[s], n) for n, r in row["tflops"].items()) for s in row["tflops"]["now"]}
            row["best"] = {s: [n, rate, round(rate / row["cudnn"], 3) if "cudnn" in row else None] for s, (rate, n) in best.items()}
            heads.append(f"hd{D} T{T} " + ", ".join(f"{s}: {rate} {share} ({n})" for s, (n, rate, share) in row["best"].items()))
            so_far({"shapes": found, "heads": heads})
    wrong = [(row["head_dim"], row["tokens"], n) for row in found for n, told in row["checks"].items() if not told["right"]]
    told = {"headline": f"{len(wrong)} wrong; of cuDNN's: " + "; ".join(heads), "shapes": found, "wrong": wrong}
    so_far(told)
    assert not wrong, wrong
    return told


def forward():
    return speed(True)


def backward():
    return speed(False)


forward.__doc__ = backward.__doc__ = speed.__doc__
QUESTIONS = [Question("attention ring forward", 30, forward, order=47), Question("attention ring backward", 40, backward, order=48)]
