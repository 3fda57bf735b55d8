"""The checkpoint room: the file format, writing together, whole-or-nothing, checksums by name."""

import errno
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import reference as ref

import terapipe_c as tp
from terapipe_c.checkpoint import (
    CheckpointWriter,
    find_checkpoint,
    load_checkpoint,
    model_dict,
    param_shapes,
    save_checkpoint,
    verify_checkpoint,
    write_tensors,
)
from terapipe_c.tensorfile import lay_out, read_layout, read_tensor, write_file

MODEL = ref.Model(n_layer=2, n_head=2, n_embd=8, vocab_size=13, block_size=9)


def float_params(model, seed=0):
    return {name: array.astype(np.float32) for name, array in ref.random_params(model, seed).items()}


def moments(model, seed=5):
    return {"exp_avg": float_params(model, seed), "exp_avg_sq": float_params(model, seed + 1)}


def save(folder, step, seed=0, **options):
    return save_checkpoint(folder, MODEL, float_params(MODEL, seed), moments(MODEL), step, **options)


def same(left, right):
    return list(left) == list(right) and all(
        (left[n] == right[n]).all() and left[n].dtype == right[n].dtype for n in left
    )


def step_names(folder):
    return sorted(p.name for p in Path(folder).iterdir())


# ---- names and layout --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_package_and_the_oracle(bias, tied):
    model = ref.Model(3, 2, 8, 13, 9, bias, tied)
    assert param_shapes(model) == ref.shapes(model)
    rows = tp._core.model_params(tuple(map(int, model_dict(model).values())))
    core = {name: (n, m) if matrix else (m,) for name, n, m, matrix, _ in rows}
    assert core == param_shapes(model) and list(core) == list(param_shapes(model))
    config = tp.GPTConfig(**model_dict(model))
    assert {n: a.shape for n, a in tp.init_params(config).items()} == param_shapes(model)
    assert sum(np.prod(s) for s in param_shapes(model).values()) == config.num_params


def test_offsets_follow_from_the_model_alone_and_leave_no_holes():
    layout = CheckpointWriter.plan(MODEL)
    assert layout == CheckpointWriter.plan(ref.Model(**model_dict(MODEL)))
    for file in layout.files:
        end = len(file.head)
        assert end % 8 == 0
        for spec in file.tensors.values():
            assert spec.offset == end and spec.nbytes == 4 * np.prod(spec.shape)
            end += spec.nbytes
        assert end == file.nbytes
    assert len(layout.tensors) == 3 * len(param_shapes(MODEL))


# ---- round trips -------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    params, state = float_params(MODEL), {"step": 50, "seed": 7}
    path = save_checkpoint(
        tmp_path / "run", MODEL, params, moments(MODEL), 50, seed=7, data_state=state, hyper={"lr": 6e-4}
    )
    assert path == tmp_path / "run" / "step-00000050" and step_names(path) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert step_names(tmp_path / "run") == ["latest", "step-00000050"]
    for where in (tmp_path / "run", path, tmp_path / "run" / "latest", str(path)):
        back = load_checkpoint(where)
        assert same(back.params, params) and same(back.optimizer["exp_avg"], moments(MODEL)["exp_avg"])
        assert same(back.optimizer["exp_avg_sq"], moments(MODEL)["exp_avg_sq"])
        assert (back.step, back.seed, back.data_state, back.hyper) == (50, 7, state, {"lr": 6e-4})
        assert back.model_dict == model_dict(MODEL)
    wanted = tp.generate(params, MODEL, [1, 2], 5)
    for made in (tp.generate(back, MODEL, [1, 2], 5), tp.generate(back, [1, 2], n=5), tp.generate(back, prompt=[1, 2], n=5)):
        assert (made == wanted).all()


