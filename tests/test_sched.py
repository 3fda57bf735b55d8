"""Programs: builders, text, CSV, passes, and the checker against an executor that shares no code with it."""

import copy
import hashlib
import itertools
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from mutations import checked, mutate
from sched_oracle import Stuck, Wrong, execute

from terapipe_c import _core, schedule, schedules
from terapipe_c.schedules import Program

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [(1, 1, 1), (2, 3, 2), (3, 2, [3, 1]), (4, 4, 1), (3, 5, [1, 4, 2, 3, 1]), (5, 3, 2)]


def everything():
    for ranks, micros, slices in SHAPES:
        yield schedules.gpipe(ranks, micros, slices)
        yield schedules.one_f_one_b(ranks, micros, slices)
        yield schedules.seq1f1b(ranks, micros, slices)
    yield schedules.interleaved(2, 4, 2)
    yield schedules.interleaved(3, 3, 2, [2, 1, 3])
    yield schedules.interleaved(2, 6, 3, 2)
    yield schedules.interleaved(4, 8, 2)
    yield schedules.looped_bfs(3, 1, 2, 4)
    yield schedules.looped_bfs(2, 3, 3, [2, 1, 3])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_closed_forms_of_gpipe_and_1f1b(ranks):
    for micros in (1, 2, ranks, 2 * ranks + 1, 27):
        for build in (schedules.gpipe, schedules.one_f_one_b):
            program = build(ranks, micros)
            program.check()
            line = program.simulate({"F": 1.0, "B": 2.0}, activation_bytes=1)
            assert line.makespan_s == 3.0 * (micros + ranks - 1)
            assert line.idle_s == 3.0 * ranks * (ranks - 1)
            held = [micros if build is schedules.gpipe else min(micros, ranks - r) for r in range(ranks)]
            assert line.peak_memory_bytes.tolist() == held


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_closed_forms_of_token_slices(ranks):
    for micros, slices in ((1, 4), (2, 3), (5, 2), (2 * ranks, 4)):
        for f, b in ((1.0, 2.0), (3.0, 1.0)):
            program = schedules.seq1f1b(ranks, micros, slices)
            program.check()
            line = program.simulate({"F": f, "B": b}, activation_bytes=1)
            assert line.makespan_s == (micros * slices + ranks - 1) * (f + b)
            assert line.peak_memory_bytes.tolist() == [
                min(micros * slices, ranks - r - 1 + slices) for r in range(ranks)
            ]
            line = schedules.gpipe(ranks, micros, slices).simulate({"F": f, "B": b})
            assert line.makespan_s == (micros * slices + ranks - 1) * (f + b)


def test_closed_form_of_interleaved():
    for ranks in (1, 2, 3, 4):
        for chunks in (1, 2, 3):
            for micros in (ranks, 2 * ranks, 4 * ranks):
                program = schedules.interleaved(ranks, micros, chunks)
                program.check()
                line = program.simulate({"F": 1.0, "B": 2.0}, activation_bytes=1)
                assert line.makespan_s == 3.0 * (micros * chunks + ranks - 1)
                total = micros * chunks
                held = [
                    total if micros == ranks else min(total, 2 * (ranks - r - 1) + (chunks - 1) * ranks + 1)
                    for r in range(ranks)
                ]
                assert line.peak_memory_bytes.tolist() == held


def test_closed_form_of_looped_bfs():
    """Also with fewer slices than ranks, which then wait between their stages; of one chunk it is GPipe."""
    for ranks, chunks, (micros, slices) in itertools.product((1, 2, 3, 4), (1, 2, 3), ((1, 1), (1, 4), (1, 9), (3, 2), (8, 1))):
        program, n = schedules.looped_bfs(ranks, micros, chunks, slices), micros * slices
        program.check(canonical=True)
        assert program.rank_of == tuple(range(ranks)) * chunks
        line = program.simulate({"F": 1.0, "B": 2.0}, activation_bytes=1)
        assert line.makespan_s == 3.0 * ((chunks - 1) * max(n, ranks) + n + ranks - 1)
        assert line.peak_memory_bytes.tolist() == [n * chunks] * ranks
        assert chunks > 1 or program == schedules.gpipe(ranks, micros, slices)


