"""What runs workers: processes, threads, streams, or the caller itself. Caller only.

Imports `wire` and what is below it. Names the entry points of `workers`, and imports none of it but
for `inline`. Knows nothing of calls: a new engine is written against `protocol` and added to
`kinds`.

    protocol     what an engine is: it starts workers and says when they have answered, or ended
    kinds        the engines by name, and in what they differ
    sockets      processes and threads: a socket pair to each
    inline       everything in the caller's thread
    launch       how a process or thread comes to be, and ends
    programs     fresh interpreters, and whether there is one; multiprocessing's own processes
"""
