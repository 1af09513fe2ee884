"""Compares a pool with the serial loop, as mpgrad's own tests do. The pool must do what the loop
does.

`torch.autograd.gradcheck` compares one function with finite differences, to a tolerance. Here the
loop in the caller is the reference. So values and gradients of items must be equal bit for bit, and
no tolerance can hide a mistake.

    loop ─► loop again, last item first ─► the pool ─► the pool, last item first, one call at a time

The pool cannot run some functions as the loop does: a function may count its calls, remember its
arguments, or write to its captures. Such a function may agree by chance in any one of these runs,
but not in all.
"""

from __future__ import annotations

import io
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.autograd.gates import ROOT
from mpgrad.calls.packing import pickled_function
from mpgrad.errors import LostGradientError
from mpgrad.pickling import structure
from mpgrad.pool import Pool
from mpgrad.torch_state.modes import RandomState, kept_random_state
from mpgrad.torch_state.private import all_leaves, apply, has_plain_memory, held_leaves, tree_leaves
from mpgrad.wire.tensor_refs import have_attributes

__all__ = ["assert_same_as_serial"]

Function = Callable[[Any], Any]
RANDOM = (
    "the function draws random numbers, which differ in a pool, because each item has its own "
    "stream; to compare, give each item its numbers, a seed, or a torch.Generator"
)


def assert_same_as_serial(
    fn: Function,
    items: Sequence[Any],
    pool: Pool | None = None,
    *,
    order: int = 1,
    run: Callable[[Pool, Function, list[Any]], Sequence[Any]] | None = None,
    rtol: float | None = None,
) -> None:
    """Compare ``pool.map(fn, items)`` with ``[fn(item) for item in items]``: values, structure, and
    derivatives.

    The loop runs a second time, with the last item first, and must return the same results. The
    pool also runs twice: as usual, and with the last item first and each item as a separate call.

    Objects in items and results are taken apart as in the pool, and their tensors are compared like
    all others. The rest of an object is equal if its pickle is the same, or if it has no tensors
    and `==` returns true.

    Args:
        fn: the function. Gradients of the tensors that it captures are also compared. It must not
            write to them.
        items: tensors, structures or objects; each run gets its own copies, and a copy is a leaf if
            the original is one. Views of the same storage are also views of one storage in the
            copies.
        pool: the pool to test; None for a new pool with two processes.
        order: the highest order of the derivatives; 0 for values only. Derivatives of order 2 are
            those of all first derivatives, with random weights, as in
            `torch.autograd.gradgradcheck`. For orders above 1, only the pool's first run is
            compared.
        run: how the pool is called; None for `map`.
        rtol: relative tolerance for sums that the pool computes in a different order: the gradients
            of captures, and all derivatives of order 2 or more; None for 4096 times the precision
            of the dtype. Everything else is compared bit for bit.

    Raises:
        AssertionError: a value or gradient differs, and the message names the item; or `fn` does
            something that no pool can reproduce: it keeps state from call to call, writes to a
            capture, or draws random numbers, which differ in a pool.
        ValueError: `order` is negative.

    Example:
        >>> import mpgrad, torch
        >>> weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
        >>> items = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in range(4)]
        >>> mpgrad.testing.assert_same_as_serial(lambda x: (x * weight).exp(), items, order=2)
    """
    if order < 0:
        raise ValueError(f"order must be at least 0 (order: {order})")
    if pool is None:
        with Pool(processes=2) as own:
            return assert_same_as_serial(fn, items, own, order=order, run=run, rtol=rtol)
    loop = Loop(fn, items, order, rtol, pool._scheduler.packer.kind)
    loop.assert_repeatable()
    given = copies(items)
    results = run(pool, fn, given) if run else pool.map(fn, given)
    loop.compare(list(results), given, order)
    given = copies(items)
    results = run(pool, fn, given[::-1]) if run else pool.map(fn, given[::-1], 1)
    loop.compare(list(results)[::-1], given, min(order, 1), " (last item first, one by one)")
    return None


