"""What the benchmarks share: the machine's description, real text as tokens, peers in venvs of their own, fair rounds.

A comparison is run in interleaved rounds (A B C A B C ...), each contender alone on the machine in its turn, so that a
machine that slows down slows all of them down. Reported: the median over all timed steps, and the quartiles.
"""

import argparse
import array
import collections
import contextlib
import datetime
import glob
import json
import os
import platform
import re
import select
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = Path(os.environ.get("TERAPIPE_BENCH", ROOT / ".bench"))  # peers' venvs, corpora, runs: nothing that is kept
GPT2_VOCAB = 50257


def output_of(*command: str) -> str:
    with contextlib.suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure: processor, cores, caches, memory, kernel, load when it began."""
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            caches[f"L{(index / 'level').read_text().strip()}{(index / 'type').read_text()[0].lower()}"] = (
                index / "size").read_text().strip()  # fmt: skip
    isa = [f for f in ("avx2", "fma", "avx512f", "amx_tile") if flags and f in flags.group(1).split()]
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(), "isa": isa, "cores": len(os.sched_getaffinity(0)),
        "caches": caches, "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(), "python": platform.python_version(), "load_at_start": os.getloadavg(),
    }  # fmt: skip


def header(question: str) -> dict[str, Any]:
    """The head of a result: what was asked, of which commit (results of runs before do not modify it), where, when, how."""
    changes = output_of("git", "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    return {
        "question": question, "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": output_of("git", "rev-parse", "HEAD"), "modified": bool(changes),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "machine": machine(),
    }  # fmt: skip


def write(name: str, result: dict[str, Any], out: str | None = None) -> Path:
    path = Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {os.path.relpath(path)}")
    return path


def repeat_arguments(description: str | None, name: str, repeats: int = 9) -> argparse.ArgumentParser:
    """A parser with the options of what is timed by itself, without peers: --repeats, --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", help=f"result file (default benchmarks/results/{name}.json)")
    return parser


def timed(call: Callable[[], Any], repeats: int, warm: bool = False) -> tuple[Any, list[float]]:
    """What the last call gave, and the seconds of each of `repeats` calls, ascending. warm: one more call before them."""
    if warm:
        call()
    result, seconds = None, []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, sorted(seconds)


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options that all of them have: --rounds, --steps, --out."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=defaults.get("rounds", 3), help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=defaults.get("steps", 2), help="timed steps a round")
    parser.add_argument("--out", default=None, help="result file (default benchmarks/results/<name>.json)")
    return parser


def driver(name: str, folder: str) -> Path:
    """benchmarks/<name>.c, linked with the objects of the C tests' harness: setup.py's own flags."""
    objects = subprocess.run([sys.executable, ROOT / "tests/c/run", "--objects"], capture_output=True, text=True, check=True)
    apart = "/py/", "/comm/mpi_"  # they want an interpreter, and MPI
    own = [ROOT / path for path in objects.stdout.split() if not any(part in path for part in apart)]
    binary = Path(folder) / name
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE", f"-I{ROOT}"]
    subprocess.run(["gcc", *flags, ROOT / f"benchmarks/{name}.c", *own, "-o", binary, "-lm", "-lpthread"], check=True)
    return binary


def summary(samples: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(samples)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {"median": statistics.median(ordered), "quartiles": [quartiles[0], quartiles[2]],
            "least": ordered[0], "most": ordered[-1], "samples": list(samples)}  # fmt: skip


# ---- real text ----------------------------------------------------------------------------------------------------------


def corpus(tokens: int = 2_000_000) -> Path:
    """A uint16 file (nanoGPT's .bin) of real text over GPT-2's 50257 ids: this Python's standard library, cut into words,
    blanks and signs; the most frequent pieces get an id of their own, the rest is spelled in bytes (ids 0 to 255)."""
    path = FOLDER / f"stdlib-{sys.version_info.major}.{sys.version_info.minor}-{tokens}.bin"
    if path.exists():
        return path
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/**/*.py", recursive=True))
    pieces: list[bytes] = []
    for name in files:
        pieces += re.findall(rb"\w+|\s+|[^\w\s]", Path(name).read_bytes())
        if len(pieces) >= tokens:
            break
    common = collections.Counter(pieces).most_common(GPT2_VOCAB - 256)
    ids = {piece: 256 + rank for rank, (piece, _) in enumerate(common)}
    stream: list[int] = []
    for piece in pieces[:tokens]:
        stream.extend([ids[piece]] if piece in ids else piece)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(array.array("H", stream).tobytes())
    return path


# ---- peers in venvs of their own ----------------------------------------------------------------------------------------


def peer_python(name: str, *requirements: str) -> Path:
    """The interpreter of .bench/<name>, made on the first call: a peer's packages never enter the project's own venv.
    A wheel under /opt/wheels is taken in place of a download."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        print(f"making {python.parents[1]} with {', '.join(requirements)} (once)")
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    words = []
    for requirement in requirements:
        package, _, version = requirement.partition("==")
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        wheels = glob.glob(f"/opt/wheels/{package}-{version}*-{tag}-*.whl")
        words.append(wheels[0] if wheels else requirement)
    probe = f"import importlib.metadata as m; [m.version(n) for n in {[r.partition('==')[0] for r in requirements]}]"
    if subprocess.run([str(python), "-c", probe], capture_output=True).returncode != 0:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words], check=True)
    return python


class Peer:
    """A contender in a process group of its own that waits between its turns. It speaks JSON lines: first one that says it
    is ready; then for each line `{"mode": ..., "steps": n}` one with `seconds` (of each step) and what else it has to say."""

    def __init__(self, command: Sequence[str | Path], environment: dict[str, str] | None = None, timeout_s: float = 900.0) -> None:
        self.timeout_s = timeout_s
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=os.environ | (environment or {}), start_new_session=True)  # fmt: skip
        self.buffer = b""
        self.about = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + self.timeout_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.close()
                raise TimeoutError(f"{self.process.args} said nothing for {self.timeout_s:g} s")
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                self.close()
                raise RuntimeError(f"{self.process.args} ended before it answered")
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def stopped(*peers: Peer) -> Iterator[None]:
    """Peers that do not even poll while another contender runs."""
    for peer in peers:
        os.killpg(peer.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for peer in peers:
            os.killpg(peer.process.pid, signal.SIGCONT)


def interleave(contenders: dict[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Round after round, one turn of each contender in order: what each said in each round."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, turn in contenders.items():
            start = time.perf_counter()
            answers[name].append(turn())
            shown = ", ".join(f"{s:.2f}" for s in answers[name][-1]["seconds"])
            print(f"  round {number + 1}: {name:28} {shown} s a step   (turn of {time.perf_counter() - start:.0f} s)", flush=True)
    return answers
