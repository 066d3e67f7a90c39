"""Parts of tools/bench_ranks.py: what one rank measures."""
