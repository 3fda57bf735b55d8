"""time_limit_s: it ends every planner, there is a plan all the same where one is quickly built, and without one nothing changes.

The clock of deadlines is a counter here, which advances by a fixed step with every question: no test depends on the machine.
"""
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core, planners
from terapipe_c.partition import even_partition
from terapipe_c.planning import bidirectional, deadline, joint, ladder, partitioners, search, singles
from terapipe_c.planning.block_bytes import saved_bytes
from terapipe_c.planning.deadline import abandoning, late, share, within, without
from terapipe_c.planning.judge import Savings, pace
from terapipe_c.planning.request import PLANNERS, check_request
from terapipe_c.planning.starts import StageCost

MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=32)
CLUSTER = tp.Cluster(num_devices=6, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=2e9)
LARGE = tp.GPTConfig(n_layer=24, n_head=16, n_embd=1024, vocab_size=50257, block_size=2048)
REQUEST = {"batch": 4, "seq_len": 32, "executable": True}
NONE = dict.fromkeys(("stages", "data_parallel", "tensor_parallel", "chunks", "memory_bytes", "granularity", "partition", "slicing",
                      "executable", "time_limit_s"))


@pytest.fixture
def counted():
    """The clock of deadlines advances by a second with every question."""
    _core.deadline_count(10**9)
    yield
    _core.deadline_count(0)


