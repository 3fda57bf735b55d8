"""Everything that needs a GPU, in one command and under nine minutes: builds in place, checks, then measures.

    make gpu-check                                        # or, where there is no make:
    python3 benchmarks/gpu_check.py [--only NAME ...] [--seconds 540] [--list]
    python3 benchmarks/gpu_check.py --emulate             # the questions themselves, small, without a GPU: no figures

Each question is a process of its own with a deadline of its own, so that one that fails, hangs or loses the device leaves
the rest alone; some are asked again without what a device may refuse (steps as graphs): then a number comes, and is marked.
Questions of right or wrong run a few at a time, those of speed alone. For each of the former that waits time is kept, and
what ran past a deadline that was shortened for that is asked again with what is left. They live in benchmarks/gpu/*.py: a
module's QUESTIONS lists them. The answers go to benchmarks/results/<gpu>-<date>.json (-2, -3 behind another run of the day)
as they come (and beside it to $OUT, where that is a folder), each with its command, its time and what it found, or what it had
found when it failed, and the names of what was not asked; the commit (git's, or as told by --commit) and a digest of the sources
stand above them. Exit status: 0 all answered, 1 something is wrong, 2 no GPU to ask, 3 nothing is wrong, but something was not
asked in time, or some speed not measured.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import faulthandler
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SELF = str(Path(__file__).resolve().relative_to(ROOT))
BEGAN = time.monotonic()
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]
import common  # noqa: E402

# At worst BUILD_S + RIGHT_S + the seconds of all questions of speed: tests/test_gpu_check.py adds them up. A machine whose disk
# is cold may build for longer than this (the H200's took 20 s), since nothing can be asked before: then the last questions have
# less, or no time.
BUILD_S = 75.0
BUILD_MOST_S = 240.0
RIGHT_S = 150.0
LANES = 3  # questions of right or wrong at a time
KEPT_S = 16.5  # of a lane, for each that waits: LANES * (RIGHT_S // KEPT_S) is not less than the questions of right or wrong
SPEED = 40  # the first order of the questions of speed
ENDING_S = 10.0  # a process that waits within the driver for a GPU that hangs cannot be ended: it is left behind
NOT_ASKED = "no time was left"
LEAST_S = 3.0  # less is not worth asking
LATE = "ran past its deadline"
TRACE_S = 1.0  # before its deadline a question that hangs says where
CHOOSES = ("TERAPIPE_", "CUDA_", "CUBLAS", "NCCL_", "CUDNN_")  # variables that change what is measured
MARK = "GPU_CHECK_CHILD"
TAIL = 7000  # characters about failures at the end, beside 4500 of answers: who runs this may see no more than the last 12000


@dataclasses.dataclass(frozen=True)
class Question:
    """`answer` returns what json can write; an exception is a failure. It runs where terapipe_c and common can be imported."""

    name: str
    seconds: float
    """Its deadline, well above what it should take. One of speed may take up to twice that out of what those before it have
    left; what is asked last gets what --seconds leaves."""
    answer: Callable[[], Any]
    order: int = 50
    """10 to 39 are right or wrong, 40 on are speed; what matters most comes first."""
    warm: Callable[[], Any] | None = None
    """What may be done before, while others check: it fills the folder GPU_CHECK_CACHE, which the answer is given if all went
    well, and else an empty one. Its failure means nothing."""
    otherwise: dict[str, str] | None = None
    """The environment in which it is asked again where it failed and time is left: its failure stays one, but `again` answers."""
    named: bool = False
    """Asked where --only names it, alone: nine minutes have no room for it beside the others."""


def share(mine: float, waiting: int, least: float) -> float:
    """Of `mine` seconds, what one may take before so many others, for each of which so much is kept, or an equal part."""
    return max(mine - waiting * least, mine / (waiting + 1))


def in_time() -> float:
    """Seconds until the deadline of the question that is asked here, one short of which it says where it is."""
    return float(os.environ.get("GPU_CHECK_SECONDS", "inf")) - TRACE_S - (time.monotonic() - BEGAN)


def small() -> bool:
    """Whether this is a rehearsal without a GPU: tiny sizes, and nothing is a figure."""
    return bool(os.environ.get("GPU_CHECK_SMALL"))


def watched() -> str:
    """The tool that watches every access (gpu_sanitize.py), or nothing: nothing is asked twice, few heads do for many, messages
    come late; "racecheck", which takes longest, is shown what each kernel does, once."""
    return os.environ.get("GPU_CHECK_WATCHED", "")


def so_far(value: Any) -> None:
    """What an answer has found by now: kept if it does not come to its end."""
    if path := os.environ.get("GPU_CHECK_SO_FAR"):
        Path(f"{path}.new").write_text(json.dumps(value, default=plain))
        os.replace(f"{path}.new", path)


def questions_of(path: Path) -> list[Question]:
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(getattr(module, "QUESTIONS", []))


def questions() -> list[Question]:
    """Of every file; one that does not load is a question by its name, which fails."""
    found: list[Question] = []
    for path in sorted((ROOT / "benchmarks" / "gpu").glob("*.py")):
        try:
            found += questions_of(path)
        except Exception:
            found.append(Question(path.stem, 20, lambda path=path: questions_of(path), order=10))
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


# The driver itself: which GPU is the first is CUDA's to say, by speed and CUDA_VISIBLE_DEVICES, of which nvidia-smi knows nothing.
ASK_DRIVER = """
import ctypes, uuid
cuda, name, number, raw = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(100), ctypes.c_int(), (ctypes.c_ubyte * 16)()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetName(name, 100, 0) == 0 and cuda.cuDeviceGetUuid(raw, 0) == 0
parts = [(cuda.cuDeviceGetAttribute(ctypes.byref(number), which, 0), number.value) for which in (75, 76)]
assert [status for status, _ in parts] == [0, 0]
print(name.value.decode(), ".".join(str(value) for _, value in parts), f"GPU-{uuid.UUID(bytes=bytes(raw))}", sep="\\n")
"""


def gpu(seconds: float = 60.0) -> dict[str, str]:
    """The GPU that runs what is asked, as the driver tells it and nvidia-smi; {} where there is none. Asked without the package,
    not built yet, and within so many seconds: of a GPU that hangs neither answers."""
    until, short = time.monotonic() + seconds, ("name", "compute_cap")
    lines = told_by([sys.executable, "-c", ASK_DRIVER], until).splitlines()
    *first, which = lines if len(lines) == 3 else ["0"]
    for fields in (("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "power.limit", "mig.mode.current",
                    "compute_cap"), short):  # fmt: skip
        told = told_by(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", which], until)
        if len(values := [v.strip() for v in told.strip().split(",")]) == len(fields):
            return dict(zip(fields, values, strict=True))
    return dict(zip(short, first, strict=True)) if first else {}


def told_by(command: list[str], until: float) -> str:
    """What a command says that ends well; nothing else, and not for longer than half of what is left."""
    with contextlib.suppress(OSError):
        status, tail, _ = Child(command, errors=False).end((until - time.monotonic()) / 2, ending=1.0)
        return tail if status == 0 else ""
    return ""


# ---- processes -----------------------------------------------------------------------------------------------------------


class Child:
    """A process group of its own, with what it says in a file; errors False: but for what it complains of. Whoever it starts
    bears its mark: a rank has a group of its own, and one that hangs would keep its memory of the GPU from all that follow."""

    numbers = itertools.count()
    alive: set["Child"] = set()
    kept = 6000  # bytes of what it says

    def __init__(self, command: list[str], errors: bool = True, **environment: str) -> None:
        self.told = tempfile.TemporaryFile()
        self.began = time.monotonic()
        self.mark = f"{os.getpid()}.{next(self.numbers)}"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process: subprocess.Popen[bytes] | None = None
        self.alive.add(self)  # before it is there: whoever is told to end meanwhile finds it by its mark
        try:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.told, start_new_session=True,
                                            stderr=self.told if errors else subprocess.DEVNULL,
                                            env={**os.environ, "PYTHONPATH": path, MARK: self.mark, **environment})  # fmt: skip
        except OSError:
            self.alive.discard(self)
            raise

    def kill(self) -> None:
        """Its group, and who bears its mark elsewhere."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in place.read_bytes().split(b"\0"):
                    os.kill(int(place.parent.name), signal.SIGKILL)

    def end(self, seconds: float, ending: float | None = None) -> tuple[int | None, str, float]:
        """(exit status, None if it had to be ended; the last it said; seconds since it began)."""
        assert self.process is not None
        try:
            status: int | None = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING_S if ending is None else ending)
            self.alive.discard(self)
        took = time.monotonic() - self.began
        self.told.seek(max(0, self.told.seek(0, os.SEEK_END) - self.kept))
        tail = self.told.read().decode(errors="replace")
        self.told.close()
        return status, tail, took


