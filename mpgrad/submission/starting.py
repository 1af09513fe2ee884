"""How an operation begins: a function is checked and pickled, its captures are placed, modes and a seed are fixed. Caller only.

    what may be refused, refused; function pickled ──► seed ──► captures placed, modes ──► an operation
Guarantees: what is refused has drawn no random number of the caller's.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mpgrad.autograd.gates import Captures
from mpgrad.calls.device_choice import requested
from mpgrad.calls.homes import OperationHome
from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import Arguments, OperationOptions, SharedFunction, pickled_function
from mpgrad.errors import CallNames
from mpgrad.pickling.item_streams import ItemStreams
from mpgrad.pickling.streams import drawn
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.submission.options import CallOptions, PoolOptions
from mpgrad.submission.source import callable_of
from mpgrad.torch_state.modes import Modes, current_modes, draw_seed, under_global_hooks, under_hooks
from mpgrad.torch_state.private import outside_transforms, tracer
from mpgrad.wire.messages import Eager
from mpgrad.wire.tensor_refs import with_more_behind

__all__ = ["Starter", "check_untraced"]


class Starter:
    """Begins the operations of a pool, as the pool's options say."""

    def __init__(self, options: PoolOptions, scheduler: Scheduler) -> None:
        self._options = options
        self._scheduler = scheduler
        self._draws = options.traits.own_generators

    # long because: a name for each thing that operations differ in
    def begin(
        self,
        function: Callable[..., Any],
        options: CallOptions,
        *,
        like: Sequence[Arguments] = (),
        items: Iterable[Any] | ItemStreams | None = None,
        modes: Modes | None = None,
        noun: str = "item",
        stop_at_failure: bool = True,
        one_by_one: bool = False,
        at_rest: bool = False,
        kind: type[Operation] = Operation,
    ) -> Operation:
        """An operation without calls.

        Args:
            like: the arguments of some of the calls.
            items: see `Source`.
            modes: other ones than the caller's, and no random numbers.
            one_by_one: its results are fetched so, and differentiated.

        Raises:
            TypeError, ValueError, pickle.PicklingError: the function cannot be carried, or the pool cannot do what is asked.
            PoolClosedError: after `close` or `terminate`.
            RuntimeError: PyTorch is tracing.
        """
        name = "" if type(function).__module__.startswith("mpgrad.") else name_of(function)  # ours are around the caller's
        self.check_modes()
        function = under_global_hooks(under_hooks(callable_of(function)))
        pool, scheduler = self._options, self._scheduler
        seconds = pool.seconds(options.timeout)
        scheduler.life.check_open()
        with scheduler.notes.lap("pickles", name), outside_transforms():
            request = requested(options.device, pool.device_codes)
            pickled = pickled_function(function, scheduler.packer.kind, like)
            seed = self.draw_seed() if modes is None else None  # now nothing is refused any more
            modes = modes or current_modes(scheduler.packer.kind)
            streams = items if isinstance(items, ItemStreams) else ItemStreams(items, pickled.captures)
            pickled = pickled._replace(captures=drawn(pickled.captures))
            shared = SharedFunction(pickled, scheduler.packer, scheduler.forget_function, CallNames(name, noun), request)
            eager = self._eager(pickled.pickled, modes, one_by_one) if pool.predicts else None
            home = OperationHome(scheduler.gradients, shared, modes, pool.deterministic, seconds, eager, pool.predicts)
            needing = [tensor for tensor in pickled.captures if tensor.requires_grad]
            captures = Captures(home, needing, with_more_behind(shared.refs)) if needing else None
        since = scheduler.settings.since
        how = OperationOptions(
            shared,
            modes,
            seed,
            environment=None if since is None else since.changes(),
            chunksize=options.chunksize,
            timeout=seconds,
            stop_at_failure=stop_at_failure and options.on_error == "raise",
            return_errors=options.on_error == "return",
            request=request,
            eager=eager,
            at_rest=at_rest,
        )
        return kind(how, home, captures, streams)

    def _eager(self, pickled: bytes, modes: Modes, one_by_one: bool) -> Eager | None:
        """How backwards of losses are run with their calls; None where nobody knows what gradient they will get.

        Where the caller's backward would run under other modes than the calls, it is another one.
        """
        if modes.autocast or modes.anomaly or modes.inference or modes.device:
            return None
        predicted = self._scheduler.predicted(pickled)
        if predicted is None:
            return None
        apart = one_by_one or self._options.deterministic or torch.are_deterministic_algorithms_enabled()
        return Eager(predicted.gradient, keeps=not predicted.is_confirmed, apart=apart)

    def check_modes(self) -> None:
        """
        Raises:
            RuntimeError: PyTorch records what is called, or the caller is in a mode that no call can be in.
        """
        check_untraced()
        self._scheduler.watch.look()

    def draw_seed(self) -> int | None:
        """A number of the caller's generator, where workers have generators that it can be given to."""
        return draw_seed() if self._draws else None


def name_of(function: object) -> str:
    """As people call it."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    if isinstance(function, types.BuiltinFunctionType):  # of a class that PyTorch hides
        return function.__name__
    if isinstance(function, types.MethodType) and isinstance(function.__self__, type):  # inherited, perhaps
        return f"{name_of(function.__self__)}.{function.__name__}"
    return str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2]


def check_untraced() -> None:
    """Raises RuntimeError while PyTorch records what is called."""
    if (by := tracer()) is not None:
        raise RuntimeError(f"a pool call cannot be traced, its result would be taken for a constant (by: {by})")
