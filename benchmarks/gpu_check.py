"""Everything that needs a GPU, in one command and under nine minutes: builds in place, checks, then measures.

    make gpu-check                                        # or, where there is no make:
    python3 benchmarks/gpu_check.py [--only NAME ...] [--seconds 540] [--list]

Each question is a process of its own with a deadline of its own, so that one that fails, hangs or loses the device leaves
the rest alone. Questions live in benchmarks/gpu/*.py: a module's QUESTIONS lists them. The answers go to
benchmarks/results/<gpu>-<date>.json as they come, each with its command, its time and what it found; the commit (or, where
there is no git, a digest of the sources) stands above them. Exit status: 0 all answered, 1 some failed, 2 no GPU to ask.
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import common  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Question:
    """`answer` returns what json can write; an exception is a failure. It runs where terapipe_c and common can be imported."""

    name: str
    seconds: float
    """Its deadline, well above what it should take: what is asked last gets what --seconds leaves."""
    answer: Callable[[], Any]
    order: int = 50
    """Small ones first: 0 to 9 build, 10 to 39 are right or wrong, 40 on are speed."""


def questions() -> list[Question]:
    found: list[Question] = []
    for path in sorted((ROOT / "benchmarks" / "gpu").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += getattr(module, "QUESTIONS", [])
    names = [q.name for q in found]
    assert len(set(names)) == len(names), f"a question stands twice: {names}"
    return sorted(found, key=lambda q: q.order)


def digest() -> str:
    """Of all sources that the numbers depend on: tells a state where git cannot."""
    total = hashlib.sha256()
    for top in ("csrc", "cuda", "terapipe_c", "benchmarks/gpu"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in (".c", ".h", ".inc", ".cu", ".py") and path.is_file():
                total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def gpu() -> dict[str, str]:
    """The first GPU as nvidia-smi tells it; {} where there is none. Asked without the package, which is not built yet."""
    fields = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "power.limit", "mig.mode.current",
              "compute_cap")
    with contextlib.suppress(OSError):
        ran = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"],
                             capture_output=True, text=True)  # fmt: skip
        values = [v.strip() for v in ran.stdout.strip().split(",")]
        if ran.returncode == 0 and len(values) == len(fields):
            return dict(zip(fields, values, strict=True))
    return {}


def ask(question: Question, seconds: float) -> dict[str, Any]:
    """Run one in a process group of its own; kill the group at its deadline."""
    command = [sys.executable, str(Path(__file__).relative_to(ROOT)), "--answer", question.name]
    began = time.monotonic()
    record: dict[str, Any] = {"command": " ".join(["python3", *command[1:]]), "deadline_s": round(seconds, 1)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as told:
        out = Path(folder) / "answer.json"
        child = subprocess.Popen([*command, "--to", str(out)], cwd=ROOT, stdout=told, stderr=told, start_new_session=True)
        try:
            status: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        record["seconds"] = round(time.monotonic() - began, 1)
        told.seek(0)
        tail = told.read().decode(errors="replace")[-3000:]
        if status == 0 and out.exists():
            record |= {"ok": True, "answer": json.loads(out.read_text())}
        else:
            why = f"ran past its deadline of {seconds:.0f} s" if status is None else f"exit status {status}"
            record |= {"ok": False, "why": why, "output": tail}
    return record


def answer(name: str, to: str) -> int:
    (found,) = (q for q in questions() if q.name == name)
    result = found.answer()
    Path(to).write_text(json.dumps(result))
    return 0


def build(card: dict[str, str]) -> dict[str, Any]:
    """_core and _cuda in place, kernels for this GPU alone."""
    arch = card.get("compute_cap", "").replace(".", "") or "90"
    environment = {**os.environ, "TERAPIPE_CUDA": "1", "TERAPIPE_CUDA_ARCHS": arch}
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=environment,
                         capture_output=True, text=True)  # fmt: skip
    return {"ok": ran.returncode == 0, "seconds": round(time.monotonic() - began, 1), "archs": arch,
            "output": (ran.stdout + ran.stderr)[-3000:] if ran.returncode else ""}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these questions alone")
    parser.add_argument("--list", action="store_true", help="name every question and its deadline")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it, the build included (default 540)")
    parser.add_argument("--out", default=None, help="result file (default benchmarks/results/<gpu>-<date>.json)")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        return answer(options.answer, options.to)
    chosen = [q for q in questions() if not options.only or q.name in options.only]
    if unknown := set(options.only or ()) - {q.name for q in chosen}:
        parser.error(f"no question is called {', '.join(sorted(unknown))}; --list names them")
    if options.list:
        for q in chosen:
            print(f"{q.name:24} {q.seconds:4.0f} s  {(q.answer.__doc__ or '').strip().splitlines()[0]}")
        print(f"{'together':24} {sum(q.seconds for q in chosen):4.0f} s, the build not counted")
        return 0
    card = gpu()
    if not card:
        print("gpu-check: nvidia-smi shows no GPU here; nothing was measured", file=sys.stderr)
        return 2
    return check(chosen, card, options)


def check(chosen: list[Question], card: dict[str, str], options: argparse.Namespace) -> int:
    began = time.monotonic()
    result = common.header("What the CUDA backend does on this GPU: right or wrong, then how fast")
    result |= {"sources": digest(), "gpu": card, "build": build(card), "questions": {}}
    model = re.sub(r"[^a-z0-9]+", "-", card["name"].lower().replace("nvidia", "")).strip("-")
    out = options.out or str(common.RESULTS / f"{model}-{datetime.date.today().isoformat()}.json")
    print(f"gpu-check: {card['name']}, commit {result['commit'] or 'unknown'}, sources {result['sources']}")
    print(f"{'build':24} {'ok' if result['build']['ok'] else 'FAILED'} {result['build']['seconds']:6.1f} s", flush=True)
    common.write("", result, out)
    if not result["build"]["ok"]:
        print(result["build"]["output"], file=sys.stderr)
        return 1
    for q in chosen:
        left = options.seconds - (time.monotonic() - began)
        record = ask(q, min(q.seconds, left)) if left > 3 else {"ok": False, "why": "no time was left", "seconds": 0.0}
        result["questions"][q.name] = record
        print(f"{q.name:24} {'ok' if record['ok'] else 'FAILED'} {record['seconds']:6.1f} s  {record.get('why', '')}", flush=True)
        if not record["ok"]:
            print("    " + record.get("output", "")[-1500:].replace("\n", "\n    "), file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(None):
            common.write("", result, out)  # as they come: a run cut short keeps what it has
    result["gpu_after"] = gpu()
    common.write("", result, out)
    failed = [name for name, record in result["questions"].items() if not record["ok"]]
    print(f"gpu-check: {len(chosen) - len(failed)} of {len(chosen)} answered in {time.monotonic() - began:.0f} s"
          + (f"; failed: {', '.join(failed)}" if failed else ""))  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
