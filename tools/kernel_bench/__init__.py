"""The parts of `tools/bench_kernels.py`."""
