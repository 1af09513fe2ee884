"""What comes from the workers, and what follows from it. Caller's side. Assumes: called by the scheduling thread."""

from __future__ import annotations

import contextlib
import math
import time

from mpgrad.calls.output import given_again
from mpgrad.descriptors import Kept
from mpgrad.errors import SharedMemoryError
from mpgrad.memory.addresses import OFFSET_MASK, owner_of, slab_of
from mpgrad.scheduling.admissions import Admissions
from mpgrad.scheduling.answers import Answers, failed_again
from mpgrad.scheduling.caller_memory import CallerMemory
from mpgrad.scheduling.chunks import Chunk
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.function_cache import Codes
from mpgrad.scheduling.lifecycle import Lifecycle
from mpgrad.scheduling.queue import Line
from mpgrad.scheduling.settings import Settings
from mpgrad.scheduling.staffing import Staff
from mpgrad.scheduling.worker_handle import WorkerHandle
from mpgrad.wire.asides import LastWords, Whereabouts
from mpgrad.wire.frames import Frame
from mpgrad.wire.messages import (
    Collected,
    Gradients,
    Logged,
    Missing,
    NewSlab,
    Printed,
    Ready,
    Recorded,
    Result,
    Results,
    Returned,
    SlabsGone,
    SlabsMissing,
    StartFailed,
    Tried,
)
from mpgrad.wire.pipe import UnreadableFrame

__all__ = ["Receiver"]

# what is raised where a message came at the wrong time, or holds what it should not
CONTENT = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError)


