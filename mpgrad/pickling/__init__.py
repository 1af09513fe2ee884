"""Functions, items and exceptions as bytes and tensors, and back. Both sides: one pickles, the
other loads.

Imports `wire` and what is below it. Nothing here knows of calls, graphs or workers.

    structure    any object as bytes, with its tensors taken out
    uses         what a function uses of the user's own modules; names that it finds at run time
    state        that as one pickle, whether it is still true, and pickles with it
    modules      the user's modules put together again where they arrive, also in `sys.modules`
    classes      classes by value; those of the script are one class on both sides; types of ctypes
    reducers     kinds of objects that pickle refuses, PyTorch's modules among them
    caches, compiled   functions of functools and of torch.compile
    streams      generators of random numbers that a function captures; item_streams: those of items
    exceptions   a task's exception with its traceback
    uncarried    the path to what cannot be carried, and the remedy
"""
