"""The device that a worker stands at: its set-up, its lane to the caller, and where tensors are to lie there.

    frame comes ──► `arrive`: wait on the device for the caller's copies ──► call ──► `finish`: wait here for the device
Results are reported when the device is done with them, which costs a few microseconds a call. In return an error on the
device is the error of the call that made it, times and timeouts are those of the work, and a worker that dies has said
nothing that is not there.

In a pool without devices a worker stands at a plain `Station`, and its graphs have a plain `DeviceMap`: these do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.errors import contextmanager
from mpgrad.memory.accelerator import INSTALLED, LOCAL, DeviceSlab, Handle, Lane, Post, device_code
from mpgrad.memory.arena import Lenders
from mpgrad.torch_state.modes import seed_item
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import Direct, NewSlab, Tried, Try
from mpgrad.wire.tensor_refs import DEVICE, REQUIRES_GRAD, Devices, TensorRef, redirected

__all__ = ["NO_DEVICES", "NO_STATION", "DeviceMap", "Station", "station"]


class DeviceMap:
    """Where the tensors of a graph lie, as numbers of devices. This one is of a pool without devices: it need not say."""

    def arriving(self, refs: Sequence[TensorRef], parts: Sequence[int]) -> Sequence[TensorRef]:
        """Gradients of the outputs, as they are to be here; of each output as many as `parts` says."""
        return refs

    def homes(self, wanted: Sequence[int], captures: bool) -> Sequence[int] | None:
        """Where gradients of the `wanted` inputs, and of the captures, are to be in the caller."""
        return None

    def derived(self, outputs: Sequence[torch.Tensor], grads: Sequence[TensorRef]) -> DeviceMap:
        """Of the graph of a backward, which gave `outputs` for `grads`."""
        return self


class KnownDevices(DeviceMap):
    """Where the tensors of a graph lie, in a pool with devices."""

    def __init__(self, outputs: Sequence[int], inputs: Sequence[int], captures: Sequence[int]) -> None:
        """`outputs`: here; `inputs`, `captures`: in the caller."""
        self._outputs = outputs
        self._inputs = inputs
        self._captures = captures

    def arriving(self, refs: Sequence[TensorRef], parts: Sequence[int]) -> Sequence[TensorRef]:
        codes = [code for count, code in zip(parts, self._outputs, strict=True) for _ in range(count)]
        return [redirected(*each) for each in zip(refs, codes, strict=True)]

    def homes(self, wanted: Sequence[int], captures: bool) -> Sequence[int] | None:
        return [self._inputs[k] for k in wanted] + [*(self._captures if captures else ())]

    def derived(self, outputs: Sequence[torch.Tensor], grads: Sequence[TensorRef]) -> DeviceMap:
        return KnownDevices([*map(device_code, outputs)], [*codes_in(grads), *self._inputs], self._captures)


NO_DEVICES = DeviceMap()


class Station:
    """That of a worker in a pool without devices."""

    @property
    def devices(self) -> Devices | None:
        """For who packs tensors."""
        return None

    def arrive(self) -> None:
        """From here on the device has, for this thread, all that the caller wrote and read before it sent the last frame."""

    def finish(self) -> None:
        """Wait until the device has done what it was given. Raises what went wrong there."""

    def go_direct(self, message: Direct) -> None:
        """From here on results may travel as slots."""

    def take_new_slabs(self) -> list[Any]:
        """Slabs on the device that the caller has not been told of."""
        return []

    def attach(self, message: NewSlab, lenders: Lenders) -> None:
        """A slab of the caller's on a device."""
        raise AssertionError(message)

    def try_out(self, message: Try, borrow: Callable[[int, int], Any], lend: Callable[[Any], None]) -> Tried:
        """Read the caller's slot, and write one for the caller to read."""
        raise AssertionError(message)

    def named(self, refs: Sequence[TensorRef], gathers: bool) -> Sequence[TensorRef]:
        """Where tensors of the caller are to be here: where they are there, if there are workers; else with us."""
        return refs

    def homes_of(self, tensors: Sequence[torch.Tensor], origin: int) -> Iterable[int | None]:
        """Where tensors of ours are to be in the caller, for a call that came from `origin`."""
        return itertools.repeat(None)

    def codes_of(self, tensors: Sequence[torch.Tensor]) -> Iterable[int]:
        """Where tensors lie here."""
        return ()

    def codes_in(self, refs: Sequence[TensorRef]) -> Sequence[int] | None:
        """Where those of the caller's tensors lie there that need gradients."""
        return None

    def device_map(self, outputs: Sequence[int], inputs: Sequence[TensorRef], captures: Sequence[int] | None) -> DeviceMap:
        return NO_DEVICES

    seed_item = staticmethod(seed_item)  # itself: it is called for each item


NO_STATION = Station()


