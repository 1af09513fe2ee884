"""Packs calls, and turns what workers return into results. This package runs in the caller only.

It imports `autograd`, `pickling`, `wire` and the packages below them, but neither workers nor
engines.

    packing      packs a call, or a bundle of calls, as bytes and slots, and chooses its device
    operations   takes one map, submit or reduce from packed calls to results, which may be inputs
                 of other calls; the outcome of a call is a result or an exception
    backwards    turns the answers to backwards into gradients or exceptions
    futures      a future without a lock
"""
