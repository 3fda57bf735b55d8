"""Schedules between this package and torch.distributed.pipelining: CSV files that torch 2.13 made, and torch itself where it
is installed."""

import pytest
import torch_schedules as made

import terapipe_c as tp
from terapipe_c import schedules
from terapipe_c.schedules import Program

COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
IDS = [f"{name}-{r}x{c}x{m}" for name, r, c, m in made.MADE]


def without_idle(text):
    return "".join(",".join(cell for cell in line.split(",") if cell.strip()) + "\n" for line in text.splitlines())


@pytest.mark.parametrize("one", made.MADE, ids=IDS)
def test_golden_files_round_trip(one):
    name, ranks, chunks, micros = one
    text = made.path_of(*one).read_text()
    program = Program.from_csv(text)
    assert (program.num_ranks, program.num_stages, program.num_micro_batches) == (ranks, ranks * chunks, micros)
    program.check()
    assert program.to_csv() == without_idle(text)
    assert Program.from_csv(program.to_csv()) == program == Program.parse(str(program))
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    assert program.rank_of == tuple(min(v % (2 * ranks), 2 * ranks - 1 - v) if v_shaped else v % ranks
                                    for v in range(ranks * chunks))  # fmt: skip
    line = program.simulate(COST)
    assert line.lower_bound_s <= line.makespan_s and len(line.intervals) == len(program)
    lowered = program.lower(tied=True)
    lowered.check()
    assert lowered.to_csv() == program.to_csv()
    assert lowered.simulate(COST).makespan_s == line.makespan_s
    if name == "LoopedBFS":  # backwards from the last micro-batch to the first: our engine sums in one order
        with pytest.raises(tp.ScheduleError, match="micro-batches ascending"):
            program.check(canonical=True)
    else:
        program.check(canonical=True)


def test_torch_and_we_mean_the_same_schedules():
    assert Program.from_csv(made.path_of("GPipe", 3, 1, 4).read_text()) == schedules.gpipe(3, 4)
    for ranks, micros in ((2, 4), (4, 10)):
        assert Program.from_csv(made.path_of("DualPipeV", ranks, 2, micros).read_text()) == schedules.dualpipe_v(ranks, micros)
    line = Program.from_csv(made.path_of("ZBVZeroBubble", 4, 2, 8).read_text()).simulate(COST)
    assert line.makespan_s == schedules.zb_v(4, 8).simulate(COST).makespan_s == 6.0 * 8 + 4 - 1
    line = Program.from_csv(made.path_of("Interleaved1F1B", 3, 1, 6).read_text()).simulate(COST)
    assert line.makespan_s == schedules.one_f_one_b(3, 6).simulate(COST).makespan_s
    line = Program.from_csv(made.path_of("Interleaved1F1B", 2, 2, 4).read_text()).simulate(COST)
    assert line.makespan_s == schedules.interleaved(2, 4, 2).simulate(COST).makespan_s == 3.0 * (4 * 2 + 2 - 1)


WRONG = [
    ("0F0,0B0\n1F0,1Q0\n", ValueError, "line 2, cell 2, '1Q0'"),
    ("0F0,,,0B0\n,1F0,1X\n", ValueError, "line 2, cell 3, '1X'"),
    ("0F0,0B0,0AR0\n", ValueError, "line 1, cell 3, '0AR0': only the actions F, B, I, W, SEND_F"),
    ("0F0,0SEND_F\n1F0,1B0\n", ValueError, "line 1, cell 2, '0SEND_F': a micro-batch"),
    ("0F0,0SEND_F0\n1F0,1B0\n", tp.ScheduleError, "line 2: rank 1, position 0, 1F0.0: its RF from rank 0 must come before it"),
    ("0F0,(0SEND_F0;0B0)OVERLAP_F_B\n", ValueError, "line 1, cell 2, .*only F, B and I are read in pairs"),
    ("0F0,0UNSHARD\n", ValueError, "line 1, cell 2, '0UNSHARD': its stage computed before it"),
    ("0UNSHARD,0UNSHARD,0F0\n", ValueError, "line 1, cell 2, '0UNSHARD': its stage has its weights by an UNSHARD already"),
    ("0F0,0B0,0RESHARD\n", ValueError, "line 1, cell 3, '0RESHARD': its stage has no weights to give back"),
    ("0UNSHARD,0F0,0RESHARD,0B0\n", ValueError, "line 1, cell 4, '0B0': its stage's weights are given back"),
    ("0F0,0REDUCE_GRAD,0B0\n", ValueError, "line 1, cell 3, '0B0': its stage's REDUCE_GRAD came before it"),
    ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", ValueError, "line 1, cell 4, '0REDUCE_GRAD': it is done twice"),
    ("0RESHARD3\n", ValueError, "line 1, cell 1, '0RESHARD3'"),
    ("0REDUCE_GRAD\n", ValueError, "the text has no instruction"),
    ("0F0,(0F1;0B0)OVERLAP_W\n", ValueError, "line 1, cell 2"),
    ("0F0,(0F1;0B0\n", ValueError, "line 1, cell 2"),
    ("0F0,(0B0)OVERLAP_F_B\n", ValueError, "line 1, cell 2"),
    ("0F0,(0F1;0F2)OVERLAP_F_B,0B0,0B1,0B2\n", tp.ScheduleError, "line 1: rank 0, position 2, 0F2.0: the op before overlaps"),
    ("1F0,0F0,1B0,0B0\n", tp.ScheduleError, "line 1: rank 0, position 0, 1F0.0: deadlock"),
    ("0F0,0F1,0B1,0B0\n1F1,1B0,1F0,1B1\n", tp.ScheduleError, "line 2: rank 1, position 1, 1B0.0: its forward"),
    ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1\n", tp.ScheduleError, "line [123]: rank .*: deadlock"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", tp.ScheduleError, "line 2: rank 1, position 3, end: stage 1 has 1 of its 2 backwards"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n", tp.ScheduleError, "line 2: rank 1, position 2, 1B1.0: its forward must come"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0\n", tp.ScheduleError, "line 2: .*1F1.0 is missing"),
    ("0F0,0F0,0B0\n", tp.ScheduleError, "line 1: .*done twice"),
    ("0F0,0I0\n", tp.ScheduleError, "line 1: .*weight gradients"),
]  # fmt: skip


