"""What goes out of the package and comes in: tokens that a model writes, and Hugging Face folders."""

import errno
import json
import os
import pickle
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference as ref

from terapipe_c import Cluster, GPTConfig, InvalidTypeError, InvalidValueError, checkpoint, launch, plan, tensorfile
from terapipe_c.checkpoint import load_checkpoint, model_dict, param_shapes, save_checkpoint
from terapipe_c.generate import _Cache, _draw, generate, logits
from terapipe_c.interop import export_hf, import_hf, open_params
from terapipe_c.tensorfile import OnDemand, read_layout, read_tensor, same_values, write_file

MODEL = ref.Model(n_layer=2, n_head=2, n_embd=8, vocab_size=13, block_size=9)


def float_params(model, seed=0):
    return {name: array.astype(np.float32) for name, array in ref.random_params(model, seed).items()}


def same(left, right):
    return list(left) == list(right) and all(
        (left[n] == right[n]).all() and left[n].dtype == right[n].dtype for n in left
    )


@pytest.mark.parametrize("change", [dict(), dict(bias=False), dict(tie_weights=False)])
def test_cached_logits_equal_the_oracle_one_token_at_a_time(change):
    model = ref.Model(**{**model_dict(MODEL), "n_layer": 3, **change})
    params = float_params(model)
    tokens = np.random.default_rng(1).integers(0, 13, 9)
    expected, _ = ref.forward(model, params, tokens[None])
    cache = _Cache(params, model)
    got = [cache.forward(tokens[:4])] + [cache.forward([t]) for t in tokens[4:]]
    np.testing.assert_allclose(got, expected[0, 3:], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(logits(params, model, tokens), expected[0, -1], rtol=2e-4, atol=2e-4)
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        params[name] *= np.float32(0.01)        # a variance near LayerNorm's epsilon
    expected, _ = ref.forward(model, params, tokens[None])
    np.testing.assert_allclose(logits(params, model, tokens), expected[0, -1], rtol=2e-4, atol=2e-4)


def test_generate():
    params = float_params(MODEL)
    prompt, greedy = [1, 2, 3], []
    for _ in range(6):  # 3 + 6 = block_size: no window has moved yet
        greedy.append(int(ref.forward(MODEL, params, np.array([prompt + greedy]))[0][0, -1].argmax()))
    assert list(generate(params, MODEL, prompt, 6, temperature=0)) == greedy
    assert list(generate(params, MODEL, prompt, 6, temperature=5.0, top_k=1)) == greedy
    long = generate(params, MODEL, prompt, 40, seed=3)
    assert (
        len(long) == 40
        and (long == generate(params, MODEL, prompt, 40, seed=3)).all()
        and 0 <= long.min() <= long.max() < 13
    )
    assert (long != generate(params, MODEL, prompt, 40, seed=4)).any()
    text = generate(params, MODEL, bytes(prompt), 5)
    assert isinstance(text, bytes) and len(text) == 5 and isinstance(generate(params, MODEL, "\x01", 2), str)
    assert len(generate(params, MODEL, prompt, 0)) == 0
    for bad, message in (([], "empty"), ([13], "token 0 is 13"), ([1, -1], "token 1 is -1")):
        with pytest.raises(ValueError, match=message):
            generate(params, MODEL, bad, 1)


@pytest.mark.parametrize("block_size", [1, 2, 9])
def test_a_full_window_moves_on_by_half(block_size):
    """As its text says: with the last half of it (of one token: that one), read again from position 0."""
    model = ref.Model(**{**model_dict(MODEL), "block_size": block_size})
    params = {name: 4 * array for name, array in float_params(model).items()}      # positions tell
    prompt, greedy = [int(t) for t in np.random.default_rng(2).integers(0, 13, 14)], []
    window = prompt[-block_size:]
    for _ in range(30):
        greedy.append(int(logits(params, model, window).argmax()))
        window = [*window, greedy[-1]]
        if len(window) > block_size:
            window = window[-(block_size // 2 or 1):]
    assert generate(params, model, prompt, 30, temperature=0).tolist() == greedy and (block_size == 1 or len(set(greedy)) > 2)


def test_generate_has_the_defaults_and_bounds_of_its_text():
    params = float_params(MODEL)
    default = generate(params, MODEL, [1])
    assert len(default) == 256 and (default == generate(params, MODEL, [1], 256, 0.8, None, 0)).all()
    assert len(generate(params, MODEL, [1], 2, seed=2**64 - 1)) == 2
    with pytest.raises(ValueError, match="seed is 18446744073709551616"):
        generate(params, MODEL, [1], 2, seed=2**64)
    assert (generate(params, MODEL, [1], 9, top_k=10**9) == default[:9]).all()
    for vocab in (256, 257):
        wide = ref.Model(**{**model_dict(MODEL), "vocab_size": vocab})
        if vocab == 256:
            assert len(generate(float_params(wide), wide, b"\xff", 2)) == 2
        else:
            with pytest.raises(ValueError, match="the vocabulary has 257 tokens, so text needs the tokenizer"):
                generate(float_params(wide), wide, b"\xff", 2)
    with pytest.raises(ValueError, match="10 tokens; a window has 1 .. 9"):
        logits(params, MODEL, [1] * 10)
    for given, words in ((("gpt2", [1]), "model is 'gpt2'"), ((MODEL,), "prompt is None"), (([1],), "model is missing")):
        with pytest.raises(TypeError, match=words):
            generate(params, *given)


def test_draws_follow_the_temperature():
    row = np.log(np.float32([0.1, 0.2, 0.7]))
    rng = np.random.default_rng(0)
    counts = np.bincount([_draw(row, 1.0, None, rng) for _ in range(20000)], minlength=3) / 20000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.015)
    counts = np.bincount([_draw(row, 0.5, 2, rng) for _ in range(20000)], minlength=3) / 20000
    np.testing.assert_allclose(counts, [0, 0.04 / 0.53, 0.49 / 0.53], atol=0.015)


@pytest.mark.parametrize("change", [dict(), dict(bias=False), dict(tie_weights=False)])
def test_transformers_loads_our_export_and_gives_the_oracles_logits(tmp_path, change):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = ref.Model(**{**model_dict(MODEL), **change})
    params = float_params(model)
    export_hf(tmp_path, model=model, params=params)
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    tokens = np.random.default_rng(1).integers(0, 13, (2, 9))
    with torch.no_grad():
        got = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(got, ref.forward(model, params, tokens)[0], rtol=2e-4, atol=2e-4)
    theirs.save_pretrained(tmp_path / "back")
    back = import_hf(tmp_path / "back")
    assert all((back.params[n] == params[n]).all() for n in params) and back.model.tie_weights == model.tie_weights


def hf_folder(tmp_path, **config):
    """A folder as transformers writes it, of MODEL, and its parameters."""
    params = float_params(MODEL)
    export_hf(tmp_path, model=MODEL, params=params)
    found = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**found, **config}))
    return params


