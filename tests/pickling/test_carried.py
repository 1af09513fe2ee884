"""What can be carried to and from workers: sparse tensors, arrays, modules of every make, dtypes
and strides."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import mpgrad
from mpgrad.pickling import reducers, structure
from mpgrad.testing import assert_same_as_serial
from mpgrad.torch_state.private import load_script

F = torch.nn.functional
pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
]

# torch warns where that is left open
COO = functools.partial(torch.sparse_coo_tensor, check_invariants=True)
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
RIGHT = torch.randn(
    4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
)


def items(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(2 + n, 3, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in range(count)
    ]


def sparse(seed: int, layout: torch.layout = torch.sparse_coo, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    dense = dense * (torch.rand(rows, 4, generator=generator) > 0.5)
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return dense.to_sparse(layout=layout, blocksize=blocks)


def sparse_items(layout: torch.layout, rows: int = 6) -> list[torch.Tensor]:
    return [sparse(seed, layout, rows).requires_grad_() for seed in range(4)]


def uncoalesced(hybrid: bool = False, count: int = 5) -> torch.Tensor:
    """Its last entry is at the place of the first."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, 4, (2, count), generator=generator)
    indices[:, -1:] = indices[:, :1]
    values = torch.randn(count, *((3,) if hybrid else ()), dtype=torch.float64, generator=generator)
    return COO(indices, values, (4, 4, 3) if hybrid else (4, 4), is_coalesced=False)


def parts(tensor: torch.Tensor) -> list[Any]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values(), tensor.is_coalesced()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def assert_same_parts(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.layout, ours.shape, ours.dtype) == (theirs.layout, theirs.shape, theirs.dtype)
    for mine, other in zip(parts(ours), parts(theirs), strict=True):
        assert torch.equal(mine, other) if isinstance(other, torch.Tensor) else mine == other


# --- sparse tensors


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sparse_tensors_go_and_come_with_gradients(pool: mpgrad.Pool, layout: torch.layout) -> None:
    for fn in (
        lambda x: x,
        lambda x: (x * 2).to_dense().sin(),
        lambda x: (x.to_dense(), x.detach()),
    ):
        assert_same_as_serial(fn, sparse_items(layout), pool)
    assert_same_as_serial(lambda x: x * 3, [x * 2 for x in sparse_items(layout)], pool)  # no leaves


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("rows", [6, 10_000])
def test_sparse_products(pool2: mpgrad.Pool, layout: torch.layout, rows: int) -> None:
    assert_same_as_serial(lambda x: x @ RIGHT, sparse_items(layout, rows), pool2)
    # where torch has no gradient of a product with a sparse result
    if layout is not torch.sparse_csc:
        assert_same_as_serial(
            lambda x: torch.sparse.mm(x, RIGHT), sparse_items(layout, rows), pool2
        )


