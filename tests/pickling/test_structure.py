"""Pickles beside their tensors, without processes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from mpgrad.pickling import state, structure

pytestmark = pytest.mark.quick


def test_pickles_without_tensors() -> None:
    a, b = torch.ones(1000, requires_grad=True), torch.zeros(2)
    pickled, tensors = structure.dumps({"x": [a, (b, a)], "n": 3})
    assert [id(t) for t in tensors] == [id(a), id(b)] and len(pickled) < 100
    value = structure.loads(pickled, [b, a])
    assert (
        value["x"][0] is b and value["x"][1][0] is a and value["x"][1][1] is b and value["n"] == 3
    )


@pytest.mark.parametrize(
    "dumps", [structure.dumps, lambda value: state.dumps_arguments(value, None)]
)
def test_tensors_are_not_kept_by_what_pickled_them(dumps: Any) -> None:
    numpy = pytest.importorskip("numpy")
    tensor, array = torch.ones(3), numpy.ones(5000)  # out of band
    refs = [weakref.ref(tensor), weakref.ref(array)]
    gc.disable()  # a cycle would wait for it
    try:
        dumps({"tensor": tensor, "array": array})
        del tensor, array
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
