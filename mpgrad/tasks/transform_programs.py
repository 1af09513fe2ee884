"""Contains the programs that workers run for a pool call inside a `torch.func` transform: the
function itself, or a derivative of it. Both sides use them.

A transform requests the derivative of a map. This derivative is a map of the function's derivative.
So workers need the function as a program on plain tensors, and a way to make new programs from it.
`VjpProgram`, `JvpProgram` and `BatchedProgram` wrap any program, including each other. Nested
transforms are nested wrappers. The caller makes and pickles them, and workers run them.

    DirectProgram ─► VjpProgram ─► JvpProgram ─► BatchedProgram ...
    program(load, common, own) ─► tensors

    `common`: the function's captures, and their tangents
    `own`: the tensors of one call, then cotangents or tangents
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from mpgrad.pickling import structure
from mpgrad.pickling.state import loads_whole
from mpgrad.pickling.streams import Streams
from mpgrad.tasks.jacobians import filled
from mpgrad.torch_state.modes import DIFFERENTIATING, Modes, seed_item, under
from mpgrad.torch_state.private import (
    dual_level_kept,
    held_leaves,
    refusing_no_grad,
    transforms_are_active,
    within_dual_level,
)

__all__ = [
    "BatchedProgram",
    "DirectProgram",
    "JvpProgram",
    "Program",
    "ProgramRunner",
    "VjpProgram",
]

Tensors = Sequence[torch.Tensor]
Load = Callable[[Tensors], Callable[..., Any]]  # the function, with these tensors as its captures


class ProgramRunner:
    """The function of the operation. It runs each call's program on the tensors that all calls
    share and on the call's own tensors."""

    def __init__(self, pickled: bytes, common: Tensors, seed: int | None) -> None:
        self.pickled = pickled
        self.common = list(common)
        self.seed = seed

    def __call__(self, program: Program, *own: torch.Tensor) -> tuple[bytes, list[torch.Tensor]]:
        # A derivative of only some items uses the same random numbers as before.
        if self.seed is not None:
            seed_item(self.seed, program.direct.item)
        tensors = program(
            functools.partial(begun, self.pickled, program.direct.item), self.common, own
        )
        # Outputs that depend on a leaf of another owner keep their graph, because that reports the
        # leaf to the caller.
        return program.direct.result, [
            each if held_leaves([each], ()) else each.detach() for each in tensors
        ]


def begun(pickled: bytes, item: int, tensors: Tensors) -> Any:
    """Load the function with these tensors as its captures, and set the generators that it holds to
    their state for the item."""
    streams = Streams()
    value = loads_whole(pickled, tensors, streams=streams)
    streams.begin(item)
    return value


class Program(ABC):
    """A function of tensors that all calls share (`common`) and of the call's own tensors. It
    returns tensors."""

    direct: DirectProgram
    batches = 0  # vmaps around the function
    tangents = 0  # forward derivatives

    @abstractmethod
    def __call__(self, load: Load, common: Tensors, own: Tensors) -> list[torch.Tensor]: ...

    @property
    def is_plain(self) -> bool:
        """Whether ordinary autograd can compute everything. It supports any `autograd.Function`,
        but torch.func supports only a special kind."""
        return self.batches == 0 and self.tangents <= 1


