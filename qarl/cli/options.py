"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from qarl.cli.arguments import name_of, path_of, text_of
from qarl.config.data import TEMPLATE_OPTION
from qarl.config.quant import GROUPED, KVCacheDtype
from qarl.inputs.limits import SEQUENCES, STEPS, VOCABULARY

Scheme = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        parser=text_of("--scheme"),
        metavar="SCHEME",
        help="Quantization scheme. Default: the run's or checkpoint's; bf16 for a model.",
    ),
]
GroupSize = Annotated[int | None, typer.Option(min=-1, max=128, help=f"Group size of {GROUPED}: 32, 64, 128 or -1.")]
KVCache = Annotated[
    KVCacheDtype | None,
    typer.Option("--kv-cache-dtype", help="dtype of the KV cache. Default: as in training, else auto."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        parser=path_of("--calibration"),
        metavar="FILE",
        help="Calibration text of gptq and awq, a UTF-8 file. Default: the language reference that CPython carries.",
    ),
]
CalibrationSamples = Annotated[
    int | None,
    typer.Option(
        min=1, max=SEQUENCES, help="Windows of 256 tokens that gptq and awq read. Default: 128.", show_default=False
    ),
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        TEMPLATE_OPTION,
        parser=text_of(TEMPLATE_OPTION),
        metavar="TEXT",
        help="Arguments of the chat template as a JSON object, such as '{\"enable_thinking\": false}'. Default: the "
        "run's.",
    ),
]
TopK = Annotated[int, typer.Option(min=0, max=VOCABULARY, help="Sample from the k most probable tokens. 0: off.")]
TopP = Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability. 1: off.")]
MinP = Annotated[
    float, typer.Option(help="Drop tokens less probable than this fraction of the most probable one. 0: off.")
]
Step = Annotated[int | None, typer.Option(min=0, max=STEPS, help="Checkpoint of a run. Default: the newest.")]
MovedModel = Annotated[
    str | None,
    typer.Option(
        "--model", parser=name_of("--model"), metavar="MODEL", help="New location of the run's base model, if it moved."
    ),
]
VerifyDigests = Annotated[
    bool,
    typer.Option(
        "--verify-digests/--no-verify-digests",
        help="Check an exported directory (tensors, configuration, tokenizer) against its qarl_export.json.",
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if available.")]
