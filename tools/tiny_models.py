"""Make tiny models with random weights and a byte-level tokenizer, and a configuration for them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(chat_template: bool = True) -> "PreTrainedTokenizerFast":
    """Return a tokenizer of three special tokens (ids 0 to 2) and 256 bytes (ids 3 to 258)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2} | {letter: i + 3 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(
    directory: Path, family: str = "llama", *, chat_template: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """Save a random model of `family` and a byte tokenizer: hidden size 64, 2 layers, 4 heads, 2 key/value heads.

    qwen2 has q/k/v biases; qwen3 has q/k norms and a head size that is not hidden / heads. mixtral, qwen2_moe,
    qwen3_moe and olmoe have 4 experts and use 2 per token; qwen2_moe also has a shared expert; the first layer of
    qwen3_moe has an MLP instead. changes: Further settings of the model's configuration. Return the directory.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": family == "llama",
    }
    if family in ("qwen3", "qwen3_moe"):
        settings["head_dim"] = 32
    if family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"):
        settings |= {"num_experts" if family != "mixtral" else "num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen2_moe":
        settings |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    if family == "qwen3_moe":
        settings |= {"moe_intermediate_size": 64, "mlp_only_layers": [0], "norm_topk_prob": True}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(settings | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # so that leaving out a bias or norm changes outputs
            elif parameter.dim() >= 2:
                parameter.mul_(4.0)  # so that tokens differ in probability
    model.save_pretrained(directory)
    byte_tokenizer(chat_template).save_pretrained(directory)
    return directory


def tiny_settings(model: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for a tiny model, as read from YAML. sections: Keys to replace or add, per section."""
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "quant": {"group_size": 32},
        "rollout": {"n": 4, "max_response_length": 8, "max_num_seqs": 8},
        "data": {"source": "task:arithmetic", "max_prompt_length": 64},
        "reward": {"functions": [{"name": "length", "options": {"target": 4}}]},
        "objective": {"name": "grpo"},
        "optim": {"lr": 1e-3},
        "train": {"steps": 2, "prompts_per_step": 4, "minibatch_size": 8},
        "logging": {"console": "plain", "rollouts_every": 1, "samples": 0},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return data
