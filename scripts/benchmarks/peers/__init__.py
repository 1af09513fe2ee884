"""The systems of `bench_peers.py`, and the processes that they live in."""
