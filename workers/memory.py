"""A worker lends and borrows memory, measures the memory of its process, and detects when memory is
short. This module runs in workers, and also contains the worker's device.

    caller's slots ──► views: tensors that view them ──► no tensor views them any more
        ──► take_returns: the caller is notified
    results ──► lend: slots of this worker ──► the caller returns them: take_back
        ──► free for the next result
Guarantees: each received address is returned once for each time that it was received, even for
    calls that did not run. Lent memory is kept until it is returned.

The size of a call's graph is the rise of the allocator's count during the call. A worker can drop
graphs, because calls run again when their backwards come. So a `MemoryMonitor` checks how near this
process's control groups are to their limits, at which Linux kills processes.

A worker's device has its setup, its channel to the caller, and rules for the places of tensors:

    frame comes ──► `arrive`: the device waits for the caller's copies ──► call
        ──► `finish`: this thread waits for the device
Results are reported when the device has finished them, which costs a few microseconds a call. In
return, errors on the device are attributed to the right call, times and timeouts measure the work,
and a worker that dies has reported only results that exist.

In a pool without devices a `WorkerDevice` has no setup, and graphs have no `DeviceMap`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch

from mpgrad.errors import contextmanager
from mpgrad.memory.accelerator import (
    INSTALLED,
    LOCAL,
    DeviceChannel,
    DeviceSetup,
    DeviceSlab,
    Handle,
    device_code,
)
from mpgrad.memory.arena import Arena, ForeignSlabs, Slot
from mpgrad.system import PORTABLE, limiting, memory_limit, memory_used, own_cgroups, resident_bytes
from mpgrad.torch_state.modes import seed_item
from mpgrad.wire.agent_messages import LackingMemory
from mpgrad.wire.frames import Link, drained
from mpgrad.wire.messages import (
    BackwardCall,
    DirectTransfer,
    DroppedSlabs,
    ForwardCall,
    MissingSlabs,
    NewSlab,
    Recompute,
    RecomputeBackward,
    ReturnedSlots,
    SlotTrial,
    TrialOutcome,
)
from mpgrad.wire.tensor_refs import (
    ANSWERED_BYTES,
    DEVICE,
    REQUIRES_GRAD,
    SHARED,
    Devices,
    PackedTensor,
    PackedTensors,
    Packer,
    Payload,
    TensorBucket,
    TensorRef,
    lent,
    redirected,
    rows_of,
    view,
)

__all__ = [
    "DeviceMap",
    "MemoryMonitor",
    "WorkerDevice",
    "WorkerMemory",
    "give_back",
    "memory_in_use",
    "worker_device",
]


class WorkerMemory:
    """The worker's own slots until they are returned, and the slots that it must return to the
    caller."""

    def __init__(self, number: int, link: Link, worker_device: WorkerDevice) -> None:
        self.arena = Arena(number)
        self.packer = Packer(
            self.arena, devices=worker_device.devices, most_bucketed=ANSWERED_BYTES
        )
        self._link = link
        self._worker_device = worker_device
        self._lent: dict[int, Slot] = {}
        # no notification is needed, because the next answer reports returned memory
        self._foreign_slabs = ForeignSlabs(lambda: None, copies_for_children=True)
        # slots that were lent to this worker for calls that did not run
        self._unread: deque[tuple[int, int]] = deque()

    # --- borrowed memory

    def views(self, refs: Sequence[TensorRef], payload: memoryview) -> list[torch.Tensor]:
        """Return tensors that view the payload and the caller's slots. If one slot cannot be
        viewed, all of them are returned to the caller."""
        if type(refs) is TensorBucket:  # `isinstance` of a `Sequence` would run Python code
            return refs.views(payload, self.borrow)
        found: list[torch.Tensor] = []
        try:
            for row in rows_of(refs):
                found.append(view(row, payload, self.borrow))
        except BaseException:
            # the failed slot is already returned, and the later ones were not read
            self._unread.extend((ref.place, 1) for ref in lent(refs[len(found) + 1 :]))
            raise
        return found

    def borrow(self, ref: TensorRef) -> Any:
        return self._foreign_slabs.borrow(ref.place, ref.nbytes, private=bool(ref.flags & SHARED))

    def captures(
        self, slot: tuple[int, int] | None, refs: Sequence[TensorRef]
    ) -> list[torch.Tensor]:
        """Return the captures of a function. `slot` is the address and size of the slot that
        contains the small captures."""
        content = memoryview(b"")
        if slot is not None:
            try:
                content = self._foreign_slabs.borrow(*slot, private=True)
            except BaseException:
                self._unread.extend((ref.place, 1) for ref in lent(refs))
                raise
        return self.views(refs, content)

    def give_back_unread(
        self, *steps: ForwardCall | BackwardCall | Recompute | RecomputeBackward
    ) -> None:
        """Return the slots that were lent for steps that do not run."""
        for step in steps:
            call = step.call if isinstance(step, (Recompute, RecomputeBackward)) else step
            refs = call.tensors if isinstance(call, ForwardCall) else call.grads
            self._unread.extend((ref.place, 1) for ref in lent(refs))

    def take_returns(self) -> list[tuple[int, int]]:
        """Return the addresses that became unused since the last call, and how often each was
        received."""
        return self._foreign_slabs.collect() + drained(self._unread)

    # --- lent memory

    def lend_all(
        self,
        tensors: Sequence[torch.Tensor | None],
        caller_devices: Sequence[int] | None,
        payload: Payload,
    ) -> Sequence[TensorRef | None]:
        """Lend gradients. In a pool with devices, `caller_devices` contains the caller's device for
        each gradient."""
        # All are packed before the first is lent. So if memory runs out, nothing has been lent.
        flags = [
            REQUIRES_GRAD if each is not None and each.requires_grad else 0 for each in tensors
        ]
        together = self.packer.together(tensors, flags) if caller_devices is None else None
        if together is not None:
            return self.lend(together, payload)
        each_device = [None] * len(tensors) if caller_devices is None else caller_devices
        triples = zip(tensors, flags, each_device, strict=True)
        pack = self.packer.pack
        return self.lend(
            [None if each is None else pack(each, own, device) for each, own, device in triples],
            payload,
        )

    @overload
    def lend(
        self, packed: Sequence[PackedTensor] | PackedTensors, payload: Payload
    ) -> Sequence[TensorRef]: ...
    @overload
    def lend(
        self, packed: Sequence[PackedTensor | None], payload: Payload
    ) -> Sequence[TensorRef | None]: ...
    def lend(
        self, packed: Sequence[PackedTensor | None] | PackedTensors, payload: Payload
    ) -> Sequence[TensorRef | None]:
        """Lend packed tensors, and return references for the message with this `payload`."""
        holders = (
            [packed.holder]
            if isinstance(packed, PackedTensors)
            else [each.holder for each in packed if each is not None]
        )
        for holder in holders:
            if isinstance(holder, Slot):
                self._lend_slot(holder)
        return payload.add_all(packed)

    def _lend_slot(self, slot: Slot) -> None:
        self._lent[slot.address] = slot
        self._link.carry(slot)

    def take_back(self, message: ReturnedSlots) -> None:
        for address, _ in message.slots:  # a result is lent only once
            self._link.drop(self._lent.pop(address), 1)

    # --- slabs

    def announce_slabs(self) -> None:
        """Announce new slabs to the caller, before it gets addresses in them."""
        self.arena.tidy()
        if new := drained(self.arena.made) + self._worker_device.take_new_slabs():
            self._link.introduce(new)

    def attach(self, message: NewSlab) -> None:
        if message.handle is not None:
            open_slab = functools.partial(self._worker_device.open, message)
            self._foreign_slabs.attach_elsewhere(message.number, open_slab)
        else:
            self._foreign_slabs.attach(message.number, self._link.take_descriptor(), message.nbytes)

    def take_missing(self) -> list[int]:
        """Return the slabs to request again, see `MissingSlabs`."""
        return self._foreign_slabs.take_missing()

    def tell_again(self, message: MissingSlabs) -> None:
        self.arena.tell_again(message.numbers)

    def detach(self, message: DroppedSlabs) -> None:
        for number in message.numbers:
            self._foreign_slabs.detach(number)

    def note_lacking(self, message: LackingMemory) -> None:
        self._foreign_slabs.lacking = message.pieces

    def try_out(self, message: SlotTrial) -> TrialOutcome:
        return self._worker_device.try_out(message, self._foreign_slabs.borrow, self._lend_slot)


# --- whether memory is short


# Memory is short above this share of the limit, without the file cache. Caller and workers share
# the limit. A call takes more while it runs.
NEAR = 0.85
# The expected rise until the next check, as a multiple of the recent rise between two checks. Each
# worker may add a call's graph.
AHEAD = 2
FAR = 0.6  # below this share, including the expected rise, checks are rare
SELDOM, OFTEN = 0.1, 0.005  # seconds between two checks (0.05 ms each), below FAR and above


class MemoryMonitor:
    def __init__(self, folders: Sequence[Path] | None = None) -> None:
        """`folders` are the folders of the control groups, or None for this process's own groups.
        Groups that do not have a limit now are left out."""
        self._given = folders
        self._next = 0.0  # time of the next check, on the clock of time.monotonic
        self._used = 1.0  # share of the nearest limit
        self._rise = 0.0  # the largest recent rise between two checks

    @functools.cached_property
    def _folders(self) -> list[Path]:
        """The folders with a limit. Finding them takes 0.7 ms, so it is delayed until they are
        needed, and does not delay the worker's start."""
        return limiting(own_cgroups("memory") if self._given is None else self._given)

    def is_short(self) -> bool:
        """Whether memory is short. Shortly after a check, this returns False without another
        check."""
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


