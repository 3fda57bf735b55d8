"""The data room: every kind of source, sampling that depends on (seed, split, step, row) alone, and refusals by name."""

import bz2
import errno
import gzip
import inspect
import itertools
import lzma
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import terapipe_c as tp
import terapipe_c.data
from terapipe_c import InvalidValueError
from terapipe_c.data import BLOCK_TOKENS, Dataset, check_tokens, stdlib_corpus
from terapipe_c.job import check_run
from terapipe_c.worker import pack, unpack


def ramp(n, dtype=np.uint16):
    return (np.arange(n) % 251).astype(dtype)


def write_llm_c(path, tokens, magic=20240520, version=1, count=None):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(head.tobytes() + np.asarray(tokens).astype("<u2" if version == 1 else "<u4").tobytes())
    return path


def write_megatron(folder, documents, code=8, dtype="<u2", name="corpus"):
    lengths = [len(d) for d in documents]
    pointers = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    (folder / f"{name}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1).astype("<i8").tobytes()
    )
    (folder / f"{name}.bin").write_bytes(b"".join(np.asarray(d).astype(dtype).tobytes() for d in documents))
    return folder / name


def test_batches_are_windows_of_the_source_and_int32():
    tokens = np.arange(5000, dtype=np.int64)
    data = Dataset(tokens, seq_len=32, batch=4, seed=3)
    assert "4 sequences of 32 tokens, drawn by seed 3" in data._repr_html_()
    batch = data.batch(7)
    assert batch.dtype == np.int32 and batch.shape == (4, 33) and batch.flags.c_contiguous
    assert (np.diff(batch, axis=1) == 1).all()
    assert list(batch[:, 0]) == data.starts(7)


def test_a_row_depends_on_seed_split_step_and_row_alone():
    tokens = np.arange(5000)
    wide, narrow = Dataset(tokens, 16, 8, seed=1), Dataset(tokens, 16, 3, seed=1)
    assert Dataset(tokens, 16, 8).starts(5) == Dataset(tokens, 16, 8, seed=0).starts(5) != wide.starts(5)
    later = [wide.starts(step) for step in (9, 2, 9)]
    assert later[0] == later[2] != later[1]
    assert wide.starts(5)[:3] == narrow.starts(5)  # the batch's size does not enter
    assert len({start for step in range(20) for start in wide.starts(step)}) > 150
    assert Dataset(tokens, 16, 8, seed=2).starts(5) != wide.starts(5)
    assert Dataset(tokens, 16, 8, seed=1, split="val", val_fraction=0.5).starts(5) != [
        s + 2500 for s in Dataset(tokens, 16, 8, seed=1, val_fraction=0.5).starts(5)
    ]


def test_starts_are_philox_as_documented():
    """The documented counter and key, word by word, so that any other program can draw the same batch."""
    data = Dataset(np.arange(1000), 9, 3, seed=11)
    for row, start in enumerate(data.starts(4)):
        word = int(
            np.random.Philox(key=np.array([11, 0], np.uint64), counter=np.array([row, 4, 0, 0], np.uint64)).random_raw()
        )
        assert start == word * (900 - 9) >> 64
    word = int(np.random.Philox(key=np.array([11, 1], np.uint64), counter=np.array([2, 4, 0, 0], np.uint64)).random_raw())
    assert Dataset(np.arange(1000), 9, 3, seed=11, split="val").starts(4)[2] == 900 + (word * (100 - 9) >> 64)
    assert Dataset(np.arange(1000), 9, 3, seed=11).starts(4) == [748, 581, 0]  # frozen: a change breaks every resume


def test_starts_cover_the_split_evenly_and_never_cross_it():
    tokens = np.arange(100)
    train, val = (Dataset(tokens, 9, 64, split=split, val_fraction=0.3) for split in ("train", "val"))
    seen = {
        split: np.bincount(np.concatenate([d.starts(s) for s in range(100)]), minlength=100)
        for split, d in (("train", train), ("val", val))
    }
    assert set(np.flatnonzero(seen["train"])) == set(range(0, 70 - 9)) and set(np.flatnonzero(seen["val"])) == set(
        range(70, 91)
    )
    expected = 6400 / 61
    assert ((seen["train"][:61] - expected) ** 2 / expected).sum() < 110  # chi-square, 60 degrees: 1e-4 tail is 108
    assert train.split_tokens == 70 and val.split_tokens == 30 and train.num_tokens == val.num_tokens == 100


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", ">i4"])
def test_arrays_of_every_integer_type(dtype):
    tokens = (np.arange(400) % 127).astype(dtype)
    assert (Dataset(tokens, 10, 2, vocab_size=127).batch(0) == Dataset(list(map(int, tokens)), 10, 2).batch(0)).all()


