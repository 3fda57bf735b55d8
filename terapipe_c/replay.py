"""Why were measured ranks idle? Found by simulating the program that they ran with the measured durations."""
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ._core import OPS, Error, Program
from .schedule import CAUSES, CODE, INSTRUCTION, SWAPS, WORK, Float, Timeline

__all__ = ["causes"]

_BESIDE = 8         # TP_BESIDE of csrc/sched/sched.h: copied beside the work
_SAVING = {"recompute": ("R",), "swap": SWAPS}  # what a rank does to save memory counts as idle, by this cause


def causes(
    rows: NDArray[np.void], ranks: int, makespan_s: float, busy: Float, ran: Program | None = None
) -> tuple[dict[str, float], float, Program | None]:
    """Bubbles of measured rows, a lower bound on this placement with these durations, and the program they ran: `ran`, if that is
    known and they are of all of it."""
    idle = ranks * makespan_s - float(busy.sum())
    bubbles = dict.fromkeys(CAUSES, 0.0)
    work = rows[np.isin(rows["op"], [CODE[name] for name in WORK])]
    try:
        program, each = _replay(work, ranks, ran)
    except (Error, ValueError):  # a cut-off trace is no program: fall back on what can be seen without one
        for rank in range(ranks):
            mine = work[work["rank"] == rank]
            bubbles["warmup"] += float(mine["start_s"].min()) if len(mine) else makespan_s
            bubbles["cooldown"] += makespan_s - float(mine["end_s"].max()) if len(mine) else 0.0
        for cause, ops in _SAVING.items():
            if cause == "swap" and _overlap(work):
                continue
            mine = work[np.isin(work["op"], [CODE[op] for op in ops])]
            bubbles[cause] = float((mine["end_s"] - mine["start_s"]).sum())
        return _within(idle, bubbles), 0.0, None
    ideal = {cause: sum(line.bubbles[cause] for line in each) for cause in CAUSES}
    return _within(idle, ideal), min(makespan_s, max(line.lower_bound_s for line in each)), program


def _within(idle: float, ideal: dict[str, float]) -> dict[str, float]:
    """What explains the idle seconds, and the rest of them as messages'; together no more: clocks of two ranks may differ by a
    hair, and what saves memory may overlap with the work."""
    explained = sum(ideal.values())
    scale = min(1.0, idle / explained) if explained > 0 else 1.0
    bubbles = {cause: scale * seconds for cause, seconds in ideal.items()}
    bubbles["comm"] = max(0.0, idle - scale * (explained - ideal["comm"]))
    return bubbles


def _mark_halves(code: NDArray[np.void], work: NDArray[np.void]) -> None:
    """Two forwards of one slice of one stage are its halves, the earlier one the first."""
    forward = np.flatnonzero(code["op"] == CODE["F"])
    keys = [tuple(row) for row in code[["stage", "micro", "slice"]][forward].tolist()]
    where: dict[tuple[int, ...], list[int]] = {}
    for key, at in zip(keys, forward.tolist(), strict=True):
        where.setdefault(key, []).append(at)
    for places in where.values():
        if len(places) == 2:
            code["flags"][sorted(places, key=lambda at: float(work["start_s"][at]))] = (1, 2)


def _overlap(work: NDArray[np.void]) -> bool:
    """Whether swaps overlap with work: whether one does, on a rank, for longer than clocks may be off."""
    swaps = np.isin(work["op"], [CODE[name] for name in SWAPS])
    for rank in np.unique(work["rank"][swaps]):
        mine = work["rank"] == rank
        own, copies = np.sort(work[mine & ~swaps], order="start_s"), work[mine & swaps]
        at = np.searchsorted(own["end_s"], copies["start_s"], side="right")    # the first that ends later
        own, copies = own[at[at < len(own)]], copies[at < len(own)]
        shared = np.minimum(own["end_s"], copies["end_s"]) - np.maximum(own["start_s"], copies["start_s"])
        if (shared > 1e-6 * (copies["end_s"] - copies["start_s"])).any():
            return True
    return False


