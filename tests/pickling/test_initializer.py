"""What an initializer sets wins in its worker, as in multiprocessing and concurrent.futures.

Tasks saw the caller's values: with `Executor`, with initializers that are objects or partials, and
for names that only the initializer makes, which were a NameError.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_turn

import mpgrad

SOURCE = """
    import builtins, numpy, torch

    number = 1.0
    table = torch.ones(2)
    array = numpy.ones(2)
    config = {"deep": {"er": [1.0]}}
    buffer = bytearray(b"a")

    class Settings:
        rate = 1.0
        class Nested:
            rate = 1.0
    class Agent:
        def __init__(self): self.value = 1.0
    agent = Agent()

    def helper(value):
        global from_helper
        from_helper = value

    def initialize(value):
        global number, new
        number = new = Settings.rate = Settings.Nested.rate = agent.value = task.attribute = value
        config["deep"]["er"][0] = value
        table.fill_(value)
        array[0] = value
        buffer[0] = int(value)
        builtins.mpgrad_built = value
        helper(value)

    class Callable:
        def __call__(self, value): initialize(value)
        def method(self, value): initialize(value)
        @classmethod
        def of_class(cls, value): initialize(value)

    def task(x): return x * task.attribute
    def reads_number(x): return x * number
    def reads_new(x): return x * new
    def reads_class(x): return x * Settings.rate
    def reads_nested(x): return x * Settings.Nested.rate
    def reads_object(x): return x * agent.value
    def reads_container(x): return x * config["deep"]["er"][0]
    def reads_tensor(x): return x * float(table[1])
    def reads_array(x): return x * float(array[0])
    def reads_buffer(x): return x * buffer[0]
    def reads_builtin(x): return x * mpgrad_built
    def reads_from_helper(x): return x * from_helper
    def calls_others(x): return reads_new(x) * task(1.0) / 5.0
    def untouched(x): return x * constant
    constant = 5.0
"""
TASKS = [
    *(
        "task",
        "reads_number",
        "reads_new",
        "reads_class",
        "reads_nested",
        "reads_object",
        "reads_container",
    ),
    *("reads_tensor", "reads_array", "reads_buffer", "reads_builtin", "reads_from_helper"),
    *("calls_others", "untouched"),
]
IMPORTED = ["initialize", *TASKS]
WAYS: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {
    "a function": lambda lib: (lib.initialize, (5.0,)),
    "a partial function": lambda lib: (functools.partial(lib.initialize, 5.0), ()),
    "a lambda": lambda lib: (lambda: lib.initialize(5.0), ()),
    "an object": lambda lib: (lib.Callable(), (5.0,)),
    "a method": lambda lib: (lib.Callable().method, (5.0,)),
    "a method of a class": lambda lib: (lib.Callable.of_class, (5.0,)),
    "a partial of an object": lambda lib: (functools.partial(lib.Callable(), 5.0), ()),
}
POOLS: dict[str, Callable[..., Any]] = {
    "Pool": functools.partial(mpgrad.Pool, 1),
    "Executor": functools.partial(mpgrad.Executor, 1),
    "thread": functools.partial(mpgrad.Pool, 1, engine="thread"),
    "inline": functools.partial(mpgrad.Pool, engine="inline"),
}


class Script:
    def __init__(self, source: str) -> None:
        names = vars(self)
        names["__name__"] = "__main__"
        exec(source, names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("initialized")
    sys.path.insert(0, str(made))
    with mpgrad.Pool(1) as pool:  # starts the fork server that imports from there
        pool.apply(abs, (-1,))
        yield made
    sys.path.remove(str(made))


@pytest.fixture(params=["module", "script"])
def lib(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    source = "".join(line[4:] for line in SOURCE.splitlines(keepends=True))
    if request.param == "script":
        yield Script(source)
    else:
        (folder / "initialized_lib.py").write_text(source)
        importlib.invalidate_caches()
        yield importlib.import_module("initialized_lib")
        del sys.modules["initialized_lib"]
    vars(builtins).pop("mpgrad_built", None)


EACH = [
    *itertools.product(["Pool"], WAYS),
    *itertools.product(["Executor", "thread", "inline"], ["a function", "an object"]),
]


@pytest.mark.parametrize(
    ("each", "lib"), in_turn(EACH, ["module", "script"]), indirect=["lib"], ids=str
)
def test_what_an_initializer_sets(lib: Any, each: tuple[str, str]) -> None:
    kind, way = each
    initializer, initargs = WAYS[way](lib)
    with POOLS[kind](initializer=initializer, initargs=initargs) as pool:
        for name in TASKS:
            assert list(pool.map(getattr(lib, name), [1.0, 2.0])) == [5.0, 10.0], name


def test_what_it_did_not_set_follows_the_caller(lib: Any) -> None:
    with mpgrad.Pool(1, initializer=lib.initialize, initargs=(5.0,)) as pool:
        for lib.constant in (2.0, 3.0):
            assert pool.map(lib.untouched, [1.0]) == [lib.constant]


def test_gradients_of_what_it_did_not_set(lib: Any) -> None:
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with mpgrad.Pool(1, initializer=lib.initialize, initargs=(5.0,)) as pool:
        (result,) = pool.map(lambda x: w * lib.reads_new(x), [3.0])
        result.backward()
    assert (result.item(), w.grad) == (30.0, torch.tensor(15.0, dtype=torch.float64))


PLACES = """
    config = {"rate": 1.0}
    alias, parts = config, [config]
    removed = 1.0

    class Holder:
        table = config
        removed = 1.0

    def initialize(value):
        global removed
        config["rate"] = value
        del removed, Holder.removed
    def by_default(value, table=config): table["rate"] = value

    def reads_alias(x): return x * alias["rate"]
    def reads_part(x): return x * parts[0]["rate"]
    def reads_class(x): return x * Holder.table["rate"]
    def reads_default(x, table=config): return x * table["rate"]
    def reads_keyword(x, *, table=config): return x * table["rate"]
    def counts(x):
        alias["count"] = alias.get("count", 0) + 1
        return alias["count"]
    def lacks(x):
        try:
            return removed
        except NameError:
            return getattr(Holder, "removed", "none")