def test_arrays_are_borrowed_even_when_strided():
    tokens = np.arange(2000)[::2]
    data = Dataset(tokens, 10, 1)
    assert np.shares_memory(data.tokens, tokens)
    assert (np.diff(data.batch(0)) == 2).all()


def test_every_kind_of_file_gives_the_same_batches(tmp_path):
    tokens = ramp(3000)
    (tmp_path / "text.txt").write_bytes(tokens.astype(np.uint8).tobytes())
    (tmp_path / "nano.bin").write_bytes(tokens.astype("<u2").tobytes())
    write_llm_c(tmp_path / "gpt2.bin", tokens)
    write_llm_c(tmp_path / "llama.bin", tokens, 20240801, 7)
    np.save(tmp_path / "array.npy", tokens.astype(np.int64))
    prefix = write_megatron(tmp_path, [tokens[:100], tokens[100:1700], tokens[1700:]])
    write_megatron(tmp_path, [tokens], code=4, dtype="<i4", name="wide")
    expected = Dataset(tokens, 20, 3, seed=5).batch(2)
    kinds = {}
    for name in (
        "text.txt",
        "nano.bin",
        "gpt2.bin",
        "llama.bin",
        "array.npy",
        prefix.name,
        "corpus.bin",
        "corpus.idx",
        "wide.bin",
    ):
        data = Dataset(str(tmp_path / name), 20, 3, seed=5, vocab_size=251)
        assert (data.batch(2) == expected).all(), name
        assert data.num_tokens == 3000
        kinds[name] = data.kind
    assert list(kinds.values()) == ["text", "nanoGPT", "llm.c", "llm.c", "npy"] + ["Megatron"] * 4
    for code, dtype in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items():       # as Megatron numbers them
        wide = write_megatron(tmp_path, [tokens[:900] % 128, tokens[900:] % 128], code=code, dtype=dtype, name="wide")
        assert Dataset(wide, 20, 3).tokens.dtype == dtype
        assert (Dataset(wide, 20, 3, seed=5).batch(2) == Dataset(tokens % 128, 20, 3, seed=5).batch(2)).all()
    saved = Dataset(tmp_path / "llama.bin", 20, 3, seed=5).save(tmp_path / "copy.npy")
    assert (Dataset(saved, 20, 3, seed=5).batch(2) == expected).all()
    for name, kept in (("text.txt", "u1"), ("nano.bin", "<u2"), ("llama.bin", "<i4")):          # no wider than they were
        assert np.load(Dataset(tmp_path / name, 20, 3).save(tmp_path / "copy.npy")).dtype == kept


FULL = """
import os, sys
import numpy as np
import terapipe_c as tp
os.chdir(sys.argv[1])
np.save("copy.npy", np.arange(9))
try:
    tp.Dataset(np.zeros(200_000, np.int32), 20, 3).save("copy.npy")
except OSError as error:
    assert error.filename.endswith("/copy.npy") and "No space" in str(error), error
assert np.load("copy.npy").tolist() == list(range(9)) and os.listdir() == ["copy.npy"]
print("left as it was")
"""


