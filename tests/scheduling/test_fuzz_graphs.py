"""Random graphs of calls against the serial ones: values asked for early, late or never; workers
killed meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from inside import every_loss_gets
from torch import Tensor

import mpgrad

pytestmark = pytest.mark.slow

OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a * b,
    lambda a, b: (a + b).sin(),
    lambda a, b: a.tanh() + b,
    lambda a, b: (a @ b.T).tanh() @ b * 0.1,
    lambda a, b: a.clone().mul_(b),
]
PLANS = 20  # at least
DEATHS = 5  # at least, under fire
MODES = ["once", "twice", "create", "between"]


class Step(NamedTuple):
    operation: int
    arguments: tuple[int, int]  # of earlier steps; below 0: of the leaves
    asked_for: str  # "early", "late" or "never"


class Plan:
    """A graph of calls, how its results are asked for, and which derivatives are taken."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        # losses; what is inline in messages; what lies in shared memory
        size = rng.choice([1, 2, 40])
        self.leaves = [torch.randn(size, size, dtype=torch.float64).tanh_() for _ in range(3)]
        for leaf in self.leaves:
            leaf.requires_grad_(rng.random() < 0.7)
        self.captured = torch.randn(size, size, dtype=torch.float64).tanh_().requires_grad_()
        self.steps: list[Step] = []
        for number in range(rng.randint(3, 9)):
            arguments = rng.randrange(-3, number), rng.randrange(-1, number) if number else -1
            self.steps.append(
                Step(rng.randrange(7), arguments, rng.choice(["early", "late", "never"]))
            )
        self.late = [
            number for number, step in enumerate(self.steps) if step.asked_for == "late"
        ] or [len(self.steps) - 1]
        rng.shuffle(self.late)
        self.mode = rng.choice(MODES)

    def run(self, submit: Callable[..., Any], take: Callable[[Any], Tensor]) -> list[Tensor | None]:
        """All values that are asked for, and the derivatives."""
        made: list[Any] = []
        values: dict[int, Tensor] = {}
        captured = self.captured
        for number, step in enumerate(self.steps):
            a, b = (made[k] if k >= 0 else self.leaves[k] for k in step.arguments)
            if step.operation < len(OPERATIONS):
                made.append(submit(OPERATIONS[step.operation], a, b))
            elif step.operation == len(OPERATIONS):
                made.append(submit(lambda a, b: a * captured + b, a, b))
            else:
                pair = submit(lambda a, b: {"of": (a * b, (a - b).cos())}, a, b)
                made.append(submit(lambda pair: pair["of"][0] + pair["of"][1] * 0.5, pair))
            if step.asked_for == "early":
                values[number] = take(made[number])
        for number in self.late:
            values[number] = take(made[number])
        loss = torch.stack(
            [(values[number] * (number + 1)).sum() for number in sorted(values)]
        ).sum()
        inputs = [tensor for tensor in (*self.leaves, captured) if tensor.requires_grad]
        if not loss.requires_grad:
            return [*(values[number] for number in sorted(values))]
        if self.mode == "between":
            inputs += [values[number] for number in sorted(values) if values[number].requires_grad]
        keep, create = self.mode == "twice" or None, self.mode == "create"
        grads = list(
            torch.autograd.grad(
                loss, inputs, retain_graph=keep, create_graph=create, allow_unused=True
            )
        )
        if self.mode == "twice":
            grads += torch.autograd.grad(loss * 2, inputs, allow_unused=True)
        if self.mode == "create":
            penalty = torch.stack([grad.pow(2).sum() for grad in grads if grad is not None]).sum()
            grads += torch.autograd.grad(penalty, inputs, allow_unused=True)
        return [*(values[number] for number in sorted(values)), *grads]


@contextlib.contextmanager
def fire(pool: mpgrad.Pool, seed: int) -> Iterator[None]:
    """Kill a worker now and then."""
    rng, over = random.Random(seed), threading.Event()

    def shoot() -> None:
        while not over.wait(rng.uniform(0.05, 0.15)):
            for worker in pool.stats().workers[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("options", "shoots"),
    [
        ({}, False),
        ({"engine": "inline"}, False),
        ({"engine": "thread"}, False),
        ({"graphs": "recompute"}, False),
        ({"graph_memory": "60 KB"}, False),
        ({"retries": 100}, True),
        ({"retries": 100, "deterministic": True, "graphs": "recompute"}, True),
        ({"retries": 100, "graphs": "keep"}, True),
    ],
    ids=[
        "process",
        "inline",
        "thread",
        "recompute",
        "graph_memory",
        "fire",
        "fire-recompute",
        "fire-keep",
    ],
)
def test_random_graphs(fork_server: mpgrad.Pool, options: dict[str, Any], shoots: bool) -> None:
    with (
        every_loss_gets(1.0),
        mpgrad.Pool(2, **options) as pool,
        fire(pool, 0) if shoots else contextlib.nullcontext(),
    ):
        for seed in itertools.count():
            if seed >= PLANS and pool.stats().deaths >= DEATHS * shoots:
                break
            plan = Plan(seed)
            expected = plan.run(lambda fn, *arguments: fn(*arguments), lambda value: value)
            found = plan.run(pool.submit, lambda future: future.result())
            for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                where = f"seed {seed} ({plan.mode}), {number}"
                zero = torch.zeros_like(plan.captured)  # a None where nothing depends on it
                torch.testing.assert_close(
                    zero if ours is None else ours, zero if theirs is None else theirs, msg=where
                )
