"""A quantization scheme of one's own, in one file: int8 weights with a scale a row, activations as they are (w8a16).

    python examples/toy_scheme.py MODEL OUT

registers it, trains one step of a model with it, exports the run, and compares it offline with schemes that come with
qarl. MODEL: a directory or `package:NAME` (a small model: this runs on the CPU). Another format than bytes with scales
would subclass `qarl_formats.scheme.Scheme` itself, which says what each method is for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from qarl_formats import rounding
from qarl_formats.registry import register
from qarl_formats.schemes.bf16 import BF16
from qarl_formats.schemes.bytes import ByteCodes
from torch import Tensor


@register
class W8A16(ByteCodes):
    """Stored: `weight` int8 [N, K] and `weight_scale` [N, 1]. y = x @ W^T, W = codes * scale rounded to x's dtype."""

    name = "w8a16"
    description = "int8 weights, a scale a row; activations in 16 bits"
    weight_type = "int"
    file_format = "int-quantized"  # what compressed-tensors calls one code a byte
    tolerance = 0.1  # mean |delta log-prob| up to which `qarl export --verify` accepts another program

    def _by_torch(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """A float32 master [N, K] -> codes, scale, and how many rows are not finite."""
        scaled, scale, bad = rounding.symmetric(weight, rounding.INT8, scale_dtype)
        return rounding.integers(scaled, rounding.INT8), scale, bad

    def _by_kernel(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The same on a GPU, by Triton."""
        from qarl_kernels.quantize import quantize_int8

        return quantize_int8(weight, scale_dtype)

    @classmethod
    def multiply(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, bias: Tensor | None, kernels: bool
    ) -> Tensor:
        """The product of sampler and learner: here the row-invariant one of an unquantized weight."""
        values = (operands["weight"].float() * operands["weight_scale"].float()).to(x.dtype)
        return BF16.multiply(x, {"weight": values if kernels else values.float()}, out_features, bias, kernels)


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
