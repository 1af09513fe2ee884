"""Calls that would cost more to send than to run: they run in the caller's thread, and mean what they would in a worker.

    cost not known ──► send the first few ──► known: cheap ──► run here, HERE_SECONDS at a time, for as long as it is
                                                     dear ──► send all                    └─► dear after all: send the rest
                                                     cheap, but for long nothing was sent ──► send all, to see what that takes
A worker sees copies of its own: of the function, of what it captures, of its arguments. So does a call here. What a worker
would do differently nevertheless (draw from generators of its own, write to a capture, refuse a result, raise with the item's
name) is noticed, and then all that ran here is forgotten and sent; the function is sent ever after.

Guarantees: values, gradients and errors as from a worker; the caller's tensors and random generators are not written to. Any
    thread may map, several at once: `TURNS` has them run calls one after another.
Assumes: what a function does to modules, files and the process it may do here; `Pool(send="always")` is for others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.overrides import TorchFunctionMode

from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import Arguments, PickledFunction, lone_tensors
from mpgrad.collector import LONGEST_HOLD, collector_held, let_collector_look
from mpgrad.pickling import state, structure
from mpgrad.pickling.compiled import MARK
from mpgrad.pickling.modules import Live
from mpgrad.pickling.streams import Root, Streams
from mpgrad.pickling.uses import leads_to_libraries
from mpgrad.scheduling.costs import Costs
from mpgrad.torch_state.leaves import held_leaves
from mpgrad.torch_state.modes import TURNS, RandomState
from mpgrad.torch_state.private import SharedHooks, dual_level_is_active, have_plain_memory, saved_tensor_hooks
from mpgrad.transforms import may_be_followed
from mpgrad.wire.tensor_packing import are_alike
from mpgrad.wire.tensor_refs import check_carriable, need_no_pickle

__all__ = ["AdaptiveMap", "LocalFunction", "UnusualError", "is_at_rest", "may_run_here"]

HERE_SECONDS = 0.02  # of calls, before their cost is looked at again
FIRST_CALLS = 16  # of a function whose cost is not known; more for many workers
CALLS_AT_ONCE = 256
CALLS_TOGETHER = 32  # for which copies are made before the first one runs
MOST_COPIED = 1 << 20  # bytes of these copies
ITERATORS: tuple[type, ...] = type(iter([])), type(iter(())), type(iter(range(0)))
AT_REST = list, tuple, range, dict, set, frozenset, torch.Tensor, *ITERATORS


class Sender(Protocol):
    def wait_until(self, satisfied: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def cancel(self, operation: Operation) -> None: ...

    def call_off(self, operation: Operation) -> None: ...


class AdaptiveMap:
    """One map. `begin(first=i)` makes an operation whose call 0 is item i; `add(operation, calls, seal)` sends calls of it."""

    def __init__(
        self,
        function: PickledFunction,
        costs: Costs,
        workers: int,
        begin: Callable[..., Operation],
        add: Callable[..., None],
        sender: Sender,
    ) -> None:
        self._function = function
        self._costs = costs
        self._workers = workers
        self._begin = begin
        self._add = add
        self._sender = sender
        self._sent: list[Operation] = []
        self._grads = False  # calls are given something that needs gradients

    def run(self, calls: Iterable[Arguments], total: int | None) -> list[Any]:
        """The results of all calls, in order; `total` is their number, where it is known."""
        started = time.perf_counter()
        calls = iter(calls)
        try:
            with collector_held():
                calls = self._look_at_first(calls)
                first = self._send_first(calls) if self._costs.are_unknown(self._function.pickled) else 0
                here, calls = self._run_here(calls, None if total is None else total - first)
                self._send_rest(calls, first + len(here), bool(here))
                decided = self._sender.wait_until(self._is_decided, LONGEST_HOLD)
            if not decided:
                self._sender.wait_until(self._is_decided)
        except BaseException:
            for operation in self._sent:
                self._sender.call_off(operation)
            raise
        for operation in self._sent:
            if not operation.finished:  # one before it has failed
                self._sender.cancel(operation)
        with collector_held():
            results = [each for operation in self._sent for each in operation.values()]
        if not here:
            seconds = time.perf_counter() - started
            self._costs.note_sent(self._function.pickled, seconds, len(results), self._workers, self._grads)
        results[first:first] = here
        return results

    def _look_at_first(self, calls: Iterator[Arguments]) -> Iterator[Arguments]:
        head = list(itertools.islice(calls, 1))
        if torch.is_grad_enabled():
            self._grads = any(each.requires_grad for each in self._function.captures) or may_need_gradients(head)
        return itertools.chain(head, calls)

    def _is_decided(self) -> bool:
        """All results are there, or the error that a loop would have raised."""
        for operation in self._sent:
            if operation.has_failed or not operation.finished:
                return operation.finished
        return True

    def _has_failed(self) -> bool:
        return any(operation.has_failed for operation in self._sent)

    def _send_first(self, calls: Iterator[Arguments]) -> int:
        """So many that the workers have something to do until it is known what a call costs; returns how many."""
        operation = self._begin()
        self._sent.append(operation)
        count = max(FIRST_CALLS, 2 * self._workers)
        self._add(operation, itertools.islice(calls, count), seal=False)
        pickled = self._function.pickled
        self._sender.wait_until(lambda: operation.has_ended or self._costs.are_known(pickled))
        return operation.items

    def _run_here(self, calls: Iterator[Arguments], count: int | None) -> tuple[list[Any], Iterator[Arguments]]:
        """The results of those that were run here, and the calls that are left.

        `count` is that of all, where it is known.
        """
        pickled, _, sharing, _ = self._function
        if sharing or self._costs.next_is_trial(pickled, self._workers, count, self._grads):
            return [], calls
        results: list[Any] = []
        run, left = list[Arguments](), list[Arguments]()
        local: LocalFunction | None = None
        while not self._has_failed():
            if not self._costs.pays(pickled, self._workers, None if count is None else count - len(results), self._grads):
                break
            left += itertools.islice(calls, CALLS_AT_ONCE - len(left))
            if not left:
                break
            try:
                local = local or LocalFunction(self._function)
                started = time.perf_counter()
                with TURNS.lock:
                    found = local.run(left, HERE_SECONDS)
            except UnusualError:
                self._costs.send_ever_after(pickled)
                return [], itertools.chain(run, left, calls)
            self._costs.note_here(pickled, time.perf_counter() - started, len(found))
            results += found
            run += left[: len(found)]
            del left[: len(found)]
            let_collector_look()
        return results, itertools.chain(left, calls)

    def _send_rest(self, calls: Iterator[Arguments], first: int, is_apart: bool) -> None:
        """From item `first` on; where those do not follow on what was sent (`is_apart`), as an operation of their own."""
        if is_apart and self._sent:
            before = self._sent[0]
            calls = itertools.takewhile(lambda _: not before.has_failed, calls)
        rest = list(itertools.islice(calls, 1))
        if is_apart and self._sent:
            self._add(self._sent[0], (), seal=True)
        if is_apart and not rest:
            return
        if is_apart or not self._sent:
            self._sent.append(self._begin(first=first))
        self._add(self._sent[-1], itertools.chain(rest, calls), seal=True)


def may_need_gradients(calls: Sequence[Arguments]) -> bool:
    """What is no tensor may hold one."""
    values = [value for args, kwargs in calls for value in (*args, *kwargs.values())]
    return not all(isinstance(value, torch.Tensor) and not value.requires_grad for value in values)


class UnusualError(Exception):
    """A worker would have done something else than we did."""


def unusual_generator(kind: object, generator: object) -> NoReturn:
    """Of an item: to give each its stream is the business of who packs them."""
    raise UnusualError


def may_run_here() -> bool:
    """Whether nothing is going on in the caller's thread that would treat a call here in another way than one in a worker."""
    return not may_be_followed() and not torch.is_inference_mode_enabled() and saved_tensor_hooks() is None


