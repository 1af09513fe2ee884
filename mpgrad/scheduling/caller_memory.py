"""The memory that the caller shares with its workers: its own slots, the memory it has borrowed,
and the channels to devices. This module runs in the caller only.

Tensors reach a device by slots on the device, or through the CPU's memory. Slots on a device need
CUDA's inter-process memory, which not every machine has. It is missing on a part of a GPU, and
between some containers. So mpgrad tries whether it works. Each worker, as it starts, reads a slot
of the caller, and offers one of its own to be read. Until all workers have succeeded, tensors are
staged: they go through the CPU's memory, and the process that receives them puts them on their
device.

    offer: the caller's slot, SlotTrial ──► the worker reads it
        ──► TrialOutcome, with a slot of its own ──► tried: DirectTransfer
Assumes: any thread packs tensors, and drops those it had; only the scheduling thread calls `tidy`
    and `close`.
"""

from __future__ import annotations

import functools
import logging
import pickle
import secrets
from collections.abc import Callable, Sequence

import torch

from mpgrad.callbacks import report
from mpgrad.memory import owner_of
from mpgrad.memory.accelerator import INSTALLED, DeviceChannel, DeviceSetup, Region, name_of
from mpgrad.memory.arena import Arena, ForeignSlabs, KeptSlots, Slot
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.messages import DirectTransfer, Message, NewSlab, SlotTrial, TrialOutcome
from mpgrad.wire.tensor_refs import Packer

__all__ = [
    "CallerMemory",
    "DeviceTransfer",
]


class CallerMemory:
    """Holds the caller's arena, other processes' slabs, and two packers.

    `packer` sends former results from where they are stored, for callers who wait.
    `copying_packer` copies everything.
    """

    def __init__(self, settings: Settings, nudge: Callable[[], None]) -> None:
        """Make the arena, the packers and, if the pool has devices, the channels to them.

        Finalizers call `nudge` when a borrowed object is deleted, so that a message can notify its
        owner.
        """
        self.arena = Arena(0)
        self.foreign_slabs = ForeignSlabs(nudge)
        self.device_transfer = (
            DeviceTransfer(settings.devices, settings.in_process)
            if settings.devices is not None
            else None
        )
        self._kept_slots = KeptSlots(self.arena)
        self.packer = Packer(
            self.arena,
            self.foreign_slabs.find,
            settings.recoverable,
            self.device_transfer,
            # Agents on other machines copy slots, and do not learn that a slot is sent again.
            kept_slots=None if settings.remote else self._kept_slots,
        )
        self.copying_packer = Packer(self.arena, None, settings.recoverable, self.device_transfer)

    @property
    def bytes_in_use(self) -> int:
        return self.arena.bytes_in_use + self.foreign_slabs.bytes_in_use

    @property
    def bytes_copied(self) -> int:
        packers = self.packer.bytes_copied + self.copying_packer.bytes_copied
        return packers + self._kept_slots.bytes_copied

    def slabs_of(self, worker: int) -> list[int]:
        return [number for number in self.foreign_slabs.numbers if owner_of(number) == worker]

    def tidy(self) -> None:
        self.arena.tidy()
        if self.device_transfer is not None:
            self.device_transfer.tidy()

    def close(self) -> None:
        self.arena.close()
        self.foreign_slabs.close()
        if self.device_transfer is not None:
            self.device_transfer.close()


# --- the channels to devices


MARK_BYTES = 64


