"""Custom `autograd.Function`s by hand, with emulated contexts, in threads of whoever asks. Caller
only.

Imports `torch_state` and `errors`; knows no pool and no worker.

    contexts   the contexts, and forward and backward with one
    parallel   a map whose backwards run side by side
"""
