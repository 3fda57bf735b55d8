"""A small linter of C-API mistakes over csrc/py, and what the built module does when loaded, failed and re-loaded.

Each rule is a mistake that compiles, passes its first test and crashes or leaks later.
"""

import gc
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core, schedule, schedules

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc" / "py").glob("*.c"))
FUNCTION = re.compile(r"^(\w+)\(([^;{]*)\)\n\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
METH = {
    frozenset({"METH_NOARGS"}), frozenset({"METH_O"}), frozenset({"METH_VARARGS"}), frozenset({"METH_FASTCALL"}),
    frozenset({"METH_FASTCALL", "METH_KEYWORDS"}), frozenset({"METH_VARARGS", "METH_KEYWORDS"}),
}  # fmt: skip


def code(path: Path) -> str:
    """A source without comments, strings kept."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(), flags=re.DOTALL)


def functions(text: str) -> dict[str, str]:
    return {name: body for name, _, body in FUNCTION.findall(text)}


def lint(text: str) -> list[str]:
    """The mistakes in one file of csrc/py, in words."""
    found = []
    for pattern, why in (
        (r"static\s+PyTypeObject\b(?!\s*\*)", "a static type: types are heap types of the module's state"),
        (r"\bPyType_Ready\s*\(", "PyType_Ready: types come from PyType_FromModuleAndSpec"),
        (r"\bPyType_FromSpec\s*\(", "PyType_FromSpec: the type could not find its module"),
        (r"\bPyModule_AddObject\s*\(", "PyModule_AddObject steals on success only: PyModule_AddObjectRef"),
        (r"\bPyModule_Create2?\s*\(", "single-phase initialisation"),
        (r"\bPyDict_GetItem\s*\(", "PyDict_GetItem hides errors: PyDict_GetItemWithError"),
        (r"\bPyErr_(Print|Clear)\s*\(\s*\)\s*;\s*return\s+NULL", "an error is dropped, then NULL returned"),
        (r"^static\s+PyObject\s*\*\s*\w+\s*(=|;)", "a static object: state belongs to the module"),
        (r"\bPyEval_(InitThreads|AcquireLock|ReleaseLock|CallObject\w*)\b", "a call that Python has removed"),
        (r"\b(malloc|free|calloc|realloc)\s*\(\s*Py\w+", "Python's objects do not live in malloc's heap"),
    ):
        found += [f"{why}: {m.group(0).strip()}" for m in re.finditer(pattern, text, re.MULTILINE)]
    found += lint_methods(text) + lint_types(text)
    for name, body in functions(text).items():
        found += [f"{name}: {problem}" for problem in lint_body(body)]
    return found


def lint_methods(text: str) -> list[str]:
    found = []
    for table in re.findall(r"PyMethodDef\s+\w+\[\]\s*=\s*\{(.*?)\n\s*\};", text, re.DOTALL):
        table = re.sub(r"\w*KEYWORDS\((\w+)\)\s*,\s*(?!METH)", r"\1, METH_VARARGS | METH_KEYWORDS, ", table)
        for row in re.findall(r"\{\s*\"(\w+)\"\s*,(.*?)\}\s*,?\s*(?=\{|$)", table.strip(), re.DOTALL):
            flags = set(re.findall(r"METH_\w+", row[1])) - {"METH_CLASS", "METH_STATIC"}
            if frozenset(flags) not in METH:
                found.append(f"method {row[0]} has odd flags: {sorted(flags)}")
            if not row[1].count('"') and "_doc" not in row[1] and not row[0].startswith("_"):
                found.append(f"method {row[0]} has no docstring")
        if not re.search(r"\{\s*(NULL|0)\b[^}]*\}\s*,?\s*$", table.strip()) and "{}" not in table:
            found.append("a method table without its end row")
    return found


def lint_types(text: str) -> list[str]:
    found = []
    bodies = functions(text)
    for spec in re.findall(r"PyType_Spec\s+\w+\s*=\s*\{(.*?)\};", text, re.DOTALL):
        if "Py_TPFLAGS_IMMUTABLETYPE" not in spec:
            found.append(f"a type that can be monkey-patched: {spec.split(',')[0].strip()}")
        if "Py_TPFLAGS_HAVE_GC" in spec and "Py_tp_traverse" not in text:
            found.append(f"a collected type without traverse: {spec.split(',')[0].strip()}")
    for name in re.findall(r"\{\s*Py_tp_dealloc\s*,\s*(?:\(void\s*\*\)\s*)?(\w+)", text):
        if not re.search(r"Py_DECREF\(\s*(?:\(PyObject \*\)\s*)?(type|tp|cls)\s*\)", bodies.get(name, "")):
            found.append(f"{name} does not give back its reference to the heap type (Py_DECREF(type))")
        if "Py_TPFLAGS_HAVE_GC" in text and "GC_UnTrack" not in bodies.get(name, "") and "traverse" in text:
            found.append(f"{name} does not untrack before it takes the object apart")
    return found


def lint_body(body: str) -> list[str]:
    found = []
    for region in re.findall(r"Py_BEGIN_ALLOW_THREADS(.*?)Py_END_ALLOW_THREADS", body, re.DOTALL):
        for pattern, why in (
            (r"\b(return|goto)\b", "leaves a region without the GIL and never takes it back"),
            (r"\b(Py(?!_BLOCK|_UNBLOCK)\w*_\w+|tp_py_\w+)\s*\(", "calls Python without the GIL"),
        ):
            found += [f"{why}: {m.group(0)}" for m in re.finditer(pattern, region)]
    if body.count("Py_BEGIN_ALLOW_THREADS") != body.count("Py_END_ALLOW_THREADS"):
        found.append("the GIL's release and its return do not pair")
    for name in re.findall(r"\b(\w+)\s*=\s*Py(?:Tuple|List)_(?:GET_ITEM|GetItem)\s*\(", body):
        owned = re.search(rf"Py_(X?INCREF|NewRef|XNewRef)\(\s*{name}\s*\)", body)
        if not owned and re.search(rf"Py_X?DECREF\(\s*{name}\s*\)", body):
            found.append(f"gives back {name}, which is borrowed from a tuple or list")
    for name in re.findall(r"Py(?:Tuple_SET_ITEM|List_SET_ITEM)\([^,]+,[^,]+,\s*(\w+)\s*\)", body):
        after = re.split(rf"_SET_ITEM\([^,]+,[^,]+,\s*{name}\s*\)", body)[-1]
        if re.search(rf"^\s*Py_X?DECREF\(\s*{name}\s*\)", after, re.MULTILINE):
            found.append(f"gives back {name} after SET_ITEM stole it")
    if re.search(r"\b(tp_py_view|PyObject_GetBuffer)\(", body) and not re.search(r"PyBuffer_Release|release|views?\b", body):
        found.append("takes a view of an array and never releases it")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_no_known_mistake(path: Path) -> None:
    assert lint(code(path)) == []


@pytest.mark.parametrize("mistake", [
    "static PyTypeObject plan_type = {0};\n",
    "static PyObject *error;\n",
    "int\nadd(PyObject *m)\n{\n    return PyModule_AddObject(m, \"x\", y);\n}\n",
    "PyObject *\nf(PyObject *s)\n{\n    Py_BEGIN_ALLOW_THREADS\n    if (x)\n        return 0;\n    Py_END_ALLOW_THREADS\n}\n",
    "PyObject *\nf(PyObject *s)\n{\n    Py_BEGIN_ALLOW_THREADS\n    PyErr_SetNone(x);\n    Py_END_ALLOW_THREADS\n}\n",
    "PyObject *\nf(PyObject *s)\n{\n    PyObject *x = PyTuple_GET_ITEM(s, 0);\n    Py_DECREF(x);\n}\n",
    "PyObject *\nf(PyObject *s)\n{\n    PyTuple_SET_ITEM(t, 0, x);\n    Py_DECREF(x);\n}\n",
    "static PyMethodDef methods[] = {\n    {\"f\", f, METH_KEYWORDS, \"doc\"},\n    {NULL},\n};\n",
    "void\ndie(PyObject *self)\n{\n    PyObject_Free(self);\n}\nPyType_Slot s[] = {{Py_tp_dealloc, die}};\n",
])  # fmt: skip
def test_the_linter_sees_it(mistake: str) -> None:
    assert lint(mistake)


# ---- the built module ------------------------------------------------------------------------------------------------


def fresh() -> ModuleType:
    """Another instance of the extension module: multi-phase initialisation gives each its own state."""
    loader = importlib.machinery.ExtensionFileLoader("terapipe_c._core", _core.__file__)
    spec = importlib.util.spec_from_loader("terapipe_c._core", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_instance_has_its_own_state() -> None:
    one, two = fresh(), fresh()
    assert one is not two and one.Error is not two.Error
    assert issubclass(one.InfeasibleError, one.Error) and not issubclass(one.InfeasibleError, two.Error)
    assert issubclass(one.InfeasibleError, ValueError) and issubclass(one.OutOfMemoryError, MemoryError)


def test_instances_end_when_nobody_holds_them() -> None:
    import weakref

    module = fresh()
    gone = weakref.ref(module.Error)
    del module
    gc.collect()
    assert gone() is None, "the module's state keeps its exceptions alive: m_clear or m_traverse misses a member"


def test_it_loads_in_a_subinterpreter() -> None:
    script = f"""
import sys
try:
    import _interpreters as interpreters
    new = lambda: interpreters.create("legacy")
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    new = lambda: interpreters.create(isolated=False)
    run = interpreters.run_string
code = '''
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("terapipe_c._core", {_core.__file__!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("terapipe_c._core", loader))
loader.exec_module(module)
assert issubclass(module.ScheduleError, ValueError)
'''
for _ in range(2):
    interpreter = new()
    outcome = run(interpreter, code)
    assert outcome is None, outcome
    interpreters.destroy(interpreter)
print("fine")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "fine\n", ran.stderr


def callables() -> list[str]:
    return sorted(name for name, value in vars(_core).items() if callable(value) and not name.startswith("__"))


WRONG: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((), {}), ((None,), {}), (("x", object()), {}), ((-1, -1, -1), {}), ((), {"no_such_argument": 1}),
    ((float("nan"),) * 4, {}), (([], {}, ()), {}),
]  # fmt: skip


