"""Devices other than the CPU. This module numbers them, shares their memory between processes, and
decides which process waits for another's work. Both sides use this module.

PyTorch sends one IPC handle for each tensor, and counts handles in a file of /dev/shm that is left
behind when a process is killed. Here a slab of the device's memory is sent once. After that a
tensor is sent as an address, as on the CPU. The receiver copies borrowed memory at once, at several
TB/s. So slots are not kept until tensors die, a task may write to the tensors that it got, and
results outlive their worker.

    caller                                                   worker
    departures: wait for the current stream,      slots ──►  current stream: wait for the event,
                copy into a slot, record the                 copy
                event
    arrivals:   copy into a slot, record the      ◄── slots  current stream: copy into a slot; then
                event                                        the worker itself waits until its
                                                             stream is done, and answers
Guarantees: memory is not read before it is written, and not overwritten before it is read. An event
    is recorded on one stream only, so a later record covers all earlier ones. A receiver that waits
    for the event after a message has arrived always waits long enough. Other streams never wait for
    a worker's stream, so the death of a worker leaves no stream waiting.
Assumes: a task's results are ready on its current stream when it returns, as every caller of
    PyTorch code assumes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mpgrad.errors import contextmanager
from mpgrad.memory.arena import Arena, Slot

__all__ = [
    "INSTALLED",
    "LOCAL",
    "Cuda",
    "DeviceChannel",
    "DeviceSetup",
    "DeviceSlab",
    "Handle",
    "Region",
    "device_code",
    "device_of",
    "name_of",
]


def device_code(tensor: torch.Tensor) -> int:
    """Return the code of the tensor's device: 0 for the CPU, k + 1 for device k."""
    return 0 if tensor.is_cpu else int(tensor.device.index) + 1


def device_of(code: int) -> torch.device:
    return torch.device(INSTALLED.accelerator.type, code - 1) if code else torch.device("cpu")


def name_of(code: int) -> str:
    return str(device_of(code))


CUDA: Any = torch.cuda  # some of it has no type hints


