"""What tasks log arrives in the caller's handlers as a serial loop's records would."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpgrad

pytestmark = pytest.mark.quick

HINT = 27


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, logger = Kept(), logging.getLogger("of_a_task")
    logger.addHandler(handler)
    logger.setLevel(15)
    names = dict(logging._levelToName), dict(logging._nameToLevel)
    logging.addLevelName(HINT, "HINT")
    yield handler
    logging._levelToName.clear()
    logging._levelToName.update(names[0])
    logging._nameToLevel.clear()
    logging._nameToLevel.update(names[1])
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture(params=["process", "thread", "inline"])
def any_pool(request: pytest.FixtureRequest, kept: Kept) -> Iterator[mpgrad.Pool]:
    """A pool that began after the caller had set its levels."""
    with mpgrad.Pool(1, engine=request.param) as pool:
        yield pool


class OwnError(Exception):
    pass


def fails(kind: Any) -> None:
    logger = logging.getLogger("of_a_task")
    try:
        raise kind("said")
    except kind:
        logger.exception(
            "caught in %s",
            "fails",
            extra={"number": 3, "tensor": torch.ones(2), "other": (each for each in ())},
        )


@pytest.mark.parametrize("kind", [ZeroDivisionError, OwnError])
def test_exceptions_of_records(any_pool: mpgrad.Pool, kept: Kept, kind: Any) -> None:
    """Symptom: `exc_info` was None, its text part of the message. Cause: the handler of a queue was
    used."""
    any_pool.map(fails, [kind])
    (record,) = kept.records
    assert (record.msg, record.args, record.getMessage()) == (
        "caught in %s",
        ("fails",),
        "caught in fails",
    )
    assert record.exc_info is not None
    assert record.exc_info[0] is kind
    assert str(record.exc_info[1]) == "said"
    text = logging.Formatter().format(record)
    assert text.startswith("caught in fails\nTraceback (most recent call last):\n")
    assert text.count("in fails\n") == 2
    assert text.endswith(f"{kind.__name__}: said")
    assert "in fails" in "".join(traceback.format_exception(*record.exc_info))
    assert (record.number, record.tensor.tolist()) == (3, [1.0, 1.0])  # type: ignore[attr-defined]


def logs_values(x: torch.Tensor) -> None:
    logging.getLogger("of_a_task").warning("%(x)s and %(y)d", {"x": "plain", "y": 2})
    logging.getLogger("of_a_task").warning("%s", x * 2)
    logging.getLogger("of_a_task").warning(ValueError("an object"), stack_info=True)


def test_arguments_of_records(any_pool: mpgrad.Pool, kept: Kept) -> None:
    x = torch.ones(1, requires_grad=True)
    any_pool.map(logs_values, [x])
    here, kept.records = kept.records, []
    logs_values(x)
    assert [each.getMessage() for each in here] == [each.getMessage() for each in kept.records]
    assert here[0].args == {"x": "plain", "y": 2}
    assert here[2].stack_info is not None


def levels(_: int) -> list[Any]:
    logger, other = logging.getLogger("of_a_task.inner"), logging.getLogger("another_one")
    logger.log(HINT, "a hint")
    logger.debug("nobody wants it")
    own = [
        logger.getEffectiveLevel(),
        other.getEffectiveLevel(),
        logger.isEnabledFor(16),
        logger.isEnabledFor(14),
    ]
    return [*own, logging.getLevelName(HINT), logging.getLevelName("HINT"), logging.root.level]


def test_levels_that_a_task_sees(any_pool: mpgrad.Pool, kept: Kept) -> None:
    """Symptom: each logger had the lowest level of all, and the record was of "Level 27". Cause:
    only that level was sent."""
    assert any_pool.map(levels, [0]) == [levels(0)]
    assert [(each.levelname, each.levelno, each.getMessage()) for each in kept.records] == [
        ("HINT", HINT, "a hint")
    ] * 2


def test_levels_that_are_disabled(kept: Kept) -> None:
    logging.disable(logging.ERROR)
    try:
        with mpgrad.Pool(1) as pool:
            assert pool.map(
                lambda _: logging.getLogger("of_a_task").isEnabledFor(logging.ERROR), [0]
            ) == [False]
    finally:
        logging.disable(logging.NOTSET)


def test_loggers_that_are_disabled_or_do_not_propagate(kept: Kept) -> None:
    """Symptom: a task saw neither. Cause: only levels were sent."""
    loggers = disabled, apart = (
        logging.getLogger("of_a_task.disabled"),
        logging.getLogger("of_a_task.apart"),
    )
    own = Kept()
    apart.addHandler(own)

    def logs(_: int) -> list[tuple[bool, bool, bool]]:
        found = [logging.getLogger(f"of_a_task.{name}") for name in ("disabled", "apart")]
        for each in found:
            each.error("%s", each.name)
        return [(each.disabled, each.propagate, each.isEnabledFor(logging.ERROR)) for each in found]

    try:
        disabled.disabled, apart.propagate = True, False
        with mpgrad.Pool(1) as pool:
            assert pool.map(logs, [0]) == [logs(0)] == [[(True, True, False), (False, False, True)]]
        assert [each.getMessage() for each in own.records] == ["of_a_task.apart"] * 2
        assert kept.records == []
    finally:
        apart.removeHandler(own)
        for each in loggers:
            each.disabled, each.propagate = False, True
