"""Runs custom `autograd.Function`s without the engine: emulated contexts, and parallel calls in
threads of the caller. It runs in the caller only.

PyTorch creates the context of a Function inside `apply`, and runs the backward when its engine
reaches the node. Code that runs them in a thread or at another time needs two things. One is a
substitute for the context, which keeps what forward and `setup_context` store there. The other is
the checks that the engine makes on the returned values.

A parallel call turns several calls of one Function into one node, which runs them side by side.
PyTorch's engine runs one CPU node after another, so Functions that wait (for a network, a
simulator, another library) wait one after another. Here the calls run in threads, with substitutes
for their contexts, and one Function around them all does the bookkeeping:

    arguments of all calls ──► ParallelCalls ──► outputs of all calls      [1]
                                    │ saved tensors                        [2]
    their gradients ◄── backward ◄──┘ ◄── outputs' gradients               [3]

    [1] every call's forward runs in its own thread
    [2] the node saves what the substitute contexts recorded
    [3] every call's backward runs in its own thread

Guarantees: forwards run concurrently, and so do backwards and the backwards of backwards. A value
    that depends on one call waits for all calls. The node owns the saved tensors: it checks them
    for in-place writes, frees them after a backward, and connects them in a differentiable one.
Assumes: no call writes to a tensor that another call reads. Such a write is refused if
    `mark_dirty` reports it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import Function, FunctionCtx

from mpgrad.errors import add_note
from mpgrad.torch_state import behaviours
from mpgrad.torch_state.modes import ModeCheck, current_modes, under
from mpgrad.torch_state.private import (
    apply,
    dual_level_is_active,
    graph_is_kept,
    has_tangent,
    is_functorch_wrapped,
    transforms_are_active,
    without_tangents,
)

if TYPE_CHECKING:
    from mpgrad.pool import Pool

__all__ = [
    "EmulatedAutogradContext",
    "map_with_parallel_backward",
    "run_isolated_backward",
    "run_isolated_forward",
]

Values = tuple[Any, ...]  # the arguments or outputs of a Function: tensors and other objects


class TensorSpec(NamedTuple):
    """Describes a tensor without its data."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


Likes = tuple[TensorSpec | None, ...]


class EmulatedAutogradContext(FunctionCtx):
    """Replaces the `ctx` of a `torch.autograd.Function` outside the engine.

    Args:
        args: the arguments of the forward, for `needs_input_grad`.

    The Function may set and read its own attributes as on the real context. Attributes of the
    engine's nodes (`next_functions`, hooks) are missing, and writes to saved tensors are not
    detected.

    Example:
        >>> import torch, mpgrad
        >>> ctx = mpgrad.functions.EmulatedAutogradContext(torch.ones(2, requires_grad=True), 3)
        >>> ctx.save_for_backward(torch.arange(2))
        >>> ctx.needs_input_grad, ctx.saved_tensors
        ((True, False), (tensor([0, 1]),))
    """

    __slots__ = ("_unpacked",)

    to_save: Values = ()
    saved_for_forward: Values = ()
    dirty_tensors: Values = ()
    non_differentiable: Values = ()
    materialize_grads: bool = True

    def __init__(self, *args: Any) -> None:
        self.needs_input_grad = tuple([requires_grad(arg) for arg in args])
        self._inputs = likes(args)
        self._outputs: Likes = ()
        self._smooth: Likes = ()  # the outputs that need a tangent in PyTorch if any output has one
        self._returned_tuple = False
        self._has_tangents = any(isinstance(arg, torch.Tensor) and has_tangent(arg) for arg in args)
        self._unpacked: Values | None = None

    @property
    def saved_tensors(self) -> Values:
        return self.to_save if self._unpacked is None else self._unpacked

    def _with_saved(self, tensors: Values) -> EmulatedAutogradContext:
        """Return a context with the same attributes for one `backward` or `jvp`. It has its own
        saved tensors, because another one may run at the same time."""
        twin = EmulatedAutogradContext.__new__(EmulatedAutogradContext)
        twin.__dict__ = self.__dict__
        twin._unpacked = tensors
        return twin


