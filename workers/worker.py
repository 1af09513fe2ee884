"""One worker: takes frames, runs calls and their backwards, answers. The same object serves in a process, a thread, or inline.

    Define ─► functions    Forward ─► run ─► Results, graphs kept    Backward ─► Gradients    Collect ─► Collected
Guarantees: every Forward, Backward and Collect is answered once, whatever the task raises; a task's exception ends the task,
    not the worker. Assumes: one thread calls `handle`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO, overload

import torch
from mpgrad.workers.call_run import Function, Made, Stage, arguments, failure, given_in_words, result_structure
from mpgrad.workers.eager_backward import Ahead, are_precise, may_go_ahead
from mpgrad.workers.graphs import (
    APPLIED,
    CHECKPOINTS,
    CaptureSums,
    Edge,
    Entrance,
    Graph,
    GraphTable,
    Names,
    Search,
    dress,
    edge_of,
    edges_at,
    run_backward,
)
from mpgrad.workers.station import Station
from mpgrad.workers.surroundings import SURROUNDINGS

from mpgrad.errors import SharedMemoryError
from mpgrad.memory.accelerator import code_of
from mpgrad.memory.arena import Arena, Lenders, Slot
from mpgrad.pickling import classes
from mpgrad.pickling.state import Recent, loads_with_state
from mpgrad.torch_state.modes import seed_item, under
from mpgrad.torch_state.private import plus
from mpgrad.torch_state.vmap_levels import Level
from mpgrad.wire.frames import Frame, drained
from mpgrad.wire.link import Link
from mpgrad.wire.messages import (
    Backward,
    BackwardCall,
    Begun,
    Collect,
    Collected,
    Define,
    Direct,
    Eager,
    Failure,
    Forget,
    Forward,
    ForwardCall,
    Gradients,
    Message,
    Missing,
    NewSlab,
    Progress,
    Ready,
    Rederive,
    Release,
    Rerun,
    Result,
    Results,
    Returned,
    SlabsGone,
    Try,
    Warned,
)
from mpgrad.wire.tensor_packing import ANSWERED_BYTES, Packer, Payload, Placed, Together
from mpgrad.wire.tensor_refs import (
    DEVICE,
    LEAF,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    Bucket,
    TensorRef,
    flags_in,
    lent,
    renamed,
    rows_of,
    view,
    with_more_behind,
)

__all__ = ["Worker"]

GARBAGE_BYTES = 64 << 20
NOTHING = contextlib.nullcontext()
MOST_TASKS = 256  # backwards of one function at a time
WHEN_RUN_AGAIN = "when it was run again; with the same inputs and random numbers it must do the same"


class Worker:
    def __init__(self, number: int, link: Link, graph_bytes: int | None, station: Station | None = None) -> None:
        self._link = link
        self._station = station  # in a pool with devices
        self.before_answer: Callable[[], None] = lambda: None
        self._arena = Arena(number)
        self._packer = Packer(self._arena, devices=station, most_bucketed=ANSWERED_BYTES)
        self._unread: deque[tuple[int, int]] = deque()  # lent to us for calls that did not run
        self._lenders = Lenders(lambda: None)  # what is given back is told with the next answer
        self._lent: dict[int, Slot] = {}
        self._functions: dict[int, Function | Failure] = {}
        self._codes: dict[int, bytes] = {}
        self._states: Recent[bytes] = Recent()  # of the user's modules, see `ModulesState`
        self._graphs = GraphTable(graph_bytes)
        self._sums: dict[int, dict[tuple[int, tuple[Level, ...]], CaptureSums]] = {}  # by function, then by backward
        self._eager_sums: dict[int, CaptureSums] = {}  # by function: of backwards right after their forwards
        self._gives_losses: dict[int, bool] = {}  # by code: whether it gave nothing else up to now
        self._forgotten_bytes = 0  # captures of forgotten functions since the last collection
        self._own_seconds = self._ahead_seconds = self._engine_seconds = 0.0
        self._reached: list[int] = []  # captures that the gradients of the last backward depend on
        self._warned: dict[Warned, None] = {}  # once each, in order, until the next answer
        self._progress_slot = self._arena.allocate(8 * Progress.COUNT)
        self._progress = self._progress_slot.memory.cast("q")
        self._payload = Payload()
        self._handlers: dict[type[Any], Callable[[Any, memoryview], Message | None]] = {
            Define: self._define,
            Forget: self._forget,
            Forward: self._forward,
            Backward: self._backward,
            Collect: self._collect,
            Release: self._release,
            Returned: self._take_back,
            NewSlab: self._attach,
            SlabsGone: self._detach,
            Try: self._try,
            Direct: self._go_direct,
        }

    def take_warnings(self) -> None:
        """Send the warnings of tasks to the parent, whose filters say what becomes of them, as they do for a serial loop."""
        warnings.showwarning = self._take_warning

    def _take_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        instance = message if isinstance(message, Warning) else category(message)
        try:
            pickled = classes.dumps(instance)
        except Exception:  # of a class of its own, with what cannot be carried: its text is what matters
            pickled = classes.dumps(UserWarning(str(message)))
        self._warned[Warned(pickled, filename, lineno)] = None

    def _warnings(self) -> list[Warned]:
        given, self._warned = self._warned, {}
        return list(given)

    def announce(self, pid: int) -> None:
        self._send(Ready(pid, self._progress_slot.address))

    def handle(self, frame: Frame) -> None:
        if self._station is not None:
            self._station.arrive()
        before = self._payload  # inline, a task may use the pool again, while the outer answer is being made
        answer = None
        for message in frame.messages:
            self._payload = Payload()
            answer = self._handlers[type(message)](message, frame.payload)
            if answer is not None:
                self._send(answer)
        if answer is None and (returns := self._returns()):  # of what was released; nobody knows when the next answer comes
            self._link.send([Returned(returns)])
        self._payload = before

    # --- calls

    def _forward(self, message: Forward, payload: memoryview) -> Message:
        function = self._functions[message.function]
        outcomes: list[Result | Failure] = []
        self._own_seconds = self._ahead_seconds = 0.0
        started = time.perf_counter()
        with under(message.modes), self._globals_of(message.function):
            for position, call in enumerate(message.calls):
                if message.chunk in self._progress[Progress.CANCELLED :]:
                    break
                self._begin(message.chunk, position)
                outcome = function if isinstance(function, Failure) else self._run(message, call, function, payload)
                outcomes.append(outcome)
                if self._station is not None:
                    self._station.finish()  # raises where the device cannot go on after an error, which ends the worker
                if isinstance(function, Failure):
                    self._give_back_unread(call)
                if isinstance(outcome, Failure) and message.stop_at_failure:
                    break
        for call in message.calls[len(outcomes) :]:
            self._give_back_unread(call)
        seconds = time.perf_counter() - started
        mutated = isinstance(function, Function) and (
            [c._version for c in function.captures] != function.versions
            or any(c.grad is not None for c in function.edges if isinstance(c, torch.Tensor))
        )
        dropped = self._graphs.take_dropped()
        own, ahead, nbytes = self._own_seconds, self._ahead_seconds, self._graphs.nbytes
        reached = function.search.take_found() if isinstance(function, Function) else ()
        return Results(message.chunk, outcomes, seconds, own, ahead, mutated, self._warnings(), dropped, nbytes, reached)

    def _begin(self, chunk: int, position: int) -> None:
        self._progress[Progress.STARTED] = time.monotonic_ns()
        self._progress[Progress.OFFSET] = -1
        if self._progress[Progress.CHUNK] != chunk:
            self._progress[Progress.CHUNK] = Progress.BETWEEN  # whoever reads both finds them to go together, or this
        self._progress[Progress.POSITION] = position
        self._progress[Progress.CHUNK] = chunk
        if not self._link.shares_memory:
            self._introduce()  # what was lent meanwhile is carried with it
            self._link.send([Begun(chunk, position)])

    def _note_item(self, offset: int) -> None:
        """Of a bundle: for who has to say which one a worker died of."""
        self._progress[Progress.OFFSET] = offset

    def _run(self, message: Forward, call: ForwardCall, function: Function, payload: memoryview) -> Result | Failure:
        stage = Stage()
        before = self._graphs.memory_in_use()
        try:
            ahead = None
            if message.eager and may_go_ahead(call, message.modes, function.precise):
                sums = CaptureSums(len(function.edges)) if message.eager == Eager.SUMS else None
                at_once = self._gives_losses.get(function.code, False)
                ahead = Ahead(call, function.edges, sums, at_once, message.ones, self._note_item)
            made = self._make(message, call, function, payload, stage, ahead)
            placed = self._place(made, call.origin, stage)
            graph = made.graph
            gradients = None
            if graph is not None and ahead is not None and ahead.has_begun:
                gradients = self._lend_ahead(call.call, function.code, ahead, graph)
                graph = None
            shape, bundle = (None, made.shapes) if call.bundle else (made.shapes[0][0], ())
            for_one = gradients is not None and ahead is not None and ahead.for_one
            result = Result(shape, self._lend(placed), made.graph is not None, gradients, bundle, made.unused, for_one)
            del made, placed, ahead
            if graph is not None:
                self._graphs.keep(call.call, graph, self._graphs.memory_in_use() - before)
                self._graphs.trim()
            return result
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they are the parent's to raise
            return failure(error, stage.phase, stage.offset, stage.given)

    def _place(self, made: Made, origin: int, stage: Stage) -> list[Placed] | Together:
        place, station = self._packer.place, self._station
        pairs = zip(made.tensors, made.flags, strict=True)
        if station is not None:
            return [place(tensor, flags, station.home_of(tensor, origin)) for tensor, flags in pairs]
        if len(made.shapes) > 1:
            with contextlib.suppress(SharedMemoryError):  # there may be room for them one by one; if not, one of them is named
                if (together := self._packer.together(made.tensors, made.flags)) is not None:
                    return together
        placed: list[Placed] = []
        for stage.offset, (_, count) in enumerate(made.shapes):
            placed += [place(*pair) for pair in itertools.islice(pairs, count)]
        return placed

    def _lend_ahead(self, call: int, code: int, ahead: Ahead, graph: Graph) -> Sequence[TensorRef | None] | None:
        """The gradients of losses; None where not all could be had: the caller's backward makes the graph again."""
        self._ahead_seconds += ahead.seconds
        gradients = None
        if ahead.is_complete:
            # not for engines in the caller's process, where a call that is run again may draw other random numbers
            self._gives_losses.setdefault(code, APPLIED.is_watching)
            names = None if graph.names is None else [*graph.names.inputs, *graph.names.captures][: len(ahead.found)]
            with contextlib.suppress(Exception):  # no room for them: there may be for the result, which matters more
                gradients = self._lend_all(ahead.found, names)
        else:
            self._gives_losses[code] = False
        if gradients is None:
            self._graphs.miss(call)
        elif ahead.sums is not None and ahead.sums.calls:
            self._eager_sums.setdefault(graph.function, CaptureSums(len(graph.captures))).add(ahead.sums.sums)
        return gradients

    def _make(
        self,
        message: Forward | Rerun,
        call: ForwardCall,
        function: Function,
        payload: memoryview,
        stage: Stage,
        ahead: Ahead | None = None,
    ) -> Made:
        """Run a call, the items of a bundle one after another; notes in `stage` how far it came."""
        station = self._station
        refs = call.tensors if station is None else station.named(call.tensors, function.gathers)
        given, entrances = self._inputs(refs, payload)
        made = Made(call, function, refs, given, entrances, message.modes.inference, on_devices=station is not None)
        before = CHECKPOINTS.count
        SURROUNDINGS.are_of(made)
        for stage.offset, own in enumerate(made.items()):
            stage.phase = "forward"
            if call.bundle:
                self._note_item(stage.offset)
            if ahead is not None:
                ahead.begin()
            args, kwargs = arguments(call, stage.offset, own, function.modules)
            if message.seed is not None:
                seed = seed_item(message.seed, call.item + stage.offset)
                if station is not None:
                    station.seed(seed)
            started = time.perf_counter()
            try:
                value = function.target(*args, **kwargs)
            except BaseException:
                stage.given = given_in_words(args, kwargs)
                raise
            self._own_seconds += time.perf_counter() - started
            stage.phase = "result"
            shape, found = result_structure(value, self._packer.kind)
            del args, kwargs, own, value
            made.shapes.append((shape, len(found)))
            if ahead is not None:
                found, before = go_ahead(ahead, made, stage.offset, found, CHECKPOINTS.count != before), CHECKPOINTS.count
            made.tensors += found
        if ahead is not None:
            ahead.end()
        elif outputs := made.connect(made.tensors, whole := CHECKPOINTS.count != before):
            made.enter(outputs, whole)
        self._note_item(-1)
        if made.has_graph:
            names = None if station is None else Names(made.codes, names_of(call.tensors), function.names)
            made.graph = Graph(message.function, made.outputs, made.inputs, function.edges, made.whole, names)
        return made

    def _inputs(self, refs: Sequence[TensorRef], payload: memoryview) -> tuple[list[torch.Tensor], list[Entrance]]:
        return dress(self._views(refs, payload), flags_in(refs))

    def _views(self, refs: Sequence[TensorRef], payload: memoryview) -> list[torch.Tensor]:
        if isinstance(refs, Bucket):
            return refs.views(payload, self._borrow)
        found: list[torch.Tensor] = []
        try:
            for row in rows_of(refs):
                found.append(view(row, payload, self._borrow))
        except BaseException:
            # that one was given back as it was refused; the rest was not looked at
            self._unread.extend((ref.place, 1) for ref in lent(refs[len(found) + 1 :]))
            raise
        return found

    def _give_back_unread(self, step: ForwardCall | BackwardCall | Rerun | Rederive) -> None:
        """What was lent to us for something that does not run."""
        call = step.call if isinstance(step, (Rerun, Rederive)) else step
        refs = call.tensors if isinstance(call, ForwardCall) else call.grads
        self._unread.extend((ref.place, 1) for ref in lent(refs))

    def _backward(self, message: Backward, payload: memoryview) -> Message:
        outcomes: list[Sequence[TensorRef | None] | Failure | Missing] = []
        reached: list[tuple[int, list[int]]] = []
        station = self._station
        self._engine_seconds = 0.0
        with under(message.modes):
            for position, call in enumerate(message.calls):
                if message.chunk in self._progress[Progress.CANCELLED :]:
                    break
                steps = deque([*call.before, call])
                self._reached = []
                try:
                    found = None
                    while steps:
                        self._begin(message.chunk, position)
                        found = self._step(steps.popleft(), payload)
                        if found is None:
                            break
                    names = None if station is None else self._names_of(call)
                    if call.last and found is not None:
                        self._graphs.release(call.call)  # now, while it is in the cache, and the next one can have its memory
                    outcomes.append(Missing() if found is None else self._lend_all(found, names))
                except BaseException as error:
                    outcomes.append(failure(error, "backward"))
                if station is not None:
                    station.finish()
                for step in steps:
                    self._give_back_unread(step)
                if self._reached:
                    reached.append((position, self._reached))
                self._graphs.trim()
        for call in message.calls[len(outcomes) :]:
            for step in (*call.before, call):
                self._give_back_unread(step)
        dropped, nbytes = self._graphs.take_dropped(), self._graphs.nbytes
        return Gradients(message.chunk, outcomes, self._engine_seconds, self._warnings(), dropped, nbytes, reached)

    def _step(self, step: Rerun | Rederive | BackwardCall, payload: memoryview) -> list[torch.Tensor | None] | None:
        """A backward, or a step to the graph that it needs; None where one that it starts from is not here any more."""
        if isinstance(step, BackwardCall):
            return self._differentiate(step, payload)
        warned = dict(self._warned)
        try:
            with under(step.modes):
                return self._differentiate(step.call, payload) if isinstance(step, Rederive) else self._run_again(step, payload)
        finally:
            self._warned = warned  # these were given the first time

    def _run_again(self, step: Rerun, payload: memoryview) -> list[torch.Tensor | None]:
        if step.spent and self._graphs.get(step.call.call) is not None:  # the backward that was to be the last one has failed
            self._give_back_unread(step)
            return []
        function = self._functions[step.function]
        if isinstance(function, Failure):
            self._give_back_unread(step)
            raise classes.loads(function.error)
        before = self._graphs.memory_in_use()
        with self._globals_of(step.function):
            made = self._make(step, step.call, function, payload, Stage())
        if made.graph is None:
            raise RuntimeError(f"nothing that the function gave needed gradients {WHEN_RUN_AGAIN}")
        if step.spent:
            spend(made)
        self._graphs.keep(step.call.call, made.graph, 0 if step.spent else self._graphs.memory_in_use() - before)
        return []

    def _differentiate(self, call: BackwardCall, payload: memoryview) -> list[torch.Tensor | None] | None:
        """The gradients that are wanted; None where the graph is not there any more."""
        graph = self._graphs.get(call.call)
        if graph is None:
            self._graphs.miss(call.call)
            self._give_back_unread(call)
            return None
        if len(graph.outputs) != len(call.parts):
            self._give_back_unread(call)
            found, expected = len(graph.outputs), len(call.parts)
            raise RuntimeError(f"{found} outputs of the function needed gradients, not {expected} as before, {WHEN_RUN_AGAIN}")
        before = self._graphs.memory_in_use()
        create = call.graph is not None
        refs = call.grads
        given: list[int] = []  # where those gradients lie in the caller that are to be differentiated again
        if graph.names is not None:
            given = names_of(refs)
            places = [code for count, code in zip(call.parts, graph.names.outputs, strict=True) for _ in range(count)]
            refs = [renamed(*each) for each in zip(refs, places, strict=True)]
        incoming, entrances = self._inputs(refs, payload) if create else (self._views(refs, payload), [])
        grads: list[torch.Tensor | None] = [*incoming]
        if set(call.parts) != {1}:
            rest = iter(incoming)
            grads = [functools.reduce(plus, [next(rest) for _ in range(count)]) if count else None for count in call.parts]
        started = time.perf_counter()
        try:
            with self._globals_of(graph.function):
                gradients = run_backward(graph, grads, call.wanted, call.captures, call.keep, create, call.levels)
        finally:
            self._engine_seconds += time.perf_counter() - started
        if call.captures and not call.apart:
            gradients, of_captures = gradients[: len(call.wanted)], gradients[len(call.wanted) :]
            sums = self._sums.setdefault(graph.function, {})
            sums.setdefault((call.task, call.levels), CaptureSums(len(of_captures))).add(of_captures)
            if len(sums) > MOST_TASKS:  # a backward that failed leaves its sum behind
                del sums[next(iter(sums))]
        if call.graph is not None:
            connected = [grad for grad in gradients if grad is not None and grad.requires_grad]
            if connected:
                if isinstance(function := self._functions.get(graph.function), Function):
                    self._reached = function.search.behind(connected, graph.whole)
                names = graph.names
                if names is not None:
                    names = Names(list(map(code_of, connected)), [*given, *names.inputs], names.captures)
                outputs = list(map(edge_of, connected))
                edges = [*edges_at(entrances), *graph.inputs]
                derived = Graph(graph.function, outputs, edges, graph.captures, names=names)
                self._graphs.keep(call.graph, derived, self._graphs.memory_in_use() - before)
        elif not call.keep:
            self._graphs.resize(call.call, 0)  # its buffers are gone; what is left says so to a second backward
        return gradients

    def _names_of(self, call: BackwardCall) -> list[int] | None:
        """Where the gradients that `call` asks for are to be in the caller."""
        graph = self._graphs.get(call.call)
        names = None if graph is None else graph.names
        if names is None:
            return None
        return [names.inputs[k] for k in call.wanted] + (names.captures if call.captures and call.apart else [])

    def _collect(self, message: Collect, payload: memoryview) -> Message:
        function = self._functions.get(message.function)
        names = function.names if isinstance(function, Function) and self._station is not None else None
        if message.task is None:
            sums = self._eager_sums.pop(message.function, None)
        else:
            sums = self._sums.get(message.function, {}).pop((message.task, message.levels), None)
        if sums is None:
            return Collected(message.chunk, [], 0)
        try:
            return Collected(message.chunk, self._lend_all(sums.sums, names), sums.calls)
        except BaseException as error:
            return Collected(message.chunk, failure(error, "backward"), 0)
        finally:
            if self._station is not None:
                self._station.finish()

    def _release(self, message: Release, payload: memoryview) -> None:
        for call in message.calls:
            self._graphs.release(call)

    # --- functions

    def _define(self, message: Define, payload: memoryview) -> None:
        if message.pickled is not None:
            self._codes[message.code] = message.pickled
        if message.state is not None:
            self._states.put(message.state.number, message.state.pickled or self._states.get(message.state.number) or b"")
        try:
            block = memoryview(b"")
            if message.block is not None:
                block = self._lenders.borrow(*message.block, private=True)
            refs = message.captures if self._station is None else self._station.named(message.captures, message.gathers)
            with torch.inference_mode(False):  # of the caller's thread, where that is ours; they are used under others too
                captures = [capture(ref, block, self._borrow) for ref in refs]
            edges: list[Edge] = [tensor for tensor in captures if tensor.requires_grad]
            number, state, tensors = 0, b"", 0
            if message.state is not None:
                number, tensors = message.state.number, message.state.tensors
                state = self._states.get(number) or b""
            target, modules = loads_with_state(self._codes[message.code], captures, number, state, tensors)
            versions = [tensor._version for tensor in captures]
            precise = are_precise(message.captures)
            names = names_of(message.captures)
            search = Search({id(edges[number]): number for number in with_more_behind(message.captures)})
            flags = flags_in(message.captures)
            self._functions[message.function] = Function(
                message.code, target, captures, modules, edges, versions, message.gathers, names, precise, search, flags
            )
        except BaseException as error:
            self._functions[message.function] = failure(error, "loading the function")

    def _globals_of(self, function: int) -> contextlib.AbstractContextManager[None]:
        """In which it is to run, if there are functions in it that the compiler made."""
        known = self._functions.get(function)
        placement = known.modules.placement if isinstance(known, Function) else None
        return NOTHING if placement is None else placement

    def _forget(self, message: Forget, payload: memoryview) -> None:
        for function in message.functions:
            known = self._functions.pop(function, None)
            if isinstance(known, Function) and known.modules.placement is not None:
                known.modules.placement.forget()
            self._sums.pop(function, None)
            self._eager_sums.pop(function, None)
        for code in message.codes:
            self._codes.pop(code, None)
            self._gives_losses.pop(code, None)
        self._forgotten_bytes += message.nbytes
        if self._forgotten_bytes > GARBAGE_BYTES:  # a recursive function is a cycle, which would keep its captures for long
            self._forgotten_bytes = 0
            gc.collect()

    # --- memory

    def _lend_all(self, tensors: Sequence[torch.Tensor | None], names: Sequence[int] | None) -> Sequence[TensorRef | None]:
        # all are placed before the first is lent: where memory ends half-way, nothing has been given away
        flags = [REQUIRES_GRAD if each is not None and each.requires_grad else 0 for each in tensors]
        together = self._packer.together(tensors, flags) if names is None else None
        if together is not None:
            return self._lend(together)
        each_name = [None] * len(tensors) if names is None else names
        triples = zip(tensors, flags, each_name, strict=True)
        return self._lend([None if each is None else self._packer.place(each, own, name) for each, own, name in triples])

    @overload
    def _lend(self, placed: Sequence[Placed] | Together) -> Sequence[TensorRef]: ...
    @overload
    def _lend(self, placed: Sequence[Placed | None]) -> Sequence[TensorRef | None]: ...
    def _lend(self, placed: Sequence[Placed | None] | Together) -> Sequence[TensorRef | None]:
        holders = [placed.holder] if isinstance(placed, Together) else [each.holder for each in placed if each is not None]
        for holder in holders:
            if isinstance(holder, Slot):
                self._lend_slot(holder)
        return self._payload.add_all(placed)

    def _borrow(self, ref: TensorRef) -> Any:
        return self._lenders.borrow(ref.place, ref.nbytes, private=bool(ref.flags & SHARED))

    def _take_back(self, message: Returned, payload: memoryview) -> None:
        for address, _ in message.slots:  # a result is lent once, so once is all
            slot = self._lent.pop(address)
            if not self._link.shares_memory:
                self._link.drop(slot, 1)

    def _attach(self, message: NewSlab, payload: memoryview) -> None:
        if message.handle is not None and self._station is not None:
            self._station.attach(message, self._lenders)
            return
        self._lenders.attach(message.number, self._link.take_descriptor(), message.nbytes)

    def _try(self, message: Try, payload: memoryview) -> Message:
        assert self._station is not None
        return self._station.try_out(message, self._lenders.borrow, self._lend_slot)

    def _go_direct(self, message: Direct, payload: memoryview) -> None:
        assert self._station is not None
        self._station.is_direct = True

    def _lend_slot(self, slot: Slot) -> None:
        self._lent[slot.address] = slot
        if not self._link.shares_memory:
            self._link.carry(slot)

    def _detach(self, message: SlabsGone, payload: memoryview) -> None:
        for number in message.numbers:
            self._lenders.detach(number)

    def _returns(self) -> list[tuple[int, int]]:
        return self._lenders.collect() + drained(self._unread)

    def _introduce(self) -> None:
        lane = self._station.lane if self._station is not None else None
        self._link.introduce(drained(self._arena.made) + (drained(lane.arena.made) if lane is not None else []))

    def _send(self, answer: Message) -> None:
        """Send the answer, and along with it what the parent has to know about memory."""
        self.before_answer()
        self._arena.tidy()
        self._introduce()
        messages: list[Message] = []
        if returns := self._returns():
            messages.append(Returned(returns))
        messages.append(answer)
        if dropped := drained(self._arena.dropped):
            messages.append(SlabsGone(dropped))
        self._link.send(messages, self._payload.parts)


