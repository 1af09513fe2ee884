"""Contains functions of mpgrad that call or replace the user's functions in a worker. Both sides
use them.

    IndexedFunctions   the functions that joblib was given with `delayed`, as one function
    Initializer        what the workers of an `mpgrad.Executor` run first
    Replicas           the modules of `mpgrad.nn.parallel_apply`
    Fold, FoldedBlock, FinalMerge   reductions as ordinary calls

A fold is one call. A tree of folds is a map of calls, and a fold of their results. Other libraries
reduce in parallel with shared accumulators and locks. Here each accumulator belongs to one call at
a time, so there is no race, and gradients flow because they flow through calls. The cuts depend on
the number of items only, so the number of workers never changes a result.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from mpgrad.environment import PLACE
from mpgrad.torch_state.private import tree_leaves, tree_map_only

__all__ = [
    "FinalMerge",
    "FoldedBlock",
    "IndexedFunctions",
    "Initializer",
    "Reduction",
    "Replicas",
    "blocks_of",
    "reduction_named",
]


class IndexedFunctions:
    """Calls one of several functions by its number.

    The functions are separate from the arguments. So the pool sees one function for all calls of
    the same functions, and pickles it once. Objects that the functions reach are captures.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], nesting_level: int) -> None:
        self.functions = tuple(functions)
        self.nesting_level = nesting_level  # the level of a `joblib.Parallel` inside the functions

    def __call__(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        from joblib import parallel_config  # only workers of a pool that joblib uses have it
        from joblib.parallel import SequentialBackend, register_parallel_backend

        # Functions may name this backend. In a worker it is serial, because the pool uses the CPUs
        # already.
        if PLACE.in_worker:
            register_parallel_backend("mpgrad", SequentialBackend)
        with parallel_config(
            backend=SequentialBackend(nesting_level=self.nesting_level), n_jobs=None
        ):
            return self.functions[number](*args, **kwargs)


class Initializer:
    """An initializer whose failure raises `BrokenProcessPool`, as users of an executor expect."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *initargs: Any) -> None:
        try:
            self._function(*initargs)
        except BaseException as error:
            raise BrokenProcessPool(
                f"the initializer failed in a worker ({type(error).__name__}: {error})"
            ) from error


class Replicas:
    """Makes the modules of one `parallel_apply` a function of a module's number and its inputs."""

    # Replicas read one copy of the parameters, to which no forward writes.
    captures_share_memory = True

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.modules = list(modules)  # one for all numbers, or one for each

    def __call__(
        self, number: int, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the output, and the buffers that replica 0 has written to or replaced."""
        module = self.modules[number % len(self.modules)]
        for each in module.modules():
            # PyTorch marks its replicas like this. Then `zero_grad` warns that it has no effect on
            # them.
            vars(each)["_is_replica"] = True
        own = dict(module.named_buffers(remove_duplicate=False))
        place = {id(buffer): name for name, buffer in own.items()}
        copies = {known: own[name].clone() for known, name in place.items()}
        for (
            name,
            buffer,
            # Each call begins with the caller's buffers, and leaves them unchanged for the next
            # call.
        ) in own.items():
            put(module, name, copies[id(buffer)])
        try:
            output = module(*inputs, **kwargs)
            written = copies.items() if number == 0 else ()
            # Only buffers that it wrote to are returned. Buffers that it registered or replaced are
            # lost, as in PyTorch. Version counters do not show writes of batch normalization.
            return output, {
                place[known]: copy.detach()
                for known, copy in written
                if not torch.equal(copy, own[place[known]])
            }
        finally:
            for name, buffer in own.items():
                put(module, name, buffer)


def put(module: torch.nn.Module, path: str, buffer: torch.Tensor) -> None:
    """Set the module's buffer at this path to `buffer`."""
    owner, _, name = path.rpartition(".")
    module.get_submodule(owner)._buffers[name] = buffer


# --- reductions


# These are enough blocks to keep 32 workers evenly busy, and few enough for one worker to merge at
# the end.
MOST_BLOCKS = 64


class Reduction(ABC):
    """Guarantees: `merge([fold(a), fold(b)]) == fold(a + b)` except for rounding."""

    @abstractmethod
    def fold(self, values: Iterable[Any]) -> Any:
        """Return one accumulator of at least one value."""

    def merge(self, accumulators: Sequence[Any]) -> Any:
        return self.fold(accumulators)

    def finish(self, accumulator: Any) -> Any:
        return accumulator


class FunctionReduction(Reduction):
    """Calls `fn(accumulator, value)`, which returns the new accumulator, or writes to its argument
    and returns None."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function

    def fold(self, values: Iterable[Any]) -> Any:
        first, *rest = values
        # This is a copy, because `fn` may write to it, which autograd forbids for a leaf. The
        # gradient is the same.
        return self.onto(tree_map_only(torch.Tensor, connected_copy, first), rest)

    def onto(self, target: Any, values: Iterable[Any]) -> Any:
        for value in values:
            result = self.function(target, value)
            if result is not None:
                target = result
        return target


@torch.enable_grad()
def connected_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the history of `tensor`, even if the fold itself runs without
    gradients."""
    return tensor.clone()


class PairwiseReduction(Reduction):
    """Folds a commutative operation of two tensors from left to right."""

    def __init__(self, operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.operation = operation

    def fold(self, values: Iterable[torch.Tensor]) -> torch.Tensor:
        return functools.reduce(self.operation, values)


class Mean(Reduction):
    """Adds up values and counts, and divides at the end."""

    def fold(self, values: Iterable[torch.Tensor]) -> tuple[torch.Tensor, int]:
        return self.merge([(value, 1) for value in values])

    def merge(self, accumulators: Sequence[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, int]:
        return SUM.fold(total for total, _ in accumulators), sum(count for _, count in accumulators)

    def finish(self, accumulator: tuple[torch.Tensor, int]) -> torch.Tensor:
        total, count = accumulator
        return total / count


class Concatenation(Reduction):
    """Joins tensors along dimension 0. `fold` joins values, and `torch.cat` joins accumulators."""

    def __init__(self, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        self.join = join

    def fold(self, values: Iterable[torch.Tensor]) -> torch.Tensor:
        return self.join(list(values))

    def merge(self, accumulators: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(accumulators))


SUM = PairwiseReduction(torch.add)
NAMED: dict[str, Reduction] = {
    "sum": SUM,
    "mean": Mean(),
    "max": PairwiseReduction(torch.maximum),
    "min": PairwiseReduction(torch.minimum),
    "logsumexp": PairwiseReduction(torch.logaddexp),
    "cat": Concatenation(torch.cat),
    "stack": Concatenation(torch.stack),
}


def reduction_named(reduce_fn: Callable[[Any, Any], Any] | str) -> Reduction:
    """Return the reduction for a function or a name.

    Raises:
        ValueError: no reduction has this name.
        TypeError: it is neither a function nor a name.
    """
    if isinstance(reduce_fn, str):
        if reduce_fn not in NAMED:
            raise ValueError(
                f"no reduction has this name ({reduce_fn!r}); use one of "
                f"{', '.join(map(repr, NAMED))}"
            )
        return NAMED[reduce_fn]
    if not callable(reduce_fn):
        raise TypeError(
            f"a reduction must be a function or one of {', '.join(map(repr, NAMED))} (given: "
            f"{reduce_fn!r})"
        )
    return FunctionReduction(reduce_fn)


def blocks_of(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Cut `items` into at most MOST_BLOCKS runs, whose lengths differ by at most 1."""
    count = min(len(items), MOST_BLOCKS)
    ends = [len(items) * number // count for number in range(count + 1)] if count else []
    return [items[start:end] for start, end in itertools.pairwise(ends)]


class Fold:
    """Folds all items onto a target, in order, in one call."""

    def __init__(self, reduction: FunctionReduction) -> None:
        self.reduction = reduction

    def __call__(self, target: Any, items: Sequence[Any]) -> Any:
        own = set(map(id, tree_leaves(target)))
        # A value that is written into the target is not an item.
        if any(id(each) in own for each in tree_leaves(items)):
            items = tree_map_only(
                torch.Tensor, lambda each: connected_copy(each) if id(each) in own else each, items
            )
        return self.reduction.onto(target, items)


class FoldedBlock:
    """Maps the items of a block, if there is a map, and folds them, in one call."""

    def __init__(self, reduction: Reduction, map_fn: Callable[[Any], Any] | None = None) -> None:
        self.reduction = reduction
        self.map_fn = map_fn

    def __call__(self, items: Sequence[Any]) -> Any:
        # This does not use `map`, because a StopIteration of the function would end it.
        return self.reduction.fold(
            items if self.map_fn is None else (self.map_fn(item) for item in items)
        )


class FinalMerge:
    """Merges the blocks' accumulators in one call, after a first value if there is one."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def __call__(self, first: Sequence[Any], accumulators: Sequence[Any]) -> Any:
        start = [self.reduction.fold(first)] if first else []
        return self.reduction.finish(self.reduction.merge([*start, *accumulators]))
