"""The caller's autograd nodes of graphs that live elsewhere. Caller only.

Imports `torch_state` and `tracebacks`; knows no process, message or shared memory: a `Home` is asked for what it cannot do.
"""
