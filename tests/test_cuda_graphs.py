"""Steps as graphs, on the emulated device, which notes what is captured as it is told it: arguments by value, memory by
address. What a launch of a graph does is what eager calls would have done, in every step, whatever changes between steps."""
import ctypes
import dataclasses
import itertools
import re
import threading

import numpy as np
import pytest
from cuda_emu import build, emulated, library
from test_cuda_stage import PROGRAMS, partition_of, problem, ranks_do

import terapipe_c as tp

STEPS = 5
FAULTS = {   # cuda/emu/emu.h, and what is told of it
    "no graph": (1, "cudaGraphInstantiate: .*cudaErrorMemoryAllocation"),
    "a call within": (2, "cudaErrorStreamCaptureUnsupported"),
    "no begin": (3, "cudaStreamBeginCapture: .*cudaErrorStreamCaptureUnsupported"),
    "no launch": (4, "cudaGraphLaunch: .*cudaErrorMemoryAllocation"),
    "a product within": (0, "cublasLtMatmul of .* 13 .execution failed"),
}
NO_PRODUCT = 32   # in a capture: tp_emu_set_cublaslt


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(build()))
    module = tp.cuda.load()
    module.emu_machine()
    module.emu_break(0)
    module.emu_graphs(0)
    yield module
    module.emu_break(0)
    module.emu_graphs(0)
    module.emu_trace(False)


def a_life(engine, model, params):
    """All that changes between steps of one engine: tokens, learning rate, step count, decay, clipping, whether it updates,
    evaluations and loads between."""
    random, told = np.random.default_rng(5), []
    engine.given()
    for step in range(1, STEPS + 1):
        tokens = random.integers(0, model.vocab_size, (2, 10)).astype(np.int32)
        told.append(engine.run(tokens, step=step, lr=1e-2 / step, weight_decay=0.1 * step, grad_clip=0.3 * (step % 2),
                               beta2=0.9 + 0.01 * step)[:2])
        told.append(engine.run(tokens[::-1].copy(), step=step, update=False)[:2])
        if step % 2:
            told.append(engine.evaluate(tokens))
        if step == 3:
            engine.load({name: 0.5 * value for name, value in params.items()})
    held = {f"{kind} {name}": array for kind in ("params", "exp_avg", "exp_avg_sq", "grads")
            for name, array in engine.export(kind).items()}
    trace = engine.trace()
    assert all(row[4] == row[5] == before[5] for before, row in itertools.pairwise(trace) if row[0] in ("RF", "RB"))   # no marks
    times = [row[4:] for row in trace]
    return told, held, engine.given(), times, engine.caveats


def live(dtype, program="1f1b", **device):
    model, params, _ = problem(2, 9)
    lowered = PROGRAMS[program]().lower(True)
    cuts = np.random.default_rng(1).choice(range(1, 6), lowered.num_stages - 1, False)
    return ranks_do(model, partition_of(model, sorted(cuts.tolist())), [(1, [4, 5])] * 2, lowered,
                    lambda engine: a_life(engine, model, params), params, dtype, **device)


def same(one, two):
    for (told, held, *_), (others, theirs, *_) in zip(one, two, strict=True):
        assert told == others and held.keys() == theirs.keys()
        assert all(np.array_equal(array, theirs[name]) for name, array in held.items())


@pytest.mark.parametrize("program", ["1f1b", "gpipe, W late", "every stage on one rank"])
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_graphs_give_the_bits_of_eager_steps(dtype, program, emulation):
    eager = live(dtype, program, eager=True)
    assert emulation.emu_graphs() == (0, 0)
    graphs = live(dtype, program)
    captured, launched = emulation.emu_graphs()
    assert captured > 0 and launched == captured * (2 * STEPS - 2)   # all but the first and, captured, the second
    same(eager, graphs)
    for *_, given, times, caveats in graphs:   # of the last step, which graphs ran: theirs, in order
        launches = [begun for _, begun, _ in given]
        assert all(came <= begun <= ended for came, begun, ended in given) and launches == sorted(launches)
        assert 0 < launches[0] <= times[0][1] and len(set(launches)) < len(launches)   # a launch gives several
        assert caveats == [] and all(start <= end for start, end in times)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times)) and times[0][0] > 0


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_captured_runs_as_it_is_and_is_said(name, emulation):
    right, (fault, words) = live("float32", eager=True), FAULTS[name]
    emulation.emu_graphs(fault)
    library().tp_emu_set_cublaslt(0 if fault else NO_PRODUCT)
    try:
        found = live("float32")
    finally:
        library().tp_emu_set_cublaslt(0)
    same(right, found)
    captured, launched = emulation.emu_graphs()
    assert (captured > 0) == (name != "no begin") and (launched == 0 or name == "a product within")
    for *_, caveats in found:
        assert len(caveats) == 1 and re.search(f"not launched as graphs .*{words}", caveats[0]), caveats


