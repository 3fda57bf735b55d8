"""What a user meets on a machine with GPUs, the emulated one here: commands plan for the GPU that they are told of, and what cannot
run there, or is told otherwise on another rank, is said before a rank begins."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda_emu import ROOT, build
from ports import free_port

import terapipe_c as tp
from terapipe_c import cli, cuda, profiling
from terapipe_c.backend import Backend, place_own
from terapipe_c.device_comm import kind_of
from terapipe_c.engine import RankEngine

if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)


def run(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


GPUS = ("--n-layer", 2, "--n-head", 2, "--n-embd", 16, "--seq-len", 16, "--batch", 2, "--stages", 2)


def test_what_is_for_a_gpu_is_planned_for_it(capsys, emulation, monkeypatch, tmp_path):
    """Not by the CPU's seconds, nor for its cores and memory: train measures the GPU where nobody gives costs."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(b"where shall a stage be cut? " * 100)
    real, asked = tp.profile, []
    monkeypatch.setattr(tp, "profile", lambda *args, **options: asked.append(options) or real(*args, budget_s=0.3, **options))
    code, _, err = run(capsys, "train", *GPUS, "--backend", "cuda", "--dtype", "float32", "--gpus", 0, 0, "--fast", "--threads",
                       "--data", "text.txt", "--steps", 1, "--out", "run")
    assert code == 0 and "on the first GPU of this machine" in err, err
    assert (asked[0]["backend"], asked[0]["dtype"], asked[0]["reproducible"]) == ("cuda", "float32", False)
    plan, gpu = tp.Plan.load("run/plan.json"), tp.cuda.devices()[0]
    assert (plan.backend, plan.dtype, plan.ranks) == ("cuda", "float32", 2)
    assert plan.cluster == tp.Cluster.local(2, backend="cuda") and plan.cluster.memory_bytes == gpu.total_bytes // 2
    assert tp.Cluster.local(backend="cuda").num_devices == 1
    code, out, _ = run(capsys, "plan", *GPUS, "--devices", 2, "--backend", "cuda", "--json", "--out", "plan.json")
    plan = tp.Plan.load("plan.json")
    assert code == 0 and (plan.backend, plan.dtype) == ("cuda", "bf16")
    assert run(capsys, "plan", *GPUS, "--devices", 2, "--device", "h100", "--backend", "cuda", "--out", "h100.json")[0] == 0
    assert tp.Plan.load("h100.json").cluster == tp.Cluster.preset("h100", 2, dtype="bf16")
    code, _, _ = run(capsys, "sweep", *GPUS, "--devices", 2, "--grid", "backend=cpu,cuda", "--out", "sweep.jsonl")
    peaks = [json.loads(line)["result"]["peak_memory_bytes"] for line in Path("sweep.jsonl").read_text().splitlines()]
    assert code == 0 and peaks[1] == list(plan.peak_memory_bytes) != peaks[0]


