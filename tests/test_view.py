"""Pictures: what is in the files, not how they look."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from terapipe_c import schedules, view
from terapipe_c.config import human_seconds
from terapipe_c.schedule import Timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def line():
    program = schedules.seq1f1b(4, 4, 3).split(pending=2).lower(tied=True)
    cost = {"F": np.tile([1e-3, 2e-3, 3e-3], (4, 1)), "I": 1e-3, "W": 1e-3, "OPT": 5e-4, "AR": 1e-4}
    return program.simulate(cost, comm_s=1e-4, activation_bytes=1 << 20)


def boxes(text, name):
    return [
        r for r in ElementTree.fromstring(text).iter(SVG + "rect") if re.fullmatch(name + r"\d", r.get("class", ""))
    ]


def test_a_picture_goes_where_a_link_points_and_into_a_device(tmp_path):
    line = schedules.gpipe(2, 2).simulate({"F": 1.0, "B": 2.0})
    (tmp_path / "real.svg").write_text("old")
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    line.to_svg(tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink() and "<svg" in (tmp_path / "real.svg").read_text()
    line.to_svg("/dev/null")
    assert not Path("/dev/null").is_file()
    with pytest.raises(FileNotFoundError, match="no such folder to write into"):
        line.to_svg(tmp_path / "none/x.svg")


def test_svg_has_every_interval_in_its_place(line, tmp_path):
    line.to_svg(tmp_path / "t.svg")
    text = (tmp_path / "t.svg").read_text()
    titled = [
        r
        for r in ElementTree.fromstring(text).iter(SVG + "rect")
        if r.find(SVG + "title") is not None and r.get("class")
    ]
    assert len(titled) == len(line.intervals)
    frame = view._Frame(line, 1200)
    for row, box in zip(line.intervals, titled, strict=True):
        assert box.get("class")[:-1] == schedules.OPS[row["op"]]
        assert float(box.get("x")) == pytest.approx(frame.x(row["start_s"]), abs=0.01)
        assert float(box.get("y")) == pytest.approx(frame.y(int(row["rank"])), abs=0.1)
        assert frame.left <= float(box.get("x")) and float(box.get("x")) + float(box.get("width")) <= frame.right + 0.5
    words = [t.text for t in ElementTree.fromstring(text).iter(SVG + "text") if t.get("class") == "ink"]
    assert "3.2" in words and "0.2" in words
    assert "prefers-color-scheme:dark" in text and "rank 3" in text and ">slice skew " in text
    assert line._repr_svg_() == text and text in line._repr_html_()


def test_svg_is_what_any_program_draws(line):
    """Colours are #rrggbb, which SVG 1.1 knows; what is told of a run of all operations stays within the picture."""
    text = view.svg(line)
    assert "hsl(" not in text and len(set(re.findall(r"\.tp \.[A-Z]+\d\{fill:(#[0-9a-f]{6})\}", text))) > 10
    ops = [op for op in schedules.OPS if op in view._NAMES]
    rows = [(i % 2, op, 0, 0, 0, 1.0 * i, 1.0 * i + 1) for i, op in enumerate(ops)]
    for picture in (text, view.svg(Timeline.from_intervals(rows), 900)):
        root = ElementTree.fromstring(picture)
        width, height = float(root.get("width")), float(root.get("height"))
        for word in root.iter(SVG + "text"):
            told = "".join(word.itertext())
            before = {"end": 1.0, "middle": 0.5}.get(word.get("text-anchor"), 0.0)
            x, length = float(word.get("x")), 6.2 * len(told)
            if word.get("class") not in ("ink", "title"):
                assert x - before * length >= 0 and x + (1 - before) * length <= width, told
            assert 0 < float(word.get("y")) < height, told


def test_a_timeline_is_copied_and_pickled(line):
    import copy
    import pickle

    for other in (pickle.loads(pickle.dumps(line)), copy.copy(line), copy.deepcopy(line)):
        assert np.array_equal(other.intervals, line.intervals) and other.bubbles == line.bubbles
        assert str(other) == str(line) and other.program == line.program and view.svg(other) == view.svg(line)


def test_svg_of_very_many_intervals_stays_small_and_true():
    line = schedules.seq1f1b(8, 128, 8).simulate({"F": 1e-3, "B": 3e-3})
    text = view.svg(line)
    assert len(line.intervals) > view._LIMIT and len(text) < 400_000
    frame = view._Frame(line, 1200)
    for rank in range(8):
        area = {"F": 0.0, "B": 0.0}
        for op in area:
            for box in boxes(text, op):
                if frame.y(rank) <= float(box.get("y")) < frame.y(rank) + frame.lane:
                    area[op] += float(box.get("width")) * float(box.get("height"))
        whole = (frame.right - frame.left) * frame.lane
        assert area["F"] / whole == pytest.approx(1024e-3 / line.makespan_s, abs=0.03)
        assert area["B"] / whole == pytest.approx(3072e-3 / line.makespan_s, abs=0.03)


def test_svg_of_many_intervals_where_a_rank_lacks_an_operation():
    """A tied embedding's exchange (AR) is on the first and last rank alone, and not every rank recomputes."""
    program = schedules.one_f_one_b(4, 1200).lower(tied=True)
    line = program.simulate({"F": 1e-3, "B": 2e-3, "AR": 1.0, "OPT": 1e-3})
    assert len(line.intervals) <= view._LIMIT  # alone it is drawn one by one; of several, each gets its share
    picture = view.comparison_svg([("one", "", line), ("two", "", line)])
    lanes = sorted({int(float(box.get("y"))) for box in boxes(picture, "AR")})  # eight pixels each, a gap among them
    assert len(lanes) == 4 and lanes[1] - lanes[0] == lanes[3] - lanes[2] == 3 * 8


