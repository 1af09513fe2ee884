"""The portable branches, which macOS takes, on Linux: a program of its own runs without anything
that only Linux has.

With `MPGRAD_PORTABLE=1` in the environment all other tests take them too, apart from those that are
`linux_only`.
"""

from __future__ import annotations

import array
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import linux_only

from mpgrad import system
from mpgrad.wire.frames import Channel
from mpgrad.wire.messages import NewSlab

ROOT = Path(__file__).parents[2]

# runs at the start of each interpreter, the workers' too
WITHOUT_LINUX = """
import ctypes, mmap, os, signal, socket, sys

for module, names in (
    (os, "eventfd memfd_create pidfd_open pipe2 posix_fallocate"),
    (os, "sched_getaffinity sched_setaffinity"),
    (signal, "pidfd_send_signal"),
    (socket, "MSG_CMSG_CLOEXEC SOCK_SEQPACKET"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

look_up = ctypes.CDLL.__getattr__

def without(library, name):
    if name in ("fallocate", "mallinfo2", "prctl"):
        raise AttributeError(name)
    return look_up(library, name)

ctypes.CDLL.__getattr__ = without

def of_mpgrad():
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("io", "pathlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith("mpgrad")

def refuse(event, arguments):
    if event == "mmap.__new__" and arguments[2] == mmap.ACCESS_COPY:
        raise OSError(22, "no private mappings of shared memory")
    if event in ("open", "os.listdir") and str(arguments[0]).startswith(("/proc", "/sys")):
        if of_mpgrad():
            raise OSError(2, f"no {arguments[0]}")

sys.addaudithook(refuse)

make_pair = socket.socketpair

def small_pair(*arguments):
    pair = make_pair(*arguments)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    return pair

socket.socketpair = small_pair
"""

PROGRAM = '''
import contextlib, faulthandler, gc, os
faulthandler.dump_traceback_later(50, exit=True)
import psutil, torch, mpgrad
from mpgrad.system import name_of

def links():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them has gone
            yield int(name), os.readlink(f"/proc/self/fd/{name}")

def descriptors():
    return sorted(target for _, target in links() if "/dev/shm" in target or "socket" in target)

def names_of(processes):
    pids = (os.getpid(), *(each.pid for each in processes))
    return set(os.listdir("/dev/shm")) & {name_of(pid)[1:] for pid in pids}

def leave_a_name(pid):
    """As a process does that is killed right after it has made it."""
    open(f"/dev/shm{name_of(pid)}", "x").close()

def lacks(_):
    shared = [os.get_inheritable(number) for number, target in links() if "/dev/shm" in target]
    return hasattr(os, "memfd_create"), any(shared), len(shared) > 0

def writes(x, large):
    large[0] += 7
    x[:] = x * 2
    return x, large[:2].clone()

def all_of_it():
    weight = torch.ones(3, requires_grad=True)
    with mpgrad.Pool(2) as pool:
        xs = [torch.full((3,), float(k), requires_grad=True) for k in range(6)]
        sum(y.sum() for y in pool.map(lambda x: x * x * weight, xs)).backward()
        assert [x.grad[0].item() for x in xs] == [0, 2, 4, 6, 8, 10] and weight.grad[0] == 55
        total = pool.reduce(lambda sum, x: sum + x * 3, xs, torch.zeros(3))
        assert torch.equal(torch.autograd.grad(total.sum(), xs[1])[0], torch.full((3,), 3.0))

        large = torch.zeros(1_000_000)  # above what is copied anyway
        private = [torch.full((500_000,), float(k), requires_grad=True) for k in range(4)]
        results = pool.starmap(writes, [(x * 1, large) for x in private])
        for k, (y, seen) in enumerate(results):
            assert (y == 2 * k).all() and seen.tolist() == [7, 0]
        sum(y.sum() for y, _ in results).backward()
        assert all((x.grad == 2).all() for x in private) and (large == 0).all()
        assert pool.apply(str.upper, ["x" * 3_000_000]) == "X" * 3_000_000  # through small pipes

        results = pool.map(lambda x: (x ** 3).sum(), xs)
        killed = psutil.Process(pool.stats().workers[0].pid)
        leave_a_name(killed.pid)
        killed.kill()
        assert all(each.grad_fn is not None for each in results)
        assert torch.equal(torch.autograd.grad(sum(results), xs[2])[0], torch.full((3,), 12.0))
        assert set(pool.map(lacks, range(6), 1)) == {(False, False, True)}
        assert len(descriptors()) > len(before)
        processes = [killed, *psutil.Process().children(recursive=True)]
        assert not names_of(processes)
    return processes

before = descriptors()
leave_a_name(os.getpid())
processes = all_of_it()
assert not [each for each in processes if each.is_running()]
gc.collect()
assert descriptors() == before and not names_of(processes)
print("right")
'''