def is_at_rest(iterable: Iterable[Any]) -> bool:
    """Whether all items are there. Code of the caller that makes them one by one may write to one that it gave."""
    return type(iterable) in AT_REST


class LocalFunction:
    """A function as a worker would have it, in the caller's thread."""

    def __init__(self, function: PickledFunction) -> None:
        if any(type(each) is Root for each in function.captures):
            raise UnusualError
        self._border = Border()
        self._captures = [private(each, self._border) for each in function.captures]
        self._memories = {each.untyped_storage().data_ptr() for each in self._captures} - {0}
        self._is_followed = torch.is_grad_enabled()
        code = function.pickled + (b"" if function.state is None else function.state.pickled)
        self._may_reach = b"as_strided" in code  # before a tensor in its storage, where copies have nothing
        self._leads_out = leads_to_libraries(code)
        # leaves of a worker's own are others than ours, and copies are nobody's
        self._may_stray = self._leads_out or function.pickled.endswith(structure.RUNS_CODE)
        self._of_captures = {each.grad_fn for each in self._captures}
        self._entries = self._of_captures  # where graphs of the caller's begin
        self._lookout = Lookout()
        self._begins_within = any(map(torch.Tensor.storage_offset, function.captures))
        if self._begins_within and self._may_reach:
            raise UnusualError
        if MARK in code:  # it would be compiled once more, in this process
            raise UnusualError
        try:
            self._target: Callable[..., Any] = self._loaded(function)
        except Exception as error:
            raise UnusualError from error

    def _loaded(self, function: PickledFunction) -> Any:
        """With the user's modules themselves, unless there are tensors in them, which nobody may write to."""
        modules = function.state
        streams = Streams()
        if modules is None or not modules.tensors:
            self._names, own = Live({}), len(self._captures)
        else:
            own = len(self._captures) - len(modules.tensors)
            self._names = state.namespaces_of(modules.pickled, self._captures[own:], streams=streams)
        target = structure.loads(function.pickled, self._captures[:own], (), self._names, streams)
        if streams:
            raise UnusualError  # as a function that draws from the process's generators is
        return target

    def run(self, calls: Sequence[Arguments], seconds: float) -> list[Any]:
        """The results of the first of the calls, of as many as are begun within `seconds`.

        Raises:
            UnusualError: nothing of what was computed here counts.
        """
        results: list[Any] = []
        random = RandomState()
        end = time.perf_counter() + seconds
        self._border.close()
        try:
            while len(results) < len(calls) and (not results or time.perf_counter() <= end):
                some = calls[len(results) : len(results) + CALLS_TOGETHER]
                tensors = None if self._may_reach or self._may_stray else alike_and_small(some)
                results += self._one_by_one(some, end) if tensors is None else self._together(tensors, end)
            self._check_captures()
        except (UnusualError, KeyboardInterrupt):
            random.put_back()
            raise
        except BaseException as error:  # the worker's will name the item
            random.put_back()
            raise UnusualError from error
        finally:
            self._border.open()
        if random.has_moved():
            random.put_back()
            raise UnusualError
        return results

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result on private copies; raises `UnusualError` where a worker would do otherwise."""
        if not kwargs and need_no_pickle(args):
            target = self._target_for(args)
            copies = [private(each, self._border, is_argument=True) for each in args]
            self._entries = self._of_captures.union([each.grad_fn for each in copies])
            value = target(*copies)
            check_unwritten(args, copies)
        else:
            pickled, tensors, claims = state.dumps_arguments((tuple(args), kwargs), state.Everything(), unusual_generator)
            if claims:
                raise UnusualError
            target = self._target_for(tensors, pickled)
            copies = [private(each, self._border, is_argument=True) for each in tensors]
            self._entries = self._of_captures.union([each.grad_fn for each in copies])
            own_args, own_kwargs = structure.loads(pickled, copies, names=self._names)
            self._may_stray = True
            value = target(*own_args, **own_kwargs)
            check_unwritten(tensors, copies)
        return self._result(value)

    def _one_by_one(self, calls: Sequence[Arguments], end: float) -> list[Any]:
        """The results of the first of the calls, of as many as are begun before `end`."""
        results: list[Any] = []
        for args, kwargs in calls:
            results.append(self._call(args, kwargs))
            if time.perf_counter() > end:
                break
        return results

    def _together(self, tensors: Sequence[torch.Tensor], end: float) -> list[Any]:
        """Likewise, of calls that are given one of these each: all are looked at in a few steps."""
        copies = [copied(tensor, self._border) for tensor in tensors]
        results: list[Any] = []
        for copy in copies:
            value = self._target(copy)
            results.append(value if type(value) is torch.Tensor else self._result(value))
            if time.perf_counter() > end:
                break
        if any(copy._version for copy in copies):
            check_unwritten(tensors, copies)
        plain = [value for value in results if type(value) is torch.Tensor]
        is_cut_off = not self._is_followed and any(value.requires_grad for value in plain)
        if is_cut_off or self._memories or not have_plain_memory(plain) or dual_level_is_active():
            for value in plain:
                self._check_result(value)
        return results

    def _target_for(self, tensors: Sequence[torch.Tensor], along: bytes = b"") -> Callable[..., Any]:
        """For a call that is given these; code may stand `along` with them in their pickle."""
        if not (self._may_reach or self._leads_out or along):  # most: rows of a batch are not even asked where they begin
            return self._target
        if not (self._begins_within or any(map(torch.Tensor.storage_offset, tensors))):
            return self._target
        if self._may_reach:
            raise UnusualError
        may_reach = self._leads_out or b"as_strided" in along or leads_to_libraries(along)
        return self._under_lookout if may_reach else self._target

    def _under_lookout(self, *args: Any, **kwargs: Any) -> Any:
        with self._lookout:
            value = self._target(*args, **kwargs)
        if self._lookout.has_seen:
            raise UnusualError
        return value

    def _result(self, value: Any) -> Any:
        """`value` as it would arrive: no memory in common with what the function keeps, containers made anew."""
        if isinstance(value, torch.Tensor):
            self._check_result(value)
            return value
        pickled, tensors = structure.dumps(value)
        for each in tensors:
            self._check_result(each)
        return structure.loads(pickled, tensors)

    def _check_result(self, tensor: torch.Tensor) -> None:
        check_carriable(tensor, "the result")
        if tensor.layout is not torch.strided or (tensor.requires_grad and not self._is_followed):
            raise UnusualError
        if self._memories and tensor.untyped_storage().data_ptr() in self._memories:
            raise UnusualError
        if self._may_stray and ((tensor.is_leaf and tensor.requires_grad) or held_leaves([tensor], (), self._entries)):
            raise UnusualError

    def _check_captures(self) -> None:
        if self._border.was_tried or any(each._version or (each.is_leaf and each.grad is not None) for each in self._captures):
            raise UnusualError


class Lookout(TorchFunctionMode):
    """For calls that lead to code which is not in the function: who counts from the beginning of a storage is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_seen = False  # a function may catch what it is told

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "").startswith("as_strided"):
            self.has_seen = True
            raise UnusualError
        return function(*args, **(kwargs or {}))


