"""Names of others that are no text here: the kernel cuts a process's after 15 bytes, within a character too, and a file's or a
variable's is whatever bytes somebody gave it. The rest of what they stand among is to be read all the same."""
import mmap
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from terapipe_c import doctor, mpi, worker
from terapipe_c.environment import find_place

CUT = "starte_traininä".encode()[:15]       # what comm has of a script of that name
ASK = "import os; from terapipe_c import watch, environment; print(watch.launcher_of(environment.find_place(os.environ)))"
BETWEEN = f"""
import subprocess, sys
open("/proc/self/comm", "wb").write({CUT!r})
print(subprocess.run([sys.executable, "-c", {ASK!r}], capture_output=True, text=True, check=True).stdout)
"""

TOKEN = """
import sys; from terapipe_c.environment import find_place
print(sys.getfilesystemencoding(), find_place({**__import__("os").environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h",
                                               "TORCHELASTIC_RUN_ID": "1"}, "torchrun").token)
"""
FINDS = """
import os, sys, terapipe_c as tp
model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=16, vocab_size=256, block_size=16)
cluster = tp.Cluster(1)
plan = tp.plan(model, cluster, batch=1, seq_len=16, costs=tp.CostModel.analytic(model, cluster))
data = sys.argv[1].encode("ascii").decode("unicode_escape")
print(len(list(tp.launch(plan, data=data, steps=1, out=data + ".run", progress=False))), os.path.isdir(data + ".run/checkpoints"))
"""
UTF8, ASCII = {"PYTHONUTF8": "1"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.fixture
def called_so():
    """This thread, which is the process to /proc, has a name that is no UTF-8."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(CUT)
    assert name.read_bytes() == CUT + b"\n"
    yield
    name.write_bytes(before.rstrip(b"\n"))


def test_a_rank_of_any_name_tells_its_resident_memory(called_so):
    """As each does when its training is over, which was lost: with processes=False, or tp.train, of a script that has a #!."""
    assert worker._resident_bytes() > 1 << 20


def test_a_launcher_is_found_behind_a_process_of_any_name():
    """As of `srun ./starte_traininä.sh`, whose shell has the rank's variables: every rank ended before it had begun."""
    place = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_", "SLURM_"))}
    ran = subprocess.run([sys.executable, "-c", BETWEEN], env={**environment, **place}, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.strip() == str(os.getpid()), ran.stderr


def test_what_mpi_has_mapped_is_seen_beside_files_of_any_name(tmp_path):
    strange = os.fsencode(tmp_path) + b"/caf\xe9"
    Path(os.fsdecode(strange)).write_bytes(bytes(4096))
    with open(strange, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert strange in Path("/proc/self/maps").read_bytes()
        assert isinstance(mpi._shared_memory(), frozenset)


def test_a_processor_of_any_name_is_told(monkeypatch):
    """A virtual machine's has the name that its owner gave it."""
    real = Path.read_bytes

    def read(path, encoding=None, errors=None, newline=None):
        raw = b"processor : 0\nmodel name : caf\xe9\nflags : avx2\n" if str(path) == "/proc/cpuinfo" else real(path)
        return raw.decode(encoding or "utf-8", errors or "strict")

    monkeypatch.setattr(Path, "read_text", read)
    told = {finding.name: finding.value for finding in doctor._cores()}
    assert "(caf\N{REPLACEMENT CHARACTER})" in told["instruction set"]


def test_a_job_s_secret_and_its_name_are_bytes():
    """In the C locale without UTF-8, too, all that is not ASCII: such a rank's token is that of one that takes it for text."""
    def place(secret, name):
        job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": name, "TERAPIPE_TOKEN": secret}
        found = find_place({name: os.fsdecode(value) for name, value in job.items()})
        return found.token, found.port

    assert len({place(*both)[0] for both in ((b"g\xfc", "1"), (b"g\xfd", "1"), (b"g\xfc", b"1\xfc"))}) == 3
    assert place(b"", b"1\xfc")[1] != place(b"", b"1\xfd")[1]
    told = [subprocess.run([sys.executable, "-c", TOKEN], env={**os.environ, **mode, "TERAPIPE_TOKEN": "gehüm".encode()},
                           capture_output=True, text=True, check=True).stdout for mode in (UTF8, ASCII)]
    assert told[0].split()[0] == "utf-8" and told[1].split()[0] == "ascii" and told[0].split()[1] == told[1].split()[1]


def test_ranks_take_a_name_for_the_same_bytes_as_their_launcher(tmp_path):
    """-X utf8 was the launcher's alone: to its ranks the file had an impossible name, or was not there where Latin-1 is used."""
    (tmp_path / "t\u00e4.txt").write_bytes(b"hallo welt " * 40)
    words = ["-P", "-X", "utf8", "-c", FINDS, f"{tmp_path}/t\\u00e4.txt"]
    ran = subprocess.run([sys.executable, *words], env={**os.environ, **ASCII}, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.split() == ["1", "True"], ran.stderr


def test_what_was_compiled_where_a_folder_s_name_is_no_text_is_not_compiled_again(tmp_path):
    """As for a Python in such a folder, where the package was not to be built."""
    setup = runpy.run_path(str(Path(__file__).parents[1] / "setup.py"), run_name="setup_py")
    output, made = tmp_path / "a.o", []

    def compile_it():
        made.append(output.write_bytes(b""))
        output.with_suffix(".d").write_bytes(os.fsencode(output) + b":\n")

    for folder, times in ((b"/caf\xe9", 1), (b"/caf\xe9", 1), (b"/caf\xe8", 2), ("/caf\u00e9".encode(), 3)):
        setup["compile_if_stale"](output, os.fsdecode(b"gcc -isystem " + folder), compile_it)
        assert len(made) == times, folder