@pytest.mark.parametrize("text, kind, why", WRONG)
def test_wrong_files_are_refused_by_line(text, kind, why):
    with pytest.raises(kind, match=why) as error:
        Program.from_csv(text)
    if kind is tp.ScheduleError:
        assert f"line {error.value.rank + 1}:" in str(error.value)


@pytest.mark.parametrize("one", made.TALKING, ids=[f"{name}-{r}x{c}x{m}" for name, r, c, m in made.TALKING])
def test_files_with_messages_are_their_compute_order(one):
    """compute_comms: what _PipelineScheduleRuntime dumps unless it is asked for compute_only."""
    text = made.comms_path_of(*one).read_text()
    assert "0SEND_F0" in text and "0UNSHARD" in text and "0REDUCE_GRAD" in text
    program = Program.from_csv(text)
    assert program == Program.from_csv(made.path_of(*one).read_text())
    assert set(program.counts) <= {"F", "B", "I", "W"} and program.lower().to_csv() == program.to_csv()


TALK = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
SLIPS = [
    ("0SEND_F1,", "", "line 1: rank 0, position 7, end: stage 0 has 3.0 of its 4 sends and receives"),
    ("1RECV_F1,", "", "line 2: rank 1, position 4, 1F1.0: its RF from rank 0 must come before it"),
    ("0RECV_B1,0B1", "0B1,0RECV_B1", "line 1: rank 0, position 6, 0B1.0: its RB from rank 1 must come before it"),
    ("0F0,0SEND_F0", "0SEND_F0,0F0", "line 1: rank 0, position 0, 0SF0.0@1: its F must come before it"),
    ("1B0,1SEND_B0", "1SEND_B0,1B0", "line 2: rank 1, position 3, 1SB0.0@0: its B or I must come before it"),
    ("1RECV_F0", "1RECV_F0,1RECV_F0", "line 2: rank 1, position 1, 1RF0.0@0: it is done twice"),
    ("0F0,", "0F0,0RECV_F0,", "line 1: rank 0, position 1, 0RF0.0@0: stage 0 has no neighbour on another rank"),
    ("1F1,", "1F1,1SEND_F1,", "line 2: rank 1, position 6, 1SF1.0@1: stage 1 has no neighbour on another rank"),
    ("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0", "line 2: rank 1, position 0, .*keep their order"),
    ("1RECV_F1,1B0,1SEND_B0", "1B0,1SEND_B0,1RECV_F1", "line 1: rank 0, position 3, 0SF1.0@1: deadlock with rendezvous sends"),
]  # fmt: skip


@pytest.mark.parametrize("right, wrong, why", SLIPS)
def test_messages_that_the_compute_order_does_not_need_or_lacks_are_refused(right, wrong, why):
    assert Program.from_csv(TALK) == schedules.gpipe(2, 2).parse("0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0\n")
    assert TALK.count(right) == 1
    with pytest.raises(tp.ScheduleError, match=why):
        Program.from_csv(TALK.replace(right, wrong))