def test_a_disk_that_is_full_ends_no_program_and_keeps_the_file(tmp_path):
    """It was written through a mapping: what the disk did not take ended Python by SIGBUS, and the file that was there was gone."""
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=128k none "$0" && exec "$@"', str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace here (needs root)")
    done = subprocess.run([*mount, sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "left as it was\n"), done.stderr


def test_what_ends_a_save_keeps_its_words(tmp_path, monkeypatch):
    """A handler's TimeoutError has no number, and became "[Errno None] None"."""
    opened = Dataset(np.zeros(1000, np.int32), 20, 3)

    def late():
        raise TimeoutError("the job may take 1 s")

    monkeypatch.setattr(opened._reader, "check", late)
    with pytest.raises(TimeoutError, match="the job may take 1 s"):
        opened.save(tmp_path / "copy.npy")
    assert not list(tmp_path.iterdir())


def test_more_tokens_than_an_int32_counts(tmp_path):
    """Each sequence's tokens fit one; their sum, and the bytes of one alone, do not. The file has a hole for all but the last."""
    lengths, last = np.array([1_200_000_000, 1_200_000_000, 7], "<i4"), np.arange(1, 8, dtype="<u2")
    pointers = np.array([0, 2_400_000_000, 4_800_000_000], "<i8")
    (tmp_path / "far.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 2) + lengths.tobytes() + pointers.tobytes()
                                       + np.array([0, 3], "<i8").tobytes())
    with (tmp_path / "far.bin").open("wb") as file:
        file.seek(4_800_000_000)
        file.write(last.tobytes())
    data = Dataset(tmp_path / "far", 6, 1, split="val", val_fraction=7.5 / 2_400_000_007)
    assert data.num_tokens == 2_400_000_007 and data.starts(0) == [2_400_000_000]
    assert data.batch(0).tolist() == [last.tolist()]


def test_what_takes_several_blocks_is_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(terapipe_c.data, "BLOCK_TOKENS", 4)
    tokens = ramp(35)
    prefix = write_megatron(tmp_path, np.split(tokens, [1, 3, 4, 9, 11, 18, 20, 26, 33]))     # ten sequences
    data = Dataset(prefix, 6, 1)
    assert np.array_equal(data.tokens, tokens) and np.array_equal(np.load(data.save(tmp_path / "copy.npy")), tokens)
    content = bytearray((tmp_path / "corpus.idx").read_bytes())
    content[34 + 4 * 10 + 8 * 9] += 2                         # where the last one begins
    (tmp_path / "corpus.idx").write_bytes(content)
    with pytest.raises(ValueError, match="sequence 9 begins at byte 68, but those before it take 66"):
        Dataset(prefix, 6, 1)


def test_tokenizer(tmp_path):
    (tmp_path / "t.txt").write_text("é" + "ab" * 300, encoding="utf-8")
    data = Dataset(tmp_path / "t.txt", 10, 1, tokenizer=lambda text: [ord(c) + 1000 for c in text])
    assert data.num_tokens == 601 and int(data.tokens[0]) == ord("é") + 1000
    (tmp_path / "bad.txt").write_bytes(b"abc\xff" * 10)
    with pytest.raises(ValueError, match=r"bad\.txt.*byte 3"):
        Dataset(tmp_path / "bad.txt", 10, 1, tokenizer=lambda text: [1])
    with pytest.raises(ValueError, match=r"t\.txt.*float"):
        Dataset(tmp_path / "t.txt", 10, 1, tokenizer=lambda text: [0.5, 1.5])

    def far(text):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no tokenizer there")

    with pytest.raises(ConnectionRefusedError) as caught:       # which is not the file's
        Dataset(tmp_path / "t.txt", 10, 1, tokenizer=far)
    assert caught.value.filename is None
    for kind in (bytes, bytearray):        # as a tokenizer's type allows, and as data they were right
        encoded = Dataset(tmp_path / "t.txt", 10, 1, tokenizer=lambda text, kind=kind: kind(text.encode()))
        assert np.array_equal(encoded.tokens, Dataset(tmp_path / "t.txt", 10, 1).tokens)
    with pytest.raises(ValueError, match=r"nano\.bin.*tokens already"):
        (tmp_path / "nano.bin").write_bytes(bytes(100))
        Dataset(tmp_path / "nano.bin", 10, 1, tokenizer=lambda text: [1])


def test_state_names_what_changed():
    tokens = np.arange(1000)
    data = Dataset(tokens, 10, 2, seed=4)
    state = data.state(17)
    assert state["step"] == 17
    data.check_state(state)
    with pytest.raises(ValueError, match="seed was 4 and is now 5"):
        Dataset(tokens, 10, 2, seed=5).check_state(state)
    with pytest.raises(ValueError, match="num_tokens was 1000 and is now 999"):
        Dataset(tokens[:-1], 10, 2, seed=4).check_state(state)
    with pytest.raises(ValueError, match="fingerprint was '[0-9a-f]+' and is now '"):
        Dataset(tokens + 1, 10, 2, seed=4).check_state(state)
    for same in (tokens.astype(">u2"), tokens.tolist()):
        Dataset(same, 10, 2, seed=4).check_state(state)
    del state["fingerprint"]                             # of a checkpoint from before there were any
    Dataset(tokens + 1, 10, 2, seed=4).check_state(state)


@pytest.mark.parametrize("offset", [0, 4321, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 5])
def test_the_first_token_outside_the_vocabulary_is_named(tmp_path, offset):
    tokens = np.zeros(2 * BLOCK_TOKENS + 10, np.uint16)
    tokens[offset:] = 256
    path = tmp_path / "tokens.bin"
    path.write_bytes(tokens.tobytes())
    with pytest.raises(ValueError, match=rf"tokens\.bin: the token at offset {offset} is 256; .*0 \.\. 255"):
        Dataset(path, 10, 1, vocab_size=256)
    with pytest.raises(ValueError, match=f"^array: the token at offset {offset} is 256"):
        Dataset(tokens, 10, 1, vocab_size=256)
    assert Dataset(path, 10, 1, vocab_size=257).num_tokens == len(tokens)


def test_negative_and_giant_tokens_are_refused():
    for value, dtype in ((-1, np.int16), (-1, np.int64), (1 << 31, np.int64), (1 << 31, np.uint32), (1 << 40, np.uint64)):
        tokens = np.zeros(100, dtype)
        tokens[42] = value
        for vocab in (None, 1 << 33):
            with pytest.raises(ValueError, match=f"offset 42 is {value};"):
                Dataset(tokens, 10, 1, vocab_size=vocab)
    check_tokens(np.full(10, 255, np.uint8), 256, "x")


def test_refusals_name_the_file_and_what_is_wrong(tmp_path):
    def refused(kind, message, name, content=None, **options):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(kind, match=message):
            Dataset(tmp_path / name, **{"seq_len": 96, "batch": 1, **options})

    refused(FileNotFoundError, r"nowhere\.txt", "nowhere.txt")
    refused(ValueError, r"empty\.txt is empty", "empty.txt", b"")
    refused(ValueError, r"empty\.bin is empty", "empty.bin", b"")
    refused(ValueError, r"short\.txt: the train split has 90 of its 100 tokens.*needs 97", "short.txt", bytes(100))
    refused(ValueError, r"short\.txt: the val split has 10 of its 100", "short.txt", bytes(100), split="val")
    refused(
        ValueError, r"whole\.txt: the train split has 96 tokens.*needs 97", "whole.txt", bytes(96), val_fraction=0.0
    )
    refused(ValueError, r"odd\.bin: 1001 bytes", "odd.bin", bytes(1001))
    refused(ValueError, r"b\.npy", "b.npy", b"not numpy at all")
    refused(ValueError, r"z\.npy: not a NumPy file", "z.npy", b"PK\3\4junk" * 20)
    head = b"{'descr': '<i4', 'fortran_order': False, 'shape': (9,), "  # no end
    refused(ValueError, r"h\.npy: not a NumPy file", "h.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + bytes(99))
    head = b"\x93NUMPY\1\0\x3d\0{'descr': '<i4', 'fortran_order': False, 'shape': (99,)}".ljust(71)
    refused(ValueError, r"c\.npy: .*shape \[99\] of int32, so 467 bytes, but it has 91: truncated", "c.npy", head + bytes(20))
    refused(ValueError, r"o\.npy: not a NumPy file: .*objects", "o.npy", head.replace(b"'<i4'", b"'|O' ") + bytes(20))  # pickled
    refused(ValueError, r"not a file", ".")
    head = struct.pack("<3i", 20240520, 2, 10) + bytes(1012)
    refused(ValueError, r"v\.bin: llm\.c file of magic 20240520 version 2", "v.bin", head + bytes(20))
    write_llm_c(tmp_path / "cut.bin", ramp(500), count=501)
    refused(ValueError, r"cut\.bin: .* 501 tokens .*truncated", "cut.bin")
    write_llm_c(tmp_path / "less.bin", [], count=-506)  # 1024 - 2 * 506 bytes are 12, that of its header's words
    (tmp_path / "less.bin").write_bytes((tmp_path / "less.bin").read_bytes()[:12])
    refused(ValueError, r"less\.bin: its llm\.c header says -506 tokens: damaged", "less.bin")
    prefix = write_megatron(tmp_path, [ramp(500)])
    (tmp_path / "corpus.bin").write_bytes(bytes(998))
    refused(ValueError, r"corpus\.bin: its index says 500 tokens.* 998 bytes", prefix.name)
    (tmp_path / "corpus.bin").unlink()
    refused(FileNotFoundError, r"corpus\.bin", "corpus.idx")
    pair = write_megatron(tmp_path, [ramp(250), ramp(250)], name="pair")
    raw = bytearray((tmp_path / "pair.idx").read_bytes())
    raw[34:42] = struct.pack("<2i", -5, 505)
    (tmp_path / "pair.idx").write_bytes(raw)
    refused(ValueError, r"pair\.idx: sequence 0 has -5 tokens", pair.name)
    for at, number, words in ((34 + 8, 2, r"sequence 0 begins at byte 2, but those before it take 0: damaged"),
                              (34 + 16, 10**12, r"sequence 1 begins at byte 1000000000000, but those before it take 500: damaged"),
                              (34 + 16, -8, r"sequence 1 begins at byte -8"),
                              (34 + 40, 3, r"its last document ends with sequence 3, but there are 2: damaged")):
        write_megatron(tmp_path, [ramp(250), ramp(250)], name="pair")
        raw = bytearray((tmp_path / "pair.idx").read_bytes())
        raw[at:at + 8] = struct.pack("<q", number)
        (tmp_path / "pair.idx").write_bytes(raw)
        refused(ValueError, r"pair\.idx: " + words, pair.name)
    refused(ValueError, r"x\.idx: not a Megatron index", "x.idx", b"something else")
    (tmp_path / "x.bin").write_bytes(bytes(1000))
    refused(ValueError, r"x\.idx: not a Megatron index", "x")  # "no such file" before, though both lay there
    assert Dataset(tmp_path / "x.bin", 96, 1).tokens.size == 500  # an .idx of something else says nothing of a nanoGPT .bin
    for suffix, content in ((".bin", bytes(1000)), (".idx", b"TNTIDX\x00\x00" + bytes(200))):
        (tmp_path / f"old{suffix}").write_bytes(content)
    for name in ("old", "old.bin", "old.idx"):  # the .bin was read as nanoGPT's, whatever its tokens' type
        refused(ValueError, r"old\.idx: a Megatron index of an older kind \(TNTIDX\): one that starts with MMIDIDX", name)
    refused(ValueError, r"t\.idx: 12 bytes of a Megatron index, whose header alone has 34: truncated", "t.idx", b"MMIDIDX\0\0abc")
    refused(ValueError, r"y\.idx: .*truncated", "y.idx", b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 6))
    write_megatron(tmp_path, [ramp(250), ramp(250)], name="pair")   # within its documents, which come last
    refused(ValueError, r"pair\.idx: 2 sequences and 3 documents need 82 bytes, but it has 81: truncated", "pair.idx",
            (tmp_path / "pair.idx").read_bytes()[:-1])


@pytest.mark.parametrize("head, said", [(b"", "empty"), (bytes(300), "zeros"), (b"MMID", "not a Megatron index")])
def test_an_index_that_a_crash_or_a_full_disk_left_is_no_reason_to_read_int32_as_uint16(tmp_path, head, said):
    write_megatron(tmp_path, [np.arange(100, 600)], code=4, dtype="<i4")
    assert Dataset(tmp_path / "corpus.bin", 4, 1, val_fraction=0).batch(0).min() >= 100
    (tmp_path / "corpus.idx").write_bytes(head)
    for name in ("corpus.bin", "corpus.idx", "corpus"):
        with pytest.raises(ValueError, match=rf"corpus\.idx.*{said}"):
            Dataset(tmp_path / name, 4, 1)
    (tmp_path / "corpus.idx").write_bytes(b"of another tool")
    assert Dataset(tmp_path / "corpus.bin", 4, 1).batch(0).shape == (1, 5)


def test_a_text_is_not_taken_for_its_name():
    with pytest.raises(InvalidValueError, match=r"^data is 'To be, or not.*\.\.\.: .* its bytes, text\.encode\(\),") as refused:
        Dataset("To be, or not to be\n" * 500, 8, 1)
    assert len(str(refused.value)) < 250          # and not all of the text
    with pytest.raises(OSError, match="File name too long"):      # of a Path nobody thinks that
        Dataset(Path("x" * 5000), 8, 1)
    assert Dataset(("To be, or not to be\n" * 500).encode(), 8, 1).num_tokens == 10000


def test_arguments_and_arrays_are_checked():
    good = dict(data=np.arange(1000), seq_len=10, batch=1)
    for change, message in (
        (dict(seq_len=0), "seq_len is 0"),
        (dict(batch=0), "batch is 0"),
        (dict(seq_len=2**31), "seq_len is 2147483648: at most 2147483647"),
        (dict(batch=2**31), "batch is 2147483648: at most 2147483647"),
        (dict(seed=-1), "seed is -1"), (dict(seed=2**64), "seed is 18446744073709551616"),
        (dict(seed=1 << 64), "seed"),
        (dict(split="test"), "'test'"),
        (dict(val_fraction=1.0), "val_fraction is 1"),
        (dict(vocab_size=0), "vocab_size is 0"),
        (dict(data=[]), "array is empty"),
        (dict(data=np.zeros((4, 100), int)), r"shape \[4, 100\]"),
        (dict(data=np.zeros(100)), "float64"),
        (dict(data=np.zeros(100, bool)), "bool"),
        (dict(data=np.arange(5)), "array: the train split has 5"),
        (dict(data=None), "^data is NoneType: tokens, 1-D"), (dict(data=[1]), "array: the train split has 1 token, but"),
    ):
        with pytest.raises(ValueError, match=message):
            Dataset(**{**good, **change})
    with pytest.raises(ValueError, match="step is -1"):
        Dataset(**good).batch(-1)
    assert Dataset(**good).batch(2**64 - 1).shape == (1, 11)
    with pytest.raises(ValueError, match="step is 18446744073709551616"):
        Dataset(**good).batch(2**64)
    with pytest.raises(TypeError, match="tokenizer is 3: a function from text to tokens, or None, would be right"):
        Dataset("text", 10, 1, tokenizer=3)


def test_a_fingerprint_has_the_first_token_and_the_last():
    tokens = np.arange(10_000)
    first, last = tokens.copy(), tokens.copy()
    first[0] = last[-1] = 7
    assert len({Dataset(some, 10, 1).fingerprint for some in (tokens, first, last, tokens[:-1])}) == 4
    assert Dataset(tokens.astype(np.uint16), 10, 1).fingerprint == Dataset(tokens, 20, 3, seed=5).fingerprint    # by value


def test_a_file_is_mapped_not_read(tmp_path):
    """A sparse 8 GB file opens, is sampled, and with a byte vocabulary is not even scanned."""
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 8 << 30)
    data = Dataset(path, 16, 2, vocab_size=256)
    assert data.num_tokens == 8 << 30 and max(max(data.starts(s)) for s in range(20)) > 1 << 32
    assert data.batch(0).sum() == 0


