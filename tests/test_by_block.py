"""Whole backwards (B) go block by block, both gradients of one before the next one's: the same bits as I and W of all blocks, in
less memory, as blocks share the room of their gradients."""
import numpy as np
import pytest
import test_cuda_stage
from test_cuda_stage import CUDA, emulation  # noqa: F401
from test_engine import HYPER, everything, partition_of, problem, ranks_do, same
from test_recompute import recomputing

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.backend import choose
from terapipe_c.engine import cut, dimensions, rank_memory, saves_bytes
from terapipe_c.planning.judge import Savings, saving
from terapipe_c.planning.request import SAVERS

WHOLE, UNLIKE = [(2, [16])] * 4, [(3, [16]), (1, [16]), (3, [16]), (1, [16])]
ALL, FFNS = ("attention", "ffn"), ("ffn",)


def again_of(model, kinds):
    return tuple(block.kind in kinds for block in model.blocks)


def made(program, model, partition, again, whole, within=False, **saved):
    """The program with its R, within B or not, and with I and W in the place of B or not."""
    program = saving(program, model, partition, Savings(again, **saved), within=within)
    return (program if whole else program.split(pending=0)).lower(model.tie_weights and program.num_stages > 1)


PROGRAMS = {
    "gpipe": lambda: tp.schedules.gpipe(2, 4),
    "1f1b": lambda: tp.schedules.one_f_one_b(3, 4),
    "looped": lambda: tp.schedules.looped_bfs(2, 4, 2),
    "interleaved": lambda: tp.schedules.interleaved(2, 4, 3),
    "bpipe": lambda: tp.schedules.bpipe(4, 4),
    "halves": lambda: tp.schedules.sliced_1f1b(3, 4, 2),
}


