"""What passes between a worker and its site, and not on to the caller or from there. Needs no torch, as the site has none.

A frame of a worker's that comes with descriptors is for the site, since descriptors end at the machine's border. Where there is
no site it is for the caller.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Lacking", "LastWords", "WhereaboutsHere"]


class Lacking(NamedTuple):
    """Site to worker: what the caller has lent and the site could not mirror. Each takes the place of the one before."""

    pieces: list[tuple[int, int, str]]  # address, bytes, why


class LastWords(NamedTuple):
    """The end of a pipe, whose descriptor travels with the frame: should the worker die, its Python stack may be in it."""


class WhereaboutsHere(NamedTuple):
    """Worker to site: its `Whereabouts` lie there in the memory whose descriptor travels with the frame."""

    offset: int
    nbytes: int
