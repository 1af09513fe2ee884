"""What a pool's workers and callers do, and when: recorded, saved as a trace, drawn. Caller only.

    timeline   what `Pool.timeline` gives; what is noted meanwhile, to which the scheduler's parts
               and the submitter write; and that as Chrome's trace events, which Perfetto opens
    picture    a track for each worker, and for each thread of the caller; needs matplotlib
Workers note what they do in `workers/run.py`.
"""
