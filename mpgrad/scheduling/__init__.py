"""Who does what, when: chunks to workers, backwards, deaths, limits. Caller only, most of it in the
pool's own thread.

Imports `calls`, `engines` and what is below it. Nothing here waits for a worker, but for
`dispatcher`, between two turns.

    scheduler        puts the parts together
    dispatcher       in whose thread that is: its own, or the caller's
    lifecycle        open, closed, leaving, draining, stopping; what comes after the end; what parts
                     ask of whoever runs them
    admissions       operations from the start to their end; backwards, from autograd's threads;
                     calls and backwards that wait for others
    queue            the calls that wait, and how they leave for workers; function_cache: what they
                     cost
    chunk_writer     every decision about how much goes together: windows, bundles, chunks; chunks
                     as messages, and what a worker has once they are there
    worker_handle    what every worker starts with; each worker: what waits for it, its chunks, and
                     how far it is
    receiving        what comes from workers, as outcomes
    supervisor       workers come and go; recovery: what is lost with one
    cancelling       what nobody wants any more, or takes too long
    caller_memory    what is shared with workers, and how tensors cross to devices
    tracer           what a timeline shows of all this
"""
