"""The device that a worker stands at: its set-up, its lane to the caller, and the names of tensors there.

    frame comes ──► `arrive`: wait on the device for the caller's copies ──► call ──► `finish`: wait here for the device
Results are reported when the device is done with them, which costs a few microseconds a call. In return an error on the
device is the error of the call that made it, times and timeouts are those of the work, and a worker that dies has said
nothing that is not there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.memory.accelerator import INSTALLED, LOCAL, DeviceSlab, Handle, Lane, Post, code_of
from mpgrad.memory.arena import Lenders
from mpgrad.wire.messages import NewSlab, Tried, Try
from mpgrad.wire.tensor_refs import DEVICE, TensorRef, renamed

__all__ = ["Station", "station"]


@contextlib.contextmanager
def station(pickled: bytes, number: int) -> Iterator[Station | None]:
    """The device of worker `number`, set up for the body; None in a pool without devices."""
    if not pickled:
        yield None
        return
    post: Post = pickle.loads(pickled)
    accelerator = INSTALLED.accelerator = post.accelerator
    if post.code == 0:
        yield Station(post, None)
        return
    index = post.code - 1
    accelerator.enter(index)
    lane = Lane(accelerator, index, number, 2 * post.code, streamed=False, in_process=post.in_process)
    stream = accelerator.on(accelerator.stream(index)) if post.in_process else contextlib.nullcontext()
    # PyTorch has one thread a device for all backwards of a process. Gates of the caller's may wait in it, for us, so in the
    # caller's process ours would wait for them; in any, to run where we are saves the way there and back.
    with stream, torch.autograd.set_multithreading_enabled(False):
        try:
            yield Station(post, lane)
        finally:
            lane.arena.close()


class Station:
    def __init__(self, post: Post, lane: Lane | None) -> None:
        self.kind = post.accelerator.type
        self.code = post.code
        self.is_direct = False  # results may travel as slots
        self.lane = lane
        self._accelerator = post.accelerator
        self._codes = post.codes
        self._handles = post.events
        self._lanes: dict[int, Lane] = {}  # to devices whose slabs have been opened here
        self._events: dict[int, list[Any]] = {}
        self._in_process = post.in_process

    # --- who waits for whom

    def arrive(self) -> None:
        """From here on the device has, for this thread, all that the caller wrote and read before it sent the last frame."""
        for code, events in self._events.items():
            stream = self._accelerator.current_stream(code - 1)
            for event in events:
                stream.wait_event(event)

    def finish(self) -> None:
        """Wait until the device has done what it was given. Raises what went wrong there."""
        if self.lane is not None:
            self.lane.finish()

    # --- the caller's slabs

    def attach(self, message: NewSlab, lenders: Lenders) -> None:
        assert message.handle is not None
        lenders.attach_elsewhere(message.number, functools.partial(self._open, message))

    def _open(self, message: NewSlab) -> DeviceSlab:
        assert message.handle is not None
        code = message.code
        if code not in self._lanes:
            own = self.lane if code == self.code else None
            lane = own or Lane(self._accelerator, code - 1, 0, 0, streamed=False, in_process=self._in_process)
            self._events[code] = [self._event(handle, code) for handle in self._handles[code]]
            self._lanes[code] = lane
            self.arrive()
        return self._lanes[code].open(message.number, message.nbytes, message.handle)

    def _event(self, handle: Handle, code: int) -> Any:
        return LOCAL[handle.key] if handle.pid == os.getpid() else self._accelerator.open_event(handle.raw, code - 1)

    def try_out(self, message: Try, borrow: Callable[[int, int], Any], lend: Callable[[Any], None]) -> Tried:
        """Read the caller's slot, and write one for the caller to read."""
        assert self.lane is not None
        try:
            found = borrow(message.address, message.nbytes).copied()
            if bytes(found.tolist()) != message.mark:
                return Tried("a worker found other bytes than were written", None)
            slot = self.lane.write(found)
            _ = slot.slab.handle  # fails here, where it cannot be had, and not on its way
            self.finish()
        except (OSError, RuntimeError, MemoryError) as error:
            return Tried(str(error), None)
        lend(slot)
        return Tried("", Try(slot.address, message.nbytes, message.mark))

    # --- which tensor belongs where

    def way_to(self, code: int) -> Lane | None:
        return self.lane if self.is_direct and code == self.code else None

    def named(self, refs: Sequence[TensorRef], gathers: bool) -> list[TensorRef]:
        """Where tensors of the caller are to be here: where they are there, if there are workers; else with us."""
        return [self._named(ref, gathers) for ref in refs]

    def _named(self, ref: TensorRef, gathers: bool) -> TensorRef:
        code = ref.flags // DEVICE
        stays = code == self.code or (not gathers and (code == 0 or code in self._codes))
        return ref if stays else renamed(ref, self.code)

    def home_of(self, tensor: torch.Tensor, origin: int) -> int:
        """Where a tensor of ours is to be in the caller, for a call that came from `origin`."""
        code = code_of(tensor)
        return origin if code == self.code else code

    def seed(self, seed: int) -> None:
        if self.code:
            self._accelerator.seed(self.code - 1, seed)
