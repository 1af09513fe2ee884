"""Pool calls inside `torch.func.grad`, `vjp`, `jvp`, `jacrev`, `vmap` and their like, and on dual tensors.

Such a transform follows computations by wrapping tensors, and a wrapper means nothing in another process. So a map becomes one
`autograd.Function` of the kind that transforms understand: told what the map's derivative or batched form is, they wrap and
unwrap around it. That derivative is a map again, of the function's derivative (`mpgrad.programs`), so transforms may be nested
as deep as they like. Nothing is kept in workers: a derivative runs the function again, under the same seeds and modes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from mpgrad import structure
from mpgrad._torch import dual_level_is_active, has_tangent, is_functorch_wrapped, transforms_are_active
from mpgrad.modes import Modes, current_modes
from mpgrad.programs import Batched, Direct, Jvp, Program, Runner, Vjp

__all__ = ["may_be_followed", "run_followed"]

Arguments = tuple[Sequence[Any], dict[str, Any]]


class Run(Protocol):
    """Runs an operation, unfollowed, under these modes, and without random numbers of its own."""

    def __call__(self, function: Callable[..., Any], calls: list[Arguments], *, modes: Modes) -> list[Any]: ...


def may_be_followed() -> bool:
    """Whether a transform is running, or dual tensors may be about."""
    return transforms_are_active() or dual_level_is_active()


def is_followed(tensor: torch.Tensor) -> bool:
    return is_functorch_wrapped(tensor) or has_tangent(tensor)


def run_followed(function: Callable[..., Any], calls: list[Arguments], seed: int | None, run: Run) -> list[Any] | None:
    """The results of `calls`, followed by the transforms that are running; None where none of them follows any tensor here.

    Raises:
        TypeError, pickle.PicklingError: the function or an item cannot be carried.
    """
    pickled, common = structure.dumps(function)
    own: list[list[torch.Tensor]] = []
    programs: list[Program] = []
    for index, call in enumerate(calls):
        try:
            arguments, tensors = structure.dumps(call)
        except Exception as error:
            raise structure.transported(error, f"item {index}") from error
        own.append(tensors)
        programs.append(Direct(index, arguments))
    if not any(is_followed(tensor) for tensor in itertools.chain(common, *own)):
        return None
    plan = Plan(run, pickled, seed, current_modes(), programs, len(common), [len(tensors) for tensors in own])
    outputs = plan.apply(common, own)
    return [structure.loads(shape, tensors) for shape, tensors in zip(plan.structures, outputs, strict=True)]


class Plan:
    """A map as a function of tensors: those that all calls have in common, then those of each call.

    No tuple or dataclass: transforms would look for tensors in it and rebuild it.
    """

    def __init__(
        self,
        run: Run,
        pickled: bytes,
        seed: int | None,
        modes: Modes,
        programs: Sequence[Program],
        common_count: int,
        own_counts: Sequence[int],
    ) -> None:
        self._operation = run, pickled, seed, modes
        self.programs = programs
        self.common_count = common_count
        self.own_counts = own_counts
        # of the results, by call; known when the map has run
        self.structures: list[bytes] = []
        self.counts: list[int] = []

    def apply(self, common: Sequence[torch.Tensor], own: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The outputs of each call, followed."""
        outputs = Mapped.apply(self, *common, *itertools.chain(*own))  # type: ignore[no-untyped-call]
        return list(per_call(outputs, self.counts))

    def evaluate(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        common, own = self.parts(tensors)
        run, pickled, seed, modes = self._operation
        calls: list[Arguments] = [((program, *mine), {}) for program, mine in zip(self.programs, own, strict=True)]
        results = run(Runner(pickled, common, seed), calls, modes=modes)
        return self.made([shape for shape, _ in results], [outputs for _, outputs in results])

    def made(self, structures: Sequence[bytes], outputs: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        self.structures = list(structures)
        self.counts = [len(each) for each in outputs]
        return tuple(itertools.chain(*outputs)) or (torch.zeros(()),)  # a Function has at least one output

    def parts(self, values: Sequence[Any]) -> tuple[Sequence[Any], list[list[Any]]]:
        """One value per tensor, split into those of the common ones and those of each call."""
        return values[: self.common_count], list(per_call(values[self.common_count :], self.own_counts))

    def derived(
        self, programs: Sequence[Program], common: Sequence[torch.Tensor], own: Sequence[Sequence[torch.Tensor]]
    ) -> Plan:
        return Plan(*self._operation, programs, len(common), [len(each) for each in own])


class Mapped(torch.autograd.Function):
    """A `Plan` as a node."""

    @staticmethod
    def forward(plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return plan.evaluate([tensor.detach() for tensor in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.plan, *tensors = inputs
        ctx.differentiable = list(map(can_be_followed, output))
        ctx.sorts = [(each.shape, each.dtype) for each in output]
        ctx.mark_non_differentiable(*[each for each, there in zip(output, ctx.differentiable, strict=True) if not there])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        tensors = ctx.saved_tensors
        common, own = plan.parts(tensors)
        needed = [needs and can_be_followed(each) for needs, each in zip(ctx.needs_input_grad[1:], tensors, strict=True)]
        common_wanted, own_wanted = plan.parts(needed)
        common_wanted = places(common_wanted)
        calls: list[int] = []
        programs: list[Program] = []
        inputs: list[list[torch.Tensor]] = []
        for call, mine in enumerate(per_call(grads, plan.counts)):
            outputs, wanted = present(mine), places(own_wanted[call])
            if outputs and (wanted or common_wanted):
                calls.append(call)
                programs.append(Vjp(plan.programs[call], len(own[call]), outputs, wanted, common_wanted))
                inputs.append([*own[call], *(mine[k] for k in outputs)])
        found = plan.derived(programs, common, inputs).apply(common, inputs)
        of_common: list[torch.Tensor | None] = [None] * len(common)
        of_own: list[list[torch.Tensor | None]] = [[None] * len(mine) for mine in own]
        for call, gradients in reversed(list(zip(calls, found, strict=True))):  # the last first, as autograd adds up
            wanted = places(own_wanted[call])
            for k, grad in zip(wanted, gradients, strict=False):
                of_own[call][k] = grad
            for k, grad in zip(common_wanted, gradients[len(wanted) :], strict=True):
                held = of_common[k]
                of_common[k] = grad if held is None else held + grad
        return None, *of_common, *itertools.chain(*of_own)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        common, own = plan.parts(ctx.saved_tensors)
        of_common, of_own = plan.parts(tangents[1:])
        common_moving = present(of_common)
        moved = [*common, *(of_common[k] for k in common_moving)]
        calls: list[int] = []
        programs: list[Program] = []
        inputs: list[list[torch.Tensor]] = []
        outputs_of = list(map(places, per_call(ctx.differentiable, plan.counts)))
        for call, outputs in enumerate(outputs_of):
            moving = present(of_own[call])
            if outputs and (moving or common_moving):
                calls.append(call)
                programs.append(Jvp(plan.programs[call], len(own[call]), len(common), outputs, moving, common_moving))
                inputs.append([*own[call], *(of_own[call][k] for k in moving)])
        found = dict(zip(calls, plan.derived(programs, moved, inputs).apply(moved, inputs), strict=True))
        tangents_of: list[list[torch.Tensor | None]] = [[None] * count for count in plan.counts]
        for call, (outputs, sorts) in enumerate(zip(outputs_of, per_call(ctx.sorts, plan.counts), strict=True)):
            resting = [torch.zeros(sorts[k][0], dtype=sorts[k][1]) for k in outputs]
            for k, tangent in zip(outputs, found.get(call, resting), strict=True):
                tangents_of[call][k] = tangent
        return tuple(itertools.chain(*tangents_of)) or (None,)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, *tensors: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
        common, own = plan.parts(tensors)
        common_dims, own_dims = plan.parts(in_dims[1:])
        batched = [bool(present(dims)) or bool(present(common_dims)) for dims in own_dims]
        programs: list[Program] = [
            Batched(program, dims, common_dims, info.randomness) if there else program
            for program, dims, there in zip(plan.programs, own_dims, batched, strict=True)
        ]
        inner = plan.derived(programs, common, own)
        outputs = inner.apply(common, own)
        dims = [0 if there else None for there, each in zip(batched, outputs, strict=True) for _ in each]
        return plan.made(inner.structures, outputs), tuple(dims) or (None,)


def can_be_followed(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def per_call(values: Sequence[Any], counts: Sequence[int]) -> Iterator[list[Any]]:
    rest = iter(values)
    return (list(itertools.islice(rest, count)) for count in counts)


def places(flags: Sequence[bool]) -> list[int]:
    return [k for k, flag in enumerate(flags) if flag]


def present(values: Sequence[object]) -> list[int]:
    return places([value is not None for value in values])
