"""The messages between parent and worker. Each kind is a frozen type, and a frame holds many
messages. Both sides use this module.

    parent ► worker   Start Follow Define Forget Forward Backwards Collect Release Stop
    worker ► parent   CrashTraceback ReadyReport StartFailure Results Gradients CollectedSums
                      PrintedText LoggedRecord
    both ways         NewSlab CarriedSlots DroppedSlabs MissingSlabs ReturnedSlots
    devices           SlotTrial DirectTransfer to the worker, TrialOutcome to the parent
    timelines         Record to the worker, ChunkTrace to the parent

Agents have messages of their own: see `agent_messages`.

The tensors of many items (of a bundle, or of dependencies' results) are sent in a row. One record,
`Parts`, lists which tensors belong to which item. It is sent with the tensors, as
`ForwardCall.bundle` and `Result.bundle`. Everything else is computed from it:

    tensors   a  b | c | | d  e            parts   [(shape, 2), (shape, 1), (shape, 0), (shape, 2)]
    owners    0  0   1     3  3

Messages are NamedTuples, not dataclasses: they are equally immutable, and pickle in a third of the
time.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.environment import Environment
from mpgrad.memory.accelerator import Handle
from mpgrad.torch_state.modes import Modes
from mpgrad.torch_state.private import Level
from mpgrad.wire.agent_messages import CrashTraceback, LackingMemory, ProgressRecordLocation
from mpgrad.wire.tensor_refs import TensorRef, need_no_pickle

__all__ = [
    "SCALARS",
    "TRACEBACK_SIGNAL",
    "BackwardCall",
    "Backwards",
    "CarriedSlots",
    "ChunkTrace",
    "Collect",
    "CollectedSums",
    "Define",
    "DirectTransfer",
    "DroppedSlabs",
    "EagerOptions",
    "Failure",
    "Follow",
    "Forget",
    "Forward",
    "ForwardCall",
    "Gradients",
    "LogLevels",
    "LoggedRecord",
    "Logger",
    "Message",
    "MissingGraph",
    "MissingSlabs",
    "ModulesState",
    "NewSlab",
    "Parts",
    "PrintedText",
    "ReadyReport",
    "Recompute",
    "RecomputeBackward",
    "Record",
    "Release",
    "Result",
    "Results",
    "ReturnedSlots",
    "SlotTrial",
    "Span",
    "Start",
    "StartFailure",
    "Stop",
    "Structure",
    "TrialOutcome",
    "WarningReport",
    "is_plain",
    "owners",
    "plain_structure",
    "split",
    "with_tensors",
]

# The one message that is a signal. It tells a worker that is stuck in a call to write its stack and
# end.
TRACEBACK_SIGNAL = signal.SIGUSR2

# How the tensors of arguments, or of a result, are put together:
# - None: one bare tensor.
# - a number: that many tensors in a row (positional arguments, or a tuple).
# - bytes: the pickle of (args, kwargs), or of the result, without its tensors.
# - a tuple: (args, kwargs) or (result,) itself, with an ellipsis for each tensor and (number,) for
#   the result of a dependency; see `plain_structure`.
Structure = int | bytes | tuple[Any, ...] | None
# For each of many items or results, whose tensors are sent in a row: its structure, and its number
# of tensors. See above.
Parts = Sequence[tuple[Structure, int]]
# One thing that a worker did: phase, position of the call, offset of the item, start and end.
Span = tuple[str, int, int, int, int]


# --- both ways: memory


class NewSlab(NamedTuple):
    """The sender has made shared memory. Its file descriptor is sent with the frame. Memory on a
    device has a handle instead."""

    number: int
    nbytes: int
    handle: Handle | None = None
    code: int = 0  # the device's code


class CarriedSlots(NamedTuple):
    """The slots whose bytes follow the payload one after another, if memory is not shared. This
    message is the first in its frame."""

    slots: list[tuple[int, int]]  # address and size


class DroppedSlabs(NamedTuple):
    """The sender has dropped these slabs, which it owned."""

    numbers: list[int]


class MissingSlabs(NamedTuple):
    """The sender had no free descriptor to receive these new slabs, and requests them again."""

    numbers: list[int]


class ReturnedSlots(NamedTuple):
    """Slots that the receiver had lent, each with its address and how many times it was
    received."""

    slots: list[tuple[int, int]]


class SlotTrial(NamedTuple):
    """A test of whether the receiver can read the sender's slots on a device. The `nbytes` bytes at
    `address` should be `mark`."""

    address: int
    nbytes: int
    mark: bytes


class TrialOutcome(NamedTuple):
    """The answer to a `SlotTrial`: why the sender cannot read the slot, or "". If it can, `back` is
    a trial with its own slot."""

    refusal: str
    back: SlotTrial | None


class DirectTransfer(NamedTuple):
    """Results may be sent as slots on the device from now on: both sides can read the other's."""