@pytest.fixture(scope="module")
def tight():
    """Where uniform does not fit, and DawnPiper's does: (model, request)."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=50, block_size=256)
    request = {"batch": 4, "seq_len": 256, "executable": True, "stages": 2}
    even = tp.plan(model, CLUSTER, planner="uniform", **request)
    with pytest.raises(tp.InfeasibleError) as refused:
        tp.plan(model, CLUSTER, planner="dawnpiper", memory_bytes=1, **request)
    least = int(re.search(r"memory_bytes = (\d+)", str(refused.value))[1])
    return model, {**request, "memory_bytes": 0.5 * (least + max(even.peak_memory_bytes))}


def test_a_limit_ends_the_joint_search_with_the_best_so_far(counted):
    free, even = tp.plan(MODEL, CLUSTER, **REQUEST), tp.plan(MODEL, CLUSTER, planner="uniform", **REQUEST)
    step_s = []
    for limit in (1, 30, 300, 3_000, 30_000):
        one, again = (tp.plan(MODEL, CLUSTER, time_limit_s=limit, **REQUEST) for _ in range(2))
        assert one == again and one.search_log == again.search_log
        assert one.step_time_s <= even.step_time_s and one.lower_bound_s <= one.step_time_s
        stopped = any("time limit" in line for line in one.search_log)
        assert stopped == (f"ended by time_limit_s = {limit}" in one.search_log) or limit > 3_000
        step_s.append(one.step_time_s)
    assert step_s[0] == even.step_time_s and step_s[-1] < step_s[0]
    whole = tp.plan(MODEL, CLUSTER, time_limit_s=1e9, **REQUEST)             # nothing is stopped: the same, to the words
    assert whole == free and whole.search_log == free.search_log and whole.compared == free.compared


def test_a_plan_is_there_at_once_where_even_stages_do_not_fit(counted, tight):
    model, request = tight
    plan = tp.plan(model, CLUSTER, time_limit_s=1e-9, **request)
    assert max(plan.peak_memory_bytes) <= request["memory_bytes"]
    assert plan.search_log[-1].endswith("by what could be built at once")
    with pytest.raises(tp.InfeasibleError):
        tp.plan(model, CLUSTER, planner="uniform", **request)


def test_nothing_is_called_impossible_because_of_a_limit(counted):
    """Four bytes hold nothing, which is known; what was stopped is not known to be impossible."""
    with pytest.raises(tp.DeadlineError, match=r"time_limit_s is 1e-09, and planner auto had no plan by then that fits"):
        tp.plan(MODEL, CLUSTER, memory_bytes=4, time_limit_s=1e-9, **REQUEST)
    with pytest.raises(tp.InfeasibleError):
        tp.plan(MODEL, CLUSTER, memory_bytes=4, time_limit_s=1e9, **REQUEST)


def test_a_planner_that_was_stopped_without_a_plan_has_not_refused(counted, monkeypatch):
    """Each call of the clock is a second: those that are asked in time refuse, one ends late, and the rest are not asked."""
    request = check_request(MODEL, CLUSTER, 4, 32, None, planner="auto", schedule="auto", **NONE)
    monkeypatch.setattr(singles, "at_once", lambda request: (None, None))
    monkeypatch.setattr(singles, "_answer", lambda asked: tp.InfeasibleError("nothing fits"))
    with within(20):
        hurried = singles.plan_singles_within(request, 1.0)
    answers = dict(hurried.answers)
    stopped = [name for name, answer in answers.items() if isinstance(answer, tp.DeadlineError)]
    assert set(stopped) == set(hurried.cut) < set(answers) and len(answers) == len(PLANNERS) - 1
    said = [str(answers[name]) for name in hurried.cut]
    assert sum("nothing that fits before it was stopped" in text for text in said) in range(1, len(said))
    assert all("was not asked: no time was left" in text for text in said if "stopped" not in text)
    found = object()
    monkeypatch.setattr(singles, "_answer", lambda asked: found)
    with within(20):
        hurried = singles.plan_singles_within(request, 1.0)
    assert found in [answer for name, answer in hurried.answers if name in hurried.cut]           # what it had by then counts


@pytest.mark.parametrize(("times", "error"), [(1, tp.InfeasibleError), (9, tp.DeadlineError)])
def test_what_its_share_of_the_time_stopped_is_asked_again_and_not_called_impossible(counted, monkeypatch, times, error):
    """For searches that recompute: one ran out of its share long before the limit, while everything else was refused in time."""
    ask, rounds = joint.recomputing, []

    def stopped(request, rival_s, beside):
        rounds.append(request)
        return iter([("full", tp.DeadlineError("its share is over"))]) if len(rounds) <= times else ask(request, rival_s, beside)

    monkeypatch.setattr(joint, "recomputing", stopped)
    with pytest.raises(error):
        tp.plan(MODEL, CLUSTER, memory_bytes=4, time_limit_s=1e9, **REQUEST)
    assert len(rounds) == 2


@pytest.mark.parametrize("planner", PLANNERS[1:])
def test_a_limit_ends_every_single_planner(planner, counted, tight):
    free = tp.plan(MODEL, CLUSTER, planner=planner, **REQUEST)
    for model, request in ((MODEL, REQUEST), tight):
        for limit in (1, 3, 10, 30, 100, 1000, 10_000):
            try:
                plan = tp.plan(model, CLUSTER, planner=planner, time_limit_s=limit, **request)
            except tp.DeadlineError as error:
                assert f"time_limit_s is {limit:g}" in str(error) and planner != "uniform"
            except tp.InfeasibleError:
                assert model is not MODEL
            else:
                assert plan.planner == planner and max(plan.peak_memory_bytes) <= plan.memory_limit_bytes
    assert tp.plan(MODEL, CLUSTER, planner=planner, time_limit_s=1e9, **REQUEST) == free


def chain(rng):
    f = rng.integers(1, 50, 40).astype(float)
    memory = {"static_bytes": rng.integers(1, 9, 40).astype(float), "activation_bytes": rng.integers(1, 9, 40).astype(float),
              "limit_bytes": 400.0, "recompute_s": f}
    return f, 2 * f, memory


def asked(name, rng):
    """A planner's answer to a question that takes it many steps."""
    f, b, memory = chain(rng)
    if name == "dawnpiper" or name == "dawnpiper_binary":
        nodes = {"fwd_s": f, "bwd_s": b, "recompute_s": f, "activation_bytes": memory["activation_bytes"],
                 "param_bytes": memory["static_bytes"], "optimizer_bytes": f}
        return getattr(planners, name)(nodes, 8, 400.0, micro_batches=16)
    if name == "bmpipe":
        layers = [{"name": "a", "count": 20, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 1.0,
                   "strategies": [{"name": "none", "extra_bwd_s": 0.0, "activation_bytes": 3.0},
                                  {"name": "full", "extra_bwd_s": 1.0, "activation_bytes": 1.0}]}]
        return planners.bmpipe(layers, 4, 8, 30.0, time_limit_s=None)
    if name == "piper":
        graph = planners.layer_graph(f, b, 6, 12, memory=memory, param_bytes=f, bandwidth_Bps=1.0)
        return planners.piper(graph)
    if name == "autopipe" or name == "autopipe_heuristic":
        less = {k: v for k, v in memory.items() if k != "recompute_s"}
        return getattr(planners, name)(f, b, 12, 24, memory={**less, "limit_bytes": np.full(12, 2000.0)})
    more = {} if name in ("vpipe", "adapipe") else {"straight": True}
    if name not in ("vpipe", "adapipe"):
        memory = {**memory, "limit_bytes": 4000.0}
        del memory["recompute_s"]
    return getattr(planners, name)(f, b, 8, 16, memory=memory, **more)


