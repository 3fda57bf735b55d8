"""One sequence in slices on the CUDA stage, its blocks made again or FFNs swapped: room for one slice and what its W leaves, the
same bits in every cut. Groups of weight gradients have 32 rows here, on a GPU 1024."""
import ctypes
import functools
import itertools
import re

import numpy as np
import pytest
import reference as ref
from test_cuda_stage import CUDA, HYPER, LOSS, NORM, emulation, partition_of, problem, ranks_do  # noqa: F401

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import dimensions, rank_memory, saves_bytes
from terapipe_c.planning.judge import Judge, Savings, saving

GROUP = 32
UNEVEN = [5, 30, 7, 1, 24, 3, 33]      # below a group and above one; most have no whole one
TOKENS = sum(UNEVEN)


@pytest.fixture(autouse=True)
def groups(emulation):  # noqa: F811
    emulator = ctypes.CDLL(emulation.__file__)
    emulator.tp_emu_set_weight_rows(ctypes.c_int64(GROUP))
    yield
    emulator.tp_emu_set_weight_rows(ctypes.c_int64(0))


KINDS = {"attention": ("attention",), "ffn": ("ffn",), "full": ("attention", "ffn")}


def blocks_of(model, recompute):
    return tuple(block.kind in KINDS[recompute] for block in model.blocks)


def ffns_of(model):
    return blocks_of(model, "ffn")


def lowered(program, model, partition, *savings, keys=(), waits=False):
    made = saving(program, model, partition, Savings(*savings), keys, waits, CUDA["bf16"].keeps_keys)
    return made.lower(model.tie_weights and program.num_stages > 1)


def trained(model, partition, slicing, program, params, tokens, dtype="float32", **saves):
    """What ranks say of three steps (the last by graphs) and an evaluation, every tensor, and the bytes, as predicted."""

    def work(engine):
        done = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(3)]
        return (done, engine.evaluate(tokens)), engine.export("params"), engine.peak_memory_bytes

    parts = ranks_do(model, partition, slicing, program, work, params, dtype, **saves)
    assert [part[2] for part in parts] == rank_memory(model, partition, slicing, program, backend=CUDA[dtype], **saves)
    return parts[0][0], {name: array for part in reversed(parts) for name, array in part[1].items()}, [part[2] for part in parts]


@functools.cache
def alone(tie, dtype, *batches):
    """Whole sequences on one rank, FFNs made again: a problem, and what it should come to, whatever else is."""
    model, params, tokens = problem(sum(batches), TOKENS, tie_weights=tie)
    partition, program = partition_of(model, []), tp.schedules.gpipe(1, len(batches)).split(pending=0)
    found = trained(model, partition, [(batch, [TOKENS]) for batch in batches], lowered(program, model, partition, ffns_of(model)),
                    params, tokens, dtype, recompute=ffns_of(model))
    return model, params, tokens, found


def same(right, found):
    assert found[0] == right[0] and found[1].keys() == right[1].keys()
    for name, array in right[1].items():
        assert np.array_equal(array, found[1][name]), name


@pytest.mark.parametrize("schedule, tie, dtype, recompute", [
    ("gpipe", True, "bf16", "full"), ("one_f_one_b", False, "float32", "ffn"), ("seq1f1b", True, "float32", "attention"),
    ("interleaved", False, "float32", "full"), ("looped_bfs", True, "bf16", "attention")])
def test_what_there_is_of_one_slice_alone_does_not_show_in_the_bits(schedule, tie, dtype, recompute):
    """Nor when W waits, so that nothing is of one slice alone."""
    model, params, tokens, right = alone(tie, dtype, 1, 1)
    chunks, again = 2 if schedule in ("looped_bfs", "interleaved") else 1, blocks_of(model, recompute)
    partition = partition_of(model, [1, 2, 4] if chunks == 2 else [3])
    program, slicing = getattr(tp.schedules, schedule)(2, 2, *[2] * (chunks - 1), len(UNEVEN)), [(1, UNEVEN), (1, UNEVEN[::-1])]
    made = (lowered(program.split(pending=pending), model, partition, again, keys=slicing) for pending in (0, 99))
    at_once, later = (trained(model, partition, slicing, one, params, tokens, dtype, recompute=again) for one in made)
    same(right, at_once)
    same(right, later)
    assert all(a < b for a, b in zip(at_once[2], later[2], strict=True))


@pytest.mark.parametrize("lengths, recompute", [
    ([32, 32, 32, 7], "ffn"), ([7, 32, 32, 32], "full"), ([1] * 8 + [95], "full"), ([16] * 6 + [7], "attention"),
    ([102, 1], "full"), ([1, 102], "attention"), ([40, 40, 23], "full")], ids=str)
