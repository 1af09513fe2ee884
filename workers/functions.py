"""A worker loads functions from bytes and captures, and keeps them until the caller forgets them.
This module also stores the sums of captures' gradients, and finds stray leaves. It runs in workers.

    Define ──► FunctionTable: FunctionPickle, for several operations; Function, for one
    backwards ──► CaptureSums: captures' gradients, added up until the caller collects them
    a result ──► StrayLeaves: leaves that only this process has, to which its graph leads
A sum of gradients is one tensor for many calls of this worker.

Stray leaves are leaves that a result depends on, and that are neither inputs nor captures. Their
gradients would be lost.

A worker has leaves of its own. Modules of an installed package keep some. Others were made when an
object was loaded, because its own pickling uses arrays, a state dict or torch.save. In the loop, a
backward would reach the caller's leaf. Here it would end at a leaf whose gradient is never read. So
the worker reports which results lead there, and the caller's backward of these results raises.

    an object is loaded by its own code ──► copied: its leaves that were not sent as tensors ──╮
    the function has run ──► leaves behind its results ──► copied, or kept by a module? ◄──────╯
                                                               └──► `Result.strays` ──► the caller
Guarantees: no backward is needed to find stray leaves. Leaves that a call makes for itself, and
    leaves that the initializer made, are not stray.
Assumes: if a function reaches a package, its pickle contains the package's name, or one of its
    arguments was pickled. Packages do not add methods to PyTorch's classes. The inside of a
    reentrant checkpoint cannot be searched.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
import types
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpgrad.errors import contextmanager
from mpgrad.pickling.exceptions import find
from mpgrad.pickling.modules import PLACED, Namespaces, is_of_libraries, make_function
from mpgrad.pickling.state import RecentValues, loads_with_state
from mpgrad.pickling.streams import Streams
from mpgrad.pickling.structure import (
    MOST_READ,
    MOST_READ_AGAIN,
    NAMES,
    RUNS_CODE,
    has_own_way,
    leads_to_libraries,
)
from mpgrad.pickling.unchanged import FunctionFingerprint
from mpgrad.torch_state.modes import GloballyHookedFunction
from mpgrad.torch_state.private import (
    Level,
    all_leaves,
    graph_behind,
    held_leaves,
    is_held,
    outputs_leading_to,
    plus,
)
from mpgrad.wire.messages import Define, Failure, Forget, ModulesState
from mpgrad.wire.tensor_refs import PARAMETER, REQUIRES_GRAD, with_more_behind
from mpgrad.workers.captured import OURS, CapturedContainers
from mpgrad.workers.console import failure
from mpgrad.workers.graphs import ENTRY_NODE, CaptureSearch, Edge
from mpgrad.workers.memory import WorkerDevice, WorkerMemory

__all__ = [
    "CaptureSums",
    "Copies",
    "Function",
    "FunctionPickle",
    "FunctionTable",
    "StrayLeaves",
    "copied_in",
    "noting_those_of_initializer",
]

GARBAGE_BYTES = 64 << 20


class LoadedFunction(NamedTuple):
    """A loaded function. The next operation with the same pickle may reuse it."""

    target: Any
    modules: Namespaces
    script: Mapping[str, Any]  # the script of `modules` when the function was loaded
    fingerprint: FunctionFingerprint  # the fingerprint when the function was loaded

    def begins_again(self) -> bool:
        """Whether the function is unchanged. Then its names are those that it was loaded with."""
        now = FunctionFingerprint.of(self.target)
        if now is None or not now.is_like(self.fingerprint):
            return False
        self.modules.begin_again(self.script)
        return True


class FunctionPickle:
    """A pickled function, which operations share. Their captures differ."""

    __slots__ = ("_kept", "_under_way", "is_cut_short", "operations", "pickled")

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled
        self.operations = 0  # how many operations have had it
        self.is_cut_short = False  # whether eager backwards of only some items of a call were lost
        self._kept: LoadedFunction | None = None  # a function that no operation uses now
        self._under_way: dict[int, LoadedFunction] = {}  # by id of the function

    def load(
        self, captures: Sequence[torch.Tensor], state: ModulesState | None
    ) -> tuple[Any, Namespaces, Streams]:
        """Load as `loads_with_state` does, but reuse a function that no call has changed."""
        self.operations += 1
        if captures or state is not None:
            return loads_with_state(self.pickled, captures, state)
        kept, self._kept = self._kept, None
        if kept is not None and kept.begins_again():
            self._under_way[id(kept.target)] = kept
            return kept.target, kept.modules, Streams()
        target, modules, streams = loads_with_state(self.pickled, captures)
        brings_more = modules.modules or modules.main or modules.placement
        fingerprint = None if brings_more else FunctionFingerprint.of(target)
        if fingerprint is not None and fingerprint.settle():
            self._under_way[id(target)] = LoadedFunction(
                target, modules, dict(modules.script), fingerprint
            )
        return target, modules, streams

    def begins_again(self, target: Any) -> bool:
        """Whether the function is unchanged since it was loaded, so that another operation may use
        it."""
        known = self._under_way.get(id(target))
        if known is None or not known.begins_again():
            return False
        self.operations += 1
        return True

    def take_back(self, target: Any) -> None:
        """Keep the function for the next operation, because its operation has ended."""
        known = self._under_way.pop(id(target), None)
        if known is not None:
            known.modules.begin_again(known.script)
            self._kept = known


class Function(NamedTuple):
    """A function during one operation."""

    code: FunctionPickle
    target: Callable[..., Any]
    captures: list[torch.Tensor]
    modules: Namespaces  # the user's own modules, as the function sees them
    edges: list[Edge]  # of the captures that need gradients
    versions: list[int]  # of the captures, before any call
    gathers: bool  # whether the tensors of its calls are moved to the worker's device
    # the caller's devices of the captures that need gradients, in a pool with devices
    caller_devices: Sequence[int] | None
    search: CaptureSearch
    # of captures' gradients, by backward and levels; the backward is None for eager ones
    sums: defaultdict[tuple[int | None, tuple[Level, ...]], CaptureSums]
    streams: Streams  # of the generators that it captures
    strays: StrayLeaves
    containers: CapturedContainers

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the function and its backward run. It sets the caller's
        hooks, and the user's modules in the caller's version."""
        if not isinstance(self.target, GloballyHookedFunction):
            return self.modules
        stack = contextlib.ExitStack()
        stack.enter_context(self.target.running())
        stack.enter_context(self.modules)
        return stack

    @property
    def has_written(self) -> bool:
        """Whether a call has written to a capture or set its gradient."""
        return [each._version for each in self.captures] != self.versions or any(
            edge.grad is not None for edge in self.edges if isinstance(edge, torch.Tensor)
        )