@pytest.mark.parametrize("name", ["autopipe", "autopipe_heuristic", "dawnpiper", "dawnpiper_binary", "bmpipe", "pipedream",
                                  "dapple", "piper", "vpipe", "adapipe"])
def test_a_planner_in_c_stops_wherever_it_is(name, counted):
    """Whatever number of questions it has asked by then: a plan, or a DeadlineError; and the next question has its whole answer."""
    whole, stopped = repr(asked(name, np.random.default_rng(1))), 0
    for questions in (*range(1, 30), *(2**k for k in range(5, 22))):
        with within(questions + 0.5):
            try:
                asked(name, np.random.default_rng(1))
            except tp.DeadlineError as error:
                stopped += 1
                assert f"planner {name.removesuffix('_binary')}" in str(error)
            ended = late()
        if not ended:
            break
    assert stopped or name in ("autopipe", "autopipe_heuristic", "bmpipe", "vpipe")      # these have a plan at any time
    again = repr(asked(name, np.random.default_rng(1)))
    assert strip(again) == strip(whole)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_simulation_of_a_plan_of_many_micro_batches_stops_too(schedule, counted):
    """DawnPiper asks five questions to find this one; its step is 20 000 micro-batches through 48 stages."""
    nodes = dict.fromkeys(("fwd_s", "bwd_s", "recompute_s", "activation_bytes", "param_bytes", "optimizer_bytes"), np.ones(48))
    with within(60.5), pytest.raises(tp.DeadlineError, match="planner dawnpiper was stopped by the time limit"):
        planners.dawnpiper(nodes, 48, np.inf, micro_batches=20_000, schedule=schedule)


def strip(text):
    """Without the seconds that planning took."""
    return re.sub(r"(planned in:?|seconds=|in) ?[\d.e+-]+ ?(m|u|n)?s?", "", text)


@pytest.mark.parametrize("apart", [None, True])
def test_slices_have_a_plan_and_a_bound_at_any_time(apart, counted):
    n = 512
    s, c = np.indices((n + 1, n + 1))
    costs = tp.CostModel.from_table(1e-4 * (5 + s + 0.01 * s * c), 2e-4 * (5 + s + 0.01 * s * c), granularity=1)
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=8, block_size=n)
    cost = StageCost(costs, model, 4)
    whole = planners.slice_tokens(cost, 16, seq_len=n, granularity=1, bwd=apart)
    for questions in range(1, 40):
        with within(questions + 0.5):
            plan = planners.slice_tokens(cost, 16, seq_len=n, granularity=1, bwd=apart)
        assert sum(plan.lengths) == n and plan.lower_bound_s <= whole.latency_s * (1 + 1e-12) <= plan.latency_s * (1 + 2e-12)


def test_comparing_within_a_limit_has_a_row_for_every_planner(counted):
    comparison = tp.compare(MODEL, CLUSTER, planners=["auto", "uniform", "piper"], time_limit_s=1e-9, **REQUEST)
    assert comparison["auto"].plan is not None and comparison["uniform"].plan is not None
    assert "time_limit_s" in comparison["piper"].error


def test_limits_nest_and_are_of_one_thread(counted):
    assert not late()
    with within(2):
        with without():
            assert not any(late() for _ in range(9))
        with within(1000):                                     # what is around it ends it
            assert late() or late() or late()
        with share(0.5):
            assert late()
        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(late()))
        thread.start()
        thread.join()
        assert other == [False] and late()
        with within(None):
            assert late()
    assert not late()


