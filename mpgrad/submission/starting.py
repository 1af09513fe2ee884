"""The start of an operation. A `Source` gives the arguments of its calls. The function is checked
and pickled, captures are packed, and modes and a seed are fixed. Caller only.

    refuse what cannot run ─► pickle the function ─► seed ─► captures packed, modes ─► an operation
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
from mpgrad.errors import ONE_CALL, CallNames
from mpgrad.machine.story import Story
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
    """Begins the operations of a pool, as the pool's options say."""

    def __init__(self, options: PoolOptions, scheduler: Scheduler) -> None:
        self._options = options
        self._scheduler = scheduler
        self._draws = options.traits.own_generators
        self._recent = RecentFunctions()
        self._last_lone: SharedFunction | None = None

    # long because: a name for each thing that operations differ in
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
        """An operation without calls.

        Args:
            listener: who is told of what comes of it.
            like: the arguments of some of the calls.
            items: see `Source`.
            modes: other ones than the caller's, and no random numbers.
            one_by_one: its results are fetched so, and differentiated.

        Raises:
            TypeError, ValueError, pickle.PicklingError: the function cannot be sent, or the pool
                cannot do what is asked.
            PoolClosedError: after `close` or `terminate`.
            RuntimeError: PyTorch is tracing.
        """
        # ours are around the caller's
        name = "" if type(function).__module__.startswith("mpgrad.") else name_of(function)
        self.check_modes()
        function = under_global_hooks(under_hooks(callable_of(function)))
        pool, scheduler = self._options, self._scheduler
        seconds = pool.seconds(options.timeout)
        scheduler.life.check_open()
        with scheduler.tracer.span("pickles", name), outside_transforms():
            request = requested(options.device, pool.device_codes)
            pickled = pickled_function(function, scheduler.packer.kind, like, self._recent)
            seed = self.draw_seed() if modes is None else None  # now nothing is refused any more
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
        """The function for an operation. Lone calls in a row share one that has only its pickle:
        workers are told of it once, and see for each call that it is as it was."""
        scheduler = self._scheduler
        is_lone = is_lone and not (
            pickled.captures or pickled.state or request or scheduler.settings.in_caller
        )
        last = self._last_lone  # read once: another thread may submit, too
        # The same object: a pickle is only kept of what cannot change unseen.
        if is_lone and last is not None and last.pickled is pickled.pickled and last.names == names:
            return last
        shared = SharedFunction(
            pickled, scheduler.packer, scheduler.forget_function, names, request, is_lone
        )
        if is_lone:
            self._last_lone = shared
        return shared

    def _eager(self, pickled: bytes, modes: Modes, one_by_one: bool) -> EagerOptions | None:
        """How backwards of losses are run with their calls; None where nobody knows what gradient
        they will get.

        Where the caller's backward would run under other modes than the calls, it is another one.
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
        """
        Raises:
            RuntimeError: PyTorch records what is called, or the caller is in a mode that no call
                can be in.
        """
        check_untraced()
        self._scheduler.mode_check.look()

    def draw_seed(self) -> int | None:
        """A number of the caller's generator, where workers have generators that it can be given
        to."""
        return draw_seed() if self._draws else None


def name_of(function: object) -> str:
    """As people call it."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    if isinstance(function, types.BuiltinFunctionType):  # of a class that PyTorch hides
        return function.__name__
    # inherited, perhaps
    if isinstance(function, types.MethodType) and isinstance(function.__self__, type):
        return f"{name_of(function.__self__)}.{function.__name__}"
    return str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition(
        "<locals>."
    )[2]


def check_untraced() -> None:
    """Raises RuntimeError while PyTorch records what is called."""
    if (by := tracer()) is not None:
        raise RuntimeError(
            f"a pool call cannot be traced, its result would be taken for a constant (by: {by})"
        )


# --- what a function is to be called with


FIRST_LOOKED_AT = 4  # calls, for the classes of the user's modules that they bring
ITERATORS: tuple[type, ...] = type(iter([])), type(iter(())), type(iter(range(0)))
AT_REST = list, tuple, range, dict, set, frozenset, torch.Tensor, *ITERATORS


