"""Leaves that only a worker has: a backward that would come to one raises, instead of losing the
gradient."""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from conftest import first_are_quick
from inside import every_loss_gets
from torch.utils.checkpoint import checkpoint

import mpgrad
from mpgrad.errors import LostGradientError
from mpgrad.pickling import structure
from mpgrad.testing import assert_same_as_serial
from mpgrad.workers import functions

pytestmark = pytest.mark.quick

KINDS: dict[str, dict[str, Any]] = {
    **{engine: {"engine": engine} for engine in ("process", "inline", "thread")},
    "eager": {"deterministic": True},
}
# threads search the same modules as the caller does inline
ENGINES = first_are_quick(2, ["process", "inline", "thread"])
INSTALLED = """
import functools, types, torch
def new(value=2.0): return torch.tensor(value, requires_grad=True)
WEIGHT = new()
STORE = {"loc": new()}
class Holder:
    net = torch.nn.Linear(1, 1)
    def __init__(self): self.inner = types.SimpleNamespace(w=new())
HOLDER = Holder()
@functools.cache
def cached(): return new()
def closure():
    w = new()
    return lambda x: x * w
from_closure = closure()
def weighted(x): return x * WEIGHT
def param(name, first=None):
    if name not in STORE: STORE[name] = first.clone().requires_grad_()
    return STORE[name]
def scaled(x, name="loc"): return x * param(name)
def bare(x): return x * 3.0
"""


@pytest.fixture
def installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: mpgrad.Pool
) -> Iterator[Any]:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed_leaves.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield importlib.import_module("installed_leaves")
    del sys.modules["installed_leaves"]


OWN = """
import torch
class Listing:
    def __init__(self): self.net = torch.nn.Linear(1, 1)
    def __getstate__(self):
        return {key: each.tolist() for key, each in self.net.state_dict().items()}
    def __setstate__(self, state):
        Listing.__init__(self)
        self.net.load_state_dict({key: torch.tensor(each) for key, each in state.items()})
    def __call__(self, x): return self.net(x)
NET = Listing()
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user's own, which travels."""
    (tmp_path / "own_leaves.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_leaves")
    del sys.modules["own_leaves"]


@pytest.fixture(params=first_are_quick(2, list(KINDS)))
def any_pool(request: pytest.FixtureRequest, installed: Any) -> Iterator[mpgrad.Pool]:
    options, gradient = KINDS[request.param], 1.0 if request.param == "eager" else None
    with (
        every_loss_gets(gradient),
        mpgrad.Pool(1 if request.param == "inline" else 2, **options) as pool,
    ):
        yield pool


def items(count: int = 4) -> list[torch.Tensor]:
    return [torch.tensor([k + 1.0], requires_grad=True) for k in range(count)]


def total(results: list[Any]) -> torch.Tensor:
    return torch.stack([each.sum() for each in results]).sum()


def check_raises(
    pool: mpgrad.Pool, fn: Callable[[Any], Any], match: str, given: list[Any] | None = None
) -> None:
    """The backward does, and nothing else."""
    given = items() if given is None else given
    with torch.no_grad():
        pool.map(fn, given)
    results = pool.map(fn, given)
    assert [each.requires_grad for each in results] == [True] * len(given)
    with pytest.raises(LostGradientError, match=match):
        total(results).backward()


def test_state_of_an_installed_package(any_pool: mpgrad.Pool, installed: Any) -> None:
    # symptom: the loss said requires_grad, the backward ran, and .grad stayed None. cause: the
    # worker's own leaf is in the graph, and nobody asks for its gradient.
    def local_import(x: torch.Tensor) -> torch.Tensor:
        import installed_leaves as within  # type: ignore[import-not-found]

        return x * within.WEIGHT  # type: ignore[no-any-return]

    reaching: dict[str, Callable[[Any], Any]] = {
        r"WEIGHT \(a tensor of shape \(\)\), .*"
        r"register_pickle_by_value\(installed_leaves\)": installed.weighted,
        "WEIGHT ": lambda x: x * installed.WEIGHT,
        "WEIGHT  ?": local_import,
        r"STORE\['loc'\]": functools.partial(installed.scaled, name="loc"),
        r"STORE\['made'\]": lambda x: x * installed.param("made", torch.tensor(1.0)),
        r"Holder\.net": lambda x: installed.Holder.net(x),
        r"HOLDER\.inner": lambda x: x * installed.HOLDER.inner.w,
        "cached": lambda x: x * installed.cached(),
        "from_closure": lambda x: installed.from_closure(x),
    }
    for name, fn in reaching.items():
        check_raises(any_pool, fn, f"would be lost: its result depends on installed_leaves.{name}")
    check_raises(any_pool, lambda x: x * installed.WEIGHT, "WEIGHT", [torch.ones(1)] * 3)
    check_raises(
        any_pool,
        lambda pair: pair[0](pair[1]),
        "WEIGHT",
        [(installed.weighted, x) for x in items()],
    )
    with pytest.raises(AssertionError, match="would be lost"):
        assert_same_as_serial(installed.weighted, items(), any_pool)


