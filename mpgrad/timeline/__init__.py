"""What a pool's workers and callers did and when: recorded, written as a trace, summed up, drawn.

    recording     what is noted meanwhile; the scheduler's parts and the submitter write to it
    clocks        of workers on other machines, beside the caller's
    trace         the recording as Chrome's trace events, which Perfetto opens
    summary       the ten lines that matter
    picture       one track a worker
    timeline      what `Pool.timeline` gives
    command       `python -m mpgrad timeline`
Caller only. Workers note what they do in `workers/recorder.py`.
"""
