"""Deltas: patches rebuild tensors bit for bit, and everything that changed is sent."""

import pytest
import torch
from far_side import random_bytes
from torch import Tensor

from qarl.weight_sync import update
from qarl.weight_sync.fingerprints import PublishError, fingerprints
from qarl.weight_sync.update import delta, patch_of, patched, receive

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int32, torch.int64, torch.float32]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(
        a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
    )


def altered(tensor: Tensor, every: int) -> Tensor:
    """A copy in which every so many bytes differ, the last one among them."""
    copy = tensor.clone()
    data = copy.view(-1).view(torch.uint8)
    data[torch.arange(data.numel() - 1, -1, -every)] ^= 1
    return copy


# --- patches


@pytest.mark.parametrize("shape", [(64, 32), (7, 3), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_patch_turns_the_old_tensor_into_the_new_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    old = random_bytes(shape, dtype)
    before, new = old.clone(), altered(old, every=11)
    patch = patch_of(old, new)
    assert patch.dtype == torch.int32 and patch.shape[0] == 2
    assert same_bytes(patched(old, patch), new) and same_bytes(old, before)
    assert patch_of(old, before).shape == (2, 0)


def test_a_patch_of_nan_and_of_minus_zero_keeps_their_bits() -> None:
    old = torch.tensor([0.0, torch.nan, 1.0, torch.nan])
    new = torch.tensor([-0.0, torch.nan, 1.0, 2.0])
    patch = patch_of(old, new)
    assert patch[0].tolist() == [0, 3]
    assert same_bytes(patched(old, patch), new)


@pytest.mark.parametrize("view", [random_bytes((100,), torch.int8)[1:52], random_bytes((8, 6), torch.int32).t()])
def test_a_patch_is_of_the_values_of_a_view_in_row_major_order(view: Tensor) -> None:
    old = view.contiguous()
    new = altered(old, every=7)
    assert torch.equal(patched(old, patch_of(view, new)), new)


def test_the_indices_of_a_wide_patch_are_int64() -> None:
    old = torch.zeros(64, dtype=torch.int32)
    patch = torch.tensor([[3, 60], [-1, 7]])  # as of a tensor with 2^31 words
    assert patched(old, patch)[[3, 60]].tolist() == [-1, 7]


# --- deltas


@pytest.fixture
def old() -> dict[str, Tensor]:
    names = ["embed", "q.codes", "q.scale", "k.codes", "k.scale", "norm"]
    return {name: random_bytes((16, 16), torch.int32, seed=i) for i, name in enumerate(names)}


def sent(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    return delta(new, fingerprints(new.items()), old, fingerprints(old.items()))


def test_what_changed_is_sent_as_a_patch_if_that_is_smaller(old) -> None:
    new = {name: tensor.clone() for name, tensor in old.items()} | {"k.codes": altered(old["k.codes"], 100)}
    new |= {"k.scale": altered(old["k.scale"], 8)}  # every second word: 8 bytes of patch for 8 of tensor
    new |= {"norm": altered(old["norm"], 4)}
    found = sent(old, new)
    assert list(found) == ["k.codes#patch", "k.scale", "norm"] and found["norm"] is new["norm"]
    assert found["k.codes#patch"].nbytes == 11 * 8


def test_a_receiver_rebuilds_the_new_version(old) -> None:
    new = old | {"q.scale": altered(old["q.scale"], 57), "k.codes": altered(old["k.codes"], 100)}
    new["embed"] = -old["embed"]
    prints, before = fingerprints(new.items()), fingerprints(old.items())
    held = old | receive(1, sent(old, new).items(), prints, old.__getitem__)
    assert fingerprints(held.items()) == prints and fingerprints(old.items()) == before


def test_a_receiver_lets_the_sampler_work_after_each_portion(monkeypatch) -> None:
    monkeypatch.setattr(update, "PORTION", 100)
    tensors = {f"{i}": torch.zeros(60, dtype=torch.uint8) for i in range(5)}
    taken: list[str] = []
    seen: list[int] = []
    arriving = ((name, tensor) for name, tensor in tensors.items() if not taken.append(name))
    receive(1, arriving, fingerprints(tensors.items()), tensors.__getitem__, lambda: seen.append(len(taken)))
    assert seen == [2, 4]


def test_a_patch_of_another_base_is_refused(old) -> None:
    new = old | {"k.codes": altered(old["k.codes"], 100)}
    with pytest.raises(PublishError, match=r"version 1: 'k\.codes' differs in what arrived"):
        receive(1, sent(old, new).items(), fingerprints(new.items()), lambda name: old["q.codes"])
