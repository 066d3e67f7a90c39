"""`python kernels_in_vllm.py CHECKPOINT ANSWER`: vLLM with qarl's kernels, in a process of its own.

ANSWER (JSON): see `main`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from qarl_formats.compressed import quantization_config
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.weight import quantize_weight
from qarl_kernels.logprob import Truncation

from qarl.exporting.vllm_probe import ENVIRONMENT
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.rollout.engine import SamplingParams
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.launch import drawing_of
from qarl.rollout.vllm.settings import Request

TEXTS = (
    "The capital of France is Paris.",
    "Once upon a time, there was a little girl who lived in a small village near the forest. Every day she walked to "
    "the river to fetch water for her family.",
    "To add two numbers in Python, define a function that takes two arguments and returns their sum: def add(a, b): "
    "return a + b",
)
TRUNCATIONS = {
    "temperature": Truncation(0.7),
    "min_p": Truncation(0.7, min_p=0.3),
    "top_k": Truncation(0.8, top_k=20),
    "top_p": Truncation(top_p=0.8),
    "all": Truncation(0.8, top_k=20, top_p=0.9, min_p=0.05),
}
DTYPE = torch.bfloat16


def main(checkpoint: str, answer: str) -> None:
    from vllm import LLM

    from qarl.rollout.vllm.own_kernels.head import use_float32_head
    from qarl.rollout.vllm.own_kernels.linear_kernels import kernel_of
    from qarl.rollout.vllm.own_kernels.numerics import unserved
    from qarl.rollout.vllm.plugin import register

    register()
    engine = LLM(
        checkpoint,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
    )
    runner = engine.collective_rpc(lambda worker: getattr(worker, "worker", worker))[0].model_runner
    model = runner.get_model()
    texts = sequences(engine.get_tokenizer())
    before = scores(engine, texts)
    head = use_float32_head(model)
    opened = open_policy(resolve_target(checkpoint), device="cpu")
    snapshot = dict(opened.policy.current.tensors)
    first = scores(engine, texts)
    expected = learner_scores(opened.policy, texts)

    logits_equal = {"first": same_logits(model, opened.policy)}
    changed = {name: t * 2 if name == "model.layers.1.mlp.up_proj.weight_scale" else t for name, t in snapshot.items()}
    changed["model.embed_tokens.weight"] = -snapshot["model.embed_tokens.weight"]
    load(runner, head, changed)
    other = scores(engine, texts)
    logits_equal["changed"] = same_logits(model, opened.policy)
    load(runner, head, snapshot)
    logits_equal["reloaded"] = same_logits(model, opened.policy)
    linears = {name: (module, kernel_of(module)) for name, module in model.named_modules() if kernel_of(module)}
    found = {
        "unserved": unserved(model),
        "served": sorted({type(kernel).__name__ for _, kernel in linears.values()}),
        "layers": len(linears),
        "rounded_logits_delta": gap(before, expected),
        "delta": gap(first, expected),
        "logits_equal": logits_equal,
        "changed_delta": gap(first, other),
        "reloaded_equal": scores(engine, texts) == first,
        "not_as_published": [name for name, pair in linears.items() if not as_published(name, *pair, snapshot)],
        "truncated": {name: reported(engine, opened.policy, cut) for name, cut in TRUNCATIONS.items()},
        "schemes": {name: scheme_agrees(engine, name) for name in scheme_names()},
    }
    Path(answer).write_text(json.dumps(found))


def sequences(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in TEXTS]


def scores(engine, texts: list[list[int]]) -> list[list[float]]:
    """Log-probs of all tokens but the first of each sequence."""
    import vllm
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in texts]
    params = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)]
        for o, ids in zip(outputs, texts, strict=True)
    ]


@torch.no_grad()
def learner_scores(policy, texts: list[list[int]]) -> list[list[float]]:
    pairs = [(ids[:1], ids[1:]) for ids in texts]
    return [policy.logprobs([p], [r], Truncation(), 64)[0].tolist() for p, r in pairs]


@torch.no_grad()
def reported(engine, policy, cut: Truncation) -> dict[str, float]:
    """How far the log-probs of drawn tokens are from the learner's under the same truncation, and under none.

    Tokens that one side alone cuts off, at the edge of the truncation, are counted and left out.
    """
    host = Host.__new__(Host)  # its mapping of sampling parameters, on this engine
    host._llm = engine
    prompts = [[5 + i, 70, 90 + i] for i in range(8)]
    drawing = drawing_of(SamplingParams(1, 0, 16, cut))
    responses = host.generate([Request(ids, i) for i, ids in enumerate(prompts)], drawing, lambda done, tokens: None)
    found = torch.tensor([logprob for response in responses for logprob in response.logprobs])
    tokens = [response.token_ids for response in responses]
    same, none = ((found - policy.logprobs(prompts, tokens, t, 64)[0]).abs() for t in (cut, Truncation()))
    kept = same < 10
    return {"mean": same[kept].mean().item(), "untruncated": none.mean().item(), "edge": (~kept).sum().item()}


@torch.inference_mode()
def same_logits(model, policy) -> bool:
    """Whether vLLM's output layer gives the learner's logits of the same hidden states, bit for bit, in float32."""
    width = model.config.hidden_size
    hidden = torch.randn(7, width, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    found = model.compute_logits(hidden)
    return found.dtype == torch.float32 and torch.equal(found, policy.sampler.logits(hidden))


def gap(one: list[list[float]], other: list[list[float]]) -> dict[str, float]:
    deltas = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return {"mean": sum(deltas) / len(deltas), "max": max(deltas)}


def load(runner, head, tensors: dict[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        runner.reload_weights(weights_iterator=iter(tensors.items()))
        head.refresh()


def as_published(name: str, layer, kernel, snapshot: dict[str, torch.Tensor]) -> bool:
    """Whether the layer gives back the snapshot's tensors, bit for bit."""
    parent, _, last = name.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
    return all(
        torch.equal(tensor, torch.cat([snapshot[f"{parent}.{part}.{suffix}"] for part in parts]))
        for suffix, tensor in kernel.published(layer).items()
    )


