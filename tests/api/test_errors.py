"""What a user sees when a task fails: his own lines, the item, and what a worker that died was
at."""

from __future__ import annotations

import ctypes
import functools
import itertools
import linecache
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE
from inside import (
    LIMIT,
    handles,
    hung_calls_are_overdue,
    in_scheduling_thread,
    lent_slots,
    let_it_hear,
    patience_with_stacks,
)

import mpgrad
from mpgrad.tracebacks import OWN_FOLDER, shown
from mpgrad.wire.messages import TRACEBACK_SIGNAL

KEPT_BY_OLD_PYTHON = int(sys.version_info < (3, 11))  # see `hide_own_frames`


def fails(x: Any) -> Any:
    raise ValueError("fails")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("fails")


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def count_of_own(error: BaseException) -> int:
    return sum(file.startswith(OWN_FOLDER) for file in files_of(error))


def has_no_frames_of_ours(error: BaseException) -> None:
    assert count_of_own(error) <= KEPT_BY_OLD_PYTHON, "".join(
        traceback.format_tb(error.__traceback__)
    )
    assert files_of(error)[0] == __file__
    text = str(error.__cause__)
    assert text.count('  File "') >= 1 and OWN_FOLDER not in text
    assert 'raise ValueError("fails")' in text


# --- tracebacks


X = torch.ones(2, requires_grad=True)