def test_html_is_one_page_with_its_data(line, tmp_path):
    line.to_html(tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    assert (
        text.startswith("<!doctype html>")
        and "<html" in text
        and not re.search(r"(src|href)=", text)
        and "http" not in text
    )
    data = json.loads(re.search(r"const D=(\{.*?\});\n", text, re.S)[1])
    assert len(data["start"]) == len(line.intervals) and data["ranks"] == 4 and data["makespan"] == line.makespan_s
    assert data["begin"] == [0, *np.cumsum(np.bincount(line.intervals["rank"]))]
    assert sum(b[1] for b in data["bubbles"]) == pytest.approx(line.idle_s)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_of_the_page_runs(line, tmp_path):
    """With a document of stubs: it draws every rank, zooms, and finds the interval under the pointer."""
    line.to_html(tmp_path / "t.html")
    script = re.search(r"<script>\n(.*)</script>", (tmp_path / "t.html").read_text(), re.S)[1]
    stubs = """
let drawn=0,calls={};const style={getPropertyValue:()=>"#123"};
const element=()=>({style:{},textContent:"",innerHTML:"",offsetWidth:9,clientWidth:1000,
 insertAdjacentHTML(){this.added=(this.added||0)+1},
 addEventListener(k,f){calls[k]=f},setPointerCapture(){},getContext:()=>new Proxy({},
 {get:(o,k)=>k in o?o[k]:(k=="fillRect"?()=>{drawn++}:()=>{}),
 set:(o,k,v)=>{o[k]=v;return true}})});
const made={};const document={getElementById:i=>made[i]??=element(),documentElement:{}};
const getComputedStyle=()=>style,devicePixelRatio=1,innerWidth=1000,matchMedia=()=>({addEventListener(){}});
const addEventListener=(k,f)=>{calls["window "+k]=f},requestAnimationFrame=f=>f();
"""
    after = """
const whole=drawn;drawn=0;
calls.wheel({preventDefault(){},deltaX:0,deltaY:-2000,offsetX:500});
const zoomed=drawn;
made.all.onclick();
calls.pointermove({offsetX:66,offsetY:30,clientX:66,clientY:30});
console.log(JSON.stringify({whole,zoomed,tip:made.tip.innerHTML,why:made.why.added}));
"""
    (tmp_path / "t.js").write_text(stubs + script + after)
    done = subprocess.run(["node", str(tmp_path / "t.js")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["whole"] > len(line.intervals) / 2 and 0 < told["zoomed"] < told["whole"]
    assert told["tip"].startswith("<b>forward</b> · rank 0 · stage 0 · micro-batch 0 · slice 0") and told["why"] >= 3


def test_chrome_trace(line, tmp_path):
    rows = [*line.intervals.tolist(), (1, schedules.OPS.index("RF"), 1, 0, 0, 0.0, 1e-4)]
    measured = Timeline.from_intervals(rows)
    measured.to_chrome_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert len(work) == len(rows) and {e["pid"] for e in work} == {0, 1, 2, 3} and sum(e["tid"] for e in work) == 1
    first = next(e for e in work if e["name"] == "3F0.2")
    row = next(
        r for r in line.intervals if (r["rank"], r["micro"], r["slice"], schedules.OPS[r["op"]]) == (3, 0, 2, "F")
    )
    assert first["ts"] == pytest.approx(1e6 * row["start_s"], abs=1e-3)
    assert first["dur"] == pytest.approx(1e6 * (row["end_s"] - row["start_s"]), abs=1e-3)
    assert first["args"] == {"stage": 3, "micro": 0, "slice": 2}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"rank {r}" for r in range(4)}


def test_text(line):
    text = repr(line)
    assert text.splitlines()[0].startswith("Timeline: 4 ranks · ") and "rank 3" in text
    assert "comm 7.4 ms" in text                               # 7.2 of messages, 0.2 of the tied weight's sum
    bars = [row for row in text.splitlines() if row.startswith("  rank")]
    assert len(bars) == 4 and all(set("FIW") <= set(bar) for bar in bars)
    many = schedules.gpipe(40, 2).simulate({"F": 1.0, "B": 1.0})
    assert len(repr(many).splitlines()) == 2


def test_program_in_a_notebook():
    text = schedules.gpipe(40, 200).lower()._repr_html_()
    assert (
        "0F0.0" in text
        and "8 more ranks" in text
        and "more</div>" in text
        and text.count("<div") == text.count("</div>")
    )


def test_units_and_ticks():
    assert [human_seconds(s) for s in (0.0, 2.5, 1.5e-3, 3.25e-6, 4e-9)] == ["0 s", "2.5 s", "1.5 ms", "3.25 us", "4 ns"]
    assert view._ticks(45, 10) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45] and view._ticks(0, 10) == [0.0]
    for span in (1.0, 7.3, 99.0, 0.37):
        assert 3 < len(view._ticks(span, 10)) <= 11


def test_a_step_of_no_time_is_drawn():
    line = schedules.gpipe(2, 2).simulate({"F": 0.0, "B": 0.0})
    assert line.makespan_s == 0.0 and line.efficiency == 1.0 and line.lower_bound_s == 0.0
    ElementTree.fromstring(view.svg(line))
    assert "Timeline" in repr(line) and view.html_page(line) and view.chrome_trace(line)