def test_export_fills_in_biases_and_refuses_what_does_not_fit(tmp_path):
    bare = ref.Model(**{**model_dict(MODEL), "bias": False})
    export_hf(tmp_path / "bare", model=bare, params=float_params(bare))
    layout = read_layout(tmp_path / "bare" / "model.safetensors")
    assert list(layout.tensors) == list(param_shapes(MODEL)) and layout.metadata == {"format": "pt"}
    assert not read_tensor(
        tmp_path / "bare" / "model.safetensors", layout.tensors["transformer.h.0.attn.c_attn.bias"]
    ).any()
    assert "lm_head.weight" not in layout.tensors
    params = float_params(MODEL)
    for half in ({"model": MODEL}, {"params": params}):
        with pytest.raises(ValueError, match="both model and params"):
            export_hf(tmp_path / "x", **half)
    with pytest.raises(ValueError, match=r"wte.weight has shape \[12, 8\]"):
        export_hf(
            tmp_path / "x",
            model=MODEL,
            params={**params, "transformer.wte.weight": params["transformer.wte.weight"][:12]},
        )
    params.pop("transformer.h.1.ln_2.bias")
    with pytest.raises(ValueError, match=r"lack transformer\.h\.1\.ln_2\.bias"):
        export_hf(tmp_path / "x", model=MODEL, params=params)


