"""The nodes of calls with an owner that is no process: what is sent, waited for and released, and
when."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpgrad.autograd.call_node import attach
from mpgrad.autograd.gates import Captures, gate
from mpgrad.autograd.remote_graph import Backward, RemoteGraph
from mpgrad.errors import CallNames

pytestmark = pytest.mark.quick


class FakeOwner:
    """Answers a backward with the gradient times 10, and records the order of events."""

    deterministic = False
    names = CallNames("", "item")
    timeout = None
    reach: Any = None

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def send(self, backward: Backward) -> None:
        self.events.append(("send", backward.graph.index))

    def wait(self, backward: Backward) -> FakeOwner.Gradients:
        self.events.append(("wait", backward.graph.index))
        return self.Gradients([grad * 10 for (grad,) in backward.grads for _ in backward.wanted])

    def add_to_sum(self, backward: Backward) -> None:
        assert backward.captures

    def capture_gradients(self, task: int) -> Iterator[list[torch.Tensor | None]]:
        self.events.append(("captures", -1))
        yield [torch.full((2,), 7.0)]

    def release(self, graph: RemoteGraph) -> None:
        self.events.append(("release", graph.index))

    class Gradients:
        def __init__(self, grads: list[torch.Tensor | None]) -> None:
            self.grads = grads

        def tensors(self) -> list[torch.Tensor | None]:
            return self.grads


def test_everything_is_sent_before_anything_is_waited_for() -> None:
    owner = FakeOwner()
    xs = [torch.ones(3, requires_grad=True) for _ in range(4)]
    capture = torch.ones(2, requires_grad=True)
    token = Captures(owner, [capture]).token()
    results = [
        attach(RemoteGraph(owner, None, 0, index), [torch.ones(3)], token, [gate(x * 2)])[0]
        for index, x in enumerate(xs)
    ]
    sum(result.sum() for result in results).backward()
    names = [name for name, _ in owner.events]
    assert names == ["send"] * 4 + ["wait"] * 4 + ["captures"]
    assert [index for name, index in owner.events if name == "wait"] == [3, 2, 1, 0]
    assert all(torch.equal(x.grad, torch.full((3,), 20.0)) for x in xs)
    assert torch.equal(capture.grad, torch.full((2,), 7.0))
    owner.events.clear()
    del results
    gc.collect()
    assert sorted(owner.events) == [("release", index) for index in range(4)]
