"""The rules of messages through slots in Python, as slow as they are plain: what csrc/sched/stuck.c is held against."""
from __future__ import annotations

from typing import Any

from terapipe_c._core import OPS, Program

_RECEIVE = {"SF": "RF", "SB": "RB", "SE": "RE", "SL": "RL"}
_READS = {"F": "RF", "B": "RB", "I": "RB", "SL": "RE"}
_FIRST, _HALVES = 1, 3   # flags of csrc/sched/sched.h: TP_HALF_FIRST, TP_HALVES
_Key = tuple[str, int, int, int, int]
_Row = tuple[int, ...]   # op stage micro slice peer flags slot


class _Message:
    def __init__(self, kind: str, channel: list[_Message]) -> None:
        self.guest, self.channel, self.number = kind in ("RE", "RL"), channel, len(channel)
        self.sent = self.posted = self.over = self.read = False
        self.behind: list[_Message] = []                       # a guest's: what must have left before it is written
        channel.append(self)

    def moves(self, slots: int) -> bool:
        """Can it be over, where the one before is? Into a slot that has been read, or where a guest has left."""
        room = self.guest or self.number < slots or self.channel[self.number - slots].read
        return self.sent and self.posted and room and all(other.over for other in self.behind)


_Step = tuple[list[_Message], list[_Message], tuple[_Message, str] | None]


def _key_of(kind: str, row: _Row) -> _Key:
    """By the stage that reads it; of a forward's also by the half, of a whole one the last."""
    of = _RECEIVE.get(kind, kind)
    half = 0 if of != "RF" else 1 if row[5] & _FIRST else 2
    return of, row[1] + {"SF": 1, "SB": -1}.get(kind, 0), row[2], row[3], half


def _work_of(rows: list[tuple[str, _Row]], messages: dict[_Key, _Message], slots: int) -> list[_Step]:
    """For each instruction of a rank: the messages that must be over before it, those that it reads, and what it does to one."""
    posted: dict[int, list[_Message]] = {}
    order: dict[_Message, tuple[int, int]] = {}
    left: dict[int, list[_Message]] = {}
    away: dict[tuple[int, int], _Message] = {}
    home: dict[tuple[int, int], _Message] = {}
    work: list[_Step] = []
    seen: dict[int, int] = {}                                  # of a peer's, how many a rank has read: it waits for them once
    for op, row in rows:
        _, stage, of, _, peer, _, slot = row
        cell, micro = (stage, slot & 0xFFFF), (stage, of)
        waits: list[_Message] = []
        does: tuple[_Message, str] | None = None
        wanted = [messages.get(_key_of(_READS[op], row)) if op in _READS else None]
        if op in _RECEIVE.values():
            message = messages[_key_of(op, row)]
            does = message, "posted"
            posted.setdefault(peer, []).append(message)
            order[message] = peer, len(posted[peer])
            if message.guest:
                message.behind = left.get(peer, [])[-1:]
            if op == "RL":
                home[micro] = message
        elif op in _RECEIVE:
            message = messages[_key_of(op, row)]
            does = message, "sent"
            if message.guest:
                left.setdefault(peer, []).append(message)
            elif message.number >= slots:                      # its slot, until the one before has left that
                waits.append(message.channel[message.number - slots])
            if op == "SE":
                away[cell] = message
        elif op == "F" and cell in away:
            waits.append(away.pop(cell))
        if op in ("R", "B", "I"):
            wanted.append(home.pop(micro, None))
        reads: list[_Message] = []
        for place, end in [order[read] for read in wanted if read is not None]:     # a peer's, in their order
            reads += posted[place][seen.get(place, 0):end]
            seen[place] = max(end, seen.get(place, 0))
        work.append((waits + reads, reads, does))
    return work


def stuck(program: Program, slots: int, direct: bool = True) -> str:
    """Where ranks of a lowered program wait for ever; "": nowhere. direct: guests need no slots."""
    rows: list[list[tuple[str, Any]]] = [[(OPS[row[0]], row) for row in program.instructions(rank).tolist()]
                                         for rank in range(program.num_ranks)]
    channels: dict[tuple[int, int, str], list[_Message]] = {}
    messages: dict[_Key, _Message] = {}
    for rank, line in enumerate(rows):
        for op, row in line:
            if op in _RECEIVE:
                channel = channels.setdefault((rank, row[4], _RECEIVE[op]), [])
                message = _Message(_RECEIVE[op] if direct else "RF", channel)
                of, stage, micro, piece, half = _key_of(op, row)
                messages[of, stage, micro, piece, half] = message
                if op == "SF" and not row[5] & _HALVES:        # the first half of a forward may read it, too
                    messages[of, stage, micro, piece, _FIRST] = message
    work, at, moved = [_work_of(line, messages, slots) for line in rows], [0] * len(rows), True
    first = dict.fromkeys(channels, 0)                         # that is not over
    while moved:
        moved = False
        for key, channel in channels.items():
            while first[key] < len(channel) and channel[first[key]].moves(slots):
                channel[first[key]].over = moved = True
                first[key] += 1
        for rank, steps in enumerate(work):
            while at[rank] < len(steps) and all(message.over for message in steps[at[rank]][0]):
                _, reads, does = steps[at[rank]]
                for message in reads:
                    message.read = True
                if does is not None:
                    setattr(*does, True)
                at[rank] += 1
                moved = True
    return "; ".join(f"rank {rank} at {rows[rank][k][0]} of micro-batch {rows[rank][k][1][2]}" for rank, k in enumerate(at)
                     if k < len(rows[rank]))
