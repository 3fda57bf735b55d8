"""PipeDream: an update behind every micro-batch. Its program proved and timed, and trained against what its paper says, written
down here with NumPy and gradients at weights of several versions."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
from mutations import checked, mutate

import terapipe_c as tp
from terapipe_c import _core, schedules
from terapipe_c.engine import RankEngine, gather_bytes, in_threads, rank_memory
from terapipe_c.planning.judge import Judge

MODEL = tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=97, block_size=24, tie_weights=False)
TOKENS = np.random.default_rng(5).integers(0, 97, 4000).astype(np.int32)
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def planned(stages=3, batch=6, model=MODEL, planner="uniform", schedule="pipedream", flops=1e9, **options):
    cluster = tp.Cluster(num_devices=8, peak_flops=flops)
    return tp.plan(model, cluster, batch=batch, seq_len=24, schedule=schedule, planner=planner, stages=stages, **options)


def trained(plan, out, steps=4, grad_clip=1.0, **options):
    options = {"processes": False, "val_fraction": 0.0, **options}
    run = tp.launch(plan, data=TOKENS, steps=steps, seed=3, out=str(out), lr_schedule="constant", grad_clip=grad_clip,
                    progress=False, reproducible=False, checkpoint_every=steps, **ADAMW, **options)  # fmt: skip
    return run, list(run)


# ---- the program ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_stage_keeps_as_many_versions_as_it_is_from_the_end(ranks):
    for micros in (1, 2, ranks, 2 * ranks + 1):
        for slices in (1, 3):
            program = schedules.pipedream(ranks, micros, slices)
            program.check(canonical=True)
            assert [program.versions(r) for r in range(ranks)] == [min(micros, ranks - r) for r in range(ranks)]
            lowered = program.lower()
            lowered.check(canonical=True)
            assert lowered.counts["U"] == ranks * micros and lowered.counts["OPT"] == ranks
            assert [lowered.versions(r) for r in range(ranks)] == [min(micros, ranks - r) for r in range(ranks)]
            assert tp.Program.parse(str(program)) == program and lowered.strip() == program
    assert schedules.one_f_one_b(ranks, ranks).versions(0) == 0


def versions_by_walking(program, stage):
    """From the definition: how many values between the newest and the oldest that some backward is still to read."""
    made, most, read = 0, 0, {}
    for op, micro in program.instructions(program.rank_of[stage])[["op", "micro"]].tolist():
        if schedules.OPS[op] == "F":
            read.setdefault(micro, made)
        elif schedules.OPS[op] == "U":
            del read[micro]
            made += 1
            most = max(most, made - min(read.values(), default=made) + 1)
    return most


def test_versions_of_any_order_are_those_of_the_definition():
    rng = random.Random(1)
    for _ in range(300):
        micros, words, at = rng.randint(1, 7), [], [0, 0]
        while at[1] < micros:  # one rank: forwards run ahead of backwards by chance
            if at[0] < micros and (at[0] == at[1] or rng.random() < 0.5):
                words.append(f"0F{at[0]}.0")
                at[0] += 1
            else:
                words += [f"0B{at[1]}.0", f"0U{at[1]}.0"]
                at[1] += 1
        program = tp.Program.parse(" ".join(words))
        assert program.check() is None and program.versions(0) == versions_by_walking(program, 0), str(program)


def test_it_is_1f1b_and_a_period_is_the_busiest_ranks_work():
    for ranks in (2, 4, 7):
        def line(micros, ranks=ranks, **cost):
            return schedules.pipedream(ranks, micros).simulate({"F": 1.0, "B": 2.0, **cost}, activation_bytes=1)

        assert line(9).makespan_s == 3.0 * (9 + ranks - 1)
        assert line(9).peak_memory_bytes.tolist() == [min(9, ranks - r) for r in range(ranks)]
        slow = np.ones(ranks)
        slow[ranks // 2] = 1.5
        assert line(40, F=slow, U=0.25).makespan_s - line(39, F=slow, U=0.25).makespan_s == pytest.approx(1.5 + 2.0 + 0.25)
        whole = line(12, U=0.5)
        assert whole.busy_s.tolist() == [12 * 3.5] * ranks
        assert sum(whole.bubbles.values()) == pytest.approx(ranks * whole.makespan_s - whole.busy_s.sum())


def test_times_of_every_reader_agree_and_no_bound_is_above():
    rng = np.random.default_rng(2)
    for _ in range(150):
        ranks, micros, slices = (int(n) for n in rng.integers(1, (6, 8, 4)))
        shape = ranks, micros * slices
        cost = {op: rng.uniform(0.1, 2.0, shape) for op in "FBU"}
        comm = float(rng.uniform(0, 0.5))
        program = schedules.pipedream(ranks, micros, slices)
        line = program.simulate(cost, comm_s=comm)
        assert program.makespan(cost, comm_s=comm) == pytest.approx(line.makespan_s, rel=1e-12)
        assert program.lower().simulate(cost, comm_s=comm).makespan_s == pytest.approx(line.makespan_s, rel=1e-12)
        assert line.lower_bound_s <= line.makespan_s
        rows = line.intervals[line.intervals["op"] == schedules.OPS.index("U")]
        assert len(rows) == ranks * micros and (rows["slice"] == 0).all()
        for pending in (0, 1, 3):
            split = program.split({"F": cost["F"], "I": cost["B"] / 2, "W": cost["B"] / 2, "U": cost["U"]}, pending=pending)
            split.check(canonical=True)
            assert split.counts["U"] == program.counts["U"]
    for update in (1.0, 5.0):                                                  # the work of a rank, updates too
        even = schedules.pipedream(4, 6).simulate({"F": 1.0, "B": 2.0, "U": update})
        assert even.makespan_s >= even.lower_bound_s >= 6 * (3.0 + update)


@pytest.mark.parametrize(("text", "what"), [
    ("0F0.0 0U0.0 0B0.0", "every weight gradient of its micro-batch must come before it"),
    ("0F0.0 0B0.0 0U0.0 0U0.0", "it is done twice"),
    ("0F0.0 0I0.0 0U0.0 0W0.0", "every weight gradient of its micro-batch must come before it"),
    ("0F0.0 0F1.0 0B0.0 0U0.0 0B1.0", "stage 0 has 1 of its 2 updates by micro-batches"),
    ("0F0.0 0F1.0 0B1.0 0U1.0 0B0.0 0U0.0", "updates go through micro-batches ascending: that by micro-batch 0 comes first"),
    ("0F0.0 0F0.1 0B0.1 0B0.0 0U0.1", "it is of the whole micro-batch: slice 0 would be right"),
    ("0F0.0 0B0.0\n1F0.0 1B0.0 1U0.0", r"stage 1 has updates by micro-batches \(U\), and stage 0 has none"),
    ("0F0.0 0B0.0 0U0.0@1\n1F0.0 1B0.0 1U0.0", "`@` and a rank behind SF, RF, .* and behind no other, would be right"),
])  # fmt: skip
def test_a_misplaced_update_is_refused(text, what):
    with pytest.raises(ValueError, match=what):
        tp.Program.parse(text).check()


def test_slips_of_the_pen_are_refused():
    bases = [schedules.pipedream(3, 4).lower(), schedules.pipedream(2, 3, 2), schedules.pipedream(2, 3, 2).lower()]
    refused = sum(error is not None for _, error in checked(random.Random(7), bases, 1500, mutate))
    assert refused > 1000


def test_two_copies_of_the_model_have_one_update():
    words = [line.split() for line in str(schedules.chimera(2, 4)).splitlines()]
    words[0].append("0U0.0")
    with pytest.raises(tp.ScheduleError, match="two copies of the model add their gradients before an update"):
        tp.Program.parse("\n".join(" ".join(line) for line in words)).check()


@pytest.mark.parametrize("text", [
    "0F0.0 0F1.0 0B0.0 0U0.0 0B1.0 0U1.0",                                       # the head's rows of both would wait together
    "0F0.0 0F1.0 0B0.0 0B1.0 0U0.0 0U1.0\n1F0.0 1B0.0 1U0.0 1F1.0 1B1.0 1U1.0",   # the second's gradient would be in the first's
    "0F0.0 0F1.0 0I0.0 0I1.0 0W0.0 0W1.0 0U0.0 0U1.0\n1F0.0 1B0.0 1U0.0 1F1.0 1B1.0 1U1.0",
])  # fmt: skip
def test_a_stage_sums_the_gradient_of_one_micro_batch_at_a_time(text):
    program = tp.Program.parse(text)
    assert program.check() is None
    with pytest.raises(tp.ScheduleError, match=r"the micro-batch before it has its update: 0U0\.0 comes first"):
        program.check(canonical=True)


def test_torch_has_no_word_for_it():
    with pytest.raises(tp.ScheduleError, match="no word for U"):
        schedules.pipedream(2, 3).to_csv()


# ---- the plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["uniform", "terapipe", "auto", "dawnpiper", "pipedream", "autopipe", "vpipe"])
def test_a_plan_is_a_value_and_says_what_it_is(planner, tmp_path):
    plan = planned(planner=planner)
    assert plan.schedule == "pipedream" and plan.step_time_s == pytest.approx(plan.timeline().makespan_s)
    assert plan.lower_bound_s <= plan.step_time_s and not plan.executable and not plan.why_not_at_all
    assert plan.durations["U"].shape == plan.durations["F"].shape and "OPT" not in plan.durations
    assert sum(plan.bubbles.values()) == pytest.approx(plan.ranks * plan.step_time_s - sum(plan.busy_s))
    assert plan.peak_memory_bytes == rank_memory(MODEL, plan.stages, plan.slicing, plan.program, recompute=plan.recompute)
    plan.save(tmp_path / "plan.json")
    assert tp.Plan.load(tmp_path / "plan.json") == plan
    text = plan.explain()
    assert "weights in 3 versions" in text and "weights in 1 version\n" in text and "reproducible=False" in text
    assert "<svg" in plan._repr_html_()


def test_versions_weigh_on_the_first_ranks():
    """A version is the values and what the products read of them: twice a matrix's floats."""
    many, one = planned(slicing=[(1, [24])] * 6), planned(slicing=[(6, [24])])
    sync = planned(schedule="1f1b", slicing=[(1, [24])] * 6)
    params = [sum(MODEL.block_params(block.kind) for block in MODEL.blocks[a:e]) for a, e in many.stages]
    for rank, (held, before) in enumerate(zip(many.peak_memory_bytes, sync.peak_memory_bytes, strict=True)):
        assert 4 * params[rank] * (2 - rank) <= held - before <= 9.5 * params[rank] * (2 - rank) + 4096
    assert [one.program.versions(k) for k in range(3)] == [1, 1, 1]