class Loop:
    """Runs the serial loop and keeps its results."""

    def __init__(
        self, fn: Function, items: Sequence[Any], order: int, rtol: float | None, kind: str
    ) -> None:
        self._fn = fn
        self._items = items
        self._rtol = rtol
        self._start = RandomState()
        reached = pickled_function(fn, kind).captures
        before = [tensor.detach().clone() for tensor in reached]
        lived = all_leaves() if order else []
        if order:
            check_items_keep_leaves(fn, items)
        inputs = copies(items)
        self._results = [fn(item) for item in inputs]
        self._draws = self._start.has_moved()
        for tensor, value in zip(reached, before, strict=True):
            if tensor.shape != value.shape or not same_bits(
                tensor.detach().cpu().to_dense(), value.cpu().to_dense()
            ):
                raise AssertionError(
                    "the function writes to a tensor or array that it captures "
                    f"({describe(value)}): in a pool the change stays in a "
                    "worker; return the new value instead"
                )
        self._captures = [tensor for tensor in reached if tensor.requires_grad]
        self._names = [f"capture {number}" for number in range(len(self._captures))]
        if order:
            for index, result in enumerate(self._results):
                check_none_is_lost(
                    index, [each for each in left_out(result) if each[1].grad_fn is not None]
                )
            others = others_reached(
                self._results, [*differentiable(inputs), *self._captures], lived
            )
            self._names += [
                f"a leaf that is not an input or a capture ({describe(each)})" for each in others
            ]
            self._captures += others
        self._derivatives = list(
            derivatives(self._results, [*differentiable(inputs), *self._captures], order)
        )

    def assert_repeatable(self) -> None:
        """Run the loop again, with the last item first unless the function draws random numbers."""
        again = copies(self._items)
        if self._draws:
            with kept_random_state():
                self._start.put_back()
                results = [self._fn(item) for item in again]
        else:
            results = [self._fn(item) for item in again[::-1]][::-1]
        for index, pair in enumerate(zip(results, self._results, strict=True)):
            try:
                compare_values(f"item {index}", *pair)
            except AssertionError as error:
                raise AssertionError(
                    f"item {index}: the function returns another value when it is called again, or "
                    "in another order: it counts "
                    "its calls, draws from a generator that it captures, or keeps state from "
                    "one call to the next. A pool calls "
                    "it in any order, in several processes; pass each item the values that it needs"
                ) from error

    def compare(
        self, results: Sequence[Any], inputs: Sequence[Any], order: int, how: str = ""
    ) -> None:
        """Raise AssertionError unless the results and their derivatives equal those of the loop.
        `how` describes the pool's run in the error."""
        try:
            self._compare(results, inputs, order)
        except AssertionError as error:
            raise AssertionError(f"{error}{how}{f' ({RANDOM})' if self._draws else ''}") from error

    def _compare(self, results: Sequence[Any], inputs: Sequence[Any], order: int) -> None:
        if len(results) != len(self._results):
            raise AssertionError(
                f"the pool returned {len(results)} results, the serial loop {len(self._results)}"
            )
        for index, pair in enumerate(zip(results, self._results, strict=True)):
            compare_values(f"item {index}", *pair)
        ours = differentiable(inputs)
        names = [*(f"input {number}" for number in range(len(ours))), *self._names]
        every = derivatives(results, [*ours, *self._captures], len(self._derivatives))
        asked = zip(itertools.islice(every, order), self._derivatives, strict=False)
        for degree, (grads, expected) in enumerate(asked, start=1):
            label = "gradient of" if degree == 1 else f"derivative of order {degree} of"
            for number, name in enumerate(names):
                rtol = 0.0 if degree == 1 and number < len(ours) else self._rtol
                compare_tensors(f"{label} {name}", grads[number], expected[number], rtol)


# --- tensors that pickling leaves out


class OwnersPickler(structure.TensorPickler):
    """Records the objects that are pickled by their own code."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.owners: list[Any] = []

    def reducer_override(self, value: object) -> Any:
        if structure.has_own_way(type(value)):
            self.owners.append(value)
        return super().reducer_override(value)


def left_out(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that need gradients but that an object's own pickling leaves out, with the
    object's class."""
    pickler = OwnersPickler(io.BytesIO())
    pickler.dump(value)
    sent = set(map(id, pickler.tensors))
    found = []
    for owner in pickler.owners:
        for each in tree_leaves(dict(getattr(owner, "__dict__", {}))):
            if isinstance(each, torch.Tensor) and each.requires_grad and id(each) not in sent:
                found.append((type(owner).__qualname__, each))
    return found