def test_every_slicing_has_the_same_bits(lengths, recompute):
    """Beside a micro-batch of two whole sequences, which are summed together, on ranks of which one has an attention alone."""
    model, params, tokens, right = alone(True, "float32", 1, 2)
    partition, again = partition_of(model, [1, 2]), blocks_of(model, recompute)
    program = tp.schedules.seq1f1b(3, 2, [len(lengths), 1]).split(pending=0)
    program = program.save_memory(bytes(2 * any(again[a:e]) for a, e in partition), bytes(3)).lower(True)
    same(right, trained(model, partition, [(1, lengths), (2, [TOKENS])], program, params, tokens, recompute=again))


@pytest.mark.parametrize("schedule, ahead, dtype", [("seq1f1b", None, "bf16"), ("gpipe", 0, "float32"), ("seq1f1b", 1, "float32"),
                                                    ("gpipe", 3, "float32")])
def test_ffns_that_swap_have_the_same_bits(schedule, ahead, dtype):
    """Where forward takes the place that SI brings to, too, and beside FFNs and attentions that are made again."""
    model, params, tokens, right = alone(True, dtype, 1, 1)
    partition, ffns = partition_of(model, [3]), [i for i, ffn in enumerate(ffns_of(model)) if ffn]
    program = getattr(tp.schedules, schedule)(2, 2, len(UNEVEN)).split(pending=0)
    for swapped in (ffns, ffns[:1]):
        attentions = {1} if len(swapped) < len(ffns) else set()
        again = tuple(i in attentions or (i in ffns and i not in swapped) for i in range(model.num_blocks))
        swap, slicing = tuple(i in swapped for i in range(model.num_blocks)), [(1, UNEVEN), (1, UNEVEN[::-1])]
        made = lowered(program, model, partition, again, swap, (), ahead, keys=slicing)
        same(right, trained(model, partition, slicing, made, params, tokens, dtype, recompute=again, swap=swap))


def test_what_a_w_leaves_is_there_while_another_micro_batch_goes_forward():
    """In the very place that its own swapped FFNs came back to: forward takes the first rows of that."""
    model, params, tokens = problem(2, 24)
    forward = [" ".join(f"0F{q}.{s} 0SO{q}.{s}" for s in range(3)) for q in range(2)]
    back = [f"0SI{q}.{s} 0B{q}.{s}" for q in range(2) for s in (2, 1, 0)]
    swap, partition, found = ffns_of(model), partition_of(model, []), []
    for order in ([*forward, *back], [forward[0], *back[:2], forward[1], *back[2:]]):
        program = tp.Program.parse(" ".join(order)).lower()
        found.append(trained(model, partition, [(1, [4, 10, 10])] * 2, program, params, tokens, swap=swap))
    same(*found)


