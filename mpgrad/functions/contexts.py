"""Emulated autograd contexts: one call of a `torch.autograd.Function` without the engine.

PyTorch makes the context of a Function itself, inside of `apply`, and runs the backward when its engine comes to the node.
Whoever wants to run them elsewhere, in a thread or at another time, needs a stand-in for the context that keeps what forward
and `setup_context` put there, and the checks that the engine does on what comes back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import Function, FunctionCtx

from mpgrad.torch_state.private import has_tangent, without_tangents

__all__ = [
    "EmulatedAutogradContext",
    "Likes",
    "Values",
    "as_tuple",
    "backward_of",
    "check_function",
    "filled",
    "forward_of",
    "jvp_of",
    "likes",
    "requires_grad",
    "run_isolated_backward",
    "run_isolated_forward",
    "with_defaults",
]

Values = tuple[Any, ...]  # tensors and anything else, as a Function takes and returns them


class Like(NamedTuple):
    """What a tensor looks like, without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


Likes = tuple[Like | None, ...]


class EmulatedAutogradContext(FunctionCtx):
    """Stands in for the `ctx` of a `torch.autograd.Function` outside of the engine.

    Args:
        args: the arguments of the forward, for `needs_input_grad`.

    Attributes of the Function's own may be set and read as on the real one. What belongs to a node of the engine
    (`next_functions`, hooks) is missing, and nobody checks whether saved tensors have been written to since.

    Example:
        >>> import torch, mpgrad
        >>> ctx = mpgrad.EmulatedAutogradContext(torch.ones(2, requires_grad=True), 3)
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
        self._smooth: Likes = ()  # the outputs that PyTorch wants a tangent for, if any has one
        self._returned_tuple = False
        self._has_tangents = any(isinstance(arg, torch.Tensor) and has_tangent(arg) for arg in args)
        self._unpacked: Values | None = None

    @property
    def saved_tensors(self) -> Values:
        return self.to_save if self._unpacked is None else self._unpacked

    def _with_saved(self, tensors: Values) -> EmulatedAutogradContext:
        """The same attributes, for one `backward` or `jvp` with saved tensors of its own: another may run beside it."""
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
        The context for `run_isolated_backward`, and the outputs as forward returned them, without history.

    Raises:
        TypeError: `func` is no such class. Otherwise what the forward raises.

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
        >>> ctx, square = mpgrad.run_isolated_forward(Square, torch.tensor([3.0]))
        >>> square, mpgrad.run_isolated_backward(Square, ctx, torch.tensor([1.0]))
        (tensor([9.]), (tensor([6.]),))
    """
    check_function(func)
    args = with_defaults(func, args)
    ctx = EmulatedAutogradContext(*args)
    outputs = tuple([each.detach() if requires_grad(each) else each for each in forward_of(func, ctx, args)])
    return ctx, outputs if ctx._returned_tuple else outputs[0]


def run_isolated_backward(func: type[Function], ctx: EmulatedAutogradContext, *grad_outputs: Any) -> Values:
    """Run the backward of `func` without a graph, as often as wanted.

    Args:
        func: the Function whose forward made `ctx`.
        ctx: from `run_isolated_forward`.
        grad_outputs: one gradient per output, or None; zeros take the place of None unless the Function declined them.

    Returns:
        One gradient, or None, per argument of the forward.

    Raises:
        TypeError, ValueError: no context, or gradients that do not fit the outputs.
        RuntimeError: the backward returned gradients in wrong number or shape. Otherwise what it raises.

    Example:
        >>> import torch, mpgrad
        >>> class Triple(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 3
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 3
        >>> ctx, _ = mpgrad.run_isolated_forward(Triple, torch.ones(2))
        >>> [mpgrad.run_isolated_backward(Triple, ctx, torch.full((2,), factor)) for factor in (1.0, 2.0)]
        [(tensor([3., 3.]),), (tensor([6., 6.]),)]
    """
    check_function(func)
    check_gradients(ctx, grad_outputs)
    with torch.no_grad():
        return backward_of(func, ctx, grad_outputs)


