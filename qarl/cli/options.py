"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from qarl.cli.arguments import argument, name_of, option, path_of
from qarl.config.data import TEMPLATE_OPTION
from qarl.config.quant import GROUPED, KVCacheDtype
from qarl.inputs.limits import SEQUENCES, STEPS, VOCABULARY

Policy = Annotated[str, argument("RUN|CHECKPOINT|MODEL", "Run, one of its checkpoints, export, or model.", name_of)]
Scheme = Annotated[
    str | None,
    option("--scheme", "SCHEME", "Quantization scheme. Default: the run's or checkpoint's; bf16 for a model."),
]
GroupSize = Annotated[int | None, typer.Option(min=-1, max=128, help=f"Group size of {GROUPED}: 32, 64, 128 or -1.")]
KVCache = Annotated[
    KVCacheDtype | None,
    typer.Option(help="Dtype of the KV cache. Default: as in training for a run or its export; auto for a model."),
]
Calibration = Annotated[
    Path | None,
    option(
        "--calibration",
        "FILE",
        "UTF-8 text file that gptq and awq calibrate on. Default: Python's language reference, a part of CPython.",
        path_of,
    ),
]
CalibrationSamples = Annotated[
    int | None,
    typer.Option(min=1, max=SEQUENCES, help="Number of windows of 256 tokens that gptq and awq read. Default: 128."),
]
TemplateKwargs = Annotated[
    str | None,
    option(
        TEMPLATE_OPTION,
        "TEXT",
        "Arguments of the chat template as a JSON object, such as '{\"enable_thinking\": false}'. Default: the run's.",
    ),
]
TopK = Annotated[int, typer.Option(min=0, max=VOCABULARY, help="Sample from the k most probable tokens. 0: off.")]
TopP = Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability. 1: off.")]
MinP = Annotated[
    float, typer.Option(help="Drop tokens less probable than this fraction of the most probable one. 0: off.")
]
Step = Annotated[
    int | None, typer.Option(min=0, max=STEPS, help="Training step of a run's checkpoint. Default: the newest.")
]
MovedModel = Annotated[
    str | None, option("--model", "MODEL", "New location of the run's base model, if it moved.", name_of)
]
VerifyDigests = Annotated[
    bool,
    typer.Option(help="Check an exported checkpoint (tensors, configuration, tokenizer) against its qarl_export.json."),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if available.")]
