"""Data parallelism with the functions of `torch.nn.parallel`, over the workers of a pool or over
CUDA devices.

PyTorch's `DataParallel` needs GPUs, and copies the parameters to each of them. Here a device may be
a worker. Parameters are stored in shared memory once, because they are captures of the function
that the workers run. Their gradients are added up like those of other captures.

    scatter ──► [chunk, chunk, ...]                      gather ◄── [output, output, ...]
    replicate ──► [module, module, ...] ──► parallel_apply ──────────┘
    gradients of the replicas' parameters ──► ReduceAdd ──► those of the original

For CUDA devices the functions of `torch.nn.parallel` do the work. This module runs in the caller.
Workers run `tasks/wrappers.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import parallel

from mpgrad.pool import Pool, PoolWorker
from mpgrad.submission.options import CallOptions
from mpgrad.submission.starting import Source
from mpgrad.tasks.wrappers import Replicas
from mpgrad.torch_state.private import apply, replica_of, tree_leaves
from mpgrad.tracebacks import warn, without_own_frames

__all__ = [
    "DataParallel",
    "ReduceAdd",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
]

Device = PoolWorker | torch.device | str | int


class ReduceAdd:
    """Adds up the gradients of replicas, in the backward of `replicate`.

    Source: libtorch's `torch/nn/parallel/data_parallel.h`.

    Example:
        >>> import torch, mpgrad.nn
        >>> mpgrad.nn.ReduceAdd.apply([torch.ones(2), torch.ones(2)])
        tensor([2., 2.])
    """

    @staticmethod
    def apply(inputs: Sequence[Tensor]) -> Tensor:
        """Return the sum of `inputs`, on the device of the first.

        Raises:
            ValueError: there are no inputs; they have different sizes or dtypes; or one requires
                grad, although ReduceAdd has no derivative of its own.
        """
        if not inputs:
            raise ValueError("ReduceAdd needs at least one input (inputs: 0)")
        first = inputs[0]
        for each in inputs:
            if torch.is_grad_enabled() and each.requires_grad:
                raise ValueError("ReduceAdd can only be used in a backward: an input requires grad")
            if each.shape != first.shape:
                raise ValueError(
                    "all inputs of ReduceAdd must have the same sizes, but got "
                    f"{tuple(each.shape)} and {tuple(first.shape)}"
                )
            if each.dtype != first.dtype:
                raise ValueError(
                    f"all inputs of ReduceAdd must have the same dtype, but got {each.dtype} and "
                    f"{first.dtype}"
                )
        return summed(inputs)


def summed(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(lambda total, each: total + each.to(total.device), tensors)


class Broadcast(torch.autograd.Function):
    """Makes `count` views of each tensor, and adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count = count
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        each = [grads[start : start + ctx.count] for start in range(0, len(grads), ctx.count)]
        there = [[grad for grad in of_one if grad is not None] for of_one in each]
        # `summed` has derivatives of its own, and ReduceAdd has none.
        add = summed if torch.is_grad_enabled() else ReduceAdd.apply
        return None, *(add(of_one) if of_one else None for of_one in there)


def replicate(
    network: nn.Module, devices: Sequence[Device], detach: bool = False
) -> list[nn.Module]:
    """Return replicas of a module, one for each device, with parameters connected to the original.

    On workers all replicas share the memory of the original's parameters. Replica 0 has the
    original's own buffers, so the original sees what its forward writes there, such as running
    statistics. The other replicas have copies of the buffers.

    Args:
        network: the module. Tied parameters stay tied.
        devices: workers of a pool (`mpgrad.Pool.workers`), or CUDA devices.
        detach: do not connect the replicas' parameters.

    Raises:
        ValueError: there are no devices, or they are of different kinds.

    Source: `torch.nn.parallel.replicate`; the gradients as in libtorch's ``replicate``.

    Example:
        >>> import torch, mpgrad, mpgrad.nn
        >>> module = torch.nn.Linear(2, 1)
        >>> inputs = [torch.ones(1, 2), torch.ones(3, 2)]
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     replicas = mpgrad.nn.replicate(module, pool.workers)
        ...     outputs = mpgrad.nn.parallel_apply(replicas, inputs, pool.workers)
        ...     sum(output.sum() for output in outputs).backward()
        >>> module.weight.grad
        tensor([[4., 4.]])
    """
    pool = pool_of(devices)
    if pool is None:
        return list(parallel.replicate(network, [cuda_name(device) for device in devices], detach))
    count = len(devices)
    parameters = list(network.parameters())
    buffers = list(network.buffers())
    connected = [tensor for tensor in (*parameters, *buffers) if tensor.requires_grad]
    views = [tensor.detach() for tensor in connected for _ in range(count)]
    if torch.is_grad_enabled() and not detach and connected:
        views = list(apply(Broadcast, count, *connected))
    replicas = []
    for number in range(count):
        tensors = {id(parameter): parameter.detach() for parameter in parameters}
        tensors.update(zip(map(id, connected), views[number::count], strict=True))
        if number > 0:
            tensors.update(
                {id(buffer): buffer.clone() for buffer in buffers if id(buffer) not in tensors}
            )
        replicas.append(replica_of(network, tensors))
    return replicas