def test_terapipe_formula_with_unequal_slices():
    rng = np.random.default_rng(4)
    for ranks in (1, 2, 5, 8):
        f, b = rng.integers(1, 50, 7).astype(float), rng.integers(1, 50, 7).astype(float)
        line = schedules.gpipe(ranks, 1, 7).simulate({"F": np.tile(f, (ranks, 1)), "B": np.tile(b, (ranks, 1))})
        assert line.makespan_s == f.sum() + b.sum() + (ranks - 1) * (f.max() + b.max())


@pytest.mark.parametrize("program", list(everything()), ids=repr)
def test_every_program_is_proved_and_executes(program):
    for one in (
        program,
        program.lower(),
        program.lower(tied=True),
        program.split(pending=0),
        program.split(pending=2).lower(),
    ):
        assert one.check() is None and one.check(canonical=True) is None
        assert execute(one)
        assert Program.parse(str(one)) == one
        assert Program.from_instructions([one.instructions(r) for r in range(one.num_ranks)], keep_slots=True) == one
        assert pickle.loads(pickle.dumps(one)) == one == copy.copy(one)
        assert hash(Program.parse(str(one))) == hash(one)
    assert program.lower(tied=True).strip() == program


def test_slots_are_as_many_as_micro_batches_in_flight():
    for ranks, micros in ((3, 7), (5, 5), (4, 2)):
        lowered = schedules.one_f_one_b(ranks, micros).lower()
        assert [lowered.activation_slots(v) for v in range(ranks)] == [min(micros, ranks - v) for v in range(ranks)]
        lowered = schedules.gpipe(ranks, micros, 3).lower()
        assert [lowered.activation_slots(v) for v in range(ranks)] == [micros] * ranks
        assert all(lowered.gradient_slots(v) <= 2 for v in range(ranks))
    assert schedules.gpipe(2, 3).activation_slots(0) == 0


@pytest.mark.parametrize("build", [schedules.gpipe, schedules.one_f_one_b, schedules.seq1f1b])
def test_slices_take_no_more_slots_than_their_order_needs(build):
    """A stuck rank's next micro-batch would be announced, and take a slot, before the gradient that frees one."""
    for ranks, micros, slices in itertools.product((2, 3, 4, 7), (1, 2, 3, 5, 8), (1, 2, 3, 5)):
        lowered = build(ranks, micros, slices).lower()
        for v in range(ranks):
            code = lowered.strip().instructions(v)
            spans = [np.flatnonzero(code["micro"] == micro) for micro in range(micros)]
            least = max(sum(span[0] <= i <= span[-1] for span in spans) for i in range(len(code)))
            assert lowered.activation_slots(v) == least, (ranks, micros, slices, v)


@pytest.mark.parametrize(("ranks", "micros", "slices", "digest"),
                         [(130, 140, 2, "7ce144a9f8e05c9d"), (4200, 8, 3, "57a47c862be6f8e4")])
def test_of_ranks_that_are_all_stuck_the_first_is_helped_however_many_there_are(ranks, micros, slices, digest):
    """Bits of programs that were made while all ranks were looked at for it: it is found by bits of 64 ranks, and of 64 x 64."""
    program = schedules.one_f_one_b(ranks, micros, slices).lower()
    rows = b"".join(program.instructions(rank).tobytes() for rank in range(ranks))
    assert hashlib.sha256(rows).hexdigest()[:16] == digest


def test_lowered_programs_end_with_one_update_a_stage_and_one_tie():
    lowered = schedules.interleaved(3, 3, 2).lower(tied=True)
    assert lowered.counts["OPT"] == 6 and lowered.counts["AR"] == 2
    assert "AR" not in schedules.gpipe(1, 2).lower(tied=True).counts
    assert "AR" not in schedules.gpipe(3, 2).lower().counts


