"""The `quant` section: the sampler's low-bit scheme, and how far the learner follows it."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError
from qarl_formats.registry import grouped_names, make_scheme, option_faults, scheme_class, scheme_names
from qarl_formats.scheme import CHANNEL, DEFAULT_GROUP_SIZE, GRIDS, GROUP_SIZES, SCALE_DTYPES, Scheme, is_ignored

from qarl.inputs.limits import ITEMS, NAME, SEQUENCES, TOKENS
from qarl.inputs.section import Fault, Field, PathName, Section

GROUPED = " and ".join(grouped_names())
ZERO_POINTS = " and ".join(scheme_names(lambda kind: kind.zero_points))
KVCacheDtype = Literal["auto", "fp8"]
# Keys of `quant` that only a learner reads, or that only count before the first step.
OF_TRAINING = {"learner", "ste_input", "backward", "init", "calibration"}
Init = Literal["rtn", "gptq", "awq"]
PYTHON_DOCS, PROMPTS = "python-docs", "prompts"  # values of `quant.calibration.source` that are not paths


def _known(name: str) -> str:
    """Validate a scheme's name like a `Literal`, but also accept schemes that are registered later."""
    names = scheme_names()
    if name not in names:
        *most, last = (f"'{known}'" for known in names)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})
    return name


class _Names:
    """The choices of a scheme's name, for the JSON schema."""

    @staticmethod
    def __get_pydantic_json_schema__(schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(scheme_names()), "type": "string"}


SchemeName = Annotated[str, Field(max_length=NAME), AfterValidator(_known), _Names]


if TYPE_CHECKING:
    GroupSize = int
    Grid = str
    ScaleDtype = str
else:
    GroupSize = Literal[*GROUP_SIZES, CHANNEL]
    Grid, ScaleDtype = Literal[*GRIDS], Literal[*SCALE_DTYPES]


def schemes_of_init(init: str) -> tuple[str, ...]:
    """The schemes that `quant.init` is for."""
    if init == "rtn":
        return scheme_names()
    return scheme_names(lambda kind: kind.chooses_codes and (init == "gptq" or kind.activation is None))


class CalibrationConfig(Section):
    """The text from which `quant.init` gptq and awq choose the first codes."""

    source: PathName = Field(
        PYTHON_DOCS,
        description=f"{PYTHON_DOCS}: Python's language reference, a part of CPython (pydoc_data.topics); {PROMPTS}: "
        "the run's own prompts; otherwise the path of a UTF-8 file.",
    )
    samples: int = Field(
        128,
        ge=1,
        le=SEQUENCES,
        description="Number of text windows, or of prompts with source: prompts. Fewer if the source has fewer.",
    )
    length: int = Field(
        256,
        ge=1,
        le=TOKENS,
        description="Tokens per window, at most the context. samples * length tokens are in memory at once.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed that chooses the windows, or the prompts.")


