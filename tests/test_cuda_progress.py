"""No rank waits for ever for a message of NCCL's. Emulated streams do everything at once and cannot show it, so programs are run by
the rules of cuda/nccl.h alone (csrc/sched/stuck.c): what waits for what on the devices, with slots at each end of a channel."""
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import slots_oracle

import terapipe_c as tp
from terapipe_c import _core, schedules
from terapipe_c.slots import LEAST, MOST, needed, stuck


def programs(name, slice_counts=(1, 2, 3), ranks_of=(2, 3, 4, 5, 6, 8), micro_batches=(1, 2, 3, 4, 6, 8, 12, 17)):
    """Of so many ranks and micro-batches, whole, split and with what waits; of sliced_1f1b so many forwards in halves."""
    for ranks, micros, slices in itertools.product(ranks_of, micro_batches, slice_counts):
        chunks = {"interleaved": (2,), "looped_bfs": (2,), "hanayo": (1,)}.get(name, ())
        try:
            program = getattr(schedules, name)(ranks, micros, *chunks, slices)
        except ValueError:                     # chimera's numbers are even, interleaved's divide
            continue
        placed = name.startswith(("zb", "dualpipe"))
        for one in (program,) if placed else (program, program.split(pending=0), program.split(pending=2)):
            yield one.lower(name != "pipedream")


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "seq1f1b", "sliced_1f1b", "zb_h1", "bpipe", "chimera", "pipedream"])
def test_no_rank_of_few_slices_waits_for_ever(name):
    seen = 0
    for program in programs(name):
        assert stuck(program) == "", str(program)
        seen += 1
    assert seen >= 60


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "seq1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "bpipe", "chimera",
                                  "hanayo", "interleaved", "looped_bfs", "pipedream"])
def test_no_rank_waits_for_ever_with_the_slots_that_are_said_to_be_needed(name):
    """Of several slices with two slots they would in many schedules, whose ranks send all slices of one micro-batch before they
    read any of another's, or of another stage's on the same channel."""
    seen = more = 0
    for program in programs(name, (1, 5, 12), (2, 4), (1, 2, 4, 8, 12)):
        slots = needed(program)
        assert LEAST <= slots <= MOST and stuck(program, slots) == ""
        assert slots == LEAST or stuck(program, LEAST) != ""
        seen, more = seen + 1, more + (slots > LEAST)
    assert seen >= 15 and (more > 0) == (name not in ("gpipe", "seq1f1b"))


@pytest.mark.parametrize("name", ["sliced_1f1b", "zb_v", "bpipe", "chimera", "hanayo", "interleaved", "looped_bfs", "pipedream"])
def test_ranks_end_where_the_same_rules_in_python_end_them(name):
    """Of one slot and up, of orders that no builder made, of guests that would have slots."""
    rng, verdicts = np.random.default_rng(7), {True: 0, False: 0}         # of sliced_1f1b, one slice each, none waits
    for program in programs(name, (1, 3), (2, 4), (2, 5, 8)):
        orders = [program]
        if name not in ("sliced_1f1b", "bpipe", "pipedream"):
            orders.append(program.reorder(dict(zip("FBIW", rng.random(4), strict=True))))
        for one, slots, direct in itertools.product(orders, (1, 2, 3), (True, False)):
            where = stuck(one, slots, direct)
            assert where == slots_oracle.stuck(one, slots, direct)
            verdicts[where == ""] += 1
    assert verdicts[True] >= 3 and (verdicts[False] >= 3) == (name != "sliced_1f1b"), verdicts


def test_what_is_no_lowered_program_is_refused():
    program = schedules.gpipe(2, 2).lower(True)
    with pytest.raises(ValueError, match="0 slots: at least 1"):
        stuck(program, 0)
    odd = tp.Program.parse("0F0.0 0SF0.0@1 0OPT0.0\n1F0.0 1OPT0.0\n")
    with pytest.raises(tp.ScheduleError, match="1 messages are sent and 0 received"):
        stuck(odd)
    lists = [rows.copy() for rows in map(schedules.bpipe(4, 8).lower(True).instructions, range(4))]
    evicted = np.concatenate([rows[rows["op"] == _core.OPS.index("SE")] for rows in lists])[-1]
    gone = [rows[~(np.isin(rows["op"], [_core.OPS.index("SE"), _core.OPS.index("RE")]) & (rows["stage"] == evicted["stage"]) &
                   (rows["micro"] == evicted["micro"]))] for rows in lists]
    with pytest.raises(tp.ScheduleError, match="SL. sends what was not received"):      # the message before the first was read
        stuck(tp.Program.from_instructions(gone, keep_slots=True))


def test_of_more_messages_than_there_is_room_for_a_run_is_refused():
    assert stuck(schedules.looped_bfs(2, 1, 2, 12).lower()).startswith("rank 0 at ")
    with pytest.raises(tp.InvalidValueError, match="64 messages between two ranks.*TERAPIPE_COMM=host"):
        needed(schedules.interleaved(2, 2, 2, 200).lower())


def test_slots_are_those_of_the_header():
    header = Path(__file__).parents[1] / "cuda" / "nccl.h"
    if not header.is_file():
        pytest.skip("no CUDA sources beside the tests")
    said = dict(re.findall(r"#define (TP_NCCL_\w*SLOTS) (\d+)", header.read_text()))
    assert said == {"TP_NCCL_SLOTS": str(LEAST), "TP_NCCL_MOST_SLOTS": str(MOST)}


def test_guests_through_slots_would():
    """Why they have none: a third would wait until the first is read, which waits for it."""
    verdicts = set()
    for program in programs("bpipe"):
        if "SE" in program.counts:
            verdicts.add(stuck(program, direct=False) == "")
        if len(verdicts) == 2:
            break
    assert verdicts == {True, False}


def test_following_slots_takes_work_by_the_instruction_and_can_be_stopped():
    """Ranks and channels were all tried in turn until none moved: of 8192 ranks one answer took 13 s and more, and nobody was asked
    whether to stop."""
    program = schedules.one_f_one_b(3000, 4).lower(True)
    work = 16 * sum(program.counts.values())       # as it counts: so many nanoseconds an instruction
    try:
        for last, ends in ((10**9, True), (3, False)):
            _core.deadline_count(1)
            _core.deadline_set(last)
            _core.deadline_abandon(True)
            if ends:
                assert stuck(program) == ""
                assert 3 <= _core.deadline_now() - 1 <= 3 * work / 2**18
            else:
                with pytest.raises(tp.DeadlineError, match="the time limit stopped what had begun"):
                    stuck(program)
    finally:
        _core.deadline_abandon(False)
        _core.deadline_set(0)
        _core.deadline_count(0)
    assert stuck(program) == ""
