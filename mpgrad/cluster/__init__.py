"""Workers on other machines. This engine sends frames and memory through agents, one on each node.

This package runs in the caller, except for `agent` and the agents' ends of the transports. An agent
is a process on a node. It starts workers as the caller's machine would, replicates the memory that
the caller lends them, and passes frames on unchanged. A transport carries all of this in both
directions.

    engine     the engine, which places workers on agents and notices lost ones; the caller's ends
               of an agent and of its workers' links
    agent      the agent on the node, with its workers and replicas; how records become bytes and
               keep their order; needs no torch
    transport  the protocol of a transport, which names nodes, starts and kills agents, and
               exchanges records; and a transport for tests, whose agents are local programs
    ray        a transport whose agents are actors of a Ray cluster; and its options, `mpgrad.Ray`
"""
