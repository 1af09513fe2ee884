"""Does a pool pay? What `mpgrad.advise` finds by running a sample, and what it makes of that.

advising    the public function
trial       runs the sample: serially, in pools, with threads, under vmap; leaves the caller's things as they were
model       what other numbers of workers would give; what stands in the way; computes only
advice      what was found, as an object and as a page
"""
