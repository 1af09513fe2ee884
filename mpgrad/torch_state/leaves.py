"""Leaves that results depend on, besides those that are known: in a worker such a leaf is somebody else's.

    output ──► the graph behind it, as far as `entries` ──► leaves that somebody holds, and that are not `known`
A leaf that nothing holds but graphs was made by the call, whose gradient nobody could ask for in a serial loop either.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from mpgrad.torch_state.private import is_held

__all__ = ["LEAF_NODE", "all_leaves", "graph_behind", "held_leaves", "leading_to"]

with torch.inference_mode(False):
    LEAF_NODE: Any = type(get_gradient_edge(torch.zeros((), requires_grad=True, device="cpu")).node)


def held_leaves(outputs: Sequence[torch.Tensor], known: Collection[int], entries: Collection[Any] = ()) -> list[Any]:
    """Their nodes. `known`: ids of leaves. `entries`: types of nodes where the graph of what was given begins."""
    return [
        node
        for node in graph_behind(outputs, entries)
        if type(node) is LEAF_NODE and id(node.variable) not in known and is_held(node)
    ]


def graph_behind(outputs: Sequence[torch.Tensor], entries: Collection[Any] = ()) -> dict[Any, list[Any]]:
    """The nodes, as far as `entries`; and which of them lead to each directly."""
    users: dict[Any, list[Any]] = {output.grad_fn: [] for output in outputs if output.grad_fn is not None}
    nodes = list(users)
    while nodes:
        node = nodes.pop()
        if type(node) in entries:
            continue
        for behind, _ in node.next_functions:
            if behind is None:
                continue
            if behind not in users:
                users[behind] = []
                nodes.append(behind)
            users[behind].append(node)
    return users


def leading_to(leaf: Any, users: Mapping[Any, Sequence[Any]], seen: set[Any]) -> list[Any]:
    """The nodes of a graph that lead to the one of a leaf, and that itself; but for what was `seen`, which they then are."""
    found = [] if leaf in seen else [leaf]
    seen.add(leaf)
    for node in found:
        further = [each for each in users[node] if each not in seen]
        found += dict.fromkeys(further)
        seen.update(further)
    return found


def all_leaves() -> list[torch.Tensor]:
    """Of this process, but for those that it was forked with when it was frozen."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    return [each for each in objects if type(each) in kinds and each.requires_grad and each.is_leaf]
