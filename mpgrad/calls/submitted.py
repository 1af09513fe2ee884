"""`submit`: an operation of one call, whose result other calls may be given before it is there."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import torch

from mpgrad.calls.claims import Claim, Source
from mpgrad.calls.operations import Operation, let_go
from mpgrad.calls.outcomes import Delivered, Failed, Outcome
from mpgrad.pickling import structure

__all__ = ["Submitted"]


class Submitted(Operation):
    """A chain of calls that may be under way, or done, before anybody asks for a value.

        a = submit(f, x); b = submit(g, a)       the scheduler puts a's outcome into g's call as soon as it comes
        b.result()                               gives both calls their nodes, a's first
    Until somebody asks for a's value nobody can see it: its node has stand-ins for outputs, which get their memory when
    somebody does. Its graph is hidden so long, and gradients go to it from worker to worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._making = threading.RLock()  # classes of the caller's are unpickled meanwhile, and signals handled
        self._is_claimed = False
        self._claims: list[weakref.ref[Claim]] = []  # that are not settled yet
        self._tensors: list[torch.Tensor] | None = None  # of the result, with their history
        self._taken = False
        self._value: Any = None
        # of the dispatcher: to be told when there is an outcome
        self.dependents: deque[Callable[[], None]] = deque()
        self.on_passed_on: Callable[[], None] = lambda: None  # its failure is somebody else's now

    @property
    def outcome(self) -> Outcome | None:
        found = self.outcomes.get(0)
        return Failed.with_error(CancelledError()) if found is None and self.limit == 0 else found

    @property
    def is_claimed(self) -> bool:
        return any(ref() is not None for ref in self._claims)

    def claim(self) -> Claim | None:
        """To the result as it comes from the worker; None where the caller has it, and may have changed it."""
        with self._making:
            if self._taken:
                return None
            claim = Claim(self)
            self._is_claimed = True
            self._claims.append(weakref.ref(claim))
            return claim

    def take(self) -> Any:
        """The value, which has come, as tensors with gradients; the same object at every call."""
        with self._making:
            if not self._taken:
                self._warn()
                outcome = self.outcomes[0]
                assert isinstance(outcome, Delivered)
                with self.modes_of_caller():
                    tensors = outcome.views(private=self._is_claimed)
                    if self._tensors is None:
                        self._give_history(outcome, tensors)
                        self._tensors = tensors
                    else:
                        for tensor, memory in zip(self._tensors, tensors, strict=True):
                            if memory.layout is torch.strided:
                                tensor.data = memory
                        tensors = self._tensors
                    value = structure.loads_result(outcome.result.structure, tensors)
                # whoever is interrupted takes it again; a handler of a signal may have come here, and taken it in between
                if not self._taken:
                    if outcome.graph is not None:
                        outcome.graph.reveal()
                    self._settle_claims(outcome, tensors)
                    self._value, self._taken = value, True
                    self._tensors = None
                    self.outcomes.clear()
            return self._value

    def connect(self) -> None:
        """Give the call its node, though nobody has asked for its value."""
        with self._making:
            if self._taken:
                return
            outcome = self.outcomes[0]
            assert isinstance(outcome, Delivered)
            if self._tensors is None:
                with self.modes_of_caller():
                    tensors = outcome.stand_ins()
                    self._give_history(outcome, tensors)
                if outcome.graph is not None:
                    outcome.graph.hidden = True
                self._tensors = tensors
            self._settle_claims(outcome, self._tensors)

    def unconnected(self) -> list[Source]:
        """Those that gave its call something, and have no node yet."""
        outcome = self.outcomes.get(0)
        if self._tensors is not None or not isinstance(outcome, Delivered):
            return []
        return [claim.source for claim in outcome.call.claims if not claim.is_settled]

    def _settle_claims(self, outcome: Delivered, tensors: list[torch.Tensor]) -> None:
        let_go(outcome)
        self.captures = None  # a future that is kept need not keep what its result does not depend on
        for ref in self._claims:
            if (claim := ref()) is not None and not claim.is_settled:
                claim.settle(outcome, tensors)
        self._claims = []

    def deliver(self, index: int, outcome: Outcome | BaseException) -> None:
        super().deliver(index, outcome)
        self._tell_dependents()

    def cancel(self) -> None:
        if self.finished:
            return  # the result may have been given to other calls, which are to be connected with it
        super().cancel()
        self._tell_dependents()

    def _tell_dependents(self) -> None:
        while self.dependents:
            self.dependents.popleft()()
