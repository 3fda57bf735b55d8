"""benchmarks/gpu_sanitize.py without a GPU: what it makes of compute-sanitizer's own words, deadlines, and its exit status."""

import collections
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_gpu_check import ROOT, checkout, gpu_check, until_gone  # noqa: F401 (checkout is a fixture)

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_sanitize  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))

RACE = """......========= Error: Race reported between Write access at clip(clip_args)+0x1e00
=========     and Read access at clip(clip_args)+0x1e10 [16 hazards]
========= """
OUT_OF_BOUNDS = """========= Invalid __global__ write of size 4 bytes
=========     at attention_planted_memcheck(int *, int)+0xa0
=========     by thread ({},0,0) in block (0,0,0)
=========     Access at 0x7fe035c00200 is out of bounds"""
# As an H200's compute-sanitizer 2025.3.1 said it, pytest's own lines of signs among them.
RACES = f"""========= COMPUTE-SANITIZER
{RACE}
{RACE}
......ssssss..........   [100%]
=========================== short test summary info ============================
64 passed, 6 skipped in 40.14s
========= RACECHECK SUMMARY: 2 hazards displayed (23 errors, 1 warning)"""
RING = """========= Error: Race reported between Write access at attention_dkdv_ring_64_2(tp_attention_args)+0x7d00
=========     and {} access at attention_dkdv_ring_64_2(tp_attention_args)+0xe70 [256 hazards]
=========     and Read access at attention_dkdv_ring_64_2(tp_attention_args)+0xe80 [256 hazards]
========= """
FULL = ("========= Warning: Maximum number of hazards reached. Environment variable "
        "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS can be used to increase this count.\n========= ")  # fmt: skip
SANITIZER = f"""#!{sys.executable} -SE
import json, os, sys, time
if sys.argv[1:] == ["--version"]:
    sys.exit(print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0 (build 36400806) (public-release)"))
tool, words = sys.argv[sys.argv.index("--tool") + 1], sys.argv
what = (words[words.index("--answer") + 1] if "--answer" in words else "rows" if words[-1].endswith("_optim.py") else
        "tests" if "gpu" in words else "planted")
kind, found = ("RACECHECK", "0 hazards displayed (0 errors, 0 warnings)") if tool == "racecheck" else ("ERROR", "0 errors")
said = "========= " + kind + " SUMMARY: " + found
status, said, seconds = json.load(open("said.json")).get(tool + ", " + what) or (
    [1, "========= Found\\n=========     at attention_planted_" + tool + "(int *, int)+0xa0\\n========= ERROR SUMMARY: 1 error", 0]
    if what == "planted" else [0, said, 0])
assert tool == os.environ["GPU_CHECK_WATCHED"]
if seconds and "GPU_CHECK_SO_FAR" in os.environ:
    open(os.environ["GPU_CHECK_SO_FAR"], "w").write('{{"headline": "half"}}')
print("========= COMPUTE-SANITIZER", said.replace("PID", str(os.getpid())), sep="\\n", flush=True)
time.sleep(seconds)
sys.exit(status)
"""


@pytest.fixture
def sanitize(checkout):  # noqa: F811
    """Its result for what compute-sanitizer says: {"tool, what": [exit status, words, seconds]}; else all is well."""
    for name, constant in (("gpu_sanitize.py", "ENDING_S"), ("gpu_check.py", "LEAST_S")):
        text, found = re.subn(rf"^{constant} = .*", f"{constant} = 0.1", (ROOT / "benchmarks" / name).read_text(), flags=re.M)
        assert found == 1
        (checkout / "benchmarks" / name).write_text(text)
    (checkout / "benchmarks/gpu_library.py").write_text("from pathlib import Path\nFOLDER = Path()\npath_of = Path\n")
    (checkout / "bin/compute-sanitizer").write_text(SANITIZER)
    (checkout / "bin/compute-sanitizer").chmod(0o755)

    def run(said, *options):
        (checkout / "said.json").write_text(json.dumps(said))
        for before in (*(checkout / "out").iterdir(), *checkout.glob("benchmarks/results/*")):  # or it takes another name
            before.unlink()
        command = [sys.executable, "benchmarks/gpu_sanitize.py", "--at-once", "20", "--commit", "c0ffee", *options]
        ran = subprocess.run(command, cwd=checkout, text=True, capture_output=True,
                             env={"PATH": f"{checkout / 'bin'}:/usr/bin:/bin", "OUT": str(checkout / "out")})  # fmt: skip
        (written,) = (checkout / "out").iterdir()
        assert re.fullmatch(r"sanitize-h200-\d{4}-\d\d-\d\d.json", written.name), written
        assert (checkout / "benchmarks/results" / written.name).read_text() == written.read_text()
        return ran, json.loads(written.read_text())

    return run