ASKED: dict[str, Callable[[mpgrad.Pool], object]] = {
    "map": lambda pool: pool.map(fails, [1, 2]),
    "starmap": lambda pool: pool.starmap(fails, [(1,)]),
    "apply": lambda pool: pool.apply(fails, (1,)),
    "reduce": lambda pool: pool.reduce(lambda target, item: fails(item), [1], [X]),
    "map_reduce": lambda pool: pool.map_reduce(fails, [X], "sum"),
    "map_async": lambda pool: pool.map_async(fails, [1]).get(),
    "imap": lambda pool: list(pool.imap(fails, [1])),
    "submit": lambda pool: pool.submit(fails, 1).result(),
    "backward": lambda pool: pool.map(FailsInBackward.apply, [X * 2])[0].sum().backward(),
    "backward of leaves": lambda pool: pool.map(FailsInBackward.apply, [X])[0].sum().backward(),
    "backward of captures": lambda pool: (
        pool.map(lambda k: FailsInBackward.apply(X) * k, [2])[0].sum().backward()
    ),
    "jacobian": lambda pool: mpgrad.jacobian(fails, X.detach(), pool=pool, mode="reverse"),
    "func": lambda pool: torch.func.grad(lambda x: pool.map(fails, [x])[0].sum())(X.detach()),
    "per_item_grad": lambda pool: mpgrad.per_item_grad(
        pool.map(lambda x: FailsInBackward.apply(x).sum(), [X]), [X]
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_tracebacks_show_the_callers_frames_only(pool: mpgrad.Pool, asked: str) -> None:
    with pytest.raises(ValueError, match="fails") as caught:
        ASKED[asked](pool)
    has_no_frames_of_ours(caught.value)


def test_tracebacks_of_a_data_parallel_module(pool2: mpgrad.Pool) -> None:
    module = mpgrad.nn.DataParallel(Refuses(), pool2.workers)
    with pytest.raises(ValueError, match="fails") as caught:
        module(torch.ones(4, 2))
    has_no_frames_of_ours(caught.value)


class Refuses(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("fails")


def test_tracebacks_of_an_executor(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Executor(max_workers=1) as executor:
        for ask in (
            lambda: list(executor.map(fails, [1])),
            lambda: executor.submit(fails, 1).result(),
        ):
            with pytest.raises(ValueError, match="fails") as caught:
                ask()
            has_no_frames_of_ours(caught.value)


def test_a_result_that_is_asked_for_twice_has_one_traceback(pool2: mpgrad.Pool) -> None:
    for ask in (pool2.map_async(fails, [1]).get, pool2.submit(fails, 1).result):
        lengths = []
        for _ in range(2):
            with pytest.raises(ValueError, match="fails") as caught:
                ask()
            lengths.append(len(files_of(caught.value)))
        assert lengths[0] == lengths[1]


def test_code_of_the_callers_between_ours_stays(pool2: mpgrad.Pool) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("of the items")

    with pytest.raises(KeyError) as caught:
        pool2.map(abs, items())
    assert count_of_own(caught.value) <= KEPT_BY_OLD_PYTHON
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "items"


def test_what_mpgrad_itself_raises_shows_where(pool2: mpgrad.Pool) -> None:
    with pytest.raises(TypeError) as caught:
        pool2.map(abs, [1], chunksize="two")
    assert count_of_own(caught.value) > 1
    with pytest.raises(TypeError, match="the result cannot be sent") as caught:
        pool2.map(lambda x: (each for each in ()), [1])
    assert os.path.join(OWN_FOLDER, "workers") in str(caught.value.__cause__)


def test_what_code_in_c_raises_is_the_tasks(pool: mpgrad.Pool) -> None:
    with pytest.raises(ValueError) as caught:
        pool.map(math.sqrt, [-1.0])
    assert str(caught.value.__cause__).count("File") == 0
    (y,) = pool.map(torch.exp, [X * 2])
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time") as twice:
        y.sum().backward()
    assert count_of_own(twice.value) <= KEPT_BY_OLD_PYTHON
    assert OWN_FOLDER not in str(twice.value.__cause__)


def test_a_mistake_of_ours_in_what_we_call_shows_where(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mpgrad.submission.starting.requested",
        functools.partial(torch.nn.functional.cross_entropy, None),
    )
    with pytest.raises((TypeError, AttributeError)) as caught:
        pool2.map(abs, [1])
    assert count_of_own(caught.value) > 1


def test_full_tracebacks_where_asked_for(
    pool2: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPGRAD_FULL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="fails") as caught:
        pool2.map(fails, [1])
    assert count_of_own(caught.value) > 3 and os.path.join(OWN_FOLDER, "workers") in str(
        caught.value.__cause__
    )


def test_lines_that_only_the_caller_has(pool: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cell of a notebook, and of what is typed into newer Pythons."""
    source = "def of_a_cell(x):\n    return x.no_such_attribute\n"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell 7>", "exec"), namespace)
    monkeypatch.setitem(
        linecache.cache, "<cell 7>", (len(source), None, source.splitlines(True), "<cell 7>")
    )
    with pytest.raises(AttributeError) as caught:
        pool.map(namespace["of_a_cell"], [1])
    text = str(caught.value.__cause__)
    assert '  File "<cell 7>", line 2, in of_a_cell\n    return x.no_such_attribute\n' in text


WORKER = os.path.join(OWN_FOLDER, "workers", "worker.py")
OURS = "".join(f'  File "{WORKER}", line {n}, in _run\n    made = 1\n' for n in (1, 2))
THEIRS = (
    '  File "/no/such/file.py", line 3, in f\n    f(x)\n    ~^^^\n  [Previous line repeated 7 more '
    "times]\n"
)


def test_each_traceback_of_a_chain_is_shortened() -> None:
    title, between = (
        "Traceback (most recent call last):\n",
        "\nDuring handling of the above exception, another occurred:\n\n",
    )
    text = (
        f"{title}{OURS}{THEIRS}ValueError: a\n{between}{title}{THEIRS}{OURS}KeyError: "
        f"'ours'\n{between}{title}{OURS}E\n"
    )
    expected = (
        f"{title}{THEIRS}ValueError: a\n{between}{title}{THEIRS}{OURS}KeyError: "
        f"'ours'\n{between}{title}{OURS}E\n"
    )
    assert shown(text) == expected


def test_exception_groups_are_shortened() -> None:
    margin = "  | "
    lines = [
        "Exception Group Traceback (most recent call last):",
        *(OURS + THEIRS).splitlines(),
        "ExceptionGroup: two (1)",
    ]
    text = "\n".join(margin + each for each in lines)
    assert shown(text) == "\n".join(
        margin + each for each in [lines[0], *THEIRS.splitlines(), lines[-1]]
    )


# --- notes


def test_the_note_says_what_the_function_was_given(pool: mpgrad.Pool) -> None:
    (note,) = note_of(lambda: pool.map(fails, [torch.ones(3, 4)]))
    assert note.startswith("raised in item 0 of fails, worker ")
    assert note.endswith(", phase: forward (tensor float32 [3, 4])")
    items = [({"a": torch.ones(2, dtype=torch.int64), 1: [None, (1, (2, 3))]}, "text", *range(9))]
    (note,) = note_of(lambda: pool.map(fails, items))
    assert note.endswith(
        "(({'a': tensor int64 [2], 1: [...]}, str, int, int, int, int, and 5 more))"
    )
    (note,) = note_of(lambda: pool.apply(lambda a, b: fails(a), (1,), {"b": torch.nn.Parameter(X)}))
    assert note.endswith("(int, b=tensor float32 [2])")


def note_of(ask: Callable[[], object]) -> list[str]:
    with pytest.raises(ValueError, match="fails") as caught:
        ask()
    return caught.value.__notes__


class DivergedError(Exception):
    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__("diverged")
        self.loss = loss


def diverge(x: torch.Tensor) -> None:
    raise DivergedError(x.exp().sum())


def test_tensors_of_an_exception_are_values(pool: mpgrad.Pool) -> None:
    """They arrived as leaves, whose backward gave the item no gradient, without a word."""
    x = torch.rand(3, requires_grad=True)
    with pytest.raises(DivergedError) as caught:
        pool.apply(diverge, (x,))
    assert torch.equal(caught.value.loss, x.exp().sum())
    with pytest.raises(RuntimeError, match="does not require grad"):
        caught.value.loss.backward()


def test_a_task_that_ends_the_program_is_named(
    pool: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    def ends(k: int) -> None:
        if k == 2:
            sys.exit(3)

    with pytest.raises(SystemExit):
        pool.map(ends, range(4))
    (record,) = [each for each in caplog.records if each.name == "mpgrad"]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "a task called sys.exit: raised in item 2 of ends, worker "
    )


# --- warnings and log records


def warns_of_its_caller(x: int) -> int:
    warnings.warn("of the caller", stacklevel=2)
    return x


def test_warnings_of_who_calls_a_task_point_at_the_callers_line(pool2: mpgrad.Pool) -> None:
    def ask() -> None:
        pool2.map(warns_of_its_caller, [1, 2])

    with pytest.warns(UserWarning, match="of the caller") as caught:
        ask()
    assert {(each.filename, each.lineno) for each in caught} == {
        (__file__, ask.__code__.co_firstlineno + 1)
    }


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


WARNED: dict[str, Callable[[mpgrad.Pool], object]] = {
    "map": lambda pool: pool.map(Counts(), [X]),
    "apply": lambda pool: pool.apply(Counts(), (X,)),
    "submit": lambda pool: pool.submit(Counts(), X).result(),
    "imap": lambda pool: next(iter(pool.imap(Counts(), [X]))),
    "map_async": lambda pool: pool.map_async(Counts(), [X]).get(),
    "map_reduce": lambda pool: pool.map_reduce(Counts(), [X], "sum"),
    "starmap": lambda pool: pool.starmap(Counts(), [(X,)]),
    "vjp": lambda pool: mpgrad.vjp(Counts(), [X.detach()], [torch.ones(2)], pool=pool),
    "gather": lambda pool: mpgrad.nn.gather([(torch.zeros(()),), (torch.zeros(()),)]),
}


@pytest.mark.parametrize("asked", WARNED)
def test_warnings_of_the_pool_point_at_the_callers_line(pool2: mpgrad.Pool, asked: str) -> None:
    with pytest.warns(UserWarning) as caught:
        WARNED[asked](pool2)
    assert {(each.filename, each.lineno) for each in caught} == {
        (__file__, WARNED[asked].__code__.co_firstlineno)
    }


def test_log_records_name_their_worker(
    pool2: mpgrad.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    pool2.map(lambda k: logging.getLogger("task").warning("of %d", k), range(6), 1)
    numbers = {worker.number for worker in pool2.stats().workers}
    names = {each.processName for each in caplog.records if each.name == "task"}
    assert names and names <= {f"mpgrad-worker-{number}" for number in numbers}


# --- what a worker was at when it died


def crash_by(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def crash_in_c() -> None:
    ctypes.string_at(0)


def test_the_stack_of_a_worker_that_crashes(fresh_pool: mpgrad.Pool) -> None:
    with pytest.raises(mpgrad.WorkerDiedError, match="was killed by SIGSEGV") as caught:
        fresh_pool.map(lambda k: crash_in_c() if k == 3 else k, range(6))
    assert_at(caught.value, "ctypes.string_at(0)")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL"])
def test_every_fatal_signal_leaves_a_stack(name: str, fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, retries=0) as pool:
        with pytest.raises(mpgrad.WorkerDiedError, match=f"was killed by {name} ") as caught:
            pool.apply(crash_by, (name,))
        assert_at(caught.value, "os.kill(os.getpid(), getattr(signal, name))")
        assert "the call was tried once (retries: 0)" in str(caught.value)


@pytest.mark.parametrize("in_c", [False, True])
def test_the_stack_of_a_worker_that_takes_too_long(
    in_c: bool, fork_server: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience_with_stacks(monkeypatch, PATIENCE)
    begun = tmp_path / "begun"

    def stuck(k: int) -> None:
        begun.touch(), time.sleep(60)

    def stuck_with_the_interpreters_lock(k: int) -> None:
        begun.touch(), ctypes.PyDLL(None).sleep(60)

    function, source = (
        (stuck_with_the_interpreters_lock, "PyDLL(None).sleep(60)")
        if in_c
        else (stuck, "time.sleep(60)")
    )
    with mpgrad.Pool(1) as pool, hung_calls_are_overdue(pool, begun.exists):
        with pytest.raises(
            mpgrad.CallTimeoutError, match=r"; the call was tried once \(timeout_retries: 0\)"
        ) as caught:
            pool.map(function, [1], timeout=LIMIT)
        assert_at(caught.value, source)
        assert pool.apply(abs, (-1,)) == 1


class LoadedBy:
    """Calls a function in whoever loads it."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call

    def __call__(self, k: int) -> None: ...


def test_how_often_a_function_was_loaded_in_vain(fork_server: mpgrad.Pool) -> None:
    # symptom: "tried 3 times (retries: 0)". cause: such deaths were counted as tries.
    message = "; 3 workers died when the call was next"
    with mpgrad.Pool(1, retries=0) as pool, pytest.raises(mpgrad.WorkerDiedError, match=message):
        pool.map(LoadedBy(os._exit, (3,)), [1])


def assert_at(error: mpgrad.WorkerDiedError | mpgrad.CallTimeoutError, source: str) -> None:
    assert source in error.stack and f'File "{__file__}", line ' in error.stack
    assert OWN_FOLDER not in error.stack
    assert any(error.stack in note for note in error.__notes__)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.stack, again.__notes__) == (str(error), error.stack, error.__notes__)


def test_a_worker_that_cannot_leave_its_stack_is_killed_all_the_same(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    is_deaf = tmp_path / "is_deaf"

    def deaf() -> None:
        signal.signal(TRACEBACK_SIGNAL, signal.SIG_IGN)
        is_deaf.touch()
        time.sleep(60)

    with mpgrad.Pool(1, retries=0) as pool, hung_calls_are_overdue(pool, is_deaf.exists):
        with pytest.raises(mpgrad.CallTimeoutError) as caught:
            pool.map(lambda k: deaf(), [1], timeout=LIMIT)
        assert caught.value.stack == ""
        pool.apply(abs, (1,))


def test_a_call_that_ends_just_in_time_is_not_blamed(
    fork_server: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker answers after it was told to end; what it has been given meanwhile is done by its
    successor."""

    told, begun = tmp_path / "told", tmp_path / "begun"

    def be_deaf() -> None:
        signal.signal(TRACEBACK_SIGNAL, lambda number, frame: told.touch())

    def ends_too_late(k: int) -> int:
        until(told)
        return k

    def is_interrupted() -> int:
        if not begun.exists():
            begun.touch()
            time.sleep(60)
        return 2

    def has_had_its_time() -> None:
        (worker,) = handles(pool)
        assert worker.termination is not None
        worker.termination = worker.termination._replace(moment=0.0)

    patience_with_stacks(monkeypatch, 600.0)
    with mpgrad.Pool(1, retries=0) as pool:
        pool.apply(be_deaf)
        assert pool.map(ends_too_late, [1], timeout=0.1) == [1]
        result = pool.apply_async(is_interrupted)
        until(begun)
        in_scheduling_thread(pool, has_had_its_time)
        assert result.get(PATIENCE) == 2
        assert pool.stats().deaths == 1


def until(file: Path) -> None:
    while not file.exists():
        time.sleep(1e-3)


def test_a_process_that_a_task_forks_keeps_quiet(fork_server: mpgrad.Pool) -> None:
    def fork_and_die() -> None:
        pid = os.fork()
        if pid == 0:
            crash_by("SIGABRT")
        os.waitpid(pid, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    with mpgrad.Pool(1, retries=0) as pool:
        with pytest.raises(mpgrad.WorkerDiedError, match="was killed by SIGKILL") as caught:
            pool.apply(fork_and_die)
        assert caught.value.stack == ""


def test_a_process_that_such_a_process_forks_is_left_alone(pool2: mpgrad.Pool) -> None:
    """What is closed in the first must not be closed again in the second, where the number is that
    of another file."""

    def fork_twice() -> int:
        if (child := os.fork()) == 0:
            opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
            if (grandchild := os.fork()) == 0:
                os._exit(0 if all(is_open(each) for each in opened) else 1)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert pool2.apply(fork_twice) == 0


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_the_stack_of_an_initializer_that_crashes(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, initializer=crash_in_c) as pool:
        with pytest.raises(mpgrad.WorkerDiedError, match="phase: start") as caught:
            pool.apply(abs, (1,))
        assert_at(caught.value, "ctypes.string_at(0)")


def test_stacks_of_workers_of_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patience_with_stacks(monkeypatch, PATIENCE)
    begun = tmp_path / "begun"

    def stuck(k: int) -> None:
        begun.touch(), time.sleep(60)

    with (
        mpgrad.Pool(1, context="fork", retries=0) as pool,
        hung_calls_are_overdue(pool, begun.exists),
    ):
        with pytest.raises(mpgrad.WorkerDiedError) as caught:
            pool.apply(crash_in_c)
        assert_at(caught.value, "ctypes.string_at(0)")
        with pytest.raises(mpgrad.CallTimeoutError) as slow:
            pool.map(stuck, [1], timeout=LIMIT)
        assert_at(slow.value, "time.sleep(60)")


# --- what a caller gets wrong


@pytest.mark.parametrize("name", ["n_jobs", "max_workers", "num_workers", "nprocs", "proceses"])
def test_other_names_of_arguments_suggest_ours(name: str) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^Pool got an unexpected keyword argument '{name}'; did you mean 'processes'\?$",
    ):
        mpgrad.Pool(**{name: 2})


@pytest.mark.parametrize("name", ["n_jobs", "processes", "num_workers"])
def test_an_executor_suggests_its_own(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^Executor got an unexpected .* '{name}'; did you mean 'max_workers'\?$"
    ):
        mpgrad.Executor(**{name: 2})


def test_arguments_that_nobody_knows() -> None:
    with pytest.raises(
        TypeError,
        match=r"unexpected keyword argument 'colour' \(there are: processes, initializer, ",
    ):
        mpgrad.Pool(colour="red")
    with pytest.raises(TypeError, match="'maxtasksperchild'; did you mean 'max_tasks_per_child'"):
        mpgrad.Executor(1, maxtasksperchild=3)
    with mpgrad.Executor(max_workers=1, engine="inline") as executor:
        assert executor.submit(abs, -1).result() == 1


@pytest.mark.parametrize("operation", ["map", "map_async", "imap", "imap_unordered"])
@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (([1], 2, [3]), {}, r"takes all iterables before chunksize.* \(given: int, list\)$"),
        (([1], [2], 3), {"chunksize": 4}, r"chunksize is given twice \(chunksize: 4\)$"),
        (([1], [2], 1.5), {}, r"^chunksize must be an integer \(chunksize: 1.5\)$"),
        (([1], [2]), {"chunksize": [3]}, r"^chunksize must be an integer \(chunksize: \[3\]\)$"),
        ((3, [2]), {}, r"^the items must be an iterable \(given: 3\)$"),
    ],
)
def test_iterables_and_options_that_are_mixed_up(
    pool2: mpgrad.Pool, operation: str, given: Any, options: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        getattr(pool2, operation)(max, *given, **options)


def test_starmap_takes_one_iterable(pool2: mpgrad.Pool) -> None:
    with pytest.raises(TypeError, match=r"^chunksize must be an integer \(chunksize: \[3\]\)$"):
        pool2.starmap(max, [(1, 2)], [3])  # type: ignore[call-overload]


def test_after_the_with_block(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1) as pool:
        (y,) = pool.map(torch.exp, [X])
        later = pool.apply_async(time.sleep, (60,))
    for ask in (later.get, y.sum().backward):
        with pytest.raises(mpgrad.PoolClosedError, match="inside the with block"):
            ask()
    with pytest.raises(mpgrad.PoolClosedError, match="inside the with block"):
        pool.map(abs, [1])
    assert "terminate" in str(mpgrad.Pool.__exit__.__doc__)


def test_the_item_that_killed_is_named(fresh_pool: mpgrad.Pool) -> None:
    # symptom: item 0 was blamed. cause: the calls before it in its chunk failed too, each with an
    # error of its own.
    with pytest.raises(mpgrad.WorkerDiedError, match=r"phase: forward, item 3\)"):
        fresh_pool.map(
            lambda k: os.kill(os.getpid(), signal.SIGKILL) if k == 3 else k, range(20), 10
        )


def test_reductions_name_blocks_and_targets(pool2: mpgrad.Pool) -> None:
    # symptom: "item 10" for the 101st of 640 items. cause: calls of a reduction are blocks of
    # items, or targets.
    with pytest.raises(ZeroDivisionError) as caught:
        pool2.map_reduce(lambda k: 1 / (k - 100), range(640), "sum")
    assert any("raised in block 10, worker" in note for note in caught.value.__notes__)
    with pytest.raises(ZeroDivisionError) as caught:
        pool2.reduce(lambda target, k: target / k, [1, 0], [1.0, 2.0])
    assert any("raised in target 0, worker" in note for note in caught.value.__notes__)


@pytest.mark.quick
@pytest.mark.parametrize("ask", ["map", "map_async", "starmap"])
def test_a_failure_ends_the_reading_of_items(pool: mpgrad.Pool, ask: str) -> None:
    # symptom: a million items were packed, and an endless source never came to its end, though the
    # first item had failed. cause: whoever packed calls did not look at what came of them.
    deadline = time.monotonic() + PATIENCE

    def source() -> Iterator[Any]:
        for k in itertools.count(1):
            assert time.monotonic() < deadline
            yield (-k,) if ask == "starmap" else -k

    def fails(k: int) -> int:
        raise LookupError(k)

    with pytest.raises(LookupError, match="-1"):
        getattr(pool, ask)(fails, source()).get()


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failing_early_item(failing: int, fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    # symptom: hours until the error of an item that had failed at once. cause: it counted as a call
    # of 0 s, so the function was cheap: the other items, however long they take, were sent, and
    # were waited for.
    go = tmp_path / "go"
    (tmp_path / "begun").mkdir()

    def simulate(k: int) -> None:
        (tmp_path / "begun" / str(k)).touch()
        if k == failing:
            raise ValueError("is not valid")
        time.sleep(0.05)  # items that are known to be cheap would form one call
        if k > failing:
            until(go)

    with mpgrad.Pool(2) as pool:
        for _ in range(2):  # the second finds what was learned from the first
            with pytest.raises(ValueError, match="is not valid"):
                pool.map(simulate, range(300))
            let_it_hear(pool)
            go.touch()
            pool.map(abs, range(4), 1)
            go.unlink()
    assert len(list((tmp_path / "begun").iterdir())) < 40


def stops(k: int) -> int:
    if k == 1:
        raise StopIteration(k)
    return k


ITERATIONS: dict[str, Callable[[mpgrad.Pool, Callable[[Any], Any], list[Any]], Any]] = {
    "imap": lambda pool, fn, items: list(pool.imap(fn, items)),
    "imap_unordered": lambda pool, fn, items: list(pool.imap_unordered(fn, items)),
    "map_reduce": lambda pool, fn, items: pool.map_reduce(fn, items, lambda a, b: a + b),
}


@pytest.mark.quick
@pytest.mark.parametrize("iterate", ITERATIONS.values(), ids=ITERATIONS)
def test_a_stop_iteration_ends_nothing_silently(
    pool: mpgrad.Pool, iterate: Callable[..., Any]
) -> None:
    # symptom: fewer results, fewer items in a sum, no error. cause: who asked for results, or `map`
    # in a worker, took it for the end. As in a generator it becomes a RuntimeError.
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        iterate(pool, stops, [0, 1, 2])
    assert isinstance(caught.value.__cause__, StopIteration) or "generator raised" in str(
        caught.value
    )


def test_what_tasks_of_an_executor_raise_is_no_end_and_no_timeout(fork_server: mpgrad.Pool) -> None:
    def fails(error: BaseException) -> None:
        raise error

    with mpgrad.Executor(1) as executor:
        with pytest.raises(RuntimeError, match="item 1 of stops raised StopIteration"):
            list(executor.map(stops, [0, 1, 2]))
        # symptom: "a result did not come ..."
        with pytest.raises(multiprocessing.TimeoutError, match="of the task"):
            list(executor.map(fails, [multiprocessing.TimeoutError("of the task")]))
        for error in (StopAsyncIteration(), GeneratorExit()):
            with pytest.raises(type(error)):
                list(executor.map(fails, [error]))


def test_inputs_of_calls_that_were_left_out_are_given_back(pool2: mpgrad.Pool) -> None:
    # symptom: shared memory grew with every failing map. cause: a worker returned only what it had
    # looked at.
    def fails(x: torch.Tensor) -> None:
        raise LookupError

    slots = []
    for _ in range(20):
        with pytest.raises(LookupError):
            pool2.map(fails, [torch.ones(10_000) for _ in range(20)], 10)
        pool2.map(abs, range(8), 1)
        slots.append(lent_slots(pool2))
    assert max(slots[10:]) <= 40


def test_code_has_the_name_of_its_file(pool2: mpgrad.Pool) -> None:
    """Symptom: tracebacks of workers without lines. Cause: cloudpickle from 3.1.3 on leaves the
    name out."""

    def fn(x: int) -> list[str]:
        code = [sys._getframe().f_code, (lambda: sys._getframe().f_code)()]
        return [each.co_filename for each in code]

    assert pool2.map(fn, [1]) == [[__file__] * 2]
