"""Blocks whose activations leave the memory until their backward: the same bits, in less memory, predicted to the byte."""
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_engine import HYPER, alone, everything, partition_of, problem, random_case, ranks_do, same

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.backend import choose
from terapipe_c.cli import main
from terapipe_c.engine import rank_memory, swap_bytes
from terapipe_c.guests import hosts
from terapipe_c.planning.block_bytes import saved_bytes
from terapipe_c.planning.judge import Savings, saving


def saves_at_random(model, rng):
    """(recompute, swap): what each attention and FFN block does, one swapping at least."""
    able = [i for i, block in enumerate(model.blocks) if block.kind in ("attention", "ffn")]
    ways = dict(zip(able, rng.integers(0, 3, len(able)).tolist(), strict=True))
    ways[int(rng.choice(able))] = 2
    return tuple(tuple(ways.get(i) == way for i in range(model.num_blocks)) for way in (1, 2))


def swapping(program, model, partition, saves, ahead=None):
    """The same program with its R, SO and SI, lowered again."""
    return saving(program, model, partition, Savings(*saves, ahead=ahead)).lower(model.tie_weights and program.num_stages > 1)


@pytest.mark.parametrize("seed", range(80))
def test_random_models_swapped_at_random_have_the_same_bits_and_the_predicted_memory(seed, tmp_path):
    """Half of them beside the work."""
    rng = np.random.default_rng(2000 + seed % 40)
    model, params, tokens, partition, slicing, program, threads = random_case(rng)
    recompute, swap = saves_at_random(model, rng)
    saves = {"recompute": recompute, "swap": swap}
    program = swapping(program, model, partition, (recompute, swap), seed % 4 if seed >= 40 else None)
    program.check()
    assert program.swaps_beside == (seed >= 40) and tp.Program.parse(str(program)) == program
    assert program.counts["SO"] == program.counts["SI"] > 0
    right = alone(model, params, tokens)
    same(right, everything(model, partition, slicing, program, params, tokens, threads, store=str(tmp_path), **saves))
    predicted = rank_memory(model, partition, slicing, program, threads, **saves)

    def held(engine):
        opened = engine._core.memory()
        engine.run(tokens, step=1, **HYPER)
        assert engine._core.memory() == opened
        return opened

    for rank, (bytes_, peak, _) in enumerate(ranks_do(model, partition, slicing, program, held, threads, params,
                                                      store=str(tmp_path), **saves)):
        assert bytes_ == peak == predicted[rank]
    assert os.listdir(tmp_path) == []                          # the files have no name


def test_a_step_with_halves_has_the_same_bits(tmp_path):
    model, params, tokens = problem(4, 12)
    partition, slicing, swap = partition_of(model, [2]), [(2, [12]), (2, [12])], (0, 1, 1, 1, 1, 0)
    program = tp.schedules.sliced_1f1b(2, 2, 1)
    assert "a" in str(program)
    program = program.save_memory(bytes(2), bytes([1, 1])).lower(True)
    same(alone(model, params, tokens), everything(model, partition, slicing, program, params, tokens, swap=swap,
                                                  store=str(tmp_path)))


def test_what_is_swapped_is_not_in_memory():
    """Of all that waits only the place is left where it is made, and where it comes back when its turn has come."""
    model, *_ = problem(8, 64, n_layer=4, n_embd=64)
    partition, slicing, swap = partition_of(model, [5]), [(1, [64])] * 8, (0, *[1] * 8, 0)
    program = tp.schedules.gpipe(2, 8)
    full = rank_memory(model, partition, slicing, program.lower(True))
    less = rank_memory(model, partition, slicing, program.save_memory(bytes(2), bytes([1, 1])).lower(True), swap=swap)
    inner = {"attention": 4 * 64 * 64 * 4, "ffn": 4 * 64 * 64 * 8}
    for rank, (first, end) in enumerate(partition):
        expected = (8 - 1) * sum(inner[model.blocks[i].kind] for i in range(first, end) if swap[i])
        assert abs(full[rank] - less[rank] - expected) < 0.01 * expected


