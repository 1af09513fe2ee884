"""The list of behaviours, and what is expected against what is found. To be imported, this needs none of the private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Behaviour(NamedTuple):
    """What PyTorch is expected to do."""

    name: str  # what PyTorch is expected to do, in words
    probe: Callable[[], None]  # raises where it does something else


class DiffersError(Exception):
    """What a probe has found is not what it expected."""


BEHAVIOURS: list[Behaviour] = []


def behaviour(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a probe to the list."""

    def remember(probe: Callable[[], None]) -> Callable[[], None]:
        BEHAVIOURS.append(Behaviour(name, probe))
        return probe

    return remember


def expect(expected: object, found: object) -> None:
    if found != expected:
        raise DiffersError(f"expected {expected!r}, found {found!r}")
