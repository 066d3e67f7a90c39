"""`python -m qarl.export.vllm_probe REQUEST ANSWER`: what vLLM makes of a checkpoint, in a process of its own.

REQUEST (JSON): {checkpoint, dtype, prompts: [token ids], responses: [token ids], max_tokens, memory_frac, context}.
ANSWER (JSON): {version, note, greedy: [{token_ids, text}], logprobs: [[of each token of a response]], likeliest: how
many tokens of the responses are vLLM's likeliest too}, or {unsupported: why}.
Greedy text and log-probs of the given responses come from one engine without compilation or CUDA graphs. Log-probs are
vLLM's raw ones: natural logarithms at temperature 1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# In process, so that an error is this process's own; nothing is fetched or reported; no kernel compiled on the fly.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def probe(request: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    unsupported, note = known_limits(_quantization(request["checkpoint"]), vllm.__version__)
    if unsupported:
        return {"unsupported": unsupported}
    memory = {} if current_platform.is_cpu() else {"gpu_memory_utilization": request["memory_frac"]}
    engine = LLM(
        request["checkpoint"], dtype=request["dtype"], max_model_len=request["context"], max_num_seqs=8,
        enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True, **memory,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    greedy = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=request["max_tokens"]), use_tqdm=False)
    forced = [
        TokensPrompt(prompt_token_ids=prompt + response)
        for prompt, response in zip(request["prompts"], request["responses"], strict=True)
    ]
    scored = engine.generate(forced, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs, likeliest = [], 0
    for output, response in zip(scored, request["responses"], strict=True):
        tail = output.prompt_logprobs[-len(response) :]
        chosen = [entry[token] for entry, token in zip(tail, response, strict=True)]
        logprobs.append([entry.logprob for entry in chosen])
        likeliest += sum(entry.rank == 1 for entry in chosen)
    return {
        "version": vllm.__version__,
        "note": note,
        "greedy": [{"token_ids": list(o.outputs[0].token_ids), "text": o.outputs[0].text} for o in greedy],
        "logprobs": logprobs,
        "likeliest": likeliest,
    }


def known_limits(quantization: dict[str, Any] | None, version: str) -> tuple[str, str]:
    """(why vLLM cannot run the format on this device, what it does otherwise than the format says); "" where nothing.

    Read in vLLM's sources (0.24 and 0.32: `compressed_tensors.py`, `kernels/linear`) and seen on these devices.
    """
    import torch
    from vllm.platforms import current_platform

    if quantization is None:
        return "", ""
    group = quantization["config_groups"]["group_0"]
    weights, activations = group["weights"], group["input_activations"]
    packed = quantization["format"] == "pack-quantized"
    if current_platform.is_cpu():
        if packed and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
            unpacked = "" if activations is None else "; export it with --unpacked"
            return f"vLLM {version} has no kernel for packed int4 weights on this CPU, it needs AVX-512{unpacked}", ""
        if packed and activations is not None:
            return "", "its kernel for packed int4 weights leaves activations unquantized"
        if weights["type"] == "int" and weights["num_bits"] == 8:
            error = cpu_int8_error()
            return "", f"its int8 product is off by {error:.0%} on this CPU" if error > 0.01 else ""
    elif weights["num_bits"] == 4 and activations is not None and activations["type"] == "int":
        if weights["group_size"] != 128:
            return f"vLLM {version} has no kernel for int4 weights with int8 activations on this GPU", ""
        return "", "it quantizes activations to FP8 here, where the format says int8"
    return "", ""


def cpu_int8_error() -> float:
    """Relative error of vLLM's int8 product on random codes. Exact on CPUs with VNNI; others may saturate."""
    import torch
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (8, 576), dtype=torch.int8, generator=generator)
    weight = torch.randint(-127, 128, (256, 576), dtype=torch.int8, generator=generator)
    exact = x.double() @ weight.double().t()
    found = torch.zeros(8, 256, dtype=torch.bfloat16)
    transposed, weight_scale, scale = weight.t(), torch.ones(256, 1), torch.ones(8, 1)
    handle = ops.create_onednn_scaled_mm(transposed, weight_scale, found.dtype, True, False, 1)
    ops.onednn_scaled_mm(handle, x, found, scale, None, None, None)
    # vLLM's handle keeps addresses, not references: the operands must outlive the product.
    del transposed, weight_scale, scale
    return float((found.double() - exact).norm() / exact.norm())


def _quantization(checkpoint: str) -> dict[str, Any] | None:
    return json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8")).get("quantization_config")


if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    answer = probe(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
