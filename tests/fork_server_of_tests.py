"""The fork server of the tests. It has imported what test modules import, which otherwise each
worker would do for itself, in 0.1 s."""

from __future__ import annotations

import psutil  # noqa: F401
import pytest  # noqa: F401

from mpgrad.workers.fork_server import main

__all__ = ["main"]