@pytest.mark.parametrize("name", callables())
def test_refusals_do_not_leak(name: str) -> None:
    """Every function and type of _core, called wrongly again and again: no block of memory stays behind."""
    function = getattr(_core, name)
    gc.freeze()     # what other tests have left is not looked through again and again
    try:
        for args, kwargs in WRONG:

            def refuse(args: tuple[object, ...] = args, kwargs: dict[str, object] = kwargs) -> None:
                try:
                    function(*args, **kwargs)
                except Exception:  # noqa: BLE001 - whatever it raises, it must not leak
                    pass

            for _ in range(20):
                refuse()

            def growth(refuse: Callable[[], None] = refuse) -> int:
                gc.collect()
                before = sys.getallocatedblocks()
                for _ in range(200):
                    refuse()
                gc.collect()
                return sys.getallocatedblocks() - before

            # a leak is there every time; what else the process allocated meanwhile is not
            assert not all(growth() >= 100 for _ in range(3)), f"{name}(*{args}, **{kwargs}) leaks"
    finally:
        gc.unfreeze()


def test_a_list_may_be_emptied_while_its_numbers_are_read() -> None:
    """What came behind was read where it had lain."""
    sizes: list[object] = []

    class Clears:
        def __index__(self) -> int:
            sizes.clear()
            return 2

    sizes += [Clears(), *range(10**6, 10**6 + 6)]
    with pytest.raises(_core.InvalidValueError, match="n_head is 1000000: a divisor of n_embd = 1000001"):
        _core.model_params(sizes)  # type: ignore[arg-type]
    micros = [(1, [4]) for _ in range(1000)]

    class ClearsMicros:
        def __index__(self) -> int:
            micros.clear()
            return 1

    micros[0] = (ClearsMicros(), [4])  # type: ignore[assignment]
    model = (1, 1, 8, 8, 8, 1, 1)
    assert _core.stage_memory(model, (4, 1000, micros), 0, 4, 1, 1) > 0 and not micros


