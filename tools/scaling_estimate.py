"""What a run on many GPUs would take, by the formulas of `qarl.memory`: the tables of docs/scaling.md. Runs nothing.

    python tools/scaling_estimate.py

For each model and number of GPUs: memory of one of them, and what it receives in an optimizer step. A token goes
through few of a mixture's parameters; masters, gradients, optimizer state and codes are those of all.
"""

from __future__ import annotations

import math
from typing import Any

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.mixture import Mixture
from qarl.config.quant import scheme_of
from qarl.experts import EXPERT_NAMES
from qarl.memory import Item, estimate, quantized_weight_bytes
from qarl.memory_ranks import received_in_rows, received_in_zero, received_of_weights

RANKS = (8, 64, 512)
TOKENS = 2**20  # of an optimizer step, over all ranks
MOST_TOKENS = 16_384  # of a micro-batch
# Assumed: products in bf16 that a GPU reaches, and what it receives from others of its node and from other nodes.
FLOPS, IN_NODE, BETWEEN_NODES, NODE = 400e12, 350e9, 50e9, 8
PASSES = 2 + 4 + 2  # multiplications and additions a parameter and token: forward, backward, forward again


def mixture(layers: int, experts: int, per_token: int, inner: int) -> Mixture:
    return Mixture(experts, per_token, inner, frozenset(range(layers)), True, EXPERT_NAMES["qwen3_moe"])


MODELS: dict[str, Architecture] = {
    "8B": Architecture("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, False),
    "30B-A3B": Architecture(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, False, mixture=mixture(48, 128, 8, 768)
    ),
    "235B-A22B": Architecture(
        "qwen3_moe", 4096, 12288, 94, 64, 4, 128, 151936, 40960, False, mixture=mixture(94, 128, 8, 1536)
    ),
}


def active(model: Architecture) -> int:
    """Parameters that a token is multiplied with."""
    return model.multiplied_parameters + model.vocab_size * model.hidden_size


def config(tokens: int, **distributed: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "a-model", "device": "cuda"},
            "quant": {"scheme": "w4a16", "ignore": ["lm_head", r"re:.*\.mlp\.gate$"]},
            "data": {"source": "task:arithmetic"},
            "reward": {"functions": [{"name": "exact"}]},
            "rollout": {"engine": "vllm", "max_response_length": 1024, "max_num_seqs": 256, "max_batched_tokens": 8192},
            "train": {"steps": 1, "micro_batch_tokens": tokens, "recompute": "layer", "logprob_chunk": 1024},
            "distributed": distributed,
        }
    )


def of_a_rank(ranks: int) -> tuple[int, int]:
    """(tokens of a micro-batch, micro-batches of a rank in an optimizer step): no more ranks than micro-batches."""
    rounds = math.ceil(TOKENS / (MOST_TOKENS * ranks))
    return min(MOST_TOKENS, TOKENS // ranks), rounds


def memory_row(model: Architecture, ranks: int, **distributed: Any) -> dict[str, float]:
    """GiB of one GPU while it trains; the sampler, which sleeps then, left out."""
    tokens, _ = of_a_rank(ranks)
    items = [item for item in estimate(config(tokens, **distributed), model, "cuda", tokens, ranks) if item.bytes]
    found = {"state": 0, "on the way": 0, "version": 0, "activations": 0, "next version": 0}
    for item in items:
        found[kind(item)] = found.get(kind(item), 0) + item.bytes
    held = {name: found[name] / 2**30 for name in ("state", "on the way", "version", "activations", "next version")}
    # Gradients and activations are gone when the next version is made.
    after = sum(item.bytes for item in items if item.phase == "publish" and kind(item) == "next version")
    update = sum(held[name] for name in ("state", "on the way", "version", "activations"))
    gradients = sum(item.bytes for item in items if item.name.startswith("gradients (")) / 2**30
    publish = held["state"] - gradients + held["version"] + after / 2**30
    return {**held, "peak": max(update, publish)}


def kind(item: Item) -> str:
    """Which column a line of the estimate belongs to."""
    if item.owner in ("process", "sampler"):
        return "beside"
    if item.name.startswith(("master", "gradients (", "optimizer")):
        return "state"
    if item.phase == "always":
        return "version"
    if item.phase == "publish":
        return "next version"
    return "on the way" if "gradients" in item.name and "lm_head" not in item.name else "activations"


def version_bytes(model: Architecture) -> int:
    """What is published of a version: codes and scales of the linears, 16 bits of the rest."""
    scheme, codes, quantized = scheme_of(config(MOST_TOKENS).quant), 0, 0
    for name, n, k in model.linears():
        if not name.endswith("mlp.gate"):
            codes, quantized = codes + quantized_weight_bytes(scheme, n, k), quantized + n * k
    return codes + 2 * (model.parameters - quantized)


def main() -> None:
    print("| model | GPUs | state | on the way | version | activations | next version | peak |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, model in MODELS.items():
        for ranks in RANKS:
            row = memory_row(model, ranks)
            print(f"| {name} | {ranks} | " + " | ".join(f"{value:,.1f}" for value in row.values()) + " |")
    print("\n| model | GPUs | ZeRO-0 | ZeRO-1 | ZeRO-2 | ZeRO-3 | rows |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, model in MODELS.items():
        for ranks in RANKS:
            peaks = [memory_row(model, ranks, engine="deepspeed", zero_stage=stage)["peak"] for stage in range(4)]
            peaks.append(memory_row(model, ranks)["peak"])
            print(f"| {name} | {ranks} | " + " | ".join(f"{peak:,.0f}" for peak in peaks) + " |")
    print("\n| model | GPUs | micro-batches | gradients | codes | ZeRO-3 here | 16-bit weights ", end="")
    print("| s compute | s gradients |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, model in MODELS.items():
        for ranks in RANKS:
            tokens, rounds = of_a_rank(ranks)
            rows = received_in_rows(model, version_bytes(model), ranks, rounds)
            zero = received_in_zero(model, 3, ranks, rounds)["masters"]
            weights = received_of_weights(model, ranks, rounds)
            compute = tokens * rounds * PASSES * active(model) / FLOPS
            moving = rows["gradients"] / (IN_NODE if ranks <= NODE else BETWEEN_NODES)
            sizes = " | ".join(f"{size / 1e9:,.1f}" for size in (rows["gradients"], rows["codes"], zero, weights))
            print(f"| {name} | {ranks} | {rounds} of {tokens:,} | {sizes} | {compute:.2f} | {moving:.2f} |")


if __name__ == "__main__":
    main()