def check_none_is_lost(index: int, lost: Iterable[tuple[str, torch.Tensor]]) -> None:
    for owner, tensor in lost:
        raise AssertionError(
            f"item {index}: a gradient would be lost: the pickling of {owner} leaves out "
            f"{describe(tensor)} that requires "
            "grad; have __getstate__ or __reduce__ return the tensor"
        )


def check_items_keep_leaves(fn: Function, items: Sequence[Any]) -> None:
    """Raise AssertionError if the copies of the items lack a tensor that needs gradients, because
    their pickling leaves it out. The pool's copies lack it as well."""
    for index, item in enumerate(items):
        if lost := left_out(item):
            with kept_random_state():
                reached = set(
                    map(id, others_reached([fn(item)], [], [tensor for _, tensor in lost]))
                )
            check_none_is_lost(index, [each for each in lost if id(each[1]) in reached])


def others_reached(
    results: Sequence[Any], known: Sequence[torch.Tensor], lived: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the leaves that existed before and that get gradients from the results, except the
    `known` ones."""
    outputs, given, old = differentiable(results), set(map(id, known)), set(map(id, lived))
    reached = [node.variable for node in held_leaves(outputs, given)]
    reached += [each for each in outputs if each.is_leaf and id(each) not in given]
    return [each for each in {id(each): each for each in reached}.values() if id(each) in old]


# --- copies


class AliasNode(torch.autograd.Function):
    """Returns another tensor with the same memory that is neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def copies(items: Sequence[Any]) -> list[Any]:
    """Copy the items, so that the copies share nothing with them. One tensor or storage stays one
    in the copies, and leaves stay leaves."""
    known: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    kept: list[torch.Tensor] = []  # keeps them alive, because they are known by id

    def value_of(tensor: torch.Tensor) -> torch.Tensor:
        if not has_plain_memory(tensor):
            return tensor.detach().clone()
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storages[storage.data_ptr()], *place
        )

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:  # a tensor that appears twice is copied once
            kept.append(tensor)
            leaf = value_of(tensor).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                leaf = torch.nn.Parameter(leaf.detach(), tensor.requires_grad)
            known[id(tensor)] = leaf if tensor.is_leaf else apply(AliasNode, leaf)
        return known[id(tensor)]

    return [
        structure.loads(pickled, list(map(copy, tensors)))
        for pickled, tensors in map(structure.dumps, items)
    ]


