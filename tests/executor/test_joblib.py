"""The backend of joblib: values and gradients are those of the serial loop, whatever joblib does
with the calls."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import joblib
import pytest
import torch
from conftest import first_are_quick, gone, linux_only

import mpgrad
import mpgrad.joblib
from mpgrad.submission.submitter import Submitter

WEIGHT = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def ours_is_known(fork_server: mpgrad.Pool) -> Iterator[None]:
    mpgrad.joblib.register()
    yield
    del joblib.parallel.BACKENDS["mpgrad"]


def loss(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (x * WEIGHT * scale).sin().sum()


def leaves(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(count)
    ]


def in_a_loop(calls: Any) -> list[Any]:
    return [function(*args, **kwargs) for function, args, kwargs in calls]


def gradients(
    run: Callable[[Any], Any], calls_of: Callable[[list[torch.Tensor]], Any], one_by_one: bool
) -> list[torch.Tensor]:
    """The values, the items' gradients, and that of the capture."""
    items = leaves(13)
    WEIGHT.grad = None
    results = sorted(run(calls_of(items)), key=lambda each: each.item())
    if one_by_one:
        for each in results:
            each.backward()
    else:
        torch.stack(results).sum().backward()
    return [
        *(each.detach() for each in results),
        *(item.grad for item in items if item.grad is not None),
        WEIGHT.grad.clone(),
    ]


def from_leaves(items: list[torch.Tensor]) -> Any:
    return (joblib.delayed(loss)(item, scale=0.5) for item in items)


def from_others(items: list[torch.Tensor]) -> Any:
    """Of several functions, with a history, which begins in the generator."""
    functions = [loss, lambda x: x.exp().sum(), Method().loss]
    return (joblib.delayed(functions[n % 3])(item * 2) for n, item in enumerate(items))


class Method:
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return loss(x) * 3


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("calls_of", [from_leaves, from_others])
@pytest.mark.parametrize(
    "options",
    first_are_quick(
        1,
        [
            {},
            {"batch_size": 5},
            {"batch_size": 1, "pre_dispatch": 2},
            {"pre_dispatch": "all", "batch_size": 4},
            {"return_as": "generator"},
            {"return_as": "generator_unordered", "batch_size": 3},
        ],
    ),
    ids=str,
)
def test_values_and_gradients_are_those_of_the_loop(
    calls_of: Any, options: dict[str, Any], one_by_one: bool
) -> None:
    wanted = gradients(in_a_loop, calls_of, one_by_one)
    with joblib.parallel_config(backend="mpgrad", n_jobs=2, deterministic=True):
        found = gradients(joblib.Parallel(**options), calls_of, one_by_one)
    assert len(found) == len(wanted)
    assert all(
        torch.equal(each, other) for each, other in zip(found[:-1], wanted[:-1], strict=True)
    )
    # the order of its sum is not the loop's
    torch.testing.assert_close(found[-1], wanted[-1], rtol=1e-14, atol=1e-14)


@pytest.mark.quick
def test_backward_after_everything_of_joblib_is_gone() -> None:
    (item,) = leaves(1)
    results = joblib.Parallel(n_jobs=2, backend="mpgrad")(
        joblib.delayed(loss)(each) for each in [item, item]
    )
    torch.autograd.grad(results[0], item, retain_graph=True)
    found = torch.autograd.grad(sum(results), item)[0]
    assert torch.equal(found, torch.autograd.grad(loss(item) + loss(item), item)[0])


@pytest.mark.filterwarnings("ignore:.* changed packed .* only the worker's copy")
def test_the_callers_modes_and_hooks_hold_for_all_batches() -> None:
    """Also for those that joblib takes from the generator in another thread."""
    items = leaves(8)
    calls = [joblib.delayed(loss)(item) for item in items]
    packed: list[int] = []
    with joblib.parallel_config(backend="mpgrad", n_jobs=2):
        with torch.no_grad():
            assert not any(each.requires_grad for each in joblib.Parallel(batch_size=1)(calls))
            made = joblib.Parallel(batch_size=1)(
                joblib.delayed(requires_grad)(item * 2) for item in items
            )
            assert made == [(False, False)] * 8
        with torch.autocast("cpu", torch.bfloat16):
            squares = joblib.Parallel(batch_size=1)(
                joblib.delayed(torch.mm)(torch.ones(2, 2), torch.ones(2, 2)) for _ in items
            )
        assert {each.dtype for each in squares} == {torch.bfloat16}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: (packed.append(1), x)[1], lambda x: x
        ):
            joblib.Parallel(batch_size=1)(joblib.delayed(loss)(item * item) for item in items)
    assert len(packed) == 16  # two of each product, in the generator


