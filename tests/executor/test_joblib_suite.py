"""joblib's own tests of its backends, run on ours; which of them are left out, and why.

A test that takes a backend gets ours; where it uses the default one, that is ours.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

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
    "backend, error": [("mpgrad", False)],  # whether the end of one Parallel's generator ends another one's workers
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
ABOUT_OTHERS = (  # or about none
    r"backend=|prefer=|loky|(?<!with_)multiprocessing|threading|dask|Backend|cpu_count|effective_n_jobs|n_jobs=1\b"
)
LEFT_OUT = {
    "looks at attributes that are not documented": [
        "test_error_capture",
        "test_backend_batch_statistics_reset",
        "test_parallel_as_context_manager",
    ],
    "pickles with loky, which leaves a process running": ["test_parallel_pickling"],
    "expects threads in tasks; ours run serially there, as threads would not have the caller's modes": [
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
    "a worker is sent a second short call while it runs the first, which here then turns out to take 30 s": [
        "test_parallel_unordered_generator_returns_fastest_first"
    ],
    "replaces a function of loky's backend, or counts its threads": [
        "test_parallel_thread_limit",
        "test_main_thread_renamed_no_warning",
    ],
}


@pytest.fixture(autouse=True)
def ours_is_the_default(monkeypatch: pytest.MonkeyPatch, nursery: mpgrad.Pool) -> Iterator[None]:
    mpgrad.joblib.register()
    monkeypatch.setattr(SUITE.parallel, "DEFAULT_BACKEND", "mpgrad")
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

    kept = [mark for mark in marks_of(test) if mark.name in ("parametrize", "skip", "skipif", "xfail")]
    run.pytestmark = [  # type: ignore[attr-defined]
        pytest.mark.parametrize(mark.args[0], OURS.get(mark.args[0], mark.args[1])).mark if mark.name == "parametrize" else mark
        for mark in kept
    ]
    return run


TESTS = {name: test for name, test in vars(SUITE).items() if name.startswith("test_") and inspect.isfunction(test)}
LISTED = [name for names in LEFT_OUT.values() for name in names]
globals().update({name: on_ours(test) for name, test in TESTS.items() if takes_backends(test) and name not in LISTED})
globals().update({name: on_ours(TESTS[name]) for name in WITH_DEFAULT if name in TESTS})


def test_what_is_listed_is_there_once() -> None:
    assert len({*LISTED, *WITH_DEFAULT}) == len(LISTED) + len(WITH_DEFAULT)
    assert len({*LISTED, *WITH_DEFAULT} & TESTS.keys()) > 10  # an older joblib has not all of them


def test_no_test_that_could_take_our_backend_is_forgotten() -> None:
    """What neither takes a backend nor is listed chooses another one itself, or none."""
    rest = [test for name, test in TESTS.items() if not takes_backends(test) and name not in {*LISTED, *WITH_DEFAULT}]
    assert [test.__name__ for test in rest if not re.search(ABOUT_OTHERS, inspect.getsource(test))] == []
