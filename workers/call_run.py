"""What a call is given, and what it gave or raised, between `mpgrad.wire.messages` and what the function sees."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from mpgrad.workers.graphs import Edge, Entrance, Graph, Search, edge_of, edges_at, leaves_behind
from mpgrad.workers.surroundings import SURROUNDINGS

from mpgrad.errors import UncarriedResultError
from mpgrad.memory.accelerator import code_of
from mpgrad.pickling import structure
from mpgrad.pickling.exceptions import carried
from mpgrad.pickling.modules import Live
from mpgrad.pickling.state import loads_whole
from mpgrad.pickling.uncarried import why_not
from mpgrad.wire.messages import Failure, ForwardCall, Structure
from mpgrad.wire.tensor_refs import (
    LEAF,
    REQUIRES_GRAD,
    TensorRef,
    are_distinct_tensors,
    check_carriable,
    flags_in,
    flags_of,
    with_more_behind,
)

__all__ = ["Function", "Made", "Stage", "arguments", "failure", "given_in_words", "result_structure"]


class Function(NamedTuple):
    code: int
    target: Callable[..., Any]
    captures: list[torch.Tensor]
    modules: Live  # of the user's own, as it sees them
    edges: list[Edge]  # of the captures that need gradients
    versions: list[int]  # of the captures before any call
    gathers: bool  # the tensors of its calls come to our device
    names: list[int]  # where those captures lie in the caller
    precise: bool  # these gradients are not of half precision
    search: Search
    flags: Sequence[int]  # of the captures


class Stage:
    """How far a call has come, for its failure."""

    def __init__(self) -> None:
        self.phase = "forward"
        self.offset = 0  # of the item, in a bundle
        self.given = ""  # to the function, where it raised


class Made:
    """What a call is given and gives, and where the gradients of those of its tensors that need them enter its graph."""

    def __init__(
        self,
        call: ForwardCall,
        function: Function,
        refs: Sequence[TensorRef],
        given: list[torch.Tensor],
        entrances: Sequence[Entrance],
        inference: bool,
        on_devices: bool,
    ) -> None:
        """`given` are the tensors of `refs`, those of the call here; `entrances` lead to those that need gradients."""
        self.shapes: list[tuple[Structure, int]] = []  # of each item: how its tensors go together, and how many there are
        self.tensors: list[torch.Tensor] = []
        self.flags: list[int] = []
        self.inputs = edges_at(entrances) if call.bundle else []  # of bundles all of these are leaves
        self.outputs: list[Edge] = []  # those of losses whose backward was run ahead have gone
        self.codes: list[int] = []  # where the outputs lie, in a pool with devices
        self.has_graph = False
        self.whole = False  # see `Graph`
        self.graph: Graph | None = None  # of all items
        self.unused: Sequence[int] = ()  # inputs that the graph does not lead to, see `Result`
        self._call = call
        self._refs = refs
        self._given = given
        self._entrances = entrances
        self._function = function
        self._inference = inference
        self._on_devices = on_devices

    def items(self) -> Iterator[list[torch.Tensor]]:
        """The tensors of the call, or of each item of a bundle."""
        start = 0
        for _, count in self._call.bundle:
            yield self._given[start : start + count]
            start += count
        if not self._call.bundle:
            yield self._given

    def arrived(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from zip(self._given, flags_in(self._refs), strict=False)  # when the function has ended they are forgotten
        yield from zip(self._function.captures, self._function.flags, strict=True)

    def connect(self, found: Sequence[torch.Tensor], whole: bool) -> list[torch.Tensor]:
        """An item gave these tensors, or all items did. Returns those behind which there is a graph: see `enter`."""
        flags = [flags_in_graph(tensor, self._given, self._function.captures) for tensor in found]
        self.flags += flags
        outputs = [tensor for tensor, each in zip(found, flags, strict=True) if each & REQUIRES_GRAD and not each & LEAF]
        if outputs:
            SURROUNDINGS.mark()  # their backward may reach around what the call was given
        alone = not self._call.bundle
        if alone:
            self._given.clear()  # now only what was made of an input, if that is no leaf, still holds it
            self.inputs = edges_at(self._entrances)
        if not outputs or self._inference:
            return []
        search = self._function.search
        if search.is_on:
            search.look(outputs, whole)
        if alone:
            self.unused = unused_inputs(self._refs, self.inputs, outputs, whole)
        self.has_graph = True
        return outputs

    def enter(self, outputs: Sequence[torch.Tensor], whole: bool) -> None:
        """Gradients may come to these."""
        self.outputs += map(edge_of, outputs)
        if self._on_devices:
            self.codes += map(code_of, outputs)
        self.whole = self.whole or whole


def arguments(
    call: ForwardCall, offset: int, tensors: list[torch.Tensor], modules: Live
) -> tuple[Sequence[Any], dict[str, Any]]:
    shape = call.bundle[offset][0] if call.bundle else call.structure
    if not isinstance(shape, bytes):
        return tensors, {}
    own = len(tensors) - sum(count for _, count in call.claimed)
    rest = iter(tensors[own:])
    claimed = [structure.loads_result(shape, list(itertools.islice(rest, count))) for shape, count in call.claimed]
    args, kwargs = loads_whole(shape, tensors[:own], claimed, modules)
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
    refs: Sequence[TensorRef], edges: Sequence[Edge | None], outputs: Sequence[torch.Tensor], whole: bool
) -> list[int]:
    """See `Result.unused`: of the leaves with hooks those that no output leads to, and what `edges_at` found no edge for."""
    looked_for = {id(edge): number for number in with_more_behind(refs) if isinstance(edge := edges[number], torch.Tensor)}
    unled_to = looked_for.keys() - leaves_behind(outputs, looked_for, whole)
    return [number for number, edge in enumerate(edges) if edge is None] + [looked_for[each] for each in unled_to]


def result_structure(value: Any, kind: str) -> tuple[Structure, list[torch.Tensor]]:
    """How the tensors of a result go together, and these. `kind` is that of the pool's devices, if it has some.

    Raises:
        UncarriedResultError: it cannot be carried.
    """
    shape: Structure = None
    if isinstance(value, torch.Tensor):
        tensors = [value]
    elif type(value) is tuple and value and are_distinct_tensors(value):
        shape, tensors = len(value), list(value)
    else:
        try:
            shape, tensors = structure.dumps(value)
        except Exception as error:
            raise UncarriedResultError(why_not(error, "the result", value), repr(error), described(value)) from error
    try:
        for tensor in tensors:
            check_carriable(tensor, "the result", None, kind)
    except TypeError as error:
        raise UncarriedResultError(str(error), repr(error), described(value)) from error
    return shape, tensors


def described(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # it is the user's code, and what the result is wanted for is an error's text
        return object.__repr__(value)


def failure(error: BaseException, phase: str, offset: int = 0, given: str = "") -> Failure:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(carried(error), text, phase, offset, given)


MOST_IN_WORDS = 6  # values of each container


def in_words(value: Any, depth: int = 2) -> str:
    """Tensors by dtype and shape, the rest by type; runs no code of the user's."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"array {value.dtype} {list(value.shape)}"
    if kind not in (tuple, list, dict):
        return kind.__name__
    opening, closing = "()" if kind is tuple else "[]" if kind is list else "{}"
    if depth == 0:
        return f"{opening}...{closing}"
    pairs = [("", each) for each in value] if kind is not dict else [(f"{named(key)}: ", each) for key, each in value.items()]
    return opening + all_in_words(pairs, depth - 1) + closing


def all_in_words(pairs: Sequence[tuple[str, Any]], depth: int) -> str:
    words = [name + in_words(value, depth) for name, value in pairs[:MOST_IN_WORDS]]
    left = len(pairs) - len(words)
    return ", ".join([*words, f"and {left} more"] if left else words)


def named(key: object) -> str:
    return repr(key) if type(key) in (str, int) else type(key).__name__


def given_in_words(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    return all_in_words([*(("", each) for each in args), *((f"{name}=", each) for name, each in kwargs.items())], 2)
