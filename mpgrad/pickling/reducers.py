"""Reducers pickle objects that pickle and cloudpickle refuse or would change. Both sides use this
module.

A forked process has a copy of everything that its parent had. So a script may keep anything in its
globals and objects. Objects that make sense in another process are rebuilt there: caches, dispatch
tables, weak references, and scripted and parametrized modules. PyTorch's modules are sent without
their dictionaries for hooks if these are empty. An exception is rebuilt without its class's code,
which may require arguments that pickle does not have. A lock guards something within one process,
so the other process gets a new, unlocked one. A file or a socket cannot be rebuilt. For these,
`mpgrad.pickling.exceptions` reports the path and a remedy.

Guarantees: the object of a weak reference stays alive in the worker as long as the reference does,
    as in the caller, where other references keep it alive.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import copy
import copyreg
import dis
import functools
import gc
import importlib
import inspect
import io
import itertools
import struct
import sys
import threading
import types
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch
from cloudpickle.cloudpickle import _extract_code_globals as code_globals
from cloudpickle.cloudpickle import _lookup_module_and_qualname as importable_as
from cloudpickle.cloudpickle import dynamic_subimport
from torch.distributions.transforms import Transform
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpgrad.errors import read, write
from mpgrad.pickling.class_states import ABSENT
from mpgrad.pickling.classes import ClassPickler
from mpgrad.pickling.compiled import reduce_compiled, with_compiled_call, without_marks
from mpgrad.pickling.modules import attribute_here, closure_of, is_own, place_among, uses_in
from mpgrad.torch_state.generators import is_generator, learn
from mpgrad.torch_state.private import (
    compiled_in_place,
    load_archive,
    load_script,
    parametrize_again,
)

__all__ = [
    "HOOKS",
    "INHERITED",
    "PROXIES",
    "REGISTER",
    "annotations_of",
    "entries_with_tensors",
    "fill_exception",
    "function_state",
    "identities",
    "is_rebuilt",
    "itself",
    "named_attributes",
    "rebuilt",
    "reduce_by_value",
    "reduce_exception",
    "reduce_module",
    "reduce_proxy",
    "reduce_subclass",
    "weakly",
    "with_class",
]

Reduced = tuple[Any, ...]

NO_FILE = "<dynamic-code>"


def itself(value: Any) -> Any:
    return value


def with_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Return the tensor itself, with its class changed. An alias would not be a leaf."""
    tensor.__class__ = kind
    return tensor


