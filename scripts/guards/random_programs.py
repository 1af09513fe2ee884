"""Runs random programs, for which two versions of mpgrad must return the same values and gradients,
bit for bit.

    python scripts/guards/random_programs.py --against /path/to/another/checkout --programs 200

A seed determines a program that uses the public interface: options of a pool, steps that use the
results of earlier steps, and derivatives. Most programs compute with whole numbers in float64.
Their sums are exact, so the order in which gradients are added does not matter, and the serial loop
must also return the same bits. Other programs compute with real numbers. They use only what
docs/guarantees.md promises bit for bit: a deterministic pool, where each item uses a capture once.

Each version has one process for all programs, with its tree as PYTHONPATH (`--serve`). It reads
seeds and answers each with a line of JSON. The exit code is 1 after the first program that differs,
hangs or ends its process. `--seed N --programs 1` runs that program again; five of them share a
pool.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import hashlib
import inspect
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Operation = Callable[[Tensor, Tensor], Tensor]

SECONDS = 120  # for one program
PROGRAMS_OF_A_POOL = 5
EXACT = 2.0**50  # sums of whole numbers up to 2 ** 53 are exact
ROOT = Path(__file__).parents[2]
SHAPES = [(), (1,), (3,), (2, 3), (4, 1), (0,), (2, 1, 2)]


# --- the functions that the pool runs


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * x, x.sum()

    @staticmethod
    def backward(ctx: Any, of_square: Tensor, of_sum: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return 2 * x * of_square + of_sum


def written(t: Tensor, u: Tensor) -> Tensor:
    copy = t.reshape(-1).clone()
    copy[:1] = u.sum()
    return copy.mul_(2).remainder(9)


def own_gradient(t: Tensor, u: Tensor) -> Tensor:
    own = t.detach().requires_grad_()
    (found,) = torch.autograd.grad((own**2).sum(), own)
    return found * u.sum().remainder(3)


# Whole numbers stay whole. Remainders keep them small, and pass gradients on unchanged.
SMOOTH: list[Operation] = [
    lambda t, u: (t * u.sum()).remainder(5),
    lambda t, u: (t * t - u.sum()).remainder(3),
    lambda t, u: torch.stack([t, -t * t]).sum(0) + u.sum().remainder(4),
    lambda t, u: torch.cat([t.reshape(-1), u.reshape(-1)])[-4:],
    lambda t, u: (t.reshape(-1, 1) @ u.reshape(1, -1)[:, :3]).remainder(4),
    lambda t, u: torch.where(t.detach() > 0, t, u.sum().remainder(3)),
    lambda t, u: t.unsqueeze(0).transpose(0, -1) * 2,
    lambda t, u: t.reshape(-1).cumsum(0).remainder(6),
    lambda t, u: (t.detach() + 1) * u.sum().remainder(3),
    written,
]
# These do not run under the transforms of torch.func.
ORDINARY: list[Operation] = [
    lambda t, u: Square.apply(t)[0].remainder(5) + Square.apply(u)[1].remainder(5),  # type: ignore[no-untyped-call]
    lambda t, u: checkpoint(lambda a: (a * a).remainder(7), t, use_reentrant=False),
    own_gradient,
]
REAL: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.sin(),
    lambda t: t.tanh() * t,
    lambda t: (t * 0.3).exp(),
    lambda t: t.reshape(-1, 1) @ t.reshape(1, -1)[:, :2],
    lambda t: t / (2 + t * t),
    lambda t: torch.cat([t.reshape(-1), t.reshape(-1)[:1]]).cumsum(0),
    lambda t: t.clone().mul_(0.7),
]


def tensors_in(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def numbers_in(value: Any) -> list[Tensor]:
    return [each for each in tensors_in(value) if each.dtype == torch.float64]


class Task:
    """A random composition of operations, the same for the same seed.

    A task may raise, draw random numbers, kill its worker once, or return a loss.
    """

    def __init__(
        self, seed: int, operations: Sequence[Operation], captures: Sequence[Tensor], **traits: Any
    ) -> None:
        self.seed, self.operations, self.captures, self.traits = seed, operations, captures, traits

    def __call__(self, *given: Any) -> Any:
        choose = random.Random(self.seed)
        made = [*numbers_in(given), *self.captures]
        if "raises" in self.traits and int(sum(each.detach().sum() for each in made)) % 3 == 0:
            raise ValueError(f"task {self.seed} does not take this")
        for _ in range(choose.randrange(1, 4)):
            made.append(choose.choice(self.operations)(choose.choice(made), choose.choice(made)))
        last = made[-1].clone()
        if "draws" in self.traits:
            last = last + torch.randint(-3, 4, last.shape).to(last.dtype)
        if "dies" in self.traits:
            die = functools.partial(die_once, *self.traits["dies"])
            if choose.random() < 0.5 or not last.requires_grad:
                die()
            else:
                last.register_hook(die)  # type: ignore[no-untyped-call]
        if "loss" in self.traits:
            return last.sum().remainder(11)
        return choose.choice(
            [last, (last, made[-2] * 2), {"a": last, "n": 3, "b": [made[0] + 1, None]}]
        )

    def method(self, *given: Any) -> Any:
        return self(*given)


def die_once(mark: str, caller: int, gradient: Tensor | None = None) -> None:
    """Kill the worker that comes here first."""
    with contextlib.suppress(FileExistsError):
        if os.getpid() != caller:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), 9)


# --- the serial loop


class Future:
    """A call of the loop, which has run; other calls may take it as an argument."""

    def __init__(self, fn: Callable[..., Any], *given: Any) -> None:
        self.value: Any = None
        try:
            self.value = fn(*tree_map(self.value_of, given))
        except Exception as error:
            self.value = error

    @staticmethod
    def value_of(given: Any) -> Any:
        if isinstance(given, Future) and isinstance(given.value, Exception):
            raise AncestorFailedError
        return given.value if isinstance(given, Future) else given

    def result(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class AncestorFailedError(Exception):
    """Replaces mpgrad's error of this name."""


