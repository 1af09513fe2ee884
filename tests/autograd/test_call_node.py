"""The nodes of calls, with a link that leads to no process: what is sent, waited for and released,
and when."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mpgrad.autograd.call_node import attach
from mpgrad.autograd.gates import Captures, gate
from mpgrad.autograd.remote_graph import Backward, OperationGradients, RemoteGraph
from mpgrad.errors import CallNames

pytestmark = pytest.mark.quick


class FakeLink:
    """Answers a backward with the gradient times 10, and records the order of events."""

    sender = None

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def send(self, item: Any) -> None:
        if isinstance(item, Backward):
            self.events.append(("send", item.graph.index))
        else:
            self.events.append(("captures", -1))
            item.calls = 4

    def wait(self, backward: Any) -> FakeLink.Gradients:
        if not isinstance(backward, Backward):
            return self.Gradients([torch.full((2,), 7.0)])
        if self.has_asked:
            return self.Gradients([])
        self.events.append(("wait", backward.graph.index))
        return self.Gradients(
            [grad * 10 for (grad,) in backward.grads for _ in backward.asked.wanted]
        )

    @property
    def has_asked(self) -> bool:
        return ("captures", -1) in self.events

    def note_eager_sum(self, backwards: Sequence[Backward], is_theirs: bool) -> None:
        raise AssertionError("no backward was eager")

    def release(self, graph: RemoteGraph) -> None:
        self.events.append(("release", graph.index))

    class Gradients:
        derived = None

        def __init__(self, grads: list[torch.Tensor | None]) -> None:
            self.grads = grads

        def tensors(self) -> list[torch.Tensor | None]:
            return self.grads


def test_everything_is_sent_before_anything_is_waited_for() -> None:
    link = FakeLink()
    owner = OperationGradients(link, 1, CallNames("", "item"), False, None)
    xs = [torch.ones(3, requires_grad=True) for _ in range(4)]
    capture = torch.ones(2, requires_grad=True)
    token = Captures(owner, [capture]).token()
    results = [
        attach(RemoteGraph(owner, None, 0, index), [torch.ones(3)], token, [gate(x * 2)])[0]
        for index, x in enumerate(xs)
    ]
    sum(result.sum() for result in results).backward()
    names = [name for name, _ in link.events]
    assert names == ["send"] * 4 + ["wait"] * 4 + ["captures"]
    assert [index for name, index in link.events if name == "wait"] == [3, 2, 1, 0]
    assert all(torch.equal(x.grad, torch.full((3,), 20.0)) for x in xs)
    assert torch.equal(capture.grad, torch.full((2,), 7.0))
    link.events.clear()
    del results
    gc.collect()
    assert sorted(link.events) == [("release", index) for index in range(4)]
