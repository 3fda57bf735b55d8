"""`Plan.with_program`: a user's own order of a plan's work, proved, simulated, sized and run."""
import dataclasses
import re

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c.links import Links

SEQ, BATCH = 24, 4
MODEL = tp.GPTConfig(n_layer=3, n_head=2, n_embd=16, vocab_size=61, block_size=SEQ)
CLUSTER = tp.Cluster(num_devices=4, memory_bytes=1 << 30)
DATA = (np.cumsum(np.random.default_rng(5).integers(0, 4, 3000)) % 61).astype(np.int32)
TEXT = """0F0.0 0F0.1 0F1.0 0B0.1 0B0.0 0F1.1 0F2.0 0F2.1 0B1.1 0B1.0 0F3.0 0F3.1 0B2.1 0B2.0 0B3.1 0B3.0
          1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0 1F2.0 1F2.1 1B2.1 1B2.0 1F3.0 1F3.1 1B3.1 1B3.0"""


def plan(slicing=2, **options):
    given = {"stages": 2, "schedule": "gpipe", "slicing": slicing, **options}
    return tp.plan(MODEL, CLUSTER, BATCH, SEQ, planner="uniform", **given)


def trained(p):
    run = tp.launch(p, DATA, 3, lr=1e-2, processes=False, progress=False).wait()
    report = run.report()
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == p.peak_memory_bytes
    return [(record.loss, record.grad_norm) for record in run.history]


def test_a_program_of_ones_own_is_planned_kept_and_run(tmp_path):
    given = plan()
    own = given.with_program(tp.Program.parse(TEXT))
    assert own.schedule == "own" and own.stages == given.stages and own.slicing == given.slicing and own != given
    assert own.executable and own.compared == [("gpipe", given.step_time_s)] and own.slicing_gap is None
    assert own.timeline().makespan_s == own.step_time_s >= own.lower_bound_s
    assert sum(own.bubbles.values()) == pytest.approx(2 * own.step_time_s - sum(own.busy_s))
    own.save(tmp_path / "own.json")
    assert tp.Plan.load(tmp_path / "own.json") == own and "schedule own" in own.explain()
    assert trained(own) == trained(given)
    assert given.with_program(own.program) == own  # lowered, and split into I and W


@pytest.mark.parametrize("given", [{"data_parallel": 2, "schedule": "1f1b"}, {"schedule": "chimera"}, {"schedule": "1f1b"}])
def test_other_costs_of_an_own_program_have_the_sums_of_gradients_too(given):
    """They were left out: a program of one's own was emulated as if its replicas, or copies of the model, added up nothing."""
    costs = tp.CostModel.analytic(MODEL, CLUSTER)
    planned = plan(slicing=None, costs=costs, **given)
    own = planned.with_program(planned.program)
    assert own.peak_memory_bytes == planned.peak_memory_bytes  # room for the sums, too
    assert tp.emulate(own, costs).predicted_step_time_s == pytest.approx(planned.step_time_s, rel=1e-12)


def test_stages_on_other_ranks_send_over_other_links():
    """The plan's were kept: a program that moves each stage on by a rank was told to take as long as before."""
    cluster = tp.Cluster(4, 2, link_bandwidth_Bps=1e6, link_latency_s=1e-3, node_link_bandwidth_Bps=1e9, node_link_latency_s=1e-6)
    costs = tp.CostModel.analytic(MODEL, cluster)
    planned = tp.plan(MODEL, cluster, BATCH, SEQ, costs, planner="uniform", stages=4, schedule="1f1b")
    ranks = str(planned.program.strip()).splitlines()
    moved = planned.with_program(tp.Program.parse("\n".join(ranks[-1:] + ranks[:-1])))
    assert moved.program.rank_of == (1, 2, 3, 0)
    assert moved.durations["comm"].max(1).argsort().tolist()[-2:] == [0, 2] and planned.durations["comm"].max(1).argmax() == 1
    assert moved.step_time_s == moved.timeline().makespan_s
    line = moved.program.simulate(costs.durations(moved.program, partition=moved.stages, slicing=moved.slicing,
                                                  links=Links.of(cluster, 4, 1)))
    assert moved.step_time_s == pytest.approx(line.makespan_s, rel=1e-9)
    near_s, far_s = moved.durations["AR"][0, 0], planned.durations["AR"][0, 0]     # the ends share a node now: ranks 0 and 1
    assert near_s < far_s / 100 and near_s == pytest.approx(costs.tied_s(MODEL)[0] + BATCH * SEQ * costs.tied_s(MODEL)[1]
                                                            + costs.tied_s(MODEL)[2], rel=1e-9)
    back = moved.with_program(planned.program)
    assert back.step_time_s == pytest.approx(planned.step_time_s, rel=1e-9)
    assert back.durations["AR"] == pytest.approx(planned.durations["AR"], rel=1e-9)