class DirectProgram(Program):
    """Runs one call of the function. `arguments` is the pickle of (args, kwargs) without their
    tensors."""

    def __init__(
        self, item: int, arguments: bytes, common_needs: Sequence[bool], own_needs: Sequence[bool]
    ) -> None:
        self.item = item
        self.arguments = arguments
        # whether a tensor requires grad as the function sees it
        self.needs = [*common_needs, *own_needs]
        self.result = b""  # the result's structure, known after the program has run

    @property
    def direct(self) -> DirectProgram:  # type: ignore[override]
        return self

    def __call__(self, load: Load, common: Tensors, own: Tensors) -> list[torch.Tensor]:
        tensors = [*common, *own]
        missing = [
            k for k, tensor in enumerate(tensors) if self.needs[k] and not tensor.requires_grad
        ]

        def run(*entered: torch.Tensor) -> list[torch.Tensor]:
            for k, tensor in zip(missing, entered, strict=True):
                tensors[k] = tensor.clone()  # not a leaf, so that the function may write to it
            args, kwargs = begun(self.arguments, self.item, tensors[len(common) :])
            self.result, outputs = structure.dumps(load(tensors[: len(common)])(*args, **kwargs))
            return outputs

        entering = [tensors[k] for k in missing]
        if not missing or not torch.is_grad_enabled():
            return run(*entering)
        # Here a tensor can be made to require grad only by one more transform.
        if transforms_are_active():
            return list(torch.func.vjp(run, *entering)[0])
        # Clones keep a tangent.
        return run(*(tensor.clone().requires_grad_() for tensor in entering))


class DerivedProgram(Program):
    """A program that was made from another one. The outermost program sets `plain`, because the two
    kinds of autograd do not mix."""

    def __init__(self, inner: Program) -> None:
        self.inner = inner
        self.direct = inner.direct
        self.batches = inner.batches
        self.tangents = inner.tangents

    def __call__(self, load: Load, common: Tensors, own: Tensors) -> list[torch.Tensor]:
        plain = self.is_plain
        with (
            DIFFERENTIATING.entered(),
            dual_level_kept() if plain and self.tangents else contextlib.nullcontext(),
        ):
            return self.run(load, list(common), list(own), plain)

    @abstractmethod
    def run(
        self, load: Load, common: list[torch.Tensor], own: list[torch.Tensor], plain: bool
    ) -> list[torch.Tensor]: ...

    def run_inner(
        self, load: Load, common: list[torch.Tensor], own: list[torch.Tensor], plain: bool
    ) -> list[torch.Tensor]:
        if isinstance(self.inner, DerivedProgram):
            return self.inner.run(load, common, own, plain)
        return self.inner(load, common, own)


class VjpProgram(DerivedProgram):
    """Takes cotangents of outputs, and returns gradients of inputs: first those of `own_wanted`,
    then those of `common_wanted`."""

    def __init__(
        self,
        inner: Program,
        own_count: int,
        outputs: Sequence[int],
        own_wanted: Sequence[int],
        common_wanted: Sequence[int],
        modes: Modes,
    ) -> None:
        super().__init__(inner)
        # These are the modes of the backward. The function itself runs under the modes of the
        # forward.
        self.modes = modes._replace(grad=True)
        self.own_count = own_count
        self.outputs = outputs  # the outputs that have a cotangent, in their order
        self.own_wanted = own_wanted
        self.common_wanted = common_wanted

    def run(
        self, load: Load, common: list[torch.Tensor], own: list[torch.Tensor], plain: bool
    ) -> list[torch.Tensor]:
        """Return the gradients of the requested inputs. The cotangents follow the call's own
        tensors."""
        own, cotangents = own[: self.own_count], own[self.own_count :]
        inputs = [*(own[k] for k in self.own_wanted), *(common[k] for k in self.common_wanted)]

        # The function gets clones, which are not leaves, so it may write to them.
        def outputs_of(*inputs: torch.Tensor) -> list[torch.Tensor]:
            count = len(self.own_wanted)
            entered_own = filled(own, self.own_wanted, inputs[:count])
            entered_common = filled(common, self.common_wanted, inputs[count:])
            found = self.run_inner(load, entered_common, entered_own, plain)
            return [found[k] for k in self.outputs]

        if not plain:
            pull_back = torch.func.vjp(
                lambda *inputs: outputs_of(*map(torch.clone, inputs)), *inputs
            )[1]
            with under(self.modes):
                return list(pull_back(cotangents))
        again = any(tensor.requires_grad for tensor in (*own, *common, *cotangents))
        return gradients(outputs_of, inputs, cotangents, again, self.modes)


