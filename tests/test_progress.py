"""What a plan that takes long shows meanwhile."""
import os
import pty
import subprocess
import sys

import pytest

import terapipe_c as tp

PLAN = """
import terapipe_c as tp
from terapipe_c import progress
progress.PLANNING_S = progress.PLANNING_EVERY_S = 0.0
model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
cluster = tp.Cluster(num_devices=2, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e10, peak_flops=1e9)
"""
ASKS = {"plan": "tp.plan(model, cluster, 2, 16, progress={})",
        "compare": "tp.compare(model, cluster, 2, 16, planners=['auto', 'merak'], progress={})"}


def said_on_a_terminal(code):
    """What a process writes to its standard error, which is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:                                        # EIO: the other side is closed
            pass
        os.close(ours)
    assert process.returncode == 0, said
    return said.decode()


@pytest.mark.parametrize("ask", ASKS)
def test_a_terminal_is_told_what_is_looked_at_and_left_clean(ask):
    lines = said_on_a_terminal(PLAN + ASKS[ask].format(None)).split("\r\x1b[K")
    assert lines[0] == lines[-1] == "" and len(lines) > 10
    assert all(line.startswith("planning: ") and "\n" not in line for line in lines[1:-1] if line)
    assert any("asked merak; best so far" in line for line in lines) and any("terapipe for" in line for line in lines)
    assert ("planning: merak, 2 of 2" in lines) == (ask == "compare")


@pytest.mark.parametrize("ask", ASKS)
def test_silence_where_it_is_wished_or_nobody_looks(ask):
    assert said_on_a_terminal(PLAN + ASKS[ask].format(False)) == ""
    alone = subprocess.run([sys.executable, "-c", PLAN + ASKS[ask].format(None)], capture_output=True, text=True, check=True)
    assert alone.stderr == alone.stdout == ""


def test_what_fails_leaves_a_clean_line():
    lines = said_on_a_terminal(PLAN + """
try:
    tp.plan(model, cluster, 2, 16, memory_bytes=1000)
except tp.InfeasibleError:
    pass
""").split("\r\x1b[K")
    assert len(lines) > 3 and lines[-1] == ""


def test_progress_is_a_bool():
    with pytest.raises(tp.InvalidValueError, match="progress is 'yes'"):
        tp.plan(tp.GPTConfig.preset("gpt2-124m"), tp.Cluster.local(), 2, 16, progress="yes")
