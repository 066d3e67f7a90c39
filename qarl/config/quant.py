"""Which low-bit scheme the sampler runs, and how much of it the learner shares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from qarl_formats.scheme import Scheme, is_ignored, make_scheme

from qarl.config.base import Fault, Field, Section
from qarl.config.limits import ITEMS, NAME

WEIGHT_INT4 = ("w4a16", "w4a8")
QUANTIZED_ACTIVATIONS = ("w8a8", "fp8", "w4a8")


class QuantConfig(Section):
    """Quantization. The four regimes: scheme bf16 is BF16 RL; otherwise `learner` chooses quantized-rollout training
    (full_precision), QAT (fake_quant) or QaRL (aligned)."""

    scheme: Literal["bf16", "w4a16", "w8a8", "fp8", "w4a8"] = Field(
        "w4a16", description="What the sampler runs. Weights: per group (w4*) or channel; activations: per token."
    )
    group_size: Literal[32, 64, 128, -1] | None = Field(
        None,
        description="Input features that share a scale, for w4a16 and w4a8 (default 128; -1: one group per channel); "
        "must divide the input size of every quantized layer. Null for other schemes.",
    )
    symmetric: bool = Field(True, description="No zero points; false only for w4a16.")
    grid: Literal["compressed-tensors", "symmetric7"] = Field(
        "compressed-tensors",
        description="int4 grid: codes [-8, 7] with absmax / 7.5, or [-7, 7] with absmax / 7 (symmetric w4* only).",
    )
    scale_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Stored dtype of the scales; codes are computed with the rounded scale."
    )
    ignore: list[Annotated[str, Field(max_length=NAME)]] = Field(
        ["lm_head"],
        max_length=ITEMS,
        description="Linear layers left unquantized: exact HF module names, or `re:<regex>`.",
    )
    learner: Literal["aligned", "fake_quant", "full_precision"] = Field(
        "aligned",
        description="The learner's forward: the sampler's low-bit arithmetic (aligned), dequantized weights in an "
        "ordinary GEMM (fake_quant), or unquantized weights (full_precision).",
    )
    ste_input: Literal["unquantized", "dequantized"] = Field(
        "unquantized",
        description="Which input the straight-through weight gradient uses; dequantized only where activations are "
        "quantized.",
    )
    kernels: Literal["auto", "reference"] = Field(
        "auto",
        description="auto: Triton kernels on CUDA (bfloat16 and float16); reference: the plain-torch products, for "
        "debugging. The CPU, and model.dtype float32, have only the latter.",
    )

    def faults(self) -> Iterator[Fault]:
        int4 = self.scheme in WEIGHT_INT4
        if self.group_size is not None and not int4:
            valid = f"scheme {self.scheme} has no groups; leave null, or use w4a16 or w4a8"
            yield Fault(("group_size",), self.group_size, valid)
        if not self.symmetric and self.scheme != "w4a16":
            yield Fault(("symmetric",), False, f"only scheme w4a16 has zero points; must be true for {self.scheme}")
        if self.grid == "symmetric7" and not (int4 and self.symmetric):
            given = self.scheme if self.symmetric else f"asymmetric {self.scheme}"
            yield Fault(("grid",), self.grid, f"is for symmetric w4a16 and w4a8; use compressed-tensors with {given}")
        if self.scheme == "bf16" and self.learner == "fake_quant":
            yield Fault(
                ("learner",), self.learner, "scheme bf16 has nothing to quantize; use aligned or full_precision"
            )
        if self.ste_input == "dequantized":
            if self.scheme not in QUANTIZED_ACTIVATIONS:
                yield Fault(("ste_input",), self.ste_input, f"scheme {self.scheme} keeps activations; use unquantized")
            elif self.learner == "full_precision":
                yield Fault(
                    ("ste_input",), self.ste_input, "learner full_precision quantizes no input; use unquantized"
                )
        ignore_faults = [fault for index, entry in enumerate(self.ignore) for fault in _ignore_faults(index, entry)]
        yield from ignore_faults
        if not ignore_faults and not is_ignored("lm_head", self.ignore):
            yield Fault(("ignore",), self.ignore, "must contain lm_head: the output layer is never quantized")

    def resolved(self) -> dict[str, Any]:
        if self.group_size is None and self.scheme in WEIGHT_INT4:
            return {"group_size": 128}
        return {}


def _ignore_faults(index: int, entry: str) -> Iterator[Fault]:
    if not entry.removeprefix("re:"):
        yield Fault(("ignore", index), entry, "must be an HF module name such as lm_head, or re:<regex>")
    if entry.startswith("re:"):
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error as error:
            yield Fault(("ignore", index), entry, f"is not a regular expression ({error})")


def scheme_of(quant: QuantConfig) -> Scheme:
    """How the section stores a Linear weight, and which activations it quantizes."""
    return make_scheme(quant.scheme, quant.group_size, quant.symmetric, quant.grid, quant.scale_dtype)
