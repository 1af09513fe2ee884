"""Functions, items and exceptions as bytes and tensors, and back. Both sides: one pickles, the other loads.

Imports `wire` and what is below it. Nothing here knows of calls, graphs or workers.

    structure    any object as bytes, with its tensors taken out
    uses         which modules are the user's own, and what a function uses of them
    state        that as one pickle, whether it is still true, and pickles with it
    lookups      names that a script's functions find at run time
    modules      the user's modules put together again where they arrive, also in `sys.modules` while a call runs
    classes      classes by value; those of the script are one class on both sides; c_types: those of ctypes
    reducers     kinds of objects that pickle refuses; caches, compiled: those of functools and torch.compile;
                 networks: PyTorch's modules
    streams      generators of random numbers that a function captures; item_streams: those of items
    exceptions   a task's exception with its traceback
    uncarried    the path to what cannot be carried, and the remedy
"""
