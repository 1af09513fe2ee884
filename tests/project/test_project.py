"""The project around the code: the wheel, the wall between the folders, docstring examples, the
oracle."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import graphlib
import importlib
import math
import os
import pkgutil
import random
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import written_in

import mpgrad
from mpgrad.engines.kinds import ENGINES
from mpgrad.testing import assert_same_as_serial, copies

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("leaves_the_clone_clean")  # examples in docstrings are run


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob(f"mpgrad-{mpgrad.__version__}-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"mpgrad/{path.relative_to(ROOT / 'mpgrad')}" for path in (ROOT / "mpgrad").rglob("*.py")
    }
    expected |= {
        f"mpgrad/workers/{path.relative_to(ROOT / 'workers')}"
        for path in (ROOT / "workers").rglob("*.py")
    }
    assert names == expected | {"mpgrad/py.typed"}


def test_the_workers_folder_refuses_a_second_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import workers"], cwd=ROOT, capture_output=True, text=True
    )
    assert "this package is mpgrad.workers (imported as: 'workers')" in done.stderr


@pytest.mark.quick
def test_tests_reach_into_a_pool_through_one_adapter() -> None:
    """If a pool changes inside, only `tests/inside.py` changes."""
    files = (ROOT / "tests").rglob("*.py")
    found = {
        each.name for each in files if re.search(r"\._(scheduler|submitter)\b", each.read_text())
    }
    assert found == {"inside.py"}


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and all below it, except what only type checkers read."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from nodes_that_run(child)


@functools.cache
def parsed(text: str) -> ast.Module:
    """Most tests here read all of the sources."""
    return ast.parse(text)


@pytest.fixture(autouse=True, scope="module")
def forgets_what_was_parsed() -> Iterator[None]:
    """Tests of initializers look through all that test modules hold."""
    yield
    parsed.cache_clear()


@functools.cache
def imports_in(text: str, of_types_too: bool) -> list[str]:
    tree = parsed(text)
    found = []
    for node in ast.walk(tree) if of_types_too else nodes_that_run(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def imports_of(file: Path, of_types_too: bool = False) -> list[str]:
    return imports_in(file.read_text(), of_types_too)


def sources(root: Path) -> dict[str, Path]:
    """The file of each module of mpgrad, by its full name."""
    files = {
        ("mpgrad", *file.relative_to(root / "mpgrad").parts): file
        for file in (root / "mpgrad").rglob("*.py")
    }
    files |= {
        ("mpgrad", *file.relative_to(root).parts): file for file in (root / "workers").rglob("*.py")
    }
    return {
        ".".join(parts).removesuffix(".py").removesuffix(".__init__"): file
        for parts, file in files.items()
    }


def package_of(module: str) -> str:
    return f"{module}..".split(".")[1]


def arrows(root: Path, of_types_too: bool = False) -> dict[str, set[str]]:
    """Which packages, and modules beside them, each one imports; not so the package's root, which
    fetches what is asked for."""
    modules = sources(root)
    found: dict[str, set[str]] = {package_of(name): set() for name in modules}
    for name, file in modules.items():
        for imported in imports_of(file, of_types_too):
            if imported.startswith("mpgrad."):
                found[package_of(name)].add(package_of(imported))
    del found[""]
    found.pop("__main__", None)  # the commands
    return {name: targets & found.keys() - {name} for name, targets in found.items()}


def rooms() -> dict[str, tuple[str, set[str]]]:
    """Where each package runs, and what it may import, as docs/design.md says."""
    page = (
        (ROOT / "docs" / "design.md").read_text().partition("## The house")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| `")]
    return {
        name: (side.strip(), set(named(imports)))
        for names, side, imports in rows
        for name in named(names)
    }


def named(cell: str) -> list[str]:
    return cell.replace("`", "").split()


@pytest.mark.quick
def test_the_arrows_are_those_of_the_drawing() -> None:
    assert arrows(ROOT) == {name: imports for name, (_, imports) in rooms().items()}


@pytest.mark.quick
def test_the_arrows_form_no_circle() -> None:
    modules = sources(ROOT)
    order = graphlib.TopologicalSorter(
        {name: known_in(modules, imports_of(file)) for name, file in modules.items()}
    )
    order.prepare()  # raises CycleError
    packages = graphlib.TopologicalSorter(arrows(ROOT, of_types_too=True))
    packages.prepare()


def known_in(modules: dict[str, Path], imported: Iterable[str]) -> set[str]:
    """Modules, of which some name is imported."""
    named = {name if name in modules else name.rpartition(".")[0] for name in imported}
    return named & modules.keys() - {"mpgrad"}


@pytest.mark.quick
def test_who_runs_in_a_worker_imports_nothing_of_the_callers() -> None:
    sides = rooms()
    for name, (side, imports) in sides.items():
        others = {sides[each][0] for each in imports}
        assert "worker" not in others, name
        assert side == "caller" or "caller" not in others, name


def test_only_engines_compare_the_names_of_engines() -> None:
    for name, file in sources(ROOT).items():
        compared = [
            node for node in ast.walk(parsed(file.read_text())) if isinstance(node, ast.Compare)
        ]
        constants = {
            each.value
            for node in compared
            for each in ast.walk(node)
            if isinstance(each, ast.Constant)
        }
        assert package_of(name) == "engines" or not constants & ENGINES.keys(), name


def test_a_wrong_arrow_is_seen(tmp_path: Path) -> None:
    """In any folder, also from within a function."""
    for folder in ("mpgrad/wire/deep", "workers"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("mpgrad", "mpgrad/wire", "mpgrad/wire/deep", "workers"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "mpgrad" / "pool.py").write_text("import mpgrad.workers.main")
    (tmp_path / "mpgrad" / "wire" / "deep" / "late.py").write_text(
        "def f():\n    from mpgrad.pool import Pool"
    )
    (tmp_path / "workers" / "main.py").write_text(
        "from mpgrad import wire\nfrom mpgrad.wire.deep import late"
    )
    assert arrows(tmp_path) == {"pool": {"workers"}, "wire": {"pool"}, "workers": {"wire"}}


# --- sizes

MODULE_LINES, CLASS_LINES, CLASS_METHODS, PARAMETERS = 1_150, 430, 25, 8
EXCUSE = "# long because: "  # and a reason: at the head of the module, class or function
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def named_nodes(node: ast.AST, path: str) -> Iterator[tuple[str, ast.ClassDef | FUNCTIONS]]:
    """The classes and functions below `node`, by their full names."""
    for child in ast.iter_child_nodes(node):
        inner = path
        if isinstance(child, ast.ClassDef | FUNCTIONS):
            inner = f"{path}.{child.name}"
            yield inner, child
        yield from named_nodes(child, inner)


def parameters(function: FUNCTIONS) -> list[str]:
    given = function.args
    several = [each for each in (given.vararg, given.kwarg) if each is not None]
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several)]
    return [name for name in names if name not in ("self", "cls")]


def is_excused(node: ast.Module | ast.ClassDef | FUNCTIONS, lines: list[str]) -> bool:
    """Whether there is a reason between the line above `node` and its first statement."""
    statements = node.body[ast.get_docstring(node) is not None :]
    start = (
        0
        if isinstance(node, ast.Module)
        else min(each.lineno for each in (node, *node.decorator_list)) - 2
    )
    stop = statements[0].lineno if statements else len(lines)
    return any(line.strip().startswith(EXCUSE) for line in lines[max(start, 0) : stop])


def beyond_limits(root: Path) -> set[str]:
    """Modules, classes and functions that are too large, and say no reason."""
    found = set()
    for name, file in sources(root).items():
        text = file.read_text()
        lines, module = text.splitlines(), parsed(text)
        if len(lines) > MODULE_LINES and not is_excused(module, lines):
            found.add(name)
        for path, node in named_nodes(module, name):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, FUNCTIONS) for each in node.body)
                length = (node.end_lineno or 0) - node.lineno + 1
                is_long = length > CLASS_LINES or methods > CLASS_METHODS
            else:
                is_long = len(parameters(node)) > PARAMETERS
            if is_long and not is_excused(node, lines):
                found.add(path)
    return found


@pytest.mark.quick
def test_nothing_is_beyond_the_limits_without_a_reason() -> None:
    assert not beyond_limits(ROOT)


def test_what_is_beyond_the_limits_is_seen(tmp_path: Path) -> None:
    (tmp_path / "mpgrad").mkdir()
    (tmp_path / "workers").mkdir()
    nine = ", ".join(f"p{number}" for number in range(9))
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(26))
    rows = "    x = 1\n"
    wrong = {
        "module": "x = 1\n" * (MODULE_LINES + 1),
        "lines": "class Long:\n" + rows * CLASS_LINES,
        "methods": "class Full:\n" + methods,
        "parameters": f"class A:\n    def f(self, {nine}):\n        def g({nine}): ...\n",
        "starred": f"async def f({nine[4:]}, *, k, **more): ...\n",
    }
    right = {
        "module": "x = 1\n" * MODULE_LINES,
        "lines": "class Long:\n" + rows * (CLASS_LINES - 1),
        "methods": "class Full:\n" + methods[methods.index("\n") + 1 :],
        "parameters": f"class A:\n    def f(self, {nine[4:]}): ...\n",
        "starred": f"@decorated\n{EXCUSE}it is asked for\nasync def f({nine}, **more): ...\n",
    }
    excused = {
        "module": f'"""A table."""\n\n{EXCUSE}it is a table\n' + "x = 1\n" * (MODULE_LINES + 1),
        "lines": f'class Long:\n    """A table."""\n\n    {EXCUSE}it is one\n' + rows * CLASS_LINES,
        "methods": f"{EXCUSE}the public interface\nclass Full:\n" + methods,
        "parameters": (
            f"class A:\n    def f(self, {nine}):\n        {EXCUSE}public\n        return 1\n"
        ),
        "starred": "",
    }
    found = []
    for texts in (wrong, right, excused):
        for name, text in texts.items():
            (tmp_path / "mpgrad" / f"{name}.py").write_text(text)
        found.append(beyond_limits(tmp_path))
    of_wrong = {
        "module",
        "lines.Long",
        "methods.Full",
        "parameters.A.f",
        "parameters.A.f.g",
        "starred.f",
    }
    assert found == [{f"mpgrad.{name}" for name in of_wrong}, set(), set()]
    (tmp_path / "workers" / "late.py").write_text(
        "x = 1\n" * (MODULE_LINES + 10) + f"{EXCUSE}too late\n"
    )
    assert beyond_limits(tmp_path) == {"mpgrad.workers.late"}


@pytest.mark.quick
def test_each_class_has_a_name_of_its_own() -> None:
    places = places_of_classes()
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def places_of_classes() -> dict[str, list[str]]:
    """The files that have a class of each name."""
    places: dict[str, list[str]] = {}
    for path in [*ROOT.glob("mpgrad/**/*.py"), *ROOT.glob("workers/*.py")]:
        if path.is_relative_to(ROOT / "mpgrad" / "workers"):
            continue
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path))
    return places


# what class names may end with: ordinary words of English or of computing
ORDINARY = """
    accelerator accessor actor add admission advice agent answer argument attribute backend bar
    block broadcast bucket budget buffer byte cache canceller category change check clock
    cluster column concatenation container context counter deadline death delivery dependency
    descriptor device dispatcher driver entry environment error exception executor exit failure
    feeder filler filter finder finding fingerprint fold follower fork forward frame function
    generator handle handler hello hook identity initializer input iterator jacobian job kind
    launcher layout level lifecycle limit link listener location logger lookup loopback map mapping
    mean memory merge method mode module monitor name namespace number option origin outcome
    outlet output overlay packer part path payload phase pickle pickler pipe place plan
    prediction predictor process product program promise queue receiver recovery reduction ref
    reference referent refusal region registry report reporter request result root run runner
    scatter scheduler search second seed sender setting settlement setup share side slice
    snapshot socket source span spec stage starter stat state story submitter sum table
    termination text thread timeline timer timing trace traceback tracer tracker traffic trait
    transfer transport trial unpickler use value verdict waiter warning writer
