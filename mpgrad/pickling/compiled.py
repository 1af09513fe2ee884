"""Functions and modules that torch.compile made: compiled again in the worker, once and not for
each operation.

What PyTorch compiles it keeps with a function's code object, and its guards look into the
dictionary of globals that it was compiled with. But each operation loads its function anew, around
tensors of its own. So where a compiled function is among what is loaded, equal code objects become
one object, and functions of one module share one dictionary of globals, as in the caller, from
operation to operation.

    caller  compiled ──► (original, options)
    worker  load: code and globals as before, values noted ──► GlobalsSnapshot
            call, backward: `with placement` puts the values in their places
Guarantees: a call and its backward see the globals of their own operation, whatever was loaded
since.
Assumes: a thread runs one function at a time, or one within another.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from mpgrad.pickling import classes
from mpgrad.pickling.modules import uses_in
from mpgrad.torch_state.private import (
    before_compiler,
    compile_in_place,
    compiler_context,
    compiler_options,
    disabling,
    is_optimized,
    made_by_compiler,
)

__all__ = ["MARK", "GlobalsSnapshot", "reduce_compiled", "with_compiled_call", "without_marks"]

Namespace = dict[str, Any]

MOST_CODES = 4096
MOST_CLASSES = 256
MOST_CONTEXTS = 256
# in the pickle of what has a compiled function in it; elsewhere it does no harm
MARK = __name__.encode()
MARKS = (
    "_torchdynamo_",
    "get_compiler_config",
    "aot_compile",
    "_is_torch_compile",
    "_isolate_recompiles_id",
)


class CompilerNamespaces(threading.local):
    """What a thread's compiled functions have in common, from operation to operation."""

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, types.CodeType] = {}
        # what torch.compiler.disable made, by code, globals and options
        self.disabled: dict[tuple[Any, ...], Any] = {}
        # what was compiled for one that has gone is thrown away
        self.classes: dict[type, None] = {}
        self.namespaces: dict[tuple[Any, ...], Namespace] = {}
        # by options: what was compiled under another one counts as not compiled
        self.contexts: dict[bytes, Any] = {}
        self.placed: GlobalsSnapshot | None = None  # whose values are in the namespaces
        self.running: GlobalsSnapshot | None = None


ROOMS = CompilerNamespaces()


