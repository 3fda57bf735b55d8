"""Pictures: what is in the files, not how they look."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from terapipe_c import cli, devices, planners, schedules, view
from terapipe_c._page import PAGE
from terapipe_c.config import human_bytes, human_gap, human_seconds
from terapipe_c.schedule import Timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def line():
    program = schedules.seq1f1b(4, 4, 3).split(pending=2).lower(tied=True)
    cost = {"F": np.tile([1e-3, 2e-3, 3e-3], (4, 1)), "I": 1e-3, "W": 1e-3, "OPT": 5e-4, "AR": 1e-4}
    return program.simulate(cost, comm_s=1e-4, activation_bytes=1 << 20)


def boxes(text, name):
    return [
        r for r in ElementTree.fromstring(text).iter(SVG + "rect") if re.fullmatch(name + r"[\da-h]", r.get("class", ""))
    ]


def test_a_picture_goes_where_a_link_points_and_into_a_device(tmp_path):
    line = schedules.gpipe(2, 2).simulate({"F": 1.0, "B": 2.0})
    (tmp_path / "real.svg").write_text("old")
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    line.to_svg(tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink() and "<svg" in (tmp_path / "real.svg").read_text()
    line.to_svg("/dev/null")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError, match="'/dev/full'"):
        line.to_svg("/dev/full")
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


#: What eyes without green cones, and without red ones, see of linear red, green and blue (Machado, Oliveira & Fernandes 2009).
BLIND = ([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
         [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])  # fmt: skip


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light):
    """CIE L*a*b* of linear red, green and blue."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = np.cbrt(to_xyz @ np.clip(light, 0, 1) / [0.95047, 1.0, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_are_apart():
    """Of every two operations and causes of idling, for three kinds of eyes; and each from a white and from a dark page."""
    colours = {op: view._colour(op, "0") for op in view._NAMES} | view._CAUSE_COLOURS
    for a, b in itertools.combinations(colours, 2):
        one, other = linear(colours[a]), linear(colours[b])
        assert np.linalg.norm(lab(one) - lab(other)) > 17, (a, b)
        for eyes in np.array(BLIND):
            assert np.linalg.norm(lab(eyes @ one) - lab(eyes @ other)) > 9, (a, b)
    for name, colour in colours.items():
        bright = linear(colour) @ [0.2126, 0.7152, 0.0722]
        dark = linear("#12171f") @ [0.2126, 0.7152, 0.0722]
        assert 1.05 / (bright + 0.05) > (3 if name in view._CAUSE_COLOURS else 1.3), name
        assert (bright + 0.05) / (dark + 0.05) > 2.5, name


@pytest.mark.parametrize("name, chunks", [("interleaved", 2), ("interleaved", 4), ("zb_v", 2), ("hanayo", 4), ("dualpipe_v", 2),
                                          ("chimera", 2)])  # fmt: skip
def test_svg_shows_chunks(name, chunks):
    more = {"interleaved": (chunks,), "hanayo": (2,)}.get(name, ())
    line = getattr(schedules, name)(4, 8, *more).lower().simulate({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "OPT": 1.0})
    text = view.svg(line)
    titled = [r for r in ElementTree.fromstring(text).iter(SVG + "rect") if r.find(SVG + "title") is not None and r.get("class")]
    for row, box in zip(line.intervals, titled, strict=True):
        op, chunk = schedules.OPS[row["op"]], int(row["stage"]) // 4
        assert f"stage {row['stage']} (chunk {chunk})" in box.find(SVG + "title").text
        assert box.get("class") == op + ("0" if op == "OPT" else "abcdefgh"[round(7 * chunk / (chunks - 1))])
    assert f"a rank's chunks, 0 {'and' if chunks == 2 else 'to'} {chunks - 1}<" in text
    one = view.svg(schedules.one_f_one_b(4, 8).simulate({"F": 1.0, "B": 2.0}))
    assert "chunk" not in one and set(re.findall(r'class="F(.)"', one)) == set("0123")


