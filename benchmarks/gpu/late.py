"""Four stages on four parts of one GPU: which operations begin late, or stop within, and is that the host's doing or the device's?

An operation is ready when the one before it on its rank has ended and the sender has copied its message. It is late by what passes
until it begins, and stops by what it takes longer than the same operation usually does in the same run. Of either what passes until
the host has given the operation to the device (the launch of its graph has returned) is the host's, the rest the device's.
The host's clock and the device's meet at the beginning of a step, to some tens of microseconds: little beside LATE_S.
"""

import collections
import itertools
import multiprocessing
import os
import statistics
import threading
import time

import numpy as np
from gpu_check import Question, small, so_far

LATE_S = 200e-6
WARM, ROUNDS, STEPS = 3, *((1, 2) if small() else (2, 4))  # graphs come third; rounds over all ways; a step more to settle in each
CHUNKS, TOKENS = 3, 512  # the fastest program of 2026-11-26 on an H200, and the partition that the simulator liked there
LAYERS = 1.5, 1.5, 2.0, 2.0, 1.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 0.5
WAYS = {"as is": 0, "hosts spin": 1, "and settle": 5, "queued": 2}  # cuda/inproc.h
# How a process with four ranks is started, and which ways are tried there. The package asks for 32 queues itself.
RUNS = {
    "32 queues": ({}, tuple(WAYS)),
    "8 queues": ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, ("as is",)),
    "no graphs": ({"TERAPIPE_CUDA_GRAPHS": "0"}, ("as is", "queued")),
}
RUN_S = 12.0  # of a process at most: what else a GPU needs for one such pipeline is 2 to 3 s
WORKS = ("F", "B", "I", "W")


# ---- what the times of a step say ------------------------------------------------------------------------------------------


def operations(traces, given):
    """[{"rank", "at", "op", "ready", "start", "end", "came", "begun", "ended", "told"}] of one step's F, B, I and W, in seconds by
    the host's clock: `came`, `begun` and `ended` as RankEngine.given() has them, `told` when the sender's host had sent word."""
    from gpu.pipeline import message_read

    sent = {row[:4]: (row[5], times[2]) for trace, gave in zip(traces, given, strict=True)
            for row, times in zip(trace, gave, strict=True) if row[0] in ("SF", "SB")}  # fmt: skip
    found = []
    for rank, (trace, gave) in enumerate(zip(traces, given, strict=True)):
        before = -np.inf
        for at, (row, (came, begun, ended)) in enumerate(zip(trace, gave, strict=True)):
            op, stage, micro, part, start, end = row
            if op in WORKS:
                arrived, told = sent.get(message_read(op, stage, micro, part), (-np.inf, -np.inf))
                ready = max(before, arrived)
                found.append({"rank": rank, "at": at, "op": f"{op}{stage}.{part}", "ready": ready if ready > 0 else start,
                              "start": start, "end": end, "came": came, "begun": begun, "ended": ended, "told": told})  # fmt: skip
            before = end
    return found


def within(value, most):
    return min(max(value, 0.0), most)


def lateness(op):
    """(seconds late, of these the host's, of these after it could have known: asleep, or behind something else)."""
    late = op["start"] - op["ready"]
    host = within(op["ended"] - op["ready"], late) if late > 0 else 0.0
    return late, host, within(op["begun"] - max(op["came"], op["told"], op["ready"]), host)


def stops(steps):
    """[(op, seconds that it took longer than it usually does, of these the host's)] over all steps."""
    took = collections.defaultdict(list)
    for op in itertools.chain(*steps):
        took[op["rank"], op["at"]].append(op["end"] - op["start"])
    usual = {key: statistics.median(seconds) for key, seconds in took.items()}
    for op in itertools.chain(*steps):
        longer = op["end"] - op["start"] - usual[op["rank"], op["at"]]
        if longer > LATE_S:
            yield op, longer, within(op["ended"] - op["start"], longer)


def beside_others(late, step, window_s=30e-6):
    """Of these late operations, how many begin as one of another rank ends or begins; and how many would by chance."""
    found, chance = 0, 0.0
    for op in late:
        times = np.array([t for other in step if other["rank"] != op["rank"] for t in (other["start"], other["end"])])
        found += bool(np.any(np.abs(times - op["start"]) <= window_s))
        places = np.linspace(op["ready"], op["start"], 200)
        chance += float(np.mean([np.any(np.abs(times - place) <= window_s) for place in places]))
    return found, chance


