"""Independent executors of a program's text: slow, literal, and knowing nothing of csrc/sched."""

import re
from collections import deque

WORD = re.compile(r"(\d+)([A-Z]+)(\d+)\.(\d+)(?:@(\d+)|&&?|(\+))?")


class Stuck(Exception):
    pass


class Wrong(Exception):
    pass


def read(text):
    """[[(stage, op, micro, slice, peer)]] per rank; R within its B is R+."""
    return [
        [
            (int(s), op + (within or ""), int(q), int(m), None if p is None else int(p))
            for s, op, q, m, p, within in (WORD.fullmatch(word).groups() for word in line.split())
        ]
        for line in text.splitlines()
    ]


def need(condition, what):
    if not condition:
        raise Wrong(what)


class Machine:
    """Runs a program with values: what is in a buffer is a tag that says what it should be, and every reader looks."""

    def __init__(self, program):
        self.lists = read(str(program))
        self.slots = [[int(x) for x in program.instructions(r)["slot"]] for r in range(len(self.lists))]
        self.stages, self.slices = program.num_stages, program.slices
        self.copies = program.copies
        self.home = program.rank_of
        self.lowered = any(op in ("SF", "RF", "SB", "RB") for rank in self.lists for _, op, *_ in rank)
        self.at = [0] * len(self.lists)
        self.done = set()  # (op, stage, micro, slice); B counts as I and W too
        self.forwards = []  # (stage, micro-batch) in order
        self.inputs = [[] for _ in range(self.stages)]  # order in which input gradients were made
        self.sums = [[] for _ in range(self.stages)]  # order in which weight gradients were added
        self.wires, self.posts = {}, {}  # (from, to) -> deque of tags; announced receives
        self.arrived = set()
        self.buffers = {}  # (kind, stage, slot) -> micro-batch

    def own(self, kind, stage, micro, slot, opens):
        key = (kind, stage, slot)
        if opens and self.buffers.get(key) is None:
            self.buffers[key] = micro
        need(
            self.buffers.get(key) == micro,
            f"{kind} slot {slot} of stage {stage} holds {self.buffers.get(key)}, not {micro}",
        )

    def free(self, kind, stage, micro):
        for key, owner in self.buffers.items():
            if key[:2] == (kind, stage) and owner == micro:
                self.buffers[key] = None

    def neighbour(self, stage, other):
        """Is `other`, one more or less, a stage of the same copy of the model?"""
        each = self.stages // self.copies
        return 0 <= other < self.stages and stage // each == other // each

    def through(self, stage):
        """The micro-batches of its copy."""
        each = len(self.slices) // self.copies
        first = stage // (self.stages // self.copies) * each
        return range(first, first + each)

    def remote(self, a, b):
        return self.neighbour(a, b) and self.home[a] != self.home[b]

    def input_ready(self, stage, op, q, m):
        forward = op == "F"
        source = stage - 1 if forward else stage + 1
        if not self.neighbour(stage, source):
            return True
        if self.lowered and self.remote(stage, source):
            return ("F" if forward else "B", stage, q, m) in self.arrived
        return ("F" if forward else "I", source, q, m) in self.done

    def run(self, rank, rendezvous):
        """One instruction of this rank; False if it must wait."""
        stage, op, q, m, peer = self.lists[rank][self.at[rank]]
        slot = self.slots[rank][self.at[rank]]
        need(self.home[stage] == rank, "stage of another rank")
        need(op in ("AR", "OPT") or q in self.through(stage), "micro-batch of another copy")
        need(m < self.slices[q], "no such slice")
        if op in ("F", "B", "I"):
            if not self.input_ready(stage, op, q, m):
                return False
        if op in ("SF", "SB") and rendezvous and not self.posts.get((rank, peer)):
            return False
        getattr(self, "do_" + ("B" if op == "I" else op))(rank, stage, q, m, peer, op)
        if self.lowered:
            self.hold(stage, op, q, slot)
        self.at[rank] += 1
        return True

    def hold(self, stage, op, q, slot):
        if op in ("RF", "F", "B", "I", "W", "SF"):
            self.own("activation", stage, q, slot & 0xFFFF, op in ("RF", "F"))
        if op in ("RB", "B", "I", "W", "SB"):
            self.own("gradient", stage, q, slot >> 16, op in ("RB", "B", "I"))
        if all(("W", stage, q, m) in self.done for m in range(self.slices[q])):
            self.free("activation", stage, q)
            if (
                stage == 0
                or not self.remote(stage, stage - 1)
                or all(("SB", stage, q, m) in self.done for m in range(self.slices[q]))
            ):
                self.free("gradient", stage, q)

    def once(self, *key):
        need(key not in self.done, f"{key} twice")
        self.done.add(key)

    def do_F(self, rank, stage, q, m, peer, op):
        need(m == 0 or ("F", stage, q, m - 1) in self.done, "keys of the slice before are missing")
        self.once("F", stage, q, m)
        self.forwards.append((stage, q))

    def do_B(self, rank, stage, q, m, peer, op):
        need(("F", stage, q, m) in self.done, "nothing was saved")
        need(
            m == self.slices[q] - 1 or ("I", stage, q, m + 1) in self.done, "gradients of the slice behind are missing"
        )
        self.once("I", stage, q, m)
        self.inputs[stage].append(q)
        if op == "B":
            self.do_W(rank, stage, q, m, peer, op)

    def do_W(self, rank, stage, q, m, peer, op):
        need(("I", stage, q, m) in self.done, "no gradient yet")
        self.once("W", stage, q, m)
        self.sums[stage].append((q, -m))

    def do_SF(self, rank, stage, q, m, peer, op):
        other = stage + 1 if op == "SF" else stage - 1
        need(self.remote(stage, other) and self.home[other] == peer, "no such neighbour")
        need(("F" if op == "SF" else "I", stage, q, m) in self.done, "nothing to send")
        self.once(op, stage, q, m)
        self.wires.setdefault((rank, peer), deque()).append(("F" if op == "SF" else "B", other, q, m))
        self.deliver(rank, peer)

    do_SB = do_SF

    def do_RF(self, rank, stage, q, m, peer, op):
        need(peer is not None and peer < len(self.lists) and peer != rank, "no such peer")
        self.once(op, stage, q, m)
        self.posts.setdefault((peer, rank), deque()).append((op[1], stage, q, m))
        self.deliver(peer, rank)

    do_RB = do_RF

    def deliver(self, a, b):
        wire, post = self.wires.get((a, b), deque()), self.posts.get((a, b), deque())
        while wire and post:
            sent, wanted = wire.popleft(), post.popleft()
            need(sent == wanted, f"{sent} came where {wanted} was wanted")
            self.arrived.add(sent)

    def do_AR(self, rank, stage, q, m, peer, op):
        self.end("AR", stage)
        each = self.stages // self.copies
        need(stage % each in (0, each - 1), "no end of a model")
        other = stage // each * each + each - 1 - stage % each
        need(self.home[stage] != self.home[other] and peer == self.home[other], "no such tie")

    def do_OPT(self, rank, stage, q, m, peer, op):
        self.end("OPT", stage)

    def end(self, op, stage):
        need(
            all(("W", stage, q, m) in self.done for q in self.through(stage) for m in range(self.slices[q])),
            "gradients are missing",
        )
        self.once(op, stage, 0, 0)

    def finish(self, rendezvous):
        """To the end of every list, or Stuck; then everything must have been done. Are the sums in their one order?"""
        moved = True
        while moved:
            moved = False
            for rank, code in enumerate(self.lists):
                while self.at[rank] < len(code) and self.run(rank, rendezvous):
                    moved = True
        if any(self.at[r] < len(code) for r, code in enumerate(self.lists)):
            raise Stuck(self.at)
        for stage in range(self.stages):
            for q in self.through(stage):
                for m in range(self.slices[q]):
                    need(
                        {("F", stage, q, m), ("I", stage, q, m), ("W", stage, q, m)} <= self.done,
                        "not everything was done",
                    )
            ends = [("OPT", v, 0, 0) in self.done for v in range(self.stages)]
            need(all(ends) or not any(ends), "some stages are updated, some not")
        heads = [v for v in range(self.stages) if not self.neighbour(v, v + 1)]
        chains = [*self.sums, *self.inputs, *([q for stage, q in self.forwards if stage == head] for head in heads)]
        return all(chain == sorted(chain) for chain in chains)


