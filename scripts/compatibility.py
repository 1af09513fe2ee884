"""Runs the tests with other versions of Python, torch and the dependencies, and writes the results
into docs/compatibility.md.

MATRIX names the tox environments to run; tox.ini explains the parts of a name. Environments are
made, used and removed one at a time, because torch with its CUDA packages takes 5 GB. Tests that
failed are run once more, by themselves.

    python scripts/compatibility.py
    python scripts/compatibility.py --only py312-torch29-core
"""

from __future__ import annotations

import argparse
import collections
import configparser
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

EPILOG = (
    "exit status: 0 if all suites passed, 1 if one failed or could not be run, "
    "2 for wrong arguments"
)

MATRIX = (
    # the whole suite; the first has the oldest versions of everything
    "py310-torch28-lowest",
    "py311-cpu213",
    "py311-cpu213-portable",
    "py312-torch211",
    "py313-torch215",
    # the core tests, for each Python up to 3.13 with at least two versions of torch. torch 2.15 has
    # no wheel for Python 3.10.
    "py310-torch29-core",
    "py311-torch210-core",
    "py311-torch212-core",
    "py312-torch214-core",
    "py313-torch213-core",
    "py314-torch215-core",
    "py315-torch215-core",  # the first torch that has a wheel for this Python
    # the README's example, with the torch that pip installs
    "py313-plain",
)
KINDS = {"core": "core", "plain": "README"}  # which tests a factor runs instead of the whole suite

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- table: scripts/compatibility.py writes it -->\n", "<!-- end of the table -->\n"

# torch's metadata lacks the suffix +cu128, and torch may not be importable here, so its version is
# read from a file. NumPy may be missing, because torch does not install it.
ASK_VERSIONS = """
import importlib.util, json, pathlib, platform, runpy
from importlib.metadata import version
asked = ("mpgrad", "cloudpickle", "psutil", "numpy")
versions = {name: version(name) for name in asked if importlib.util.find_spec(name)}
origin = importlib.util.find_spec("torch").origin
torch = runpy.run_path(pathlib.Path(origin).with_name("version.py"))["__version__"]
print(json.dumps({"python": platform.python_version(), "torch": torch, **versions}))
"""
HEADS = (
    "environment",
    "Python",
    "torch",
    "tests",
    "passed",
    "passed when repeated",
    "failed",
    "skipped",
    "commit",
    "date",
)
# how tox reports that a Python is missing, see `reason_in`
NO_INTERPRETER = "could not find python interpreter"
# How the page describes tests that were skipped, and what pytest's reason contains. The first match
# counts.
WHY_SKIPPED = {
    "need a GPU": "GPU",
    "need a package that was not installed": "pip install",
    "take long and run only on request": "MPGRAD_",
    "are about features of one system": "only Linux|Windows",
    "are classes of CPython's tests that this interpreter lacks": "comes without",
    "were skipped for other reasons": "",
}

Entry = dict[str, Any]  # the results of an environment
Entries = dict[str, Entry]  # the results of each environment, by its name


# --- one environment


def tried(name: str, workdir: Path) -> Entry:
    """Install an environment, run its tests and remove it again."""
    entry: Entry = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "tests": kind(name),
    }
    shutil.rmtree(workdir / name, ignore_errors=True)  # an interrupted run may have left it
    try:
        print(f"{name}: installing", flush=True)
        made = tox(
            name,
            workdir,
            "--notest",
            "--skip-missing-interpreters",
            "false",
            stdout=subprocess.PIPE,
        )
        if made.returncode != 0:
            print(made.stdout, flush=True)
            return {**entry, "outcome": "not installed", "reason": reason_in(made.stdout)}
        status = tox(name, workdir, "--skip-pkg-install").returncode
        entry |= outcome(workdir / name / "junit.xml", status)
        if entry.get("failed"):
            again = workdir / name / "again.xml"
            tox(name, workdir, "--skip-pkg-install", "--", "--last-failed", f"--junitxml={again}")
            entry |= after_second_run(entry, again)
        return {**entry, "versions": versions_in(workdir / name)}
    except Exception as error:
        # an environment that breaks here must not keep the next ones from being run
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
        return {
            **entry,
            "outcome": "failed",
            "reason": entry.get("reason", f"{type(error).__name__}: {error}"),
        }
    finally:
        shutil.rmtree(workdir / name, ignore_errors=True)


