"""Mirrors of memory that is not shared: what is carried comes to its place, and goes with its
slab."""

from __future__ import annotations

import os

import pytest

from mpgrad.memory import OFFSET_MASK
from mpgrad.memory.arena import Arena
from mpgrad.wire.frames import SlabReplicas
from mpgrad.wire.messages import DroppedSlabs, NewSlab

pytestmark = pytest.mark.quick


def test_a_mirror_goes_with_its_slab() -> None:
    replicas = SlabReplicas()
    assert replicas.enclose([DroppedSlabs([3])], ()) == ([DroppedSlabs([3])], ())
    _, _, (descriptor,) = replicas.open([NewSlab(7, 4096)], memoryview(b""))
    os.close(descriptor)
    assert replicas._slabs.keys() == {7}
    replicas.open([DroppedSlabs([7])], memoryview(b""))
    assert not replicas._slabs


def test_what_is_carried_comes_after_its_slab() -> None:
    """Symptom: what was printed, or a slab that was gone, left first, and took bytes along that had
    no place there yet."""
    ours, theirs = SlabReplicas(), SlabReplicas()
    arena = Arena(1)
    slot = arena.allocate(64)
    slot.memory[:] = bytes(range(64))
    ours.carry(slot)
    assert ours.enclose([], ()) == ([], ())
    slab = slot.slab
    for sent in ([DroppedSlabs([slab.number])], [NewSlab(slab.number, slab.nbytes)]):
        messages, payload = ours.enclose(sent, (b"inline",))
        received, rest, descriptors = theirs.open(messages, memoryview(b"".join(payload)))
        assert received == sent and rest == b"inline"
        for descriptor in descriptors:
            os.close(descriptor)
    offset = slot.address & OFFSET_MASK
    assert theirs._slabs[slab.number].memory[offset : offset + 64] == slot.memory
    arena.close()
