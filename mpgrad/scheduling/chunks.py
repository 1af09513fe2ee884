"""What workers are sent: backwards and requests on their way, and the chunks in which they and calls travel. Caller's side.

a call's backward ──► Differentiation ──► SentGradients ──┐
an operation's calls ─────────────────────────────────────┼──► Chunk: sent, and not answered yet
the captures' gradients ──► CaptureRequest ───────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpgrad.autograd.remote_graph import Order, Promise, RemoteGraph
from mpgrad.calls.homes import GradientReply
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import PackedCall
from mpgrad.torch_state.modes import Modes
from mpgrad.torch_state.vmap_levels import Level
from mpgrad.wire.tensor_packing import Placed, Together

__all__ = ["CaptureRequest", "Chunk", "Differentiation", "SentGradients"]


class Differentiation(NamedTuple):
    """A backward of one call: also the recipe of the graph of its gradients."""

    graph: RemoteGraph
    order: Order
    number: int | None  # of the graph of the gradients, where there is to be one
    grads: Sequence[Placed | Promise] | Together  # all parts of all gradients; promises, if any, until it is sent
    parts: list[int]  # how many each has
    modes: Modes
    environment: bytes | None  # as in `Conditions`

    @property
    def is_last(self) -> bool:
        """Unless it fails nothing is left of the graph, which could be made again: so what is dead of it need not be kept."""
        order = self.order
        return order.whole and not (order.keep or order.create) and isinstance(self.graph.recipe, PackedCall)

    @property
    def items(self) -> int | range:
        """Of the item, or of those of a bundle to whose results gradients have come."""
        return self.graph.given([count or None for count in self.parts])


class SentGradients:
    """A backward on its way to the worker that keeps the graph, or that makes it again."""

    __slots__ = ("again", "deaths", "idle_deaths", "reply", "timeout", "what")

    def __init__(self, what: Differentiation, reply: GradientReply, timeout: float | None, again: bool) -> None:
        self.what = what
        self.reply = reply
        self.timeout = timeout
        self.again = again  # it was sent before, and may have freed its graph; that is no mistake of the caller's
        self.deaths = 0  # of workers that ran it
        self.idle_deaths = 0  # of workers that had it next

    @property
    def graph_task(self) -> int:
        return self.what.order.graph_task

    def set_apart(self) -> None:
        """Its captures' gradients come with the reply: the sum that they were to be part of is with another worker."""
        if self.what.order.captures and not self.what.order.apart:
            self.what = self.what._replace(order=self.what.order._replace(apart=True))
            self.reply.apart = True


class CaptureRequest(NamedTuple):
    function: int
    graph_task: int | None  # None: of the backwards ahead
    levels: tuple[Level, ...]
    timeout: float | None
    reply: GradientReply


class Chunk(NamedTuple):
    """What a worker has been sent and has not answered: calls of an operation, backwards, or a request for captures."""

    operation: Operation | None
    calls: list[tuple[int, PackedCall]]  # with the call's number
    gradients: list[SentGradients]
    captures: CaptureRequest | None
    timeout: float | None  # of each call, in seconds

    def fail_replies(self, error: BaseException) -> None:
        for sent in self.gradients:
            sent.reply.fail(error)
        if self.captures is not None:
            self.captures.reply.fail(error)

    def wanted(self) -> list[bool]:
        """Of each call or backward: whether anybody waits for it."""
        if self.operation is not None:
            return [call.index < self.operation.limit for _, call in self.calls]
        requests: list[SentGradients | CaptureRequest] = [*self.gradients]
        if self.captures is not None:
            requests.append(self.captures)
        return [not each.reply.arrived for each in requests]
