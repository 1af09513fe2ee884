"""The code that runs in a worker. It is imported as `mpgrad.workers`, a link to this folder. The
parent never imports it, and refers to its entry points only by name.

Nothing here may touch the parent's objects. A worker has its end of the pipe, its own arena, and
the memory that it has borrowed.

    fork_server  the process that workers are forked from
    main         entry points, the loop that passes each message to the part that handles it, and
                 the state that multiprocessing gives its children
    run          runs the calls and backwards of chunks, and records which one it is running
    early        sends the results of finished calls while a later call of their chunk takes long
    graphs       the graphs that are kept here, and how gradients enter and leave them
    functions    functions until they are forgotten; sums of captures' gradients; stray leaves
    captured     detects writes to containers that functions capture
    memory       lent and borrowed memory, shortage of memory, and the worker's device
    console      sends prints, log records, warnings, failures and the crash traceback
"""

if __name__ != "mpgrad.workers":
    # an editable install adds the clone to Python's path, so this package could be imported
    # directly
    raise ModuleNotFoundError(
        f"this package is mpgrad.workers (imported as: {__name__!r}); import it by that name",
        name=__name__,
    )
