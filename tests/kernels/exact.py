"""For tests of bit-identical results: poisoned output memory, and equality of all bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

POISON = 0xA5
_GUARD = 4096  # bytes on each side


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Make `torch.empty` return poisoned tensors between guards, and check at the end that no guard was written.

    An element that a kernel does not write stays poison; a write outside of its output breaks a guard.
    """
    buffers = []

    def empty(*shape, dtype=torch.float32, device=None):
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        size = dtype.itemsize * torch.Size(shape).numel()
        buffer = torch.full((2 * _GUARD + size,), POISON, dtype=torch.uint8, device=device)
        buffers.append((buffer, size))
        return buffer[_GUARD : _GUARD + size].view(dtype).view(shape)

    with patch.object(torch, "empty", empty):
        yield
    for buffer, size in buffers:
        assert (buffer[:_GUARD] == POISON).all() and (buffer[_GUARD + size :] == POISON).all(), "a guard was written"


def assert_same(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """dtype, shape and values are those of `expected`, a CPU tensor; e4m3 +0 and -0 differ, any NaN equals any."""
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    tensor = tensor.cpu()
    if tensor.dtype == torch.float8_e4m3fn:
        nan = expected.float().isnan()
        assert torch.equal(tensor.float().isnan(), nan)
        tensor, expected = (t.view(torch.uint8).masked_fill(nan, 0) for t in (tensor, expected))
    assert torch.equal(tensor.isnan(), expected.isnan())
    assert torch.equal(tensor.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
