"""Pools with devices, on machines without one: on the device of `pretend_device`, which PyTorch
takes for a GPU.

The order of copies on real devices is `test_channels.py`'s; what needs a real GPU is
`test_gpu.py`'s.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pretend_device
import pytest
import torch
from inside import every_loss_gets, transfer_of
from pretend_device import Pretend

import mpgrad
from mpgrad.memory.accelerator import INSTALLED
from mpgrad.testing import assert_same_as_serial

Tensor = torch.Tensor
ZERO, ONE = "pretend:0", "pretend:1"


LIBRARY = pretend_device.built()
if LIBRARY is None:
    pytest.skip("needs a C++ compiler, for a device to pretend with", allow_module_level=True)


class Known(torch.autograd.Function):
    """The autograd engine's threads for devices stay; here they become known to Python, before
    threads are counted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        threading.current_thread()
        return grad


Pretend(LIBRARY)  # before the first pool, which runs a backward to see how PyTorch behaves
for each in (ZERO, ONE):
    Known.apply(torch.ones(1, device=each, requires_grad=True)).sum().backward()


@pytest.fixture(autouse=True)
def pretend() -> Iterator[Pretend]:
    assert LIBRARY is not None
    before = INSTALLED.accelerator
    INSTALLED.accelerator = Pretend(LIBRARY)
    yield INSTALLED.accelerator
    INSTALLED.accelerator = before


@pytest.fixture(params=["direct", "not exported"])
def device_transfer(request: pytest.FixtureRequest) -> str:
    """How tensors cross: by slots on the device, or through the CPU."""
    if request.param != "direct":
        assert LIBRARY is not None
        INSTALLED.accelerator = Pretend(LIBRARY, refuses=request.param.removeprefix("not "))
    return str(request.param)


def is_direct(pool: mpgrad.Pool) -> bool:
    transfer = transfer_of(pool)
    # one worker may have answered all calls, and the other none
    while not (transfer._is_direct or transfer._is_refused):
        for device in {worker.device for worker in pool.stats().workers} - {"cpu"}:
            pool.map(abs, [1] * 8, device=device)  # who answers has told before how the trial went
    return bool(transfer._is_direct)


def settled(pool: mpgrad.Pool) -> mpgrad.Pool:
    """All workers have started, and tensors go their way."""
    while len(pool.stats().workers) < pool.processes:
        pool.map(abs, [1] * 8)
    is_direct(pool)
    return pool


def ragged(device: str, count: int = 5, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3 + k, 4, **options).to(device).requires_grad_() for k in range(count)]


# --- the same as the serial loop


FOR_EITHER_REASON = pytest.mark.parametrize(
    "device_transfer", ["direct", "not exported", "not opened"], indirect=True
)


@FOR_EITHER_REASON
def test_the_same_as_the_serial_loop(device_transfer: str) -> None:
    weight = torch.randn(4, device=ZERO, dtype=torch.float64, requires_grad=True)
    with mpgrad.Pool(devices=[ZERO, ZERO]) as pool:
        assert is_direct(settled(pool)) == (device_transfer == "direct")
        assert_same_as_serial(
            lambda x: (x * weight).exp().sum(0), ragged(ZERO, dtype=torch.float64), pool, order=2
        )
        assert_same_as_serial(
            lambda x: (x.sin(), weight * 2, 7), ragged(ZERO, dtype=torch.float64), pool
        )
        large = [torch.randn(70_000, device=ZERO, requires_grad=True) for _ in range(4)]
        assert_same_as_serial(lambda x: {"twice": x * 2, "sum": [x[:5].sum()]}, large, pool)
        linear = torch.nn.Linear(4, 3).to(ZERO)
        assert_same_as_serial(linear, ragged(ZERO), pool)


def test_tensors_of_every_form(device_transfer: str) -> None:
    base = torch.arange(24.0).view(4, 6).to(ZERO)
    forms = {
        "contiguous": base,
        "transposed": base.t(),
        "with holes": base[:, ::2],
        "expanded": base[:1].expand(5, 6),
        "empty": base[:0],
        "scalar": base[0, 0],
        "whole numbers": base.long(),
        "truth": base > 3,
        "complex": torch.complex(base, base),
        "parameter": torch.nn.Parameter(base.clone()),
        "sparse": torch.eye(3).to_sparse(),
    }
    with mpgrad.Pool(devices=[ZERO]) as pool:
        settled(pool)
        for name, tensor in forms.items():
            device, stride, kind, same = pool.apply(
                lambda x: (str(x.device), stride_of(x), type(x).__name__, x), (tensor,)
            )
            assert (
                device == str(tensor.device)
                and stride == stride_of(tensor)
                and kind == type(tensor).__name__
            ), name
            assert same.device == tensor.device and torch.equal(dense(same), dense(tensor)), name


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided else None


def dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense().cpu().resolve_conj()


def test_backwards_of_all_kinds(device_transfer: str) -> None:
    items = ragged(ZERO)
    # always the same: some make sums of second derivatives ill-conditioned
    weight = torch.randn(4).to(ZERO).requires_grad_()

    def grads(results: list[Tensor]) -> list[Tensor]:
        inputs = [weight, *items]
        loss = sum(result.pow(2).sum() for result in results)
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        again = torch.autograd.grad(loss, inputs, create_graph=True)
        partial = torch.autograd.grad(results[2].sum(), [items[2]], retain_graph=True)
        second = torch.autograd.grad(sum(grad.pow(2).sum() for grad in again), inputs)
        return [*first, *again, *partial, *second]

    def fn(x: Tensor) -> Tensor:
        return (x * weight).tanh()

    with mpgrad.Pool(devices=[ZERO, ZERO], deterministic=True) as pool:
        settled(pool)
        for found, expected in zip(
            grads(pool.map(fn, items)), grads([fn(x) for x in items]), strict=True
        ):
            assert found.device == expected.device
            torch.testing.assert_close(found.cpu(), expected.cpu())


def test_a_task_may_write_into_what_it_gets(device_transfer: str) -> None:
    x, captured = torch.ones(5000, device=ZERO), torch.ones(5000, device=ZERO)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.add_(1) + captured.clone()

    with mpgrad.Pool(devices=[ZERO]) as pool:
        settled(pool)
        assert [value.cpu()[0].item() for value in pool.map(fn, [x, x])] == [3.0, 3.0]
        assert x.cpu()[0] == 1


# --- where calls run, and that it does not show


def where(*tensors: Tensor) -> list[str]:
    return [str(tensor.device) for tensor in tensors]


def stands() -> str:
    return f"pretend:{torch.ops.pretend.current_device()}"


def test_a_call_follows_its_inputs() -> None:
    here, there = torch.ones(3, device=ZERO), torch.ones(3, device=ONE)
    with mpgrad.Pool(devices=["cpu", ZERO, ONE]) as pool:
        settled(pool)
        pids = {worker.device: worker.pid for worker in pool.stats().workers}
        ran = pool.map(
            lambda x: (os.getpid(), str(x.device)), [here, there, torch.ones(3), here, there] * 3
        )
        assert ran == [(pids[name], name) for name in (ZERO, ONE, "cpu", ZERO, ONE)] * 3
        assert pool.apply(os.getpid) == pids["cpu"]
        assert pool.apply(lambda x: (os.getpid(), where(x, here)), (torch.ones(2),)) == (
            pids[ZERO],
            ["cpu", ZERO],
        )
        assert pool.submit(lambda: (os.getpid(), where(there))).result() == (pids[ONE], [ONE])
        assert list(pool.imap(lambda x: os.getpid(), [there, here])) == [pids[ONE], pids[ZERO]]
        first = pool.starmap(lambda k, x, y: (os.getpid(), where(x, y)), [(1, there, here)])
        assert first == [(pids[ONE], [ONE, ZERO])]


@pytest.mark.parametrize("workers", [["cpu", ONE], [ONE], "pretend"])
def test_device_moves_all_there_and_back(workers: Any, device_transfer: str) -> None:
    captured = torch.full((3,), 3.0, requires_grad=True)
    on_zero = torch.full((3,), 5.0, device=ZERO, requires_grad=True)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, list[str], Tensor]:
        return x * captured + y, where(x, y, captured), torch.ones(2)

    with mpgrad.Pool(devices=workers) as pool:
        settled(pool)
        for x, y in (
            (torch.full((3,), 2.0, requires_grad=True), on_zero),
            (on_zero, torch.ones(3)),
        ):
            for inputs in (x, y, captured):
                inputs.grad = None
            result, seen, made = pool.apply(fn, (x, y), device=ONE)
            assert seen == [ONE] * 3
            # the first input's; and as the function made it
            assert result.device == x.device and made.device.type == "cpu"
            result.sum().backward()
            assert captured.grad is not None and captured.grad.device.type == "cpu"
            assert torch.equal(captured.grad, x.detach().cpu())
            assert (
                x.grad is not None
                and x.grad.device == x.device
                and torch.equal(x.grad.cpu(), captured.detach())
            )
            assert not y.requires_grad or (y.grad is not None and y.grad.device == y.device)


