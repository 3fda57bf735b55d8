"""The command `terapipe doctor`: what it says of this machine, and of others."""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

import terapipe_c as tp
from terapipe_c import _core, cli, cuda, doctor, profiling
from terapipe_c._files import check_output, check_place
from terapipe_c.doctor import cpu_quota, examine


def run(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_doctor_tells_of_an_instruction_set_that_is_not_there(capsys, monkeypatch):
    for name, status in (("x87", "wrong"), ("portable", "note")):
        monkeypatch.setenv("TERAPIPE_ISA", name)
        _, out, _ = run(capsys, "doctor", "--json")
        assert {finding["name"]: finding for finding in json.loads(out)}["TERAPIPE_ISA"]["status"] == status


def test_doctor_tells_of_variables_that_nobody_reads(capsys, monkeypatch):
    """A misspelt name had no effect and no word. What it is set to may be a secret."""
    for name in ("TERAPIPE_ATENTION", "terapipe_comm", "TERAPIPE_WORLD", "TERAPIPE_TOKN", "TERAPIPE_CAF\udce9"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("TERAPIPE_COMM", "host")
    _, out, _ = run(capsys, "doctor", "--json")
    found = {each["name"]: each["advice"] for each in json.loads(out) if each["value"] == "set, and read by nobody"}
    assert found["TERAPIPE_ATENTION"] == "TERAPIPE_ATTENTION would be right"
    assert found["terapipe_comm"] == "TERAPIPE_COMM would be right" and found["TERAPIPE_TOKN"] == "TERAPIPE_TOKEN would be right"
    assert found["TERAPIPE_WORLD"].startswith("one of TERAPIPE_ATTENTION, ") and "TERAPIPE_CAF\\udce9" in found
    assert "TERAPIPE_COMM" not in found and "s3cret" not in out


def test_doctor_knows_every_variable_that_is_read():
    """Those of tests and benchmarks alone are none of a user's."""
    files = [*ROOT.glob("terapipe_c/**/*.py"), *ROOT.glob("csrc/**/*.[ch]"), *ROOT.glob("cuda/*.[ch]"), ROOT / "setup.py"]
    read = {name for file in files for name in re.findall(r"""["'](TERAPIPE_[A-Z_]*[A-Z])\b""", file.read_text("utf-8"))}
    assert read | {"TERAPIPE_CUDA", "TERAPIPE_MPI"} == set(doctor.VARIABLES)


def test_doctor_blames_no_processor_for_kernels_that_do_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "terapipe_c._core", None)      # its import fails
    findings = {finding.name: finding for finding in examine()}
    assert findings["_core"].status == "wrong" and findings["cores"].value and "instruction set" not in findings


def test_doctor_reports_this_machine(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", "--json", "--out", tmp_path)
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert {
        "python",
        "numpy",
        "_core",
        "cores",
        "instruction set",
        "memory",
        "memfd",
        "pidfd",
        "limit: open files",
        "_cuda",
        "_mpi",
        "folder",
        "disk",
    } <= set(findings)
    assert findings["cores"]["value"].startswith(str(len(os.sched_getaffinity(0))))
    assert code == (1 if any(f["status"] == "wrong" for f in findings.values()) else 0)
    assert all(f["advice"] for f in findings.values() if f["status"] == "wrong")
    table = run(capsys, "doctor", "--out", tmp_path)[1]
    assert all(name in table for name in findings)


def test_doctor_says_what_is_wrong_and_what_to_do():
    """With 64 open files and no way to write: run where the limit is really so."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "from terapipe_c import cli; sys.exit(cli.main(['doctor', '--out', '/proc/runs']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(tp.__file__).parents[1])},
    )
    assert done.returncode == 1 and "wrong  limit: open files" in done.stdout and "-> ulimit -n 256" in done.stdout
    assert [f.status for f in examine(".") if f.name == "_core"] == ["ok"]


def test_doctor_says_what_would_give_ranks_their_memory(monkeypatch):
    """docker --shm-size is of /dev/shm, of which the next line says that it is not used; and a limit of files is none of memory."""
    def memfd():
        return next(finding for finding in doctor._shared_memory() if finding.name == "memfd")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert memfd().status == "wrong" and memfd().advice.endswith("by one: ulimit -f unlimited")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert memfd().status == "ok"
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert memfd().status == "wrong" and "(docker --memory; --shm-size is of /dev/shm alone)" in memfd().advice
    shm = [finding.value for finding in doctor._shared_memory() if finding.name == "/dev/shm"]
    assert all("MPICH's ranks end by SIGBUS where there are not 1.1 MB for each" in found for found in shm)


def test_doctor_knows_a_file_from_a_folder(capsys, tmp_path):
    (tmp_path / "text").write_text("x")
    for out in (tmp_path / "text", tmp_path / "text" / "runs"):
        code, table, _ = run(capsys, "doctor", "--out", str(out))
        assert code == 1 and f"{tmp_path / 'text'} is no folder that is writable" in table


@pytest.mark.parametrize("folder", ["/proc", "/proc/x"])
def test_doctor_tries_whether_a_folder_takes_a_file(capsys, tmp_path, folder):
    """The superuser may write everywhere, by os.access."""
    code, table, _ = run(capsys, "doctor", "--out", folder)
    assert code == 1 and "wrong  folder" in table and "/proc is not writable (" in table
    before = os.stat(tmp_path)
    assert "wrong  folder" not in run(capsys, "doctor", "--out", tmp_path)[1]
    assert not list(tmp_path.iterdir()) and os.stat(tmp_path).st_mtime_ns == before.st_mtime_ns


def test_doctor_calls_a_folder_wrong_that_may_not_be_looked_at(capsys, monkeypatch, tmp_path):
    """It was a note, of a check that was called <lambda>."""
    for exists in (Path.exists, lambda path: os.path.exists(path)):     # as it is, and as Python 3.14 has it: no error
        monkeypatch.setattr(Path, "exists", exists)
        code, table, _ = run(capsys, "doctor", "--out", str(tmp_path / ("x" * 300)))
        assert code == 1 and "wrong  folder" in table and "File name too long" in table and "<lambda>" not in table

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    found = examine("/root/runs")[-1]
    assert (found.name, found.value, found.status) == ("folder", "/root/runs: Permission denied", "wrong")
    assert examine(None)[-1].name == "disk"


def told(name):
    return next((finding.status, finding.value, finding.advice) for finding in examine() if finding.name == name)


def test_doctor_tells_of_other_programs_and_of_limits(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    for load, status in ((1.9, "ok"), (2.0, "ok"), (2.1, "note")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        assert told("load")[:2] == (status, f"{load} over the last minute")
        assert bool(told("load")[2]) == (status == "note")
    for quota, status, words, advice in ((None, "ok", "4 usable of", ""), (4.0, "ok", "limited to 4 by the container", ""),
                                         (2.5, "note", "limited to 2.5 by", "use at most 2 ranks x threads_per_rank"),
                                         (0.5, "note", "limited to 0.5 by", "use at most 1 ranks x")):
        monkeypatch.setattr(doctor, "cpu_quota", lambda quota=quota: quota)
        found = told("cores")
        assert found[0] == status and words in found[1] and found[2].startswith(advice) and bool(found[2]) == bool(advice)
    for limit, status, words in ((resource.RLIM_INFINITY, "ok", "unlimited"), (1 << 30, "note", "1 GiB")):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        for name in ("address space", "file size"):
            assert told(f"limit: {name}")[:2] == (status, words) and bool(told(f"limit: {name}")[2]) == (status == "note")
    for limit, status in ((63, "wrong"), (64, "ok"), (255, "wrong"), (256, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, 4096))
        least = "limit: processes" if limit < 100 else "limit: open files"
        assert told(least)[0] == status and ("(hard limit 4096)" in told(least)[2]) == (status == "wrong")


def test_this_machine_has_the_cores_that_a_container_is_given(monkeypatch):
    """Memory was the container's, cores were the host's: 64 ranks on the 2 of docker run --cpus=2."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    busy = []
    monkeypatch.setattr(profiling._Sampler, "run", lambda self, *rest: busy.append(self.busy) or 1 / 0)
    for quota, cores in ((None, 4), (6.0, 4), (4.0, 4), (2.5, 2), (0.5, 1)):
        monkeypatch.setattr(doctor, "cpu_quota", lambda quota=quota: quota)
        local = tp.Cluster.local()
        assert local.num_devices == cores
        for threads in (1, 2):
            with pytest.raises(ZeroDivisionError):
                tp.profile(tp.GPTConfig(1, 1, 8, 10, 8), threads=threads)
        assert busy[-2:] == [cores, max(1, cores // 2)]


def test_doctor_tells_what_a_processor_and_a_container_lack(monkeypatch):
    flags, read = "amx_bf16", Path.read_text

    def text(path, **given):
        return f"model name\t: Best 9\nflags\t\t: fpu {flags}\n\nflags: x" if str(path) == "/proc/cpuinfo" else read(path, **given)

    monkeypatch.setattr(Path, "read_text", text)
    for sets, status, words, advice in ((("portable", "avx2", "avx512", "amx"), "ok", "AMX with AVX-512 (Best 9)", ""),
                                        (("portable", "avx2", "avx512"), "note", "AVX-512 (Best 9)", "the system refuses AMX's"),
                                        (("portable", "avx2"), "ok", "AVX2 (Best 9)", ""),
                                        (("portable",), "note", "portable (Best 9)", "no AVX2: the portable kernels run")):
        monkeypatch.setattr(_core, "kernel_isas", lambda sets=sets: sets)
        found = told("instruction set")
        assert found[:2] == (status, words) and found[2].startswith(advice) and bool(found[2]) == bool(advice)
    flags = "avx512f"
    monkeypatch.setattr(_core, "kernel_isas", lambda: ("portable", "avx2", "avx512"))
    assert told("instruction set") == ("ok", "AVX-512 (Best 9)", "")
    for room, status, words in (((8 << 30, 1 << 30, False), "ok", "1 GiB available of 8 GiB"),
                                ((8 << 30, (1 << 30) - 1, True), "note", "1 GiB available of 8 GiB, limited by the container"),
                                ((None, 1, False), "note", "the system does not say how much there is")):
        monkeypatch.setattr(_core, "memory_room", lambda room=room: room)
        assert told("memory")[:2] == (status, words) and bool(told("memory")[2]) == (status == "note")


@pytest.mark.parametrize("lines, files, cores", [
    ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),
    ("0::/", {"cpu.max": "max 100000\n"}, None),
    ("0::/a/b.service", {"a/cpu.max": "300000 100000", "a/b.service/cpu.max": "max 100000"}, 3.0),          # systemd's, Slurm's
    ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 100000", "c/cpu.max": "1000 100000"}, 0.5),
    ("0::/../x", {"cpu.max": "200000 100000", "../x/cpu.max": "1 100000"}, 2.0),          # outside of the container's
    ("4:cpuset:/d\n3:cpu,cpuacct:/docker/1\n0::/", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
    ("3:cpuacct,cpu:/k", {"cpu,cpuacct/k/cpu.cfs_quota_us": "50000", "cpu,cpuacct/k/cpu.cfs_period_us": "100000",
                          "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ("3:cpuset:/k", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000", "cpu.max": "1 1"}, None),
    ("0::/a", {"cpu.max": "200000 100000", "../cpu.max": "1 100000"}, 2.0),
    ("0::/", {"cpu.max": ""}, None),
    ("0::/a\udcff", {"cpu.max": "150000 100000"}, 1.5),          # a name that is no UTF-8
    ("", {}, None),
])
def test_all_groups_of_a_process_limit_its_cores(tmp_path, lines, files, cores):
    """Version 1, and version 2 but at the root, were overlooked: `docker run --cpus`, a service of systemd's, a job of Slurm's."""
    for name, text in {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        path = Path(os.path.normpath(tmp_path / name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))
    assert cpu_quota(tmp_path) == cores
    assert cpu_quota(tmp_path / "nothing") is None


def test_a_working_directory_that_is_gone_is_told_of(monkeypatch, tmp_path):
    """By a note, of a check called disk, though no run could begin there; and of files to write by no name at all."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for folder in (".", "runs"):
        found = examine(folder)[-1]
        assert (found.name, found.value, found.status) == ("folder", f"{folder}: No such file or directory", "wrong")
    assert examine(tmp_path / "runs")[-1].name == "disk"
    for write in (lambda: check_place("p.json", ""), lambda: check_output("rows.jsonl", appended=True)):
        with pytest.raises(FileNotFoundError, match="working directory, which has been deleted.*(p.json|rows.jsonl)"):
            write()


def test_doctor_knows_a_full_disk(monkeypatch, tmp_path):
    sizes = ((0, "wrong", "0 B"), (1 << 25, "note", "32 MiB"), (1 << 31, "ok", "2 GiB"), (1000 << 30, "ok", "0.977 TiB"))
    for free, status, size in sizes:                       # 1000 GiB were 1e+03
        stat = SimpleNamespace(f_blocks=1 << 40, f_bavail=free, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda path, stat=stat: stat)
        assert [(f.status, f.value) for f in examine(tmp_path) if f.name == "disk"] == [(status, f"{size} free")]


def test_doctor_calls_nothing_right_that_is_not_there(monkeypatch):
    missing = cuda.Versions("", "13.0", (cuda.Library("NCCL", "", "", "no libnccl.so.2"),))
    for name, value in {"load": lambda: cuda, "versions": lambda: missing, "why_not": lambda: "no driver", "devices": list}.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(Path, "exists", lambda path: "nvidia" not in str(path) and os.path.exists(path))
    found = {f.name: f for f in examine()}
    for name in ("CUDA driver", "NCCL"):
        assert found[name].status == "note" and "needed only for backend" in found[name].advice, found[name]


def test_doctor_tells_of_each_gpu_and_of_each_library(monkeypatch):
    """GPUs of several kinds, of which one is too old and one has no wgmma; libraries that are right, old, broken and not there."""
    def gpu(index, name, major, minor):
        return cuda.Device(index, name, (major, minor), 10, 16 << 30, 12 << 30, 1 << 16, 1 << 22, 10**9, 1e12, "", "")

    def kernel(index):
        if asked == "wgmma" and index == 1:
            raise _core.InvalidValueError("TERAPIPE_ATTENTION is 'wgmma': 'mma' would be right")
        return "wgmma" if index == 2 else "mma"

    asked, gpus = None, (gpu(0, "T4", 7, 5), gpu(1, "A100", 8, 0), gpu(2, "H200", 9, 0))
    have = (cuda.Library("cublasLt", "/l/libcublasLt.so", "13.0", ""), cuda.Library("NCCL", "/l/n.so", "2.18", "", "no splits"),
            cuda.Library("NVML", "", "", "libnvidia-ml.so.1 at /l does not load"), cuda.Library("cuDNN", "", "", "no libcudnn"))
    for name, value in {"load": lambda: cuda, "versions": lambda: cuda.Versions("13.0", "13.0", have), "why_not": lambda: None,
                        "devices": lambda: gpus, "attention_kernel": kernel}.items():  # fmt: skip
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.delenv("TERAPIPE_ATTENTION", raising=False)
    found = {f.name: f for f in examine()}
    assert [found[f"GPU {i}"].status for i in range(3)] == ["note", "ok", "ok"] and "GPU" not in found
    assert found["GPU 0"].value == "T4, compute capability 7.5, 10 multiprocessors, 12 GiB free of 16 GiB"
    assert "8.0 (Ampere) or newer" in found["GPU 0"].advice and "attention of GPU 0" not in found
    assert [found[f"attention of GPU {i}"].value for i in (1, 2)] == ["by mma.sync", "by wgmma"]
    assert [(found[one.name].status, found[one.name].value, found[one.name].advice) for one in have] == [
        ("ok", "13.0 at /l/libcublasLt.so", ""), ("note", "2.18 at /l/n.so", "no splits"),
        ("note", "cannot be used", "libnvidia-ml.so.1 at /l does not load"), ("note", "not found", doctor.CUDNN_ALONE)]
    for asked, status, told in (("wgmma", "note", "'mma' would be right"), ("cudnn", "ok", "the forward is cuDNN's")):
        monkeypatch.setenv("TERAPIPE_ATTENTION", asked)
        found = {f.name: f for f in examine()}
        assert found["attention of GPU 1"].status == status
        assert told in found["attention of GPU 1"].value + found["attention of GPU 1"].advice
        assert found["cuDNN"].advice == ("no libcudnn" if asked == "cudnn" else doctor.CUDNN_ALONE)


def test_doctor_says_when_the_c_module_does_not_load(tmp_path):
    """A package without its C module, as after a failed build."""
    package = tmp_path / "terapipe_c"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(tp.__file__).with_name("doctor.py"), package)
    code = (
        "from terapipe_c.doctor import examine\n"
        "print([f.advice for f in examine() if f.name == '_core' and f.status == 'wrong'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert "does not load" in done.stdout