class QuantConfig(Section):
    """Quantization. The four regimes: scheme bf16 is BF16 RL; otherwise `learner` chooses quantized-rollout training
    (full_precision), QAT (fake_quant) or QaRL (aligned)."""

    scheme: SchemeName = Field(
        "w4a16",
        description="Quantization scheme of the sampler: w4a16 has 4-bit weights and 16-bit activations. Weight "
        "scales: per group (w4*), per channel (w8a8, fp8), per 128 x 128 block (fp8_block), per group of "
        "16 (nvfp4a16). Quantized activations have one scale per token (fp8_block: per token and 128 "
        "features).",
    )
    group_size: GroupSize | None = Field(
        None,
        description=f"Input features that share a scale, for {GROUPED} (default {DEFAULT_GROUP_SIZE}; -1: one group "
        "per channel); must divide the input size of every quantized layer. Null for other schemes.",
    )
    symmetric: bool = Field(True, description=f"Quantize without zero points; false is for {ZERO_POINTS} only.")
    grid: Grid = Field(
        GRIDS[0],
        description="int4 codes and scale. compressed-tensors: -8 to 7, scale absmax / 7.5; symmetric7: -7 to 7, scale "
        "absmax / 7 (only w4* with symmetric: true).",
    )
    scale_dtype: ScaleDtype = Field(
        SCALE_DTYPES[0], description="Dtype in which scales are stored. Codes are computed with the rounded scale."
    )
    ignore: list[Annotated[str, Field(max_length=NAME)]] = Field(
        ["lm_head"],
        max_length=ITEMS,
        description="Linear layers left unquantized: exact HF module names, or `re:<regex>`.",
    )
    init: Init = Field(
        "rtn",
        description="How the initial codes are chosen. rtn: round to nearest; gptq: minimize the error of the layers' "
        f"outputs on a calibration text ({', '.join(schemes_of_init('gptq'))}); awq: round to nearest after "
        f"scaling input channels ({', '.join(schemes_of_init('awq'))}). gptq and awq need one process and a "
        "model without experts.",
    )
    calibration: CalibrationConfig = Field(
        default_factory=CalibrationConfig, description="Calibration text of init: gptq and awq."
    )
    learner: Literal["aligned", "fake_quant", "full_precision"] = Field(
        "aligned",
        description="The learner's forward: the sampler's low-bit arithmetic (aligned), dequantized weights in an "
        "ordinary GEMM (fake_quant), or unquantized weights (full_precision).",
    )
    ste_input: Literal["unquantized", "dequantized"] = Field(
        "unquantized",
        description="Input that the straight-through estimator's weight gradient uses: the original activations, or "
        "the quantized and dequantized ones (only schemes that quantize activations).",
    )
    backward: Literal["bf16", "fp8"] = Field(
        "bf16",
        description="Precision of dX = dY W and dW = dY^T X. bf16: the learner's dtype; fp8: e4m3 with one scale per "
        "row, faster and noisier, on a GPU of compute capability 8.9 or later; routed experts stay in bf16. See "
        "diagnostics.backward_every.",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="Dtype of the sampler's KV cache. auto: model.dtype; fp8: e4m3 with a scale of 1, half the memory, "
        "on a GPU of compute capability 8.9 or later. An aligned or fake_quant learner rounds keys and values the same "
        "way.",
    )
    kernels: Literal["auto", "reference"] = Field(
        "auto",
        description="auto: Triton kernels on CUDA (bfloat16 and float16); reference: plain torch, for debugging. The "
        "CPU and model.dtype float32 always use plain torch.",
    )

    @property
    def label(self) -> str:
        """Name of the sampler's scheme for reports."""
        return self.scheme + (", FP8 KV cache" if self.kv_cache_dtype == "fp8" else "")

    def faults(self) -> Iterator[Fault]:
        kind = scheme_class(self.scheme)
        for key, text in option_faults(self.scheme, self.group_size, self.symmetric, self.grid):
            yield self.fault(key, text)
        if kind.weight_bits is None and self.learner == "fake_quant":
            yield self.fault("learner", f"scheme {self.scheme} has nothing to quantize; use aligned or full_precision")
        if self.scheme not in (possible := schemes_of_init(self.init)):
            yield self.fault("init", f"is for {', '.join(possible)}, not {self.scheme}; use rtn")
        if self.backward == "fp8" and self.kernels == "reference":
            yield self.fault("backward", "kernels: reference has no FP8 matrix products; use bf16")
        if self.ste_input == "dequantized":
            if kind.activation is None:
                text = f"scheme {self.scheme} does not quantize activations; use unquantized"
                yield self.fault("ste_input", text)
            elif self.learner == "full_precision":
                text = "learner full_precision does not quantize activations; use unquantized"
                yield self.fault("ste_input", text)
        ignore_faults = [fault for index, entry in enumerate(self.ignore) for fault in _ignore_faults(index, entry)]
        yield from ignore_faults
        if not ignore_faults and not is_ignored("lm_head", self.ignore):
            yield self.fault("ignore", "must contain lm_head: the output layer is never quantized")

    def resolved(self) -> dict[str, Any]:
        if self.group_size is None and scheme_class(self.scheme).group_sizes:
            return {"group_size": DEFAULT_GROUP_SIZE}
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
    """Return the scheme that the section configures."""
    return make_scheme(quant.scheme, quant.group_size, quant.symmetric, quant.grid, quant.scale_dtype)