def test_what_comes_back_while_another_goes_forward_has_its_own_place():
    """The slices of one micro-batch come back between the forward slices of the next."""
    model, *_ = problem(2, 64, n_layer=1, n_embd=64)
    slicing, swap = [(1, [32, 32])] * 2, (0, 1, 0, 0)
    apart = "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.0 0SI0.1 0B0.1 0B0.0 0F1.0 0SO1.0 0F1.1 0SO1.1 0SI1.0 0SI1.1 0B1.1 0B1.0"
    through = "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.0 0SI0.1 0B0.1 0F1.0 0SO1.0 0B0.0 0F1.1 0SO1.1 0SI1.0 0SI1.1 0B1.1 0B1.0"
    one, two = (rank_memory(model, partition_of(model, []), slicing, tp.Program.parse(text).lower(), swap=swap)[0]
                for text in (apart, through))
    assert two - one > 4 * 64 * 64 * 4


@pytest.mark.parametrize(("swap", "batch", "slices", "program"), [
    ((0, 0, 1, 0), 1, [12], "0F0.0 0SO0.0 0F1.0 0SI0.0 0SO1.0 0B0.0 0SI1.0 0B1.0"),
    ((0, 1, 0, 0), 1, [5, 7], "0F0.0 0SO0.0 0F0.1 0SO0.1 0F1.0 0SO1.0 0SI0.0 0SI0.1 0B0.1 0B0.0 "
                              "0F1.1 0SO1.1 0SI1.0 0SI1.1 0B1.1 0B1.0"),
    ((0, 0, 1, 0), 1, [5, 7], "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.1 0B0.1 0SI0.0 0F1.0 0SO1.0 0B0.0 "
                              "0F1.1 0SO1.1 0SI1.1 0B1.1 0SI1.0 0B1.0"),
    ((0, 0, 1, 0), 2, [5, 7], "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.1 0B0.1 0F1.0 0SO1.0 0F1.1 0SO1.1 "
                              "0SI0.0 0B0.0 0SI1.1 0B1.1 0SI1.0 0B1.0"),
], ids=["before it leaves", "between its slices", "until the next slice's backward", "until the sums of all its slices"])
def test_what_comes_back_leaves_alone_what_goes_forward(swap, batch, slices, program, tmp_path):
    """All that was brought has been read before the next forward; but the last forward, or its keys and values, are still there; or
    one slice has been read, and the next not yet; or, of several sequences, is read once more when all slices are there."""
    model, params, tokens = problem(2 * batch, 12, n_layer=1)
    lowered = tp.Program.parse(program).lower()
    lowered.check()
    same(alone(model, params, tokens), everything(model, partition_of(model, []), [(batch, slices)] * 2, lowered, params, tokens,
                                                  swap=swap, store=str(tmp_path)))


@pytest.mark.parametrize("swap, program, message", [
    ((1, 0, 0, 0, 0, 0), "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.0 0SI0.1 0B0.1 0B0.0", "block 0 is to be swapped, but it is the emb"),
    ((0, 1, 0, 0, 0, 0), "0F0.0 0F0.1 0B0.1 0B0.0", r"0SO0\.0 must come before the next forward of its stage, 0F0\.1"),
    ((0, 0, 1, 0, 0, 0), "0F0.0 0F0.1 0SO0.0 0SO0.1 0SI0.1 0B0.1 0SI0.0 0B0.0", r"0SO0\.0 must come before the next forward"),
    ((0, 0, 1, 0, 0, 0), "0F0.0 0SO0.0 0F0.1 0B0.1 0SI0.0 0B0.0", r"0SI0\.1 must come before its backward"),
    ((0, 1, 0, 0, 0, 0), "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.1 0SI0.0 0B0.1 0B0.0", r"0SI0\.1 comes where 0SI0\.0 would be right"),
    ((0, 1, 0, 0, 0, 0), "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.0 0B0.1 0SI0.1 0B0.0", "its backward is done already"),
    ((0, 0, 0, 0, 0, 0), "0F0.0 0SO0.0 0F0.1 0SO0.1 0SI0.0 0SI0.1 0B0.1 0B0.0", r"0SO0\.0, but no block of that stage is to be sw"),
])
def test_a_program_that_does_not_bring_back_what_is_missing_is_refused(swap, program, message):
    model, *_ = problem(1, 8)
    with pytest.raises((_core.Error, ValueError), match=message):
        lowered = tp.Program.parse(program).lower()
        lowered.check()
        rank_memory(model, partition_of(model, []), [(1, [3, 5])], lowered, swap=swap)


