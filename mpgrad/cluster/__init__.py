"""Workers on other machines: an engine whose frames and memory travel through sites, one on each
node.

Caller only, but for `agent`, and for the carriers' other ends. A site is a process on a node: it
starts workers as this machine would, mirrors the memory that the caller lends them, and passes
frames on as they are. What carries all that there and back is a carrier.

    engine    the engine: places workers on sites, notices which are gone; the caller's end of a
              site and of the links to its workers: what was sent, lent and heard
    site      on the node: workers, mirrored slabs, relayed frames; records as bytes, in their
              order; needs no torch
    carrier   what a carrier does: name nodes, start a site, exchange, kill it; and one whose sites
              are programs on this machine, for tests and for who has no cluster
    ray       a carrier whose sites are actors of a Ray cluster; what a pool is told of that
"""
