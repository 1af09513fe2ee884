"""An item's version of numpy's SeedSequence. It equals the caller's, but spawns children that no
other item has. Needs numpy."""

from __future__ import annotations

from numpy.random import SeedSequence

__all__ = ["ItemSeeds"]


class ItemSeeds(SeedSequence):
    """A SeedSequence that gives the caller's numbers. Its only state is which children it has
    left."""

    children: SeedSequence | None = None

    def spawn(self, n_children: int) -> list[SeedSequence]:
        """See `numpy.random.SeedSequence.spawn`."""
        return (
            super().spawn(n_children) if self.children is None else self.children.spawn(n_children)
        )