def requires_grad(x: torch.Tensor) -> tuple[bool, bool]:
    return x.requires_grad, loss(x).requires_grad


def pids(parallel: joblib.Parallel) -> set[int]:
    return set(parallel(joblib.delayed(pid_after)(os.getpid()) for _ in range(8)))


def pid_after(parent: int) -> int:
    assert os.getpid() != parent
    time.sleep(0.01)
    return os.getpid()


def test_workers_stay_as_long_as_the_context() -> None:
    with joblib.parallel_config(backend="mpgrad", n_jobs=2):
        first, second = pids(joblib.Parallel()), pids(joblib.Parallel())
    with joblib.Parallel(n_jobs=2, backend="mpgrad") as parallel:
        third, fourth = pids(parallel), pids(parallel)
    assert first & second and third & fourth and not first & third
    del parallel
    assert gone([*first, *second, *third, *fourth], within=20)


def test_an_exception_is_the_functions_and_ends_the_others() -> None:
    def fails(x: int) -> float:
        time.sleep(100 * (x > 0))
        return 1 / x

    started = time.monotonic()
    with joblib.parallel_config(backend="mpgrad", n_jobs=2):
        with pytest.raises(ZeroDivisionError) as caught:
            joblib.Parallel(batch_size=1)(joblib.delayed(fails)(x) for x in (0, 1, 2, 3))
        assert isinstance(caught.value.__cause__, mpgrad.RemoteTraceback)
        assert joblib.Parallel()(joblib.delayed(abs)(x) for x in (-1, -2)) == [1, 2]
        with pytest.raises(TypeError, match="generator"):
            joblib.Parallel(batch_size=2)(
                joblib.delayed(abs)(each) for each in (1, 2, 3, 4, 5, 6, 7, (x for x in ()))
            )
        with pytest.raises(multiprocessing.TimeoutError):
            joblib.Parallel(timeout=0.2)(joblib.delayed(fails)(x) for x in (1, 2))
    assert time.monotonic() - started < 90


def test_another_call_on_the_same_workers_goes_on_when_one_is_dropped() -> None:
    with joblib.parallel_config(backend="mpgrad", n_jobs=2):
        others = joblib.Parallel(return_as="generator", batch_size=1)(
            joblib.delayed(pause)(n) for n in range(4)
        )
        dropped = joblib.Parallel(return_as="generator")(
            joblib.delayed(time.sleep)(100) for _ in range(4)
        )
        with pytest.warns(UserWarning, match="cancelled"):
            dropped.close()
        assert list(others) == [0, 1, 2, 3]


def pause(n: int) -> int:
    time.sleep(0.1)
    return n


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_generator_that_tasks_have_in_common(batch_size: int) -> None:
    """Symptom: tasks in other batches drew the same numbers."""
    rng, captured = random.Random(0), random.Random(1)
    with joblib.parallel_config(backend="mpgrad", n_jobs=2):
        parallel = joblib.Parallel(batch_size=batch_size)
        given = [
            parallel(joblib.delayed(random.Random.random)(rng) for _ in range(8)) for _ in range(2)
        ]
        drawn = parallel(joblib.delayed(lambda: captured.random())() for _ in range(8))
    assert len({*given[0], *given[1], *drawn}) == 24


def test_a_parallel_in_a_task_is_serial() -> None:
    def nested(x: torch.Tensor, backend: str | None) -> tuple[torch.Tensor, bool]:
        parallel = joblib.Parallel(n_jobs=2, backend=backend)
        parts = parallel([joblib.delayed(loss)(x * k) for k in range(3)])
        return sum(parts), set(parallel([joblib.delayed(os.getpid)()] * 2)) == {os.getpid()}

    (item,) = leaves(1)
    for backend in (None, "mpgrad"):
        found = joblib.Parallel(n_jobs=2, backend="mpgrad")(
            [joblib.delayed(nested)(item, backend)] * 2
        )
        assert all(is_here for _, is_here in found)
        gradient = torch.autograd.grad(found[0][0], item)[0]
        assert torch.equal(gradient, torch.autograd.grad(nested(item, "sequential")[0], item)[0])


