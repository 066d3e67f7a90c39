"""Multi-GPU runs: ranks, their control messages and failures, and row sharding of master weights."""
