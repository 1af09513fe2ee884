"""Shows `Pool.submit` with a graph of calls that is submitted at once. Values that only calls need
go from worker to worker."""

import time

import torch

import mpgrad

torch.manual_seed(0)
torch.set_num_threads(1)  # as in each worker
x = torch.randn(300, 300, dtype=torch.float64, requires_grad=True)


def branch(x, sign):
    for _ in range(10):
        x = torch.tanh(sign * x @ x.T / 300 + x)
    return x


def joined(left, right):
    return (left * right).sum()


def run(submit):
    """Run the same program in both ways: `submit(function, *arguments)` returns a value or a
    future."""
    top = submit(torch.sin, x)
    # two branches side by side
    return submit(joined, submit(branch, top, 1), submit(branch, top, -1))


with mpgrad.Pool(2) as pool:
    began = time.perf_counter()
    future = run(pool.submit)
    handed_over = time.perf_counter() - began
    value = future.result()
    # backward goes the same way back, again with the branches side by side
    (ours,) = torch.autograd.grad(value, x)

right = run(lambda function, *arguments: function(*arguments))
torch.testing.assert_close([value, ours], [right, *torch.autograd.grad(right, x)])
print(f"4 calls submitted in {1e3 * handed_over:.1f} ms, before the first had ended")
print(f"value {value:.6f}, norm of the gradient {ours.norm():.6f}: as in the serial program")
