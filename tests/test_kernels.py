"""The CPU kernels other than matrix products: tests/c/test_kernels.c, once per instruction set this machine has."""
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIP = 77  # what the C test returns where the processor lacks its instruction set
FLAGS = {  # as in setup.py
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mavx2", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "portable": [],
}
COMMON = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wshadow",
          "-Wstrict-prototypes", "-Wmissing-prototypes", "-Wvla", "-Werror", "-DSHARE_ALONE=0", "-I."]


def build_and_run(isa, folder, extra=()):
    """Compile the C test for one instruction set and run it; (return code, output)."""
    compiler = os.environ.get("CC", "gcc").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler {compiler[0]}")
    if isa != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{isa} is x86-64's")
    binary = folder / f"test_kernels_{isa}"
    sources = ["tests/c/test_kernels.c", "csrc/base/team.c", "csrc/base/status.c"]
    subprocess.run([*compiler, *COMMON, *FLAGS[isa], *extra, *sources, "-o", str(binary), "-lm", "-lpthread"],
                   cwd=ROOT, check=True, timeout=120)
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=120)
    if done.returncode == SKIP:
        pytest.skip(f"this processor has no {isa}")
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """isa -> output of its passed test; tests are independent of each other's order."""
    seen = {}

    def get(isa):
        if isa not in seen:
            seen[isa] = build_and_run(isa, tmp_path_factory.mktemp(isa))
        return seen[isa]

    return get


@pytest.mark.parametrize("isa", FLAGS)
def test_kernels_match_double_and_themselves_however_cut(outputs, isa):
    code, text = outputs(isa)
    assert code == 0, text[:4000]
    assert "0 failures" in text


def test_avx2_and_avx512_give_the_same_bits(outputs):
    wide, narrow = outputs("avx512"), outputs("avx2")
    assert wide[1].split(",")[0] == narrow[1].split(",")[0]
    assert wide[1].startswith("digest ")


def test_no_access_outside_the_arrays(tmp_path):
    """The same test under AddressSanitizer and UBSan: workspace and masked tails stay inside their bounds."""
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    compiler = os.environ.get("CC", "gcc").split()
    if shutil.which(compiler[0]) is None or subprocess.run(
            [*compiler, "-fsanitize=address,undefined", str(probe), "-o", str(tmp_path / "probe")],
            capture_output=True).returncode != 0:
        pytest.skip("the compiler has no sanitizers")
    isa = "avx2" if platform.machine() in ("x86_64", "AMD64") else "portable"
    code, text = build_and_run(isa, tmp_path, ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"])
    assert code == 0, text[:4000]
