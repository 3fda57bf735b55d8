"""The engine: the same bits whatever the cut, memory to the byte, nothing allocated in a step, failures that end everybody."""
import threading
import time

import numpy as np
import pytest
import reference as ref

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import RankEngine, gather_bytes, in_threads, lent_bytes, rank_memory

V_SHAPE = """0F0.0 0F0.1 3F0.0 3F0.1 3B0.1 3B0.0 0B0.1 0B0.0 0F1.0 0F1.1 3F1.0 3F1.1 3B1.1 3B1.0 0B1.1 0B1.0
1F0.0 1F0.1 2F0.0 2F0.1 2B0.1 2B0.0 1B0.1 1B0.0 1F1.0 1F1.1 2F1.0 2F1.1 2B1.1 2B1.0 1B1.1 1B1.0"""
HYPER = dict(lr=1e-2, weight_decay=0.1, grad_clip=0.5)


def problem(batch, seq_len, seed=0, **change):
    model = tp.GPTConfig(**{**dict(n_layer=2, n_head=2, n_embd=16, vocab_size=61, block_size=seq_len), **change})
    params = {name: value.astype(np.float32) for name, value in ref.random_params(model, seed).items()}
    return model, params, np.random.default_rng(seed).integers(0, model.vocab_size, (batch, seq_len + 1)).astype(np.int32)


def partition_of(model, cuts):
    edges = [0, *cuts, model.num_blocks]
    return list(zip(edges[:-1], edges[1:], strict=True))


def region_for(model, partition, slicing, program, replicas=1, lends=True, **saves):
    """A ring for every pair of ranks and, where the ranks lend what they send, as those of `tp.launch` do, their arenas."""
    ranks = replicas * program.num_ranks
    everyone = bytearray(int(a != b) for a in range(ranks) for b in range(ranks))
    ways = {name: saves[name] for name in ("recompute", "swap") if name in saves}
    arenas = replicas * lent_bytes(model, partition, slicing, program, **ways) if lends else None
    return _core.Region.create(ranks, everyone, 1 << 13, gather_bytes(model), False, arenas)


def ranks_do(model, partition, slicing, program, work, threads=1, params=None, lends=True, **saves):
    """[work(engine) of each rank], on engines that run `program` together as threads."""
    region = region_for(model, partition, slicing, program, lends=lends, **saves)

    def one(rank):
        engine = RankEngine(model, partition, slicing, program, rank, _core.Comm(region, rank, 60.0), threads=threads, **saves)
        if params is not None:
            engine.load(params)
        return work(engine)

    return in_threads(region, one)


def step(engine, tokens):
    """Two updates, then the gradients of a third, an evaluation, and what is held."""
    losses = [engine.run(tokens, step=i + 1, **HYPER)[:2] for i in range(2)]
    losses.append(engine.run(tokens, step=3, update=False)[:2])
    found = {f"{kind} {name}": array for kind in ("params", "exp_avg", "exp_avg_sq", "grads")
             for name, array in engine.export(kind).items()}
    before = engine.trace()
    evaluated = engine.evaluate(tokens)
    assert engine.trace() == before             # the trace stays the last step's
    return losses, evaluated, found


def merged(parts, params):
    """Losses, norms and every tensor of all ranks, which hold each once and agree on the rest."""
    assert all(part[:2] == parts[0][:2] for part in parts)
    arrays = {}
    for _, _, found in parts:
        assert not arrays.keys() & found.keys()
        arrays |= found
    assert len(arrays) == 4 * len(params)
    return parts[0][0], parts[0][1], arrays


def everything(model, partition, slicing, program, params, tokens, threads=1, **saves):
    """Losses, norms, evaluation and every tensor, with all that the ranks must agree on agreed on."""
    parts = ranks_do(model, partition, slicing, program, lambda engine: step(engine, tokens), threads, params, **saves)
    return merged(parts, params)


def same(one, two):
    assert one[0] == two[0] and one[1] == two[1] and one[2].keys() == two[2].keys()
    for name, array in one[2].items():
        assert np.array_equal(array, two[2][name]), name


def alone(model, params, tokens):
    """One rank, one stage, one thread, whole sequences: what everything else is measured by."""
    slicing = [(1, [tokens.shape[1] - 1])] * len(tokens)
    program = tp.schedules.gpipe(1, len(tokens)).split(pending=0).lower()
    return everything(model, partition_of(model, []), slicing, program, params, tokens)