def kept(old: Entry | None, new: Entry) -> Entry:
    """Return the new entry, or the old one if its tests ran and the interpreter is missing now. The
    page marks it as old."""
    if not old or "versions" not in old or not new.get("reason", "").startswith(NO_INTERPRETER):
        return new
    return {**old, "kept": new["date"]}


def kind(name: str) -> str:
    return next((KINDS[factor] for factor in name.split("-") if factor in KINDS), "whole")


def commit() -> str:
    """Return the checkout's commit, with "+" if files differ from it. The record is not compared,
    because this script changes it."""
    try:
        head, changed = (
            git("rev-parse", "--short", "HEAD"),
            git("status", "--porcelain", "--", ":!docs/compatibility.*"),
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{head}+" if changed else head


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def tox(
    name: str, workdir: Path, *options: str, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tox",
        "run",
        "--colored",
        "no",
        "--workdir",
        str(workdir),
        "-e",
        name,
        *options,
    ]
    # the cache would grow with each environment
    environment = {**os.environ, "PIP_NO_CACHE_DIR": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.STDOUT, text=True
    )


def reason_in(output: str) -> str:
    """Return the reason that pip or tox gave."""
    reasons = re.findall(r"(?:ERROR: |failed with )(.+)", output)
    return str(reasons[-1]) if reasons else "tox gave no reason"


def versions_in(environment: Path) -> dict[str, str]:
    command = [str(environment / "bin" / "python"), "-c", ASK_VERSIONS]
    ran = subprocess.run(command, cwd=environment, capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(f"the versions are not known ({last_line(ran.stderr)})")
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def outcome(report: Path, status: int) -> Entry:
    if not report.exists():
        return {
            "outcome": "failed",
            "reason": f"pytest ended without a report (exit status: {status})",
        }
    counts = counts_in(report.read_text())
    if counts["failed"]:
        return {"outcome": "failed", **counts}
    if status != 0:
        return {
            "outcome": "failed",
            "reason": f"no test failed, but pytest did (exit status: {status})",
            **counts,
        }
    return {"outcome": "passed", **counts}


def after_second_run(entry: Entry, report: Path) -> Entry:
    """Return the entry after its failed tests were run again, by themselves. On a busy machine some
    tests miss their time limits."""
    if not report.exists():
        return {}
    second = counts_in(report.read_text())
    late = [test for test in entry["failed"] if test not in second["failed"]]
    if second["passed"] < len(late):  # not all were run
        return {}
    left = {"failed": second["failed"], "outcome": "failed" if second["failed"] else "passed"}
    return {**left, "late": late, "passed": entry["passed"] + len(late)} if late else {}


def counts_in(junit: str) -> Entry:
    """Read from pytest's report how many tests passed, which failed, how many were skipped for each
    reason, and the seconds."""
    suites = ElementTree.fromstring(junit)
    # a test that failed has a second case if its teardown also failed
    outcomes: dict[str, set[str]] = collections.defaultdict(set)
    for case in suites.iter("testcase"):
        outcomes[f"{case.get('classname')}::{case.get('name')}"].update(part.tag for part in case)
    failed = [test for test, tags in outcomes.items() if tags & {"failure", "error"}]
    skipped = collections.Counter(part.get("message", "") for part in suites.iter("skipped"))
    return {
        "passed": sum(not tags & {"failure", "error", "skipped"} for tags in outcomes.values()),
        "failed": sorted(failed),
        "skipped": dict(sorted(skipped.items())),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites.iter("testsuite"))),
    }


# --- the record of results


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def by_number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def passed(entries: Entries) -> dict[str, tuple[str, ...]]:
    """Return the Python versions for each minor version of torch with which core or whole tests
    passed, in the form of `behaviours.TRIED`."""
    pythons: dict[str, set[str]] = collections.defaultdict(set)
    for entry in entries.values():
        if entry["outcome"] == "passed" and entry["tests"] in ("core", "whole"):
            pythons[minor(entry["versions"]["torch"])].add(minor(entry["versions"]["python"]))
    return {
        torch: tuple(sorted(pythons[torch], key=by_number))
        for torch in sorted(pythons, key=by_number)
    }


def read() -> Entries:
    entries: Entries = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return entries


def write(entries: Entries) -> None:
    RESULTS.write_text(json.dumps(entries, indent=2) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), entries))


