"""Probes of `private.transforms`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from mpgrad.errors import contextmanager
from mpgrad.torch_state import private
from mpgrad.torch_state.probes.expectations import behaviour, expect
from mpgrad.torch_state.probes.nodes import Node, leaf


@behaviour("within torch.func.vmap, tensors and levels say what they are")
def levels_of_vmap() -> None:
    plain, seen = torch.arange(6.0, device="cpu").reshape(3, 2), list[Any]()

    def look(row: torch.Tensor) -> torch.Tensor:
        level = private.level_of(row)
        batch, dim = private.unbatched(row, level)
        seen.append((private.transforms_are_active(), private.level_count(), private.vmap_levels() == {level}, dim))
        seen.append([private.is_functorch_wrapped(each) and private.is_batched(each) for each in (row, plain)])
        expect(plain.tolist(), batch.tolist())
        with private.outside_transforms():
            seen.append((private.transforms_are_active(), private.has_plain_memory(row)))
        return private.batched(plain * 2, level, older=False)

    expect((plain * 2).tolist(), torch.func.vmap(look)(plain).tolist())
    expect([(True, 1, True, 0), [True, False], (False, False)], seen)

    def look_further(row: torch.Tensor) -> torch.Tensor:
        def look_again(number: torch.Tensor) -> torch.Tensor:
            return number * private.level_count() * max(private.vmap_levels())

        inner: Any = torch.func.vmap(look_again)
        return inner(row)  # type: ignore[no-any-return]

    expect((plain * 4).tolist(), torch.func.vmap(look_further)(plain).tolist())  # two of them, numbered from 1
    expect((False, 0, frozenset()), (private.transforms_are_active(), private.level_count(), private.vmap_levels()))


@behaviour("a tensor that torch.func.grad follows is told from a batch")
def tensors_that_grad_follows() -> None:
    plain = torch.ones(2, device="cpu")
    level = torch._C._functorch._grad_increment_nesting()  # as `torch.func.grad`, whose first use takes seconds
    try:
        followed = torch._C._functorch._wrap_for_grad(plain, level)
        expect((True, False), (private.is_functorch_wrapped(followed), private.is_batched(followed)))
        ended = [private.has_ended(followed)]
    finally:
        torch._C._functorch._grad_decrement_nesting()
    expect([False, True], [*ended, private.has_ended(followed)])


@behaviour("batched gradients come to nodes as wrappers, of torch.func.vmap's kind or the one before")
def batched_gradients() -> None:
    batch, seen = torch.arange(6.0, dtype=torch.float64, device="cpu").reshape(3, 2), list[Any]()

    def look(row: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append((private.is_batched_the_older_way(row), private.older_levels(), private.has_plain_memory(row)))
        older = private.unbatched_the_older_way(row, 1)
        expect(batch.tolist(), older.tolist())
        return (private.batched(older * 2, 1, older=True),)

    (doubled,) = private.vmap_the_older_way(look)(batch)
    expect((batch * 2).tolist(), doubled.tolist())
    expect(([(True, 1, False)], 0, False), (seen, private.older_levels(), private.is_batched_the_older_way(batch)))

    def is_wrapper(grad: torch.Tensor) -> torch.Tensor:
        seen.append(private.is_batched(grad) or private.is_batched_the_older_way(grad))
        return grad

    x = leaf()
    result = private.apply(Node, x, is_wrapper)

    def pull_back(row: torch.Tensor) -> tuple[torch.Tensor]:
        (grad,) = private.gradients([result], [x], [row], keep=True, create=False)
        assert grad is not None
        return (grad,)

    with without_looking_for_nan():
        for vmap in (private.vmap_the_older_way, torch.func.vmap):
            (grad,) = vmap(pull_back)(batch)
            expect((True, batch.tolist()), (seen.pop(), grad.tolist()))


@contextmanager
def without_looking_for_nan() -> Iterator[None]:
    """Where anomaly detection looks for NaN, in all threads of the process, PyTorch refuses batches."""
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        yield
        return
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(True, check_nan=True)


@behaviour("forward-mode differentiation says whether it is on, and can be switched off")
def forward_mode() -> None:
    plain = torch.ones(2, device="cpu")
    with private.within_dual_level():
        dual = torch._VF._make_dual(plain, plain, level=forward_ad._current_level)
        expect((True, True, False), (private.dual_level_is_active(), private.has_tangent(dual), private.has_tangent(plain)))
        with private.without_tangents():
            expect(False, private.has_tangent(dual.view(2)))
        expect(True, private.has_tangent(dual.view(2)))
    count: int = torch._functorch.eager_transforms.JVP_NESTING
    with private.known_to_torch_func():
        expect(count + 1, torch._functorch.eager_transforms.JVP_NESTING)
