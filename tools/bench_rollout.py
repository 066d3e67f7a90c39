#!/usr/bin/env python3
"""Measure tokens per second of qarl's engines, native and vLLM, and of Hugging Face `generate`.

    python tools/bench_rollout.py --out out.json                # SmolLM2-135M on a CPU
    python tools/bench_rollout.py --device cuda --shape qwen3-8b --vocabulary 151936 --batch 8 64 256 --native --hf \\
        --vllm w4a16 --numerics exact fast --prompt-tokens 128 --new-tokens 256 --out out.json

Each combination of model, batch size and scheme (or dtype) gets a row and runs in its own process; vLLM starts once for
all batch sizes. After one warm-up run, the result is the median of `--repeats` timed runs. Every sequence generates
exactly `--new-tokens` tokens, sampled at temperature 1. GFLOP/s counts the products that any engine needs: linears for
every token, the output layer for each sampled token, attention. qarl's engines also return the log-prob of every token.
Models have random weights, made on the device. `tools/bench_step.py --part step` measures publish and sleep of vLLM.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Record, aligned, command_line, count, failures, positive, run_cases

# isort: split
import torch
from model_sizes import SHAPES, Shape, quant_section, random_model, shape_of
from qarl_formats.registry import make_scheme, scheme_names
from qarl_formats.scheme import is_ignored
from tiny_models import byte_tokenizer, tiny_settings

from qarl.config import Config, QuantConfig, RolloutConfig
from qarl.policy.device import pick_device, use_kernels
from qarl.policy.policy import Policy
from qarl.policy.skeleton import linear_names, skeleton
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.training.flops import forward_flops
from qarl.training.metrics import peak_memory_gib
from qarl.types import Prompt
from qarl.utils.machine import keep_freed_memory
from qarl.weight_sync.quantize import quantize_parameter
from qarl.weight_sync.snapshot import build_snapshot

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUMERICS = ("exact", "fast", "invariant")
STD = 0.02  # standard deviation of random weights

Generate = Callable[[int], int]  # tokens of a response -> tokens generated


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, device="cpu", vocabulary=None, timeout=1800.0, out=..., case=None)
    add = parser.add_argument
    add("--shape", nargs="+", choices=list(SHAPES), default=["smollm2"], help="model shapes; default %(default)s")
    add("--batch", type=count, nargs="+", default=[32])
    add("--native", nargs="*", choices=scheme_names(), default=["bf16", "w4a16"], help="schemes of the native engine")
    add("--hf", nargs="*", choices=list(DTYPES), default=["bf16", "fp32"], help="dtypes of Hugging Face generate")
    add("--vllm", nargs="*", choices=scheme_names(), default=[], help="schemes of vLLM")
    numerics = "rollout.numerics of vLLM; invariant: fast with VLLM_BATCH_INVARIANT=1"
    add("--numerics", nargs="+", choices=NUMERICS, default=["exact", "fast"], help=numerics)
    add("--memory-frac", type=positive, default=0.45, help="fraction of the GPU's memory for vLLM")
    add("--prompt-tokens", type=count, default=32)
    add("--new-tokens", type=count, default=64)
    add("--repeats", type=count, default=3)
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> Iterator[Record]:
    """Yield the cases, which each run in their own process."""
    for model in options.shape:
        for engine, variants in (("native", options.native), ("hf", options.hf)):
            for batch in options.batch:
                yield from ({"engine": engine, "model": model, "variant": v, "batch": [batch]} for v in variants)
        for scheme in options.vllm:
            for numerics in options.numerics:
                labels = {"variant": scheme, "numerics": numerics, "batch": options.batch}
                yield {"engine": "vllm", "model": model} | labels


def main() -> int:
    options = parse()
    records = run_cases(options, cases(options), measure).content["records"]
    names = ("tokens_per_s", "decoding_per_s", "first_token_s", "gflop_per_s")
    lines = [["", "batch", *names]]
    for row in (row for row in records if "error" not in row):
        name = " ".join(row[key] for key in ("engine", "model", "variant", "numerics") if key in row)
        lines.append([name, str(row["batch"]), *(f"{row[key]:.2f}" for key in names)])
    print("\n".join([*aligned(lines), *(failed := failures(records))]))
    return int(bool(failed))


def measure(options: argparse.Namespace, case: Record, place: Path) -> Iterator[Record]:
    """Yield one row per batch size.

    decoding_per_s: Rate of all tokens except each sequence's first. first_token_s: Time until every sequence has one
    token. start_s: Time until vLLM has its weights.
    """
    options.device = pick_device(options.device).type
    if options.device == "cpu":
        keep_freed_memory()
    new_tokens, tokenizer = options.new_tokens, byte_tokenizer(False)
    shape = shape_of(case["model"], None, options.vocabulary)
    labels = {name: value for name, value in case.items() if name != "batch"}
    labels |= {"prompt_tokens": options.prompt_tokens, "new_tokens": new_tokens}
    with ExitStack() as stack:
        if case["engine"] == "vllm":
            start, run_of = vllm(options, case, shape, tokenizer, place, stack)
            labels |= start
        for batch in case["batch"]:
            prompts = prompts_of(options, batch)
            if case["engine"] == "native":
                run = native(policy_of(options, shape, case["variant"]), tokenizer, prompts)
            elif case["engine"] == "hf":
                run = hugging_face(options, shape, case["variant"], prompts)
            else:
                run = run_of(batch)
            run(new_tokens)
            seconds = [timed(run, new_tokens, batch) for _ in range(options.repeats)]
            first_token = statistics.median(timed(run, 1, batch) for _ in range(options.repeats))
            middle = statistics.median(seconds)
            # Products for a prompt and its response; the last sampled token is not run.
            lengths = [range(options.prompt_tokens)], [range(new_tokens)]
            yield labels | {
                "batch": batch,
                "tokens_per_s": batch * new_tokens / middle,
                "decoding_per_s": batch * (new_tokens - 1) / max(middle - first_token, 1e-9),
                "first_token_s": first_token,
                "gflop_per_s": batch * forward_flops(shape.architecture(), *lengths) / middle / 1e9,
                "all_seconds": seconds,
                "peak_gib": peak_memory_gib(torch.device(options.device)),
            }


def prompts_of(options: argparse.Namespace, batch: int) -> list[list[int]]:
    """Return random token ids without the special tokens of `byte_tokenizer`."""
    return torch.randint(3, 259, (batch, options.prompt_tokens)).tolist()


def policy_of(options: argparse.Namespace, shape: Shape, scheme: str) -> Policy:
    """Make a policy for inference, with one float32 master weight in memory at a time."""
    device, dtype = torch.device(options.device), torch.bfloat16
    quant = QuantConfig(**quant_section(scheme, shape.group_size))
    kind, model = make_scheme(scheme, quant.group_size), skeleton(shape.config())
    linears, kernels, forms = set(linear_names(model)), use_kernels(quant, kind, dtype, device), []
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        low_bit = kind.quantized and module in linears and not is_ignored(module, quant.ignore)
        master = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0, device=device)
        if parameter.dim() > 1:
            master.normal_(0.0, STD, generator=generator)
        forms.append((name, quantize_parameter(name, master, kind if low_bit else None, dtype, 0, kernels)))
    context = options.prompt_tokens + options.new_tokens
    return Policy(model, kind, quant, dtype, device, context, build_snapshot(0, forms))


def timed(run: Generate, new_tokens: int, batch: int) -> float:
    """Return the seconds that a run takes."""
    start = time.perf_counter()
    generated = run(new_tokens)
    seconds = time.perf_counter() - start
    assert generated == batch * new_tokens, f"generated {generated} tokens"
    return seconds


def generating(engine: Any, version: int, prompts: Callable[[], list[list[int]]]) -> Generate:
    """Return a function that generates once with one of qarl's engines. prompts: Called before each run."""

    def run(new_tokens: int) -> int:
        batch = [Prompt(i, token_ids, "", {}) for i, token_ids in enumerate(prompts())]
        sampling = SamplingParams(n=1, seed=0, max_response_length=new_tokens)
        return sum(len(r.token_ids) for r in engine.generate(batch, sampling, version))

    return run