def test_a_folder_that_cannot_take_it_is_named(tmp_path):
    model, params, tokens = problem(1, 8)
    partition, slicing, swap = partition_of(model, []), [(1, [8])], (0, 0, 1, 0, 0, 0)
    program = tp.schedules.gpipe(1, 1).save_memory(bytes(1), bytes([2])).lower()
    for store, error, message in ((None, ValueError, "no folder was given"),
                                  (str(tmp_path / "none"), OSError, re.escape(str(tmp_path / "none")))):
        with pytest.raises(error, match=message):
            ranks_do(model, partition, slicing, program, lambda engine: None, 1, params, swap=swap, store=store)


def test_a_folder_may_have_any_name(tmp_path):
    """Paths are bytes to the system: neither a run that swaps nor its errors need them to be UTF-8."""
    model, params, tokens = problem(1, 8)
    partition, slicing, swap = partition_of(model, []), [(1, [8])], (0, 0, 1, 0, 0, 0)
    program = tp.schedules.gpipe(1, 1).save_memory(bytes(1), bytes([2])).lower()
    store = os.fsdecode(os.fsencode(tmp_path) + b"/a b\xff\n")
    with pytest.raises(OSError, match=r"a b\\xff\n, which cannot be made"):
        ranks_do(model, partition, slicing, program, lambda engine: None, 1, params, swap=swap, store=store)
    with pytest.raises(OSError, match="swaps to a file in"):   # the message ends within a character
        ranks_do(model, partition, slicing, program, lambda engine: None, 1, params, swap=swap, store="/" + "x\u00fc\u4e00" * 300)
    os.mkdir(store)
    same(alone(model, params, tokens), everything(model, partition, slicing, program, params, tokens, swap=swap, store=store))
    for path in (tmp_path, os.fsencode(tmp_path)):
        ranks_do(model, partition, slicing, program, lambda engine: None, 1, params, swap=swap, store=path)