def gradients(
    outputs_of: Callable[..., list[torch.Tensor]],
    inputs: list[torch.Tensor],
    cotangents: list[torch.Tensor],
    again: bool,
    modes: Modes,
) -> list[torch.Tensor]:
    """Return the gradients of the inputs, which are zero if no output depends on the input. If
    `again`, they can be differentiated."""
    with torch.enable_grad():
        entered = [
            (each if each.requires_grad else each.clone().requires_grad_()).clone()
            for each in inputs
        ]
        edges = [get_gradient_edge(tensor) for tensor in entered]
        outputs = outputs_of(*entered)
        pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if pairs and edges:
            connected, incoming = zip(*pairs, strict=True)
            with under(modes):
                found = torch.autograd.grad(
                    connected, edges, incoming, create_graph=again, allow_unused=True
                )
    zeros = torch.zeros_like
    return [
        zeros(tensor) if grad is None else grad for tensor, grad in zip(inputs, found, strict=True)
    ]


class JvpProgram(DerivedProgram):
    """Takes tangents of inputs, and returns tangents of `outputs`."""

    def __init__(
        self,
        inner: Program,
        own_count: int,
        common_count: int,
        outputs: Sequence[int],
        own_moving: Sequence[int],
        common_moving: Sequence[int],
        refusal: bool,
    ) -> None:
        super().__init__(inner)
        self.tangents += 1
        self.own_count = own_count
        self.common_count = common_count
        self.outputs = outputs
        self.own_moving = own_moving  # the call's own tensors that have a tangent
        self.common_moving = common_moving
        self.refusal = refusal  # whether `torch.no_grad` is refused

    def run(
        self, load: Load, common: list[torch.Tensor], own: list[torch.Tensor], plain: bool
    ) -> list[torch.Tensor]:
        """Return the tangents of the outputs, which are zero if an output does not change. The
        tangents of inputs follow their tensors."""
        tangents = own[self.own_count :] + common[self.common_count :]
        own, common = own[: self.own_count], common[: self.common_count]
        primals = [*(own[k] for k in self.own_moving), *(common[k] for k in self.common_moving)]

        def outputs_of(*primals: torch.Tensor) -> list[torch.Tensor]:
            count = len(self.own_moving)
            entered_own = filled(own, self.own_moving, primals[:count])
            entered_common = filled(common, self.common_moving, primals[count:])
            with refusing_no_grad() if self.refusal else contextlib.nullcontext():
                found = self.run_inner(load, entered_common, entered_own, plain)
            return [found[k] for k in self.outputs]

        if not plain:
            return list(torch.func.jvp(outputs_of, tuple(primals), tuple(tangents))[1])
        with within_dual_level():
            dual = map(forward_ad.make_dual, primals, tangents)
            outputs = list(map(forward_ad.unpack_dual, outputs_of(*dual)))
        return [
            torch.zeros_like(output.primal) if output.tangent is None else output.tangent
            for output in outputs
        ]


class BatchedProgram(DerivedProgram):
    """Runs the program under a vmap. Dimensions are as in `torch.func.vmap`, and always 0 for
    outputs."""

    def __init__(
        self,
        inner: Program,
        own_dims: Sequence[int | None],
        common_dims: Sequence[int | None],
        batch_size: int,
        randomness: str,
    ) -> None:
        super().__init__(inner)
        self.batches += 1
        self.own_dims = own_dims
        self.common_dims = common_dims
        self.batch_size = batch_size
        self.randomness = randomness

    def run(
        self, load: Load, common: list[torch.Tensor], own: list[torch.Tensor], plain: bool
    ) -> list[torch.Tensor]:
        def element(
            own: list[torch.Tensor], common: list[torch.Tensor], nothing: torch.Tensor
        ) -> list[torch.Tensor]:
            return self.run_inner(load, common, own, plain)

        batch = torch.func.vmap(
            element, (list(self.own_dims), list(self.common_dims), 0), randomness=self.randomness
        )
        # This runs even if no tensor is batched, because random numbers may be batched or
        # forbidden.
        return list(batch(own, common, torch.empty(self.batch_size, device="cpu")))
