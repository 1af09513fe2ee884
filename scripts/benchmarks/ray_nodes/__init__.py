"""The parts of `bench_ray.py`: nodes on this machine, what is written by hand for them, and the rows."""
