"""R within B (`0R1.0+ 0B1.0`): each block that recomputes is made again right before its own backward, in room that all blocks of
the stage share. The same bits in less memory; but no R begins before the gradient has come."""
import itertools

import numpy as np
import pytest
import sched_oracle
import test_cuda_stage
from test_by_block import ALL, FFNS, PROGRAMS, UNLIKE, WHOLE, again_of, made
from test_cuda_stage import CUDA, emulation  # noqa: F401
from test_engine import HYPER, alone, everything, partition_of, problem, ranks_do, same

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import rank_memory
from terapipe_c.planning.judge import Judge, Savings, saving
from terapipe_c.planning.whole import WHOLE as WHOLE_B
from terapipe_c.planning.whole import WITHIN


def some_of(rng, model):
    """Attentions and FFNs at random, one of them at least."""
    again = [block.kind in ALL and bool(rng.integers(2)) for block in model.blocks]
    again[int(rng.integers(1, model.num_blocks - 1))] = True
    return tuple(again)


@pytest.mark.parametrize("kinds", [ALL, FFNS, ("attention",), None], ids=["full", "ffn", "attention", "mixed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_are_those_of_one_device_in_the_bytes_that_are_predicted(name, kinds):
    program, rng = PROGRAMS[name](), np.random.default_rng(len(name) + len(kinds or "mixed"))
    for slicing in (WHOLE, UNLIKE if name != "halves" else [(2, [16]), (3, [16]), (2, [16]), (1, [16])]):
        model, params, tokens = problem(8, 16, n_layer=3, tie_weights=bool(rng.integers(2)), bias=bool(rng.integers(2)))
        cuts = sorted(rng.choice(range(1, model.num_blocks), program.num_stages - 1, False).tolist())
        partition, again = partition_of(model, cuts), some_of(rng, model) if kinds is None else again_of(model, kinds)
        before, within = (made(program, model, partition, again, True, way) for way in (False, True))
        right = alone(model, params, tokens) if slicing == WHOLE and slicing[0][0] == 1 else \
            everything(model, partition, slicing, before, params, tokens, recompute=again)
        same(right, everything(model, partition, slicing, within, params, tokens, 2, recompute=again))
        taken = ranks_do(model, partition, slicing, within, lambda engine: engine.peak_memory_bytes, 1, params, recompute=again)
        needed = [rank_memory(model, partition, slicing, way, recompute=again) for way in (before, within)]
        assert taken == needed[1] and all(less <= more for less, more in zip(needed[1], needed[0], strict=True))
        assert sum(needed[1]) < sum(needed[0])


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_gpu_has_the_same_bits_in_the_bytes_that_are_predicted(emulation, dtype):  # noqa: F811
    rng = np.random.default_rng(3)
    for slicing, tie, kinds in ((WHOLE, True, FFNS), (UNLIKE, False, ALL), (WHOLE, False, None)):
        model, params, tokens = problem(8, 16, n_layer=3, tie_weights=tie)
        partition, again = partition_of(model, [4]), some_of(rng, model) if kinds is None else again_of(model, kinds)

        def work(engine, tokens=tokens):
            losses = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(2)]
            return losses, {name: value.tobytes() for name, value in engine.export("params").items()}, engine.peak_memory_bytes

        found, needed = [], []
        for within in (False, True):
            program = made(tp.schedules.one_f_one_b(2, 4), model, partition, again, True, within)
            parts = test_cuda_stage.ranks_do(model, partition, slicing, program, work, params, dtype, recompute=again)
            needed.append(rank_memory(model, partition, slicing, program, backend=CUDA[dtype], recompute=again))
            assert [part[2] for part in parts] == needed[-1]
            found.append([part[:2] for part in parts])
        assert found[0] == found[1] and sum(needed[1]) < sum(needed[0])


def test_swaps_beside_have_the_same_bits(tmp_path):
    model, params, tokens = problem(4, 16, n_layer=3, tie_weights=False)
    partition, slicing, order = partition_of(model, [4]), [(1, [16])] * 4, tp.schedules.one_f_one_b(2, 4)
    again, swap = (False, True, True, False, True, False, True, False), (0, 0, 0, 1, 0, 1, 0, 0)

    def found(program, **saves):
        def work(engine):
            losses = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(2)]
            return losses, engine.export("params"), engine.peak_memory_bytes

        parts = ranks_do(model, partition, slicing, program, work, params=params, store=str(tmp_path), **saves)
        values = {name: value.tobytes() for _, mine, _ in parts for name, value in mine.items()}
        return (parts[0][0], values), [peak for *_, peak in parts]

    right, _ = found(order.split(pending=0).lower())
    for ahead in (None, 1, 3):
        program = made(order, model, partition, again, True, True, swap=swap, ahead=ahead)
        bits, peaks = found(program, recompute=again, swap=swap)
        assert bits == right and peaks == rank_memory(model, partition, slicing, program, recompute=again, swap=swap)


