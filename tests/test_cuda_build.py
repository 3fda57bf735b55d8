"""The CUDA backend on machines that lack something: it builds where nvcc is, loads where no driver is, and says what is
missing; device errors through the emulated device; no kernel spills registers; libraries found at run time."""

import ctypes
import gc
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import terapipe_c as tp
from terapipe_c import doctor

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
    pytest.skip("no CUDA sources beside the tests, or no gcc", allow_module_level=True)

import cuda_emu  # noqa: E402

HOME = Path(tp.__file__).parent
BUILT = any(HOME.glob("_cuda.*.so"))
needs_built = pytest.mark.skipif(not BUILT, reason="_cuda is not built (no nvcc here)")


@pytest.fixture
def emulated():
    module = cuda_emu.emulated()
    gc.collect()  # engines of earlier tests, in cycles with the errors that they raised, hold memory of this small device
    yield module
    module.emu_break(0)
    module.emu_machine()


@pytest.fixture
def module_is(monkeypatch):
    return lambda path: monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(path))


def python(script: str, **environment: str) -> str:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                         env={**os.environ, **environment})  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.strip()


def shared(folder: Path, name: str, source: str) -> Path:
    """A shared library made of a C text."""
    (folder / "source.c").write_text(source)
    path = folder / name
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", path, folder / "source.c"], check=True)
    return path


# ---- building ------------------------------------------------------------------------------------------------------------


def setup_py(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "TERAPIPE_"))}
    script = f"import runpy\ns = runpy.run_path('setup.py', run_name='setup_py')\n{code}"
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, env=kept | environment)


