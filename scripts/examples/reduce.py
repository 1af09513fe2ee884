"""Shows `Pool.map_reduce` and `Pool.reduce`: a log-likelihood that the workers sum, and two folds
side by side."""

import torch

import mpgrad

torch.manual_seed(0)
torch.set_num_threads(1)  # as in each worker
mean, log_scale = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
groups = [5 + torch.randn(1 + n % 7, 3) for n in range(200)]  # of different sizes
decay = torch.tensor(0.9, requires_grad=True)


def log_likelihood(group):
    return torch.distributions.Normal(mean, log_scale.exp()).log_prob(group).sum()


def fold(average, group):
    # the order matters: each step needs the one before
    return decay * average + (1 - decay) * group.mean(0)


def serial_fold(average, groups):
    for group in groups:
        average = fold(average, group)
    return average


with mpgrad.Pool() as pool:
    # workers add up, and each returns one small tensor
    total = pool.map_reduce(log_likelihood, groups, "sum")
    found = torch.autograd.grad(total, [mean, log_scale])
    # one fold for each start, side by side
    averages = pool.reduce(fold, groups, [torch.zeros(3), torch.ones(3)])
    (slope,) = torch.autograd.grad(sum(averages).sum(), decay)

right = sum(log_likelihood(group) for group in groups)
torch.testing.assert_close([total, *found], [right, *torch.autograd.grad(right, [mean, log_scale])])
expected = [serial_fold(start, groups) for start in (torch.zeros(3), torch.ones(3))]
torch.testing.assert_close(
    [*averages, slope], [*expected, *torch.autograd.grad(sum(expected).sum(), decay)]
)
print(f"log-likelihood {total:.1f}, its gradient to the mean {found[0].numpy().round(1)}")
print(
    f"moving average {averages[0].detach().numpy().round(3)}: all as in the serial loop, "
    "including gradients"
)
