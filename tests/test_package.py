"""What is built and shipped: the source distribution is whole, the wheel has its data, the face is API.md's."""

import ast
import importlib.metadata
import inspect
import operator
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest

import terapipe_c as tp

ROOT = Path(__file__).resolve().parents[1]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from a clean copy of the tree and unpacked."""
    if not tracked():
        pytest.skip("not a git checkout")
    clean, folder = tmp_path_factory.mktemp("clean"), tmp_path_factory.mktemp("sdist")
    for name in tracked():
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clean / name)
    build = f"import setuptools.build_meta as b; print(b.build_sdist({str(folder)!r}))"
    ran = subprocess.run([sys.executable, "-c", build], cwd=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(p for p in folder.iterdir() if p.is_dir())


def test_the_sdist_holds_every_source(sdist: Path) -> None:
    shipped = {str(p.relative_to(sdist)) for p in sdist.rglob("*") if p.is_file()}
    wanted = {name for name in tracked() if name.startswith(("csrc/", "cuda/", "terapipe_c/", "tests/"))}
    wanted |= {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile"}  # the README begins with two commands of make
    wanted |= set(re.findall(r"\]\(([^):#]+)[^)]*\)", (ROOT / "README.md").read_text()))  # and has links
    assert wanted - shipped - {"https"} == set()
    assert not [name for name in shipped if name.endswith((".so", ".o", ".pyc"))]


def test_the_sdist_compiles_alone(sdist: Path) -> None:
    """Every file of every module finds its headers in the sdist itself, by the flags it will be built with."""
    script = """
import runpy, subprocess, sys
s = runpy.run_path("setup.py", run_name="setup_py")
alike = {}
for source in s["core_sources"]():
    alike.setdefault(tuple(s["flags_of"](source)), []).append(source)
for flags, sources in alike.items():
    subprocess.run(["gcc", "-M", "-I.", *(f for f in flags if f != "-MMD"), *sources], check=True, stdout=subprocess.DEVNULL)
    assert not [f for f in flags if f.startswith(("-march", "-mtune", "-mcpu"))], sources
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=sdist, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_the_installed_package_has_its_data() -> None:
    home = Path(tp.__file__).parent
    for name in ("py.typed", "_core.pyi", "__init__.py"):
        assert (home / name).is_file(), f"{home / name} is missing"
    assert any(home.glob("_core*.so"))


