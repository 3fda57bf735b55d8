"""BPipe on the emulated device: activations that go to another rank's memory and come home by NCCL (a libnccl of threads) without a
copy, or through the host."""
import json
import re

import numpy as np
import pytest
from cuda_ranks import NEAR, ON, emulated, trained
from cuda_ranks import launched as launched_by

import terapipe_c as tp


def answers(fake, *cases):
    return emulated(fake, *({"schedule": "bpipe", "ranks": 4, "micros": 6, **case} for case in cases))


EACH = [{"schedule": "one_f_one_b"}, {"mode": "host"}, {"fault": {"looks": 7}}, {"pending": 1}, {"pending": None}, {"again": True}]
TOGETHER = [{"fault": {"looks": 7}, "pending": None, "again": True}, {"mode": "host", "pending": 1}]
# of 6 and 8 ranks two and three send guests, two and three at a time; of 5 the middle one is nobody's pair
SHAPES = [({"ranks": 4, "micros": 6}, EACH), ({"ranks": 5, "micros": 7, "lengths": (12,)}, TOGETHER),
          ({"ranks": 6, "micros": 8, "lengths": (7, 5)}, TOGETHER), ({"ranks": 8, "micros": 11, "lengths": (12,)}, TOGETHER)]


@pytest.mark.parametrize(("shape", "ways"), SHAPES, ids=[f"{shape['ranks']} ranks" for shape, _ in SHAPES])
def test_the_bits_of_1f1b_in_the_memory_predicted(fake_nccl, shape, ways):
    """Whatever the library's pace; captured steps and launched ones, too."""
    cases = [{"mode": "host", "schedule": "one_f_one_b"}, {}, *ways]
    *device, cpu = answers(fake_nccl, *({**case, **shape} for case in cases), {"mode": "cpu", **shape})
    wanted = trained(device[0])
    assert all(trained(one) == wanted for one in device[1:])
    assert all((one["guests"] > 0) == (case.get("schedule") != "one_f_one_b") for one, case in zip(device, cases, strict=True))
    for one, other in zip(wanted[0], trained(cpu)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR["float32"])


def test_bf16_and_replicas(fake_nccl):
    shape = {"dtype": "bf16", "replicas": 2, "tied": False, "lengths": (12,), "micros": 5}
    one, two, plain = answers(fake_nccl, shape, {"mode": "host", **shape}, {"schedule": "one_f_one_b", **shape})
    assert trained(one) == trained(two) == trained(plain) and one["guests"] > 0 == plain["guests"]


# ranks 0 and 1 keep their first micro-batch on the next rank, with which they talk besides
OWN = """\
0F0.0 0SE0.0@1 0F1.0 0F2.0 0RL0.0@1 0B0.0 0B1.0 0B2.0
0RE0.0@0 1F0.0 1SE0.0@2 1F1.0 1F2.0 1RL0.0@2 1B0.0 0SL0.0@0 1B1.0 1B2.0
1RE0.0@1 2F0.0 2F1.0 2F2.0 2B0.0 1SL0.0@1 2B1.0 2B2.0
"""


def test_guests_of_neighbours_in_an_order_of_ones_own(fake_nccl):
    """Several messages of a pair of ranks: activations and guests, which have channels of their own."""
    text = str(tp.Program.parse(OWN).lower(True))
    shape = {"ranks": 3, "micros": 3, "lengths": (12,)}
    *found, plain = answers(fake_nccl, *({"mode": mode, "text": text, **shape} for mode in ("nccl", "host")),
                            {"mode": "nccl", "schedule": "gpipe", **shape})
    assert all(trained(one) == trained(plain) and one["guests"] == 2 for one in found)


# Of a ring of 4: lines, directions, ends, a send and a receive; and the same of one whose other end keeps guests.
SPLITS = 4 * 2 * 2 * 2 + 2 * 2 * 2
FAULTS = {   # what happens to whom, and the words of the first who sees it
    "a guest's connection fails": ({"fault": {"fail_at": SPLITS, "code": 2}},
                                    r"rank [03]: NCCL's first ncclGroupEnd with rank [03]: "),
    "fails": ({"fault": {"fail_at": SPLITS + 25, "code": 6}},
              r"rank \d: NCCL's nccl\w+ with rank \d: remote .*; rank \d is at step 0"),
    "hangs in the library": ({"fault": {"stuck_at": SPLITS + 25}, "timeout_s": 2.0},
                             r"rank \d waited 2 s for NCCL's .* with rank \d"),
    "dies": ({"dead": 3}, r"rank 3 was killed"),
    "has no way": ({"mode": "inproc"},
                   r"activations in another rank's memory, which inproc does not send: nccl, or .* would be right"),
}


