"""A pytest plug-in (`-p losses_get_one`) that predicts a gradient of one for every loss, and drops
the loss's graph.

So all backwards that may be eager are eager. If another gradient comes, or none, the prediction was
wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    from inside import every_loss_gets  # pytest has imported it by now

    with every_loss_gets(1.0):
        return (yield)  # type: ignore[misc]
