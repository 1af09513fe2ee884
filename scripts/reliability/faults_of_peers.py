"""What worker pools do when something goes wrong: mpgrad and its peers under the same faults, by the same code.

Peers are torch.multiprocessing.Pool, concurrent.futures.ProcessPoolExecutor, joblib with loky, and Ray; the last two only
where they are installed. All run as they come: their own start method, chunks and number of retries. Every fault gets a fresh
process per peer, and every step in it a time limit, so that a hang is a result like any other.

    fresh process: start ──► fault ──► map ──► next map ──► close ──► exit     each step noted in a file as it begins and ends
    this process:  watches the file and all descendants; a step beyond the limit "hangs"; counts what is left behind

    python scripts/reliability/faults_of_peers.py --processes 2
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch
import torch.multiprocessing
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

from common import at_least_1, surroundings
from descendants import MARK, Descendants

# mpgrad is imported only where it is the peer, or afterwards: what the others do must not depend on it

EPILOG = "exit status: 0 if everything was measured, whatever was found, 2 for wrong arguments"

ITEMS = 20
VICTIM = 7  # the item that something happens to
QUICK_CALL = 0.02  # seconds
CALL = 0.1
LONG_CALL = 60.0  # beyond every limit
BUSY_CALL = 5.0  # after the parent's end, for workers that finish what they are at
TIME_LIMIT = 1.0  # of a call, where there is one
AFTER_BEGINNING = 0.5  # seconds from the beginning of a call to its worker's end: quick calls are done by then
START_LIMIT = 60.0  # seconds; Ray starts a small cluster
LEAK_LIMIT = 120.0
PATIENCE = 5.0  # seconds for processes to go after the end of their parent
PATIENCE_FOR_ORPHANS = 20.0
SLOW = 1.0  # seconds beyond which a close is worth a word
LOOK = 0.05  # seconds between two looks at the descendants
MAPS = 300
WARM_UP_MAPS = 10
LARGE = 1 << 20  # floats: 4 MB
MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")
Record = dict[str, Any]


# --- the peers


class Peer(Protocol):
    """A pool as its documentation shows it. Constructed with the number of workers."""

    kind_of_limit: str  # what `map_within` has a limit for

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]: ...

    def map_within(self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]: ...

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any: ...

    def result(self, handle: Any, seconds: float) -> Any:
        """Raises NotYetError where the result has not come within so many seconds."""
        ...

    def close(self) -> None:
        """What leaving the `with` block does, where there is one."""
        ...


class NotYetError(Exception):
    pass


class TorchPool:
    kind_of_limit = "the wait"

    def __init__(self, processes: int) -> None:
        self._pool = torch.multiprocessing.Pool(processes)

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return self._pool.map(function, items)

    def map_within(self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]:
        return self._pool.map_async(function, items).get(seconds)

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        return self._pool.apply_async(function, (item,))

    def result(self, handle: Any, seconds: float) -> Any:
        handle.wait(seconds)
        if not handle.ready():
            raise NotYetError
        return handle.get()

    def close(self) -> None:
        self._pool.__exit__(None, None, None)


class Futures:
    """What peers whose handles are futures have in common."""

    def result(self, handle: concurrent.futures.Future[Any], seconds: float) -> Any:
        concurrent.futures.wait([handle], seconds)
        if not handle.done():
            raise NotYetError
        return handle.result()


class Executor(Futures):
    kind_of_limit = "the wait"

    def __init__(self, processes: int) -> None:
        self._executor = concurrent.futures.ProcessPoolExecutor(processes)

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return list(self._executor.map(function, items))

    def map_within(self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]:
        return list(self._executor.map(function, items, timeout=seconds))

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        return self._executor.submit(function, item)

    def close(self) -> None:
        self._executor.__exit__(None, None, None)


class Joblib(Futures):
    """Every map is a `Parallel` of its own, which takes the workers of the one before, or new ones if those are broken."""

    kind_of_limit = "a call"

    def __init__(self, processes: int) -> None:
        self._joblib = importlib.import_module("joblib")
        self._loky = importlib.import_module("joblib.externals.loky")
        self._processes = processes

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return self._parallel(function, items, None)

    def map_within(self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]:
        return self._parallel(function, items, seconds)

    def _parallel(self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float | None) -> list[Any]:
        parallel = self._joblib.Parallel(n_jobs=self._processes, backend="loky", timeout=seconds)
        results: list[Any] = parallel(self._joblib.delayed(function)(item) for item in items)
        return results

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        return self._loky.get_reusable_executor(max_workers=self._processes).submit(function, item)

    def close(self) -> None:
        pass  # the workers stay for the next `Parallel`, until they have been idle for long or the program ends


class Ray:
    kind_of_limit = "the wait"  # and `ray.cancel(force=True)`, written by hand, for what then still runs

    def __init__(self, processes: int) -> None:
        self._ray = importlib.import_module("ray")
        self._ray.init(
            num_cpus=processes,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=512 * MIB,
            _temp_dir=str(Path(os.environ["TMPDIR"]).parent / "ray"),  # logs of its own, that are meant to stay
        )

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        results: list[Any] = self._ray.get(self._all(function, items))
        return results

    def map_within(self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]:
        results: list[Any] = self._ray.get(self._all(function, items), timeout=seconds)
        return results

    def _all(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        task = self._task(function)
        return [task.remote(item) for item in items]

    def _task(self, function: Callable[[Any], Any]) -> Any:
        if isinstance(function, functools.partial):  # it takes functions and classes, not every callable
            return self._ray.remote(lambda item: function(item))
        return self._ray.remote(function)

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        return self._task(function).remote(item)

    def result(self, handle: Any, seconds: float) -> Any:
        try:
            return self._ray.get(handle, timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            raise NotYetError from None

    def close(self) -> None:
        self._ray.shutdown()


class Mpgrad(Futures):
    kind_of_limit = "a call"

    def __init__(self, processes: int) -> None:
        self._pool = importlib.import_module("mpgrad").Pool(processes)

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        results: list[Any] = self._pool.map(function, items)
        return results

    def map_within(self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]:
        results: list[Any] = self._pool.map(function, items, timeout=seconds)
        return results

    def submit(self, function: Callable[[Any], Any], item: Any) -> Any:
        return self._pool.submit(function, item)

    def close(self) -> None:
        self._pool.__exit__(None, None, None)


class Kind(NamedTuple):
    make: Callable[[int], Peer]
    distribution: str | None  # None: comes with Python
    slowness: int = 1  # what the time limit of a step is multiplied with


PEERS = {
    "torch.multiprocessing.Pool": Kind(TorchPool, "torch"),
    "ProcessPoolExecutor": Kind(Executor, None),
    "joblib/loky": Kind(Joblib, "joblib"),
    "Ray": Kind(Ray, "ray", slowness=3),  # each new worker needs seconds, and it tries three more: not to be called a hang
    "mpgrad": Kind(Mpgrad, "mpgrad"),
}


def version_of(name: str) -> str | None:
    distribution = PEERS[name].distribution
    if distribution is None:
        return f"Python {platform.python_version()}"
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


# --- what workers run; a folder is where they leave word


def doubled(x: Tensor) -> Tensor:
    return x * 2


def copied(x: Tensor) -> Tensor:
    return x.clone()


def weighted(weight: Tensor, x: Tensor) -> Tensor:
    return (x * weight).exp().sum()


def weighted_with_word(folder: Path, weight: Tensor, x: Tensor) -> Tensor:
    leave_word(folder, "pid", str(os.getpid()))
    return weighted(weight, x)


def own_pid(item: int) -> int:
    time.sleep(CALL)  # so that no worker takes all of them
    return os.getpid()


def stuck_once(folder: Path, seconds: float, item: tuple[int, Tensor]) -> Tensor:
    """All calls take so many seconds, except that the victim's first run never ends by itself."""
    number, x = item
    if number == VICTIM and first(folder):
        leave_word(folder, "pid", str(os.getpid()))
        time.sleep(LONG_CALL)
    time.sleep(seconds)
    return x * 2


