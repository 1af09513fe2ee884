"""What the caller is told of a call that failed: the exception, where it was raised, and what the function was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpgrad.errors import traceback_of
from mpgrad.pickling.exceptions import carried
from mpgrad.wire.messages import Failure

__all__ = ["described", "failure", "given_in_words"]


def failure(error: BaseException, phase: str, offset: int = 0, given: str = "") -> Failure:
    return Failure(carried(error), traceback_of(error), phase, offset, given)


MOST_IN_WORDS = 6  # values of each container


def in_words(value: Any, depth: int = 2) -> str:
    """Tensors by dtype and shape, the rest by type; runs no code of the user's."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"array {value.dtype} {list(value.shape)}"
    if kind not in (tuple, list, dict):
        return kind.__name__
    opening, closing = "()" if kind is tuple else "[]" if kind is list else "{}"
    if depth == 0:
        return f"{opening}...{closing}"
    pairs = [("", each) for each in value] if kind is not dict else [(f"{named(key)}: ", each) for key, each in value.items()]
    return opening + all_in_words(pairs, depth - 1) + closing


def all_in_words(pairs: Sequence[tuple[str, Any]], depth: int) -> str:
    words = [name + in_words(value, depth) for name, value in pairs[:MOST_IN_WORDS]]
    left = len(pairs) - len(words)
    return ", ".join([*words, f"and {left} more"] if left else words)


def named(key: object) -> str:
    return repr(key) if type(key) in (str, int) else type(key).__name__


def given_in_words(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    return all_in_words([*(("", each) for each in args), *((f"{name}=", each) for name, each in kwargs.items())], 2)


def described(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # it is the user's code, and what the result is wanted for is an error's text
        return object.__repr__(value)
