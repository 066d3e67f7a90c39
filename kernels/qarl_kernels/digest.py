"""64-bit digests of tensors' bytes: on a GPU one launch for all tensors and one synchronization for all results.

The bytes are little-endian 32-bit words, the last one zero-padded. Word w at index i adds mix(2^32 i + w) to a sum
modulo 2^64, so programs may run in any order; the digest is mix(sum + mix(bytes)). mix is the finalizer of splitmix64
(Steele, Lea and Flood, OOPSLA 2014; constants of Stafford's variant 13), a bijection: changing one word always changes
the digest, and any other change goes unnoticed with probability 2^-64. It detects corruption, not forgery.

A launch reads a table of addresses: a model has hundreds of tensors, most of them so small that a launch for each would
cost more than reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.launch import launch

FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # multipliers of the mix
LIMIT = 2**34  # bytes per tensor: word indices have 32 bits
ALIGNED = 16  # bytes: alignment from which a thread loads four words at once
TILE = 2048  # words that a program loads at once: 8 per thread
STEPS = 8  # tiles per program: 64 KiB
_CHUNK = 1 << 22  # words per step of the plain function

_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)


def _mixed(x: int) -> int:
    mask = 2**64 - 1
    x = (x ^ (x >> 30)) * FIRST & mask
    x = (x ^ (x >> 27)) * SECOND & mask
    return x ^ (x >> 31)


def _digest(total: int, nbytes: int) -> str:
    return f"{_mixed((total + _mixed(nbytes)) % 2**64):016x}"


def digest(tensor: Tensor) -> str:
    """Compute the digest of one tensor in plain torch, the definition of the kernel's.

    Args:
        tensor: Any shape, dtype and device, below 16 GiB; read in row-major order.

    Returns:
        16 hexadecimal digits.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    assert data.numel() < LIMIT, f"{data.numel()} bytes: word indices have 32 bits"
    total = 0
    for start in range(0, -(-data.numel() // 4), _CHUNK):
        part = data[4 * start : 4 * (start + _CHUNK)]
        padded = part.new_zeros(-(-part.numel() // 4) * 4)
        padded[: part.numel()] = part
        words = padded.view(torch.int32).long() & 0xFFFFFFFF
        x = torch.arange(start, start + words.numel(), device=words.device) << 32 | words
        # int64 products wrap like uint64 ones; the masks remove the sign bits that its shifts bring in
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * (FIRST - 2**64)
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * (SECOND - 2**64)
        total += int((x ^ (x >> 31 & (1 << 33) - 1)).sum())
    return _digest(total, data.numel())


@triton.jit
def _mix(place, word):
    x = (place.to(tl.uint64) << 32) | word.to(tl.uint64)
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _digest_kernel(table, owners, sums, count, TILE: tl.constexpr, STEPS: tl.constexpr):
    """table: (3, count) i64, address, bytes and first program of each tensor. owners: i32, tensor of each program."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    address = tl.load(table + tensor)
    size = tl.load(table + count + tensor)
    first = (program - tl.load(table + 2 * count + tensor)) * (STEPS * TILE)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    whole = size // 4
    total = tl.zeros([TILE], dtype=tl.uint64)
    if first + STEPS * TILE <= whole:  # without masks a thread loads four words at once
        for step in tl.static_range(STEPS):
            place = first + step * TILE + tl.arange(0, TILE)
            total += _mix(place, tl.load(words + place))
    else:
        for start in range(first, whole, TILE):
            place = start + tl.arange(0, TILE)
            inside = place < whole
            total += tl.where(inside, _mix(place, tl.load(words + place, mask=inside, other=0)), 0)
    mixed = tl.sum(total, 0)
    if (size % 4 != 0) & (first <= whole) & (whole < first + STEPS * TILE):  # the last, padded word: byte by byte
        j = tl.arange(0, 4)
        tail = tl.load(address.to(tl.pointer_type(tl.uint8)) + 4 * whole + j, mask=j < size % 4, other=0)
        mixed += _mix(whole, tl.sum(tail.to(tl.uint32) << (8 * j).to(tl.uint32), 0))
    tl.atomic_add(sums + tensor, mixed.to(tl.int64, bitcast=True))


@lru_cache(maxsize=16)  # a model has one list of sizes, or one per portion
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the tensor of every program, and the first program of every tensor."""
    counts = [-(-size // (4 * TILE * STEPS)) for size in sizes]
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(counts))
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    return owners.to(device), firsts[:-1]


def _addressable(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous at an aligned address, else a copy that is."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def digest_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the sums for `finish_digests`, int64 (tensors,) on their device, without synchronizing.

    Args:
        tensors: Any shapes and dtypes, below 16 GiB each, on one GPU (or the CPU in Triton's interpreter). Tensors
            that are not contiguous, or whose address is not a multiple of 16, are copied.
    """
    device = tensors[0].device
    assert all(tensor.device == device for tensor in tensors), "tensors of one call share a device"
    assert all(tensor.nbytes < LIMIT for tensor in tensors), "word indices have 32 bits"
    readable = [_addressable(tensor) for tensor in tensors]
    sizes = tuple(tensor.nbytes for tensor in readable)
    owners, firsts = _programs(sizes, device)
    table = torch.tensor([[tensor.data_ptr() for tensor in readable], sizes, firsts]).to(device)
    sums = torch.zeros(len(sizes), dtype=torch.int64, device=device)
    launch(
        _digest_kernel,
        (owners.numel(),),
        num_warps=8,
        table=table,
        owners=owners,
        sums=sums,
        count=len(sizes),
        TILE=TILE,
        STEPS=STEPS,
    )
    return sums  # copies may be freed now: their memory is reused in stream order


def finish_digests(sums: Tensor, sizes: Sequence[int]) -> list[str]:
    """Return the digests. sums: from `digest_sums`; sizes: bytes of the same tensors. Synchronizes once."""
    return [_digest(total, nbytes) for total, nbytes in zip(sums.tolist(), sizes, strict=True)]
