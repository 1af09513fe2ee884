"""What runs workers: processes, threads, streams, or the caller itself. Caller only.

Imports `scheduling` and what is below it. Names the entry points of `workers`, and imports none of it but for `inline`.

    traits       the engines by name, and in what they differ; start: one of them; stations: on which devices
    dispatcher   processes, threads and streams: one thread that waits for their pipes
    inline       everything in the caller's thread
    launch       how a worker comes to be, and ends
"""
