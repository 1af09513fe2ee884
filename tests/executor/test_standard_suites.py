"""CPython's own tests of executors and pools, run on ours; which of them differ on purpose, and
which are left out, and why.

Not every interpreter comes with its `test` package: what is missing is skipped.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import unittest
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from conftest import staffed

import mpgrad

PACKAGE = "test.test_concurrent_futures"  # a module before Python 3.12
PARTS = ["executor", "util", "process_pool", "wait", "as_completed", "shutdown", "deadlock", "init"]
FUTURES = [PACKAGE, *(f"{PACKAGE}.{name}" for part in PARTS for name in (part, f"test_{part}"))]
POOLS = ["test._test_multiprocessing"]

INSIDES = "looks at attributes that are not documented"
LOADING = (
    "what raises while an argument or a result is loaded is that call's own failure, and no worker "
    "dies of it"
)
# by what differs; else AssertionError
RAISED = {INSIDES: AttributeError, LOADING: (pickle.UnpicklingError, SystemExit)}

DIFFERS = {  # these fail, and have to
    INSIDES: [
        "ProcessPoolExecutorTest.test_idle_process_reuse_one",
        "ProcessPoolExecutorTest.test_idle_process_reuse_multiple",
        "ProcessPoolExecutorTest.test_max_tasks_per_child",
        "ProcessPoolExecutorTest.test_max_tasks_per_child_defaults_to_spawn_context",
        "ProcessPoolExecutorTest.test_saturation",
        "ProcessPoolShutdownTest.test_processes_terminate",
        "ExecutorDeadlockTest.test_shutdown_deadlock_pickle",
        "_TestPool.test_make_pool",
        "_TestPoolWorkerLifetime.test_pool_worker_lifetime",
    ],
    "our class of remote tracebacks is a subclass of those of both modules, and the test asks "
    "for the very class": [
        "ProcessPoolExecutorTest.test_traceback",
        "_TestPool.test_traceback",
    ],
    LOADING: [
        "ExecutorDeadlockTest.test_exit_at_task_unpickle",
        "ExecutorDeadlockTest.test_error_at_task_unpickle",
        "ExecutorDeadlockTest.test_error_during_result_unpickle_in_result_handler",
        "ExecutorDeadlockTest.test_exit_during_result_unpickle_in_result_handler",
    ],
    "what comes before the item that could not be had is given, whatever the chunksize": [
        "_TestPool.test_imap_handle_iterable_exception"
    ],
    "its result is a lambda, which is carried": ["_TestPoolWorkerErrors.test_unpickleable_result"],
    "a pool that nobody holds ends by itself, without a warning": [
        "_TestPool.test_resource_warning"
    ],
}

LEFT_OUT = {
    "sleeps for seconds, and test_executor.py has the like": [
        "ProcessPoolExecutorTest.test_map_timeout",
        "WaitTests.test_20369",
        "WaitTests.test_first_completed_some_already_completed",
        "WaitTests.test_first_exception",
        "WaitTests.test_first_exception_one_already_failed",
        "WaitTests.test_timeout",
        "AsCompletedTests.test_zero_timeout",
        "AsCompletedTests.test_future_times_out",
        "AsCompletedTests.test_duplicate_futures",
        "_TestPool.test_map_no_failfast",
    ],
    "its program imports the standard library's by name; test_executor.py and test_lifecycle.py "
    "run ours": [
        "ProcessPoolShutdownTest.test_interpreter_shutdown",
        "ProcessPoolShutdownTest.test_submit_after_interpreter_shutdown",
        "ProcessPoolShutdownTest.test_hang_gh83386",
        "_TestPoolWorkerLifetime.test_worker_finalization_via_atexit_handler_of_multiprocessing",
    ],
    "makes the standard library's own executor": [
        "ProcessPoolShutdownTest.test_context_manager_shutdown",
        "ProcessPoolShutdownTest.test_del_shutdown",
        "ProcessPoolShutdownTest.test_shutdown_no_wait",
    ],
    "replaces parts of the standard library's executor": [
        "ProcessPoolExecutorTest.test_python_finalization_error",
        # this and the following: from Python 3.14 on
        "ProcessPoolExecutorTest.test_terminate_workers",
        "ProcessPoolExecutorTest.test_kill_workers",
        "ProcessPoolExecutorTest.test_force_shutdown_workers_invalid_op",
        "ExecutorDeadlockTest.test_gh105829_should_not_deadlock_if_wakeup_pipe_full",
    ],
    "needs a context of multiprocessing, whose workers import torch one by one": [
        "ProcessPoolExecutorTest.test_max_tasks_early_shutdown",
        "ProcessPoolExecutorTest.test_ressources_gced_in_workers",
    ],
    f"{INSIDES}, and sleeps; and the death of a worker does not break the executor": [
        "ProcessPoolExecutorTest.test_killed_child"
    ],
    f"{INSIDES}; test_executor.py ends workers of both": [
        "ProcessPoolExecutorTest.test_force_shutdown_workers",
        "ProcessPoolExecutorTest.test_force_shutdown_workers_stops_pool",
        "ProcessPoolExecutorTest.test_force_shutdown_workers_not_started_yet",
    ],
    "takes it that a call runs at once; before a worker is there, all are cancelled": [
        "ProcessPoolShutdownTest.test_cancel_futures"
    ],
    "of Windows": ["ProcessPoolExecutorTest.test_max_workers_too_large"],
}


def by_name(lists: dict[str, list[str]]) -> dict[str, str]:
    return {name: reason for reason, names in lists.items() for name in names}


def found(modules: Sequence[str], name: str) -> Any:
    """The first thing of that name in the modules that there are; None where there is none."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, unittest.SkipTest):
            # there are no such tests, or not on this system
            continue
    return None


