"""From a function, items and options to an operation under way, and to its results. Caller only:
what is behind `Pool`.

Imports `scheduling`, `engines` for what they can do, and what is below them; knows no pool.

    submitter   what each public method asks for: run and wait, run meanwhile, iterate, one call,
                reduce; calls, packed alone or in bundles, sent in windows
    starting    an operation as it begins: what is called with what, captures, modes, seed
    options     what the pool was made with, and what is asked of the calls of one operation
    results     what the caller holds: AsyncResult, DifferentiableFuture, what imap returns
"""
