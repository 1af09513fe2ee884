"""The private names of PyTorch that mpgrad leans on, all in one place.

Everything else in the package uses the public API, and of tensors and nodes the attributes `_version`, `_is_view`,
`_is_zerotensor`, `_backward_hooks`, `_post_accumulate_grad_hooks`, `_indices` and `_values`. What is done here is tried by
`behaviours` before a pool is made, so there are no other ways for where a name is missing: they would be ways that
nobody has gone. The one exception is `never_compile`, which no result depends on. To be imported, this needs none of the names.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import io
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mpgrad.system import anonymous_memory
from mpgrad.tracebacks import hide_own_frames

__all__ = [
    "MAKE_FX",
    "NODE_IN_PYTHON",
    "CallCounter",
    "SharedHooks",
    "apply",
    "batched",
    "before_compiler",
    "cache_folder",
    "compile_in_place",
    "compiled_in_place",
    "compiler_context",
    "compiler_options",
    "descriptor_of",
    "disabling",
    "dual_level_is_active",
    "dual_level_kept",
    "edge_that_keeps",
    "flattened",
    "grad_mode",
    "gradients",
    "graph_is_kept",
    "graph_task",
    "has_plain_memory",
    "has_tangent",
    "have_plain_memory",
    "inductor_in_turns",
    "is_batched",
    "is_batched_the_older_way",
    "is_functorch_wrapped",
    "is_optimized",
    "is_refusing_no_grad",
    "leaf_will_run",
    "level_count",
    "level_of",
    "load_script",
    "made_by_compiler",
    "node_type",
    "not_compiled",
    "older_levels",
    "outside_transforms",
    "parametrize_again",
    "plus",
    "refusing_no_grad",
    "replica_of",
    "saved_tensor_hooks",
    "script_operations",
    "set_priority",
    "shared_storage",
    "storage_from_descriptor",
    "tracer",
    "transforms_are_active",
    "tree_leaves",
    "tree_map_only",
    "unbatched",
    "unbatched_the_older_way",
    "unwrapped",
    "vmap_levels",
    "vmap_the_older_way",
    "wait_for_devices",
    "when_backward_ends",
    "will_run",
    "within_dual_level",
    "without_autocast",
    "without_refusal",
    "without_saved_tensor_hooks",
    "without_tangents",
]


P = ParamSpec("P")
T = TypeVar("T")

ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
NODE_IN_PYTHON: Any = getattr(torch._C, "_FunctionBase", None)
SHARED_STORAGE: Any = torch.UntypedStorage  # its private names are not in torch's type hints


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """What is copied in the body stays what it is."""
    off: Any = torch._C._DisableAutocast
    return off()  # type: ignore[no-any-return]


def not_compiled(fn: Callable[P, T]) -> Callable[P, T]:
    """Have `torch.compile` break its graph at `fn`, and leave alone what `fn` calls, without loading the compiler for it.

    `fn` is public: its exceptions show the caller's frames.
    """

    @functools.wraps(fn)
    def uncompiled(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            disable: Any = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # another thread may be importing it
            if disable is None:
                return fn(*args, **kwargs)
            result: T = disable(fn)(*args, **kwargs)
            return result
        except BaseException as error:
            hide_own_frames(error)
            raise

    uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
    uncompiled._torchdynamo_disable_msg = "it runs in other processes"  # type: ignore[attr-defined]
    never_compile(uncompiled.__code__)  # type: ignore[attr-defined]
    return uncompiled


def never_compile(code: types.CodeType) -> None:
    """Have the compiler leave frames of `code` alone. Where it cannot be told, it compiles them: slow, but right."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")):
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def graph_task() -> int:
    """The number of the backward that is running in this thread; -1 outside one."""
    return int(torch._C._current_graph_task_id())


def graph_is_kept() -> bool:
    """Whether the running backward was asked to keep the graph (`retain_graph` or `create_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Whether the running backward needs `node`: false for what `torch.autograd.grad(inputs=...)` leaves out."""
    return bool(torch._C._will_engine_execute_node(node))


def leaf_will_run(node: Any) -> bool:
    """`will_run` of a leaf's node, of which PyTorch refuses to say that `torch.autograd.grad` asked for it."""
    try:
        return will_run(node)
    except RuntimeError:
        return True


def when_backward_ends(callback: Callable[[], object]) -> None:
    """Have it called at the end of the backward that is running, if that does not fail before."""
    ENGINE.queue_callback(callback)


