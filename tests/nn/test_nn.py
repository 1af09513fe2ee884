"""mpgrad.nn: data parallelism over workers is the undivided module, as torch.nn.parallel means
it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mpgrad
import mpgrad.nn as mnn

pytestmark = pytest.mark.quick


class Pair(NamedTuple):
    a: Any
    b: Any


class Net(nn.Module):
    """Tied parameters, nested modules, a buffer that needs gradients, one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(3, 3, dtype=torch.float64))
        self.rest[1].weight = self.first.weight
        self.register_buffer("scale", torch.rand(3, dtype=torch.float64, requires_grad=True))
        self.register_buffer("shift", torch.rand(3, dtype=torch.float64))

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        return self.rest(self.first(x) * self.scale + self.shift) * factor


def leaves_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.requires_grad)]


def workers(pool: mpgrad.Pool, count: int = 3) -> list[Any]:
    """Some names for workers, also of a pool that has fewer."""
    return [mpgrad.pool.PoolWorker(pool, number) for number in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_data_parallel_is_the_module(pool: mpgrad.Pool, rows: int) -> None:
    net = Net()
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    expected = net(x, factor=2.0)
    for found in (
        mnn.data_parallel(net, x, workers(pool), module_kwargs={"factor": 2.0}),
        mnn.DataParallel(net, workers(pool))(x, factor=2.0),
        mnn.data_parallel(net, (x,), workers(pool, 1), module_kwargs={"factor": 2.0}),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        ours = torch.autograd.grad(found.pow(2).sum(), [x, *leaves_of(net)], retain_graph=True)
        theirs = torch.autograd.grad(expected.pow(2).sum(), [x, *leaves_of(net)], retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_second_derivatives(pool2: mpgrad.Pool) -> None:
    net = Net()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mnn.data_parallel(net, x, pool2.workers), x)
    assert torch.autograd.gradgradcheck(lambda x: mnn.data_parallel(net, x, pool2.workers), x)


def test_replicas_that_are_applied(pool: mpgrad.Pool) -> None:
    net = Net()
    xs = [torch.randn(rows, 3, dtype=torch.float64) for rows in (1, 4, 2)]
    replicas = mnn.replicate(net, workers(pool))
    assert all(replica.first.weight is replica.rest[1].weight for replica in replicas)  # tied
    # one memory
    assert all(
        replica.first.weight.data_ptr() == net.first.weight.data_ptr() for replica in replicas
    )
    assert (
        not any(replica.first.weight.is_leaf for replica in replicas) and type(replicas[0]) is Net
    )
    found = mnn.parallel_apply(
        replicas, xs, workers(pool), [{"factor": k} for k in (1.0, 2.0, 3.0)]
    )
    expected = [net(x, factor=k) for x, k in zip(xs, (1.0, 2.0, 3.0), strict=True)]
    assert all(map(torch.equal, found, expected))
    sum(each.sum() for each in found).backward()
    ours = [leaf.grad for leaf in leaves_of(net)]
    theirs = torch.autograd.grad(sum(each.sum() for each in expected), leaves_of(net))
    torch.testing.assert_close(ours, list(theirs), rtol=1e-12, atol=1e-12)


def test_double_backward_through_replicas(pool2: mpgrad.Pool) -> None:
    net = Net()
    x = torch.randn(2, 3, dtype=torch.float64)

    def penalty(apply: Callable[[Tensor], Any]) -> Any:
        grads = torch.autograd.grad(apply(x).pow(3).sum(), leaves_of(net), create_graph=True)
        return torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), leaves_of(net))

    def replicated(x: Tensor) -> Any:
        return mnn.gather(
            mnn.parallel_apply(mnn.replicate(net, pool2.workers), [x[:1], x[1:]], pool2.workers)
        )

    torch.testing.assert_close(penalty(replicated), penalty(net), rtol=1e-12, atol=1e-12)


