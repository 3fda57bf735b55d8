"""Ranks that wait while others read from a disk for longer than a rank may wait for another: terapipe_c/worker.py."""
import threading
import time
from types import SimpleNamespace

import pytest

import terapipe_c as tp
from terapipe_c import _core, watch, worker
from terapipe_c.environment import Place
from terapipe_c.worker import at_the_disk, meanwhile, while_others_meet

PATIENCE_S = 3.0


def together(*works):
    """What each rank's work gave or raised. Each: (how it waits, what it does with the Event)."""
    region = _core.Region.create(len(works), bytes(len(works) ** 2), 0, 64, False)
    ends = [None] * len(works)

    def rank(number, wait, work):
        try:
            ends[number] = wait(_core.Comm(region, number, PATIENCE_S), PATIENCE_S, work)
        except BaseException as error:
            if region.aborted() is None:
                region.abort("EVALUE", number, f"rank {number}: {error}")
            ends[number] = error

    threads = [threading.Thread(target=rank, args=(number, *work)) for number, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return ends


def read_for(seconds):
    return lambda in_vain: (in_vain.wait(seconds), threading.current_thread())


@pytest.mark.parametrize("other", [meanwhile, while_others_meet])
def test_who_reads_for_longer_is_waited_for(other):
    callers = []

    def noted(*args):
        callers.append(threading.current_thread())
        return while_others_meet(*args)

    ends = together((noted, read_for(2.5 * PATIENCE_S)), (other, read_for(0)))
    assert ends[0] == (False, callers[0]), "by the thread that called"
    assert ends[1][0] is False


def test_who_fails_at_it_is_named_to_who_waits():
    def fail(in_vain):
        time.sleep(0.2)
        raise tp.StorageError("no such disk")

    ends = together((while_others_meet, read_for(0)), (while_others_meet, fail), (meanwhile, read_for(0)))
    assert isinstance(ends[1], tp.StorageError) and str(ends[1]) == "no such disk"
    for rank in (0, 2):
        assert isinstance(ends[rank], tp.AbortedError) and "rank 1 failed" in str(ends[rank]) and "no such disk" in str(ends[rank])


def test_who_reads_hears_that_it_is_in_vain():
    def give_up(comm, patience_s, work):
        time.sleep(0.2)
        raise ValueError("gives up")

    ends = together((while_others_meet, read_for(20)), (give_up, None))
    assert isinstance(ends[0], tp.AbortedError) and "rank 1: gives up" in str(ends[0])


def test_who_does_not_come_is_missed():
    ends = together((while_others_meet, read_for(20)), (lambda *ignored: None, None))
    assert isinstance(ends[0], tp.DeadlineError) and "rank 1" in str(ends[0])


def test_a_signal_handler_that_raises_as_the_thread_starts_keeps_nobody(monkeypatch):
    class Preempted(worker.Worker):
        def start(self):
            super().start()
            raise SystemExit(1)

    def preempted(*args):
        monkeypatch.setattr(worker, "Worker", Preempted)
        return while_others_meet(*args)

    ends = together((preempted, read_for(20)), (lambda *args: time.sleep(0.2) or meanwhile(*args), read_for(0)))
    assert isinstance(ends[0], SystemExit) and not isinstance(ends[1], tuple)


def test_ctrl_c_while_others_still_read_leaves_no_thread_with_the_communicator(monkeypatch):
    """The caller closes it next."""
    class Interrupted(worker.Worker):
        def join(self, timeout=None):
            if not joined:
                joined.append(self)
                raise KeyboardInterrupt
            super().join(timeout)

    joined, left = [], []

    def interrupted(*args):
        monkeypatch.setattr(worker, "Worker", Interrupted)
        try:
            return while_others_meet(*args)
        finally:
            left.append(joined[0].is_alive())

    ends = together((interrupted, read_for(0)), (lambda *args: time.sleep(0.2) or meanwhile(*args), read_for(1)))
    assert isinstance(ends[0], KeyboardInterrupt) and left == [False]
    assert isinstance(ends[1], tp.AbortedError) and "rank 0 was interrupted" in str(ends[1])


def test_a_rank_that_waits_for_a_disk_is_no_gpus(monkeypatch):
    """Behind a failure: what has been written is brought to the disk, and a folder removed, before the thread ends."""
    ended, region = threading.Event(), _core.Region.create(1, bytes(1), 0, 64, False)
    monkeypatch.setattr(watch, "STUCK_S", 0.5)
    monkeypatch.setattr(watch.os, "_exit", lambda code: ended.set())
    with watch.Watch(region, Place("torchrun", 0, 1, 0, "localhost", 1, 1, ""), gpu=True):
        with at_the_disk():
            region.abort("ERUNTIME", 0, "rank 0 failed")
            assert not ended.wait(2)
        assert ended.wait(10)


def test_a_gpu_that_keeps_the_thread_of_a_disk_is_none(monkeypatch):
    """What a checkpoint is made of comes from the device, whose copies may never end."""
    ended, region = threading.Event(), _core.Region.create(1, bytes(1), 0, 64, False)
    monkeypatch.setattr(watch, "STUCK_S", 0.5)
    monkeypatch.setattr(watch.os, "_exit", lambda code: ended.set())
    training = worker._Training.__new__(worker._Training)

    def export_each(kind):
        yield kind, 0
        ended.wait(20)

    with watch.Watch(region, Place("torchrun", 0, 1, 0, "localhost", 1, 1, ""), gpu=True):
        for export in ({"export_each": export_each}, {"export": lambda kind: ended.wait(20) and {}}):
            ended.clear()
            training.engine = SimpleNamespace(**export)
            with at_the_disk():     # who waits for that thread
                region.abort("ERUNTIME", 0, "rank 0 failed")
                list(training._tensors(threading.Event()))
                assert ended.is_set()
