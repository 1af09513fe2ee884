"""Many tensors that are alike travel as one run of memory: what comes out is what went in, each
with memory of its own."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE
from inside import bundle, every_loss_gets

import mpgrad
from mpgrad.memory.arena import Arena
from mpgrad.wire.tensor_refs import (
    LEAF,
    REQUIRES_GRAD,
    PackedTensors,
    Packer,
    Payload,
    TensorBucket,
    lent,
    view,
    views,
)

pytestmark = pytest.mark.quick

Tensor = torch.Tensor

# with a message; minus zero
NAN = torch.tensor([0x7FC12345, -0x80000000, 1], dtype=torch.int32).view(torch.float32)
GROUPS = {
    "ragged": [torch.arange(n, dtype=torch.float32) for n in (3, 4, 1, 17, 2)],
    "numbers": [torch.tensor(float(n), dtype=torch.float64) for n in range(9)],
    "of one element": [torch.full((1,) * n, n, dtype=torch.int64) for n in range(4)],
    "matrices": [torch.randn(n, 3) for n in (1, 2, 5)],
    "of all dimensions": [torch.randn((2,) * n) for n in range(1, 6)],
    "complex": [torch.randn(n, dtype=torch.complex128) for n in (1, 2, 3)],
    "bool": [torch.arange(n) % 2 == 0 for n in (1, 15, 16, 17)],
    "bfloat16": [torch.randn(n).bfloat16() for n in (1, 3, 8)],
    "NaN": [NAN, NAN.flip(0)],
    "larger": [torch.randn(n) for n in (4000, 5001, 6002)],
    "leaves": [torch.randn(n, requires_grad=True) for n in (5, 6)],
}


class Border:
    """A packer, and what comes out on the other side."""

    def __init__(self) -> None:
        self.packer = Packer(Arena(0))
        self.packed: PackedTensors | None = None

    def refs(self, tensors: list[Tensor], before: bytes = b"") -> tuple[TensorBucket, memoryview]:
        self.packed = self.packer.bucketed(tensors, [0] * len(tensors))
        assert self.packed is not None
        payload = Payload()
        if before:
            payload.parts.append(before)
            payload.nbytes = len(before)
        refs = payload.add_all(self.packed)
        assert (
            isinstance(refs, TensorBucket)
            and payload.nbytes == sum(map(len, payload.parts))
            and payload.nbytes % 16 == 0
        )
        again = pickle.loads(pickle.dumps(refs))
        assert isinstance(again, TensorBucket)
        return again, memoryview(bytearray(b"".join(payload.parts)))

    def borrow(self, ref: Any) -> Any:
        assert (
            self.packed is not None
            and self.packed.holder is not None
            and ref.place == self.packed.holder.address
        )
        return self.packed.holder.memory


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("before", [b"", bytes(48)], ids=["first", "behind others"])
@pytest.mark.parametrize("tensors", GROUPS.values(), ids=GROUPS)
def test_what_comes_out_is_what_went_in(tensors: list[Tensor], before: bytes) -> None:
    border = Border()
    refs, payload = border.refs(tensors, before)
    found = refs.views(payload, border.borrow)
    assert border.packer.bytes_copied == sum(tensor.nbytes for tensor in tensors)
    start = found[0].data_ptr()
    for number, (ours, theirs) in enumerate(zip(found, tensors, strict=True)):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(bits(ours), bits(theirs))
        assert (
            ours.untyped_storage().nbytes() == theirs.nbytes
            and ours.storage_offset() == 0
            and not ours._is_view()
        )
        if theirs.numel() > 1:
            assert (ours.data_ptr() - start) % 16 == 0
        copied = views(refs, payload, border.borrow)[number]
        assert torch.equal(bits(copied), bits(ours))
        assert refs.place < 0 or copied.data_ptr() != ours.data_ptr()
        if refs.place < 0:
            assert view(refs[number], payload, border.borrow).data_ptr() == ours.data_ptr()
    assert (
        [ref.shape for ref in refs]
        == [ref.shape for ref in refs[:]]
        == [tuple(each.shape) for each in tensors]
    )
    assert lent(refs) == ([] if refs.place < 0 else [refs.whole])
    version = found[1]._version
    found[0].fill_(1)
    assert found[1]._version == version


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, dtype=torch.float64),
        lambda: torch.ones(0),
        lambda: torch.ones(6)[::2],
        lambda: torch.ones(1).expand(3),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
        lambda: torch._efficientzerotensor(3),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.nested.nested_tensor([torch.ones(3)]),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(1 + (256 << 10) // 4),
        lambda: None,
        quantized,
    ],
)
def test_what_is_not_alike_goes_another_way(make: Callable[[], Tensor | None]) -> None:
    packer = Packer(Arena(0))
    assert packer.bucketed([torch.ones(3), torch.ones(4)], [0, 0]) is not None
    assert packer.bucketed([torch.ones(3), make()], [0, 0]) is None
    assert packer.bucketed([make(), torch.ones(3)], [0, 0]) is None
    assert packer.bucketed([torch.ones(3), torch.ones(4)], [0, REQUIRES_GRAD | LEAF]) is None
    assert packer.bucketed([torch.ones(3)], [0]) is None


def test_those_of_a_transform_and_of_inference_mode() -> None:
    packer, seen = Packer(Arena(0)), list[object]()

    def look(x: Tensor) -> Tensor:
        seen.append(packer.bucketed([torch.ones(3), x], [0, 0]))
        return x

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(3))
    with torch.inference_mode():
        look(torch.ones(3))
    assert seen == [None] * 3


# --- in pools


@pytest.fixture(autouse=True)
def bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle(monkeypatch, 8)


def items(count: int = 16, length: int = 5000) -> list[Tensor]:
    return [torch.full((length,), float(k), requires_grad=True) for k in range(count)]


@pytest.mark.parametrize("length", [5, 5000])
def test_results_and_gradients_have_memory_of_their_own(
    fork_server: mpgrad.Pool, length: int
) -> None:
    xs = items(length=length)
    with mpgrad.Pool(2) as pool:
        with torch.no_grad():
            plain = pool.map(torch.exp, xs)
        results = pool.map(torch.sin, xs)
        torch.autograd.backward([each.sum() for each in results])
        for one in (*plain, *results, *[x.grad for x in xs]):
            assert one is not None and one.untyped_storage().nbytes() == 4 * length
            assert copy.deepcopy(one.detach()).untyped_storage().nbytes() == 4 * length
        plain[0].zero_()
        assert plain[1]._version == 0 and torch.equal(plain[1], xs[1].exp())


def test_what_is_kept_keeps_no_others(fork_server: mpgrad.Pool) -> None:
    xs = items()
    with mpgrad.Pool(2, retries=0) as pool:
        with torch.no_grad():
            results = pool.map(torch.sin, xs)
        losses = pool.map(lambda x: x.exp().sum(), xs)
        torch.stack(losses).sum().backward()
        kept, value = results[3], results[3].clone()
        del results, losses
        gc.collect()
        with torch.no_grad():
            pool.map(torch.cos, xs)  # would write over what was given back too early
            deadline = time.monotonic() + PATIENCE
            while pool.stats().shared_bytes:  # though one result, and all gradients, are kept
                assert time.monotonic() < deadline
                # a message that what is not needed can go with, also of the other worker
                pool.map(torch.cos, [torch.ones(1)])
        assert torch.equal(kept, value) and torch.equal(xs[3].grad, xs[3].detach().exp())  # type: ignore[arg-type]


@pytest.mark.parametrize("graphs", ["keep", "auto", "recompute"])
def test_a_call_may_write_to_its_own_input_only(fork_server: mpgrad.Pool, graphs: str) -> None:
    def squared(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.detach().mul_(2)  # the same memory
        return (x * y).sum()

    xs, ys = items(), items()
    with every_loss_gets(1.0), mpgrad.Pool(2, graphs=graphs) as pool:  # type: ignore[arg-type]
        found = pool.map(squared, xs)
        torch.stack(found).sum().backward()
    for y in ys:
        squared(y.clone()).backward()
    assert all(torch.equal(x.detach(), torch.full((5000,), float(k))) for k, x in enumerate(xs))
    assert [each.item() for each in found] == [squared(y.detach().clone()).item() for y in ys]


def test_inputs_are_whole_for_a_call_that_is_run_again(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    flag = tmp_path / "died"

    def dies_once(x: Tensor) -> Tensor:
        y = x * 1
        with torch.no_grad():
            x.detach().zero_()
        if float(y.detach()[0]) == 5 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), 9)
        return y * 3

    xs = items()
    with mpgrad.Pool(2, retries=1) as pool:
        results = pool.map(dies_once, xs)
        assert pool.stats().deaths == 1
    assert all(torch.equal(each, 3 * x) for each, x in zip(results, xs, strict=True))


def test_results_are_passed_on(fork_server: mpgrad.Pool) -> None:
    """Those of bundles are copied into the next one, whichever of them it has."""
    xs = items()
    with mpgrad.Pool(2) as pool:
        first = pool.map(torch.sin, xs)
        second = pool.map(torch.exp, [each.detach().requires_grad_() for each in first[::-1]])
        alone = pool.submit(torch.cos, first[2])
        assert torch.equal(alone.result(), xs[2].sin().cos())
        assert all(
            torch.equal(each, x.sin().exp()) for each, x in zip(second, xs[::-1], strict=True)
        )
        (second[0].sum() + alone.result().sum()).backward()
    y = items()
    y[2].sin().cos().sum().backward()
    assert xs[2].grad is not None and y[2].grad is not None and torch.equal(xs[2].grad, y[2].grad)


def test_gradients_are_passed_on_from_worker_to_worker(fork_server: mpgrad.Pool) -> None:
    """Of a call with many inputs: the gradient of one of them goes to another worker by itself."""

    def scaled(x: Tensor) -> Tensor:
        return x * 3

    def total(*parts: Tensor) -> Tensor:
        return torch.stack(parts).sin().sum()

    xs, ys = items(10), items(10)
    with mpgrad.Pool(2) as pool:
        loss = pool.submit(total, *[pool.submit(scaled, x) for x in xs]).result()
        loss.backward()
    total(*map(scaled, ys)).backward()
    for x, y in zip(xs, ys, strict=True):
        assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


def test_no_room_for_all_of_them(fork_server: mpgrad.Pool) -> None:
    """Where one slot for all cannot be had, slots of their own may."""

    def small_arena(x: Tensor) -> Tensor:
        allocate = Arena.allocate

        def refusing(arena: Arena, nbytes: int) -> Any:
            if nbytes > 20_000:
                raise mpgrad.SharedMemoryError("no room")
            return allocate(arena, nbytes)

        if float(x.detach()[0]) == 0:
            Arena.allocate = refusing  # type: ignore[method-assign]
        return x + 1

    with mpgrad.Pool(1) as pool, torch.no_grad():
        results = pool.map(small_arena, items(8))
    assert all(torch.equal(each, torch.full((5000,), k + 1.0)) for k, each in enumerate(results))


@pytest.mark.parametrize(
    ("autocast", "dtype"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)]
)
def test_half_precision_of_another_kind_than_that_of_autocast(
    pool2: mpgrad.Pool, autocast: torch.dtype, dtype: torch.dtype
) -> None:
    """They were put together under autocast, which refuses to do that: the map raised, and so did
    its backward."""

    def fn(x: Tensor) -> Tensor:
        return (x.float() ** 2).sum().to(dtype)

    xs = [torch.full((3,), float(k), dtype=dtype, requires_grad=True) for k in range(40)]
    with torch.autocast("cpu", autocast):
        for _ in range(3):
            found, expected = pool2.map(fn, xs), [fn(x) for x in xs]
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
            one = torch.ones((), dtype=dtype)
            ours, serial = (
                torch.autograd.grad(each, xs, [one] * len(xs)) for each in (found, expected)
            )
            assert all(torch.equal(*pair) for pair in zip(ours, serial, strict=True))