@pytest.mark.parametrize("recompute", [None, "ffn", "attention", "full"])
def test_what_a_plan_saves_it_still_saves(recompute):
    given = plan(recompute=recompute)
    own = given.with_program(tp.schedules.seq1f1b(2, BATCH, 2))
    assert own.recompute == given.recompute and own.program.counts.get("R") == given.program.counts.get("R")
    assert max(own.peak_memory_bytes) < max(given.peak_memory_bytes) and trained(own) == trained(given)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_plan_with_whole_backwards_takes_its_own_program_back(recompute):
    """At its limit nothing else fits; without one what B sends does not wait for W."""
    free = plan(slicing=1, recompute=recompute)
    with pytest.raises(tp.InfeasibleError) as refused:
        plan(slicing=1, recompute=recompute, schedule="1f1b", memory_bytes=1)
    given = plan(slicing=1, recompute=recompute, schedule="1f1b", memory_bytes=refused.value.memory_bytes)
    assert "B" in given.program.counts
    own = given.with_program(tp.schedules.one_f_one_b(2, BATCH))
    assert str(own.program) == str(given.program) and own.peak_memory_bytes == given.peak_memory_bytes
    assert own.step_time_s == given.step_time_s and trained(own) == trained(given)
    assert "I" in free.with_program(tp.schedules.one_f_one_b(2, BATCH)).program.counts


@pytest.mark.parametrize("recompute", ["attention", "full"])
def test_attention_is_made_again_all_slices_at_once_where_that_is_faster_and_fits(recompute):
    model, asked = tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=60, block_size=512), (CLUSTER, 1, 512)
    given = tp.plan(model, *asked, planner="terapipe", schedule="gpipe", stages=2, slicing=4, recompute=recompute)
    assert not any(given.program.remakes_apart())
    order = tp.Program.parse(re.sub(r"\b\d+R\d+\.\d+\b", "", str(given.program.strip())))
    own = given.with_program(order)
    assert str(own.program) == str(given.program) and own.step_time_s == given.step_time_s
    least = max(own.peak_memory_bytes) - 1
    lean = dataclasses.replace(given, memory_limit_bytes=least).with_program(order)
    assert max(lean.peak_memory_bytes) <= least and lean.step_time_s > own.step_time_s


def test_what_a_planner_itself_recomputes_is_made_again_in_the_faster_way_too():
    """All slices at once, though piper's own choice is no request's: slice by slice its step was 1.7 % longer."""
    model, asked = tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=60, block_size=128), (CLUSTER, 2, 128)
    limited = tp.plan(model, *asked, planner="piper", schedule="gpipe", slicing=2, memory_bytes=2545888)
    assert any(limited.recompute)
    own = limited.with_program(tp.Program.parse(re.sub(r"\b\d+R\d+\.\d+\b", "", str(limited.program.strip()))))
    assert own.step_time_s >= limited.step_time_s * (1 - 1e-9)