@pytest.mark.parametrize("again", [(), ALL, FFNS, ("attention",)], ids=["kept", "full", "ffn", "attention"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_are_those_of_one_gradient_after_the_other(name, again):
    program, rng = PROGRAMS[name](), np.random.default_rng(len(name))
    for slicing in (WHOLE, UNLIKE):
        model, params, tokens = problem(8, 16, n_layer=3, tie_weights=bool(rng.integers(2)), bias=bool(rng.integers(2)))
        cuts = sorted(rng.choice(range(1, model.num_blocks), program.num_stages - 1, False).tolist())
        partition, chosen = partition_of(model, cuts), again_of(model, again)
        if name == "halves" and slicing == UNLIKE:
            slicing = [(2, [16]), (3, [16]), (2, [16]), (1, [16])]
        one, other = (made(program, model, partition, chosen, whole) for whole in (False, True))
        assert "I" in one.counts and "I" not in other.counts and "B" in other.counts
        right = everything(model, partition, slicing, one, params, tokens, recompute=chosen)
        same(right, everything(model, partition, slicing, other, params, tokens, 2, recompute=chosen))


def test_updates_by_micro_batches_and_what_is_swapped_have_the_same_bits(tmp_path):
    model, params, tokens = problem(4, 16, n_layer=3, tie_weights=False)
    partition, slicing = partition_of(model, [4]), [(1, [16])] * 4

    def found(program, **saves):
        def work(engine):
            return [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(2)], engine.export("params")

        parts = ranks_do(model, partition, slicing, program, work, params=params, store=str(tmp_path), **saves)
        return parts[0][0], {name: value.tobytes() for _, mine in parts for name, value in mine.items()}

    updated = tp.schedules.pipedream(2, 4)
    assert found(updated.lower()) == found(updated.split(pending=0).lower())
    for ahead, beside in ((0, False), (3, True)):
        swap, kept = (0, 0, 1, 1, 0, 0, 1, 0), tp.schedules.one_f_one_b(2, 4)
        program = saving(kept, model, partition, Savings((), swap, (), ahead if beside else None))
        assert found(program.lower(), swap=swap) == found(kept.split(pending=0).lower())


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_gpu_has_the_same_bits_by_blocks(emulation, dtype):  # noqa: F811
    for slicing, tie, again in ((WHOLE, True, FFNS), (UNLIKE, False, ALL)):
        model, params, tokens = problem(8, 16, tie_weights=tie)
        partition, chosen = partition_of(model, [4]), again_of(model, again)

        def work(engine, tokens=tokens):
            losses = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(2)]
            return losses, {name: value.tobytes() for name, value in engine.export("params").items()}, engine.peak_memory_bytes

        found = []
        for whole in (False, True):
            program = made(tp.schedules.one_f_one_b(2, 4), model, partition, chosen, whole)
            parts = test_cuda_stage.ranks_do(model, partition, slicing, program, work, params, dtype, recompute=chosen)
            taken = rank_memory(model, partition, slicing, program, backend=CUDA[dtype], recompute=chosen)
            assert [part[2] for part in parts] == taken
            found.append([part[:2] for part in parts])
        assert found[0] == found[1]


# Bytes of a row of n_embd numbers that one gradient slot has of a block besides the gradient of its input, in n_embd numbers; and
# those of a head's delta.
WIDE = {"attention": {"cpu": 3, "cuda": 1 + 3 + 1}, "ffn": {"cpu": 0, "cuda": 1 + 4}}


@pytest.mark.parametrize("backend, size", [("cpu", 4), ("float32", 4), ("bf16", 2)])
def test_blocks_share_what_one_layer_more_would_take(emulation, backend, size):  # noqa: F811
    rows, width, heads, sequences, slots = 2 * 32, 32, 2, 2, {}
    where = {} if backend == "cpu" else {"backend": CUDA[backend]}
    on = "cpu" if backend == "cpu" else "cuda"
    for whole in (False, True):
        taken = []
        for layers in (3, 4):
            model, *_ = problem(1, 32, n_layer=layers, n_embd=width, n_head=heads)
            program = made(tp.schedules.one_f_one_b(1, 4), model, partition_of(model, []), (), whole)
            taken.append(rank_memory(model, partition_of(model, []), [(sequences, [32])] * 4, program, **where)[0])
            assert program.gradient_slots(0) == 1
        slots[whole] = taken[1] - taken[0]
    norms = 2 * sequences * 2 * width * 4 if on == "cpu" else 0
    layer = rows * width * size * (2 + WIDE["attention"][on] + WIDE["ffn"][on]) + rows * heads * 4 + norms
    assert slots[False] - slots[True] == layer


def test_slices_or_weight_gradients_apart_leave_each_block_its_own():
    model, *_ = problem(1, 32, n_layer=3)
    halved, whole = tp.schedules.one_f_one_b(1, 2, [2, 2]), tp.schedules.one_f_one_b(1, 2)
    ends = partition_of(model, [])
    sliced = [rank_memory(model, ends, [(1, [16, 16])] * 2, program.lower())[0] for program in (halved, halved.split(pending=0))]
    assert abs(sliced[0] - sliced[1]) < 4096            # tables
    mixed = tp.Program.parse("0F0.0 0B0.0 0F1.0 0I1.0 0W1.0").lower()
    shared, apart, some = (rank_memory(model, ends, [(1, [32])] * 2, program)[0]
                           for program in (whole.lower(), whole.split(pending=0).lower(), mixed))
    assert shared + 2 * 32 * 16 * 4 < some and abs(some - apart) < 4096


@pytest.mark.parametrize("on", ["cpu", "float32", "bf16"])
@pytest.mark.parametrize("again", [(), ALL, FFNS], ids=["kept", "full", "ffn"])
def test_a_stage_takes_no_less_with_one_more_block(emulation, on, again):  # noqa: F811
    """What searches of partitions rely on."""
    model, *_ = problem(1, 32, n_layer=4, n_embd=8)
    program, taken = tp.schedules.one_f_one_b(3, 4), []
    where = {} if on == "cpu" else {"backend": CUDA[on]}
    for begin in range(1, 8):
        for end in range(begin + 1, 10):
            partition = partition_of(model, [begin, end])
            made_again = recomputing(program, model, partition, again_of(model, again))
            needed = rank_memory(model, partition, [(2, [32])] * 4, made_again, recompute=again_of(model, again), **where)
            taken.append((begin, end, needed[1]))
    for begin, end, bytes_ in taken:
        assert all(bytes_ <= more for b, e, more in taken if b <= begin and e >= end)


@pytest.mark.parametrize("on", ["cpu", "float32", "bf16"])
@pytest.mark.parametrize("again", [(), ALL], ids=["kept", "full"])
def test_the_bound_of_all_programs_is_below_whole_backwards_and_near(emulation, on, again):  # noqa: F811
    model, *_ = problem(1, 32, n_layer=4, n_embd=32)
    partition, slicing = partition_of(model, [4, 7]), [(2, [32])] * 4
    saves, where = again_of(model, again), choose(*("cpu", None) if on == "cpu" else ("cuda", on))
    given = dict(model=dimensions(model), slicing=cut(slicing), unit=0, batch=8, ranks=3, rank_of=(0, 1, 2), slots=(3, 2, 1),
                 replicas=1, copies=1, saves=saves_bytes(saves), partition=(0, 4, 7, 10), **where.arguments)
    programs = [made(tp.schedules.one_f_one_b(3, 4), model, partition, saves, whole, whole) for whole in (True, False)]
    taken = [max(rank_memory(model, partition, slicing, each, backend=where, recompute=saves)) for each in programs]
    whole, apart = (_core.least_memory(**given, apart=apart) for apart in (False, True))
    slots = max(programs[0].gradient_slots(stage) for stage in range(3)) - 1    # of which there is one at least
    message, times = 2 * 32 * 32 * (2 if on == "bf16" else 4), 16 * 4 * sum(saves)
    assert whole < apart <= taken[1] and whole <= taken[0]
    assert -256 < taken[0] - whole - (taken[1] - apart) < 256 + 2 * slots * message + times


@pytest.mark.parametrize("planner, ranks, schedule", [
    ("uniform", 1, "1f1b"), ("terapipe", 2, "1f1b"), ("terapipe", 2, "looped-bfs"), ("uniform", 2, "pipedream"),
    ("terapipe", 4, "bpipe"), ("autopipe", 2, "1f1b"), ("piper", 2, "gpipe"), ("bmpipe", 4, "bpipe")])
def test_b_are_whole_in_plans_that_would_not_fit_otherwise(planner, ranks, schedule):
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=61, block_size=128, tie_weights=False)
    chunks, one = 2 if schedule == "looped-bfs" else 1, {"planner": planner, "stages": ranks, "schedule": schedule}
    one["recompute"] = None if planner in SAVERS else "full"   # those choose for themselves

    def plan(limit):
        cluster = tp.Cluster(ranks, memory_bytes=limit, peak_flops=1e11)
        return tp.plan(model, cluster, batch=4, seq_len=128, slicing=[(1, [128])] * 4, chunks=chunks,
                       costs=tp.CostModel.analytic(model, cluster), executable=None if schedule == "pipedream" else True, **one)

    free = plan(1e12)
    with pytest.raises(tp.InfeasibleError) as refused:
        plan(1)
    least = plan(refused.value.memory_bytes)
    assert "I" not in least.program.counts and ("B" in free.program.counts) is (ranks == 1)     # as fast, in less memory
    assert max(least.peak_memory_bytes) == refused.value.memory_bytes
    split = least.program.strip().split(pending=0).lower(False)
    apart = rank_memory(model, least.stages, least.slicing, split, recompute=least.recompute)
    assert max(apart) > refused.value.memory_bytes
    assert least.step_time_s >= free.step_time_s and (ranks > 1 or least.step_time_s == free.step_time_s)
    assert plan(max(free.peak_memory_bytes)).digest == free.digest
    data, found = np.arange(3000, dtype=np.uint16) % 61, []
    for each in (free, least):
        run = tp.launch(each, data, 2, seed=3, progress=False, processes=False, reproducible=schedule != "pipedream")
        found.append([(record.loss, record.grad_norm) for record in run])
        assert run.report().peak_memory_bytes == list(each.peak_memory_bytes)
        assert run.timeline().makespan_s > 0
    assert found[0] == found[1]