def test_an_update_is_in_the_prediction_once_a_micro_batch():
    many = planned(slicing=[(1, [24])] * 6)
    sync = planned(schedule="1f1b", slicing=[(1, [24])] * 6)
    assert many.durations["U"][:2] == pytest.approx(np.repeat(sync.durations["OPT"][:2, :1], 6, axis=1))
    assert many.step_time_s > sync.step_time_s


def test_both_judges_count_the_heads_rows_by_micro_batches():
    """With costs that know of rows that wait (head_pass) C's search and Python's durations say the same, and U has the rest."""
    costs = tp.CostModel.analytic(MODEL, tp.Cluster(num_devices=8, peak_flops=1e9))
    costs = tp.CostModel.from_dict({**costs.to_dict(), "head_pass": [1e-4, 20.0, 3e-4]})
    plain = planned(slicing=[(1, [9, 15])] * 5, batch=5)
    plan = planned(slicing=[(1, [9, 15])] * 5, batch=5, costs=costs)
    program, seconds = plan.program, plan.durations
    assert plan.step_time_s == pytest.approx(program.makespan(seconds)) == pytest.approx(plan.timeline().makespan_s)
    judge = Judge(MODEL, costs, 3, 1, None)
    told = judge.judge("pipedream", tuple(plan.stages), tuple((b, tuple(lengths)) for b, lengths in plan.slicing))
    assert told.seconds == pytest.approx(plan.step_time_s, rel=1e-12)
    assert (seconds["U"][:2] == plain.durations["U"][:2]).all() and (seconds["U"][2] > plain.durations["U"][2]).all()


