"""Four stages on four equal parts of one GPU (green contexts): right, and how much sooner token slices end than GPipe.

A step is a forward and a backward of one sequence of 2048 and the norm of its gradients, by the host's clock from when the first
rank begins until the last has ended; the median of the steps after the first three, which warm up. Beside it the simulator's, fed
with what every operation of the same step took.
Parts share the memory's bandwidth and the card's power: a stage that works alone, as all of GPipe's do here, has more of both.
"""

import os
import statistics
import threading
import time
from functools import partial

import numpy as np
from gpu_check import Question, small, so_far, watched

STAGES, LONG = 4, 32 if small() else 2048
PATIENCE_S = 100.0 if watched() else 15.0  # with a message: what waits for ever shall say so within its question's time
EAGER = {"TERAPIPE_CUDA_GRAPHS": "0"}  # as in training.py
APART = "speedup_over_gpipe_w_apart"  # all slices have W apart, GPipe's backward is whole
# Halves of layers on each stage that a search found once (2026-11-27): a run of these tells what halves take.
KNOWN = 1, 2, 4, 5, 5, 5, 6, 6, 6, 5, 3, 0
PLACED = 12, 14  # stages
AS_GRAPHS = 14  # stages: this program as graphs too, of which some begin late (late.py)


def pipeline_right():
    """A step of four stages in four parts of the GPU: the loss and gradients of one stage on the whole of it."""
    from gpu.training import engine_of, small_model

    import terapipe_c as tp

    model = small_model(tie_weights=False)
    T = model.block_size
    params = tp.init_params(model, seed=1)
    tokens = np.random.default_rng(2).integers(0, model.vocab_size, (2, T + 1)).astype(np.int32)
    loss, _ = tp.loss_and_grads(model, params, tokens, backend="cuda")
    program, make = engine_of(model, [(1, [T // 2, T // 4, T // 4])] * 2, STAGES, "gpipe")
    steps, losses, caveats = run_ranks(model, program, make, params, tokens)
    found = {"loss": loss, "losses_of_ranks": losses, "step_s": statistics.median(seconds for seconds, _ in steps),
             "instructions": [len(trace) for trace in steps[-1][1]], "caveats": caveats}
    assert all(abs(one / loss - 1) < 3e-3 for one in losses), found
    return found | {"headline": f"loss {losses[0]:.5f}, on one stage {loss:.5f}"}


def chunked(chunks, slices):
    """All forwards, then all input gradients, then all weight gradients of one sequence, rank r with stages r, r + STAGES, ...: the
    slices pass in groups of STAGES (all at once where these do not come out even), a group through all chunks before the next, so
    that no rank waits between its chunks."""
    import terapipe_c as tp

    group = STAGES if slices % STAGES == 0 else slices
    groups, lines = [range(g, min(g + group, slices)) for g in range(0, slices, group)], []
    for rank in range(STAGES):
        stages = [c * STAGES + rank for c in range(chunks)]
        line = [f"{stage}F0.{s}" for group in groups for stage in stages for s in group]
        line += [f"{stage}I0.{s}" for group in groups[::-1] for stage in stages[::-1] for s in group[::-1]]
        line += [f"{stage}W0.{s}" for stage in stages[::-1] for s in range(slices - 1, -1, -1)]
        lines.append(" ".join(line))
    return tp.Program.parse("\n".join(lines))


def pipeline():
    """Four stages on four equal parts of the GPU, one sequence of 2048: token slices against GPipe, the simulator beside.

    Equal stages first; then partitions by what halves of layers took in a run of an earlier one, found by the simulator."""
    from gpu.placing import Costs, by_parameters, edges_of, looped, placed
    from gpu.training import some_params

    import terapipe_c as tp
    from terapipe_c.partition import even_partition

    layers, heads, width, vocabulary = (24, 1, 8, 64) if small() else (24, 16, 2048, 50257)
    model = tp.GPTConfig(layers, heads, width, vocabulary, LONG, tie_weights=False)
    params, even = some_params(model), even_partition(model, STAGES)
    found, failures = {"model": repr(model), "stages": STAGES}, []

    def measure(name, lengths, program, partition, eager=False):
        try:
            found[name], traces = measured(model, params, lengths, program, partition, eager)
        except Exception as error:  # the others may have better luck; kept as text, for an exception keeps its engines' memory
            found[name], traces = {"why": f"{type(error).__name__}: {error}"}, None
            failures.append(f"{name}: {found[name]['why']}")
        so_far(found | summed_up(found))
        return traces

    measure("gpipe", [2048], tp.schedules.gpipe(STAGES, 1), even)
    measure("gpipe, W apart", [2048], chunked(1, 1), even)
    for tokens in (256, 512):
        measure(f"slices of {tokens}", [tokens] * (2048 // tokens), chunked(1, 2048 // tokens), even)
    slices = [512] * 4
    known = measure("slices of 512, W in gaps", slices, by_parameters(model, STAGES, KNOWN, 4), edges_of(model, KNOWN), eager=True)
    costs = Costs(model, KNOWN, known, between_of(known)) if known else None
    for stages in PLACED if costs else ():
        halves, predicted_s = placed(model, stages, partial(costs.program, looped(STAGES, stages, 4)), costs)
        program = costs.program(looped(STAGES, stages, 4), halves)
        for eager in (True, False) if stages == AS_GRAPHS else (True,):
            name = f"slices of 512, {stages} stages" + ("" if eager else ", as graphs")
            measure(name, slices, program, edges_of(model, halves), eager)
            found[name]["predicted_s"] = predicted_s
    if failures:
        raise RuntimeError(failures[0])
    return found | summed_up(found)


def measured(model, params, lengths, program, partition, eager=False):
    """({seconds of a step, of the simulator's, ...}, the traces of a step of about that time) of one sequence in these slices.

    A step takes a few percent more or less than the next: each is laid beside what the simulator makes of its own operations, of
    these alone (`operations_s`) and of what lies between them too."""
    from terapipe_c.backend import Backend
    from terapipe_c.engine import TIMED, RankEngine

    tokens = np.random.default_rng(7).integers(0, model.vocab_size, (1, LONG + 1)).astype(np.int32)
    slicing, program = [(1, [n * LONG // 2048 for n in lengths])], program.lower()

    def make(rank, comm, **device):
        return RankEngine(model, partition, slicing, program, rank, comm, backend=Backend("cuda", "bf16"), candidates=TIMED,
                          **device)

    steps, _, caveats = run_ranks(model, program, make, params, tokens, eager)
    took, again = [seconds for seconds, _ in steps], [simulated(program, traces) for _, traces in steps]
    usual, between = statistics.median_low(took), [between_of(traces) for _, traces in steps]
    return {"step_s": statistics.median(took), "simulated_s": statistics.median(again), "steps_s": took, "each_simulated_s": again,
            "simulated_over_measured": statistics.median(b / a for a, b in zip(took, again, strict=True)), "caveats": caveats,
            "operations_s": statistics.median(simulated(program, traces, {}) for _, traces in steps),
            "outside_s": [seconds - one.pop("span_s") for seconds, one in zip(took, between, strict=True)], "between": between,
            "eager": eager, "halves": [min(end, model.num_blocks - 1) - max(first, 1) for first, end in partition],
            "trace": rows_of(steps[took.index(usual)][1])}, steps[took.index(usual)][1]  # fmt: skip


def rows_of(traces):
    """A step: of each rank what it did, from and until which microsecond."""
    zero = min(row[4] for trace in traces for row in trace)
    return [[f"{op}{stage}.{part} {1e6 * (start - zero):.0f} {1e6 * (end - zero):.0f}" for op, stage, _, part, start, end in trace]
            for trace in traces]  # fmt: skip


def summed_up(found):
    """Of what was measured by now."""
    steps = {k: one["step_s"] for k, one in found.items() if isinstance(one, dict) and "step_s" in one}
    slices = {k: seconds for k, seconds in steps.items() if k.startswith("slices")}
    if not slices or "gpipe" not in steps:
        return {}
    best = min(slices, key=slices.get)
    sums = {"speedup": steps["gpipe"] / slices[best]}
    if "gpipe, W apart" in steps:
        sums[APART] = steps["gpipe, W apart"] / slices[best]
    apart = f", {sums[APART]:.2f} where its W is apart too" if APART in sums else ""
    off = {eager: max(abs(found[name]["simulated_over_measured"] - 1) for name in steps if found[name]["eager"] == eager)
           for eager in {found[name]["eager"] for name in steps}}  # fmt: skip
    told = ", ".join(f"{100 * one:.1f} % {'without graphs' if eager else 'as graphs'}" for eager, one in sorted(off.items()))
    return sums | {"headline": f"{best}: {sums['speedup']:.2f} times GPipe (goal 2.5){apart}; simulator off by at most "
                               f"{told} (goal 5)"}


def opened(model, ranks):
    """(region, [part of the GPU], [communicator] of each rank); the emulator has no parts."""
    from terapipe_c import _core, cuda, device_comm
    from terapipe_c.engine import gather_bytes

    everyone = bytearray(int(a != b) for a in range(ranks) for b in range(ranks))
    region = _core.Region.create(ranks, everyone, 1 << 16, max(64, gather_bytes(model)), False)
    if not small():
        return region, *cuda.pipeline_on_one_gpu(region, 0, PATIENCE_S)
    controls = [_core.Comm(region, rank, 120.0) for rank in range(ranks)]
    return region, [None] * ranks, [device_comm.inproc(control, 1 << 20) for control in controls]


def in_step(region, start, work):
    """in_threads(region, work) of ranks that meet at the barrier `start`: where one fails the others do not wait for it there."""
    from terapipe_c.engine import in_threads

    def one(rank):
        try:
            return work(rank)
        except BaseException:
            start.abort()
            raise

    return in_threads(region, one)


def run_ranks(model, program, make, params, tokens, eager=False):
    """([(seconds, [trace of each rank])] of the steps after those that warm up, without update, [loss] of each rank, what the ranks
    say of themselves), ranks being threads with a part of the GPU."""
    region, parts, comms = opened(model, program.num_ranks)
    warm, count = (0, 3) if small() else (3, 6)
    start = threading.Barrier(program.num_ranks, timeout=60)
    eager = eager or os.environ.get("TERAPIPE_CUDA_GRAPHS") == "0"

    def work(rank):
        engine = make(rank, comms[rank], part=parts[rank], eager=eager)
        engine.load(params)
        steps = []
        for _ in range(warm + count):
            start.wait()
            begin = time.perf_counter()
            loss, *_ = engine.run(tokens, update=False)
            end = time.perf_counter()
            start.wait()  # before a trace is asked for, which keeps others from their own time
            steps.append((begin, end, engine.trace()))
        return steps[warm:], loss, engine.caveats

    told = in_step(region, start, work)
    steps = [spanned(of_ranks) for of_ranks in zip(*(steps for steps, *_ in told), strict=True)]
    return steps, [loss for _, loss, _ in told], sorted({text for *_, said in told for text in said})


def spanned(of_ranks):
    """(Seconds from the first rank's begin to the last's end, the other things of each rank) of a step's (begin, end, ...)."""
    begins, ends, *others = zip(*of_ranks, strict=True)
    return max(ends) - min(begins), *map(list, others)


def message_read(op, stage, micro, part):
    """The message that an operation waits for, as its sender's trace calls it."""
    return {"F": ("SF", stage - 1, micro, part), "B": ("SB", stage + 1, micro, part), "I": ("SB", stage + 1, micro, part)}.get(op)


def between_of(traces):
    """What lies between the operations of a step: the median time from a message's end until what it kept waiting begins
    (handover_s: of hosts, and the receiver's copy), and between two instructions that follow each other (between_s); {which began
    later than late.py's LATE_S: after so many seconds}; and how long all took (span_s)."""
    from gpu.late import LATE_S

    sent = {tuple(row[:4]): row[5] for trace in traces for row in trace if row[0] in ("SF", "SB")}
    found, late = {"handover_s": [], "between_s": []}, {}
    for rank, trace in enumerate(traces):
        free = -np.inf
        for op, stage, micro, part, start, end in (row for row in trace if row[0] not in ("RF", "RB", "OPT")):
            arrived = sent.get(message_read(op, stage, micro, part), -np.inf)
            if (ready := max(arrived, free)) > -np.inf:
                found["handover_s" if arrived > free else "between_s"].append(start - ready)
                if start - ready > LATE_S:
                    late[f"rank {rank} {op}{stage}.{part}"] = start - ready
            free = end
    span = max(row[5] for trace in traces for row in trace) - min(row[4] for trace in traces for row in trace)
    return {name: statistics.median(times) if times else 0.0 for name, times in found.items()} | {"late": late, "span_s": span}


def simulated(program, traces, between=None):
    """The simulator's step, fed with what every operation took in this very run, and with what one message and two instructions
    take between them (between_of; {}: nothing). No step here updates."""
    import terapipe_c as tp
    from terapipe_c.report import resimulated

    between = between_of(traces) if between is None else between
    lags = {name: max(between[name], 0.0) for name in ("handover_s", "between_s") if name in between}
    rows = [(rank, *row) for rank, trace in enumerate(traces) for row in trace]
    zero = min(row[5] for row in rows)
    rows = [(*row[:5], row[5] - zero, row[6] - zero) for row in rows]
    return resimulated(program, tp.Timeline.from_intervals(rows, program.num_ranks).intervals, update=False, **lags)


QUESTIONS = [
    Question("stages on one GPU", 40, pipeline_right, order=21, otherwise=EAGER),
    Question("pipeline", 42, pipeline, order=47, otherwise=EAGER),
]
