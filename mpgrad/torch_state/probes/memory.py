"""Probes of `private.memory`."""

from __future__ import annotations

import os

import torch

from mpgrad.torch_state import private
from mpgrad.torch_state.probes.expectations import behaviour, expect
from mpgrad.torch_state.probes.nodes import leaf


@behaviour("shared memory can be made, and mapped again by its file descriptor")
def storages_by_descriptor() -> None:
    for descriptor in (*os.pipe(), *os.pipe()):  # where none is free that is an OSError; PyTorch says it in words of its own
        os.close(descriptor)
    made = private.shared_storage(64)
    again = private.storage_from_descriptor(os.dup(private.descriptor_of(made)), 64)
    made[5] = 7
    expect((64, 7, False), (again.nbytes(), again[5], made.data_ptr() == again.data_ptr()))


@behaviour("a tensor says whether its elements lie in memory as they are")
def plain_memory() -> None:
    plain = torch.ones(2, dtype=torch.float64, device="cpu")
    complex_ones = torch.ones(2, dtype=torch.complex64, device="cpu")
    nothing: torch.Tensor = torch._efficientzerotensor(2, device="cpu")
    odd = [complex_ones.conj(), complex_ones.conj().imag, plain.to_sparse(), torch.empty(2, device="meta"), nothing]
    expect([True, True, True], [private.has_plain_memory(each) for each in (plain, leaf(), plain[::2])])
    expect([False] * 5, [private.has_plain_memory(each) for each in odd])
    expect((True, False), (private.have_plain_memory([plain, leaf()]), private.have_plain_memory([plain, odd[0]])))
    expect((False, True), (plain._is_zerotensor(), nothing._is_zerotensor()))


@behaviour("a sparse tensor gives its indices and values as they are")
def parts_of_sparse_tensors() -> None:
    indices = torch.tensor([[1, 0, 1]], device="cpu")
    sparse = torch.sparse_coo_tensor(indices, torch.ones(3, dtype=torch.float64, device="cpu"), (2,), check_invariants=False)
    expect(([[1, 0, 1]], [1.0, 1.0, 1.0]), (sparse._indices().tolist(), sparse._values().tolist()))


@behaviour("tensors of any shapes can be copied one after another in one step")
def flattened_tensors() -> None:
    tensors = [
        torch.full(shape, value, dtype=torch.float64, device="cpu") for shape, value in (((), 1), ((1, 2), 2), ((1,), 3))
    ]
    expect([1.0, 2.0, 2.0, 3.0], private.flattened(tensors).flatten().tolist())