def test_where_attentions_swap_sums_are_of_whole_sequences():
    """With the bits of nothing saved, though another block is made again slice by slice."""
    model, params, tokens = problem(1, 40, n_embd=8)
    program, cut, found = tp.schedules.seq1f1b(1, 1, 2).split(pending=0), [(1, [7, 33])], []
    for again, swap in (((), ()), ((0, 0, 1, 1, 0, 0), (0, 1, 0, 0, 0, 0)), ((0, 0, 1, 1, 0, 0), ())):
        made = program.save_memory(bytes([2 * any(again)]), bytes([any(swap)])).lower()
        found.append(trained(model, partition_of(model, []), cut, made, params, tokens, recompute=again, swap=swap))
    same(*found[:2])
    assert not np.array_equal(found[0][1]["transformer.wte.weight"], found[2][1]["transformer.wte.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_gradients_agree_with_the_oracle(dtype):
    model, params, tokens = problem(1, TOKENS, tie_weights=False)
    partition, again = partition_of(model, [4]), blocks_of(model, "full")
    program = lowered(tp.schedules.seq1f1b(2, 1, len(UNEVEN)).split(pending=0), model, partition, again, keys=[(1, UNEVEN)])

    def work(engine):
        return engine.run(tokens, step=1, update=False)[0], engine.export("grads")

    parts = ranks_do(model, partition, [(1, UNEVEN)], program, work, params, dtype, recompute=again)
    expected_loss, expected = ref.loss_and_grads(model, params, tokens)
    assert abs(parts[-1][0] / expected_loss - 1) <= LOSS[dtype]
    found = parts[0][1] | parts[1][1]
    for name, right in expected.items():
        assert np.linalg.norm(found[name] - right) <= NORM[dtype] * np.linalg.norm(right), name


def room_of(lengths):
    """Rows of a slice with those that are left to it, from the end of the sequence in whole groups: at most."""
    total, end, most = sum(lengths), sum(lengths), 0
    waits = total                                       # below this row none has been summed
    for length in reversed(lengths):
        end -= length
        most = max(most, waits - end)
        waits = end + (total - end) % GROUP
    return most


@pytest.mark.parametrize("lengths", [[16] * 12, [32] * 6, [12] * 16, [50, 46, 96], [2, 190]], ids=str)
def test_one_slice_of_a_long_sequence_is_all_that_is_made_again(lengths):
    """To the byte: FFNs' normalised inputs, h and g in a place to go forward in and one to go back in; what I leaves to W, for
    which h does not wait; and attentions' normalised inputs and outputs, but not their queries, keys and values."""
    model, *_ = problem(1, 192, n_layer=3, n_embd=32)
    partition, slicing, where = partition_of(model, [4]), [(1, lengths)], CUDA["float32"]
    program, row = tp.schedules.seq1f1b(2, 1, len(lengths)).split(pending=0), 4 * 32
    kept = rank_memory(model, partition, slicing, program.lower(True), backend=where)
    for recompute, kinds in KINDS.items():
        again = blocks_of(model, recompute)
        made = rank_memory(model, partition, slicing, program.save_memory(bytes([2, 2]), bytes(2)).lower(True), backend=where,
                           recompute=again)
        for rank, (attentions, ffns, between) in enumerate(((2, 1, 3), (1, 2, 3))):
            less = ffns * 5 + attentions * 4 + between + ("ffn" in kinds) * ffns * 5 + ("attention" in kinds) * attentions * 2
            less = less * (192 - room_of(lengths)) + ("ffn" in kinds) * ffns * 4 * (192 - max(lengths))
            assert kept[rank] - made[rank] == row * (less - (9 * ("ffn" in kinds) + 2 * ("attention" in kinds)) * max(lengths))


@pytest.mark.parametrize("lengths", [[2, 190], [16] * 12, [50, 46, 96], [170, 22]], ids=str)
def test_ffns_that_come_back_where_they_went_forward_take_no_more_than_whole_micro_batches(lengths):
    """To the byte. What W puts by is beside a slice's own rows; but where a forward comes between two slices, it is behind
    the rows of the longest, which are what that forward takes: of what comes back alone, and not of gradients."""
    model, *_ = problem(2, 192, n_layer=3, n_embd=32)
    ffns, row, last = ffns_of(model), 4 * 32, len(lengths) - 1
    forward = [" ".join(f"0F{q}.{s} 0SO{q}.{s}" for s in range(last + 1)) for q in range(2)]
    first, *others = [f"0SI{q}.{s} 0B{q}.{s}" for q in range(2) for s in range(last, -1, -1)]

    def taken(saves, *order):
        text = " ".join(order) if saves else re.sub("0S[IO][0-9.]+", "", " ".join(order))
        return rank_memory(model, partition_of(model, []), [(1, lengths)] * 2, tp.Program.parse(text).lower(),
                           backend=CUDA["float32"], swap=ffns if saves else ())[0]

    apart, between = [*forward, first, *others], [forward[0], first, forward[1], *others]
    room, longest = room_of(lengths), max(lengths)
    left = max(sum(lengths[s:]) % GROUP for s in range(1, last + 1))
    less = 3 * (2 * 9 * 192 - 5 * room - 4 * longest) + (3 * (5 + 4) + 7) * (192 - room)
    assert taken(False, *apart) - taken(True, *apart) == row * less
    assert taken(True, *between) - taken(True, *apart) == row * 3 * 5 * (longest + left - room)


@pytest.mark.parametrize("recompute", ["ffn", "full", "swapped"])
def test_a_plan_knows_which_slice_makes_weight_gradients(recompute):
    """Of 3000 tokens in groups of 1024: with the slice that a group begins in, and the head's with the first. In C as in Python.
    Where attentions are swapped, all with the first."""
    line = {phase: [(n, n, 0, 1e-4 + 1e-6 * n) for n in (8, 16, 32)] for phase in "FIW"}
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=64, block_size=3000, tie_weights=False)
    costs = tp.CostModel.from_measurements(dict.fromkeys(("attention", "ffn", "head"), line), overhead_s=1e-6, model=model,
                                           seq_len=3000, micro_batch=2, backend="cuda", dtype="bf16")
    slicing, cut = ((1, (1000, 1500, 500)), (1, (3000,)), (2, (1500, 1500)), (1, (100, 2900))), ((0, 3), (3, 6))
    saves = blocks_of(model, recompute if recompute in KINDS else "full")
    savings = Savings(saves) if recompute in KINDS else Savings((), saves, (0.0, 0.0))
    judge = Judge(model, costs, 2, 1, None)
    found = judge.judge("1f1b", cut, slicing, 0, savings)
    assert found.seconds == pytest.approx(judge.lowered(found).simulate(judge.full_durations(found)).makespan_s, rel=1e-12)
    W = judge.durations(cut, slicing, savings)["W"]

    def of(tokens, kind="ffn", batch=1):
        return costs.block_seconds(kind, "W", tokens, 0, batch)

    for stage, (blocks, heads) in enumerate(((2, 0), (2, 1))):
        each = [(blocks + heads) * of(n, batch=b) for n, b in ((3000, 1), (3000, 1), (3000, 2), (3000, 1))]
        right = [each[0] + 3e-6, 0, 0, each[1] + 1e-6, each[2] + 2e-6, 0, each[3] + 2e-6, 0]
        if recompute != "swapped":
            top = heads * of(3000, "head") + 1e-6
            right[:3] = blocks * of(1976) + top, blocks * of(1024) + 1e-6, 1e-6
            right[6:] = blocks * of(952) + top, blocks * of(2048) + 1e-6
        assert W[stage] == pytest.approx(right)


@pytest.mark.parametrize("reproducible", [True, False])
def test_no_product_is_looked_for_within_a_step(reproducible, emulation):  # noqa: F811
    """Whose rows lie elsewhere in a slice that is made again than in the forward, and of every number of rows that a W takes."""
    model, params, tokens = problem(1, TOKENS, n_embd=20, n_head=2)     # rows of 80 bytes: of other alignments, one by one
    partition, again, calls = partition_of(model, []), blocks_of(model, "full"), [ctypes.c_int64() for _ in range(3)]
    program = lowered(tp.schedules.seq1f1b(1, 1, len(UNEVEN)).split(pending=0), model, partition, again, keys=[(1, UNEVEN)])
    emulator = ctypes.CDLL(emulation.__file__)

    def asked():
        emulator.tp_emu_cublaslt_calls(*map(ctypes.byref, calls))
        return calls[0].value

    def work(engine):
        before = asked()
        engine.run(tokens, step=1, **HYPER)
        return before, asked()

    (before, after), = ranks_do(model, partition, [(1, UNEVEN)], program, work, params, recompute=again, reproducible=reproducible)
    assert before == after > 0


def test_a_bound_is_below_a_sequence_in_slices():
    """Of the fullest rank; what products work in is beside it."""
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=500, block_size=512, tie_weights=False)
    slicing, ends, where = [(1, [16] * 32)], [0, 2, 4], CUDA["float32"]
    partition = list(itertools.pairwise(ends))
    for recompute in KINDS:
        again = blocks_of(model, recompute)
        program = lowered(tp.schedules.seq1f1b(2, 1, 32).split(pending=0), model, partition, again, keys=slicing)
        taken = max(rank_memory(model, partition, slicing, program, backend=where, recompute=again)) - (32 << 20)
        for unit in (0, 16):
            least = _core.least_memory(dimensions(model), (512, 1, slicing), unit, 1, 2, [0, 1], [1, 1], 1, 1,
                                       saves=saves_bytes(again), partition=ends, **where.arguments)
            assert 0.85 * taken < least <= taken


