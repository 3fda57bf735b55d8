"""Activations that another rank keeps (BPipe): when they may leave, what waits for them, what they take."""
import pytest
from test_auto import request_of
from test_engine import alone, everything, partition_of, problem, same

import terapipe_c as tp
from terapipe_c import schedules
from terapipe_c.guests import guest_seconds
from terapipe_c.links import Links
from terapipe_c.planning.judge import Savings
from terapipe_c.schedules import Program


def test_every_slice_has_been_sent_before_its_micro_batch_leaves():
    text = str(schedules.bpipe(4, 6, 2).lower())
    assert "0F2.1 0SF2.1@1 0SE2.0@3" in text
    with pytest.raises(tp.ScheduleError, match="its SF must come before it, which sends from what is evicted"):
        Program.parse(text.replace("0F2.1 0SF2.1@1 0SE2.0@3", "0F2.1 0SE2.0@3 0SF2.1@1")).check()


def test_what_the_next_stage_reads_on_its_rank_has_not_left():
    """No message keeps it: the slot that a guest leaves is the next forward's, and stage 1 read that micro-batch's rows."""
    text = ("0F0.0 0SE0.0@2 0F1.0 1F0.0 1F1.0 1B0.0 0RL0.0@2 0B0.0 1B1.0 0B1.0\n2F0.0 2B0.0 2F1.0 2B1.0\n"
            "0RE0.0@0 3F0.0 3B0.0 0SL0.0@0 3F1.0 3B1.0")
    with pytest.raises(tp.ScheduleError, match="1F0.0 must come before it, which reads on this rank from what is evicted"):
        Program.parse(text).check()
    model, params, tokens = problem(2, 8)
    behind = Program.parse(text.replace("0SE0.0@2 0F1.0 1F0.0", "1F0.0 0SE0.0@2 0F1.0")).lower(True)
    behind.check()
    same(alone(model, params, tokens), everything(model, partition_of(model, [2, 4, 5]), [(1, [8])] * 2, behind, params, tokens))


@pytest.mark.parametrize("text", [
    "0F0.0 0SE0.0@1 0F1.0 0RL0.0@1 0B0.0 0B1.0\n1F0.0 0RE0.0@0 1F1.0 0SL0.0@0 1B0.0 1B1.0",
    "0F0.0 0F1.0 0SE0.0@1 0RL0.0@1 0B0.0 0B1.0\n1F0.0 0RE0.0@0 1F1.0 0SL0.0@0 1B0.0 1B1.0",
    "0F0.0 0F1.0 0SE0.0@1 0RL0.0@1 0B0.0 0B1.0\n0RE0.0@0 1F0.0 1F1.0 1B0.0 0SL0.0@0 1B1.0",
], ids=["before a message", "behind messages", "behind messages that are read later"])
def test_guests_go_to_a_neighbour_in_the_order_of_its_messages(text):
    """Both ends of a pair keep one order: what was read next was once announced before guests that had left before it."""
    program = Program.parse(text).lower(True)
    program.check()
    model, params, tokens = problem(2, 8)
    same(alone(model, params, tokens), everything(model, partition_of(model, [3]), [(1, [8])] * 2, program, params, tokens))


def test_what_was_evicted_is_not_swapped_when_it_is_back():
    text = "0F0.0 0SE0.0@1 0RL0.0@1 0SO0.0 0SI0.0 0B0.0\n1F0.0 0RE0.0@0 0SL0.0@0 1B0.0"
    with pytest.raises(tp.ScheduleError, match=r"0SO0.0: its micro-batch is evicted \(SE\): one of both would be right"):
        Program.parse(text).check()
    Program.parse(text.replace("0SO0.0 0SI0.0 ", "")).check()