# ---- the same bits ---------------------------------------------------------------------------------------------------

CUTS = [
    [1, 1, 17, 5], [7, 17], [24], [1] * 24, [3] * 8, [23, 1],
    [(3, [24])], [(3, [1, 1, 17, 5])], [(2, [5, 7, 12]), (1, [24])], [(1, [24]), (2, [23, 1])],
    [(1, [2, 22]), (1, [12, 12]), (1, [24])], [(2, [24]), (1, [8, 8, 8])],
]  # fmt: skip


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_gradients_have_the_same_bits_for_all_slicings_stages_and_threads(tie):
    model, params, tokens = problem(3, 24, tie_weights=tie)
    loss, grads = tp.loss_and_grads(model, params, tokens)
    count = 0
    for i, slicing in enumerate(CUTS):
        for stages in range(1, model.num_blocks + 1):
            threads = 1 + (i + stages) % 3
            other, theirs = tp.loss_and_grads(model, params, tokens, slicing=slicing, stages=stages, threads=threads)
            assert other == loss, (slicing, stages, threads)
            for name in grads:
                assert np.array_equal(grads[name], theirs[name]), (name, slicing, stages, threads)
            count += 1
    assert count == 12 * 6


def test_sequences_longer_than_every_tile():
    """More rows than the head's tile, more keys and queries than attention's, with an odd width."""
    model, params, tokens = problem(3, 300, n_head=3, n_embd=51, vocab_size=97, n_layer=1)
    loss, grads = tp.loss_and_grads(model, params, tokens)
    for slicing, stages, threads in (([(3, [300])], 1, 3), ([(3, [127, 1, 172])], 2, 1), ([130, 65, 105], 4, 2),
                                     ([(2, [300]), (1, [1, 299])], 3, 1), ([20] * 15, 2, 1), ([3] * 100, 3, 2),
                                     ([1, 2, 256, 41], 2, 1), ([43, 257], 1, 1)):
        other, theirs = tp.loss_and_grads(model, params, tokens, slicing=slicing, stages=stages, threads=threads)
        assert other == loss, slicing
        for name in grads:
            assert np.array_equal(grads[name], theirs[name]), (name, slicing)


@pytest.mark.parametrize("tied", [True, False])
def test_sequences_of_one_token_have_the_same_gradient_every_step(tied):
    """The head has no backward rows then: nothing of the step before is left in its gradient."""
    model, params, tokens = problem(3, 1, tie_weights=tied)
    program = tp.schedules.one_f_one_b(1, 3).split().lower()
    _, grads = tp.loss_and_grads(model, params, tokens)

    def work(engine):
        found = []
        for i in range(3):
            engine.run(tokens, step=i + 1, update=False)
            found.append(engine.export("grads"))
        return found

    for found in ranks_do(model, partition_of(model, []), [(1, [1])] * 3, program, work, params=params)[0]:
        for name, grad in grads.items():
            np.testing.assert_allclose(found[name], grad, rtol=1e-5, atol=1e-8)