def test_sources_that_are_not_built_say_so(tmp_path: Path) -> None:
    """Python finds the checkout before the installed package when it is started there."""
    for path in Path(tp.__file__).parent.rglob("*.py"):
        copy = tmp_path / "terapipe_c" / path.relative_to(Path(tp.__file__).parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    ran = subprocess.run([sys.executable, "-c", "import terapipe_c"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                         capture_output=True, text=True)
    assert ran.returncode == 1 and f"ImportError: {tmp_path}/terapipe_c is the source" in ran.stderr, ran.stderr
    assert "Python started in another folder" in ran.stderr
    assert len(ran.stderr.splitlines()) < 12  # Python 3.13 shows all lines of the statement


def test_every_error_says_what_it_is_for() -> None:
    errors = [value for name in tp.__all__ if isinstance(value := getattr(tp, name), type) and issubclass(value, tp.Error)]
    assert len(errors) == 12 and len({error.__doc__ for error in errors}) == len(errors)


def test_metadata() -> None:
    try:
        found = importlib.metadata.distribution("terapipe_c")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed (an in-place build)")
    requires = [r for r in found.requires or [] if "extra ==" not in r]
    assert len(requires) == 1 and requires[0].startswith("numpy"), "NumPy is the only run-time dependency"
    assert found.version == tp.__version__
    assert found.metadata["License"] == "Apache-2.0"  # what `pip show` says
    scripts = {e.name: e.value for e in found.entry_points if e.group == "console_scripts"}
    assert scripts == {"terapipe": "terapipe_c.__main__:main"}


def test_the_public_face_is_all_there_and_documented() -> None:
    assert sorted(set(tp.__all__)) == sorted(tp.__all__), "a name stands twice in __all__"
    for name in tp.__all__:
        value = getattr(tp, name)
        if inspect.isclass(value) and issubclass(value, tp.Error):
            continue  # the builtin that it also is says what it means
        if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
            assert (value.__doc__ or "").strip(), f"tp.{name} has no docstring"


def test_each_public_name_is_imported_from_where_the_type_checker_sees_it() -> None:
    tree = ast.parse(Path(tp.__file__).read_text())
    seen = [node for check in tree.body if isinstance(check, ast.If) for node in check.body if isinstance(node, ast.ImportFrom)]
    assert {node.module or "": tuple(alias.name for alias in node.names) for node in seen} == tp._ROOMS
    core = next(node for check in tree.body if isinstance(check, ast.Try) for node in check.body)
    assert sorted([*tp._ROOM_OF, *(alias.name for alias in core.names), "__version__"]) == sorted(tp.__all__)


@pytest.mark.parametrize("script", [
    "import terapipe_c.plan, terapipe_c as tp; from terapipe_c import plan; assert tp.plan is plan is terapipe_c.plan",
    "from terapipe_c.plan import Plan, plan; import terapipe_c as tp; assert tp.plan is plan and tp.Plan is Plan",
    "from terapipe_c import *; assert callable(plan) and plan.__name__ == 'plan' and schedules.gpipe",
    "import terapipe_c as tp; tp.plan; import terapipe_c.plan; assert callable(tp.plan) and tp.planners.balance",
    "import terapipe_c as tp; tp.plan = 1; assert tp.plan == 1; del tp.plan; assert callable(tp.plan)",
    "import terapipe_c as tp; assert tp.config.GPTConfig is tp.GPTConfig and tp.watch.Watch",
    "import pickle, terapipe_c as tp; assert pickle.loads(pickle.dumps(tp.plan)) is tp.plan",
    "import pickle, terapipe_c as tp; assert pickle.loads(b'cterapipe_c.plan\\nplan\\n.') is tp.plan",
    "import terapipe_c as tp; assert not any(hasattr(tp, name) for name in ('nothing', 'request', 'no.such', ''))"])  # fmt: skip
def test_a_public_name_is_never_the_module_that_it_is_in(script: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_a_rank_imports_no_planner() -> None:
    """They were a seventh of what a rank's start took, and a rank is given its plan."""
    tree = ast.parse(Path(tp.__file__).with_name("_rank.py").read_text())
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.With))
    there = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in there for alias in node.names} >= {"engine", "main", "Plan"}
    told = "import sys; print(*(name for name in sys.modules if 'terapipe_c.plann' in name))"
    script = "\n".join([*map(ast.unparse, there), told])
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "\n"


def test_threads_may_ask_for_the_public_names_at_once() -> None:
    """Locks of modules that import one another in a circle would hand one thread a module half made."""
    script = """if 1:
        import random, sys, threading
        import terapipe_c as tp
        wrong, start = [], threading.Barrier(8)
        def ask(seed):
            names = random.Random(seed).sample(tp.__all__, len(tp.__all__))
            start.wait()
            try:
                [getattr(tp, name) for name in names]
            except BaseException as error:
                wrong.append(error)
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert not wrong and callable(tp.plan), wrong"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], check=True)


LATE = """if 1:       # what a rank looks for in the launcher's sys.path
    import os, sys
    class Told:
        def find_spec(name, path, target=None):
            if path is None and "TERAPIPE_SYS_PATH" not in os.environ:
                say(name)
    def say(name):
        with open(os.path.join(os.environ["LATE"], str(os.getpid())), "a") as file:
            file.write(name + "\\n")
    if any(word.endswith("_rank.py") for word in sys.orig_argv):
        sys.meta_path.insert(0, Told)
        say("rank")