class LoneFunction(NamedTuple):
    """The definition of a function that single calls share."""

    message: Define
    code: FunctionPickle
    is_fresh: bool  # whether no call has used it


class FunctionTable(dict[int, Function | Failure]):
    """The functions by number. If one could not be loaded, the table contains the failure that each
    of its calls gets."""

    def __init__(self, memory: WorkerMemory, worker_device: WorkerDevice) -> None:
        self._memory = memory
        self._worker_device = worker_device
        self._codes: dict[int, FunctionPickle] = {}
        # states of the user's modules, see `ModulesState`
        self._states: RecentValues[bytes] = RecentValues()
        self._forgotten_bytes = 0  # captures of forgotten functions since the last collection
        self._of_lone_calls: dict[int, LoneFunction] = {}

    def define(self, message: Define) -> None:
        """Load the function at once. If that raises, each of its calls fails with the error."""
        if message.pickled is not None:
            self._codes[message.code] = FunctionPickle(message.pickled)
        if message.state is not None:
            self._states.put(
                message.state.number,
                message.state.pickled or self._states.get(message.state.number) or b"",
            )
        self._load(message, self._codes.get(message.code))
        if message.of_lone_calls:
            known = LoneFunction(message, self._codes[message.code], is_fresh=True)
            self._of_lone_calls[message.function] = known

    def begin(self, number: int) -> Function | Failure:
        """Return the function for the calls of a message."""
        lone = self._of_lone_calls.get(number)
        if lone is not None:
            found = self[number]
            if not (
                lone.is_fresh
                or (isinstance(found, Function) and lone.code.begins_again(found.target))
            ):
                self._drop(number)
                self._load(lone.message, lone.code)
            self._of_lone_calls[number] = lone._replace(is_fresh=False)
        return self[number]

    def _load(self, message: Define, code: FunctionPickle | None) -> None:
        try:
            assert code is not None, "the pickle of a function did not arrive"
            self[message.function] = self._loaded(message, code)
        except BaseException as error:
            self[message.function] = failure(error, "loading the function")

    def _loaded(self, message: Define, code: FunctionPickle) -> Function:
        refs = self._worker_device.named(message.captures, message.gathers)
        captures: list[torch.Tensor] = []
        if refs:
            # This may be the caller's thread, whose mode must not apply, because the captures are
            # also used in other modes.
            with torch.inference_mode(False):
                tensors = self._memory.captures(message.slot, refs)
                captures = [
                    as_captured(tensor, ref.flags)
                    for tensor, ref in zip(tensors, refs, strict=True)
                ]
        edges: list[Edge] = [tensor for tensor in captures if tensor.requires_grad]
        state = message.state
        if state is not None:
            state = state._replace(pickled=self._states.get(state.number) or b"")
        target, modules, streams = code.load(captures, state)
        return Function(
            code,
            target,
            captures,
            modules,
            edges,
            versions=[tensor._version for tensor in captures],
            gathers=message.gathers,
            caller_devices=self._worker_device.codes_in(message.captures),
            search=CaptureSearch(
                {id(edges[number]): number for number in with_more_behind(message.captures)}
            ),
            sums=defaultdict(CaptureSums),
            streams=streams,
            strays=StrayLeaves(
                (code.pickled, b"" if state is None else state.pickled or b""),
                copied_in(target, code.pickled, captures),
                code.operations > 1,
            ),
            containers=CapturedContainers(target),
        )

    def forget(self, message: Forget) -> None:
        """Drop functions and pickles. Collect garbage after every `GARBAGE_BYTES` of captures."""
        for number in message.functions:
            self._drop(number)
        for code in message.codes:
            self._codes.pop(code, None)
        for number, graph_task, levels in message.sums:
            if isinstance(function := self.get(number), Function):
                function.sums.pop((graph_task, levels), None)
        self._forgotten_bytes += message.nbytes
        # a recursive function is a reference cycle, which would keep its captures for a long time
        if self._forgotten_bytes > GARBAGE_BYTES:
            self._forgotten_bytes = 0
            gc.collect()

    def _drop(self, number: int) -> None:
        self._of_lone_calls.pop(number, None)
        known = self.pop(number, None)
        if isinstance(known, Function):
            PLACED.take_back(known.modules)
            known.modules.registered.clear()
            if known.modules.placement is not None:
                known.modules.placement.forget()
            known.code.take_back(known.target)


