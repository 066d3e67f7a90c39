"""Digests of tensors: the kernel against plain torch, and the changes that a digest must detect."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON, QUIET
from qarl_kernels import digest as module
from qarl_kernels.digest import digest, digest_sums, finish_digests
from torch import Tensor

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

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


BLOCK = 4 * module.TILE
SIZES = [0, 1, 2, 3, 4, 5, 15, 16, 17, BLOCK - 1, BLOCK + 6, PROGRAM - 1, PROGRAM, PROGRAM + 1, 2 * PROGRAM + BLOCK + 3]


def test_the_kernel_gives_the_plain_digests_of_ragged_sizes_in_one_call_or_two(device) -> None:
    tensors = [_bytes(size, device, seed=size) for size in SIZES]
    found = digests(tensors)
    assert found == [digest(tensor) for tensor in tensors]
    sums = torch.cat([digest_sums(tensors[:4]), digest_sums(tensors[4:])])
    assert finish_digests(sums, [tensor.nbytes for tensor in tensors]) == found


def test_any_address_and_stride_gives_the_plain_digest_of_the_values(device, monkeypatch) -> None:
    memory = _bytes(5000, device)
    views = [*(memory[start:-7] for start in (1, 2, 4, 8)), memory[:96].view(8, 12).t()]
    whole = [digest(view.contiguous()) for view in views]
    assert digests(views) == [digest(view) for view in views] == whole
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert [digest(view) for view in views] == whole, "steps of the plain digest do not show"


# --- changes that a digest must detect, by the plain function, which the kernel was shown to equal


def test_a_changed_bit_swapped_words_and_appended_zeros_change_the_digest() -> None:
    words, order = _bytes(400, CPU).view(torch.int32), torch.arange(100)
    changed = [words ^ (order == 37).int() * (1 << bit) for bit in range(31)]
    swapped = [words[torch.where(order == i, i + 1, torch.where(order == i + 1, i, order))] for i in range(99)]
    zeros = [torch.zeros(size, dtype=torch.uint8) for size in range(100)]
    versions = [words, *changed, *swapped, *zeros]
    assert len(set(map(digest, versions))) == len(versions)
