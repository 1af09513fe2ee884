"""Descriptors that are kept as numbers. Users' code may close all that are open (as daemons do), and open files of its own,
which get the same numbers: who then writes to a number that it has kept writes into one of these.
"""

from __future__ import annotations

import errno
import os

__all__ = ["Kept"]


class Kept:
    """The number of a descriptor, and what it stands for."""

    __slots__ = ("_device", "_inode", "_number")

    def __init__(self, number: int) -> None:
        found = os.fstat(number)
        self._number, self._device, self._inode = number, found.st_dev, found.st_ino

    @property
    def is_ours(self) -> bool:
        try:
            found = os.fstat(self._number)
            return found.st_ino == self._inode and found.st_dev == self._device
        except OSError as error:
            if error.errno != errno.EBADF:  # a signal's handler may have raised a TimeoutError
                raise
            return False

    @property
    def number(self) -> int:
        """To be used at once.

        Raises:
            OSError: it was closed.
        """
        if not self.is_ours:
            raise self.lost
        return self._number

    @property
    def lost(self) -> OSError:
        why = f"descriptor {self._number} of mpgrad's was closed by other code (os.closerange?); close only what you open"
        return OSError(errno.EBADF, why)

    def close(self) -> None:
        """Only if it is still what it was."""
        if self.is_ours:
            os.close(self._number)