@pytest.mark.parametrize("said, sums", [
    ("========= ERROR SUMMARY: 0 errors", {"errors": 0}),
    ("===== 3 errors in 2.5s =====", None),
    ("========= ERROR SUMMARY: 144 errors\n========= ERROR SUMMARY: 44 errors were not printed. Use --print-limit option to adjust "
     "the number of printed errors", {"errors": 144}),
    (RACES, {"hazards": 2, "errors": 23, "warnings": 1}),
    ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", {"hazards": 1, "errors": 1, "warnings": 0}),
])  # fmt: skip
def test_each_tool_sums_up_in_its_own_words(said, sums):
    assert gpu_sanitize.counted(said) == sums


def test_reports_of_one_place_are_one():
    (race, number), = gpu_sanitize.reports(gpu_sanitize.told(RACES)).items()
    assert number == 2 and race.splitlines() == ["Error: Race reported between Write access at clip(clip_args)+0x1e00",
                                                 "    and Read access at clip(clip_args)+0x1e10 [16 hazards]"]  # fmt: skip
    both = gpu_sanitize.reports(gpu_sanitize.told("\n".join([*map(OUT_OF_BOUNDS.format, range(32)), RACES])))
    assert list(both.values()) == [32, 2] and "thread (0,0,0)" in next(iter(both))


def test_what_watches_attention_alone_watches_it():
    """Its filter is part of every kernel's name, and of the planted ones'; each tool has something to find."""
    (_, name) = gpu_sanitize.OURS
    part = name.removeprefix("kns=")
    texts = [path.read_text() for path in (ROOT / "cuda").glob("attention*") if path.suffix in (".cu", ".inc")]
    kernels = [kernel for text in texts for kernel in re.findall(r"^TP_KERNEL\w*\((?:NAME\()?(\w+)", text, re.M)]
    planted = re.findall(r"^(\w+)\(int \*x", (ROOT / "benchmarks/gpu/planted.cu").read_text(), re.M)
    assert len(kernels) > 10 and all(kernel.startswith(part) for kernel in kernels)
    assert sorted(planted) == sorted(f"{part}planted_{tool}" for tool in gpu_sanitize.TOOLS)
    asked = {one.what for one in gpu_sanitize.lanes("90", "") if "--answer" in one.command}
    assert asked <= {question.name for question in gpu_check.questions()}, "a question has another name"


def third_time():
    """{a kernel's name, or what it begins with: after how many tokens its loop over tiles comes to a buffer a third time}: buffers
    x tokens of a tile x 2."""
    forward, ring, backward, wgmma = ((ROOT / "cuda" / name).read_text() for name in (
        "attention_ring.cu", "attention_ring.inc", "attention_ring_backward.inc", "attention_wgmma.inc"))  # fmt: skip
    keys, stages = (int(re.search(rf"^#define {name} (\d+)", text, re.M).group(1)) for name, text in
                    (("KEYS", ring), ("STAGES", backward)))  # fmt: skip
    found = {f"attention_forward_ring_{dim}_{groups}": 2 * int(count) * keys for dim, groups, count in
             re.findall(r"#define HD (\d+)\n#define GROUPS (\d)\n#define STAGES (\d)", forward)}  # fmt: skip
    assert len(found) == 4
    found |= dict.fromkeys(("attention_dq_ring", "attention_dkdv_ring"), 2 * stages * 64)
    found["attention_dq_wgmma"] = 2 * 64 * int(re.search(r"define DQ_KEYS\(key\) \(\(key\) / 64 % (\d)", wgmma).group(1))
    two = [f"attention_{kernel}_{kind}" for kernel in ("forward", "dq", "dkdv") for kind in ("wgmma", "64", "128")]
    one = [f"attention_{kernel}_f32" for kernel in ("forward", "dq", "dkdv")]
    return dict.fromkeys(two, 2 * 2 * 64) | dict.fromkeys(one, 2 * 32) | {"attention_delta": 0} | found