class Cuda:
    """The operations that are needed on NVIDIA's devices. Another kind of device has the same
    methods, and its streams and events have the interface of `torch.cuda`.

    Slabs come from the driver, not from PyTorch's allocator. So they are whole allocations,
    however that allocator is set.
    """

    type = "cuda"

    def count(self) -> int:
        return CUDA.device_count() if CUDA.is_available() else 0

    def current(self) -> int:
        """Return this thread's default device. This does not initialise CUDA."""
        return CUDA.current_device() if CUDA.is_initialized() else 0

    def enter(self, index: int) -> None:
        """Make `index` this thread's device, and initialise it."""
        CUDA.set_device(index)
        CUDA.synchronize(index)

    def stream(self, index: int) -> Any:
        return CUDA.Stream(index)

    def current_stream(self, index: int) -> Any:
        return CUDA.current_stream(index)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        setting: contextlib.AbstractContextManager[Any] = CUDA.stream(stream)
        return setting

    def event(self, index: int) -> Any:
        """Return an event that other processes can wait for."""
        event: Any = CUDA.Event(interprocess=True)
        # an event belongs to the device of its first record
        CUDA.current_stream(index).record_event(event)
        return event

    def export_event(self, event: Any) -> bytes:
        raw: bytes = event.ipc_handle()
        return raw

    def open_event(self, raw: bytes, index: int) -> Any:
        return CUDA.Event.from_ipc_handle(torch.device(self.type, index), raw)

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """Allocate bytes that other processes can open. Raises RuntimeError or OSError."""
        pointer = ctypes.c_uint64()
        with in_context(index):
            if libcuda().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)):
                CUDA.empty_cache()  # PyTorch keeps memory that only its own allocator can use
                checked(
                    libcuda().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)),
                    "cuMemAlloc",
                )
        return bytes_at(pointer.value, nbytes, index, "cuMemFree_v2")

    def export(self, memory: torch.Tensor) -> bytes:
        handle = IpcHandle()
        with in_context(memory.device.index):
            checked(
                libcuda().cuIpcGetMemHandle(
                    ctypes.byref(handle), ctypes.c_uint64(memory.data_ptr())
                ),
                "cuIpcGetMemHandle",
            )
        return bytes(handle)

    def open(self, raw: bytes, nbytes: int, index: int) -> torch.Tensor:
        """Open the memory of another process. Raises RuntimeError or OSError."""
        pointer = ctypes.c_uint64()
        handle = IpcHandle.from_buffer_copy(raw)
        with in_context(index):
            code = libcuda().cuIpcOpenMemHandle_v2(
                ctypes.byref(pointer), handle, ctypes.c_uint(LAZY_PEER_ACCESS)
            )
            checked(code, "cuIpcOpenMemHandle")
        return bytes_at(pointer.value, nbytes, index, "cuIpcCloseMemHandle")

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of `tensor` from being reused before `stream` is done with it."""
        tensor.record_stream(stream)

    def seed(self, index: int, seed: int) -> None:
        CUDA.default_generators[index].manual_seed(seed)


LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


@functools.cache
def libcuda() -> Any:
    """Load the driver's own library. Its functions and their numbers are the same for all toolkits
    that PyTorch may have been built with."""
    library: Any = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, IpcHandle, ctypes.c_uint]
    return library


def checked(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        libcuda().cuGetErrorName(code, ctypes.byref(name))
        raise OSError(f"{what} failed ({(name.value or b'').decode()}, {code})")


@functools.cache
def primary_context(index: int) -> ctypes.c_void_p:
    """Return the context in which PyTorch uses a device. It is kept until the process ends."""
    # this initialises the driver, which numbers devices as PyTorch does
    torch.cuda.synchronize(index)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    checked(libcuda().cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    checked(
        libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        "cuDevicePrimaryCtxRetain",
    )
    return context


@contextmanager
def in_context(index: int) -> Iterator[None]:
    checked(libcuda().cuCtxPushCurrent_v2(primary_context(index)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        libcuda().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class Bytes:
    """Memory of the driver, in a form that PyTorch can view. It is freed when its last tensor
    dies."""

    def __init__(self, pointer: int, nbytes: int, index: int, give_back: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }
        end = weakref.finalize(self, given_back, pointer, index, give_back)
        end.atexit = False  # the process's end frees it anyway


def given_back(pointer: int, index: int, how: str) -> None:
    with in_context(index):
        checked(getattr(libcuda(), how)(ctypes.c_uint64(pointer)), how)


def bytes_at(pointer: int, nbytes: int, index: int, give_back: str) -> torch.Tensor:
    return torch.as_tensor(
        Bytes(pointer, nbytes, index, give_back), device=torch.device("cuda", index)
    )


class InstalledAccelerator:
    accelerator = Cuda()  # one kind of device in a process; tests use another


INSTALLED = InstalledAccelerator()


# --- what processes send each other


class Handle(NamedTuple):
    """Names a slab or an event for another process. `key` names it for another thread of this
    process, because CUDA's handles cannot be opened in the process that made them."""

    pid: int
    key: int
    raw: bytes


LOCAL: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
KEYS = itertools.count(1)


def handle_of(thing: Any, raw: bytes) -> Handle:
    key = next(KEYS)
    LOCAL[key] = thing
    return Handle(os.getpid(), key, raw)


class DeviceSetup(NamedTuple):
    """The settings that a worker of a pool with devices needs at its start."""

    accelerator: Cuda
    code: int  # of the worker's own device
    codes: frozenset[int]  # of all workers' devices
    events: dict[int, list[Handle]]  # of the caller's channels, by the code of their device
    in_process: bool  # the worker is a thread of the caller's process, with its own stream


class Region:
    """A run of bytes in a slab on a device."""

    def __init__(self, slab: DeviceSlab, start: int, nbytes: int) -> None:
        self.slab = slab
        self.nbytes = nbytes
        self.bytes = slab.bytes[start : start + nbytes]

    def copied(self) -> torch.Tensor:
        """Return a copy in this process's own memory, for the current stream."""
        return self.slab.channel.fetch(self)