class Loop:
    """The serial loop behind the interface of a pool."""

    submit = Future

    def starmap(
        self, fn: Any, items: Iterable[Any], chunksize: Any = None, on_error: str = "raise"
    ) -> list[Any]:
        calls = [Future(fn, *item) for item in items]
        return [call.value if on_error == "return" else call.result() for call in calls]

    def map(self, fn: Any, items: Iterable[Any], *rest: Any, **options: Any) -> list[Any]:
        return self.starmap(fn, [(item,) for item in items], *rest, **options)

    imap = imap_unordered = map

    def apply(self, fn: Any, given: Any) -> Any:
        return fn(*given)

    def reduce(self, fn: Any, items: Any, targets: Any, associative: bool = False) -> list[Any]:
        def fold(target: Tensor, item: Tensor) -> Tensor:
            made: Tensor | None = torch.add(target, item) if fn == "sum" else fn(target, item)
            return target if made is None else made

        return [functools.reduce(fold, items, target.clone()) for target in targets]

    def map_reduce(self, fn: Any, items: Any, name: str) -> Any:
        return functools.reduce(torch.add, map(fn, items))


LOOP = Loop()


# --- the programs


class Entry(NamedTuple):
    """A recorded value: its label, its type, a digest of its bytes, and a readable text."""

    label: str
    kind: str
    digest: str
    shown: str


def entry(label: str, value: Any) -> Entry:
    if isinstance(value, Exception):
        shown = f"{value}" if isinstance(value, ValueError) else ""  # other texts may be improved
        return Entry(label, type(value).__name__, shown, shown)
    if not isinstance(value, Tensor):
        return Entry(label, type(value).__name__, repr(value), repr(value))
    kind = f"{value.dtype} {[*value.shape]}"
    plain = value.detach().reshape(-1) + 0  # this turns -0.0 into 0.0
    if plain.dtype == torch.float64 and plain.numel() and plain.abs().max() > EXACT:
        return Entry(label, kind, "too large to be exact", "")
    digest = hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return Entry(label, kind, digest, str(plain[:12].tolist()) if plain.any() else "zeros")


