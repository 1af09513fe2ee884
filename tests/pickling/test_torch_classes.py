"""PyTorch's public classes survive the way to a worker and back: what can be made of each is
pickled and loaded again.

Each namespace is gone through, so a class that a newer PyTorch adds is tried too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import constraints, transforms
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import mpgrad
from mpgrad.pickling import state, structure

WAYS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "argument": (state.dumps_whole, state.loads_whole),
    "result": (structure.dumps, structure.loads),
}
DATA = TensorDataset(torch.ones(4, 2))
ones, number = torch.ones, torch.tensor
GUESSES: list[Any] = [  # arguments for constructors
    *(
        (),
        (2,),
        (2, 2),
        (2, 2, 2),
        (2, 2, 2, 2),
        ([2],),
        ([2], 2),
        ((2,),),
        ((2,), (2, 1)),
        (1, (2, 2)),
        (4, 8, [2, 4]),
        (4, 2),
    ),
    *(
        (0.0, 1.0),
        (number(0.3),),
        (number(1.0), number(2.0)),
        (3, number(0.2)),
        (3, 0.5),
        (ones(3),),
        (ones(2), ones(2)),
    ),
    *(
        (3, ones(2)),
        (number(1.0), ones(2)),
        (number(3.0), torch.eye(2)),
        (ones(2), torch.eye(2)),
        (0.0, 1.0, 0.1),
    ),
    *((ones(2), ones(2, 1), ones(2)), (torch.distributions.Normal(ones(2), ones(2)), 1)),
    (torch.distributions.Categorical(ones(2)), torch.distributions.Normal(ones(2), ones(2))),
    *(
        (torch.distributions.Normal(0.0, 1.0),),
        (torch.distributions.Normal(0.0, 1.0), [transforms.SigmoidTransform().inv]),
    ),
    *(
        ([transforms.ExpTransform()],),
        (transforms.ExpTransform(), 1),
        ([constraints.real],),
        (constraints.real, 1),
    ),
    *(
        (constraints.real,),
        (nn.Linear(2, 2),),
        (nn.Linear(2, 2), nn.ReLU()),
        (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)),
    ),
    *(
        (nn.TransformerEncoderLayer(4, 2), 1),
        (nn.TransformerDecoderLayer(4, 2), 1),
        (DATA,),
        (DATA, [0, 1]),
        (DATA, 2, 0),
    ),
    *(([DATA, DATA],), (torch.utils.data.SequentialSampler(DATA), 2, False), ([1.0, 2.0], 2)),
]
LEFT = {"Future", "TopLevelTracedModule"}  # refused by PyTorch; another class of the same


def guessed(kind: type) -> Any:
    """An object of the class; None where no guess is right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args in GUESSES:
            try:
                made = kind(*args)
                repr(made)  # some constructors take anything
            except Exception:
                continue
            return made
    return None


def objects_of(namespace: Any) -> Iterator[Any]:
    for name, kind in sorted(vars(namespace).items()):
        if (
            isinstance(kind, type)
            and not name.startswith("_")
            and kind.__module__.startswith("torch.")
        ):
            made = guessed(kind)
            if made is not None and kind.__name__ not in LEFT:
                yield made


def shown(value: object) -> str:
    return re.sub("0x[0-9a-f]+", "", repr(value))


def attributes_of(value: object) -> set[str]:
    return set(getattr(value, "__dict__", {}))


NAMESPACES: dict[str, Any] = {
    "distributions": torch.distributions,
    "transforms": transforms,
    "constraints": constraints,
    "data": torch.utils.data,
    "modules": nn,
    "quantized": torch.ao.nn.quantized,
    "dynamically quantized": torch.ao.nn.quantized.dynamic,
    "intrinsic": torch.ao.nn.intrinsic,
    "quantization": torch.ao.quantization,
    "amp": torch.amp,
    "quasirandom": torch.quasirandom,
    "schedules": torch.optim.swa_utils,
}


@pytest.mark.slow
@pytest.mark.parametrize("namespace", NAMESPACES.values(), ids=NAMESPACES.keys())
@pytest.mark.filterwarnings("ignore")
def test_every_class_of_a_namespace(namespace: Any) -> None:
    """Symptom: `_inv must not be None`, `no attribute '_modules'` and the like. Cause: their own
    pickling leaves things out."""
    tried = 0
    for made in objects_of(namespace):
        for way, (dumps, loads) in WAYS.items():
            again = loads(*dumps(made))
            assert type(again) is type(made), way
            assert (shown(again), attributes_of(again)) == (shown(made), attributes_of(made)), way
        tried += 1
    assert tried


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters after two steps."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)

    def closure() -> torch.Tensor:
        for each in parameters:
            gradient = 2 * each.detach()
            each.grad = gradient.to_sparse() if is_sparse else gradient
        return sum(each.detach().square().sum() for each in parameters)  # type: ignore[return-value]

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    return [each.detach().clone() for each in parameters]