"""
# messages that tell the receiver to do something
ORDERS = "collect define follow forget recompute release start stop"
# names of others: libraries, their functions and classes
OTHERS = "cuda hvp jvp mallinfo mstat parallel ray vjp"
MOST_TERMS = 50


def singular(word: str) -> str:
    if word == "leaves":
        return "leaf"
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us")) else word


def noun_of(name: str) -> str:
    """The last word of a class's name, in lower case and singular."""
    return singular(re.findall(r"[A-Z][a-z0-9]*|[A-Z]+(?![a-z])", name)[-1].lower())


def unknown_nouns(names: Iterable[str]) -> set[str]:
    """Last words of class names that are neither in the glossary nor ordinary."""
    known = {singular(term.split()[-1].lower()) for term in terms()}
    known.update(ORDINARY.split(), ORDERS.split(), OTHERS.split())
    return {noun_of(name) for name in names} - known


def terms() -> list[str]:
    """What the glossary and the design page explain."""
    pages = [(ROOT / "docs" / name).read_text() for name in ("glossary.md", "design.md")]
    return re.findall(
        r"^\* \*\*(.+)\*\*: ", pages[0] + pages[1].partition("\n## Words")[2], re.MULTILINE
    )


@pytest.mark.quick
def test_class_names_end_with_words_that_are_known() -> None:
    names = [name for name in places_of_classes() if name[0].isupper()]
    assert unknown_nouns(names) == set()
    # no word stays in the lists that no class needs
    words = f"{ORDINARY} {ORDERS} {OTHERS}".split()
    assert set(words) - {noun_of(name) for name in names} == set()
    assert len(set(words)) == len(words)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["Staff", "HeldStation", "Behind", "PooledGrains"])
