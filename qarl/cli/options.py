"""Options shared by several commands."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from qarl.cli.arguments import name_of, text_of
from qarl.config.data import TEMPLATE_OPTION
from qarl.config.limits import STEPS
from qarl.config.quant import GROUPED, KVCacheDtype

Scheme = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        parser=text_of("--scheme"),
        metavar="SCHEME",
        help="Default: the run's or checkpoint's; for a model bf16.",
    ),
]
GroupSize = Annotated[int | None, typer.Option(min=-1, max=128, help=f"Of {GROUPED}: 32, 64, 128 or -1.")]
KVCache = Annotated[
    KVCacheDtype | None,
    typer.Option("--kv-cache-dtype", help="What the KV cache holds; default: as the run was trained, else auto."),
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        TEMPLATE_OPTION,
        parser=text_of(TEMPLATE_OPTION),
        metavar="TEXT",
        help="Arguments of the chat template as a JSON object, such as '{\"enable_thinking\": false}'. Default: the "
        "run's own.",
    ),
]
Step = Annotated[int | None, typer.Option(min=0, max=STEPS, help="Which checkpoint of a run; default the newest.")]
MovedModel = Annotated[
    str | None,
    typer.Option(
        "--model", parser=name_of("--model"), metavar="MODEL", help="Where the run's base model is now, if it moved."
    ),
]
VerifyDigests = Annotated[
    bool,
    typer.Option(
        "--verify-digests/--no-verify-digests",
        help="Compare an exported directory with its qarl_export.json: tensors, configuration, tokenizer.",
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA where there is one.")]
