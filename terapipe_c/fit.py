"""Fits cost curves to measured samples: TeraPipe's eq. 9 with t_ctx(S, 0) = 0; and their error on samples that the fit did not
see."""
from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidTypeError, InvalidValueError
from .config import LONG, Cluster, brief, real

__all__ = ["Curve"]

MOST_TOKENS = 1 << 24     # of a sample: what a slice of any length takes is looked at
LEAST_S = 1e-100     # of a sample: squares of its weight, the inverse, stay numbers
MOST_S = 1e9     # seconds of one slice: sums and squares of as many stay numbers

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """t(S, C, b) of one kind of block in one phase; see the module's formula. ``table`` >= 0: a table instead."""

    rows: tuple[float, ...] = ()      #: points of P, ascending
    seconds: tuple[float, ...] = ()
    pair_s: float = 0.0               #: seconds of a pair inside the slice
    a0: float = 0.0
    a1: float = 0.0
    a2: float = 0.0
    a3: float = 0.0
    table: int = -1                   #: index into the model's tables
    scale: float = 1.0                #: of the table

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds):
            raise InvalidValueError(f"a curve has {len(self.rows)} rows and {len(self.seconds)} seconds")
        try:
            for name in ("rows", "seconds"):
                object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))
            numbers = [*self.rows, *self.seconds, self.pair_s, self.a0, self.a1, self.a2, self.a3, self.scale, self.table]
            finite = all(math.isfinite(x) for x in numbers)
        except OverflowError:                                           # a whole number beyond all floats
            finite = False
        if not finite:
            raise InvalidValueError("a curve has a number that is not finite")
        for name in ("pair_s", "a0", "a1", "a2", "a3", "scale"):        # NumPy's numbers have no place in a file
            object.__setattr__(self, name, float(getattr(self, name)))
        if int(self.table) != self.table:
            raise InvalidValueError(f"a curve's table is {self.table}: a whole number, the table's index, would be right")
        object.__setattr__(self, "table", int(self.table))


def check_rates(cluster: Any) -> None:
    """A TypeError if it is none; a ValueError that names what of it is so slow that seconds, a rate's inverse, were no numbers."""
    is_a("cluster", cluster, Cluster)
    for name in ("peak_flops", "memory_bandwidth_Bps", "link_bandwidth_Bps", "node_link_bandwidth_Bps"):
        rate = getattr(cluster, name)
        if rate is not None and rate < 1 / LONG:
            raise InvalidValueError(f"{name} is {brief(rate)}: at least {1 / LONG:g} would be right")


def read_curve(name: str, data: Mapping[str, Any]) -> Curve:
    """A curve of a file, or an error that names it. A fit has rows, P of any rows, pairs and scale from 0 on, but for rounding;
    P of no rows is where its first line begins."""
    try:
        curve = Curve(**{**data, "rows": tuple(data["rows"]), "seconds": tuple(data["seconds"])})
    except InvalidValueError as error:
        raise InvalidValueError(f"{name}: {error}") from None
    seconds = [y for x, y in zip(curve.rows, curve.seconds, strict=True) if x != 0]
    for field, numbers_of in (("rows", curve.rows), ("seconds", seconds), ("pair_s", curve.pair_s), ("scale", curve.scale)):
        given = np.atleast_1d(numbers_of)
        if given.size and given.min() < -1e-9 * np.abs(given).max():
            raise InvalidValueError(f"{name}: {field} of {given.min():g}: from 0 on would be right")
    return curve


def check_remade(name: str, curve: Curve) -> None:
    """A ValueError where R's curve is none of samples: it would be priced by a table of the whole layer, or not at all."""
    if curve.table >= 0 or not curve.rows:
        what = f"of table {curve.table}" if curve.table >= 0 else "without rows"
        raise InvalidValueError(f"remade {name} is {what}: a curve with rows and seconds, or no remade {name}, would be right")


def written(curves: Mapping[str, Curve]) -> dict[str, dict[str, Any]]:
    """The same by JSON's types, as :func:`read_curve` reads them."""
    return {name: {"rows": list(c.rows), "seconds": list(c.seconds), "pair_s": c.pair_s, "a0": c.a0, "a1": c.a1, "a2": c.a2,
                   "a3": c.a3, "table": c.table, "scale": c.scale} for name, c in curves.items()}