# --- the allocator's counts


class Mallinfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

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
    """The result of `mstats` on macOS."""

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
    """Return freed memory from the allocator to the system, if the allocator supports that."""
    if MALLOC_TRIM is not None:
        MALLOC_TRIM(0)


def memory_in_use() -> int:
    """Return the bytes that the allocator has handed out. Their rise during a call is the size of
    the memory that the call keeps.

    If the allocator does not report this, return the resident bytes of the process. Reused memory
    does not add to these.
    """
    if MALLINFO is not None:
        state = MALLINFO()
        return int(state.uordblks + state.hblkhd)
    if MSTATS is not None:
        return int(MSTATS().bytes_used)
    return resident_bytes(os.getpid())


# --- the worker's device


class DeviceMap(NamedTuple):
    """The devices of a graph's tensors, as codes: this worker's devices of its outputs, and the
    caller's devices of its inputs and captures."""

    outputs: Sequence[int]
    inputs: Sequence[int]
    captures: Sequence[int]

    def arriving(self, refs: Sequence[TensorRef], parts: Sequence[int]) -> Sequence[TensorRef]:
        """Return references that put the outputs' gradients on the outputs' devices. `parts`
        contains the number of gradients of each output."""
        codes = [
            code for count, code in zip(parts, self.outputs, strict=True) for _ in range(count)
        ]
        return [redirected(*each) for each in zip(refs, codes, strict=True)]

    def caller_devices(self, wanted: Sequence[int], captures: bool) -> Sequence[int]:
        """Return the caller's devices for gradients of the `wanted` inputs, and of the captures."""
        return [self.inputs[k] for k in wanted] + [*(self.captures if captures else ())]

    def derived(self, outputs: Sequence[torch.Tensor], grads: Sequence[TensorRef]) -> DeviceMap:
        """Return the map of a backward's own graph. The backward turned `grads` into `outputs`."""
        return DeviceMap(
            [*map(device_code, outputs)], [*codes_in(grads), *self.inputs], self.captures
        )


