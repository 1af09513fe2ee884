"""The start of an operation. A `Source` holds the arguments of its calls. The function is checked
and pickled, captures are packed, and modes and a seed are fixed. This module runs in the caller
only.

    refuse what cannot run ─► pickle the function ─► draw a seed ─► pack captures, read modes
        ─► an operation
Guarantees: an operation that is refused has drawn no random number of the caller's.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from mpgrad.autograd.gates import Captures
from mpgrad.autograd.remote_graph import OperationGradients
from mpgrad.calls.operations import NOBODY, Listener, Operation, SubmittedOperation
from mpgrad.calls.packing import (
    Arguments,
    OperationOptions,
    PickledFunction,
    Request,
    SharedFunction,
    pickled_function,
    requested,
)
from mpgrad.environment import PLACE
from mpgrad.errors import ONE_CALL, CallNames
from mpgrad.machine.story import Story
from mpgrad.pickling.modules import being_imported
from mpgrad.pickling.state import ItemStreams, RecentFunctions
from mpgrad.pickling.streams import drawn
from mpgrad.scheduling.gradients import OperationLink
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.submission.options import CallOptions, PoolOptions
from mpgrad.torch_state.modes import (
    Modes,
    current_modes,
    draw_seed,
    under_global_hooks,
    under_hooks,
)
from mpgrad.torch_state.private import outside_transforms, tracer, without_subclasses
from mpgrad.wire.messages import EagerOptions
from mpgrad.wire.tensor_refs import need_no_pickle, with_more_behind

__all__ = [
    "Source",
    "Starter",
    "callable_of",
    "check_untraced",
    "first_of",
    "iterator",
    "options_behind",
    "refuse_options",
]

T = TypeVar("T")
OF_OTHERS = {"timeout", "device"}


class Starter:
    """Begins the operations of a pool, with the pool's options."""

    def __init__(self, options: PoolOptions, scheduler: Scheduler) -> None:
        self._options = options
        self._scheduler = scheduler
        self._recent = RecentFunctions()
        self._last_lone: SharedFunction | None = None

    # long because: it names each thing in which operations differ
    def begin(
        self,
        function: Callable[..., Any],
        options: CallOptions,
        listener: Listener = NOBODY,
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
        """Return an operation without calls.

        Args:
            listener: the object that is notified of outcomes.
            like: the arguments of some of the calls.
            items: see `Source`.
            modes: modes in place of the caller's; no random numbers are drawn then.
            one_by_one: results are fetched and differentiated one by one.

        Raises:
            TypeError, ValueError, pickle.PicklingError: the function cannot be sent, or the pool
                does not support an option.
            PoolClosedError: the pool was closed or terminated.
            RuntimeError: PyTorch is tracing.
        """
        # mpgrad's own functions wrap the caller's, and have no name for users
        name = "" if type(function).__module__.startswith("mpgrad.") else name_of(function)
        self.check_modes()
        function = under_global_hooks(under_hooks(callable_of(function)))
        pool, scheduler = self._options, self._scheduler
        seconds = pool.seconds(options.timeout)
        scheduler.life.check_open()
        if pool.traits.is_process and (again := PLACE.importing & being_imported()):
            raise RuntimeError(
                f"a worker imports the module {min(again)!r}, which calls a pool with workers of "
                "its own while it is imported; these would import it too, and so on; put the call "
                'into a function, or under if __name__ == "__main__"'
            )
        with scheduler.tracer.span("pickles", name), outside_transforms():
            request = requested(options.device, pool.device_codes)
            pickled = pickled_function(function, scheduler.packer.kind, like, self._recent)
            seed = self.draw_seed() if modes is None else None  # nothing is refused from here on
            modes = modes or current_modes(scheduler.packer.kind)
            streams = (
                items if isinstance(items, ItemStreams) else ItemStreams(items, pickled.captures)
            )
            if pickled.captures:
                pickled = pickled._replace(captures=drawn(pickled.captures))
            names = CallNames(name, noun)
            shared = self._shared(pickled, names, request, is_lone=kind is SubmittedOperation)
            eager = self._eager(pickled.pickled, modes, one_by_one) if pool.predicts else None
            since = scheduler.settings.since
            environment = None if since is None else since.changes()
            story = Story()
            link = OperationLink(
                scheduler.gradients, shared, modes, environment, eager, pool.predicts
            )
            owner = OperationGradients(
                link, shared.number, shared.names, pool.deterministic, seconds, story
            )
            with without_subclasses():
                needing = [tensor for tensor in pickled.captures if tensor.requires_grad]
                captures = (
                    Captures(owner, needing, with_more_behind(shared.refs)) if needing else None
                )
        how = OperationOptions(
            shared,
            modes,
            seed,
            story,
            environment=environment,
            chunksize=options.chunksize,
            timeout=seconds,
            stop_at_failure=stop_at_failure and options.on_error == "raise",
            return_errors=options.on_error == "return",
            request=request,
            eager=eager,
            at_rest=at_rest,
            together=at_rest and scheduler.settings.retries > 0,
        )
        return kind(how, owner, captures, streams, listener)

    def _shared(
        self, pickled: PickledFunction, names: CallNames, request: Request | None, *, is_lone: bool
    ) -> SharedFunction:
        """Return the shared function of an operation. Successive single calls reuse one, if it
        consists of a pickle only. So workers get it once, and see that it has not changed."""
        scheduler = self._scheduler
        is_lone = is_lone and not (
            pickled.captures or pickled.state or request or scheduler.settings.in_caller
        )
        last = self._last_lone  # read once, because another thread may submit too
        # It must be the same bytes object. Pickles are kept only if no change can go unnoticed.
        if is_lone and last is not None and last.pickled is pickled.pickled and last.names == names:
            return last
        shared = SharedFunction(
            pickled, scheduler.packer, scheduler.forget_function, names, request, is_lone
        )
        if is_lone:
            self._last_lone = shared
        return shared

    def _eager(self, pickled: bytes, modes: Modes, one_by_one: bool) -> EagerOptions | None:
        """Return how backwards of losses run with their calls, or None if the gradient of the
        losses is unknown.

        It is also None if the caller's backward would run under other modes than the calls, and so
        would differ.
        """
        if modes.autocast or modes.anomaly or modes.inference or modes.device:
            return None
        predicted = self._scheduler.functions.predicted(pickled)
        if predicted is None:
            return None
        apart = (
            one_by_one
            or self._options.deterministic
            or torch.are_deterministic_algorithms_enabled()
        )
        return EagerOptions(predicted.gradient, keeps=not predicted.is_confirmed, apart=apart)

    def check_modes(self) -> None:
        """Refuse modes that calls cannot run under.

        Raises:
            RuntimeError: PyTorch is tracing, or the caller is in a mode that calls do not support.
        """
        check_untraced()
        self._scheduler.mode_check.look()

    def draw_seed(self) -> int | None:
        """Draw a number from the caller's generator, or return None if workers have no generators
        of their own."""
        return draw_seed() if self._options.traits.own_generators else None


def name_of(function: object) -> str:
    """Return the name of the function, as errors show it."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    if isinstance(function, types.BuiltinFunctionType):  # its class may be hidden by PyTorch
        return function.__name__
    # The method may be inherited, so its class comes from the method itself.
    if isinstance(function, types.MethodType) and isinstance(function.__self__, type):
        return f"{name_of(function.__self__)}.{function.__name__}"
    return str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition(
        "<locals>."
    )[2]


def check_untraced() -> None:
    """Raise RuntimeError if PyTorch is tracing."""
    if (by := tracer()) is not None:
        raise RuntimeError(
            f"a pool call cannot be traced: its result would become a constant (by: {by})"
        )


# --- the arguments of calls


# calls that are searched for classes of the user's modules
FIRST_LOOKED_AT = 4
ITERATORS: tuple[type, ...] = type(iter([])), type(iter(())), type(iter(range(0)))
AT_REST = list, tuple, range, dict, set, frozenset, torch.Tensor, *ITERATORS


class Source(NamedTuple):
    """The calls of an operation, as the user gave them. They are iterated over once."""

    calls: Iterable[Arguments]
    total: int | None  # the number of calls, if it is known beforehand
    at_rest: bool  # all calls exist, so none of the caller's code runs between two of them
    noun: str = "item"  # see `CallNames`
    # the arguments of each call, if they can be read beforehand
    items: Iterable[Any] | ItemStreams | None = None

    @classmethod
    def of_items(cls, items: Iterable[Any]) -> Source:
        """Make each item the argument of a call."""
        each = iterator("the items", items)
        return cls(
            (((item,), {}) for item in each),
            length(items),
            is_at_rest(items),
            items=seen_again(items),
        )

    @classmethod
    def of_iterables(cls, first: Iterable[Any], *others: Iterable[Any]) -> Source:
        """Make a call of one item from each iterable. The calls end with the shortest iterable."""
        if not others:
            return cls.of_items(first)
        columns = Columns(first, *others)
        if any(seen_again(each) is None for each in columns.iterables):
            return cls.of_arguments(iter(columns))
        total = min(map(len, columns.iterables))  # type: ignore[arg-type]
        return cls(((row, {}) for row in columns), total, at_rest=True, items=columns)

    @classmethod
    def of_arguments(cls, arguments: Iterable[Iterable[Any]]) -> Source:
        """Make each element the arguments of a call."""
        each = iterator("the items", arguments)
        calls: Iterable[Arguments] = ((arguments_of(item), {}) for item in each)
        return cls(calls, length(arguments), are_at_rest(arguments), items=seen_again(arguments))

    @classmethod
    def of_one(cls, args: Iterable[Any], kwds: Mapping[str, Any] | None) -> Source:
        """Make a single call with these arguments."""
        if kwds is not None and not isinstance(kwds, dict):
            if not isinstance(kwds, Mapping):
                raise TypeError(f"kwds must be a mapping (kwds: {kwds!r})")
            kwds = dict(kwds)
        call = args if type(args) is tuple else tuple(iterator("args", args))
        return cls([(call, kwds or {})], 1, at_rest=True, noun=ONE_CALL, items=())


def refuse_options(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError if `submit` was given an option of other methods that the function does not
    take as an argument."""
    for name in OF_OTHERS.intersection(given) if callable(function) else ():
        try:
            inspect.signature(function).bind_partial(**{name: given[name]})
        except TypeError:
            raise TypeError(
                f"submit passes its keyword arguments to the function, which takes no {name!r} "
                f"({name}: {given[name]!r}); use apply_async(function, args, {name}=...)"
                f"{', or cancel_after of the future' if name == 'timeout' else ''}"
            ) from None
        except ValueError:  # a C function may have no signature
            pass


class Columns:
    """The items of several iterables, side by side."""

    def __init__(self, *iterables: Iterable[Any]) -> None:
        self.iterables = iterables

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(iterator("the items", each) for each in self.iterables), strict=False)


