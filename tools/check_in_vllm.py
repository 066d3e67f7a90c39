"""Does vLLM's own arithmetic read exports as qarl does? Tiny models in each scheme, log-probs of the same tokens.

    python tools/check_in_vllm.py make DIR --schemes nvfp4a16 fp8_block w4a16   # exports and qarl's log-probs
    python tools/check_in_vllm.py make DIR --families mixtral qwen3_moe --schemes bf16 w4a16 w8a8 fp8
    python tools/check_in_vllm.py read DIR --json FILE                          # where vLLM runs those schemes

Hidden sizes are multiples of 128, so that every scheme fits. vLLM runs eagerly, with the kernels that it chooses
itself; what it says of an export is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qarl_formats.registry import scheme_names

PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for j in range(20 + 5 * i)] for i in range(6)]
TOKENS = 48
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 256}
MORE = {
    "qwen3_moe": EXPERTS | {"head_dim": 64, "mlp_only_layers": []},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 256},
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "qwen2_moe", "olmoe")


def make(directory: Path, families: list[str], schemes: list[str]) -> None:
    """An export FAMILY-SCHEME for each, and a file of that name: prompts, greedy responses, their log-probs by qarl."""
    from tiny_models import save_tiny_model

    import qarl
    from qarl.exporting.readers import read_native
    from qarl.types import Prompt

    prompts = [Prompt(index, tokens, "") for index, tokens in enumerate(PROMPTS)]
    for family in families:
        base = save_tiny_model(directory / f"base-{family}", family, **(SIZES | MORE.get(family, {})))
        for scheme in schemes:
            name = f"{family}-{scheme}"
            qarl.quantize(base, directory / name, scheme)
            found = read_native(directory / name, prompts, TOKENS, "cpu")
            record = {"prompts": PROMPTS, "responses": found.token_ids, "logprobs": found.logprobs}
            (directory / f"{name}.json").write_text(json.dumps(record))


def read(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each export, by name: vLLM's log-probs of the same tokens, against qarl's."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for record in sorted(directory.glob("*-*.json")):
        try:
            yield record.stem, _compare(directory / record.stem, json.loads(record.read_text()))
        except Exception as error:  # of one export; the others are still of interest
            yield record.stem, {"error": " ".join(str(error).split())[:400]}
        gc.collect()
        cleanup_dist_env_and_memory()  # the next model may want other groups


def where() -> dict[str, Any]:
    """What `read` runs on."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"vllm": vllm.__version__, "torch": torch.__version__, "device": device}


def _compare(checkpoint: Path, record: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    memory = {"kv_cache_memory_bytes": 256 << 20}  # with a share alone vLLM fails where another process gives some back
    if not current_platform.is_cpu():
        memory["gpu_memory_utilization"] = 0.12
    engine = LLM(
        str(checkpoint),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        **memory,
    )
    texts = [p + r for p, r in zip(record["prompts"], record["responses"], strict=True)]
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=tokens) for tokens in texts],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    deltas, likeliest = [], 0
    for output, response, logprobs in zip(outputs, record["responses"], record["logprobs"], strict=True):
        for entry, token, logprob in zip(output.prompt_logprobs[-len(response) :], response, logprobs, strict=True):
            deltas.append(abs(entry[token].logprob - logprob))
            likeliest += entry[token].rank == 1
    return {
        "kernels": _kernels(engine),
        "tokens": len(deltas),
        "delta_abs_mean": sum(deltas) / len(deltas),
        "delta_abs_max": max(deltas),
        "likeliest": likeliest,
    }


def _kernels(engine: Any) -> list[str]:
    """Classes of the quantized layers' schemes in vLLM, of what multiplies there, and of what multiplies experts."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    schemes = [module.scheme for module in model.modules() if hasattr(module, "scheme")]
    products = [getattr(s, "kernel", None) or getattr(s, "fp8_linear", None) for s in schemes]
    named = {f"{type(s).__name__}/{type(p).__name__}" for s, p in zip(schemes, products, strict=True)}
    methods = [getattr(module, "quant_method", None) for module in model.modules() if hasattr(module, "moe_config")]
    experts = {type(method).__name__ for method in methods if method is not None}
    return sorted(named | experts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=["make", "read"])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=["llama"], metavar="FAMILY", help=", ".join(FAMILIES)
    )
    parser.add_argument(
        "--schemes",
        nargs="+",
        choices=scheme_names(),
        default=["nvfp4a16", "fp8_block", "w4a16"],
        metavar="SCHEME",
        help=", ".join(scheme_names()),
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.job == "make":
        make(arguments.directory, arguments.families, arguments.schemes)
        return
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    found = where()
    for name, of_export in read(arguments.directory):
        found[name] = of_export
        print(json.dumps({name: of_export}), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