def test_planners_weigh_an_update_as_often_as_it_is_made():
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=64, vocab_size=3000, block_size=8, tie_weights=False)
    cluster = tp.Cluster(num_devices=8, peak_flops=6e10)

    def plan(**more):
        return tp.plan(model, cluster, batch=8, seq_len=8, schedule="pipedream", stages=3, slicing=[(1, [8])] * 8, **more)

    cuts = itertools.combinations(range(1, model.num_blocks), 2)
    best = min(plan(planner="uniform", partition=[(0, a), (a, b), (b, model.num_blocks)]).step_time_s for a, b in cuts)
    for planner in ("pipedream", "dawnpiper", "autopipe", "terapipe"):
        assert best * (1 - 1e-9) <= plan(planner=planner).step_time_s <= 1.03 * best, planner


def test_memory_is_kept_within_the_limit():
    roomy = planned(planner="terapipe")
    needed = max(roomy.peak_memory_bytes)
    tight = planned(planner="terapipe", memory_bytes=needed - 1)
    assert max(tight.peak_memory_bytes) < needed
    with pytest.raises(tp.InfeasibleError, match=r"rank \d needs \d+ bytes and may use 1000"):
        planned(memory_bytes=1000)


@pytest.mark.parametrize(("options", "what"), [
    ({"model": tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=97, block_size=24)}, "tie_weights=False, or stages=1,"),
    ({"data_parallel": 2, "stages": 2}, "replicas add their gradients once a step"),
    ({"executable": True}, r"launch\(\.\.\., reproducible=False\)"),
    ({"chunks": 2, "stages": 2}, "has one stage a rank"),
])  # fmt: skip
def test_what_it_cannot_be_joined_with_is_refused(options, what):
    with pytest.raises(ValueError, match=what):
        planned(**options)


