"""What the doctor finds without PyTorch: versions, CPUs, memory and limits of this process.

Each probe looks at one thing and returns one finding. Nothing here imports torch, which may be what is broken. Where mpgrad
refuses the system, which `FAULT` says, only those probes are left that ask Python or psutil.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import mpgrad
from mpgrad.doctor.findings import GIB, MIB, Finding, size_of

try:
    from mpgrad import cgroups, cpus
except Exception as error:  # whatever mpgrad finds amiss with the system, the page says it
    FAULT: Exception | None = error
else:
    FAULT = None

__all__ = ["FAULT", "PROBES", "is_portable"]

SHARED_FOLDER = Path("/dev/shm")
KERNEL_SETTINGS = Path("/proc/sys/vm")
LOOK_SECONDS = 0.4  # at what others take of the CPUs; the system counts in ticks of 10 ms
MOST_TAKEN = 0.25  # share of the usable CPUs that others may take before it is worth a remark
LEAST_MEMORY = GIB  # a process with torch takes a third of it
LEAST_ADDRESSES = 8 * GIB
LEAST_FILE_SIZE = 64 * MIB  # of one piece of a pool's shared memory
LOADER_FOLDER = GIB  # below, torch's DataLoader has been seen to run out of it
# a pool of one opens 11, a further worker 4; a tensor above 32 MiB opens some of its own, and so does the rest of a program
POOL_DESCRIPTORS, WORKER_DESCRIPTORS = 32, 8
POOL_THREADS = 8  # that a pool may want beside its workers


def is_portable() -> bool:
    """Whether pools here do without what only Linux has; see `mpgrad.system`."""
    from mpgrad.system import PORTABLE

    return PORTABLE


# --- software


def mpgrad_itself() -> Finding:
    folder = str(Path(mpgrad.__file__).parent)
    home = os.path.expanduser("~")
    shown = "~" + folder[len(home) :] if home != "/" and folder.startswith(home + os.sep) else folder
    if importlib.util.find_spec("mpgrad.workers") is not None:
        return Finding("software", "mpgrad", mpgrad.__version__, detail=f"in {shown}")
    problem = f"mpgrad.workers is missing in {shown}: was a clone copied without its link mpgrad/workers?"
    remedy = "ln -s ../workers mpgrad/workers in the clone, or install mpgrad again"
    return Finding("software", "mpgrad", mpgrad.__version__, problem=problem, remedy=remedy, fatal=True)


def python() -> Finding:
    free_threaded = not getattr(sys, "_is_gil_enabled", lambda: True)()
    build = f"{platform.python_implementation()}{', without the interpreter lock' if free_threaded else ''}"
    return Finding("software", "Python", platform.python_version(), detail=build)


def system() -> Finding:
    libc = " ".join(platform.libc_ver()).strip() or "a libc that is not glibc"
    detail = f"{platform.machine()}, {libc if sys.platform == 'linux' else 'not Linux: tested less'}"
    finding = Finding("software", "system", f"{platform.system()} {platform.release()}", detail=detail)
    if FAULT is None:
        return finding
    wrong_setting = isinstance(FAULT, ValueError)
    remedy = "unset that variable, or set it as told" if wrong_setting else "run it on Linux, in WSL 2 on Windows, or on macOS"
    return dataclasses.replace(finding, problem=f"mpgrad cannot work here: {FAULT}", remedy=remedy, fatal=True)


def cloudpickle_package() -> Finding:
    return package("cloudpickle", needed=True)


def psutil_package() -> Finding:
    return package("psutil", needed=True)


def numpy_package() -> Finding:
    return package("numpy", needed=False)


def package(name: str, needed: bool) -> Finding:
    """A package by its metadata: to import it is left to the trial, where it may fail."""
    try:
        return Finding("software", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
    if importlib.util.find_spec(name) is not None:
        return Finding("software", name, "there", detail="its version is not known")
    if not needed:
        return Finding("software", name, "not installed", detail="and not needed")
    problem, remedy = f"mpgrad needs {name}", f"pip install {name}"
    return Finding("software", name, "not installed", problem=problem, remedy=remedy, fatal=True)


# --- CPUs


def usable() -> Finding:
    quota = cpus.cgroup_quota(cgroups.own_cgroups("cpu"))
    quota_told = "none" if quota == float("inf") else f"{quota:g}"
    detail = f"of the machine's {os.cpu_count()} (affinity: {len(cpus.own_cpus())}, cgroup quota: {quota_told})"
    count = cpus.usable_cpus()
    if count > 1:
        return Finding("CPUs", "usable", count, detail=detail)
    problem = "on one CPU a pool is no faster than the serial loop"
    remedy = "give this process more: taskset, docker run --cpus, or --cpus-per-task in a batch system"
    return Finding("CPUs", "usable", count, detail=detail, problem=problem, remedy=remedy)


def taken_by_others() -> Finding:
    from mpgrad.others_clock import OthersClock

    clock = OthersClock()
    time.sleep(LOOK_SECONDS)
    taken = clock.cpus()
    try:
        load = f"; load average {os.getloadavg()[0]:.1f}"
    except (AttributeError, OSError):
        load = ""
    return judged_load(round(taken, 1), len(cpus.own_cpus()), cpus.usable_cpus(), load)


def judged_load(taken: float, allowed: int, usable: int, load: str) -> Finding:
    """`taken` of the `allowed` CPUs; a quota may let this process use fewer of them."""
    detail = f"of {allowed} CPUs, measured for {LOOK_SECONDS} s{load}"
    if allowed - taken >= usable * (1 - MOST_TAKEN):
        return Finding("CPUs", "taken by others", taken, detail=detail)
    problem = "other programs (or the host's other machines) take much of the time of these CPUs"
    remedy = "end what need not run (top shows it), or measure again when it has ended"
    return Finding("CPUs", "taken by others", taken, detail=detail, problem=problem, remedy=remedy)


def thread_variables() -> Finding:
    return judged_variables(
        {name: os.environ[name] for name in cpus.THREAD_VARIABLES if name in os.environ}, cpus.usable_cpus()
    )


def judged_variables(found: dict[str, str], usable: int) -> Finding:
    told = ", ".join(f"{name}={value}" for name, value in found.items()) or "none set"
    finding = Finding("CPUs", "thread variables", told)
    wrong = [name for name, value in found.items() if not all(part.strip().isdigit() for part in value.split(","))]
    if wrong:
        problem = f"{wrong[0]} is not a number, and libraries choose for themselves"
        return amiss(finding, problem, f"unset {wrong[0]}, or set it to 1")
    many = [name for name, value in found.items() if int(value.split(",")[0]) > usable]
    if many:
        problem = f"{many[0]} asks for more threads than there are CPUs, in every worker whose functions use such a library"
        return amiss(finding, problem, f"export {many[0]}=1 before the program starts (torch in workers is told apart)")
    if not found and usable > 1:
        detail = "so workers set them to 1"
        return Finding("CPUs", "thread variables", told, detail=detail)
    return finding


def amiss(finding: Finding, problem: str, remedy: str) -> Finding:
    """The finding, with a problem."""
    return Finding(finding.section, finding.name, finding.value, finding.unit, finding.detail, problem, remedy)


# --- memory


def available() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    finding = Finding("memory", "available", round(memory.available / GIB, 1), "GiB", f"of {size_of(memory.total)}")
    if memory.available >= LEAST_MEMORY:
        return finding
    return amiss(finding, "little is left for workers and their tensors", "end other programs, or use fewer workers")


def cgroup_limit() -> Finding:
    import psutil

    total = psutil.virtual_memory().total
    return judged_limit([folder for folder in cgroups.own_cgroups("memory") if cgroups.memory_limit(folder) < total])


def judged_limit(folders: list[Path]) -> Finding:
    """`folders` are those that set a limit."""
    if not folders:
        return Finding("memory", "cgroup limit", "none")
    pairs = [(cgroups.memory_limit(folder), cgroups.memory_used(folder)) for folder in folders]
    limit, used = min(pairs, key=lambda pair: pair[0] - pair[1])
    told = f"{size_of(used)} in use; beyond the limit the kernel kills workers (SIGKILL)"
    finding = Finding("memory", "cgroup limit", round(limit / GIB, 1), "GiB", told)
    if limit - used >= LEAST_MEMORY:
        return finding
    remedy = "raise it (docker run --memory, --mem in a batch system), or use fewer workers"
    return amiss(finding, f"only {size_of(max(0, limit - used))} of it are left", remedy)


def shared_folder() -> Finding | None:
    if sys.platform != "linux" and not SHARED_FOLDER.exists():
        return None
    return judged_folder(SHARED_FOLDER, is_portable())


def judged_folder(folder: Path, portable: bool) -> Finding:
    """Pools do without it, but for portable mode; other users of shared memory do not."""
    name = str(folder)
    larger = "make it larger (docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm)"
    try:
        space = shutil.disk_usage(folder)
    except OSError:
        if portable:
            remedy = "mount it (mount -t tmpfs shm /dev/shm)"
            return Finding("memory", name, "missing", problem="portable mode keeps tensors there", remedy=remedy)
        return Finding("memory", name, "missing", detail="mpgrad does not use it; torch's DataLoader with workers does")
    told = f"{size_of(space.free)} free of {size_of(space.total)}"
    if portable and space.free < LOADER_FOLDER:
        return Finding("memory", name, told, problem="portable mode keeps tensors there", remedy=larger)
    if space.free < LOADER_FOLDER:
        return Finding("memory", name, told, detail="no problem: mpgrad does not use it (torch's DataLoader with workers does)")
    return Finding("memory", name, told)


def overcommit() -> Finding | None:
    """Worth a line where the system counts what is promised, and not only what is used."""
    if cgroups.read_words(KERNEL_SETTINGS / "overcommit_memory") != ["2"]:
        return None
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return judged_commitment(1024 * (kilobytes["CommitLimit"] - kilobytes["Committed_AS"]))


def judged_commitment(left: int) -> Finding:
    told = f"{size_of(max(0, left))} may still be promised"
    finding = Finding("memory", "overcommit", "off", detail=told)
    if left >= 4 * GIB:
        return finding
    problem = "each worker is promised what the process it is forked from has, used or not"
    return amiss(finding, problem, "sysctl vm.overcommit_memory=0, or fewer workers")


# --- limits


def open_files() -> Finding | None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/proc/self/fd")
    used = len(os.listdir(folder)) - 1 if folder.exists() else 0  # without the one that lists
    return judged_files(limit_of(soft), limit_of(hard), used, cpus.usable_cpus())


def judged_files(soft: float, hard: float, used: int, workers: int) -> Finding:
    value = "no limit" if soft == float("inf") else int(soft)
    finding = Finding("limits", "open files", value, detail=f"{used} in use, hard limit {told_limit(hard)}")
    wanted = POOL_DESCRIPTORS + WORKER_DESCRIPTORS * workers
    if soft - used >= wanted:
        return finding
    problem = f"a pool of {workers} workers may need {wanted} more"
    larger = next((each for each in (4096, 1024, 512, 256) if soft < each <= hard), None)
    fewer = "use fewer workers, or have the hard limit raised (limits.conf, docker run --ulimit nofile)"
    return amiss(finding, problem, fewer if larger is None else f"ulimit -n {larger} in the shell that starts the program")


def processes() -> Finding | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    left, told = float("inf"), []
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # which root is exempt from
        used = threads_of_user()
        left = soft - used
        told.append(f"{soft} for this user, {used} in use")
    for folder in cgroups.own_cgroups("pids"):
        most, now = cgroups.read_words(folder / "pids.max"), cgroups.read_words(folder / "pids.current")
        if most and most != ["max"] and now:
            left = min(left, int(most[0]) - int(now[0]))
            told.append(f"{most[0]} in this cgroup, {now[0]} in use")
    return judged_processes(left, told, cpus.usable_cpus())


def judged_processes(left: float, told: list[str], workers: int) -> Finding:
    finding = Finding("limits", "processes", "; ".join(told) or "no limit")
    if left >= workers + POOL_THREADS:
        return finding
    problem = f"processes and threads count, and a pool of {workers} workers needs about {workers + POOL_THREADS}"
    return amiss(finding, problem, "ulimit -u, limits.conf, or docker run --pids-limit; or end what need not run")


def threads_of_user() -> int:
    import psutil

    uid = os.getuid()
    every = psutil.process_iter(["uids", "num_threads"])
    return sum(each.info["num_threads"] or 0 for each in every if each.info["uids"] and each.info["uids"].real == uid)


def address_space() -> Finding | None:
    import resource

    finding = bytes_limit("address space", limit_of(resource.getrlimit(resource.RLIMIT_AS)[0]))
    if finding.value == "no limit" or resource.getrlimit(resource.RLIMIT_AS)[0] >= LEAST_ADDRESSES:
        return finding
    return amiss(finding, "torch and shared memory take much of it, used or not", "ulimit -v unlimited")


def file_size() -> Finding | None:
    """Of shared memory, too: worth a line where there is a limit."""
    import resource

    soft = limit_of(resource.getrlimit(resource.RLIMIT_FSIZE)[0])
    if soft == float("inf"):
        return None
    finding = bytes_limit("file size", soft)
    if soft >= LEAST_FILE_SIZE:
        return finding
    problem = f"it counts for shared memory, too, which comes in pieces of {size_of(LEAST_FILE_SIZE)}"
    return amiss(finding, problem, "ulimit -f unlimited")


def bytes_limit(name: str, soft: float) -> Finding:
    return Finding("limits", name, "no limit" if soft == float("inf") else size_of(soft))


def limit_of(number: int) -> float:
    import resource

    return float("inf") if number == resource.RLIM_INFINITY else number


def told_limit(limit: float) -> str:
    return "none" if limit == float("inf") else str(int(limit))


def further_probes() -> Finding:
    return Finding("doctor", "further probes", "not tried", detail="because of the system, which is marked X")


SOFTWARE = (mpgrad_itself, python, cloudpickle_package, psutil_package, numpy_package, system)
CPUS, MEMORY = (usable, taken_by_others, thread_variables), (available, cgroup_limit, shared_folder, overcommit)
LIMITS = (open_files, processes, address_space, file_size)
PROBES = (
    (*SOFTWARE, *CPUS, *MEMORY, *LIMITS) if FAULT is None else (*SOFTWARE, available, address_space, file_size, further_probes)
)