PROGRAMS = {
    "gpipe, whole backward": lambda: tp.schedules.gpipe(2, 2, [2, 2]),
    "gpipe, W at once": lambda: tp.schedules.gpipe(3, 2, [2, 2]).split(pending=0),
    "gpipe, W late": lambda: tp.schedules.gpipe(4, 2, [2, 2]).split(pending=9),
    "1f1b": lambda: tp.schedules.one_f_one_b(3, 2, [2, 2]).split(),
    "seq1f1b": lambda: tp.schedules.seq1f1b(4, 2, 2).split(pending=2),
    "seq1f1b, whole backward": lambda: tp.schedules.seq1f1b(2, 2, 2),
    "interleaved": lambda: tp.schedules.interleaved(2, 2, 2, 2).split(),
    "interleaved, whole backward": lambda: tp.schedules.interleaved(2, 2, 3, 2),
    "both ends on one rank": lambda: tp.Program.parse(V_SHAPE),
    "both ends on one rank, split": lambda: tp.Program.parse(V_SHAPE).split(pending=2),
    "every stage on one rank": lambda: tp.schedules.interleaved(1, 2, 6, 2).split(pending=1),
}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_updates_have_the_same_bits_under_every_kind_of_program(tie):
    model, params, tokens = problem(3, 9, tie_weights=tie)
    right = alone(model, params, tokens)
    assert right[0][2][0] < right[0][0][0] and right[1] == right[0][2][0]
    for i, (name, make) in enumerate(PROGRAMS.items()):
        program = make().lower(tie)
        program.check()
        cuts = np.random.default_rng(i).choice(range(1, 6), program.num_stages - 1, False)
        partition = partition_of(model, sorted(cuts.tolist()))
        slicing = [(1, [4, 5]), (2, [8, 1])] if i % 2 else [(2, [1, 8]), (1, [6, 3])]
        try:
            same(right, everything(model, partition, slicing, program, params, tokens, 1 + i % 2))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_gradient_waits_for_the_stage_below_on_its_rank():
    """Which has no message to keep it: the next micro-batch's backward may not take its slot before."""
    model, params, tokens = problem(6, 8, n_layer=5)
    right = alone(model, params, tokens)
    late = "0F0.0 1F0.0 0F1.0 1F1.0 1B0.0 1B1.0 0B0.0 0B1.0"
    for program, cuts, slicing in ((tp.Program.parse(late), [3], [(3, [8])] * 2),
                                   (tp.schedules.hanayo(3, 6, 2), range(1, 12), [(1, [8])] * 6),
                                   (tp.schedules.hanayo(3, 6, 2, 2).split(pending=1), range(1, 12), [(1, [5, 3])] * 6)):
        program = program.lower(len(program.rank_of) > 1 and program.num_ranks > 1)
        program.check()
        same(right, everything(model, partition_of(model, cuts), slicing, program, params, tokens))
    lowered = tp.Program.parse(late).lower()
    code = lowered.instructions(0).copy()
    assert lowered.gradient_slots(1) == 2
    code["slot"][(code["stage"] == 1) & (code["op"] == tp.schedules.OPS.index("B"))] &= 0xFFFF
    with pytest.raises(_core.ScheduleError, match="gradient slot 0 of stage 1 is rewritten while micro-batch 0 still uses it"):
        tp.Program.from_instructions([code], keep_slots=True).check()


