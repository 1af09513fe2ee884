"""`python -m mpgrad doctor`: the page comes out, with the remedy, whatever is broken; and nothing
is left behind."""

from __future__ import annotations

import configparser
import os
import shutil
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
from mpgrad import doctor, system
from mpgrad.__main__ import main
from mpgrad.doctor import GIB, Finding, found_by, page, tried
from mpgrad.system import PORTABLE
from mpgrad.torch_state.behaviours import TRIED, minor_of

LIMIT = 55  # seconds; below that of a test


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, *(command or ("-m", "mpgrad", "doctor"))]
    return subprocess.run(
        given, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT
    )


# --- the whole of it, in processes


RESTRICTED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from mpgrad.__main__ import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.slow
def test_few_descriptors_and_one_cpu() -> None:
    ended = run("-c", RESTRICTED)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == "A pool works here. See the lines marked !."
    if not PORTABLE:  # there nobody says which CPUs a process may use
        assert (
            any(line.startswith("! CPUs         1 of") for line in lines)
            and "taskset" in ended.stdout
        )
    assert (
        any(line.startswith("! open files ") and "at most 32" in line for line in lines)
        and "ulimit -n" in ended.stdout
    )
    assert any(
        line.startswith("  pool         starts, and runs forward and backward") for line in lines
    )


WITHOUT_A_NAME = """
import sys
if "mpgrad.doctor" in sys.orig_argv:  # the trial, not the doctor
    import torch
    del torch._C._current_graph_task_id
"""


@pytest.mark.slow
def test_an_unsupported_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_A_NAME)
    ended = run(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == "No pool can work here. See the lines marked X."
    (amiss,) = [line for line in lines if line.startswith("X")]
    assert amiss.startswith("X torch ")
    assert "install a version that was tried: torch 2." in " ".join(ended.stdout.split())
    assert not [line for line in lines if line[2:].startswith("pool")]  # it needs torch


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('lib.so: no such file')")
    ended = run(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (ended.returncode, ended.stderr) == (1, "")
    told = " ".join(ended.stdout.split())
    assert (
        "X torch importing torch failed (ImportError: lib.so: no such file) -> install PyTorch "
        "again" in told
    )
    assert "none of your files is named torch" in told


@pytest.mark.slow
def test_a_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    for limit in (3.0, 30.0):  # a slow machine may not have come to the import after 3 s
        (finding,) = tried([sys.executable, "-m", "mpgrad.doctor"], limit)
        if finding.name == "torch":
            break
    assert finding.name == "torch" and finding.fatal and "install PyTorch again" in finding.remedy
    assert finding.problem == f"importing torch had not ended after {limit:g} s, and was killed"


BROKEN = """
import os, pathlib, signal, sys, time
import mpgrad
from mpgrad import doctor

def breaks():
    yield doctor.Finding("before", "found")
    with mpgrad.Pool(1) as pool:
        (pid,) = pool.map(worker, [1], 1)
        pathlib.Path(sys.argv[1]).write_text(str(pid))
        print("some words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

def worker(_):
    return os.getpid()

doctor.FAILURES.clear()
doctor.FAILURES[breaks] = doctor.Finding("pool", "", "running a pool", "mend it", fatal=True)
doctor.trial()
"""


@pytest.mark.slow
def test_a_trial_that_dies(tmp_path: Path) -> None:
    """What it had found counts, and its workers end, too."""
    before, died = tried([sys.executable, "-c", BROKEN, str(tmp_path / "pid")], LIMIT)
    assert before == Finding("before", "found")
    assert died == Finding(
        "pool", "", "running a pool died (SIGKILL); it printed: some words", "mend it", fatal=True
    )
    assert gone([int((tmp_path / "pid").read_text())], within=20)


LEAVES = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(left.pid))
sys.exit(3)
"""


def test_a_trial_is_not_waited_for_longer_than_it_runs(tmp_path: Path) -> None:
    """What it started holds its output open; the doctor said that the trial hung, long after its
    time limit."""
    start = time.monotonic()
    (finding,) = tried([sys.executable, "-S", "-c", LEAVES, str(tmp_path / "pid")], LIMIT)
    assert time.monotonic() - start < LIMIT / 2
    assert finding.problem == "starting Python ended with exit status 3" and finding.fatal
    psutil.Process(int((tmp_path / "pid").read_text())).kill()


def test_a_process_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that waits for a driver: the page comes out all the same."""
    started: list[subprocess.Popen[bytes]] = []
    kill = subprocess.Popen.kill
    monkeypatch.setattr(doctor, "KILL_SECONDS", 0.05)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: started.append(process))
    (finding,) = tried([sys.executable, "-S", "-c", "import time; time.sleep(600)"], 0.2)
    assert finding.problem == "starting Python had not ended after 0.2 s, and was killed"
    kill(started[0])
    started[0].wait(LIMIT)


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    (finding,) = tried([sys.executable, "-c", ""], 1.0)
    assert (
        finding.fatal
        and finding.problem
        == "no temporary file can be made ([Errno 2] No usable temporary directory found)"
    )


