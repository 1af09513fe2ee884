"""Which results stay at a site, as the caller knows it, and what of them is on its way here. Caller's side.

    a worker says that a result stays: note ──► the site's workers need it: "keep"      no byte travels
                                            ──► the caller needs it, or another site: fetch ──► "fetch" ══► "content": then
                                            ──► nobody needs it: let_go
The site looks for them in the slabs of its workers, which it has mapped, and has to keep mapped when a worker ends.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from mpgrad.memory.addresses import owner_of, slab_of

__all__ = ["SiteKeeper"]

Then = Callable[[Sequence[memoryview] | None], None]


class SiteKeeper:
    """Guarantees: each `then` is called once, in the thread that uses the engine."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._there: set[int] = set()  # addresses
        self._slabs: Counter[int] = Counter()  # that the site has mapped -> how many of these lie there
        self._left: set[int] = set()  # of these slabs, those whose worker is gone
        self._fetching: dict[int, Then] = {}
        self._numbers = itertools.count()
        self._is_lost = False

    @property
    def is_needed(self) -> bool:
        return bool(self._there)

    def note(self, address: int) -> None:
        self._there.add(address)
        self._slabs[slab_of(address)] += 1

    def has(self, address: int) -> bool:
        return address in self._there and not self._is_lost

    def fetch(self, pieces: Sequence[tuple[int, int]], then: Then) -> None:
        if self._is_lost:
            then(None)
            return
        number = next(self._numbers)
        self._fetching[number] = then
        self._tell("fetch", number, list(pieces))

    def arrive(self, number: int, contents: Sequence[memoryview] | None) -> None:
        self._fetching.pop(number)(contents)

    def let_go(self, address: int) -> None:
        if address in self._there:
            self._there.discard(address)
            self._slabs[slab_of(address)] -= 1
            self._release_if_unused(slab_of(address))

    def leave(self, worker: int) -> None:
        """The worker is gone."""
        for slab in [each for each in self._slabs if owner_of(each) == worker]:
            self._left.add(slab)
            self._release_if_unused(slab)

    def drop(self, slabs: Sequence[int]) -> None:
        """Their worker has given them up."""
        for slab in slabs:
            if slab in self._slabs:
                self._left.add(slab)
                self._release_if_unused(slab)

    def _release_if_unused(self, slab: int) -> None:
        if slab in self._left and not self._slabs[slab]:
            self._left.discard(slab)
            del self._slabs[slab]
            self._tell("release", slab)

    def lose(self) -> None:
        """The site is gone."""
        self._is_lost = True
        fetching, self._fetching = self._fetching, {}
        for then in fetching.values():
            then(None)
