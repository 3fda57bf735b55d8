"""cuDNN's attention, where TERAPIPE_ATTENTION asks for it, against a libcudnn that computes the very graph that it is given
(tests/cuda/fake_cudnn.c), on the emulated device; and our declarations against cuDNN's header where that is installed."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import cuda_emu
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

BF16 = 1
# tests/cuda/fake_cudnn.h
NO_ENGINE, NO_ODD, NOT_THE_SAME, TOP_LEFT, PACKED_STATISTICS, FAILS_TO_RUN, NO_HANDLE = (1 << i for i in range(7))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_emu.fake_cudnn(folder=tmp_path_factory.mktemp("fake"))


def emulated(library: object, case: str, **environment: str):
    """What `case`, a function of this file, finds in a process of its own: a library is loaded once a process."""
    paths = os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    ours = {"TERAPIPE_CUDA_MODULE": str(cuda_emu.build()), "TERAPIPE_CUDNN": str(library), "PYTHONPATH": paths,
            "TERAPIPE_ATTENTION": "cudnn"}  # fmt: skip
    whole = {**os.environ, **ours, **environment}
    whole.pop("PYTHONSAFEPATH", None)
    ran = subprocess.run([sys.executable, __file__, case], env=whole, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


# ---- numbers ----------------------------------------------------------------------------------------------------------------

SHAPES = [  # B, H, D, slices, elements between rows
    (1, 1, 64, [1, 1, 62, 1], 0),
    (2, 2, 40, [70, 5, 125], 8),
    (1, 2, 128, [33, 64, 53], 0),
    (2, 1, 80, [150], 24),
    (3, 2, 64, [1, 130, 7], 0),
]


def errors():
    """Of cuDNN's forward and of our backward of what it wrote, against float64: poisoned as in test_cuda_attention."""
    import test_cuda_attention as kernels

    library = cuda_emu.library()
    library.tp_error_message.restype = ctypes.c_char_p
    module = cuda_emu.emulated()
    workspace = kernels.aligned(1 << 20, np.uint8)
    plans = module.cudnn(kernels.address(workspace).value, workspace.nbytes)

    class Provided(kernels.Attention):
        def call(self, name, rows, context, *arrays):
            if name != "forward":
                return super().call(name, rows, context, *arrays)
            B, H, D, T = self.shape
            module.cudnn_attention(plans, (B, H, D, rows, context, T, *self.width), tuple(a.value for a in arrays))
            return None

    found = []
    for B, H, D, slices, gap in SHAPES:
        run = Provided(library, BF16, B, H, D, sum(slices), gap)
        arrays = [run.qkv, run.dqkv, run.o, run.d_o, run.lse, run.delta]
        for array in arrays:  # the emulated GPU's memory: beyond it its kernels fail
            assert library.tp_simt_range_add(kernels.address(array), ctypes.c_size_t(array.nbytes)) == 0
        run.run(slices)
        for array in arrays:
            library.tp_simt_range_remove(kernels.address(array))
        wanted = run.wanted()
        found.append({name: float(np.linalg.norm(got - wanted[name]) / np.linalg.norm(wanted[name]))
                      for name, got in run.outputs().items()})  # fmt: skip
        assert np.isnan(run.decode(np.ascontiguousarray(run.o[..., H * D :]))).all(), "written between rows"
    return found


def test_the_graph_agrees_with_float64(fake):
    for shape, found in zip(SHAPES, emulated(fake, "errors"), strict=True):
        for name, error in found.items():
            assert error <= (1e-5 if name == "lse" else 3e-3), (shape, name, error)


# ---- in training ------------------------------------------------------------------------------------------------------------

RAGGED = [(2, [7, 1, 22]), (1, [30])]


def plans_run() -> int:
    try:
        return ctypes.CDLL(os.environ["TERAPIPE_CUDNN"]).fake_cudnn_count(1)
    except OSError:  # a test of where there is none
        return 0


def engine_of(dtype="bf16", reproducible=False, slicing=RAGGED, steps=3):
    """Losses of these steps, the gradients of the first, what was said of attention, and how often cuDNN ran; or an error."""
    import test_cuda_stage as stage

    import terapipe_c as tp

    model, params, tokens = stage.problem(sum(batch for batch, _ in slicing), sum(slicing[0][1]), n_embd=32)
    program = tp.schedules.gpipe(1, len(slicing), [len(slices) for _, slices in slicing]).lower(True)
    runs = plans_run()

    def work(engine):
        told = [engine.run(tokens, step=1, update=False)[0]]
        grads = {name: grad.astype(float).tolist() for name, grad in engine.export("grads").items()}
        told += [engine.run(tokens, step=step, lr=1e-2)[0] for step in range(1, steps + 1)] + [engine.evaluate(tokens)]
        return told, grads, engine.caveats, engine.peak_memory_bytes

    try:
        ((told, grads, caveats, peak),) = stage.ranks_do(model, [(0, model.num_blocks)], slicing, program, work, params, dtype,
                                                          reproducible=reproducible)
    except tp.ExecutionError as error:
        return {"error": str(error)}
    return {"told": told, "grads": grads, "caveats": caveats, "peak": peak, "runs": plans_run() - runs}


