#!/usr/bin/env python3
"""Tokens per second of supervised fine-tuning and distillation, beside TRL's SFTTrainer and GKDTrainer.

    python tools/bench_supervised.py --job sft distill --scheme bf16 w4a16 --peer --shape qwen3-1.7b --out out.json

Each case runs in a process of its own, on a model with random weights and on the same rows: a short question, and an
answer of --length tokens. A step is one optimizer step over --examples rows. Both sides have float32 master weights,
bf16 products and AdamW; a teacher has the same shape in bf16, and the divergence is GKD's (beta 0.5). Rates are medians
over the steps after the second, of all tokens of the rows.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import MODELS, Record, command_line, count, run_cases


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from model_sizes import SHAPES
    from qarl_formats.registry import scheme_names

    sizes = {"layers": None, "vocabulary": None, "model_dir": MODELS}
    parser = command_line(__doc__, device="cuda", set=[], timeout=math.inf, out=..., case=None, **sizes)
    add = parser.add_argument
    add("--job", nargs="+", choices=("sft", "distill"), default=["sft", "distill"])
    add("--scheme", nargs="+", choices=scheme_names(), default=["bf16", "w4a16"], metavar="SCHEME")
    add("--peer", action="store_true", help="also run TRL")
    add("--shape", choices=list(SHAPES), default="qwen3-1.7b")
    add("--examples", type=count, default=64, help="rows per step")
    add("--length", type=count, default=1024, help="tokens of an answer")
    add("--steps", type=count, default=6)
    add("--device-batch", type=count, default=8, help="TRL's per_device_train_batch_size")
    add("--checkpointing", action="store_true", help="TRL recomputes activations")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> Iterator[Record]:
    for job in options.job:
        for scheme in options.scheme:
            yield {"job": job, "side": "qarl", "scheme": scheme}
        if options.peer:
            yield {"job": job, "side": "trl"}


def write_rows(path: Path, model: Path, examples: int, length: int) -> int:
    """Write rows with answers of about `length` tokens; returns the tokens of all of them with their questions.

    The rows are chats if the tokenizer has a chat template, which that of the tiny model does not.
    """
    from transformers import AutoTokenizer

    tokenizer, draw, total = AutoTokenizer.from_pretrained(model), random.Random(0), 0
    with path.open("w") as file:
        for _ in range(examples):
            ids = [draw.randrange(min(1000, len(tokenizer) // 4), min(40_000, len(tokenizer))) for _ in range(length)]
            answer = tokenizer.decode(tokenizer(tokenizer.decode(ids))["input_ids"][:length])
            turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": answer}]
            if tokenizer.chat_template is None:
                row, whole = {"prompt": turns[0]["content"], "completion": answer}, turns[0]["content"] + answer
                total += len(tokenizer(whole)["input_ids"])
            else:
                row = {"messages": turns}
                total += len(tokenizer.apply_chat_template(turns)["input_ids"])
            file.write(json.dumps(row) + "\n")
    return total


def measure(options: argparse.Namespace, case: Record, place: Path) -> Iterator[Record]:
    """Seconds of each step and the peak memory, in this process."""
    from model_sizes import model_directory, shape_of

    from qarl.policy.device import pick_device

    device = pick_device(options.device)
    options.device = device.type
    shape = shape_of(options.shape, options.layers, options.vocabulary)
    model = model_directory(options.model_dir, options.shape, shape, device, 0)
    rows = place / "rows.jsonl"
    tokens = write_rows(rows, model, options.examples, options.length)
    run = run_qarl if case["side"] == "qarl" else run_trl
    seconds, peak = run(options, case, model, rows, shape)
    timed = seconds[2:] or seconds
    found = {"seconds": seconds, "step_s": statistics.median(timed), "peak_gib": peak, "tokens": tokens}
    del case["rank"]
    yield case | found | {"tokens_per_s": tokens / statistics.median(timed)}


def run_qarl(
    options: argparse.Namespace, case: Record, model: Path, rows: Path, shape: Any
) -> tuple[list[float], float]:
    from model_sizes import quant_section

    from qarl.config.load import make_config
    from qarl.storage.runs import METRICS, read_metrics
    from qarl.training.loop import train

    data = {
        "model": {"path": str(model), "device": options.device, "max_length": options.length + 128},
        "quant": quant_section(case["scheme"], shape.group_size),
        "rollout": {"engine": "data", "n": 1, "max_response_length": options.length + 64},
        "data": {"source": str(rows), "max_prompt_length": 64, "chat_template": '"messages"' in rows.read_text()},
        "objective": {"name": case["job"]},
        "optim": {"lr": 1e-6},
        "train": {"steps": options.steps, "prompts_per_step": options.examples, "run_dir": str(rows.parent / "run")},
        "checkpoint": {"every": options.steps + 1, "save_final": False},
        "logging": {"console": "plain"},
    }
    if case["job"] == "distill":
        data["objective"]["teacher"] = {"path": str(model), "loss": "jsd"}
    code = train(make_config(data, "bench_supervised", list(options.set)))
    assert code == 0, f"the run ended with {code}"
    steps = read_metrics(rows.parent / "run" / METRICS)
    return [step["time/step_s"] for step in steps], steps[-1]["memory/peak_gib"]


def run_trl(
    options: argparse.Namespace, case: Record, model: Path, rows: Path, shape: Any
) -> tuple[list[float], float]:
    import torch
    from datasets import load_dataset
    from step_bench.trl_part import Spent, step_clock, trainer_arguments
    from transformers import AutoTokenizer

    from qarl.training.metrics import peak_memory_gib

    device, seconds = torch.device(options.device), list[float]()
    sizes = (options.steps, options.examples, options.device_batch)
    arguments = trainer_arguments(rows.parent / "trl", *sizes, options.device, options.checkpointing)
    arguments["max_length"] = options.length + 128
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = load_dataset("json", data_files=str(rows), split="train")
    clock = step_clock(Spent(device).now, seconds.append)
    common = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [clock]}
    if case["job"] == "sft":
        from trl import SFTConfig, SFTTrainer

        trainer = SFTTrainer(model=str(model), args=SFTConfig(**arguments), **common)
    else:
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        teacher = arguments["model_init_kwargs"] | {"dtype": "bfloat16"}
        more = {"lmbda": 0.0, "beta": 0.5, "temperature": 1.0, "teacher_model_init_kwargs": teacher}
        config = GKDConfig(**arguments, **more)
        trainer = GKDTrainer(model=str(model), teacher_model=str(model), args=config, **common)
    trainer.train()
    return seconds, peak_memory_gib(device)


def main() -> int:
    options = parse()

    def show(record: Record) -> None:
        print({name: value for name, value in record.items() if name != "seconds"}, flush=True)

    return int(run_cases(options, cases(options), measure, show).failed)


if __name__ == "__main__":
    raise SystemExit(main())
