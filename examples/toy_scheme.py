"""A quantization scheme of your own, in one file: int8 weights with a scale per row, 16-bit activations (w8a16).

    python examples/toy_scheme.py MODEL OUT

registers it, trains one step of a model with it, exports the run, and compares it offline with built-in schemes. MODEL
is a directory or `package:NAME` (a small model: this runs on the CPU).

`ByteCodes` has the rest: it stores one code per byte and a scale per row. By default, sampler and learner multiply the
dequantized weight in a row-invariant dense product. A scheme with a product of its own overrides `operands`,
`plain_product` and `kernel_product`; one with other tensors subclasses `qarl_formats.scheme.Scheme` itself and adds
`tensor_specs`, `quantize`, `dequantize` and `codes`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from qarl_formats.registry import register
from qarl_formats.schemes.bytes import ByteCodes


@register
class W8A16(ByteCodes):
    """Stored: `weight` int8 [N, K] and `weight_scale` [N, 1]. y = x @ W^T, W = codes * scale rounded to x's dtype."""

    name = "w8a16"
    description = "int8 weights, a scale per row; 16-bit activations"
    weight_type = "int"  # codes are rounded as compressed-tensors rounds int8; "float": as it rounds e4m3
    file_format = "int-quantized"  # compressed-tensors' name for one code per byte
    tolerance = 0.1  # mean |delta log-prob| up to which `qarl export --verify` accepts another program


def configuration(model: str, run_dir: Path) -> dict:
    return {
        "model": {"path": model},
        "quant": {"scheme": W8A16.name},
        "rollout": {"n": 4, "max_response_length": 8, "max_num_seqs": 8},
        "data": {"source": "task:arithmetic", "max_prompt_length": 64},
        "reward": {"functions": [{"name": "length", "options": {"target": 4}}]},
        "objective": {"name": "grpo"},
        "optim": {"lr": 1e-3},
        "train": {"steps": 1, "prompts_per_step": 2, "run_dir": str(run_dir)},
    }


def qarl(*arguments: object) -> None:
    """A `qarl` command in this process, where the scheme is known."""
    from qarl.cli import app

    if code := app(args=[str(argument) for argument in arguments], standalone_mode=False):
        raise SystemExit(code)


def main(model: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = out / "w8a16.yaml"
    config.write_text(yaml.safe_dump(configuration(model, out / "run")))
    qarl("train", config)
    qarl("export", out / "run", out / "export")
    qarl("compare", "--offline", model, "--schemes", "bf16,w8a16,w8a8", "--max-tokens", 256, "--out", out / "compare")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: toy_scheme.py MODEL DIR")
    main(sys.argv[1], Path(sys.argv[2]))