def apart(one, two):
    """Of all gradients together."""
    left, right = ([np.array(found["grads"][name]).ravel() for name in sorted(found["grads"])] for found in (one, two))
    left, right = np.concatenate(left), np.concatenate(right)
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


def training():
    found = {"cudnn": engine_of(), "again": engine_of()}
    os.environ["TERAPIPE_CUDA_GRAPHS"] = "0"
    found["eager"] = engine_of()
    del os.environ["TERAPIPE_CUDA_GRAPHS"]
    os.environ["TERAPIPE_ATTENTION"] = "own"
    found["own"] = engine_of()
    os.environ["TERAPIPE_ATTENTION"] = "cudnn"
    found["reproducible"] = engine_of(reproducible=True)
    found["float32"] = engine_of(dtype="float32")
    bits = {name: (one["told"], one["grads"]) for name, one in found.items()}
    return {"same": [bits[name] == bits["cudnn"] for name in ("again", "eager", "own")],
            "apart": apart(found["cudnn"], found["own"]), "losses": [found[name]["told"] for name in ("cudnn", "own")],
            "own kept": bits["reproducible"] != bits["cudnn"],
            **{key: {name: one[key] for name, one in found.items()} for key in ("peak", "caveats", "runs")}}  # fmt: skip


def test_training_with_cudnn(fake):
    """Other bits than ours, within bf16's rounding; the same in each run, by graphs or not; no byte more; and it is said."""
    found = emulated(fake, "training")
    assert found["same"] == [True, True, False] and found["own kept"], found["same"]
    assert 0 < found["apart"] <= 1e-2
    np.testing.assert_allclose(*found["losses"], rtol=3e-3)
    peaks = found["peak"]
    assert peaks["cudnn"] == peaks["own"] == peaks["again"]
    runs = found["runs"]
    assert runs["cudnn"] > 0 and runs["own"] == runs["reproducible"] == runs["float32"] == 0
    caveats = found["caveats"]
    words = "the forward of attention is cuDNN 9.19.0's for 4 of 4 shapes of a slice, as TERAPIPE_ATTENTION asks"
    assert caveats["cudnn"] == caveats["eager"] == [words] and caveats["own"] == []
    assert "reproducible=True keeps the package's own" in caveats["reproducible"][0] and len(caveats["reproducible"]) == 1
    assert "this is float32" in caveats["float32"][0]


def test_what_is_made_again_or_swapped_is_the_same_by_cudnn(fake):
    """Bits and bytes of the stage's own tests, with cuDNN in the place of our kernel."""
    paths = os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "TERAPIPE_ATTENTION": "cudnn", "TERAPIPE_CUDNN": str(fake), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "(recompute or swap) and bf16",
               str(ROOT / "tests/test_cuda_stage.py")]  # fmt: skip
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout + ran.stderr


def faults():
    library, found = ctypes.CDLL(os.environ["TERAPIPE_CUDNN"]), {}
    library.fake_cudnn_set.argtypes = [ctypes.c_int, ctypes.c_int64]
    os.environ["TERAPIPE_ATTENTION"] = "own"
    own = engine_of(steps=1)
    os.environ["TERAPIPE_ATTENTION"] = "cudnn"
    for name, (fault, workspace) in {
        "right": (0, 0), "no engine": (NO_ENGINE, 256), "odd": (NO_ODD, 256), "not the same": (NOT_THE_SAME, 256),
        "top left": (TOP_LEFT, 256), "packed": (PACKED_STATISTICS, 256), "greedy": (0, (32 << 20) + 1), "fits": (0, 32 << 20),
        "fails": (FAILS_TO_RUN, 256), "no handle": (NO_HANDLE, 256),
    }.items():  # fmt: skip
        library.fake_cudnn_set(fault, workspace)
        one = engine_of(steps=1)
        ours = (one.get("told"), one.get("grads")) == (own["told"], own["grads"])
        found[name] = {"error": one.get("error"), "caveats": one.get("caveats"), "ours": ours,
                       "peak": one.get("peak") == own["peak"]}  # fmt: skip
    os.environ["TERAPIPE_ATTENTION"] = "fastest"
    import terapipe_c as tp

    try:
        engine_of(steps=0)
    except tp.InvalidValueError as error:
        found["unknown"] = str(error)
    return found