class Source(NamedTuple):
    """The calls of an operation, as the user gave them; taken from once."""

    calls: Iterable[Arguments]
    total: int | None  # how many, where that is known beforehand
    at_rest: bool  # they are all there: no code of the caller's runs between two of them
    noun: str = "item"  # see `CallNames`
    # what each call is given, where it can be looked at beforehand
    items: Iterable[Any] | ItemStreams | None = None

    @classmethod
    def of_items(cls, items: Iterable[Any]) -> Source:
        """Each item is the argument of a call."""
        each = iterator("the items", items)
        return cls(
            (((item,), {}) for item in each),
            length(items),
            is_at_rest(items),
            items=seen_again(items),
        )

    @classmethod
    def of_iterables(cls, first: Iterable[Any], *others: Iterable[Any]) -> Source:
        """An item of each iterable is an argument of a call. The shortest iterable ends the
        calls."""
        if not others:
            return cls.of_items(first)
        columns = Columns(first, *others)
        if any(seen_again(each) is None for each in columns.iterables):
            return cls.of_arguments(iter(columns))
        total = min(map(len, columns.iterables))  # type: ignore[arg-type]
        return cls(((row, {}) for row in columns), total, at_rest=True, items=columns)

    @classmethod
    def of_arguments(cls, arguments: Iterable[Iterable[Any]]) -> Source:
        """Each element has the arguments of a call."""
        each = iterator("the items", arguments)
        calls: Iterable[Arguments] = ((arguments_of(item), {}) for item in each)
        return cls(calls, length(arguments), are_at_rest(arguments), items=seen_again(arguments))

    @classmethod
    def of_one(cls, args: Iterable[Any], kwds: Mapping[str, Any] | None) -> Source:
        """The arguments of the only call."""
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
        except ValueError:  # written in C, and has no signature
            pass


class Columns:
    """The items of several iterables, side by side."""

    def __init__(self, *iterables: Iterable[Any]) -> None:
        self.iterables = iterables

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(iterator("the items", each) for each in self.iterables), strict=False)


def options_behind(*names: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Let a method of several iterables take these options by position, as multiprocessing does."""

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
    """Raises TypeError where there is none; of the mistake that swapped arguments are, says what is
    meant."""
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
    """Whether all items are there. Code of the caller that makes them one by one may write to one
    that it gave."""
    if type(iterable) is zip:
        return all(map(is_at_rest, iterable.__reduce__()[1]))
    return type(iterable) in AT_REST


def are_at_rest(arguments: Iterable[Iterable[Any]]) -> bool:
    """Whether all calls are there, with all arguments of each."""
    if type(arguments) is zip:
        return is_at_rest(arguments)
    each = seen_again(arguments)
    return each is not None and all(map(is_at_rest, each))


def seen_again(items: Iterable[Any]) -> Iterable[Any] | None:
    """The items, if they can be gone through now and once more later."""
    return items if is_at_rest(items) and not isinstance(items, Iterator) else None


def length(iterable: Iterable[Any]) -> int | None:
    """None where it cannot be known without taking the items."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def first_of(source: Source) -> tuple[Sequence[Arguments], Iterable[Arguments]]:
    """What the first few calls are given, if that is not plain tensors alone; and all calls. Only
    of those that are at rest."""
    if not source.at_rest:
        return (), source.calls
    calls = iter(source.calls)
    head = list(itertools.islice(calls, FIRST_LOOKED_AT))
    others = [call for call in head if call[1] or not need_no_pickle(call[0])]
    return others, itertools.chain(head, calls)


def callable_of(function: object) -> Callable[..., Any]:
    """`function` itself, or the `apply` of an `autograd.Function`; a context of PyTorch's own
    serves it in the worker."""
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        apply: Callable[..., Any] = function.apply
        return apply
    if not callable(function):
        raise TypeError(f"the function must be callable (given: {function!r})")
    return function
