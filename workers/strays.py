"""Strays: leaves that a result depends on, and that are neither inputs nor captures. Their gradients would be lost.

A worker has leaves of its own: what an installed package keeps in its modules, and what an object made when it was loaded,
because its own pickling went by way of arrays, a state dict or torch.save. In the loop a backward would come to the caller's.
Here it would end at one that nobody looks at. So the caller is told which results lead there, and its backward raises.

    loaded by code of an object's own ──► copied: leaves in it, but for what came as tensors ──╮
    the function has run ──► leaves behind its results ──► copied, or kept by a module? ──► `Result.strays` ──► the caller
Guarantees: no backward is needed to find them; a leaf that a call made for itself is none, nor one that the initializer made.
Assumes: a function that reaches a package has its name in its pickle, or is given something that was pickled. A reentrant
    checkpoint shows nothing of what is in it.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.errors import contextmanager
from mpgrad.pickling.exceptions import find
from mpgrad.pickling.modules import is_of_libraries
from mpgrad.pickling.structure import RUNS_CODE, has_own_way, leads_to_libraries
from mpgrad.torch_state.leaves import all_leaves, graph_behind, held_leaves, leading_to
from mpgrad.torch_state.private import is_held
from mpgrad.workers.graph_edges import ENTRY_NODE

__all__ = ["Copies", "Strays", "copied_in", "noting_those_of_initializer"]

SKIPPED = {str, bytes, int, float, bool, complex, type(None), types.ModuleType, types.CodeType, types.FrameType}
SKIPPED |= {types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType}
SKIPPED |= {types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType}
Copies = dict[int, tuple[weakref.ref[torch.Tensor], str]]  # by id, and whose that was
# by which code comes to a module that it does not name
WAYS_TO_MODULES = b"import_module", b"__import__", b"modules", b"getmodule", b"resolve_name", b"locate"


class Strays:
    """Those of one function. `copied`: leaves in it that came of its own pickling, by id, and whose that was."""

    def __init__(self, pickles: Sequence[bytes], copied: Copies) -> None:
        """`pickles`: of all that the function consists of."""
        self._pickles = pickles
        self._copied = copied
        self._modules = 0  # that had been imported when `_leads_out` was found
        self._leads_out = False

    def may_be_reached(self) -> bool:
        """Also by a call that is given nothing but tensors."""
        if self._modules != len(sys.modules):
            self._modules = len(sys.modules)
            self._leads_out = any(leads_to_libraries(each) or leads_to_modules(each) for each in self._pickles)
        return self._leads_out or bool(self._copied)

    def behind(self, outputs: Sequence[torch.Tensor], known: Collection[int], copied: Copies) -> dict[int, str]:
        """In words, what each of some outputs, by number, depends on besides the `known` leaves; or is itself."""
        nodes = held_leaves(outputs, known, (ENTRY_NODE,))
        given = {
            number: each for number, each in enumerate(outputs) if each.requires_grad and each.is_leaf and id(each) not in known
        }
        if not (nodes or given):
            return {}
        note_places(
            [each for each in given.values() if not self._owner_of(each, copied)],
            [node for node in nodes if not self._owner_of(node.variable, copied)],
        )
        strays = {number: words for number, each in given.items() if (words := self._words_of(each, copied))}
        if found := [(node, words) for node in nodes if (words := self._words_of(node.variable, copied))]:
            users, seen = graph_behind(outputs, (ENTRY_NODE,)), set[Any]()
            leading = {each: words for node, words in found for each in leading_to(node, users, seen)}
            strays |= {number: leading[each.grad_fn] for number, each in enumerate(outputs) if each.grad_fn in leading}
        return strays

    def _owner_of(self, leaf: torch.Tensor, copied: Copies) -> str:
        for copies in (copied, self._copied):
            ref, owner = copies.get(id(leaf), (None, ""))
            if ref is not None and ref() is leaf:
                return owner
        return ""

    def _words_of(self, leaf: torch.Tensor, copied: Copies) -> str:
        if owner := self._owner_of(leaf, copied):
            return (
                f"{described(leaf)} that {owner} made as it was loaded in a worker, because its own pickling does "
                "not carry the tensor itself; have __getstate__ or __reduce__ give the tensor, or pass it to the function "
                "as an argument"
            )
        if has_place(leaf) and (place := PLACES[id(leaf)]):
            return (
                f"{place.in_full(leaf)} ({described(leaf)}), which is the worker's own; pass it to the "
                f"function as an argument, or call cloudpickle.register_pickle_by_value({place.package}), so that it "
                "travels with the function"
            )
        return ""


def leads_to_modules(pickled: bytes) -> bool:
    return any(each in pickled for each in WAYS_TO_MODULES)


def described(leaf: torch.Tensor) -> str:
    return f"a {type(leaf).__name__.lower()} of shape {tuple(leaf.shape)}"


# --- where leaves are


def copied_in(value: Any, pickled: bytes, known: Iterable[torch.Tensor]) -> Copies:
    """The leaves in what was loaded that are none of the `known` ones, by id; and the class whose pickling they came of."""
    if not pickled.endswith(RUNS_CODE):
        return {}
    found, objects = leaves_in([value], set())
    left = found.keys() - set(map(id, known))
    if not left:
        return {}
    owners = dict.fromkeys(left, "an object")
    users = [each for each in objects if not is_of_libraries(type(each).__module__)]  # from the outer ones to the inner ones
    for each in sorted(users, key=lambda each: has_own_way(type(each))):
        owners.update(dict.fromkeys(left & leaves_in([each], set())[0].keys(), type(each).__qualname__))
    return {key: (weakref.ref(found[key]), owner) for key, owner in owners.items()}


def leaves_in(values: Iterable[Any], seen: set[int]) -> tuple[dict[int, torch.Tensor], list[Any]]:
    """The leaves to which `values` lead, by id, and all objects on the way; not by way of modules, nor of what was `seen`."""
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


# what has functions of the user's, and their modules, in it
CARRY = "mpgrad.tasks.", "mpgrad.torch_state.modes.", "mpgrad.joblib.", "mpgrad.pickling.modules.CarriedModule"


def is_ours(kind: type) -> bool:
    """A pool's machinery: inline, or in a thread, it has functions and what they made."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name.startswith("mpgrad.") and not name.startswith(CARRY) and not issubclass(kind, torch.nn.Module)