def test_what_cudnn_cannot_do_is_ours_and_said(fake):
    """Of a plan that is refused, wants too much, fails, or computes something else."""
    found = emulated(fake, "faults")
    for name in ("right", "not the same", "fits"):
        one = found[name]
        assert one["error"] is None and not one["ours"] and "for 4 of 4 shapes" in one["caveats"][0], (name, one)
    told = {"no engine": "no engine takes the graph", "top left": "away from our kernel's", "packed": "lse is nan",
            "greedy": "engine 2 wants 33554433 bytes of workspace, of which there are 33554432",
            "fails": "running a plan of attention: status 5000"}  # fmt: skip
    for name, words in told.items():
        (caveat,) = found[name]["caveats"]
        whole = {"top left": "for 2 of 4", "packed": "for 1 of 4"}.get(name, "for 0 of 4")  # of no context; of no other slices
        assert words in caveat and "the package's own for the others" in caveat and whole in caveat, (name, caveat)
        assert found[name]["ours"] == ("for 0 of 4" in whole)
    (odd,) = found["odd"]["caveats"]
    assert "for 2 of 4 shapes" in odd and "an odd number of queries" in odd and "7 tokens after 0" in odd
    assert all(one["peak"] for name, one in found.items() if name not in ("no handle", "unknown"))
    assert "cannot be begun with: status 1008" in found["no handle"]["error"]
    assert 'TERAPIPE_ATTENTION is "fastest": "own" (or nothing), "mma", "wgmma" or "cudnn" would be right' in found["unknown"]


def refused():
    return engine_of(steps=0).get("error")


def listed():
    import terapipe_c as tp

    (found,) = (library for library in tp.cuda.versions().libraries if library.name == "cuDNN")
    return [found.path, found.version, found.why_not]


def test_a_library_that_cannot_be_used_is_named(fake, tmp_path):
    """Missing, too old, known to be wrong, or without a function: before the first step, by name, version and need."""
    lacks = cuda_emu.fake_cudnn("-DFAKE_CUDNN_LACKS", folder=tmp_path)
    assert "lacks cudnnGetLastErrorString" in emulated(lacks, "refused")
    assert "which does not load" in emulated(tmp_path / "none.so", "refused")
    for version, words in (("90501", "version 9.5.1; 9.6.0 or newer is needed"),
                           ("91000", "version 9.10.0, whose attention is known to be wrong; 9.10.2 or newer is needed"),
                           ("91001", "version 9.10.1, whose attention"), ("91002", None)):
        told = emulated(fake, "refused", FAKE_CUDNN_VERSION=version)
        assert told is None if words is None else words in told and str(fake) in told, (version, told)
        path, number, why = emulated(fake, "listed", FAKE_CUDNN_VERSION=version)  # as doctor tells it
        assert bool(number) == bool(path) == (words is None) and (words or "") in why, (version, path, number, why)


# ---- declarations -----------------------------------------------------------------------------------------------------------


def test_our_declarations_are_cudnns() -> None:
    """Where its header is installed: every constant and prototype of cuda/dl_cudnn.h."""
    nvidia = [Path(p) / "nvidia" for p in sys.path if p]
    if named := os.environ.get("TERAPIPE_CUDNN"):
        nvidia.append(Path(named).resolve().parents[2])
    headers = next((f for n in nvidia if (f := n / "cudnn/include").is_dir()), None)
    if headers is None:
        pytest.skip("cudnn_graph.h is not installed (pip install nvidia-cudnn-cu13)")
    cuda = [n / "cu13/include" for n in nvidia]
    cuda += [Path("/usr/local/cuda/include"), *Path("/usr/local").glob("cuda-13*/include")]
    command = ["gcc", "-std=c11", "-fsyntax-only", "-I.", f"-isystem{headers}", *(f"-isystem{f}" for f in cuda if f.is_dir())]
    alone = subprocess.run([*command, "-xc", "-"], input="#include <cudnn_graph.h>\n", capture_output=True, text=True)
    if alone.returncode:  # headers of CUDA that it needs are elsewhere, or not here
        pytest.skip(f"cudnn_graph.h does not compile by itself: {alone.stderr.strip().splitlines()[0]}")
    ran = subprocess.run([*command, "tests/cudnn_same.c"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
