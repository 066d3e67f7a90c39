"""Multi-GPU runs: ranks and their control messages, row sharding of master weights, and the all-gather of codes."""