def fake_nvcc(folder: Path, text: str) -> Path:
    (folder / "bin").mkdir()
    for name, body in (("nvcc", f"echo '{text}'"), ("g++", "exit 0")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def test_wishes_of_the_build(tmp_path):
    names = "print([e.name for e in s['modules']()])"
    assert "_cuda" not in setup_py(names, TERAPIPE_CUDA="0").stdout
    bad = setup_py(names, TERAPIPE_CUDA="yes")
    assert bad.returncode and "TERAPIPE_CUDA is 'yes'; it must be 0, 1 or auto" in bad.stderr
    old = fake_nvcc(tmp_path, "Cuda compilation tools, release 12.4, V12.4.1")
    refused = setup_py(names, TERAPIPE_CUDA="1", CUDA_HOME=str(old))
    assert refused.returncode and "nvcc is release 12.4; 13.0 or newer is needed" in refused.stderr
    left_out = setup_py(names, TERAPIPE_CUDA="auto", CUDA_HOME=str(old))
    assert left_out.returncode == 0 and "_core" in left_out.stdout and "_cuda" not in left_out.stdout


@pytest.mark.parametrize(("body", "told"), [
    ("\x7fELF of another processor", "does not run: Exec format error"),
    ("#!/bin/sh\necho no driver >&2; exit 3", "--version failed (3): no driver"),
    ("#!/bin/sh\nkill -9 $$", "--version failed (-9)"),
    ("#!/bin/sh\necho release next, V1", "is release next; 13.0 or newer is needed"),
    ("#!/bin/sh\nprintf 'release 12.4\\377, V12'", "13.0 or newer is needed"),
])  # fmt: skip
def test_an_nvcc_that_does_not_run_costs_the_backend_alone(tmp_path, body, told):
    home = fake_nvcc(tmp_path, "")
    (home / "bin/nvcc").write_text(body)
    names = "print([e.name for e in s['modules']()])"
    left_out = setup_py(names, CUDA_HOME=str(home))
    assert left_out.returncode == 0 and "_core" in left_out.stdout and "_cuda" not in left_out.stdout, left_out.stderr
    refused = setup_py(names, TERAPIPE_CUDA="1", CUDA_HOME=str(home))
    assert refused.returncode and f"_cuda cannot be built: {home}/bin/nvcc" in refused.stderr and told in refused.stderr


def test_an_old_nvcc_hides_no_newer_one(tmp_path):
    for name, release in (("old", "12.4"), ("new", "13.0")):
        (tmp_path / name).mkdir()
        fake_nvcc(tmp_path / name, f"Cuda compilation tools, release {release}, V{release}.1")
        for what in ("lib64/libcudart_static.a", "include/cuda_runtime_api.h"):
            (tmp_path / name / what).parent.mkdir()
            (tmp_path / name / what).write_text("")
    both = f"{tmp_path}/old/bin:{tmp_path}/new/bin"
    assert f"{tmp_path}/new/bin/nvcc" in setup_py("print(s['find_cuda']())", PATH=both).stdout
    last = setup_py("print(s['find_cuda']())", PATH=f"{tmp_path}/old/bin").stdout
    assert "release 12.4; 13.0 or newer is needed" in last or "nvcc'" in last  # there is another in a wheel or /usr/local


def test_a_missing_piece_is_named(tmp_path):
    half = fake_nvcc(tmp_path, "Cuda compilation tools, release 13.0, V13.0.88")
    bare = f"{half}/bin"  # no other nvcc in sight
    # nor the wheels of NVIDIA's that PyTorch brings
    alone = "import sys, sysconfig; sys.path.clear(); sysconfig.get_path = lambda kind: '/none'; print(s['find_cuda']())"
    refused = setup_py(alone, CUDA_HOME=str(half), PATH=bare)
    if not Path("/usr/local/cuda").exists():
        assert "was not found beside" in refused.stdout and "nvidia-cuda-runtime" in refused.stdout
    (tmp_path / "bin/nvcc").unlink()
    none = setup_py(alone, PATH=bare).stdout
    assert "nvcc was not found in CUDA_HOME" in none or Path("/usr/local/cuda").exists()


def test_the_wheels_of_the_python_that_pip_installs_for_are_found(tmp_path):
    """`pip install .` builds with that Python, but takes its packages out of sys.path: they were not looked at, and the error
    said to install what was there."""
    home = tmp_path / "site/nvidia/cu13"
    home.mkdir(parents=True)
    fake_nvcc(home, "Cuda compilation tools, release 13.0, V13.0.88")
    for what in ("lib/libcudart_static.a", "include/cuda_runtime_api.h"):
        (home / what).parent.mkdir()
        (home / what).write_text("")
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    hidden = f"import sys, sysconfig; sys.path.clear(); sysconfig.get_path = lambda kind: {str(tmp_path / 'site')!r}"
    found = setup_py(f"{hidden}; print(s['find_cuda']())", PATH=str(tmp_path))
    assert found.stdout.strip() == str((f"{home}/bin/nvcc", f"{home}/include", f"{home}/lib")), found.stderr


def test_kernels_fuse_only_where_they_say_so():
    """nvcc fuses multiplications and additions unless told not to, and in one body of a kernel other than in the next."""
    told = setup_py("print(s['nvcc_command']('nvcc', 'include', 'x.cu', 'x.o'))").stdout
    assert "'-fmad=false'" in told
    library = ROOT / "benchmarks/gpu_library.py"
    assert not library.exists() or 'setup["NVCC_NUMBERS"]' in library.read_text()


@needs_built
def test_the_library_of_the_row_kernels_loads():
    """What gpu-check's questions about them load: it has all that it calls. Without a GPU nothing of it can be called."""
    script = ROOT / "benchmarks/gpu_library.py"
    if not script.exists() or shutil.which("nvcc") is None:
        pytest.skip("no benchmarks beside the tests, or no nvcc in PATH")
    made = subprocess.run([sys.executable, str(script), "90"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert python(f"import ctypes; print(ctypes.CDLL({made.stdout.splitlines()[-1]!r}).tp_cuda_layernorm is not None)") == "True"


def test_a_file_that_nvcc_refuses_is_named(tmp_path):
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho 'x.cu(7): error: no such thing'\nexit 2\n")
    (tmp_path / "nvcc").chmod(0o755)
    line = f"['{tmp_path}/nvcc', '-c', 'x.cu']"
    refused = setup_py(f"s['run_nvcc']({line}, None)").stderr.splitlines()
    assert any("exit status 2 on x.cu" in text for text in refused) and "no such thing" in refused[-1]


def test_every_cuda_source_is_built():
    listed = set(eval(setup_py("print(s['cuda_sources']())").stdout))
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "cuda").glob("*.c*")} <= listed
    emulated = set(eval(setup_py("print(s['cuda_sources'](emulated=True))").stdout))
    assert {p for p in listed if p.endswith(".cu")} <= emulated  # every kernel is emulated
    assert "cuda/device.c" not in emulated and "cuda/emu/device.c" in emulated


def test_no_kernel_spills_registers():
    """ptxas's own account of every kernel on every GPU it was compiled for, kept by setup.py beside the objects."""
    logs = {}
    sources = sorted((ROOT / "cuda").glob("*.cu"))
    for source in sources:
        for log in ROOT.glob(f"build/temp*/cuda/{source.stem}.ptxas"):
            made_of = log.with_suffix(".d").read_text().replace("\\\n", " ").partition(":")[2].split()
            ours = [ROOT / p for p in made_of if not p.startswith("/")]
            if all(p.exists() and p.stat().st_mtime <= log.stat().st_mtime for p in ours):
                logs[source.name] = log.read_text()
    if len(logs) < len(sources):
        missing = sorted({s.name for s in sources} - logs.keys())
        pytest.skip(f"no fresh log of nvcc for {', '.join(missing)} in build/ (python setup.py build_ext makes it)")
    spilled, kernels, archs = [], 0, set()
    for name, text in logs.items():
        for entry in text.split("Compiling entry function ")[1:]:
            kernel, arch = re.match(r"'(\w+)' for '(\w+)'", entry).groups()
            stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry).groups())
            kernels, archs = kernels + 1, archs | {arch}
            if stores or loads:
                spilled.append(f"{name}: {kernel} on {arch} spills {stores} bytes, loads {loads}")
    assert not spilled, "\n".join(spilled)
    assert kernels >= len(archs) * len(sources) and {"sm_80", "sm_90", "sm_100", "sm_120"} <= archs


