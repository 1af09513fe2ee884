"""Calls on their way to a worker and back: packed, delivered, collected. Caller only.

Imports `autograd`, `pickling`, `wire` and what is below them; knows no worker and no engine.

    packing         a call, or a bundle of calls, as bytes and slots; a function, once an operation
    device_choice   on which device a call belongs
    operations      one map, submit or reduce, from packed calls to results; submitted: one whose result other calls may claim
    outcomes        what came of a call: a result, or an exception
    claims          results among the arguments of a call that other calls still have to give
    delivered_gradients   those of losses, which came with the results
    homes           where its autograd nodes find their graphs, and the replies that gates wait for
    results         what the caller holds: AsyncResult, DifferentiableFuture; result_iterator: what imap returns
    seconds         timeouts and deadlines, as the caller gives them
    output          what tasks printed, logged and warned of
"""
