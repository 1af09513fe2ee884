"""The core of a tensor: the one run of memory that travels for it, and the form that rebuilds it from that. Both sides.

Strides are kept. Nothing travels of what a tensor's storage holds before and behind it; what lies between its elements does
where that is cheaper than to close the gaps.

    tensor ──► dense_core ──► run of memory, Form, SPREAD or 0
    tensors ──► laid_out ──► references to one run of memory after another, cores ──► fill
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpgrad.wire.tensor_refs import (
    NUMBER_OF_DTYPE,
    SPARSE_LAYOUTS,
    SPREAD,
    Form,
    Sparse,
    TensorRef,
    flags_of,
    strided,
)

__all__ = [
    "GAPPED",
    "RIDE_BYTES",
    "brought_here",
    "copy_into",
    "dense_core",
    "fill",
    "laid_out",
    "overlaps",
]

RIDE_BYTES = 8192  # of a tensor that rides in the message, at most
BLOCK_ALIGNMENT = 64  # of a tensor within a slot: a cache line
GAPPED = 4  # times its elements is what travels with its gaps, at most: there most cache lines hold an element, and are read


def dense_core(tensor: torch.Tensor) -> tuple[torch.Tensor, Form, int]:
    """The memory that travels for `tensor`, one run; the form that rebuilds it from that; SPREAD, where its gaps were closed.

    Strides are kept even where they have gaps: sums over other strides add up in another order, and so to other bits.
    """
    if tensor.layout is not torch.strided:
        return sparse_core(tensor.detach())
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()):
        return tensor, None, 0
    if tensor._is_zerotensor():  # it has no memory
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"), None, 0
    core, stride = tensor.detach(), tensor.stride()
    if core.numel() == 0:
        return core, stride, 0
    if not (any(stride) or tensor.is_complex() or tensor.is_neg()):  # one number everywhere: what a sum's gradient looks like
        return core.as_strided((1,) * len(stride), stride), stride, 0
    for dim, step in enumerate(stride):
        if step == 0 and core.shape[dim] > 1:
            core = core.narrow(dim, 0, 1)
    if not (core.is_conj() or core.is_neg()):
        span = span_of(core.shape, stride)
        if span <= GAPPED * core.numel():
            return core.as_strided((span,), (1,)), stride, 0
    elif is_dense(core):
        return core.resolve_conj().resolve_neg(), stride, 0
    return core.resolve_conj().resolve_neg().contiguous(), stride, SPREAD


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory lie from the first to the last one of a tensor that is not empty, these two included."""
    return 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])


def sparse_core(tensor: torch.Tensor) -> tuple[torch.Tensor, Sparse, int]:
    """The indices and values of `tensor` as one run of bytes, and how they go together."""
    is_coo = tensor.layout is torch.sparse_coo
    if is_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    refs, cores, nbytes = laid_out(parts)
    memory = bytearray(nbytes)
    fill(memoryview(memory), refs, cores)
    core = torch.frombuffer(memory, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
    return core, Sparse(SPARSE_LAYOUTS.index(tensor.layout), is_coo and tensor.is_coalesced(), tuple(refs)), 0


def brought_here(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` on the CPU, with its strides."""
    if tensor.is_cpu or tensor.layout is not torch.strided or tensor._is_zerotensor():
        return tensor.detach().cpu()
    core, stride, how = dense_core(tensor.detach())
    here = core.cpu()
    if stride is None or isinstance(stride, Sparse) or here.numel() == 0:
        return here
    return strided(here.as_strided((here.numel(),), (1,)), tuple(tensor.shape), stride, how)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements, in some order of dimensions, fill one run of memory."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def overlaps(core: torch.Tensor) -> bool:
    """Whether some elements share memory, so that strides cannot be rebuilt from separate elements."""
    reach = 0
    for step, size in sorted(zip(core.stride(), core.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def laid_out(tensors: Sequence[torch.Tensor], sharing: bool = False) -> tuple[list[TensorRef], list[torch.Tensor], int]:
    """References to `tensors` one after another in one run of memory, their cores, and the size of that memory.

    Where `sharing`, those that look at the same memory do so there too; but they do not share what autograd counts writes with.
    """
    refs, cores, offset = [], [], 0
    known: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        core, form, how = dense_core(tensor)
        nbytes = core.numel() * core.element_size()
        number = NUMBER_OF_DTYPE[tensor.dtype]
        place = known.setdefault((core.data_ptr(), nbytes), offset) if sharing else offset
        refs.append(TensorRef(number, tuple(tensor.shape), form, -1 - place, nbytes, flags_of(tensor) | how))
        cores.append(core)
        if place == offset:
            offset += -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    return refs, cores, offset


def fill(memory: memoryview, refs: Sequence[TensorRef], cores: Sequence[torch.Tensor]) -> None:
    """Copy cores into the memory that `laid_out` has measured."""
    for ref, core in zip(refs, cores, strict=True):
        copy_into(memory[-1 - ref.place :], core, ref.nbytes)


def copy_into(memory: memoryview, core: torch.Tensor, nbytes: int) -> None:
    """`core` is dense, so its bytes are one run of memory."""
    if nbytes == 0:
        return
    target = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        core.untyped_storage(), core.storage_offset() * core.element_size(), (nbytes,), (1,)
    )
    target.copy_(source)
