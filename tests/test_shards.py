"""A sharded optimizer: replicas that have AdamW's moments of a part each train the bits of those that have all, in less memory."""
import itertools
import os
import signal

import numpy as np
import pytest
from test_replicas import DATA, MODEL, OPTIONS, UNTIED, planned, torchrun_gives, trained

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import RankEngine, gather_bytes, in_threads, init_params, rank_memory
from terapipe_c.job import neighbours
from terapipe_c.planning.bounds import bound_s, least_of_kinds, least_work_s, stages_bound_s
from terapipe_c.planning.replicas import Replicas
from terapipe_c.planning.request import check_request
from terapipe_c.report import resimulated

# Large enough that parts end within tensors, which they do at multiples of 16384 numbers.
WIDE = tp.GPTConfig(n_layer=1, n_head=2, n_embd=128, vocab_size=301, block_size=24)
WIDE_UNTIED = tp.GPTConfig(n_layer=2, n_head=2, n_embd=96, vocab_size=601, block_size=24, tie_weights=False, bias=False)
# (stages, chunks, schedule, slicing of a replica), replicas
WAYS = [((1, 1, "gpipe", [(3, [24])]), 2), ((2, 1, "zb-h1", [(1, [20, 4])] * 2), 3),
        ((1, 2, "interleaved", [(1, [11, 13])] * 3), 2), ((2, 1, "chimera", [(1, [24])] * 4), 1),
        ((2, 1, "1f1b", [(1, [24])] * 3), 4)]


def both(model, way, replicas, **options):
    batch = replicas * sum(b for b, _ in way[3])
    return [planned(model, replicas, way, batch=batch, shard_optimizer=shards, **options) for shards in (False, True)]


def left(run, folder):
    saved = tp.load_checkpoint(folder)
    return [(r.loss, r.grad_norm, r.eval_loss) for r in run.history], {"params": saved.params, **saved.optimizer}


def same(one, other):
    arrays = ((array, other[1][kind][name]) for kind in one[1] for name, array in one[1][kind].items())
    return one[0] == other[0] and all((mine == theirs).all() for mine, theirs in arrays)


@pytest.mark.parametrize(("model", "ways"), [(WIDE, WAYS), (WIDE_UNTIED, WAYS[:4]), (MODEL, WAYS[:2])],
                         ids=["tied", "untied", "small"])
def test_the_bits_of_moments_that_all_have(model, ways, tmp_path):
    """Losses, clipped norms, weights and moments; with sums beside the work and behind it, on threads and processes; and the memory
    that was predicted."""
    for i, (way, replicas) in enumerate(ways):
        whole, sharded = both(model, way, replicas, beside=i % 2 == 0)
        assert sharded.shard_optimizer and not whole.shard_optimizer
        assert max(sharded.peak_memory_bytes) < max(whole.peak_memory_bytes)
        found = []
        for plan in (whole, sharded):
            out = tmp_path / f"{i}-{plan.shard_optimizer}"
            run = trained(plan, processes=i == 0, threads_per_rank=1 + i % 2, out=out, eval_every=2, checkpoint_every=2,
                          grad_clip=0.5)
            found.append(left(run, out))
        assert same(*found), way


def test_what_it_spares():
    """8 (1 - 1 / replicas) bytes a parameter, but for what parts are uneven by, of each rank."""
    model = tp.GPTConfig(n_layer=4, n_head=4, n_embd=256, vocab_size=1000, block_size=24)
    for replicas in (2, 4):
        whole, sharded = both(model, (1, 1, "gpipe", [(1, [24])]), replicas)
        spared = whole.peak_memory_bytes[0] - sharded.peak_memory_bytes[0]
        assert 0.97 < spared / (8 * (1 - 1 / replicas) * model.num_params) <= 1
        assert sharded.step_time_s < whole.step_time_s