def test_a_rank_reads_only_its_own(tmp_path):
    path = save(tmp_path, 1)
    names = ["transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.bias"]
    back = load_checkpoint(path, names=names, optimizer=False)
    assert list(back.params) == names and back.optimizer is None
    damage(path / "model.safetensors", "transformer.h.0.ln_1.weight")
    assert same(load_checkpoint(path, names=names).params, {n: float_params(MODEL)[n] for n in names})
    with pytest.raises(ValueError, match="no parameter h.9"):
        load_checkpoint(path, names=["h.9"])


def test_without_optimizer(tmp_path):
    save_checkpoint(tmp_path, MODEL, float_params(MODEL))
    back = load_checkpoint(tmp_path)
    assert back.optimizer is None and back.step == 0 and same(back.params, float_params(MODEL))


RANK = """
    import sys, json
    import numpy as np
    sys.path.insert(0, sys.argv[1])
    import reference as ref
    from terapipe_c.checkpoint import CheckpointWriter, write_tensors
    folder, rank = sys.argv[2], int(sys.argv[3])
    model = ref.Model(n_layer=2, n_head=2, n_embd=8, vocab_size=13, block_size=9)
    layout = CheckpointWriter.plan(model)
    everything = {n: a.astype(np.float32) for n, a in ref.random_params(model, 0).items()}
    for kind, seed in (("exp_avg", 5), ("exp_avg_sq", 6)):
        everything.update({f"{kind}.{n}": a.astype(np.float32) for n, a in ref.random_params(model, seed).items()})
    mine = sorted(layout.tensors)[rank::3]
    sums = {}
    for name in mine:
        sums.update(write_tensors(folder, layout, {name: everything[name]}, sync=name == mine[-1]))
    print(json.dumps(sums))
"""


def test_processes_write_together_what_one_would_have_written(tmp_path):
    alone = save(tmp_path / "alone", 3)
    writer = CheckpointWriter(tmp_path / "run", MODEL)
    folder = writer.begin(3)
    assert folder.name == f".step-00000003.tmp-{os.getpid()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), str(Path(__file__).parent), str(folder), str(rank)],
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    sums = {}
    for rank in ranks:
        sums.update(json.loads(rank.communicate()[0]))
        assert rank.returncode == 0
    path = writer.finish(sums)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (path / name).read_bytes() == (alone / name).read_bytes(), name


def test_safetensors_package_reads_ours_and_we_read_its(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    path = save(tmp_path, 1)
    assert same(
        dict(sorted(safetensors.load_file(path / "model.safetensors").items())),
        dict(sorted(float_params(MODEL).items())),
    )
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.int64),
        "c": np.float16([[1.5]]),
    }
    safetensors.save_file(arrays, tmp_path / "theirs.safetensors", metadata={"who": "them"})
    layout = read_layout(tmp_path / "theirs.safetensors")
    assert layout.metadata == {"who": "them"}
    for name, array in arrays.items():
        back = read_tensor(tmp_path / "theirs.safetensors", layout.tensors[name])
        assert (back == array).all() and back.dtype == array.dtype and back.shape == array.shape


# ---- whole or nothing --------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_latest_points_at_the_last(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
        assert os.readlink(tmp_path / "latest") == f"step-{step:08d}"
    assert step_names(tmp_path) == ["latest", "step-00000030", "step-00000040"]
    save(tmp_path, 35, keep=3)  # resumed from an earlier one: never prune what was just written
    assert step_names(tmp_path) == ["latest", "step-00000030", "step-00000035", "step-00000040"]
    save(tmp_path, 36, keep=1)
    assert step_names(tmp_path) == ["latest", "step-00000036"] and load_checkpoint(tmp_path).step == 36
    assert ", after 36 steps, " in repr(load_checkpoint(tmp_path)) and "after 36 steps" in load_checkpoint(tmp_path)._repr_html_()


def test_what_was_written_last_is_the_newest_whatever_its_step(tmp_path):
    for step in (40, 30, 35):  # resumed from an earlier one
        save(tmp_path, step)
    assert step_names(tmp_path) == ["latest", "step-00000030", "step-00000035"]
    save(tmp_path, 10)
    assert step_names(tmp_path) == ["latest", "step-00000010", "step-00000035"]
    (tmp_path / "latest").unlink()
    assert load_checkpoint(tmp_path).step == 10


