"""What caller and workers say to each other, and how tensors look in it. Both sides.

Imports `memory` and `torch_state`. Nothing here decides anything; a message holds numbers, bytes and tensor references only.

    messages         one frozen type a hop
    bundles          which tensors of many items belong to which
    pipe             frames as bytes, and descriptors, through a socket pair
    asides           what a worker and its site say to each other
    frames           frames of messages and small tensors
    tensor_refs      a tensor as a reference; how the receiver looks at it
    tensor_cores     the memory that travels for a tensor, and the form that rebuilds it
    tensor_packing   tensors into messages or slots
"""