class Receiver:
    """Takes each message to the part whose matter it is."""

    def __init__(
        self,
        settings: Settings,
        life: Lifecycle,
        memory: CallerMemory,
        codes: Codes,
        line: Line,
        deliveries: Deliveries,
        admissions: Admissions,
        staff: Staff,
    ) -> None:
        self._settings = settings
        self._life = life
        self._memory = memory
        self._codes = codes
        self._line = line
        self._deliveries = deliveries
        self._admissions = admissions
        self._staff = staff
        self._notes = deliveries.notes
        self.items_done = 0  # forwards; counted before anybody hears of them
        self.backwards_done = 0
        self._reading = False  # nothing but what a frame holds is looked at: what fails, fails because of that
        self._taken: tuple[int, Chunk] | None = None  # answered by the message that is being read
        self._answers = Answers(memory.lenders, settings.recoverable)

    @property
    def graphs_dropped(self) -> int:
        return self._answers.graphs_dropped

    @property
    def answers(self) -> int:
        """How many forwards and backwards have been done so far. Any thread may ask."""
        return self.items_done + self.backwards_done

    def serve(self, worker: WorkerHandle) -> None:
        """Read what `worker` sent, or see that it has died."""
        try:
            while worker.gone is None:
                self._reading, self._taken = True, None
                if (frame := worker.link.receive()) is None:
                    return
                self._receive(worker, frame)
        except UnreadableFrame as error:
            self._lose_garbled(worker, error)
        except (EOFError, ConnectionError):
            self._staff.lose(worker)
        except MemoryError as error:  # its answer cannot be read, nor what comes behind it
            worker.unreadable = str(error) or "no memory for what a worker has answered; return less, or tensors"
            worker.link.kill()
            self._staff.lose(worker)
        except CONTENT as error:
            if not self._reading or self._settings.in_process:
                raise
            if self._taken is not None:  # it is not answered after all
                worker.under_way.put_back(*self._taken)
            self._lose_garbled(worker, UnreadableFrame(repr(error)), error)
        finally:
            self._taken = None  # it would keep an operation and its results until somebody else answers

    def _lose_garbled(self, worker: WorkerHandle, error: UnreadableFrame, cause: BaseException | None = None) -> None:
        worker.garbled, error.__cause__ = error, cause or error.__cause__
        worker.link.kill()
        self._staff.lose(worker)

    def _take(self, worker: WorkerHandle, number: int) -> Chunk:
        chunk = worker.take(number)
        self._taken = number, chunk
        return chunk

    def _receive(self, worker: WorkerHandle, frame: Frame) -> None:
        for message in frame.messages:
            self._reading, self._taken = True, None
            match message:
                case Results():
                    self._results(worker, message, frame.payload)
                case Gradients():
                    chunk = self._take(worker, message.chunk)
                    self.backwards_done += sum(not isinstance(each, Missing) for each in message.outcomes)
                    self._answers.gradients(worker, chunk, message, frame.payload)
                case Collected():
                    self._answers.collected(worker, self._take(worker, message.chunk), message, frame.payload)
                case NewSlab() if message.handle is not None and self._memory.crossing is not None:
                    self._memory.crossing.attach(worker, message, self._memory.lenders)
                case NewSlab():
                    self._memory.lenders.attach(message.number, worker.link.take_descriptor(), message.nbytes)
                case SlabsGone():
                    self._deliveries.unmap(message.numbers)
                case SlabsMissing():
                    for number in message.numbers:
                        worker.loans.tell_again(number)
                case Returned():
                    for address, times in message.slots:
                        self._take_back(worker, address, times)
                case LastWords():
                    pipe = worker.link.take_descriptor()
                    worker.last_words = None if pipe is None else Kept(pipe)
                case Ready():
                    self._ready(worker, message)
                case Recorded():
                    self._notes.answered(worker, message)
                case Printed() | Logged():
                    given_again(message)
                case Tried() if self._memory.crossing is not None:
                    others = [each for each in self._deliveries.workers.values() if not each.retiring]
                    if told := self._memory.crossing.tried(worker, message, self._memory.lenders, others):
                        self._deliveries.transmit(worker, told)
                case StartFailed() if not worker.ready:
                    self._life.break_off(failed_again(message.failure, "", worker).error())
                case _:
                    raise UnreadableFrame(f"no worker sends such a message now ({type(message).__name__})")
        self._reading = False

    def _ready(self, worker: WorkerHandle, message: Ready) -> None:
        if worker.link.shares_memory:
            with contextlib.suppress(SharedMemoryError):  # then nothing is known of how far it has come
                memory = self._memory.lenders.slab(slab_of(message.whereabouts)).memory
                offset = message.whereabouts & OFFSET_MASK
                worker.under_way.whereabouts = memory[offset : offset + 8 * Whereabouts.COUNT].cast("q")
                worker.under_way.can_skip = True
        else:
            worker.under_way.whereabouts = worker.link.whereabouts
            worker.under_way.link = worker.link
        worker.pid = message.pid
        worker.ready_at = time.monotonic()
        worker.ready = True
        self._staff.note_ready()
        recording = self._notes.recording
        if recording is not None and recording.is_known:  # else it hears with the others
            self._deliveries.record(worker)

    def _take_back(self, worker: WorkerHandle, address: int, times: int) -> None:
        worker.loans.take_back(address, times)
        slab = slab_of(address)
        owner = owner_of(slab)
        if owner and owner not in self._deliveries.workers and not worker.loans.have_any_of(slab):
            worker.loans.unmap(slab)  # of a worker that is gone; nobody else would say so

    def _results(self, worker: WorkerHandle, message: Results, payload: memoryview) -> None:
        """Measured, delivered; calls that were called off go back to the queue."""
        chunk = self._take(worker, message.chunk)
        operation = chunk.operation
        assert operation is not None
        done = len(message.outcomes)
        if done:
            items = sum([call.items for _, call in chunk.calls[:done]])
            worker.calls_done += items
            self.items_done += items
            operation.own_seconds += message.own_seconds + message.ahead_seconds
            answered = zip(chunk.calls, message.outcomes, strict=False)  # one too many is refused below
            if measured := sum([call.items for (_, call), each in answered if isinstance(each, Result)]):
                share = done / (operation.delivered + done) if operation.largest_first else math.inf
                self._codes.note_results(operation.function, message, measured, share)
        limit = operation.limit
        outcomes = self._answers.results(worker, chunk, message, payload)
        self._reading = False
        for index, outcome in outcomes:
            operation.deliver(index, outcome)
        self._line.put_back(operation, [call for _, call in chunk.calls[done:]])  # called off, and then not begun after all
        if operation.limit != limit:
            self._admissions.cancel_rest(operation)
        if operation.finished:
            self._admissions.unfinished.pop(operation, None)
        if self._settings.calls is not None and worker.calls_done >= self._settings.calls:
            self._staff.retire(worker)
