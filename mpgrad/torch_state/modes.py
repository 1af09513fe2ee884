"""Grad mode, default dtype, autocast and random seeds follow the caller's into a worker.

A serial loop simply runs under the caller's modes, but a worker has its own. `Modes` is a snapshot
that is sent with every chunk. It holds PyTorch's settings that differ from their defaults. So
unchanged settings cost nothing, and settings of an initializer stay. Hooks for saved tensors are
code, and are sent with the function. Modes that are objects of the user's cannot be sent, so a call
under one is refused (`ModeCheck`).

Random numbers follow one rule. An operation draws one seed from the caller's generator, and each
item derives its own seed from that. So nothing depends on which worker runs an item, in what order,
or how often.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpgrad.errors import contextmanager
from mpgrad.torch_state.private import (
    default_device,
    foreign_modes,
    is_observer,
    leave_all_modes,
    name_of_mode,
    outside_transforms,
    parametrizations_are_cached,
    profiler_is_on,
    saved_tensor_hooks,
    under_default_device,
)
from mpgrad.torch_state.settings import (
    GlobalHook,
    Setting,
    every_setting,
    global_hooks,
    registered,
    remove_global_hooks,
)
from mpgrad.tracebacks import warn

__all__ = [
    "DIFFERENTIATING",
    "GloballyHookedFunction",
    "ModeCheck",
    "Modes",
    "RandomState",
    "begin_as_new",
    "current_modes",
    "default_settings",
    "draw_seed",
    "kept_random_state",
    "load_generators",
    "seed_item",
    "under",
    "under_global_hooks",
    "under_hooks",
]

MASK = (1 << 64) - 1
SEED_TORCH = torch.default_generator.manual_seed
SEED_RANDOM = super(random.Random, random._inst).seed  # the C function of random.seed


# names and values of settings that differ from their defaults
Changed = tuple[tuple[str, Any], ...]


class Modes(NamedTuple):
    """The modes of a thread, as they are sent."""

    grad: bool
    inference: bool
    autocast: bool
    differentiating: bool  # mpgrad is taking a derivative
    # the kind of device and the dtype, if autocast is on there
    device_autocast: tuple[str, torch.dtype] | None = None
    device: str | None = None  # where tensors are made by default
    settings: Changed = ()  # the process's
    thread_settings: Changed = ()

    @property
    def but_grad(self) -> tuple[object, ...]:
        """Return the modes without grad mode, on which a backward does not depend."""
        return self[1:]

    @property
    def anomaly(self) -> bool:
        return any(name == "torch.autograd.set_detect_anomaly" for name, _ in self.settings)


USUAL = Modes(grad=True, inference=False, autocast=False, differentiating=False)[1:]


def current_modes(kind: str = "") -> Modes:
    """Return this thread's modes. `kind` is the kind of the pool's devices, if it has any."""
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        DIFFERENTIATING.now,
        (kind, torch.get_autocast_dtype(kind))
        if kind and torch.is_autocast_enabled(kind)
        else None,
        default_device(),
        *TABLE.changed(),
    )


class Table:
    """PyTorch's settings by name, and their values when they were last read."""

    def __init__(self) -> None:
        self.settings = {setting.name: setting for setting in every_setting()}
        self._gets = [setting.get for setting in self.settings.values()]
        # the values that were read, and which of them were changed
        self._last: tuple[list[Any], list[Changed]] = [], []

    def changed(self) -> list[Changed]:
        """Return the changed settings of the process, then those of this thread."""
        values = [get() for get in self._gets]
        last, found = self._last  # read once: another thread may store its own
        if values != last:
            pairs = [
                pair
                for pair in zip(self.settings.values(), values, strict=True)
                if pair[1] != pair[0].default
            ]
            found = [
                tuple([(each.name, value) for each, value in pairs if each.of_thread is of_thread])
                for of_thread in (False, True)
            ]
            self._last = values, found
        return found


TABLE = Table()
# If the caller has PyTorch's default of these, a worker returns to it, whatever an initializer or
# an earlier call has set. The worker keeps the other settings as they are, because reading them all
# takes longer than a small call.
RESET = {
    name: TABLE.settings[name].default
    for name in (
        "torch.set_default_dtype",
        "torch.use_deterministic_algorithms",
        "torch.autograd.set_detect_anomaly",
    )
}
RESET_VALUES = list(RESET.values())
RESET_GETS = [TABLE.settings[name].get for name in RESET]


class EnclosingSettings(threading.local):
    """The values of settings before `under` changed them in this thread.

    A nested `under` restores these values for settings that it does not set.
    """

    before: Mapping[str, Any] = {}
    depth = 0  # nested calls of `under`


ENCLOSING = EnclosingSettings()


def is_astray() -> bool:
    """Return whether this thread or an initializer has set something that every call takes from the
    caller."""
    return [get() for get in RESET_GETS] != RESET_VALUES


