"""Bugs that were, each with its symptom and its cause."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad
import mpgrad.derivatives.jacobians
from mpgrad.testing import assert_same_as_serial

pytestmark = pytest.mark.usefixtures("calls_are_sent")

SPAN = torch.arange(3, dtype=torch.float64)


def test_an_input_changed_in_place_before_the_result_is_fetched(pool: mpgrad.Pool) -> None:
    # symptom: a gradient of 6 instead of 3. cause: the gate was a view, and a write to its base moved it to the new history.
    a = torch.ones(2, requires_grad=True)
    x = a * 1
    future = pool.submit(lambda t: t * 3, x)
    x.mul_(2)
    future.result().sum().backward()
    assert a.grad.tolist() == [3, 3]


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "own_parameters.py").write_text(
        "import torch\n"
        "W = torch.ones(2, requires_grad=True)\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * W\n"
        "class Plain:\n"
        "    def run(self, x):\n"
        "        return self.inner(x)\n"
        "    def inner(self, x):\n"
        "        return x * W\n"
        "def function(x):\n"
        "    return x * W\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_parameters")
    del sys.modules["own_parameters"]


def test_captures_reached_through_the_code_of_a_class(nursery: mpgrad.Pool, own_module: Any) -> None:
    # symptom: values with the W of the import, and no gradient. cause: a class went by its name, only functions were searched.
    with torch.no_grad():
        own_module.W.fill_(5)
    Net, function = own_module.Net, own_module.function
    net, plain = Net(), own_module.Plain()
    with mpgrad.Pool(2) as pool:
        through_names = net, plain.run, lambda x: net(x), lambda x: Net()(x), function, lambda x: function(x)
        through_module = lambda x: x * own_module.W, lambda x: own_module.Net()(x), lambda x: own_module.function(x)
        for fn in (*through_names, *through_module):
            own_module.W.grad = None
            (result,) = pool.map(fn, [torch.ones(2)])
            assert result.tolist() == [5, 5]
            result.sum().backward()
            assert own_module.W.grad.tolist() == [1, 1]


def test_a_former_result_of_a_worker_that_has_died(fresh_pool: mpgrad.Pool) -> None:
    # symptom: InternalError(KeyError). cause: the memory was forgotten with the worker, although a result still lay in it.
    made = fresh_pool.map(lambda k: (os.getpid(), torch.ones(20_000)), range(4), 1)
    ones = [tensor for _, tensor in made]
    os.kill(made[0][0], signal.SIGKILL)
    for _ in range(3):
        assert [float(r.sum()) for r in fresh_pool.map(lambda t: t * 2, ones)] == [40_000.0] * 4


def test_memory_of_a_dead_worker_that_another_has_seen_before(nursery: mpgrad.Pool) -> None:
    # symptom: KeyError in the task. cause: the other was told that the memory is new again, and then that it is gone.
    with mpgrad.Pool(2) as pool:
        made = pool.map(lambda k: (os.getpid(), torch.ones(20_000)), range(20), 1)
        results = [tensor for _, tensor in made]
        for _ in range(3):
            assert [float(r.sum()) for r in pool.map(lambda t: t * 2, results)] == [40_000.0] * 20
        os.kill(made[0][0], signal.SIGKILL)
        for _ in range(3):
            assert [float(r.sum()) for r in pool.map(lambda t: t * 2, results)] == [40_000.0] * 20


def test_calls_go_back_to_the_queue_in_their_order(nursery: mpgrad.Pool) -> None:
    # symptom: a hang. cause: two chunks of a dead worker were put back one before the other, and a failure in the later one
    # then dropped calls of the earlier one that were still wanted.
    def fn(k: int) -> int:
        if k == 4:
            raise LookupError(k)
        return k

    with mpgrad.Pool(1) as pool:
        pid = pool.apply(os.getpid)
        os.kill(pid, signal.SIGSTOP)
        result = pool.map_async(fn, range(6), 4)
        time.sleep(0.3)  # both chunks are in the pipe of the stopped worker
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LookupError):
            result.get(20)


class KillsItsLoader:
    def __reduce__(self) -> Any:
        return os._exit, (3,)

    def __call__(self, x: int) -> int:
        return x


def test_a_function_that_kills_whoever_loads_it(fresh_pool: mpgrad.Pool) -> None:
    # symptom: workers were replaced for ever. cause: a call that had not begun was put back without counting.
    with pytest.raises(mpgrad.WorkerDiedError, match=r"exited with status 3 \(phase: loading the function, item 0\)"):
        fresh_pool.map(KillsItsLoader(), [1])
    assert fresh_pool.map(abs, [-1]) == [1]


@pytest.mark.slow
def test_more_new_slabs_than_a_frame_has_descriptors(nursery: mpgrad.Pool) -> None:
    # symptom: the worker died of an empty deque. cause: descriptors beyond the 64th were cut off.
    tensors = [torch.empty(1).expand(2).clone().resize_(33 << 18) for _ in range(70)]
    with mpgrad.Pool(1) as pool:
        assert pool.apply(len, (tensors,)) == 70


def test_two_views_of_one_former_result(pool2: mpgrad.Pool) -> None:
    # symptom: ValueError in the worker. cause: borrowed memory was known by its address alone, without its size.
    (y,) = pool2.map(lambda n: torch.arange(n, dtype=torch.float64), [200_000])
    ((short, whole),) = pool2.starmap(lambda a, b: (a.sum(), b.sum()), [(y[:100_000], y)])
    assert float(short) == float(y[:100_000].sum()) and float(whole) == float(y.sum())


def test_a_chain_under_inference_mode(pool2: mpgrad.Pool) -> None:
    # symptom: "Inference tensors do not track version counter". cause: the version of every former result was read.
    with torch.inference_mode():
        results = pool2.map(torch.neg, pool2.map(torch.ones, [(50_000,)] * 2))
    assert [float(r[0]) for r in results] == [-1.0, -1.0]


def test_a_working_directory_that_was_deleted(tmp_path: Path, nursery: mpgrad.Pool) -> None:
    # symptom: InternalError(FileNotFoundError). cause: os.getcwd where workers are hired.
    before = os.getcwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        with mpgrad.Pool(1) as pool:
            assert pool.map(abs, [-1]) == [1]
    finally:
        os.chdir(before)


def test_inputs_of_calls_that_were_left_out_are_given_back(pool2: mpgrad.Pool) -> None:
    # symptom: shared memory grew with every failing map. cause: a worker returned only what it had looked at.
    def fails(x: torch.Tensor) -> None:
        raise LookupError

    slots = []
    for _ in range(20):
        with pytest.raises(LookupError):
            pool2.map(fails, [torch.ones(10_000) for _ in range(20)], 10)
        pool2.map(abs, range(8), 1)
        slots.append(sum(len(worker._lent) for worker in pool2._scheduler._workers.values()))
    assert max(slots[10:]) <= 40


def test_finished_operations_are_forgotten(pool: mpgrad.Pool) -> None:
    # symptom: operations stayed for ever, and callbacks did not come. cause: one that was sealed after its last outcome was
    # not looked at again.
    done = threading.Event()

    def slow_source() -> Iterator[int]:
        yield from range(3)
        time.sleep(0.2)  # all outcomes are there before the end is known

    result = pool.map_async(abs, slow_source(), callback=lambda values: done.set())
    assert done.wait(10) and result.get() == [0, 1, 2]
    for _ in range(10):
        assert len(list(pool.imap(abs, range(17)))) == 17
        assert pool.map(abs, slow_source_of(4)) == [0, 1, 2, 3]
    assert pool._scheduler.wait_until(lambda: not pool._scheduler._unfinished, timeout=5)


def slow_source_of(count: int) -> Iterator[int]:
    for k in range(count):
        time.sleep(0.001)
        yield k


def test_recursive_functions_give_their_captures_back(fresh_pool: mpgrad.Pool) -> None:
    # symptom: 1 MB a map stayed in the worker. cause: the function is a cycle, which waits for the garbage collector.
    weight = torch.ones(1 << 20)

    def recursive(n: int) -> float:
        return recursive(n - 1) if n else float(weight[0])

    for _ in range(60):
        assert fresh_pool.map(recursive, [2]) == [1.0]
        gc.collect()
    lent = sum(len(worker._lent) for worker in fresh_pool._scheduler._workers.values())
    assert lent < 40  # 64 MiB before a worker collects, 4 MiB a map, two workers


def test_threads_share_an_iterator(pool2: mpgrad.Pool) -> None:
    # symptom: lost items and KeyErrors. cause: `next` was not made for several threads, as multiprocessing's is.
    results = pool2.imap(abs, range(600))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = [value for part in threads.map(lambda _: list(results), range(4)) for value in part]
    assert sorted(found) == list(range(600))


def test_strides_with_holes(pool: mpgrad.Pool) -> None:
    # symptom: last bits differed. cause: a strided item came densely packed, and torch adds it up in another order.
    torch.manual_seed(0)
    items = [torch.randn(63, 130, dtype=torch.float64)[:, ::2].requires_grad_() for _ in range(6)]
    items += [torch.randn(40, 50, 6, dtype=torch.float64).transpose(0, 2)[1:5, ::3] for _ in range(6)]
    for item, result in zip(items, pool.map(lambda x: (x.sum(), x.norm(), x.mean(0), x.stride()), items), strict=True):
        serial = item.sum(), item.norm(), item.mean(0)
        assert all(torch.equal(mine, other) for mine, other in zip(result, serial, strict=False))
        assert result[3] == item.stride()
    assert_same_as_serial(lambda x: x[:, ::2], [torch.randn(5, 7, requires_grad=True)], pool)


def test_the_item_that_killed_is_named(fresh_pool: mpgrad.Pool) -> None:
    # symptom: item 0 was blamed. cause: the calls before it in its chunk failed too, each with an error of its own.
    with pytest.raises(mpgrad.WorkerDiedError, match=r"phase: forward, item 3\)"):
        fresh_pool.map(lambda k: os.kill(os.getpid(), signal.SIGKILL) if k == 3 else k, range(20), 10)


def test_reductions_name_blocks_and_targets(pool2: mpgrad.Pool) -> None:
    # symptom: "item 10" for the 101st of 640 items. cause: calls of a reduction are blocks of items, or targets.
    with pytest.raises(ZeroDivisionError) as caught:
        pool2.map_reduce(lambda k: 1 / (k - 100), range(640), "sum")
    assert any("raised in block 10, worker" in note for note in caught.value.__notes__)
    with pytest.raises(ZeroDivisionError) as caught:
        pool2.reduce(lambda target, k: target / k, [1, 0], [1.0, 2.0])
    assert any("raised in target 0, worker" in note for note in caught.value.__notes__)


def test_one_tensor_as_two_arguments_or_results_stays_one(pool: mpgrad.Pool) -> None:
    # symptom: x.mul_(2) did not show in y, although both were one tensor. cause: the fast path copied each by itself.
    x = torch.ones(2)
    assert pool.starmap(lambda a, b: a.mul_(2) + b, [(x, x)])[0].tolist() == [4, 4]
    ((a, b),) = pool.map(lambda t: (t, t), [x])
    assert a is b


def test_a_callback_that_ends_the_program(pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture) -> None:
    # symptom: a broken pool. cause: only Exception was caught.
    pool2.apply_async(abs, (-1,), callback=lambda value: sys.exit(3)).get()
    assert pool2.map(abs, [-1]) == [1]
    assert "a callback of the pool raised" in caplog.text
    pool2.submit(time.sleep, 0.1).add_done_callback(lambda future: sys.exit(3))
    assert pool2.map(abs, [-1] * 8) == [1] * 8
    assert pool2._scheduler.wait_until(lambda: "a callback of a future raised" in caplog.text, timeout=5)


def test_a_result_waited_for_while_it_is_cancelled(fresh_pool: mpgrad.Pool) -> None:
    # symptom: the waiter woke up when a call ended. cause: it was told with the next frame only.
    for _ in range(4):
        fresh_pool.submit(time.sleep, 5)
    future = fresh_pool.submit(abs, -1)
    threading.Timer(0.1, future.cancel).start()
    begin = time.monotonic()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert time.monotonic() - begin < 4


def test_an_iterator_that_is_dropped_half_way(pool2: mpgrad.Pool) -> None:
    results = pool2.imap(torch.ones, [(50_000,)] * 100)
    next(results)
    del results
    gc.collect()
    assert pool2._scheduler.wait_until(lambda: not pool2._scheduler._unfinished, timeout=5)


# --- found by a hostile reading with random programs, before derivatives of higher order were released


def serial(fn: Any, items: Any) -> list[Any]:
    return [fn(item) for item in items]


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_loss_and_a_penalty_on_its_gradient(pool: mpgrad.Pool) -> None:
    """Symptom: "backward through the graph a second time", for the commonest use of create_graph. Cause: the call and its
    derivative share nodes in the worker, and are two backwards there; the first one freed what the second needed."""
    found = []
    for loop in (pool.map, serial):
        x, c = leaf(2), leaf(2, seed=1)
        (result,) = loop(lambda t: (t * c).sin().exp() * t.prod(), [x])
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        rows = [torch.autograd.grad(result[i], x, create_graph=True)[0] for i in range(2)]
        (result.sum() + (gradient**2).sum() + torch.stack(rows).det()).backward()
        found.append([x.grad, c.grad])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            result.sum().backward()
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(*found, strict=True))


def test_an_ordinary_backward_through_a_transform(pool2: mpgrad.Pool) -> None:
    """Symptom: zero gradients. Cause: a vjp inside a vjp made its gradients connected only where its own inputs needed them,
    and not where the captures did."""
    found = []
    for loop in (pool2.map, serial):
        x, c = leaf(3).detach(), leaf(3, seed=1)
        torch.func.grad(lambda x, loop=loop, c=c: loop(lambda t: (t * c).sin().sum(), [x])[0])(x).sum().backward()
        found.append(c.grad)
    assert torch.equal(*found)


def test_tensors_without_memory(pool2: mpgrad.Pool) -> None:
    """Symptom: random numbers, or a crash. Cause: PyTorch's efficient zeros, which forward mode makes, have no bytes."""
    assert torch.equal(pool2.map(lambda n: torch._efficientzerotensor((n,)), [3])[0] + 0, torch.zeros(3))
    zeros = torch._efficientzerotensor((2,))
    assert torch.equal(pool2.map(lambda x: x + zeros, [torch.ones(2)])[0], torch.ones(2))


