"""How an operation gets its calls: packed alone or in bundles, and handed to the scheduler a wave at a time. Caller only.

    calls ──► alone, or in bundles once they are known to be cheap ──► `operation.add` ──► `scheduler.admit`, wave by wave
Guarantees: an operation gets all its calls and is sealed, or it is called off; once one has failed it gets no more. What the
    caller goes on to change is copied before `feed` returns, unless it waits for the results (`borrow`).
Assumes: one thread feeds an operation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from mpgrad.calls.operations import Operation
from mpgrad.calls.packing import Arguments, PackedCall, Packing, Shared, pack_bundle, pack_call
from mpgrad.collector import let_collector_look
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.scheduling.sizes import LARGEST_WAVE, WAVE_BYTES, bundle_size, first_wave
from mpgrad.wire.tensor_refs import Packer

__all__ = ["Feeder"]


class Feeder:
    """Packs calls into operations, so many at a time as suits what they cost and how many workers there are."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def feed(
        self,
        operation: Operation,
        calls: Iterable[Arguments],
        *,
        borrow: bool,
        shared: Shared | None = None,
        total: int | None = None,
    ) -> None:
        """Pack the calls, and let the workers begin with the first ones meanwhile.

        `borrow`: former results among the arguments are read where they lie. That needs a caller who waits: one that goes on
        could change them in place before they are read. `total`: of how many calls these are, where cheap ones may go in
        bundles.
        """
        scheduler = self._scheduler
        packer = scheduler.packer if borrow else scheduler.copying_packer
        wave, packed, copied = self._first_wave(operation), 0, packer.bytes_copied
        try:
            with scheduler.notes.lap("packs", operation.options.function.names.function):
                for call in self._packed(operation, iter(calls), packer, shared, total):
                    operation.add(call)
                    packed += call.items
                    if packed >= wave or packer.bytes_copied - copied > WAVE_BYTES:
                        scheduler.admit(operation, waits=borrow)
                        let_collector_look()
                        wave, packed, copied = min(2 * wave, LARGEST_WAVE), 0, packer.bytes_copied
                    if operation.has_failed:  # what comes behind is not even taken from its source, as in a loop
                        break
                operation.sealed = True
                scheduler.admit(operation, waits=borrow)
        except BaseException:
            scheduler.call_off(operation)
            raise

    def one_by_one(self, operation: Operation, calls: Iterable[Arguments]) -> Iterator[Callable[[], PackedCall]]:
        """What packs each call, for who takes them as they are needed."""
        grad, state = operation.options.modes.grad, operation.options.function.state
        packing = Packing(self._scheduler.copying_packer, grad, operation.streams, operation.options.request, state)
        pack = functools.partial(pack_call, packing)
        return (functools.partial(pack, index, args, kwargs) for index, (args, kwargs) in enumerate(calls))

    def _first_wave(self, operation: Operation) -> int:
        seconds = self._scheduler.seconds(operation.options.function.pickled)
        return first_wave(math.inf if seconds is None else seconds)

    def _packed(
        self, operation: Operation, calls: Iterator[Arguments], packer: Packer, shared: Shared | None, total: int | None
    ) -> Iterator[PackedCall]:
        """The calls, one by one; or, as soon as they are known to be cheap, in bundles."""
        grad, state = operation.options.modes.grad, operation.options.function.state
        packing = Packing(packer, grad, operation.streams, operation.options.request, state, shared)

        size = self._bundle_size(operation, total)
        while size != 1 and (some := list(itertools.islice(calls, size or 1))):
            bundle = None if size is None else pack_bundle(packing, operation.added, some, operation.items)
            if bundle is not None:
                yield bundle
            else:
                for args, kwargs in some:
                    yield pack_call(packing, operation.added, args, kwargs, operation.items)
            if bundle is None and size is not None:
                break  # items of this kind have calls of their own
            size = self._bundle_size(operation, total)
        for args, kwargs in calls:
            yield pack_call(packing, operation.added, args, kwargs, operation.items)

    def _bundle_size(self, operation: Operation, total: int | None) -> int | None:
        """Of how many items; None where it is not known yet what they cost."""
        if total is None:
            return 1
        seconds = self._scheduler.seconds(operation.options.function.pickled)
        if seconds is None:
            return None
        return bundle_size(seconds, total, total - operation.items, self._scheduler.settings.workers)
