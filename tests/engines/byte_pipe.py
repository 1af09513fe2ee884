"""A fifth engine, to try the protocol of engines with: workers are programs, and nothing but bytes passes between it and them.

Neither memory nor descriptors are shared: slots are carried, and mirrored, as they have to be between two machines. As a
plug-in of pytest (`-p byte_pipe`) it runs whatever tests are named with it in the place of engine "process".
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

from mpgrad.engines.kinds import ENGINES, Kind, Wanted
from mpgrad.engines.launch import SpawnLauncher
from mpgrad.engines.programs import program
from mpgrad.engines.protocol import Engine
from mpgrad.engines.sockets import SocketEngine
from mpgrad.wire.frames import Channel
from mpgrad.wire.mirror import Mirror


class Launcher(SpawnLauncher):
    def launch(self, number: int, end: socket.socket) -> None:
        with end:
            self._processes[number] = program("byte_pipe", "serve", end, number)


def serve(descriptor: int, number: int) -> None:
    """In the worker."""
    main: Any = importlib.import_module("mpgrad.workers.main")
    from mpgrad.place import PLACE

    PLACE.in_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main.serve_link(Channel(socket.socket(fileno=descriptor), blocking=True, mirror=Mirror()), number, in_process=True)


def byte_pipes(wanted: Wanted) -> Engine:
    return SocketEngine(Launcher({}), mirrored=True)


TRAITS = ENGINES["process"].traits


def pytest_configure() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ENGINES["process"] = Kind(TRAITS, byte_pipes)