class Interrupted:
    """The C core, but that the user presses Ctrl-C behind one of the calls that ask for a limit or set one."""

    def __init__(self, calls):
        self.left = calls

    def __getattr__(self, name):
        return getattr(_core, name)

    def interrupted(self, answer):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return answer

    def deadline_get(self):
        return self.interrupted(_core.deadline_get())

    def deadline_set(self, at_ns):
        return self.interrupted(_core.deadline_set(at_ns))


@pytest.mark.parametrize("planner", ["auto", "uniform"])
def test_an_interrupted_plan_leaves_no_limit_behind(planner, counted, monkeypatch):
    """The thread's next plan has the time that it asks for."""
    interrupts = 0
    for calls in range(1, 12):
        with monkeypatch.context() as patch:
            patch.setattr(deadline, "_core", Interrupted(calls))
            try:
                tp.plan(MODEL, CLUSTER, planner=planner, time_limit_s=30, **REQUEST)
            except KeyboardInterrupt:
                interrupts += 1
        assert _core.deadline_set(0) == 0
    assert interrupts > 2


def test_a_limit_that_was_never_left_restores_nothing_when_it_is_collected(counted):
    """Ctrl-C may keep a with statement from leaving its limit; the traceback that holds it goes when the next plan runs."""
    with within(1000):
        inner = share(0.5)
        inner.__enter__()
        _core.deadline_set(0)                                  # as plan leaves it
        del inner
        assert _core.deadline_set(0) == 0


@pytest.mark.parametrize("planner", ["auto", "uniform"])
def test_a_model_of_too_many_layers_is_refused_before_its_blocks_are_listed(planner):
    """2 * 10^9 blocks would fill any memory."""
    model = tp.GPTConfig(n_layer=10**9, n_head=1, n_embd=8, vocab_size=61, block_size=24)
    with pytest.raises(ValueError, match="n_layer is 1000000000: at most 16000 would be right"):
        tp.plan(model, tp.Cluster.local(), batch=1, seq_len=24, stages=2, planner=planner)
    assert len(_core.model_params((16000, 1, 8, 61, 24, 0, 1))) == 16000 * 6 + 3


