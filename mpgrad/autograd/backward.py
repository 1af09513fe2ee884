"""One backward of one call, from the node that makes it to the gates that take what came of it.

    Call.backward ──► Backward ──► home.send ──► a worker ──► settle ──► gates of inputs: take; of captures: take_captures
Whoever sends it notes on it what it needs on the way; only what came of it goes to the gates. Assumes: `settle` is called
once for each time that it is sent, or by who gives it up, in any thread; gates may run in several.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mpgrad.autograd.remote_graph import RemoteGraph
from mpgrad.torch_state.private import outside_transforms
from mpgrad.torch_state.vmap_levels import Level, within

__all__ = ["Backward", "Grads", "Promise", "Settled"]


class Promise(NamedTuple):
    """A gradient that another backward computes."""

    backward: Backward
    place: int  # among the gradients that it gives


Grads = Sequence[Sequence[torch.Tensor | Promise]]  # of the outputs of one call: the parts of each sum; none: no gradient


class Settled:
    """What somebody waits for: it has no outcome yet, or one, or an exception that is made anew for whoever asks.

    An exception that is kept would keep, in its traceback, what keeps it.
    """

    __slots__ = ("__weakref__", "dependents", "outcome", "warned")

    def __init__(self) -> None:
        self.outcome: Any = None
        self.dependents: Sequence[Callable[[], None]] = ()  # of the scheduling thread: to be told when it is there
        self.warned: Any = ()  # warnings of tasks

    @property
    def arrived(self) -> bool:
        return self.outcome is not None

    @property
    def has_failed(self) -> bool:
        return callable(self.outcome)

    def settle(self, outcome: Any) -> None:
        """With what came, or with a function that makes an exception."""
        self.outcome = outcome
        dependents, self.dependents = self.dependents, ()
        for tell in dependents:
            tell()


class Further(Protocol):
    """Where gradients are to be differentiated again: what they depend on."""

    def attach(self, graph: RemoteGraph, outputs: list[torch.Tensor], reached: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Give the gradients (`outputs`) their history: `graph`, which depends on the captures `reached`."""
        ...


