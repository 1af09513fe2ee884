"""Any structure or function is pickled into bytes and a list of its tensors.

cloudpickle pickles lambdas, closures and everything that a script defines. But it would pickle
tensors by value, and it fails on tensors that need gradients. Here each tensor is replaced with a
call of `tensor_at` with its number, which the unpickler resolves. Other modules decide how the
tensors are sent and who owns their memory. The tensors that a *function* reaches in this way are
its captures. The bytes also contain a tensor's class and the attributes that were set on it, which
the received tensor gets.

For each class a pickler decides once how its objects are reduced (`_way_of`). Most objects reduce
themselves.

Large buffers of other libraries, mostly numpy arrays, are also taken out, as tensors of bytes.
Loading reads the buffers in the order in which they were taken out. So they are at the end of the
list, in reverse order. `mpgrad.pickling.reducers` handles objects that pickle refuses or changes.

The result of an unfinished call (`DeferredValue`) is replaced with a call of `loaded_with` and a
dependency on the future value.
"""

from __future__ import annotations

import builtins
import copyreg
import enum
import functools
import io
import itertools
import operator
import pickle
import re
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from cloudpickle import list_registry_pickle_by_value
from cloudpickle.cloudpickle import _function_setstate as function_setstate
from cloudpickle.cloudpickle import _make_function as make_dynamic
from cloudpickle.cloudpickle import _should_pickle_by_reference as by_reference
from torch.nn import Module

from mpgrad.pickling.class_states import ABSENT, MADE_BY_PYTHON
from mpgrad.pickling.classes import CALLERS_OWN, COPIES, SETS_CLASS, ClassPickler, ClassUnpickler
from mpgrad.pickling.compiled import reduce_compiled
from mpgrad.pickling.modules import (
    KNOWN,
    UNCARRIED,
    GlobalsReference,
    Lookups,
    Namespaces,
    NamesReference,
    OwnValueReference,
    SysReference,
    WantedName,
    fill_main,
    find_in,
    is_of_libraries,
    is_own,
    is_users_own,
    looks_up,
    main_of,
    make_function,
    mentioned_in,
    module_of,
    name_of,
    own_value,
    pickle_finds,
    reduce_carried,
    set_function,
    stands_alone,
    uses_in,
    uses_of,
)
from mpgrad.pickling.objects import Way, by_own_code, way_of
from mpgrad.pickling.reducers import (
    INHERITED,
    PROXIES,
    function_state,
    is_rebuilt,
    itself,
    named_attributes,
    reduce_exception,
    reduce_module,
    reduce_proxy,
    reduce_subclass,
    with_class,
)
from mpgrad.pickling.registrations import Accessors, RegisteredKind, accessors_named, registered_for
from mpgrad.pickling.streams import (
    Root,
    Streams,
    Travel,
    captured,
    reduce_generator,
    set_attributes,
)
from mpgrad.torch_state.generators import is_generator_class, learn
from mpgrad.torch_state.private import is_leaf_with_grad, plain_alias
from mpgrad.wire.messages import Structure, with_tensors
from mpgrad.wire.tensor_refs import (
    CONSTANT,
    INLINE_BYTES,
    PLAIN,
    check_carriable,
    check_class,
    have_attributes,
)

__all__ = [
    "MOST_READ",
    "MOST_READ_AGAIN",
    "NAMES",
    "RUNS_CODE",
    "CallerPickler",
    "DeferredValue",
    "ProbePickler",
    "TensorPickler",
    "TensorUnpickler",
    "dumps",
    "dumps_result",
    "has_own_way",
    "leads_to_libraries",
    "loads",
    "loads_result",
    "size_alone",
]


class DeferredValue:
    """A value that may not exist yet.

    This is not an ABC, because everything that is pickled is tested against it.
    """

    def _dependency(self) -> object | None:
        """Return the dependency that will provide the value.

        Return None if the value was already taken, because it may have been changed since then.
        """
        raise NotImplementedError

    def _taken(self) -> Any:
        """Return the value. Call this only if `_dependency` returned None."""
        raise NotImplementedError