def test_a_guest_is_no_chunk():
    rows = [(0, "F", 0, 0, 0, 0.0, 1.0), (0, "SE", 0, 0, 0, 1.0, 2.0), (1, "F", 1, 0, 0, 1.0, 2.0), (1, "RE", 0, 0, 0, 1.0, 2.0),
            (0, "RE", 1, 0, 0, 1.0, 2.0)]  # fmt: skip
    assert "chunk" not in view.svg(Timeline.from_intervals(rows))


def test_pictures_shrink_with_their_cell(line):
    for text in (line._repr_html_(), line._repr_svg_(), view.comparison_svg([("one", "", line)])):
        opening = re.search("<svg[^>]*>", text)[0]
        assert "viewBox=" in opening and 'style="max-width:100%;height:auto"' in opening


def test_the_comparison_has_its_legends_and_a_scale(line):
    two = schedules.interleaved(2, 4, 2).simulate({"F": 4e-3, "B": 8e-3})
    text = view.comparison_svg([("one", "", line), ("two", "runs, not reproducibly", two)])
    root = ElementTree.fromstring(text)
    words = ["".join(word.itertext()) for word in root.iter(SVG + "text")]
    assert {"work", "warmup", "F forward", "I input gradient", "OPT update", "AR tied gradients"} <= {*words}
    assert "runs, not reproducibly" in words
    assert "0 ms" in words and "a rank's chunks, 0 and 1" in words and "R recompute" not in words
    ticks = [float(tick.get("x1")) for tick in root.iter(SVG + "line")]
    longest = max(line.makespan_s, two.makespan_s)
    last = max(float(word) for word in words if re.fullmatch(r"[\d.]+", word)) * 1e-3
    assert (max(ticks) - 170) / (1200 - 110 - 170) == pytest.approx(last / longest, abs=1e-3)


def test_what_rounding_left_is_no_cause():
    """In no picture, and not in the text; Plan.explain is in tests/test_plan.py."""
    line = schedules.gpipe(2, 2).simulate({"F": 1.0, "B": 2.0})
    line.bubbles = {**line.bubbles, "imbalance": 1.04e-17, "comm": 1e-10}
    data = json.loads(re.search(r"const D=(\{.*?\});\n", view.html_page(line), re.S)[1])
    assert [b[0] for b in data["bubbles"]] == ["warmup", "cooldown"]
    for text in (view.svg(line), view.summary(line)):
        assert "warmup 4 s" in text and "imbalance" not in text and "comm" not in text


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path, capsys):
    root = Path(__file__).parents[1]
    argv = re.search(r"`terapipe (simulate .*) --svg docs/timeline.svg`", (root / "README.md").read_text())[1].split()
    assert cli.main([*argv, "--svg", str(tmp_path / "t.svg")]) == 0
    assert (tmp_path / "t.svg").read_text() == (root / "docs/timeline.svg").read_text()


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
    nothing = schedules.seq1f1b(8, 128, 8).simulate({"F": 0.0, "B": 0.0})      # of no time there is no share
    for picture in (view.svg(nothing), view.comparison_svg([("none", "", nothing)])):
        assert boxes(picture, "[FB]") == []


def test_svg_of_many_intervals_where_a_rank_lacks_an_operation():
    """A tied embedding's exchange (AR) is on the first and last rank alone, and not every rank recomputes."""
    program = schedules.one_f_one_b(4, 1200).lower(tied=True)
    line = program.simulate({"F": 1e-3, "B": 2e-3, "AR": 1.0, "OPT": 1e-3})
    assert len(line.intervals) <= view._LIMIT  # alone it is drawn one by one; of several, each gets its share
    picture = view.comparison_svg([("one", "", line), ("two", "", line)])
    lanes = sorted({int(float(box.get("y"))) for box in boxes(picture, "AR") if box.get("rx") is None})  # no legend's
    assert len(lanes) == 4  # eight pixels each, a gap among them
    assert lanes[1] - lanes[0] == lanes[3] - lanes[2] == 3 * 8


