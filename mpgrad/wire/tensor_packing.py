"""Tensors made ready to send: a small one rides in the message itself, a large one lies in a slot and sends its address.

Up to RIDE_BYTES the two copies through the pipe cost less than the care for a slot (both about 2 us a tensor). Many that are
alike are copied at once, and have one slot together: a bucket, which costs little more than one tensor.

    tensor ──► one run of memory ──► bytes, or a slot: Placed ──► Payload ──► TensorRef
    tensors ──► Bucketed, or Riders: Together ──────────────────────► Payload ──► Bucket, or Columns
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, overload

import torch

from mpgrad.memory.accelerator import Lane, device_code
from mpgrad.memory.arena import Arena, Borrowed, Slot
from mpgrad.torch_state.private import flattened, have_plain_memory, without_autocast
from mpgrad.wire.tensor_refs import (
    ALIGNMENT,
    DEVICE,
    LEAF,
    NUMBER_OF_DTYPE,
    PARAMETER,
    PLACE,
    REQUIRES_GRAD,
    RIDE_BYTES,
    SHARED,
    SPREAD,
    Bucket,
    Columns,
    Form,
    Row,
    TensorRef,
    brought_here,
    copy_into,
    dense_core,
    fill,
    flags_of,
    laid_out,
    unit_of,
    view,
)

__all__ = [
    "ANSWERED_BYTES",
    "BUCKETED_BYTES",
    "Bucketed",
    "Devices",
    "Packer",
    "Payload",
    "Placed",
    "Together",
    "placed_again",
    "staged_again",
]

RIDE_TOGETHER = 32768  # bytes of a bucket, likewise
BUCKETED_BYTES = 256 << 10  # of a tensor, at most: a larger one is worth a slot of its own
ANSWERED_BYTES = 64 << 10  # of one for the caller, who copies it out of its bucket, so as not to keep all for one of them
MANY = 8  # references in one message, from which they are pickled in columns
PADDING = [bytes(count) for count in range(ALIGNMENT)]


class Placed(NamedTuple):
    """A tensor made ready to send: its bytes, or the memory that has to live until the receiver gives it back."""

    dtype: int
    shape: tuple[int, ...]
    form: Form
    address: int  # -1 where it rides in the message
    nbytes: int
    flags: int
    body: bytes | None
    holder: Slot | Borrowed | None


def placed_again(ref: TensorRef, payload: memoryview, memories: Mapping[int, Borrowed | Slot]) -> Placed:
    """What one process has sent us, ready to be sent to another."""
    dtype, shape, form, place, nbytes, flags = ref
    if flags & REQUIRES_GRAD and not flags & LEAF:
        flags &= ~PARAMETER  # the output of a call is none, whatever it was there
    if place >= 0:
        holder = memories[place]
        address = holder.address if isinstance(holder, Slot) else place  # on a device it has come into a slot of ours
        return Placed(dtype, shape, form, address, nbytes, flags | SHARED, None, holder)
    return Placed(dtype, shape, form, -1, nbytes, flags, bytes(payload[-1 - place : -1 - place + nbytes]), None)


class Devices(Protocol):
    """The devices of a pool, as one side of it sees them."""

    kind: str

    def way_to(self, code: int) -> Lane | None:
        """For a tensor that lies there: the lane by which it travels; None where it goes through the CPU's memory."""
        ...