def test_import_takes_bare_names_masks_a_stored_tie_shards_and_half_floats(tmp_path):
    params = hf_folder(tmp_path)
    assert same(import_hf(tmp_path).params, params) and import_hf(tmp_path).model.n_layer == 2
    bare = {name.removeprefix("transformer."): array for name, array in params.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 9, 9), np.float32)  # the causal mask of old versions
    bare["h.1.attn.masked_bias"] = np.float32([-1e4])
    bare["lm_head.weight"] = params["transformer.wte.weight"]
    write_file(tmp_path / "model.safetensors", bare)
    assert same(import_hf(tmp_path).params, params)
    names = sorted(bare)
    write_file(tmp_path / "model-1.safetensors", {n: bare[n] for n in names[:9]})
    write_file(tmp_path / "model-2.safetensors", {n: bare[n] for n in names[9:]})
    where = {n: f"model-{1 + (i >= 9)}.safetensors" for i, n in enumerate(names)}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(import_hf(tmp_path).params, params)


@pytest.mark.parametrize("rows", [slice(None), slice(12)])
def test_a_stored_tie_that_is_none_is_refused(tmp_path, rows):
    """transformers 5 keeps such a head for itself: without it the same folder was another model here."""
    params = hf_folder(tmp_path)
    head = params["transformer.wte.weight"] + np.float32(0.5)
    write_file(tmp_path / "model.safetensors", {**params, "lm_head.weight": head[rows]})
    with pytest.raises(ValueError, match=r"model.safetensors: lm_head.weight is not transformer.wte.weight.*_embeddings = false"):
        import_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    if rows == slice(None):
        assert same(import_hf(tmp_path).params, {**params, "lm_head.weight": head})


@pytest.mark.parametrize("dtype, exact", [("BF16", 8), ("F16", 11)])
def test_half_floats_are_widened(tmp_path, dtype, exact):
    params = hf_folder(tmp_path)
    header, pieces, end = {}, [], 0
    for name, array in params.items():
        bits = (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else array.astype(np.float16)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + bits.nbytes]}
        pieces.append(bits.tobytes())
        end += bits.nbytes
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))
    back = import_hf(tmp_path).params
    for name, array in params.items():
        assert back[name].dtype == np.float32
        np.testing.assert_allclose(back[name], array, rtol=2.0 ** (1 - exact), atol=1e-7)


