"""Reductions as operations that follow one another. Caller only.

    [1] blocks of items: a fold each, side by side ──► accumulators ──► [2] one fold of these for each target
What a call of either does is `tasks/reduction.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpgrad.calls.packing import Arguments
from mpgrad.progress import Progress
from mpgrad.submission.options import CallOptions
from mpgrad.submission.source import Source, callable_of
from mpgrad.submission.submitter import Submitter
from mpgrad.tasks.reduction import Block, Finish, Fold, FunctionReduction, blocks_of, reduction_named

__all__ = ["folded_into", "mapped_and_folded"]


def folded_into(
    submitter: Submitter,
    fn: Callable[[Any, Any], Any] | str,
    items: Sequence[Any],
    targets: Sequence[Any],
    associative: bool,
    progress: Progress,
) -> list[Any]:
    """Each target, with all items folded into it; see `Pool.reduce`."""
    reduction = reduction_named(fn)
    if isinstance(reduction, FunctionReduction) and not associative:
        fold: Callable[..., Any] = Fold(reduction)
        calls: list[Arguments] = [((target, items), {}) for target in targets]
    else:
        fold = Finish(reduction)
        accumulators = accumulated(submitter, Block(reduction), items, progress)
        calls = [(([target], accumulators), {}) for target in targets]
    return run_targets(submitter, fold, calls, progress)


def mapped_and_folded(
    submitter: Submitter,
    map_fn: Callable[[Any], Any],
    items: Sequence[Any],
    reduce_fn: Callable[[Any, Any], Any] | str,
    init: Any,
    progress: Progress,
) -> Any:
    """The mapped items, folded into `init` where there is one; see `Pool.map_reduce`."""
    reduction = reduction_named(reduce_fn)
    if not items and init is None:
        raise TypeError("map_reduce of no items needs a first value (init: None)")
    accumulators = accumulated(submitter, Block(reduction, callable_of(map_fn)), items, progress)
    first = [] if init is None else [init]
    return run_targets(submitter, Finish(reduction), [((first, accumulators), {})])[0]


def accumulated(submitter: Submitter, block: Block, items: Sequence[Any], progress: Progress) -> list[Any]:
    """[1]"""
    calls: list[Arguments] = [((each,), {}) for each in blocks_of(items)]
    source = Source(calls, len(calls), at_rest=True, noun="block", items=calls)
    return submitter.run(block, source, CallOptions(chunksize=1, progress=progress))


def run_targets(
    submitter: Submitter, fold: Callable[..., Any], calls: list[Arguments], progress: Progress = False
) -> list[Any]:
    """[2] The calls have tensors in common, which are placed once."""
    source = Source(calls, len(calls), at_rest=False, noun="target", items=calls)
    return submitter.run(fold, source, CallOptions(chunksize=1, progress=progress), shared={})