# --- timelines


class Record(NamedTuple):
    """Start to report what the worker does. If not `on`, stop it."""

    on: bool


class ChunkTrace(NamedTuple):
    """A record of what was done for a chunk. It precedes the chunk's answer, in the same frame.

    Times are nanoseconds of the worker's `time.monotonic_ns`. On one machine this is also the
    caller's clock.
    """

    chunk: int
    done: int  # the number of its calls that ran; the later ones were skipped
    began: int
    ended: int
    spans: list[Span]


# --- parent to worker


class Logger(NamedTuple):
    """The settings of one of the caller's loggers, as a task sees them."""

    level: int = 0
    disabled: bool = False
    propagate: bool = True


class LogLevels(NamedTuple):
    """The caller's levels of `logging`."""

    loggers: dict[str, Logger]  # those whose settings differ from a new logger's
    names: dict[int, str]
    disabled: int  # `logging.disable` has turned off levels up to this one


class Start(NamedTuple):
    """The first message. `initializer` is the pickle of (function or None, arguments); the other
    settings are the parent's.

    If the graphs take more than `graph_bytes` together, some are dropped, the largest first; None
    means no limit. With `spares_memory`, graphs are also dropped when memory is about to run out.
    """

    initializer: bytes
    threads: int | None  # None: the default
    graph_bytes: int | None
    spares_memory: bool
    log_levels: LogLevels
    environment: Environment
    # the data that multiprocessing sends to its children; None on another machine
    preparation: dict[str, Any] | None
    device: bytes = b""  # the pickle of a `accelerator.DeviceSetup`, in a pool with devices
    remote: bool = (
        False  # the caller may be on another machine, behind an agent (see `cluster.agent`)
    )
    importing: frozenset[str] = frozenset()  # see `environment.PLACE`


class Follow(NamedTuple):
    """The environment of the next messages. They belong to an operation, or a backward, that began
    when the caller's environment had these changes."""

    environment: bytes  # see `mpgrad.environment`


class ModulesState(NamedTuple):
    """The parts of the user's modules that some functions use; see `mpgrad.pickling.state`. Workers
    keep the bytes of the last few states."""

    number: int
    pickled: bytes | None  # None if the worker has the bytes
    tensors: int  # how many of the captures belong to this state
    # the numbers, in the state's pickle, of objects that the function also has
    shared: Sequence[int]


class Define(NamedTuple):
    """A function as it is during one map.

    `pickled` is None if the worker already has the bytes of `code`. The captures are in one slot of
    shared memory. `slot` is its address and size, or None if the captures have no bytes. The places
    of captures are offsets in it. `state` is what the function uses of the user's modules; the
    state's captures come last. With `of_lone_calls`, each `Forward` is an operation of its own. It
    must not see what other operations have changed in the function.
    """

    function: int
    code: int
    pickled: bytes | None
    slot: tuple[int, int] | None
    captures: Sequence[TensorRef]
    gathers: bool = False  # move all tensors of its calls to the worker's device
    state: ModulesState | None = None
    of_lone_calls: bool = False


class Forget(NamedTuple):
    """Functions that are no longer needed, and pickles to forget. If such a pickle is needed again,
    the caller sends it again. Also forget sums of captures' gradients that are never collected."""

    functions: list[int]
    codes: list[int]
    nbytes: int  # bytes of the functions' captures
    # functions, each with a backward and its levels, as in `Collect`
    sums: list[tuple[int, int, tuple[Level, ...]]]


class ForwardCall(NamedTuple):
    """One call, on one item or on a bundle.

    `dependency_results` are results of other calls among the arguments, whose tensors come last.
    `bundle` has the arguments of each item, if many items are sent as one call. Items in `failed`
    do not run again.
    """

    call: int
    item: int  # index of the item, or of a bundle's first item
    structure: Structure
    tensors: Sequence[TensorRef]
    dependency_results: Parts = ()
    # the device that the call comes from; results on the worker's device go there
    origin: int = 0
    bundle: Parts = ()
    failed: Sequence[int] = ()


class Forward(NamedTuple):
    """Run these calls. With `stop_at_failure`, a failure ends the chunk, and its other calls do not
    run. Without it, the other items of a bundle also run.

    With `eager` options, the backward of a loss runs right after its forward. With `together`,
    results may wait for a while behind a slow call.
    """

    chunk: int
    function: int
    modes: Modes
    seed: int | None
    stop_at_failure: bool
    eager: EagerOptions | None
    together: bool
    calls: list[ForwardCall]


