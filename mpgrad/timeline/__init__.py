"""What a pool's workers and callers do, and when: recorded, saved as a trace, drawn.

    recording     what is noted meanwhile; the scheduler's parts and the submitter write to it
    trace         the recording as Chrome's trace events, which Perfetto opens
    picture       one track a worker, one a thread of the caller
    timeline      what `Pool.timeline` gives
Caller only. Workers note what they do in `workers/whereabouts.py`.
"""
