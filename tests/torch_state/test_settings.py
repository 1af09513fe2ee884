"""PyTorch's own settings and modes around calls: they travel, or a call under them is refused by
name, or a warning says so.

Symptom of the tests before: values and gradients as if the caller had not changed anything. Cause:
only modes that somebody had thought of travelled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from inside import every_loss_gets
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mpgrad
from mpgrad.torch_state import modes, settings

pytestmark = pytest.mark.quick

SCRIPT = Path(__file__).parents[2] / "scripts" / "torch_inventory.py"
SETTINGS = {setting.name: setting for setting in settings.every_setting()}

# another value than the default, where `not` does not give one
OTHER: dict[str, Any] = {
    "torch.autograd.set_detect_anomaly": (True, True),
    "torch.autograd.graph.disable_saved_tensors_hooks": "none, please",
    "torch.backends.cpu.allow_fp16_reduced_precision_reduction": None,  # only some CPUs can
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (False, True),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (False, True),
    "torch.backends.cuda.preferred_blas_library": None,  # these three need a GPU
    "torch.backends.cuda.preferred_linalg_library": None,
    "torch.backends.cuda.preferred_rocm_fa_library": None,
    "torch.backends.cudnn.benchmark_limit": 5,
    "torch.backends.cudnn.depthwise_kernel": "native",
    "torch.backends.opt_einsum.strategy": "optimal",
    "torch.backends.quantized.engine": min(torch._C._supported_qengines()),
    "torch.distributions.Distribution.set_default_validate_args": False,
    "torch.nn.attention.sdpa_kernel(set_priority)": [0, 1, 2, 3, 4],
    "torch.set_autocast_dtype": torch.float16,
    "torch.set_default_dtype": torch.float64,
    "torch.set_float32_matmul_precision": "medium",
    "torch.set_printoptions": {
        "precision": 2,
        "threshold": math.inf,
        "edgeitems": 1,
        "linewidth": 9,
        "sci_mode": True,
    },
    "torch.use_deterministic_algorithms": 1,
    "torch.utils.checkpoint.set_checkpoint_debug_enabled": True,
    "torch.utils.checkpoint.set_checkpoint_early_stop": False,
}


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Other tests, and packages that they import, may have changed some."""
    before = found()
    for setting in SETTINGS.values():
        if setting.get() != setting.default:
            setting.set(setting.default)
    yield
    for name, setting in SETTINGS.items():
        if setting.get() != before[name]:
            setting.set(before[name])


def other_than(name: str) -> Any:
    setting = SETTINGS[name]
    if name in OTHER:
        return OTHER[name]
    return "ieee" if name.endswith("fp32_precision") else not setting.default


@contextlib.contextmanager
def set_to(name: str, value: Any) -> Iterator[None]:
    before = {each.name: each.get() for each in SETTINGS.values()}
    SETTINGS[name].set(value)
    try:
        yield
    finally:
        for each in SETTINGS.values():  # to set one may set others
            if each.get() != before[each.name]:
                each.set(before[each.name])


def found() -> dict[str, Any]:
    return {setting.name: setting.get() for setting in settings.every_setting()}