def scheme_agrees(engine, name: str) -> bool:
    """Whether a fused layer that vLLM builds for the scheme has the bits of the learner's operands."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    scheme = make_scheme(name, 64 if name[:2] == "w4" else None, symmetric=name != "w4a16")
    if scheme.quantized:
        text = quantization_config(scheme, ["lm_head"])
        config = get_quantization_config("compressed-tensors").from_config(text)
    else:
        config = get_quantization_config("qarl-dense").from_config({})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with set_current_vllm_config(engine.llm_engine.vllm_config), set_default_torch_dtype(DTYPE):
        heads, kv = (10, 4) if scheme.row_block > 1 else (9, 3)  # of 64; whole blocks of rows, or SmolLM2's
        layer = QKVParallelLinear(576, 64, heads, kv, bias=True, quant_config=config, prefix="model.layers.0.qkv_proj")
        generator = torch.Generator().manual_seed(1)
        widths = (64 * heads, 64 * kv, 64 * kv)
        masters = [torch.randn(width, 576, generator=generator, dtype=torch.float32) * 0.05 for width in widths]
        shared, biases, weights = scheme.shared(masters), [], []
        for shard, width, master in zip("qkv", widths, masters, strict=True):
            weights.append(
                quantize_weight(master, scheme, shard, shared=shared) if scheme.quantized else master.to(DTYPE)
            )
            biases.append(torch.randn(width, generator=generator).to(DTYPE))
            layer.bias.weight_loader(layer.bias, biases[-1], shard)
            tensors = weights[-1].tensors if scheme.quantized else {"weight": weights[-1]}
            for suffix, tensor in tensors.items():
                parameter = getattr(layer, suffix)
                parameter.weight_loader(parameter, tensor, shard)
        layer.quant_method.process_weights_after_loading(layer)
    for m in (1, 7, 64):
        x = torch.randn(m, 576, generator=generator).to(DTYPE)
        y = layer(x)[0]
        wanted = [weight.prepare(DTYPE).matmul(x, bias) for weight, bias in zip(weights, biases, strict=True)]
        if not torch.equal(y, torch.cat(wanted, -1)):
            return False
    return True


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT | {"QARL_VLLM_KERNELS": "qarl", "VLLM_USE_V2_MODEL_RUNNER": "0"})
    main(sys.argv[1], sys.argv[2])