def as_captured(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    needs_grad = bool(flags & REQUIRES_GRAD)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=needs_grad)
    return tensor.requires_grad_(needs_grad)


# --- sums of captures' gradients


class CaptureSums:
    """Gradients of a function's captures in one backward, added up over several calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.sums: list[torch.Tensor | None] = []
        # The first gradient may share memory with other tensors. A sum made here does not.
        self._owned: list[bool] = []

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a call, one for each capture, or None.

        This writes only to sums that were made here.
        """
        if not self.sums:
            self.sums, self._owned = [None] * len(grads), [False] * len(grads)
        self.calls += 1
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


# --- stray leaves


SKIPPED = {
    str,
    bytes,
    int,
    float,
    bool,
    complex,
    type(None),
    types.ModuleType,
    types.CodeType,
    types.FrameType,
}
SKIPPED |= {types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType}
SKIPPED |= {
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
}
Copies = Mapping[torch.Tensor, str]  # each copied leaf, and the class of its owner
# names by which code can reach a module without the module's name
WAYS_TO_MODULES = frozenset(
    {b"import_module", b"__import__", b"modules", b"getmodule", b"resolve_name", b"locate"}
)
# Modules whose names contain such a name. The first one makes all functions of a script, and the
# other one contains PyTorch's layers.
NO_WAYS = make_function.__module__.encode(), torch.nn.modules.__name__.encode()


