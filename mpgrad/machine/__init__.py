"""The pool's decisions, apart from what carries them out: which calls go together and to whom, what
a worker has, and what follows from its death. They run in the caller only.

This package imports itself and pure parts of the standard library, and nothing else: no clock,
thread, signal, log, socket or torch. It is told what time it is. Calls, operations and workers are
handles here, of which only sizes, flags and counts are read. `mpgrad.scheduling` carries out what
is decided.

Read the modules in this order:

    policy   how much goes together
    timing   how long the calls of a function take; which gradient its losses will get
    queue    which calls a worker gets next, and which are taken back from it
    ledger   what a worker has: graphs with their states, and sums of captures' gradients
    deaths   what follows from a worker's death
    story    what happened to each call, and when
"""
