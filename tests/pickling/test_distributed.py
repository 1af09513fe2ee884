"""Modules and objects that belong to a process group, which workers are not in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpgrad

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("gloo is missing", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, x: torch.Tensor) -> Any:
        return self.held(x)


class Around(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


class OwnParallel(nn.parallel.DistributedDataParallel):
    pass


X = torch.ones(2)
WAYS: dict[str, Callable[[Any], tuple[Callable[..., Any], Any]]] = {
    "function": lambda module: (module, X),
    "method": lambda module: (module.forward, X),
    "captured": lambda module: (lambda x: module(x), X),
    "attribute": lambda module: (Holder(module), X),
    "part": lambda module: (Around(module), X),
    "item": lambda module: (lambda module: module(X), module),
    "in an item": lambda module: (lambda item: item[0](X), [module]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [nn.parallel.DistributedDataParallel, OwnParallel])
def test_distributed_modules_are_refused(pool: mpgrad.Pool, kind: Any, way: str) -> None:
    # symptom: "Default process group has not been initialized" from a worker
    function, item = WAYS[way](kind(nn.Linear(2, 1)))
    for run in (
        lambda: pool.map(function, [item]),
        lambda: pool.submit(function, item).result(),
        lambda: next(pool.imap(function, [item])),
    ):
        with pytest.raises(TypeError, match=rf"\({kind.__name__}\), of which.*\(its \.module\)"):
            run()


@pytest.mark.parametrize("way", WAYS)
def test_their_modules_are_carried(pool: mpgrad.Pool, way: str) -> None:
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    function, item = WAYS[way](parallel.module)
    (result,) = pool.map(function, [item])
    assert torch.equal(result, parallel(X))
    result.sum().backward()
    assert parallel.module.bias.grad is None or parallel.module.bias.grad.item() == 1


def test_a_data_parallel_works(pool: mpgrad.Pool) -> None:
    module = nn.DataParallel(nn.Linear(2, 1))
    assert torch.equal(pool.map(module, [X])[0], module(X))


def test_a_group_and_what_belongs_to_it_are_refused(pool: mpgrad.Pool) -> None:
    for held in (dist.group.WORLD, dist.HashStore(), dist.all_reduce(X.clone(), async_op=True)):
        for value in (held, Holder(held)):
            with pytest.raises(TypeError, match=r"not ranks of its group: .*init_process_group"):
                pool.map(str, [value])


# In a program of its own: PyTorch keeps the group in each thread that had such a tensor, and a fork
# of the process would destroy it there, which waits for ever.
SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
import mpgrad

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
sharded = fully_shard(nn.Linear(2, 1), mesh=mesh)
whole = FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))
tensor = distribute_tensor(torch.ones(2), mesh, [Replicate()])

class Holder:
    def __init__(self, held): self.held = held
    def __call__(self, x): return self.held(x)

def refusal(function, item):
    try:
        return pool.map(function, [item])
    except TypeError as error:
        return str(error)

for engine in ("process", "thread", "inline"):
    with mpgrad.Pool(1, engine=engine) as pool:
        for module in (sharded, whole):
            for function, item in (
                (module, torch.ones(2)), (module.forward, torch.ones(2)),
                (lambda x: module(x), torch.ones(2)), (Holder(module), torch.ones(2)),
                (lambda module: module(torch.ones(2)), module), (str, [module]),
            ):
                said = refusal(function, item)
                assert "of which workers are not ranks" in said and "full state dict" in said, said
        said = refusal(torch.sum, tensor)
        assert "DTensor, " in said and "pass the plain tensors" in said, said
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_modules_and_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sharded.py").write_text(SHARDED)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "sharded.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr


def test_initializers_are_refused_one(fork_server: mpgrad.Pool) -> None:
    module = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"of which workers are not ranks.*\.module"):
        mpgrad.Pool(1, initializer=print, initargs=(module,))
