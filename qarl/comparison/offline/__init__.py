"""Comparing schemes on one model without RL: weight error, divergence from bf16, size and speed, in minutes."""
