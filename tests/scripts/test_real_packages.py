"""real_packages.py compares each package that is installed with the serial loop, and finds what
differs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")

SCRIPT = Path(__file__).parents[2] / "scripts" / "reliability" / "real_packages.py"
LIMIT = 58  # seconds on a busy machine; a quiet one takes 10


@pytest.mark.slow
def test_the_table() -> None:
    installed = ("attrs", "networkx", "tqdm")
    command = [sys.executable, str(SCRIPT), "--packages", *installed, "msgspec"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split(maxsplit=1) for line in ended.stdout.splitlines()[3:]]
    assert {name for name, _ in rows} == {*installed, "msgspec"}
    assert all(told.endswith("same") for name, told in rows if name != "msgspec")


def situation(script: Any, **more: Any) -> Any:
    weight = torch.tensor([2.0], requires_grad=True)
    items = [torch.tensor([float(2**each)], requires_grad=True) for each in range(3)]
    return script.Situation("function", lambda x: x * weight, items, script.nudge(weight), **more)


@pytest.mark.quick
def test_the_loop_and_a_pool_give_the_same(pool2: mpgrad.Pool, script: Any) -> None:
    assert script.verdict(situation(script), map) == "same"
    assert script.verdict(situation(script), pool2.map) == "same"


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 0 * grad


def with_first_state() -> Callable[..., list[torch.Tensor]]:
    """A map that misses a change."""
    results: list[torch.Tensor] = []

    def mapped(fn: Callable[[Any], torch.Tensor], items: Any) -> list[torch.Tensor]:
        values = [fn(item) for item in items]
        results[:] = results or [value.detach() for value in values]
        return [
            value + (kept - value.detach()) for value, kept in zip(values, results, strict=True)
        ]

    return mapped


def failing(fn: object, items: object) -> Any:
    raise RuntimeError("its remedy\nand more")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mapped", "told"),
    [
        (lambda fn, items: [torch.nextafter(fn(x), x * 9) for x in items], "different (first): "),
        (lambda fn, items: [fn(x).detach() for x in items], "item 0: requires_grad is False"),
        (lambda fn, items: [NoGradient.apply(fn(x)) for x in items], "the gradient of a capture"),
        (with_first_state(), "different (changed): item 0: "),
        (failing, "different (first): RuntimeError: its remedy"),
    ],
)
def test_what_differs_is_found(script: Any, mapped: Any, told: str) -> None:
    assert told in script.verdict(situation(script), mapped)


@pytest.mark.quick
def test_a_refusal_is_one_only_if_it_was_expected(script: Any) -> None:
    expected = script.verdict(situation(script, refused="remedy"), failing)
    assert expected == "refused: RuntimeError: its remedy"
    other = script.verdict(situation(script, refused="another"), failing)
    assert other == "different (first): RuntimeError: its remedy"