def test_a_tied_weight_on_one_rank_is_one():
    tied = tp.GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=97, block_size=24)
    assert planned(stages=1, model=tied).program.versions(0) == 1


def test_auto_gives_it_no_replicas():
    """Where nothing says how many: of other schedules it takes some here, of this one there is no such plan."""
    cluster = tp.Cluster(num_devices=4, link_latency_s=1e-7, link_bandwidth_Bps=1e11, peak_flops=1e8)
    request = {"batch": 8, "seq_len": 24, "granularity": 24, "executable": False}
    plan = tp.plan(MODEL, cluster, schedule="pipedream", **request)
    assert plan.data_parallel == 1 and "U" in plan.program.counts
    assert tp.plan(MODEL, cluster, schedule="gpipe", **request).data_parallel > 1


def test_auto_takes_it_only_by_its_name():
    plan = tp.plan(MODEL, tp.Cluster(num_devices=3, peak_flops=1e9), batch=6, seq_len=24)
    assert plan.schedule != "pipedream" and "pipedream left out" not in "\n".join(plan.search_log)


def test_exports_and_other_orders_are_refused(tmp_path):
    plan = planned(slicing=[(1, [24])] * 6)
    for asynchronous in (plan, planned(stages=1, slicing=[(1, [24])] * 6)):     # one rank has six updates a step, too
        with pytest.raises(ValueError, match="Megatron has no schedule pipedream"):
            asynchronous.to_megatron()
    with pytest.raises(ValueError, match="U"):
        plan.to_torch_csv()
    with pytest.raises(ValueError, match="a plan with one update a step"):
        plan.with_program(schedules.one_f_one_b(3, 6))
    with pytest.raises(ValueError, match="reproducible=False"):
        tp.launch(plan, data=TOKENS, steps=1, out=str(tmp_path / "no"), progress=False)
    sync = planned(schedule="1f1b")
    with pytest.raises(ValueError, match="program has U"):
        sync.with_program(schedules.pipedream(3, 6))


# ---- the run ---------------------------------------------------------------------------------------------------------------


def block_of(name, model):
    """Of a tensor by its Hugging Face name: 0 the embedding, then attention and FFN of each layer, then the head."""
    words = name.split(".")
    if "h" in words:
        layer = int(words[words.index("h") + 1])
        return 1 + 2 * layer + ("mlp" in words or "ln_2" in words)
    return 0 if words[-2] in ("wte", "wpe") else 1 + 2 * model.n_layer


