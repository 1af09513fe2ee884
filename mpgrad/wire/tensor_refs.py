"""References to tensors, which messages hold: how a sender packs tensors, and how the receiver
views them. Both sides use this module.

Autograd and pickle both work on whole tensors, but a message holds bytes and numbers. A `TensorRef`
names what to view, and where it is. A sparse tensor is also one reference, to a run of memory in
which its indices and values lie like the tensors in a message. Many references are sent together in
columns, or as a bucket if the tensors are alike.

    sender     tensor ──► dense_core ──► its core: a run of memory; Form, SPREAD or 0
                 core ──► bytes, or a slot: PackedTensor ──► Payload ──► TensorRef
               tensors ──► laid_out ──► references to one run after another, cores ──► fill
               tensors ──► PackedTensors ──► Payload ──► TensorBucket, of those that are alike
                                                         TensorColumns, of all others
    receiver   references, memory ──► view, views ──► tensors

A small tensor is inline in the message itself. A large one is in a slot, and the message has its
address. Up to INLINE_BYTES, the two copies through the pipe cost less than the bookkeeping of a
slot (both about 2 us per tensor). Many tensors that are alike are copied at once into one slot.
This bucket costs little more than one tensor.

The parts of a storage before and after its tensor are not sent. Gaps between the tensor's elements
are sent only if that is cheaper than closing them.

Guarantees: strides are preserved. An expanded tensor is sent without repetition. Sparse tensors
    keep their layout, the order of their entries, and whether they are coalesced. A received tensor
    is never a view in autograd's sense, so it may be written in place like any fresh tensor. Its
    storage begins and ends with the sent bytes, so `as_strided` cannot reach other memory.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, overload

import torch
from torch.nn.parameter import is_lazy

from mpgrad.memory.accelerator import DeviceChannel, Region, bytes_of, device_code, device_of
from mpgrad.memory.arena import COPY_BYTES, Arena, BorrowedMemory, KeptSlots, Slot
from mpgrad.torch_state.private import (
    flattened,
    has_plain_memory,
    has_tangent,
    have_plain_memory,
    is_functorch_wrapped,
    plain_alias,
    without_autocast,
)

__all__ = [
    "ALIGNMENT",
    "ANSWERED_BYTES",
    "BUCKETED_BYTES",
    "CONSTANT",
    "DEVICE",
    "DTYPES",
    "GAPPED",
    "HOOKED",
    "INLINE_BYTES",
    "LEAF",
    "NUMBER_OF_DTYPE",
    "PARAMETER",
    "PLACE",
    "PLAIN",
    "REQUIRES_GRAD",
    "SHARED",
    "SPARSE_LAYOUTS",
    "SPREAD",
    "Devices",
    "Form",
    "PackedTensor",
    "PackedTensors",
    "Packer",
    "Payload",
    "Row",
    "SparseParts",
    "TensorBucket",
    "TensorColumns",
    "TensorRef",
    "brought_here",
    "check_carriable",
    "check_class",
    "copy_into",
    "dense_core",
    "fill",
    "flags_in",
    "flags_of",
    "have_attributes",
    "is_like_a_loss",
    "laid_out",
    "lent",
    "need_no_pickle",
    "overlaps",
    "packed_again",
    "place_of",
    "redirected",
    "rows_of",
    "staged_again",
    "stand_in",
    "strided",
    "unit_of",
    "view",
    "views",
    "with_more_behind",
]

FOLLOWED = "use map, starmap, apply, reduce or map_reduce"
ALIGNMENT = 16  # of tensors in a message, in bytes: the size of the widest element, complex128
# Messages hold dtypes by number, so this order is a part of the protocol. It matters only between
# a parent and its own workers.
DTYPES = tuple(
    sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
)
NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}
LOSSES = (torch.float32, torch.float64)
SPARSE_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_bsr,
    torch.sparse_csc,
    torch.sparse_bsc,
)
MAKE_COO: Any = torch.sparse_coo_tensor  # their type hints leave out the indices
MAKE_COMPRESSED: Any = torch.sparse_compressed_tensor


class TensorRef(NamedTuple):
    """What a message says about a tensor, and where its bytes are."""

    dtype: int
    shape: tuple[int, ...]
    form: Form
    # 0 or more: an address in shared memory; negative: -1 - offset in the message's payload
    place: int
    nbytes: int
    flags: int


Row = tuple[int, tuple[int, ...], "Form", int, int, int]  # a reference without its class
PLACE: Final = 3  # index in a row
FLAGS: Final = 5


class TensorColumns(Sequence[TensorRef]):
    """References to many tensors, with a column for each of their fields.

    Columns pickle in a tenth of the time. And a process that keeps them has no object for each
    reference, which the garbage collector would visit again and again.
    """

    __slots__ = ("columns",)

    def __init__(self, *columns: Sequence[Any]) -> None:
        self.columns = columns

    def __reduce__(self) -> Any:
        return TensorColumns, self.columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[TensorRef]:
        return map(TensorRef._make, self.rows())

    @overload
    def __getitem__(self, place: int) -> TensorRef: ...
    @overload
    def __getitem__(self, place: slice) -> TensorColumns: ...
    def __getitem__(self, place: int | slice) -> TensorRef | TensorColumns:
        found = [column[place] for column in self.columns]
        return TensorColumns(*found) if isinstance(place, slice) else TensorRef._make(found)

    def rows(self) -> Iterator[Row]:
        return zip(*self.columns, strict=True)

    def moved(self, start: int) -> TensorColumns:
        """Return the same references for a larger payload, in which their own payload begins at
        `start`."""
        columns = list(self.columns)
        columns[PLACE] = [place - start for place in columns[PLACE]]
        return TensorColumns(*columns)


class TensorBucket(Sequence[TensorRef]):
    """References to many tensors of one dtype and the same flags, which are stored one after
    another in one run of memory.

    The tensors are handled together in a few steps. In shared memory they have one slot together,
    so a reference to one of them cannot name that slot: see `lent` and `views`.
    """

    __slots__ = ("_offsets", "counts", "dtype", "flags", "nbytes", "place", "shapes")

    def __init__(
        self,
        dtype: int,
        shapes: Sequence[tuple[int, ...]],
        counts: Sequence[int],
        place: int,
        nbytes: int,
        flags: int,
    ) -> None:
        self.dtype = dtype
        self.shapes = shapes
        self.counts = counts  # numbers of elements
        self.place = place
        self.nbytes = nbytes  # bytes of all tensors and of the padding between them
        self.flags = flags
        self._offsets: Sequence[int] = ()

    def __reduce__(self) -> Any:
        return TensorBucket, (
            self.dtype,
            self.shapes,
            self.counts,
            self.place,
            self.nbytes,
            self.flags,
        )

    def moved(self, start: int) -> TensorBucket:
        """See `TensorColumns.moved`."""
        return TensorBucket(
            self.dtype, self.shapes, self.counts, self.place - start, self.nbytes, self.flags
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[TensorRef]:
        return map(TensorRef._make, self.rows())

    @overload
    def __getitem__(self, place: int) -> TensorRef: ...
    @overload
    def __getitem__(self, place: slice) -> list[TensorRef]: ...
    def __getitem__(self, place: int | slice) -> TensorRef | list[TensorRef]:
        if isinstance(place, slice):
            return list(self)[place]
        count, offset = self.counts[place], self.offsets[place]
        address = self.place + offset if self.place >= 0 else self.place - offset
        return TensorRef(
            self.dtype,
            self.shapes[place],
            None,
            address,
            count * DTYPES[self.dtype].itemsize,
            self.flags,
        )

    def rows(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    @property
    def offsets(self) -> Sequence[int]:
        """The distances in bytes from the first tensor to each."""
        if not self._offsets:
            itemsize = DTYPES[self.dtype].itemsize
            unit = unit_of(itemsize, self.counts)
            self._offsets = [
                0,
                *itertools.accumulate(
                    [-(-count // unit) * unit * itemsize for count in self.counts[:-1]]
                ),
            ]
        return self._offsets

    @property
    def whole(self) -> TensorRef:
        """A reference to all of the bucket's memory as one tensor."""
        return TensorRef(
            self.dtype,
            (self.nbytes // DTYPES[self.dtype].itemsize,),
            None,
            self.place,
            self.nbytes,
            self.flags,
        )

    def views(self, payload: memoryview, borrow: Callable[[TensorRef], Any]) -> list[torch.Tensor]:
        """Return all tensors. Each has its own storage over the shared run of memory."""
        memory, start = (payload, -1 - self.place) if self.place < 0 else (borrow(self.whole), 0)
        make, dtype = torch.frombuffer, DTYPES[self.dtype]
        found = [
            make(memory, dtype=dtype, count=count, offset=start + offset)
            for count, offset in zip(self.counts, self.offsets, strict=True)
        ]
        for tensor, shape in zip(found, self.shapes, strict=True):
            if len(shape) != 1:
                tensor.resize_(shape)
        return found


def unit_of(itemsize: int, counts: Sequence[int]) -> int:
    """Return a number of elements. The tensors of a bucket are padded to multiples of it, so that
    the next one is aligned."""
    return 1 if max(counts) == 1 else max(1, ALIGNMENT // itemsize)


@overload
def rows_of(refs: Sequence[TensorRef]) -> Iterable[Row]: ...
@overload
def rows_of(refs: Sequence[TensorRef | None]) -> Iterable[Row | None]: ...
def rows_of(refs: Sequence[TensorRef | None]) -> Iterable[Row | None]:
    """Return references as rows. Those in columns or buckets do not become objects."""
    # isinstance of a `Sequence` takes four times as long
    return refs.rows() if type(refs) is TensorColumns or type(refs) is TensorBucket else refs


def flags_in(refs: Sequence[TensorRef]) -> Sequence[int]:
    """Return the flags of each reference."""
    if type(refs) is TensorBucket:
        return [refs.flags] * len(refs)
    return refs.columns[FLAGS] if type(refs) is TensorColumns else [ref.flags for ref in refs]


def lent(refs: Sequence[TensorRef | None]) -> list[TensorRef]:
    """Return the references to shared memory, each slot once. The sender waits for their return."""
    if type(refs) is TensorBucket:
        return [refs.whole] if refs.place >= 0 else []
    return [TensorRef._make(row) for row in rows_of(refs) if row is not None and row[PLACE] >= 0]


class SparseParts(NamedTuple):
    """The indices and values of a sparse tensor. Their places are offsets from the tensor's
    place."""

    layout: int
    is_coalesced: bool
    parts: tuple[TensorRef, ...]


Form = tuple[int, ...] | SparseParts | None  # the stride; None: contiguous
REQUIRES_GRAD = 1
LEAF = 2
PARAMETER = 4
# Other processes also read this slot, or the next worker reads it again. So the receiver needs its
# own private view.
SHARED = 8
# The gaps between the elements were not sent. The tensor is sent densely, and the receiver spreads
# it out to its strides.
SPREAD = 16
HOOKED = 32  # a leaf with hooks, which a backward calls when it reaches the leaf
# multiplied by the code of the device (`accelerator.device_code`) on which the receiver gets it
DEVICE = 64


def is_like_a_loss(tensor: torch.Tensor) -> bool:
    """Return whether this may be a loss, or the gradient of one, which workers predict: see
    `EagerOptions`."""
    return tensor.numel() == 1 and tensor.dtype in LOSSES and tensor.layout is torch.strided


def flags_of(tensor: torch.Tensor) -> int:
    """Return the properties that the receiver must give the tensor, so that `fn` sees what it would
    see in the caller."""
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_leaf:
        flags |= LEAF
        if flags & REQUIRES_GRAD and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            flags |= HOOKED
    if type(tensor) is torch.nn.Parameter:  # isinstance would run torch's metaclass, in Python
        flags |= PARAMETER
    return flags


def with_more_behind(refs: Sequence[TensorRef]) -> set[int]:
    """Return the numbers of the tensors for which a backward does more in the caller than add to
    `.grad`. The numbers count the tensors that need gradients."""
    needing = [flags for flags in flags_in(refs) if flags & REQUIRES_GRAD]
    return {number for number, flags in enumerate(needing) if not flags & LEAF or flags & HOOKED}


def check_carriable(
    tensor: torch.Tensor, owner: str, index: int | None = None, kind: str = ""
) -> None:
    """Reject a tensor that cannot be sent, before anything runs. `kind` is that of the pool's
    devices, if it has any.

    Raises:
        TypeError: the tensor cannot be sent. The message names the owner (for example "item 3") and
            the property that prevents it.
    """
    if type(tensor) is torch.Tensor and has_plain_memory(tensor) and not has_tangent(tensor):
        return
    reason = None
    if is_lazy(tensor):
        reason = (
            "a lazy module has not made it yet; run the module once, before you pass it to the pool"
        )
    elif tensor.is_nested:
        reason = "it is nested; pass its parts as a list (tensor.unbind())"
    elif tensor.layout is not torch.strided and tensor.layout not in SPARSE_LAYOUTS:
        reason = f"its layout is {tensor.layout}; pass tensor.to_dense()"
    elif not tensor.is_cpu and tensor.device.type != kind:
        reason = (
            f"its device is {tensor.device}; pass tensor.cpu(), or make the pool with devices=..."
        )
    elif tensor.is_quantized:
        reason = f"its dtype is {tensor.dtype}; pass tensor.dequantize()"
    elif is_functorch_wrapped(tensor):
        reason = f"it belongs to a torch.func transform; inside of one, {FOLLOWED}"
    elif has_tangent(tensor):
        reason = f"it has a tangent, which would be lost; for dual tensors, {FOLLOWED}"
    if reason is not None:
        owner = owner if index is None else f"{owner} {index}"
        raise TypeError(f"{owner} holds a tensor that cannot be sent to or from a worker: {reason}")


LAZY = torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, *LAZY})  # classes that need not be sent