def test_no_process_can_be_started() -> None:
    (finding,) = tried(["/no/such/program"], 1.0)
    assert finding.fatal and finding.problem.startswith(
        "starting Python failed ([Errno 2] No such file"
    )


AS_WINDOWS = """
import psutil, socket  # psutil's part for Linux needs what is hidden
del socket.SCM_RIGHTS, socket.CMSG_SPACE
"""


@pytest.mark.parametrize(
    ("site", "environment", "told"),
    [
        ("", {"MPGRAD_PORTABLE": "yes"}, "MPGRAD_PORTABLE must be 0 or 1 (MPGRAD_PORTABLE: 'yes')"),
        (
            AS_WINDOWS,
            {},
            "mpgrad needs Unix sockets that can pass file descriptors (socket.SCM_RIGHTS), which "
            "this system lacks",
        ),
    ],
    ids=["setting", "Windows"],
)
def test_a_system_that_mpgrad_cannot_work_on(
    site: str, environment: dict[str, str], told: str, tmp_path: Path
) -> None:
    """It is the one thing that is amiss."""
    (tmp_path / "sitecustomize.py").write_text(site)
    ended = run(
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), **environment
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    (amiss,) = [line for line in ended.stdout.splitlines() if line[:2] in ("X ", "! ")]
    assert amiss.startswith("X system ")
    assert f"mpgrad cannot work here: {told}" in " ".join(ended.stdout.split())


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, complaint in (
        ([], "the following arguments are required: COMMAND"),
        (["nonsense"], "invalid choice: 'nonsense'"),
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
    code = (
        "import sys, mpgrad, mpgrad.doctor; print(mpgrad.__version__, 'torch' in sys.modules, "
        "'psutil' in sys.modules)"
    )
    assert run("-c", code).stdout == f"{mpgrad.__version__} False False\n"


# --- the page


@pytest.mark.quick
def test_the_page_marks_what_is_amiss() -> None:
    fine = Finding("torch", "2.13.0")
    odd = Finding("open files", "32", "few", "raise it")
    bad = Finding("pool", "", "hung", "see above", fatal=True)
    assert page([fine]).splitlines()[0] == "A pool works here."
    assert page([fine, odd]).splitlines()[0] == "A pool works here. See the lines marked !."
    assert page([fine, odd, bad]).splitlines()[:-2] == [
        "No pool can work here. See the lines marked X.",
        "",
        "  torch        2.13.0",
        "! open files   32",
        "               few",
        "               -> raise it",
        "X pool",
        "               hung",
        "               -> see above",
    ]
    assert "torch.utils.collect_env" in page([fine]).splitlines()[-1]


@pytest.mark.quick
def test_a_probe_that_fails_is_a_line() -> None:
    """Others go on, up to one without which no pool can work."""

    def tea_leaves() -> Iterator[Finding]:
        yield Finding("before", "1")
        raise ValueError("cold\nand stale")

    def fatal() -> Iterator[Finding]:
        yield Finding("no", "", "broken", "mend it", fatal=True)
        yield Finding("after", "2")

    before, failed, last = found_by([tea_leaves, fatal, tea_leaves])
    assert (before.name, last.name) == ("before", "no")
    assert (
        failed.name == "tea_leaves"
        and failed.problem == "this probe failed (ValueError: cold and stale)"
    )
    assert "report" in failed.remedy and not failed.fatal


# --- probes


def findings(probe: doctor.Probe) -> dict[str, Finding]:
    return {finding.name: finding for finding in probe()}


def test_the_lowest_torch_is_that_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    (lowest,) = [
        line for line in setup["options"]["install_requires"].split() if line.startswith("torch")
    ]
    assert lowest == "torch>=" + min(TRIED, key=minor_of)


@pytest.mark.quick
def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(finding.problem for finding in doctor.software())
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert findings(doctor.software)["torch"].remedy == "pip install torch"
    assert findings(doctor.software)["psutil"].fatal
    link = findings(doctor.software)["mpgrad.workers"]  # of a clone
    assert link.fatal and "ln -s ../workers mpgrad/workers" in link.remedy


def test_no_interpreter_lock_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    told = findings(doctor.software)["Python"]
    assert (
        "mpgrad has not been run" in told.problem and "-X gil=1" in told.remedy and not told.fatal
    )
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True)
    assert not findings(doctor.software)["Python"].problem


