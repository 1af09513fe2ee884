"""What parent and worker say to each other: one frozen type per hop, many messages in a frame.

    parent ► worker   Start Follow Define Forget Forward Backwards Collect Release Stop
    worker ► parent   CrashTraceback ReadyReport StartFailure Results Gradients CollectedSums
                      PrintedText LoggedRecord
    both ways         NewSlab CarriedSlots DroppedSlabs MissingSlabs ReturnedSlots
    devices           SlotTrial DirectTransfer to the worker, TrialOutcome to the parent
    timelines         Record to the worker, ChunkTrace to the parent
An agent says something of its own, too: see `agent_messages`.

Many items, of a bundle or of dependencies' results, have their tensors in a row. One record,
`Parts`, says which belong to which item; it goes with the tensors, as `ForwardCall.bundle` and
`Result.bundle`, and all else is made of it:

    tensors   a  b | c | | d  e            parts   [(shape, 2), (shape, 1), (shape, 0), (shape, 2)]
    owners    0  0   1     3  3
NamedTuples rather than dataclasses: they are as frozen, and pickle in a third of the time. Both
sides.
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

# the one message that is a signal: the worker, stuck in a call, is to leave its stack and end
TRACEBACK_SIGNAL = signal.SIGUSR2

# How the tensors of arguments or of a result go together: None: one bare tensor; a number: that
# many tensors in a row (positional arguments, or a tuple); bytes: the pickle of (args, kwargs), or
# of the result, without its tensors; a tuple: these as they are, (args, kwargs) or (result,), with
# an ellipsis for each tensor, and (number,) for the result of a dependency: see `plain_structure`.
Structure = int | bytes | tuple[Any, ...] | None
# Of each of many items, or results, whose tensors travel in a row: their structure and number. See
# above.
Parts = Sequence[tuple[Structure, int]]
# What a worker did: its phase, position of the call, offset of the item, first and last moment.
Span = tuple[str, int, int, int, int]


# --- both ways: memory


class NewSlab(NamedTuple):
    """The sender made shared memory; its file descriptor travels with the frame, or it has a
    handle, if it is on a device."""

    number: int
    nbytes: int
    handle: Handle | None = None
    code: int = 0  # of the device


class CarriedSlots(NamedTuple):
    """First in its frame, where memory is not shared: slots whose bytes stand behind the payload,
    one after another."""

    slots: list[tuple[int, int]]  # address and size


class DroppedSlabs(NamedTuple):
    """These slabs of the sender are no more."""

    numbers: list[int]


class MissingSlabs(NamedTuple):
    """The sender had no descriptor free to receive these slabs with, when they were made; it would
    have them again."""

    numbers: list[int]


class ReturnedSlots(NamedTuple):
    """Slots that the receiver lent: each address, and how many times it had been received."""

    slots: list[tuple[int, int]]


class SlotTrial(NamedTuple):
    """Whether the receiver can read the sender's slots on a device: at `address`, `nbytes` long,
    there should be `mark`."""

    address: int
    nbytes: int
    mark: bytes


class TrialOutcome(NamedTuple):
    """Why the sender cannot read what `SlotTrial` named, or ""; and in return a slot of its own,
    where it can."""

    refusal: str
    back: SlotTrial | None


class DirectTransfer(NamedTuple):
    """From here on results may travel as slots on the device: both sides can read each other's."""


# --- timelines


class Record(NamedTuple):
    """Say what you do from now on; or, not `on`, no more."""

    on: bool


class ChunkTrace(NamedTuple):
    """What was done for a chunk, before its answer in the same frame.

    Times are nanoseconds of the worker's `time.monotonic_ns`: on one machine that is the caller's
    clock too.
    """

    chunk: int
    done: int  # calls of it, the first ones; the others were skipped
    began: int
    ended: int
    spans: list[Span]


# --- parent to worker


class Logger(NamedTuple):
    """What a task sees of one of the caller's."""

    level: int = 0
    disabled: bool = False
    propagate: bool = True


class LogLevels(NamedTuple):
    """The caller's, of `logging`."""

    loggers: dict[str, Logger]  # those that are not as they were made
    names: dict[int, str]
    disabled: int  # all up to this one, by `logging.disable`