@pytest.mark.parametrize("where", ["cpu", "float32"])
def test_what_it_takes_is_measured_apart_from_the_gradients(emulation, where):  # noqa: F811
    model, params, tokens = problem(4, 16, n_layer=3, tie_weights=False)
    partition, slicing, again = partition_of(model, [4]), [(1, [16])] * 4, again_of(model, ALL)
    program = made(tp.schedules.one_f_one_b(2, 4), model, partition, again, True, True)

    def work(engine):
        traces = []
        for step in range(4):                               # on a GPU the last ones are graphs
            engine.run(tokens, step=step + 1, **HYPER)
            traces.append(engine.trace())
        return traces

    if where == "cpu":
        parts = ranks_do(model, partition, slicing, program, work, params=params, recompute=again)
    else:
        parts = test_cuda_stage.ranks_do(model, partition, slicing, program, work, params, where, recompute=again)
    for rank, traces in enumerate(parts):
        for trace in traces:
            assert [row[:4] for row in trace] == [(_core.OPS[i["op"]], i["stage"], i["micro"], i["slice"])
                                                  for i in program.instructions(rank)]
            rows = [(one, two) for one, two in itertools.pairwise(trace) if one[0] == "R"]
            assert len(rows) == 4 and all(two[0] == "B" and one[5] == two[4] for one, two in rows)
            assert all(one[4] < one[5] < two[5] for one, two in rows)
            assert all(one[5] <= two[4] for one, two in itertools.pairwise(trace))


# Numbers of n_embd of a token that a block makes again; in one room, a layer more adds none of them.
@pytest.mark.parametrize("on, size, inner", [("cpu", 4, 4 + 8), ("float32", 4, 5 + 9), ("bf16", 2, 5 + 9)])
def test_blocks_share_what_one_layer_more_would_make_again(emulation, on, size, inner):  # noqa: F811
    where, rows, width, added = {} if on == "cpu" else {"backend": CUDA[on]}, 2 * 32, 32, []
    for within in (False, True):
        taken = []
        for layers in (3, 4):
            model, *_ = problem(1, 32, n_layer=layers, n_embd=width, n_head=2)
            ends, again = partition_of(model, []), again_of(model, ALL)
            program = made(tp.schedules.one_f_one_b(1, 4), model, ends, again, True, within)
            taken.append(rank_memory(model, ends, [(2, [32])] * 4, program, recompute=again, **where)[0])
        added.append(taken[1] - taken[0])
    times = 16 * 4 * 2 if on == "cpu" else 0           # of when each was made again; a GPU's are in the host's memory
    assert added[0] - added[1] == inner * rows * width * size - times


def test_it_is_each_stages_own_matter():
    model, params, tokens = problem(4, 16, n_layer=3)
    partition, slicing, again = partition_of(model, [4]), [(1, [16])] * 4, again_of(problem(4, 16, n_layer=3)[0], ALL)
    order = tp.schedules.gpipe(2, 4)
    before, within = (made(order, model, partition, again, True, way) for way in (False, True))
    mixed = order.save_memory(bytes([1, 255]), bytes(2)).lower(model.tie_weights)
    needed = [rank_memory(model, partition, slicing, each, recompute=again) for each in (before, mixed, within)]
    assert needed[1] == [needed[0][0], needed[2][1]] and needed[2][0] < needed[0][0] and needed[2][1] < needed[0][1]
    same(*(everything(model, partition, slicing, each, params, tokens, recompute=again) for each in (before, mixed)))


# ---- the instruction -------------------------------------------------------------------------------------------------

