"""Memory that a worker lends and borrows, what its own process uses, and whether memory is about to
end.

    caller's slots ──► views: tensors that look at them ──► nothing looks any more
        ──► take_returns: the caller is told
    results ──► lend: slots of ours ──► the caller sends them back: take_back
        ──► free for the next result
Guarantees: each address that came is returned once for each time that it came, also for calls that
    did not run. What is lent stays until it is returned.

What a call's graph takes is the rise of the allocator's count over the call. Graphs that are kept
are what a worker can do without: the calls are run again when their backwards come. So a
`MemoryWatch` looks how near the limits of this process's control groups are, where Linux kills.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import torch

from mpgrad.memory.arena import Arena, Lenders, Slot
from mpgrad.system import PORTABLE, limiting, memory_limit, memory_used, own_cgroups, resident_bytes
from mpgrad.wire.asides import Lacking
from mpgrad.wire.frames import Link, drained
from mpgrad.wire.messages import (
    BackwardCall,
    ForwardCall,
    NewSlab,
    Rederive,
    Rerun,
    Returned,
    SlabsGone,
    SlabsMissing,
    Tried,
    Try,
)
from mpgrad.wire.tensor_refs import (
    ANSWERED_BYTES,
    REQUIRES_GRAD,
    SHARED,
    Bucket,
    Packer,
    Payload,
    Placed,
    TensorRef,
    Together,
    lent,
    rows_of,
    view,
)
from mpgrad.workers.device import Station

__all__ = [
    "Loans",
    "MemoryWatch",
    "give_back",
    "memory_in_use",
]


class Loans:
    """Slots of ours until they are returned, and what is due to the caller of its own."""

    def __init__(self, number: int, link: Link, station: Station) -> None:
        self.arena = Arena(number)
        self.packer = Packer(self.arena, devices=station.devices, most_bucketed=ANSWERED_BYTES)
        self._link = link
        self._station = station
        self._lent: dict[int, Slot] = {}
        # what is given back is told with the next answer
        self._lenders = Lenders(lambda: None, copies_for_children=True)
        self._unread: deque[tuple[int, int]] = deque()  # lent to us for calls that did not run

    # --- what we borrow

    def views(self, refs: Sequence[TensorRef], payload: memoryview) -> list[torch.Tensor]:
        """Tensors over the payload and the caller's slots. If one cannot be viewed, all the slots
        are given back."""
        if isinstance(refs, Bucket):
            return refs.views(payload, self.borrow)
        found: list[torch.Tensor] = []
        try:
            for row in rows_of(refs):
                found.append(view(row, payload, self.borrow))
        except BaseException:
            # that one was given back as it was refused; the rest was not looked at
            self._unread.extend((ref.place, 1) for ref in lent(refs[len(found) + 1 :]))
            raise
        return found

    def borrow(self, ref: TensorRef) -> Any:
        return self._lenders.borrow(ref.place, ref.nbytes, private=bool(ref.flags & SHARED))

    def captures(
        self, slot: tuple[int, int] | None, refs: Sequence[TensorRef]
    ) -> list[torch.Tensor]:
        """Those of a function; `slot`: address and size of what holds the small ones."""
        content = memoryview(b"")
        if slot is not None:
            try:
                content = self._lenders.borrow(*slot, private=True)
            except BaseException:
                self._unread.extend((ref.place, 1) for ref in lent(refs))
                raise
        return self.views(refs, content)

    def give_back_unread(self, *steps: ForwardCall | BackwardCall | Rerun | Rederive) -> None:
        """What was lent to us for something that does not run."""
        for step in steps:
            call = step.call if isinstance(step, (Rerun, Rederive)) else step
            refs = call.tensors if isinstance(call, ForwardCall) else call.grads
            self._unread.extend((ref.place, 1) for ref in lent(refs))

    def take_returns(self) -> list[tuple[int, int]]:
        """What we need no more since the last time: addresses, and how often each had come."""
        return self._lenders.collect() + drained(self._unread)

    # --- what we lend

    def lend_all(
        self, tensors: Sequence[torch.Tensor | None], homes: Sequence[int] | None, payload: Payload
    ) -> Sequence[TensorRef | None]:
        """Gradients; `homes`: where they are to be in the caller, in a pool with devices."""
        # all are placed before the first is lent: where memory ends half-way, nothing has been
        # given away
        flags = [
            REQUIRES_GRAD if each is not None and each.requires_grad else 0 for each in tensors
        ]
        together = self.packer.together(tensors, flags) if homes is None else None
        if together is not None:
            return self.lend(together, payload)
        each_home = [None] * len(tensors) if homes is None else homes
        triples = zip(tensors, flags, each_home, strict=True)
        place = self.packer.place
        return self.lend(
            [None if each is None else place(each, own, home) for each, own, home in triples],
            payload,
        )

    @overload
    def lend(
        self, placed: Sequence[Placed] | Together, payload: Payload
    ) -> Sequence[TensorRef]: ...
    @overload
    def lend(
        self, placed: Sequence[Placed | None], payload: Payload
    ) -> Sequence[TensorRef | None]: ...
    def lend(
        self, placed: Sequence[Placed | None] | Together, payload: Payload
    ) -> Sequence[TensorRef | None]:
        """References to what was placed, for the message with this `payload`."""
        holders = (
            [placed.holder]
            if isinstance(placed, Together)
            else [each.holder for each in placed if each is not None]
        )
        for holder in holders:
            if isinstance(holder, Slot):
                self._lend_slot(holder)
        return payload.add_all(placed)

    def _lend_slot(self, slot: Slot) -> None:
        self._lent[slot.address] = slot
        if not self._link.shares_memory:
            self._link.carry(slot)

    def take_back(self, message: Returned) -> None:
        for address, _ in message.slots:  # a result is lent once, so once is all
            slot = self._lent.pop(address)
            if not self._link.shares_memory:
                self._link.drop(slot, 1)

    # --- slabs

    def announce_slabs(self) -> None:
        """Tell the caller of memory that is new; before what lies there."""
        self.arena.tidy()
        if new := drained(self.arena.made) + self._station.take_new_slabs():
            self._link.introduce(new)

    def attach(self, message: NewSlab) -> None:
        if message.handle is not None:
            self._station.attach(message, self._lenders)
        else:
            self._lenders.attach(message.number, self._link.take_descriptor(), message.nbytes)

    def take_missing(self) -> list[int]:
        """See `SlabsMissing`."""
        return self._lenders.take_missing()

    def tell_again(self, message: SlabsMissing) -> None:
        self.arena.tell_again(message.numbers)

    def detach(self, message: SlabsGone) -> None:
        for number in message.numbers:
            self._lenders.detach(number)

    def note_lacking(self, message: Lacking) -> None:
        self._lenders.lacking = message.pieces

    def try_out(self, message: Try) -> Tried:
        return self._station.try_out(message, self._lenders.borrow, self._lend_slot)


# --- whether memory is about to end


# of a limit, which caller and workers share; the file cache has been left out. A call takes more
# while it runs
NEAR = 0.85
# times what was taken between two looks, which may be taken until the next one: a call's graph, in
# each worker
AHEAD = 2
FAR = 0.6  # up to here, that included
SELDOM, OFTEN = 0.1, 0.005  # seconds between two looks, of 0.05 ms: below FAR, and from there on


class MemoryWatch:
    def __init__(self, folders: Sequence[Path] | None = None) -> None:
        """`folders`: of the control groups; None for this process's own. Those that limit nothing
        now are left out."""
        self._given = folders
        self._next = 0.0  # when to look again, on the clock of time.monotonic
        self._used = 1.0  # of the limit that is nearest
        self._rise = 0.0  # between two looks, the most of late

    @functools.cached_property
    def _folders(self) -> list[Path]:
        """Found when they are first needed: it takes 0.7 ms, for which a worker's start would
        wait."""
        return limiting(own_cgroups("memory") if self._given is None else self._given)

    def is_short(self) -> bool:
        """Looks, unless it has looked a moment ago: then nothing is said to be short."""
        now = time.monotonic()
        if now < self._next:
            return False
        if not self._folders:
            self._next = math.inf
            return False
        used = max(memory_used(folder) / memory_limit(folder) for folder in self._folders)
        self._rise = max(used - self._used, self._rise / 2)
        self._used = used
        soon = used + AHEAD * self._rise
        self._next = now + (SELDOM if soon < FAR else OFTEN)
        return used > NEAR or soon > 1


# --- as the allocator counts


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Mstats(ctypes.Structure):
    """What the `mstats` of macOS returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("bytes_total", "chunks_used", "bytes_used", "chunks_free", "bytes_free")
    ]


LIBC = ctypes.CDLL(None)
MALLINFO: Any = None if PORTABLE else getattr(LIBC, "mallinfo2", None)  # glibc from 2.33 on
if MALLINFO is not None:
    MALLINFO.restype = Mallinfo
MALLOC_TRIM: Any = None if PORTABLE else getattr(LIBC, "malloc_trim", None)  # glibc's
MSTATS: Any = getattr(LIBC, "mstats", None) if PORTABLE else None  # macOS
if MSTATS is not None:
    MSTATS.restype = Mstats


def give_back() -> None:
    """To the system, what was freed and the allocator keeps; where it can be told to."""
    if MALLOC_TRIM is not None:
        MALLOC_TRIM(0)


def memory_in_use() -> int:
    """Bytes that the allocator has given out: their rise over a call is what stays.

    Where it does not say, those that the process has resident, which memory that is used again does
    not add to.
    """
    if MALLINFO is not None:
        state = MALLINFO()
        return int(state.uordblks + state.hblkhd)
    if MSTATS is not None:
        return int(MSTATS().bytes_used)
    return resident_bytes(os.getpid())
