"""No rank waits for ever for a message of NCCL's. Emulated streams do everything at once and cannot show it, so programs are run
here by the rules of cuda/nccl.h alone: what waits for what on the devices, with TP_NCCL_SLOTS slots at each end of a channel."""
import pytest

from terapipe_c import schedules

SLOTS = 2     # TP_NCCL_SLOTS
RECEIVE = {"SF": "RF", "SB": "RB", "SE": "RE", "SL": "RL"}
READS = {"F": "RF", "B": "RB", "I": "RB", "SL": "RE"}


class Message:
    def __init__(self, kind, channel):
        self.guest, self.channel, self.number = kind in ("RE", "RL"), channel, len(channel)
        self.sent = self.posted = self.over = self.read = False
        self.behind = []     # a guest's: what must have left before it is written
        channel.append(self)

    def moves(self, slots):
        """Can it be over, where the one before is? Into a slot that has been read, or where a guest has left."""
        room = self.guest or self.number < slots or self.channel[self.number - slots].read
        return self.sent and self.posted and room and all(other.over for other in self.behind)


def key_of(kind, row):
    """By the stage that reads it."""
    return RECEIVE.get(kind, kind), row[1] + {"SF": 1, "SB": -1}.get(kind, 0), row[2], row[3]


def work_of(rows, messages, slots):
    """For each instruction of a rank: the messages that must be over before it, those that it reads, and what it does to one."""
    posted, order, left, away, home, work = {}, {}, {}, {}, {}, []
    seen = {}       # of a peer's, how many a rank has read: it waits for them once
    for op, row in rows:
        _, stage, of, _, peer, _, slot = row
        cell, micro = (stage, slot & 0xFFFF), (stage, of)
        waits, does, reads = [], None, [messages.get((READS.get(op), *key_of(op, row)[1:]))]
        if op in RECEIVE.values():
            message = messages[key_of(op, row)]
            does = message, "posted"
            posted.setdefault(peer, []).append(message)
            order[message] = peer, len(posted[peer])
            if message.guest:
                message.behind = left.get(peer, [])[-1:]
            if op == "RL":
                home[micro] = message
        elif op in RECEIVE:
            message = messages[key_of(op, row)]
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
            reads.append(home.pop(micro, None))
        places, reads = [order[read] for read in reads if read is not None], []
        for peer, end in places:        # a peer's, in their order
            reads += posted[peer][seen.get(peer, 0):end]
            seen[peer] = max(end, seen.get(peer, 0))
        work.append((waits + reads, reads, does))
    return work


def stuck(program, slots=SLOTS, direct=True):
    """Where ranks wait for ever; "": nowhere. direct: guests need no slots."""
    rows = [[(schedules.OPS[row[0]], row) for row in program.instructions(rank).tolist()] for rank in range(program.num_ranks)]
    channels, messages = {}, {}
    for rank, line in enumerate(rows):
        for op, row in line:
            if op in RECEIVE:
                channel = channels.setdefault((rank, row[4], RECEIVE[op]), [])
                messages[key_of(op, row)] = Message(RECEIVE[op] if direct else "RF", channel)
    work, at, moved = [work_of(line, messages, slots) for line in rows], [0] * len(rows), True
    first = dict.fromkeys(channels, 0)      # that is not over
    while moved:
        moved = False
        for key, channel in channels.items():
            while first[key] < len(channel) and channel[first[key]].moves(slots):
                channel[first[key]].over = moved = True
                first[key] += 1
        for rank, line in enumerate(work):
            while at[rank] < len(line) and all(message.over for message in line[at[rank]][0]):
                _, reads, does = line[at[rank]]
                for message in reads:
                    message.read = True
                if does is not None:
                    setattr(*does, True)
                at[rank] += 1
                moved = True
    assert any(at)
    return "; ".join(f"rank {rank} at {rows[rank][k][0]} of micro-batch {rows[rank][k][1][2]}" for rank, k in enumerate(at)
                     if k < len(rows[rank]))


def programs(name):
    """Of so many ranks and micro-batches, whole, split and with what waits."""
    for ranks in (2, 3, 4, 5, 6, 8):
        for micros in (1, 2, 3, 4, 6, 8, 12, 17):
            for slices in (1, 2, 3):
                chunks = {"interleaved": (2,), "hanayo": (2,)}.get(name, ())
                try:
                    program = getattr(schedules, name)(ranks, *chunks, micros, slices)
                except ValueError:             # chimera's numbers are even, interleaved's divide
                    continue
                for one in (program, program.split(pending=0), program.split(pending=2)):
                    yield one.lower(name != "pipedream")


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "seq1f1b", "interleaved", "bpipe", "chimera", "pipedream"])
def test_no_rank_waits_for_ever(name):
    seen = 0
    for program in programs(name):
        assert stuck(program) == "", str(program)
        seen += 1
    assert seen >= 60


def test_guests_through_slots_would():
    """Why they have none: a third would wait until the first is read, which waits for it."""
    verdicts = set()
    for program in programs("bpipe"):
        if "SE" in program.counts:
            verdicts.add(stuck(program, direct=False) == "")
        if len(verdicts) == 2:
            break
    assert verdicts == {True, False}
