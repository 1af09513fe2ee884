"""What PyTorch keeps beside tensors holds in the worker: modes, and random numbers."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from conftest import graphs_in

import mpgrad
from mpgrad.torch_state import modes

pytestmark = pytest.mark.quick


def test_no_grad(pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    # of tests before, being released
    before = graphs_in(pool)
    with torch.no_grad():
        ((enabled, needs_grad, y),) = pool.map(
            lambda t: (torch.is_grad_enabled(), t.requires_grad, t * 2), [x]
        )
    assert not enabled and needs_grad and not y.requires_grad
    assert graphs_in(pool) <= before


def test_grad_enabled_inside_no_grad(pool: mpgrad.Pool) -> None:
    def inner(t: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            u = t.detach().requires_grad_()
            return torch.autograd.grad((u**3).sum(), u)[0]

    with torch.no_grad():
        assert pool.map(inner, [torch.ones(2)])[0].tolist() == [3, 3]


def test_inference_mode(pool: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        ((inside, y),) = pool.map(lambda t: (torch.is_inference_mode_enabled(), t * 2), [x])
    assert inside and y.is_inference() and not y.requires_grad
    ((inside, y),) = pool.map(lambda t: (torch.is_inference_mode_enabled(), t * 2), [x])
    assert not inside and y.requires_grad


def test_inference_tensors_as_items(pool: mpgrad.Pool) -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    assert pool.map(lambda t: t * 2, [x])[0].tolist() == [2, 2]


def test_default_dtype(pool: mpgrad.Pool) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert pool.map(lambda k: torch.ones(1).dtype, [0]) == [torch.float64]
    finally:
        torch.set_default_dtype(torch.float32)
    assert pool.map(lambda k: torch.ones(1).dtype, [0]) == [torch.float32]


@pytest.mark.quick
def test_a_task_does_not_change_the_default_dtype_of_others(pool2: mpgrad.Pool) -> None:
    """Symptom: float64 in later maps, whose caller had float32."""

    def leaves_others(k: int) -> None:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.autograd.set_detect_anomaly(True, check_nan=False)

    def found(k: int) -> tuple[torch.dtype, bool, bool]:
        return (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
        )

    pool2.map(leaves_others, range(8), chunksize=1)
    assert set(pool2.map(found, range(8), chunksize=1)) == {(torch.float32, False, False)}


def test_the_default_dtype_of_the_caller_counts(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, torch.set_default_dtype, (torch.float64,)) as pool:
        assert pool.map(lambda k: torch.ones(1).dtype, [0]) == [torch.float32]


@pytest.mark.parametrize("engine", ["inline", "thread"])
def test_pools_of_a_task_leave_its_default_dtype(pool2: mpgrad.Pool, engine: Any) -> None:
    """Symptom: later maps of a caller with float32 were in float64. Cause: what the inner pool
    found counted."""

    def nested(x: float) -> tuple[torch.dtype, list[torch.dtype], torch.dtype]:
        before = torch.get_default_dtype()
        with mpgrad.Pool(1, engine=engine) as inner:
            found = inner.map(lambda _: torch.get_default_dtype(), [x])
        return before, found, torch.get_default_dtype()

    torch.set_default_dtype(torch.float64)
    try:
        assert (
            pool2.map(nested, [0, 1, 2, 3], chunksize=1)
            == [(torch.float64, [torch.float64], torch.float64)] * 4
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert (
        pool2.map(nested, [0, 1, 2, 3], chunksize=1)
        == [(torch.float32, [torch.float32], torch.float32)] * 4
    )


def test_autocast(pool: mpgrad.Pool) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = pool.map(lambda t: t @ weight, [x])
        expected = x @ weight
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    ours = torch.autograd.grad(y.sum(), [x, weight])
    theirs = torch.autograd.grad(expected.sum(), [x, weight])
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_deterministic_flags(pool: mpgrad.Pool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        flags = pool.map(lambda k: torch.are_deterministic_algorithms_enabled(), [0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert flags == [True]
    assert pool.map(lambda k: torch.are_deterministic_algorithms_enabled(), [0]) == [False]


def test_one_intra_op_thread_or_as_many_as_told(fork_server: mpgrad.Pool) -> None:
    assert fork_server.apply(torch.get_num_threads) == 1
    with mpgrad.Pool(1, threads_per_worker=2) as pool:
        assert pool.apply(torch.get_num_threads) == 2


SEEDED = [("process", 1), ("process", 2), ("process", 4), ("inline", 1)]


def noise(k: int) -> tuple[torch.Tensor, float, float]:
    return torch.randn(3), random.random(), float(numpy.random.rand())


def test_random_numbers_follow_the_parents_seed(
    shared_pools: Callable[[str, int], mpgrad.Pool],
) -> None:
    drawn: list[list[Any]] = []
    for engine in SEEDED:
        for chunksize in (1, 3):
            torch.manual_seed(0)
            drawn.append(shared_pools(*engine).map(noise, range(20), chunksize))
    for other in drawn[1:]:
        for mine, theirs in zip(drawn[0], other, strict=True):
            assert torch.equal(mine[0], theirs[0]) and mine[1:] == theirs[1:]
    assert len({numbers[1] for numbers in drawn[0]}) == 20
    assert len({float(numbers[0][0]) for numbers in drawn[0]}) == 20


@pytest.mark.slow
def test_numpys_generator_is_there_before_it_is_needed(fork_server: mpgrad.Pool) -> None:
    """Else the first map would read files, and need a descriptor."""
    code = (
        "import sys, mpgrad; pool = mpgrad.Pool(1); print('numpy.random' in sys.modules); "
        "pool.terminate()"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=58) == "True\n"
    with mpgrad.Pool(1) as pool:
        assert pool.apply(lambda: "numpy.random" in sys.modules)


def test_dropout_in_a_captured_module(shared_pools: Callable[[str, int], mpgrad.Pool]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 100), torch.nn.Dropout(0.5))
    items = [torch.randn(2, 4) for _ in range(10)]
    results = []
    for engine in SEEDED:
        torch.manual_seed(7)
        results.append(torch.stack(shared_pools(*engine).map(net, items)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_two_maps_differ_and_another_seed_differs(pool2: mpgrad.Pool) -> None:
    torch.manual_seed(0)
    first, second = (pool2.map(noise, [0])[0][0] for _ in range(2))
    torch.manual_seed(1)
    third = pool2.map(noise, [0])[0][0]
    assert not torch.equal(first, second) and not torch.equal(first, third)


def test_the_callers_generators_are_left_alone_inline(
    shared_pools: Callable[[str, int], mpgrad.Pool],
) -> None:
    pool = shared_pools("inline", 1)
    torch.manual_seed(0)
    torch.randint(0, 1 << 62, ())  # what an operation draws
    expected = torch.rand(1), random.getstate(), numpy.random.get_state()[1].tolist()
    torch.manual_seed(0)
    pool.map(noise, range(3))
    assert (torch.rand(1), random.getstate(), numpy.random.get_state()[1].tolist()) == expected


def test_matmul_precision_travels(pool2: mpgrad.Pool) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert pool2.map(lambda _: torch.get_float32_matmul_precision(), [0]) == ["medium"]
    finally:
        # which leaves newer settings at "ieee": they would travel from now on
        torch.set_float32_matmul_precision("highest")
        for backend in (torch.backends.mkldnn, torch.backends.cuda):
            matmul = getattr(backend, "matmul", None)  # mkldnn has none in torch 2.8
            if hasattr(matmul, "fp32_precision"):
                matmul.fp32_precision = "none"


def test_split_mix_against_the_published_sequence() -> None:
    # the first outputs of SplitMix64 seeded with 1234567, as printed on
    # rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    seed = 1234567 * pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    outputs = [modes.split_mix(seed + step) for step in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_chain_under_inference_mode(pool2: mpgrad.Pool) -> None:
    # symptom: "Inference tensors do not track version counter". cause: the version of every former
    # result was read.
    with torch.inference_mode():
        results = pool2.map(torch.neg, pool2.map(torch.ones, [(50_000,)] * 2))
    assert [float(r[0]) for r in results] == [-1.0, -1.0]