ENTRIES: dict[str, Callable[[], torch.Tensor]] = {
    "uncoalesced": uncoalesced,
    "hybrid": lambda: uncoalesced(hybrid=True),
    "coalesced": lambda: uncoalesced(hybrid=True).coalesce(),
    "large": lambda: uncoalesced(count=5_000),
    "expanded values": lambda: COO(
        torch.ones(2, 3, dtype=torch.int64), torch.randn(3, 1).expand(3, 2), (4, 4, 2)
    ),
    "no entries": lambda: COO(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (4, 4)),
    "no dimensions": lambda: COO(torch.zeros(0, 3, dtype=torch.int64), torch.randn(3), ()),
    "conjugate": lambda: COO(
        torch.zeros(1, 2, dtype=torch.int64), torch.randn(2, dtype=torch.complex64).conj(), (2,)
    ),
    "bool": lambda: torch.eye(4, dtype=torch.bool).to_sparse(),
    "batch": lambda: torch.eye(4).expand(3, 4, 4).to_sparse_csr(),
    "small indices": lambda: torch.sparse_csr_tensor(
        *(torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 2], [0, 1])),
        torch.ones(2),
        (2, 2),
        check_invariants=True,
    ),
    "no blocks": lambda: torch.zeros(4, 4).to_sparse_bsr((2, 2)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_keep_their_order(pool2: mpgrad.Pool, name: str) -> None:
    tensor = ENTRIES[name]()
    holder = [tensor]
    for item, (there, back) in zip(
        [tensor, 0], pool2.map(lambda x: (parts(holder[0]), x), [tensor, 0]), strict=True
    ):
        assert [
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(there, parts(tensor), strict=True)
        ]
        if item is tensor:
            assert_same_parts(back, tensor)
    ((first, *_),) = pool2.map(parts, [tensor])
    assert torch.equal(first, parts(tensor)[0])


def test_gradients_of_uncoalesced_tensors(pool2: mpgrad.Pool) -> None:
    for hybrid in (False, True):
        xs = [uncoalesced(hybrid).requires_grad_() for _ in range(2)]
        for fn in (
            lambda x: x.coalesce() * 2,
            lambda x: torch.sparse.sum(x, 0),
            lambda x: x.coalesce().values().sin(),
        ):
            results, expected = pool2.map(fn, xs), [fn(x) for x in xs]
            for pair in zip(results, expected, strict=True):
                ours, theirs = (
                    torch.autograd.grad(y.to_dense().sum(), xs, allow_unused=True) for y in pair
                )
                for mine, other in zip(ours, theirs, strict=True):
                    assert (mine is None) == (other is None)
                    if mine is not None:
                        assert_same_parts(
                            mine, other
                        ) if other.layout is not torch.strided else torch.equal(mine, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_sparse_results_of_one_element(
    pool2: mpgrad.Pool, layout: torch.layout
) -> None:
    """Symptom: NotImplementedError: aten::_local_scalar_dense. Cause: they were taken for those of
    losses."""
    more = {"blocksize": (1, 1)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    for _ in range(3):  # a map learns from the ones before
        results = pool2.map(
            lambda part: part.reshape(1, 1).to_sparse(layout=layout, **more), x.split(1)
        )
        (gradient,) = torch.autograd.grad(results, x, [each.detach() * 2 for each in results])
        assert torch.equal(gradient.to_dense(), 2 * x.detach())


def test_sparse_captures(pool: mpgrad.Pool) -> None:
    leaf, inner = sparse(7).requires_grad_(), sparse(8).requires_grad_() * 2
    parameter = torch.nn.Parameter(sparse(9))
    rows = [torch.randn(4, 1 + n, dtype=torch.float64) for n in range(4)]
    for capture in (leaf, inner, parameter, sparse(6, torch.sparse_csr).requires_grad_()):
        assert_same_as_serial(lambda x, capture=capture: torch.sparse.mm(capture, x), rows, pool)

        # gradients of both layouts meet, in a worker and in the caller
        def mixed(x: torch.Tensor, capture: torch.Tensor = capture) -> torch.Tensor:
            return (capture @ x) if x.shape[1] % 2 else torch.sparse.mm(capture, x)

        assert_same_as_serial(mixed, rows, pool)


@pytest.mark.parametrize("chunksize", [1, None])
def test_sparse_gradients_of_dense_captures(pool: mpgrad.Pool, chunksize: int | None) -> None:
    words = torch.nn.Embedding(10, 3, sparse=True).double()
    numbers = [torch.tensor(each) for each in ([1, 2, 2], [2, 5], [9, 1, 9, 9], [0], [2])]
    run = functools.partial(mpgrad.Pool.map, chunksize=chunksize)
    assert_same_as_serial(words, numbers, pool, run=run)

    def mixed(n: torch.Tensor) -> torch.Tensor:
        return words(n) if len(n) % 2 else words.weight[n]

    for order in (numbers, numbers[::-1]):
        assert_same_as_serial(mixed, order, pool, run=run)
    ours, theirs = copy.deepcopy(words), copy.deepcopy(words)
    for net, results in ((ours, pool.map(ours, numbers)), (theirs, map(theirs, numbers))):
        sum((result**2).sum() for result in results).backward()
        optimizer = torch.optim.SparseAdam(net.parameters())
        optimizer.step()
    assert ours.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=1e-12)


def test_sparse_gradients_of_dense_items(pool: mpgrad.Pool) -> None:
    rows = torch.tensor([1, 1, 0])
    assert_same_as_serial(lambda weight: F.embedding(rows, weight, sparse=True), items(), pool)
    assert_same_as_serial(
        lambda weight: F.embedding(rows, weight, sparse=True), [x * 2 for x in items()], pool
    )


def test_sparse_gradients_of_results(pool: mpgrad.Pool) -> None:
    xs = items()
    grads = [
        torch.autograd.grad(sum(torch.sparse.sum(y * y.detach()) for y in results), xs)
        for results in (
            pool.map(lambda x: x.relu().to_sparse(), xs),
            [x.relu().to_sparse() for x in xs],
        )
    ]
    for ours, theirs in zip(*grads, strict=True):
        assert ours.layout == theirs.layout and torch.equal(ours.to_dense(), theirs.to_dense())


def test_sparse_tensors_under_the_callers_modes(pool: mpgrad.Pool) -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert_same_as_serial(
            lambda x: x * 2, [x * 1 for x in sparse_items(torch.sparse_coo)], pool
        )
    xs = sparse_items(torch.sparse_coo)
    inner = [x * 3 for x in xs]
    with torch.no_grad():
        assert not any(y.requires_grad for y in pool.map(lambda x: x * 2, xs))
        results = pool.map(torch.enable_grad()(lambda x: x * 2), [*xs, *inner])
    for grad in torch.autograd.grad(
        sum(y.to_dense().sum() for y in results if y.requires_grad), xs
    ):
        # 2 + 3 * 2
        assert grad.layout is torch.sparse_coo and set(grad.coalesce().values().tolist()) == {8.0}
    with torch.inference_mode():
        assert all(
            y.is_inference() for y in pool.map(lambda x: x * 2, sparse_items(torch.sparse_csr))
        )


def test_sparse_tensors_are_written_in_place_in_the_task_only(pool: mpgrad.Pool) -> None:
    tensor, capture = sparse(1), sparse(2)
    before = tensor.to_dense(), capture.to_dense()

    def fn(x: torch.Tensor) -> torch.Tensor:
        x.mul_(5)
        return x.to_dense()

    assert torch.equal(pool.map(fn, [tensor])[0], before[0] * 5)
    with pytest.warns(UserWarning, match="wrote into a tensor"):
        pool.map(lambda k: fn(capture), [0])
    assert torch.equal(tensor.to_dense(), before[0]) and torch.equal(capture.to_dense(), before[1])


def test_a_worker_says_no_word_of_what_the_caller_was_told(fresh_pool: mpgrad.Pool) -> None:
    # the first of a process warns that the layout is in beta state
    item = sparse(1, torch.sparse_csr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fresh_pool.map(lambda x: x.layout, [item]) == [torch.sparse_csr]


def test_sparse_reductions(pool2: mpgrad.Pool) -> None:
    xs = sparse_items(torch.sparse_coo)
    total = pool2.map_reduce(lambda x: x * 2, xs, "sum")
    assert torch.equal(total.to_dense(), sum(x.to_dense() * 2 for x in xs))
    grads = torch.autograd.grad(total.to_dense().sum(), xs)
    assert all(grad.layout is torch.sparse_coo for grad in grads)


# --- arrays


def arrays(rows: int) -> list[Any]:
    plain = np.arange(rows * 3.0).reshape(rows, 3)
    fixed = plain.copy()
    fixed.flags.writeable = False
    records = np.zeros(rows, dtype=[("mass", "f8"), ("kind", "i4")])
    records["kind"] = 7
    return [
        plain,
        fixed,
        np.asfortranarray(plain),
        records,
        plain.astype(">f4"),
        np.arange(rows).astype("M8[s]"),
        np.array([None, "text"] * rows, dtype=object),
        np.zeros((0, rows)),
        np.ma.masked_array(plain, plain > 4),
    ]


def look(array: Any) -> tuple[Any, ...]:
    flags = array.flags.writeable, array.flags.f_contiguous, array.flags.c_contiguous
    return type(array).__name__, array.dtype, array.shape, flags


@pytest.mark.parametrize("rows", [3, 5_000, 100_000])
def test_arrays_go_and_come(pool: mpgrad.Pool, rows: int) -> None:
    given = arrays(rows)
    fn = lambda array: (look(array), array)  # noqa: E731
    for array, (seen, back) in zip(given, pool.map(fn, given), strict=True):
        assert seen == look(array) == look(back)
        assert np.array_equal(back, array)


def test_large_arrays_travel_through_shared_memory(pool2: mpgrad.Pool) -> None:
    large = np.arange(200_000.0)
    pickled, tensors = structure.dumps(
        {"before": torch.ones(2), "array": large, "after": torch.zeros(3), "small": np.ones(3)}
    )
    assert len(pickled) < 500 and [tensor.nbytes for tensor in tensors] == [8, 12, large.nbytes]
    before = pool2.stats()
    results = pool2.map(lambda array: array * 2, [large, large + 1])
    after = pool2.stats()
    assert after.slots_made - before.slots_made == 2
    assert after.bytes_copied - before.bytes_copied == 2 * large.nbytes
    assert all(np.array_equal(result, (large + k) * 2) for k, result in enumerate(results))
    with torch.inference_mode():  # so that no graph is made again from what may be changed by then
        assert [float(array[1]) for array in pool2.map(lambda array: array[:2], results)] == [
            2.0,
            4.0,
        ]
    assert (
        pool2.stats().bytes_copied == after.bytes_copied
    )  # former results are read where they lie


@pytest.mark.parametrize("size", [3, 5_000, 100_000])
def test_arrays_are_written_in_the_task_only(pool: mpgrad.Pool, size: int) -> None:
    array, capture = np.zeros(size), np.zeros(size)

    def fn(x: Any) -> tuple[float, float]:
        x[0] += 1
        capture[1] += 1
        return float(x[0]), float(capture[0])

    assert pool.map(fn, [array, array]) == [(1.0, 0.0)] * 2
    assert not array.any() and not capture.any()
    (first,) = pool.map(np.ones_like, [array])
    pool.map(lambda x: x.fill(9), [first, first])
    assert bool((first == 1).all())


def test_the_memory_of_an_array_lives_as_long_as_it(pool2: mpgrad.Pool) -> None:
    (result,) = pool2.map(lambda k: np.full(100_000, k), [5.0])
    part = result[10:20]
    del result
    gc.collect()
    pool2.map(lambda k: np.zeros(100_000), range(8))
    assert part.tolist() == [5.0] * 10


def test_arrays_beside_tensors(pool: mpgrad.Pool) -> None:
    table = np.linspace(0, 1, 30_000)
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def fn(item: dict[str, Any]) -> dict[str, Any]:
        y = item["x"] * weight * float(table[item["array"][3]])
        return {"y": y, "array": item["array"] + 1, "twice": [y, item["array"]]}

    given = [
        {"array": np.arange(n, n + 20_000), "x": x, "more": [x, table]}
        for n, x in enumerate(items())
    ]
    assert_same_as_serial(fn, given, pool)


# --- what is refused


REFUSED: list[tuple[str, Callable[[], torch.Tensor]]] = [
    ("device is meta", lambda: torch.ones(3, device="meta")),
    ("device is meta", lambda: torch.eye(3).to_sparse().to("meta")),
    ("it is nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    (
        "NestedTensor, whose __torch_dispatch__",
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ),
    ("dtype is torch.qint8", lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)),
    ("layout is torch._mkldnn", lambda: torch.ones(2, 2).to_mkldnn()),
    (
        "MaskedTensor, whose",
        lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    ),
    ("a lazy module has not made it yet", lambda: torch.nn.LazyLinear(2).weight),
    ("a lazy module has not made it yet", lambda: torch.nn.LazyBatchNorm1d().running_mean),
]


@pytest.mark.filterwarnings(
    "ignore:.*quantize:UserWarning",
    "ignore:.*quantize:DeprecationWarning",
    "ignore:.*prototype stage",
)
@pytest.mark.parametrize(
    ("reason", "make"), REFUSED, ids=[f"{k} {reason}" for k, (reason, _) in enumerate(REFUSED)]
)
def test_what_cannot_be_carried_is_refused_by_name(
    pool2: mpgrad.Pool, reason: str, make: Callable[[], torch.Tensor]
) -> None:
    tensor = make()
    ran = f"ran with {reason}"
    cannot = "(holds a tensor that )?cannot be sent"
    for item in (tensor, {"inside": [tensor]}):
        with pytest.raises(TypeError, match=rf"item 1 {cannot}.*{reason}"):
            pool2.map(lambda x: ran, [1, item])
    with pytest.raises(TypeError, match=rf"the function {cannot}.*{reason}"):
        pool2.map(lambda x: (tensor, ran), [1])
    with pytest.raises(TypeError, match=rf"the result {cannot}.*{reason}") as caught:
        pool2.map(lambda x: make() if x else x, [0, 1])
    assert any("item 1" in note for note in caught.value.__notes__)


def test_an_uninitialised_lazy_module_is_refused_and_an_initialised_one_works(
    pool2: mpgrad.Pool,
) -> None:
    net = torch.nn.Sequential(
        torch.nn.LazyLinear(4), torch.nn.Tanh(), torch.nn.LazyLinear(2)
    ).double()
    with pytest.raises(TypeError, match="run the module once, before you pass it to the pool"):
        pool2.map(net, items())
    net(items()[0])
    assert_same_as_serial(net, items(), pool2)


# --- functions and modules of every make


def linear() -> torch.nn.Linear:
    torch.manual_seed(4)
    return torch.nn.Linear(3, 3).double()


class Whole(torch.nn.Module):
    """Tied weights, a buffer, a tensor that is neither, and a submodule that is switched by train
    and eval."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float64))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.first(x)) * self.scale)


class Derived(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raw = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.derived = self.raw.exp()  # no leaf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.derived


@dataclasses.dataclass
class Model:
    net: torch.nn.Module
    factors: dict[str, torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.factors["a"]


def hooked() -> torch.nn.Module:
    net = linear()
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net.register_forward_hook(lambda module, args, output: output * 2)
    net.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    return net


def normalised_the_old_way() -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(linear())


def parametrized_twice() -> torch.nn.Module:
    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    net = parametrizations.weight_norm(linear())
    parametrize.register_parametrization(net, "weight", Half())
    parametrize.register_parametrization(net, "bias", Half())
    return torch.nn.Sequential(net, torch.nn.Tanh())


MAKERS: dict[str, Callable[[], Any]] = {
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "parametrized twice": parametrized_twice,
    "weight_norm, the old way": normalised_the_old_way,
    "hooks": hooked,
    "eval": lambda: Whole().eval(),
    "no leaf as an attribute": Derived,
    "a bound method": lambda: Derived().forward,
    "partial": lambda: functools.partial(
        torch.add, torch.ones(3, dtype=torch.float64, requires_grad=True)
    ),
    "partial of a module": lambda: functools.partial(linear()),
    "a dataclass": lambda: Model(
        linear(), {"a": torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)}
    ),
    "nn.Buffer": lambda: torch.nn.Buffer(torch.ones(3, dtype=torch.float64) * 2).mul,
}


@pytest.mark.parametrize("name", MAKERS)
def test_functions_of_every_make(pool2: mpgrad.Pool, name: str) -> None:
    fn = MAKERS[name]()
    assert_same_as_serial(fn, items(), pool2)
    assert_same_as_serial(lambda x: fn(x) * 2, items(), pool2)


class Unlike(torch.nn.Module):
    """Says itself what its state is."""

    def __getstate__(self) -> Any:
        return {**vars(self), "came": True}


def test_modules_arrive_as_they_were(pool2: mpgrad.Pool) -> None:
    """Dictionaries of hooks that are empty stay behind, and are there again: all of them, each its
    own."""
    net = torch.nn.Sequential(
        linear(), hooked(), Unlike(), torch.nn.BatchNorm1d(3), torch.nn.Dropout()
    )
    (back,) = pool2.map(lambda _: net, [0])
    assert back[2].came and len(back[1]._forward_hooks) == 1
    for ours, theirs in zip(net.modules(), back.modules(), strict=True):
        assert [(name, type(each)) for name, each in vars(ours).items()] == [
            (name, type(each)) for name, each in vars(theirs).items() if name != "came"
        ]
    hooks = [
        each
        for module in back.modules()
        for each in vars(module).values()
        if isinstance(each, OrderedDict)
    ]
    assert len({id(each) for each in hooks}) == len(hooks) > 40
    back[0].register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(back[0](torch.zeros(3).double()), net[0](torch.zeros(3).double()) + 1)


def test_a_parametrized_module_stays_one(pool2: mpgrad.Pool) -> None:
    net = parametrizations.weight_norm(linear())

    def fn(x: torch.Tensor) -> Any:
        with parametrize.cached():
            same = net.weight is net.weight
        return type(net).__name__, isinstance(net, torch.nn.Linear), same, net.training, net

    ((name, is_linear, cached, training, back),) = pool2.map(fn, [0])
    assert name == type(net).__name__ and is_linear and cached and training
    assert torch.equal(back.weight, net.weight) and parametrize.is_parametrized(back, "weight")
    back.weight.sum().backward()
    assert net.parametrizations.weight.original0.grad is not None


# TorchScript optimises while it runs, and so rounds otherwise from the second or third run on
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "make",
    [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 3, dtype=torch.float64))],
)
def test_scripted_modules_share_their_parameters_with_the_caller(
    pool: mpgrad.Pool, make: Callable[[Any], Any]
) -> None:
    net = Whole().eval()
    scripted = make(net)
    for fn in (
        scripted,
        torch.nn.Sequential(scripted, torch.nn.Tanh()),
        lambda x: scripted(x) * net.scale,
    ):
        grads = []
        for results in (pool.map(fn, items()), [fn(x) for x in items()]):
            grads.append(
                torch.autograd.grad(sum((y**2).sum() for y in results), list(net.parameters()))
            )
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    pickled, tensors = structure.dumps(scripted)
    assert net.scale.numpy().tobytes() not in pickled
    assert {id(tensor) for tensor in tensors} == {
        id(tensor) for tensor in (*net.parameters(), net.scale)
    }
    assert pool.map(lambda x: scripted.training, [0]) == [False]
    ((back, y),) = pool.map(lambda x: (scripted, scripted(x)), items(1))
    assert torch.allclose(back(items()[0]), y, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_functions(pool2: mpgrad.Pool) -> None:
    def cube(x: torch.Tensor, times: float = 2.0) -> torch.Tensor:
        return x * x * x * times

    scripted = torch.jit.script(cube)
    for fn in (scripted, lambda x: scripted(x, 3.0), lambda x: scripted(x=x, times=4.0)):
        assert_same_as_serial(fn, items(3), pool2)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.calls = 0
        self.seen: Any = torch.jit.Attribute([], list[int])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return x * self.scale * self.calls * len(self.seen)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_is_loaded_once_and_has_nothing_of_former_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted, loads = torch.jit.script(Counting()), list[bytes]()

    def load_noted(code: bytes) -> torch.jit.ScriptModule:
        loads.append(code)
        return load_script(code)

    monkeypatch.setattr(reducers, "load_once", functools.lru_cache(load_noted))
    with mpgrad.Pool(1, engine="inline") as pool:
        for scale in (2.0, 3.0):
            scripted.scale.data.fill_(scale)
            assert pool.map(lambda x: scripted(x).item(), [torch.ones(())]) == [scale]
        assert len(loads) == 1
        scripted.calls = 4
        assert pool.map(lambda x: scripted(x).item(), [torch.ones(())]) == [15.0]
    assert len(loads) == 2


class Generated(torch.nn.Module):
    """Saves its script by itself, as e3nn's classes do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.script = torch.jit.script(Counting())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.script(x) * self.scale

    def __getstate__(self) -> dict[str, Any]:
        saved = io.BytesIO()
        torch.jit.save(self.script, saved)
        modules = {name: each for name, each in self._modules.items() if name != "script"}
        return {**self.__dict__, "_modules": modules, "saved": saved.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.script = torch.jit.load(io.BytesIO(saved))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_that_a_class_saves_is_loaded_once(fork_server: mpgrad.Pool) -> None:
    generated = Generated()

    def loads(x: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
        same = pickle.loads(pickle.dumps(torch.jit.load)) is torch.jit.load
        return generated(x), reducers.load_once.cache_info().misses, same

    with mpgrad.Pool(1) as pool:
        found = [pool.map(loads, [torch.ones(())])[0] for _ in range(3)]
        generated.script.calls = 1
        (other,) = pool.map(loads, [torch.ones(())])
    # its counter begins anew in each map
    assert [each[0].item() for each in found] == [4.0] * 3 and other[0].item() == 8.0
    assert [each[1] for each in (*found, other)] == [1, 1, 1, 2] and found[0][2]


def traced_with_a_tensor() -> Any:
    total = torch.ones(())

    def adds(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x * total

    return torch.jit.trace(adds, torch.ones(()), check_trace=False)


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight if x > 0 else x


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
@pytest.mark.parametrize(
    "make", [traced_with_a_tensor, lambda: torch.jit.freeze(torch.jit.script(Weighted().eval()))]
)
def test_tensors_in_the_code_of_a_script_are_those_of_each_operation(
    make: Callable[[], Any], engine: str
) -> None:
    """Symptom: what one map had written to them the next one read. Cause: copies of a script have
    them in common."""
    scripted = make()
    with mpgrad.Pool(1, engine=engine) as pool:  # type: ignore[arg-type]
        first, second = (
            pool.map(lambda x: scripted(x).mul_(2).item(), [torch.ones(())]) for _ in range(2)
        )
    assert first == second


def test_scripts_that_are_large_are_loaded_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "load_once", None)
    monkeypatch.setattr(reducers, "load_script", len)
    assert (
        reducers.loaded_script(bytes(reducers.MOST_SCRIPT_BYTES + 1)) > reducers.MOST_SCRIPT_BYTES
    )


def test_values_of_torch_and_numpy(pool: mpgrad.Pool) -> None:
    values = [
        torch.float8_e5m2,
        torch.device("cpu"),
        torch.channels_last,
        torch.sparse_csr,
        torch.Size([1, 2]),
        np.dtype("f4"),
        np.float32(2),
    ]
    assert pool.map(lambda value: value, values) == values
    assert [type(value) for value in pool.map(lambda value: value, values)] == [
        type(value) for value in values
    ]
    assert pool.map(
        lambda value: value.max, [torch.finfo(torch.float16), torch.iinfo(torch.int8)]
    ) == [65504.0, 127]
    assert_same_as_serial(lambda x: x.max(0), items(), pool)  # a named tuple of torch's own


def test_generators_arrive_in_their_state(pool2: mpgrad.Pool) -> None:
    ours, theirs = torch.Generator().manual_seed(5), np.random.default_rng(5)
    torch.rand(3, generator=ours)
    ((a, b),) = pool2.map(
        lambda pair: (torch.rand(2, generator=pair[0]), pair[1].random(2)), [(ours, theirs)]
    )
    assert torch.equal(a, torch.rand(2, generator=ours)) and np.array_equal(b, theirs.random(2))


def test_the_default_generator_is_that_of_the_item(pool2: mpgrad.Pool) -> None:
    drawn = []
    for generator in (torch.default_generator, None):
        torch.manual_seed(6)
        drawn.append(
            pool2.map(
                lambda k, generator=generator: float(torch.rand((), generator=generator)), range(4)
            )
        )
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4


def test_distributions(pool2: mpgrad.Pool) -> None:
    mean = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    normal = torch.distributions.Normal(mean, 2.0)
    mixed = torch.distributions.Independent(torch.distributions.Gamma(mean.exp(), 1.0), 1)
    assert_same_as_serial(
        lambda x: normal.log_prob(x) + mixed.log_prob(x.exp())[:, None], items(), pool2
    )


@pytest.mark.filterwarnings(
    "ignore:Converting a tensor with requires_grad=True to a scalar"
)  # LBFGS itself, in torch 2.8
def test_an_optimiser_in_a_task(pool2: mpgrad.Pool) -> None:
    def fit(x: torch.Tensor, kind: type[torch.optim.Optimizer]) -> torch.Tensor:
        guess = torch.zeros_like(x, requires_grad=True)
        optimizer = kind([guess])

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = ((guess - x.detach()) ** 2).sum()
            found.backward()
            return found

        for _ in range(3):
            optimizer.step(loss)
        return guess.detach() * x

    for kind in (torch.optim.LBFGS, torch.optim.Adam):
        assert_same_as_serial(functools.partial(fit, kind=kind), items(3), pool2)


def test_an_optimiser_that_is_captured_keeps_its_parameters(pool2: mpgrad.Pool) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step(k: int) -> tuple[bool, torch.Tensor]:
        (weight.sum() * k).backward()
        optimizer.step()
        return optimizer.param_groups[0]["params"][0] is weight, weight.detach().clone()

    with pytest.warns(UserWarning, match="wrote into a tensor that it captures"):
        ((same, stepped),) = pool2.map(step, [2])
    assert same and stepped.tolist() == [0.0] * 3 and weight.tolist() == [1.0] * 3


def test_checkpoints_in_a_task(pool2: mpgrad.Pool) -> None:
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    inner = lambda x: (x @ weight).sin()  # noqa: E731
    assert_same_as_serial(lambda x: checkpoint(inner, x, use_reentrant=False), items(), pool2)
    # reentrant ones allow no `torch.autograd.grad`, neither in the caller nor in a worker
    grads = []
    for loop in (pool2.map, lambda fn, xs: [fn(x) for x in xs]):
        leaves = [*sparse_items(torch.sparse_coo), *sparse_items(torch.sparse_csr)]
        fn = lambda x: checkpoint(lambda x: x.to_dense()[:, :3] @ weight, x, use_reentrant=True)  # noqa: E731
        weight.grad = None
        sum((y**2).sum() for y in loop(fn, [*leaves, *[x * 2 for x in leaves]])).backward()
        grads.append([weight.grad, *[leaf.grad for leaf in leaves]])
    for ours, theirs in zip(*grads, strict=True):
        assert ours.layout == theirs.layout and torch.allclose(
            ours.to_dense(), theirs.to_dense(), rtol=1e-12
        )


def test_local_functions_of_autograd(pool: mpgrad.Pool) -> None:
    scale = torch.tensor(3.0, dtype=torch.float64)

    class Power(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2 * ctx.saved_tensors[0] * scale

    def nested(x: torch.Tensor, times: int = 3) -> torch.Tensor:
        return nested(Power.apply(x), times - 1) if times else x

    assert_same_as_serial(nested, items(), pool)


# --- dtypes and strides

EVERY_DTYPE = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
    },
    key=str,
)
EVERY_DTYPE += [torch.int16, torch.uint16]


@pytest.mark.parametrize("size", [3, 20_000])
def test_every_dtype(pool2: mpgrad.Pool, size: int) -> None:
    raw = torch.randint(0, 2, (16 * size,), dtype=torch.uint8)
    given = [raw[: size * dtype.itemsize].view(dtype) for dtype in EVERY_DTYPE]
    for dtype, item, back in zip(EVERY_DTYPE, given, pool2.map(lambda x: x, given), strict=True):
        assert back.dtype == dtype and torch.equal(back.view(torch.uint8), item.view(torch.uint8))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "with holes": lambda x: x[:, ::2],
    "part": lambda x: x[1:, 1:, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
    "a number": lambda x: x[0, 0, 0],
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: x.conj().imag,
}


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", VIEWS)
def test_views_with_gradients(pool2: mpgrad.Pool, name: str, dtype: torch.dtype, size: int) -> None:
    if name == "negative" and not dtype.is_complex:
        return
    view = VIEWS[name]
    xs = [torch.randn(4, 5 * size, 6, dtype=dtype, requires_grad=True) for _ in range(2)]
    there, back = (
        pool2.map(lambda x: (x * 2, x.stride()), [view(x) for x in xs]),
        pool2.map(view, xs),
    )
    expected = [view(x) * 2 for x in xs]
    for (doubled, stride), x in zip(there, xs, strict=True):
        assert torch.equal(doubled, view(x) * 2) and (
            stride == view(x).stride() or not view(x).numel()
        )
    for result, x in zip(back, xs, strict=True):
        assert torch.equal(result, view(x)) and (
            result.stride() == view(x).stride() or not result.numel()
        )
    grads = [
        torch.autograd.grad(sum((y * y.conj()).real.sum() for y in results), xs)
        for results in (
            expected,
            [doubled for doubled, _ in there],
            [result * 2 for result in back],
        )
    ]
    for theirs, ours, others in zip(*grads, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(others, theirs)


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.bias.no_decay = True  # type: ignore[attr-defined]
        self.weight.scale = torch.tensor(2.0, requires_grad=True)  # type: ignore[attr-defined]
        self.weight.owner = self  # type: ignore[attr-defined]


def test_attributes_of_tensors(pool: mpgrad.Pool) -> None:
    # symptom: 33.0 in place of 23.0. cause: a captured tensor travelled as its values, without what
    # it had in Python.
    net = Head()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        decayed = [p for p in net.parameters() if not getattr(p, "no_decay", False)]
        scaled = (net.weight * x).sum() * net.weight.scale + net.bias.sum()  # type: ignore[attr-defined, operator]
        assert net.weight.owner is net  # type: ignore[attr-defined]
        return scaled + 10.0 * len(decayed) + getattr(x, "shift", 0.0)

    def given() -> list[torch.Tensor]:
        items = [torch.full((3,), float(k), requires_grad=True) for k in range(30)]
        for k, each in enumerate(items):
            each.shift = torch.tensor(k + 0.5)  # type: ignore[attr-defined]
        return items

    assert_same_as_serial(penalty, given(), pool)
    assert_same_as_serial(
        lambda pair: penalty(pair[0]) + penalty(pair[1]), [[x, x] for x in given()], pool
    )
    net.bias.no_decay = False  # type: ignore[attr-defined]
    assert pool.map(penalty, given()[:1])[0] == penalty(given()[0]) == 20.5


def test_attributes_of_results(pool: mpgrad.Pool) -> None:
    # symptom: AttributeError. cause: a result that is a tensor travelled without a pickle.
    def tagged(x: torch.Tensor) -> Any:
        y = x * 2
        y.tag = {"of": x.item(), "item": x * 3}  # type: ignore[attr-defined]
        return (y, y) if x > 1 else y

    items = [torch.tensor(float(k), requires_grad=True) for k in range(4)]
    assert_same_as_serial(tagged, items, pool)
    first, *_, (last, same) = pool.map(tagged, items)
    assert first.tag["of"] == 0 and last is same and last.tag["item"] == 9
    last.tag["item"].backward()
    assert items[3].grad == 3