def test_a_graph_that_is_not_launched_any_more_leaves_no_times_of_before(emulation):
    model, params, tokens = problem(2, 9)

    def work(engine):
        for step in range(1, 4):
            engine.run(tokens, step=step)
        ended = engine.trace()[-1][5]
        emulation.emu_graphs(FAULTS["no launch"][0])
        engine.run(tokens, step=4)
        return ended, [row[4:] for row in engine.trace()], engine.caveats

    program = tp.schedules.gpipe(1, 2, [2, 2]).lower(True)
    (ended, times, caveats), = ranks_do(model, [(0, model.num_blocks)], [(1, [4, 5])] * 2, program, work, params)
    assert all(ended <= start <= end for start, end in times) and len(caveats) == 1


def test_a_device_lost_in_a_capture_is_told_as_that(emulation):
    model, params, tokens = problem(1, 9)

    def work(engine):
        engine.run(tokens, step=1)
        emulation.emu_break(40)
        return engine.run(tokens, step=2)

    program = tp.schedules.gpipe(1, 1, [1]).lower(True)
    with pytest.raises(tp.ExecutionError, match="device is lost to this process: .*cudaErrorIllegalAddress"):
        ranks_do(model, [(0, model.num_blocks)], [(1, [9])], program, work, params)


# ---- the same launches -----------------------------------------------------------------------------------------------


def test_every_step_does_the_same_with_the_same_arguments(emulation):
    """Eager, captured and eager, launched, launched: name by name and byte by byte, but for AdamW, whose scalars must change."""
    model, params, tokens = problem(2, 9)
    steps = []

    def work(engine):
        for step in range(1, STEPS + 1):
            emulation.emu_trace(True)
            engine.run(tokens, step=step, lr=1e-3 * step)
            steps.append(emulation.emu_trace(False))

    program = tp.schedules.one_f_one_b(1, 2, [2, 2]).split().lower(True)
    ranks_do(model, [(0, model.num_blocks)], [(1, [4, 5])] * 2, program, work, params, "bf16")
    assert emulation.emu_graphs()[1] == (STEPS - 2) * emulation.emu_graphs()[0] > 0
    first, *rest = steps
    names = [name for name, _ in first]
    assert {"product", "mark", "copy"} < set(names) and sum("attention" in name for name in names) > 10
    changing = [i for i, name in enumerate(names) if "adamw" in name]
    assert len(changing) == 1  # of all tensors
    for later in rest:
        assert [name for name, _ in later] == names
        differ = [i for i, (one, two) in enumerate(zip(first, later, strict=True)) if one != two and one[0] != "mark"]
        assert differ == changing


def test_later_steps_make_no_events(emulation):
    """Times are taken by the events of the step before: a GPU's run of a million steps would end for want of memory."""
    model, params, tokens = problem(2, 9)
    made = {}

    def work(engine):
        for step in range(1, 2 * STEPS):
            engine.run(tokens, step=step, lr=1e-3)
            made.setdefault(eager, []).append(library().tp_emu_events())

    program = tp.schedules.one_f_one_b(1, 2, [2, 2]).split().lower(True)
    for eager in (True, False):
        ranks_do(model, [(0, model.num_blocks)], [(1, [4, 5])] * 2, program, work, params, eager=eager)
    assert len(set(made[True])) == 1
    assert len(set(made[False][1:])) == 1   # those of the graphs come with the second step


def test_the_environment_turns_graphs_off(monkeypatch, emulation):
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=61, block_size=16)
    plan = tp.plan(model, tp.Cluster.local(), 2, 16, stages=1, planner="terapipe", schedule="gpipe", slicing=[(1, [4, 12])] * 2,
                   backend="cuda")
    corpus, found = np.arange(800, dtype=np.int32) % 61, {}
    for wish in ("1", "0"):
        monkeypatch.setenv("TERAPIPE_CUDA_GRAPHS", wish)
        emulation.emu_graphs(0)
        run = tp.launch(plan, corpus, 4, backend="cuda", processes=False, progress=False)
        found[wish] = [dataclasses.astuple(record)[:4] for record in run]
        assert (emulation.emu_graphs()[1] > 0) == (wish == "1") and run.report().caveats == []
    assert found["0"] == found["1"]


# ---- the emulated captures are as strict as CUDA's ------------------------------------------------------------------------


