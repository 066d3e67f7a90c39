"""qarl: quantization-aware reinforcement learning for language models."""

__version__ = "0.1.0"
