"""Shows `Pool.map` with one model of how springs swing, fitted to series of different lengths, and
compares it with the serial loop."""

import time

import torch

import mpgrad

torch.manual_seed(0)
torch.set_num_threads(1)  # as in each worker
# It is shared by all series. The function captures it, so it is not an argument.
stiffness = torch.tensor(2.0, requires_grad=True)
# their lengths differ, so they cannot be batched
starts = [torch.randn(1 + n % 5, requires_grad=True) for n in range(16)]


def energy_left(start):
    position, speed = start, torch.zeros_like(start)
    for _ in range(1000):  # a thousand small steps of a damped spring
        speed = speed - 0.01 * (stiffness * position + 0.1 * speed)
        position = position + 0.01 * speed
    return (position**2 + speed**2).sum()


def gradients(loop):
    began = time.perf_counter()
    loss = sum(loop(energy_left, starts))
    found = torch.autograd.grad(loss, [stiffness, *starts])
    return time.perf_counter() - began, loss, found


with mpgrad.Pool() as pool:
    pool.map(energy_left, starts[:2])  # the workers have started
    serial_time, serial_loss, serial = gradients(
        lambda function, items: [function(item) for item in items]
    )
    pool_time, pool_loss, ours = gradients(pool.map)

worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, serial, strict=True))
assert torch.equal(pool_loss, serial_loss) and worst < 1e-5, worst
print(
    f"loss {pool_loss:.6f}, d loss / d stiffness {ours[0]:.4f}, and a gradient for each of "
    f"{len(starts)} starts"
)
print(
    f"serial loop {serial_time:.2f} s, {pool.processes} workers {pool_time:.2f} s; gradients "
    f"differ by {worst:.0e} at most"
)