def test_a_run_goes_on_with_shards_and_without(tmp_path):
    way = (1, 1, "gpipe", [(3, [24])])
    whole, sharded = both(WIDE, way, 2)
    through = trained(whole, steps=6, processes=False, out=tmp_path / "through", checkpoint_every=3)
    for first, then in ((whole, sharded), (sharded, whole), (sharded, sharded)):
        out = tmp_path / f"{first.shard_optimizer}-{then.shard_optimizer}"
        trained(first, steps=3, processes=False, out=out, checkpoint_every=3)
        rest = tp.launch(then, DATA, 6, out=out, resume=True, processes=False, checkpoint_every=3, **OPTIONS).wait()
        assert [(r.loss, r.grad_norm) for r in rest.history] == [(r.loss, r.grad_norm) for r in through.history[3:]]
        assert same(left(rest, out), (left(rest, out)[0], left(through, tmp_path / "through")[1]))
    three = planned(WIDE, 3, (2, 1, "1f1b", [(1, [24])] * 2), shard_optimizer=True)
    last = tp.launch(three, DATA, 7, out=tmp_path / "True-True", resume=True, processes=False, checkpoint_every=0, **OPTIONS).wait()
    assert [r.step for r in last.history] == [6] and np.isfinite(last.history[0].loss)


def test_recomputation_and_swaps_beside_it(tmp_path):
    way = (2, 1, "1f1b", [(1, [12, 12])] * 3)
    whole, sharded = both(WIDE, way, 2, recompute="full")
    runs = [left(trained(plan, processes=False, out=tmp_path / str(plan.shard_optimizer), checkpoint_every=3), tmp_path
            / str(plan.shard_optimizer)) for plan in (whole, sharded)]
    assert sharded.program.counts["R"] > 0 and same(*runs)


def test_under_another_launcher(tmp_path):
    plan = planned(WIDE, 2, (2, 1, "1f1b", [(1, [24])] * 3), batch=6, shard_optimizer=True)
    plan.save(tmp_path / "plan.json")
    (DATA % WIDE.vocab_size).tofile(tmp_path / "tokens.bin")
    wanted = trained(plan, steps=4, processes=False, seed=0, lr=1e-3, eval_every=2, eval_batches=2)
    torchrun_gives(wanted, tmp_path, tmp_path / "tokens.bin")


def test_a_rank_that_dies_ends_the_others(tmp_path):
    plan = planned(WIDE, 2, (2, 1, "1f1b", [(1, [24])] * 3), shard_optimizer=True)
    run = tp.launch(plan, DATA, 10_000, out=tmp_path, checkpoint_every=1, **OPTIONS)
    next(record for record in run if record.step == 2)             # there is a checkpoint then
    os.kill(run.pids[2], signal.SIGKILL)
    with pytest.raises(tp.Error, match=r"rank 2 was killed by signal 9 \(SIGKILL\)"):
        run.wait()
    assert not run.running and tp.load_checkpoint(tmp_path).optimizer


# ---- a rank's engine -------------------------------------------------------------------------------------------------------


def engines(shards, work):
    """What `work(engine, replica)` gives, of two replicas of one rank."""
    program = tp.schedules.gpipe(1, 1, 1).lower()
    pairs = neighbours(2, 2)
    region = _core.Region.create(2, pairs, 1 << 16, max(64, gather_bytes(WIDE)), False)

    def one(replica):
        engine = RankEngine(WIDE, [(0, WIDE.num_blocks)], [(1, [24])], program, 0, _core.Comm(region, replica, 20.0), replicas=2,
                            replica=replica, shards=shards)
        engine.load(init_params(WIDE, seed=3))
        return work(engine, replica)

    return in_threads(region, one)


def tokens_of(replica):
    return np.random.default_rng(replica).integers(0, WIDE.vocab_size, (1, 25)).astype(np.int32)


def test_gradients_without_an_update_are_whole():
    def gradients(engine, replica):
        engine.run(tokens_of(replica), update=False)
        return engine.export("grads")

    whole, sharded = (engines(shards, gradients)[0] for shards in (False, True))
    assert set(whole) == set(sharded) and all((whole[name] == sharded[name]).all() for name in whole)


