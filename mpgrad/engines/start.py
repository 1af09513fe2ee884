"""An engine, by its name and what the pool was asked for."""

from __future__ import annotations

from multiprocessing.context import BaseContext

from mpgrad.engines.dispatcher import Dispatcher
from mpgrad.engines.inline import InlineScheduler
from mpgrad.engines.launch import ThreadLauncher, process_launcher
from mpgrad.engines.traits import ENGINES
from mpgrad.scheduling.scheduler import Scheduler, Settings

__all__ = ["start_engine"]


def start_engine(engine: str, settings: Settings, context: BaseContext | str | None) -> Scheduler:
    if engine == "inline":
        return InlineScheduler(settings)
    return Dispatcher(settings, process_launcher(context) if ENGINES[engine].is_process else ThreadLauncher())