@pytest.mark.slow
def test_a_pool_without_anything_that_only_linux_has(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    environment = os.environ | {"MPGRAD_PORTABLE": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=58, env=environment)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    (death,) = done.stderr.splitlines()
    assert re.match(r"mpgrad: worker \d was killed by SIGKILL \(phase: ", death)


WINDOWS = """
import os, socket, torch
del socket.SCM_RIGHTS, socket.CMSG_SPACE, socket.AF_UNIX, os.register_at_fork, os.fork
import mpgrad
print("imported")
mpgrad.Pool
"""


@pytest.mark.slow
def test_a_system_without_sockets_that_carry_descriptors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS], capture_output=True, text=True, timeout=58
    )
    assert done.stdout == "imported\n"
    assert done.stderr.splitlines()[-1] == (
        "ImportError: mpgrad needs Unix sockets that can pass file descriptors "
        "(socket.SCM_RIGHTS), which this system lacks "
        f"(system: {sys.platform}); on Windows run it in WSL 2"
    )


def test_what_the_environment_may_say() -> None:
    assert [system.wants_portable(value) for value in ("", "0", "1")] == [False, False, True]
    with pytest.raises(
        ValueError, match=r"MPGRAD_PORTABLE must be 0 or 1 \(MPGRAD_PORTABLE: 'yes'\)"
    ):
        system.wants_portable("yes")


def test_one_module_asks_for_the_system() -> None:
    asks = re.compile(
        r"sys\.platform|platform\.system|os\.name|attr\((os|socket|signal|select|mmap), "
        r"|[\"']/(proc|sys)"
    )
    files = [*(ROOT / "mpgrad").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]
    asking = {path.relative_to(ROOT) for path in files if asks.search(path.read_text())}
    # the doctor describes systems
    assert asking - {Path("mpgrad/doctor.py")} == {Path("mpgrad/system.py")}


# --- what macOS says to descriptors


def too_long() -> OSError:
    return OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))


class Full(socket.socket):
    """Has no room for descriptors, once."""

    was_asked = False

    def sendmsg(self, *arguments: Any) -> int:
        if not self.was_asked:
            self.was_asked = True
            raise too_long()
        return super().sendmsg(*arguments)


class Exhausted(socket.socket):
    """No descriptor is free to receive one with: it says so once, and gives the bytes
    afterwards."""

    was_asked = False

    def recvmsg_into(self, *arguments: Any) -> Any:
        if not self.was_asked:
            self.was_asked = True
            raise too_long()
        count, ancillary, flags, address = super().recvmsg_into(*arguments)
        for _, _, content in ancillary:
            os.close(array.array("i", content)[0])
        return count, [], flags, address


def pair(
    ours: type[socket.socket], theirs: type[socket.socket], blocking: bool = False
) -> tuple[Channel, Channel]:
    ends = socket.socketpair()
    return Channel(ours(fileno=ends[0].detach()), blocking), Channel(
        theirs(fileno=ends[1].detach()), blocking=False
    )


def sent(ours: Channel, theirs: Channel) -> Channel:
    """Their end, when a descriptor has come, or should have."""
    with open(os.devnull) as file:
        ours.send([NewSlab(1, 1)], [b"x" * 100], [file.fileno()])
    ours.flush()
    frame = theirs.receive()
    assert frame is not None and frame.messages == [NewSlab(1, 1)] and len(frame.payload) == 100
    return theirs