class Looks(torch.autograd.Function):
    """Its gradient has as many elements that are not 0 as settings differ from their defaults in
    the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.tensor(
            [float(each.get() != each.default) for each in settings.every_setting()]
        )


def look(x: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    return found(), Looks.apply(x).sum()


def test_each_has_another_value() -> None:
    assert OTHER.keys() - SETTINGS.keys() <= {
        "torch.backends.cudnn.benchmark_limit",
        "torch.backends.cudnn.depthwise_kernel",
    }
    assert all(other_than(name) != SETTINGS[name].default for name in SETTINGS)


@pytest.mark.slow
def test_a_fresh_process_has_the_defaults() -> None:
    """Else what nobody has changed would travel with every chunk."""
    code = "from mpgrad.torch_state.modes import current_modes as found; print([*found()[-2:]])"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=58, check=True
    )
    assert ended.stdout == "[(), ()]\n"


def test_settings_travel_forward_and_backward(fresh_pool: mpgrad.Pool) -> None:
    """Its workers have imported nothing that sets something, such as torch._dynamo."""
    x = torch.ones(len(SETTINGS), requires_grad=True)
    tried = 0
    for name in SETTINGS:
        if (value := other_than(name)) is None:
            continue
        with set_to(name, value):
            expected = found()
            ((there, y),) = fresh_pool.map(look, [x])
            (grad,) = torch.autograd.grad(y, x)
        assert there == expected, name
        assert grad.tolist() == [
            float(expected[each] != SETTINGS[each].default) for each in SETTINGS
        ], name
        tried += expected[name] != SETTINGS[name].default  # some machines have one value only
    assert tried > 30
    ((there, y),) = fresh_pool.map(look, [x])
    assert there == found() and not torch.autograd.grad(y, x)[0].any()


@pytest.mark.parametrize("engine", ["process", "thread", "inline"])
def test_forward_and_backward_each_have_their_own(engine: Any) -> None:
    x = torch.ones(len(SETTINGS), requires_grad=True)
    sparse, hooks = (
        "torch.sparse.check_sparse_tensor_invariants",
        "torch.autograd.graph.disable_saved_tensors_hooks",
    )
    with mpgrad.Pool(1, engine=engine) as pool:
        with set_to(sparse, True):
            ((there, y),) = pool.map(look, [x])
        assert there[sparse] and there[hooks] is None
        with torch.autograd.graph.disable_saved_tensors_hooks("no"):
            y.backward()
    assert x.grad is not None and {
        name for name, grad in zip(SETTINGS, x.grad, strict=True) if grad
    } == {hooks}


@pytest.mark.parametrize("graphs", ["recompute", "auto"])
def test_a_call_that_is_run_again_has_those_of_its_forward(graphs: Any) -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return x * x * (2 if torch.sparse.check_sparse_tensor_invariants.is_enabled() else 1)

    x = torch.ones(3, requires_grad=True)
    with every_loss_gets(0.5), mpgrad.Pool(1, graphs=graphs) as pool:
        with torch.sparse.check_sparse_tensor_invariants():
            (y,) = pool.map(product, [x])
        with torch.autograd.graph.disable_saved_tensors_hooks("no"):
            y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4, 4, 4]


def test_calls_under_different_settings_at_once(pool2: mpgrad.Pool) -> None:
    is_on = torch.sparse.check_sparse_tensor_invariants.is_enabled
    asked = []
    for number in range(20):
        with torch.sparse.check_sparse_tensor_invariants(number % 3 == 0):
            asked.append(pool2.map_async(lambda _: is_on(), [0, 1]))
    assert [each.get() for each in asked] == [[number % 3 == 0] * 2 for number in range(20)]


@contextlib.contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("changed", [torch.sparse.check_sparse_tensor_invariants, double])
@pytest.mark.parametrize("within", [False, True])
def test_calls_in_threads_put_back_what_the_caller_has(changed: Any, within: bool) -> None:
    """Symptom: with engine "thread", set in the caller for ever. Cause: each call put back what it
    found: another one's."""
    with changed():
        other_than_now = modes.current_modes()
    before, now = modes.current_modes(), other_than_now
    orders = itertools.product(
        itertools.product([now] if within else [before, now], repeat=3),
        itertools.permutations(range(3)),
    )
    with contextlib.ExitStack() as threads:
        each_in_one = [threads.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]
        for under, order in orders:
            stacks = [contextlib.ExitStack() for _ in under]
            with changed() if within else contextlib.nullcontext():
                for each, stack, thread in zip(under, stacks, each_in_one, strict=True):
                    thread.submit(stack.enter_context, modes.under(each)).result()
                    # what the thread has been asked for last is what is set
                    assert each == before or modes.current_modes() == now
            for number in order:
                each_in_one[number].submit(stacks[number].close).result()
            assert modes.current_modes() == before, (within, [each == now for each in under], order)


