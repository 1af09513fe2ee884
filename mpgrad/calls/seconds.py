"""Seconds as the caller gives them: timeouts and deadlines of any length, also infinite ones."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["seconds_given", "seconds_or_none"]

MOST_SHOWN = 10**1000  # Python refuses to write integers of more than some thousand digits


def seconds_or_none(name: str, given: object) -> float | None:
    """As `seconds_given`, where the argument may be None."""
    return None if given is None else seconds_given(name, given, "a number of seconds, or None")


def seconds_given(name: str, given: Any, expected: str = "a number of seconds") -> float:
    """`given` as a float.

    Raises:
        TypeError, ValueError: it is no number, or none that a float can hold; names the argument and its value.
    """
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} must be {expected} ({name}: {given!r})")
    try:
        seconds = float(given)
    except OverflowError:
        shown = "more than 1000 digits" if isinstance(given, int) and abs(given) >= MOST_SHOWN else given
        raise ValueError(f"{name} must be {expected}; if it is to have no end, take math.inf ({name}: {shown})") from None
    if math.isnan(seconds):
        raise ValueError(f"{name} must be {expected} ({name}: nan)")
    return seconds
