"""What a forked child sees of memory that is borrowed here: what was there at the fork, as of all its other memory.

A shared mapping stays shared after a fork. A child would see what the owner of a slot, or we, write there later, and we would
see what it writes. So what is borrowed at an `os.fork` becomes the child's own. There are two ways:

    mapped    [1] before the fork we map its pages anew, privately, so that writes of ours and of the child stay apart, page by
              page, when they are made [2] we do not give it back before the child has ended (`Token`), since pages that
              nobody has written to are still the owner's [3] once it is dead, and before it is given back, it is shared again
    copied    the child copies it, and we wait for that: where memory cannot be mapped so, where no descriptor is left to map
              it by, and in workers, whose end gives all back, whatever they have forked

Guarantees: what is borrowed by another thread during a fork is treated as what was borrowed before it.
Assumes: children are forked by Python (`os.fork`, multiprocessing, `preexec_fn` of subprocess), or run another program at
    once. What shares pages with something borrowed is nowhere written to in this process: workers have private copies of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mpgrad.errors import SharedMemoryError
from mpgrad.system import PORTABLE

if TYPE_CHECKING:
    from mpgrad.memory.arena import Lenders, Slab

__all__ = ["PRIVATE", "SHARED", "WITHHELD", "View", "forget", "let_go", "share_again", "watch"]

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PAGE = mmap.PAGESIZE
PIECE = 1 << 20  # bytes copied at once
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
FIXED = 0x10  # MAP_FIXED, on Linux and on macOS
FAILED = ctypes.c_void_p(-1).value
ADD_SEALS, SEAL_WRITE = 1033, 0x08  # F_ADD_SEALS, F_SEAL_WRITE


# Borrowed memory that something looks at, where it is mapped, its size, of which slab it is (None where it is mapped privately
# from the beginning) and who gives it back. A plain tuple, since each result has one: others take 0.1 us more.
View: TypeAlias = "tuple[weakref.ref[memoryview], int, int, Slab | None, Lenders]"

# all views of this process, by the id of the weak reference
SHARED: dict[int, View] = {}
PRIVATE: dict[int, View] = {}  # mapped privately, or copied, for the sake of a child or of its parent
FORKS: list[Fork] = []  # under way
WITHHELD: list[Withheld] = []
MAPPING = threading.RLock()  # of who makes shared views private: each only once, or what was written since would be lost


def watch(view: View) -> None:
    """From now on, until `forget`, children get this memory as it is when they are forked."""
    SHARED[id(view[0])] = view
    if FORKS:
        for fork in list(FORKS):
            fork.keep(view)
            fork.copies = True


def forget(memory: weakref.ref[memoryview]) -> View | None:
    """It has died; returned where it was made private. Called from finalizers."""
    return None if SHARED.pop(id(memory), None) is not None else PRIVATE.pop(id(memory), None)


def share_again(view: View) -> bool:
    """Whether the system does so."""
    try:
        remap(view, mmap.MAP_SHARED)
    except OSError:
        return False
    return True


def remap(view: View, how: int) -> None:
    """Raises OSError: the system refuses, or other code has closed the slab's descriptor."""
    slab, (start, size) = view[3], pages_of(view)
    assert slab is not None
    map_at(start, size, how, slab.descriptor, start - slab.start)


def map_at(start: int, size: int, how: int, descriptor: int, offset: int) -> None:
    """Raises OSError."""
    if LIBC.mmap(start, size, READ_WRITE, how | FIXED, descriptor, offset) == FAILED:
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")


