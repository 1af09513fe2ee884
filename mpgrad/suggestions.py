"""Arguments that other libraries call otherwise: one that we do not have gets an error that names ours."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

__all__ = ["suggests"]

P = ParamSpec("P")
T = TypeVar("T")

# what numbers of workers are called in joblib, concurrent.futures, torch, multiprocess libraries; and other arguments
WORKERS = "processes", "max_workers", "n_jobs", "num_workers", "nprocs", "workers", "n_workers", "n_processes", "num_processes"
ELSEWHERE = {
    "max_tasks_per_child": "maxtasksperchild",
    "maxtasksperchild": "max_tasks_per_child",
    "mp_context": "context",
    "context": "mp_context",
    "start_method": "context",
    "backend": "engine",
    "num_threads": "threads_per_worker",
    "n_threads": "threads_per_worker",
    "device": "devices",
}


def refuse_unknown(subject: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises:
    TypeError: a name that is given is not known; says which known one may be meant.
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        meant = [each for each in (*(WORKERS if name in WORKERS else ()), ELSEWHERE.get(name, "")) if each in known]
        close = (meant or difflib.get_close_matches(name, known, 1))[:1]
        hint = f"; did you mean {close[0]!r}?" if close else f" (there are: {', '.join(known)})"
        raise TypeError(f"{subject} got an unexpected keyword argument {name!r}{hint}")


def suggests(subject: str, *options: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a method refuse unknown keyword arguments; those that it passes on are the `options`."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        _, *parameters = inspect.signature(function).parameters.values()  # but for self
        known = [*(each.name for each in parameters if each.kind is not each.VAR_KEYWORD), *options]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            refuse_unknown(subject, kwargs, known)
            return function(*args, **kwargs)

        return checked

    return decorated