class DeviceSlab:
    """A slab on a device, like `arena.Slab`: one allocation of this process or another."""

    elsewhere = True
    can_grow = True

    def __init__(self, number: int, channel: DeviceChannel, memory: torch.Tensor) -> None:
        self.number = number
        self.nbytes = memory.numel()
        self.channel = channel  # reads the slab, and also writes it if it is this process's own
        self.bytes = memory

    @property
    def memory(self) -> DeviceSlab:
        return self

    def __getitem__(self, place: slice) -> Region:
        return Region(self, place.start, place.stop - place.start)

    @functools.cached_property
    def handle(self) -> Handle:
        return handle_of(
            self, b"" if self.channel.in_process else self.channel.accelerator.export(self.bytes)
        )

    def reserve(self, offset: int, size: int, nbytes: int) -> None:
        """Do nothing, because all of its memory is already allocated."""

    def finish(self) -> None:
        """Wait for the copies that read this slab."""
        self.channel.finish()


class DeviceChannel:
    """A connection between this process and one of its devices. It has an arena there, and a stream
    on which slots are copied.

    If `streamed`, it has a stream of its own, whose event shows others how far it is. Otherwise it
    uses each thread's current stream.
    """

    def __init__(
        self,
        accelerator: Cuda,
        index: int,
        owner: int,
        kind: int,
        streamed: bool,
        in_process: bool,
    ) -> None:
        self.accelerator = accelerator
        self.index = index
        self.in_process = in_process  # whether the other end is also in this process
        # CUDA's rule: memory must not be freed while other processes have it open
        self.arena = Arena(owner, self._make_slab, kind, idle_bytes=math.inf)
        self._stream: Any = accelerator.stream(index) if streamed else None
        self._event: Any = accelerator.event(index) if streamed else None

    def _make_slab(self, number: int, size: int) -> DeviceSlab:
        return DeviceSlab(number, self, self.accelerator.allocate(size, self.index))

    def event_handle(self) -> Handle:
        return handle_of(
            self._event, b"" if self.in_process else self.accelerator.export_event(self._event)
        )

    def open(self, number: int, nbytes: int, handle: Handle) -> DeviceSlab:
        """Open a slab of another process, which this channel will read."""
        if handle.pid == os.getpid():
            return DeviceSlab(number, self, LOCAL[handle.key].bytes)
        return DeviceSlab(number, self, self.accelerator.open(handle.raw, nbytes, self.index))

    def write(self, core: torch.Tensor) -> Slot:
        """Copy a dense tensor, which may be on another device, into a slot."""
        return self.write_bytes(bytes_of(core))

    def write_bytes(self, source: torch.Tensor, at_once: bool = False) -> Slot:
        """Copy bytes into a slot. If `at_once`, do not wait for earlier work of this thread on the
        device. This assumes that the source is not memory of PyTorch's allocator on this device.
        """
        slot = self.arena.allocate(source.numel())
        if self._stream is None:
            slot.memory.bytes.copy_(source, non_blocking=True)
            return slot
        if not at_once:
            self._stream.wait_stream(self.accelerator.current_stream(self.index))
        with self.accelerator.on(self._stream):
            slot.memory.bytes.copy_(source, non_blocking=True)
        # a source on another device was copied by the current stream there
        if source.device.index == self.index and not at_once:
            self.accelerator.used_on(source, self._stream)
        self._stream.record_event(self._event)
        return slot

    def fetch(self, region: Region) -> torch.Tensor:
        """Return a copy, uint8 [nbytes], on the device. If the channel is streamed, the copy is
        complete for all streams. Otherwise it is complete for the current stream."""
        if self._stream is None:
            return region.bytes.clone()
        with self.accelerator.on(self._stream):
            found = region.bytes.clone()
        # After this the copy is complete for every stream, also those of autograd's threads. This
        # waits only for other such copies, so it takes microseconds.
        self._stream.synchronize()
        self.accelerator.used_on(found, self.accelerator.current_stream(self.index))
        return found

    def finish(self) -> None:
        stream = (
            self.accelerator.current_stream(self.index) if self._stream is None else self._stream
        )
        stream.synchronize()


def bytes_of(core: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `core`. They are contiguous, because `core` is dense."""
    return torch.empty(0, dtype=torch.uint8, device=core.device).set_(
        core.untyped_storage(),
        core.storage_offset() * core.element_size(),
        (core.nbytes,),
        (1,),
    )
