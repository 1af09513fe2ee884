"""The oracle that mpgrad itself is tested with: whatever the pool does must be what the serial loop
does.

`torch.autograd.gradcheck` compares one function with finite differences, to a tolerance. Here the
loop run by the caller is the reference, so values and the gradients of items must agree bit for
bit, and no tolerance can hide a mistake.

    loop ─► loop again, last item first ─► the pool ─► the pool, last item first, one call at a time
A function that the pool cannot run as the loop does (it counts its calls, remembers what it was
given, writes to what it captures) may agree by chance in any one of these, but not in all.
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
    "the function draws random numbers, which are others in a pool, where each item has a stream "
    "of its own; to compare, give "
    "each item its numbers, a seed, or a torch.Generator"
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

    The loop is run a second time, with the last item first, and must give the same. The pool is
    asked twice: as it is asked anywhere, and with the last item first, each item a call of its own.

    Objects, in items and results, are taken apart as the pool does it: their tensors are compared
    like others. The rest is alike if its pickle is the same, or if there are no tensors and its
    equality says so.

    Args:
        fn: the function; gradients of the tensors that it captures are compared too. It must not
            write to these.
        items: tensors, structures or objects; each run gets copies of its own, leaves where these
            are leaves. Views in the same storage are such views in the copies.
        pool: the pool to test; None for a new one of two processes.
        order: derivatives up to this order; 0 for values only. Those of order 2 are of all first
            ones, weighted at random, as `torch.autograd.gradgradcheck` does it. Only of the pool's
            first run those beyond the first order.
        run: how the pool is asked; None for `map`.
        rtol: relative tolerance for what the pool adds up in another order: the gradients of
            captures, and all from order 2 on; None for 4096 times the precision of the dtype. All
            else is compared bit for bit.

    Raises:
        AssertionError: names the item, and whether value or gradient differ; or says what `fn` does
            that no pool can follow: it keeps something from call to call, writes to a capture, or
            draws random numbers, which are others in a pool.
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
    """The serial loop, and what it gave."""

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
                    f"({describe(value)}): in a pool that stays in a "
                    "worker; return what is new instead"
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
                f"a leaf that is neither input nor capture ({describe(each)})" for each in others
            ]
            self._captures += others
        self._derivatives = list(
            derivatives(self._results, [*differentiable(inputs), *self._captures], order)
        )

    def assert_repeatable(self) -> None:
        """Run the loop again, with the last item first unless random numbers are drawn one after
        another."""
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
                    f"item {index}: the function gives something else when it is called again, or "
                    "in another order: it counts "
                    "its calls, draws from a generator that it captures, or keeps something from "
                    "one to the next. A pool calls "
                    "it in any order, in several processes; give each item what it depends on"
                ) from error

    def compare(
        self, results: Sequence[Any], inputs: Sequence[Any], order: int, how: str = ""
    ) -> None:
        """Raise AssertionError unless they are the loop's, with their derivatives. `how` the pool
        was asked, for the error."""
        try:
            self._compare(results, inputs, order)
        except AssertionError as error:
            raise AssertionError(f"{error}{how}{f' ({RANDOM})' if self._draws else ''}") from error

    def _compare(self, results: Sequence[Any], inputs: Sequence[Any], order: int) -> None:
        if len(results) != len(self._results):
            raise AssertionError(
                f"the pool gave {len(results)} results, the serial loop {len(self._results)}"
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


# --- what pickling leaves out


class OwnersPickler(structure.TensorPickler):
    """Notes the objects that are pickled by code of their own."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.owners: list[Any] = []

    def reducer_override(self, value: object) -> Any:
        if structure.has_own_way(type(value)):
            self.owners.append(value)
        return super().reducer_override(value)