@pytest.mark.parametrize("pointer", [b"\xff\xfe", b"step-0\0", b"s" * 5000, b"", b"/", b"step-00000010\n"])
def test_a_pointer_file_that_says_nothing_is_no_pointer(tmp_path, pointer):
    """Where a file system has no symbolic links `latest` is a file, and what is in it may be damaged."""
    save(tmp_path, 10)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_bytes(pointer)
    assert load_checkpoint(tmp_path).step == 10


def test_a_folder_where_the_pointer_goes_is_found_before_anything_is_written(tmp_path):
    """cp -rL makes a folder of the link `latest`; it was noticed only when the checkpoint was complete."""
    save(tmp_path, 10)
    (tmp_path / "latest").unlink()
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "latest")
    before = step_names(tmp_path)
    with pytest.raises(IsADirectoryError, match="a folder is where the link .* removing it, would be right: '.*/latest'"):
        save(tmp_path, 20)
    assert step_names(tmp_path) == before and load_checkpoint(tmp_path).step == 10
    (tmp_path / "file").touch()
    with pytest.raises(tp.StorageError, match="the folder of checkpoints is '.*/file': a folder that can be written"):
        save(tmp_path / "file", 20)


def test_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 10, seed=0)
    save(tmp_path, 10, seed=1)
    assert same(load_checkpoint(tmp_path).params, float_params(MODEL, 1)) and step_names(tmp_path) == [
        "latest",
        "step-00000010",
    ]


def test_nothing_is_seen_before_finish_and_abort_leaves_the_old_one(tmp_path):
    save(tmp_path, 10)
    writer = CheckpointWriter(tmp_path, MODEL)
    folder = writer.begin(20)
    write_tensors(folder, writer.layout, float_params(MODEL))
    assert load_checkpoint(tmp_path).step == 10
    with pytest.raises(RuntimeError, match="still being written"):
        writer.begin(30)
    writer.abort()
    assert step_names(tmp_path) == ["latest", "step-00000010"]
    writer.begin(20)
    sums = write_tensors(writer._folder, writer.layout, float_params(MODEL))
    with pytest.raises(ValueError, match=r"not written by any rank, the first is exp_avg\.transformer\.wte\.weight"):
        writer.finish(sums)
    assert step_names(tmp_path) == ["latest", "step-00000010"]
    with pytest.raises(ValueError, match="plain JSON"):
        save(tmp_path, 20, hyper={"lr": float("nan")})
    assert step_names(tmp_path) == ["latest", "step-00000010"] and load_checkpoint(tmp_path).step == 10


def test_a_writer_killed_at_any_point_leaves_the_old_one_and_the_next_cleans_up(tmp_path):
    save(tmp_path, 10)
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_checkpoint as t
        writer = t.CheckpointWriter({str(tmp_path)!r}, t.MODEL)
        folder = writer.begin(20)
        t.write_tensors(folder, writer.layout, t.float_params(t.MODEL))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -9
    assert len(step_names(tmp_path)) == 3 and load_checkpoint(tmp_path).step == 10
    save(tmp_path, 20)
    assert step_names(tmp_path) == ["latest", "step-00000010", "step-00000020"] and load_checkpoint(tmp_path).step == 20


def test_a_full_disk_is_found_before_anything_is_written(tmp_path):
    """A checkpoint far larger than this disk: the real refusal, and the last good one stays."""
    save(tmp_path, 10)
    stat = os.statvfs(tmp_path)
    width = int((stat.f_bavail * stat.f_frsize / 12 / 12 / 4) ** 0.5) // 2 * 2 + 2048
    large = ref.Model(n_layer=4, n_head=2, n_embd=width, vocab_size=256, block_size=64)
    writer = CheckpointWriter(tmp_path, large)
    with pytest.raises(OSError, match=f"checkpoint of {writer.layout.nbytes} bytes") as caught:
        writer.begin(20)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path)
    assert step_names(tmp_path) == ["latest", "step-00000010"] and load_checkpoint(tmp_path).step == 10


