"""`python -m mpgrad doctor`: the page comes out, with the remedy, whatever is broken; and nothing is left behind."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from conftest import gone

import mpgrad
from mpgrad import cgroups
from mpgrad.__main__ import main
from mpgrad.doctor import machine, steps, trial
from mpgrad.doctor.findings import GIB, MIB, Finding, as_json, found_by, page, works
from mpgrad.doctor.steps import STEPS, Step
from mpgrad.system import PORTABLE
from mpgrad.torch_state.behaviours import TRIED, minor_of

LIMIT = 55  # seconds; below that of a test


def doctor(*arguments: str, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-m", "mpgrad", "doctor") if code is None else ("-c", code)), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT)


def by_name(findings: list[dict[str, Any]]) -> dict[str, Any]:
    return {finding["name"]: finding for finding in findings}


def fatal_names(told: str) -> list[str]:
    return [finding["name"] for finding in json.loads(told)["findings"] if finding["fatal"]]


# --- the whole of it, in processes


RESTRICTED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from mpgrad.__main__ import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.mark.slow
def test_few_descriptors_and_one_cpu() -> None:
    ended = doctor(code=RESTRICTED)
    assert (ended.returncode, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert told["mpgrad"] == mpgrad.__version__ and told["works"]
    found = by_name(told["findings"])
    if not PORTABLE:  # there nobody says which CPUs a process may use
        assert found["usable"]["value"] == 1 and "taskset" in found["usable"]["remedy"]
    assert found["open files"]["value"] == 32 and found["open files"]["problem"]
    assert found["first worker"]["value"] > 0 and found["further worker"]["value"] > 0
    assert 0 < found["tiny call, loop"]["value"] < found["tiny call, alone"]["value"]
    assert found["tiny call, sent"]["value"] > 0


WITHOUT_A_NAME = """
import sys
if "-c" in sys.orig_argv:  # the trial, not the doctor
    import torch
    del torch._C._current_graph_task_id
"""


@pytest.mark.slow
def test_an_unsupported_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_A_NAME)
    ended = doctor(PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("NO POOL CAN WORK HERE. Look at what is marked X")
    (behaviour,) = [line for line in lines if line.startswith("X")]
    assert behaviour.startswith("X behaviour check ")
    assert "not tried" in ended.stdout and "Traceback" not in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ImportError('lib.so: no such file')", "importing torch failed (ImportError: lib.so: no such file)"),
        ("import time; time.sleep(600)", "hung: importing torch had not ended after 0.3 s in all, and was killed"),
    ],
    ids=["raises", "hangs"],
)
def test_a_torch_that_cannot_be_imported(code: str, problem: str, tmp_path: Path) -> None:
    """Its place is told: often it is a file of the user's own."""
    (tmp_path / "torch.py").write_text(code)
    limit = "0.3" if "sleep" in code else str(LIMIT)
    ended = doctor("--json", "--timeout", limit, PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (1, "")
    assert fatal_names(ended.stdout) == ["torch"]
    torch = by_name(json.loads(ended.stdout)["findings"])["torch"]
    assert torch["problem"].startswith(problem) and "install PyTorch again" in torch["remedy"]
    if "sleep" not in code:
        assert str(tmp_path / "torch.py") in torch["problem"]


HANGS = f"""
import subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
print("some words", flush=True)
print("unfinished{trial.MARK}" + '{{"begins": 4}}', flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_pool_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (finding,) = trial.tried(1.0, [sys.executable, "-S", "-c", HANGS, str(file)])
    assert finding.name == "first worker" and finding.fatal
    assert finding.problem == "hung: starting the first worker had not ended after 1 s in all, and was killed"
    assert "--timeout 5" in finding.remedy
    assert gone([int(file.read_text())], within=20)


DIES = f"""
import os, signal, subprocess, sys
left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=bool(sys.argv[2]))
open(sys.argv[1], "w").write(str(left.pid))
print('{trial.MARK}{{"begins": 4}}', flush=True)
print("some words", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("psutil_is_there", [True, False], ids=["other session", "same session, no psutil"])
def test_a_child_that_dies_is_not_waited_for(psutil_is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it started holds its output open; the doctor said that the trial hung, long after its time limit."""
    if not psutil_is_there:
        monkeypatch.setitem(sys.modules, "psutil", None)
    file = tmp_path / "pid"
    start = time.monotonic()
    (finding,) = trial.tried(LIMIT, [sys.executable, "-S", "-c", DIES, str(file), "other" if psutil_is_there else ""])
    assert time.monotonic() - start < LIMIT / 2
    monkeypatch.undo()
    assert finding.problem == "the process died (SIGKILL) while starting the first worker; it said: some words"
    assert gone([int(file.read_text())], within=5)


def test_a_process_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that waits for a driver: the page comes out all the same."""
    monkeypatch.setattr(trial, "PATIENCE", 0.05)
    tag = "of this test"
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, trial.TAG: tag})
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda *_: None)
        patched.setattr(psutil.Process, "kill", lambda self: None)
        assert trial.end_all(process, tag) == [process.pid]
    assert trial.end_all(process, tag) == []
    really_end = trial.end_all
    monkeypatch.setattr(trial, "end_all", lambda *given: [*really_end(*given), 12, 13])
    (finding,) = trial.tried(LIMIT, [sys.executable, "-S", "-c", ""])
    assert finding.problem == "killed, but not ended within 0.05 s: process 12, 13" and not finding.fatal