def test_wgmma_is_built_for_the_gpu_that_has_it():
    """In place of sm_90: of both a device would take which it likes. Other GPUs have a kernel that traps."""
    ask = "print(*s['nvcc_command']('nvcc', 'include', '{}', 'x.o'))"
    hopper = ["attention_ring", "attention_ring_backward", "attention_wgmma"]
    for source, name in (*((f"cuda/{stem}.cu", "90a") for stem in hopper), ("cuda/attention_bf16.cu", "90")):
        told = setup_py(ask.format(source)).stdout.split()
        assert f"-gencode=arch=compute_{name},code=sm_{name}" in told and "-gencode=arch=compute_90,code=compute_90" in told
        assert sum("code=sm_90" in word for word in told) == 1 and sum("code=sm_" in word for word in told) == 4
        alone = setup_py(ask.format(source), TERAPIPE_CUDA_ARCHS="90").stdout.split()
        assert [word for word in alone if "gencode" in word] == [f"-gencode=arch=compute_{name},code=sm_{name}"]
    includes = {p.stem for p in (ROOT / "cuda").glob("*.cu") if "wgmma.h" in p.read_text()}
    assert includes == set(hopper)


@pytest.mark.parametrize("stem, kernels", [("attention_wgmma", 5), ("attention_ring", 4), ("attention_ring_backward", 6)])
def test_no_product_of_a_warpgroup_is_serialized(stem, kernels):
    """ptxas tells of it (C7510 to C7520), and goes on: products wait for each other, or for fences that it adds."""
    logs = list(ROOT.glob(f"build/temp*/cuda/{stem}.ptxas"))
    source = ROOT / f"cuda/{stem}.inc"
    if not logs or any(log.stat().st_mtime < source.stat().st_mtime for log in logs):
        pytest.skip("no fresh log of nvcc in build/ (python setup.py build_ext makes it)")
    for text in (log.read_text() for log in logs):
        if "for 'sm_90a'" not in text:
            pytest.skip("built for other GPUs alone (TERAPIPE_CUDA_ARCHS)")
        assert not re.findall(r".*(?:C75\d\d|serialized|is injected).*", text)
        used = [int(n) for part in text.split("Compiling entry function ")[1:] if "for 'sm_90a'" in part
                for n in re.findall(r"Used (\d+) registers", part)]  # fmt: skip
        assert len(used) == kernels and min(used) > 64  # the kernels themselves, not what stands in for them


