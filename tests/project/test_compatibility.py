"""scripts/compatibility.py, and whether all places that name versions of Python, torch and
dependencies name the same."""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import mpgrad
from mpgrad.torch_state import behaviours

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compatibility.py"

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="3" tests="6" time="12.6">
<testcase classname="test_map" name="test_a" time="0.1" />
<testcase classname="test_map" name="test_b[1]">
<failure message="assert 1 == 2">1 == 2</failure></testcase>
<testcase classname="test_map" name="test_b[1]">
<error message="failed on teardown">left behind</error></testcase>
<testcase classname="test_gpu" name="test_c">
<skipped type="pytest.skip" message="no GPU">here</skipped></testcase>
<testcase classname="test_gpu" name="test_d">
<skipped type="pytest.skip" message="no GPU">here</skipped></testcase>
<testcase classname="test_map" name="test_e">
<skipped type="pytest.xfail" message="a known bug">here</skipped></testcase>
</testsuite></testsuites>
"""
PAGE = (
    "before\n<!-- table: scripts/compatibility.py writes it -->\nold\n<!-- end of the table "
    "-->\nafter\n"
)


def entry(python: str, torch: str, **changes: object) -> dict[str, object]:
    versions = {
        "python": python,
        "torch": torch,
        "cloudpickle": "3.1.2",
        "psutil": "7.2.2",
        "numpy": "2.4.6",
    }
    counts = {"passed": 5, "failed": [], "skipped": {"no GPU": 2}, "seconds": 60}
    return {
        "date": "2026-11-30",
        "tests": "core",
        "outcome": "passed",
        "versions": versions,
        **counts,
        **changes,
    }


FAILED = {"outcome": "failed", "failed": ["test_map::test_b"]}
MISSING = {
    "date": "2026-11-30",
    "tests": "whole",
    "outcome": "not installed",
    "reason": "No matching distribution found",
}


# --- the script


def test_the_counts_in_a_report(script: Any) -> None:
    counts = {
        "passed": 1,
        "failed": ["test_map::test_b[1]"],
        "skipped": {"a known bug": 1, "no GPU": 2},
        "seconds": 13,
    }
    assert script.counts_in(JUNIT) == counts


def test_the_outcome(script: Any, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    died = {"outcome": "failed", "reason": "pytest ended without a report (exit status: 1)"}
    assert script.outcome(report, 1) == died
    report.write_text(JUNIT)
    assert script.outcome(report, 0)["outcome"] == "failed"
    report.write_text(
        "<testsuites><testsuite time='1'><testcase classname='m' "
        "name='t'/></testsuite></testsuites>"
    )
    assert script.outcome(report, 0) == {
        "outcome": "passed",
        "passed": 1,
        "failed": [],
        "skipped": {},
        "seconds": 1,
    }
    late = script.outcome(report, 1)  # after the last test
    assert (late["outcome"], late["reason"]) == (
        "failed",
        "no test failed, but pytest did (exit status: 1)",
    )


def test_what_failed_is_run_once_more(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(name: str, failure: str = "") -> str:
        return (
            "<testcase classname='m' "
            f"name='{name}'>{failure and f'<failure message={failure!r}/>'}</testcase>"
        )

    def tox(
        name: str, workdir: Path, *options: str, stdout: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        is_second = "--last-failed" in options
        (workdir / name).mkdir(exist_ok=True)
        cases = second if is_second else [case("a"), case("b", "late"), case("c", "late")]
        if options[0] != "--notest" and cases:
            file = (
                options[-1].removeprefix("--junitxml=")
                if is_second
                else workdir / name / "junit.xml"
            )
            Path(file).write_text(
                f"<testsuites><testsuite time='1'>{''.join(cases)}</testsuite></testsuites>"
            )
        return subprocess.CompletedProcess([], int(options[0] != "--notest"), "")

    monkeypatch.setattr(script, "tox", tox)
    monkeypatch.setattr(script, "versions_in", lambda environment: {})
    for second, passed, failed, late in (  # noqa: B007
        ([case("b"), case("c")], 3, [], ["m::b", "m::c"]),
        ([case("b"), case("c", "wrong")], 2, ["m::c"], ["m::b"]),
        ([case("b", "wrong"), case("c", "wrong")], 1, ["m::b", "m::c"], []),
        ([case("b")], 1, ["m::b", "m::c"], []),  # it was ended before the other one
        ([], 1, ["m::b", "m::c"], []),
    ):
        found = script.tried("py311", tmp_path)
        outcome = "failed" if failed else "passed"
        assert (found["outcome"], found["passed"], found["failed"], found.get("late", [])) == (
            outcome,
            passed,
            failed,
            late,
        )
        page = "\n".join(script.lines_of({"py311": found}))
        assert f"| {passed} | {len(late)} | {len(failed)} | 0 |" in page


def test_why_an_environment_could_not_be_made(script: Any) -> None:
    pip = (
        "ERROR: Could not find a version\nERROR: No matching distribution found for "
        "torch==2.15.*\npy310: exit 1 (1 s)\n"
    )
    assert script.reason_in(pip) == "No matching distribution found for torch==2.15.*"
    tox = (
        "py39: failed with could not find python interpreter matching any of the specs py39\n  "
        "py39: FAIL code 1\n"
    )
    assert (
        script.reason_in(tox) == "could not find python interpreter matching any of the specs py39"
    )
    assert script.reason_in("Killed\n") == "tox gave no reason"


def test_the_table(script: Any) -> None:
    entries = {
        "a": entry("3.13.0", "2.9.1+cu128", commit="1a2b3c4+"),
        "b": entry("3.9.1", "2.10.0", **FAILED),
        "c": MISSING,
    }
    page = script.with_table(PAGE, entries)
    assert script.with_table(page, entries) == page
    before, *lines, _, after = page.splitlines()
    assert (before, after) == ("before", "after")
    when = "2026-11-30"
    assert f"| `a` | 3.13.0 | 2.9.1+cu128 | core | 5 | 0 | 0 | 2 | 1a2b3c4+ | {when} |" in lines
    assert f"| `b` | 3.9.1 | 2.10.0 | core | 5 | 0 | 1 | 2 |  | {when} |" in lines
    assert f"| `c` |  |  | whole | not installed |  |  |  |  | {when} |" in lines
    assert lines[-6:] == [
        "* `b`: `test_map::test_b` failed",
        "* `c`: No matching distribution found",
        "",
        "Tests that one run skipped:",
        "",
        "* 2 need a GPU.",
    ]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    with pytest.raises(
        ValueError, match="the page needs the two lines between which the table belongs"
    ):
        script.with_table("before\nafter\n", entries)


def test_skipped_tests_are_grouped_by_reason(script: Any) -> None:
    skips = {
        "needs a CUDA GPU": 3,
        "needs two CUDA GPUs": 1,
        "about memfd, which only Linux has": 1,
        "odd": 1,
    }
    entries = {
        "a": entry("3.13.0", "2.9.1", skipped=skips),
        "b": entry("3.9.1", "2.9.1"),
        "c": entry("3.9.1", "2.9.1", skipped={}),
    }
    assert list(script.lines_of(entries))[-3:] == [
        "* 2 to 4 need a GPU.",
        "* 1 are about features of one system.",
        "* 1 were skipped for other reasons.",
    ]
    assert "Tests that one run skipped:" not in script.lines_of({"c": entries["c"]})


def test_what_was_tried_is_what_passed(script: Any) -> None:
    entries = {
        "a": entry("3.13.0", "2.10.0+cu128"),
        "b": entry("3.9.1", "2.10.0"),
        "c": entry("3.10.1", "2.9.1+cpu"),
    }
    entries |= {
        "d": entry("3.10.1", "2.8.0", **FAILED),
        "e": MISSING,
        "f": entry("3.12.1", "2.10.0", tests="README"),
    }
    entries["a"]["tests"] = "whole"
    assert list(script.passed(entries).items()) == [("2.9", ("3.10",)), ("2.10", ("3.9", "3.13"))]


def test_merging(script: Any) -> None:
    first, second = script.MATRIX[:2]
    merged = script.merged({"extra": {}, second: {"old": 1}}, {first: {}, second: {"new": 1}})
    assert list(merged.items()) == [(first, {}), (second, {"new": 1}), ("extra", {})]


@pytest.fixture
def record(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with a page of its own, and environments that are not made."""
    monkeypatch.setattr(script, "RESULTS", tmp_path / "compatibility.json")
    monkeypatch.setattr(script, "PAGE", tmp_path / "compatibility.md")
    script.PAGE.write_text(PAGE)
    changes = {"py311-torch28": MISSING, "py311-torch29": FAILED}
    monkeypatch.setattr(
        script, "tried", lambda name, workdir: entry("3.11.7", "2.9.1", **changes.get(name, {}))
    )
    return script