# The methods by which a tensor is sent and rebuilt. If a class overrides one of them, the tensor
# could be sent as something that it is not.
MEASURES = (
    *(
        "shape",
        "size",
        "dim",
        "numel",
        "nbytes",
        "dtype",
        "layout",
        "device",
        "is_cpu",
        "stride",
        "storage_offset",
    ),
    *(
        "element_size",
        "is_contiguous",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "is_nested",
        "detach",
        "view",
        "view_as",
    ),
    *(
        "untyped_storage",
        "data_ptr",
        "is_conj",
        "is_neg",
        "is_inference",
        "_version",
        "_is_zerotensor",
        "to_dense",
    ),
)


def check_class(tensor: torch.Tensor) -> None:
    """Reject a tensor that cannot be rebuilt by giving a plain tensor its class.

    Raises:
        TypeError: the message names the class and the remedy.
    """
    kind = type(tensor)
    name = f"a tensor of class {kind.__module__}.{kind.__qualname__}"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name}, whose __torch_dispatch__ may see other tensors than its own; pass the plain "
            "tensors that it is made of, and make it in the function"
        )
    own = [each for each in MEASURES if getattr(kind, each) is not getattr(torch.Tensor, each)]
    if kind.__basicsize__ != torch.Tensor.__basicsize__:
        own.append("__slots__")
    if own:
        raise TypeError(
            f"{name}, which has {own[0]} of its own; pass tensor.as_subclass(torch.Tensor), and "
            "take "
            f"as_subclass({kind.__name__}) of it in the function: gradients go through both"
        )