class StrayLeaves:
    """Finds the stray leaves of one function's results."""

    def __init__(self, pickles: Sequence[bytes], copied: Copies, again: bool) -> None:
        """`pickles` are all parts of the function. `copied` are leaves in the function that an
        object's own pickling made. If `again`, an earlier operation had the function."""
        self._pickles = pickles
        # less is read of a new function, because functions may be new each time
        self._most_read = MOST_READ_AGAIN if again else MOST_READ
        self._copied = copied
        self._modules = 0  # the number of imported modules when `_leads_out` was computed
        self._leads_out = False

    def may_be_reached(self) -> bool:
        """Whether results may depend on stray leaves, even if a call gets only tensors."""
        if self._modules != len(sys.modules):
            self._modules = len(sys.modules)
            self._leads_out = any(
                leads_to_libraries(each, self._most_read) or leads_to_modules(each)
                for each in self._pickles
            )
        return self._leads_out or bool(self._copied)

    def behind(
        self, outputs: Sequence[torch.Tensor], known: Collection[int], copied: Copies
    ) -> dict[int, str]:
        """Describe the stray leaf that an output depends on, or is itself, by number of the output.
        `known` leaves are not stray."""
        nodes = held_leaves(outputs, known, (ENTRY_NODE,))
        given = {
            number: each
            for number, each in enumerate(outputs)
            if each.requires_grad and each.is_leaf and id(each) not in known
        }
        if not (nodes or given):
            return {}
        note_places(
            [each for each in given.values() if not self._owner_of(each, copied)],
            [node for node in nodes if not self._owner_of(node.variable, copied)],
        )
        strays = {
            number: words
            for number, each in given.items()
            if (words := self._words_of(each, copied))
        }
        if found := {
            node: words for node in nodes if (words := self._words_of(node.variable, copied))
        }:
            users = graph_behind(outputs, (ENTRY_NODE,))
            strays |= outputs_leading_to(found, outputs, users)
        return strays

    def _owner_of(self, leaf: torch.Tensor, copied: Copies) -> str:
        return copied.get(leaf, "") or self._copied.get(leaf, "")

    def _words_of(self, leaf: torch.Tensor, copied: Copies) -> str:
        if owner := self._owner_of(leaf, copied):
            return (
                f"{described(leaf)} that {owner} made when it was loaded in a worker, because its "
                "own pickling does not include the tensor itself; let __getstate__ or __reduce__ "
                "return the tensor, or pass it to the function as an argument"
            )
        if place := PLACES.get(leaf):
            return (
                f"{place.in_full(leaf)} ({described(leaf)}), which is the worker's own; pass it to "
                "the function as an argument, or call "
                f"cloudpickle.register_pickle_by_value({place.package}), so that it "
                "is sent with the function"
            )
        return ""


@functools.lru_cache(maxsize=64)  # the same function is mapped repeatedly
def leads_to_modules(pickled: bytes) -> bool:
    of_others = pickled
    for module in NO_WAYS:
        of_others = of_others.replace(module, b"")
    return not WAYS_TO_MODULES.isdisjoint(NAMES.findall(of_others))


def described(leaf: torch.Tensor) -> str:
    return f"a {type(leaf).__name__.lower()} of shape {tuple(leaf.shape)}"


# --- the places of leaves


def copied_in(value: Any, pickled: bytes, known: Iterable[torch.Tensor]) -> Copies:
    """Return the leaves in a loaded value that are not `known`, and the class whose pickling made
    each."""
    if not pickled.endswith(RUNS_CODE):
        return {}
    found, objects = leaves_in([value], set())
    left = found.keys() - set(map(id, known))
    if not left:
        return {}
    owners = dict.fromkeys(left, "an object")
    # from the outer objects to the inner ones
    users = [each for each in objects if not is_of_libraries(type(each).__module__)]
    for each in sorted(users, key=lambda each: has_own_way(type(each))):
        owners.update(
            dict.fromkeys(left & leaves_in([each], set())[0].keys(), type(each).__qualname__)
        )
    copies: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
    for key, owner in owners.items():
        copies[found[key]] = owner
    return copies


