"""Checks of values, and how error messages show what is refused: its repr, of at most MAX_SHOWN characters.

Showing takes milliseconds and raises nothing, whatever the value is: endless, nested a thousand times, with a
repr that raises an error or cannot be printed.
"""

import math
import reprlib
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

MAX_SHOWN = 500
MAX_INT = 2**31 - 1
MIN_FLOAT, MAX_FLOAT = sys.float_info.min, sys.float_info.max

# (value, its name) -> the value to keep. Raises ValueError with the name, the value and what is allowed.
Check = Callable[[Any, str], Any]


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # more digits than Python writes out
            return f"an integer of {x.bit_length()} bits"


# Looks at the first few values of the first few levels only.
_short = _ShortRepr()
_short.maxlevel = 5
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = _short.maxdict = 8
_short.maxlong = _short.maxstring = _short.maxother = MAX_SHOWN


def shown(value: Any) -> str:
    """The shortened repr. Lone surrogates are escaped, so that the message can be printed."""
    try:
        text = _short.repr(value)
    except Exception as error:  # a type that only looks like a list
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return shorten(text.encode("utf-8", "backslashreplace").decode())


def shorten(text: str) -> str:
    """Its beginning and end, if it has more than MAX_SHOWN characters."""
    half = (MAX_SHOWN - 3) // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def check(is_good: bool, rule: str, value: Any) -> None:
    """Raise ValueError with the rule and the value, unless it is good."""
    if not is_good:
        raise ValueError(f"{rule}, got {shown(value)}")


def is_number(value: Any, kind: type, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether it is an int or a float (kind), or numpy's, from `low` to `high`. NaN is in no range."""
    number = Integral if kind is int else Real
    return isinstance(value, number) and not isinstance(value, bool) and low <= value <= high


def number(low: float, high: float, allowed: str = "", kind: type = float, others: tuple = ()) -> Check:
    """
    A number in this range, also numpy's, or one of the other values. Kept as an int or a float (kind) of
    Python's: numpy's may overflow in sums.
    """
    allowed = allowed or f"a number from {low} to {high}"

    def check_number(value: Any, name: str) -> Any:
        if value is None and None in others:
            return None
        is_good = is_number(value, kind) and (low <= value <= high or value in others)
        check(is_good, f"{name} must be {allowed}", value)
        return kind(value)

    return check_number


def integer(low: int, high: int = MAX_INT, *others: int | None) -> Check:
    allowed = "None or an integer" if None in others else "an integer"
    return number(low, high, f"{allowed} from {low} to {high}", int, others)


def check_bool(value: Any, name: str) -> bool:
    """The value. Raises ValueError unless it is True or False."""
    check(isinstance(value, bool), f"{name} must be True or False", value)
    return value
