"""The functions that a worker has been given: made of bytes and captures, until the caller forgets
them; and what comes of them.

    Define ──► FunctionTable: Code (a pickle, which operations share), Function (of one operation)
    backwards ──► FunctionSums: captures' gradients, added up until the caller collects them
    a call that raises ──► failure: the exception, its traceback, and what the function was given
A sum of gradients is one tensor for many calls of this worker.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.errors import traceback_of
from mpgrad.pickling.exceptions import carried
from mpgrad.pickling.modules import PLACED, Namespaces
from mpgrad.pickling.state import Recent, loads_with_state
from mpgrad.pickling.streams import Streams
from mpgrad.torch_state.modes import UnderGlobalHooks
from mpgrad.torch_state.private import Level, plus
from mpgrad.wire.messages import Define, Failure, Forget
from mpgrad.wire.tensor_refs import PARAMETER, REQUIRES_GRAD, with_more_behind
from mpgrad.workers.graph_edges import CaptureSearch, Edge
from mpgrad.workers.loans import Loans
from mpgrad.workers.station import Station
from mpgrad.workers.strays import Strays, copied_in

__all__ = [
    "CaptureSums",
    "Code",
    "Function",
    "FunctionSums",
    "FunctionTable",
    "described",
    "failure",
    "given_in_words",
]

GARBAGE_BYTES = 64 << 20


class Code:
    """A pickled function, which operations have in common. Their captures differ."""

    __slots__ = ("is_cut_short", "pickled")

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled
        self.is_cut_short = False  # eager backwards were run for a part of a call's items, in vain


class Function(NamedTuple):
    """A function as it is during one operation."""

    code: Code
    target: Callable[..., Any]
    captures: list[torch.Tensor]
    modules: Namespaces  # of the user's own, as it sees them
    edges: list[Edge]  # of the captures that need gradients
    versions: list[int]  # of the captures before any call
    gathers: bool  # the tensors of its calls come to our device
    homes: Sequence[int] | None  # where the captures that need gradients lie in the caller, in a pool with devices
    search: CaptureSearch
    sums: FunctionSums
    streams: Streams  # of the generators that it captures
    strays: Strays

    def running(self) -> contextlib.AbstractContextManager[object]:
        """In which it and its backward are to run: with the caller's hooks, and among the caller's modules."""
        if not isinstance(self.target, UnderGlobalHooks):
            return self.modules
        stack = contextlib.ExitStack()
        stack.enter_context(self.target.running())
        stack.enter_context(self.modules)
        return stack

    @property
    def has_written(self) -> bool:
        """A call wrote to a capture, or gave it a gradient."""
        return [each._version for each in self.captures] != self.versions or any(
            edge.grad is not None for edge in self.edges if isinstance(edge, torch.Tensor)
        )


class FunctionTable:
    """By number. In the place of one that could not be loaded is the failure that each of its calls gets."""

    def __init__(self, loans: Loans, station: Station) -> None:
        self._loans = loans
        self._station = station
        self._functions: dict[int, Function | Failure] = {}
        self._codes: dict[int, Code] = {}
        self._states: Recent[bytes] = Recent()  # of the user's modules, see `ModulesState`
        self._forgotten_bytes = 0  # captures of forgotten functions since the last collection

    def __getitem__(self, number: int) -> Function | Failure:
        return self._functions[number]

    def get(self, number: int) -> Function | None:
        """None also where it could not be loaded."""
        known = self._functions.get(number)
        return known if isinstance(known, Function) else None

    def define(self, message: Define) -> None:
        """Loads the function at once; if that raises, each of its calls fails with it."""
        if message.pickled is not None:
            self._codes[message.code] = Code(message.pickled)
        if message.state is not None:
            self._states.put(message.state.number, message.state.pickled or self._states.get(message.state.number) or b"")
        try:
            self._functions[message.function] = self._loaded(message)
        except BaseException as error:
            self._functions[message.function] = failure(error, "loading the function")

    def _loaded(self, message: Define) -> Function:
        refs = self._station.named(message.captures, message.gathers)
        with torch.inference_mode(False):  # of the caller's thread, where that is ours; they are used under others too
            tensors = self._loans.captures(message.slot, refs)
            captures = [as_captured(tensor, ref.flags) for tensor, ref in zip(tensors, refs, strict=True)]
        edges: list[Edge] = [tensor for tensor in captures if tensor.requires_grad]
        number, state, in_state = 0, b"", 0
        if message.state is not None:
            number, in_state = message.state.number, message.state.tensors
            state = self._states.get(number) or b""
        code = self._codes[message.code]
        target, modules, streams = loads_with_state(code.pickled, captures, number, state, in_state)
        return Function(
            code,
            target,
            captures,
            modules,
            edges,
            versions=[tensor._version for tensor in captures],
            gathers=message.gathers,
            homes=self._station.codes_in(message.captures),
            search=CaptureSearch({id(edges[number]): number for number in with_more_behind(message.captures)}),
            sums=FunctionSums(),
            streams=streams,
            strays=Strays((code.pickled, state), copied_in(target, code.pickled, captures)),
        )

    def forget(self, message: Forget) -> None:
        """Drops functions and pickles; collects garbage after every `GARBAGE_BYTES` of captures."""
        for number in message.functions:
            known = self._functions.pop(number, None)
            if isinstance(known, Function):
                PLACED.take_back(known.modules)
                if known.modules.placement is not None:
                    known.modules.placement.forget()
        for code in message.codes:
            self._codes.pop(code, None)
        self._forgotten_bytes += message.nbytes
        if self._forgotten_bytes > GARBAGE_BYTES:  # a recursive function is a cycle, which would keep its captures for long
            self._forgotten_bytes = 0
            known = None
            gc.collect()


def as_captured(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    needs_grad = bool(flags & REQUIRES_GRAD)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=needs_grad)
    return tensor.requires_grad_(needs_grad)


# --- sums of captures' gradients


MOST_BACKWARDS = 256  # of one function at a time


class CaptureSums:
    """Capture gradients of one function in one backward, and of how many calls they are the sum."""

    def __init__(self, count: int) -> None:
        self.calls = 0
        self.sums: list[torch.Tensor | None] = [None] * count
        self._owned = [False] * count  # the first gradient may share memory with others; a sum of ours does not

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """One gradient for each capture, None where there is none. Writes to sums of its own only."""
        for k, grad in enumerate(grads):
            held = self.sums[k]
            if grad is None:
                continue
            if held is None:
                self.sums[k] = grad
            elif self._owned[k]:
                held.add_(grad)
            else:
                total = self.sums[k] = plus(held, grad)
                self._owned[k] = total.layout is torch.strided


class FunctionSums:
    """All sums of one function: of each backward, and (None) of the eager ones."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int | None, tuple[Level, ...]], CaptureSums] = {}

    def of(self, graph_task: int | None, levels: tuple[Level, ...], count: int) -> CaptureSums:
        """That of `count` captures; whoever adds a call to it counts the call."""
        key = graph_task, levels
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = CaptureSums(count)
            if len(self._sums) > MOST_BACKWARDS:  # a backward that failed leaves its sum behind
                del self._sums[next(iter(self._sums))]
        return sums

    def take(self, graph_task: int | None, levels: tuple[Level, ...]) -> CaptureSums | None:
        """What was added up, which is not here any more then."""
        return self._sums.pop((graph_task, levels), None)


# --- failures


def failure(error: BaseException, phase: str, offset: int = 0, given: str = "") -> Failure:
    return Failure(carried(error), traceback_of(error), phase, offset, given)


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


def described(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # it is the user's code, and what the result is wanted for is an error's text
        return object.__repr__(value)