def assert_close(model, found, wanted, atol=1e-4):
    for name, value in wanted.items():
        mine = found[name]
        if name.endswith("c_attn.bias"):  # a key's bias changes no attention: its gradient is rounding, which Adam makes a step of
            mine, value = (np.delete(x, slice(model.n_embd, 2 * model.n_embd)) for x in (mine, value))
        np.testing.assert_allclose(mine, value, atol=atol, err_msg=name)


class Paper:
    """PipeDream with weight stashing (SOSP 2019, section 3.3): a stage's gradient of a micro-batch is taken at the values that its
    forward read, ``behind`` updates before the newest, which it updates. AdamW and clipping in float64, by stage."""

    def __init__(self, model, stages, slicing, params, grad_clip, behind):
        self.model, self.slicing, self.clip, self.behind = model, slicing, grad_clip, behind
        self.stages = [[name for name in params if first <= block_of(name, model) < end] for first, end in stages]
        self.value = {name: value.astype(np.float64) for name, value in params.items()}
        self.m = {name: np.zeros(value.shape) for name, value in params.items()}
        self.v = {name: np.zeros(value.shape) for name, value in params.items()}
        self.updates = 0

    def step(self, tokens):
        """(mean loss, root of the mean square of the updates' norms)."""
        history, losses, squares, begin = [self.value], [], [], 0
        for q, (batch, _) in enumerate(self.slicing):
            seen = {}
            for k, names in enumerate(self.stages):
                version = history[q - self.behind(k, q)]
                seen |= {name: version[name].astype(np.float32) for name in names}
            loss, grads = tp.loss_and_grads(self.model, seen, tokens[begin:begin + batch])
            begin += batch
            losses.append(loss * batch)
            self.updates += 1
            newest = {}
            for names in self.stages:
                norm = np.sqrt(sum((grads[name].astype(np.float64) ** 2).sum() for name in names))
                scale = self.clip / (norm + 1e-6) if 0 < self.clip < norm else 1.0
                squares.append(norm**2)
                newest |= {name: self.update(name, history[-1][name], grads[name].astype(np.float64) * scale) for name in names}
            history.append(newest)
        self.value = history[-1]
        return sum(losses) / begin, np.sqrt(sum(squares) / len(self.slicing))

    def update(self, name, value, grad):
        (b1, b2), t = ADAMW["betas"], self.updates
        self.m[name] = b1 * self.m[name] + (1 - b1) * grad
        self.v[name] = b2 * self.v[name] + (1 - b2) * grad**2
        decayed = value * (1 - ADAMW["lr"] * ADAMW["weight_decay"]) if value.ndim == 2 else value
        return decayed - ADAMW["lr"] * (self.m[name] / (1 - b1**t)) / (np.sqrt(self.v[name] / (1 - b2**t)) + ADAMW["eps"])


@pytest.mark.parametrize(("stages", "slicing", "clip"), [
    (1, [(1, [24])] * 3, 0.0), (2, [(1, [24])] * 5, 0.5), (3, [(1, [24])] * 6, 0.0), (4, [(1, [9, 8, 7])] * 6, 0.5),
    (3, [(2, [24]), (1, [1, 23]), (3, [24])], 0.0), (3, [(1, [24]), (2, [16, 8]), (1, [20, 4])], 0.5),
])  # fmt: skip
def test_it_trains_as_the_paper_says(stages, slicing, clip, tmp_path):
    plan = planned(stages, sum(b for b, _ in slicing), slicing=slicing)
    init = tp.init_params(MODEL, 3)
    run, records = trained(plan, tmp_path / "run", steps=3, grad_clip=clip)
    paper = Paper(MODEL, plan.stages, plan.slicing, init, clip, lambda k, q: min(q, stages - 1 - k))
    data = tp.Dataset(TOKENS, 24, plan.batch, seed=3, val_fraction=0.0)
    for step, record in enumerate(records):
        loss, norm = paper.step(data.batch(step))
        assert record.loss == pytest.approx(loss, rel=2e-6) and record.grad_norm == pytest.approx(norm, rel=1e-4)
    assert_close(MODEL, tp.load_checkpoint(run.checkpoint_path).params, paper.value)