TORCH_IN_NAME = """
__version__ = "2.13.0"

class version:
    cuda = None

class accelerator:
    is_available = bool

def get_num_threads():
    return 1
"""
AS_WINDOWS = """
import psutil, socket, sys  # psutil's part for Linux needs the module that is hidden
del socket.SCM_RIGHTS, socket.CMSG_SPACE
sys.modules["resource"] = None
"""


@pytest.mark.parametrize(
    ("site", "environment", "told"),
    [
        ("", {"MPGRAD_PORTABLE": "yes"}, "MPGRAD_PORTABLE must be 0 or 1 (MPGRAD_PORTABLE: 'yes')"),
        (AS_WINDOWS, {}, "mpgrad needs Unix sockets that carry file descriptors (socket.SCM_RIGHTS), which this system lacks"),
    ],
    ids=["setting", "Windows"],
)
def test_a_system_that_mpgrad_cannot_work_on(site: str, environment: dict[str, str], told: str, tmp_path: Path) -> None:
    """It is the one thing that is amiss, and what needs no more than Python is told all the same."""
    (tmp_path / "sitecustomize.py").write_text(site)
    (tmp_path / "torch.py").write_text(TORCH_IN_NAME)
    ended = doctor("--json", PYTHONPATH=str(tmp_path), **environment)
    assert (ended.returncode, ended.stderr) == (1, "")
    findings = json.loads(ended.stdout)["findings"]
    found = by_name(findings)
    assert fatal_names(ended.stdout) == ["system"]
    assert not [finding for finding in findings if "failed" in finding["problem"]]
    assert found["system"]["problem"].startswith(f"mpgrad cannot work here: {told}")
    assert found["torch"]["value"] == "2.13.0" and found["available"]["value"] > 0
    assert found["further probes"]["value"] == found["further steps"]["value"] == "not tried"
    assert found["address space"]["value"] == ("not looked at" if site else "no limit")


def test_limits_where_python_has_no_module_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert {finding.value for finding in found_by(machine.LIMITS)} == {"not looked at"}


def test_no_process_can_be_started() -> None:
    (finding,) = trial.tried(1.0, ["/no/such/program"])
    assert finding.fatal and "no process can be started" in finding.problem


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, complaint in (
        ([], "the following arguments are required: COMMAND"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["doctor", "--timeout", "0"], "must be a number above 0"),
        (["doctor", "--timeout", "soon"], "must be a number above 0"),
    ):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        told = capsys.readouterr()
        assert (raised.value.code, told.out) == (2, "")
        assert told.err.startswith("usage: python -m mpgrad") and complaint in told.err
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert (raised.value.code, capsys.readouterr().out) == (0, f"mpgrad {mpgrad.__version__}\n")


def test_the_version_is_known_without_importing_torch() -> None:
    code = "import sys, mpgrad, mpgrad.doctor; print(mpgrad.__version__, 'torch' in sys.modules, 'psutil' in sys.modules)"
    assert doctor(code=code).stdout == f"{mpgrad.__version__} False False\n"


# --- the page