# --- what is known of leaves


class Place:
    """Where a module keeps a leaf; a module "" stands for none."""

    def __init__(self, leaf: torch.Tensor, module: str, name: str) -> None:
        self.ref = weakref.ref(leaf, functools.partial(forget, id(leaf)))
        self._module = module
        self._name = name
        self._path: str | None = None

    def __bool__(self) -> bool:
        return bool(self._module)

    @property
    def package(self) -> str:
        return self._module.partition(".")[0]

    def in_full(self, leaf: torch.Tensor) -> str:
        if self._path is None:
            value = vars(sys.modules[self._module]).get(self._name)
            self._path = find(value, lambda part: id(leaf) in leaves_in([part], set())[0]).path
        joint = "." if self._path and self._path[0].isidentifier() else ""
        return f"{self._module}.{self._name}{joint}{self._path}"


PLACES: dict[int, Place] = {}  # by id of the leaf


def note_places(given: Iterable[torch.Tensor], nodes: Iterable[Any]) -> None:
    """Where these leaves, and those of the nodes, are kept; in none, where the initializer made one, or nobody keeps it."""
    unknown = [each for each in given if not has_place(each)]
    unplaced = [node for node in nodes if not has_place(node.variable)]
    if not (unknown or unplaced) or not SEARCHES.may_begin():
        return
    if unplaced:
        gc.collect(1)  # what the call left behind in cycles, for to look through modules takes longer
    unknown += [node.variable for node in unplaced if is_held(node)]
    if not unknown:
        return
    look_through_modules()
    SEARCHES.end(found=any(map(has_place, unknown)))
    for each in unknown:
        if not has_place(each):
            PLACES[id(each)] = Place(each, "", "")


def has_place(leaf: torch.Tensor) -> bool:
    """Or is known to have none."""
    place = PLACES.get(id(leaf))
    return place is not None and place.ref() is leaf


class Searches:
    """How long they take: a function that keeps a new leaf in each call does not pay for one each time. What was not
    searched for is not noted, so it is met again."""

    def __init__(self) -> None:
        self._began = self._rest_until = 0.0
        self._in_vain = 0  # in a row

    def may_begin(self) -> bool:
        self._began = time.perf_counter()
        return self._began >= self._rest_until

    def end(self, found: bool) -> None:
        self._in_vain = 0 if found else self._in_vain + 1
        now = time.perf_counter()
        if self._in_vain > IN_VAIN:
            self._rest_until = now + (now - self._began) * REST


IN_VAIN = 8  # as many searches in a row need no rest
REST = 20  # times as long as a search took
SEARCHES = Searches()


def look_through_modules() -> None:
    """Note all leaves that the modules of packages, or of the user's own that were imported here, lead to."""
    seen: set[int] = set()
    for module, found in list(sys.modules.items()):
        if is_of_libraries(module) or not issubclass(type(found), types.ModuleType):
            continue
        for name, value in list(vars(found).items()):
            for key, leaf in leaves_in([value], seen)[0].items():
                if not is_of_initializer(leaf):
                    PLACES[key] = Place(leaf, module, name)


def forget(key: int, ref: weakref.ref[torch.Tensor]) -> None:
    if key in PLACES and PLACES[key].ref is ref:
        del PLACES[key]


def is_of_initializer(leaf: torch.Tensor) -> bool:
    ref = OF_INITIALIZER.get(id(leaf))
    return ref is not None and ref() is leaf


OF_INITIALIZER: dict[int, weakref.ref[torch.Tensor]] = {}


@contextmanager
def noting_those_of_initializer() -> Iterator[None]:
    """What is made in the body is meant to be the worker's own."""
    before = set(map(id, all_leaves()))
    yield
    OF_INITIALIZER.update({id(leaf): weakref.ref(leaf) for leaf in all_leaves() if id(leaf) not in before})