def ended(status: int | None, seconds: float) -> str:
    if status is None:
        return f"{LATE} of {seconds:.0f} s"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


def ask(question: Question, seconds: float, cache: str | None = None, **environment: str) -> dict[str, Any]:
    """Run one in a process group of its own; kill the group at its deadline. cache: what it warmed up."""
    command = [sys.executable, SELF, "--answer", question.name]
    record: dict[str, Any] = {"command": " ".join(["python3", *command[1:]]), "deadline_s": round(seconds, 1)}
    with tempfile.TemporaryDirectory() as folder:
        out, partly = Path(folder) / "answer.json", Path(folder) / "so_far.json"
        status, tail, took = Child([*command, "--to", str(out)], GPU_CHECK_SO_FAR=str(partly),
                                   GPU_CHECK_CACHE=cache or f"{folder}/cache", GPU_CHECK_SECONDS=f"{seconds:.1f}",
                                   **environment).end(seconds)  # fmt: skip
        record["seconds"] = round(took, 1)
        if status == 0 and out.exists():
            return record | {"ok": True, "answer": json.loads(out.read_text())}
        record |= {"ok": False, "why": ended(status, seconds), "output": tail}
        if partly.exists():
            record["so_far"] = json.loads(partly.read_text())
    return record


def answer(name: str, to: str | None) -> int:
    """to None: warm up for it."""
    (found,) = (q for q in questions() if q.name == name)
    if to is None:
        assert found.warm is not None
        found.warm()
    else:
        if (left := in_time()) < math.inf:
            faulthandler.dump_traceback_later(max(left, 0.1))
        Path(to).write_text(json.dumps(found.answer(), default=plain))
    return 0


