"""scikit-learn with the backend of joblib: its results are those of the serial loop, and workers do
not compete for CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import joblib
import numpy as np
import pytest
import torch

import mpgrad
import mpgrad.joblib
from mpgrad.system import usable_cpus

pytest.importorskip("sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_info

pytestmark = pytest.mark.slow  # each new worker imports it; test_joblib.py has what matters
X, Y = make_classification(120, 6, random_state=0)


@pytest.fixture(autouse=True)
def ours_is_known(fork_server: mpgrad.Pool) -> Iterator[None]:
    mpgrad.joblib.register()
    yield
    del joblib.parallel.BACKENDS["mpgrad"]


def search() -> Any:
    model = make_pipeline(StandardScaler(), LogisticRegression())
    return GridSearchCV(model, {"logisticregression__C": [0.1, 1.0, 10.0]}, cv=3)


def grid_search() -> Any:
    found = search().fit(X, Y)
    return [
        found.best_params_,
        found.best_score_,
        found.cv_results_["mean_test_score"],
        found.predict_proba(X),
    ]


def random_forest() -> Any:
    forest = RandomForestClassifier(12, random_state=0, oob_score=True).fit(X, Y)
    return [forest.predict_proba(X), forest.feature_importances_, forest.oob_score_]


def cross_validation() -> Any:
    scores = cross_validate(LogisticRegression(), X, Y, cv=4, scoring=["accuracy", "neg_log_loss"])
    predicted = cross_val_predict(LogisticRegression(), X, Y, cv=4, method="predict_proba")
    return [scores["test_accuracy"], scores["test_neg_log_loss"], predicted]


def nested() -> Any:
    return [cross_validate(search().set_params(n_jobs=2), X, Y, cv=3)["test_score"]]


class Descent(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """An estimator that differentiates in its worker, as skorch's do."""

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate

    def fit(self, x: Any, y: Any) -> Descent:
        self.classes_ = np.unique(y)
        inputs, targets = torch.as_tensor(x), torch.as_tensor(y, dtype=torch.float64)
        weight = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
        for _ in range(20):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weight, targets)
            (gradient,) = torch.autograd.grad(loss, weight)
            weight = (weight - self.rate * gradient).detach().requires_grad_()
        self.weight_ = weight.detach()
        return self

    def predict(self, x: Any) -> Any:
        return (torch.as_tensor(x) @ self.weight_ > 0).numpy().astype(int)


def descents() -> Any:
    found = GridSearchCV(Descent(), {"rate": [0.01, 0.1, 1.0]}, cv=3).fit(X, Y)
    return [found.cv_results_["mean_test_score"], found.best_estimator_.weight_.numpy()]


@pytest.mark.parametrize("ask", [grid_search, random_forest, cross_validation, nested, descents])
def test_results_are_those_of_the_serial_loop(ask: Callable[[], list[Any]]) -> None:
    with joblib.parallel_config(backend="sequential"):
        wanted = ask()
    with joblib.parallel_config(backend="mpgrad", n_jobs=2):
        found = ask()
    for each, other in zip(found, wanted, strict=True):
        np.testing.assert_equal(each, other)


def most_threads(model: Any, x: Any, y: Any) -> int:
    """Of any library that computes here."""
    return max(torch.get_num_threads(), *(each["num_threads"] for each in threadpool_info()))


def where(model: Any, x: Any, y: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize("threads", [None, 3])
def test_workers_have_as_many_threads_as_they_are_to_have(
    monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    for name in mpgrad.system.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    scoring = {"threads": most_threads, "where": where}
    with joblib.parallel_config(backend="mpgrad", n_jobs=2, inner_max_num_threads=threads):
        seen = cross_validate(RandomForestClassifier(4, n_jobs=2), X, Y, cv=4, scoring=scoring)
    assert set(seen["test_threads"]) == {threads or max(usable_cpus() // 2, 1)}
    assert os.getpid() not in seen["test_where"]
