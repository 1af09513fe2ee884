"""Probes of `private.objects`."""

from __future__ import annotations

from typing import Any

import torch

from mpgrad.torch_state import private
from mpgrad.torch_state.probes.expectations import behaviour, expect
from mpgrad.torch_state.probes.nodes import leaf


@behaviour("a module can be made again around other tensors")
def modules_made_again() -> None:
    module = torch.nn.PReLU(device="cpu", dtype=torch.float64)  # draws no random numbers
    doubled = {id(module.weight): module.weight.detach() * 2}
    x = -leaf()
    expect((2 * module(x)).tolist(), private.replica_of(module, doubled)(x).tolist())
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Softplus())
    copy: Any = object.__new__(torch.nn.PReLU)
    private.parametrize_again(copy, vars(module))
    expect(module(x).tolist(), copy(x).tolist())


@behaviour("the tensors in a structure can be had, and replaced")
def tensors_in_structures() -> None:
    plain = torch.ones(2, device="cpu")
    found = private.tree_leaves({"a": [plain, 3], "b": (None,)})
    expect((True, [3]), (found[0] is plain, [each for each in found[1:] if each is not None]))
    expect(([0], 3), private.tree_map_only(torch.Tensor, lambda tensor: 0, ([plain], 3)))
