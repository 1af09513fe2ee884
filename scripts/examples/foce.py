"""Computes one infant's share of a population fit, by first-order conditional estimation (FOCE)
with interaction. It is differentiable.

A population model gives each infant its own clearance and volume, drawn around those of the
population by random effects `eta`, which are not observed. FOCE replaces the integral over them by
its Laplace approximation at their most probable value, so an infant's objective holds a
minimisation of its own. Infants differ in doses, samples and Newton steps, so they cannot be
batched. Autograd through the steps would be slow, and exact only in the limit. So `most_probable`
uses the implicit function theorem for its derivative, which needs only the optimum.

    parameters ──┬──► most_probable(infant) ──► eta ──┐
                 │        Newton, no graph            ├──► objective(infant, parameters), a scalar
                 └────────────────────────────────────┘
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from infants import Infant
from torch import Tensor

__all__ = ["estimates", "log_concentration", "most_probable", "objective", "scaled"]

LOW_APGAR = 5  # below it, the volume of distribution is 1 + th3 times as large

NEWTON_STEPS = 100  # about 5 are needed; a saddle far from the optimum may take twenty
# Newton's method squares the error at each step, so after a step this small only round-off is left.
STEP_ENOUGH = 1e-8
ROUND_OFF = 1e-12  # relative; a smaller rise of the objective means nothing


def scaled(natural: Tensor) -> Tensor:
    """Convert (th1, th2, th3, om1, om2, s2) in the model's units to parameters that may take any
    real value.

    These are the logarithms of all parameters except th3, and of 1 + th3. th3 is a relative change
    and may be negative.
    """
    return (natural + natural.new_tensor([0, 0, 1, 0, 0, 0])).log()


def estimates(parameters: Tensor) -> Tensor:
    """Return the estimates in the model's units, as the inverse of `scaled`."""
    return parameters.exp() - parameters.new_tensor([0, 0, 1, 0, 0, 0])


def log_concentration(infant: Infant, parameters: Tensor, eta: Tensor) -> Tensor:
    """Return the logarithm of the predicted concentrations (mg/l) at the infant's samples, of shape
    (samples,).

    The model has one compartment, from which the drug is eliminated at rate clearance / volume;
    doses add up. It uses logarithms, because eta and parameters enter linearly there, the objective
    needs nothing else, and a tiny concentration stays above zero.
    """
    log_weight = math.log(infant.weight)
    log_clearance = parameters[0] + log_weight + eta[0]
    log_volume = parameters[1] + log_weight + eta[1]
    if infant.apgar < LOW_APGAR:
        log_volume = log_volume + parameters[2]
    rate = (log_clearance - log_volume).exp()
    elapsed = infant.sample_times[:, None] - infant.dose_times
    given = torch.arange(len(infant.doses)) < infant.doses_before[:, None]
    log_left = torch.where(given, infant.doses.log() - rate * elapsed, -math.inf)
    return log_left.logsumexp(dim=1) - log_volume


def surprise(infant: Infant, parameters: Tensor, eta: Tensor) -> Tensor:
    """Return -2 log of the joint density of the infant's samples and `eta`, up to a constant.
    `most_probable` minimises it.

    sum_j [(y_j - f_j)^2 / R_j + log R_j] + eta' Om^-1 eta, where R_j = f_j^2 s2 grows with the
    prediction f_j (the "interaction").
    """
    log_prediction = log_concentration(infant, parameters, eta)
    variances, log_s2 = parameters[3:5].exp(), parameters[5]
    residuals = (infant.concentrations.log() - log_prediction).expm1()  # (y - f) / f
    samples = residuals.square() / log_s2.exp() + 2 * log_prediction + log_s2
    return samples.sum() + (eta.square() / variances).sum()