@pytest.mark.parametrize(("given", "told"), [
    (("--data", "nothing.txt"), "nothing.txt: no such file"),
    (("--out", "text.txt"), "a file is there"),
    (("--gpus", 1, 0), "--gpus is [1, 0]: 2 numbers from 0 to 0"),
    (("--backend", "cpu"), "--gpus is [0, 0]: none would be right for backend 'cpu'"),
    (("--min-lr", 1), "min_lr is 1: the cosine falls to it"),
    (("--seq-len", 4000, "--block-size", 4000), "4001"),
])  # fmt: skip
def test_no_gpu_is_measured_for_a_run_that_cannot_be(capsys, emulation, monkeypatch, tmp_path, given, told):
    """Measuring and planning take many seconds: what no plan would mend was said behind them."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(b"where shall a stage be cut? " * 100)
    monkeypatch.setattr(tp, "profile", lambda *args, **options: pytest.fail("measured"))
    code, _, err = run(capsys, "train", *GPUS, "--backend", "cuda", "--gpus", 0, 0, "--data", "text.txt", "--steps", 1,
                       "--out", "run", *given)
    assert code == 2 and told in err and len(err.splitlines()) == 1, err
    assert not Path("run").exists()


def test_costs_of_other_lengths_are_told(tmp_path):
    """A GPU's backward of a slice takes longer the more tokens follow it. Plans of longer sequences were too fast without a word,
    and of much longer ones "bwd(1 units after 1) is -0.0006": with the costs that an H200 gave for 1024 tokens, from 32768 on."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=32)
    cluster = tp.Cluster(num_devices=2, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9)
    tp.CostModel.analytic(model, cluster).save(tmp_path / "costs.json")
    written = json.loads((tmp_path / "costs.json").read_text())

    def plan(backend, dtype, seq_len, measured=16):
        text = json.dumps(written | {"source": "measured", "seq_len": measured, "backend": backend, "dtype": dtype})
        (tmp_path / "costs.json").write_text(text)
        tp.plan(model, cluster, 2, seq_len, tp.CostModel.load(tmp_path / "costs.json"), stages=2, planner="terapipe")

    told = re.escape("on sequences of 16 tokens and the plan's have 32: on 'cuda' a slice's backward takes longer the more tokens "
                     "follow it, so that the plan's seconds are off; costs of tp.profile(..., seq_len=32, backend='cuda')")
    with pytest.warns(UserWarning, match=told):
        plan("cuda", "bf16", 32)
    costs = tp.CostModel.load(tmp_path / "costs.json")
    with pytest.warns(UserWarning, match=told) as once:     # of no planner, but of the line that compares
        assert len(tp.compare(model, cluster, 2, 32, costs, planners=["uniform", "terapipe", "autopipe"]).ranked) == 3
    assert [one.filename for one in once] == [__file__]
    with pytest.warns(UserWarning, match=told) as once:
        assert tp.max_batch(model, 2, 1e9, planner="uniform", costs=costs, cluster=cluster, executable=True).batch == 1
    assert [one.filename for one in once] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan("cuda", "bf16", 16)
        plan("cpu", "float32", 32)      # whose backward pushes
        plan("cuda", "bf16", 32, None)  # from_measurements of whatever lengths


def test_what_is_made_again_is_timed_as_on_cpus(emulation):
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16, tie_weights=False)
    sampler = profiling._Sampler(1, 1, Backend("cuda", "float32"))
    for cuts, repeats, again in profiling._dealt([(1, [12, 4]), (2, [16])], 4, 2):
        sampler.run(model, cuts, repeats, {"attention", "ffn"}, again)
    for kind, phases in sampler.measured().items():
        if kind in ("attention", "ffn"):
            assert set(phases) == {"F", "I", "W", "R", "R.apart"}
            assert [row[:3] for row in phases["R.apart"]] == [row[:3] for row in phases["F"]] and min(r[3] for r in phases["R"]) > 0


def test_costs_of_a_gpu_are_for_its_machine(capsys, emulation, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=16)
    costs = tp.profile(model, backend="cuda", dtype="float32", budget_s=0.3)
    costs.save("costs.json")
    assert run(capsys, "plan", *GPUS[:-2], "--costs", "costs.json", "--out", "plan.json")[0] == 0
    plan = tp.Plan.load("plan.json")
    assert (plan.backend, plan.dtype) == ("cuda", "float32") and plan.cluster == tp.Cluster.local(backend="cuda")
    with pytest.warns(UserWarning, match="were measured on 'cuda' in float32 and the plan is for 'cuda' in bf16: its memory"):
        tp.plan(model, tp.Cluster(2), 2, 16, costs, backend="cuda", dtype="bf16")
    tp.cuda.load().emu_machine(devices=0)
    try:
        code, _, err = run(capsys, "plan", *GPUS, "--costs", "costs.json", "--out", "other.json")
        assert code == 1 and "this machine has no GPU for a plan" in err and "--devices" in err, err
    finally:
        tp.cuda.load().emu_machine()
    with pytest.raises(tp.Error, match=r"swap_folder is of a CPU's ranks"):
        tp.Cluster.local(backend="cuda", swap_folder=tmp_path)