@pytest.mark.quick
def test_numbers_of_jobs() -> None:
    backend = mpgrad.joblib.MpgradBackend(nesting_level=0)
    cpus = joblib.effective_n_jobs(-1)
    assert [backend.effective_n_jobs(n) for n in (None, 1, 3, -1, -1000)] == [1, 1, 3, cpus, 1]
    with pytest.raises(ValueError, match=r"pass -1 \(n_jobs: 0\)"):
        backend.effective_n_jobs(0)
    with joblib.parallel_config(backend="mpgrad"):
        # serial, as with joblib's own backends
        assert joblib.Parallel()([joblib.delayed(abs)(-1)]) == [1]


def test_options_are_the_pools() -> None:
    assert joblib.Parallel(n_jobs=2, backend="mpgrad")(
        [joblib.delayed(torch.get_num_threads)()] * 2
    ) == [1, 1]
    with joblib.parallel_config(
        backend="mpgrad",
        n_jobs=2,
        inner_max_num_threads=3,
        initializer=torch.set_default_dtype,
        initargs=(torch.float64,),
    ):
        assert joblib.Parallel()([joblib.delayed(torch.get_num_threads)()] * 2) == [3, 3]
    with pytest.raises(TypeError, match="did you mean 'graphs'"):
        joblib.Parallel(n_jobs=2, backend="mpgrad", graph="keep")([joblib.delayed(abs)(1)])


def threads_of_libraries() -> tuple[int, int, str | None]:
    """PyTorch's, those of NumPy's OpenBLAS, and what libraries will find that are loaded later."""
    with open("/proc/self/maps") as file:
        blas = next(ctypes.CDLL(line.split()[-1]) for line in file if "libscipy_openblas" in line)
    return (
        torch.get_num_threads(),
        blas.scipy_openblas_get_num_threads64_(),
        os.environ.get("OMP_NUM_THREADS"),
    )


@linux_only("/proc")
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_of_other_libraries(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """They had one, or as many as their variables said, whatever number was asked for."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    with joblib.parallel_config(backend="mpgrad", n_jobs=2, inner_max_num_threads=threads):
        assert (
            joblib.Parallel()([joblib.delayed(threads_of_libraries)()] * 2)
            == [(threads, threads, str(threads))] * 2
        )
    if threads == 1:  # as with loky, a variable says it if nobody else does
        assert (
            joblib.Parallel(n_jobs=2, backend="mpgrad")(
                [joblib.delayed(threads_of_libraries)()] * 2
            )
            == [(1, 2, "1")] * 2
        )


@pytest.mark.quick
def test_batches_grow_and_shrink() -> None:
    backend = mpgrad.joblib.MpgradBackend()
    sizes = []
    for size, seconds in [
        (1, 0.001),
        (1, 0.001),
        (2, 0.001),
        (4, 0.1),
        (4, 1.0),
        (2, 1.0),
        (1, 1.0),
    ]:
        backend.batch_completed(size, seconds)
        sizes.append(backend.compute_batch_size())
    assert sizes == [2, 2, 4, 4, 2, 1, 1]


@pytest.mark.quick
def test_workers_that_cannot_be_had_are_the_futures_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that goes on with joblib's calls, nobody would hear of it, and Parallel would
    wait for ever."""

    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("no workers")

    monkeypatch.setattr(Submitter, "run_async", refuses)
    with pytest.raises(RuntimeError, match="no workers"):
        joblib.Parallel(n_jobs=2, backend="mpgrad")([joblib.delayed(abs)(1)] * 4)


SCRIPT = """
import sys, torch, mpgrad
assert "joblib" not in sys.modules
mpgrad.joblib.register(make_default=True)
import joblib
class Squares:
    def __call__(self, x):
        return x ** 2
x = torch.ones(2, requires_grad=True)
calls = (joblib.delayed(f)(x) for f in (lambda y: y.sum(), Squares()))
sum(joblib.Parallel(n_jobs=2)(calls)).sum().backward()
print(x.grad.tolist())
"""
WITHOUT = """
import sys
sys.modules["joblib"] = None
import mpgrad
from mpgrad import *
mpgrad.Pool
try:
    mpgrad.joblib
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (SCRIPT, "[4.0, 4.0]\n"),
        (WITHOUT, "mpgrad.joblib needs joblib, which is not installed; pip install joblib\n"),
    ],
    ids=["with joblib", "without it"],
)
def test_a_script(script: str, told: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=58
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, told, "")