def exiting(item: tuple[int, Tensor]) -> Tensor:
    number, x = item
    if number == VICTIM:
        os._exit(3)
    time.sleep(QUICK_CALL)
    return x * 2


def crashing(item: tuple[int, Tensor]) -> Tensor:
    number, x = item
    if number == VICTIM:
        ctypes.string_at(0)
    time.sleep(QUICK_CALL)
    return x * 2


def endless(folder: Path, item: tuple[int, Tensor]) -> Tensor:
    number, x = item
    if number == VICTIM:
        ends = time.monotonic() + LONG_CALL
        while time.monotonic() < ends:
            leave_word(folder, "alive", str(os.getpid()))
            time.sleep(QUICK_CALL)
    time.sleep(QUICK_CALL)
    return x * 2


class OddError(ValueError):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class TwoPartsError(Exception):
    """Can be pickled, but not loaded again: pickle calls the class with one argument. Nothing unusual in a library."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}, {detail}")


def raising(folder: Path, item: tuple[int, Tensor]) -> Tensor:
    number, x = item
    with (folder / "begun").open("a") as file:
        file.write(".")
    time.sleep(CALL)
    if number == 2:
        raise OddError(number)
    return x * 2


def raising_with_lock(item: tuple[int, Tensor]) -> Tensor:
    number, x = item
    if number == VICTIM:
        error = RuntimeError("the original text")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error
    return x * 2


def raising_two_parts(item: tuple[int, Tensor]) -> Tensor:
    number, x = item
    if number == VICTIM:
        raise TwoPartsError(number, "the original text")
    return x * 2


def busy(folder: Path, item: int) -> int:
    leave_word(folder, f"busy-{item}", str(os.getpid()))
    ends = time.monotonic() + BUSY_CALL
    while time.monotonic() < ends:  # computes, as a worker does that has no time to look whether its parent is there
        pass
    return item


def waiting(folder: Path, x: Tensor) -> Tensor:
    leave_word(folder, "pid", str(os.getpid()))
    time.sleep(CALL)
    return x * 2


def first(folder: Path) -> bool:
    """Whether nobody has asked before, in whatever process."""
    try:
        os.close(os.open(folder / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def leave_word(folder: Path, name: str, word: str) -> None:
    unfinished = folder / f"{name}.{os.getpid()}"
    unfinished.write_text(word)
    unfinished.rename(folder / name)


def word(folder: Path, name: str) -> str:
    while not (folder / name).exists():
        time.sleep(1e-3)
    return (folder / name).read_text()


# --- a case: one fault and one peer, in a process of its own


class Log:
    """Steps as they begin and end, for the process that watches: what has begun and not ended is what hangs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **entry: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry | {"at": time.monotonic()}) + "\n")

    @contextlib.contextmanager
    def step(self, name: str, limit: float | None = None) -> Iterator[Step]:
        self.write(begin=name, limit=limit)
        step = Step()
        yield step
        self.write(end=name, text=step.text, outcome=step.outcome, **step.details)


