"""Marks of tests that launch kernels."""

import pytest
import torch
from qarl_kernels.launch import INTERPRETED

NEEDS_TRITON = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"
)
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy names every 0 / 0 and overflow