def random_order(rng, stages, ranks, counts, split):
    """Any order that the engine takes: of the next slice, micro-batch or update of some stage whatever may come next."""
    micros, last = len(counts), stages - 1
    lists = [[] for _ in range(ranks)]
    forward = [[0] * micros for _ in range(stages)]                     # slices done
    left = {op: [list(counts) for _ in range(stages)] for op in "IW"}   # slices to do
    updates = [0] * stages
    while min(updates) < micros:
        may = []
        for k in range(stages):
            for q, count in enumerate(counts):
                done, mine = forward[k][q], q <= updates[k]
                before = q == 0 or forward[k][q - 1] == counts[q - 1]
                if done < count and (k == 0 or forward[k - 1][q] > done) and (k < last or (mine and before)):
                    may.append(("F", k, q, done))
                i, w = left["I"][k][q], left["W"][k][q]
                ready = done == count and i > 0 and (k == last or left["I"][k + 1][q] < i) and (split or mine)
                if ready and all(left["I"][k][p] == 0 for p in range(q)):
                    may.append(("I" if split else "B", k, q, i - 1))
                if split and w > i and mine:
                    may.append(("W", k, q, w - 1))
            q = updates[k]
            if q < micros and left["W" if split else "I"][k][q] == 0:
                may.append(("U", k, q, 0))
        op, k, q, s = rng.choice(may)
        lists[k % ranks].append(f"{k}{op}{q}.{s}")
        forward[k][q] += op == "F"
        updates[k] += op == "U"
        for name in "IW":
            left[name][k][q] -= op == name or (op == "B" and name == "I")
    return tp.Program.parse("\n".join(" ".join(words) for words in lists))


def reads_behind(program):
    """How many updates of a stage come between the values that a micro-batch's forward reads and those that it updates."""
    read, made = {}, [0] * program.num_stages
    for rank in range(program.num_ranks):
        for op, k, q in program.instructions(rank)[["op", "stage", "micro"]].tolist():
            if schedules.OPS[op] == "F":
                read.setdefault((k, q), made[k])
            made[k] += schedules.OPS[op] == "U"
    return lambda k, q: q - read[k, q]


def engines_do(model, stages, slicing, program, tokens, params, clip, **device):
    """Losses and norms of the steps, parameters at their end; every rank's memory as predicted."""
    memory = rank_memory(model, stages, slicing, program, **device)
    ranks = program.num_ranks
    region = _core.Region.create(ranks, np.ones((ranks, ranks), np.uint8) - np.eye(ranks, dtype=np.uint8), 1 << 16,
                                 max(64, gather_bytes(model)), False)  # fmt: skip

    def work(rank):
        comm = _core.Comm(region, rank, 60.0) if ranks > 1 else None
        engine = RankEngine(model, stages, slicing, program, rank, comm, **device)
        engine.load(params)
        adamw = {"lr": ADAMW["lr"], "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        steps = [engine.run(batch, step=i + 1, grad_clip=clip, **adamw)[:2] for i, batch in enumerate(tokens)]
        assert engine.peak_memory_bytes == memory[rank]
        return steps, engine.export("params")

    told = in_threads(region, work)
    return told[0][0], {name: value for _, mine in told for name, value in mine.items()}


def orders_train(count, words, steps, near, device, atol=1e-4):
    """Orders by chance, each against the paper's rule with the versions that it reads; near: of losses, norms, weights."""
    rng, versions = random.Random(4), 0
    for n in range(count):
        ranks = rng.randint(1, 3)
        chunks = rng.choice((1, 1, 2)) if ranks < 3 else 1
        model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=rng.choice(words), block_size=24, tie_weights=False)
        slicing = [(rng.randint(1, 2), rng.choice(([24], [7, 17], [1, 20, 3]))) for _ in range(rng.randint(1, 4))]
        program = random_order(rng, ranks * chunks, ranks, [len(lengths) for _, lengths in slicing], rng.random() < 0.5)
        program.check(canonical=True)
        ends = sorted(rng.sample(range(1, model.num_blocks), ranks * chunks - 1))
        stages = list(zip([0, *ends], [*ends, model.num_blocks], strict=True))
        shape = steps, sum(b for b, _ in slicing), 25
        tokens = np.random.default_rng(n).integers(0, model.vocab_size, shape).astype(np.int32)
        params, clip = tp.init_params(model, n), rng.choice((0.0, 0.5))
        done, found = engines_do(model, stages, slicing, program.lower(), tokens, params, clip, **device(rng))
        paper = Paper(model, stages, slicing, params, clip, reads_behind(program))
        for (loss, norm), batch in zip(done, tokens, strict=True):
            wanted = paper.step(batch)
            assert loss == pytest.approx(wanted[0], rel=near[0]) and norm == pytest.approx(wanted[1], rel=near[1]), str(program)
        assert_close(model, found, paper.value, atol)
        versions = max(versions, *(program.versions(k) for k in range(program.num_stages)))
    assert versions > 2


