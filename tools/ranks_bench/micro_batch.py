"""What the learner and its peer both run: the tokens of a micro-batch."""

from __future__ import annotations

import torch
from model_sizes import Shape

LENGTH = 1024  # of a sequence


def random_tokens(shape: Shape, tokens: int, rank: int) -> torch.Tensor:
    """Token ids (sequences, length + 1), int64: `length` of each are run, and `length` predicted. Each rank's own."""
    length = min(LENGTH, tokens)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, shape.vocabulary, (tokens // length, length + 1), generator=generator)
