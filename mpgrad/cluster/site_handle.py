"""The caller's end of a site, and of the links to the workers there. Caller's side.

    SiteLink.send ──► records ──► flush ──► Carrier.exchange ══► Site ══► reply ──► take ──► frames of a SiteLink
What is lent to a worker is mirrored at its site: its bytes travel once, in front of the frame that names it, however many
workers of the site are lent it. What a worker lends has its bytes in the frame, and a mirror here (`wire.mirror`).

Assumes: called by the thread that uses the engine, but for `beat`, `resident_bytes`, and the replies that a carrier gives.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pickle import PickleBuffer
from typing import Any

from mpgrad.cluster.carrier import Arriving, Carrier, Node, Record, SiteOptions, packed, unpacked
from mpgrad.cluster.site import Hello
from mpgrad.engines.launch import Exit
from mpgrad.memory.addresses import slab_of
from mpgrad.memory.arena import Borrowed, Slot
from mpgrad.pickling.exceptions import carried
from mpgrad.wire.asides import Whereabouts
from mpgrad.wire.frames import Frame, Mirror, address_of, unframed
from mpgrad.wire.messages import Failure, Message, NewSlab, Ready, SlabsGone, StartFailed
from mpgrad.wire.pipe import Traffic, framed, parts_of

__all__ = ["SiteHandle", "SiteLink"]

POLLS = 2  # exchanges that wait at the site for news
MOST_PENDING = 8  # of them, if a site does not answer
AFTER_REFUSAL, AFTER_REFUSALS = 1.0, 5.0  # seconds for which no worker is started where one, or several in a row, could not be


class SiteHandle:
    """Guarantees: what is told is told in order, once; or the site is lost, and so is each of its workers."""

    def __init__(
        self,
        carrier: Carrier,
        node: Node | None,
        slots: int,
        patience: float,
        traffic: Traffic,
        inbox: Callable[[Any], None],
        look: Callable[[], None],
    ) -> None:
        """`inbox`: what a reply has is put there, in a thread of the carrier's; `look`: what is there now is taken."""
        self.look = look
        self.node = node
        self.slots = slots
        self._patience = patience
        self.links: dict[int, SiteLink] = {}
        self.lost = ""  # why; else it is there, or will be
        self.hello: Hello | None = None
        self.heard_at = time.monotonic()
        self.traffic = traffic
        self._carrier = carrier
        self._site: Any = None  # what the carrier knows it by
        self.opened_at = math.inf  # on the clock of time.monotonic, as the next
        self.idle_since = math.inf  # its last worker is gone
        self.is_missed = False  # it was said that it does not come
        self._inbox = inbox
        self._records: list[Record] = []
        self._next_number = 0
        self._arriving = Arriving()
        self._numbering = threading.Lock()
        self._pending: set[int] = set()  # exchanges
        self.refusals = 0  # in a row
        self._full_until = 0.0  # no worker could be started, on the clock of time.monotonic
        self.is_closing = False  # its workers have been asked to end, and not all have
        self.refusal = ""  # why what is installed there cannot be used
        self._lent: Counter[int] = Counter()  # address -> how often it is lent to workers of the site
        self._lent_of: Counter[int] = Counter()  # slab -> how many of these addresses lie there
        self._slabs: dict[int, set[int]] = {}  # mirrored there -> workers that know it

    @property
    def free(self) -> int:
        return 0 if self.lost or self.is_refusing else self.slots - sum(not link.is_leaving for link in self.links.values())

    @property
    def is_refusing(self) -> bool:
        """No worker could be started a moment ago."""
        return not self.lost and time.monotonic() < self._full_until

    @property
    def name(self) -> str:
        """Of its node; "" while nobody knows which that will be."""
        if self.node is not None:
            return self.node.name
        return "" if self.hello is None else self.hello.host

    def on(self, node: Node | None) -> bool:
        """It is to be there; None: wherever there is room."""
        return (self.node and self.node.id) == (node and node.id)

    @property
    def is_planned(self) -> bool:
        """It was not started yet: more workers may be added."""
        return self.opened_at == math.inf and not self.lost

    def open(self) -> None:
        """
        Raises:
            OSError: it cannot be started now.
        """
        self._site = self._carrier.start_site(SiteOptions(self.node, self.slots, self._patience))
        self.opened_at = time.monotonic()

    # --- what is told

    def tell(self, *record: Any) -> None:
        self._records.append(record)

    def flush(self) -> None:
        """Send what has been told; or have the site say what is new."""
        if self.is_planned:
            return
        if self._records and not self.lost:
            records, self._records = self._records, []
            self._exchange(packed(records))
        # no more than that: where each is answered at once, with an error, there would be no end
        for _ in range(0 if self.lost else POLLS - len(self._pending)):
            self._exchange(b"")

    def beat(self) -> None:
        """Be heard, though the thread that uses the engine may be busy with something else. Any thread."""
        if not self.lost and not self.is_planned and len(self._pending) < MOST_PENDING:
            self._exchange(b"")

    def _exchange(self, content: bytes) -> None:
        self.traffic.system_calls += 1
        self.traffic.bytes_sent += len(content)
        with self._numbering:
            number, self._next_number = self._next_number, self._next_number + 1
            self._pending.add(number)
        try:
            self._carrier.exchange(self._site, number, content, partial(self._put_reply, number))
        except Exception as error:  # of the carrier's kinds
            self._put_reply(number, error)

    def _put_reply(self, exchange: int, reply: tuple[int, bytes | None] | BaseException) -> None:
        with self._numbering:
            is_first = exchange in self._pending
            if isinstance(reply, BaseException) or reply[1] is not None:
                self._pending.discard(exchange)
        self._inbox((self, (is_first, reply)))

    # --- what is heard

    def is_silent(self, patience: float) -> str:
        """Why it has to be taken for dead, after so many seconds; "" where it has not."""
        if time.monotonic() - self.heard_at > patience:
            return f"it has said nothing for {patience:g} s"
        if self._arriving.missing_for > patience:
            return f"something that it said was lost {patience:g} s ago"
        return ""

    def take(self, is_first: bool, reply: tuple[int, bytes | None] | BaseException) -> None:
        """What was put into the inbox; the same may have been there before."""
        if self.lost:
            return
        if isinstance(reply, BaseException):
            if is_first:
                self.lose(f"{type(reply).__name__}: {reply}")
            return
        self.heard_at = time.monotonic()
        number, content = reply
        if content is None:
            self._arriving.expect(number)
            return
        for piece in self._arriving.arrange(number, content):
            self.traffic.bytes_received += len(piece)
            for record in unpacked(piece) if piece else ():
                self._obey(*record)

    def _obey(self, kind: str, *rest: Any) -> None:
        if kind == "hello":
            (self.hello,) = rest
        elif kind == "closed":
            self.is_closing = False
        elif kind == "resident":
            for number, nbytes in rest[0].items():
                if number in self.links:
                    self.links[number].nbytes_resident = nbytes
        elif (link := self.links.get(rest[0])) is not None:
            if kind == "frame":
                link.frames.append(rest[1:])
                link.overrun = None  # it has gone on since
            elif kind == "at":
                link.note_whereabouts(rest[1])
            elif kind == "skipped":
                link.skipped[rest[1]] = rest[2]
            elif kind == "overrun":
                link.overrun = rest[1:]
            elif kind == "gone":
                link.last_words = rest[2]
                link.end_with(rest[1])
            else:  # refused
                self.refusals += 1
                self._full_until = time.monotonic() + (AFTER_REFUSAL if self.refusals == 1 else AFTER_REFUSALS)
                link.end_with(None, f"no process can be started there: {rest[1]}")

    def lose(self, why: str) -> None:
        """It does not answer any more: neither will its workers."""
        was_planned, self.lost = self.is_planned, why
        for link in self.links.values():
            link.ended = True
        if not was_planned:
            self._carrier.kill_site(self._site)

    def ask_to_close(self) -> None:
        """After its workers were told to end."""
        if self.hello is not None and not self.lost:
            self.is_closing = True
            self.tell("close")

    def close(self) -> None:
        """Nobody needs it any more."""
        if not self.lost:
            self.lose("closed")

    # --- memory that is mirrored there

    def mirror(self, slab: Any) -> None:
        if slab.number not in self._slabs:
            self._slabs[slab.number] = set()
            self.tell("slab", slab.number, slab.nbytes)

    def introduce(self, worker: int, slabs: Sequence[int]) -> None:
        """The worker learns of them with the next frame."""
        for number in slabs:
            self._slabs[number].add(worker)

    def carry(self, holder: Slot | Borrowed) -> None:
        address = address_of(holder)
        self.mirror(holder.slab)
        if not self._lent[address] or isinstance(holder, Borrowed):  # who has what is not ours may have written there
            self.tell("write", address, PickleBuffer(holder.memory))
        if not self._lent[address]:
            self._lent_of[holder.slab.number] += 1
        self._lent[address] += 1

    def drop(self, holder: Slot | Borrowed, times: int) -> None:
        address = address_of(holder)
        self._lent[address] -= times
        if not self._lent[address]:
            del self._lent[address]
            slab = slab_of(address)
            self._lent_of[slab] -= 1
            self._forget_if_unused(slab)

    def part(self, worker: int, slabs: Sequence[int]) -> None:
        """The worker forgets them; after the frame that says so."""
        for number in slabs:
            if number in self._slabs:
                self._slabs[number].discard(worker)
                self._forget_if_unused(number)

    def leave(self, worker: int) -> None:
        """The worker is gone."""
        self.part(worker, list(self._slabs))

    def _forget_if_unused(self, slab: int) -> None:
        if not self._slabs[slab] and not self._lent_of[slab]:
            del self._slabs[slab], self._lent_of[slab]
            self.tell("forget", slab)


