"""Compares a pool with the serial loop, for functions and modules that torch.compile made.
test_objects.py runs this script."""

from __future__ import annotations

import collections
import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers_of_a_script import scaled

import mpgrad
from mpgrad.testing import assert_same_as_serial

Tensor = torch.Tensor
LOG = Path(sys.argv[1])
double = functools.partial(torch.full, dtype=torch.float64, requires_grad=True)
weight, bias = double((3,), 2.0), double((3,), 0.5)
factor = 1


def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Record that it was called, and by which process."""
    with LOG.open("a") as log:
        log.write(f"{os.getpid()}\n")
    return graph.forward


def compilations() -> list[int]:
    """Return the number of compilations in each worker since the last call."""
    pids = collections.Counter(LOG.read_text().split() if LOG.exists() else [])
    LOG.write_text("")
    return [count for pid, count in pids.items() if pid != str(os.getpid())]


def helper(x: Tensor) -> Tensor:
    return (x * weight).sin() * factor


@torch.compile(backend=backend)
def of_globals(x: Tensor) -> Tensor:
    return helper(x) + bias


def of_a_closure() -> Callable[[Tensor], Tensor]:
    own = double((3,), 4.0)
    return torch.compile(lambda x: (x * own).exp(), backend=backend, fullgraph=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("shift", torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() + self.shift


class InPlace(Net):
    """Has another forward. A forward compiled for one of the classes would suit both."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()


class Model:
    def __init__(self) -> None:
        self.own = double((3,), 3.0)

    @torch.compile(backend=backend)
    def decorated(self, x: Tensor) -> Tensor:
        return x * self.own

    def plain(self, x: Tensor) -> Tensor:
        return x / self.own


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x * x


@torch.compile(backend=backend, fullgraph=True)
def with_a_function(x: Tensor) -> Tensor:
    return Cube.apply(x * weight)  # type: ignore[no-any-return]


@torch.compiler.disable
def left_alone(x: Tensor) -> Tensor:
    assert not torch.compiler.is_compiling()
    return x * weight


@functools.partial(torch.compiler.disable, recursive=False)
def itself_left_alone(x: Tensor) -> Tensor:
    return x * bias


@torch.compiler.disable
def counts_down(x: Tensor, steps: int = 1) -> Tensor:
    """Calls itself, and has a default."""
    return x if not steps else counts_down(x, steps - 1) + 1


def around(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(fn)
    def wrapped(x: Tensor) -> Tensor:
        return fn(x) * 3

    return wrapped


net, in_place, model = Net(), InPlace(), Model()
in_place.compile(backend=backend)
compiled_net = torch.compile(net, backend=backend)
closure = of_a_closure()
ONCE: dict[str, Callable[[Tensor], Any]] = {  # compiled once in each worker
    "globals": of_globals,
    "closure": closure,
    "module": lambda x: compiled_net(x) * 2,
    "module in place": in_place,
    "method": lambda x: model.decorated(x),
    "bound method": torch.compile(model.plain, backend=backend),
    "Function": with_a_function,
    "disabled inside": torch.compile(lambda x: left_alone(x * 2), backend=backend),
    "dynamic": torch.compile(lambda x: x * bias, backend=backend, dynamic=True),
    "other module": torch.compile(lambda x: scaled(x) * bias, backend=backend),
}
NEVER: dict[str, Callable[[Tensor], Any]] = {  # never compiled by this backend, or no longer
    "wrapper": around(of_globals),
    "disabled": left_alone,
    "itself disabled": itself_left_alone,
    "eager": torch.compile(helper, backend="eager"),
    "aot_eager": torch.compile(helper, backend="aot_eager", dynamic=False),
    "module itself": compiled_net,
    "both": lambda x: (of_globals(x), closure(x)),
}


def try_each(xs: list[Tensor], pool: mpgrad.Pool) -> None:
    for name, fn in {**ONCE, **NEVER}.items():
        try:
            assert_same_as_serial(fn, xs, pool)
            first = compilations()
            for step in range(3):  # functions with different bytes around the same compiled one
                pool.map(lambda x, fn=fn, step=step: (fn(x), step), xs)
            assert (set(first), compilations()) == ({1} if name in ONCE else set(), []), first
            print(name, "ok")
        except BaseException:
            print(name, traceback.format_exc())


def gradients(ys: list[Tensor], xs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(torch.stack(ys).sum(), xs)


def operations_side_by_side(xs: list[Tensor], pool: mpgrad.Pool) -> None:
    """Check that each operation sees the globals that it began with, in calls, calls that run
    again, and backwards."""
    global factor
    results = []
    for factor in (1, 2, 3):  # noqa: B007  # it is a global
        results.append((pool.map(of_globals, xs), gradients([of_globals(x) for x in xs], xs)))
        with torch.no_grad():
            weight.mul_(1.5)
    for ys, expected in results:
        assert all(map(torch.equal, gradients(ys, xs), expected))


one = large = torch.ones(1)


def names_that_go(pool: mpgrad.Pool) -> None:
    """Delete names of an operation that is kept, or dropped, while the values of another operation
    are in place."""
    xs = [torch.tensor([-1.0, 2.0], requires_grad=True)]
    of_builtin = torch.compile(lambda x: abs(x) * 1, backend="eager")
    expected = of_builtin(xs[0])
    for number in (1.0, 2.0):
        globals().update(abs=lambda x: x * 100, large=torch.full((4,), number))
        of_own = torch.compile(lambda x: abs(x) + 0, backend="eager")
        of_large = torch.compile(lambda x, own=one: x * large[0] * own, backend="eager")
        kept = pool.map(of_own, xs), pool.map(of_large, xs)
        assert torch.equal(kept[0][0], xs[0] * 100) and torch.equal(kept[1][0], xs[0] * number)
        del globals()["abs"]
        assert torch.equal(pool.map(of_builtin, xs)[0], expected)
        del globals()["large"], kept
        assert pool.map(left_behind, [0]) == [[]]


def left_behind(x: int) -> list[str]:
    from mpgrad.pickling.compiled import ROOMS

    return [
        name
        for namespace in ROOMS.namespaces.values()
        for name in ("abs", "large")
        if name in namespace
    ]


def main() -> None:
    xs = [torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_() for _ in range(4)]
    with mpgrad.Pool(1) as pool:
        try_each(xs, pool)
    with mpgrad.Pool(1) as pool:
        names_that_go(pool)
        print("names ok")
    for engine, graphs in (("process", "recompute"), ("thread", "keep")):
        with mpgrad.Pool(1, engine=engine, graphs=graphs) as pool:
            operations_side_by_side([x.detach().requires_grad_() for x in xs], pool)
    shapes = [torch.ones(rows, 3, dtype=torch.float64) for rows in (2, 3, 4, 5)]
    with mpgrad.Pool(1) as pool:  # although they are cheap
        for _ in range(3):
            compilations()
            pool.map(of_globals, shapes)
            assert not any(pid == str(os.getpid()) for pid in LOG.read_text().split())
    print("engines ok")
    original: Any = counts_down
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    with mpgrad.Pool(1) as pool:
        for original.__defaults__ in ((1,), (5,)):
            assert torch.equal(pool.map(lambda x: counts_down(x), xs[:1])[0], counts_down(xs[0]))
    print("defaults ok")


if __name__ == "__main__":
    main()
