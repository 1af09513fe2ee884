"""The pool's decisions: which calls are sent together and to which worker, what a worker has, and
what follows from its death. They run in the caller only.

This package imports only itself and pure parts of the standard library: no clock, thread, signal,
log, socket or torch. Its callers pass the time as an argument. Calls, operations and workers are
handles, of which it reads sizes, flags and counts: see `queue.AnyWorker`,
`under_way.ProgressHandle`, and `mpgrad.calls` for the others. It changes its own objects, the
queues of operations, and the handles' notes on time limits and deaths. Through handles it also asks
workers to skip chunks, cancels calls that a listener refuses (`Operation.starts`), and numbers
functions. All else is carried out by `mpgrad.scheduling`, and with stubs by
`tests/simulation/alone.py`.

Read the modules in this order:

    policy     how many items or calls are sent together
    timing     how long the calls of a function take, and which gradient its losses will get
    queue      which calls a worker gets next, and which are taken back from it
    under_way  what a worker has been sent, and how calls are taken back safely
    ledger     the graphs of a worker with their states, and its sums of captures' gradients
    deaths     when the pool ends a worker, and what follows from a worker's death
    story      what happened to each call, and when
"""