def test_seconds_of_another_gpu_or_of_other_products_are_told(emulation, tmp_path):
    """Where it is planned on this machine, and in the report of what ran."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=61, block_size=16)
    costs = tp.profile(model, backend="cuda", dtype="float32", budget_s=0.3, reproducible=False)
    costs.save(tmp_path / "costs.json")
    own, here = tp.CostModel.load(tmp_path / "costs.json"), tp.Cluster.local(2, backend="cuda")
    assert own == costs and own.reproducible is False and own.device == tp.cuda.devices()[0].name
    other = tp.CostModel.from_dict({**own.to_dict(), "device": "GPU of elsewhere"})
    request = {"batch": 2, "seq_len": 16, "planner": "uniform", "stages": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine, elsewhere = tp.plan(model, here, costs=own, **request), tp.plan(model, tp.Cluster(2), costs=other, **request)
    with pytest.warns(UserWarning, match="costs were measured on 'GPU of elsewhere' and this machine's GPUs are '" + own.device):
        tp.plan(model, here, costs=other, **request)
    elsewhere.save(tmp_path / "plan.json")
    elsewhere = tp.Plan.load(tmp_path / "plan.json")
    assert (elsewhere.device, elsewhere.reproducible) == ("GPU of elsewhere", False) and elsewhere.digest == mine.digest

    def told(plan, **options):
        run = tp.launch(plan, list(range(60)) * 9, 1, backend="cuda", dtype="float32", devices=[0, 0], processes=False,
                        progress=False, **options)
        report = run.wait().report()
        # what was not measured on a GPU is not shown as what was
        assert f", measured on {own.device}\n" in repr(report) and f", measured on {own.device}<br>" in report._repr_html_()
        return [text for text in report.caveats if "the plan's seconds" in text]

    assert told(mine, reproducible=False) == []
    assert [text.partition(",")[0] for text in told(elsewhere)] == [
        "the plan's seconds were measured on GPU of elsewhere", "the plan's seconds were measured with reproducible=False"]


def test_a_fast_run_of_replicas_is_measured_with_the_products_that_it_has(capsys, emulation, monkeypatch, tmp_path):
    """Copies of the model have reproducible ones. The command measured others, and its report advised to measure again."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(b"where shall a stage be cut? " * 100)
    real = tp.profile
    monkeypatch.setattr(tp, "profile", lambda *args, **options: real(*args, budget_s=0.3, **options))
    for out, given in (("replicas", ("--stages", 1, "--data-parallel", 2)), ("chimera", ("--schedule", "chimera")), ("none", ())):
        code, text, err = run(capsys, "train", *GPUS, *given, "--backend", "cuda", "--gpus", 0, 0, "--fast", "--threads",
                              "--data", "text.txt", "--steps", 1, "--out", out)
        assert code == 0 and "the plan's seconds" not in text, err + text
        assert tp.Plan.load(f"{out}/plan.json").reproducible is (out != "none")


def test_an_error_of_the_command_names_its_flags(capsys, emulation, monkeypatch, tmp_path):
    """And what it advises can be given to it."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(b"where shall a stage be cut? " * 100)
    made = run(capsys, "plan", *GPUS, "--devices", 2, "--backend", "cuda", "--out", "plan.json")
    assert made[0] == 0, made[2]
    train = ("train", "plan.json", "--data", "text.txt", "--steps", 1, "--out", "run", "--threads")
    for given, told in (((), "this run has 'cpu' with float32: --backend cuda --dtype bf16 would be right"),
                        (("--backend", "cuda"), "a plan for 1 devices, or --gpus with a GPU for each rank, would be right"),
                        (("--backend", "cuda", "--gpus", -1, 0), "--gpus[0] is -1: at least 0")):
        code, _, err = run(capsys, *train, *given)
        assert code == 2 and told in err, err
    code, _, err = run(capsys, *train, "--backend", "cuda", "--dtype", "bf16", "--gpus", 0, 0)
    assert code == 0, err


def test_what_lacks_the_backend_names_no_plan_for_gpus_elsewhere(monkeypatch, tmp_path):
    """It could not make that one either: what a rank holds there is the backend's to say."""
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(tmp_path / "none.so"))
    with pytest.raises(tp.ExecutionError, match="which is no file$"):
        tp.Cluster.local(backend="cuda")


def test_ranks_that_share_a_gpu_under_a_launcher_send_through_the_host(monkeypatch):
    """NCCL refuses them. `launch` knew; a rank that a launcher started took NCCL whatever `devices` said."""
    monkeypatch.delenv("TERAPIPE_COMM", raising=False)
    monkeypatch.setattr(cuda, "load", lambda: SimpleNamespace(__name__="terapipe_c._cuda"))
    for given, kind in ((None, "nccl"), ([0, 1], "nccl"), ([0, 0], "host"), ([0, 1, 1], "host")):
        assert kind_of({"backend": "cuda", "ranks": 4, "local_rank": 1, "devices": given}) == kind, given
    assert kind_of({"backend": "cuda", "ranks": 2, "devices": [1, 0]}) == "nccl"
    assert kind_of({"backend": "cuda", "ranks": 2, "devices": [0, 0]}) == "host"


