"""Digests of tensors: the kernel against the plain function, and what a digest must notice."""

import pytest
import torch
from exact import poisoned_outputs
from qarl_kernels import digest as module
from qarl_kernels.digest import digest, digest_sums, finish_digests
from running import NEEDS_TRITON, QUIET
from torch import Tensor

pytestmark = [NEEDS_TRITON, QUIET]

CPU = torch.device("cpu")
PROGRAM = 4 * module.TILE * module.STEPS  # bytes


def digests(tensors: list[Tensor]) -> list[str]:
    return finish_digests(digest_sums(tensors), [tensor.nbytes for tensor in tensors])


def _bytes(count: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).to(device)


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_the_plain_digest_is_the_documented_sum() -> None:
    data = bytes(range(200, 211))
    words = [int.from_bytes(data[i : i + 4], "little") for i in (0, 4, 8)]
    total = sum(_splitmix((place << 32) + word) for place, word in enumerate(words))
    expected = _splitmix((total + _splitmix(11)) % 2**64)
    assert digest(torch.tensor(list(data), dtype=torch.uint8)) == f"{expected:016x}"


def test_steps_of_the_plain_digest_do_not_show(monkeypatch) -> None:
    data = _bytes(4003, CPU)
    whole = digest(data)
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert digest(data) == whole


SIZES = [
    0,
    1,
    2,
    3,
    4,
    5,
    15,
    16,
    17,
    4 * module.TILE - 1,
    4 * module.TILE + 6,
    PROGRAM - 1,
    PROGRAM,
    PROGRAM + 1,
    2 * PROGRAM + 4 * module.TILE + 3,
]


def test_the_kernel_gives_the_plain_digests_of_ragged_sizes_in_one_call(device) -> None:
    tensors = [_bytes(size, device, seed=size) for size in SIZES]
    with poisoned_outputs():
        found = digests(tensors)
    assert found == [digest(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int32, torch.int64])
def test_the_kernel_gives_the_plain_digest_of_every_dtype(device, dtype: torch.dtype) -> None:
    tensor = _bytes(8 * 105, device).view(dtype).view(3, 5, -1)
    assert digests([tensor]) == [digest(tensor)]


@pytest.mark.parametrize("start", [1, 2, 4, 8])
def test_addresses_need_no_alignment(device, start: int) -> None:
    view = _bytes(5000, device)[start:]
    assert digests([view]) == [digest(view)]


def test_values_count_in_row_major_order_whatever_the_strides(device) -> None:
    matrix = _bytes(96, device).view(8, 12)
    assert digests([matrix.t()]) == [digest(matrix.t())] == [digest(matrix.t().contiguous())]


def test_words_beside_the_tensor_do_not_count(device) -> None:
    around = _bytes(4096, device)
    inside = around[1024:2047]
    before = digests([inside])
    around[:1024], around[2047:] = 0, 0
    assert digests([inside]) == before


def test_portions_give_the_digests_of_one_call(device) -> None:
    tensors = [_bytes(size, device, seed=size) for size in SIZES]
    sums = torch.cat([digest_sums(tensors[:4]), digest_sums(tensors[4:])])
    assert finish_digests(sums, [tensor.nbytes for tensor in tensors]) == digests(tensors)


# --- what must change it: the plain digest, which the kernel was shown to give


def test_every_changed_bit_of_a_word_changes_the_digest() -> None:
    words = _bytes(400, CPU).view(torch.int32)
    versions = [words] + [words ^ (torch.arange(100) == 37).int() * (1 << bit) for bit in range(31)]
    assert len(set(map(digest, versions))) == len(versions)


def test_swapped_words_change_the_digest() -> None:
    words = _bytes(400, CPU).view(torch.int32)
    versions = [words]
    for i in range(99):
        order = torch.arange(100)
        order[i], order[i + 1] = i + 1, i
        versions.append(words[order])
    assert len(set(map(digest, versions))) == 100


def test_appended_zeros_change_the_digest() -> None:
    versions = [torch.zeros(size, dtype=torch.uint8) for size in range(100)]
    assert len(set(map(digest, versions))) == 100


def test_a_changed_word_changes_half_of_the_digests_bits() -> None:
    """512 pairs differ in 32 of 64 bits on average; the standard deviation of the mean is 4 / sqrt(512) = 0.18."""
    words = _bytes(400, CPU).view(torch.int32)
    place = torch.arange(100)
    found = [int(digest(words + (place == i % 100).int() * i), 16) for i in range(513)]
    mean = sum((found[0] ^ other).bit_count() for other in found[1:]) / 512
    assert abs(mean - 32) < 5 * 0.18
