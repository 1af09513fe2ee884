"""Claims: the places among a call's arguments of results that other calls still have to give, and gates to these results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mpgrad.autograd.gates import gate, gate_behind
from mpgrad.autograd.remote_graph import Home
from mpgrad.calls.outcomes import Delivered, Outcome

__all__ = ["Claim", "Source", "gates_to"]


class Source(Protocol):
    """The submitted call whose result is claimed."""

    home: Home

    @property
    def outcome(self) -> Outcome | None: ...

    def connect(self) -> None:
        """Give the call its node, and settle the claims to its result."""
        ...

    def unconnected(self) -> Sequence[Source]:
        """Those that gave it something, and have no node yet."""
        ...


class Claim:
    """To the result of a submitted call, which stands among the arguments of another one."""

    __slots__ = ("__weakref__", "_gates", "_outcome", "is_settled", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.is_settled = False  # the gates are there
        self._gates: list[torch.Tensor] = []
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome | None:
        return self.source.outcome or self._outcome  # in this order: when the value is taken, the second is set first

    def settle(self, outcome: Delivered, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors have their history, which the caller cannot have changed yet."""
        self._outcome = outcome
        with torch.enable_grad():
            needing = [each for each in tensors if each.requires_grad]
            self._gates = [gate(each) if each.is_leaf else gate_behind(outcome.graph, each) for each in needing]
        self.is_settled = True

    def gates(self) -> list[torch.Tensor]:
        self.source.connect()
        return self._gates


def gates_to(claims: Sequence[Any]) -> list[torch.Tensor]:
    """Gates to the results that a call was given; the calls that gave them get their nodes first, the oldest first of all."""
    stack = [claim.source for claim in claims if not claim.is_settled]
    while stack:  # no recursion: a chain may be long
        earlier = stack[-1].unconnected()
        if earlier:
            stack += earlier
        else:
            stack.pop().connect()
    return [each for claim in claims for each in claim.gates()]
