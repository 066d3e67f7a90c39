"""How many tokens a target takes, known before its weights are read."""

from __future__ import annotations

from qarl.errors import UserError
from qarl.inference.target import Target
from qarl.policy.load_config import load_model_config


def context_of(target: Target) -> int:
    """Positions of the model, or fewer where a run was given fewer. Raises UserError if it does not say."""
    limit = getattr(load_model_config(target.model), "max_position_embeddings", None)
    if limit is None:
        raise UserError(
            f"{target.name}: does not say its max_position_embeddings; supported families are Llama, "
            "Mistral, Qwen2 and Qwen3"
        )
    return min(limit, (target.run and target.run.model.max_length) or limit)
