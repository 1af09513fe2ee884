"""Cuts the network between two hosts in the middle of a backward, and looks at what becomes of the step and of both sides.

The hosts are network namespaces of this machine, with a switch between them that can be turned off: neither side is told, all
that was sent is lost, and connections stay open. On the first host are Ray's head, a node and the pool; on the second a node.

    cut 1   shorter than `node_timeout`: nothing may be lost
    cut 2   for good: the step has to end within `node_timeout` and some seconds, and the site and workers that were cut off
            have to end by themselves in that time
Gradients, of a second order too, have to be the same as without a cut, bit for bit. At the end no process may be left.

Needs root, and `ip` (Debian: iproute2). Namespaces and processes are removed at the end, whatever happens.

    pip install '.[ray]'
    python scripts/reliability/cut_network.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import mpgrad

CPUS = 2  # of each host
PORT = 6397
HOSTS = ("10.213.7.1", "10.213.7.2")
ITEMS = 64
PAUSE = 0.05  # seconds of each backward
INTO = 0.3  # seconds after the backward began
SOME_SECONDS = 10.0  # for Ray to start a site again, and for the rest of the step
RAY_PATIENCE = 60.0  # seconds for it to start


# --- hosts


class Hosts:
    """Two network namespaces, and a third one with a bridge between them."""

    def __init__(self) -> None:
        names = [f"mpgrad-{os.getpid()}-{name}" for name in ("one", "two", "switch")]
        self.one, self.two, self.switch = names
        self._made: list[str] = []

    def make(self) -> None:
        for name in (self.switch, self.one, self.two):
            ip("netns", "add", name)
            self._made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge0", "up")
        for number, (host, address) in enumerate(zip((self.one, self.two), HOSTS, strict=True)):
            port = f"port{number}"
            ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "route", "add", "default", "dev", "eth0")  # by which Ray finds out the host's own address

    def connect(self, on: bool) -> None:
        ip("-n", self.switch, "link", "set", "bridge0", "up" if on else "down")

    def processes(self, host: str) -> list[psutil.Process]:
        return list(alive([int(pid) for pid in ip("netns", "pids", host).split()]))

    def remove(self) -> None:
        for name in self._made:
            for process in self.processes(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            ip("netns", "delete", name)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def alive(pids: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def sites_and_workers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Sites, and what they have started."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "SiteActor" in "".join(process.cmdline()):
                found += [process, *process.children(recursive=True)]
    return found


def start_ray(host: str, folder: Path, *how: str) -> None:
    """A node of Ray there; it ends with the namespace."""
    environment = os.environ | {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    ray = str(Path(sys.executable).with_name("ray"))
    command = ["ip", "netns", "exec", host, ray, "start", f"--num-cpus={CPUS}", "--object-store-memory=200000000", *how]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=RAY_PATIENCE)


# --- on the first host


class Slow(torch.autograd.Function):
    """The same number, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(PAUSE)
        return grad.clone()