def test_faults_end_every_rank_with_the_first_words(fake_nccl):
    results = answers(fake_nccl, *({"lengths": (12,), **case} for case, _ in FAULTS.values()))
    for (name, (_, words)), result in zip(FAULTS.items(), results, strict=True):
        told, (_, first, text) = result["told"], result["first"]
        assert all(isinstance(one, str) for one in told), (name, told)
        assert re.search(words, text) and result["misuses"] == 0, (name, text)
        assert all(one.startswith("AbortedError") or rank == first or re.search(words, one) for rank, one in enumerate(told)), told
        assert (result["aborts"] > 0) == (name != "has no way"), (name, result)


def test_a_pair_that_was_not_connected_is_named(fake_nccl):
    told = answers(fake_nccl, {"deaf": True, "lengths": (12,)})[0]["told"]
    assert any(re.search(r"rank \d and rank \d do not talk this way \(receive of the evicted activations of micro-batch \d slice 0 "
                         r"on stage 0\): the communicator was made without this pair", one) for one in told), told


# ---- by plan, launch and train --------------------------------------------------------------------------------------------

MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=61, block_size=24)
DATA = (np.random.default_rng(3).integers(0, 61, 4000)).astype(np.uint16)
PAIRS = [(2, [12, 12])] * 4     # activations weigh more than what the first rank keeps of its parameters
OPTIONS = {"lr": 1e-2, "lr_schedule": "constant", "progress": False, "seed": 5}


def planned(schedule="bpipe", **request):
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e10)
    return tp.plan(MODEL, cluster, **{"batch": 8, "seq_len": 24, "planner": "uniform", "stages": 4, **request}, schedule=schedule)


def launched(plan, steps=3, **options):
    run = tp.launch(plan, DATA, steps, **{**OPTIONS, "devices": [0] * 4, "backend": plan.backend, "dtype": plan.dtype, **options})
    losses = [[record.loss, record.grad_norm] for record in run]
    report = run.report()
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == list(plan.peak_memory_bytes)
    return losses


BY_NCCL = """
from test_cuda_guests import ON, PAIRS, launched, planned
print(launched(planned(**ON, slicing=PAIRS), processes=False))
"""


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_plan_fits_where_1f1b_does_not_and_trains_the_same(emulation, fake_nccl, dtype):
    on = {"backend": "cuda", "dtype": dtype, "slicing": PAIRS}
    plain, even = planned("1f1b", **on), planned(**on)
    limit = (max(plain.peak_memory_bytes) + max(even.peak_memory_bytes)) // 2
    with pytest.raises(tp.InfeasibleError, match="rank 0 needs"):
        planned("1f1b", memory_bytes=limit, **on)
    plan = planned(memory_bytes=limit, **on)
    assert plan.schedule == "bpipe" and plan.executable and plan.peak_memory_bytes == even.peak_memory_bytes
    assert "rank 3 keeps activations of rank 0" in plan.explain() and plan.step_time_s == plan.timeline().makespan_s
    wanted = launched(plain, processes=False)
    assert launched(plan, processes=dtype == "bf16") == wanted and len(wanted) == 3
    if dtype == ON["dtype"]:
        assert json.loads(launched_by("nccl", fake_nccl, BY_NCCL)) == wanted


def test_what_a_gpu_sends_is_timed_on_the_link_alone(emulation):
    """A CPU copies into and out of rings; a GPU sends from where they lie."""
    found = {}
    for backend, copied in (("cuda", 0.0), ("cuda", 1e-9), ("cpu", 1e-9)):
        given = tp.CostModel.analytic(MODEL, tp.Cluster(num_devices=4, peak_flops=1e12)).to_dict()
        costs = tp.CostModel.from_dict({**given, "backend": backend, "dtype": "float32", "copy_byte_s": copied})
        found[backend, copied] = planned(costs=costs).durations
    for durations in found.values():
        assert np.count_nonzero(durations["comm.guest"][0]) == 8
    assert "SE" not in found["cuda", 1e-9] and "SE" in found["cpu", 1e-9]
