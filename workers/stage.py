"""How far a call has come, for its failure, and what it took."""

from __future__ import annotations

__all__ = ["Stage"]


class Stage:
    """Of one call forward, or of the backwards of a chunk. A timeline has a kind that also notes when (see `recorder`)."""

    def __init__(self) -> None:
        self.phase = "forward"
        self.position = 0  # of the call, in its chunk
        self.offset = 0  # of the item, in a bundle
        self.given = ""  # to the function, where it raised
        self.own_seconds = 0.0  # in the function
        self.backward_seconds = 0.0  # in PyTorch's engine
