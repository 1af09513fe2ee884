"""Who does what, when: chunks to workers, backwards, deaths, limits. Caller only, most of it in the pool's own thread.

Imports `calls`, `engines` and what is below them. Nothing here waits for a worker, but for `dispatcher`, between two turns.

    start            a scheduler for an engine; settings: what every worker starts with; stations: on which devices
    scheduler        puts the parts together; driver: in whose thread. dispatcher: its own; in_caller: the caller's
    lifecycle        open, closed, leaving, draining, stopping; settling: what comes after the end
    admissions       operations from the start to their end; waiting_calls: calls whose arguments are other calls' results
    queue            the calls that wait; function_cache: what they cost
    sizes            every decision about how much goes together: waves, bundles, chunks
    gradient_sender  backwards, from autograd's threads
    deliveries       what leaves for workers; chunk_writer: as messages; chunks: what they consist of
    worker_handle    each worker: under_way (chunks, and how far it is), graph_ledger, loans
    receiving        what comes from workers; answers: as outcomes
    staffing         workers come and go; recovery: what is lost with one
    calling_off      what nobody wants any more, or takes too long; deadlines
    caller_memory    what is shared with workers; crossing: how tensors cross to devices
"""
