"""A user's program, for type checkers. `test_types.py` runs mypy and pyright on it, and nothing
runs it.

The checkers must refuse each line that ends with `# wrong`, and no other line.
"""

import concurrent.futures
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import assert_type

import mpgrad


def loss_of(x: Tensor) -> Tensor:
    return x.square().sum()


def parsed(line: str) -> int:
    return int(line)


def both(x: Tensor, n: int) -> tuple[Tensor, int]:
    return x, n


def add(total: Tensor, x: Tensor) -> Tensor:
    return total + x


def put_into(total: Tensor, x: Tensor) -> None:
    total.add_(x)


def told(done: int, total: int | None, left: float | None) -> None:
    print(done, total, left)


class Scaled(torch.autograd.Function):
    """It is called by its `apply`, for which PyTorch has no types."""


xs = [torch.ones(3) for _ in range(4)]
pool = mpgrad.Pool(2, graphs="recompute", engine="process", retries=0)
mpgrad.Pool(2, graphs="recompte")  # wrong
mpgrad.Pool(2, engine="processes")  # wrong
mpgrad.Pool("2")  # wrong
mpgrad.Pool(n_jobs=2)  # wrong

# --- maps

assert_type(pool.map(loss_of, xs), list[Tensor])
assert_type(pool.map(parsed, ["1", "2"], 1, progress="lines", timeout=3.0), list[int])
assert_type(pool.map(lambda x: x * 2, xs), list[Tensor])
assert_type(pool.map(lambda n: n * 2, range(3)), list[int])
assert_type(pool.map(parsed, ["1"], on_error="return"), list[int | BaseException])
assert_type(pool.map(parsed, ["1"], progress=told), list[int])
assert_type(pool.starmap(both, zip(xs, range(4), strict=True)), list[tuple[Tensor, int]])
assert_type(pool.starmap(parsed, [("1",)], on_error="return"), list[int | BaseException])
assert_type(pool.map(both, xs, range(4)), list[tuple[Tensor, int]])
assert_type(pool.map(both, xs, range(4), chunksize=2, progress=True), list[tuple[Tensor, int]])
paired = pool.map(both, xs, range(4), on_error="return")
assert_type(paired, list[tuple[Tensor, int] | BaseException])
refused: list[int] = pool.map(parsed, ["1"], on_error="return")  # wrong
number: list[str] = pool.map(parsed, ["1"])  # wrong
pool.map(parsed, xs)  # wrong
pool.map(parsed, ["1"], on_error="retrun")  # wrong
pool.map(parsed, ["1"], timeot=3.0)  # wrong
pool.map(parsed, ["1"], progress=3)  # wrong
pool.map(parsed, ["1"], progress=parsed)  # wrong
pool.map(3, xs)  # wrong
pool.map(both, xs, range(4), timeot=3.0)  # wrong
pool.starmap(both, xs, progess=True)  # wrong

# --- later

assert_type(pool.map_async(parsed, ["1"]).get(), list[int])
assert_type(pool.map_async(parsed, ["1"], on_error="return").get(), list[int | BaseException])
assert_type(pool.starmap_async(both, [(xs[0], 1)], progress=True).get(), list[tuple[Tensor, int]])
assert_type(pool.apply_async(parsed, ("1",)), mpgrad.AsyncResult[int])
assert_type(pool.apply(parsed, ("1",)), int)
assert_type(next(pool.imap(parsed, ["1"])), int)
assert_type(list(pool.imap_unordered(loss_of, xs, progress=True)), list[Tensor])
assert_type(next(pool.imap(both, xs, range(4))), tuple[Tensor, int])
assert_type(pool.map_async(both, xs, range(4)).get(), list[tuple[Tensor, int]])
for each in pool.imap(parsed, ["1"], on_error="return"):
    assert_type(each, int | BaseException)


def kept(results: list[int]) -> None:
    print(results)


def kept_text(text: str) -> None:
    print(text)


pool.map_async(parsed, ["1"], None, kept)
pool.map_async(parsed, ["1"], None, kept_text)  # wrong
pool.apply_async(parsed, ("1",), callback=kept_text)  # wrong

# --- futures

future = pool.submit(loss_of, xs[0])
assert_type(future, mpgrad.DifferentiableFuture[Tensor])
assert_type(future.result(timeout=3), Tensor)
# a future may be passed in place of its value
assert_type(pool.submit(both, future, 3).result(), tuple[Tensor, int])
assert_type(pool.map(loss_of, [future, future]), list[Tensor])
plain: concurrent.futures.Future[Tensor] = future
done, _ = mpgrad.wait([future])
text: str = future.result()  # wrong
pool.submit(3)  # wrong

# --- a Function of autograd has the type that its `apply` returns

outputs = pool.map(Scaled, xs)
torch.stack(outputs)
pool.submit(Scaled, xs[0]).result().sum()

# --- reductions

assert_type(pool.reduce(add, xs, torch.zeros(3)), Tensor)
assert_type(pool.reduce(put_into, xs, [torch.zeros(3)]), list[Tensor])
assert_type(pool.reduce("sum", xs, torch.zeros(3), associative=True), Tensor)
assert_type(pool.map_reduce(loss_of, xs, "logsumexp"), Tensor)
assert_type(pool.map_reduce(loss_of, xs, add, torch.zeros(3)), Tensor)
assert_type(pool.map_reduce(loss_of, xs, lambda total, x: total + x), Tensor)
pool.reduce("summ", xs, torch.zeros(3))  # wrong
pool.map_reduce(parsed, ["1"], add)  # wrong
pool.map_reduce(loss_of, xs, "sun")  # wrong

# --- reports of a pool

with pool.progress("fit"), pool.progress(told):
    pass
assert_type(pool.stats().workers, list[mpgrad.WorkerStats])
pool.progress(3)  # wrong
with pool.timeline("run.json") as timeline:
    assert_type(timeline, mpgrad.Timeline)
assert_type(pool.stats(), mpgrad.PoolStats)
assert_type(mpgrad.advise(loss_of, xs, seconds=1.0), mpgrad.Advice)
mpgrad.advise(parsed, xs)  # wrong
mpgrad.advise(loss_of, xs, second=1.0)  # wrong
missing = pool.stats().worker  # wrong

# --- concurrent.futures

with mpgrad.Executor(max_workers=2, graphs="keep", threads_per_worker=1) as executor:
    assert_type(executor.submit(parsed, "1"), mpgrad.DifferentiableFuture[int])
    assert_type(list(executor.map(parsed, ["1"])), list[int])
    executor.submit(parsed, "1").add_done_callback(lambda each: kept([each.result()]))
    with executor.progress("all"):
        pass
    standard: concurrent.futures.Executor = executor
mpgrad.Executor(2, graphs="kept")  # wrong
mpgrad.Executor(2, n_jobs=3)  # wrong


def mapped(fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [*pool.map(fn, xs), *pool.map(torch.nn.Linear(3, 3), xs)]
