"""How many CPUs a pool may use: affinity and quotas."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from conftest import linux_only

from mpgrad import system
from mpgrad.system import cgroup_folders

pytestmark = pytest.mark.quick


def test_cgroup_quotas(tmp_path: Path) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    assert system.cgroup_quota(list(cgroup_folders(tmp_path, membership, "cpu"))) == 1.5
    membership.write_text("0::/elsewhere\n")
    assert system.cgroup_quota(list(cgroup_folders(tmp_path, membership, "cpu"))) == math.inf
    (tmp_path / "cpu" / "old").mkdir(parents=True)
    (tmp_path / "cpu" / "old" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "old" / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("7:memory:/old\n4:cpu,cpuacct:/old\n")
    assert system.cgroup_quota(list(cgroup_folders(tmp_path, membership, "cpu"))) == 0.5


@linux_only("sched_getaffinity and cgroups")
def test_usable_cpus_follow_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "cgroup_quota", lambda folders: math.inf)
    assert system.usable_cpus() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert system.usable_cpus() == 16
    monkeypatch.setattr(system, "cgroup_quota", lambda folders: 2.5)
    assert system.usable_cpus() == 3
    monkeypatch.setattr(system, "cgroup_quota", lambda folders: 0.2)
    assert system.usable_cpus() == 1
