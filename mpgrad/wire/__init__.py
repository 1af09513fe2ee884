"""The messages between the caller and workers, and the form that tensors have in them. Both sides
use this package.

Imports `memory` and `torch_state`. Nothing here decides anything: a message holds only numbers,
bytes and tensor references.

    messages         one frozen type for each kind of message; which tensors belong to which item
    agent_messages   messages between a worker and its agent; needs no torch
    pipe             frames as bytes, and descriptors, through a socket pair; needs no torch
    frames           frames with messages and small tensors; the protocol of a connection's ends
    tensor_refs      references to tensors: the sender puts a tensor into a message or slot, and the
                     receiver views it
"""
