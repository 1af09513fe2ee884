"""What systems differ in, asked in one place: elsewhere nobody asks for a system's name, or whether it has some function.

Linux has anonymous memory files, private mappings of them, processes that die with their parent, and so a nursery to fork
workers from. Whatever else has Unix sockets, macOS first of all, takes the portable branches; so does Linux itself where
`MPGRAD_PORTABLE=1` is in the environment, in workers too, which is how those branches are tested.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

__all__ = ["CGROUPS", "PORTABLE", "PROC"]

if not (hasattr(socket, "SCM_RIGHTS") and hasattr(socket, "CMSG_SPACE")):
    raise ImportError(
        "mpgrad needs Unix sockets that carry file descriptors (socket.SCM_RIGHTS), which this system lacks "
        f"(system: {sys.platform}); on Windows run it in WSL 2"
    )


def wants_portable(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ValueError(f"MPGRAD_PORTABLE must be 0 or 1 (MPGRAD_PORTABLE: {value!r})")
    return value == "1"


PORTABLE: bool = wants_portable(os.environ.get("MPGRAD_PORTABLE", "")) or sys.platform != "linux"
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")  # where Linux tells of itself
