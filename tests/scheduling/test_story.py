"""What happened to a call: `Pool.story`, and the notes of errors."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import mpgrad
from mpgrad.machine.story import MOST_TOLD, MOST_TRANSITIONS, SENT, Story

pytestmark = pytest.mark.quick


def steps(told: str) -> list[str]:
    """The lines without their times, and without the numbers of workers."""
    return [
        line.split(" s  ")[1].translate(str.maketrans("", "", "0123456789"))
        for line in told.splitlines()[1:]
    ]


def dies_once(path: str) -> int:
    if not Path(path).exists():
        Path(path).touch()
        os._exit(3)
    return 1


def test_a_call_and_its_backward(fork_server: mpgrad.Pool) -> None:
    xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    # of one worker nothing is taken back for another
    with mpgrad.Pool(1, graphs="keep") as pool:
        with pytest.raises(LookupError, match="item 0"):
            pool.story()
        results = pool.map(lambda x: (x * x).sum(), xs, chunksize=1)
        assert steps(pool.story(1)) == ["sent to worker ", "worker  has answered"]
        sum(results).backward()
        assert steps(pool.story(1))[2:] == [
            "its backward is sent to worker ",
            "worker  has answered its backward",
        ]
        assert pool.story(1).startswith("item 1\n")
        times = [float(line.split(" s  ")[0]) for line in pool.story(1).splitlines()[1:]]
        assert times[0] == 0.0 and times == sorted(times)
        with pytest.raises(LookupError, match="item 3"):
            pool.story(3)


def test_a_death_between_a_forward_and_its_backward(fork_server: mpgrad.Pool) -> None:
    x = torch.ones(2, requires_grad=True)
    with mpgrad.Pool(1, graphs="keep") as pool:
        (y,) = pool.map(lambda x: (x * x).sum(), [x])
        os.kill(pool.stats().workers[0].pid, 9)
        y.backward()
        told = steps(pool.story())
        assert told[:2] == ["sent to worker ", "worker  has answered"]
        assert told[-1] == "worker  has answered its backward"
        assert "its backward goes to worker , because the worker of its graph is gone" in told


def test_a_death_is_in_the_story_and_in_the_note_of_the_error(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    with mpgrad.Pool(1) as pool:
        assert pool.map(dies_once, [str(tmp_path / "died")]) == [1]
        assert steps(pool.story()) == [
            "sent to worker ",
            "worker  died while it ran the call",
            "waits again, because it was lost with worker ",
            "sent to worker ",
            "worker  has answered",
        ]
        with pytest.raises(mpgrad.WorkerDiedError) as caught:
            pool.map(os._exit, [3])
        assert caught.value.__notes__[-1].count("died while it ran the call") == 3


def test_a_call_that_takes_too_long(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, timeout=0.1) as pool:
        with pytest.raises(mpgrad.CallTimeoutError) as caught:
            pool.map(time.sleep, [60])
        assert "the call took longer than its timeout" in caught.value.__notes__[-1]


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(1e-3)


def test_calls_that_wait_for_others(fork_server: mpgrad.Pool, tmp_path: Path) -> None:
    with mpgrad.Pool(1) as pool:
        first = pool.submit(until, tmp_path / "go")
        second = pool.submit(repr, first)
        (tmp_path / "go").touch()
        assert second.result() == "None"
        assert steps(pool.story())[0] == "waits for the result of another call"


def test_a_bundle_is_found_by_each_item() -> None:
    story = Story()
    story.bundles |= {0: 48, 48: 2}
    story.note(0, (1.0, SENT, 1))
    story.note(48, (2.0, SENT, 2))
    assert "worker 1" in story.in_words(47) and "worker 2" in story.in_words(49)
    assert not story.in_words(50)


def test_bundles_of_a_map(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1) as pool:
        for _ in range(3):
            pool.map(abs, range(200))
        assert all(steps(pool.story(item))[0] == "sent to worker " for item in range(200))


def test_a_story_has_an_end() -> None:
    story = Story()
    for item in range(2 * MOST_TOLD + 1):
        story.calls[item] = ((0.0, SENT, 1),)
    story.shorten()
    assert len(story.calls) == MOST_TOLD and not story.of(0)
    for _ in range(2 * MOST_TRANSITIONS):
        story.note(-1, (0.0, SENT, 1))
    assert len(story.of(-1)) == MOST_TRANSITIONS