def test_text_and_proof():
    program = tp.schedules.one_f_one_b(2, 3).save_memory(bytes([255, 0]), bytes(2))
    lowered = program.lower()
    assert str(program).splitlines()[0] == "0F0.0 0F1.0 0R0.0+ 0B0.0 0F2.0 0R1.0+ 0B1.0 0R2.0+ 0B2.0"
    for each in (program, lowered):
        each.check()
        assert tp.Program.parse(str(each)) == each
    assert str(lowered.strip()) == str(program) and "+" not in str(program.split(pending=0))
    behind = "0R0.0+: 0B0.0 must come right behind it: it is made within that"
    for text, said in (("0F0.0 0F1.0 0R0.0+ 0F2.0 0B0.0 0B1.0 0B2.0", behind),
                       ("0F0.0 0R0.0+ 0I0.0 0W0.0", behind),
                       ("0F0.0 0F1.0 0R0.0+ 0B0.0 0R1.0 0B1.0", "0R1.0: a stage's R are made within B (+) all or none"),
                       ("0F0.0 0F0.1 0R0.1+ 0B0.1 0R0.0+ 0B0.0", "R within B (+) is of a micro-batch of one"),
                       ("0F0.0 0R0.0+", behind)):
        with pytest.raises(tp.ScheduleError) as refused:
            tp.Program.parse(text).check()
        assert said in str(refused.value)
    for other in (tp.schedules.one_f_one_b(2, 1, [2]), tp.schedules.one_f_one_b(2, 2).split(pending=0)):
        with pytest.raises(ValueError, match="stage 0 recomputes within B .*: B that are whole, of micro-batches of one slice"):
            other.save_memory(bytes([255, 255]), bytes(2))


def test_it_begins_when_the_gradient_is_there():
    order, rng = tp.schedules.one_f_one_b(3, 4), np.random.default_rng(5)
    for _ in range(20):
        seconds = {op: float(rng.integers(1, 9)) for op in ("F", "B", "R")} | {"comm": 0.5, "RB": 0.25, "SB": 0.125}
        both = {op: s for op, s in seconds.items() if op != "R"} | {"B": seconds["B"] + seconds["R"]}
        for each in (order, order.lower()):
            within = each.save_memory(bytes([255] * 3), bytes(3))
            within = within.lower() if each is not order else within
            line = within.simulate(seconds)
            assert line.makespan_s == within.makespan(seconds) == each.makespan(both)      # as a B that takes both
            assert line.bubbles["recompute"] == 12 * seconds["R"] and line.lower_bound_s <= line.makespan_s
        fills = order.save_memory(bytes([1] * 3), bytes(3)).lower()
        assert fills.makespan(seconds) < within.makespan(seconds)


def test_it_begins_when_what_its_gradients_read_is_back_from_the_host():
    cost = {"F": 1.0, "B": 2.0, "R": 1.0, "SO": 3.0, "SI": 3.0}
    program = tp.Program.parse("0F0.0 0SO0.0& 0SI0.0& 0R0.0+ 0B0.0")
    # out 1 to 4, in 4 to 7, R 7 to 8, B 8 to 10, on a last stage, too
    assert program.simulate(cost).makespan_s == 10.0 == program.makespan(cost)


def test_random_programs_take_what_the_oracle_says():
    rng = np.random.default_rng(11)
    orders = (tp.schedules.one_f_one_b(3, 4), tp.schedules.gpipe(2, 3), tp.schedules.looped_bfs(2, 3, 2),
              tp.schedules.interleaved(2, 4, 2))
    for turn in range(80):
        order = orders[turn % 4]
        stages, micros = order.num_stages, len(order.slices)
        again, swapped = bytes(rng.choice([0, 1, 255, 255], stages).tolist()), bytes(rng.choice([0, 0, 1], stages).tolist())
        program = order.save_memory(again, swapped, int(rng.integers(4)), turn % 3 > 0).lower()
        cost = {op: rng.integers(0, 9, (stages, micros)) / 2 for op in ("F", "B", "R", "SO", "SI")}
        cost |= {op: rng.integers(0, 3, (stages, micros)) / 4 for op in ("SF", "RF", "SB", "RB")} if turn % 5 else {}
        lag = float(rng.integers(0, 4))
        line = program.simulate(cost, comm_s=lag)
        right = sched_oracle.makespan(program, lambda op, v, q, m, cost=cost: cost[op][v, q] if op in cost else 0.0,
                                      lambda *_, lag=lag: lag)
        assert line.makespan_s == right == program.makespan(cost, comm_s=lag) and line.lower_bound_s <= right