class DeviceTransfer:
    """Holds the caller's two channels to each device of its pool.

    There are two so that tensors that arrive never wait behind tensors that leave.
    """

    def __init__(self, codes: Sequence[int], in_process: bool) -> None:
        self._accelerator = INSTALLED.accelerator
        self.kind = self._accelerator.type
        self._codes = frozenset(codes)
        self._in_process = in_process
        self._departures: dict[int, DeviceChannel] = {}
        self._arrivals: dict[int, DeviceChannel] = {}
        for code in sorted(self._codes - {0}):
            for kind, channels in enumerate((self._departures, self._arrivals)):
                channels[code] = DeviceChannel(
                    self._accelerator,
                    code - 1,
                    0,
                    2 * code + kind,
                    streamed=True,
                    in_process=in_process,
                )
        self._is_direct = False
        self._is_refused = False

    @property
    def _arenas(self) -> list[Arena]:
        return [channel.arena for channel in (*self._departures.values(), *self._arrivals.values())]

    def way_to(self, code: int) -> DeviceChannel | None:
        """Return the channel for a tensor on this device, or None if tensors are staged.

        If no worker has the device, the tensor goes to a device that a worker has. On the way back
        it returns to its own.
        """
        if not self._is_direct:
            return None
        return self._departures.get(code) or next(iter(self._departures.values()))

    def setup(self, code: int) -> bytes:
        """Return the pickled `DeviceSetup` that a new worker needs."""
        events = {
            code: [departures.event_handle(), self._arrivals[code].event_handle()]
            for code, departures in self._departures.items()
        }
        return pickle.dumps(
            DeviceSetup(self._accelerator, code, self._codes, events, self._in_process)
        )

    # --- the trial

    def offer(self, code: int) -> tuple[Slot, SlotTrial] | None:
        """Make a slot for a new worker to read; return None if there cannot be one."""
        # This channel has nothing to wait for.
        channel = self._arrivals[code]
        mark = secrets.token_bytes(MARK_BYTES)
        try:
            slot = channel.write_bytes(
                torch.frombuffer(bytearray(mark), dtype=torch.uint8), at_once=True
            )
            channel.finish()
            # If there is no handle, this fails here and not while it is sent.
            _ = slot.slab.handle
        except (OSError, RuntimeError, MemoryError) as error:
            self._refuse(code, str(error))
            return None
        return slot, SlotTrial(slot.address, MARK_BYTES, mark)

    def tried(
        self,
        worker: WorkerHandle,
        message: TrialOutcome,
        foreign_slabs: ForeignSlabs,
        others: Sequence[WorkerHandle],
    ) -> list[Message]:
        """Note whether `worker` could read the caller's slot; if so, try to read the worker's.

        Return the messages to send to the worker.
        """
        refusal, back = message.refusal, message.back
        if back is not None:
            try:
                found = foreign_slabs.borrow(back.address, back.nbytes).copied()
                refusal = (
                    ""
                    if bytes(found.tolist()) == back.mark
                    else "the bytes that were read differ from those that the worker wrote"
                )
            except (OSError, RuntimeError, MemoryError) as error:
                refusal = str(error)
        if refusal:
            self._refuse(worker.device, refusal)
            return []
        worker.direct = True
        self._is_direct = not self._is_refused and all(each.direct for each in others)
        return [DirectTransfer()]

    def _refuse(self, code: int, reason: str) -> None:
        """Stage tensors from now on, and log the reason the first time."""
        self._is_direct = False
        if not self._is_refused:
            self._is_refused = True
            report(
                logging.WARNING,
                "tensors go to and from workers on %s through the CPU's memory: processes cannot "
                "share that device's memory (%s)",
                name_of(code),
                reason,
            )

    # --- memory of workers

    def attach(self, worker: WorkerHandle, message: NewSlab, foreign_slabs: ForeignSlabs) -> None:
        """Open a slab that `worker` has made.

        Raises:
            SharedMemoryError: the slab cannot be opened, because the worker may have died. Tensors
                that later messages place there are lost.
        """
        assert message.handle is not None
        channel = self._arrivals[message.code]
        foreign_slabs.attach_elsewhere(
            message.number,
            functools.partial(channel.open, message.number, message.nbytes, message.handle),
        )
        # Until then the slab is part of the trial.
        if worker.direct:
            foreign_slabs.slab(message.number)

    def tidy(self) -> None:
        for arena in self._arenas:
            arena.tidy()
            # A worker learns of a slab when it is first lent memory there.
            arena.made.clear()

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


def kept(region: Region) -> Slot:
    """Copy a worker's region into the caller's own memory, before the worker can die.

    The region is complete, so this waits for nothing.
    """
    return region.slab.channel.write_bytes(region.bytes, at_once=True)
