"""Starts operations from functions, items and options, and hands out their results. This package
does the work of `Pool`'s public methods. It runs in the caller only.

It imports `scheduling`, `engines` (only for their traits) and the packages below them, and does not
import the pool.

    submitter   runs operations while the caller waits, in the background or as an iterator; runs
                single calls and reductions; packs calls, and sends them in windows
    starting    begins an operation: fixes its function, captures, modes and seed
    options     the options of a pool, and of the calls of one operation
    results     the results that the caller holds: AsyncResult, DifferentiableFuture, ResultIterator
"""