def left_out(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors that need gradients and that an object's own pickling leaves out, and its
    class."""
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
            "grad; have __getstate__ or __reduce__ give the tensor"
        )


def check_items_keep_leaves(fn: Function, items: Sequence[Any]) -> None:
    """Our copies of the items lack what their pickling leaves out, as do the pool's."""
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
    """The leaves, of those that lived before, to which gradients of the results come besides the
    `known` ones."""
    outputs, given, old = differentiable(results), set(map(id, known)), set(map(id, lived))
    reached = [node.variable for node in held_leaves(outputs, given)]
    reached += [each for each in outputs if each.is_leaf and id(each) not in given]
    return [each for each in {id(each): each for each in reached}.values() if id(each) in old]


# --- copies


class AliasNode(torch.autograd.Function):
    """Another tensor with the same memory, which is no leaf, and no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def copies(items: Sequence[Any]) -> list[Any]:
    """Items that share nothing with these: what is one tensor, or one storage, is one in the
    copies; leaves are leaves."""
    known: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    kept: list[torch.Tensor] = []  # as long as they are known by id

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
        if id(tensor) not in known:  # one tensor twice stays one
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
    """Those in a structure or object, as the pool takes it apart."""
    if is_bare(value):
        return [value]
    pickler = structure.TensorPickler(io.BytesIO())
    pickler.dump(value)
    return pickler.tensors


def is_bare(value: Any) -> bool:
    """Whether it is a tensor, and nobody has given it attributes."""
    return isinstance(value, torch.Tensor) and not have_attributes((value,))


def differentiable(values: Iterable[Any]) -> list[torch.Tensor]:
    return [each for value in values for each in tensors_of(value) if each.requires_grad]


def derivatives(
    outputs: Sequence[Any], inputs: list[torch.Tensor], order: int
) -> Iterator[list[torch.Tensor | None]]:
    """The gradients of the outputs, then those of these, and so on."""
    for degree in range(1, order + 1):
        outputs = gradients_of(differentiable(outputs), inputs, degree, degree < order)
        yield outputs


def gradients_of(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], seed: int, create_graph: bool
) -> list[torch.Tensor | None]:
    """Gradients of the outputs times random numbers, the same each time; None where nothing depends
    on an input."""
    if not outputs:
        return [None] * len(inputs)
    generator = torch.Generator().manual_seed(seed)
    drawn = (
        torch.randn(each.shape, dtype=each.dtype, generator=generator, device="cpu")
        for each in outputs
    )
    cotangents = [numbers.to(output.device) for numbers, output in zip(drawn, outputs, strict=True)]
    # where that is wanted, all is, as in a backward that nobody gave any inputs
    asked = [*inputs, ROOT]
    # kept, because captures may share a history with those of the other run
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
        raise AssertionError(f"{name}: the pool gave a {kinds[0]}, the serial loop a {kinds[1]}")
    ours, theirs = tensors_of(result), tensors_of(expected)
    if len(ours) != len(theirs):
        raise AssertionError(f"{name}: the results differ in structure")
    for mine, other in zip(ours, theirs, strict=True):
        if mine.requires_grad != other.requires_grad:
            raise AssertionError(
                f"{name}: requires_grad is {mine.requires_grad}, serially {other.requires_grad}"
            )
        compare_tensors(f"{name}, value", mine, other, 0.0)
    if is_bare(result) and is_bare(expected):
        return
    if rest_of(result) != rest_of(expected) and (theirs or not are_equal(result, expected)):
        raise AssertionError(f"{name}: the pool gave {result!r}, the serial loop {expected!r}")


class RestPickler(structure.TensorPickler):
    """For comparing: of functions what they do (the pickle of one by value says also where it was
    loaded, and how often), of sets what is in them (their order depends on how often they were
    copied)."""

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
    """What is no tensor, of a copy of a copy: what the pool gave is one, and shares other strings
    between its parts."""
    for _ in range(2):
        value = structure.loads(*structure.dumps(value))
    buffer = io.BytesIO()
    pickler = RestPickler(buffer)
    pickler.dump(value)
    return b"".join([buffer.getvalue(), *(each.numpy().tobytes() for each in pickler.buffers)])


def are_equal(mine: Any, other: Any) -> bool:
    try:
        return bool(mine == other)
    except Exception:  # arrays within, or the user's own: it is for their pickles to decide
        return False


def compare_tensors(
    name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, rtol: float | None
) -> None:
    """Raise AssertionError if they differ; `rtol`: 0 for bit for bit, None for 4096 times the
    dtype's epsilon."""
    kinds = [
        each
        if each is None
        else (each.device, each.dtype, each.shape, each.layout, strides_of(each))
        for each in (ours, theirs)
    ]
    if kinds[0] != kinds[1]:
        raise AssertionError(
            f"{name}: the pool gave {describe(ours)}, the serial loop {describe(theirs)}"
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
    """Those that matter: not of dimensions of size 1, nor of tensors without elements."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Also the sign of zeros; all that is not a number is alike."""
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
