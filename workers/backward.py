"""The backward pass: gradients for the outputs of kept graphs come, gradients of inputs and captures go.

    Backwards ──► before: run the call again, or the backward that made its graph ──► differentiate ──► lend ──► Gradients
                                                   captures' gradients: added up ──┘
    Collect ──► the sum ──► lend ──► Collected
Guarantees: each backward that is not skipped has one outcome, whatever the task raises.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mpgrad.environment import FOLLOWER
from mpgrad.pickling import classes
from mpgrad.torch_state.modes import under
from mpgrad.torch_state.private import plus
from mpgrad.wire.messages import BackwardCall, Backwards, Collect, Collected, Failure, Gradients, Missing, Rederive, Rerun
from mpgrad.wire.tensor_refs import LEAF, REQUIRES_GRAD, Payload, TensorRef, flags_in
from mpgrad.workers.call_run import CallRun, CallRunner
from mpgrad.workers.functions import FunctionTable, failure
from mpgrad.workers.graph_edges import Entrance, dress, edge_of, edges_at
from mpgrad.workers.graphs import GraphEdges, GraphTable
from mpgrad.workers.loans import Loans
from mpgrad.workers.station import Station
from mpgrad.workers.streams import TaskWarnings
from mpgrad.workers.whereabouts import Stage, Tracker

__all__ = ["BackwardHandler"]

WHEN_RUN_AGAIN = "when it was run again; with the same inputs and random numbers it must do the same"


class Differentiated(NamedTuple):
    """What came of one step of a backward."""

    gradients: Sequence[torch.Tensor | None] = ()
    homes: Sequence[int] | None = None  # where these are to be in the caller, in a pool with devices
    reached: Sequence[int] = ()  # captures that they depend on, see `Gradients`


class BackwardHandler:
    """Answers `Backwards`, after the steps that make missing graphs again; and `Collect`."""

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
        self.new_stage: Callable[[], Stage] = Stage  # for each chunk

    def answer(self, message: Backwards, incoming: memoryview) -> tuple[Gradients, Payload]:
        chunk, calls = message.chunk, message.calls
        payload = Payload()
        outcomes: list[Sequence[TensorRef | None] | Failure | Missing] = []
        reached: list[tuple[int, Sequence[int]]] = []
        stage = self.new_stage()
        with under(message.modes):
            for position, call in enumerate(calls):
                if self._tracker.is_skipped(chunk):
                    break
                stage.position = position
                steps = deque([*call.before, call])
                try:
                    found: Differentiated | None = None
                    while steps:
                        self._tracker.begin(chunk, position)
                        found = self._step(steps.popleft(), incoming, stage)
                        if found is None:
                            break
                    if found is not None and found.reached:
                        reached.append((position, found.reached))
                    outcomes.append(Missing() if found is None else self._loans.lend_all(found.gradients, found.homes, payload))
                except BaseException as error:
                    outcomes.append(failure(error, "backward"))
                self._station.finish()
                for step in steps:
                    self._loans.give_back_unread(step)
                self._graphs.trim()
        for call in calls[len(outcomes) :]:
            for step in (*call.before, call):
                self._loans.give_back_unread(step)
        dropped, nbytes = self._graphs.take_dropped(), self._graphs.nbytes
        return Gradients(chunk, outcomes, self._warnings.take(), dropped, nbytes, reached), payload

    def collect(self, message: Collect, incoming: memoryview) -> tuple[Collected, Payload]:
        """Hands over a sum, which is not here any more then; no gradients and 0 calls where there was none."""
        payload = Payload()
        function = self._functions.get(message.function)
        sums = None if function is None else function.sums.take(message.graph_task, message.levels)
        if function is None or sums is None:
            return Collected(message.chunk, [], 0), payload
        try:
            return Collected(message.chunk, self._loans.lend_all(sums.sums, function.homes, payload), sums.calls), payload
        except BaseException as error:
            return Collected(message.chunk, failure(error, "backward"), 0), payload
        finally:
            self._station.finish()

    def _step(self, step: Rerun | Rederive | BackwardCall, incoming: memoryview, stage: Stage) -> Differentiated | None:
        """A backward, or a step to the graph that it needs; None where one that it starts from is not here any more."""
        if isinstance(step, BackwardCall):
            return self._differentiate(step, incoming, stage)
        with self._warnings.muted(), FOLLOWER.within(step.environment), under(step.modes):
            if isinstance(step, Rederive):
                return self._differentiate(step.call, incoming, stage)
            return self._run_again(step, incoming, stage)

    def _run_again(self, step: Rerun, incoming: memoryview, stage: Stage) -> Differentiated:
        """Makes the graph of a call again, which is kept; a spent one is run through."""
        call = step.call.call
        if step.spent and call in self._graphs:  # the backward that was to be the last one has failed
            self._loans.give_back_unread(step)
            return Differentiated()
        function = self._functions[step.function]
        if isinstance(function, Failure):
            self._loans.give_back_unread(step)
            raise classes.loads(function.error)
        before = self._graphs.memory_in_use()
        with function.running():
            run = self._runner.run(step, step.call, function, incoming, stage)
        if run.graph is None:
            raise RuntimeError(f"nothing that the function gave needed gradients {WHEN_RUN_AGAIN}")
        if step.spent:
            run_through(run, run.graph)
        self._graphs.keep(call, run.graph, self._graphs.memory_in_use() - before)
        if step.spent:
            self._graphs.spend(call)
        return Differentiated()

    def _differentiate(self, call: BackwardCall, incoming: memoryview, stage: Stage) -> Differentiated | None:
        """The gradients that are wanted; None where the graph is not there any more."""
        graph = self._graphs.find(call.call)
        if graph is None:
            self._loans.give_back_unread(call)
            return None
        if len(graph.outputs) != len(call.parts):
            self._loans.give_back_unread(call)
            found, expected = len(graph.outputs), len(call.parts)
            raise RuntimeError(f"{found} outputs of the function needed gradients, not {expected} as before, {WHEN_RUN_AGAIN}")
        before = self._graphs.memory_in_use()
        create = call.graph is not None
        refs = graph.devices.arriving(call.grads, call.parts)
        given = self._loans.views(refs, incoming)
        entrances: Sequence[Entrance] = ()
        if create:
            given, entrances = dress(given, flags_in(refs))
        grads = added_up(given, call.parts)
        started = time.perf_counter()
        try:
            with graph.function.running():
                gradients = graph.run_backward(grads, call.wanted, call.captures, call.keep, create, call.levels)
        finally:
            stage.backward_seconds += time.perf_counter() - started
        if call.captures and not call.apart:
            gradients, of_captures = gradients[: len(call.wanted)], gradients[len(call.wanted) :]
            sums = graph.function.sums.of(call.graph_task, call.levels, len(of_captures))
            sums.add(of_captures)
            sums.calls += 1
        reached: Sequence[int] = ()
        if call.graph is not None:
            connected = [grad for grad in gradients if grad is not None and grad.requires_grad]
            if connected:
                reached = graph.function.search.behind(connected, graph.reentrant)
                edges = [*edges_at(entrances), *graph.inputs]
                devices = graph.devices.derived(connected, call.grads)
                derived = GraphEdges(graph.function, list(map(edge_of, connected)), edges, devices=devices)
                self._graphs.keep(call.graph, derived, self._graphs.memory_in_use() - before)
        elif call.last:
            self._graphs.release(call.call)  # now, while it is in the cache, and the next one can have its memory
        elif not call.keep:
            self._graphs.spend(call.call)
        return Differentiated(gradients, graph.devices.homes(call.wanted, call.captures and call.apart), reached)


def added_up(given: list[torch.Tensor], parts: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """One gradient for each output, of each the sum of as many as `parts` says; None where there is none."""
    if set(parts) == {1}:
        return given
    rest = iter(given)
    return [functools.reduce(plus, [next(rest) for _ in range(count)]) if count else None for count in parts]


def run_through(run: CallRun, graph: GraphEdges) -> None:
    """Run through a graph that was run through before, and dropped: what a second backward finds is PyTorch's own matter.

    With gradients of one, of which whatever is said by code of the user's, or by anomaly mode, is of no interest to anybody.
    """
    pairs = zip(run.tensors, run.flags, strict=True)
    grads = [torch.ones_like(tensor) for tensor, flags in pairs if flags & REQUIRES_GRAD and not flags & LEAF]
    with contextlib.suppress(Exception), torch.autograd.set_detect_anomaly(False):
        graph.run_backward(grads, range(len(graph.inputs)), True, keep=False, create=False, levels=())
