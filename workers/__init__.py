"""What runs in a worker. Imported as `mpgrad.workers`, a link to here; the parent never imports it,
it only names entry points.

Nothing here may touch the parent's objects: a worker knows its end of the pipe, its own arena and
what it has borrowed.

    main, nursery         entry points; the process that workers are forked from
    child                 what multiprocessing gives its children
    worker                the loop: each message to the part whose matter it is
    forward, backward     what answers the calls, and the gradients, of a chunk
    call_run, eager       one run of a function; its backward right behind it
    functions             functions until they are forgotten; sums of captures' gradients; failures
    graphs, graph_edges   the graphs that are here; how they are entered
    strays                leaves that only this process has, to which graphs lead
    loans, station        memory lent and borrowed; the device
    whereabouts           which call this is at, how far it has come, what a timeline hears
    streams               what the caller hears beside results: prints, records, warnings, last words
    memory_watch          memory in use, and whether a limit is near
"""

if __name__ != "mpgrad.workers":
    # found by an editable install, which has the clone on Python's path
    raise ModuleNotFoundError(
        f"this package is mpgrad.workers (imported as: {__name__!r}); import it by that name", name=__name__
    )
