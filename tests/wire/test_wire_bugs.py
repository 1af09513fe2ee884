"""Bugs of tensors on their way, and of the memory they lie in, that were, each with its symptom and
its cause."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import mpgrad
from mpgrad.testing import assert_same_as_serial


def test_a_former_result_of_a_worker_that_has_died(fresh_pool: mpgrad.Pool) -> None:
    # symptom: InternalError(KeyError). cause: the memory was forgotten with the worker, although a
    # result still lay in it.
    made = fresh_pool.map(lambda k: (os.getpid(), torch.ones(20_000)), range(4), 1)
    ones = [tensor for _, tensor in made]
    os.kill(made[0][0], signal.SIGKILL)
    for _ in range(3):
        assert [float(r.sum()) for r in fresh_pool.map(lambda t: t * 2, ones)] == [40_000.0] * 4


def test_memory_of_a_dead_worker_that_another_has_seen_before(fork_server: mpgrad.Pool) -> None:
    # symptom: KeyError in the task. cause: the other was told that the memory is new again, and
    # then that it is gone.
    with mpgrad.Pool(2) as pool:
        made = pool.map(lambda k: (os.getpid(), torch.ones(20_000)), range(20), 1)
        results = [tensor for _, tensor in made]
        for _ in range(3):
            assert [float(r.sum()) for r in pool.map(lambda t: t * 2, results)] == [40_000.0] * 20
        os.kill(made[0][0], signal.SIGKILL)
        for _ in range(3):
            assert [float(r.sum()) for r in pool.map(lambda t: t * 2, results)] == [40_000.0] * 20


@pytest.mark.slow
def test_more_new_slabs_than_a_frame_has_descriptors(fork_server: mpgrad.Pool) -> None:
    # symptom: the worker died of an empty deque. cause: descriptors beyond the 64th were cut off.
    tensors = [torch.empty(1).expand(2).clone().resize_(33 << 18) for _ in range(70)]
    with mpgrad.Pool(1) as pool:
        assert pool.apply(len, (tensors,)) == 70


def test_two_views_of_one_former_result(pool2: mpgrad.Pool) -> None:
    # symptom: ValueError in the worker. cause: borrowed memory was known by its address alone,
    # without its size.
    (y,) = pool2.map(lambda n: torch.arange(n, dtype=torch.float64), [200_000])
    ((short, whole),) = pool2.starmap(lambda a, b: (a.sum(), b.sum()), [(y[:100_000], y)])
    assert float(short) == float(y[:100_000].sum()) and float(whole) == float(y.sum())


def test_a_chain_under_inference_mode(pool2: mpgrad.Pool) -> None:
    # symptom: "Inference tensors do not track version counter". cause: the version of every former
    # result was read.
    with torch.inference_mode():
        results = pool2.map(torch.neg, pool2.map(torch.ones, [(50_000,)] * 2))
    assert [float(r[0]) for r in results] == [-1.0, -1.0]


def test_inputs_of_calls_that_were_left_out_are_given_back(pool2: mpgrad.Pool) -> None:
    # symptom: shared memory grew with every failing map. cause: a worker returned only what it had
    # looked at.
    def fails(x: torch.Tensor) -> None:
        raise LookupError

    slots = []
    for _ in range(20):
        with pytest.raises(LookupError):
            pool2.map(fails, [torch.ones(10_000) for _ in range(20)], 10)
        pool2.map(abs, range(8), 1)
        slots.append(sum(len(worker.lent_slots) for worker in pool2._scheduler.workers.values()))
    assert max(slots[10:]) <= 40


def test_strides_with_holes(pool: mpgrad.Pool) -> None:
    # symptom: last bits differed. cause: a strided item came densely packed, and torch adds it up
    # in another order.
    torch.manual_seed(0)
    items = [torch.randn(63, 130, dtype=torch.float64)[:, ::2].requires_grad_() for _ in range(6)]
    items += [
        torch.randn(40, 50, 6, dtype=torch.float64).transpose(0, 2)[1:5, ::3] for _ in range(6)
    ]
    for item, result in zip(
        items, pool.map(lambda x: (x.sum(), x.norm(), x.mean(0), x.stride()), items), strict=True
    ):
        serial = item.sum(), item.norm(), item.mean(0)
        assert all(torch.equal(mine, other) for mine, other in zip(result, serial, strict=False))
        assert result[3] == item.stride()
    assert_same_as_serial(lambda x: x[:, ::2], [torch.randn(5, 7, requires_grad=True)], pool)


def test_one_tensor_as_two_arguments_or_results_stays_one(pool: mpgrad.Pool) -> None:
    # symptom: x.mul_(2) did not show in y, although both were one tensor. cause: the fast path
    # copied each by itself.
    x = torch.ones(2)
    assert pool.starmap(lambda a, b: a.mul_(2) + b, [(x, x)])[0].tolist() == [4, 4]
    ((a, b),) = pool.map(lambda t: (t, t), [x])
    assert a is b


def test_tensors_without_memory(pool2: mpgrad.Pool) -> None:
    """Symptom: random numbers, or a crash. Cause: PyTorch's efficient zeros, which forward mode
    makes, have no bytes."""
    assert torch.equal(
        pool2.map(lambda n: torch._efficientzerotensor((n,)), [3])[0] + 0, torch.zeros(3)
    )
    zeros = torch._efficientzerotensor((2,))
    assert torch.equal(pool2.map(lambda x: x + zeros, [torch.ones(2)])[0], torch.ones(2))
