"""What `terapipe simulate` and `terapipe view` show: the timeline of a plan, a run folder, a program or a named schedule."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ._files import check_place, loads, no_folder, path_of, read_bytes, read_entry

__all__ = ["asked", "draw", "named", "result", "timeline_of"]

TIMES = {"fwd": 1.0, "bwd": 2.0, "comm": 0.0}  # seconds, of what has none of its own
#: What is in the pictures of view.py; files without it are not replaced.
MARKS = {"svg": '<svg xmlns="http://www.w3.org/2000/svg" class="tp"', "html": "<title>Pipeline timeline</title>",
         "trace": '"traceEvents"'}  # fmt: skip
SIZES = {"ranks": 4, "micro_batches": 8, "slices": 1, "chunks": 2, "split": 1}  # of a named schedule


def asked(args: argparse.Namespace) -> tuple[str, Any]:
    """(what it is, its timeline) of `simulate`: a file's or a named schedule's."""
    if (args.path is None) == (args.schedule is None):
        raise ValueError("give either a file or --schedule")
    if args.path is not None:
        refuse(args, list(SIZES), f"that is for a named schedule, and {args.path} has its own")
        return timeline_of(Path(args.path), args)
    program = named(args)
    program.check()
    return args.schedule, _timed(program, args)


def refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """What would be ignored."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} would change nothing: {why}")


def timeline_of(path: Path, args: argparse.Namespace) -> tuple[str, Any]:
    """(what it is, its timeline): a run folder's measured one where there is one, else the planned one."""
    import terapipe_c as tp

    own = f"that is for a program or a named schedule, and {path} has its own seconds"
    if path.is_dir():
        if not no_folder(path / "plan.json").exists():
            raise ValueError(f"{path}: no run folder, it has no plan.json")
        refuse(args, list(TIMES), own)
        plan = tp.Plan.load(str(path / "plan.json"))
        if (path / "trace.json").exists():  # of the last step, once the run is over
            from .view import measured_timeline

            found = read_entry(path / "trace.json", "rows", list)
            if found.get("plan") not in (None, plan.digest):     # resumed by another plan, which has not come to its end
                return "planned timeline of a run (trace.json is of the plan before)", plan.timeline()
            what = "measured timeline of the last step"
            steps, done = found.get("steps"), _steps_recorded(path / "metrics.jsonl")
            if isinstance(steps, int) and done > steps:          # resumed, and it has not come to its end
                what = f"measured timeline of step {steps} of the {done} that were done: what ended early left none"
            try:
                return what, measured_timeline([tuple(row) for row in found["rows"]], plan.program)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path / 'trace.json'} is damaged: {error}") from None
        return "planned timeline of a run", plan.timeline()
    try:
        raw = read_bytes(path)      # once: it may be a pipe
        text = raw.decode().replace("\r\n", "\n")
        if text.lstrip().startswith("{"):
            plan = tp.Plan._of_bytes(str(path), raw)
            refuse(args, list(TIMES), own)
            return "plan", plan.timeline()
        program = tp.Program.from_csv(text) if path.suffix.lower() == ".csv" else tp.Program.parse(text)
        program.check()
    except ValueError as error:
        why = f"byte {error.start} is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(why if str(path) in why else f"{path} is neither a plan nor a program: {why}") from error
    return "program", _timed(program, args)


def _steps_recorded(metrics: Path) -> int:
    """How many steps of a run are done by its newest record; 0 where none says."""
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))    # a record is some 250 bytes
        lines = file.read().split(b"\n")
        return int(loads(lines[-2])["step"]) + 1                # behind the last end of a line may be a half one
    return 0


def _or(given: Any, usual: Any) -> Any:
    return usual if given is None else given


def _timed(program: Any, args: argparse.Namespace) -> Any:
    fwd, bwd, comm = (_or(getattr(args, name), usual) for name, usual in TIMES.items())
    return program.simulate({"F": fwd, "B": bwd, "I": bwd / 2, "W": bwd / 2, "R": fwd}, comm_s=comm)


def named(args: argparse.Namespace) -> Any:
    """The program of --schedule."""
    from . import schedules

    functions = {name.replace("_", "-"): name for name in schedules.__all__ if name not in ("OPS", "Program")}
    functions["1f1b"] = functions.pop("one-f-one-b")
    name = functions.get(args.schedule.replace("_", "-").replace("one-f-one-b", "1f1b"))
    if name is None:
        raise ValueError(f"--schedule is {args.schedule!r}: one of {', '.join(sorted(functions))} would be right")
    build, sizes = getattr(schedules, name), {k: _or(getattr(args, k), usual) for k, usual in SIZES.items()}
    two, slices, chunks = (sizes["ranks"], sizes["micro_batches"]), sizes["slices"], sizes["chunks"]
    chunked = name in ("interleaved", "looped_bfs", "hanayo")
    if not chunked:
        refuse(args, ["chunks"], f"that is for interleaved, looped-bfs and hanayo, and --schedule is {args.schedule}")
    if name == "sliced_1f1b":
        if slices != 1:
            raise ValueError(f"--slices is {slices}: 1 would be right, as sliced-1f1b has halves along the batch")
        return build(*two, sizes["split"])
    refuse(args, ["split"], f"that is for sliced-1f1b, and --schedule is {args.schedule}")
    if chunked:
        if name == "hanayo" and chunks % 2:
            raise ValueError(f"--chunks is {chunks}: two a wave, 2, 4, ..., would be right for hanayo")
        return build(*two, chunks // 2 if name == "hanayo" else chunks, slices=slices)
    return build(*two, slices=slices)


def in_flight(program: Any) -> list[float]:
    """How many activations each rank holds at most: of one micro-batch in one stage each, a slice being its share of one."""
    whole = min(math.lcm(*program.slices), 2**36)       # a multiple of all slices, where that leaves sums exact
    shares = [whole / count for count in program.slices for _ in range(count)]
    line = program.simulate({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "R": 1.0}, activation_bytes=[shares] * program.num_stages)
    return [round(float(held) / whole, 9) for held in line.peak_memory_bytes]


def result(line: Any) -> dict[str, Any]:
    """What is printed of it."""
    bytes_known = line.peak_memory_bytes.any()      # of a program and what was measured they are not: its activations are
    return {
        "makespan_s": line.makespan_s,
        "lower_bound_s": line.lower_bound_s,
        "busy_s": line.busy_s,
        "bubbles": line.bubbles,
        "peak_memory_bytes": line.peak_memory_bytes if bytes_known else None,
        **({} if bytes_known or line.program is None else {"peak_activations": in_flight(line.program)}),
    }


def draw(args: argparse.Namespace, line: Any) -> dict[str, str]:
    """--svg, --html and --trace: {flag: what was written}"""
    paths: dict[str, str] = {}
    for name in ("svg", "html", "trace"):
        path = getattr(args, name)
        if path and (same := paths.setdefault(os.path.realpath(path_of("path", path, look=False)), name)) != name:
            raise ValueError(f"--{same} and --{name} are both {path}: two files would be right")
        if path:                                     # before one is written
            check_place(path, MARKS[name])
    written = {}
    for name, method in (("svg", "to_svg"), ("html", "to_html"), ("trace", "to_chrome_trace")):
        path = getattr(args, name)
        if path:
            getattr(line, method)(path)
            written[name] = path
    return written