def options_behind(*names: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Let a method of several iterables take these options by position, as in multiprocessing."""

    def decorated(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def called(*args: Any, **options: Any) -> T:
            start, others = args[:3], args[3:]  # self, the function and the first iterable
            more = tuple(itertools.takewhile(lambda each: isinstance(each, Iterable), others))
            behind = others[len(more) :]
            if len(behind) > len(names) or any(isinstance(each, Iterable) for each in behind):
                given = ", ".join(type(each).__name__ for each in others)
                raise TypeError(
                    f"{method.__name__} takes all iterables before {', '.join(names)} (given: "
                    f"{given})"
                )
            for name, value in zip(names, behind, strict=False):
                if name in options:
                    raise TypeError(f"{name} is given twice ({name}: {options[name]!r})")
                options[name] = value
            return method(*start, *more, **options)

        return called

    return decorated


def iterator(what: str, given: Iterable[Any]) -> Iterator[Any]:
    """Return `iter(given)`.

    Raises:
        TypeError: `given` is not iterable. If it is a function, the message names the right order.
    """
    try:
        return iter(given)
    except TypeError as error:
        order = f"; the function comes first, then {what}" if callable(given) else ""
        raise TypeError(f"{what} must be an iterable{order} (given: {given!r})") from error


def arguments_of(item: Iterable[Any]) -> tuple[Any, ...]:
    return (
        item
        if type(item) is tuple
        else tuple(iterator("an item, as the arguments of a call,", item))
    )


def is_at_rest(iterable: Iterable[Any]) -> bool:
    """Return whether all items exist. If the caller's code makes them one by one, it may write to
    an item that it has already given."""
    if type(iterable) is zip:
        return all(map(is_at_rest, iterable.__reduce__()[1]))
    return type(iterable) in AT_REST


def are_at_rest(arguments: Iterable[Iterable[Any]]) -> bool:
    """Return whether all calls and their arguments exist."""
    if type(arguments) is zip:
        return is_at_rest(arguments)
    each = seen_again(arguments)
    return each is not None and all(map(is_at_rest, each))


def seen_again(items: Iterable[Any]) -> Iterable[Any] | None:
    """Return the items if they can be iterated over more than once, or else None."""
    return items if is_at_rest(items) and not isinstance(items, Iterator) else None


def length(iterable: Iterable[Any]) -> int | None:
    """Return the length, or None if only iteration would tell."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def first_of(source: Source) -> tuple[Sequence[Arguments], Iterable[Arguments]]:
    """Return the first few calls whose arguments are not just plain tensors, and all calls. The
    former is empty unless the source is at rest."""
    if not source.at_rest:
        return (), source.calls
    calls = iter(source.calls)
    head = list(itertools.islice(calls, FIRST_LOOKED_AT))
    others = [call for call in head if call[1] or not need_no_pickle(call[0])]
    return others, itertools.chain(head, calls)


def callable_of(function: object) -> Callable[..., Any]:
    """Return `function` itself, or the `apply` of an `autograd.Function`. In the worker, PyTorch
    gives `apply` its usual context."""
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        apply: Callable[..., Any] = function.apply
        return apply
    if not callable(function):
        raise TypeError(f"the function must be callable (given: {function!r})")
    return function