def test_racecheck_is_shown_each_kernel_come_round_its_buffers(monkeypatch):
    """Every kernel that the questions launch; slices of one row, within a tile, after others, to a ragged end; some heads."""
    cuda_emu = pytest.importorskip("cuda_emu")
    if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
        pytest.skip("no CUDA sources beside the tests, or no gcc")
    from test_cuda_attention import BF16, F32, MMA, WGMMA, Attention

    (asked,) = (one for one in gpu_check.questions() if one.name == "wgmma right")
    questions, module, emu = asked.answer.__globals__, cuda_emu.emulated(), cuda_emu.library()
    launched = {}

    def kernels_of(dim, dtype, groups, kernel):
        if (which := (dim, dtype, groups, kernel)) not in launched:
            emu.tp_cuda_attention_force(groups)
            module.emu_trace(True)
            Attention(emu, dtype, 1, 1, dim, 1, kernel=kernel).run([1])
            emu.tp_cuda_attention_force(0)
            launched[which] = {name for name, _ in module.emu_trace(False)}
        return launched[which]

    def shown(tool):
        monkeypatch.setenv("GPU_CHECK_WATCHED", tool)
        found = collections.defaultdict(list)
        for asked, kernel in (([(BF16, 1), (BF16, 2), (F32, 0)], MMA), ([(BF16, 1), (BF16, 2), (BF16, 3)], WGMMA)):
            for B, H, dim, slices, of_shape in questions["cases"](asked, kernel == WGMMA):
                for name in {name for one in of_shape for name in kernels_of(dim, *one, kernel)}:
                    found[name].append((B, H, dim, slices))
        return found

    every, raced = shown("memcheck"), shown("racecheck")
    assert set(raced) == set(every) and len(every) > 25
    for name, shapes in raced.items():
        (least,) = (tokens for begin, tokens in third_time().items() if name.startswith(begin))
        assert max(sum(slices) for *_, slices in shapes) > least, name
        assert any(slices[1:2] == [1] or name.endswith("f32") for *_, slices in shapes), name
        assert any(B * H > 1 for B, H, *_ in shapes) and any(sum(slices) % 32 for *_, slices in shapes), name
        assert {dim % 64 == 0 for _, _, dim, _ in shapes} == {True, False}, name


def test_all_is_clean(sanitize):
    ran, result = sanitize({})
    assert ran.returncode == 0 and "17 of 17 clean" in ran.stdout, ran.stdout + ran.stderr
    assert result["commit"] == "c0ffee" and result["sanitizer"] == "2025.3.1.0" and result["gpu"]["name"] == "NVIDIA H200"
    assert len(result["lanes"]) == 17 and all(one["state"] == "clean" for one in result["lanes"].values())
    ports = [re.search(r"--port (\d+)", one["command"]).group(1) for one in result["lanes"].values()]
    assert len(set(ports)) == 17, "lanes side by side would meet at a port"


def test_what_is_found_is_told_once(sanitize):
    ran, result = sanitize({"racecheck, rows": [1, RACES, 0]}, "--tools", "racecheck")
    found = result["lanes"]["racecheck, rows"]
    assert ran.returncode == 1 and found["counts"] == {"hazards": 2, "errors": 23, "warnings": 1}, ran.stderr
    assert "2 x Error: Race reported" in ran.stdout and ran.stdout.count("clip(clip_args)+0x1e00") == 1
    assert [name for name, one in result["lanes"].items() if one["state"] != "clean"] == ["racecheck, rows"]