def head_pass_of(given: Any) -> tuple[float, float, float] | None:
    """A CostModel's ``head_pass``, or an error that says what would be right."""
    try:
        row_s, least, flush_s = given
    except (TypeError, ValueError):
        raise InvalidValueError(f"head_pass is {brief(given)}: (seconds a row, least rows, seconds a row of the weight's gradient) "
                                "would be right") from None
    return (real("head_pass[0]", row_s), real("head_pass[1]", least, zero=True), real("head_pass[2]", flush_s, zero=True))


def refuse_negative(file: str, seconds: Float, a2: float, a3: float, batch: int, granularity: int) -> None:
    """An error where ``seconds[i] + a2 j + a3 i j`` of i units after j, together ``len(seconds) - 1`` at most, is below zero. The
    planners would refuse it as well, but know of no curves and no file."""
    units = np.arange(1, len(seconds) - 1)
    for context in (np.ones_like(units), len(seconds) - 1 - units) if a2 < 0 or a3 < 0 else ():     # linear in it: its ends decide
        slices = seconds[units] + a2 * context + a3 * units * context
        if (slices < 0).any():
            at = int(slices.argmin())
            raise InvalidValueError(
                f"{file or 'costs'}: a slice of {units[at] * granularity} tokens of {batch} sequences after "
                f"{context[at] * granularity} takes {slices[at]:g} s, as a2 or a3 of some curves is below zero: coefficients by "
                "which none takes less than 0 s would be right")


def _refuse_words(given: NDArray[Any]) -> None:
    """Strings and truths that float64 would take. None, where nothing is known, becomes NaN; fractions and decimals are numbers."""
    if given.dtype.kind not in "fiuO" or (given.dtype.kind == "O" and any(isinstance(x, (str, bytes, bool)) for x in given.flat)):
        raise TypeError


def at_least(name: str, array: NDArray[np.float64], least: float) -> None:
    """Refuses what is below ``least`` or not finite, by its name and the first such value."""
    wrong = array[~(np.isfinite(array) & (array >= least))]
    if len(wrong):
        raise InvalidValueError(f"{name} is {wrong[0]:g}: finite numbers from {least:g} on would be right")


def is_a(name: str, value: Any, kind: type, *, none: bool = False) -> None:
    """An error that names ``value`` unless it is one of this type (or None, where that may be)."""
    if not isinstance(value, kind) and not (none and value is None):
        raise InvalidTypeError(f"{name} is {brief(value)}: a {kind.__name__}{', or None,' if none else ''} would be right")


def numbers(name: str, value: Any) -> Float:
    """A copy as float64, NaN where it is masked, or an error that names it."""
    try:
        given = np.array(value)
        if given.dtype.kind == "c":
            raise InvalidTypeError(f"{name} is complex: real numbers would be right")
        _refuse_words(given)
        given = given.astype(np.float64)
        return np.where(np.ma.getmaskarray(value), np.nan, given) if isinstance(value, np.ma.MaskedArray) else given
    except InvalidTypeError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(f"{name} is {brief(value)}: numbers would be right") from None


def layer_table(name: str, table: Any) -> Float:
    """A copy of a layer's [n + 1, n + 1] seconds, 0 where s = 0 or s + c > n, or an error that names the cell."""
    array = numbers(name, table)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.shape[0] < 2:
        raise InvalidValueError(f"{name} has shape {array.shape}: a square [n + 1, n + 1] would be right")
    s, c = np.indices(array.shape)
    used = (s > 0) & (s + c < len(array))
    array[~used] = 0.0
    for where in map(tuple, np.argwhere(~(np.isfinite(array) & (array >= 0)))):
        found = "masked" if np.ma.getmaskarray(np.ma.array(table))[where] else array[where]
        raise InvalidValueError(f"{name}[{where[0]}, {where[1]}] is {found}: finite seconds from 0 on would be right (nan and inf "
                                "are not)")
    return array


