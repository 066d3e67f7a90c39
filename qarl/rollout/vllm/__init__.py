"""vLLM as the rollout engine: its process, its arithmetic, and publishes of weights to it."""
