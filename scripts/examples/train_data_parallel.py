"""Trains one model in three ways: in one process, with `mpgrad.nn.DataParallel`, and with
DistributedDataParallel over gloo.

PyTorch's answer on CPUs is DistributedDataParallel. It runs the whole script in every process, each
with its own copy of the model, and exchanges gradients while backward runs.
`mpgrad.nn.DataParallel` leaves the script as it is and wraps the model. This script measures which
is faster, and checks that both train the same model. A small convolutional network learns
scikit-learn's digits by SGD from the same parameters on the same batches, and every batch's loss
must equal that of one process, up to rounding. The loss is a sum over images, so the gradients of
parts add up to those of the whole. DistributedDataParallel takes the mean of gradients, so it gets
each loss times the number of processes. All ways stay alive and take turns, one epoch each, in a
random order.

    rows of a batch ──► model ──► logits ──► sum of losses          one process, on one thread
        ├── first part  ──► worker 0 ─┐                             or on several
        └── second part ──► worker 1 ─┴► logits ──► sum of losses   mpgrad: one SGD step, here
        ├── first part  ──► rank 0 ──► its share of the sum ─┐      gloo: gradients averaged, the
        └── second part ──► rank 1 ──► its share of the sum ─┴──►   same SGD step in each

    python scripts/examples/train_data_parallel.py --processes 2
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

from common import at_least_1, print_surroundings, surroundings

import mpgrad
import mpgrad.nn

EPILOG = (
    "exit status: 0 if all ways agree, 1 if they differ or a process ended, 2 for wrong arguments "
    "or without scikit-learn"
)

# The largest relative difference of a batch's loss. Single precision rounds to 6e-8, which grew to
# at most 4e-7 in the default run. Gradients that are wrong by a thousandth show as 6e-5 in the
# quick run's second epoch. The network must be smooth for the two to stay apart: with ReLU and
# max-pooling, a first difference of 1e-7 grew to 1e-2 after 15 epochs.
TOLERANCE = 1e-5

TEST_IMAGES = 360  # the last fifth of 1,797
BRIGHTEST = 16.0  # of a pixel
TO_END = 30.0  # seconds that a process gets to end
# The rate is for the mean over a batch. For the sum it is divided by the batch's size.
RATE, MOMENTUM = 0.05, 0.9
Record = dict[str, Any]
Losses = list[float]  # one per batch, each summed over the batch's images


@dataclass(frozen=True)
class Plan:
    processes: int = 2
    epochs: int = 15
    batch: int = 256  # images
    width: int = 32  # channels of the first convolution


QUICK = Plan(epochs=3, batch=512, width=8)


class Digits(NamedTuple):
    images: Tensor  # N x 1 x 8 x 8, 0 to 1
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class MissingError(Exception):
    pass


class EndedError(Exception):
    pass


def load_images() -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingError(
            f"the digits come with scikit-learn ({error}); pip install '.[examples]'"
        ) from error
    numbers, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(numbers).to(torch.float32).div(BRIGHTEST).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels).to(torch.int64)
    return Digits(x[:-TEST_IMAGES], y[:-TEST_IMAGES], x[-TEST_IMAGES:], y[-TEST_IMAGES:])


def network(width: int) -> nn.Module:
    """Return a network with the same parameters whenever and wherever it is called."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 4 * width),
        nn.Tanh(),
        nn.Linear(4 * width, 10),
    )
    for layer in layers:
        # with PyTorch's own initialization, the network learns nothing for five epochs
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight)
    return layers


# --- the ways


class Share(NamedTuple):
    """Holds the part of each batch that a process trains on, and the factor of its loss before
    backward."""

    part: int = 0
    parts: int = 1
    weight: float = 1.0


@dataclass
class Training:
    """Holds a model with its optimizer. All ways run this code. They differ in the model, and in
    the share of a batch."""

    model: nn.Module
    digits: Digits
    plan: Plan
    share: Share

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE / self.plan.batch, MOMENTUM)

    def epoch(self, number: int) -> Losses:
        losses = []
        for rows in torch.split(shuffled(len(self.digits.labels), number), self.plan.batch):
            # the share of a short last batch may have no image, and then its sum is zero
            own = rows.tensor_split(self.share.parts)[self.share.part]
            self.optimizer.zero_grad()
            logits = self.model(self.digits.images[own])
            loss = nn.functional.cross_entropy(logits, self.digits.labels[own], reduction="sum")
            torch.autograd.backward(loss * self.share.weight)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def accuracy(self) -> float:
        with torch.no_grad():
            found = self.model(self.digits.test_images).argmax(1)
        return float((found == self.digits.test_labels).double().mean())