def check_gradients(ctx: object, grads: Values) -> None:
    """What was given to the backward of an emulated context."""
    if not isinstance(ctx, EmulatedAutogradContext):
        raise TypeError(f"ctx must be what run_isolated_forward returned (given: {type(ctx).__name__})")
    if len(grads) != len(ctx._outputs):
        counts = f"outputs: {len(ctx._outputs)}, given: {len(grads)}"
        raise ValueError(f"there must be one gradient, or None, for each output ({counts})")
    for number, (grad, output) in enumerate(zip(grads, ctx._outputs, strict=True)):
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise TypeError(f"the gradient of output {number} must be a tensor or None (given: {type(grad).__name__})")
        if grad is not None and output is not None and grad.shape != output.shape:
            raise ValueError(
                f"the gradient of output {number} must have its shape ({tuple(output.shape)}; given: {tuple(grad.shape)})"
            )


def check_function(func: object) -> None:
    if not (isinstance(func, type) and issubclass(func, Function)):
        raise TypeError(f"func must be a subclass of torch.autograd.Function (func: {func!r})")


# --- one call, as torch.autograd runs it


def with_defaults(func: type[Function], args: Values) -> Values:
    """The arguments that `func.apply` would use: with `setup_context` it fills in the forward's defaults."""
    if func.setup_context is Function.setup_context:
        return args
    try:
        bound = inspect.signature(func.forward).bind(*args)
    except TypeError:
        return args  # the forward will say it, and be noted with its call
    bound.apply_defaults()
    return bound.args


def forward_of(func: type[Function], ctx: EmulatedAutogradContext, args: Values) -> Values:
    """The Function's forward, in its older or newer style; `ctx` then knows the outputs."""
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
    """One gradient per argument. The engine would find mistakes too, but not know whose they are: the messages are its own."""
    backward: Callable[..., Any] = func.backward if func.vjp is Function.vjp else func.vjp
    given = filled(grads, ctx._outputs) if ctx.materialize_grads else grads
    found = as_tuple(backward(ctx, list(given)) if getattr(func, "boxed_grads_call", False) else backward(ctx, *given))
    node, expected = f"{func.__name__}Backward", len(ctx._inputs)
    if len(found) < expected or any(grad is not None for grad in found[expected:]):
        raise RuntimeError(f"function {node} returned an incorrect number of gradients (expected {expected}, got {len(found)})")
    for position, (grad, like) in enumerate(zip(found, ctx._inputs, strict=False)):
        if grad is None:
            continue
        if not isinstance(grad, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(grad).__name__}) from {node}")
        if like is None:
            raise RuntimeError(
                f"function {node} returned a gradient different than None at position {position + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if ctx.needs_input_grad[position] and not sums_to(grad.shape, like.shape):
            raise RuntimeError(
                f"Function {node} returned an invalid gradient at index {position} - got {list(grad.shape)} "
                f"but expected shape compatible with {list(like.shape)}"
            )
    return found[:expected]


def jvp_of(func: type[Function], ctx: EmulatedAutogradContext, tangents: Values) -> Values:
    """The Function's own `jvp`, as PyTorch calls it."""
    given = filled(tangents, ctx._inputs) if ctx.materialize_grads else tangents
    with without_tangents():
        found = as_tuple(func.jvp(ctx._with_saved(ctx.saved_for_forward), *given))
    if len(found) != len(ctx._outputs):
        counts = f"expected {len(ctx._outputs)} but got {len(found)}"
        raise RuntimeError(f"{func.__name__}'s jvp returned an invalid number of forward gradients ({counts})")
    return found


# --- small things about values


def as_tuple(value: Any) -> Values:
    return tuple(value) if isinstance(value, tuple) else (value,)


def likes(values: Values) -> Likes:
    """What of tensors is needed to make zeros like them."""
    return tuple([Like(each.shape, each.dtype, each.device) if isinstance(each, torch.Tensor) else None for each in values])


def filled(grads: Values, shapes: Likes) -> Values:
    """Zeros in the places of None, wherever there is a tensor to have them."""
    return tuple([like.zeros() if grad is None and like else grad for grad, like in zip(grads, shapes, strict=True)])


def requires_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def sums_to(shape: torch.Size, smaller: torch.Size) -> bool:
    """Whether the engine can sum a gradient of `shape` to the `smaller` shape of the argument, which had been expanded."""
    pairs = zip(reversed(smaller), reversed(shape), strict=False)
    return len(smaller) <= len(shape) and all(own in (1, other) for own, other in pairs)