class WorkerDevice:
    """A worker's device and its channel to the caller. On the CPU (code 0) there is no channel. In
    a pool without devices there is also no setup, and most methods do nothing."""

    def __init__(
        self, setup: DeviceSetup | None = None, channel: DeviceChannel | None = None
    ) -> None:
        self._setup = setup
        self._channel = channel
        self._code = 0 if setup is None else setup.code
        # for the packer, like `way_to`
        self.kind = "" if setup is None else setup.accelerator.type
        self._is_direct = False  # whether results may be sent as slots on the device
        # to devices whose slabs were opened here
        self._channels: dict[int, DeviceChannel] = {}
        self._events: dict[int, list[Any]] = {}

    @property
    def setup(self) -> DeviceSetup:
        """The setup. Only code for pools with devices reads it."""
        assert self._setup is not None
        return self._setup

    @property
    def devices(self) -> Devices | None:
        """The devices for the packer, or None in a pool without devices."""
        return None if self._setup is None else self

    # --- waiting

    def arrive(self) -> None:
        """Let the device wait for the caller. Later work of this thread on the device begins after
        the caller's reads and writes before the last frame."""
        for code, events in self._events.items():
            stream = self.setup.accelerator.current_stream(code - 1)
            for event in events:
                stream.wait_event(event)

    def finish(self) -> None:
        """Wait until the device has finished its work. Raises the errors of that work."""
        if self._channel is not None:
            self._channel.finish()

    # --- slabs

    def go_direct(self, message: DirectTransfer) -> None:
        """Send results as slots on the device from now on."""
        self._is_direct = True

    def take_new_slabs(self) -> list[Any]:
        """Return the slabs on the device that the caller does not know yet."""
        return [] if self._channel is None else drained(self._channel.arena.made)

    def open(self, message: NewSlab) -> DeviceSlab:
        """Map a slab of the caller. The first slab on a device also opens the caller's events
        there."""
        assert message.handle is not None
        code = message.code
        if code not in self._channels:
            own = self._channel if code == self._code else None
            channel = own or DeviceChannel(
                self.setup.accelerator,
                code - 1,
                0,
                0,
                streamed=False,
                in_process=self.setup.in_process,
            )
            self._events[code] = [self._event(handle, code) for handle in self.setup.events[code]]
            self._channels[code] = channel
            self.arrive()
        return self._channels[code].open(message.number, message.nbytes, message.handle)

    def _event(self, handle: Handle, code: int) -> Any:
        if handle.pid == os.getpid():
            return LOCAL[handle.key]
        return self.setup.accelerator.open_event(handle.raw, code - 1)

    def try_out(
        self, message: SlotTrial, borrow: Callable[[int, int], Any], lend: Callable[[Any], None]
    ) -> TrialOutcome:
        """Read the caller's slot, and write one for the caller to read."""
        assert self._channel is not None
        try:
            found = borrow(message.address, message.nbytes).copied()
            if bytes(found.tolist()) != message.mark:
                return TrialOutcome("a worker read bytes that differ from those written", None)
            slot = self._channel.write(found)
            _ = slot.slab.handle  # if no handle can be made, this fails here, not during sending
            self.finish()
        except (OSError, RuntimeError, MemoryError) as error:
            return TrialOutcome(str(error), None)
        lend(slot)
        return TrialOutcome("", SlotTrial(slot.address, message.nbytes, message.mark))

    # --- the places of tensors

    def way_to(self, code: int) -> DeviceChannel | None:
        return self._channel if self._is_direct and code == self._code else None

    def named(self, refs: Sequence[TensorRef], gathers: bool) -> Sequence[TensorRef]:
        """Return references with this worker's devices for the caller's tensors. A tensor stays on
        its device if that has workers. Otherwise it moves to this worker's device."""
        if self._setup is None:
            return refs
        return [self._named(ref, gathers) for ref in refs]

    def _named(self, ref: TensorRef, gathers: bool) -> TensorRef:
        code = ref.flags // DEVICE
        stays = code == self._code or (not gathers and (code == 0 or code in self.setup.codes))
        return ref if stays else redirected(ref, self._code)

    def caller_devices_of(
        self, tensors: Sequence[torch.Tensor], origin: int
    ) -> Iterable[int | None]:
        """Return the caller's devices for this worker's tensors, in a call from device `origin`."""
        if self._setup is None:
            return itertools.repeat(None)
        return [origin if code == self._code else code for code in map(device_code, tensors)]

    def codes_of(self, tensors: Sequence[torch.Tensor]) -> Iterable[int]:
        """Return the devices of this worker's tensors."""
        return () if self._setup is None else map(device_code, tensors)

    def codes_in(self, refs: Sequence[TensorRef]) -> Sequence[int] | None:
        """Return the caller's devices of its tensors that need gradients."""
        return None if self._setup is None else codes_in(refs)

    def device_map(
        self, outputs: Sequence[int], inputs: Sequence[TensorRef], captures: Sequence[int] | None
    ) -> DeviceMap | None:
        """Return the map of a graph, or None in a pool without devices."""
        return None if self._setup is None else DeviceMap(outputs, codes_in(inputs), captures or ())

    def seed_item(self, seed: int, item: int) -> None:
        own = seed_item(seed, item)
        if self._code:
            self.setup.accelerator.seed(self._code - 1, own)


