"""Tensors in messages, as references; how whoever receives one looks at them; and the core of a
tensor, the one run of memory that travels for it. `tensor_packing` puts cores into messages and
slots. Both sides.

Autograd and pickle both want whole tensors; a message wants bytes and numbers. A `TensorRef` is
that: what to view, and where. A sparse tensor is one reference too: to a run of memory in which its
indices and values lie like tensors in a message. Many references go together, in columns, or as a
bucket where the tensors are alike.

    sender     tensor ──► dense_core ──► run of memory, Form, SPREAD or 0
               tensors ──► laid_out ──► references to one run after another, cores ──► fill
    receiver   references, memory ──► view, views ──► tensors
Nothing travels of what a tensor's storage holds before and behind it; what lies between its
elements does where that is cheaper than to close the gaps.

Guarantees: strides survive; an expanded tensor travels as small as it is; sparse tensors keep
    layout, order of entries and whether they are coalesced; a received tensor is never a view in
    autograd's sense, so it may be written in place like any fresh tensor; its storage begins and
    ends with what travelled, so `as_strided` cannot reach other memory.
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, overload

import torch
from torch.nn.parameter import is_lazy

from mpgrad.memory.accelerator import Region, device_of
from mpgrad.torch_state.private import has_plain_memory, has_tangent, is_functorch_wrapped

__all__ = [
    "ALIGNMENT",
    "DEVICE",
    "DTYPES",
    "GAPPED",
    "HOOKED",
    "LEAF",
    "NUMBER_OF_DTYPE",
    "PARAMETER",
    "PLACE",
    "REQUIRES_GRAD",
    "RIDE_BYTES",
    "SHARED",
    "SPARSE_LAYOUTS",
    "SPREAD",
    "Bucket",
    "Columns",
    "Form",
    "Row",
    "Sparse",
    "TensorRef",
    "brought_here",
    "check_carriable",
    "copy_into",
    "dense_core",
    "fill",
    "flags_in",
    "flags_of",
    "have_attributes",
    "laid_out",
    "lent",
    "need_no_pickle",
    "overlaps",
    "place_of",
    "redirected",
    "rows_of",
    "stand_in",
    "strided",
    "unit_of",
    "view",
    "view_at",
    "views",
    "with_more_behind",
]

FOLLOWED = "use map, starmap, apply, reduce or map_reduce"
ALIGNMENT = 16  # of a tensor within a message: the widest element, complex128
# Held by number in messages, so the order is part of the protocol between a parent and its own workers only.
DTYPES = tuple(sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str))
NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}
SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)
MAKE_COO: Any = torch.sparse_coo_tensor  # their type hints leave out the indices
MAKE_COMPRESSED: Any = torch.sparse_compressed_tensor


class TensorRef(NamedTuple):
    """A tensor on its way."""

    dtype: int
    shape: tuple[int, ...]
    form: Form
    place: int  # 0 or more: an address in shared memory; below: -1 - offset in the message's payload
    nbytes: int
    flags: int


Row = tuple[int, tuple[int, ...], "Form", int, int, int]  # what a reference says, without the names
PLACE: Final = 3  # in a row
FLAGS: Final = 5


class Columns(Sequence[TensorRef]):
    """References to many tensors, a column for each of their fields.

    They pickle in a tenth of the time. And whoever keeps them keeps no object for each, through which the collector of cycles
    would have to walk again and again.
    """

    __slots__ = ("columns",)

    def __init__(self, *columns: Sequence[Any]) -> None:
        self.columns = columns

    def __reduce__(self) -> Any:
        return Columns, self.columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[TensorRef]:
        return map(TensorRef._make, self.rows())

    @overload
    def __getitem__(self, place: int) -> TensorRef: ...
    @overload
    def __getitem__(self, place: slice) -> Columns: ...
    def __getitem__(self, place: int | slice) -> TensorRef | Columns:
        found = [column[place] for column in self.columns]
        return Columns(*found) if isinstance(place, slice) else TensorRef._make(found)

    def rows(self) -> Iterator[Row]:
        return zip(*self.columns, strict=True)


class Bucket(Sequence[TensorRef]):
    """References to many tensors of one dtype and the same flags, which lie one after another in one run of memory.

    What is done with them is done in a few steps for all. In shared memory they have one slot together, of which a reference
    to one of them says nothing: see `lent`, `views` and `view_at`.
    """

    __slots__ = ("_offsets", "counts", "dtype", "flags", "nbytes", "place", "shapes")

    def __init__(
        self, dtype: int, shapes: Sequence[tuple[int, ...]], counts: Sequence[int], place: int, nbytes: int, flags: int
    ) -> None:
        self.dtype = dtype
        self.shapes = shapes
        self.counts = counts  # of elements
        self.place = place
        self.nbytes = nbytes  # of all, and of what fills the gaps
        self.flags = flags
        self._offsets: Sequence[int] = ()

    def __reduce__(self) -> Any:
        return Bucket, self.fields

    @property
    def fields(self) -> tuple[int, Sequence[tuple[int, ...]], Sequence[int], int, int, int]:
        return self.dtype, self.shapes, self.counts, self.place, self.nbytes, self.flags

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
        return TensorRef(self.dtype, self.shapes[place], None, address, count * DTYPES[self.dtype].itemsize, self.flags)

    def rows(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    @property
    def offsets(self) -> Sequence[int]:
        """Bytes from the first one to each."""
        if not self._offsets:
            itemsize = DTYPES[self.dtype].itemsize
            unit = unit_of(itemsize, self.counts)
            self._offsets = [0, *itertools.accumulate([-(-count // unit) * unit * itemsize for count in self.counts[:-1]])]
        return self._offsets

    @property
    def whole(self) -> TensorRef:
        """All of its memory as one tensor."""
        return TensorRef(self.dtype, (self.nbytes // DTYPES[self.dtype].itemsize,), None, self.place, self.nbytes, self.flags)

    def views(self, payload: memoryview, borrow: Callable[[TensorRef], Any]) -> list[torch.Tensor]:
        """All of them, each with a storage of its own over the one memory."""
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
    """Of how many elements a multiple is what each tensor of a bucket takes, so that the next one is aligned."""
    return 1 if max(counts) == 1 else max(1, ALIGNMENT // itemsize)


@overload
def rows_of(refs: Sequence[TensorRef]) -> Iterable[Row]: ...
@overload
def rows_of(refs: Sequence[TensorRef | None]) -> Iterable[Row | None]: ...
def rows_of(refs: Sequence[TensorRef | None]) -> Iterable[Row | None]:
    """The same without an object each, where they are together."""
    # to ask isinstance of a `Sequence` takes four times as long
    return refs.rows() if type(refs) is Columns or type(refs) is Bucket else refs


def flags_in(refs: Sequence[TensorRef]) -> Sequence[int]:
    """Of each reference."""
    if type(refs) is Bucket:
        return [refs.flags] * len(refs)
    return refs.columns[FLAGS] if type(refs) is Columns else [ref.flags for ref in refs]


def lent(refs: Sequence[TensorRef | None]) -> list[TensorRef]:
    """Those that lie in shared memory, each slot once: the sender waits until they are given back."""
    if type(refs) is Bucket:
        return [refs.whole] if refs.place >= 0 else []
    return [TensorRef._make(row) for row in rows_of(refs) if row is not None and row[PLACE] >= 0]


class Sparse(NamedTuple):
    """What a sparse tensor is made of: indices and values, whose places are offsets from its own."""

    layout: int
    is_coalesced: bool
    parts: tuple[TensorRef, ...]


Form = tuple[int, ...] | Sparse | None  # the stride; None: contiguous
REQUIRES_GRAD = 1
LEAF = 2
PARAMETER = 4
SHARED = 8  # this slot is read by others too, or again by the next worker: the receiver needs its own private view
SPREAD = 16  # the gaps between its elements stay behind: it travels dense, and is spread out to its strides by the receiver
HOOKED = 32  # a leaf with hooks, which a backward that comes to it calls
DEVICE = 64  # times the code of the device (`accelerator.device_code`) on which the receiver is to have it


def flags_of(tensor: torch.Tensor) -> int:
    """How the receiver has to dress the tensor up so that `fn` sees what it would see in the caller."""
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_leaf:
        flags |= LEAF
        if flags & REQUIRES_GRAD and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            flags |= HOOKED
    if type(tensor) is torch.nn.Parameter:  # isinstance would ask torch's metaclass, in Python
        flags |= PARAMETER
    return flags


def with_more_behind(refs: Sequence[TensorRef]) -> set[int]:
    """Those, by number among the ones that need gradients, for which a backward does more in the caller than to add to them."""
    needing = [flags for flags in flags_in(refs) if flags & REQUIRES_GRAD]
    return {number for number, flags in enumerate(needing) if not flags & LEAF or flags & HOOKED}


def check_carriable(tensor: torch.Tensor, owner: str, index: int | None = None, kind: str = "") -> None:
    """Refuse by name what cannot be carried, before anything runs. `kind` is that of the pool's devices, if it has some.

    Raises:
        TypeError: naming the owner (for example "item 3") and the property that cannot be carried.
    """
    if type(tensor) is torch.Tensor and has_plain_memory(tensor) and not has_tangent(tensor):
        return
    reason = None
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        reason = f"its type is {type(tensor).__name__}, and only torch.Tensor and nn.Parameter are carried"
        if is_lazy(tensor):
            reason = "a lazy module has not made it yet; run the module once, before it goes to the pool"
    elif tensor.is_nested:
        reason = "it is nested; pass its parts as a list (tensor.unbind())"
    elif tensor.layout is not torch.strided and tensor.layout not in SPARSE_LAYOUTS:
        reason = f"its layout is {tensor.layout}; pass tensor.to_dense()"
    elif not tensor.is_cpu and tensor.device.type != kind:
        reason = f"its device is {tensor.device}; pass tensor.cpu(), or make the pool with devices=..."
    elif tensor.is_quantized:
        reason = f"its dtype is {tensor.dtype}; pass tensor.dequantize()"
    elif is_functorch_wrapped(tensor):
        reason = f"it belongs to a torch.func transform; inside of one, {FOLLOWED}"
    elif has_tangent(tensor):
        reason = f"it has a tangent, which would be lost; for dual tensors, {FOLLOWED}"
    if reason is not None:
        owner = owner if index is None else f"{owner} {index}"
        raise TypeError(f"{owner} holds a tensor that cannot be carried to or from a worker: {reason}")


def need_no_pickle(values: Sequence[object]) -> bool:
    """Whether `values` are tensors, no two of them the same one, and nobody has given one of them attributes."""
    if len(values) > 1 and len({id(value) for value in values}) < len(values):
        return False
    return all(isinstance(value, torch.Tensor) for value in values) and not have_attributes(values)


def have_attributes(tensors: Sequence[Any]) -> bool:
    """Whether somebody has given attributes to one of them. To be asked for its `__dict__` gives a tensor one."""
    return gc.get_referents(*tensors) != list(map(type, tensors)) and any(tensor.__dict__ for tensor in tensors)


def place_of(refs: Sequence[TensorRef | None], ref: TensorRef) -> int:
    """Under which the memory of `ref`, one of `refs`, was borrowed."""
    return refs.place if type(refs) is Bucket else ref.place


def redirected(ref: TensorRef, code: int) -> TensorRef:
    """The same tensor, to be had on another device."""
    return ref._replace(flags=ref.flags % DEVICE + code * DEVICE)


def strided(memory: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], flags: int) -> torch.Tensor:
    """The tensor that travelled as `memory`: one run, which may be `memory` itself afterwards."""
    if flags & SPREAD:
        return spread(memory, shape, stride)
    return memory.as_strided_(shape, stride)


def spread(core: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """The elements of a dense run, laid out with the gaps that were left behind."""
    kept = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    apart = torch.empty_strided(kept, stride, dtype=core.dtype, device=core.device).copy_(core.view(kept))
    return apart.as_strided_(shape, stride)


def stand_in(ref: TensorRef) -> torch.Tensor:
    """A tensor like the dense one that `ref` stands for, to be given its memory later; autograd does not see the difference."""
    device = device_of(ref.flags // DEVICE)
    return torch.empty_strided(ref.shape, (0,) * len(ref.shape), dtype=DTYPES[ref.dtype], device=device)


@overload
def views(refs: Sequence[TensorRef], payload: memoryview, borrow: Callable[[TensorRef], Any]) -> list[torch.Tensor]: ...
@overload
def views(
    refs: Sequence[TensorRef | None], payload: memoryview, borrow: Callable[[TensorRef], Any]
) -> list[torch.Tensor | None]: ...
def views(refs: Sequence[TensorRef | None], payload: memoryview, borrow: Callable[[TensorRef], Any]) -> Any:
    """The tensors that `refs` stand for, see `view`; copied, where they lie in one slot, which one that is kept would keep."""
    if type(refs) is Bucket:
        found = refs.views(payload, borrow)
        return [tensor.clone() for tensor in found] if refs.place >= 0 else found
    return [None if row is None else view(row, payload, borrow) for row in rows_of(refs)]


def view_at(
    refs: Sequence[TensorRef | None], place: int, payload: memoryview, borrow: Callable[[TensorRef], Any]
) -> torch.Tensor | None:
    """One of those tensors; None where there is none."""
    ref = refs[place]
    if ref is None:
        return None
    if type(refs) is Bucket and ref.place >= 0:
        within = memoryview(borrow(refs.whole))[ref.place - refs.place :]
        return view(ref, payload, lambda ref: within).clone()
    return view(ref, payload, borrow)


def view(row: Row, payload: memoryview, borrow: Callable[[TensorRef], Any]) -> torch.Tensor:
    """The tensor that `row` stands for, over the memory where it lies; the memory lives as long as the tensor."""
    number, shape, form, place, nbytes, flags = row
    if flags >= DEVICE:
        return view_elsewhere(TensorRef._make(row), payload, borrow)
    if isinstance(form, Sparse):
        return view_sparse(TensorRef._make(row), form, payload, borrow)
    dtype = DTYPES[number]
    if nbytes == 0:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
    elif place < 0:
        tensor = torch.frombuffer(payload, dtype=dtype, count=nbytes // dtype.itemsize, offset=-1 - place)
    else:
        tensor = torch.frombuffer(borrow(TensorRef._make(row)), dtype=dtype, count=nbytes // dtype.itemsize)
    if form is not None:
        return strided(tensor, shape, form, flags)
    if len(shape) != 1 or nbytes == 0:
        return tensor.resize_(shape)
    return tensor


def view_elsewhere(ref: TensorRef, payload: memoryview, borrow: Callable[[TensorRef], Any]) -> torch.Tensor:
    """A copy of the tensor on its device. It gets its strides there: a tensor with holes loses them on the way."""
    device, stride = device_of(ref.flags // DEVICE), ref.form
    memory = borrow(ref) if ref.place >= 0 else None
    if isinstance(stride, Sparse):
        return view(redirected(ref, 0), payload, lambda ref: memory).to(device)
    dtype = DTYPES[ref.dtype]
    flat_shape = (ref.nbytes // dtype.itemsize,)
    if isinstance(memory, Region):
        own = memory.copied()
        tensor = torch.empty(0, dtype=dtype, device=own.device).set_(own.untyped_storage(), 0, flat_shape, (1,))
        tensor = tensor.to(device, non_blocking=True)
    else:
        tensor = view(ref._replace(shape=flat_shape, form=None, flags=0), payload, lambda ref: memory).to(device)
    if stride is None:
        return tensor.resize_(ref.shape)
    return strided(tensor, ref.shape, stride, ref.flags)


def view_sparse(ref: TensorRef, form: Sparse, payload: memoryview, borrow: Callable[[TensorRef], memoryview]) -> torch.Tensor:
    """A sparse tensor whose indices and values are views."""
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
    """PyTorch warns at the first compressed tensor of a process; whoever made the one that is carried was warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        MAKE_COMPRESSED([0, 0], [], [], (1, 1), layout=torch.sparse_csr, check_invariants=False)


# --- the sender: cores of tensors


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