def test_a_cost_may_have_an_array_of_every_name() -> None:
    """There was room for all but one of those that simulate can give, and the last was written over what lies behind."""
    program = schedules.gpipe(2, 2)
    links = ("comm", "comm.a", "comm.b", "comm.back", "comm.latency", "comm.guest")
    cost = dict.fromkeys((*schedules.OPS, *schedule.HALVES, schedule.SUM, schedule.NORM, *links), 1.0)
    ended = program.simulate(cost, activation_bytes=2.0)
    assert ended.makespan_s == program.makespan(cost) == program.simulate(cost).makespan_s
    assert list(ended.peak_memory_bytes) == [4, 4]
    assert tp.emulate(program, dict.fromkeys(cost, 0.0)).num_ranks == 2

    class Other(str):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    tables = schedule.tables(program, cost, 0.0, 2.0)
    again = ({Other("F"): tables[0]["F"] for _ in range(50)}, *tables[1:])
    with pytest.raises(_core.InvalidValueError, match="more arrays than there are names"):
        program._time(again, False)


def test_strides_that_lead_beyond_64_bits_are_refused() -> None:
    """Their sum came out small, and seconds were read from where no array is."""
    program = schedules.gpipe(3, 2)
    for stage, unit in ((2**62, 0), (2**63 - 1, 2**63 - 1), (2**62, 2**62), (2**61, 2**62)):
        with pytest.raises(_core.InvalidValueError, match="F has 6 entries: 9223372036854775807 would be right"):
            program._makespans([({"F": np.ones(6), "B": np.ones(6)}, stage, unit, None, None, None, 0, 0)])


def test_what_is_another_object_is_refused() -> None:
    """A Comm was kept for the Region of one that is made over TCP, and what came behind was taken for a region's memory."""
    control = _core.Comm(_core.Region.create(1, bytes(1), 0, 64, False), 0)
    with pytest.raises(_core.InvalidTypeError, match=r"region is terapipe_c\._core\.Comm: a terapipe_c\._core\.Region"):
        _core.tcp_comm(control, 0, "127.0.0.1", 40000, bytes(1), 64)  # type: ignore[arg-type]
    program = schedules.gpipe(1, 2)
    for call in (lambda: program._time({"F": 1.0}, False), lambda: program._makespans([None]),  # type: ignore[arg-type, list-item]
                 lambda: _core.Engine.emulated(program, 0, [1.0])):  # type: ignore[arg-type]
        with pytest.raises(_core.InvalidTypeError, match=r"cost is (dict|NoneType|list): the tuple that "):
            call()