# ---- no GPU here ---------------------------------------------------------------------------------------------------------


@needs_built
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a GPU is here")
def test_no_driver_is_said_plainly():
    assert tp.cuda.device_count() == 0 and tp.cuda.devices() == ()
    why = tp.cuda.why_not()
    assert why is not None and "no NVIDIA driver is here (libcuda.so.1" in why and "CUDA 13.0 or newer" in why
    assert tp.cuda.versions().driver == "" and tp.cuda.versions().runtime == "13.0"
    with pytest.raises(tp.ExecutionError, match="no NVIDIA driver is here"):
        tp.cuda.load().check(0, 0)


@needs_built
def test_a_driver_too_old(tmp_path):
    """The real runtime before a libcuda that says it is of CUDA 12.2."""
    shared(tmp_path, "libcuda.so.1", """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        int cuDriverGetVersion(int *v) { *v = 12020; return 0; }
        int cuInit(unsigned f) { return 0; }
        int cuDeviceGetCount(int *n) { *n = 1; return 0; }
        int cuGetProcAddress_v2(const char *s, void **f, int v, unsigned long long g, int *q)
        {
            Dl_info mine;
            dladdr((void *)cuInit, &mine);
            *f = dlsym(dlopen(mine.dli_fname, RTLD_NOW), s);
            if (q) *q = *f ? 0 : 1;
            return *f ? 0 : 500;
        }
        int cuGetProcAddress(const char *s, void **f, int v, unsigned long long g)
        {
            return cuGetProcAddress_v2(s, f, v, g, 0);
        }
    """)
    script = "import terapipe_c as tp; print(tp.cuda.device_count(), tp.cuda.why_not())"
    told = python(script, LD_LIBRARY_PATH=str(tmp_path), TERAPIPE_CUDA_MODULE="")
    assert told == "0 the NVIDIA driver is too old: it supports CUDA 12.2, and 13.0 or newer is needed"


def test_without_the_module(tmp_path, module_is):
    module_is(tmp_path / "nothing.so")
    assert tp.cuda.device_count() == 0
    assert "TERAPIPE_CUDA_MODULE" in (tp.cuda.why_not() or "") and "which is no file" in (tp.cuda.why_not() or "")
    with pytest.raises(tp.ExecutionError, match="is no file"):
        tp.cuda.versions()
    rows = {row.name: row for row in doctor.examine(tmp_path)}
    assert "is no file" in rows["_cuda"].value and rows["_cuda"].status != "wrong"
    (tmp_path / "text.so").write_text("not a library")
    module_is(tmp_path / "text.so")
    assert "which does not load" in (tp.cuda.why_not() or "")
    module_is(shared(tmp_path, "other.so", "int x;"))
    assert "which does not load" in (tp.cuda.why_not() or "")


# ---- the emulated device -------------------------------------------------------------------------------------------------


def test_the_emulated_module_takes_its_place(emulated, module_is, tmp_path):
    module_is(emulated.__file__)
    assert tp.cuda.device_count() == 1 and tp.cuda.why_not() is None
    (device,) = tp.cuda.devices()
    assert (device.name, device.capability, device.total_bytes) == ("emulated GPU", (9, 0), 4 << 30)
    assert {lib.name for lib in tp.cuda.versions().libraries} >= {"cublasLt"}
    rows = {row.name: row for row in doctor.examine(tmp_path)}
    assert "emulated GPU" in rows["GPU 0"].value