def merged(old: Entries, new: Entries) -> Entries:
    """Merge the entries, those of the matrix first and in its order."""
    both = {**old, **new}
    order = [name for name in MATRIX if name in both]
    return {name: both[name] for name in dict.fromkeys([*order, *both])}


def with_table(page: str, entries: Entries) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"the page needs the two lines between which the table belongs: {BEGIN}{END}"
        )
    return "".join([before, begin, *(f"{line}\n" for line in lines_of(entries)), end, after])


def lines_of(entries: Entries) -> Iterator[str]:
    yield f"| {' | '.join(HEADS)} |"
    yield "| --- " * len(HEADS) + "|"
    yield from (
        f"| {' | '.join(map(str, cells(name, entry)))} |" for name, entry in entries.items()
    )
    yield ""
    for name, entry in entries.items():
        if "kept" in entry:
            yield f"* `{name}`: not run on {entry['kept']}, as its interpreter was missing"
        if "reason" in entry:
            yield f"* `{name}`: {entry['reason']}"
        yield from (f"* `{name}`: `{test}` failed" for test in entry.get("failed", ()))
    counts = [skips for entry in entries.values() if (skips := skipped(entry))]
    if counts:
        yield from ("", "Tests that one run skipped:", "")
    for why in WHY_SKIPPED:
        if numbers := sorted(each[why] for each in counts if each[why]):
            least_and_most = dict.fromkeys((numbers[0], numbers[-1]))
            yield f"* {' to '.join(map(str, least_and_most))} {why}."


def skipped(entry: Entry) -> collections.Counter[str]:
    """Count the skipped tests by the page's description."""
    found: collections.Counter[str] = collections.Counter()
    for reason, count in entry.get("skipped", {}).items():
        why = next(why for why, pattern in WHY_SKIPPED.items() if re.search(pattern, reason))
        found[why] += count
    return found


def cells(name: str, entry: Entry) -> list[object]:
    versions = [entry.get("versions", {}).get(package, "") for package in ("python", "torch")]
    if "passed" in entry:
        counts = [
            entry["passed"],
            len(entry.get("late", ())),
            len(entry["failed"]),
            sum(entry["skipped"].values()),
        ]
    else:
        counts = [entry["outcome"], "", "", ""]
    ran = [entry.get("commit", ""), entry["date"]]
    return [f"`{name}`", *versions, entry["tests"], *counts, *ran]


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.list:
        print(*MATRIX, sep="\n")
        return 0
    if options.table:
        write(read())
        return 0
    new: Entries = {}
    for name in options.only or MATRIX:
        new[name] = kept(read().get(name), tried(name, options.workdir.resolve()))
        write(merged(read(), new))  # after each one, so that results stay if the next one breaks
    if not options.only:
        write(new)  # without what the matrix no longer has
    outcomes = {
        name: "no interpreter" if "kept" in entry else entry["outcome"]
        for name, entry in new.items()
    }
    print(*(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return int(any(outcome != "passed" for outcome in outcomes.values()))


def environment(name: str) -> str:
    """Return the name if it has a Python and otherwise only parts that tox.ini knows. tox would
    misread or ignore other parts."""
    python, *factors = name.split("-")
    if not re.fullmatch(r"py3\d+", python):
        raise argparse.ArgumentTypeError(
            f"an environment's name begins with its Python, such as py312 ({name!r})"
        )
    unknown = [factor for factor in factors if factor not in known_factors()]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"tox.ini does not know {', '.join(unknown)} ({name!r}); see --list"
        )
    return name


def known_factors() -> set[str]:
    """Return all factors that appear before a colon in [testenv]: `!core-!plain: ...`."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    conditions = re.findall(r"^([!\w,-]+):\s", "\n".join(tox["testenv"].values()), re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(conditions)))


def parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    made = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    keeps = "run these (default: the matrix; at its end, results of others are dropped)"
    made.add_argument("--only", nargs="+", type=environment, metavar="ENV", help=keeps)
    made.add_argument("--list", action="store_true", help="name the environments of the matrix")
    made.add_argument("--table", action="store_true", help="run nothing, only write the table")
    made.add_argument(
        "--workdir",
        type=Path,
        default=ROOT / ".tox",
        metavar="DIR",
        help="of tox: needs 10 GB (default: .tox)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