def random_case(rng):
    """Any model, cut, schedule and number of threads."""
    batch, seq_len, heads = int(rng.integers(1, 5)), int(rng.integers(1, 40)), int(rng.integers(1, 5))
    model, params, tokens = problem(batch, seq_len, int(rng.integers(1 << 30)), n_layer=int(rng.integers(1, 4)), n_head=heads,
                                    n_embd=heads * int(rng.integers(1, 9)), vocab_size=int(rng.integers(2, 70)),
                                    bias=bool(rng.integers(2)), tie_weights=bool(rng.integers(2)))
    slicing, left = [], batch
    same_count = None
    while left:
        size = int(rng.integers(1, left + 1))
        count = int(rng.integers(1, min(seq_len, 5) + 1)) if same_count is None else same_count
        cuts = sorted(rng.choice(range(1, seq_len), count - 1, False).tolist()) if count > 1 else []
        slicing.append((size, np.diff([0, *cuts, seq_len]).tolist()))
        left -= size
    stages = int(rng.integers(1, model.num_blocks + 1))
    counts = [len(lengths) for _, lengths in slicing]
    divisors = [d for d in range(1, stages + 1) if stages % d == 0 and len(slicing) % d == 0]
    kind = rng.integers(4)
    if kind == 3:
        ranks = int(rng.choice(divisors))
        program = tp.schedules.interleaved(ranks, len(slicing), stages // ranks, counts)
    else:
        program = (tp.schedules.gpipe, tp.schedules.one_f_one_b, tp.schedules.seq1f1b)[kind](stages, len(slicing), counts)
    pending = int(rng.integers(-1, 4))
    program = (program if pending < 0 else program.split(pending=pending)).lower(model.tie_weights and stages > 1)
    cuts = sorted(rng.choice(range(1, model.num_blocks), stages - 1, False).tolist())
    return model, params, tokens, partition_of(model, cuts), slicing, program, int(rng.integers(1, 4))


def check_random_case(seed):
    model, params, tokens, partition, slicing, program, threads = random_case(np.random.default_rng(seed))
    program.check()
    right = alone(model, params, tokens)
    for lends in (True, False):
        same(right, everything(model, partition, slicing, program, params, tokens, threads, lends=lends))


@pytest.mark.parametrize("seed", range(25))
def test_random_models_cut_at_random_have_the_same_bits(seed):
    check_random_case(seed)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_predicted_memory_is_the_high_water_mark_and_a_step_allocates_nothing():
    rng = np.random.default_rng(11)
    sizes = set()
    for _ in range(40):
        model, params, tokens, partition, slicing, program, _ = random_case(rng)
        threads = int(rng.integers(1, 5))
        predicted = rank_memory(model, partition, slicing, program, threads)

        def work(engine, params=params, tokens=tokens):
            opened = engine._core.memory()
            engine.load(params)
            for i in range(2):
                engine.run(tokens, step=i + 1, **HYPER)
                engine.evaluate(tokens)
            engine.export("exp_avg")
            assert engine._core.memory() == opened
            return opened

        for lends in (True, False):
            held_by = ranks_do(model, partition, slicing, program, work, threads, lends=lends)
            for rank, (held, peak, allocations) in enumerate(held_by):
                assert held == peak == predicted[rank] and allocations >= 8
                sizes.add(peak)
    assert len(sizes) > 60


def test_more_threads_take_more_workspace_and_it_is_predicted():
    model, *_ = problem(1, 64, n_head=4, n_embd=64)
    program = tp.schedules.gpipe(1, 1).split().lower()
    one, three = (rank_memory(model, partition_of(model, []), [(1, [64])], program, threads)[0] for threads in (1, 3))
    assert three > one


def test_a_memory_limit_names_the_bytes_that_are_short():
    model, *_ = problem(2, 24)
    program, slicing, partition = tp.schedules.gpipe(1, 2).split().lower(), [(1, [24])] * 2, partition_of(model, [])
    needed = rank_memory(model, partition, slicing, program)[0]
    assert RankEngine(model, partition, slicing, program, 0, None, memory_bytes=needed).peak_memory_bytes == needed
    with pytest.raises(_core.OutOfMemoryError, match="bytes"):
        RankEngine(model, partition, slicing, program, 0, None, memory_bytes=needed - 64)


# ---- what it says of a step ------------------------------------------------------------------------------------------


def test_a_step_on_a_closed_communicator_is_refused():
    """The engine has a pointer to it; the process ended there."""
    model, params, tokens = problem(1, 8)
    partition, slicing = partition_of(model, [3]), [(1, [8])]
    program = tp.schedules.gpipe(2, 1, [1]).split().lower(True)
    region = region_for(model, partition, slicing, program)
    comm = _core.Comm(region, 0, 1.0)
    engine = RankEngine(model, partition, slicing, program, 0, comm)
    engine.load(params)
    comm.close()
    for attempt in (engine.run, engine.evaluate):
        with pytest.raises(tp.InvalidValueError, match="this communicator is closed"):
            attempt(tokens)
    assert set(engine.export("params")) == set(engine.names)


def test_events_are_one_per_instruction_in_order_and_follow_the_messages():
    model, params, tokens = problem(2, 24)
    program = tp.schedules.seq1f1b(3, 2, 3).split().lower(True)
    partition, slicing = partition_of(model, [2, 4]), [(1, [8, 8, 8])] * 2

    def work(engine):
        engine.run(tokens)
        return engine.trace()

    traces = ranks_do(model, partition, slicing, program, work, params=params)
    ends = {}
    for rank, trace in enumerate(traces):
        code = program.instructions(rank)
        assert [row[:4] for row in trace] == [(_core.OPS[i["op"]], i["stage"], i["micro"], i["slice"]) for i in code]
        assert all(start <= end for *_, start, end in trace)
        assert all(one[5] <= two[4] for one, two in zip(trace, trace[1:], strict=False))
        ends |= {row[:4]: row[5] for row in trace}
    for trace in traces:
        for op, stage, micro, piece, start, _ in trace:
            if op == "F" and stage > 0:
                assert start >= ends["F", stage - 1, micro, piece]
            if op == "I" and stage < 2:
                assert start >= ends["I", stage + 1, micro, piece]


def test_when_the_host_gave_its_work_is_told_from_when_it_is_asked_for():
    model, params, tokens = problem(2, 24)
    program = tp.schedules.seq1f1b(3, 2, 3).split().lower(True)
    partition, slicing = partition_of(model, [2, 4]), [(1, [8, 8, 8])] * 2

    def work(engine):
        engine.run(tokens)
        before, allocations = engine.given(), engine.allocations
        *_, begin, end = engine.run(tokens)
        return before, engine.given(), engine.trace(), begin * 1e-9, end * 1e-9, engine.allocations - allocations

    for before, given, trace, begin, end, allocated in ranks_do(model, partition, slicing, program, work, params=params):
        assert set(before) == {(0.0, 0.0, 0.0)} and len(given) == len(trace) and allocated == 0
        times = [time for row in given for time in row]
        assert times == sorted(times) and begin <= times[0] and times[-1] <= end
        waits = 0
        for (came, begun, ended), (op, *_, start, done) in zip(given, trace, strict=True):
            assert begun <= start <= done and (op == "OPT" or ended <= done)  # the CPU does it as it is given
            waits += came < begun
        assert waits > 0


def test_any_rank_may_ask_to_stop_and_all_hear_of_it():
    model, params, tokens = problem(2, 24)
    program = tp.schedules.gpipe(3, 2).split().lower(True)

    def work(engine):
        last = any(name.startswith("transformer.ln_f") for name in engine.names)
        return [engine.run(tokens, step=i + 1, stop=last and i == 1)[2] for i in range(3)]

    found = ranks_do(model, partition_of(model, [2, 4]), [(1, [24])] * 2, program, work, params=params)
    assert found == [[False, True, False]] * 3


def test_what_a_rank_waits_for_others_is_no_part_of_its_update():
    """Of two replicas the late one, too: OPT begins when that has come, as a trace has it."""
    model, params, tokens = problem(4, 24)
    program, partition, slicing = tp.schedules.gpipe(1, 2).split().lower(), partition_of(model, []), [(1, [24])] * 2
    region, begun = region_for(model, partition, slicing, program, 2), []

    def one(rank):
        engine = RankEngine(model, partition, slicing, program, 0, _core.Comm(region, rank, 60.0), replicas=2, replica=rank)
        engine.load(params)
        for step in range(2):
            time.sleep(0.05 * step * rank)
            begun.append(time.monotonic())
            engine.run(tokens[2 * rank : 2 * rank + 2], step=step + 1)
        return engine.trace()[-1]

    for op, *_, start, end in in_threads(region, one):
        assert op == "OPT" and max(begun) <= start <= end


@pytest.mark.parametrize("asks", range(4))
def test_any_rank_of_any_replica_may_ask_to_stop_and_all_hear_of_it(asks):
    model, params, tokens = problem(4, 24)
    program, partition, slicing = tp.schedules.gpipe(2, 2).split().lower(True), partition_of(model, [3]), [(1, [24])] * 2
    region = region_for(model, partition, slicing, program, 2)

    def one(rank):
        replica, own = divmod(rank, 2)
        comm = _core.Comm(region, rank, 60.0)
        engine = RankEngine(model, partition, slicing, program, own, comm, replicas=2, replica=replica)
        engine.load(params)
        mine = tokens[2 * replica : 2 * replica + 2]
        return [engine.run(mine, step=i + 1, stop=rank == asks and i == 1)[2] for i in range(3)]

    assert in_threads(region, one) == [[False, True, False]] * 4


def test_clipping_scales_to_the_norm_over_all_ranks():
    model, params, tokens = problem(2, 24)
    _, grads = tp.loss_and_grads(model, params, tokens)
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values())))
    for stages, cuts in ((1, []), (3, [2, 4])):
        program = tp.schedules.gpipe(stages, 2).split().lower(stages > 1)

        for grad_clip, scale in ((norm / 4, 0.25), (norm * 4, 1.0), (0.0, 1.0)):  # 0: any norm is right
            def work(engine, grad_clip=grad_clip):
                found = engine.run(tokens, lr=1e-3, grad_clip=grad_clip)[1]
                return found, engine.export("exp_avg")

            for found, moments in ranks_do(model, partition_of(model, cuts), [(1, [24])] * 2, program, work, params=params):
                assert found == pytest.approx(norm, rel=1e-6)
                for name, moment in moments.items():  # exp_avg = (1 - beta1) x the clipped gradient
                    np.testing.assert_allclose(moment, 0.1 * grads[name] * scale, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("program", [tp.schedules.gpipe(1, 1).split(), tp.schedules.pipedream(1, 1)], ids=["step", "micro-batch"])
@pytest.mark.parametrize("part", [0.25, 1.0, 1 + 1e-7])
def test_clipping_is_pytorch_s_to_the_last_digits(program, part):
    """torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6) where that is less than 1, which it is of max_norm itself."""
    model, params, tokens = problem(2, 24)
    norm, grads = ref.grad_norm, tp.loss_and_grads(model, params, tokens)[1]
    wide = {name: grad.astype(np.float64) for name, grad in grads.items()}

    def work(engine):
        found = engine.run(tokens, lr=0.0, grad_clip=part * norm(wide), weight_decay=0.0)[1]
        return found, engine.export("exp_avg")

    found, moments = ranks_do(model, partition_of(model, []), [(2, [24])], program.lower(), work, params=params)[0]
    assert found == pytest.approx(norm(wide), rel=1e-9)
    mine = float(np.float32(1 - 0.9))                          # of a gradient in its first moment
    scale = sum((moments[n] / mine * g).sum() for n, g in wide.items()) / sum((g * g).sum() for g in wide.values())
    right = ref.clip_scale(norm(wide), part * norm(wide))
    assert scale == pytest.approx(right, rel=1e-7) != pytest.approx(min(1.0, part), rel=1e-7)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx"])
def test_moments_fade_by_the_beta_and_not_by_the_nearest_float(isa, monkeypatch):
    """300 steps without a gradient, where positions have none: 0.9998f would leave 8e-6 more."""
    monkeypatch.setenv("TERAPIPE_ISA", isa)
    try:
        _core.Kernels()
    except tp.InvalidValueError as error:
        pytest.skip(str(error))
    model, params, tokens = problem(1, 1, n_layer=1, n_embd=8, block_size=32)
    before = {name: np.linspace(1, 2, value.size, dtype=np.float32).reshape(value.shape) for name, value in params.items()}

    def work(engine):
        engine.load(params, {"exp_avg": before, "exp_avg_sq": before})
        for i in range(300):
            engine.run(tokens, step=i + 1, lr=0.0, beta1=0.9998, beta2=0.9998)
        return engine.export("exp_avg"), engine.export("exp_avg_sq")

    program = tp.schedules.gpipe(1, 1).split().lower()
    for moments in ranks_do(model, partition_of(model, []), [(1, [1])], program, work, params=params)[0]:
        left = moments["transformer.wpe.weight"][1:] / before["transformer.wpe.weight"][1:]
        assert abs((left / 0.9998**300 - 1).mean()) <= 2e-6


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_a_number_names_the_step_and_leaves_the_parameters(ranks):
    model, params, tokens = problem(2, 24)
    program = tp.schedules.gpipe(ranks, 2).split().lower(ranks > 1)
    partition, slicing = partition_of(model, [3][:ranks - 1]), [(1, [24])] * 2
    kept = []

    def work(engine):
        engine.run(tokens, step=1, **HYPER)
        poisoned = {name: value.copy() for name, value in params.items()}
        poisoned["transformer.ln_f.weight"][3] = np.nan
        engine.load(poisoned)
        before = {kind: engine.export(kind) for kind in ("params", "exp_avg", "exp_avg_sq")}
        try:
            engine.run(tokens, step=2, **HYPER)
        except _core.Error as error:
            after = {kind: engine.export(kind) for kind in before}
            kept.append((error, all(np.array_equal(after[kind][name], before[kind][name], equal_nan=True)
                                    for kind in before for name in before[kind])))
            raise

    with pytest.raises(_core.ExecutionError, match=r"^step 1: the loss is -?nan .*parameters are as before"):
        ranks_do(model, partition, slicing, program, work, params=params)
    assert len(kept) == ranks and all(unchanged for _, unchanged in kept)


def test_tokens_that_the_model_does_not_know_are_refused_by_their_place():
    model, _, tokens = problem(2, 24)
    program = tp.schedules.gpipe(1, 2).split().lower()
    for wrong in (model.vocab_size, -1):
        bad = tokens.copy()
        bad[1, 24] = wrong
        with pytest.raises(ValueError, match=rf"tokens\[1, 24\] is {wrong}: 0 to {model.vocab_size - 1} would be right"):
            ranks_do(model, partition_of(model, []), [(1, [24])] * 2, program, lambda engine, bad=bad: engine.run(bad))


def many_instructions():
    """A single rank's step of some hundred milliseconds, in some ten thousand instructions."""
    model, params, tokens = problem(200, 16, n_layer=4, n_embd=32)
    program = tp.schedules.gpipe(1, 200, 16).split().lower()
    return model, params, tokens, partition_of(model, []), [(1, [1] * 16)] * 200, program


@pytest.mark.parametrize("what", ["step", "evaluate"])
def test_a_rank_that_waits_for_nobody_hears_an_abort_between_instructions(what):
    model, params, tokens, partition, slicing, program = many_instructions()
    region = _core.Region.create(1, bytes(1), 4096, gather_bytes(model), False)
    engine = RankEngine(model, partition, slicing, program, 0, _core.Comm(region, 0, 60.0))
    engine.load(params)
    before, raised = engine.export("params"), []

    def train():
        try:
            while True:  # whenever the abort comes, some instruction follows
                engine.run(tokens, **HYPER) if what == "step" else engine.evaluate(tokens)
                before.update(engine.export("params"))
        except _core.Error as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    while region.doing(0).startswith("before"):
        time.sleep(0.001)
    region.abort("EABORTED", -1, "the test has seen enough")
    thread.join()
    assert isinstance(raised[0], _core.AbortedError) and "the test has seen enough" in str(raised[0])
    assert "while running" in region.doing(0) and "optimizer" not in region.doing(0)  # mid-step: nothing was updated
    assert all(np.array_equal(before[name], value) for name, value in engine.export("params").items())
    region.close()


def test_a_failed_rank_ends_the_others_in_the_middle_of_a_step():
    model, params, tokens = problem(2, 24)
    program = tp.schedules.gpipe(3, 2).split().lower(True)

    def work(engine):
        if engine._core.params()[0][0] == 1:
            raise ZeroDivisionError("stage 1 is out of order")
        for i in range(1000):
            engine.run(tokens, step=i + 1, **HYPER)

    with pytest.raises(ZeroDivisionError, match="out of order"):
        ranks_do(model, partition_of(model, [2, 4]), [(1, [24])] * 2, program, work, params=params)


def test_an_engine_runs_one_step_at_a_time():
    model, params, tokens, partition, slicing, program = many_instructions()
    engine = RankEngine(model, partition, slicing, program, 0, None)
    engine.load(params)
    thread = threading.Thread(target=engine.run, args=(tokens,))
    thread.start()
    refused = 0
    while thread.is_alive() and not refused:
        try:
            engine.evaluate(tokens)
        except RuntimeError as error:
            assert "running a step in another thread" in str(error)
            refused += 1
    thread.join()
    assert refused


def test_a_communicator_with_room_for_fewer_receives_refuses_the_program_before_work():
    """What exchanges a device's memory has room for 64 of a rank; rings and TCP grow."""
    model, params, tokens = problem(6, 33, n_layer=4)
    partition, slicing = partition_of(model, [1, 3, 4, 5, 6, 7, 8]), [(1, [1] * 33)] * 6
    program = tp.schedules.interleaved(2, 6, 4, [33] * 6).split().lower(model.tie_weights)
    same(alone(model, params, tokens), everything(model, partition, slicing, program, params, tokens))
    with pytest.raises(ValueError, match=r"posts \d+ receives from rank \d at once, and staged takes 64: fewer slices"):
        ranks_do(model, partition, slicing, program, lambda engine: None, params=params, staged=True)


def test_a_communicator_is_filled_to_its_last_room():
    for micros in (64, 65):
        model, params, tokens = problem(micros, 2)
        first, last = str(tp.schedules.gpipe(2, micros).split().lower(True)).splitlines()
        words = sorted(last.split(), key=lambda word: "RF" not in word)  # all receives before the first forward
        one = model, partition_of(model, [3]), [(1, [2])] * micros, tp.Program.parse(f"{first}\n{' '.join(words)}\n")

        def loss(engine, tokens=tokens):
            return engine.run(tokens)[0]

        rings = ranks_do(*one, loss, params=params)
        if micros == 64:
            assert ranks_do(*one, loss, params=params, staged=True) == rings
            continue
        with pytest.raises(ValueError, match="rank 1 posts 65 receives from rank 0 at once, and staged takes 64: fewer slices"):
            ranks_do(*one, loss, params=params, staged=True)
