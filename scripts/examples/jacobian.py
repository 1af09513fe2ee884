"""Shows `mpgrad.jacobian`: the derivative of every output of a simulation, with rows and columns
shared by the workers."""

import time

import torch

import mpgrad

torch.manual_seed(0)
torch.set_num_threads(1)  # as in each worker
rates = torch.rand(4, dtype=torch.float64)
# each patient's doses
patients = [torch.rand(n, dtype=torch.float64) for n in (40, 5, 80, 20)]


def concentrations(rates, doses):
    level, levels = torch.zeros_like(rates), []
    for dose in doses:
        level = level * torch.exp(-rates) + dose * rates  # four compartments that take up and lose
        levels.append(level.sum().log1p())
    return torch.stack(levels)


def row_by_row(doses):
    leaf = rates.clone().requires_grad_()
    values = concentrations(leaf, doses)
    return torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in values])


with mpgrad.Pool() as pool:
    # the workers have started
    mpgrad.jacobian(concentrations, rates, patients[:1], argnums=0, pool=pool)
    began = time.perf_counter()
    # one Jacobian for each patient
    ours = mpgrad.jacobian(concentrations, rates, patients, argnums=0, pool=pool)
    pool_time = time.perf_counter() - began

began = time.perf_counter()
serial = [row_by_row(doses) for doses in patients]
serial_time = time.perf_counter() - began
torch.testing.assert_close(ours, serial)
print(
    f"{len(ours)} Jacobians of shapes {[tuple(each.shape) for each in ours]}: as row by row in a "
    "serial loop"
)
print(f"serial, row by row {1e3 * serial_time:.0f} ms; pool {1e3 * pool_time:.0f} ms")
