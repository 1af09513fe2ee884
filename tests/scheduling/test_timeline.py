"""Timelines: every call is there, once, where and when it ran; Perfetto reads the file; off,
nothing is left of them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import every_loss_gets, held_orders, recorded_in_worker

import mpgrad
from mpgrad.errors import PoolClosedError
from mpgrad.timeline import Trace, TracedCall, TracedChunk, WorkerName, events_of

Events = list[dict[str, Any]]
ITEMS = 12


def wave(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = torch.sin(x * 1.1)
    return x.sum()


def leaves(count: int = ITEMS) -> list[torch.Tensor]:
    return [torch.full((3,), float(number + 1), requires_grad=True) for number in range(count)]


def differentiated(pool: mpgrad.Pool, items: list[torch.Tensor], **options: Any) -> None:
    torch.stack(pool.map(wave, items, **options)).sum().backward()


def slices(events: Events, *kinds: str) -> Events:
    return [each for each in events if each["ph"] == "X" and (not kinds or each["cat"] in kinds)]


def items_in(events: Events) -> Counter[int]:
    found: Counter[int] = Counter()
    for item in (each["args"]["item"] for each in events):
        found.update([item] if isinstance(item, int) else range(item[0], item[-1] + 1))
    return found


def check(events: Events) -> None:
    """The trace-event format; and in each track, slices lie side by side or within one another."""
    tracks = defaultdict(list)
    for each in events:
        assert each["ph"] in ("X", "M") and isinstance(each["name"], str)
        assert (
            type(each["pid"]) is int and type(each["tid"]) is int and isinstance(each["args"], dict)
        )
        if each["ph"] == "X":
            assert each["ts"] >= 0 and each["dur"] >= 0 and isinstance(each["cat"], str)
            tracks[each["pid"], each["tid"]].append(
                (round(1e3 * each["ts"]), round(1e3 * (each["ts"] + each["dur"])))
            )
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    for track, spans in tracks.items():
        assert track in named
        around: list[int] = []  # ends of those that are open
        last = 0
        for start, end in spans:
            assert start >= last
            last = start
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


@pytest.fixture(autouse=True, scope="module")
def fonts() -> None:
    """Matplotlib keeps the files of its fonts open; better before the test that draws than as
    something it left behind."""
    from matplotlib.figure import Figure  # which takes long to import

    figure = Figure()
    figure.subplots().set_title("0")
    figure.savefig(io.BytesIO())


ONE = {
    "ph": "X",
    "pid": 1,
    "tid": 2,
    "name": "a",
    "cat": "chunk",
    "ts": 1.0,
    "dur": 2.0,
    "args": {},
}
NAME = {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "MainThread"}}


@pytest.mark.quick
@pytest.mark.parametrize(
    "change", [{"ts": 2.0}, {"ts": 0.5}, {"ts": -1.0}, {"dur": -1.0}, {"pid": "1"}, {"ph": "B"}]
)
def test_the_check_sees_what_is_wrong(change: dict[str, Any]) -> None:
    check([NAME, ONE, ONE | {"ts": 1.5, "dur": 1.0}, ONE | {"ts": 3.0}])
    with pytest.raises((AssertionError, TypeError)):
        check([NAME, ONE, ONE | change])


@pytest.mark.quick
def test_every_item_is_there_once_and_nothing_changes(pool: mpgrad.Pool) -> None:
    items, expected = leaves(), leaves()
    sum(map(wave, expected)).backward()  # type: ignore[union-attr]
    with pool.timeline() as timeline:
        differentiated(pool, items, chunksize=1)
    events = timeline.events
    check(events)
    assert [each.grad.tolist() for each in items] == [each.grad.tolist() for each in expected]  # type: ignore[union-attr]
    every = Counter(range(ITEMS))
    assert items_in(slices(events, "forward")) == items_in(slices(events, "backward")) == every
    assert {each["args"]["function"] for each in slices(events, "forward", "backward")} == {"wave"}
    chunks = slices(events, "chunk")
    assert (
        Counter(
            item for each in chunks if each["name"] == "calls" for item in each["args"]["items"]
        )
        == every
    )
    assert all(each["pid"] > 1 for each in chunks)
    of_caller = {each["name"] for each in slices(events) if each["pid"] == 1}
    assert of_caller - {"waits"} == {"packs wave", "pickles wave", "makes results"}
    assert "waits" in of_caller or pool.processes == 1  # inline


@pytest.mark.quick
def test_a_bundle_shows_its_items(pool2: mpgrad.Pool) -> None:
    differentiated(pool2, leaves(400))
    with pool2.timeline() as timeline:
        differentiated(pool2, leaves(400))
    check(timeline.events)
    every = Counter(range(400))
    assert (
        items_in(slices(timeline.events, "forward"))
        == items_in(slices(timeline.events, "backward"))
        == every
    )
    bundles = [
        item
        for each in slices(timeline.events, "chunk")
        for item in each["args"]["items"]
        if each["name"] == "calls"
    ]
    assert any(isinstance(each, list) for each in bundles)


def test_eager_backwards_stand_behind_their_forwards(fork_server: mpgrad.Pool) -> None:
    with every_loss_gets(1.0), mpgrad.Pool(1) as pool, pool.timeline() as timeline:
        differentiated(pool, leaves(), chunksize=1)
    check(timeline.events)
    forward, backward = slices(timeline.events, "forward"), slices(timeline.events, "backward")
    assert items_in(forward) == items_in(backward) == Counter(range(ITEMS))
    ends = {each["args"]["item"]: each["ts"] + each["dur"] for each in forward}
    assert all(each["ts"] >= ends[each["args"]["item"]] for each in backward)
    assert {each["name"] for each in slices(timeline.events, "chunk")} == {"calls"}


def test_graphs_that_are_made_again(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, graphs="recompute") as pool, pool.timeline() as timeline:
        differentiated(pool, leaves(3))
    check(timeline.events)
    again = [each for each in slices(timeline.events, "forward") if each["name"] == "forward again"]
    assert items_in(again) == Counter(range(3))


class DiesOnce:
    def __init__(self, folder: Path, item: int) -> None:
        self.mark, self.item = folder / "died", item

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach()[0] == self.item + 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return wave(x)


@pytest.mark.quick
def test_a_death_and_what_is_done_again(fresh_pool: mpgrad.Pool, tmp_path: Path) -> None:
    with fresh_pool.timeline() as timeline:
        torch.stack(fresh_pool.map(DiesOnce(tmp_path, 5), leaves(), chunksize=3)).sum().backward()
    check(timeline.events)
    lost = slices(timeline.events, "unanswered")
    assert {each["name"] for each in lost} == {"the worker died"}
    # another chunk may have waited behind it
    assert [3, 4, 5] in [each["args"]["items"] for each in lost]
    # the worker that died may have kept graphs of other items
    forward = slices(timeline.events, "forward")
    first = [each for each in forward if each["name"] != "forward again"]
    assert items_in(first) == Counter(range(ITEMS))


def test_a_backward_whose_worker_dies(fresh_pool: mpgrad.Pool) -> None:
    results = fresh_pool.map(wave, leaves(), chunksize=1)
    with fresh_pool.timeline() as timeline:
        # one that has graphs: the other may have come too late for a call
        (killed, *_) = [each for each in fresh_pool.stats().workers if each.graphs]
        os.kill(killed.pid, signal.SIGKILL)
        torch.stack(results).sum().backward()
    check(timeline.events)
    assert items_in(slices(timeline.events, "backward")) >= Counter(range(ITEMS))
    assert any(each["name"] == "forward again" for each in slices(timeline.events, "forward"))


@pytest.mark.quick
def test_the_file_is_there_also_after_an_exception(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(KeyboardInterrupt), pool2.timeline(path):
        differentiated(pool2, leaves(), chunksize=1)
        raise KeyboardInterrupt
    events = json.loads(path.read_text())["traceEvents"]
    check(events)
    assert items_in(slices(events, "forward")) == Counter(range(ITEMS))
    with pool2.timeline() as timeline:
        pass
    assert not slices(timeline.events, "chunk", "forward")


@pytest.mark.quick
def test_a_call_that_fails_and_those_behind_it(pool2: mpgrad.Pool) -> None:
    def divided(x: torch.Tensor) -> float:
        return 1 / (x.tolist()[0] - 3)

    with pool2.timeline() as timeline, pytest.raises(ZeroDivisionError):
        pool2.map(divided, leaves(), chunksize=1)
    check(timeline.events)
    assert 2 in [
        item for each in slices(timeline.events, "chunk") for item in each["args"]["items"]
    ]


@pytest.mark.quick
def test_one_timeline_of_a_pool_at_a_time(
    pool: mpgrad.Pool, pool2: mpgrad.Pool, tmp_path: Path
) -> None:
    with pool.timeline() as timeline:
        with (
            pytest.raises(
                RuntimeError, match="records a timeline already; end that `with` block first"
            ),
            pool.timeline(),
        ):
            pass
        with pytest.raises(RuntimeError, match="still being recorded"):
            timeline.save(tmp_path / "early.json")
        assert repr(timeline) == "<mpgrad timeline, being recorded>"
        differentiated(pool, leaves(2), chunksize=1)
    with pytest.raises(RuntimeError, match="recorded once"), timeline:
        pass
    assert items_in(slices(timeline.events, "forward")) == Counter(range(2))
    with pytest.raises(FileNotFoundError), pool.timeline(tmp_path / "nowhere" / "run.json"):
        pass
    with pool.timeline() as one, mpgrad.Pool(1) as own, own.timeline() as other:
        differentiated(own, leaves(2), chunksize=1)
    assert not slices(one.events, "chunk") and len(slices(other.events, "forward")) == 2


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["process", "inline"])
def test_a_pool_that_ends_within_the_block(
    fork_server: mpgrad.Pool, engine: str, tmp_path: Path
) -> None:
    pool = mpgrad.Pool(1, engine=engine)
    with pool.timeline(tmp_path / "run.json"):
        differentiated(pool, leaves(2), chunksize=1)
        pool.terminate()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    check(events)
    assert items_in(slices(events, "forward")) == Counter(range(2))
    with pytest.raises(PoolClosedError), pool.timeline():
        pass
    with pytest.raises(RuntimeError, match="has not been recorded"):
        pool.timeline().save(tmp_path / "never.json")


def test_calls_that_are_sent_before_the_workers_hear_of_it(fork_server: mpgrad.Pool) -> None:
    """They are not recorded: nobody would say when they ended."""
    with mpgrad.Pool(1) as pool:
        timeline = pool.timeline()
        with held_orders(pool) as let_go:
            timeline.__enter__()
        differentiated(pool, leaves(3), chunksize=1)
        let_go()
        differentiated(pool, leaves(2), chunksize=1)
        timeline.__exit__(None, None, None)
    check(timeline.events)
    assert items_in(slices(timeline.events, "forward")) == Counter(range(2)) and not slices(
        timeline.events, "unanswered"
    )


def test_a_call_that_is_still_running_and_a_worker_that_comes(
    fork_server: mpgrad.Pool, tmp_path: Path
) -> None:
    """The call waits for the end of the block."""
    go, begun = tmp_path / "go", tmp_path / "begun"

    def waits(x: float) -> float:
        begun.touch()
        while not go.exists():
            pass
        return x

    with mpgrad.Pool(1) as pool:
        with pool.timeline() as timeline:
            result = pool.apply_async(waits, (1.0,))
            while not begun.exists():
                pass
            pool.resize(2)
            differentiated(pool, leaves(1))
        go.touch()
        assert result.get() == 1.0
    check(timeline.events)
    (still,) = slices(timeline.events, "unanswered")
    assert still["name"] == "not answered" and still["args"]["items"] == [0]
    (number,) = {each["pid"] for each in slices(timeline.events, "chunk")}
    assert number != still["pid"] and items_in(slices(timeline.events, "forward")) == Counter(
        range(1)
    )


@pytest.mark.quick
def test_each_thread_of_the_caller_has_a_track(pool2: mpgrad.Pool) -> None:
    threads = [
        threading.Thread(target=differentiated, args=(pool2, leaves()), name=f"mine {n}")
        for n in range(2)
    ]
    with pool2.timeline() as timeline:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    check(timeline.events)
    tracks = {
        each["args"]["name"]: each["tid"]
        for each in timeline.events
        if each["name"] == "thread_name" and each["pid"] == 1
    }
    assert {"mine 0", "mine 1"} <= tracks.keys()
    packers = {each["tid"] for each in slices(timeline.events, "packs")}
    assert packers == {tracks["mine 0"], tracks["mine 1"]}


@pytest.mark.quick
def test_off_nothing_of_it_is_left_in_a_worker(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, engine="inline") as pool:
        before = recorded_in_worker(pool)
        with pool.timeline():
            differentiated(pool, leaves(2))
            assert recorded_in_worker(pool) == (True, None)
        assert recorded_in_worker(pool) == before == (False, None)


# --- the trace of a recording made by hand

MS = 1_000_000


def recorded(shift: int = 0, node: str = "") -> Events:
    """WorkerName 1 ran item 0 from 2 to 6 ms, its backward from 7 to 9; its clock shows `shift`
    more than ours."""
    trace = Trace()
    start = trace.began
    trace.workers[1] = WorkerName(1, 4242, "cpu", node)

    def chunk(phase: str, sent: int, began: int, span: Sequence[int]) -> TracedChunk:
        theirs = [start + shift + each * MS for each in (began, *span)]
        traced = TracedChunk(1, phase, [TracedCall(0, "wave")], start + sent * MS)
        traced.began, traced.ended, traced.spans = (
            theirs[0],
            theirs[2],
            [(phase, 0, 0, theirs[1], theirs[2])],
        )
        traced.answered = traced.ended - shift + MS
        return traced

    trace.chunks.append(chunk("forward", 1, 2, (3, 6)))
    trace.chunks.append(chunk("backward", 2, 7, (7, 9)))
    trace.ended = start + 10 * MS
    return events_of(trace)


@pytest.mark.quick
def test_the_slices_of_a_recording() -> None:
    events = recorded()
    check(events)
    found = [(each["name"], each["ts"], each["dur"], each["args"]) for each in slices(events)]
    item = {"item": 0, "function": "wave"}
    chunk = {"items": [0]}
    assert found == [
        ("calls", 2000.0, 4000.0, chunk),
        ("forward", 3000.0, 3000.0, item),
        ("backwards", 7000.0, 2000.0, chunk),
        ("backward", 7000.0, 2000.0, item),
    ]
    assert [each["args"] for each in events if each["ph"] == "M"] == [
        {"name": "caller"},
        {"name": "worker 1 (pid 4242, cpu)"},
        {"name": "calls"},
    ]


@pytest.mark.quick
def test_the_clock_of_another_machine() -> None:
    here, there = recorded(), recorded(shift=10**15, node="beta")
    check(there)
    pairs = list(zip(slices(here), slices(there), strict=True))
    assert [one["name"] for one, _ in pairs] == [other["name"] for _, other in pairs]
    for one, other in pairs:
        assert one["dur"] == pytest.approx(other["dur"], abs=1000)
        # half of the quickest way there and back is 1 ms
        assert one["ts"] == pytest.approx(other["ts"], abs=1000)


@pytest.mark.quick
def test_idle_workers_are_there(pool: mpgrad.Pool) -> None:
    pool.map(abs, range(pool.processes), chunksize=1)
    with pool.timeline() as timeline:
        pool.map(abs, [1], chunksize=1)
    assert (
        len({each["pid"] for each in timeline.events if each["name"] == "process_name"} - {1})
        == pool.processes
    )


def test_the_picture(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    with pool2.timeline() as timeline:
        differentiated(pool2, leaves(), chunksize=1)
    timeline.draw(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Unpicklable:
    def __reduce__(self) -> Any:
        raise Frozen(3)


@pytest.mark.quick
def test_an_exception_that_cannot_be_changed(fork_server: mpgrad.Pool) -> None:
    """Symptom: a FrozenInstanceError while a timeline was recorded. Cause: contextlib sets
    attributes of exceptions."""
    with mpgrad.Pool(1, engine="inline") as pool, pool.timeline(), pytest.raises(Frozen) as caught:
        pool.map(abs, [Unpicklable()])
    assert caught.value.code == 3


@pytest.mark.quick
def test_lambdas_have_their_name(fork_server: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, engine="inline") as pool, pool.timeline() as timeline:
        pool.map(lambda k: k, [0])
    (forward,) = slices(timeline.events, "forward")
    assert forward["args"]["function"].endswith("<lambda>")
    (packs,) = slices(timeline.events, "packs")
    assert packs["name"].endswith("<lambda>")


@pytest.mark.quick
def test_a_picture_without_matplotlib(
    fork_server: mpgrad.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "mpgrad.timeline", raising=False)
    with mpgrad.Pool(1, engine="inline") as pool, pool.timeline() as timeline:
        pool.map(abs, [1])
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        timeline.draw(tmp_path / "run.png")


@pytest.mark.quick
def test_a_saved_timeline_is_a_trace(pool2: mpgrad.Pool, tmp_path: Path) -> None:
    with pool2.timeline(tmp_path / "one.json") as timeline:
        differentiated(pool2, leaves(), chunksize=1)
    timeline.save(tmp_path / "other.json")
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "other.json"))
    assert one == other == {"traceEvents": timeline.events, "displayTimeUnit": "ms"}