def merged(samples: Iterable[Sequence[float]], columns: int, what: str) -> Float:
    """float64 [n, columns], repeated conditions merged into their median, sorted."""
    try:
        array = np.array([tuple(row) for row in samples])
        _refuse_words(array)
        array = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(f"{what} is {brief(samples)}: a list of {columns}-tuples of numbers would be right") from None
    if array.ndim != 2 or array.shape[1] != columns or not len(array):
        raise InvalidValueError(f"{what}: a list of at least one {columns}-tuple would be right")
    if not np.isfinite(array).all():
        at = int(np.argmin(np.isfinite(array).all(1)))
        raise InvalidValueError(f"{what}: sample {at} is {tuple(array[at].tolist())}: finite numbers would be right")
    if (array[:, -1] > MOST_S).any():
        at = int(np.argmax(array[:, -1] > MOST_S))
        raise InvalidValueError(f"{what}: sample {at} took {array[at, -1]:g} s: at most {MOST_S:g} would be right")
    short = (array[:, -1] > 0) & (array[:, -1] < LEAST_S)
    if short.any():
        at = int(np.argmax(short))
        raise InvalidValueError(f"{what}: sample {at} took {array[at, -1]:g} s: at least {LEAST_S:.3g} would be right")
    bad = (array[:, -1] <= 0) | (array[:, -2] < 0)
    if columns > 2:
        bad |= (array[:, -3] < 1) | (array[:, 0] < 1)
    if bad.any():
        index = int(np.argmax(bad))
        right = "a slice of at least one token, a context" if columns > 2 else "an amount"
        raise InvalidValueError(f"{what}: sample {index} is {tuple(array[index].tolist())}: {right} from 0 on and seconds above 0 "
                                "would be right")
    sequences = array[:, 0] / array[:, 1] if columns > 3 else np.ones(1)
    if (np.abs(sequences - np.rint(sequences)) > 1e-9 * sequences).any():
        at = int(np.argmax(np.abs(sequences - np.rint(sequences)) > 1e-9 * sequences))
        raise InvalidValueError(f"{what}: sample {at} is of {array[at, 0]:g} rows, slices of {array[at, 1]:g} tokens: as many rows "
                                "as some sequences have such tokens would be right")
    if columns > 2 and (array[:, :-1] > MOST_TOKENS).any():
        at = int(np.argmax((array[:, :-1] > MOST_TOKENS).any(1)))
        raise InvalidValueError(f"{what}: sample {at} is of {array[at, :-1].max():g} tokens: at most {MOST_TOKENS} would be right")
    keys, inverse = np.unique(array[:, :-1], axis=0, return_inverse=True)
    medians = [float(np.median(array[inverse.reshape(-1) == i, -1])) for i in range(len(keys))]
    return np.column_stack([keys, medians])


def _smooth(rows: Float, seconds: Float) -> Float:
    """Seconds that never fall with the rows, of a rate (seconds a row) that never rises: on a processor without tiles of
    waves a longer slice is no less efficient, so what says otherwise is noise, and a planner would cut where it dips.
    Isotonic regression of the rate by pooling adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []                       # mean rate, samples
    for rate in (seconds / rows).tolist():
        mean, count = rate, 1
        while pools and mean > pools[-1][0]:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    rates = np.repeat([rate for rate, _ in pools], [count for _, count in pools])
    return np.maximum.accumulate(rates * rows)


def _base(without: Float, pair: float) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """P and the pair cost from the samples without context: rows, seconds, pair (lowered until P >= 0 everywhere)."""
    rows, S, seconds = without[:, 0], without[:, 1], without[:, 3]
    pairs = 0.5 * rows * S                                   # b S^2 / 2
    pair = max(0.0, min(pair, float((seconds / pairs).min())))
    return *_points_of(rows, np.maximum(seconds - pair * pairs, 0.0), False), pair     # where nothing is left, rounding may be


def _points_of(rows: Float, left: Float, smooth: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """P's rows and seconds through what the pairs and the context leave of the samples."""
    x, first = np.unique(rows, return_inverse=True)
    y = np.array([np.median(left[first.reshape(-1) == i]) for i in range(len(x))])
    if smooth:
        y = _smooth(x, y)
    slope = (y[1] - y[0]) / (x[1] - x[0]) if len(x) > 1 else y[0] / x[0]
    origin = float(np.clip(y[0] - slope * x[0], 0.0, max(0.0, y[0])))   # the fixed part, from the first two points
    x, y = np.concatenate([[0.0], x]), np.concatenate([[origin], y])
    if y[-1] < y[-2]:                                         # noise must not make longer slices cheaper for ever
        x, y = np.append(x, 2 * x[-1]), np.append(y, y[-1] * 2 if y[-1] > 0 else y[-1])
    return tuple(x.tolist()), tuple(y.tolist())


