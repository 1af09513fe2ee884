"""Whether PyTorch does what mpgrad relies on beyond its public interface: asked once a process, before a pool is made.

A release of PyTorch may rename its private parts, or have them do something else, and a version number says nothing about
that. So what they do is tried, each behaviour by itself, in some milliseconds: a pool on a version that differs raises
`UnsupportedTorchError` instead of giving wrong gradients. `probes` has the behaviours, and says what they guarantee.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import warnings

import torch

import mpgrad.system  # noqa: F401  # says what a system lacks: that is no fault of PyTorch's
from mpgrad.errors import UnsupportedTorchError
from mpgrad.place import PLACE
from mpgrad.torch_state.probes.expectations import BEHAVIOURS, Behaviour

try:
    from mpgrad.torch_state.probes import autograd, memory, modes, objects, transforms  # noqa: F401  # fill the list
except (AttributeError, ImportError) as error:  # said by the first probe
    MISSING: Exception | None = error
else:
    MISSING = None

__all__ = ["BEHAVIOURS", "TRIED", "check", "check_compiler", "failures", "was_tried"]

# Python versions by minor version of torch: on which pairs the tests have passed, see docs/compatibility.md
TRIED: dict[str, tuple[str, ...]] = {
    "2.8": ("3.10",),
    "2.9": ("3.10",),
    "2.10": ("3.11",),
    "2.11": ("3.12",),
    "2.12": ("3.11",),
    "2.13": ("3.11", "3.13"),
    "2.14": ("3.12",),
    "2.15": ("3.13",),
}

LOGGER = logging.getLogger("mpgrad")


def imported() -> None:
    if MISSING is not None:
        raise MISSING


BEHAVIOURS.insert(0, Behaviour("the parts of PyTorch that mpgrad imports are there", imported))


class Check:
    """That of this process. One that is forked has what its parent had."""

    def __init__(self) -> None:
        self.passed = False
        self.compiler_passed = False
        self.lock = threading.RLock()  # two probes at once would meet each other's changes


CHECK = Check()


def unlock_in_child() -> None:
    """Another thread may have held it as this process was forked."""
    CHECK.lock = threading.RLock()


os.register_at_fork(after_in_child=unlock_in_child)


def check() -> None:
    """Try all behaviours, unless this process has done so, or is the worker of one that has.

    Raises:
        UnsupportedTorchError: PyTorch does not behave as expected; names what it should do, its version and those tried.
    """
    if CHECK.passed or PLACE.in_worker:
        return
    with CHECK.lock:
        if not CHECK.passed:
            check_now()


def check_now() -> None:
    """Raises as `check`; warns of a version that nobody has tried."""
    failed = failures()
    for _, error in failed:
        if isinstance(error, (OSError, MemoryError)):
            raise error  # the system lacks something, and PyTorch was not asked
    if failed:
        error = failed[0][1]
        raise UnsupportedTorchError(torch.__version__, [name for name, _ in failed], tuple(TRIED)) from error
    CHECK.passed = True
    newest = max(map(minor_of, TRIED))
    if minor_of(torch.__version__) > newest:
        LOGGER.warning(
            "torch %s is newer than any that mpgrad has been tried with (%s); it behaves as expected in all that was checked",
            torch.__version__,
            ".".join(map(str, newest)),
        )


def check_compiler() -> None:
    """Try what is relied on where functions are carried that torch.compile made; for others the compiler need not be loaded.

    Raises:
        UnsupportedTorchError: they are made otherwise than expected.
    """
    with CHECK.lock:
        if CHECK.compiler_passed:
            return
        try:
            from mpgrad.torch_state.probes.compiler import what_it_was_made_with_can_be_read

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                what_it_was_made_with_can_be_read()
        except Exception as error:
            name = "torch.compile leaves what it was given where it can be read"
            raise UnsupportedTorchError(torch.__version__, [name], tuple(TRIED)) from error
        CHECK.compiler_passed = True


def failures() -> list[tuple[str, Exception]]:
    """Of each behaviour that PyTorch does not have: its name, and what went wrong."""
    found: list[tuple[str, Exception]] = []
    with CHECK.lock:
        thread = threading.Thread(target=try_all, args=(found,), name="mpgrad-check")
        thread.start()
        thread.join()
    return found


def try_all(found: list[tuple[str, Exception]]) -> None:
    """Put those that fail into `found`."""
    with warnings.catch_warnings():  # of what only the probes do; the caller's filters may make errors of them
        warnings.simplefilter("ignore")
        for name, probe in BEHAVIOURS:
            try:
                probe()
            except Exception as error:  # whatever it is, it is no longer what mpgrad was written for
                found.append((name, error))


def was_tried(torch_version: str, python: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Whether the tests have passed on this pair of minor versions.

    Example:
        >>> was_tried("1.13.1+cpu", (3, 8))
        False
    """
    return ".".join(map(str, python)) in TRIED.get(".".join(map(str, minor_of(torch_version))), ())


def minor_of(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
