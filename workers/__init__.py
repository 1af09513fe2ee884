"""What runs in a worker. Imported as `mpgrad.workers`, a link to here; the parent never imports it, it only names entry points.

Nothing here may touch the parent's objects: a worker knows its end of the pipe, its own arena and what it has borrowed.

    main, nursery                       entry points; the process that workers are forked from
    child                               what multiprocessing gives its children
    worker                              the loop: each message to the part whose matter it is
    forward, backward                   what answers the calls, and the gradients, of a chunk
    call_run, eager                     one run of a function; its backward right behind it
    functions                           functions as they were defined, until they are forgotten
    graphs, graph_edges, capture_sums   the graphs that are here; how they are entered; gradients added up
    strays                              leaves that only this process has, to which graphs lead
    loans, station                      memory lent and borrowed; the device
    whereabouts, task_warnings, streams, failures, last_words    what the caller hears beside results
    stage, recorder                     how far a call has come; what a timeline hears
    allocated                           memory in use
    memory_watch                        whether a limit of memory is near
"""

if __name__ != "mpgrad.workers":
    # found by an editable install, which has the clone on Python's path
    raise ModuleNotFoundError(
        f"this package is mpgrad.workers (imported as: {__name__!r}); import it by that name", name=__name__
    )