def _context(with_: Float, residual: Float, signed: bool) -> tuple[Float, bool]:
    """a0..a3 of least relative squared error, unless `signed` with a2, a3 >= 0, and whether the bounds changed much."""
    S, C, seconds = with_[:, 1], with_[:, 2], with_[:, 3]
    b = with_[:, 0] / S
    columns = np.column_stack([np.ones_like(S), b * S, b * C, b * S * C])
    norm = np.abs(columns).max(0)
    weight = 1.0 / seconds

    def solve(kept: list[int]) -> tuple[float, Float]:
        answer = np.zeros(4)
        matrix = columns[:, kept] / norm[kept] * weight[:, None]
        answer[kept] = np.linalg.lstsq(matrix, residual * weight, rcond=1e-9)[0] / norm[kept]
        return float(np.sum(((columns @ answer - residual) * weight) ** 2)), answer

    # Two bounds: the best of the (at most four) faces that are feasible is the constrained optimum of a convex problem.
    free = solve([0, 1, 2, 3])[1]
    if signed or (free[2] >= 0 and free[3] >= 0):
        return free, False
    faces = [solve([0, 1, *kept]) for kept in ([3], [2], [])]
    best = min((f for f in faces if f[1][2] >= 0 and f[1][3] >= 0), key=lambda f: f[0])[1]
    lost = max((-free[k] * norm[k] / seconds.max() for k in (2, 3) if free[k] < 0), default=0.0)
    return best, lost > 0.01


def _fit(samples: Float, what: str, signed: bool, warn: bool) -> Curve:
    """The curve through samples [n, 4]: rows, slice, context, seconds."""
    without, with_ = samples[samples[:, 2] == 0], samples[samples[:, 2] > 0]
    if not len(without):
        raise InvalidValueError(f"{what}: no sample without context (C = 0); TeraPipe's eq. 9 stands on t(S, 0)")
    a, clamped = np.zeros(4), False
    rows, seconds, pair = _base(without, 0.0)
    for _ in range(8 if len(with_) else 0):
        S, b = with_[:, 1], with_[:, 0] / with_[:, 1]
        own = _points(rows, seconds, with_[:, 0]) + 0.5 * b * pair * S * S
        a, clamped = _context(with_, with_[:, 3] - own, signed)
        before = pair
        rows, seconds, pair = _base(without, float(a[3]))      # the pairs inside a slice cost what the others do
        if abs(pair - before) <= 1e-6 * abs(pair):
            break
    if clamped and warn:
        warnings.warn(f"{what}: the fit of t_ctx has a negative slope in the context; it is set to 0", stacklevel=4)
    a = a * _share_of_context(rows, seconds, pair, a, int((samples[:, 1] + samples[:, 2]).max()),
                              int((samples[:, 0] / samples[:, 1]).max()))
    return Curve(rows, seconds, pair, float(a[0]), float(a[1]), float(a[2]), float(a[3]))


def _fit_jointly(samples: Float) -> Curve:
    """The curve through few and noisy samples: P, the context and the pairs from all of them at once, not P from those
    without context alone. a0 = a1 = 0: the kernels have no step at C = 0.

    First the context, beside a P of few knots, by least relative squares in which a sample that is far off weighs less
    (Huber 1964); then P, point by point, from what is left."""
    rows, S, C, seconds = samples.T
    b = rows / S
    slopes = np.column_stack([b * C, b * (S * C + 0.5 * S * S)])
    a2, a3 = _slopes(np.column_stack([_hats(rows), slopes]), seconds) if (C > 0).any() else (0.0, 0.0)
    x, y = _points_of(rows, np.maximum(seconds - slopes @ np.array([a2, a3]), 0.1 * seconds), True)
    return Curve(x, y, a3, 0.0, 0.0, a2, a3)