def test_all_are_run_before_one_that_failed_is_the_exit_status(
    record: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record.main(["--only", "py311-torch29", "py311-torch28", "py311-torch210"]) == 1
    assert list(record.read()) == ["py311-torch29", "py311-torch28", "py311-torch210"]
    assert "py311-torch28: not installed\npy311-torch210: passed\n" in capsys.readouterr().out
    assert record.main(["--only", "py311-torch211"]) == 0
    assert len(record.read()) == 4
    assert "`py311-torch211`" in record.PAGE.read_text()
    record.PAGE.write_text(PAGE)
    assert record.main(["--table"]) == 0
    assert "`py311-torch211`" in record.PAGE.read_text()
    assert record.main([]) == 0
    assert tuple(record.read()) == record.MATRIX


def test_an_interrupted_run_of_the_matrix_keeps_the_record(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once forgot, after its first environment, all that had been run before."""
    first, second, last = record.MATRIX[0], record.MATRIX[1], record.MATRIX[-1]
    old = {"py311-torch210": MISSING, first: MISSING, last: MISSING}
    record.write(old)

    def tried(name: str, workdir: Path) -> dict[str, object]:
        if name == second:
            raise KeyboardInterrupt
        return entry("3.11.7", "2.9.1")

    monkeypatch.setattr(record, "tried", tried)
    with pytest.raises(KeyboardInterrupt):
        record.main([])
    assert record.read() == {**old, first: entry("3.11.7", "2.9.1")}


def test_a_row_whose_interpreter_is_missing_now_keeps_its_date(
    record: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would have become one of an environment that was not installed."""
    old = entry("3.14.8", "2.15.0", commit="1a2b3c4", date="2026-11-01")
    missing = {
        **MISSING,
        "reason": "could not find python interpreter matching any of the specs py314",
    }
    monkeypatch.setattr(record, "tried", lambda name, workdir: missing)
    record.write({"py314-torch215-core": old})
    for _ in range(2):
        assert record.main(["--only", "py314-torch215-core", "py314-torch28"]) == 1
        found = record.read()
        assert {**found["py314-torch215-core"], "kept": None} == {**old, "kept": None}
        assert found["py314-torch28"] == missing
    page, told = record.PAGE.read_text(), "not run on 2026-11-30, as its interpreter"
    assert "| `py314-torch215-core` | 3.14.8 | 2.15.0 | core | 5 |" in page
    assert f"* `py314-torch215-core`: {told}" in page
    assert "py314-torch215-core: no interpreter\n" in capsys.readouterr().out
    monkeypatch.setattr(record, "tried", lambda name, workdir: entry("3.14.8", "2.15.0"))
    assert record.main(["--only", "py314-torch215-core"]) == 0
    assert told not in record.PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "py311-torch20-cor",
            r"tox.ini does not know torch20, cor ('py311-torch20-cor'); see --list",
        ),
        (
            "torch29-py311",
            "an environment's name begins with its Python, such as py312 ('torch29-py311')",
        ),
    ],
)
def test_a_misspelt_environment_is_refused(
    record: Any, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        record.main(["--only", "py311-torch29", name])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert not record.RESULTS.exists()


def test_which_tests_an_environment_runs(script: Any) -> None:
    names = ("py311-cpu213", "py311-cpu213-portable", "py311-torch29-core", "py313-plain")
    assert [script.kind(name) for name in names] == ["whole", "whole", "core", "README"]


def test_the_commit(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script writes in one environment must not mark the next."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert script.commit() == ""  # not a checkout
    script.git("init")
    script.git(
        "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "--message", "first"
    )
    head = script.git("rev-parse", "--short", "HEAD")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "compatibility.json").touch()
    assert script.commit() == head
    (tmp_path / "new.py").touch()
    assert script.commit() == f"{head}+"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.commit() == ""  # no git


def test_an_environment_is_removed_if_its_tests_fail(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tox(
        name: str, workdir: Path, *options: str, stdout: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        (workdir / name).mkdir(exist_ok=True)
        return subprocess.CompletedProcess([], int(fails == options[0]), "ERROR: disk full\n")

    monkeypatch.setattr(script, "tox", tox)
    monkeypatch.setattr(script, "versions_in", lambda environment: {})
    for fails, expected in (("--notest", "not installed"), ("--skip-pkg-install", "failed")):  # noqa: B007
        assert script.tried("py311", tmp_path)["outcome"] == expected
        assert not list(tmp_path.iterdir())


def test_an_error_after_the_tests_is_an_entry(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once lost what its tests had said, and ended the run."""

    def tox(
        name: str, workdir: Path, *options: str, stdout: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        python = workdir / name / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(
            "#!/bin/sh\necho Traceback >&2\necho 'No module named psutil' >&2\nexit 1\n"
        )
        python.chmod(0o755)
        (workdir / name / "junit.xml").write_text(report)
        return subprocess.CompletedProcess([], 0, "")

    monkeypatch.setattr(script, "tox", tox)
    report = (
        "<testsuites><testsuite time='1'><testcase classname='m' "
        "name='t'/></testsuite></testsuites>"
    )
    found = script.tried("py311", tmp_path)
    assert (found["outcome"], found["passed"]) == ("failed", 1)
    assert found["reason"] == "RuntimeError: the versions are not known (No module named psutil)"
    report = "<testsuites>"  # the disk was full
    found = script.tried("py311", tmp_path)
    assert found["outcome"] == "failed" and found["reason"].startswith("ParseError: ")
    assert not list(tmp_path.iterdir())


# --- what is installed


def test_what_is_tested_is_what_is_installed() -> None:
    """Under tox that is the wheel, in a clone the clone; also in a child that has the tests'
    working directory."""
    home = os.environ.get("TOX_ENV_DIR", str(ROOT))
    assert mpgrad.__file__.startswith(home)
    ask = "import importlib.util as util; print(util.find_spec('mpgrad').origin)"
    child = subprocess.run(
        [sys.executable, "-c", ask], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert child == mpgrad.__file__
    workers = importlib.util.find_spec("mpgrad.workers")
    assert workers is not None and str(workers.origin).startswith(home)


# --- what the project says


@pytest.fixture
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements(text: str) -> dict[str, str]:
    """Each name and what is asked of it, without extras and markers."""
    found = (
        re.match(r"([\w.-]+)([<>=][^;]*)?", line)
        for line in text.splitlines()
        if not line.startswith("#")
    )
    return {each[1]: (each[2] or "").strip() for each in found if each}


def lower(bounds: str) -> str:
    return next(
        (bound.removeprefix(">=") for bound in bounds.split(",") if bound.startswith(">=")), ""
    )


def test_the_lowest_versions_are_setup_cfgs(setup: configparser.ConfigParser) -> None:
    extras = setup["options.extras_require"]
    texts = [
        setup["options"]["install_requires"],
        *(extras[extra] for extra in ("progress", "ray", "joblib", "timeline", "scripts", "test")),
    ]
    bounds = {
        name: lower(asked)
        for text in texts
        for name, asked in requirements(text).items()
        if lower(asked)
    }
    pins = requirements((ROOT / "constraints-lowest.txt").read_text())
    assert bounds.pop("torch")  # which the environment's name says
    assert {
        name: asked.removeprefix("==") for name, asked in pins.items() if asked.startswith("==")
    } == bounds


def test_each_environment_is_one_that_tox_knows(script: Any) -> None:
    assert script.known_factors() >= {"torch28", "cpu213", "lowest", "core", "portable", "plain"}
    for name in script.MATRIX:
        assert script.environment(name) == name
    with pytest.raises(argparse.ArgumentTypeError, match="does not know torch99"):
        script.environment("py311-torch99")


@pytest.fixture
def ends() -> list[str]:
    """The environments in which .ci/run runs the core tests."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    return tox["core"]["ends"].split()


def test_ci_runs_the_oldest_and_the_newest_of_what_is_declared(
    script: Any, setup: configparser.ConfigParser, ends: list[str]
) -> None:
    """torch 2.8 once did not start for 515 commits. Nothing had run it, and all places named it."""
    assert [script.environment(name) for name in ends] == ends
    assert {script.kind(name) for name in ends} == {"core"}
    (low, *low_torch, _), (high, *high_torch, _) = (name.split("-") for name in ends)
    entries = script.read()
    newest = max(script.passed(entries), key=script.by_number)
    had = [
        script.minor(each["versions"]["python"])
        for each in entries.values()
        if "kept" not in each and "versions" in each
    ]
    torch = lower(requirements(setup["options"]["install_requires"])["torch"])
    lowest = setup["options"]["python_requires"].removeprefix(">=")
    highest = max(had, key=script.by_number)
    digits = str.maketrans("", "", ".")
    assert (low, low_torch) == (
        f"py{lowest}".translate(digits),
        [f"torch{torch}".translate(digits), "lowest"],
    )
    assert (high, high_torch) == (
        f"py{highest}".translate(digits),
        [f"torch{newest}".translate(digits), "pinned"],
    )


# It is called as `tox run --colored no --workdir DIR -e NAME OPTION ...`.
FAKE_TOX = """#!/bin/bash
echo "$7 $8" >> {log}
ls "$5" >> {log}.there
mkdir -p "$5/$7"
if [[ $8 == --notest ]]; then
    (($(grep -c "$7 --notest" {log}) >= {good}))
else
    {tests}
fi
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("good", "tests", "status", "told"),
    [
        (1, "true", 0, ""),
        (3, "true", 0, ""),
        (4, "true", 2, "could not be installed"),
        (1, "false", 2, "tests failed"),
        (1, "kill -TERM $PPID; sleep 0.2", -signal.SIGTERM, ""),
    ],
)
def test_ci_tries_to_install_each_end_three_times_and_leaves_nothing(
    good: int, tests: str, status: int, told: str, tmp_path: Path
) -> None:
    clone, log = tmp_path / "clone", tmp_path / "log"
    for folder in (clone / ".ci", clone / ".venv" / "bin", tmp_path / "work"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "ends", clone / ".ci")
    (clone / "tox.ini").write_text("[core]\nends = old new\n")
    fake = FAKE_TOX.format(log=log, good=good, tests=tests)
    for name, text in (("pip", "#!/bin/sh\n"), ("tox", fake)):
        (clone / ".venv" / "bin" / name).write_text(text)
        (clone / ".venv" / "bin" / name).chmod(0o755)
    ran = subprocess.run(
        [clone / ".ci" / "ends"],
        env={**os.environ, "TMPDIR": str(tmp_path / "work")},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ran.returncode == status, ran.stderr
    assert ran.stdout.count(told) >= (2 if told else 0)
    assert not list((tmp_path / "work").iterdir())
    tries = ["--notest"] * min(good, 3)
    each = [*tries, *([] if good > 3 else ["--skip-pkg-install"])]
    ends = ("old",) if status < 0 else ("old", "new")
    assert log.read_text().split() == [
        word for end in ends for try_ in each for word in (end, try_)
    ]
    there = (tmp_path / "log.there").read_text().split()
    assert set(there) <= {"old", "new"} and there.count("old") == len(each) - 1


def test_the_workflow_has_the_pythons_of_both_ends(ends: list[str]) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    (step,) = [each for each in job["steps"] if "setup-python" in each.get("uses", "")]
    pythons = step["with"]["python-version"].split()
    assert pythons[:-1] == [re.sub(r"py3(\d+)-.*", r"3.\1", name) for name in ends]


def test_the_table_is_of_the_results(script: Any) -> None:
    page = script.PAGE.read_text()
    assert script.with_table(page, script.read()) == page


def test_the_results_are_as_the_script_writes_them(script: Any) -> None:
    assert json.dumps(script.read(), indent=2) + "\n" == script.RESULTS.read_text()


def test_the_metadata_and_the_readme_name_the_versions_that_passed(
    script: Any, setup: configparser.ConfigParser
) -> None:
    tried = script.passed(script.read())
    torch = next(iter(tried))
    pythons = sorted({python for each in tried.values() for python in each}, key=script.by_number)
    assert setup["options"]["python_requires"] == f">={pythons[0]}"
    assert re.findall(r":: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE) == pythons
    assert lower(requirements(setup["options"]["install_requires"])["torch"]) == torch
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"Python (3\.\d+) to (3\.\d+) and torch", readme) == [
        (pythons[0], pythons[-1])
    ]
    assert re.findall(r"torch (2\.\d+) or newer", readme) == [torch]


def test_the_module_says_what_passed(script: Any) -> None:
    assert script.passed(script.read()) == behaviours.TRIED
