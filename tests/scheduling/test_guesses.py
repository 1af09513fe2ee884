"""Which gradient a function's losses will get: what is learned, and that wrong guesses become ever fewer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from mpgrad.scheduling.guesses import FORGIVEN, LEAST, Guess


def wasted(gradients: Iterator[float], maps: int) -> float:
    """Of so many maps, whose losses get these gradients, the part whose backwards were run in vain."""
    guess, wrong = Guess(), 0
    for gradient in itertools.islice(gradients, maps):
        expected = guess.ask()
        if expected is not None and expected != gradient:
            wrong += 1
            guess.note_wrong()
        guess.note_right(gradient)
    return wrong / maps


def test_a_gradient_that_keeps_coming_is_expected() -> None:
    guess = Guess()
    for _ in range(LEAST):
        assert guess.ask() is None
        guess.note_right(0.25)
    assert guess.ask() == 0.25
    guess.note_other()  # a map's results got no backward
    assert guess.ask() is None


def as_often_as_it_is_expected() -> Iterator[float]:
    """The worst that a caller can do: another gradient whenever one is expected."""
    guess, gradient = Guess(), 1.0
    while True:
        if guess.ask() is not None:
            guess.note_wrong()
            gradient += 1
        guess.note_right(gradient)
        yield gradient


def after_all_is_forgiven() -> Iterator[float]:
    for gradient in itertools.count(1.0):
        yield from itertools.repeat(gradient, LEAST + FORGIVEN)


@pytest.mark.parametrize("gradients", [as_often_as_it_is_expected, after_all_is_forgiven, lambda: itertools.cycle([1.0, 2.0])])
def test_few_backwards_are_run_in_vain(gradients: type[Iterator[float]]) -> None:
    assert wasted(gradients(), 1000) <= 0.05


@pytest.mark.parametrize("seed", range(5))
def test_few_are_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    runs = (itertools.repeat(float(number), rng.choice([1, 2, 3, 5, 8, 40])) for number in itertools.count())
    assert wasted(itertools.chain.from_iterable(runs), 2000) <= 0.05


def test_maps_under_way_at_once_are_bounded_too() -> None:
    """Each call of `submit` is one: a thousand whose results die would have run their backwards in vain."""
    guess = Guess()
    for _ in range(1000):
        guess.note_right(1.0)
    assert 0 < sum(guess.ask() is not None for _ in range(1000)) <= 1000 * 0.07