def execute(program):
    """Both kinds of sends; raises Stuck or Wrong. Are sums in their one order (micro-batches ascending)?"""
    return [Machine(program).finish(rendezvous) for rendezvous in (False, True)][0]


def makespan(program, seconds, lag, back=None):
    """seconds(op, stage, micro, slice), lag(stage, micro, slice), and of gradients that take another link back(...): by repeated
    relaxation of every op's end."""
    ops = ("F", "B", "I", "W", "R", "R+", "SO", "SI")
    lists = [[w for w in rank if w[1] in ops] for rank in read(str(program))]
    two = "&&" in str(program)
    places = [[int(row["slot"]) % 2 * two for row, w in zip(program.instructions(r), rank, strict=True) if w[1] in ops]
              for r, rank in enumerate(read(str(program)))]
    home, machine = program.rank_of, Machine(program)
    beside = "SO" in program.counts and "&" in str(program)  # copies by each rank's copier, one after another
    end, changed = {}, True
    while changed:
        changed = False
        for rank, code in enumerate(lists):
            clock, copier, out, home_again = 0.0, 0.0, {}, {}
            for (stage, op, q, m, _), place in zip(code, places[rank], strict=True):
                if beside and op in ("SO", "SI"):
                    copier = max(copier, clock) + seconds(op, stage, q, m)
                    (out if op == "SO" else home_again)[(stage, place) if op == "SO" else (stage, q, m)] = copier
                    continue
                forward, backward, returns = op == "F", op in ("B", "I"), op in ("B", "I", "R+")
                source = stage - 1 if forward else stage + 1
                start = clock
                if (forward or returns) and machine.neighbour(stage, source):
                    far = home[source] != rank
                    link = lag if forward or back is None else back
                    start = max(clock, end.get((forward, source, q, m), 0.0) + (link(source, q, m) if far else 0.0))
                    if far and op != "R+":
                        start += seconds("RF" if forward else "RB", stage, q, m)
                copied = out.get((stage, place), 0.0) if forward else home_again.get((stage, q, m), 0.0) if returns else 0.0
                start = max(start, copied)
                clock = start + seconds(op[0] if op == "R+" else op, stage, q, m)
                target = stage + 1 if forward else stage - 1
                if (forward or backward) and machine.remote(stage, target):
                    clock += seconds("SF" if forward else "SB", stage, q, m)
                if (forward or backward) and end.get((forward, stage, q, m)) != clock:
                    end[forward, stage, q, m] = clock
                    changed = True
            end["rank", rank] = clock
    return max(end["rank", rank] for rank in range(len(lists)))
