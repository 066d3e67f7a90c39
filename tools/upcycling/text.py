"""The parent's own text, and what its MLPs read while it reads that text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLED = 192  # sequences that are drawn together
READ = 16  # sequences that are read together


@torch.no_grad()
def sample(
    model: PreTrainedModel, start: int, count: int, length: int, generator: torch.Generator, say: Callable[[str], None]
) -> Tensor:
    """`count` sequences of `length` tokens at temperature 1, int64 (count, length) on the CPU.

    start: the token that each begins with. generator: of the CPU, which all draws come from, in order. A sequence
    that draws an end token goes on after it, as the turns of a conversation do. say: is told of each batch.
    """
    batches = []
    for first in range(0, count, SAMPLED):
        ids = torch.full((min(SAMPLED, count - first), length), start)
        cache = None
        for position in range(1, length):
            new = ids[:, position - 1 : position].to(model.device)
            out = model(input_ids=new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = out.logits[:, -1].float().softmax(-1).cpu()
            ids[:, position] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        batches.append(ids)
        say(f"sampled {first + len(ids):,} of {count:,} sequences")
    return torch.cat(batches)


@torch.no_grad()
def mlp_inputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Of each layer the normed states that its MLP reads, (tokens, hidden), where the model computes.

    ids: (sequences, length). The first token of a sequence is left out: its states are unlike those of all others, and
    the same for each sequence.
    """
    found: list[list[Tensor]] = [[] for _ in model.model.layers]

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[layer].append(inputs[0][:, 1:].flatten(0, 1))

        return hook

    hooks = [layer.mlp.register_forward_pre_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
    try:
        for part in ids.split(READ):
            model.model(input_ids=part.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in found]