@contextmanager
def worker_device(pickled: bytes, number: int) -> Iterator[WorkerDevice]:
    """Set up the device of worker `number` for the body."""
    if not pickled:
        yield WorkerDevice()
        return
    setup: DeviceSetup = pickle.loads(pickled)
    accelerator = INSTALLED.accelerator = setup.accelerator
    if setup.code == 0:
        yield WorkerDevice(setup, None)
        return
    index = setup.code - 1
    accelerator.enter(index)
    channel = DeviceChannel(
        accelerator, index, number, 2 * setup.code, streamed=False, in_process=setup.in_process
    )
    stream = (
        accelerator.on(accelerator.stream(index)) if setup.in_process else contextlib.nullcontext()
    )
    # PyTorch has one thread for each device, which runs all backwards of a process there. In the
    # caller's process, gates may occupy that thread and wait for this worker, whose backwards would
    # then wait for the gates. In any process, running backwards in this thread saves the switch to
    # the other thread and back.
    with stream, torch.autograd.set_multithreading_enabled(False):
        try:
            yield WorkerDevice(setup, channel)
        finally:
            channel.arena.close()


def codes_in(refs: Sequence[TensorRef]) -> list[int]:
    """Return the caller's devices of its tensors that need gradients."""
    return [ref.flags // DEVICE for ref in refs if ref.flags & REQUIRES_GRAD]
