"""How error messages show a value that is refused: its repr, shortened to at most MAX_SHOWN characters.

This takes milliseconds and raises nothing, whatever the value is: endless, nested a thousand times, with a
repr that raises an error or cannot be printed.
"""

import math
import reprlib
from numbers import Integral, Real
from typing import Any

MAX_SHOWN = 500


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


def check_bool(value: Any, name: str) -> bool:
    """The value. Raises ValueError unless it is True or False."""
    check(isinstance(value, bool), f"{name} must be True or False", value)
    return value