@dataclass
class Step:
    outcome: str = ""  # right, wrong, an exception's type, or nothing to tell
    text: str = ""
    details: Record = field(default_factory=dict)

    def take(self, run: Callable[[], Any], right: Callable[[Any], bool]) -> Any:
        """Run it and note what comes; the value, or the exception."""
        began = time.monotonic()
        try:
            value = run()
        except Exception as error:
            self.outcome = self.text = type(error).__name__
            self.details["error"] = str(error)[:1000]
            value = error
        else:
            self.outcome = self.text = "right" if right(value) else "wrong"
        self.details["seconds"] = time.monotonic() - began
        return value

    def say(self, more: str) -> None:
        self.text = f"{self.text}{more}"


@dataclass
class Case:
    peer: Peer
    processes: int
    folder: Path
    log: Log
    trial: int
    limit: float
    make: Callable[[int], Peer]

    def pids(self) -> list[int]:
        found: set[int] = set()
        while len(found) < self.processes:
            found |= set(self.peer.map(own_pid, range(4 * self.processes)))
        return sorted(found)

    def map_steps(self, function: Callable[[Any], Any], since: Callable[[], float] | None = None, word: str = "") -> Any:
        """A map of numbered items, and what the pool is good for afterwards; seconds `since` then, or since the map began."""
        with self.log.step("map") as step:
            began = time.monotonic()
            value = step.take(lambda: self.peer.map(function, numbered()), is_doubled)
            step.details["after"] = time.monotonic() - (since() if since else began)
            step.say(f" {step.details['after']:.2g} s{word}" if since else "")
        self.next_map()
        return value

    def next_map(self) -> None:
        with self.log.step("next map") as step:
            step.take(lambda: self.peer.map(doubled, tensors()), is_doubled)
            step.text = "pool goes on" if step.outcome == "right" else f"next map: {step.outcome}"


