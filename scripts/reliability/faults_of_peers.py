"""Compares what mpgrad and its peers do when something goes wrong, with the same faults and the
same code.

Peers are torch.multiprocessing.Pool, concurrent.futures.ProcessPoolExecutor and joblib with loky.
All run with their default start method, chunks and number of retries. Each fault gets a fresh
process per peer and a time limit, so a hang is also a result.

    this process ──► fresh process: start ──► fault ──► next map ──► what came, as a line of output
         └── waits for the line; what takes longer than the limit "hangs", and is killed

    python scripts/reliability/faults_of_peers.py
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch
import torch.multiprocessing
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

from common import at_least_1, print_surroundings, surroundings

# mpgrad is imported only if it is the peer, because the behaviour of the others must not depend on
# it.

EPILOG = "exit status: 0 if everything was measured, whatever was found, 2 for wrong arguments"

PROCESSES = 2
ITEMS = 20
VICTIM = 7  # the item that the fault hits
CALL = 0.02  # seconds
BUSY_CALL = 5.0  # after the caller's end, for workers that finish their calls
LONG_CALL = 60.0  # beyond every limit
TIME_LIMIT = 1.0  # of a call, if the peer has a limit
AFTER_BEGINNING = 0.5  # seconds from the beginning of a call to its worker's end
PATIENCE = 20.0  # seconds for workers to go after the end of their caller
START_LIMIT = 60.0  # seconds

Item = tuple[int, Tensor]


# --- the peers: pools as their documentation shows them


class Peer(Protocol):
    def map(
        self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float | None = None
    ) -> list[Any]:
        """Return results, or raise an error when a limit is exceeded. The limit is that of a call
        if the peer has one, and otherwise that of the wait."""
        ...

    def close(self) -> None: ...


class TorchPool:
    def __init__(self) -> None:
        self._pool = torch.multiprocessing.Pool(PROCESSES)

    def map(
        self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float | None = None
    ) -> list[Any]:
        return self._pool.map_async(function, items).get(seconds)

    def close(self) -> None:
        self._pool.__exit__(None, None, None)


class Executor:
    def __init__(self) -> None:
        self._executor = concurrent.futures.ProcessPoolExecutor(PROCESSES)

    def map(
        self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float | None = None
    ) -> list[Any]:
        return list(self._executor.map(function, items, timeout=seconds))

    def close(self) -> None:
        self._executor.shutdown()


class Joblib:
    """Runs every map as a separate `Parallel`, which uses the workers of the one before, or new
    ones if those are broken."""

    def __init__(self) -> None:
        self._joblib = importlib.import_module("joblib")

    def map(
        self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float | None = None
    ) -> list[Any]:
        parallel = self._joblib.Parallel(n_jobs=PROCESSES, backend="loky", timeout=seconds)
        results: list[Any] = parallel(self._joblib.delayed(function)(item) for item in items)
        return results

    def close(self) -> None:
        # the workers stay for the next `Parallel`, until they have been idle for long or the
        # program ends
        pass


class Mpgrad:
    def __init__(self) -> None:
        self._pool = importlib.import_module("mpgrad").Pool(PROCESSES)

    def map(
        self, function: Callable[[Any], Any], items: Sequence[Any], seconds: float | None = None
    ) -> list[Any]:
        results: list[Any] = self._pool.map(function, items, timeout=seconds)
        return results

    def close(self) -> None:
        self._pool.__exit__(None, None, None)


PEERS: dict[str, Callable[[], Peer]] = {
    "torch.multiprocessing.Pool": TorchPool,
    "ProcessPoolExecutor": Executor,
    "joblib/loky": Joblib,
    "mpgrad": Mpgrad,
}


# --- what workers run; they write their reports into a folder


def doubled(item: Item) -> Tensor:
    return item[1] * 2


def weighted(weight: Tensor, x: Tensor) -> Tensor:
    return (x * weight).exp().sum()


def own_pid(item: int) -> int:
    time.sleep(0.1)  # so that no worker takes all of them
    return os.getpid()


def stuck_once(folder: Path, item: Item) -> Tensor:
    """Double the item. The victim's first run never ends by itself."""
    if item[0] == VICTIM and not (folder / "pid").exists():
        leave_word(folder, "pid")
        time.sleep(LONG_CALL)
    time.sleep(CALL)
    return doubled(item)