@contextmanager
def under_settings(changed: Changed) -> Iterator[None]:
    """Run the body with the changed settings. Other settings are as they are outside of any
    `under`.

    Each setting is set only if it differs.
    """
    outer = ENCLOSING.before
    if not (changed or outer or is_astray()):
        yield
        return
    wanted = {**outer, **RESET, **dict(changed)}
    every = TABLE.settings
    # in the table's order
    settings = [every[name] for name in (every if outer else wanted) if name in wanted]
    with SHARED.set_to(settings, wanted, ENCLOSING.depth > 1 or bool(outer)) as outside:
        ENCLOSING.before = {**outside, **outer}
        try:
            yield
        finally:
            ENCLOSING.before = outer


class HeldSetting:
    """A setting of the process, while calls that have set it run."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.calls = 0
        self.given: list[Any] = []  # the values that these calls have set


class SharedSettings:
    """The settings that calls set in the whole process, where calls of several threads may overlap.

    The last call to end restores what the first one found, except for changes that the caller has
    made since.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.held: dict[str, HeldSetting] = {}
        self.with_caller = True  # false in a worker process, where calls run one by one

    @contextmanager
    def set_to(
        self, settings: Sequence[Setting], wanted: Mapping[str, Any], nested: bool
    ) -> Iterator[dict[str, Any]]:
        """Set them for the body, and yield the values that they had outside of all calls.

        If it is `nested` in a body of this thread, the values of that body are restored.
        """
        shared = (
            []
            if nested or not self.with_caller
            else [setting for setting in settings if not setting.of_thread]
        )
        with self._lock:
            before = {setting.name: setting.get() for setting in settings}
            outside = dict(before)
            for name in [setting.name for setting in shared]:
                held = self.held.setdefault(name, HeldSetting(before[name]))
                if before[name] not in held.given:  # the caller has changed it since
                    held.before = before[name]
                held.calls += 1
                if wanted[name] not in held.given:
                    held.given.append(wanted[name])
                outside[name] = held.before
        try:
            with self._lock:
                set_where_different(settings, wanted)
            yield outside
        finally:
            with self._lock:
                after = {**before, **{setting.name: self._after(setting) for setting in shared}}
                set_where_different(settings, after)

    def _after(self, setting: Setting) -> Any:
        """Return the value to set after one of the calls that set it has ended."""
        held, now = self.held[setting.name], setting.get()
        held.calls -= 1
        if held.calls:
            return now
        del self.held[setting.name]
        return held.before if now in held.given else now


SHARED = SharedSettings()
os.register_at_fork(after_in_child=SHARED.__init__)  # type: ignore[misc]


def set_where_different(settings: Sequence[Setting], wanted: Mapping[str, Any]) -> None:
    for setting in settings:
        # They are compared one by one, because setting one may set others, which come later.
        if setting.get() != wanted[setting.name]:
            setting.set(wanted[setting.name])


@contextmanager
def default_settings() -> Iterator[None]:
    """Run the body in the caller's thread, with an `under` that knows only the settings it is
    given."""
    outer = ENCLOSING.before
    ENCLOSING.before = {name: setting.default for name, setting in TABLE.settings.items()}
    try:
        yield
    finally:
        ENCLOSING.before = outer


def begin_as_new(is_process: bool) -> None:
    """Forget what a new worker has from the process or thread that made it."""
    leave_all_modes()
    ENCLOSING.before = {}
    SHARED.with_caller = not is_process
    if is_process:
        remove_global_hooks()
    own = [setting for setting in TABLE.settings.values() if is_process or setting.of_thread]
    set_where_different(own, {setting.name: setting.default for setting in own})


class ModeCheck:
    """Checks whether an operation, or a backward, may begin in the modes of the caller's thread."""

    def __init__(self, in_caller: bool = False) -> None:
        """With `in_caller`, calls run in this thread, and its observers see them."""
        self._in_caller = in_caller
        # the observers that were on at the last look
        self._noticed: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Warn of each mode that only observes, once for as long as it is on.

        Raises:
            NotImplementedError: a mode might change values and cannot be sent. The message names
            it.
        """
        if parametrizations_are_cached():
            raise NotImplementedError(
                "workers do not share cached parametrizations (mode: "
                "torch.nn.utils.parametrize.cached); "
                "enter it inside the function"
            )
        modes = foreign_modes()
        for mode in modes:
            if not is_observer(mode):
                raise NotImplementedError(
                    f"a mode cannot be sent to workers (mode: {name_of_mode(mode)}); {remedy(mode)}"
                )
        if not (modes or self._noticed or profiler_is_on()):
            return
        on = {(name_of_mode(mode), id(mode)) for mode in modes} | (
            {("torch.profiler", 0)} if profiler_is_on() else set()
        )
        new, self._noticed = on - self._noticed, on
        for name, _ in sorted(new) if not self._in_caller else ():
            warn(
                f"{name} does not see workers' operations; enter it inside the function, or use "
                "engine='inline'"
            )


def remedy(mode: object) -> str:
    if name_of_mode(mode).endswith("allow_mutation_on_saved_tensors"):
        return "let the function write to clones, or call it without the pool"
    return "enter it inside the function, or call the function without the pool"


def is_grad_mode_all(modes: Modes) -> bool:
    """Return whether grad mode is the only mode to set in this thread."""
    is_elsewhere = (
        torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or default_device() is not None
    )
    return modes[1:] == USUAL and not (ENCLOSING.before or is_elsewhere or is_astray())


@contextmanager
def under(modes: Modes) -> Iterator[None]:
    """Run the body under the caller's modes, then restore the modes from before."""
    ENCLOSING.depth += 1
    try:
        if is_grad_mode_all(modes):
            with torch.set_grad_enabled(modes.grad):
                yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(under_settings(modes.settings + modes.thread_settings))
            if modes.differentiating:
                stack.enter_context(DIFFERENTIATING.entered())
            if modes.device != default_device():
                stack.enter_context(under_default_device(modes.device))
            if modes.inference:
                stack.enter_context(torch.inference_mode())
            else:
                if torch.is_inference_mode_enabled():
                    stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.set_grad_enabled(modes.grad))
            if modes.autocast != torch.is_autocast_enabled("cpu"):
                # its dtype and its cache are settings
                stack.enter_context(torch.autocast("cpu", enabled=modes.autocast))
            if modes.device_autocast is not None:
                stack.enter_context(torch.autocast(*modes.device_autocast))
            yield
    finally:
        ENCLOSING.depth -= 1


