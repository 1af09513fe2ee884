"""The least that the caller of any pool with gradients has to do for a tiny item.

A bare loop, in which nothing is checked, sent or waited for; what a worker does is thought to cost nothing.

    item ──► its bytes    bytes ──► result ──► node of its own ──► one node for all ──► gate ──► leaf
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from common import Function, tiny_items
from figures import Figure, interleaved, median_figure
from losses import doubled
from torch import Tensor

from speed.plan import Plan, Pools

__all__ = ["bench_floor"]

TOGETHER = 32  # items behind one node
STEPS = ("copy an item", "view a result", "a node for it", "copy a gradient", "view a gradient", "the engine", "drop all")


class Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], gate: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[Tensor, ...]:
        return tuple(ctx.found)


def bench_floor(pools: Pools, plan: Plan) -> Iterator[Figure]:
    items = [item.requires_grad_() for item in tiny_items(plan.tiny_items)]
    loops: dict[str, Callable[[Sequence[Tensor]], list[float]]] = {
        "floor": floor,
        "serial": partial(serial, doubled),
    }
    spent = interleaved({name: partial(loop, items) for name, loop in loops.items()}, plan.repeats)
    row = "floor: CPU time of the caller that no pool can leave out, x * 2, forward and backward"
    for step, values in zip(STEPS, zip(*spent["floor"], strict=True), strict=True):
        yield median_figure(row, step, values, "us/item")
    yield median_figure(row, "all", list(map(sum, spent["floor"])), "us/item")
    yield median_figure(row, "the serial loop", list(map(sum, spent["serial"])), "us/item")


def floor(items: Sequence[Tensor]) -> list[float]:
    """Microseconds an item, of each of STEPS."""
    watch = Watch(items)
    bodies = list(map(bytes_of, items))
    watch.lap()
    results = views(memory := bytearray(b"".join(bodies)), bodies)
    watch.lap()
    found, gates = [], []
    for k in range(0, len(items), TOGETHER):
        gate: Any = Gate.apply(*items[k : k + TOGETHER])  # type: ignore[no-untyped-call]
        gates.append(gate.grad_fn)
        outputs = Call.apply(results[k : k + TOGETHER], gate)  # type: ignore[no-untyped-call]
        found += [output.clone() for output in outputs]
    watch.lap()
    grads = [torch.ones_like(item) for item in items]
    watch.restart()
    bodies = list(map(bytes_of, grads))
    watch.lap()
    given = views(memory, bodies)
    watch.lap()
    for k, node in enumerate(gates):
        node.found = given[k * TOGETHER : (k + 1) * TOGETHER]
    del given, node
    watch.restart()
    torch.autograd.backward(found, grads)
    watch.lap()
    del found, outputs, results, gate, gates
    watch.lap()
    return watch.laps


def serial(function: Function, items: Sequence[Tensor]) -> list[float]:
    grads = [torch.ones_like(item) for item in items]
    watch = Watch(items)
    torch.autograd.backward(list(map(function, items)), grads)
    watch.lap()
    return watch.laps


class Watch:
    """Microseconds of CPU an item."""

    def __init__(self, items: Sequence[Tensor]) -> None:
        for item in items:
            item.grad = None
        self._count = len(items)
        self.laps: list[float] = []
        self.restart()

    def restart(self) -> None:
        self._began = time.process_time()

    def lap(self) -> None:
        self.laps.append(1e6 * (time.process_time() - self._began) / self._count)
        self.restart()


def bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def views(memory: bytearray, bodies: Sequence[bytes]) -> list[Tensor]:
    found, offset = [], 0
    for body in bodies:
        found.append(torch.frombuffer(memory, dtype=torch.float32, count=len(body) // 4, offset=offset))
        offset += len(body)
    return found
