"""Who waits for whom on devices: channels over simulated streams, whose work is done in any order
that their events allow.

A real GPU is nearly always quick enough to hide a missing wait. Here every copy is put off, and a
drawn order decides which stream goes on next, so that a wait too few shows within a few hundred
draws; the last tests leave one out to see that it does.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpgrad.memory.accelerator import DeviceChannel, DeviceSlab

pytestmark = pytest.mark.quick

SEEDS = range(150)
CELLS = 4096


class Gpu:
    """All streams of one device, of all processes."""

    type = "simulated"

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.streams: list[Stream] = []
        self.here = self.stream(0)
        self.left_out: set[str] = set()  # what does not happen
        self.log: list[str] = []

    def stream(self, index: int) -> Stream:
        stream = Stream(self)
        self.streams.append(stream)
        return stream

    def current_stream(self, index: int) -> Stream:
        return self.here

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.here = self.here, stream
        try:
            yield
        finally:
            self.here = before

    def event(self, index: int) -> Event:
        return Event()

    def allocate(self, nbytes: int, index: int) -> Cells:
        return Cells(self, [None] * CELLS, 0, CELLS)

    def used_on(self, tensor: Any, stream: Stream) -> None: ...

    def go_on(self) -> bool:
        """Let one stream, any that can, do its next piece of work; whether there was one."""
        able = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
        if able:
            self.draw.choice(able).step()
        return bool(able)

    def dawdle(self) -> None:
        while self.draw.random() < 0.5 and self.go_on():
            pass


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.given = self.done = 0

    def put(self, do: Callable[[], None], when: Callable[[], bool] = lambda: True) -> None:
        self.given += 1
        self.work.append((when, do))
        self.gpu.dawdle()

    def step(self) -> None:
        _, do = self.work.popleft()
        do()
        self.done += 1

    def wait_stream(self, other: Stream) -> None:
        if "wait_stream" not in self.gpu.left_out:
            place = other.given
            self.put(lambda: None, lambda: other.done >= place)

    def wait_event(self, event: Event) -> None:
        if "wait_event" not in self.gpu.left_out and event.stream is not None:
            stream, place = event.stream, event.place
            self.put(lambda: None, lambda: stream.done >= place)

    def record_event(self, event: Event) -> None:
        if "record_event" not in self.gpu.left_out:
            event.stream, event.place = self, self.given

    def synchronize(self) -> None:
        self.gpu.log.append("synchronize")
        if "synchronize" in self.gpu.left_out:
            return
        place = self.given
        while self.done < place:
            assert self.gpu.go_on(), "streams wait for one another"


class Event:
    """The last time that it was recorded: the stream, and how much work that had been given by
    then."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place = 0


class Device:
    index = 0


class Cells:
    """Memory of the device, as much of a tensor as channels ask for; what is done with it is done
    when a stream comes to it."""

    device = Device()

    def __init__(self, gpu: Gpu, cells: list[Any], start: int, stop: int) -> None:
        self.gpu, self.cells, self.start, self.stop = gpu, cells, start, stop

    def numel(self) -> int:
        return self.stop - self.start

    def __getitem__(self, place: slice) -> Cells:
        return Cells(self.gpu, self.cells, self.start + place.start, self.start + place.stop)

    def copy_(self, source: Cells, non_blocking: bool) -> None:
        def do() -> None:
            self.cells[self.start : self.stop] = source.value()

        self.gpu.here.put(do)

    def clone(self) -> Cells:
        fresh = Cells(self.gpu, [None] * self.numel(), 0, self.numel())
        fresh.copy_(self, True)
        return fresh

    def value(self) -> list[Any]:
        return self.cells[self.start : self.stop]

    def compute(self, source: Cells, function: Callable[[Any], Any]) -> None:
        """A kernel."""

        def do() -> None:
            self.cells[self.start : self.stop] = map(function, source.value())

        self.gpu.here.put(do)


class Pair:
    """A caller and a worker, who do in turn what their halves of the pool do; messages are method
    calls."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        kinds: Any = gpu
        self.departures = DeviceChannel(kinds, 0, 0, 2, streamed=True, in_process=True)
        self.arrivals = DeviceChannel(kinds, 0, 0, 3, streamed=True, in_process=True)
        self.worker = DeviceChannel(kinds, 0, 1, 2, streamed=False, in_process=True)
        self.caller_stream, self.worker_stream = gpu.stream(0), gpu.stream(0)

    def call(self, x: Cells) -> tuple[Any, Any]:
        """The worker's slot with what it makes of `x`, and the caller's slot, to be given back when
        the message has come."""
        with self.gpu.on(self.caller_stream):
            sent = self.departures.write_bytes(x)
        with self.gpu.on(self.worker_stream):
            for channel in (self.departures, self.arrivals):  # `WorkerDevice.arrive`
                self.worker_stream.wait_event(channel._event)
            seen = self.opened(sent, self.worker)
            own = seen.copied()
            result = Cells(self.gpu, [None] * own.numel(), 0, own.numel())
            result.compute(own, lambda value: (value, "seen"))
            slot = self.worker.write_bytes(result)
            self.worker.finish()  # `WorkerDevice.finish`
        return slot, sent

    def take(self, slot: Any) -> Any:
        """The dispatcher's thread keeps what a worker gave."""
        return self.arrivals.write_bytes(self.opened(slot, self.arrivals).bytes, at_once=True)

    def opened(self, slot: Any, channel: DeviceChannel) -> Any:
        slab = DeviceSlab(slot.slab.number, channel, slot.slab.bytes)
        start = slot.memory.bytes.start
        return slab.memory[start : start + slot.memory.nbytes]


def run(seed: int, left_out: str = "") -> list[tuple[Any, Any]]:
    """Calls whose inputs are computed just before they leave, in slots used again; what came, and
    what should have."""
    gpu = Gpu(seed)
    if left_out:
        gpu.left_out.add(left_out)
    pair = Pair(gpu)
    found = []
    for k in range(6):
        with gpu.on(pair.caller_stream):
            raw, x = Cells(gpu, [k] * 8, 0, 8), Cells(gpu, [None] * 8, 0, 8)
            x.compute(raw, lambda value: ("computed", value))
        slot, sent = pair.call(x)
        kept = pair.take(slot)
        del slot, sent  # both sides say so, `ReturnedSlots`, and the slots are used again
        if k % 2:
            with gpu.on(pair.caller_stream):
                value = kept.memory.copied()
            found.append((value.value(), [(("computed", k), "seen")] * 8))
        del kept
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_read_before_it_is_written_nor_written_before_it_is_read(seed: int) -> None:
    for value, expected in run(seed):
        assert value == expected


@pytest.mark.parametrize("left_out", ["wait_stream", "wait_event", "record_event", "synchronize"])
def test_each_wait_is_needed(left_out: str) -> None:
    """The simulation finds a missing one."""
    assert any(value != expected for seed in SEEDS for value, expected in run(seed, left_out))


def test_what_comes_does_not_wait_for_what_leaves() -> None:
    """The caller's stream may be busy for long; a result is there all the same."""
    gpu = Gpu(0)
    pair = Pair(gpu)
    slot = pair.worker.write_bytes(Cells(gpu, [5] * 8, 0, 8))
    pair.worker.finish()
    busy = True
    pair.caller_stream.put(lambda: None, lambda: not busy)
    with gpu.on(pair.caller_stream):
        pair.departures.write_bytes(Cells(gpu, [1] * 8, 0, 8))
        value = pair.take(slot).memory.copied()
    assert value.value() == [5] * 8 and pair.caller_stream.work
