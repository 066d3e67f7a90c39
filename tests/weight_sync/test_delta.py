"""What travels for a publish: patches that rebuild tensors bit for bit, and plans that leave nothing needed behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qarl.weight_sync.delta import Patch, apply_patch, patch_of
from qarl.weight_sync.fingerprints import fingerprints
from qarl.weight_sync.plan import UpdatePlan, flatten, plan_update, unflatten

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int32, torch.int64, torch.float32]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


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


@pytest.mark.parametrize("shape", [(64, 32), (7, 3), (1,), (5, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_patch_turns_the_old_tensor_into_the_new_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    old = random_bytes(shape, dtype)
    new = altered(old, every=11)
    patch = patch_of(old, new)
    assert patch is not None and patch.indices.dtype == patch.values.dtype == torch.int32
    apply_patch(old, patch)
    assert same_bytes(old, new)


def test_a_patch_of_nan_and_of_minus_zero_keeps_their_bits() -> None:
    old = torch.tensor([0.0, torch.nan, 1.0, torch.nan])
    new = torch.tensor([-0.0, torch.nan, 1.0, 2.0])
    patch = patch_of(old, new)
    assert patch is not None and patch.indices.tolist() == [0, 3]
    apply_patch(old, patch)
    assert same_bytes(old, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_need_no_patch(dtype: torch.dtype) -> None:
    old = random_bytes((7, 3), dtype)
    assert patch_of(old, old.clone()) is None


@pytest.mark.parametrize("start", [1, 2, 4])
def test_a_patch_reaches_a_view_at_any_address_and_nothing_beside_it(start: int) -> None:
    around = random_bytes((100,), torch.int8)
    before = around.clone()
    view = around[start : start + 51]
    new = altered(view, every=7)
    patch = patch_of(view, new)
    assert patch is not None
    apply_patch(view, patch)
    assert torch.equal(view, new)
    assert torch.equal(around[:start], before[:start]) and torch.equal(around[start + 51 :], before[start + 51 :])


def test_a_patch_is_of_values_in_row_major_order() -> None:
    old = random_bytes((6, 8), torch.int32)
    new = altered(old, every=13)
    patch = patch_of(old.t().contiguous().t(), new)
    assert patch is not None
    apply_patch(old, patch)
    assert torch.equal(old, new)


# --- plans


@pytest.fixture
def old() -> dict[str, Tensor]:
    names = ["embed", "q.codes", "q.scale", "k.codes", "k.scale", "norm"]
    return {name: random_bytes((16, 16), torch.int32, seed=i) for i, name in enumerate(names)}


def plan(old: dict[str, Tensor], new: dict[str, Tensor], mode: str, known: bool = True) -> UpdatePlan:
    prints = fingerprints(old.items()) if known else None
    return plan_update(new, fingerprints(new.items()), prints, old if known else None, mode)


def rebuilt(old: dict[str, Tensor], shipment: UpdatePlan) -> dict[str, Tensor]:
    """What a receiver with a mirror of `old` holds after the shipment."""
    held = {name: tensor.clone() for name, tensor in old.items()}
    for name, arrived in unflatten(flatten(shipment).items()):
        if isinstance(arrived, Patch):
            apply_patch(held[name], arrived)
        else:
            held[name] = arrived
    return held


def test_the_first_publish_sends_everything(old) -> None:
    shipment = plan(old, old, "delta", known=False)
    assert list(shipment.full) == list(old) and not shipment.patches and not shipment.unchanged
    assert shipment.nbytes == shipment.full_nbytes == 6 * 1024


def test_mode_full_sends_everything_again(old) -> None:
    assert list(plan(old, old, "full").full) == list(old)


def test_a_delta_sends_nothing_if_nothing_changed(old) -> None:
    shipment = plan(old, old, "delta")
    assert shipment.nbytes == 0 and shipment.unchanged == tuple(old)


def test_a_delta_sends_a_patch_where_that_is_smaller(old) -> None:
    new = old | {"k.codes": altered(old["k.codes"], 100), "norm": altered(old["norm"], 4)}
    shipment = plan(old, new, "delta")
    assert list(shipment.patches) == ["k.codes"] and list(shipment.full) == ["norm"]
    assert shipment.unchanged == ("embed", "q.codes", "q.scale", "k.scale")
    assert shipment.nbytes == 1024 + 11 * 8 and shipment.full_nbytes == 6 * 1024


def test_a_patch_as_large_as_the_tensor_does_not_travel(old) -> None:
    new = altered(old["norm"], 8)  # every second word: 8 bytes of patch for 8 of tensor
    assert list(plan(old, old | {"norm": new}, "delta").full) == ["norm"]


def test_a_receiver_rebuilds_the_new_version_from_a_delta(old) -> None:
    new = old | {"q.scale": altered(old["q.scale"], 57), "k.codes": altered(old["k.codes"], 100)}
    new["embed"] = -old["embed"]
    held = rebuilt(old, plan(old, new, "delta"))
    assert fingerprints(held.items()) == fingerprints(new.items())


def test_the_tensors_of_a_patch_stay_together() -> None:
    words = torch.arange(3, dtype=torch.int32)
    arrived = [("a#indices", words), ("b#values", words)]
    with pytest.raises(AssertionError, match="b#values follows the indices of a"):
        list(unflatten(arrived))