def test_stages_may_lie_elsewhere():
    given = plan(slicing=1, schedule="interleaved", chunks=2)
    own = given.with_program(tp.schedules.zb_v(2, BATCH))
    assert own.program.rank_of == (0, 1, 1, 0) and own.program.rank_of != given.program.rank_of
    same = tp.plan(MODEL, CLUSTER, BATCH, SEQ, planner="uniform", stages=2, slicing=1, schedule="zb-v", partition=given.stages)
    assert own.step_time_s == same.step_time_s and own.peak_memory_bytes == same.peak_memory_bytes
    assert trained(own) == trained(given)


def test_marks_of_overlap_are_no_halves():
    """DualPipeV's, the plan's own or from torch's CSV: the engine runs what they mark one behind the other, and a B of one's own as
    I with W behind it, which sends sooner than the plan's whole ones."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=61, block_size=SEQ, tie_weights=False)
    given = tp.plan(model, CLUSTER, BATCH, SEQ, planner="uniform", stages=2, slicing=[(1, [SEQ])] * BATCH, schedule="dualpipe-v")
    assert "&" in str(given.program)
    wanted = trained(given)
    for program in (given.program, tp.schedules.dualpipe_v(2, BATCH), tp.Program.from_csv(given.to_torch_csv())):
        own = given.with_program(program)
        assert "&" not in str(own.program) and own.step_time_s <= given.step_time_s
        assert trained(own) == wanted


@pytest.mark.parametrize("program,error,words", [
    ("0F0.0 0B0.0", ValueError, "program has 1 ranks: 2, as the plan"),
    (tp.schedules.interleaved(2, 4, 2, 2), ValueError, "program has 4 stages: 2, as the plan"),
    (tp.schedules.gpipe(2, 2, 2), ValueError, "program has 2 micro-batches: 4, as the plan"),
    (tp.schedules.gpipe(2, 4, [2, 2, 3, 2]), ValueError, "program cuts micro-batch 2 into 3 slices: 2, as the plan"),
    (tp.schedules.sliced_1f1b(2, 4, 1), ValueError, "forwards in halves"),
    (tp.schedules.gpipe(2, 4, 2).save_memory(b"\1\1", b"\0\0"), ValueError, "program has R: F, B, I and W"),
    (TEXT.replace("1F1.0 1B0.0", "1B0.0 1F1.0").replace("1B1.1 1B1.0", "1B1.0 1B1.1"), tp.ScheduleError, "1I1.0"),
    (TEXT.replace("0F0.0 0F0.1", "0F0.1 0F0.0"), tp.ScheduleError, "rank 0, position 0"),
    ("x", ValueError, "a stage from 0"), (5, TypeError, "program is 5: a Program")])
def test_what_is_no_order_of_the_plans_work(program, error, words):
    with pytest.raises(error, match=words):
        plan().with_program(tp.Program.parse(program) if isinstance(program, str) else program)


def test_a_run_has_messages_between_neighbours_alone():
    far = "0F{0}.0 0B{0}.0\n2F{0}.0 2B{0}.0\n1F{0}.0 1B{0}.0\n3F{0}.0 3B{0}.0"
    given = tp.plan(MODEL, CLUSTER, 1, SEQ, planner="uniform", stages=4, schedule="gpipe", slicing=1)
    with pytest.raises(ValueError, match="program sends from rank 0 to rank 2"):
        given.with_program(tp.Program.parse(far.format(0)))


def test_an_order_that_holds_too_much():
    few = plan(schedule="seq1f1b")
    limited = plan(schedule="seq1f1b", memory_bytes=max(few.peak_memory_bytes))
    with pytest.raises(tp.InfeasibleError, match=r"rank \d needs (\d+) bytes with this program and may use") as refused:
        limited.with_program(tp.schedules.gpipe(2, BATCH, 2))
    assert str(max(plan().peak_memory_bytes)) in str(refused.value)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"schedule": "chimera"}], ids=["kept", "full", "chimera"])
def test_b_stay_whole_where_i_and_w_hold_too_much(options):
    """Stages go back block by block then: plans that fit so were refused in the order that they have."""
    given = plan(slicing=[(1, [SEQ])] * BATCH, **{"schedule": "1f1b", **options})
    program = given.program.strip() if given.schedule == "chimera" else tp.schedules.one_f_one_b(2, BATCH)
    order = re.sub(r"(\d+)I(\d+\.\d+) \1W\2", r"\1B\2", str(program))
    order = tp.Program.parse(re.sub(r"\d+R\d+\.\d+", "", order))
    assert set(order.counts) == set("FB")
    apart = given.with_program(order)
    with pytest.raises(tp.InfeasibleError, match=r"memory_bytes = (\d+)") as refused:
        dataclasses.replace(given, memory_limit_bytes=1).with_program(order)
    least = int(re.search(r"memory_bytes = (\d+)", str(refused.value))[1])
    whole = dataclasses.replace(given, memory_limit_bytes=least).with_program(order)
    assert max(whole.peak_memory_bytes) == least < max(apart.peak_memory_bytes)
    assert "B" in whole.program.counts and "I" not in whole.program.counts and "I" in apart.program.counts
    if given.schedule == "1f1b":
        limited = plan(slicing=[(1, [SEQ])] * BATCH, schedule="1f1b", partition=given.stages, memory_bytes=least, **options)
        assert limited.with_program(order).program == limited.program == whole.program
        assert trained(whole) == trained(apart)


def test_a_program_that_holds_too_much_is_told_the_least_that_its_swaps_need():
    """What is brought back later takes longer and holds less: these are the bytes that the refusal names."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=64, block_size=256)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e12, host_bandwidth_Bps=1e10, swaps_beside=True)
    asked = {"batch": 8, "seq_len": 256, "stages": 4, "schedule": "1f1b"}
    most = max(tp.plan(model, cluster, planner="uniform", **asked).peak_memory_bytes)
    given = tp.plan(model, cluster, planner="dawnpiper", memory_bytes=0.53 * most, **asked)     # workspaces are larger with AVX-512
    assert given.program.swaps_beside
    for program in (tp.schedules.zb_h1(4, 8), tp.schedules.zb_h2(4, 8)):
        with pytest.raises(tp.InfeasibleError, match=r"memory_bytes = (\d+)") as refused:
            given.with_program(program)
        least = int(re.search(r"memory_bytes = (\d+)", str(refused.value))[1])
        assert max(dataclasses.replace(given, memory_limit_bytes=least).with_program(program).peak_memory_bytes) == least
        with pytest.raises(tp.InfeasibleError):
            dataclasses.replace(given, memory_limit_bytes=least - 1).with_program(program)


