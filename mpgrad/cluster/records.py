"""Records as bytes, and again: what caller and site say to each other. Both sides; needs no torch.

Memory stands behind the pickle, as it is: it is copied once when it is packed, from where it lies, and not when it is unpacked.

    number of buffers | size of each, and of the pickle | pickle | buffers
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["Record", "packed", "unpacked"]

Record = tuple[Any, ...]
COUNT = struct.Struct("<Q")


def packed(records: Sequence[Record]) -> bytes:
    """What is a `PickleBuffer` in them is a memoryview at the other end."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(records, protocol=5, buffer_callback=buffers.append)
    pieces: list[bytes | memoryview] = [pickled, *(buffer.raw() for buffer in buffers)]
    head = struct.pack(f"<{1 + len(pieces)}Q", len(pieces), *map(len, pieces))
    return b"".join((head, *pieces))


def unpacked(content: bytes) -> Sequence[Record]:
    view = memoryview(content)
    (count,) = COUNT.unpack_from(view)
    start = COUNT.size * (1 + count)
    pieces: list[memoryview] = []
    for size in struct.unpack_from(f"<{count}Q", view, COUNT.size):
        pieces.append(view[start : start + size])
        start += size
    records: Sequence[Record] = pickle.loads(pieces[0], buffers=pieces[1:])
    return records