OPTIMIZERS = [
    pytest.param(each, marks=[pytest.mark.slow] * (each.__name__ in ("Adafactor", "Muon")))
    for each in vars(torch.optim).values()
    if isinstance(each, type)
    and issubclass(each, torch.optim.Optimizer)
    and each is not torch.optim.Optimizer
]


@pytest.mark.quick
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_optimizers_go_on(kind: Any) -> None:
    """Symptom: AttributeError: 'LBFGS' object has no attribute '_params'; hooks were gone. Cause:
    `Optimizer.__getstate__`."""
    parameters = [nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(2, 2))]
    made = kind(parameters)
    made.register_step_post_hook(lambda *_: None)
    stepped(made)
    copies = [loads(*copied(dumps(made))) for dumps, loads in WAYS.values()]
    wanted = stepped(made)
    for each in copies:
        assert attributes_of(each) == attributes_of(made)
        assert len(each._optimizer_step_post_hooks) == 1
        assert all(map(torch.equal, stepped(each), wanted))


def copied(pickled: tuple[bytes, list[torch.Tensor]]) -> tuple[bytes, list[torch.Tensor]]:
    """As on the other side: the tensors are others."""
    code, tensors = pickled
    made = [
        nn.Parameter(each.detach().clone()) if isinstance(each, nn.Parameter) else each.clone()
        for each in tensors
    ]
    return code, made


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "LambdaLR": lambda: lr_scheduler.LambdaLR(sgd(), lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda: lr_scheduler.MultiplicativeLR(sgd(), lambda epoch: 0.9),
    "StepLR": lambda: lr_scheduler.StepLR(sgd(), 2),
    "MultiStepLR": lambda: lr_scheduler.MultiStepLR(sgd(), [1, 3]),
    "ConstantLR": lambda: lr_scheduler.ConstantLR(sgd()),
    "LinearLR": lambda: lr_scheduler.LinearLR(sgd()),
    "ExponentialLR": lambda: lr_scheduler.ExponentialLR(sgd(), 0.9),
    "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(sgd(), 3),
    "PolynomialLR": lambda: lr_scheduler.PolynomialLR(sgd()),
    "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(sgd(), patience=0),
    "CyclicLR": lambda: lr_scheduler.CyclicLR(sgd(), 0.1, 0.2, step_size_up=2),
    "OneCycleLR": lambda: lr_scheduler.OneCycleLR(sgd(), 0.1, total_steps=10),
    "CosineAnnealingWarmRestarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(sgd(), 3),
    "SequentialLR": lambda: in_a_row(
        lambda optimizer, parts: lr_scheduler.SequentialLR(optimizer, parts, [2])
    ),
    "ChainedScheduler": lambda: in_a_row(
        lambda optimizer, parts: lr_scheduler.ChainedScheduler(parts)
    ),
    "SWALR": lambda: torch.optim.swa_utils.SWALR(sgd(), 0.05),
}


