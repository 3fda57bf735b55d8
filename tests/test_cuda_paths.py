"""Folders and files whose names are no UTF-8, or that are not to be looked into: CUDA is found, or told of, all the same. And GPUs
to build for that are none."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import terapipe_c as tp

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
    pytest.skip("no CUDA sources beside the tests, or no gcc", allow_module_level=True)

import cuda_emu  # noqa: E402

TOO_LONG = "/" + "a" * 5000     # as a folder that is not ours: asked whether it is one, the system answers with an error
LOOK = """
from pathlib import PosixPath
import os, sys
{first}
import terapipe_c as tp
sys.path += {more!r}
print(tp.cuda.device_count(), tp.cuda.why_not())
print(ascii({{library.name: library.why_not for library in tp.cuda.versions().libraries}}["NCCL"]))
"""


def look(*more: object, first: str = "", **environment: str) -> list[str]:
    """What is told of the GPUs and of NCCL with this behind sys.path, `first` done before."""
    kept = {"TERAPIPE_CUDA_MODULE": str(cuda_emu.build()), "CUDA_HOME": "", "CUDA_PATH": ""}
    ran = subprocess.run([sys.executable, "-c", LOOK.format(more=list(more), first=first)], capture_output=True, text=True,
                         env={**os.environ, **kept, **environment})  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.splitlines()


def test_what_stands_in_sys_path_costs_no_gpu(tmp_path: Path) -> None:
    """pathlib asked, and what it raised of one such folder was raised by every question about GPUs."""
    assert look(TOO_LONG, b"/bytes", "a\0b", Path("/"))[0] == "1 None"


def test_a_library_is_found_below_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "nvidia/nccl/lib").mkdir(parents=True)
    (folder / "nvidia/nccl/lib/libnccl.so.2").write_text("half of it")
    count, told = look(str(folder))
    assert count == "1 None"
    assert "caf\\\\xe9/nvidia/nccl/lib/libnccl.so.2: " in told and "file too short" in told


def test_an_error_that_ends_within_a_character_is_told() -> None:
    """Whatever the length of what stands before it, one of these ends so."""
    for more in ("", "a"):
        _, told = look(TERAPIPE_NCCL=f"/{more}" + "\u00e9" * 2000)
        assert told.startswith("'NCCL: TERAPIPE_NCCL is \"/") and "\\xe9" in told


def test_a_library_that_is_not_all_there_or_another_processors_is_told(tmp_path: Path) -> None:
    """As where a disk was full: the loader read behind the file's end, and Python died of SIGBUS, without a word."""
    source = "static char big[100000] = {1}; char *of(int i) { return big + i; }"
    whole, cut, other = tmp_path / "whole.so", tmp_path / "lib64/libnccl.so.2", tmp_path / "other"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(whole)], input=source, text=True, check=True)
    cut.parent.mkdir()
    cut.write_bytes(whole.read_bytes()[:20000])
    words = "it was not copied whole: 20000 of its 1"
    assert f"which does not load: {words}" in look(TERAPIPE_NCCL=str(cut))[1]
    assert f"NCCL does not load: {cut}: {words}" in look(CUDA_HOME=str(tmp_path))[1]
    assert f"NCCL does not load: {cut}: {words}" in look(LD_LIBRARY_PATH=f"{other}::{cut.parent}:{tmp_path}")[1]
    # the loader has read it by then: as one of the system's folders, which stand nowhere
    assert f": {cut}: {words}" in look(LD_LIBRARY_PATH=str(cut.parent), first="del os.environ['LD_LIBRARY_PATH']")[1]
    foreign = bytearray(whole.read_bytes())
    foreign[18:20] = b"\x16\x00"  # S/390, of which glibc says that there is no such file
    (tmp_path / "foreign.so").write_bytes(foreign)
    assert "which does not load: it is of another processor (ELF machine 22" in look(TERAPIPE_NCCL=str(tmp_path / "foreign.so"))[1]
    other.mkdir()
    shutil.copy(whole, other / "libnccl.so.2")  # the loader's order: this one is whole, and no NCCL
    assert f"NCCL at {other}/libnccl.so.2 lacks nccl" in look(LD_LIBRARY_PATH=f"{other}:{cut.parent}")[1]
    assert f"NCCL at {other}/libnccl.so.2 lacks nccl" in look(LD_LIBRARY_PATH=str(other), CUDA_HOME=str(tmp_path))[1]


