"""What caller and workers say to each other, and how tensors look in it. Both sides.

Imports `memory` and `torch_state`. Nothing here decides anything; a message holds numbers, bytes
and tensor references only.

    messages         one frozen type a hop; which of many tensors belong to which item
    agent_messages   what a worker and its agent say to each other; needs no torch
    pipe             frames as bytes, and descriptors, through a socket pair; needs no torch
    frames           frames of messages and small tensors, and what the two ends of a connection do
    tensor_refs      a tensor as a reference: the sender puts it into a message or slot, the
                     receiver views it
"""