def test_a_step_that_is_short_beside_others_is_drawn():
    """Where links are slow, a plan on one rank takes less than a thousandth of the time of one on several."""
    short, long = schedules.gpipe(1, 4000).simulate({"F": 1e-7, "B": 1e-7}), schedules.gpipe(2, 1).simulate({"F": 1.0, "B": 2.0})
    picture = view.comparison_svg([("short", "", short), ("long", "", long)])
    assert len(short.intervals) > view._LIMIT // 2
    assert [(float(box.get("x")), float(box.get("width")), float(box.get("height"))) for op in "FB"
            for box in boxes(picture, op) if float(box.get("height")) < 7] == [(170.0, 2.0, 3.5)] * 2


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
    assert data["begin"] == [0, *np.cumsum(np.bincount(2 * line.intervals["rank"], minlength=8))]   # no copies beside the work
    assert sum(b[1] for b in data["bubbles"]) == pytest.approx(line.idle_s)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_of_the_page_runs(line, tmp_path):
    """With a document of stubs: it draws every rank, zooms, and finds the interval under the pointer."""
    told = run_page(line, tmp_path)
    assert told["whole"] > len(line.intervals) / 2 and 0 < told["zoomed"] < told["whole"]
    assert told["tip"].startswith("<b>forward</b> · rank 0 · stage 0 · micro-batch 0 · slice 0") and told["why"] >= 3
    assert "chunk" not in told["key"] and "more ranks" not in told["ranks"] and told["out"] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_tells_chunks_and_what_it_leaves_out(tmp_path):
    chunked = schedules.interleaved(2, 4, 2).simulate({"F": 1.0, "B": 2.0})
    told = run_page(chunked, tmp_path)
    assert {view._colour(op, level) for op in "FB" for level in "ah"} <= set(told["fills"])
    assert "stage 0 (chunk 0)" in told["tip"] and "a rank's chunks, 0 and 1" in told["key"]
    assert view._colour("F", "1") not in told["fills"]
    many = run_page(schedules.gpipe(300, 2).simulate({"F": 100.0, "B": 100.0}), tmp_path)
    assert "… 44 more ranks" in many["ranks"] and "<td>255</td>" in many["ranks"] and "<td>256</td>" not in many["ranks"]
    nothing = str(Timeline.from_intervals([], 1))
    assert "1 rank · 0 s · nothing ran" in nothing and "%" not in nothing
    whole = schedules.gpipe(1, 1).simulate({"F": 600.0, "B": 1000.0})  # the last label, 1600 s, is at the very edge
    assert run_page(whole, tmp_path)["out"] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_keeps_a_message_that_goes_on_beside_work(tmp_path):
    """Closer, it was gone, and the pointer found it where the work is, or the work where it is."""
    work = [(0, "F", 0, i, 0, float(i), i + 1.0) for i in range(10)]
    told = run_page(Timeline.from_intervals([(0, "RF", 0, 1, 0, 0.0, 10.0), *work, (0, "SF", 0, 0, 0, 1.0, 1.5)]), tmp_path)
    assert set(told["close"]) & {view._colour("F", shade) for shade in "0123"} and view._colour("RF", "1") in told["close"]
    assert view._colour("SF", "0") in told["fills"] and view._colour("SF", "0") not in told["close"]
    assert told["low"].startswith("<b>receive activation</b>") and told["tip"].startswith("<b>forward</b>")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_tells_times_and_bytes_as_python_does(tmp_path):
    random = np.random.default_rng(0)
    values = [0.0, 1000.0, 1500.0, 3600.0, 99999.0, 1.0625, 1000.5, 12345.0, 0.99995, 0.00099995, 9.9995e-7, 1e-9, 1.5e-10, 1e-12,
              1.04e-17, 1e21, 1.5e250, *(10.0 ** random.uniform(-14, 6, 2000)).tolist(), *random.integers(1, 10**6, 500).tolist(),
              *(m * 10.0**k for k in range(-13, 5) for m in (1, 9.9994, 9.99949999, 9.9995, 9.9996))]  # fmt: skip
    assert said_by_page("time", values) == [human_seconds(value) for value in values]
    sizes = [0, 1023, 1024, 1152, 2**20 - 6, 2**20 - 5, 2**30 - 1, 2**40 - 1, 2**50 + 3,
             *(2.0 ** random.uniform(0, 52, 1000)).astype(int).tolist()]  # fmt: skip
    assert said_by_page("bytes", sizes) == [human_bytes(size) for size in sizes]


