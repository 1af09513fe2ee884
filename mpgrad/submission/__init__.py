"""From a function, items and options to an operation under way, and to its results. Caller only: what is behind `Pool`.

Imports `scheduling`, `engines` for what they can do, and what is below them; knows no pool.

    submitter   what each public method asks for: run and wait, run meanwhile, iterate, one call
    starting    an operation as it begins: function, captures, modes, seed
    feeding     its calls: packed alone or in bundles, sent in waves
    source      what a function is to be called with
    cheap_calls a line in the log where sending costs more than it saves
    folding     reduce and map_reduce, as operations that follow one another
    options     what the pool was made with, and what is asked of the calls of one operation
"""
