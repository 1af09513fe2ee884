"""One run of a function: what the call is given, what it gives, and its graph; the items of a bundle one after another.

tensors of the call ──► loans.views ──► dress ──► the function ──► result_structure ──► CallRun: tensors, shapes, graph
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mpgrad.errors import UncarriedResultError
from mpgrad.pickling import structure
from mpgrad.pickling.modules import Namespaces
from mpgrad.pickling.state import loads_whole
from mpgrad.pickling.streams import Streams
from mpgrad.wire.messages import Forward, ForwardCall, Rerun, Structure
from mpgrad.wire.tensor_refs import (
    LEAF,
    REQUIRES_GRAD,
    TensorRef,
    check_carriable,
    flags_in,
    flags_of,
    have_attributes,
    need_no_pickle,
    with_more_behind,
)
from mpgrad.workers.eager import EagerBackwards
from mpgrad.workers.functions import Function, described, given_in_words
from mpgrad.workers.graph_edges import CHECKPOINTS, Edge, Entrance, dress, edge_of, edges_at, leaves_behind
from mpgrad.workers.graphs import GraphEdges
from mpgrad.workers.loans import Loans
from mpgrad.workers.station import Station
from mpgrad.workers.strays import Copies, copied_in
from mpgrad.workers.whereabouts import Stage, Tracker

__all__ = ["CallRun", "CallRunner"]


class CallRun:
    """What a call is given and gives, and where the gradients of those of its tensors that need them enter its graph."""

    def __init__(
        self,
        call: ForwardCall,
        function: Function,
        refs: Sequence[TensorRef],
        given: list[torch.Tensor],
        entrances: Sequence[Entrance],
        inference: bool,
        station: Station,
    ) -> None:
        """`given` are the tensors of `refs`, those of the call here; `entrances` lead to those that need gradients."""
        self.shapes: list[tuple[Structure, int]] = []  # of each item: how its tensors go together, and how many there are
        self.tensors: list[torch.Tensor] = []
        self.flags: list[int] = []
        self.inputs = edges_at(entrances) if call.bundle else []  # of bundles all of these are leaves
        self.graph: GraphEdges | None = None  # of all items, at the end
        self.unused: Sequence[int] = ()  # inputs that the graph does not lead to, see `Result`
        self._call = call
        self._refs = refs
        self._given = given
        self._entrances = entrances
        self._function = function
        self._inference = inference
        self._outputs: list[Edge] = []  # those of losses whose backward was an eager one have gone
        self._codes: list[int] = []  # where the outputs lie, in a pool with devices
        self._has_graph = False
        self._reentrant = False  # see `GraphEdges`
        self.strays: list[tuple[int, str]] = []  # see `Result`
        self._known: set[int] = set()  # ids of what it is given and captures, once that is asked
        self._station = station
        self._kept_leaves: list[torch.Tensor] = []  # results that are strays themselves: nodes of the graph, as captures are

    def items(self) -> Iterator[list[torch.Tensor]]:
        """The tensors of the call, or of each item of a bundle."""
        start = 0
        for _, count in self._call.bundle:
            yield self._given[start : start + count]
            start += count
        if not self._call.bundle:
            yield self._given

    def note_strays(self, found: Sequence[torch.Tensor], copied: Copies) -> None:
        """Of what an item gave, which was given what was `copied`."""
        if not self._known:
            self._known = set(map(id, itertools.chain(self._given, self._function.captures)))
        for number, words in self._function.strays.behind(found, self._known, copied).items():
            self.strays.append((len(self.tensors) + number, words))
            if found[number].is_leaf:
                self._kept_leaves.append(found[number])

    def connect(self, found: Sequence[torch.Tensor], reentrant: bool) -> list[torch.Tensor]:
        """An item gave these tensors, or all items did. Returns those behind which there is a graph: see `enter`."""
        flags = [flags_in_graph(tensor, self._given, self._function.captures, self._kept_leaves) for tensor in found]
        self.flags += flags
        outputs = [tensor for tensor, each in zip(found, flags, strict=True) if each & REQUIRES_GRAD and not each & LEAF]
        alone = not self._call.bundle
        if alone:
            self._given.clear()  # now only what was made of an input, if that is no leaf, still holds it
            self.inputs = edges_at(self._entrances)
        if not outputs or self._inference:
            return []
        search = self._function.search
        if search.is_on:
            search.look(outputs, reentrant)
        if alone:
            self.unused = unused_inputs(self._refs, self.inputs, outputs, reentrant)
        self._has_graph = True
        return outputs

    def enter(self, outputs: Sequence[torch.Tensor], reentrant: bool) -> None:
        """Gradients may come to these."""
        self._outputs += map(edge_of, outputs)
        self._codes += self._station.codes_of(outputs)
        self._reentrant = self._reentrant or reentrant

    def take_eagerly(self, eager: EagerBackwards, item: int, found: list[torch.Tensor], reentrant: bool) -> list[torch.Tensor]:
        """Run the backward of what an item gave, if that is a loss; returns what is to be sent."""
        outputs = self.connect(found, reentrant)
        if outputs and eager.take(item, self.inputs, found, reentrant):
            return [tensor.detach() for tensor in found]  # nothing holds the graph now: the next one gets its memory
        if outputs:
            self.enter(outputs, reentrant)
        return found

    def end(self) -> None:
        """All items have run."""
        if self._has_graph:
            function = self._function
            devices = self._station.device_map(self._codes, self._call.tensors, function.homes)
            self.graph = GraphEdges(function, self._outputs, self.inputs, self._reentrant, devices)


class CallRunner:
    """Runs calls, for their results or, a second time, for their graphs."""

    def __init__(self, loans: Loans, tracker: Tracker, station: Station) -> None:
        self._loans = loans
        self._tracker = tracker
        self._station = station

    def run(
        self,
        message: Forward | Rerun,
        call: ForwardCall,
        function: Function,
        payload: memoryview,
        stage: Stage,
        eager: EagerBackwards | None = None,
    ) -> CallRun:
        """Notes in `stage` how far it came. `eager`: what runs the backwards of losses at once."""
        station, kind, begin_item = self._station, self._loans.packer.kind, self._tracker.begin_item
        refs = station.named(call.tensors, function.gathers)
        given, entrances = dress(self._loans.views(refs, payload), flags_in(refs))
        run = CallRun(call, function, refs, given, entrances, message.modes.inference, station)
        before = CHECKPOINTS.count
        for stage.offset, own in enumerate(run.items()):
            stage.phase = "forward"
            if call.bundle:
                begin_item(stage.offset)
            if eager is not None:
                eager.begin()
            args, kwargs = arguments(call, stage.offset, own, function.modules)
            pickled = structure_of(call, stage.offset)
            copied = copied_in((args, kwargs), pickled, own) if isinstance(pickled, bytes) else {}
            item = call.item + stage.offset
            if message.seed is not None:
                station.seed_item(message.seed, item)
            if function.streams:
                function.streams.begin(item)
            started = time.perf_counter()
            try:
                value = function.target(*args, **kwargs)
            except BaseException:
                stage.given = given_in_words(args, kwargs)
                raise
            stage.own_seconds += time.perf_counter() - started
            stage.phase = "result"
            shape, found = result_structure(value, kind)
            if isinstance(pickled, bytes) or function.strays.may_be_reached():
                run.note_strays(found, copied)
            del args, kwargs, own, value
            run.shapes.append((shape, len(found)))
            if eager is not None:
                found, before = run.take_eagerly(eager, stage.offset, found, CHECKPOINTS.count != before), CHECKPOINTS.count
            run.tensors += found
        if eager is None and (outputs := run.connect(run.tensors, reentrant := CHECKPOINTS.count != before)):
            run.enter(outputs, reentrant)
        begin_item(-1)
        run.end()
        return run


def structure_of(call: ForwardCall, offset: int) -> Structure:
    return call.bundle[offset][0] if call.bundle else call.structure


def arguments(
    call: ForwardCall, offset: int, tensors: list[torch.Tensor], modules: Namespaces
) -> tuple[Sequence[Any], dict[str, Any]]:
    """(args, kwargs) of the item at `offset`, made of its tensors, those of claimed results last."""
    shape = structure_of(call, offset)
    if not isinstance(shape, bytes):
        return tensors, {}
    own = len(tensors) - sum(count for _, count in call.claimed)
    rest = iter(tensors[own:])
    claimed = [structure.loads_result(shape, list(itertools.islice(rest, count))) for shape, count in call.claimed]
    streams = Streams()
    args, kwargs = loads_whole(shape, tensors[:own], claimed, modules, streams)
    streams.begin(call.item + offset)  # of generators that code captures which comes with the item
    return args, kwargs


def flags_in_graph(tensor: torch.Tensor, *given: Sequence[torch.Tensor]) -> int:
    """Of a result. A leaf that `fn` was given is a node of the graph; one that it made is a fresh leaf in the parent too."""
    if type(tensor) is torch.Tensor:  # most are
        if not tensor.requires_grad:
            return LEAF
        if tensor.grad_fn is not None:
            return REQUIRES_GRAD
    flags = flags_of(tensor)
    if flags & LEAF and flags & REQUIRES_GRAD and any(tensor is each for each in itertools.chain(*given)):
        flags &= ~LEAF
    return flags


def unused_inputs(
    refs: Sequence[TensorRef], edges: Sequence[Edge | None], outputs: Sequence[torch.Tensor], reentrant: bool
) -> list[int]:
    """See `Result.unused`: of the leaves with hooks those that no output leads to, and what `edges_at` found no edge for."""
    looked_for = {id(edge): number for number in with_more_behind(refs) if isinstance(edge := edges[number], torch.Tensor)}
    unled_to = looked_for.keys() - leaves_behind(outputs, looked_for, reentrant)
    return [number for number, edge in enumerate(edges) if edge is None] + [looked_for[each] for each in unled_to]


def result_structure(value: Any, kind: str) -> tuple[Structure, list[torch.Tensor]]:
    """How the tensors of a result go together, and these. `kind` is that of the pool's devices, if it has some.

    Raises:
        UncarriedResultError: it cannot be carried.
    """
    shape: Structure = None
    if isinstance(value, torch.Tensor) and not have_attributes((value,)):
        tensors = [value]
    elif type(value) is tuple and value and need_no_pickle(value):
        shape, tensors = len(value), list(value)
    else:
        try:
            shape, tensors = structure.dumps(value)
        except Exception as error:
            from mpgrad.pickling.exceptions import why_not  # only an error needs it

            raise UncarriedResultError(why_not(error, "the result", value), repr(error), described(value)) from error
    try:
        for tensor in tensors:
            check_carriable(tensor, "the result", None, kind)
    except TypeError as error:
        raise UncarriedResultError(str(error), repr(error), described(value)) from error
    return shape, tensors