class HookedFunction:
    """A function with hooks for saved tensors.

    The hooks belong to the caller's thread, but the function's graph belongs to a worker.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
    ) -> None:
        self.function = function
        self.hooks = pack, unpack

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
            return self.function(*args, **kwargs)


def under_hooks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` under the caller's `torch.autograd.graph.saved_tensors_hooks`, if any.

    Hooks of `torch.utils.checkpoint` stay here, because they would run the caller's code again.
    """
    hooks = saved_tensor_hooks()
    if hooks is None or getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        return function
    return HookedFunction(function, *hooks)


class DifferentiationState(threading.local):
    """Whether mpgrad takes a derivative in this thread.

    Derivatives that the function itself takes then need a graph.
    """

    now = False

    def needs_graph(self) -> bool:
        return self.now and torch.is_grad_enabled()

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.now = self.now, True
        try:
            yield
        finally:
            self.now = before


DIFFERENTIATING = DifferentiationState()


class Process:
    """Distinguishes this process from all others, including its forks."""

    def __init__(self) -> None:
        self.token = os.urandom(16)


PROCESS = Process()
os.register_at_fork(after_in_child=PROCESS.__init__)  # type: ignore[misc]


class GloballyHookedFunction:
    """A function with its process's hooks for all modules and optimizers."""

    def __init__(self, function: Callable[..., Any], hooks: list[GlobalHook]) -> None:
        self.function = function
        self.hooks = hooks
        self.token = PROCESS.token

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for the function and its backward, which may run parts of it again.

        In the function's own process the hooks are installed already.
        """
        return registered([] if self.token == PROCESS.token else self.hooks)


def under_global_hooks(function: Callable[..., Any]) -> Callable[..., Any]:
    hooks = global_hooks()
    return GloballyHookedFunction(function, hooks) if hooks else function


def draw_seed() -> int:
    """Draw the next number of the caller's generator.

    `torch.manual_seed` fixes this number, and with it everything that follows.
    """
    with outside_transforms():
        return int(torch.randint(0, 1 << 62, (), dtype=torch.int64, device="cpu"))


def seed_item(seed: int, index: int) -> int:
    """Give torch, random and numpy the stream of item `index`, and return its seed."""
    own = split_mix(seed + index)
    SEED_TORCH(own)
    SEED_RANDOM(own)
    # An earlier item may have left half of a pair of Gaussian numbers.
    random._inst.gauss_next = None  # type: ignore[attr-defined]
    # numpy is optional for torch and for mpgrad. It is seeded if a task could have imported it.
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(own & 0xFFFFFFFF)
    return own


def load_generators() -> None:
    """Import the parts that numpy itself imports only on first use.

    This costs nothing while workers start. Later it would take each of them 7 ms, and the caller
    may have no descriptor left for reading the files.
    """
    if "numpy" in sys.modules:
        # No descriptor is left now either. The import is tried again when it is needed.
        with contextlib.suppress(OSError):
            importlib.import_module("numpy.random")


def split_mix(number: int) -> int:
    """Compute SplitMix64, a bijection on 64 bits that turns neighbours into unrelated seeds.

    Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014.
    """
    number = (number * 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


class RandomState:
    """The state of this process's random generators at one moment."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def has_moved(self) -> bool:
        """Return whether a number has been drawn since."""
        now = RandomState()
        if not torch.equal(self._torch, now._torch) or self._random != now._random:
            return True
        # numpy may have been imported since. It compares arrays element by element.
        return self._numpy is not None and pickle.dumps(self._numpy) != pickle.dumps(now._numpy)

    def put_back(self) -> None:
        torch.default_generator.set_state(self._torch)
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the generators after the body, for tasks that run in the caller's own process."""
    state = RandomState()
    try:
        yield
    finally:
        state.put_back()