@pytest.mark.quick
def test_the_page_marks_what_is_amiss() -> None:
    fine = Finding("software", "torch", "2.13.0", detail="for CPUs only")
    odd = Finding("limits", "open files", 32, problem="few", remedy="raise it")
    bad = Finding("pool", "first worker", None, problem="hung", remedy="see above", fatal=True)
    unknown = Finding("elsewhere", "moon", None)
    assert page([fine]).splitlines()[0] == "A pool works here, and nothing is amiss."
    assert page([fine, odd]).splitlines()[0] == "A pool works here. Look at what is marked ! (limits: open files)."
    assert page([unknown, bad, odd, fine]).splitlines() == [
        "NO POOL CAN WORK HERE. Look at what is marked X and ! (pool: first worker, limits: open files).",
        "",
        "software",
        "  torch             2.13.0       for CPUs only",
        "",
        "limits",
        "! open files        32",
        "                    few",
        "                    -> raise it",
        "",
        "pool",
        "X first worker      hung",
        "                    -> see above",
        "",
        "elsewhere",
        "  moon              not known",
    ]
    told = json.loads(as_json("1.0", [odd, bad]))
    assert told["works"] is False and told["findings"][0]["value"] == 32


def test_a_probe_that_fails_is_a_line() -> None:
    def tea_leaves() -> Finding:
        raise ValueError("cold")

    def needs_a_package() -> Finding:
        raise ImportError("No module named 'psutil'")

    def fine() -> Finding:
        return Finding("pool", "fine", 1.0)

    failed, missing, last = found_by([tea_leaves, lambda: None, needs_a_package, fine])
    assert failed.name == "tea leaves" and "ValueError: cold" in failed.problem and "report" in failed.remedy
    assert missing.value == "not looked at" and not missing.problem
    assert last.value == 1.0 and works([failed, missing, last])


def told_of(number: int, *lines: str) -> str:
    return "\n".join([trial.MARK + json.dumps({"begins": number}), *lines])


def test_a_trial_that_dies() -> None:
    found = json.dumps({"finding": {"section": "pool", "name": "start method", "value": "nursery"}})
    output = told_of(2, trial.MARK + found) + "\n" + told_of(4, "one", "", "two", "three")
    start, died = trial.read_trial(output, -9, None)
    assert start == Finding("pool", "start method", "nursery")
    assert died.problem == "the process died (SIGKILL) while starting the first worker; it said: two / three" and died.fatal
    (died,) = trial.read_trial(told_of(7), 3, None)
    assert "exit status 3" in died.problem and died.section == "GPUs" and not died.fatal
    assert trial.read_trial(told_of(7), 0, None) == []


