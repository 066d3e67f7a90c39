"""What is proved is what multiplies: a fault in the prepared form of a weight alone is refused, and so named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from qarl_formats.scheme import make_scheme
from qarl_kernels.launch import INTERPRETED
from torch import Tensor

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.native.engine import NativeEngine
from qarl.weight_sync.verify import PublishError

LAYER = "model.layers.1.mlp.up_proj"
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SCHEMES = {
    "bf16": {},
    "w4a16": {"group_size": 32},
    "w4a16 with zero points": {"group_size": 32, "symmetric": False},
    "w4a16 of whole rows": {"group_size": -1},
    "w8a8": {},
    "fp8": {},
    "w4a8": {"group_size": 32},
}
CODES = {"bf16": "weight", "w8a8": "weight", "fp8": "weight"}  # suffix of what codes or values are published as


class Case:
    """A policy and its engine, which has published version 0. corrupt: changes what the sampler multiplies with."""

    def __init__(self, directory: Path, scheme: str, dtype: torch.dtype = torch.bfloat16, **quant) -> None:
        source = ModelConfig(path=str(directory))
        config = QuantConfig(scheme=scheme, **quant)
        made = make_scheme(scheme, config.group_size, config.symmetric, config.grid, config.scale_dtype)
        self.policy = Policy(load_model(source), made, config, dtype, torch.device("cpu"))
        self.engine = NativeEngine(self.policy.sampler, load_tokenizer(source), RolloutConfig())
        self.engine.publish(self.policy.current)

    def publish_corrupted(self, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
        """Publish anew, with these parts of the sampler's view in place of its own."""
        install = self.policy.sampler.install

        def corrupted(snapshot) -> None:
            install(snapshot)
            self.policy.sampler.view = replace(self.policy.sampler.view, **changes)

        monkeypatch.setattr(self.policy.sampler, "install", corrupted)
        self.engine.publish(self.policy.current)

    def with_operand(self, **changes: Tensor) -> dict[str, dict]:
        operands = self.policy.sampler.view.operands
        return {"operands": operands | {LAYER: replace(operands[LAYER], **changes)}}

    @property
    def operand(self):
        return self.policy.sampler.view.operands[LAYER]


@pytest.fixture(params=SCHEMES)
def case(request, tiny_model) -> Case:
    return Case(tiny_model("qwen3"), request.param.split()[0], **SCHEMES[request.param])


def one_more(tensor: Tensor) -> Tensor:
    """One value that another code, or other digits, would stand for."""
    copy = tensor.clone()
    copy[3, 5] = torch.where(copy[3, 5] == 1, 2, 1)
    return copy


def last_bit(tensor: Tensor) -> Tensor:
    """The last bit of one value: less than the published dtype can hold."""
    copy = tensor.clone()
    copy.view(torch.int32)[3, 5] ^= 1
    return copy


def refused(what: str):
    return pytest.raises(PublishError, match=f"version 0.*'{what}'")


def published_as(case: Case) -> str:
    return f"{LAYER}.{CODES.get(case.policy.scheme.name, 'weight_packed')}"


def test_an_undamaged_publish_is_proved(case, monkeypatch) -> None:
    case.publish_corrupted(monkeypatch)
    assert case.engine.version == 0


@pytest.mark.parametrize("change", [one_more, last_bit])
def test_one_prepared_value_is_refused(case, change: Callable[[Tensor], Tensor], monkeypatch) -> None:
    with refused(published_as(case)):
        case.publish_corrupted(monkeypatch, **case.with_operand(weight=change(case.operand.weight)))
    assert case.engine.version is None


def test_the_published_tensors_are_not_what_was_corrupted(case, monkeypatch) -> None:
    """So that it is the prepared form which is proved."""
    before = case.policy.current.manifest()
    with pytest.raises(PublishError):
        case.publish_corrupted(monkeypatch, **case.with_operand(weight=one_more(case.operand.weight)))
    assert case.policy.current.manifest() == before


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a8"])
def test_one_scale_that_multiplies_is_refused(tiny_model, scheme: str, monkeypatch) -> None:
    case = Case(tiny_model("qwen3"), scheme, **SCHEMES[scheme])
    scale = case.operand.scale.clone()
    scale[3, 0] *= 2
    with refused(f"{LAYER}.weight_scale"):
        case.publish_corrupted(monkeypatch, **case.with_operand(scale=scale))


