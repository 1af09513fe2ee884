"""The device of `pretend/device.cpp` as an mpgrad accelerator. To all software it looks like GPUs.

Its tensors are on devices "pretend:0" and "pretend:1", its shared memory is opened by a handle, and
it can be made to fail in the same places as a GPU. But it is not asynchronous: each copy is done at
once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

__all__ = ["BROKEN", "Pretend", "built"]

SOURCE = Path(__file__).parent / "device.cpp"
COUNT = 2


def built() -> Path | None:
    """Compile the device. Return its library, or None if there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = SOURCE.parent / "build" / f"{key}.so"
    if library.exists() or compiler is None:
        return library if library.exists() else None
    library.parent.mkdir(exist_ok=True)
    folder = Path(torch.__file__).parent / "lib"
    unfinished = library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{path}" for path in include_paths()]
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O0",
        "-std=c++20",
        "-w",
        *includes,
        str(SOURCE),
        "-o",
        str(unfinished),
    ]
    subprocess.run(
        [*command, f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch"], check=True, timeout=300
    )
    unfinished.rename(library)
    return library


class Module:
    """The module that PyTorch expects as `torch.pretend`."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: COUNT)
    current_device = staticmethod(lambda: torch.ops.pretend.current_device())
    set_device = staticmethod(lambda index: torch.ops.pretend.set_device(index))
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])


class Stream:
    def __init__(self, index: int) -> None:
        self.index = index

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event) -> None: ...

    def synchronize(self) -> None:
        if BROKEN:
            raise RuntimeError("an illegal memory access was encountered")


BROKEN: list[str] = []  # errors, after which nothing works on the device, as on a real one


class Event:
    pass


class Pretend:
    type = "pretend"

    def __init__(self, library: Path, refuses: str = "") -> None:
        self.library = library
        self.refuses = refuses  # what fails for its memory: "exported" or "opened"
        self.load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.load()

    def load(self) -> None:
        if not hasattr(torch, "pretend"):
            torch.ops.load_library(str(self.library))
            torch.utils.rename_privateuse1_backend(self.type)
            torch._register_device_module(self.type, Module)

    def count(self) -> int:
        return COUNT

    def current(self) -> int:
        return int(torch.ops.pretend.current_device())

    def enter(self, index: int) -> None:
        torch.ops.pretend.set_device(index)

    def stream(self, index: int) -> Stream:
        return Stream(index)

    def current_stream(self, index: int) -> Stream:
        return Stream(index)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Any:
        before = self.current()
        self.enter(stream.index)
        try:
            yield
        finally:
            self.enter(before)

    def event(self, index: int) -> Event:
        return Event()

    def export_event(self, event: Event) -> bytes:
        return b"event"

    def open_event(self, raw: bytes, index: int) -> Event:
        return Event()

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        return torch.ops.pretend.share(nbytes, index)

    def export(self, memory: torch.Tensor) -> bytes:
        if self.refuses == "exported":
            raise OSError("this is a part of a device only")
        return f"/proc/{os.getpid()}/fd/{torch.ops.pretend.descriptor_of(memory)}".encode()

    def open(self, raw: bytes, nbytes: int, index: int) -> torch.Tensor:
        if self.refuses == "opened":
            raise RuntimeError("invalid device context")
        return torch.ops.pretend.open(raw.decode(), nbytes, index)

    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None: ...

    def seed(self, index: int, seed: int) -> None: ...
