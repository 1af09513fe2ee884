"""The rows of `bench_speed.py`: grains, copies and processes."""