@pytest.mark.parametrize("same_numbers", [True, False])
@pytest.mark.parametrize("shards", [True, False])
def test_import_takes_no_tensor_that_is_there_twice_for_one_of_both(tmp_path, same_numbers, shards):
    """By both of its names, or in two shards: the last one was taken, unseen."""
    params = float_params(MODEL)
    export_hf(tmp_path, model=MODEL, params=params)
    again = {"h.1.mlp.c_fc.weight": params["transformer.h.1.mlp.c_fc.weight"] + (not same_numbers)}
    if shards:
        for name, arrays in (("a", params), ("b", again)):
            write_file(tmp_path / f"{name}.safetensors", arrays)
        (tmp_path / "model.safetensors").unlink()
        where = dict.fromkeys(params, "a.safetensors") | dict.fromkeys(again, "b.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        write_file(tmp_path / "model.safetensors", params | again)
    if same_numbers:
        assert same(import_hf(tmp_path).params, params)
    else:
        with pytest.raises(InvalidValueError, match=r"tensor h\.1\.mlp\.c_fc\.weight is there twice, and not the same"):
            import_hf(tmp_path)


@pytest.mark.parametrize("config, message", [
    ({"model_type": "llama"}, "model_type is 'llama'"), ({"activation_function": "relu"}, "activation_function is 'relu'"),
    ({"n_inner": 100}, "n_inner is 100"), ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ({"n_layer": 3}, "transformer.h.2.ln_1.weight is missing"), ({"n_layer": 1}, "transformer.h.1.* belongs to no"),
    ({"vocab_size": 14}, r"wte.weight has shape \[13, 8\]"),
])  # fmt: skip
def test_import_refuses_what_is_another_model(tmp_path, config, message):
    hf_folder(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        import_hf(tmp_path)


@pytest.mark.parametrize("config, message", [
    ({"n_embd": None}, "n_embd is None"), ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon is '1e-5'"),
    ({"n_layer": 1.5}, "n_layer is 1.5"), ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
    ({"n_head": 3}, "n_head is 3, which does not divide n_embd = 8"), ({"n_layer": 2**40}, "n_layer is 1099511627776"),
])  # fmt: skip
def test_import_names_the_file_and_what_in_a_config_is_wrong(tmp_path, config, message):
    hf_folder(tmp_path, **config)
    with pytest.raises(InvalidValueError, match=rf"config\.json: {message}"):
        import_hf(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", '{"weight_map": {"a": 3}}', "{", "\xff"])
def test_import_names_an_index_that_is_none(tmp_path, text):
    hf_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidValueError, match=r"index\.json: no index of safetensors files"):
        import_hf(tmp_path)


def test_what_was_exported_is_imported_also_beside_the_index_of_an_earlier_save(tmp_path):
    """transformers looks for the single file first."""
    hf_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "old.safetensors")
    names = list(read_layout(tmp_path / "old.safetensors").tensors)
    index = {"weight_map": dict.fromkeys(names, "old.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    newer = {name: array + 1 for name, array in float_params(MODEL).items()}
    export_hf(tmp_path, model=MODEL, params=newer)
    assert same(import_hf(tmp_path).params, newer)


def test_export_refuses_what_would_be_another_model(tmp_path):
    """A deeper model's first layers, biases of a model that has none, and what NumPy would cast in silence."""
    params, name = float_params(MODEL), "transformer.wte.weight"
    bare = ref.Model(**{**model_dict(MODEL), "bias": False})
    for model, given, message in ((MODEL, {**params, "transformer.h.2.ln_1.weight": params["transformer.ln_f.weight"]}, "h.2.ln_1"),
                                  (bare, params, "ln_1.bias"), (MODEL, {**params, name: params[name].tolist()}, "is list"),
                                  (MODEL, {**params, name: params[name].astype(int)}, "is int64"),
                                  (MODEL, {**params, name: params[name] * 1j}, "is complex64")):
        with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
            export_hf(tmp_path / "x", model=model, params=given)
    assert not (tmp_path / "x").exists()


def test_an_export_that_the_disk_does_not_take_leaves_what_was_there(tmp_path, monkeypatch):
    params = hf_folder(tmp_path)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        export_hf(tmp_path, model=MODEL, params={name: array + 1 for name, array in params.items()})
    assert caught.value.filename == str(tmp_path / "model.safetensors")
    assert same(import_hf(tmp_path).params, params) and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(OSError, match="No space"):
        export_hf(tmp_path / "new/er/hf", model=MODEL, params=params)
    assert not (tmp_path / "new").exists()        # the folders around it stayed
    with pytest.raises(OSError, match="too long"):
        export_hf(tmp_path / "new/er" / ("x" * 300), model=MODEL, params=params)
    assert not (tmp_path / "new").exists()
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/precious").write_text("mine")
    with pytest.raises(OSError, match="No space"):      # "keep" itself, which was taken for new, and removed
        export_hf(tmp_path / "nothere/../keep", model=MODEL, params=params)
    assert (tmp_path / "keep/precious").read_text() == "mine" and not (tmp_path / "nothere").exists()


@pytest.mark.parametrize("shapes", [{}, {"scalar": ()}, {"none": (0, 3)}, {"one": (1, 1), "none": (0,), "two": (2,)}])
def test_small_and_empty_tensors_are_read_as_they_were_written(tmp_path, shapes):
    arrays = {name: np.full(shape, 3, np.float32) for name, shape in shapes.items()}
    sums = write_file(tmp_path / "t.safetensors", arrays)
    layout = read_layout(tmp_path / "t.safetensors")
    assert list(layout.tensors) == list(sums) == list(arrays) and layout.nbytes == (tmp_path / "t.safetensors").stat().st_size
    for name, array in arrays.items():
        read = read_tensor(tmp_path / "t.safetensors", layout.tensors[name])
        assert read.shape == array.shape and np.array_equal(read, array) and sums[name] == tensorfile.checksum(array.tobytes())


def test_values_are_the_same_by_type_and_number():
    one = np.float32([1, np.nan])
    for left, right, right_so in ((one, one.copy(), True), (one, one.astype(np.float64), False), (one, [1.0, np.nan], False),
                                  ([1.0], np.ones(1), False), (np.ones(1), 1.0, False), ({"a": one}, {"a": one.copy()}, True),
                                  ({"a": one}, {"b": one}, False), ({"a": one}, {"a": one, "b": 1}, False), ({"a": 1}, 1, False),
                                  (1, {"a": 1}, False), ({}, None, False), (2, 2.0, True), (np.arange(2), np.arange(3), False)):
        assert same_values(left, right) is right_so, (left, right)
    read = []
    few = OnDemand(["a", "b"], lambda name: read.append(name) or one)
    assert "a" in few and "c" not in few and len(few) == 2 and list(few) == ["a", "b"] and read == []
    assert few["a"] is one and few["a"] is one and read == ["a", "a"]


def test_threads_may_export_to_one_folder(tmp_path):
    """They had one temporary file, which the first to be done renamed: the others ended for want of it."""
    params = float_params(MODEL)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(export_hf, tmp_path / "hf", model=MODEL, params=params) for _ in range(48)]
        assert {one.result() for one in asked} == {tmp_path / "hf"}
    assert same(import_hf(tmp_path / "hf").params, params) and len(list((tmp_path / "hf").iterdir())) == 2


def test_tensors_stay_where_their_config_cannot_be_written(tmp_path):
    params = float_params(MODEL)
    export_hf(tmp_path, model=MODEL, params=params)
    before = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(IsADirectoryError):
        export_hf(tmp_path, model=MODEL, params={name: array + 1 for name, array in params.items()})
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_what_the_links_of_a_folder_lead_to_stays(tmp_path):
    """A cache of models has folders of links to files that other folders lead to as well."""
    export_hf(tmp_path / "blobs", model=MODEL, params=float_params(MODEL))
    before = {path.name: path.read_bytes() for path in (tmp_path / "blobs").iterdir()}
    (tmp_path / "ours").mkdir()
    for name in before:
        (tmp_path / "ours" / name).symlink_to(tmp_path / "blobs" / name)
    other = ref.Model(**{**model_dict(MODEL), "n_layer": 1})
    export_hf(tmp_path / "ours", model=other, params=float_params(other))
    assert {path.name: path.read_bytes() for path in (tmp_path / "blobs").iterdir()} == before
    assert import_hf(tmp_path / "ours").model.n_layer == 1 and not any(path.is_symlink() for path in (tmp_path / "ours").iterdir())


def test_no_run_nor_checkpoint_is_exported_over(tmp_path):
    """A run's config.json was replaced, without which nothing could resume it, and a checkpoint's tensors, which its state.json
    then called damaged."""
    bare = ref.Model(**{**model_dict(MODEL), "bias": False})
    saved = save_checkpoint(tmp_path / "run" / "checkpoints", bare, float_params(bare))
    (tmp_path / "run" / "config.json").write_text('{"data": {}}')
    for folder, words in ((saved, "a checkpoint is in this folder"), (tmp_path / "run", "no config of transformers, but a run's")):
        with pytest.raises(FileExistsError, match=words):
            export_hf(folder, tmp_path / "run")
    assert same(load_checkpoint(saved).params, float_params(bare))
    assert [p.name for p in tmp_path.joinpath("run").iterdir() if p.is_file()] == ["config.json"]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(" \n")
    for _ in range(2):      # over nothing, and over an export
        assert import_hf(export_hf(tmp_path / "hf", saved)).model.bias


def test_a_checkpoint_is_exported_tensor_by_tensor(tmp_path, monkeypatch):
    """All of it was read first: to convert a model took a machine that holds it."""
    params, about = float_params(MODEL), []
    saved = save_checkpoint(tmp_path / "run", MODEL, params)
    monkeypatch.setattr(checkpoint, "read_tensor", lambda path, spec: about.append(spec.name) or read_tensor(path, spec))
    monkeypatch.setattr(tensorfile, "checksum", lambda data: about.append(len(data)) or "")
    assert same(import_hf(export_hf(tmp_path / "hf", tmp_path / "run")).params, params)
    assert about == [word for name, array in params.items() for word in (name, array.nbytes)]
    whole = save_checkpoint(tmp_path / "whole", MODEL, params, {"exp_avg": params, "exp_avg_sq": params})
    (whole / "optimizer.safetensors").unlink()      # of which neither an export nor a run that begins from it reads anything
    assert same(dict(import_hf(export_hf(tmp_path / "rest", whole)).params), params) and same(dict(open_params(whole)[2]), params)
    (saved / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:-1] + b"?")
    for folder in ("hf", "new"):
        with pytest.raises(ValueError, match=f"tensor {list(params)[-1]} is damaged"):
            export_hf(tmp_path / folder, saved)
    assert not (tmp_path / "new").exists()
    assert same(import_hf(tmp_path / "hf").params, params) and len(list((tmp_path / "hf").iterdir())) == 2


def test_a_checkpoint_is_of_one_model_and_has_its_own_parameters(tmp_path):
    """Parameters besides a checkpoint were left out without a word, and those of 2 heads computed and exported as of 4."""
    model = GPTConfig(**model_dict(MODEL))
    params = float_params(MODEL, 1)
    export_hf(tmp_path / "hf", save_checkpoint(tmp_path / "run", MODEL, params), model=model)
    saved, read = load_checkpoint(tmp_path / "run"), import_hf(tmp_path / "hf")
    heads = GPTConfig(**{**model_dict(MODEL), "n_head": 4})
    for one in (saved, read):
        with pytest.raises(InvalidValueError, match="params is given besides a checkpoint, which has its own: one of the two"):
            export_hf(tmp_path / "other", one, params=float_params(MODEL, 2))
        with pytest.raises(InvalidValueError, match="model has n_head 4, and the parameters are of one with 2: that one, or none"):
            export_hf(tmp_path / "other", one, model=heads)
        with pytest.raises(InvalidValueError, match="model has n_head 4"):
            generate(one, heads, [1], n=2)
        assert (generate(one, model, [1], n=2) == generate(one, [1], n=2)).all()
    assert not (tmp_path / "other").exists()


def test_what_was_read_compares_by_value(tmp_path):
    """The `==` of dataclasses and tuples was an error of NumPy's: it fails on arrays."""
    params = float_params(MODEL, 1)
    moments = {kind: params for kind in ("exp_avg", "exp_avg_sq")}
    for seed in (1, 2):
        save_checkpoint(tmp_path / f"run{seed}", MODEL, params, moments if seed == 1 else None)
        export_hf(tmp_path / f"hf{seed}", model=MODEL, params=float_params(MODEL, seed))
    one, again, other = load_checkpoint(tmp_path / "run1"), load_checkpoint(tmp_path / "run1"), load_checkpoint(tmp_path / "run2")
    assert one == again and one == pickle.loads(pickle.dumps(one)) and one != other and one != 3
    shutil.copytree(tmp_path / "run1", tmp_path / "copy", symlinks=True)
    assert one == load_checkpoint(tmp_path / "copy")
    again.params["transformer.wte.weight"] = again.params["transformer.wte.weight"] * 1.5
    assert one != again
    here, there = import_hf(tmp_path / "hf1"), import_hf(tmp_path / "hf2")
    assert here == import_hf(tmp_path / "hf1") and here != there and not here != pickle.loads(pickle.dumps(here)) and here != 3


def test_import_names_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json is here: a folder with that and safetensors.*would be right"):
        import_hf(tmp_path)
    hf_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pickle"):
        import_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: no JSON"):
        import_hf(tmp_path)


def test_a_folder_that_may_not_be_looked_into_is_not_said_to_have_no_config(tmp_path, monkeypatch):
    def denied(path, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))

    hf_folder(tmp_path)
    monkeypatch.setattr(os, "lstat", denied)    # as root, whom no mode stops, sees it
    with pytest.raises(PermissionError, match="config.json"):
        import_hf(tmp_path)


def test_what_is_no_folder_of_transformers_is_said_to_be_none(tmp_path):
    (tmp_path / "ckpt.pt").write_bytes(b"PK\x03\x04")
    for path, words in ((tmp_path / "ckpt.pt", "this is a file"), ("openai-community/gpt2", "nothing is here")):
        with pytest.raises(FileNotFoundError, match=f"{words}: a folder with a config.json"):
            import_hf(path)
    folder = export_hf(tmp_path / "hf", model=MODEL, params=float_params(MODEL))
    with pytest.raises(FileNotFoundError, match=r"this is a transformers folder: tp\.import_hf"):
        load_checkpoint(folder)
    assert import_hf(folder).model.n_layer == MODEL.n_layer


def test_a_folder_without_biases_is_a_model_without(tmp_path):
    model = ref.Model(**{**model_dict(MODEL), "bias": False})
    params = float_params(model)
    write_file(export_hf(tmp_path / "hf", model=model, params=params) / "model.safetensors", params)
    found = import_hf(tmp_path / "hf")
    assert not found.model.bias and same(found.params, params)


def full(monkeypatch, first):
    """From the `first` of its files on that are brought there, the disk is full."""
    real, files = os.fsync, []

    def fsync(fd):
        files.append(fd)
        if len(files) > first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return files


@pytest.mark.parametrize("first", [0, 1])
def test_a_full_disk_leaves_the_export_that_was_there(monkeypatch, tmp_path, first):
    """The tensors were replaced, and of the new config.json there was no room: a model of 2 heads with another's 1. Where they are
    links, as in a cache of models, what was there makes no room."""
    one, other = (GPTConfig(**{**model_dict(MODEL), "n_head": heads}) for heads in (1, 2))
    export_hf(tmp_path / "hf", model=one, params=float_params(MODEL))
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with monkeypatch.context() as patch:
        full(patch, first)
        with pytest.raises(OSError, match=f"No space left on device: .*{('model.safetensors', 'config.json')[first]}"):
            export_hf(tmp_path / "hf", model=other, params=float_params(MODEL, 1))
        with pytest.raises(OSError, match="No space left on device"):
            export_hf(tmp_path / "new" / "hf", model=other, params=float_params(MODEL, 1))
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before and not (tmp_path / "new").exists()
    export_hf(tmp_path / "hf", model=other, params=float_params(MODEL, 1))
    assert import_hf(tmp_path / "hf").model == other


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_full_disk_leaves_a_run_that_was_to_go_on_as_it_was(monkeypatch, tmp_path, first):
    """Its config.json was that of a resume which had not begun: nobody had trained by what it said of steps and learning rate."""
    model, data, out = GPTConfig(**model_dict(MODEL)), np.arange(400) % 13, tmp_path / "run"
    whole, cut = (plan(model, Cluster(num_devices=1), 2, 8, planner="uniform", slicing=slices) for slices in (1, 2))
    options = dict(processes=False, progress=False, lr_schedule="constant", out=out)
    launch(whole, data, 3, checkpoint_every=2, **options).wait()
    files = [path for path in out.iterdir() if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    with monkeypatch.context() as patch:
        full(patch, first)
        with pytest.raises(OSError, match=r"No space left on device: .*(config.json|metrics.jsonl|plan.json)"):
            launch(cut, data, 5, resume=True, **options)
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before and len(files) == 4
    assert len(launch(cut, data, 5, resume=True, **options).wait().history) == 2
