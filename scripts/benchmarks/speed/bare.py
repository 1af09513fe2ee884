"""The least pool that does for each item what mpgrad does, written by hand for what is measured here, and nothing else.

Where it is slow too, the reason is not the care that a library takes. For each item: memory, random numbers and an exception of
its own, and gradients of its own. Everything else is done for a chunk of items, or left out: nothing is checked, memory is set
aside beforehand, a worker that dies is the end, results are gone with the next map, and only one tensor goes in and one comes
out. One node for each chunk sends, another waits; both workers are sent everything at once, as if all took equally long.

    [cat] items ──► memory ──► [split] seed, run ──► [cat] memory ──► [split] results          Waiting ──► Sending ──► results
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
import torch.multiprocessing
from common import Function
from torch import Tensor

__all__ = ["BarePool"]

CHUNK = 48  # items
FLOATS = 1 << 27  # in shared memory: a part for the caller, and one for each worker


class Order(NamedTuple):
    """To a worker: run the items that lie at `place`, or the backward with gradients that lie there.

    Without shapes: a new map begins.
    """

    number: int
    function: bytes | None  # None: a backward
    place: int
    shapes: list[tuple[int, ...]]
    grad: bool = True


class Answer(NamedTuple):
    number: int
    place: int
    shapes: list[tuple[int, ...]]
    ahead: int | None  # where gradients lie that were computed at once
    failed: list[tuple[int, str]]


class Region:
    """Memory for tensors, one after another, until it is used from its start again."""

    def __init__(self, memory: Tensor, start: int) -> None:
        self._memory = memory
        self._start = self._end = start

    def clear(self) -> None:
        self._end = self._start

    def put(self, tensors: Sequence[Tensor]) -> int:
        """Where they lie."""
        place = self._end
        flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
        self._end += sum([tensor.numel() for tensor in flat])
        with torch.no_grad():
            torch.cat(flat, out=self._memory[place : self._end])
        return place

    def get(self, place: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = torch.unsafe_split_with_sizes(self._memory[place : place + sum(sizes)], sizes)
        return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# --- the caller


class Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: Chunk, *items: Tensor) -> Tensor:
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.chunk.gradients()


class Sending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: Chunk, token: Tensor) -> tuple[Tensor, ...]:
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return tuple(chunk.results())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.chunk.send(grads)
        return None, torch.zeros(())


class Chunk:
    def __init__(self, pool: BarePool, number: int, items: Sequence[Tensor], function: bytes) -> None:
        self._pool, self._number = pool, number
        self._shapes = [tuple(item.shape) for item in items]
        self._factors: Sequence[Tensor] = ()
        self.answer: Answer | None = None
        pool.tell(Order(number, function, pool.region.put(items), self._shapes, torch.is_grad_enabled()))

    def results(self) -> list[Tensor]:
        self._first = self._pool.wait(self)
        return self._pool.region.get(self._first.place, self._first.shapes)

    def send(self, grads: Sequence[Tensor]) -> None:
        if self._first.ahead is None:
            self.answer = None
            self._pool.tell(Order(self._number, None, self._pool.region.put(grads), self._first.shapes))
        else:
            self._factors = grads

    def gradients(self) -> list[Tensor]:
        if self._first.ahead is None:
            return self._pool.region.get(self._pool.wait(self).place, self._shapes)
        found = self._pool.region.get(self._first.ahead, self._shapes)
        return [grad if factor == 1 else grad * factor for grad, factor in zip(found, self._factors, strict=True)]


class BarePool:
    def __init__(self, processes: int, ahead: bool) -> None:
        memory = torch.empty(FLOATS).share_memory_()
        part = FLOATS // (processes + 1)
        self.region = Region(memory, 0)
        context = torch.multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(processes):
            ours, its = context.Pipe()
            process = context.Process(target=serve, args=(its, memory, (number + 1) * part, ahead), daemon=True)
            process.start()
            its.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def map(self, function: Function, items: Sequence[Tensor]) -> list[Tensor]:
        self.region.clear()
        for number in range(len(self._pipes)):
            self.tell(Order(number, None, 0, []))
        pickled = cloudpickle.dumps(function)
        self._chunks: list[Chunk] = []
        tokens = []
        for number, start in enumerate(range(0, len(items), CHUNK)):
            some = items[start : start + CHUNK]
            self._chunks.append(chunk := Chunk(self, number, some, pickled))
            if torch.is_grad_enabled():  # all of these before any that sends: the engine runs what was made last first
                tokens.append(Waiting.apply(chunk, *some))  # type: ignore[no-untyped-call]
        if not tokens:
            return [result for chunk in self._chunks for result in chunk.results()]
        pairs = zip(self._chunks, tokens, strict=True)
        return [result for chunk, token in pairs for result in Sending.apply(chunk, token)]  # type: ignore[no-untyped-call]

    def tell(self, order: Order) -> None:
        self._pipes[order.number % len(self._pipes)].send_bytes(pickle.dumps(order))

    def wait(self, chunk: Chunk) -> Answer:
        pipe = self._pipes[chunk._number % len(self._pipes)]
        while chunk.answer is None:
            answer: Answer = pickle.loads(pipe.recv_bytes())
            if answer.failed:
                raise RuntimeError(str(answer.failed))
            self._chunks[answer.number].answer = answer
        return chunk.answer

    def terminate(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


# --- a worker


def serve(pipe: Connection, memory: Tensor, start: int, ahead: bool) -> None:
    torch.set_num_threads(1)
    worker = Served(Region(memory, start), ahead)
    with contextlib.suppress(EOFError):
        while True:
            order: Order = pickle.loads(pipe.recv_bytes())
            if not order.shapes:
                worker.forget()
            elif order.function is None:
                pipe.send_bytes(pickle.dumps(worker.backward(order)))
            else:
                with torch.set_grad_enabled(order.grad):
                    pipe.send_bytes(pickle.dumps(worker.forward(order, order.function)))


class Served:
    def __init__(self, region: Region, ahead: bool) -> None:
        self._region = region
        self._ahead = ahead
        self._functions: dict[bytes, Function] = {}
        self._graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def forget(self) -> None:
        self._graphs.clear()
        self._region.clear()

    def forward(self, order: Order, pickled: bytes) -> Answer:
        if pickled not in self._functions:
            self._functions[pickled] = cloudpickle.loads(pickled)
        function = self._functions[pickled]
        items = self._region.get(order.place, order.shapes)
        results: list[Tensor] = []
        failed: list[tuple[int, str]] = []
        for number, item in enumerate(items):
            item.requires_grad_(order.grad)
            seed = (order.number * CHUNK + number) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            try:
                result = function(item)
                if self._ahead:
                    result.backward()  # type: ignore[no-untyped-call]
                    result = result.detach()
                results.append(result)
            except Exception as error:
                failed.append((number, repr(error)))
        ahead = self._region.put([grad for item in items if (grad := item.grad) is not None]) if self._ahead else None
        if not self._ahead:
            self._graphs[order.number] = items, results
        return Answer(order.number, self._region.put(results), [tuple(each.shape) for each in results], ahead, failed)

    def backward(self, order: Order) -> Answer:
        items, results = self._graphs.pop(order.number)
        torch.autograd.backward(results, self._region.get(order.place, order.shapes))
        grads = [grad for item in items if (grad := item.grad) is not None]
        return Answer(order.number, self._region.put(grads), [], None, [])
