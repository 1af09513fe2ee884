"""Engine "ray" on several raylets of this machine: what only Ray itself can show. The rest is in
test_cluster.py."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import local_cluster
import psutil
import pytest
import torch
from conftest import gone, linux_only
from test_cluster import staffed, step

import mpgrad
from mpgrad.testing import assert_same_as_serial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed (pip install '.[ray]')",
    ),
    # Ray 2.50 does not close the files that it opens for the processes it starts
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ray keeps sockets and processes of its own; ours are those of agents."""
    yield
    agents = [each.pid for each in psutil.Process().children(recursive=True) if is_an_agent(each)]
    assert gone(agents, within=10)


def is_an_agent(process: psutil.Process) -> bool:
    try:
        return "AgentActor" in "".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return False


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A head without CPUs, and two nodes."""
    made = local_cluster.start_ray(nodes=2, cpus=2)
    yield made
    importlib.import_module("ray").shutdown()
    made.shutdown()


@contextlib.contextmanager
def ray_pool(**options: Any) -> Iterator[mpgrad.Pool]:
    with mpgrad.Pool(engine="ray", ray=mpgrad.Ray(node_timeout=5.0), **options) as pool:
        yield pool


def test_a_loop_on_ray(ray_cluster: Any) -> None:
    with ray_pool(processes=2) as pool:
        for size in (3, 30_000, 1_000_000):  # in the call, in pieces, in the store
            weight = torch.linspace(1, 2, size, requires_grad=True)
            xs = [torch.full((size,), float(k), requires_grad=True) for k in range(4)]
            assert_same_as_serial(lambda x, weight=weight: (x * weight).sin() / weight, xs, pool)


def test_captures_go_to_a_ray_node_once(ray_cluster: Any, tmp_path: Path) -> None:
    weight = torch.ones(100_000, requires_grad=True)
    ray = importlib.import_module("ray")
    deadline = time.monotonic() + 20
    # Ray may say for some moments that an earlier pool still has them
    while ray.available_resources().get("CPU") != 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with ray_pool() as pool:
        staffed(pool, 4)
        assert pool.processes == 4

        def product_with(k: int) -> torch.Tensor:
            (tmp_path / str(os.getpid())).touch()
            while len(list(tmp_path.iterdir())) < 4:  # each worker gets some
                time.sleep(1e-3)
            return (weight * k).sum()

        sent = pool.stats().bytes_sent
        sum(pool.map(product_with, range(40), 1)).backward()
        lineages = [psutil.Process(worker.pid).parents() for worker in pool.stats().workers]
        agents = {each.pid for lineage in lineages for each in lineage if is_an_agent(each)}
        assert len(agents) == 2
        assert 2 <= (pool.stats().bytes_sent - sent) / weight.nbytes < 2.2


def test_joblib_takes_the_cluster(ray_cluster: Any) -> None:
    joblib = pytest.importorskip("joblib", reason="joblib is not installed")
    importlib.import_module("mpgrad.joblib").register()
    x = torch.arange(3.0, requires_grad=True)
    with joblib.parallel_config(
        backend="mpgrad", n_jobs=-1, engine="ray", ray=mpgrad.Ray(node_timeout=5.0)
    ):
        with joblib.Parallel() as parallel:
            losses = parallel(joblib.delayed(lambda k: (x * k).sum())(k) for k in range(8))
            assert parallel._backend.effective_n_jobs(-1) == 4
        sum(losses).backward()
    assert x.grad is not None and x.grad.tolist() == [28.0] * 3


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.mark.parametrize("what", ["actor", "raylet"])
def test_what_ray_lost_is_made_again(ray_cluster: Any, what: str) -> None:
    with mpgrad.Pool(2, deterministic=True) as pool:
        expected = step(pool, lambda _: None)
    extra = ray_cluster.add_node(num_cpus=2)
    raylet = psutil.Process(raylet_of(extra))

    def injure(now: str) -> None:
        if now != "backward":
            return
        if what == "raylet":
            raylet.kill()
        else:
            for worker in pool.stats().workers:
                # its fork server, where there are fork servers; its agent; the raylet
                above = psutil.Process(worker.pid).parents()
                if raylet in above:
                    above[above.index(raylet) - 1].kill()
                    return
            raise AssertionError("no worker on the node")

    with ray_pool(deterministic=True) as pool:
        staffed(pool, 6)
        found = step(pool, injure)
    ray_cluster.remove_node(extra, allow_graceful=False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_node_that_joins_takes_calls(ray_cluster: Any) -> None:
    with ray_pool() as pool:
        staffed(pool, 4)
        joined = ray_cluster.add_node(num_cpus=1)
        deadline = time.monotonic() + 40  # a busy machine starts a raylet slowly
        while len({worker.pid for worker in pool.stats().workers if worker.calls}) < 5:
            pool.map(time.sleep, [0.02] * 10, 1)
            assert time.monotonic() < deadline
        ray_cluster.remove_node(joined, allow_graceful=False)


@linux_only("the death signal")
def test_a_caller_on_ray_is_killed(ray_cluster: Any) -> None:
    code = (
        "import time, mpgrad\n"
        f"there = mpgrad.Ray(address={ray_cluster.address!r}, node_timeout=5.0)\n"
        "pool = mpgrad.Pool(2, engine='ray', ray=there)\n"
        "pool.map(time.sleep, [0.05] * 4, 1)\n"
        "pending = pool.map_async(time.sleep, [60] * 2, 1)\n"
        "print('workers', *[worker.pid for worker in pool.stats().workers], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        # Ray writes there, too
        line = next(line for line in caller.stdout if line.startswith("workers"))
        workers = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        pids = [each.pid for worker in workers for each in (worker, *worker.parents()[:2])]
        caller.send_signal(signal.SIGKILL)
    # Ray ends agents in well under 2 s, where it is not busy; else they hear nothing for 5 s, and
    # end by themselves
    assert gone(pids, within=12)


def test_no_ray_cluster_there() -> None:
    code = "import mpgrad\nmpgrad.Pool(1, engine='ray', ray=mpgrad.Ray(address='127.0.0.1:1'))\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert (
        "ConnectionError: no Ray cluster can be joined" in ended.stderr
        and "ray start --head" in ended.stderr
    )


SAME_AS_THE_LOOP = """
serial = sum((x @ weight).exp().sum() for x in items)
torch.testing.assert_close(weight.grad, torch.autograd.grad(serial, weight)[0])
print("the serial loop's gradient")
"""


def test_the_pages_cluster_of_its_own(tmp_path: Path) -> None:
    """tests/project/test_pages.py leaves this block out, because all that start Ray run one after
    another."""
    text = (HERE.parents[1] / "docs" / "clusters.md").read_text()
    (program,) = re.findall(
        r"^# not run here: starts a Ray cluster .*?\)\n(.*?)^```$",
        text,
        re.MULTILINE | re.DOTALL,
    )
    ended = subprocess.run(
        [sys.executable, "-c", program + SAME_AS_THE_LOOP],
        cwd=tmp_path,
        env={
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("\nthe serial loop's gradient\n")


def test_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConnectionError,
        match=r"Ray Client .* cannot be used; .*ray job submit.*ray://10\.0\.0\.1:10001",
    ):
        mpgrad.Pool(1, engine="ray", ray=mpgrad.Ray(address="ray://10.0.0.1:10001"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConnectionError, match="cannot be used"):
        mpgrad.Pool(1, engine="ray")


def test_a_cluster_of_its_own(tmp_path: Path) -> None:
    code = (
        "import mpgrad, psutil, torch\n"
        "weight = torch.ones(3, requires_grad=True)\n"
        "def pool():\n"
        "    return mpgrad.Pool(1, engine='ray', ray=mpgrad.Ray(address='local'))\n"
        "first = pool()\n"
        "with pool() as second:\n"
        "    assert first.map(abs, [-1]) == [1]\n"
        "    first.terminate()\n"
        "    sum(second.map(lambda x: (weight * x).sum(), [1.0, 2.0])).backward()\n"
        "_, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)  # "
        "Ray's own take a moment\n"
        "print(weight.grad.tolist(), len(left))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert ended.stdout == "[3.0, 3.0, 3.0] 0\n", ended.stderr[-3000:]


@contextlib.contextmanager
def autoscaled(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A head without CPUs that can add two nodes of one CPU: its address, and the environment in
    which to join it.

    Ray's own `AutoscalingCluster` stops all that this user has of Ray, and needs a file that is not
    in the wheel.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    small = {
        "resources": {"CPU": 1, "object_store_memory": 100_000_000},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 2,
    }
    settings = (
        "launch_multiple",
        "use_node_id_as_ip",
        "disable_node_updaters",
        "disable_launch_config_check",
    )
    config = {
        "cluster_name": "pretended",
        "max_workers": 2,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            **dict.fromkeys(settings, True),
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "small": small,
        },
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{
            f"{name}_commands": []
            for name in ("initialization", "setup", "head_setup", "worker_setup")
        },
        **{
            name: []
            for name in (
                "head_start_ray_commands",
                "worker_start_ray_commands",
                "cluster_synced_files",
            )
        },
        **{name: [] for name in ("rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    environment = os.environ | {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback interface only
        "RAY_FAKE_CLUSTER": "1",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    start = (
        "start --block --head --num-cpus=0 --include-dashboard=false "
        f"--dashboard-agent-listen-port=0 --port={address[10:]}"
    )
    command = [
        str(Path(sys.executable).with_name("ray")),
        *start.split(),
        "--node-ip-address=127.0.0.1",
    ]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [*command, f"--autoscaling-config={folder / 'config.json'}"],
            env=environment,
            stdout=log,
            stderr=log,
        ) as head,
    ):
        try:
            deadline = time.monotonic() + 30
            while "Ray runtime started" not in (folder / "log").read_text():
                assert head.poll() is None and time.monotonic() < deadline, (
                    folder / "log"
                ).read_text()
                time.sleep(0.1)
            yield address, environment
        finally:
            of_it = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
            for each in of_it:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    assert gone([each.pid for each in of_it], within=10)


def test_an_autoscaler_adds_nodes_and_removes_them() -> None:
    code = """if True:
        import sys, time, mpgrad, ray, torch
        there = mpgrad.Ray(address=sys.argv[1])
        def nodes():
            return sum(node["Alive"] for node in ray.nodes())
        try:
            mpgrad.Pool(engine="ray", ray=there)
        except RuntimeError as error:
            print(error)
        weight = torch.linspace(1, 2, 5, requires_grad=True)
        with mpgrad.Pool(2, engine="ray", ray=there) as pool:
            pool.map(time.sleep, [0.05] * 40, 1)
            sum(pool.map(lambda k: (weight * k).sum(), range(4))).backward()
            while len({worker.pid for worker in pool.stats().workers if worker.calls}) < 2:
                pool.map(time.sleep, [0.05] * 4, 1)
            print(weight.grad.tolist(), nodes())
        while nodes() > 1:
            time.sleep(0.2)
        print("released")
    """
    with (
        tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True) as folder,
        autoscaled(Path(folder)) as (address, environment),
    ):
        # it would leave the head behind; the caller has a limit of its own
        faulthandler.cancel_dump_traceback_later()
        command = [sys.executable, "-c", code, address]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    refused = "no node of the cluster has room for a worker; free some CPUs, or set `processes`"
    assert ended.stdout.splitlines() == [refused, "[6.0, 6.0, 6.0, 6.0, 6.0] 3", "released"], (
        ended.stderr[-3000:]
    )