@pytest.mark.parametrize("blocking", [False, True])
def test_no_room_for_descriptors_in_a_full_pipe(blocking: bool) -> None:
    ours, theirs = pair(Full, socket.socket, blocking)
    descriptor = sent(ours, theirs).take_descriptor()
    assert descriptor is not None and not os.get_inheritable(descriptor)
    os.close(descriptor)
    ours.close()
    theirs.close()


def test_no_descriptor_is_free_to_receive_one_with() -> None:
    ours, theirs = pair(socket.socket, Exhausted)
    assert sent(ours, theirs).take_descriptor() is None
    ours.close()
    theirs.close()


SANDBOX = """
import ctypes, os, struct

def refuse(number, *calls):
    # as seccomp profiles of containers do, for this process and all that it starts
    load, equal, answer = 0x20, 0x15, 0x06
    code = struct.pack("HBBI", load, 0, 0, 0)
    for call in calls:
        code += struct.pack("HBBI", equal, 0, 1, call)
        code += struct.pack("HBBI", answer, 0, 0, 0x00050000 | number)
    code += struct.pack("HBBI", answer, 0, 0, 0x7FFF0000)
    held = ctypes.create_string_buffer(code)
    address = ctypes.addressof(held)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, address))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0

NUMBERS = (319, 434, 285) if os.uname().machine == "x86_64" else (279, 434, 47)
MEMFD_CREATE, PIDFD_OPEN, FALLOCATE = NUMBERS
"""
IN_IT = """
import torch, mpgrad
from mpgrad.system import PORTABLE

assert PORTABLE
weight = torch.ones(3, requires_grad=True)
with mpgrad.Pool(2) as pool:
    sum(pool.map(lambda x: (x * weight).sum(), [torch.ones(3), torch.ones(3)])).backward()
    large = pool.map(torch.exp, [torch.zeros(100_000)])[0]
print(weight.grad.tolist(), large[0].item(), end="")
"""
LATER = """
from mpgrad import system
from mpgrad.engines.launch import SpawnLauncher, process_launcher

refuse(1, PIDFD_OPEN)
assert isinstance(process_launcher(None), SpawnLauncher)
refuse(1, MEMFD_CREATE)
try:
    system.anonymous_memory()
except OSError as error:
    print(error, end="")
"""


def sandboxed(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SANDBOX + code], capture_output=True, text=True, timeout=60
    )


@linux_only("what other systems lack")
@pytest.mark.quick
@pytest.mark.parametrize("calls", ["MEMFD_CREATE", "PIDFD_OPEN", "MEMFD_CREATE, PIDFD_OPEN"])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_sandbox_that_refuses_calls_of_linux_is_another_system(calls: str, number: int) -> None:
    """The fork server, and shared memory, were begun all the same: "3 in a row died", "Function not
    implemented"."""
    done = sandboxed(
        f"refuse({number}, {calls})\nfrom mpgrad.system import PORTABLE\nprint(PORTABLE)"
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


@linux_only("what other systems lack")
@pytest.mark.slow
@pytest.mark.parametrize("calls", ["MEMFD_CREATE", "PIDFD_OPEN"])
def test_a_pool_in_such_a_sandbox(calls: str) -> None:
    done = sandboxed(f"refuse({errno.ENOSYS}, {calls})\n" + IN_IT)
    assert (done.stdout, done.stderr) == ("[2.0, 2.0, 2.0] 1.0", "")


NO_PAGES = """
import errno, torch
refuse(errno.EPERM, FALLOCATE)
from mpgrad.memory.arena import Arena

slot = Arena(1).allocate(1 << 20)
slot.memory[:3] = b"yes"
print(bytes(slot.memory[:3]).decode(), end="")
"""


@linux_only("posix_fallocate")
@pytest.mark.slow
def test_a_sandbox_that_refuses_to_take_pages_early() -> None:
    """It was taken for a lack of memory."""
    done = sandboxed(NO_PAGES)
    assert (done.stdout, done.stderr) == ("yes", "")


@linux_only("memfd_create")
@pytest.mark.quick
def test_a_call_that_is_refused_later_is_named() -> None:
    done = sandboxed(LATER)
    assert (
        "memfd_create is refused" in done.stdout
        and "MPGRAD_PORTABLE=1" in done.stdout
        and done.stderr == ""
    )
