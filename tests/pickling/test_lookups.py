"""Names that a script's functions find at run time: in strings, in `globals()`, in `__main__`.

Before: NameError in workers; and `globals().get("w", zero)` was zero, without a gradient and
without a word.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpgrad
from mpgrad.pickling.modules import UNASKED_BYTES, looks_up

pytestmark = pytest.mark.quick

SCRIPT = """
import builtins, importlib, inspect, sys, typing
import sys as system
import __main__
import torch

w = torch.tensor(2.0, requires_grad=True)
counting = (n for n in [])
large = torch.zeros(SIZE + 1, dtype=torch.uint8)
zero = torch.zeros(())

def helper(x):
    return x * w

def of_eval(x):
    return eval("helper(x)")

def of_exec(x):
    found = {"x": x}
    exec("y = helper(x)", globals(), found)
    return found["y"]

def of_globals(x):
    return x * globals()["w"]

def of_get(x):
    return x * globals().get("w", zero)

G, E = globals, eval

def of_another_name(x):
    return x * (lambda: G().get("w", zero))()

def of_eval_by_another_name(x):
    return x * E("w")

def of_builtins(x):
    return x * builtins.globals().get("w", zero)

def of_builtins_by_name(x):
    return x * getattr(builtins, "globals")().get("w", zero)

def of_default(x, found=globals):
    return x * found().get("w", zero)

def closing_over(found):
    return lambda x: x * found().get("w", zero)

of_closure = closing_over(globals)

def of_renamed_sys(x):
    return x * getattr(getattr(system, "modules")["__main__"], "w", zero)

def of_named_globals(x):
    return x * getattr(helper, "__globals__").get("w", zero)

def of_imported_main(x):
    return x * getattr(importlib.import_module("__main__"), "w", zero)

def of_module_of_helper(x):
    return x * getattr(inspect.getmodule(helper), "w", zero)

def of_main(x):
    return x * __main__.w

def of_import(x):
    import __main__ as main
    return x * getattr(main, "w", zero)

def of_vars(x):
    return x * vars(__main__)["w"]

def of_dunder_import(x):
    return x * __import__("__main__").w

def of_modules(x):
    return x * sys.modules[__name__].w

def of_modules_imported(x):
    import sys as system
    return x * getattr(system.modules.get("__main__"), "w", zero)

def of_frame(x):
    return x * inspect.currentframe().f_globals["w"]

def of_function(x):
    return x * helper.__globals__["w"]

def of_made_word(x):
    return x * globals().get("".join("w"), zero)

def of_made_code(x):
    return eval("".join(["hel", "per(x)"]))

def of_another(x):
    return of_get(x) + 0 * helper(x)

def of_what_it_sets(x):
    globals()["set_here"] = x
    __main__.set_there = w
    return eval("set_here * set_there")

class Holder:
    def method(self, x):
        return of_get(x) + eval("0 * w")

def in_a_class(x):
    return eval("Holder()").method(x)

def plain_first(x):
    return (helper(x) + of_get(x)) / 2

def mentions_large(x):
    return x * w + len(globals()["large"]) * 0