class EagerOptions(NamedTuple):
    """How a worker runs the backward of a loss right after its forward."""

    gradient: float  # the predicted gradient of the loss
    keeps: bool  # keep the graph, in case the real backward differs
    # send gradients of captures with each call's result; otherwise add them up until they are
    # collected
    apart: bool


class Recompute(NamedTuple):
    """Run a call again, only for its graph, because the first graph is lost. If `consumed`, the
    first graph was used up and dropped; then the worker also runs through the new one.

    `environment` is set if it is not that of the chunk; see `Follow`.
    """

    function: int
    modes: Modes
    seed: int | None
    call: ForwardCall
    consumed: bool
    environment: bytes | None = None

    @property
    def graph(self) -> int:
        """The number of the graph that it rebuilds."""
        return self.call.call


class BackwardCall(NamedTuple):
    """The backward of one call.

    `grads` are the gradients of the call's outputs, one output after another. `parts` has the
    number of gradients of each output; they are added up. Gradients are batches over `levels`,
    which are the first dimensions.

    `wanted` are the numbers of the inputs whose gradients are needed. With `apart`, the gradients
    of the captures come after those of the inputs; otherwise they are added up for `Collect`. If
    `graph` is a number, a graph of all these gradients is kept under it.

    `before` are steps that rebuild the call's graph if it is missing. The worker drops the graph
    after the `last` backward, which uses up all of it.
    """

    call: int
    graph_task: int
    keep: bool
    last: bool
    wanted: tuple[int, ...]
    captures: bool
    apart: bool
    levels: tuple[Level, ...]
    graph: int | None
    grads: Sequence[TensorRef]
    parts: list[int]
    before: Sequence[Recompute | RecomputeBackward] = ()


class RecomputeBackward(NamedTuple):
    """Run a backward only for the graph of its gradients. `environment` is as in `Recompute`."""

    modes: Modes
    call: BackwardCall
    environment: bytes | None = None

    @property
    def graph(self) -> int:
        """The number of the graph that it rebuilds."""
        assert self.call.graph is not None
        return self.call.graph


class Backwards(NamedTuple):
    """Run these backwards, under these modes."""

    chunk: int
    modes: Modes
    calls: list[BackwardCall]


class Collect(NamedTuple):
    """Send the capture gradients that were added up for a function in one backward. If `graph_task`
    is None, send those of eager backwards."""

    chunk: int
    function: int
    graph_task: int | None
    levels: tuple[Level, ...]


class Release(NamedTuple):
    """Drop the graphs of these calls, which are no longer needed."""

    calls: list[int]


class Stop(NamedTuple):
    waits: bool = True  # for non-daemonic processes that tasks have started


# --- worker to parent


class ReadyReport(NamedTuple):
    """The worker has started. `progress_record` is the address of a few int64 in shared memory; see
    `agent_messages.ProgressRecord`."""

    pid: int
    progress_record: int


class Failure(NamedTuple):
    """The pickled exception of a task, and the text of its traceback. `offset` is the offset of the
    item that failed in a bundle.

    `given` describes the arguments of the function in words.
    """

    error: bytes
    traceback: str
    phase: str
    offset: int = 0
    given: str = ""


class StartFailure(NamedTuple):
    failure: Failure


class Result(NamedTuple):
    """The outcome of one call.

    If its backward was an eager one, `gradients` are those of the inputs, and those of the captures
    if these are sent apart. `bundle` has the result of each item, if there are many; `failed` are
    the places of items that failed, which have no tensors. `unused` are inputs that the result does
    not depend on. They are numbered among the inputs that need gradients, and only those count that
    have a history or hooks in the caller. `strays` are the numbers of tensors that depend on a
    stray leaf, with a description of the leaf in words. `errors` are the numbers of tensors whose
    backward raises an error, see `errors_behind`, with the error's message.
    """

    structure: Structure
    tensors: Sequence[TensorRef]
    has_graph: bool
    gradients: Sequence[TensorRef | None] | None
    bundle: Parts = ()
    unused: Sequence[int] = ()
    strays: Sequence[tuple[int, str]] = ()
    errors: Sequence[tuple[int, str]] = ()
    failed: Sequence[tuple[int, Failure]] = ()


class WarningReport(NamedTuple):
    """A warning from a task: the pickled message (an instance of its category) and where it was
    raised. `module` is None if it is not known."""

    message: bytes
    file: str
    line: int
    module: str | None


class MissingGraph(NamedTuple):
    """The outcome of a backward whose graph was dropped before it came, to save memory."""


