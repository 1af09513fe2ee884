"""Memory: amounts of it as people write them, and how often the system has killed for want of it."""

from __future__ import annotations

import contextlib
import re

from mpgrad.system import PORTABLE, PROC

__all__ = ["bytes_of", "kills_for_memory"]

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000 ** (1 + k) for k, letter in enumerate("KMGT")}
UNITS |= {f"{letter}iB": 1024 ** (1 + k) for k, letter in enumerate("KMGT")}


def bytes_of(name: str, amount: int | str) -> int:
    """A number of bytes, or a text like "2 GiB" or "500 MB".

    Raises:
        ValueError: not positive, or a unit that does not exist; names `name`.
        TypeError: neither a number nor a text.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise TypeError(f'{name} must be a number of bytes, or a text like "2 GiB" ({name}: {amount!r})')
    if isinstance(amount, str):
        matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", amount)
        if matched is None or matched[2] not in UNITS:
            raise ValueError(f'{name} must be like "2 GiB" or "500 MB" ({name}: {amount!r})')
        amount = int(float(matched[1]) * UNITS[matched[2]])
    if amount < 1:
        raise ValueError(f"{name} must be at least 1 byte ({name}: {amount})")
    return amount


def kills_for_memory() -> int:
    """How many processes the kernel has killed because memory ran out, anywhere on the machine; 0 where it does not say."""
    if PORTABLE:
        return 0
    with contextlib.suppress(OSError):
        for line in (PROC / "vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
