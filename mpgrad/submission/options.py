"""Defines the options of a pool, and the options of the calls of one operation. It runs in the
caller only.

Guarantees: an options object is valid and does not change. Only a pool knows whether it has a
    `device` and can keep a `timeout`, so this is checked when an operation begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypedDict, get_args

from mpgrad.calls.packing import Device
from mpgrad.cluster.ray import Ray
from mpgrad.engines.kinds import EngineName, Traits, traits_of
from mpgrad.environment import PLACE, EnvironmentChanges
from mpgrad.pickling import classes
from mpgrad.pickling.exceptions import not_carried
from mpgrad.pickling.initializer import dumps_initializer
from mpgrad.pickling.modules import being_imported
from mpgrad.progress import Progress
from mpgrad.scheduling.settings import Settings, worker_devices
from mpgrad.submission.results import seconds_or_none
from mpgrad.system import bytes_of, usable_cpus

__all__ = [
    "CallOptions",
    "EachOptions",
    "Graphs",
    "MoreOptions",
    "OnError",
    "PickledInitializer",
    "PoolOptions",
    "positive",
]

Graphs = Literal["auto", "keep", "recompute"]
OnError = Literal["raise", "return"]


class EachOptions(TypedDict, total=False):
    """For type checkers: the keyword arguments that all maps have in common, except `on_error`."""

    progress: Progress
    timeout: float | None
    device: Device | None


class MoreOptions(TypedDict, total=False):
    """For type checkers: the keyword arguments of `Pool` that `multiprocessing.Pool` does not
    have."""

    threads_per_worker: int | None
    engine: EngineName | None
    deterministic: bool
    retries: int
    timeout: float | None
    timeout_retries: int
    graphs: Graphs
    graph_memory: int | str | None
    devices: Device | Sequence[Device] | None
    ray: Ray | None


@dataclass(frozen=True)
class PoolOptions:
    """Holds the arguments of `Pool`, whose docstring explains them.

    Raises:
        ValueError, TypeError: an argument is wrong. The message names the argument and its value.
    """

    processes: int | None
    initializer: PickledInitializer
    maxtasksperchild: int | None
    context: BaseContext | str | None
    threads_per_worker: int | None
    engine: EngineName
    deterministic: bool
    retries: int
    timeout: float | None
    timeout_retries: int
    graphs: Graphs
    graph_memory: int | str | None
    devices: Device | Sequence[Device] | None
    ray: Ray | None
    traits: Traits = field(init=False)
    device_codes: tuple[int, ...] | None = field(init=False)  # one for each worker

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", traits_of(self.engine))
        is_process = self.traits.is_process
        true_or_false("deterministic", self.deterministic)
        one_of("graphs", self.graphs, get_args(Graphs))
        if self.graph_memory is not None:
            bytes_of("graph_memory", self.graph_memory)
        if self.processes is not None:
            positive("processes", self.processes)
        codes = worker_devices(self.devices, self.processes, self.engine, self.context)
        # The devices are chosen once, because the choice must last as long as the workers.
        object.__setattr__(self, "device_codes", codes)
        if self.threads_per_worker is not None:
            positive("threads_per_worker", self.threads_per_worker)
        if self.maxtasksperchild is not None:
            calls_of_a_worker(self.maxtasksperchild)
        if self.ray is not None and not isinstance(self.ray, Ray):
            raise TypeError(f"ray must be a mpgrad.Ray (ray: {self.ray!r})")
        if self.ray is not None and not self.traits.remote:
            raise ValueError(f'ray is for engine "ray" (engine: {self.engine!r})')
        if is_process:
            at_least("retries", self.retries, 0)
        at_least("timeout_retries", self.timeout_retries, 0)
        self.seconds(None)

    @property
    def predicts(self) -> bool:
        """Whether backwards run together with their calls, once their gradients are predicted. This
        requires that a graph can be rebuilt.

        If True, graphs are also dropped when memory runs low.
        """
        return self.graphs == "auto" and self.traits.is_process and self.retries > 0

    @property
    def may_bundle(self) -> bool:
        """Whether several items may be sent as one call. They may if no option counts or times each
        call, and none promises an order."""
        counts_calls = (
            self.maxtasksperchild is not None
            or self.graphs == "recompute"
            or self.graph_memory is not None
        )
        return not (self.deterministic or counts_calls or self.timeout or self.device_codes)

    def seconds(self, timeout: float | None) -> float | None:
        """Return the seconds that a call with this `timeout` may take; None for no limit.

        Raises:
            ValueError, TypeError: the timeout is out of range or not a number, or the engine cannot
                end a call.
        """
        seconds = seconds_or_none("timeout", self.timeout if timeout is None else timeout)
        if seconds is None:
            return None
        if not self.traits.is_process:
            raise ValueError(
                "a timeout needs workers that can be killed: engine 'process' or 'ray' (engine: "
                f"{self.engine!r})"
            )
        if seconds <= 0:
            raise ValueError(f"timeout must be more than 0 seconds (timeout: {seconds:g})")
        return seconds

    def settings(self) -> Settings:
        """Return the settings that the pool's workers start with."""
        is_process, codes = self.traits.is_process, self.device_codes
        graph_bytes = (
            None if self.graph_memory is None else bytes_of("graph_memory", self.graph_memory)
        )
        return Settings(
            workers=len(codes)
            if codes is not None
            else usable_cpus()
            if self.processes is None
            else self.processes,
            initializer=self.initializer.bytes,
            threads=self.threads_per_worker,
            calls=self.maxtasksperchild,
            retries=self.retries if is_process else 0,
            timeout_retries=self.timeout_retries,
            graph_bytes=0 if self.graphs == "recompute" else graph_bytes,
            spares_memory=self.predicts,
            devices=codes,
            in_process=not is_process,
            remote=self.traits.remote,
            since=EnvironmentChanges(self.traits.remote) if is_process else None,
            in_caller=self.traits.in_caller,
            importing=PLACE.importing | being_imported() if is_process else frozenset(),
        )


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Holds the options of the calls of one operation, which are the arguments that the public
    methods have in common. `Pool.map` explains them.

    Raises:
        ValueError, TypeError: `chunksize` or `on_error` is out of range or of the wrong type.
    """

    chunksize: int | None = None
    timeout: float | None = None
    on_error: OnError = "raise"
    device: Device | None = None
    progress: Progress = False

    def __post_init__(self) -> None:
        if self.chunksize is not None:
            positive("chunksize", self.chunksize)
        if self.on_error != "raise":
            one_of("on_error", self.on_error, get_args(OnError))

    @property
    def may_bundle(self) -> bool:
        """Whether calls may be sent together. They may if no option applies to a single call."""
        return self.timeout is None and self.chunksize != 1


class PickledInitializer:
    """Holds an initializer and its arguments in the form in which workers receive them.

    Raises:
        TypeError, pickle.PicklingError: the initializer is not a function, or cannot be pickled.
    """

    def __init__(
        self,
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        traits: Traits,
    ) -> None:
        if initializer is not None and not callable(initializer):
            raise TypeError(
                f"initializer must be a function or None (initializer: {initializer!r})"
            )
        # Threads of this process call the initializer itself. A pickled copy would set the globals
        # of the copy.
        self.here = None if traits.is_process else HeldValue((initializer, initargs))
        try:
            self.bytes = (
                dumps_initializer(initializer, initargs)
                if self.here is None
                else classes.dumps(self.here)
            )
        except Exception as error:
            given = {"initializer": initializer, "initargs": initargs}
            not_carried(error, "the initializer or its arguments", given)


class HeldValue:
    """Represents a value of this process in a pickle, as long as this object exists."""

    def __init__(self, value: Any) -> None:
        self.value = value
        HELD[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return held, (id(self),)


HELD: weakref.WeakValueDictionary[int, HeldValue] = weakref.WeakValueDictionary()


def held(number: int) -> Any:
    return HELD[number].value


def calls_of_a_worker(number: int) -> None:
    """Raise ValueError unless `number` is an integer of at least 1."""
    try:
        positive("maxtasksperchild", number)
    except TypeError as error:  # multiprocessing.Pool raises ValueError for any type
        raise ValueError(*error.args) from None


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError if the value is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)} ({name}: {value!r})")


def true_or_false(name: str, value: object) -> None:
    """Raise TypeError if the value is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False ({name}: {value!r})")


def positive(name: str, number: object) -> int:
    """Return `number` if it is at least 1. Otherwise raise an error."""
    return at_least(name, number, 1)


def at_least(name: str, number: object, least: int) -> int:
    """Return `number`.

    Raises:
        TypeError, ValueError: `number` is not an integer, or is less than `least`.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an integer ({name}: {number!r})")
    if number < least:
        raise ValueError(f"{name} must be at least {least} ({name}: {number})")
    return number