def plain(value: Any) -> Any:
    """What json does not know: NumPy's numbers as numbers, all else by its text, rather than that an answer is lost."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else str(value)


def valid(value: Any) -> Any:
    """The same of what Python reads as JSON: JSON has no word for what is not finite, which most others refuse a file for."""
    if isinstance(value, dict):
        return {name: valid(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [valid(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Warming:
    """What questions do beforehand, beside the checks."""

    def __init__(self, chosen: list[Question], folder: str) -> None:
        self.caches = {q.name: f"{folder}/{i}" for i, q in enumerate(chosen) if q.warm is not None}
        self.children: dict[str, Child] = {}
        for name, cache in self.caches.items():
            with contextlib.suppress(OSError):
                self.children[name] = Child([sys.executable, SELF, "--warm", name], GPU_CHECK_CACHE=cache)

    def end(self, seconds: float) -> dict[str, Any]:
        until, found = time.monotonic() + seconds, {}
        for name, child in self.children.items():
            status, tail, took = child.end(until - time.monotonic())
            found[name] = {"status": status, "seconds": round(took, 1)} | ({} if status == 0 else {"output": tail[-1500:]})
            if status != 0:
                del self.caches[name]  # half a file may lie there
        return found


# Gigabytes of libraries come from the disk once: not within a question's deadline.
FIRST_USE = "import torch; x = torch.ones(256, 256, device='cuda', dtype=torch.bfloat16); print((x @ x).sum().item())"


def build(card: dict[str, str]) -> dict[str, Any]:
    """_core and _cuda in place, kernels for this GPU alone; and beside it the library that the rows' questions load."""
    arch = card.get("compute_cap", "").replace(".", "") or "90"
    until = time.monotonic() + BUILD_S
    rows, libraries = Child([sys.executable, "benchmarks/gpu_library.py", arch]), Child([sys.executable, "-c", FIRST_USE])
    status, tail, took = Child([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], TERAPIPE_CUDA="1",
                               TERAPIPE_CUDA_ARCHS=arch, TERAPIPE_MPI="0").end(BUILD_MOST_S)  # fmt: skip
    rows_status, rows_tail, rows_took = rows.end(max(until - time.monotonic(), ENDING_S))
    libraries_status, libraries_tail, libraries_took = libraries.end(until - time.monotonic())
    found = {"ok": status == 0, "seconds": round(took, 1), "archs": arch, "rows_ok": rows_status == 0,
             "rows_seconds": round(rows_took, 1), "torch_seconds": round(libraries_took, 1)}  # fmt: skip
    if libraries_status != 0:
        found["torch_output"] = libraries_tail[-1500:]
    if status != 0:
        found["output"] = tail
        if status is None:
            found["output"] += f"\nthe build ran past its deadline of {BUILD_MOST_S:.0f} s: another run goes on where it was"
    if rows_status != 0:
        found["rows_output"] = rows_tail
    return found


