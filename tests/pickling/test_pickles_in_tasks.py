"""What a task pickles by name is what stands under that name in its worker: functions and classes
of modules and scripts."""

from __future__ import annotations

import functools
import importlib
import io
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad

SOURCE = """
    import functools
    import torch

    FACTOR = 2.0

    def helper(x):
        return x * FACTOR

    def hook(module, args, output):
        return output * FACTOR

    @functools.lru_cache
    def cached(x):
        return x

    def decorate(function):
        @functools.wraps(function)
        def wrapper(x):
            return function(x)
        return wrapper

    @decorate
    def decorated(x):
        return x

    class Net(torch.nn.Linear):
        class Inner:
            pass
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "of_a_user.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("of_a_user")
    sys.modules.pop("of_a_user", None)


@pytest.fixture
def script() -> Any:
    """As the main module has it: carried with each function, as no worker can import it."""
    made = types.SimpleNamespace()
    vars(made)["__name__"] = "__main__"
    exec(textwrap.dedent(SOURCE), vars(made))
    return made


def by_name(value: Any) -> bool:
    return pickle.loads(pickle.dumps(value)) is value


@pytest.fixture(params=["library", "script"])
def user(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.quick
def test_functions_and_classes_are_pickled_by_name(fork_server: mpgrad.Pool, user: Any) -> None:
    """Symptom: it's not the same object as mine.helper; attribute lookup Net on __main__ failed.

    Cause: the modules of the worker's process had what it had imported, and its main module nothing
    of the script's.
    """
    helper, hook, decorated, net = user.helper, user.hook, user.decorated, user.Net
    # a script's has to be among the names that are used
    cached = user.cached if isinstance(user, types.ModuleType) else helper

    def pickles(_: int) -> tuple[list[bool], Any]:
        known = [by_name(each) for each in (helper, hook, cached, decorated, net, net.Inner)]
        model = net(2, 2)
        model.register_forward_hook(hook)
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        return [*known, type(again) is net, sys.modules[helper.__module__].helper is helper], (
            helper,
            net,
            model,
        )

    with mpgrad.Pool(1) as pool:
        for _ in range(2):
            known, (function, kind, model) = pool.map(pickles, [0])[0]
            assert known == [True] * 8
            # what is returned is the caller's own, as before
            assert kind is user.Net
            assert type(model) is user.Net
            assert torch.equal(function(torch.ones(1)), user.helper(torch.ones(1)))


@pytest.mark.quick
def test_each_operation_has_its_own(fork_server: mpgrad.Pool, library: Any) -> None:
    """Names that travelled give way to those of the next operation, and to the worker's own where
    these are meant."""

    def pickled(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            library.helper(x),
            pickle.loads(pickle.dumps(library.helper))(x),
            sys.modules["of_a_user"].helper(x),
        ]

    def looks(name: str) -> Any:
        return getattr(importlib.import_module("of_a_user"), name, None)

    x = torch.tensor(3.0, requires_grad=True)
    with mpgrad.Pool(1) as pool:
        for factor in (2.0, 5.0, 7.0):
            library.FACTOR = factor
            library.helper.__globals__[f"new_{factor}"] = factor
            found = pool.map(pickled, [x])[0]
            assert [each.item() for each in found] == [3 * factor] * 3
            (gradient,) = torch.autograd.grad(sum(found), x)
            assert gradient.item() == 3 * factor
        # a function that uses nothing of the module finds the worker's import
        assert pool.starmap(looks, [("FACTOR",), ("new_7.0",)]) == [2.0, None]
        library.helper = lambda x: x
        assert pool.map(lambda x: sys.modules["of_a_user"].helper is library.helper, [x]) == [True]


@pytest.mark.quick
def test_a_module_that_workers_cannot_import(fork_server: mpgrad.Pool) -> None:
    made = types.ModuleType("made_by_hand")
    exec(textwrap.dedent(SOURCE), vars(made))
    sys.modules["made_by_hand"] = made
    try:
        with mpgrad.Pool(1) as pool:
            look = functools.partial(map_by_name, made.helper)
            assert pool.map(look, [1]) == [True]
            assert pool.map(lambda _: "made_by_hand" in sys.modules, [1]) == [False]
    finally:
        del sys.modules["made_by_hand"]


def map_by_name(value: Any, _: int) -> bool:
    return by_name(value)


@pytest.mark.quick
def test_processes_that_a_task_forks(fork_server: mpgrad.Pool, user: Any) -> None:
    helper = user.helper

    def forks(x: float) -> list[float]:
        with multiprocessing.get_context("fork").Pool(1) as inner:
            return inner.map(helper, [x])

    user.FACTOR = 3.0
    with mpgrad.Pool(1) as pool:
        assert pool.map(forks, [2.0]) == [[6.0]]


PROGRAM = """
    import concurrent.futures, multiprocessing, sys
    import mpgrad, torch
    from torch.utils.data import DataLoader, Dataset
    class Data(Dataset):
        def __len__(self): return 2
        def __getitem__(self, i): return torch.ones(1) * i
    def helper(x): return x + 1
    def spawns(x):
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
            return list(executor.map(helper, [x]))
    def loads(x):
        loader = DataLoader(Data(), 1, num_workers=1, multiprocessing_context="spawn")
        return [each.item() for each in loader]
    if __name__ == "__main__":
        with mpgrad.Pool(1) as pool:
            print(pool.map(spawns, [1]), pool.map(loads, [1]))
"""


@pytest.mark.slow
def test_programs_that_a_task_of_a_script_spawns(tmp_path: Path) -> None:
    """They run the script once more under another name, as those of a serial loop do."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    found = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert found.stdout == "[[2]] [[0.0, 1.0]]\n", found.stderr
