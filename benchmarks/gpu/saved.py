"""What a long sequence's stage does not keep: attentions and FFNs made again slice by slice, weight gradients by groups of rows,
and backwards that go block by block, and make blocks again within them."""

import statistics
import time

import numpy as np
from gpu_check import Question, small, so_far

STEPS = 4  # the third and later ones by graphs
BEFORE, WITHIN = 2, 255  # B: R, as Program.save_memory numbers them


def engine_of(model, lengths, saves=(), whole=False, dtype="bf16", way=BEFORE):
    """An engine of one rank for one sequence in these slices, and the bytes that are predicted for it. way: of what saves say is
    made again."""
    import terapipe_c as tp
    from terapipe_c.backend import Backend
    from terapipe_c.engine import RankEngine, rank_memory

    program = tp.schedules.seq1f1b(1, 1, len(lengths))
    program = program if whole else program.split(pending=0)
    if any(saves):
        program = program.save_memory(bytes([way]), bytes(1))
    given = model, ((0, model.num_blocks),), [(1, list(lengths))], program.lower(False)
    where = Backend("cuda", dtype)
    saving = {"recompute": tuple(saves)} if any(saves) else {}
    return RankEngine(*given, 0, None, backend=where, **saving), rank_memory(*given, backend=where, **saving)[0]


def steps_of(engine, params, batches):
    """(losses and norms, seconds) of steps."""
    from gpu.training import HYPER

    engine.load(params)
    told, seconds = [], []
    for step, tokens in enumerate(batches):
        start = time.perf_counter()
        told.append(engine.run(tokens, step=step + 1, **HYPER)[:2])
        seconds.append(time.perf_counter() - start)
    return told, seconds


def batches_of(model, count):
    return np.random.default_rng(2).integers(0, model.vocab_size, (count, 1, model.block_size + 1)).astype(np.int32)


def blocks(model, *kinds):
    return tuple(block.kind in kinds for block in model.blocks)


def right():
    """Of every slicing, and whatever is made again, losses and norms of the same bits, near those of nothing recomputed; of whole
    backwards those of I and W; of R within them the same in less memory."""
    from gpu.training import small_model

    import terapipe_c as tp

    model, found = small_model(block_size=2048), {}
    params, T = tp.init_params(model, seed=1), model.block_size
    uneven = [T // 3, T - T // 3 - T // 4, T // 4]
    ffns, attentions, full = (blocks(model, *kinds) for kinds in (("ffn",), ("attention",), ("attention", "ffn")))
    ways = {"whole sequence": ([T], ffns), "halves": ([T // 2] * 2, attentions), "uneven": (uneven, full),
            "sixteenths": ([T // 16] * 16, ffns), "sixteenths of all": ([T // 16] * 16, full)}
    for dtype in ("float32", "bf16"):
        found[dtype] = told = {}
        for name, lengths, saves, whole, way in (
            *((name, *way, False, BEFORE) for name, way in ways.items()),
            ("whole backward", [T], ffns, True, BEFORE), ("whole backward of all", [T], full, True, BEFORE),
            ("R within B", [T], ffns, True, WITHIN), ("R within B of all", [T], full, True, WITHIN),
            ("nothing recomputed", [T], (), False, BEFORE), ("whole backward of all kept", [T], (), True, BEFORE),
        ):  # fmt: skip
            engine, predicted = engine_of(model, lengths, saves, whole, dtype, way)
            told[name] = {"losses_and_norms": steps_of(engine, params, batches_of(model, STEPS))[0], "bytes": predicted}
            so_far(found)
            assert engine.peak_memory_bytes == predicted, (name, engine.peak_memory_bytes, predicted)
            del engine
        of = {name: one["losses_and_norms"] for name, one in told.items()}
        wrong = [name for name in of if "kept" not in name and "nothing" not in name and of[name] != of["whole sequence"]]
        assert not wrong and of["whole backward of all kept"] == of["nothing recomputed"], (dtype, wrong, told)
        less = [told[f"R within B{of_all}"]["bytes"] / told[f"whole backward{of_all}"]["bytes"] for of_all in ("", " of all")]
        assert max(less) < 1, (dtype, less, told)
        told["R within B, of the bytes of R before it"] = less
        far = max(abs(a / b - 1) for a, b in zip(np.ravel(of["whole sequence"]), np.ravel(of["nothing recomputed"]), strict=True))
        told["apart from nothing recomputed"] = float(far)
        assert far < (1e-5 if dtype == "float32" else 5e-3), told
    apart = {dtype: one["apart from nothing recomputed"] for dtype, one in found.items()}
    return found | {"headline": f"{len(ways)} ways, whole backwards and R within them equal; apart from nothing recomputed by "
                                f"{apart['float32']:.0e} (float32), {apart['bf16']:.0e} (bf16)"}  # fmt: skip


def speed():
    """A step of GPT-2 124M's shape on one long sequence in 16 slices: all kept, FFNs made again, and all, in turn; the same of the
    whole sequence, also with R within B; their bytes."""
    from gpu.training import small_model

    import terapipe_c as tp

    T = 16 if small() else 16384
    model = small_model() if small() else tp.GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, block_size=T)
    params, lengths = tp.init_params(model, seed=1), [model.block_size // 16] * 16
    of = {"all kept": (), "ffn": blocks(model, "ffn"), "full": blocks(model, "attention", "ffn")}
    ways = {name: (lengths, saves) for name, saves in of.items()}
    ways |= {f"whole, {name}": ([model.block_size], saves, True) for name, saves in of.items()}
    ways |= {f"whole, {name} within B": (*ways[f"whole, {name}"], "bf16", WITHIN) for name in ("ffn", "full")}
    found = {name: {"rounds_s": []} for name in ways}
    for _ in range(2):
        for name, way in ways.items():
            engine, _ = engine_of(model, *way)
            seconds = steps_of(engine, params, batches_of(model, 4 if small() else 8))[1]
            found[name]["rounds_s"].append(statistics.median(seconds[3:]))
            found[name]["bytes"] = engine.peak_memory_bytes
            so_far(found)
            del engine
    for one in found.values():
        one["step_s"] = statistics.median(one["rounds_s"])
    told = []
    for name in (name for name in ways if "kept" not in name):
        kept = found["whole, all kept" if "whole" in name else "all kept"]
        ratio, less = (found[name][what] / kept[what] for what in ("step_s", "bytes"))
        told.append(f"{name}: a step {ratio:.3f} times as long in {less:.2f} of the memory")
    return found | {"headline": "; ".join(told)}


QUESTIONS = [
    Question("room for one slice", 40, right, order=16),
    Question("room for one slice, speed", 150, speed, order=60, named=True),
]