def need_no_pickle(values: Sequence[object]) -> bool:
    """Return whether `values` are plain tensors without attributes, and all different objects."""
    if len(values) > 1 and len({id(value) for value in values}) < len(values):
        return False
    return PLAIN.issuperset(map(type, values)) and not have_attributes(values)


def have_attributes(tensors: Sequence[Any]) -> bool:
    """Return whether one of the tensors has a class of its own, or attributes.

    Reading `__dict__` would give each tensor a dictionary, so it is read only if needed.
    """
    kinds = list(map(type, tensors))
    if not PLAIN.issuperset(kinds):
        return True
    return gc.get_referents(*tensors) != kinds and any(tensor.__dict__ for tensor in tensors)


def place_of(refs: Sequence[TensorRef | None], ref: TensorRef) -> int:
    """Return the place by which the memory of `ref`, one of `refs`, was borrowed."""
    return refs.place if type(refs) is TensorBucket else ref.place


def redirected(ref: TensorRef, code: int) -> TensorRef:
    """Return a reference to the same tensor for another device."""
    return ref._replace(flags=ref.flags % DEVICE + code * DEVICE)


def strided(
    memory: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], flags: int
) -> torch.Tensor:
    """Return the tensor that was sent as `memory`, one run. The result may be `memory` itself."""
    if flags & SPREAD:
        return spread(memory, shape, stride)
    return memory.as_strided_(shape, stride)


