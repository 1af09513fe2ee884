"""The scheduler in thousands of simulated histories: see `history.py`, and
`scripts/guards/simulate.py` for millions."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from adapter import simulated
from engine import CheckFailed, Rates, World
from history import Fault, History, fault_in, in_words, program_of, shortest

from mpgrad import scheduling
from mpgrad.memory import arena

QUICK, ALL = range(2_000), range(2_000, 10_000)


def first_fault(seeds: Iterable[int]) -> Fault | None:
    return next(
        (fault for seed in seeds if (fault := fault_in(program_of(seed))) is not None), None
    )


def check_all(seeds: Iterable[int]) -> None:
    fault = first_fault(seeds)
    if fault is not None:
        pytest.fail(
            f"{in_words(shortest(fault))}\npython scripts/guards/simulate.py --replay "
            f"{fault.program.seed}"
        )


def test_histories() -> None:
    check_all(QUICK)


@pytest.mark.slow
def test_more_histories() -> None:
    check_all(ALL)


def events_of(seed: int) -> list[str]:
    history = History(program_of(seed), listens=True)
    history.run()
    assert history.world.events is not None
    return history.world.events


@pytest.mark.quick
def test_a_seed_gives_the_same_history_twice() -> None:
    assert [events_of(seed) for seed in range(50)] == [events_of(seed) for seed in range(50)]


@pytest.mark.quick
def test_nobody_else_sees_what_is_simulated() -> None:
    """Symptom: a child that was forked later died of a look at simulated memory; pools of other
    tests had its clock."""
    world = World(Rates(), retries=1)
    seen: list[float] = []
    with simulated(world):
        other = threading.Thread(target=lambda: seen.append(arena.watch))
        other.start()
        other.join()
    before = set(arena.SHARED)
    kept = [History(program_of(seed), listens=True) for seed in range(50)]
    for each in kept:
        each.run()
    assert set(arena.SHARED) <= before


@pytest.mark.quick
def test_no_part_reads_a_clock() -> None:
    """What is to be simulated is told what time it is."""
    files = Path(scheduling.__file__).parent.glob("*.py")
    readers = {file.name for file in files if "import time\n" in file.read_text()}
    assert readers == {"dispatcher.py", "tracer.py"}


def test_a_fault_is_found_and_told_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    check = History._check_outcome

    def checked(self: History, asked: object, index: int, outcome: object) -> None:
        if self.world.lost_nodes:
            raise CheckFailed("a planted fault")
        check(self, asked, index, outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(History, "_check_outcome", checked)
    fault = first_fault(QUICK)
    assert fault is not None
    few = shortest(fault)
    assert few.name == "a planted fault" and len(few.program.steps) <= 4
    assert "is lost" in in_words(few)