def scatter(
    inputs: Any, devices: Sequence[Device], chunk_sizes: Sequence[int] | None = None, dim: int = 0
) -> list[Any]:
    """Cut all tensors in `inputs` into chunks along `dim`, one for each device.

    Objects that are not tensors go to all devices.

    Args:
        inputs: a tensor of any shape, or a structure of tuples, lists and dicts.
        chunk_sizes: sizes of the chunks along `dim`. None: equal sizes, as `torch.chunk` makes
            them, which may give fewer chunks.

    Raises:
        ValueError: there are no devices, or not one chunk size for each device; or tensors would be
            cut into different numbers of chunks. If the sizes do not add up, the error is that of
            PyTorch's `split`.

    Example:
        >>> import torch, mpgrad, mpgrad.nn
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     mpgrad.nn.scatter({"x": torch.arange(5), "k": 1}, pool.workers)
        [{'x': tensor([0, 1, 2]), 'k': 1}, {'x': tensor([3, 4]), 'k': 1}]
    """
    pool = pool_of(devices)
    if chunk_sizes is not None and len(chunk_sizes) != len(devices):
        raise ValueError(
            f"expected devices and chunk_sizes to be of the same length (devices: {len(devices)}, "
            f"chunk_sizes: {len(chunk_sizes)})"
        )
    targets = None if pool is not None else [torch.device(cuda_name(device)) for device in devices]
    return Scatter(len(devices), chunk_sizes, dim, targets).checked_chunks(inputs)