# --- derivatives


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure or object, as the pool takes it apart."""
    if is_bare(value):
        return [value]
    pickler = structure.TensorPickler(io.BytesIO())
    pickler.dump(value)
    return pickler.tensors


def is_bare(value: Any) -> bool:
    """Return whether it is a tensor without additional attributes."""
    return isinstance(value, torch.Tensor) and not have_attributes((value,))


def differentiable(values: Iterable[Any]) -> list[torch.Tensor]:
    return [each for value in values for each in tensors_of(value) if each.requires_grad]


def derivatives(
    outputs: Sequence[Any], inputs: list[torch.Tensor], order: int
) -> Iterator[list[torch.Tensor | None]]:
    """Return the gradients of the outputs, the gradients of these gradients, and so on."""
    for degree in range(1, order + 1):
        outputs = gradients_of(differentiable(outputs), inputs, degree, degree < order)
        yield outputs


def gradients_of(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], seed: int, create_graph: bool
) -> list[torch.Tensor | None]:
    """Return gradients of the outputs times random numbers, which are the same each time. The
    gradient is None if no output depends on the input."""
    if not outputs:
        return [None] * len(inputs)
    generator = torch.Generator().manual_seed(seed)
    drawn = (
        torch.randn(each.shape, dtype=each.dtype, generator=generator, device="cpu")
        for each in outputs
    )
    cotangents = [numbers.to(output.device) for numbers, output in zip(drawn, outputs, strict=True)]
    # Then all gradients are needed, as in a backward without `inputs`.
    asked = [*inputs, ROOT]
    # The graph is kept, because captures may share a history with those of the other run.
    try:
        found = torch.autograd.grad(
            outputs,
            asked,
            cotangents,
            allow_unused=True,
            retain_graph=True,
            create_graph=create_graph,
        )
    except LostGradientError as error:
        raise AssertionError(str(error)) from error
    return list(found[:-1])


# --- comparing


def compare_values(name: str, result: Any, expected: Any) -> None:
    """Raise AssertionError unless structure and objects are equal, and tensors bit for bit."""
    if type(result) is not type(expected):
        kinds = type(result).__name__, type(expected).__name__
        raise AssertionError(f"{name}: the pool returned a {kinds[0]}, the loop a {kinds[1]}")
    ours, theirs = tensors_of(result), tensors_of(expected)
    if len(ours) != len(theirs):
        raise AssertionError(f"{name}: the results differ in structure")
    for mine, other in zip(ours, theirs, strict=True):
        if mine.requires_grad != other.requires_grad:
            raise AssertionError(
                f"{name}: requires_grad is {mine.requires_grad}, in the loop {other.requires_grad}"
            )
        compare_tensors(f"{name}, value", mine, other, 0.0)
    if is_bare(result) and is_bare(expected):
        return
    if rest_of(result) != rest_of(expected) and (theirs or not are_equal(result, expected)):
        raise AssertionError(f"{name}: the pool returned {result!r}, the serial loop {expected!r}")


class RestPickler(structure.TensorPickler):
    """Pickles objects for comparison. For functions it writes what they do, because the pickle of a
    function by value also depends on where and how often it was loaded. For sets it writes their
    members, because their order depends on how often they were copied."""

    def persistent_id(self, value: object) -> Any:
        if type(value) is set or type(value) is frozenset:
            return type(value).__name__, sorted(map(rest_of, value))
        return None

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, types.FunctionType):
            return super().reducer_override(value)
        code, given = value.__code__, [value.__defaults__, value.__kwdefaults__]
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        given += [
            cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()
        ]
        return str, (value.__qualname__,), (code.co_code, code.co_names, constants, given)


def rest_of(value: Any) -> bytes:
    """Return everything except the tensors, from a copy of a copy. The pool's result is such a
    copy, and its parts share different strings."""
    for _ in range(2):
        value = structure.loads(*structure.dumps(value))
    buffer = io.BytesIO()
    pickler = RestPickler(buffer)
    pickler.dump(value)
    return b"".join([buffer.getvalue(), *(each.numpy().tobytes() for each in pickler.buffers)])


def are_equal(mine: Any, other: Any) -> bool:
    try:
        return bool(mine == other)
    except Exception:  # it contains arrays, or the user's `==` fails: the pickles decide
        return False


def compare_tensors(
    name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, rtol: float | None
) -> None:
    """Raise AssertionError if the tensors differ. `rtol` is 0 for an exact comparison, or None for
    4096 times the dtype's epsilon."""
    kinds = [
        each
        if each is None
        else (each.device, each.dtype, each.shape, each.layout, strides_of(each))
        for each in (ours, theirs)
    ]
    if kinds[0] != kinds[1]:
        raise AssertionError(
            f"{name}: the pool returned {describe(ours)}, the serial loop {describe(theirs)}"
        )
    if ours is None or theirs is None:
        return
    if rtol is None:
        rtol = 4096 * torch.finfo(theirs.dtype).eps
    ours, theirs = ours.detach().cpu().to_dense(), theirs.detach().cpu().to_dense()
    is_close = (
        torch.allclose(ours, theirs, rtol=rtol, atol=rtol, equal_nan=True)
        if rtol
        else same_bits(ours, theirs)
    )
    if not is_close:
        difference = (ours.to(torch.complex128) - theirs.to(torch.complex128)).abs().max().item()
        raise AssertionError(
            f"{name}: the pool and the serial loop differ by up to {difference:.3g}"
        )


def strides_of(tensor: torch.Tensor) -> list[int]:
    """Return the strides that matter. They do not matter for dimensions of size 1 or for tensors
    without elements."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether the tensors are equal, including the sign of zeros. All NaNs count as
    equal."""
    ours, theirs = (
        each.resolve_conj().resolve_neg().contiguous().reshape(-1) for each in (ours, theirs)
    )
    same = (ours.view(torch.uint8) == theirs.view(torch.uint8)).view(-1, ours.element_size()).all(1)
    return bool((same | (ours.isnan() & theirs.isnan())).all())


def describe(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    strides = f" and strides {tensor.stride()}" if tensor.layout is torch.strided else ""
    device = "" if tensor.is_cpu else f" on {tensor.device}"
    return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}{strides}{device}"