def in_a_row(make: Callable[..., Any]) -> Any:
    optimizer = sgd()
    return make(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def rates(scheduler: Any) -> list[float]:
    optimizer, found = scheduler.optimizer, []
    for _ in range(4):
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.quick
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_go_on(make: Callable[[], Any]) -> None:
    """Symptom: a warning that `optimizer.step()` was overridden. Cause: what a scheduler keeps in
    an optimizer was left out."""
    made = make()
    if not hasattr(made, "optimizer"):
        made.optimizer = made._schedulers[0].optimizer
    again = state.loads_whole(*copied(state.dumps_whole(made)))
    assert rates(again) == rates(made)


def names_modules(x: torch.Tensor) -> torch.Tensor:
    """Names what stands in PyTorch's modules of classes of their own."""
    flags = (
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.matmul.allow_tf32,
    )
    fill = torch.utils.deterministic.fill_uninitialized_memory
    return (
        x * (1 + len(flags)) * (1 if fill else 2)
        + torch.backends.opt_einsum.enabled
        + torch.backends.mps.is_built()
    )


@pytest.mark.quick
def test_modules_of_classes_of_their_own(pool: mpgrad.Pool) -> None:
    """Symptom: cannot pickle 'GenericModule' object. Cause: only modules of the class `module` went
    by their names."""
    cudnn, deterministic, backends = torch.backends.cudnn, torch.utils.deterministic, torch.backends
    items = [torch.ones(2), torch.ones(3)]
    for function in (
        names_modules,
        lambda x: x * cudnn.enabled + deterministic.fill_uninitialized_memory,
    ):
        for given, found in zip(items, pool.map(function, items), strict=True):
            assert torch.equal(found, function(given))
    assert pool.map(lambda module: module, [backends, cudnn, deterministic]) == [
        backends,
        cudnn,
        deterministic,
    ]


class Bounded(torch.distributions.Distribution):
    arg_constraints: dict[str, Any] = {}  # noqa: RUF012

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> Any:
        return constraints.interval(0.0, 1.0)


class Named(property):
    """Of a script."""

    label = "a property"

    def __init__(self, function: Callable[[Any], Any], more: str = "") -> None:
        super().__init__(function)
        self.more = more


class Static(staticmethod):  # type: ignore[type-arg]
    pass


class OfClass(classmethod):  # type: ignore[type-arg]
    pass


def made_in_a_function() -> Any:
    class Inner(Bounded):
        @Named
        def one(self) -> int:
            return 1

        @Static
        def two() -> int:  # type: ignore[misc]
            return 2

        @OfClass
        def three(cls) -> int:  # type: ignore[misc]
            return 3

    Inner.one.more = "said"  # type: ignore[attr-defined]
    return Inner


@pytest.mark.quick
def test_classes_with_descriptors_of_subclasses(pool: mpgrad.Pool) -> None:
    """Symptom: cannot pickle '_DependentProperty' object. Cause: cloudpickle knows `property`
    itself only."""
    inner = made_in_a_function()

    def look(_: int) -> Any:
        made = inner(validate_args=False)
        return (
            made.one,
            made.two(),
            made.three(),
            inner.one.more,
            inner.one.label,
            made.support.upper_bound,
        )

    assert pool.map(look, [0]) == [(1, 2, 3, "said", "a property", 1.0)]


def attends(x: torch.Tensor, backends: Any) -> torch.Tensor:
    with sdpa_kernel(backends):
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.quick
def test_enumerations_of_pybind11(pool: mpgrad.Pool) -> None:
    """Symptom: cannot pickle 'pybind11_static_property' object. Cause: the class says that it has
    another name."""
    x = torch.arange(8.0).view(1, 1, 2, 4)
    assert torch.equal(
        pool.map(lambda x: attends(x, SDPBackend.MATH), [x])[0], attends(x, SDPBackend.MATH)
    )
    assert torch.equal(
        pool.starmap(attends, [(x, [SDPBackend.MATH])])[0], attends(x, SDPBackend.MATH)
    )
    assert pool.map(lambda x: SDPBackend, [0]) == [SDPBackend]


def inverted(pool: mpgrad.Pool, transform: Any, x: torch.Tensor) -> None:
    inverse = transform.inv
    found = pool.map(lambda x: (inverse(x), inverse.inv(x)), [x])[0]
    assert torch.equal(found[0], inverse(x))
    assert torch.equal(found[1], transform(x))
    again, back = pool.map(lambda pair: pair, [(transform, inverse)])[0]
    assert again.inv is back
    assert back.inv is again


@pytest.mark.quick
def test_inverses_of_transforms(pool: mpgrad.Pool) -> None:
    for transform in (
        transforms.ExpTransform(),
        transforms.AffineTransform(1.0, torch.tensor(2.0)),
        transforms.SigmoidTransform(),
    ):
        inverted(pool, transform, torch.tensor([0.25, 0.5]))
    scale = torch.tensor(2.0, requires_grad=True)
    mpgrad.testing.assert_same_as_serial(
        transforms.AffineTransform(1.0, scale).inv, [torch.ones(2), torch.ones(3)]
    )


@pytest.mark.quick
def test_storages(pool: mpgrad.Pool) -> None:
    found = pool.map(lambda storage: storage, [torch.arange(3).untyped_storage()])[0]
    assert found.tolist() == torch.arange(3).untyped_storage().tolist()


@pytest.mark.quick
def test_handles_of_hooks_whose_module_is_gone(pool: mpgrad.Pool) -> None:
    handle = nn.Linear(2, 2).register_forward_hook(lambda *_: None, with_kwargs=True)
    pool.map(lambda x: handle.remove(), [0])
    module = nn.Linear(2, 2)
    kept = module.register_forward_hook(lambda *_: None, with_kwargs=True)

    def removes(_: int) -> int:
        kept.remove()
        return len(module._forward_hooks)

    assert pool.map(removes, [0]) == [0]
    assert len(module._forward_hooks) == 1


@pytest.mark.quick
def test_what_stays_refused_is_named(pool: mpgrad.Pool) -> None:
    future: Any = torch.futures.Future()
    loader = iter(DataLoader(DATA, 2))
    for value, words in (
        (future, "pass its value (wait())"),
        (loader, "item 0 cannot be sent to or from a worker"),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            pool.map(lambda x: x, [value])
        # from Python 3.14 on, pickle adds notes of its own
        assert words in caught.value.__notes__[-1]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_exported_programs(pool: mpgrad.Pool) -> None:
    """Symptom: _ModuleStackTracer.__init__() wants a `scope_root`, where it is loaded. Cause:
    graphs of torch.export do not."""
    x = torch.ones(1, 2)
    program = torch.export.export(nn.Linear(2, 2), (x,))
    for each in (program, program.module(), program.graph_module, nn.Sequential(program.module())):
        with pytest.raises(TypeError, match=r"item 0 cannot be sent.*torch\.export\.load"):
            pool.map(lambda x: x, [each])
        with pytest.raises(TypeError, match=r"the function cannot be sent.*torch\.export\.load"):
            pool.map(lambda x: each, [0])
    traced = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert torch.equal(pool.map(lambda x: traced(x), [x])[0], traced(x))