def test_a_driver_that_is_not_all_there_is_told(tmp_path: Path) -> None:
    """CUDA's runtime has the loader look for it by name: Python died of SIGBUS at the first question about GPUs."""
    source = "static char big[100000] = {1}; char *of(int i) { return big + i; }"
    whole, cut, other = tmp_path / "whole.so", tmp_path / "cut", tmp_path / "other"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(whole)], input=source, text=True, check=True)
    for folder in (cut, other):
        folder.mkdir()
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (folder / name).write_bytes(whole.read_bytes()[: 20000 if folder == cut else None])
    ask = f"""import ctypes; library = ctypes.CDLL({str(cuda_emu.build())!r}); library.tp_dl_cut.restype = ctypes.c_char_p
library.tp_error_message.restype = ctypes.c_char_p
print(library.tp_dl_cut(b"libnvidia-ml.so.1"), library.tp_properties_ask(0, None, None, ctypes.create_string_buffer(4096)))
print(library.tp_error_message().decode())"""

    def told(script: str, *folders: Path | str) -> str:
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={
            **os.environ, "TERAPIPE_CUDA_MODULE": "", "LD_LIBRARY_PATH": ":".join(map(str, folders))})  # fmt: skip
        assert ran.returncode == 0, (ran.returncode, ran.stderr[-2000:])
        return ran.stdout

    words = "it was not copied whole: 20000 of its 1"
    assert told(ask, "/nowhere", "", cut, other).startswith(f"b'{cut}/libnvidia-ml.so.1: {words}")
    assert "libcuda.so.1 is missing in the NVIDIA driver's library" in told(ask, cut)
    assert told(ask, other, cut).startswith("None ")  # the loader takes the whole one, which is no driver
    if any(Path(tp.__file__).parent.glob("_cuda.*.so")):
        script = "import terapipe_c as tp; print(tp.cuda.device_count(), tp.cuda.why_not(), tp.cuda.versions().runtime)"
        assert told(script, cut).startswith(f"0 no NVIDIA driver is here ({cut}/libcuda.so.1: {words}")


def test_libraries_are_looked_for_where_the_loader_does_not_say_where_it_looks(tmp_path: Path) -> None:
    """musl's: of all C files this one alone asked for what glibc's has, so that the emulated device was not built."""
    (tmp_path / "musl.h").write_text("#include <dlfcn.h>\n#include <link.h>\n#undef __GLIBC__\n#pragma GCC poison Dl_serinfo\n")
    words = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-Werror", "-Wall", "-fsyntax-only", "-I.", "-include", str(tmp_path / "musl.h")]
    ran = subprocess.run([*words, "cuda/dl.c"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_module_of_no_possible_name_is_no_file() -> None:
    ran = subprocess.run([sys.executable, "-c", "import terapipe_c as tp; print(tp.cuda.device_count(), tp.cuda.why_not())"],
                         capture_output=True, text=True, env={**os.environ, "TERAPIPE_CUDA_MODULE": TOO_LONG})  # fmt: skip
    assert ran.stdout.startswith("0 TERAPIPE_CUDA_MODULE is '/aaa") and ran.stdout.endswith("which is no file\n"), ran.stderr


def modules(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What setup.py would build where this folder holds all compilers."""
    for name, body in (("nvcc", "echo 'release 13.0, V13.0.88'"), ("g++", "exit 0")):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    script = "import runpy; s = runpy.run_path('setup.py', run_name='setup_py'); print([e.name for e in s['modules']()])"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "TERAPIPE_"))}
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          env={**kept, "PATH": str(folder), **environment})  # fmt: skip


def test_a_home_that_is_not_to_be_looked_into_costs_the_backend_alone(tmp_path: Path) -> None:
    ran = modules(tmp_path, CUDA_HOME=TOO_LONG)
    assert "terapipe_c._core" in ran.stdout, ran.stderr[-500:]


def test_a_home_that_is_mistyped_is_told(tmp_path: Path) -> None:
    """The nvcc in PATH was taken instead, of whatever release, and nothing said so."""
    for what in ("lib/libcudart_static.a", "include/cuda_runtime_api.h"):
        (tmp_path / what).parent.mkdir()
        (tmp_path / what).write_text("")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        told = modules(tmp_path, **{name: f"{tmp_path}/cuda-13.O", "TERAPIPE_CUDA": "1"})
        assert told.returncode and f"{name} is '{tmp_path}/cuda-13.O', which is no folder" in told.stderr
    assert "terapipe_c._cuda" not in modules(tmp_path, CUDA_HOME=f"{tmp_path}/cuda-13.O").stdout
    told = modules(tmp_path, CUDA_HOME=str(tmp_path))  # its headers may be meant
    assert "terapipe_c._cuda" in told.stdout
    assert f"CUDA_HOME is '{tmp_path}', which has no bin/nvcc: {tmp_path}/nvcc is taken" in told.stderr
    (tmp_path / "bin").mkdir()
    shutil.copy(tmp_path / "nvcc", tmp_path / "bin/nvcc")  # found: then no matter what the other one says
    told = modules(tmp_path, CUDA_HOME=str(tmp_path), CUDA_PATH=f"{tmp_path}/cuda-13.O")
    assert "terapipe_c._cuda" in told.stdout and told.stderr == ""


@pytest.mark.parametrize("archs", ["sm_90", "80,90", "75"])
def test_gpus_that_are_none_are_told_before_they_cost_the_backend(tmp_path: Path, archs: str) -> None:
    """nvcc refused them, and pip was content with a package without CUDA."""
    for what in ("lib/libcudart_static.a", "include/cuda_runtime_api.h"):
        (tmp_path / what).parent.mkdir()
        (tmp_path / what).write_text("")
    asked = {"CUDA_HOME": str(tmp_path), "TERAPIPE_CUDA_ARCHS": archs}
    told = modules(tmp_path, **asked)
    assert told.returncode and f"TERAPIPE_CUDA_ARCHS is '{archs}'; it must be numbers from 80 on" in told.stderr
    assert "terapipe_c._core" in modules(tmp_path, **asked, TERAPIPE_CUDA="0").stdout
    assert "terapipe_c._cuda" in modules(tmp_path, **{**asked, "TERAPIPE_CUDA_ARCHS": "90a 100f 120"}).stdout
