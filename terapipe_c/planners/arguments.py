"""Checks of the planners' arguments; the messages call an argument by the name that its caller passes as ``what``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._core import InvalidTypeError, InvalidValueError
from ..config import brief, unmasked

FloatArray = npt.NDArray[np.float64]

_EXACT = 2**53  # every integer up to here is a double
_Function = TypeVar("_Function", bound=Callable[..., Any])


def explained(text: str) -> Callable[[_Function], _Function]:
    """A decorator that adds ``text``, which functions of one kind share, to the docstring of each, where ``help`` shows it."""

    def add(function: _Function) -> _Function:
        if function.__doc__ is not None:                       # python -OO leaves none
            function.__doc__ = f"{function.__doc__.rstrip()}\n\n{text.strip(chr(10))}"
        return function

    return add


def integer(value: Any, what: str, bits: int = 31) -> int:
    """A whole number below 2^bits; True and 2.0 are refused."""
    if type(value) is int and -(2**31) <= value < 2**31 and bits >= 31:
        return value
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = int(value.__index__())
    except (AttributeError, TypeError):
        raise InvalidTypeError(f"{what} is {brief(value)}: an integer would be right") from None
    if not -(2**bits) <= number < 2**bits:
        raise InvalidValueError(f"{what} is {str(number):.40}: a number below 2^{bits} would be right")
    return number


def number(value: Any, what: str, unit: str = "a number") -> float:
    """A float, also from an array of no dimensions; True and "2.0" are refused."""
    if type(value) is float:
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidTypeError(f"{what} is {brief(value)}: {unit} would be right")
    try:
        return float(value)
    except OverflowError:
        raise InvalidValueError(f"{what} is {str(value):.20}...: at most 1e300 is possible") from None


def flag(value: Any, what: str) -> bool:
    if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, (int, np.integer)) and value in (0, 1)):
        raise InvalidTypeError(f"{what} is {brief(value)}: True or False would be right")
    return bool(value)


def array(value: Any, what: str) -> FloatArray:
    """C-contiguous float64 from an array of any layout, from lists, narrower floats, and integers that float64 holds exactly; all
    else is refused. The C core checks the values."""
    if type(value) is np.ndarray and value.dtype == np.float64 and value.ndim and value.flags.c_contiguous and value.flags.aligned:
        return value                                           # as most are: a search asks planners thousands of times
    try:
        given = np.asarray(value)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{what} is {type(value).__name__}: a list of numbers would be right") from None
    if given.ndim == 0:
        raise InvalidTypeError(f"{what} is {type(value).__name__}: a float64 array or a list of numbers would be right")
    if given.dtype.kind == "O" and isinstance(value, (list, tuple)) and all(isinstance(x, (int, np.integer)) for x in given.flat):
        raise InvalidValueError(f"{what} has an integer above 2^64: at most 2^53 is exact in float64")
    if given.dtype.kind in "iu" and given.size and max(abs(int(given.min())), abs(int(given.max()))) > _EXACT:
        raise InvalidValueError(f"{what} has the integers {given.min()} to {given.max()}: at most 2^53 is exact in float64")
    unmasked(what, value)
    if given.dtype.kind in "iu" or (given.dtype.kind == "f" and given.dtype.itemsize <= 8) or not given.size:
        return np.require(given, np.float64, ["C", "A"])
    if isinstance(value, np.ndarray) or given.dtype.kind in "fc":
        raise InvalidValueError(f"{what} has dtype {given.dtype}: float64 (or integers) would be right")
    raise InvalidTypeError(f"{what} is {type(value).__name__} of {given.dtype}: numbers would be right")


def listed(value: Any, what: str, right: str) -> list[Any]:
    """The entries of a list, a tuple, an array or another iterable, but not of a string or a dict."""
    try:
        if isinstance(value, (str, bytes, dict)):
            raise TypeError
        return list(value)
    except TypeError:
        raise InvalidTypeError(f"{what} is {brief(value)}: a list, {right}, would be right") from None


def integers(value: Any, what: str, right: str) -> npt.NDArray[np.int32] | None:
    """int32; None stays None."""
    if value is None:
        return None
    return np.array([integer(x, f"{what}[{k}]") for k, x in enumerate(listed(value, what, right))], np.int32)


def time_limit(time_limit_s: float | None) -> float:
    if time_limit_s is None:
        return 0.0
    seconds = number(time_limit_s, "time_limit_s", "seconds, or None,")
    if not seconds > 0.0:
        raise InvalidValueError(f"time_limit_s is {time_limit_s}: more than 0 seconds is needed")
    return seconds if np.isfinite(seconds) else 0.0