def summed(steps):
    """What all steps of one way have in common: each a list of operations()."""
    late = [[op for op in step if lateness(op)[0] > LATE_S] for step in steps]
    seconds = [lateness(op) for op in itertools.chain(*late)]
    stopped = list(stops(steps))
    beside = [beside_others(one, step) for one, step in zip(late, steps, strict=True)]
    where = collections.Counter(f"rank {op['rank']} {op['op']}" for op in itertools.chain(*late, (op for op, *_ in stopped)))
    n, every = len(steps), list(itertools.chain(*steps))
    ahead = [op["start"] - op["ended"] for op in every]

    def ms(values):
        return 1e3 * sum(values) / n

    return {
        "late_starts": len(seconds) / n, "late_ms": ms(s for s, *_ in seconds), "late_by_host_ms": ms(s for _, s, _ in seconds),
        "late_as_host_slept_ms": ms(s for *_, s in seconds), "late_by_device_ms": ms(all_ - host for all_, host, _ in seconds),
        "stops": len(stopped) / n, "stops_ms": ms(s for _, s, _ in stopped), "stops_by_host_ms": ms(s for *_, s in stopped),
        "stops_by_device_ms": ms(all_ - host for _, all_, host in stopped),
        "latest_ms": 1e3 * max((s for s, *_ in seconds), default=0.0),
        "small_delays_ms": ms(lateness(op)[0] for op in every if 0 < lateness(op)[0] <= LATE_S),
        "begins_beside_others": sum(found for found, _ in beside), "by_chance": sum(chance for _, chance in beside),
        "host_ahead_ms": {"median": 1e3 * statistics.median(ahead), "least": 1e3 * min(ahead)},
        "longest_giving_ms": 1e3 * max(op["ended"] - op["begun"] for op in every),
        "host_waits_ms": ms(op["begun"] - op["came"] for op in every),
        "clocks_off_us": 1e6 * max(0.0, *(op["ready"] - op["start"] for op in every)),
        "again": {place: times for place, times in where.most_common(5) if times > 1},
    }  # fmt: skip


def around(took, begin_ns, step, given, end_ns):
    """Milliseconds of a step that lie before its first operation, and at its end, when marks are read, by the host's clock."""
    first = min(op["start"] for op in step)
    last = max(end * 1e-9 - rank[-1][2] for end, rank in zip(end_ns, given, strict=True))
    return {"before_ms": 1e3 * (first - min(begin_ns) * 1e-9), "reading_ms": 1e3 * last,
            "besides_ms": 1e3 * (took - (max(end_ns) - min(begin_ns)) * 1e-9)}  # fmt: skip


def rows_of(step):
    """A step: rank, operation, the microseconds when it was ready, began, ended, was come to, began and ended to be given."""
    zero = min(op["begun"] for op in step)
    names = ("ready", "start", "end", "came", "begun", "ended")
    return [" ".join([str(op["rank"]), op["op"], *(f"{1e6 * (op[name] - zero):.0f}" for name in names)]) for op in step]


# ---- asking ---------------------------------------------------------------------------------------------------------------------


def partition_of(model):
    from gpu.pipeline import STAGES

    from terapipe_c.partition import even_partition

    if small():
        return even_partition(model, CHUNKS * STAGES)
    edges = [0, *(1 + np.cumsum(2 * np.array(LAYERS[:-1])).astype(int)), model.num_blocks]
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges)]