def objective(infant: Infant, parameters: Tensor) -> Tensor:
    """Return the infant's share of NONMEM's objective (FOCE with interaction, without the N log 2
    pi term).

    surprise + log |Om| + log |H| at the most probable `eta`, where H takes the expected curvature
    of the samples, sum_j [grad f_j grad f_j' / R_j + 1/2 c_j c_j'] with c_j = grad R_j / R_j. As
    R_j = f_j^2 s2, that is (1 / s2 + 2) sum_j grad log f_j grad log f_j'.

    Arguments:
        infant: what was done and measured.
        parameters: of shape (6,), see `scaled`.

    Raises:
        ArithmeticError: no most probable `eta` was found; the parameters are not finite, or absurd.
    """
    log_variances, log_s2 = parameters[3:5], parameters[5]
    eta = most_probable(infant, parameters)
    with torch.enable_grad():  # the slopes need it, whether or not the caller does
        if not eta.requires_grad:
            eta.requires_grad_()
        slopes = jacobian(log_concentration(infant, parameters, eta), eta)
        curvature = torch.diag((-log_variances).exp()) + ((-log_s2).exp() + 2) * slopes.T @ slopes
        value = surprise(infant, parameters, eta) + log_variances.sum() + torch.logdet(curvature)
    return value if torch.is_grad_enabled() and parameters.requires_grad else value.detach()


def most_probable(infant: Infant, parameters: Tensor) -> Tensor:
    """Return the random effects on log clearance and log volume that minimise `surprise`, of shape
    (2,). They are differentiable."""
    eta: Tensor = MostProbable.apply(parameters, infant)  # type: ignore[no-untyped-call]
    return eta


class MostProbable(torch.autograd.Function):
    """Computes the optimum by Newton's method, and its derivative by the implicit function theorem.

    At the optimum d surprise / d eta = 0 for all parameters, so d eta / d parameters = -H^-1 M,
    with H the Hessian of `surprise` in eta and M its mixed derivative. Backward is itself
    differentiable.
    """

    @staticmethod
    def forward(ctx: Any, parameters: Tensor, infant: Infant) -> Tensor:
        eta = minimise_surprise(infant, parameters)
        ctx.infant = infant
        ctx.save_for_backward(parameters, eta)
        return eta

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # These are views, because eta depends on the parameters, and the theorem needs partial
            # derivatives.
            parameters, eta = (saved.view_as(saved) for saved in ctx.saved_tensors)
            gradient = differentiate(surprise(ctx.infant, parameters, eta), eta)
            weights = torch.linalg.solve(jacobian(gradient, eta), grad_outputs[0])
            (grad,) = torch.autograd.grad(gradient, parameters, -weights, create_graph=create_graph)
        return grad, None


class Expansion(NamedTuple):
    """`surprise` around one eta, to second order."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


def minimise_surprise(infant: Infant, parameters: Tensor) -> Tensor:
    """Run Newton's method with step halving, from zero. So a call depends only on its arguments,
    wherever it runs."""
    here = torch.zeros_like(parameters[:2])
    around = expand(infant, parameters, here)
    step = downhill(around)
    for _ in range(NEWTON_STEPS):
        there = here + step
        around_there = expand(infant, parameters, there)
        promised = around.gradient @ step
        # true for nan
        if (
            not around_there.value
            <= around.value + 1e-4 * promised + ROUND_OFF * around.value.abs()
        ):
            step = step / 2
            continue
        here, around = there, around_there
        step = downhill(around)
        if step.abs().max() < STEP_ENOUGH:
            return here + step
    raise ArithmeticError(
        f"no most probable random effects in {NEWTON_STEPS} Newton steps"
        f" (infant: {infant.subject}, parameters: {parameters.tolist()}); start nearer to "
        "plausible parameters"
    )


def expand(infant: Infant, parameters: Tensor, eta: Tensor) -> Expansion:
    with torch.enable_grad():
        eta = eta.detach().requires_grad_()
        value = surprise(infant, parameters.detach(), eta)
        gradient = differentiate(value, eta)
        hessian = jacobian(gradient, eta)
    return Expansion(value.detach(), gradient.detach(), hessian.detach())


def downhill(around: Expansion) -> Tensor:
    """Return Newton's step, with curvatures taken as positive. Near an optimum they are positive;
    elsewhere the step still descends."""
    curvatures, directions = torch.linalg.eigh(around.hessian)
    slopes = torch.mv(directions.T, around.gradient)
    return -torch.mv(directions, slopes / curvatures.abs())


def differentiate(value: Tensor, point: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(value, point, create_graph=True)
    return gradient


def jacobian(values: Tensor, point: Tensor) -> Tensor:
    """Return d values / d point, of shape (values, point). It is computed one row at a time, which
    for a handful of rows is quicker than vmap."""
    return torch.stack([differentiate(value, point) for value in values])