class Scatter(NamedTuple):
    """Cuts inputs into a number of shares, of these sizes, along a dimension, for these targets."""

    shares: int
    chunk_sizes: Sequence[int] | None
    dim: int
    targets: Sequence[torch.device] | None

    def checked_chunks(self, inputs: Any) -> list[Any]:
        """Return `chunks`, or raise ValueError if one would be lost because a tensor has fewer."""
        sizes = [
            leaf.shape[self.dim]
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, Tensor) and leaf.dim()
        ]
        if (
            self.chunk_sizes is None
            and len({-(-size // -(-size // self.shares)) if size else 1 for size in sizes}) > 1
        ):
            raise ValueError(
                "tensors would be cut into different numbers of chunks (sizes of dimension "
                f"{self.dim}: {sizes}; devices: "
                f"{self.shares}); expand the smaller ones"
            )
        return self.chunks(inputs)

    def chunks(self, inputs: Any) -> list[Any]:
        """Return the part of `inputs` for each share.

        Without tensors in `inputs` all parts are the same. There may be fewer parts than `shares`.
        """
        if isinstance(inputs, Tensor):
            sizes = self.chunk_sizes
            cut = (
                inputs.chunk(self.shares, self.dim)
                if sizes is None
                else torch.split(inputs, list(sizes), self.dim)
            )
            if self.targets is None:
                return list(cut)
            return [
                part.to(target, non_blocking=True)
                for part, target in zip(cut, self.targets, strict=False)
            ]
        if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
            return [type(inputs)(*parts) for parts in self.together(inputs)]
        if isinstance(inputs, (tuple, list)) and inputs:
            return [type(inputs)(parts) for parts in self.together(inputs)]
        if isinstance(inputs, dict) and inputs:
            return [
                type(inputs)(zip(inputs, parts, strict=True))
                for parts in self.together(inputs.values())
            ]
        return [inputs] * self.shares

    def together(self, inputs: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
        return zip(*map(self.chunks, inputs), strict=False)


@without_own_frames
def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    devices: Sequence[Device] | None = None,
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
) -> list[Any]:
    """Return ``[module(*inputs) for module, inputs in zip(modules, inputs)]``, run in parallel.

    Args:
        modules: any modules, on workers. If the first module writes to its buffers, the caller's
            buffers also change.
        inputs: for each module a tensor, or a tuple of arguments.
        devices: workers of a pool, or CUDA devices. None: the modules' own devices, which have to
            be CUDA devices.
        kwargs_tup: keyword arguments for each module.

    Returns:
        The outputs, in order.

    Raises:
        ValueError: the numbers of modules, inputs, kwargs and devices are not the same; or
            `devices` is None, and a module has no parameters.
        Exception: the exception of the first replica that failed, with a note that names it.

    Source: `torch.nn.parallel.parallel_apply`.

    Example:
        >>> import torch, mpgrad, mpgrad.nn
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     modules = [torch.nn.Softmax(dim=0), torch.nn.ReLU()]
        ...     inputs = [torch.zeros(2), torch.tensor([-1.0, 1.0])]
        ...     mpgrad.nn.parallel_apply(modules, inputs, pool.workers)
        [tensor([0.5000, 0.5000]), tensor([0., 1.])]
    """
    if devices is None:
        found = [next(module.parameters(), None) for module in modules]
        if any(parameter is None for parameter in found):
            raise ValueError("a module without parameters is on no device; pass devices=")
        devices = [parameter.device for parameter in found if parameter is not None]
    pool = pool_of(devices)
    same_number("modules", modules, "inputs", inputs)
    same_number("modules", modules, "devices", devices)
    kwargs = [{} for _ in modules] if kwargs_tup is None else kwargs_tup
    same_number("modules", modules, "kwargs", kwargs)
    if pool is None:
        names = [cuda_name(device) for device in devices]
        return list(parallel.parallel_apply(modules, inputs, kwargs, names))
    return applied(pool, modules, inputs, kwargs)


def applied(
    pool: Pool,
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]],
) -> list[Any]:
    """Return the output of each module for its input, or of the only module for each input."""
    arguments = [tuple(each) if isinstance(each, (tuple, list)) else (each,) for each in inputs]
    calls: list[Any] = [
        ((number, *pair), {}) for number, pair in enumerate(zip(arguments, kwargs, strict=True))
    ]
    source = Source(calls, len(calls), at_rest=True, noun="replica", items=calls)
    found = pool._submitter.run(Replicas(modules), source, CallOptions(chunksize=1))
    _, written = found[0]
    with torch.no_grad():
        there = dict(modules[0].named_buffers(remove_duplicate=False))
        for name, buffer in written.items():
            there[name].copy_(buffer)
    return [output for output, _ in found]


def gather(outputs: Sequence[Any], output_device: Device | None = None, dim: int = 0) -> Any:
    """Join the outputs of replicas along `dim`, on `output_device`.

    If that is None or a worker, the device is that of the first output.

    Args:
        outputs: tensors of one shape except in `dim`, or structures (tuples, lists, dicts, named
            tuples) of them. Tensors without dimensions are stacked, with a warning.

    Raises:
        ValueError: there are no outputs, dicts have different keys, or tensors are mixed with other
            objects.

    Source: `torch.nn.parallel.gather`.

    Example:
        >>> import torch, mpgrad.nn
        >>> mpgrad.nn.gather(
        ...     [(torch.zeros(1), {"a": torch.ones(1)}), (torch.zeros(2), {"a": torch.ones(1)})]
        ... )
        (tensor([0., 0., 0.]), {'a': tensor([1., 1.])})
    """
    if not outputs:
        raise ValueError("there is nothing to gather (outputs: 0)")
    first = outputs[0]
    if isinstance(first, Tensor):
        if not all(isinstance(each, Tensor) for each in outputs):
            raise ValueError(f"all outputs must be tensors if one is (types: {kinds(outputs)})")
        target = (
            first.device
            if output_device is None or isinstance(output_device, PoolWorker)
            else output_device
        )
        there = [each.to(target) for each in outputs]
        if dim == 0 and all(each.dim() == 0 for each in there):
            warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will "
                "instead unsqueeze and return "
                "a vector."
            )
            return torch.stack(there)
        return torch.cat(there, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in outputs):
            raise ValueError(
                f"all dicts must have the same keys (keys: {[list(each) for each in outputs]})"
            )
        return type(first)(
            (key, gather([each[key] for each in outputs], output_device, dim)) for key in first
        )
    if isinstance(first, (tuple, list)):
        if any(len(each) != len(first) for each in outputs):
            raise ValueError(
                "all sequences must have the same length (lengths: "
                f"{[len(each) for each in outputs]})"
            )
        parts = [gather(each, output_device, dim) for each in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise ValueError(
        "outputs must be tensors, None, or tuples, lists and dicts of them (types: "
        f"{kinds(outputs)})"
    )


@without_own_frames
def data_parallel(
    module: nn.Module,
    input: Any,  # as torch.nn.parallel calls it
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return ``module(input)``, with the input cut along `dim` and its parts run in parallel.

    Args:
        module: any module. On workers it may have any captures, hooks and buffers.
        input: one argument, a tuple of arguments, or None for no argument. Dimension `dim` of
            their tensors is the batch.
        devices: workers of a pool (`mpgrad.Pool.workers`), or CUDA devices. None: all CUDA devices.
            An input that is smaller than their number uses fewer devices.
        output_device: the device of the joined outputs. None: the first device.
        module_kwargs: keyword arguments, which are cut in the same way.

    Raises:
        ValueError: there are no devices, or they are of different kinds; or tensors would be cut
            into different numbers of chunks (`torch.nn.parallel` drops rows then).
        Exception: the exception of the first replica that failed, with a note that names it.

    Source: `torch.nn.parallel.data_parallel`, libtorch's `torch::nn::parallel::data_parallel`.

    Example:
        >>> import torch, mpgrad, mpgrad.nn
        >>> module, x = torch.nn.Linear(3, 2), torch.randn(10, 3)
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     output = mpgrad.nn.data_parallel(module, x, pool.workers)
        ...     output.sum().backward()
        >>> torch.allclose(output, module(x))
        True
    """
    if devices is None:
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    pool = pool_of(devices)
    inputs = input if isinstance(input, tuple) else () if input is None else (input,)
    kwargs = module_kwargs or {}
    if pool is None:
        names = [cuda_name(device) for device in devices]
        out = None if output_device is None else cuda_name(output_device)
        return parallel.data_parallel(module, inputs, names, out, dim, kwargs)
    if len(devices) == 1:
        return module(*inputs, **kwargs)
    chunks, chunks_of_kwargs = scattered_arguments(inputs, kwargs, len(devices), dim)
    if len(chunks) == 1:
        return module(*chunks[0], **chunks_of_kwargs[0])
    # No replicas are needed, because the module is a capture that each worker gets.
    return gather(applied(pool, [module], chunks, chunks_of_kwargs), output_device, dim)


class DataParallel(nn.Module):
    """A module whose calls run as `data_parallel` over `devices`.

    Args:
        module: see `data_parallel`. The module is kept as `self.module`.
        devices, output_device, dim: see `data_parallel`.

    Example:
        >>> import torch, mpgrad, mpgrad.nn
        >>> with mpgrad.Pool(processes=2) as pool:
        ...     module = mpgrad.nn.DataParallel(torch.nn.Linear(3, 2), pool.workers)
        ...     module(torch.randn(10, 3)).shape
        torch.Size([10, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if devices is not None:
            pool_of(devices)
        self.module = module
        self.devices = devices
        self.output_device = output_device
        self.dim = dim

    @without_own_frames
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return data_parallel(
            self.module, inputs, self.devices, self.output_device, self.dim, kwargs
        )


def scattered_arguments(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], count: int, dim: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the positional and the keyword arguments of each share."""
    cut = Scatter(count, None, dim, None)
    both = cut.checked_chunks([inputs, kwargs]) if inputs or kwargs else [[(), {}]]
    return [each for each, _ in both], [each for _, each in both]


def pool_of(devices: Sequence[Device]) -> Pool | None:
    """Return the pool whose workers the `devices` are; None for CUDA devices."""
    if not devices:
        raise ValueError(
            "there is no device to use (devices: 0); name workers (pool.workers) or CUDA devices"
        )
    pools = {id(device.pool): device.pool for device in devices if isinstance(device, PoolWorker)}
    if not pools:
        for device in devices:
            cuda_name(device)
        return None
    if len(pools) > 1 or not all(isinstance(device, PoolWorker) for device in devices):
        raise ValueError(
            "devices must all be workers of one pool, or all be CUDA devices (devices: "
            f"{list(devices)})"
        )
    return next(iter(pools.values()))


def cuda_name(device: Device) -> torch.device:
    """Return the CUDA device, or raise ValueError for any other kind of device."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)  # type: ignore[arg-type]
    if found.type != "cuda":
        raise ValueError(
            "a device must be a worker of a pool (pool.workers) or a CUDA device (device: "
            f"{device!r})"
        )
    return found


def same_number(one: str, these: Sequence[Any], other: str, those: Sequence[Any]) -> None:
    if len(these) != len(those):
        raise ValueError(
            f"the number of {one} {len(these)} is not equal to the number of {other} {len(those)}"
        )


def kinds(values: Iterable[Any]) -> str:
    return ", ".join(type(value).__name__ for value in values)