"""


def test_what_comes_into_sys_path_later_shadows_no_module_of_the_standard_library(tmp_path: Path) -> None:
    """A notebook's folder with a queue.py, say, behind `import terapipe_c`: nothing of that name is imported any more by then."""
    names = set()
    for path in Path(tp.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").partition(".")[0])
    ours = sorted((names & set(sys.stdlib_module_names)) - {"__future__", "argparse"})      # of the command alone
    assert "queue" in ours
    script = f"import sys, terapipe_c; print(*(name for name in {ours!r} if name not in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "\n"
    # a rank's are those of the launcher's sys.path from some moment on
    (tmp_path / "sitecustomize.py").write_text(LATE)
    (tmp_path / "late").mkdir()
    script = f"""if 1:
        import terapipe_c as tp
        model = tp.GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=61, block_size=16)
        plan = tp.plan(model, tp.Cluster(2), batch=2, seq_len=8, stages=2, planner="uniform")
        for steps in (2, 4):
            tp.launch(plan, [*range(61)] * 50, steps=steps, progress=False, out={str(tmp_path / "run")!r}, checkpoint_every=1,
                      eval_every=1, resume=steps > 2).wait()"""
    paths = f"{tmp_path}{os.pathsep}{Path(tp.__file__).parents[1]}"
    there = {"PYTHONPATH": paths, "LATE": str(tmp_path / "late")}
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, **there})
    assert [file.read_text() for file in (tmp_path / "late").iterdir()] == ["rank\n"] * 4


@pytest.mark.parametrize("module", [tp, tp.planners, tp.schedules, tp.cuda, tp.mpi, tp.zoo, tp.devices])
def test_completion_offers_the_public_names_alone(module: types.ModuleType) -> None:
    assert sorted(dir(module)) == sorted(module.__all__)


@pytest.mark.parametrize("name", [name for name in tp.__all__ if inspect.isfunction(getattr(tp, name))] + [
    "CostModel.from_table", "CostModel.from_samples", "CostModel.from_measurements", "CostModel.time", "Cluster.local",
    "Cluster.preset", "Timeline.from_intervals", "planners.slice_tokens", "planners.slice_batch_and_tokens", "planners.balance",
    "planners.autopipe", "planners.uniform", "planners.dawnpiper", "planners.bmpipe", "planners.layer_graph"])  # fmt: skip
def test_help_names_every_argument(name: str) -> None:
    function = operator.attrgetter(name)(tp)
    told = set(re.findall(r"\w+", inspect.getdoc(function) or ""))
    assert set(inspect.signature(function).parameters) - told - {"self"} == set()


def test_importing_brings_nothing_heavy() -> None:
    script = "import sys, terapipe_c; print(*sorted({'torch', 'tqdm', 'IPython', 'matplotlib'} & set(sys.modules)))"
    home = Path(tp.__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=home)
    assert ran.stdout.strip() == ""


def test_sources_stay_small() -> None:
    """A file of more than 600 lines is to be divided (CONTRIBUTING.md, Habits)."""
    long = {}
    for name in tracked():
        if re.search(r"\.(c|h|cu|cuh|py)$", name):
            lines = len((ROOT / name).read_text(errors="replace").splitlines())
            if lines > 600:
                long[name] = lines
    assert not long


def test_functions_fit_a_screen_and_a_half() -> None:
    long = {}
    for name in tracked():
        if name.startswith("csrc/") and name.endswith(".c"):
            start = 0
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
                if line.startswith("{"):
                    start = number
                elif line.startswith("}") and start:
                    if number - start > 80:
                        long[f"{name}:{start}"] = number - start
                    start = 0
    assert not long


@pytest.mark.skipif(not shutil.which("make") or not (ROOT / "Makefile").is_file(), reason="no make, or no Makefile")
@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_make_clang_asks_for_words_that_the_processor_knows(processor: str, tmp_path: Path) -> None:
    """Clang refuses -mevex512 for another processor than x86-64."""
    uname = tmp_path / "uname"
    uname.write_text(f"#!/bin/sh\necho {processor}\n")
    uname.chmod(0o755)
    planned = subprocess.run(["make", "--dry-run", "--always-make", ".build/clang/cc"], cwd=ROOT, capture_output=True, text=True,
                             check=True, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert "ziglang cc " in planned.stdout and ("-mevex512" in planned.stdout) == (processor == "x86_64")
