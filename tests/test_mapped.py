"""Tokens that lie in files and arrays which somebody changes, cuts off, replaces or closes while they are trained on."""
import copy
import importlib
import os
import pickle
import time

import numpy as np
import pytest
from test_launch import nothing_left, start

import terapipe_c as tp
from terapipe_c import data, mapped

__all__ = ["nothing_left"]


def test_data_that_grew_since_the_launcher_read_it(tmp_path, monkeypatch):
    """Ranks that see it at different moments would train on different batches."""
    data = tmp_path / "log.txt"
    data.write_bytes(bytes(range(256)) * 8)
    launch = importlib.import_module("terapipe_c.launch")
    real = launch.make_job

    def then_grow(**arguments):
        job = real(**arguments)
        with data.open("ab") as file:
            file.write(b"one more line\n")
        return job

    monkeypatch.setattr(launch, "make_job", then_grow)
    with pytest.raises(ValueError, match="has 2062 tokens now and had 2048 when the run began"):
        start(2, data=data, processes=False).wait()


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_data_that_was_replaced_since_the_launcher_read_it(processes, tmp_path, monkeypatch):
    """Of as many tokens: it was trained on, though nobody had looked at it, or on it by some ranks alone."""
    data, other = tmp_path / "text.txt", tmp_path / "other.txt"
    data.write_bytes(bytes(range(256)) * 8)
    other.write_bytes(bytes(range(255, -1, -1)) * 8)
    launch = importlib.import_module("terapipe_c.launch")
    real = launch.make_job

    def then_replace(**arguments):
        job = real(**arguments)
        os.replace(other, data)
        return job

    monkeypatch.setattr(launch, "make_job", then_replace)
    with pytest.raises(ValueError, match="text.txt has other tokens now than when the run began"):
        start(2, data=data, processes=processes).wait()


def test_data_that_is_cut_off_is_an_error_and_what_replaces_it_is_not(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 64)
    data = tp.Dataset(path, 16, 2)
    before = data.batch(3)
    (tmp_path / "new.txt").write_bytes(b"short")
    os.replace(tmp_path / "new.txt", path)
    assert np.array_equal(data.batch(3), before)     # what is mapped stays what it was
    path.write_bytes(bytes(range(256)) * 64)
    data = tp.Dataset(path, 16, 2)
    os.truncate(path, 100)
    with pytest.raises(ValueError, match=r"text.txt was cut off from 16384 to 100 bytes"):
        data.batch(3)                                # not the end of this Python by SIGBUS
    for ask in (lambda: data.fingerprint, lambda: data.state(0), lambda: data.save(tmp_path / "copy.npy")):
        with pytest.raises(ValueError, match=r"text.txt was cut off from 16384 to 100 bytes"):
            ask()


def write_over(path, first, count):
    with path.open("r+b") as file:
        file.seek(2 * first)
        file.write(np.full(count, 60000, np.uint16).tobytes())


def test_a_token_that_is_written_over_is_named(tmp_path):
    """By its file and offset, as before a run: "tokens[0, 3] is 60000" said neither."""
    path = tmp_path / "tokens.bin"
    np.zeros(4000, np.uint16).tofile(path)
    data = tp.Dataset(path, 16, 2, vocab_size=64)
    at = data.starts(5)[1] + 3
    write_over(path, at, 1)
    with pytest.raises(ValueError, match=rf"tokens.bin: the token at offset {at} is 60000; it must be in 0 .. 63 "):
        data.batch(5)


def test_a_token_that_is_written_over_during_a_run_is_named(tmp_path):
    path = tmp_path / "tokens.bin"
    np.zeros(4000, np.uint16).tofile(path)
    run = start(10**6, data=path, processes=False)
    while run.running and not run.history:
        time.sleep(0.01)
    write_over(path, 0, 4000)
    with pytest.raises(ValueError, match=r"tokens.bin: the token at offset \d+ is 60000; it must be in 0"):
        run.wait(60)


def cut_between_the_look_and_the_read(monkeypatch, path, nth):
    """What a look at the size cannot see: the file is cut off to 8192 bytes right after the nth."""
    real, looks = mapped.Reader.check, []

    def cut(self):
        real(self)
        looks.append(self)
        if len(looks) == nth:
            os.truncate(path, 8192)

    monkeypatch.setattr(mapped.Reader, "check", cut)
    return looks


def test_data_that_is_cut_off_while_it_is_read_for_the_first_time(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)) * 1000)
    monkeypatch.setattr(data, "BLOCK_TOKENS", 8192)
    looks = cut_between_the_look_and_the_read(monkeypatch, path, 3)
    with pytest.raises(ValueError, match="text.txt was cut off from 100000 to 8192 bytes"):
        tp.Dataset(path, 16, 2, vocab_size=100)
    assert len(looks) == 3


