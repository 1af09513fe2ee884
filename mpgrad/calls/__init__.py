"""Calls on their way to a worker and back: packed, delivered, collected. Caller only.

Imports `autograd`, `pickling`, `wire` and what is below them; knows no worker and no engine.

    packing      a call, or a bundle of calls, as bytes and slots; on which device it runs
    operations   one map, submit or reduce, from packed calls to results; dependencies to results;
                 what came of a call: a result, or an exception
    backwards    what comes of backwards: gradients, or an exception
    futures      a future whose state no lock guards
"""