def run_isolated_forward(func: type[Function], *args: Any) -> tuple[EmulatedAutogradContext, Any]:
    """Run the forward of `func` without a graph.

    Args:
        func: a subclass of `torch.autograd.Function`, in either style.
        args: the forward's arguments, as `func.apply` would get them.

    Returns:
        The context for `run_isolated_backward`, and the outputs as forward returned them, without
        history.

    Raises:
        TypeError: `func` is not such a class.

    Example:
        >>> import torch, mpgrad
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x ** 2
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * ctx.saved_tensors[0] * grad
        >>> ctx, square = mpgrad.functions.run_isolated_forward(Square, torch.tensor([3.0]))
        >>> square, mpgrad.functions.run_isolated_backward(Square, ctx, torch.tensor([1.0]))
        (tensor([9.]), (tensor([6.]),))
    """
    check_function(func)
    args = with_defaults(func, args)
    ctx = EmulatedAutogradContext(*args)
    outputs = tuple(
        [each.detach() if requires_grad(each) else each for each in forward_of(func, ctx, args)]
    )
    return ctx, outputs if ctx._returned_tuple else outputs[0]


def run_isolated_backward(
    func: type[Function], ctx: EmulatedAutogradContext, *grad_outputs: Any
) -> Values:
    """Run the backward of `func` without a graph. It can be run any number of times.

    Args:
        func: the Function whose forward made `ctx`.
        ctx: the context that `run_isolated_forward` returned.
        grad_outputs: one gradient per output, or None. Zeros replace None unless the Function has
            turned that off.

    Returns:
        One gradient, or None, per argument of the forward.

    Raises:
        TypeError, ValueError: `ctx` is not a context, or the gradients do not fit the outputs.
        RuntimeError: the backward returned the wrong number of gradients, or gradients of the wrong
            shape.

    Example:
        >>> import torch, mpgrad
        >>> class Triple(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 3
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 3
        >>> ctx, _ = mpgrad.functions.run_isolated_forward(Triple, torch.ones(2))
        >>> [
        ...     mpgrad.functions.run_isolated_backward(Triple, ctx, torch.full((2,), factor))
        ...     for factor in (1.0, 2.0)
        ... ]
        [(tensor([3., 3.]),), (tensor([6., 6.]),)]
    """
    check_function(func)
    check_gradients(ctx, grad_outputs)
    with torch.no_grad():
        return backward_of(func, ctx, grad_outputs)


def check_gradients(ctx: object, grads: Values) -> None:
    """Raise an error if the arguments of an emulated backward are wrong."""
    if not isinstance(ctx, EmulatedAutogradContext):
        raise TypeError(
            f"ctx must be what run_isolated_forward returned (given: {type(ctx).__name__})"
        )
    if len(grads) != len(ctx._outputs):
        counts = f"outputs: {len(ctx._outputs)}, given: {len(grads)}"
        raise ValueError(f"there must be one gradient, or None, for each output ({counts})")
    for number, (grad, output) in enumerate(zip(grads, ctx._outputs, strict=True)):
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise TypeError(
                f"the gradient of output {number} must be a tensor or None (given: "
                f"{type(grad).__name__})"
            )
        if grad is not None and output is not None and grad.shape != output.shape:
            raise ValueError(
                f"the gradient of output {number} must have its shape ({tuple(output.shape)}; "
                f"given: {tuple(grad.shape)})"
            )


def check_function(func: object) -> None:
    if not (isinstance(func, type) and issubclass(func, Function)):
        raise TypeError(f"func must be a subclass of torch.autograd.Function (func: {func!r})")


# --- one call, as torch.autograd runs it


def with_defaults(func: type[Function], args: Values) -> Values:
    """Return the arguments that `func.apply` would use. If there is a `setup_context`, it fills in
    the forward's defaults."""
    if func.setup_context is Function.setup_context:
        return args
    try:
        bound = inspect.signature(func.forward).bind(*args)
    except TypeError:
        return args  # the forward raises an error, which gets a note with its call
    bound.apply_defaults()
    return bound.args


def forward_of(func: type[Function], ctx: EmulatedAutogradContext, args: Values) -> Values:
    """Run the Function's forward, in the older or newer style, and record the outputs in `ctx`."""
    with torch.no_grad(), without_tangents():
        if func.setup_context is Function.setup_context:
            outputs = func.forward(ctx, *args)
        else:
            outputs = func.forward(*args)
            func.setup_context(ctx, args, outputs)
    ctx._returned_tuple = isinstance(outputs, tuple)
    outputs = as_tuple(outputs)
    ctx._outputs = likes(outputs)
    return outputs


