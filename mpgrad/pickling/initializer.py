"""An initializer is pickled with the caller's names of the objects that it may change. Caller's
side.

`mpgrad.pickling.initialized` describes how a worker uses the names.
"""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import torch
from torch.nn import Module

from mpgrad.pickling.classes import ClassPickler, only_carried
from mpgrad.pickling.initialized import (
    CallersNames,
    copy_of_shared,
    is_searched,
    names_leading_to,
)
from mpgrad.pickling.modules import WORDS, is_own
from mpgrad.pickling.reducers import refuse_of_a_rank

__all__ = ["dumps_initializer"]


class InitializerPickler(ClassPickler):
    """Pickles an initializer and its arguments. Tensors in shared memory become copies."""

    to_caller = False

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Module):
            refuse_of_a_rank(value)
        if isinstance(value, torch.Tensor) and value.is_shared():  # type: ignore[no-untyped-call]
            make, parts, *_ = value.__reduce_ex__(5)  # type: ignore[no-untyped-call]
            return copy_of_shared, (make, parts)
        return super().reducer_override(value)


def dumps_initializer(initializer: Any, arguments: tuple[Any, ...]) -> bytes:
    """Pickle an initializer, then the caller's names of the objects that it may change."""
    buffer = io.BytesIO()
    pickler = InitializerPickler(buffer, protocol=5)
    pickler.dump((initializer, arguments))
    if initializer is None:
        return buffer.getvalue()
    names = callers_names(pickler)
    try:
        pickler.dump(names)
    except Exception:
        # Functions cannot bring values that cannot be pickled, such as files.
        values = {
            path: only_carried(given, InitializerPickler) for path, given in names.values.items()
        }
        pickler = InitializerPickler(buffer := io.BytesIO(), protocol=5)
        pickler.dump((initializer, arguments))
        pickler.dump(names._replace(values=values))
    return buffer.getvalue()


def callers_names(pickler: InitializerPickler) -> CallersNames:
    """Return the names that lead to pickled objects, or to contents of the modules they name."""
    objects = {number: each for number, (_, each) in pickler.memo.copy().items()}
    own = {name: vars(each) for name, each in list(sys.modules.items()) if is_own(name)}
    texts = {each for each in objects.values() if type(each) is str}
    imports = sorted(own.keys() & texts.union(*map(WORDS.findall, texts)))
    namespaces = [vars(sys.modules["__main__"])]
    # a script's functions may have a namespace of their own
    namespaces += [
        each.__globals__ for each in objects.values() if type(each) is types.FunctionType
    ]
    scripts = {id(each): each for each in namespaces if each.get("__name__") == "__main__"}
    others = [("__main__", each) for each in scripts.values()]
    homes = {
        id(value): (module, name)
        for module in imports
        for name, value in own[module].items()
        if is_searched(value)
    }
    of_modules = {number: own[module][name] for number, (module, name) in homes.items()}
    aliases = {
        path: {name: homes[id(value)] for name, value in given.items() if id(value) in homes}
        for path, given in names_leading_to(of_modules, others).items()
    }
    return CallersNames(names_leading_to(objects, [*own.items(), *others]), aliases, imports)