class Start(NamedTuple):
    """The first message. `initializer` is the pickle of (function or None, arguments); the rest is
    as in the parent.

    Graphs that take more than `graph_bytes` together are dropped, the largest first; None for no
    limit. `spares_memory`: others are dropped, too, when memory is about to end.
    """

    initializer: bytes
    threads: int | None  # None: as nobody has said
    graph_bytes: int | None
    spares_memory: bool
    log_levels: LogLevels
    environment: Environment
    # what multiprocessing tells its children; not on another machine
    preparation: dict[str, Any] | None
    device: bytes = b""  # the pickle of a `accelerator.DeviceSetup`, in a pool with devices
    remote: bool = (
        False  # the caller may be on another machine, behind an agent (see `cluster.agent`)
    )


class Follow(NamedTuple):
    """What comes next is of an operation, or a backward, that began when the caller's environment
    had these changes."""

    environment: bytes  # see `mpgrad.environment`


class ModulesState(NamedTuple):
    """What some functions use of the user's modules, see `mpgrad.pickling.state`; of the last few
    workers keep the bytes."""

    number: int
    pickled: bytes | None  # None where the worker has them
    tensors: int  # how many captures are its own


class Define(NamedTuple):
    """A function as it is during one map.

    `pickled` is None where the worker has the bytes of `code` already. The captures lie in one slot
    of shared memory, whose address and size are `slot` (None where they are empty); their places
    are offsets in it. `state` is what the function uses of the user's modules, whose captures come
    last.
    """

    function: int
    code: int
    pickled: bytes | None
    slot: tuple[int, int] | None
    captures: Sequence[TensorRef]
    gathers: bool = False  # all tensors of its calls go to the worker's device
    state: ModulesState | None = None


class Forget(NamedTuple):
    """Functions that no call needs any more, and pickles that will be sent again if they are wanted
    again."""

    functions: list[int]
    codes: list[int]
    nbytes: int  # of the functions' captures


class ForwardCall(NamedTuple):
    """`dependency_results`: results of other calls among the arguments, whose tensors come last.

    `bundle`: the arguments of each item, where many travel as one call.
    """

    call: int
    item: int  # its index; in a bundle that of the first
    structure: Structure
    tensors: Sequence[TensorRef]
    dependency_results: Parts = ()
    origin: int = 0  # the device it comes from: where results go that lie on the worker's device
    bundle: Parts = ()


class Forward(NamedTuple):
    """Run these calls. After a failure the rest of the chunk is left out where `stop_at_failure`.

    `eager`: where a result is a loss, its backward is run right after it.
    """

    chunk: int
    function: int
    modes: Modes
    seed: int | None
    stop_at_failure: bool
    eager: EagerOptions | None
    calls: list[ForwardCall]


class EagerOptions(NamedTuple):
    """How backwards of losses are run right after their forwards."""

    gradient: float  # that is predicted
    keeps: bool  # the graph, for a backward that is another one
    # gradients of captures come with each call's result; else they are added up until they are
    # collected
    apart: bool


class Recompute(NamedTuple):
    """Run a call for its graph only: the first one is lost. Or it was dropped where `consumed`:
    then this one is run through.

    `environment`: another one than that of the chunk, see `Follow`.
    """

    function: int
    modes: Modes
    seed: int | None
    call: ForwardCall
    consumed: bool
    environment: bytes | None = None


