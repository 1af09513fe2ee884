"""A scheduler for an engine, by its name and what the pool was asked for. Caller's side."""

from __future__ import annotations

from mpgrad.engines.kinds import ENGINES, Wanted
from mpgrad.scheduling.dispatcher import Dispatcher
from mpgrad.scheduling.in_caller import InlineScheduler
from mpgrad.scheduling.scheduler import Scheduler
from mpgrad.scheduling.settings import Settings

__all__ = ["start_scheduler"]


def start_scheduler(name: str, settings: Settings, wanted: Wanted) -> Scheduler:
    traits, make = ENGINES[name]
    engine = make(wanted)
    if engine.room is not None:
        settings = settings._replace(workers=engine.room)
    return (InlineScheduler if traits.in_caller else Dispatcher)(settings, engine)