class Backward(Settled):
    """What it has to compute, how far it has come, and what came of it.

    It holds the graph until it is settled, and longer only as the recipe of the graph of its gradients: one that fails may be
    held by that graph.
    """

    __slots__ = (
        "_found",
        "_graph",
        "_left",
        "_of_captures",
        "_ref",
        "_taking",
        "again",
        "apart",
        "call",
        "captures",
        "create",
        "deaths",
        "derived",
        "derived_number",
        "environment",
        "further",
        "grads",
        "graph_task",
        "home",
        "idle_deaths",
        "is_last",
        "keep",
        "levels",
        "modes",
        "number",
        "parts",
        "reached",
        "waits",
        "wanted",
        "was_eager",
        "whole",
        "worker",
    )

    # long because: all that is known of a backward is here, and nowhere else
    def __init__(
        self,
        graph: RemoteGraph,
        grads: Grads,
        graph_task: int,
        *,
        keep: bool,
        whole: bool,
        create: bool,
        wanted: tuple[int, ...],
        captures: bool,
        apart: bool,
        levels: tuple[Level, ...] = (),
        further: Further | None = None,
    ) -> None:
        """
        Args:
            graph_task: the number of the engine's backward that it is a part of.
            keep: the graph, for another backward.
            whole: from all outputs to all inputs and captures; none of the graph is left then, unless it is kept.
            create: a graph of the gradients.
            wanted: inputs whose gradients are needed.
            captures: their gradients are needed.
            apart: those of this call by themselves, rather than added up in the worker.
            levels: gradients are batches with these dimensions in front.
        """
        super().__init__()
        self.graph_task = graph_task
        self.home = graph.home
        self.call = graph.call
        self.number = graph.number
        self._graph: RemoteGraph | None = graph
        self._ref = weakref.ref(graph)
        self.keep = keep
        self.whole = whole
        self.create = create
        self.wanted = wanted
        self.captures = captures
        self.apart = apart
        self.levels = levels
        self.further = further
        # unless it fails nothing is left of the graph, which could be made again: so what is dead of it need not be kept
        could_be_made = graph.recipe is not None and not isinstance(graph.recipe, Backward)
        self.is_last = whole and could_be_made and not (keep or create)
        # on its way
        self.grads: Any = grads  # tensors and promises, later as they are packed, one after another
        self.parts = [len(parts) for parts in grads]  # of each output's gradient
        self.waits = any(isinstance(part, Promise) for parts in grads for part in parts)
        self.modes: Any = None
        self.environment: bytes | None = None  # as in `Conditions`
        self.worker: object = None  # in whose sum the captures' gradients are, unless they are apart
        self.was_eager = False  # that sum is the one of eager backwards
        self.again = False  # it was sent before, and may have freed its graph; that is no mistake of the caller's
        self.deaths = 0  # of workers that ran it
        self.idle_deaths = 0  # of workers that had it next
        # what came
        self.derived_number: int | None = None  # of the graph of the gradients, where there is to be one
        self.derived: RemoteGraph | None = None  # that graph
        self.reached: Sequence[int] = ()  # captures that it depends on, of those with more behind them
        self._left = len(wanted)  # inputs whose gradients nobody has taken
        self._found: dict[int, torch.Tensor | None] | None = None  # by input
        self._of_captures: Sequence[torch.Tensor | None] = ()
        self._taking = threading.Lock()  # gates of captures, and of tensors on each device, run in threads of their own

    @property
    def graph(self) -> RemoteGraph:
        """Assumes: it is not settled, or the engine holds its nodes."""
        graph = self._graph or self._ref()
        assert graph is not None, "a graph ended before its backward"
        return graph

    @property
    def items(self) -> int | range:
        """The item, or those of a bundle to whose results gradients have come."""
        return self.graph.given([count or None for count in self.parts])

    def settle(self, outcome: Any) -> None:
        if self.derived is None:
            self._graph = None
            if self.apart or not self.captures:  # else it may have to be sent once more: see `once_more`
                self.grads = ()
        super().settle(outcome)

    def once_more(self, apart: bool) -> Backward:
        """For the captures' gradients alone: the sum that these were a part of is lost, or is another one."""
        more = Backward(
            self.graph,
            (),
            self.graph_task,
            keep=self.keep,
            whole=self.whole,
            create=self.create,
            wanted=(),
            captures=True,
            apart=apart,
            levels=self.levels,
        )
        more.grads, more.parts, more.modes, more.environment = self.grads, self.parts, self.modes, self.environment
        more.again = True
        return more

    def forget(self) -> None:
        """Nobody takes what came any more. Its history leads to the graph of the gradients, which keeps this as its recipe."""
        self.derived, self._found, self._of_captures = None, {}, ()

    # --- the gates

    def take(self, number: int) -> torch.Tensor | None:
        """The gradient of input `number`; the first gate of a call to ask waits for all of them."""
        with self._taking:
            self._left -= 1
            return self._results().pop(number)

    def take_all(self) -> dict[int, torch.Tensor | None]:
        with self._taking:
            self._left = 0
            found = self._results()
            self._found = {}  # as `take` leaves it: a gradient's history may lead to this
            return found

    def promise(self, number: int) -> Promise | None:
        """Instead of `take`; None where the gradient has to be seen on its way, or is there."""
        if self.levels or self.create or self.was_eager:
            return None
        with self._taking:
            self._left -= 1
        return Promise(self, self.wanted.index(number))

    def take_captures(self) -> Sequence[torch.Tensor | None]:
        with self._taking:
            self._results()
        found, self._of_captures = self._of_captures, ()
        return found

    @property
    def is_taken(self) -> bool:
        return self._left == 0

    def _results(self) -> dict[int, torch.Tensor | None]:
        """The gradients that nobody has taken, by input; the first to ask waits. Assumes: `_taking` is held."""
        if self._found is None:
            with outside_transforms():
                arrived = self.home.wait(self)
                found = arrived.tensors()
                derived, self.derived = self.derived, None
                if derived is not None and self.further is not None:
                    places = arrived.connected()
                    outputs = [each for place in places if (each := found[place]) is not None]
                    attached = self.further.attach(derived, outputs, self.reached)
                    for place, output in zip(places, attached, strict=True):
                        found[place] = output
            self.further = None
            if self.levels:
                found = [None if each is None else within(each, self.levels) for each in found]
            count = len(self.wanted)
            self._found = dict(zip(self.wanted, found[:count], strict=True))
            self._of_captures = found[count:]
        return self._found