def go_ahead(ahead: Ahead, made: Made, item: int, found: list[torch.Tensor], whole: bool) -> list[torch.Tensor]:
    """Run the backward of what an item gave, if that is a loss; returns what is to be sent."""
    outputs = made.connect(found, whole)
    if outputs and ahead.take(item, made.inputs, found, whole):
        return [tensor.detach() for tensor in found]  # nothing holds the graph now: the next one gets its memory, still cached
    if outputs:
        made.enter(outputs, whole)
    return found


def spend(made: Made) -> None:
    """Run through a graph that was run through before, and dropped: what a second backward finds is PyTorch's own matter.

    With gradients of one, of which whatever is said by code of the user's, or by anomaly mode, is of no interest to anybody.
    """
    graph = made.graph
    assert graph is not None
    pairs = zip(made.tensors, made.flags, strict=True)
    grads = [torch.ones_like(tensor) for tensor, flags in pairs if flags & REQUIRES_GRAD and not flags & LEAF]
    with contextlib.suppress(Exception), torch.autograd.set_detect_anomaly(False):
        run_backward(graph, grads, range(len(graph.inputs)), True, keep=False, create=False, levels=())


def names_of(refs: Sequence[TensorRef]) -> list[int]:
    """Where those of the caller's tensors lie there that need gradients."""
    return [ref.flags // DEVICE for ref in refs if ref.flags & REQUIRES_GRAD]


def capture(ref: TensorRef, block: memoryview, borrow: Callable[[TensorRef], Any]) -> torch.Tensor:
    tensor = view(ref, block, borrow)
    needs_grad = bool(ref.flags & REQUIRES_GRAD)
    if ref.flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=needs_grad)
    return tensor.requires_grad_(needs_grad)