def test_what_does_not_come_to_a_stray(any_pool: mpgrad.Pool, installed: Any) -> None:
    given = items()
    results = any_pool.map(lambda x: x * installed.WEIGHT if x > 2 else x * 2, given)
    (grad,) = torch.autograd.grad(results[3], given[3], retain_graph=True)
    results[3].backward(inputs=[given[3]], retain_graph=True)
    assert grad == given[3].grad == 2
    total(results[:2]).backward()  # items of one bundle, perhaps
    assert given[0].grad == given[1].grad == 2
    with pytest.raises(LostGradientError, match="item"):
        results[2].backward()
    assert_same_as_serial(
        lambda x: installed.bare(x) * installed.WEIGHT.detach(), items(), any_pool
    )


WAYS = {
    "inspect": "inspect.getmodule(helper).w",
    "pkgutil": "pkgutil.resolve_name('own_pkgutil:w')",
    "pydoc": "pydoc.locate('own_pydoc.w')",
    "sys": "getattr(sys, 'modules')['own_sys'].w",
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_looks_into_modules(
    engine: str, monkeypatch: pytest.MonkeyPatch, fork_server: mpgrad.Pool
) -> None:
    # symptom: with engines "thread" and "inline" the gradient of the module's own leaf, which these
    # find, was lost silently
    with mpgrad.Pool(1, engine=engine) as pool:
        for name, way in WAYS.items():
            lines = (
                f"import {name}, torch",
                "w = torch.tensor(2.0, requires_grad=True)",
                "def helper(x): return x",
            )
            own: Any = types.ModuleType(f"own_{name}")
            monkeypatch.setitem(sys.modules, own.__name__, own)
            exec("\n".join([*lines, f"def function(x): return {way} * x"]), vars(own))
            (result,) = pool.map(own.function, items(1))
            try:
                result.backward()
                assert own.w.grad == 1
            except LostGradientError as error:
                assert f"{own.__name__}.w" in str(error) and engine != "process"


@pytest.mark.parametrize("engine", ENGINES)
def test_derivatives_of_a_stray(engine: str, installed: Any) -> None:
    with mpgrad.Pool(1, engine=engine) as pool:
        given = items(1)
        (result,) = pool.map(lambda x: (x * installed.WEIGHT) ** 2, given)
        (grad,) = torch.autograd.grad(result, given, create_graph=True)
        assert grad == 8
        with pytest.raises(LostGradientError, match="WEIGHT"):
            grad.backward()
        future = pool.submit(lambda x: x * installed.WEIGHT, given[0])
        last = pool.submit(lambda x: x * 3, future).result()
        with pytest.raises(LostGradientError, match="WEIGHT"):
            last.backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_transforms_around_a_stray(engine: str, installed: Any) -> None:
    """Symptom: the gradient was lost without a word. Cause: results of workers came without their
    graph."""
    x = torch.tensor([1.0, 2.0])

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (installed.weighted(x) ** 3).sum()

    with mpgrad.Pool(1, engine=engine) as pool:
        pool.apply(fn, (x,))  # it is imported outside of any transform, as here

        def there(x: torch.Tensor) -> torch.Tensor:
            return pool.apply(fn, (x,))

        for transform in (torch.func.vmap, torch.func.grad, torch.func.jacfwd, torch.func.hessian):
            found, expected = transform(there)(x), transform(fn)(x)
            torch.testing.assert_close(found, expected)
            assert found.requires_grad == expected.requires_grad
            with pytest.raises(LostGradientError, match="WEIGHT"):
                found.sum().backward()
        y = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(torch.func.vmap(there)(y).sum(), y)
        assert torch.equal(wanted, torch.autograd.grad(torch.func.vmap(fn)(y).sum(), y)[0])
        torch.func.vmap(lambda x: pool.apply(installed.bare, (x,)))(y).sum().backward()
        assert torch.equal(y.grad, torch.full((2,), 3.0))


def test_remedies_work(any_pool: mpgrad.Pool, installed: Any) -> None:
    assert_same_as_serial(
        lambda pair: pair[0] * pair[1], [(x, installed.WEIGHT) for x in items()], any_pool
    )
    cloudpickle.register_pickle_by_value(installed)
    try:
        total(any_pool.map(installed.weighted, items())).backward()
        total(any_pool.map(installed.scaled, items())).backward()
        assert installed.WEIGHT.grad == installed.STORE["loc"].grad == 10
        assert_same_as_serial(installed.scaled, items(), any_pool)
    finally:
        cloudpickle.unregister_pickle_by_value(installed)
    # what was found out about it is not true any more
    check_raises(any_pool, installed.weighted, "WEIGHT")


def test_values_are_those_of_the_worker(installed: Any) -> None:
    # symptom: results switched between the caller's value and the worker's. cause: cheap calls ran
    # in the caller
    with mpgrad.Pool(2) as pool:
        pool.map(installed.scaled, items())
        with torch.no_grad():
            installed.STORE["loc"].fill_(7.0)
        assert {float(pool.map(installed.scaled, items(64))[-1].detach()) for _ in range(20)} == {
            128.0
        }


# --- what an object's own pickling leaves out


class Copying:
    def __init__(self) -> None:
        self.net = torch.nn.Linear(1, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


class Saving(Copying):
    def __getstate__(self) -> bytes:
        torch.save(self.net.state_dict(), buffer := io.BytesIO())
        return buffer.getvalue()

    def __setstate__(self, state: bytes) -> None:
        Saving.__init__(self)
        self.net.load_state_dict(torch.load(io.BytesIO(state)))


class Detaching(Copying):
    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.net.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Detaching.__init__(self)
        self.net.load_state_dict(state["state"])


class Listing(Copying):
    def __reduce__(self) -> Any:
        return Listing.of, (self.net.weight.tolist(), self.net.bias.detach().numpy())

    @staticmethod
    def of(weight: Any, bias: Any) -> Listing:
        made = Listing()
        with torch.no_grad():
            made.net.weight.copy_(torch.tensor(weight))
            made.net.bias.copy_(torch.from_numpy(bias))
        return made


class Registered(Copying): ...


def registered_again(weight: Any, bias: Any) -> Registered:
    made = Registered()
    made.net.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    return made


class Keeping(Copying):
    def __getstate__(self) -> dict[str, Any]:
        return {"net": self.net, "seen": 1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


COPIED = Detaching()


def of_this_module(x: torch.Tensor) -> torch.Tensor:
    return COPIED(x)


def test_copies_that_pickling_made(any_pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    # symptom: as above, and assert_same_as_serial was content. cause: the worker's parameters are
    # copies that nobody knows of
    def reduce(each: Any) -> Any:
        return registered_again, (each.net.weight.tolist(), each.net.bias.tolist())

    monkeypatch.setitem(copyreg.dispatch_table, Registered, reduce)
    for kind in (Saving, Detaching, Listing, Registered):
        copying = kind()
        pairs = [{"net": [copying], "x": x} for x in items()]
        match = (
            f"would be lost: its result depends on a parameter of shape .* that {kind.__name__} "
            "made when it was loaded"
        )
        check_raises(any_pool, copying, match)
        check_raises(any_pool, lambda x, copying=copying: copying(x) * 2, match)
        check_raises(any_pool, lambda pair: pair["net"][0](pair["x"]), match, pairs)
    with pytest.raises(AssertionError, match="would be lost"):
        assert_same_as_serial(Saving(), items(), any_pool)


def test_copies_in_a_module_and_what_is_no_copy(any_pool: mpgrad.Pool) -> None:
    check_raises(any_pool, of_this_module, "that Detaching made")
    keeping = Keeping()
    assert_same_as_serial(keeping, items(), any_pool)
    assert_same_as_serial(lambda pair: pair[0](pair[1]), [(keeping, x) for x in items()], any_pool)
    copying = Saving()
    assert_same_as_serial(lambda x: copying(x).detach() * x, items(), any_pool)


class WithoutGrad:
    """Its copy does not even require gradients."""

    def __init__(self) -> None:
        self.w = torch.tensor(2.0, requires_grad=True)

    def __getstate__(self) -> float:
        return self.w.item()

    def __setstate__(self, state: float) -> None:
        self.w = torch.tensor(state)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


class Cut:
    """A result without its graph."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __getstate__(self) -> list[float]:
        return self.value.tolist()  # type: ignore[no-any-return]

    def __setstate__(self, state: list[float]) -> None:
        self.value = torch.tensor(state, requires_grad=True)


def test_the_oracle_sees_what_pickling_loses(
    shared_pools: Callable[[str, int], mpgrad.Pool],
) -> None:
    # symptom: assert_same_as_serial was content. cause: it compared gradients of inputs and
    # captures only, and of results that which their pickles have
    pool, without = shared_pools("inline", 1), WithoutGrad()
    call: Callable[[Any], Any] = lambda pair: pair[0](pair[1])  # noqa: E731
    cases: list[tuple[Callable[[Any], Any], list[Any], str]] = [
        (
            without,
            items(),
            r"gradient of a leaf that is not an input or a capture \(.*: the pool returned None",
        ),
        (call, [(without, x) for x in items()], "the pickling of WithoutGrad leaves out"),
    ]
    for fn, given, match in cases:
        with pytest.raises(AssertionError, match=match):
            assert_same_as_serial(fn, given, pool)
        assert_same_as_serial(fn, given, pool, order=0)
    for cut in (Cut, lambda x: {"at": [Cut(x * 2)]}):
        with pytest.raises(AssertionError, match="the pickling of Cut leaves out"):
            assert_same_as_serial(lambda x, cut=cut: cut(x * 2), items(), pool)
    assert_same_as_serial(lambda x: Cut(x.detach()) and x * 2, items(), pool)


def test_copies_wherever_a_function_goes(any_pool: mpgrad.Pool, own_module: Any) -> None:
    # symptom: as above. cause: what was loaded was not searched within mpgrad's own objects, such
    # as a module that is carried, and the function of a reduction
    saving, match = Saving(), "would be lost"
    check_raises(any_pool, lambda x: own_module.NET(x), match)
    x = torch.ones(1, requires_grad=True)
    reaching: list[Callable[[], Any]] = [
        lambda: any_pool.map_reduce(saving, items(), "sum"),
        lambda: any_pool.reduce(lambda a, b: a + saving(b), items(), torch.zeros(1)),
        lambda: mpgrad.jacobian(lambda x: saving(x) ** 2 * x, x, pool=any_pool, create_graph=True),
    ]
    for reach in reaching:
        with pytest.raises(LostGradientError, match=match):
            reach().sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        check_raises(any_pool, saving, match)


def test_a_leaf_that_is_returned(any_pool: mpgrad.Pool, installed: Any) -> None:
    # symptom: no gradient came to it. cause: a leaf has no graph behind it that could be searched
    saving = Saving()
    check_raises(any_pool, lambda x: installed.WEIGHT, "WEIGHT")
    check_raises(any_pool, lambda x: saving.net.weight, "that Saving made")
    weight = torch.tensor(2.0, requires_grad=True)
    total(
        any_pool.map(lambda x: weight * bool(psutil.__name__) if x > 1 else weight, items())
    ).backward()
    assert weight.grad == 4


@pytest.mark.slow
def test_an_id_that_is_used_again(shared_pools: Callable[[str, int], mpgrad.Pool]) -> None:
    # symptom: a LostGradientError for a leaf that the call made. cause: it was known by the id of a
    # copy that had gone
    def renew(pair: Any) -> torch.Tensor:
        pair[0].net = None
        renew.kept = [torch.ones(1, requires_grad=True) for _ in range(300)]  # type: ignore[attr-defined]
        return torch.stack(renew.kept).prod() * pair[1]  # type: ignore[attr-defined]

    given = items()
    total(shared_pools("inline", 1).map(renew, [(Saving(), x) for x in given])).backward()
    assert [x.grad for x in given] == [1] * 4


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_searches_are_few(monkeypatch: pytest.MonkeyPatch, installed: Any) -> None:
    # symptom: 53 s for a network of 200 parameters that a function made. cause: a search of all
    # modules for each of them
    looked: list[int] = []
    # it finds nothing
    monkeypatch.setattr(
        functions, "look_through_modules", lambda: (looked.append(1), time.sleep(1e-3))
    )
    monkeypatch.setattr(functions, "SEARCHES", functions.SearchBudget())
    monkeypatch.setattr(functions, "REST", 1e6)  # however slow the machine makes the calls
    known: list[Any] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        known.append([torch.ones(1, requires_grad=True) for _ in range(50)])
        return torch.stack(known[-1]).prod() * x * len(psutil.__name__)

    with mpgrad.Pool(1, engine="inline") as pool:
        pool.map(kept, items(1))
        assert len(looked) == 1
        pool.map(kept, items(60))
        assert len(looked) == functions.IN_VAIN + 1


def test_no_graph_is_walked_for_who_cannot_reach_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: 0.1 ms for 600 nodes. Cause: "modules" in the name of a module of ours, or of
    PyTorch's, counted as a way."""
    walked: list[object] = []
    find = functions.held_leaves
    monkeypatch.setattr(
        functions, "held_leaves", lambda *given: walked.append(given) or find(*given)
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import sys, torch\ndef plain(x): return x * 2\ndef looks(x): return x * len(sys.modules)",
        names,
    )
    layers = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(200)])
    assert len(structure.dumps(layers)[0]) > structure.MOST_READ
    with mpgrad.Pool(1, engine="inline") as pool:
        pool.map(names["plain"], items(2))
        for _ in range(2):
            pool.map(layers, [torch.ones(1)])
        del walked[:1]  # it is read when it comes again
        future = pool.submit(names["plain"], *items(1))
        pool.submit(names["plain"], future).result()
        assert not walked
        pool.map(names["looks"], items(2))
        assert len(walked) == 2


# --- leaves of the call's own, or of the initializer


def make_own() -> None:
    package = importlib.import_module("installed_leaves")
    package.WEIGHT = torch.tensor(5.0, requires_grad=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_leaves_that_an_initializer_made(engine: str, installed: Any) -> None:
    with mpgrad.Pool(1, engine=engine, initializer=make_own) as pool:
        given = items()
        results = pool.map(lambda x: x * installed.WEIGHT, given)
        total(results).backward()
        assert given[0].grad == results[0] == 5
        if engine != "process":  # there it was imported
            check_raises(pool, installed.scaled, "STORE")


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.w = w
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * 2 * x * w, grad * x * x


def check_goes_on(pool: mpgrad.Pool, fn: Callable[[torch.Tensor], Any], same: bool = True) -> None:
    """Its gradients are the loop's; it names a package, so that strays are looked for."""
    there, here = items(), items()
    total(pool.map(lambda x: fn(x) * len(psutil.__name__), there)).backward()
    total([fn(x) * len(psutil.__name__) for x in here]).backward()
    assert [x.grad for x in there] == [x.grad for x in here] or not same


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
@pytest.mark.parametrize(
    "engine", first_are_quick(1, [("process", 2), ("thread", 2), ("inline", 1)]), ids=str
)
def test_leaves_that_a_call_made(
    engine: tuple[str, int], shared_pools: Callable[[str, int], mpgrad.Pool]
) -> None:
    pool = shared_pools(*engine)
    known: dict[str, Any] = {}
    weight = torch.tensor(3.0, requires_grad=True)

    @functools.cache
    def model() -> torch.nn.Linear:
        return torch.nn.Linear(1, 1)

    def fresh(x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.Linear(1, 1)
        inner.itself = [inner]  # type: ignore[assignment]
        return torch.ones(1, requires_grad=True) * inner(x)

    def kept(x: torch.Tensor) -> torch.Tensor:
        return x * known.setdefault("w", torch.ones(1, requires_grad=True)) + 0 * model()(x)

    check_goes_on(pool, fresh, same=False)
    check_goes_on(pool, kept)
    check_goes_on(pool, lambda x: Square.apply(x, weight))


def test_captures_behind_checkpoints_and_transforms(
    shared_pools: Callable[[str, int], mpgrad.Pool],
) -> None:
    net, weight = torch.nn.Linear(1, 1), torch.tensor(3.0, requires_grad=True)
    # to import what these need takes each worker a second
    pool = shared_pools("inline", 1)
    check_goes_on(pool, lambda x: checkpoint(lambda x: net(x) * weight, x, use_reentrant=False))
    check_goes_on(pool, lambda x: torch.vmap(net)(x[None]))
    check_goes_on(pool, lambda x: torch.func.grad(lambda y: (y * weight).sum())(x) * x)
