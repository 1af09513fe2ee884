"""An item's version of numpy's SeedSequence. It equals the caller's, but spawns children that no
other item has. This module needs numpy."""

from __future__ import annotations

from numpy.random import SeedSequence

__all__ = ["ItemSeeds"]


class ItemSeeds(SeedSequence):
    """A SeedSequence with the caller's numbers. Its only state is the source of its remaining
    children."""

    children: SeedSequence | None = None

    def spawn(self, n_children: int) -> list[SeedSequence]:
        """See `numpy.random.SeedSequence.spawn`."""
        return (
            super().spawn(n_children) if self.children is None else self.children.spawn(n_children)
        )
