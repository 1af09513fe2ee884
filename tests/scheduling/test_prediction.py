"""Which gradient a function's losses will get: what is learned, and that few predictions are wrong,
whatever comes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from mpgrad.machine.timing import CONFIRMED, LEAST, PRICE, Predictor


def wasted(gradients: Iterator[float], maps: int) -> float:
    """Of so many maps, whose losses get these gradients, the part whose backwards were run in
    vain."""
    predictor, wrong = Predictor(), 0
    for gradient in itertools.islice(gradients, maps):
        wrong += not shown(predictor, gradient)
    return wrong / maps


def shown(predictor: Predictor, gradient: float) -> bool:
    """A map whose losses get this gradient; false where another one was predicted."""
    predicted = predictor.predict()
    predictor.note_gradient(gradient, None if predicted is None else predicted.gradient)
    if predicted is None or predicted.gradient == gradient:
        return True
    predictor.note_wrong(was_right=False)
    return False


def test_a_gradient_that_keeps_coming_is_predicted() -> None:
    predictor = Predictor()
    for _ in range(LEAST):
        assert predictor.predict() is None
        predictor.note_gradient(0.25, None)
    for step in range(CONFIRMED + 1):
        assert predictor.predict() == (0.25, step == CONFIRMED)
        predictor.note_gradient(0.25, 0.25)
    predictor.note_other()  # a map's results got no backward
    assert predictor.predict() is None


def as_often_as_it_is_predicted() -> Iterator[float]:
    """The worst that a caller can do: another gradient whenever one is predicted."""
    predictor, gradient = Predictor(), 1.0
    while True:
        if (predicted := predictor.predict()) is not None:
            gradient += 1
        predictor.note_gradient(gradient, None if predicted is None else predicted.gradient)
        if predicted is not None:
            predictor.note_wrong(was_right=False)
        yield gradient


def after_credit_has_gathered() -> Iterator[float]:
    for gradient in itertools.count(1.0):
        yield from itertools.repeat(gradient, PRICE)


@pytest.mark.parametrize(
    "gradients",
    [as_often_as_it_is_predicted, after_credit_has_gathered, lambda: itertools.cycle([1.0, 2.0])],
)
def test_few_backwards_are_run_in_vain(gradients: type[Iterator[float]]) -> None:
    assert wasted(gradients(), 1000) <= 0.05


@pytest.mark.parametrize("seed", range(5))
def test_few_are_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    runs = (
        itertools.repeat(float(number), rng.choice([1, 2, 3, 5, 8, 40]))
        for number in itertools.count()
    )
    assert wasted(itertools.chain.from_iterable(runs), 2000) <= 0.05


def test_the_gradient_that_came_for_a_part_only_is_paid_for() -> None:
    predictor, wrong = Predictor(), 0
    for _ in range(1000):
        predicted = predictor.predict()
        predictor.note_gradient(1.0, None if predicted is None else predicted.gradient)
        if predicted is not None:
            wrong += 1
            predictor.note_wrong(was_right=True)
    assert 0 < wrong <= 50


def test_maps_under_way_at_once_are_bounded_too() -> None:
    """Each call of `submit` is one: a thousand whose results die would have run their backwards in
    vain."""
    predictor = Predictor()
    for _ in range(1000):
        predictor.note_gradient(1.0, None)
    assert 0 < sum(predictor.predict() is not None for _ in range(1000)) <= 1000 * 0.07
