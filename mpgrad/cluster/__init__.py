"""Workers on other machines: an engine whose frames and memory travel through sites, one on each
node.

Caller only, but for `site` and what it imports. A site is a process on a node: it starts workers as
this machine would, mirrors the memory that the caller lends them, and passes frames on as they are.
What carries all that there and back is a carrier.

    options       what a pool is told of a Ray cluster
    carrier       what a carrier does: name nodes, start a site, exchange, kill it; records as bytes
    engine        the engine: places workers on sites, notices which are gone
    site_handle   the caller's end of a site: what was sent, lent and heard
    site          on the node: workers, mirrored slabs, relayed frames; needs no torch
    local         a carrier: sites are programs on this machine, for tests and for who has no cluster
    ray           a carrier: sites are actors of a Ray cluster
"""