def shuffled(count: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch))


class Way(NamedTuple):
    name: str
    epoch: Callable[[int], Losses]
    accuracy: Callable[[], float]


def in_one_process(digits: Digits, plan: Plan, threads: int) -> Way:
    training = Training(network(plan.width), digits, plan, Share())

    def epoch(number: int) -> Losses:
        torch.set_num_threads(threads)
        try:
            return training.epoch(number)
        finally:
            torch.set_num_threads(1)

    return Way(f"one process, {threads} thread{'s' * (threads > 1)}", epoch, training.accuracy)


@contextlib.contextmanager
def over_workers(digits: Digits, plan: Plan, perturb: float) -> Iterator[Way]:
    with mpgrad.Pool(plan.processes) as pool:
        model = mpgrad.nn.DataParallel(network(plan.width), pool.workers)
        training = Training(model, digits, plan, Share(weight=1.0 + perturb))
        yield Way(f"mpgrad, {plan.processes} workers", training.epoch, training.accuracy)


# --- processes that answer questions until the connection is closed


@contextlib.contextmanager
def processes(
    run: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> Iterator[list[Connection[Any, Any]]]:
    """Start one process for each `arguments`. `run` gets its end of the pipe after them."""
    spawning = torch.multiprocessing.get_context("spawn")
    connections: list[Connection[Any, Any]] = []
    with contextlib.ExitStack() as stack:
        for each in arguments:
            here, there = spawning.Pipe()
            process = spawning.Process(target=run, args=(*each, there), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            stack.callback(end, process, here)
        yield connections


def end(process: SpawnProcess, connection: Connection[Any, Any]) -> None:
    connection.close()
    process.join(TO_END)
    if process.is_alive():  # it waits for another process, which failed
        process.kill()
        process.join()
    process.close()


def answers(connections: list[Connection[Any, Any]], questions: Iterable[int | str]) -> list[Any]:
    try:
        for connection, question in zip(connections, questions, strict=True):
            connection.send(question)
        return [connection.recv() for connection in connections]
    except (EOFError, ConnectionError):
        raise EndedError("a rank ended too early; its error is above") from None


def received(connection: Connection[Any, Any]) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


# --- ranks: processes that each run the training, as DistributedDataParallel requires


@contextlib.contextmanager
def over_ranks(digits: Digits, plan: Plan) -> Iterator[Way]:
    """Run ranks, each of which answers an epoch's number with its losses."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(rank, digits, plan, f"{folder}/rendezvous") for rank in range(plan.processes)]
        with processes(run_rank, ranks) as connections:

            def asked(question: int | str) -> list[Any]:
                return answers(connections, [question] * plan.processes)

            asked("ready")
            yield Way(
                f"gloo, {plan.processes} ranks",
                lambda number: [sum(shares) for shares in zip(*asked(number), strict=True)],
                lambda: float(asked("accuracy")[0]),
            )


def run_rank(
    rank: int, digits: Digits, plan: Plan, rendezvous: str, connection: Connection[Any, Any]
) -> None:
    torch.set_num_threads(1)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    # otherwise gloo looks up the host's name, which may have no address
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=plan.processes
    )
    try:
        model = nn.parallel.DistributedDataParallel(network(plan.width))
        training = Training(model, digits, plan, Share(rank, plan.processes, float(plan.processes)))
        while (question := received(connection)) is not None:
            match question:
                case "ready":
                    connection.send(None)
                case "accuracy":
                    connection.send(training.accuracy())
                case number:
                    connection.send(training.epoch(number))
    finally:
        torch.distributed.destroy_process_group()


# --- the run


@dataclass
class Result:
    way: Way
    losses: Losses
    seconds: list[float]  # one per epoch
    accuracy: float = 0.0

    def record(self, one: Result, gloo: Result) -> Record:
        return {
            "way": self.way.name,
            "median_seconds_per_epoch": statistics.median(self.seconds),
            "speed_up": self.speed_over(one),
            "speed_over_gloo": self.speed_over(gloo),
            "largest_loss_difference": largest_difference(self.losses, one.losses),
            "accuracy": self.accuracy,
            "seconds": self.seconds,
            "losses": self.losses,
        }

    def speed_over(self, other: Result) -> float:
        return statistics.median(
            theirs / own for theirs, own in zip(other.seconds, self.seconds, strict=True)
        )


def largest_difference(found: Losses, expected: Losses) -> float:
    """Return the largest relative difference, which is infinite if any loss is not a number."""
    pairs = torch.tensor([found, expected], dtype=torch.float64)
    relative = (pairs[0] - pairs[1]).abs() / pairs[1].abs()
    return float(relative.nan_to_num(nan=float("inf")).max())


def trained(plan: Plan, perturb: float) -> list[Result]:
    digits = load_images()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        ways = [
            in_one_process(digits, plan, 1),
            in_one_process(digits, plan, plan.processes),
            stack.enter_context(over_workers(digits, plan, perturb)),
            stack.enter_context(over_ranks(digits, plan)),
        ]
        results = [Result(way, [], []) for way in ways]
        order = random.Random(0)
        for number in range(plan.epochs):
            for result in order.sample(results, len(results)):
                began = time.perf_counter()
                losses = result.way.epoch(number)
                result.seconds.append(time.perf_counter() - began)
                result.losses += losses
        for result in results:
            result.accuracy = result.way.accuracy()
    return results


def print_table(rows: Sequence[Record]) -> None:
    print(
        f"\n{'':26}{'s an epoch':>12}{'speed-up':>10}{'of gloo':>10}"
        f"{'difference':>12}{'accuracy':>10}"
    )
    for row in rows:
        print(
            f"{row['way']:26}{row['median_seconds_per_epoch']:12.3f}{row['speed_up']:10.2f}"
            f"{row['speed_over_gloo']:10.2f}{row['largest_loss_difference']:12.1e}{row['accuracy']:10.3f}"
        )
    print(
        "medians; speed-up: over the first within a round; of gloo: speed over gloo's within a "
        "round"
    )
    print("difference: the largest relative difference of a batch's loss from the first's")


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--quick", action="store_true", help="a little training, only to see that it runs"
    )
    for name, what in (
        ("epochs", "of each way"),
        ("batch", "images in it"),
        ("width", "channels of the first convolution"),
    ):
        default = f"(default: {getattr(Plan, name)}, quick: {getattr(QUICK, name)})"
        parser.add_argument(f"--{name}", type=at_least_1, metavar="N", help=f"{what} {default}")
    processes = "workers, and ranks (default: %(default)s)"
    parser.add_argument(
        "--processes", type=at_least_1, default=Plan.processes, metavar="N", help=processes
    )
    # to see that a wrong gradient is found
    parser.add_argument("--perturb", type=float, default=0.0, help=argparse.SUPPRESS)
    out = Path("train_data_parallel.json")
    parser.add_argument(
        "--out", type=Path, default=out, metavar="FILE", help="default: %(default)s"
    )
    return parser


def plan_of(options: argparse.Namespace) -> Plan:
    given = {name: getattr(options, name) for name in ("processes", "epochs", "batch", "width")}
    return replace(
        QUICK if options.quick else Plan(),
        **{name: value for name, value in given.items() if value is not None},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    plan = plan_of(options)
    around = surroundings(plan.processes)
    try:
        results = trained(plan, options.perturb)
    except (MissingError, EndedError) as error:
        print(f"train_data_parallel.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, MissingError) else 1
    around["versions"]["scikit-learn"] = importlib.metadata.version("scikit-learn")
    print_surroundings(around)
    print(
        f"{plan.epochs} epochs in batches of {plan.batch}, width {plan.width}; one thread a "
        "process, unless stated otherwise"
    )
    rows = [result.record(one=results[0], gloo=results[-1]) for result in results]
    print_table(rows)
    largest = max(row["largest_loss_difference"] for row in rows)
    agree = largest <= TOLERANCE
    print(
        f"largest difference: {largest:.1e}, {'within' if agree else 'above'} the tolerance of "
        f"{TOLERANCE:.0e}"
    )
    record = {
        "surroundings": around,
        "plan": asdict(plan),
        "tolerance": TOLERANCE,
        "agree": agree,
        "ways": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"all epochs: {options.out}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