def is_alive(node: Any) -> bool:
    """Whether the engine can still find `node`: one that is written in Python may outlive what it stands for."""
    try:
        return node.next_functions is not None
    except RuntimeError:
        return False


def edge_that_keeps(tensor: torch.Tensor) -> GradientEdge:
    """The edge to a tensor whose node is written in Python, and with it the graph behind."""
    if tensor.layout is torch.strided:
        edge = get_gradient_edge(tensor)
        if getattr(edge, "ownership_token", None) is not None:  # from torch 2.9 on, and made by way of a view
            return edge
    with torch.enable_grad():
        # of sparse tensors there are no views
        return get_gradient_edge(tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone())


def saved_tensor_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The innermost `torch.autograd.graph.saved_tensors_hooks` of this thread: those that apply."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """As in a thread of its own."""
    hidden = []
    try:
        while (hooks := saved_tensor_hooks()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hidden.append(hooks)
        yield
    finally:
        for hooks in reversed(hidden):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def plus(held: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """`held + grad` as the engine adds gradients: torch adds a sparse tensor to a dense one, and not the other way round."""
    return held + grad if held.layout is torch.strided else grad + held


def gradients(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor],
    keep: bool,
    create: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad(outputs, inputs, grads, keep, create, allow_unused=True)` without its checks.

    Those cost as much as a small backward, and their first use imports sympy, which takes a fresh worker half a second.
    """
    found: tuple[torch.Tensor | None, ...] = ENGINE.run_backward(
        tuple(outputs), tuple(grads), keep, create, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply` without its care for `torch.func`, of whose tensors none comes here: a third of the cost."""
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def replica_of(network: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> torch.nn.Module:
    """A module like `network` with other tensors, by the id of the old ones; buffers that are not named stay the same."""
    modules: Any = list(network.modules())
    copies: Any = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in network.modules():
        replica = copies[id(module)]
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copies[id(child)]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, tensors[id(parameter)])  # a plain attribute: it is no leaf, and so no parameter
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else tensors.get(id(buffer), buffer)
    return copies[id(network)]  # type: ignore[no-any-return]


def set_priority(node: Any, number: int) -> None:
    """Of the nodes that are ready, the engine runs the one with the highest number first; they are born counted up from 0."""
    node._set_sequence_nr(number)


def node_type(function: type[torch.autograd.Function]) -> Any:
    """The type of the nodes that `function` leaves in a graph."""
    return function._backward_cls


class SharedHooks:
    """Hooks for the gradients of many tensors, put in and taken out for all at once; while there are none they cost little.

    Each tensor has to be the only output of its node.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] = {}
        # PyTorch takes them from a tensor: from none that is watched, so that its own hooks do not get into them
        self._holder = torch.zeros((), device="cpu").requires_grad_()
        self._holder._backward_hooks = self.hooks

    def watch(self, tensor: torch.Tensor) -> None:
        node: Any = tensor.grad_fn
        node._register_hook_dict(self._holder)


class CallCounter:
    """Counts calls of one of PyTorch's methods whose traces nothing in a graph shows, or only a walk through all of it."""

    def __init__(self, owner: type, name: str) -> None:
        self.count = 0
        self.is_watching = False
        self._owner = owner
        self._name = name

    def watch(self) -> None:
        """From here on, in a process that belongs to us."""
        method: Any = inspect.getattr_static(self._owner, self._name)
        in_c = isinstance(method, types.ClassMethodDescriptorType)  # `Function.apply` from torch 2.15 on
        function = functools.partial(call_class_method, method) if in_c else getattr(method, "__func__", method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        functools.update_wrapper(counted, method)
        bind = classmethod if in_c else type(method)
        setattr(self._owner, self._name, counted if method is function else bind(counted))
        self.is_watching = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the body only, where other threads may call it too, and are counted."""
        method = inspect.getattr_static(self._owner, self._name)
        self.watch()
        try:
            yield
        finally:
            setattr(self._owner, self._name, method)
            self.is_watching = False


def call_class_method(method: types.ClassMethodDescriptorType, owner: type, *args: Any, **kwargs: Any) -> Any:
    return method.__get__(None, owner)(*args, **kwargs)


def wait_for_devices(tensors: Sequence[torch.Tensor | None]) -> None:
    """Wait until what this thread has devices compute for `tensors` is there.

    Between nodes on one device the engine sees to that itself, but not behind a node on the CPU.
    """
    for device in {tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Shared memory mapped as torch.multiprocessing maps it.

    torch itself opens a file in /dev/shm, which in a container often ends at 64 MiB, and writing past that end is a SIGBUS;
    an anonymous memory file has no such limit, and never a name that could stay behind.
    """
    descriptor = anonymous_memory()
    try:
        os.truncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return storage_from_descriptor(descriptor, nbytes)


def storage_from_descriptor(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Map shared memory by its file descriptor, as torch.multiprocessing's reducers do, and close `descriptor`."""
    try:
        storage: torch.UntypedStorage = SHARED_STORAGE._new_shared_fd_cpu(descriptor, nbytes)
        return storage
    finally:
        os.close(descriptor)  # torch keeps a duplicate of its own


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """The file descriptor behind shared memory; it stays the storage's own."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)


KEYS_OF: Any = getattr(torch._C, "_dispatch_keys", None)
with torch.inference_mode(False):
    PLAIN_KEYS = None if KEYS_OF is None else KEYS_OF(torch.empty(0, device="cpu")).raw_repr()


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in the CPU's memory as they are: no stand-in, sparse, quantized or conjugated tensor."""
    return bool(KEYS_OF(tensor).raw_repr() == PLAIN_KEYS)


def have_plain_memory(tensors: Sequence[torch.Tensor]) -> bool:
    return {KEYS_OF(tensor).raw_repr() for tensor in tensors} == {PLAIN_KEYS}


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The elements of the tensors, which are of one dtype, one after another, copied."""
    dims = {tensor.dim() for tensor in tensors}
    if dims == {1}:
        return torch.cat(tensors)
    return torch.stack(tensors) if dims == {0} else torch._C._nn.flatten_dense_tensors(tensors)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a stand-in inside `torch.func.grad`, `vmap` and their like."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What such a stand-in holds, beneath all transforms; it says nothing of batch dimensions."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# --- torch.func: tensors that stand for a batch, or for one that a transform follows


def transforms_are_active() -> bool:
    """Whether a `torch.func` transform is running in this thread."""
    return bool(torch._C._are_functorch_transforms_active())


def tracer() -> str | None:
    """What records the operations of this thread instead of only running them; it would see none of a worker's."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    keys: Any = torch._C._TorchDispatchModeKey
    return None if torch._C._get_dispatch_mode(keys.PROXY) is None else MAKE_FX


MAKE_FX = "torch.fx (make_fx, torch.func.linearize, torch.export)"


def dual_level_is_active() -> bool:
    """Whether forward-mode differentiation is on in this process (`torch.autograd.forward_ad.dual_level`)."""
    return forward_ad._current_level >= 0


def vmap_levels() -> frozenset[int]:
    """The numbers of the `torch.func.vmap`s that are running in this thread."""
    stack: Any = torch._C._functorch.get_interpreter_stack() or ()
    return frozenset(each.level() for each in stack if each.key() == torch._C._functorch.TransformType.Vmap)


def level_count() -> int:
    """How many transforms are running in this thread."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a dual tensor of the level that is active."""
    return dual_level_is_active() and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class SharedLevel:
    """There is one level of dual tensors for all threads of a process: the first one opens it, the last one closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._level = contextlib.ExitStack()
        self._count = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            is_ours = self._count > 0 or not dual_level_is_active()
            if is_ours and self._count == 0:
                self._level.enter_context(forward_ad.dual_level())
            self._count += is_ours
        try:
            yield
        finally:
            with self._lock:
                self._count -= is_ours
                if is_ours and self._count == 0:
                    self._level.close()


DUAL_LEVEL = SharedLevel()


@contextlib.contextmanager
def within_dual_level() -> Iterator[None]:
    """Forward-mode differentiation is on in the body."""
    with forward_ad._set_fwd_grad_enabled(True), DUAL_LEVEL.entered():  # a function's own `jvp` runs with it off
        yield


@contextlib.contextmanager
def dual_level_kept() -> Iterator[None]:
    """Around all that is made of dual tensors, with forward-mode differentiation off.

    Tensors that a graph has saved have their tangents for as long as there is a level. If another thread closed it while this
    one's backward takes them out, that would fail.
    """
    with forward_ad._set_fwd_grad_enabled(False), DUAL_LEVEL.entered():
        yield


class RefusingNoGrad(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and not args[0]:
            raise NotImplementedError("forward mode follows what is computed under torch.no_grad, which has no derivative")
        return func(*args, **(kwargs or {}))


def without_refusal() -> contextlib.AbstractContextManager[Any]:
    """For our own code within a function that runs under `refusing_no_grad`. Other function modes are off there too."""
    guard: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return guard


@contextlib.contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """`torch.set_grad_enabled`, without the refusal."""
    before = torch.is_grad_enabled()
    with without_refusal():
        torch.set_grad_enabled(enabled)
    try:
        yield
    finally:
        with without_refusal():
            torch.set_grad_enabled(before)


def is_refusing_no_grad() -> bool:
    modes: Any = torch.overrides._get_current_function_mode_stack
    return any(isinstance(mode, RefusingNoGrad) for mode in modes())


@contextlib.contextmanager
def refusing_no_grad() -> Iterator[None]:
    """`torch.no_grad` in the body raises; to be entered with gradients on."""
    with torch._C._EnableTorchFunction(), RefusingNoGrad():  # a task in the caller's thread may run `without_refusal`
        yield


def without_tangents() -> contextlib.AbstractContextManager[None]:
    """Forward-mode differentiation is off in the body, as it is in a Function's own forward and `jvp`."""
    return forward_ad._set_fwd_grad_enabled(False)


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Run the body as if no `torch.func` transform were running; only plain tensors may be used in it."""
    if not transforms_are_active():
        return NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    stack: contextlib.AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return stack


NOTHING = contextlib.nullcontext()  # one for all: this is asked several times a call


def is_batched(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def level_of(tensor: torch.Tensor) -> int:
    return int(torch._C._functorch.maybe_get_level(tensor))


def unbatched(tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """The batch that `tensor` stands for at this level, and the batch dimension; None where it is not batched there."""
    value, dim = torch._C._functorch._unwrap_batched(tensor, level)
    return value, dim


def batched(tensor: torch.Tensor, level: int, older: bool) -> torch.Tensor:
    """Let `tensor` stand for one element of its leading dimension."""
    add: Any = torch._add_batch_dim if older else torch._C._functorch._add_batch_dim
    stand_in: torch.Tensor = add(tensor, 0, level)
    return stand_in


# The vmap before torch.func; `torch.autograd.grad(is_grads_batched=True)` is what still uses it.


def is_batched_the_older_way(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def older_levels() -> int:
    """How many such vmaps are running in this thread."""
    count = int(torch._C._vmapmode_increment_nesting()) - 1
    torch._C._vmapmode_decrement_nesting()
    return count


def unbatched_the_older_way(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """The batch in front; a batch of one where `tensor` is not batched at this level."""
    batch: torch.Tensor = torch._remove_batch_dim(tensor, level, 1, 0)
    return batch


def vmap_the_older_way(fn: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    from torch._vmap_internals import _vmap

    mapped: Callable[..., tuple[torch.Tensor, ...]] = _vmap(fn)
    return mapped


# --- what torch.compile makes


def made_by_compiler(function: types.FunctionType) -> bool:
    """Whether `torch.compile` or `torch.compiler.disable` gave it; no wrapper that functools.wraps has given its marks."""
    maker = function.__globals__.get("__name__")
    return maker in COMPILERS and "_torchdynamo_orig_callable" in vars(function)


def is_optimized(module: torch.nn.Module) -> bool:
    """Whether `torch.compile(module)` gave it."""
    return "dynamo_ctx" in vars(module)


COMPILERS = ("torch._dynamo.eval_frame", "torch._dynamo.external_utils")


def compiler_context(compiled: Any) -> Any:
    """What `torch.compile` wraps functions with, by a function or module that it has wrapped; None where there is none."""
    if isinstance(compiled, torch.nn.Module):
        return vars(compiled).get("dynamo_ctx")
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    held = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    return next((each for each in held if isinstance(each, dynamo._TorchDynamoContext)), None)


def before_compiler(made: Any) -> Any:
    """What was given to `torch.compile` or `torch.compiler.disable`."""
    return made._orig_mod if isinstance(made, torch.nn.Module) else made._torchdynamo_orig_callable


def disabling(made: Any) -> dict[str, Any]:
    """The arguments of `torch.compiler.disable` that gave `made`."""
    context = compiler_context(made)
    if context is None:  # without `recursive` PyTorch has no need of one
        return {"recursive": False, "reason": made._torchdynamo_disable_msg}
    return {"recursive": True, "reason": context.msg}


def compiled_in_place(module: torch.nn.Module) -> Any:
    """What `module.compile()` has put into it, of which its state has nothing; None where it was not called."""
    return vars(module).get("_compiled_call_impl")


def compile_in_place(module: Any, wrap: Callable[[Any], Any]) -> None:
    module._compiled_call_impl = wrap(module._call_impl)


def compiler_options(context: Any) -> dict[str, Any] | None:
    """The arguments of `torch.compile` that gave `context`, as far as they are not its defaults; None of `disable`'s."""
    if not callable(context.callback):
        return None
    layers = [context.callback]
    while (inner := inner_layer(layers[-1])) is not None:
        layers.append(inner)
    convert, found = layers[1], backend_options(layers[-1])
    inner_options = found["options"] or {}
    if (kept := context.callback.hooks.guard_filter_fn) is not None:
        inner_options = {**inner_options, "guard_filter_fn": kept}
    found.update(
        options=inner_options or None,
        fullgraph=getattr(convert, "_one_graph", False),
        dynamic=context._dynamic,
        # of later versions
        recompile_limit=getattr(convert, "_recompile_limit", None),
        isolate_recompiles=getattr(context, "_isolate_recompiles_id", -1) != -1,
        shapes_spec=getattr(context, "_shapes_spec", None),
    )
    return {name: value for name, value in found.items() if name == "dynamic" or value not in (None, False)}


def inner_layer(layer: Any) -> Any:
    """What a layer around a backend calls; None of the backend itself. (The name is that of versions up to 2.8.)"""
    attributes = getattr(layer, "__dict__", {})
    return attributes.get("_torchdynamo_orig_backend", attributes.get("_torchdynamo_orig_callable"))


def backend_options(backend: Any) -> dict[str, Any]:
    names: Any = torch
    if isinstance(backend, names._TorchCompileInductorWrapper):
        options = dict(backend.config)
        if backend.compiler_name != "inductor":
            options["use_aoti"] = True
        return {"backend": "inductor", "options": options, "name": getattr(backend, "name", None)}
    if not isinstance(backend, names._TorchCompileWrapper):  # torch._dynamo.optimize was called
        return {"backend": backend, "options": None}
    function = backend.compiler_fn
    module = getattr(function, "__module__", None) or type(function).__module__
    own = module.partition(".")[0] == "torch"  # it may be no function then, but is known by its name
    return {"backend": backend.compiler_name if own else function, "mode": None, "options": None, **backend.kwargs}


def inductor_in_turns() -> None:
    """Have processes that meet the same graph compile it one after the other, in a process that belongs to us.

    The first stores what it has compiled on disk, where the others find it.
    """
    names: Any = torch
    wrapper = names._TorchCompileInductorWrapper
    if hasattr(wrapper.__call__, "__wrapped__"):
        return
    compile_graph = wrapper.__call__

    @functools.wraps(compile_graph)
    def in_turns(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with first_of_those_that_compile(f"{graph.graph}{[getattr(each, 'shape', each) for each in inputs]}{self.config}"):
            return compile_graph(self, graph, inputs, *args, **kwargs)

    wrapper.__call__ = in_turns


def cache_folder() -> str:
    """Where PyTorch keeps what it has compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


@contextlib.contextmanager
def first_of_those_that_compile(what: str) -> Iterator[None]:
    """Wait until whoever has begun with the same is ready; those that have waited go on side by side."""
    name = hashlib.sha256(what.encode()).hexdigest()
    folder = os.path.join(cache_folder(), "locks")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"mpgrad-{name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
            fcntl.flock(file, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # to close it would not do, where a child was forked meanwhile


# --- modules that do not pickle


def load_script(code: bytes) -> torch.jit.ScriptModule:
    """What `save_to_buffer` of a scripted module or function has saved."""
    load: Any = torch.jit.load
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)  # said to the one who scripted it
        module: torch.jit.ScriptModule = load(io.BytesIO(code))
    return module


def script_operations() -> dict[int, str]:
    """What TorchScript takes functions for that it does not compile, by the function's id."""
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    return table


def parametrize_again(module: Any, state: dict[str, Any]) -> None:
    """Give a module the state of a parametrized one, and the class that makes tensors anew from their parametrizations."""
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)
