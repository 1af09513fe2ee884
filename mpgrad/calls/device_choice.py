"""On which of a pool's workers a call may run, by where they stand.

A serial loop runs where its tensors lie. So does a call, unless `device=` says otherwise; where it ran never shows, because
all that lies on the worker's device goes back to the device that the call came from.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpgrad.memory.accelerator import INSTALLED, device_code, name_of
from mpgrad.wire.tensor_refs import DEVICE

__all__ = ["Device", "Request", "device_code_named", "device_count", "missing_device", "next_for", "requested"]

Device = str | torch.device


def device_count(asked: object) -> int:
    """Of the kind that is installed; raises where there is none. `asked`: what `devices` was."""
    count = INSTALLED.accelerator.count()
    if not count:
        raise ValueError(
            f"no {INSTALLED.accelerator.type.upper()} device is available here (devices: {asked!r}); install a driver and a "
            "PyTorch that was built for it, or leave devices out"
        )
    return count


def device_code_named(device: object, name: str) -> int:
    """The number of a device that the caller named as the argument `name`."""
    kind = INSTALLED.accelerator.type
    expected = f'{name} must be "cpu", "{kind}" or like "{kind}:0" ({name}: {device!r})'
    if not isinstance(device, (str, torch.device)):
        raise TypeError(expected)
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(expected) from error
    if found.type == "cpu":
        return 0
    if found.type != kind:
        raise ValueError(expected)
    count, index = device_count(device), found.index or 0
    if index >= count:
        raise ValueError(f"{name} must be one of {kind}:0 to {kind}:{count - 1} ({name}: {str(device)!r})")
    return index + 1


class Request:
    """Where the calls of one operation are to run: on `wanted` devices, with all they are given; if None, where that lies."""

    def __init__(self, codes: Sequence[int], wanted: frozenset[int] | None) -> None:
        self._codes = frozenset(codes)
        self._workers = codes
        self._wanted = wanted
        self._captured = 0  # where the first capture lies that is not on the CPU
        self.gathers = wanted is not None
        self.staged = wanted == frozenset({0})  # all goes to workers that can read the CPU's memory only

    def note_captures(self, captures: Iterable[torch.Tensor]) -> None:
        self._captured = next(filter(None, map(device_code, captures)), 0)

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[frozenset[int] | None, int]:
        return self.of_codes([device_code(tensor) for tensor in tensors])

    def of_codes(self, codes: Sequence[int]) -> tuple[frozenset[int] | None, int]:
        """For a call whose tensors lie there: the devices whose workers may run it (None: all), and the one it comes from.

        Raises:
            ValueError: there is no such worker.
        """
        if self._wanted is not None:
            return self._but_all(self._wanted), codes[0] if codes else 0
        origin = next(filter(None, codes), self._captured)
        if origin in self._codes:
            return self._but_all(frozenset({origin})), origin
        if origin == 0:  # as they are: what the function makes on a GPU of its own accord, it makes on the current one
            return None, INSTALLED.accelerator.current() + 1
        others = self._codes - {0}
        if not others:
            raise ValueError(no_worker(name_of(origin), self._workers))
        return self._but_all(others), origin

    def look_again(self, call: Any) -> None:
        """At a call that others have given something meanwhile. Raises as `of_codes`."""
        if not self.gathers or not call.origin:
            call.route, call.origin = self.of_codes([placed.flags // DEVICE for placed in call.placed])

    def _but_all(self, route: frozenset[int]) -> frozenset[int] | None:
        return None if route == self._codes else route


def requested(device: Device | None, codes: tuple[int, ...] | None) -> Request | None:
    """What `device=` of a call means to a pool whose workers have the devices `codes`; None where nothing need be decided.

    Raises:
        ValueError, TypeError: no such device, or no worker there.
    """
    if device is None:
        return None if codes is None else Request(codes, None)
    kind = INSTALLED.accelerator.type
    workers = codes or (0,)
    if isinstance(device, str) and device == kind:
        wanted = frozenset(workers) - {0}
    else:
        wanted = frozenset({device_code_named(device, "device")}) & frozenset(workers)
    if not wanted:
        raise ValueError(no_worker(str(device), workers))
    return None if codes is None else Request(codes, wanted)


def no_worker(device: str, codes: Sequence[int]) -> str:
    """The message of an error."""
    there = ", ".join(f"{count} on {name_of(code)}" for code, count in sorted(Counter(codes).items()))
    return f"no worker of this pool is on device {device} (workers: {there}); make the pool with devices=[...]"


def next_for(queue: deque[Any], device: int) -> Any:
    """Take the first call out of `queue` that may run on `device`; None where there is none."""
    for place in range(len(queue)):  # by number: the caller may be adding more
        call = queue[place]
        if call.route is None or device in call.route:
            del queue[place]
            return call
    return None


def missing_device(codes: Sequence[int], there: Iterable[int]) -> int:
    """The device that the next worker is to have: of `codes` the first that no worker has who is `there`."""
    left = Counter(there)
    for code in codes:
        if left[code] == 0:
            return code
        left[code] -= 1
    return 0