def test_rows_of_a_jacobian_meet_the_mask_of_the_forward(pool2: mpgrad.Pool) -> None:
    """Symptom: an error, or one mask per row. Cause: the vmap over rows took the function's random numbers for its own."""
    x = leaf(8).detach()
    y, pull_back = torch.func.vjp(lambda x: pool2.map(lambda t: torch.nn.functional.dropout(t, 0.5) * t, [x])[0], x)
    for randomness in ("error", "same", "different"):
        (rows,) = torch.func.vmap(pull_back, randomness=randomness)(torch.eye(8, dtype=torch.float64))
        assert torch.allclose(rows.diagonal() * x, 2 * y)


def test_noise_under_a_vmap_on_an_item_that_is_not_batched(pool2: mpgrad.Pool) -> None:
    """Symptom: the same noise in all rows, or none where it is forbidden. Cause: items without a batch left the vmap."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return pool2.map(lambda t: t + torch.rand(3), [torch.ones(3), x])[0] + 0 * x

    rows = torch.func.vmap(fn, randomness="different")(torch.zeros(4, 3))
    assert not torch.equal(rows[0], rows[1])
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
        torch.func.vmap(fn)(torch.zeros(4, 3))


def test_per_item_gradients_of_what_is_item_and_capture(pool: mpgrad.Pool) -> None:
    """Symptom: half of the gradient. Cause: a tensor was looked for among the items or among the captures."""
    x = leaf(3)
    results = pool.map(lambda t: (t * x).sum(), [x, x])
    assert all(torch.equal(grad, 2 * x) for grad in mpgrad.per_item_grad(results, x))


def test_a_tangent_on_a_gradient_is_not_lost_silently(pool2: mpgrad.Pool) -> None:
    """Symptom: no tangent, no error. Cause: gradients travel without their tangents."""
    (y,) = pool2.map(torch.exp, [x := leaf(3)])
    with torch.autograd.forward_ad.dual_level():
        weights = torch.autograd.forward_ad.make_dual(torch.ones_like(x), torch.ones_like(x))
        with pytest.raises(TypeError, match=r"a gradient that came to a pool's result has a tangent.*torch\.func\.jvp"):
            torch.autograd.grad(y, x, weights.detach() + weights)


def test_a_gradient_inside_a_function_under_a_transform(pool2: mpgrad.Pool) -> None:
    """Symptom: "does not require grad". Cause: the function saw plain tensors where a transform's tensors require grad."""

    def force(t: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((t**3).sum(), t, create_graph=True)[0]

    x = leaf(2).detach()
    for transform in (torch.func.grad, torch.func.hessian):
        ours, theirs = (transform(lambda x, loop=loop: loop(force, [x])[0].sum())(x) for loop in (pool2.map, serial))
        assert torch.equal(ours, theirs)


def test_a_backward_after_the_autocast_region(pool2: mpgrad.Pool) -> None:
    """Symptom: gradients in bfloat16. Cause: a derivative ran wholly under the modes of the forward."""

    def loss(loop: Any, x: torch.Tensor) -> torch.Tensor:
        def fn(t: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return t @ weight

        with torch.autocast("cpu", torch.bfloat16):
            return loop(fn, [x])[0].sum()

    x, weight = leaf(2, 2).float().detach(), leaf(2, 2, seed=1).float().detach()
    ours, theirs = (torch.func.grad(lambda x, loop=loop: loss(loop, x))(x) for loop in (pool2.map, serial))
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated, and still there
def test_tracers_are_refused(pool2: mpgrad.Pool) -> None:
    """Symptom: the traced function returned its first result for ever. Cause: a tracer sees none of a worker's operations."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return pool2.map(lambda t: t * 2, [x])[0] + x

    with pytest.raises(RuntimeError, match=r"a pool call cannot be traced.*by: torch\.jit\.trace"):
        torch.jit.trace(fn, (torch.ones(2),), check_trace=False)
    with pytest.raises(RuntimeError, match=r"a pool call cannot be traced.*torch\.func\.linearize"):
        torch.func.linearize(fn, torch.ones(2))


def test_a_plain_call_inside_a_transform_inline(shared_pools: Any) -> None:
    """Symptom: "belongs to a torch.func transform". Cause: the task ran in the caller's thread, under its transform."""
    pool, w = shared_pools("inline", 1), leaf(2).detach()
    assert torch.equal(torch.func.grad(lambda x: (pool.map(lambda t: t * 2, [w])[0] * x).sum())(w), 2 * w)


def test_a_failed_backward_keeps_nothing(fresh_pool: mpgrad.Pool) -> None:
    """Symptom: graphs in workers, and the caller's locals, that were never let go. Cause: a kept exception kept its
    traceback, and a derivative that nobody took kept the inputs, whose gates kept the derivative."""

    class Local:
        pass

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("bad")

    kept = []

    def in_the_worker() -> None:
        local = Local()
        kept.append(weakref.ref(local))
        results = fresh_pool.map(Fails.apply, [leaf(3) * 1, leaf(3) * 2])
        with contextlib.suppress(KeyError):
            sum(r.sum() for r in results).backward()

    def in_a_hook() -> None:
        local = Local()
        kept.append(weakref.ref(local))
        leaves = [leaf(3, seed=k) for k in range(4)]
        items = [x * 2 for x in leaves]
        items[2].register_hook(lambda grad: 1 / 0)
        results = fresh_pool.map(lambda t: t**3, items)
        with contextlib.suppress(ZeroDivisionError):
            torch.autograd.grad([r.sum() for r in results], leaves, create_graph=True)

    in_the_worker()
    in_a_hook()
    torch.ones(1, requires_grad=True).sum().backward()  # the engine lets go of the last error
    deadline = time.monotonic() + 10
    workers = fresh_pool._scheduler._workers.values()
    while any(worker.graphs for worker in workers) and time.monotonic() < deadline:
        gc.collect()
        fresh_pool.map(abs, range(8), chunksize=1)
    assert [worker.graphs for worker in workers] == [0, 0]
    assert not any(ref() for ref in kept)


def test_another_default_device(pool2: mpgrad.Pool) -> None:
    """Symptom: an error, and with it a placeholder on the wrong device for good. Cause: tensors made without a device."""
    x, c = leaf(7), leaf(7, seed=1)
    with torch.device("meta"):
        (result,) = pool2.map(lambda t: t * c, [x])
        result.backward(c.detach())
    assert torch.equal(x.grad, c * c) and torch.equal(c.grad, x * c)


def test_matmul_precision_travels(pool2: mpgrad.Pool) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert pool2.map(lambda _: torch.get_float32_matmul_precision(), [0]) == ["medium"]
    finally:
        torch.set_float32_matmul_precision("highest")


IMPORTED = """
import collections, dataclasses, functools, types, torch
def new(): return torch.tensor(2.0, requires_grad=True)
@dataclasses.dataclass(slots=True)
class Slots:
    w: torch.Tensor
W = new(); NAMESPACE = types.SimpleNamespace(w=new()); SLOTS = Slots(new()); DEQUE = collections.deque([new()])
@functools.lru_cache(None)
def cached(): return W * 1
def namespace(x): return x * NAMESPACE.w
def slots(x): return x * SLOTS.w
def deque(x): return x * DEQUE[0]
def cache(x): return x * cached()
def local(x):
    import imported_model
    return x * imported_model.W
"""


def test_captures_in_other_containers_of_an_imported_module(nursery: mpgrad.Pool, tmp_path: Any, monkeypatch: Any) -> None:
    """Symptom: no gradient, no error. Cause: a function that goes by name is searched for tensors, but not everywhere."""
    (tmp_path / "imported_model.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("imported_model")
    try:
        with mpgrad.Pool(1) as pool:
            for fn, tensor in (
                (model.namespace, model.NAMESPACE.w),
                (model.slots, model.SLOTS.w),
                (model.deque, model.DEQUE[0]),
                (model.cache, model.W),
                (model.local, model.W),
            ):
                tensor.grad = None
                pool.map(fn, [torch.tensor(3.0)])[0].backward()
                assert tensor.grad == 3.0, fn
    finally:
        del sys.modules["imported_model"]


@pytest.mark.parametrize("expanded", [lambda t: t.sum() * SPAN, lambda t: torch.where(SPAN > 0.5, SPAN, t.sum())])
def test_hessian_of_a_function_with_an_expanded_gradient(pool2: mpgrad.Pool, expanded: Any) -> None:
    """Symptom: "more than one element of the written-to tensor refers to a single memory location". Cause: a gradient came from
    the worker expanded, as it was made; forward mode gives tangents the strides of their values, and writes them there."""
    found = torch.func.hessian(lambda x: pool2.map(expanded, [x])[0].sum())(SPAN * 2)
    assert torch.equal(found, torch.func.hessian(lambda x: expanded(x).sum())(SPAN * 2))


class RaisesForThree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.count = x.numel()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if ctx.count == 3:
            raise ValueError("no gradient for three")
        return grad


@pytest.mark.parametrize("counts", [(3, 2, 2, 2, 2, 2), (3, 3, 3)])
def test_a_backward_that_raises_where_only_captures_are_wanted(pool: mpgrad.Pool, counts: tuple[int, ...]) -> None:
    """Symptom: the capture's gradient lacked that item's part, without an error; where all items of a worker raised, the worker
    died, and other graphs with it. Cause: nobody took the replies of the calls, only the sum, which might not exist."""
    c = torch.tensor(2.0, requires_grad=True)
    others = pool.map(lambda x: (x * c * 3).sum(), [torch.ones(2)] * 4)
    results = pool.map(lambda x: RaisesForThree.apply(x * c).sum(), [torch.ones(n) for n in counts])
    with pytest.raises(ValueError, match="no gradient for three"):
        torch.autograd.grad(sum(results), c)
    loss = sum(pool.map(lambda x: (x * c).sum(), [torch.ones(2)] * 4))
    assert torch.autograd.grad(loss, c)[0] == 8
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, c)
    assert torch.autograd.grad(sum(others), c)[0] == 24


def test_forward_mode_around_a_pool_whose_task_turns_gradients_off(pool: mpgrad.Pool) -> None:
    """Symptom: the derivative followed what `no_grad` hides, or not, depending on the output's size. Cause: what refuses that
    in the caller is a function mode of its thread, which no worker has."""

    def fn(c: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = c.sum()
        return torch.cat([c * constant] * 10)

    c, expected = torch.tensor([2.0]), torch.full((10, 1), 2.0)
    mpgrad.derivatives.jacobians.SAID.clear()
    with pytest.warns(UserWarning, match=r"forward mode follows what is computed under torch\.no_grad"):
        assert torch.equal(mpgrad.jacobian(lambda c: pool.map(fn, [c])[0], c), expected)
        assert torch.equal(mpgrad.jvp(lambda c: pool.map(fn, [c])[0], c, torch.ones(1))[1], expected[:, 0])


def test_a_complex_result_has_no_implied_gradient(pool2: mpgrad.Pool) -> None:
    x = torch.ones(1, dtype=torch.complex64, requires_grad=True)
    results = pool2.map(lambda x: x * 2, [x])
    with pytest.raises(ValueError, match=r"results\[0\] is complex, and no grad_outputs says"):
        mpgrad.per_item_grad(results, x)


def test_many_derivatives_of_one_graph_do_not_add_up(pool2: mpgrad.Pool) -> None:
    """Symptom: each backward took longer than the one before. Cause: a list of all derivatives a graph ever had."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (y,) = pool2.map(lambda x: x**3, [x])
    for _ in range(20):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    gc.collect()
    torch.autograd.grad(y.sum(), x, create_graph=True)
    assert len(y.grad_fn.graph.family) <= 3


def test_failed_backwards_with_captures_leave_little(pool: mpgrad.Pool) -> None:
    """Symptom: memory in caller and workers for every backward that failed. Cause: what would be collected at its end."""
    c = torch.ones(3, requires_grad=True)
    xs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    results = pool.map(lambda x: x * c, xs)
    home = results[0].grad_fn.graph.home

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("by hook")

    handle = xs[0].register_hook(fails)
    for _ in range(300):
        with pytest.raises(ValueError, match="by hook"):
            sum(y.sum() for y in results).backward(retain_graph=True)
    assert len(home._contributions) <= 257
    handle.remove()
    c.grad = None
    sum(y.sum() for y in results).backward()
    assert torch.equal(c.grad, torch.full((3,), 2.0))


def test_while_another_thread_imports_the_compiler(pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    # symptom: AttributeError. cause: a module is in sys.modules before what it defines is there.
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    assert pool2.map(abs, [-1]) == [1]


def test_hooks_of_a_checkpoint_around_an_inline_pool() -> None:
    """Symptom: a map of two items gave one result, now and then. Cause: the worker, in the caller's thread, saved tensors under
    the checkpoint's hooks; these ended the second run of the region in the middle of a task."""
    c = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    with mpgrad.Pool(1, engine="inline", inline="never") as pool:

        def region(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
            a, b = pool.map(task, [x * 2, x.exp()])
            return (a * b).tanh()

        def task(t: torch.Tensor) -> torch.Tensor:
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            return (t * c).sin()

        for _ in range(10):
            seen: list[bool] = []
            x = torch.full((3,), 0.25, dtype=torch.float64, requires_grad=True)
            torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False).sum().backward()
            assert seen == [True, True]
            y = x.detach().requires_grad_()
            ((y * 2 * c).sin() * (y.exp() * c).sin()).tanh().sum().backward()
            assert torch.equal(x.grad, y.grad)
