"""What PyTorch has that a call must find as the caller had it: modes, seeds, levels of transforms;
and its private names.

Both sides. Imports PyTorch, `errors`, `environment`, `system`, `tracebacks`; nothing here knows of
workers or messages.

    private         every name of PyTorch's that is not public, by subject
    settings        PyTorch's own settings, a table; hooks for all modules
    behaviours      asks for each of these before the first pool of a process is made
    probes          tries what would give wrong gradients without a word
    modes           grad mode, autocast, default dtype, random generators: noted, set, put back
    generators      those that functions and items hold: a stream for each item
    seed_sequences  the same for numpy's
"""