def dumps(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle `value`. Return the bytes, and a list of its distinct tensors followed by its buffers.

    The tensors are in the order in which pickle meets them.
    """
    buffer = io.BytesIO()
    pickler = TensorPickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors + pickler.buffers[::-1]


def dumps_result(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle a result as `dumps` does, but replace tensors of other classes with plain aliases.

    Leaves are not replaced, because other code may refer to them.
    """
    pickled, tensors = dumps(value)
    for number, each in enumerate(tensors):
        if type(each) not in PLAIN and not is_leaf_with_grad(each):
            tensors[number] = plain_alias(each)
    return pickled, tensors


def loads(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild the value, with `tensors` in place of those that `dumps` took out."""
    return TensorUnpickler(io.BytesIO(pickled), tensors, (), None).load()


def loads_result(shape: Structure, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild the result of a call (see `mpgrad.wire.messages.Structure`)."""
    if shape is None:
        return tensors[0]
    if isinstance(shape, tuple):
        (value,) = shape
        return with_tensors(value, iter(tensors)) if type(value) is tuple else value
    return tuple(tensors) if isinstance(shape, int) else loads(shape, tensors)


class TensorPickler(ClassPickler):
    """Pickles any object, with its tensors and large buffers replaced with numbers.

    They are moved to `tensors` and `buffers`.
    """

    def __init__(self, buffer: io.BytesIO, dependencies: list[Any] | None = None) -> None:
        self.buffer = buffer
        self.tensors: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        # A bound method as callback would make a cycle. Then the garbage collector would have to
        # free the tensors and their graphs.
        super().__init__(
            buffer, protocol=5, buffer_callback=functools.partial(stays_in_band, self.buffers)
        )
        self.dependencies = dependencies
        self.runs_code = False  # see `RUNS_CODE`
        self._ways: dict[type, Way | None] = {
            torch.Tensor: TensorPickler._reduce_tensor,
            types.FunctionType: type(self)._reduce_code,
        }

    @property
    def taken_out(self) -> list[torch.Tensor]:
        return self.tensors + self.buffers[::-1]

    @property
    def mark(self) -> bytes:
        """Return the mark to write after the pickle."""
        return RUNS_CODE if self.runs_code else b""

    def reducer_override(self, value: object) -> Any:
        kind = type(value)
        try:
            way = self._ways[kind]
        except KeyError:
            way = self._ways[kind] = self._way_of(kind)
        return value.__reduce_ex__(5) if way is None else way(self, value)

    def _way_of(self, kind: type) -> Way | None:
        """Return how this pickler reduces objects of a class, or None if they reduce themselves."""
        if issubclass(kind, torch.Tensor):
            return TensorPickler._reduce_tensor
        if kind in PROXIES:
            return lambda pickler, value: reduce_proxy(value)
        self.runs_code = self.runs_code or has_own_way(kind)
        if issubclass(kind, DeferredValue):
            return type(self)._reduce_deferred
        if issubclass(kind, Module):
            return lambda pickler, value: reduce_module(value) or value.__reduce_ex__(5)
        if issubclass(kind, (types.FunctionType, type, *CALLERS_OWN)):
            return type(self)._reduce_code
        if issubclass(kind, BaseException) and is_rebuilt(kind):
            return lambda pickler, value: reduce_exception(value)
        if (reduce := self.dispatch_table.get(kind)) is not None:
            return lambda pickler, value: reduce(value)
        if not INHERITED.isdisjoint(kind.__mro__):
            return lambda pickler, value: reduce_subclass(value) or value.__reduce_ex__(5)
        return way_of(kind)

    def _reduce_tensor(self, value: torch.Tensor) -> Any:
        """Reduce a tensor to its number, attributes and class, without the class's own pickling. So
        a leaf stays a leaf."""
        kind, number = type(value), len(self.tensors)
        if kind is not Root and have_attributes((value,)):
            if kind not in PLAIN:
                check_class(value)
            self.tensors.append(value)
            own = value.__dict__ if kind in PLAIN else named_attributes(value)
            return tensor_at, (number, kind), own, None, None, set_attributes
        self.tensors.append(value)
        return tensor_at, (number,)

    def _reduce_deferred(self, value: Any) -> Any:
        """Reduce a value that may not exist yet. If the caller already has it, pickle the value
        itself."""
        if self.dependencies is None:
            raise TypeError(
                "a future can be an argument of a call, but neither part of a function or result, "
                "nor used in a torch.func transform; pass it as an argument, or pass its result()"
            )
        if (dependency := value._dependency()) is None:
            return itself, (value._taken(),)
        self.dependencies.append(dependency)
        return loaded_with, ("results", len(self.dependencies) - 1)

    def _reduce_code(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            if value in BY_NAME:
                return NotImplemented
            if self.to_caller and (carried := reduce_carried(value)) is not None:
                return carried
        return super().reducer_override(value)

    def _dynamic_function_reduce(self, function: types.FunctionType) -> Any:
        compiled = reduce_compiled(function)
        if compiled is not None:
            return compiled
        try:
            state = function_state(function)
        except ReferenceError:  # each global is tested with `isinstance`, which a proxy forwards
            uses_gone = (
                f"{function.__qualname__} uses a weak proxy (weakref.proxy) of an object that is "
                "gone"
            )
            raise pickle.PicklingError(f"{uses_gone}; drop the proxy, or keep the object") from None
        return (
            make_dynamic,
            self._function_getnewargs(function),
            state,
            None,
            None,
            function_setstate,
        )


# a function that returns the parts of an object, and the object
Look = tuple[Callable[[Any], Sequence[Any]], Any]


def values_of(names: tuple[dict[str, Any], Sequence[str]]) -> Sequence[Any]:
    """Return the values of some names in a dictionary."""
    contents, chosen = names
    return [contents.get(name, ABSENT) for name in chosen]


def pairs_of(value: dict[Any, Any]) -> Sequence[Any]:
    return (*value, *value.values())


OF_A_FUNCTION = operator.attrgetter(
    *("__code__", "__defaults__", "__closure__", "__name__", "__qualname__", "__module__"),
    "__doc__",
)


def held_by_function(value: types.FunctionType) -> Sequence[Any]:
    """Return the function's code, defaults, closure, names and attributes."""
    parts = OF_A_FUNCTION(value)
    try:
        inside = vars(value), value.__kwdefaults__ or {}, value.__annotations__
    except Exception:  # since Python 3.14, if only type checkers know a name in the annotations
        inside = vars(value), value.__kwdefaults__ or {}, {}
    return [*parts, *itertools.chain(*map(pairs_of, inside))]


def held_by_class(value: type) -> Sequence[Any]:
    """Return a class's names, bases, body and registrations, and the attributes of an enumeration's
    members."""
    body = {name: each for name, each in vars(value).items() if name not in MADE_BY_PYTHON}
    members = value if issubclass(value, enum.Enum) else ()
    inside = itertools.chain(*(pairs_of(vars(each)) for each in members))
    names = value.__name__, value.__qualname__
    registered = parts_of(registered_for(value))
    return [type(value), *names, *value.__bases__, *pairs_of(body), *inside, *registered]


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the contents of nested containers that are new each time."""
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from parts_of(each)
    else:
        yield value


def attributes_beside_state(generator: Any) -> Sequence[Any]:
    """Return the attributes of a random number generator, whose state is not in the pickle."""
    return pairs_of(
        {name: value for name, value in vars(generator).items() if name != "gauss_next"}
    )


# --- an unpickler replaces calls of these functions


def tensor_at(number: int, kind: type | None = None) -> Any:
    """Return the tensor with this number, changed to the class `kind` if that is given."""
    raise NOT_HERE


def loaded_with(what: str, *given: Any) -> Any:
    """Return an object that the pickle is loaded with: a result, a module, or streams."""
    raise NOT_HERE


NOT_HERE = RuntimeError("this pickle must be loaded with its tensors")
Memo = dict[int, tuple[int, Any]]  # pickle's memo: a number and the object, by the object's id
# references and immutable objects; their parts have their own identity
WITHOUT_IDENTITY = {
    *(str, bytes, tuple, frozenset, types.CodeType, types.BuiltinFunctionType, types.MethodType),
    *(property, classmethod, staticmethod, Streams, NamesReference, OwnValueReference),
    GlobalsReference,
}


def has_identity(value: object) -> bool:
    """Whether it matters that two places refer to the same object.

    Classes, and functions that are sent by name, always stay the same object.
    """
    if isinstance(value, types.FunctionType):
        return name_of(value) is None and not by_reference(value)
    return type(value) not in WITHOUT_IDENTITY and not isinstance(value, type | types.ModuleType)


def as_usual(way: Way | None, pickler: TensorPickler, value: Any) -> Any:
    return value.__reduce_ex__(5) if way is None else way(pickler, value)


def has_own_way(kind: Any) -> bool:
    """Whether the objects of the class are pickled by their own code.

    Such code may leave out tensors and make other ones.
    """
    reducer = copyreg.dispatch_table.get(kind)
    return has_methods_for_pickle(kind) if reducer is None else not is_known(reducer)


@functools.lru_cache(maxsize=1024)
def has_methods_for_pickle(kind: Any) -> bool:
    if is_known(kind):
        return False
    names = OF_PICKLE + (OF_ITEMS if issubclass(kind, list | dict) else ())
    return not all(is_known(getattr(kind, name, None)) for name in names) or makes_own(kind.__new__)


def makes_own(new: Any) -> bool:
    """Whether a `__new__` is the user's. Python makes that of a named tuple."""
    return (
        isinstance(new, types.FunctionType)
        and not is_known(new)
        and not new.__module__.startswith("namedtuple_")
    )


def is_known(value: Any) -> bool:
    """Whether a class or function is Python's or PyTorch's."""
    return is_of_libraries(getattr(value, "__module__", "builtins"))


# this mark follows a pickle whose loading runs code of its objects
RUNS_CODE = b"runs code"
OF_PICKLE = (
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
)
OF_ITEMS = "__setitem__", "append", "extend"


class CallerPickler(TensorPickler):
    """Pickles on the caller's side.

    Functions and classes of the user's modules are pickled by name, and recorded in `wanted`.
    """

    to_caller = False
    follows_lookups = True  # sends the names that functions may find at run time
    refuses_files = False  # cloudpickle would send the contents of open files

    def __init__(
        self, buffer: io.BytesIO, dependencies: list[Any] | None = None, travel: Travel = captured
    ) -> None:
        """Make a pickler. `travel` reduces generators of random numbers."""
        super().__init__(buffer, dependencies)
        learn()
        self._travel = travel
        self._lookups: dict[int, Lookups] = {}  # by id of the namespace
        self.globals_ref: dict[int, dict[str, Any]]  # cloudpickle's
        self.wanted: dict[WantedName, None] = {}  # in order
        self._seen: set[str] = set()  # modules whose wanted names are known
        self._here = NamesReference()
        self.given: dict[int, dict[str, Any]] = {}  # the globals that each function uses, by its id
        self.looks: list[Look] = []  # for a `ContentRecord`
        self._made: set[int] = set()  # ids of parts that were made for the pickle
        self.finds_names = False  # whether functions may find names that are not in their code

    def note_made(self, parts: Iterable[Any]) -> None:
        for each in parts:
            if type(each) is tuple:
                self.note_made(each)
            elif type(each) in (dict, list, types.CellType):
                self._made.add(id(each))

    def identified(self) -> Memo:
        """Return the part of the memo with objects whose identity matters."""
        return {
            key: entry
            for key, entry in self.memo.copy().items()
            if key not in self._made and has_identity(entry[1])
        }

    def look(self, held: Callable[[Any], Sequence[Any]], value: Any) -> None:
        """Record how to read the value's contents, for later comparisons."""
        self.looks.append((held, value))

    def _way_of(self, kind: type) -> Way | None:
        if self.refuses_files and issubclass(kind, io.IOBase):
            return refuse_files
        if issubclass(kind, types.FunctionType | type | functools._lru_cache_wrapper):
            return type(self)._reduce_code
        if kind in PLACES:
            return lambda pickler, value: (loaded_with, (PLACES[kind], *value))
        way = super()._way_of(kind)
        if issubclass(kind, types.ModuleType):
            return lambda pickler, value: pickler._reduce_own_module(way, value)
        if is_generator_class(kind):
            return lambda pickler, value: pickler._generator(value) or as_usual(way, pickler, value)
        return way

    def _reduce_code(self, value: Any) -> Any:
        if value in BY_NAME:
            return NotImplemented
        wanted = name_of(value)
        if wanted is not None:
            self.wanted[wanted] = None
            return (
                NotImplemented
                if pickle_finds(wanted.module)
                else (find_in, (self._here, wanted.module, value.__qualname__))
            )
        if isinstance(value, types.FunctionType):
            return self.reduce_function(value)
        if isinstance(reduced := super()._reduce_code(value), tuple):
            self.note_made(reduced)
            if isinstance(value, type) and len(reduced) > 2:  # not found by a name
                self.look(held_by_class, value)
        return reduced

    def _reduce_own_module(self, way: Way | None, value: types.ModuleType) -> Any:
        name = value.__name__
        if is_own(name) and sys.modules[name] is value:
            if name not in self._seen:  # not met in a function
                self.wanted[WantedName(name, None)] = None
            return loaded_with, ("module", name)
        is_main = type(value) is types.ModuleType and value is sys.modules["__main__"]
        if is_main and self.follows_lookups:
            return self._reduce_main(vars(value))
        return as_usual(way, self, value)

    def _generator(self, value: Any) -> Any:
        if (reduced := reduce_generator(value, self._travel)) and hasattr(value, "__dict__"):
            self.look(attributes_beside_state, value)
        return reduced

    def globals_along(self, value: types.FunctionType, given: dict[str, Any]) -> dict[str, Any]:
        """Return the globals that are pickled with the function. It finds the others in its
        module."""
        return {}

    def reduce_function(self, value: types.FunctionType, by_value: bool = False) -> Any:
        """Reduce a function by value, unless it belongs to a library.

        If its globals are those of a user's module, they are pickled as that module's globals.
        """
        reduced = self._dynamic_function_reduce(value) if by_value else super()._reduce_code(value)
        if reduced is NotImplemented:
            return reduced
        self.look(held_by_function, value)
        if len(reduced[1]) != FUNCTION_PARTS:  # the compiler made it
            return reduced
        _, (code, own_globals, *others), (attributes, rest), items, pairs, _ = reduced
        given, home = rest["__globals__"], module_of(value)
        self.given[id(value)] = dict(given)
        rest["_cloudpickle_submodules"] = [
            each for each in rest["_cloudpickle_submodules"] if not is_own(each.__name__)
        ]
        names = tuple(uses_in(value.__code__).names)
        self.look(values_of, (value.__globals__, names))
        self.look(values_of, (vars(builtins), names))
        self.look(accessors_named, names)
        if accessors := accessors_named(names):
            # cloudpickle loads this list with the function, and does not keep it
            rest["_cloudpickle_submodules"].append(Accessors(accessors))
        for wanted in uses_of(value, given):
            self._seen.add(wanted.module)
            self.wanted[wanted] = None
            if wanted.name == "__name__":
                self.look(values_of, (vars(sys.modules[wanted.module]), names))
        if home is not None and looks_up(value):
            self.wanted[WantedName(home, None)] = None
        if self.follows_lookups and stands_alone(value.__globals__) and looks_up(value):
            mentioned = mentioned_in(value.__code__)
            found, rest[UNCARRIED] = self._names_of(value.__globals__, mentioned, given)
            given.update(found)
            if own_globals.get("__name__") == "__main__":
                given.update(
                    {name: SysReference(own_globals) for name, each in given.items() if each is sys}
                )
        if home is not None:
            self.wanted.update(dict.fromkeys([WantedName(home, name) for name in given]))
            rest["__globals__"], own_globals = (
                self.globals_along(value, given),
                GlobalsReference(home),
            )
        here = self._here
        arguments, state = (here, code, own_globals, *others), (attributes, rest, here)
        self.note_made((arguments, state, rest["_cloudpickle_submodules"], rest["__globals__"]))
        self.note_made([rest["__annotations__"]])
        return make_function, arguments, state, items, pairs, set_function

    def _names_of(
        self, namespace: dict[str, Any], mentioned: frozenset[str], given: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the names that a script's function may find at run time, except the `given` ones.

        Also return the reasons why other names are not sent.
        """
        self.finds_names = True
        lookups = self._lookups.setdefault(id(namespace), Lookups(namespace, size_alone))
        return lookups.names(mentioned, given), lookups.uncarried

    def _reduce_main(self, namespace: dict[str, Any]) -> Any:
        here = self.globals_ref.setdefault(id(namespace), {"__name__": "__main__"})
        state = self._names_of(namespace, frozenset(), here)
        return main_of, (here,), state, None, None, fill_main


def refuse_files(pickler: CallerPickler, value: Any) -> Any:
    if not isinstance(value, io.StringIO | io.BytesIO):
        raise TypeError(f"cannot pickle an open file ({value!r})")
    return value.__reduce_ex__(5)


class ProbePickler(CallerPickler):
    """Shows the contents of a value, and whether it can be pickled. It does not resolve futures."""

    def _reduce_deferred(self, value: Any) -> Any:
        return super()._reduce_deferred(value) if self.dependencies is None else (loaded_with, ())


class SizePickler(CallerPickler):
    """Measures the size of a value's pickle.

    It raises OverflowError above the limit. If there is a limit, it also raises TypeError for
    objects whose own code would run.
    """

    follows_lookups = False
    is_asked = False

    def persistent_id(self, value: Any) -> None:
        if value is sys.modules:
            raise TypeError("it contains sys.modules")

    def reducer_override(self, value: object) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if not self.is_asked and (
            is_made_by_own_code(kind) if kind is value else has_own_way(kind)
        ):
            refuse_users(kind)
        reduced = super().reducer_override(value)
        way = self._ways[type(value)]
        if not self.is_asked and way in (None, by_own_code) and is_called(value):
            refuse_users(kind)
        return reduced


def refuse_users(kind: type) -> None:
    if is_users(kind):
        raise TypeError(f"{kind.__qualname__} has code of its own that would run in the worker")


def is_users(kind: type) -> bool:
    """Whether the class is the user's or derived from one. The main script's classes count."""
    return any(map(is_users_own, {each.__module__ for each in kind.__mro__}))


def is_made_by_own_code(kind: type) -> bool:
    begins = kind.__init_subclass__
    return not is_known(type(kind)) or (
        isinstance(begins, types.MethodType) and not is_known(begins)
    )


def is_called(value: object) -> bool:
    """Whether pickle calls the class to rebuild the object, as it does for sets.

    Such a call runs the class's own code.
    """
    kind = type(value)
    if not is_known(getattr(kind, "__array_finalize__", None)):
        return True
    is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    # calling an enumeration only looks up a member
    calls_init = not is_known(kind.__init__) and type(kind).__call__ is type.__call__
    return calls_init and not is_usual and value.__reduce_ex__(5)[0] is kind


class LimitedBuffer(io.BytesIO):
    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = sys.maxsize if limit is None else limit

    def write(self, data: Any) -> int:
        if self.tell() > self._limit:
            raise OverflowError
        return super().write(data)


def size_alone(value: Any, limit: int | None) -> int:
    """Return the size of the value's pickle in bytes, including its tensors."""
    pickler = SizePickler(buffer := LimitedBuffer(limit))
    pickler.is_asked = limit is None
    pickler.dump(value)
    for each in pickler.tensors:
        if type(each) is not Root:
            check_carriable(each, "it")
    size = buffer.tell() + sum(each.nbytes for each in pickler.taken_out)
    if limit is not None and size > limit:
        raise OverflowError
    return size


FUNCTION_PARTS = 5  # the number of arguments from which cloudpickle makes a function
# the first argument of `loaded_with` for objects that the unpickler replaces
PLACES: dict[type, str] = {
    NamesReference: "names",
    Streams: "streams",
    GlobalsReference: "globals",
    OwnValueReference: "value",
}
# functions that most pickles need
BY_NAME: set[Any] = {tensor_at, loaded_with, itself, make_function, set_function, find_in}


def stays_in_band(taken_out: list[torch.Tensor], buffer: pickle.PickleBuffer) -> bool:
    """Return whether a buffer stays in the bytes, as pickle's `buffer_callback`.

    Small buffers do. Others become tensors in `taken_out`.
    """
    memory, numpy = buffer.raw(), sys.modules.get("numpy")
    # only numpy can rebuild buffers from tensors
    if memory.nbytes <= INLINE_BYTES or numpy is None:
        return True
    with torch.inference_mode():  # a version counter would not count writes to the buffer
        tensor = torch.from_numpy(numpy.asarray(ReadOnlyMemory(memory)))
    if is_constant(memory.obj):
        vars(tensor)[CONSTANT] = True
    taken_out.append(tensor)
    return False


class ReadOnlyMemory:
    """Memory that may be read-only. It is passed to torch, which has no read-only tensors."""

    def __init__(self, memory: memoryview) -> None:
        pointer = sys.modules["numpy"].frombuffer(memory, "u1").ctypes.data
        self.__array_interface__ = {
            "data": (pointer, False),
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self.memory = memory  # kept alive


def is_constant(value: Any) -> bool:
    """Whether the value is a numpy number, or a numpy array that is read-only, as its bases are.

    Users mark an array as constant with `flags.writeable = False`.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(value, numpy.generic):
        return type(value).__module__ == "numpy" and type(value) is not numpy.void
    while type(value) is numpy.ndarray and not value.flags.writeable:
        value = value.base
    return value is None or type(value) is bytes


class TensorUnpickler(ClassUnpickler):
    """Loads a pickle of `TensorPickler`, with its tensors."""

    def __init__(
        self,
        buffer: io.BytesIO,
        tensors: Sequence[torch.Tensor],
        dependency_results: Sequence[Any],
        names: Namespaces | None,
        streams: Streams | None = None,
        objects: Sequence[Any] = (),
    ) -> None:
        """Make an unpickler. The pickle has numbers for `objects`, which came with another
        pickle."""
        if objects:
            buffer = io.BytesIO(memo_of(len(objects)) + buffer.read())
        # `cpu()`, because `device=` may have moved the arguments of a call to a device
        super().__init__(
            buffer,
            buffers=(tensor.cpu().numpy() for tensor in reversed(tensors)),
            copies=None if names is None else names.classes,
        )
        self._tensors = tensors
        self._dependency_results = dependency_results
        self._names = names
        self._streams = Streams() if streams is None else streams
        self._objects = objects
        if objects:
            self.load()

    def persistent_load(self, number: int) -> Any:
        return self._objects[number]

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == "tensor_at":
                return functools.partial(tensor_among, self._tensors)
            if name == "loaded_with":
                return functools.partial(
                    found_here, self._names, self._streams, self._dependency_results
                )
        if self._names is not None and module in self._names.modules:
            return find_in(self._names, module, name)
        found = super().find_class(module, name)
        if (module, name) != SETS_CLASS or self._names is None:
            return found
        if self._names.placement is not None:
            found = functools.partial(self._names.placement.set_class, found)
        if self._names.classes is not None:  # copies, which belong to one operation
            return functools.partial(set_copied, self._names, found)
        return functools.partial(self._names.set_class, found)


def set_copied(
    names: Namespaces, set_state: Callable[[type, Any], Any], made: type, state: Any
) -> None:
    """Set the state of a class for workers in the caller's process. Registrations of a copy end
    with the operations that use it."""
    set_state(made, state)
    if state[1] and made in COPIES and made not in names.registered:
        names.registered[made] = RegisteredKind(made)


def memo_of(count: int) -> bytes:
    """Return a pickle that puts an unpickler's first `count` objects into its memo."""
    after = pickle.BINPERSID + pickle.MEMOIZE + pickle.POP
    steps = (pickle.BININT + struct.pack("<i", number) + after for number in range(count))
    return b"".join([*steps, pickle.NONE, pickle.STOP])


def tensor_among(
    tensors: Sequence[torch.Tensor], number: int, kind: type[torch.Tensor] | None = None
) -> torch.Tensor:
    tensor = tensors[number]
    return tensor if kind is None else with_class(tensor, kind)


def found_here(names: Any, streams: Streams, results: Sequence[Any], what: str, *given: Any) -> Any:
    """Return the object for a call of `loaded_with`. A pickle with names is loaded with
    `names`."""
    if what == "results":
        return results[given[0]]
    if what == "streams":
        return streams
    if what == "names":
        return names
    if what == "module":
        return names.module(*given)
    return vars(names.module(*given)) if what == "globals" else own_value(OwnValueReference(*given))


# --- whether a pickle leads to installed packages

# the bytes of an item's pickle that are searched; searching more takes longer than it may save
MOST_READ = 16 << 10
# the same for a function that is sent again, whose pickle may contain the layers of a network
MOST_READ_AGAIN = 256 << 10
# a short string begins with an opcode and its length
NAMES = re.compile(rb"(?:\x8c.)?(\w+)", re.DOTALL)


def leads_to_libraries(pickled: bytes, most: int = MOST_READ) -> bool:
    """Whether the pickle names a package whose code it does not contain.

    Python's and PyTorch's packages do not count. A pickle of more than `most` bytes is taken to
    name one.
    """
    return len(pickled) > most or names_library(pickled, loaded())


LoadedFunction = tuple[int, str, frozenset[str]]


def loaded() -> LoadedFunction:
    """Return the state of the imports, for a later comparison.

    It changes when a module is imported, and when a package is registered to be sent by value.
    """
    return len(sys.modules), next(reversed(sys.modules)), frozenset(list_registry_pickle_by_value())


@functools.lru_cache(maxsize=64)  # the same function is mapped repeatedly
def names_library(pickled: bytes, modules: LoadedFunction) -> bool:
    return not libraries(modules).isdisjoint(NAMES.findall(pickled))


@functools.lru_cache(maxsize=1)
def libraries(modules: LoadedFunction) -> frozenset[bytes]:
    """Return the names of the libraries among those `loaded`."""
    roots = {name.partition(".")[0] for name in list(sys.modules)} - KNOWN - {"__main__"}
    return frozenset(root.encode() for root in roots if not is_own(root))