@pytest.mark.parametrize("given", [lambda path: path, lambda path: np.memmap(path, np.uint16, "r"),
                                   lambda path: np.memmap(path, np.uint16, "r+")[5:]], ids=["file", "mapped", "part"])
def test_data_that_is_cut_off_while_a_batch_is_read(tmp_path, monkeypatch, given):
    path = tmp_path / "tokens.bin"
    np.arange(50_000, dtype=np.uint16).tofile(path)
    data = tp.Dataset(given(path), 16, 64)
    copies = pickle.loads(pickle.dumps(data)), copy.copy(data), copy.deepcopy(data)
    assert all(np.array_equal(data.batch(7), other.batch(7)) and data.fingerprint == other.fingerprint for other in copies)
    cut_between_the_look_and_the_read(monkeypatch, path, 1)
    with pytest.raises(ValueError, match="tokens.bin was cut off from 100000 to 8192 bytes"):
        data.batch(7)                                # the end of this Python by SIGBUS once
    assert copies[0].batch(7).shape == (64, 17)      # of an array in memory


@pytest.mark.parametrize("again", [False, True])
def test_data_whose_descriptor_somebody_closed_is_what_it_was(tmp_path, again):
    """A process that becomes a daemon closes all, and other files have their numbers then: tokens of these were trained on."""
    (tmp_path / "text.txt").write_bytes(bytes(range(100)) * 1000)
    (tmp_path / "other.txt").write_bytes(bytes(200_000))
    data, same = (tp.Dataset(tmp_path / "text.txt", 16, 2) for _ in range(2))
    fd = data._reader._fd
    with open(tmp_path / "other.txt", "rb") as other:
        if again:
            os.dup2(other.fileno(), fd)
        else:
            os.close(fd)
    assert np.array_equal(data.batch(3), same.batch(3)) and data.fingerprint == same.fingerprint
    del data
    if again:
        os.close(fd)                                 # still there: it is not ours


@pytest.mark.parametrize("given", [lambda a: a, lambda a: a[:], lambda a: memoryview(a), lambda a: a.view(np.uint8)])
def test_threads_train_on_what_an_array_was_when_they_were_launched(given):
    """As processes do. They trained on what was written to it meanwhile."""
    tokens = np.arange(2048, dtype=np.int64) * 7 % 256
    before = [record.loss for record in start(3, data=given(tokens.copy()), processes=False)]
    run = start(3, data=given(tokens), processes=False)
    tokens[:] = 1
    assert [record.loss for record in run] == before


def test_what_cannot_change_is_not_copied_for_threads(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "t.bin")
    frozen = np.arange(9)
    frozen.setflags(write=False)
    for mode in ("r", "r+", "c"):
        frozen_too = np.memmap(tmp_path / "t.bin", np.uint16, mode)[5:]
        assert mapped.snapshot(frozen_too) is frozen_too
    for same in (frozen, frozen[2:], np.frombuffer(b"abc", np.uint8), np.asarray(memoryview(b"abc"))):
        assert mapped.snapshot(same) is same
    seen = np.arange(9)
    frozen_view = seen[:]
    frozen_view.setflags(write=False)
    for other in (seen, frozen_view, np.frombuffer(bytearray(b"abc"), np.uint8)):
        assert not np.shares_memory(mapped.snapshot(other), other)


def test_data_that_is_no_regular_file_is_not_opened(tmp_path):
    """To open a pipe is to wait for who writes into it."""
    for name in ("x.idx", "x.bin", "x.npy", "x.txt"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(tp.InvalidValueError, match=f"{name} is not a file"):
            tp.Dataset(tmp_path / name, 4, 1)
    (tmp_path / "y.bin").symlink_to(tmp_path / "x.bin")
    with pytest.raises(tp.InvalidValueError, match="y.bin is not a file"):
        tp.Dataset(tmp_path / "y.bin", 4, 1)


def test_an_array_that_its_user_mapped_is_looked_at_like_a_file(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.int32))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    with pytest.raises(tp.InvalidValueError, match="a.npy, which is where the tokens are: another file would be right"):
        tp.Dataset(mapped, 4, 1).save(tmp_path / "a.npy")
    assert mapped[99] == 99
    whole = tp.Dataset(mapped, 4, 1)
    os.truncate(tmp_path / "a.npy", 100)
    with pytest.raises(ValueError, match="a.npy was cut off from 528 to 100 bytes"):
        whole.batch(0)
    np.save(tmp_path / "b.npy", np.arange(100, dtype=np.int32))
    mapped = np.load(tmp_path / "b.npy", mmap_mode="r")
    (tmp_path / "b.npy").unlink()
    assert tp.Dataset(mapped, 4, 1).save(tmp_path / "b.npy").exists() and tp.Dataset(mapped, 4, 1).batch(0).shape == (1, 5)