def test_stdlib_corpus(tmp_path):
    text = stdlib_corpus(max_bytes=200_000)
    assert isinstance(text, bytes) and len(text) == 200_000 and b"def " in text
    path = stdlib_corpus(tmp_path / "corpus.txt", max_bytes=100_000)
    assert path.read_bytes() == text[:100_000] and os.listdir(tmp_path) == ["corpus.txt"]
    assert len(stdlib_corpus()) > 5_000_000
    with pytest.raises(FileNotFoundError) as caught:       # it named a temporary file, which nobody had asked for
        stdlib_corpus(tmp_path / "nowhere" / "corpus.txt", max_bytes=9)
    assert caught.value.filename == str(tmp_path / "nowhere")


def test_threads_write_one_corpus(tmp_path):
    """Their temporary file was the same one, which the first to be done took away from the others."""
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(stdlib_corpus, tmp_path / "corpus.txt", 300_000) for _ in range(32)]
        assert {one.result() for one in asked} == {tmp_path / "corpus.txt"}
    assert os.listdir(tmp_path) == ["corpus.txt"] and (tmp_path / "corpus.txt").read_bytes() == stdlib_corpus(max_bytes=300_000)


def test_what_is_packed_is_no_text(tmp_path):
    """Its bytes would train as well as any others."""
    tokens = np.arange(100) % 7
    np.savez(tmp_path / "tokens.npz", tokens)
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"hello " * 100))
    (tmp_path / "text.bz2").write_bytes(bz2.compress(b"hello " * 100))
    (tmp_path / "text.xz").write_bytes(lzma.compress(b"hello " * 100))
    np.save(tmp_path / "tokens.npy", tokens)
    (tmp_path / "tokens.npy").rename(tmp_path / "tokens")
    write_llm_c(tmp_path / "llm.tokens", tokens)
    tp.export_hf(tmp_path / "hf", model=(model := tp.GPTConfig(1, 1, 8, 16, 8)), params=tp.init_params(model, seed=0))
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "wide.txt").write_text("hello " * 100, encoding="utf-16")
    for protocol in (4, 5):
        (tmp_path / f"tokens{protocol}.pkl").write_bytes(pickle.dumps(tokens.tolist(), protocol))
    with tarfile.open(tmp_path / "text.tar", "w") as tar:
        tar.add(tmp_path / "text.gz")
    for name, words in (("tokens.npz", "zip archive"), ("model.safetensors", r"a model's tensors \(safetensors\)"),
                        ("wide.txt", "text in UTF-16"), ("text.tar", "an archive of tar's"), ("llm.tokens", "an llm.c file"),
                        ("tokens4.pkl", "a pickle of Python's"), ("tokens5.pkl", "a pickle"), ("text.gz", "compressed by gzip"),
                        ("text.bz2", "compressed by bzip2"),
                        ("text.xz", "compressed by xz"), ("tokens", "does not end in .npy")):
        with pytest.raises(InvalidValueError, match=f"{name} is .*{words}.*, no text"):
            Dataset(tmp_path / name, 8, 2)
    (tmp_path / "text").write_text("PAR1 et PAR2, BZh9, PK: " * 9)
    assert Dataset(tmp_path / "text", 8, 2).kind == "text"
    for tokens in (bytes(range(256)) * 4, b"\xff\xfe" + bytes(range(256)) * 4, b"eat " * 64 + b"mustard " * 9):   # of one byte each
        (tmp_path / "bytes").write_bytes(tokens)
        assert Dataset(tmp_path / "bytes", 8, 2).kind == "text"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_text_without_its_mark_is_refused(encoding, tmp_path):
    """Half of its bytes are zeros, so that it trained to half the loss."""
    text = tp.data.stdlib_corpus(max_bytes=20_000).decode()
    for words in (text, "Ein Stück Ähnlichkeit wie “so” oder \u0100, sagte er, sei ihm nie begegnet.\n" * 40, "hello, you " * 6):
        (tmp_path / "wide").write_bytes(words.encode(encoding))
        with pytest.raises(InvalidValueError, match=r"wide is text in UTF-16 or UTF-32.*, no text: .*UTF-8"):
            Dataset(tmp_path / "wide", 8, 2)


