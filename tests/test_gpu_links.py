"""What a message between two GPUs takes: the engine's own, by the tests' libnccl on two emulated devices."""

import json

import pytest
from cuda_ranks import launched

import terapipe_c as tp
from terapipe_c import gpu_links
from terapipe_c.backend import Backend

MESSAGES = """
import json, warnings, terapipe_c as tp
from terapipe_c import gpu_links
gpu_links.STEPS = 6
tp.cuda.load().emu_machine(devices=2)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    costs = tp.profile(tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, block_size=32), backend="cuda", budget_s=0.3)
told = [str(one.message) for one in told if "timed" in str(one.message)]
print(json.dumps([costs.latency_s, costs.byte_s, costs.copy_byte_s, told]))
"""


def test_messages_between_gpus_are_timed_as_they_will_be_sent(fake_nccl):
    """By NCCL, whose bytes cost on the link, and not at the ends as in the host's rings; where NCCL does not load that is told."""
    latency, byte, copy, told = json.loads(launched("nccl", fake_nccl, MESSAGES))
    assert 0 < latency + byte and copy == 0 and not told
    latency, byte, copy, told = json.loads(launched("host", fake_nccl, MESSAGES))
    assert latency > 0 and byte == 0 and copy > 0 and not told
    latency, byte, copy, told = json.loads(launched("nccl", fake_nccl.with_name("missing.so"), MESSAGES))
    assert latency > 0 and byte == 0 and copy > 0 and len(told) == 1
    assert "timed in the host's memory, since NCCL between GPUs 0 and 1 could not be: " in told[0] and "missing.so" in told[0]


FAILED = """
import contextlib, gc, json, threading, warnings, terapipe_c as tp
from terapipe_c import engine, gpu_links, schedules
from terapipe_c.backend import Backend
gpu, model, room = tp.cuda.load(), tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, block_size=32), 60 << 20
gpu_links.STEPS = 5
gpu.emu_machine(devices=2, total_bytes=room)
gc.disable()
program = schedules.gpipe(1, 1).split(pending=0).lower(False)
busy = engine.RankEngine(model, [(0, model.num_blocks)], [(1, [32])], program, 0, None, backend=Backend("cuda", "bf16"), device=1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    costs = tp.profile(model, backend="cuda", budget_s=0.3)
told = [str(one.message) for one in told if "timed" in str(one.message)]
left = [tp.cuda.devices()[0].free_bytes - room]
del busy
def interrupted(*_):
    raise KeyboardInterrupt
gpu_links._between = interrupted     # in the midst of it, both ranks with all that they take
with contextlib.suppress(KeyboardInterrupt):
    tp.profile(model, backend="cuda", budget_s=0.3)
left += [device.free_bytes - room for device in tp.cuda.devices()]
print(json.dumps([costs.copy_byte_s, told, left]))
"""


def test_ranks_that_could_not_time_messages_leave_the_gpus_as_they_were(fake_nccl):
    """Where another's work fills the second GPU the first is still measured: what the first rank had taken was kept until Python
    looked for rings of objects, and the profile ended for want of memory."""
    copy, told, left = json.loads(launched("nccl", fake_nccl, FAILED))
    assert copy > 0 and len(told) == 1 and "of device 1, which has" in told[0] and left == [0, 0, 0]


HANGS = """
import ctypes, json, os, warnings, terapipe_c as tp
from terapipe_c import gpu_links
tp.cuda.load().emu_machine(devices=2)
gpu_links.PATIENCE_S = 0.3, 20.0
ctypes.CDLL(os.environ["TERAPIPE_NCCL"]).fake_nccl_set(0, 0, 1, 1, 22809)     # its first message never ends
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    costs = tp.profile(tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, block_size=32), backend="cuda", budget_s=0.3)
told = [str(one.message) for one in told if "timed" in str(one.message)]
print(json.dumps([costs.copy_byte_s, told, [name for name in os.environ if name.startswith("NCCL_")]]))
"""


def test_nccl_that_hangs_takes_little_more_than_the_budget(fake_nccl, monkeypatch):
    """It took 20 s of a budget of less. And ranks that take themselves for machines are not tried as threads of this process, whose
    environment then said so to whatever loads NCCL next."""
    copy, told, left = json.loads(launched("nccl", fake_nccl, HANGS))
    assert copy > 0 and len(told) == 1 and "waited 0.3 s for NCCL's" in told[0] and not left
    monkeypatch.setenv("TERAPIPE_NCCL_ONE_GPU", "1")
    copy, told, left = json.loads(launched("nccl", fake_nccl, HANGS))
    assert copy > 0 and not told and not left


TURNS = """
import json, threading, terapipe_c as tp
from terapipe_c import engine, gpu_links
from terapipe_c.backend import Backend
tp.cuda.load().emu_machine(devices=2)
run, between, did, gpu_links.STEPS = engine.RankEngine.run, gpu_links._between, [], 5
def begin(self, *words, **options):
    did.append("begins")
    return run(self, *words, **options)
def late(trace, rank):
    threading.Event().wait(0.1 * rank)
    did.append("has read")
    return between(trace, rank)
engine.RankEngine.run, gpu_links._between = begin, late
model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, block_size=8)
gpu_links.message_line(model, 8, Backend("cuda", "bf16"))
print(json.dumps(did))
"""


def test_a_message_that_is_timed_finds_its_reader_waiting(fake_nccl):
    """A rank that still read its last step's trace was taken for the link."""
    assert json.loads(launched("nccl", fake_nccl, TURNS)) == ["begins", "begins", "has read", "has read"] * 5


def test_a_message_is_half_of_what_passes_between_two_halves_of_work(monkeypatch):
    """There and back, less what the other GPU works meanwhile; the first steps connect."""
    first, steps = gpu_links.FIRST, gpu_links.STEPS
    both = [[9.0] * first + [3.0 + 0.5 * (step % 2) for step in range(steps - first)], [1.0] * steps]
    monkeypatch.setattr(gpu_links, "in_threads", lambda region, work: both)
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=64, block_size=64)
    asked = model, 8, {}, Backend("cuda", "bf16"), {}, 5.0
    assert gpu_links._message(*asked) == (3.25 - 1.0) / 2
    both[1] = [4.0] * steps                                    # of a clock's noise no message is less than nothing
    assert gpu_links._message(*asked) == 0.0


def test_the_line_of_messages_goes_through_what_two_lengths_took(monkeypatch):
    model, sent = tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, block_size=64), []
    monkeypatch.setattr(gpu_links, "_message", lambda *told: sent.append(told) or 2e-5 + 1e-9 * 2 * 32 * told[1])
    assert gpu_links.message_line(model, 64, Backend("cuda", "bf16")) == pytest.approx((2e-5, 1e-9))
    assert [tokens for _, tokens, *_ in sent] == [8, 64]
    (one, _, params, *_), (_, _, again, *_) = sent      # a wide layer's take seconds to make, and a budget_s may be 20
    assert params is again and sum(array.size for array in params.values()) == one.num_params and one.n_layer == 1
    assert gpu_links.message_line(model, 4, Backend("cuda", "bf16")) == pytest.approx((2e-5 + 1e-9 * 2 * 32 * 4, 0.0))
    trace = [("F", 0, 0, 0, 1.0, 3.0), ("I", 0, 0, 0, 10.0, 12.0), ("W", 0, 0, 0, 12.0, 13.0)]
    assert [gpu_links._between(trace, rank) for rank in (0, 1)] == [7.0, 11.0]
