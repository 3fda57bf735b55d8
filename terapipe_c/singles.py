"""What the single planners can be asked for a joint request: as it is, and by naming what it leaves open."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ._core import Error, InfeasibleError
from .judge import ZIGZAG, possible
from .partitioners import Found, plan_one, whole_sequences
from .request import AUTO, CHUNKED, PLANNERS, RECOMPUTE, SAVERS, SEARCHING, Request, halves, schedules_of

__all__ = ["by_name", "chunk_counts", "plan_singles", "recomputing", "single"]


def single(request: Request, name: str) -> Request | None:
    """The same request to one planner; None where it cannot be asked (several chunks)."""
    if name not in CHUNKED and (request.chunks > 1 or "interleaved" in request.schedules):
        return None
    if name == "bmpipe" and request.schedules[0] in ZIGZAG:
        return None
    return _asked(request, name, _usual(request, name), request.chunks, request.ranks)


def _usual(request: Request, planner: str) -> tuple[str, ...]:
    """Schedules that a single planner considers for this request."""
    return ("1f1b",) if request.schedules == AUTO and planner not in SEARCHING else request.schedules


def _asked(request: Request, planner: str, names: tuple[str, ...], chunks: int, ranks: tuple[int, ...]) -> Request | None:
    if request.recompute and planner in SAVERS:                # they choose that themselves
        return None
    micros = len(whole_sequences(request))
    ranks = tuple(r for r in ranks if r * chunks <= request.model.num_blocks and not possible(names[0], r, micros))
    return replace(request, planner=planner, schedules=names, chunks=chunks, ranks=ranks) if ranks else None


def chunk_counts(request: Request) -> range | tuple[int, ...]:
    """Numbers of chunks that a single planner could be asked for."""
    if not request.free_chunks:
        return (request.chunks,)
    return range(1, request.model.num_blocks // (1 if request.free_ranks else min(request.ranks)) + 1)


def by_name(request: Request) -> Iterator[Request]:
    """What a user could ask a single planner by naming the schedule and chunks, where the request leaves them open: the questions
    of :func:`plan_singles` are not among them."""
    for chunks in chunk_counts(request):
        ranks = request.ranks
        if request.free_ranks:
            ranks = halves(min(request.cluster.num_devices // request.replicas, request.model.num_blocks // chunks))
        for name, planner in itertools.product(schedules_of(request, chunks), PLANNERS[1:]):
            usual = chunks == request.chunks and _usual(request, planner) == (name,)
            several = chunks > 1 or name == "interleaved"
            if usual or (several and planner not in CHUNKED) or (planner == "bmpipe" and name in ZIGZAG):
                continue
            asked = _asked(request, planner, (name,), chunks, ranks)
            if asked is not None:
                yield asked


def plan_singles(request: Request) -> Iterator[tuple[str, Found | Error]]:
    """Every single planner by its name, and its plan for this request, or why there is none."""
    for name in PLANNERS[1:]:
        asked = single(request, name)
        if asked is None:
            continue
        try:
            found: Found | Error = plan_one(asked)
        except InfeasibleError as error:
            found = error
        yield name, found


def recomputing(request: Request) -> Iterator[tuple[str, Found]]:
    """(what, plan) of the terapipe planner where it is told to recompute, those that fit: the other planners' plans of whole
    sequences are among what they choose themselves."""
    for what, kinds in RECOMPUTE.items():
        flags = tuple(block.kind in kinds for block in request.model.blocks)
        asked = _asked(replace(request, recompute=flags), "terapipe", _usual(request, "terapipe"), request.chunks, request.ranks)
        if asked is None:
            continue
        try:
            yield what, plan_one(asked)
        except InfeasibleError:
            continue
