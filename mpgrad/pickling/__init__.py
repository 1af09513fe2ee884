"""Functions, items and exceptions are turned into bytes and tensors, and back. One side pickles
them, the other loads them.

The package imports `wire` and the packages that `wire` imports. It knows nothing of calls, graphs
or workers.

    structure    pickles any object, with its tensors taken out
    state        pickles the parts of the user's modules that a function uses, once, and checks
                 whether the pickle is still up to date
    modules      finds the parts of these modules that code uses, and rebuilds them in the worker
    classes      pickles classes by value, so that both sides have the same class; also ctypes types
    class_states gives each operation the attributes that its classes had when it began
    registrations
                 sends a class's registrations, for example with abc or as a pytree
    initializer  pickles an initializer with the caller's names
    initialized  keeps the values that an initializer has set in a worker
    reducers     pickles objects that pickle refuses, such as PyTorch modules and functools caches
    objects      rebuilds objects of the user's classes that pickle would change
    compiled     pickles functions and modules that torch.compile made
    streams      pickles random generators that a function captures
    exceptions   pickles a task's exception with its traceback; finds the part that pickle refuses
    unchanged    checks whether a function has changed since it was pickled or loaded
"""