# ---- the whole -----------------------------------------------------------------------------------------------------------


def asking_arguments(parser: argparse.ArgumentParser, seconds: int, file: str = "") -> None:
    """What `Asking` reads."""
    parser.add_argument("--seconds", type=float, default=seconds, help=f"for all of it, the build included (default {seconds})")
    parser.add_argument("--out", default=None, help=f"result file (default benchmarks/results/{file}<gpu>-<date>.json)")
    parser.add_argument("--commit", help="of these sources, where git does not know it: in a copy of a working tree")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these questions alone")
    parser.add_argument("--list", action="store_true", help="name every question and its deadline")
    asking_arguments(parser, 540)
    parser.add_argument("--emulate", action="store_true", help="rehearse without a GPU: tiny sizes, figures mean nothing")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    if options.answer or options.warm:
        return answer(options.answer or options.warm, options.to)
    chosen = [q for q in questions() if (q.name in options.only if options.only else options.list or not q.named)]
    if unknown := set(options.only or ()) - {q.name for q in chosen}:
        parser.error(f"no question is called {', '.join(sorted(unknown))}; --list names them")
    if options.list:
        for q in chosen:
            print(f"{q.order:3} {q.name:24} {q.seconds:4.0f} s  {(q.answer.__doc__ or '').strip().splitlines()[0]}"
                  + (" By --only alone." if q.named else ""))  # fmt: skip
        speed = sum(q.seconds for q in chosen if q.order >= SPEED and not q.named)
        print(f"at worst {BUILD_S:.0f} s to build, {RIGHT_S:.0f} s for right or wrong, {speed:.0f} s for speed")
        return 0
    if options.emulate:
        import cuda_emu

        os.environ |= {"GPU_CHECK_SMALL": "1", "TERAPIPE_CUDA_MODULE": str(cuda_emu.build())}
        options.out = options.out or os.devnull
        return Check(chosen, {"name": "emulated", "compute_cap": "9.0"}, options).run()
    on_the_device()
    card = gpu()
    if not card:
        print("gpu-check: neither nvidia-smi nor the driver shows a GPU here; nothing was measured", file=sys.stderr)
        return 2
    return Check(chosen, card, options).run()


def on_the_device() -> None:
    """Nothing that a shell was left with may have questions answered by the emulator, or in tiny sizes: figures are a GPU's."""
    for name in [name for name in os.environ if name.startswith("GPU_CHECK_") or name == "TERAPIPE_CUDA_MODULE"]:
        del os.environ[name]


def unused(path: str) -> str:
    """A name that no run of this day has: what another has measured stays."""
    names = (f"{path.removesuffix('.json')}-{n}.json" for n in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not Path(name).exists())


