"""Histories that a result has nothing to do with, though its function was given them, are left
alone: as in the serial loop."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import first_are_quick, staffed
from inside import bundle, every_loss_gets, sums_kept
from torch.utils.checkpoint import checkpoint

import mpgrad
from mpgrad import nn, per_item_grad

Tensor = torch.Tensor
Loop = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"graphs": "keep"},
    {"graphs": "recompute"},
    {"deterministic": True},
    {"engine": "thread"},
    {"engine": "inline"},
]


@pytest.fixture(scope="module", params=first_are_quick(1, OPTIONS), ids=str)
def any_pool(request: pytest.FixtureRequest, fork_server: mpgrad.Pool) -> Iterator[mpgrad.Pool]:
    processes = 1 if request.param.get("engine") == "inline" else 2
    with every_loss_gets(1.0), mpgrad.Pool(processes, **request.param) as pool:
        yield staffed(pool)  # before the first test, which looks for what it leaves


@pytest.fixture(params=["map", "submit"])
def loop(request: pytest.FixtureRequest, any_pool: mpgrad.Pool) -> Loop:
    return {
        "map": any_pool.map,
        "submit": lambda fn, xs: [
            future.result() for future in [any_pool.submit(fn, x) for x in xs]
        ],
    }[request.param]


def serial(fn: Callable[[Any], Any], xs: Sequence[Any]) -> list[Any]:
    return [fn(x) for x in xs]


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- captures


class Fit:
    def __init__(self) -> None:
        self.weight = leaf(3)
        self.loss: Tensor | None = None

    def of_item(self, x: Tensor) -> Tensor:
        return (self.weight * x).sin().sum()


def losses_kept(loop: Loop) -> list[Tensor | None]:
    """A training loop that keeps its loss where the function can see it, and does not look."""
    fit, found = Fit(), list[Tensor | None]()
    for step in range(3):
        results = loop(fit.of_item, [leaf(3, seed=step), leaf(3, seed=step + 1)])
        fit.loss = (results[0] * results[1]).exp()
        fit.loss.backward()
        found += [fit.loss.detach(), fit.weight.grad]
    return found


def test_the_last_loss(loop: Loop) -> None:
    same(losses_kept(loop), losses_kept(serial))


def weight_made_from_others(loop: Loop) -> list[Tensor | None]:
    """The module keeps what it made of its parameters the last time, whose history has been
    freed."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is a newer way
        net = torch.nn.utils.weight_norm(torch.nn.Linear(3, 1, dtype=torch.float64))
    torch.autograd.backward(net(leaf(2, 3)).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the function wrote into what it captures
        for _ in range(2):
            torch.cat(loop(net, [leaf(1, 3), leaf(2, 3)])).sum().backward()
    return [net.weight_g.grad, net.weight_v.grad, net.bias.grad]


def test_weight_norm(loop: Loop) -> None:
    same(weight_made_from_others(loop), weight_made_from_others(serial))


def test_weight_norm_with_data_parallel(any_pool: mpgrad.Pool) -> None:
    def parallel(net: Any, xs: Sequence[Any]) -> list[Any]:
        return [nn.data_parallel(net, x, any_pool.workers) for x in xs]

    same(weight_made_from_others(parallel), weight_made_from_others(serial))


def test_nothing_grows(fork_server: mpgrad.Pool) -> None:
    def nodes_behind(tensor: Tensor) -> int:
        seen, left = set(), [tensor.grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [each for each, _ in node.next_functions]
        return len(seen)

    fit, counts = Fit(), list[tuple[int, int]]()
    with mpgrad.Pool(2) as pool:
        for step in range(12):
            fit.loss = torch.stack(pool.map(fit.of_item, [leaf(3, seed=n) for n in range(4)])).sum()
            fit.loss.backward()
            pool.map(abs, range(8), 1)  # each worker is told of releases along with it
            counts.append(
                (
                    nodes_behind(fit.loss),
                    sum(worker.graphs for worker in pool.stats().workers) if step else 0,
                )
            )
    # how many there are depends on what goes in bundles
    assert max(nodes for nodes, _ in counts) <= 40
    assert max(graphs for _, graphs in counts) <= 8  # of this step, and of the one before


def some_captures(loop: Loop, create_graph: bool = False) -> list[Tensor | None]:
    """Two that some items use, by turns, one that none does, and a leaf."""
    source, plain = leaf(3), leaf(3, seed=1)
    first, second, stale = source.exp(), source.sin(), source.cos()
    stale.sum().backward(retain_graph=False)
    source.grad = None
    captures = [first, second, stale, plain]

    def fn(k: int) -> Tensor:
        assert len(captures) == 4
        return (captures[k % 2] * (1 + k)).prod() * plain.sum() if k != 4 else plain.sum() * 2

    results = loop(fn, range(7))
    one = torch.autograd.grad(results[4], [source, plain], retain_graph=True, allow_unused=True)
    grads = torch.autograd.grad(
        sum(r**2 for r in results),
        [source, plain, first, second],
        create_graph=create_graph,
        retain_graph=True,
    )
    if create_graph:
        grads += torch.autograd.grad(
            sum(g.pow(2).sum() for g in grads), [source, plain], retain_graph=True
        )
    torch.stack(results[:4]).sum().backward()
    return [*one, *grads, source.grad, plain.grad]


def test_captures_that_some_items_use(loop: Loop) -> None:
    same(some_captures(loop), some_captures(serial))


def test_captures_that_some_items_use_and_second_derivatives(loop: Loop) -> None:
    same(some_captures(loop, create_graph=True), some_captures(serial, create_graph=True))


def test_results_fetched_one_by_one(any_pool: mpgrad.Pool) -> None:
    """Each time a token that leads to more, while the earlier ones are in use."""

    def gradients(
        fetch: Callable[[Callable[[int], Tensor]], Iterator[Tensor]],
    ) -> list[Tensor | None]:
        sources = [leaf(3, seed=n) for n in range(4)]
        captures = [source.exp() for source in sources]

        def fn(k: int) -> Tensor:
            return captures[min(k, 2)].sum() * captures[0].prod() * (k + 1)

        arrived = fetch(fn)
        results = [next(arrived)]
        torch.autograd.backward(results[0], retain_graph=True)
        results += arrived
        torch.stack(results).sum().backward()
        captures[3].sum().backward()  # still there
        return [source.grad for source in sources]

    def one_by_one(fn: Callable[[int], Tensor]) -> Iterator[Tensor]:
        for future in [any_pool.submit(fn, k) for k in range(5)]:
            yield future.result()

    expected = gradients(lambda fn: map(fn, range(5)))
    same(gradients(lambda fn: iter(any_pool.imap(fn, range(5)))), expected)
    same(gradients(one_by_one), expected)


def inside_of_a_checkpoint(loop: Loop, reentrant: bool) -> list[Tensor | None]:
    source = leaf(3)
    inner, freed = source.exp(), source.sin()
    freed.sum().backward()
    source.grad = None

    def fn(x: Tensor, given: Any = None if reentrant else freed) -> Any:
        return checkpoint(lambda y: (y * inner).sum(), x, use_reentrant=reentrant)

    sum(r**2 for r in loop(fn, [leaf(3, seed=1), leaf(3, seed=2)])).backward()
    return [source.grad]


def test_captures_inside_of_a_checkpoint(loop: Loop) -> None:
    same(inside_of_a_checkpoint(loop, False), inside_of_a_checkpoint(serial, False))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["keep", "recompute", "auto"])
def test_captures_inside_of_a_reentrant_checkpoint(graphs: str, fork_server: mpgrad.Pool) -> None:
    """No graph leads to them: all count as reached."""
    # PyTorch frees the history of `inner` with the first of two items
    with pytest.raises(RuntimeError, match="second time"):
        inside_of_a_checkpoint(serial, True)
    with every_loss_gets(1.0), mpgrad.Pool(2, graphs=graphs) as pool:
        same(inside_of_a_checkpoint(pool.map, True), inside_of_a_checkpoint(serial, False))


class Scaled(torch.autograd.Function):
    """Its backward uses a tensor that neither its forward nor its graph shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: list[Tensor]) -> Tensor:
        ctx.holder = holder
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.holder[0], None


@pytest.mark.parametrize("how", ["hook", "Function", "both, and one in the forward"])
def test_captures_that_only_a_backward_uses(loop: Loop, how: str) -> None:
    """The first derivative depends on them, though the result does not; so do derivatives of higher
    order."""

    def gradients(loop: Loop) -> list[Tensor | None]:
        sources = [leaf(3, seed=n) for n in range(4)]
        hooked, held, seen, stale = [source.exp() for source in sources]
        stale.sum().backward()
        sources[3].grad = None
        fit = {"hooked": hooked, "held": [held], "seen": seen, "stale": stale}

        def fn(x: Tensor) -> Tensor:
            y: Tensor = x**2
            if how != "Function":
                y.register_hook(lambda grad: grad * fit["hooked"])
            if how != "hook":
                y = Scaled.apply(y, fit["held"])
            return (y**2 * (fit["seen"] if how.startswith("both") else 1.0)).sum()

        xs = [leaf(3, seed=n) for n in (5, 6, 7)]
        total = sum(loop(fn, xs))
        first = torch.autograd.grad(total, xs, create_graph=True)
        second = torch.autograd.grad(
            sum(g.sum() for g in first), [*sources[:3], *xs], create_graph=True, allow_unused=True
        )
        of_second = sum(g.pow(2).sum() for g in second if g is not None)
        return [
            *first,
            *second,
            *torch.autograd.grad(of_second, [*sources, *xs], allow_unused=True),
        ]

    same(gradients(loop), gradients(serial))


def test_captures_that_only_a_backward_uses_and_that_are_gone(fork_server: mpgrad.Pool) -> None:
    source, x = leaf(3), leaf(3, seed=1)
    inner = source.exp()

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * inner)
        return (y**2).sum()

    with mpgrad.Pool(1) as pool:
        result = pool.map(fn, [x])[0]
        inner.mul_(2)
        with pytest.raises(RuntimeError, match="dropped or changed since"):
            torch.autograd.grad(result, x, create_graph=True)
        (grad,) = torch.autograd.grad(result, x)  # which needs no history
        same([grad], [8 * x.detach() * source.detach().exp()])


def test_derivatives_lead_to_what_was_known_with_their_result(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """What an item uses that is answered later, in its forward or only in its backward, may be
    gone."""
    source, x, y = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
    forward, backward = source.exp(), source.sin()
    path = str(tmp_path / "first is here")
    os.mkfifo(path)

    def fn(given: tuple[int, Tensor]) -> Tensor:
        number, x = given
        if number == 0:
            return (x**3).sum()
        open(path).close()  # waits for the caller to open its end
        z = x**2 * forward
        z.register_hook(lambda grad: grad * backward)
        return z.sum()

    with mpgrad.Pool(1) as pool:
        arriving = pool.imap(fn, [(0, x), (1, y)], chunksize=1)
        first = next(arriving)
        open(path, "w").close()
        second = next(arriving)
        torch.autograd.grad(second, y, create_graph=True)
        with torch.no_grad():
            forward.add_(1)
            backward.add_(1)
        (grad,) = torch.autograd.grad(first, x, create_graph=True)
        same(
            torch.autograd.grad(grad.sum(), [x, source], allow_unused=True), [6 * x.detach(), None]
        )


def test_gradients_that_nobody_takes_are_dropped(fork_server: mpgrad.Pool) -> None:
    source, other, x = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
    seen, hooked = source.exp(), other.exp()

    def fn(x: Tensor) -> Tensor:
        y = x**2 * seen
        y.register_hook(lambda grad: grad * hooked)
        return y.sum()

    with mpgrad.Pool(1) as pool:
        (result,) = pool.map(fn, [x])
        (grad,) = torch.autograd.grad(result, x, create_graph=True)
        for _ in range(3):
            torch.autograd.grad(grad.sum(), other, retain_graph=True)
        assert sums_kept(result) == 0
        same(torch.autograd.grad(grad.sum(), [source]), [(2 * x * seen * hooked).detach()])


def test_gradients_by_item_of_a_capture_that_only_the_backward_uses(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a result of a bundle: an output of a call's node, as what is looked for may be."""
    with mpgrad.Pool(1) as pool:
        with monkeypatch.context() as patched:
            bundle(patched, 2)
            _, captured = pool.map(torch.exp, [leaf(2000, seed=1), leaf(2000)])
        assert captured.grad_fn.name() == "CallBackward" and captured.output_nr == 1
        items = [leaf(2000, seed=2), leaf(2000, seed=3)]

        def fn(x: Tensor) -> Tensor:
            y = x * 2
            y.register_hook(lambda grad: grad * captured)
            return (y**2).sum()

        results = pool.map(fn, items)
        grads = [
            torch.autograd.grad(result, x, create_graph=True)[0]
            for result, x in zip(results, items, strict=True)
        ]
        found = per_item_grad(grads, captured, [torch.ones_like(grad) for grad in grads])
        same(found, [8 * x.detach() for x in items])


def test_a_capture_that_is_frozen_before_the_result_is_fetched(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1) as pool:
        for inner in (False, True):
            weight, other, source = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
            further = source.exp() if inner else torch.ones(3, dtype=torch.float64)
            future = pool.submit(
                lambda x, w=weight, o=other, f=further: (w * o * f * x).sum(), torch.ones(3)
            )
            weight.requires_grad_(False)
            result = future.result()
            weight.requires_grad_(True)
            result.backward()
            same(
                [weight.grad, other.grad], [(other * further).detach(), (weight * further).detach()]
            )


def test_the_order_of_sums_is_that_of_the_items_whenever_results_are_fetched(
    fork_server: mpgrad.Pool,
) -> None:
    """With one token for all, as in a map, and with another for results that came later."""

    def gradients(loop: Loop) -> list[Tensor | None]:
        source = torch.linspace(0.1, 1, 200).requires_grad_()
        plain = torch.linspace(0.3, 2, 200).requires_grad_()
        one, other = source.sin(), source.cos()

        def fn(k: int) -> Tensor:
            result = (one * plain / (k + 1.7)).sin().sum()
            if k < 4:
                return result
            time.sleep(0.02)  # the caller has its first results by then
            return result * other.sum()

        torch.stack(loop(fn, range(8))).sum().backward()
        return [source.grad, plain.grad]

    with mpgrad.Pool(1, deterministic=True) as pool:
        expected = gradients(pool.map)
        for loop in (pool.imap, lambda fn, xs: reversed(list(pool.imap(fn, xs)))):
            for grad, other in zip(
                gradients(lambda fn, xs, loop=loop: list(loop(fn, xs))), expected, strict=True
            ):
                assert grad is not None and other is not None and torch.equal(grad, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_a_function_turns_on(any_pool: mpgrad.Pool, mode: Callable[[], Any]) -> None:
    source = leaf(3)
    used, unused = source.exp(), source.sin()
    unused.sum().backward()
    source.grad = None

    def fn(x: Tensor) -> Tensor:
        assert unused is not None
        with torch.enable_grad():
            return (x * used).sum()

    with mode():
        results = any_pool.map(
            fn, [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
        )
    if mode is torch.no_grad:
        torch.stack(results).sum().backward()
        same([source.grad], [2 * used.detach()])
    else:
        assert not results[0].requires_grad


# --- items


def unused_inputs(loop: Loop) -> list[Any]:
    """Behind what is not used: a history to be used later, one that was freed, hooks, a Function
    that would see zeros."""
    seen: list[Any] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(grad)
            return grad

    source, x = leaf(3), leaf(3, seed=1)
    later, freed, hooked, passed = source.exp(), source.sin(), source.cos(), Seen.apply(source)
    freed.sum().backward()
    hooked.register_hook(lambda grad: seen.append(grad) or grad * 2)
    source.grad = None
    given = (x.tanh(), later, freed, hooked, passed)
    (result,) = loop(lambda each: each[0].sum() * 2 + each[1].detach().sum(), [given])
    result.backward()
    found = [source.grad, x.grad]
    later.sum().backward()
    return [*found, source.grad, *seen]


def test_inputs_that_are_not_used(loop: Loop) -> None:
    same(unused_inputs(loop), unused_inputs(serial))


def test_inputs_that_are_used_by_some(loop: Loop) -> None:
    def gradients(loop: Loop) -> list[Tensor | None]:
        source = leaf(4)
        rows = [source[k] * 2 for k in range(4)]
        shared = source.exp()

        def fn(pair: tuple[int, Tensor, Tensor]) -> Tensor:
            k, row, shared = pair
            return (row.sin() * shared).sum() if k % 2 else row.cos()

        results = loop(fn, [(k, row, shared) for k, row in enumerate(rows)])
        results[0].backward(retain_graph=True)
        sum(r**2 for r in results).backward()
        return [source.grad]

    same(gradients(loop), gradients(serial))


KEPT: list[Any] = []


def keeps_its_argument(pair: tuple[Tensor, Tensor]) -> Tensor:
    KEPT.append(pair[1])
    return pair[0].sum()


@pytest.mark.filterwarnings("ignore:.* changed .* only the worker's copy")  # on purpose
def test_inputs_that_the_function_keeps(fork_server: mpgrad.Pool) -> None:
    """Whether it is used cannot be told then; the gradients are right, and none comes."""
    x, y = leaf(3), leaf(3, seed=1)
    with mpgrad.Pool(1) as pool:
        results = pool.map(keeps_its_argument, [(x * 2, y * 2), (x * 3, y * 3)])
        pool.map(lambda k: KEPT.clear(), [0])
        grads = torch.autograd.grad(torch.stack(results).sum(), [x, y], allow_unused=True)
    same(grads, [torch.full_like(x, 5), None])


def test_inputs_written_to_returned_and_sparse(loop: Loop) -> None:
    def gradients(loop: Loop) -> list[Tensor | None]:
        source = leaf(3, 3)

        def fn(given: dict[str, Tensor]) -> Any:
            given["written"].mul_(2)
            given["written and forgotten"].add_(1)
            values = given["sparse"].to_dense().sum() * given["written"].sum()
            return given["returned"], values

        given = {
            name: source * (k + 1)
            for k, name in enumerate(("written", "written and forgotten", "returned", "unused"))
        }
        given["sparse"] = source.exp().to_sparse()
        given["sparse, unused"] = source.sin().to_sparse()
        ((returned, values),) = loop(fn, [given])
        (returned.sum() * values).backward()
        return [source.grad]

    same(gradients(loop), gradients(serial))


def test_an_input_written_into_a_buffer(loop: Loop) -> None:
    def gradients(loop: Loop) -> list[Tensor | None]:
        source = leaf(3)
        freed = source.exp()
        freed.sum().backward()
        source.grad = None

        def fn(given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            given[2].mul_(given[1])
            return given[0].sum()

        loop(fn, [(source * 2, freed, torch.ones(3, dtype=torch.float64))])[0].backward()
        return [source.grad]

    same(gradients(loop), gradients(serial))


def test_an_input_used_inside_and_outside_of_a_reentrant_checkpoint(
    fork_server: mpgrad.Pool,
) -> None:
    def gradients(loop: Loop) -> list[Tensor | None]:
        source, x = leaf(3), leaf(3, seed=1)

        def fn(given: tuple[Tensor, Tensor]) -> Any:
            one, x = given
            return (one * 2).sum() + checkpoint(lambda y: (y * one).sum(), x, use_reentrant=True)

        loop(fn, [(source + 1, x)])[0].backward()
        return [source.grad, x.grad]

    with mpgrad.Pool(1) as pool:
        same(gradients(pool.map), gradients(serial))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["keep", "auto"])
def test_parts_of_a_graph_with_a_reentrant_checkpoint(
    fork_server: mpgrad.Pool, graphs: Any
) -> None:
    """A worker runs all of it for each part. What was not asked for goes neither into the next part
    nor into a capture."""
    weight, one, other = leaf(3), leaf(3, seed=1), leaf(3, seed=2)

    def fn(given: tuple[Tensor, Tensor]) -> Tensor:
        assert weight.grad is None
        return (checkpoint(lambda y: y * y * weight, given[0], use_reentrant=True) * given[1]).sum()

    def parts(loop: Loop) -> list[Tensor | None]:
        (result,) = loop(fn, [(one * 2, other * 3)])
        wanted = [[one], [other], [weight], [one, other]]
        return [
            grad for each in wanted for grad in torch.autograd.grad(result, each, retain_graph=True)
        ]

    def by_hand(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return [(x * x * weight * y).sum() for x, y in items]

    with mpgrad.Pool(1, graphs=graphs) as pool:
        for _ in range(2):
            same(parts(pool.map), parts(by_hand))


def test_what_a_call_does_not_use_of_another(any_pool: mpgrad.Pool) -> None:
    """Neither the graph in the worker nor the history in the caller is run."""
    seen: list[Tensor] = []
    source = leaf(3)
    given = source.exp()
    given.register_hook(seen.append)
    first = any_pool.submit(lambda x: (x * 2, x.detach() + 1), given)
    second = any_pool.submit(lambda pair, y: (pair[1] * y).sum(), first, leaf(3, seed=1) * 1)
    second.result().backward()
    assert not seen and source.grad is None
    first.result()[0].sum().backward()
    same([source.grad], [2 * given.detach()])
    assert len(seen) == 1


def test_gradients_by_item_of_what_is_not_used(any_pool: mpgrad.Pool) -> None:
    source = leaf(3)
    used, unused, captured = source.exp(), source.sin(), source.cos()

    def fn(pair: tuple[Tensor, Tensor]) -> Tensor:
        assert captured is not None
        return pair[0].sum() * 3

    results = any_pool.map(fn, [(used, unused), (used, unused)])
    for found in per_item_grad(results, (used, unused, captured)):
        same(found, [torch.full_like(used, 3), torch.zeros_like(used), torch.zeros_like(used)])
    with pytest.raises(TypeError, match="must be a tensor"):
        per_item_grad(results, 3)  # type: ignore[arg-type]


def test_a_worker_dies(fork_server: mpgrad.Pool) -> None:
    def gradients(loop: Loop, kill: Callable[[], object]) -> list[Tensor | None]:
        sources = [leaf(3, seed=n) for n in range(3)]
        used, stale, other = (source.exp() for source in sources)
        stale.sum().backward()
        sources[1].grad = None

        def fn(pair: tuple[Tensor, Tensor]) -> Tensor:
            assert stale is not None
            return (pair[0] * used).sum()

        results = loop(fn, [(x * 1, other) for x in [leaf(3, seed=k) for k in range(6)]])
        kill()
        sum(r**2 for r in results).backward()
        return [source.grad for source in sources]

    expected = gradients(serial, lambda: None)
    with mpgrad.Pool(2, deterministic=True) as pool:
        for number in (0, 1):
            same(
                gradients(
                    pool.map,
                    lambda number=number: os.kill(
                        staffed(pool).stats().workers[number].pid, signal.SIGKILL
                    ),
                ),
                expected,
            )


# --- hooks of leaves


def hooked_leaves(loop: Loop) -> list[Any]:
    """An item and a capture that one of two results depends on, and one of each that none does."""
    leaves = {
        name: leaf(3, seed=seed)
        for seed, name in enumerate(("item", "capture", "unused item", "unused capture"))
    }
    calls: list[Any] = []
    for name, each in leaves.items():
        each.register_hook(lambda grad, name=name: calls.append((name, grad.clone())))  # type: ignore[misc]
        each.register_post_accumulate_grad_hook(
            lambda each, name=name: calls.append((f"{name}, after", each.grad.clone()))
        )

    def fn(given: tuple[int, Tensor, Tensor]) -> Tensor:
        number, item, _ = given
        assert leaves["unused capture"].requires_grad
        return (item * leaves["capture"]).sum() if number else item.sum()

    results = loop(
        fn,
        [
            (number, leaves["item"] * 1 if number else leaves["item"], leaves["unused item"])
            for number in (0, 1)
        ],
    )
    torch.stack(results).prod().backward()
    return [value for _, value in sorted(calls, key=lambda call: call[0])] + [
        each.grad for each in leaves.values()
    ]


def test_hooks_of_leaves(loop: Loop) -> None:
    ours, theirs = hooked_leaves(loop), hooked_leaves(serial)
    assert len(theirs) == 4 + 4  # of those that are used, each hook once
    same(ours, theirs)


def test_what_a_call_freezes(any_pool: mpgrad.Pool) -> None:
    """The backward raised: it asked for the gradients of leaves that needed none any more."""
    head, body = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def frozen(x: Tensor) -> Tensor:
        body.requires_grad_(False)
        return (x * body * head).sum()

    def cut(x: Tensor) -> Tensor:
        return (x.detach_() * head).sum()

    for function, given in ((frozen, 1), (cut, None)):
        xs = [
            torch.full((3,), float(k), dtype=torch.float64, requires_grad=True) for k in range(1, 5)
        ]
        head.grad = body.grad = None
        sum(any_pool.map(function, xs)).backward()
        body.requires_grad_(True)  # of which calls in the caller's own process may have written to
        assert body.grad is None and torch.equal(head.grad, torch.full_like(head, 10))
        assert [x.grad if x.grad is None else x.grad.tolist() for x in xs] == [
            given and [given] * 3
        ] * 4
