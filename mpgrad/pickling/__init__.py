"""Functions, items and exceptions as bytes and tensors, and back. Both sides: one pickles, the
other loads.

Imports `wire` and what is below it. Nothing here knows of calls, graphs or workers.

    structure    any object as bytes, with its tensors taken out
    state        what a function uses of the user's own modules as one pickle, whether it is still
                 true, and pickles with it
    modules      what code uses of these modules; they are put together again where they arrive
    classes      classes by value; those of the script are one class on both sides; types of ctypes
    reducers     kinds of objects that pickle refuses: PyTorch's modules, caches of functools
    compiled     what torch.compile made
    streams      generators of random numbers that a function captures
    exceptions   a task's exception with its traceback; the path to what cannot be carried
"""
