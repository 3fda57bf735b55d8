"""In a real Jupyter kernel: the quickstart from top to bottom, and a run that is interrupted, after which the notebook goes on."""

import json
import time
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
LONG = """
import terapipe_c as tp
model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=256, block_size=64)
plan = tp.plan(model, tp.Cluster.local(), batch=2, seq_len=64, costs=tp.CostModel.analytic(model, tp.Cluster.local()), stages=2)
text = tp.__file__
def train(steps, out, progress=False):
    for record in tp.launch(plan, data=text, steps=steps, out=out, progress=progress):
        print(record.step, flush=True)
"""
LEFT = """
from pathlib import Path
print([p for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()])
"""


@pytest.fixture
def kernel(tmp_path):
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    process, client = manager.start_new_kernel(cwd=str(tmp_path))
    yield process, client
    client.stop_channels()
    process.shutdown_kernel(now=True)


def run(client, code, on_output=lambda text: None, timeout=120):
    """(the reply, what it printed, kinds of what it showed)."""
    printed, shown = [], set()
    asked = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=timeout)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            printed.append(content["text"])
            on_output(content["text"])
        elif kind in ("display_data", "execute_result"):
            shown |= set(content["data"])
        elif kind == "status" and content["execution_state"] == "idle":
            break
    while True:
        reply = client.get_shell_msg(timeout=timeout)
        if reply["parent_header"].get("msg_id") == asked:
            return reply["content"], "".join(printed), shown


def test_the_quickstart_runs_in_a_kernel_and_draws_itself(kernel):
    _, client = kernel
    shown = set()
    for cell in json.loads(QUICKSTART.read_text())["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("steps=60", "steps=6").replace("warmup_steps=6", "warmup_steps=1")
            reply, _, kinds = run(client, source)
            assert reply["status"] == "ok", "\n".join(reply.get("traceback", []))
            shown |= kinds
    assert shown & {"text/html", "image/svg+xml"}


def test_a_run_that_is_interrupted_leaves_nothing_and_the_notebook_launches_again(kernel):
    process, client = kernel
    assert run(client, LONG)[0]["status"] == "ok"
    pressed = []

    def press(text):
        if not pressed and "3" in text:
            pressed.append(time.monotonic())
            process.interrupt_kernel()

    reply, printed, _ = run(client, "train(1_000_000, 'long')", press)
    assert pressed and reply["status"] == "error" and reply["ename"] == "KeyboardInterrupt", (reply, printed[-200:])
    assert run(client, LEFT)[1].strip() == "[]"
    reply, printed, _ = run(client, "train(3, 'again')")
    assert reply["status"] == "ok" and printed.split() == ["0", "1", "2"]


def test_an_interrupted_run_leaves_no_bar_open(kernel):
    """An open bar pushed the bars of all later runs down, and was drawn again in the cell in which it was garbage-collected."""
    process, client = kernel
    assert run(client, LONG)[0]["status"] == "ok"
    pressed = []

    def press(text):
        if not pressed and "loss" in text:
            pressed.append(text)
            process.interrupt_kernel()

    reply, printed, _ = run(client, "train(1_000_000, 'long', None)", press)
    assert pressed and reply["ename"] == "KeyboardInterrupt" and "steps done" in printed, (reply, printed[-200:])
    assert run(client, LEFT)[1].strip() == "[]"
    assert run(client, "from tqdm.auto import tqdm; print(len(getattr(tqdm, '_instances', ())))")[1].split() == ["0"]
    assert "\x1b[A" not in run(client, "train(3, 'again', None)")[1]