def marked_tests(suite: type) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """By name, marked where they are to fail or not to be run."""
    for name in dir(suite):
        if name.startswith("test"):
            test = getattr(suite, name)

            def run(self: Any, test: Callable[[Any], None] = test) -> None:
                test(self)

            listed = f"{suite.__name__}.{name}"
            if reason := by_name(LEFT_OUT).get(listed):
                run = pytest.mark.skip(reason=reason)(run)
            elif reason := by_name(DIFFERS).get(listed):
                run = pytest.mark.xfail(
                    strict=True, raises=RAISED.get(reason, AssertionError), reason=reason
                )(run)
            yield name, run


def on_ours(suite: type, *bases: type, **attributes: Any) -> type[unittest.TestCase]:
    """Under its own name: workers look for it by that."""
    namespace = {**dict(marked_tests(suite)), "__module__": __name__, **attributes}
    return type(suite.__name__, (suite, *bases, unittest.TestCase), namespace)


def set_up_staffed(cls: Any) -> None:
    super(cls, cls).setUpClass()
    staffed(cls.pool)


EXECUTOR_SUITES = [
    "ProcessPoolExecutorTest",
    "WaitTests",
    "AsCompletedTests",
    "ProcessPoolShutdownTest",
]
EXECUTOR_SUITES += ["ExecutorDeadlockTest", "InitializerMixin"]
POOL_SUITES = ["_TestPool", "_TestPoolWorkerErrors", "_TestPoolWorkerLifetime"]
SUITES = {
    **{name: found(FUTURES, name) for name in EXECUTOR_SUITES},
    **{name: found(POOLS, name) for name in POOL_SUITES},
}


def suites_on_ours() -> Iterator[type[unittest.TestCase]]:
    mixin = found(FUTURES, "ExecutorMixin")
    for suite in filter(None, (SUITES[name] for name in EXECUTOR_SUITES)):
        bases = () if issubclass(suite, mixin) else (mixin,)
        yield on_ours(
            suite,
            *bases,
            executor_type=mpgrad.Executor,
            worker_count=3,
            get_context=lambda self: None,
        )
    for suite in filter(None, (SUITES[name] for name in POOL_SUITES)):
        more = {"setUpClass": classmethod(set_up_staffed)} if hasattr(suite, "test_map") else {}
        made = on_ours(suite, TYPE="processes", Pool=staticmethod(mpgrad.Pool), **more)
        # which some use directly
        yield unittest.mock.patch.object(multiprocessing, "Pool", mpgrad.Pool)(made)


globals().update((each.__name__, each) for each in suites_on_ours())


@pytest.mark.parametrize("name", SUITES)
def test_the_suite_is_here(name: str) -> None:
    if SUITES[name] is None:
        pytest.skip(f"this interpreter comes without these tests of CPython ({name})")
    listed = {
        each.partition(".")[2]
        for each in (*by_name(DIFFERS), *by_name(LEFT_OUT))
        if each.startswith(f"{name}.")
    }
    assert {each for each in dir(SUITES[name]) if each.startswith("test")} - listed


def test_each_test_is_listed_once_under_its_suite() -> None:
    listed = [name for lists in (DIFFERS, LEFT_OUT) for names in lists.values() for name in names]
    assert len(set(listed)) == len(listed)
    assert {name.partition(".")[0] for name in listed} <= SUITES.keys()
