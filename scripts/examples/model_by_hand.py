"""A model whose forward and backward run in workers, by hand: the bound that train_data_parallel.py compares mpgrad with.

Each worker has the model from the start, and reads its parameters where the caller's optimizer writes them: in shared memory.
Images, logits and gradients travel through shared memory too. A pipe only says how many rows there are, and that all is done.

    images ──► parts ──► workers ──► logits                         forward
    sum of gradients ◄── workers ◄── parts ◄── gradient of logits   backward

A library cannot do much less, and has to do more: no module is pickled here, shapes are known beforehand, nothing is checked,
nobody recovers, and a backward belongs to the latest forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch import Tensor, nn

TO_END = 30.0  # seconds that a process has for it


class EndedError(Exception):
    pass


# --- processes that wait for questions and answer each, until the connection is closed


@contextlib.contextmanager
def processes(run: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> Iterator[list[Connection[Any, Any]]]:
    """One for each `arguments`; `run` gets its end of the pipe behind them."""
    spawning = torch.multiprocessing.get_context("spawn")
    connections: list[Connection[Any, Any]] = []
    with contextlib.ExitStack() as stack:
        for each in arguments:
            here, there = spawning.Pipe()
            process = spawning.Process(target=run, args=(*each, there), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            stack.callback(end, process, here)
        yield connections


def end(process: SpawnProcess, connection: Connection[Any, Any]) -> None:
    connection.close()
    process.join(TO_END)
    if process.is_alive():  # it waits for another process, which failed
        process.kill()
        process.join()
    process.close()


def answers(connections: list[Connection[Any, Any]], questions: Iterable[int | str]) -> list[Any]:
    try:
        for connection, question in zip(connections, questions, strict=True):
            connection.send(question)
        return [connection.recv() for connection in connections]
    except (EOFError, ConnectionError):
        raise EndedError("a rank, or a worker by hand, ended before its time; it says above why") from None


def received(connection: Connection[Any, Any]) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


# --- the model


class Memory(NamedTuple):
    """Shared with one worker. A batch's part fills the first rows."""

    images: Tensor
    logits: Tensor
    logit_gradients: Tensor
    gradients: list[Tensor]  # of the parameters


class ModelByHand(nn.Module):
    def __init__(self, net: nn.Module, memories: list[Memory], connections: list[Connection[Any, Any]]) -> None:
        super().__init__()
        self.net, self.memories, self.connections = net, memories, connections

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = Apart.apply(self, images, *self.net.parameters())  # type: ignore[no-untyped-call]
        return logits


class Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: ModelByHand, images: Tensor, *parameters: Tensor) -> Tensor:
        parts = images.tensor_split(len(model.memories))  # of a short batch maybe none: such a worker's gradients are zeros
        for memory, part in zip(model.memories, parts, strict=True):
            memory.images[: len(part)].copy_(part)
        ctx.model, ctx.counts = model, [len(part) for part in parts]
        answers(model.connections, ctx.counts)
        return torch.cat([memory.logits[:count] for memory, count in zip(model.memories, ctx.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        memories = ctx.model.memories
        for memory, part in zip(memories, torch.split(gradient, ctx.counts), strict=True):
            memory.logit_gradients[: len(part)].copy_(part)
        answers(ctx.model.connections, ["backward"] * len(memories))
        each = zip(*(memory.gradients for memory in memories), strict=True)
        return None, None, *(sum(parts[1:], start=parts[0].clone()) for parts in each)


@contextlib.contextmanager
def model_by_hand(net: nn.Module, workers: int, images: Tensor, outputs: int) -> Iterator[nn.Module]:
    """`images` is the largest batch that comes, or one like it."""
    net.share_memory()
    rows = len(images)
    memories = []
    for _ in range(workers):
        gradients = [shared(parameter.shape) for parameter in net.parameters()]
        memories.append(Memory(shared(images.shape), shared((rows, outputs)), shared((rows, outputs)), gradients))
    with processes(run_worker, [(net, memory) for memory in memories]) as connections:
        answers(connections, [0] * workers)  # all have started
        yield ModelByHand(net, memories, connections)


def shared(shape: Sequence[int]) -> Tensor:
    memory: Tensor = torch.zeros(shape).share_memory_()  # type: ignore[no-untyped-call]
    return memory


def run_worker(net: nn.Module, memory: Memory, connection: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    parameters = list(net.parameters())
    logits = torch.empty(0)
    while (question := received(connection)) is not None:
        match question:
            case "backward":
                found = torch.autograd.grad(logits, parameters, memory.logit_gradients[: len(logits)])
                for own, gradient in zip(memory.gradients, found, strict=True):
                    own.copy_(gradient)
            case rows:
                logits = net(memory.images[:rows])
                memory.logits[:rows].copy_(logits.detach())
        connection.send(None)
