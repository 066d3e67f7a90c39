"""The mixture of experts in a model's config.json: how many experts, in which layers, of what size."""

from __future__ import annotations

from dataclasses import dataclass

from qarl.config.model_schema import ConfigJson
from qarl.utils.expert_names import EXPERT_NAMES, ExpertNames

# Defaults of transformers for missing keys: experts, experts per token, and features per expert.
_DEFAULTS = {"qwen2_moe": (60, 4, 1408), "qwen3_moe": (128, 8, 768), "mixtral": (8, 2, None), "olmoe": (64, 8, None)}
_SHARED = {"qwen2_moe": 5632}  # features of the shared expert, of families that have one


@dataclass(frozen=True)
class Mixture:
    """experts: of a layer. per_token: how many of them a token goes through. inner: features inside an expert.
    layers: those that have experts, by index; the others have an MLP. normalize: whether the weights of a token's
    experts are divided by their sum. names: of the parts. shared: features inside the expert that all tokens go
    through; 0: there is none."""

    experts: int
    per_token: int
    inner: int
    layers: frozenset[int]
    normalize: bool
    names: ExpertNames
    shared: int = 0

    @property
    def active_size(self) -> int:
        """Features inside all the experts that a token goes through."""
        return self.routed_size + self.shared

    @property
    def routed_size(self) -> int:
        """The same without the shared one's."""
        return self.per_token * self.inner

    @property
    def gates(self) -> list[tuple[str, int]]:
        """Of one layer, the weights that no scheme quantizes, by their modules inside it, with their rows."""
        return list(zip(self.names.gates(), (self.experts, 1), strict=False))


def read_mixture(family: str, found: ConfigJson) -> Mixture | None:
    """The mixture of a config.json; None if no layer has experts.

    Missing keys have the family's defaults in transformers.

    Raises:
        ValueError: A token goes through more experts than there are, by its own key or by the family's default.
    """
    if family not in EXPERT_NAMES:
        return None
    experts, per_token, inner = _DEFAULTS[family]
    layers = range(found.num_hidden_layers)
    if family in ("qwen2_moe", "qwen3_moe"):
        step, plain = found.decoder_sparse_step, frozenset(found.mlp_only_layers or ())
        sparse = frozenset(layer for layer in layers if layer not in plain and (layer + 1) % step == 0)
        inner = found.moe_intermediate_size or inner
    else:
        sparse, inner = frozenset(layers), found.intermediate_size
    assert inner is not None, "a family without a default has a size"
    if not sparse:
        return None
    alias = None if family == "qwen2_moe" else found.num_local_experts  # which qwen2_moe does not have
    experts, default = found.num_experts or alias or experts, found.num_experts_per_tok is None
    per_token = found.num_experts_per_tok or per_token
    if per_token > experts:
        text = f" is missing, and its default {per_token}" if default else f" {per_token}"
        raise ValueError(f"is not valid: num_experts_per_tok{text} is above its {experts} experts")
    return Mixture(
        experts=experts,
        per_token=per_token,
        inner=inner,
        layers=sparse,
        normalize=found.norm_topk_prob or family == "mixtral",
        names=EXPERT_NAMES[family],
        shared=(found.shared_expert_intermediate_size or _SHARED[family]) if family in _SHARED else 0,
    )
