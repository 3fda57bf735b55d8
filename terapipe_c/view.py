"""Pictures of timelines: SVG, a page with zoom and tooltips, Chrome trace events, and text."""

from __future__ import annotations

import colorsys
import html
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import OPS, InvalidValueError, Program
from ._files import write_text
from ._page import PAGE
from .config import LONG, human_bytes, human_seconds
from .schedule import CAUSES, Timeline, idle_causes

__all__ = ["chrome_trace", "comparison_svg", "html_page", "measured_timeline", "notebook", "program_html", "summary", "svg",
           "write"]  # fmt: skip

#: hue, saturation, lightness of each operation: apart for eyes without red or green cones too (tests/test_view.py measures it).
_COLOURS = {
    "F": (214, 78, 70),
    "B": (146, 46, 62),
    "I": (172, 50, 62),
    "W": (42, 88, 66),
    "R": (277, 35, 73),
    "OPT": (222, 12, 58),
    "U": (73, 48, 67),
    "AR": (333, 83, 60),
    "SF": (212, 80, 52),
    "RF": (195, 88, 77),
    "SB": (138, 75, 25),
    "RB": (68, 75, 51),
    "SO": (13, 70, 60),
    "SI": (34, 95, 49),
    "SE": (324, 38, 41),
    "RE": (350, 31, 72),
    "SL": (24, 15, 41),
    "RL": (42, 33, 59),
}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
    "OPT": "update",
    "U": "update by a micro-batch",
    "AR": "tied gradients",
    "SF": "send activation",
    "RF": "receive activation",
    "SB": "send gradient",
    "RB": "receive gradient",
    "SO": "swap out",
    "SI": "swap in",
    "SE": "evict to a peer",
    "RE": "receive a guest",
    "SL": "give a guest back",
    "RL": "load from a peer",
}
#: Darker than any operation, so that no cause is taken for one.
_CAUSE_COLOURS = {
    "warmup": "#5557b9",
    "cooldown": "#c32c52",
    "imbalance": "#c73b0a",
    "slice_skew": "#178721",
    "recompute": "#8529e0",
    "swap": "#058977",
    "comm": "#9a328d",
}
_WORK_COLOUR = "#d0d5dd"
_LEVELS = "abcdefgh"
#: Lightness beside the operation's own: of micro-batches in turn or, where a rank has several chunks, of these, the first darkest.
_SHADES = {"0": 0.0, "1": 9.0, "2": -6.0, "3": 4.0, **{level: -15.0 + 4 * i for i, level in enumerate(_LEVELS)}}
_LIMIT = 12_000  # intervals drawn one by one; above, a picture of this width shows no single one
_ALONE = ("OPT", "AR")  # of no micro-batch
_MESSAGES = [OPS.index(name) for name in ("SF", "RF", "SB", "RB", "SE", "RE", "SL", "RL")]
_SWAPS = [OPS.index(name) for name in ("SO", "SI")]
_UNSHADED = [*_MESSAGES, *(OPS.index(name) for name in _ALONE)]  # by chunk

Rows = NDArray[np.void]


def write(path: str | os.PathLike[str], text: str) -> None:
    write_text(path, text)


def _drawable(line: Timeline) -> None:
    """A ValueError where its microseconds, or its ranks' seconds together, are no numbers, which JSON has no word for."""
    if line.makespan_s > LONG:
        raise InvalidValueError(f"the timeline lasts {line.makespan_s:g} s: at most {LONG:g} s would be right for its drawing")


def measured_timeline(rows: Sequence[tuple[Any, ...]], program: Program) -> Timeline:
    """The timeline of an engine's trace: rows (rank, op, stage, micro, slice, start_s, end_s) of the program that it ran."""
    return Timeline.from_intervals(rows, program=program)


# ---- numbers for people ----------------------------------------------------------------------------------------------------


def _unit(seconds: float) -> tuple[float, str]:
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return scale, name
    return (1e-9, "ns") if seconds > 0 else (1.0, "s")


def _cause(name: str) -> str:
    """A cause of idling in the words of `bubbles`' keys, so that a picture and a program can be laid side by side."""
    return name.replace("_", " ")