def tensors() -> list[Tensor]:
    return [torch.full((number % 5 + 1,), float(number)) for number in range(ITEMS)]


def numbered() -> list[tuple[int, Tensor]]:
    return list(enumerate(tensors()))


def is_doubled(results: Any) -> bool:
    return len(results) == ITEMS and all(torch.equal(y, x * 2) for x, y in zip(tensors(), results, strict=True))


def killer(folder: Path, delay: float) -> Callable[[], float]:
    """Kill the worker that leaves word, so long after; returns what tells when that was."""
    moments = []

    def kill() -> None:
        pid = int(word(folder, "pid"))
        time.sleep(delay)
        moments.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return lambda: moments[0] if moments else float("nan")


# --- the faults


def killed_while_idle(case: Case) -> None:
    pids = case.pids()
    time.sleep(AFTER_BEGINNING)
    moment = time.monotonic()
    os.kill(pids[case.trial % len(pids)], signal.SIGKILL)
    case.map_steps(doubled_item, lambda: moment, " after the kill")


def doubled_item(item: tuple[int, Tensor]) -> Tensor:
    return item[1] * 2


def killed_in_a_call(case: Case) -> None:
    case.map_steps(
        functools.partial(stuck_once, case.folder, QUICK_CALL), killer(case.folder, AFTER_BEGINNING), " after the kill"
    )


def killed_among_others(case: Case) -> None:
    with case.log.step("submit") as step:
        function = functools.partial(stuck_once, case.folder, CALL)
        handles = [case.peer.submit(function, item) for item in numbered()]
        killer(case.folder, AFTER_BEGINNING)
        deadline = time.monotonic() + case.limit / 2
        came = [outcome_of(case.peer, handle, deadline, x * 2) for handle, x in zip(handles, tensors(), strict=True)]
        others = came[:VICTIM] + came[VICTIM + 1 :]
        counts = {outcome: others.count(outcome) for outcome in dict.fromkeys(others)}
        step.outcome = came[VICTIM]
        step.details |= {"of_each": came}
        step.text = f"its own: {came[VICTIM]}; others: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    case.next_map()


def outcome_of(peer: Peer, handle: Any, deadline: float, expected: Tensor) -> str:
    try:
        value = peer.result(handle, max(0.1, deadline - time.monotonic()))
    except NotYetError:
        return "never comes"
    except Exception as error:
        return type(error).__name__
    return "right" if torch.equal(value, expected) else "wrong"


def always_exits(case: Case) -> None:
    case.map_steps(exiting)


def always_crashes(case: Case) -> None:
    case.map_steps(crashing)


def too_long(case: Case) -> None:
    function = functools.partial(endless, case.folder)
    with case.log.step("map") as step:
        step.take(lambda: case.peer.map_within(function, numbered(), TIME_LIMIT), is_doubled)
        step.say(f" after {step.details['seconds']:.2g} s (limit for {case.peer.kind_of_limit})")
    with case.log.step("a look at the call") as step:
        time.sleep(1)
        before = last_word(case.folder)
        time.sleep(1)
        step.outcome = step.text = "call runs on" if last_word(case.folder) != before else "call ended"
    case.next_map()


def last_word(folder: Path) -> int:
    return (folder / "alive").stat().st_mtime_ns


