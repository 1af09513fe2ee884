"""Contains the functions that mpgrad itself sends to workers. Both sides use them. A worker that
loads them does not import the pool.

This package imports `pickling` and the packages below it.

    transform_programs   a map under torch.func, as a program of its levels
    jacobians            shares and products of a derivative at one item
    wrappers             functions around the caller's: of joblib, an Executor, `mpgrad.nn`,
                         reductions
"""
