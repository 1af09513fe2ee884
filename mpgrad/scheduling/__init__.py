"""The scheduler gives workers their work, as `mpgrad.machine` decides, and handles deaths and
limits. It runs in the caller only, and most of it in the pool's own thread.

The package imports `machine`, `calls`, `engines` and the packages below them. Nothing here waits
for a worker, except `dispatcher`, which waits between two turns.

    scheduler        puts the parts together
    dispatcher       runs a scheduler in its own thread or in the caller's
    lifecycle        phases of a pool; orders after its end; what parts need of their driver
    admissions       takes operations in, and holds calls and backwards that wait for others
    gradients        sends backwards from autograd's threads
    deliveries       sends workers chunks and updates
    known_functions  numbers the functions, and keeps the times of their calls
    chunk_writer     writes messages, and notes what a worker then has
    settings         holds the settings of a pool and its workers
    worker_handle    describes a worker: its link, its backlog, its chunks and its progress
    receiving        turns the workers' messages into outcomes
    supervisor       starts, retires and replaces workers
    recovery         blames a call for a death, and gives the worker's work to other workers
    cancelling       ends calls that are not needed any more, or that take too long
    caller_memory    holds the memory shared with workers, and the channels to devices
    tracer           notes the scheduler's events for a timeline
"""