def _hats(rows: Float) -> Float:
    """A column for each knot of a piecewise linear function of the rows; knots a factor of 4 apart."""
    knots = [float(rows.min())]
    while knots[-1] * 6 < rows.max():
        knots.append(knots[-1] * 4)
    if knots[-1] < rows.max():
        knots.append(float(rows.max()))
    return np.column_stack([np.interp(rows, knots, unit) for unit in np.eye(len(knots))])


def _robust(columns: Float, part: Float, seconds: Float) -> tuple[Float, float]:
    """Coefficients that make ``part`` of the seconds with least squares relative to these, with Huber's weights, and their loss."""
    scale = np.maximum(np.abs(columns).max(0), 1e-300)
    weight = 1.0 / seconds
    for _ in range(8):
        answer = np.linalg.lstsq(columns / scale * weight[:, None], part * weight, rcond=1e-9)[0] / scale
        off = np.abs((columns @ answer - part) / seconds)
        usual = max(1e-6, 1.5 * float(np.median(off)))
        weight = np.sqrt(np.minimum(1.0, usual / np.maximum(off, 1e-12))) / seconds
    return answer, float(np.where(off <= usual, 0.5 * off * off, usual * (off - 0.5 * usual)).sum())


def _slopes(columns: Float, seconds: Float) -> tuple[float, float]:
    """The coefficients of the last two columns, from 0 on; the others are free."""
    count = columns.shape[1]
    best, found = math.inf, (0.0, 0.0)
    for kept in ([count - 2, count - 1], [count - 1], [count - 2], []):
        answer, loss = _robust(columns[:, [*range(count - 2), *kept]], seconds, seconds)
        slopes = {k: float(answer[count - 2 + i]) for i, k in enumerate(kept)}
        if loss < best and all(slope >= 0 for slope in slopes.values()):
            best, found = loss, (slopes.get(count - 2, 0.0), slopes.get(count - 1, 0.0))
    return found


def _share_of_context(rows: Sequence[float], seconds: Sequence[float], pair: float, a: Float, longest: int, batch: int) -> float:
    """How much of t_ctx may stay, so that no slice up to `longest` tokens of up to `batch` sequences takes less than a tenth
    of its time without context: few and noisy samples can give a plane that falls below zero where nothing was measured.
    t_ctx is linear in the context, so its ends decide; and both are linear in the sequences between those at which P bends."""
    S = np.arange(1.0, longest)
    share = 1.0
    bends: list[Any] = [1.0, float(batch), *(np.clip(to(x / S), 1.0, batch) for x in rows for to in (np.floor, np.ceil))]
    for b in bends if len(bends) < batch else range(1, batch + 1):
        base = _points(rows, seconds, b * S) + 0.5 * b * pair * S * S
        for C in (np.ones_like(S), longest - S):
            context = a[0] + b * (a[1] * S + a[2] * C + a[3] * S * C)
            falls = context < 0
            if falls.any():
                share = min(share, float((0.9 * base[falls] / -context[falls]).min()))
    return share


def of_blocks(curve: Curve, longest: int) -> tuple[Curve, Curve]:
    """A phase of attention and of FFN, a third each of a layer's: FFN has half of P, or less where attention's half with the pairs
    and the context would take less than 0 s for some slice and context up to `longest` tokens: a block that would is clipped there,
    and the sum of both is not the layer's."""
    S = np.arange(1.0, longest)
    base, share = _points(curve.rows, curve.seconds, S), 0.5
    for C in (np.ones_like(S), longest - S):     # linear in the context, so its ends decide
        rest = 0.5 * curve.pair_s * S * S + curve.a0 + curve.a1 * S + curve.a2 * C + curve.a3 * S * C
        falls = (rest < 0) & (base > 0)
        share = min(1.0, max(share, float((-rest[falls] / base[falls]).max(initial=0.0))))
    each = [tuple(y * part / 3 for y in curve.seconds) for part in (share, 1 - share)]
    attention = Curve(curve.rows, each[0], curve.pair_s / 3, curve.a0 / 3, curve.a1 / 3, curve.a2 / 3, curve.a3 / 3)
    return attention, Curve(curve.rows, each[1])


def _points(rows: Sequence[float], seconds: Sequence[float], at: Float) -> Float:
    """P(at), with the last piece going on (np.interp would stay level)."""
    inside = np.interp(at, rows, seconds)
    if len(rows) < 2:
        return inside
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
    return np.asarray(np.where(at > rows[-1], seconds[-1] + slope * (at - rows[-1]), inside))