@contextmanager
def station(pickled: bytes, number: int) -> Iterator[Station]:
    """The device of worker `number`, set up for the body."""
    if not pickled:
        yield NO_STATION
        return
    post: Post = pickle.loads(pickled)
    accelerator = INSTALLED.accelerator = post.accelerator
    if post.code == 0:
        yield DeviceStation(post, None)
        return
    index = post.code - 1
    accelerator.enter(index)
    lane = Lane(accelerator, index, number, 2 * post.code, streamed=False, in_process=post.in_process)
    stream = accelerator.on(accelerator.stream(index)) if post.in_process else contextlib.nullcontext()
    # PyTorch has one thread a device for all backwards of a process. Gates of the caller's may wait in it, for us, so in the
    # caller's process ours would wait for them; in any, to run where we are saves the way there and back.
    with stream, torch.autograd.set_multithreading_enabled(False):
        try:
            yield DeviceStation(post, lane)
        finally:
            lane.arena.close()


class DeviceStation(Station):
    """That of a worker in a pool with devices, at one of them or (code 0, without a lane) at the CPU."""

    def __init__(self, post: Post, lane: Lane | None) -> None:
        self.kind = post.accelerator.type
        self._code = post.code
        self._is_direct = False  # results may travel as slots
        self._lane = lane
        self._accelerator = post.accelerator
        self._codes = post.codes
        self._handles = post.events
        self._lanes: dict[int, Lane] = {}  # to devices whose slabs have been opened here
        self._events: dict[int, list[Any]] = {}
        self._in_process = post.in_process

    @property
    def devices(self) -> Devices:
        return self

    # --- who waits for whom

    def arrive(self) -> None:
        for code, events in self._events.items():
            stream = self._accelerator.current_stream(code - 1)
            for event in events:
                stream.wait_event(event)

    def finish(self) -> None:
        if self._lane is not None:
            self._lane.finish()

    # --- slabs

    def go_direct(self, message: Direct) -> None:
        self._is_direct = True

    def take_new_slabs(self) -> list[Any]:
        return [] if self._lane is None else drained(self._lane.arena.made)

    def attach(self, message: NewSlab, lenders: Lenders) -> None:
        assert message.handle is not None
        lenders.attach_elsewhere(message.number, functools.partial(self._open, message))

    def _open(self, message: NewSlab) -> DeviceSlab:
        """A slab of the caller's, mapped; the first on its device brings the caller's events there."""
        assert message.handle is not None
        code = message.code
        if code not in self._lanes:
            own = self._lane if code == self._code else None
            lane = own or Lane(self._accelerator, code - 1, 0, 0, streamed=False, in_process=self._in_process)
            self._events[code] = [self._event(handle, code) for handle in self._handles[code]]
            self._lanes[code] = lane
            self.arrive()
        return self._lanes[code].open(message.number, message.nbytes, message.handle)

    def _event(self, handle: Handle, code: int) -> Any:
        return LOCAL[handle.key] if handle.pid == os.getpid() else self._accelerator.open_event(handle.raw, code - 1)

    def try_out(self, message: Try, borrow: Callable[[int, int], Any], lend: Callable[[Any], None]) -> Tried:
        assert self._lane is not None
        try:
            found = borrow(message.address, message.nbytes).copied()
            if bytes(found.tolist()) != message.mark:
                return Tried("a worker found other bytes than were written", None)
            slot = self._lane.write(found)
            _ = slot.slab.handle  # fails here, where it cannot be had, and not on its way
            self.finish()
        except (OSError, RuntimeError, MemoryError) as error:
            return Tried(str(error), None)
        lend(slot)
        return Tried("", Try(slot.address, message.nbytes, message.mark))

    # --- which tensor belongs where

    def way_to(self, code: int) -> Lane | None:
        return self._lane if self._is_direct and code == self._code else None

    def named(self, refs: Sequence[TensorRef], gathers: bool) -> Sequence[TensorRef]:
        return [self._named(ref, gathers) for ref in refs]

    def _named(self, ref: TensorRef, gathers: bool) -> TensorRef:
        code = ref.flags // DEVICE
        stays = code == self._code or (not gathers and (code == 0 or code in self._codes))
        return ref if stays else redirected(ref, self._code)

    def homes_of(self, tensors: Sequence[torch.Tensor], origin: int) -> Iterable[int | None]:
        return [origin if code == self._code else code for code in map(device_code, tensors)]

    def codes_of(self, tensors: Sequence[torch.Tensor]) -> Iterable[int]:
        return map(device_code, tensors)

    def codes_in(self, refs: Sequence[TensorRef]) -> Sequence[int] | None:
        return codes_in(refs)

    def device_map(self, outputs: Sequence[int], inputs: Sequence[TensorRef], captures: Sequence[int] | None) -> DeviceMap:
        return KnownDevices(outputs, codes_in(inputs), captures or ())

    def seed_item(self, seed: int, item: int) -> int:
        own = seed_item(seed, item)
        if self._code:
            self._accelerator.seed(self._code - 1, own)
        return own


def codes_in(refs: Sequence[TensorRef]) -> list[int]:
    """Where those of the caller's tensors lie there that need gradients."""
    return [ref.flags // DEVICE for ref in refs if ref.flags & REQUIRES_GRAD]