def steps_by_ways(model, params, ways):
    """{way: {"step_s", "simulated_over_measured", ...}}: the same engines, hence the same products, in turns."""
    from gpu.pipeline import LONG, STAGES, chunked, in_step, opened, simulated, spanned

    from terapipe_c import device_comm
    from terapipe_c.backend import Backend
    from terapipe_c.engine import TIMED, RankEngine

    slices = 2048 // TOKENS
    program, partition, slicing = chunked(CHUNKS, slices).lower(), partition_of(model), [(1, [LONG // slices] * slices)]
    tokens = np.random.default_rng(7).integers(0, model.vocab_size, (1, LONG + 1)).astype(np.int32)
    region, parts, comms = opened(model, STAGES)
    start, eager = threading.Barrier(STAGES, timeout=30), os.environ.get("TERAPIPE_CUDA_GRAPHS") == "0"

    def work(rank):
        engine = RankEngine(model, partition, slicing, program, rank, comms[rank], backend=Backend("cuda", "bf16"),
                            candidates=TIMED, part=parts[rank], eager=eager)  # fmt: skip
        engine.load(params)
        engine.given()
        found = {way: [] for way in ways}
        for step in range(WARM):
            engine.run(tokens, update=False, step=step + 1)
        for way in list(ways) * ROUNDS:
            device_comm.inproc_ways(comms[rank], WAYS[way])
            for step in range(1 + STEPS):
                start.wait()
                begin = time.perf_counter()
                *_, begin_ns, end_ns = engine.run(tokens, update=False)
                end = time.perf_counter()
                start.wait()
                if step > 0:
                    found[way].append((begin, end, engine.trace(), engine.given(), begin_ns, end_ns))
        return found, engine.caveats

    ranks = in_step(region, start, work)
    found = {"caveats": sorted({text for _, caveats in ranks for text in caveats})}
    for way in ways:
        each = map(spanned, zip(*(one[way] for one, _ in ranks), strict=True))  # of a step, of all ranks
        took, traces, given, begins, ends = map(list, zip(*each, strict=True))
        steps = list(map(operations, traces, given))
        outside = list(map(around, took, begins, steps, given, ends))
        again = [simulated(program, trace) / seconds for trace, seconds in zip(traces, took, strict=True)]
        worst = max(range(len(steps)), key=lambda i: sum(lateness(op)[0] for op in steps[i] if lateness(op)[0] > LATE_S))
        found[way] = {"step_s": statistics.median(took), "steps_s": took, "simulated_over_measured": statistics.median(again),
                      **{name: statistics.median(one[name] for one in outside) for name in outside[0]}, **summed(steps),
                      "worst": rows_of(steps[worst])}  # fmt: skip
    return found


def in_a_process(pipe, environment, model, params, ways):
    os.environ |= environment  # before the driver is loaded, which reads it once
    try:
        pipe.send(steps_by_ways(model, params, ways))
    except Exception as error:
        pipe.send({"why": f"{type(error).__name__}: {error}"})


def asked_of_process(environment, model, params, ways):
    """A process forked off this one, which has the parameters and has never asked the driver for anything."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=in_a_process, args=(theirs, environment, model, params, ways))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(RUN_S * (10 if small() else 1)) else {"why": f"took more than {RUN_S:g} s"}
    except EOFError:
        process.join(5.0)
        return {"why": f"ended with exit code {process.exitcode}"}
    finally:
        process.join(3.0)  # it gives the GPU's memory back
        process.kill()
        process.join(3.0)


def line(name, one):
    return (f"{name}: {1e3 * one['step_s']:.1f} ms, {one['late_starts']:.1f} late ({one['late_by_host_ms']:.1f} ms by the host, "
            f"{one['late_by_device_ms']:.1f} by the device), {one['stops']:.1f} stops ({one['stops_by_host_ms']:.1f}, "
            f"{one['stops_by_device_ms']:.1f})")  # fmt: skip


def pipeline_late():
    """Operations of the fastest pipeline that begin late or stop within: by the host or the device, and what makes them fewer."""
    from gpu.pipeline import LONG
    from gpu.training import some_params

    import terapipe_c as tp

    layers, heads, width, vocabulary = (8, 1, 8, 64) if small() else (24, 16, 2048, 50257)
    model = tp.GPTConfig(layers, heads, width, vocabulary, LONG, tie_weights=False)
    params = some_params(model)
    found = {"model": repr(model), "layers": list(LAYERS), "late_s": LATE_S}
    for run, (environment, ways) in RUNS.items():
        found[run] = asked_of_process(environment, model, params, ways)
        so_far(found)
    told = {f"{run}, {way}": found[run][way] for run, (_, ways) in RUNS.items() for way in ways if way in found[run]}
    if not told:
        raise RuntimeError(str({run: found[run] for run in RUNS}))
    first, best = next(iter(told)), min(told, key=lambda name: told[name]["step_s"])
    return found | {"headline": "; ".join(line(name, told[name]) for name in dict.fromkeys((first, best)))}


QUESTIONS = [Question("pipeline, late starts", 20, pipeline_late, order=48)]
