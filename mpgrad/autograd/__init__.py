"""Backward across processes. Autograd ends at a pickle, so the parent keeps a node per call and the
worker keeps the graph.

PyTorch's engine runs one CPU node at a time: a node that waited for its worker would serialise the
workers. So the work of one call is split over two kinds of node, and the engine's own priorities
put all waiting behind all sending:

    item's tensors ──► Gate (identity, runs late) ──┐           forward, left to right
    captures ──► CaptureGate (runs last of all) ────┴─► Call ──► outputs
    real gradients ◄── wait, take ◄──────────────────── send the outputs' gradients, return at once
                                                                backward, right to left

The input of a call may be the result of another call that the caller cannot see (`hidden`). Then
the gate does not wait. It passes on a `Promise`, and the gradient goes from worker to worker as
soon as it exists.

With `create_graph=True` the worker also keeps a graph of that backward. The gradients that the
gates take are the outputs of another `Call`. Its inputs are the outputs' gradients, the item's
tensors and the captures. It is a `Call` like any other, so there are derivatives of every order.

Guarantees: every item has gates of its own, so a backward for one item leaves the history of the
    others alone. The gradients are the worker's, and never placeholders.
Assumes: a link that delivers (`remote_graph.GraphLink`).

This package runs in the caller only. It imports `torch_state` and `tracebacks`, and knows nothing
of processes, messages or shared memory.

    remote_graph   the handle of a kept graph; one backward of it, from its node to the gates; the
                   way to the workers and the sums of captures' gradients, which the graphs of an
                   operation share
    running        running backwards of the engine, and what is done at their end
    call_node      the node that sends
    gates          the nodes that wait
"""