class SiteLink:
    """The caller's end of the link to a worker at a site, a `WorkerLink`."""

    shares_memory = False
    keeps_time = True

    def __init__(self, number: int, site: SiteHandle) -> None:
        self.number = number
        self.site = site
        self.frames: deque[tuple[tuple[int, int, int], memoryview]] = deque()  # headers and bodies
        self._refused = ""  # why it could not be started
        self.is_leaving = False
        self.ended = False  # the worker is gone, and `frames` has its last words
        self.exit: Exit | None = None
        self._exit_code: int | None = None  # as far as it is known
        self.last_words = ""
        self.nbytes_resident = 0
        self.overrun: tuple[int, int] | None = None
        self.whereabouts = memoryview(bytearray(8 * Whereabouts.COUNT)).cast("q")
        self.skipped: dict[int, int] = {}
        self._mirror = Mirror()  # of the worker's slabs
        self._descriptors: deque[int] = deque()
        site.links[number] = self
        site.idle_since = math.inf
        site.tell("start", number)
        if site.refusal:
            self.refuse(site.refusal)

    @property
    def node(self) -> str:
        return self.site.name

    @property
    def has_place(self) -> bool:
        return self.site.hello is not None and not self.ended

    @property
    def lost(self) -> str:
        return f"its site was lost: {self.site.lost}" if self.site.lost else self._refused

    @property
    def could_start(self) -> bool:
        return bool(self.site.lost) and self.site.hello is not None

    def send(self, messages: list[Message], payload: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        if self.ended:
            raise ConnectionError(self.site.lost or "the worker is gone")
        new = [message.number for message in messages if isinstance(message, NewSlab)]
        self.site.introduce(self.number, new)
        self.site.traffic.frames_sent += 1
        self.site.tell("frame", self.number, PickleBuffer(framed(messages, payload, len(new))), new)
        for message in messages:
            if isinstance(message, SlabsGone):
                self.site.part(self.number, message.numbers)

    def introduce(self, slabs: Sequence[Any]) -> None:
        for slab in slabs:
            self.site.mirror(slab)
            self.send([NewSlab(slab.number, slab.nbytes)])  # alone in its frame, which may have to wait at the site

    def carry(self, holder: Slot | Borrowed) -> None:
        self.site.carry(holder)

    def drop(self, holder: Slot | Borrowed, times: int) -> None:
        self.site.drop(holder, times)

    def receive(self) -> Frame | None:
        if not self.frames:
            if self.ended:
                raise EOFError
            return None
        header, body = self.frames.popleft()
        self.site.traffic.frames_received += 1
        body = memoryview(bytearray(body))  # writable, and aligned, as what a socket gives
        messages, payload, mirrors = self._mirror.open(*unframed(header, body))
        self._descriptors.extend(mirrors)
        for message in messages:
            if isinstance(message, Ready):
                self.site.refusals = 0
                self.site.tell("watch", self.number, message.pid)
        return Frame(messages, payload)

    def take_descriptor(self) -> int | None:
        return self._descriptors.popleft()

    def has_more(self) -> bool:
        self.site.look()
        return bool(self.frames) or self.ended

    def skip(self, place: int, chunk: int) -> None:
        self.site.tell("skip", self.number, place, chunk)

    def follow(self, seconds: float) -> None:
        self.site.tell("follow", self.number, seconds)

    def note_whereabouts(self, numbers: Sequence[int]) -> None:
        """What the worker has written, by its own clock."""
        for place, number in enumerate(numbers):
            self.whereabouts[place] = number

    def limit(self, chunk: int, seconds: float | None) -> None:
        self.site.tell("limit", self.number, chunk, seconds)

    def kill(self, by: int = signal.SIGKILL) -> None:
        self.site.tell("kill", self.number, by)
        self._exit_code = -by
        self.site.flush()

    def resident_bytes(self, pid: int) -> int:
        """As the site said last, which it does every second."""
        return self.nbytes_resident

    def close(self) -> None:
        self.frames.clear()

    def end(self) -> None:
        """The site says of a worker that it is gone when it knows how it has ended, and sees to the end of others."""
        if not self.ended:
            self.site.tell("end", self.number)
            self.ended = True
        self.site.leave(self.number)
        del self.site.links[self.number]
        if not self.site.links:
            self.site.idle_since = time.monotonic()
        self.close()
        self.exit = Exit(self._exit_code)

    def end_with(self, code: int | None, why: str = "") -> None:
        self.ended = True
        self._refused = why
        if code is not None:
            self._exit_code = code

    def refuse(self, why: str) -> None:
        """What is there cannot be used: no worker can start."""
        failure = Failure(carried(RuntimeError(why)), "", "start")
        frame = framed([StartFailed(failure)], ())
        self.frames.append(parts_of(frame))
