"""A plug-in of pytest (`-p losses_get_one`): with `graphs="auto"` every loss is taken to get a gradient of one at once.

So backwards are run ahead wherever they may be, and where another gradient comes, or none, the guess was wrong.
"""

from __future__ import annotations

from mpgrad.scheduling.function_cache import Codes


def always_one(self: Codes, pickled: bytes) -> float:
    return 1.0


Codes.expected = always_one  # type: ignore[method-assign]