def test_heads_that_a_gpu_cannot_compute_are_refused_before_a_rank_starts(emulation):
    """A plan says so; until now a rank did, where it began."""
    wide = tp.GPTConfig(n_layer=2, n_head=1, n_embd=136, vocab_size=61, block_size=16)
    why = 'n_embd / n_head is 136: on CUDA with dtype "bf16" a multiple of 8 up to 128'
    request = {"batch": 1, "seq_len": 16, "planner": "uniform", "stages": 1}
    plan = tp.plan(wide, tp.Cluster(1), backend="cuda", **request)
    assert not plan.executable and why in plan.why_not_at_all and why in plan.explain()
    with pytest.raises(tp.Error, match=why):
        tp.plan(wide, tp.Cluster(1), backend="cuda", executable=True, **request)
    with pytest.raises(tp.Error, match=f"^{why}"):
        tp.launch(tp.plan(wide, tp.Cluster(1), **request), list(range(60)) * 9, 1, backend="cuda", progress=False)
    assert tp.plan(wide, tp.Cluster(1), **request).executable
    widest = tp.GPTConfig(n_layer=2, n_head=1, n_embd=128, vocab_size=61, block_size=16)
    for dtype in ("bf16", "float32"):
        plan = tp.plan(widest, tp.Cluster(1), backend="cuda", dtype=dtype, **request)
        assert plan.executable
        RankEngine(widest, plan.stages, plan.slicing, plan.program, 0, None, backend=Backend("cuda", dtype))


@pytest.mark.parametrize(("wish", "machine", "message"), [
    ("banana", {}, 'TERAPIPE_ATTENTION is "banana": "own"'),
    ("wgmma", {"major": 8}, "attention by wgmma runs on 9.0 .Hopper. alone"),
    (None, {"major": 7, "minor": 5}, "compute capability 7.5; 8.0 .Ampere. or newer is needed")])
def test_attention_that_a_gpu_cannot_compute_is_refused_before_a_rank_starts(emulation, monkeypatch, tmp_path, wish, machine,
                                                                             message):
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=16, vocab_size=61, block_size=16)
    plan = tp.plan(model, tp.Cluster(1), batch=1, seq_len=16, planner="uniform", stages=1)
    if wish:
        monkeypatch.setenv("TERAPIPE_ATTENTION", wish)
    tp.cuda.load().emu_machine(**machine)
    try:
        for refused in (lambda: tp.launch(plan, list(range(60)) * 9, 1, backend="cuda", out=tmp_path / "run", progress=False),
                        lambda: place_own(Backend("cuda", "bf16"), 3, 0, None, 0), lambda: tp.cuda.attention_kernel(0),
                        lambda: tp.profile(model, backend="cuda", budget_s=0.1)):
            with pytest.raises(tp.Error, match=message):
                refused()
    finally:
        tp.cuda.load().emu_machine()
    assert not (tmp_path / "run").exists()


def test_ranks_that_would_send_otherwise_are_told_so(tmp_path):
    """mpirun hands TERAPIPE_COMM to other machines only by -x; they gathered other things then, and said how many bytes."""
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=16, block_size=8)
    tp.plan(model, tp.Cluster(num_devices=2, peak_flops=1e12), batch=1, seq_len=8, planner="uniform", stages=2,
            backend="cuda").save(tmp_path / "plan.json")  # fmt: skip
    port, script = free_port(), ("import sys, terapipe_c as tp; "
                                 "tp.train(tp.Plan.load(sys.argv[1]), [1, 2, 3] * 99, 1, backend='cuda', "
                                 "devices=[0, 0], progress=False)")
    ranks = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "plan.json")], stderr=subprocess.PIPE, text=True,
                              env=os.environ | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
                                                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                                                "MASTER_PORT": str(port), "TERAPIPE_CUDA_MODULE": str(build()),
                                                "TERAPIPE_COMM": ("host", "nccl")[rank]}) for rank in range(2)]
    for wish, one in zip(("host", "nccl"), ranks, strict=True):
        assert re.search(rf"messages .TERAPIPE_COMM chooses it. of rank 1 is not that of rank 0 .here it is '{wish}'",
                         one.communicate(timeout=120)[1])