class GlobalsSnapshot:
    """The values of the globals that a function and its helpers were loaded with."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Namespace, Namespace]] = {}  # by id of the namespace
        # globals as they came and that stay, by id of the former
        self._met: dict[int, tuple[Namespace, Namespace]] = {}
        self._before: list[GlobalsSnapshot | None] = []

    def __enter__(self) -> None:
        self._before.append(ROOMS.running)
        ROOMS.running = self
        self.place()

    def __exit__(self, *error: object) -> None:
        ROOMS.running = self._before.pop()
        if ROOMS.running is not None:
            ROOMS.running.place()

    def place(self) -> None:
        if ROOMS.placed is not self:
            self._take_over()
            for namespace, values in self._values.values():
                namespace.update(values)

    def _take_over(self) -> None:
        """Of the one before nothing stays: a name of its own could hide a builtin, and nobody would
        ever remove it."""
        if ROOMS.placed is not None:
            ROOMS.placed._withdraw()
        ROOMS.placed = self

    def _withdraw(self) -> None:
        for namespace, values in self._values.values():
            for name in values:
                namespace.pop(name, None)

    def load(self, unpickle: Callable[[], Any]) -> Any:
        """Run `unpickle`, which gets functions from `make_function` and `set_state`."""
        self._take_over()
        try:
            return unpickle()
        finally:
            self._met.clear()
            if ROOMS.running is not None:
                ROOMS.running.place()

    def forget(self) -> None:
        """Let go of the values. Where others are in place, whoever put them there has done so."""
        if ROOMS.placed is self:
            ROOMS.placed = None
            self._withdraw()

    def make_function(
        self, code: types.CodeType, came: Namespace, name: str | None, defaults: Any, closure: Any
    ) -> types.FunctionType:
        """A function over the globals that stay."""
        if len(ROOMS.codes) > MOST_CODES:
            ROOMS.codes.clear()
            ROOMS.disabled.clear()
        return types.FunctionType(
            ROOMS.codes.setdefault(code, code), self._namespace(came), name, defaults, closure
        )

    def _namespace(self, came: Namespace) -> Namespace:
        """The dictionary that stays, and holds now what `came`, the globals of some module."""
        _, namespace = self._met.get(id(came), (came, None))
        if namespace is None:
            module = came.get("__name__"), came.get("__file__")
            number = sum(
                module == (each.get("__name__"), each.get("__file__"))
                for each, _ in self._met.values()
            )
            namespace = ROOMS.namespaces.setdefault(
                (*module, number), {"__builtins__": __builtins__}
            )
            # without its name: the compiler would look for its globals in a module that the worker
            # imports by that
            namespace.update({name: value for name, value in came.items() if name != "__name__"})
            self._met[id(came)] = came, namespace
        return namespace

    def set_state(
        self, set_function: Callable[[Any, Any], None], function: types.FunctionType, state: Any
    ) -> None:
        """Set it by `set_function`; notes what has to be put in place when the function runs."""
        namespace, values = self._values.setdefault(
            id(function.__globals__), (function.__globals__, {})
        )
        values.update(state[1]["__globals__"])
        # of which classes that are made in it are said to be
        if "__name__" in uses_in(function.__code__).names:
            values["__name__"] = namespace["__name__"] = state[1].get("__module__")
        set_function(function, state)

    def put(self, came: Namespace, names: Namespace) -> None:
        """Further globals, of a module that came from the caller."""
        namespace = self._namespace(came)
        self._values.setdefault(id(namespace), (namespace, {}))[1].update(names)
        namespace.update(names)

    def set_class(self, set_class: Callable[[type, Any], None], made: type, state: Any) -> None:
        if len(ROOMS.classes) > MOST_CLASSES:
            ROOMS.classes.clear()
        ROOMS.classes[made] = None
        set_class(made, state)


# --- what stands in a pickle for what the compiler made


def check_compiler() -> None:
    # and its probes: 10 ms, which workers need not wait for
    from mpgrad.torch_state import behaviours

    behaviours.check_compiler()


def reduce_compiled(value: Any) -> tuple[Any, ...] | None:
    """How a function or module that the compiler made travels; None for any other."""
    is_module = isinstance(value, torch.nn.Module)
    if not (is_optimized(value) if is_module else made_by_compiler(value)):
        return None
    check_compiler()
    context = compiler_context(value)
    options = None if context is None else compiler_options(context)
    if options is None:
        original = before_compiler(value)
        state = (
            getattr(original, name, True)
            for name in ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")
        )
        return disabled_again, (original, disabling(value), not any(state))
    return compiled_again, (before_compiler(value), classes.dumps(options))


def without_marks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Those of a function, less what functools.wraps has copied to it from a compiled one: for that
    it would be taken."""
    return (
        {name: value for name, value in attributes.items() if not name.startswith(MARKS)}
        if attributes
        else attributes
    )


def with_compiled_call(reduced: tuple[Any, ...], compiled: Any) -> tuple[Any, ...]:
    """As `reduced`, for a module to which `module.compile()` has given a compiled call: its state
    has nothing of that."""
    check_compiler()
    create, arguments, state, *_ = reduced
    setter = reduced[5] if len(reduced) > 5 else None
    options = classes.dumps(compiler_options(compiler_context(compiled)))
    return create, arguments, (state, setter, options), None, None, set_and_compile


def set_and_compile(
    module: Any, given: tuple[Any, Callable[[Any, Any], None] | None, bytes]
) -> None:
    """The state of a module on which `compile()` was called."""
    state, setter, options = given
    if setter is not None:
        setter(module, state)
    else:
        module.__setstate__(state)
    compile_in_place(module, lambda call: compiled_again(call, options))


def compiled_again(original: Any, options: bytes) -> Any:
    """`torch.compile(original, **options)`, under the context that had the same options before, if
    there was one."""
    context = ROOMS.contexts.get(options)
    if context is not None:
        return context(original)
    compiled = torch.compile(original, **classes.loads(options))
    if len(ROOMS.contexts) > MOST_CONTEXTS:
        ROOMS.contexts.clear()
    # there is none where the environment says not to compile
    if (context := compiler_context(compiled)) is not None:
        ROOMS.contexts[options] = context
    return compiled


def disabled_again(original: Any, options: dict[str, Any], is_plain: bool) -> Any:
    """Disable the compiler for a function, as `torch.compiler.disable` does.

    A plain function, which is no more than code and globals, gets the same object as before. The
    pickler says whether it is plain, because a recursive function gets its defaults only after this
    call.
    """
    disable: Any = torch.compiler.disable
    if not is_plain:
        return disable(original, **options)
    key = original.__code__, id(original.__globals__), *options.values()
    if key not in ROOMS.disabled:  # guards ask for the very same object
        ROOMS.disabled[key] = disable(original, **options)
    return ROOMS.disabled[key]