def tight(**request):
    """A plan that must swap: the limit is what the plan without needs, less some of the activations that wait."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=256, block_size=128)
    wide = tp.Cluster(num_devices=2, memory_bytes=1e12)
    costs = tp.CostModel.analytic(model, wide)
    free = tp.plan(model, wide, batch=8, seq_len=128, costs=costs, planner="uniform",
                   stages=2, schedule="gpipe")
    cluster = dataclasses.replace(wide, memory_bytes=0.75 * max(free.peak_memory_bytes), host_bandwidth_Bps=1e14)
    return tp.plan(model, cluster, batch=8, seq_len=128, costs=costs, stages=2, **request)


@pytest.mark.parametrize("planner", ["dawnpiper", "vpipe", "auto"])
def test_a_plan_that_swaps_trains_as_one_device_does(planner, tmp_path):
    plan = tight(planner=planner, schedule="gpipe")
    assert plan.executable and any(plan.swap) and "swapped until their backward" in plan.explain()
    assert plan.program.counts["SO"] == plan.program.counts["SI"] > 0
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    one_device = tp.Cluster(num_devices=1, memory_bytes=1e12)
    alike = tp.plan(plan.model, one_device, batch=8, seq_len=128, planner="uniform", stages=1,
                    costs=tp.CostModel.analytic(plan.model, one_device))
    losses = []
    for name, one in (("swapped", plan), ("alone", alike)):
        run = tp.launch(one, data=str(text), steps=3, out=tmp_path / name, processes=False)
        losses.append([record.loss for record in run])
        report = run.report()
        assert report.peak_memory_bytes == report.predicted_peak_memory_bytes
        for bubbles in (one.bubbles, report.bubbles):
            assert (bubbles["swap"] > 0) == (one is plan)
        took = sum(end - start for _, op, *_, start, end in run.trace if op not in ("SF", "RF", "SB", "RB", "AR"))
        predicted = sum(one.busy_s) + one.bubbles["recompute"] + one.bubbles["swap"]
        assert report.work_ratio == pytest.approx(took / predicted)        # copies out and in beside what they were to take
    assert losses[0] == losses[1]
    again = tp.Plan.load(tmp_path / "swapped" / "plan.json")
    assert again == plan and again.executable


def test_a_part_of_a_block_is_not_executable():
    plan = tight(planner="dawnpiper", schedule="gpipe")
    data = plan.to_dict()
    first = next(i for i, size in enumerate(data["swap"]) if size)
    data["swap"][first] -= 1
    part = dataclasses.replace(plan, swap=data["swap"])
    assert not part.executable and f"a swap of {data['swap'][first]} bytes" in part.why_not_executable


@pytest.mark.parametrize("program, message", [
    ("0F0.0a 0F0.0b 0SO0.0 0F1.0a 0SI0.0 0B0.0 0F1.0b 0SO1.0 0SI1.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0", None),
    ("0F0.0a 0F1.0a 0F0.0b 0SO0.0 0F1.0b 0SO1.0 0SI0.0 0B0.0 0SI1.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0",
     r"stage 0 does not keep its FFNs, and begins micro-batch 1 forward before 0\.0"),
])
def test_half_a_forward_is_not_in_the_way_of_another_micro_batch(program, message, tmp_path):
    """The halves of a forward are swapped out together: until then nothing else may lie in their place."""
    model, params, tokens = problem(4, 12, n_layer=1)
    partition, slicing, swap = partition_of(model, [3]), [(2, [12]), (2, [12])], (0, 0, 1, 0)
    lowered = tp.Program.parse(program.replace("1F0.0 ", "1F0.0a 1F0.0b ").replace("1F1.0 ", "1F1.0a 1F1.0b ")).lower(True)
    lowered.check()
    if message is not None:
        with pytest.raises(tp.ScheduleError, match=message):
            rank_memory(model, partition, slicing, lowered, swap=swap)
        return
    same(alone(model, params, tokens), everything(model, partition, slicing, lowered, params, tokens, swap=swap,
                                                  store=str(tmp_path)))


def test_a_folder_named_for_swaps_is_looked_at_before_a_rank_starts(tmp_path, monkeypatch):
    plan = tight(planner="dawnpiper", schedule="gpipe")
    monkeypatch.setenv("TERAPIPE_SWAP_DIR", str(tmp_path / "none"))
    with pytest.raises(tp.StorageError, match=r"TERAPIPE_SWAP_DIR is '.*none': a folder that can be written"):
        tp.launch(plan, data=np.zeros(4096, np.int32), steps=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("TERAPIPE_SWAP_DIR", str(tmp_path))
    assert len(tp.launch(plan, data=np.zeros(4096, np.int32), steps=1, out=tmp_path / "run", processes=False).wait().history) == 1


# ---- how fast ------------------------------------------------------------------------------------------------------------

def test_how_fast_a_folder_takes_swaps_is_measured(tmp_path):
    seconds = _core.store_time(tmp_path, 5 << 20, 3)
    assert seconds.shape == (3, 2) and (seconds > 0).all() and os.listdir(tmp_path) == []
    local, plain = tp.Cluster.local(swap_folder=tmp_path), tp.Cluster.local()
    assert plain.host_bandwidth_Bps is None and dataclasses.replace(local, host_bandwidth_Bps=None) == plain
    assert 1e6 < local.host_bandwidth_Bps < 1e12 and os.listdir(tmp_path) == []
    with pytest.raises(tp.StorageError, match=re.escape(f"a file in {tmp_path / 'none'}, which cannot be made")):
        _core.store_time(tmp_path / "none", 1, 1)
    for place, why in ((tmp_path / "none", "No such file"), (__file__, "Not a directory"), ("x" * 300, "name too long")):
        with pytest.raises(tp.StorageError, match=f"^swap_folder is '.*: a folder that can be written would be right .*{why}"):
            tp.Cluster.local(swap_folder=place)
    with pytest.raises(TypeError, match="swap_folder is 3: the name of a file or folder"):
        tp.Cluster.local(swap_folder=3)
    for bytes_, rounds in ((0, 1), (1, 0), (-5, 1)):
        with pytest.raises(ValueError, match=f"{rounds} rounds of {bytes_} bytes"):
            _core.store_time(tmp_path, bytes_, rounds)


SHORT = """
    import errno, os, sys
    sys.path.insert(0, sys.argv[1])
    import test_swap as t
    import terapipe_c as tp
    from terapipe_c.engine import swap_bytes
    plan, short = t.evenly("gpipe"), int(sys.argv[3])
    os.environ["TERAPIPE_SWAP_DIR"] = sys.argv[2]
    each = swap_bytes(plan.model, plan.stages, plan.slicing, plan.program, swap=plan.swap)
    free = os.statvfs(sys.argv[2]).f_bavail * os.statvfs(sys.argv[2]).f_frsize
    with open(sys.argv[2] + "/filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - sum(each) + short)
    try:
        t.trained(plan)
    except tp.StorageError as error:
        free = os.statvfs(sys.argv[2]).f_bavail * os.statvfs(sys.argv[2]).f_frsize
        assert error.errno == errno.ENOSPC
        assert f"swap {sum(each)} bytes to files in {sys.argv[2]}, where {free} are free: {short} bytes short" in str(error)
        sys.exit(6)
    sys.exit(7)
"""


@pytest.mark.parametrize(("short", "code"), [(4096, 6), (0, 7)])
def test_a_disk_with_too_little_room_is_told_before_a_rank_starts(short, code, tmp_path):
    """On a tmpfs of its own, filled until the swaps of both ranks just fit, or lack a page."""
    argv = [sys.executable, "-c", textwrap.dedent(SHORT), str(Path(__file__).parent), str(tmp_path), str(short)]
    probe = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m none "$0" && exec "$@"', str(tmp_path), "true"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace here (needs root)")
    done = subprocess.run([*probe[:-1], *argv], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr


def test_the_command_line_swaps_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERAPIPE_SWAP_DIR", "")                # set by the command, and put back afterwards
    text, disk = tmp_path / "text.txt", tmp_path / "disk"
    text.write_bytes(bytes(range(32, 127)) * 40)
    disk.mkdir()
    request = {"batch": 8, "seq_len": 128, "planner": "dawnpiper", "schedule": "gpipe", "stages": 2}
    model, slow = (tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=256, block_size=128),
                   tp.Cluster(num_devices=2, peak_flops=1e7))  # making again takes longer than any disk
    costs = tp.CostModel.analytic(model, slow)
    costs.save(tmp_path / "costs.json")
    limit = 3 * max(tp.plan(model, slow, costs=costs, **request).peak_memory_bytes) // 4
    flags = ["--n-layer", "4", "--n-head", "2", "--n-embd", "32", "--block-size", "128", "--batch", "8", "--stages", "2",
             "--schedule", "gpipe", "--planner", "dawnpiper", "--costs", str(tmp_path / "costs.json"),
             "--memory-bytes", str(limit)]
    assert main(["train", *flags, "--swap-folder", str(disk), "--data", str(text), "--steps", "2",
                 "--out", str(tmp_path / "run"), "--quiet"]) == 0
    made = tp.Plan.load(tmp_path / "run" / "plan.json")
    assert any(made.swap) and os.environ["TERAPIPE_SWAP_DIR"] == str(disk)
    assert main(["plan", *flags, "--devices", "2", "--host-bandwidth-Bps", "1e12", "--out", str(tmp_path / "plan.json")]) == 0
    assert any(tp.Plan.load(tmp_path / "plan.json").swap)
    assert main(["plan", *flags, "--devices", "2", "--swap-folder", str(disk)]) == 2
    assert "--host-bandwidth-Bps would be right beside --devices" in capsys.readouterr().err


# ---- with whatever else, and when a rank dies -----------------------------------------------------------------------------

SMALL = tp.GPTConfig(n_layer=6, n_head=2, n_embd=16, vocab_size=256, block_size=32)
TOKENS = np.tile(np.arange(32, 127, dtype=np.int32), 40)


def evenly(schedule, ranks=2, stages=2, which=("attention", "ffn"), **request):
    """A plan of even stages, in this order, of which every such block swaps."""
    cluster = tp.Cluster(num_devices=ranks, memory_bytes=1e12)
    plan = tp.plan(SMALL, cluster, batch=8, seq_len=32, costs=tp.CostModel.analytic(SMALL, cluster), planner="uniform",
                   stages=stages, schedule=schedule, **request)
    whole = saved_bytes(SMALL, plan.slicing, choose("cpu", None))
    swap = [bytes_ if block.kind in which else 0 for block, bytes_ in zip(SMALL.blocks, whole, strict=True)]
    return dataclasses.replace(plan, swap=swap).with_program(plan.program) if which else plan


def test_the_room_for_swaps_is_that_of_all_replicas(tmp_path, monkeypatch):
    plan = evenly("gpipe", ranks=4, data_parallel=2)
    each = swap_bytes(plan.model, plan.stages, plan.slicing, plan.program, swap=plan.swap)
    free = 2 * sum(each)
    monkeypatch.setenv("TERAPIPE_SWAP_DIR", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=free))
    trained(plan)
    free -= 1
    with pytest.raises(tp.StorageError, match=f"swap {2 * sum(each)} bytes to files in .*, where {free} are free: 1 bytes short"):
        trained(plan)


def trained(plan, **options):
    run = tp.launch(plan, TOKENS, steps=2, processes=False, progress=False, reproducible=plan.data_parallel * plan.copies == 1,
                    **options).wait()
    assert run.report().peak_memory_bytes == run.report().predicted_peak_memory_bytes
    return [(record.loss, record.grad_norm) for record in run]


@pytest.mark.parametrize("which", [("attention", "ffn"), ("ffn",)], ids=["all", "ffn"])
@pytest.mark.parametrize(("schedule", "request_"), [
    ("1f1b", {}), ("seq1f1b", {"slicing": [(1, [20, 12])] * 8}), ("bpipe", {}), ("zb-h2", {}), ("interleaved", {}), ("zb-v", {}),
    ("hanayo", {}), ("chimera", {}), ("chimera", {"ranks": 4, "stages": 4}), ("1f1b", {"ranks": 4, "data_parallel": 2}),
    ("seq1f1b", {"ranks": 4, "data_parallel": 2}), ("sliced-1f1b", {"ranks": 4, "data_parallel": 2}),
    ("chimera", {"ranks": 4, "data_parallel": 2})], ids=str)
def test_every_schedule_and_replicas_swap_to_the_bits_of_as_many_single_devices(schedule, request_, which):
    plan = evenly(schedule, which=which, **request_)
    assert plan.program.counts["SO"] == plan.program.counts["SI"] > 0
    members = plan.data_parallel * plan.copies
    assert trained(plan) == trained(evenly("gpipe", members, 1, (), data_parallel=members))


@pytest.mark.parametrize(("planner", "schedule"), [("dawnpiper", "bpipe"), ("vpipe", "bpipe"), ("auto", "auto")])
def test_where_activations_may_be_swapped_what_another_rank_keeps_is_not(planner, schedule):
    """The checker refuses both of one micro-batch: that ended planning as soon as anything was to be swapped."""
    model, wide = tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=256, block_size=128), tp.Cluster(num_devices=4)
    request = {"batch": 8, "seq_len": 128, "costs": tp.CostModel.analytic(model, wide), "stages": 4}
    limit = 8 * max(tp.plan(model, wide, planner="uniform", schedule="bpipe", **request).peak_memory_bytes) // 10
    cluster = tp.Cluster(num_devices=4, memory_bytes=limit, host_bandwidth_Bps=1e14)
    try:
        plan = tp.plan(model, cluster, planner=planner, schedule=schedule, **request)
    except tp.InfeasibleError:
        assert schedule == "bpipe"
    else:
        assert max(plan.peak_memory_bytes) <= limit and any(plan.swap) == (schedule == "auto") != bool(hosts(plan.program))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_a_rank_that_swaps_leaves_no_file_and_its_run_goes_on(number, tmp_path, monkeypatch):
    """The file has no name, and nobody else has it open; the run goes on from its checkpoint to the bits of one that was let be."""
    plan, folder = evenly("gpipe"), tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv("TERAPIPE_SWAP_DIR", str(folder))
    options = {"checkpoint_every": 2, "lr_schedule": "constant", "progress": False}
    run = tp.launch(plan, TOKENS, 10_000, out=tmp_path / "run", **options)
    with pytest.raises(tp.PeerError, match=rf"rank 1 was killed by signal {number:d} \({number.name}\)"):
        for record in run:
            if record.step == 3:
                for pid in run.pids:
                    with open(f"/proc/{pid}/maps") as maps:
                        assert str(folder) in maps.read()
                os.kill(run.pids[1], number)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in run.pids) and os.listdir(folder) == []
    done = int(run.checkpoint_path.name.removeprefix("step-"))
    resumed = tp.launch(plan, TOKENS, done + 4, out=tmp_path / "run", resume=True, **options)
    whole = tp.launch(plan, TOKENS, done + 4, **{**options, "checkpoint_every": 0})
    assert done >= 2 and [record.loss for record in resumed] == [record.loss for record in whole][done:]