"""
HOLDERS = "reads_alias", "reads_part", "reads_class", "reads_default", "reads_keyword"


@pytest.fixture(params=["module", "script"])
def holder(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    source = "".join(line[4:] for line in PLACES.splitlines(keepends=True))
    if request.param == "script":
        yield Script(source)
    else:
        (folder / "initialized_places.py").write_text(source)
        importlib.invalidate_caches()
        yield importlib.import_module("initialized_places")
        del sys.modules["initialized_places"]


@pytest.mark.parametrize("name", ["initialize", "by_default"])
def test_an_object_that_it_changed_is_found_wherever_it_is_held(holder: Any, name: str) -> None:
    """Class attributes, containers, defaults and further names had the caller's old object."""
    with mpgrad.Pool(1, initializer=getattr(holder, name), initargs=(5.0,)) as pool:
        found = {each: pool.apply(getattr(holder, each), (2.0,)) for each in HOLDERS}
        assert found == dict.fromkeys(HOLDERS, 10.0)
        assert [pool.apply(holder.counts, (0,)) for _ in range(2)] == [1, 2]


def test_a_name_that_it_deleted_is_gone(holder: Any) -> None:
    with mpgrad.Pool(1, initializer=holder.initialize, initargs=(5.0,)) as pool:
        assert pool.apply(holder.lacks, (0,)) == "none"


BUILTINS: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {
    "update": lambda lib: (lib.config.update, ({"rate": 5.0},)),
    "partial": lambda lib: (functools.partial(lib.alias.update, rate=5.0), ()),
    "exec": lambda lib: (exec, ("import initialized_places as p; p.config['rate'] = 5.0",)),
    "setattr": lambda lib: (setattr, (lib, "alias", {"rate": 5.0})),
}


@pytest.mark.parametrize("way", BUILTINS)
@pytest.mark.parametrize("holder", ["module"], indirect=True)
def test_an_initializer_that_is_a_builtin(holder: Any, way: str) -> None:
    initializer, initargs = BUILTINS[way](holder)
    with mpgrad.Pool(1, initializer=initializer, initargs=initargs) as pool:
        assert pool.apply(holder.reads_alias, (2.0,)) == 10.0


@pytest.mark.parametrize("holder", ["module"], indirect=True)
def test_a_script_that_imported_the_object_itself(holder: Any) -> None:
    """`from lib import config` in a script whose initializer, or whose task, does not name lib."""
    names = {"__name__": "__main__", "config": holder.config, "open_file": sys.stdout}
    exec("def init(): config['rate'] = 5.0\ndef task(x): return x * config['rate']\n", names)
    for initializer in (names["init"], functools.partial(holder.initialize, 5.0)):
        with mpgrad.Pool(1, initializer=initializer) as pool:
            assert pool.apply(holder.reads_part, (2.0,)) == 10.0
            assert pool.apply(holder.reads_class, (2.0,)) == 10.0
    with mpgrad.Pool(1, initializer=names["init"]) as pool:
        assert pool.apply(names["task"], (2.0,)) == 10.0


