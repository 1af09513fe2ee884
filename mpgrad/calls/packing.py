"""A call that is ready to send: its arguments as bytes and references, its function and its options
(`OperationOptions`), and the workers that may run it. This module runs in the caller only.

Pickle would copy tensors and lose their history. Here they are packed where a worker can read them,
and enter the operation through gates. If an argument is the result of an unfinished call, a
number takes its place, and the scheduler inserts the result when it comes.

A serial loop runs on the device of its tensors, and so does a call, unless `device=` is given. All
results go back to the device that the call came from, so the caller cannot tell where the call ran.
"""

from __future__ import annotations

import itertools
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.gates import gate, leaf_gate
from mpgrad.errors import CallNames
from mpgrad.machine.story import Story, Transition
from mpgrad.memory.accelerator import INSTALLED, device_code, name_of
from mpgrad.memory.arena import BorrowedMemory
from mpgrad.pickling import state, structure
from mpgrad.pickling.exceptions import item_not_carried, not_carried
from mpgrad.pickling.state import ItemStreams, ModuleSnapshot
from mpgrad.pickling.streams import Root
from mpgrad.torch_state.modes import Modes
from mpgrad.torch_state.private import (
    dual_level_is_active,
    outside_transforms,
    without_subclasses,
)
from mpgrad.wire.messages import EagerOptions, Parts, Structure, is_plain, owners, plain_structure
from mpgrad.wire.tensor_refs import (
    BUCKETED_BYTES,
    DEVICE,
    HOOKED,
    INLINE_BYTES,
    LEAF,
    REQUIRES_GRAD,
    SHARED,
    PackedTensor,
    PackedTensors,
    Packer,
    check_carriable,
    flags_of,
    have_attributes,
    need_no_pickle,
)

__all__ = [
    "Arguments",
    "Device",
    "OperationOptions",
    "PackedCall",
    "PackingOptions",
    "PickledFunction",
    "Request",
    "Shared",
    "SharedFunction",
    "device_code_named",
    "device_count",
    "missing_device",
    "pack_bundle",
    "pack_call",
    "pickled_function",
    "requested",
]

Arguments = tuple[Sequence[Any], dict[str, Any]]
# by id of the tensor; the entry keeps the tensor alive, so no other tensor can get its id
Shared = dict[int, tuple[torch.Tensor, PackedTensor]]


class PickledFunction(NamedTuple):
    """A function in its present state, as bytes and captures."""

    pickled: bytes
    # The function's own captures come first, then the state's. Some are `Root`s until `drawn` has
    # replaced them.
    captures: list[torch.Tensor]
    # Captures that share memory in the caller also share memory in a worker.
    captures_share_memory: bool
    state: ModuleSnapshot | None  # the user's modules, if the function uses any
    shared: Sequence[int]  # see `state.SharingPickle`
    seconds: float = 0.0  # the time to examine the function and to pickle it


def pickled_function(
    function: Callable[..., Any],
    kind: str = "",
    first: Sequence[Arguments] = (),
    recent: state.RecentFunctions | None = None,
) -> PickledFunction:
    """Pickle the function.

    `kind` is the type of the pool's devices, if it has any. `first` holds the arguments of some
    calls; other calls will be similar. `recent` holds the pool's functions that were pickled
    before.

    Raises:
        TypeError, pickle.PicklingError: the function, or a tensor that it captures, cannot be sent.
        Exception: the function's own code raised it during pickling.
    """
    started = time.perf_counter()
    try:
        pickled, captures, modules, shared = state.dumps_function(function, first, recent)
    except Exception as error:
        not_carried(error, "the function", function)
    if modules is not None:
        captures = [*captures, *modules.tensors]
    with without_subclasses():
        for tensor in captures:
            if type(tensor) is not Root:
                check_carriable(tensor, "the function", None, kind)
    sharing = getattr(function, "captures_share_memory", False)
    seconds = time.perf_counter() - started
    return PickledFunction(pickled, captures, sharing, modules, shared, seconds)