FULL = """
    import errno, os, sys
    sys.path.insert(0, sys.argv[1])
    import test_checkpoint as t
    run, spare = sys.argv[2] + "/run", int(sys.argv[3])
    t.save(run, 10)
    free = os.statvfs(run).f_bavail * os.statvfs(run).f_frsize
    with open(sys.argv[2] + "/filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - spare)
    try:
        t.save(run, 20)
        sys.exit(6)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    assert t.step_names(run) == ["latest", "step-00000010"] and t.load_checkpoint(run).step == 10
    os.unlink(sys.argv[2] + "/filler")
    t.save(run, 20)
    assert t.load_checkpoint(run).step == 20
    sys.exit(7)
"""


@pytest.mark.parametrize("spare", [0, 4096, 16384, "all but state.json"])
def test_a_really_full_disk_leaves_the_last_good_one(tmp_path, spare):
    """On a 128 KB tmpfs of its own, filled to different marks: nothing fits, the tensors do not, only state.json does not."""
    if spare == "all but state.json":
        spare = sum(-(-file.nbytes // 4096) * 4096 for file in CheckpointWriter.plan(MODEL).files)
    argv = [sys.executable, "-c", textwrap.dedent(FULL), str(Path(__file__).parent), str(tmp_path), str(spare)]
    mount = 'mount -t tmpfs -o size=128k none "$0" && exec "$@"'
    probe = ["unshare", "-m", "sh", "-c", mount, str(tmp_path), "true"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace here (needs root)")
    done = subprocess.run([*probe[:-1], *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr


def test_a_file_that_cannot_be_reserved_is_refused_by_name(tmp_path):
    """The kernel's own refusal (here the process's file size limit) also leaves nothing behind."""
    save(tmp_path, 10)
    code = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_checkpoint as t
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            t.CheckpointWriter({str(tmp_path)!r}, t.MODEL).begin(20)
        except OSError as error:
            assert "bytes wanted" in str(error) and "model.safetensors" in str(error), error
            sys.exit(7)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == 7
    assert step_names(tmp_path) == ["latest", "step-00000010"] and load_checkpoint(tmp_path).step == 10
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_wrong_arrays_are_refused_by_name(tmp_path):
    writer = CheckpointWriter(tmp_path, MODEL)
    folder, name = writer.begin(0), "transformer.wpe.weight"
    good = float_params(MODEL)[name]
    for array, message in (
        (good.astype(np.float64), "float64"),
        (good[:4], r"\[4, 8\]"),
        (np.asfortranarray(good), "strided"),
    ):
        with pytest.raises(ValueError, match=f"{name} has shape .*{message}"):
            write_tensors(folder, writer.layout, {name: array})
    with pytest.raises(ValueError, match="h.7 is no tensor"):
        write_tensors(folder, writer.layout, {"h.7": good})


# ---- damage ------------------------------------------------------------------------------------------------------------


def damage(path, name):
    spec = read_layout(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(spec.offset + spec.nbytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "file, name",
    [
        ("model.safetensors", "transformer.h.1.attn.c_attn.bias"),
        ("optimizer.safetensors", "exp_avg_sq.transformer.wte.weight"),
    ],
)
def test_one_flipped_bit_names_file_and_tensor(tmp_path, file, name):
    path = save(tmp_path, 1)
    damage(path / file, name)
    with pytest.raises(ValueError, match=f"{file}: tensor {name} is damaged"):
        load_checkpoint(path)


def test_damage_is_refused_naming_the_file(tmp_path):
    def refused(message, file, change, kind=ValueError):
        path = save(tmp_path / "run", 1)
        content = (path / file).read_bytes()
        change(path / file, content)
        with pytest.raises(kind, match=message):
            load_checkpoint(path)
        return content

    def write(what):
        return lambda path, content: path.write_bytes(what(content))

    refused("model.safetensors.*truncated", "model.safetensors", write(lambda c: c[:-1]))
    refused("model.safetensors.*truncated or damaged", "model.safetensors", write(lambda c: c + b"x"))
    refused("model.safetensors.*not a safetensors", "model.safetensors", write(lambda c: b""))
    refused("model.safetensors.*not a safetensors", "model.safetensors", write(lambda c: b"GGUF" * 100))
    refused("optimizer.safetensors: missing", "optimizer.safetensors", lambda path, content: path.unlink())
    refused("state.json: damaged, no JSON", "state.json", write(lambda c: c[:-20]))
    refused("state.json: damaged: its own", "state.json", write(lambda c: c.replace(b'"step": 1', b'"step": 2')))
    refused("state.json: no state", "state.json", write(lambda c: b'{"format": "something else"}'))
    refused("state.json: format version 9", "state.json", write(lambda c: c.replace(b'"version": 1', b'"version": 9')))
    other = ref.Model(2, 2, 8, 14, 9)
    foreign = save_checkpoint(tmp_path / "other", other, float_params(other)) / "model.safetensors"
    refused(
        r"model.safetensors: tensor transformer.wte.weight is F32 \[14, 8\].*needs F32 \[13, 8\]",
        "model.safetensors",
        write(lambda c: foreign.read_bytes()),
    )
    params = float_params(MODEL)
    del params["transformer.ln_f.bias"]
    refused(
        "model.safetensors: tensor transformer.ln_f.bias is missing",
        "model.safetensors",
        lambda path, content: write_file(path, params),
    )
    refused(
        "model.safetensors: tensor extra does not belong",
        "model.safetensors",
        lambda path, content: write_file(path, {**float_params(MODEL), "extra": np.zeros(3, np.float32)}),
    )


def test_a_damaged_checkpoint_names_the_newest_other_that_is_complete(tmp_path):
    save(tmp_path, 10)
    file = save(tmp_path, 20) / "model.safetensors"
    (tmp_path / "step-00000015").mkdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="where .*/step-00000010 is whole, moving .*/step-00000020 away would be right"):
        verify_checkpoint(file.parent)
    file = save(tmp_path, 30) / "optimizer.safetensors"
    assert len(list(tmp_path.glob("step-*/state.json"))) == 2   # of three
    file.write_bytes(file.read_bytes()[:-1] + b"?")       # of which a run that resumes reads as much
    with pytest.raises(ValueError, match=r"tensor exp_avg_sq\.\S+ is damaged"):
        verify_checkpoint(file.parent)


def test_missing_checkpoints_name_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="this is a file: the run's folder, or a step-... of it, would be right"):
        load_checkpoint("plan.json")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint in this folder"):
        load_checkpoint(tmp_path)
    path = save(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match=f"this is a file: {path} would be right") as error:
        load_checkpoint(path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=f"this is a file: {tmp_path} would be right"):
        load_checkpoint("plan.json")
    assert error.value.filename == str(path / "model.safetensors") and load_checkpoint(path).step == 1
    (path / "state.json").unlink()
    with pytest.raises(ValueError, match=r"state\.json: missing"):
        load_checkpoint(path)


def test_nothing_is_saved_in_a_checkpoint(tmp_path):
    """It was, and who loaded that path afterwards had what was there before."""
    path = save(tmp_path, 1)
    for given in (path, tmp_path / "latest"):
        with pytest.raises(ValueError, match=f"path is {given}, a checkpoint, .*: the folder that it is in, {tmp_path}, would"):
            save(given, 1, seed=1)
    save(tmp_path, 1, seed=1)
    assert same(load_checkpoint(path).params, float_params(MODEL, 1))


def test_a_run_is_found_without_its_pointer_or_with_a_pointer_file(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path) == second
    (tmp_path / "latest").write_text(first.name + "\n")
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "latest") == first


def test_headers_that_lie_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"

    def refused(message, header, data=b"\0" * 16):
        text = json.dumps(header).encode() if not isinstance(header, bytes) else header
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        with pytest.raises(ValueError, match=rf"t\.safetensors: {message}"):
            read_layout(path)

    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    refused("not a safetensors file: its header", b"[1, 2]")
    with pytest.raises(ValueError, match="null: not a safetensors file: no regular file"):
        read_layout("/dev/null")
    refused("not a safetensors file: its header", b"\xff\xfe{}")
    refused("tensor a has no sound entry", {"a": {"dtype": "F32"}})
    refused("tensor a has no sound entry", {"a": 3})
    for dtype in ("F8", ["F32"], {}, None):
        refused("tensor a has dtype ", {"a": {**entry, "dtype": dtype}})
    refused("not a safetensors file: its header is no JSON", b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}")
    refused("tensor a of F32 .* does not fit", {"a": {**entry, "shape": [5]}})
    refused("tensor a of F32 .* does not fit", {"a": {**entry, "shape": [-2, -2]}})
    refused("tensor b starts at byte", {"a": entry, "b": entry})
    refused("tensor a starts at byte", {"a": {**entry, "data_offsets": [4, 20]}}, b"\0" * 20)
    refused("its header describes", {"a": entry}, b"\0" * 24)
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_layout(path)


def test_no_mutated_header_gets_past_or_raises_anything_but_a_clear_error(tmp_path):
    """3,000 headers with random bytes changed, cut or doubled: a ValueError that names the file, or a sound layout."""
    layout = lay_out("t", {"a": (3, 4), "b": (5,), "c.d": (2, 2, 2)})
    good, rng, path, refused = (
        layout.head + bytes(layout.nbytes - len(layout.head)),
        np.random.default_rng(0),
        tmp_path / "t.st",
        0,
    )
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at, kind = int(rng.integers(0, len(layout.head))), rng.integers(0, 3)
            if kind == 0:
                bad[at] = int(rng.choice(list(b'0123456789-{}[],:"aF \xff')))
            elif kind == 1:
                del bad[at]
            else:
                bad[at:at] = bad[at : at + 3]
        path.write_bytes(bad)
        try:
            found = read_layout(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert sum(spec.nbytes for spec in found.tensors.values()) <= found.nbytes == len(bad)
            assert all(read_tensor(path, spec).shape == spec.shape for spec in found.tensors.values())
    assert refused > 2000


def test_what_the_system_writes_or_reads_in_pieces_is_whole(tmp_path, monkeypatch):
    """Linux moves 2 GB a call at most, and less where a disk is remote."""
    params, at_once, opened = float_params(MODEL), os.pwrite, open

    class Slow:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, at):
            self.file.seek(at)

        def readinto(self, view):
            return self.file.readinto(view[:9])

    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: at_once(fd, data[:70], at))
    monkeypatch.setattr(tp.tensorfile, "open", lambda *args, **how: Slow(opened(*args, **how)), raising=False)
    read = load_checkpoint(save_checkpoint(tmp_path, MODEL, params, moments(MODEL)))
    assert all(np.array_equal(read.params[name], params[name]) for name in params)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_tensors_that_the_disk_does_not_take_are_named(tmp_path, monkeypatch, call):
    """Where reserving took no space (a quota, a file system that copies on write), the write finds the disk full."""
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = CheckpointWriter(tmp_path, MODEL)
    folder = writer.begin(10)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space") as caught:
        write_tensors(folder, writer.layout, float_params(MODEL))
    assert caught.value.filename == str(folder / "model.safetensors")
    writer.abort()
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "new/run", 10)
    assert list(tmp_path.iterdir()) == []       # the folders that were made for it stayed


def test_a_state_that_the_disk_does_not_take_is_named(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        tp.checkpoint._write_state(tmp_path / "state.json", {})
    assert caught.value.filename == str(tmp_path / "state.json")
