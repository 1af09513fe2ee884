"""`mpgrad/machine` knows no clock, thread, system or torch."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpgrad
from mpgrad.machine.deaths import Limits
from mpgrad.machine.ledger import CANCEL, CONSUMED, FAIL, FREED, KEEP, LOST, GraphLedger
from mpgrad.machine.queue import Backlog
from mpgrad.machine.under_way import Chunk, SentChunks

pytestmark = pytest.mark.quick

PACKAGE = Path(mpgrad.__file__).parent
MODULES = sorted(file.stem for file in (PACKAGE / "machine").glob("[!_]*.py"))
# how many files a stranger reads, and how long they may be
MOST_FILES, MOST_LINES = 8, 500

# imports the modules behind a stub of the package, and prints what they brought
ALONE = """
import __future__, collections, dataclasses, enum, functools, heapq, itertools, math
import sys, types, typing, weakref
sys.modules["torch"] = None
stub = sys.modules["mpgrad"] = types.ModuleType("mpgrad")
stub.__path__ = [sys.argv[1]]
before = set(sys.modules)
for name in sys.argv[2:]:
    __import__(f"mpgrad.machine.{name}")
print(*sorted(set(sys.modules) - before))
"""

PROGRAM = Path(__file__).with_name("alone.py")


def test_it_imports_only_itself_and_pure_parts_of_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, PACKAGE, *MODULES],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == {
        "mpgrad.machine",
        *(f"mpgrad.machine.{name}" for name in MODULES),
    }


def test_histories_of_the_machine_alone() -> None:
    """They run without torch, and with a stub of the package around the machine."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", PROGRAM, "300"], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr


def test_a_stranger_can_read_it() -> None:
    files = list((PACKAGE / "machine").glob("*.py"))
    assert len(files) <= MOST_FILES
    assert max(len(file.read_text().splitlines()) for file in files) <= MOST_LINES


def test_backwards_that_did_not_run_keep_their_order() -> None:
    """Symptom: two backwards of a graph that was dropped, of which the second is a mistake, both
    raised. Cause: the first one lacked the graph and came back behind the second, which used up the
    rebuilt graph."""
    first, second, third, further = (SimpleNamespace(sent=sent) for sent in (1, 1, 2, math.inf))
    backlog = Backlog([third, further])
    backlog.put_again(first)
    backlog.put_again(second)
    assert list(backlog) == [first, second, third, further]


@pytest.mark.parametrize(("event", "state"), [(FAIL, FREED), (CANCEL, LOST)])
def test_a_late_answer_does_not_undo_a_later_backward(event: str, state: str) -> None:
    """Symptom: a worker lacked a graph that two backwards had used up, of which the first had
    failed. Cause: its answer came after the second was sent, and then counted for both."""
    ledger = GraphLedger()
    ledger.handle(1, KEEP)
    ledger.use_up(1, graph_task=10)
    ledger.use_up(1, graph_task=11)
    ledger.note_unfinished(1, 10, event)
    assert ledger.states[1] == CONSUMED
    assert not ledger.is_used_up_for(1, 11), "nothing before it is left"
    ledger.note_unfinished(1, 11, event)
    assert ledger.states[1] == state


def test_a_cancelled_backward_that_did_not_begin_leaves_the_graph() -> None:
    ledger = GraphLedger()
    ledger.handle(1, KEEP)
    ledger.use_up(1, graph_task=10)
    ledger.note_unfinished(1, 10, CANCEL)
    assert ledger.states[1] == LOST
    ledger.note_unfinished(1, 10, FAIL)  # the worker says so
    assert ledger.states[1] == FREED


def test_a_backward_that_raises_leaves_the_graph_used_up() -> None:
    ledger = GraphLedger()
    ledger.handle(1, KEEP)
    ledger.use_up(1, graph_task=10)  # it runs
    ledger.use_up(1, graph_task=11)  # a mistake
    assert not ledger.is_used_up_for(1, 10) and ledger.is_used_up_for(1, 11)
    ledger.note_unfinished(1, 11, FAIL)
    assert ledger.states[1] == CONSUMED


def test_the_successor_of_a_worker_knows_which_backward_used_up_a_graph() -> None:
    gone, successor = GraphLedger(), GraphLedger()
    gone.handle(1, KEEP)
    gone.use_up(1, graph_task=10)
    successor.move_here(1, before=gone)
    successor.note_unfinished(1, 10, CANCEL)
    assert successor.states[1] == LOST


def test_what_a_late_turn_skips_is_noted_in_the_next_one() -> None:
    """Cause: to end operations may take longer than a worker needs to see that a chunk is skipped,
    but the chunk counted as skipped from the beginning of that turn."""
    limits = Limits(queue=Any, can_kill=True, recoverable=True)  # type: ignore[arg-type]
    under_way = SentChunks()
    worker = SimpleNamespace(under_way=under_way, termination=None, gone=None)
    operation = Chunk(None, [], [], None, None)  # any object
    limits.deadlines.put(1.0, operation)
    steps = limits.steps([worker], now=2.0)
    assert next(steps) == ("kill operation", operation)
    under_way.just_skipped.append(1)
    assert not list(steps)
    assert under_way.just_skipped == [1]
