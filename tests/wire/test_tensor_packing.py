"""Tensors packed and viewed again, without processes: every layout arrives, and lies where it
may."""

from __future__ import annotations

import os

import pytest
import torch

from mpgrad.memory.arena import Arena, ForeignSlabs
from mpgrad.wire import tensor_refs

pytestmark = pytest.mark.quick


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    arena, foreign_slabs = Arena(1), ForeignSlabs(lambda: None)
    payload = tensor_refs.Payload()
    packed = tensor_refs.Packer(arena).pack(tensor, tensor_refs.flags_of(tensor))
    for slab in arena.made:
        foreign_slabs.attach(slab.number, os.dup(slab.descriptor), slab.nbytes)
    ref = payload.add(packed)
    riding = memoryview(bytearray(b"".join(payload.parts)))
    return tensor_refs.view(ref, riding, lambda ref: foreign_slabs.borrow(ref.place, ref.nbytes))


@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex64, torch.bfloat16, torch.int16, torch.bool]
)
def test_every_layout_of_a_tensor_arrives(size: int, dtype: torch.dtype) -> None:
    base = (torch.randn(4, 5 * size, 6) * 3).to(dtype)
    views = [
        base,
        base.transpose(0, 2),
        base[1:, ::2],
        base[:, :0],
        base[0, 0, 0],
        base[:1].expand(7, -1, -1),
        base.mT[2],
    ]
    if dtype.is_complex:
        views += [base.conj(), base.conj().imag]
    for each in views:
        arrived = round_trip(each)
        assert torch.equal(arrived, each.resolve_conj().resolve_neg())
        assert arrived.dtype == dtype or not dtype.is_complex or arrived.dtype == torch.float32
        assert not arrived._is_view()


def test_the_payload_keeps_tensors_aligned() -> None:
    payload = tensor_refs.Payload()
    packing = tensor_refs.Packer(Arena(1))
    refs = [payload.add(packing.pack(torch.ones(n, dtype=torch.int8), 0)) for n in (1, 17, 3)]
    assert [(-1 - ref.place) % tensor_refs.ALIGNMENT for ref in refs] == [0, 0, 0]