def exiting(item: Item) -> Tensor:
    if item[0] == VICTIM:
        os._exit(3)
    time.sleep(CALL)
    return doubled(item)


def endless(folder: Path, item: Item) -> Tensor:
    if item[0] == VICTIM:
        ends = time.monotonic() + LONG_CALL
        while time.monotonic() < ends:
            leave_word(folder, "alive")
            time.sleep(CALL)
    time.sleep(CALL)
    return doubled(item)


class TwoPartsError(Exception):
    """Can be pickled, but not loaded, because pickle calls the class with one argument. Libraries
    have such classes."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}, {detail}")


def raising(item: Item) -> Tensor:
    if item[0] == VICTIM:
        raise TwoPartsError(VICTIM, "the original text")
    return doubled(item)


def busy(folder: Path, item: int) -> None:
    leave_word(folder, f"busy-{item}")
    ends = time.monotonic() + BUSY_CALL
    # It computes, like a worker that has no time to check whether its caller is alive.
    while time.monotonic() < ends:
        pass


def leave_word(folder: Path, name: str) -> None:
    unfinished = folder / f"{name}.{os.getpid()}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / name)


def word(folder: Path, name: str) -> int:
    while not (folder / name).exists():
        time.sleep(1e-3)
    return int((folder / name).read_text())


# --- the faults: each returns a description of the outcome


def numbered() -> list[Item]:
    return [(number, torch.full((number % 5 + 1,), float(number))) for number in range(ITEMS)]


def outcome(peer: Peer, function: Callable[[Item], Tensor], seconds: float | None = None) -> str:
    try:
        results = peer.map(function, numbered(), seconds)
    except Exception as error:
        shown = "".join(traceback.format_exception(error))
        return type(error).__name__ + (
            ", names the original" if "the original text" in shown else ""
        )
    right = all(
        torch.equal(result, doubled(item)) for result, item in zip(results, numbered(), strict=True)
    )
    return "right" if right else "wrong"


def afterwards(peer: Peer) -> str:
    found = outcome(peer, doubled)
    return "goes on" if found == "right" else f"next map: {found}"


def differentiated(peer: Peer, folder: Path) -> str:
    leaves = [torch.ones(number % 5 + 1, requires_grad=True) for number in range(ITEMS)]
    weight = torch.tensor(0.5, requires_grad=True)
    everything = [*leaves, weight]
    expected = torch.autograd.grad(
        torch.stack([weighted(weight, x) for x in leaves]).sum(), everything
    )
    try:
        losses = peer.map(functools.partial(weighted, weight), leaves)
        torch.autograd.backward(torch.stack(losses).sum())
    except Exception as error:
        return type(error).__name__
    found = [leaf.grad for leaf in everything]
    right = all(
        one is not None and torch.allclose(one, other)
        for one, other in zip(found, expected, strict=True)
    )
    return "right" if right else "none, no error"


def killed_while_idle(peer: Peer, folder: Path) -> str:
    pids = set(peer.map(own_pid, range(4 * PROCESSES)))
    time.sleep(AFTER_BEGINNING)
    os.kill(pids.pop(), signal.SIGKILL)
    return f"{outcome(peer, doubled)}; {afterwards(peer)}"


def killed_in_a_map(peer: Peer, folder: Path) -> str:
    def kill() -> None:
        pid = word(folder, "pid")
        time.sleep(AFTER_BEGINNING)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return f"{outcome(peer, functools.partial(stuck_once, folder))}; {afterwards(peer)}"


def always_exits(peer: Peer, folder: Path) -> str:
    return f"{outcome(peer, exiting)}; {afterwards(peer)}"


def too_long(peer: Peer, folder: Path) -> str:
    began = time.monotonic()
    found = outcome(peer, functools.partial(endless, folder), TIME_LIMIT)
    seconds = time.monotonic() - began
    time.sleep(1)
    before = (folder / "alive").stat().st_mtime_ns
    time.sleep(1)
    runs_on = (folder / "alive").stat().st_mtime_ns != before
    return f"{found} after {seconds:.1f} s, call {'runs on' if runs_on else 'ended'}"


def cannot_be_loaded(peer: Peer, folder: Path) -> str:
    return f"{outcome(peer, raising)}; {afterwards(peer)}"


def caller_killed(peer: Peer, folder: Path) -> str:
    """Report the processes that the caller has started to the watching process."""
    function = functools.partial(busy, folder)
    threading.Thread(target=peer.map, args=(function, range(PROCESSES)), daemon=True).start()
    for number in range(PROCESSES):
        word(folder, f"busy-{number}")
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never said"


def new_pool_in_a_fork(peer: Peer, folder: Path) -> str:
    here, there = os.pipe()
    if os.fork() == 0:
        os.write(there, outcome(type(peer)(), doubled).encode())
        os._exit(0)
    return os.read(here, 1000).decode()


class Fault(NamedTuple):
    title: str
    run: Callable[[Peer, Path], str]
    trials: int = 1


FAULTS = {
    "gradients": Fault("gradients through a map", differentiated),
    "idle": Fault("worker killed while idle", killed_while_idle, trials=4),
    "busy": Fault("worker killed in a map", killed_in_a_map),
    "exit": Fault("a call always kills its worker", always_exits),
    "limit": Fault(f"an endless call, limit {TIME_LIMIT:g} s", too_long),
    "unloadable": Fault("an exception that cannot be unpickled", cannot_be_loaded),
    "parent": Fault("kill -9 of the caller: workers end", caller_killed),
    "fork": Fault("new pool in a forked child", new_pool_in_a_fork),
}


def run_case(fault: str, name: str, folder: str) -> int:
    """Run a fault in a fresh process, and print the outcome."""
    torch.set_num_threads(1)
    peer = PEERS[name]()
    peer.map(doubled, numbered())
    print("started", flush=True)
    print(FAULTS[fault].run(peer, Path(folder)), flush=True)
    peer.close()
    return 0


# --- watching a case


def watched(fault: str, name: str, limit: float) -> str:
    with tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "said"
        with file.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, "--case", fault, name, folder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        waited(START_LIMIT, lambda: bool(said(file)) or process.poll() is not None)
        told = waited(limit, lambda: len(said(file)) > 1 or process.poll() is not None)
        ended = told and waited(limit, lambda: process.poll() is not None)
        lines = said(file)[1:]
        if fault == "parent":
            lines = [seconds_until_gone(int(pid) for pid in lines[0].split())]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not told:
        return "hangs"
    return "; ".join([*lines, *([] if ended else ["does not end"])])


def said(file: Path) -> list[str]:
    return file.read_text().splitlines()


def waited(seconds: float, until: Callable[[], bool]) -> bool:
    """Return whether the condition became true in time."""
    ends = time.monotonic() + seconds
    while not until():
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def seconds_until_gone(pids: Iterable[int]) -> str:
    began = time.monotonic()
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, left = psutil.wait_procs(left, PATIENCE)
    return f"not in {PATIENCE:g} s" if left else f"after {time.monotonic() - began:.1f} s"


def merged(texts: Sequence[str]) -> str:
    """Join the outcomes of several trials."""
    counts = collections.Counter(texts)
    if len(counts) == 1:
        return texts[0]
    return " | ".join(f"{count} of {len(texts)}: {text}" for text, count in counts.items())


# --- the whole


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=FAULTS,
        default=list(FAULTS),
        metavar="FAULT",
        help=", ".join(FAULTS),
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        metavar="PEER",
        help=", ".join(PEERS),
    )
    parser.add_argument(
        "--limit",
        type=at_least_1,
        default=15,
        metavar="SECONDS",
        help="a case that takes longer hangs (default: 15)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    print_surroundings(surroundings(PROCESSES))
    for fault in options.faults:
        title, _, trials = FAULTS[fault]
        print(f"\n{title}", flush=True)
        for name in options.peers:
            if name.startswith("joblib") and importlib.util.find_spec("joblib") is None:
                print(f"  {name:28}not installed")
                continue
            texts = [watched(fault, name, options.limit) for _ in range(trials)]
            print(f"  {name:28}{merged(texts)}", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        sys.exit(run_case(*sys.argv[2:]))
    sys.exit(main())
