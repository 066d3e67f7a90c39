"""The parts of `tools/bench_vllm.py`."""