def test_golden_programs():
    made = {
        "gpipe_3x2x2": schedules.gpipe(3, 2, 2),
        "1f1b_3x4": schedules.one_f_one_b(3, 4),
        "seq1f1b_3x2_ragged": schedules.seq1f1b(3, 2, [3, 2]),
        "interleaved_2x4x2": schedules.interleaved(2, 4, 2),
        "1f1b_3x4_lowered": schedules.one_f_one_b(3, 4).lower(tied=True),
        "seq1f1b_2x2x2_split": schedules.seq1f1b(2, 2, 2).split(pending=1),
    }
    for name, program in made.items():
        assert str(program) == (GOLDEN / f"{name}.txt").read_text(), name
        assert Program.parse((GOLDEN / f"{name}.txt").read_text()) == program


# ---- the checker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_what_check_accepts_executes(seed):
    """Thousands of mutations: check refuses with rank and position, or an independent executor runs the program."""
    rng = random.Random(seed)
    bases = [
        schedules.gpipe(2, 2, 2),
        schedules.seq1f1b(3, 2, [2, 3]),
        schedules.one_f_one_b(3, 3),
        schedules.interleaved(2, 2, 2),
        schedules.looped_bfs(2, 2, 2, [1, 2]),
        schedules.seq1f1b(2, 2, 2).split(pending=1),
    ]
    bases += [base.lower(tied=bool(i % 2)) for i, base in enumerate(bases)]
    refused = accepted = 0
    for program, error in checked(rng, bases, 900, mutate, keep_slots=lambda: rng.random() < 0.5):
        if error is not None:
            refused += 1
        else:
            accepted += 1
            try:
                canonical = execute(program)
            except (Stuck, Wrong) as error:
                pytest.fail(f"check accepts what does not run ({error!r}):\n{program}")
            if canonical:
                program.check(canonical=True)
            else:
                with pytest.raises(_core.ScheduleError, match="micro-batches ascending") as caught:
                    program.check(canonical=True)
                assert "<-- here" in str(caught.value)
    assert refused > 300 and accepted > 5, (refused, accepted)


def test_rewritten_slots_are_refused():
    lowered = schedules.one_f_one_b(3, 4).lower()
    refused = 0
    for rank in range(3):
        for i in range(len(lowered.instructions(rank))):
            lists = [lowered.instructions(r).copy() for r in range(3)]
            if schedules.OPS[lists[rank]["op"][i]] not in ("F", "B"):
                continue
            lists[rank]["slot"][i] ^= 1
            program = Program.from_instructions(lists, keep_slots=True)
            with pytest.raises(_core.ScheduleError, match="slot") as caught:
                program.check()
            assert caught.value.rank == rank
            refused += 1
    assert refused == 24


def test_a_slot_beyond_the_last_is_refused():
    lowered = schedules.one_f_one_b(3, 4).lower()
    for rank in range(3):
        for op, slot, kind in (("F", 4, "activation"), ("B", 4 << 16, "gradient")):
            lists = [lowered.instructions(r).copy() for r in range(3)]
            first = [schedules.OPS[row["op"]] for row in lists[rank]].index(op)
            lists[rank]["slot"][first] = slot
            with pytest.raises(_core.ScheduleError, match=f"{kind} slot 4: below the number of micro-batches, 4"):
                Program.from_instructions(lists, keep_slots=True).check()


