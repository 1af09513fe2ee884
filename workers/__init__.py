"""The code that runs in a worker. It is imported as `mpgrad.workers`, a link to this folder. The
parent never imports it, and only names its entry points. Worker's side.

Nothing here may touch the parent's objects. A worker knows its end of the pipe, its own arena, and
the memory that it has borrowed.

    fork_server  the process that workers are forked from
    main         entry points, and the loop that passes each message to the part that handles it;
                 what multiprocessing gives its children
    run          runs the calls and backwards of chunks, and notes which one it is running
    early        sends what finished calls gave while a later call of their chunk runs for long
    graphs       the graphs that are kept here, and how gradients enter and leave them
    functions    functions until they are forgotten; sums of captures' gradients; stray leaves
    captured     notices writes to containers that functions capture
    memory       lent and borrowed memory, and whether memory is short; the worker's device
    console      what the caller gets beside results: prints, log records, warnings, failures, the
                 crash traceback
"""

if __name__ != "mpgrad.workers":
    # an editable install puts the clone on Python's path, so this package could be imported
    # directly
    raise ModuleNotFoundError(
        f"this package is mpgrad.workers (imported as: {__name__!r}); import it by that name",
        name=__name__,
    )