def test_any_order_trains_by_the_versions_that_it_reads():
    orders_train(120, (13, 300), 2, (5e-6, 3e-4), lambda rng: {"threads": rng.choice((1, 1, 2))})


def test_the_engine_refuses_what_it_has_no_versions_for():
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=13, block_size=8)
    slicing, program, stages = [(1, [8])] * 2, schedules.pipedream(2, 2).lower(), [(0, 2), (2, 4)]
    with pytest.raises(ValueError, match="tie_weights is True"):
        rank_memory(model, stages, slicing, program)
    untied = tp.GPTConfig(**{**model.to_dict(), "tie_weights": False})
    with pytest.raises(ValueError, match="on 2 replicas: one would be right"):
        rank_memory(untied, stages, slicing, program, replicas=2)
    engine = RankEngine(model, [(0, 4)], slicing, schedules.pipedream(1, 2).lower(), 0, None)
    engine.load(tp.init_params(model, 0))
    with pytest.raises(ValueError, match="leaves no gradient of the batch"):
        engine.run(np.zeros((2, 9), np.int32), update=False)


def test_a_synchronous_step_is_not_what_it_does(tmp_path):
    """The oracle can tell: with one version of everything it is far off."""
    plan = planned(3, 6, slicing=[(1, [24])] * 6)
    _, records = trained(plan, tmp_path / "run", steps=2)
    one = planned(1, 6, slicing=[(1, [24])] * 6)
    _, fresh = trained(one, tmp_path / "one", steps=2)
    assert records[0].loss != fresh[0].loss and abs(records[1].loss - fresh[1].loss) > 1e-4


def test_slices_threads_processes_and_recomputation_do_not_show(tmp_path):
    bits = set()
    for i, (slicing, options, more) in enumerate((
            ([(1, [24])] * 4, {}, {}), ([(1, [7, 8, 9])] * 4, {}, {"processes": True}),
            ([(1, [1, 23])] * 4, {"recompute": "full"}, {}),
            ([(1, [12, 12])] * 4, {"recompute": "ffn"}, {"threads_per_rank": 2}))):  # fmt: skip
        plan = planned(3, 4, slicing=slicing, **options)
        run, records = trained(plan, tmp_path / str(i), **more)
        params = tp.load_checkpoint(run.checkpoint_path).params
        bits.add((tuple(r.loss for r in records), tuple(value.tobytes() for value in params.values())))
        report = run.report()
        assert list(report.peak_memory_bytes) == list(report.predicted_peak_memory_bytes)
        assert list(report.peak_memory_bytes) == plan.peak_memory_bytes or "threads_per_rank" in more
    assert len(bits) == 1


def test_swapped_activations_do_not_show(tmp_path):
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=97, block_size=128, tie_weights=False)
    request = {"batch": 6, "seq_len": 128, "schedule": "pipedream", "slicing": [(1, [128])] * 6, "stages": 3}
    wide = tp.Cluster(num_devices=3, peak_flops=1e9)
    most = max(tp.plan(model, wide, planner="uniform", **request).peak_memory_bytes)
    tight = dataclasses.replace(wide, memory_bytes=0.75 * most, host_bandwidth_Bps=1e14)
    swapping = tp.plan(model, tight, planner="dawnpiper", **request)
    assert any(swapping.swap) and swapping.program.counts["SO"] == swapping.program.counts["SI"] > 0
    keeping = tp.plan(model, wide, planner="uniform", partition=swapping.stages, **{**request, "stages": None})
    (run, swapped), (_, kept) = trained(swapping, tmp_path / "swapped"), trained(keeping, tmp_path / "kept")
    assert [r.loss for r in swapped] == [r.loss for r in kept] and [r.grad_norm for r in swapped] == [r.grad_norm for r in kept]
    assert list(run.report().peak_memory_bytes) == swapping.peak_memory_bytes