REFUSED = {
    "get": lambda _: globals().get("".join(["lar", "ge"]), 0),
    "item": lambda _: globals()["".join(["lar", "ge"])],
    "eval": lambda _: eval("".join(["lar", "ge"])),
    "main": lambda _: getattr(__main__, "".join(["lar", "ge"]), 0),
    "modules": lambda _: getattr(sys.modules["__main__"], "".join(["lar", "ge"]), 0),
    "all": lambda _: list(globals().values()),
    "cannot": lambda _: globals().get("counting", 0),
}
"""
OTHERS = "helper", "closing_over", *(IN_WORKERS := ("of_imported_main", "of_module_of_helper"))
FOUND = ["of_closure"]
FOUND += [
    name
    for line in SCRIPT.splitlines()
    if line.startswith("def ") and (name := line.split("(")[0][4:]) not in OTHERS
]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("__main__")
    vars(module).update(__file__=__file__, SIZE=UNASKED_BYTES)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(SCRIPT, vars(module))
    return module


@pytest.mark.parametrize("name", FOUND)
def test_found(pool: mpgrad.Pool, main: Any, name: str) -> None:
    if name != "mentions_large":  # a string of any function that travels may ask for it
        del main.mentions_large
    x = torch.tensor(3.0, requires_grad=True)
    (result,) = pool.map(getattr(main, name), [x])
    assert result.item() == 6
    assert [grad.item() for grad in torch.autograd.grad(result, [x, main.w])] == [2, 3]


@pytest.mark.parametrize("name", IN_WORKERS)
def test_found_in_workers(pool2: mpgrad.Pool, main: Any, name: str) -> None:
    # in the caller's process, these find the caller's own
    test_found(pool2, main, name)


@pytest.mark.parametrize("name", ["get", "item", "eval", "main", "modules", "all", "cannot"])
def test_not_carried(pool: mpgrad.Pool, main: Any, name: str) -> None:
    del main.mentions_large
    function = main.REFUSED.pop(name)
    main.REFUSED.clear()
    why = "cannot pickle 'generator' object" if name == "cannot" else ""
    with pytest.raises(
        TypeError, match=rf"__main__\.\w+ was not sent to this worker \(.*{why}.*\); name it"
    ):
        pool.map(function, [0])


THROUGH = """
through = {
    "items": lambda x: [v for k, v in globals().items() if isinstance(v, Number)][0] * x,
    "values": lambda x: [v for v in list(globals().values()) if isinstance(v, Number)][0] * x,
    "dict": lambda x: dict(globals())["number"] * x,
    "stars": lambda x: {**globals()}["number"] * x,
    "copy": lambda x: globals().copy()["number"] * x,
    "keys": lambda x: "counting" in list(globals()) and number * x,
    "vars": lambda x: [v for v in vars(__main__).values() if isinstance(v, Number)][0] * x,
}
class Number(int): pass
number = Number(2)
"""


def test_going_through_all_names(pool: mpgrad.Pool, main: Any) -> None:
    del main.mentions_large, main.large
    exec(THROUGH, vars(main))
    through = vars(main).pop("through")
    names = through.pop("keys")
    for name in ("dict", "stars", "copy"):  # which look at no other name
        assert pool.map(through[name], [3]) == [6], name
    for name in ("items", "values", "vars"):
        with pytest.raises(
            TypeError, match=r"__main__\.counting was not sent to this worker \(.*generator"
        ):
            pool.map(through[name], [3])
    assert pool.map(names, [3]) == [6]
    del main.counting
    for name, function in through.items():
        assert pool.map(function, [3]) == [6], name


UNASKED = """
class Sets:
    def __setstate__(self, state): raise RuntimeError("loaded")
class New:
    def __new__(cls): LOADED.append(cls.__name__); return object.__new__(cls)
class Items(dict):
    def __setitem__(self, key, value): raise RuntimeError("loaded")
class Registers:
    def __init_subclass__(cls): LOADED.append(cls.__name__)
sets, new, items, modules = [Sets()], New(), Items(), {"all": sys.modules}
sets[0].a = 1
dict.__setitem__(items, 1, 2)
class Registered(Registers): pass
def look(name): return eval(name[::-1]) and len(LOADED)
def helper(x): return x * eval("w")
"""


def test_what_would_run_code_is_not_carried_unasked(pool: mpgrad.Pool, main: Any) -> None:
    # symptom: an object of the script's that no function uses made each function with eval fail, or
    # acted in workers
    main.LOADED = []
    exec(UNASKED, vars(main))
    assert pool.map(main.helper, [torch.tensor(3.0)]) == [6]
    assert pool.map(main.look, ["w"]) == [len(main.LOADED)]
    for name in ("sets", "new", "items", "Registered", "modules"):
        why = "it contains sys.modules" if name == "modules" else r"\w+ has code of its own"
        with pytest.raises(
            TypeError, match=rf"__main__\.{name} was not sent to this worker \(TypeError: {why}"
        ):
            pool.map(main.look, [name[::-1]])


MADE_BY_INIT = """
import collections, datetime, enum, types
import numpy
def init(self, base, *args, **names):
    base.__init__(self, *args, **names)
    LOADED.append(type(self).__name__)
class Error(Exception):
    def __init__(self, *, code): init(self, Exception, code)
class Bag(set):
    def __init__(self, items, name): init(self, set, items)
class Queue(collections.deque):
    def __init__(self, items): init(self, collections.deque, items)
class Ordered(collections.OrderedDict):
    def __init__(self, items): init(self, collections.OrderedDict, items)
class Count(collections.Counter):
    def __init__(self, items): init(self, collections.Counter, items)
class Lists(collections.defaultdict):
    def __init__(self, make): init(self, collections.defaultdict, list)
class Block(bytearray):
    def __init__(self, size): init(self, bytearray, size)