def test_a_class_name_with_a_coined_word_is_seen(name: str) -> None:
    assert unknown_nouns(["WorkerPool", "Slabs", name]) == {noun_of(name)}


@pytest.mark.quick
def test_the_glossary_is_short() -> None:
    assert 0 < len(terms()) <= MOST_TERMS
    assert len(set(terms())) == len(terms())


def test_each_folder_of_tests_has_quick_tests() -> None:
    """Each file has its own name, by which pytest imports it."""
    files = list((ROOT / "tests").glob("*/test_*.py"))
    quick = {file.parent.name for file in files if "mark.quick" in file.read_text()}
    assert quick == {file.parent.name for file in files}
    assert len({file.name for file in files}) == len(files)


# --- the public names, and their examples

WITH_EXAMPLES = sorted(name for name, file in sources(ROOT).items() if ">>> " in file.read_text())
METHODS = types.FunctionType, property, functools.cached_property, staticmethod, classmethod
# names and methods that need no example, with the reason
EXCUSED = {
    "as_completed": "of concurrent.futures",
    "wait": "of concurrent.futures",
    "nn.DataParallel.forward": "of torch.nn.Module, which calls it",
}
# those that have none of their own, with the docstring whose example uses them
SHOWN_BY = {
    "Advice.is_doubtful": "Advice",
    "Advice.loop_seconds": "Advice",
    "Advice.obstacles": "Advice",
    "Advice.pays": "Advice",
    "Advice.processes": "Advice",
    "Advice.seconds": "Advice",
    "Advice.speed_up": "Advice",
    "AsyncResult.get": "AsyncResult",
    "AsyncResult.ready": "AsyncResult",
    "AsyncResult.successful": "AsyncResult",
    "AsyncResult.wait": "AsyncResult",
    "DifferentiableFuture.cancelled": "DifferentiableFuture.cancel",
    "DifferentiableFuture.result": "DifferentiableFuture",
    "functions.EmulatedAutogradContext.saved_tensors": "functions.EmulatedAutogradContext",
    "Pool.processes": "Pool.resize",
    "PoolStats.as_dict": "PoolStats",
    "ResultIterator.next": "ResultIterator",
    "Timeline.draw": "Timeline",
    "Timeline.events": "Timeline",
    "Timeline.save": "Timeline",
    "WorkerStats.as_dict": "WorkerStats",
    "WorkerStats.retiring": "WorkerStats",
    "nn.ReduceAdd.apply": "nn.ReduceAdd",
}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_the_docstrings(fork_server: mpgrad.Pool, name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0 and failed == 0


MODULES = "functions", "nn", "testing"


def names_to_import() -> Iterator[str]:
    for module, names in (
        ("", mpgrad.__all__),
        ("functions.", mpgrad.functions.__all__),
        ("nn.", mpgrad.nn.__all__),
        ("testing.", mpgrad.testing.__all__),
    ):
        yield from (module + name for name in names if name not in MODULES)


def names_in_reference() -> Iterator[str]:
    """What its pages take from docstrings."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for names in re.findall(r"^<!-- reference: (.*) -->$", page.read_text(), re.MULTILINE):
            yield from names.split()


def with_methods(name: str) -> Iterator[tuple[str, str]]:
    """`name`, and the public methods of a class, each with the name of its docstring as doctest has
    it."""
    value = pkgutil.resolve_name(f"mpgrad.{name}")
    home = f"{value.__module__}.{value.__qualname__}"
    yield name, home
    if isinstance(value, type):
        for inner, each in vars(value).items():
            if isinstance(each, METHODS) and not inner.startswith("_"):
                yield f"{name}.{inner}", f"{home}.{inner}"


def examples_run() -> dict[str, str]:
    """By the name of the docstring."""
    found = [
        test
        for name in WITH_EXAMPLES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
    ]
    return {
        test.name: "".join(example.source for example in test.examples)
        for test in found
        if test.examples
    }


@pytest.mark.quick
def test_each_public_name_has_an_example() -> None:
    """And so has each public method, except those named above; these have none."""
    homes = dict(
        pair for name in {*names_to_import(), *names_in_reference()} for pair in with_methods(name)
    )
    examples = examples_run()
    assert {
        name for name, home in homes.items() if home not in examples
    } == EXCUSED.keys() | SHOWN_BY.keys()
    for name, where in SHOWN_BY.items():
        assert re.search(rf"\.{name.rpartition('.')[2]}\b", examples[homes[where]]), name


def test_the_package_root_shows_the_public_names_only() -> None:
    shown = {name for name in dir(mpgrad) if not name.startswith("_")}
    submodules = set(arrows(ROOT)) | {"workers"}
    assert shown - (submodules - {*MODULES}) == set(mpgrad.__all__)
    assert sorted(mpgrad.__all__) == mpgrad.__all__
    assert all(hasattr(mpgrad, name) for name in mpgrad.__all__)


EACH_FIRST = """
import gc, importlib, os, sys
gc.disable()
import torch
for name in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        importlib.import_module(name)
        print(*[each for each in sys.modules if each.startswith("mpgrad.")], flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""


@pytest.mark.slow
def test_any_module_may_be_imported_first() -> None:
    """And a worker's import little of the parent's side: each that they do is a part of what a
    start costs."""
    names = [name for name in sources(ROOT) if not name.endswith("__main__")]
    command = [sys.executable, "-c", EACH_FIRST, "mpgrad.workers.main", *names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=58)
    assert (ended.returncode, ended.stderr) == (0, "")
    loaded = {package_of(name) for name in ended.stdout.splitlines()[0].split()}
    assert {rooms()[each][0] for each in loaded} == {"both", "worker"}


ODD_EXCEPTION = """
import sys, mpgrad
class Odd(Exception):
    def __init__(self, first, second):
        super().__init__("only one argument")
def fn(item):
    raise Odd(1, 2)
with mpgrad.Pool(1) as pool:
    try:
        pool.map(fn, [1])
    except Odd:
        print(*[name for name in sys.modules if name.startswith("mpgrad.workers")])
"""


@pytest.mark.slow
def test_the_parent_imports_nothing_of_the_workers_side() -> None:
    """Nor does what comes from a worker name anything there: an exception that is put together
    again did."""
    ended = subprocess.run(
        [sys.executable, "-c", ODD_EXCEPTION], capture_output=True, text=True, timeout=58
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "\n")


# --- the oracle itself


def test_the_oracle_fails_on_what_is_wrong(fork_server: mpgrad.Pool) -> None:
    items = [torch.ones(2, dtype=torch.float64, requires_grad=True)]
    captured = torch.ones(2, dtype=torch.float64, requires_grad=True)
    caller = os.getpid()

    class WrongGradient(torch.autograd.Function):
        """Right in the caller, wrong in a worker."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2 if os.getpid() == caller else torch.nextafter(grad * 2, grad * 3)

    def wrong_value(x: torch.Tensor) -> torch.Tensor:
        return x * 1 if os.getpid() == caller else torch.nextafter(x, x + 1)

    def wrong_structure(x: torch.Tensor) -> object:
        return [x] if os.getpid() == caller else x

    def negative_zero(x: torch.Tensor) -> torch.Tensor:
        return x * (0.0 if os.getpid() == caller else -0.0)

    def transposed(x: torch.Tensor) -> torch.Tensor:
        square = x.repeat(2, 1)
        return (
            square.clone()
            if os.getpid() == caller
            else square.t().clone(memory_format=torch.contiguous_format).t()
        )

    def detached(x: torch.Tensor) -> torch.Tensor:
        return x * 1 if os.getpid() == caller else (x * 1).detach()

    with mpgrad.Pool(1) as pool:
        assert_same_as_serial(lambda x: x * captured, items, pool)
        for fn, message in (
            (
                WrongGradient.apply,
                "gradient of input 0: the pool and the serial loop differ by up to",
            ),
            (wrong_value, "item 0, value: the pool and the serial loop differ by up to"),
            (wrong_structure, "item 0: the pool returned a Tensor, the loop a list"),
            (negative_zero, "item 0, value: the pool and the serial loop differ by up to 0"),
            (
                transposed,
                r"item 0, value: the pool returned a .* strides \(1, 2\), the serial loop a .* "
                r"strides \(2, 1\)",
            ),
            (detached, "item 0: requires_grad is False, in the loop True"),
        ):
            with pytest.raises(AssertionError, match=message):
                assert_same_as_serial(fn, items, pool)

        class WrongSecond(WrongGradient):
            """Right in its first derivative, everywhere."""

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2 if os.getpid() == caller else (grad * 2 + (grad - grad.detach()))

        assert_same_as_serial(WrongSecond.apply, items, pool)
        with pytest.raises(AssertionError, match="derivative of order 2 of input 0: the pool"):
            assert_same_as_serial(lambda x: WrongSecond.apply(x * x) ** 2, items, pool, order=2)
        with pytest.raises(ValueError, match=r"order must be at least 0 \(order: -1\)"):
            assert_same_as_serial(abs, items, pool, order=-1)
        with pytest.raises(
            AssertionError, match="gradient of capture 0: the pool and the serial loop differ"
        ):
            assert_same_as_serial(
                lambda x: WrongGradient.apply(captured) * x, items, pool, rtol=0.0
            )


CALLS = [0]


def counts(x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return x * CALLS[0]


class Counts:
    calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def counts_in_a_closure(start: int, period: int) -> Any:
    calls = start

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls = (calls + 1) % period
        return x * calls

    return fn


def adds_what_came_before(x: torch.Tensor, before: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    before.append(x.detach().sum())
    return x + sum(before)


def adds_what_came_since_the_largest(
    x: torch.Tensor,
    before: list[torch.Tensor] = [],  # noqa: B006
) -> torch.Tensor:
    if x.numel() == 1:
        before.clear()
    before.append(x.detach().sum())
    return x + sum(before)


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_the_oracle_fails_on_what_depends_on_other_calls(pool2: mpgrad.Pool, count: int) -> None:
    items = [torch.ones(1 + n % 3, requires_grad=True) for n in range(count)]
    functions = [
        counts,
        Counts(),
        counts_in_a_closure(0, 1000),
        counts_in_a_closure(7, 2 if count == 1 else count),
    ]
    for fn in [*functions, adds_what_came_before, adds_what_came_since_the_largest][
        : 5 if count == 1 else 6
    ]:
        with pytest.raises(
            AssertionError,
            match=r"item \d+: the function returns another value when it is called again, or in",
        ):
            assert_same_as_serial(fn, items, pool2)


class Held:
    """Its equality is identity."""

    def __init__(self, tensor: torch.Tensor, *rest: Any) -> None:
        self.tensor = tensor
        self.rest = rest


@dataclasses.dataclass
class Compared:
    tensor: torch.Tensor
    rest: Any = None


class Alternates(torch.autograd.Function):
    """Its gradients count the calls of its backward."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Alternates.calls += 1
        return grad * Alternates.calls


@pytest.mark.parametrize("kind", [Held, Compared])
def test_the_oracle_looks_into_objects(pool2: mpgrad.Pool, kind: Callable[..., Any]) -> None:
    items = [torch.ones(1 + n, requires_grad=True) for n in range(2)]
    caller, again = os.getpid(), "called again"
    # some do, whatever the seed of hashes, and their order is that of adding
    colliding = {f"word {n}" for n in range(300)}
    rests: list[Any] = [
        1,
        "tensor",
        colliding,
        math.nan,
        numpy.full(3, math.nan),
        numpy.full(5000, math.nan),
        kind(2.0),
    ]
    for rest in [*rests, lambda y: y + 1]:
        assert_same_as_serial(lambda x, rest=rest: kind(x * 2, rest), items, pool2, order=2)
    for fn, words in (
        (lambda x: kind(counts(x)), again),
        (lambda x: kind(x, counts(torch.ones(())).item()), again),
        (lambda x: kind(x, numpy.full(5000, counts(torch.ones(())).item())), again),
        (lambda x: kind(x * torch.rand(())), "draws random numbers, which differ in a pool"),
        (
            lambda x: kind(x.detach() if os.getpid() == caller else x),
            "item 0: requires_grad is True, in the loop False",
        ),
        (lambda x: kind(x, os.getpid() == caller), "item 0: the pool returned .*, the serial loop"),
        (
            lambda x: [kind(x, x) if os.getpid() == caller else kind(x, x * 1)],
            "item 0: the results differ in structure",
        ),
        (
            lambda x: kind(Alternates.apply(x)),
            "gradient of input 0: the pool and the serial loop differ",
        ),
    ):
        with pytest.raises(AssertionError, match=words):
            assert_same_as_serial(fn, items, pool2)


def test_the_oracle_copies_items_that_are_objects(pool2: mpgrad.Pool) -> None:
    weight = torch.ones(2, requires_grad=True)

    def written_to(item: Held) -> torch.Tensor:
        item.tensor.add_(1)
        item.rest[0][0] += 1
        return item.tensor * weight * item.rest[0][0]

    items = [Held(torch.ones(2), array) for array in (numpy.zeros(3), numpy.zeros(5000))]
    assert_same_as_serial(written_to, items, pool2)
    assert not any(item.rest[0].any() for item in items) and items[0].tensor.equal(torch.ones(2))
    leaves = [Held(torch.ones(2, requires_grad=True)) for _ in range(2)]
    assert_same_as_serial(lambda item: item.tensor.exp() * weight, leaves, pool2, order=2)
    with pytest.raises(
        AssertionError, match="gradient of input 0: the pool and the serial loop differ"
    ):
        assert_same_as_serial(lambda item: Alternates.apply(item.tensor), leaves, pool2)


def test_to_the_oracle_what_is_not_a_number_is_alike(pool2: mpgrad.Pool) -> None:
    items = [torch.ones(3), torch.full((3,), math.nan)]
    nans = [
        math.nan,
        numpy.float64("nan"),
        numpy.array([math.nan, 1.0]),
        numpy.full(5000, math.nan),
        complex(math.nan, 1),
    ]
    for nan in nans:
        assert_same_as_serial(lambda x, nan=nan: (x.sum(), nan), items, pool2)
    fresh = [
        lambda: float("nan"),
        lambda: numpy.array([numpy.nan, 1.0]) * 2,
        lambda: -numpy.full(2, numpy.nan),
    ]
    for make in fresh:
        assert_same_as_serial(lambda x, make=make: (x.sum(), make()), items, pool2)
    for changes in (
        lambda: counts(torch.ones(())).item(),
        lambda: numpy.array([numpy.nan, counts(torch.ones(())).item()]),
    ):
        with pytest.raises(AssertionError, match="called again"):
            assert_same_as_serial(lambda x, changes=changes: (x.sum(), changes()), items, pool2)


def test_the_oracle_says_that_random_numbers_are_others(pool2: mpgrad.Pool) -> None:
    # of few, two dropouts may leave the same
    items = [torch.ones(n, requires_grad=True) for n in (200, 300)]
    draw = [
        lambda x: x * torch.rand(()),
        lambda x: x * random.random(),
        lambda x: x * numpy.random.rand(),
    ]
    for fn in [*draw, torch.nn.Dropout(0.5)]:
        with pytest.raises(
            AssertionError, match=r"draws random numbers, which differ in a pool.* a seed"
        ):
            assert_same_as_serial(fn, items, pool2)
    assert_same_as_serial(lambda x: (torch.rand(2), x * 2)[1], items, pool2)  # they change nothing

    def seeded(item: tuple[int, torch.Tensor]) -> torch.Tensor:
        return item[1] * torch.rand((), generator=torch.Generator().manual_seed(item[0]))

    assert_same_as_serial(seeded, list(enumerate(items)), pool2)


def test_the_oracle_fails_on_writes_to_captures(pool2: mpgrad.Pool) -> None:
    items = [torch.ones(3), torch.ones(3)]
    state, array = torch.zeros(3), numpy.zeros(5000)

    def to_array(x: torch.Tensor) -> torch.Tensor:
        array[0] += 1
        return x * 2

    for fn in (
        lambda x: (state.add_(x), x * 2)[1],
        to_array,
        torch.nn.BatchNorm1d(3).requires_grad_(False),
    ):
        with pytest.raises(
            AssertionError,
            match=r"writes to a tensor or array that it captures \(a torch\..* of shape",
        ):
            assert_same_as_serial(
                fn,
                [x[None].repeat(2, 1) for x in items] if isinstance(fn, torch.nn.Module) else items,
                pool2,
            )


def test_the_oracle_looks_at_each_way_to_run(fork_server: mpgrad.Pool) -> None:
    items = [torch.ones(3, requires_grad=True)]
    caller = os.getpid()

    def second_call_in_a_worker(x: torch.Tensor) -> torch.Tensor:
        if os.getpid() == caller:
            return x * 2
        sys.calls = getattr(sys, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * (1 + sys.calls) if sys.calls < 3 else x * 2  # type: ignore[attr-defined]

    with mpgrad.Pool(1) as pool:
        with pytest.raises(
            AssertionError,
            match=r"item 0, value: .* differ by up to 1 \(last item first, one by one\)$",
        ):
            assert_same_as_serial(second_call_in_a_worker, items, pool)
        with pytest.raises(
            AssertionError, match=r"item 0, value: the pool and the serial loop differ by up to 1"
        ):
            assert_same_as_serial(lambda x: torch.tensor([os.getpid() == caller]), items, pool)
        assert_same_as_serial(lambda x: x * 2, [], pool)
        assert_same_as_serial(
            lambda x: x * 2, items, pool, run=lambda pool, fn, items: pool.imap(fn, items)
        )
        with pytest.raises(AssertionError, match=r"the pool returned 2 results, the serial loop 1"):
            assert_same_as_serial(
                lambda x: x * 2,
                items,
                pool,
                run=lambda pool, fn, items: pool.map(fn, [*items, items[0]]),
            )


def test_the_oracle_gives_views_of_what_the_items_are_views_of(pool2: mpgrad.Pool) -> None:
    batch = torch.arange(40.0).view(4, 10)
    rows = [row.requires_grad_() for row in batch]
    assert_same_as_serial(lambda x: x.as_strided((2,), (3,)), rows, pool2)
    assert_same_as_serial(
        lambda x: x.as_strided((2,), (3,), x.storage_offset()) * x[:2],
        [row[1:] for row in rows],
        pool2,
    )
    columns = copies([batch[:, 3], (batch[:, 5] * 1)[::2], batch[:, 3].requires_grad_() * 1])
    assert [each.stride() for each in columns] == [(10,), (2,), (1,)] and columns[
        0
    ].storage_offset() == 3
    given = torch.ones(6, requires_grad=True)
    (no_leaf,) = copies([(given * 2)[::2]])
    assert not no_leaf.is_leaf and no_leaf.stride() == (2,) and not no_leaf._is_view()


IMPORTED = """
import sys, mpgrad
assert "torch" not in sys.modules
mpgrad.testing.assert_same_as_serial(abs, [-1])
"""


@pytest.mark.slow
def test_the_oracle_need_not_be_imported_by_name() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=58
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# --- a clone stays clean


@pytest.mark.quick
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the sources are not a clone")
def test_pictures_lie_with_the_pages() -> None:
    """A page's program had been run in the root, and its picture was added to the repository."""
    command = ["git", "ls-files", "*.png", "*.svg", "*.pdf"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [name for name in tracked.splitlines() if not name.startswith("docs/")] == []


@pytest.mark.quick
def test_what_a_program_leaves_in_a_clone_is_seen(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("bench_*.json\n__pycache__/\n")
    before = written_in(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").touch()
    assert written_in(tmp_path) == before
    for name in ("picture.png", "bench_speed.json"):
        (tmp_path / name).touch()
    assert written_in(tmp_path) - before == {"?? picture.png", "!! bench_speed.json"}
