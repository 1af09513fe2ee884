"""joblib's own tests of its backends, run on ours; which of them are left out, and why.

A test that takes a backend gets ours; where it uses the default one, that is ours.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

import mpgrad
import mpgrad.joblib

pytestmark = [
    pytest.mark.slow,  # test_joblib.py has what matters
    pytest.mark.filterwarnings("default"),  # of generators that are dropped: these tests mean to
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)  # joblib's own marks
    SUITE = importlib.import_module("joblib.test.test_parallel")

OURS: dict[str, list[Any]] = {
    **{f"{which}backend": ["mpgrad"] for which in ("", "parent_", "child_", "outer_", "inner_")},
    "backend, error": [
        ("mpgrad", False)
    ],  # whether the end of one Parallel's generator ends another one's workers
}
WITH_DEFAULT = [
    "test_parallel_kwargs",
    "test_exception_dispatch",
    "test_invalid_batch_size",
    "test_dispatch_race_condition",
    "test_parallel_with_exhausted_iterator",
    "test_globals_update_at_each_parallel_call",
    "test_memmap_with_big_offset",
]
AS_LOKY = [  # they name loky, and are about what ours does as well: there that is ours
    "test_threadpool_limitation_in_child_loky",
    "test_threadpool_limitation_in_child_context",
    "test_threadpool_limitation_in_child_override",
    "test_initializer_not_reused",
]
LEFT_OUT = {
    "chooses another backend itself, or none": [
        "test_cpu_count",
        "test_effective_n_jobs",
        "test_effective_n_jobs_None",
        "test_nested_parallel_warnings",
        "test_nested_loop_with_exception_with_loky",
        "test_mutate_input_with_threads",
        "test_parallel_byteorder_corruption",
        "test_batching_auto_threading",
        "test_invalid_backend",
        "test_register_parallel_backend",
        "test_overwrite_default_backend",
        "test_backend_no_multiprocessing",
        "test_parameterized_backend_context_manager",
        "test_directly_parameterized_backend_context_manager",
        "test_retrieval_context",
        "test_default_mp_context",
        "test_parallel_with_interactively_defined_functions_loky",
        "test_parallel_with_interactively_defined_bound_method_loky",
        "test_warning_about_timeout_not_supported_by_backend",
        "test_parallel_return_order_with_return_as_generator_parameter",
        "test_backend_hinting_and_constraints",
        "test_backend_hinting_always_running",
        "test_backend_hinting_and_constraints_with_custom_backends",
        "test_invalid_backend_hinting_and_constraints",
        "test_dask_backend_when_dask_not_installed",
        "test_zero_worker_backend",
    ],
    "expects the workers of the Parallel before, which end with it; those of one "
    "parallel_config stay": [
        "test_loky_reuse_workers",
        "test_initializer_reused",
    ],
    "looks at attributes that are not documented": [
        "test_error_capture",
        "test_backend_batch_statistics_reset",
        "test_parallel_as_context_manager",
    ],
    "pickles with loky, which leaves a process running": ["test_parallel_pickling"],
    "expects threads in tasks; ours run serially there, as threads would not have the caller's "
    "modes": [
        "test_nested_backend_context_manager",
        "test_nested_parallelism_limit",
    ],
    "its programs do not know our backend; test_joblib.py has the like": [
        "test_parallel_with_interactively_defined_functions",
        "test_parallel_with_unpicklable_functions_in_args",
    ],
    "is about memory maps, which our workers do not need": [
        "test_auto_memmap_on_arrays_from_generator",
        "test_memmapping_leaks",
    ],
    "a worker is sent a second short call while it runs the first, which here then turns out to "
    "take 30 s": ["test_parallel_unordered_generator_returns_fastest_first"],
    "replaces a function of loky's backend, or counts its threads": [
        "test_parallel_thread_limit",
        "test_main_thread_renamed_no_warning",
    ],
}


@pytest.fixture(autouse=True)
def ours_is_the_default(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fork_server: mpgrad.Pool
) -> Iterator[None]:
    mpgrad.joblib.register()
    monkeypatch.setattr(SUITE.parallel, "DEFAULT_BACKEND", "mpgrad")
    if request.node.originalname in AS_LOKY:
        monkeypatch.setitem(SUITE.BACKENDS, "loky", mpgrad.joblib.MpgradBackend)
        monkeypatch.setattr(SUITE, "get_reusable_executor", mock.Mock())  # one starts a process
    yield
    del SUITE.BACKENDS["mpgrad"]


def marks_of(test: Callable[..., None]) -> list[pytest.Mark]:
    return list(getattr(test, "pytestmark", ()))


def takes_backends(test: Callable[..., None]) -> bool:
    return any(mark.name == "parametrize" and mark.args[0] in OURS for mark in marks_of(test))


def on_ours(test: Callable[..., None]) -> Callable[..., None]:
    """The test with our backend wherever it takes one, and without joblib's own marks."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    kept = [
        mark for mark in marks_of(test) if mark.name in ("parametrize", "skip", "skipif", "xfail")
    ]
    run.pytestmark = [  # type: ignore[attr-defined]
        pytest.mark.parametrize(mark.args[0], OURS.get(mark.args[0], mark.args[1])).mark
        if mark.name == "parametrize"
        else mark
        for mark in kept
    ]
    return run


TESTS = {
    name: test
    for name, test in vars(SUITE).items()
    if name.startswith("test_") and inspect.isfunction(test)
}
LISTED = [name for names in LEFT_OUT.values() for name in names]
globals().update(
    {
        name: on_ours(test)
        for name, test in TESTS.items()
        if takes_backends(test) and name not in LISTED
    }
)
globals().update({name: on_ours(TESTS[name]) for name in WITH_DEFAULT + AS_LOKY if name in TESTS})


def test_what_is_listed_is_there_once() -> None:
    listed = [*LISTED, *WITH_DEFAULT, *AS_LOKY]
    assert len({*listed}) == len(listed)
    assert len({*listed} & TESTS.keys()) > 10  # an older joblib has not all of them


def test_none_is_forgotten() -> None:
    """A test that is new in joblib is run, or somebody has to say why not."""
    run = {name for name, test in TESTS.items() if takes_backends(test)}
    assert TESTS.keys() <= {*run, *WITH_DEFAULT, *AS_LOKY, *LISTED}
