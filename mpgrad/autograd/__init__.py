"""Backward across processes. Autograd ends at a pickle, so the parent keeps a node per call and the
worker keeps the graph.

PyTorch's engine runs one CPU node at a time: a node that waited for its worker would serialise the
workers. So the work of one call is split over two kinds of node, and the engine's own priorities
put all waiting behind all sending:

    item's tensors ──► Gate (identity, runs late) ──┐           forward, left to right
    captures ──► CaptureGate (runs last of all) ────┴─► Call ──► outputs
    real gradients ◄── wait, take ◄──────────────────── send the outputs' gradients, return at once
                                                                backward, right to left

A call may have been given the result of another one that nobody else sees (`hidden`). Then its gate
does not wait: it passes on a `Promise`, and the gradient goes from worker to worker as soon as it
is there, whatever this thread waits for meanwhile.

With `create_graph=True` the worker keeps a graph of that backward too, and the gradients that the
gates take are the outputs of another `Call`, whose inputs are the outputs' gradients, the item's
tensors and the captures. Nothing is special about it, so there are derivatives of every order.

Guarantees: every item has gates of its own, so a backward for one item leaves the history of the
    others alone; gradients are the worker's, whatever placeholders travelled between the nodes.
Assumes: a link that delivers (`remote_graph.GraphLink`).

Caller only. Imports `torch_state` and `tracebacks`; knows no process, message or shared memory.

    remote_graph   the handle of a kept graph; `Backward`: one backward of it, from its node to the
                   gates; what the graphs of an operation share: the way to the workers, and the
                   sums of the captures' gradients
    running        the engine's backwards that run, and what they leave behind
    call_node      the node that sends
    gates          those that wait
"""