# ---- plans -----------------------------------------------------------------------------------------------------------

def asked(kinds="full", layers=6, **change):
    model = tp.GPTConfig(n_layer=layers, n_head=2, n_embd=32, vocab_size=61, block_size=128, tie_weights=False)
    cluster = tp.Cluster(4, memory_bytes=1e12, peak_flops=1e11)
    return model, dict(batch=4, seq_len=128, slicing=[(1, [128])] * 4, recompute=kinds, costs=tp.CostModel.analytic(model, cluster),
                       **change)


def test_both_judges_say_the_same_of_it():
    rng = np.random.default_rng(9)
    for schedule in ("1f1b", "gpipe", "looped-bfs", "bpipe"):
        model, _ = asked()
        chunks, ranks = 2 if schedule == "looped-bfs" else 1, 4
        again, slicing = some_of(rng, model), ((1, (128,)),) * 4
        ends = sorted(rng.choice(range(1, model.num_blocks), ranks * chunks - 1, False).tolist())
        cut = tuple(itertools.pairwise((0, *ends, model.num_blocks)))
        costs = tp.CostModel.analytic(model, tp.Cluster(4, peak_flops=1e11))
        judge = Judge(model, costs, ranks, chunks, None, savings=Savings(again))
        found = judge.judge(schedule, cut, slicing, WITHIN)
        order = _core.judge_compute(judge._judge, judge._given(found))
        own = saving(order, model, cut, Savings(again), within=True).lower(False)
        assert judge.lowered(found) == own and "+" in str(own)
        assert found.seconds == pytest.approx(float(own.makespan(judge.timing(found))), rel=1e-12)
        assert judge.peak_bytes(found) == rank_memory(model, cut, slicing, own, recompute=again)
        whole = judge.judge(schedule, cut, slicing, WHOLE_B)
        assert found.seconds >= whole.seconds and sum(judge.peak_bytes(found)) < sum(judge.peak_bytes(whole))


@pytest.mark.parametrize("planner, ranks, schedule", [
    ("uniform", 1, "1f1b"), ("uniform", 2, "1f1b"), ("terapipe", 2, "1f1b"), ("terapipe", 2, "looped-bfs"),
    ("terapipe", 2, "gpipe")])
def test_plans_have_it_where_nothing_else_fits(planner, ranks, schedule):
    chunks = 2 if schedule == "looped-bfs" else 1
    model, request = asked(planner=planner, stages=ranks, schedule=schedule, chunks=chunks)

    def plan(limit):
        return tp.plan(model, tp.Cluster(ranks, memory_bytes=limit, peak_flops=1e11), **request)

    free = plan(1e12)
    with pytest.raises(tp.InfeasibleError) as refused:
        plan(1)
    least = plan(refused.value.memory_bytes)
    assert "+" in str(least.program) and max(least.peak_memory_bytes) == refused.value.memory_bytes
    assert ("+" in str(free.program)) is (ranks == 1)          # as fast, in less memory
    order = tp.Program.parse(str(least.program.strip()).replace("+", ""))
    apart = rank_memory(model, least.stages, least.slicing, order.lower(False), recompute=least.recompute)
    assert max(apart) > refused.value.memory_bytes and least.step_time_s >= free.step_time_s
    bare = tp.Program.parse(" ".join(word for word in "\n ".join(str(order).splitlines()).split(" ") if "R" not in word)
                            .replace("\n ", "\n"))
    assert least.with_program(bare).program == least.program
    data, found = np.arange(3000, dtype=np.uint16) % 61, []
    for each in (free, least):
        run = tp.launch(each, data, 2, seed=3, progress=False, processes=False)
        found.append([(record.loss, record.grad_norm) for record in run])
        assert run.report().peak_memory_bytes == list(each.peak_memory_bytes)
        assert run.timeline().makespan_s > 0
    assert found[0] == found[1]
