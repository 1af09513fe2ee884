"""Custom `autograd.Function`s by hand, with emulated contexts, in threads of whoever asks. Caller only.

Imports `torch_state` and `errors`; knows no pool and no worker.
"""