class Results(NamedTuple):
    """The outcomes of the calls of a chunk that ran. `mutated` is true if a call wrote into a
    captured tensor.

    `seconds` is the whole time, `own_seconds` the part in the function, and `eager_seconds` the
    part in eager backwards. The rest is overhead of the worker. Failed calls do not count: how soon
    a call fails does not tell how long others take.

    `dropped` are the calls whose graphs were dropped, and `graph_bytes` is the size of the kept
    graphs. `reached` are the captures that results depend on, each once. They are numbered among
    the captures that need gradients, and only those count that have a history or hooks in the
    caller.

    With `more` these are the outcomes of the first calls only, because the next one takes long.
    Another answer follows.
    """

    chunk: int
    outcomes: list[Result | Failure]
    seconds: float
    own_seconds: float
    eager_seconds: float
    mutated: bool
    warned: list[WarningReport]
    dropped: list[int]
    graph_bytes: int
    reached: Sequence[int] = ()
    more: bool = False


class Gradients(NamedTuple):
    """The outcomes of backwards. `reached` has, by position of the outcome, the captures on which
    its differentiable gradients depend, as in `Results`, which also explains `more`. `errors` has,
    by position, the errors that the differentiable gradients lead to, as in `Result`. They are
    numbered among these gradients."""

    chunk: int
    outcomes: list[Sequence[TensorRef | None] | Failure | MissingGraph]
    warned: list[WarningReport]
    dropped: list[int]
    graph_bytes: int
    reached: Sequence[tuple[int, Sequence[int]]] = ()
    errors: Sequence[tuple[int, Sequence[tuple[int, str]]]] = ()
    more: bool = False


class PrintedText(NamedTuple):
    """The text that a task wrote to "stdout" or "stderr"."""

    stream: str
    text: str


class LoggedRecord(NamedTuple):
    """The pickle of a `logging.LogRecord`."""

    record: bytes


class CollectedSums(NamedTuple):
    """The sums for a `Collect`, and the number of calls that are in them."""

    chunk: int
    grads: Sequence[TensorRef | None] | Failure
    calls: int


# --- which tensor belongs to which item


SCALARS = frozenset({type(None), bool, int, float})
LONGEST_TEXT, MOST_BITS = 256, 2048  # larger values count as bytes of a message


def is_plain(value: Any) -> bool:
    """Return whether the value can be a part of a message without its own pickle."""
    kind = type(value)
    if kind is str:
        return len(value) <= LONGEST_TEXT
    return kind in SCALARS and (kind is not int or value.bit_length() <= MOST_BITS)


def plain_structure(
    values: Sequence[object], mark: Callable[[object], tuple[int] | None] = lambda value: None
) -> tuple[tuple[object, ...], list[torch.Tensor]] | None:
    """Return `values` with an ellipsis for each tensor, and the tensors. Return None if any value
    has to be pickled by itself.

    `mark` returns the placeholder for a value that is neither a tensor nor plain, or None if it
    must be pickled.
    """
    shape: list[object] = []
    tensors: list[torch.Tensor] = []
    for value in values:
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            shape.append(...)
            tensors.append(value)
        elif is_plain(value):
            shape.append(value)
        elif (marked := mark(value)) is not None:
            shape.append(marked)
        else:
            return None
    return (tuple(shape), tensors) if need_no_pickle(tensors) else None


def with_tensors(
    shape: Iterable[Any], tensors: Iterator[torch.Tensor], marked: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """Undo `plain_structure`. `marked` are the values for the marks, by number."""
    values: list[Any] = []
    for each in shape:
        if each is ...:
            values.append(next(tensors))
        elif type(each) is tuple:
            (number,) = each
            values.append(marked[number])
        else:
            values.append(each)
    return tuple(values)


def owners(parts: Parts) -> list[int]:
    """Return the item of each tensor."""
    return [item for item, (_, count) in enumerate(parts) for _ in range(count)]


def split(
    parts: Parts, tensors: Iterable[torch.Tensor]
) -> Iterator[tuple[Structure, list[torch.Tensor]]]:
    """Yield the structure and the tensors of each item."""
    rest = iter(tensors)
    return ((shape, list(itertools.islice(rest, count))) for shape, count in parts)


Message = (
    NewSlab
    | CarriedSlots
    | LackingMemory
    | ProgressRecordLocation
    | DroppedSlabs
    | MissingSlabs
    | ReturnedSlots
    | Define
    | Forget
    | Forward
    | Backwards
    | Collect
    | Release
    | Follow
    | Start
    | Stop
    | CrashTraceback
    | ReadyReport
    | StartFailure
    | Results
    | Gradients
    | CollectedSums
    | PrintedText
    | LoggedRecord
    | SlotTrial
    | TrialOutcome
    | DirectTransfer
    | Record
    | ChunkTrace
)
