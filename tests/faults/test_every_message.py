"""A worker is killed at every message of a map and its backwards, one after the other: every run
ends as if nothing had been.

On the workers' side of the pipe, the first worker to come to the n-th frame kills itself: before it
handles it, after, with half of an answer in the pipe, or with all of it. On the parent's side, the
worker is killed when the parent has just sent its n-th frame, or has just read one, so that what it
was doing then is left to chance. An undisturbed run tells how many there are. Each way takes every
second or fourth frame, from another one on; tests/simulation plays a death at every message.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import every_loss_gets, workers_begun

import mpgrad
from mpgrad.scheduling.deliveries import Deliveries
from mpgrad.scheduling.receiving import Receiver
from mpgrad.wire.frames import Channel, Frame

pytestmark = pytest.mark.slow

ITEMS = 9
Tensor = torch.Tensor


def scenario(pool: mpgrad.Pool) -> list[Tensor]:
    """Losses, values, gradients of items and captures, second order with captures, a chain, a large
    tensor, random numbers."""
    torch.manual_seed(0)
    weight = torch.linspace(0.5, 1.5, 3, dtype=torch.float64, requires_grad=True)
    items = [
        torch.linspace(-1, k, 3, dtype=torch.float64, requires_grad=True) for k in range(ITEMS)
    ]
    large = torch.linspace(0, 1, 3000, dtype=torch.float64, requires_grad=True)  # lies in a slot

    def fn(x: Tensor) -> Tensor:
        torch.randn(())
        y = (x * weight).sin() * torch.rand(3, dtype=torch.float64)
        return y if len(x) == 3 else y[:1]

    def sums(t: Tensor) -> Tensor:
        t.mul_(2)  # a private copy, each time
        return (t.view(-1, 3) * weight).sum(0)

    inputs = [weight, *items]
    losses = pool.map(lambda x: (x * weight).exp().sum(), items, 2)
    of_losses = torch.autograd.grad(torch.stack(losses).sum(), inputs)
    first = pool.map(fn, items, 2)
    second = pool.map(lambda y: y.exp() + weight, first, 1)
    (third,) = pool.map(sums, [large * 1])
    loss = sum(y.sum() for y in second) * third.sum()
    assert isinstance(loss, Tensor)
    inputs.append(large)
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty = sum((grad**2).sum() for grad in grads)
    both = torch.autograd.grad([loss, penalty], inputs)
    return [each.detach() for each in (*losses, *of_losses, *first, *second, third, *grads, *both)]


# --- on the workers' side


class Killer:
    """Counts, over all workers, in a file; kills this one at the count that is written beside
    it."""

    def __init__(self, folder: Path, when: str) -> None:
        self.folder = folder
        self.when = when
        self.shots = self.killed = 0

    def install(self) -> None:
        from mpgrad.workers.main import Worker

        if self.when in ("before", "after"):
            handle = Worker.handle

            def handled(worker: Worker, frame: Frame) -> None:
                fatal = self.counts()
                if fatal and self.when == "before":
                    self.die()
                handle(worker, frame)
                if fatal:
                    self.die()

            Worker.handle = handled  # type: ignore[method-assign]
        else:
            send = Channel.send

            def sent(
                channel: Channel,
                messages: Any,
                payload: Sequence[bytes] = (),
                descriptors: Sequence[int] = (),
            ) -> None:
                fatal = self.counts()
                if fatal and self.when == "half":
                    channel._socket.send(bytes(10))
                    self.die()
                send(channel, messages, payload, descriptors)
                if fatal:
                    self.die()

            Channel.send = sent  # type: ignore[method-assign]

    def counts(self) -> bool:
        # without a buffer it is written at once, and lies where `tell` says
        with open(self.folder / "frames", "ab", buffering=0) as frames:
            frames.write(b".")
            number = frames.tell()
        fatal = (self.folder / "fatal").read_text().split()
        return str(number) in fatal

    @staticmethod
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def frames(self) -> int:
        return (self.folder / "frames").stat().st_size


def run_with(killer: Killer, fatal: Sequence[int]) -> list[Tensor]:
    (killer.folder / "frames").write_bytes(b"")
    (killer.folder / "fatal").write_text(" ".join(map(str, fatal)))
    with mpgrad.Pool(2, deterministic=True, initializer=killer.install) as pool:
        found = scenario(pool)
        killer.killed += replaced(pool)
        killer.shots += sum(each <= killer.frames() for each in fatal)
        return found


def replaced(pool: mpgrad.Pool) -> int:
    """How many workers have died so far and been noticed."""
    return workers_begun(pool) - pool.processes


@pytest.fixture(scope="module")
def undisturbed(fork_server: mpgrad.Pool) -> list[Tensor]:
    with mpgrad.Pool(2, deterministic=True) as pool:
        return scenario(pool)


def assert_same(
    found: list[Tensor], expected: list[Tensor], note: object, exactly: bool = True
) -> None:
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(
            ours, theirs, rtol=0 if exactly else 1e-13, atol=0 if exactly else 1e-13
        ), (note, place)


def test_the_scenario_is_right(undisturbed: list[Tensor]) -> None:
    with mpgrad.Pool(1, engine="inline", deterministic=True) as pool:
        assert_same(scenario(pool), undisturbed, "inline")


@pytest.mark.parametrize(
    ("when", "first", "step"), [("before", 1, 4), ("after", 3, 4), ("half", 2, 2), ("whole", 4, 4)]
)
def test_a_kill_at_every_frame_of_the_workers(
    undisturbed: list[Tensor], tmp_path: Path, when: str, first: int, step: int
) -> None:
    killer = Killer(tmp_path, when)
    assert_same(run_with(killer, []), undisturbed, "no kill")
    frames = killer.frames()
    assert frames > 15
    kills = range(first, frames + 1, step)
    for fatal in kills:
        assert_same(run_with(killer, [fatal]), undisturbed, fatal)
    # some runs have fewer frames, and the last worker is seen to die after the end
    assert killer.killed > killer.shots / 2 > 0


def test_two_kills(undisturbed: list[Tensor], tmp_path: Path) -> None:
    killer = Killer(tmp_path, "before")
    for fatal in range(2, 40, 6):
        assert_same(run_with(killer, [fatal, fatal + 1]), undisturbed, fatal)
    assert killer.killed > killer.shots / 2 > 0


# --- on the parent's side


class Shooter:
    """Kills the worker of the n-th frame that the parent sends or reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self.count = self.fatal = self.shots = self.killed = 0
        original = getattr(owner, method)

        def counted(part: Any, worker: Any, *arguments: Any) -> None:
            original(part, worker, *arguments)
            self.count += 1
            if self.count == self.fatal and worker.pid > 0 and worker.gone is None:
                # a `Stop` may have ended it already
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                    self.shots += 1

        monkeypatch.setattr(owner, method, counted)

    def run(self, fatal: int, **options: Any) -> list[Tensor]:
        with every_loss_gets(1.0), mpgrad.Pool(2, **options) as pool:
            pool.map(abs, range(4), 1)
            self.count, self.fatal = 0, fatal
            found = scenario(pool)
            self.killed += replaced(pool)
            self.fatal = -1  # none at the pool's end, which nobody would see
            return found


