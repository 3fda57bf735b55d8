"""tp.train: ranks that another launcher started, here by this test in that launcher's words."""
import importlib
import inspect
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ports import free_port

import terapipe_c as tp
from terapipe_c import _core, interop, worker
from terapipe_c.checkpoint import model_dict
from terapipe_c.environment import PORTS, find_place
from terapipe_c.job import initial, look_at, make_job, neighbours
from terapipe_c.watch import Watch

HERE = Path(__file__).resolve().parent
CLEAN = {name: value for name, value in os.environ.items()
         if not name.startswith(("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC", "TERAPIPE_TOKEN", "RANK", "WORLD_",
                                "LOCAL_"))}
OPTIONS = {"steps": 4, "lr": 1e-3, "lr_schedule": "constant", "checkpoint_every": 2, "eval_every": 2, "eval_batches": 2,
           "meeting_s": 30}


def torchrun(rank, ranks, port):
    """As torchrun's agent does, whose own store listens at MASTER_PORT."""
    return {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": f"run {port}", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0}


def openmpi(rank, ranks, port):
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": ranks, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": ranks, "PMIX_NAMESPACE": f"prterun-{port}@1"}


def mpich(rank, ranks, port):
    return {"PMI_RANK": rank, "PMI_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def slurm(rank, ranks, port):
    return {"SLURM_PROCID": rank, "SLURM_NTASKS": ranks, "SLURM_LOCALID": rank, "SLURM_JOB_ID": port,
            "SLURM_STEP_ID": 0, "SLURM_JOB_NODELIST": "localhost"}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """(folder, {ranks: plan file}, data file)."""
    folder = tmp_path_factory.mktemp("train")
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=16, vocab_size=256, block_size=16)
    files = {}
    for ranks in (1, 2, 3):
        plan = tp.plan(model, tp.Cluster(num_devices=ranks, peak_flops=1e12), batch=2, seq_len=16, planner="uniform",
                       stages=ranks, slicing=[(1, [9, 7]), (1, [16])], executable=True)
        files[ranks] = folder / f"{ranks}.json"
        plan.save(files[ranks])
    data = folder / "text.txt"
    data.write_bytes(bytes(np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8)))
    return folder, files, data


