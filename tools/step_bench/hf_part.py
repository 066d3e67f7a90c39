"""The peer of the learner: the same shape as a Hugging Face model, autocast to bf16, with the logits of the batch."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Record
from model_sizes import Shape, random_model
from step_bench.learner_part import throughput
from torch import Tensor


def hf_records(options: argparse.Namespace, shape: Shape, device: torch.device) -> Iterator[Record]:
    """The learner's tokens as a batch without padding, float32 masters, SDPA, log-probs of all tokens, and a backward.

    Checkpoints its layers unless `recompute` is elementwise. With `hf_head` trl the output layer is TRL's, which
    multiplies it in chunks and keeps no logits, as its GRPOTrainer does from 1.16 on. With `hf_dtype` bfloat16 weights
    and gradients are of that, which experts need: autocast leaves transformers' grouped product in float32.
    """
    model = random_model(shape, device, 0, attn_implementation="sdpa").train()
    model.to(getattr(torch, options.hf_dtype))
    if options.recompute != "elementwise":
        model.gradient_checkpointing_enable({"use_reentrant": False})

    in_chunks = options.hf_head == "trl"
    if in_chunks:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)

    def calls(sequences: list[list[int]], weights: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        ids = torch.tensor(sequences, device=device)

        def forward() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return token_logprobs(model, ids, in_chunks).flatten()

        return torch.no_grad()(forward), lambda: (forward() * weights).sum().backward()

    for record in throughput(options, shape, device, calls):
        yield {"head": options.hf_head, "dtype": options.hf_dtype} | record


def token_logprobs(model: Callable[..., Any], ids: Tensor, in_chunks: bool) -> Tensor:
    """Log-probs (S, T), float32, of the tokens ids[:, 1:] of (S, T + 1). in_chunks: by the output layer of TRL, that
    `add_fused_lm_head` gave the model."""
    if in_chunks:
        return model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:], fused_lm_head=True).log_probs
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return selected_logprobs(logits.float(), ids[:, 1:])  # accelerate's mixed precision gives float32 as well


def selected_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """As TRL's selective_log_softmax has it for float32: log-sum-exp row by row, against the memory of a softmax."""
    selected = logits.gather(-1, targets[..., None])[..., 0]
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