def test_device_cpu_moves_to_the_cpu_and_back(device_transfer: str) -> None:
    x, weight = (
        torch.ones(9000, device=ONE, requires_grad=True),
        torch.full((1,), 3.0, device=ZERO, requires_grad=True),
    )
    with mpgrad.Pool(devices=["cpu", ZERO]) as pool:
        settled(pool)
        result, seen = pool.apply(lambda x: (x * weight, where(x, weight)), (x,), device="cpu")
        assert seen == ["cpu", "cpu"] and str(result.device) == ONE
        result.sum().backward()
        assert x.grad is not None and str(x.grad.device) == ONE and x.grad.cpu()[0] == 3
        assert (
            weight.grad is not None
            and str(weight.grad.device) == ZERO
            and weight.grad.item() == 9000
        )
        first = pool.submit(torch.mul, x, 2)
        (second,) = pool.map(lambda t: (t + 1, where(t)), [first], device="cpu")
        assert second[1] == ["cpu"] and str(first.result().device) == ONE


def test_a_tensor_of_a_device_without_workers_goes_to_another_and_back(
    device_transfer: str,
) -> None:
    x, weight = (
        torch.ones(9000, device=ONE, requires_grad=True),
        torch.full((1,), 3.0, device=ONE, requires_grad=True),
    )
    with mpgrad.Pool(devices=["cpu", ZERO]) as pool:
        settled(pool)
        result, seen = pool.apply(lambda x: (x * weight, where(x, weight)), (x,))
        assert seen == [ZERO, ZERO] and str(result.device) == ONE
        (grad,) = torch.autograd.grad(result.sum(), [x], create_graph=True)
        assert str(grad.device) == ONE and grad.cpu()[0] == 3
        grad.sum().backward()
        assert (
            weight.grad is not None
            and str(weight.grad.device) == ONE
            and weight.grad.item() == 9000
        )


def test_what_a_function_makes_on_a_device_of_its_own_accord_is_on_the_callers() -> None:
    torch.ops.pretend.set_device(0)
    with mpgrad.Pool(devices=[ONE]) as pool:
        settled(pool)
        value, seen = pool.apply(lambda x: (x.to("pretend"), stands()), (torch.ones(2),))
        assert seen == ONE and str(value.device) == ZERO


def test_graphs_of_calls_go_from_device_to_device(device_transfer: str) -> None:
    x = torch.linspace(-1, 1, 4000, requires_grad=True)
    with mpgrad.Pool(devices=["cpu", ZERO, ONE]) as pool:
        settled(pool)
        top = pool.submit(torch.exp, x)
        left = pool.submit(
            lambda t, two: ((t.to(two) * two).sin(), where(two)),
            top,
            torch.full((1,), 2.0, device=ZERO),
        )
        right = pool.submit(
            lambda t, three: ((t.to(three) * three).cos(), where(three)),
            top,
            torch.full((1,), 3.0, device=ONE),
        )
        (both,) = pool.map(
            lambda each: (each[0][0] * each[1][0]).sum(), [(left, right)], device="pretend"
        )
        assert [left.result()[1], right.result()[1]] == [[ZERO], [ONE]]
        both.backward()
        assert x.grad is not None and x.grad.device.type == "cpu"
        y = x.detach().clone().requires_grad_()
        ((y.exp() * 2).sin() * (y.exp() * 3).cos()).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        held = pool.submit(torch.ones_like, torch.ones(3000, device=ONE))
        assert pool.submit(lambda t: (os.getpid(), where(t)), held).result()[1] == [ONE]


def test_reductions_on_devices() -> None:
    items = ragged(ONE)
    with mpgrad.Pool(devices=[ONE, ONE]) as pool:
        total = pool.map_reduce(lambda x: x.sum(0), items, "sum")
        total.sum().backward()
        assert str(total.device) == ONE and all(
            torch.equal(x.grad.cpu(), torch.ones(x.shape)) for x in items
        )


