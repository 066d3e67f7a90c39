"""Compares schemes on one model in minutes, without RL: weight error, divergence from bf16, size and speed."""
