"""The forward pass: the calls of a `Forward` run, their results are lent, their graphs kept.

    Forward ──► CallRunner ──► CallRun ──► results: lend ──► Results
                                  └──────► graph: keep; or its backward runs at once: gradients, lent too
Guarantees: each call that is not skipped has one outcome, whatever the task raises.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence

from mpgrad.errors import SharedMemoryError
from mpgrad.torch_state.modes import under
from mpgrad.wire.messages import Eager, Failure, Forward, ForwardCall, Result, Results
from mpgrad.wire.tensor_refs import Payload, Placed, TensorRef, Together
from mpgrad.workers.call_run import CallRun, CallRunner
from mpgrad.workers.eager import EagerBackwards
from mpgrad.workers.functions import Function, FunctionTable, failure
from mpgrad.workers.graphs import GraphEdges, GraphTable
from mpgrad.workers.loans import Loans
from mpgrad.workers.station import Station
from mpgrad.workers.streams import TaskWarnings
from mpgrad.workers.whereabouts import Stage, Tracker

__all__ = ["ForwardHandler"]

NOTHING = contextlib.nullcontext()


class ForwardHandler:
    """Answers `Forward`. What stays of a call is in the graph table, the loans and the sums of the function."""

    def __init__(
        self,
        functions: FunctionTable,
        graphs: GraphTable,
        loans: Loans,
        runner: CallRunner,
        tracker: Tracker,
        task_warnings: TaskWarnings,
        station: Station,
    ) -> None:
        self._functions = functions
        self._graphs = graphs
        self._loans = loans
        self._runner = runner
        self._tracker = tracker
        self._warnings = task_warnings
        self._station = station
        self.new_stage: Callable[[], Stage] = Stage  # for each call

    def answer(self, message: Forward, incoming: memoryview) -> tuple[Results, Payload]:
        chunk, calls = message.chunk, message.calls
        found = self._functions[message.function]
        function = found if isinstance(found, Function) else None
        payload = Payload()
        outcomes: list[Result | Failure] = []
        own_seconds = eager_seconds = failed_seconds = 0.0
        started = time.perf_counter()
        with under(message.modes), NOTHING if function is None else function.running():
            for position, call in enumerate(calls):
                # noted before the look: the caller may have what was not, some time after it said that it is skipped
                self._tracker.begin(chunk, position)
                if self._tracker.is_skipped(chunk):
                    break
                stage, begun = self.new_stage(), time.perf_counter()
                stage.position = position
                outcome = self._run(message, call, found, incoming, payload, stage) if isinstance(found, Function) else found
                outcomes.append(outcome)
                self._station.finish()  # raises where the device cannot go on after an error, which ends the worker
                if function is None:
                    self._loans.give_back_unread(call)
                if isinstance(outcome, Result):
                    own_seconds += stage.own_seconds
                    eager_seconds += stage.backward_seconds
                    continue
                failed_seconds += time.perf_counter() - begun
                if message.stop_at_failure:
                    break
        for call in calls[len(outcomes) :]:
            self._loans.give_back_unread(call)
        seconds = time.perf_counter() - started - failed_seconds
        mutated = function is not None and function.has_written
        dropped, nbytes = self._graphs.take_dropped(), self._graphs.nbytes
        reached = () if function is None else function.search.take_found()
        warned = self._warnings.take()
        return Results(chunk, outcomes, seconds, own_seconds, eager_seconds, mutated, warned, dropped, nbytes, reached), payload

    def _run(
        self, message: Forward, call: ForwardCall, function: Function, incoming: memoryview, payload: Payload, stage: Stage
    ) -> Result | Failure:
        """The outcome of a call. What was lent for it, and its graph where that is kept, are noted."""
        before = self._graphs.memory_in_use()
        try:
            eager = None
            if message.eager is not None and not function.code.is_cut_short:
                eager = self._eager(message.eager, call, function, stage)
            run = self._runner.run(message, call, function, incoming, stage, eager)
            placed = self._place(run, call.origin, stage)
            graph = run.graph
            gradients = None
            if graph is not None and eager is not None and eager.has_begun:
                gradients = self._lend_gradients(call.call, eager, graph, payload)
                graph = graph if eager.how.keeps else None
            shape, bundle = (None, run.shapes) if call.bundle else (run.shapes[0][0], ())
            refs = self._loans.lend(placed, payload)
            result = Result(shape, refs, run.graph is not None, gradients, bundle, run.unused, run.strays)
            del run, placed, eager
            if graph is not None:
                self._graphs.keep(call.call, graph, self._graphs.memory_in_use() - before)
                self._graphs.trim()
            return result
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they are the parent's to raise
            return failure(error, stage.phase, stage.offset, stage.given)

    def _eager(self, how: Eager, call: ForwardCall, function: Function, stage: Stage) -> EagerBackwards:
        sums = None
        if function.edges and not how.apart:
            sums = function.sums.of(None, (), len(function.edges))
        return EagerBackwards(call, how, function.edges, sums, stage)

    def _place(self, run: CallRun, origin: int, stage: Stage) -> list[Placed] | Together:
        """Copies of the results' tensors, to be had where the call came from (`origin`)."""
        packer = self._loans.packer
        if len(run.shapes) > 1:
            with contextlib.suppress(SharedMemoryError):  # there may be room for them one by one; if not, one of them is named
                if (together := packer.together(run.tensors, run.flags)) is not None:
                    return together
        rows = zip(run.tensors, run.flags, self._station.homes_of(run.tensors, origin), strict=False)  # the last may be endless
        placed: list[Placed] = []
        for stage.offset, (_, count) in enumerate(run.shapes):
            placed += itertools.starmap(packer.place, itertools.islice(rows, count))
        return placed

    def _lend_gradients(
        self, call: int, eager: EagerBackwards, graph: GraphEdges, payload: Payload
    ) -> Sequence[TensorRef | None] | None:
        """Those of losses; None where not all could be had: the caller's backward is sent then."""
        function, gradients = graph.function, None
        if eager.is_complete:
            homes = graph.devices.homes(range(len(graph.inputs)), eager.sums is None)
            with contextlib.suppress(Exception):  # no room for them: there may be for the result, which matters more
                gradients = self._loans.lend_all(eager.found, homes, payload)
        if gradients is None:
            function.code.is_cut_short = True
            if not eager.how.keeps:
                self._graphs.miss(call)
        elif eager.sums is not None:
            eager.sums.calls += 1
        return gradients