class SharedFunction:
    """The pickle of a function, and its captures in one slot of shared memory, for one operation or
    for successive single calls."""

    numbers = itertools.count(1)

    def __init__(
        self,
        function: PickledFunction,
        packer: Packer,
        forget: Callable[[int, int], None],
        names: CallNames,
        request: Request | None = None,
        of_lone_calls: bool = False,
    ) -> None:
        """With `of_lone_calls`, later operations of one call may reuse this object."""
        self.of_lone_calls = of_lone_calls
        self.pickled, captures, sharing, self.state, self.shared, self.seconds = function
        self.names = names
        self.number = next(self.numbers)
        self.code = 0  # the scheduler's number of the pickle
        # A worker got the pickle in this operation, so its first call took longer. `CheapCalls`
        # reads this.
        self.is_new = False
        self.gathers = request is not None and request.gathers
        staged = request is not None and request.staged
        with without_subclasses():
            self.refs, self.slot, self.slots = packer.pack_together(captures, sharing, staged)
        if request is not None:
            request.note_captures(captures)
        self.nbytes = 0 if self.slot is None else self.slot.memory.nbytes
        self._forget = forget

    @property
    def sent_slot(self) -> tuple[int, int] | None:
        return None if self.slot is None else (self.slot.address, self.slot.memory.nbytes)

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not python_ends() and hasattr(self, "_forget"):
            self._forget(self.number, self.nbytes)


class OperationOptions(NamedTuple):
    """What all calls of an operation have in common: function, modes, seed and options. It also
    applies if a call runs again because its graph was lost."""

    function: SharedFunction
    modes: Modes
    seed: int | None
    story: Story  # what happens to the calls
    # see `mpgrad.environment.EnvironmentChanges`; None if workers do not follow the environment
    environment: bytes | None = None
    chunksize: int | None = None
    timeout: float | None = None  # seconds for each call
    stop_at_failure: bool = True
    return_errors: bool = False  # in place of the results of calls that failed
    request: Request | None = None  # the devices on which its calls run
    eager: EagerOptions | None = None  # how backwards of losses run with the calls
    # All arguments exist, and the caller waits for all results together.
    at_rest: bool = False
    # Arguments are at rest, and calls may run again. So results may stay in a worker for a while.
    together: bool = False


NONE_FAILED: Mapping[int, Any] = types.MappingProxyType({})


class PackedCall:
    """One call, ready to send. It is kept as long as its graph may have to be rebuilt.

    A call has one item, or a bundle of cheap items of a map. Handling each of these by itself would
    take longer than running it.
    """

    # see `Backward.has_lost_graph`
    has_lost_graph = False

    __slots__ = (
        "bundle",
        "deaths",
        "dependencies",
        "dependency_results",
        "failed",
        "gated",
        "idle_deaths",
        "index",
        "inputs_lent",
        "item",
        "items",
        "leaf_items",
        "leaves",
        "options",
        "origin",
        "packed",
        "route",
        "structure",
        "timeouts",
        "ungated",
    )

    options: OperationOptions

    def __init__(
        self,
        index: int,
        shape: Structure,
        packed: Sequence[PackedTensor] | PackedTensors,
        dependencies: Sequence[Any] = (),
    ) -> None:
        self.index = index
        self.item = index  # the number of its only or first item in the operation
        self.items = 1
        self.bundle: Parts = ()  # the arguments of each item
        # the tensors of a bundle that need gradients
        self.leaves: Sequence[torch.Tensor] = ()
        self.leaf_items: Sequence[int] = ()  # the item of each leaf
        # the `operations.FailedResult`s of a bundle, by place, if its other items go on
        self.failed: Mapping[int, Any] = NONE_FAILED
        self.structure = shape
        self.packed: Sequence[PackedTensor] | PackedTensors = packed
        # The `operations.Dependency`s are kept until the call has its node, or needs none.
        self.dependencies = dependencies
        # The tensors of these results are the last of `packed`.
        self.dependency_results: Parts = ()
        self.gated: Sequence[torch.Tensor] = ()
        # tensors with their versions; gradients were off, but `fn` may enable them
        self.ungated: Sequence[tuple[torch.Tensor, int]] = ()
        self.inputs_lent: Sequence[tuple[torch.Tensor, int]] = ()
        self.route: frozenset[int] | None = None  # devices whose workers may run it; None: any
        self.origin = 0  # the device it comes from
        self.deaths = 0  # workers that died while they ran this call
        self.timeouts = 0  # how often it took too long
        self.idle_deaths = 0  # workers that died when this call was next

    def note_failed(self, place: int, failed: Any) -> None:
        """Note that an item of a bundle has failed, and will not run again with the others."""
        self.failed = {**self.failed, place: failed}

    def note(self, transition: Transition) -> None:
        """Note what happens to the call in its operation's story."""
        self.options.story.note(self.item, transition)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return (
            self.packed.nbytes
            if isinstance(self.packed, PackedTensors)
            else sum([each.nbytes for each in self.packed])
        )

    @property
    def message_bytes(self) -> int:
        """The bytes that are inline in the message: small tensors, and pickles of arguments."""
        if isinstance(self.packed, PackedTensors):
            total = self.packed.message_bytes
        else:
            total = sum([len(each.body) for each in self.packed if each.body is not None])
        shapes = [self.structure, *[shape for shape, _ in (*self.dependency_results, *self.bundle)]]
        return total + sum([len(shape) for shape in shapes if isinstance(shape, bytes)])


