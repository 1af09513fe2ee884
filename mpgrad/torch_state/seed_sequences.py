"""numpy's SeedSequence as an item has it: the caller's, but for its children, which no other item
has. Needs numpy."""

from __future__ import annotations

from numpy.random import SeedSequence

__all__ = ["ItemSeeds"]


class ItemSeeds(SeedSequence):
    """What a SeedSequence gives never changes, and is the caller's; which children it has still to
    give is its only state."""

    children: SeedSequence | None = None

    def spawn(self, n_children: int) -> list[SeedSequence]:
        """See `numpy.random.SeedSequence.spawn`."""
        return (
            super().spawn(n_children) if self.children is None else self.children.spawn(n_children)
        )
