"""The caller's filters of `warnings` hold in tasks, as they are when an operation or a backward
begins. What passes them reaches the caller, whose filters count it as in the serial loop."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import mpgrad


class Careful(UserWarning):
    """A category of the tests' own."""


def fallen_back(k: int) -> str:
    """Each warning that is an error, by name; what this module's code often does."""
    try:
        warnings.warn(f"number {k}", RuntimeWarning, stacklevel=1)
        warnings.warn(f"careful {k}", Careful, stacklevel=1)
    except (RuntimeWarning, Careful) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def joined(left: str, right: str) -> str:
    return f"({left} {right} {fallen_back(2)})"


def told(k: int) -> str:
    return f"RuntimeWarning: number {k}"


Way = Callable[[mpgrad.Pool], Any]
WAYS: list[tuple[Way, Any]] = [
    (lambda pool: pool.map(fallen_back, range(4), 1), [told(k) for k in range(4)]),
    (lambda pool: list(pool.imap(fallen_back, range(2))), [told(k) for k in range(2)]),
    (lambda pool: pool.map_async(fallen_back, [3]).get(), [told(3)]),
    (lambda pool: pool.apply(fallen_back, (1,)), told(1)),
    (lambda pool: pool.submit(fallen_back, 1).result(), told(1)),
    (lambda pool: pool.starmap(fallen_back, [(1,)]), [told(1)]),
    (lambda pool: pool.reduce(joined, ["a", "b"], ["t"]), [f"((t a {told(2)}) b {told(2)})"]),
]


@pytest.mark.quick
@pytest.mark.parametrize(("way", "expected"), WAYS)
def test_a_task_catches_a_warning_that_is_an_error(
    way: Way, expected: Any, pool: mpgrad.Pool, pool2: mpgrad.Pool
) -> None:
    """The map itself raised, because the warning became an error only in the caller."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert way(pool) == way(pool2) == expected


def local_category() -> type[Warning]:
    class Local(Warning):
        pass

    return Local


@pytest.mark.quick
def test_categories_that_only_the_caller_has(pool2: mpgrad.Pool) -> None:
    local, other = local_category(), type("Other", (Warning,), {})

    def fn(k: int) -> str:
        try:
            warnings.warn(local("of a local class"), stacklevel=1)
            warnings.warn("not an error", other, stacklevel=1)
        except local:
            return "caught"
        return "passed"

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert pool2.map(fn, [0]) == ["passed"]
        warnings.simplefilter("error", local)
        assert pool2.map(fn, [0]) == ["caught"]
    assert [each.category.__name__ for each in given] == ["Local", "Other"]


RULES: list[tuple[dict[str, Any], str]] = [
    ({"message": "number 1"}, "number"),
    ({"message": "careful"}, "careful"),
    ({"category": Careful}, "careful"),
    ({"category": Warning}, "number"),
    ({"module": f"{__name__}$"}, "number"),
    ({"module": "another"}, "passed"),
    ({"lineno": fallen_back.__code__.co_firstlineno + 4}, "careful"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("rule", "expected"), RULES)
@pytest.mark.parametrize("others", ["ignore", "default"])
def test_each_part_of_a_filter(
    rule: dict[str, Any], expected: str, others: str, pool2: mpgrad.Pool
) -> None:
    found = []
    for run in (lambda: pool2.map(fallen_back, [1, 2], 1), lambda: list(map(fallen_back, [1, 2]))):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter(others)  # type: ignore[arg-type]
            warnings.filterwarnings("error", **rule)
            found.append((run(), sorted(str(each.message) for each in given)))
    ours, theirs = found
    assert ours == theirs
    assert expected in ours[0][0]


@pytest.mark.quick
def test_filters_that_change_between_maps(pool: mpgrad.Pool, pool2: mpgrad.Pool) -> None:
    for each in (pool, pool2):
        for action in ("error", "ignore", "error", "always"):
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter(action)  # type: ignore[arg-type]
                found = each.map(fallen_back, [7])
                assert found == [told(7) if action == "error" else "passed"]
            assert [str(w.message) for w in given] == (
                ["number 7", "careful 7"] if action == "always" else []
            )


@pytest.mark.quick
def test_an_iterator_has_the_filters_of_its_beginning(pool2: mpgrad.Pool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = pool2.imap(fallen_back, range(40), 1)
    assert list(results) == [told(k) for k in range(40)]


def warn_of_both(_: object) -> None:
    warnings.warn("one of many", UserWarning, stacklevel=1)
    warnings.warn_explicit("of a line", UserWarning, "made_up.py", 3)


@pytest.mark.quick
@pytest.mark.parametrize("action", ["default", "once", "module", "always"])
def test_a_warning_is_counted_in_the_caller(action: Any, pool2: mpgrad.Pool) -> None:
    """Workers do not count for themselves, and a map goes on where the last one, or the caller's
    own code, has ended."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter(action)
        for _ in range(2):
            pool2.map(warn_of_both, range(6), 1)
        warn_of_both(0)
    texts = [str(each.message) for each in given]
    assert set(texts) == {"one of many", "of a line"}
    # a warning without a registry is given each time, unless by "once"
    assert (texts.count("one of many") == 1) is (action != "always")
    assert {(Path(each.filename).name, each.lineno) for each in given} >= {("made_up.py", 3)}


class WarnsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * (3 if "RuntimeWarning" in fallen_back(0) else 2)


def through(x: torch.Tensor) -> torch.Tensor:
    factor = 10 if "RuntimeWarning" in fallen_back(1) else 1
    y: torch.Tensor = WarnsInBackward.apply(x) * factor
    return y


@pytest.mark.parametrize("graphs", ["keep", "recompute", "auto"])
def test_a_backward_has_the_filters_of_its_own_moment(
    graphs: Any, fork_server: mpgrad.Pool
) -> None:
    """Where a call is run again, it has those of the operation."""
    with mpgrad.Pool(1, graphs=graphs) as pool:
        for forward, backward in 3 * list(itertools.product(["error", "ignore"], repeat=2)):
            x = torch.ones((), requires_grad=True)
            with warnings.catch_warnings():
                warnings.simplefilter(forward)  # type: ignore[arg-type]
                (loss,) = pool.map(through, [x])
            with warnings.catch_warnings():
                warnings.simplefilter(backward)  # type: ignore[arg-type]
                loss.backward()
            expected = (3.0 if backward == "error" else 2.0) * (10 if forward == "error" else 1)
            assert x.grad is not None and x.grad.item() == expected


def set_filter() -> None:
    warnings.filterwarnings("ignore", "number")


def test_filters_of_an_initializer_stay(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, initializer=set_filter) as pool:
        for category in (Careful, Warning):
            with warnings.catch_warnings():
                warnings.simplefilter("error", category)
                assert pool.map(fallen_back, [1]) == ["Careful: careful 1"]


def within(engine: Any) -> list[Any]:
    with mpgrad.Pool(1, engine=engine) as pool:
        return [*pool.map(fallen_back, [1]), fallen_back(2)]


@pytest.mark.parametrize(
    "engine", ["thread", "inline", pytest.param("process", marks=pytest.mark.slow)]
)
def test_a_pool_within_a_task(engine: Any, pool2: mpgrad.Pool) -> None:
    """Workers that are threads of a worker leave its filters alone."""
    for category in (RuntimeWarning, Careful):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", category)
            found = pool2.map(within, [engine] * 2, 1)
            assert found == [[fallen_back(1), fallen_back(2)]] * 2
            assert pool2.map(fallen_back, [3]) == [fallen_back(3)]


MODULE = """
import warnings
warnings.warn("this module is old", DeprecationWarning)
warnings.simplefilter("ignore")
class Item:
    def warn(self):
        warnings.warn("of a method", RuntimeWarning)
def fn(item):
    try:
        item.warn()
    except RuntimeWarning:
        return "caught"
"""


def test_what_an_import_of_a_worker_does_to_filters(
    fork_server: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's import had warned, and had set a filter, before the caller set its own."""
    (tmp_path / "old_module.py").write_text(MODULE)
    (tmp_path / "old_module_of_items.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with mpgrad.Pool(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import old_module  # type: ignore[import-not-found]
        import old_module_of_items  # type: ignore[import-not-found]

        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        items = [old_module_of_items.Item() for _ in range(2)]
        assert pool.map(old_module.fn, items, 1) == ["caught"] * 2


def of_the_caller(_: object) -> str:
    try:
        warnings.warn("of the calling code", DeprecationWarning, stacklevel=2)
    except DeprecationWarning:
        return "caught"
    return "passed"


@pytest.mark.quick
def test_a_warning_that_points_to_who_calls_the_task(pool2: mpgrad.Pool) -> None:
    """Its module is the caller's, which only the caller knows."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=f"{__name__}$")
        assert pool2.map(of_the_caller, [1]) == ["passed"]
    assert [Path(each.filename).name for each in given] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="elsewhere")
        warnings.simplefilter("error")
        assert pool2.map(of_the_caller, [1]) == ["caught"]


PROGRAM = """
import sys, warnings

class Own(DeprecationWarning):
    pass

def fn(k):
    try:
        warnings.warn("an old name", Own)
        warnings.warn("a rounding", RuntimeWarning)
    except Own:
        return "an old name was an error"
    except RuntimeWarning:
        return "a rounding was an error"
    return "passed"

if __name__ == "__main__":
    if sys.argv[1:]:
        print(list(map(fn, range(3))))
    else:
        import mpgrad
        with mpgrad.Pool(2) as pool:
            print(pool.map(fn, range(3), 1))
"""
STARTS: list[tuple[Sequence[str], dict[str, str]]] = [
    (["-W", "error::RuntimeWarning"], {}),
    ([], {}),
    (["-W", "error::DeprecationWarning:__main__"], {}),
    ([], {"PYTHONWARNINGS": "error::RuntimeWarning,ignore::DeprecationWarning"}),
    ([], {"PYTHONWARNINGS": "error::RuntimeWarning", "MPGRAD_PORTABLE": "1"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "variables"), STARTS)
def test_options_of_the_interpreter(
    options: Sequence[str], variables: dict[str, str], tmp_path: Path
) -> None:
    """A script prints the same as its loop, also to stderr."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONWARNINGS"}
    ours, theirs = (
        subprocess.run(
            [sys.executable, *options, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**environment, **variables},
        )
        for arguments in ([], ["serial"])
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, theirs.stdout, theirs.stderr)
