"""NCCL between processes, as on machines with GPUs: a false libnccl whose ranks are processes (tests/cuda/fake_nccl_processes.c),
by launch and by a launcher's variables. Other tests of NCCL have ranks that are threads of one process. By `make nccl-check` these
tests are NCCL's own host code's (tests/nccl_host.py)."""
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_ranks import OWN, OWN_SETTINGS, compile_fake
from ports import free_port

import terapipe_c as tp
from terapipe_c.device_comm import check_settings

HERE, STEPS = Path(__file__).resolve().parent, 2
OPTIONS = {"backend": "cuda", "dtype": "float32", "checkpoint_every": 1, "timeout_s": 20.0, "lr_schedule": "constant"}


@pytest.fixture
def processes(emulation, monkeypatch, tmp_path):
    """Ranks of this test are processes that talk by that library. A file of data."""
    monkeypatch.setenv("TERAPIPE_NCCL", OWN or str(compile_fake(tmp_path, source="fake_nccl_processes")))
    for name, value in (OWN_SETTINGS | {"TERAPIPE_NCCL_ONE_GPU": "1"} if OWN else {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TERAPIPE_COMM", "nccl")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    (tmp_path / "data").write_bytes(bytes(np.random.default_rng(0).integers(0, 64, 2000, dtype=np.uint8)))
    return tmp_path / "data"


def planned(ranks, schedule, replicas=1, **more):
    """4 micro-batches a step, in uneven slices."""
    layers = 2 if replicas > 1 else 2 * ranks
    model = tp.GPTConfig(n_layer=layers, n_head=2, n_embd=16, vocab_size=64, block_size=16)
    lengths = [16] if ranks == 1 else [6, 7, 3]
    return tp.plan(model, tp.Cluster(ranks * replicas), 4, 16, stages=ranks, data_parallel=replicas, planner="uniform",
                   schedule=schedule, slicing=[(1, lengths)] * (4 // replicas), backend="cuda", dtype="float32", **more)


def alone(plan):
    """The same model's plan on one device."""
    return tp.plan(plan.model, tp.Cluster(1), 4, 16, stages=1, planner="uniform", schedule="gpipe", slicing=[(1, [16])] * 4,
                   backend="cuda", dtype="float32")


def launched(plan, data, out, **options):
    devices = [0] * plan.ranks * plan.data_parallel
    return tp.launch(plan, data, STEPS, out=out, progress=False, devices=devices, **{**OPTIONS, **options}).wait()


def trained(plan, data, out, faults=None, **options):
    """What each rank of torchrun's says, and its standard error."""
    plan.save(out.with_suffix(".json"))
    port, ranks, words = free_port(), plan.ranks * plan.data_parallel, []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": f"run {port}", "FAKE_FAULT": faults or ""}
        given = {**OPTIONS, "steps": STEPS, "out": str(out), "devices": [0] * ranks, **options}
        words.append(subprocess.Popen(
            [sys.executable, HERE / "train_rank.py", out.with_suffix(".json"), data, json.dumps(given)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **{name: str(word) for name, word in place.items()}}))
    said = [child.communicate(timeout=60) for child in words]
    last = [text.splitlines()[-1] if text else "" for text, _ in said]
    told = [json.loads(line) if line.startswith("{") else {} for line in last]
    wrong = {0, -signal.SIGSEGV, -signal.SIGABRT}     # for who says nothing
    assert all(child.returncode == ("error" in one) if one else child.returncode not in wrong
               for child, one in zip(words, told, strict=True)), said
    return told, [error for _, error in said]


def state(folder):
    saved = tp.load_checkpoint(folder, optimizer=True)
    kinds = {"params": saved.params, **saved.optimizer}
    return {(kind, name): value.tobytes() for kind, values in kinds.items() for name, value in values.items()}


def test_processes_train_what_one_device_does(processes, tmp_path):
    """Stages that go down the ranks and up again; and replicas, whose sums are a group of messages between all of them."""
    for plan in (planned(3, "zb-v"), planned(4, "hanayo", chunks=2)):
        one, out = (tmp_path / f"{plan.ranks} {how}" for how in ("alone", "trained"))
        wanted = [(record.loss, record.grad_norm) for record in launched(alone(plan), processes, one)]
        ranks, errors = trained(plan, processes, out)
        assert all([*zip(told["losses"], told["norms"], strict=True)] == wanted for told in ranks) and errors == [""] * plan.ranks
        assert state(one) == state(out)
    assert state(launched(plan, processes, tmp_path / "launched").out) == state(one)
    ranks, errors = trained(planned(2, "1f1b", 2), processes, tmp_path / "replicas", reproducible=False)
    halves, _ = trained(planned(1, "gpipe", 2), processes, tmp_path / "halves", reproducible=False)
    assert errors == [""] * 4 and ranks[3]["losses"] == halves[0]["losses"]


# While ranks meet, in the first step and in a later one.
@pytest.mark.parametrize("fault", ["1 ncclCommSplit 3", "0 ncclGroupEnd 4", "2 ncclRecv 20", "1 ncclSend 80"])
def test_whoever_is_killed_is_named_though_nccl_sees_it_first(processes, fault, tmp_path, monkeypatch):
    """The others said that NCCL's call failed, of no rank, or that the rank failed first which had seen it."""
    plan, rank = planned(3, "zb-v"), int(fault[0])
    said, errors = trained(plan, processes, tmp_path / "run", fault)
    for other in {0, 1, 2} - {rank}:
        assert said[other]["error"] == "AbortedError" and errors[other] == "", (said, errors)
        words = f"rank {other} was ended because rank {rank} failed first: rank {rank} ended without a word"
        assert said[other]["text"].startswith(words)
    monkeypatch.setenv("FAKE_FAULT", fault)
    with pytest.raises(tp.PeerError, match=rf"rank {rank} was killed by signal 9 \(SIGKILL\)"):
        launched(plan, processes, tmp_path / "launched")
    monkeypatch.setenv("FAKE_FAULT", "")
    if "80" in fault:      # of a step that was not the first
        again = launched(plan, processes, tmp_path / "launched", resume=True)
        assert state(again.out) == state(launched(alone(plan), processes, tmp_path / "alone").out)


def test_whoever_hangs_is_named_in_time(processes, tmp_path):
    """The others' communicators are aborted with receives under way; who hangs is ended by its own process."""
    hangs = {"hang": {"rank": 1, "step": 1}, "timeout_s": 3.0, "stuck_s": 2.0}
    said, errors = trained(planned(3, "zb-v"), processes, tmp_path / "run", **hangs)
    words = r"rank [02] waited 3 s for NCCL's message with rank 1; rank 1 is at step 1, between instructions"
    assert all(re.search(words, said[rank]["text"]) and errors[rank] == "" for rank in (0, 2)), (said, errors)
    assert "DeadlineError" in {said[0]["error"], said[2]["error"]}
    assert said[1] == {} and re.search("rank 1 is ended: 2 s ago the run failed", errors[1]), errors


def test_ranks_that_nccl_does_not_let_go_of_end(processes, tmp_path, monkeypatch):
    """Aborts that hang, as NCCL's can: the launcher waits for these ranks, and nobody would end them."""
    monkeypatch.setenv("FAKE_STUCK", "1")
    said, errors = trained(planned(3, "zb-v"), processes, tmp_path / "run", "1 ncclSend 40", stuck_s=2.0)
    assert said == [{}] * 3
    why = r"2 s ago the run failed \(rank 1 ended without a word .*\), and still its GPU, or NCCL, does not let go of it\n"
    assert all(re.fullmatch(f"rank {rank} is ended: {why}", errors[rank]) for rank in (0, 2)), errors


@pytest.mark.skipif(OWN is not None, reason="the words and the aborts are the false library's")
def test_who_fails_says_so_before_its_abort_waits_for_the_others(processes, tmp_path, monkeypatch):
    """As NCCL's does, of ranks of one machine: they did not know, and were told that they had waited for that rank in vain."""
    monkeypatch.setenv("FAKE_STUCK", "others")
    said, errors = trained(planned(3, "zb-v"), processes, tmp_path / "run", "1 ncclSend -40", timeout_s=8.0)
    words = r"rank 1: NCCL's ncclSend with rank [02]: an error of the fake"
    assert said[1]["error"] == "ExecutionError" and re.match(words, said[1]["text"]) and errors == [""] * 3, (said, errors)
    for other in (0, 2):
        assert re.match(f"rank {other} was ended because rank 1 failed first: {words}", said[other]["text"]), said


def test_a_rank_may_read_its_tensors_for_longer_than_ranks_wait_for_each_other(processes, tmp_path):
    """By the thread that its GPU's graphs are captured by, too."""
    plan, start = planned(2, "1f1b"), tmp_path / "start"
    params = tp.init_params(plan.model, seed=5)
    tp.save_checkpoint(start, plan.model, params)
    said, errors = trained(plan, processes, tmp_path / "slow", init=str(start), own="disk", timeout_s=2.0)
    wanted = launched(alone(plan), processes, tmp_path / "alone", init=params)
    assert errors == ["", ""] and said[1]["losses"] == [record.loss for record in wanted]


def test_whoever_has_no_room_says_so(processes, tmp_path):
    """Behind the meeting of NCCL's ranks: it left the others waiting for it, and waited for them to end the communicators with it,
    so that a deadline was all that was told."""
    said, _ = trained(planned(3, "1f1b"), processes, tmp_path / "run", full=1)
    needs = "workspace of the kernels needs"
    assert said[1]["error"] == "OutOfMemoryError" and said[1]["text"].startswith(needs), said
    for other in (0, 2):
        assert said[other]["error"] == "AbortedError", said
        assert said[other]["text"].startswith(f"rank {other} was ended because rank 1 failed first: {needs}"), said


def test_libraries_of_different_versions_are_refused(processes, tmp_path):
    said, _ = trained(planned(3, "1f1b"), processes, tmp_path / "run", "2 ncclGetVersion 22703")
    words = r"rank 2 has NCCL 22703 and rank 0 has 22\d\d\d: the same on all would be right"
    assert all(re.search(words, told["text"]) for told in said) and "InvalidValueError" in {told["error"] for told in said}, said


def test_processes_that_swap_or_compute_again_train_what_one_device_does(processes, tmp_path):
    """Copies to the host and back are on a stream of their own, as NCCL's messages are."""
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=64, block_size=128)
    request = {"batch": 4, "seq_len": 128, "backend": "cuda", "dtype": "float32"}
    roomy = tp.plan(model, tp.Cluster(3), stages=3, planner="dawnpiper", **request)
    one = tp.plan(model, tp.Cluster(1), stages=1, planner="uniform", schedule="gpipe", slicing=[(1, [128])] * 4, **request)
    wanted = state(launched(one, processes, tmp_path / "one").out)
    for less, swaps, more in ((700_000, True, {"host_bandwidth_Bps": 1e14}), (400_000, False, {})):
        tight = tp.Cluster(3, memory_bytes=max(roomy.peak_memory_bytes) - less, **more)
        plan = tp.plan(model, tight, stages=3, planner="dawnpiper", **request)
        assert (any(plan.swap), any(plan.recompute)) == (swaps, not swaps)
        ranks, errors = trained(plan, processes, tmp_path / f"swaps {swaps}")
        assert errors == [""] * 3 and all(told["memory"] == told["predicted"] for told in ranks)
        assert state(tmp_path / f"swaps {swaps}") == wanted


WAITING = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1"}     # the first as for Megatron-LM


def test_settings_by_which_ranks_may_wait_for_ever_are_warned_of_once(processes, tmp_path, monkeypatch):
    """Receives wait on the device long before their messages are sent: what one holds up may be what its sender waits for."""
    plan = planned(2, "1f1b")

    def told_of(out, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            launched(plan, processes, tmp_path / out)
        assert all(one.filename == __file__ for one in told)
        return [str(one.message).partition(":")[0] for one in told]

    assert told_of("few", **WAITING) == ["CUDA_DEVICE_MAX_CONNECTIONS is 1", "CUDA_LAUNCH_BLOCKING is set"]
    _, errors = trained(plan, processes, tmp_path / "torchrun")
    assert [errors[0].count(f"UserWarning: {name} is ") for name in WAITING] == [1, 1] and errors[1] == "", errors
    assert told_of("host", TERAPIPE_COMM="host") == []      # no messages of NCCL's
    assert told_of("many", TERAPIPE_COMM="nccl", CUDA_DEVICE_MAX_CONNECTIONS="32", CUDA_LAUNCH_BLOCKING="0") == []


@pytest.mark.parametrize("name", ["NCCL_COMM_BLOCKING", "NCCL_COMM_SPLIT_SHARE_RESOURCES"])
def test_settings_that_nccl_puts_before_what_it_is_asked_for_are_refused(processes, tmp_path, monkeypatch, name):
    """By the first no deadline holds for its calls; by the other its channels wait for each other."""
    plan = planned(2, "1f1b")
    monkeypatch.setenv(name, "1")
    with pytest.raises(tp.InvalidValueError, match=f"{name} is 1: .*; 0, or not to set it, would be right"):
        launched(plan, processes, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    said, _ = trained(plan, processes, tmp_path / "torchrun")
    assert [(told["error"], name in told["text"]) for told in said] == [("InvalidValueError", True)] * 2
    monkeypatch.setenv(name, "0")
    launched(plan, processes, tmp_path / "run")


def test_settings_of_nccls_files_are_read_as_nccl_reads_them(processes, tmp_path, monkeypatch):
    """Its user guide, Environment Variables: a file sets what the environment, and the file before it, does not."""
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path)))
    assert check_settings() == []
    (tmp_path / ".nccl.conf").write_text("# of this machine\nNCCL_DEBUG=WARN\nNCCL_COMM_BLOCKING=1\nNCCL_COMM_BLOCKING=0\n")
    with pytest.raises(tp.InvalidValueError, match=r"NCCL_COMM_BLOCKING is 1 in .*/\.nccl\.conf: .* would be right"):
        launched(planned(2, "1f1b"), processes, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    other = tmp_path / "other.conf"
    monkeypatch.setenv("NCCL_CONF_FILE", str(other))    # instead of the one at home
    assert check_settings() == []
    other.write_text("NCCL_COMM_SPLIT_SHARE_RESOURCES=1\n")
    with pytest.raises(tp.InvalidValueError, match=f"NCCL_COMM_SPLIT_SHARE_RESOURCES is 1 in {re.escape(str(other))}: "):
        check_settings()
    monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0")
    assert check_settings() == []