def test_a_wrong_field_is_refused_by_rank_and_position():
    """Also where nothing would read it: what check accepts is what its text says."""
    lists = [rank.copy() for rank in (schedules.seq1f1b(2, 3, 2).lower().instructions(r) for r in range(2))]
    none = len(schedules.OPS)
    for field, value, word in (("op", none, f"no operation {none}"), ("op", 65535, "no operation"),
                               ("peer", 1, "talks to no other")):
        wrong = [rank.copy() for rank in lists]
        wrong[1][field][1] = value
        with pytest.raises(_core.ScheduleError, match=word) as refused:
            Program.from_instructions(wrong).check()
        assert (refused.value.rank, refused.value.position) == (1, 1)
    unlowered = schedules.gpipe(2, 2).instructions(0).copy()
    unlowered["slot"] = 7
    clean = Program.from_instructions([unlowered, schedules.gpipe(2, 2).instructions(1)])
    assert clean == schedules.gpipe(2, 2) == Program.parse(str(clean))


def test_messages_name_the_rule():
    for text, words in (
        ("0F0.1 0F0.0 0B0.1 0B0.0", "ascend"),
        ("0F0.0 0F0.1 0B0.0 0B0.1", "0.1 comes first"),
        ("0B0.0 0F0.0", "forward must come before"),
        ("0F0.0 0B0.0 0B0.0", "twice"),
        ("0F0.0 0I0.0", "weight gradients"),
        ("0F0.0 0W0.0 0I0.0", "I must come before"),
        ("0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1B0.0", "1F1.0 is missing"),
        ("0F0.0 1F0.0 0B0.0\n1F0.0 1B0.0", "lives on rank 1"),
        ("1F0.0 0F0.0 0B0.0 1B0.0", "deadlock"),
        ("0F0.0 0SF0.0@1 0RB0.0@1 0B0.0 0OPT0.0\n1F0.0 1RF0.0@0 1B0.0 1SB0.0@0 1OPT0.0", "RF from rank 0"),
        (
            "0F0.0 0F1.0 0SF0.0@1 0SF1.0@1 0RB0.0@1 0B0.0 0RB1.0@1 0B1.0\n"
            "1RF1.0@0 1RF0.0@0 1F0.0 1B0.0 1SB0.0@0 1F1.0 1B1.0 1SB1.0@0",
            "keep their order",
        ),
        ("0F0.0 0B0.0 0OPT0.0\n1F0.0 1B0.0 1OPT0.0", "no sends"),
        ("65535F65535.65535", "missing"),
    ):
        with pytest.raises(_core.ScheduleError, match=words) as caught:
            Program.parse(text).check()
        assert caught.value.rank is not None and caught.value.position is not None


def test_what_ends_a_step_and_what_overlaps_has_its_order():
    for text, words in (
        ("0F0.0 0SF0.0@1 0RB0.0@1 0B0.0 0OPT0.0 0AR0.0@1\n1RF0.0@0 1F0.0 1B0.0 1SB0.0@0 1AR0.0@0 1OPT0.0", "before every OPT"),
        ("0F0.0 0F1.0& 0B0.0& 0F2.0 0B1.0 0B2.0", "two ops overlap, not three"),
    ):
        with pytest.raises(_core.ScheduleError, match=words) as caught:
            Program.parse(text).check()
        assert caught.value.rank == 0


def test_a_deadlock_of_rendezvous_sends_alone_is_found():
    """Classic: both ranks send before either announces its receive; with buffers it would run."""
    text = (
        "0F0.0 0SF0.0@1 0F1.0 0SF1.0@1 0RB0.0@1 0B0.0 0RB1.0@1 0B1.0\n"
        "1RF0.0@0 1F0.0 1B0.0 1SB0.0@0 1RF1.0@0 1F1.0 1B1.0 1SB1.0@0\n"
    )
    with pytest.raises(_core.ScheduleError, match="deadlock with rendezvous"):
        Program.parse(text).check()


# ---- text and CSV ---------------------------------------------------------------------------------------------------------