def test_what_torch_has_no_word_for_is_refused_by_name():
    for program, word in (
        (schedules.gpipe(2, 2, 2), "token slices"),
        (schedules.sliced_1f1b(2, 2, 1), "half a micro-batch"),
        (Program.parse("0F0.0 0B0.0\n1F0.0 1R0.0 1B0.0"), "rank 1, position 1, .*no word for R"),
    ):
        with pytest.raises(tp.ScheduleError, match=word):
            program.to_csv()


def test_a_byte_order_mark_is_no_part_of_the_first_cell():
    """Spreadsheets begin a CSV with one; a second one, or one further on, is no cell."""
    program = schedules.one_f_one_b(2, 3).split()
    assert Program.from_csv("\ufeff" + program.to_csv()) == program == Program.parse("\ufeff" + str(program))
    for wrong in ("\ufeff\ufeff" + program.to_csv(), program.to_csv().replace("1F0", "\ufeff1F0", 1)):
        with pytest.raises(ValueError, match="line"):
            Program.from_csv(wrong)


def test_overlapping_pairs_are_words_too():
    text = "0F0.0 0F1.0& 0B0.0 0B1.0\n"
    program = Program.parse(text)
    program.check()
    assert str(program) == text and program.to_csv() == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    assert program.lower().strip() == program
    assert program.split(pending=1).counts == {"F": 2, "I": 2, "W": 2}
    with pytest.raises(tp.ScheduleError, match="overlaps with none behind it"):
        Program.parse("0F0.0 0B0.0&").check()
    with pytest.raises(tp.ScheduleError, match="two ops overlap, not three"):
        Program.parse("0F0.0 0F1.0& 0B0.0& 0F2.0 0B1.0 0B2.0").check()


def test_torch_itself():
    """torch's order is our golden file, for many shapes torch's text is read, and torch reads what we write."""
    pytest.importorskip("torch")
    for one in (*made.MADE, made.WRONG):
        assert made.text_of(*one) == made.path_of(*one).read_text(), one
    for one in made.TALKING:
        assert made.with_messages(*one) == made.comms_path_of(*one).read_text(), one
    count = 0
    for name, chunk_counts in (("GPipe", (1,)), ("Interleaved1F1B", (1, 2, 3)), ("LoopedBFS", (1, 2)),
                               ("InterleavedZeroBubble", (1, 2)), ("ZBVZeroBubble", (2,)), ("DualPipeV", (2,))):  # fmt: skip
        for ranks in (2, 3, 4):
            for chunks in chunk_counts:
                for micros in (2 * ranks, 4 * ranks):
                    text = made.text_of(name, ranks, chunks, micros)
                    program = Program.from_csv(text)
                    assert program.to_csv() == without_idle(text), (name, ranks, chunks, micros)
                    loaded = made.load(program.to_csv(), ranks, chunks, micros)
                    assert [",".join(row) for row in loaded.values()] == program.to_csv().splitlines()
                    count += 1
    assert count == 2 * 3 * 10
    for ranks in range(2, 7):
        for micros in (2 * ranks, 2 * ranks + 1, 5 * ranks):
            assert Program.from_csv(made.text_of("DualPipeV", ranks, 2, micros)) == schedules.dualpipe_v(ranks, micros)
            line = Program.from_csv(made.text_of("ZBVZeroBubble", ranks, 2, micros)).simulate(COST)
            assert line.makespan_s >= schedules.zb_v(ranks, micros).simulate(COST).makespan_s
    # Backward torch's micro-batches come in descending order, ours in ascending order.
    for ranks, chunks, micros in ((2, 2, 4), (3, 3, 4)):
        rows = made.text_of("LoopedBFS", ranks, chunks, micros).splitlines()
        ours = schedules.looped_bfs(ranks, micros, chunks).to_csv().splitlines()
        for row, own in zip(without_idle("\n".join(rows)).splitlines(), ours, strict=True):
            torchs, own = row.split(","), own.split(",")
            assert torchs[:chunks * micros] == own[:chunks * micros]
            assert [a[:2] for a in torchs] == [a[:2] for a in own] and sorted(torchs) == sorted(own)
    for program, chunks in ((schedules.one_f_one_b(4, 8), 1), (schedules.interleaved(3, 6, 2), 2),
                            (schedules.one_f_one_b(4, 8).split(pending=2), 1), (schedules.gpipe(2, 3), 1)):  # fmt: skip
        loaded = made.load(program.to_csv(), program.num_ranks, chunks, program.num_micro_batches)
        assert [",".join(row) for row in loaded.values()] == program.to_csv().splitlines()


def test_torchs_table_of_1f1b_is_refused():
    """torch 2.13's Schedule1F1B._get_pipeline_order gives the last rank micro-batches 1..m: F of 0 is missing."""
    with pytest.raises(tp.ScheduleError, match="line 2: rank 1, position 1, 1B0.0: its forward must come before it"):
        Program.from_csv(made.path_of(*made.WRONG).read_text())
