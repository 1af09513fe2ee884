"""Sites whose workers only pretend to work: each call is answered after the time that it is said to take. Runs at the sites.

    frame ──► PretendedSite ──► PretendedWorker: a pause for each call, then Results or Gradients ──► frame
The site is mpgrad's own, with its way of gathering what is to be said. The workers say what real ones say, in frames of the
same size and number, but no call is run: losses and gradients are zeros.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpgrad.cluster.site import Site
from mpgrad.wire.frames import unframed
from mpgrad.wire.messages import (
    Backward,
    Collect,
    Collected,
    Forward,
    ForwardCall,
    Gradients,
    Message,
    Ready,
    Release,
    Result,
    Results,
    Returned,
    Start,
)
from mpgrad.wire.pipe import framed, parts_of
from mpgrad.wire.tensor_refs import NUMBER_OF_DTYPE, REQUIRES_GRAD, Bucket, TensorRef, lent, unit_of

__all__ = ["LENGTHS", "PretendedActor", "PretendedSite", "serve"]

LENGTHS = struct.Struct("<QQQ")  # site, number of the exchange, bytes
FLOAT = NUMBER_OF_DTYPE[torch.float32]
SECONDS = "MPGRAD_PRETENDED_SECONDS"  # of each item: half of it forward, half of it backward
TRACKED = 2  # places for chunks that are taken back, as in `Whereabouts`


class Zeros:
    """The payload of an answer."""

    def __init__(self) -> None:
        self.nbytes = 0

    def refs(self, shapes: Sequence[tuple[int, ...]], flags: int) -> Sequence[TensorRef]:
        """As real workers send them: one by one, or in a bucket."""
        counts = [torch.Size(shape).numel() for shape in shapes]
        if len(shapes) == 1:
            return [TensorRef(FLOAT, shapes[0], None, -1 - self._taken(4 * counts[0]), 4 * counts[0], flags)]
        unit = unit_of(4, counts)
        nbytes = 4 * sum(-(-count // unit) * unit for count in counts)
        return Bucket(FLOAT, shapes, counts, -1 - self._taken(nbytes), nbytes, flags)

    def _taken(self, nbytes: int) -> int:
        start, self.nbytes = self.nbytes, self.nbytes + -(-nbytes // 16) * 16
        return start


class PretendedWorker:
    def __init__(self, number: int, seconds: float, say: Callable[[list[Message], int], None]) -> None:
        self.skipped = [-1] * TRACKED
        self._number = number
        self._half = seconds / 2
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._requests: deque[Forward | Backward | Collect] = deque()
        self._shapes: dict[int, list[tuple[int, ...]]] = {}  # of the inputs of calls that need gradients
        self._items: dict[int, int] = {}  # of these calls
        self._returns: list[tuple[int, int]] = []
        self._position = 0  # in the first request
        self._free_at = 0.0  # on the loop's clock
        self._is_busy = False

    def hear(self, frame: memoryview) -> None:
        messages, _ = unframed(*parts_of(frame))
        for message in messages:
            if isinstance(message, Start):
                self._say([Ready(os.getpid(), 0)], 0)
            elif isinstance(message, Forward | Backward | Collect):
                self._requests.append(message)
            elif isinstance(message, Release):
                for call in message.calls:
                    self._shapes.pop(call, None)
                    self._items.pop(call, None)
        if self._requests and not self._is_busy:
            self._free_at = self._loop.time()
            self._go_on()

    def _go_on(self) -> None:
        """Begin the next call, or answer; what is due already does not wait for the loop."""
        self._is_busy = False
        while self._requests:
            request = self._requests[0]
            calls: Sequence[Any] = [] if isinstance(request, Collect) else request.calls
            if self._position < len(calls) and request.chunk not in self.skipped:
                items = self._items_of(calls[self._position])
                at_once = isinstance(request, Forward) and request.ahead
                self._free_at += self._half * items * (2 if at_once else 1)
                self._position += 1
                self._is_busy = True
                self._loop.call_at(self._free_at, self._go_on)
                return
            done, self._position = self._position, 0
            self._requests.popleft()
            self._answer(request, done)

    def _items_of(self, call: Any) -> int:
        return len(call.bundle) or 1 if isinstance(call, ForwardCall) else self._items.get(call.call, 1)

    def _answer(self, request: Forward | Backward | Collect, done: int) -> None:
        zeros = Zeros()
        answer: Message
        if isinstance(request, Collect):
            answer = Collected(request.chunk, [], 0)
        elif isinstance(request, Forward):
            outcomes = [self._result(request, call, zeros) for call in request.calls[:done]]
            own = self._half * sum(len(call.bundle) or 1 for call in request.calls[:done])
            ahead = own if request.ahead else 0.0
            answer = Results(request.chunk, [*outcomes], own + ahead, own, ahead, False, [], [], 0)
            for each in request.calls:
                self._returns += [(ref.place, 1) for ref in lent(each.tensors)]
        else:
            gradients: list[Any] = []
            spent = self._half * sum(map(self._items_of, request.calls[:done]))
            for call in request.calls[:done]:
                shapes = self._shapes.pop(call.call)
                del self._items[call.call]
                gradients.append(zeros.refs([shapes[number] for number in call.wanted], 0) if call.wanted else [])
            for grad in request.calls:
                self._returns += [(ref.place, 1) for ref in lent(grad.grads)]
            answer = Gradients(request.chunk, gradients, spent, [], [], 0)
        returns, self._returns = self._returns, []
        self._say([Returned(returns), answer] if returns else [answer], zeros.nbytes)

    def _result(self, request: Forward, call: ForwardCall, zeros: Zeros) -> Result:
        shapes = [ref.shape for ref in call.tensors if ref.flags & REQUIRES_GRAD]
        count = len(call.bundle) or 1
        losses = zeros.refs([()] * count, REQUIRES_GRAD if shapes else 0)
        gradients = None
        if not shapes:
            pass
        elif request.ahead:
            gradients = zeros.refs(shapes, 0)
        else:
            self._shapes[call.call], self._items[call.call] = shapes, count
        return Result(None, losses, bool(shapes), gradients, [(None, 1)] * count if call.bundle else ())


class PretendedSite(Site):
    def __init__(self, patience: float, seconds: float) -> None:
        super().__init__(patience)
        self._seconds = seconds
        self._pretended: dict[int, PretendedWorker] = {}

    def _obey(self, kind: str, *rest: Any) -> None:
        if kind == "start":
            number = rest[0]

            def say(messages: list[Message], nbytes: int) -> None:
                header, body = parts_of(framed(messages, (bytes(nbytes),) if nbytes else ()))
                self._say("frame", number, header, pickle.PickleBuffer(body))

            self._pretended[number] = PretendedWorker(number, self._seconds, say)
        elif kind == "close":
            self._say("closed")
        elif kind in ("frame", "skip", "end") and rest[0] in self._pretended:
            worker = self._pretended[rest[0]]
            if kind == "frame":
                worker.hear(rest[1])
            elif kind == "skip":
                worker.skipped[rest[1] % TRACKED] = rest[2]
                self._say("skipped", *rest)
            else:
                del self._pretended[rest[0]]
                self._say("gone", rest[0], 0, "")


class PretendedActor:
    """In the place of `mpgrad.cluster.ray.SiteActor`."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._site: Any = None

    async def exchange(self, number: int, *pieces: Any) -> tuple[Any, ...]:
        import ray

        from mpgrad.cluster.ray import in_pieces, is_large

        if self._site is None:
            self._site = PretendedSite(self._patience, float(os.environ[SECONDS]))
        content = bytes(await pieces[0][0]) if is_large(pieces) else b"".join(pieces)
        answer, said = await self._site.exchange(number, content)
        return answer, *in_pieces(said, ray.put)


async def serve(end: socket.socket, patience: float, seconds: float) -> None:
    """Many sites, behind one pipe."""
    reader, writer = await asyncio.open_connection(sock=end)
    sites: dict[int, PretendedSite] = {}
    tasks: set[asyncio.Task[None]] = set()

    def finished(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        task.result()  # an error is the loop's, which ends the sites

    async def answer(site: int, exchange: int, content: bytes) -> None:
        number, said = await sites[site].exchange(exchange, content)
        writer.write(LENGTHS.pack(site, exchange, len(said)) + struct.pack("<Q", number) + said)

    while True:
        try:
            site, exchange, nbytes = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
            content = await reader.readexactly(nbytes)
        except (asyncio.IncompleteReadError, ConnectionError):  # the caller is gone
            return
        if site not in sites:
            sites[site] = PretendedSite(patience, seconds)
        task = asyncio.create_task(answer(site, exchange, content))
        tasks.add(task)
        task.add_done_callback(finished)