@pytest.mark.parametrize(
    ("owner", "method", "options", "first", "step"),
    [
        (Deliveries, "transmit", {}, 1, 2),
        (Receiver, "_receive", {}, 2, 2),
        (Receiver, "_receive", {"deterministic": True}, 1, 4),
        (Deliveries, "transmit", {"graphs": "recompute"}, 2, 4),
        (Deliveries, "transmit", {"graphs": "keep"}, 3, 4),
        (Receiver, "_receive", {"graphs": "keep"}, 4, 4),
        (Receiver, "_receive", {"graph_memory": 4000}, 1, 4),
    ],
    ids=str,
)
def test_a_kill_at_every_frame_of_the_parent(
    undisturbed: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    options: dict[str, Any],
    first: int,
    step: int,
) -> None:
    shooter = Shooter(monkeypatch, owner, method)
    # without it, the sums of the captures' gradients depend on who adds up what
    exactly = "deterministic" in options
    assert_same(shooter.run(-1, **options), undisturbed, "no kill", exactly)
    frames = shooter.count
    assert frames > 15
    kills = range(first, frames + 1, step)
    for fatal in kills:
        assert_same(shooter.run(fatal, **options), undisturbed, fatal, exactly)
    assert shooter.killed > shooter.shots / 2 > 0
