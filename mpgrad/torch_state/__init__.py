"""PyTorch's modes, seeds and transform levels must be the same for a call as in the caller.

Both sides use this package. It also holds PyTorch's private names. It imports PyTorch, `errors`,
`environment`, `system` and `tracebacks`. It knows nothing of workers or messages.

    private         holds every name of PyTorch's that is not public, by subject
    settings        holds a table of PyTorch's own settings, and the hooks for all modules
    behaviours      checks all private names before the first pool of a process is made
    probes          tries the behaviours whose absence would silently give wrong gradients
    modes           notes, sets and restores grad mode, autocast, default dtype, random generators
    generators      gives each item its own stream of the generators that functions and items hold
    seed_sequences  does the same for numpy's seed sequences
"""