def test_torch_csv():
    program = schedules.one_f_one_b(2, 2)
    assert program.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert Program.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n") == program
    assert (
        Program.from_csv("0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n") == program
    )  # idle cells, as torch writes them
    split = program.split(pending=1)
    assert Program.from_csv(split.to_csv()) == split
    assert split.lower().to_csv() == split.to_csv()
    with pytest.raises(_core.ScheduleError, match="token slices"):
        schedules.gpipe(2, 2, 2).to_csv()
    with pytest.raises(_core.ScheduleError, match="no word for R"):
        Program.parse("0F0.0 0R0.0 0B0.0").to_csv()
    for text, word in (
        ("0F0,0SEND_F", "0SEND_F"),
        ("0F0,0UNSHARD", "0UNSHARD"),
        ("0F0,(0F1,0B0)OVERLAP_F_B", "OVERLAP"),
    ):
        with pytest.raises(ValueError, match=word):
            Program.from_csv(text)


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n \r\n"])
def test_empty_lines_at_the_end_are_no_ranks(end):
    """print(program, file=f) leaves one there: it was a rank with nothing to do, for all of the step."""
    program = schedules.one_f_one_b(2, 2)
    assert Program.parse(str(program) + end) == program and Program.from_csv(program.to_csv() + end) == program
    lists = [program.instructions(r) for r in range(2)]
    for idle in (lists[:1] + [lists[1][:0]] + lists[1:], lists + [lists[0][:0]] * 2):      # ranks that somebody made
        made = Program.from_instructions(idle)
        assert Program.parse(str(made)) == made and Program.parse(str(made) + end) == made
        assert Program.from_csv(made.to_csv()).num_ranks == made.num_ranks == len(idle)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "F0.0",
        "0Q0.0",
        "0F",
        "0F0",
        "0F0.",
        "0F0.0@1",
        "0SF0.0",
        "0SF0.0@",
        "70000F0.0",
        "0F0.99999",
        "0F0.0x",
        "0F0.0 what",
        "-1F0.0",
        "0SF0.0@40000",
    ],
)
def test_bad_text_is_refused(text):
    with pytest.raises(ValueError):
        Program.parse(text)


def test_text_is_read_kindly():
    assert Program.parse("0F0.0,0B0.0") == Program.parse("  0F0.0\t0B0.0 \r\n") == schedules.gpipe(1, 1)
    with pytest.raises(TypeError):
        Program.parse(b"0F0.0")


@pytest.mark.parametrize(
    "request_",
    [
        lambda: schedules.gpipe(0, 1),
        lambda: schedules.gpipe(2, 0),
        lambda: schedules.gpipe(2, 2, 0),
        lambda: schedules.gpipe(2, 2, [1]),
        lambda: schedules.gpipe(2, 2, [1, 0]),
        lambda: schedules.interleaved(2, 3, 2),
        lambda: schedules.interleaved(2, 2, 0),
        lambda: schedules.interleaved(2, 2, 40000),
        lambda: schedules.looped_bfs(2, 2, 0),
        lambda: schedules.looped_bfs(2, 2, 40000),
        lambda: schedules.looped_bfs(2, 0, 2),
        lambda: schedules.seq1f1b(40000, 1, 1),
        lambda: schedules.gpipe(32767, 65536, 65536),
    ],
)
def test_bad_requests_are_refused(request_):
    with pytest.raises(_core.Error):
        request_()


def test_a_program_is_a_value():
    a, b = schedules.gpipe(2, 2), schedules.one_f_one_b(2, 2)
    assert a == schedules.gpipe(2, 2) and a != b and a != 3 and len({a, b, schedules.gpipe(2, 2)}) == 2
    code = a.instructions(1)
    assert code.dtype == schedule.INSTRUCTION and len(code) == 4 and not code.flags.writeable
    assert [schedules.OPS[op] for op in code["op"]] == ["F", "F", "B", "B"] and len(a) == 8
    assert (a.num_ranks, a.num_stages, a.num_micro_batches, a.slices, a.rank_of) == (2, 2, 2, (1, 1), (0, 1))
    with pytest.raises(IndexError):
        a.instructions(2)
    with pytest.raises(TypeError):
        Program()


# ---- split ----------------------------------------------------------------------------------------------------------------