def _predict(curve: Curve, samples: Float) -> Float:
    return np.maximum(_points(curve.rows, curve.seconds, samples[:, 0]) + _beside(curve, samples), 0.0)


def _beside(curve: Curve, samples: Float) -> Float:
    """What pairs and the context take, beside P."""
    S, C, b = samples[:, 1], samples[:, 2], samples[:, 0] / samples[:, 1]
    pairs = 0.5 * b * curve.pair_s * S * S
    return np.asarray(pairs + (C > 0) * (curve.a0 + b * (curve.a1 * S + curve.a2 * C + curve.a3 * S * C)))


def _held_out(samples: Float) -> NDArray[np.bool_]:
    """Which samples the fit does not see while its error is measured: every fourth with context, every third inner one
    without. By position in sorted order, so that the same samples always give the same split."""
    mask = np.zeros(len(samples), bool)
    without, with_ = np.flatnonzero(samples[:, 2] == 0), np.flatnonzero(samples[:, 2] > 0)
    if len(without) >= 5:
        mask[without[2:-1:3]] = True
    if len(with_) >= 6:
        mask[with_[2::4]] = True
    return mask


def _from_the_start(curve: Curve) -> Curve:
    """The curve whose a0 + a1 S holds without a context, too, as far as the seconds of any rows stay from 0 on."""
    rows, seconds = curve.rows, curve.seconds
    if len(rows) == 1:                                          # a line through 0
        rows, seconds = (rows[0], 2 * rows[0]), (seconds[0], 2 * seconds[0])
    seconds = tuple(max(0.0 if x > 0 else -math.inf, y + curve.a0 + curve.a1 * x) for x, y in zip(rows, seconds, strict=True))
    return replace(curve, rows=rows, seconds=seconds, a0=0.0, a1=0.0)


def fit_and_judge(samples: Float, what: str, signed: bool = False, smooth: bool = False,
                  from_the_start: bool = False) -> tuple[Curve, Float]:
    """The curve through all samples (smooth: as near as :func:`_smooth` allows), and the relative errors of the one that did
    not see the held-out samples.

    signed: the time may fall with the context. That is so in the input gradient's pull backward: dK and dV of an early slice
    come from all later queries, so that a slice with little context has much to pull (GPU.md section 1.2). Not with `smooth`,
    which is for the CPU's kernels: they push. from_the_start: a0 + a1 S holds without a context, too.
    """

    def fit(seen: Float, warn: bool) -> Curve:
        curve = _fit_jointly(seen) if smooth else _fit(seen, what, signed, warn)
        return _from_the_start(curve) if from_the_start else curve

    mask = _held_out(samples)
    errors = np.zeros(0)
    if mask.any():
        seen = fit(samples[~mask], False)
        errors = np.abs(_predict(seen, samples[mask]) / samples[mask, 3] - 1.0)
    return fit(samples, True), errors


def fit_remade(samples: Float, forward: Curve) -> tuple[Curve, Float]:
    """R's curve beside its block's forward's, and the relative errors of the one that did not see the held-out samples.

    R runs some of the forward's kernels. What goes by context and pairs it makes as the forward does; of the forward's P it takes a
    share, and something a row and an instruction besides: three numbers, none below 0, which few and noisy samples tell."""
    def fit(seen: Float) -> Curve:
        base = _points(forward.rows, forward.seconds, seen[:, 0])
        columns = np.column_stack([base, seen[:, 0], np.ones(len(seen))])
        share, row_s, fixed_s = _mix(columns, seen[:, 3] - _beside(forward, seen), seen[:, 3])
        ends = np.array(forward.rows)
        return replace(forward, seconds=tuple((share * np.array(forward.seconds) + row_s * ends + fixed_s).tolist()))

    mask = _held_out(samples)
    errors = np.abs(_predict(fit(samples[~mask]), samples[mask]) / samples[mask, 3] - 1.0) if mask.any() else np.zeros(0)
    return fit(samples), errors