MIXED = {"one whole": [(1, [4096]), *[(1, [1024] * 4)] * 3], "long and short": [(1, [2900, 300, 596, 300])] * 3,
         "even": [(1, [512] * 8)] * 3, "sequences": [(2, [3000, 1096]), (2, [1096, 3000])], "many": [(1, [512] * 8)] * 9}


@pytest.mark.parametrize("recompute", ["attention", "full"])
@pytest.mark.parametrize("slicing", MIXED.values(), ids=MIXED)
def test_attentions_are_made_again_in_the_way_that_takes_less(slicing, recompute, emulation):  # noqa: F811
    """In groups of a GPU's 1024 rows, which planners know."""
    ctypes.CDLL(emulation.__file__).tp_emu_set_weight_rows(ctypes.c_int64(0))
    counts, where = [len(lengths) for _, lengths in slicing], CUDA["bf16"]
    for layers, cuts, schedule in ((1, [1, 2], "one_f_one_b"), (3, [], "gpipe"), (2, [3], "gpipe")):
        model, *_ = problem(1, 4096, n_layer=layers, n_embd=64)
        partition, again, ranks = partition_of(model, cuts), blocks_of(model, recompute), len(cuts) + 1
        program = getattr(tp.schedules, schedule)(ranks, len(slicing), counts)

        def needed(made, model=model, partition=partition, again=again):
            return rank_memory(model, partition, slicing, made.split(pending=0).lower(), backend=where, recompute=again)

        chosen = needed(saving(program, model, partition, Savings(again), slicing, False, where.keeps_keys))
        flags = [any(again[a:e]) for a, e in partition]
        ways = [needed(program.save_memory(bytes(way * flag for flag in flags), bytes(ranks))) for way in (1, 2)]
        for (a, e), mine, *others in zip(partition, chosen, *ways, strict=True):
            assert not any(blocks_of(model, "attention")[a:e]) or mine == min(others)
