"""Timelines: every call is there, once, where and when it ran; Perfetto reads the file; off, nothing is left of them."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import mpgrad
from mpgrad.__main__ import main
from mpgrad.errors import PoolClosedError
from mpgrad.timeline.recording import Chunk, Recording, Worker
from mpgrad.timeline.summary import Summary, minus
from mpgrad.timeline.trace import trace_of
from mpgrad.wire.records import Did

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
        assert type(each["pid"]) is int and type(each["tid"]) is int and isinstance(each["args"], dict)
        if each["ph"] == "X":
            assert each["ts"] >= 0 and each["dur"] >= 0 and isinstance(each["cat"], str)
            tracks[each["pid"], each["tid"]].append((round(1e3 * each["ts"]), round(1e3 * (each["ts"] + each["dur"]))))
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    for track, spans in tracks.items():
        assert track in named or track[1] > 1
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
    """Matplotlib keeps the files of its fonts open; better before the test that draws than as something it left behind."""
    figure = Figure()
    figure.subplots().set_title("0")
    figure.savefig(io.BytesIO())


ONE = {"ph": "X", "pid": 1, "tid": 2, "name": "a", "cat": "call", "ts": 1.0, "dur": 2.0, "args": {}}


@pytest.mark.quick
@pytest.mark.parametrize("change", [{"ts": 2.0}, {"ts": 0.5}, {"ts": -1.0}, {"dur": -1.0}, {"pid": "1"}, {"ph": "B"}])
def test_the_check_sees_what_is_wrong(change: dict[str, Any]) -> None:
    check([ONE, ONE | {"ts": 1.5, "dur": 1.0}, ONE | {"ts": 3.0}])
    with pytest.raises((AssertionError, TypeError)):
        check([ONE, ONE | change])


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
    calls = slices(events, "call")
    assert items_in([each for each in calls if each["args"]["phase"] == "forward"]) == every
    assert {"packs", "pickles", "sends", "receives", "makes results"} <= {each["cat"] for each in slices(events)}
    assert sum(each["args"]["bytes"] for each in slices(events, "packs")) == 12 * ITEMS
    assert all(each["pid"] > 1 for each in calls)


@pytest.mark.quick
def test_a_bundle_shows_its_items(pool2: mpgrad.Pool) -> None:
    differentiated(pool2, leaves(400))
    with pool2.timeline() as timeline:
        differentiated(pool2, leaves(400))
    check(timeline.events)
    every = Counter(range(400))
    assert items_in(slices(timeline.events, "forward")) == every
    calls = slices(timeline.events, "call")
    assert any(isinstance(each["args"]["item"], list) for each in calls if each["args"]["phase"] == "forward")
    assert items_in([each for each in calls if each["args"]["phase"] == "forward"]) == every
    assert items_in(slices(timeline.events, "backward")) == every


def test_backwards_ahead_stand_behind_their_forwards(nursery: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, graphs="ahead") as pool:
        for _ in range(2):  # the first time all forwards come first
            with pool.timeline() as timeline:
                differentiated(pool, leaves(), chunksize=1)
            check(timeline.events)
            forward, backward = slices(timeline.events, "forward"), slices(timeline.events, "backward")
            assert items_in(forward) == items_in(backward) == Counter(range(ITEMS))
            ends = {each["args"]["item"]: each["ts"] + each["dur"] for each in forward}
            assert all(each["ts"] >= ends[each["args"]["item"]] for each in backward)
    assert f"{ITEMS} forward, 0 backward; backwards of {ITEMS} items ran right after their forwards" in str(timeline)


def test_graphs_that_are_made_again(nursery: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, graphs="recompute") as pool, pool.timeline() as timeline:
        differentiated(pool, leaves(3))
    check(timeline.events)
    again = [each for each in slices(timeline.events, "forward") if each["args"].get("again")]
    assert items_in(again) == Counter(range(3)) and {each["name"] for each in again} == {"forward again"}
    assert Summary({"traceEvents": timeline.events, "mpgrad": about(timeline)}).shares()["run again"] > 0


def about(timeline: Any) -> dict[str, Any]:
    found: dict[str, Any] = timeline._trace["mpgrad"]
    return found


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
    (lost,) = slices(timeline.events, "lost")
    assert lost["name"] == "died at item 5"
    forward = slices(timeline.events, "forward")
    assert items_in(forward) == Counter(range(ITEMS))
    assert {each["args"]["item"] for each in forward if each["args"].get("again")} == {3, 4, 5}
    assert "deaths: 1" in str(timeline)


def test_a_backward_whose_worker_dies(fresh_pool: mpgrad.Pool) -> None:
    results = fresh_pool.map(wave, leaves(), chunksize=1)
    with fresh_pool.timeline() as timeline:
        os.kill(fresh_pool.stats().workers[0].pid, signal.SIGKILL)
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
    assert not slices(timeline.events, "call", "forward")


@pytest.mark.quick
def test_a_call_that_fails_and_those_behind_it(pool2: mpgrad.Pool) -> None:
    def divided(x: torch.Tensor) -> float:
        return 1 / (x.tolist()[0] - 3)

    with pool2.timeline() as timeline, pytest.raises(ZeroDivisionError):
        pool2.map(divided, leaves(), chunksize=1)
    check(timeline.events)
    assert 2 in items_in([each for each in slices(timeline.events, "call") if each["args"]["phase"] == "forward"])


@pytest.mark.quick
def test_one_timeline_of_a_pool_at_a_time(pool: mpgrad.Pool, pool2: mpgrad.Pool, tmp_path: Path) -> None:
    with pool.timeline() as timeline:
        with pytest.raises(RuntimeError, match="records a timeline already; end that `with` block first"), pool.timeline():
            pass
        with pytest.raises(RuntimeError, match="still being recorded"):
            timeline.save(tmp_path / "early.json")
        assert str(timeline) == "<mpgrad timeline, being recorded>"
        differentiated(pool, leaves(2), chunksize=1)
    with pytest.raises(RuntimeError, match="recorded once"), timeline:
        pass
    assert items_in(slices(timeline.events, "forward")) == Counter(range(2))
    with pytest.raises(FileNotFoundError), pool.timeline(tmp_path / "nowhere" / "run.json"):
        pass
    with pool.timeline() as one, mpgrad.Pool(1) as own, own.timeline() as other:
        differentiated(own, leaves(2), chunksize=1)
    assert not slices(one.events, "call") and len(slices(other.events, "forward")) == 2


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["process", "inline"])
def test_a_pool_that_ends_within_the_block(nursery: mpgrad.Pool, engine: str, tmp_path: Path) -> None:
    pool = mpgrad.Pool(1, engine=engine)
    with pool.timeline(tmp_path / "run.json", profile=engine == "process"):
        differentiated(pool, leaves(2), chunksize=1)
        pool.terminate()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    check(events)
    assert items_in(slices(events, "forward")) == Counter(range(2))
    with pytest.raises(PoolClosedError), pool.timeline():
        pass
    with pytest.raises(RuntimeError, match="has not been recorded"):
        pool.timeline().save(tmp_path / "never.json")


def test_calls_that_are_sent_before_the_workers_hear_of_it(nursery: mpgrad.Pool) -> None:
    """They are not recorded: nobody would say when they ended."""
    with mpgrad.Pool(1) as pool:
        post, held = pool._scheduler.post, []
        pool._scheduler.post = held.append  # type: ignore[method-assign, assignment]
        timeline = pool.timeline()
        timeline.__enter__()
        pool._scheduler.post = post  # type: ignore[method-assign]
        differentiated(pool, leaves(3), chunksize=1)
        for each in held:
            post(each)
        differentiated(pool, leaves(2), chunksize=1)
        timeline.__exit__(None, None, None)
    check(timeline.events)
    assert items_in(slices(timeline.events, "forward")) == Counter(range(2)) and not slices(timeline.events, "open")


def test_a_call_that_is_still_running_and_a_worker_that_comes(nursery: mpgrad.Pool, tmp_path: Path) -> None:
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
    (still,) = slices(timeline.events, "open")
    assert still["name"] == "not answered yet: item 0"
    (number,) = {each["pid"] for each in slices(timeline.events, "call")}
    assert number != still["pid"] and items_in(slices(timeline.events, "forward")) == Counter(range(1))


@pytest.mark.quick
def test_each_thread_of_the_caller_has_a_track(pool2: mpgrad.Pool) -> None:
    threads = [threading.Thread(target=differentiated, args=(pool2, leaves()), name=f"mine {n}") for n in range(2)]
    with pool2.timeline() as timeline:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    check(timeline.events)
    tracks = {
        each["args"]["name"]: each["tid"] for each in timeline.events if each["name"] == "thread_name" and each["pid"] == 1
    }
    assert {"mine 0", "mine 1"} <= tracks.keys()
    packers = {each["tid"] for each in slices(timeline.events, "packs")}
    assert packers == {tracks["mine 0"], tracks["mine 1"]}


@pytest.mark.slow
def test_operations_stand_within_the_calls(nursery: mpgrad.Pool) -> None:
    with mpgrad.Pool(2) as pool, pool.timeline(profile=True) as timeline:
        differentiated(pool, leaves(), chunksize=1)
    check(timeline.events)
    found = slices(timeline.events, "operation")
    names = Counter(each["name"] for each in found)
    assert 4 * ITEMS < names["aten::sin"] <= 5 * ITEMS  # the profiler's clock is not ours, to some microseconds
    assert names["aten::cos"]  # of the backward
    for each in found:
        if each["name"] == "aten::sin":
            around = [one for one in slices(timeline.events, "forward") if one["pid"] == each["pid"]]
            assert any(one["ts"] <= each["ts"] and each["ts"] + each["dur"] <= one["ts"] + one["dur"] for one in around)
    assert not slices(timeline.events, "open")
    started = [each["name"] for each in slices(timeline.events, "start")]
    assert started.count("starts the profiler") == 2
    summary = Summary({"traceEvents": timeline.events, "mpgrad": about(timeline)})
    assert summary.shares()["starting"] > 0 and sum(summary.shares().values()) == pytest.approx(1)
    assert summary.operations()["aten::sin"] > 0 and sum(summary.operations().values()) == pytest.approx(1)
    assert "operations: " in str(timeline) and len(str(timeline).splitlines()) <= 10


@pytest.mark.quick
def test_operations_count_without_those_within_them() -> None:
    spans = {"outer": (0, 10), "inner": (1, 4), "innermost": (2, 1), "next": (12, 3), "elsewhere": (1, 5)}
    one = {"ph": "X", "pid": 2, "tid": 1, "cat": "operation", "args": {}}
    events = [one | {"name": name, "ts": ts, "dur": dur} for name, (ts, dur) in spans.items()]
    events[-1]["tid"] = 2
    about = {"seconds": 1, "workers": []}
    shares = Summary({"traceEvents": events, "mpgrad": about}).operations()
    assert shares == {"outer": 6 / 18, "inner": 3 / 18, "innermost": 1 / 18, "next": 3 / 18, "elsewhere": 5 / 18}
    after, before = 1 / 1e3, 9 / 1e3  # the one begins where the other ends, which floats of microseconds do not show
    events = [one | {"name": "a", "ts": after, "dur": before - after}, one | {"name": "b", "ts": before, "dur": 1.0}]
    assert Summary({"traceEvents": events, "mpgrad": about}).operations() == {"a": 8 / 1008, "b": 1000 / 1008}


@pytest.mark.quick
def test_a_profile_is_for_processes(nursery: mpgrad.Pool) -> None:
    with mpgrad.Pool(1, engine="inline") as pool, pytest.raises(ValueError, match=r"engine: 'inline'"):
        pool.timeline(profile=True)


@pytest.mark.quick
def test_off_nothing_of_it_is_left_in_a_worker(nursery: mpgrad.Pool) -> None:
    from mpgrad.workers.stage import Stage

    with mpgrad.Pool(1, engine="inline") as pool:
        worker = pool._scheduler.engine._worker  # type: ignore[attr-defined]

        def kept() -> tuple[Any, ...]:
            return worker._requests, worker._forward.new_stage, worker._backward.new_stage, worker._tracker.tell

        before = kept()
        with pool.timeline():
            differentiated(pool, leaves(2))
            assert all(one is not other for one, other in zip(kept(), before, strict=True))
        assert kept() == before and before[1] is Stage and worker._recorder is None


# --- the trace of a recording made by hand

MS = 1_000_000


def recorded(shift: int = 0, node: str = "") -> dict[str, Any]:
    """Worker 1 ran item 0 from 2 to 6 ms, its backward from 7 to 9; its clock shows `shift` more than ours."""
    recording = Recording(profile=False, engine="process")
    start = recording.began
    recording.workers[1] = Worker(1, 4242, "cpu", node)
    recording.functions[7] = "wave"

    def chunk(number: int, phase: str, sent: int, spans: Iterable[tuple[int, int, int]]) -> Chunk:
        theirs = [(did, 0, 0, start + shift + a * MS, start + shift + b * MS) for did, a, b in spans]
        began, ended = theirs[0][3], theirs[0][4]
        noted = Chunk(1, number, phase, 7, [0], frozenset(), 8, start + sent * MS, start + (sent + 1) * MS)
        noted.began, noted.ended, noted.spans, noted.answered = began, ended, theirs, ended - shift + MS
        return noted

    recording.chunks.append(chunk(1, "forward", 1, [(Did.CALL, 2, 6), (Did.FORWARD, 3, 6)]))
    recording.chunks.append(chunk(2, "backward", 2, [(Did.CALL, 7, 9), (Did.BACKWARD, 7, 9)]))
    recording.ended = start + 10 * MS
    return trace_of(recording)


@pytest.mark.quick
def test_the_clock_of_another_machine() -> None:
    here, there = recorded(), recorded(shift=10**15, node="beta")
    check(there["traceEvents"])
    pairs = list(zip(slices(here["traceEvents"]), slices(there["traceEvents"]), strict=True))
    assert [one["name"] for one, _ in pairs] == [other["name"] for _, other in pairs]
    for one, other in pairs:
        assert one["dur"] == pytest.approx(other["dur"], abs=1000)
        assert one["ts"] == pytest.approx(other["ts"], abs=1000)  # half of the quickest way there and back is 1 ms


@pytest.mark.quick
@pytest.mark.parametrize(("hired", "ready", "shown"), [(2, 5, (2.0, 3.0)), (-3, 5, (0.0, 5.0)), (-9, -2, None)])
def test_a_worker_that_starts(hired: int, ready: int, shown: tuple[float, float] | None) -> None:
    """The profiler seems to start before it by a clock that is known roughly."""
    recording = Recording(profile=True, engine="ray")
    start = recording.began
    recording.workers[1] = Worker(1, 10, "cpu", "", (start + hired * MS, start + ready * MS))
    spans = [(Did.START, 0, 0, start + max(0, ready - 1) * MS, start + 7 * MS)]
    times = {"sent": start + 6 * MS, "sent_whole": start + 6 * MS, "answered": start + 9 * MS}
    times |= {"began": start + 7 * MS, "ended": start + 8 * MS}
    recording.chunks.append(Chunk(1, 1, "forward", 0, [0], frozenset(), 0, spans=spans, **times))
    recording.ended = start + 10 * MS
    trace = trace_of(recording)
    check(trace["traceEvents"])
    found = {each["name"]: (each["ts"] / 1e3, each["dur"] / 1e3) for each in slices(trace["traceEvents"], "start")}
    profiler = found.pop("starts the profiler")
    assert profiler == (max(0, ready), 7 - max(0, ready)) and found.get("starts") == shown
    assert Summary(trace).shares()["starting"] == pytest.approx((profiler[1] + (shown[1] if shown else 0)) / 10)


@pytest.mark.quick
def test_idle_workers_are_there(pool: mpgrad.Pool) -> None:
    pool.map(abs, range(pool.processes), chunksize=1)
    with pool.timeline() as timeline:
        pool.map(abs, [1], chunksize=1)
    assert len(about(timeline)["workers"]) == pool.processes


@pytest.mark.quick
def test_the_summary_of_a_recording() -> None:
    trace = recorded()
    check(trace["traceEvents"])
    summary = Summary(trace)
    assert summary.busy() == {1: pytest.approx(0.6)}
    shares = {name: round(share, 6) for name, share in summary.shares().items() if share > 1e-9}
    assert shares == {"forward": 0.3, "backward": 0.2, "around calls": 0.1, "transfer": 0.2, "idle": 0.2}
    assert summary.idle()["the caller did something else"] == pytest.approx(0.2)
    assert [each["dur"] for each in summary.longest()] == [3000.0, 2000.0]
    lines = summary.lines()
    assert lines[0] == "0.01 s, engine process, 1 worker" and lines[1] == "busy: worker 1 60%"
    assert "longest: item 0 of wave forward 3.0 ms (worker 1); item 0 of wave backward 2.0 ms (worker 1)" in lines
    assert len(lines) <= 10


@pytest.mark.quick
def test_spans_without_others() -> None:
    assert minus([(0, 10), (20, 30)], [(-1, 1), (2, 3), (9, 25), (26, 27)]) == [(1, 2), (3, 9), (25, 26), (27, 30)]
    assert minus([(0, 1)], []) == [(0, 1)] and minus([(0, 1)], [(0, 1)]) == []


def test_the_command(pool2: mpgrad.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    with pool2.timeline(path) as timeline:
        differentiated(pool2, leaves(), chunksize=1)
    assert main(["timeline", str(path)]) == 0
    assert capsys.readouterr().out == f"{timeline}\npicture: {tmp_path / 'run.png'}\n"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.quick
@pytest.mark.parametrize("text", ["{", "[]", '{"traceEvents": []}', None])
def test_the_command_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert main(["timeline", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.quick
def test_the_command_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(recorded()))
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "mpgrad.timeline.picture", raising=False)
    assert main(["timeline", str(path)]) == 1
    told = capsys.readouterr()
    assert "busy: worker 1 60%" in told.out and "pip install matplotlib" in told.err
