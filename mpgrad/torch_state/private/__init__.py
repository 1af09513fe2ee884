"""The private names of PyTorch that mpgrad leans on, all in one place, by subject.

    autograd    nodes, graphs, and the backward that runs through them; torch.func's tensors, levels of vmap, forward mode
    modes       what a thread is in, such as autocast and tracing; PyTorch's own settings, how each is read and set
    memory      the memory of tensors, storages that processes share; modules and scripts made again
    compiler    what torch.compile makes, and code that it leaves alone

Everything else in the package uses the public API, and of tensors and nodes the attributes `_version`, `_is_view`,
`_is_zerotensor`, `_backward_hooks`, `_post_accumulate_grad_hooks`, `_indices` and `_values`. `behaviours` asks for each name
before a pool is made, so there are no other ways for where one is missing: they would be ways that nobody has gone. The one
exception is `never_compile`, which no result depends on.
"""

from mpgrad.torch_state.private.autograd import *  # noqa: F403
from mpgrad.torch_state.private.compiler import *  # noqa: F403
from mpgrad.torch_state.private.memory import *  # noqa: F403
from mpgrad.torch_state.private.modes import *  # noqa: F403
