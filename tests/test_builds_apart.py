"""Builds in one folder, after and beside each other: what one left is in no other's wheel, and no two write at once."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cuda_build import ROOT, setup_py


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("made", "left"), [("[]", []), ("[Extension('terapipe_c._cuda', ['no.c'], optional=True)]", []),
                                            ("[Extension('terapipe_c._cuda', ['no.c'])]", ["_cuda"])])  # fmt: skip
def test_no_wheel_has_what_an_earlier_build_left(tmp_path, inplace, made, left):
    """`pip install .`, then the same with TERAPIPE_CUDA=0, or with an nvcc that fails: the wheel had the first build's _cuda."""
    (tmp_path / "lib/terapipe_c").mkdir(parents=True)
    (tmp_path / "terapipe_c").mkdir()
    code = f"""
import os, sysconfig
from pathlib import Path
from setuptools import Distribution, Extension
os.chdir({str(tmp_path)!r})
folders = [Path('lib/terapipe_c'), Path('terapipe_c')][: 1 + {inplace}]
for folder in folders:
    for name in ('_core', '_cuda', '_mpi'):
        (folder / (name + sysconfig.get_config_var('EXT_SUFFIX'))).touch()
command = s['BuildExt'](Distribution({{'ext_modules': {made}}}))
command.build_lib, command.build_temp, command.inplace = 'lib', 'temp', {inplace}
command.ensure_finalized()
type(command).build_extensions = lambda self: None
command.run()
for folder in folders:
    print(*sorted(p.name.partition('.')[0] for p in folder.iterdir()))
"""
    ran = setup_py(code)
    assert ran.stdout.splitlines()[-1 - inplace :] == [" ".join(["_core", *left])] * (1 + inplace), ran.stdout + ran.stderr


def test_builds_in_one_folder_take_turns(tmp_path):
    """Of two `pip install .` at once, as on two machines that share a folder, one installed a _core that was cut off."""
    if not Path("/proc/locks").exists():
        pytest.skip("no /proc/locks, which tells who waits")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "build").mkdir()
    with open(tmp_path / "build/lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "setup.py", "--name"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                              env=os.environ | {"TERAPIPE_CUDA": "0", "TERAPIPE_MPI": "0"}) as child:  # fmt: skip
            waits = re.compile(rf"^\d+: -> POSIX .* {child.pid} ", re.MULTILINE)
            while not waits.search(Path("/proc/locks").read_text()):
                assert child.poll() is None
            fcntl.lockf(lock, fcntl.LOCK_UN)
            assert child.communicate()[0].split()[-1] == "terapipe_c" and child.returncode == 0