class PackingOptions(NamedTuple):
    """How the calls of an operation are packed.

    For `known`, see `state.dumps_arguments`. `streams` belong to the generators that items hold.
    `shared` remembers packed tensors by id, for operations whose calls have tensors in common.
    """

    packer: Packer
    grad: bool
    streams: ItemStreams
    request: Request | None = None
    known: ModuleSnapshot | None = None
    shared: Shared | None = None


def pack_call(
    packing: PackingOptions,
    index: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    item: int | None = None,
) -> PackedCall:
    """Copy the arguments' tensors to where a worker can read them, and pass those that need
    gradients through a gate.

    Errors name `item`, or `index` if it is None.

    Raises:
        TypeError, pickle.PicklingError: an argument cannot be sent. The message names the item.
        SharedMemoryError: shared memory has no room for a tensor.
    """
    packer, grad, streams, request, known, shared = packing
    item = index if item is None else item
    # torch.func's transforms do not track these tensors, but would wrap all that are made here.
    with outside_transforms():
        shape, tensors, dependencies = arguments_structure(item, args, kwargs, known, streams)
        with without_subclasses():
            packed = []
            staged = request is not None and request.staged
            for tensor in tensors:
                check_carriable(tensor, "item", item, packer.kind)
                if shared is None:
                    packed.append(packer.pack(tensor, flags_of(tensor), None, staged))
                else:
                    packed.append(pack_once(packer, tensor, shared, staged))
            call = PackedCall(index, shape, packed, dependencies)
            if request is not None:
                call.route, call.origin = request.of(tensors)
            call.inputs_lent = tuple(
                [
                    (tensor, tensor._version)
                    for tensor, each in zip(tensors, packed, strict=True)
                    if isinstance(each.holder, BorrowedMemory) and not tensor.is_inference()
                ]
            )
            if needing := [tensor for tensor in tensors if tensor.requires_grad]:
                if grad:
                    call.gated = [gate(tensor) for tensor in needing]
                else:
                    call.ungated = ungated(needing)
    return call


def pack_bundle(
    packing: PackingOptions, index: int, calls: Sequence[Arguments], item: int
) -> PackedCall | None:
    """Return the calls as one call, or None if they must be sent one by one. `item` is the number
    of the first, for errors.

    The calls share a message, a graph and a node. So their tensors must not be large. Those that
    need gradients must be leaves, because a backward for another item would walk and free a
    history.

    Raises:
        TypeError, pickle.PicklingError: an argument cannot be sent. The message names the item.
    """
    packer, grad, streams, _, known, _ = packing
    with outside_transforms():
        lone = lone_tensors(calls)
        items = (
            None if lone is None else Items(lone, list(map(flags_of, lone)), [(1, 1)] * len(lone))
        )
        packed: list[PackedTensor] | PackedTensors | None = None
        if items is not None and not have_more_behind(items):
            packed = packer.bucketed(items.tensors, items.flags)
        if packed is None:
            items = each_item(packer, item, calls, known, streams)
        if items is None or have_more_behind(items):
            return None
        together, flags, bundle = items
        if packed is None:
            with without_subclasses():
                packed = packer.together(together, flags) or list(map(packer.pack, together, flags))
        if isinstance(packed, list) and any(
            isinstance(each.holder, BorrowedMemory) for each in packed
        ):
            return None  # a write to one of these tensors must not affect another item
        call = PackedCall(index, None, packed)
        call.bundle, call.items = bundle, len(bundle)
        need = [own & REQUIRES_GRAD for own in flags]
        call.leaves = list(itertools.compress(together, need))
        call.leaf_items = list(itertools.compress(owners(bundle), need))
        if call.leaves and grad:
            call.gated = [leaf_gate(call.leaves)]
        elif call.leaves:
            call.ungated = ungated(call.leaves)
    return call