def test_tokens_of_a_byte_each_with_as_many_zeros_as_wide_text_are_not_refused(tmp_path):
    few = np.random.default_rng(1)
    for high, low in itertools.product((2, 3, 10, 26, 64, 96, 128, 256), repeat=2):     # every other token is small, or none is
        for first, every in itertools.product((0, 32, 65), (1, 2, 4)):
            tokens = (first + few.integers(0, high, 5000)).astype(np.uint8)
            tokens[::every] = few.integers(0, low, len(tokens[::every]))
            (tmp_path / "bytes").write_bytes(tokens.tobytes())
            assert Dataset(tmp_path / "bytes", 8, 2).kind == "text", (high, low, first, every)
    for tokens in (bytes(1000), b"\0\1" * 500, b"\0 " * 20, b"a b c" * 20, b"\0" * 500 + b" " * 500):
        (tmp_path / "bytes").write_bytes(tokens)
        assert Dataset(tmp_path / "bytes", 8, 2).kind == "text"


def test_a_name_may_end_in_capitals(tmp_path):
    """They were taken for texts, whose bytes are the tokens: half of a nanoGPT token each."""
    ramp(500).tofile(tmp_path / "GPT.BIN")
    np.save(tmp_path / "a.npy", ramp(500))
    (tmp_path / "a.npy").rename(tmp_path / "A.NPY")
    write_megatron(tmp_path, [ramp(250), ramp(250)], name="pair")
    for suffix in ("bin", "idx"):
        (tmp_path / f"pair.{suffix}").rename(tmp_path / f"pair.{suffix.upper()}")
    kinds = {"GPT.BIN": "nanoGPT", "A.NPY": "npy", "pair.BIN": "Megatron", "pair.IDX": "Megatron", "pair": "Megatron"}
    (tmp_path / "GPT.Bin").symlink_to("GPT.BIN")
    (tmp_path / "A.nPy").symlink_to("A.NPY")
    write_megatron(tmp_path, [ramp(250), ramp(250)], name="mixed")
    (tmp_path / "mixed.idx").rename(tmp_path / "mixed.Idx")
    kinds |= {"GPT.Bin": "nanoGPT", "A.nPy": "npy", "mixed.bin": "Megatron", "mixed.Idx": "Megatron", "mixed": "Megatron"}
    for name, kind in kinds.items():
        data = Dataset(tmp_path / name, 8, 2)
        assert data.kind == kind and len(data) == 500, (name, data)
        with pytest.raises(InvalidValueError, match="tokenizer is for text"):
            Dataset(tmp_path / name, 8, 2, tokenizer=list)
    write_megatron(tmp_path, [ramp(100)], name="pair")       # besides: each has the index that is written as it is
    assert [Dataset(tmp_path / f"pair.{end}", 8, 2).num_tokens for end in ("bin", "idx", "BIN", "IDX")] == [100, 100, 500, 500]


