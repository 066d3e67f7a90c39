#!/usr/bin/env python3
"""What an RL step costs: the learner, the optimizer and the whole step, beside Hugging Face's model and TRL.

    python tools/bench_step.py --part learner hf --shape qwen3-1.7b --length 512 2048 8192 --out out.json
    python tools/bench_step.py --part step trl --shape qwen3-1.7b --scheme w4a16 --out out.json
    python tools/bench_step.py --part step --shape qwen3-8b --scheme w4a16 --nproc 2 --out out.json
    python tools/bench_step.py --table out.json...

Each case (a part, shape and scheme) runs in a process of its own on a model with random weights; its output goes to a
log beside the result. Parts:
  learner    forward, and forward and backward, of one micro-batch through qarl's policy
  hf         the same tokens through the Hugging Face model: autocast bf16, SDPA, logits of the whole batch
  optimizer  an optimizer step on the masters with its quantization, and its parts
  step       training steps with exactly --new-tokens per response, as `qarl train` runs them
  trl        the same with TRL 1.16's GRPOTrainer and vLLM in its process
Times are medians after a warm-up. The result is written after every case.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from harness import MODELS, Record, command_line, count, positive, read_reports, run_cases

PARTS = {
    "learner": "learner_part",
    "hf": "learner_part",
    "optimizer": "learner_part",
    "step": "step_part",
    "trl": "trl_part",
}
SCHEMED = ("learner", "optimizer", "step")  # parts that run once per scheme
MODES = ("elementwise", "mlp", "products", "layer")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from model_sizes import SHAPES
    from qarl_formats.registry import scheme_names

    sizes = {"layers": None, "vocabulary": None, "model_dir": MODELS}
    files = {"timeout": 1800.0, "out": None, "table": None, "case": None}
    parser = command_line(__doc__, device="auto", set=[], **sizes, **files)
    add = parser.add_argument
    add("--part", nargs="+", choices=list(PARTS), default=["learner", "hf"], metavar="PART", help=", ".join(PARTS))
    add("--shape", nargs="+", choices=list(SHAPES), default=["qwen3-1.7b"], help="of the model")
    add("--scheme", nargs="+", choices=scheme_names(), default=["bf16", "w4a16", "w8a8", "fp8"], metavar="SCHEME")
    add("--recompute", choices=MODES, default="layer", help="what the backward computes again")
    add("--tokens", type=count, default=16_384, help="of a micro-batch")
    add("--warmup", type=int, default=3, help="calls that are not timed")
    add("--iterations", type=count, default=5, help="calls that are timed")
    add("--hf-head", choices=("logits", "trl"), default="logits", help="hf: logits of the whole batch, or TRL's chunks")
    add("--hf-dtype", choices=("float32", "bfloat16"), default="float32", help="hf: of the weights")
    add("--length", type=count, nargs="+", default=[512, 2048, 8192], help="learner and hf: tokens of a sequence")
    step = parser.add_argument_group("step and trl")
    step.add_argument("--steps", type=count, default=3, help="training steps; medians leave out the first")
    step.add_argument("--prompts", type=count, default=32, help="of a step")
    step.add_argument("--responses", type=count, default=8, help="to each prompt")
    step.add_argument("--new-tokens", type=count, default=1024, help="exactly so many per response")
    tail = "end responses at random, with this mean, so that their lengths have a long tail; --new-tokens is the limit"
    step.add_argument("--mean-tokens", type=count, help=tail)
    step.add_argument("--prompt-tokens", type=count, default=512, help="the longest prompt that fits")
    frac = "share of the GPU for vLLM; default 0.4, or with rollout.async qarl's for a GPU of its own"
    step.add_argument("--memory-frac", type=positive, help=frac)
    step.add_argument("--nproc", type=count, default=1, help="step: ranks, with a GPU each")
    step.add_argument("--engine", choices=("vllm", "native"), help="of qarl; default vllm on a GPU")
    step.add_argument("--device-batch", type=count, default=8, help="TRL's per_device_train_batch_size")
    server = "trl: vLLM is a server on this GPU; give the trainer another one with CUDA_VISIBLE_DEVICES"
    step.add_argument("--server-gpu", type=int, metavar="GPU", help=server)
    parsed = parser.parse_args(arguments)
    if parsed.table is None and parsed.out is None and parsed.case is None:
        parser.error("--out is needed, or --table")
    responses = parsed.prompts * parsed.responses
    if "trl" in parsed.part and responses % parsed.device_batch:
        parser.error(f"--device-batch {parsed.device_batch} does not divide {responses} responses")
    if "trl" in parsed.part and parsed.nproc > 1:
        parser.error("--part trl runs in one process: leave --nproc out")
    return parsed


def cases(options: argparse.Namespace) -> Iterator[Record]:
    """Part and shape, with scheme if the part has one, in the order of the command line."""
    for part in options.part:
        for shape in options.shape:
            for scheme in options.scheme if part in SCHEMED else (None,):
                yield {"part": part, "shape": shape} | ({} if scheme is None else {"scheme": scheme})


def run_part(options: argparse.Namespace, case: Record, place: Path) -> Iterator[Record]:
    """Measure a case, in its own process. place: A directory for its files, whose logs are shown if it fails."""
    from model_sizes import shape_of

    from qarl.policy.device import pick_device
    from qarl.utils.machine import keep_freed_memory

    options = argparse.Namespace(**(vars(options) | case))
    options.place = place
    device = pick_device(options.device)
    options.device = device.type
    if device.type == "cpu":
        keep_freed_memory()
    shape = shape_of(options.shape, options.layers, options.vocabulary)
    labels = case | {"layers": shape.layers, "vocabulary": shape.vocabulary, "recompute": options.recompute}
    if options.set and options.part in SCHEMED:
        labels["set"] = options.set
    if options.part in ("step", "trl"):
        labels |= {"prompts": options.prompts, "responses": options.responses, "ranks": options.nproc}
    part: Callable[..., Iterator[Record]] = getattr(
        import_module(f"step_bench.{PARTS[options.part]}"), f"{options.part}_records"
    )
    for record in part(options, shape, device):
        yield labels | record


def main() -> int:
    from step_bench.summary import table

    options = parse()
    if options.table is not None:
        print(table(read_reports(options.table)))
        return 0
    own_head = "hf" in options.part and options.hf_head == "trl"
    if ("trl" in options.part or own_head) and find_spec("trl") is None:
        sys.exit(f"error: {'--hf-head' if own_head else '--part'} trl needs TRL: pip install trl")
    report = run_cases(options, cases(options), run_part)
    print(table([report.content]))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
