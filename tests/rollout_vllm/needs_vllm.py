"""Marks of tests that need vLLM."""

import importlib.util

import pytest
import torch

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
needs_cpu_build = pytest.mark.skipif(not INSTALLED or torch.cuda.is_available(), reason="needs vLLM's CPU build")
