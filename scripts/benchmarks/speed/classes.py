"""What objects of a user's own classes cost on their way: of a class that workers import, and of one that travels by value."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import WrongResultError
from figures import Figure, interleaved, median_figure
from losses import doubled
from torch import Tensor

from speed.plan import Plan, Pools

FLOATS = 10


@dataclass
class Imported:
    x: Tensor


def made_here() -> type[Any]:
    """A class that no worker can import, as those of a script."""

    @dataclass
    class ByValue:
        x: Tensor

    return ByValue


def doubled_inside(item: Any) -> Tensor:
    return doubled(item.x)


def doubled_as(kind: type[Any], x: Tensor) -> Any:
    return kind(doubled(x))


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    return [value if isinstance(value, Tensor) else value.x for value in values]


def bench_classes(pools: Pools, plan: Plan) -> Iterator[Figure]:
    tensors = [torch.randn(FLOATS) for _ in range(plan.tiny_items)]
    jobs: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]] = {"tensors": (doubled, tensors)}
    kinds: dict[str, type[Any]] = {"an imported class": Imported, "a class of the script": made_here()}
    for name, kind in kinds.items():
        jobs[f"items of {name}"] = doubled_inside, [kind(tensor) for tensor in tensors]
        jobs[f"results of {name}"] = partial(doubled_as, kind), tensors

    def seconds(job: tuple[Callable[[Any], Any], Any]) -> float:
        began = time.perf_counter()
        pools.keep.map(*job)
        return (time.perf_counter() - began) / len(tensors)

    for name, job in jobs.items():
        function, items = job
        right, found = map(tensors_in, ([function(item) for item in items], pools.keep.map(function, items)))
        if not all(map(torch.equal, found, right)):
            raise WrongResultError(f"{name}: a value differs from the serial loop's")
    row = f"classes: x * 2 on {FLOATS} floats, forward only"
    for name, rounds in interleaved({name: partial(seconds, job) for name, job in jobs.items()}, plan.repeats).items():
        yield median_figure(row, name, [1e6 * value for value in rounds], "us/item")
