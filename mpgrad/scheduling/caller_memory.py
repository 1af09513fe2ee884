"""The memory that the caller shares with its workers: its own slots, what it has borrowed, and the ways to devices.

Any thread packs, and drops what it had; `tidy` and `close` are the scheduling thread's.
"""

from __future__ import annotations

from collections.abc import Callable

from mpgrad.memory.arena import Arena, Lenders, owner_of
from mpgrad.scheduling.crossing import Crossing
from mpgrad.scheduling.settings import Settings
from mpgrad.wire.tensor_packing import Packer

__all__ = ["CallerMemory"]


class CallerMemory:
    """`packer` sends former results from where they lie, for callers who wait; `copying_packer` copies all."""

    def __init__(self, settings: Settings, nudge: Callable[[], None]) -> None:
        """`nudge`: something borrowed has died, which its owner may be told with the next message. Called from finalizers."""
        self.arena = Arena(0)
        self.lenders = Lenders(nudge)
        self.crossing = Crossing(settings.devices, settings.in_process) if settings.devices is not None else None
        self.packer = Packer(self.arena, self.lenders.find, settings.recoverable, self.crossing)
        self.copying_packer = Packer(self.arena, None, settings.recoverable, self.crossing)

    @property
    def bytes_in_use(self) -> int:
        return self.arena.bytes_in_use + self.lenders.bytes_in_use

    @property
    def bytes_copied(self) -> int:
        return self.packer.bytes_copied + self.copying_packer.bytes_copied

    def slabs_of(self, worker: int) -> list[int]:
        return [number for number in self.lenders.numbers if owner_of(number) == worker]

    def tidy(self) -> None:
        self.arena.tidy()
        if self.crossing is not None:
            self.crossing.tidy()

    def close(self) -> None:
        self.arena.close()
        self.lenders.close()
        if self.crossing is not None:
            self.crossing.close()