def test_a_resumed_run_and_an_evaluated_one_go_on_alike(tmp_path):
    plan = planned(3, 4, slicing=[(1, [24])] * 4)
    whole, records = trained(plan, tmp_path / "whole", steps=6, eval_every=1, val_fraction=0.2)
    trained(plan, tmp_path / "parts", steps=3, val_fraction=0.2)
    again, rest = trained(plan, tmp_path / "parts", steps=6, resume=True, val_fraction=0.2)
    assert [r.loss for r in rest][-3:] == [r.loss for r in records][-3:]
    first, second = (tp.load_checkpoint(run.checkpoint_path).params for run in (whole, again))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_what_is_saved_and_evaluated_is_the_newest_version(tmp_path):
    """By the weights that were saved one device finds the loss that the run found, and a synchronous plan goes on from them."""
    plan = planned(3, 4, slicing=[(1, [24])] * 4)
    run, records = trained(plan, tmp_path / "run", steps=3, eval_every=3, val_fraction=0.3)
    saved = tp.load_checkpoint(run.checkpoint_path).params
    data = {split: tp.Dataset(TOKENS, 24, 4, seed=3, split=split, val_fraction=0.3) for split in ("train", "val")}
    losses = [tp.loss_and_grads(MODEL, saved, data["val"].batch(i))[0] for i in range(4)]  # launch(eval_batches=4)
    assert records[-1].eval_loss == pytest.approx(np.mean(losses), rel=1e-7)
    sync = tp.plan(MODEL, tp.Cluster.local(), batch=4, seq_len=24, schedule="1f1b", planner="uniform", stages=2)
    _, rest = trained(sync, tmp_path / "run", steps=4, resume=True, val_fraction=0.3)
    assert rest[-1].loss == tp.loss_and_grads(MODEL, saved, data["train"].batch(3))[0]


def beyond_bounds():
    """Parameters by which the forward, the loss and the last stage's gradients are finite, and the gradient of block 2's normalised
    input is 1e46: sums that float32 cannot hold in any order, by any kernel."""
    init = tp.init_params(MODEL, 3)
    factors = {"lm_head.weight": 1e20, "transformer.h.0.mlp.c_fc.weight": 1e30, "transformer.h.0.ln_2.weight": 1e-30}
    for name, factor in factors.items():
        init[name] = init[name] * np.float32(factor)
    return init


# rank 1 finds nothing, and is ended by rank 0
BEYOND = r"rank 0 failed at step 0 .*the gradient norm of micro-batch 0 on the stage of blocks \[0, 5\) is (nan|inf);"


def test_numbers_beyond_bounds_end_the_run(tmp_path):
    init = beyond_bounds()
    with pytest.raises(tp.Error, match=r"the loss is [0-9.]+e\+19 and the gradient norm (nan|inf);"):
        tp.loss_and_grads(MODEL, init, TOKENS[:25][None])
    with pytest.raises(tp.Error, match=BEYOND):
        trained(planned(2, 4, slicing=[(1, [24])] * 4), tmp_path / "run", init=init)


def test_the_report_lays_updates_beside_their_prediction(tmp_path):
    plan = planned(2, 4, slicing=[(1, [24])] * 4)
    run, _ = trained(plan, tmp_path / "run")
    rows = run.timeline().intervals
    assert (rows["op"] == schedules.OPS.index("U")).sum() == 2 * 4
    trace = tmp_path / "trace.json"
    run.timeline().to_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("cat") == "update by a micro-batch" for event in events) == 8


def test_the_emulated_engine_takes_what_the_simulator_says():
    plan = planned(4, flops=2e7)
    told = tp.emulate(plan, tp.CostModel.analytic(MODEL, plan.cluster))
    assert told.predicted_step_time_s == pytest.approx(plan.step_time_s) and told.step_time_s >= plan.step_time_s * 0.999
    line = told.timeline()
    assert (line.intervals["op"] == schedules.OPS.index("U")).sum() == 4 * 6
