"""Does vLLM's own arithmetic read exports as qarl does? A tiny model in each scheme, log-probs of the same tokens.

    python tools/check_in_vllm.py make DIR --schemes nvfp4a16 fp8_block w4a16   # exports and qarl's log-probs
    python tools/check_in_vllm.py read DIR --json FILE                          # where vLLM runs those schemes

Hidden sizes are multiples of 128, so that every scheme fits. vLLM runs eagerly, with the kernels it chooses itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for j in range(20 + 5 * i)] for i in range(6)]
TOKENS = 48
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def make(directory: Path, schemes: list[str]) -> None:
    """An export for each scheme, and `SCHEME.json`: prompts, greedy responses, their log-probs by qarl."""
    from tiny_models import save_tiny_model

    import qarl
    from qarl.exporting.readers import read_native
    from qarl.types import Prompt

    base = save_tiny_model(directory / "base", "llama", **SIZES)
    prompts = [Prompt(index, tokens, "") for index, tokens in enumerate(PROMPTS)]
    for scheme in schemes:
        qarl.quantize(base, directory / scheme, scheme)
        found = read_native(directory / scheme, prompts, TOKENS, "cpu")
        record = {"prompts": PROMPTS, "responses": found.token_ids, "logprobs": found.logprobs}
        (directory / f"{scheme}.json").write_text(json.dumps(record))


def read(directory: Path) -> dict[str, Any]:
    """vLLM's log-probs of the same tokens, against qarl's."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    import vllm

    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for record in sorted(directory.glob("*.json")):
        try:
            found[record.stem] = _compare(directory / record.stem, json.loads(record.read_text()))
        except Exception as error:  # of one scheme; the others are still of interest
            found[record.stem] = {"error": " ".join(str(error).split())[:400]}
        gc.collect()
    return found


def _compare(checkpoint: Path, record: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    memory = {} if current_platform.is_cpu() else {"gpu_memory_utilization": 0.12}
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
    """Classes of the quantized layers' schemes in vLLM, and of what multiplies there."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    schemes = [module.scheme for module in model.modules() if hasattr(module, "scheme")]
    products = [getattr(s, "kernel", None) or getattr(s, "fp8_linear", None) for s in schemes]
    return sorted({f"{type(s).__name__}/{type(p).__name__}" for s, p in zip(schemes, products, strict=True)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=["make", "read"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--schemes", nargs="+", default=["nvfp4a16", "fp8_block", "w4a16"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.job == "make":
        make(arguments.directory, arguments.schemes)
        return
    found = read(arguments.directory)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
