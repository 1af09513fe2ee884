"""What runs workers: processes, threads, streams, or the caller itself. Caller only.

Imports `wire` and what is below it. Names the entry points of `workers`, and imports none of it but
for `sockets`. Knows nothing of calls: a new engine is written against `kinds`, and added there.

    kinds        what an engine is: it starts workers and says when they have answered, or ended;
                 the engines by name, and in what they differ
    sockets      processes and threads: a socket pair to each; or everything in the caller's thread
    launch       how a process or thread comes to be, and ends; fresh interpreters
"""