def backward_of(func: type[Function], ctx: EmulatedAutogradContext, grads: Values) -> Values:
    """Return one gradient per argument. The checks and messages are the engine's, but here the call
    that made the mistake is known."""
    backward: Callable[..., Any] = func.backward if func.vjp is Function.vjp else func.vjp
    given = filled(grads, ctx._outputs) if ctx.materialize_grads else grads
    found = as_tuple(
        backward(ctx, list(given))
        if getattr(func, "boxed_grads_call", False)
        else backward(ctx, *given)
    )
    node, expected = f"{func.__name__}Backward", len(ctx._inputs)
    if len(found) < expected or any(grad is not None for grad in found[expected:]):
        raise RuntimeError(
            f"function {node} returned an incorrect number of gradients (expected {expected}, got "
            f"{len(found)})"
        )
    for position, (grad, like) in enumerate(zip(found, ctx._inputs, strict=False)):
        if grad is None:
            continue
        if not isinstance(grad, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(grad).__name__}) from {node}")
        if like is None:
            raise RuntimeError(
                f"function {node} returned a gradient different than None at position "
                f"{position + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if ctx.needs_input_grad[position] and not sums_to(grad.shape, like.shape):
            raise RuntimeError(
                f"Function {node} returned an invalid gradient at index {position} - got "
                f"{list(grad.shape)} "
                f"but expected shape compatible with {list(like.shape)}"
            )
    return found[:expected]


def jvp_of(func: type[Function], ctx: EmulatedAutogradContext, tangents: Values) -> Values:
    """Run the Function's own `jvp` as PyTorch calls it."""
    given = filled(tangents, ctx._inputs) if ctx.materialize_grads else tangents
    with without_tangents():
        found = as_tuple(func.jvp(ctx._with_saved(ctx.saved_for_forward), *given))
    if len(found) != len(ctx._outputs):
        counts = f"expected {len(ctx._outputs)} but got {len(found)}"
        raise RuntimeError(
            f"{func.__name__}'s jvp returned an invalid number of forward gradients ({counts})"
        )
    return found


T = TypeVar("T")


def map_with_parallel_backward(
    func: type[Function], *args_per_call: Sequence[Any], pool: Pool | None = None
) -> Values:
    """Return ``tuple(func.apply(*args) for args in args_per_call)``, and run all calls at once,
    forward and backward.

    A value that depends on one call waits for all calls. No output is available before the last
    forward has ended, and no gradient before the last backward has ended. If calls fail, the
    exception of the first one is raised after all have ended.

    Args:
        func: a subclass of `torch.autograd.Function`, in either style.
        args_per_call: the arguments of each call, a sequence per call; their number may differ.
        pool: an `mpgrad.Pool` whose workers run the calls, at most one per worker at a time; None
            for a thread per call. In a pool's processes, writes to arguments (`mark_dirty`) change
            only a copy.

    Returns:
        The output of each call: a tensor, or a tuple, as `func.apply` returns it.

    Raises:
        TypeError: `func` is not such a class, or the arguments of a call are not a sequence.
        ValueError: a call wrote to a tensor that is also an argument of another call.
        NotImplementedError: an argument belongs to a `torch.func` transform.
        UnsupportedTorchError: the installed PyTorch lacks a behaviour that mpgrad relies on.
        Exception: the exception of the first call that failed, with a note that names it and the
            other calls that failed.

    Example:
        >>> import torch, mpgrad
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, times):
        ...         ctx.times = times
        ...         return x * 2 ** times
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 2 ** ctx.times, None
        >>> x = torch.ones(2, requires_grad=True)
        >>> a, b = mpgrad.functions.map_with_parallel_backward(Double, (x, 1), (x, 3))
        >>> (a + b).sum().backward()
        >>> a.detach(), b.detach(), x.grad
        (tensor([2., 2.]), tensor([8., 8.]), tensor([10., 10.]))
    """
    behaviours.check()
    check_function(func)
    for call, args in enumerate(args_per_call):
        check_arguments(call, args)
    calls = [with_defaults(func, tuple(args)) for args in args_per_call]
    if not calls:
        return ()
    if pool is not None:
        return in_pool(func, calls, pool)
    contexts = [EmulatedAutogradContext(*args) for args in calls]
    outputs = parted(
        apply(ParallelCalls, func, contexts, *joined(calls)),
        [len(ctx._outputs) for ctx in contexts],
    )
    for ctx in contexts:
        ctx.saved_for_forward = ()  # only jvp needs these tensors, and it has run
    return tuple(
        [own if ctx._returned_tuple else own[0] for ctx, own in zip(contexts, outputs, strict=True)]
    )


# --- all calls


class ParallelCalls(Function):
    """Runs all calls as one node. `contexts` are the calls' contexts, and `flat` has their
    arguments."""

    @staticmethod
    def forward(
        ctx: Any, func: type[Function], contexts: list[EmulatedAutogradContext], *flat: Any
    ) -> Values:
        arguments = parted(flat, [len(each._inputs) for each in contexts])
        calls = list(zip(contexts, arguments, strict=True))
        tasks = {
            call: functools.partial(forward_of, func, *each) for call, each in enumerate(calls)
        }
        outputs = list(side_by_side("forward", tasks).values())  # [1]
        refuse_shared_writes(calls)
        constant: list[torch.Tensor] = []
        dual = any(each._has_tangents for each in contexts)
        for call, (each, args) in enumerate(calls):
            outputs[call] = settled(each, args, outputs[call], constant, dual)
        saved = [each.to_save if any(each.needs_input_grad) else () for each in contexts]
        ctx.save_for_backward(*joined(saved))  # [2]
        ctx.mark_dirty(*joined([each.dirty_tensors for each in contexts]))
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.func, ctx.contexts, ctx.saved = func, contexts, [len(each) for each in saved]
        for each in contexts:
            # otherwise they would never be freed
            each.to_save = each.dirty_tensors = each.non_differentiable = ()
        return joined(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Values:
        contexts: list[EmulatedAutogradContext] = ctx.contexts
        refuse_transforms("a gradient", grads)
        saved = parted(ctx.saved_tensors if any(ctx.saved) else (), ctx.saved)
        own = parted(grads, [len(each._outputs) for each in contexts])
        inputs = {
            call: (*saved[call], *own[call])
            for call, each in enumerate(contexts)
            if any(each.needs_input_grad)
            and any(grad is not None for grad in own[call])  # as in the loop
        }

        def backward(call: int, *values: Any) -> Values:
            count = ctx.saved[call]
            return backward_of(ctx.func, contexts[call]._with_saved(values[:count]), values[count:])

        found = behind_one_node(backward, inputs)  # [3]
        return (
            None,
            None,
            *joined(
                [
                    found.get(call) or (None,) * len(each._inputs)
                    for call, each in enumerate(contexts)
                ]
            ),
        )

    @staticmethod
    def jvp(ctx: Any, _func: None, _contexts: None, *tangents: Any) -> Values:
        contexts: list[EmulatedAutogradContext] = ctx.contexts
        own = parted(tangents, [len(each._inputs) for each in contexts])
        tasks = {
            call: functools.partial(jvp_of, ctx.func, each, own[call])
            for call, each in enumerate(contexts)
            if each._has_tangents
        }
        found = side_by_side("jvp", tasks)
        zeros = [filled((None,) * len(each._smooth), each._smooth) for each in contexts]
        return joined([found.get(call) or zeros[call] for call in range(len(contexts))])


def settled(
    ctx: EmulatedAutogradContext,
    args: Values,
    outputs: Values,
    constant: list[torch.Tensor],
    dual: bool,
) -> Values:
    """Return a call's outputs, and add those without a gradient to `constant`. If no argument needs
    a gradient, no output has one.

    If calls are `dual`, PyTorch needs a tangent for every differentiable output. A tangent that
    only another call makes necessary is zero. It must not be set on a view of an argument, because
    the argument would get it as well.
    """
    fixed = ctx.non_differentiable if any(ctx.needs_input_grad) or ctx._has_tangents else outputs
    settled, smooth = list(outputs), list(ctx._outputs)
    for position, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        is_argument = among(output, args) and not among(output, ctx.dirty_tensors)
        if among(output, fixed):
            if is_argument:
                # another call may return the same argument with a gradient
                settled[position] = output.detach()
            constant.append(settled[position])
            smooth[position] = None
        elif not (output.is_floating_point() or output.is_complex()):
            smooth[position] = None
        elif dual and not ctx._has_tangents and (is_argument or output._is_view()):
            settled[position] = output.clone()
    ctx._smooth = tuple(smooth)
    return tuple(settled)


WATCH = ModeCheck()


def side_by_side(phase: str, tasks: Mapping[int, Callable[[], T]]) -> dict[int, T]:
    """Run each call's task in its own thread, in this thread's modes, and return the results. All
    tasks have ended when an error is raised."""
    WATCH.look()
    modes = current_modes()

    def run(task: Callable[[], T]) -> T:
        with under(modes):
            return task()

    with ThreadPoolExecutor(len(tasks) or 1, "mpgrad-call") as executor:
        futures = {call: executor.submit(run, task) for call, task in tasks.items()}
    errors = {
        call: error for call, future in futures.items() if (error := future.exception()) is not None
    }
    if errors:
        # Otherwise the error would refer to itself through its traceback, and keep the tensors
        # alive.
        futures.clear()
        raise_first(phase, errors)
    return {call: future.result() for call, future in futures.items()}


def raise_first(phase: str, errors: dict[int, BaseException]) -> None:
    """Raise the error of the first call that failed, with a note that names the other failures, and
    clear `errors`."""
    (first, error), *others = errors.items()
    also = [f"; call {call} failed ({type(other).__name__}: {other})" for call, other in others]
    add_note(error, f"raised in call {first}, phase: {phase}{''.join(also)}")
    try:
        raise error
    finally:
        errors.clear()
        del error, others


# --- the backward of the backward


class BackwardGraph(NamedTuple):
    """The graph of a call's differentiable backward, from its gates to its outputs."""

    gates: list[torch.Tensor]
    outputs: list[torch.Tensor]


def behind_one_node(
    backward: Callable[..., Values], inputs: Mapping[int, Values]
) -> dict[int, Values]:
    """Run ``backward(call, *inputs[call])`` side by side. With `create_graph`, the backwards of
    these backwards also run side by side.

    The engine would run the calls' graphs one after another. So each graph begins at gates, which
    are views of its inputs. One node represents all graphs, and its backward runs them in threads.
    This is correct only for a graph that leads to its gates and nowhere else. The engine runs all
    other graphs (if a tensor is an attribute of ctx, or with `once_differentiable`).
    """
    create = torch.is_grad_enabled()

    def gate(value: Any) -> Any:
        return value.view_as(value) if create and requires_grad(value) else value

    gated = {call: [gate(each) for each in own] for call, own in inputs.items()}
    gates = {
        call: [each for each in own if create and requires_grad(each)]
        for call, own in gated.items()
    }
    # before a write in place moves a gate
    nodes = {gate.grad_fn for own in gates.values() for gate in own}
    found = side_by_side(
        "backward", {call: functools.partial(backward, call, *own) for call, own in gated.items()}
    )
    graphs = [
        BackwardGraph(gates[call], [each for each in own if requires_grad(each)])
        for call, own in found.items()
    ]
    outputs = [output for graph in graphs for output in graph.outputs]
    if (
        not (create and outputs)
        or any(map(has_tangent, outputs))
        or not lead_to([each.grad_fn for each in outputs], nodes)
    ):
        return found
    behind = iter(
        apply(
            ParallelGraphs,
            graphs,
            *[each for own in inputs.values() for each in own if requires_grad(each)],
        )
    )
    return {
        call: tuple([next(behind) if requires_grad(each) else each for each in own])
        for call, own in found.items()
    }


class ParallelGraphs(Function):
    """Represents the graphs of all calls as one node, whose backward runs each of them in its own
    thread."""

    @staticmethod
    def forward(
        ctx: Any, graphs: list[BackwardGraph], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        return tuple([output.detach() for graph in graphs for output in graph.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Values:
        flat, keep = iter(grads), graph_is_kept()
        tasks = {
            call: functools.partial(
                differentiated, graph, list(itertools.islice(flat, len(graph.outputs))), keep
            )
            for call, graph in enumerate(ctx.graphs)
        }
        return None, *itertools.chain.from_iterable(side_by_side("double backward", tasks).values())


def differentiated(graph: BackwardGraph, grads: list[torch.Tensor | None], keep: bool) -> Values:
    """Return the gradients of one call at its gates."""
    given = [
        (output, grad)
        for output, grad in zip(graph.outputs, grads, strict=True)
        if grad is not None
    ]
    if not given:
        return (None,) * len(graph.gates)
    outputs, incoming = zip(*given, strict=True)
    create = torch.is_grad_enabled()
    return torch.autograd.grad(
        outputs, graph.gates, incoming, retain_graph=keep, create_graph=create, allow_unused=True
    )


def lead_to(roots: Sequence[Any], ends: set[Any]) -> bool:
    """Return whether every path through the graph from `roots` reaches one of the nodes `ends`."""
    seen, ahead = set(ends), list(roots)
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            following = (
                [each for each, _ in node.next_functions if each is not None]
                if node is not None
                else []
            )
            if not following:
                return False
            ahead += following
    return True


# --- in a pool, which already runs calls side by side and only needs the joint nodes


class JointIdentity(Function):
    """The identity for many tensors, each of which waits for all others."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inputs = likes(tensors)
        # Views of the inputs could not be written to.
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Values:
        return joint(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Values:
        return filled(tangents, ctx.inputs)


def joint(values: Values) -> Values:
    """Return the same values, with one node in front of all tensors that need gradients."""
    entering = {
        id(each): each for each in values if torch.is_grad_enabled() and requires_grad(each)
    }
    left = dict(zip(entering, apply(JointIdentity, *entering.values()), strict=True))
    return tuple([left.get(id(each), each) for each in values])


def in_pool(func: type[Function], calls: Sequence[Values], pool: Pool) -> Values:
    """Run the calls in workers, behind one node that runs all their backwards."""
    entered = parted(joint(joined(calls)), [len(args) for args in calls])
    followed = transforms_are_active() or dual_level_is_active()  # one error ends all
    results = pool.starmap(func, entered, chunksize=1, on_error="raise" if followed else "return")
    errors = {
        call: result for call, result in enumerate(results) if isinstance(result, BaseException)
    }
    if errors:
        results.clear()
        raise_first("forward", errors)
    outputs = [as_tuple(result) for result in results]
    left = parted(joint(joined(outputs)), [len(own) for own in outputs])
    return tuple(
        [
            own if isinstance(result, tuple) else own[0]
            for result, own in zip(results, left, strict=True)
        ]
    )


# --- checks


def check_arguments(call: int, args: object) -> None:
    if not isinstance(args, Sequence):
        kind = type(args).__name__
        raise TypeError(
            f"the arguments of call {call} must be a sequence (given: a {kind}); for one argument "
            "pass (argument,)"
        )
    refuse_transforms(f"an argument of call {call}", args)


def refuse_transforms(subject: str, values: Iterable[Any]) -> None:
    if any(isinstance(each, torch.Tensor) and is_functorch_wrapped(each) for each in values):
        raise NotImplementedError(
            f"{subject} belongs to a torch.func transform, which other threads do not know; call "
            "outside of it"
        )


def refuse_shared_writes(calls: Sequence[tuple[EmulatedAutogradContext, Values]]) -> None:
    """Raise ValueError if a call wrote in place to memory that is also an argument of another
    call."""
    for (writer, (ctx, _)), (reader, (_, args)) in itertools.permutations(enumerate(calls), 2):
        for written, read in itertools.product(ctx.dirty_tensors, args):
            if isinstance(read, torch.Tensor) and overlap(written, read):
                raise ValueError(
                    f"call {writer} wrote in place to memory that call {reader} may have read, "
                    "while both were running; "
                    "give each call a tensor of its own (tensor.clone())"
                )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the memory ranges from first to last element have a byte in common. Sparse
    tensors have no such range."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    (start, end), (other_start, other_end) = stretch(a), stretch(b)
    return max(start, other_start) < min(end, other_end)


def stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of its first element, and the address after its last one."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (
        tensor.numel() > 0
    )


# --- helpers for values


def as_tuple(value: Any) -> Values:
    return tuple(value) if isinstance(value, tuple) else (value,)


def likes(values: Values) -> Likes:
    """Return the data that is needed to create zeros like these tensors."""
    return tuple(
        [
            TensorSpec(each.shape, each.dtype, each.device)
            if isinstance(each, torch.Tensor)
            else None
            for each in values
        ]
    )


def filled(grads: Values, shapes: Likes) -> Values:
    """Replace None with zeros if the corresponding value is a tensor."""
    return tuple(
        [
            like.zeros() if grad is None and like else grad
            for grad, like in zip(grads, shapes, strict=True)
        ]
    )


def requires_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def sums_to(shape: torch.Size, smaller: torch.Size) -> bool:
    """Return whether the engine can sum a gradient of `shape` to the `smaller` shape of an expanded
    argument."""
    pairs = zip(reversed(smaller), reversed(shape), strict=False)
    return len(smaller) <= len(shape) and all(own in (1, other) for own, other in pairs)


def joined(parts: Sequence[Values]) -> Values:
    """Join all parts, the last call's first. A serial loop adds up the gradients of a shared tensor
    in this order."""
    return tuple(itertools.chain.from_iterable(reversed(parts)))


def parted(flat: Values, counts: Sequence[int]) -> list[Values]:
    """Split values into the parts that `joined` put together."""
    values = iter(flat)
    return [tuple(itertools.islice(values, count)) for count in reversed(counts)][::-1]


def among(tensor: torch.Tensor, values: Values) -> bool:
    return any(tensor is each for each in values)