def said_by_page(name, values):
    """What this function of the page makes of each value."""
    function = re.search(rf"^function {name}\(.*?\}}$", PAGE, re.S | re.M)[0]
    script = f"{function}\nconsole.log(JSON.stringify({json.dumps(values)}.map({name})))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_page(line, tmp_path):
    line.to_html(tmp_path / "t.html")
    script = re.search(r"<script>\n(.*)</script>", (tmp_path / "t.html").read_text(), re.S)[1]
    stubs = """
let drawn=0,calls={},fills=new Set(),out=[];const style={getPropertyValue:()=>"#123"};
const element=()=>({style:{},textContent:"",innerHTML:"",offsetWidth:9,clientWidth:1000,
 insertAdjacentHTML(_,text){this.added=(this.added||0)+1;this.innerHTML+=text},
 addEventListener(k,f){calls[k]=f},setPointerCapture(){},getContext:()=>new Proxy({},
 {get:(o,k)=>k in o?o[k]:k=="fillRect"?()=>{drawn++;fills.add(o.fillStyle)}:k=="measureText"?t=>({width:6*t.length}):
  k=="fillText"?(t,x)=>{if(x+3*t.length>1000)out.push(t)}:()=>{},
 set:(o,k,v)=>{o[k]=v;return true}})});
const made={};const document={getElementById:i=>made[i]??=element(),documentElement:{}};
const getComputedStyle=()=>style,devicePixelRatio=1,innerWidth=1000,matchMedia=()=>({addEventListener(){}});
const addEventListener=(k,f)=>{calls["window "+k]=f},requestAnimationFrame=f=>f();
"""
    after = """
const whole=drawn,all=[...fills];drawn=0;fills.clear();
calls.wheel({preventDefault(){},deltaX:0,deltaY:-2000,offsetX:500});
const zoomed=drawn,close=[...fills];
made.all.onclick();
calls.pointermove({offsetX:500,offsetY:50,clientX:500,clientY:50});
const low=made.tip.innerHTML;
calls.pointermove({offsetX:66,offsetY:30,clientX:66,clientY:30});
console.log(JSON.stringify({whole,zoomed,low,tip:made.tip.innerHTML,why:made.why?.added,key:made.key.innerHTML,out,fills:all,close,
 ranks:made.ranks.innerHTML}));
"""
    (tmp_path / "t.js").write_text(stubs + script + after)
    done = subprocess.run(["node", str(tmp_path / "t.js")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    assert "comm 7.6 ms" in text                               # 7.2 of messages, 0.4 of the tied weight's sum: four ranks wait
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


FWD, BWD, TABLE = [1.0, 2.0, 3.0], [2.0, 4.0, 6.0], np.ones((4, 4))
LAYERS = [{"name": "l", "count": 8, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 1.0,
           "strategies": [{"name": "none", "extra_bwd_s": 0.0, "activation_bytes": 1.0}]}]  # fmt: skip


@pytest.mark.parametrize(("shown", "words"), [
    (lambda: planners.uniform(FWD, BWD, 2, 4), ("2/1 blocks", "45 s a step, 0.00 % above the bound")),
    (lambda: planners.vpipe(FWD, BWD, 2, 4, memory={"limit_bytes": 1024.0, "static_bytes": [512.0] * 3}), ("1.00 KiB, 512 B",)),
    (lambda: planners.bmpipe(LAYERS, 2, 4, 1e9), ("<td", "4 4", "60 s, optimal")),
    (lambda: planners.slice_uneven([TABLE, 2 * TABLE]), ("1 slice", "[3]", "3 s, optimal")),
    (lambda: planners.parallel_layers(planners.layer_graph(FWD, BWD, 2, 2)),
     ("1 stage on 2 devices", "3 nodes on 2 x 1 devices", "optimal")),
    (lambda: devices.get("h100"), ("989 TFLOP/s", "3.35 TB/s", "datasheet")),
])  # fmt: skip
def test_what_planners_answer_is_a_table_in_a_notebook(shown, words):
    """API.md: everything prints itself usefully, in a notebook too."""
    text = shown()._repr_html_()
    ElementTree.fromstring(text)
    assert text.startswith("<table") and all(word in text for word in words), text


def test_units_and_ticks():
    times = {0.0: "0 s", 2.5: "2.5 s", 1.5e-3: "1.5 ms", 3.25e-6: "3.25 us", 4e-9: "4 ns", 1000.0: "1000 s", 72431.0: "72430 s",
             0.99996: "1 s", 0.99996e-3: "1 ms", 999.96e-9: "1 us", 0.99994: "999.9 ms", 1.04e-17: "0 s", 2.5e-11: "0.025 ns",
             -1.5e-3: "-1.5 ms", float("inf"): "inf s"}  # fmt: skip
    assert {s: human_seconds(s) for s in times} == times
    assert view._ticks(45, 10) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45] and view._ticks(0, 10) == [0.0]
    for span in (1.0, 7.3, 99.0, 0.37):
        assert 3 < len(view._ticks(span, 10)) <= 11


def test_a_step_of_no_time_is_drawn():
    line = schedules.gpipe(2, 2).simulate({"F": 0.0, "B": 0.0})
    assert line.makespan_s == 0.0 and line.efficiency == 1.0 and line.lower_bound_s == 0.0
    ElementTree.fromstring(view.svg(line))
    assert "Timeline" in repr(line) and view.html_page(line) and view.chrome_trace(line)


def test_shares_are_written_without_exponents():
    gaps = {0.0: "0 %", 1e-10: "0 %", 0.00123: "0.12 %", 0.0123: "1.2 %", 0.994: "99 %", 0.999: "100 %", 1.6802: "168 %",
            25: "2500 %"}  # fmt: skip
    assert {gap: human_gap(gap) for gap in gaps} == gaps
    assert (human_gap(1.95, "+"), human_gap(0.012, "+"), human_gap(-0.5, "+")) == ("+195 %", "+1.2 %", "-50 %")


def test_a_place_that_takes_no_picture_is_refused_before_one_is_drawn(tmp_path, monkeypatch, capsys):
    """The first was written already when the second was refused."""
    few = ["simulate", "--schedule", "gpipe", "--svg", str(tmp_path / "a.svg"), "--html"]
    assert cli.main([*few, str(tmp_path / "none/b.html")]) == 2 and "no such folder to write into" in capsys.readouterr().err
    (tmp_path / "link.html").symlink_to("none/b.html")
    assert cli.main([*few, str(tmp_path / "link.html")]) == 2 and "no such folder to write into" in capsys.readouterr().err
    (tmp_path / "link.html").unlink()
    (tmp_path / "sealed").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, how: not str(path).endswith("sealed") and real(path, how))   # root may write
    assert cli.main([*few, str(tmp_path / "sealed/b.html")]) == 2
    assert "a folder that can be written would be right" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["sealed"]