def test_a_shared_weight_whose_ends_are_no_neighbours_is_named():
    home = [0, 1, 2, 3, 3, 3, 2, 2]     # all that follow each other are neighbours; only the weight's ends are not
    stages = [[k for k, rank in enumerate(home) if rank == r] for r in range(4)]
    text = "\n".join(" ".join([*(f"{k}F0.0" for k in mine), *(f"{k}B0.0" for k in reversed(mine))]) for mine in stages)
    given = tp.plan(MODEL, CLUSTER, 1, SEQ, planner="uniform", stages=4, schedule="looped-bfs", chunks=2, slicing=1)
    with pytest.raises(ValueError, match="first stage and the last, which share a weight, on ranks 0 and 2: neighbouring"):
        given.with_program(tp.Program.parse(text))
    loose = tp.plan(dataclasses.replace(MODEL, tie_weights=False), CLUSTER, 1, SEQ, planner="uniform", stages=4,
                    schedule="looped-bfs", chunks=2, slicing=1)
    assert loose.with_program(tp.Program.parse(text)).schedule == "own"


def test_a_plan_whose_program_is_not_what_it_says_is_refused():
    """Changed by hand, with `dataclasses.replace` or a digest made anew: one that was called 1f1b and updated by micro-batches was
    `executable`, with the bits of one device, and trained otherwise."""
    free = dataclasses.replace(MODEL, tie_weights=False)
    flat = tp.CostModel.from_table(np.ones((4, 4)), np.ones((4, 4)), granularity=8)
    piped, sync, both = (tp.plan(free, CLUSTER, BATCH, SEQ, flat, planner="uniform", stages=2, schedule=schedule)
                         for schedule in ("pipedream", "1f1b", "chimera"))
    named = dataclasses.replace(piped, schedule="1f1b")
    assert not named.executable and "updates after every micro-batch" in named.why_not_executable
    with pytest.raises(ValueError, match="this plan cannot be run as it is: schedule 1f1b updates after every micro-batch"):
        tp.launch(named, DATA, 1, processes=False, progress=False)
    cut = tp.plan(free, CLUSTER, 2, SEQ, planner="uniform", stages=1, schedule="gpipe", slicing=[(1, [8, 16]), (1, [24])])
    more = dataclasses.replace(sync, slicing=[(1, [8, 16])] * 2 + [(2, [24])])
    for wrong, words in ((named, r"schedule is '1f1b' and the program has updates by micro-batches \(U\)"),
                         (dataclasses.replace(piped, schedule="own"), r"schedule is 'own' and the program has updates by"),
                         (dataclasses.replace(sync, schedule="pipedream"), r"'pipedream' and the program has no update by a micro"),
                         (dataclasses.replace(sync, schedule="chimera"), "'chimera' and the program has one copy of the model"),
                         (dataclasses.replace(both, schedule="gpipe"), "'gpipe' and the program has 2 copies of the model"),
                         (dataclasses.replace(cut, slicing=[(1, [24]), (1, [8, 16])]),
                          "the program has 2 slices of micro-batch 0, the slicing 1: as many would be right"),
                         (more, "the program has 1 slice of micro-batch 0, the slicing 2: as many would be right"),
                         (dataclasses.replace(sync, slicing=[(2, [24])] * 2), "has 4 micro-batches, the slicing 2: as many would")):
        with pytest.raises(ValueError, match=words):
            tp.Plan.from_dict(wrong.to_dict())
    for right in (piped, sync, both, cut, both.with_program(both.program.strip())):
        assert tp.Plan.from_dict(right.to_dict()) == right


