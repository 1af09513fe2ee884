"""Results that only later calls read stay on their nodes: what travels, what is read later, what is lost, what is left."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from conftest import linux_only
from test_cluster import TWO, cluster, staffed

import mpgrad
from mpgrad.cluster.carrier import Node

SIZE = 250_000
NBYTES = 4 * SIZE
ONE_EACH = (Node("a", "alpha", 1), Node("b", "beta", 1))


@pytest.fixture(scope="module")
def on_two_nodes(nursery: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    with cluster(*TWO) as (pool, _):
        staffed(pool, 4)
        yield pool


def double(x: Any) -> Any:
    return x * 2


def sine(x: Any) -> Any:
    return x.sin()


def product(x: Any) -> Any:
    return x * x


def serial(x: Any) -> Any:
    return product(sine(double(x)))


def chain(pool: mpgrad.Pool, x: torch.Tensor) -> list[Any]:
    a = pool.submit(double, x)
    b = pool.submit(sine, a)
    return [a, b, pool.submit(product, b)]


def all_of(x: Any) -> Any:
    """Of all three values."""
    a = double(x)
    b = sine(a)
    return a.sum() + b.sum() + product(b).sum()


def leaf() -> torch.Tensor:
    return torch.linspace(0, 3, SIZE).requires_grad_()


def grad_of(fn: Callable[[Any], Any], x: torch.Tensor) -> torch.Tensor:
    own = x.detach().clone().requires_grad_()
    fn(own).sum().backward()
    assert own.grad is not None
    return own.grad


def wait_until(satisfied: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not satisfied():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def staying(pool: Any) -> int:
    """How many tensors have no content here."""
    return len(pool._scheduler.memory.stays._by_address)


def sites(pool: Any) -> list[Any]:
    return list(pool._scheduler.engine._sites)


def keeps_nothing(pool: Any) -> bool:
    return not staying(pool) and not any(site.keeper.is_needed for site in sites(pool))


def kill_sites(pool: Any) -> None:
    """Those where results stay."""
    killed = [site for site in sites(pool) if site.keeper.is_needed]
    assert killed
    for site in killed:
        site._site.process.kill()
    wait_until(lambda: all(site.lost for site in killed))


def kill_workers(pool: Any) -> None:
    deaths, pids = pool.stats().deaths, [worker.pid for worker in pool.stats().workers]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pool.stats().deaths == deaths + len(pids))


# --- what travels


@pytest.mark.quick
def test_only_what_is_read_comes(on_two_nodes: mpgrad.Pool) -> None:
    """All three results came, and two went out again."""
    pool, x = on_two_nodes, leaf()
    before = pool.stats()
    futures = chain(pool, x)
    value = futures[-1].result()
    after = pool.stats()
    assert torch.equal(value, serial(x))
    assert NBYTES <= after.bytes_received - before.bytes_received < 1.1 * NBYTES
    assert after.bytes_sent - before.bytes_sent < 1.1 * NBYTES
    value.sum().backward()
    assert torch.equal(x.grad, grad_of(serial, x))  # type: ignore[arg-type]


def test_a_value_is_read_later(on_two_nodes: mpgrad.Pool) -> None:
    pool, x = on_two_nodes, leaf()
    a, b, c = chain(pool, x)
    value = c.result()
    before = pool.stats().bytes_received
    assert torch.equal(b.result(), sine(double(x))) and b.result() is b.result()
    assert pool.stats().bytes_received - before < 1.1 * NBYTES
    assert torch.equal(a.result(timeout=20), double(x))
    assert torch.equal(pool.submit(double, b).result(), 2 * b.result())
    (a.result().sum() + b.result().sum() + value.sum()).backward()
    assert torch.equal(x.grad, grad_of(all_of, x))  # type: ignore[arg-type]


def test_several_tensors_and_others_that_travel(on_two_nodes: mpgrad.Pool) -> None:
    def fn(x: Any) -> Any:
        return {"large": [x + 1, x - 1], "small": x[:3].clone(), "sparse": torch.eye(3).to_sparse(), "n": 5}

    def gather(found: Any) -> Any:
        return (found["large"][0] * found["large"][1]).sum() + found["small"].sum()

    pool, x = on_two_nodes, leaf()
    first = pool.submit(fn, x)
    pool.submit(gather, first).result().backward()
    assert torch.equal(x.grad, grad_of(lambda own: gather(fn(own)), x))  # type: ignore[arg-type]
    found = first.result()
    assert torch.equal(found["large"][1], x - 1) and found["n"] == 5
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))


@pytest.mark.slow
def test_a_call_on_another_node_has_it_fetched(nursery: mpgrad.Pool) -> None:
    with cluster(*ONE_EACH) as (pool, _):
        staffed(pool, 2)
        x = leaf()
        a = pool.submit(double, x)
        wait_until(a.done)
        before = pool.stats().bytes_received
        busy = [pool.submit(time.sleep, 1.0) for _ in range(2)]  # one of them where the result is
        wait_until(lambda: all(each.running() for each in busy))
        results = [pool.submit(product, a) for _ in range(4)]
        values = [each.result() for each in results]
        assert all(torch.equal(each, product(double(x))) for each in values)
        assert pool.stats().bytes_received - before < 5.1 * NBYTES
        sum(each.sum() for each in values).backward()
        assert torch.equal(x.grad, 4 * grad_of(lambda own: product(double(own)), x))  # type: ignore[arg-type]


@pytest.mark.slow
def test_without_retries_results_come_at_once(nursery: mpgrad.Pool) -> None:
    with cluster(TWO[0], retries=0) as (pool, _):
        futures = chain(pool, leaf())
        futures[-1].result()
        assert not staying(pool)


# --- who asks


@pytest.mark.quick
def test_callbacks_find_the_value(on_two_nodes: mpgrad.Pool) -> None:
    """Also that of another future, which stays: they run in the thread that takes what comes."""
    pool, x = on_two_nodes, leaf()
    other = pool.submit(double, x)
    wait_until(other.done)
    found: list[Any] = []
    future = pool.submit(sine, other)
    future.add_done_callback(lambda done: found.append((done.result(), other.result())))
    wait_until(lambda: found)
    assert torch.equal(found[0][0], sine(double(x))) and torch.equal(found[0][1], double(x))


def test_those_who_wait_for_several(on_two_nodes: mpgrad.Pool) -> None:
    pool = on_two_nodes
    futures = [pool.submit(torch.full, (SIZE,), float(k)) for k in range(8)]
    assert sorted(each.result()[0].item() for each in concurrent.futures.as_completed(futures)) == list(range(8))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        again = [pool.submit(torch.full, (SIZE,), float(k)) for k in range(8)]
        assert [each[0].item() for each in threads.map(lambda future: future.result(), again)] == list(range(8))


@pytest.mark.parametrize("ended", ["terminate", "join"])
@pytest.mark.slow
def test_values_outlive_the_pool(nursery: mpgrad.Pool, ended: str) -> None:
    x = leaf()
    with cluster(*TWO) as (pool, _):
        a, b, c = chain(pool, x)
        c.result()
        assert staying(pool)
        if ended == "join":
            kill_sites(pool)
            pool.close()
            pool.join()
    assert torch.equal(a.result(), double(x)) and torch.equal(b.result(), sine(double(x)))


# --- what is lost


@pytest.mark.parametrize("kill", [kill_sites, pytest.param(kill_workers, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "read", ["all", *(pytest.param(each, marks=pytest.mark.slow) for each in ("last", "first", "dependant"))]
)
def test_what_is_lost_is_made_again(nursery: mpgrad.Pool, kill: Callable[[Any], None], read: str) -> None:
    with cluster(*TWO) as (pool, _):
        staffed(pool, 4)
        x = leaf()
        futures = chain(pool, x)
        wait_until(futures[-1].done)
        assert staying(pool)
        kill(pool)
        if read == "first":
            assert torch.equal(futures[0].result(timeout=30), double(x))
        elif read == "last":
            assert torch.equal(futures[-1].result(timeout=30), serial(x))
        elif read == "all":
            values = [each.result(timeout=30) for each in futures]
            (values[0].sum() + values[1].sum() + values[2].sum()).backward()
            assert torch.equal(x.grad, grad_of(all_of, x))  # type: ignore[arg-type]
        else:
            value = pool.submit(sine, futures[-1]).result(timeout=30)
            assert torch.equal(value, sine(serial(x)))
            value.sum().backward()
            assert torch.equal(x.grad, grad_of(lambda own: sine(serial(own)), x))  # type: ignore[arg-type]


@pytest.mark.parametrize("kill", [kill_sites, kill_workers])
@pytest.mark.slow
def test_backwards_through_what_is_lost(nursery: mpgrad.Pool, kill: Callable[[Any], None]) -> None:
    """Graphs are made again from arguments that had stayed where they were, and were lost too."""
    with cluster(*ONE_EACH) as (pool, _):
        staffed(pool, 2)
        x = leaf()
        futures = chain(pool, x)
        value = futures[-1].result()
        assert staying(pool) == 2
        kill(pool)
        (grad,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        assert torch.equal(grad, grad_of(serial, x))
        staffed(pool, 2)
        kill_workers(pool)
        grad.sum().backward()
        own = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(serial(own).sum(), own, create_graph=True)
        first.sum().backward()
        assert torch.equal(x.grad, own.grad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_random_numbers_are_the_same_again(nursery: mpgrad.Pool) -> None:
    with cluster(*TWO) as (pool, _):
        noise = pool.submit(torch.rand, SIZE)
        twice = pool.submit(double, noise).result()
        assert staying(pool)
        kill_sites(pool)
        assert torch.equal(2 * noise.result(), twice)


def test_a_call_that_fails_when_it_is_run_again(nursery: mpgrad.Pool, tmp_path: Any) -> None:
    def once(x: Any) -> Any:
        (tmp_path / "ran").touch(exist_ok=False)
        return x + 1

    with cluster(*TWO) as (pool, _):
        future = pool.submit(once, torch.ones(SIZE))
        wait_until(future.done)
        assert staying(pool)
        kill_sites(pool)
        with pytest.raises(FileExistsError):
            future.result()
        assert isinstance(future.exception(), FileExistsError)
        with pytest.raises(mpgrad.AncestorFailedError):
            pool.submit(double, future).result()


# --- what is left


def lent(_: Any) -> int:
    """By the worker that runs this, beside this call's result, which rides."""
    time.sleep(0.05)
    return sum(len(each._lent) for each in gc.get_objects() if type(each).__name__ == "Loans")


@linux_only("num_fds")
@pytest.mark.slow
def test_nothing_is_left_on_the_nodes(nursery: mpgrad.Pool) -> None:
    with cluster(Node("a", "alpha", 2)) as (pool, carrier):
        staffed(pool, 2)
        pid = carrier.sites[0].process.pid
        before = psutil.Process(pid).num_fds()
        pool.submit(double, leaf()).result()
        futures = chain(pool, leaf())
        wait_until(futures[-1].done)
        assert staying(pool) == 3
        futures.clear()
        gc.collect()
        wait_until(lambda: keeps_nothing(pool))
        wait_until(lambda: pool.map(lent, range(4), 1) == [0, 0, 0, 0])
        futures = chain(pool, leaf())
        wait_until(futures[-1].done)
        kill_workers(pool)
        assert staying(pool) == 3
        (site,) = sites(pool)
        assert site.keeper._slabs
        futures.clear()
        gc.collect()
        wait_until(lambda: not site.keeper._slabs)
        staffed(pool, 2)
        wait_until(lambda: psutil.Process(pid).num_fds() <= before)
        pool.close()
        pool.join()