def test_what_is_simulated_has_the_seconds_that_were_given(tmp_path, capsys):
    def makespan(*argv):
        assert cli.main(["simulate", *map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["makespan_s"]

    two = ("--schedule", "gpipe", "--ranks", 2, "--micro-batches", 1)
    assert makespan(*two) == 6.0 and makespan(*two, "--comm", 0.25) == 6.5      # a message there, and one back
    (tmp_path / "p.CSV").write_bytes(b"0F0,0B0\r\n")                            # as another system's programs write it
    (tmp_path / "p.txt").write_bytes(b"0F0.0 0R0.0 0I0.0 0W0.0\r\n")
    assert makespan(tmp_path / "p.CSV") == 3.0 and makespan(tmp_path / "p.txt", "--fwd", 5, "--bwd", 8) == 5 + 5 + 4 + 4
    assert cli.main(["simulate", "--schedule", "sliced-1f1b", "--slices", "2"]) == 2
    assert "--slices is 2: 1 would be right" in capsys.readouterr().err


def test_a_terminal_of_ascii_alone_shows_a_timeline(tmp_path):
    """As of LC_ALL=C where Python's UTF-8 mode is off: a UnicodeEncodeError before. Bars keep their width."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "p.txt").write_text(str(schedules.gpipe(2, 2)))
    shown = subprocess.run([sys.executable, "-m", "terapipe_c", "view", str(tmp_path / "p.txt")], env=environment,
                           capture_output=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    bar = next(line for line in shown.stdout.decode("ascii").splitlines() if "rank 0" in line).split()[2]
    assert len(bar) == 72 and set(bar) == set("FB."), bar