def _begun(work: NDArray[np.void]) -> NDArray[np.void]:
    """Rows of one rank, in order of time, in the order of their program: a copy beside the work that starts in the middle of
    an operation was begun before that, and had to wait for earlier copies."""
    copies = np.isin(work["op"], [CODE[name] for name in SWAPS])
    own = work[~copies]
    place = np.empty(len(work))
    place[~copies] = np.arange(len(own))
    place[copies] = np.searchsorted(own["end_s"], work["start_s"][copies], side="right") - 0.5
    forwards = np.flatnonzero(own["op"] == CODE["F"])         # behind its own, however clocks are off
    behind = {(row["stage"], row["micro"], row["slice"]): at + 0.5 for at, row in zip(forwards, own[forwards], strict=True)}
    for at in np.flatnonzero(work["op"] == CODE["SO"]):
        place[at] = max(place[at], behind.get((work["stage"][at], work["micro"][at], work["slice"][at]), 0.0))
    place[copies] = np.maximum.accumulate(place[copies])       # one after another
    return work[np.argsort(place, kind="stable")]


def _is_of(work: NDArray[np.void], program: Program, ranks: int) -> bool:
    """Whether these rows are exactly the program's instructions, done once by so many ranks, or once by each of several
    replicas."""
    if ranks % program.num_ranks:
        return False
    some = [CODE[name] for name in WORK]
    for rank in range(program.num_ranks):
        code = program.instructions(rank)
        told = _keys(code[np.isin(code["op"], some)])
        if not all(np.array_equal(told, _keys(work[work["rank"] == r])) for r in range(rank, ranks, program.num_ranks)):
            return False
    return True


def _keys(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """What rows are of, sorted."""
    stage, micro, piece, op = (rows[name].astype(np.int64) for name in ("stage", "micro", "slice", "op"))
    return np.sort(stage << 40 | micro << 24 | piece << 8 | op)


def _replay(work: NDArray[np.void], ranks: int, ran: Program | None = None) -> tuple[Program, list[Timeline]]:
    """(the program that was run, each replica's timeline as simulated with its measured durations)."""
    if ran is not None and _is_of(work, ran, ranks):
        replica = work["rank"] // ran.num_ranks
        return ran, [_timed(ran, work[replica == r]) for r in range(ranks // ran.num_ranks)]
    beside = _overlap(work)
    if beside:
        work = np.concatenate([_begun(work[work["rank"] == rank]) for rank in range(ranks)])
    code = np.zeros(len(work), INSTRUCTION)
    for name in ("op", "stage", "micro", "slice"):
        code[name] = work[name]
    code["peer"] = -1
    _mark_halves(code, work)
    if beside:
        code["flags"][np.isin(code["op"], [CODE[name] for name in SWAPS])] = _BESIDE
    if len(code) and (code["op"] == CODE["AR"]).any():  # each end of a tied weight names the rank of the other
        first = code["op"] == CODE["AR"]
        ends = work["rank"][first]
        code["peer"][first] = np.where(ends == ends.min(), ends.max(), ends.min())
    program = Program.from_instructions([code[work["rank"] == rank] for rank in range(ranks)])
    return program, [_timed(program, work)]


def _timed(program: Program, work: NDArray[np.void]) -> Timeline:
    """The program simulated with the measured durations of these rows."""
    code = np.zeros(len(work), INSTRUCTION)
    for name in ("op", "stage", "micro", "slice"):
        code[name] = work[name]
    _mark_halves(code, work)
    offset = np.cumsum((0, *program.slices[:-1]))
    seconds: dict[str, Float] = {}
    for op in np.unique(work["op"]):
        mine = work[work["op"] == op]
        for half in (0, 1, 2) if op == CODE["F"] and (code["flags"] != 0).any() else (0,):
            some = mine[code["flags"][work["op"] == op] & 3 == half]
            table = np.zeros((program.num_stages, sum(program.slices)))
            table[some["stage"], offset[some["micro"]] + some["slice"]] = some["end_s"] - some["start_s"]
            seconds[OPS[op] + ("", ".a", ".b")[half]] = table
    if {"B", "I", "W"} <= seconds.keys():       # a slice has one or the others, and the bound takes whichever is less
        seconds["B"], seconds["I"] = seconds["B"] + seconds["I"] + seconds["W"], seconds["I"] + seconds["B"]
    # OPT is in the trace and messages are not: a compute-only program with its own end
    return program.simulate(seconds)