def _mix(columns: Float, left: Float, seconds: Float) -> Float:
    """Coefficients from 0 on by which the columns make ``left`` of ``seconds``: of the best choice of columns, none of which is
    left out for less."""
    count = columns.shape[1]
    best, found = math.inf, np.zeros(count)
    for chosen in range(1, 1 << count):
        kept = [k for k in range(count) if chosen >> k & 1]
        answer, loss = _robust(columns[:, kept], left, seconds)
        if loss < best and (answer >= 0).all():
            best, found = loss, np.zeros(count)
            found[kept] = answer
    return found


def least_share(part: Curve, whole: Curve, floor: float) -> float:
    """How much of ``whole`` ``part`` takes at least, whatever the slice, by a Curve's rule; ``floor`` where that is more or not
    known. Both are lines between their points, and a quotient of lines has its least where one begins or ends."""
    context = (part.pair_s, part.a0, part.a1, part.a2, part.a3)
    if min(part.table, whole.table) >= 0 or not part.rows or not whole.rows or part.rows[0] != 0 or whole.rows[0] != 0 or \
            context != (whole.pair_s, whole.a0, whole.a1, whole.a2, whole.a3) or min(context) < 0:
        return floor
    ends = sorted({*part.rows, *whole.rows})
    rows = np.array([*ends, 2 * ends[-1] + 1])         # beyond the last there are but two lines ...
    less, more = (_points(c.rows, c.seconds, rows) for c in (part, whole))
    shares = [*(less[more > 0] / more[more > 0]), (less[-1] - less[-2]) / max(more[-1] - more[-2], LEAST_S)]     # ... for ever
    return float(max(floor, min(1.0, *shares)))


def fit_passes(samples: Float) -> tuple[float, float, float]:
    """(seconds a row, least rows, seconds a row flushed) of the head, from samples [n, 3]: rows passed over its weights,
    rows whose weight gradient was flushed, seconds: the last is a max(rows passed, least) + b rows flushed.
    Fewer rows than `least` take as long, because the weights have to come from memory."""
    passed, flushed, seconds = samples.T
    best = (math.inf, 0.0, 0.0, 0.0)
    for least in (0.0, *np.geomspace(2.0, max(2.0, float(passed.max())), 60).tolist()):
        columns = np.column_stack([np.where(passed > 0, np.maximum(passed, least), 0.0), flushed])
        columns /= seconds[:, None]
        row, flush = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
        if flush < 0 or not flushed.any():
            row, flush = columns[:, 0].sum() / np.square(columns[:, 0]).sum(), 0.0
        loss = float(np.square(columns @ np.array([row, flush]) - 1.0).sum())
        if not flushed.any():
            flush = 0.5 * row                                   # one product where a pass is two
        if loss < best[0]:
            best = loss, float(row), least, float(flush)
    return best[1:]


def fit_line(samples: Iterable[Sequence[float]], what: str) -> tuple[float, float]:
    """(seconds at 0, seconds per unit), both >= 0, of (amount, seconds) samples; least relative squares."""
    array = merged(samples, 2, what)
    x, y = array[:, 0], array[:, 1]
    weight, scale = 1.0 / y, max(float(x.max()), 1.0)
    if len(x) > 1:
        matrix = np.column_stack([np.ones_like(x), x / scale]) * weight[:, None]
        start, slope = np.linalg.lstsq(matrix, np.ones_like(x), rcond=None)[0]
        if start >= 0 and slope >= 0:
            return float(start), float(slope / scale)
        if start >= 0:
            return float(np.sum(weight) / np.sum(weight**2)), 0.0
    if not x.any():
        return float(np.mean(y)), 0.0
    r = x * weight
    return 0.0, float(np.sum(r) / np.sum(r * r))


def given_line(given: Mapping[str, float] | Iterable[Sequence[float]] | None, what: str, start: str,
               slope: str) -> tuple[float, float]:
    """(fixed seconds, seconds per unit) from a dict of both or from samples."""
    if given is None:
        return 0.0, 0.0
    if isinstance(given, Mapping):
        extra = set(given) - {start, slope}
        if extra:
            raise InvalidValueError(f"{what} has {sorted(extra)[0]!r}: {start} and {slope} would be right")
        return (real(f"{what}[{start}]", given.get(start, 0.0), zero=True),
                real(f"{what}[{slope}]", given.get(slope, 0.0), zero=True))
    return fit_line(given, what)