def test_gradients_that_are_none_are_not_given_for_such():
    """Behind a step that updates a replica has the sums of its part, and its own sequences' of the others'; behind gathered or
    loaded moments these. All were given as gradients."""
    initial = init_params(WIDE, seed=3)

    def gradients(engine, replica):
        said = []

        def refused():
            with pytest.raises(RuntimeError, match=r"run\(\.\.\., update=False\), which sums all of them, would be") as refusal:
                engine.export("grads")
            said.append(str(refusal.value).partition(": ")[0])

        engine.run(tokens_of(replica), lr=0.1)
        refused()
        for kind in engine.gathers:
            engine.gather(kind)
            refused()
        engine.load(initial, {"exp_avg": initial, "exp_avg_sq": initial})
        refused()
        engine.run(tokens_of(replica), step=2, update=False)
        return said, engine.export("grads")

    said, found = engines(True, gradients)[0]
    assert said == ["grads are sums of this replica's part alone, since the step updated",
                    *["grads are moments, since these were gathered"] * 2, "grads are moments, since these were loaded"]

    def wanted(engine, replica):
        engine.run(tokens_of(replica), lr=0.1)
        after = engine.export("grads")                             # where nothing is sharded they are whole
        engine.load(initial)
        engine.run(tokens_of(replica), step=2, update=False)
        return after, engine.export("grads")

    after, whole = engines(False, wanted)[0]
    assert found.keys() == whole.keys() and all((whole[name] == found[name]).all() for name in whole)
    assert any(array.any() for array in after.values())


def test_moments_are_gathered_before_they_are_read():
    def moments(engine, replica):
        engine.run(tokens_of(replica), lr=0.1)
        found = {}
        for kind in engine.gathers:
            with pytest.raises(RuntimeError, match=rf"{kind} is not gathered: gather\('{kind}'\) of all ranks would be right"):
                engine.export(kind)
            engine.gather(kind)
            found[kind] = engine.export(kind)
        engine.run(tokens_of(replica), step=2, lr=0.1)
        with pytest.raises(RuntimeError, match="exp_avg_sq is not gathered"):      # gradients are there now
            engine.export("exp_avg_sq")
        return found

    found = engines(True, moments)[0]
    wanted = engines(False, lambda engine, replica: (engine.run(tokens_of(replica), lr=0.1), engine.gathers,
                                                     {kind: engine.export(kind) for kind in ("exp_avg", "exp_avg_sq")}))[0]
    assert wanted[1] == () and found.keys() == wanted[2].keys()
    assert all((found[kind][name] == wanted[2][kind][name]).all() for kind in found for name in found[kind])
    assert any(array.any() for array in found["exp_avg_sq"].values())


def test_moments_that_are_loaded_take_the_place_of_gathered_ones():
    def first(engine, replica):
        engine.run(tokens_of(replica), lr=0.1)
        return engine.export("params"), {kind: engine.export(kind) for kind in ("exp_avg", "exp_avg_sq")}

    params, moments = engines(False, first)[0]

    def again(engine, replica):
        engine.run(tokens_of(replica), lr=0.1)
        engine.gather("exp_avg")
        engine.load(params)                                        # which leaves gradients and moments as they are
        kept = engine.export("exp_avg")
        engine.load(params, moments)
        with pytest.raises(RuntimeError, match="exp_avg is not gathered"):
            engine.export("exp_avg")
        engine.gather("exp_avg")
        return kept, engine.export("exp_avg")

    for found in engines(True, again)[0]:
        assert found.keys() == moments["exp_avg"].keys()
        assert all((found[name] == moments["exp_avg"][name]).all() for name in found)


def test_what_is_wrong_is_said():
    def alone(engine, replica):
        with pytest.raises(ValueError, match="moments are not sharded: each replica has all"):
            engine._core.gather("m")
        with pytest.raises(ValueError, match="state is grad: m or v would be right"):
            engine._core.gather("grad")

    engines(False, alone)

    def sharded(engine, replica):
        with pytest.raises(ValueError, match=r"each of 2 replicas has a part of its moments: gathered ones would be right"):
            engine._core.read(0, 0, "m")

    engines(True, sharded)
    with pytest.raises(ValueError, match="shard_optimizer is 'yes': True or False would be right"):
        planned(MODEL, 2, shard_optimizer="yes")


# ---- plans --------------------------------------------------------------------------------------------------------------------


