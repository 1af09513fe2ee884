"""Pools on real GPUs against the serial loop there, bit for bit. None of this runs without one: see
docs/gpu.md."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.testing import assert_same_as_serial

Tensor = torch.Tensor
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings(
        "ignore:.*cuBLAS.*:UserWarning"
    ),  # PyTorch's word about a context that it makes itself
]
POOLS: dict[str, dict[str, Any]] = {
    "one worker": {"devices": ["cuda:0"]},
    "four workers": {"devices": ["cuda:0"] * 4},
    "mixed": {"devices": ["cpu", "cuda:0", "cuda:0"]},
    "streams": {"devices": "cuda:0", "processes": 3, "engine": "stream"},
    "recompute": {"devices": ["cuda:0"] * 2, "graphs": "recompute"},
}


@pytest.fixture(params=POOLS)
def gpu_pool(request: pytest.FixtureRequest) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(**POOLS[request.param]) as pool:
        pool.map(abs, range(16), device="cuda")
        yield pool


def ragged(count: int = 6, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(30 + 7 * k, 4, device="cuda:0", **options).requires_grad_()
        for k in range(count)
    ]


def test_values_gradients_and_captures(gpu_pool: mpgrad.Pool) -> None:
    weight = torch.randn(4, device="cuda:0", requires_grad=True)
    assert_same_as_serial(lambda x: (x * weight).exp().sum(0), ragged(), gpu_pool, order=2)
    assert_same_as_serial(lambda x: (x @ weight).tanh().sum(), ragged(), gpu_pool)
    assert_same_as_serial(torch.nn.Linear(4, 3).cuda(), ragged(), gpu_pool)


def test_large_tensors_in_slots_used_again(gpu_pool: mpgrad.Pool) -> None:
    for _ in range(5):
        large = [torch.randn(1 << 20, device="cuda:0", requires_grad=True) for _ in range(8)]
        assert_same_as_serial(lambda x: torch.cumsum(x.sin(), 0) * 2, large, gpu_pool)


def test_inputs_that_the_gpu_is_still_computing(gpu_pool: mpgrad.Pool) -> None:
    """The caller packs them while a long row of products, on which they depend, is only queued."""
    busy = torch.randn(4096, 4096, device="cuda:0") / 64
    for _ in range(3):
        product = busy
        for _ in range(20):
            product = product @ busy
        items = [product[k] * 1 for k in range(8)]
        found = gpu_pool.map(lambda x: x * 2, items)
        assert all(torch.equal(value, item * 2) for value, item in zip(found, items, strict=True))


def test_kept_graphs_and_differentiable_gradients(gpu_pool: mpgrad.Pool) -> None:
    x = torch.randn(50, device="cuda:0", requires_grad=True)
    (value,) = gpu_pool.map(lambda t: t.sin() * t, [x])
    first = torch.autograd.grad(value.sum(), x, retain_graph=True)[0]
    (again,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    second = torch.autograd.grad(again.sum(), x)[0]
    reference = (x.sin() * x).sum()
    (expected,) = torch.autograd.grad(reference, x, create_graph=True)
    assert torch.equal(first, expected) and torch.equal(again, expected)
    assert torch.equal(second, torch.autograd.grad(expected.sum(), x)[0])


def test_device_moves_there_and_back() -> None:
    x = torch.randn(5000, requires_grad=True)
    with mpgrad.Pool(devices=["cpu", "cuda:0"]) as pool:
        value, seen = pool.apply(lambda t: (t * 2, str(t.device)), (x,), device="cuda")
        assert seen == "cuda:0" and value.device.type == "cpu"
        value.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((5000,), 2.0))
        assert pool.apply(lambda t: str(t.device), (x.cuda(),), device="cpu") == "cpu"
        assert pool.apply(lambda t: str(t.device), (x,)) == "cpu"


def test_random_numbers_do_not_depend_on_the_workers() -> None:
    def draws(workers: int) -> Tensor:
        torch.manual_seed(3)
        with mpgrad.Pool(devices=["cuda:0"] * workers) as pool:
            return torch.stack(pool.map(torch.rand_like, [torch.zeros(64, device="cuda:0")] * 6))

    assert torch.equal(draws(1), draws(3))


def test_processes_can_share_this_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """Else all these tests have shown is that staging works; on a part of a GPU that is what is to
    be expected."""
    with caplog.at_level(logging.WARNING, "mpgrad"), mpgrad.Pool(devices=["cuda:0"]) as pool:
        pool.map(torch.sin, ragged())
    assert not [
        record for record in caplog.records if "through the CPU's memory" in record.getMessage()
    ]


def test_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpgrad.memory import accelerator

    def refused(self: object, memory: Tensor) -> bytes:
        raise OSError("as on a part of a GPU")

    monkeypatch.setattr(accelerator.Cuda, "export", refused)
    weight = torch.randn(4, device="cuda:0", requires_grad=True)
    with mpgrad.Pool(devices=["cuda:0"] * 2) as pool:
        assert_same_as_serial(lambda x: (x * weight).exp().sum(0), ragged(), pool, order=2)


def test_a_worker_dies(tmp_path: Any) -> None:
    def fatal(x: Tensor) -> Tensor:
        try:
            os.close(os.open(tmp_path / "once", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return x * 2
        os.kill(os.getpid(), signal.SIGKILL)
        return x

    with mpgrad.Pool(devices=["cuda:0"] * 2) as pool:
        items = ragged(12)
        results = pool.map(fatal, items)
        assert all(torch.equal(value, item * 2) for value, item in zip(results, items, strict=True))
        sum(value.sum() for value in results).backward()
        assert all(torch.equal(item.grad, torch.full_like(item, 2.0)) for item in items)
        assert pool.stats().deaths == 1


def test_an_assertion_on_the_device_is_a_death_and_the_pool_goes_on() -> None:
    def outside(k: int) -> Tensor:
        return torch.zeros(3, device="cuda:0")[torch.tensor([k], device="cuda:0")]

    with mpgrad.Pool(devices=["cuda:0"], retries=0) as pool:
        with pytest.raises(mpgrad.WorkerDiedError, match="item 1"):
            pool.map(outside, [0, 99])
        assert pool.map(outside, [0])[0].item() == 0


def test_memory_comes_back() -> None:
    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(0)[0]

    def work() -> None:
        with mpgrad.Pool(devices=["cuda:0"] * 2) as pool:
            sum(value.sum() for value in pool.map(torch.sin, ragged(8))).backward()

    work()
    before = free()
    for _ in range(3):
        work()
    assert free() >= before - (32 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus() -> None:
    weight = torch.randn(4, device="cuda:1", requires_grad=True)
    with mpgrad.Pool(devices="cuda") as pool:
        items = [torch.randn(9, 4, device=f"cuda:{k % 2}", requires_grad=True) for k in range(6)]
        assert_same_as_serial(lambda x: (x * weight.to(x.device)).sin(), items, pool, order=2)
        assert pool.map(lambda x: str(x.device), items) == [str(item.device) for item in items]
    with mpgrad.Pool(devices=["cuda:0"]) as pool:
        assert_same_as_serial(
            lambda x: (x * weight).sin(),
            [item for item in items if item.device == weight.device],
            pool,
        )