def test_a_backward_that_waits_for_a_guest_that_waits_for_it_is_a_deadlock():
    """Rank 1 gives back what rank 0's backward reads behind a forward of what comes after that backward."""
    text = "0F0.0 0SE0.0@1 0RL0.0@1 0B0.0 0F1.0 0B1.0\n1F0.0 1B0.0 0RE0.0@0 1F1.0 0SL0.0@0 1B1.0"
    with pytest.raises(tp.ScheduleError, match="deadlock: rank 0 at 0B0.0 waits for rank 1, rank 1 at 1F1.0 waits for rank 0"):
        Program.parse(text).check()
    Program.parse(text.replace("1F1.0 0SL0.0@0", "0SL0.0@0 1F1.0")).check()


def test_the_same_costs_again_take_the_same_time():
    """The links of guests are free again when the next evaluation begins."""
    program = schedules.bpipe(4, 8)
    cost = {"F": 1.0, "B": 2.0, "comm": 0.25, "comm.guest": 1.5}
    assert program.makespan([cost] * 3).tolist() == [program.simulate(cost).makespan_s] * 3


def test_guests_of_a_candidate_that_makes_again_are_its_own():
    """The judge remembers how large those are that make nothing again; these are smaller."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=64, block_size=32)
    cluster = tp.Cluster(num_devices=4, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e6, peak_flops=1e9)
    judge, cut = request_of(model, cluster, 8).judge(4), ((0, 2), (2, 5), (5, 8), (8, 10))
    for savings in (None, Savings(recompute=tuple(block.kind in ("attention", "ffn") for block in model.blocks))):
        found = judge.judge("bpipe", cut, ((1, (32,)),) * 8, savings=savings)
        assert found.seconds == pytest.approx(judge.lowered(found).makespan(judge.timing(found)), rel=1e-12)


def test_guests_go_over_the_slow_link_where_one_is_on_their_way():
    """Of six ranks four share a node: ranks 2 and 3 are neighbours there, and their guests never leave it."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=64, block_size=32)
    cluster = tp.Cluster(8, 4, node_link_latency_s=1e-6, node_link_bandwidth_Bps=1e9, link_latency_s=1e-3, link_bandwidth_Bps=1e6)
    costs, links = tp.CostModel.analytic(model, cluster), Links.of(cluster, 6, 1)
    assert links.far == (False, False, False, True, False, True)
    link = guest_seconds([1000] * 6, [2], 6, costs, links)["comm.guest"]
    assert link[:3, 0] == pytest.approx([1e-3 + 1e-3, 1e-3 + 1e-3, 1e-6 + 1e-6]) and not link[:, 1].any()


@pytest.mark.parametrize("costs", [{"comm": 0.25, "comm.guest": 12.0}, {"comm": 2.9, "comm.guest": 1.0, "comm.latency": 0.1}],
                         ids=["slow guests", "slow links"])
def test_guests_are_emulated_on_links_of_their_own(costs):
    """One after another, as simulated. They once left as messages of their stage do: at once, or behind those and in their way."""
    program = schedules.bpipe(4, 8).lower(False)
    costs = {name: seconds * 1e-4 for name, seconds in {"F": 1.0, "B": 2.0, **costs}.items()}
    due = {(rank, op, micro): (start, end) for rank, op, _, micro, _, start, end in tp.emulate(program, costs).trace}
    rows = [row for row in program.simulate(costs).intervals.tolist() if schedules.OPS[row[1]] in "FB"]
    assert len(rows) == 64
    for rank, op, _, micro, _, start, end in rows:
        assert due[rank, schedules.OPS[op], micro] == pytest.approx((start, end), abs=1e-6)


def test_guests_of_the_last_stage_are_emulated_where_links_carry_one_message_at_a_time():
    """It sends nothing forward: such a link was looked up before the first of the table, and written there."""
    program = Program.parse("0F0.0 2RE0.0@2 2SL0.0@2 0B0.0\n1F0.0 1B0.0\n2F0.0 2SE0.0@0 2RL0.0@0 2B0.0").lower(False)
    costs = {"F": 1e-4, "B": 2e-4, "comm": 3e-5, "comm.guest": 1e-4, "comm.latency": 1e-5}
    trace = tp.emulate(program, costs).trace
    assert [row[6] for row in trace if row[1] == "B"] == pytest.approx([12.2e-4, 9.9e-4, 7.6e-4], abs=1e-6)