class Times(NamedTuple):
    user: float
    idle: float
    steal: float
    guest: float


def test_what_counts_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a guest, time is counted as the user's, too; what the host takes from us counts as
    busy."""
    monkeypatch.setattr(
        "psutil.cpu_times", lambda percpu: [Times(5.1, 5, 0.1, 0.1), Times(9, 0, 0, 0)]
    )
    monkeypatch.setattr(system, "own_cpus", lambda: [0])
    assert system.busy_seconds() == pytest.approx(5.2)


@pytest.mark.parametrize(
    ("taken", "allowed", "is_much"), [(0.4, 2, False), (0.6, 2, True), (6.0, 8, False)]
)
def test_others_may_take_what_a_quota_leaves(
    taken: float, allowed: int, is_much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "usable_cpus", lambda: 2)
    monkeypatch.setattr(system, "own_cpus", lambda: list(range(allowed)))
    monkeypatch.setattr("mpgrad.system.OthersClock.cpus", lambda clock: taken)
    monkeypatch.setattr(doctor, "LOOK_SECONDS", 0.0)
    assert bool(findings(doctor.processors)["other load"].problem) == is_much


def test_variables_that_set_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "usable_cpus", lambda: 2)
    monkeypatch.setattr(doctor, "LOOK_SECONDS", 0.0)
    for value in ("2", "2,1", "all"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert "threads" not in findings(doctor.processors)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert findings(doctor.processors)["threads"].remedy.startswith("export OMP_NUM_THREADS=1")


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_memory", lambda: 512 << 20)
    finding = findings(doctor.memory)["memory"]
    assert (
        finding.value.startswith("512.0 MiB free of ") and "docker run --memory" in finding.remedy
    )
    monkeypatch.setattr(system, "free_memory", lambda: 2 * GIB)
    assert not findings(doctor.memory)["memory"].problem


def test_the_folder_of_named_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(63 << 20))
    for portable in (False, True):
        monkeypatch.setattr(system, "PORTABLE", portable)
        finding = findings(doctor.memory)["/dev/shm"]
        assert finding.value.startswith("63.0 MiB free") and bool(finding.problem) == portable
    assert "--shm-size" in finding.remedy


class Usage(NamedTuple):
    free: int


def test_few_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "own_cgroups", lambda controller: [tmp_path])
    monkeypatch.setattr(system, "usable_cpus", lambda: 2)
    for most, is_amiss in (("max", None), ("1000", False), ("100", True)):
        (tmp_path / "pids.max").write_text(most)
        (tmp_path / "pids.current").write_text("95")
        finding = findings(doctor.limits).get("processes")
        assert (finding and bool(finding.problem)) == is_amiss
    assert (
        finding is not None and finding.value == "95 of at most 100 in a cgroup, threads included"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_cgroups(version: int, tmp_path: Path) -> None:
    limit, used, cache = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (tmp_path / limit).write_text(str(4 * GIB))
    (tmp_path / used).write_text(str(3 * GIB))
    (tmp_path / "memory.stat").write_text(f"anon 5\n{cache} {GIB}\n")
    assert (system.memory_limit(tmp_path), system.memory_used(tmp_path)) == (4 * GIB, 2 * GIB)
    assert system.memory_limit(tmp_path / "none") == float("inf")


def test_cgroups_above_count(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:cpu,memory:/a/b\n3:pids:/c\n0::/d\n")
    version_1, version_2 = tmp_path / "memory", tmp_path
    expected = [version_1 / "a" / "b", version_1 / "a", version_1, version_2 / "d", version_2]
    assert list(system.cgroup_folders(tmp_path, membership, "memory")) == expected


def test_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    monkeypatch.setattr(torch, "square", Wrong.apply)
    (failed,) = found_by([doctor.start_pool])
    assert failed.fatal and failed.problem.startswith(
        "running a pool failed (RuntimeError: wrong results or gradients"
    )


def test_portable_mode_that_nobody_asked_for(
    fork_server: mpgrad.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "start" not in findings(doctor.start_pool)
    monkeypatch.delenv("MPGRAD_PORTABLE", raising=False)
    monkeypatch.setattr(system, "PORTABLE", True)
    assert "memfd_create or pidfd_open" in findings(doctor.start_pool)["start"].problem
