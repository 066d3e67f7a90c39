"""What tools/bench_step.py measures, a part a module."""
