"""vLLM as the rollout engine: its process, its linear kernels, and the publishing of weights into it."""
