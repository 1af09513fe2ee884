"""Functions that mpgrad itself sends to workers. Written for both sides: loading them there brings
in no pool.

Imports `pickling` and what is below it.

    transform_programs   a map under torch.func, as a program of its levels
    points               a function at one item, and rows and columns of its derivative there
    jacobian_parts       the parts of a derivative that one call computes
    jacobian_arguments   to which arguments a derivative is
    reduction            sums and products of results in place
    wrappers             functions around the caller's: of joblib, an Executor, `mpgrad.nn.parallel_apply`
"""
