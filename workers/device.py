"""The device that a worker stands at: its set-up, its lane to the caller, and where tensors are to
lie there.

    frame comes ──► `arrive`: wait on the device for the caller's copies ──► call
        ──► `finish`: wait here for the device
Results are reported when the device is done with them, which costs a few microseconds a call. In
return an error on the device is the error of the call that made it, times and timeouts are those of
the work, and a worker that dies has said nothing that is not there.

In a pool without devices a `Station` has no post, and graphs have no `DeviceMap`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.errors import contextmanager
from mpgrad.memory.accelerator import INSTALLED, LOCAL, DeviceSlab, Handle, Lane, Post, device_code
from mpgrad.memory.arena import Lenders
from mpgrad.torch_state.modes import seed_item
from mpgrad.wire.frames import drained
from mpgrad.wire.messages import Direct, NewSlab, Tried, Try
from mpgrad.wire.tensor_refs import DEVICE, REQUIRES_GRAD, Devices, TensorRef, redirected

__all__ = ["DeviceMap", "Station", "station"]


class DeviceMap(NamedTuple):
    """Where the tensors of a graph lie, as numbers of devices: here those of its outputs, in the
    caller those of its inputs, and of the captures."""

    outputs: Sequence[int]
    inputs: Sequence[int]
    captures: Sequence[int]

    def arriving(self, refs: Sequence[TensorRef], parts: Sequence[int]) -> Sequence[TensorRef]:
        """Gradients of the outputs, as they are to be here; of each output as many as `parts`
        says."""
        codes = [
            code for count, code in zip(parts, self.outputs, strict=True) for _ in range(count)
        ]
        return [redirected(*each) for each in zip(refs, codes, strict=True)]

    def homes(self, wanted: Sequence[int], captures: bool) -> Sequence[int]:
        """Where gradients of the `wanted` inputs, and of the captures, are to be in the caller."""
        return [self.inputs[k] for k in wanted] + [*(self.captures if captures else ())]

    def derived(self, outputs: Sequence[torch.Tensor], grads: Sequence[TensorRef]) -> DeviceMap:
        """The map of a backward's own graph, which gave `outputs` for `grads`."""
        return DeviceMap(
            [*map(device_code, outputs)], [*codes_in(grads), *self.inputs], self.captures
        )


