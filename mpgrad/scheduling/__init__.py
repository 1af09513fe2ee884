"""Who does what, when: chunks to workers, backwards, deaths, limits. Caller only, in the pool's own thread.

Imports `calls` and what is below it. Engines drive it; nothing here waits for a worker.

    scheduler        the policy
    crew             each worker: what it was sent, lent and told
    queue            the calls that wait, and how many make a chunk
    function_cache   which functions a worker has, and what their calls cost
    run_in_caller    cheap calls that are not sent; costs decides
    waiting_calls    calls whose arguments are other calls' results
    answers          messages of workers as outcomes
    recovery         calls and gradients of workers that died; deadlines: those that take too long
    crossing         how tensors cross to devices
"""