def begin(plan, data, rank, environment, **options):
    words = [sys.executable, str(HERE / "train_rank.py"), str(plan), str(data), json.dumps({**OPTIONS, **options})]
    return subprocess.Popen(words, env={**CLEAN, **{name: str(value) for name, value in environment.items()}}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def told(child):
    out, err = child.communicate(timeout=60)
    return json.loads(out.splitlines()[-1]) if out else {"died": child.returncode, "stderr": err}


def run(plan, data, words, ranks, **options):
    port = free_port(PORTS + 1)
    return [told(child) for child in [begin(plan, data, rank, words(rank, ranks, port), **options) for rank in range(ranks)]]


@pytest.fixture(scope="module")
def launched(plans, tmp_path_factory):
    """{ranks: what tp.launch of the same plan gives}."""
    folder, files, data = plans
    results = {}
    for ranks in (2, 3):
        out = tmp_path_factory.mktemp("launched") / "run"
        one = tp.launch(tp.Plan.load(files[ranks]), data, out=out, progress=False, processes=False,
                        **{name: value for name, value in OPTIONS.items() if name != "meeting_s"}).wait()
        results[ranks] = one
    return results


@pytest.mark.parametrize(("words", "ranks"), [(torchrun, 2), (openmpi, 3), (mpich, 2), (slurm, 2)],
                         ids=["torchrun", "openmpi", "mpich", "slurm"])
def test_bits_are_those_of_launch(plans, launched, tmp_path, words, ranks):
    _, files, data = plans
    results = run(files[ranks], data, words, ranks, out=str(tmp_path / "run"))
    wanted = launched[ranks]
    for rank, one in enumerate(results):
        assert one["rank"] == rank and one["ranks"] == ranks, one
        assert one["losses"] == [record.loss for record in wanted] and one["norms"] == [record.grad_norm for record in wanted]
        assert one["evals"] == [record.eval_loss for record in wanted]
        assert one["checkpoint"] == str(tmp_path / "run" / "checkpoints" / wanted.checkpoint_path.name)
        assert one["memory"] == list(wanted.report().peak_memory_bytes)
    ours, theirs = tp.load_checkpoint(tmp_path / "run"), tp.load_checkpoint(wanted.out)
    assert all(np.array_equal(ours.params[name], value) for name, value in theirs.params.items())
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(p.name for p in wanted.out.iterdir())
    lines = [(tmp_path / "run" / "metrics.jsonl"), wanted.out / "metrics.jsonl"]
    one, other = ([json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in lines)
    assert one == other


def test_ranks_meet_at_the_loopback_of_ipv6(plans, launched):
    """Rank 0 listened at 127.0.0.1 where MASTER_ADDR is ::1."""
    if not Path("/proc/net/if_inet6").is_file() or " lo\n" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no ::1")
    _, files, data = plans
    results = run(files[3], data, lambda *place: mpich(*place) | {"MASTER_ADDR": "::1"}, 3, meeting_s=10)
    assert [one.get("losses") for one in results] == [[record.loss for record in launched[3]]] * 3, results


def test_a_run_is_resumed_by_either(plans, launched, tmp_path):
    _, files, data = plans
    out = tmp_path / "run"
    run(files[2], data, mpich, 2, out=str(out), steps=2)
    results = run(files[2], data, mpich, 2, out=str(out), resume=True)
    assert results[1]["losses"] == [record.loss for record in launched[2]][2:]
    assert "exists already" in run(files[2], data, mpich, 2, out=str(out))[0]["text"]
    with (out / "latest" / "optimizer.safetensors" if (out / "latest").exists() else
          out / "checkpoints/latest/optimizer.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    results = run(files[2], data, mpich, 2, out=str(out), resume=True, steps=9)
    assert "optimizer.safetensors: tensor exp_avg_sq." in results[0]["text"] and "is damaged" in results[0]["text"], results
    assert "because rank 0 failed first" in results[1]["text"], results


def test_the_death_of_a_rank_ends_all_with_its_name(plans):
    """Within two seconds, with room for starting the interpreters and a busy machine: nobody waits for a deadline."""
    _, files, data = plans
    for dead in (0, 2):
        results = run(files[3], data, mpich, 3, die={"rank": dead, "step": 2})
        assert results[dead].get("died") == -signal.SIGKILL
        for rank in {0, 1, 2} - {dead}:
            assert results[rank]["error"] == "AbortedError", results
            assert f"rank {rank} was ended because rank {dead} failed first: rank {dead} " in results[rank]["text"]


def test_the_failure_of_a_rank_reaches_all_in_its_own_words(plans):
    _, files, data = plans
    port = free_port()
    children = [begin(files[3], data, rank, mpich(rank, 3, port), fail={"rank": 1, "step": 1}) for rank in range(3)]
    ends = [child.communicate(timeout=60) for child in children]
    assert "ValueError: no café here" in ends[1][1]
    for rank in (0, 2):
        text = json.loads(ends[rank][0])["text"]
        assert text.startswith(f"rank {rank} was ended because rank 1 failed first: rank 1 failed at step 1")
        assert "no café here" in text


def test_what_differs_between_ranks_is_named(plans):
    _, files, data = plans
    port = free_port()
    children = [begin(files[2], data, rank, mpich(rank, 2, port), lr=rank + 1.0) for rank in range(2)]
    assert all("lr of rank 1 is not that of rank 0" in told(child)["text"] for child in children)
    assert "started 3 ranks and the plan has 2" in run(files[2], data, slurm, 3)[2]["text"]


def test_ranks_whose_sums_differ_are_told_before_they_train(plans):
    """A pipeline of both would have the bits of no device."""
    _, files, data = plans

    def run_on(sets, **options):
        port = free_port()
        return [told(child) for child in [begin(files[2], data, rank, {**mpich(rank, 2, port), "TERAPIPE_ISA": isa}, **options)
                                          for rank, isa in enumerate(sets)]]

    best = next((isa for isa in ("avx512", "avx2") if isa in _core.kernel_isas()), None)
    if best is None:
        pytest.skip("this processor has the portable kernels alone")
    for end in run_on(("portable", best)):
        assert end["error"] == "InvalidValueError"
        assert "instruction set (TERAPIPE_ISA chooses it, reproducible=False lets it differ) of rank 1 is not that" in end["text"]
    mixed = run_on(("portable", best), reproducible=False)
    assert len(mixed[0]["losses"]) == 4 and mixed[0]["memory"] == mixed[1]["memory"] == mixed[0]["predicted"]
    ends = run_on(("portable", "portable"))
    assert ends[0]["losses"] == ends[1]["losses"] and len(ends[0]["losses"]) == 4
    if best == "avx512":
        assert run_on(("avx2", "avx512"))[1]["losses"] == run_on(("avx512", "avx512"))[0]["losses"]


@pytest.mark.parametrize(("own", "words"), [
    ("data", "content of data of rank 1 is not that of rank 0 (here it is '4000 tokens of fingerprint"),
    ("init", "content of init of rank 1 is not that of rank 0"),
    ("folder", "rank 1 does not see the run folder of rank 0")])
def test_what_ranks_must_share_is_compared_before_the_first_step(plans, tmp_path, own, words):
    """A shard of the data on every rank, as data-parallel scripts have it, would be inputs of one text and targets of another."""
    _, files, data = plans
    ends = run(files[2], data, mpich, 2, own=own, out=str(tmp_path / "run"))
    assert [end["error"] for end in ends] == ["InvalidValueError"] * 2 and all(words in end["text"] for end in ends), ends
    assert not (tmp_path / "run").exists()


def test_a_rank_that_dies_before_the_first_step_leaves_nothing_for_which_the_same_call_is_refused(plans, tmp_path):
    tmp_path.joinpath("run").mkdir()
    ends = run(plans[1][2], plans[2], mpich, 2, own="end", out=str(tmp_path / "run"))
    assert ends[0]["error"] == "AbortedError" and ends[1]["died"] == -9 and list((tmp_path / "run").iterdir()) == [], ends


def test_a_rank_may_read_its_data_for_longer_than_ranks_wait_for_each_other(plans, tmp_path):
    """Of another disk, or with a tokenizer: it was the end of the run, before the first step."""
    text = tmp_path / "text.txt"
    text.write_text("who reads this takes his time " * 50)
    ends = run(plans[1][2], text, mpich, 2, own="tokenizer", timeout_s=1.0, steps=1, eval_every=0, checkpoint_every=0)
    assert len(ends[0].get("losses", ())) == 1 and ends[0]["losses"] == ends[1]["losses"], ends


def test_ranks_begin_with_the_parameters_at_a_path(plans, tmp_path):
    """Each rank read all of them, and a machine had to hold the model once for each of its ranks: now each reads one after another,
    and keeps its own."""
    _, files, data = plans
    plan, train = tp.Plan.load(files[2]), {name: OPTIONS[name] for name in ("lr", "lr_schedule")}
    params = tp.init_params(plan.model, 5)
    tp.export_hf(tmp_path / "model", model=plan.model, params=params)
    losses = [record.loss for record in tp.launch(plan, data, 2, init=params, processes=False, progress=False, **train)]
    short = {"steps": 2, "eval_every": 0, "checkpoint_every": 0}
    ends = run(files[2], data, mpich, 2, init=str(tmp_path / "model"), **short)
    assert ends[0].get("losses") == ends[1].get("losses") == losses, ends
    of = {"init": tmp_path / "model", "progress": False, **train}
    assert [[record.loss for record in tp.launch(plan, data, 2, processes=each, **of)] for each in (False, True)] == [losses] * 2
    params["transformer.h.2.mlp.c_fc.weight"][3, 1] = np.nan     # of the last stage
    saved = tp.save_checkpoint(tmp_path / "nan", plan.model, params)
    for end in run(files[2], data, mpich, 2, init=str(saved), **short):
        assert "init: transformer.h.2.mlp.c_fc.weight[3, 1] is nan" in end.get("text", ""), end
    with pytest.raises(ValueError, match=r"init: transformer\.h\.2\.mlp\.c_fc\.weight\[3, 1\] is nan"):
        tp.launch(plan, data, 2, init=saved, progress=False)


def test_a_transformers_folder_is_read_tensor_by_tensor(plans, tmp_path, monkeypatch):
    model, read, asked = tp.Plan.load(plans[1][2]).model, interop.read_tensor, []
    params = tp.init_params(model, 5)
    tp.export_hf(tmp_path / "model", model=model, params=params)
    monkeypatch.setattr(interop, "read_tensor", lambda path, spec: asked.append(spec.name) or read(path, spec))
    tensors = initial({"init_from": str(tmp_path / "model"), "model": model_dict(model)})
    assert asked == [] and len(tensors) == len(params) and all(name in tensors for name in params) and asked == []
    assert np.array_equal(tensors["transformer.ln_f.bias"], params["transformer.ln_f.bias"]) and asked == ["transformer.ln_f.bias"]


def test_ranks_load_the_checkpoint_that_they_compared(plans, tmp_path, monkeypatch):
    """A run under way in init's folder wrote its next one meanwhile: a rank that came to load it later had that one's."""
    plan, data = tp.Plan.load(plans[1][2]), plans[2]
    old, new = tp.init_params(plan.model, 5), tp.init_params(plan.model, 6)
    first = tp.save_checkpoint(tmp_path / "run", plan.model, old, step=1)
    begin = {"out": None, "resume": False, "val_fraction": 0.0, "tokenizer": None, "local_rank": 0, **defaults()}
    job, arrays = make_job(plan, data, 2, init=tmp_path / "run", **begin)
    launched, none = make_job(plan, data, 2, init=tmp_path / "run", **{**begin, "local_rank": None})
    assert arrays == {} == none
    tp.save_checkpoint(tmp_path / "run", plan.model, new, step=2)
    name = "transformer.wte.weight"
    assert np.array_equal(initial(job)[name], old[name]) and job["init_from"] == str(first.resolve())
    job["init_sums"] = look_at(initial(job))
    tp.save_checkpoint(tmp_path / "run", plan.model, new, step=1)       # in its place: stages of the one, and stages of the other
    for of in (job, launched):
        with pytest.raises(ValueError, match=f"{name} was replaced while the run began"):
            initial(of)[name]
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(ValueError, match="empty"):      # it was the working directory
        make_job(plan, data, 2, init="", **begin)


def defaults():
    taken = ("out", "init", "resume", "val_fraction", "tokenizer", "processes", "progress")
    return {name: one.default for name, one in inspect.signature(tp.launch).parameters.items()
            if one.default is not one.empty and name not in taken}


# ---- the meeting, in threads -----------------------------------------------------------------------------------------


def meeting(changes, ranks=2, meeting_s=20.0, port=None):
    """What each of the ranks is told: a communicator or the error."""
    port, results = port or free_port(), [None] * len(changes)

    def one(i):
        options = {"rank": i, "ranks": ranks, "host": "127.0.0.1", "token": "a", "version": "1", "plan": "x", **changes[i]}
        count = options.pop("ranks")
        pairs = options.pop("pairs", neighbours(count))
        region = _core.Region.create(count, bytes(count * count), 0, 64, False)
        try:
            results[i] = _core.tcp_comm(region, port=port, pairs=pairs, max_gather_bytes=64, meeting_s=meeting_s, **options)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(changes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def close(comms):
    threads = [threading.Thread(target=comm.close) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("changes", "words"), [
    ([{}, {"plan": "y"}, {}], "rank 1 was started with plan y where rank 0 has plan x: one that was planned once, saved"),
    ([{"version": "0.9"}, {}, {}, {}], "rank 0 was started with version 0.9 of terapipe_c where 3 others have version 1"),
    ([{}, {"ranks": 3}], "rank 1 was started with 3 ranks where rank 0 has 2 ranks"),
    ([{}, {}, {"rank": 1}], "two processes say that they are rank 1"),
    ([{}, {"rank": 4, "ranks": 5}], "rank 4 was started with 5 ranks where rank 0 has 2"),
])
def test_who_does_not_fit_is_named_to_all(changes, words):
    for error in meeting(changes, ranks=len(changes)):
        assert isinstance(error, _core.InvalidValueError) and words in str(error), error


def test_who_does_not_come_is_named():
    errors = meeting([{}, {}], ranks=4, meeting_s=1.0)
    assert all(isinstance(error, _core.DeadlineError) for error in errors)
    assert "2 of 4 ranks did not come" in str(errors[0]) and str(errors[0]).endswith("within 1 s: 2, 3")
    alone, = meeting([{"rank": 1}], meeting_s=0.2)
    assert isinstance(alone, _core.DeadlineError) and "rank 1 did not reach rank 0 at 127.0.0.1" in str(alone)
    with pytest.raises(_core.DeadlineError, match=r"did not reach rank 0 at no.such.host.invalid:29500 within 0.1 s: \w+"):
        _core.tcp_comm(_core.Region.create(2, bytes(4), 0, 64, False), 1, "no.such.host.invalid", 29500, neighbours(2), 64,
                       meeting_s=0.1)


def test_strangers_are_sent_away():
    """Silence, another protocol, and a rank of another job, who all call before the others come, do not disturb a meeting."""
    port, stopping, comms = free_port(), threading.Event(), [None] * 3

    def come(rank):
        comms[rank], = meeting([{"rank": rank}], ranks=3, port=port)

    def disturb(word, heard):
        while not stopping.is_set():
            with socket.socket() as one:
                one.settimeout(0.2)
                try:
                    one.connect(("127.0.0.1", port))
                    one.sendall(word)
                    heard.set()
                    one.recv(1)
                except OSError:
                    time.sleep(0.01)

    words = {word: threading.Event() for word in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(300))}
    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    strangers = [threading.Thread(target=disturb, args=one) for one in words.items()]
    for thread in (ranks[0], *strangers):
        thread.start()
    try:
        assert all(heard.wait(20.0) for heard in words.values())
        other, = meeting([{"rank": 1, "token": "b"}], ranks=3, meeting_s=2.0, port=port)
    finally:
        for thread in ranks[1:]:
            thread.start()
        for thread in ranks:
            thread.join()
        stopping.set()
        for thread in strangers:
            thread.join()
    assert isinstance(other, _core.DeadlineError) and "did not know us" in str(other)
    assert [comm.rank for comm in comms] == [0, 1, 2]
    close(comms)


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error, = meeting([{}], ranks=2, meeting_s=0.3, port=port)
        assert isinstance(error, _core.StorageError) and f"cannot listen at port {port}: Address already in use" in str(error)
        if port < 65535:  # the next one is tried where there may be one
            comms = meeting([{"ports": 8}, {"ports": 8}], port=min(port, 65528))
            assert [comm.rank for comm in comms] == [0, 1]
            close(comms)


def test_a_communicator_is_closed_once_and_for_all():
    comms = meeting([{}, {}])
    close(comms)
    comms[0].close()
    with pytest.raises(ValueError, match="closed"):
        comms[0].send(1, 0, b"")
    assert comms[0].rank == 0


def test_who_leaves_while_others_wait_is_named():
    one, two, three = meeting([{"timeout_s": 20.0}] * 3, ranks=3)
    two.close()
    for comm in (one, three):
        with pytest.raises(_core.AbortedError, match="rank 1 has left while others wait|rank 1 closed its connection"):
            comm.recv(1, 0, bytearray(1)) if comm is three else comm.barrier()
    close([one, three])


WAITS = """
import sys, time
from terapipe_c import _core
from terapipe_c.job import neighbours

rank, port, missing, rounds = map(int, sys.argv[1:])
region = _core.Region.create(3, bytes(9), 0, 64, False)
comm = _core.tcp_comm(region, rank, "127.0.0.1", port, neighbours(3), 64, meeting_s=60.0, timeout_s=2.0)
for _ in range(rounds):
    comm.barrier()
print("has met", flush=True)
if rank == missing:
    time.sleep(1000)
try:
    comm.barrier()
except _core.DeadlineError as error:
    region.abort("ETIMEOUT", rank, str(error))      # as train does, or the others learn nothing
    print(error, flush=True)
except _core.AbortedError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(("missing", "stuck", "rounds"), [(0, True, 0), (1, False, 0), (2, True, 2), (0, False, 2)])
def test_who_does_not_come_to_gather_is_named(missing, stuck, rounds):
    """Over TCP, at the first all-gather of all or a later one: a rank that does something else, or nothing at all."""
    port = str(free_port())
    ranks = [subprocess.Popen([sys.executable, "-c", WAITS, str(rank), port, str(missing), str(rounds)], stdout=subprocess.PIPE,
                              text=True) for rank in range(3)]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["has met\n"] * 3
        if stuck:
            ranks[missing].send_signal(signal.SIGSTOP)
        for rank in set(range(3)) - {missing}:
            line = ranks[rank].stdout.readline()
            silent = ", by which the ranks hear of each other, has said nothing for .* s, and was last heard"
            assert re.search(f"; rank {missing}({silent if stuck and not missing else ' is'}| is) before its first instruction",
                             line), line
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


def test_descriptors_and_threads_are_given_back():
    close(meeting([{}, {}]))
    before, threads = sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    close(meeting([{}, {}]))
    meeting([{}, {"plan": "y"}])
    deadline = time.monotonic() + 5.0  # Python's own threads end a little after they are joined
    while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(os.listdir("/proc/self/fd")) == before and len(os.listdir("/proc/self/task")) <= threads


@pytest.mark.parametrize("own", [False, True])
def test_ctrl_c_is_the_programs_where_it_has_a_handler(own):
    """Which may have it stop after this step, or not at all."""
    region, heard = _core.Region.create(1, bytes(1), 0, 64, False), []
    place = find_place({name: str(value) for name, value in mpich(0, 1, 29_500).items()})
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number)) if own else signal.getsignal(signal.SIGINT)
    try:
        with suppress(KeyboardInterrupt), Watch(region, place) as watch:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                while select.select([watch._pipe[0]], [], [], 0)[0]:    # until it has been seen
                    time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * own and (region.aborted() is None) == own


def test_ctrl_c_that_python_hears_has_the_words_of_one_that_c_heard():
    region = _core.Region.create(1, bytes(1), 0, 64, False)
    with worker.failures(0, region, lambda event: None):
        raise KeyboardInterrupt
    status, rank, text = region.aborted()
    assert (status, rank, text) == ("EABORTED", 0, worker.interruption(0, region)) and text.startswith("rank 0 was interrupted ")


def test_a_rank_that_closes_outlives_the_word_of_anothers_death(plans, monkeypatch):
    """MPICH's mpiexec -disable-auto-cleanup sends SIGUSR1, which ends a process that does not know of it."""
    of_rank, heard = importlib.import_module("terapipe_c.train")._Rank, []
    train = of_rank._train

    def then_close(self, arguments):
        outcome = train(self, arguments)
        self.messages = SimpleNamespace(close=lambda: heard.append(signal.getsignal(signal.SIGUSR1)))
        return outcome

    monkeypatch.setattr(of_rank, "_train", then_close)
    for name, value in mpich(0, 1, free_port()).items():
        monkeypatch.setenv(name, str(value))
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)   # a run that failed leaves it ignored
    tp.train(tp.Plan.load(plans[1][1]), plans[2], 1, launcher="mpiexec", progress=False)
    assert heard == [signal.SIG_IGN] and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_what_a_rank_is_warned_of_is_of_the_line_that_trains(monkeypatch, plans, tmp_path):
    arguments = tp.Plan.load(plans[1][1]), plans[2]
    for name, value in torchrun(0, 1, free_port()).items():
        monkeypatch.setenv(name, str(value))
    tp.train(*arguments, 1, out=tmp_path / "a", progress=False)
    with pytest.warns(UserWarning, match="resumed with lr = 0.001") as told:
        tp.train(*arguments, 2, out=tmp_path / "a", progress=False, resume=True, lr=1e-3)
    assert told[0].filename == __file__


# ---- alone ----------------------------------------------------------------------------------------------------------


def test_arguments_are_checked(plans):
    plan = tp.Plan.load(plans[1][1])
    with pytest.raises(TypeError, match="no argument 'processes'") as refusal:
        tp.train(plan, plans[2], 1, processes=True)
    own = {name for name, given in inspect.signature(tp.train).parameters.items() if given.kind is not given.VAR_KEYWORD}
    assert own <= set(re.findall(r"\w+", str(refusal.value))), refusal.value
    with pytest.raises(ValueError, match="launcher is 'pigeon'"):
        tp.train(plan, plans[2], 1, launcher="pigeon")
    with pytest.raises(TypeError, match="plan is str"):
        tp.train("plan", plans[2], 1)


def test_one_rank_alone_and_the_command(plans, tmp_path):
    """`terapipe train --under`: the same, from a shell."""
    _, files, data = plans
    words = [sys.executable, "-m", "terapipe_c", "train", str(files[2]), "--data", str(data), "--steps", "2", "--out",
             str(tmp_path / "run"), "--under", "mpiexec", "--json"]
    port = free_port()
    children = [subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env={**CLEAN, **{n: str(v) for n, v in mpich(rank, 2, port).items()}}) for rank in range(2)]
    (first, complaints), (second, _) = (child.communicate(timeout=60) for child in children)
    assert [child.returncode for child in children] == [0, 0], complaints
    assert len(first.splitlines()) == 3 and second == "" and "report" in json.loads(first.splitlines()[-1])
    alone, = run(files[1], data, mpich, 1)
    assert alone["rank"] == 0 and len(alone["losses"]) == 4


def test_a_trace_of_another_machine_is_put_on_the_clock_of_rank_0(monkeypatch):
    """Clocks began with their machines; all ranks began at one moment, which was 9 s on one and 109 s on the other."""
    module = importlib.import_module("terapipe_c.train")
    told = [[{"end": {"trace": [["F", rank, 0, 0, begun + 1 + rank, begun + 2 + rank]]}, "begun": begun, "boot": boot}
             for rank, (begun, boot) in enumerate(((9.0, "a"), (109.0, "b"), (9.25, "a")))], [{"history": [], "checkpoint": None}]]
    monkeypatch.setattr(module, "share", lambda comm, mine: told.pop(0))
    monkeypatch.setattr(module, "BOOT", Path("/nonexistent"))  # as in a chroot without /proc: a whole training ended by an error
    rank, outcome = object.__new__(module._Rank), SimpleNamespace(_ends={}, _history=[], _checkpoint=None)
    rank.comm = None
    rank._gather(outcome, {}, 0.0)
    assert [outcome._ends[r]["trace"][0][-2:] for r in range(3)] == [[10.0, 11.0], [11.0, 12.0], [12.25, 13.25]]