class Items(NamedTuple):
    """The arguments of many calls: all tensors, their flags, and which call each belongs to."""

    tensors: list[torch.Tensor]
    flags: list[int]
    parts: list[tuple[Structure, int]]


def have_more_behind(items: Items) -> bool:
    """Return whether a backward does more than add gradients to leaves; see `pack_bundle`."""
    return any(own & REQUIRES_GRAD and (not own & LEAF or own & HOOKED) for own in set(items.flags))


def lone_tensors(calls: Sequence[Arguments]) -> list[torch.Tensor] | None:
    """Return the arguments if each call has exactly one argument, a tensor. Return None if not, or
    if the tensors have attributes, or may have tangents."""
    found = [args[0] for args, kwargs in calls if len(args) == 1 and not kwargs]
    if len(found) < len(calls) or set(map(type, found)) != {torch.Tensor} or dual_level_is_active():
        return None
    return None if have_attributes(found) else found


def each_item(
    packer: Packer,
    first: int,
    calls: Sequence[Arguments],
    known: ModuleSnapshot | None,
    streams: ItemStreams,
) -> Items | None:
    """Return the arguments of the calls, or None if a tensor or its container cannot be bundled.
    Raise errors as `pack_bundle` does."""
    items = Items([], [], [])
    for number, (args, kwargs) in enumerate(calls, first):
        shape, tensors, dependencies = arguments_structure(number, args, kwargs, known, streams)
        with without_subclasses():
            for tensor in tensors:
                check_carriable(tensor, "item", number, packer.kind)
                if (
                    tensor.layout is not torch.strided
                    or not tensor.is_cpu
                    or tensor.nbytes > BUCKETED_BYTES
                ):
                    return None
            items.flags.extend(map(flags_of, tensors))
        if dependencies or (isinstance(shape, bytes) and len(shape) > INLINE_BYTES):
            return None
        items.tensors.extend(tensors)
        items.parts.append((shape, len(tensors)))
    return items


