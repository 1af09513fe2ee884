"""`python -m mpgrad doctor` reports whether a pool works on this machine, what is wrong, and how to
mend it.

The page has to appear even if something is broken. So the probes of the machine need no torch.
Importing torch, starting a pool and looking for GPUs may hang or crash. So they are steps of a
*trial* in a separate process, which writes each finding at once.

    trial, in a process ──► lines of a file: MARK, and a finding as JSON ──► `tried`
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mpgrad
from mpgrad.stats import size_of

__all__ = ["run"]

MIB, GIB = 1 << 20, 1 << 30
WIDTH, NAME_WIDTH = 100, 12
TRIAL_SECONDS = 120.0  # about 5 s, more if torch is imported twice from a slow disk
# The time that a killed process may take to end. A process that a driver holds does not end.
KILL_SECONDS = 5.0
SLOW_START = 15.0  # seconds
# The time for measuring other programs' use of the CPUs. The system counts in ticks of 10 ms.
LOOK_SECONDS = 0.4
MOST_TAKEN = 0.25  # share of the usable CPUs that others may take
LEAST_MEMORY = GIB  # a process with torch takes a third of it
LEAST_ADDRESSES = 8 * GIB
LEAST_FILE_SIZE = 64 * MIB  # a slab of a pool's shared memory
# A pool of one worker opens 11 descriptors, and each further worker 4. A tensor above 32 MiB also
# opens some, and so does the rest of the program.
POOL_DESCRIPTORS, WORKER_DESCRIPTORS = 32, 8
POOL_THREADS = 8  # threads that a pool may need besides its workers
NEEDED = {
    "mpgrad.workers": "ln -s ../workers mpgrad/workers in the clone, or install mpgrad again",
    "torch": "pip install torch",
    "cloudpickle": "pip install cloudpickle",
    "psutil": "pip install psutil",
}
# marks a finding among the other output of the trial's process
MARK = "mpgrad doctor: "


class Finding(NamedTuple):
    """A line of the page. If something is wrong, it has the problem and the remedy."""

    name: str
    value: str
    problem: str = ""
    remedy: str = ""
    fatal: bool = False  # no pool can work


Probe = Callable[[], Iterator[Finding]]


def run() -> int:
    """Print the page and return the exit status."""
    if sys.stderr.isatty():
        print("mpgrad doctor: trying a pool; this takes a few seconds ...", file=sys.stderr)
    findings = list(found_by(PROBES))
    if not any(finding.fatal for finding in findings):
        findings += tried([sys.executable, "-m", "mpgrad.doctor"], TRIAL_SECONDS)
    print(page(findings))
    return int(any(finding.fatal for finding in findings))


def page(findings: Sequence[Finding]) -> str:
    """Return the verdict and a line for each finding.

    Findings with a problem are marked "!", or "X" if no pool can work.
    """
    verdict = "A pool works here."
    if any(finding.fatal for finding in findings):
        verdict = "No pool can work here. See the lines marked X."
    elif any(finding.problem for finding in findings):
        verdict += " See the lines marked !."
    lines = [verdict, ""]
    indent = " " * (NAME_WIDTH + 3)
    for finding in findings:
        mark = "X" if finding.fatal else "!" if finding.problem else " "
        lines.append(f"{mark} {finding.name:<{NAME_WIDTH}} {finding.value}".rstrip())
        for text in (finding.problem, finding.remedy and f"-> {finding.remedy}"):
            lines += textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([*lines, "", "For a report, also run: python -m torch.utils.collect_env"])


def found_by(probes: Iterable[Probe]) -> Iterator[Finding]:
    """Yield what the probes find, up to a finding without which no pool can work.

    A probe that raises is a finding itself, and the other probes go on.
    """
    for probe in probes:
        try:
            for finding in probe():
                yield finding
                if finding.fatal:
                    return
        except Exception as error:
            failure = FAILURES.get(
                probe, Finding(probe.__name__, "", "this probe", "please report this page")
            )
            text = " ".join(str(error).split())
            yield failure._replace(
                problem=f"{failure.problem} failed ({type(error).__name__}: {text})"
            )


def judged(name: str, value: str, is_fine: bool, problem: str, remedy: str) -> Finding:
    return Finding(name, value) if is_fine else Finding(name, value, problem, remedy)


# --- this machine, without torch


def software() -> Iterator[Finding]:
    yield Finding("mpgrad", f"{mpgrad.__version__} in {Path(mpgrad.__file__).parent}")
    yield judged(
        "Python",
        platform.python_version(),
        getattr(sys, "_is_gil_enabled", lambda: True)(),  # from Python 3.13 on
        "mpgrad has not been run without the interpreter lock (GIL), which its threads rely on",
        "start Python with -X gil=1 or PYTHON_GIL=1, or use a build that has it",
    )
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    try:
        from mpgrad import system  # noqa: F401  # raises if the system lacks something
    except (ImportError, ValueError) as error:
        remedy = "use Linux, macOS, or WSL 2 on Windows; or set the variable that is named above"
        yield Finding("system", name, f"mpgrad cannot work here: {error}", remedy, fatal=True)
    else:
        yield Finding("system", name)
    for package, remedy in NEEDED.items():
        if importlib.util.find_spec(package) is None:
            yield Finding(package, "missing", f"mpgrad needs {package}", remedy, fatal=True)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        yield Finding("ray", importlib.metadata.version("ray"))


def processors() -> Iterator[Finding]:
    from mpgrad import system

    usable, allowed = system.usable_cpus(), len(system.own_cpus())
    quota = system.cgroup_quota(system.own_cgroups("cpu"))
    limits = f"affinity: {allowed}, cgroup quota: {quota:g}"
    yield judged(
        "CPUs",
        f"{usable} of the machine's {os.cpu_count()} ({limits})",
        usable > 1,
        "on one CPU a pool is no faster than the serial loop",
        "give this process more: taskset, docker run --cpus, or --cpus-per-task in a batch system",
    )
    clock = system.OthersClock()
    time.sleep(LOOK_SECONDS)
    taken = clock.cpus()
    yield judged(
        "other load",
        f"{taken:.1f} CPUs",
        allowed - taken
        >= usable * (1 - MOST_TAKEN),  # a quota may let this process use fewer than it is allowed
        "other programs, or the host's other machines, take much of the time of these CPUs",
        "end programs that are not needed (top lists them), or measure again later",
    )
    for name in system.THREAD_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > usable:
            problem = "in each worker, libraries will use more threads than there are CPUs"
            yield Finding(
                "threads", f"{name}={value}", problem, f"export {name}=1 before the program starts"
            )


def memory() -> Iterator[Finding]:
    import psutil

    from mpgrad.system import PORTABLE, free_memory

    free = free_memory()
    yield judged(
        "memory",
        f"{size_of(free)} free of {size_of(psutil.virtual_memory().total)}, within the limits of "
        "all cgroups",
        free >= LEAST_MEMORY,
        "little is left for workers and their tensors; without memory, the kernel kills workers",
        "end other programs, raise the limit (docker run --memory, --mem in a batch system), or "
        "use fewer workers",
    )
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    if sys.platform == "linux":
        yield judged(
            str(folder),
            f"{size_of(free)} free" + ("" if PORTABLE else " (mpgrad does not use it)"),
            free >= LEAST_MEMORY or not PORTABLE,
            "portable mode keeps tensors there",
            "make it larger (docker run --shm-size=2g, or mount -t tmpfs -o size=2g shm /dev/shm)",
        )


def limits() -> Iterator[Finding]:
    import resource

    import psutil

    from mpgrad.system import own_cgroups, read_words, usable_cpus

    workers = usable_cpus()
    wanted = POOL_DESCRIPTORS + WORKER_DESCRIPTORS * workers
    used = psutil.Process().num_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judged(
        "open files",
        f"{used} of at most {soft} (hard limit {hard})",
        soft == resource.RLIM_INFINITY or soft - used >= wanted,
        f"a pool of {workers} workers may need {wanted} more",
        "ulimit -n 4096 in the shell that starts the program, docker run --ulimit nofile; or use "
        "fewer workers",
    )
    for folder in own_cgroups("pids"):
        most, now = read_words(folder / "pids.max"), read_words(folder / "pids.current")
        if now and most and most != ["max"]:
            yield judged(
                "processes",
                f"{now[0]} of at most {most[0]} in a cgroup, threads included",
                int(most[0]) - int(now[0]) >= workers + POOL_THREADS,
                f"a pool of {workers} workers needs about {workers + POOL_THREADS} more",
                "raise the limit (docker run --pids-limit), or end other programs",
            )
    for name, limit, least, remedy in (
        ("addresses", resource.RLIMIT_AS, LEAST_ADDRESSES, "ulimit -v unlimited"),
        ("file size", resource.RLIMIT_FSIZE, LEAST_FILE_SIZE, "ulimit -f unlimited"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < least:
            yield Finding(
                name,
                f"at most {size_of(soft)}",
                f"torch and shared memory need {size_of(least)}",
                remedy,
            )


PROBES: Sequence[Probe] = (software, processors, memory, limits)


# --- the trial, in a process of its own


def import_torch() -> Iterator[Finding]:
    import torch

    from mpgrad.torch_state import behaviours

    was_tried = behaviours.was_tried(torch.__version__, sys.version_info[:2])
    value = f"{torch.__version__}, {'' if was_tried else 'not '}tried with this Python"
    if not (failures := behaviours.failures()):
        yield Finding("torch", value)
        return
    told = "; ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failures)
    pairs = "; ".join(
        f"torch {minor} with Python {', '.join(pythons)}"
        for minor, pythons in behaviours.TRIED.items()
    )
    problem = f"PyTorch does not behave as mpgrad needs: {told}"
    yield Finding("torch", value, problem, f"install a version that was tried: {pairs}", fatal=True)


def start_pool() -> Iterator[Finding]:
    """Find out whether a pool of one worker starts and gives right results and gradients.

    The finding also reports how long that takes.
    """
    import torch

    from mpgrad.pool import Pool
    from mpgrad.system import PORTABLE

    item = torch.arange(1.0, 1001.0, requires_grad=True)
    start = time.perf_counter()
    with Pool(1) as pool:
        (result,) = pool.map(torch.square, [item], 1)
        torch.autograd.backward(result.sum())
    seconds = time.perf_counter() - start
    if (
        not torch.equal(result, item * item)
        or item.grad is None
        or not torch.equal(item.grad, 2 * item)
    ):
        raise RuntimeError(f"wrong results or gradients: {result}, {item.grad}")
    yield judged(
        "pool",
        f"starts, and runs forward and backward, in {seconds:.1f} s",
        seconds < SLOW_START,
        "most of that is one more import of torch",
        "keep one pool open for the whole program; have the packages on a local disk",
    )
    if PORTABLE and sys.platform == "linux" and not os.environ.get("MPGRAD_PORTABLE"):
        problem = (
            "this system refuses memfd_create or pidfd_open, so each worker imports torch by "
            "itself, which takes seconds"
        )
        yield Finding(
            "start",
            "portable mode",
            problem,
            "use Linux 5.3 or later, or allow these calls in the sandbox",
        )


def look_for_gpus() -> Iterator[Finding]:
    import torch

    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        yield Finding("GPUs", "none")
        return
    module: Any = torch.get_device_module(accelerator)
    names = [module.get_device_name(number) for number in range(torch.accelerator.device_count())]
    yield Finding("GPUs", f"{accelerator.type}: {', '.join(names)}")


# the steps, and the finding if a step raises, hangs or dies
FAILURES = {
    import_torch: Finding(
        "torch",
        "",
        "importing torch",
        "install PyTorch again (docs/compatibility.md lists tested versions); check that none of "
        "your files is named torch",
        fatal=True,
    ),
    start_pool: Finding(
        "pool",
        "",
        "running a pool",
        "see memory and limits above, and end other programs (top lists them)",
        fatal=True,
    ),
    look_for_gpus: Finding(
        "GPUs",
        "",
        "looking for GPUs",
        "check that the driver works (nvidia-smi); pools on the CPU work",
    ),
}
NO_PYTHON = Finding("trial", "", "starting Python", "see memory and limits above", fatal=True)


def trial() -> None:
    """Run the steps. Before each step, write the finding that holds if it fails."""
    for step, failure in FAILURES.items():
        tell("begins", failure)
        for finding in found_by([step]):
            tell("found", finding)
            if finding.fatal:
                return


def tell(kind: str, finding: Finding) -> None:
    print(f"\n{MARK}{json.dumps([kind, *finding])}", flush=True)


def tried(command: Sequence[str], limit: float) -> list[Finding]:
    """Return what a trial finds within `limit` seconds.

    The `command` starts the trial. If it hangs, it is killed, and its workers end.
    """
    failure, findings = NO_PYTHON, list[Finding]()
    with contextlib.ExitStack() as stack:
        try:
            output = stack.enter_context(tempfile.TemporaryFile())
        except OSError as error:
            return [failure._replace(problem=f"no temporary file can be made ({error})")]
        # A file, because a process that the trial started may outlive it and hold a pipe open.
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        except OSError as error:
            return [failure._replace(problem=f"{failure.problem} failed ({error})")]
        try:
            ended = ending(process.wait(limit))
        except subprocess.TimeoutExpired:
            ended = f"had not ended after {limit:g} s, and was killed"
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        # `pread`, because such a process writes at the position of this file.
        told = os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(
            errors="replace"
        )
        lines = [line.strip() for line in told.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(MARK):
            kind, *fields = json.loads(line.removeprefix(MARK))
            if kind == "begins":
                failure = Finding(*fields)
            else:
                findings.append(Finding(*fields))
    if ended:
        words = " / ".join([line for line in lines if not line.startswith(MARK)][-2:])
        said = f"; it printed: {words}" if words else ""
        findings.append(failure._replace(problem=f"{failure.problem} {ended}{said}"))
    return findings


def ending(status: int) -> str:
    """Describe how a process ended; "" if it ended well."""
    if status < 0:
        return f"died ({signal.Signals(-status).name})"
    return f"ended with exit status {status}" if status else ""


if __name__ == "__main__":
    trial()