def test_an_initializers_settings_stay_where_the_caller_has_the_default() -> None:
    with mpgrad.Pool(1, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
        assert pool.apply(torch.mul, (torch.tensor(1e-40), 1)).item() == 0
        with torch.sparse.check_sparse_tensor_invariants():
            assert pool.apply(torch.mul, (torch.tensor(1e-40), 1)).item() == 0
    assert torch.mul(torch.tensor(1e-40), 1).item() > 0


def test_new_and_old_names_of_precision_together(pool2: mpgrad.Pool) -> None:
    """Symptom: a RuntimeError from every call. Cause: PyTorch refuses to read the old setting
    then."""
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this PyTorch has the old ones only")
    with set_to("torch.backends.mkldnn.matmul.fp32_precision", "bf16"):
        assert pool2.apply(found)["torch.backends.mkldnn.matmul.fp32_precision"] == "bf16"
    assert pool2.apply(found)["torch.backends.mkldnn.matmul.fp32_precision"] == "none"


# --- where tensors are made if nobody says where


def where(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return torch.zeros(1).device.type, (AtDefault.apply(x) * 2).sum()


class AtDefault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (10 if torch.zeros(1).is_meta else 1)


@contextlib.contextmanager
def as_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("around", [as_default, lambda: torch.device("meta")])
def test_default_device(around: Callable[[], Any], pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    with around():
        device, y = where(x)
        expected = torch.autograd.grad(y, x)  # PyTorch leaves the mode meanwhile
        ((there, y),) = pool.map(where, [x])
        (later,) = pool.imap(where, [x])
        found = torch.autograd.grad(y, x)
    assert there == later[0] == device == "meta" and torch.equal(found[0], expected[0])
    assert pool.map(where, [x])[0][0] == "cpu"


def test_default_device_of_an_eager_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    with every_loss_gets(1.0), mpgrad.Pool(1) as pool, torch.device("meta"):
        ((_, y),) = pool.map(where, [x])
        (found,) = torch.autograd.grad(y, x)
    assert found.tolist() == [2, 2]


def test_derivatives_with_a_default_device(pool2: mpgrad.Pool) -> None:
    """Our own tensors are on the CPU, whatever the default is."""
    x = torch.arange(3.0, requires_grad=True)
    with torch.device("meta"):
        assert torch.equal(mpgrad.jacobian(torch.sin, x, pool=pool2), torch.diag(x.cos()))
        assert torch.equal(
            torch.func.grad(lambda x: pool2.map(torch.sin, [x])[0].sum())(x.detach()), x.cos()
        )
        (found,) = pool2.map(lambda x: (x * 1,), [x])
        with forward_ad.dual_level():
            (y,) = pool2.map(torch.sin, [forward_ad.make_dual(x.detach(), x.detach() * 0 + 1)])
            assert torch.equal(forward_ad.unpack_dual(y).tangent, x.cos())
        mpgrad.testing.assert_same_as_serial(torch.sin, [x])
    assert found[0].device.type == "cpu"


# --- modes that cannot travel


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Rounds(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def overwrites(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    w = y * y
    y.add_(1)
    return w.sum()


REFUSED: dict[str, Callable[[], Any]] = {
    r"test_settings\.Doubles": Doubles,
    r"test_settings\.Rounds": Rounds,
    r"torch\.autograd\.graph\.allow_mutation_on_saved_tensors": (
        torch.autograd.graph.allow_mutation_on_saved_tensors
    ),
    r"torch\.nn\.utils\.parametrize\.cached": parametrize.cached,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mode_that_may_change_values_is_refused(name: str, pool: mpgrad.Pool) -> None:
    x = torch.ones(3, requires_grad=True)
    (result,) = pool.map(overwrites_nothing, [x])
    state = torch.get_rng_state()
    operations: list[Callable[[], Any]] = [
        lambda: pool.map(overwrites, [x]),
        lambda: pool.map_async(overwrites, [x]),
        lambda: list(pool.imap(overwrites, [x])),
        lambda: pool.apply(overwrites, (x,)),
        lambda: pool.submit(overwrites, x),
    ]
    if "allow" not in name:  # which PyTorch itself does not allow in a transform
        operations.append(lambda: torch.func.grad(lambda x: pool.map(overwrites, [x])[0])(x))
    for operation in operations:
        with (
            REFUSED[name](),
            pytest.raises(NotImplementedError, match=rf"\(mode: (\S+\.)?{name}\)"),
        ):
            operation()
    assert torch.equal(state, torch.get_rng_state())
    if REFUSED[name] is not Doubles:  # which PyTorch leaves before a backward
        with REFUSED[name](), pytest.raises(NotImplementedError, match=name):
            result.backward()
    result.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3).cos())


def overwrites_nothing(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


@pytest.mark.parametrize("name", ["Doubles", "Rounds"])
def test_a_mode_inside_the_function(name: str, pool: mpgrad.Pool) -> None:
    kind = {"Doubles": Doubles, "Rounds": Rounds}[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        with kind():
            return torch.sin(x)

    x = torch.ones(3)
    assert torch.equal(pool.map(function, [x])[0], function(x))


def test_derivatives_of_custom_functions_in_threads() -> None:
    with Rounds(), pytest.raises(NotImplementedError, match=r"Rounds\)"):
        mpgrad.functions.map_with_parallel_backward(Looks, (torch.ones(2, requires_grad=True),))


# --- hooks for all modules and optimizers


def doubled(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * FACTOR


FACTOR = torch.tensor(2.0)


def tripled(module: torch.nn.Module, grad_inputs: Any, grad_outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 3 for grad in grad_inputs)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.nn.Sigmoid(), x, use_reentrant=False)


@pytest.mark.parametrize("function", [torch.nn.Sigmoid(), checkpointed])
def test_hooks_for_all_modules_travel(function: Any, pool: mpgrad.Pool) -> None:
    """Symptom: values and gradients without them, silently; so in a part that a checkpoint runs
    again."""
    x = torch.ones(3, requires_grad=True)
    handles = [
        torch.nn.modules.module.register_module_forward_hook(doubled),
        torch.nn.modules.module.register_module_full_backward_hook(tripled),
    ]
    try:
        expected = function(x)
        (found,) = pool.map(function, [x])
        grads = [torch.autograd.grad(each.sum(), x)[0] for each in (expected, found)]
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(found, expected) and torch.equal(*grads)
    assert torch.equal(pool.map(function, [x])[0], x.sigmoid())


def test_hooks_for_all_optimizers_travel(pool2: mpgrad.Pool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        own = x.clone().requires_grad_()
        (own * own).sum().backward()
        torch.optim.SGD([own], lr=0.1).step()
        return own.detach()

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    handle = register_optimizer_step_pre_hook(hook)
    try:
        assert torch.equal(pool2.map(step, [torch.ones(1)])[0], torch.zeros(1))
    finally:
        handle.remove()
    assert pool2.map(step, [torch.ones(1)])[0] > 0


# --- what only observes


@contextlib.contextmanager
def logged() -> Iterator[None]:
    with LoggingTensorMode():
        yield


OBSERVERS: dict[str, Callable[[], Any]] = {
    "torch.profiler": torch.profiler.profile,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "LoggingTensorMode": logged,
}


@pytest.mark.parametrize("name", OBSERVERS)
def test_what_only_observes_warns_once(name: str, pool: mpgrad.Pool) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with warnings.catch_warnings(record=True) as given, OBSERVERS[name]() as observer:
        warnings.simplefilter("always")
        for _ in range(2):
            (y,) = pool.starmap(torch.mm, [(x, x)])
            y.sum().backward()
    own = [each for each in given if "does not see workers' operations" in str(each.message)]
    if pool._options.traits.in_caller:
        assert not own
        assert name != "FlopCounterMode" or observer.get_total_flops() == 2 * 3 * 2**4
    else:
        assert [(name in str(each.message), each.filename) for each in own] == [(True, __file__)]
    pool.map(abs, [1])  # nothing to be seen
    assert torch.equal(x.grad, 2 * (torch.full((2, 2), 4.0)))


def test_a_checkpoint_with_a_policy_around_a_call(pool2: mpgrad.Pool) -> None:
    """It keeps or computes once more, which has the same values: nothing to be refused."""

    def context() -> Any:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(
            [torch.ops.aten.mm.default]
        )

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(
        lambda x: pool2.map(torch.sin, [x])[0].sum(), x, use_reentrant=False, context_fn=context
    )
    y.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3).cos())


# --- a pool that begins in modes


@pytest.mark.parametrize("context", ["fork", None])
def test_workers_begin_with_no_modes_of_their_makers(context: str | None) -> None:
    """With "fork", a worker has what the thread had that made it; only a thread's start was thought
    of."""
    with Doubles(), torch.device("meta"), torch.sparse.check_sparse_tensor_invariants():
        pool = mpgrad.Pool(1, context=context)
    with pool:
        there = pool.apply(
            lambda: (
                torch.zeros(1).device.type,
                torch.sparse.check_sparse_tensor_invariants.is_enabled(),
            )
        )
        assert there == ("cpu", False)
        assert torch.equal(pool.apply(torch.sin, (torch.ones(1),)), torch.ones(1).sin())


# --- all there are


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_inventory", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_travels_is_in_the_inventory(script: ModuleType) -> None:
    fates = script.listed(script.LIST.read_text())
    travelling = {name for name, fate in fates.items() if fate.startswith("travels")}
    shorter = {
        name.replace(".distribution.Distribution", ".Distribution").replace(".anomaly_mode.", ".")
        for name in travelling
    }
    names = {name.partition("(")[0] for name in SETTINGS} - {
        "torch.backends.cpu.allow_fp16_reduced_precision_reduction"
    }
    assert {
        name.replace(".autograd.", ".autograd.grad_mode.") for name in names - shorter
    } <= travelling
    assert all(
        name.startswith(("travels", "refused"))
        for name in (fates["torch.device"], fates["torch.nn.utils.parametrize.cached"])
    )


@pytest.mark.slow
def test_nothing_in_pytorch_is_unaccounted_for() -> None:
    """Where this fails, PyTorch has something new that changes a state: decide what becomes of it,
    and add it to the list."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout


def test_a_chunk_of_what_nobody_has_changed_reads_few_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = modes.current_modes()
    monkeypatch.setattr(
        modes.TABLE, "settings", {name: modes.TABLE.settings[name] for name in modes.RESET}
    )
    with modes.under(now):
        pass
