"""`qarl generate`: complete a few prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from qarl.cli import options
from qarl.cli.arguments import option, stream_of, template_object
from qarl.inference.target import given, resolve_target
from qarl.inputs.limits import SAMPLES, TOKENS
from qarl.utils.threads import wait_politely


def generate(
    target: options.Policy,
    prompt: Annotated[list[str] | None, option("--prompt", "TEXT", "A prompt. Repeatable.")] = None,
    prompt_file: Annotated[Path | None, option("--prompt-file", "FILE", "UTF-8 file with a prompt.", stream_of)] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Wrap prompts in the chat template. Default: as the run, or the exported run, was trained; for "
            "another model, if it has one.",
        ),
    ] = None,
    system: Annotated[
        str | None, option("--system", "TEXT", "System message. Default: the run's data.system_prompt.")
    ] = None,
    chat_template_kwargs: options.TemplateKwargs = None,
    stop: Annotated[
        list[str] | None,
        option(
            "--stop", "TEXT", "Text that ends a completion. Repeatable. Default: the run's rollout.stop; '' for none."
        ),
    ] = None,
    n: Annotated[int, typer.Option(min=1, max=SAMPLES, help="Number of samples per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=TOKENS, help="Maximum tokens per completion.")] = 128,
    scheme: options.Scheme = None,
    group_size: options.GroupSize = None,
    kv_cache_dtype: options.KVCache = None,
    step: options.Step = None,
    model: options.MovedModel = None,
    verify_digests: options.VerifyDigests = True,
    device: options.Device = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per completion, with token ids and log-probs.")
    ] = False,
) -> None:
    """Complete prompts with a policy on the quantized tensors that it is served with.

    Prompts are used as given: a run's data.prompt_template is not applied.
    """
    quant = given(scheme=scheme, group_size=group_size, kv_cache_dtype=kv_cache_dtype)
    found = resolve_target(target, step=step, quant=quant, model=model, verify_digests=verify_digests)
    arguments = template_object(chat_template_kwargs)
    wait_politely()
    # Imports torch, so only once the target is known.
    from qarl.inference.generate import GenerateOptions, complete, gather_texts
    from qarl.terminal.run_console import RunConsole

    texts = gather_texts(prompt or [], prompt_file)
    stops = None if not stop else tuple(text for text in stop if text)
    wanted = GenerateOptions(chat, system, n, temperature, top_k, top_p, min_p, max_new_tokens, seed, stops, arguments)
    say = RunConsole("plain", stream=sys.stderr).message
    console = RunConsole("plain")
    for number, completed in enumerate(complete(found, texts, wanted, device, say)):
        if as_json:
            console.message(completed.as_json())
            continue
        if number:
            console.message("")
        console.message(completed.head())
        for line in completed.rollout.text.split("\n"):  # other control characters are escaped
            console.message(line)