def leaves_in(values: Iterable[Any], seen: set[int]) -> tuple[dict[int, torch.Tensor], list[Any]]:
    """Return the leaves that can be reached from `values`, by id, and all objects on the way.
    Modules, and objects in `seen`, are not searched."""
    found: dict[int, torch.Tensor] = {}
    passed: list[Any] = []
    level = list(values)
    while level:
        start = len(passed)
        further: list[Any] = []
        for each in level:
            kind, key = type(each), id(each)
            if kind in SKIPPED or key in seen:
                continue
            seen.add(key)
            if kind is types.FunctionType:
                further += [each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)]
                home = sys.modules.get(each.__globals__.get("__name__", ""))
                if getattr(home, "__dict__", None) is not each.__globals__:
                    further.append(each.__globals__)
                continue
            if issubclass(kind, torch.Tensor) and each.requires_grad and each.is_leaf:
                found[key] = each
            if not (is_ours(kind) or (issubclass(kind, type) and is_of_libraries(each.__module__))):
                passed.append(each)
        level = gc.get_referents(*passed[start:], further)
    return found, passed


# classes of this package that contain functions of the user, and their modules
CARRY = *OURS, "mpgrad.pickling.modules.CarriedModule"


def is_ours(kind: type) -> bool:
    """Whether objects of the class are the pool's own. With engines "inline" and "thread" these
    refer to functions and their results."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return (
        name.startswith("mpgrad.")
        and not name.startswith(CARRY)
        and not issubclass(kind, torch.nn.Module)
    )


# --- known leaves


class LeafPlace:
    """The place where a module keeps a leaf."""

    def __init__(self, module: str, name: str) -> None:
        self.package = module.partition(".")[0]
        self._module = module
        self._name = name
        self._path: str | None = None

    def in_full(self, leaf: torch.Tensor) -> str:
        if self._path is None:
            value = vars(sys.modules[self._module]).get(self._name)
            self._path = find(value, lambda part: id(leaf) in leaves_in([part], set())[0]).path
        joint = "." if self._path and self._path[0].isidentifier() else ""
        return f"{self._module}.{self._name}{joint}{self._path}"


# None if it is known that no module keeps the leaf
PLACES: MutableMapping[torch.Tensor, LeafPlace | None] = WeakIdKeyDictionary()
OF_INITIALIZER: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()


def note_places(given: Iterable[torch.Tensor], nodes: Iterable[Any]) -> None:
    """Record the places of these leaves, and of the nodes' leaves. A leaf has none if the
    initializer made it, or if it is not in a module."""
    unknown = [each for each in given if each not in PLACES]
    unplaced = [node for node in nodes if node.variable not in PLACES]
    if not (unknown or unplaced) or not SEARCHES.may_begin():
        return
    if unplaced:
        # first free the call's cyclic garbage, because searching modules takes longer
        gc.collect(1)
    unknown += [node.variable for node in unplaced if is_held(node)]
    if not unknown:
        return
    look_through_modules()
    SEARCHES.end(found=any(each in PLACES for each in unknown))
    for each in unknown:
        PLACES.setdefault(each, None)


class SearchBudget:
    """Limits the time of searches, so that a function that keeps a new leaf in each call does not
    cause one each time. A leaf that was not searched for is not recorded, so it is found later."""

    def __init__(self) -> None:
        self._began = self._rest_until = 0.0
        self._in_vain = 0  # unsuccessful searches in a row

    def may_begin(self) -> bool:
        self._began = time.perf_counter()
        return self._began >= self._rest_until

    def end(self, found: bool) -> None:
        self._in_vain = 0 if found else self._in_vain + 1
        now = time.perf_counter()
        if self._in_vain > IN_VAIN:
            self._rest_until = now + (now - self._began) * REST


IN_VAIN = 8  # how many unsuccessful searches in a row are allowed without a pause
REST = 20  # the length of a pause, as a multiple of the last search's duration
SEARCHES = SearchBudget()


def look_through_modules() -> None:
    """Record all leaves that can be reached from modules: those of packages, and the user's modules
    that were imported here."""
    seen: set[int] = set()
    for module, found in list(sys.modules.items()):
        if is_of_libraries(module) or not issubclass(type(found), types.ModuleType):
            continue
        for name, value in list(vars(found).items()):
            for leaf in leaves_in([value], seen)[0].values():
                if leaf not in OF_INITIALIZER:
                    PLACES[leaf] = LeafPlace(module, name)


@contextmanager
def noting_those_of_initializer() -> Iterator[None]:
    """Record the leaves that are made in the body. They are intended to be the worker's own."""
    before = set(map(id, all_leaves()))
    yield
    OF_INITIALIZER.update({leaf: None for leaf in all_leaves() if id(leaf) not in before})