def test_split_fills_the_bubbles():
    """Equal f = b = w: never slower than unsplit, never below the bound, and the bubble of ZB-H1 or less."""
    for ranks, micros in ((2, 4), (4, 8), (4, 4), (6, 12)):
        whole = schedules.one_f_one_b(ranks, micros)
        before = whole.simulate({"F": 1.0, "B": 2.0}).makespan_s
        for pending in (1, 2, ranks):
            split = whole.split({"F": 1.0, "I": 1.0, "W": 1.0}, pending=pending)
            split.check()
            line = split.simulate({"F": 1.0, "I": 1.0, "W": 1.0})
            assert line.lower_bound_s <= line.makespan_s <= before
        assert line.makespan_s <= 3 * micros + (ranks - 1)


def test_split_leaves_a_looped_pipeline_the_waits_of_one_chunk():
    """f = i = w, one sequence in as many slices as ranks or more: a rank waits while one forward and one I of a chunk come and
    go, however many chunks there are."""
    cost = {"F": 1.0, "I": 1.0, "W": 1.0}
    for ranks, chunks, more in itertools.product((2, 4, 6), (1, 2, 3), (0, 4)):
        slices = ranks + more
        split = schedules.looped_bfs(ranks, 1, chunks, slices).split(cost, pending=1)
        split.check(canonical=True)
        assert split.makespan(cost) == 3 * slices * chunks + 2 * (ranks - 1)


def test_split_knows_how_long_a_rank_will_wait():
    """Also before what it waits for has begun: rank 0 waits 4 s for 1I1.0, which takes 1, and has a W of 4; rank 1 waits 1 s for
    2I1.0, which is too little for its W of 3."""
    cost = {"F": [2.0, 4.0, 3.0], "I": [2.0, 1.0, 3.0], "W": [4.0, 3.0, 1.0]}
    split = schedules.one_f_one_b(3, 3).split(cost, pending=3)
    assert str(split).splitlines()[:2] == [
        "0F0.0 0F1.0 0F2.0 0I0.0 0W0.0 0I1.0 0W1.0 0I2.0 0W2.0",
        "1F0.0 1F1.0 1I0.0 1F2.0 1I1.0 1W0.0 1I2.0 1W1.0 1W2.0",
    ]
    assert split.makespan(cost) == 31.0


def test_split_keeps_its_word_on_pending():
    rng = np.random.default_rng(8)
    for program in (
        schedules.one_f_one_b(4, 6, 2),
        schedules.interleaved(2, 4, 2),
        schedules.looped_bfs(2, 2, 3, [1, 3]),
        schedules.gpipe(3, 4, [1, 3, 2, 2]),
    ):
        shape = (program.num_stages, sum(program.slices))
        cost = {op: rng.uniform(0.5, 2.0, shape) for op in ("F", "I", "W")}
        for pending in (0, 1, 2, 3):
            split = program.split(cost, pending=pending)
            for rank in range(split.num_ranks):
                begun, left = {}, {}
                for instr in split.instructions(rank):
                    op, key = schedules.OPS[instr["op"]], (int(instr["stage"]), int(instr["micro"]))
                    if op == "I":
                        begun[key] = True
                        left[key] = left.get(key, program.slices[key[1]])
                    if op == "W":
                        left[key] -= 1
                        if left[key] == 0:
                            del left[key]
                    for stage in {stage for stage, _ in left}:
                        assert sum(s == stage for s, _ in left) <= max(1, pending)
            others = [[w for w in line.split() if "W" not in w] for line in str(split).splitlines()]
            assert others == [[w.replace("B", "I") for w in line.split()] for line in str(program).splitlines()]


def test_split_refuses():
    split = schedules.gpipe(2, 2).split()
    with pytest.raises(_core.ScheduleError, match="split already"):
        split.split()
    with pytest.raises(ValueError, match="I and W"):
        schedules.gpipe(2, 2).split({"F": 1.0, "B": 1.0})
    with pytest.raises(ValueError, match="pending"):
        schedules.gpipe(2, 2).split(pending=-1)
