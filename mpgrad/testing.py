"""The oracle that mpgrad itself is tested with: whatever the pool does must be what the serial loop does.

`torch.autograd.gradcheck` compares one function with finite differences, to a tolerance. Here the loop run by the caller is
the reference, so values and the gradients of items must agree bit for bit, and no tolerance can hide a mistake.

    loop ──► loop again, last item first ──► the pool ──► last item first, one call at a time
A function that the pool cannot run as the loop does (it counts its calls, remembers what it was given, writes to what it
captures) may agree by chance in any one of these, but not in all.
"""

# long because: what is compared, and what a pool cannot follow, is told by one story

from __future__ import annotations

import io
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpgrad.autograd.input_gates import ROOT
from mpgrad.calls.packing import pickled_function
from mpgrad.errors import LostGradientError
from mpgrad.pickling import structure
from mpgrad.pool import Pool
from mpgrad.torch_state.leaves import all_leaves, held_leaves
from mpgrad.torch_state.modes import RandomState, draw_seed, kept_random_state, seed_item
from mpgrad.torch_state.private import apply, has_plain_memory, tree_leaves, tree_map_only
from mpgrad.wire.tensor_refs import have_attributes

__all__ = ["assert_same_as_serial"]

Function = Callable[[Any], Any]
ATOMS = {type(None), bool, int, float, complex, str, bytes}  # need not be taken apart


def assert_same_as_serial(
    fn: Function,
    items: Sequence[Any],
    pool: Pool | None = None,
    *,
    order: int = 1,
    run: Callable[[Pool, Function, list[Any]], Sequence[Any]] | None = None,
    rtol: float | None = None,
) -> None:
    """Compare ``pool.map(fn, items)`` with ``[fn(item) for item in items]``: values, structure, and derivatives.

    The loop is run a second time, with the last item first, and must give the same. The pool is asked twice: as it is asked
    anywhere, and with the last item first, each item a call of its own.

    Objects, in items and results, are taken apart as the pool does it: their tensors are compared like others. The rest of one
    is alike if its equality says so (or both are NaN), or if its pickle is the same.

    Args:
        fn: the function; gradients of the tensors that it captures are compared too. It must not write to these.
        items: tensors, structures or objects; each run gets copies of its own, leaves where these are leaves. Views in the same
            storage are such views in the copies.
        pool: the pool to test; None for a new one of two processes.
        order: derivatives up to this order; 0 for values only. Those of order 2 are of all first ones, weighted at random,
            as `torch.autograd.gradgradcheck` does it. Only of the pool's first run those beyond the first order.
        run: how the pool is asked; None for `map`.
        rtol: relative tolerance for what the pool adds up in another order: the gradients of captures, and all from order 2
            on; None for 4096 times the precision of the dtype. All else is compared bit for bit.

    Raises:
        AssertionError: names the item, and whether value or gradient differ; or says what `fn` does that no pool can follow:
            it keeps something from call to call, writes to a capture, or draws random numbers, which are others in a pool.
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
    before = RandomState()
    ask = run or (lambda pool, fn, items: pool.map(fn, items))
    given = copies(items)
    results = list(ask(pool, fn, given))
    try:
        loop.compare(results, given, order)
    except AssertionError as error:
        if not loop.draws:
            raise
        raise AssertionError(said_of_random_numbers(fn, items, results, before, error)) from error
    given = copies(items)
    backwards = run or (lambda pool, fn, items: pool.map(fn, items, chunksize=1))
    loop.compare(list(backwards(pool, fn, given[::-1]))[::-1], given, min(order, 1), " (last item first, one by one)")
    return None


class Loop:
    """The serial loop, and what it gave."""

    def __init__(self, fn: Function, items: Sequence[Any], order: int, rtol: float | None, kind: str) -> None:
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
        self.draws = self._start.has_moved()
        for tensor, value in zip(reached, before, strict=True):
            if tensor.shape != value.shape or not same_bits(tensor.detach().cpu().to_dense(), value.cpu().to_dense()):
                raise AssertionError(
                    f"the function writes to a tensor or array that it captures ({describe(value)}): in a pool that stays in a "
                    "worker; return what is new instead"
                )
        self._captures = [tensor for tensor in reached if tensor.requires_grad]
        self._names = [f"capture {number}" for number in range(len(self._captures))]
        if order:
            check_pickles_keep_graphs(self._results)
            others = others_reached(self._results, [*differentiable(inputs), *self._captures], lived)
            self._names += [f"a leaf that is neither input nor capture ({describe(each)})" for each in others]
            self._captures += others
        self._derivatives = list(derivatives(self._results, [*differentiable(inputs), *self._captures], order))

    def assert_repeatable(self) -> None:
        """Run the loop again, with the last item first unless random numbers are drawn one after another."""
        again = copies(self._items)
        if self.draws:
            end = RandomState()
            self._start.put_back()
            results = [self._fn(item) for item in again]
            end.put_back()
        else:
            results = [self._fn(item) for item in again[::-1]][::-1]
        for index, pair in enumerate(zip(results, self._results, strict=True)):
            try:
                compare_values(f"item {index}", *pair)
            except AssertionError as error:
                raise AssertionError(
                    f"item {index}: the function gives something else when it is called again, or in another order: it counts "
                    "its calls, draws from a generator that it captures, or keeps something from one to the next. A pool calls "
                    "it in any order, in several processes; give each item what it depends on"
                ) from error

    def compare(self, results: Sequence[Any], inputs: Sequence[Any], order: int, how: str = "") -> None:
        """`how` the pool was asked, for the error."""
        if len(results) != len(self._results):
            raise AssertionError(f"the pool gave {len(results)} results, the serial loop {len(self._results)}{how}")
        for index, pair in enumerate(zip(results, self._results, strict=True)):
            compare_values(f"item {index}", *pair, how)
        ours = differentiable(inputs)
        names = [f"input {number}" for number in range(len(ours))]
        names += self._names
        sides = derivatives(results, [*ours, *self._captures], len(self._derivatives)), self._derivatives
        for degree, both in itertools.islice(enumerate(zip(*sides, strict=False), start=1), order):
            label = "gradient of" if degree == 1 else f"derivative of order {degree} of"
            for number, (name, grad, expected) in enumerate(zip(names, *both, strict=True)):
                in_order = degree == 1 and number < len(ours)
                compare_tensors(f"{label} {name}", grad, expected, 0.0 if in_order else self._rtol, how)


class OwnersPickler(structure.TensorPickler):
    """Notes the objects that are pickled by code of their own."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.owners: list[Any] = []

    def reducer_override(self, value: object) -> Any:
        if structure.has_own_way(type(value)):
            self.owners.append(value)
        return super().reducer_override(value)