class Asking:
    """What is asked of one GPU within --seconds; its file is written as answers come."""

    who, file = "gpu-check", ""

    def __init__(self, question: str, card: dict[str, str], options: argparse.Namespace) -> None:
        self.began, self.card, self.options, self.lock = BEGAN, card, options, threading.Lock()
        model = re.sub(r"[^a-z0-9]+", "-", card["name"].lower().replace("nvidia", "")).strip("-")
        self.out = options.out or unused(str(common.RESULTS / f"{self.file}{model}-{datetime.date.today().isoformat()}.json"))
        self.unwritten = set[Path]()
        self.result = common.header(question)
        if options.commit:
            self.result |= {"commit": options.commit, "modified": None}
        choices = {name: value for name, value in sorted(os.environ.items()) if name.startswith(CHOOSES)}
        self.result |= {"sources": digest(), "gpu": card, "environment": choices}

    def begin(self, built: bool = True) -> bool:
        """Says what is asked, and builds what is to be; False: that failed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        print(f"{self.who}: {self.card['name']}, commit {self.result['commit'] or 'unknown'}, sources {self.result['sources']}",
              flush=True)  # fmt: skip
        self.write()
        if not built:
            return True
        self.result["build"] = made = build(self.card)
        print(f"{'build':22} {'ok' if made['ok'] else 'FAILED':6} {made['seconds']:6.1f} s  rows' library "
              f"{'ok' if made['rows_ok'] else 'FAILED'} {made['rows_seconds']:.1f} s", flush=True)  # fmt: skip
        self.write()
        if not made["ok"]:
            print(made["output"][-TAIL:], flush=True)
        return bool(made["ok"])

    def stop(self, number: int, _: Any) -> None:
        """Told to end: nobody stays behind on the GPU. What was answered lies written."""
        for child in list(Child.alive):
            child.kill()
        print(f"{self.who}: ended by {signal.Signals(number).name}; written so far: {self.out}", flush=True)
        os._exit(128 + number)

    def write(self) -> None:
        """As answers come, a whole file each time: a run that is cut short keeps what it has, one that finds no room goes on."""
        self.result["seconds"] = round(time.monotonic() - self.began, 1)
        paths, folder = [Path(self.out)], os.environ.get("OUT")
        if folder and Path(folder).is_dir():
            paths.append(Path(folder) / Path(self.out).name)
        for path in paths if self.out != os.devnull else ():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                Path(f"{path}.new").write_text(json.dumps(valid(self.result), indent=1, allow_nan=False) + "\n")
                os.replace(f"{path}.new", path)
                self.unwritten.discard(path)
            except OSError as error:
                self.unwritten.add(path)
                print(f"{self.who}: {path} was not written: {error}", flush=True)

    def where(self) -> str:
        """Where all of it lies, or does not."""
        return f"written: {self.out}" + "".join(f"; NOT written, or not to its end: {path}" for path in sorted(self.unwritten))

    def left(self) -> float:
        return float(self.options.seconds) - (time.monotonic() - self.began)


class Check(Asking):
    def __init__(self, chosen: list[Question], card: dict[str, str], options: argparse.Namespace) -> None:
        super().__init__("What the CUDA backend does on this GPU: right or wrong, then how fast", card, options)
        self.chosen, self.caches = chosen, dict[str, str]()
        self.ends = dict[int, float]()  # of each lane, when what it asks now must have ended
        self.result |= {"questions": {}, "not_asked": [q.name for q in chosen]}

    def put(self, q: Question, until: float, spare: float = 0.0) -> None:
        """spare: what others have left of their time; some of it may be had besides."""
        whole = q.seconds + min(max(spare, 0.0), q.seconds)
        record = self.asked(q, min(whole, until - time.monotonic(), self.left()))
        self.keep(q, record)
        if record["ok"] or record["why"] == NOT_ASKED or q.otherwise is None:
            return
        again = self.asked(q, min(q.seconds, whole - record["seconds"], until - time.monotonic(), self.left()), q.otherwise)
        if again.get("why") != NOT_ASKED:
            self.keep(q, record | {"again": again | {"environment": q.otherwise}})

    def asked(self, q: Question, seconds: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
        record: dict[str, Any] = {"ok": False, "why": NOT_ASKED, "seconds": 0.0}
        if seconds <= LEAST_S:
            return record
        try:
            return ask(q, seconds, self.caches.get(q.name), **environment or {})
        except Exception:  # no process could be started, no room for what it says: the others may have better luck
            return record | {"why": "it could not be asked", "output": traceback.format_exc()}

    def keep(self, q: Question, record: dict[str, Any]) -> None:
        """Into the result, and a line of it to who watches."""
        last = record.get("again", record)
        found = last.get("answer", last.get("so_far"))
        said = (found.get("headline") if isinstance(found, dict) else "") or last.get("why", "")
        if "environment" in last:
            said = f"with {' '.join(f'{k}={v}' for k, v in last['environment'].items())}: {said}"
        with self.lock:
            self.result["questions"][q.name] = record
            asked = {name for name, one in self.result["questions"].items() if one.get("why") != NOT_ASKED}
            self.result["not_asked"] = [one.name for one in self.chosen if one.name not in asked]
            state = "ok" if record["ok"] else "FAILED"
            print(f"{q.name:22} {state:6} {last['seconds']:6.1f} s  {said}", flush=True)
            self.write()

    def run(self) -> int:
        if not self.begin(built=not self.options.emulate):
            return 1
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            self.ask_all(folder)
        self.result["gpu_after"] = {} if self.options.emulate else gpu(10.0)
        self.write()
        return self.tell()

    def ask_all(self, folder: str) -> None:
        warming = Warming([] if self.options.emulate else self.chosen, folder)  # the package is there now
        until = max(time.monotonic(), self.began + BUILD_S) + RIGHT_S
        right = [q for q in self.chosen if q.order < SPEED]
        waiting, self.ends = list(right), dict.fromkeys(range(LANES), 0.0)
        with concurrent.futures.ThreadPoolExecutor(LANES) as lanes:
            list(lanes.map(lambda lane: self.ask_by(lane, waiting, until), self.ends))
        self.ask_again(right, until)
        self.result["warmed"] = warming.end(min(45.0, until - time.monotonic()))
        self.caches = warming.caches
        speed = [q for q in self.chosen if q.order >= SPEED]
        for i, q in enumerate(speed):
            self.put(q, math.inf, self.left() - sum(one.seconds for one in speed[i:]))
        self.ask_again(right, math.inf)

    def ask_by(self, lane: int, waiting: list[Question], until: float) -> None:
        """Ask what waits: one that hangs takes nothing of what is kept for each of those behind it."""
        while True:
            with self.lock:
                now = time.monotonic()
                mine = until - now
                others = sum(int(max(until - max(end, now), 0.0) // KEPT_S) for at, end in self.ends.items() if at != lane)
                if not waiting or (mine < KEPT_S and others >= len(waiting)):
                    self.ends[lane] = until
                    return
                q = waiting.pop(0)
                seconds = min(q.seconds, share(mine, max(len(waiting) - others, 0), KEPT_S))
                self.ends[lane] = now + seconds
            self.put(q, now + seconds)

    def ask_again(self, asked: list[Question], until: float) -> None:
        """What was not asked, or ran past a deadline that was shortened, with what is left; without what a device may refuse."""
        for q in asked:
            record, seconds = self.result["questions"][q.name], min(q.seconds, until - time.monotonic(), self.left())
            late = record.get("why", "").startswith(LATE) and "again" not in record
            if record.get("why") == NOT_ASKED and seconds > LEAST_S:
                self.keep(q, self.asked(q, seconds))
            elif late and q.otherwise and seconds > LEAST_S:
                self.keep(q, record | {"again": self.asked(q, seconds, q.otherwise) | {"environment": q.otherwise}})
            elif late and q.otherwise is None and seconds > record["deadline_s"] + LEAST_S:
                self.keep(q, self.asked(q, seconds))

    def tell(self) -> int:
        """What failed, in full as far as there is room; the exit status."""
        records = self.result["questions"]
        failed = [q for q in self.chosen if not records[q.name]["ok"]]
        for q in failed:
            room, output = TAIL // len(failed), re.sub(r"^[ ~^]+\n", "", records[q.name].get("output", ""), flags=re.M)
            print(f"---- {q.name}: {records[q.name]['why']}\n{output[-room:]}")  # without what points at words of a traceback
        wrong = [q for q in failed if q.order < SPEED and records[q.name]["why"] != NOT_ASKED]
        print(f"gpu-check: {len(self.chosen) - len(failed)} of {len(self.chosen)} answered in {time.monotonic() - self.began:.0f} s"
              + (f"; failed: {', '.join(q.name for q in failed)}" if failed else "") + f"; {self.where()}", flush=True)
        return 1 if wrong else 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