def pages_of(view: View) -> tuple[int, int]:
    """The start and size of all pages that it lies in."""
    _, first, nbytes, *_ = view
    start = first & -PAGE
    return start, -(-(first + nbytes - start) // PAGE) * PAGE


def copy_here(view: View) -> None:
    """Piece by piece, for memory that is used again is faster.

    Raises:
        SharedMemoryError: the system has no memory for it.
    """
    start, size = pages_of(view)
    try:
        for piece in range(start, start + size, PIECE):
            nbytes = min(PIECE, start + size - piece)
            content = ctypes.string_at(piece, nbytes)
            map_at(piece, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            ctypes.memmove(piece, content, nbytes)
    except (OSError, MemoryError) as error:
        raise SharedMemoryError(
            f"a forked child has no memory for copies of its parent's tensors ({size:,} bytes), and sees what becomes of "
            "them there; drop results before you fork"
        ) from error


class Token:
    """Whether a child lives, or one of its own: they inherit a mapping, which no closing of descriptors takes from them."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._start: int | None = None
        with contextlib.suppress(OSError):  # without it nobody knows, and nothing is given back
            self._descriptor = os.memfd_create("mpgrad-fork", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(self._descriptor, PAGE)
            start = LIBC.mmap(None, PAGE, READ_WRITE, mmap.MAP_SHARED, self._descriptor, 0)
            self._start = None if start == FAILED else start

    def leave_to_child(self) -> None:
        if self._start is not None:
            LIBC.munmap(self._start, PAGE)

    def is_held(self) -> bool:
        if self._start is None:
            return True
        try:
            fcntl.fcntl(self._descriptor, ADD_SEALS, SEAL_WRITE)
        except OSError:  # EBUSY: somebody could write there
            return True
        return False

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class Withheld(NamedTuple):
    """What is not given back while a child has the token; without one, before the end of the pool."""

    token: Token | None
    memories: dict[Lenders, list[memoryview]]

    def is_over(self) -> bool:
        return not self.memories or (self.token is not None and not self.token.is_held())


def let_go(closed: Lenders | None = None) -> None:
    """Of what was kept for children that have ended; `closed` gives nothing back any more, and so need not keep anything."""
    for kept in list(WITHHELD):
        if closed is not None:
            kept.memories.pop(closed, None)
        if kept.is_over():
            with contextlib.suppress(ValueError):  # another thread was faster
                WITHHELD.remove(kept)


def seen(memories: list[memoryview | None]) -> list[bool]:
    """Which something looks at, so that a new child will see it; others are here for the sake of earlier children alone.

    Assumes: `MAPPING` is held, so no fork withholds more between the two counts; what is let go of meanwhile counts as seen.
    """
    memories.append(memoryview(b""))  # only this list has it
    *counts, ours = [sys.getrefcount(memory) for memory in memories]
    withheld = Counter(id(each) for kept in list(WITHHELD) for some in list(kept.memories.values()) for each in some)
    return [count - ours > withheld[id(memory)] for count, memory in zip(counts, memories, strict=False)]


class Fork:
    """One that is under way in this thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.copies = False  # the child copies something, and we wait for it
        self._kept: list[tuple[Lenders, memoryview]] = []
        self._token: Token | None = None
        self._pipe: tuple[int, int] | None = None

    def keep(self, view: View) -> memoryview | None:
        """It is not given back yet; None where nothing looks at it any more."""
        memory, lenders = view[0](), view[4]
        if memory is not None and not lenders.closed:
            self._kept.append((lenders, memory))
        return memory

    def prepare(self) -> None:
        let_go()
        with MAPPING:
            views = [*PRIVATE.items(), *SHARED.items()]
            for (key, view), is_seen in zip(views, seen([view[0]() for _, view in views]), strict=True):
                memory = self.keep(view) if is_seen else None  # so that it stays mapped
                if memory is not None and key in SHARED:
                    self.copies |= not make_private(key, view)
        if self._kept or self.copies:
            self._token = None if PORTABLE else Token()
            with contextlib.suppress(OSError):  # no descriptor is left
                self._pipe = os.pipe()

    def in_parent(self) -> None:
        if self._token is not None:
            self._token.leave_to_child()
        if self._pipe is not None:
            reader, writer = self._pipe
            os.close(writer)
            if self.copies:
                os.read(reader, 1)
            os.close(reader)
        memories: dict[Lenders, list[memoryview]] = {}
        for lenders, memory in self._kept:
            if not lenders.copies_for_children:
                memories.setdefault(lenders, []).append(memory)
        if memories:
            WITHHELD.append(Withheld(self._token, memories))
        for lenders in memories:
            lenders.notify()  # who waits looks from now on whether the child has ended

    def in_child(self) -> None:
        try:
            for key, view in list(SHARED.items()):
                memory = view[0]()  # so that it stays mapped
                if memory is not None:
                    copy_here(view)
                    PRIVATE[key] = view
                    del SHARED[key]
        finally:
            if self._pipe is not None:
                reader, writer = self._pipe
                os.close(reader)
                if self.copies:
                    os.write(writer, b"\0")
                os.close(writer)
            for lenders in {view[4] for view in [*PRIVATE.values(), *SHARED.values()]}:
                lenders.close()  # it is the parent who gives back


def make_private(key: int, view: View) -> bool:
    """Whether that is possible. Assumes: `MAPPING` is held."""
    *_, slab, lenders = view
    if slab is None or lenders.copies_for_children:
        return False
    try:
        remap(view, mmap.MAP_PRIVATE)
    except OSError:
        return False
    lenders.hide(view)
    PRIVATE[key] = view
    del SHARED[key]
    return True


def before() -> None:
    FORKS.append(fork := Fork())
    fork.prepare()


def this_fork() -> Fork:
    return next(fork for fork in reversed(FORKS) if fork.thread == threading.get_ident())


def after_in_parent() -> None:
    FORKS.remove(fork := this_fork())
    fork.in_parent()


def after_in_child() -> None:
    global MAPPING
    fork = this_fork()
    FORKS.clear()
    WITHHELD.clear()
    MAPPING = threading.RLock()
    fork.in_child()


os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)