def raises(case: Case) -> None:
    with case.log.step("map") as step:
        error = step.take(lambda: case.peer.map(functools.partial(raising, case.folder), numbered()), is_doubled)
        shown = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
        has_traceback = "in raising" in shown and "raise OddError(number)" in shown
        step.details |= {"is_original_type": isinstance(error, OddError), "number": getattr(error, "number", None)}
        step.details |= {"remote_traceback": has_traceback, "notes": getattr(error, "__notes__", [])}
        step.say("" if isinstance(error, OddError) else " (not the type)")
        step.say(" with remote traceback" if has_traceback else " without remote traceback")
    with case.log.step("a look at the others") as step:
        time.sleep(2 * CALL * ITEMS / case.processes)
        begun = len((case.folder / "begun").read_text())
        step.details["begun"] = begun
        step.outcome = step.text = f"{begun} of {ITEMS} calls ran" if begun < ITEMS else "no others cancelled"
    case.next_map()


def cannot_be_pickled(case: Case) -> None:
    raises_oddly(case, raising_with_lock)


def cannot_be_loaded(case: Case) -> None:
    raises_oddly(case, raising_two_parts)


def raises_oddly(case: Case, function: Callable[[Any], Any]) -> None:
    with case.log.step("map") as step:
        error = step.take(lambda: case.peer.map(function, numbered()), is_doubled)
        shown = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
        step.details["names_the_original"] = "the original text" in shown
        step.say(", names the original" if "the original text" in shown else ", hides the original")
    case.next_map()


def closure(case: Case) -> None:
    factor = torch.tensor(2.0)
    with case.log.step("map") as step:
        step.take(lambda: case.peer.map(lambda x: x * factor, tensors()), is_doubled)
    case.next_map()


def parent_killed(case: Case) -> None:
    for number in range(case.processes):
        case.peer.submit(functools.partial(busy, case.folder), number)
    for number in range(case.processes):
        word(case.folder, f"busy-{number}")
    case.log.write(begin="the parent's end", limit=None)
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted(case: Case) -> None:
    moments = []

    def interrupt() -> None:
        word(case.folder, "pid")
        time.sleep(2 * CALL)
        moments.append(time.monotonic())
        os.killpg(0, signal.SIGINT)  # as a terminal does it: to everything in the foreground

    with case.log.step("map") as step:
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            case.peer.map(functools.partial(waiting, case.folder), tensors() * 5)
            step.outcome = step.text = "goes unnoticed"
        except (Exception, KeyboardInterrupt) as error:
            step.details |= {"error": str(error)[:1000], "after": time.monotonic() - moments[0]}
            step.outcome = type(error).__name__
            step.text = f"{step.outcome} after {step.details['after']:.2g} s"
    case.next_map()


def differentiated(case: Case) -> None:
    gradients(case, killed=False)


def killed_before_backward(case: Case) -> None:
    gradients(case, killed=True)


def gradients(case: Case, killed: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(number % 5 + 1, requires_grad=True) for number in range(ITEMS)]
    weight = torch.tensor(0.5, requires_grad=True)
    serial = torch.stack([weighted(weight, x) for x in leaves]).sum()
    expected = torch.autograd.grad(serial, [*leaves, weight])
    with case.log.step("map") as step:
        results = step.take(
            lambda: case.peer.map(functools.partial(weighted_with_word, case.folder, weight), leaves),
            lambda results: torch.equal(torch.stack(results).sum(), serial),
        )
        step.text = "" if step.outcome == "right" else f"map: {step.outcome}"
        if isinstance(results, Exception):
            step.say(f" ({textwrap.shorten(str(results), 70, placeholder='...')})")
            return
    if killed:
        os.kill(int(word(case.folder, "pid")), signal.SIGKILL)
    with case.log.step("backward") as step:
        step.take(lambda: torch.stack(results).sum().backward(), lambda none: True)  # type: ignore[no-untyped-call]
        if step.outcome == "right":
            found = [leaf.grad for leaf in (*leaves, weight)]
            step.outcome = verdict(found, expected)
            step.text = f"{step.outcome} gradients" + (", and no error" if step.outcome != "right" else "")
            step.say(f", {step.details['seconds']:.2g} s after the kill" if killed else "")
        else:
            step.text = f"backward: {step.outcome}"
    case.next_map()