def test_what_a_capture_forbids_spoils_it(emulation):
    seen = emulated().exercise(0)
    assert seen["graphs"] == 2
    emulation.emu_graphs(FAULTS["a call within"][0])
    with pytest.raises(tp.ExecutionError, match="900 .cudaErrorStreamCaptureUnsupported"):
        emulated().exercise(0)
    emulation.emu_graphs(FAULTS["no graph"][0])
    with pytest.raises(MemoryError, match="cudaGraphInstantiate: CUDA error 2"):
        emulated().exercise(0)
    emulation.emu_graphs(0)
    assert emulated().exercise(0)["graphs"]


def refused(spoils):
    """What the library says of a call within a capture, and of the capture's end. spoils(C, device, compute, other, event)."""
    C, device, (memory, event, graph) = library(), ctypes.c_void_p(), (ctypes.c_void_p() for _ in range(3))
    C.tp_cuda_compute.restype = C.tp_cuda_communication.restype = ctypes.c_void_p
    C.tp_error_message.restype = ctypes.c_char_p
    assert C.tp_cuda_open(0, None, ctypes.byref(device)) == 0
    compute, other = (ctypes.c_void_p(f(device)) for f in (C.tp_cuda_compute, C.tp_cuda_communication))
    assert C.tp_cuda_alloc(device, ctypes.c_size_t(64), b"a test", ctypes.byref(memory)) == 0
    assert C.tp_cuda_event_create(device, 1, ctypes.byref(event)) == C.tp_cuda_capture_begin(device, compute) == 0
    assert C.tp_cuda_memset(device, compute, memory, 1, ctypes.c_size_t(64)) == 0
    status = spoils(C, device, compute, other, event, memory)
    told = C.tp_error_message().decode() if status else ""
    ended = C.tp_cuda_capture_end(device, compute, ctypes.byref(graph))
    told += " | " + (C.tp_error_message().decode() if ended else "")
    assert C.tp_cuda_capturing(device, compute) == C.tp_cuda_capturing(device, other) == 0
    C.tp_cuda_graph_destroy(device, graph)
    C.tp_cuda_event_destroy(device, event)
    C.tp_cuda_free(device, memory)
    C.tp_cuda_close(device)
    return told


def fork(C, device, compute, other, event, memory):
    """A stream joins by an event, works, and is not joined again."""
    return (C.tp_cuda_event_record(device, event, compute) or C.tp_cuda_event_wait(device, event, other)
            or C.tp_cuda_memset(device, other, memory, 2, ctypes.c_size_t(64)))


def fork_and_join(C, device, compute, other, event, memory):
    return (fork(C, device, compute, other, event, memory) or C.tp_cuda_event_record(device, event, other)
            or C.tp_cuda_event_wait(device, event, compute))


def in_a_thread(C, device, compute, other, event, memory):
    """Another thread may allocate meanwhile: captures are the thread's."""
    more, told = ctypes.c_void_p(), []
    thread = threading.Thread(target=lambda: told.append(C.tp_cuda_alloc(device, ctypes.c_size_t(8), b"x", ctypes.byref(more))))
    thread.start()
    thread.join()
    C.tp_cuda_free(device, more)
    return told[0]


SPOILS = [
    (lambda C, d, *_: C.tp_cuda_alloc(d, ctypes.c_size_t(8), b"x", ctypes.byref(ctypes.c_void_p())),
     "cudaMalloc: .* 900 .* [|] .* 901"),
    (lambda C, d, *_: C.tp_cuda_host_alloc(d, ctypes.c_size_t(8), b"x", ctypes.byref(ctypes.c_void_p())),
     "cudaHostAlloc: .* 900 .* [|] .* 901"),
    (lambda C, d, compute, *_: C.tp_cuda_synchronize(d, compute), "cudaStreamSynchronize: .* 900 .* [|] .* 901"),
    (lambda C, d, compute, *_: C.tp_cuda_query(d, compute, ctypes.byref(ctypes.c_int())), "cudaStreamQuery: .* 900 .* [|] .* 901"),
    (lambda C, d, compute, other, event, _: C.tp_cuda_event_record(d, event, other) or C.tp_cuda_event_wait(d, event, compute),
     "StreamWaitEvent .* 905 .* [|] .* 901"),
    (lambda C, d, compute, _, event, __: C.tp_cuda_event_record(d, event, compute) or C.tp_cuda_event_synchronize(d, event),
     "EventSynchronize: .* 907 .* [|] $"),
    (fork, "^ [|] .* 904"),
    (fork_and_join, "^ [|] $"),
    (in_a_thread, "^ [|] $"),
]


@pytest.mark.parametrize(("call", "words"), SPOILS)
def test_captures_are_held_to_the_rules_of_cuda(call, words):
    told = refused(call)
    assert re.search(words, told), told