def native(policy: Policy, tokenizer, prompts: list[list[int]]) -> Generate:
    """Return a function that generates once with the native engine."""
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(max_num_seqs=len(prompts)))
    engine.publish(policy.current)
    return generating(engine, policy.version, lambda: prompts)


def vllm(
    options: argparse.Namespace, case: Record, shape: Shape, tokenizer, place: Path, stack: ExitStack
) -> tuple[Record, Callable[[int], Generate]]:
    """Start vLLM. Return the time that this took, and a function from a batch size to a function that generates once.

    Each run has new prompts, so that none is in the prefix cache."""
    from qarl.rollout.vllm.engine import VLLMEngine
    from qarl.weight_sync.sender import WeightSender

    if case["numerics"] == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    policy = policy_of(options, shape, case["variant"])
    canary = torch.randint(3, 259, (2, min(64, options.prompt_tokens + options.new_tokens - 1))).tolist()
    weights = WeightSender(policy.sampler.layout, tokenizer, policy.sampler, canary, print)
    config = vllm_config(options, case, policy.quant, place)
    engine = VLLMEngine(config, policy.sampler.layout, tokenizer, weights, place, print)
    stack.callback(engine.close)
    start = time.perf_counter()
    engine.publish(policy.current)
    started = {"start_s": time.perf_counter() - start, "phases": engine.phases}
    return started, lambda batch: generating(engine, policy.version, lambda: prompts_of(options, batch))


def vllm_config(options: argparse.Namespace, case: Record, quant: QuantConfig, place: Path) -> Config:
    """Return the configuration of such a run. place: Directory for the sampler's log and checkpoint."""
    on_gpu, sequences = options.device == "cuda", max(case["batch"])
    rollout = {
        "engine": "vllm",
        "numerics": "exact" if case["numerics"] == "exact" else "fast",
        "max_response_length": options.new_tokens,
        "max_num_seqs": sequences,
        "max_batched_tokens": max(8192 if on_gpu else 512, sequences),
        "ignore_eos": True,
        "vllm": {"memory_frac": options.memory_frac, "max_restarts": 0, "enforce_eager": not on_gpu},
    }
    sections = {
        "model": {"device": options.device},
        "data": {"max_prompt_length": options.prompt_tokens},
        "train": {"micro_batch_tokens": 1024, "recompute": "layer", "run_dir": str(place)},
    }
    settings = tiny_settings(Path("random/model"), rollout=rollout, **sections)
    return Config.model_validate(settings | {"quant": quant.model_dump()})


def hugging_face(options: argparse.Namespace, shape: Shape, dtype: str, prompts: list[list[int]]) -> Generate:
    """Return a function that generates once with transformers."""
    from transformers import GenerationConfig

    model = random_model(shape, torch.device(options.device), 0).to(DTYPES[dtype])
    inputs = torch.tensor(prompts, device=options.device)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    sampling |= {"eos_token_id": None, "pad_token_id": 0}

    def run(new_tokens: int) -> int:
        model.generation_config = GenerationConfig(**sampling, max_new_tokens=new_tokens)
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs))
        return out[:, inputs.shape[1] :].cpu().numel()

    return run


if __name__ == "__main__":
    sys.exit(main())