def test_a_mapped_file_reaches_other_processes_without_a_copy(tmp_path):
    """What `pack` sends is the place in the file, if the tokens are one's bytes still and this mapping cannot change them."""
    ramp(50_000).tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", ramp(50_000, np.int64))
    mapped = np.memmap(tmp_path / "t.bin", np.uint16, "r")

    def sent(tokens):
        return arrived(pack({}, {"init/a": np.ones(3), "data": Dataset(tokens, 8, 2).tokens}))

    def arrived(fds):
        try:
            return os.fstat(fds[0]).st_size, unpack(*fds)[1]["data"]
        finally:
            for fd in fds:
                os.close(fd)

    for tokens in (mapped, mapped[4097:30_001], np.asarray(mapped)[1:], np.load(tmp_path / "t.npy", mmap_mode="r")):
        size, back = sent(tokens)
        assert size < 4096 and np.array_equal(back, tokens) and not back.flags.writeable and isinstance(back, np.memmap)
    for mode in ("r+", "c"):
        assert sent(np.memmap(tmp_path / "t.bin", np.uint16, mode))[0] > 100_000
    assert sent(mapped[::2])[0] > 50_000 and sent(np.array(mapped))[0] > 100_000


def test_a_file_that_was_mapped_may_be_removed_once_it_is_on_its_way(tmp_path):
    """`tp.launch` returns before the ranks have read anything: they failed where the folder was a temporary one."""
    name, new = tmp_path / "t.bin", tmp_path / "new.bin"
    ramp(50_000).tofile(name)
    mapped, before = np.memmap(name, np.uint16, "r"), sorted(os.listdir("/proc/self/fd"))
    fds = pack({}, {"data": mapped})
    ramp(9).tofile(new)
    os.replace(new, name)
    back = unpack(*fds)[1]["data"]
    assert np.array_equal(back, mapped) and back.filename is None        # what has that name now is not looked at
    copied = pack({}, {"data": mapped})
    assert len(copied) == 1 and np.array_equal(unpack(*copied)[1]["data"], mapped)
    name.unlink()
    os.mkfifo(name)
    waiting = pack({}, {"data": mapped})                                 # opening one waits for who writes to it
    name.unlink()
    removed = pack({}, {"data": mapped})
    assert len(removed) == len(waiting) == 1 and np.array_equal(unpack(*fds)[1]["data"], mapped)
    for fd in (*fds, *copied, *waiting, *removed):
        os.close(fd)
    del back        # a mapping has a descriptor, too
    assert sorted(os.listdir("/proc/self/fd")) == before

    ramp(50_000).tofile(name)
    fds = pack({}, {"data": np.memmap(name, np.uint16, "r")})
    assert unpack(*fds)[1]["data"].filename == str(name)                 # which a data set watches
    os.truncate(name, 1000)
    with pytest.raises(InvalidValueError, match=r"t\.bin was cut off to 1000 bytes while the run began: a file that nobody"):
        unpack(*fds)
    for fd in fds:
        os.close(fd)


