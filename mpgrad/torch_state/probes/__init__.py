"""Tries what mpgrad relies on PyTorch to do beyond its public interface: a probe for each behaviour, by subject.

    expectations   the list of behaviours; nodes: what the probes look from
    autograd, memory, modes, objects, transforms   probes of the module of `private` of that name
    compiler       likewise, but run apart

`behaviours` runs them. They call what `private` offers, not PyTorch's own names, so that they try what a pool runs.

Guarantees: probes leave nothing behind, draw no random number, and run in a thread of their own, where they meet no mode of
    the caller's. Those that belong to the process (anomaly detection, default dtype, ...) they bear.
Assumes: no other thread enters or leaves forward-mode differentiation at this very moment. The process has one level of it.
"""
