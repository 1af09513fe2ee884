"""Derivatives of every output in parallel: what users import as `mpgrad.jacobian` and so on. Caller
only.

Imports the pool's interface and what is below it.

    jacobians   Jacobians, Hessians and products with them
    per_item    the gradient of each result by itself
"""