def test_a_weight_dequantized_with_another_scale_is_refused(tiny_model, monkeypatch) -> None:
    case = Case(tiny_model("qwen3"), "w4a16", **SCHEMES["w4a16"])
    weight = case.operand.weight.clone()
    weight[3, :32] *= 2
    with refused(f"{LAYER}.weight_packed"):
        case.publish_corrupted(monkeypatch, **case.with_operand(weight=weight))


def test_an_int4_code_out_of_range_is_refused(tiny_model, monkeypatch) -> None:
    """16 more changes a bit of the neighbour when codes are packed; where that bit is set already it would hide."""
    case = Case(tiny_model("qwen3"), "w4a8", **SCHEMES["w4a8"])
    weight = case.operand.weight.clone()
    odd = int((weight[3, 1::2] % 2 == 1).nonzero()[0, 0])
    weight[3, 2 * odd] += 16
    with refused(f"{LAYER}.weight_packed"):
        case.publish_corrupted(monkeypatch, **case.with_operand(weight=weight))


@pytest.mark.parametrize("name", [NORM, EMBEDDING, "model.layers.0.self_attn.q_norm.weight"])
def test_one_norm_or_embedding_value_is_refused(case, name: str, monkeypatch) -> None:
    values = dict(case.policy.sampler.view.values)
    values[name] = values[name].clone()
    values[name].view(torch.int16).view(-1)[-1] ^= 1
    with refused(name):
        case.publish_corrupted(monkeypatch, values=values)


@pytest.mark.parametrize(("family", "name"), [("llama", EMBEDDING), ("qwen3", HEAD)], ids=["tied", "untied"])
def test_one_value_of_the_output_layer_is_refused(tiny_model, family: str, name: str, monkeypatch) -> None:
    case = Case(tiny_model(family), "w4a16", **SCHEMES["w4a16"])
    for change in (one_more, last_bit):
        with monkeypatch.context() as patch, refused(name):
            case.publish_corrupted(patch, head=change(case.policy.sampler.view.head))
        case.engine.publish(case.policy.current)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_float32_operands_are_proved_too(tiny_model, scheme: str, monkeypatch) -> None:
    case = Case(tiny_model("llama"), scheme, torch.float32, scale_dtype="float32", **SCHEMES[scheme])
    with refused(published_as(case)):
        case.publish_corrupted(monkeypatch, **case.with_operand(weight=last_bit(case.operand.weight)))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; TRITON_INTERPRET=1 is not set")
class TestKernelForm:
    """The int4 form that the Triton kernels read: codes in tiles, scales and zero points in columns."""

    @pytest.fixture(params=["w4a16", "w4a16 with zero points", "w4a16 of whole rows", "w4a8", "w4a8 of whole rows"])
    def operand(self, request):
        from qarl_formats.quantize import quantize_weight

        from qarl.policy.operand import operand_of

        quant = (SCHEMES | {"w4a8 of whole rows": {"group_size": -1}})[request.param]
        scheme = make_scheme(request.param.split()[0], quant["group_size"], quant.get("symmetric", True))
        master = torch.randn(20, 160, generator=torch.Generator().manual_seed(0))
        return operand_of(quantize_weight(master, scheme, "w"), torch.bfloat16, kernels=True)

    def differing(self, operand) -> set[str]:
        held, published = operand.held(torch.bfloat16), operand.source.tensors
        assert held.keys() == published.keys()
        return {
            suffix
            for suffix, tensor in published.items()
            if (held[suffix].shape, held[suffix].dtype) != (tensor.shape, tensor.dtype)
            or not torch.equal(held[suffix], tensor)
        }

    def test_gives_back_what_was_published(self, operand) -> None:
        assert self.differing(operand) == set()

    def test_shows_one_code(self, operand) -> None:
        operand.tiled[0, 0, 3, 2] ^= 1 << 5
        assert self.differing(operand) == {"weight_packed"}

    @pytest.mark.parametrize("bit", [0, 3, 30])
    def test_shows_every_bit_of_a_scale(self, operand, bit: int) -> None:
        """Of w4a16 an entry is the scale below the zero point's bits, and bit 30 is one that no entry may change."""
        operand.meta.view(torch.int32)[0, 3] ^= 1 << bit
        assert self.differing(operand) == {"weight_scale"}

    def test_shows_a_zero_point(self, operand) -> None:
        if operand.product == "w4a16":
            operand.meta[0, 3] ^= 1 << 18
            assert self.differing(operand) & {"weight_zero_point", "weight_scale"}

    def test_shows_an_entry_of_a_row_with_one_scale(self, operand) -> None:
        if operand.source.scheme.group_size is None:
            operand.meta.view(torch.int32)[1, 3] ^= 1
            assert self.differing(operand) == {"weight_scale"}
