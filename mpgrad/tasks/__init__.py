"""Functions that mpgrad itself sends to workers. Written for both sides: loading them there brings
in no pool.

Imports `pickling` and what is below it.

    transform_programs   a map under torch.func, as a program of its levels
    jacobians            shares and products of a derivative at one item
    wrappers             functions around the caller's: of joblib, an Executor, `mpgrad.nn`,
                         reductions
"""
