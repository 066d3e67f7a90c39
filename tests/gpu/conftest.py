"""Tests of this directory need a GPU. They may import the helper modules of the other directories."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / folder) for folder in ("kernels", "rollout_vllm", "weight_sync")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(no_gpu)


@pytest.fixture
def full_float32_products() -> Iterator[None]:
    """Disable TF32 in products of plain torch, and free GPU memory after each test."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch.cuda.empty_cache()
