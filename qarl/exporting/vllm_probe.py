"""`python -m qarl.exporting.vllm_probe REQUEST ANSWER`: run vLLM on a checkpoint, in a separate process.

REQUEST (JSON): {checkpoint, dtype, experts, prompts: [token ids], responses: [token ids], max_tokens, memory_frac,
context}.
ANSWER (JSON): {version, note, greedy: [token ids], logprobs: [[one per token of a response]], likeliest: number of
response tokens that vLLM finds most likely}, or {unsupported: reason}.
One engine samples `greedy` and scores the responses, without compilation or CUDA graphs. Log-probs are in nats, at
temperature 1.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from qarl.rollout.vllm.own_kernels.limits import import_model_class, known_limits, request_amx
from qarl.rollout.vllm.sandbox import keep_compiled_code_private, without_listening_sockets
from qarl.rollout.vllm.settings import ENVIRONMENT as COMMON

ENVIRONMENT = COMMON | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Return the ANSWER to a REQUEST."""
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    config = json.loads((Path(request["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    unsupported, note = known_limits(config.get("quantization_config"), vllm.__version__, request["experts"])
    if unsupported:
        return {"unsupported": unsupported}
    memory = {} if current_platform.is_cpu() else {"gpu_memory_utilization": request["memory_frac"]}
    keep_compiled_code_private()
    request_amx()
    import_model_class(Path(request["checkpoint"]))
    with without_listening_sockets("gloo" if current_platform.is_cpu() else "nccl"):
        engine = LLM(
            request["checkpoint"],
            dtype=request["dtype"],
            max_model_len=request["context"],
            max_num_seqs=8,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **memory,
        )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    greedy = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=request["max_tokens"]), use_tqdm=False)
    forced = [
        TokensPrompt(prompt_token_ids=prompt + response)
        for prompt, response in zip(request["prompts"], request["responses"], strict=True)
    ]
    scored = engine.generate(forced, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs, likeliest = [], 0
    for output, response in zip(scored, request["responses"], strict=True):
        scores: Any = output.prompt_logprobs  # vLLM has two types for it; without flat_logprobs it is a list of dicts
        tail = scores[-len(response) :]
        chosen = [entry[token] for entry, token in zip(tail, response, strict=True)]
        logprobs.append([entry.logprob for entry in chosen])
        likeliest += sum(entry.rank == 1 for entry in chosen)
    return {
        "version": vllm.__version__,
        "note": note,
        "greedy": [list(output.outputs[0].token_ids) for output in greedy],
        "logprobs": logprobs,
        "likeliest": likeliest,
    }


if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    answer = probe(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
