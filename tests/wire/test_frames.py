"""Frames on a socket: they arrive whole, in order and with their descriptors, however the pipe
takes them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import PATIENCE

import mpgrad
from mpgrad.wire.frames import Channel
from mpgrad.wire.messages import NewSlab, ReturnedSlots

pytestmark = pytest.mark.quick


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, blocking=False), Channel(theirs, blocking=False)


def test_frames_arrive_whole_in_any_pieces() -> None:
    ours, theirs = pair()
    payloads = [os.urandom(size) for size in (0, 1, 100, 300_000, 5_000_000, 7)]
    for number, payload in enumerate(payloads):
        ours.send([ReturnedSlots([(number, 1)])], [payload])
    assert ours.has_outgoing  # the pipe does not hold 5 MB, and nobody reads yet
    received = []
    while len(received) < len(payloads):
        ours.flush()
        while (frame := theirs.receive()) is not None:
            received.append(frame)
    assert [bytes(frame.payload) for frame in received] == payloads
    assert [frame.messages[0].slots[0][0] for frame in received] == list(range(len(payloads)))
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_a_worker_that_is_stopped_and_continued_sends_the_rest() -> None:
    """A send that a signal interrupts has sent a part; what was left stayed with the worker, and
    the parent waited for ever."""
    ours, theirs = socket.socketpair()
    code = (
        "import socket, sys; from mpgrad.wire.frames import Channel; from mpgrad.wire.messages "
        "import ReturnedSlots;"
        "end = Channel(socket.socket(fileno=int(sys.argv[1])), blocking=True);"
        "print('here', flush=True);"
        "end.send([ReturnedSlots([])], [b'x' * 1_000_000]); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], **pipes) as worker:  # type: ignore[call-overload]
        theirs.close()
        ours.setblocking(False)
        received = bytearray()
        try:
            assert worker.stdout.readline() == b"here\n"
            state = psutil.Process(worker.pid)
            deadline = time.monotonic() + PATIENCE
            while len(received) < 1_000_000:
                assert time.monotonic() < deadline
                # until there is no room in the pipe, and it sleeps
                while state.status() == psutil.STATUS_RUNNING:
                    pass
                os.kill(worker.pid, signal.SIGSTOP)
                while state.status() != psutil.STATUS_STOPPED:
                    pass
                with contextlib.suppress(BlockingIOError):  # it slept before it began
                    received += ours.recv(1 << 16)
                os.kill(worker.pid, signal.SIGCONT)
                while state.status() == psutil.STATUS_STOPPED:
                    pass
        finally:
            worker.kill()
    ours.close()


def test_descriptors_arrive_with_their_frames(tmp_path: Path) -> None:
    ours, theirs = pair()
    for number in range(3):
        with open(tmp_path / f"file{number}", "w") as file:
            ours.send([NewSlab(number, 1)], [b"x" * 1000], [file.fileno()])
    for number in range(3):
        frame = theirs.receive()
        if frame is None:  # one read takes the descriptors of one frame; the pipe is still readable
            frame = theirs.receive()
        assert frame is not None and frame.messages == [NewSlab(number, 1)]
        descriptor = theirs.take_descriptor()
        assert descriptor is not None and os.path.samestat(
            os.fstat(descriptor), os.stat(tmp_path / f"file{number}")
        )
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    ours.close()
    theirs.close()


@pytest.mark.slow
def test_more_new_slabs_than_a_frame_has_descriptors(fork_server: mpgrad.Pool) -> None:
    # symptom: the worker died of an empty deque. cause: descriptors beyond the 64th were cut off.
    tensors = [torch.empty(1).expand(2).clone().resize_(33 << 18) for _ in range(70)]
    with mpgrad.Pool(1) as pool:
        assert pool.apply(len, (tensors,)) == 70