def test_all_of_a_file_is_read_once(tmp_path, monkeypatch):
    """Tokens that may be anything, of a file that is larger than the memory: each rank read them twice again before its first step,
    and so did what is checked before anybody plans."""
    times, check = [], terapipe_c.data.check_tokens
    monkeypatch.setattr(terapipe_c.data, "check_tokens", lambda *given: times.append(given[1]) or check(*given))
    np.save(tmp_path / "tokens.npy", ramp(900, np.int32))
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=16)
    plan = tp.plan(model, tp.Cluster(2), batch=2, seq_len=16, planner="uniform", executable=True)
    given = inspect.signature(tp.launch).parameters.items()
    others = {name: one.default for name, one in given if name not in ("plan", "data", "steps", "out", "processes", "progress")}
    check_run(tmp_path / "tokens.npy", 1, tmp_path / "run", seq_len=16, batch=2, **{**others, "eval_every": 1})
    assert times == []
    run = tp.launch(plan, tmp_path / "tokens.npy", 1, eval_every=1, processes=False, progress=False).wait(60)
    assert times == [256] and len(run.history) == 1


def test_what_a_file_need_not_be_read_for_is_refused_before(tmp_path, monkeypatch):
    """Other data than a checkpoint's, or too little to evaluate on: all tokens were read first, of a large file for minutes."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=16)
    plan = tp.plan(model, tp.Cluster(2), batch=2, seq_len=16, planner="uniform", executable=True)
    given = dict(processes=False, progress=False, out=tmp_path / "run", lr_schedule="constant")
    tp.launch(plan, ramp(900, np.int32), 1, **given).wait(60)
    monkeypatch.setattr(terapipe_c.data, "check_tokens", lambda *given: pytest.fail("they are read"))
    with pytest.raises(InvalidValueError, match="the data does not continue the checkpoint's: num_tokens was 900 and is now 800"):
        tp.launch(plan, ramp(800, np.int32), 2, resume=True, **given)
    with pytest.raises(InvalidValueError, match="the val split has 9 of its 900 tokens"):
        tp.launch(plan, ramp(900, np.int32), 2, eval_every=1, val_fraction=0.01, processes=False, progress=False)