def test_a_plan_says_it_in_its_file_and_its_words():
    whole, sharded = both(MODEL, WAYS[0][0], 2)
    again = tp.Plan.from_dict(sharded.to_dict())
    assert again == sharded and again.shard_optimizer and again.digest == sharded.digest != whole.digest and whole != sharded
    assert "shard_optimizer" not in whole.to_dict()                # of older packages
    assert "2 replicas of them, which shard the optimizer" in sharded.explain() and "shard" not in whole.explain()
    assert "2 replicas, the optimizer sharded" in sharded._repr_html_() and "sharded" not in whole._repr_html_()
    one = planned(MODEL, 1, WAYS[0][0], batch=3, shard_optimizer=True)
    without = planned(MODEL, 1, WAYS[0][0], batch=3)
    assert not one.shard_optimizer and one == without             # with nobody to share with, which the reader is told
    told = "shard_optimizer: one replica with one copy of the model has nobody to share moments with"
    assert told in one.explain() and told not in without.explain() and told not in sharded.explain()
    assert told in tp.Plan.from_dict(one.to_dict()).explain()


def test_megatron_s_flag():
    way = (2, 1, "1f1b", [(1, [24])] * 3)
    flags = [plan.to_megatron() for plan in both(UNTIED, way, 2)]
    assert flags[1] == flags[0] + " --use-distributed-optimizer"


def test_a_refusal_says_that_it_would_help():
    with pytest.raises(tp.InfeasibleError, match="more stages, recomputation, shard_optimizer=True or smaller micro-batches"):
        planned(WIDE, 2, memory_bytes=2e6)
    with pytest.raises(tp.InfeasibleError, match="more stages, recomputation or smaller micro-batches") as refused:
        planned(WIDE, 2, memory_bytes=2e6, shard_optimizer=True)
    fits = planned(WIDE, 2, memory_bytes=refused.value.memory_bytes, shard_optimizer=True)
    assert max(fits.peak_memory_bytes) == refused.value.memory_bytes
    with pytest.raises(tp.InfeasibleError):
        planned(WIDE, 2, memory_bytes=refused.value.memory_bytes)


def test_seconds_of_the_parts():
    """Half of the ring before the norm, half behind the update; of this what others do is spared. The first goes beside the work
    where it may, the second does not."""
    ring = Replicas(4, 1e-3, 1e6, shards=True, spared_param_s=1e-9)
    assert (ring.sums_s(1e6), ring.gather_s(1e6)) == pytest.approx((ring.seconds(4e6) / 2,) * 2)
    assert ring.spares_s == pytest.approx(1e-9 * 3 / 4) and Replicas(4, 1e-3, 1e6, spared_param_s=1e-9).spares_s == 0
    for beside in (False, True):
        whole, sharded = both(WIDE, WAYS[0][0], 2, beside=beside, link_bandwidth_Bps=1e8)
        one, other = whole.durations, sharded.durations
        names = ("OPT.sum", "OPT.beside", "OPT.last") if beside else ("OPT.sum",)
        assert all(other[name] == pytest.approx(one[name] / 2) for name in names)
        assert other["OPT.gather"] == pytest.approx(other["OPT.sum"] + (other["OPT.beside"] if beside else 0), rel=2e-3)
        work = [d["OPT"] - d["OPT.sum"] - d.get("OPT.gather", 0) for d in (one, other)]
        assert 0.5 < float((work[1] / work[0])[0, 0]) < 0.7            # of 0.26 + 0.74 / 2
        assert "OPT.gather" not in one


def test_gathered_values_are_no_work():
    """Over a slow link they and the sums take nearly all of the step, waiting."""
    whole, sharded = both(MODEL, (2, 1, "1f1b", [(1, [24])] * 3), 2, link_bandwidth_Bps=1e6)
    assert sum(sharded.busy_s) < sum(whole.busy_s) < 0.1 * sharded.ranks * sharded.step_time_s
    assert sharded.bubbles["comm"] > 0.9 * sharded.ranks * sharded.step_time_s
    assert sum(sharded.bubbles.values()) == pytest.approx(sharded.ranks * sharded.step_time_s - sum(sharded.busy_s))
    assert tp.Plan.from_dict(sharded.to_dict()).timeline().bubbles == sharded.timeline().bubbles


