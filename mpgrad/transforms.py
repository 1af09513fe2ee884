"""Runs pool calls inside `torch.func.grad`, `vjp`, `jvp`, `jacrev`, `vmap` and similar transforms,
and on dual tensors.

Such a transform follows computations by wrapping tensors, and a wrapper means nothing in another
process. So a map becomes one `autograd.Function` of the kind that transforms understand. It gives
them the map's derivative and batched form, and they wrap and unwrap tensors around it. The
derivative is also a map, which runs the function's derivative (`tasks.transform_programs`). So
transforms may be nested to any depth. Nothing is kept in workers: a derivative runs the function
again, under the same seeds and modes. This module runs in the caller. Workers run the programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.autograd.call_node import strays_behind
from mpgrad.autograd.gates import ROOT, ROOT_EDGE
from mpgrad.errors import LostGradientError
from mpgrad.pickling import structure
from mpgrad.pickling.exceptions import item_not_carried
from mpgrad.pickling.state import ItemStreams, dumps_whole
from mpgrad.pickling.streams import drawn
from mpgrad.tasks.transform_programs import (
    BatchedProgram,
    DirectProgram,
    JvpProgram,
    Program,
    ProgramRunner,
    VjpProgram,
)
from mpgrad.torch_state.modes import Modes, current_modes
from mpgrad.torch_state.private import (
    dual_level_is_active,
    has_ended,
    has_tangent,
    is_functorch_wrapped,
    is_refusing_no_grad,
    leaf_will_run,
    level_count,
    older_levels,
    plus,
    transforms_are_active,
    vmap_levels,
    without_refusal,
)
from mpgrad.tracebacks import without_own_frames
from mpgrad.wire.tensor_refs import overlaps

__all__ = ["may_be_followed", "run_followed"]

Arguments = tuple[Sequence[Any], dict[str, Any]]


# Runs a function for each of the calls under `modes`, hidden from transforms and without drawing
# random numbers.
Run = Callable[..., list[Any]]


def may_be_followed() -> bool:
    """Return whether a transform is running, or dual tensors may exist."""
    return transforms_are_active() or dual_level_is_active()


def is_followed(tensor: torch.Tensor) -> bool:
    """Return whether a transform computes with the tensor, or the tensor has a tangent."""
    return is_functorch_wrapped(tensor) or has_tangent(tensor)


def run_followed(
    function: Callable[..., Any],
    calls: list[Arguments],
    items: Iterable[Any] | ItemStreams | None,
    draw_seed: Callable[[], int | None],
    run: Run,
) -> list[Any] | None:
    """Return the results of `calls`, which the running transforms follow. Return None if no
    transform follows any tensor of the calls.

    `items`: the arguments of each call, if they can be read beforehand.

    Raises:
        TypeError, pickle.PicklingError: the function or an item cannot be sent.
    """
    pickled, common = dumps_whole(function)
    streams = items if isinstance(items, ItemStreams) else ItemStreams(items, common)
    own: list[list[torch.Tensor]] = []
    programs: list[Program] = []
    for index, call in enumerate(calls):
        try:
            arguments, tensors = dumps_whole(call, streams.of(index))
            tensors = streams.drawn(tensors)
        except Exception as error:
            item_not_carried(error, index, *call)
        own.append(tensors)
        needs_grad = [[tensor.requires_grad for tensor in each] for each in (common, tensors)]
        programs.append(DirectProgram(index, arguments, *needs_grad))
    if not any(is_followed(tensor) for tensor in itertools.chain(common, *own)):
        return None
    if any(map(has_ended, itertools.chain(common, *own))):
        raise TypeError(
            "the function or an item holds a tensor of a torch.func transform that has ended, like "
            "a function that torch.func.vjp returned; its graph cannot be sent: call it in this "
            "process, or take the derivative within the function"
        )
    if older_levels():
        raise TypeError(
            "tensors of PyTorch's older vmap cannot be followed into a worker (vectorize=True with "
            "strategy='forward-mode', "
            "check_batched_forward_grad=True); use torch.func.jacfwd"
        )
    counts = [len(tensors) for tensors in own]
    common = drawn(common)
    origin = Origin(
        run, pickled, draw_seed(), current_modes(), vmap_levels(), is_refusing_no_grad(), []
    )
    plan = Plan(origin, programs, len(common), counts)
    outputs = plan.apply(common, own)
    return [
        structure.loads(shape, tensors)
        for shape, tensors in zip(plan.structures, outputs, strict=True)
    ]


class Origin(NamedTuple):
    """Describes the original map: the values that it shares with all its derivatives."""

    run: Run
    pickled: bytes  # the function
    seed: int | None
    modes: Modes
    vmaps: frozenset[int]  # the vmaps that were running around the map
    refusal: bool  # whether a derivative of mpgrad around the map refuses `torch.no_grad`
    strays: list[str]  # descriptions of leaves that only workers have and that results depend on


class Plan:
    """Represents a map as a function of tensors: first the tensors that all calls share, then the
    tensors of each call.

    It is neither a tuple nor a dataclass, because transforms would look for tensors in it and
    rebuild it.
    """

    def __init__(
        self,
        origin: Origin,
        programs: Sequence[Program],
        common_count: int,
        own_counts: Sequence[int],
    ) -> None:
        self.origin = origin
        self.programs = programs
        self.common_count = common_count
        self.own_counts = own_counts
        # the results' structures, by call, once the map has run
        self.structures: list[bytes] = []
        self.counts: list[int] = []

    def apply(
        self, common: Sequence[torch.Tensor], own: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """Return the outputs of each call, which transforms follow."""
        outputs = PlanNode.apply(self, *common, *itertools.chain(*own))  # type: ignore[no-untyped-call]
        if self.origin.strays:
            outputs = StrayNode.apply(self.origin.strays[0], ROOT, *outputs)  # type: ignore[no-untyped-call]
        return list(per_call(outputs, self.counts))

    def evaluate(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        common, own = self.parts(tensors)
        run, pickled, seed, modes, *_ = self.origin
        calls: list[Arguments] = [
            ((program, *mine), {}) for program, mine in zip(self.programs, own, strict=True)
        ]
        with without_refusal():
            results = run(ProgramRunner(pickled, common, seed), calls, modes=modes)
        for each in itertools.chain.from_iterable(outputs for _, outputs in results):
            self.origin.strays.extend(strays_behind(each))
        values = [[writable(each.detach()) for each in outputs] for _, outputs in results]
        return self.made([shape for shape, _ in results], values)

    def made(
        self, structures: Sequence[bytes], outputs: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        self.structures = list(structures)
        self.counts = [len(each) for each in outputs]
        # a Function has at least one output
        return tuple(itertools.chain(*outputs)) or (torch.zeros((), device="cpu"),)

    def parts(self, values: Sequence[Any]) -> tuple[Sequence[Any], list[list[Any]]]:
        """Split values, one per tensor, into the values of the common tensors and those of each
        call."""
        return values[: self.common_count], list(
            per_call(values[self.common_count :], self.own_counts)
        )

    def derived(
        self,
        calls: Mapping[int, tuple[Program, Sequence[torch.Tensor]]],
        common: Sequence[torch.Tensor],
    ) -> tuple[dict[int, list[torch.Tensor]], list[bytes]]:
        """Run other programs for some of the calls, each with its own tensors. Return the outputs,
        which transforms follow, and their structures."""
        programs, own = (
            [program for program, _ in calls.values()],
            [tensors for _, tensors in calls.values()],
        )
        plan = Plan(self.origin, programs, len(common), [len(tensors) for tensors in own])
        outputs = plan.apply(common, own)
        return dict(zip(calls, outputs, strict=True)), plan.structures


class PlanNode(torch.autograd.Function):
    """The autograd node of a `Plan`."""

    @staticmethod
    @without_own_frames
    def forward(plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return plan.evaluate([tensor.detach() for tensor in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.plan, *tensors = inputs
        ctx.differentiable = list(map(can_be_followed, output))
        ctx.sorts = [(each.shape, each.dtype) for each in output]
        ctx.mark_non_differentiable(
            *[each for each, there in zip(output, ctx.differentiable, strict=True) if not there]
        )
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @without_own_frames
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        tensors = ctx.saved_tensors
        common, own = plan.parts(tensors)
        needed = [
            needs and can_be_followed(each)
            for needs, each in zip(ctx.needs_input_grad[1:], tensors, strict=True)
        ]
        needed_of_common, needed_of_own = plan.parts(needed)
        common_wanted, own_wanted = (
            places(needed_of_common),
            [places(flags) for flags in needed_of_own],
        )
        calls: dict[int, tuple[Program, list[torch.Tensor]]] = {}
        for call, mine in enumerate(per_call(grads, plan.counts)):
            outputs = present(mine)
            if outputs and (own_wanted[call] or common_wanted):
                inner, modes = plan.programs[call], current_modes()
                program = VjpProgram(
                    inner, len(own[call]), outputs, own_wanted[call], common_wanted, modes
                )
                calls[call] = program, [*own[call], *(mine[k] for k in outputs)]
        of_common: list[torch.Tensor | None] = [None] * len(common)
        of_own: list[list[torch.Tensor | None]] = [[None] * len(mine) for mine in own]
        gradients, _ = plan.derived(calls, common)
        for call, found in reversed(gradients.items()):  # the last first, as autograd adds up
            count = len(own_wanted[call])
            for k, grad in zip(own_wanted[call], found[:count], strict=True):
                of_own[call][k] = grad
            for k, grad in zip(common_wanted, found[count:], strict=True):
                held = of_common[k]
                of_common[k] = grad if held is None else plus(held, grad)
        return None, *of_common, *itertools.chain(*of_own)

    @staticmethod
    @without_own_frames
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        common, own = plan.parts(ctx.saved_tensors)
        of_common, of_own = plan.parts(tangents[1:])
        common_moving = present(of_common)
        outputs_of = list(map(places, per_call(ctx.differentiable, plan.counts)))
        calls: dict[int, tuple[Program, list[torch.Tensor]]] = {}
        for call, outputs in enumerate(outputs_of):
            moving = present(of_own[call])
            if outputs and (moving or common_moving):
                counts = len(own[call]), len(common)
                program = JvpProgram(
                    plan.programs[call],
                    *counts,
                    outputs,
                    moving,
                    common_moving,
                    plan.origin.refusal,
                )
                calls[call] = program, [*own[call], *(of_own[call][k] for k in moving)]
        found, _ = plan.derived(calls, [*common, *(of_common[k] for k in common_moving)])
        # PyTorch needs a tangent for every output that could have one.
        resting = per_call(
            [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in ctx.sorts],
            plan.counts,
        )
        results: list[torch.Tensor | None] = []
        for call, (outputs, zeros) in enumerate(zip(outputs_of, resting, strict=True)):
            moved = dict(zip(outputs, found[call], strict=True)) if call in found else {}
            results += [
                moved.get(k, zero) if k in outputs else None for k, zero in enumerate(zeros)
            ]
        return tuple(results) or (None,)

    @staticmethod
    @without_own_frames
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, *tensors: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
        common, own = plan.parts(tensors)
        common_dims, own_dims = plan.parts(in_dims[1:])
        # This is a derivative under a vmap that did not run around the map itself, so its random
        # numbers were drawn once.
        randomness = info.randomness if 1 + level_count() in plan.origin.vmaps else "same"
        programs: list[Program] = [
            BatchedProgram(program, dims, common_dims, info.batch_size, randomness)
            for program, dims in zip(plan.programs, own_dims, strict=True)
        ]
        outputs, structures = plan.derived(dict(enumerate(zip(programs, own, strict=True))), common)
        made = plan.made(structures, list(outputs.values()))
        return made, tuple(0 if outputs and any(outputs.values()) else None for _ in made)


class StrayNode(torch.autograd.Function):
    """Returns its outputs unchanged. They depend on a leaf that only workers have, which `root`
    represents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(words: str, root: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.words = inputs[0]
        ctx.mark_non_differentiable(*[each for each in output if not can_be_followed(each)])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.needs_input_grad[1] and leaf_will_run(ROOT_EDGE.node):
            raise LostGradientError(f"a gradient would be lost: a result depends on {ctx.words}")
        return None, None, *grads

    @staticmethod
    def jvp(
        ctx: Any, words: None, root: None, *tangents: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return tuple(each if each is None else each.view_as(each) for each in tangents)


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements share no memory. Forward mode stores a tangent in the memory
    layout of its value, and writes to it."""
    return tensor.contiguous() if tensor.layout is torch.strided and overlaps(tensor) else tensor


def can_be_followed(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's dtype has derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def per_call(values: Sequence[Any], counts: Sequence[int]) -> Iterator[list[Any]]:
    """Yield the values of each call, from the values of all calls in one sequence."""
    rest = iter(values)
    return (list(itertools.islice(rest, count)) for count in counts)


def places(flags: Sequence[bool]) -> list[int]:
    """Return the positions of the flags that are set."""
    return [k for k, flag in enumerate(flags) if flag]


def present(values: Sequence[object]) -> list[int]:
    """Return the positions of the values that are not None."""
    return places([value is not None for value in values])