def test_doctor_tells_of_attention_where_a_gpu_can_be_used(emulated, module_is, tmp_path, monkeypatch):
    module_is(emulated.__file__)
    monkeypatch.setenv("TERAPIPE_ATTENTION", "cudnn")
    row = {row.name: row for row in doctor.examine(tmp_path)}["attention of GPU 0"]
    assert row.value == "by wgmma; where reproducible=False the forward is cuDNN's, as TERAPIPE_ATTENTION=cudnn asks"
    emulated.emu_machine(major=7, minor=5)
    try:
        rows = {row.name: row for row in doctor.examine(tmp_path)}
    finally:
        emulated.emu_machine()
    assert rows["GPU 0"].status == "note" and "attention of GPU 0" not in rows


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"driver": 0}, "no NVIDIA driver is here"),
        ({"driver": 12080}, r"too old: it supports CUDA 12\.8, and 13\.0 or newer is needed"),
        ({"devices": 0}, "shows no device"),
        ({"major": 7, "minor": 5}, r"compute capability 7\.5; 8\.0 \(Ampere\) or newer"),
    ],
)
def test_machines_that_will_not_do(emulated, machine, message):
    emulated.emu_machine(**machine)
    with pytest.raises(tp.ExecutionError, match=message):
        emulated.check(0, 0)


def test_a_forked_process_and_a_build_for_other_gpus_are_told_what_would_be_right(emulated):
    """CUDA's words for it are that it could not be initialized, and that there is no kernel image."""
    library = ctypes.CDLL(emulated.__file__)
    library.tp_error_message.restype = ctypes.c_char_p
    for error, told in ((3, True), (999, False)):
        assert library.tp_cuda_refuse_machine(13000, 13000, error, None) != 0
        assert ("multiprocessing's \"spawn\"" in library.tp_error_message().decode()) == told
    assert library.tp_cuda_check(209, b"a call") != 0 and "in TERAPIPE_CUDA_ARCHS" in library.tp_error_message().decode()


