"""The mixture of experts in a model's config.json: how many experts, in which layers, of what size."""

from dataclasses import dataclass

from qarl.config.model_schema import ConfigJson
from qarl.utils.expert_names import EXPERT_NAMES, ExpertNames

# Defaults of transformers for missing keys: experts, experts per token, and features per expert.
_DEFAULTS = {"qwen2_moe": (60, 4, 1408), "qwen3_moe": (128, 8, 768), "mixtral": (8, 2, None), "olmoe": (64, 8, None)}
_SHARED = {"qwen2_moe": 5632}  # features of the shared expert, of families that have one


@dataclass(frozen=True)
class Mixture:
    """Experts of a model.

    Attributes:
        experts: Experts per layer.
        per_token: Experts that each token is routed to.
        inner: Intermediate features per expert.
        layers: Indices of the layers that have experts; the others have a dense MLP.
        normalize: Whether a token's expert weights are divided by their sum.
        names: Module names of the parts.
        shared: Intermediate features of the shared expert; 0 if there is none.
    """

    experts: int
    per_token: int
    inner: int
    layers: frozenset[int]
    normalize: bool
    names: ExpertNames
    shared: int = 0

    @property
    def active_size(self) -> int:
        """Intermediate features of all experts of a token, the shared one included."""
        return self.routed_size + self.shared

    @property
    def routed_size(self) -> int:
        """Intermediate features of a token's routed experts."""
        return self.per_token * self.inner

    @property
    def gates(self) -> list[tuple[str, int]]:
        """(module name, rows) of the weights in one layer that no scheme quantizes."""
        return list(zip(self.names.gates(), (self.experts, 1), strict=False))


def read_mixture(family: str, found: ConfigJson) -> Mixture | None:
    """Read the mixture of a config.json; None if no layer has experts.

    Missing keys get the family's defaults from transformers.

    Raises:
        ValueError: The experts per token, given or by default, exceed the number of experts.
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
