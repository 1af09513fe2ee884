"""What a worker was at when it died: faulthandler writes its Python stack into a pipe, whose other end the parent has.

It does so from a signal's handler, in C: also where the worker is stuck in C and holds the interpreter lock, or its memory is
broken. Fatal signals (SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL) end the worker as they would have. `FAREWELL` is how the parent
ends one whose call takes too long: the stack is written, and then the signal does what it does by default, which is to end the
process. So the death says that the stack is complete.
"""

from __future__ import annotations

import faulthandler
import os
import signal

from mpgrad.descriptors import Kept
from mpgrad.wire.asides import LastWords
from mpgrad.wire.link import Link
from mpgrad.wire.messages import FAREWELL

__all__ = ["promise_last_words"]


def promise_last_words(link: Link) -> None:
    """Have this process leave its stack to the parent, or to its site, which passes it on."""
    try:
        theirs, ours = os.pipe()
    except OSError:  # no descriptor is free, and calls matter more
        return
    try:
        os.set_blocking(ours, False)  # what does not fit in is left out: nobody reads before we are dead
        link.send([LastWords()], (), [theirs])
    finally:
        os.close(theirs)
    faulthandler.enable(ours)
    faulthandler.register(FAREWELL, ours, chain=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {FAREWELL})  # whoever started us may have blocked it

    end = [Kept(ours)]

    def leave() -> None:
        """A process that a task forks has nothing to say; nor has one that such a process forks, of which the end is not."""
        if end:
            faulthandler.disable()
            faulthandler.unregister(FAREWELL)
            end.pop().close()

    os.register_at_fork(after_in_child=leave)