def test_frozen_parameters_stay_frozen(pool2: mpgrad.Pool) -> None:
    net = Net()
    net.first.bias.requires_grad_(False)
    replicas = mnn.replicate(net, pool2.workers)
    assert [replica.first.bias.requires_grad for replica in replicas] == [False, False]
    assert [replica.first.weight.requires_grad for replica in replicas] == [True, True]


def test_replicas_here_and_detached(pool2: mpgrad.Pool) -> None:
    """A replica is a module: it may be called here too."""
    net = Net()
    x = torch.randn(2, 3, dtype=torch.float64)
    replicas = mnn.replicate(net, pool2.workers)
    assert torch.equal(replicas[1](x), net(x))
    (grad,) = torch.autograd.grad(sum(replica(x).sum() for replica in replicas), net.first.weight)
    torch.testing.assert_close(grad, 2 * torch.autograd.grad(net(x).sum(), net.first.weight)[0])
    assert (
        not mnn.replicate(net, pool2.workers, detach=True)[0](x).requires_grad
        or net.scale.requires_grad
    )
    assert not mnn.replicate(net, pool2.workers, detach=True)[0].first.weight.requires_grad
    with torch.no_grad():
        assert not mnn.replicate(net, pool2.workers)[0].first.weight.requires_grad


def test_recurrent_modules(pool2: mpgrad.Pool) -> None:
    net = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(5, 6, 3)
    found, _ = mnn.parallel_apply(mnn.replicate(net, pool2.workers), [x, x], pool2.workers)[1]
    torch.testing.assert_close(found, net(x)[0])
    found.sum().backward()
    mine = net.weight_hh_l0.grad
    torch.testing.assert_close(mine, torch.autograd.grad(net(x)[0].sum(), net.weight_hh_l0)[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", ["replicas", "data_parallel"])
def test_buffers_follow_replica_0(pool: mpgrad.Pool, way: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = torch.randn(8, 3)
    alone = copy.deepcopy(net)
    chunks = x.chunk(2)
    for _ in range(3):  # again and again from the caller's buffers
        if way == "replicas":
            devices = workers(pool, 2)
            mnn.parallel_apply(mnn.replicate(net, devices), list(chunks), devices)
        else:
            mnn.data_parallel(net, x, workers(pool, 2))
        alone(chunks[0])
    for (name, ours), (_, theirs) in zip(net.named_buffers(), alone.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    net.eval()
    torch.testing.assert_close(mnn.data_parallel(net, x, workers(pool, 2)), net(x))


def test_buffers_that_a_forward_makes_or_replaces(pool: mpgrad.Pool) -> None:
    """They are lost with the replica, as in PyTorch; what it writes in place is not."""

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("none", None)
            self.register_buffer("grown", torch.zeros(1))
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("same_count", self.count)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "cache"):
                self.register_buffer("cache", x.detach().sum())
            self.none = torch.ones(2)
            self.grown = torch.zeros(len(self.grown) + 1)
            self.count.add_(1)
            return x + self.same_count

    net = Caches()
    x = torch.zeros(4)
    for calls in (1, 2):
        assert torch.equal(
            mnn.data_parallel(net, x, workers(pool, 2)), torch.full((4,), float(calls))
        )
        assert (
            net.count == calls
            and net.same_count is net.count
            and len(net.grown) == 1
            and net.none is None
        )
        assert not hasattr(net, "cache")


def test_no_arguments_and_one_that_is_a_list(pool: mpgrad.Pool) -> None:
    """None was an argument, and a list was several: PyTorch takes only a tuple for several."""

    class Counts(nn.Module):
        def forward(self, *args: Any, word: str = "") -> Tensor:
            return torch.tensor([float(len(args)), float(len(word))])

    module, x = Counts(), torch.ones(2)
    for devices in (workers(pool, 1), workers(pool, 2)):
        assert mnn.data_parallel(module, None, devices).tolist() == [0, 0]
        assert mnn.data_parallel(module, (), devices, module_kwargs={"word": "ab"}).tolist()[
            :2
        ] == [0, 2]
        assert mnn.data_parallel(module, [x, x], devices).tolist()[:2] == [1, 0]
        assert mnn.data_parallel(module, (x, x), devices).tolist()[:2] == [2, 0]


def test_zero_grad_in_a_replica_says_that_it_has_no_effect(pool: mpgrad.Pool) -> None:
    class Zeroes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.inner.zero_grad()
            return self.inner(x)

    module = Zeroes()
    module.inner.weight.grad = grad = torch.ones(2, 2)
    with pytest.warns(
        UserWarning,
        match=r"zero_grad\(\) from a module created with nn\.DataParallel\(\) has no effect",
    ):
        mnn.data_parallel(module, torch.ones(4, 2), workers(pool, 2))
    assert module.inner.weight.grad is grad and not hasattr(module.inner, "_is_replica")


def test_arguments_of_different_length(pool2: mpgrad.Pool) -> None:
    """No rows are dropped."""
    net, x = nn.Bilinear(1, 1, 1), torch.ones(8, 1)
    for y in (x[:1], x[:0]):
        with pytest.raises(
            ValueError, match=r"different numbers of chunks \(sizes of dimension 0: \[8, "
        ):
            mnn.data_parallel(net, (x, y), pool2.workers)
        with pytest.raises(ValueError, match="different numbers of chunks"):
            mnn.scatter({"x": x, "y": y}, pool2.workers)
    assert mnn.data_parallel(net, (x, x.expand(8, 1)), pool2.workers).shape == (8, 1)


def test_nested_inputs_and_outputs(pool: mpgrad.Pool) -> None:
    class Nested(nn.Module):
        def forward(self, inputs: dict[str, Any], word: str, *, pair: Pair) -> Any:
            assert word == "a word"
            return {
                "sum": inputs["x"] + inputs["list"][0],
                "pair": Pair(pair.a * 2, (pair.b, None)),
            }

    x, y = torch.randn(5, 2), torch.randn(5)
    arguments = ({"x": x, "list": [x * 2]}, "a word"), {"pair": Pair(y, x)}
    found = mnn.data_parallel(Nested(), arguments[0], workers(pool), module_kwargs=arguments[1])
    assert torch.equal(found["sum"], x * 3)
    assert isinstance(found["pair"], Pair) and torch.equal(found["pair"].a, y * 2)
    assert torch.equal(found["pair"].b[0], x) and found["pair"].b[1] is None


def test_scatter(pool2: mpgrad.Pool) -> None:
    devices = workers(pool2)
    x = torch.arange(7)
    assert [each.tolist() for each in mnn.scatter(x, devices)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [each.tolist() for each in mnn.scatter(x, devices, chunk_sizes=[1, 4, 2])] == [
        [0],
        [1, 2, 3, 4],
        [5, 6],
    ]
    assert len(mnn.scatter(x[:2], devices)) == 2
    assert [each.shape for each in mnn.scatter(torch.zeros(2, 6), devices, dim=1)] == [(2, 2)] * 3
    first = mnn.scatter((x, [x, "word"], {"k": x}, Pair(x, 3), ()), devices)[2]
    assert (
        first[0].tolist() == [6]
        and first[1] == [torch.tensor([6]), "word"]
        and first[3].b == 3
        and first[4] == ()
    )
    grads = torch.ones(5, requires_grad=True)
    sum(each.sum() * k for k, each in enumerate(mnn.scatter(grads, devices))).backward()
    assert grads.grad is not None and grads.grad.tolist() == [0, 0, 1, 1, 2]
    with pytest.raises(
        ValueError, match="expected devices and chunk_sizes to be of the same length"
    ):
        mnn.scatter(x, devices, chunk_sizes=[3, 4])


def test_gather() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    joined = mnn.gather([x, x * 2], dim=1)
    assert joined.shape == (2, 6)
    joined.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        assert mnn.gather([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    for outputs, message in [
        ([], "nothing to gather"),
        ([{"a": x}, {"b": x}], "the same keys"),
        ([(x,), (x, x)], "the same length"),
        ([x, 3], "must be tensors if one is"),
        (["a", "b"], "types: str, str"),
    ]:
        with pytest.raises(ValueError, match=message):
            mnn.gather(outputs)


def test_the_first_failing_replica_is_named(pool: mpgrad.Pool) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0] > 0:
                raise LookupError(f"row {x[0]}")
            return x

    with pytest.raises(LookupError, match="row 2") as caught:
        mnn.data_parallel(Fails(), torch.tensor([0.0, 0.0, 2.0, 0.0, 4.0, 0.0]), workers(pool))
    assert any("replica 1" in note for note in caught.value.__notes__)


def test_mistakes(pool2: mpgrad.Pool, fresh_pool: mpgrad.Pool) -> None:
    net, x = nn.Linear(3, 1), torch.ones(2, 3)
    two = pool2.workers
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: mnn.data_parallel(net, x, []), "there is no device"),
        (lambda: mnn.replicate(net, []), "there is no device"),
        (lambda: mnn.DataParallel(net, []), "there is no device"),
        (lambda: mnn.scatter(x, ["cpu"]), "must be a worker of a pool"),
        (lambda: mnn.replicate(net, [two[0], "cuda:0"]), "must all be workers of one pool"),
        (
            lambda: mnn.replicate(net, [two[0], fresh_pool.workers[0]]),
            "must all be workers of one pool",
        ),
        (
            lambda: mnn.parallel_apply([net], [x, x], two),
            "number of modules 1 is not equal to the number of inputs 2",
        ),
        (
            lambda: mnn.parallel_apply([net] * 3, [x] * 3, two),
            "number of modules 3 is not equal to the number of devices 2",
        ),
        (
            lambda: mnn.parallel_apply([nn.ReLU()], [x]),
            "a module without parameters is on no device; pass devices=",
        ),
        (
            lambda: mnn.parallel_apply([net] * 2, [x] * 2, two, [{}]),
            "modules 2 is not equal to the number of kwargs 1",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    if torch.cuda.device_count() == 0:
        with pytest.raises(ValueError, match="there is no device"):
            mnn.data_parallel(net, x)


def test_reduce_add() -> None:
    a, b = torch.ones(2), torch.full((2,), 2.0)
    assert mnn.ReduceAdd.apply([a, b, b]).tolist() == [5, 5]
    for inputs, message in [
        ([], "at least one input"),
        ([a, torch.ones(3)], r"same sizes, but got \(3,\) and \(2,\)"),
        ([a, b.double()], "same dtype, but got torch.float64 and torch.float32"),
        ([a, b.clone().requires_grad_()], "only be used in a backward"),
    ]:
        with pytest.raises(ValueError, match=message):
            mnn.ReduceAdd.apply(inputs)


def test_parameters_are_sent_once(fresh_pool: mpgrad.Pool) -> None:
    """All replicas together take the shared memory of one."""
    net = nn.Linear(1000, 1000)  # 4 MB
    devices = workers(fresh_pool, 4)
    before = fresh_pool.stats().bytes_copied
    mnn.parallel_apply(mnn.replicate(net, devices), [torch.ones(1, 1000)] * 4, devices)
    assert 4_000_000 <= fresh_pool.stats().bytes_copied - before < 5_000_000


def test_a_copy_of_the_module(pool2: mpgrad.Pool) -> None:
    net = mnn.DataParallel(nn.Linear(3, 2), pool2.workers)
    other = copy.deepcopy(net)
    other.load_state_dict(net.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(other(x), net(x)) and list(net.state_dict()) == [
        "module.weight",
        "module.bias",
    ]


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_on_gpus() -> None:
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    net = nn.Linear(3, 2).to(devices[0])
    x = torch.randn(8, 3, device=devices[0])
    torch.testing.assert_close(mnn.data_parallel(net, x, devices), net(x))
    torch.testing.assert_close(mnn.DataParallel(net)(x), net(x))