# --- what is refused


def test_devices_that_cannot_be() -> None:
    for devices, error, text in (
        (
            "tpu",
            ValueError,
            r'devices must be "cpu", "pretend" or like "pretend:0" \(devices: \'tpu\'\)',
        ),
        ("cuda:0", ValueError, "devices must be"),
        (
            "pretend:2",
            ValueError,
            r"devices must be one of pretend:0 to pretend:1 \(devices: 'pretend:2'\)",
        ),
        ([], ValueError, "devices must name at least one"),
        (3, TypeError, "devices must be a device, or a list"),
        (["cpu", 3], TypeError, "devices must be"),
    ):
        with pytest.raises(error, match=text):
            mpgrad.Pool(devices=devices)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"how many workers there are \(2\); leave processes out \(processes: 3\)"
    ):
        mpgrad.Pool(3, devices=[ZERO, ONE])
    for engine in ("thread", "inline"):
        with pytest.raises(
            ValueError, match=f"devices are for engines process, stream \\(engine: '{engine}'\\)"
        ):
            mpgrad.Pool(devices=ZERO, engine=engine)
    with pytest.raises(ValueError, match='engine "stream" runs on a GPU; say on which'):
        mpgrad.Pool(engine="stream")
    with pytest.raises(ValueError, match='engine "stream" runs on GPUs only'):
        mpgrad.Pool(engine="stream", devices=["cpu"])
    with pytest.raises(ValueError, match="cannot use the GPUs of its parent"):
        mpgrad.Pool(devices=ZERO, context="fork")


def test_without_a_gpu_devices_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    from mpgrad.memory.accelerator import Cuda

    monkeypatch.setattr(INSTALLED, "accelerator", Cuda())
    for options in (
        {"devices": "cuda"},
        {"devices": ["cpu", "cuda:1"]},
        {"devices": "cuda:0", "engine": "stream"},
    ):
        with pytest.raises(
            ValueError,
            match=r"no CUDA device is available here \(devices: 'cuda.*leave devices out",
        ):
            mpgrad.Pool(**options)