class Station:
    """A worker's device and its lane to the caller. At the CPU (code 0) there is no lane, and in a
    pool without devices no post either: then hardly anything is to be done."""

    def __init__(self, post: Post | None = None, lane: Lane | None = None) -> None:
        self._post = post
        self._lane = lane
        self._code = 0 if post is None else post.code
        self.kind = "" if post is None else post.accelerator.type  # for the packer, as `way_to`
        self._is_direct = False  # results may travel as slots
        self._lanes: dict[int, Lane] = {}  # to devices whose slabs have been opened here
        self._events: dict[int, list[Any]] = {}

    @property
    def post(self) -> Post:
        """What only a pool with devices asks for."""
        assert self._post is not None
        return self._post

    @property
    def devices(self) -> Devices | None:
        """For who packs tensors; None in a pool without devices."""
        return None if self._post is None else self

    # --- who waits for whom

    def arrive(self) -> None:
        """From here on the device has, for this thread, all that the caller wrote and read before
        it sent the last frame."""
        for code, events in self._events.items():
            stream = self.post.accelerator.current_stream(code - 1)
            for event in events:
                stream.wait_event(event)

    def finish(self) -> None:
        """Wait until the device has done what it was given. Raises what went wrong there."""
        if self._lane is not None:
            self._lane.finish()

    # --- slabs

    def go_direct(self, message: Direct) -> None:
        """From here on results may travel as slots."""
        self._is_direct = True

    def take_new_slabs(self) -> list[Any]:
        """Slabs on the device that the caller has not been told of."""
        return [] if self._lane is None else drained(self._lane.arena.made)

    def attach(self, message: NewSlab, lenders: Lenders) -> None:
        """A slab of the caller's on a device."""
        lenders.attach_elsewhere(message.number, functools.partial(self._open, message))

    def _open(self, message: NewSlab) -> DeviceSlab:
        """A slab of the caller's, mapped; the first on its device brings the caller's events
        there."""
        assert message.handle is not None
        code = message.code
        if code not in self._lanes:
            own = self._lane if code == self._code else None
            lane = own or Lane(
                self.post.accelerator,
                code - 1,
                0,
                0,
                streamed=False,
                in_process=self.post.in_process,
            )
            self._events[code] = [self._event(handle, code) for handle in self.post.events[code]]
            self._lanes[code] = lane
            self.arrive()
        return self._lanes[code].open(message.number, message.nbytes, message.handle)

    def _event(self, handle: Handle, code: int) -> Any:
        if handle.pid == os.getpid():
            return LOCAL[handle.key]
        return self.post.accelerator.open_event(handle.raw, code - 1)

    def try_out(
        self, message: Try, borrow: Callable[[int, int], Any], lend: Callable[[Any], None]
    ) -> Tried:
        """Read the caller's slot, and write one for the caller to read."""
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
        """Where the caller's tensors are to be here: where they are there, if there are workers;
        else with us."""
        if self._post is None:
            return refs
        return [self._named(ref, gathers) for ref in refs]

    def _named(self, ref: TensorRef, gathers: bool) -> TensorRef:
        code = ref.flags // DEVICE
        stays = code == self._code or (not gathers and (code == 0 or code in self.post.codes))
        return ref if stays else redirected(ref, self._code)

    def homes_of(self, tensors: Sequence[torch.Tensor], origin: int) -> Iterable[int | None]:
        """Where our tensors are to be in the caller, for a call that came from `origin`."""
        if self._post is None:
            return itertools.repeat(None)
        return [origin if code == self._code else code for code in map(device_code, tensors)]

    def codes_of(self, tensors: Sequence[torch.Tensor]) -> Iterable[int]:
        """Where tensors lie here."""
        return () if self._post is None else map(device_code, tensors)

    def codes_in(self, refs: Sequence[TensorRef]) -> Sequence[int] | None:
        """Where those of the caller's tensors lie there that need gradients."""
        return None if self._post is None else codes_in(refs)

    def device_map(
        self, outputs: Sequence[int], inputs: Sequence[TensorRef], captures: Sequence[int] | None
    ) -> DeviceMap | None:
        """None in a pool without devices."""
        return None if self._post is None else DeviceMap(outputs, codes_in(inputs), captures or ())

    def seed_item(self, seed: int, item: int) -> None:
        own = seed_item(seed, item)
        if self._code:
            self.post.accelerator.seed(self._code - 1, own)


@contextmanager
def station(pickled: bytes, number: int) -> Iterator[Station]:
    """The device of worker `number`, set up for the body."""
    if not pickled:
        yield Station()
        return
    post: Post = pickle.loads(pickled)
    accelerator = INSTALLED.accelerator = post.accelerator
    if post.code == 0:
        yield Station(post, None)
        return
    index = post.code - 1
    accelerator.enter(index)
    lane = Lane(
        accelerator, index, number, 2 * post.code, streamed=False, in_process=post.in_process
    )
    stream = (
        accelerator.on(accelerator.stream(index)) if post.in_process else contextlib.nullcontext()
    )
    # PyTorch has one thread a device for all backwards of a process. Gates of the caller's may wait
    # in it, for us, so in the caller's process ours would wait for them; in any, to run where we
    # are saves the way there and back.
    with stream, torch.autograd.set_multithreading_enabled(False):
        try:
            yield Station(post, lane)
        finally:
            lane.arena.close()


def codes_in(refs: Sequence[TensorRef]) -> list[int]:
    """Where those of the caller's tensors lie there that need gradients."""
    return [ref.flags // DEVICE for ref in refs if ref.flags & REQUIRES_GRAD]
