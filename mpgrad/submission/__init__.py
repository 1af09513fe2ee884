"""From a function, items and options to an operation under way, and to its results. Caller only:
what is behind `Pool`.

Imports `scheduling`, `engines` for what they can do, and what is below them; knows no pool.

    submitter     what each public method asks for: run and wait, run meanwhile, iterate, one call, reduce
    starting      an operation as it begins: what is called with what, captures, modes, seed
    feeding       its calls: packed alone or in bundles, sent in waves
    cheap_calls   a line in the log where sending costs more than it saves
    options       what the pool was made with, and what is asked of the calls of one operation
"""