class Packer:
    """Turns tensors into references; `known(core)` finds the address of one that lies in shared memory already.

    Where `lasting`, a slot can be sent again and again, and says the same whatever its readers do.
    """

    def __init__(
        self,
        arena: Arena,
        known: Callable[[torch.Tensor], tuple[int, Borrowed] | None] | None = None,
        lasting: bool = False,
        devices: Devices | None = None,
        most_bucketed: int = BUCKETED_BYTES,
    ) -> None:
        self._arena = arena
        self._known = known
        self._devices = devices
        self.kind = "" if devices is None else devices.kind  # of the devices whose tensors can be placed
        self._flags = SHARED if lasting else 0
        self._most_bucketed = most_bucketed
        self.bytes_copied = 0

    def together(self, tensors: Sequence[torch.Tensor | None], flags: Sequence[int]) -> Together | None:
        """None where they are few, or one of them is missing or has to go another way."""
        return self.bucketed(tensors, flags) or (self._all_riding(tensors, flags) if len(tensors) >= MANY else None)

    def bucketed(self, tensors: Sequence[torch.Tensor | None], flags: Sequence[int]) -> Bucketed | None:
        """None where they are not alike, or one by one, or too large."""
        alike = are_alike(tensors) if len(tensors) > 1 and len(set(flags)) == 1 else None
        if alike is None:
            return None
        counts = [tensor.numel() for tensor in alike]
        dtype = alike[0].dtype
        if 0 in counts or max(counts) * dtype.itemsize > self._most_bucketed:
            return None
        unit = unit_of(dtype.itemsize, counts)
        parts = alike if unit == 1 else filled_up(alike, counts, unit)
        nbytes = sum([-(-count // unit) for count in counts]) * unit * dtype.itemsize
        if nbytes > RIDE_TOGETHER and self._devices is not None:  # there each tensor is named by itself
            return None
        shapes = [tuple(tensor.shape) for tensor in alike]
        with torch.no_grad(), without_autocast():
            if nbytes <= RIDE_TOGETHER:
                flat = flattened(parts)
                body, slot, place = ctypes.string_at(flat.data_ptr(), nbytes), None, -1
            else:
                slot = self._arena.allocate(nbytes)
                body, place = None, slot.address
                flat = torch.frombuffer(slot.memory, dtype=dtype)
                torch.cat([part if part.dim() == 1 else part.view(-1) for part in parts], out=flat)
        self.bytes_copied += sum(counts) * dtype.itemsize
        how = 0 if slot is None else self._flags
        return Bucketed(Bucket(NUMBER_OF_DTYPE[dtype], shapes, counts, place, nbytes, flags[0] | how), body, slot)

    def _all_riding(self, tensors: Sequence[torch.Tensor | None], flags: Sequence[int]) -> Riders | None:
        """None where one of them has to go another way."""
        rows, bodies, offset, copied = list[Row](), list[bytes](), 0, 0
        for tensor, own in zip(tensors, flags, strict=True):
            if tensor is None or tensor.layout is not torch.strided or not tensor.is_cpu:
                return None
            if tensor.nbytes > RIDE_BYTES and 0 not in tensor.stride():  # an expanded one travels as small as it is
                return None
            core, form, how = dense_core(tensor)
            nbytes = core.nbytes
            if nbytes > RIDE_BYTES:
                return None
            body = ctypes.string_at(core.data_ptr(), nbytes) if nbytes else b""
            rest = -nbytes % ALIGNMENT
            rows.append((NUMBER_OF_DTYPE[tensor.dtype], tuple(tensor.shape), form, -1 - offset, nbytes, own | how))
            bodies.append(body + PADDING[rest] if rest else body)
            offset += nbytes + rest
            copied += nbytes
        self.bytes_copied += copied
        return Riders(rows, bodies)

    def place(self, tensor: torch.Tensor, flags: int, code: int | None = None, staged: bool = False) -> Placed:
        """`code`: the device on which the receiver is to have it; None for where it lies. `staged`: by the CPU's memory."""
        if code or not tensor.is_cpu:
            return self._place_elsewhere(tensor, flags, device_code(tensor) if code is None else code, staged)
        core, form, how = dense_core(tensor)
        flags |= how
        nbytes = core.numel() * core.element_size()
        number, shape = NUMBER_OF_DTYPE[tensor.dtype], tuple(tensor.shape)
        if nbytes <= RIDE_BYTES:
            self.bytes_copied += nbytes
            body = ctypes.string_at(core.data_ptr(), nbytes) if nbytes else b""
            return Placed(number, shape, form, -1, nbytes, flags, body, None)
        if self._known is not None and (found := self._known(core)) is not None:
            address, holder = found
            return Placed(number, shape, form, address, nbytes, flags | SHARED, None, holder)
        slot = self._arena.allocate(nbytes)
        copy_into(slot.memory, core, nbytes)
        self.bytes_copied += nbytes
        return Placed(number, shape, form, slot.address, nbytes, flags | self._flags, None, slot)

    def _place_elsewhere(self, tensor: torch.Tensor, flags: int, code: int, staged: bool) -> Placed:
        """A tensor that lies on a device, or is to.

        Small ones take a slot there too: to ride in a message they would have to come to the CPU, and so wait until all is
        done that the device has been given before.
        """
        lane = None if staged or code == 0 else self._way(tensor)
        if lane is None:
            placed = self.place(brought_here(tensor), flags)
            return placed._replace(flags=placed.flags | code * DEVICE)
        core, form, how = dense_core(tensor.detach())
        slot = lane.write(core)
        nbytes = slot.memory.nbytes
        self.bytes_copied += nbytes
        flags |= how | code * DEVICE
        return Placed(NUMBER_OF_DTYPE[tensor.dtype], tuple(tensor.shape), form, slot.address, nbytes, flags, None, slot)

    def _way(self, tensor: torch.Tensor) -> Lane | None:
        is_plain = not tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() > 0 and not tensor._is_zerotensor()
        return self._devices.way_to(device_code(tensor)) if is_plain and self._devices is not None else None

    def place_together(
        self, tensors: Sequence[torch.Tensor], sharing: bool = False, staged: bool = False
    ) -> tuple[list[TensorRef], Slot | None, list[Slot]]:
        """All `tensors` in one slot, as if that were a message's payload; where `sharing`, one memory stays one memory.

        Those on devices have slots of their own there, which come last, unless all is to be `staged`.
        """
        if not all(tensor.is_cpu for tensor in tensors):
            return self._some_elsewhere(tensors, sharing, staged)
        refs, cores, nbytes = laid_out(tensors, sharing)
        if nbytes == 0:
            return refs, None, []
        slot = self._arena.allocate(nbytes)
        fill(slot.memory, refs, cores)
        self.bytes_copied += nbytes
        return refs, slot, []

    def _some_elsewhere(
        self, tensors: Sequence[torch.Tensor], sharing: bool, staged: bool
    ) -> tuple[list[TensorRef], Slot | None, list[Slot]]:
        ways = [None if staged else self._way(tensor) for tensor in tensors]
        through_here = [brought_here(tensor) for tensor, way in zip(tensors, ways, strict=True) if way is None]
        refs, slot, slots = self.place_together(through_here, sharing)
        here, found = iter(refs), []
        for tensor, way in zip(tensors, ways, strict=True):
            code = device_code(tensor)
            if way is None:
                ref = next(here)
                found.append(ref._replace(flags=ref.flags & SPREAD | flags_of(tensor) | code * DEVICE))
            else:
                placed = self._place_elsewhere(tensor, flags_of(tensor), code, staged=False)
                assert isinstance(placed.holder, Slot)
                slots.append(placed.holder)
                found.append(Payload().add(placed))
        return found, slot, slots


def staged_again(packer: Packer, ref: TensorRef, payload: memoryview, memories: Mapping[int, Borrowed | Slot]) -> Placed:
    """As `placed_again`, for a worker that can read the CPU's memory only."""
    if ref.place < 0 or not isinstance(memories[ref.place], Slot):
        return placed_again(ref, payload, memories)
    tensor = view(ref, payload, lambda ref: memories[ref.place].memory)
    return packer.place(tensor, ref.flags % DEVICE, ref.flags // DEVICE, staged=True)


def are_alike(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """The tensors, where all of them are plain ones in the memory of the CPU, without holes, and of one dtype."""
    found = [tensor for tensor in tensors if type(tensor) is torch.Tensor]
    is_whole = len(found) == len(tensors) and have_plain_memory(found) and len({tensor.dtype for tensor in found}) == 1
    return found if is_whole and all(map(torch.Tensor.is_contiguous, found)) else None


def filled_up(tensors: Sequence[torch.Tensor], counts: Sequence[int], unit: int) -> list[torch.Tensor]:
    """The tensors, and between them what fills each one up to a multiple of so many elements."""
    parts: list[torch.Tensor] = []
    fillings = fillings_of(tensors[0].dtype, unit)
    for tensor, count in zip(tensors, counts, strict=True):
        parts.append(tensor)
        if rest := count % unit:
            parts.append(fillings[unit - rest])
    return parts


@functools.cache
def fillings_of(dtype: torch.dtype, unit: int) -> list[torch.Tensor]:
    """Zeros, of each number below `unit`."""
    with torch.inference_mode(False):
        return [torch.zeros(count, dtype=dtype, device="cpu") for count in range(unit)]


class Together(ABC):
    """Many tensors made ready to send, as one."""

    nbytes: int
    holder: Slot | None = None  # of their memory, where they do not ride in the message

    @abstractmethod
    def in_payload(self, start: int) -> tuple[Sequence[TensorRef], bytes]:
        """References to them where the payload before them is `start` bytes long, and what they add to it."""

    @property
    def message_bytes(self) -> int:
        return self.nbytes if self.holder is None else 0


class Bucketed(Together):
    """Tensors that are alike, see `Bucket`."""

    __slots__ = ("_body", "_bucket", "holder", "nbytes")

    def __init__(self, bucket: Bucket, body: bytes | None, holder: Slot | None) -> None:
        self._bucket = bucket
        self._body = body
        self.holder = holder
        self.nbytes = bucket.nbytes

    def in_payload(self, start: int) -> tuple[Bucket, bytes]:
        if start == 0 or self._body is None:
            return self._bucket, self._body or b""
        dtype, shapes, counts, place, nbytes, flags = self._bucket.fields
        return Bucket(dtype, shapes, counts, place - start, nbytes, flags), self._body


class Riders(Together):
    """Small tensors of all kinds, which ride in the message. In columns, and their bytes one after another."""

    __slots__ = ("_body", "_columns", "nbytes")

    def __init__(self, rows: Sequence[Row], bodies: Sequence[bytes]) -> None:
        """`rows` have places in a payload of their own, in which `bodies` follow one another."""
        self._columns = Columns(*zip(*rows, strict=True))
        self._body = b"".join(bodies)
        self.nbytes = len(self._body)

    def in_payload(self, start: int) -> tuple[Columns, bytes]:
        if start == 0:
            return self._columns, self._body
        columns = list(self._columns.columns)
        columns[PLACE] = [place - start for place in columns[PLACE]]
        return Columns(*columns), self._body


class Payload:
    """The bytes of the small tensors of one message."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.nbytes = 0

    def add(self, placed: Placed) -> TensorRef:
        dtype, shape, form, address, nbytes, flags, body, _ = placed
        return TensorRef(dtype, shape, form, address if body is None else self._append(body), nbytes, flags)

    @overload
    def add_all(self, placed: Sequence[Placed] | Together) -> Sequence[TensorRef]: ...
    @overload
    def add_all(self, placed: Sequence[Placed | None] | Together) -> Sequence[TensorRef | None]: ...
    def add_all(self, placed: Sequence[Placed | None] | Together) -> Sequence[TensorRef | None]:
        """References to them, None where one is missing; those that ride are in this payload from now on."""
        if isinstance(placed, Together):
            return self._add_together(placed)
        if len(placed) < MANY or None in placed:
            return [None if each is None else self.add(each) for each in placed]
        dtypes, shapes, forms, addresses, sizes, flags, bodies, _ = zip(*placed, strict=True)
        places = [where if body is None else self._append(body) for where, body in zip(addresses, bodies, strict=True)]
        return Columns(dtypes, shapes, forms, places, sizes, flags)

    def _add_together(self, together: Together) -> Sequence[TensorRef]:
        refs, body = together.in_payload(self.nbytes)
        if body:
            self.parts.append(body)
            rest = -len(body) % ALIGNMENT
            if rest:
                self.parts.append(PADDING[rest])
            self.nbytes += len(body) + rest
        return refs

    def _append(self, body: bytes) -> int:
        """Its place."""
        offset, nbytes = self.nbytes, len(body)
        rest = -nbytes % ALIGNMENT
        self.parts.append(body)
        if rest:
            self.parts.append(PADDING[rest])
        self.nbytes = offset + nbytes + rest
        return -1 - offset