class BackwardCall(NamedTuple):
    """The gradients of one call's outputs; `wanted` are the numbers of the inputs whose gradients
    are needed.

    Those of the captures come after them where `apart`, and are added up for `Collect` otherwise.
    Where `graph` is a number, a graph of all these gradients is kept under it. `grads` are the
    parts of each output's gradient, to be added up, one output after another: of each as many as
    `parts` says. Gradients are batches over `levels`, which are in front. `before` makes the call's
    graph again where it is missing. After the `last` one, which leaves nothing of it, it is
    dropped.
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
    """Run a backward for the graph of its gradients only. `environment`: as in `Recompute`."""

    modes: Modes
    call: BackwardCall
    environment: bytes | None = None


class Backwards(NamedTuple):
    """Run these backwards, under these modes."""

    chunk: int
    modes: Modes
    calls: list[BackwardCall]


class Collect(NamedTuple):
    """Hand over the capture gradients added up for a function in one backward; without
    `graph_task`, in eager ones."""

    chunk: int
    function: int
    graph_task: int | None
    levels: tuple[Level, ...]


class Release(NamedTuple):
    """The graphs of these calls are not needed any more."""

    calls: list[int]


class Stop(NamedTuple):
    waits: bool = True  # for processes that tasks have started and that are no daemons


# --- worker to parent


class ReadyReport(NamedTuple):
    """The worker has started; at `progress_record` in shared memory lie a few int64, see
    `agent_messages.ProgressRecord`."""

    pid: int
    progress_record: int


class Failure(NamedTuple):
    """An exception of a task, pickled, and the text of its traceback; in a bundle, that of the item
    at `offset`.

    `given`: what the function was given, in words.
    """

    error: bytes
    traceback: str
    phase: str
    offset: int = 0
    given: str = ""


class StartFailure(NamedTuple):
    failure: Failure


class Result(NamedTuple):
    """`gradients`: of the inputs, and of the captures where these come apart, where the backward
    was an eager one.

    `bundle`: the result of each item, where there are many. `unused`: inputs that it does not
    depend on, by number among those that need gradients, where they have a history or hooks in the
    caller. `strays`: tensors that depend on a leaf that is neither an input nor a capture, by
    number, and that in words.
    """

    structure: Structure
    tensors: Sequence[TensorRef]
    has_graph: bool
    gradients: Sequence[TensorRef | None] | None
    bundle: Parts = ()
    unused: Sequence[int] = ()
    strays: Sequence[tuple[int, str]] = ()


class WarningReport(NamedTuple):
    """A warning that a task gave: the pickle of its message, an instance of its category, and where
    it was given."""

    message: bytes
    file: str
    line: int


class MissingGraph(NamedTuple):
    """The outcome of a backward whose graph was dropped, for want of memory, before it came."""


class Results(NamedTuple):
    """One outcome for each call of the chunk that ran; `mutated`: a call wrote into a captured
    tensor.

    Of the `seconds`, `own_seconds` went into the function, `eager_seconds` into eager backwards;
    the rest is our work. Failed calls do not count: how soon one fails does not tell how long
    others take.

    `dropped` are the calls whose graphs were dropped, `graph_bytes` what the others take.
    `reached`: captures that results depend on, each once, by number among those that need
    gradients, where they have a history or hooks in the caller.
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


class Gradients(NamedTuple):
    """`reached`: by position, what gradients that are to be differentiated depend on, of captures
    as those of `Results`."""

    chunk: int
    outcomes: list[Sequence[TensorRef | None] | Failure | MissingGraph]
    warned: list[WarningReport]
    dropped: list[int]
    graph_bytes: int
    reached: Sequence[tuple[int, Sequence[int]]] = ()


class PrintedText(NamedTuple):
    """What a task wrote to "stdout" or "stderr"."""

    stream: str
    text: str


class LoggedRecord(NamedTuple):
    """The pickle of a `logging.LogRecord`."""

    record: bytes


class CollectedSums(NamedTuple):
    """The sums, and of how many calls."""

    chunk: int
    grads: Sequence[TensorRef | None] | Failure
    calls: int


# --- which tensor belongs to which item


SCALARS = frozenset({type(None), bool, int, float})
LONGEST_TEXT, MOST_BITS = 256, 2048  # what is larger counts as bytes of a message


def is_plain(value: Any) -> bool:
    """Whether it can be a part of a message as it is."""
    kind = type(value)
    if kind is str:
        return len(value) <= LONGEST_TEXT
    return kind in SCALARS and (kind is not int or value.bit_length() <= MOST_BITS)


def plain_structure(
    values: Sequence[object], mark: Callable[[object], tuple[int] | None] = lambda value: None
) -> tuple[tuple[object, ...], list[torch.Tensor]] | None:
    """`values` with an ellipsis for each tensor, and the tensors; None where anything has to be
    pickled by itself.

    `mark`: gives what stands for a value that is neither a tensor nor plain, if anything may.
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
    """The values again, which `plain_structure` has taken apart; `marked`: by number, those that
    were."""
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
    """The item of each tensor."""
    return [item for item, (_, count) in enumerate(parts) for _ in range(count)]


def split(
    parts: Parts, tensors: Iterable[torch.Tensor]
) -> Iterator[tuple[Structure, list[torch.Tensor]]]:
    """The structure and the tensors of each item."""
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
