"""What runs in a worker. Imported as `mpgrad.workers`, a link to here; the parent never imports it,
it only names entry points.

Nothing here may touch the parent's objects: a worker knows its end of the pipe, its own arena and
what it has borrowed.

    fork_server  the process that workers are forked from
    main         entry points, and the loop: each message to the part whose matter it is; what
                 multiprocessing gives its children
    run          the calls and the backwards of chunks, and where this is with them
    graphs       the graphs that are here; how they are entered
    functions    functions until they are forgotten; sums of captures' gradients; strays
    memory       memory lent and borrowed, and whether a limit is near; the device
    console      what the caller hears beside results: prints, records, warnings, failures, the
                 crash traceback
"""

if __name__ != "mpgrad.workers":
    # found by an editable install, which has the clone on Python's path
    raise ModuleNotFoundError(
        f"this package is mpgrad.workers (imported as: {__name__!r}); import it by that name",
        name=__name__,
    )