class Border:
    """Between private copies and what they were made from: the caller's backward may cross it, one that a call runs may not."""

    def __init__(self) -> None:
        self.was_tried = False  # a function may catch what it is told
        self._hooks = SharedHooks()
        self.watch = self._hooks.watch

    def close(self) -> None:
        self._hooks.hooks[0] = self._refuse

    def open(self) -> None:
        self._hooks.hooks.clear()

    def _refuse(self, grad: torch.Tensor) -> torch.Tensor | None:
        self.was_tried = True
        raise UnusualError


def private(tensor: torch.Tensor, border: Border, is_argument: bool = False) -> torch.Tensor:
    """A copy that gradients pass through.

    Raises:
        UnusualError: a worker would have another one.
    """
    check_carriable(tensor, "the call")
    if tensor.layout is not torch.strided or (is_argument and type(tensor) is not torch.Tensor):
        raise UnusualError
    copy = copied(tensor, border)
    if copy.stride() != tensor.stride():
        raise UnusualError
    return copy


def copied(tensor: torch.Tensor, border: Border) -> torch.Tensor:
    copy = tensor.clone()
    if copy.grad_fn is not None:
        border.watch(copy)
    elif tensor.requires_grad:  # gradients are off
        copy.requires_grad_()
    return copy


def alike_and_small(calls: Sequence[Arguments]) -> list[torch.Tensor] | None:
    """The only argument of each call, where these are plain tensors without gaps, and few bytes; then no copy is unusual."""
    found = lone_tensors(calls)
    tensors = None if found is None else are_alike(found)
    return None if tensors is None or sum([each.nbytes for each in tensors]) > MOST_COPIED else tensors


def check_unwritten(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Nobody may write to a leaf that needs gradients, unless gradients are off; our copies are no leaves."""
    for tensor, copy in zip(tensors, copies, strict=True):
        if copy._version and tensor.requires_grad and tensor.is_leaf:
            raise UnusualError