def test_no_device_in_sight_names_the_variable(emulated, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    emulated.emu_machine(devices=0)
    assert 'CUDA_VISIBLE_DEVICES is "7"' in emulated.why_not()


def test_no_such_device(emulated):
    emulated.emu_machine(devices=2)
    emulated.check(1, 4096)
    for index in (2, -1):
        with pytest.raises(ValueError, match=f"device {index}: this process sees 2 CUDA devices, 0 to 1"):
            emulated.check(index, 0)


def test_streams_events_and_copies(emulated):
    seen = emulated.exercise(0)
    assert seen["seconds"] >= 0 and seen["graphs"] == 2


def test_every_device_call_can_fail(emulated):
    """Broken at each call in turn, the trial raises and gives everything back: nothing crashes, nothing is lost."""
    emulated.emu_machine(total_bytes=2 << 20)
    for calls in itertools.count(1):
        emulated.emu_break(calls)
        try:
            emulated.exercise(0)
            break
        except tp.ExecutionError as error:
            assert "device is lost" in str(error)
        emulated.emu_break(0)
        emulated.check(0, 2 << 20)
    assert calls > 30


@pytest.mark.gpu
def test_a_device_does_all_that_is_asked_of_it():
    module = tp.cuda.load()
    for device in tp.cuda.devices():
        seen = module.exercise(device.index)
        assert seen["graphs"] == 2 and 0 < seen["seconds"] < 1
        with pytest.raises(tp.OutOfMemoryError, match=f"needs {device.total_bytes + 1} bytes of device {device.index}, .* short"):
            module.check(device.index, device.total_bytes + 1)
    with pytest.raises(ValueError, match=f"device {tp.cuda.device_count()}: this process sees"):
        module.check(tp.cuda.device_count(), 0)


def test_out_of_device_memory_says_how_much(emulated):
    emulated.emu_machine(total_bytes=1 << 20)
    emulated.check(0, 1 << 20)
    with pytest.raises(tp.OutOfMemoryError, match="needs 1048577 bytes of device 0, which has 1048576 free of 1048576: 1 short"):
        emulated.check(0, (1 << 20) + 1)
    emulated.check(0, 1 << 20)  # nothing is lost


def test_memory_that_is_free_and_is_not_given_is_not_told_as_missing():
    """CUDA need not give all that it calls free: a plan for as much would be the same again."""
    library = cuda_emu.library()
    library.tp_error_message.restype = ctypes.c_char_p
    library.tp_cuda_refuse_bytes(0, b"a stage", ctypes.c_size_t(1000), ctypes.c_uint64(1000), ctypes.c_uint64(4000))
    words = "a stage needs 1000 bytes of device 0, which does not give them at once, though 1000 of 4000 are free; plan with "
    assert library.tp_error_message().decode() == words + "memory_bytes below 1000"


def test_a_lost_device_stays_lost_and_is_named_with_the_cause(emulated):
    emulated.emu_machine(devices=2)
    emulated.check(0, 64)
    emulated.emu_break(5)
    words = r"the device is lost to this process: cuda\w+ on device 1: CUDA error 700 \(cudaErrorIllegalAddress"
    with pytest.raises(tp.ExecutionError, match=words) as first:
        for _ in range(9):
            emulated.check(1, 64)
    with pytest.raises(tp.ExecutionError) as second:
        emulated.check(0, 64)
    assert str(first.value) == str(second.value)
    emulated.emu_break(0)
    emulated.check(0, 64)


def test_a_thread_that_launches_nothing_names_the_kernel_of_others(emulated):
    """As NCCL's watch, which asks for events only and may hear first; what it says of a lost device is said ever after."""
    emulated.exercise(0)                # the last of which is a graph's
    told = []

    def look():
        emulated.emu_break(1)
        with pytest.raises(tp.ExecutionError) as error:
            emulated.check(0, 64)
        told.append(str(error.value))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    emulated.emu_break(0)
    assert "after kernel of a graph;" in told[0]


LISTS = """
import numpy as np
import terapipe_c as tp
from terapipe_c import doctor

def main():
    module = tp.cuda.load()
    model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=16, block_size=8)
    plan = tp.plan(model, tp.Cluster(num_devices=2, peak_flops=1e12), batch=1, seq_len=8, planner="uniform", stages=2,
                   slicing=[(1, [4, 4])], backend="cuda")
    assert len(tp.cuda.devices()) == 1 and [*doctor.examine(".")]
    made = [module.emu_contexts()]
    for processes in (True, False):
        tp.launch(plan, np.arange(99, dtype=np.int32) % 16, 1, backend="cuda", devices=[0, 0], processes=processes,
                  progress=False).wait()
        made.append(module.emu_contexts())
    print(made)

if __name__ == "__main__":
    main()
"""


def test_who_only_lists_gpus_makes_no_context(emulated, tmp_path):
    """Nor does the parent of ranks that are processes; the ranks that are its threads do."""
    (tmp_path / "lists.py").write_text(LISTS)
    told = python(f"import runpy; runpy.run_path({str(tmp_path / 'lists.py')!r}, run_name='__main__')",
                  TERAPIPE_CUDA_MODULE=emulated.__file__)  # fmt: skip
    assert told.splitlines()[-1] == "[0, 0, 1]"


DRIVER = """
    #include <string.h>
    int cuInit(unsigned f) { return 0; }
    int cuDeviceGet(int *d, int i) { *d = 40 + i; return 0; }
    int cuDeviceGetAttribute(int *v, int a, int d) { *v = 1000 * (d - 40) + a; return FAILS; }
    int cuDeviceGetName(char *t, int n, int d) { strcpy(t, "NVIDIA H100"); return 0; }
    int cuDeviceTotalMem_v2(unsigned long *n, int d) { *n = 1000; return 0; }
    int cuDeviceGetUuid_v2(unsigned char *u, int d) { for (int i = 0; i < 16; i++) u[i] = 17 * i; return 0; }
    int cuDeviceGetPCIBusId(char *t, int n, int d) { strcpy(t, "0000:3b:00.0"); return 0; }
"""
NVML = """
    #include <string.h>
    int nvmlInit_v2(void) { return 0; }
    int nvmlDeviceGetHandleByUUID(const char *u, void **d)
    {
        *d = (void *)7;
        return strcmp(u, "GPU-00112233-4455-6677-8899-aabbccddeeff") != 0;
    }
    int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = 1000; m[1] = 900; m[2] = 100; return d != (void *)7; }
"""
ASK = """
import ctypes, struct
import cuda_emu
library, out = cuda_emu.library(), ctypes.create_string_buffer(512)
library.tp_error_message.restype = ctypes.c_char_p
if library.tp_properties_ask(1, None, None, out):
    print(library.tp_error_message().decode())
else:
    texts = out.raw[64:].split(b"\\0", 1)[0].decode().split(), out.raw[224:260].decode()
    print(*struct.unpack_from("7i4x4Q", out), *texts[0], texts[1], sep=",")
"""


@pytest.mark.parametrize(("driver", "nvml", "told"), [
    (DRIVER, NVML, "1,1075,1076,1016,1013,1036,1037,1000,900,1097,1038,NVIDIA,H100,GPU-00112233-4455-6677"),
    (DRIVER, NVML.replace('"GPU-0', '"MIG-0'), "1037,1000,900,1097,1038,NVIDIA,H100,MIG-00112233-4455-6677"),
    (DRIVER, NVML.replace('"GPU-0', '"GPU-1'), "1037,1000,1000,1097"),
    (DRIVER, "", "1037,1000,1000,1097"),
    (DRIVER.replace("FAILS", "3"), NVML, "driver->attribute(wanted[i].value, wanted[i].which, device): the driver answers 3"),
    (DRIVER.replace("cuDeviceGetUuid_v2", "other"), NVML, "cuDeviceGetUuid_v2 is missing in the NVIDIA driver's library"),
])  # fmt: skip
def test_a_gpu_is_described_by_calls_that_need_no_context(tmp_path, driver, nvml, told):
    """A driver that has no others, and NVML, which knows a GPU, or a part of one, or neither."""
    cuda_emu.build()
    shared(tmp_path, "libcuda.so.1", driver.replace("FAILS", "0"))
    shared(tmp_path, "libnvidia-ml.so.1", nvml)
    assert told in python(ASK, LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=str(ROOT / "tests"))


@pytest.mark.parametrize("machine", [{"devices": 17}, {"devices": -1}, {"multiprocessors": 0}])
def test_machines_that_cannot_be(emulated, machine):
    with pytest.raises(ValueError, match="must be"):
        emulated.emu_machine(**machine)


# ---- libraries found at run time -----------------------------------------------------------------------------------------

FUNCTIONS = re.findall(r"X\(\w+, lt_\w+, (cublasLt\w+)\)", (ROOT / "cuda/dl_cublaslt.h").read_text())
LOOK = "from terapipe_c import _cuda; print(_cuda.libraries()['cublasLt'])"


def fake_cublaslt(folder: Path, version: int = 130200, without: str = "") -> Path:
    body = "".join(f"long {name}(void) {{ return {version}; }}\n" for name in FUNCTIONS if name != without)
    return shared(folder, "libcublasLt.so.13", body)


@needs_built
def test_cublaslt_is_found_where_it_should_be(tmp_path):
    assert len(FUNCTIONS) == 16
    named, told, home = (tmp_path / n for n in ("named", "told", "home/lib64"))
    for place in (named, told, home):
        place.mkdir(parents=True)
        fake_cublaslt(place)
    folders = f"from terapipe_c import _cuda; _cuda.set_folders('/nowhere:{told}');"
    where = {"CUDA_HOME": str(tmp_path / "home"), "CUDA_PATH": ""}
    assert str(named) in python(folders + LOOK, TERAPIPE_CUBLASLT=str(named / "libcublasLt.so.13"), **where)
    assert str(told) in python(folders + LOOK, **where)
    assert str(home) in python(LOOK, **where)
    loaded = f"import ctypes; ctypes.CDLL('{named / 'libcublasLt.so.13'}');"  # as PyTorch would have
    assert str(named) in python(loaded + folders + LOOK, **where)
    assert str(named) in python(LOOK, LD_LIBRARY_PATH=str(named), CUDA_HOME="", CUDA_PATH="") or Path("/usr/local/cuda").exists()


@needs_built
def test_a_cublaslt_that_will_not_do_is_named(tmp_path):
    for what, told in ((fake_cublaslt(tmp_path, version=120800), "is version 12.8.0; 13.0.0 or newer is needed"),):
        assert told in python(LOOK, TERAPIPE_CUBLASLT=str(what))
    lacking = fake_cublaslt(tmp_path, without="cublasLtMatmulAlgoCheck", version=120800)
    told = python(LOOK, TERAPIPE_CUBLASLT=str(lacking))
    assert f"at {lacking} lacks cublasLtMatmulAlgoCheck: its version is 12.8.0; 13.0.0 or newer is needed" in told
    mute = fake_cublaslt(tmp_path, without="cublasLtGetVersion")  # nor is what is not there called
    assert "lacks cublasLtGetVersion: its version is unknown; 13.0.0" in python(LOOK, TERAPIPE_CUBLASLT=str(mute))
    assert "which does not load" in python(LOOK, TERAPIPE_CUBLASLT="/nowhere/libcublasLt.so.13")


@needs_built
def test_a_library_that_is_there_and_does_not_load_is_not_called_missing(tmp_path):
    """In a folder where it is looked for, as a broken installation leaves it: pip install would change nothing."""
    home = tmp_path / "home/lib64"
    home.mkdir(parents=True)
    where = {"CUDA_HOME": str(tmp_path / "home"), "CUDA_PATH": "", "LD_LIBRARY_PATH": ""}
    found = not python(LOOK, **where).startswith("('', ''")  # another, elsewhere on this machine
    for broken, why in ((lambda: (home / "libcublasLt.so.13").write_text("half of it"), "file too short"),
                        (lambda: needs_another(home), "libother.so: cannot open shared object file")):  # fmt: skip
        broken()
        told = python(LOOK, **where)
        assert found or f"cublasLt does not load: {home}/libcublasLt.so.13: " in told and why in told, told
    (home / "libcublasLt.so.13").unlink()
    told = python(LOOK, **where)
    assert found or f"libcublasLt.so.13 is not loaded, nor in {home}, " in told and "13.0.0 or newer" in told, told
    (tmp_path / "nvcc").write_text("")  # a variable that names a file where a folder is meant: nothing is there
    told = python(LOOK, **where | {"CUDA_HOME": str(tmp_path / "nvcc")})
    assert found or "was not found" in told and "does not load" not in told, told


def needs_another(folder: Path) -> None:
    other = shared(folder, "libother.so", "int other(void) { return 1; }")
    source = folder / "needs.c"
    source.write_text("int other(void); int cublasLtGetVersion(void) { return other(); }")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(folder / "libcublasLt.so.13"), str(other)], check=True)
    other.unlink()


def test_every_global_symbol_starts_with_tp() -> None:
    module = cuda_emu.build()
    ran = subprocess.run(["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in ran.stdout.splitlines()]
    assert len(names) > 100 and not [n for n in names if not n.startswith(("tp_", "PyInit_", "_init", "_fini"))]
