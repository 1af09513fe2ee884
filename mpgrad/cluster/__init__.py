"""Workers on other machines: an engine whose frames and memory travel through agents, one on each
node.

Caller only, but for `agent`, and for the transports' other ends. An agent is a process on a node:
it starts workers as this machine would, replicates the memory that the caller lends them, and
passes frames on as they are. What carries all that there and back is a transport.

    engine     the engine: places workers on agents, notices which are gone; the caller's end of an
               agent and of the links to its workers: what was sent, lent and heard
    agent      on the node: workers, replicated slabs, relayed frames; records as bytes, in their
               order; needs no torch
    transport  what a transport does: name nodes, start an agent, exchange, kill it; and one whose
               agents are programs on this machine, for tests and for who has no cluster
    ray        a transport whose agents are actors of a Ray cluster; what a pool is told of that
"""
