"""Leaves that results depend on, besides those that are known: in a worker, or in the caller, such a leaf is somebody else's.

    output ──► the graph behind it, as far as `entries` ──► leaves that somebody holds, and that are not `known`
A leaf that nothing holds but graphs was made by the call, whose gradient nobody could ask for in a serial loop either.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from mpgrad.torch_state.private import is_held

__all__ = ["LEAF_NODE", "held_leaves"]

with torch.inference_mode(False):
    LEAF_NODE: Any = type(get_gradient_edge(torch.zeros((), requires_grad=True, device="cpu")).node)


def held_leaves(output: torch.Tensor, known: Collection[int], entries: Collection[Any] = ()) -> list[Any]:
    """Their nodes. `known`: ids of leaves. `entries`: nodes, or types of them, where the graph of what was given begins."""
    nodes: list[Any] = [] if output.grad_fn is None else [output.grad_fn]
    seen = set(nodes)
    found: list[Any] = []
    while nodes:
        node = nodes.pop()
        if node in entries or type(node) in entries:
            continue
        for behind, _ in node.next_functions:
            if behind is None or behind in seen:
                continue
            seen.add(behind)
            if type(behind) is not LEAF_NODE:
                nodes.append(behind)
            elif id(behind.variable) not in known and is_held(behind):
                found.append(behind)
    return found