def test_a_step_that_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What builds upon it is not tried."""

    def breaks(pools: contextlib.ExitStack) -> Iterator[Finding]:
        yield Finding("software", "before", 1)
        raise AttributeError("module 'torch' has no attribute\n'_private'")

    def goes_on(pools: contextlib.ExitStack) -> Iterator[Finding]:
        yield Finding("GPUs", "found", "none")

    monkeypatch.setattr(trial.signal, "alarm", lambda seconds: None)
    steps = [STEPS[2]._replace(find=goes_on), Step("pool", "import", "importing", breaks, "mend it")]
    monkeypatch.setattr(trial, "STEPS", [*steps, steps[0], Step("GPUs", "found", "looking", goes_on, "", always=True)])
    trial.main(1.0)
    monkeypatch.undo()
    found = trial.read_trial(capsys.readouterr().out, 0, None)
    assert [each.name for each in found] == ["found", "before", "import", "further steps", "found"]
    assert found[2].problem == "importing failed (AttributeError: module 'torch' has no attribute '_private')"
    assert found[2].remedy == "mend it" and not works(found)


# --- probes


class Times(NamedTuple):
    user: float
    idle: float
    steal: float
    guest: float


def test_what_others_take_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([[Times(5, 5, 0, 0), Times(0, 0, 0, 0)], [Times(5.1, 5, 0.1, 0.1), Times(9, 0, 0, 0)]])
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: next(looks))
    monkeypatch.setattr("mpgrad.others_clock.own_cpus", lambda: [0])
    monkeypatch.setattr(machine, "LOOK_SECONDS", 0.1)
    taken = machine.taken_by_others().value
    assert isinstance(taken, float) and 0.5 < taken < 2.1  # 0.2 s in 0.1 s, less this process's own
    assert not machine.judged_load(0.4, 2, 2, "").problem
    assert machine.judged_load(0.6, 2, 2, "").problem
    assert not machine.judged_load(6.0, 8, 2, "").problem  # a quota leaves room for them


@pytest.mark.quick
def test_variables_that_set_threads() -> None:
    assert machine.judged_variables({}, 2).value == "none set"
    assert not machine.judged_variables({"OMP_NUM_THREADS": "2,1"}, 2).problem
    assert machine.judged_variables({"MKL_NUM_THREADS": "3"}, 2).remedy.startswith("export MKL_NUM_THREADS=1")
    assert "not a number" in machine.judged_variables({"OMP_NUM_THREADS": "all"}, 2).problem


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_cgroups(version: int, tmp_path: Path) -> None:
    limit, used, cache = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (tmp_path / limit).write_text(str(4 * GIB))
    (tmp_path / used).write_text(str(3 * GIB + 512 * MIB))
    (tmp_path / "memory.stat").write_text(f"anon 5\n{cache} {GIB}\n")
    assert cgroups.memory_limit(tmp_path) == 4 * GIB
    finding = machine.judged_limit([tmp_path])
    assert finding.value == 4.0 and finding.detail.startswith("2.5 GiB in use") and not finding.problem
    (tmp_path / limit).write_text(str(3 * GIB))
    assert machine.judged_limit([tmp_path]).problem == "only 512 MiB of it are left"
    assert cgroups.memory_limit(tmp_path / "none") == float("inf")
    assert machine.judged_limit([]).value == "none"


def test_cgroups_above_count(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:cpu,memory:/a/b\n3:pids:/c\n0::/d\n")
    version_1, version_2 = tmp_path / "memory", tmp_path
    expected = [version_1 / "a" / "b", version_1 / "a", version_1, version_2 / "d", version_2]
    assert list(cgroups.cgroup_folders(tmp_path, membership, "memory")) == expected


def test_the_folder_of_named_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "shm"
    assert machine.judged_folder(missing, portable=False).detail.startswith("mpgrad does not use it")
    assert "mount" in machine.judged_folder(missing, portable=True).remedy
    space = {"total": 64 * MIB, "used": 0, "free": 63 * MIB}
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: type("Space", (), space))
    small = machine.judged_folder(tmp_path, portable=False)
    assert small.value == "63 MiB free of 64 MiB" and "DataLoader" in small.detail and not small.problem
    assert "--shm-size" in machine.judged_folder(tmp_path, portable=True).remedy


@pytest.mark.quick
def test_limits() -> None:
    assert not machine.judged_files(1024, 4096, 10, 2).problem
    assert machine.judged_files(128, 4096, 10, 64).remedy.startswith("ulimit -n 4096")
    assert "hard limit" in machine.judged_files(32, 32, 10, 2).remedy
    assert machine.judged_files(float("inf"), float("inf"), 10, 2).value == "no limit"
    assert machine.judged_processes(float("inf"), [], 2).value == "no limit"
    assert machine.judged_processes(5, ["100 in this cgroup, 95 in use"], 2).problem
    assert machine.judged_commitment(GIB).problem and not machine.judged_commitment(8 * GIB).problem


def test_the_lowest_torch_is_that_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    (lowest,) = [line for line in setup["options"]["install_requires"].split() if line.startswith("torch")]
    assert lowest == "torch>=" + min(TRIED, key=minor_of)
    assert f"pip install '{lowest}'" in steps.TORCH
    assert steps.wanted_torch(["torch-geometric>=9", "torch>=2.8"]) == "torch>=2.8"
    assert steps.wanted_torch(None) == "torch"  # a clone that is not installed


@pytest.mark.quick
def test_packages() -> None:
    assert machine.package("no-such-package", needed=True).fatal
    assert not machine.package("no-such-package", needed=False).problem
    assert machine.package("json", needed=True).value == "there"  # importable, and installed by nothing


@pytest.mark.quick
def test_a_clone_without_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not machine.mpgrad_itself().problem
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    found = machine.mpgrad_itself()
    assert found.fatal and "mpgrad.workers is missing" in found.problem and "ln -s ../workers mpgrad/workers" in found.remedy


def test_a_system_without_what_the_nursery_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(steps, "is_portable", lambda: False)
    monkeypatch.setattr(os, "pidfd_open", refused)
    (finding,) = steps.start_method(contextlib.ExitStack())
    assert finding.fatal and "pidfd_open" in finding.problem and "memfd" not in finding.problem
    assert "MPGRAD_PORTABLE=1" in finding.remedy
    monkeypatch.setattr(steps, "is_portable", lambda: True)
    (finding,) = steps.start_method(contextlib.ExitStack())
    assert finding.value == "spawn" and not finding.problem


def test_slow_calls() -> None:
    seconds = {"loop": 1e-6, "sent": 1e-3, "awaited": 2e-3}
    loop, sent, _ = steps.judged_calls(seconds, 2)
    assert loop.value == 1.0
    assert sent.value == 1000.0 and sent.unit == "us" and sent.problem