def ungated(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors with their versions."""
    return [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


def pack_once(packer: Packer, tensor: torch.Tensor, shared: Shared, staged: bool) -> PackedTensor:
    """Pack the tensor, unless it was packed before for another call of the operation."""
    known = shared.get(id(tensor))
    if known is None:
        known = shared[id(tensor)] = (
            tensor,
            packer.pack(tensor, flags_of(tensor) | SHARED, None, staged),
        )
    return known[1]


class Futures:
    """The futures among the arguments of a call."""

    def __init__(self) -> None:
        self.dependencies: list[object] = []
        self._marks: dict[int, tuple[int]] = {}

    def mark(self, value: object) -> tuple[int] | None:
        """Return the number of the dependency on a future's result. Return None if the value is not
        a future, or if its result is in the caller."""
        if not issubclass(type(value), structure.DeferredValue):
            return None
        if id(value) not in self._marks:
            dependency = value._dependency()  # type: ignore[attr-defined]
            if dependency is None:
                return None
            self._marks[id(value)] = (len(self.dependencies),)
            self.dependencies.append(dependency)
        return self._marks[id(value)]


def arguments_structure(
    index: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    known: ModuleSnapshot | None,
    streams: ItemStreams,
) -> tuple[Structure, list[torch.Tensor], Sequence[Any]]:
    """Return the arguments' structure, tensors and dependencies. If they cannot be sent, raise an
    error with the item's number."""
    if not kwargs and need_no_pickle(args):
        return len(args), list(args), ()
    futures = Futures()
    if (
        all(map(is_plain, kwargs))
        and (plain := plain_structure((*args, *kwargs.values()), futures.mark)) is not None
    ):
        shape, tensors = plain
        return (
            (shape[: len(args)], dict(zip(kwargs, shape[len(args) :], strict=True))),
            tensors,
            futures.dependencies,
        )
    try:
        pickled, tensors, dependencies = state.dumps_arguments(
            (tuple(args), kwargs), known, streams.of(index)
        )
        return pickled, streams.drawn(tensors), dependencies
    except Exception as error:
        item_not_carried(error, index, args, kwargs)


# --- the device on which a call runs


Device = str | torch.device


def device_count(asked: object) -> int:
    """Return the number of devices of the installed kind, or raise an error if there are none.
    `asked` is the value of `devices`."""
    count = INSTALLED.accelerator.count()
    if not count:
        raise ValueError(
            f"no {INSTALLED.accelerator.type.upper()} device is available here (devices: "
            f"{asked!r}); install a driver and a "
            "PyTorch that was built for it, or leave devices out"
        )
    return count


def device_code_named(device: object, name: str) -> int:
    """Return the number of the device that the caller passed as the argument `name`."""
    kind = INSTALLED.accelerator.type
    expected = f'{name} must be "cpu", "{kind}" or like "{kind}:0" ({name}: {device!r})'
    if not isinstance(device, (str, torch.device)):
        raise TypeError(expected)
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(expected) from error
    if found.type == "cpu":
        return 0
    if found.type != kind:
        raise ValueError(expected)
    count, index = device_count(device), found.index or 0
    if index >= count:
        raise ValueError(
            f"{name} must be one of {kind}:0 to {kind}:{count - 1} ({name}: {str(device)!r})"
        )
    return index + 1


class Request:
    """The devices on which the calls of one operation run. If `wanted` is given, they run there,
    and their tensors are moved there. If it is None, they run where their tensors are."""

    def __init__(self, codes: Sequence[int], wanted: frozenset[int] | None) -> None:
        self._codes = frozenset(codes)
        self._workers = codes
        self._wanted = wanted
        self._captured = 0  # the device of the first capture that is not on the CPU
        self.gathers = wanted is not None
        # whether all tensors go to workers that can read only the CPU's memory
        self.staged = wanted == frozenset({0})

    def note_captures(self, captures: Iterable[torch.Tensor]) -> None:
        self._captured = next(filter(None, map(device_code, captures)), 0)

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[frozenset[int] | None, int]:
        return self.of_codes([device_code(tensor) for tensor in tensors])

    def of_codes(self, codes: Sequence[int]) -> tuple[frozenset[int] | None, int]:
        """Return which devices' workers may run a call with tensors on these devices (None: all),
        and the device that the call comes from.

        Raises:
            ValueError: no worker may run the call.
        """
        if self._wanted is not None:
            return self._but_all(self._wanted), codes[0] if codes else 0
        origin = next(filter(None, codes), self._captured)
        if origin in self._codes:
            return self._but_all(frozenset({origin})), origin
        # All tensors are on the CPU. If the function itself uses a GPU, it uses the current one.
        if origin == 0:
            return None, INSTALLED.accelerator.current() + 1
        others = self._codes - {0}
        if not others:
            raise ValueError(no_worker(name_of(origin), self._workers))
        return self._but_all(others), origin

    def look_again(self, call: Any) -> None:
        """Set the devices of a call again once the results it depends on have come. Raise errors as
        `of_codes` does."""
        if not self.gathers or not call.origin:
            call.route, call.origin = self.of_codes(
                [packed.flags // DEVICE for packed in call.packed]
            )

    def _but_all(self, route: frozenset[int]) -> frozenset[int] | None:
        return None if route == self._codes else route


def requested(device: Device | None, codes: tuple[int, ...] | None) -> Request | None:
    """Return the request that `device=` makes of a pool whose workers have the devices `codes`, or
    None if any worker will do.

    Raises:
        ValueError, TypeError: the device does not exist, or has no worker.
    """
    if device is None:
        return None if codes is None else Request(codes, None)
    kind = INSTALLED.accelerator.type
    workers = codes or (0,)
    if isinstance(device, str) and device == kind:
        wanted = frozenset(workers) - {0}
    else:
        wanted = frozenset({device_code_named(device, "device")}) & frozenset(workers)
    if not wanted:
        raise ValueError(no_worker(str(device), workers))
    return None if codes is None else Request(codes, wanted)


def no_worker(device: str, codes: Sequence[int]) -> str:
    """Return the message of an error."""
    there = ", ".join(
        f"{count} on {name_of(code)}" for code, count in sorted(Counter(codes).items())
    )
    return (
        f"no worker of this pool is on device {device} (workers: {there}); make the pool with "
        "devices=[...]"
    )


def missing_device(codes: Sequence[int], there: Iterable[int]) -> int:
    """Return the device for the next worker: the first of `codes` without a worker. `there` holds
    the devices of the present workers."""
    left = Counter(there)
    for code in codes:
        if left[code] == 0:
            return code
        left[code] -= 1
    return 0