def verdict(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> str:
    if all(gradient is None for gradient in found):
        return "no"
    same = [ours is not None and torch.allclose(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    return "right" if all(same) else "wrong"


def leaks(case: Case) -> None:
    x = torch.ones(LARGE)
    with case.log.step("maps", LEAK_LIMIT) as step, torch.no_grad():
        for _ in range(WARM_UP_MAPS):
            case.peer.map(copied, [x])
        before = holdings()
        began = time.monotonic()
        right = all(torch.equal(case.peer.map(copied, [x])[0], x) for _ in range(MAPS))
        seconds = time.monotonic() - began
        after = holdings()
        rise = {key: after[key] - before[key] for key in before}
        step.outcome = "right" if right else "wrong"
        step.details |= {"before": before, "after": after, "rise": rise, "ms_per_map": 1e3 * seconds / MAPS}
        step.text = (
            f"{step.outcome}; descriptors {rise['descriptors']:+}, names {rise['names']:+}, "
            f"memory {rise['bytes'] / MIB:+.0f} MiB, {1e3 * seconds / MAPS:.0f} ms a map"
        )


def holdings() -> Record:
    """What this process and its descendants have; memory that several share is shared out among them."""
    gc.collect()
    time.sleep(0.5)
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    held = {"descriptors": 0, "bytes": 0, "names": len(names_of({process.pid for process in everyone}, 0.0))}
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            held["descriptors"] += process.num_fds()
            held["bytes"] += process.memory_full_info().pss
    return held


def in_a_fork(case: Case) -> None:
    case.peer.map(doubled, tensors())
    forked(case, lambda: case.peer)


def new_pool_in_a_fork(case: Case) -> None:
    case.peer.map(doubled, tensors())
    forked(case, lambda: case.make(case.processes))


def forked(case: Case, pool: Callable[[], Peer]) -> None:
    with case.log.step("in the child", case.limit + PATIENCE) as step:
        child = os.fork()
        if child == 0:
            found = Step()
            found.take(lambda: pool().map(doubled, tensors()), is_doubled)
            leave_word(case.folder, "found", json.dumps([found.outcome, found.details]))
            os._exit(0)
        deadline = time.monotonic() + case.limit
        while not (case.folder / "found").exists() and time.monotonic() < deadline:
            time.sleep(1e-2)
        if (case.folder / "found").exists():
            step.outcome, step.details = json.loads((case.folder / "found").read_text())
        else:
            step.outcome = "hangs"
        step.text = f"child: {step.outcome}"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    case.next_map()


class Fault(NamedTuple):
    title: str
    run: Callable[[Case], None]
    trials: int = 1
    patience: float = PATIENCE


FAULTS = {
    "gradients": Fault("no fault: gradients through a map", differentiated),
    "idle": Fault("worker killed while idle", killed_while_idle, trials=4),
    "busy": Fault(f"worker killed in one of {ITEMS} calls of a map", killed_in_a_call),
    "others": Fault(f"worker killed in one of {ITEMS} submitted calls", killed_among_others),
    "exit": Fault("call that always ends its worker (os._exit)", always_exits),
    "segfault": Fault("call that always crashes its worker (SIGSEGV)", always_crashes),
    "limit": Fault(f"call that never ends, limit {TIME_LIMIT:g} s", too_long),
    "error": Fault("exception in one item", raises),
    "unpicklable": Fault("exception that cannot be pickled", cannot_be_pickled),
    "unloadable": Fault("exception that cannot be unpickled", cannot_be_loaded),
    "closure": Fault("function is a lambda with a closure", closure),
    "parent": Fault(f"parent killed (-9), workers in calls of {BUSY_CALL:g} s", parent_killed, patience=PATIENCE_FOR_ORPHANS),
    "interrupt": Fault("Ctrl-C during a map", interrupted),
    "between": Fault("worker killed between forward and backward", killed_before_backward),
    "leak": Fault(f"{MAPS} maps of a 4 MB tensor", leaks),
    "fork": Fault("map in a forked child, pool of the parent", in_a_fork),
    "new in fork": Fault("map in a forked child, new pool there", new_pool_in_a_fork),
}
QUICK = ("exit", "closure")


def run_case(fault: str, name: str, trial: str, processes: str, limit: str, folder: str) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    torch.set_num_threads(1)
    log = Log(Path(folder) / "log")
    make = PEERS[name].make
    with log.step("start", START_LIMIT):
        peer = make(int(processes))
        peer.map(doubled, tensors())
    case = Case(peer, int(processes), Path(folder), log, int(trial), float(limit), make)
    FAULTS[fault].run(case)
    with log.step("close") as step:
        began = time.monotonic()
        peer.close()
        seconds = step.details["seconds"] = time.monotonic() - began
        step.text = f"close takes {seconds:.2g} s" if seconds > SLOW else ""
    log.write(begin="exit", limit=None)
    return 0


# --- watching a case


def names_of(pids: set[int], since: float) -> list[str]:
    """Names in /dev/shm made since then, without those that carry a number of a process that is not one of these."""
    found = []
    for path in SHARED_MEMORY.iterdir():
        numbers = {int(number) for number in re.findall(r"(?<!\d)\d{2,7}(?!\d)", path.name)}
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_ctime >= since and (not numbers or numbers & pids):
                found.append(path.name)
    return found


def watched(fault: str, name: str, trial: int, processes: int, limit: float) -> Record:
    limit *= PEERS[name].slowness
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True) as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        settings = {MARK: mark, "TMPDIR": str(temporary), "RAY_USAGE_STATS_ENABLED": "0"}
        began = time.time()
        with (Path(folder) / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, __file__, "--case", fault, name, str(trial), str(processes), str(limit), folder],
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )
        descendants = Descendants(process.pid, mark)
        entries: list[Record] = []
        hung = None
        while process.poll() is None and hung is None:
            descendants.look()
            time.sleep(LOOK)
            entries = entries_of(Path(folder) / "log")
            hung = overdue(entries, limit)
        ended = time.monotonic()
        entries = entries_of(Path(folder) / "log")
        record: Record = {"fault": fault, "peer": name, "trial": trial, "steps": entries, "hung": hung}
        if hung is None:
            record |= {"exit_code": process.returncode} | what_is_left(descendants, ended, FAULTS[fault].patience, began)
            record["left_temporary"] = sorted(path.name for path in temporary.iterdir())
        process.kill()  # first, or it would start others in the place of those that end
        process.wait()
        descendants.look_everywhere()
        descendants.kill()
        lines = (Path(folder) / "stderr").read_text(errors="replace").splitlines()
        record |= {"output_lines": len(lines), "output_end": "\n".join(lines[-15:])[-1500:]}
        for leftover in names_of(descendants.pids, began):  # else the next case would start with less memory
            with contextlib.suppress(OSError):
                if any(str(pid) in leftover for pid in descendants.pids):
                    path = SHARED_MEMORY / leftover
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    record["text"] = text_of(record)
    return record


def entries_of(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def overdue(entries: Sequence[Record], limit: float) -> str | None:
    """The step that has taken too long, if there is one."""
    if not entries:
        return None
    entry = entries[-1]
    if time.monotonic() - entry["at"] <= (entry.get("limit") or limit):
        return None
    return str(entry.get("begin") or f"what follows {entry['end']}")


def what_is_left(descendants: Descendants, ended: float, patience: float, began: float) -> Record:
    """Processes that are still there after so many seconds, and how long the others took; then names of shared memory."""
    descendants.look_everywhere()
    while left := descendants.left():
        gone_after = time.monotonic() - ended
        if gone_after > patience:
            break
        time.sleep(LOOK)
    else:
        gone_after = time.monotonic() - ended
    return {
        "left_processes": [title_of(process) for process in left],
        "seconds_until_gone": None if left else gone_after,
        "left_names": lasting_names(descendants.pids, began),
    }


def lasting_names(pids: set[int], since: float) -> list[str]:
    """Looks twice: some names without a number are there for a moment only, and other programs make such names too."""
    found = names_of(pids, since)
    if found:
        time.sleep(1)
    return sorted(set(found) & set(names_of(pids, since))) if found else []


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "?"


def text_of(record: Record) -> str:
    texts = [step["text"] for step in record["steps"] if step.get("text")]
    if record["fault"] == "parent" and record.get("exit_code") == -signal.SIGKILL:
        left = record["left_processes"]
        gone = record["seconds_until_gone"]
        texts.append(f"{len(left)} still there after {PATIENCE_FOR_ORPHANS:g} s" if left else f"all gone after {gone:.2g} s")
    elif record["hung"] is not None:
        texts.append(f"{record['hung']} hangs")
    else:
        if record["exit_code"] != 0:
            texts.append(f"program ends with status {record['exit_code']}")
        if record["left_processes"]:
            texts.append(f"leaves {len(record['left_processes'])} processes")
    for key, noun in (("left_names", "names in /dev/shm"), ("left_temporary", "temporary files")):
        if record.get(key):
            texts.append(f"leaves {len(record[key])} {noun}")
    return "; ".join(texts)


def merged(texts: Sequence[str]) -> str:
    """What several trials gave, told once where only numbers differ."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(re.sub(r"[\d.]+", "", text), []).append(text)
    if len(alike) == 1:
        return texts[0]
    return " | ".join(f"{len(group)} of {len(texts)}: {group[0]}" for group in alike.values())


# --- the whole


FIRST_COLUMN, COLUMN = 22, 26


def print_row(cells: Sequence[str]) -> None:
    widths = [FIRST_COLUMN, *[COLUMN] * (len(cells) - 1)]
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(len(lines) for lines in wrapped)):
        parts = [lines[number] if number < len(lines) else "" for lines in wrapped]
        print("  ".join(f"{part:{width}}" for part, width in zip(parts, widths, strict=True)).rstrip(), flush=True)


def bench(faults: Sequence[str], peers: Sequence[str], processes: int, limit: float) -> Record:
    around = surroundings(processes)
    versions = {name: version_of(name) for name in peers}
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, {around['memory_gib']} GiB, {around['system']}")
    print(f"torch {around['versions']['torch']}, Python {around['python']}, {around['date']}")
    slower = "".join(f" ({name}: {limit * PEERS[name].slowness:g} s)" for name in peers if PEERS[name].slowness > 1)
    print(f"{processes} processes; load average {around['load_average']:.2f} before")
    print(f"a step that takes longer than {limit:g} s{slower} hangs\n")
    print_row(["", *peers])
    print_row(["version", *(versions[name] or "not installed" for name in peers)])
    cases: list[Record] = []
    table: dict[str, dict[str, str]] = {}
    for fault in faults:
        cells = table[FAULTS[fault].title] = {}
        for name in peers:
            if versions[name] is None:
                cells[name] = "not installed"
                continue
            records = [watched(fault, name, trial, processes, limit) for trial in range(FAULTS[fault].trials)]
            cases += records
            cells[name] = merged([record["text"] for record in records])
        print()
        print_row([FAULTS[fault].title, *cells.values()])
    start_method = torch.multiprocessing.get_start_method()
    settings = {"limit_seconds": limit, "items": ITEMS, "victim": VICTIM, "start_method": start_method}
    return {"surroundings": around, "versions": versions, "settings": settings, "table": table, "cases": cases}


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--processes", type=at_least_1, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--limit", type=at_least_1, metavar="SECONDS", help="what takes longer hangs (default: 15, quick: 5)")
    parser.add_argument("--quick", action="store_true", help="two faults of the installed peers, only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("faults_of_peers.json"), metavar="FILE", help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    faults, peers, limit = options.faults, options.peers, options.limit or 15
    if options.quick:
        faults, limit = list(QUICK), options.limit or 5
        peers = [name for name in peers if version_of(name) is not None]
    record = bench(faults, peers, options.processes, float(limit))
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nall steps: {options.out}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        sys.exit(run_case(*sys.argv[2:]))
    sys.exit(main())
