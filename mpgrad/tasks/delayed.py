"""The functions that joblib was given with `delayed`, as one function of their arguments. Both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpgrad.place import PLACE

__all__ = ["Delayed"]


class Delayed:
    """Functions, called by their number.

    They are apart from the arguments: for all calls of the same functions this is the same function to the pool, which pickles
    it once, and what the functions reach are captures.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], nesting_level: int) -> None:
        self.functions = tuple(functions)
        self.nesting_level = nesting_level  # of a `joblib.Parallel` in one of the functions

    def __call__(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        from joblib import parallel_config  # only workers of a pool that joblib uses have it
        from joblib.parallel import SequentialBackend, register_parallel_backend

        if PLACE.in_worker:  # for functions that name it: the pool has the CPUs already. In the caller it is ours
            register_parallel_backend("mpgrad", SequentialBackend)
        with parallel_config(backend=SequentialBackend(nesting_level=self.nesting_level), n_jobs=None):
            return self.functions[number](*args, **kwargs)
