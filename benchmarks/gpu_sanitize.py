"""The kernels and what feeds them under compute-sanitizer on a GPU, in two and a half minutes: accesses out of bounds, races in
shared memory, reads of what nobody wrote, barriers that not all come to.

    make gpu-sanitize [GPU_TOOLS="memcheck racecheck"]    # or, where there is no make:
    python3 benchmarks/gpu_sanitize.py [--tools TOOL ...] [--only WHAT ...] [--seconds 150] [--list]

Builds as gpu_check.py does. Then lanes side by side, each a process under one tool with a deadline of its own: the tests of the row
kernels, pytest -m gpu, and questions of gpu_check.py, those of attention with our kernels alone watched, by racecheck in few small
shapes (RACED in benchmarks/gpu/attention.py). A mistake planted for each tool must be found. Result:
benchmarks/results/sanitize-<gpu>-<date>.json (named as gpu_check.py's), and beside it $OUT, where that is a folder. Exit status:
0 all is clean, 1 something was found or failed, 2 no GPU or no compute-sanitizer, 3 nothing was found, but some lane did not end;
how far it came is told. What a tool reports of right code is named in KNOWN, with why: counted and told, but not wrong.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_check
import gpu_library

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 86  # the exit status of a program that itself ended well
PORTS, LEAST_PORT = 64, 49152  # of each lane: all would else look for one of the same ten
ENDING_S = 6.0  # is kept to end what hangs
# Some calls must fail: tests ask for more memory than there is. What the host did before says little here.
ALWAYS = ("--error-exitcode", str(FOUND), "--report-api-errors", "no", "--show-backtrace", "device", "--target-processes", "all")
# What is known is told once a launch, and of what is not printed nobody knows the kind: the tool's own limit is 100.
MORE = {"racecheck": ("--print-limit", "4000")}
OURS = ("--kernel-name", "kns=attention_")  # PyTorch's, which ours are held against, take most of the time
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0")
SUMMARY = re.compile(r"= (?:ERROR|RACECHECK) SUMMARY: (?!.*not printed)(.*)")
COUNT = re.compile(r"(\d+) (error|warning|hazard)s?\b")
TOLD = re.compile(r"(?<!=)={9}(?!=) ?(.*)")
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others' load others' libraries


@dataclasses.dataclass(frozen=True)
class Known:
    """Reports, each line of which is like `lines`, of a tool older than `before`."""

    tool: str
    before: tuple[int, ...]
    lines: re.Pattern[str]
    why: str


KNOWN = (Known("racecheck", (2025, 4), re.compile(
    r"Error: Race reported between Write access at attention_dkdv_ring_\w+\(.*| +and Read access at attention_dkdv_ring_\w+\(.*"),
    "cp.async of lse and delta, for whose end the readers wait at an mbarrier (cuda/attention_ring_backward.inc). The tool takes "
    "cp.async.mbarrier.arrive.noinc for an arrival at once: its release notes say so, and of 2025.4, with nvcc 13.1, that it is "
    "mended. tests/test_cuda_wgmma.py looks for races there"),)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Lane:
    tool: str
    what: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    planted: bool = False


def lanes(arch: str, folder: str) -> list[Lane]:
    """What matters most first: where there are few cores some wait for others."""
    python, program = sys.executable, str(gpu_library.FOLDER / "planted")
    found = [Lane(tool, "planted", (program, tool), OURS, planted=True) for tool in TOOLS]
    rows = (python, *PYTEST, "--noconftest", "tests/test_cuda_rows.py", "tests/test_cuda_optim.py")
    found += [Lane(tool, "rows", rows, environment=PLUGINS | {"TERAPIPE_CUDA_ROWS": str(gpu_library.path_of(arch))})
              for tool in TOOLS]  # fmt: skip
    for what, tools, options in (("attention right", TOOLS[:3], OURS), ("wgmma right", TOOLS[:3], OURS),
                                 ("stages on one GPU", TOOLS[:1], ())):  # fmt: skip
        for tool in tools:
            to = f"{folder}/{len(found)}.json"
            found.append(Lane(tool, what, (python, gpu_check.SELF, "--answer", what, "--to", to), options,
                              {"GPU_CHECK_SO_FAR": f"{to}.so_far"}))  # fmt: skip
    marked = [path for path in sorted((gpu_check.ROOT / "tests").glob("test_cuda_*.py")) if "mark.gpu" in path.read_text()]
    tests = (python, *PYTEST, "-m", "gpu", *(str(path.relative_to(gpu_check.ROOT)) for path in marked))
    return found + [Lane(tool, "tests", tests, environment=PLUGINS) for tool in ("memcheck", "initcheck")]


def counted(said: str) -> dict[str, int] | None:
    """{"errors": 23, "warnings": 1, "hazards": 20} as the tool sums up; None where it has not."""
    if not (lines := SUMMARY.findall(said)):
        return None
    sums = collections.Counter[str]()
    for number, kind in COUNT.findall("\n".join(lines)):
        sums[f"{kind}s"] += int(number)
    return dict(sums)


def told(said: str) -> list[list[str]]:
    """Each report's lines."""
    found: list[list[str]] = []
    for line in TOLD.findall(said):
        if not line.strip() or line == "COMPUTE-SANITIZER" or " SUMMARY: " in line:
            continue
        if line[0] != " ":
            found.append([])
        if found:
            found[-1].append(line[:200])
    return found