class Program:
    """A program of whole numbers. `allowed` are traits of its tasks. If it `is_alone`, no other
    thread runs one."""

    def __init__(self, seed: int, calls: Any, allowed: dict[str, Any], is_alone: bool) -> None:
        self.choose, self.calls, self.allowed, self.is_alone = (
            random.Random(seed),
            calls,
            allowed,
            is_alone,
        )
        self.record: list[Entry] = []
        numbers = torch.Generator().manual_seed(seed)
        shapes = [self.choose.choice(SHAPES) for _ in range(4)]
        self.leaves = [torch.randint(-3, 4, shape, generator=numbers).double() for shape in shapes]
        for leaf in self.leaves:
            leaf.requires_grad_(self.choose.random() < 0.8)
        self.made = [*self.leaves]  # values for later steps

    def run(self) -> list[Entry]:
        steps = [self.map, self.map, self.imap, self.graph, self.reduce, self.train]
        if self.is_alone:  # levels of forward-mode differentiation are shared by all threads
            steps.append(self.transform)
        for number in range(self.choose.randrange(1, 5)):
            step = self.choose.choice(steps)
            step(f"step {number}, {step.__name__}")
        self.backward()
        return self.record

    def note(self, label: str, value: Any) -> None:
        leaves = tree_leaves(value, is_leaf=lambda each: each is None)
        self.record += [entry(f"{label} [{number}]", each) for number, each in enumerate(leaves)]

    def attempt(self, label: str, step: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Note the result of a step, or its exception. Later steps use the result."""
        try:
            found = step(*given, **options)
        except Exception as error:
            found = error
        self.note(label, found)
        self.made += numbers_in(found)
        return found

    def some(self, count: int) -> list[Tensor]:
        ways: list[Callable[[Tensor], Tensor]] = [
            torch.clone,
            torch.detach,
            lambda t: t,
            lambda t: t[:1] if t.dim() else t * 2,
        ]
        return [self.choose.choice(ways)(self.choose.choice(self.made)) for _ in range(count)]

    def items(self) -> list[tuple[Any, ...]]:
        others = [
            3,
            None,
            "text",
            torch.arange(3),
            torch.ones(2, dtype=torch.bfloat16),
            torch.tensor(True),
        ]
        count = self.choose.randrange(1, 7)
        return [
            (*self.some(self.choose.randrange(1, 3)), self.choose.choice(others))
            for _ in range(count)
        ]

    def task(self) -> Callable[..., Any]:
        traits = {name: value for name, value in self.allowed.items() if self.choose.random() < 0.2}
        if "dies" in traits:
            traits["dies"] = f"{traits['dies']}/{self.choose.random()}", os.getpid()
        captures = self.some(self.choose.randrange(3))
        made = Task(self.choose.randrange(10**6), [*SMOOTH, *ORDINARY], captures, **traits)
        forms: list[Callable[..., Any]] = [
            made,
            made.method,
            functools.partial(made),
            lambda *given: made(*given),
        ]
        return self.choose.choice(forms)

    def map(self, label: str) -> None:
        choose, task, items = self.choose, self.task(), self.items()
        options = {
            "chunksize": choose.choice([None, None, 1, 3]),
            "on_error": choose.choice(["raise", "return"]),
        }
        way = choose.choice([self.calls.map, self.calls.starmap, None])
        if way is None:
            self.attempt(label, self.calls.apply, task, items[0])
        else:
            self.attempt(label, way, task, items, **options)

    def imap(self, label: str) -> None:
        task, items, size = self.task(), self.items(), self.choose.choice([1, 2])

        def collected() -> list[Any]:
            return [*self.calls.imap(task, iter(items), size)]

        def added() -> Any:  # the order of the results is not fixed
            return sum(
                each.sum() for each in numbers_in([*self.calls.imap_unordered(task, items, size)])
            )

        self.attempt(label, self.choose.choice([collected, added]))

    def graph(self, label: str) -> None:
        """Run calls that take futures; the values are read early, late or never."""
        choose, made = self.choose, [*self.some(2)]
        futures: list[Any] = []
        for _ in range(choose.randrange(2, 7)):
            futures.append(self.calls.submit(self.task(), choose.choice(made), choose.choice(made)))
            made.append(futures[-1])
            if choose.random() < 0.3:
                self.attempt(label, futures[-1].result)
        for future in choose.sample(futures, choose.randrange(1, len(futures))):
            self.attempt(label, future.result)

    def reduce(self, label: str) -> None:
        choose, factor = self.choose, self.some(1)[0].sum().remainder(3)
        items, targets = (list(map(three, self.some(choose.randrange(1, 6)))) for _ in range(2))

        def in_place(target: Tensor, item: Tensor) -> None:
            target.add_(item * factor)

        def returned(target: Tensor, item: Tensor) -> Tensor:
            return (target * 2 - item).remainder(7)

        fold = choose.choice([in_place, returned, "sum"])
        self.attempt(label, self.calls.reduce, fold, items, targets, associative=fold == "sum")
        self.attempt(
            label, self.calls.map_reduce, lambda x: (x * x * factor).remainder(5), items, "sum"
        )

    def train(self, label: str) -> None:
        """Differentiate losses whose gradients are mostly the same, because a pool predicts them,
        and change a parameter in between."""
        choose, weight = self.choose, self.some(1)[0].detach().clone().requires_grad_()
        leaves = [weight]

        def fresh(value: Any) -> Any:
            if not numbers_in(value):
                return value
            leaves.append(value.detach().clone().requires_grad_(choose.random() < 0.7))
            return choose.choice([leaves[-1], leaves[-1].clone()])

        items = tree_map(fresh, self.items())
        wanted = [each for each in leaves if each.requires_grad]
        task = Task(choose.randrange(10**6), SMOOTH, [], loss=True)
        for _ in range(choose.randrange(2, 8)):
            losses = self.calls.map(
                lambda item: task(weight, item), items, choose.choice([None, None, 1])
            )
            self.note(label, losses)
            scale, inputs = choose.choice([1] * 7 + [3]), choose.choice([wanted] * 7 + [[weight]])
            total = sum(losses) * scale + 0 * weight.sum()
            self.note(f"{label}, gradients", torch.autograd.grad(total, inputs, allow_unused=True))
            with torch.no_grad():
                weight.sub_(losses[0].remainder(3))

    def transform(self, label: str) -> None:
        task, items = (
            Task(self.choose.randrange(10**6), SMOOTH, self.some(1)),
            list(map(three, self.some(3))),
        )

        def total(x: Tensor) -> Tensor:
            return sum(
                (
                    each.sum()
                    for each in numbers_in(self.calls.map(task, [(x, item) for item in items]))
                ),
                0 * x.sum(),
            )

        func: Any = torch.func
        way = self.choose.choice(
            [
                func.grad,
                func.jacrev,
                func.jacfwd,
                lambda f: func.grad(lambda x: func.grad(f)(x).sum()),
            ]
        )
        try:
            self.note(label, way(total)(items[0].detach()))
        except Exception as error:
            self.note(label, error)

    def backward(self) -> None:
        """Take derivatives of a random kind. A pool's results may have histories that lead nowhere,
        and the choice does not depend on that.
        """
        choose, inputs = self.choose, [each for each in self.leaves if each.requires_grad]
        chosen = [each for each in self.made if choose.random() < 0.7]
        if chosen and chosen[0].requires_grad and chosen[0].grad_fn is not None:
            chosen[0].register_hook(lambda grad: grad if grad is None else grad * 2)  # type: ignore[no-untyped-call]
        kind = choose.choice(["twice", "some inputs", "batched", "one by one", "higher", "higher"])
        if kind == "twice":
            self.gradients(kind, chosen, inputs, retain_graph=True)
            self.gradients(kind, chosen[:2], inputs)
        elif kind == "some inputs":
            self.gradients(
                kind, chosen, choose.sample(inputs, min(1, len(inputs))), retain_graph=True
            )
            self.gradients(kind, chosen, inputs)
        elif kind == "batched":
            self.gradients(kind, chosen, inputs, is_grads_batched=True)
        elif kind == "one by one":
            for output in chosen:
                self.gradients(kind, [output], inputs, retain_graph=True)
        else:
            found: Any = chosen
            for order in range(choose.randrange(1, 4)):
                squares = [each.remainder(7).square().sum() for each in numbers_in(found)]
                found = self.gradients(
                    f"order {order + 1}", [sum(squares, torch.zeros(()))], inputs, create_graph=True
                )

    def gradients(
        self, label: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: Any
    ) -> Any:
        outputs = [each for each in outputs if each.requires_grad]
        if not outputs or not inputs:
            return self.attempt(label, lambda: [None] * len(inputs))
        weights = [
            torch.arange(each.numel()).double().reshape(each.shape) % 3 + 1 for each in outputs
        ]
        if options.get("is_grads_batched"):
            weights = [torch.stack([each, each * 2, each * 0]) for each in weights]
        return self.attempt(
            label, torch.autograd.grad, outputs, inputs, weights, allow_unused=True, **options
        )


def three(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1), tensor.new_zeros(3)])[:3]


def real_program(seed: int, calls: Any) -> list[Entry]:
    choose, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = choose.choice(
        [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128]
    )

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=numbers, dtype=torch.float64).to(dtype)

    items = [drawn(choose.choice(SHAPES)).requires_grad_() for _ in range(choose.randrange(1, 9))]
    captures = [drawn(()).requires_grad_() for _ in range(choose.randrange(3))]
    steps = [choose.choice(REAL) for _ in range(choose.randrange(1, 4))]

    def task(item: Tensor) -> Tensor:
        for step in steps:
            item = step(item)
        for capture in captures:
            item = item * capture
        return item

    results = [*choose.choice([calls.map, calls.imap])(task, items)]
    torch.autograd.backward(results, [drawn(each.shape) for each in results])
    found = {"result": results, "gradient": [each.grad for each in (*items, *captures)]}
    return [
        entry(f"real, {name} [{k}]", each)
        for name, values in found.items()
        for k, each in enumerate(values)
    ]


def options_of(seed: int) -> dict[str, Any]:
    """Return the options of the pool that runs this program and those of the neighbouring seeds."""
    choose = random.Random(f"pool {seed // PROGRAMS_OF_A_POOL}")
    return {
        "processes": choose.randrange(1, 4),
        "engine": choose.choice(["process", "process", "process", "process", "thread", "inline"]),
        "deterministic": choose.random() < 0.4,
        "graphs": choose.choice(["auto", "auto", "auto", "keep", "recompute"]),
        "send": choose.choice(["auto", "always"]),
        "maxtasksperchild": choose.choice([None, None, None, 4]),
        "retries": choose.choice([1, 2, 5]),
    }


def run_program(seed: int, pool: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Run the program of a seed on a pool and on the loop. Return what it found, and where the two
    first disagree."""
    choose = random.Random(f"program {seed}")
    is_real = options["deterministic"] and choose.random() < 0.5
    threads = choose.choice([1, 1, 1, 3])
    draws = (
        not is_real and threads == 1 and options["engine"] != "thread" and choose.random() < 0.15
    )
    with tempfile.TemporaryDirectory() as folder:
        dies = options["engine"] == "process" and choose.random() < 0.15
        traits = {"raises": choose.random() < 0.5, "draws": draws, "dies": folder if dies else ""}
        allowed = {name: value for name, value in traits.items() if value}

        def recorded(calls: Any) -> list[Entry]:
            torch.manual_seed(seed)
            if is_real:
                return real_program(seed, calls)
            parts = [
                Program(1000 * seed + number, calls, allowed, threads == 1)
                for number in range(threads)
            ]
            with ThreadPoolExecutor(1 if calls is LOOP else threads) as executor:
                return [each for record in executor.map(Program.run, parts) for each in record]

        found = recorded(pool)
        serial = None if draws else first_difference(found, recorded(LOOP), zeros_are_none=True)
    return {"record": found, "serial": serial, "options": options}


def first_difference(
    ours: Sequence[Any], theirs: Sequence[Any], zeros_are_none: bool = False
) -> Any:
    """Return the first two entries that differ, or None."""
    for one, other in zip(ours, theirs, strict=False):
        unused = {"None", "zeros"} >= {one[3], other[3]} and zeros_are_none
        if list(one) != list(other) and not unused:
            return one, other
    return None if len(ours) == len(theirs) else (f"{len(ours)} values", f"{len(theirs)} values")


# --- two versions


def serve(planted: str) -> None:
    import mpgrad

    assert (
        mpgrad.__file__ is not None
        and Path(os.environ["PYTHONPATH"]) in Path(mpgrad.__file__).parents
    )
    faulthandler.enable()
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    exec(planted, {"mpgrad": mpgrad})
    known = inspect.signature(mpgrad.Pool).parameters
    options: dict[str, Any] = {}
    # the first pool stays open, so that others start in milliseconds
    with mpgrad.Pool(1), contextlib.ExitStack() as stack:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            if options_of(int(line)) != options:
                stack.close()
                options = options_of(int(line))
                pool = stack.enter_context(
                    mpgrad.Pool(**{name: options[name] for name in options.keys() & known})
                )
            print(json.dumps(run_program(int(line), pool, options)), flush=True)
            faulthandler.cancel_dump_traceback_later()


class Version:
    """A tree, and the process that runs programs with it. `planted` is a statement that breaks it,
    for tests."""

    def __init__(self, tree: Path, planted: str = "") -> None:
        self.tree = tree
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", planted]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, seed: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(seed, file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {
                "record": [],
                "serial": f"its process ended ({self.process.wait()})",
                "options": {},
            }
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def compare(versions: Sequence[Version], seeds: Sequence[int]) -> int:
    """Run the programs of all seeds, and print the first difference. Return the exit code."""
    values, start = 0, time.monotonic()
    for seed in seeds:
        for version in versions:
            version.ask(seed)
        answers = [version.answer() for version in versions]
        values += len(answers[0]["record"])
        for version, answer in zip(versions, answers, strict=True):
            others = {"the serial loop": answer["serial"]}
            others[str(versions[0].tree)] = first_difference(answers[0]["record"], answer["record"])
            for other, difference in others.items():
                if difference is not None:
                    print(
                        f"seed {seed}: {version.tree} and {other} differ {answer['options']}\n  "
                        f"{difference}"
                    )
                    return 1
    print(
        f"{len(seeds)} programs, {values} values: no difference ({time.monotonic() - start:.0f} s)"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to test (this one)")
    parser.add_argument(
        "--against",
        type=Path,
        help="another checkout; without one, only the serial loop is compared",
    )
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--serve", metavar="PLANTED", help=argparse.SUPPRESS)
    parser.add_argument("--planted", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve)
        return 0
    trees = [given.tree] if given.against is None else [given.tree, given.against]
    versions = [
        Version(tree.resolve(), given.planted if not number else "")
        for number, tree in enumerate(trees)
    ]
    try:
        return compare(versions, range(given.seed, given.seed + given.programs))
    finally:
        for version in versions:
            version.close()


if __name__ == "__main__":
    sys.exit(main())
