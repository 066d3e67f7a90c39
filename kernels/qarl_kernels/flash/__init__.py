"""Causal attention with Triton: packed batches with shared prompts, forward and backward, and a paged KV cache."""