class Names(types.SimpleNamespace):
    def __init__(self, a): init(self, types.SimpleNamespace, a=a)
class Zone(datetime.tzinfo):
    def __init__(self, hours): init(self, datetime.tzinfo)
class Numbers(numpy.ndarray):
    def __array_finalize__(self, other): LOADED.append("Numbers")
class Plain(dict):
    def __init__(self, a): init(self, dict, a=a)
class Planet(enum.Enum):
    EARTH = 1, 2
    def __init__(self, mass, radius): self.mass = mass
refused = {
    "bag": Bag([1], "b"), "queue": Queue([1]), "ordered": Ordered({1: 2}), "count": Count("ab"),
    "lists": Lists(3), "block": Block(2), "names": Names(1), "zone": Zone(1),
    "numbers": numpy.ones(2).view(Numbers),
}
plain, planet, error = Plain(1), Planet.EARTH, Error(code=1)
def look(name): return eval(name[::-1]) and len(LOADED)
"""


def test_what_its_init_would_make_again_is_not_carried_unasked(
    pool: mpgrad.Pool, main: Any
) -> None:
    # symptom: as above, or __init__ ran in workers. cause: what such a class inherits has pickle
    # call the class
    main.LOADED = []
    exec(MADE_BY_INIT, vars(main))
    refused = vars(main).pop("refused")
    vars(main).update(refused)
    made = len(main.LOADED)
    assert pool.map(main.look, ["w", "nialp", "tenalp", "rorre"]) == [made] * 4
    for name in refused:
        said = rf"__main__\.{name} was not sent to this worker \(TypeError: \w+ has code of its own"
        with pytest.raises(TypeError, match=said):
            pool.map(main.look, [name[::-1]])
    assert len(main.LOADED) == made


def test_what_the_script_has_not(pool2: mpgrad.Pool, main: Any) -> None:
    exec(
        "def get(_): return globals().get('absent', 7), 'absent' in globals(), 'w' in globals()",
        vars(main),
    )
    exec("def evaluate(_): return eval('absent')", vars(main))
    assert pool2.map(main.get, [0]) == [(7, False, True)]
    with pytest.raises(NameError, match="absent"):
        pool2.map(main.evaluate, [0])


def test_a_task_that_maps_such_a_function(pool2: mpgrad.Pool, main: Any) -> None:
    """What did not come to it does not go further, and is refused by the same words there."""
    del main.mentions_large
    exec("import mpgrad\ndef inner(x): return of_get(x) + 0 * eval('w')", vars(main))
    exec("def refused(x): return globals()[''.join(['lar', 'ge'])]", vars(main))
    exec(NESTED, vars(main))
    assert pool2.map(main.maps_inner, [torch.tensor(3.0)]) == [6]
    with pytest.raises(TypeError, match=r"__main__\.large was not sent to this worker"):
        pool2.map(main.maps_refused, [0])


NESTED = """
def mapped(function, x):
    with mpgrad.Pool(1, engine="inline") as pool:
        return pool.map(function, [x])[0]
def maps_inner(x): return mapped(inner, x)
def maps_refused(x): return mapped(refused, x)
"""


def test_code_made_by_exec(pool: mpgrad.Pool) -> None:
    """It has globals that are no module's."""
    names: dict[str, Any] = {"w": torch.tensor(2.0, requires_grad=True)}
    exec("def get(x): return x * globals().get('w', 0)", names)
    (result,) = pool.map(names["get"], [torch.tensor(3.0)])
    assert torch.autograd.grad(result, names["w"])[0] == 3


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("lambda m: m.eval()", False),
        ("lambda args: vars(args)", False),
        ("lambda m: list(m.modules())", False),
        ("lambda m: m.globals", False),
        ("lambda m: m.builtins", False),
        ("lambda x: [eval(y) for y in x]", True),
        ("lambda x: (lambda: globals())", True),
        ("lambda x: sys.modules[x]", True),
        ("lambda x: sys.argv", False),
    ],
)
def test_which_code_looks_names_up(source: str, expected: bool) -> None:
    """Symptom: a function with `model.eval()` carried all of its module."""
    function: Callable[..., Any] = eval(source)
    assert isinstance(function, types.FunctionType)
    assert looks_up(function) == expected


def test_its_own_eval() -> None:
    names: dict[str, Any] = {}
    exec("def eval(x): return x\ndef use(x): return eval(x)", names)
    assert not looks_up(names["use"])