def test_calls_that_no_worker_fits(pool2: mpgrad.Pool) -> None:
    there = torch.ones(2, device=ONE)
    with mpgrad.Pool(devices=["cpu", "cpu"]) as pool:
        with pytest.raises(
            ValueError,
            match=r"on device pretend:1 \(workers: 2 on cpu\); make the pool with devices=",
        ):
            pool.map(abs, [there])
        with pytest.raises(
            ValueError, match=r"no worker of this pool is on device pretend \(workers: 2 on cpu\)"
        ):
            pool.map(abs, [1], device="pretend")
        with pytest.raises(ValueError, match="device must be"):
            pool.map(abs, [1], device="tpu")
        with pytest.raises(TypeError, match="device must be"):
            pool.apply(abs, (1,), device=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one worker for each"):
            pool.resize(3)
    with pytest.raises(
        TypeError, match=r"item 0 .* its device is pretend:1; pass tensor.cpu\(\), or make the pool"
    ):
        pool2.map(abs, [there])
    with pytest.raises(ValueError, match="no worker of this pool is on device pretend:1"):
        pool2.map(abs, [1], device=ONE)
    assert pool2.map(abs, [-1], device="cpu") == [1]


# --- staging


@FOR_EITHER_REASON
def test_staging_is_said_once(device_transfer: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpgrad"), mpgrad.Pool(devices=[ZERO, ONE]) as pool:
        settled(pool)
        pool.map(torch.sin, ragged(ZERO))
    said = [
        record.getMessage()
        for record in caplog.records
        if "through the CPU's memory" in record.getMessage()
    ]
    assert len(said) == (device_transfer != "direct")


# --- deaths


class Fatal:
    """Kills the first `count` workers that come to it."""

    def __init__(self, folder: Any, count: int) -> None:
        self.folder, self.count = str(folder), count

    def __call__(self) -> None:
        for k in range(self.count):
            try:
                os.close(os.open(f"{self.folder}/{k}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_replaced_by_one_on_the_same_device(
    device_transfer: str, tmp_path: Any
) -> None:
    fatal = Fatal(tmp_path, 2)
    weight = torch.full((4,), 2.0, device=ONE, requires_grad=True)
    items = ragged(ONE)

    class Deadly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            fatal()
            return grad * 2

    with mpgrad.Pool(devices=["cpu", ZERO, ONE]) as pool:
        settled(pool)
        results = pool.map(lambda x: Deadly.apply(x) * weight, items)
        sum(result.sum() for result in results).backward()
        assert all(torch.equal(x.grad.cpu(), torch.full(x.shape, 4.0)) for x in items)
        assert pool.stats().deaths == 2
        assert sorted(worker.device for worker in settled(pool).stats().workers) == [
            "cpu",
            ZERO,
            ONE,
        ]


def test_results_outlive_their_worker(tmp_path: Any) -> None:
    with mpgrad.Pool(devices=[ZERO], retries=0) as pool:
        settled(pool)
        future = pool.submit(lambda: torch.arange(5000.0).to(ZERO) * 1)
        pool.synchronize()
        with pytest.raises(mpgrad.WorkerDiedError):
            pool.apply(os._exit, (3,))
        assert future.result().cpu()[4999] == 4999


def test_an_error_that_leaves_the_device_useless_is_a_death(tmp_path: Any) -> None:
    def illegal(k: int) -> int:
        if k == 3:
            pretend_device.BROKEN.append("yes")
            raise RuntimeError("an illegal memory access was encountered")
        return k

    with mpgrad.Pool(devices=[ZERO], retries=1) as pool:
        settled(pool)
        with pytest.raises(mpgrad.WorkerDiedError, match="item 3"):
            pool.map(illegal, range(5))
        assert pool.map(illegal, range(3)) == [0, 1, 2]


# --- memory


def held() -> int:
    gc.collect()
    return int(torch.ops.pretend.mapping_count())


@pytest.mark.parametrize("engine", ["process", "stream"])
def test_memory_is_used_again_and_given_back(engine: str) -> None:
    before = held()
    items = [torch.randn(200_000, device=ZERO, requires_grad=True) for _ in range(3)]
    with mpgrad.Pool(devices=[ZERO], engine=engine) as pool:
        settled(pool)
        counts = []
        for _ in range(12):
            results = pool.map(lambda x: x * 2, items * 4)
            sum(result.sum() for result in results).backward()
            del results
            counts.append(held())
        assert counts[-1] == counts[4]
        last = pool.map(torch.sin, items)
    assert torch.equal(last[0].cpu(), items[0].detach().cpu().sin())
    del last
    assert held() == before


def test_nothing_is_left_of_workers_that_died() -> None:
    before = held()
    with mpgrad.Pool(devices=[ZERO, ZERO]) as pool:
        settled(pool)
        for _ in range(3):
            pool.map(torch.sin, [torch.ones(9000, device=ZERO)] * 4)
            with pytest.raises(mpgrad.WorkerDiedError):
                pool.apply(os._exit, (1,))
            settled(pool)
        during = held()
        pool.map(torch.sin, [torch.ones(9000, device=ZERO)] * 4)
        assert held() <= during + 2
    assert held() == before


# --- all the rest


def test_the_stream_engine_is_threads_of_this_process() -> None:
    weight = torch.randn(4, device=ZERO, dtype=torch.float64, requires_grad=True)
    with mpgrad.Pool(engine="stream", devices=ZERO, processes=3) as pool:
        assert is_direct(settled(pool))
        assert {worker.pid for worker in pool.stats().workers} == {
            os.getpid()
        } and pool.processes == 3
        assert_same_as_serial(
            lambda x: (x * weight).exp().sum(0), ragged(ZERO, dtype=torch.float64), pool, order=2
        )


def test_random_numbers_do_not_depend_on_the_workers(device_transfer: str) -> None:
    def draws(devices: Any) -> Tensor:
        torch.manual_seed(5)
        with mpgrad.Pool(devices=devices) as pool:
            return torch.stack(
                pool.map(lambda x: torch.rand(3) + x.cpu(), [torch.zeros(3, device=ZERO)] * 6)
            )

    assert torch.equal(draws([ZERO]), draws([ZERO] * 3))


def test_stats_and_processes() -> None:
    with mpgrad.Pool(devices=["cpu", torch.device(ONE)]) as pool:
        assert pool.processes == 2
        assert sorted(worker.device for worker in settled(pool).stats().workers) == ["cpu", ONE]
    with mpgrad.Pool(2, devices=ZERO) as pool:
        assert [worker.device for worker in settled(pool).stats().workers] == [ZERO, ZERO]
    with mpgrad.Pool(devices="pretend") as pool:
        assert [worker.device for worker in settled(pool).stats().workers] == [ZERO, ONE]


def test_an_executors_keyword_is_the_functions() -> None:
    with mpgrad.Executor(1) as executor:
        assert executor.submit(torch.zeros, 2, device="cpu").result().shape == (2,)


def test_a_pool_without_devices_asks_nothing_of_them(
    fresh_pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untouchable:
        def __getattribute__(self, name: str) -> Any:
            if name == "__class__":  # pytest's own question, on Python 3.10
                return object.__getattribute__(self, name)
            raise AssertionError(name)

    monkeypatch.setattr(INSTALLED, "accelerator", Untouchable())
    x = torch.ones(5000, requires_grad=True)
    sum(result.sum() for result in fresh_pool.map(lambda t: t * 2, [x, x])).backward()
    fresh_pool.submit(torch.sin, x).result().sum().backward()
    call: Callable[[], Any] = fresh_pool.stats
    assert {worker.device for worker in call().workers} == {"cpu"}


def test_eager_backwards(device_transfer: str) -> None:
    weight = torch.randn(4, device=ZERO, dtype=torch.float64, requires_grad=True)
    items = ragged(ZERO, dtype=torch.float64)
    with every_loss_gets(1.0), mpgrad.Pool(devices=["cpu", ZERO]) as pool:
        settled(pool)
        losses = pool.map(lambda x: (x * weight).exp().sum(), items)
        found = torch.autograd.grad(sum(losses), [weight, *items])
    serial = torch.autograd.grad(sum((x * weight).exp().sum() for x in items), [weight, *items])
    for grad, expected in zip(found, serial, strict=True):
        assert grad.device == expected.device
        torch.testing.assert_close(grad.cpu(), expected.cpu())


def test_autocast_for_the_device_goes_along() -> None:
    with mpgrad.Pool(devices=[ZERO]) as pool:
        with torch.autocast("pretend", torch.bfloat16):
            assert pool.apply(
                lambda: (torch.is_autocast_enabled("pretend"), torch.get_autocast_dtype("pretend"))
            ) == (
                True,
                torch.bfloat16,
            )
        assert not pool.apply(torch.is_autocast_enabled, ("pretend",))


def test_arrays_stay_on_the_cpu(device_transfer: str) -> None:
    numpy = pytest.importorskip("numpy")
    with mpgrad.Pool(devices=["cpu", ZERO]) as pool:
        settled(pool)
        array, seen = pool.apply(
            lambda a, x: (a * 2, where(x)), (numpy.ones(5000), torch.ones(2)), device=ZERO
        )
        assert array.sum() == 10_000 and seen == [ZERO]


def test_derivatives_by_other_ways(device_transfer: str) -> None:
    weight = torch.randn(4, device=ZERO, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, device=ZERO, dtype=torch.float64, requires_grad=True)

    def same(found: Tensor, expected: Tensor) -> None:
        assert found.device == expected.device
        torch.testing.assert_close(found.cpu(), expected.cpu())

    def fn(x: Tensor) -> Tensor:
        return (x * weight).sin()

    with mpgrad.Pool(devices=["cpu", ZERO]) as pool:
        settled(pool)
        rows = torch.eye(4, dtype=torch.float64).to(ZERO)
        (value,) = pool.map(fn, [x])
        (batched,) = torch.autograd.grad(value, x, rows, is_grads_batched=True)
        slopes = (weight * (x * weight).cos()).detach()
        same(batched, torch.diag(slopes.cpu()).to(ZERO))
        same(torch.func.grad(lambda x: pool.map(fn, [x])[0].sum())(x), slopes)
        same(torch.func.jvp(lambda x: pool.map(fn, [x])[0], (x,), (torch.ones_like(x),))[1], slopes)
        # the others want views that this device has not
        (jacobian,) = mpgrad.jacobian(fn, [x], pool=pool, mode="reverse")
        same(jacobian, torch.diag(slopes.cpu()).to(ZERO))
        (per_item,) = mpgrad.per_item_grad(pool.map(lambda x: fn(x).sum(), [x]), weight)
        same(per_item, (x * (x * weight).cos()).detach())