def _ticks(span: float, most: int) -> list[float]:
    """At most `most` round steps (1, 2, 5 times a power of ten) from 0 to span."""
    if span <= 0:
        return [0.0]
    raw = span / most
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    return [float(step * i) for i in range(int(span / step * (1 + 1e-9)) + 1)]


def _colour(op: str, shade: str) -> str:
    """#rrggbb: not every program that draws SVG knows hsl()."""
    hue, saturation, lightness = _COLOURS[op]
    parts = colorsys.hls_to_rgb(hue / 360, (lightness + _SHADES[shade]) / 100, saturation / 100)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _chunks(rows: Rows) -> NDArray[np.int64] | None:
    """Which of its rank's stages each interval is of, from 0 on; None where no rank has two."""
    place = rows["rank"].astype(np.int64) << 16 | rows["stage"]
    held = np.unique(place[~np.isin(rows["op"], _MESSAGES)])  # a guest's messages name a stage that the rank does not hold

    def nth(of: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(held, of) - np.searchsorted(held, of >> 16 << 16)

    most = nth(held).max(initial=0)
    return np.minimum(nth(place), most) if most else None


def _beside(line: Timeline) -> list[int]:
    """Operations that go on beside a rank's work."""
    return [*_MESSAGES, *(_SWAPS if line.program is not None and line.program.swaps_beside else ())]


def _levels(chunks: int) -> list[str]:
    """The shade of each chunk; of more than eight, neighbours share some."""
    return [_LEVELS[round((len(_LEVELS) - 1) * c / max(1, chunks - 1))] for c in range(chunks)]


def _word(row: Any, sliced: bool) -> str:
    return f"{row['micro']}.{row['slice']}" if sliced else f"{row['micro']}"


def _headline(line: Timeline) -> str:
    parts = [
        f"{line.num_ranks} rank{'s' if line.num_ranks > 1 else ''}",
        f"{human_seconds(line.makespan_s)}",
        f"{100 * line.efficiency:.1f} % busy" if line.makespan_s > 0 else "nothing ran",
    ]
    if line.lower_bound_s > 0:
        parts.append(f"no order is below {human_seconds(line.lower_bound_s)}")
    if line.peak_memory_bytes.any():
        parts.append(
            f"peak {human_bytes(float(line.peak_memory_bytes.max()))} on rank {int(line.peak_memory_bytes.argmax())}"
        )
    return " · ".join(parts)


# ---- SVG -------------------------------------------------------------------------------------------------------------------

_STYLE = """
.tp{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}.tp .panel{fill:#fff;stroke:#d8dde6}.tp .lane{fill:#f1f4f8}
.tp text{fill:#1c2430}.tp .soft{fill:#5b6675}.tp .grid{stroke:#d8dde6;stroke-width:1}.tp .ink{fill:#0c1420;font-size:10.5px;
text-anchor:middle;pointer-events:none}.tp .title{font-size:13.5px;font-weight:600}
@media (prefers-color-scheme:dark){.tp .panel{fill:#12171f;stroke:#2b3442}.tp .lane{fill:#1b222d}.tp text{fill:#e6ebf2}
.tp .soft{fill:#9aa7b8}.tp .grid{stroke:#2b3442}.tp .ink{fill:#0c1420}}
""".replace("\n", "")


def _shade_css(used: set[tuple[str, str]]) -> str:
    return "".join(f".tp .{op}{shade}{{fill:{_colour(op, shade)}}}" for op, shade in sorted(used))


class _Frame:
    """Where things are: x of a time, y of a rank."""

    def __init__(self, line: Timeline, width: int) -> None:
        self.left, self.top, self.width = 76, 44, width
        self.right = width - 18
        self.lane = 26 if line.num_ranks <= 16 else max(3, 420 // line.num_ranks)
        self.gap = 4 if self.lane >= 12 else 1 if self.lane >= 4 else 0
        self.bottom = self.top + line.num_ranks * (self.lane + self.gap)
        self.per_s = (self.right - self.left) / line.makespan_s if line.makespan_s > 0 else 0.0

    def x(self, seconds: float) -> float:
        return self.left + seconds * self.per_s

    def y(self, rank: int) -> float:
        return self.top + rank * (self.lane + self.gap)


def _time_axis(span_s: float, left: float, per_s: float, top: float, bottom: float) -> list[str]:
    scale, unit = _unit(span_s)
    out = []
    for tick in _ticks(span_s / scale, 10):
        x = left + tick * scale * per_s
        out.append(f'<line class="grid" x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom + 3}"/>')
        label = f"{tick:.10g}" + (f" {unit}" if tick == 0 else "")
        out.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>')
    return out


def _axis(line: Timeline, frame: _Frame) -> list[str]:
    out = _time_axis(line.makespan_s, frame.left, frame.per_s, frame.top, frame.bottom)
    every = max(1, -(-14 // (frame.lane + frame.gap)))
    for rank in range(0, line.num_ranks, every):
        y = frame.y(rank) + frame.lane / 2 + 4
        out.append(f'<text x="{frame.left - 10}" y="{y:.1f}" text-anchor="end">rank {rank}</text>')
    return out


def _lanes(line: Timeline, frame: _Frame) -> list[str]:
    return [
        f'<rect class="lane" x="{frame.left}" y="{frame.y(r)}" width="{frame.right - frame.left}" height="{frame.lane}" rx="2"/>'
        for r in range(line.num_ranks)
    ]


def _boxes(line: Timeline, rows: Rows, frame: _Frame, used: set[tuple[str, str]]) -> tuple[list[str], int]:
    """One rectangle per interval, labelled where the label fits; and how many chunks a rank has."""
    out, sliced = [], bool(len(rows)) and int(rows["slice"].max()) > 0
    beside = _beside(line)
    rows = rows[np.argsort(np.isin(rows["op"], beside), kind="stable")]  # over the work that goes on meanwhile
    chunk = _chunks(rows)
    levels = _levels(1 if chunk is None else int(chunk.max()) + 1)
    for i, row in enumerate(rows):
        op = OPS[row["op"]]
        shade = str(int(row["micro"]) % 4) if chunk is None or row["op"] in _UNSHADED else levels[chunk[i]]
        used.add((op, shade))
        start, stop = float(row["start_s"]), float(row["end_s"])
        x, end = frame.x(start), frame.x(stop)
        width, y, height = max(0.4, end - x), frame.y(int(row["rank"])), float(frame.lane)
        if row["op"] in beside:  # under the work of the rank
            y, height = y + 0.78 * height, 0.22 * height
        edge = 0.5 if width > 3 else 0.0
        name = f"{_NAMES[op]} · micro-batch {row['micro']} slice {row['slice']} · stage {row['stage']}"
        name += " · " if chunk is None else f" (chunk {chunk[i]}) · "
        times = f"{human_seconds(start)} to {human_seconds(stop)} ({human_seconds(stop - start)})"
        out.append(
            f'<rect class="{op}{shade}" x="{x:.2f}" y="{y:.1f}" width="{width - edge:.2f}" height="{height:.1f}" rx="1.5">'
            f"<title>{name}{times}</title></rect>"
        )
        word = op if op in _ALONE else _word(row, sliced)
        if row["op"] not in beside and frame.lane >= 12 and width > 6.4 * len(word) + 3:
            out.append(f'<text class="ink" x="{x + width / 2:.1f}" y="{y + height / 2 + 3.8:.1f}">{word}</text>')
    return out, len(levels)


def _done_before(mine: Rows, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds that the intervals (of one rank, in order) take before each of the times `edges`."""
    ends = np.concatenate(([0.0], np.cumsum(mine["end_s"] - mine["start_s"])))
    begun = np.searchsorted(mine["start_s"], edges, side="right")
    last = np.concatenate(([0.0], mine["end_s"]))[begun]  # where the newest of them ends; none has begun: 0
    still = np.maximum(0.0, np.where(begun > 0, last - edges, 0.0))
    return ends[begun] - still


def _bins(line: Timeline, rows: Rows, frame: _Frame, used: set[tuple[str, str]]) -> list[str]:
    """Too many to draw one by one: in columns of two pixels, each operation as high as its share of the time (in eighths)."""
    out: list[str] = []
    if line.makespan_s <= 0:
        return out
    count = max(1, int(frame.right - frame.left) // 2)       # of a step that is short beside others
    edges = np.linspace(0.0, line.makespan_s, count + 1)
    work = rows[~np.isin(rows["op"], _beside(line))]
    ops = np.unique(work["op"])
    used.update((OPS[op], "0") for op in ops)
    for rank in range(line.num_ranks):
        mine = work[work["rank"] == rank]
        shares = [np.diff(_done_before(mine[mine["op"] == op], edges)) * (count / line.makespan_s) for op in ops]
        levels = np.rint(8 * np.cumsum(shares, axis=0)).astype(int)  # [ops, columns]: where each operation's part ends
        starts = np.flatnonzero(np.any(np.diff(levels, axis=1, prepend=-1), axis=0))
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            low = 0
            for op, high in zip(ops, levels[:, start], strict=True):
                if high > low:
                    y, height = frame.y(rank) + frame.lane * low / 8, frame.lane * (high - low) / 8
                    out.append(
                        f'<rect class="{OPS[op]}0" x="{frame.left + 2 * start}" y="{y:.1f}" width="{2 * (end - start)}" '
                        f'height="{height:.1f}"/>'
                    )
                low = high
    return out


def _operations(used: set[tuple[str, str]], chunks: int, left: float, right: float, y: float) -> tuple[list[str], float]:
    """A line, or several, of the operations and of a rank's chunks; returns where the last of them stands."""
    out, x = [], left
    ops = [op for op in OPS if any(name == op for name, _ in used)]
    used.update((op, "0") for op in ops)
    for op in ops:
        width = 42 + 6.2 * (len(_NAMES[op]) + len(op))
        if x + width > right:
            x, y = left, y + 20
        out.append(f'<rect class="{op}0" x="{x}" y="{y - 10}" width="13" height="12" rx="2"/>')
        out.append(f'<text x="{x + 18}" y="{y}">{op} <tspan class="soft">{_NAMES[op]}</tspan></text>')
        x += width
    if chunks > 1:
        levels = sorted(set(_levels(chunks)))
        text = _chunk_words(chunks)
        if x + 14 * len(levels) + 6.2 * len(text) > right:
            x, y = left, y + 20
        used.update((ops[0], level) for level in levels)
        for level in levels:
            out.append(f'<rect class="{ops[0]}{level}" x="{x}" y="{y - 10}" width="13" height="12" rx="2"/>')
            x += 14
        out.append(f'<text class="soft" x="{x + 5}" y="{y}">{text}</text>')
    return out, y


def _chunk_words(chunks: int) -> str:
    return f"a rank's chunks, 0 {'to' if chunks > 2 else 'and'} {chunks - 1}"


def _legend(line: Timeline, frame: _Frame, used: set[tuple[str, str]], chunks: int) -> tuple[list[str], int]:
    """The operations, then what ranks idle for; returns the height it takes."""
    out, y = _operations(used, chunks, float(frame.left), frame.right + 18, frame.bottom + 42)
    whole = line.num_ranks * line.makespan_s
    causes = idle_causes(line.bubbles, whole)
    idle = sum(causes.values())
    y += 28
    share = 100 * idle / whole if whole > 0 else 0.0
    out.append(
        f'<text x="{frame.left}" y="{y}">idle {human_seconds(idle)} <tspan class="soft">of {human_seconds(whole)} rank time '
        f"({share:.1f} %)</tspan></text>"
    )
    y += 10
    x, span = float(frame.left), frame.right - frame.left
    for cause, seconds in causes.items():
        width = span * seconds / idle
        out.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, width - 1):.1f}" height="10" rx="2" fill="{_CAUSE_COLOURS[cause]}">'
            f"<title>{_cause(cause)} {human_seconds(seconds)}</title></rect>"
        )
        x += width
    y += 28
    x = float(frame.left)
    for cause, seconds in causes.items():
        text = f"{_cause(cause)} {human_seconds(seconds)}"
        if x + 15 + 6.4 * len(text) > frame.right:
            x, y = float(frame.left), y + 20
        out.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{_CAUSE_COLOURS[cause]}"/>')
        out.append(f'<text x="{x + 15}" y="{y}">{text}</text>')
        x += 34 + 6.4 * len(text)
    return out, int(y + 18) - frame.bottom


def _opening(width: int, height: int, label: str = "") -> str:
    """An svg's first tag: `width` pixels, or less where a notebook's cell, or a page, is narrower."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="tp" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" style="max-width:100%;height:auto" role="img"{label}>')  # fmt: skip


def svg(line: Timeline, width: int = 1200) -> str:
    """A picture `width` pixels wide that stands on its own on light and dark pages."""
    frame = _Frame(line, width)
    rows = line.intervals
    used: set[tuple[str, str]] = set()
    boxes, chunks = _boxes(line, rows, frame, used) if len(rows) <= _LIMIT else (_bins(line, rows, frame, used), 1)
    legend, height = _legend(line, frame, used, chunks)
    total = frame.bottom + height
    return "\n".join(
        [
            _opening(width, total),
            f"<style>{_STYLE}{_shade_css(used)}</style>",
            f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{total - 1}" rx="8"/>',
            f'<text class="title" x="{frame.left}" y="26">{html.escape(_headline(line))}</text>',
            *_lanes(line, frame),
            *_axis(line, frame),
            *boxes,
            *legend,
            "</svg>",
            "",
        ]
    )


class _Strip(_Frame):
    """A small timeline among others, on a scale that they share: `makespan_s` fills the width."""

    def __init__(self, line: Timeline, left: int, right: int, top: int, makespan_s: float) -> None:
        self.left, self.top, self.width = left, top, right
        self.lane, self.gap = (7 if line.num_ranks <= 8 else 4 if line.num_ranks <= 16 else 2), 1
        self.bottom = top + line.num_ranks * (self.lane + self.gap)
        self.per_s = (right - left) / makespan_s if makespan_s > 0 else 0.0
        self.right = int(self.x(line.makespan_s))


def _parts(line: Timeline) -> list[tuple[str, str, float]]:
    """(name, colour, seconds of the mean rank): work, then the causes of idling; they sum to the makespan."""
    causes = [(_cause(c), _CAUSE_COLOURS[c], line.bubbles.get(c, 0.0)) for c in CAUSES]
    return [("work", _WORK_COLOUR, float(line.busy_s.sum()) / line.num_ranks),
            *((name, colour, float(seconds) / line.num_ranks) for name, colour, seconds in causes)]  # fmt: skip


def comparison_svg(plans: Sequence[tuple[str, str, Timeline]], failed: Sequence[str] = (), width: int = 1200) -> str:
    """Plans (name, note, timeline) on one scale of time: a bar of the step (work and causes of idling of the mean rank), and
    the timeline of every rank beneath it. `failed`: names that have no plan."""
    left, right, top = 170, width - 110, 62
    longest = max((line.makespan_s for _, _, line in plans), default=0.0)
    scale = (right - left) / longest if longest > 0 else 0.0
    used: set[tuple[str, str]] = set()
    lanes: list[str] = []
    out, seen, chunks, y = [], {}, 1, top
    for name, note, line in plans:
        x = float(left)
        out.append(f'<text x="{left - 12}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        if note:
            place = f'x="{left - 12}" y="{y + 27}" text-anchor="end" font-size="10"'
            out.append(f'<text class="soft" {place}>{html.escape(note)}</text>')
        for part, colour, seconds in _parts(line):
            if seconds * scale > 0.05:
                seen[part] = colour
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="16" fill="{colour}">'
                           f"<title>{part} {human_seconds(seconds)}</title></rect>")  # fmt: skip
            x += seconds * scale
        out.append(f'<text x="{x + 8:.1f}" y="{y + 13}">{human_seconds(line.makespan_s)}</text>')
        y += 20
        if line.num_ranks <= 32:
            strip, rows = _Strip(line, left, right, y, longest), line.intervals
            lanes += _lanes(line, strip)
            if len(rows) <= _LIMIT // max(1, len(plans)):
                boxes, count = _boxes(line, rows, strip, used)
                chunks = max(chunks, count)
            else:
                boxes = _bins(line, rows, strip, used)
            out += boxes
            y = strip.bottom
        y += 18
    axis = _time_axis(longest, left, scale, top, y - 10) if plans else []
    y += 36 if plans else 0
    if failed:
        out.append(f'<text class="soft" x="{left}" y="{y}">no plan: {html.escape(", ".join(failed))}</text>')
        y += 28
    x = float(left)
    order = ["work", *(_cause(cause) for cause in CAUSES)]
    for name in sorted(seen, key=order.index):
        out.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{seen[name]}"/>')
        out.append(f'<text x="{x + 15}" y="{y}">{name}</text>')
        x += 40 + 6.6 * len(name)
    if used:
        legend, last = _operations(used, chunks, float(left), width - 20, y + 24)
        out, y = out + legend, int(last)
    total = y + 20
    return "\n".join([
        _opening(width, total, ' aria-label="planners compared"'), f"<style>{_STYLE}{_shade_css(used)}</style>",
        f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{total - 1}" rx="8"/>',
        f'<text class="title" x="24" y="28">{len(plans)} plans, one scale of time: the mean rank\'s step, and every rank</text>',
        *lanes, *axis, *out, "</svg>", ""])  # fmt: skip


# ---- the page ----------------------------------------------------------------------------------------------------------------


def html_page(line: Timeline) -> str:
    """A page with its data and its script inside: no network is needed to open it."""
    _drawable(line)
    rows = line.intervals
    place = 2 * rows["rank"].astype(np.int64) + np.isin(rows["op"], _beside(line))
    rows, place = rows[order := np.argsort(place, kind="stable")], place[order]  # a rank's work, then what goes on beside it
    chunk = _chunks(rows)
    levels = _levels(1 if chunk is None else int(chunk.max()) + 1)
    shades = list(_SHADES)
    causes = idle_causes(line.bubbles, line.num_ranks * line.makespan_s)
    data = {
        "ranks": line.num_ranks,
        "makespan": line.makespan_s,
        "headline": _headline(line),
        "ops": list(OPS),
        "names": [_NAMES[op] for op in OPS],
        "colours": [[_colour(op, s) for s in shades] for op in OPS],
        "alone": [OPS.index(op) for op in _ALONE],
        "unshaded": _UNSHADED,
        "chunk": None if chunk is None else chunk.tolist(),
        "levels": [shades.index(level) for level in levels],
        "chunks": _chunk_words(len(levels)),
        "messages": _beside(line),
        "bubbles": [[_cause(c), float(seconds), _CAUSE_COLOURS[c]] for c, seconds in causes.items()],
        "busy": [float(seconds) for seconds in line.busy_s],
        "peak": [int(size) for size in line.peak_memory_bytes],
        "begin": np.searchsorted(place, np.arange(2 * line.num_ranks + 1)).tolist(),
        **{name: rows[name].tolist() for name in ("op", "stage", "micro", "slice")},
        "start": [float(f"{t:.9g}") for t in rows["start_s"].tolist()],
        "end": [float(f"{t:.9g}") for t in rows["end_s"].tolist()],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return PAGE.replace("/*DATA*/null", text)


def notebook(line: Timeline) -> str:
    """For a notebook: the picture, scaled to the cell."""
    return f"<div>{svg(line)}</div>"


# ---- Chrome trace -------------------------------------------------------------------------------------------------------------


def chrome_trace(line: Timeline) -> str:
    """Trace Event Format: complete events in microseconds, one process per rank, messages on a thread of their own, as
    copies beside the work."""
    _drawable(line)
    events: list[str] = []
    for rank in range(line.num_ranks):
        for kind, key, value in (("process_name", "name", f"rank {rank}"), ("process_sort_index", "sort_index", rank)):
            events.append(json.dumps({"ph": "M", "name": kind, "pid": rank, "args": {key: value}}))
        events.append(json.dumps({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "work"}}))
    rows = line.intervals
    thread = np.isin(rows["op"], _beside(line)) * np.where(np.isin(rows["op"], _SWAPS), 2, 1)
    for tid, name in ((1, "messages"), (2, "copies")):
        for rank in np.unique(rows["rank"][thread == tid]).tolist():
            events.append(json.dumps({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}))
    columns = [rows[name].tolist() for name in ("rank", "op", "stage", "micro", "slice", "start_s", "end_s")]
    for rank, op, stage, micro, piece, start, end, tid in zip(*columns, thread.tolist(), strict=True):
        events.append(
            f'{{"ph":"X","name":"{stage}{OPS[op]}{micro}.{piece}","cat":"{_NAMES[OPS[op]]}","pid":{rank},"tid":{int(tid)},'
            f'"ts":{start * 1e6:.4f},"dur":{round(end * 1e6, 4) - round(start * 1e6, 4):.4f},'
            f'"args":{{"stage":{stage},"micro":{micro},"slice":{piece}}}}}'
        )
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


# ---- text ---------------------------------------------------------------------------------------------------------------------


def _bar(line: Timeline, rows: Rows, width: int) -> str:
    """One letter per cell: the operation in the middle of it."""
    work = rows[~np.isin(rows["op"], _beside(line))]
    cells = []
    for at in (np.arange(width) + 0.5) * line.makespan_s / width:
        i = int(np.searchsorted(work["start_s"], at, side="right")) - 1
        cells.append(OPS[work["op"][i]][0] if i >= 0 and at < work["end_s"][i] else "·")
    return "".join(cells)


def summary(line: Timeline, width: int = 72) -> str:
    """What a terminal shows: the headline, a bar per rank (up to 16), the causes of idle time."""
    out = [f"Timeline: {_headline(line)}"]
    if line.num_ranks <= 16 and (line.program is None or len(line.program) <= 200_000):
        rows = line.intervals
        for rank in range(line.num_ranks):
            share = f" {100 * float(line.busy_s[rank]) / line.makespan_s:5.1f} %" if line.makespan_s > 0 else ""
            bar = _bar(line, rows[rows["rank"] == rank], width)
            out.append(f"  rank {rank:<3d} {bar}{share}")
    causes = idle_causes(line.bubbles, line.num_ranks * line.makespan_s)
    words = ", ".join(f"{_cause(cause)} {human_seconds(seconds)}" for cause, seconds in causes.items())
    out.append(f"  idle {human_seconds(sum(causes.values()))}" + (f": {words}" if words else ""))
    return "\n".join(out)


def program_html(program: Program) -> str:
    """A program in a notebook: its operations as chips, rank by rank (the first 160 of each of the first 32)."""
    out = [
        f"<div style='font:12px system-ui,sans-serif'><div>{html.escape(repr(program))}</div>"
        "<div style='overflow-x:auto;white-space:nowrap;line-height:22px'>"
    ]
    style = "display:inline-block;margin-right:2px;padding:0 4px;border-radius:3px;color:#0c1420;background:"
    chip = f"<span style='{style}{{}}'>{{}}</span>"
    for rank in range(min(program.num_ranks, 32)):
        code = program.instructions(rank)
        chips = []
        for instr in code[:160]:
            op = OPS[instr["op"]]
            peer = f"@{instr['peer']}" if instr["peer"] >= 0 else ""
            chips.append(
                chip.format(
                    _colour(op, str(int(instr["micro"]) % 4)), f"{instr['stage']}{op}{instr['micro']}.{instr['slice']}{peer}"
                )
            )
        more = f" … {len(code) - 160} more" if len(code) > 160 else ""
        out.append(f"<div><span style='display:inline-block;width:56px'>rank {rank}</span>{''.join(chips)}{more}</div>")
    if program.num_ranks > 32:
        out.append(f"<div>… {program.num_ranks - 32} more ranks</div>")
    return "".join([*out, "</div></div>"])
