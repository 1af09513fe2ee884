"""Derivatives of every output in parallel: what users import as `mpgrad.jacobian` and so on. Caller only.

Imports the pool's interface and what is below it.
"""
