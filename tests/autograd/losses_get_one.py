"""A plug-in of pytest (`-p losses_get_one`): a gradient of one is predicted for every loss, and its
graph goes.

So backwards are eager wherever they may be, and where another gradient comes, or none, the
prediction was wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    from conftest import every_loss_gets  # which pytest has imported by now

    with every_loss_gets(1.0):
        return (yield)  # type: ignore[misc]