def named_attributes(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return the tensor's `__dict__`, or None if it is empty.

    Values that libraries compare by `is` are replaced with their names.
    """
    return {name: by_name(each) for name, each in tensor.__dict__.items()} or None


def by_name(value: Any) -> Any:
    """Return the value, or a reference to it if the library module of its class contains it."""
    home = type(value).__module__
    if home in ("builtins", "__main__") or home not in sys.modules or is_own(home):
        return value
    if isinstance(value, torch.Tensor | Module):  # it may get gradients
        return value
    place = place_among(value, [home])
    return value if place is None else LibraryReference(*place)


class LibraryReference:
    """Represents an object that a library module contains under a name."""

    def __init__(self, module: str, name: str) -> None:
        self._path = module, name

    def __reduce__(self) -> Reduced:
        return attribute_here, self._path


# --- functions


def reduce_code(value: types.CodeType) -> Reduced:
    """Reduce code with the name of its file, for tracebacks.

    cloudpickle 3.1.3 and later gives all code the same file name.
    """
    make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](value)
    return make, tuple(
        value.co_filename if isinstance(part, str) and part == NO_FILE else part for part in parts
    )


def function_state(function: types.FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that cloudpickle sets on a rebuilt function: its attributes, and the rest.

    cloudpickle's own version searches all modules of the process for submodules that the function
    may need, which takes as long as a whole operation. It also misses names in class bodies.
    """
    code, given = function.__code__, globals_used(function)
    values = *given.values(), *closure_of(function).values()
    rest = {
        "__name__": function.__name__,
        "__qualname__": function.__qualname__,
        "__annotations__": annotations_of(function),
        "__kwdefaults__": function.__kwdefaults__,
        "__defaults__": function.__defaults__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__closure__": function.__closure__,
        "_cloudpickle_submodules": submodules_used(code, values),
        "__globals__": given,
    }
    return without_marks(vars(function)), rest


def annotations_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the annotations, as text if they cannot be evaluated.

    Names that only type checkers import cannot be evaluated. Since Python 3.14 the function's own
    code makes the annotations when they are first read.
    """
    try:
        return function.__annotations__
    except Exception:  # that code may raise anything
        library: Any = importlib.import_module("annotationlib")
        texts: dict[str, Any] = library.get_annotations(function, format=library.Format.STRING)
        return texts


def globals_used(function: types.FunctionType) -> dict[str, Any]:
    """Return the current values of the globals that the function's code uses by name."""
    code, known = function.__code__, function.__globals__
    return {
        name: known[name]
        for name in (*code_globals(code), *names_in_classes(code))
        if name in known
    }


def submodules_used(code: types.CodeType, values: Iterable[Any]) -> list[types.ModuleType]:
    """Return the submodules of packages in `values` whose names `code` uses.

    They are imported with the function.
    """
    names = uses_in(code).names
    packages = [
        value
        for value in values
        if isinstance(value, types.ModuleType) and value.__dict__.get("__package__")
    ]
    found: list[types.ModuleType] = []
    while packages:
        inside = packages.pop().__name__ + "."
        below = [module for name in names if (module := sys.modules.get(inside + name)) is not None]
        packages += below
        found += below
    return found


@functools.lru_cache(maxsize=4096)
def names_in_classes(code: types.CodeType) -> frozenset[str]:
    """Return the names that class bodies within `code` look up."""
    found: set[str] = set()
    for inner in (each for each in code.co_consts if isinstance(each, types.CodeType)):
        found |= names_in_classes(inner)
        if not inner.co_flags & inspect.CO_OPTIMIZED:
            found |= {each.argval for each in dis.get_instructions(inner) if each.opname in LOOK_UP}
    return frozenset(found)


LOOK_UP = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def reduce_cached(value: Any) -> Any:
    """Reduce a cached function by its name if a worker can import it.

    cloudpickle tries this only for functions and classes.
    """
    if importable_as(value) is not None:
        return value.__qualname__
    return reduce_by_value(value)


# --- views of memory


def reduce_memoryview(value: memoryview) -> Reduced:
    """Reduce a view of an object's whole memory together with the object, so they still share it.

    Any other view is reduced with a copy.
    """
    try:
        seen = value.obj
    except ValueError:
        raise TypeError("cannot pickle a released memoryview object") from None
    if not (is_pickled_whole(seen) and is_whole(value, memoryview(seen))):
        seen = value.tobytes() if value.readonly else bytearray(value.tobytes())
    parts: Reduced = seen, value.format, value.shape, value.readonly
    try:
        memoryview_again(*parts)
    except (TypeError, ValueError):
        what = f"the format {value.format!r} and the shape {value.shape}"
        raise TypeError(
            f"cannot pickle a memoryview with {what}; pass the object whose memory it shows"
        ) from None
    return memoryview_again, parts


def is_pickled_whole(seen: object) -> bool:
    """Whether the object's pickle contains all memory that a view of it may show."""
    return type(seen) in (
        bytes,
        bytearray,
        array.array,
        getattr(sys.modules.get("numpy"), "ndarray", None),
    )


def is_whole(view: memoryview, whole: memoryview) -> bool:
    return view.contiguous and whole.contiguous and view.nbytes == whole.nbytes


def memoryview_again(seen: Any, form: str, shape: tuple[int, ...], is_readonly: bool) -> Any:
    view: Any = memoryview(seen)
    if (view.format, view.shape) != (form, shape):
        flat = view.cast("B")
        # an empty view accepts no shape argument
        view = flat.cast(form) if len(shape) == 1 else flat.cast(form, shape)
    return view.toreadonly() if is_readonly else view


# --- exceptions


def is_rebuilt(kind: type[BaseException]) -> bool:
    """Whether pickle would lose contents of an exception of this class.

    Pickle calls the class with `args`, which its `__init__` may not accept. Pickle also leaves out
    slots. A class that defines its own way of pickling keeps that way if it is sound.
    """
    if not has_sound_pickle(kind):
        return True
    has_slots = any(vars(each).get("__slots__") for each in kind.__mro__)
    says_how = kind in copyreg.dispatch_table or not are_pythons(
        kind, "__reduce_ex__", "__reduce__", "__setstate__"
    )
    return not says_how and (has_slots or not are_pythons(kind, "__new__", "__init__"))


def are_pythons(kind: type, *names: str) -> bool:
    """Whether the class inherits these methods from Python's own classes, which are written in
    C."""
    return all(isinstance(getattr(kind, name), IN_C) for name in names)


IN_C = types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType


def has_sound_pickle(kind: type[BaseException]) -> bool:
    """Whether the class's `__setstate__` gets the state that its `__getstate__` returns.

    `BaseException` passes the `__dict__` to `__setstate__` and does not call `__getstate__`. A
    frozen dataclass with slots has both methods. It would use a name in the `__dict__`, such as
    `__notes__`, as the value of a field.
    """
    gives_state = any("__getstate__" in vars(each) for each in kind.__mro__ if each is not object)
    return not gives_state or kind.__reduce__ is not BaseException.__reduce__


def reduce_exception(error: Any) -> Reduced:
    """Reduce an exception without running its class's code."""
    state = read(error, "__dict__"), list(fields_of(error))
    return rebuilt, (type(error), read(error, "args")), state, None, None, fill_exception


def fields_of(error: BaseException) -> Iterator[tuple[type, str, Any]]:
    """Yield the values in slots and in fields of Python's own exceptions, such as `errno`."""
    for kind in type(error).__mro__:
        for name, member in vars(kind).items() if kind is not BaseException else ():
            # The `obj` of an AttributeError is left out, as in pickle, because it may be anything.
            if isinstance(member, types.MemberDescriptorType) and member is not AttributeError.obj:
                with contextlib.suppress(AttributeError):  # the slot is empty
                    value = member.__get__(error)
                    if value is not None or "__slots__" in vars(kind):
                        yield kind, name, value


def rebuilt(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Rebuild an exception through Python's own class.

    The `__new__` and `__init__` of its class may require other arguments.
    """
    new = next(
        each
        for owner in kind.__mro__
        if isinstance(each := vars(owner).get("__new__"), types.BuiltinFunctionType)
    )
    error: BaseException = new(kind, *args)
    write(error, "args", args)
    return error


def fill_exception(
    error: BaseException, state: tuple[dict[str, Any], Sequence[tuple[type, str, Any]]]
) -> None:
    """Restore the contents of an exception, which may be frozen."""
    attributes, fields = state
    read(error, "__dict__").update(attributes)
    for owner, name, value in fields:
        # an exception group already has the fields that cannot be set
        with contextlib.suppress(AttributeError):
            vars(owner)[name].__set__(error, value)


# --- files


def reduce_text_file(value: io.TextIOWrapper) -> Any:
    """Reduce the process's own streams by name, and refuse every other file.

    cloudpickle would send the contents of a file that is open for reading.
    """
    for name in ("stdout", "stderr"):
        if value is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(f"cannot pickle {type(value).__qualname__!r} object")


# --- objects that guard something within a process


def reduce_condition(value: threading.Condition) -> Reduced:
    # other objects may share the lock
    return threading.Condition, (value._lock,)  # type: ignore[attr-defined]


def reduce_local(value: threading.local) -> Any:
    """Reduce it to a new one with the same arguments. The threads' values are not sent."""
    if (by_name := reduce_attribute(value)) is not None:
        return by_name
    # the arguments that each thread's `__init__` gets, then the values of threads
    _, args, names, *_ = *gc.get_referents(value), {}
    kwargs = names if all(isinstance(name, str) for name in names) else {}
    return functools.partial(type(value), *args, **kwargs), ()


def reduce_context_variable(value: contextvars.ContextVar[Any]) -> Any:
    if (by_name := reduce_attribute(value)) is not None:
        return by_name
    try:
        # the value in this context, or the default
        return context_variable_again, (value.name, value.get())
    except LookupError:
        return context_variable_again, (value.name,)


def context_variable_again(name: str, *given: Any) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar(name, default=given[0]) if given else contextvars.ContextVar(name)


def reduce_attribute(value: object) -> Reduced | None:
    """Reduce an object by its name in an imported module, if a module contains it.

    The module's functions also find it there. Return None for the script's objects.
    """
    known, modules = NOWHERE.get(id(value), (None, 0))
    if known is not None and known() is value and modules == len(sys.modules):
        return None
    if (name := name_in_a_module(value)) is not None:
        return attribute_here, name
    if len(NOWHERE) == MOST_NOWHERE:
        NOWHERE.clear()
    NOWHERE[id(value)] = weakly(value), len(sys.modules)
    return None


def name_in_a_module(value: object) -> tuple[str, str] | None:
    """Return the module and the name from which the object can be imported."""
    modules = [
        name  # not another name of the module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and module.__name__ == name != "__main__"
    ]
    return place_among(value, modules)


def weakly(value: Any) -> Callable[[], Any]:
    """Return a reference that does not keep the value alive, if that is possible."""
    try:
        return weakref.ref(value)
    except TypeError:  # a context variable, for example
        return lambda: value


MOST_NOWHERE = 64
# Objects that no module contains, by id, with the number of modules at that time. Searching all
# modules takes milliseconds.
NOWHERE: dict[int, tuple[Callable[[], Any], int]] = {}


# --- weak references


REFERENCES = weakref.ref, weakref.WeakMethod
WEAK = weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet


def reference_again(kind: Any, target: Any) -> Any:
    return kind(target, functools.partial(let_go, target))


def let_go(target: Any, reference: Any) -> None:
    """Do nothing. As a weak reference's callback, this keeps the object alive in a worker.

    The worker may have no other reference to the object.
    """


def reduce_reference(value: weakref.ref[Any]) -> Reduced:
    target, kind = value(), type(value)
    return (dead_reference, (kind,)) if target is None else (reference_again, (kind, target))


def dead_reference(kind: Any) -> Any:
    """Return a reference whose object is dead."""
    return kind(DeadReferent().method if kind is weakref.WeakMethod else DeadReferent())


class DeadReferent:
    """The class of an object that dies at once."""

    def method(self) -> None: ...


PROXIES = {weakref.ProxyType, weakref.CallableProxyType}


def reduce_proxy(proxy: Any) -> Reduced:
    """Reduce a weak proxy to the object itself, which behaves the same."""
    try:
        return itself, (proxy.__repr__.__self__,)
    except ReferenceError:
        return dead_proxy, ()


def dead_proxy() -> Any:
    return weakref.proxy(DeadReferent())


def reduce_weak(value: Any) -> Reduced:
    """Reduce a WeakKeyDictionary, WeakValueDictionary or WeakSet. The rebuilt one keeps its
    contents alive."""
    if type(value) not in WEAK:  # attributes and methods of a subclass are unknown
        base = next(each.__name__ for each in WEAK if isinstance(value, each))
        raise TypeError(
            f"cannot pickle {type(value).__qualname__!r} object, of a subclass of {base}; use a "
            f"{base}"
        )
    contents = list(value if type(value) is weakref.WeakSet else value.items())
    return type(value), (), contents, None, None, fill_weak


def fill_weak(made: Any, contents: list[Any]) -> None:
    made.update(contents)
    made.kept = contents


def reduce_subclass(value: object) -> Any:
    """Reduce an object of a script's subclass of an `INHERITED` class like its base.

    Return None if the subclass defines pickling.
    """
    kinds = type(value).__mro__
    if not DESCRIPTORS.isdisjoint(kinds):
        return reduce_descriptor(value)
    base = next(
        each
        for each in kinds
        if each in INHERITED or vars(each).keys() & {"__reduce__", "__reduce_ex__"}
    )
    return REDUCERS[base](value) if base in INHERITED else None


# --- other objects of PyTorch


def reduce_method(value: types.MethodType) -> Any:
    owner = value.__self__
    if (
        isinstance(owner, type)
        and issubclass(owner, torch.autograd.Function)
        and value.__func__ is FUNCTION_APPLY
    ):
        return getattr, (owner, "apply")  # the worker's own `apply`, not a copy of its code
    return cloudpickle.Pickler.dispatch_table[types.MethodType](value)


def reduce_descriptor(value: Any) -> Reduced:
    """Reduce an object of a subclass of property, classmethod or staticmethod, such as those in
    `torch.distributions`."""
    kind = type(value)
    base = next(each for each in kind.__mro__ if each in DESCRIPTORS)
    _, arguments = OWN_MAP[base](value)
    return descriptor_again, (kind, base, arguments), vars(value) or None


def reduce_partial_method(value: functools.partialmethod[Any]) -> Reduced:
    """Reduce it to an empty one that is then filled.

    Since Python 3.14 its `__new__` requires the function, which pickle does not pass.
    """
    return object.__new__, (functools.partialmethod,), vars(value)


def descriptor_again(kind: Any, base: Any, arguments: tuple[Any, ...]) -> Any:
    """Rebuild a descriptor without the `__init__` of its subclass, which may require other
    arguments."""
    made = base.__new__(kind, *arguments)
    base.__init__(made, *arguments)
    return made


def whole(base: Any) -> Callable[[Any], Reduced | None]:
    """Make a reducer for a PyTorch class whose `__getstate__` leaves out too much."""

    def reduce(value: Any) -> Reduced | None:
        is_usual = type(value).__getstate__ is base.__getstate__
        return (copyreg.__newobj__, (type(value),), vars(value)) if is_usual else None  # type: ignore[attr-defined]

    return reduce


def reduce_storage(value: torch.UntypedStorage) -> Reduced:
    return storage_again, (torch.empty(0, dtype=torch.uint8, device=value.device).set_(value),)


def storage_again(values: torch.Tensor) -> torch.UntypedStorage:
    # this copies, because the tensor may be a part of shared memory
    return values.clone().untyped_storage()


def reduce_handle(value: RemovableHandle) -> Reduced:
    """Reduce the handle of a hook. Its class cannot rebuild a handle whose module is dead."""
    state = value.__getstate__()  # type: ignore[no-untyped-call]
    if any(each is None for each in itertools.chain(state[:1], *state[2:])):
        state = None, value.id
    return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]


def reduce_generator(value: torch.Generator) -> Any:
    # the default generator becomes the worker's own, which has the item's seed
    return (
        (getattr, (torch, "default_generator"))
        if value is torch.default_generator
        else value.__reduce_ex__(5)
    )


def reduce_limits(value: torch.finfo | torch.iinfo) -> tuple[Any, ...]:
    return type(value), (getattr(torch, value.dtype),)


def reduce_operator(value: object) -> Reduced:
    """Reduce a namespace, an operator or an overload of `torch.ops` by its name there."""
    path = getattr(value, "__name__", "") if isinstance(value, types.ModuleType) else str(value)
    return operator_again, (path.removeprefix("torch.ops."),)


def operator_again(path: str) -> object:
    try:
        return functools.reduce(getattr, path.split("."), torch.ops)
    except AttributeError as error:
        raise AttributeError(f"this process has no operator {path} ({error}); {REGISTER}") from None


def reduce_ufunc(value: Any) -> Any:
    """Reduce a ufunc of `numpy.frompyfunc` with its Python function."""
    function = next(filter(callable, gc.get_referents(value)), None)
    if function is None:  # it can be found by name in its package
        return copyreg.dispatch_table[type(value)](value)
    identity = {} if value.identity is None else {"identity": value.identity}
    make = functools.partial(sys.modules["numpy"].frompyfunc, **identity)
    return make, (function, value.nin, value.nout)


# --- modules, and TorchScript


REGISTER = (
    "register operators in a module that workers import, or in each worker, with "
    "Pool(initializer=...)"
)


def reduce_imported(value: types.ModuleType) -> Any:
    """Reduce a module, of any class, by its name.

    This includes modules that are only an attribute of another module, such as
    `torch._C._functions`.
    """
    parent, _, name = value.__name__.rpartition(".")
    if value.__name__ not in sys.modules and getattr(sys.modules.get(parent), name, None) is value:
        return getattr, (sys.modules[parent], name)
    if type(value) is types.ModuleType and not is_found(value):
        return dynamic_subimport, (
            value.__name__,
            {name: each for name, each in vars(value).items() if name != "__builtins__"},
        )
    return cloudpickle.Pickler.dispatch_table[types.ModuleType](value)


def is_found(module: types.ModuleType) -> bool:
    """Whether an import finds this module by its name, or found it before the module was imported
    again.

    A module that was made by hand may have the same name.
    """
    there, file = sys.modules.get(module.__name__, module), getattr(module, "__file__", None)
    return there is module or (file is not None and file == getattr(there, "__file__", None))


def reduce_module(value: Module) -> tuple[Any, ...] | None:
    """Reduce PyTorch modules that refuse to be pickled, and drop the empty parts of others.

    Return None for any other module.
    """
    refuse_of_a_rank(value)
    if isinstance(value, torch.jit.ScriptModule):
        tensors = {
            **dict(value.named_parameters(remove_duplicate=False)),
            **dict(value.named_buffers(remove_duplicate=False)),
        }
        hollow = copy.deepcopy(value)
        put_tensors(hollow, dict.fromkeys(tensors, torch.empty(0, device="cpu")))
        return script_again, (hollow.save_to_buffer(), tensors)
    if (reduced := reduce_compiled(value)) is not None:
        return reduced
    # the class was made for this module and refuses to be pickled; its base does not
    if is_parametrized(value):
        reduced = (
            object.__new__,
            (type(value).__base__,),
            vars(value),
            None,
            None,
            parametrize_again,
        )
    elif is_plain(type(value)):
        reduced = without_empty_hooks(value.__reduce_ex__(5))
    elif all(getattr(type(value), name) is getattr(Module, name) for name in PLAIN[:2]):
        create, arguments, state, *rest = tuple(value.__reduce_ex__(5))
        # the state of a quantized module lacks the attributes of all modules
        is_of_all = isinstance(state, dict) and "_modules" in state
        reduced = create if is_of_all else bare_module, arguments, state, *rest
    elif isinstance(value, torch.fx.GraphModule) and is_exported(value):
        raise TypeError(
            f"a graph of torch.export cannot be rebuilt in another process "
            f"({type(value).__name__}); "
            f"{UNEXPORTED}"
        )
    compiled = compiled_in_place(value)
    if compiled is None:
        return reduced
    own: Any = reduced or value.__reduce_ex__(5)
    return with_compiled_call(own, compiled)


def refuse_of_a_rank(module: Module) -> None:
    if is_of_a_rank(module):
        raise TypeError(
            f"a module that belongs to a process group ({type(module).__qualname__}), of which "
            "workers are not ranks"
        )


def is_of_a_rank(value: Module) -> bool:
    """Whether the module exchanges gradients or parameters with the ranks of a process group."""
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        return True
    sharding = sys.modules.get("torch.distributed.fsdp")  # importing it takes long
    return sharding is not None and isinstance(
        value, (sharding.FullyShardedDataParallel, sharding.FSDPModule)
    )


UNEXPORTED = (
    "send the module that was exported, or load the program in the function (torch.export.load)"
)


def is_exported(graph: torch.fx.GraphModule) -> bool:
    """Whether the graph's tracer cannot be made without a module.

    PyTorch makes a tracer when it loads a graph, and has no module to pass to it.
    """
    tracer = vars(graph).get("_tracer_cls")
    try:
        inspect.signature(tracer or object).bind()
    except TypeError:
        return True
    return False


HOOKS = frozenset(name for name, each in vars(Module()).items() if type(each) is OrderedDict)
PLAIN = "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__"


def is_plain(kind: type[Module]) -> bool:
    """Whether the class inherits its way of pickling from `Module`."""
    return all(getattr(kind, name, None) is getattr(Module, name, None) for name in PLAIN)


def without_empty_hooks(reduced: Any) -> tuple[Any, ...]:
    """Return `reduced` without a module's empty dictionaries for hooks.

    These are nine tenths of a module's objects.
    """
    create, arguments, state, *_ = reduced
    if type(state) is not dict:
        return tuple(reduced)  # the module has slots
    left = {name: None if name in HOOKS and not each else each for name, each in state.items()}
    return create, arguments, left, None, None, set_with_hooks


def set_with_hooks(module: Module, state: dict[str, Any]) -> None:
    """Set the state of a module, and add the dictionaries for hooks that the state lacks."""
    made = {
        name: OrderedDict[Any, Any]() if each is None and name in HOOKS else each
        for name, each in state.items()
    }
    module.__setstate__(made)  # type: ignore[no-untyped-call]


def bare_module(kind: type[Module]) -> Module:
    made = kind.__new__(kind)
    Module.__init__(made)
    return made


def script_again(code: bytes, tensors: dict[str, torch.Tensor]) -> torch.jit.ScriptModule:
    module = loaded_script(code)
    put_tensors(module, tensors)
    return module


# This caches TorchScript that the process has loaded. The first two runs of loaded code are slow,
# until it is optimised. Copies share the optimised code.
load_once = functools.lru_cache(maxsize=128)(load_script)
MOST_SCRIPT_BYTES = 1 << 20
# an archive's path of constant tensors, which frozen and traced modules have
TENSOR_CONSTANTS = b"/constants/"


def loaded_script(code: bytes) -> torch.jit.ScriptModule:
    """Return a new copy of the module. If the code has constant tensors, it is loaded again,
    because copies would share these tensors."""
    if TENSOR_CONSTANTS in code or len(code) > MOST_SCRIPT_BYTES:
        return load_script(code)
    return copy.deepcopy(load_once(code))


def share_loaded_scripts() -> None:
    """Make `torch.jit.load` cache archives in memory, in a worker process.

    Classes that save TorchScript in `__getstate__` load it in `__setstate__`, that is, in each map.
    """

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if type(f) is io.BytesIO and not (args or kwargs):
            return loaded_script(f.read())
        return load_archive(f, *args, **kwargs)

    torch.jit.load = functools.update_wrapper(load, load_archive)
    load.__module__ = "torch.jit"  # where pickle finds this function


def put_tensors(module: torch.jit.ScriptModule, tensors: dict[str, torch.Tensor]) -> None:
    """Set each tensor at its attribute path."""
    owners = dict(module.named_modules(remove_duplicate=False))
    for path, tensor in tensors.items():
        owner, _, name = path.rpartition(".")
        setattr(owners[owner], name, tensor)


class ScriptedFunction:
    """A scripted function. TorchScript saves it as a module's method, without its defaults."""

    def __init__(self, code: bytes, names: list[str], defaults: dict[str, Any]) -> None:
        self._code, self._names, self._defaults = code, names, defaults
        self._module = loaded_script(code)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rest = {
            name: self._defaults[name]
            for name in self._names[len(args) :]
            if name in self._defaults
        }
        return self._module(*args, **{**rest, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:
        return ScriptedFunction, (self._code, self._names, self._defaults)


def reduce_script_function(value: Any) -> tuple[Any, ...]:
    arguments = value.schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return ScriptedFunction, (value.save_to_buffer(), [each.name for each in arguments], defaults)


# --- all of them


# None since torch 2.15, where `apply` is builtin, and pickle sends it by its class and name
FUNCTION_APPLY: Any = getattr(torch.autograd.Function.apply, "__func__", None)
OWN_MAP, *OTHER_MAPS = cloudpickle.Pickler.dispatch_table.maps
REDUCERS: dict[type, Callable[[Any], Any]] = {
    torch.jit.ScriptFunction: reduce_script_function,
    torch.Generator: reduce_generator,
    torch.finfo: reduce_limits,
    torch.iinfo: reduce_limits,
    types.CodeType: reduce_code,
    io.TextIOWrapper: reduce_text_file,
    types.MethodType: reduce_method,
    types.ModuleType: reduce_imported,
    type(torch.ops): reduce_imported,
    type(torch.classes): reduce_imported,
    type(torch.ops.aten): reduce_operator,
    type(torch.ops.aten.add): reduce_operator,
    type(torch.ops.aten.add.Tensor): reduce_operator,
    functools._lru_cache_wrapper: reduce_cached,
    functools.partialmethod: reduce_partial_method,
    type(threading.Lock()): lambda value: (threading.Lock, ()),
    type(threading.RLock()): lambda value: (threading.RLock, ()),
    threading.Condition: reduce_condition,
    # its holders in the caller will not release it here
    threading.BoundedSemaphore: lambda value: (threading.BoundedSemaphore, (value._initial_value,)),
    threading.local: reduce_local,
    contextvars.ContextVar: reduce_context_variable,
    memoryview: reduce_memoryview,
    struct.Struct: lambda value: (struct.Struct, (value.format,)),
    torch.UntypedStorage: reduce_storage,
    RemovableHandle: reduce_handle,
    # `__getstate__` leaves out hooks, and attributes that subclasses and schedulers add
    Optimizer: whole(Optimizer),
    # `__getstate__` leaves out inverses
    Transform: whole(Transform),
    **dict.fromkeys(REFERENCES, reduce_reference),
    **dict.fromkeys(WEAK, reduce_weak),
}
if "numpy" in sys.modules:
    REDUCERS[sys.modules["numpy"].ufunc] = reduce_ufunc
INHERITED = {*WEAK, threading.local, types.ModuleType, Optimizer, Transform}
DESCRIPTORS = {property, classmethod, staticmethod}
INHERITED |= DESCRIPTORS
# The chain is kept short, because every object is looked up here.
ClassPickler.dispatch_table = ChainMap({**OWN_MAP, **REDUCERS}, *OTHER_MAPS)


MOST_LOOKED_AT = 10_000  # objects of one cache; searching them takes a millisecond
NO_TENSORS = {type(None), bool, int, float, complex, str, bytes, types.CodeType}


class CacheEntry(NamedTuple):
    """An entry of a cache of `functools`."""

    key: Any
    result: Any


def entries(cached: Any) -> list[CacheEntry]:
    """Return the entries of the cache. In a bounded cache the most recently used entry is last."""
    inside = gc.get_referents(cached)  # atomic, so other threads cannot change it in between
    if cached.cache_parameters()["maxsize"] is None:
        # the other dictionary contains the attributes
        cache = next(each for each in inside if type(each) is dict)
        return [CacheEntry(*pair) for pair in list(cache.items())]
    # `inside` is the cache's type, and then for each entry the key, the result and the link's type
    found = []
    for place in range(1, len(inside), 3):
        if inside[place + 2] is not LINK:
            break
        found.append(CacheEntry(*inside[place : place + 2]))
    return found


def marks() -> tuple[Any, Any]:
    """Return the mark in a key between arguments and keywords, and the type of a bounded cache's
    links."""
    cached = functools.lru_cache(maxsize=1)(lambda **names: None)
    cached(name=None)
    _, key, _, link, *_ = gc.get_referents(cached)
    return key[0], link


KEYWORDS, LINK = marks()


def arguments(key: Any, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the call that has this key."""
    if type(key) is not tuple:
        return (key,), {}
    count = next((place for place, each in enumerate(key) if each is KEYWORDS), None)
    if count is None:
        return key[: len(key) // 2] if typed else key, {}
    rest = key[count + 1 :]  # names and values alternate; the types follow
    named = rest[: (len(rest) - count) // 3 * 2] if typed else rest
    return key[:count], dict(zip(named[::2], named[1::2], strict=True))


def entries_with_tensors(cached: Any) -> list[CacheEntry]:
    learn()
    looked_at = iter(range(MOST_LOOKED_AT))
    return [
        each
        for each in entries(cached)
        if type(each.result) not in NO_TENSORS and holds_tensors(each.result, looked_at)
    ]


def holds_tensors(value: Any, looked_at: Iterator[int]) -> bool:
    """Whether `value` contains a tensor, module or random number generator.

    The search visits near objects first, and stops when `looked_at` ends.
    """
    waiting, seen = [value], {id(value)}
    for each in waiting:
        if next(looked_at, None) is None:
            return False
        kind = type(each)  # not `isinstance`, which returns the class of a weak proxy's object
        if issubclass(kind, torch.Tensor | torch.nn.Module) or is_generator(each):
            return True
        if kind is types.FunctionType:
            inside: list[Any] = [
                each.__closure__,
                each.__defaults__,
                each.__kwdefaults__,
                each.__dict__,
            ]
        else:
            inside = gc.get_referents(each)
        for part in inside:
            if (
                type(part) not in NO_TENSORS
                and not isinstance(part, type | types.ModuleType)
                and id(part) not in seen
            ):
                seen.add(id(part))
                waiting.append(part)
    return False


def identities(cached: Any) -> list[Any]:
    """Return values that change if a worker would get something different."""
    own = attributes_of_cache(cached)
    return [*own, *own.values(), *(part for each in entries_with_tensors(cached) for part in each)]


def attributes_of_cache(cached: Any) -> dict[str, Any]:
    """Return the attributes that were set on the cached function after it was made."""
    function = cached.__wrapped__
    copied = getattr(function, "__dict__", {})
    own = {
        name: each
        for name, each in vars(cached).items()
        if name not in ("__wrapped__", "cache_parameters")
    }
    return {
        name: each
        for name, each in own.items()
        if each is not copied.get(name, ABSENT) and each is not getattr(function, name, ABSENT)
    }


# --- pickling a cache, and rebuilding it


def reduce_by_value(cached: Any) -> tuple[Any, ...]:
    parameters = cached.cache_parameters()
    kept = [
        (*arguments(key, parameters["typed"]), result)
        for key, result in entries_with_tensors(cached)
    ]
    return (
        cached_again,
        (cached.__wrapped__, parameters),
        (attributes_of_cache(cached), kept),
        None,
        None,
        fill,
    )


class CacheFiller(functools.partial[Any]):
    """The function that a cached function calls.

    While the cache is filled, it returns known results. Then it calls the real function without a
    frame in between.
    """

    def turn_to(self, function: Any, *first: Any) -> None:
        set_state: Any = super().__setstate__  # type: ignore[misc]  # typeshed leaves it out
        set_state((function, first, {}, None))


def cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    made = functools.lru_cache(**parameters)(CacheFiller(function))
    return functools.update_wrapper(made, function)


def fill(
    cached: Any, state: tuple[dict[str, Any], list[tuple[tuple[Any, ...], dict[str, Any], Any]]]
) -> None:
    """Fill the cache by calling it with a function that returns the known results."""
    own, kept = state
    vars(cached).update(own)
    stand_in = next(each for each in gc.get_referents(cached) if type(each) is CacheFiller)
    for args, kwargs, result in kept:
        stand_in.turn_to(given, result)
        cached(*args, **kwargs)
    stand_in.turn_to(cached.__wrapped__)


def given(result: Any, *args: Any, **kwargs: Any) -> Any:
    return result
