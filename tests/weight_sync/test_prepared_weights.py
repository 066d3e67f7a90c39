"""A publish verifies the operands of the products: a fault in a prepared weight alone is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_models import make_policy, operand_of
from qarl_formats.registry import scheme_names
from qarl_formats.weight import LowBitWeight
from torch import Tensor

from qarl.config import ModelConfig, RolloutConfig
from qarl.policy.load import load_tokenizer
from qarl.rollout.native.engine import NativeEngine
from qarl.weight_sync.fingerprints import PublishError

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
    "fp8_block": {},
    "nvfp4a16": {},
}


def test_every_scheme_is_among_them() -> None:
    assert {name.split()[0] for name in SCHEMES} == set(scheme_names())


class Case:
    """A policy and its engine, which has published version 0. corrupt: changes what the sampler multiplies with."""

    def __init__(self, directory: Path, scheme: str, dtype: torch.dtype = torch.bfloat16, **quant) -> None:
        self.policy = make_policy(directory, scheme, dtype, **quant)
        tokenizer = load_tokenizer(ModelConfig(path=str(directory)))
        self.engine = NativeEngine(self.policy.sampler, tokenizer, RolloutConfig())
        self.engine.publish(self.policy.current)

    def publish_corrupted(self, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
        """Publish anew, with these parts of the sampler's weights in place of its own."""
        install = self.policy.sampler.install

        def corrupted(snapshot) -> None:
            install(snapshot)
            self.policy.sampler.weights = replace(self.policy.sampler.weights, **changes)

        monkeypatch.setattr(self.policy.sampler, "install", corrupted)
        self.engine.publish(self.policy.current)

    def with_operand(self, **changes: Tensor) -> dict[str, dict]:
        corrupted = replace(self.layer, operands=self.layer.operands | changes)
        linears = {
            linear: tuple(part._replace(weight=corrupted) if LAYER in part.names else part for part in parts)
            for linear, parts in self.policy.sampler.weights.linears.items()
        }
        return {"linears": linears}

    @property
    def layer(self) -> LowBitWeight:
        return operand_of(self.policy.sampler.weights, LAYER)


def other_value(tensor: Tensor) -> Tensor:
    """One value that another code, or other digits, would stand for."""
    copy = tensor.clone()
    copy.view(torch.uint8).view(-1)[-1] ^= 1 << 5  # the last byte: of a float its exponent
    return copy


def last_bit(tensor: Tensor) -> Tensor:
    """The last bit of one value: of widened ones less than the published dtype can hold."""
    copy = tensor.clone()
    copy.view(torch.uint8).view(-1)[-tensor.element_size()] ^= 1
    return copy


def refused(what: str):
    return pytest.raises(PublishError, match=rf"version 0\b.*{what}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_wrong_value_of_any_operand_is_refused(tiny_model, scheme: str, monkeypatch) -> None:
    """Of each tensor that the product reads (values or codes, scales, zero points), of norms and of the embedding.

    The published tensors stay as they are, so that it is the prepared form which is verified.
    """
    case = Case(tiny_model("qwen3"), scheme.split()[0], **SCHEMES[scheme])
    before, values = case.policy.current.manifest(), case.policy.sampler.weights.values
    damages = [
        (LAYER, case.with_operand(**{name: change(operand)}))
        for name, operand in case.layer.operands.items()
        for change in (other_value, last_bit)
    ]
    plain = (NORM, EMBEDDING, "model.layers.0.self_attn.q_norm.weight")
    damages += [(name, {"values": values | {name: last_bit(values[name])}}) for name in plain]
    for what, damage in damages:
        with monkeypatch.context() as patch, refused(what):
            case.publish_corrupted(patch, **damage)
        assert case.engine.version is None and case.policy.current.manifest() == before
        case.engine.publish(case.policy.current)
    case.publish_corrupted(monkeypatch)
    assert case.engine.version == 0


def test_an_int4_code_out_of_range_is_refused(tiny_model, monkeypatch) -> None:
    """16 more changes a bit of the neighbour when codes are packed; where that bit is set already it would hide."""
    case = Case(tiny_model("qwen3"), "w4a8", **SCHEMES["w4a8"])
    (name,) = [name for name, operand in case.layer.operands.items() if operand.dtype == torch.float32]
    codes = case.layer.operands[name].clone()
    odd = int((codes[3, 1::2] % 2 == 1).nonzero()[0, 0])
    codes[3, 2 * odd] += 16
    with refused(LAYER):
        case.publish_corrupted(monkeypatch, **case.with_operand(**{name: codes}))


@pytest.mark.parametrize(("family", "name"), [("llama", EMBEDDING), ("qwen3", HEAD)], ids=["tied", "untied"])
def test_one_value_of_the_output_layer_is_refused(tiny_model, family: str, name: str, monkeypatch) -> None:
    case = Case(tiny_model(family), "w4a16", **SCHEMES["w4a16"])
    for change in (other_value, last_bit):
        with monkeypatch.context() as patch, refused(name):
            case.publish_corrupted(patch, head=change(case.policy.sampler.weights.head))
        case.engine.publish(case.policy.current)


def test_float32_weights_are_proved_too(tiny_model, monkeypatch) -> None:
    case = Case(tiny_model("llama"), "w8a8", torch.float32, scale_dtype="float32")
    for name, operand in case.layer.operands.items():
        with monkeypatch.context() as patch, refused(LAYER):
            case.publish_corrupted(patch, **case.with_operand(**{name: last_bit(operand)}))
        case.engine.publish(case.policy.current)