def reports(found: list[list[str]], most: int = 8) -> dict[str, int]:
    """The first of each kind, shortened, and how many are like it, by their first two lines: what, and where."""
    kinds = collections.Counter(tuple(lines[:2]) for lines in found)
    first = {tuple(lines[:2]): "\n".join(lines[:24]) for lines in reversed(found)}
    return {first[kind]: number for kind, number in kinds.most_common(most)}


def known(tool: str, version: str, lines: list[str]) -> str:
    """Why this report is of right code; nothing if it may be of a mistake."""
    release = tuple(map(int, re.findall(r"\d+", version)))
    return next((one.why for one in KNOWN if one.tool == tool and (0,) < release < one.before and len(lines) > 1
                 and all(map(one.lines.fullmatch, lines))), "")  # fmt: skip


class Sanitize(gpu_check.Asking):
    who, file = "gpu-sanitize", "sanitize-"

    def __init__(self, sanitizer: str, card: dict[str, str], options: argparse.Namespace) -> None:
        super().__init__("Whether compute-sanitizer finds an access, a race or a barrier that is wrong", card, options)
        version = re.search(r"Version (\S+)", gpu_check.told_by([sanitizer, "--version"], time.monotonic() + 20))
        self.sanitizer, self.waiting, self.ports = sanitizer, 0, iter(range(LEAST_PORT, 65536 - PORTS, PORTS))
        self.result |= {"sanitizer": version.group(1) if version else "", "lanes": {}}

    def run(self) -> int:
        arch = self.card.get("compute_cap", "").replace(".", "") or "90"
        planted = gpu_check.Child([sys.executable, "benchmarks/gpu_library.py", arch, "benchmarks/gpu/planted.cu"])
        built = self.begin()
        self.result["build"]["planted"] = planted.end(30.0)[:2]
        if not built:
            return 1
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            chosen = [one for one in lanes(arch, folder) if one.tool in self.options.tools and
                      one.what in (self.options.only or [one.what])]  # fmt: skip
            self.waiting = len(chosen)
            with concurrent.futures.ThreadPoolExecutor(max(1, self.options.at_once)) as pool:
                states = list(pool.map(self.watch, chosen))
        return self.tell(states)

    def watch(self, lane: Lane) -> str:
        with self.lock:
            seconds = (self.left() - ENDING_S) / math.ceil(self.waiting / max(1, self.options.at_once))
            self.waiting -= 1
            ports = ("--port", str(next(self.ports)), "--max-connections", str(PORTS))
        watching = ["--tool", lane.tool, *ALWAYS, *MORE.get(lane.tool, ()), *ports, *lane.options, *lane.command]
        record: dict[str, Any] = {"command": " ".join(["compute-sanitizer", *watching]), "deadline_s": round(seconds, 1)}
        if seconds <= gpu_check.LEAST_S:
            return self.keep(lane, "late", record | {"seconds": 0.0, "why": gpu_check.NOT_ASKED})
        child = gpu_check.Child([self.sanitizer, *watching], GPU_CHECK_WATCHED=lane.tool, GPU_CHECK_SECONDS=f"{seconds - 3:.1f}",
                                **lane.environment)  # fmt: skip
        child.kept = 1 << 24
        status, said, took = child.end(seconds)
        counts, found = counted(said), told(said)
        kinds: dict[str, list[list[str]]] = {"": []}
        for lines in found:
            kinds.setdefault(known(lane.tool, self.result["sanitizer"], lines), []).append(lines)
        others = kinds.pop("")
        if lane.planted:
            seen = any(f"planted_{lane.tool}(" in line for lines in found for line in lines)
            state = "clean" if counts and seen else "late" if status is None else "wrong"
        else:
            # one that is counted, but was not printed, may be of any kind
            all_known = bool(found) and not others and counts == {"hazards": len(found), "errors": len(found), "warnings": 0}
            wrong = any(counts.values()) and not all_known if counts else bool(others)
            failed = status and not (all_known and status == FOUND)
            state = "wrong" if wrong or failed or (counts is None and status == 0) else "late" if status is None else "clean"
        record |= {"seconds": round(took, 1), "why": gpu_check.ended(status, seconds), "counts": counts, "reports": reports(others)}
        if kinds:
            record["known"] = {why: reports(alike, len(alike)) for why, alike in kinds.items()}
        if state != "clean":
            record["output"] = re.sub(r"\n\s*\n", "\n", TOLD.sub("", said))[-3000:]
            if (partly := Path(lane.environment.get("GPU_CHECK_SO_FAR", ""))).is_file():
                record["so_far"] = json.loads(partly.read_text())
        return self.keep(lane, state, record)

    def keep(self, lane: Lane, state: str, record: dict[str, Any]) -> str:
        counts = record.get("counts")
        sums = ", ".join(f"{number} {kind}" for kind, number in counts.items()) if counts is not None else "no summary"
        if number := sum(sum(alike.values()) for alike in record.get("known", {}).values()):
            sums += f" ({number} known)"
        shown = {"clean": "found" if lane.planted else "clean", "wrong": "WRONG", "late": "NO END"}[state]
        with self.lock:
            self.result["lanes"][f"{lane.tool}, {lane.what}"] = {"state": state} | record
            print(f"{lane.tool:10} {lane.what:18} {shown:6} {record['seconds']:6.1f} s  {sums}; {record['why']}", flush=True)
            self.write()
        return state

    def tell(self, states: list[str]) -> int:
        """What was found, as far as there is room; the exit status."""
        failed = {name: one for name, one in self.result["lanes"].items() if one["state"] != "clean"}
        for name, one in failed.items():
            said = "\n".join(f"{number} x {text}" for text, number in one.get("reports", {}).items())
            room = gpu_check.TAIL // len(failed) // 2
            print(f"---- {name}: {one['why']}\n{said[:room]}\n{one.get('output', '').rstrip()[-room:]}")
        for why in dict.fromkeys(why for one in self.result["lanes"].values() for why in one.get("known", {})):
            print(f"---- known: {why}")
        print(f"{self.who}: {states.count('clean')} of {len(states)} clean in {time.monotonic() - self.began:.0f} s"
              + (f"; not: {'; '.join(failed)}" if failed else "") + f"; {self.where()}", flush=True)  # fmt: skip
        return 1 if "wrong" in states else 3 if "late" in states else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = list(dict.fromkeys(one.what for one in lanes("90", "")))
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS, help="these alone (default all four)")
    parser.add_argument("--only", nargs="+", choices=known, metavar="WHAT", help=f"of {', '.join(known)}")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="lanes side by side (default: the cores)")
    parser.add_argument("--list", action="store_true", help="name every lane")
    gpu_check.asking_arguments(parser, 150, "sanitize-")
    options = parser.parse_args()
    if options.list:
        print(*(f"{one.tool:10} {one.what:18} {' '.join((*one.options, *one.command))}" for one in lanes("90", "FOLDER")), sep="\n")
        return 0
    gpu_check.on_the_device()
    card, sanitizer = gpu_check.gpu(), shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    missing = "" if card else "neither nvidia-smi nor the driver shows a GPU here"
    if not Path(sanitizer).exists():
        missing = "compute-sanitizer is missing: it comes with the CUDA toolkit (its wheel lacks what starts a program)"
    if missing:
        print(f"gpu-sanitize: {missing}; nothing was checked", file=sys.stderr)
        return 2
    return Sanitize(sanitizer, card, options).run()


if __name__ == "__main__":
    sys.exit(main())