def step(pool: mpgrad.Pool, before_backward: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(5000, dtype=torch.float64, generator=generator).requires_grad_()
    xs = [torch.rand(5000, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(ITEMS)]
    loss = torch.stack(pool.map(lambda x: Slow.apply(((x * weight).sin() * weight).sum()), xs, 1)).square().sum()
    before_backward()
    first = torch.autograd.grad(loss, [weight, *xs], create_graph=True)
    total = torch.stack([each.square().sum() for each in first]).sum()
    return [loss.detach(), *(each.detach() for each in first), *torch.autograd.grad(total, [weight, *xs])]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def drive(timeout: float) -> None:
    """The caller: says on its standard output what it does, and waits for a line after each step."""
    with mpgrad.Pool(2, deterministic=True) as pool:
        expected = step(pool)
    ray = mpgrad.Ray(address=f"{HOSTS[0]}:{PORT}", node_timeout=timeout)
    with mpgrad.Pool(engine="ray", ray=ray, deterministic=True, retries=5, graphs="keep") as pool:
        deadline = time.monotonic() + 60
        while len(pool.stats().workers) < 2 * CPUS and time.monotonic() < deadline:
            pool.map(time.sleep, [0.05] * 8, 1)

        def say(what: str, **more: Any) -> None:
            stats = pool.stats()
            print(json.dumps({"what": what, "workers": len(stats.workers), "deaths": stats.deaths, **more}), flush=True)

        for _ in sys.stdin:
            began = time.monotonic()
            found = step(pool, lambda: say("backward"))
            say("step", same=same(found, expected), seconds=time.monotonic() - began)
    print(json.dumps({"what": "closed"}), flush=True)


class Driver:
    def __init__(self, host: str, folder: Path, timeout: float) -> None:
        command = ["ip", "netns", "exec", host, sys.executable, __file__, "--drive", "--node-timeout", str(timeout)]
        environment = os.environ | {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self, what: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the caller has ended before it said {what!r}")
        said: dict[str, Any] = json.loads(line)
        assert said["what"] == what, said
        return said

    def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.hear("closed")
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


# --- the run


class Cut(NamedTuple):
    same: bool
    workers_before: int
    deaths: int
    step_after: float  # seconds from the cut until the step had ended
    gone_after: float | None  # until no site and no worker was left on the second host; None: they stayed


def cut(hosts: Hosts, driver: Driver, lasts: float | None, watch: float) -> Cut:
    driver.go_on()
    before = driver.hear("backward")
    time.sleep(INTO)
    hosts.connect(False)
    began = time.monotonic()
    gone: list[float] = []

    def look() -> None:
        while time.monotonic() - began < watch:
            if not sites_and_workers(hosts.processes(hosts.two)):
                gone.append(time.monotonic() - began)
                return
            time.sleep(0.05)

    looking = threading.Thread(target=look)
    looking.start()
    if lasts is not None:
        time.sleep(lasts)
        hosts.connect(True)
    after = driver.hear("step")
    step_after = time.monotonic() - began
    looking.join()
    return Cut(after["same"], before["workers"], after["deaths"], step_after, gone[0] if gone else None)


def run(timeout: float) -> tuple[dict[str, Any], list[str]]:
    """What was found, and what is wrong with it."""
    hosts, wrong = Hosts(), []
    found: dict[str, Any] = {"node_timeout": timeout}
    with contextlib.ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True))) for _ in HOSTS
        ]
        stack.callback(hosts.remove)
        hosts.make()
        head = ["--head", f"--node-ip-address={HOSTS[0]}", f"--port={PORT}", "--include-dashboard=false"]
        start_ray(hosts.one, folders[0], *head)
        start_ray(hosts.two, folders[1], f"--address={HOSTS[0]}:{PORT}", f"--node-ip-address={HOSTS[1]}")
        driver = Driver(hosts.one, folders[0], timeout)
        stack.callback(driver.kill)
        driver.go_on()
        driver.hear("backward")
        found["without a cut"] = driver.hear("step")
        short = cut(hosts, driver, timeout / 2, timeout / 2)
        found["short cut"] = short._asdict()
        long = cut(hosts, driver, None, timeout + SOME_SECONDS)
        found["long cut"] = long._asdict()
        driver.go_on()
        driver.hear("backward")
        found["the next step"] = driver.hear("step")
        found["exit status of the caller"] = driver.end()
        found["sites and workers left"] = [
            process.pid for host in (hosts.one, hosts.two) for process in sites_and_workers(hosts.processes(host))
        ]
    checks = {
        "not all workers had come": short.workers_before == 2 * CPUS,
        "a step differs": found["without a cut"]["same"] and short.same and long.same and found["the next step"]["same"],
        "a short cut cost workers": short.deaths == 0,
        "a long cut cost no workers": long.deaths > 0,
        "the step took too long": long.step_after < timeout + SOME_SECONDS,
        "the site that was cut off has not ended": long.gone_after is not None,
        "the caller failed": found["exit status of the caller"] == 0,
        "sites or workers are left": not found["sites and workers left"],
    }
    wrong = [name for name, holds in checks.items() if not holds]
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node-timeout", type=float, default=5.0, help="seconds; of mpgrad.Ray")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("mpgrad").addHandler(logging.NullHandler())  # the deaths are meant
    if options.drive:
        drive(options.node_timeout)
        return 0
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("cut_network.py makes network namespaces: it needs root, and `ip` (Debian: iproute2)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is removed
    found, wrong = run(options.node_timeout)
    print(json.dumps(found, indent=1))
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(found | {"wrong": wrong}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