def test_what_was_measured_of_them_is_no_work_either():
    plan = planned(MODEL, 2, (2, 1, "1f1b", [(1, [24])] * 3), shard_optimizer=True)
    run = tp.launch(plan, DATA, 3, **OPTIONS).wait()
    report, intervals = run.report(), run.timeline().intervals
    told = {name: plan.durations[name] for name in ("OPT.beside", "OPT.last", "OPT.gather") if name in plan.durations}
    bare, behind = resimulated(plan.program, intervals, beside=told), plan.durations["OPT.sum"]
    assert 0 < behind.min() * 0.999 < report.resimulated_step_time_s - bare < behind.max() * 1.001
    without = resimulated(plan.program, intervals)
    assert bare - without >= plan.durations["OPT.gather"].min() * 0.999


@pytest.mark.parametrize("beside", [False, True], ids=["behind", "beside"])
def test_no_plan_is_faster_than_its_bounds(beside):
    for stages, replicas, chunks, bandwidth in itertools.product((1, 2, 3), (1, 2, 4), (1, 2), (1e7, 1e10)):
        cluster = tp.Cluster(num_devices=stages * replicas, peak_flops=1e11, link_bandwidth_Bps=bandwidth, sums_beside=beside)
        if stages * chunks > UNTIED.num_blocks:
            continue
        asked = {"planner": "terapipe", "schedule": "looped-bfs" if chunks > 1 else "1f1b", "stages": stages, "chunks": chunks,
                 "data_parallel": replicas, "shard_optimizer": True}
        plan = tp.plan(UNTIED, cluster, 4 * replicas, 24, **asked)
        request = check_request(UNTIED, cluster, 4 * replicas, 24, None, tensor_parallel=None, memory_bytes=None, granularity=None,
                                partition=None, slicing=None, executable=None, time_limit_s=None, **asked)
        each = bound_s(request, stages, chunks, replicas, least_work_s(request, request.share))
        cut = stages_bound_s(request, stages, chunks, replicas, least_of_kinds(request, request.share))
        assert 0 < each <= plan.step_time_s and 0 < cut <= plan.step_time_s, (stages, replicas, chunks, bandwidth)


# Two ranks, whose parameters take most of the memory: with whole moments 16 bytes each, with those of a fifth 9.6.
HEAVY = tp.GPTConfig(n_layer=3, n_head=4, n_embd=256, vocab_size=700, block_size=16, tie_weights=False)


CUT = [(1, [16])] * 2


def heavy(planner, memory_bytes, shards):
    return tp.plan(HEAVY, tp.Cluster(num_devices=10, peak_flops=1e12), 10, 16, planner=planner, stages=2, schedule="1f1b",
                   slicing=CUT, data_parallel=5, memory_bytes=memory_bytes, shard_optimizer=shards)


def least_bytes():
    """Of the fullest rank, over all partitions into two stages; by the engine, of the program that holds least."""
    program = tp.schedules.one_f_one_b(2, len(CUT)).lower()
    cuts = [[(0, k), (k, HEAVY.num_blocks)] for k in range(1, HEAVY.num_blocks)]
    return min(max(rank_memory(HEAVY, cut, CUT, program, replicas=5, shards=True)) for cut in cuts)


def test_what_a_refusal_says_is_the_least_that_shards_need():
    with pytest.raises(tp.InfeasibleError) as refused:
        heavy("terapipe", 1e6, True)
    assert refused.value.memory_bytes == least_bytes()


@pytest.mark.parametrize("planner", ["dapple", "pipedream", "piper", "bmpipe", "dawnpiper", "vpipe", "adapipe", "autopipe"])
def test_the_papers_planners_know_what_shards_spare(planner):
    """A plan for little more than the least, where whole moments have no room."""
    limit = 1.25 * least_bytes()
    with pytest.raises(tp.InfeasibleError):
        heavy(planner, limit, False)
    assert max(heavy(planner, limit, True).peak_memory_bytes) <= limit


def test_no_planner_is_passed_over_for_moments_that_others_have():
    """BMPipe was, in the least memory that has a plan, as if its stages had no room."""
    assert "bmpipe" in dict(heavy("auto", least_bytes(), True).compared)