def left_out(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that need gradients and that an object's own pickling leaves out, and its class."""
    pickler = OwnersPickler(io.BytesIO())
    pickler.dump(value)
    sent = set(map(id, pickler.tensors))
    for owner in pickler.owners:
        for each in tree_leaves(dict(getattr(owner, "__dict__", {}))):
            if isinstance(each, torch.Tensor) and each.requires_grad and id(each) not in sent:
                yield type(owner).__qualname__, each


def check_pickles_keep_graphs(results: Sequence[Any]) -> None:
    for index, result in enumerate(results):
        for owner, tensor in left_out(result):
            if tensor.grad_fn is not None:
                raise AssertionError(said_of_pickling(f"item {index}", owner, tensor))


def said_of_pickling(name: str, owner: str, tensor: torch.Tensor) -> str:
    return (
        f"{name}: a gradient would be lost: the pickling of {owner} leaves out {describe(tensor)} that requires grad; "
        "have __getstate__ or __reduce__ give the tensor"
    )


def check_items_keep_leaves(fn: Function, items: Sequence[Any]) -> None:
    """Our copies of the items lack what their pickling leaves out, as do the pool's."""
    for index, item in enumerate(items):
        if not (lost := list(left_out(item))):
            continue
        with kept_random_state():
            reached = others_reached([fn(item)], [], [tensor for _, tensor in lost])
        for owner, tensor in lost:
            if any(each is tensor for each in reached):
                raise AssertionError(said_of_pickling(f"item {index}", owner, tensor))


def others_reached(results: Sequence[Any], known: Sequence[torch.Tensor], lived: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves, of those that lived before, to which gradients of the results come besides the `known` ones."""
    outputs, given, old = differentiable(results), set(map(id, known)), set(map(id, lived))
    reached = [node.variable for node in held_leaves(outputs, given)]
    reached += [each for each in outputs if each.is_leaf and id(each) not in given]
    return [each for each in {id(each): each for each in reached}.values() if id(each) in old]


def said_of_random_numbers(
    fn: Function, items: Sequence[Any], results: Sequence[Any], before: RandomState, error: AssertionError
) -> str:
    """Of a function that draws some, and an `error` that may come of that. `before`: the generators as the pool began."""
    with kept_random_state():
        before.put_back()
        seed = draw_seed()
        try:
            for index, (item, result) in enumerate(zip(copies(items), results, strict=True)):
                seed_item(seed, index)
                compare_values(f"item {index}", result, fn(item))
        except AssertionError:
            return f"{error} (the function draws random numbers, which are others in a pool; that is not all that differs)"
    return (
        "the function draws random numbers, and these are all that differs: in a pool each item has a stream of its own, which "
        "torch.manual_seed fixes, where the items of a loop share one. To compare it, give each item its numbers, a seed, or a "
        f"torch.Generator ({error})"
    )


class Alias(torch.autograd.Function):
    """Another tensor with the same memory, which is no leaf, and no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def copies(items: Sequence[Any]) -> list[Any]:
    """Items that share nothing with these: what is one tensor, or one storage, is one in the copies; leaves are leaves."""
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
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storages[storage.data_ptr()], *place)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:  # one tensor twice stays one
            kept.append(tensor)
            leaf = value_of(tensor).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                leaf = torch.nn.Parameter(leaf.detach(), tensor.requires_grad)
            known[id(tensor)] = leaf if tensor.is_leaf else apply(Alias, leaf)
        return known[id(tensor)]

    def copy_leaf(value: Any) -> Any:
        if is_bare(value):
            return copy(value)
        if type(value) in ATOMS:
            return value
        pickled, tensors = structure.dumps(value)  # as the pool takes it apart
        return structure.loads(pickled, list(map(copy, tensors)))

    return [tree_map_only(object, copy_leaf, item) for item in items]


def taken_apart(value: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Its tensors, and the buffers of its arrays."""
    pickler = structure.TensorPickler(io.BytesIO())
    pickler.dump(value)
    return pickler.tensors, pickler.buffers


class RestPickler(structure.TensorPickler):
    """For comparing: of functions what they do (the pickle of one by value says also where it was loaded, and how often), of
    sets what is in them (their order depends on how often they were copied)."""

    def persistent_id(self, value: object) -> Any:
        if type(value) is set or type(value) is frozenset:
            return type(value).__name__, sorted(map(rest_of, value))
        return super().persistent_id(value)

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, types.FunctionType):
            return super().reducer_override(value)
        code, given = value.__code__, [value.__defaults__, value.__kwdefaults__]
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        given += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return str, (value.__qualname__,), (code.co_code, code.co_names, constants, given)


def rest_of(value: Any) -> bytes:
    """What is no tensor, of a copy of a copy: what the pool gave is one, and shares other strings between its parts."""
    for _ in range(2):
        value = structure.loads(*structure.dumps(value))
    buffer = io.BytesIO()
    RestPickler(buffer).dump(value)
    return buffer.getvalue()


def is_bare(value: Any) -> bool:
    """Whether it is a tensor, and nobody has given it attributes."""
    return isinstance(value, torch.Tensor) and not have_attributes((value,))


def tensors_of(leaf: Any) -> list[torch.Tensor]:
    if is_bare(leaf):
        return [leaf]
    return [] if type(leaf) in ATOMS else taken_apart(leaf)[0]


def differentiable(structures: Sequence[Any]) -> list[torch.Tensor]:
    return [each for leaf in tree_leaves(list(structures)) for each in tensors_of(leaf) if each.requires_grad]


def derivatives(outputs: Sequence[Any], inputs: list[torch.Tensor], order: int) -> Iterator[list[torch.Tensor | None]]:
    """The gradients of the outputs, then those of these, and so on."""
    for degree in range(1, order + 1):
        outputs = gradients_of(differentiable(outputs), inputs, degree, degree < order)
        yield outputs


def gradients_of(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], seed: int, create_graph: bool
) -> list[torch.Tensor | None]:
    """Gradients of the outputs times random numbers, the same each time; None where nothing depends on an input."""
    if not outputs:
        return [None] * len(inputs)
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(each.shape, dtype=each.dtype, generator=generator, device="cpu") for each in outputs)
    cotangents = [numbers.to(output.device) for numbers, output in zip(drawn, outputs, strict=True)]
    asked = [*inputs, ROOT]  # where that is wanted, all is, as in a backward that nobody gave any inputs
    # kept, because captures may share a history with those of the other run
    try:
        found = torch.autograd.grad(outputs, asked, cotangents, allow_unused=True, retain_graph=True, create_graph=create_graph)
    except LostGradientError as error:
        raise AssertionError(str(error)) from error
    return list(found[:-1])


def compare_values(name: str, result: Any, expected: Any, how: str = "") -> None:
    """Raises AssertionError unless structure and objects are equal, and tensors bit for bit."""
    if type(result) is not type(expected):
        kinds = type(result).__name__, type(expected).__name__
        raise AssertionError(f"{name}: the pool gave a {kinds[0]}, the serial loop a {kinds[1]}{how}")
    ours, theirs = tree_leaves(result), tree_leaves(expected)
    if len(ours) != len(theirs):
        raise AssertionError(f"{name}: the results differ in structure{how}")
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, torch.Tensor) != isinstance(other, torch.Tensor):
            raise AssertionError(f"{name}: the results differ in structure{how}")
        if is_bare(mine) and is_bare(other):
            compare_parts(name, [mine], [other], how)
        elif not (type(other) in ATOMS and are_equal(mine, other)):
            compare_objects(name, mine, other, how)


def compare_parts(name: str, ours: list[torch.Tensor], theirs: list[torch.Tensor], how: str) -> None:
    if len(ours) != len(theirs):
        raise AssertionError(f"{name}: the results differ in structure{how}")
    for mine, other in zip(ours, theirs, strict=True):
        if mine.requires_grad != other.requires_grad:
            raise AssertionError(f"{name}: requires_grad is {mine.requires_grad}, serially {other.requires_grad}{how}")
        compare_tensors(f"{name}, value", mine, other, 0.0, how)


def compare_objects(name: str, mine: Any, other: Any, how: str) -> None:
    """The tensors in them one by one, the rest by its pickle; what has no tensors may be equal besides."""
    (ours, our_buffers), (theirs, their_buffers) = taken_apart(mine), taken_apart(other)
    compare_parts(name, ours, theirs, how)
    if has_equality(other) and not theirs and are_equal(mine, other):  # where there are some, it cannot be asked
        return
    if rest_of(mine) != rest_of(other) or not all(map(torch.equal, our_buffers, their_buffers)):
        raise AssertionError(f"{name}: the pool gave {mine!r}, the serial loop {other!r}{how}")


def are_equal(mine: Any, other: Any) -> bool:
    """Or alike in being unequal to themselves (NaN); arrays compare element by element."""
    try:
        unequal = (mine != other) & ((mine == mine) | (other == other))
        return not (unequal.any() if hasattr(unequal, "any") else unequal)
    except Exception:  # arrays within, or of other shapes, or the user's own: it is for their pickles to decide
        return False


def has_equality(value: object) -> bool:
    """Whether two copies of `value` can be told equal: not where equality means identity."""
    equality: object = type(value).__eq__
    return equality is not object.__eq__


def compare_tensors(
    name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, rtol: float | None, how: str = ""
) -> None:
    """Raises AssertionError; `rtol`: 0 for bit for bit, None for 4096 times the dtype's epsilon."""
    if ours is None or theirs is None:
        if ours is not theirs:
            raise AssertionError(f"{name}: the pool gave {describe(ours)}, the serial loop {describe(theirs)}{how}")
        return
    kinds = [(each.device, each.dtype, each.shape, each.layout, strides_that_matter(each)) for each in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f"{name}: the pool gave {describe(ours)}, the serial loop {describe(theirs)}{how}")
    if rtol is None:
        rtol = 4096 * torch.finfo(theirs.dtype).eps
    ours, theirs = ours.detach().cpu().to_dense(), theirs.detach().cpu().to_dense()
    if rtol == 0 and same_bits(ours, theirs):
        return
    if rtol == 0 or not torch.allclose(ours, theirs, rtol=rtol, atol=rtol, equal_nan=True):
        difference = (ours.to(torch.complex128) - theirs.to(torch.complex128)).abs().max().item()
        raise AssertionError(f"{name}: the pool and the serial loop differ by up to {difference:.3g}{how}")


def strides_that_matter(tensor: torch.Tensor) -> list[int]:
    """Not those of dimensions of size 1, nor of tensors without elements."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Also the sign of zeros; all that is not a number is alike."""
    ours, theirs = (each.resolve_conj().resolve_neg().contiguous().reshape(-1) for each in (ours, theirs))
    same = (ours.view(torch.uint8) == theirs.view(torch.uint8)).view(-1, ours.element_size()).all(1)
    return bool((same | (ours.isnan() & theirs.isnan())).all())


def describe(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    strides = f" and strides {tensor.stride()}" if tensor.layout is torch.strided else ""
    device = "" if tensor.is_cpu else f" on {tensor.device}"
    return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}{strides}{device}"