@pytest.mark.parametrize(("width", "batch", "micros", "words"), [
    (2**31 - 1, 1, 1, "the model has 1.11e+20 parameters: at most 9.01e+15 would be right"),
    (2**12, 65536, 1, "1 micro-batches of up to 65536 sequences of 2147483647 tokens are 3.46e+18 numbers"),
    (2**16, 65536, 65536, "65536 micro-batches of up to 1 sequences of 2147483647 tokens are 5.53e+19 numbers"),
])
def test_bytes_beyond_64_bits_are_refused(width, batch, micros, words):
    """They were counted modulo 2^64: 1.8e21 bytes of parameters were 1.5e13, and fitted."""
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=width, vocab_size=2, block_size=2**31 - 1 if batch > 1 else 2)
    cluster = tp.Cluster(num_devices=2, memory_bytes=2**62, link_latency_s=1e-5, link_bandwidth_Bps=1e10, peak_flops=1e14)
    with pytest.raises(tp.InvalidValueError, match=re.escape(words)):
        tp.plan(model, cluster, batch=batch, seq_len=model.block_size, planner="uniform", schedule="gpipe",
                slicing=[(batch // micros, [model.block_size])] * micros)


def watched(begun, name, function):
    """The function; begun[name] counts how often it is called past the limit."""
    def asked(*arguments):
        begun[name] += late()
        return function(*arguments)
    return asked


@pytest.mark.parametrize("limit", [1, 3, 10, 30, 100, 300])
def test_past_the_limit_no_look_begins_and_no_question_whether_anything_fits(limit, counted, monkeypatch):
    """Ranks are ordered by looks, and schedules that refused are followed by the question whether any can fit: each of these builds
    programs, which take a second apiece where models are large."""
    begun = {"look": 0, "fits": 0}

    monkeypatch.setattr(partitioners, "first_look", watched(begun, "look", partitioners.first_look))
    monkeypatch.setattr(search._Hunt, "_fits_less", watched(begun, "fits", search._Hunt._fits_less))
    monkeypatch.setattr(search._Search, "_can_fit", watched(begun, "fits", search._Search._can_fit))
    with pytest.raises(tp.DeadlineError):
        tp.plan(MODEL, CLUSTER, planner="terapipe", memory_bytes=40_000, time_limit_s=limit, **REQUEST)
    assert begun["look"] <= 1 and begun["fits"] <= 1           # time may be up between the question and this one


def test_more_time_does_not_lose_the_plan_that_is_there_at_once(counted, tight):
    model, request = tight
    least = tp.plan(model, CLUSTER, time_limit_s=1e-9, **request).step_time_s
    for limit in (3, 10, 30, 100, 300, 1000, 3000):
        assert tp.plan(model, CLUSTER, time_limit_s=limit, **request).step_time_s <= least


@pytest.mark.parametrize("limit", [1, 3, 10, 30, 100, 300])
def test_past_the_limit_no_configuration_is_bounded_and_no_search_prepared(limit, counted, monkeypatch):
    """Large clusters have thousands, with hundreds of sizes of micro-batch each: bounds took seconds, of a limit of 0.1 s."""
    begun = {"bounds": 0, "searches": 0}

    monkeypatch.setattr(joint, "stages_bound_s", watched(begun, "bounds", joint.stages_bound_s))
    monkeypatch.setattr(joint._Configuration, "of", watched(begun, "searches", joint._Configuration.of))
    found = tp.plan(MODEL, CLUSTER, time_limit_s=limit, **REQUEST)
    log = "\n".join(found.search_log)
    assert begun["bounds"] <= 1 and begun["searches"] <= 1, log     # time may be up between the question and this one
    assert "left at the time limit" in log and "from 0" not in log


def test_what_there_was_no_time_to_bound_is_bounded_when_its_turn_has_come(monkeypatch):
    """Only a share of the limit is for looks: the searches after it began all that had no bound by then."""
    free, real = tp.plan(MODEL, CLUSTER, **REQUEST), joint._configurations
    monkeypatch.setattr(joint, "_configurations", lambda *given: [replace(c, bound=0.0) for c in real(*given)])
    found = tp.plan(MODEL, CLUSTER, **REQUEST)
    searches = [next(line for line in plan.search_log if line.startswith("searches of other")) for plan in (free, found)]
    assert searches[0] == searches[1] and "left out because their bounds" in searches[0]
    assert found == free


def _made_at_the_limit(monkeypatch, planner, **changes):
    """(plan, instructions of every program that was made) where there is no time at all."""
    made, run = [], _core.judge_run

    def watch(*args):
        out = run(*args)
        made.append(len(out[0]))
        return out

    monkeypatch.setattr(_core, "judge_run", watch)
    cluster = tp.Cluster(num_devices=24, memory_bytes=1e13, link_latency_s=1e-6, link_bandwidth_Bps=1e10, peak_flops=1e13)
    return tp.plan(LARGE, cluster, 1024, 2048, planner=planner, time_limit_s=1e-9, **changes), made


@pytest.mark.parametrize("planner, most", [("uniform", 2), ("terapipe", 2), ("auto", 1)])
def test_past_the_limit_no_more_is_built_than_a_small_program(planner, most, counted, monkeypatch):
    """terapipe built 12 programs at 96 ranks and 4096 sequences, the first of seven slices each: 33 s, of a limit of 0.1 s. Of one
    rank alone the plan then took as many times longer as there were ranks."""
    plan, made = _made_at_the_limit(monkeypatch, planner)
    assert len(made) <= most and sum(made) <= most * len(plan.program)
    if planner == "terapipe":
        assert (plan.ranks, plan.data_parallel) == (12, 1)     # 24 take longer to build
    if planner == "auto":
        assert plan.data_parallel > 1


@pytest.mark.parametrize("planner, latency_s, bandwidth_Bps, ranks, replicas", [
    ("terapipe", 1e-6, 1e5, 1, 1), ("terapipe", 100.0, 1e10, 1, 1), ("terapipe", 1e-6, 1e9, 12, 1), ("auto", 1e-6, 1e7, 1, 16),
    ("auto", 1e-6, 1e9, 3, 8)])
def test_past_the_limit_links_that_are_slow_are_not_waited_for(planner, latency_s, bandwidth_Bps, ranks, replicas, counted):
    """By passes alone twelve ranks were the fastest there is time for, were a message to take longer than all the work."""
    cluster = tp.Cluster(num_devices=24, memory_bytes=1e13, link_latency_s=latency_s, link_bandwidth_Bps=bandwidth_Bps,
                         peak_flops=1e13)
    request = dict(batch=1024, seq_len=2048, planner=planner, time_limit_s=1e-9, executable=False)
    plan = tp.plan(LARGE, cluster, **request)
    assert (plan.ranks, plan.data_parallel) == (ranks, replicas)
    assert plan.step_time_s <= tp.plan(LARGE, cluster, stages=1, **request).step_time_s


def test_past_the_limit_a_head_that_is_most_of_the_work_is_not_taken_for_evenly_divided(counted):
    """Three ranks of which one has it all were thought to be three times as fast as one."""
    model = tp.GPTConfig(n_layer=6, n_head=8, n_embd=64, vocab_size=50000, block_size=512)
    cluster = tp.Cluster(num_devices=24, memory_bytes=1e13, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=1e12)
    plan = tp.plan(model, cluster, 16384, 512, time_limit_s=1e-9)
    assert (plan.ranks, plan.data_parallel) == (1, 16)


def test_a_program_that_is_being_built_is_given_up_at_the_limit(counted):
    """Unless it must be there in any case; and what was given up is made once there is more time."""
    request = check_request(LARGE, tp.Cluster.preset("a100-80", 8), 1024, 2048, None, planner="uniform", schedule="1f1b", **NONE)
    judge, cut = request.judge(8), tuple(partitioners.balanced(request.judge(1), ((1, (2048,)),) * 2, 8))
    whole = ((1, (2048,)),) * 1024
    with within(1e-9):
        assert late()
        given_up = judge.judge("1f1b", cut, whole)
        assert given_up.seconds == float("inf") and judge.cut_short and not judge.fits(given_up, None)
        assert judge.cuts_within(given_up, 1 << 60, np.ones(LARGE.num_blocks)) == []
        with pytest.raises(tp.DeadlineError):
            judge.lowered(given_up)
        with without():
            made = judge.judge("1f1b", cut, whole)
    assert made.seconds < float("inf") and judge.judge("1f1b", cut, whole) == made
    assert max(judge.peak_bytes(made)) < 1 << 62


def test_a_descent_that_runs_out_of_time_gives_what_it_has(counted):
    request = check_request(LARGE, tp.Cluster.preset("a100-80", 8), 256, 2048, None, planner="uniform", schedule="1f1b", **NONE)
    judge = request.judge(8)
    cut = ((0, 2), *((k, k + 2) for k in range(2, 14, 2)), (14, LARGE.num_blocks))
    start, ends = judge.judge("1f1b", cut, ((1, (2048,)),) * 256), []
    for limit in (1, 10, 30, 100, 1000):
        with within(limit):
            end = judge.descend(start, None, unit=2048, fixed_partition=False, fixed_slicing=True, budget=10**9)
        assert end is not None
        ends.append(end.seconds)
    assert ends[0] == start.seconds and ends[-1] < 0.5 * start.seconds and all(s <= start.seconds for s in ends)


def test_bytes_and_seconds_that_are_given_up_are_not_garbage(counted):
    """Of a plan that swaps both are asked for by calls of their own: those of ranks, or of operations, that were not looked at were
    whatever was in that memory, and remembered."""
    request = check_request(MODEL, CLUSTER, 4, 32, None, planner="uniform", schedule="1f1b", **NONE)
    cut, whole = tuple(even_partition(MODEL, 6)), ((1, (32,)),) * 4
    swaps = Savings((), tuple(saved_bytes(MODEL, whole, request.costs.where)), (1e-5,) * 6)
    known = request.judge(6)
    made = known.judge("1f1b", cut, whole, 0, swaps)
    given_up = 0
    for limit in range(1, 20):
        judge = request.judge(6)
        with within(limit):
            found = judge.judge("1f1b", cut, whole, 0, swaps)
        given_up += judge.cut_short
        assert judge.cut_short == (found.seconds == float("inf")) and (judge.cut_short or found == made)
        assert judge.peak_bytes(found) == known.peak_bytes(made)             # there is time now
    assert given_up > 6                                                      # ranks, and the question before
    program, costs, given_up = tp.schedules.one_f_one_b(12, 4096), {"F": np.ones((12, 1)), "B": np.full((12, 1), 2.0)}, 0
    for limit in range(1, 16):
        with within(limit), abandoning():
            try:
                assert program.makespan(costs) == 3 * (4096 + 11)
            except tp.DeadlineError:
                given_up += 1
    assert 0 < given_up < 15


@pytest.mark.parametrize("planner", ["vpipe", "merak"])
def test_a_plan_that_was_not_judged_in_time_is_none_of_a_planners(planner, counted):
    """The last one of a ladder was remembered as it was, unmade, and the ladder as whole."""
    request = check_request(MODEL, CLUSTER, 4, 32, None, planner=planner, schedule="1f1b", **NONE)
    seconds, whole = [], ((1, (32,)),) * 4
    for limit in range(1, 60):
        judge = request.judge(6)
        task = ladder._question(judge, planner, "1f1b", whole, 0.0, None).free
        judge._seen.clear()
        judge._results.runs.clear()
        with within(limit):
            try:
                seconds.append(ladder.ask(task, planner).seconds)
            except tp.DeadlineError:
                assert not seconds
    assert len(set(seconds)) == 1 and seconds[0] < 1


def test_chimera_starts_from_no_plan_that_was_not_made(counted, monkeypatch):
    """A finer grid took the unmade ones of a coarser one for plans, and their slicings for done."""
    given, real = [], bidirectional._of_grid

    def watch(judge, request, coarser, leaner, most):
        given.append([c.seconds for c in (*coarser, *leaner)])
        return real(judge, request, coarser, leaner, most)

    monkeypatch.setattr(bidirectional, "_of_grid", watch)
    for limit in range(5, 200, 15):
        try:
            tp.plan(MODEL, CLUSTER, 4, 32, planner="terapipe", schedule="chimera", stages=4, time_limit_s=limit)
        except tp.DeadlineError:
            pass
    assert any(given) and max(max(seconds, default=0) for seconds in given) < 1


@pytest.mark.parametrize("schedule, ranks, memory, limits",
                         [("1f1b", 4, 10**9, (4180, 4300, 4420)), ("interleaved", 2, 8_806_515, (1600, 2400, 3000, 4000))])
def test_a_search_that_is_stopped_gives_the_fastest_plan_that_it_made(schedule, ranks, memory, limits, counted):
    """Its plan's program was to be made once more, for which there was no time, so that the even plan was given: 40 % slower than
    with a quarter of the time. And a ladder that was not built to its end left out what had been made for its first plan."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=300, block_size=256)
    given = {**NONE, "stages": ranks, "memory_bytes": memory}
    request = check_request(model, CLUSTER, 4, 256, None, planner="terapipe", schedule=schedule, **given)
    for limit in limits:
        judge = request.judge(ranks)
        with within(limit):
            made = search._Search(judge, (schedule,), 4, 256, request.unit, None, None)
            made.look()
            best = made.best()
            assert made.stopped and judge.fits(best, memory)
        fit = [pace(c) for hunt in made.hunts.values() for c in hunt.judge._seen.values() if hunt.judge.fits(c, memory)]
        assert pace(best) == min(fit)


@pytest.mark.parametrize("limit", [1800, 2550, 2800])
def test_what_chimeras_search_has_made_need_not_be_made_again(limit, counted):
    given = {**NONE, "stages": 4, "executable": False}
    request = check_request(MODEL, CLUSTER, 4, 32, None, planner="terapipe", schedule="chimera", **given)
    judge = request.judge(4)
    with within(limit):
        plans = bidirectional._explored(judge, request)
        assert plans and all(judge.fits(c, 10**9) for c in plans)


@pytest.mark.parametrize("planner", ["uniform", "terapipe", "vpipe"])
def test_a_plan_amid_another_ones_has_no_limit_but_its_own(planner, counted):
    """A signal's handler may make it, where a program is being built that will be given up: its own program was, or its error had
    no seconds to name."""
    request = {**REQUEST, "planner": planner, "stages": 2}
    free = tp.plan(MODEL, CLUSTER, **request)
    with within(1e-9), abandoning():
        assert late()
        at = _core.deadline_get()
        assert tp.plan(MODEL, CLUSTER, **request) == free
        assert _core.deadline_get() == at and _core.deadline_abandon(True) and late()
