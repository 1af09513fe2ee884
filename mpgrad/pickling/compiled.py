"""If torch.compile made a function or module, a worker compiles it once, not once an operation.

PyTorch stores compiled code with a function's code object. Its guards read the dictionary of
globals that the function was compiled with. But each operation loads its function again, with its
own tensors. So when a compiled function is loaded, equal code objects become one object. Functions
of one module share one dictionary of globals in all operations, as in the caller.

    caller  compiled ──► (original, options)
    worker  load: the same code and globals, values recorded ──► GlobalsSnapshot
            call, backward: `with placement` puts the values in their places
Guarantees: a call and its backward see the globals of their own operation, whatever is loaded in
    between.
Assumes: a thread runs one function at a time, or one inside another.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpgrad.errors import contextmanager
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
# Each pickle of a compiled function contains this text. In other pickles it does no harm.
MARK = __name__.encode()
MARKS = (
    "_torchdynamo_",
    "get_compiler_config",
    "aot_compile",
    "_is_torch_compile",
    "_isolate_recompiles_id",
)


class CompilerNamespaces(threading.local):
    """The objects that a thread's compiled functions share in all operations."""

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, types.CodeType] = {}
        # results of torch.compiler.disable, by code, globals and options
        self.disabled: dict[tuple[Any, ...], Any] = {}
        # Classes are kept, because PyTorch drops the code that it compiled for a class that dies.
        self.classes: dict[type, None] = {}
        self.namespaces: dict[tuple[Any, ...], Namespace] = {}
        # By options. PyTorch does not reuse code that was compiled under another context.
        self.contexts: dict[bytes, Any] = {}
        # the snapshot whose values are in the namespaces
        self.placed: GlobalsSnapshot | None = None
        self.running: GlobalsSnapshot | None = None


ROOMS = CompilerNamespaces()


class GlobalsSnapshot:
    """The values of the globals that a function and its helpers were loaded with."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Namespace, Namespace]] = {}  # by id of the namespace
        # the received globals and the lasting globals, by id of the received ones
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
        """Remove the names of the previous snapshot.

        A name that only that snapshot has could hide a builtin, and would never be removed.
        """
        if ROOMS.placed is not None:
            ROOMS.placed._withdraw()
        ROOMS.placed = self

    def _withdraw(self) -> None:
        for namespace, values in self._values.values():
            for name in values:
                namespace.pop(name, None)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load functions in the body, by `make_function` and `set_state`."""
        self._take_over()
        try:
            yield
        finally:
            self._met.clear()
            if ROOMS.running is not None:
                ROOMS.running.place()

    def forget(self) -> None:
        """Remove the values, unless another snapshot has already removed them."""
        if ROOMS.placed is self:
            ROOMS.placed = None
            self._withdraw()

    def make_function(
        self, code: types.CodeType, came: Namespace, name: str | None, defaults: Any, closure: Any
    ) -> types.FunctionType:
        """Make a function with the lasting globals."""
        if len(ROOMS.codes) > MOST_CODES:
            ROOMS.codes.clear()
            ROOMS.disabled.clear()
        return types.FunctionType(
            ROOMS.codes.setdefault(code, code), self._namespace(came), name, defaults, closure
        )

    def _namespace(self, came: Namespace) -> Namespace:
        """Return the lasting dictionary for `came`, the received globals of a module, and copy
        their values into it."""
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
            # The module's name is left out, because the compiler would use it to look for globals
            # in the worker's own import.
            namespace.update({name: value for name, value in came.items() if name != "__name__"})
            self._met[id(came)] = came, namespace
        return namespace

    def set_state(
        self, set_function: Callable[[Any, Any], None], function: types.FunctionType, state: Any
    ) -> None:
        """Set the state with `set_function`, and record the values to put in place when the
        function runs."""
        namespace, values = self._values.setdefault(
            id(function.__globals__), (function.__globals__, {})
        )
        values.update(state[1]["__globals__"])
        # Classes that the function makes take their `__module__` from this name.
        if "__name__" in uses_in(function.__code__).names:
            values["__name__"] = namespace["__name__"] = state[1].get("__module__")
        set_function(function, state)

    def put(self, came: Namespace, names: Namespace) -> None:
        """Add further globals of a module that came from the caller."""
        namespace = self._namespace(came)
        self._values.setdefault(id(namespace), (namespace, {}))[1].update(names)
        namespace.update(names)

    def set_class(self, set_class: Callable[[type, Any], None], made: type, state: Any) -> None:
        if len(ROOMS.classes) > MOST_CLASSES:
            ROOMS.classes.clear()
        ROOMS.classes[made] = None
        set_class(made, state)


# --- how a pickle represents functions and modules that the compiler made


def check_compiler() -> None:
    # This is imported late, because it takes 10 ms with its probes, which workers do not need.
    from mpgrad.torch_state import behaviours

    behaviours.check_compiler()


def reduce_compiled(value: Any) -> tuple[Any, ...] | None:
    """Reduce a function or module that the compiler made. Return None for any other."""
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
    """Return a function's attributes without those that functools.wraps copied from a compiled
    function.

    These marks would make the function look compiled.
    """
    return (
        {name: value for name, value in attributes.items() if not name.startswith(MARKS)}
        if attributes
        else attributes
    )


def with_compiled_call(reduced: tuple[Any, ...], compiled: Any) -> tuple[Any, ...]:
    """Extend `reduced` for a module that got a compiled call from `module.compile()`.

    The module's state does not contain the compiled call.
    """
    check_compiler()
    create, arguments, state, *_ = reduced
    setter = reduced[5] if len(reduced) > 5 else None
    options = classes.dumps(compiler_options(compiler_context(compiled)))
    return create, arguments, (state, setter, options), None, None, set_and_compile


def set_and_compile(
    module: Any, given: tuple[Any, Callable[[Any, Any], None] | None, bytes]
) -> None:
    """Set the state of a module on which `compile()` was called."""
    state, setter, options = given
    if setter is not None:
        setter(module, state)
    else:
        module.__setstate__(state)
    compile_in_place(module, lambda call: compiled_again(call, options))


def compiled_again(original: Any, options: bytes) -> Any:
    """Return `torch.compile(original, **options)`. Reuse the context of earlier equal options."""
    context = ROOMS.contexts.get(options)
    if context is not None:
        return context(original)
    compiled = torch.compile(original, **classes.loads(options))
    if len(ROOMS.contexts) > MOST_CONTEXTS:
        ROOMS.contexts.clear()
    # There is no context if environment variables disable compilation.
    if (context := compiler_context(compiled)) is not None:
        ROOMS.contexts[options] = context
    return compiled


def disabled_again(original: Any, options: dict[str, Any], is_plain: bool) -> Any:
    """Disable the compiler for a function, as `torch.compiler.disable` does.

    A plain function, which consists only of code and globals, gets the same object each time. The
    pickler decides whether it is plain, because a recursive function gets its defaults only after
    this call.
    """
    disable: Any = torch.compiler.disable
    if not is_plain:
        return disable(original, **options)
    key = original.__code__, id(original.__globals__), *options.values()
    if key not in ROOMS.disabled:  # guards compare the identity of this object
        ROOMS.disabled[key] = disable(original, **options)
    return ROOMS.disabled[key]