def test_what_is_known_of_right_code_is_told_but_not_wrong(sanitize):
    one, three = RING.format("Read"), "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"
    lane = "racecheck, wgmma right"
    ran, result = sanitize({lane: [gpu_sanitize.FOUND, 130 * f"{one}\n" + three.format(130, 130), 0]}, "--only", "wgmma right")
    found = result["lanes"][lane]
    assert ran.returncode == 0 and "130 hazards, 130 errors, 0 warnings (130 known)" in ran.stdout, ran.stdout + ran.stderr
    assert found["state"] == "clean" and found["reports"] == {} and found["counts"]["hazards"] == 130
    assert re.search(r"--print-limit \d{4} ", found["command"]), "of what is not printed the kind is not known"
    ((why, alike),) = found["known"].items()
    assert list(alike.values()) == [130] and "+0xe80" in next(iter(alike)) and f"known: {why}" in ran.stdout
    both = f"{one}\n{RACE}\n"
    for said, status in ((both + three.format(2, 2), gpu_sanitize.FOUND),  # another one beside it
                         (f"{one}\n" + three.format(1, 2), gpu_sanitize.FOUND),  # another one, which was not printed
                         (f"{one}\n{FULL}\n" + three.format(1, 1), gpu_sanitize.FOUND),  # others may not have been kept
                         (f"{one}\n" + three.format(1, 1), 1)):  # the question itself failed
        ran, result = sanitize({lane: [status, said, 0]}, "--only", "wgmma right", "--tools", "racecheck")
        assert ran.returncode == 1 and result["lanes"][lane]["state"] == "wrong" and "(1 known)" in ran.stdout, said


def test_nothing_else_is_known():
    def known(version, text, tool="racecheck"):
        return [bool(gpu_sanitize.known(tool, version, lines)) for lines in gpu_sanitize.told(text)]

    one = RING.format("Read")
    assert known("2025.3.1.0", one) == [True]
    assert known("2025.4.0.0", one) == known("", one) == known("2025.3.1.0", one, "memcheck") == [False]
    for other in (RING.format("Write"), one.replace("dkdv_ring", "dkdv", 1), RACE, one.splitlines()[0]):
        assert known("2025.3.1.0", other) == [False], other


def test_what_does_not_end_is_no_fault_unless_something_was_found(sanitize):
    late = {"initcheck, tests": [0, "PID dots", 60], "memcheck, tests": [0, OUT_OF_BOUNDS.format(7), 60],
            "racecheck, wgmma right": [0, RING.format("Read"), 60]}  # fmt: skip
    ran, result = sanitize(late, "--only", "tests", "wgmma right", "--seconds", "3")
    found, dots = result["lanes"]["memcheck, tests"], result["lanes"]["initcheck, tests"]
    ring = result["lanes"]["racecheck, wgmma right"]
    assert ring["state"] == "late" and "no summary (1 known)" in ran.stdout and ring["so_far"] == {"headline": "half"}
    assert ran.returncode == 1 and found["state"] == "wrong" and "1 x Invalid __global__ write" in ran.stdout, ran.stderr
    assert dots["state"] == "late" and dots["counts"] is None and "NO END" in ran.stdout
    assert until_gone(int(dots["output"].split()[0]))
    ran, result = sanitize({}, "--seconds", "0.1")
    assert ran.returncode == 3 and {one["why"] for one in result["lanes"].values()} == {"no time was left"}


def test_a_tool_that_finds_nothing_planted_or_cannot_run_is_wrong(sanitize):
    ended = "Traceback: no such file\n========= Error: Target application terminated before first instrumented API call"
    failed = "========= Target application returned an error\n========= ERROR SUMMARY: 1 error"
    ran, result = sanitize({"synccheck, planted": [0, "========= ERROR SUMMARY: 0 errors", 0], "memcheck, planted": [1, failed, 0],
                            "memcheck, wgmma right": [255, ended, 0]})  # fmt: skip
    wrong = {name for name, one in result["lanes"].items() if one["state"] == "wrong"}
    assert ran.returncode == 1 and wrong == {"synccheck, planted", "memcheck, planted", "memcheck, wgmma right"}
    assert "no summary; exit status 255" in ran.stdout and "Traceback: no such file" in ran.stdout


@pytest.mark.parametrize("missing", ["compute-sanitizer", "nvidia-smi"])
def test_nothing_to_ask_with(sanitize, checkout, missing):  # noqa: F811
    (checkout / "bin" / missing).write_text("#!/bin/sh\nexit 9\n")
    if missing == "compute-sanitizer":
        (checkout / "bin" / missing).unlink()
        if Path("/usr/local/cuda/bin/compute-sanitizer").exists():
            pytest.skip("the toolkit's is there")
    ran = subprocess.run([sys.executable, "benchmarks/gpu_sanitize.py"], cwd=checkout, capture_output=True, text=True,
                         env={"PATH": f"{checkout / 'bin'}:/usr/bin:/bin"})  # fmt: skip
    assert ran.returncode == 2 and "nothing was checked" in ran.stderr, ran.stderr