def spread(core: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Lay the elements of a dense run out again, with the gaps that were not sent."""
    kept = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    apart = torch.empty_strided(kept, stride, dtype=core.dtype, device=core.device).copy_(
        core.view(kept)
    )
    return apart.as_strided_(shape, stride)


def stand_in(ref: TensorRef) -> torch.Tensor:
    """Return a tensor with the shape, dtype and device of the dense one that `ref` names. It gets
    its memory later, which autograd does not notice."""
    device = device_of(ref.flags // DEVICE)
    return torch.empty_strided(
        ref.shape, (0,) * len(ref.shape), dtype=DTYPES[ref.dtype], device=device
    )


@overload
def views(
    refs: Sequence[TensorRef], payload: memoryview, borrow: Callable[[TensorRef], Any]
) -> list[torch.Tensor]: ...
@overload
def views(
    refs: Sequence[TensorRef | None], payload: memoryview, borrow: Callable[[TensorRef], Any]
) -> list[torch.Tensor | None]: ...
def views(
    refs: Sequence[TensorRef | None], payload: memoryview, borrow: Callable[[TensorRef], Any]
) -> Any:
    """Return the tensors that `refs` name, see `view`. Tensors that share one slot are copied,
    because one that is kept would keep the whole slot."""
    if type(refs) is TensorBucket:
        found = refs.views(payload, borrow)
        return [tensor.clone() for tensor in found] if refs.place >= 0 else found
    return [None if row is None else view(row, payload, borrow) for row in rows_of(refs)]


def view(row: Row, payload: memoryview, borrow: Callable[[TensorRef], Any]) -> torch.Tensor:
    """Return the tensor that `row` names, as a view of its memory, which lives as long as the
    tensor."""
    number, shape, form, place, nbytes, flags = row
    if flags >= DEVICE:
        return view_elsewhere(TensorRef._make(row), payload, borrow)
    if isinstance(form, SparseParts):
        return view_sparse(TensorRef._make(row), form, payload, borrow)
    dtype = DTYPES[number]
    if nbytes == 0:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
    elif place < 0:
        tensor = torch.frombuffer(
            payload, dtype=dtype, count=nbytes // dtype.itemsize, offset=-1 - place
        )
    else:
        tensor = torch.frombuffer(
            borrow(TensorRef._make(row)), dtype=dtype, count=nbytes // dtype.itemsize
        )
    if form is not None:
        return strided(tensor, shape, form, flags)
    if len(shape) != 1 or nbytes == 0:
        return tensor.resize_(shape)
    return tensor


def view_elsewhere(
    ref: TensorRef, payload: memoryview, borrow: Callable[[TensorRef], Any]
) -> torch.Tensor:
    """Copy the tensor to its device. It gets its strides there, because a copy between devices
    drops them if they have gaps."""
    device, stride = device_of(ref.flags // DEVICE), ref.form
    memory = borrow(ref) if ref.place >= 0 else None
    if isinstance(stride, SparseParts):
        return view(redirected(ref, 0), payload, lambda ref: memory).to(device)
    dtype = DTYPES[ref.dtype]
    flat_shape = (ref.nbytes // dtype.itemsize,)
    if isinstance(memory, Region):
        own = memory.copied()
        tensor = torch.empty(0, dtype=dtype, device=own.device).set_(
            own.untyped_storage(), 0, flat_shape, (1,)
        )
        tensor = tensor.to(device, non_blocking=True)
    else:
        tensor = view(
            ref._replace(shape=flat_shape, form=None, flags=0), payload, lambda ref: memory
        ).to(device)
    if stride is None:
        return tensor.resize_(ref.shape)
    return strided(tensor, ref.shape, stride, ref.flags)


def view_sparse(
    ref: TensorRef,
    form: SparseParts,
    payload: memoryview,
    borrow: Callable[[TensorRef], memoryview],
) -> torch.Tensor:
    """Build a sparse tensor whose indices and values are views."""
    memory = payload[-1 - ref.place :] if ref.place < 0 else borrow(ref)
    parts = [view(part, memory, borrow) for part in form.parts]
    layout = SPARSE_LAYOUTS[form.layout]
    tensor: torch.Tensor
    if layout is torch.sparse_coo:
        tensor = MAKE_COO(*parts, ref.shape, is_coalesced=form.is_coalesced, check_invariants=False)
    else:
        hear_of_beta_state()
        tensor = MAKE_COMPRESSED(*parts, ref.shape, layout=layout, check_invariants=False)
    return tensor


@functools.cache
def hear_of_beta_state() -> None:
    """Ignore PyTorch's warning at the first compressed tensor of a process. The process that made
    the tensor has shown it already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        MAKE_COMPRESSED([0, 0], [], [], (1, 1), layout=torch.sparse_csr, check_invariants=False)


# --- the sender: cores of tensors


INLINE_BYTES = 8192  # the most bytes of a tensor that is inline in the message
BLOCK_ALIGNMENT = 64  # of tensors in a slot, in bytes: the size of a cache line
# A tensor is sent with its gaps if it spans at most this many times the memory of its elements.
# Then most cache lines hold an element, and are read anyway.
GAPPED = 4


def dense_core(tensor: torch.Tensor) -> tuple[torch.Tensor, Form, int]:
    """Return the memory that is sent for `tensor`, as one run, and how to rebuild the tensor.

    That is its form, and SPREAD if the gaps were closed, otherwise 0. Strides are preserved even if
    they have gaps. Sums over other strides are added in a different order, so their bits differ.
    """
    if type(tensor) not in PLAIN:  # its class may have methods of these names
        tensor = plain_alias(tensor)
    if tensor.layout is not torch.strided:
        return sparse_core(tensor.detach())
    if tensor.is_contiguous() and not (
        tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    ):
        return tensor, None, 0
    if tensor._is_zerotensor():  # it has no memory
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"), None, 0
    core, stride = tensor.detach(), tensor.stride()
    if core.numel() == 0:
        return core, stride, 0
    # all elements are one number, as in the gradient of a sum
    if not (any(stride) or tensor.is_complex() or tensor.is_neg()):
        return core.as_strided((1,) * len(stride), stride), stride, 0
    for dim, step in enumerate(stride):
        if step == 0 and core.shape[dim] > 1:
            core = core.narrow(dim, 0, 1)
    # from the first element to the last, both included
    span = 1 + sum([(size - 1) * step for size, step in zip(core.shape, stride, strict=True)])
    if not (core.is_conj() or core.is_neg()):
        if span <= GAPPED * core.numel():
            return core.as_strided((span,), (1,)), stride, 0
    elif span == core.numel() and not overlaps(core):
        return core.resolve_conj().resolve_neg(), stride, 0
    return core.resolve_conj().resolve_neg().contiguous(), stride, SPREAD


def sparse_core(tensor: torch.Tensor) -> tuple[torch.Tensor, SparseParts, int]:
    """Return the indices and values of `tensor` as one run of bytes, and how to rebuild it."""
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
    core = (
        torch.frombuffer(memory, dtype=torch.uint8)
        if nbytes
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return (
        core,
        SparseParts(
            SPARSE_LAYOUTS.index(tensor.layout), is_coo and tensor.is_coalesced(), tuple(refs)
        ),
        0,
    )


def brought_here(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` to the CPU, with its strides."""
    if tensor.is_cpu or tensor.layout is not torch.strided or tensor._is_zerotensor():
        return tensor.detach().cpu()
    core, stride, how = dense_core(tensor.detach())
    here = core.cpu()
    if stride is None or isinstance(stride, SparseParts) or here.numel() == 0:
        return here
    return strided(here.as_strided((here.numel(),), (1,)), tuple(tensor.shape), stride, how)


def overlaps(core: torch.Tensor) -> bool:
    """Return whether elements share memory, so that strides cannot be rebuilt from separate
    elements."""
    reach = 0
    for step, size in sorted(zip(core.stride(), core.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def laid_out(
    tensors: Sequence[torch.Tensor], sharing: bool = False
) -> tuple[list[TensorRef], list[torch.Tensor], int]:
    """Return references to `tensors`, one after another in one run of memory, their cores, and the
    size of that memory.

    If `sharing`, tensors that share memory still do so in the result. But they do not share the
    version counter with which autograd counts writes.
    """
    refs, cores, offset = [], [], 0
    known: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        core, form, how = dense_core(tensor)
        nbytes = core.numel() * core.element_size()
        number = NUMBER_OF_DTYPE[tensor.dtype]
        place = known.setdefault((core.data_ptr(), nbytes), offset) if sharing else offset
        refs.append(
            TensorRef(number, tuple(tensor.shape), form, -1 - place, nbytes, flags_of(tensor) | how)
        )
        cores.append(core)
        if place == offset:
            offset += -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    return refs, cores, offset


def fill(memory: memoryview, refs: Sequence[TensorRef], cores: Sequence[torch.Tensor]) -> None:
    """Copy cores into the memory whose size `laid_out` has computed."""
    for ref, core in zip(refs, cores, strict=True):
        if ref.nbytes:
            copy_into(memory[-1 - ref.place : -1 - ref.place + ref.nbytes], core)


def copy_into(memory: memoryview, core: torch.Tensor) -> None:
    """Copy a core, which is not empty, into memory of the same size."""
    torch.frombuffer(memory, dtype=torch.uint8).copy_(bytes_of(core))


# --- the sender: tensors into messages and slots


CONSTANT = "mpgrad: constant"  # marks a buffer that cannot be written to
INLINE_TOGETHER = 32768  # the most bytes of a bucket that is inline in the message
BUCKETED_BYTES = 256 << 10  # the most bytes of a tensor in a bucket; a larger one gets its own slot
# The same for results. The caller copies them out, so that one does not keep all alive.
ANSWERED_BYTES = 64 << 10
MANY = 8  # references are pickled in columns if a message has at least this many
PADDING = [bytes(count) for count in range(ALIGNMENT)]


class PackedTensor(NamedTuple):
    """A tensor that is ready to send: its bytes, or memory that must live until the receiver
    returns it."""

    dtype: int
    shape: tuple[int, ...]
    form: Form
    address: int  # -1 if it is inline in the message
    nbytes: int
    flags: int
    body: bytes | None
    holder: Slot | BorrowedMemory | None


def packed_again(
    ref: TensorRef, payload: memoryview, memories: Mapping[int, BorrowedMemory | Slot]
) -> PackedTensor:
    """Make a tensor that one process has sent ready to be sent to another."""
    dtype, shape, form, place, nbytes, flags = ref
    if flags & REQUIRES_GRAD and not flags & LEAF:
        flags &= ~PARAMETER  # the output of a call is not a parameter, even if it was one there
    if place >= 0:
        holder = memories[place]
        # A device's tensor has been copied into a slot of this process.
        address = holder.address if isinstance(holder, Slot) else place
        return PackedTensor(dtype, shape, form, address, nbytes, flags | SHARED, None, holder)
    return PackedTensor(
        dtype,
        shape,
        form,
        -1,
        nbytes,
        flags,
        bytes(payload[-1 - place : -1 - place + nbytes]),
        None,
    )


class Devices(Protocol):
    """The devices of a pool, as one side of it sees them."""

    kind: str

    def way_to(self, code: int) -> DeviceChannel | None:
        """Return the channel by which a tensor on that device is sent. None: it goes through the
        CPU's memory."""
        ...


class Packer:
    """Turns tensors into references. `known(core)` returns the address of a tensor that is already
    in shared memory.

    If `lasting`, a slot can be sent several times, and its content does not depend on its readers.
    """

    def __init__(
        self,
        arena: Arena,
        known: Callable[[torch.Tensor], tuple[int, BorrowedMemory] | None] | None = None,
        lasting: bool = False,
        devices: Devices | None = None,
        most_bucketed: int = BUCKETED_BYTES,
        kept_slots: KeptSlots | None = None,
    ) -> None:
        self._arena, self._kept_slots = arena, kept_slots
        self._known = known
        self._devices = devices
        # the kind of devices whose tensors can be packed
        self.kind = "" if devices is None else devices.kind
        self._flags = SHARED if lasting else 0
        self._most_bucketed = most_bucketed
        self.bytes_copied = 0

    def together(
        self, tensors: Sequence[torch.Tensor | None], flags: Sequence[int]
    ) -> PackedTensors | None:
        """Pack the tensors together. Return None if they are few, or one is missing or must be sent
        another way."""
        return self.bucketed(tensors, flags) or (
            self._all_inline(tensors, flags) if len(tensors) >= MANY else None
        )

    def bucketed(
        self, tensors: Sequence[torch.Tensor | None], flags: Sequence[int]
    ) -> PackedTensors | None:
        """Pack the tensors as a bucket. Return None if they are not alike, are fewer than two, or
        are too large."""
        alike = are_alike(tensors) if len(tensors) > 1 and len(set(flags)) == 1 else None
        if alike is None:
            return None
        counts = [tensor.numel() for tensor in alike]
        dtype = alike[0].dtype
        if 0 in counts or max(counts) * dtype.itemsize > self._most_bucketed:
            return None
        unit = unit_of(dtype.itemsize, counts)
        parts = alike if unit == 1 else filled_up(alike, counts, unit)
        nbytes = sum([-(-count // unit) for count in counts]) * unit * dtype.itemsize
        # tensors of a pool with devices are named one by one
        if nbytes > INLINE_TOGETHER and self._devices is not None:
            return None
        shapes = [tuple(tensor.shape) for tensor in alike]
        with torch.no_grad(), without_autocast():
            if nbytes <= INLINE_TOGETHER:
                flat = flattened(parts)
                body, slot, place = ctypes.string_at(flat.data_ptr(), nbytes), None, -1
            else:
                slot = self._arena.allocate(nbytes)
                body, place = b"", slot.address
                flat = torch.frombuffer(slot.memory, dtype=dtype)
                torch.cat([part if part.dim() == 1 else part.view(-1) for part in parts], out=flat)
        self.bytes_copied += sum(counts) * dtype.itemsize
        how = 0 if slot is None else self._flags
        bucket = TensorBucket(NUMBER_OF_DTYPE[dtype], shapes, counts, place, nbytes, flags[0] | how)
        return PackedTensors(bucket, nbytes, body, slot)

    def _all_inline(
        self, tensors: Sequence[torch.Tensor | None], flags: Sequence[int]
    ) -> PackedTensors | None:
        """Pack the tensors in columns. Return None if one of them must be sent another way."""
        rows, bodies, offset, copied = list[Row](), list[bytes](), 0, 0
        for tensor, own in zip(tensors, flags, strict=True):
            if tensor is None or tensor.layout is not torch.strided or not tensor.is_cpu:
                return None
            # an expanded tensor is sent without repetition
            if tensor.nbytes > INLINE_BYTES and 0 not in tensor.stride():
                return None
            core, form, how = dense_core(tensor)
            nbytes = core.nbytes
            if nbytes > INLINE_BYTES:
                return None
            body = ctypes.string_at(core.data_ptr(), nbytes) if nbytes else b""
            rest = -nbytes % ALIGNMENT
            rows.append(
                (
                    NUMBER_OF_DTYPE[tensor.dtype],
                    tuple(tensor.shape),
                    form,
                    -1 - offset,
                    nbytes,
                    own | how,
                )
            )
            bodies.append(body + PADDING[rest] if rest else body)
            offset += nbytes + rest
            copied += nbytes
        self.bytes_copied += copied
        return PackedTensors(
            TensorColumns(*zip(*rows, strict=True)), offset, b"".join(bodies), None
        )

    def pack(
        self, tensor: torch.Tensor, flags: int, code: int | None = None, staged: bool = False
    ) -> PackedTensor:
        """Pack one tensor. `code` is the device on which the receiver gets it; None means the
        tensor's own. `staged` tensors go through the CPU's memory."""
        if code or not tensor.is_cpu:
            return self._pack_for_device(
                tensor, flags, device_code(tensor) if code is None else code, staged
            )
        core, form, how = dense_core(tensor)
        flags |= how
        nbytes = core.numel() * core.element_size()
        number, shape = NUMBER_OF_DTYPE[tensor.dtype], tuple(tensor.shape)
        if nbytes <= INLINE_BYTES:
            self.bytes_copied += nbytes
            body = ctypes.string_at(core.data_ptr(), nbytes) if nbytes else b""
            return PackedTensor(number, shape, form, -1, nbytes, flags, body, None)
        if self._known is not None and (found := self._known(core)) is not None:
            address, holder = found
            return PackedTensor(number, shape, form, address, nbytes, flags | SHARED, None, holder)
        slot = self._arena.allocate(nbytes)
        copy_into(slot.memory, core)
        self.bytes_copied += nbytes
        return packed_in(slot, tensor, form, flags | self._flags)

    def _pack_for_device(
        self, tensor: torch.Tensor, flags: int, code: int, staged: bool
    ) -> PackedTensor:
        """Pack a tensor that is on a device, or will be.

        Small ones also use a slot there. An inline tensor would have to be copied to the CPU, and
        the copy would wait for all earlier work of the device.
        """
        channel = None if staged or code == 0 else self._way(tensor)
        if channel is None:
            packed = self.pack(brought_here(tensor), flags)
            return packed._replace(flags=packed.flags | code * DEVICE)
        core, form, how = dense_core(tensor.detach())
        slot = channel.write(core)
        self.bytes_copied += slot.memory.nbytes
        return packed_in(slot, tensor, form, flags | how | code * DEVICE)

    def _way(self, tensor: torch.Tensor) -> DeviceChannel | None:
        is_plain = (
            not tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.numel() > 0
            and not tensor._is_zerotensor()
        )
        return (
            self._devices.way_to(device_code(tensor))
            if is_plain and self._devices is not None
            else None
        )

    def pack_together(
        self, tensors: Sequence[torch.Tensor], sharing: bool = False, staged: bool = False
    ) -> tuple[list[TensorRef], Slot | None, list[Slot]]:
        """Pack all `tensors` into one slot, as if the slot were a message's payload. If `sharing`,
        tensors that share memory still do so.

        Unless `staged`, tensors on devices have slots of their own there. Large ones that may be
        sent again also have their own slots.
        """
        if not tensors:
            return [], None, []
        apart = [self._packed_apart(tensor, sharing, staged) for tensor in tensors]
        staying = [tensor for tensor, packed in zip(tensors, apart, strict=True) if packed is None]
        through_here = [tensor if tensor.is_cpu else brought_here(tensor) for tensor in staying]
        refs, cores, nbytes = laid_out(through_here, sharing)
        slot = self._arena.allocate(nbytes) if nbytes else None
        if slot is not None:
            fill(slot.memory, refs, cores)
            self.bytes_copied += nbytes
        here, found, slots = iter(refs), list[TensorRef](), list[Slot]()
        for tensor, packed in zip(tensors, apart, strict=True):
            if packed is None:
                ref = next(here)
                if code := device_code(tensor):
                    ref = ref._replace(flags=ref.flags & SPREAD | flags_of(tensor) | code * DEVICE)
                found.append(ref)
            else:
                assert isinstance(packed.holder, Slot)
                slots.append(packed.holder)
                found.append(Payload().add(packed))
        return found, slot, slots

    def _packed_apart(
        self, tensor: torch.Tensor, sharing: bool, staged: bool
    ) -> PackedTensor | None:
        """Pack a tensor into its own slot, on its device, or here if it is large."""
        if not staged and self._way(tensor) is not None:
            code = device_code(tensor)
            return self._pack_for_device(tensor, flags_of(tensor), code, staged=False)
        is_plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
        if self._kept_slots is None or sharing or not is_plain or tensor.nbytes <= COPY_BYTES:
            return None
        core, form, how = dense_core(tensor)
        nbytes = core.numel() * core.element_size()
        if nbytes <= COPY_BYTES or how & SPREAD:  # spread: the core is a new copy each time
            return None
        constant = tensor if CONSTANT in tensor.__dict__ else None
        slot = self._kept_slots.slot_with(core.data_ptr(), nbytes, constant)
        return packed_in(slot, tensor, form, flags_of(tensor) | how | SHARED)


def packed_in(slot: Slot, tensor: torch.Tensor, form: Form, flags: int) -> PackedTensor:
    shape, number = tuple(tensor.shape), NUMBER_OF_DTYPE[tensor.dtype]
    return PackedTensor(number, shape, form, slot.address, slot.memory.nbytes, flags, None, slot)


def staged_again(
    packer: Packer,
    ref: TensorRef,
    payload: memoryview,
    memories: Mapping[int, BorrowedMemory | Slot],
) -> PackedTensor:
    """Do the same as `packed_again`, for a worker that can read only the CPU's memory."""
    if ref.place < 0 or not isinstance(memories[ref.place], Slot):
        return packed_again(ref, payload, memories)
    tensor = view(ref, payload, lambda ref: memories[ref.place].memory)
    return packer.pack(tensor, ref.flags % DEVICE, ref.flags // DEVICE, staged=True)


def are_alike(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """Return the tensors if all of them are plain, contiguous, in the CPU's memory, and of one
    dtype; otherwise None."""
    found = [tensor for tensor in tensors if type(tensor) is torch.Tensor]
    is_whole = (
        len(found) == len(tensors)
        and have_plain_memory(found)
        and len({tensor.dtype for tensor in found}) == 1
    )
    return found if is_whole and all(map(torch.Tensor.is_contiguous, found)) else None


def filled_up(
    tensors: Sequence[torch.Tensor], counts: Sequence[int], unit: int
) -> list[torch.Tensor]:
    """Return the tensors, each followed by padding up to a multiple of `unit` elements."""
    parts: list[torch.Tensor] = []
    fillings = fillings_of(tensors[0].dtype, unit)
    for tensor, count in zip(tensors, counts, strict=True):
        parts.append(tensor)
        if rest := count % unit:
            parts.append(fillings[unit - rest])
    return parts


@functools.cache
def fillings_of(dtype: torch.dtype, unit: int) -> list[torch.Tensor]:
    """Return tensors of zeros, one of each length below `unit`."""
    with torch.inference_mode(False):
        return [torch.zeros(count, dtype=dtype, device="cpu") for count in range(unit)]


class PackedTensors:
    """Many tensors that are ready to send together."""

    __slots__ = ("body", "holder", "nbytes", "refs")

    def __init__(
        self, refs: TensorBucket | TensorColumns, nbytes: int, body: bytes, holder: Slot | None
    ) -> None:
        self.refs = refs  # places of inline tensors are offsets in the body
        self.nbytes = nbytes
        self.body = body
        self.holder = holder  # the slot of their memory, if they are not inline in the message

    @property
    def message_bytes(self) -> int:
        return len(self.body)


class Payload:
    """The bytes of the small tensors of one message."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.nbytes = 0

    def add(self, packed: PackedTensor) -> TensorRef:
        dtype, shape, form, address, nbytes, flags, body, _ = packed
        if body is not None:
            address = self._append(body)
        # `TensorRef(...)` would run Python code
        return tuple.__new__(TensorRef, (dtype, shape, form, address, nbytes, flags))

    @overload
    def add_all(self, packed: Sequence[PackedTensor] | PackedTensors) -> Sequence[TensorRef]: ...
    @overload
    def add_all(
        self, packed: Sequence[PackedTensor | None] | PackedTensors
    ) -> Sequence[TensorRef | None]: ...
    def add_all(
        self, packed: Sequence[PackedTensor | None] | PackedTensors
    ) -> Sequence[TensorRef | None]:
        """Return references to the tensors, None for missing ones. Inline tensors become a part of
        this payload."""
        if isinstance(packed, PackedTensors):
            start = -1 - self._append(packed.body) if packed.body else 0
            return packed.refs.moved(start) if start else packed.refs
        if len(packed) < MANY or None in packed:
            return [None if each is None else self.add(each) for each in packed]
        dtypes, shapes, forms, addresses, sizes, flags, bodies, _ = zip(*packed, strict=True)
        places = [
            where if body is None else self._append(body)
            for where, body in zip(addresses, bodies, strict=True)
        ]
        return TensorColumns(dtypes, shapes, forms, places, sizes, flags)

    def _append(self, body: bytes) -> int:
        """Append the bytes, and return their place."""
        offset, nbytes = self.nbytes, len(body)
        rest = -nbytes % ALIGNMENT
        self.parts.append(body)
        if rest:
            self.parts.append(PADDING[rest])
        self.nbytes = offset + nbytes + rest
        return -1 - offset
