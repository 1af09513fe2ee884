"""How much memory there is: the machine's, or less where a control group limits it. The kernel
kills at such a limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import linux_only

import mpgrad
from mpgrad import system
from mpgrad.cluster import agent
from mpgrad.memory.arena import Arena

GIB = 1 << 30
Limit = Callable[[str, int | None, int], None]
pytestmark = linux_only("control groups")


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def limit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Sets the limit of a group, and what it uses beside 1 GiB of cached files; this process is in
    /batch/job/step."""
    root = tmp_path / "cgroup"
    base = root / "memory" if request.param == 1 else root
    membership = tmp_path / "membership"
    membership.write_text(
        f"3:cpu:/elsewhere\n{'4:memory' if request.param == 1 else '0:'}:/batch/job/step\n"
    )

    def set_limit(group: str, nbytes: int | None, used: int) -> None:
        folder = base / group
        folder.mkdir(parents=True, exist_ok=True)
        if request.param == 1:
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            none = str(2**63 - 4096)
        else:
            files, none = ("memory.max", "memory.current", "inactive_file"), "max"
        (folder / files[0]).write_text(none if nbytes is None else str(nbytes))
        (folder / files[1]).write_text(str(used + GIB))
        (folder / "memory.stat").write_text(f"{files[2]} {GIB}\n")

    monkeypatch.setattr(system, "CGROUPS", root)
    monkeypatch.setattr(system, "MEMBERSHIP", membership)
    monkeypatch.setattr(system, "free_on_machine", lambda: 10 * GIB)
    monkeypatch.setattr(system, "KNOWN_FOR", 1e-9)  # not known at all
    return set_limit


@pytest.mark.quick
def test_the_smallest_room_counts(limit: Limit) -> None:
    assert system.free_memory() == 10 * GIB
    limit("batch/job/step", None, 0)
    assert system.free_memory() == 10 * GIB
    limit("batch/job/step", GIB, GIB // 2)
    assert 0.4 * GIB < system.free_memory() < 0.5 * GIB
    limit("batch/job", GIB, int(0.75 * GIB))  # of the group, its other steps included
    assert 0.15 * GIB < system.free_memory() < 0.25 * GIB
    limit("batch", 2 * GIB, int(1.9 * GIB))
    assert system.free_memory() == 0  # a little is left to what is taken without asking
    limit("batch", 4 * GIB, 0)
    limit("batch/job", 3 * GIB, 4 * GIB)
    assert system.free_memory() == 0


@pytest.mark.quick
def test_shared_memory_ends_where_the_group_does(limit: Limit) -> None:
    limit("batch/job/step", GIB, int(0.94 * GIB))
    arena, replica = Arena(1), agent.SlabReplica(GIB)
    arena.allocate(1 << 20)
    with pytest.raises(
        mpgrad.SharedMemoryError,
        match=r"no room in shared memory .* 10,737,4\d\d bytes of memory free",
    ):
        arena.allocate(16 << 20)
    replica.write(0, bytes(1 << 20))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        replica.write(1 << 20, bytes(16 << 20))
    replica.close()


MANY_RESULTS = """
import torch, mpgrad
with mpgrad.Pool(2) as pool:
    kept = []
    try:
        while len(kept) < 200:
            kept += pool.map(torch.ones, [5_000_000] * 4)
    except mpgrad.SharedMemoryError as error:
        kept = [len(kept) >= 4, len(pool.map(abs, [-1, 2]))]
        print(*kept)
"""


def limited_group(nbytes: int) -> Path | None:
    """A group of this machine's, or None where we may not make one."""
    for base, file in (
        (system.CGROUPS / "memory", "memory.limit_in_bytes"),
        (system.CGROUPS, "memory.max"),
    ):
        folder = base / f"mpgrad-test-{os.getpid()}"
        if (base / "cgroup.procs").exists():
            try:
                folder.mkdir()
                (folder / file).write_text(str(nbytes))
            except OSError:
                if folder.exists():
                    folder.rmdir()
            else:
                return folder
    return None


@pytest.mark.slow
def test_a_real_group() -> None:
    """The kernel killed the caller."""
    folder = limited_group(1200 << 20)
    if folder is None:
        pytest.skip("needs leave to make a control group")
    try:
        join = f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')\n"
        done = subprocess.run(
            [sys.executable, "-c", join + MANY_RESULTS], capture_output=True, text=True, timeout=58
        )
    finally:
        folder.rmdir()
    assert (done.returncode, done.stdout) == (0, "True 2\n"), done.stderr
