"""`LoadedModel` finds a snapshot's tensors and detects wrong loads, on modules with vLLM's layouts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qarl.rollout.vllm.own_kernels.loaded_model import LoadedModel
from qarl.weight_sync.fingerprints import Fingerprint, PublishError, fingerprints

ROWS = {"q_proj": 6, "k_proj": 2, "v_proj": 2}
DIRECT = {
    "embed.weight",
    "norm.weight",
    "layers.0.q_proj.bias",
    *(f"layers.0.{part}.{suffix}" for part in ROWS for suffix in ("weight", "weight_scale")),
}


def snapshot(seed: int = 0) -> dict[str, Tensor]:
    """Tensors as published; every version has other values."""
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def codes(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)

    tensors = {"embed.weight": floats(16, 8), "norm.weight": floats(8)}
    for part, rows in ROWS.items():
        tensors[f"layers.0.{part}.weight"] = codes(rows, 8)
        tensors[f"layers.0.{part}.weight_scale"] = floats(rows, 1)
        tensors[f"layers.0.{part}.weight_shape"] = torch.tensor([rows, 8])
    tensors["layers.0.q_proj.bias"] = floats(6)  # the first rows of the fused layer's
    for name in ("hidden", "library"):
        tensors[f"layers.0.{name}.weight"] = codes(8, 8)
        tensors[f"layers.0.{name}.weight_scale"] = floats(8, 1)
    return tensors


class Model(nn.Module):
    """A model with each layout. embed, norm: As published. qkv_proj: Fused and transposed, scales in float32.
    hidden: Reordered, so not found. library: Its weights are not among its tensors."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        for owner, names in ((self, ("embed", "norm")), (self.layers[0], ("qkv_proj", "hidden", "library"))):
            for name in names:
                owner.add_module(name, nn.Module())
        self.load(tensors)

    def load(self, tensors: dict[str, Tensor]) -> None:
        layer = self.layers[0]

        def fused(suffix: str) -> Tensor:
            return torch.cat([tensors[f"layers.0.{part}.{suffix}"] for part in ROWS])

        self.embed.register_buffer("weight", tensors["embed.weight"].clone())
        self.norm.register_buffer("weight", tensors["norm.weight"].clone())
        layer.qkv_proj.register_buffer("weight", fused("weight").t().contiguous())
        layer.qkv_proj.register_buffer("weight_scale", fused("weight_scale").float())
        layer.qkv_proj.register_buffer("bias", torch.cat([tensors["layers.0.q_proj.bias"], torch.zeros(4).bfloat16()]))
        layer.hidden.register_buffer("packed", tensors["layers.0.hidden.weight"].reshape(4, 16).flip(0))
        layer.hidden.register_buffer("scales", tensors["layers.0.hidden.weight_scale"].flip(0))
        layer.library.register_buffer("scales", tensors["layers.0.library.weight_scale"].flip(0))


def prints(tensors: dict[str, Tensor]) -> dict[str, Fingerprint]:
    return fingerprints(tensors.items())


@pytest.fixture
def model() -> Model:
    return Model(snapshot())


@pytest.fixture
def held(model: Model) -> LoadedModel:
    return LoadedModel(model, prints(snapshot()))


def test_tensors_are_found_and_read_in_whatever_layout_shows_them(held) -> None:
    tensors = snapshot()
    assert held.direct.keys() == DIRECT
    for name, tensor in held.read(sorted(DIRECT), prints(tensors)):
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name]), name
    total = sum(t.nbytes for t in tensors.values())
    assert held.proved_frac == sum(tensors[name].nbytes for name in DIRECT) / total


def test_layers_are_plain_opaque_or_blind(held) -> None:
    """Plain ones hold what was published and nothing else; opaque ones hide their weights; blind ones lack them."""
    assert held.plain == {"embed", "norm"}  # qkv_proj has bias rows that nothing was published for
    assert (held.opaque, held.blind) == (("layers.0.hidden",), ("layers.0.library",))


def test_only_plain_layers_are_written_and_in_place(model, held) -> None:
    address, new = model.norm.weight.data_ptr(), snapshot(1)
    held.write({"norm.weight": new["norm.weight"]})
    assert torch.equal(model.norm.weight, new["norm.weight"]) and model.norm.weight.data_ptr() == address
    with pytest.raises(AssertionError, match=r"q_proj\.bias has no location of its own"):
        held.write({"layers.0.q_proj.bias": new["layers.0.q_proj.bias"]})


def test_the_first_version_and_a_new_one_pass_when_they_are_loaded(model, held) -> None:
    held.check(0, prints(snapshot()))
    model.load(snapshot(1))
    held.check(1, prints(snapshot(1)))
    held.check(2, prints(snapshot(1)))


def keep(name: str) -> Callable[[Model], None]:
    """Return a faulty load: it leaves the old values in this buffer."""

    def change(model: Model) -> None:
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_buffer(attribute, Model(snapshot()).get_buffer(name))

    return change


def swap_rows(model: Model) -> None:
    weight = model.layers[0].qkv_proj.weight
    weight[:, 6:8], weight[:, 8:10] = weight[:, 8:10].clone(), weight[:, 6:8].clone()


def last_bit_of_a_scale(model: Model) -> None:
    """Change a float32 scale by less than the published dtype resolves, so that rounding would hide it."""
    model.layers[0].qkv_proj.weight_scale.view(torch.int32)[7] ^= 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (keep("norm.weight"), "'norm.weight' differs in vLLM"),
        (keep("layers.0.qkv_proj.weight_scale"), "'layers.0.q_proj.weight_scale' differs in vLLM"),
        (swap_rows, "'layers.0.k_proj.weight' differs in vLLM"),
        (last_bit_of_a_scale, "'layers.0.k_proj.weight_scale' differs in vLLM"),
    ],
    ids=["dropped norm", "stale scales", "swapped rows", "a scale's bit"],
)
def test_a_wrong_load_is_refused_with_the_tensors_name(model, held, change, what) -> None:
    model.load(snapshot(1))
    change(model)
    with pytest.raises(PublishError, match=f"publish of version 1: {what}"):
        held.check(1, prints(snapshot(1)))


def test_an_opaque_layer_that_changes_though_nothing_was_sent_for_it_is_named(model, held) -> None:
    model.layers[0].hidden.packed[0, 0] += 1
    with pytest.raises(PublishError, match=r"layer 'layers\.0\.hidden' changed by itself"):
        held.check(1, prints(snapshot()))


def test_an_opaque_layer_is_compared_with_the_last_version_and_not_with_the_first(model, held) -> None:
    model.load(snapshot(1))
    held.check(1, prints(snapshot(1)))
    with pytest.raises(PublishError, match="did not change with its weights"):
        held.check(2, prints(snapshot(1) | {"layers.0.hidden.weight": snapshot()["layers.0.hidden.weight"]}))