def test_a_plan_is_called_as_its_stages_guests_and_halves_are():
    """hanayo's stages under another name were emulated with interleaved's links, and gpipe's program was exported as 1f1b."""
    free = dataclasses.replace(MODEL, tie_weights=False)

    def made(schedule, batch=BATCH, **more):
        return tp.plan(free, CLUSTER, batch, SEQ, **{"planner": "uniform", "stages": 2, "schedule": schedule, **more})

    halves, guests = made("sliced-1f1b", 16, stages=3, slicing=[(8, [SEQ])] * 2), made("bpipe", stages=4)
    plans = made("hanayo", chunks=2), made("interleaved", chunks=2), halves, guests
    assert halves.program.counts["F"] > 6 and "SE" in guests.program.counts
    for plan, other, words in zip(plans, ("interleaved", "zb-v", "1f1b", "1f1b"), (
            r"'interleaved' and the program's stages are on ranks \[0, 1, 1, 0\]", r"'zb-v' and .* on ranks \[0, 1, 0, 1\]",
            "'1f1b' and the program has forwards in halves, as sliced", "'1f1b' and the program has guests"), strict=True):
        assert tp.Plan.from_dict(plan.to_dict()) == plan
        with pytest.raises(ValueError, match=f"schedule is {words}.*: that of its program would be right"):
            tp.Plan.from_dict(dataclasses.replace(plan, schedule=other).to_dict())
    for plan, name in ((made("gpipe"), "1f1b"), (made("looped-bfs", chunks=2), "interleaved")):
        with pytest.raises(ValueError, match=f"no such order as that of rank 0, which computes .F. where {name} computes .[BF]."):
            dataclasses.replace(plan, schedule=name).to_megatron()