def test_names_that_cannot_be_pickled_stay_with_the_caller(folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "config = {'rate': 1.0}\nalias, opened = config, [config, open('/dev/null')]\n"
        "def init(): config['rate'] = 5.0\ndef task(x): return x * alias['rate']\n",
        names,
    )
    with names["opened"][1], mpgrad.Pool(1, initializer=names["init"]) as pool:
        assert pool.apply(names["task"], (2.0,)) == 10.0


# Prints what each task returns. Programs of their own, because a forked worker has all that the
# tests before have left in this process.
IN_CONTEXT = """
if __name__ == "__main__":
    import sys
    import mpgrad
    with mpgrad.Pool(1, initializer=initialize, initargs=(5.0,), context=sys.argv[1]) as pool:
        print({name: pool.map(globals()[name], [1.0]) for name in sys.argv[2:]})
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["module", "script"])
def test_in_every_context(tmp_path: Path, kind: str, context: str) -> None:
    source = "".join(line[4:] for line in SOURCE.splitlines(keepends=True))
    (tmp_path / "initialized_lib.py").write_text(source)
    head = source if kind == "script" else f"from initialized_lib import {', '.join(IMPORTED)}\n"
    (tmp_path / "program.py").write_text(head + IN_CONTEXT)
    assert printed_by(tmp_path / "program.py", context, *TASKS) == {name: [5.0] for name in TASKS}


def printed_by(program: Path, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, program, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_a_script_whose_initializer_sets_a_name_in_its_module(folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import sys\nquantity = 1.0\n"
        "def init(): setattr(sys.modules[__name__], 'quantity', 10.0)\n"
        "def task(x): return quantity * x\n",
        names,
    )
    with mpgrad.Pool(1, initializer=names["init"]) as pool:
        assert pool.map(names["task"], [2.0]) == [20.0]


LOOKED_AT = """
import ctypes, mmap, weakref
import mpgrad, numpy, torch

with torch.inference_mode():
    counts_no_versions = torch.ones(2)
sparse = torch.eye(2).to_sparse()
gone = weakref.proxy(type("Gone", (), {})())  # asking for its class raises
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
start = libc.mmap(None, ctypes.c_size_t(mmap.PAGESIZE), 0, how, -1, ctypes.c_long(0))
unreadable = (ctypes.c_char * mmap.PAGESIZE).from_address(start)
array = numpy.frombuffer(unreadable, numpy.uint8)
led_to = [sparse, gone, {"unreadable": [unreadable, array]}]


def initialize(value):
    global initialized
    initialized = value
    with torch.inference_mode():
        counts_no_versions.add_(value)


def read(x):
    return x * initialized * float(counts_no_versions.sum())


if __name__ == "__main__":
    with mpgrad.Pool(1, initializer=initialize, initargs=(2.0,), context="fork") as pool:
        print(pool.map(read, [1.0]))
"""


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    """The user's modules may lead to tensors without versions, to memory that is unmapped, and to
    dead proxies."""
    (tmp_path / "program.py").write_text(LOOKED_AT)
    assert printed_by(tmp_path / "program.py") == [12.0]


kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    kept[:] = [tensor.add_(1.0)]


def write_at(place: int) -> float:
    kept[0][place] = 5.0
    return float(kept[0].sum())


def test_a_write_to_a_shared_tensor_is_not_lost_in_silence(fork_server: mpgrad.Pool) -> None:
    """In torch.multiprocessing the caller sees it."""
    shared = torch.zeros(2).share_memory_()
    with mpgrad.Pool(1, initializer=keep, initargs=(shared,)) as pool:
        assert pool.map(lambda _: float(kept[0].sum()), [0]) == [2.0]
        with pytest.warns(UserWarning, match="a shared tensor that the initializer was given"):
            assert pool.map(write_at, [0]) == [6.0]
    assert shared.tolist() == [0.0, 0.0]
    with mpgrad.Pool(1, initializer=keep, initargs=(torch.zeros(2),)) as pool:
        assert pool.map(write_at, [0]) == [6.0]  # a copy in torch.multiprocessing, too
